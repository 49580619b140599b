"""Tokens with a gradient: a cache made with ``grad=True`` passes it on to them, and any other refuses it."""

from __future__ import annotations

import contextlib
import itertools
from typing import Any, NamedTuple

import torch

from tikv.arrays.gradients import GradedTokens
from tikv.errors import OptionError
from tikv.integrations.transformers.memory.stored import copied_tensors, decoded, stored_pair


def has_gradient(key_states: torch.Tensor, value_states: torch.Tensor) -> bool:
    """Whether autograd would follow new keys or values: `is_followed` for code that torch.compile traces."""
    return torch.is_grad_enabled() and bool(key_states.requires_grad or value_states.requires_grad)


def writable_tensors() -> contextlib.AbstractContextManager[Any]:
    """A context whose new tensors may be written to outside of inference mode, as traced code may do."""
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else contextlib.nullcontext()


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


class Followed(NamedTuple):
    """Tokens with a gradient among the keys and values that one `update` returned.

    Attributes:
        keys, values: all rows, without gradients.
        read: both as attention without gradients gets them.
        versions: how often both had been written to.
        spans: (first, end) of each part, among these rows; the first may be negative, of rows that are left out.
        sources: the keys and the values of each part, one after the other.
    """

    keys: Any
    values: Any
    read: tuple[Any, Any]
    versions: tuple[int, int]
    spans: tuple[tuple[int, int], ...]
    sources: tuple[Any, ...]


def followed(keys: torch.Tensor, values: torch.Tensor) -> Any:
    """What `through` knows of both tensors, a `Followed`; None if it did not make them, or someone has changed them."""
    of_keys, of_values = (getattr(a, "tikv_followed", None) for a in (keys, values))
    if of_keys is not of_values or of_keys is None:
        return None
    return of_keys if (keys._version, values._version) == of_keys.versions else None


def through(graded: GradedTokens, pair: tuple[Any, Any], first: int) -> tuple[Any, Any]:
    """Copies of what `update` returned, from a position on, through which gradients flow to the tokens of `graded`."""
    stored = stored_pair(*pair)
    keys, values = map(decoded, pair)
    spans = tuple((start - first, start - first + k.shape[2]) for start, k, _ in graded.tokens)
    sources: Any = tuple(zip(*(pair for _, *pair in graded.tokens), strict=True)) or ((), ())
    if graded:
        places = tuple(start for start, _ in spans)
        keys, values = (PassBackward.apply(a, places, *of) for a, of in zip((keys, values), sources, strict=True))
    else:
        keys, values = keys.clone(), values.clone()
    rows = keys.detach(), values.detach()
    read = rows if stored is None else copied_tensors(rows, stored)
    versions, parts = (keys._version, values._version), itertools.chain(*zip(*sources, strict=True))
    keys.tikv_followed = values.tikv_followed = Followed(*rows, read, versions, spans, tuple(parts))
    return keys, values


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
