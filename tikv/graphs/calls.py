"""A graph's calls: operations that name their arrays instead of holding them, and what those names stand for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

LENGTHS = ("seq_lens", "context_lens")  # parameters that may be an array or a number


class GraphCall(NamedTuple):
    """One operation of a graph: the names of the arrays and numbers that it is called with, and of its results.

    `arrays` and `numbers` map a parameter to a name of the graph, or to a number that never changes.
    """

    operation: str
    function: Callable[..., Any]
    arrays: dict[str, str]
    numbers: dict[str, str | int]
    options: dict[str, Any]
    outputs: tuple[str, ...]
    written: tuple[str, ...]  # the parameters that it writes to

    def apply(self, arrays: Mapping[str, Any], numbers: Mapping[str, int]) -> dict[str, Any]:
        """Make the call with these arrays and numbers, and return its results by name."""
        arguments = {p: arrays[n] if n in arrays else numbers[n] for p, n in self.arrays.items()}
        arguments |= {p: numbers[n] if isinstance(n, str) else n for p, n in self.numbers.items()}
        results = self.function(**arguments, **self.options)
        if not self.outputs:
            return {}
        return dict(zip(self.outputs, results if isinstance(results, tuple) else (results,), strict=True))


class Roles:
    """What the names in some calls stand for: a caller's arrays, a caller's numbers, either of these, or outputs.

    For `copy` of "k" to "cache" at "position" they are two arrays and a number.
    """

    def __init__(self, calls: Sequence[GraphCall]) -> None:
        self.arrays: set[str] = set()
        self.numbers: set[str] = set()
        self.either: set[str] = set()
        self.outputs: set[str] = set()
        for call in calls:
            for parameter, name in call.arrays.items():
                if name not in self.outputs:
                    (self.either if parameter in LENGTHS else self.arrays).add(name)
            self.numbers |= {n for n in call.numbers.values() if isinstance(n, str)}
            self.outputs |= set(call.outputs)
        self.either -= self.arrays | self.numbers
