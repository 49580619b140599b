"""vLLM's cache operations: they write keys, values and latent rows, gather tokens from pages, and copy blocks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from tikv.arrays import Array, ArrayView, describe, view, view_bits
from tikv.compat.indices import Indices, flag, refuse_option
from tikv.compat.ragged_rows import first_rows, with_one_head
from tikv.dtypes import FP8, DType, to_torch
from tikv.errors import DTypeError, ShapeError
from tikv.ops import blocks, checks, paged

STORED = "'auto', 'fp8', 'fp8_e4m3' or 'fp8_e5m2'"


def _pool_of_bytes(pool: Any, dtype: DType, name: str, operation: str) -> Any:
    """A pool as 8-bit floats: the pool itself, or a view of vLLM's bytes.

    Raises:
        DTypeError: it is neither.
    """
    dtype_name = str(getattr(pool, "dtype", type(pool).__name__)).removeprefix("torch.")
    if dtype_name == dtype.name:
        return pool
    if dtype_name != "uint8":
        raise DTypeError(f"{operation}: {name} is {dtype_name}. Pass uint8 or {dtype.name}.")
    return pool.view(dtype.numpy if isinstance(pool, np.ndarray) else to_torch(dtype.name))


def _write(operation: str, layout: str, *arguments: Any) -> None:
    key, value, key_cache, value_cache, slot_mapping, kv_cache_dtype, k_scale, v_scale = arguments
    if kv_cache_dtype not in ("auto", "int8", *FP8):
        refuse_option(
            operation, kv_cache_dtype=(kv_cache_dtype, f"{STORED}, or 'int8' with a scale per token and head")
        )
    slots = Indices(operation, {"slot_mapping": slot_mapping}).array("slot_mapping", (None,), "(T,)")
    tokens = slots.shape[0]
    rows = [first_rows(a, tokens, name, operation) for a, name in ((key, "key"), (value, "value"))]
    scales = {"k_scale": k_scale, "v_scale": v_scale} if kv_cache_dtype == "int8" else {}
    if kv_cache_dtype in FP8:
        dtype = FP8[kv_cache_dtype]
        key_cache = _pool_of_bytes(key_cache, dtype, "key_cache", operation)
        value_cache = _pool_of_bytes(value_cache, dtype, "value_cache", operation)
        if k_scale is not None or v_scale is not None:
            scales = {"k_scale": 1.0 if k_scale is None else k_scale, "v_scale": 1.0 if v_scale is None else v_scale}
    k, v = rows
    paged.slots_call(operation, k, v, key_cache, value_cache, slots, layout=layout, **scales).run()


def reshape_and_cache_flash(
    key: Array,
    value: Array,
    key_cache: Array,
    value_cache: Array,
    slot_mapping: Array,
    kv_cache_dtype: str = "auto",
    k_scale: Array | float | None = None,
    v_scale: Array | float | None = None,
) -> None:
    """Write keys and values into the slots of paged caches, as vLLM's function does.

    Args:
        key, value: (T, H, D), with any strides between tokens; rows after the first ``len(slot_mapping)`` are padding.
        key_cache, value_cache: (N, bs, H, D), contiguous or a transposed view of (N, H, bs, D).
        slot_mapping: integers; a negative slot skips its token.
        kv_cache_dtype: "auto" stores the bits, or rounds float32 if the cache is narrower. "fp8", "fp8_e4m3" and
            "fp8_e5m2" write into caches in uint8 or that dtype. "int8" also writes the scales.
        k_scale, v_scale: not read for "auto". For fp8, a number, an array of one number, or (H,): ``row / scale`` is
            stored, saturating. For "int8", (N, bs, H) arrays that are written.

    Raises:
        OptionError: another kv_cache_dtype.
        PositionError, ShapeError, DTypeError: as `tikv.write_slots`.

    Exactness, cost: as `tikv.write_slots`.

    Examples:
        >>> import numpy as np
        >>> from tikv.compat import vllm
        >>> k_cache, v_cache = np.zeros((2, 1, 4, 1, 2), np.float32)
        >>> rows = np.ones((2, 1, 2), np.float32)
        >>> vllm.reshape_and_cache_flash(rows, rows, k_cache, v_cache, np.array([2, -1]))
        >>> k_cache[0, :, 0, 0].tolist()
        [0.0, 0.0, 1.0, 0.0]
    """
    arguments = (key, value, key_cache, value_cache, slot_mapping, kv_cache_dtype, k_scale, v_scale)
    _write("vllm.reshape_and_cache_flash", "NHD", *arguments)


def reshape_and_cache(
    key: Array,
    value: Array,
    key_cache: Array,
    value_cache: Array,
    slot_mapping: Array,
    kv_cache_dtype: str = "auto",
    k_scale: Array | float | None = None,
    v_scale: Array | float | None = None,
    interleaved_v: bool = False,
) -> None:
    """Write as `reshape_and_cache_flash` does, but into vLLM's older layout.

    Keys are (N, H, D/x, bs, x), where x elements take 16 bytes; values are (N, H, D, bs).

    Raises:
        OptionError: ``interleaved_v`` is true, a layout of values that is not supported.
        TikvError: as `reshape_and_cache_flash` raises it.
    """
    if flag(interleaved_v, "interleaved_v", "vllm.reshape_and_cache"):
        refuse_option("vllm.reshape_and_cache", interleaved_v=(True, "False, values as (N, H, D, bs)"))
    arguments = (key, value, key_cache, value_cache, slot_mapping, kv_cache_dtype, k_scale, v_scale)
    _write("vllm.reshape_and_cache", "VLLM", *arguments)


def concat_and_cache_mla(
    kv_c: Array,
    k_pe: Array,
    kv_cache: Array,
    slot_mapping: Array,
    kv_cache_dtype: str = "auto",
    scale: Array | float | None = None,
    skip_scale: bool = False,
) -> None:
    """Write latent rows, each followed by the rotated part of its key, into one paged cache, as vLLM's function does.

    Args:
        kv_c: (T, rank), with any strides between tokens; rows after the first ``len(slot_mapping)`` are padding.
        k_pe: (T, rotated columns), likewise.
        kv_cache: (N, bs, rank + rotated columns).
        slot_mapping: integers; a negative slot skips its token.
        kv_cache_dtype: "auto", "fp8", "fp8_e4m3" or "fp8_e5m2", as in `reshape_and_cache_flash`.
        scale: not read for "auto". For fp8, a number or an array of one number, by which rows are divided; None for 1.
        skip_scale: use a scale of 1 without reading ``scale``.

    Raises:
        OptionError: another kv_cache_dtype, such as "fp8_ds_mla", whose rows hold their own scales.
        PositionError, ShapeError, DTypeError: as `tikv.write_slots`.

    Exactness, cost: as `tikv.write_slots`.

    Examples:
        >>> import numpy as np
        >>> from tikv.compat import vllm
        >>> cache = np.zeros((1, 2, 3), np.float32)
        >>> vllm.concat_and_cache_mla(np.ones((1, 2), np.float32), np.full((1, 1), 2, np.float32), cache, [1])
        >>> cache[0].tolist()
        [[0.0, 0.0, 0.0], [1.0, 1.0, 2.0]]
    """
    operation = "vllm.concat_and_cache_mla"
    skip_scale = flag(skip_scale, "skip_scale", operation)
    if kv_cache_dtype not in ("auto", *FP8):
        refuse_option(operation, kv_cache_dtype=(kv_cache_dtype, STORED))
    slots = Indices(operation, {"slot_mapping": slot_mapping}).array("slot_mapping", (None,), "(T,)")
    rows = []
    for a, name in ((kv_c, "kv_c"), (k_pe, "k_pe")):
        source = view(a, name, operation)
        checks.rank(source, (2,), name, "(T, columns)", operation)
        rows.append(with_one_head(first_rows(source, slots.shape[0], name, operation), 1))
    scales: dict[str, Any] = {}
    if kv_cache_dtype in FP8:
        kv_cache = _pool_of_bytes(kv_cache, FP8[kv_cache_dtype], "kv_cache", operation)
        if scale is not None and not skip_scale:
            scales = {"k_scale": scale, "v_scale": scale}
    cache = view(kv_cache, "kv_cache", operation)
    checks.rank(cache, (3,), "kv_cache", "(N, bs, rank + rotated columns)", operation)
    rank, rotated = (a.shape[2] for a in rows)
    detail = f"kv_c: {describe(view(kv_c, 'kv_c', operation))}, k_pe: {describe(view(k_pe, 'k_pe', operation))}"
    checks.extent(cache.shape[2], rank + rotated, "the width of kv_cache", operation, detail)
    k_pool, v_pool = (with_one_head(part, 2) for part in (cache.part(2, 0, rank), cache.part(2, rank, rank + rotated)))
    paged.slots_call(operation, rows[0], rows[1], k_pool, v_pool, slots, **scales).run()


def gather_and_maybe_dequant_cache(
    src_cache: Array,
    dst: Array,
    block_table: Array,
    cu_seq_lens: Array,
    token_to_seq: Array,
    num_tokens: int,
    kv_cache_dtype: str = "auto",
    scale: Array | float | None = None,
    seq_starts: Array | None = None,
) -> None:
    """Copy tokens of many sequences from their pages, one sequence after the other, as vLLM's function does.

    Row ``t`` of ``dst`` gets token ``t - cu_seq_lens[s] + seq_starts[s]`` of sequence ``s = token_to_seq[t]``.

    Args:
        src_cache: (N, bs, W), or with more axes after the first two.
        dst: (at least num_tokens, W), written; rows at or after ``cu_seq_lens[s + 1]`` keep their contents.
        block_table: (B, blocks): the pages of each sequence.
        cu_seq_lens: (B + 1,): where each sequence's rows of ``dst`` start.
        token_to_seq: (at least num_tokens,): the sequence of each row.
        num_tokens: rows to copy.
        kv_cache_dtype: "auto" needs a ``dst`` in the cache's dtype, or in one that `tikv.copy` converts it to. "fp8",
            "fp8_e4m3" and "fp8_e5m2" read caches in uint8 or that dtype.
        scale: not read for "auto". For fp8, a number or an array of one number: a row is ``stored * scale``, rounded
            once.
        seq_starts: (B,): the first token of each sequence to copy; None for 0.

    Raises:
        OptionError: another kv_cache_dtype.
        PositionError: a sequence or a page does not exist, or a token lies beyond its sequence's pages. This is checked
            where the index arrays lie on the host; on a device such a token is skipped.
        ShapeError, DTypeError: the arrays do not agree.

    Exactness, cost: as `tikv.gather_paged`, with index arithmetic before it.

    Examples:
        >>> import numpy as np
        >>> from tikv.compat import vllm
        >>> cache, rows = np.arange(6, dtype=np.float32).reshape(3, 2, 1), np.zeros((3, 1), np.float32)
        >>> vllm.gather_and_maybe_dequant_cache(cache, rows, [[2, 0], [1, -1]], [0, 2, 3], [0, 0, 1], 3)
        >>> rows[:, 0].tolist()
        [4.0, 5.0, 2.0]
    """
    operation = "vllm.gather_and_maybe_dequant_cache"
    if kv_cache_dtype not in ("auto", *FP8):
        refuse_option(operation, kv_cache_dtype=(kv_cache_dtype, STORED))
    factor = None
    if kv_cache_dtype in FP8:
        src_cache = _pool_of_bytes(src_cache, FP8[kv_cache_dtype], "src_cache", operation)
        factor = 1.0 if scale is None else scale
    num_tokens = checks.integer(num_tokens, "num_tokens", operation)
    arguments = {"block_table": block_table, "cu_seq_lens": cu_seq_lens, "token_to_seq": token_to_seq}
    index = Indices(operation, arguments | {"seq_starts": seq_starts})
    table = index.array("block_table", (None, None), "(B, blocks)")
    sequence = index.array("token_to_seq", (None,), "(tokens,)")
    if sequence.shape[0] < num_tokens:
        raise ShapeError(
            f"{operation}: token_to_seq is ({sequence.shape[0]},), fewer entries than num_tokens={num_tokens}."
        )
    sequence, batch = sequence[:num_tokens], table.shape[0]
    unknown = (sequence < 0) | (sequence >= batch)
    index.refuse_where(
        unknown,
        lambda t: f"token_to_seq{[*t]}={int(sequence[t])}, and there are {batch} sequences. Use 0..{batch - 1}.",
    )
    source, rows = view(src_cache, "src_cache", operation), view(dst, "dst", operation)
    none = index.library.full_like(sequence, batch)
    _gather(operation, index, source, rows, table, index.library.where(unknown, none, sequence), factor)


def cp_gather_cache(
    src_cache: Array,
    dst: Array,
    block_table: Array,
    cu_seq_lens: Array,
    batch_size: int,
    seq_starts: Array | None = None,
) -> None:
    """Copy sequences from their pages, one after the other, bit for bit, as vLLM's function does.

    Args:
        src_cache, block_table, cu_seq_lens, seq_starts: as in `gather_and_maybe_dequant_cache`, in any dtype.
        dst: (at least ``cu_seq_lens[batch_size]``, W), in the cache's dtype.
        batch_size: sequences to copy.

    Raises:
        As `gather_and_maybe_dequant_cache`.

    Exactness: bit-exact. Cost: as `gather_and_maybe_dequant_cache`.
    """
    operation = "vllm.cp_gather_cache"
    batch_size = checks.integer(batch_size, "batch_size", operation)
    arguments = {"block_table": block_table, "cu_seq_lens": cu_seq_lens, "seq_starts": seq_starts}
    index = Indices(operation, arguments)
    source, rows = view_bits(src_cache, "src_cache", operation), view_bits(dst, "dst", operation)
    checks.same_dtype(source, rows, "src_cache", "dst", operation)
    table = index.array("block_table", (None, None), "(B, blocks)")[:batch_size]
    starts = _starts(operation, index, batch_size)
    tokens = rows.shape[0] if rows.ndim else 0
    if index.known:
        tokens = min(tokens, int(starts[-1]))
    sequence = index.library.searchsorted(starts[1:], index.arange(tokens), side="right")
    _gather(operation, index, source, rows, table, sequence, None, batch_size)


def _starts(operation: str, index: Indices, batch: int) -> Any:
    """The rows where so many sequences start, and the row after the last sequence.

    Raises:
        ShapeError: there are fewer sequences.
    """
    starts = index.array("cu_seq_lens", (None,), "(B + 1,)")
    if starts.shape[0] <= batch:
        raise ShapeError(
            f"{operation}: cu_seq_lens is ({starts.shape[0]},); for {batch} sequences it must be ({batch + 1},)."
        )
    return starts[: batch + 1]


def _gather(
    operation: str,
    index: Indices,
    source: ArrayView,
    rows: ArrayView,
    table: Array,
    sequence: Any,
    factor: Any,
    batch: int | None = None,
) -> None:
    """Copy rows of sequences from their pages; each row names its sequence.

    Args:
        operation, index: the public function's name, and its index arguments.
        source: (N, bs, W) or (N, bs, H, D).
        rows: (at least as many as `sequence`, W) or (..., H, D), written.
        table: (B, blocks) pages.
        sequence: (T,) the sequence of each row; B for a row without one.
        factor: the factor of stored numbers; None to copy them.
        batch: the required number of sequences; None for the table's number.
    """
    if batch is not None and table.shape[0] < batch:
        raise ShapeError(
            f"{operation}: block_table has {table.shape[0]} rows where {batch} sequences need one each. Pass a row for "
            "each sequence."
        )
    checks.rank(source, (3, 4), "src_cache", "(N, bs, W) or (N, bs, H, D)", operation)
    (batch, blocks_of_each), tokens = table.shape, sequence.shape[0]
    if rows.shape[1:] != source.shape[2:] or rows.shape[0] < tokens:
        shape = ", ".join(map(str, (f"at least {tokens}", *source.shape[2:])))
        raise ShapeError(f"{operation}: dst is {describe(rows)} where ({shape}) is needed ({describe(source)}).")
    starts, where, zeros = _starts(operation, index, batch), index.library.where, index.library.zeros_like
    index.check_starts("cu_seq_lens", starts, rows.shape[0], "rows of dst")
    first = index.array("seq_starts", (None,), "(B,)") if index.has("seq_starts") else zeros(starts)
    if first.shape[0] < batch:
        raise ShapeError(
            f"{operation}: seq_starts has {first.shape[0]} entries where {batch} sequences need one each. Pass an "
            "entry for each sequence."
        )
    if batch == 0 or tokens == 0:
        return
    token, known = index.arange(tokens), where(sequence < batch, sequence, zeros(sequence))
    copied = (sequence < batch) & (token >= starts[known]) & (token < starts[known + 1])
    position = token - starts[known] + first[known]
    slots, missing = zeros(sequence) - 1, copied
    if blocks_of_each and source.shape[1]:
        page = index.library.clip(position // source.shape[1], 0, blocks_of_each - 1)
        block = table[known, page]
        inside = (position >= 0) & (position < blocks_of_each * source.shape[1])
        has_page = copied & inside & (block >= 0) & (block < source.shape[0])
        slots, missing = (
            where(has_page, block * source.shape[1] + position % source.shape[1], slots),
            copied & ~has_page,
        )
    index.refuse_where(
        missing,
        lambda t: (
            f"token {int(position[t])} of sequence {int(known[t])} has no page in block_table, or a page that is not "
            f"among the {source.shape[0]} pages of src_cache. Give each token that is copied one of these pages."
        ),
    )
    to = rows.part(0, 0, tokens)
    if source.ndim == 3:
        source, to = with_one_head(source, 2), with_one_head(to, 1)
    paged.gather(operation, source, slots, tokens, layout="NHD", scale=factor, out=to, by_slot=True)


def copy_blocks(key_caches: Sequence[Array], value_caches: Sequence[Array], block_mapping: Array) -> None:
    """Copy blocks within the caches of every layer.

    Args:
        key_caches, value_caches: one pool per layer, in any dtype.
        block_mapping: (P, 2) integers: from, to.

    Raises:
        ShapeError: the lists differ in length, or the pools differ in their number of blocks.
        PositionError: a block is outside the pools, or is the source of one pair and the destination of another.
        DTypeError: a pool is not an array.

    Cost: one launch per layer. All layers are checked before any block is copied.
    """
    operation = "vllm.copy_blocks"
    lists = [_pools_of_layers(a, name, operation) for a, name in ((key_caches, "key"), (value_caches, "value"))]
    counts = [pool.shape[0] if pool.ndim else 0 for pools in lists for pool in pools]
    if len(lists[0]) != len(lists[1]) or len(set(counts)) > 1:
        raise ShapeError(
            f"{operation}: key_caches has {len(lists[0])} pools and value_caches {len(lists[1])}, of {counts} blocks. "
            f"Pass one of each per layer, all with the same number of blocks."
        )
    calls = [blocks.blocks_call(operation, k, v, block_mapping) for k, v in zip(*lists, strict=True)]
    for call in calls:
        call.prepare()
    for call in calls:
        call.run()


def _pools_of_layers(pools: Any, name: str, operation: str) -> list[ArrayView]:
    if not isinstance(pools, list | tuple):
        raise DTypeError(f"{operation}: {name}_caches is {type(pools).__name__}. Pass a list of pools, one per layer.")
    return [view_bits(pool, f"{name}_caches[{i}]", operation) for i, pool in enumerate(pools)]


def swap_blocks(src: Array, dst: Array, block_size_in_bytes: Any = None, block_mapping: Array | None = None) -> None:
    """Copy blocks from one pool to another, on the same device or between device and host.

    Args:
        src, dst: pools with the same dtype (any) and the same shape after the first axis.
        block_size_in_bytes: the bytes of a block, which are checked; or the mapping itself, which older versions take
            third.
        block_mapping: (P, 2) integers: from, to.

    Raises:
        OptionError: the size is not that of a block of these pools.
        ShapeError: the mapping is missing. As `tikv.swap_blocks`.
    """
    operation = "vllm.swap_blocks"
    if block_mapping is None:
        if block_size_in_bytes is None:
            raise ShapeError(f"{operation}: block_mapping is missing. Pass (P, 2) pairs of blocks: from, to.")
        block_size_in_bytes, block_mapping = None, block_size_in_bytes
    if block_size_in_bytes is not None:
        seen = view_bits(src, "src", operation)
        actual = math.prod(seen.shape[1:]) * seen.dtype.itemsize
        if checks.integer(block_size_in_bytes, "block_size_in_bytes", operation) != actual:
            refuse_option(
                operation, block_size_in_bytes=(block_size_in_bytes, f"{actual}, the bytes of a block of src")
            )
    blocks.swap_blocks(src, dst, block_mapping)
