"""TokenGroupLayers: ``tikv.Quant(axis="tokens")``: older tokens as codes, the newest as the model gave them.

The newest tokens of a layer lie in a ring of `residual` + `group` slots, which is a `ContiguousLayers`. When it is
full, an append first lets its oldest group be quantised, see `channel_codes`: so a token's age decides, not the call
that brought it. Attention reads both parts where they lie and merges them by their log-sum-exps.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import numpy as np

from tikv import dtypes, runtime
from tikv.arrays import ArrayView, CacheArray, Views, new_array, view, view_all
from tikv.errors import CapacityError, OptionError, PositionError
from tikv.formats import Quant
from tikv.ops.attention.launches import AttendedTokens
from tikv.ops.attention.merge import merge_into
from tikv.ops.attention.options import MOST_QUERIES
from tikv.ops.attention.plan import Results
from tikv.ops.attention.request import AttendRequest, AttentionScale
from tikv.ops.layouts import Placement
from tikv.runtime.cache import BoundedCache
from tikv.runtime.interrupts import uninterrupted
from tikv.stores import files
from tikv.stores.files import token_groups as token_group_files
from tikv.stores.layers.append import ROWS
from tikv.stores.layers.attempt import attempt
from tikv.stores.layers.attend import layer_arrays, layer_plan, results_of
from tikv.stores.layers.channel_codes import ChannelCodes
from tikv.stores.layers.contiguous import Captured, ContiguousLayers
from tikv.stores.layers.memory import copy_rows, rows_of
from tikv.stores.layers.queries import attend_queries, extend_queries, with_tokens
from tikv.stores.layers.storage import LayerStorage, StoreConfig, Triple
from tikv.stores.row_format import RowFormat, RowFormats

OPERATION = "KVCacheStore"
REFUSED = ("seq_lens", "alibi_slopes", "mass_queries", "out", "return_mass", "mask", "parents", "indices")


class CapturedGroups(NamedTuple):
    """What a store of groups along tokens held: its newest tokens, and of each layer the codes."""

    newest: Captured
    config: tuple[Any, ...]
    counts: list[int]
    codes: list[tuple[int, list[np.ndarray[Any, Any]]]]


class TokenGroupLayers(LayerStorage):
    """Layers of codes and a ring of the newest tokens each, see the module.

    Attributes:
        newest: the rings.
        codes: of each layer those of its older tokens.
    """

    title = "a store of groups along tokens"
    remedy = "Use axis='head_dim'."
    file_kind = token_group_files.KIND

    def __init__(self, live: runtime.Runtime, config: StoreConfig) -> None:
        quant: Quant = config.rows["dtype"]
        asked = {"sinks": config.sinks or None, **{n: config.rows.get(n) for n in ("v_dtype", "k_scale", "v_scale")}}
        asked["window"] = next((w for w in config.windows if w is not None), None)
        for name, value in asked.items():
            if value is not None:
                raise OptionError(
                    f"{OPERATION}: {name}={value!r} with groups along tokens is not offered. Leave it out, or use "
                    f"axis='head_dim'."
                )
        slots = quant.residual + quant.group
        row_dtype = dtypes.parse(config.rows.get("scale_dtype", "float16"), OPERATION)
        ring = config._replace(
            capacity=slots, windows=(slots,) * config.num_layers, rows={**config.rows, "dtype": row_dtype}
        )
        self.newest = ContiguousLayers(live, ring)
        (width, width_v), base = self.newest.rows.widths, quant.row
        base.groups(width_v, "head_dim_v", OPERATION)
        self.runtime, self.lock, self.memory = live, self.newest.lock, self.newest.memory
        self.quant, self.config = quant, config
        self.rows = RowFormats(RowFormat(quant.by_tokens, width), RowFormat(quant.by_tokens, width_v), row_dtype)
        self.counts = config.counts()
        room = max(1, (config.capacity - quant.residual) // quant.group) * quant.group
        sizes = config.batch_size, config.num_kv_heads, (width, width_v), room
        scratch: BoundedCache[int, Any] = BoundedCache(4)  # of all layers
        on_host = config.place == "host"
        self.codes = [ChannelCodes(live, *sizes, base, row_dtype, scratch, on_host) for _ in self.counts]

    @classmethod
    def serves(cls, dtype: Any) -> bool:
        """Groups along tokens."""
        return isinstance(dtype, Quant) and dtype.axis == "tokens"

    @property
    def nbytes(self) -> int:
        """Bytes of codes, scales, biases and the newest tokens, filled or not."""
        return self.memory.nbytes + sum(codes.nbytes for codes in self.codes)

    def described(self, config: StoreConfig) -> str:
        return f"{self.rows.name}, {self.quant.residual} or more {self.rows.scale_dtype.name}"

    def quantised(self, operation: str, layer: int) -> int:
        return self.codes[layer].tokens

    def check_drawn_mass(self, operation: str) -> None:
        raise OptionError(f"{operation}: {self.title} has no mass. Leave it out.")

    # --- writes

    @uninterrupted
    def append(self, operation: str, layer: int, rows: Views, layout: str) -> None:
        """As `LayerStorage.append`: a launch for those that fit, and three for each group that becomes codes."""
        found, axes = self._checked(operation, layer, rows, layout)
        for part in self._parts(operation, layer, found, axes[0]):
            self._append(operation, layer, part, layout)

    @uninterrupted
    def append_all(self, operation: str, rows: Views, layout: str) -> None:
        """As `LayerStorage.append_all`: as `append` for each layer."""
        stacked, axes = self.newest.appends.checked(operation, self.newest.counts, rows, layout, True)
        for counts in self.counts:
            counts.require_room(operation, stacked[0].shape[1 + axes[0]])
        for i in range(len(self.counts)):
            own = [a.restrided(a.shape[1:], a.strides[1:], i * a.strides[0]) for a in stacked]
            for part in self._parts(operation, i, own, axes[0]):
                self._append(operation, i, part, layout)

    def append_at(self, operation: str, layer: int | None, given: Views, layout: str) -> None:
        """Not offered."""
        raise OptionError(f"{operation}: {self.title} ages by what the host counts. Append without positions.")

    def _checked(self, operation: str, layer: int, rows: Views, layout: str) -> tuple[list[ArrayView], tuple[int, int]]:
        """New K and V that fit the layer as (batch, ., ., width), and their axes of tokens and heads."""
        found, axes = self.newest.appends.checked(operation, [self.newest.counts[layer]], rows, layout, False)
        self.counts[layer].require_room(operation, found[0].shape[1 + axes[0]])
        return [a.restrided(a.shape[1:], a.strides[1:]) for a in found], axes

    def _parts(self, operation: str, layer: int, rows: Sequence[ArrayView], token_axis: int) -> Iterator[_Part]:
        """New rows in parts that the ring has room for, once a group of its oldest became codes where it is full."""
        ring, codes = self.newest.counts[layer], self.codes[layer]
        tokens, first = rows[0].shape[token_axis], 0
        while first < tokens:
            if ring.length - codes.tokens >= ring.slots:
                codes.encode(operation, ring)
            end = min(tokens, first + ring.slots - (ring.length - codes.tokens), first + MOST_QUERIES)
            yield _Part(first, end, Views([a.part(token_axis, first, end) for a in rows]))
            first = end

    @uninterrupted
    def _append(self, operation: str, layer: int, part: _Part, layout: str) -> None:
        self.newest.append(operation, layer, part.rows, layout)
        self.counts[layer].grow(part.end - part.first)

    # --- reads

    def tokens(self, operation: str, layer: int) -> tuple[CacheArray, CacheArray]:
        """As `LayerStorage.tokens`, float32."""
        ring, codes, live = self.newest.counts[layer], self.codes[layer], self.runtime
        shape = self.batch_size, self.config.num_kv_heads, ring.length
        out = [new_array((*shape, width), dtypes.float32, live) for width in self.rows.widths]
        codes.decode(operation, *out)
        newest = ring.length - codes.tokens
        if newest:
            copy_rows(
                live, operation, [rows_of(ring.k), rows_of(ring.v)], [rows_of(a, codes.tokens) for a in out],
                self.rows.widths, (*shape[:2], newest), src_place=Placement("ring"),
                src_position=ring.slot_of(codes.tokens), ring=ring.ring,
            )  # fmt: skip
        return CacheArray(out[0], live), CacheArray(out[1], live)

    def attend(self, operation: str, layer: int, q: Any, request: AttendRequest) -> Any:
        """As `LayerStorage.attend`, both parts read in place.

        Raises:
            PositionError: a query's own token is codes already: `extend` attends before.
            OptionError: slopes, mass, ``seq_lens`` or torch's attention.
        """
        ring, heads, live = self.newest.counts[layer], self.config.num_kv_heads, self.runtime
        self._refuse_options(operation, request)
        request.check_choices(operation, ("auto", "taichi"))
        scores, terms = request.scores(operation), request.terms.views(operation)
        sizes = self.batch_size, heads, self.rows.k.width
        queries = attend_queries(operation, view(q, "q", operation), request.layout, *sizes, live)
        several = with_tokens(queries.heads_first, 4)
        layer_plan(live, operation, layer_arrays(ring, several, terms), ring, scores)
        newest = ring.length - self.codes[layer].tokens
        if ring.length and queries.tokens > newest:
            raise PositionError(
                f"{operation}: {queries.tokens} queries, and the newest {newest} tokens of layer {ring.index} are not "
                f"codes yet. Attend with at most so many, or use extend(), which attends as it appends."
                f"{queries.remedy(newest, heads)}"
            )
        result, lse = queries.new_out(q, self.rows.v.width, live), queries.new_lse(q, live)
        to = with_tokens(queries.as_read(view(result, "out", operation)), 4)
        to_lse = with_tokens(queries.as_read(view(lse, "lse", operation)), 3)
        self._attend(operation, layer, several, scores, terms, to, to_lse)
        return results_of(result, lse if request.return_lse else None, None)

    def _refuse_options(self, operation: str, request: AttendRequest) -> None:
        request.refuse(operation, REFUSED, f"{self.title} does not offer", "Leave it out, or use axis='head_dim'.")

    def _attend(
        self,
        operation: str,
        layer: int,
        q: ArrayView,
        scores: AttentionScale,
        terms: dict[str, ArrayView],
        out: ArrayView,
        lse: ArrayView,
    ) -> None:
        """Attention of (batch, Hq, T, D) queries of the newest tokens, into `out` and `lse`."""
        ring, codes = self.newest.counts[layer], self.codes[layer]
        arrays = layer_arrays(ring, q, terms)
        plan = layer_plan(self.runtime, operation, arrays, ring, scores)
        if codes.tokens == 0:
            plan.attend(None, arrays, AttendedTokens(ring.length, ring.valid_from), Results(out, True, lse))
            return
        part = new_array(out.shape, dtypes.float32, self.runtime)
        tokens = AttendedTokens(ring.length, max(ring.valid_from, codes.tokens))
        of_ring = plan.attend(None, arrays, tokens, Results(part, True, is_partial=True))
        merge_into(operation, (*of_ring, *codes.attend(operation, q, scores)), False, out, lse)

    def extend(self, operation: str, layer: int, arrays: Triple, request: AttendRequest) -> Any:
        """As `LayerStorage.extend`, as many tokens at a time as the ring of the newest has room for.

        Each query sees what it would see if the tokens came one at a time.
        """
        ring, live, (q, k, v) = self.newest.counts[layer], self.runtime, arrays
        self._refuse_options(operation, request)
        scores, terms = request.scores(operation), request.terms.views(operation)
        rows, axes = self._checked(operation, layer, view_all((k, v), ROWS, operation), request.layout)
        sizes = self.batch_size, self.config.num_kv_heads, self.rows.k.width, rows[0].shape[axes[0]]
        queries = extend_queries(operation, view(q, "q", operation), request.layout, *sizes, live)
        layer_plan(live, operation, layer_arrays(ring, queries.heads_first, terms), ring, scores)
        out, lse = queries.new_out(q, self.rows.v.width, live), queries.new_lse(q, live)
        to, to_lse = queries.as_read(view(out, "out", operation)), queries.as_read(view(lse, "lse", operation))
        with self.attempted(operation, layer):
            for part in self._parts(operation, layer, rows, axes[0]):
                self._append(operation, layer, part, request.layout)
                some = [a.part(2, part.first, part.end) for a in (queries.heads_first, to, to_lse)]
                self._attend(operation, layer, some[0], scores, terms, *some[1:])
            return results_of(out, lse if request.return_lse else None, None)

    def attempted(self, operation: str, layer: int) -> AbstractContextManager[None]:
        """As `LayerStorage.attempted`; what has become codes stays."""
        codes, coded = self.codes[layer], self.codes[layer].tokens
        return attempt(operation, [self.counts[layer], self.newest.counts[layer]], lambda: codes.tokens != coded)

    # --- what lets go

    def trim(self, operation: str, n: int) -> None:
        """As `LayerStorage.trim`; tokens that are codes stay, or all go by `reset`.

        Raises:
            PositionError: a token that is codes. Nothing is changed.
        """
        length = max(counts.length for counts in self.counts)
        if n == length:
            self.reset()
            return
        coded = max(codes.tokens for codes in self.codes)
        if n and length - n < coded:
            raise PositionError(
                f"{operation}: cannot drop {n} tokens of length={length}: the first {coded} are codes of whole groups, "
                f"quantised once. Drop at most {length - coded}, or reset()."
            )
        self.newest.trim(operation, n)
        for counts, ring in zip(self.counts, self.newest.counts, strict=True):
            counts.length, counts.newest = ring.length, 0

    def reset(self) -> None:
        self.newest.reset()
        for counts, codes in zip(self.counts, self.codes, strict=True):
            counts.length = counts.newest = codes.tokens = 0

    # --- copies and files

    def _kind(self) -> tuple[Any, ...]:
        """What a store has to share with one whose contents it takes over."""
        rows = self.rows.widths, self.quant, self.rows.scale_dtype
        return len(self.counts), self.batch_size, self.config.num_kv_heads, *rows

    def capture(self) -> CapturedGroups:
        """As `LayerStorage.capture`; the codes by way of the host."""
        codes = [(codes.tokens, codes.copy_to_host()) for codes in self.codes]
        return CapturedGroups(self.newest.capture(), self._kind(), [layer.length for layer in self.counts], codes)

    def restore(self, operation: str, captured: Any, shown: tuple[str, str]) -> None:
        snapshot, store = shown
        if not isinstance(captured, CapturedGroups) or captured.config != self._kind():
            raise OptionError(f"{operation}: {snapshot:.200} is not of a store of this form ({store}).")
        longest = max(captured.counts)
        if longest > self.config.capacity or max(tokens for tokens, _ in captured.codes) > self.codes[0].room:
            raise CapacityError(
                f"{operation}: the snapshot has {longest} tokens, and there is room for {self.config.capacity}. "
                f"Restore it into a store of that capacity or more."
            )
        self.newest.restore(operation, captured.newest, shown)
        for counts, length, codes, (tokens, arrays) in zip(
            self.counts, captured.counts, self.codes, captured.codes, strict=True
        ):
            counts.length, counts.newest = length, 0
            codes.take_over(tokens, arrays)

    def filled(self, layer: int) -> list[tuple[ArrayView, int]]:
        return [*self.newest.filled(layer), *self.codes[layer].filled]

    def count_as(self, layer: int, other: TokenGroupLayers, index: int) -> None:
        self.newest.count_as(layer, other.newest, index)
        own, found = self.counts[layer], other.counts[index]
        own.index, own.length, own.newest = found.index, found.length, found.newest
        self.codes[layer].tokens = other.codes[index].tokens

    def save(self, path: str | os.PathLike[str], config: StoreConfig, operation: str) -> None:
        layers = [
            ((ring.length, ring.valid_from, codes.tokens), [*arrays, *codes.copy_to_host()])
            for (ring, arrays), codes in zip(self.newest.to_host(operation), self.codes, strict=True)
        ]
        token_group_files.write(path, config, self.rows, layers, operation)

    @classmethod
    def load(
        cls, path: str | os.PathLike[str], live: runtime.Runtime, operation: str, **placed: Any
    ) -> tuple[StoreConfig, Any]:
        arguments, quant, layers = token_group_files.read(path, operation)
        with files.understanding(path, operation):
            config = StoreConfig.checked(OPERATION, **arguments, **placed, dtype=quant)
            found = cls(live, config)
            rows = [arrays[:2] for _, arrays in layers]
            found.newest.take_over(operation, [counts[:2] for counts, _ in layers], rows)
            for own, codes, (counts, arrays) in zip(found.counts, found.codes, layers, strict=True):
                own.length = counts[0]
                codes.take_over(counts[2], arrays[2:])
        return config, found


class _Part(NamedTuple):
    """Some of the tokens of an append: which, and their rows."""

    first: int
    end: int
    rows: Views
