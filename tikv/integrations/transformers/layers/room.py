"""How much memory a layer of a `TikvCache` has: it grows with the text, and tokens outside a window are dropped."""

from __future__ import annotations

from typing import NamedTuple

from tikv.errors import CapacityError

FIRST_CAPACITY = 256  # slots that a growing layer starts with, and the fewest by which it grows
GROWTH = 8  # memory grows by one slot per this many tokens, so a token is copied at most this often
ROLLBACK = 64  # tokens a sliding layer can always be cropped by, beyond its window
SPARE = 128  # room for this many more tokens, or a quarter of its window, before tokens are moved to the front


class Room(NamedTuple):
    """How many slots a layer has.

    Attributes:
        usual: how many it needs except for prompts; None if it grows with the text.
        most: how many it has at most except for prompts; None for any number.
        limit: how many tokens a sequence may have; None for any number.
    """

    usual: int | None = None
    most: int | None = None
    limit: int | None = None

    @classmethod
    def of(cls, window: int | None, limit: int | None, sinks: int | None = None) -> Room:
        """The room of a layer with this window or None; one with `sinks` is a ring, without more than its window."""
        if window is None:
            return cls(limit=limit)
        if sinks is not None:
            return cls(most=window)
        past = max(0, window - 1)
        usual = past + ROLLBACK + max(SPARE, past // 4)
        return cls(usual if limit is None else min(usual, limit), limit=limit)

    @property
    def after_prompt(self) -> int | None:
        """How many slots a layer has once attention to a prompt is over; None if it never has more for one."""
        return self.usual if self.most is None else self.most + ROLLBACK

    def slots_for(self, tokens: int) -> int:
        """How many slots to have for `tokens` tokens."""
        if self.usual is not None:
            # A chunk beyond the usual room gets extra room, which is given back when the next tokens come.
            return self.usual if tokens <= self.usual else tokens + self.usual
        if self.limit is not None:
            return self.limit
        slots = FIRST_CAPACITY if tokens <= FIRST_CAPACITY else tokens + max(FIRST_CAPACITY, tokens // GROWTH)
        return slots if self.most is None else max(tokens, min(self.most, slots))

    def bound(self, capacity: int, origin: int) -> int:
        """How many tokens there are slots for, within `limit`, if the first is at position `origin`."""
        return capacity if self.limit is None else min(capacity, self.limit - origin)

    def refuse_beyond(self, name: str, held: int, tokens: int) -> None:
        """Raise CapacityError if a layer with `held` tokens cannot take `tokens` more within `limit`."""
        if self.limit is not None and held + tokens > self.limit:
            raise CapacityError(
                f"{name}: {held} cached + {tokens} new tokens exceed max_cache_len={self.limit}. Nothing was written. "
                f"Use a larger max_cache_len, or leave it out to let the cache grow."
            )
