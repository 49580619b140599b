"""`TikvSnapshot`: what a `TikvCache` held at some time, to which it can go back any number of times.

Later tokens do not change the first rows of a full layer, so a snapshot only marks how many there are. A layer that is
about to change such rows, by a crop below the mark, a reset or other sequences, first lets the mark take a copy. Rings,
groups along tokens and states change with each token, and are copied at once.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterator
from typing import Any

from tikv import runtime
from tikv.errors import OptionError
from tikv.integrations.transformers.cache.files import parts_of
from tikv.integrations.transformers.layers.layer import TikvLayer
from tikv.integrations.transformers.memory.state_copies import StateCopies
from tikv.integrations.transformers.names import CACHE
from tikv.stores.picture import counted, size_in_words


class TikvSnapshot(runtime.NotCopied):
    """What a cache held when `TikvCache.snapshot` was called.

    Attributes:
        length: how many tokens it had.
    """

    instead = "Restore it into its cache, and save() or copy.deepcopy() the cache."

    def __init__(self, cache: Any) -> None:
        self._cache: Any = weakref.ref(cache)
        self.length = int(cache.get_seq_length())
        copies = StateCopies()
        self._parts = {part: [_saved(layer, copies) for layer in layers] for part, layers in parts_of(cache).items()}
        copies.make()
        self._updated = copy.copy(getattr(cache, "is_updated", None))

    @property
    def nbytes(self) -> int:
        """Bytes that were copied so far."""
        return sum(saved.nbytes for saved in self._all())

    def _all(self) -> Iterator[Any]:
        return (saved for part in self._parts.values() for saved in part)

    def restore(self, cache: Any) -> None:
        """`TikvCache.restore` of this snapshot: let the cache hold again what it held.

        Raises:
            OptionError: the snapshot was taken of another cache. Nothing is changed.
        """
        if self._cache() is not cache:
            raise OptionError(
                f"{CACHE}.restore: {self!r} was taken of another cache. Pass a snapshot of this one; for a cache "
                f"of its own, use copy.deepcopy() of the cache that it was taken of."
            )
        copies = StateCopies()
        for part, layers in parts_of(cache).items():
            layers[:] = [saved.back(layer, copies) for saved, layer in zip(self._parts[part], layers, strict=True)]
        copies.make()
        if self._updated is not None:
            cache.is_updated = copy.copy(self._updated)

    def __repr__(self) -> str:
        return f"TikvSnapshot({counted(self.length, 'token')}, {size_in_words(self.nbytes)} copied)"


class _Nothing:
    """Of a layer that caches nothing."""

    nbytes = 0

    def back(self, layer: Any, copies: StateCopies) -> Any:
        return layer


class _Mark:
    """Of a layer whose first tokens stay as they are: how many there are, or a copy once they are about to change."""

    def __init__(self, layer: TikvLayer) -> None:
        self.length = layer.get_seq_length()
        self._copy: Any = None
        layer.marks.add(self)

    @property
    def nbytes(self) -> int:
        return 0 if self._copy is None else _bytes_of(self._copy)

    def keep(self, layer: TikvLayer) -> None:
        """Copy the layer, which is about to change."""
        self._copy = _copied(layer, self.length)
        layer.marks.discard(self)

    def back(self, layer: TikvLayer, copies: StateCopies) -> TikvLayer:
        """A layer that holds the marked tokens: this one, or a copy of the copy."""
        if self._copy is not None:
            layer.before_change(0)
            return _copied(self._copy, self.length)
        if layer.get_seq_length() != self.length:
            layer.cut(self.length)
        return layer


class _Copy:
    """Of a layer whose memory changes with each token."""

    def __init__(self, layer: Any) -> None:
        self._copy = copy.deepcopy(layer)

    @property
    def nbytes(self) -> int:
        return _bytes_of(self._copy)

    def back(self, layer: Any, copies: StateCopies) -> Any:
        return copy.deepcopy(self._copy)


class _State:
    """Of a layer that keeps a state: the state, which is copied, and its keys if it has some."""

    def __init__(self, layer: Any, copies: StateCopies) -> None:
        self._keys = _keys_of(layer)
        before = copies.nbytes
        self._state = copies.copied(layer.state())
        self._state_bytes = copies.nbytes - before

    @property
    def nbytes(self) -> int:
        return int(self._keys.nbytes) + self._state_bytes

    def back(self, layer: Any, copies: StateCopies) -> Any:
        layer = self._keys.back(layer, copies)
        layer.set_state(self._state, copies)
        return layer


def _saved(layer: Any, copies: StateCopies) -> Any:
    return _State(layer, copies) if hasattr(layer, "set_state") else _keys_of(layer)


def _keys_of(layer: Any) -> Any:
    if not isinstance(layer, TikvLayer):
        return _Nothing()
    return _Mark(layer) if layer.keeps_rows else _Copy(layer)


def _copied(layer: TikvLayer, length: int) -> TikvLayer:
    """A copy of a layer, with its first tokens only."""
    copied = copy.deepcopy(layer)
    if copied.get_seq_length() != length:
        copied.cut(length)
    return copied


def _bytes_of(layer: TikvLayer) -> int:
    store, indexer = layer.store, getattr(layer, "_indexer", None)
    return (0 if store is None else int(store.nbytes)) + (0 if indexer is None else int(indexer.nbytes))
