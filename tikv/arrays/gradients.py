"""Torch's gradients: where they end, `backward` raises; where they go on, `GradedTokens` says to which tokens."""

from __future__ import annotations

import functools
import sys
from typing import Any

from tikv.arrays.annotations import Array
from tikv.errors import OptionError


def is_followed(*arrays: Any) -> bool:
    """Whether torch's autograd follows one of these: it requires a gradient, and gradients are on."""
    for a in arrays:
        if getattr(a, "requires_grad", False):
            return bool(sys.modules["torch"].is_grad_enabled())
    return False


def refuse_backward(result: Any, *inputs: Any, followed: bool = False) -> Any:
    """Return a result, or a tuple of results, unchanged; `backward` through it raises OptionError if it must.

    It must if autograd follows an input, or if `followed` says that it followed an array that was read.
    """
    if not (is_followed(*inputs) or (followed and sys.modules["torch"].is_grad_enabled())):
        return result
    torch: Any = sys.modules["torch"]
    sources = [a for a in inputs if getattr(a, "requires_grad", False)] or [torch.zeros((), requires_grad=True)]
    for a in result if isinstance(result, tuple) else (result,):
        if isinstance(a, torch.Tensor) and a.is_floating_point() and not (a.requires_grad or a.is_inference()):
            _no_backward().apply(a, *sources)
    return result


@functools.cache
def _no_backward() -> Any:
    torch: Any = sys.modules["torch"]

    class NoBackward(torch.autograd.Function):  # type: ignore[misc]
        """The autograd node of a tensor whose values torch did not compute."""

        @staticmethod
        def forward(ctx: Any, result: Any, *sources: Any) -> Any:
            """Return the tensor itself, which later operations may write to."""
            ctx.mark_dirty(result)
            return result

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            """Refuse."""
            raise OptionError(
                "tikv: gradients do not flow through its operations, so the gradients of queries, keys and values "
                "would be wrong. Call the operations in torch.no_grad(), use extend(..., grad=True) of a KVCacheStore, "
                "or train with torch's own attention."
            )

    return NoBackward


class GradedTokens:
    """The keys and values that a layer got with a gradient, and where they lie.

    The layer's memory holds their numbers. These are the tensors themselves, to which `backward` goes on: a prefix that
    is trained, or the tokens of this step. All other tokens are frozen.

    Attributes:
        tokens: the position of the first token, and (batch, heads, n, width) keys and values.
    """

    def __init__(self) -> None:
        self.tokens: list[tuple[int, Any, Any]] = []

    def __bool__(self) -> bool:
        return bool(self.tokens)

    def copied(self) -> GradedTokens:
        """The same for a copy of the layer, whose gradients go to the same tensors."""
        other = GradedTokens()
        other.tokens = list(self.tokens)
        return other

    def add(self, first: int, key_states: Array, value_states: Array) -> None:
        """Note tokens that were appended, the first at this position."""
        if is_followed(key_states, value_states):
            self.tokens.append((first, key_states, value_states))

    def cut(self, length: int) -> None:
        """Forget tokens from this position on."""
        self.tokens = [
            (first, k[:, :, : length - first], v[:, :, : length - first])
            for first, k, v in self.tokens
            if first < length
        ]

    def select(self, rows: Array) -> None:
        """Follow sequences that were selected."""
        self.tokens = [(first, *(a[rows.to(a.device)] for a in pair)) for first, *pair in self.tokens]
