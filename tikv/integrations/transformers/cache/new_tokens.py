"""Checks of new tokens, before a layer takes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tikv.errors import PositionError, ShapeError
from tikv.integrations.transformers.names import CACHE
from tikv.integrations.transformers.versions.masks import said_of_tokens


def check_taken_by_all(tokens: int, held: int, with_keys: Sequence[Any], with_states: Sequence[Any]) -> None:
    """Check that all layers can take new tokens before one with a state does, and that its module takes them rightly.

    Args:
        tokens: how many are new.
        held: how many tokens the cache holds; 0 for one new token.
        with_keys, with_states: the layers with keys and values, and those with a state.

    Raises:
        CapacityError: there would be more than ``max_cache_len`` tokens.
        OptionError: a module would begin several tokens without the state that it keeps itself.
    """
    for layer in with_keys:
        layer.refuse_beyond_limit(tokens)
    for layer in [layer for layer in with_states if held and not layer.is_here]:
        layer.refuse_state_outside(
            f"{CACHE}: after {held} tokens, {tokens} new tokens together",
            "Pass one token at a time, or call reset() and pass the whole text.",
        )


def check_continues(queries: torch.Tensor, tokens: int, held: int, with_sinks: Sequence[Any]) -> None:
    """Check that new tokens continue the text in the cache, as far as the mask or the positions say it.

    Layers with sinks learn from the mask where each row begins.

    Args:
        queries: what `get_mask_sizes` is given.
        tokens: how many are new.
        held: how many tokens the layer holds.
        with_sinks: the layers with sinks.

    Raises:
        ShapeError: the mask is shorter than the tokens.
        PositionError: the positions of the new tokens are those of tokens that the cache holds.
    """
    if not held and not with_sinks:
        return
    padding, positions = said_of_tokens(queries)
    if padding is not None:
        if padding.shape[1] < held + tokens:
            raise ShapeError(
                f"{CACHE}: the cache holds {held} tokens and {tokens} are new, but the attention mask "
                f"covers only {padding.shape[1]}. Use reset() before another text, or pass a mask that covers "
                "the whole text."
            )
        if with_sinks and (tokens > 1 or not held or with_sinks[0].may_begin_later()):
            starts = _first_tokens(padding[:, : held + tokens])
            for layer in with_sinks:
                layer.begin_rows(starts)
    elif held and positions is not None and tokens > 1 and (first := int(positions.min())) < held:
        raise PositionError(
            f"{CACHE}: the cache holds {held} tokens, and the new ones begin at position {first}. Use "
            "reset() before another text; if these positions are intended, pass an attention_mask that covers "
            "the whole text."
        )


def _first_tokens(padding: Any) -> tuple[int, ...]:
    """The position of each row's first token that a mask (batch, n) shows; n for a row that is all padding."""
    shown = padding.bool()
    return tuple(torch.where(shown.any(1), shown.int().argmax(1), shown.shape[1]).tolist())
