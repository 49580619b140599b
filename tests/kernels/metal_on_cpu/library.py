"""Metal source, compiled by clang and launched over bytes."""

import ctypes
import hashlib
import os
import pathlib
import platform
import subprocess
from typing import NamedTuple

from metal_on_cpu.source import MOST_BUFFERS, cpp_source

HERE = pathlib.Path(__file__).parent
COMPILED = ("metal.h", "threads.h", "threads.cpp")
CLANG = os.environ.get("CLANG", "clang++")


class Options(NamedTuple):
    """How a GPU differs from another, or a compiler from another."""

    simd_width: int = 32  # threads of a SIMD group
    seed: int = 0  # another order of the threads between barriers, and of the threadgroups; 0: ascending
    fast_math: bool = False  # as Metal compiles unless it is told otherwise
    flush: bool = False  # subnormal float32 are zero, as on Apple's GPUs


class MetalFault(Exception):
    """A launch did what Metal leaves undefined."""


class Launch(ctypes.Structure):
    """`metal_launch` of threads.h."""

    _fields_ = [
        ("data", ctypes.POINTER(ctypes.c_void_p)), ("bytes", ctypes.POINTER(ctypes.c_uint64)),
        ("groups", ctypes.c_uint32), ("simd_width", ctypes.c_uint32), ("seed", ctypes.c_uint64),
        ("flush", ctypes.c_uint32), ("message", ctypes.c_char_p), ("message_size", ctypes.c_uint64),
    ]  # fmt: skip


def flags_of(fast_math):
    """How a kernel is compiled. A variable that is read before it is written has no likely value."""
    flags = ["-std=c++17", "-fPIC", "-fvisibility=hidden", "-w", "-fsigned-char", "-ftrivial-auto-var-init=pattern"]
    flags += ["-march=x86-64-v3"] if platform.machine() == "x86_64" else []  # conversions from and to float16
    # To compile a kernel takes longer than to run it once: without -O1 half of it.
    flags += ["-O2", "-ffast-math", "-ffp-contract=fast"] if fast_math else ["-O0", "-ffp-contract=off"]
    return [*flags, "-I", str(HERE / "include")]


def clang(*arguments):
    """Run clang; what it says of an error is in the exception."""
    done = subprocess.run([CLANG, *map(str, arguments)], capture_output=True, text=True, timeout=300)
    if done.returncode:
        raise RuntimeError(f"{CLANG} {arguments[-1]}: {done.stderr[:3000]}")


def made(path, make):
    """The file, made by `make(path of a part)` unless it is there: whole, whoever else makes it."""
    if not path.exists():
        part = path.with_suffix(f".{os.getpid()}.part")
        make(part)
        part.rename(path)
    return path


def library_of(cpp, fast_math, folder):
    """The shared library of a C++ source, compiled once in that folder; so is what all of them share."""
    flags = flags_of(fast_math)
    key = "\0".join((HERE / name).read_text(encoding="utf-8") for name in COMPILED) + "\0".join((CLANG, *flags))
    shared = folder / hashlib.sha256(key.encode()).hexdigest()[:24]
    headers = made(
        shared.with_suffix(".pch"), lambda part: clang(*flags, "-x", "c++-header", HERE / "metal.h", "-o", part)
    )
    threads = made(shared.with_suffix(".o"), lambda part: clang(*flags, "-c", HERE / "threads.cpp", "-o", part))

    def compile_library(part):
        source, code = part.with_suffix(".cpp"), part.with_suffix(".o")
        source.write_text(cpp, encoding="utf-8")
        clang(*flags, "-include-pch", headers, "-c", source, "-o", code)
        # Linked without -ffast-math, which would make subnormals zero in the whole process.
        clang("-shared", code, threads, "-o", part, "-lm")
        source.unlink()
        code.unlink()

    return made(folder / f"{hashlib.sha256((key + cpp).encode()).hexdigest()[:24]}.so", compile_library)


class MetalFunction:
    """The function of a Metal source, to be launched.

    Args:
        metal: the source, in the form that SPIRV-Cross gives it.
        options: the `Options` of all launches.
        folder: where compiled code is kept.
        offsets: where the members of the constant buffer's struct have to lie.
    """

    def __init__(self, metal, options, folder, offsets=()):
        self.options = options
        self.run = ctypes.CDLL(str(library_of(cpp_source(metal, offsets), options.fast_math, folder))).run_metal
        self.run.argtypes = [ctypes.POINTER(Launch)]

    def __call__(self, groups, buffers):
        """Launch `groups` threadgroups over buffers, flat NumPy arrays by number, of which each byte may be used.

        Raises:
            MetalFault: a thread did what Metal leaves undefined. The launch ends there.
        """
        data, sizes = (ctypes.c_void_p * MOST_BUFFERS)(), (ctypes.c_uint64 * MOST_BUFFERS)()
        for number, array in buffers.items():
            data[number], sizes[number] = array.ctypes.data, array.nbytes
        message = ctypes.create_string_buffer(400)
        launch = Launch(
            ctypes.cast(data, ctypes.POINTER(ctypes.c_void_p)), ctypes.cast(sizes, ctypes.POINTER(ctypes.c_uint64)),
            groups, self.options.simd_width, self.options.seed, self.options.flush,
            ctypes.cast(message, ctypes.c_char_p), len(message),
        )  # fmt: skip
        if self.run(launch):
            raise MetalFault(message.value.decode())
