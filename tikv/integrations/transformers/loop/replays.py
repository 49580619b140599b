"""Work on the device that is done again and again: on CUDA a graph that is captured once, elsewhere calls."""

from __future__ import annotations

import contextlib
import functools
import gc
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

from tikv.integrations.transformers.memory import stored_ops


class Replay:
    """A function without arguments and results, captured in a CUDA graph: a call launches all its work at once.

    Args:
        function: what is captured. It works on tensors that exist before, and reads no numbers from the device.
        device: where it works.

    Raises:
        Exception: whatever the function raises, or CUDA because it cannot capture it. Nothing was computed.
    """

    def __init__(self, function: Callable[[], None], device: Any) -> None:
        self._graph = torch.cuda.CUDAGraph()
        # torch.cuda.graph() would wait for the device, which still computes the prompt.
        stream = _stream(device)
        with torch.cuda.device(device), _uncollected(), stored_ops.capture_is_counted(), torch.cuda.stream(stream):
            self._graph.capture_begin(capture_error_mode="thread_local")
            try:
                function()
            except BaseException:
                with contextlib.suppress(RuntimeError):  # CUDA says again that the capture failed
                    self._graph.capture_end()
                raise
            self._graph.capture_end()

    def __call__(self) -> None:
        """Launch the work."""
        self._graph.replay()


@functools.cache
def _stream(device: Any) -> Any:
    """The stream of all captures of a device: cuBLAS keeps memory for each stream that it has met."""
    return torch.cuda.Stream(device)


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


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """No garbage is collected meanwhile: what CUDA does to free it is not allowed during a capture."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


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
