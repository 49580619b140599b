"""Which runtime a call uses: if a process sees several GPUs, the runtime of the GPU on which its arrays lie."""

from __future__ import annotations

import sys
from typing import Any

from tikv import engines, runtime
from tikv.arrays.annotations import Array
from tikv.arrays.array_view import ArrayView
from tikv.runtime import start


def runtime_of(*arrays: Any) -> runtime.Runtime:
    """The live runtime of the GPU of the first array that lies on a GPU; if no array does, of torch's current GPU.

    Args:
        arrays: arrays of any kind, or objects with `codes`; `view` refuses others later.
    """
    live = start._current  # what `current` does, but without a call, since every operation comes here
    if live is None or live.front.prog is not live.program:
        live = start.current()
    if live.num_gpus < 2:
        return live
    for each in arrays:
        index = _gpu_of(each)
        if index is not None:
            return live.on_gpu(index)
    torch = sys.modules.get("torch")
    return live.on_gpu(torch.cuda.current_device() if torch is not None and torch.cuda.is_available() else 0)


def _gpu_of(array: Array) -> int | None:
    """The number of the GPU that an array lies on; None if it lies elsewhere, or does not say."""
    if type(array) is not ArrayView:
        array = getattr(array, "codes", array)
    try:
        if type(array).__module__.partition(".")[0] in engines.ALL:
            return 0
        kind, _, number = str(getattr(array, "device", "")).partition(":")
        if kind == "cuda":
            return int(number or 0)
        if hasattr(array, "__cuda_array_interface__") and hasattr(array, "__dlpack_device__"):
            return int(array.__dlpack_device__()[1])
    except Exception:  # the object is not an array after all, which `view` will report
        pass
    return None
