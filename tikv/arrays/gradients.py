"""Torch's gradients end here: `backward` through a result raises if autograd would follow one of its inputs."""

from __future__ import annotations

import functools
import sys
from typing import Any

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
                "would be wrong. Call the operations in torch.no_grad(), or train with torch's own attention."
            )

    return NoBackward
