"""Layers of a `TikvCache` whose model chooses, by keys of an indexer, which tokens a query reads."""

from __future__ import annotations

from typing import Any

import torch

from tikv.errors import OptionError
from tikv.integrations.transformers.layers.layer import TikvLayer


class IndexerKeys:
    """The keys that an indexer scores queries against, one row per token, in torch's memory with room for more.

    Attributes:
        length: how many tokens are held.
    """

    def __init__(self) -> None:
        self._memory: Any = None  # (batch, room, width)
        self.length = 0

    @property
    def rows(self) -> Any:
        """(batch, tokens, width), in place; None before the first."""
        return None if self._memory is None else self._memory[:, : self.length]

    @property
    def nbytes(self) -> int:
        """Bytes of the memory, filled or not."""
        return 0 if self._memory is None else int(self._memory.nbytes)

    def append(self, new: Any, room: int) -> Any:
        """Append (batch, T, width) rows, and return all rows. New memory has room for `room` rows."""
        end = self.length + new.shape[1]
        memory = self._memory
        if memory is None or not self.length or end > memory.shape[1] or new.dtype is not memory.dtype:
            self._make_room(new, room)
        with torch.no_grad():
            self._memory[:, self.length : end] = new
        self.length = end
        return self.rows.clone() if torch.is_grad_enabled() else self.rows

    def _make_room(self, new: Any, room: int) -> None:
        held = self.rows if self.length else new[:, :0]
        batch, _, width = new.shape
        dtype = torch.promote_types(held.dtype, new.dtype)
        with torch.inference_mode(False), torch.no_grad():  # such tensors cannot be written to outside that mode
            memory = torch.empty((batch, room, width), dtype=dtype, device=new.device)
            memory[:, : self.length] = held
        self._memory = memory

    def cut(self, length: int) -> None:
        """Keep the first `length` rows and drop the others."""
        self.length = min(self.length, length)

    def forget(self) -> None:
        """Drop all rows."""
        self._memory, self.length = None, 0

    def choose(self, sequences: Any) -> None:
        """Let each sequence b have what sequence ``sequences[b]`` has."""
        if self._memory is not None:
            with torch.inference_mode(False), torch.no_grad():
                self._memory = self._memory[sequences.to(self._memory.device)]

    def copied(self) -> IndexerKeys:
        """A copy of the rows, in its own memory."""
        copied = IndexerKeys()
        copied.length = self.length
        copied._memory = None if self._memory is None else self._memory.clone()
        return copied


class IndexedLayer(TikvLayer):
    """`TikvLayer` with the keys of an indexer, which are dropped, moved and copied as keys and values are.

    Args:
        index, window, max_cache_len, dtype, config: as in `TikvLayer`.

    Attributes:
        indexer_position_ids: positions that some models keep for their indexer, (axes, batch, tokens), or None.
    """

    is_replayable = False

    def __init__(self, index: int, window: int | None, max_cache_len: int | None, dtype: Any, config: Any) -> None:
        self._indexer = IndexerKeys()
        super().__init__(index, window, max_cache_len, dtype, config)
        self.indexer_position_ids: Any = None

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Any, Any]:
        """As `TikvLayer.update`; values may have no width if keys contain everything."""
        if value_states.shape[-1]:
            return super().update(key_states, value_states)
        keys, values = super().update(key_states, key_states[..., :1])
        return keys, values[..., :0]

    def update_indexer(self, indexer_key_states: Any) -> Any:
        """Append keys of the indexer, (batch, tokens, width), and return all of them.

        Models call it before or after `update`. Rows of tokens that `update` refused are dropped.

        Raises:
            CapacityError: there would be more than ``max_cache_len`` tokens. Nothing is written.
        """
        self._indexer.cut(self.get_seq_length())
        if self._indexer.length == self.get_seq_length():  # their keys and values come later
            self.refuse_beyond_limit(indexer_key_states.shape[1])
        room = self.room.slots_for(self._indexer.length + indexer_key_states.shape[1])
        return self._indexer.append(indexer_key_states, room)

    def update_index(self, idx_k: Any) -> Any:
        """`update_indexer` under the name and in the form that MiniMax M3 uses: (batch, 1, tokens, width)."""
        return self.update_indexer(idx_k[:, 0])[:, None]

    @property
    def indexer_keys(self) -> Any:
        """(batch, tokens, width); None before the first."""
        return self._indexer.rows

    def reset(self) -> None:
        """As `TikvLayer.reset`, of both."""
        super().reset()
        self._indexer.forget()
        self.indexer_position_ids = None

    def compact(self, keep: Any) -> None:
        """Raise OptionError, since the indexer chooses keys by their numbers.

        Raises:
            OptionError: always.
        """
        raise OptionError(
            f"{self._name}: compact() would drop keys that the indexer still chooses by their numbers. Crop the cache, "
            f"or reset()."
        )

    def _set(self, which: str, tensor: torch.Tensor) -> None:
        """As `TikvLayer._set`, for as many tokens as the indexer has keys.

        Raises:
            OptionError: their number differs. Nothing is changed.
        """
        if tensor is None:
            self._indexer.forget()
        elif self._indexer.length not in (0, tensor.shape[2]):
            raise OptionError(
                f"{self._name}: {which} cannot be set to {tensor.shape[2]} tokens, since the indexer has "
                f"{self._indexer.length} keys and chooses among them by number. Set as many tokens, or reset() first."
            )
        super()._set(which, tensor)

    def cut(self, length: int) -> None:
        """As `TikvLayer.cut`, of both."""
        super().cut(length)
        self._indexer.cut(length)
        if self.indexer_position_ids is not None:
            self.indexer_position_ids = self.indexer_position_ids[..., :length]

    def _follow_rows(self, rows: torch.Tensor, batch: int) -> None:
        if not batch:
            return
        self._indexer.choose(rows)
        positions = self.indexer_position_ids
        if positions is not None and positions.shape[1] == batch:  # and not one row for all of them
            self.indexer_position_ids = positions[:, rows.to(positions.device)]

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        layer: Any = super().__deepcopy__(memo)
        layer._indexer = self._indexer.copied()
        layer.indexer_position_ids = None if self.indexer_position_ids is None else self.indexer_position_ids.clone()
        return layer

    def __repr__(self) -> str:
        return f"{super().__repr__()[:-1]}, and keys of an indexer)"
