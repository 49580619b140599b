"""The Metal source that Taichi makes of a kernel, on a machine without Metal.

Taichi's Metal back end compiles a kernel to SPIR-V under Metal's capabilities and hands it to SPIRV-Cross. The
ahead-of-time module with those capabilities gives the same SPIR-V on Vulkan.
"""

import json
import pathlib
import subprocess
import tempfile
from typing import Any, NamedTuple

from tikv import runtime

# What Taichi 1.7.4 reports for a Mac's GPU: no float64, no float atomics.
CAPABILITIES = (
    "spirv_version_1_3",
    *(f"spirv_has_{name}" for name in ("int8", "int16", "float16", "int64")),
    *(f"spirv_has_subgroup_{name}" for name in ("basic", "vote", "ballot", "arithmetic")),
)
# How it calls SPIRV-Cross: buffers have the numbers of their bindings.
SPIRV_CROSS = ("spirv-cross", "--msl", "--msl-version", "20300", "--msl-decoration-binding")


class Source(NamedTuple):
    """A kernel's Metal source and what Taichi launches it by."""

    metal: str
    task: dict[str, Any]  # how many threads, which buffer is which argument
    arguments: dict[str, Any]  # where the arguments lie in the first buffer, which arrays are read and written


def metal_of(spirv):
    """The Metal source of a file of SPIR-V."""
    done = subprocess.run([*SPIRV_CROSS, spirv], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, f"{spirv.name}: {done.stderr}"
    return done.stdout


def save(kernels, folder):
    """Compile kernels of tikv's to SPIR-V, in files of that folder."""
    ti = runtime.ti
    _allow_several_modules(runtime.current().front)
    module = ti.aot.Module(ti.vulkan, caps=[getattr(ti.DeviceCapability, name) for name in CAPABILITIES])
    for number, kernel in enumerate(kernels):
        with kernel.runtime.lock, kernel.runtime.compiling(kernel.fast_math):
            module.add_kernel(kernel.function, name=f"kernel{number}")
    module.save(str(folder))


def _allow_several_modules(front):
    """Taichi ends its fields' layout with the first module of a program, and that once; here there are no fields."""
    if "_tikv_finalize" not in vars(front):
        finalize, front._tikv_finalize = front._finalize_root_fb_for_aot, True

        def once():
            if front._tikv_finalize:
                front._tikv_finalize = False
                finalize()

        front._finalize_root_fb_for_aot = once


def sources_in(folder):
    """The `Source` of each kernel that `save` put into a folder, in their order."""
    facts = json.loads((folder / "metadata.json").read_text(encoding="utf-8"))["kernels"]
    found = {}
    for kernel in facts:
        (task,) = kernel["tasks_attribs"]
        metal = metal_of(folder / f"{task['name']}.spv")
        found[int(kernel["name"].removeprefix("kernel"))] = Source(metal, task, kernel["ctx_attribs"])
    return [found[number] for number in range(len(found))]


def source_of(kernel):
    """The `Source` of a kernel, compiled now."""
    with tempfile.TemporaryDirectory() as folder:
        save([kernel], folder)
        (found,) = sources_in(pathlib.Path(folder))
    return found
