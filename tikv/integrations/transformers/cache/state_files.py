"""The states of a layer in the file of a `TikvCache`: their tensors, and what else is known of them."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import torch

from tikv import dtypes
from tikv.stores import files
from tikv.stores.files.tensor_file import Entry

MOST_AXES = 6  # of a state
FLOATS = tuple(map(np.dtype, (np.float32, np.float16, np.float64, ml_dtypes.bfloat16)))
KINDS = ("conv", "recurrent")


def tensors_of(layer: Any) -> dict[str, np.ndarray[Any, Any]]:
    """Copies of a layer's states on the host, by their names in files."""
    return {name: _as_numpy(state) for name, state in _named(layer).items()}


def _named(layer: Any) -> dict[str, Any]:
    """A layer's states by their names in files."""
    return {
        f"{kind}.{i}": state
        for kind, states in zip(KINDS, (layer.conv_states, layer.recurrent_states), strict=True)
        for i, state in states.items()
        if state is not None
    }


def metadata_of(layer: Any) -> dict[str, Any]:
    """What a file says of them."""
    return {
        "shapes": {name: list(a.shape) for name, a in _named(layer).items()},
        "kernels": [layer.conv_kernel_size[i] for i in range(layer.number_of_states)],
        "seen": [layer.has_previous_state[i] for i in range(layer.number_of_states)],
        "from_start": [i in layer._from_start for i in range(layer.number_of_states)],
        "record_past": layer.record_past,
        "device": "cpu" if layer.device is None else layer.device.type,
    }


def check(layer: Any, said: dict[str, Any], name: str, entries: dict[str, Entry]) -> tuple[set[str], int]:
    """The names of a layer's states in a file and their bytes; ValueError if they are impossible."""
    count = layer.number_of_states
    for key in ("seen", "from_start"):
        if any(type(value) is not bool for value in files.listed(said[key], key, count)):
            raise ValueError(f"{name} has {key}={said[key]!r}")
    if type(said["record_past"]) is not bool:
        raise ValueError(f"{name} has record_past={said['record_past']!r}")
    for size in files.listed(said["kernels"], "kernels", count):
        if size is not None:
            files.integer(size, "kernels", low=1)
    names, nbytes, batches = set[str](), 0, set[int]()
    for part, shape in said["shapes"].items():
        kind, _, number = part.partition(".")
        if kind not in KINDS or number not in map(str, range(count)):
            raise ValueError(f"{name} has a state {files.words(part)}, which it cannot have")
        sizes = files.integers(shape, "shapes", "a size")
        kernel = said["kernels"][int(number)]
        if not 1 < len(sizes) <= MOST_AXES or (kind == "conv" and (kernel is None or sizes[-1] < kernel)):
            raise ValueError(f"{name} has a state {part} of shape {sizes}, and a kernel of {kernel}")
        entry = entries.get(f"{name}.{part}")
        if entry is None or entry.dtype not in FLOATS:
            raise ValueError(f"{name}.{part} is missing, or has a dtype that no state has")
        files.require_entry(entries, f"{name}.{part}", tuple(sizes), entry.dtype)
        names.add(f"{name}.{part}")
        nbytes += int(np.prod(sizes)) * entry.dtype.itemsize
        batches.add(sizes[0])
    if len(batches) > 1:
        raise ValueError(f"the states of {name} are of batches of {sorted(batches)} sequences")
    return names, nbytes


def restore(layer: Any, said: dict[str, Any], arrays: dict[str, np.ndarray[Any, Any]], device: Any) -> None:
    """Put saved states into a layer that has none."""
    place = torch.device(said["device"] if device is None else device)
    of_kind = zip(
        KINDS,
        (layer.conv_states, layer.recurrent_states),
        (layer.is_conv_states_initialized, layer.is_recurrent_states_initialized),
        strict=True,
    )
    for kind, states, initialized in of_kind:
        for i in range(layer.number_of_states):
            array = arrays.get(f"{kind}.{i}")
            if array is not None:
                states[i], initialized[i] = _as_torch(array, place), True
    for i in range(layer.number_of_states):
        layer.conv_kernel_size[i], layer.has_previous_state[i] = said["kernels"][i], said["seen"][i]
    layer._from_start = {i for i, value in enumerate(said["from_start"]) if value}
    layer.record_past = said["record_past"]
    known = next((a for a in layer.conv_states.values() if a is not None), None)
    if known is not None and layer.device is None:
        layer.dtype, layer.device = known.dtype, known.device


def _as_numpy(state: Any) -> np.ndarray[Any, Any]:
    state = state.detach().contiguous().cpu()
    if state.dtype is torch.bfloat16:
        return state.view(torch.int16).numpy().view(ml_dtypes.bfloat16)  # type: ignore[no-any-return]
    return state.numpy()  # type: ignore[no-any-return]


def _as_torch(array: np.ndarray[Any, Any], place: Any) -> Any:
    dtype = dtypes.to_torch(array.dtype.name)
    words = array.view(np.int16) if dtype is torch.bfloat16 else array
    return torch.from_numpy(words.copy()).view(dtype).to(place)
