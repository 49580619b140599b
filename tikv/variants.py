"""The seed's named copies, one function a row of `spec.VARIANTS`, and `warmup`, which compiles them ahead of use.

Each takes the seed's arrays in the seed's order, and by keyword the scalars that arrays do not tell. They are all the
contiguous write of `ops`; what a name fixes is dtypes, layouts, the number of streams and how a position is read.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tikv import arrays, checks, dtypes, ops, runtime
from tikv.arrays import ArrayView, describe, view
from tikv.errors import DTypeError, OptionError, PositionError, ShapeError
from tikv.spec import VARIANTS, CopySpec


def _typed(
    spec: CopySpec, sources: tuple[Any, ...], caches: tuple[Any, ...]
) -> tuple[list[ArrayView], list[ArrayView]]:
    src_names = ("src",) if spec.streams == 1 else ("src_k", "src_v")
    cache_names = ("cache",) if spec.streams == 1 else ("cache_k", "cache_v")
    found = []
    for given, names, dtype in ((sources, src_names, spec.src_dtype), (caches, cache_names, spec.cache_dtype)):
        seen = [view(a, name, spec.name) for a, name in zip(given, names, strict=True)]
        for name, a in zip(names, seen, strict=True):
            if a.dtype.name != dtype:
                raise DTypeError(
                    f"{spec.name}: {name} is {describe(a)}; this variant takes {dtype}. Use tikv.copy for other dtypes."
                )
        found.append(seen)
    return found[0], found[1]


def _rows(
    operation: str, src: ArrayView, cache: ArrayView, *, is_sliding: bool, write_pos: int, n_new: int | None
) -> None:
    for name, a in (("src", src), ("cache", cache)):
        checks.rank(a, (2,), name, "(n_new, row)" if name == "src" else "(capacity, row)", operation)
    one_head = [a.moved((a.shape[0], 1, a.shape[1]), (a.strides[0], a.shape[1], a.strides[1])) for a in (src, cache)]
    window = cache.shape[0] if is_sliding else None
    ops.write(operation, (one_head[0],), (one_head[1],), write_pos, window, n_new, 0, "token_major", "token_major")


def _token(operation: str, sources: list[ArrayView], caches: list[ArrayView], seq_pos: int) -> None:
    shaped = []
    for src, cache in zip(sources, caches, strict=True):
        checks.rank(cache, (3,), "cache", "(H, capacity, D)", operation)
        heads, capacity, width = cache.shape
        checks.rank(src, (1, 2), "src", "(H, D) or (H*D,)", operation)
        if src.ndim == 1:
            checks.extent(
                src.shape[0],
                heads * width,
                "the length of src",
                operation,
                f"src: {describe(src)}, cache: {describe(cache)}",
            )
            src = src.moved((heads, width), (width * src.strides[0], src.strides[0]))
        shaped.append(src.moved((1, *src.shape), (0, *src.strides)))
    position = checks.integer(seq_pos, "seq_pos", operation)
    capacity = min(cache.shape[1] for cache in caches)
    if position >= capacity:
        raise PositionError(
            f"{operation}: seq_pos={position} is not a slot of a cache with capacity {capacity}. "
            f"This variant takes the slot itself; wrap an absolute position with % {capacity}, or use tikv.copy "
            f"with window={capacity}."
        )
    ops.write(operation, tuple(shaped), tuple(caches), position, None, None, 0, "token_major", "head_major")


def _sequence(
    spec: CopySpec, sources: tuple[Any, ...], caches: tuple[Any, ...], start: int, tokens: int | None, offset: int
) -> None:
    src, cache = _typed(spec, sources, caches)
    for c in cache:
        checks.rank(c, (3,), "cache", "(H, capacity, D)", spec.name)
        if c.shape[1] == 0:
            raise ShapeError(f"{spec.name}: the cache ({describe(c)}) has no slots.")
    ops.write(
        spec.name,
        tuple(src),
        tuple(cache),
        start,
        cache[0].shape[1],
        tokens,
        offset,
        spec.src_layout,
        spec.cache_layout,
    )


def kv_cache_copy(src: Any, cache: Any, *, write_pos: int, is_sliding: bool = False, n_new: int | None = None) -> None:
    """Append rows of K or V to a token-major bfloat16 cache, linear or ring.

    Args:
        src: (n, row) bfloat16; ``row`` is heads times width.
        cache: (capacity, row) bfloat16.
        write_pos: absolute position of the first row, wrapped or not.
        is_sliding: the cache is a ring of ``capacity`` slots.
        n_new: rows to append; None for all.

    Raises:
        ShapeError, DTypeError, CapacityError, PositionError: as `tikv.copy`.

    Exactness: bit-exact.
    Cost: as `tikv.copy`.
    Source: ``dispatch_kv_cache_copy``.

    Example:
        >>> import ml_dtypes, numpy as np, tikv
        >>> cache = np.zeros((4, 2), ml_dtypes.bfloat16)
        >>> tikv.variants.kv_cache_copy(np.ones((3, 2), ml_dtypes.bfloat16), cache, write_pos=6, is_sliding=True)
        >>> cache[:, 0].astype(int).tolist()
        [1, 0, 1, 1]
    """
    spec = VARIANTS["kv_cache_copy"]
    (a,), (c,) = _typed(spec, (src,), (cache,))
    _rows(spec.name, a, c, is_sliding=is_sliding, write_pos=write_pos, n_new=n_new)


def kv_cache_copy_f32(
    src: Any, cache: Any, *, write_pos: int, is_sliding: bool = False, n_new: int | None = None
) -> None:
    """`kv_cache_copy` for float32.

    Example:
        >>> import numpy as np, tikv
        >>> cache = np.zeros((4, 2), np.float32)
        >>> tikv.variants.kv_cache_copy_f32(np.ones((2, 2), np.float32), cache, write_pos=1)
        >>> cache[:, 0].tolist()
        [0.0, 1.0, 1.0, 0.0]
    """
    spec = VARIANTS["kv_cache_copy_f32"]
    (a,), (c,) = _typed(spec, (src,), (cache,))
    _rows(spec.name, a, c, is_sliding=is_sliding, write_pos=write_pos, n_new=n_new)


def kv_cache_copy_batch_f32(src: Any, cache: Any, *, seq_pos: int) -> None:
    """Write one token of all heads into slot ``seq_pos`` of a head-major float32 cache.

    Args:
        src: (H, D) or (H*D,) float32.
        cache: (H, capacity, D) float32.
        seq_pos: the slot, already wrapped; below the capacity.

    Raises:
        PositionError: ``seq_pos`` is not a slot.
        ShapeError, DTypeError: as `tikv.copy`.

    Exactness: bit-exact.
    Cost: as `tikv.copy`.
    Source: ``dispatch_kv_cache_copy_batch_f32``.

    Example:
        >>> import numpy as np, tikv
        >>> cache = np.zeros((2, 3, 1), np.float32)
        >>> tikv.variants.kv_cache_copy_batch_f32(np.array([5, 6], np.float32), cache, seq_pos=1)
        >>> cache[:, :, 0].tolist()
        [[0.0, 5.0, 0.0], [0.0, 6.0, 0.0]]
    """
    spec = VARIANTS["kv_cache_copy_batch_f32"]
    _token(spec.name, *_typed(spec, (src,), (cache,)), seq_pos)


def kv_cache_copy_batch_f32_to_f16(src: Any, cache: Any, *, seq_pos: int) -> None:
    """`kv_cache_copy_batch_f32` into float16, rounding to nearest even."""
    spec = VARIANTS["kv_cache_copy_batch_f32_to_f16"]
    _token(spec.name, *_typed(spec, (src,), (cache,)), seq_pos)


def kv_cache_copy_batch_f32_kv_dual(src_k: Any, src_v: Any, cache_k: Any, cache_v: Any, *, seq_pos: int) -> None:
    """`kv_cache_copy_batch_f32` for K and V in one launch."""
    spec = VARIANTS["kv_cache_copy_batch_f32_kv_dual"]
    _token(spec.name, *_typed(spec, (src_k, src_v), (cache_k, cache_v)), seq_pos)


def kv_cache_copy_batch_f32_to_f16_kv_dual(src_k: Any, src_v: Any, cache_k: Any, cache_v: Any, *, seq_pos: int) -> None:
    """`kv_cache_copy_batch_f32_to_f16` for K and V in one launch."""
    spec = VARIANTS["kv_cache_copy_batch_f32_to_f16_kv_dual"]
    _token(spec.name, *_typed(spec, (src_k, src_v), (cache_k, cache_v)), seq_pos)


def kv_cache_copy_seq_f32(
    src: Any, cache: Any, *, seq_pos_start: int, n_tokens: int | None = None, src_tok_offset: int = 0
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

    Example:
        >>> import numpy as np, tikv
        >>> cache = np.zeros((1, 4, 1), np.float32)
        >>> tikv.variants.kv_cache_copy_seq_f32(np.arange(8, dtype=np.float32).reshape(8, 1, 1), cache, seq_pos_start=0)
        >>> cache.ravel().tolist()
        [4.0, 5.0, 6.0, 7.0]
    """
    _sequence(VARIANTS["kv_cache_copy_seq_f32"], (src,), (cache,), seq_pos_start, n_tokens, src_tok_offset)


def kv_cache_copy_seq_f32_to_f16(
    src: Any, cache: Any, *, seq_pos_start: int, n_tokens: int | None = None, src_tok_offset: int = 0
) -> None:
    """`kv_cache_copy_seq_f32` into float16, rounding to nearest even."""
    _sequence(VARIANTS["kv_cache_copy_seq_f32_to_f16"], (src,), (cache,), seq_pos_start, n_tokens, src_tok_offset)


def kv_cache_copy_seq_bf16(
    src: Any, cache: Any, *, seq_pos_start: int, n_tokens: int | None = None, src_tok_offset: int = 0
) -> None:
    """`kv_cache_copy_seq_f32` from bfloat16; the widening is exact."""
    _sequence(VARIANTS["kv_cache_copy_seq_bf16"], (src,), (cache,), seq_pos_start, n_tokens, src_tok_offset)


def kv_cache_copy_seq_f32_dual(
    src_k: Any,
    src_v: Any,
    cache_k: Any,
    cache_v: Any,
    *,
    seq_pos_start: int,
    n_tokens: int | None = None,
    src_tok_offset: int = 0,
) -> None:
    """`kv_cache_copy_seq_f32` for K and V in one launch."""
    spec = VARIANTS["kv_cache_copy_seq_f32_dual"]
    _sequence(spec, (src_k, src_v), (cache_k, cache_v), seq_pos_start, n_tokens, src_tok_offset)


def kv_cache_copy_seq_f32_to_f16_dual(
    src_k: Any,
    src_v: Any,
    cache_k: Any,
    cache_v: Any,
    *,
    seq_pos_start: int,
    n_tokens: int | None = None,
    src_tok_offset: int = 0,
) -> None:
    """`kv_cache_copy_seq_f32_to_f16` for K and V in one launch."""
    spec = VARIANTS["kv_cache_copy_seq_f32_to_f16_dual"]
    _sequence(spec, (src_k, src_v), (cache_k, cache_v), seq_pos_start, n_tokens, src_tok_offset)


def kv_cache_copy_seq_bf16_to_bf16_head_major(
    src: Any, cache: Any, *, seq_pos_start: int, n_tokens: int | None = None, src_tok_offset: int = 0
) -> None:
    """`kv_cache_copy_seq_f32` for bfloat16 with a head-major source (H, T, D); bit-exact."""
    spec = VARIANTS["kv_cache_copy_seq_bf16_to_bf16_head_major"]
    _sequence(spec, (src,), (cache,), seq_pos_start, n_tokens, src_tok_offset)


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
    keyword = {"flag": "write_pos", "slot": "seq_pos", "ring": "seq_pos_start"}[spec.mapping]
    sources = [np.zeros(src_shape, src_type) for _ in range(spec.streams)]
    caches = [np.zeros(cache_shape, cache_type) for _ in range(spec.streams)]
    return [*sources, *caches], {keyword: 0}


def warmup(*names: str, num_kv_heads: int = 8, head_dim: int = 128) -> list[str]:
    """Compile named variants now instead of at their first call; the seed's ``register``. Optional.

    Args:
        *names: of `tikv.spec.VARIANTS`; none means all.
        num_kv_heads, head_dim: the shape to compile for; kernels are specialised on it.

    Returns:
        The names that were compiled.

    Raises:
        OptionError: an unknown name.

    Cost: 0.1 to 0.6 s a variant on first use, then Taichi's offline cache.

    Example:
        >>> import tikv
        >>> tikv.warmup("kv_cache_copy_f32", num_kv_heads=2, head_dim=8)
        ['kv_cache_copy_f32']
    """
    for name in names:
        if name not in VARIANTS:
            raise OptionError(f"warmup: unknown variant {name!r}. Use one of {', '.join(VARIANTS)}.")
    chosen = list(names or VARIANTS)
    live = runtime.current()
    for name in chosen:
        spec = VARIANTS[name]
        given, keywords = example_arrays(spec, tokens=1, heads=num_kv_heads, width=head_dim, capacity=2)
        if not live.is_cpu:
            given = [_device_array(a, live) for a in given]
        globals()[name](*given, **keywords)
    live.synchronize()
    return chosen


def _device_array(array: Any, live: runtime.Runtime) -> arrays.CacheArray:
    dtype = dtypes.parse(array.dtype, "warmup")
    return arrays.CacheArray(arrays.new_array(array.shape, dtype, live), live)


__all__ = [*VARIANTS, "example_arrays", "warmup"]
