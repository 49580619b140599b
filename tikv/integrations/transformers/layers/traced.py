"""`TikvLayer.update` while `torch.compile` traces its caller, or left to the code between two graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tikv.integrations import torch_ops
from tikv.integrations.transformers.memory.stored import decoded
from tikv.integrations.transformers.names import CACHE


def append(layer: Any, key_states: torch.Tensor, value_states: torch.Tensor) -> tuple[Any, Any]:
    """`TikvLayer.update` by a custom operator and views, if there is room; else outside of the graph."""
    store, memory, tokens = layer.store, layer._memory, key_states.shape[2]
    held_back = layer._staged or layer._lent is not None
    if store is None or held_back or not store.plain or layer.is_compileable:
        return update_outside(layer, key_states, value_states)
    if not memory.takes(key_states, value_states):
        return update_outside(layer, key_states, value_states)
    if tokens == 1 and store.length and _lengths_are_constants():
        return _step_outside(layer, key_states, value_states)
    drop = layer._left_behind() if store.length + tokens > store.capacity else 0
    keep = store.length - drop
    end = keep + tokens
    if end > store.capacity or (layer.limit is not None and store.end + tokens > layer.limit):
        return update_outside(layer, key_states, value_states)
    if drop:
        for a in memory.arrays():
            a[:, :, :keep] = a[:, :, drop : store.length].clone()
        store.recount(length=keep, origin=store.origin + drop)
        layer._bound = layer.room.bound(store.capacity, store.origin)
    # Each slot is a page of a pool with one head: of larger pages, each room would need a kernel of its own.
    rows = torch.arange(layer.batch_size * layer.num_heads, device=layer.device)
    slots = rows[:, None] * store.capacity + torch.arange(keep, end, device=layer.device)
    k, v = (a.flatten(0, 2)[:, None] for a in (key_states, value_states))
    k_pool, v_pool = (a.view(-1, 1, 1, a.shape[3]) for a in (memory.k, memory.v))
    k_scale, v_scale = (None if a is None else a.view(-1, 1, 1) for a in memory.scales)
    torch_ops.write_slots(k, v, k_pool, v_pool, slots.flatten(), k_scale=k_scale, v_scale=v_scale)
    store.recount(length=end, origin=store.origin)
    if layer._counted is not None:
        layer._counted.current = False  # the count on the device does not know of these tokens
    first = max(0, end - tokens - layer._past) if layer.is_sliding else 0
    copied = memory.as_stored and torch.is_grad_enabled()  # as in `_returned`
    k, v = (a[:, :, first:end].to(layer.dtype, copy=copied) for a in (memory.k, memory.v))
    if k_scale is not None:
        k_scale, v_scale = (a[:, :, first:end, None] for a in memory.scales)
        return (k * k_scale).to(layer.dtype), (v * v_scale).to(layer.dtype)
    return k, v


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _lengths_are_constants() -> bool:
    """Whether torch compiles with ``dynamic=False``."""
    from torch._dynamo import config

    return bool(config.assume_static_by_default and not config.automatic_dynamic_shapes)


def _outside_the_graph(reason: str) -> Callable[[Any, Any, Any], tuple[Any, Any]]:
    """`TikvLayer.update` outside of compiled code; with ``fullgraph=True`` torch gives this reason in its error."""

    def update(layer: Any, key_states: torch.Tensor, value_states: torch.Tensor) -> tuple[Any, Any]:
        keys, values = layer.update_in_order(key_states, value_states)
        layer._recall()  # torch cannot compile `StoredTensor`s
        keys, values = decoded(keys), decoded(values)
        if layer.for_steps:
            if layer.ring and layer.store.capacity == layer.sinks + layer.ring:  # they become a ring in place
                keys, values = keys.clone(), values.clone()
            layer._make_ready()  # the next step stays in the graph
        return keys, values

    disabled: Any = torch.compiler.disable(update)
    disabled._torchdynamo_disable_msg = reason
    return disabled  # type: ignore[no-any-return]


update_outside = _outside_the_graph(
    f"{CACHE} makes and moves its memory, refuses tokens and writes codes in groups only outside of compiled "
    f"graphs. With fullgraph=True, give max_cache_len, and run the prompt or early_initialization() outside of the "
    f"compiled model"
)
_step_outside = _outside_the_graph(
    f"{CACHE}: torch would compile the model again for each number of cached tokens, since dynamic=False makes it "
    f"a constant. Leave dynamic out, or use dynamic=True"
)
