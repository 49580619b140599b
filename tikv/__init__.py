"""tikv: the KV-cache op library for transformer research models, in Taichi, for CUDA, Vulkan, Metal and the CPU.

Copies, writes and most formats are one source for every back end; CPUs and NVIDIA GPUs have attention of their own.
Importing it starts nothing; the first operation attaches to the Taichi that you started, or starts one. Public names
are loaded on first use: type checkers and editors read the imports below, and Python finds the same ones in `_NAMES`.
"""

import importlib
import sys
from typing import TYPE_CHECKING

from tikv import forks as _forks  # it watches from here on
from tikv import opaque as _opaque

__version__ = "0.4.0"

if TYPE_CHECKING:
    from tikv import compat as compat
    from tikv import distributed as distributed
    from tikv import dtypes as dtypes
    from tikv import errors as errors
    from tikv import integrations as integrations
    from tikv import reference as reference
    from tikv.arrays import CacheArray as CacheArray
    from tikv.compat.seeds import variants as variants
    from tikv.compat.seeds.append_plan import KVCacheAppendArgs as KVCacheAppendArgs
    from tikv.compat.seeds.append_plan import KVCacheAppendDescriptor as KVCacheAppendDescriptor
    from tikv.compat.seeds.append_plan import KVCacheAppendPlan as KVCacheAppendPlan
    from tikv.compat.seeds.layers import ContiguousKVLayer as ContiguousKVLayer
    from tikv.compat.seeds.layers import KVPool as KVPool
    from tikv.compat.seeds.layers import PagedKVLayer as PagedKVLayer
    from tikv.errors import ArchError as ArchError
    from tikv.errors import CacheFileError as CacheFileError
    from tikv.errors import CapacityError as CapacityError
    from tikv.errors import CopyError as CopyError
    from tikv.errors import DTypeError as DTypeError
    from tikv.errors import GroupError as GroupError
    from tikv.errors import MissingPackageError as MissingPackageError
    from tikv.errors import OptionError as OptionError
    from tikv.errors import PositionError as PositionError
    from tikv.errors import ShapeError as ShapeError
    from tikv.errors import StaleRuntimeError as StaleRuntimeError
    from tikv.errors import TikvError as TikvError
    from tikv.formats import Quant as Quant
    from tikv.graphs.builder import GraphBuilder as GraphBuilder
    from tikv.integrations import torch_ops as torch_ops
    from tikv.integrations.torch_graphs import capture as capture
    from tikv.launch import use_stream as use_stream
    from tikv.ops.attention import decode_attention as decode_attention
    from tikv.ops.attention import merge_states as merge_states
    from tikv.ops.attention import paged_decode_attention as paged_decode_attention
    from tikv.ops.blocks import copy_blocks as copy_blocks
    from tikv.ops.blocks import swap_blocks as swap_blocks
    from tikv.ops.budget import budget as budget
    from tikv.ops.compact import compact as compact
    from tikv.ops.copy import copy as copy
    from tikv.ops.copy import copy_kv as copy_kv
    from tikv.ops.copy import linearize as linearize
    from tikv.ops.page_scores import page_scores as page_scores
    from tikv.ops.page_scores import summarize_pages as summarize_pages
    from tikv.ops.paged import gather_paged as gather_paged
    from tikv.ops.paged import write_slots as write_slots
    from tikv.ops.quantize import dequantize as dequantize
    from tikv.ops.quantize import quantize as quantize
    from tikv.ops.quantize_tiles import QuantizedTiles as QuantizedTiles
    from tikv.ops.quantized_arrays import Quantized as Quantized
    from tikv.ops.ragged import append_ragged as append_ragged
    from tikv.ops.rope import NormRope as NormRope
    from tikv.ops.rotate import Rope as Rope
    from tikv.ops.rotate import rotate as rotate
    from tikv.ops.select import select as select
    from tikv.ops.write_qkv import norm_rope as norm_rope
    from tikv.ops.write_qkv import write_qkv as write_qkv
    from tikv.runtime import init as init
    from tikv.stores.pool import PagedKVCacheStore as PagedKVCacheStore
    from tikv.stores.pools.blocks import BlockPool as BlockPool
    from tikv.stores.step import compile_step as compile_step
    from tikv.stores.store import KVCacheStore as KVCacheStore
    from tikv.stores.streaming_heads import StreamingHeadsStore as StreamingHeadsStore
    from tikv.tools.doctor import info as info
    from tikv.tools.warmup import warmup as warmup

# Public names, by the module that defines them or the package that contains them.
_NAMES = {
    "tikv": ("compat", "distributed", "dtypes", "errors", "integrations", "reference"),
    "tikv.arrays": ("CacheArray",),
    "tikv.compat.seeds": ("variants",),
    "tikv.compat.seeds.append_plan": ("KVCacheAppendArgs", "KVCacheAppendDescriptor", "KVCacheAppendPlan"),
    "tikv.compat.seeds.layers": ("ContiguousKVLayer", "KVPool", "PagedKVLayer"),
    "tikv.errors": (
        "ArchError",
        "CacheFileError",
        "CapacityError",
        "CopyError",
        "DTypeError",
        "GroupError",
        "MissingPackageError",
        "OptionError",
        "PositionError",
        "ShapeError",
        "StaleRuntimeError",
        "TikvError",
    ),
    "tikv.formats": ("Quant",),
    "tikv.graphs.builder": ("GraphBuilder",),
    "tikv.integrations": ("torch_ops",),
    "tikv.integrations.torch_graphs": ("capture",),
    "tikv.launch": ("use_stream",),
    "tikv.ops.attention": ("decode_attention", "merge_states", "paged_decode_attention"),
    "tikv.ops.blocks": ("copy_blocks", "swap_blocks"),
    "tikv.ops.budget": ("budget",),
    "tikv.ops.compact": ("compact",),
    "tikv.ops.copy": ("copy", "copy_kv", "linearize"),
    "tikv.ops.page_scores": ("page_scores", "summarize_pages"),
    "tikv.ops.paged": ("gather_paged", "write_slots"),
    "tikv.ops.quantize": ("dequantize", "quantize"),
    "tikv.ops.quantized_arrays": ("Quantized",),
    "tikv.ops.quantize_tiles": ("QuantizedTiles",),
    "tikv.ops.ragged": ("append_ragged",),
    "tikv.ops.rope": ("NormRope",),
    "tikv.ops.rotate": ("Rope", "rotate"),
    "tikv.ops.select": ("select",),
    "tikv.ops.write_qkv": ("norm_rope", "write_qkv"),
    "tikv.runtime": ("init",),
    "tikv.stores.pool": ("PagedKVCacheStore",),
    "tikv.stores.pools.blocks": ("BlockPool",),
    "tikv.stores.step": ("compile_step",),
    "tikv.stores.store": ("KVCacheStore",),
    "tikv.stores.streaming_heads": ("StreamingHeadsStore",),
    "tikv.tools.doctor": ("info",),
    "tikv.tools.warmup": ("warmup",),
}

if not TYPE_CHECKING:  # else a type checker would accept any name
    _HOMES = {name: home for home, names in _NAMES.items() for name in names}
    # Modules that need torch are left out of a star import.
    _APART = ("capture", "compat", "distributed", "integrations", "torch_ops")

    __all__ = ["__version__", *(name for name in _HOMES if name not in _APART)]

    def __dir__() -> list[str]:
        return sorted(["__version__", *_HOMES])

    def __getattr__(name: str) -> object:
        if name not in _HOMES:
            where = ". It is in tikv.integrations.transformers" if name == "TikvCache" else ""
            raise AttributeError(f"module 'tikv' has no attribute {name!r}{where}")
        home = _HOMES[name]
        try:
            holder = importlib.import_module(home)
            value = vars(holder)[name] if name in vars(holder) else importlib.import_module(f"{home}.{name}")
        except ImportError as error:
            if sys._getframe(1).f_code.co_name == "_handle_fromlist":  # `from tikv import` would lose the reason
                raise
            raise AttributeError(str(error)) from None  # which is what hasattr and inspect expect
        globals()[name] = value
        _opaque.mark()
        return value


_opaque.watch()
