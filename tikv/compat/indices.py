"""Arguments of the compat functions: index arrays, arithmetic on them, and options that are refused by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from tikv.arrays import Array, as_numpy, describe, read_host, view
from tikv.errors import DTypeError, OptionError, PositionError, ShapeError
from tikv.ops.indices import index_array
from tikv.runtime import current


class PeerPositionError(PositionError, RuntimeError):
    """A `PositionError` about values of an index argument that is also a RuntimeError, as C++ checks of torch raise."""


def library_of(*arrays: Any) -> Any:
    """The module, torch or NumPy, whose functions work on these arrays: torch if any of them is a tensor."""
    for array in arrays:
        if type(array).__module__.split(".")[0] == "torch":
            import torch

            return torch
    return np


def on_host(array: Array) -> bool:
    """Whether the values of an index argument, if there is one, are known without waiting for a device."""
    return library_of(array) is np or getattr(getattr(array, "device", None), "type", "cpu") == "cpu"


def refuse_option(operation: str, **options: Any) -> None:
    """Refuse an option whose value is not supported; each option is given as (value, the supported value).

    Raises:
        OptionError: it names the option.
    """
    for name, (value, offered) in options.items():
        raise OptionError(f"{operation}: {name}={value!r} is not supported. Use {offered}.")


def flag(value: Any, name: str, operation: str) -> bool:
    """An option that is true or false.

    Raises:
        OptionError: it is neither.
    """
    if not isinstance(value, bool | np.bool_) and not (type(value) is int and value in (0, 1)):
        refuse_option(operation, **{name: (value, "True or False")})
    return bool(value)


def is_number(value: Any) -> bool:
    """Whether the value is an integer of Python or NumPy."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


class Indices:
    """The index arguments of a call, and arithmetic on them.

    If all of them lie on the host, NumPy does the arithmetic and values are checked. Otherwise torch does it on their
    device, without waiting for it.

    Args:
        operation: the operation's name, for messages.
        given: the arguments by name; None for those that were not given.
    """

    def __init__(self, operation: str, arguments: Mapping[str, Any]) -> None:
        self.operation = operation
        self._arguments = arguments
        elsewhere = [a for a in arguments.values() if not on_host(a)]
        self.known = not elsewhere
        self.device = elsewhere[0].device if elsewhere else None
        self.library = library_of(*elsewhere)

    def has(self, name: str) -> bool:
        """Whether the argument was given."""
        return self._arguments[name] is not None

    def array(self, name: str, shape: tuple[int | None, ...], axes: str) -> Any:
        """An argument as int64, with these extents; None allows any.

        Raises:
            DTypeError, ShapeError: it is not valid.
        """
        array = _integers(self._arguments[name], name, self.operation)
        if len(array.shape) != len(shape) or any(n not in (None, m) for n, m in zip(shape, array.shape, strict=True)):
            extents = tuple("any" if n is None else n for n in shape)
            raise ShapeError(
                f"{self.operation}: {name} is {tuple(array.shape)} where {axes} = ({', '.join(map(str, extents))}"
                f"{',' if len(extents) == 1 else ''}) is needed."
            )
        return self.as_int64(array)

    def as_int64(self, array: Array) -> Array:
        """Integers of NumPy or torch as int64, placed where the arithmetic runs."""
        if self.library is np:
            return np.asarray(array, np.int64)
        return self.library.as_tensor(array, device=self.device).to(self.library.int64)

    def arange(self, n: int) -> Array:
        """0 to n - 1."""
        return np.arange(n) if self.library is np else self.library.arange(n, device=self.device)

    def take(self, array: Array, index: Array) -> Array:
        """From each row of (R, n), the entries whose numbers are in the same row of `index` (R, m)."""
        if self.library is np:
            return np.take_along_axis(array, index, 1)
        return self.library.take_along_dim(array, index, 1)

    def repeat(self, array: Array, times: int) -> Array:
        """Each row `times` times."""
        if self.library is np:
            return np.repeat(array, times, 0)
        return self.library.repeat_interleave(array, times, 0)

    def refuse_where(self, wrong: Array, reason: Callable[[tuple[int, ...]], str]) -> None:
        """Raise for the first place where `wrong` is true, if its values are known.

        Raises:
            PeerPositionError: with the reason that `reason` gives for that place.
        """
        if self.known and wrong.any():
            at = tuple(int(i) for i in np.argwhere(wrong)[0])
            raise PeerPositionError(f"{self.operation}: {reason(at)}")

    def check_starts(self, name: str, starts: Array, end: int, what: str) -> None:
        """Check, if the starts are known, that they ascend from 0 and that the last is not beyond the end.

        Raises:
            PeerPositionError: they do not.
        """
        if self.known and (starts[0] != 0 or (np.diff(starts) < 0).any() or starts[-1] > end):
            raise PeerPositionError(
                f"{self.operation}: {name} is {starts.tolist()}; it must ascend from 0 to at most the {end} {what}."
            )

    def like_given(self, array: Array) -> Array:
        """An array in int32, a torch tensor if any argument was one."""
        library = library_of(*self._arguments.values())
        result = array.astype(np.int32) if isinstance(array, np.ndarray) else array.int()
        return library.from_numpy(result) if library is not self.library else result


def for_operation(array: Array, like: Any) -> Array:
    """Indices in int32, where an operation over `like` can read them without waiting: on its device if it is a GPU."""
    if isinstance(array, np.ndarray):
        narrow = np.ascontiguousarray(array, np.int32)
        return narrow if on_host(like) else library_of(like).as_tensor(narrow, device=like.device)
    return array.int()


def _integers(values: Any, name: str, operation: str) -> Any:
    """An index argument as a NumPy array, or as the torch tensor that it is on a device.

    Raises:
        DTypeError: it holds anything but integers.
    """
    values = index_array(values, name, operation)
    if is_number(values):
        values = np.asarray(int(values), np.int64)
    if not isinstance(values, np.ndarray) and library_of(values) is np:  # an array of another library
        seen = view(values, name, operation)
        values = as_numpy(seen) if seen.device == "cpu" else read_host(seen, current())
    kind = str(getattr(values, "dtype", "")).removeprefix("torch.")
    if not kind.startswith(("int", "uint")):
        shown = kind or describe(view(values, name, operation))
        raise DTypeError(f"{operation}: {name} is {shown}; indices must be int32 or int64.")
    return values.numpy() if library_of(values) is not np and on_host(values) else values
