"""Steps of torch models in CUDA graphs: captured once, then launched at once."""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Callable, Iterator
from typing import Any

from tikv import extras, launch, runtime
from tikv.errors import ArchError, OptionError, PositionError
from tikv.stores.store import KVCacheStore

try:
    import torch

    extras.require_version(torch)
except ImportError as error:
    raise extras.missing("tikv.capture", error) from None


class Replay:
    """A function captured in a CUDA graph: a call launches all its work at once.

    Args:
        function: what is captured. It works on tensors that exist before, and reads no numbers from the device.
        device: where it works.

    Attributes:
        result: what the function returned.

    Raises:
        Exception: whatever the function raises, or CUDA because it cannot capture it. Nothing was computed.
    """

    def __init__(self, function: Callable[[], Any], device: Any) -> None:
        self._graph = torch.cuda.CUDAGraph()
        # torch.cuda.graph() would wait for the device, which still computes the prompt.
        with torch.cuda.device(device), _uncollected(), torch.cuda.stream(_stream(device)):
            self._graph.capture_begin(capture_error_mode="thread_local")
            try:
                self.result = function()
            except BaseException:
                with contextlib.suppress(RuntimeError):  # CUDA says again that the capture failed
                    self._graph.capture_end()
                raise
            self._graph.capture_end()

    def __call__(self) -> Any:
        """Launch the work."""
        self._graph.replay()
        return self.result


@functools.cache
def _stream(device: Any) -> Any:
    """The stream of all captures of a device: cuBLAS keeps memory for each stream that it has met."""
    return torch.cuda.Stream(device)


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


class CapturedStep(runtime.NotCopied):
    """A step of your model and its stores, as `tikv.capture` returns it: each call is one step."""

    def __init__(self, step: Callable[[], Any], stores: tuple[KVCacheStore, ...]) -> None:
        self._step, self._stores = step, stores
        self._versions = [store.memory_version for store in stores]
        self._replay: Callable[[], Any] | None = None
        self._has_run = False

    def __call__(self) -> Any:
        """Run the step: as it is the first time, and as a graph afterwards on an NVIDIA GPU.

        Returns:
            What the step returns; from the second call on a GPU the same tensors each time, with new contents.

        Raises:
            StaleRuntimeError: the runtime of a store is gone.
            PositionError: a store has allocated other memory since the capture was asked for.
            Exception: whatever the step raises, or CUDA because it cannot capture it; then nothing was computed.
        """
        for i, (store, version) in enumerate(zip(self._stores, self._versions, strict=True)):
            runtime.require_alive(store.runtime, "tikv.capture")
            if store.memory_version != version:
                raise PositionError(
                    f"tikv.capture: other memory was allocated for store {i} by select(), repeat() or another call: "
                    f"its memory_version is {store.memory_version}, and was {version}. Take the step's tensors from "
                    "the new memory, and call tikv.capture again."
                )
        if self._replay is not None:
            return self._replay()
        engine = self._stores[0].runtime
        if not (engine.is_cuda and self._has_run):
            result = self._step()
            self._has_run = True
            return result
        self._replay = Replay(self._step, torch.device("cuda", engine.index))
        return self._replay()

    def __repr__(self) -> str:
        way = (
            "captured" if self._replay else "to be captured" if self._stores[0].runtime.is_cuda else "called each time"
        )
        return f"<tikv.capture of {getattr(self._step, '__qualname__', self._step)}, {way}>"


def capture(step: Callable[[], Any], *stores: KVCacheStore) -> CapturedStep:
    """A step of your torch model as one CUDA graph: the first call runs it, the second captures it, each is one step.

    All that changes from step to step lies in tensors that the step reads and writes in place: the newest token, its
    position, the keys and values of the stores ([CUDA graphs](../tutorials/cuda_graphs.md) says which calls can be
    captured). Elsewhere than on an NVIDIA GPU, the same calls run the step as it is.

    Args:
        step: a function without arguments. It appends with ``positions=`` on the device; what it returns is returned.
        *stores: the `KVCacheStore`s that it writes to or reads; at least one. Their memory must stay where it is:
            `KVCacheStore.memory_version` is compared before each step, and another one is refused.

    Returns:
        A `CapturedStep`, to be called once for each token. `KVCacheStore.advance` tells a store afterwards how many
        tokens its steps appended.

    Raises:
        OptionError: `step` cannot be called; no stores, or something that is no `KVCacheStore`.
        ArchError: tikv's launcher cannot be captured here; `tikv.info()["launcher"]` says why.
        MissingPackageError: torch is not installed.

    Example:
        >>> import torch, tikv
        >>> store = tikv.KVCacheStore(num_layers=1, num_kv_heads=1, head_dim=4, capacity=8, dtype="float32")
        >>> positions = store.positions_on_device().torch()
        >>> rows = torch.ones(1, 1, 4, device=positions.device)
        >>> def step():
        ...     store.append(0, rows, rows, positions=positions)
        ...     positions.add_(1)
        >>> step = tikv.capture(step, store)
        >>> for _ in range(3):
        ...     _ = step()
        >>> store.advance(3)
        >>> store.length
        3

    Cost: the capture takes about as long as one step takes the host; each later step is one launch.
    """
    if not callable(step):
        raise OptionError(f"tikv.capture: step is {step!r}; it must be a function without arguments.")
    if not stores:
        raise OptionError("tikv.capture: no store was passed; pass each KVCacheStore that the step writes to or reads.")
    unchecked: tuple[Any, ...] = stores
    for i, store in enumerate(unchecked):
        if not isinstance(store, KVCacheStore):
            way_out = "a TikvCache is captured by generate(custom_generate=tikv.integrations.transformers.captured)"
            raise OptionError(
                f"tikv.capture: store {i} is a {type(store).__name__}; it must be a KVCacheStore ({way_out})."
            )
        if store.runtime.is_cuda and (why := launch.why_not_native(store.runtime)):
            raise ArchError(f"tikv.capture: a step cannot be captured, because {why}. {extras.install('cuda')}.")
    return CapturedStep(step, stores)
