"""`attempt`: what happens to layers if a call that appends and then attends is interrupted."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from tikv.runtime.interrupts import Held
from tikv.stores.layers.counts import Layer


@contextmanager
def attempt(operation: str, layers: Sequence[Layer], lost: Callable[[], bool] | None = None) -> Iterator[None]:
    """A context for `extend`: if it is interrupted, the layers' counts return to what they were before.

    That is impossible if new tokens have overwritten older ones: then a layer holds the new ones, and the error says
    how many.

    Args:
        operation: for messages.
        layers: the layers that the call appends to, the one that a caller sees first.
        lost: whether what was written overwrote tokens that the layers held before; None to tell by counts.
    """
    before = [(layer.held, layer.length, layer.valid_from, layer.newest) for layer in layers]
    try:
        yield
    except BaseException as error:
        with Held():
            appended = [layer.length - length for layer, (_, length, _, _) in zip(layers, before, strict=True)]
            full = any(n and was[0] + n > to.slots for to, was, n in zip(layers, before, appended, strict=True))
            if layers[0].is_copy or not (lost() if lost else full):
                for layer, (_, *counts), n in zip(layers, before, appended, strict=True):
                    layer.length, layer.valid_from, layer.newest = counts
                    if n and layer.head_lengths is not None:
                        layer.head_lengths.grow(-n)
            elif appended[0]:
                said = str(error) or f"{operation} was interrupted."
                error.args = (
                    f"{said} Layer {layers[0].index} holds {appended[0]} of the new tokens, which overwrote older "
                    f"ones: its length is now {layers[0].end}.",
                )
        raise
