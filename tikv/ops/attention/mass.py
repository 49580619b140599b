"""The attention mass of keys: what a caller asks for, and the array that gets it.

With the weight that a query head gives a key after the softmax, the mass of a key is, over the query heads of its KV
head and over the queries that count: "sum", the sum of these weights; "max", the greatest of them; "last", the sum for
the newest query alone. An array of the caller's accumulates: "sum" is added to it, "max" replaces what is less, and
"last" replaces all of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from tikv import dtypes, runtime
from tikv.arrays import Array, ArrayView, describe, new_like, view, view_without_owner, write_host
from tikv.errors import DTypeError, OptionError, ShapeError
from tikv.ops import checks

MASSES = ("sum", "max", "last")


class Mass(NamedTuple):
    """Which mass a caller asks for, and of which queries; false if it asks for none."""

    kind: str = ""
    queries: int | None = None  # at most so many of the last ones count; None: all
    into: Any = None  # an array of the caller's; None: a new one

    def __bool__(self) -> bool:
        return self.kind != ""

    def array(
        self, operation: str, like: Any, shape: Sequence[int], live: runtime.Runtime,
        others: Mapping[str, ArrayView] | None = None,
    ) -> Any:  # fmt: skip
        """The array that gets the mass, checked, or a new one of the kind of `like`, of zeros.

        Args:
            operation: the operation's name, for messages.
            like: an array of the caller's.
            shape: the shape that is needed.
            live: the runtime.
            others: the call's other arrays, with which a caller's array may share no element.

        Raises:
            ShapeError, DTypeError, ArchError: the caller's array does not fit.
        """
        if self.into is None:
            return new_like(like, shape, dtypes.float32, live, zeroed=True)
        a = view(self.into, "mass_into", operation)
        checks.on_device([("mass_into", a)], live, operation)
        if a.dtype is not dtypes.float32:
            raise DTypeError(f"{operation}: mass_into is {describe(a)}; it must be float32.")
        if a.shape != tuple(shape):
            raise ShapeError(f"{operation}: mass_into is {describe(a)} where {tuple(shape)} is needed.")
        checks.writable(a, "mass_into", operation)
        named = [(name, other, False) for name, other in (others or {}).items()]
        checks.disjoint([("mass_into", a, True), *named], operation)
        return self.into

    def start(self, array: Array) -> None:
        """Prepare an array from `array` for the launch that weighs keys, which accumulates."""
        if self.into is not None and self.kind == "last":
            fill(array, 0.0)


NO_MASS = Mass()


def mass_choice(value: Any, operation: str) -> bool | str:
    """The parameter ``return_mass``, a bool or any string, which `mass_kind` checks.

    Raises:
        OptionError: it is neither.
    """
    if isinstance(value, str) or value is True or value is False:
        return value
    if isinstance(value, np.bool_) or (isinstance(value, int) and value in (0, 1)):
        return bool(value)
    raise _unknown(value, operation)


def mass_kind(value: bool | str, operation: str) -> str:
    """A `mass_choice` as one of `MASSES`: True is "sum", and False is "", for none.

    Raises:
        OptionError: it is another string.
    """
    if isinstance(value, str) and value not in MASSES:
        raise _unknown(value, operation)
    return value if isinstance(value, str) else "sum" if value else ""


def _unknown(value: Any, operation: str) -> OptionError:
    choices = ", ".join(map(repr, MASSES))
    return OptionError(f"{operation}: return_mass is {value!r}. Use one of {choices}, True for 'sum', or False.")


def fill(array: Array, value: float) -> None:
    """Set all elements of a float32 array."""
    if hasattr(array, "fill_"):
        array.fill_(value)
    elif hasattr(array, "fill"):
        array.fill(value)
    else:
        write_host(np.full(array.shape, value, np.float32), view_without_owner(array, "array", "fill"))
