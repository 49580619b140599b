"""`tikv export`: kernels for programs without Python, as SPIR-V or Metal source, with a JSON file of their bindings.

It exports the kernels that a call would launch on Vulkan or Metal. Each operation is called for each dtype, on arrays
of the model's sizes, and its launches are recorded instead of run; `kernels.json` lists them with their arguments.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tikv import arrays, dtypes, launch, runtime
from tikv.errors import ArchError, CacheFileError, OptionError
from tikv.formats import FORMATS
from tikv.launch import ahead
from tikv.launch.vectors import fields_of
from tikv.ops import attention, blocks, compact, copy, paged, quantize, ragged, rotate, write_qkv
from tikv.ops.rope import NormRope
from tikv.runtime.cache import BoundedCache
from tikv.stores.pool import PagedKVCacheStore
from tikv.stores.store import KVCacheStore

FORM = 1  # the version of kernels.json; it grows when readers of older versions would misread it
INDEX = "kernels.json"
ARCHS = ("vulkan", "metal")
FLOATS, FLOAT8 = ("float32", "float16", "bfloat16"), ("float8_e4m3fn", "float8_e5m2")
DTYPES = (*FLOATS, "int8", *FLOAT8)  # the stored dtypes
TOKENS, CAPACITY, BLOCKS = 2, 64, 8  # sizes of the recorded calls; kernels accept any


class Sizes(NamedTuple):
    """The sizes that kernels are compiled for. All other sizes are arguments of a launch."""

    head_dim: int = 128
    q_heads: int = 32
    kv_heads: int = 8
    block_size: int = 16


class Calls:
    """Calls that store one dtype, on zeros in device memory. Inputs have that dtype, or float16 if it has 8 bits."""

    def __init__(self, live: runtime.Runtime, sizes: Sizes, dtype: str) -> None:
        self.live, self.sizes = live, sizes
        self.name, self.input_name = dtype, dtype if dtype in FLOATS else "float16"
        self.stored, self.input_dtype = (dtypes.parse(name, "export").numpy for name in (self.name, self.input_name))

    def zeros(self, *shape: int, dtype: Any = None) -> Any:
        """Zeros, by default in the dtype of the calls' inputs."""
        host = np.zeros(shape, self.input_dtype if dtype is None else dtype)
        return arrays.CacheArray(arrays.to_device(host, self.live), self.live)

    def ints(self, *numbers: int) -> Any:
        """A vector of int32."""
        return arrays.CacheArray(arrays.to_device(np.array(numbers, np.int32), self.live), self.live)

    def rows(self) -> list[Any]:
        """New keys and values (T, H, D)."""
        return [self.zeros(TOKENS, self.sizes.kv_heads, self.sizes.head_dim) for _ in "kv"]

    def caches(self) -> list[Any]:
        """Caches (H, capacity, D)."""
        return [self.zeros(self.sizes.kv_heads, CAPACITY, self.sizes.head_dim, dtype=self.stored) for _ in "kv"]

    def pools(self) -> list[Any]:
        """Pools (N, bs, H, D)."""
        s = self.sizes
        return [self.zeros(BLOCKS, s.block_size, s.kv_heads, s.head_dim, dtype=self.stored) for _ in "kv"]

    def scales(self, *shape: int) -> dict[str, Any]:
        """The scales of keys and values, as arguments; empty if the dtype has no scales."""
        row = FORMATS.get(self.name)
        names = ("k_scale", "v_scale") if row is not None and row.finds_scales else ()
        return {name: self.zeros(*shape, dtype=np.float16) for name in names}

    def pool_scales(self) -> dict[str, Any]:
        """`scales` for `pools`."""
        return self.scales(BLOCKS, self.sizes.block_size, self.sizes.kv_heads)


def _copy(c: Calls) -> None:
    copy.copy(c.rows()[0], c.caches()[0], position=0)


def _copy_kv(c: Calls) -> None:
    copy.copy_kv(*c.rows(), *c.caches(), position=0)
    copy.copy_kv(*c.rows(), *c.caches(), position=0, window=CAPACITY)


def _linearize(c: Calls) -> None:
    copy.linearize(*c.caches(), length=2 * CAPACITY)


def _append_ragged(c: Calls) -> None:
    s = c.sizes
    rows, caches = ([c.zeros(2, s.kv_heads, n, s.head_dim) for _ in "kv"] for n in (TOKENS, CAPACITY))
    ragged.append_ragged(*[*rows, *caches, c.ints(0, 1)])


def _write_slots(c: Calls) -> None:
    paged.write_slots(*[*c.rows(), *c.pools(), c.ints(*range(TOKENS))], **c.pool_scales())


def _gather_paged(c: Calls) -> None:
    s = c.sizes
    out = c.zeros(s.block_size + 1, s.kv_heads, s.head_dim)
    scale = c.pool_scales().get("k_scale")
    paged.gather_paged(c.pools()[0], c.ints(1, 0), s.block_size + 1, scale=scale, out=out)


def _copy_blocks(c: Calls) -> None:
    pairs = arrays.CacheArray(arrays.to_device(np.array([[0, 1]], np.int32), c.live), c.live)
    blocks.copy_blocks(*[*c.pools(), pairs])


def _compact(c: Calls) -> None:
    s = c.sizes
    cache, out = (c.zeros(1, s.kv_heads, CAPACITY, s.head_dim, dtype=c.stored) for _ in "co")
    keep = arrays.CacheArray(arrays.to_device(np.zeros((1, s.kv_heads, TOKENS), np.int32), c.live), c.live)
    compact.compact(cache, keep)
    compact.compact(cache, keep, out=out)
    if (scale := c.scales(1, s.kv_heads, CAPACITY, 1).get("k_scale")) is not None:
        compact.compact(scale, keep)  # as the codes are moved


def _rotate(c: Calls) -> None:
    s = c.sizes
    keys = c.zeros(1, s.kv_heads, CAPACITY, s.head_dim, dtype=c.stored)
    scale = c.scales(1, s.kv_heads, CAPACITY).get("k_scale")
    for interleaved in (False, True):
        rope = rotate.Rope(np.ones(s.head_dim // 2), interleaved)
        rotate.rotate(keys, np.arange(CAPACITY), np.zeros(CAPACITY, np.int32), rope, scale=scale)


def _quantize(c: Calls) -> None:
    quantize.quantize(c.rows()[0])


def _dequantize(c: Calls) -> None:
    s = c.sizes
    codes, scales = (
        c.zeros(TOKENS, s.kv_heads, s.head_dim, dtype=np.int8),
        c.zeros(TOKENS, s.kv_heads, dtype=np.float16),
    )
    quantize.dequantize(codes, scales, c.rows()[0])


def _write_qkv(c: Calls) -> None:
    s = c.sizes
    angles = [c.zeros(CAPACITY, s.head_dim // 2, dtype=np.float32) for _ in "cs"]
    weights = [c.zeros(s.head_dim, dtype=np.float32) for _ in "qk"]
    rotated = NormRope(mode="half", cos=angles[0], sin=angles[1])
    normed = NormRope(mode="norm_half", q_weight=weights[0], k_weight=weights[1], cos=angles[0], sin=angles[1])
    for norm_rope in (None, rotated, normed):
        qkv = c.zeros(TOKENS, (s.q_heads + 2 * s.kv_heads) * s.head_dim)
        write_qkv.write_qkv(qkv, *c.caches(), num_q_heads=s.q_heads, norm_rope=norm_rope, position=0)


def _decode_attention(c: Calls) -> None:
    s = c.sizes
    caches = [c.zeros(1, s.kv_heads, CAPACITY, s.head_dim, dtype=c.stored) for _ in "kv"]
    scales = c.scales(1, s.kv_heads, CAPACITY)
    q, out = (c.zeros(1, s.q_heads, s.head_dim) for _ in "qo")
    attention.decode_attention(*[q, *caches, c.ints(CAPACITY)], **scales, out=out)
    attention.decode_attention(*[q, *caches, c.ints(CAPACITY)], **scales, out=out, num_splits=2)


def _paged_decode_attention(c: Calls) -> None:
    s = c.sizes
    q, out = (c.zeros(1, s.q_heads, s.head_dim) for _ in "qo")
    tables = arrays.CacheArray(arrays.to_device(np.arange(BLOCKS, dtype=np.int32)[None], c.live), c.live)
    lengths = c.ints(BLOCKS * s.block_size)
    attention.paged_decode_attention(*[q, *c.pools(), tables, lengths], **c.pool_scales(), out=out)


def _merge_states(c: Calls) -> None:
    s = c.sizes
    states = [
        each for _ in "ab" for each in (c.zeros(1, s.q_heads, s.head_dim), c.zeros(1, s.q_heads, dtype=np.float32))
    ]
    attention.merge_states(*states)


def _stores(c: Calls) -> Iterator[KVCacheStore]:
    """A store whose layer keeps all tokens, and one whose layer keeps a sink and the newest tokens."""
    s = c.sizes
    for window, sinks in ((None, 0), (CAPACITY, 1)):
        yield KVCacheStore(
            num_layers=2, num_kv_heads=s.kv_heads, head_dim=s.head_dim, capacity=CAPACITY, dtype=c.name, window=window,
            sinks=sinks,
        )  # fmt: skip


def _store_append(c: Calls) -> None:
    s = c.sizes
    for store in _stores(c):
        store.append(0, *c.rows())
    both = [c.zeros(2, TOKENS, s.kv_heads, s.head_dim) for _ in "kv"]
    for store in _stores(c):
        store.append_all(*both)


def _pool(c: Calls) -> tuple[PagedKVCacheStore, list[Any]]:
    """A paged store of one layer, and a sequence for each new token."""
    s = c.sizes
    pool = PagedKVCacheStore(
        num_layers=1, num_kv_heads=s.kv_heads, head_dim=s.head_dim, num_blocks=BLOCKS, block_size=s.block_size,
        dtype=c.name,
    )  # fmt: skip
    return pool, [pool.add() for _ in range(TOKENS)]


def _pool_append(c: Calls) -> None:
    pool, seqs = _pool(c)
    k, v = c.rows()
    pool.append(0, k, v, seqs)


class Operation(NamedTuple):
    """Calls whose launches are exported, and the dtypes that they may store."""

    call: Callable[[Calls], None]
    stored: tuple[str, ...]


OPERATIONS: dict[str, Operation] = {
    "copy": Operation(_copy, (*FLOATS, *FLOAT8)),
    "copy_kv": Operation(_copy_kv, (*FLOATS, *FLOAT8)),
    "linearize": Operation(_linearize, FLOATS),
    "append_ragged": Operation(_append_ragged, FLOATS),
    "write_slots": Operation(_write_slots, DTYPES),
    "gather_paged": Operation(_gather_paged, DTYPES),
    "copy_blocks": Operation(_copy_blocks, DTYPES),
    "compact": Operation(_compact, DTYPES),
    "rotate": Operation(_rotate, (*FLOATS, "int8")),
    "quantize": Operation(_quantize, FLOATS),
    "dequantize": Operation(_dequantize, FLOATS),
    "write_qkv": Operation(_write_qkv, (*FLOATS, *FLOAT8)),
    "decode_attention": Operation(_decode_attention, DTYPES),
    "paged_decode_attention": Operation(_paged_decode_attention, DTYPES),
    "merge_states": Operation(_merge_states, FLOATS),
    "KVCacheStore.append": Operation(_store_append, DTYPES),
    "PagedKVCacheStore.append": Operation(_pool_append, DTYPES),
}


def pairs(operations: Sequence[str], names: Sequence[str]) -> list[tuple[str, str]]:
    """Each operation paired with each of these dtypes that it can store."""
    return [(operation, name) for operation in operations for name in names if name in OPERATIONS[operation].stored]


def check(path: str, archs: Sequence[str], operations: Sequence[str], names: Sequence[str], sizes: Sizes) -> Path:
    """The folder to write to, after checking that everything asked for is possible.

    Raises:
        OptionError: an arch, operation or dtype that is not exported; sizes that no model has.
        CacheFileError: the path is not a folder, or is a folder with other files.
    """
    for what, asked, known in (("arch", archs, ARCHS), ("op", operations, OPERATIONS), ("dtype", names, DTYPES)):
        if unknown := [name for name in asked if name not in known]:
            raise OptionError(f"export: unknown {what} {', '.join(unknown)}. Use one of {', '.join(known)}.")
    if not pairs(operations, names):
        raise OptionError(
            f"export: {', '.join(operations)} stores no {', '.join(names)}. Use one of "
            f"{', '.join(dict.fromkeys(n for operation in operations for n in OPERATIONS[operation].stored))}."
        )
    if min(sizes) < 1 or sizes.q_heads % sizes.kv_heads or sizes.head_dim % 2:
        raise OptionError(
            f"export: the sizes {', '.join(f'{name}={size}' for name, size in sizes._asdict().items())} cannot be "
            "exported. Use sizes of at least 1, an even head_dim, and a multiple of kv_heads for q_heads."
        )
    folder = Path(path)
    if folder.exists() and not folder.is_dir():
        raise CacheFileError(f"export: {path!r} is not a folder. Name a new one.")
    if folder.is_dir() and any(folder.iterdir()) and not (folder / INDEX).is_file():
        raise CacheFileError(f"export: {path!r} holds other files. Name a new folder, or one of an earlier export.")
    return folder


def export(
    folder: Path,
    archs: Sequence[str],
    operations: Sequence[str],
    names: Sequence[str],
    sizes: Sizes,
    step: Callable[[str, int], None] = lambda now, done: None,
) -> dict[str, Any]:
    """Write the kernels of operations to a folder; `check` must have accepted the arguments.

    Args:
        folder: it is made if it is missing. Files of an earlier export there are replaced.
        archs: "vulkan" writes SPIR-V, "metal" Metal source.
        operations: names in `OPERATIONS`.
        names: names in `DTYPES`; an operation skips those that it cannot store.
        sizes: the sizes that kernels are compiled for.
        step: called with the current item and how many of `pairs` are done.

    Returns:
        The contents of kernels.json.

    Raises:
        ArchError: there is no Vulkan driver here, the engine compiles nothing ahead of time, or a tool is missing.
        CacheFileError: the system refuses to write.
    """
    try:
        live = runtime.init("vulkan")
    except ArchError as error:
        raise ArchError(
            f"export: kernels are compiled for a Vulkan driver, and none works here ({error}). Install one; Mesa's "
            f"needs no GPU (Debian: mesa-vulkan-drivers libvulkan1)."
        ) from error
    recorded: list[tuple[dict[str, Any], launch.Recorded]] = []
    kernels: dict[str, launch.CompiledKernel] = {}
    asked = pairs(operations, names)
    for number, (name, dtype) in enumerate(asked):
        step(f"{name} {dtype}", number)
        made = Calls(live, sizes, dtype)
        with launch.recording(live, BoundedCache()) as launches:
            OPERATIONS[name].call(made)
        for each in launches:
            recorded.append(({"operation": name, "dtype": dtype}, each))
            kernels[each.kernel.name] = each.kernel
    step("compiling", len(asked))
    with tempfile.TemporaryDirectory() as temporary:
        ahead.save(list(kernels.values()), Path(temporary))
        saved = dict(zip(kernels, ahead.saved_in(Path(temporary)), strict=True))
        return _write(folder, archs, sizes, recorded, saved)


def _write(
    folder: Path,
    archs: Sequence[str],
    sizes: Sizes,
    recorded: Sequence[tuple[dict[str, Any], launch.Recorded]],
    saved: dict[str, ahead.Ahead],
) -> dict[str, Any]:
    """Write the files of kernels, each once, and the file that lists them."""
    files: dict[str, tuple[str, bytes]] = {}  # by the kernel's name
    kernels: dict[str, Any] = {}
    for call, each in recorded:
        name = each.kernel.name
        if name not in files:
            start = f"{call['operation'].replace('.', '_')}_{call['dtype']}_"
            count = sum(stem.startswith(start) for stem, _ in files.values())
            spirv = ahead.with_capabilities(saved[name].spirv.read_bytes())
            files[name] = f"{start}{count}", spirv
            kernels[files[name][0]] = {"name": name, **_facts(each, saved[name], spirv)}
        call["kernel"] = files[name][0]
        call["arguments"] = [_as_json(value) for value in each.arguments]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, (stem, spirv) in files.items():
            path = folder / f"{stem}.spv"
            path.write_bytes(spirv)
            kernels[stem]["validated"] = bool(ahead.is_valid(path))
            if "metal" in archs:
                (folder / f"{stem}.metal").write_text(ahead.metal_of(saved[name].spirv), encoding="utf-8")
                kernels[stem]["metal"] = f"{stem}.metal"
            if "vulkan" in archs:
                kernels[stem]["spirv"] = f"{stem}.spv"
            else:
                path.unlink()
        launches = [call for call, _ in recorded]
        listed = {"form": FORM, "sizes": sizes._asdict(), "kernels": kernels, "launches": launches}
        (folder / INDEX).write_text(json.dumps(listed, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise CacheFileError(f"export: cannot write to {str(folder)!r}: {error}.") from None
    return listed


def _facts(each: launch.Recorded, made: ahead.Ahead, spirv: bytes) -> dict[str, Any]:
    """How a kernel is launched and bound."""
    kernel, task = each.kernel, made.task
    names = dict(fields_of(each.arguments, kernel.is_float))
    bindings = {bind["buffer"]["root_id"][0]: bind["binding"] for bind in task["buffer_binds"]}
    arguments: list[dict[str, Any]] = []
    for i, argument in enumerate(ahead.arguments_of(made)):
        entry: dict[str, Any] = {"name": argument.name}
        if word := kernel.words[i]:
            entry |= {"array_of": word, "binding": bindings.get(i), "read": argument.read, "written": argument.written}
        else:
            entry |= {"numbers": "float32" if kernel.is_float[i] else "int32", "at": argument.offsets}
            entry |= {"names": list(names[i])} if i in names else {}
        arguments.append(entry)
    per_group = task["advisory_num_threads_per_group"]
    return {
        "entry_point": "main",
        "metal_function": "main0",
        "threadgroups": -(-task["advisory_total_num_threads"] // per_group),
        "threads_per_threadgroup": per_group,
        "threadgroup_memory_bytes": ahead.threadgroup_bytes(spirv),
        "capabilities": ahead.capabilities_of(spirv),
        "arguments_binding": bindings[ahead.ARGUMENTS],
        "arguments_bytes": made.arguments["args_bytes_"],
        "arguments": arguments,
    }


def _as_json(value: Any) -> Any:
    """An argument of a recorded launch, for JSON."""
    if isinstance(value, arrays.ArrayView):
        return {"dtype": value.dtype.name, "shape": list(value.shape)}
    return list(value) if isinstance(value, tuple) else value
