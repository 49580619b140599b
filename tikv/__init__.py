"""tikv: the KV-cache op library for transformer research models. One Taichi source for Metal, CUDA, Vulkan and CPU.

Importing it starts nothing; the first operation attaches to the Taichi you started, or starts one.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOME = {
    "init": "runtime",
    "info": "doctor",
    "copy": "ops",
    "copy_kv": "ops",
    "linearize": "ops",
    "append_ragged": "plans",
    "KVCacheAppendDescriptor": "plans",
    "KVCacheAppendArgs": "plans",
    "KVCacheAppendPlan": "plans",
    "write_slots": "pools",
    "gather_paged": "pools",
    "copy_blocks": "pools",
    "swap_blocks": "pools",
    "NormRope": "qkv",
    "write_qkv": "qkv",
    "quantize": "quant",
    "dequantize": "quant",
    "warmup": "variants",
    "decode_attention": "attention",
    "paged_decode_attention": "attention",
    "merge_states": "attention",
    "KVCacheStore": "store",
    "PagedKVCacheStore": "paged",
    "ContiguousKVLayer": "kv_layer",
    "PagedKVLayer": "kv_layer",
    "GraphBuilder": "graphs",
    "compile_step": "graphs",
    "CacheArray": "arrays",
    "TikvError": "errors",
    "ShapeError": "errors",
    "DTypeError": "errors",
    "OptionError": "errors",
    "CapacityError": "errors",
    "PositionError": "errors",
    "ArchError": "errors",
    "StaleRuntimeError": "errors",
    "CacheFileError": "errors",
}
_MODULES = (
    "arrays",
    "blocks",
    "dtypes",
    "errors",
    "kv_layer",
    "launch",
    "ops",
    "qkv",
    "reference",
    "roofline",
    "runtime",
    "spec",
    "variants",
)
# Found as the others are, but not by a star import: what is in them needs torch, transformers or nothing.
_OTHERS = ("compat", "integrations", "torch_ops")

__all__ = ["__version__", *_HOME, *_MODULES]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        value = getattr(importlib.import_module(f"tikv.{_HOME[name]}"), name)
    elif name in _MODULES or name in _OTHERS:
        try:
            value = importlib.import_module(f"tikv.{name}")
        except ModuleNotFoundError as error:  # as an AttributeError, which is what hasattr and inspect expect
            raise AttributeError(f"tikv.{name} needs {error.name}, which is not installed") from error
    else:
        raise AttributeError(f"module 'tikv' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, *_OTHERS])


if TYPE_CHECKING:
    from tikv import (
        arrays,
        blocks,
        compat,
        dtypes,
        errors,
        integrations,
        kv_layer,
        launch,
        ops,
        qkv,
        reference,
        roofline,
        runtime,
        spec,
        torch_ops,
        variants,
    )
    from tikv.arrays import CacheArray
    from tikv.attention import decode_attention, merge_states, paged_decode_attention
    from tikv.doctor import info
    from tikv.errors import (
        ArchError,
        CacheFileError,
        CapacityError,
        DTypeError,
        OptionError,
        PositionError,
        ShapeError,
        StaleRuntimeError,
        TikvError,
    )
    from tikv.graphs import GraphBuilder, compile_step
    from tikv.kv_layer import ContiguousKVLayer, PagedKVLayer
    from tikv.ops import copy, copy_kv, linearize
    from tikv.paged import PagedKVCacheStore
    from tikv.plans import KVCacheAppendArgs, KVCacheAppendDescriptor, KVCacheAppendPlan, append_ragged
    from tikv.pools import copy_blocks, gather_paged, swap_blocks, write_slots
    from tikv.qkv import NormRope, write_qkv
    from tikv.quant import dequantize, quantize
    from tikv.runtime import init
    from tikv.store import KVCacheStore
    from tikv.variants import warmup
