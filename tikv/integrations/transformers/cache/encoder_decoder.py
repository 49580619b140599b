"""The cache of an encoder-decoder, of a class that transformers recognises."""

from __future__ import annotations

import functools
from typing import Any

from transformers import cache_utils

from tikv.arrays import Array
from tikv.integrations.transformers.layers.layer import TikvLayer


class OfEncoderDecoder:
    """A `TikvCache` of an encoder-decoder: what its decoder caches, and beside it what the encoder gave.

    In an `EncoderDecoderCache` of transformers' it stands for one of the two.
    """

    _alone: type[Any]  # the class that a user called
    _plain: type[Any]  # `TikvCache`, from which it inherits
    layers: list[Any]
    _limit: int | None
    _made: dict[str, Any]
    _fields: dict[str, Any]
    _why_not_compiled: str
    _uncompared: list[TikvLayer]

    def __init__(self, config: Any, *args: Any, **options: Any) -> None:
        super().__init__(config, *args, **options)  # type: ignore[call-arg]
        like = next(layer for layer in self.layers if isinstance(layer, TikvLayer))
        full = [TikvLayer(i, None, None, like.storage, like.config) for i in range(len(self.layers))]
        self.self_attention_cache = self._holding(self.layers, self._limit)
        self._cross: Any = self._holding(full, None)
        self.is_updated = dict.fromkeys(range(len(self.layers)), False)

    def _holding(self, layers: list[Any], limit: int | None) -> Any:
        """A cache of an ordinary kind with these layers."""
        cache: Any = object.__new__(self._alone)
        cache_utils.Cache.__init__(cache, layers=layers)
        cache._limit, cache._made, cache._fields = limit, self._made, self._fields
        cache._why_not_compiled, cache._prompted = self._why_not_compiled, None
        cache._find_layers()
        cache._uncompared, cache._needed, cache._places = list(self._uncompared) if limit is not None else [], 0, None
        return cache

    @property
    def cross_attention_cache(self) -> Any:
        """The cache of the encoder's tokens."""
        return self._cross

    @cross_attention_cache.setter
    def cross_attention_cache(self, cache: Any) -> None:
        # T5Gemma sets one of this class anew, without its options and with layers that attend in full, as ours do.
        if isinstance(cache, self._plain) and not any(layer.get_seq_length() for layer in cache.layers):
            self._cross.reset()
        else:
            self._cross = cache

    def crop(self, tokens_to_remove: int) -> None:
        """As `TikvCache.crop`, for the decoder's tokens."""
        self.self_attention_cache.crop(tokens_to_remove)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each sequence: 0, 0, 1, 1 for 2."""
        for cache in (self.self_attention_cache, self._cross):
            cache.batch_repeat_interleave(repeats)

    def batch_select_indices(self, indices: Array) -> None:
        """Keep these sequences, in this order."""
        for cache in (self.self_attention_cache, self._cross):
            cache.batch_select_indices(indices)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(decoder {self.self_attention_cache!r}\nencoder {self._cross!r})"

    @property
    def nbytes(self) -> int:
        """Bytes of both caches."""
        return int(self.self_attention_cache.nbytes + self._cross.nbytes)


@functools.cache
def of_encoder_decoder(kind: Any, plain: Any) -> Any:
    """The class of encoder-decoder caches that inherits from `kind`, which may inherit from `plain`, a `TikvCache`.

    It also inherits from transformers' class for such models.
    """
    bases = (OfEncoderDecoder, kind, cache_utils.EncoderDecoderCache)
    return type(kind.__name__, bases, {"_alone": kind, "_plain": plain, "__doc__": kind.__doc__})
