"""What new tokens see of which a layer keeps nothing, see `TikvCache.replay`."""

from __future__ import annotations

from typing import Any

import torch

from tikv.integrations.transformers.layers import layer as layers
from tikv.integrations.transformers.layers.layer import TikvLayer
from tikv.integrations.transformers.memory.gradients import RefuseBackward, has_gradient
from tikv.integrations.transformers.memory.steps import KnownOffset


def _held(layer: TikvLayer) -> int:
    """How many of the tokens that a layer holds the first new token sees."""
    if layer._staged:
        layer._refuse_half_set()
    layer._put_in_order()
    if layer.store is None:
        return 0
    held = layer.store.length
    return min(held, layer._past) if layer.is_sliding else held


def sizes_unkept(layer: TikvLayer, tokens: int) -> tuple[int, int]:
    """(number of keys that so many new tokens see together, position of the first of them)."""
    held = _held(layer)
    first = layer.get_seq_length() - held
    return held + tokens, KnownOffset(first) if layer.for_steps else first


def unkept(layer: TikvLayer, key_states: torch.Tensor, value_states: torch.Tensor) -> tuple[Any, Any, int]:
    """Keys and values that new tokens see: copies of those held, decoded, then the new ones; and how many are held.

    Raises:
        ShapeError, DTypeError, ArchError: the tokens do not fit those that are held.
    """
    if has_gradient(key_states, value_states):
        keys, values, held = unkept(layer, key_states.detach(), value_states.detach())
        return RefuseBackward.apply(keys, key_states), RefuseBackward.apply(values, value_states), held
    key_states, value_states = layers._alike(key_states, value_states)
    held = _held(layer)
    if not held:
        return key_states, value_states, 0
    if not layer.is_form_of(key_states, value_states) or key_states.shape[2] != value_states.shape[2]:
        layer._refit(key_states, value_states, None)
    end = layer.store.length  # type: ignore[union-attr]
    keys, values = layer._read(end - held, end)
    return torch.cat((keys, key_states), 2), torch.cat((values, value_states), 2), held
