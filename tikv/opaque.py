"""Keeps `torch.compile` out of this library and its engine: they run uncompiled, between the graphs that it makes.

Its tracer, Dynamo, reads the Python of everything that a compiled function calls. Here it would meet an engine that
compiles Python too, and counts that change with each token. So it is told which files to skip, as soon as it is
imported: a call is then a graph break and runs as without `torch.compile`, and ``fullgraph=True`` refuses it before
anything runs. torch is not imported for this, and calls outside compiled code have no extra step.

Only the operators and the cache of `integrations`, and the counts that the cache reads, are written to be traced.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

from tikv import engines

REASON = (
    "tikv counts tokens and launches kernels in Python, outside of compiled graphs. Leave fullgraph=True out; or call "
    "the operators of tikv.torch_ops, which stay in a graph"
)
TRACED = ("tikv.integrations", "tikv.stores.layers.growing")

_RULES = "torch._dynamo.trace_rules"  # Dynamo's module with the list of files that it skips
_marked: set[str] = set()  # modules whose functions say why they are skipped


def watch() -> None:
    """Tell Dynamo which files to skip: now if it is imported, else when it is."""
    if _RULES in sys.modules:
        _tell(sys.modules[_RULES])
    else:
        sys.meta_path.insert(0, _Watch())


def mark() -> None:
    """Make the functions of loaded modules say why they are skipped, once Dynamo is imported.

    torch shows the reason with ``fullgraph=True``. Functions that they call are skipped too, such as those that Python
    generates for a dataclass, which are in no file.
    """
    if _RULES not in sys.modules:
        return
    leave_alone = _with_all_it_calls()
    for name, module in list(sys.modules.items()):
        ours = f"{name}.".startswith("tikv.") and not name.startswith(TRACED)
        if not ours or name in _marked or getattr(module.__spec__, "_initializing", False):
            continue
        _marked.add(name)
        for function in functions_of(module):
            # torch.compiler.disable marks the function that it returns in this way.
            function._torchdynamo_disable = True  # type: ignore[attr-defined]
            function._torchdynamo_disable_msg = REASON  # type: ignore[attr-defined]
            leave_alone(function.__code__)


def _with_all_it_calls() -> Callable[[types.CodeType], None]:
    """The call that makes Dynamo skip a function and all that it calls; in older torch, the function alone."""
    frames: Any = sys.modules["torch"]._C._dynamo.eval_frame
    if not hasattr(frames, "_FrameExecStrategy"):
        skip_code: Callable[[types.CodeType], None] = getattr(frames, "skip_code", lambda code: None)
        return skip_code
    skip = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.SKIP)
    return lambda code: frames.set_code_exec_strategy(code, skip)


def functions_of(holder: Any) -> Iterator[types.FunctionType]:
    """The functions that a module defines, those of its classes and properties included."""
    in_module = isinstance(holder, types.ModuleType)
    home = holder.__name__ if in_module else holder.__module__
    for value in list(vars(holder).values()):
        parts = [value.fget, value.fset] if isinstance(value, property) else [getattr(value, "__func__", value)]
        for part in parts:
            if getattr(part, "__module__", None) != home:
                continue
            if isinstance(part, types.FunctionType):
                yield part
            elif isinstance(part, type) and in_module:
                yield from functions_of(part)


def _tell(rules: Any) -> None:
    """Add the files to Dynamo's list. It is not public; torch has had it under this name since 2.2."""
    if hasattr(rules, "SKIP_DIRS") and hasattr(rules, "_recompile_re"):
        rules.SKIP_DIRS.extend([*_files(os.path.dirname(__file__)), *_engines()])
        rules._recompile_re()
    mark()


def _files(folder: str) -> Iterator[str]:
    """The files and folders that are skipped; a folder ends in a separator."""
    root = os.path.dirname(os.path.dirname(__file__))
    traced = [os.path.join(root, *name.split(".")) for name in TRACED]
    for entry in os.scandir(folder):
        path = entry.path.removesuffix(".py")
        if path in traced:
            continue
        if any(each.startswith(path + os.sep) for each in traced):
            yield from _files(path)
        elif entry.is_dir():
            yield path + os.sep
        elif entry.name.endswith(".py"):
            yield entry.path


def _engines() -> Iterator[str]:
    """The folders of the installed engines; no engine is imported."""
    for name in engines.ALL:
        with contextlib.suppress(ValueError):  # a module that is there without having been imported
            spec = importlib.util.find_spec(name)
            if spec is not None and spec.origin is not None:
                yield os.path.dirname(spec.origin) + os.sep


class _Watch:
    """A finder for one module: that of Dynamo's list, which gets its additions when it is loaded."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != _RULES:
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(name, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _Loader(spec.loader, self)  # type: ignore[assignment]
                return spec
        return None


class _Loader:
    """Loads a module with its own loader, which is then restored."""

    def __init__(self, loader: Any, watch: _Watch) -> None:
        self.loader = loader
        self.watch = watch

    def create_module(self, spec: Any) -> Any:
        return self.loader.create_module(spec)

    def exec_module(self, module: Any) -> None:
        module.__spec__.loader = module.__loader__ = self.loader
        self.loader.exec_module(module)
        sys.meta_path.remove(self.watch)
        _tell(module)
