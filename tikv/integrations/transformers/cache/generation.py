"""Has `generate` compare the length that a text may reach with ``max_cache_len``, before the model computes anything.

transformers passes that length to caches that it makes itself, but not to a cache that the user made: it only marks
such a cache, in `GenerationMixin._prepare_cache_for_generation`, which knows both. So this method is wrapped, once. The
wrapper calls it, changes nothing, and then asks the cache.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import transformers

from tikv.errors import CapacityError

_METHOD = "_prepare_cache_for_generation"  # private, so it may change or go: then nothing is compared beforehand


def compare_lengths() -> None:
    """From now on, `generate` asks each cache that has a `token_limit` whether the text fits."""
    prepare = getattr(transformers.GenerationMixin, _METHOD, None)
    if prepare is not None and not hasattr(prepare, "tikv_wrapped"):
        setattr(transformers.GenerationMixin, _METHOD, _comparing(prepare))


def _comparing(prepare: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(prepare)

    @functools.wraps(prepare)
    def compare(*args: Any, **kwargs: Any) -> Any:
        result = prepare(*args, **kwargs)
        asked = signature.bind(*args, **kwargs).arguments
        options = asked.get("model_kwargs") or {}
        cache = options.get("cache", options.get("past_key_values"))
        limit = getattr(getattr(cache, "self_attention_cache", cache), "token_limit", None)
        if limit is not None:
            _check(limit, asked, options)
        return result

    compare.tikv_wrapped = prepare  # type: ignore[attr-defined]
    return compare


def _check(limit: int, asked: dict[str, Any], options: dict[str, Any]) -> None:
    """Raise CapacityError if the text may become longer than a cache; its last token is never cached."""
    config, tokens = asked.get("generation_config"), asked.get("max_cache_length")
    tokens = tokens if isinstance(tokens, int) else 0
    # If only the new tokens of a text were passed, the mask covers the cached ones too.
    mask: Any = options.get("attention_mask")
    more: int | None = getattr(config, "max_new_tokens", None)
    covered = mask.shape[1] if getattr(mask, "ndim", 0) == 2 else getattr(config, "_mask_length", 0)
    if more is not None and not options.get("encoder_outputs"):
        tokens = max(tokens, covered + more - 1)
    if tokens > limit:
        option = "max_length" if more is None else "max_new_tokens"
        raise CapacityError(
            f"TikvCache: with {option}={getattr(config, option, None)} the text may have {tokens} tokens to cache, and "
            f"max_cache_len={limit}. Use max_cache_len >= {tokens}, or {tokens - limit} fewer new tokens."
        )
