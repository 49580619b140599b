"""Index arithmetic on whatever the caller's index arrays are, NumPy or torch, without bringing them to the host."""

from __future__ import annotations

import numbers
from collections.abc import Callable
from typing import Any

import numpy as np

from tikv.errors import OptionError, PositionError


def library_of(*arrays: Any) -> Any:
    """The module, torch or NumPy, whose functions work on these arrays: torch if any of them is a tensor."""
    for array in arrays:
        if type(array).__module__.split(".")[0] == "torch":
            import torch

            return torch
    return np


def as_index(array: Any, like: Any = None) -> Any:
    """An integer array of 64 bits in the library, and on the device, of `like`."""
    library = library_of(array, like)
    if library is np:
        return np.asarray(array, np.int64)
    device = like.device if like is not None and library_of(like) is library else getattr(array, "device", None)
    return library.as_tensor(array, device=device).to(library.int64)


def on_host(array: Any) -> bool:
    """Whether the values of an index argument, if there is one, are known without waiting for a device."""
    device = getattr(array, "device", None)
    return isinstance(array, (numbers.Integral, np.ndarray)) or device is None or getattr(device, "type", "") == "cpu"


def refuse_where(wrong: Any, operation: str, reason: Callable[[tuple[int, ...]], str]) -> None:
    """Raise for the first place where `wrong` is true, if its values are on the host; a device is not waited for.

    Raises:
        PositionError: with the reason, which is asked for with the place.
    """
    if on_host(wrong):
        places = np.argwhere(np.asarray(wrong))
        if len(places):
            raise PositionError(f"{operation}: {reason(tuple(int(i) for i in places[0]))}")


def refuse_option(operation: str, **options: Any) -> None:
    """Raise for the first option that was given a value this library does not offer; each is (value, what is offered).

    Raises:
        OptionError: naming the option.
    """
    for name, (value, offered) in options.items():
        raise OptionError(f"{operation}: {name}={value!r} is not offered. Use {offered}.")
