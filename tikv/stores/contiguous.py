"""KVCacheStore: owns the keys and values of all layers, and knows how many tokens each layer holds.

Memory is head-major, (num_layers, batch, num_kv_heads, slots, head_dim), see `layer`. A layer with a window is a ring
behind its sinks. `append` has the writes, `snapshot` the copies, `files` what is on disk.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import numpy as np

from tikv import dtypes, runtime
from tikv.arrays import CacheArray, read_host, runtime_of, to_device, view, view_all
from tikv.errors import CapacityError, OptionError, ShapeError
from tikv.formats import Quant
from tikv.ops import checks
from tikv.ops.attention.options import IMPLEMENTATIONS
from tikv.ops.attention.terms import Terms
from tikv.ops.indices import index_array
from tikv.stores import contiguous_files, files
from tikv.stores.append import NAMES, ROWS, Appends, check_step
from tikv.stores.attend import (
    MISSING,
    AttentionScale,
    attend_in_order,
    extend,
    last_queries,
    layer_arrays,
    layer_plan,
    mass_queries_of,
    refuse_missing,
    results_of,
    weigh,
)
from tikv.stores.commit import Drafts
from tikv.stores.compaction import tokens_by_head
from tikv.stores.kept import Kept, require_uncompacted
from tikv.stores.layer import Layer, LayerMemory
from tikv.stores.queries import attend_queries
from tikv.stores.snapshot import Snapshot, require_snapshot, take_over
from tikv.stores.storage import divisors_of, named_divisors, storage_or_format
from tikv.stores.store_changes import StoreChanges
from tikv.stores.whole import whole


class KVCacheStore(Drafts, StoreChanges, runtime.DeepCopied):
    """Keys and values of a model's layers, appended token by token or prompt by prompt.

    Args:
        num_layers: layers of the model.
        num_kv_heads: heads of K and V.
        head_dim: width of a head of K, and of V unless ``head_dim_v`` says otherwise.
        capacity: tokens that a layer without a window holds.
        batch_size: sequences, all of one length.
        dtype: storage: float32, float16, bfloat16, float64, float8_e4m3fn, float8_e5m2, int8 with a scale per token
            and head; or groups of a few bits: a `tikv.Quant`, "q8_0" or "q4_0", see `tikv.quantize`. With groups along
            tokens, ``tikv.Quant(axis="tokens", residual=R)``, the newest R to R + group - 1 tokens stay in
            ``scale_dtype``; older ones are quantised once, a group at a time, by their position: keys by channel,
            values along their columns. `append`, `append_all`, `attend`, `extend`, `trim` as far as to the codes,
            `reset`, `snapshot`, `save` and `draw` are what such a store has, and ``quantised(layer)``, the number of
            tokens that are codes; it has no window.
        v_dtype: storage of V, where that is another than that of K.
        k_scale, v_scale: of 8-bit floats, a number or (num_kv_heads,): rows are divided by it before they are stored,
            and multiplied where they are read. None for 1.
        window: None; or the slots of a sliding layer, sinks included, at most ``capacity``; or one of these for each
            layer.
        sinks: first tokens that a sliding layer keeps for ever.
        head_dim_v: width of a head of V.
        scale_dtype: of the scales of int8 or of a `tikv.Quant`, float16 or float32.

    Attributes:
        num_layers, num_kv_heads, head_dim, head_dim_v, capacity, sinks, scale_dtype: as given.
        v_dtype: what values are stored in.
        batch_size: sequences now; `select` and `repeat` change it.
        dtype: what keys are stored in, and values unless `v_dtype` says otherwise.
        windows: of each layer, the slots of a sliding one or None.
        lock: a lock that each call holds, and that one thread may take again.

    Raises:
        CapacityError: a layer is larger than a launch on this arch can address.
        DTypeError, OptionError, PositionError, ShapeError: an argument that is none.

    Exactness: rows keep their bits; a narrowing dtype rounds to nearest even; int8 is stated in `tikv.quantize`.
    Cost: an append is one launch, whatever the length; reading `length` never waits for the device. Layers lie in as
    few blocks of memory as a launch can address, nearly always one; `append_all` is one launch a block. Of two
        formats appends and reads are a launch each for K and for V; attention is one.
    Threads: each call is whole, and calls of several threads come one after the other. Hold ``lock`` to make one of
    several calls.
    GPUs: the memory lies on the one that is torch's current when the store is made.
    Copies: `copy.deepcopy()` gives a store with the same contents in memory of its own; `copy.copy()` and `pickle` are
    refused. `snapshot` copies what is held, `save` takes it to another process.

    Examples:
        >>> import numpy as np, tikv
        >>> store = tikv.KVCacheStore(num_layers=1, num_kv_heads=2, head_dim=4, capacity=8, dtype="float32", window=4)
        >>> k = np.arange(6 * 8, dtype=np.float32).reshape(6, 2, 4)
        >>> store.append(0, k, k)
        >>> store.length, store.tokens(0)[0].shape
        (6, (1, 2, 4, 4))
        >>> bool((np.asarray(store.tokens(0)[0])[0] == k[2:].transpose(1, 0, 2)).all())
        True
    """

    instead = "Use copy.deepcopy(); snapshot() to return to what it holds; save() and load() for another process."

    of_token_groups: ClassVar[Any]  # the store for groups along tokens: `stores.token_groups`

    def __new__(cls, *args: Any, **form: Any) -> KVCacheStore:
        """A store of the kind that the dtype asks for."""
        dtype = form.get("dtype")
        if cls is KVCacheStore and isinstance(dtype, Quant) and dtype.axis == "tokens":
            cls = cls.of_token_groups
        return super().__new__(cls)

    def __init__(
        self,
        *,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        capacity: int,
        batch_size: int = 1,
        dtype: Any = "float16",
        window: int | Sequence[int | None] | None = None,
        sinks: int = 0,
        head_dim_v: int | None = None,
        scale_dtype: Any = "float16",
        v_dtype: Any = None,
        k_scale: Any = None,
        v_scale: Any = None,
    ) -> None:
        operation = "KVCacheStore"
        self.runtime = runtime_of()
        self.num_layers = checks.integer(num_layers, "num_layers", operation, low=1)
        self.num_kv_heads = checks.integer(num_kv_heads, "num_kv_heads", operation, low=1)
        self.head_dim = checks.integer(head_dim, "head_dim", operation, low=1)
        self.head_dim_v = (
            self.head_dim if head_dim_v is None else checks.integer(head_dim_v, "head_dim_v", operation, low=1)
        )
        self.capacity = checks.integer(capacity, "capacity", operation, low=1)
        batch_size = checks.integer(batch_size, "batch_size", operation, low=1)
        given = dtype, dtype if v_dtype is None else v_dtype
        (self.dtype, k_scales), (self.v_dtype, v_scales) = (
            storage_or_format(x, scale_dtype, self.runtime, operation) for x in given
        )
        self.scale_dtype = k_scales or v_scales or dtypes.parse(scale_dtype, operation)
        kept = self.dtype, self.v_dtype
        divisors = divisors_of(kept, (k_scale, v_scale), self.num_kv_heads, operation)
        self.sinks = checks.integer(sinks, "sinks", operation)
        self.windows = self._windows(window, operation)
        self._layers = [Layer(i, self.capacity, w, self.sinks) for i, w in enumerate(self.windows)]
        self._counts = self._layers  # what lengths are counted in; a store of a part of the tokens counts all of them
        self._memory = LayerMemory(
            self.runtime,
            self._layers,
            batch_size=batch_size,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            head_dim_v=self.head_dim_v,
            dtype=self.dtype,
            scale_dtype=self.scale_dtype,
            v_dtype=self.v_dtype,
            divisors=divisors,
        )
        self._appends = Appends(self._memory)
        self.lock = self._memory.lock

    __deepcopy__ = whole(runtime.DeepCopied.__deepcopy__)

    def _windows(self, window: Any, operation: str) -> list[int | None]:
        one_each = isinstance(window, Iterable) and getattr(window, "ndim", 1) != 0
        given = list(window) if one_each else [window] * self.num_layers
        if len(given) != self.num_layers:
            raise ShapeError(
                f"{operation}: window has {len(given)} entries for num_layers={self.num_layers}. Give one a layer."
            )
        found = [checks.window_of(w, self.capacity, operation) for w in given]
        if self.sinks and all(w is None for w in found):
            raise OptionError(f"{operation}: sinks={self.sinks} without a window. Give a window, or sinks=0.")
        for w in found:
            if w is not None and self.sinks >= w:
                raise CapacityError(
                    f"{operation}: sinks={self.sinks} leave no slot of window={w} to slide. Use sinks < {w}."
                )
        return found

    def append(self, layer: int, k: Any, v: Any, *, layout: str = "token_major", positions: Any | None = None) -> None:
        """Append new tokens to one layer, in one launch.

        Args:
            layer: its index.
            k, v: (batch, T, H, D) token-major or (batch, H, T, D) head-major; without the batch axis when it is 1.
                V may be narrower or wider, as the store is. Of the store's dtype; float32 for a float16 or bfloat16
                store; float32, float16 or bfloat16 for what has scales and for floats of 8 bits.
            layout: "token_major" or "head_major".
            positions: (batch,) int32 or int64 where the launch reads them, in the end on the device: the absolute
                position of each sequence's first new token, instead of `length`. For launches that are captured and
                replayed, see `positions_on_device`: counts on the host stay as they are, and a token outside a layer
                without a window is skipped.

        Raises:
            CapacityError: a layer without a window would overflow. Nothing is written.
            ShapeError, DTypeError, OptionError, StaleRuntimeError: the arrays or options do not fit the store.
            ArchError: a CUDA graph is being captured, without ``positions``.

        Exactness, cost: as the class says.
        """
        operation = "KVCacheStore.append"
        to = self._layer(layer, operation)
        layout = checks.name(layout, "layout", operation, checks.LAYOUTS)
        if positions is not None:
            with self.lock:
                require_uncompacted([to], operation, "Append without positions.")
                self._appends.append_at(operation, [to], view_all((k, v, positions), NAMES, operation), layout, False)
            return
        rows = view_all((k, v), ROWS, operation)
        key = (layer, rows.key, layout)
        with self.lock:
            plan = self._appends.plans.get(key)
            if plan is None:
                self._appends.append_first(operation, [to], rows, layout, key, False)
            else:
                plan.append(rows)

    @whole
    def append_all(self, k: Any, v: Any, *, layout: str = "token_major", positions: Any | None = None) -> None:
        """Append new tokens to all layers, in one launch, or one a block (see the class).

        Args:
            k, v: (num_layers, batch, T, H, D) token-major or (num_layers, batch, H, T, D) head-major; the batch axis
                may be left out when it is 1.
            layout: "token_major" or "head_major".
            positions: as in `append`, for all layers; one launch where the batch is 1 and all layers have one window.

        Raises:
            As `append`. Nothing is written to any layer.

        Cost: as the class says; a launch a layer where the layers are of different lengths, and where one stride does
        not lead through all sequences of all layers of k and of v, as when the batch is their outer axis.
        """
        operation = "KVCacheStore.append_all"
        self._layer(0, operation)
        layout = checks.name(layout, "layout", operation, checks.LAYOUTS)
        if positions is not None:
            require_uncompacted(self._layers, operation, "Append without positions.")
            given = view_all((k, v, positions), NAMES, operation)
            self._appends.append_at(operation, self._layers, given, layout, True)
            return
        rows = view_all((k, v), ROWS, operation)
        key = ("all", rows.key, layout)
        plan = self._appends.plans.get(key)
        if plan is None or not plan.in_step():
            self._appends.append_first(operation, self._layers, rows, layout, key, True)
        else:
            plan.append(rows)

    @whole
    def positions_on_device(self) -> CacheArray:
        """(batch_size,) int32 on the device, all `length` now: positions that launches read and a graph can advance.

        Give them to `append` in a step that is captured, add the step's tokens to them there, and replay; then tell the
        store with `advance`. Take the array's ``torch()`` once, before the capture.

        Raises:
            PositionError: `length` does not fit int32.

        Examples:
            >>> import numpy as np, tikv
            >>> store = tikv.KVCacheStore(num_layers=1, num_kv_heads=1, head_dim=2, capacity=8, dtype="float32")
            >>> positions = store.positions_on_device()
            >>> for _ in range(3):
            ...     store.append(0, *np.ones((2, 1, 1, 2), np.float32), positions=positions)
            ...     positions.numpy()[:] += 1
            >>> store.advance(3)
            >>> store.length
            3
        """
        operation = "KVCacheStore.positions_on_device"
        runtime.require_alive(self.runtime, operation)
        require_uncompacted(self._layers, operation, "Append without positions.")
        lens = self._lens(operation, "Append without positions, or reset().")
        return CacheArray(to_device(lens, self.runtime), self.runtime)

    @whole
    def advance(self, tokens: int) -> None:
        """Count ``tokens`` more in every layer: those that appends with ``positions`` have put behind `length`.

        Raises:
            CapacityError: a layer without a window has no room for them; they were skipped.
            PositionError: a negative number.

        Cost: none on the device.
        """
        operation = "KVCacheStore.advance"
        runtime.require_alive(self.runtime, operation)
        tokens = checks.integer(tokens, "tokens", operation)
        require_uncompacted(self._counts, operation, "Append without positions.")
        for layer in self._counts:
            if layer.ring == 0:
                checks.fits_linear(layer.length, tokens, layer.slots, f"{operation} (layer {layer.index})")
        for layer in self._counts:
            layer.grow(tokens)

    @whole
    def check_step(self, operation: str, layers: Sequence[int], tokens: int) -> list[int]:
        """For a `Step`: check that these layers, of one length, take so many tokens; what each was trimmed to.

        Raises:
            CapacityError, PositionError: they do not.
        """
        chosen = [self._layers[i] for i in layers]
        require_uncompacted(chosen, operation, "Call append() and attend().")
        return check_step(chosen, tokens, operation)

    @whole
    def count_step(self, layers: Sequence[int], tokens: int) -> None:
        """For a `Step`: count the tokens that it launched."""
        for i in layers:
            self._layers[i].grow(tokens)

    @property
    def memory_version(self) -> int:
        """How often memory was made: what is bound to it knows by that when it is gone."""
        return self._memory.version

    @whole
    def tokens(self, layer: int) -> tuple[CacheArray, CacheArray]:
        """What a layer holds, in temporal order, as a copy: K (batch, H, n, D) and V (batch, H, n, D_v).

        ``n`` is what the layer holds: `length`, or for a sliding layer its sinks and the newest tokens behind them, or
        what `compact` left. Zeros stand behind the last of a head that holds fewer than others. What has scales
        comes as float32.

        Cost: one launch, each row read and written once.
        """
        operation = "KVCacheStore.tokens"
        found = self._layer(layer, operation)
        if found.head_lengths is not None:
            return tokens_by_head(operation, self._memory, found)
        return self._memory.tokens(operation, found)

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
        """Attention of the newest tokens' queries over what a layer holds, read in place: `tikv.decode_attention`.

        Append the tokens first; of one query that is all. Several queries are those of a prompt: in a sliding layer its
        last tokens may have overwritten what its first queries see. `extend` is for that.

        Args:
            layer: its index.
            q: (batch, T, Hq, D) token-major or (batch, Hq, T, D) head-major, or (batch, Hq, D) of one query each;
                float32, float16 or bfloat16. num_kv_heads divides Hq. Where the batch is 1 its axis may be left out:
                three axes are then (T, Hq, D) or head-major (Hq, T, D), two are (Hq, D). What fits the other layout
                alone is refused.
            layout: of q and of what is returned, "token_major", as `append` and `extend` have it, or "head_major".
            out: array for the result, in its shape, of q's dtype.
            scale, return_lse, impl, softcap, sink_logits, alibi_slopes, mask, parents: as in
                `tikv.decode_attention`.
            seq_lens: (batch,) int32 or int64 where the launch reads them, in the end on the device: tokens of each
                sequence, instead of `length`; what goes with `append` at ``positions``.
            missing: what to do where one of several queries sees a token of a sliding layer that a newer one has
                overwritten: "raise", or "ignore" to attend over what is left. One query misses nothing.
            return_mass: also return the attention mass of the layer's tokens: how much weight the queries gave each.
            mass_queries: the mass is that of so many of the last queries; None for all.

        Returns:
            ``out``, or a new array of q's kind and dtype, with q's axes and V's width; with ``return_lse`` also the
            log-sum-exp, float32 in the shape of the result without its last axis; the mass last, float32 (batch,
            num_kv_heads, n) in the order of `tokens`, summed over the queries and the query heads of a KV head.

        Raises:
            PositionError: more queries than tokens; or ``missing`` as said.
            OptionError: mass with ``seq_lens``, by which the host does not know what is held.
            ShapeError, DTypeError, OptionError, StaleRuntimeError: as `tikv.decode_attention`.

        Examples:
            >>> import numpy as np, tikv
            >>> store = tikv.KVCacheStore(num_layers=1, num_kv_heads=1, head_dim=2, capacity=4, dtype="float32")
            >>> store.append(0, np.zeros((3, 1, 2), np.float32), np.arange(6, dtype=np.float32).reshape(3, 1, 2))
            >>> store.attend(0, np.ones((1, 2, 2), np.float32)).tolist()
            [[[2.0, 3.0], [2.0, 3.0]]]
        """
        operation = "KVCacheStore.attend"
        found = self._layer(layer, operation)
        return_lse = checks.flag(return_lse, "return_lse", operation)
        given = Terms(sink_logits, alibi_slopes, mask, index_array(parents))
        wanted = mass_queries_of(return_mass, mass_queries, given, operation, self._memory.formats[0])
        if wanted != 0 and seq_lens is not None:
            raise OptionError(
                f"{operation}: return_mass with seq_lens: the mass is of the tokens that the store counts."
            )
        memory, live = self._memory, self.runtime
        queries = attend_queries(
            operation, view(q, "q", operation), layout, memory.batch_size, self.num_kv_heads, self.head_dim, live
        )
        arrays = layer_arrays(found, queries.heads_first, given.views(operation))
        length, oldest = found.length, found.valid_from
        if found.head_lengths is not None and seq_lens is None:
            arrays["lens"], length = found.head_lengths.array, 0
        if seq_lens is not None:
            require_uncompacted([found], operation, "Leave seq_lens out.")
            arrays["lens"] = lens = view(seq_lens, "seq_lens", operation)
            checks.on_device([("seq_lens", lens)], live, operation)
            length, oldest = 0, found.trimmed_to
        else:
            queries.refuse_more_than(operation, found.length, self.num_kv_heads)
        scores = AttentionScale.checked(scale, softcap, operation)
        plan = layer_plan(live, operation, arrays, found, scores)
        checks.option(impl, "impl", operation, IMPLEMENTATIONS)
        if checks.option(missing, "missing", operation, MISSING) == "raise" and queries.tokens > 1:
            refuse_missing(operation, found, queries.tokens, seq_lens is not None)
        result, lse = attend_in_order(plan, q, queries, arrays, out, return_lse or wanted != 0, impl, length, oldest)
        if wanted == 0:
            return results_of(result, lse, None)
        to_lse = queries.as_read(view(lse, "lse", operation))
        mass = weigh(operation, memory, found, *last_queries(queries.heads_first, to_lse, wanted), scores, q)
        return results_of(result, lse if return_lse else None, mass)

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
        """Attend with new tokens' queries over what a layer holds and the new tokens, and append those, in one call.

        Each query sees all tokens up to its own; in a sliding layer the sinks and the window of its own position, also
        where the prompt is longer than the window. It is what a model does with a prompt and with one token alike.

        Args:
            layer: its index.
            q: (batch, T, Hq, D) token-major or (batch, Hq, T, D) head-major, or without the batch axis when it is 1;
                float32, float16 or bfloat16. num_kv_heads divides Hq.
            k, v: the T new tokens, as in `append`, in the same layout.
            layout: "token_major" or "head_major".
            scale, softcap, sink_logits, alibi_slopes, mask, parents: as in `tikv.decode_attention`; a mask or a tree of
                at most 256 tokens.
            return_lse: also return the log-sum-exp of the scores, float32, in the shape of the result without its last
                axis.
            return_mass, mass_queries: as in `attend`; the mass is of the tokens held in the end.

        Returns:
            A new array of q's kind and dtype in the layout of ``q``, of V's width; with ``return_lse`` also lse, and
            with ``return_mass`` the mass as `attend` gives it.

        Raises:
            As `append` and `attend`. Nothing is written.

        Exactness: attention over the tokens as they are stored: rounded to the store's dtype, or int8. Float32
            arithmetic, one rounding at the end. What is appended has the bits that `append` writes.
        Cost: as `append` and then `attend`, 256 queries at a time. Where a prompt overwrites a sliding layer's tokens,
            the layer and the new tokens are read by a launch each and a third one merges; new tokens that the store
            converts are written twice. The cache is never copied.

        Examples:
            >>> import numpy as np, tikv
            >>> form = {"num_layers": 1, "num_kv_heads": 1, "head_dim": 2, "capacity": 4, "window": 2}
            >>> store = tikv.KVCacheStore(**form, dtype="float32")
            >>> v = np.arange(10, dtype=np.float32).reshape(5, 1, 2)
            >>> store.extend(0, np.ones((5, 1, 2), np.float32), np.zeros_like(v), v)[:, 0, 0].tolist()
            [0.0, 1.0, 3.0, 5.0, 7.0]
            >>> store.length, store.tokens(0)[1].numpy()[0, 0, :, 0].tolist()
            (5, [6.0, 8.0])
        """
        operation = "KVCacheStore.extend"
        found = self._layer(layer, operation)
        scores = AttentionScale.checked(scale, softcap, operation)
        return_lse = checks.flag(return_lse, "return_lse", operation)
        terms = Terms(sink_logits, alibi_slopes, mask, index_array(parents))
        wanted = mass_queries_of(return_mass, mass_queries, terms, operation, self._memory.formats[0])
        return extend(operation, self._appends, found, (q, k, v), layout, scores, return_lse, terms, wanted)

    @whole
    def snapshot(self) -> Snapshot:
        """Copy what the store holds, to return to it with `restore`; on the device, filled slots only."""
        runtime.require_alive(self.runtime, "KVCacheStore.snapshot")
        return Snapshot(self._memory)

    @whole
    def restore(self, snapshot: Snapshot) -> None:
        """Return to a snapshot of this store: lengths and contents, whatever was appended or trimmed since.

        A snapshot of another store is taken too, if that one has the same layers, heads, widths, windows, sinks and
        dtypes. Its capacity may be another: this store keeps its own, which has to hold the snapshot's tokens.

        Raises:
            OptionError, ShapeError: it is no snapshot, or one of a store of another form.
            CapacityError: a layer has too little room for its tokens, or one of its batch would be larger than a launch
                can address. Nothing is changed.
            StaleRuntimeError: the runtime of one of them is gone.
        """
        operation = "KVCacheStore.restore"
        require_snapshot(operation, snapshot).restore(operation, self, self._memory)

    @whole
    def save(self, path: str | os.PathLike[str]) -> None:
        """Save the filled slots and all counts to a .safetensors file: written beside it, synced, then renamed.

        Args:
            path: ends in ``.safetensors``. A file of that name is replaced in one step and keeps its mode; one behind a
                link is, and the link stays. What killed saves left in its folder is removed.

        Raises:
            CacheFileError: another ending, or the system refuses. An old file stays as it was.

        Exactness: every bit. Cost: the filled slots, once to the host and once to the disk.

        Examples:
            >>> import tempfile, numpy as np, tikv
            >>> store = tikv.KVCacheStore(num_layers=1, num_kv_heads=1, head_dim=2, capacity=4, dtype="bfloat16")
            >>> store.append(0, np.ones((3, 1, 2), np.float32), np.zeros((3, 1, 2), np.float32))
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     store.save(f"{folder}/cache.safetensors")
            ...     tikv.KVCacheStore.load(f"{folder}/cache.safetensors").length
            3
        """
        operation = "KVCacheStore.save"
        runtime.require_alive(self.runtime, operation)
        files.target_of(path, operation)
        tensors = {
            f"layers.{layer.index}.{name}": a
            for layer, arrays in self.host_layers()
            for name, a in zip(layer.named, arrays, strict=True)
        }
        form = {
            "num_layers": self.num_layers,
            "num_kv_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "head_dim_v": self.head_dim_v,
            "capacity": self.capacity,
            "batch_size": self.batch_size,
            "dtype": self.dtype.name,
            "window": self.windows,
            "sinks": self.sinks,
            "scale_dtype": self.scale_dtype.name,
        }
        if self.v_dtype is not self.dtype:
            form["v_dtype"] = self.v_dtype.name
        form |= named_divisors(self.divisors)
        facts = {"form": form, "counts": [[layer.length, layer.valid_from] for layer in self._layers]}
        contiguous_files.add_kept(self._layers, tensors, facts)
        files.write(path, contiguous_files.KIND, tensors, facts, operation)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> KVCacheStore:
        """A new store with the form, counts and contents of a saved one, on the arch that runs now.

        Raises:
            CacheFileError: the file is missing, truncated, damaged, or not one that `save` wrote; its counts or shapes
                contradict its tensors, however right its checksums are; or this machine has too little memory for its
                capacity, and then it is a CapacityError too.
            DTypeError: this arch cannot hold it.
        """
        operation = "KVCacheStore.load"
        if cls is KVCacheStore and files.kind_of(path, operation) == cls.of_token_groups.file_kind:
            of_others: KVCacheStore = cls.of_token_groups.load(path)
            return of_others
        form, counts, kept, arrays = contiguous_files.read(path, operation)
        with files.understanding(path, operation):
            store = cls(**form)
            store.take_over(counts, arrays, operation, kept)
        return store

    @whole
    def host_layers(self) -> list[tuple[Layer, list[np.ndarray[Any, Any]]]]:
        """Each layer's counts and host copies of its filled slots: K, V, and the scales of int8."""
        taken = self._memory.copy_filled()
        return [
            (layer, [read_host(a, self.runtime) for a in arrays])
            for layer, arrays in zip(self._layers, taken, strict=True)
        ]

    @whole
    def take_over(
        self,
        counts: Sequence[Sequence[int]],
        arrays: Sequence[Sequence[np.ndarray[Any, Any]]],
        operation: str,
        kept: Sequence[Kept | None] | None = None,
    ) -> None:
        """Take over what `host_layers` gave: (length, oldest valid position) and filled slots of each layer.

        Of a layer that was compacted also what it kept.

        Raises:
            ShapeError: an array is not of this store's form. Nothing is changed.
        """
        take_over(operation, self._memory, counts, arrays, kept)
