"""Which layers a step of a model has used: to notice one that was interrupted between two layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tikv.errors import PositionError
from tikv.integrations.transformers.names import CACHE
from tikv.stores.picture import counted, ranges

_MOST_KINDS = 4  # of layers, in a repr


class StepUse:
    """What a step of a model whose layers keep states has used so far.

    A model that keeps its states in its own modules does not show its uses.

    Args:
        with_keys, with_states: the layers with keys and values, and those with a state.
        count: how many layers the cache has.
        recorded: how many tokens' states are recorded.
    """

    def __init__(self, with_keys: Sequence[Any], with_states: Sequence[Any], count: int, recorded: int) -> None:
        self._with_keys, self._with_states = with_keys, with_states
        self._count, self._recorded = count, recorded
        self._used: dict[tuple[str, int], int] = {}

    def note(self, what: str, layer: int) -> None:
        """Take note that a step uses a layer; one that goes back to an earlier layer, or repeats a use, is a new step.

        Raises:
            PositionError: the step before was interrupted. Nothing is changed.
        """
        used = self._used
        if (what, layer) in used or layer < max(used.values(), default=0):
            self.refuse_half()
            used.clear()
        used[what, layer] = layer

    def refuse_half(self) -> None:
        """Raise PositionError if the step was interrupted between two layers."""
        used = set(self._used.values())
        layers = {*map(id, self._with_keys), *map(id, self._with_states)}
        states = [a for layer in self._with_states for a in (layer.conv_states, layer.recurrent_states)]
        if 0 < len(used) < len(layers) and any(state is not None for of_layer in states for state in of_layer.values()):
            way = "Call align(), or use" if self._recorded else "A state cannot go back: use"
            raise PositionError(
                f"{CACHE}: a step was interrupted after it had used {_in_words(sorted(used))} of {self._count}. "
                f"Their states include its tokens. {way} restore() of a snapshot that was taken before that step, or "
                f"reset()."
            )

    def forget(self, number: int, layer: int) -> None:
        """The uses of a state of a layer were taken back."""
        for use in [use for use in self._used if use[1] == layer and use[0].endswith(f" {number}")]:
            del self._used[use]

    def clear(self) -> None:
        """The next use begins a step."""
        self._used.clear()


def refuse_unequal(appended: Sequence[int]) -> None:
    """Raise PositionError if layers have got different numbers of tokens. Nothing is changed."""
    if max(appended) > min(appended):
        raise PositionError(
            f"{CACHE}: the layers hold {', '.join(map(str, appended))} tokens, as after a step that was "
            f"interrupted between them. Call align(), which brings all layers to the length of the shortest one "
            f"and returns it, and go on from there; or reset()."
        )


def align_layers(with_keys: Sequence[Any], recorded: Sequence[Any]) -> None:
    """Bring all layers to the length of the shortest one, among them those whose states are recorded.

    Raises:
        PositionError: a layer cannot go back so far. Nothing is changed.
    """
    lengths = [*(layer.appended for layer in with_keys), *(layer.shortest() for layer in recorded)]
    least = min(lengths)
    for layer in recorded:
        layer.check_align(least)
    ahead = [(a, least - a.appended) for a in with_keys if a.appended > least and a not in recorded]
    for layer, back in ahead:
        layer._cropped_to(back)
    for layer, back in ahead:
        layer.crop(back)
    for layer in recorded:
        layer.align(least)
    for layer in with_keys if ahead else ():  # a mask is for all layers of a kind, so their slots agree
        layer._put_in_order()


def in_lines(layers: Sequence[Any]) -> list[str]:
    """What layers hold: equal ones share a line, and after four kinds the others are counted."""
    alike: dict[str, list[int]] = {}
    for i, layer in enumerate(layers):
        alike.setdefault(repr(layer), []).append(i)
    lines = [f"{_in_words(indices)}: {text}" for text, indices in [*alike.items()][:_MOST_KINDS]]
    if others := [i for indices in [*alike.values()][_MOST_KINDS:] for i in indices]:
        lines[-1] = f"{_in_words(sorted([*alike.values()][_MOST_KINDS - 1] + others))}: of other kinds or lengths"
    return lines


def _in_words(layers: list[int]) -> str:
    """Indices of layers."""
    words = f"{'layers' if len(layers) > 1 else 'layer'} {ranges(layers)}"
    return words if len(words) <= 40 else f"{counted(len(layers), 'layer')} from {layers[0]} to {layers[-1]}"
