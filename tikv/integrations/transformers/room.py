"""How much memory a layer of a `TikvCache` has: it grows with the text, and lets go of what a window leaves behind."""

from __future__ import annotations

from typing import Any

from tikv.integrations.transformers.ready import ReadyLayer
from tikv.stores.layers.growing import GrowingLayer

FIRST_CAPACITY = 256  # slots that a growing layer starts with, and the fewest by which it grows
GROWTH = 8  # for so many tokens there is room for one more: a token is copied as often at most
ROLLBACK = 64  # tokens a sliding layer can always be cropped by, beyond its window
SPARE = 128  # and has room for, or for a quarter of its window, before tokens are moved to the front


class LayerRoom(ReadyLayer):
    """The part of a `TikvLayer` that makes room.

    Attributes:
        has_prompt_room: whether there is more of it than a window needs, see `let_go_of_prompt`.
    """

    is_sliding: bool
    record_past: bool
    has_prompt_room: bool
    _past: int  # tokens before the newest that it sees
    _settled: int  # no rollback goes behind this position
    _staged: dict[str, Any]

    def _attach(self) -> None:
        raise NotImplementedError

    def _recall(self) -> None:
        raise NotImplementedError

    def _room_for(self, tokens: int) -> int:
        """Slots to have for so many tokens."""
        if self.is_sliding:
            usual = self._past + ROLLBACK + max(SPARE, self._past // 4)
            usual = usual if self.limit is None else min(usual, self.limit)
            # A chunk beyond the usual room gets room for itself, which goes back when the next tokens come.
            return usual if tokens <= usual else tokens + usual
        if self.limit is not None:
            return self.limit
        if tokens <= FIRST_CAPACITY:
            return FIRST_CAPACITY
        return tokens + max(FIRST_CAPACITY, tokens // GROWTH)

    def _usual_room(self) -> int | None:
        """Slots beyond which the layer has room that only a prompt needs; None where it never has."""
        return self._room_for(0) if self.is_sliding else None

    def _bound_of(self, store: GrowingLayer) -> int:
        """Tokens that may be held as things are: that there are slots for, and that `limit` allows."""
        return store.capacity if self.limit is None else min(store.capacity, self.limit - store.origin)

    def _left_behind(self) -> int:
        """Oldest tokens held that no query and no rollback will ask for."""
        store = self.store
        if store is None or not self.is_sliding:
            return 0
        settled = self._settled if self.record_past else store.end - ROLLBACK
        return max(0, settled - self._past - store.origin)

    def _make_room(self, tokens: int) -> None:
        """Let go of what the window has left behind, and grow where that is not enough."""
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
        """Once a prompt was attended to, give back the memory of what no later query and no rollback will ask for.

        What `update` returned stays as it is, in the memory before, for as long as something has it.
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
