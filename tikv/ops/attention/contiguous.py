"""Attention over contiguous caches and rings: `decode_attention`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from tikv import runtime
from tikv.arrays import ArrayView, describe, refuse_backward
from tikv.errors import CapacityError, ShapeError
from tikv.formats import GroupFormat
from tikv.ops import checks
from tikv.ops.attention.call import Caches, attention_call
from tikv.ops.attention.options import AttentionOptions, CacheLayout, are_fixed, window_or_none
from tikv.ops.attention.plan import Results
from tikv.ops.attention.request import AttendRequest
from tikv.ops.fixed_scales import fixed_scale
from tikv.ops.layouts import Formats, Rows, Scale


def decode_attention(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    seq_lens: Any,
    *,
    scale: float | None = None,
    causal: bool = True,
    window: int | None = None,
    ring: bool = False,
    sinks: int = 0,
    k_scale: Any = None,
    v_scale: Any = None,
    return_lse: bool = False,
    out: Any = None,
    softcap: float | None = None,
    num_splits: int | None = None,
    return_mass: bool = False,
    lse_base2: bool = False,
    first_valid: int | None = None,
    impl: str = "auto",
    sink_logits: Any = None,
    alibi_slopes: Any = None,
    mask: Any = None,
    parents: Any = None,
    head_dim_v: int | None = None,
    indices: Any = None,
) -> Any:
    """Attend with the queries of the newest tokens over contiguous caches or rings, which are read in place.

    Query ``i`` of T belongs to the token at position ``seq_lens[b] - T + i`` and sees the tokens up to that one.

    Args:
        q: (B, Hq, D) or (B, Hq, T, D), float32, float16 or bfloat16; any strides with a contiguous last axis.
        k_cache, v_cache: (B, H, capacity, D) and (B, H, capacity, D_v), H dividing Hq: float32, float16, bfloat16,
            float8_e4m3fn, float8_e5m2, or int8 with scales; or each a `Quantized` of such a shape; any strides with a
            contiguous last axis. Their dtypes may differ. Query head ``h`` reads head ``h // (Hq // H)``.
        seq_lens: (B,) int32 or int64, on the host or the device: tokens of each sequence, including the newest; or one
            int for all. For a ring it counts all tokens ever written. (B, H) gives each KV head a length of its own,
            by which its window, sinks and ring are counted too.
        scale: factor of the scores; None for ``1 / sqrt(D)``.
        causal: False lets every query see what the newest query sees.
        window: tokens that a query sees, including itself and the sinks; for a ring also the number of slots in use.
        ring: True if the slots after the sinks are a ring, as when `copy` writes with ``window``. Without ``window``
            all slots of the cache are in use.
        sinks: number of first tokens that stay visible in spite of the window.
        k_scale, v_scale: for int8 caches (B, H, capacity) float16 or float32; for caches of 8-bit floats a number, (H,)
            or (B, H) each, by which their values are multiplied; not for other caches.
        return_lse: also return the log-sum-exp of each query's scaled scores.
        out: (B, Hq, D_v) or (B, Hq, T, D_v), of q's dtype.
        softcap: scores become ``softcap * tanh(score / softcap)``.
        num_splits: number of parts of the keys that are read in parallel; None lets tikv choose. Results differ by
            rounding only.
        return_mass: also return how much weight each slot got, float32 (B, H, capacity), summed over the query heads of
            the KV head and over the queries. Eviction methods rank tokens by it. Slots that no query sees have 0. With
            ``indices`` it is (B, H, T, K), in the order of each query's tokens.
        lse_base2: return the log-sum-exp in base 2 instead of e.
        first_valid: oldest position after the sinks that is still stored, for a ring that was trimmed. It cannot be
            used with a length for each head.
        impl: "taichi"; "torch" for torch's attention over the same memory, for plain contiguous caches; or "auto",
            which chooses. If torch is imported, "auto" uses it on CPU for float32 and float16 prompts of at least 64
            queries, for which it converts float16 caches to float32, and on CUDA where tensor cores cannot be used.
            ``tikv bench --attention`` replaces this rule for the kinds of calls that it times (causal with as many
            queries as keys, causal with fewer, and not causal): for these, "auto" then takes what was faster on this
            device. `tikv.info()["attention_auto"]` says what it takes. torch lets a NaN reach queries that do not see
            it. So the host waits for the result of a causal call, and if a NaN is in it, tikv's own kernels compute it
            again.
        sink_logits: (Hq,) float32: one more logit for each query head. It takes its share of the weight but adds
            nothing to the result; the log-sum-exp includes it. A query that sees nothing gives 0 and this logit.
        alibi_slopes: (Hq,) or (B, Hq) float32: ``slope * (key position - query position)`` is added to each score,
            after a soft cap. Not with ``return_mass``.
        mask: (B, T, T) bool, or uint8 (B, T, ceil(T / 8)) of packed bits, the lowest first: which of the T new tokens
            each query sees, instead of those up to its own. All queries see the earlier tokens. NumPy or torch. Not
            with ``return_mass``.
        parents: (B, T) int32 or int64, a tree of new tokens: for each, the index of its parent among the new tokens, or
            -1 if it follows the earlier tokens. A query sees its ancestors and itself. With a mask or parents, the
            depth of a query is the number of new tokens that it sees, and windows and slopes count by depth, not by
            slots. Not with ``return_mass``.
        head_dim_v: with ``v_cache=None``, the values are the first ``head_dim_v`` columns of the keys (latent
            attention), and an 8-bit cache has only ``k_scale``.
        indices: (B, T, K) int32 or int64, or (B, H, T, K) per KV head: the tokens that each query reads, in any order,
            counted from the first of its sequence as ``seq_lens`` counts them; -1 stands for no token. No other row is
            read. Tokens that ``causal``, ``window``, a mask or a ring hides stay hidden. A token that is named twice
            counts twice; with ``tikv.init(debug=True)`` that is an error.

    Returns:
        ``out``, or a new array of q's kind, if that is NumPy, torch, or a library with ``from_dlpack`` such as JAX;
        otherwise a `CacheArray`; with ``return_lse`` also the log-sum-exp, float32 (B, Hq) or (B, Hq, T), and with
        ``return_mass`` the mass. A query that sees nothing, or whose head has no keys, gets 0 and -inf.

    Raises:
        PositionError: a length on the host is negative, or is less than T but not 0 where ``causal`` is True; a parent
            on the host does not come before its token; an index on the host is not a token of its sequence. On the
            device, lengths and parents are limited to their valid range, and indices that are not tokens of their
            sequence are ignored.
        CapacityError: a length on the host is beyond the capacity, the window is not larger than the sinks, or the
            window of a ring is larger than the capacity.
        ShapeError, DTypeError, OptionError: the arrays do not fit, int8 has no scales, or ``impl`` is unknown.

    Exactness: products and sums are float32, rounded once at the end; the last bits differ between splits and back
        ends, and with the batch unless ``tikv.init(invariant=True)`` was called. A NaN in a query, or in a key or value
        that it sees, reaches every result that depends on it; a NaN that no query sees never reaches a result.
        Infinities behave as in a softmax in float32.
        CUDA's tensor cores are used if q, K and V are all float16 or all bfloat16 and heads are 64 to 256 wide in steps
        of 32, or keys are up to 576 wide in steps of 64 and values up to 512 in steps of 128. They round weights to
        that dtype before they multiply V, and divide by the sum of the rounded weights, so errors are at most the
        result's largest number times ``2**-10`` in float16 and ``2**-7`` in bfloat16. They are also used for int8 and
        for formats with groups of 8-bit or 4-bit codes, with float16 scales, q of float16 or bfloat16, and heads of 64,
        96 or 128; weights and dequantised values are then rounded to float16, and the same bounds hold. They are used
        for 8-bit floats, mxfp8, mxfp4 and nvfp4 too, whose values need no rounding; all but float8_e5m2 and mxfp4 need
        compute capability 9.0 and the native launcher (``tikv.info()["launcher"]`` says which is in use). On such a GPU
        with that launcher, K and V that are stored in int8, 8-bit floats or groups of 8-bit or 4-bit codes are rounded
        to the dtype of q for prompts of at least 128 query rows per KV head, if heads are 64, 96, 128 or 256 wide.
        Results are then within these bounds of attention over the rounded numbers; with float16, numbers beyond 65,504
        become infinite. ``tikv.info()["tensor_cores"]`` says whether there are tensor cores. Without them, all
        arithmetic is float32. It is also float32 with sink logits, slopes, masks or trees, except in prompts of at
        least 128 query rows per KV head in float16 or bfloat16 on compute capability 9.0.
    Cost: the visible keys and values are read once for all query heads of a group, in one launch, or in two with
        splits. Heads of different lengths take as long as heads of equal lengths with as many keys in total.
        ``return_mass`` takes one more launch, which reads K again. With ``indices`` only the chosen rows are read, once
        per query for all query heads of a group; the kernels for tensor cores gather them, too.
    Source: ``sdpa_decode``, ``flash_attn_vec``, ``flash_attention``, ``FlashDecodingPlan``.

    Examples:
        >>> import numpy as np, tikv
        >>> k, v = np.zeros((1, 1, 4, 2), np.float32), np.arange(8, dtype=np.float32).reshape(1, 1, 4, 2)
        >>> tikv.decode_attention(np.ones((1, 2, 2), np.float32), k, v, np.array([3])).tolist()
        [[[2.0, 3.0], [2.0, 3.0]]]
    """
    operation = "decode_attention"
    request = AttendRequest(
        scale=scale, softcap=softcap, window=window, impl=impl, sink_logits=sink_logits, alibi_slopes=alibi_slopes,
        mask=mask, parents=parents, causal=causal, num_splits=num_splits, lse_base2=lse_base2, indices=indices,
    )  # fmt: skip
    layout = CONTIGUOUS
    if ring is not False or type(sinks) is not int or sinks:
        layout = ContiguousLayout(checks.flag(ring, "ring", operation), checks.integer(sinks, "sinks", operation))
    caches = Caches(layout, k_cache, v_cache, seq_lens, None, k_scale, v_scale, head_dim_v)
    results = Results(out, checks.flag(return_lse, "return_lse", operation))
    call = attention_call(operation, q, caches, request, checks.flag(return_mass, "return_mass", operation))
    return refuse_backward(call.attend(q, results, impl, first_valid or 0), q, k_cache, v_cache)


NAMES = {"q": "q", "k": "k_cache", "v": "v_cache", "lens": "seq_lens"}  # parameters, by the array that attention reads


class ContiguousLayout(NamedTuple):
    """Contiguous caches, (B, H, capacity, D), and how their slots are read; an `AttendedLayout`.

    `ring` may also be the number of slots that tokens go round, sinks included, if the window is smaller. With
    `starts`, lengths are (2 * B,): for each sequence its length and the first slot that is seen.
    """

    ring: bool | int = False
    sinks: int = 0
    starts: bool = False

    @property
    def names(self) -> Mapping[str, str]:
        """As in `AttendedLayout`."""
        return NAMES

    def check(self, operation: str, caches: Caches, request: AttendRequest) -> None:
        """Refuse nothing."""

    def cache(
        self, live: runtime.Runtime, operation: str, arrays: dict[str, ArrayView], formats: Formats,
        options: AttentionOptions,
    ) -> tuple[CacheLayout, AttentionOptions]:  # fmt: skip
        """As in `AttendedLayout`."""
        checks.on_device([(NAMES.get(name, name), a) for name, a in arrays.items()], live, operation)
        k, v = arrays["k"], arrays["v"]
        for name, a in (("k_cache", k), ("v_cache", v)):
            checks.rank(a, (4,), name, "(B, H, capacity, D)", operation)
            checks.readable(a, name, operation)
        detail = f"k_cache: {describe(k)}, v_cache: {describe(v)}"
        for axis, what in enumerate(("batch", "number of heads", "capacity")):
            checks.extent(v.shape[axis], k.shape[axis], f"the {what} of v_cache", operation, detail)
        capacity, window, (ring, sinks, starts) = k.shape[2], options.span, self
        window = checks.window_of(window, capacity, operation) if ring is True else window_or_none(window, operation)
        slots = capacity if window is None else window
        if sinks and (window is not None or ring) and sinks >= slots:
            raise CapacityError(
                f"{operation}: sinks={sinks} leave no room for other tokens in the window of {slots}. Use sinks < "
                f"{slots}."
            )
        per_row = () if are_fixed(arrays, k.shape[1], k.shape[0], operation) else ("k_scale", "v_scale")
        for name, a in [(name, arrays[name]) for name in per_row if name in arrays]:
            if a.shape[: None if formats == (None, None) else 3] != k.shape[:3]:
                raise ShapeError(
                    f"{operation}: {name} is {describe(a)} where (B, H, capacity) = {k.shape[:3]} is needed."
                )
        ringed = ring or window is not None
        ring_slots = (slots if ring is True else ring) - sinks if ring else 0
        cache = contiguous_cache(arrays, sinks=sinks if ringed else 0, ring=ring_slots, formats=formats)
        if options.span is not None:
            options = options._replace(span=options.span - cache.sinks)
        return cache._replace(starts=starts), options


CONTIGUOUS = ContiguousLayout()


def contiguous_cache(
    arrays: Mapping[str, ArrayView], *, sinks: int = 0, ring: int = 0, formats: Formats = (None, None)
) -> CacheLayout:
    """The `CacheLayout` of (B, H, capacity, D) arrays k and v, and of their scales among `arrays`.

    `ring` slots after the sinks form a ring; 0 without a ring. In a format of groups an array holds words of codes,
    and its scales are the scales and biases of the groups, side by side.
    """
    (k, v), (of_k, of_v) = (arrays["k"], arrays["v"]), formats
    return CacheLayout(
        k=_rows(k, arrays.get("k_scale"), of_k),
        v=_rows(v, arrays.get("v_scale"), of_v),
        heads=k.shape[1],
        width=of_k.columns(k.shape[3]) if of_k else k.shape[3],
        width_v=of_v.columns(v.shape[3]) if of_v else v.shape[3],
        kind="ring" if ring else "linear",
        capacity=k.shape[2],
        sinks=sinks,
        ring=ring,
    )


def _rows(a: ArrayView, scale: ArrayView | None, format: GroupFormat | None) -> Rows:
    """The rows of a (B, H, capacity, D) array, and their scales, one per row or of fewer axes."""
    where = None
    if scale is not None:
        step = scale.strides
        where = fixed_scale(scale) if scale.ndim < 3 else Scale(scale, sequence=step[0], head=step[1], token=step[2])
    return Rows(a, sequence=a.strides[0], head=a.strides[1], token=a.strides[2], format=format, scale=where)
