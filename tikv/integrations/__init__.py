"""Drop-in caches for model libraries. Each module imports its library, and is itself imported on first use."""

from __future__ import annotations

import importlib
from typing import Any

MODULES = ("torch_ops", "transformers")


def __getattr__(name: str) -> Any:
    if name not in MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module(f"{__name__}.{name}")
