"""The seed's named copies, one function for each row of `spec.VARIANTS`, and `warmup`, which compiles them early.

Each takes the seed's arrays in the seed's order, and by keyword the scalars that the arrays do not tell. All of them
are the contiguous write of `ops`; a name fixes dtypes, layouts, the number of streams and the meaning of a position.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tikv import arrays, dtypes, runtime
from tikv.arrays import Array, ArrayView, describe, view
from tikv.compat.seeds.spec import VARIANTS, CopySpec
from tikv.errors import DTypeError, OptionError, PositionError, ShapeError
from tikv.ops import checks, copy

# What the functions call the source and the cache of each stream, in turn, and the numbers of each mapping.
_ARRAY_NAMES = {1: ("src", "cache"), 2: ("src_k", "cache_k", "src_v", "cache_v")}
_RANGE_NAMES = {
    "flag": checks.RangeNames("write_pos", "n_new", sliding="is_sliding=True"),
    "slot": checks.RangeNames("seq_pos"),
    "ring": checks.RangeNames("seq_pos_start", "n_tokens", "src_tok_offset"),
}


def _write(
    spec: CopySpec,
    arrays: Sequence[ArrayView],
    position: int,
    window: int | None,
    num_tokens: int | None = None,
    src_offset: int = 0,
) -> None:
    """The contiguous write of `ops`, with this variant's layouts and names."""
    options = copy.CopyOptions(window, num_tokens, src_offset, spec.src_layout, spec.cache_layout)
    copy.write(spec.name, _ARRAY_NAMES[spec.streams], arrays, position, options, _RANGE_NAMES[spec.mapping])


def _typed(spec: CopySpec, *operands: Any) -> list[tuple[str, ArrayView]]:
    """The arrays of a call by name, source and cache of each stream in turn; checks the dtypes that `spec` fixes."""
    views = []
    for i, (name, array) in enumerate(zip(_ARRAY_NAMES[spec.streams], operands, strict=True)):
        a, dtype = view(array, name, spec.name), spec.cache_dtype if i % 2 else spec.src_dtype
        if a.dtype.name != dtype:
            raise DTypeError(
                f"{spec.name}: {name} is {describe(a)}; this variant takes {dtype}. Use tikv.copy for other dtypes."
            )
        views.append((name, a))
    return views


def _has_slots(cache: ArrayView, axis: int, name: str, operation: str) -> None:
    if cache.shape[axis] == 0:
        raise ShapeError(f"{operation}: {name} ({describe(cache)}) has no slots to wrap into. Use a capacity above 0.")


def _rows(name: str, src: Array, cache: Array, write_pos: int, is_sliding: bool, n_new: int | None) -> None:
    spec = VARIANTS[name]
    rows = []
    for (array_name, a), shape in zip(_typed(spec, src, cache), ("(n_new, row)", "(capacity, row)"), strict=True):
        checks.rank(a, (2,), array_name, shape, name)
        rows.append(a.restrided((a.shape[0], 1, a.shape[1]), (a.strides[0], a.shape[1], a.strides[1])))
    if is_sliding:
        _has_slots(rows[1], 0, "cache", name)
    _write(spec, rows, write_pos, rows[1].shape[0] if is_sliding else None, n_new)


def _token(name: str, seq_pos: int, *operands: Any) -> None:
    spec = VARIANTS[name]
    arrays = _typed(spec, *operands)
    shaped = []
    for (src_name, src), (cache_name, cache) in zip(arrays[::2], arrays[1::2], strict=True):
        checks.rank(cache, (3,), cache_name, "(H, capacity, D)", name)
        heads, _, width = cache.shape
        checks.rank(src, (1, 2), src_name, "(H, D) or (H*D,)", name)
        if src.ndim == 1:
            detail = f"{src_name}: {describe(src)}, {cache_name}: {describe(cache)}"
            checks.extent(src.shape[0], heads * width, f"the length of {src_name}", name, detail)
            src = src.restrided((heads, width), (width * src.strides[0], src.strides[0]))
        shaped += [src.batch_of_one(), cache]
    position = checks.integer(seq_pos, "seq_pos", name)
    capacity = min(cache.shape[1] for cache in shaped[1::2])
    if position >= capacity:
        raise PositionError(
            f"{name}: seq_pos={position} is not a slot of a cache with capacity {capacity}. "
            f"This variant takes the slot itself; wrap an absolute position with % {capacity}, or use tikv.copy "
            f"with window={capacity}."
        )
    _write(spec, shaped, position, None)


def _sequence(name: str, seq_pos_start: int, n_tokens: int | None, src_tok_offset: int, *operands: Any) -> None:
    spec = VARIANTS[name]
    arrays = _typed(spec, *operands)
    for cache_name, cache in arrays[1::2]:
        checks.rank(cache, (3,), cache_name, "(H, capacity, D)", name)
        _has_slots(cache, 1, cache_name, name)
    window = arrays[1][1].shape[1]
    _write(spec, [a for _, a in arrays], seq_pos_start, window, n_tokens, src_tok_offset)


def kv_cache_copy(
    src: Array, cache: Array, *, write_pos: int, is_sliding: bool = False, n_new: int | None = None
) -> None:
    """Append rows of K or V to a token-major bfloat16 cache, linear or ring.

    Args:
        src: (n, row) bfloat16; ``row`` is heads times width.
        cache: (capacity, row) bfloat16.
        write_pos: absolute position of the first row, wrapped or not wrapped.
        is_sliding: the cache is a ring of ``capacity`` slots.
        n_new: rows to append; None for all.

    Raises:
        ShapeError, DTypeError, CapacityError, PositionError: as `tikv.copy`.

    Exactness: bit-exact.
    Cost: as `tikv.copy`.
    Source: ``dispatch_kv_cache_copy``.

    Examples:
        >>> import ml_dtypes, numpy as np, tikv
        >>> cache = np.zeros((4, 2), ml_dtypes.bfloat16)
        >>> tikv.variants.kv_cache_copy(np.ones((3, 2), ml_dtypes.bfloat16), cache, write_pos=6, is_sliding=True)
        >>> cache[:, 0].astype(int).tolist()
        [1, 0, 1, 1]
    """
    _rows("kv_cache_copy", src, cache, write_pos, is_sliding, n_new)


def kv_cache_copy_f32(
    src: Array, cache: Array, *, write_pos: int, is_sliding: bool = False, n_new: int | None = None
) -> None:
    """`kv_cache_copy` for float32.

    Examples:
        >>> import numpy as np, tikv
        >>> cache = np.zeros((4, 2), np.float32)
        >>> tikv.variants.kv_cache_copy_f32(np.ones((2, 2), np.float32), cache, write_pos=1)
        >>> cache[:, 0].tolist()
        [0.0, 1.0, 1.0, 0.0]
    """
    _rows("kv_cache_copy_f32", src, cache, write_pos, is_sliding, n_new)


def kv_cache_copy_batch_f32(src: Array, cache: Array, *, seq_pos: int) -> None:
    """Write one token of all heads into slot ``seq_pos`` of a head-major float32 cache.

    Args:
        src: (H, D) or (H*D,) float32.
        cache: (H, capacity, D) float32.
        seq_pos: the slot, already wrapped, so less than the capacity.

    Raises:
        PositionError: ``seq_pos`` is not a slot.
        ShapeError, DTypeError: as `tikv.copy`.

    Exactness: bit-exact.
    Cost: as `tikv.copy`.
    Source: ``dispatch_kv_cache_copy_batch_f32``.

    Examples:
        >>> import numpy as np, tikv
        >>> cache = np.zeros((2, 3, 1), np.float32)
        >>> tikv.variants.kv_cache_copy_batch_f32(np.array([5, 6], np.float32), cache, seq_pos=1)
        >>> cache[:, :, 0].tolist()
        [[0.0, 5.0, 0.0], [0.0, 6.0, 0.0]]
    """
    _token("kv_cache_copy_batch_f32", seq_pos, src, cache)


def kv_cache_copy_batch_f32_to_f16(src: Array, cache: Array, *, seq_pos: int) -> None:
    """`kv_cache_copy_batch_f32` into float16, rounding to nearest even."""
    _token("kv_cache_copy_batch_f32_to_f16", seq_pos, src, cache)


def kv_cache_copy_batch_f32_kv_dual(
    src_k: Array, src_v: Array, cache_k: Array, cache_v: Array, *, seq_pos: int
) -> None:
    """`kv_cache_copy_batch_f32` for K and V in one launch."""
    _token("kv_cache_copy_batch_f32_kv_dual", seq_pos, src_k, cache_k, src_v, cache_v)


def kv_cache_copy_batch_f32_to_f16_kv_dual(
    src_k: Array, src_v: Array, cache_k: Array, cache_v: Array, *, seq_pos: int
) -> None:
    """`kv_cache_copy_batch_f32_to_f16` for K and V in one launch."""
    _token("kv_cache_copy_batch_f32_to_f16_kv_dual", seq_pos, src_k, cache_k, src_v, cache_v)


def kv_cache_copy_seq_f32(
    src: Array, cache: Array, *, seq_pos_start: int, n_tokens: int | None = None, src_tok_offset: int = 0
) -> None:
    """Write many tokens of all heads into a head-major float32 ring of ``capacity`` slots; the newest survive.

    Args:
        src: (T, H, D) float32, token-major.
        cache: (H, capacity, D) float32.
        seq_pos_start: absolute position of the first row copied.
        n_tokens: rows to copy; None for all from ``src_tok_offset`` on.
        src_tok_offset: first row to copy.

    Raises:
        ShapeError, DTypeError, PositionError: as `tikv.copy`.

    Exactness: bit-exact.
    Cost: as `tikv.copy`.
    Source: ``dispatch_kv_cache_copy_seq_f32``.

    Examples:
        >>> import numpy as np, tikv
        >>> cache = np.zeros((1, 4, 1), np.float32)
        >>> tikv.variants.kv_cache_copy_seq_f32(np.arange(8, dtype=np.float32).reshape(8, 1, 1), cache, seq_pos_start=0)
        >>> cache.ravel().tolist()
        [4.0, 5.0, 6.0, 7.0]
    """
    _sequence("kv_cache_copy_seq_f32", seq_pos_start, n_tokens, src_tok_offset, src, cache)


def kv_cache_copy_seq_f32_to_f16(
    src: Array, cache: Array, *, seq_pos_start: int, n_tokens: int | None = None, src_tok_offset: int = 0
) -> None:
    """`kv_cache_copy_seq_f32` into float16, rounding to nearest even."""
    _sequence("kv_cache_copy_seq_f32_to_f16", seq_pos_start, n_tokens, src_tok_offset, src, cache)


def kv_cache_copy_seq_bf16(
    src: Array, cache: Array, *, seq_pos_start: int, n_tokens: int | None = None, src_tok_offset: int = 0
) -> None:
    """`kv_cache_copy_seq_f32` from bfloat16; the widening is exact."""
    _sequence("kv_cache_copy_seq_bf16", seq_pos_start, n_tokens, src_tok_offset, src, cache)


def kv_cache_copy_seq_f32_dual(
    src_k: Array,
    src_v: Array,
    cache_k: Array,
    cache_v: Array,
    *,
    seq_pos_start: int,
    n_tokens: int | None = None,
    src_tok_offset: int = 0,
) -> None:
    """`kv_cache_copy_seq_f32` for K and V in one launch."""
    _sequence("kv_cache_copy_seq_f32_dual", seq_pos_start, n_tokens, src_tok_offset, src_k, cache_k, src_v, cache_v)


def kv_cache_copy_seq_f32_to_f16_dual(
    src_k: Array,
    src_v: Array,
    cache_k: Array,
    cache_v: Array,
    *,
    seq_pos_start: int,
    n_tokens: int | None = None,
    src_tok_offset: int = 0,
) -> None:
    """`kv_cache_copy_seq_f32_to_f16` for K and V in one launch."""
    _sequence(
        "kv_cache_copy_seq_f32_to_f16_dual", seq_pos_start, n_tokens, src_tok_offset, src_k, cache_k, src_v, cache_v
    )


def kv_cache_copy_seq_bf16_to_bf16_head_major(
    src: Array, cache: Array, *, seq_pos_start: int, n_tokens: int | None = None, src_tok_offset: int = 0
) -> None:
    """`kv_cache_copy_seq_f32` for bfloat16 with a head-major source (H, T, D); bit-exact."""
    _sequence("kv_cache_copy_seq_bf16_to_bf16_head_major", seq_pos_start, n_tokens, src_tok_offset, src, cache)


def example_arrays(
    spec: CopySpec, *, tokens: int, heads: int, width: int, capacity: int
) -> tuple[list[Any], dict[str, Any]]:
    """Zero-filled arrays and keywords with which `variants` can call a row: for warm-up, tests and benches."""
    src_type, cache_type = (dtypes.parse(d, spec.name).numpy for d in (spec.src_dtype, spec.cache_dtype))
    flat = spec.mapping == "flag"
    if spec.tokens == "one":
        src_shape: tuple[int, ...] = (heads, width)
    elif flat:
        src_shape = (tokens, heads * width)
    else:
        src_shape = (tokens, heads, width) if spec.src_layout == "token_major" else (heads, tokens, width)
    cache_shape = (capacity, heads * width) if flat else (heads, capacity, width)
    sources = [np.zeros(src_shape, src_type) for _ in range(spec.streams)]
    caches = [np.zeros(cache_shape, cache_type) for _ in range(spec.streams)]
    return [*sources, *caches], {_RANGE_NAMES[spec.mapping].position: 0}


def warmup(*names: str, num_kv_heads: int = 8, head_dim: int = 128) -> list[str]:
    """Compile named variants now instead of at their first call; the seed's ``register``. Optional.

    Args:
        *names: names in `tikv.compat.seeds.spec.VARIANTS`; without names, all are compiled.
        num_kv_heads, head_dim: the shape to compile for; kernels are specialised on it.

    Returns:
        The names that were compiled.

    Raises:
        OptionError: an unknown name.

    Cost: 0.1 to 0.6 s per variant on first use; later uses read Taichi's offline cache.

    Examples:
        >>> import tikv
        >>> tikv.warmup("kv_cache_copy_f32", num_kv_heads=2, head_dim=8)
        ['kv_cache_copy_f32']
    """
    for name in names:
        if name not in VARIANTS:
            raise OptionError(f"warmup: unknown variant {name!r}. Use one of {', '.join(VARIANTS)}.")
    selected = list(names or VARIANTS)
    live = arrays.runtime_of()
    for name in selected:
        spec = VARIANTS[name]
        operands, keywords = example_arrays(spec, tokens=1, heads=num_kv_heads, width=head_dim, capacity=2)
        if not live.is_cpu:
            operands = [_device_array(a, live) for a in operands]
        globals()[name](*operands, **keywords)
    live.synchronize()
    return selected


def _device_array(array: Array, live: runtime.Runtime) -> arrays.CacheArray:
    dtype = dtypes.parse(array.dtype, "warmup")
    return arrays.CacheArray(arrays.new_array(array.shape, dtype, live), live)


__all__ = [*VARIANTS, "example_arrays", "warmup"]
