"""What a cache does with tokens that have a gradient, which it cannot propagate."""

from __future__ import annotations

from typing import Any

import torch

from tikv.errors import OptionError


def has_gradient(key_states: Any, value_states: Any) -> bool:
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
            "Train without a cache (use_cache=False), or call the model under torch.no_grad()."
        )
