"""Every operation in every dtype on one back end, against the NumPy reference: `python -m tikv.tools.support ARCH`.

Prints a line of JSON for each as soon as it is done, so that a driver that crashes loses only later lines.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Any, TypeAlias

import numpy as np

from tikv import arrays, dtypes, reference, runtime
from tikv.errors import ArchError, DTypeError
from tikv.formats import GROUP_FORMATS
from tikv.graphs.builder import GraphBuilder
from tikv.ops import attention, blocks, compact, copy, paged, quantize, ragged, rotate, write_qkv
from tikv.stores.pool import PagedKVCacheStore
from tikv.stores.store import KVCacheStore
from tikv.tools.doctor import FAILED, REFUSED, TESTED, Trial

Array: TypeAlias = np.ndarray[Any, Any]
# The result, the reference's result, and the tolerance; None requires equal bits.
Pair: TypeAlias = tuple[Any, Array, "float | None"]
Trials: TypeAlias = Iterator[Pair]

# dtype column: (dtype of the rows, dtype of the cache)
DTYPES = {
    "float32": ("float32", "float32"),
    "float16": ("float16", "float16"),
    "bfloat16": ("bfloat16", "bfloat16"),
    "float64": ("float64", "float64"),
    "float32 > float16": ("float32", "float16"),
    "float32 > bfloat16": ("float32", "bfloat16"),
    "float8_e4m3fn": ("float32", "float8_e4m3fn"),
    "float8_e5m2": ("float32", "float8_e5m2"),
    "int8": ("float32", "int8"),
    "quant4_64": ("float32", "quant4_64"),
    "q8_0": ("float32", "q8_0"),
}


class Bench:
    """Seeded numbers, and copies to the device and back."""

    def __init__(self, live: runtime.Runtime) -> None:
        self.live = live
        self.rng = np.random.default_rng(0)

    def rows(self, dtype: str, *shape: int) -> Array:
        """Ordinary numbers; of int8, all its values but -128."""
        if dtype == "int8":
            return self.rng.integers(-127, 128, shape).astype(np.int8)
        return self.rng.standard_normal(shape).astype(dtypes.parse(dtype, "support").numpy)

    def on_device(self, array: Array) -> Any:
        """A copy of a host array in device memory, as a CacheArray."""
        return arrays.CacheArray(arrays.to_device(np.ascontiguousarray(array), self.live), self.live)

    def pool(self, stored: str) -> tuple[list[Array], dict[str, Array]]:
        """Two NHD pools of 6 blocks of 4, and for int8 their scales."""
        pools = [self.rows(stored, 6, 4, 2, 16) for _ in "kv"]
        scales = {"k_scale", "v_scale"} if stored == "int8" else set()
        return pools, {name: abs(self.rows("float32", 6, 4, 2)) + np.float32(0.01) for name in sorted(scales)}


def _into_codes(
    bench: Bench,
    stored: str,
    rows: Sequence[Array],
    shape: tuple[int, ...],
    run: Callable[[list[Any], list[Any]], Any],
    expected: Callable[[Array, Array], Array],
) -> Trials:
    """Rows written by `run` into caches of codes of that shape; `expected` does the same to each part of the codes."""
    row = GROUP_FORMATS[stored]
    made = [_groups(bench, stored, *shape) for _ in rows]
    caches, befores = [quantised for quantised, _, _ in made], [parts for _, parts, _ in made]
    run([bench.on_device(r) for r in rows], caches)
    for new, cache, before in zip(rows, caches, befores, strict=True):
        scales = np.float32 if row.numbers == 2 else np.float16
        coded = reference.quantize_groups(new, row.bits, row.group, row.rule, scales)
        for part, got, old in zip(coded, cache, before, strict=False):
            if part is not None:
                yield got, expected(part, old), None


def _copy(bench: Bench, src: str, stored: str) -> Trials:
    if stored in GROUP_FORMATS:
        yield from _into_codes(
            bench, stored, [bench.rows(src, 9, 3, 64)], (3, 6),
            lambda rows, caches: copy.copy(*rows, *caches, position=4, window=5),
            lambda new, old: reference.copy(new, old, position=4, window=5),
        )  # fmt: skip
        return
    rows, before = bench.rows(src, 9, 3, 16), bench.rows(stored, 3, 6, 16)
    cache = bench.on_device(before)
    copy.copy(bench.on_device(rows), cache, position=4, window=5)
    yield cache, reference.copy(rows, before, position=4, window=5), None


def _copy_kv(bench: Bench, src: str, stored: str) -> Trials:
    if stored in GROUP_FORMATS:
        yield from _into_codes(
            bench, stored, [bench.rows(src, 3, 5, 64) for _ in "kv"], (12, 3),
            lambda rows, caches: copy.copy_kv(
                *rows, *caches, position=6, src_layout="head_major", cache_layout="token_major"
            ),
            lambda new, old: reference.copy(
                new, old, position=6, src_layout="head_major", cache_layout="token_major"
            ),
        )  # fmt: skip
        return
    rows, before = ([bench.rows(*form) for _ in "kv"] for form in ((src, 3, 5, 16), (stored, 12, 3, 16)))
    caches = [bench.on_device(b) for b in before]
    layouts: dict[str, Any] = {"src_layout": "head_major", "cache_layout": "token_major"}
    copy.copy_kv(*map(bench.on_device, rows), *caches, position=6, **layouts)
    for row, old, cache in zip(rows, before, caches, strict=True):
        yield cache, reference.copy(row, old, position=6, **layouts), None


def _linearize(bench: Bench, src: str, stored: str) -> Trials:
    if src == stored:
        cache, out = bench.rows(stored, 3, 6, 16), bench.on_device(bench.rows(stored, 3, 6, 16))
        copy.linearize(bench.on_device(cache), out, length=15)
        yield out, reference.linearize(cache, length=15), None


def _compact(bench: Bench, src: str, stored: str) -> Trials:
    if stored in GROUP_FORMATS:
        quantised, before, _ = _groups(bench, stored, 2, 3, 9)
        keep = np.sort(bench.rng.random((2, 3, 9)).argsort()[..., :5])
        compact.compact(quantised, keep)
        for part, old in zip(quantised, before, strict=False):
            if old is not None:
                yield part, reference.compact(old, keep), None
        return
    if src == stored or dtypes.parse(stored, "support").itemsize == 1:
        before, out = (bench.rows(stored, 2, 3, 9, 16) for _ in range(2))
        keep, mask = np.sort(bench.rng.random((2, 3, 9)).argsort()[..., :5]), bench.rng.random((2, 9)) < 0.5
        yield compact.compact(bench.on_device(before), keep), reference.compact(before, keep), None
        to = compact.compact(bench.on_device(before), mask, out=bench.on_device(out))
        expected = reference.compact(before, mask)
        for b, n in enumerate(mask.sum(axis=1)):
            expected[b, :, n:] = out[b, :, n:]
        yield to, expected, None


def _rotate(bench: Bench, src: str, stored: str) -> Trials:
    freq, before, after = [1.0, 0.1, 0.01], np.arange(9) * 5, np.arange(9)
    rope, moved = rotate.Rope(freq), np.broadcast_to(after - before, (2, 3, 9))
    if stored in GROUP_FORMATS:
        rotate.rotate(_groups(bench, stored, 2, 3, 9)[0], before, after, rope)
    elif stored == "int8":
        q, scale = reference.quantize(bench.rows(src, 2, 3, 9, 16))
        want = reference.quantize(reference.rotate(reference.dequantize(q, scale), moved, freq))
        for a, b in zip(want, (q, scale), strict=True):
            a[:, :, 0] = b[:, :, 0]  # the row that stays where it is
        got = bench.on_device(q), bench.on_device(scale)
        rotate.rotate(got[0], before, after, rope, scale=got[1])
        yield got[0], want[0], None
        yield got[1], want[1], None
    elif src == stored or dtypes.parse(stored, "support").itemsize == 1:
        rows = bench.rows(stored, 2, 3, 9, 16)
        want_rows = reference.rotate(rows, moved, freq)
        yield rotate.rotate(bench.on_device(rows), before, after, rope), reference.encode(want_rows, rows.dtype), None


def _append_ragged(bench: Bench, src: str, stored: str) -> Trials:
    if stored in GROUP_FORMATS:
        starts = np.array([-2, 0, 7], np.int32)
        yield from _into_codes(
            bench, stored, [bench.rows(src, 3, 2, 4, 64) for _ in "kv"], (3, 2, 9),
            lambda rows, caches: ragged.append_ragged(*[*rows, *caches, bench.on_device(starts)]),
            lambda new, old: reference.append_ragged(new, old, starts),
        )  # fmt: skip
    if src == stored:
        rows, before = ([bench.rows(stored, 3, 2, n, 16) for _ in "kv"] for n in (4, 9))
        offsets = np.array([-2, 0, 7], np.int32)
        caches = [bench.on_device(b) for b in before]
        ragged.append_ragged(*[*map(bench.on_device, rows), *caches, bench.on_device(offsets)])
        for row, old, cache in zip(rows, before, caches, strict=True):
            yield cache, reference.append_ragged(row, old, offsets), None


def _write_slots(bench: Bench, src: str, stored: str) -> Trials:
    slots = np.array([3, 17, -1, 8, 0], np.int32)
    if stored in GROUP_FORMATS:
        yield from _into_codes(
            bench, stored, [bench.rows(src, 5, 2, 64) for _ in "kv"], (6, 4, 2),
            lambda rows, pools: paged.write_slots(*[*rows, *pools, bench.on_device(slots)]),
            lambda new, old: reference.write_slots(new, old, slots),
        )  # fmt: skip
        return
    rows = [bench.rows(src, 5, 2, 16) for _ in "kv"]
    before, scales = bench.pool(stored)
    to = [bench.on_device(p) for p in before]
    scales_to: dict[str, Any] = {name: bench.on_device(scale) for name, scale in scales.items()}
    paged.write_slots(*[*map(bench.on_device, rows), *to, bench.on_device(slots)], **scales_to)
    for row, old, pool, name in zip(rows, before, to, ("k_scale", "v_scale"), strict=True):
        if stored == "int8":
            row, scale = reference.quantize(row, np.float32)
            want = reference.write_slots(scale[..., None], scales[name][..., None], slots)
            yield scales_to[name], want[..., 0], None
        else:
            row = reference.encode(row, old.dtype)
        yield pool, reference.write_slots(row, old, slots), None


def _gather_paged(bench: Bench, src: str, stored: str) -> Trials:
    if stored in GROUP_FORMATS:
        quantised, _, numbers = _groups(bench, stored, 6, 4, 2)
        got = paged.gather_paged(quantised, np.array([4, 1], np.int32), 7)
        yield got, reference.gather_paged(numbers, [4, 1], 7), None
        return
    if src == stored or dtypes.parse(stored, "support").itemsize == 1:
        (pool, _), scales = bench.pool(stored)
        options: dict[str, Any] = {"scale": bench.on_device(scales["k_scale"])} if scales else {}
        got = paged.gather_paged(bench.on_device(pool), np.array([4, 1], np.int32), 7, **options)
        want = reference.gather_paged(pool, [4, 1], 7)
        if scales:
            scale = reference.gather_paged(scales["k_scale"][..., None], [4, 1], 7)
            want = reference.dequantize(want, scale[..., 0])
        yield got, want, None


def _blocks(operation: Callable[..., None]) -> Callable[[Bench, str, str], Trials]:
    def run(bench: Bench, src: str, stored: str) -> Trials:
        if src == stored or dtypes.parse(stored, "support").itemsize == 1:
            (a, b), _ = bench.pool(stored)
            got, pairs = [bench.on_device(a), bench.on_device(b)], np.array([[1, 5], [0, 2]], np.int32)
            operation(*got, pairs)
            within = operation is blocks.copy_blocks
            yield got[0], reference.copy_blocks(a, a, pairs) if within else a, None
            yield got[1], reference.copy_blocks(b if within else a, b, pairs), None

    return run


def _groups(bench: Bench, stored: str, *lead: int) -> tuple[Any, Any, Array]:
    """Rows of 64 numbers in a format of groups, by `quantize` and by the reference, and the numbers that come back."""
    row, rows = GROUP_FORMATS[stored], bench.rows("float32", *lead, 64)
    scales = np.float32 if row.numbers == 2 else np.float16
    want = reference.quantize_groups(rows, row.bits, row.group, row.rule, scales)
    numbers = reference.dequantize_groups(*want, row.bits, row.rule)
    return quantize.quantize(bench.on_device(rows), stored), want, numbers


def _quantize(bench: Bench, src: str, stored: str) -> Trials:
    if stored in GROUP_FORMATS:
        quantised, expected, _ = _groups(bench, stored, 7, 3)
        for part, want in zip(quantised, expected, strict=False):
            if want is not None:
                yield part, want, None
    if src == stored:
        rows = bench.rows(src, 7, 3, 16)
        for got, want in zip(quantize.quantize(bench.on_device(rows)), reference.quantize(rows), strict=True):
            yield got, want, None


def _dequantize(bench: Bench, src: str, stored: str) -> Trials:
    if stored in GROUP_FORMATS:
        quantised, _, numbers = _groups(bench, stored, 7, 3)
        yield quantize.dequantize(quantised), numbers, None
    if src == stored:
        q, scale = bench.rows("int8", 7, 3, 16), abs(bench.rows("float16", 7, 3))
        out = bench.on_device(bench.rows(stored, 7, 3, 16))
        quantize.dequantize(bench.on_device(q), bench.on_device(scale), out)
        yield out, reference.dequantize(q, scale, out.dtype.numpy), None


def _write_qkv(bench: Bench, src: str, stored: str) -> Trials:
    if stored == "int8":
        return
    if stored in GROUP_FORMATS:
        projected = bench.rows(src, 5, (4 + 2 + 2) * 64)
        yield from _into_codes(
            bench, stored, reference.split_qkv(projected, 4, 2)[1:], (2, 8),
            lambda _, caches: write_qkv.write_qkv(
                bench.on_device(projected), *caches, num_q_heads=4, position=6, window=8
            ),
            lambda new, old: reference.copy(new, old, position=6, window=8),
        )  # fmt: skip
        return
    projected, before = bench.rows(src, 5, (4 + 2 + 2) * 16), [bench.rows(stored, 2, 8, 16) for _ in "kv"]
    caches = [bench.on_device(b) for b in before]
    got = write_qkv.write_qkv(bench.on_device(projected), *caches, num_q_heads=4, position=6, window=8)
    q, *rows = reference.split_qkv(projected, 4, 2)
    yield got, q, None
    for row, old, cache in zip(rows, before, caches, strict=True):
        yield cache, reference.copy(row, old, position=6, window=8), None


_SEVEN = np.array([7], np.int32)


def _decode_attention(bench: Bench, src: str, stored: str) -> Trials:
    if stored in GROUP_FORMATS:
        q, groups = bench.rows(src, 1, 4, 64), [_groups(bench, stored, 1, 2, 8) for _ in "kv"]
        caches = [quantised for quantised, _, _ in groups]
        got = attention.decode_attention(bench.on_device(q), caches[0], caches[1], 7, scale=0.25, impl="taichi")
        yield got, _attended(q[0], [numbers[0, :, :7] for _, _, numbers in groups]), _tolerance(src)
        return
    if src == stored or dtypes.parse(stored, "support").itemsize == 1:
        q, caches = bench.rows(src, 1, 4, 16), [bench.rows(stored, 1, 2, 8, 16) for _ in "kv"]
        options: dict[str, Any] = {}
        plain = caches
        if stored == "int8":
            scales = [abs(bench.rows("float32", 1, 2, 8)) / 64 for _ in "kv"]
            plain = [reference.dequantize(c, s) for c, s in zip(caches, scales, strict=True)]
            options = {"k_scale": bench.on_device(scales[0]), "v_scale": bench.on_device(scales[1])}
        got = attention.decode_attention(*map(bench.on_device, [q, *caches, _SEVEN]), impl="taichi", **options)
        yield got, _attended(q[0], [c[0, :, :7] for c in plain]), _tolerance(src)


def _paged_decode_attention(bench: Bench, src: str, stored: str) -> Trials:
    if stored in GROUP_FORMATS:
        q, groups = bench.rows(src, 1, 4, 64), [_groups(bench, stored, 6, 4, 2) for _ in "kv"]
        pools = [quantised for quantised, _, _ in groups]
        pages = bench.on_device(np.array([[4, 1]], np.int32))
        got = attention.paged_decode_attention(bench.on_device(q), pools[0], pools[1], pages, 7, scale=0.25)
        seen = [reference.gather_paged(numbers, [4, 1], 7).swapaxes(0, 1) for _, _, numbers in groups]
        yield got, _attended(q[0], seen), _tolerance(src)
        return
    if src == stored or dtypes.parse(stored, "support").itemsize == 1:
        q, table = bench.rows(src, 1, 4, 16), np.array([[4, 1]], np.int32)
        caches, scales = bench.pool(stored)
        options: dict[str, Any] = {name: bench.on_device(scale) for name, scale in scales.items()}
        plain = [reference.dequantize(c, s) for c, s in zip(caches, scales.values(), strict=True)] if scales else caches
        got = attention.paged_decode_attention(*map(bench.on_device, [q, *caches, table, _SEVEN]), **options)
        seen = [reference.gather_paged(c, table[0], 7).swapaxes(0, 1) for c in plain]
        yield got, _attended(q[0], seen), _tolerance(src)


def _attended(q: Array, kv: list[Array]) -> Array:
    """(1, Hq, D) float64: each query head over (H, n, D) keys and values, by the reference."""
    group = len(q) // len(kv[0])
    heads = [reference.attention(row, kv[0][h // group], kv[1][h // group], scale=0.25)[0] for h, row in enumerate(q)]
    return np.stack(heads)[None]


def _tolerance(dtype: str) -> float:
    """The tolerance for a result of about one: some roundings of its type."""
    return {"float32": 2e-5, "float16": 2e-3, "bfloat16": 2e-2}.get(dtype, 0.0)


def _merge_states(bench: Bench, src: str, stored: str) -> Trials:
    if src == stored:
        outs, lses = ([bench.rows(form, *shape) for _ in "ab"] for form, shape in ((src, (2, 4, 16)), _LSE))
        got, lse = attention.merge_states(*(bench.on_device(a) for pair in zip(outs, lses, strict=True) for a in pair))
        weights = np.exp(np.stack(lses).astype(np.float64))
        both = np.stack(outs).astype(np.float64) * weights[..., None]
        yield got, both.sum(0) / weights.sum(0)[..., None], _tolerance(src)
        yield lse, np.log(weights.sum(0)), _tolerance("float32")


_LSE = ("float32", (2, 4))


def _store(bench: Bench, src: str, stored: str) -> Trials:
    width = 64 if stored in GROUP_FORMATS else 16
    form: dict[str, Any] = {"num_layers": 2, "num_kv_heads": 2, "head_dim": width, "capacity": 9, "dtype": stored}
    cache = KVCacheStore(**form, window=[None, 4], sinks=1)
    rows = bench.rows(src, 2, 7, 2, width)
    cache.append_all(bench.on_device(rows), bench.on_device(rows))
    for layer, positions in enumerate((range(7), (0, 4, 5, 6))):
        tokens = rows[layer, list(positions)].swapaxes(0, 1)[None]
        for got in cache.tokens(layer):
            yield got, _stored(tokens, stored), None


def _paged_store(bench: Bench, src: str, stored: str) -> Trials:
    width = 64 if stored in GROUP_FORMATS else 16
    pool = PagedKVCacheStore(num_layers=1, num_kv_heads=2, head_dim=width, num_blocks=6, block_size=4, dtype=stored)
    rows = bench.rows(src, 7, 2, width)
    seq = pool.add()
    pool.append(0, bench.on_device(rows), bench.on_device(rows), [seq], cu_seqlens=[0, 7])
    for got in pool.tokens(0, pool.fork(seq)):
        yield got, _stored(rows, stored), None


def _stored(rows: Array, stored: str) -> Array:
    """The rows as a store gives them back."""
    if stored in GROUP_FORMATS:
        row = GROUP_FORMATS[stored]
        quantised = reference.quantize_groups(rows, row.bits, row.group, row.rule, np.float16)
        return reference.dequantize_groups(*quantised, row.bits, row.rule)
    if stored == "int8":
        return reference.dequantize(*reference.quantize(rows))
    return reference.encode(rows, dtypes.parse(stored, "support").numpy)


def _graph(bench: Bench, src: str, stored: str) -> Trials:
    rows, before = ([bench.rows(*form) for _ in "kv"] for form in ((src, 1, 3, 16), (stored, 3, 8, 16)))
    builder = GraphBuilder()
    builder.copy_kv("k", "v", "k_cache", "v_cache", position="position", window=8)
    graph = builder.compile()
    sources = {"k": bench.on_device(rows[0]), "v": bench.on_device(rows[1])}
    caches = {"k_cache": bench.on_device(before[0]), "v_cache": bench.on_device(before[1])}
    want = before
    for position in (7, 8):
        graph.run({**sources, **caches, "position": position})
        want = [reference.copy(r, w, position=position, window=8) for r, w in zip(rows, want, strict=True)]
    for got, expected in zip(caches.values(), want, strict=True):
        yield got, expected, None


OPERATIONS: dict[str, Callable[[Bench, str, str], Trials]] = {
    "copy": _copy,
    "copy_kv": _copy_kv,
    "linearize": _linearize,
    "compact": _compact,
    "rotate": _rotate,
    "append_ragged": _append_ragged,
    "write_slots": _write_slots,
    "gather_paged": _gather_paged,
    "copy_blocks": _blocks(blocks.copy_blocks),
    "swap_blocks": _blocks(blocks.swap_blocks),
    "quantize": _quantize,
    "dequantize": _dequantize,
    "write_qkv": _write_qkv,
    "decode_attention": _decode_attention,
    "paged_decode_attention": _paged_decode_attention,
    "merge_states": _merge_states,
    "KVCacheStore": _store,
    "PagedKVCacheStore": _paged_store,
    "GraphBuilder": _graph,
}


def trials() -> int:
    """The number of pairs of operation and dtype per back end, including those that do not apply."""
    return len(OPERATIONS) * len(DTYPES)


def over_with(trial: Trial) -> int:
    """How many of a back end's `trials` are done with this one, which may stand for all.

    A trial may find that a dtype does not apply to its operation, so the position in the order is counted.
    """
    if trial.operation not in OPERATIONS or trial.dtype not in DTYPES:
        return trials()
    return list(OPERATIONS).index(trial.operation) * len(DTYPES) + list(DTYPES).index(trial.dtype) + 1


def differs(got: Any, want: Array, tolerance: float | None) -> str:
    """What is wrong with a result; empty if it is right."""
    host = got.copy_to_host() if isinstance(got, arrays.CacheArray) else np.asarray(got)
    if host.shape != want.shape:
        return f"shape {host.shape}, expected {want.shape}"
    if tolerance is not None:
        error = float(np.abs(host.astype(np.float64) - want).max())
        return "" if error <= tolerance else f"differs by {error:.2g}, more than {tolerance:g}"
    if host.dtype != want.dtype:
        return f"dtype {host.dtype}, expected {want.dtype}"
    same = np.ascontiguousarray(host).view(np.uint8) == np.ascontiguousarray(want).view(np.uint8)
    return "" if same.all() else f"{np.count_nonzero(~same)} of {same.size} bytes differ from the reference"


def attempt(live: runtime.Runtime, operation: str, dtype: str) -> Trial | None:
    """Run one operation in one dtype, on torch's current GPU; None if the dtype does not apply to the operation."""
    compared = 0
    try:
        for got, want, tolerance in OPERATIONS[operation](Bench(arrays.runtime_of()), *DTYPES[dtype]):
            wrong = differs(got, want, tolerance)
            if wrong:
                return Trial(live.arch, operation, dtype, FAILED, wrong)
            compared += 1
    except DTypeError as error:
        return Trial(live.arch, operation, dtype, REFUSED, str(error))
    except Exception as error:  # an error of a compiler or driver becomes a line of the report
        return Trial(live.arch, operation, dtype, FAILED, f"{type(error).__name__}: {error}")
    return Trial(live.arch, operation, dtype, TESTED) if compared else None


def main(arch: str) -> None:
    """Run all trials on one back end."""
    try:
        live = runtime.init(arch)
    except ArchError as error:
        print(json.dumps({"absent": str(error)}))
        return
    for operation in OPERATIONS:
        for dtype in DTYPES:
            trial = attempt(live, operation, dtype)
            if trial is not None:
                print(json.dumps(asdict(trial)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
