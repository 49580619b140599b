"""KVCacheStore: the keys and values of all layers of a model, and how many tokens each layer holds.

This module has the public calls, the store's lock, and what a store reports about itself. A `LayerStorage` decides
where tokens are kept, how they get there and how attention reads them; `layers` has one for each way to store them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tikv import launch, runtime
from tikv.arrays import (
    Array,
    Arrays,
    ArrayView,
    CacheArray,
    as_numpy,
    describe,
    is_followed,
    read_host,
    refuse_backward,
    runtime_of,
    to_device,
    view,
    view_all,
)
from tikv.dtypes import DType
from tikv.errors import DTypeError, OptionError, PositionError, ShapeError
from tikv.formats import GroupFormat
from tikv.ops import checks
from tikv.ops.attention.request import AttendRequest
from tikv.ops.rotate import Rope
from tikv.runtime.interrupts import Held
from tikv.stores import files, graded, lengths, picture
from tikv.stores.draft import Draft, Parents
from tikv.stores.layers import loaded_storage, new_storage
from tikv.stores.layers.append import NAMES, ROWS
from tikv.stores.layers.compaction import split_by_layer
from tikv.stores.layers.counts import (
    Layer,
    check_step,
    drawn_states,
    ends_of,
    refuse_missed,
    refuse_uneven,
    refuse_uneven_step,
    refuse_unfinished,
)
from tikv.stores.layers.residents import why_plain
from tikv.stores.layers.storage import PLACES, LayerStorage, StoreConfig
from tikv.stores.locking import changing, locked
from tikv.stores.picture import counted, size_in_words, tokens_in_words
from tikv.stores.row_format import Divisor
from tikv.stores.snapshot import Snapshot

# What is known about the lengths of layers: all have tokens; nothing; all are equal; only the first may have tokens.
FILLED, UNKNOWN, EVEN, ALONE = range(4)


class KVCacheStore(runtime.DeepCopied):
    """Keys and values of a model's layers, appended token by token or prompt by prompt.

    [Stores in detail][stores-in-detail] (docs/stores.md) says which arguments exclude each other, and what calls cost.

    Args:
        num_layers: layers of the model.
        num_kv_heads: heads of K and V.
        head_dim: width of a head of K, and of V unless ``head_dim_v`` says otherwise.
        capacity: tokens that a layer without a window holds.
        batch_size: sequences, all of one length.
        dtype: the format of stored rows: float32, float16, bfloat16, float64, float8_e4m3fn, float8_e5m2, int8 with a
            scale for each token and head; or groups of a few bits: a `tikv.Quant`, "q8_0", "q4_0", "mxfp8", "mxfp4",
            "nvfp4", "kvarn_k4v2" or "kvarn_k4v4", see `tikv.quantize`; "_hadamard" after a name rotates keys first.
        window: slots of a sliding layer, including the sinks, at most ``capacity``; None for layers that do not slide;
            or a list with one of these for each layer.
        sinks: first tokens that a sliding layer always keeps, and that KVarN never quantises.
        head_dim_v: width of a head of V.
        scale_dtype: dtype of the scales of int8 or of a `tikv.Quant`, float16 or float32.
        v_dtype: the format of stored values, if it differs from that of keys.
        k_scale, v_scale: for 8-bit floats, one number or (num_kv_heads,); for "nvfp4", one number. Rows are divided by
            them before they are stored, and multiplied by them when they are read. None means 1.
        page_summaries: tokens per page, to keep the least and the greatest key of each page; None keeps none.
        place: "device", or "host" to keep all layers in page-locked memory of the host, for CUDA.
        resident_layers: with "host", how many layers the GPU has copies of.

    Attributes:
        num_layers, num_kv_heads, head_dim, head_dim_v, capacity, sinks (int): as the arguments.
        dtype, v_dtype, scale_dtype (DType): the formats of keys and of values, and the dtype of scales.
        windows (list[int | None]): the slots of each sliding layer; None for a layer that does not slide.
        lock (threading.RLock): each call holds it. A thread that holds it may take it again.

    Raises:
        CapacityError: a layer is larger than a launch on this arch can address.
        DTypeError, OptionError, PositionError, ShapeError: an argument is not valid.

    Exactness: rows keep their bits; a narrower dtype rounds to nearest even; `tikv.quantize` describes int8.
    Cost: an append takes one launch for any length; reading `length` never waits for the device.
    Threads: calls of several threads run one after the other. Hold ``lock`` to keep other calls out between yours.
    Copies: `copy.deepcopy()` copies the memory; `copy.copy()` and `pickle` are refused. Use `snapshot` and `save`.

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
        k_scale: Array | float | None = None,
        v_scale: Array | float | None = None,
        page_summaries: int | None = None,
        place: str = "device",
        resident_layers: int = 2,
    ) -> None:
        live = runtime_of()
        config = StoreConfig.checked(
            "KVCacheStore", num_layers=num_layers, num_kv_heads=num_kv_heads, capacity=capacity, batch_size=batch_size,
            window=window, sinks=sinks, head_dim=head_dim, head_dim_v=head_dim_v, dtype=dtype, v_dtype=v_dtype,
            scale_dtype=scale_dtype, k_scale=k_scale, v_scale=v_scale, page_summaries=page_summaries, place=place,
            resident_layers=resident_layers,
        )  # fmt: skip
        self._hold(config, new_storage(live, config))

    def _hold(self, config: StoreConfig, storage: LayerStorage) -> None:
        self.runtime, self.lock = storage.runtime, storage.lock
        self.num_layers, self.num_kv_heads = config.num_layers, config.num_kv_heads
        self.capacity, self.windows, self.sinks = config.capacity, list(config.windows), config.sinks
        rows = storage.rows
        self.head_dim, self.head_dim_v = rows.widths
        self.dtype: DType | GroupFormat = rows.k.dtype
        self.v_dtype: DType | GroupFormat = rows.v.dtype
        self.scale_dtype = rows.scale_dtype
        self._config, self._storage = config, storage
        self._followed = False  # whether torch's autograd follows tokens that were appended
        self._graded: graded.GradedLayers | None = None  # those to which gradients flow
        self._draft = Draft()
        self._known = UNKNOWN  # about the lengths of layers: a decode loop need not look at all of them again

    @classmethod
    def over(cls, config: StoreConfig, storage: LayerStorage) -> KVCacheStore:
        """A store over a storage that exists already."""
        store = cls.__new__(cls)
        store._hold(config, storage)
        return store

    __deepcopy__ = locked(runtime.DeepCopied.__deepcopy__)

    # --- its form

    @property
    def divisors(self) -> tuple[Divisor, Divisor]:
        """The divisors of rows of K and of V: (1,) or (num_kv_heads,) numbers each, or None."""
        return self._storage.rows.divisors

    @property
    def nbytes(self) -> int:
        """Bytes of keys, values, scales and summaries of pages, filled or not."""
        return self._storage.nbytes

    @property
    def device(self) -> str:
        """Where the store's calls are computed: "cpu", "cuda:0" or another index, "vulkan" or "metal"."""
        return self.runtime.device

    @property
    def place(self) -> str:
        """Where the layers are kept: "host" if that is not the memory in which the device computes, else "device"."""
        return self._storage.place

    @property
    def resident_layers(self) -> int:
        """How many layers the device has memory for: all of them, unless `place` is "host"."""
        return self._storage.resident_layers

    @property
    def resident_nbytes(self) -> int:
        """Bytes that the store takes on the device: `nbytes`, or those of the copies if `place` is "host"."""
        return self._storage.resident_nbytes

    @property
    def memory_version(self) -> int:
        """How often memory was allocated. When it rises, CUDA graphs captured before must be captured again."""
        return self._storage.memory.version

    @locked
    def held(self, layer: int) -> int | np.ndarray[Any, Any]:
        """Tokens that a layer holds: `layer_length`, minus those that a window or `compact` dropped.

        Returns:
            A number; or (batch, H) int32 if a compaction left heads with different numbers.
        """
        state = self._counts(layer, "KVCacheStore.held")
        if state.head_lengths is None:
            return state.held
        return state.held_rows().counts.astype(np.int32)

    @locked
    def positions(self, layer: int) -> np.ndarray[Any, Any]:
        """(batch, H, held) int64 on the host: the position of each token held, in the order of `tokens`.

        -1 fills up heads that hold fewer tokens than others.
        """
        positions = self._counts(layer, "KVCacheStore.positions").held_rows().positions
        return np.array(np.broadcast_to(positions, (self.batch_size, self.num_kv_heads, positions.shape[-1])), np.int64)

    @locked
    def quantised(self, layer: int) -> int:
        """How many of a layer's oldest tokens, after its sinks, became codes, in a store with groups along tokens.

        After a compaction, only the tokens that it kept and those appended since are counted.

        Raises:
            OptionError: the store has no groups along tokens.
        """
        operation = "KVCacheStore.quantised"
        return self._storage.quantised(operation, self._index(layer, operation))

    def keys(self, layer: int) -> CacheArray:
        """(batch_size, num_kv_heads, slots, head_dim): the layer's keys in place, not a copy.

        With groups, the last axis is the uint32 words that hold the codes of a row.
        """
        operation = "KVCacheStore.keys"
        return CacheArray(self._storage.layer(operation, self._index(layer, operation)).k, self.runtime)

    def values(self, layer: int) -> CacheArray:
        """(batch_size, num_kv_heads, slots, head_dim_v): the layer's values in place, not a copy.

        With groups, the last axis is the uint32 words that hold the codes of a row.
        """
        operation = "KVCacheStore.values"
        return CacheArray(self._storage.layer(operation, self._index(layer, operation)).v, self.runtime)

    def scales(self, layer: int) -> tuple[CacheArray | None, CacheArray | None]:
        """The scales of K and of V; None for one that has no scales.

        For int8 each is (batch_size, num_kv_heads, slots). For groups each is (batch_size, num_kv_heads, slots, n): the
        scales of a row, and after each its bias if there is one. If K and V need different numbers of them per row,
        both arrays have the larger n, also for int8 beside groups, and a row uses its first entries. For 8-bit floats
        they are (1,) or (num_kv_heads,), as you passed them to the store.

        Raises:
            DTypeError: the store has no scales.
        """
        operation = "KVCacheStore.scales"
        scales = self._storage.layer(operation, self._index(layer, operation)).read_scales
        if scales == (None, None):
            raise DTypeError(
                f"{operation}: a {self._storage.rows.name} store has no scales; int8 and groups have. Use dtype='int8'."
            )
        k, v = (None if a is None else CacheArray(a, self.runtime) for a in scales)
        return k, v

    def page_summaries(self, layer: int) -> tuple[CacheArray, CacheArray]:
        """The least and the greatest key of each page of a layer, as `tikv.summarize_pages` computes them.

        Pass them to `tikv.page_scores`, and its result to `tikv.select`, both with the store's ``page_summaries`` as
        ``page``. Token ``n`` of those that the layer holds is in page ``n // page``. Every call that changes a layer
        updates them.

        Returns:
            (least, greatest), each (batch_size, num_kv_heads, ceil(capacity / page), head_dim), in place, not a copy;
            of the keys' dtype, or float32 for formats with scales. Pages after the last token are not cleared.

        Raises:
            OptionError: the store keeps no summaries, or the layer has a window.

        Examples:
            >>> import numpy as np, tikv
            >>> form = {"num_layers": 1, "num_kv_heads": 1, "head_dim": 1, "capacity": 8, "dtype": "float32"}
            >>> store = tikv.KVCacheStore(**form, page_summaries=2)
            >>> k = np.array([3, 1, 2, 5, 4], np.float32).reshape(5, 1, 1)
            >>> store.append(0, k, k)
            >>> least, greatest = store.page_summaries(0)
            >>> least.numpy().ravel()[:3].tolist(), greatest.numpy().ravel()[:3].tolist()
            ([1.0, 2.0, 4.0], [3.0, 5.0, 4.0])
            >>> q = np.full((1, 1, 1, 1), -1, np.float32)
            >>> chosen = tikv.select(tikv.page_scores(q, least, greatest, 5, page=2), 1, page=2, valid=5)
            >>> store.attend(0, q, indices=chosen).item()  # over the tokens with keys 3 and 1
            1.2384...
        """
        operation = "KVCacheStore.page_summaries"
        least, greatest = self._storage.page_summaries(operation, self._index(layer, operation))
        return CacheArray(least, self.runtime), CacheArray(greatest, self.runtime)

    # --- writes

    def append(
        self,
        layer: int,
        k: Array,
        v: Array,
        *,
        layout: str = "token_major",
        positions: Array | None = None,
        grad: bool = False,
    ) -> None:
        """Append new tokens to one layer, in one launch.

        Args:
            layer: its index.
            k, v: (batch, T, H, D) token-major or (batch, H, T, D) head-major. The batch axis may be left out if it is
                1. V has the store's ``head_dim_v``. The dtype is the store's, or float32 for a float16 or bfloat16
                store; for int8, groups and 8-bit floats it is float32, float16 or bfloat16, but for groups along tokens
                ``scale_dtype`` or float32. 8-bit floats without scales may also be appended in the store's own dtype.
            layout: "token_major" or "head_major".
            positions: (batch,) int32 or int64: the absolute position of each sequence's first new token, instead of
                `layer_length`. The launch reads them, on the device. They are for launches that are captured and
                replayed, see `positions_on_device`: counts on the host do not change, and a token that does not fit
                into a layer without a window is skipped.
            grad: let gradients flow to these tokens from later calls of `extend` with ``grad=True``.

        Raises:
            CapacityError: a layer without a window would overflow. Nothing is written.
            PositionError: a step seems to have ended between two layers: layer 0 would be written while layers have
                different lengths, and more than one has tokens; or the first tokens of a layer are fewer than those of
                the first layer that has some. `align` is the way out.
            ShapeError, DTypeError, OptionError, StaleRuntimeError: the arrays or options do not fit the store.
            ArchError: a CUDA graph is being captured, without ``positions``.

        Exactness, cost: as the class says.
        """
        operation = "KVCacheStore.append"
        index = self._index(layer, operation)
        layout = checks.name(layout, "layout", operation, checks.LAYOUTS)
        if grad:
            graded.append(self, index, (k, v), positions, layout)
            return
        if positions is not None:
            arrays = view_all((k, v, positions), NAMES, operation)
            with self.lock:
                if index == 0:
                    refuse_uneven(operation, self._storage.counts)
                self._storage.append_at(operation, index, arrays, layout)
                self._followed |= arrays.followed
            return
        rows = view_all((k, v), ROWS, operation)
        with self.lock:
            if (self._known or index == 0) and (index or self._known != ALONE):  # as in `extend`, at less cost
                self._check_write(operation, index, rows[0], layout)
            self._storage.append(operation, index, rows, layout)
            if rows.followed:
                self._followed = True

    @locked
    def append_all(self, k: Array, v: Array, *, layout: str = "token_major", positions: Array | None = None) -> None:
        """Append new tokens to all layers, in one launch, or in one for each block of memory (see the class).

        Args:
            k, v: (num_layers, batch, T, H, D) token-major or (num_layers, batch, H, T, D) head-major; the batch axis
                may be left out when it is 1.
            layout: "token_major" or "head_major".
            positions: as in `append`, for all layers; one launch if the batch is 1 and all layers have the same window.

        Raises:
            As `append`. Nothing is written to any layer.

        Cost: as the class says. It takes a launch for each layer if layers have different lengths, or if k or v has no
        single stride through all sequences of all layers, for example because the batch is its outer axis.
        """
        operation = "KVCacheStore.append_all"
        self._index(0, operation)
        layout = checks.name(layout, "layout", operation, checks.LAYOUTS)
        if positions is not None:
            self._storage.require_positions(operation, "Append without positions.")
        if self._known != EVEN:
            refuse_uneven_step(operation, self._storage.counts)
        if positions is not None:
            rows = view_all((k, v, positions), NAMES, operation)
            self._storage.append_at(operation, None, rows, layout)
        else:
            rows = view_all((k, v), ROWS, operation)
            self._known = UNKNOWN
            self._storage.append_all(operation, rows, layout)
            self._known = EVEN
        self._followed |= rows.followed

    @locked
    def positions_on_device(self) -> CacheArray:
        """(batch_size,) int32 on the device, all equal to `length`: positions for launches that a graph captures.

        In the captured step, pass them to `append` and add the number of the step's tokens to them. Then replay it, and
        tell the store with `advance` how many tokens were appended. Call the array's ``torch()`` once, before the
        capture.

        Raises:
            PositionError: `length` does not fit int32, or layers have different lengths.

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
        self._storage.require_positions(operation, "Append without positions.")
        refuse_uneven(operation, self._storage.counts)
        lens = self._lens(operation, "Append without positions, or reset().")
        return CacheArray(to_device(lens, self.runtime), self.runtime)

    @changing
    def advance(self, tokens: int) -> None:
        """Add ``tokens`` to every layer's count: the number of tokens that appends with ``positions`` have written.

        Raises:
            CapacityError: a layer without a window has no room for them; the appends skipped them.
            PositionError: the number is negative, or layers have different lengths.

        Cost: none on the device.
        """
        operation = "KVCacheStore.advance"
        runtime.require_alive(self.runtime, operation)
        tokens = checks.integer(tokens, "tokens", operation)
        self._storage.require_positions(operation, "Append without positions.")
        refuse_uneven(operation, self._storage.counts)
        self._known = UNKNOWN
        self._storage.advance(operation, tokens)

    # --- reads

    @locked
    def tokens(self, layer: int) -> tuple[CacheArray, CacheArray]:
        """A copy of the tokens that a layer holds, oldest first: K (batch, H, n, D) and V (batch, H, n, D_v).

        ``n`` is the number of tokens held: `layer_length`; or for a sliding layer its sinks and the newest tokens after
        them; or what `compact` left. Zeros fill up heads that hold fewer tokens than others. Formats with scales are
        returned as float32.

        Cost: one launch, or two for a layer with sinks; each row is read and written once.
        """
        operation = "KVCacheStore.tokens"
        launch.refuse_during_capture(self.runtime, operation, "the number of tokens", launch.OUTSIDE_CAPTURES)
        return self._storage.tokens(operation, self._index(layer, operation))

    @locked
    def attend(
        self,
        layer: int,
        q: Array,
        *,
        layout: str = "token_major",
        scale: float | None = None,
        return_lse: bool = False,
        impl: str = "auto",
        softcap: float | None = None,
        out: Array | None = None,
        seq_lens: Array | int | None = None,
        missing: str = "raise",
        sink_logits: Array | None = None,
        alibi_slopes: Array | None = None,
        return_mass: bool | str = False,
        mass_queries: int | None = None,
        mass_into: Array | None = None,
        mask: Array | None = None,
        parents: Array | None = None,
        indices: Array | None = None,
        block: int | None = None,
    ) -> Arrays:
        """Attend with the newest tokens' queries over what a layer holds, in place, as `tikv.decode_attention` does.

        Append the tokens first. The call counts the tokens of this layer, `layer_length`; a layer that missed an append
        has fewer than others, and the repr of the store shows that. In a sliding layer, the last tokens of a prompt may
        have overwritten tokens that its first queries see; use `extend` for that.

        Args:
            layer: its index.
            q: (batch, T, Hq, D) token-major or (batch, Hq, T, D) head-major, or (batch, Hq, D) for one query each;
                float32, float16 or bfloat16. Hq is a multiple of num_kv_heads. If the batch is 1, its axis may be left
                out: three axes are then (T, Hq, D) or head-major (Hq, T, D), and two are (Hq, D). An array that fits
                only the other layout is refused.
            layout: of q and of the result: "token_major", as in `append` and `extend`, or "head_major".
            out: an array for the result, with its shape and q's dtype.
            scale, return_lse, impl, softcap, sink_logits, alibi_slopes, mask, parents: as in
                `tikv.decode_attention`.
            seq_lens: (batch,) int32 or int64: the number of tokens of each sequence, instead of `layer_length`. The
                launch reads them on the device. Use them with `append` at ``positions``.
            missing: what to do if one of several queries sees a token of a sliding layer that a newer one has
                overwritten: "raise", or "ignore" to attend over the others. A single query never misses a token.
            return_mass: also return the attention mass of the layer's tokens, from the weights that each got: "sum" or
                True, their sum over the queries and the query heads of its KV head; "max", the greatest of them;
                "last", the sum for the newest query. ``mass_queries`` counts at most so many of the last queries.
            mass_into: float32 (batch, num_kv_heads, n) for the mass: "sum" is added to it, "max" keeps the greater of
                both, and "last" overwrites it.
            indices: (batch, T, K) or (batch, H, T, K): the tokens that each query reads, see `tikv.decode_attention`.
                They count from the layer's first token; after a compaction, from the first token that it left.
            block: the queries, at most so many, see each other both ways, and all tokens before them.

        Returns:
            ``out``, or a new array of q's kind and dtype, with q's axes and V's width; with ``return_lse`` also the
            log-sum-exp, float32 in the shape of the result without its last axis; with ``return_mass`` the mass last,
            float32 (batch, num_kv_heads, n) in the order of `tokens`, or with ``indices`` (batch, num_kv_heads, T, K)
            in their order.

        Raises:
            PositionError: the layer has some tokens, but fewer than there are queries; ``missing`` is "raise" and a
                token is missed; an index on the host is not a token; or, without ``return_lse``, the layer has no
                tokens and other layers have some. With ``return_lse`` such a layer gives 0 and a log-sum-exp of -inf,
                which can be merged with other results. A store without any tokens gives the same.
            OptionError: ``return_mass`` is used with ``seq_lens``, since the host then does not know what is held; or
                ``indices`` are given for keys that are quantised over groups of tokens.
            ShapeError, DTypeError, OptionError, StaleRuntimeError: as in `tikv.decode_attention`.

        Examples:
            >>> import numpy as np, tikv
            >>> store = tikv.KVCacheStore(num_layers=1, num_kv_heads=1, head_dim=2, capacity=4, dtype="float32")
            >>> store.append(0, np.zeros((3, 1, 2), np.float32), np.arange(6, dtype=np.float32).reshape(3, 1, 2))
            >>> store.attend(0, np.ones((1, 2, 2), np.float32)).tolist()
            [[[2.0, 3.0], [2.0, 3.0]]]
        """
        operation = "KVCacheStore.attend"
        request = AttendRequest(  # some by position, since Python puts more than 15 keywords into a dict
            layout, scale, softcap, return_lse, impl, out=out, seq_lens=seq_lens, missing=missing,
            sink_logits=sink_logits, alibi_slopes=alibi_slopes, return_mass=return_mass, mass_queries=mass_queries,
            mass_into=mass_into, mask=mask, parents=parents, indices=indices, block=block,
        ).checked(operation)  # fmt: skip
        number, counts = self._index(layer, operation), self._storage.counts
        if seq_lens is None and not request.return_lse and counts[number].length == 0:
            refuse_missed(operation, counts, number)
        return refuse_backward(self._storage.attend(operation, number, q, request), q, followed=self._followed)

    @locked
    def extend(
        self,
        layer: int,
        q: Array,
        k: Array,
        v: Array,
        *,
        layout: str = "token_major",
        scale: float | None = None,
        softcap: float | None = None,
        return_lse: bool = False,
        sink_logits: Array | None = None,
        alibi_slopes: Array | None = None,
        return_mass: bool | str = False,
        mass_queries: int | None = None,
        mass_into: Array | None = None,
        mask: Array | None = None,
        parents: Array | None = None,
        keep: bool = True,
        block: int | None = None,
        grad: bool = False,
    ) -> Arrays:
        """Attend with the queries of new tokens over the held and the new tokens, and append the new ones, in one call.

        Each query sees all tokens up to its own; in a sliding layer it sees the sinks and the window at its own
        position, even if the prompt is longer than the window. A model calls it for prompts and for single tokens.

        Args:
            layer: its index.
            q: (batch, T, Hq, D) token-major or (batch, Hq, T, D) head-major, or without the batch axis when it is 1;
                float32, float16 or bfloat16. Hq is a multiple of num_kv_heads.
            k, v: the T new tokens, as in `append`, in the same layout.
            layout: "token_major" or "head_major".
            scale, softcap, sink_logits, alibi_slopes, mask, parents: as in `tikv.decode_attention`; a mask or a tree
                has at most 256 tokens.
            return_lse: also return the log-sum-exp of the scores, float32, in the shape of the result without its last
                axis.
            return_mass, mass_queries, mass_into: as in `attend`, for the tokens that the layer holds after the call.
            keep: False keeps nothing of the new tokens, and needs no room for them; their rows are read unchanged.
            block: the queries of so many of the newest tokens see each other both ways, and all tokens before them.
            grad: let torch's gradients flow to queries, and to tokens that came with ``grad=True``; others are frozen,
                see [Gradients][gradients] (docs/stores.md).

        Returns:
            A new array of q's kind and dtype in the layout of ``q``, of V's width; with ``return_lse`` also lse, and
            with ``return_mass`` the mass as `attend` gives it.

        Raises:
            As `append` and `attend`. Nothing is written. If Ctrl-C or a lack of memory stops it after its checks, the
            layer is as before; or, if new tokens have overwritten older ones already, the layer keeps those new
            tokens, and the error says how many they are.

        Exactness: attention reads the tokens as they are stored, rounded or quantised to the store's dtype. Arithmetic
            is in float32, with one rounding at the end. Appended rows have the bits that `append` writes.
        Cost: as `append` and then `attend`, 256 queries at a time. Where a prompt overwrites a sliding layer's tokens,
            the layer and the new tokens are read by one launch each, and a third launch merges the results; new tokens
            that the store converts are written twice. The cache is never copied.

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
        request = AttendRequest(
            layout=layout, scale=scale, softcap=softcap, return_lse=return_lse, sink_logits=sink_logits,
            alibi_slopes=alibi_slopes, return_mass=return_mass, mass_queries=mass_queries, mass_into=mass_into,
            mask=mask, parents=parents, keep=keep, block=block,
        ).checked(operation)  # fmt: skip
        index = self._index(layer, operation)
        if checks.flag(grad, "grad", operation):
            return graded.extend(self, index, (q, k, v), request)
        if not request.keep:
            results = self._storage.extend(operation, index, (q, k, v), request)
            return refuse_backward(results, q, k, v, followed=self._followed)
        if self._known != (FILLED if index else ALONE):
            self._check_write(operation, index, view(k, "k", operation), layout)
        before, start = self._draft, self._storage.counts[0].end
        try:
            if parents is not None and index == 0:
                tree = request.terms.views(operation)["parents"]
                shape = Parents(operation, tree, self.runtime), tuple(range(self.batch_size))
                self._draft = Draft(before.settled, start, start + tree.shape[-1], *shape)
            results = self._storage.extend(operation, index, (q, k, v), request)
        except BaseException:
            with Held():
                end = self._storage.counts[0].end
                self._draft = before if end == start else self._draft.cut(end)
            raise
        self._followed |= is_followed(k, v)
        return refuse_backward(results, q, k, v, followed=self._followed)

    @changing
    def rewrite(self, layer: int, start: int, k: Array, v: Array, *, layout: str = "token_major") -> None:
        """Write new rows to the places of a block of tokens that a layer holds; its length does not change.

        A diffusion language model does so with each step of a block. `attend` with ``block=`` then attends with its
        queries.

        Args:
            layer: its index.
            start: the position of the first token of the block.
            k, v: the rows of the tokens from ``start`` on, as in `append`.
            layout: of k and v.

        Raises:
            PositionError: a position is not held; a compaction moved its token; or, with groups along tokens, it is
                codes already. Nothing is written.
            ShapeError, DTypeError: as `append`. Nothing is written.

        Exactness: the rows have the bits that `append` writes; every other bit stays.
        Cost: that of an append of as many tokens; with ``page_summaries``, all of the layer are computed again.

        Examples:
            >>> import numpy as np, tikv
            >>> store = tikv.KVCacheStore(num_layers=1, num_kv_heads=1, head_dim=1, capacity=8, dtype="float32")
            >>> store.append(0, np.zeros((4, 1, 1), np.float32), np.zeros((4, 1, 1), np.float32))
            >>> store.rewrite(0, 2, np.ones((2, 1, 1), np.float32), np.ones((2, 1, 1), np.float32))
            >>> store.length, store.tokens(0)[1].numpy().ravel().tolist()
            (4, [0.0, 0.0, 1.0, 1.0])
        """
        operation = "KVCacheStore.rewrite"
        index = self._index(layer, operation)
        self._storage.rewrite(operation, index, start, view_all((k, v), ROWS, operation), layout)
        self._followed |= is_followed(k, v)
        self._moved(start)

    # --- dropping tokens

    @changing
    def compact(
        self, layer: int, keep: Array, *, rope: Rope | None = None, merge: tuple[Any, ...] | None = None
    ) -> None:
        """Keep some of the tokens that a layer holds, different ones for each head, and drop the others, in place.

        `layer_length` does not change, and `next_position` changes only with ``rope``. `positions` returns the
        positions of the kept tokens, and `held` returns their number. New tokens take the free slots first. When a
        sliding layer is full again, it overwrites its oldest tokens, but not its sinks: these are now the first tokens
        that it kept.

        With groups along tokens, the tokens of a group share scales, so a head keeps either all tokens that it holds
        from a group or none of them. `quantised` says how many tokens after the sinks became codes; of the newer ones,
        any may be kept. All heads keep equally many groups and equally many of the newer tokens. If groups are kept,
        all sinks must be kept too.

        Args:
            layer: its index.
            keep: indices into the order of `tokens`, ascending: (batch, H, n), or (batch, n) for all heads; or a bool
                mask (batch, H, held) or (batch, held), which may keep a different number for each head. On the host or
                the device.
            rope: the model's rotation. Keys are rotated from their true positions to their new indices, `positions`
                returns 0, 1 and so on, and `next_position` is the number of tokens in the head that keeps the most.
            merge: ``(to, weights)``, integers and float32 (batch, H, held) in the order of `tokens`: each dropped token
                is added to the kept one that ``to`` names, times its weight; -1 adds nothing. With one more axis, to
                several of them; with ``(to, weights, "values")``, keys stay as they are. Not with ``rope``.

        Raises:
            PositionError: the indices are not strictly ascending, or one is not held; ``to`` names a token that is
                dropped or not held, or is of one that is kept; with groups along tokens, part of a group would be kept,
                or groups without all sinks. Nothing is written.
            ShapeError, DTypeError, OptionError: the shape or the dtype does not fit, or ``rope`` cannot rotate the
                keys; with groups along tokens, ``rope`` and ``merge`` are refused, since codes would be quantised a
                second time, and so are heads that would keep different numbers of tokens or groups.

        Exactness: rows, codes and scales keep their bits. Rotated keys are rounded once, as in `tikv.rotate`. Merged
            rows are decoded, added in float32 in the order of tokens, and coded as an append does.
        Cost: rows that move are read and written once, in one launch; in a sliding layer that has wrapped, and with
            groups along tokens, they are read and written twice, in two launches for each array. The host reads and
            checks ``keep``. The store keeps its memory. If heads keep different numbers of tokens, each later append
            takes one more launch.

        Examples:
            >>> import numpy as np, tikv
            >>> store = tikv.KVCacheStore(num_layers=1, num_kv_heads=2, head_dim=1, capacity=8, dtype="float32")
            >>> k = np.arange(8, dtype=np.float32).reshape(4, 2, 1)
            >>> store.append(0, k, k)
            >>> store.compact(0, [[[0, 3], [1, 2]]])
            >>> store.append(0, k[:1], k[:1])
            >>> store.length, store.held(0), store.positions(0).tolist()
            (5, 3, [[[0, 3, 4], [1, 2, 4]]])
        """
        operation = "KVCacheStore.compact"
        self._storage.compact(operation, {self._index(layer, operation): keep}, rope, merge)
        self._moved()

    @changing
    def compact_all(self, keep: Sequence[Array], *, rope: Rope | None = None) -> None:
        """`compact` every layer.

        Args:
            keep: an entry for each layer, as `compact` takes it.
            rope: as in `compact`; it takes one more launch for each layer.

        Raises:
            As `compact`. Nothing is written to any layer.

        Cost: as `compact`. Neighbouring layers in one block of memory share a launch if they have the same window, keep
        equally many tokens and have not wrapped.
        """
        operation = "KVCacheStore.compact_all"
        self._index(0, operation)
        keeps = split_by_layer(keep, self.num_layers, operation)
        self._storage.compact(operation, dict(enumerate(keeps)), rope)
        self._moved()

    @property
    def batch_size(self) -> int:
        """The current number of sequences."""
        return self._storage.batch_size

    @property
    @locked
    def length(self) -> int:
        """Tokens appended to every layer since `reset`, minus those that `trim`, `commit` or `align` dropped.

        So in a step it grows when the last layer appends. `layer_length` and `next_position` return the numbers of one
        layer, and the repr shows whether layers differ. If only one layer has tokens, it is the length of that one.
        """
        return lengths.common(ends_of(self._storage.counts))

    @property
    @locked
    def seq_lens(self) -> np.ndarray[Any, Any]:
        """(batch_size,) int32: `length` for each sequence, on the host.

        Raises:
            PositionError: `length` does not fit int32, which can happen if all layers slide.
        """
        return self._lens("KVCacheStore.seq_lens", "Read `length`.")

    def _lens(self, operation: str, remedy: str) -> np.ndarray[Any, Any]:
        """`length` for each sequence, if it fits int32."""
        if self.length >= 2**31:
            raise PositionError(f"{operation}: length={self.length} does not fit int32. {remedy}")
        return np.full(self.batch_size, self.length, np.int32)

    def layer_length(self, layer: int) -> int:
        """Tokens appended to one layer since `reset`, minus those that `trim`, `commit` or `align` dropped."""
        return self._counts(layer, "KVCacheStore.layer_length").end

    def next_position(self, layer: int) -> int:
        """The position of the layer's next token: `layer_length`, unless keys were rotated to other positions."""
        return self._counts(layer, "KVCacheStore.next_position").next_position

    def _index(self, layer: int, operation: str) -> int:
        live = self.runtime
        if live.front.prog is not live.program:  # checked here first: every append comes by
            runtime.require_alive(live, operation)
        if type(layer) is not int or not 0 <= layer < self.num_layers:
            layer = checks.integer(layer, "layer", operation, high=self.num_layers - 1)
        return layer

    def _counts(self, layer: int, operation: str) -> Layer:
        return self._storage.counts[self._index(layer, operation)]

    def _check_write(self, operation: str, layer: int, rows: ArrayView, layout: str) -> None:
        """Raise PositionError before new rows are written to a layer, if a step seems to have ended between layers."""
        ends = ends_of(self._storage.counts)
        even = ends.count(ends[0]) == len(ends)
        if even and ends[0] and len(ends) > 1:
            self._known = FILLED
            return
        self._known = ALONE if layer == 0 and not any(ends[1:]) else UNKNOWN
        if not even:
            tokens = rows.shape[-3 if layout == "token_major" else -2] if rows.ndim > 2 else 0
            refuse_unfinished(operation, self._storage.counts, layer, tokens)

    @locked
    def check_step(self, operation: str, layers: Sequence[int], tokens: int) -> list[int]:
        """For a `Step`: check that these layers of one length have room for `tokens`; return what each was trimmed to.

        Raises:
            CapacityError, PositionError: they have no room, or their lengths differ.
        """
        self._storage.require_positions(operation, "Call append() and attend().")
        counts = self._storage.counts
        if len(layers) > 1:
            refuse_uneven_step(operation, counts)
        else:
            refuse_unfinished(operation, counts, layers[0], tokens)
        return check_step([counts[i] for i in layers], tokens, operation)

    @changing
    def count_step(self, layers: Sequence[int], tokens: int) -> None:
        """For a `Step`: count the tokens that it launched."""
        self._known = UNKNOWN
        for i in layers:
            self._storage.counts[i].grow(tokens)

    @changing
    def align(self) -> int:
        """Bring every layer back to the length of the shortest, after a step that ended between two layers.

        Ctrl-C or an error may end a step of a model after some of its layers have appended. The next append to layer 0
        is then refused: call this, and make the step again. Every layer counts here, one without any tokens too. If all
        layers have the same length, nothing changes.

        Returns:
            The length that every layer has then.

        Raises:
            PositionError: a layer cannot be as it was before its newest tokens: they overwrote more than the oldest
                token of its window, older tokens became codes of groups along tokens when they were appended, or
                `compact` dropped some since. Nothing is changed; `reset` is the way out.

        Cost: none on the device, except for summaries of pages.

        Examples:
            >>> import numpy as np, tikv
            >>> store = tikv.KVCacheStore(num_layers=2, num_kv_heads=1, head_dim=4, capacity=8, dtype="float32")
            >>> store.append_all(*np.ones((2, 2, 3, 1, 4), np.float32))
            >>> store.append(0, *np.ones((2, 1, 1, 4), np.float32))  # and the step ends here
            >>> store.length, store.layer_length(0), store.align(), store.layer_length(0)
            (3, 4, 3, 3)
        """
        operation = "KVCacheStore.align"
        runtime.require_alive(self.runtime, operation)
        length = min(ends_of(self._storage.counts))
        self.align_to(operation, length)
        return length

    @changing
    def align_to(self, operation: str, length: int) -> None:
        """For `align`, and that of all ranks: bring every layer back to a length that none of them is shorter than."""
        if max(ends_of(self._storage.counts)) > length:
            self._known = UNKNOWN
            self._storage.align(operation, length)
            self._draft = self._draft.cut(length)
            self._moved(length)

    @locked
    def refuse_align(self, operation: str, length: int) -> None:
        """Raise PositionError if `align_to` would."""
        self._storage.refuse_align(operation, length)

    @changing
    def trim(self, n: int) -> None:
        """Drop the ``n`` newest tokens of every layer.

        Tokens that a window has overwritten do not come back. A ring that has wrapped can drop as many tokens as it
        holds. Until it is full again, queries see only the tokens that are left, fewer than their window. If a model
        must see its whole window, restore a `snapshot` instead, or use `TikvCache`, whose ``crop`` refuses to go back
        that far. A store cannot go back beyond the newest token that `compact` dropped. With groups along tokens, an
        ``n`` that would leave part of a group of codes is refused.

        Raises:
            PositionError: ``n`` is more than `length`, goes back beyond what a ring holds or a compaction left, or
                would leave part of a group along tokens; or layers have different lengths, so that it is not clear
                which tokens are meant. Nothing is changed.

        Cost: none on the device.
        """
        operation = "KVCacheStore.trim"
        runtime.require_alive(self.runtime, operation)
        n = checks.integer(n, "n", operation)
        refuse_uneven(operation, self._storage.counts)
        if n > self.length:
            raise PositionError(
                f"{operation}: cannot drop {n} tokens of length={self.length}. Drop at most {self.length}, or reset()."
            )
        self._known = UNKNOWN
        self._storage.trim(operation, n)
        self._draft = self._draft.cut(self._storage.counts[0].end)
        self._moved(self._storage.counts[0].end)

    def _moved(self, first: int = 0) -> None:
        """Note that rows from a position on were dropped, or moved."""
        if self._graded is not None:
            self._graded.changed(first)

    @changing
    def reset(self) -> None:
        """Forget all tokens. The memory stays allocated and is not cleared."""
        runtime.require_alive(self.runtime, "KVCacheStore.reset")
        self._known = UNKNOWN
        self._storage.reset()
        self._followed = False
        self._draft = Draft()
        self._moved()

    @changing
    def commit(self, path: Array, drafted: int | None = None) -> None:
        """Keep a path through the newest tokens of every layer, the accepted tokens of a tree, and drop the others.

        If `extend` was given the ``parents`` of the tokens in layer 0, the kept tokens must be a path from the root:
        the first has the parent -1, and each is the parent of the next. Of other tokens any may be kept, since a mask
        may have said the tree. A second commit needs new tokens.

        Args:
            path: (batch, n) ascending indices among the drafted tokens, on the host; or (n,) when batch is 1.
            drafted: how many of the newest tokens were drafted; None for those of the last `append` or `extend`.

        Raises:
            PositionError: the indices are not strictly ascending, or one is outside the draft; kept tokens of a tree
                are not a path from its root; no tokens, or fewer than ``drafted``, were appended since the last commit;
                layers have different lengths, or `compact` left the heads of a layer with different lengths; the
                drafted tokens have overwritten older ones of a sliding layer, unless all are kept. Nothing is changed.
            ShapeError: the path is not a list of integers for each sequence, all of one length.

        Exactness: the same bits as in a store to which only the path was appended.
        Cost: one launch for each block of memory (see the class); if layers have different windows, one for each run of
            layers with equal windows. If the path is the first n drafted tokens, nothing moves, and no launch is
            needed.

        Examples:
            >>> import numpy as np, tikv
            >>> store = tikv.KVCacheStore(num_layers=1, num_kv_heads=1, head_dim=1, capacity=4, dtype="float32")
            >>> draft = np.arange(4, dtype=np.float32).reshape(4, 1, 1)
            >>> store.append(0, draft, draft)
            >>> store.commit([0, 2])
            >>> store.length, store.tokens(0)[0].numpy().ravel().tolist()
            (2, [0.0, 2.0])
        """
        operation = "KVCacheStore.commit"
        runtime.require_alive(self.runtime, operation)
        self._known = UNKNOWN
        self._storage.commit(operation, path, drafted, self._draft)
        self._draft = Draft(settled=self._storage.counts[0].end)
        self._moved()

    # --- sequences

    @changing
    def reorder(self, index: Array) -> None:
        """Replace each sequence ``b`` by sequence ``index[b]``, in place, as beam search does.

        Args:
            index: (batch_size,) integers in [0, batch_size).

        Raises:
            ShapeError, PositionError: the index has the wrong length, or an entry is outside the batch.

        Cost: all filled slots are read and written twice, codes of groups along tokens once. If no sequence changes,
        nothing is copied.
        """
        operation = "KVCacheStore.reorder"
        runtime.require_alive(self.runtime, operation)
        self._storage.reorder(operation, index)
        self._follow(index)

    @changing
    def select(self, index: Array) -> None:
        """Keep these sequences, in this order; the batch becomes as long as the index.

        Args:
            index: integers in [0, batch_size).

        Raises:
            ShapeError, PositionError: the index is empty, or an entry is outside the batch.
            CapacityError: a layer would be larger than a launch can address. Nothing is changed.

        Cost: the filled slots that are kept are read and written once. New memory is allocated; arrays that were
        handed out before still refer to the old memory.
        """
        operation = "KVCacheStore.select"
        runtime.require_alive(self.runtime, operation)
        self._storage.select(operation, index)
        self._follow(index)

    def _follow(self, index: Array) -> None:
        """Let what is known of the newest tokens follow sequences of these numbers, which were checked."""
        self._draft = self._draft.of_sequences(index.tolist() if hasattr(index, "tolist") else index)
        self._moved()

    @changing
    def repeat(self, n: int) -> None:
        """Repeat every sequence ``n`` times: 0, 0, 1, 1 for ``n=2``. The batch becomes ``n`` times as large.

        Raises:
            PositionError: ``n`` is less than one.
            CapacityError: a layer would be larger than a launch can address. Nothing is changed.

        Cost: as `select`.
        """
        operation = "KVCacheStore.repeat"
        n = checks.integer(n, "n", operation, low=1)
        runtime.require_alive(self.runtime, operation)
        index = np.repeat(np.arange(self.batch_size, dtype=np.int32), n)
        self._storage.select(operation, index)
        self._follow(index)

    # --- copies and files

    @locked
    def snapshot(self) -> Snapshot:
        """Copy the filled slots, so that `restore` can return to them.

        The copies are in the memory of the device, or of the host if `place` is "host". Codes of groups along tokens
        are copied to the host.
        """
        runtime.require_alive(self.runtime, "KVCacheStore.snapshot")
        return Snapshot(self._storage, self.num_layers, self.length, self._draft)

    @changing
    def restore(self, snapshot: Snapshot) -> None:
        """Return to a snapshot of this store: lengths and contents, whatever was appended or dropped since.

        A snapshot of another store is accepted too, if that store has the same layers, heads, widths, windows, sinks,
        dtypes, ``k_scale`` and ``v_scale``. Its capacity may differ: this store keeps its own, which must have room for
        the snapshot's tokens.

        Raises:
            OptionError, ShapeError: it is not a snapshot, or its store had a different form.
            CapacityError: a layer has too little room for the snapshot's tokens, or would be larger than a launch can
                address with the snapshot's batch. Nothing is changed.
            StaleRuntimeError: the runtime of the store or of the snapshot is gone.
        """
        operation = "KVCacheStore.restore"
        if not isinstance(snapshot, Snapshot):
            raise OptionError(f"{operation}: {snapshot!r} is not a snapshot. Give what `snapshot` returned.")
        for live in (self.runtime, snapshot.runtime):
            runtime.require_alive(live, operation)
        if snapshot.kind is not self._storage.captures:
            raise OptionError(
                f"{operation}: {snapshot!r} was taken from a store of a different form. Restore it into a store made "
                f"with the same arguments, not into {self!r}."
            )
        self._known = UNKNOWN
        self._storage.restore(operation, snapshot.captured, (repr(snapshot), repr(self)))
        self._draft = snapshot.draft
        self._moved()

    @locked
    def save(self, path: str | os.PathLike[str]) -> None:
        """Save the filled slots and all counts to a .safetensors file; a synced temporary file is renamed to it.

        Args:
            path: ends in ``.safetensors``. A file of that name is replaced in one step and keeps its mode; if it is a
                link, the file that it links to is replaced. Leftovers of killed saves in that folder are removed.

        Raises:
            CacheFileError: the path has the wrong ending, or the system refuses to write. An old file is unchanged.

        Exactness: every bit is kept. Cost: the filled slots are copied once to the host and once to the disk.

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
        self._storage.save(path, self._config, operation)

    @classmethod
    def load(cls, path: str | os.PathLike[str], *, place: str = "device", resident_layers: int = 2) -> KVCacheStore:
        """A new store with the form, counts and contents of a saved one, on the arch that runs now.

        Args:
            path: a file that `save` wrote, whatever the ``place`` of its store was.
            place, resident_layers: as in the class.

        Raises:
            CacheFileError: the file is missing, truncated, damaged, or not one that `save` wrote; its counts or shapes
                contradict its tensors, even if its checksums are right; or this machine has too little memory for its
                capacity, in which case the error is a CapacityError too.
            DTypeError: this arch does not support the dtype of the saved store.
        """
        operation = "KVCacheStore.load"
        place = checks.option(place, "place", operation, PLACES)
        resident_layers = checks.integer(resident_layers, "resident_layers", operation, low=1)
        placed = {"place": place, "resident_layers": resident_layers}
        return cls.over(*loaded_storage(files.kind_of(path, operation), path, runtime_of(), operation, placed))

    @locked
    def host_layers(self) -> list[tuple[Layer, list[np.ndarray[Any, Any]]]]:
        """Each layer's counts and host copies of its filled slots: K, V, and the scales of int8."""
        return self._storage.to_host("KVCacheStore.host_layers")

    @changing
    def take_over(
        self, counts: Sequence[Sequence[int]], arrays: Sequence[Sequence[np.ndarray[Any, Any]]], operation: str
    ) -> None:
        """Take over what `host_layers` gave: (length, oldest valid position) and filled slots of each layer.

        Raises:
            ShapeError: an array does not have this store's form. Nothing is changed.
        """
        self._known = UNKNOWN
        self._storage.take_over(operation, counts, arrays)
        self._draft = Draft()
        self._moved()

    # --- pictures and words

    def draw(
        self, path: str | os.PathLike[str] | None = None, *, mass: Mapping[int, Array] | Array | None = None
    ) -> str:
        """Draw which position is in which slot; a notebook shows a store this way.

        The picture has a wheel for each ring and a strip for each layer without a window; layers in the same state
        share one drawing. If `compact` left holes, the positions are the true ones, and heads that keep different
        tokens are drawn separately, for the first sequence only.

        Args:
            path: ends in ``.svg``, or with the extra `plot` in ``.png``; None writes no file.
            mass: a dict from a layer's index to its attention mass (batch, H, held), as `attend` gives it; or the mass
                of layer 0 alone. It colours the tokens: the greatest mass of a head is the darkest.

        Returns:
            The SVG text, as `tikv.PagedKVCacheStore.draw` gives it.

        Raises:
            OptionError, CacheFileError: the path has the wrong ending, or the system refuses to write.
            ShapeError: the mass does not have as many tokens as the layer holds.

        Cost: none on the device, except to read the mass.
        """
        by_layer = mass if isinstance(mass, dict) else {} if mass is None else {0: mass}
        with self.lock:
            drawing = self._drawing({i: self._mass_of(i, a) for i, a in by_layer.items()})
            return picture.save(drawing, path, "KVCacheStore.draw")

    def _mass_of(self, layer: int, mass: Array) -> np.ndarray[Any, Any]:
        """A layer's mass, (batch, H, held), copied to the host; or ShapeError."""
        operation = "KVCacheStore.draw"
        state = self._counts(layer, operation)
        self._storage.check_drawn_mass(operation)
        array = view(mass, "mass", operation)
        shape = (self.batch_size, self.num_kv_heads, state.most_held)
        if array.shape != shape:
            raise ShapeError(f"{operation}: mass is {describe(array)} where (batch, H, held) = {shape} is needed.")
        return as_numpy(array) if array.device == "cpu" else read_host(array, self.runtime)

    def _repr_html_(self) -> str:
        return self.draw()

    def _drawing(self, mass: dict[int, np.ndarray[Any, Any]]) -> str:
        states = (
            (layer.index, state)
            for layer in self._storage.drawn
            for state in drawn_states(layer, self.num_kv_heads, mass.get(layer.index))
        )
        return picture.layers(repr(self), states)

    def __len__(self) -> int:
        """`length`."""
        return self.length

    def __bool__(self) -> bool:
        """True, even if the store is empty, so that ``store or make()`` keeps it."""
        return True

    def _tokens_in_words(self) -> str:
        """How many tokens there are, for a `repr`, and which layers have more, if layers differ."""
        counts = self._storage.counts
        ends = ends_of(counts)
        if any(layer.history is not None for layer in counts):
            most = max(layer.most_held for layer in counts)
            words = f"{counted(self.length, 'token')}, up to {most}/{self.capacity} held"
        else:
            most = max(layer.most_held for layer in counts)
            held = self.length if most == max(ends) else most  # a longer layer has not dropped any either
            words = tokens_in_words(self.length, held, self.capacity)
        return words + (f", layers differ: {lengths.in_words(ends)}" if min(ends) < max(ends) else "")

    @locked
    def __repr__(self) -> str:
        storage, config = self._storage, self._config
        batch = f" x batch {self.batch_size}" if self.batch_size > 1 else ""
        return (
            f"KVCacheStore({counted(self.num_layers, 'layer')}{batch} x {counted(self.num_kv_heads, 'head')} x "
            f"{storage.rows.width}, {storage.described(config)}, {self._tokens_in_words()}, "
            f"{size_in_words(self.nbytes)}{self._place_in_words()}, {self.runtime.arch})"
        )

    def _place_in_words(self) -> str:
        """Where the layers are kept, if the caller asked for a place."""
        if self.place == "host":
            return f" on the host, {counted(self.resident_layers, 'layer')} on the device too"
        plain = "" if self._config.place == "device" else why_plain(self.runtime, "KVCacheStore")
        return f", place='host' makes an ordinary store: {plain}" if plain else ""
