"""`TikvCache`: what a program calls, for all layers of a model together."""

from __future__ import annotations

import copy
import functools
import inspect
import os
import warnings
from typing import Any

import torch
from transformers import cache_utils

from tikv.errors import OptionError, ShapeError
from tikv.integrations.transformers.attention.keywords import check_configured
from tikv.integrations.transformers.cache import files as cache_files
from tikv.integrations.transformers.cache import needs
from tikv.integrations.transformers.cache.choice import layers_of, why_not_compiled
from tikv.integrations.transformers.cache.drawing import drawn
from tikv.integrations.transformers.cache.encoder_decoder import OfEncoderDecoder, of_encoder_decoder
from tikv.integrations.transformers.cache.generation import watch_generate
from tikv.integrations.transformers.cache.kinds import bounded, recording, served
from tikv.integrations.transformers.cache.new_tokens import check_continues, check_taken_by_all
from tikv.integrations.transformers.cache.options import (
    check_groups,
    in_words,
    integer,
    let_gradients_flow,
    places_of,
    window_and_sinks,
)
from tikv.integrations.transformers.cache.replay import TikvReplay
from tikv.integrations.transformers.cache.snapshots import TikvSnapshot
from tikv.integrations.transformers.cache.step_use import StepUse, align_layers, in_lines, refuse_unequal
from tikv.integrations.transformers.layers.indexed import IndexedLayer
from tikv.integrations.transformers.layers.layer import TikvLayer, update_with_gradients
from tikv.integrations.transformers.layers.ring import RingLayer
from tikv.integrations.transformers.layers.streaming import StreamingLayer
from tikv.integrations.transformers.memory.storage import storage_of
from tikv.integrations.transformers.names import ATTENTION, CACHE
from tikv.integrations.transformers.versions.configurations import attention_of, decoder_of
from tikv.integrations.transformers.versions.masks import query_length
from tikv.stores import picture
from tikv.stores.picture import counted, size_in_words

_is_traced = torch.compiler.is_dynamo_compiling  # looked up once: each layer calls it for each token


@functools.cache
def _warn_once(message: str) -> None:
    warnings.warn(message, stacklevel=3)


class TikvCache(cache_utils.Cache):  # type: ignore[misc]
    """A transformers cache whose layers are written in place: no concatenation, no roll, no copy to read them.

    [What a TikvCache does][what-a-tikvcache-does] (docs/tutorials/transformers.md) says how much room its layers have,
    what excludes each other, and what `crop`, `torch.compile` and gradients do. After Ctrl-C in a step, see `align`.

    Args:
        config: the model's configuration. It says which layers are full, sliding or chunked, and which share keys.
        max_cache_len: tokens that a sequence may have; memory for them is allocated once. With None, memory grows by an
            eighth as needed, one layer after another.
        dtype: the format: None for the model's dtype; "float16" or "bfloat16" for a float32 model; "float8_e4m3fn"
            or "float8_e5m2", saturating; "int8", with a scale per token and head; a `tikv.Quant`, "q8_0", "q4_0",
            "mxfp8", "mxfp4" or "nvfp4", whose group must divide head_dim; "kvarn_k4v2", "kvarn_k4v4". Attention "tikv"
            reads it when it decodes; for all others, narrower dtypes are widened for each read.
        window: tokens that a query of a full-attention layer sees, itself and the sinks included, so that text can
            continue endlessly in the memory of that many tokens. With None, it sees all tokens.
        sinks: first tokens that stay visible in spite of the window, or that KVarN leaves as they are; 4 are enough.
        v_dtype: the format of values, if it differs from that of keys; not groups along tokens.
        k_scale, v_scale: scales, as in `tikv.KVCacheStore`, the same for all layers: for 8-bit floats, one number or
            (num_kv_heads,); for "nvfp4", one number.
        offloading, offload_only_non_sliding: as in transformers' caches; ``offloading`` must be False.
        place: "device", or "host" to keep full-attention layers in page-locked memory of the host, for CUDA.
        resident_layers: with "host", how many layers the GPU has copies of.
        record_states: the last tokens that `crop` can always drop from layers with a state; 0 for none.
        grad: let gradients flow to the keys and values of tokens that came with one; all others are frozen.

    Raises:
        OptionError: a layer holds something other than keys, values and a state; no layer has attention; the model has
            its own kind of cache; or a window is given with max_cache_len, for a model without full attention or for
            one that adds a position bias to its scores.
        DTypeError: nothing can be stored in that dtype. Whether it fits the model's dtype is checked with the first
            tokens.

    Without ``grad=True``, gradients do not flow through the cache: `backward` raises.

    Examples:
        >>> import torch
        >>> from tikv.integrations.transformers import TikvCache
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> config = LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=2,
        ...                      num_attention_heads=2, num_key_value_heads=1, pad_token_id=0)
        >>> model = LlamaForCausalLM(config).eval()
        >>> cache = TikvCache(model.config)
        >>> text = model.generate(torch.tensor([[1, 2, 3]]), cache=cache, max_new_tokens=4, do_sample=False,
        ...                       eos_token_id=None)  # cache= is past_key_values= before transformers 5.24
        >>> cache.get_seq_length(), tuple(cache.layers[0].keys.shape)
        (6, (1, 1, 6, 8))
    """

    on_device = False  # whether a step runs that reads no numbers, see `steps.on_device`
    running_replay: TikvReplay | None = None  # the context in which the cache is

    def __new__(cls, config: Any = None, *args: Any, **options: Any) -> TikvCache:
        """Choose the class: transformers recognises an encoder-decoder's cache by its class."""
        both = getattr(config, "is_encoder_decoder", False) and not issubclass(cls, OfEncoderDecoder)
        kind: Any = cls
        return object.__new__(of_encoder_decoder(kind, TikvCache) if both else kind)  # type: ignore[no-any-return]

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
        offloading: bool = False,
        offload_only_non_sliding: bool = True,
        place: str = "device",
        resident_layers: int = 2,
        record_states: int = 0,
        grad: bool = False,
    ) -> None:
        name = type(config).__name__
        if not hasattr(config, "get_text_config"):
            raise OptionError(f"{CACHE}: {name} is not a configuration of a model. Use model.config.")
        if offloading:
            raise OptionError(
                f"{CACHE}: offloading={offloading!r} is not an option here. Use place='host' to keep keys and "
                "values in the host's memory."
            )
        text = decoder_of(config)
        # For an encoder-decoder, `text` may be a copy, in which later changes of the attention do not show.
        named = config if type(text) is type(config) else text
        if named._attn_implementation == ATTENTION:
            check_configured(named)
        if max_cache_len is not None:
            watch_generate()
        limit = None if max_cache_len is None else integer(max_cache_len, "max_cache_len", 1, "None to let it grow")
        storage = storage_of(dtype, v_dtype, k_scale, v_scale)
        self._limit = limit
        others = {
            "max_cache_len": limit,
            "window": window,
            "sinks": sinks,
            "grad": grad is True,
            "record_states": integer(record_states, "record_states", 0, "leave it out"),
        }
        self._made = in_words(storage, v_dtype, {"k_scale": k_scale, "v_scale": v_scale}, others)
        self._fields = cache_files.fields_of(text)
        kinds, limit = bounded(recording(served(config, text), text, record_states), limit)
        streamed, sinks = window_and_sinks(window, sinks, max_cache_len, kinds, text, storage.quant)
        flags = ("is_encoder_decoder", "is_decoder", "add_cross_attention")
        crossed = any(getattr(part, flag, False) for part in (config, text) for flag in flags)
        if storage.quant is not None:
            check_groups(storage.quant, kinds, window, place, crossed)
            storage = storage._replace(sinks=sinks or storage.sinks)
        places = self._places = places_of(place, resident_layers, kinds, window, crossed)
        layers = layers_of(kinds, limit, storage, named, crossed, streamed, sinks, places)
        cache_utils.Cache.__init__(self, layers=layers)
        self._uncompared = [layer for layer in layers if isinstance(layer, TikvLayer) and layer.limit is not None]
        self._needed = 0  # bytes of the layers that were compared with the memory that there is
        if self._uncompared:
            needs.require_for_one(self._uncompared, storage, text, places is not None)
        self._prompted: TikvLayer | None = None  # the layer that still has all of a prompt longer than its window
        self._why_not_compiled = "its memory grows: pass max_cache_len"
        if max_cache_len is not None or streamed is not None:
            self._why_not_compiled = "layers are in host memory" if places else why_not_compiled(layers, text, crossed)
        if grad is not False:
            self._why_not_compiled = "gradients flow through it"
            let_gradients_flow(grad, layers, crossed)
        for layer in [] if self._why_not_compiled else layers:
            layer.for_steps = True  # which says nothing to a layer that has only a state
        self._find_layers()

    def _find_layers(self) -> None:
        """Sort out which layers need what before new tokens come."""
        layers = self.layers
        self._rings = [layer for layer in layers if isinstance(layer, RingLayer) and layer.for_steps]
        self._with_sinks = [layer for layer in layers if isinstance(layer, StreamingLayer) and layer.sinks]
        self._with_keys = [layer for layer in layers if isinstance(layer, TikvLayer)]
        self._updated: TikvLayer | None = None  # the layer that has got tokens last
        self._with_states = [layer for layer in layers if hasattr(layer, "conv_states")]
        for layer in self._with_keys[:1]:
            layer.counts_uses = layer.for_steps and bool(self._with_states)
        self.step_use = StepUse(self._with_keys, self._with_states, len(layers), self._made["record_states"])
        self.state_call: Any = None  # the running call of a module with a state, if it runs in pieces

    @property
    def record_states(self) -> int:
        """The last tokens whose states are recorded; 0 for none, or for a model without states."""
        return self._made["record_states"] if self._with_states else 0

    def is_recording_past(self, layer_idx: int) -> bool:
        """Whether a layer lets its state grow until the next `crop`."""
        return not self.record_states and bool(super().is_recording_past(layer_idx))

    def __repr__(self) -> str:
        """Equal layers share a line; after four kinds of layers the others are counted."""
        return self._in_words() + "".join(f"\n  {line}" for line in in_lines(self.layers)) + ")"

    def _in_words(self) -> str:
        """The beginning of the repr, without the layers and the closing bracket."""
        return f"{type(self).__name__}({counted(len(self.layers), 'layer')}, {size_in_words(self.nbytes)}"

    def draw(self, path: str | os.PathLike[str] | None = None) -> str:
        """Draw which position is in which slot of each layer; a notebook shows a cache this way.

        Of a left-padded batch, the first text is drawn.

        Args:
            path: ends in ``.svg``, or with the extra `plot` in ``.png``; None writes no file.

        Returns:
            The SVG text.

        Raises:
            OptionError, CacheFileError: the path has the wrong ending, or the system refuses to write.
            MissingPackageError: the packages that make a PNG are not installed.

        Cost: none on the device.
        """
        return picture.save(drawn(f"{self._in_words()})", self.layers_with_keys), path, f"{CACHE}.draw")

    def _repr_html_(self) -> str:
        return self.draw()

    def __copy__(self) -> TikvCache:
        raise OptionError(
            f"{CACHE}: copy.copy() would share the cache's memory. Use copy.deepcopy(), whose memory is its own."
        )

    @property
    def is_compileable(self) -> bool:
        """Whether `generate` compiles steps by itself on a GPU.

        If it does not although memory is allocated once, a warning gives the reason, once.
        """
        if _is_traced():
            return False  # traced code asks only to make masks, which are like those of other caches
        if self.on_device:
            return True
        why = self.why_not_compiled()
        if why and (self._limit is not None or self._made["window"] is not None) and torch.cuda.is_available():
            _warn_once(f"{CACHE}: steps are not compiled, because {why}.")
        return not why

    def why_not_compiled(self) -> str:
        """Why steps cannot be compiled or captured; empty if they can."""
        config = next((layer.config for layer in self.layers if isinstance(layer, TikvLayer)), None)  # all share one
        if not self._why_not_compiled and (config is None or attention_of(config) != ATTENTION):
            return f'attention is not "{ATTENTION}": call model.set_attn_implementation("{ATTENTION}")'
        if not self._why_not_compiled and any(layer.record_past for layer in self._with_states):
            return "layers record the past"  # so states grow
        return self._why_not_compiled

    @property
    def passes_gradients(self) -> bool:
        """Whether gradients flow to keys and values."""
        return bool(self._made["grad"])

    @property
    def layers_with_keys(self) -> list[TikvLayer]:
        """The layers that hold keys and values."""
        return self._with_keys

    @property
    def layers_with_states(self) -> list[Any]:
        """The layers that keep a state, alone or beside keys and values."""
        return self._with_states

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Any, Any]:
        """Append new tokens to a layer; returns all keys and values that these tokens may see.

        Args:
            key_states, value_states: (batch, num_kv_heads, T, head_dim), any strides.
            layer_idx: the layer's index.
            *args, **kwargs: what else models pass; ignored.

        Returns:
            Keys and values, each (batch, num_kv_heads, n, head_dim), oldest first unless new tokens have overwritten
            old ones, as with ``window=``. They are views of the cache if it stores the model's dtype and gradients are
            off, else copies. `get_mask_sizes` returns n beforehand.

        Raises:
            ShapeError, DTypeError, ArchError: the tokens do not fit the model, batch, dtype or device of the cache.
            CapacityError: there would be more than ``max_cache_len`` tokens. Nothing is written.
        """
        try:
            layer = self.layers[layer_idx]
        except IndexError:
            raise ShapeError(
                f"{CACHE}: the cache has {len(self.layers)} layers, as many as its configuration says; the model "
                f"asks for layer {layer_idx}. Make the cache from the configuration of this model's decoder."
            ) from None
        if self.running_replay is not None:
            return self.running_replay.update(layer, key_states, value_states, layer_idx)
        if _is_traced() or self.on_device:
            if self._with_states and not _is_traced():
                self.step_use.note("update", layer_idx)
            return layer.update(key_states, value_states)  # type: ignore[no-any-return]
        if self._uncompared:
            self._require_memory(layer, key_states, value_states)
        if self._prompted is not None and self._prompted is not layer:
            self._prompted.let_go_of_prompt()
            self._prompted = None
        if self._with_states:
            self.step_use.note("update", layer_idx)
        if layer is self._with_keys[0] and self._updated is not self._with_keys[-1]:
            appended = [each.appended for each in self._with_keys]
            if any(appended[1:]):  # otherwise it may be used alone
                refuse_unequal(appended)
        if self._made["grad"] and torch.is_grad_enabled():
            pair = update_with_gradients(layer, key_states, value_states)
        else:
            pair = layer.update(key_states, value_states)
        self._updated = layer
        if layer.has_prompt_room:
            self._prompted = layer
        return pair

    def _use_state(self, name: str, layer_idx: int, args: Any, options: Any) -> Any:
        """A method of transformers' cache for the state of a layer."""
        number = options.get("state_idx", 0)
        if _is_traced():
            self._note_traced_use(name, layer_idx, number)
        else:
            if self._with_keys[0].counts_uses:
                self.layers[layer_idx].keep_address(number)
            if self.state_call is None or self.state_call.is_first:
                self.step_use.note(f"{name} {number}", layer_idx)
            if self.record_states:
                self.layers[layer_idx].record(number, self.state_call)
        return getattr(super(), name)(*args, layer_idx=layer_idx, **options)

    def _note_traced_use(self, name: str, layer_idx: int, number: int) -> None:
        """Count the first use of a layer's state in a compiled step, so that one that is interrupted can be told."""
        layer, counted = self.layers[layer_idx], self._with_keys[0]._counted
        conv, recurrent = layer.conv_states[number], layer.recurrent_states[number]
        first, is_first = (recurrent, "recurrent" in name) if conv is None else (conv, "conv" in name)
        if is_first and first is not None and counted is not None and counted.uses is not None:
            counted.note_use(first)

    def update_conv_state(self, conv_states: Any, layer_idx: int, **options: Any) -> Any:
        """As transformers' caches."""
        return self._use_state("update_conv_state", layer_idx, (conv_states,), options)

    def update_recurrent_state(self, recurrent_states: Any, layer_idx: int, **options: Any) -> Any:
        """As transformers' caches."""
        return self._use_state("update_recurrent_state", layer_idx, (recurrent_states,), options)

    def get_conv_state(self, layer_idx: int, **options: Any) -> Any:
        """As transformers' caches."""
        return self._use_state("get_conv_state", layer_idx, (), options)

    def get_recurrent_state(self, layer_idx: int, **options: Any) -> Any:
        """As transformers' caches."""
        return self._use_state("get_recurrent_state", layer_idx, (), options)

    def undo(self, call: Any) -> None:
        """Take back what an interrupted `StateCall` did to states, if they are recorded."""
        for (layer_idx, number), tokens in call.recorded.items():
            if self.layers[layer_idx].take_back(number, tokens):
                self.step_use.forget(number, layer_idx)

    def align(self) -> int:
        """After an interrupt between two layers, bring all layers to the length of the shortest one.

        Returns:
            That length. The model goes on with the token at this position.

        Raises:
            PositionError: a layer has overwritten what it would then need, or keeps a state, which cannot go back
                unless ``record_states`` recorded it. Nothing is changed. Use `reset`.

        Examples:
            >>> import torch
            >>> from tikv.integrations.transformers import TikvCache
            >>> from transformers import LlamaConfig
            >>> cache, states = TikvCache(LlamaConfig(num_hidden_layers=2)), torch.ones(1, 2, 3, 8)
            >>> _ = cache.update(states, states, 0), cache.update(states, states, 1)
            >>> _ = cache.update(states, states, 0)  # and then Ctrl-C
            >>> [layer.get_seq_length() for layer in cache.layers], cache.align()
            ([6, 3], 3)
        """
        recorded = self._with_states if self.record_states else []
        if not recorded:
            self.step_use.refuse_half()
        align_layers(self._with_keys, recorded)
        self._end_step()
        return int(self.get_seq_length())

    def replay(self, return_mass: bool | str = False) -> TikvReplay:
        """A context in which the model reads texts over what the cache holds, and nothing of them is kept.

        The queries of a text see the held tokens and its own; each call of the model continues what the cache holds.

        Args:
            return_mass: "sum" (True), "max" or "last" to accumulate the weight that each held token gets, as
                `KVCacheStore.attend` defines it, in the layers that see all tokens; attention must then be "tikv".

        Returns:
            A `TikvReplay`, whose `mass` has an array for each layer.

        Raises:
            OptionError: a layer has a window of this cache's own, a state, or keys of an indexer; the model has an
                encoder; gradients flow; or attention gives no mass. `generate` is refused inside.

        Exactness: the cache is not written to. New rows are read unchanged, whatever the format; rows that are held are
            decoded to the model's dtype.
        Cost: each call copies what a layer holds, decoded, for one layer at a time.

        Examples:
            >>> import torch
            >>> from tikv.integrations.transformers import TikvCache
            >>> from transformers import LlamaConfig
            >>> cache, states = TikvCache(LlamaConfig(num_hidden_layers=1)), torch.ones(1, 2, 3, 8)
            >>> _ = cache.update(states, states, 0)
            >>> with cache.replay():
            ...     tuple(cache.update(states, states, 0)[0].shape), cache.get_seq_length()
            ((1, 2, 6, 8), 3)
        """
        self.step_use.refuse_half()
        appended = [layer.appended for layer in self._with_keys]
        if any(appended[1:]):
            refuse_unequal(appended)
        return TikvReplay(self, return_mass)

    def snapshot(self) -> TikvSnapshot:
        """Remember what the cache holds, so that `restore` can go back to it, any number of times.

        Returns:
            A `TikvSnapshot`. It works for as long as it is referenced; its repr says how many bytes it copied.

        Raises:
            PositionError: the last step was interrupted between two layers. Call `align` or `reset` first.
            OptionError: the model keeps the state of a layer in its own modules.

        Exactness: after `restore` the cache has the same bits, whatever was done to it since.
        Cost: states, sliding layers, layers with ``window=`` and groups along tokens are copied now. Of other layers
            nothing is copied, unless a crop to fewer tokens, a reset or another order of sequences is about to change
            what the snapshot needs: then they are copied before it.

        Examples:
            >>> import torch
            >>> from tikv.integrations.transformers import TikvCache
            >>> from transformers import LlamaConfig
            >>> cache, states = TikvCache(LlamaConfig(num_hidden_layers=1)), torch.ones(1, 2, 3, 8)
            >>> _ = cache.update(states, states, 0)
            >>> before = cache.snapshot()
            >>> _ = cache.update(states, states, 0)
            >>> cache.restore(before)
            >>> cache.get_seq_length(), before
            (3, TikvSnapshot(3 tokens, 0 B copied))
        """
        self.step_use.refuse_half()
        appended = [layer.appended for layer in self._with_keys]
        if any(appended[1:]):
            refuse_unequal(appended)
        self._refuse_states_outside("snapshot")
        return TikvSnapshot(self)

    def restore(self, snapshot: TikvSnapshot) -> None:
        """Hold again what the cache held when a `snapshot` was taken; also after an interrupt between two layers.

        Layers that the snapshot copied are replaced by new ones in `layers`.

        Raises:
            OptionError: the snapshot was taken of another cache. Nothing is changed.
        """
        snapshot.restore(self)
        for cache in (self, getattr(self, "self_attention_cache", None), getattr(self, "_cross", None)):
            if isinstance(cache, TikvCache):
                cache._prompted = None
                cache._find_layers()
                cache._end_step()
                cache._uncompared = [layer for layer in cache._with_keys if layer.limit and layer.store is None]

    def fork(self, n: int) -> TikvCache:
        """A new cache in which each sequence stands n times: so many texts go on from one prompt, computed once.

        Args:
            n: how many texts go on from each sequence, at least 1.

        Returns:
            A cache with the sequences 0, 0, ..., 1, 1, ...; this one stays as it is, and can be forked again.

        Raises:
            OptionError: n is no such number, or the model keeps the state of a layer in its own modules.
            PositionError: the last step was interrupted between two layers. Call `align` or `reset` first.

        Exactness: every bit is copied.
        Cost: keys, values and states are copied, n times and once more; nothing is shared. A pool shares the blocks of
            a prompt: `PagedKVCacheStore.fork`, or attention "tikv" in ``model.generate_batch``.

        Examples:
            >>> import torch
            >>> from tikv.integrations.transformers import TikvCache
            >>> from transformers import LlamaConfig
            >>> prompt, states = TikvCache(LlamaConfig(num_hidden_layers=1)), torch.ones(1, 2, 3, 8)
            >>> _ = prompt.update(states, states, 0)
            >>> texts = prompt.fork(4)
            >>> tuple(texts.layers[0].keys.shape), prompt.get_seq_length()
            ((4, 2, 3, 8), 3)
        """
        count = integer(n, "n", 1, "the cache itself")
        self.step_use.refuse_half()
        cache = copy.deepcopy(self)
        cache.batch_repeat_interleave(count)
        return cache

    def reset(self) -> None:
        """Forget all tokens and states; the memory stays."""
        super().reset()
        self._end_step()

    def _end_step(self) -> None:
        """The next use of a layer begins a step, whatever was used before."""
        self.step_use.clear()
        self._updated = None

    def _require_memory(self, layer: Any, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Raise CapacityError if the device has no memory for this layer and those like it, which have no tokens."""
        alike = [a for a in self._uncompared if a.sliding_window == getattr(layer, "sliding_window", None)]
        if layer in alike:
            on_host = self._places is not None
            self._needed = needs.require_for_batch(alike, layer.storage, keys, values, self._needed, on_host)
            self._uncompared = [a for a in self._uncompared if a not in alike]

    def early_initialization(self, batch_size: int, num_heads: Any, head_dim: Any, dtype: Any, device: Any) -> None:
        """Allocate memory for all layers now; the arguments are those of transformers' caches.

        Raises:
            CapacityError: the device has no memory for them.
        """
        if isinstance(num_heads, int) and isinstance(head_dim, int):
            like = torch.empty(batch_size, num_heads, 0, head_dim, dtype=dtype, device=device)
            for layer in self._uncompared.copy():
                self._require_memory(layer, like, like)
        super().early_initialization(batch_size, num_heads, head_dim, dtype, device)

    def get_mask_sizes(self, queries: torch.Tensor, layer_idx: int) -> tuple[int, int]:
        """(number of keys that a layer's `update` will return for these new tokens, position of the first key).

        Raises:
            ShapeError: there is no new token, or the attention mask is shorter than the cached and new tokens.
            PositionError: the given positions of the new tokens are those of tokens that the cache holds.
        """
        tokens = query_length(queries)
        if tokens == 0:
            raise ShapeError(
                f"{CACHE}: the cache already holds {self.get_seq_length(layer_idx)} tokens, and the text has "
                "no new ones. Use reset() before another text."
            )
        if not (_is_traced() or self.on_device):
            if self._updated is not self._with_keys[-1]:  # a step is not over, or nothing has come yet
                appended = [layer.appended for layer in self._with_keys]
                if getattr(self.layers[layer_idx], "appended", 0) > min(appended):  # some models ask between layers
                    refuse_unequal(appended)
            check_continues(queries, tokens, self.get_seq_length(layer_idx), self._with_sinks)
            if self._with_states and (self._updated is None or self._updated is self._with_keys[-1]):
                held = self.get_seq_length() if tokens > 1 else 0
                check_taken_by_all(tokens, held, self._with_keys, self._with_states)
            if self.running_replay is not None:
                return self.running_replay.sizes(layer_idx, tokens)
            for layer in self._rings:  # a mask is for all layers of a kind: their slots agree, if no step follows too
                (layer.make_ready if tokens == 1 else layer._put_in_order)()
        return super().get_mask_sizes(queries, layer_idx)  # type: ignore[no-any-return]

    @property
    def max_cache_len(self) -> int:
        """The given number; -1 for None."""
        return -1 if self._limit is None else self._limit

    @property
    def token_limit(self) -> int | None:
        """The most tokens that the layers take: None if memory grows or all layers slide, as these go on."""
        limits = [layer.limit for layer in self.layers if getattr(layer, "limit", None) is not None]
        return min(limits, default=None)

    def get_max_cache_shape(self, layer_idx: int | None = None) -> int:
        """The bound on a layer's tokens or, without an index, the greatest bound of all layers; -1 means no bound.

        It is ``max_cache_len``, or the window of a sliding layer if that is smaller; ``window=`` does not count.
        """
        lengths = [getattr(layer, "get_max_length", lambda: -1)() for layer in self.layers]
        if layer_idx is not None:
            return int(lengths[layer_idx]) if layer_idx < len(lengths) else -1
        return -1 if -1 in lengths else int(max(lengths))

    get_max_length = get_max_cache_shape

    def crop(self, tokens_to_remove: int) -> None:
        """Drop the newest tokens of all layers, or of none if one of them raises.

        Tokens that a window has overwritten do not come back. If the next query's window would include such tokens,
        the call is refused, unless `activate_past_recording` kept them.

        Args:
            tokens_to_remove: a negative number drops that many, at most all. A positive number, before transformers
                5.16, keeps that many. 0 drops nothing; before transformers 5.14, it drops all tokens.

        Raises:
            OptionError: the number is positive, since transformers 5.16; or the model keeps the state of a layer
                outside of the cache. Nothing is changed.
            PositionError: tokens in the next query's window are no longer held. Nothing is changed.
        """
        if tokens_to_remove:
            self._refuse_states_outside("crop")
            self.step_use.refuse_half()
        for layer in self.layers:
            if hasattr(layer, "_cropped_to"):
                layer._cropped_to(tokens_to_remove)
        super().crop(tokens_to_remove)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Let each sequence b continue from the tokens of sequence ``beam_idx[b]``.

        Raises:
            OptionError: the model keeps the state of a layer outside of the cache.
            ShapeError, PositionError: as the layers raise them.
        """
        self._refuse_states_outside("reorder_cache")
        super().reorder_cache(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each sequence: 0, 0, 1, 1 for 2.

        Raises:
            OptionError: the model keeps the state of a layer outside of the cache.
        """
        self._refuse_states_outside("batch_repeat_interleave")
        super().batch_repeat_interleave(repeats)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep these sequences, in this order.

        Raises:
            OptionError: the model keeps the state of a layer outside of the cache.
            ShapeError, PositionError: as the layers raise them.
        """
        self._refuse_states_outside("batch_select_indices")
        super().batch_select_indices(indices)

    def __deepcopy__(self, memo: dict[int, Any]) -> TikvCache:
        self._refuse_states_outside("copy.deepcopy")
        cache = memo[id(self)] = object.__new__(type(self))
        cache.__dict__.update(copy.deepcopy(vars(self), memo))
        return cache

    def _refuse_states_outside(self, operation: str) -> None:
        """Raise before anything changes if a state that belongs to the tokens held cannot follow."""
        layers = [layer for layer in self.layers if hasattr(layer, "refuse_state_outside")]
        if layers and self.get_seq_length():
            self.step_use.refuse_half_compiled()
            for layer in layers:
                layer.refuse_state_outside(f"{CACHE}.{operation}")

    def activate_past_recording(self) -> None:
        """From now on, keep what `crop` needs to go back to the present length.

        After a `crop`, recording goes on from the new, shorter length. Full-attention layers with ``window=`` overwrite
        tokens and keep nothing extra. Steps are not compiled while sliding layers record.
        """
        for layer in self.layers:
            if hasattr(layer, "activate_past_recording"):
                layer.activate_past_recording()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Save the conversation: keys, values and scales as they are stored, states, and each layer's token counts.

        Args:
            path: ends in ``.safetensors``. A file of that name is replaced in one step; after an error it is unchanged.

        Raises:
            CacheFileError: the path has the wrong ending, or the system refuses to write.
            OptionError: a layer keeps keys of an indexer, which are not saved, or the model keeps the state of a layer
                in its own modules.

        Exactness: every bit is kept. The text itself is not saved: keep its tokens.

        Examples:
            >>> import tempfile, torch
            >>> from tikv.integrations.transformers import TikvCache
            >>> from transformers import LlamaConfig
            >>> cache = TikvCache(LlamaConfig(num_hidden_layers=1))
            >>> states = torch.ones(1, 2, 3, 8)
            >>> _ = cache.update(states, states, 0)
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     cache.save(f"{folder}/text.safetensors")
            ...     TikvCache.load(f"{folder}/text.safetensors", LlamaConfig(num_hidden_layers=1)).get_seq_length()
            3
        """
        self.step_use.refuse_half()
        self._refuse_states_outside("save")
        updated = getattr(self, "is_updated", None)
        flags = None if updated is None else [bool(updated.get(i)) for i in range(len(self.layers))]
        made = {"made": self._made, "fields": self._fields, "updated": flags}
        cache_files.write(path, made, cache_files.parts_of(self), f"{CACHE}.save")

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        config: Any,
        device: Any = None,
        place: str = "device",
        resident_layers: int = 2,
    ) -> TikvCache:
        """Make a cache from a file; the model continues as if the cache had never been saved.

        Args:
            path: of a file that `save` wrote.
            config: the configuration of the model whose cache was saved.
            device: where the model is; None for a device of the kind that the saved cache was on.
            place, resident_layers: as in the class, whatever they were when the cache was saved.

        Raises:
            CacheFileError: the file is missing or damaged, does not hold a `TikvCache`, or belongs to a model with a
                different configuration.
            ArchError: tikv already runs on a different device.
        """
        operation = f"{CACHE}.load"
        if not hasattr(config, "get_text_config"):
            raise OptionError(
                f"{operation}: {type(config).__name__} is not a configuration of a model. Use model.config."
            )
        fields = cache_files.fields_of(decoder_of(config))
        make = functools.partial(cls, place=place, resident_layers=resident_layers)
        return cache_files.Loaded(make, config, fields, path, operation).read(device)  # type: ignore[no-any-return]

    @property
    def place(self) -> str:
        """Where keys and values lie: "host" if layers lie apart from where the model computes, else "device"."""
        return "host" if any(getattr(layer, "is_hosted", False) for layer in self.layers) else "device"

    @property
    def nbytes(self) -> int:
        """Bytes of keys, values, scales and an indexer's keys, filled or not.

        With ``place="host"``, the GPU's copies of layers are not counted.
        """
        stores = [layer.store for layer in self.layers if isinstance(layer, TikvLayer)]
        indexed = sum(layer._indexer.nbytes for layer in self.layers if isinstance(layer, IndexedLayer))
        return indexed + sum(store.nbytes for store in stores if store is not None)


# Without this, `help` and editors would show the arguments of `__new__`, which takes anything.
_shown = inspect.signature(TikvCache.__init__)
TikvCache.__signature__ = _shown.replace(
    parameters=[*_shown.parameters.values()][1:], return_annotation=inspect.Signature.empty
)
