"""tikv: the KV-cache op library for transformer research models. One Taichi source for Metal, CUDA, Vulkan and CPU.

Importing it starts nothing; the first operation attaches to the Taichi you started, or starts one. The public names
stand in `__init__.pyi` and are loaded from there on first use.
"""

import importlib
import pathlib
import re
import sys

from tikv import forks as _forks  # it watches from here on
from tikv import opaque as _opaque

__version__ = "0.2.0"

# Each line `from tikv.ops.copy import copy as copy` of the stub, as {"copy": "tikv.ops.copy"}.
_LINE = re.compile(r"^from (\S+) import (\w+) as \2$", re.M)
_HOMES = {name: home for home, name in _LINE.findall(pathlib.Path(__file__).with_suffix(".pyi").read_text("utf-8"))}
# Modules that need torch are left out of a star import.
_APART = ("compat", "distributed", "integrations", "torch_ops")

__all__ = ["__version__", *(name for name in _HOMES if name not in _APART)]


def __dir__() -> list[str]:
    return sorted(["__version__", *_HOMES])


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'tikv' has no attribute {name!r}")
    home = _HOMES[name]
    try:
        holder = importlib.import_module(home)
        # A name is something that its home defines, or a module in it.
        value = vars(holder)[name] if name in vars(holder) else importlib.import_module(f"{home}.{name}")
    except ImportError as error:
        if sys._getframe(1).f_code.co_name == "_handle_fromlist":  # `from tikv import ...`, which would lose the reason
            raise
        raise AttributeError(str(error)) from None  # which is what hasattr and inspect expect
    globals()[name] = value
    _opaque.mark()
    return value


_opaque.watch()
