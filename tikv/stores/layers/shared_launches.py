"""Launches that the layers of one form share, since only the addresses of their arrays differ."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import NamedTuple

from tikv import launch
from tikv.arrays import ArrayView
from tikv.ops.plan import NO_ENTRIES, Entries, Launch


class SharedArgument(NamedTuple):
    """An argument of a launch that is an array: its number, which of the call's arrays begins there, and its form."""

    argument: int
    which: int
    form: ArrayView


class SharedLaunches:
    """Launches that were bound for one layer, and serve every layer whose arrays have the same forms.

    Args:
        launches: the launches for that layer.
        arrays: their arrays: two of the caller's, and those of the layer. A launch takes each whole or with what
            follows it in memory.
    """

    def __init__(self, launches: Sequence[Launch], arrays: Sequence[ArrayView]) -> None:
        self._lock = threading.Lock()  # held from the first change of a launch until it is made
        self._launches = [(bound, _places(bound, used, arrays)) for bound, used in launches]

    def run(self, arrays: Sequence[ArrayView], entries: Entries = NO_ENTRIES) -> None:
        """Launch once over the arrays of a layer, with these entries."""
        with self._lock:
            for bound, places in self._launches:
                for argument, which, _ in places:
                    bound.set_pointer(argument, arrays[which].ptr)
                for name, value in entries.items():
                    bound.set(name, value)
                bound.launch()

    def over(self, arrays: Sequence[ArrayView]) -> list[Launch]:
        """The same launches, bound to the arrays of a layer."""
        bound_to = []
        for bound, places in self._launches:
            views = [
                arrays[i] if arrays[i].key == form.key else form.at_address(arrays[i].ptr) for _, i, form in places
            ]
            bound_to.append(Launch(launch.bind_elsewhere(bound, views), views))
        return bound_to


def _places(bound: launch.Bound, used: Sequence[ArrayView], arrays: Sequence[ArrayView]) -> list[SharedArgument]:
    """The places of a launch's arrays; the first two of `arrays` may begin at the same address."""
    which = [next(i for i, b in enumerate(arrays) if a is b or (i > 1 and a.ptr == b.ptr)) for a in used]
    numbers = [i for i, value in enumerate(bound.numbers) if value is None]
    return [SharedArgument(n, i, a.without_owner()) for n, i, a in zip(numbers, which, used, strict=True)]


def can_be_shared(arrays: Sequence[ArrayView]) -> bool:
    """Whether a launch over these arrays can be: all of them have addresses, and it is not recorded."""
    return all(a.ptr for a in arrays) and not launch.is_recording()
