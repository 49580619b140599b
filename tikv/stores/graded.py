"""Attention of a `KVCacheStore` through which gradients flow, to queries and to tokens that came with ``grad=True``."""

from __future__ import annotations

import functools
import sys
from typing import Any

from tikv.arrays import Array
from tikv.arrays.gradients import GradedTokens, is_followed
from tikv.dtypes import DType
from tikv.errors import OptionError
from tikv.ops.attention.backward import Attended, gradients_of_parts
from tikv.ops.attention.request import AttendRequest

_FLOATS = ("float32", "float16", "bfloat16")
_OPTIONS = ("layout", "scale", "softcap", "return_lse", "sink_logits")  # of `extend`, with gradients
_REFUSED = ("alibi_slopes", "return_mass", "mass_into", "mask", "parents", "block")


class GradedLayers:
    """The tokens of a store that came with a gradient, for each layer, and how often rows have changed since."""

    def __init__(self) -> None:
        self._layers: dict[int, GradedTokens] = {}
        self.changes = [0]  # a list, which calls share without the tokens

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None  # the tokens of a copy are frozen

    def of(self, layer: int) -> GradedTokens:
        """A layer's tokens."""
        return self._layers.setdefault(layer, GradedTokens())

    def changed(self, length: int = 0) -> None:
        """Rows from this position on are no longer what they were: tokens there are forgotten."""
        self.changes[0] += 1
        for graded in self._layers.values():
            graded.cut(length)


def require(store: Any, operation: str, layer: int, arrays: dict[str, Any], asked: dict[str, Any]) -> None:
    """Raise unless gradients can flow through a call.

    Args:
        store, operation, layer: whose call it is.
        arrays: its queries, keys and values.
        asked: its other options.

    Raises:
        OptionError: they cannot. Nothing is written.
    """
    torch = sys.modules.get("torch")
    formats = [str(format) for format in (store.dtype, store.v_dtype)]
    foreign = [name for name, a in arrays.items() if torch is None or not isinstance(a, torch.Tensor)]
    more = [name for name, value in asked.items() if name not in _OPTIONS and value is not None and value is not False]
    counts = store._counts(layer, operation)
    if foreign:
        why = f"{foreign[0]} is not a tensor of torch"
    elif any(not isinstance(format, DType) or str(format) not in _FLOATS for format in (store.dtype, store.v_dtype)):
        why = f"codes have no gradient, and the store has {' and '.join(dict.fromkeys(formats))}"
    elif any(divisor is not None for divisor in store.divisors):
        why = "the store divides rows by k_scale or v_scale"
    elif store.windows[layer] is not None:
        why = f"layer {layer} has a window, which overwrites tokens that backward needs"
    elif store.place != "device":
        why = "the store is in the host's memory"
    elif counts.head_lengths is not None or counts.length != counts.end:
        why = f"layer {layer} was compacted"
    elif more:
        why = f"{more[0]}= is not supported with it"
    elif is_followed(asked.get("sink_logits")):
        why = "sink_logits get no gradient: detach() them"
    else:
        return
    raise OptionError(
        f"{operation}: grad=True is not possible: {why}. Leave grad out, or train with torch's attention."
    )


def append(store: Any, layer: int, rows: tuple[Any, Any], positions: Array, layout: str) -> None:
    """`KVCacheStore.append` of tokens to which later calls pass gradients on."""
    k, v = rows
    require(store, "KVCacheStore.append", layer, {"k": k, "v": v}, {"positions": positions})
    first = store.layer_length(layer)
    store.append(layer, k.detach(), v.detach(), layout=layout)
    _note(store, layer, first, k, v, layout)


def extend(store: Any, layer: int, arrays: tuple[Any, Any, Any], request: AttendRequest) -> Any:
    """`KVCacheStore.extend` through which gradients flow, with the same bits as without them."""
    operation, torch = "KVCacheStore.extend", sys.modules.get("torch")
    q, k, v = arrays
    asked = {name: getattr(request, name) for name in (*_OPTIONS, *_REFUSED)} | {"keep": not request.keep}
    require(store, operation, layer, {"q": q, "k": k, "v": v}, asked)
    assert torch is not None
    options = {name: asked[name] for name in _OPTIONS}
    first, layout = store.layer_length(layer), request.layout
    with torch.no_grad():
        out, lse = store.extend(layer, q.detach(), k.detach(), v.detach(), **options | {"return_lse": True})
    graded = _note(store, layer, first, k, v, layout)
    if torch.is_grad_enabled() and (q.requires_grad or graded):
        spans = [(place, place + k.shape[2]) for place, k, _ in graded.tokens]
        sources = [a for _, *pair in graded.tokens for a in pair]
        read = _Read(store, layer, options, spans)
        out, lse = _function().apply(read, out, lse, q, *sources)
    return (out, lse) if request.return_lse else out


def _note(store: Any, layer: int, first: int, k: Array, v: Array, layout: str) -> GradedTokens:
    """A layer's tokens with a gradient, these new ones included."""
    if store._graded is None:
        store._graded = GradedLayers()
    graded: GradedTokens = store._graded.of(layer)
    graded.add(first, _head_major(k, layout), _head_major(v, layout))
    store._followed |= is_followed(k, v)
    return graded


def _head_major(a: Any, layout: str) -> Any:
    """(batch, heads, T, ...) of an array in a layout; the batch may be left out."""
    a = a if a.ndim == 4 else a[None]
    return a.transpose(1, 2) if layout == "token_major" else a


class _Read:
    """What a call has read: the store's rows, and which of them have a gradient."""

    def __init__(self, store: Any, layer: int, options: dict[str, Any], spans: list[tuple[int, int]]) -> None:
        # Neither the store nor its tokens, which may have this call in their graph: such a circle is never freed.
        self._layer, self._options, self._spans = layer, options, spans
        self._changes, held = store._graded.changes, store.layer_length(layer)
        self._before = self._changes[0]
        keys, values = store.keys(layer).torch(), store.values(layer).torch()
        self._rows = keys[:, :, :held], values[:, :, :held]

    def gradients(
        self, q: Array, out: Array, lse: Array, grad_out: Array, grad_lse: Array, needed: tuple[bool, ...]
    ) -> list[Any]:
        """Of queries, and of the keys and values of each span; None where they are not `needed`.

        Raises:
            OptionError: the rows are no longer there.
        """
        held = self._rows[0].shape[2]
        if self._changes[0] != self._before:
            raise OptionError(
                f"KVCacheStore.extend: the store no longer holds the {held} tokens of layer {self._layer} that the "
                f"call has read, so there are no gradients. Call backward() before trim(), reset() and what else moves "
                f"or drops tokens."
            )
        layout = self._options["layout"]
        q, out, grad_out = (_head_major(a, layout) for a in (q, out, grad_out))
        lse, grad_lse = (_head_major(a[..., None], layout)[..., 0] for a in (lse, grad_lse))
        call = Attended(q, out, lse, self._options["scale"], self._options["softcap"])
        of_q, *of_rows = gradients_of_parts(call, self._rows, (grad_out, grad_lse), self._spans, needed)
        return [of_q if of_q is None or layout == "head_major" else of_q.transpose(1, 2), *of_rows]


@functools.cache
def _function() -> Any:
    torch: Any = sys.modules["torch"]

    class Attention(torch.autograd.Function):  # type: ignore[misc]
        """The autograd node of a result that this library's kernels have computed."""

        @staticmethod
        def forward(ctx: Any, what: _Read, out: Array, lse: Array, q: Array, *sources: Any) -> Any:
            """The results themselves."""
            ctx.what, ctx.dtypes = what, [a.dtype for a in sources]
            ctx.save_for_backward(q, out, lse)
            ctx.mark_dirty(out, lse)
            return out, lse

        @staticmethod
        def backward(ctx: Any, grad_out: Array, grad_lse: Array) -> Any:
            """The gradients of queries, and of tokens that came with one."""
            q, out, lse = ctx.saved_tensors
            of_q, *of_rows = ctx.what.gradients(q, out, lse, grad_out, grad_lse, ctx.needs_input_grad[3:])
            of_q = None if of_q is None else of_q.reshape(q.shape).to(q.dtype)
            of_sources = (None if a is None else a.to(dtype) for a, dtype in zip(of_rows, ctx.dtypes, strict=True))
            return None, None, None, of_q, *of_sources

    return Attention
