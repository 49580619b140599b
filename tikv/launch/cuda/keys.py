"""Names for a kernel's PTX: of one that this machine compiled, and of one that was made beforehand for others."""

from __future__ import annotations

import functools
import hashlib
import inspect
import pathlib
import sys
from collections.abc import Callable
from typing import Any

from tikv import kernels, runtime


def key_of(factory: Callable[..., Any], choices: tuple[Any, ...], target: str) -> str:
    """A name for all inputs of the PTX: the kernels' sources, the choices, the versions, the GPU."""
    engine = str(runtime.version_of(runtime.engine_in_use().name))
    python = ".".join(map(str, sys.version_info[:2]))
    return _digest(*_parts(factory, choices), engine, python, target)


def made_key_of(factory: Callable[..., Any], choices: tuple[Any, ...]) -> str:
    """A name for what a kernel computes: the kernels' sources and the choices.

    The engine that wrote the PTX, its version and Python's are not in it: every engine may load the PTX, whichever
    wrote it. The GPU is not in it either, since PTX runs on all later GPUs.
    """
    return _digest(*_parts(factory, choices))


def sources() -> str:
    """A digest of the sources of tikv's kernels."""
    return sources_below(kernels_folder())


def kernels_folder() -> pathlib.Path:
    """The folder of tikv's kernels: a factory in it may use code of any file below it."""
    return pathlib.Path(kernels.__file__).parent


@functools.cache
def sources_below(directory: pathlib.Path) -> str:
    """A digest of every file of Python or bitcode in a folder and below it: its path from there, and its bytes."""
    digest = hashlib.sha256()
    for path in sorted(p for p in directory.rglob("*") if p.suffix in (".py", ".bc")):
        digest.update(path.relative_to(directory).as_posix().encode() + b"\n" + path.read_bytes() + b"\n")
    return digest.hexdigest()


def _parts(factory: Callable[..., Any], choices: tuple[Any, ...]) -> tuple[str, ...]:
    source, all_kernels = pathlib.Path(inspect.getsourcefile(inspect.unwrap(factory)) or ""), kernels_folder()
    return (
        sources_below(all_kernels if all_kernels in source.parents else source.parent),
        f"{factory.__module__}.{factory.__qualname__}",
        repr(choices),
        str(bool(getattr(factory, "fast_math", False))),
    )


def _digest(*parts: str) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()
