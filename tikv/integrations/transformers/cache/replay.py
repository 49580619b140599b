"""`TikvReplay`: a model reads a text over what a `TikvCache` holds, and nothing of the text is kept."""

from __future__ import annotations

from typing import Any

from torch.compiler import is_dynamo_compiling as _is_traced

from tikv import runtime
from tikv.arrays import Array
from tikv.errors import OptionError
from tikv.integrations.transformers.attention.weighing import HeldMass
from tikv.integrations.transformers.cache.encoder_decoder import OfEncoderDecoder
from tikv.integrations.transformers.cache.generation import watch_generate
from tikv.integrations.transformers.layers.layer import TikvLayer
from tikv.integrations.transformers.layers.unkept import sizes_unkept, unkept
from tikv.integrations.transformers.names import ATTENTION, CACHE
from tikv.integrations.transformers.versions.configurations import attention_of
from tikv.ops.attention.mass import mass_choice, mass_kind

OPERATION = f"{CACHE}.replay"


def replayable(layer: Any) -> bool:
    """Whether a layer can do without keeping a text; those that read keys of other layers have nothing to keep."""
    return layer.is_replayable if isinstance(layer, TikvLayer) else True


class TikvReplay(runtime.NotCopied):
    """The context of `TikvCache.replay`.

    Attributes:
        mass: for each layer of the cache, the mass of the tokens that it holds, (batch, num_kv_heads, held) float32;
            None for layers that do not see all tokens, before the first text, and without ``return_mass``.
    """

    instead = "Leave the context of TikvCache.replay() first."

    def __init__(self, cache: Any, return_mass: bool | str) -> None:
        self._cache, self._layers = cache, cache.layers
        self._kind = mass_kind(mass_choice(return_mass, OPERATION), OPERATION)
        self._weighings = [HeldMass(self._kind) for _ in cache.layers]
        watch_generate()

    @property
    def mass(self) -> list[Any]:
        """The mass of each layer's tokens, or None."""
        return [weighing.mass for weighing in self._weighings]

    def __enter__(self) -> TikvReplay:
        cache = self._cache
        if cache.running_replay is not None:
            raise OptionError(f"{OPERATION}: the cache is already in a replay. Leave that context first.")
        self._check(cache)
        cache.running_replay = self
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self._cache.running_replay = None
        layers = [i for i, weighing in enumerate(self._weighings) if weighing.is_due]
        if layers and error is None:
            raise OptionError(
                f"{OPERATION}: return_mass={self._kind!r} was asked for, and attention of layers {layers} did not read "
                "the keys that the cache returned, but others that the model made of them. Leave return_mass out."
            )

    def _check(self, cache: Any) -> None:
        """Raise OptionError if the cache cannot do without keeping a text."""
        others = [layer for layer in cache.layers if hasattr(layer, "conv_states") or not replayable(layer)]
        if others or isinstance(cache, OfEncoderDecoder):
            name = type(others[0]).__name__ if others else type(cache).__name__
            raise OptionError(
                f"{OPERATION}: a {name} keeps something of each text that it reads. Use snapshot() before the text and "
                "restore() after it."
            )
        if cache.passes_gradients:
            raise OptionError(f"{OPERATION}: gradients would not flow. Make the cache without grad=True.")
        attention = attention_of(cache.layers_with_keys[0].config)
        if self._kind and attention != ATTENTION:
            raise OptionError(
                f"{OPERATION}: return_mass={self._kind!r} needs attention {ATTENTION!r}, and the model's is "
                f"{attention!r}. Call model.set_attn_implementation({ATTENTION!r}), or leave return_mass out."
            )

    def sizes(self, layer_idx: int, tokens: int) -> tuple[int, int]:
        """What `TikvCache.get_mask_sizes` returns."""
        return sizes_unkept(self._layers[layer_idx], tokens)

    def update(self, layer: Any, key_states: Array, value_states: Array, layer_idx: int) -> tuple[Any, Any]:
        """What `TikvCache.update` returns."""
        if _is_traced() or self._cache.on_device:
            raise OptionError(f"{OPERATION}: a compiled step keeps its tokens. Call the model without torch.compile.")
        keys, values, held = unkept(layer, key_states, value_states)
        if self._kind and held and not layer.is_sliding:
            weighing = self._weighings[layer_idx]
            if weighing.mass is not None and weighing.mass.shape[2] != held:
                raise OptionError(
                    f"{OPERATION}: layer {layer_idx} holds {held} tokens, and the mass is that of "
                    f"{weighing.mass.shape[2]}. Use another replay() after the cache has changed."
                )
            weighing.held, weighing.is_due = held, True
            keys.tikv_weighing = weighing
        return keys, values
