"""The Metal source that Taichi makes of a kernel, on a machine without Metal: see `tikv.launch.ahead`."""

import pathlib
import tempfile
from typing import Any, NamedTuple

from tikv.launch import ahead


class Source(NamedTuple):
    """A kernel's Metal source and what Taichi launches it by."""

    metal: str
    task: dict[str, Any]  # how many threads, which buffer is which argument
    arguments: dict[str, Any]  # where the arguments lie in the first buffer, which arrays are read and written


def sources_in(folder):
    """The `Source` of each kernel that `ahead.save` put into a folder, in their order."""
    return [Source(ahead.metal_of(kernel.spirv), *kernel[1:]) for kernel in ahead.saved_in(folder)]


def source_of(kernel):
    """The `Source` of a kernel, compiled now."""
    with tempfile.TemporaryDirectory() as folder:
        ahead.save([kernel], pathlib.Path(folder))
        (found,) = sources_in(pathlib.Path(folder))
    return found
