"""A transformers `Cache` over this library's layers, and its decode attention under the name "tikv".

from tikv.integrations.transformers import TikvCache
model.generate(**inputs, cache=TikvCache(model.config))  # past_key_values= before transformers 5.24
"""

from __future__ import annotations

import operator
from typing import Any

from transformers import cache_utils

from tikv.errors import OptionError, ShapeError
from tikv.integrations import _transformers_shim as shim
from tikv.integrations._transformers_attention import ATTENTION
from tikv.integrations._transformers_keywords import check_configured
from tikv.integrations._transformers_layer import TikvLayer
from tikv.integrations._transformers_storage import OPERATION, storage_of
from tikv.integrations._transformers_streaming import StreamingLayer

__all__ = ["TikvCache", "TikvLayer"]


def _integer(value: Any, name: str, low: int, instead: str) -> int:
    try:
        found = low - 1 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        found = low - 1
    if found < low:
        raise OptionError(f"{OPERATION}: {name}={value!r}. Use an integer of at least {low}, or {instead}.")
    return found


def _streamed(window: Any, sinks: Any, max_cache_len: Any, kinds: list[shim.LayerKind]) -> tuple[int | None, int]:
    """The window, None for none, and the sinks of layers that attend in full.

    Raises:
        OptionError: they are no such numbers; there is a limit too, or no layer that attends in full.
    """
    sinks = _integer(sinks, "sinks", 0, "none")
    if window is None:
        if sinks:
            raise OptionError(f"{OPERATION}: sinks={sinks} are those of a window. Give window too.")
        return None, 0
    window = _integer(window, "window", 1, "None to keep all tokens")
    if sinks >= window:
        raise OptionError(f"{OPERATION}: sinks={sinks} leave nothing of window={window}. Use sinks < window.")
    if max_cache_len is not None:
        raise OptionError(f"{OPERATION}: window={window} bounds the memory already. Leave max_cache_len out.")
    if all(kind != "full" for kind, _ in kinds):
        raise OptionError(f"{OPERATION}: window={window}: no layer of this model attends in full. Leave window out.")
    return window, sinks


class TikvCache(cache_utils.Cache):  # type: ignore[misc]
    """A transformers cache whose layers are written in place: no concatenation, no roll, no copy to read them.

    Args:
        config: the model's configuration; full, sliding and chunked layers and layers that share keys are told from it.
        max_cache_len: tokens a sequence may have, for which memory is then made once; None: memory doubles as needed.
            Where all layers slide, a sequence goes on beyond it, as with transformers' own static cache: a new token
            sees its window, or the newest ``max_cache_len`` tokens where these are fewer.
        dtype: what is stored: None for the model's dtype; "float16" or "bfloat16" of a float32 model; "float8_e4m3fn"
            or "float8_e5m2", saturating; "int8", with a scale per token and head; a `tikv.Quant`, "q8_0" or "q4_0",
            whose groups divide the heads. What is stored narrower is widened for each read.
        v_dtype: what values are stored in, where that is another than keys; as ``dtype``.
        k_scale, v_scale: of 8-bit floats, a number or one a KV head of every layer, as in `tikv.KVCacheStore`.
        window: tokens that a query of a layer which attends in full sees, itself and the sinks included: text goes on
            for ever in the memory of so many tokens. None: it sees all. Prompts may be longer; attention must be
            "sdpa", "eager" or "tikv" for them.
        sinks: first tokens that stay visible in spite of the window; 4 do for most models.

    Raises:
        OptionError: no layer of the model attends, or some keep a state beside keys and values; a window beside
            max_cache_len, or in a model of which no layer attends in full.
        DTypeError: nothing is stored in that dtype. Whether it fits the model's is told with the first tokens.

    A sliding layer has room for its window and for a quarter of it or 128 tokens, and 64 more: so its tokens are moved
    to the front rarely, and can be taken back. A layer streamed by ``window`` overwrites its oldest token with each new
    one; keys keep their true positions. A prompt takes memory for itself until the next token.

    Gradients do not flow through the cache: `backward` raises. Those of queries are right whatever becomes of the
    cache: where gradients are on, each read is a copy. Decode under ``torch.no_grad()``, as ``generate`` does.

    `torch.compile` keeps `update` in its graph, ``fullgraph=True`` included, while there is memory with room: give
    ``max_cache_len``, and prompt before compiling or call `early_initialization`. Making memory breaks the graph, and
    so does a layer that is streamed by ``window``.

    Layers with a state stay transformers' own. An encoder-decoder takes two in an `EncoderDecoderCache`: one for its
    own tokens, and one for those of the encoder, written once.

    Examples:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> import torch
        >>> config = LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=2,
        ...                      num_attention_heads=2, num_key_value_heads=1, pad_token_id=0)
        >>> model = LlamaForCausalLM(config).eval()
        >>> cache = TikvCache(model.config)
        >>> text = model.generate(torch.tensor([[1, 2, 3]]), cache=cache, max_new_tokens=4, do_sample=False,
        ...                       eos_token_id=None)
        >>> cache.get_seq_length(), tuple(cache.layers[0].keys.shape)
        (6, (1, 1, 6, 8))
    """

    def __init__(
        self,
        config: Any,
        max_cache_len: int | None = None,
        dtype: Any = None,
        window: int | None = None,
        sinks: int = 0,
        v_dtype: Any = None,
        k_scale: Any = None,
        v_scale: Any = None,
    ) -> None:
        name = type(config).__name__
        if not hasattr(config, "get_text_config"):
            raise OptionError(f"{OPERATION}: {name} is no configuration of a model. Use model.config.")
        text = config.get_text_config(decoder=True)
        # Of an encoder-decoder, what tells the layers may be a copy, which no change of the attention reaches.
        named = config if type(text) is type(config) else text
        if named._attn_implementation == ATTENTION:
            check_configured(named)
        limit = None if max_cache_len is None else _integer(max_cache_len, "max_cache_len", 1, "None to let it grow")
        storage = storage_of(dtype, v_dtype, k_scale, v_scale)
        self._limit = limit
        layers: list[Any] = []
        kinds, limit = shim.bounded(shim.layer_kinds(text), limit)
        streamed, sinks = _streamed(window, sinks, max_cache_len, kinds)
        for i, (kind, window) in enumerate(kinds):
            if kind == "none":
                layers.append(shim.layer_without_keys())
            elif kind == "full" and streamed is not None:
                layers.append(StreamingLayer(i, streamed, sinks, storage, named))
            elif kind in ("full", "sliding"):
                layers.append(TikvLayer(i, window, limit, storage, named))
            elif kind in shim.STATES and any(other in ("full", "sliding") for other, _ in kinds):
                layers.append(shim.state_layer(text, i))
            else:
                raise OptionError(
                    f"{OPERATION}: layer {i} of {name} is of type {kind!r}, which holds something else than keys "
                    f"and values. Offered are full_attention, sliding_attention, chunked_attention, and layers with a "
                    f"state beside them, in new versions. Use transformers' own cache."
                )
        super().__init__(layers=layers)

    def __copy__(self) -> TikvCache:
        raise OptionError(
            f"{OPERATION}: copy.copy() would share the cache's memory. Use copy.deepcopy(), whose memory is its own."
        )

    def update(self, key_states: Any, value_states: Any, layer_idx: int, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Append new tokens to a layer; see `TikvLayer.update`."""
        try:
            layer = self.layers[layer_idx]
        except IndexError:
            raise ShapeError(
                f"{OPERATION}: the cache has {len(self.layers)} layers, the model asks for layer {layer_idx}. Make the "
                f"cache from this model's config."
            ) from None
        return layer.update(key_states, value_states)  # type: ignore[no-any-return]

    @property
    def max_cache_len(self) -> int:
        """As given; -1 for None."""
        return -1 if self._limit is None else self._limit

    def get_max_cache_shape(self, layer_idx: int | None = None) -> int:
        """Tokens that a layer, or the layer with the most room, holds at most; -1: any number."""
        lengths = [getattr(layer, "get_max_length", lambda: -1)() for layer in self.layers]
        if layer_idx is not None:
            return int(lengths[layer_idx]) if layer_idx < len(lengths) else -1
        return -1 if -1 in lengths else int(max(lengths))

    get_max_length = get_max_cache_shape

    def crop(self, tokens_to_remove: int) -> None:
        """`TikvLayer.crop` of all layers, or of none where one of them raises."""
        for layer in self.layers:
            if isinstance(layer, TikvLayer):
                layer._cropped_to(tokens_to_remove)
        super().crop(tokens_to_remove)

    def activate_past_recording(self) -> None:
        """Keep what a later `crop` may return to, until it is called."""
        for layer in self.layers:
            if isinstance(layer, TikvLayer):
                layer.activate_past_recording()

    @property
    def nbytes(self) -> int:
        """Bytes of keys, values and scales, filled or not."""
        stores = [layer.store for layer in self.layers if isinstance(layer, TikvLayer)]
        return sum(store.nbytes for store in stores if store is not None)
