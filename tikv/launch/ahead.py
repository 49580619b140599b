"""Compile kernels ahead of time: to the SPIR-V that Metal and Vulkan use, and to Metal source.

The engine's Metal back end compiles a kernel to SPIR-V with the capabilities of a Mac's GPU, and passes it to
SPIRV-Cross. With those capabilities, its module for ahead-of-time use gives the same SPIR-V on Vulkan.
"""

from __future__ import annotations

import json
import re
import shutil
import struct
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tikv import runtime
from tikv.errors import ArchError
from tikv.launch.compilation import CompiledKernel

# What Taichi 1.7.4 reports for a Mac's GPU: no float64, no float atomics.
CAPABILITIES = (
    "spirv_version_1_3",
    *(f"spirv_has_{name}" for name in ("int8", "int16", "float16", "int64")),
    *(f"spirv_has_subgroup_{name}" for name in ("basic", "vote", "ballot", "arithmetic")),
)
# The engine's options for SPIRV-Cross: buffers have the numbers of their bindings.
SPIRV_CROSS = ("spirv-cross", "--msl", "--msl-version", "20300", "--msl-decoration-binding")
ARGUMENTS = -1  # the number of their buffer in the engine's description
_READ, _WRITE, _FLOAT32 = 1, 2, 1  # of an array, and a type
_HEADER = 5  # words of a SPIR-V module before its first instruction
_NAME, _CAPABILITY, _INT, _FLOAT, _ARRAY, _POINTER, _CONSTANT, _VARIABLE = 5, 17, 21, 22, 28, 32, 43, 59  # operations
_TEMPORARY = re.compile(rb"tmp(\d+)(\w*)\0")
_WORKGROUP = 4  # a storage class
_GROUP_CAPABILITIES = (61, 63)
GROUP_OPERATIONS = range(349, 365)  # OpGroupNonUniformIAdd to OpGroupNonUniformLogicalXor
_NAMES = {
    1: "Shader", 9: "Float16", 10: "Float64", 11: "Int64", 22: "Int16", 39: "Int8",
    61: "GroupNonUniform", 63: "GroupNonUniformArithmetic",
}  # fmt: skip


class Ahead(NamedTuple):
    """A kernel that was compiled ahead of time, and the engine's description of its launch."""

    spirv: Path
    task: dict[str, Any]  # the number of threads, and the argument of each buffer
    arguments: dict[str, Any]  # the places of arguments in the first buffer, and which arrays are read and written


def save(kernels: Sequence[CompiledKernel], folder: Path) -> None:
    """Compile kernels of the live runtime, which must be on Vulkan, to SPIR-V files in a folder: see `saved_in`.

    Raises:
        ArchError: the engine cannot compile ahead of time, or the runtime is not on Vulkan.
    """
    live, ti = runtime.current(), runtime.ti
    if not live.engine.has_modules:
        raise ArchError(f"export: {live.engine.title} compiles nothing ahead of time. Use TIKV_ENGINE=taichi.")
    if live.program.config().arch != ti.vulkan:
        raise ArchError(
            f"export: SPIR-V is made on Vulkan, and the runtime is on {live.arch}. Call tikv.init('vulkan')."
        )
    _allow_several_modules(live.front)
    module = ti.aot.Module(ti.vulkan, caps=[getattr(ti.DeviceCapability, name) for name in CAPABILITIES])
    # Not from the cache on disk: a task keeps the name from another process there, and files are named after it.
    config = live.program.config()
    offline_cache, config.offline_cache = config.offline_cache, False
    try:
        for number, kernel in enumerate(kernels):
            with live.lock, live.compiling(kernel.fast_math):
                module.add_kernel(kernel.function, name=f"kernel{number}")
        module.save(str(folder))
    finally:
        config.offline_cache = offline_cache
    for path in folder.glob("*.spv"):
        path.write_bytes(with_plain_names(path.read_bytes()))


def _allow_several_modules(front: Any) -> None:
    """Let a program have several modules: Taichi fixes the fields in the first, but no kernel here has fields."""
    if "_tikv_finalize" not in vars(front):
        finalize, front._tikv_finalize = front._finalize_root_fb_for_aot, True

        def once() -> None:
            if front._tikv_finalize:
                front._tikv_finalize = False
                finalize()

        front._finalize_root_fb_for_aot = once


def saved_in(folder: Path) -> list[Ahead]:
    """The kernels that `save` put into a folder, in order. A kernel is one task, so one launch."""
    facts = json.loads((folder / "metadata.json").read_text(encoding="utf-8"))["kernels"]
    kernels = {}
    for kernel in facts:
        (task,) = kernel["tasks_attribs"]
        number = int(kernel["name"].removeprefix("kernel"))
        kernels[number] = Ahead(folder / f"{task['name']}.spv", task, kernel["ctx_attribs"])
    return [kernels[number] for number in range(len(kernels))]


class Argument(NamedTuple):
    """Where a kernel's argument lies in the buffer of arguments, and how the kernel uses it."""

    name: str
    offsets: list[int]  # of its numbers, in bytes; of an array, of its extent
    is_float: list[bool]
    read: bool  # of an array
    written: bool


def arguments_of(kernel: Ahead) -> list[Argument]:
    """The arguments of a kernel, in order."""
    facts = kernel.arguments
    names = {entry["key"][0]: entry["value"]["name"].removeprefix("_") for entry in facts["arg_attribs_vec_"]}
    access = {entry["key"][0]: entry["value"] for entry in facts["arr_access"]}
    arguments = []
    for i, element in enumerate(facts["args_type_"]["content"]["elements_"]):
        numbers = list(_numbers_in(element["type"], element["offset"]))
        offsets, kinds = [at for at, _ in numbers], [kind == _FLOAT32 for _, kind in numbers]
        arguments.append(
            Argument(names[i], offsets, kinds, bool(access.get(i, 0) & _READ), bool(access.get(i, 0) & _WRITE))
        )
    return arguments


def _numbers_in(kind: Any, offset: int) -> Iterator[tuple[int, int | None]]:
    """(offset, type) of each number in a type of the engine's description; a pointer, a buffer here, has type None."""
    if "elements_" in kind["content"]:
        for element in kind["content"]["elements_"]:
            yield from _numbers_in(element["type"], offset + element["offset"])
    else:
        yield offset, kind["content"].get("type")


def metal_of(spirv: Path) -> str:
    """The Metal source of a file of SPIR-V.

    Raises:
        ArchError: SPIRV-Cross is not installed, or refuses the file.
    """
    if shutil.which(SPIRV_CROSS[0]) is None:
        raise ArchError("export: Metal source is made by spirv-cross. Install it (Debian, Homebrew: spirv-cross).")
    done = subprocess.run([*SPIRV_CROSS, spirv], capture_output=True, text=True, timeout=60, check=False)
    if done.returncode:
        raise ArchError(f"export: spirv-cross refuses {spirv.name}: {done.stderr.strip()}")
    return done.stdout


def is_valid(spirv: Path) -> bool | None:
    """Whether spirv-val accepts a file; None if spirv-val is not installed.

    Raises:
        ArchError: spirv-val finds an error.
    """
    if shutil.which("spirv-val") is None:
        return None
    command = ["spirv-val", "--target-env", "vulkan1.1", str(spirv)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    if done.returncode:
        raise ArchError(f"export: spirv-val refuses {spirv.name}: {done.stdout}{done.stderr}")
    return True


def _instructions(spirv: bytes) -> Iterator[tuple[int, ...]]:
    """Each instruction of a module: its operation, and the words after it."""
    words, at = struct.unpack(f"<{len(spirv) // 4}I", spirv), _HEADER
    while at < len(words):
        size = words[at] >> 16
        yield words[at] & 0xFFFF, *words[at + 1 : at + size]
        at += size


def with_plain_names(spirv: bytes) -> bytes:
    """The SPIR-V with its temporaries numbered from 1, so that a kernel is the same bytes whenever it is compiled.

    Their names, such as tmp3122_i32, have the engine's numbers, which depend on all that the process compiled before.
    """
    numbers: dict[bytes, int] = {}
    parts = [spirv[: 4 * _HEADER]]
    for operation, *rest in _instructions(spirv):
        body = struct.pack(f"<{len(rest)}I", *rest)
        if operation == _NAME and (name := _TEMPORARY.match(body, 4)):
            number = numbers.setdefault(name[1], len(numbers) + 1)
            text = b"tmp%d%s\0" % (number, name[2])
            body = body[:4] + text + b"\0" * (-len(text) % 4)
        parts += [struct.pack("<I", (len(body) // 4 + 1) << 16 | operation), body]
    return b"".join(parts)


def operations_of(spirv: bytes) -> set[int]:
    """The operations in a SPIR-V module."""
    return {operation for operation, *_ in _instructions(spirv)}


def with_capabilities(spirv: bytes) -> bytes:
    """The SPIR-V with the capability for its subgroup operations, which Taichi 1.7.4 uses but does not declare."""
    if not operations_of(spirv) & set(GROUP_OPERATIONS):
        return spirv
    declared = b"".join(struct.pack("<2I", 2 << 16 | _CAPABILITY, number) for number in _GROUP_CAPABILITIES)
    assert declared[-8:] not in spirv, "Taichi declares it now: then this function can go"
    return spirv[: 4 * _HEADER] + declared + spirv[4 * _HEADER :]


def capabilities_of(spirv: bytes) -> list[str]:
    """The names of the capabilities that a module declares."""
    return [_NAMES.get(rest[0], str(rest[0])) for what, *rest in _instructions(spirv) if what == _CAPABILITY]


def threadgroup_bytes(spirv: bytes) -> int:
    """The bytes of memory that the threads of a group share in a module."""
    sizes: dict[int, int] = {}  # of types
    numbers: dict[int, int] = {}  # constants
    pointed: dict[int, int] = {}  # the type that a pointer points to
    total = 0
    for what, *rest in _instructions(spirv):
        if what in (_INT, _FLOAT):
            sizes[rest[0]] = rest[1] // 8
        elif what == _CONSTANT:
            numbers[rest[1]] = rest[2]
        elif what == _ARRAY and rest[1] in sizes and rest[2] in numbers:
            sizes[rest[0]] = sizes[rest[1]] * numbers[rest[2]]
        elif what == _POINTER:
            pointed[rest[0]] = rest[2]
        elif what == _VARIABLE and rest[2] == _WORKGROUP:
            total += sizes[pointed[rest[0]]]
    return total
