"""What the layers of a model cache, if a `TikvCache` can serve all of them."""

from __future__ import annotations

from typing import Any

from tikv.errors import OptionError
from tikv.integrations.transformers.names import CACHE
from tikv.integrations.transformers.versions.configurations import LayerKind, layer_kinds, without_a_cache

_OTHER_LAYERS = {
    "heavily_compressed_attention": "keeps keys of several tokens together",
    "compressed_sparse_attention": "keeps keys of several tokens together",
    "reference_sliding_attention": "keeps a prompt in addition to a window",
}


def served(config: Any, text: Any) -> list[LayerKind]:
    """What each layer of a model caches, if all of them can be served.

    Raises:
        OptionError: a layer cannot be served, or no layer has attention.
    """
    name = type(config).__name__
    kind: Any = type(text)
    if why := without_a_cache(kind):
        raise OptionError(f"{CACHE}: {why}, and its configuration is {kind.__name__}. Use the model without cache=.")
    try:
        kinds = layer_kinds(text)
    except AttributeError as error:
        raise OptionError(
            f"{CACHE}: {name} does not say what its layers are: {error}. Use the configuration of the model's "
            f"decoder, or no cache."
        ) from None
    for i, layer in enumerate(kinds):
        if layer.kind not in ("full", "sliding", "state", "none"):
            what = _OTHER_LAYERS.get(layer.kind, "holds something other than keys and values")
            raise OptionError(
                f"{CACHE}: layer {i} of {name} is of type {layer.kind!r}, which {what}. TikvCache "
                "supports full_attention, sliding_attention, chunked_attention and, with new versions of transformers, "
                "layers with a state. Use transformers' own cache."
            )
    names = {layer.kind for layer in kinds}
    if "state" in names and not names & {"full", "sliding"}:
        raise OptionError(
            f"{CACHE}: no layer of {name} has attention (all of them keep a state), so there are no keys and "
            "values to cache. Use transformers' own cache."
        )
    return kinds


def recording(kinds: list[LayerKind], text: Any, record_states: int) -> list[LayerKind]:
    """What each layer caches, with the option of those that keep a state.

    Raises:
        OptionError: states cannot be recorded.
    """
    if not any(kind.state is not None for kind in kinds):
        return kinds
    from tikv.integrations.transformers.layers import state_calls

    option = {"is_here": state_calls.watch(text, record_states), "record_states": record_states}
    return [kind if kind.state is None else kind._replace(state={**option, **kind.state}) for kind in kinds]


def bounded(kinds: list[LayerKind], limit: int | None) -> tuple[list[LayerKind], int | None]:
    """The layers of a cache for `limit` tokens, and the limit that remains: None if all of them slide.

    Sliding layers continue beyond it, as in transformers' own static caches: it only bounds their windows. If there is
    a full layer, which must stop, all of them stop, before a step rather than in the middle of it.
    """
    if limit is None or any(layer.kind not in ("sliding", "state", "none") for layer in kinds):
        return kinds, limit
    return [layer._replace(window=layer.window and min(layer.window, limit)) for layer in kinds], None
