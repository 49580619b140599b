"""What captured steps need: their graphs, whether they wait for the device, and the random numbers that they draw."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch

from tikv.integrations.torch_graphs import Replay
from tikv.integrations.transformers.memory import stored_ops


def replayed(function: Callable[[], None], device: Any) -> Replay:
    """A `Replay` in which layers of a `TikvCache` may be written."""
    with stored_ops.capture_is_counted():
        return Replay(function, device)


def waits(work: Callable[[], None]) -> str:
    """Do some work on CUDA; what torch says if the host waits for the device in it, else empty."""
    mode = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            work()
        finally:
            torch.cuda.set_sync_debug_mode(mode)
    where = ""
    for each in caught:
        if "synchronizing CUDA operation" in str(each.message):
            where = f"{str(each.message).splitlines()[0]} in {each.filename}:{each.lineno}"
        elif "debug mode is a prototype" not in str(each.message):
            warnings.warn_explicit(each.message, each.category, each.filename, each.lineno)
    return where


class Numbers:
    """Where torch's random numbers of a device come from, which can go back to an earlier place.

    Args:
        device: where they are drawn.
    """

    def __init__(self, device: Any) -> None:
        self._of_cuda: Any = None
        if device.type == "cuda":
            index = torch.cuda.current_device() if device.index is None else device.index
            self._of_cuda = torch.cuda.default_generators[index]

    def place(self) -> Any:
        """The place from which the next numbers come."""
        return torch.get_rng_state() if self._of_cuda is None else self._of_cuda.get_offset()

    def go_to(self, place: Any) -> None:
        """Let the next numbers come from there."""
        if self._of_cuda is None:
            torch.set_rng_state(place)
        else:
            self._of_cuda.set_offset(place)
