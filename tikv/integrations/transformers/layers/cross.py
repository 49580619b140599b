"""Layers with a window that may turn out to hold an encoder's tokens, all of which every query sees."""

from __future__ import annotations

from typing import Any

from tikv.arrays import Array
from tikv.integrations.transformers.layers.layer import TikvLayer
from tikv.integrations.transformers.layers.streaming import StreamingLayer


class _EncoderToo(TikvLayer):
    """A layer that finds out its role from how a model uses it.

    An encoder's tokens are written once, and cross-attention reads all of them from `keys` and `values`, whatever the
    window. A decoder's own tokens are appended repeatedly, and read from what `update` returns.
    """

    _written_once = False

    def update(self, key_states: Array, value_states: Array, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """As `TikvLayer.update`."""
        first = self.get_seq_length() == 0
        pair = super().update(key_states, value_states, *args, **kwargs)
        self._written_once = first
        return pair

    def _attach(self) -> None:
        super()._attach()
        self.has_prompt_room = False  # the layer's role is unknown until tokens are appended a second time

    def _visible(self) -> tuple[Any, Any]:
        if self._written_once and self.store is not None:
            return self._read(0, self.store.length)
        return super()._visible()

    def _blank(self) -> TikvLayer:
        blank: Any = super()._blank()
        blank._written_once = self._written_once
        return blank  # type: ignore[no-any-return]


class SlidingOrCross(_EncoderToo):
    """A sliding layer of a decoder, or its cross-attention."""


class StreamingOrCross(_EncoderToo, StreamingLayer):
    """A streaming layer of a decoder, or its cross-attention."""
