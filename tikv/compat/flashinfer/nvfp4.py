"""FlashInfer's pages in nvfp4: bytes of two codes each, and an array with the scales of their groups."""

from __future__ import annotations

from typing import Any, NamedTuple

from tikv import dtypes
from tikv.arrays import ArrayView, describe, is_contiguous, view_bits
from tikv.compat.flashinfer.pools import pools_of
from tikv.compat.indices import refuse_option
from tikv.dtypes import DType
from tikv.errors import DTypeError, ShapeError
from tikv.formats import GROUP_FORMATS
from tikv.ops.quantized_arrays import Quantized


class CodePools(NamedTuple):
    """Pools of keys and values in nvfp4, of which each page is every so many blocks.

    If keys and values lie in one array, page by page, the blocks of both are numbered together: the keys of page 2 are
    block 4, and its values are block 4 of a pool that starts one block later.
    """

    k: Quantized
    v: Quantized
    every: int


def is_uint8(dtype: Any) -> bool:
    """Whether this names the bytes of a library, in which FlashInfer stores nvfp4."""
    return str(getattr(dtype, "__name__", dtype)).rpartition(".")[2] == "uint8"


def code_pools(
    operation: str, paged_kv_cache: Any, kv_cache_sf: Any, layout: str, factors: tuple[float, float] = (1.0, 1.0)
) -> CodePools:
    """Pages of codes and scales of groups as pools; `factors` are the scales of all keys and of all values.

    Raises:
        ShapeError, DTypeError: their arrays do not fit each other.
        OptionError: their layout is HND.
    """
    if layout != "NHD":
        refuse_option(operation, kv_layout=(layout, "'NHD' for pages in nvfp4"))
    for dtype in _dtypes_of(paged_kv_cache):
        if not is_uint8(dtype):
            raise DTypeError(
                f"{operation}: kv_cache_sf is for pages in nvfp4, which are uint8, and the pages are {dtype}. Leave it "
                "out, or pass such pages."
            )
    for dtype in _dtypes_of(kv_cache_sf):
        if not is_uint8(dtype) and not str(dtype).endswith("float8_e4m3fn"):
            raise DTypeError(f"{operation}: kv_cache_sf is {dtype}; it must be float8_e4m3fn, or its bits in uint8.")
    pairs = zip(*(pools_of(a, layout, operation, view_bits) for a in (paged_kv_cache, kv_cache_sf)), strict=True)
    pools = [_as_words(operation, name, *pair) for name, pair in zip("kv", pairs, strict=True)]
    every = {_every(codes, scales) for codes, scales in pools}
    if len(every) > 1 or None in every:
        shown = " and ".join(f"{a.strides}" for pair in pools for a in pair)
        raise ShapeError(
            f"{operation}: the strides of pages and of scales are {shown}. Pass keys and values in one array each, "
            "without gaps, or both in one array of pages and one of scales."
        )
    step, format, made = every.pop() or 1, GROUP_FORMATS["nvfp4"], []
    for (codes, scales), factor in zip(pools, factors, strict=True):
        if step > 1:
            codes, scales = (_each_block(a, step) for a in (codes, scales))
        shape = (*codes.shape[:-1], 8 * codes.shape[-1])
        made.append(Quantized(codes, scales, None, format.scaled(factor), shape))
    return CodePools(made[0], made[1], step)


def written_pools(
    operation: str, paged_kv_cache: Any, kv_cache_sf: Any, layout: str, factors: tuple[float, float]
) -> tuple[Quantized, Quantized]:
    """`code_pools` that can be written.

    Raises:
        ShapeError, DTypeError, OptionError: as there, or the scales of keys and values lie in one array.
    """
    pools = code_pools(operation, paged_kv_cache, kv_cache_sf, layout, factors)
    if pools.every > 1:
        raise ShapeError(
            f"{operation}: the scales of keys and values lie in one array, which can be read only. Pass kv_cache_sf as "
            "a pair of contiguous arrays."
        )
    return pools.k, pools.v


def _dtypes_of(arrays: Any) -> list[Any]:
    """The dtypes of an array or a pair; of any other object, the name of its type."""
    pair = arrays if isinstance(arrays, tuple | list) else (arrays,)
    return [getattr(array, "dtype", type(array).__name__) for array in pair]


def _as_words(operation: str, name: str, codes: ArrayView, scales: ArrayView) -> tuple[ArrayView, ArrayView]:
    """Codes as words of 4 bytes, and scales as 8-bit floats.

    Raises:
        ShapeError: they do not fit each other, or rows do not start at words.
    """
    *lead, columns = codes.shape
    if scales.shape != (*lead, columns // 8) or columns % 8:
        raise ShapeError(
            f"{operation}: pages of {name} are {describe(codes)} and their scales {describe(scales)}; two codes lie in "
            "a byte, and 16 codes have one scale."
        )
    steps = codes.strides
    if steps[-1] != 1 or any(step % 4 for step in steps[:-1]) or (codes.ptr + codes.offset) % 4:
        raise ShapeError(
            f"{operation}: pages of {name} are {describe(codes)} with strides {steps}; rows in nvfp4 are read as words "
            "of 4 bytes. Pass pages whose rows start at such words."
        )
    words = _seen_as(codes, dtypes.uint32, (*lead, columns // 4), (*(step // 4 for step in steps[:-1]), 1))
    return words, _seen_as(scales, dtypes.float8_e4m3fn, scales.shape, scales.strides)


def _seen_as(a: ArrayView, dtype: DType, shape: tuple[int, ...], strides: tuple[int, ...]) -> ArrayView:
    """The same memory with elements of another dtype."""
    return ArrayView(
        a.ptr, shape, strides, dtype, a.device, writable=a.writable, handle=a.handle, offset=a.offset, owner=a.owner
    )


def _every(codes: ArrayView, scales: ArrayView) -> int | None:
    """1 if scales lie block by block, 2 if every other block of both arrays belongs to others; None for neither."""
    if is_contiguous(scales):
        return 1
    apart = [a.strides[0] == 2 * a.shape[1] * a.strides[1] for a in (codes, scales)]
    return 2 if all(apart) and is_contiguous(scales.part(0, 0, 1)) else None


def _each_block(a: ArrayView, every: int) -> ArrayView:
    """A pool with the blocks between its pages, from its first page to its last one."""
    blocks = max(0, every * (a.shape[0] - 1) + 1)
    return a.restrided((blocks, *a.shape[1:]), (a.strides[0] // every, *a.strides[1:]))
