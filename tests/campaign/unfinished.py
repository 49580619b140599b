"""Steps that end between two layers, and paths through trees, as the models of this campaign know them."""

from collections.abc import Callable, Iterable, Sequence
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
    return layer == 0 and uneven and len(used) > 1


def may_be_held_up(lengths: Sequence[int], layer: int | None, tokens: int) -> bool:
    """Whether it depends on how many tokens another layer's last append brought, which no model here knows.

    A layer may be filled in pieces after another one, but not begin in a step to which the other came with tokens from
    before: `tests/stores/test_unfinished_steps.py` tries both.
    """
    used = [n for n in lengths if n]
    return layer is not None and lengths[layer] == 0 and bool(used) and 0 < tokens < used[0]


def is_left_out(writes: Iterable[tuple[Sequence[int], int | None, int]], call: Callable[[], Any]) -> bool:
    """Whether a write is not made, of (lengths, layer, tokens) for each sequence: it is refused, or it may be."""
    writes = list(writes)
    refused = any(held_up(*write) for write in writes)
    if refused:
        refuses(tikv.PositionError, call)
    return refused or any(may_be_held_up(*write) for write in writes)


def common(lengths: Sequence[int]) -> int:
    """What `length` is."""
    used = [n for n in lengths if n]
    return used[0] if len(used) == 1 else min(lengths)


def goes_on(
    lengths: Sequence[int], layer: int | None, tokens: int, call: Callable[[], Any], align: Callable[[], Any]
) -> bool:
    """Whether a write is made. If not, the layers are brought to one length."""
    if not is_left_out([(lengths, layer, tokens)], call):
        return True
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
