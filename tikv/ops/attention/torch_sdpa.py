"""Attention by torch's own function, over the same memory, in the cases that it supports."""

from __future__ import annotations

import functools
import importlib.util
import math
import sys
from typing import Any

from tikv import extras, launch, runtime
from tikv.arrays import ArrayView, CacheArray
from tikv.dtypes import DType, float16, float32
from tikv.errors import OptionError
from tikv.ops.attention import measured
from tikv.ops.attention.options import AttentionOptions, CacheLayout, lens_by_head
from tikv.ops.attention.terms import NAMES
from tikv.ops.indices import host_indices

BLOCK_QUERIES = 512  # queries of a prompt that torch processes at once on CPU
MOST_CACHED_BYTES = 1 << 24  # the most for the mask of a plan
MASKED = "masked"  # kind of a call whose keys only a mask describes, such as those of a window; it is not timed
LEAST_QUERIES = {float32: 64, float16: 64}  # a prompt on CPU with so many is faster in torch, at 4,096 keys


def why_not_torch(
    live: runtime.Runtime, arrays: dict[str, ArrayView], cache: CacheLayout, options: AttentionOptions
) -> str:
    """Why torch cannot attend over arrays of this form; empty where it can."""
    q, k, v = arrays["q"], arrays["k"], arrays["v"]
    if live.invariant:
        return "tikv.init(invariant=True) is set, and the bits of torch's results depend on the batch"
    if importlib.util.find_spec("torch") is None:
        return "torch is not installed"
    if live.is_spirv:
        return f"torch cannot share memory on {live.arch}"
    if cache.kind != "linear" or cache.sinks or cache.scales or options.softcap or options.splits or options.mass:
        return "torch attends over plain caches only: no ring, sinks, int8, softcap, num_splits or mass"
    if options.newer or options.short:
        return "some queries see newer tokens, or come before the first token"
    if "indices" in arrays:
        return "torch attends over all tokens, and indices choose some"
    if lens_by_head(arrays):
        return "KV heads have different lengths"
    if terms := [name for name in NAMES if name in arrays]:
        return f"{terms[0].removesuffix('_bits')} is not passed on to torch"
    if not q.dtype is k.dtype is v.dtype:
        return f"q is {q.dtype.name}, K {k.dtype.name} and V {v.dtype.name}; torch needs one dtype for all three"
    if len({a.device for a in (q, k, v)}) > 1:
        return "q and the cache are on different devices"
    return ""


def torch_is_faster(
    live: runtime.Runtime, kind: str, queries: int, tensor_cores: bool, dtype: DType, head_dim: int
) -> bool:
    """Whether "auto" gives a call of a kind that torch supports to torch; `tensor_cores`: tikv's kernels use them.

    It follows what `tikv bench --attention` measured on this device. Without measurements torch gets prompts on CPU,
    where it takes 0.4 to 0.8 of the time, and on CUDA the calls that the tensor cores do not support: the tensor cores'
    kernel returns to the caller ten times sooner.
    """
    if live.invariant:
        return False
    timings = measured.timings(live)
    if timings is not None and timings.knows(kind, dtype.name):
        least = timings.least_queries(kind, dtype.name, head_dim)
        return least is not None and queries >= least
    if live.is_cpu:
        return queries >= LEAST_QUERIES.get(dtype, queries + 1)
    return not tensor_cores


def report(live: runtime.Runtime) -> str:
    """What `impl="auto"` takes for each kind of call, tikv's kernels or torch's attention, and why; for people."""
    if live.invariant:
        return "tikv: the bits of torch's results depend on the batch, and tikv.init(invariant=True) is set"
    if live.is_spirv:
        return f"tikv: torch cannot share memory on {live.arch}"
    timings = measured.timings(live)
    if timings is not None:
        choices = timings.choices()
    elif live.is_cpu:
        least = [f"{queries} queries of {dtype.name}" for dtype, queries in LEAST_QUERIES.items()]
        choices = f"torch from {' or '.join(least)}, otherwise tikv"
    else:
        choices = "torch where tensor cores are not used, otherwise tikv"
    return f"{measured.why(live)}; {choices}"


class TorchAttention:
    """Attention over arrays of one form by torch's `scaled_dot_product_attention`, over the same memory."""

    def __init__(
        self, live: runtime.Runtime, arrays: dict[str, ArrayView], cache: CacheLayout, options: AttentionOptions,
        tensor_cores: bool,
    ) -> None:  # fmt: skip
        q = arrays["q"]
        self.live = live
        self.queries = q.shape[2] if q.ndim == 4 else 1  # queries per sequence
        self.options = options
        self.why_not = why_not_torch(live, arrays, cache, options)
        self._form = self.queries, tensor_cores, arrays["k"].dtype, q.shape[-1]
        self._cached_mask: Any = None  # the last mask; later calls use a part of it

    def kind(self, length: int, first_valid: int) -> str:
        """The kind of a call over the tokens from `first_valid` to `length`: one of `measured.KINDS`, or `MASKED`."""
        if not self.options.causal or self.queries == 1:
            return measured.FULL
        keys, span = length - max(0, first_valid), self.options.span
        if keys < self.queries or (span is not None and span < keys):
            return MASKED
        return measured.SQUARE if keys == self.queries else measured.RECTANGULAR

    @functools.cached_property
    def faster(self) -> frozenset[str]:
        """The kinds of calls for which `torch_is_faster`; measured times are read when it is first asked."""
        kinds = (*measured.KINDS, MASKED)
        return frozenset(kind for kind in kinds if torch_is_faster(self.live, kind, *self._form))

    def serves(
        self, operation: str, arrays: dict[str, ArrayView], length: int, first_valid: int, return_lse: bool, impl: str
    ) -> bool:
        """Whether torch attends, for "auto" if it is faster; with impl="torch" it raises where torch cannot be used."""
        if impl == "auto" and (
            "torch" not in sys.modules or not self.faster or self.kind(length, first_valid) not in self.faster
        ):
            return False
        reason = self.why_not
        if not reason and return_lse:
            reason = "torch gives no log-sum-exp"
        if not reason and "lens" in arrays:
            known = host_indices(arrays["lens"], self.live)
            if known is None or known.size == 0 or known.min() != known.max():
                reason = "torch needs one length for all sequences, known on the host"
        if reason and impl == "torch":
            raise OptionError(f"{operation}: impl='torch' cannot do this: {reason}. Use impl='taichi'.")
        return not reason

    def attend(self, operation: str, arrays: dict[str, ArrayView], length: int, first_valid: int) -> bool:
        """Attend over the tokens from `first_valid` to `length`; False if the result cannot be used.

        Torch computes weights of keys that a query does not see too. They are 0, but 0 times a NaN or an infinity is a
        NaN, and so is their score plus minus infinity. So a NaN in a causal result may come from keys that the query
        does not see. The sum of the result tells whether there is one, for which the host waits.
        """
        options, q = self.options, arrays["q"]
        torch = extras.need("torch", f"{operation}: impl='torch'")
        launch.refuse_during_capture(self.live, operation, "a length on the host")
        queries, k, v, to = (torch.from_dlpack(CacheArray(arrays[n], self.live)) for n in ("q", "k", "v", "out"))
        if q.ndim == 3:
            queries, to = queries[:, :, None], to[:, :, None]
        tokens, kind = self.queries, self.kind(length, first_valid)
        causal, span = kind != measured.FULL, length if options.span is None else options.span
        oldest = max(0, first_valid, length - span - (tokens - 1 if causal else 0))
        if self.live.is_cpu and tokens >= LEAST_QUERIES.get(q.dtype, tokens + 1):
            # Torch takes 1.2 to 2 times as long with float16, which it widens repeatedly.
            queries, k, v = queries.float(), k[:, :, oldest:length].float(), v[:, :, oldest:length].float()
        else:
            k, v = k[:, :, oldest:length], v[:, :, oldest:length]
        # Keys that no query of a block sees are not read, and its mask ends at its last query.
        block = BLOCK_QUERIES if causal and self.live.is_cpu else tokens
        for first in range(0, tokens, block):
            end = min(tokens, first + block)
            high = length - tokens + end if causal else length
            low = max(0, first_valid, high - span - (end - first - 1 if causal else 0))
            if low >= high:
                to[:, :, first:end].zero_()
                continue
            result = torch.nn.functional.scaled_dot_product_attention(
                queries[:, :, first:end],
                k[:, :, low - oldest : high - oldest],
                v[:, :, low - oldest : high - oldest],
                **self._seen(torch, kind, end - first, high - low, span, queries),
                scale=options.scale,
                enable_gqa=True,
            )
            to[:, :, first:end].copy_(result)
            if causal and not math.isfinite(result.sum(dtype=torch.float32)):
                return False
        return True

    def _seen(self, torch: Any, kind: str, queries: int, keys: int, span: int, like: Any) -> dict[str, Any]:
        """Which keys each query sees, as an argument of torch's attention.

        On CUDA torch has no flash attention with a mask, and its other kernels read a number of it for each query and
        key. Between cuDNN and flash attention torch chooses: it knows which versions of cuDNN give wrong results.
        """
        if kind == measured.FULL:
            return {}
        if kind == measured.SQUARE and not self.live.is_cpu:
            return {"is_causal": True}
        if kind == measured.RECTANGULAR and not self.live.is_cpu:
            from torch.nn.attention.bias import causal_lower_right

            return {"attn_mask": causal_lower_right(queries, keys)}
        return {"attn_mask": self._mask(torch, queries, keys, span, like)}

    def _mask(self, torch: Any, queries: int, keys: int, span: int, like: Any) -> Any:
        """The mask of the newest `queries` over `keys` keys, of which each sees `span`: 0 if seen, else minus infinity.

        On CPU it holds numbers, since torch would convert a mask of bools in each call. One mask is cached; a mask for
        fewer keys is its lower right corner, if no query reaches the end of its span.
        """
        cached = self._cached_mask
        slides = span < keys
        if cached is not None and not slides and cached.shape[0] >= queries and cached.shape[1] >= keys:
            return cached[-queries:, -keys:]
        width = keys if slides or not self.live.is_cpu else -(-keys // BLOCK_QUERIES) * BLOCK_QUERIES
        at = torch.arange(width - queries, width, device=like.device)[:, None]
        key = torch.arange(width, device=like.device)[None]
        sees = (key <= at) & (key > at - span) if slides else key <= at
        if not self.live.is_cpu:
            return sees
        mask = torch.zeros(sees.shape, dtype=like.dtype).masked_fill_(~sees, float("-inf"))
        if not slides and mask.nbytes <= MOST_CACHED_BYTES:
            self._cached_mask = mask
        return mask[:, -keys:]
