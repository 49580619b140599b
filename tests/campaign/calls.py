"""The one-shot calls against `tikv.reference`; destinations lie within random bits, all of which are compared."""

import random
from typing import Any

import ml_dtypes
import numpy as np
import oracle

import tikv
from campaign.contiguous import LAYOUTS
from campaign.unfinished import refuses
from tikv import reference

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
# Few forms, since each compiles kernels of its own: source, destination, width.
COPIED = [("float32", "float32", 3), ("float16", "float16", 8), ("float32", "bfloat16", 8)]
APPENDED = [("float16", "float16"), ("float32", "float16")]
PAGED = [("float32", "float32", "NHD"), ("float16", "float16", "VLLM"), ("float32", "float16", "HND")]
GATHERED = [("float32", "NHD"), ("float16", "VLLM"), ("float16", "HND")]
HEADS, MARGIN = 2, 64  # of the canvas, elements before and behind an array


def numpy_type(name: str) -> np.dtype:
    return BFLOAT16 if name == "bfloat16" else np.dtype(name)


class Canvas:
    """An array that a call writes, with memory around it that no call may touch."""

    def __init__(self, rng, shape, dtype):
        self.whole = oracle.random_bits(rng, int(np.prod(shape)) + 2 * MARGIN, numpy_type(dtype))
        self.array = self.whole[MARGIN:-MARGIN].reshape(shape)
        self.before = self.whole.copy()

    def expect(self, want: np.ndarray | None = None, what: str = "destination") -> None:
        """Compare all of it: what the array holds, or that nothing was written."""
        wanted = self.before.copy()
        if want is not None:
            wanted[MARGIN:-MARGIN] = want.reshape(-1)
        if self.whole.tobytes() != wanted.tobytes():
            oracle.assert_same_bits(self.whole, wanted, what=what)


class Calls:
    """One call after the other; they have nothing in common but kernels and plans."""

    name = "one-shot calls"

    def __init__(self, rng, arch, number, folder):
        self.rng, self.arch, self.doing = rng, arch, "beginning"
        self.chance = random.Random(int(rng.integers(2**63)))
        self.calls = [self.copy, self.copy_kv, self.append_ragged, self.write_slots, self.write_int8_slots,
                      self.gather_paged, self.copy_blocks, self.quantize, self.dequantize]  # fmt: skip

    def step(self) -> None:
        self.chance.choice(self.calls)()

    def rows(self, shape, source: str, target: str) -> np.ndarray:
        if source == target:
            return oracle.random_bits(self.rng, shape, numpy_type(source))
        return self.rng.standard_normal(shape, np.float32).astype(source)

    def call(self, function, *arrays: Any, canvases: list[Canvas], **options: Any) -> Any:
        """Call with arrays in place, and bring back what a GPU has written."""
        if self.arch != "cuda":
            return function(*arrays, *(c.array for c in canvases), **options)
        placed = [oracle.place(c.array, self.arch) for c in canvases]
        found = function(*(oracle.place(a, self.arch) for a in arrays), *placed, **options)
        for canvas, tensor in zip(canvases, placed, strict=True):
            canvas.array[...] = oracle.to_numpy(tensor)
        return found

    def _copied(self, pair: bool) -> None:
        source, target, width = self.chance.choice(COPIED)
        src_layout, cache_layout = self.chance.choice(LAYOUTS), self.chance.choice(LAYOUTS)
        tokens, window = self.chance.choice((1, 1, 3, 7)), self.chance.choice((None, 5))
        offset = self.chance.randrange(tokens)
        options = {
            "position": self.chance.randrange(9) if window is None else self.chance.randrange(2**31 - 9),
            "window": window, "src_layout": src_layout, "cache_layout": cache_layout,
            "num_tokens": self.chance.choice((None, tokens - offset)), "src_offset": offset,
        }  # fmt: skip
        self.doing = f"{'copy_kv' if pair else 'copy'}({source} to {target}, width {width}, {tokens} rows, {options})"
        shapes = [(tokens, HEADS, width) if src_layout == "token_major" else (HEADS, tokens, width)] * (1 + pair)
        rows = [self.rows(shape, source, target) for shape in shapes]
        shape = (HEADS, 8, width) if cache_layout == "head_major" else (8, HEADS, width)
        caches = [Canvas(self.rng, shape, target) for _ in rows]
        function = tikv.copy_kv if pair else tikv.copy
        if window is None and options["position"] + tokens - offset > 8:
            refuses(tikv.CapacityError, lambda: self.call(function, *rows, canvases=caches, **options))
            for cache in caches:
                cache.expect()
            return
        reduced = options if window is None else options | {"position": options["position"] % window}
        want = [reference.copy(a, c.array, **reduced) for a, c in zip(rows, caches, strict=True)]
        self.call(function, *rows, canvases=caches, **options)
        for cache, wanted in zip(caches, want, strict=True):
            cache.expect(wanted)

    def copy(self) -> None:
        self._copied(False)

    def copy_kv(self) -> None:
        self._copied(True)

    def append_ragged(self) -> None:
        (source, target), tokens = self.chance.choice(APPENDED), self.chance.choice((1, 3))
        offsets = np.array([self.chance.randint(-4, 8) for _ in range(2)], self.chance.choice((np.int32, np.int64)))
        self.doing = f"append_ragged({source} to {target}, {tokens} rows at {offsets.tolist()})"
        rows = [self.rows((2, HEADS, tokens, 8), source, target) for _ in "kv"]
        caches = [Canvas(self.rng, (2, HEADS, 6, 8), target) for _ in "kv"]
        if self.chance.random() < 0.1:
            self.doing = f"refused {self.doing}"
            refuses(tikv.ShapeError, lambda: tikv.append_ragged(*rows, *(c.array for c in caches), offsets[:1]))
            want: list = [None, None]
        else:
            want = [reference.append_ragged(a, c.array, offsets) for a, c in zip(rows, caches, strict=True)]
            placed = [*rows, *(oracle.place(c.array, self.arch) for c in caches)]
            if self.arch == "cuda":
                placed[:2] = [oracle.place(a, self.arch) for a in rows]
            tikv.append_ragged(*placed, offsets)
            if self.arch == "cuda":
                for canvas, tensor in zip(caches, placed[2:], strict=True):
                    canvas.array[...] = oracle.to_numpy(tensor)
        for cache, wanted in zip(caches, want, strict=True):
            cache.expect(wanted)

    def pools(self, layout: str, target: str) -> list[Canvas]:
        """K's and V's, of four blocks of two tokens."""
        x = 16 // numpy_type(target).itemsize
        shape: tuple = {"NHD": (4, 2, HEADS, 16), "HND": (4, HEADS, 2, 16), "VLLM": (4, HEADS, 16, 2)}[layout]
        k_shape = (4, HEADS, 16 // x, 2, x) if layout == "VLLM" else shape
        return [Canvas(self.rng, k_shape, target), Canvas(self.rng, shape, target)]

    def slots(self, tokens: int) -> np.ndarray:
        """Where rows go: each slot once, and some nowhere."""
        found = [s if self.chance.random() < 0.8 else -1 for s in self.chance.sample(range(8), tokens)]
        return np.array(found, self.chance.choice((np.int32, np.int64)))

    def write_slots(self) -> None:
        source, target, layout = self.chance.choice(PAGED)
        slots = self.slots(self.chance.choice((1, 4)))
        self.doing = f"write_slots({source} to {target}, {layout}, slots {slots.tolist()})"
        rows = [self.rows((len(slots), HEADS, 16), source, target) for _ in "kv"]
        pools = self.pools(layout, target)
        want: list = [reference.write_slots(a, c.array, slots, layout=layout) for a, c in zip(rows, pools, strict=True)]
        if self.chance.random() < 0.1:
            self.doing, slots, want = f"refused {self.doing}", np.append(slots[1:], 8), [None, None]
            refuses(
                tikv.TikvError,
                lambda: self.call(lambda *a: tikv.write_slots(*a, slots, layout=layout), *rows, canvases=pools),
            )
        else:
            self.call(lambda *a: tikv.write_slots(*a, slots, layout=layout), *rows, canvases=pools)
        for pool, wanted in zip(pools, want, strict=True):
            pool.expect(wanted)

    def write_int8_slots(self) -> None:
        slots = self.slots(self.chance.choice((1, 4)))
        self.doing = f"write_slots(float32 to int8, slots {slots.tolist()})"
        rows = [self.rows((len(slots), HEADS, 16), "float32", "int8") for _ in "kv"]
        pools = self.pools("NHD", "int8")
        scales = [Canvas(self.rng, (4, 2, HEADS), "float16") for _ in "kv"]
        want = []
        for found, canvases in zip(zip(*map(reference.quantize, rows), strict=True), (pools, scales), strict=True):
            for a, canvas in zip(found, canvases, strict=True):
                after = canvas.array.reshape(8, *a.shape[1:]).copy()
                for row, slot in zip(a, slots, strict=True):
                    if slot >= 0:
                        after[slot] = row
                want.append(after)

        def write(*a):
            tikv.write_slots(*a[:4], slots, k_scale=a[4], v_scale=a[5])

        self.call(write, *rows, canvases=pools + scales)
        for canvas, wanted in zip(pools + scales, want, strict=True):
            canvas.expect(wanted)

    def gather_paged(self) -> None:
        dtype, layout = self.chance.choice(GATHERED)
        length = self.chance.choice((1, 4, 7))
        table = np.array([self.chance.randrange(4) for _ in range(4)], self.chance.choice((np.int32, np.int64)))
        pool = self.chance.choice(self.pools(layout, dtype))
        self.doing = f"gather_paged({dtype} {layout}, {pool.array.ndim} axes, {length} tokens of {table.tolist()})"
        want = reference.gather_paged(pool.array, table, length, layout=layout)
        source = oracle.place(pool.array, self.arch)
        if self.chance.random() < 0.1:
            self.doing = f"refused {self.doing}"
            refuses(tikv.PositionError, lambda: tikv.gather_paged(source, table - 4, length, layout=layout))
        elif self.chance.random() < 0.5:
            oracle.assert_same_bits(tikv.gather_paged(source, table, length, layout=layout), want, what="rows")
        else:
            out = Canvas(self.rng, want.shape, dtype)
            self.call(lambda to: tikv.gather_paged(source, table, length, layout=layout, out=to), canvases=[out])
            out.expect(want)
        pool.expect(pool.array, "pool")
        pool.expect(None, "pool")

    def copy_blocks(self) -> None:
        layout, dtype = self.chance.choice(("NHD", "VLLM")), self.chance.choice(("float32", "int8"))
        pools, order = self.pools(layout, dtype), self.chance.sample(range(4), 4)
        pairs = np.array([order[:2], order[2:]][: self.chance.randint(1, 2)], np.int32)
        if self.chance.random() < 0.2:
            pairs[0, self.chance.randrange(2)] = -1
        self.doing = f"copy_blocks({dtype} {layout}, {pairs.tolist()})"
        want: list = [reference.copy_blocks(c.array, c.array, pairs) for c in pools]
        if self.chance.random() < 0.1:
            pairs, want = np.array([[0, 1], [2, self.chance.choice((0, 1, 4))]], np.int32), [None, None]
            self.doing = f"refused copy_blocks({dtype} {layout}, {pairs.tolist()})"
            refuses(
                tikv.PositionError,
                lambda: self.call(lambda *a: tikv.copy_blocks(*a, pairs), canvases=pools),
            )
        else:
            self.call(lambda *a: tikv.copy_blocks(*a, pairs), canvases=pools)
        for pool, wanted in zip(pools, want, strict=True):
            pool.expect(wanted)

    def quantize(self) -> None:
        source, scale = self.chance.choice((("float32", "float16"), ("float16", "float32")))
        self.doing = f"quantize({source}, scales {scale})"
        rows = self.rows((self.chance.choice((1, 3)), HEADS, 16), source, "int8")
        if self.chance.random() < 0.2:
            rows[0, 0, :4] = self.chance.choice(((0, np.inf, np.nan, -np.inf), (0, -0.0, 0, 0)))
        before = rows.copy()
        found = tikv.quantize(oracle.place(rows, self.arch), scale)
        for got, want, what in zip(found, reference.quantize(rows, np.dtype(scale)), ("q", "scale"), strict=True):
            oracle.assert_same_bits(got, want, what=what)
        oracle.assert_same_bits(rows, before, what="source")

    def dequantize(self) -> None:
        target, scale = self.chance.choice((("float32", "float16"), ("float16", "float32")))
        self.doing = f"dequantize(to {target}, scales {scale})"
        shape = (self.chance.choice((1, 3)), HEADS, 16)
        q = oracle.random_bits(self.rng, shape, "int8")
        scales = np.abs(self.rng.standard_normal(shape[:2], np.float32)).astype(scale)
        out = Canvas(self.rng, shape, target)
        if self.chance.random() < 0.1:
            self.doing = f"refused {self.doing}"
            refuses(tikv.ShapeError, lambda: tikv.dequantize(q, scales[:, :1], out.array))
            out.expect()
            return
        self.call(tikv.dequantize, q, scales, canvases=[out])
        out.expect(reference.dequantize(q, scales, numpy_type(target)))
