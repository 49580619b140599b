"""Copies of the states of a cache's layers, which are made together."""

from __future__ import annotations

from typing import Any

import torch

STATES = ("conv_states", "recurrent_states")  # the attributes of a layer that hold them
_PLAIN = frozenset({type(None), bool, int, str, torch.dtype, torch.device})  # what needs no copy


class StateCopies:
    """Copies of states that are made together: on a GPU in one launch for each kind, whatever the number of layers.

    Attributes:
        nbytes: how much memory the new ones take.
    """

    def __init__(self) -> None:
        self.nbytes = 0
        self._to: list[Any] = []
        self._sources: list[Any] = []

    def add(self, to: Any, source: Any) -> None:
        """Let `make` copy a state to where another one lies."""
        self._to.append(to)
        self._sources.append(source)

    def new(self, state: Any) -> Any:
        """New memory, to which `make` copies a state; None of None."""
        if state is None:
            return None
        self.add(to := torch.empty_like(state), state.detach())
        self.nbytes += to.nbytes
        return to

    def copied(self, value: Any) -> Any:
        """A value with tensors and containers of its own; `copy.deepcopy` takes several times as long."""
        kind = type(value)
        if kind in _PLAIN:
            return value
        if kind is dict:
            return {key: self.copied(each) for key, each in value.items()}
        if kind in (list, set):
            return kind(self.copied(each) for each in value)
        if isinstance(value, tuple):
            return kind._make(self.copied(each) for each in value)
        return self.new(value) if isinstance(value, torch.Tensor) else value

    def make(self) -> None:
        """Make the copies."""
        for inference in {to.is_inference() for to in self._to}:
            pairs = [(a, b) for a, b in zip(self._to, self._sources, strict=True) if a.is_inference() == inference]
            with torch.inference_mode(inference), torch.no_grad():
                torch._foreach_copy_(*map(list, zip(*pairs, strict=True)))
        self._to.clear()
        self._sources.clear()
