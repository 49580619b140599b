"""The base of both layers of the third seed: a form, arrays, a count that the caller keeps, and the calls of a step."""

from __future__ import annotations

from typing import Any

import numpy as np

from tikv import dtypes, runtime
from tikv.arrays import Array, Arrays, ArrayView, describe, handed_over, new_array, new_like, view, write_host
from tikv.dtypes import DType
from tikv.errors import CapacityError
from tikv.ops import checks, layouts
from tikv.ops.attention.call import AttentionCall
from tikv.ops.attention.options import MOST_QUERIES
from tikv.ops.attention.plan import Results
from tikv.ops.attention.request import AttendRequest
from tikv.stores.layers.attend import last_queries, results_of
from tikv.stores.locking import StoreLock, locked
from tikv.stores.picture import counted


class KVLayer(runtime.DeepCopied):
    """The base of both layers: a form, arrays, a count that the caller keeps, and the calls of a step."""

    instead = "Use copy.deepcopy(); for another process, copy_to_host() what `keys` and `values` hold."
    _arrays: list[ArrayView]  # K, V and, for int8, their scales
    _remedy: str  # how to make room for {} tokens

    def __init__(
        self, num_kv_heads: int, head_dim: int, dtype: DType, live: runtime.Runtime, capacity: int, block_size: int
    ) -> None:
        self._num_kv_heads = num_kv_heads
        self._head_dim = head_dim
        self._block_size = block_size
        self._capacity = capacity
        self._slots = 0 if block_size else capacity  # the tokens that there is room for now
        self._len = 0
        self._lens: ArrayView | None = None  # the same on the device
        self.dtype = dtype
        self.runtime = live
        self.lock = StoreLock()

    @property
    def capacity(self) -> int:
        """The tokens that fit: in all slots or, if tokens lie in blocks, in ``max_blocks_per_seq`` blocks.

        `ContiguousKVLayer.ensure_contig_capacity` adds slots.
        """
        return self._capacity

    @property
    def block_size(self) -> int:
        """Tokens per block; 0 without blocks."""
        return self._block_size

    @property
    def is_paged(self) -> bool:
        """Whether tokens lie in blocks of a pool."""
        return self._block_size > 0

    @property
    def num_kv_heads(self) -> int:
        """The number of heads of K and V."""
        return self._num_kv_heads

    @property
    def head_dim(self) -> int:
        """The width of a head."""
        return self._head_dim

    def __len__(self) -> int:
        """The number of tokens, as last set with `set_len`; writing does not change it."""
        return self._len

    def __bool__(self) -> bool:
        """True, even for an empty layer."""
        return True

    @locked
    def set_len(self, n: int) -> None:
        """Set the number of tokens: after a write, or to drop the newest.

        Raises:
            CapacityError: there are fewer than ``n`` slots in the layer, or in the blocks assigned to it.
        """
        operation = f"{type(self).__name__}.set_len"
        runtime.require_alive(self.runtime, operation)
        n = checks.integer(n, "n", operation)
        if n > self._slots:
            raise CapacityError(f"{operation}: n={n} exceeds the {self._slots} slots. {self._remedy.format(n)}")
        self._len = n
        if self._lens is not None:
            write_host(np.array([n], np.int32), self._lens)

    def _end(self, operation: str, rows: Array) -> int:
        """The number of tokens after these rows are written; checks that there is room."""
        runtime.require_alive(self.runtime, operation)
        source = view(rows, "rows", operation)
        checks.rank(source, (2,), "rows", "(T, (Hq + 2 H) * D)", operation)
        return self._room_for(operation, source.shape[0])

    def _room_for(self, operation: str, tokens: int) -> int:
        """The number of tokens with `tokens` more; checks that there is room."""
        end = self._len + tokens
        if end > self._slots:
            raise CapacityError(
                f"{operation}: len={self._len} + {tokens} tokens exceed the {self._slots} slots. "
                f"{self._remedy.format(end)}"
            )
        return end

    def _scales(self) -> dict[str, Any]:
        """The int8 scales by the names that operations give them."""
        return dict(zip(("k_scale", "v_scale"), self._arrays[2:], strict=False))

    @locked
    def _attend(self, operation: str, q: Array, q_layout: str, lens: Array, request: AttendRequest) -> Any:
        """Attention of one sequence's queries; `q_layout` is the layout of both q and the result."""
        request = request.checked(operation)
        mass = request.asked_mass(operation)
        runtime.require_alive(self.runtime, operation)
        axes = layouts.token_and_head_axes(q_layout, "q_layout", operation)
        queries = _one_head_major(_rank_3(q, "q", operation), axes)
        call = self._call(operation, queries, lens, request)
        out = new_like(q, (*view(q, "q", operation).shape[:2], self.head_dim), queries.dtype, self.runtime)
        to = _one_head_major(view(out, "out", operation), axes)
        if not mass:
            call.attend(None, Results(to))
            return handed_over(out)
        to_mass = mass.array(operation, q, (self.num_kv_heads, self._len), self.runtime, call.arrays)
        lse = new_array(queries.shape[:3], dtypes.float32, self.runtime)
        call.attend(None, Results(to, True, lse))
        asking, their_lse = last_queries(queries, lse, mass.queries)
        mass.start(to_mass)
        weighing = self._call(operation, asking, lens, request)
        weighing.weigh(their_lse, view(to_mass, "mass", operation).batch_of_one(), mass.kind)
        return handed_over(out), handed_over(to_mass)

    @locked
    def extend(
        self,
        q: Array,
        k: Array,
        v: Array,
        *,
        layout: str = "token_major",
        scale: float | None = None,
        softcap: float | None = None,
        window: int | None = None,
        return_lse: bool = False,
        sink_logits: Array | None = None,
        alibi_slopes: Array | None = None,
        return_mass: bool | str = False,
        mass_queries: int | None = None,
        mass_into: Array | None = None,
    ) -> Arrays:
        """Write new tokens from position `len` on, count them, and attend with their queries: one call for the step.

        Args:
            q: (T, Hq, D) token-major or (Hq, T, D) head-major, float32, float16 or bfloat16.
            k, v: (T, num_kv_heads, D) or (num_kv_heads, T, D), of the layer's dtype or one that it converts.
            layout: layout of ``q``, ``k``, ``v`` and the result.
            scale, softcap, sink_logits, alibi_slopes: as in `tikv.decode_attention`.
            window: tokens that a query sees, its own included; None for all.
            return_lse: also return the log-sum-exp of the scores, float32 (T, Hq) or (Hq, T).
            return_mass: also return the attention mass of each token, float32 (num_kv_heads, `len`), as in
                `KVCacheStore.attend`.
            mass_queries: the number of last queries whose mass is returned; None for all.
            mass_into: float32 (num_kv_heads, `len`) that accumulates the mass, as in `KVCacheStore.attend`.

        Returns:
            An array like ``q``; with ``return_lse`` also lse, and with ``return_mass`` the mass.

        Raises:
            CapacityError: there is no room for T tokens. Nothing is written.
            ShapeError, DTypeError, OptionError, PositionError: arrays or options that do not fit. Nothing is written.

        Exactness: attention reads the stored rows. Cost: one launch that writes, and one of attention per 256 queries.
        """
        operation = f"{type(self).__name__}.extend"
        runtime.require_alive(self.runtime, operation)
        axes = layouts.token_and_head_axes(layout, "layout", operation)
        token, _ = axes
        rows = {name: _rank_3(a, name, operation) for name, a in (("q", q), ("k", k), ("v", v))}
        tokens = rows["k"].shape[token]
        for name in ("q", "v"):
            detail = f"k: {describe(rows['k'])}"
            checks.extent(rows[name].shape[token], tokens, f"the number of tokens of {name}", operation, detail)
        before, end = self._len, self._room_for(operation, tokens)
        shape = (*rows["q"].shape[:2], self.head_dim)
        out = new_like(q, shape, rows["q"].dtype, self.runtime)
        request = AttendRequest(
            scale=scale, softcap=softcap, window=window, sink_logits=sink_logits, alibi_slopes=alibi_slopes,
            return_mass=return_mass, mass_queries=mass_queries, mass_into=mass_into,
        ).checked(operation)  # fmt: skip
        asked = request.asked_mass(operation)
        with_lse = return_lse or bool(asked)
        lse = new_like(q, shape[:2], dtypes.float32, self.runtime) if with_lse else None
        parts = [rows["q"], view(out, "out", operation)] + ([view(lse, "lse", operation)] if with_lse else [])
        queries, *results = (_one_head_major(a, axes) for a in parts)
        ready = []
        for first in range(0, tokens, MOST_QUERIES):  # all are checked before anything is written
            last = min(tokens, first + MOST_QUERIES)
            chunk, to, *to_lse = (a.part(2, first, last) for a in (queries, *results))
            call = self._call(operation, chunk, before + last, request)
            ready.append(call.prepare(None, Results(to, with_lse, to_lse[0] if to_lse else None)))
        mass = None
        if asked:
            asking, their_lse = last_queries(queries, results[1], asked.queries)
            weighing = self._call(operation, asking, end, request)
            mass = asked.array(operation, q, (self.num_kv_heads, end), self.runtime, weighing.arrays)
            to_mass = view(mass, "mass", operation).batch_of_one()
            ready.append(weighing.prepare_to_weigh(their_lse, to_mass, asked.kind))
        self._write(operation, [rows[name].transposed(*axes, 2) for name in ("k", "v")])
        self.set_len(end)
        asked.start(mass)
        for attention in ready:
            attention.run()
        return results_of(out, lse if return_lse else None, mass)

    def _call(self, operation: str, q: ArrayView, lens: Array, request: AttendRequest) -> AttentionCall:
        """A checked call of attention over the first `lens` tokens, a number or an array of one number."""
        raise NotImplementedError

    def _write(self, operation: str, rows: list[ArrayView]) -> None:
        """Write token-major K and V from position `len` on."""
        raise NotImplementedError

    @locked
    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({counted(self.num_kv_heads, 'head')} x {self.head_dim}, {self.dtype.name}, "
            f"{len(self)}/{counted(self.capacity, 'token')}, {self.runtime.arch})"
        )


def _rank_3(array: Array, name: str, operation: str) -> ArrayView:
    rows = view(array, name, operation)
    checks.rank(rows, (3,), name, "(T, heads, D) or (heads, T, D)", operation)
    return rows


def _one_head_major(a: ArrayView, axes: tuple[int, int]) -> ArrayView:
    """An array of one sequence as (1, heads, T, ...), from its axes of tokens and heads."""
    token, head = axes
    return a.transposed(head, token, *range(2, a.ndim)).batch_of_one()
