"""Peers' own function names, argument names, argument orders and results, on every back end of this library.

`vllm`, `flashinfer`, `flash_attn` and `mlx` are modules named after what they stand in for. An option that is not
offered raises `tikv.OptionError` with its name; nothing is ignored silently.
"""

from __future__ import annotations

import importlib
from typing import Any

from tikv import opaque

MODULES = ("flash_attn", "flashinfer", "mlx", "vllm")


def __getattr__(name: str) -> Any:
    if name not in MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = importlib.import_module(f"{__name__}.{name}")
    opaque.mark()
    return found
