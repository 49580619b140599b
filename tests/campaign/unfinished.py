"""Steps that end between two layers, and paths through trees, as the models of this campaign know them."""

from collections.abc import Callable, Sequence
from typing import Any

import tikv


def refuses(error: type[Exception], call: Callable[[], Any]) -> None:
    """Fail unless the call raises this error of ours."""
    try:
        call()
    except error:
        return
    raise AssertionError(f"not refused with {error.__name__}")


def held_up(lengths: Sequence[int], layer: int | None, tokens: int) -> bool:
    """Whether so many new tokens for a layer, or None for all, are refused, since a step seems to have ended before."""
    uneven, used = len({*lengths}) > 1, [n for n in lengths if n]
    if layer is None:
        return uneven
    fewer = lengths[layer] == 0 and bool(used) and 0 < tokens < used[0]
    return fewer or (layer == 0 and uneven and len(used) > 1)


def common(lengths: Sequence[int]) -> int:
    """What `length` is."""
    used = [n for n in lengths if n]
    return used[0] if len(used) == 1 else min(lengths)


def goes_on(
    lengths: Sequence[int], layer: int | None, tokens: int, call: Callable[[], Any], align: Callable[[], Any]
) -> bool:
    """Whether a write may be made. If not, it is refused, and the layers are brought to one length."""
    if not held_up(lengths, layer, tokens):
        return True
    refuses(tikv.PositionError, call)
    align()
    return False


def tree_of(chance: Any, tokens: int) -> list[int]:
    """Parents of a random tree."""
    return [chance.randint(-1, i - 1) for i in range(tokens)]


def is_path(tree: Sequence[int], path: Sequence[int]) -> bool:
    """Whether these nodes are a path from the root."""
    return [tree[i] for i in path] == [-1, *path[:-1]][: len(path)]


def path_of(chance: Any, tree: Sequence[int]) -> list[int]:
    """A random path from the root."""
    path: list[int] = []
    while True:
        children = [i for i, parent in enumerate(tree) if parent == (path[-1] if path else -1)]
        if not children or (path and chance.random() < 0.2):
            return path
        path.append(chance.choice(children))
