"""How much memory a layer of a `TikvCache` has: it grows with the text, and tokens outside a window are dropped."""

from __future__ import annotations

from typing import Any

from tikv.integrations.transformers.ready import ReadyLayer
from tikv.stores.layers.growing import GrowingLayer

FIRST_CAPACITY = 256  # slots that a growing layer starts with, and the fewest by which it grows
GROWTH = 8  # memory grows by one slot per this many tokens, so a token is copied at most this often
ROLLBACK = 64  # tokens a sliding layer can always be cropped by, beyond its window
SPARE = 128  # room for this many more tokens, or a quarter of its window, before tokens are moved to the front


class LayerRoom(ReadyLayer):
    """The part of a `TikvLayer` that makes room.

    Attributes:
        has_prompt_room: whether there is more room than a window needs, see `let_go_of_prompt`.
    """

    is_sliding: bool
    record_past: bool
    has_prompt_room: bool
    _past: int  # how many tokens before the newest a query sees
    _settled: int  # no rollback goes back beyond this position
    _staged: dict[str, Any]

    def _attach(self) -> None:
        raise NotImplementedError

    def _recall(self) -> None:
        raise NotImplementedError

    def _room_for(self, tokens: int) -> int:
        """How many slots to have for `tokens` tokens."""
        if self.is_sliding:
            usual = self._past + ROLLBACK + max(SPARE, self._past // 4)
            usual = usual if self.limit is None else min(usual, self.limit)
            # A chunk beyond the usual room gets extra room, which is given back when the next tokens come.
            return usual if tokens <= usual else tokens + usual
        if self.limit is not None:
            return self.limit
        if tokens <= FIRST_CAPACITY:
            return FIRST_CAPACITY
        return tokens + max(FIRST_CAPACITY, tokens // GROWTH)

    def _usual_room(self) -> int | None:
        """How many slots the layer needs except for prompts; None if it never has more for them."""
        return self._room_for(0) if self.is_sliding else None

    def _bound_of(self, store: GrowingLayer) -> int:
        """How many tokens there are slots for, within `limit`."""
        return store.capacity if self.limit is None else min(store.capacity, self.limit - store.origin)

    def _left_behind(self) -> int:
        """How many of the oldest held tokens no later query or rollback needs."""
        store = self.store
        if store is None or not self.is_sliding:
            return 0
        settled = self._settled if self.record_past else store.end - ROLLBACK
        return max(0, settled - self._past - store.origin)

    def _make_room(self, tokens: int) -> None:
        """Drop tokens outside the window, and grow if that does not make enough room."""
        store = self.store
        assert store is not None
        self._refuse_beyond_limit(tokens)
        drop = self._left_behind()
        needed = store.length - drop + tokens
        capacity = self._room_for(needed)
        if self.is_sliding and capacity > needed and store.capacity >= needed and capacity > store.capacity:
            capacity = store.capacity
        store.make_room(capacity=capacity, drop=drop)
        self._attach()

    def let_go_of_prompt(self) -> None:
        """After attention to a prompt, give back the memory of tokens that no later query or rollback needs.

        What `update` returned does not change: it refers to the old memory for as long as it is referenced.
        """
        store = self.store
        if store is None or self._staged:
            return
        drop = self._left_behind()
        capacity = self._room_for(store.length - drop)
        if capacity < store.capacity:
            self._recall()
            store.make_room(capacity=capacity, drop=drop)
            self._attach()
