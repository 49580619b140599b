"""The numbers of tokens that the layers of a store, or of a sequence in a pool, have: equal, except within a step.

A step appends to each layer, the first one first. If it ends between two layers, for example by Ctrl-C, the layers stay
at different lengths, and tokens that are appended then would be at different positions in each of them. So an append to
the first layer is refused while lengths differ. One layer may be used alone: as long as all others are empty, lengths
do not count as different. Another layer may then be filled, but its first tokens must not be those of a step to which
the first layer came with tokens from before.
"""

from __future__ import annotations

from collections.abc import Sequence

from tikv.errors import PositionError
from tikv.stores.picture import counted, ranges

MOST_SHOWN = 4  # different lengths in a message


def common(lengths: Sequence[int]) -> int:
    """How many tokens every layer has, or the only one that has any."""
    return max(lengths) if _one_alone(lengths) else min(lengths)


def differ(lengths: Sequence[int]) -> bool:
    """Whether layers have different lengths, and more than one has tokens."""
    return min(lengths) < max(lengths) and not _one_alone(lengths)


def _one_alone(lengths: Sequence[int]) -> bool:
    return lengths.count(0) == len(lengths) - 1


def in_words(lengths: Sequence[int]) -> str:
    """Which layers have how many tokens.

    Examples:
        >>> in_words([6, 6, 5, 5])
        '6 in layers 0-1, 5 in layers 2-3'
    """
    layers: dict[int, list[int]] = {}
    for i, length in enumerate(lengths):
        layers.setdefault(length, []).append(i)
    if len(layers) > MOST_SHOWN:
        return f"{min(layers)} to {max(layers)}"
    return ", ".join(f"{n} in layer{'s' * (len(group) > 1)} {ranges(group)}" for n, group in layers.items())


def refuse_different(operation: str, lengths: Sequence[int], remedy: str, of: str = "") -> None:
    """Raise PositionError if lengths `differ`. `of` says of which sequence, and `remedy` what to do."""
    if differ(lengths):
        raise different(operation, lengths, remedy, of)


def different(operation: str, lengths: Sequence[int], remedy: str, of: str = "") -> PositionError:
    """The error of `refuse_different`."""
    return PositionError(
        f"{operation}: layers hold different numbers of tokens{of} ({in_words(lengths)}), as after a step that ended "
        f"between two layers. {remedy}"
    )


def refuse_fewer(
    operation: str, lengths: Sequence[int], newest: Sequence[int], layer: int, tokens: int, remedy: str, of: str = ""
) -> None:
    """Raise PositionError if a layer's first tokens are those of a step, and another layer has tokens from before.

    A step brings equally many tokens to every layer. A layer that is filled alone, in pieces, begins with another
    number than the last piece of the layer before it.

    Args:
        operation: named in the error.
        lengths: of each layer.
        newest: how many of them its last append brought; 0 if this is not known.
        layer: the layer to which tokens are appended.
        tokens: how many they are.
        remedy: what to do.
        of: of which sequence.
    """
    other = next((i for i, length in enumerate(lengths) if length), layer)
    if lengths[layer] == 0 and 0 < tokens < lengths[other] and newest[other] in (0, tokens):
        raise PositionError(
            f"{operation}: the first {counted(tokens, 'token')} of layer {layer}{of} would be fewer than the "
            f"{lengths[other]} of layer {other}, as after a step that ended between two layers. {remedy}"
        )


def remedy_of_store(lengths: Sequence[int]) -> str:
    """The way out for a `KVCacheStore`."""
    return f"Call align() to bring every layer back to {counted(min(lengths), 'token')}, or reset()."
