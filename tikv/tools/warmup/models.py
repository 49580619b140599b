"""Compiles ahead what a `TikvCache` will need: a temporary copy of its layers is given zeros."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from tikv import dtypes
from tikv.arrays import runtime_of
from tikv.errors import CapacityError, OptionError
from tikv.integrations.transformers import TikvCache, TikvLayer
from tikv.integrations.transformers.attention.attend import attend
from tikv.integrations.transformers.layers.ring import RingLayer
from tikv.integrations.transformers.memory import steps
from tikv.integrations.transformers.names import ATTENTION
from tikv.integrations.transformers.versions.configurations import decoder_of
from tikv.tools.warmup.asked import OPERATION, QUERIES, Asked, Job, lengths_held, require_empty, title_of

MOST_HELD = 4096  # tokens that are given to a layer without a limit


class Shape(NamedTuple):
    """Heads and widths of a layer's queries, keys and values."""

    query_heads: int
    kv_heads: int
    width: int
    width_v: int


def jobs_of_cache(cache: TikvCache, asked: Asked) -> Iterator[Job]:
    """Calls of `update`, and of attention if the model uses "tikv", for one layer of each kind.

    Raises:
        OptionError: the cache holds tokens; or its configuration does not give the shapes of its layers.
        CapacityError: more tokens at once than ``max_cache_len``.
    """
    with_keys = {i: layer for i, layer in enumerate(_layers_of(cache)) if isinstance(layer, TikvLayer)}
    require_empty(cache, max((int(layer.get_seq_length()) for layer in with_keys.values()), default=0))
    kinds: dict[tuple[type, int | None, int | None, Shape], int] = {}
    for i, layer in with_keys.items():
        kinds.setdefault((type(layer), layer.sliding_window, layer.limit, _shape_of(layer, asked)), i)
    for dtype in asked.formats or [_dtype_of(layer.config) for layer in list(with_keys.values())[:1]]:
        layers = _layers_of(copy.deepcopy(cache))
        for (_, window, _, shape), i in kinds.items():
            for tokens in asked.tokens:
                for held in lengths_held(tokens, _room(layers[i], tokens), [window] if window else []):
                    run = functools.partial(_call, layers[i], shape, tokens, held, getattr(torch, dtype.name))
                    yield Job(title_of(dtype, tokens, held, window), run)
            if 1 in asked.tokens and layers[i].is_compileable and (asked.steps or runtime_of().is_cuda):
                run = functools.partial(_call, layers[i], shape, 1, 1, getattr(torch, dtype.name), on_device=True)
                yield Job(f"{title_of(dtype, 1, 1, window)}, in a step", run)


def _layers_of(cache: Any) -> list[Any]:
    """The layers of a cache; for an encoder-decoder, the encoder's too."""
    crossed = getattr(cache, "cross_attention_cache", None)
    return [*cache.layers, *(crossed.layers if crossed is not None else [])]


def _room(layer: Any, tokens: int) -> int:
    """How many tokens a layer may hold before it gets `tokens` more."""
    if layer.sliding_window:
        return int(2 * layer.sliding_window)
    if layer.limit is None:
        return MOST_HELD
    if tokens > layer.limit:
        raise CapacityError(
            f"{OPERATION}: tokens={tokens} are more than max_cache_len={layer.limit}. Use at most {layer.limit}."
        )
    return int(layer.limit - tokens)


def _shape_of(layer: Any, asked: Asked) -> Shape:
    """The shapes that a layer is given, from the configuration."""
    text = decoder_of(layer.config)
    every = getattr(text, "per_layer_config", None)
    config = text if every is None else every[layer.index]
    heads = asked.query_heads or int(getattr(config, "num_attention_heads", 0))
    kv_heads = int(getattr(config, "num_key_value_heads", None) or heads)
    width = int(getattr(config, "head_dim", None) or getattr(config, "d_kv", None) or 0)
    if heads and not width:
        width = int(getattr(config, "hidden_size", 0)) // heads
    width_v = width
    if getattr(config, "kv_lora_rank", None):  # keys have two parts, values another width, both per query head
        kv_heads, width, width_v = heads, config.qk_nope_head_dim + config.qk_rope_head_dim, config.v_head_dim
    if not heads or not width or heads % kv_heads:
        raise OptionError(
            f"{OPERATION}: {type(text).__name__} does not say how many heads a layer has, and how wide they are. Let "
            f"the model read a short prompt instead."
        )
    return Shape(heads, kv_heads, width, width_v)


def _dtype_of(config: Any) -> Any:
    """The configuration's dtype, as a row of `dtypes`; float32 if queries cannot have it."""
    named = getattr(config, "dtype", None)
    dtype = None if named is None else dtypes.parse(named, OPERATION)
    return dtype if dtype is not None and dtype.name in QUERIES else dtypes.float32


def _call(layer: Any, shape: Shape, tokens: int, held: int, dtype: Any, on_device: bool = False) -> None:
    """Give a layer that holds `held` tokens new ones, as transposed views, which models give; or one in a step."""
    live = runtime_of()
    device = "cuda" if live.is_cuda else "mps" if live.arch == "metal" else "cpu"

    def rows(n: int, heads: int, width: int) -> torch.Tensor:
        return torch.zeros(1, n, heads, width, dtype=dtype, device=device).transpose(1, 2)

    with torch.no_grad():
        layer.reset()
        if held:
            layer.update(rows(held, shape.kv_heads, shape.width), rows(held, shape.kv_heads, shape.width_v))
        if on_device or (held and tokens == 1 and isinstance(layer, RingLayer) and layer.for_steps):
            layer.make_ready()
        with steps.on_device(SimpleNamespace(layers=[layer])) if on_device else contextlib.nullcontext():
            keys, values = layer.update(
                rows(tokens, shape.kv_heads, shape.width), rows(tokens, shape.kv_heads, shape.width_v)
            )
            if tokens == 1 and layer.config._attn_implementation == ATTENTION:  # torch takes prompts
                attend(torch.nn.Module(), rows(tokens, shape.query_heads, shape.width), keys, values, None)
