"""Which layers of the host's memory have a copy on the device, and how they are copied.

Layers are used one after another and then from the first again, so the next one is known: it is copied while the
previous one is used, and replaces the layer that is used again last. Other orders work: a layer without a copy is
copied when it is asked for, and the computation waits for it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, Protocol, TypeVar

from tikv import launch, runtime
from tikv.arrays import ArrayView, as_numpy
from tikv.errors import ArchError

Pairs = Sequence[tuple[ArrayView, ArrayView, int]]


class Transfer(Protocol):
    """Copies from the host's memory to one place on the device; `launch.cuda.transfers` has the class for CUDA."""

    def start(self, pairs: Pairs) -> None:
        """Copy the start of each first array's third axis to the second array, after all launches so far are done."""

    def wait(self) -> None:
        """Make the next launches wait for the copy."""

    def used(self) -> None:
        """Note that the last launches must be done before the copy is overwritten."""


class CopiedByNumPy:
    """A `Transfer` between two arrays of the host, with which any machine can test that code waits for copies.

    With `late`, nothing is copied before something waits for it; else it is copied as soon as possible.
    """

    def __init__(self, live: runtime.Runtime, late: bool = False) -> None:
        self._late = late
        self._pairs: Pairs = ()

    def start(self, pairs: Pairs) -> None:
        """As `Transfer.start`."""
        self._pairs = list(pairs)
        if not self._late:
            self.wait()

    def wait(self) -> None:
        """As `Transfer.wait`."""
        for source, to, count in self._pairs:
            as_numpy(to)[:, :, :count] = as_numpy(source)[:, :, :count]
        self._pairs = ()

    def used(self) -> None:
        """As `Transfer.used`: kernels of the CPU are done when their launch returns."""


def why_plain(live: runtime.Runtime, operation: str) -> str:
    """Why layers on the host are in the memory in which this device computes; empty if they are not.

    Raises:
        ArchError: they are not, and this device cannot read them there.
    """
    if runtime.shares_memory(live.arch, live.index):
        return f"{live.arch} computes in the host's memory"
    if not live.is_cuda:
        raise ArchError(
            f"{operation}: place='host' works on CUDA, and on devices that share the host's memory, such as CPU "
            f"and Metal; this device on {live.arch} has its own memory. Use place='device'."
        )
    name = launch.launcher_report(live)["launcher"]
    if name != "native":
        raise ArchError(
            f"{operation}: place='host' needs the native launcher, but kernels are launched by {name!r}. "
            "`tikv.info()['launcher']` says why."
        )
    return ""


def host_report(live: runtime.Runtime) -> str:
    """What ``place="host"`` means on a device.

    Examples:
        >>> import tikv
        >>> host_report(tikv.init(arch="cpu"))
        "plain: cpu computes in the host's memory"
    """
    try:
        why = why_plain(live, "KVCacheStore")
    except ArchError as error:
        return f"refused: {error}"
    return f"plain: {why}" if why else "offered"


def transfer_of(live: runtime.Runtime) -> Transfer:
    """A transfer to the device of a runtime."""
    if live.is_cuda:
        from tikv.launch.cuda.transfers import DriverTransfer

        return DriverTransfer(live)
    return CopiedByNumPy(live)


def refuse_capture(live: runtime.Runtime, operation: str) -> None:
    """Refuse layers on the host while a CUDA graph is captured.

    Raises:
        ArchError: one is being captured.
    """
    what = "the place on the device where a layer's copy is now"
    launch.refuse_during_capture(live, operation, what, "Use place='device' for layers that a graph captures.")


class Frame:
    """A place for a layer on the device: its contents, its transfer, and which layer it has."""

    def __init__(self, content: Any, transfer: Transfer) -> None:
        self.content, self.transfer = content, transfer
        self.layer: int | None = None


F = TypeVar("F", bound=Frame)


class Residents(Generic[F]):
    """The frames for layers of the same form.

    Args:
        layers: the numbers of the layers, in the order of their use.
        count: how many layers there are in all, after which the first is used again.
        frames: the places for copies.

    The caller's `fetch` starts the copy of a layer to a frame, which still says what it held before.
    """

    def __init__(self, layers: Sequence[int], count: int, frames: Sequence[F]) -> None:
        self.layers, self.count, self.frames = list(layers), count, list(frames)

    def frame_of(self, layer: int) -> F | None:
        """The frame in which a layer is or will be, or None."""
        return next((frame for frame in self.frames if frame.layer == layer), None)

    def bring(self, layer: int, fetch: Callable[[int, F], None]) -> F:
        """The frame of a layer, to which it is at least being copied."""
        return self.frame_of(layer) or self._take(self._last_needed(layer, self.frames), layer, fetch)

    def bring_next(self, using: int, fetch: Callable[[int, F], None]) -> None:
        """Start the copy of the layer that is used next, while layer `using`, here or elsewhere, is used."""
        following = min(self.layers, key=lambda layer: self._steps(using, layer))
        free = [frame for frame in self.frames if frame.layer != using]
        if free and following != using and self.frame_of(following) is None:
            self._take(self._last_needed(using, free), following, fetch)

    def drop(self, layer: int | None = None) -> None:
        """Forget the copy of a layer, or of all of them."""
        for frame in self.frames:
            if layer is None or frame.layer == layer:
                frame.layer = None

    @contextlib.contextmanager
    def writing(self, layer: int, frame: F) -> Iterator[None]:
        """A context for writes to a frame and to the host: a frame that was not written as the host was is dropped."""
        try:
            yield
        except BaseException:
            self.drop(layer)
            raise
        finally:
            frame.transfer.used()

    @contextlib.contextmanager
    def on_host(self, layer: int | None = None) -> Iterator[None]:
        """A context for writes to the host, of a layer or of all, after copies in progress; copies are then dropped."""
        for frame in self.frames:
            if frame.layer is not None and layer in (None, frame.layer):
                frame.transfer.wait()
        yield
        self.drop(layer)

    def _steps(self, using: int, layer: int) -> int:
        """After how many more layers a layer is used again."""
        return (layer - using - 1) % self.count + 1

    def _last_needed(self, using: int, frames: Sequence[F]) -> F:
        """An empty frame, or the frame of the layer that is used again last."""
        return max(frames, key=lambda f: self.count + 1 if f.layer is None else self._steps(using, f.layer))

    def _take(self, frame: F, layer: int, fetch: Callable[[int, F], None]) -> F:
        try:
            fetch(layer, frame)
        except BaseException:
            frame.layer = None
            raise
        frame.layer = layer
        return frame
