"""Attention over contiguous caches and rings: `decode_attention`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from tikv import runtime
from tikv.arrays import Array, Arrays, ArrayView, describe, refuse_backward
from tikv.errors import CapacityError, ShapeError
from tikv.formats import GroupFormat
from tikv.ops import checks
from tikv.ops.attention.call import Caches, attention_call
from tikv.ops.attention.mass import NO_MASS
from tikv.ops.attention.options import AttentionOptions, CacheLayout, are_fixed, window_or_none
from tikv.ops.attention.plan import Results
from tikv.ops.attention.request import AttendRequest
from tikv.ops.fixed_scales import fixed_scale
from tikv.ops.layouts import Formats, Rows, Scale


def decode_attention(
    q: Array,
    k_cache: Array,
    v_cache: Array,
    seq_lens: Array | int,
    *,
    scale: float | None = None,
    causal: bool = True,
    window: int | None = None,
    ring: bool = False,
    sinks: int = 0,
    k_scale: Array | float | None = None,
    v_scale: Array | float | None = None,
    return_lse: bool = False,
    out: Array | None = None,
    softcap: float | None = None,
    num_splits: int | None = None,
    return_mass: bool | str = False,
    lse_base2: bool = False,
    first_valid: int | None = None,
    impl: str = "auto",
    sink_logits: Array | None = None,
    alibi_slopes: Array | None = None,
    mask: Array | None = None,
    parents: Array | None = None,
    head_dim_v: int | None = None,
    indices: Array | None = None,
    mass_into: Array | None = None,
) -> Arrays:
    """Attend with the queries of the newest tokens over contiguous caches or rings, which are read in place.

    Query ``i`` of T belongs to the token at position ``seq_lens[b] - T + i`` and sees the tokens up to that one.
    [Attention in detail][attention-in-detail] (docs/attention.md) has all rules of the options and of rounding.

    Args:
        q: (B, Hq, D) or (B, Hq, T, D), float32, float16 or bfloat16, with a contiguous last axis.
        k_cache, v_cache: (B, H, capacity, D) and (B, H, capacity, D_v), H dividing Hq, with a contiguous last axis:
            float32, float16, bfloat16, 8-bit floats, or int8 with scales; or each a `Quantized` of such a shape.
        seq_lens: (B,) int32 or int64, or one int: tokens of each sequence, including the newest, and for a ring all
            that were ever written; (B, H) for heads of different lengths. On the host or the device.
        scale: factor of the scores; None for ``1 / sqrt(D)``.
        causal: False lets every query see what the newest query sees.
        window: tokens that a query sees, including itself and the sinks; for a ring also the number of slots in use.
        ring: True if the slots after the sinks are a ring, as when `copy` writes with ``window``.
        sinks: number of first tokens that stay visible in spite of the window.
        k_scale, v_scale: (B, H, capacity) float16 or float32 for int8; a number, (H,) or (B, H) for 8-bit floats.
        return_lse, lse_base2: also return the log-sum-exp of each query's scaled scores, in base e or 2.
        out: (B, Hq, D_v) or (B, Hq, T, D_v), of q's dtype.
        softcap: scores become ``softcap * tanh(score / softcap)``.
        num_splits: parts of the keys that are read in parallel; None lets tikv choose.
        return_mass, mass_into: also return the weight of each slot, "sum" (True), "max" or "last"; an array.
        first_valid: oldest position after the sinks that is still stored, for a ring that was trimmed.
        impl: "taichi"; "torch" for torch's attention over the same memory, for plain caches; or "auto", which chooses.
        sink_logits: (Hq,) float32: one more logit for each query head, which takes weight but adds nothing.
        alibi_slopes: (Hq,) or (B, Hq) float32: ``slope * (key position - query position)`` is added to each score.
        mask: (B, T, T) bool, or (B, T, ceil(T / 8)) uint8 of packed bits: which of the new tokens each query sees.
        parents: (B, T) int32 or int64: the parent of each new token, by index, or -1, if they are a tree of drafts.
        head_dim_v: with ``v_cache=None``, the values are the first ``head_dim_v`` columns of the keys.
        indices: (B, T, K) or (B, H, T, K) int32 or int64: the tokens that each query reads; -1 stands for no token.

    Returns:
        ``out``, or a new array of q's kind; with ``return_lse`` also the log-sum-exp, float32 (B, Hq) or (B, Hq, T);
        with ``return_mass`` also the mass. A query that sees nothing gets 0 and -inf.

    Raises:
        PositionError: a length, a parent or an index on the host is out of range.
        CapacityError: a length on the host or a ring's window is beyond the capacity, or sinks fill the window.
        ShapeError, DTypeError, OptionError: the arrays or the options do not fit.

    Exactness: products and sums are float32, rounded once; the last bits depend on splits, back end and batch. Tensor
        cores round more: by at most ``2**-10`` (float16) or ``2**-7`` (bfloat16) of the result's largest number.
    Cost: visible keys and values are read once for all query heads of a group, in one launch, or in two with splits.
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
        return_mass=return_mass, mass_into=mass_into,
    )  # fmt: skip
    mass = NO_MASS if return_mass is False and mass_into is None else request.checked(operation).asked_mass(operation)
    layout = CONTIGUOUS
    if ring is not False or type(sinks) is not int or sinks:
        layout = ContiguousLayout(checks.flag(ring, "ring", operation), checks.integer(sinks, "sinks", operation))
    caches = Caches(layout, k_cache, v_cache, seq_lens, None, k_scale, v_scale, head_dim_v)
    results = Results(out, checks.flag(return_lse, "return_lse", operation), mass=mass)
    call = attention_call(operation, q, caches, request, mass.kind)
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
