"""One row per storage dtype; everything else about a dtype is looked up here.

bfloat16 is carried as 16-bit words everywhere, since Taichi has no such type. No Taichi, no torch in this file.
"""

from __future__ import annotations

import functools
import sys
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from tikv.errors import DTypeError


@dataclass(frozen=True)
class DType:
    """A storage dtype: its public name, its short name in kernel names and messages, its NumPy type and bytes."""

    name: str
    short: str
    numpy: np.dtype[Any]
    dlpack: tuple[int, int]  # DLPack type code and bits

    @functools.cached_property
    def itemsize(self) -> int:
        """Bytes per element."""
        return self.numpy.itemsize

    def __reduce__(self) -> Any:
        return parse, (self.name, "unpickling")  # a copy, or an unpickled row, is the same object

    def __deepcopy__(self, memo: dict[int, Any]) -> DType:
        return self  # even a storage's own row, which `parse` does not know

    def __repr__(self) -> str:
        return self.name


float32 = DType("float32", "f32", np.dtype(np.float32), (2, 32))
float16 = DType("float16", "f16", np.dtype(np.float16), (2, 16))
bfloat16 = DType("bfloat16", "bf16", np.dtype(ml_dtypes.bfloat16), (4, 16))
float64 = DType("float64", "f64", np.dtype(np.float64), (2, 64))
float8_e4m3fn = DType("float8_e4m3fn", "e4m3", np.dtype(ml_dtypes.float8_e4m3fn), (10, 8))
float8_e5m2 = DType("float8_e5m2", "e5m2", np.dtype(ml_dtypes.float8_e5m2), (12, 8))
float8_e8m0fnu = DType("float8_e8m0fnu", "e8m0", np.dtype(ml_dtypes.float8_e8m0fnu), (14, 8))  # powers of two
int8 = DType("int8", "i8", np.dtype(np.int8), (0, 8))
int32 = DType("int32", "i32", np.dtype(np.int32), (0, 32))
int64 = DType("int64", "i64", np.dtype(np.int64), (0, 64))

FLOATS8 = (float8_e4m3fn, float8_e5m2)
FLOATS = (float32, float16, bfloat16, float64, *FLOATS8)
uint32 = DType("uint32", "u32", np.dtype(np.uint32), (1, 32))  # words of codes, see `formats`

INDICES = (int32, int64)
STORED = (*FLOATS, int8)
FP8 = {"fp8": float8_e4m3fn, "fp8_e4m3": float8_e4m3fn, "fp8_e5m2": float8_e5m2}  # as other libraries name them
ALL = (*STORED, *INDICES, uint32, float8_e8m0fnu)
QUANTIZABLE = (float32, float16, bfloat16)  # to int8, and with a scale to 8-bit floats
SCALES = (float16, float32)  # dtypes of int8's scales
GROUP_SCALES = (float16, float32, bfloat16)  # dtypes of the scales of groups of codes
ATTENDED = (float32, float16, bfloat16, *FLOATS8, int8)  # caches that attention reads

CONVERSIONS = {
    "float32": ("float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"),
    "float16": ("float16", "float8_e4m3fn", "float8_e5m2"),
    "bfloat16": ("bfloat16", "float32", "float8_e4m3fn", "float8_e5m2"),
    "float64": ("float64",),
    "float8_e4m3fn": ("float8_e4m3fn", "float32", "float16", "bfloat16"),
    "float8_e5m2": ("float8_e5m2", "float32", "float16", "bfloat16"),
    "int8": ("int8",),
    "int32": ("int32",),
    "int64": ("int64",),
    "uint32": ("uint32",),
    "float8_e8m0fnu": ("float8_e8m0fnu",),
}
"""The dtypes that a copy converts each source dtype to, without further options."""

APPENDED = {
    "float32": ("float32",),
    "float16": ("float32", "float16"),
    "bfloat16": ("float32", "bfloat16"),
    "float64": ("float64",),
    "float8_e4m3fn": ("float32", "float16", "bfloat16", "float8_e4m3fn"),
    "float8_e5m2": ("float32", "float16", "bfloat16", "float8_e5m2"),
    "int8": ("float32", "float16", "bfloat16"),
}
"""The dtypes that may be appended to a cache of each dtype; its keys are the dtypes that a cache may have."""

_INDEX_ARGUMENTS = (
    "batch_indices", "block_table", "block_tables", "cache_batch_idx", "cache_leftpad", "cache_offsets",
    "cache_seqlens", "context_lens", "cu_seqlens", "cu_seqlens_k_new", "cu_seqlens_q", "indices", "keep", "kv_indices",
    "kv_indptr", "lengths", "pages", "page_table", "pairs", "parents", "path", "positions", "rope_positions",
    "rotary_seqlens", "seq_lens", "seqs", "slot_mapping", "token_ids", "valid",
)  # fmt: skip
_ARGUMENTS: dict[str, tuple[DType, ...]] = {
    **dict.fromkeys(_INDEX_ARGUMENTS, INDICES),
    **dict.fromkeys(("q", "qkv", "x", "out_a", "out_b"), QUANTIZABLE),
    **dict.fromkeys(("k", "v", "k_new", "v_new", "key", "value"), FLOATS),
    **dict.fromkeys(("k_scale", "v_scale", "scale", "scales"), (*SCALES, *GROUP_SCALES[2:])),
    **dict.fromkeys(("scores", "mass", "lse", "lse_a", "lse_b", "cos", "sin", "q_weight", "k_weight"), (float32,)),
    **dict.fromkeys(("sink_logits", "alibi_slopes"), (float32,)),
    **dict.fromkeys(("least", "greatest"), (*QUANTIZABLE, *FLOATS8)),
    "dequantize q": (int8,),
    "rotate k": (*QUANTIZABLE, *FLOATS8, int8),
}
"""What an argument may have, by its name, or by operation and name if the operation differs from the others."""


def of_argument(name: str, operation: str) -> tuple[DType, ...]:
    """The dtypes that an argument may have; those of caches for a name that says nothing else.

    Examples:
        >>> of_argument("indices", "decode_attention"), of_argument("k_cache", "copy_kv") == STORED
        ((int32, int64), True)
    """
    return _ARGUMENTS.get(f"{operation} {name}") or _ARGUMENTS.get(name, STORED)


_BY_NAME: dict[str, DType] = {name: row for row in ALL for name in (row.name, row.short)}
_BY_NAME |= {"fp16": float16, "bf16": bfloat16, **FP8}
_BY_NUMPY: dict[Any, DType] = {row.numpy: row for row in ALL}
_BY_DLPACK: dict[tuple[int, int], DType] = {row.dlpack: row for row in ALL}


def of_numpy(dtype: np.dtype[Any]) -> DType | None:
    """The row of a NumPy dtype in native byte order, or None."""
    return _BY_NUMPY.get(dtype)


def of_size(itemsize: int) -> DType | None:
    """A row with elements of so many bytes, for code that moves bits without reading numbers; None if no row has."""
    return {1: int8, 2: float16, 4: int32, 8: int64}.get(itemsize)


def of_dlpack(code: int, bits: int) -> DType | None:
    """The row of a DLPack type code and width, or None."""
    return _BY_DLPACK.get((code, bits))


def of_torch(dtype: Any) -> DType | None:
    """The row of a torch dtype, found by its name, so that torch need not be imported."""
    return _BY_NAME.get(str(dtype).removeprefix("torch."))


@functools.cache
def to_torch(name: str) -> Any:
    """The torch dtype of a row's name; torch must have been imported."""
    return getattr(sys.modules["torch"], name)


def find(dtype: Any) -> DType | None:
    """The row that a user's argument means, as in `parse`; None if no row has that name.

    Examples:
        >>> find("fp8"), find(np.int8), find("int4")
        (float8_e4m3fn, int8, None)
    """
    if isinstance(dtype, DType):
        return dtype
    if isinstance(dtype, str):
        return _BY_NAME.get(dtype.removeprefix("torch."))
    if type(dtype).__module__ == "torch":
        return of_torch(dtype)
    if dtype is None:  # which NumPy takes for float64
        return None
    try:
        return of_numpy(np.dtype(dtype))
    except TypeError:
        return None


def parse(dtype: Any, operation: str, also: str = "", offered: tuple[DType, ...] = STORED) -> DType:
    """The row that a user's `dtype` argument means: a name, a NumPy or ml_dtypes type, a torch dtype or a row.

    ``offered`` is what the caller may use, for the error; ``also`` ends the list.

    Raises:
        DTypeError: no row has that name.

    Examples:
        >>> parse("bfloat16", "example"), parse(np.float16, "example")
        (bfloat16, float16)
    """
    parsed = find(dtype)
    if parsed is None:
        names = ", ".join(row.name for row in offered)
        raise DTypeError(f"{operation}: unknown dtype {dtype!r}. Use one of {names}{also}.")
    return parsed


NUMPY_WORDS = {
    "u8": np.uint8, "u16": np.uint16, "u32": np.uint32, "u64": np.uint64,
    "i8": np.int8, "i16": np.int16, "i32": np.int32, "i64": np.int64,
    "f16": np.float16, "f32": np.float32, "f64": np.float64,
}  # fmt: skip
"""The NumPy type of each word that a kernel's array may have, by Taichi's name."""
