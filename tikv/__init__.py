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


def __dir__() -> list[str]:
    return sorted([*__all__, *_OTHERS])


if TYPE_CHECKING:
    # Each under its own name once more, which is what makes it a name of this module to a strict checker.
    from tikv import arrays as arrays
    from tikv import blocks as blocks
    from tikv import compat as compat
    from tikv import dtypes as dtypes
    from tikv import errors as errors
    from tikv import integrations as integrations
    from tikv import kv_layer as kv_layer
    from tikv import launch as launch
    from tikv import ops as ops
    from tikv import qkv as qkv
    from tikv import reference as reference
    from tikv import roofline as roofline
    from tikv import runtime as runtime
    from tikv import spec as spec
    from tikv import torch_ops as torch_ops
    from tikv import variants as variants
    from tikv.arrays import CacheArray as CacheArray
    from tikv.attention import decode_attention as decode_attention
    from tikv.attention import merge_states as merge_states
    from tikv.attention import paged_decode_attention as paged_decode_attention
    from tikv.doctor import info as info
    from tikv.errors import ArchError as ArchError
    from tikv.errors import CacheFileError as CacheFileError
    from tikv.errors import CapacityError as CapacityError
    from tikv.errors import DTypeError as DTypeError
    from tikv.errors import OptionError as OptionError
    from tikv.errors import PositionError as PositionError
    from tikv.errors import ShapeError as ShapeError
    from tikv.errors import StaleRuntimeError as StaleRuntimeError
    from tikv.errors import TikvError as TikvError
    from tikv.graphs import GraphBuilder as GraphBuilder
    from tikv.graphs import compile_step as compile_step
    from tikv.kv_layer import ContiguousKVLayer as ContiguousKVLayer
    from tikv.kv_layer import PagedKVLayer as PagedKVLayer
    from tikv.ops import copy as copy
    from tikv.ops import copy_kv as copy_kv
    from tikv.ops import linearize as linearize
    from tikv.paged import PagedKVCacheStore as PagedKVCacheStore
    from tikv.plans import KVCacheAppendArgs as KVCacheAppendArgs
    from tikv.plans import KVCacheAppendDescriptor as KVCacheAppendDescriptor
    from tikv.plans import KVCacheAppendPlan as KVCacheAppendPlan
    from tikv.plans import append_ragged as append_ragged
    from tikv.pools import copy_blocks as copy_blocks
    from tikv.pools import gather_paged as gather_paged
    from tikv.pools import swap_blocks as swap_blocks
    from tikv.pools import write_slots as write_slots
    from tikv.qkv import NormRope as NormRope
    from tikv.qkv import write_qkv as write_qkv
    from tikv.quant import dequantize as dequantize
    from tikv.quant import quantize as quantize
    from tikv.runtime import init as init
    from tikv.store import KVCacheStore as KVCacheStore
    from tikv.variants import warmup as warmup
else:  # a checker that saw it would take any name for one of this module

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
