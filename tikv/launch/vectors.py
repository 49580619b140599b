"""Names for the entries of a launch's vector arguments: a vector is a NamedTuple, or several joined into one."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any


class Joined(tuple[int, ...]):
    """Concatenated vectors; like a NamedTuple it has `_fields`, where "" is an entry without a name."""

    _fields: tuple[str, ...]

    def _make(self, numbers: Iterable[int]) -> Joined:
        """The same names with other numbers."""
        made = Joined(numbers)
        made._fields = self._fields
        return made


def joined(*vectors: Sequence[int]) -> Joined:
    """Several vectors as one argument of a launch, for `Kernel.bind`; entries of NamedTuples keep their names.

    Examples:
        >>> from typing import NamedTuple
        >>> from tikv.launch import joined
        >>> Size = NamedTuple("Size", [("rows", int), ("columns", int)])
        >>> joined(Size(3, 4), (0, 0))
        (3, 4, 0, 0)
    """
    entries = Joined(itertools.chain.from_iterable(vectors))
    entries._fields = tuple(name for vector in vectors for name in getattr(vector, "_fields", ("",) * len(vector)))
    return entries


def places_of(fields: Iterable[tuple[int, Sequence[str]]]) -> dict[str, tuple[int, int]]:
    """Name -> (argument, place in it), of each name that occurs once among the (argument, names of its entries)."""
    positions: dict[str, tuple[int, int]] = {}
    twice = {""}
    for argument, names in fields:
        for position, name in enumerate(names):
            if name in positions:
                twice.add(name)
            positions[name] = argument, position
    return {name: position for name, position in positions.items() if name not in twice}


def fields_of(arguments: Iterable[Any], is_float: Sequence[bool]) -> list[tuple[int, Sequence[str]]]:
    """(argument, names of its entries) of each vector of integers that has names."""
    return [
        (i, value._fields)
        for i, value in enumerate(arguments)
        if isinstance(value, tuple) and not is_float[i] and hasattr(value, "_fields")
    ]


def place_in(places: dict[str, tuple[int, int]], name: str, kernel: str) -> tuple[int, int]:
    """The (argument, place) of a name.

    Raises:
        KeyError: no entry has it, or several have, which is an error in this library.
    """
    if name not in places:
        known = ", ".join(places) or "none"
        raise KeyError(f"{kernel}: {name!r} is not the name of exactly one entry of its vectors; such names: {known}")
    return places[name]
