"""Tokens with a gradient: a cache made with ``grad=True`` passes it on to them, and any other refuses it."""

from __future__ import annotations

from typing import Any

import torch

from tikv.arrays.gradients import GradedTokens
from tikv.errors import OptionError


def has_gradient(key_states: torch.Tensor, value_states: torch.Tensor) -> bool:
    """Whether autograd would follow new keys or values: `is_followed` for code that torch.compile traces."""
    return torch.is_grad_enabled() and bool(key_states.requires_grad or value_states.requires_grad)


class RefuseBackward(torch.autograd.Function):  # type: ignore[misc]
    """Cached tensors that the cache returns for tokens with a gradient: backward through them raises."""

    @staticmethod
    def forward(ctx: Any, cached: Any, new: Any) -> Any:
        """The cached tensor itself, unchanged."""
        return cached.view_as(cached)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Raise OptionError."""
        raise OptionError(
            "TikvCache: gradients do not flow through the cache, so those of keys and values would be wrong. "
            "Make the cache with grad=True, train without a cache (use_cache=False), or call the model under "
            "torch.no_grad()."
        )


def through(graded: GradedTokens, keys: torch.Tensor, values: torch.Tensor, first: int) -> tuple[Any, Any]:
    """Copies of stored keys and values, from a position on, through which gradients flow to those of `graded`."""
    if not graded:
        return keys.clone(), values.clone()
    places = tuple(start - first for start, _, _ in graded.tokens)
    of_keys, of_values = zip(*(pair for _, *pair in graded.tokens), strict=True)
    return PassBackward.apply(keys, places, *of_keys), PassBackward.apply(values, places, *of_values)


class PassBackward(torch.autograd.Function):  # type: ignore[misc]
    """A copy of stored rows (batch, heads, n, width), whose gradient goes to the tensors that rows came from."""

    @staticmethod
    def forward(ctx: Any, stored: Any, places: Any, *sources: Any) -> Any:
        """The copy; each of `sources` begins at its place, which may be before the first row."""
        ctx.places, ctx.like = places, [(a.shape, a.dtype) for a in sources]
        return stored.detach().clone()

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        """Zeros for what lies before the first row."""
        of_sources = []
        for place, (shape, dtype) in zip(ctx.places, ctx.like, strict=True):
            rows = grad[:, :, max(0, place) : max(0, place + shape[2])].to(dtype)
            of_sources.append(torch.nn.functional.pad(rows, (0, 0, shape[2] - rows.shape[2], 0)))
        return None, None, *of_sources
