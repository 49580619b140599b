"""Functions of other libraries under their own names, with their argument order and results, on every back end.

Each module is named after the library that it stands in for: `vllm`, `flashinfer`, `flash_attn`,
`flash_attn_interface` (flash-attention 3) and `mlx`. An option that is not supported raises `tikv.OptionError`, which
names it; nothing is ignored silently. A call whose arguments do not fit raises a `tikv.TikvError` before anything is
written, even where it would write first and attend afterwards.
"""

from __future__ import annotations

import importlib
from typing import Any

from tikv import opaque

MODULES = ("flash_attn", "flash_attn_interface", "flashinfer", "mlx", "vllm")


def __getattr__(name: str) -> Any:
    if name not in MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f"{__name__}.{name}")
    opaque.mark()
    return module
