"""Peers' own function names, argument names, argument orders and results, on every back end of this library.

Modules are named after what they stand in for: `vllm`, `flashinfer`, `flash_attn`, `flash_attn_interface`, which is
flash-attention 3's, and `mlx`. An option that is not offered raises `tikv.OptionError` with its name; nothing is
ignored silently. A call that does not fit raises a `tikv.TikvError` before anything is written, also where it would
attend after it has written.
"""

from __future__ import annotations

import importlib
from typing import Any

from tikv import opaque

MODULES = ("flash_attn", "flash_attn_interface", "flashinfer", "mlx", "vllm")


def __getattr__(name: str) -> Any:
    if name not in MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = importlib.import_module(f"{__name__}.{name}")
    opaque.mark()
    return found
