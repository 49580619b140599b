"""Pages: how a `PagedKVCacheStore` keeps its tokens, and the context in which blocks change.

Each way to keep them is one class in one file. It implements the abstract methods, and those of the others that it can:
a method that it leaves out raises an error that names it.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Generic, NoReturn, TypeVar

from tikv.arrays import Array, ArrayView, CacheArray, Host
from tikv.errors import OptionError, TikvError
from tikv.ops.attention.request import AttendRequest
from tikv.ops.indices import host_integers
from tikv.ops.rotate import Rope
from tikv.runtime import Runtime
from tikv.stores.pools.config import PoolConfig
from tikv.stores.pools.head_sequences import HeadSequences
from tikv.stores.pools.memory import BlockPools
from tikv.stores.pools.rows import Moves
from tikv.stores.pools.sequences import AppendStep, Sequences, SequenceState
from tikv.stores.pools.shared_prefix import Block
from tikv.stores.pools.tables import DeviceTables

Memory = TypeVar("Memory", bound=BlockPools)


class Pages(abc.ABC, Generic[Memory]):
    """The memory of all layers, who holds which block of it, and what launches read beside the rows.

    Attributes:
        title: the name of this kind of store in messages.
        remedy: the way out for methods that this kind does not support.
        config: what the pools of all layers have in common.
        pools: the memory.
        sequences: the sequences and their blocks.
        tables: slots, block tables and lengths on the device.
        block: tokens and bytes of a block of a layer.
    """

    title: str
    remedy: str

    def __init__(self, live: Runtime, config: PoolConfig, num_layers: int, pools: Memory) -> None:
        self.runtime, self.config, self.pools = live, config, pools
        sizes = num_layers, config.num_blocks, config.block_size
        self.sequences = HeadSequences(*sizes, config.num_kv_heads) if config.per_head else Sequences(*sizes)
        self.tables = DeviceTables(live)
        self.block = Block(config.block_size, pools.nbytes // max(1, num_layers * config.num_blocks))

    def ids(self, seqs: Array, operation: str) -> tuple[int, ...]:
        """The sequences that a caller named."""
        return tuple(host_integers(seqs, "seqs", operation, self.runtime))

    @property
    def nbytes(self) -> int:
        """Bytes of all layers, filled or not."""
        return self.pools.nbytes

    # --- operations of every kind of pages

    @abc.abstractmethod
    def append(
        self, operation: str, layer: int, rows: Sequence[ArrayView], seqs: Array, cu_seqlens: Array, layout: str
    ) -> AppendStep:
        """Append views of K and V to one layer, and return where the tokens went; `PagedKVCacheStore.append`."""

    @abc.abstractmethod
    def attend(self, operation: str, layer: int, q: Array, seqs: Array, request: AttendRequest) -> Any:
        """Attention of queries over the tokens of their sequences in one layer; `PagedKVCacheStore.attend`."""

    @abc.abstractmethod
    def extend(
        self, operation: str, layer: int, arrays: tuple[Any, Any, Any], seqs: Array, cu_seqlens: Array,
        request: AttendRequest,
    ) -> Any:  # fmt: skip
        """Append new tokens of some sequences and attend with their queries; `PagedKVCacheStore.extend`."""

    @abc.abstractmethod
    def rewrite(
        self, operation: str, layer: int, state: SequenceState, start: int, rows: Sequence[ArrayView], layout: str
    ) -> None:
        """Write new rows to the places of a sequence's tokens from position `start` on; `PagedKVCacheStore.rewrite`."""

    @abc.abstractmethod
    def tokens(self, operation: str, layer: int, state: SequenceState) -> tuple[CacheArray, CacheArray]:
        """A copy of what a layer of a sequence holds; `PagedKVCacheStore.tokens`."""

    def refuse_merge(self, operation: str) -> None:
        """Raise OptionError if rows of these pages cannot be merged."""

    @abc.abstractmethod
    def move(
        self, operation: str, layer: int, state: SequenceState, table: Sequence[int], moves: Moves, rope: Rope | None
    ) -> None:
        """Move the tokens that a layer keeps, by their indices in the blocks of a table; if it fails, nothing moves."""

    # --- operations of some

    def arrays(self, operation: str, layer: int) -> tuple[Sequence[ArrayView], dict[str, Any]]:
        """K and V of a layer in place, and its scales, for `PagedKVCacheStore.keys`, `values` and `scales`."""
        self._refuse(operation, "Read tokens().")

    def write_qkv(self, operation: str, layer: int, qkv: Any, seqs: Array, cu_seqlens: Array, **options: Any) -> Any:
        """Split, norm, rotate and append fused rows, and return the queries; `PagedKVCacheStore.write_qkv`."""
        self._refuse(operation, "Write to arrays with tikv.write_qkv, and append them.")

    def page_summaries(self, operation: str, layer: int, seqs: Array) -> tuple[CacheArray, CacheArray]:
        """The least and the greatest key of each page of sequences; `PagedKVCacheStore.page_summaries`."""
        self._refuse(operation)

    def commit(self, operation: str, seqs: Array, path: Any, drafted: int | None) -> None:
        """Keep a path of the newest tokens of each sequence; `PagedKVCacheStore.commit`."""
        self._refuse(operation, "truncate() drops the newest tokens.")

    def check_rope(self, operation: str, layer: int, rope: Rope) -> None:
        """Raise unless a compaction can rotate a layer's keys by `rope`."""
        self._refuse(f"{operation}(rope=)")

    def _refuse(self, operation: str, remedy: str = "") -> NoReturn:
        raise OptionError(f"{operation}: {self.title} does not support this. {remedy or self.remedy}")

    # --- sequences, and what goes with them

    def add(self, token_ids: Any, salt: bytes, leave: int) -> int:
        """A new sequence, see `Sequences.add`."""
        return self.sequences.add(token_ids, salt, leave)

    def fork(self, state: SequenceState) -> int:
        """A new sequence with the same tokens."""
        return self.sequences.fork(state)

    def truncate(self, operation: str, state: SequenceState, n: int) -> None:
        """Keep the first `n` tokens of a sequence."""
        self.sequences.truncate(state, n)

    def refuse_align(self, operation: str, state: SequenceState, n: int) -> None:
        """Raise PositionError if a layer of a sequence that has more tokens cannot go back to the first `n`."""
        for layer, (end, history) in enumerate(zip(state.ends, state.histories, strict=True)):
            if history is not None and n < min(end, history.end):
                raise state.cannot_align(operation, layer, n, f"it was compacted when it had {history.end}")

    def check_kept(self, operation: str, layer: int, state: SequenceState, indices: Host) -> None:
        """Raise PositionError if tokens of a layer, by index, cannot be kept without others."""

    def free(self, seq: int) -> None:
        """Forget a sequence."""
        self.sequences.free(seq)

    def swap_out(self, state: SequenceState) -> None:
        """Move what a sequence holds to the host, and give back its blocks."""
        self.sequences.swap_out(state, self.pools.read_blocks(state.blocks))

    def write_swapped(self, state: SequenceState, shared: list[int], fresh: list[int]) -> None:
        """Bring what a sequence had on the host into the blocks that were taken for it, those not shared."""
        self.pools.write_blocks(state.swapped, range(len(shared), len(shared) + len(fresh)), fresh)

    # --- files

    def written(self, state: SequenceState) -> list[int]:
        """How many tokens of a sequence the blocks of each layer have."""
        return state.lengths

    def beside(self, states: Sequence[SequenceState]) -> tuple[dict[str, Host], list[dict[str, Any]]]:
        """What a file has of sequences besides their blocks: arrays by name, and more metadata of each."""
        return {}, [{} for _ in states]

    def bring(self, numbers: Sequence[int], tensors: dict[str, Host], metadata: Sequence[dict[str, Any]]) -> None:
        """Take over what `beside` returned for new sequences, with a file's metadata of them; or change nothing."""

    def refuse_per_head(self, operation: str, why: str) -> None:
        """Raise OptionError, with the reason `why`, if this is a per-head store."""
        if self.config.per_head:
            raise OptionError(f"{operation}: this store has per_head=True, and {why}. Use a store without it.")

    def refuse_pieces(self, operation: str) -> None:
        """Raise OptionError if rows are not contiguous, so that they cannot be moved."""
        if self.config.layout == "VLLM":
            raise OptionError(f"{operation}: layout VLLM cuts rows into pieces, which cannot be moved. Use NHD or HND.")


class Changing:
    """A context for the writes of a step: if one fails, the blocks that were taken for it are given back.

    It is a class, since `contextlib` would take as long as the rest of an append.
    """

    __slots__ = ("pages", "step")

    def __init__(self, pages: Pages[Any], step: AppendStep) -> None:
        self.pages, self.step = pages, step

    def __enter__(self) -> Changing:
        return self

    def copy_shared(self, prepare: Callable[[], None] | None = None) -> None:
        """Copy the shared blocks that a step writes to, after the write is prepared and can no longer be refused."""
        if self.step.copies and not self.step.committed:
            if prepare is not None:
                prepare()
            self.pages.pools.copy_blocks(self.step.copies)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self.pages.sequences.undo(self.step, refused=isinstance(error, TikvError))
