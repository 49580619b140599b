"""The only cache class: it keeps objects that are made once per key."""

from __future__ import annotations

from typing import Any, TypeVar

K = TypeVar("K")
V = TypeVar("V")

MAX_ENTRIES = 4096


class BoundedCache(dict[K, V]):
    """Objects that are made once per key: a dict of at most `limit` entries, emptied when one more would not fit.

    A cache has one owner (a runtime, a store, a graph, this process) and ends with it; the owner calls `clear()` when
    something changes that its entries depend on. A forgotten object is made again when it is needed, so clearing costs
    only time: keys that never come back, such as the shapes of one prompt, cannot fill the memory. A lookup is
    `cache.get(key)`, at the speed of a dict.

    Examples:
        >>> squares = BoundedCache(limit=2)
        >>> squares.keep(3, 9), squares.keep(4, 16), dict(squares)
        (9, 16, {3: 9, 4: 16})
        >>> squares.keep(5, 25), dict(squares)
        (25, {5: 25})
    """

    __slots__ = ("limit",)

    def __init__(self, limit: int = MAX_ENTRIES) -> None:
        super().__init__()
        self.limit = limit

    def __deepcopy__(self, memo: dict[int, Any]) -> BoundedCache[K, V]:
        """An empty cache, since its entries depend on objects that are copied with it."""
        return type(self)(self.limit)

    def keep(self, key: K, value: V) -> V:
        """Store a value and return it; if another thread has just stored one for this key, that one stays."""
        if len(self) >= self.limit and key not in self:
            self.clear()
        return self.setdefault(key, value)

    def __setitem__(self, key: K, value: V) -> None:
        """Store a value, replacing the one for this key if there is one."""
        if len(self) >= self.limit and key not in self:
            self.clear()
        dict.__setitem__(self, key, value)
