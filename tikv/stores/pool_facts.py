"""What a paged store is and how full it is: facts of its form and counts, kept on the host, and its picture."""

from __future__ import annotations

from typing import Any

import numpy as np

from tikv import runtime
from tikv.arrays import CacheArray
from tikv.dtypes import DType
from tikv.errors import DTypeError, OptionError
from tikv.formats import GroupFormat
from tikv.ops import checks
from tikv.stores import draw
from tikv.stores.head_sequences import HeadSequences
from tikv.stores.layer_pools import LayerPools
from tikv.stores.pool_form import PoolForm
from tikv.stores.sequences import Sequences, SequenceState
from tikv.stores.storage import Divisors, counted, size_in_words
from tikv.stores.whole import StoreLock, whole


class PoolFacts(draw.Drawn):
    """The part of `PagedKVCacheStore` that only looks. Reading any of it never waits for the device."""

    runtime: runtime.Runtime
    lock: StoreLock
    num_layers: int
    form: PoolForm
    _pools: LayerPools
    _sequences: Sequences

    @property
    def num_kv_heads(self) -> int:
        """Heads of K and V."""
        return self.form.num_kv_heads

    @property
    def head_dim(self) -> int:
        """Width of a head of K."""
        return self.form.head_dim

    @property
    def head_dim_v(self) -> int:
        """Width of a head of V."""
        return self.form.head_dim_v

    @property
    def num_blocks(self) -> int:
        """Blocks of the pool."""
        return self.form.num_blocks

    @property
    def block_size(self) -> int:
        """Tokens of a block."""
        return self.form.block_size

    @property
    def dtype(self) -> DType | GroupFormat:
        """What keys are stored in, and values unless `v_dtype` says otherwise."""
        return self.form.dtype

    @property
    def v_dtype(self) -> DType | GroupFormat:
        """What values are stored in."""
        return self.form.v_dtype

    @property
    def divisors(self) -> Divisors:
        """What rows of K and of V are divided by: (1,) or (H,) numbers each, or None."""
        return self.form.divisors

    @property
    def layout(self) -> str:
        """The layout of a layer's pools."""
        return self.form.layout

    @property
    def nbytes(self) -> int:
        """Bytes of keys, values and scales of all layers, filled or not."""
        return self._pools.nbytes

    @property
    @whole
    def sequences(self) -> list[int]:
        """The sequences there are, in the order they came."""
        return list(self._sequences.states)

    @property
    @whole
    def context_lens(self) -> np.ndarray[Any, Any]:
        """(len(sequences),) int32: `length` of each of `sequences`, on the host."""
        return np.array([state.length for state in self._sequences.states.values()], np.int32)

    @property
    @whole
    def num_free_blocks(self) -> int:
        """Blocks that no sequence holds; with ``per_head``, in the layer that has fewest."""
        return self._sequences.num_free

    @property
    @whole
    def num_shared_blocks(self) -> int:
        """Blocks that more than one sequence holds."""
        return self._sequences.blocks.num_shared

    @whole
    def length(self, seq: int) -> int:
        """Tokens of a sequence, shared ones included; while a step is under way, those of the layers ahead."""
        return self._state(seq, "PagedKVCacheStore.length", swapped=True).length

    @whole
    def layer_length(self, layer: int, seq: int) -> int:
        """Tokens that came to one layer of a sequence; `held` is what it holds of them."""
        operation = "PagedKVCacheStore.layer_length"
        return self._state(seq, operation, swapped=True).came(self._layer(layer, operation))

    @whole
    def next_position(self, layer: int, seq: int) -> int:
        """Where the next token stands: at `layer_length`, unless `compact` turned keys to other positions."""
        operation = "PagedKVCacheStore.next_position"
        state, layer = self._state(seq, operation, swapped=True), self._layer(layer, operation)
        return state.lengths[layer] + state.shift(layer)

    @whole
    def block_table(self, seq: int, layer: int | None = None) -> np.ndarray[Any, Any]:
        """(blocks,) int32: the blocks of a sequence in order, a copy on the host.

        With ``per_head`` (H, most blocks), those of each head in a layer, padded with -1; that needs ``layer``.
        """
        operation = "PagedKVCacheStore.block_table"
        state = self._state(seq, operation)
        if not isinstance(self._sequences, HeadSequences):
            return np.array(state.blocks, np.int32)
        if layer is None:
            raise OptionError(f"{operation}: with per_head=True each layer has its own blocks. Say which layer.")
        tables, _ = self._sequences.tables(self._layer(layer, operation), [state])
        found: np.ndarray[Any, Any] = tables[0]
        return found

    @whole
    def held(self, layer: int, seq: int) -> Any:
        """Tokens of a sequence that one layer can read: an int; with ``per_head`` (H,) int32, of each head."""
        operation = "PagedKVCacheStore.held"
        layer, state = self._layer(layer, operation), self._state(seq, operation, swapped=True)
        if isinstance(self._sequences, HeadSequences):
            return self._sequences.held(layer, state)
        return state.lengths[layer]

    @whole
    def positions(self, layer: int, seq: int) -> np.ndarray[Any, Any]:
        """(H, most that a head holds) int64: the true position of each token held, in order; -1 pads shorter heads."""
        operation = "PagedKVCacheStore.positions"
        layer, state = self._layer(layer, operation), self._state(seq, operation, swapped=True)
        if not isinstance(self._sequences, HeadSequences):
            return np.tile(state.positions(layer), (self.num_kv_heads, 1))
        heads = self._sequences.positions_by_head(layer, state)
        found = np.full((len(heads), max(map(len, heads))), -1, np.int64)
        for row, head in zip(found, heads, strict=True):
            row[: len(head)] = head
        return found

    def keys(self, layer: int) -> CacheArray:
        """A layer's pool of keys where it lies, in the store's layout; not a copy."""
        return CacheArray(self._pools.layers[self._layer(layer, "PagedKVCacheStore.keys")][0], self.runtime)

    def values(self, layer: int) -> CacheArray:
        """A layer's pool of values where it lies, in the store's layout; not a copy."""
        return CacheArray(self._pools.layers[self._layer(layer, "PagedKVCacheStore.values")][1], self.runtime)

    def scales(self, layer: int) -> tuple[CacheArray | None, CacheArray | None]:
        """The scales of K and of V where they lie, None where one of the two has none: of int8 each (N, bs, H).

        Of groups each (N, bs, H, n): a row's scales, each with its bias behind it if it has one. Where K and V have
        rows of different numbers of them, n is the larger, also of int8, and the first are in use. Of 8-bit floats (1,)
        or (H,), what the store was given.

        Raises:
            DTypeError: the store has none.
        """
        operation = "PagedKVCacheStore.scales"
        arrays = self._pools.scales[self._layer(layer, operation)]
        if not arrays:
            raise DTypeError(
                f"{operation}: a {self.form.kept_as} store has no scales; int8 and groups have. Use dtype='int8'."
            )
        found = {name: CacheArray(a, self.runtime) for name, a in arrays.items()}
        return found.get("k_scale"), found.get("v_scale")

    def _layer(self, index: int, operation: str) -> int:
        runtime.require_alive(self.runtime, operation)
        if type(index) is int and 0 <= index < self.num_layers:
            return index
        return checks.integer(index, "layer", operation, high=self.num_layers - 1)

    def _state(self, seq: int, operation: str, *, swapped: bool = False) -> SequenceState:
        """The state of a sequence that is there, and in the pool unless `swapped` allows otherwise."""
        runtime.require_alive(self.runtime, operation)
        return self._sequences.state(seq, operation, swapped=swapped)

    @whole
    def _picture(self) -> str:
        sequences, holders = self._sequences, self._sequences.blocks.holders
        if isinstance(sequences, HeadSequences):
            of_first, holders = sequences.layers[0], sequences.layers[0].blocks.holders
            rows = [
                draw.Table(f"{n // sequences.heads}, head {n % sequences.heads}", head.length, head.blocks)
                for n, head in of_first.states.items()
            ]
        else:
            rows = [
                draw.Table(seq, state.held, state.blocks, state.swapped is not None)
                for seq, state in sequences.states.items()
            ]
        return draw.table(repr(self), self.block_size, self.num_blocks, self.num_free_blocks, holders, rows)

    def __len__(self) -> int:
        """How many sequences there are; so an empty store is false: ask ``store is not None`` whether there is one."""
        return len(self._sequences.states)

    @whole
    def __repr__(self) -> str:
        width = str(self.head_dim) if self.head_dim == self.head_dim_v else f"{self.head_dim}|{self.head_dim_v}"
        used = self.num_blocks - self.num_free_blocks
        swapped = sum(state.swapped is not None for state in self._sequences.states.values())
        gone = f" ({swapped} swapped out)" if swapped else ""
        return (
            f"PagedKVCacheStore({counted(self.num_layers, 'layer')} x {counted(self.num_kv_heads, 'head')} x {width}, "
            f"{self.form.kept_as}, {self.layout}{', per head' * self.form.per_head}, {counted(len(self), 'sequence')}"
            f"{gone}, {used}/{counted(self.num_blocks, 'block')} of {counted(self.block_size, 'token')} used, "
            f"{self.num_shared_blocks} shared, "
            f"{size_in_words(self.nbytes)}, {self.runtime.arch})"
        )
