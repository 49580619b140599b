"""A `KVCacheStore` of ``tikv.Quant(axis="tokens")``: older tokens as codes, the newest as the model gave them.

The newest tokens lie in a ring of `residual` + `group` slots, which is the store that this one is made of. When it is
full, an append first lets its oldest group be quantised, see `by_channel`: so a token's age decides, not the call that
brought it. Attention reads both parts where they lie and merges them by their log-sum-exps.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from tikv import dtypes, runtime
from tikv.arrays import ArrayView, CacheArray, Views, new_array, view, view_all
from tikv.errors import CapacityError, OptionError, PositionError
from tikv.formats import GroupFormat, Quant
from tikv.ops import checks
from tikv.ops.attention.merge import merge_into
from tikv.ops.attention.options import MOST_QUERIES
from tikv.ops.attention.terms import Terms
from tikv.ops.layouts import Placement
from tikv.ops.row_copy import bind_copy
from tikv.runtime.cache import BoundedCache
from tikv.stores import files, token_group_files
from tikv.stores.append import ROWS
from tikv.stores.attend import AttentionScale, layer_arrays, layer_plan, results_of
from tikv.stores.by_channel import ChannelCodes
from tikv.stores.contiguous import KVCacheStore
from tikv.stores.layer import Layer, rows_of
from tikv.stores.queries import attend_queries, extend_queries, with_tokens
from tikv.stores.snapshot import Snapshot
from tikv.stores.storage import counted, size_in_words
from tikv.stores.whole import whole

_WHY = "a store of groups along tokens"
_OTHER_AXIS = "Use axis='head_dim'."


def _refused(name: str, remedy: str) -> Any:
    """A method that says why it is not offered."""

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        raise OptionError(f"KVCacheStore.{name}: {_WHY} does not offer it. {remedy}")

    method.__name__, method.__doc__ = name, f"Not offered: {_WHY} has none."
    return method


class TokenGroupSnapshot(NamedTuple):
    """What `snapshot` of a store of groups along tokens gives: the newest tokens, and of each layer the codes."""

    rows: Snapshot
    form: tuple[Any, ...]
    codes: list[tuple[int, list[np.ndarray[Any, Any]]]]


class TokenGroupStore(KVCacheStore):
    """`KVCacheStore` for ``dtype=tikv.Quant(axis="tokens")``, which is how it is made; what differs is said there."""

    dtype: Any
    file_kind = token_group_files.KIND

    def __init__(
        self,
        *,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        capacity: int,
        batch_size: int = 1,
        dtype: Quant,
        window: Any = None,
        sinks: int = 0,
        head_dim_v: int | None = None,
        scale_dtype: Any = "float16",
        v_dtype: Any = None,
        k_scale: Any = None,
        v_scale: Any = None,
    ) -> None:
        operation = "KVCacheStore"
        asked = {"window": window, "sinks": sinks or None, "v_dtype": v_dtype, "k_scale": k_scale, "v_scale": v_scale}
        for name, value in asked.items():
            if value is not None:
                raise OptionError(
                    f"{operation}: {name}={value!r} with groups along tokens is not offered. Leave it out, or use "
                    f"axis='head_dim'."
                )
        capacity = checks.integer(capacity, "capacity", operation, low=1)
        slots = dtype.residual + dtype.group
        row_dtype = dtypes.parse(scale_dtype, operation)
        super().__init__(
            num_layers=num_layers,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            head_dim_v=head_dim_v,
            capacity=slots,
            batch_size=batch_size,
            dtype=row_dtype,
            window=slots,
            scale_dtype=scale_dtype,
        )
        base: GroupFormat = dtype.row
        base.groups(self.head_dim_v, "head_dim_v", operation)
        room = max(1, (capacity - dtype.residual) // dtype.group) * dtype.group
        form = (batch_size, self.num_kv_heads, self.head_dim, self.head_dim_v, room, base, row_dtype, row_dtype)
        scratch: BoundedCache[int, Any] = BoundedCache(4)  # of all layers
        self._codes = [ChannelCodes(self.runtime, *form, scratch) for _ in self._layers]
        self.quant, self.capacity, self.windows = dtype, capacity, [None] * self.num_layers
        self.dtype = self.v_dtype = dtype.by_tokens

    @property
    def nbytes(self) -> int:
        """Bytes of codes, scales, biases and the newest tokens, filled or not."""
        return self._memory.nbytes + sum(codes.nbytes for codes in self._codes)

    @whole
    def quantised(self, layer: int) -> int:
        """How many of a layer's tokens, the oldest, are codes."""
        return self._codes[self._layer(layer, "KVCacheStore.quantised").index].tokens

    @whole
    def held(self, layer: int) -> int:
        """Tokens that a layer holds: its length."""
        return self._layer(layer, "KVCacheStore.held").length

    @whole
    def positions(self, layer: int) -> np.ndarray[Any, Any]:
        """(batch, H, held) int64 on the host: 0, 1 and so on."""
        length = self._layer(layer, "KVCacheStore.positions").length
        return np.array(np.broadcast_to(np.arange(length), (self.batch_size, self.num_kv_heads, length)), np.int64)

    # --- writes

    @whole
    def append(self, layer: int, k: Any, v: Any, *, layout: str = "token_major", positions: Any | None = None) -> None:
        """Append new tokens to one layer, in a launch for those that fit, and three for each group that becomes codes.

        Raises:
            As `KVCacheStore.append`; OptionError with ``positions``.
        """
        operation = "KVCacheStore.append"
        to = self._layer(layer, operation)
        self._refuse_positions(operation, positions)
        rows, axes = self._checked(operation, to, view_all((k, v), ROWS, operation), layout)
        for part in self._parts(operation, to, rows, axes[0]):
            self._appends.append(operation, to, part.rows, layout)

    @whole
    def append_all(self, k: Any, v: Any, *, layout: str = "token_major", positions: Any | None = None) -> None:
        """`append` to all layers.

        Raises:
            As `append`. Nothing is written to any layer.
        """
        operation = "KVCacheStore.append_all"
        self._layer(0, operation)
        self._refuse_positions(operation, positions)
        rows = view_all((k, v), ROWS, operation)
        stacked, axes = self._appends.checked(operation, self._layers, rows, layout, True)
        for to in self._layers:
            self._require_room(operation, to, stacked[0].shape[1 + axes[0]])
        for to in self._layers:
            own = [a.restrided(a.shape[1:], a.strides[1:], to.index * a.strides[0]) for a in stacked]
            for part in self._parts(operation, to, own, axes[0]):
                self._appends.append(operation, to, part.rows, layout)

    def _refuse_positions(self, operation: str, positions: Any) -> None:
        if positions is not None:
            raise OptionError(f"{operation}: {_WHY} ages by what the host counts. Append without positions.")

    def _require_room(self, operation: str, layer: Layer, tokens: int) -> None:
        checks.fits_linear(layer.length, tokens, self.capacity, f"{operation} (layer {layer.index})")

    def _checked(
        self, operation: str, layer: Layer, rows: Views, layout: str
    ) -> tuple[list[ArrayView], tuple[int, int]]:
        """New K and V that fit the layer as (batch, ., ., width), and their axes of tokens and heads."""
        found, axes = self._appends.checked(operation, [layer], rows, layout, False)
        self._require_room(operation, layer, found[0].shape[1 + axes[0]])
        return [a.restrided(a.shape[1:], a.strides[1:]) for a in found], axes

    def _parts(self, operation: str, layer: Layer, rows: Sequence[ArrayView], token_axis: int) -> Iterator[_Part]:
        """New rows in parts that the ring has room for, once a group of its oldest became codes where it is full."""
        codes, tokens, first = self._codes[layer.index], rows[0].shape[token_axis], 0
        while first < tokens:
            if layer.length - codes.tokens >= layer.slots:
                codes.encode(operation, layer)
            end = min(tokens, first + layer.slots - (layer.length - codes.tokens), first + MOST_QUERIES)
            yield _Part(first, end, Views([a.part(token_axis, first, end) for a in rows]))
            first = end

    # --- reads

    @whole
    def tokens(self, layer: int) -> tuple[CacheArray, CacheArray]:
        """What a layer holds as a copy, float32: K (batch, H, n, D) and V (batch, H, n, D_v)."""
        operation = "KVCacheStore.tokens"
        found, codes = self._layer(layer, operation), self._codes[layer]
        shape = (self.batch_size, self.num_kv_heads, found.length)
        out = [new_array((*shape, width), dtypes.float32, self.runtime) for width in (self.head_dim, self.head_dim_v)]
        codes.decode(operation, *out)
        newest = found.length - codes.tokens
        if newest:
            bind_copy(
                self.runtime,
                operation,
                src=[rows_of(found.k), rows_of(found.v)],
                dst=[rows_of(a, codes.tokens) for a in out],
                widths=(self.head_dim, self.head_dim_v),
                heads=self.num_kv_heads,
                tokens=newest,
                groups=self.batch_size,
                src_place=Placement("ring"),
                src_position=found.slot_of(codes.tokens),
                ring=found.ring,
            ).bound.launch()
        return CacheArray(out[0], self.runtime), CacheArray(out[1], self.runtime)

    @whole
    def attend(
        self,
        layer: int,
        q: Any,
        *,
        layout: str = "token_major",
        scale: float | None = None,
        return_lse: bool = False,
        impl: str = "auto",
        softcap: float | None = None,
        out: Any = None,
        seq_lens: Any = None,
        missing: str = "raise",
        sink_logits: Any = None,
        alibi_slopes: Any = None,
        return_mass: bool = False,
        mass_queries: int | None = None,
        mask: Any = None,
        parents: Any = None,
    ) -> Any:
        """Attention of the newest tokens' queries over what a layer holds, both parts read in place.

        Raises:
            PositionError: a query's own token is codes already: `extend` attends before.
            OptionError: slopes, mass, ``seq_lens`` or torch's attention.
            Others as `KVCacheStore.attend`.
        """
        operation = "KVCacheStore.attend"
        found = self._layer(layer, operation)
        asked = {"seq_lens": seq_lens, "alibi_slopes": alibi_slopes, "mass_queries": mass_queries, "out": out}
        mass = checks.flag(return_mass, "return_mass", operation)
        asked |= {"return_mass": mass or None, "mask": mask, "parents": parents}
        _refuse(operation, asked)
        checks.option(impl, "impl", operation, ("auto", "taichi"))
        checks.option(missing, "missing", operation, ("raise", "ignore"))
        return_lse = checks.flag(return_lse, "return_lse", operation)
        scores = AttentionScale.checked(scale, softcap, operation)
        live, terms = self.runtime, Terms(sink_logits).views(operation)
        form = self.batch_size, self.num_kv_heads, self.head_dim
        queries = attend_queries(operation, view(q, "q", operation), layout, *form, live)
        several = with_tokens(queries.heads_first, 4)
        layer_plan(live, operation, layer_arrays(found, several, terms), found, scores)
        newest = found.length - self._codes[layer].tokens
        if found.length and queries.tokens > newest:
            raise PositionError(
                f"{operation}: {queries.tokens} queries, and the newest {newest} tokens of layer {layer} are no codes "
                f"yet. Attend with at most so many, or use extend(), which attends as it appends."
                f"{queries.remedy(newest, self.num_kv_heads)}"
            )
        result, lse = queries.new_out(q, self.head_dim_v, live), queries.new_lse(q, live)
        to = with_tokens(queries.as_read(view(result, "out", operation)), 4)
        to_lse = with_tokens(queries.as_read(view(lse, "lse", operation)), 3)
        self._attend(operation, found, several, scores, terms, to, to_lse)
        return results_of(result, lse if return_lse else None, None)

    def _attend(
        self,
        operation: str,
        layer: Layer,
        q: ArrayView,
        scores: AttentionScale,
        terms: dict[str, ArrayView],
        out: ArrayView,
        lse: ArrayView,
    ) -> None:
        """Attention of (batch, Hq, T, D) queries of the newest tokens, into `out` and `lse`."""
        codes, arrays = self._codes[layer.index], layer_arrays(layer, q, terms)
        plan = layer_plan(self.runtime, operation, arrays, layer, scores)
        if codes.tokens == 0:
            plan.attend(None, arrays, out, True, "taichi", layer.length, layer.valid_from, lse=lse)
            return
        part = new_array(out.shape, dtypes.float32, self.runtime)
        oldest = max(layer.valid_from, codes.tokens)
        of_ring = plan.attend(None, arrays, part, True, "taichi", layer.length, oldest, is_part=True)
        merge_into(operation, (*of_ring, *codes.attend(operation, q, scores)), False, out, lse)

    @whole
    def extend(
        self,
        layer: int,
        q: Any,
        k: Any,
        v: Any,
        *,
        layout: str = "token_major",
        scale: float | None = None,
        softcap: float | None = None,
        return_lse: bool = False,
        sink_logits: Any = None,
        alibi_slopes: Any = None,
        return_mass: bool = False,
        mass_queries: int | None = None,
        mask: Any = None,
        parents: Any = None,
    ) -> Any:
        """Append new tokens and attend with their queries, as many at a time as the ring of the newest has room for.

        Each query sees what it would see if the tokens came one at a time.

        Raises:
            As `append` and `attend`. Nothing is written.
        """
        operation = "KVCacheStore.extend"
        found = self._layer(layer, operation)
        mass = checks.flag(return_mass, "return_mass", operation)
        asked = {"alibi_slopes": alibi_slopes, "mass_queries": mass_queries, "return_mass": mass or None}
        _refuse(operation, asked | {"mask": mask, "parents": parents})
        return_lse = checks.flag(return_lse, "return_lse", operation)
        scores, terms = AttentionScale.checked(scale, softcap, operation), Terms(sink_logits).views(operation)
        rows, axes = self._checked(operation, found, view_all((k, v), ROWS, operation), layout)
        live, form = self.runtime, (self.batch_size, self.num_kv_heads, self.head_dim)
        queries = extend_queries(operation, view(q, "q", operation), layout, *form, rows[0].shape[axes[0]], live)
        rows_of_q = queries.heads_first
        layer_plan(live, operation, layer_arrays(found, rows_of_q, terms), found, scores)
        out, lse = queries.new_out(q, self.head_dim_v, live), queries.new_lse(q, live)
        to, to_lse = queries.as_read(view(out, "out", operation)), queries.as_read(view(lse, "lse", operation))
        for part in self._parts(operation, found, rows, axes[0]):
            self._appends.append(operation, found, part.rows, layout)
            own = [a.part(2, part.first, part.end) for a in (rows_of_q, to, to_lse)]
            self._attend(operation, found, own[0], scores, terms, *own[1:])
        return results_of(out, lse if return_lse else None, None)

    # --- what lets go

    @whole
    def trim(self, n: int) -> None:
        """Drop the ``n`` newest tokens of every layer; those that are codes stay, or all go by `reset`.

        Raises:
            PositionError: more than `length`, or a token that is codes. Nothing is changed.
        """
        operation = "KVCacheStore.trim"
        runtime.require_alive(self.runtime, operation)
        n = checks.integer(n, "n", operation)
        length = self.length
        if n == length:
            self.reset()
            return
        coded = max(codes.tokens for codes in self._codes)
        if n < length and length - n < coded:
            raise PositionError(
                f"{operation}: cannot drop {n} tokens of length={length}: the first {coded} are codes of whole groups, "
                f"quantised once. Drop at most {length - coded}, or reset()."
            )
        super().trim(n)

    @whole
    def reset(self) -> None:
        """Forget all tokens. The memory stays, with what was in it."""
        super().reset()
        for codes in self._codes:
            codes.tokens = 0

    # --- copies and files

    def _form(self) -> tuple[Any, ...]:
        """What a store has to share with one whose contents it takes over."""
        shape = (self.num_layers, self.batch_size, self.num_kv_heads, self.head_dim, self.head_dim_v)
        return (*shape, self.quant, self.scale_dtype.name)

    @whole
    def snapshot(self) -> Any:
        """Copy what the store holds, to return to it with `restore`; the codes by way of the host."""
        return TokenGroupSnapshot(
            super().snapshot(), self._form(), [(codes.tokens, codes.copy_to_host()) for codes in self._codes]
        )

    @whole
    def restore(self, snapshot: Any) -> None:
        """Return to a snapshot of this store, or of one of the same form.

        Raises:
            OptionError: it is no snapshot, or one of a store of another form.
            CapacityError: it has more tokens than this store has room for. Nothing is changed.
        """
        operation = "KVCacheStore.restore"
        if not isinstance(snapshot, TokenGroupSnapshot) or snapshot.form != self._form():
            raise OptionError(f"{operation}: {snapshot!r:.200} is not of a store of this form ({self!r}).")
        longest = max(length for length, *_ in snapshot.rows.counts)
        if longest > self.capacity or max(tokens for tokens, _ in snapshot.codes) > self._codes[0].room:
            raise CapacityError(
                f"{operation}: the snapshot has {longest} tokens, and there is room for {self.capacity}. Restore it "
                f"into a store of that capacity or more."
            )
        super().restore(snapshot.rows)
        for codes, (tokens, arrays) in zip(self._codes, snapshot.codes, strict=True):
            codes.take_over(tokens, arrays)

    @whole
    def save(self, path: str | os.PathLike[str]) -> None:
        """Save all that is held and all counts to a .safetensors file, which `tikv.KVCacheStore.load` reads.

        Raises:
            CacheFileError: another ending, or the system refuses. An old file stays as it was.
        """
        operation = "KVCacheStore.save"
        runtime.require_alive(self.runtime, operation)
        files.target_of(path, operation)
        form = {
            "num_layers": self.num_layers,
            "num_kv_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "head_dim_v": self.head_dim_v,
            "capacity": self.capacity,
            "batch_size": self.batch_size,
            "scale_dtype": self.scale_dtype.name,
        }
        layers = [
            ((layer.length, layer.valid_from, codes.tokens), [*arrays, *codes.copy_to_host()])
            for (layer, arrays), codes in zip(self.host_layers(), self._codes, strict=True)
        ]
        token_group_files.write(path, form, self.quant, layers, operation)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> TokenGroupStore:
        """A new store with the form, counts and contents of a saved one; as `KVCacheStore.load`."""
        operation = "KVCacheStore.load"
        form, quant, layers = token_group_files.read(path, operation)
        with files.understanding(path, operation):
            store = cls(**form, dtype=quant)
            rows = [arrays[:2] for _, arrays in layers]
            store.take_over([counts[:2] for counts, _ in layers], rows, operation)
            for codes, (counts, arrays) in zip(store._codes, layers, strict=True):
                codes.take_over(counts[2], arrays[2:])
        return store

    def _states_of(self, layer: Layer, mass: Any) -> list[tuple[Any, ...]]:
        """What is drawn of a layer: a strip of all tokens."""
        if mass is not None:
            raise OptionError(f"KVCacheStore.draw: {_WHY} has no mass. Leave it out.")
        return [("", self.capacity, 0, False, layer.length, 0)]

    @whole
    def __repr__(self) -> str:
        batch = f" x batch {self.batch_size}" if self.batch_size > 1 else ""
        return (
            f"KVCacheStore({counted(self.num_layers, 'layer')}{batch} x {counted(self.num_kv_heads, 'head')} x "
            f"{self._memory.width}, "
            f"{self.dtype.name}, {self.quant.residual} or more {self.scale_dtype.name}, "
            f"{self.length}/{self.capacity} tokens, {size_in_words(self.nbytes)}, {self.runtime.arch})"
        )

    positions_on_device: Callable[..., Any] = _refused("positions_on_device", _OTHER_AXIS)
    advance: Callable[..., Any] = _refused("advance", _OTHER_AXIS)
    check_step: Callable[..., Any] = _refused("check_step", "Call append() and attend().")
    compact: Callable[..., Any] = _refused("compact", _OTHER_AXIS)
    compact_all: Callable[..., Any] = _refused("compact_all", _OTHER_AXIS)
    commit: Callable[..., Any] = _refused("commit", "Trim what was not taken.")
    reorder: Callable[..., Any] = _refused("reorder", _OTHER_AXIS)
    select: Callable[..., Any] = _refused("select", _OTHER_AXIS)
    repeat: Callable[..., Any] = _refused("repeat", _OTHER_AXIS)
    keys: Callable[..., Any] = _refused("keys", "Read tokens().")
    values: Callable[..., Any] = _refused("values", "Read tokens().")
    scales: Callable[..., Any] = _refused("scales", "Read tokens().")


class _Part(NamedTuple):
    """Some of the tokens of an append: which, and their rows."""

    first: int
    end: int
    rows: Views


def _refuse(operation: str, asked: dict[str, Any]) -> None:
    for name, value in asked.items():
        if value is not None:
            raise OptionError(f"{operation}: {_WHY} does not offer {name}. Leave it out, or use axis='head_dim'.")


KVCacheStore.of_token_groups = TokenGroupStore
