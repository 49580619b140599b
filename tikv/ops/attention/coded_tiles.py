"""Attention over KVarN's tiles for a few query rows, which reads the codes in place; see the kernels.

It takes five launches, whatever the number of tiles: queries are rotated, products with keys become scores,
scores become weights, and weights products with values, whose parts are added up and rotated back. Where tensor cores
serve (`why_not_fused`), it takes three: one reads keys and values and keeps the scores, the last one merges parts.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from tikv import dtypes, launch, runtime
from tikv.arrays import ArrayView, new_array
from tikv.formats import TileFormat
from tikv.ops import checks
from tikv.ops.attention.request import AttentionScale
from tikv.ops.attention.splits import GPU_BLOCKS
from tikv.ops.plan import Launch, Plan
from tikv.ops.rotate_queries import rotation_launch

if TYPE_CHECKING:
    from tikv.kernels.attention.coded_tiles import ProductForm, ProductParams, WeightForm, WeightParams

# On CPU, below these the calling thread finishes before another one wakes.
SERIAL_PRODUCTS = 1 << 18
SERIAL_WEIGHTS = 1 << 15
TASKS_OF_WORKER = 4  # on CPU, at least so many parts of values for each thread
MOST_PARTS = 64
STARTING_TURNS = 0.5  # turns of a warp that the start and the end of a block on tensor cores take as long as, about
KEEPING_BUSY = 2  # blocks on tensor cores that take a multiprocessor about as long as one
UNIT = 8  # codes that a GPU's thread takes at a time
THREADS = 128  # of a GPU's block
FUSED = "fused"


class TileCodes(NamedTuple):
    """The codes of keys or of values.

    Attributes:
        of: "keys" or "values".
        codes: (B, H, tiles, lines, words) uint32, contiguous; with a table, (blocks, H, tiles of a block, ...).
        numbers, factors: scales and biases, (..., lines, 2), and factors, (..., columns), float16.
        table: (B, most blocks) of the blocks that hold a sequence's tiles; None without pages.
        lens: (B,) how many tokens of a sequence are codes; None if all have as many.
    """

    of: str
    codes: ArrayView
    numbers: ArrayView
    factors: ArrayView
    table: ArrayView | None = None
    lens: ArrayView | None = None

    @property
    def arrays(self) -> tuple[ArrayView, ArrayView, ArrayView]:
        """The arrays that `sequences` divides if there is no table."""
        return self.codes, self.numbers, self.factors

    def sequences(self, first: int, end: int) -> TileCodes:
        """The codes of some sequences."""
        table, lens = (a and a.part(0, first, end) for a in (self.table, self.lens))
        codes, numbers, factors = self.arrays if table else [a.part(0, first, end) for a in self.arrays]
        return TileCodes(self.of, codes, numbers, factors, table, lens)


class SeenTiles(NamedTuple):
    """Which tiles are read, and which of their tokens a query sees.

    Attributes:
        tiles: of a sequence, from its first slot on.
        length, first_valid, ahead: as in `AttendedTokens`; with lengths on the device, `length` is not read.
        span: tokens that a query sees, itself included; None: all.
        ring: slots of the ring; 0 without a ring.
    """

    tiles: int
    length: int
    first_valid: int = 0
    ahead: int = 0
    span: int | None = None
    ring: int = 0


class TileScratch(NamedTuple):
    """Float32 memory of `attend_tiles`: rotated queries, scores (B, H, rows, tokens), parts of results.

    If it `is_fused`, tensor cores attend, and the log-sum-exps of parts take the place of scores.
    """

    rotated: ArrayView
    scores: ArrayView
    parts: ArrayView
    is_fused: bool = False


def parts_of(live: runtime.Runtime, batch: int, heads: int, rows: int, width: int, tiles: int) -> int:
    """In how many parts the products of weights with values are computed: enough to fill the device."""
    tasks = batch * heads
    if live.is_cpu:
        enough = -(-TASKS_OF_WORKER * live.threads // tasks) if live.threads > 1 else 1
    else:
        enough = -(-GPU_BLOCKS[live.arch] * THREADS // (tasks * (rows // band_of(rows)) * (width // UNIT)))
    each = -(-tiles // max(1, min(enough, MOST_PARTS)))
    return -(-tiles // each)


def why_not_fused(live: runtime.Runtime, q: ArrayView, codes: tuple[TileCodes, TileCodes]) -> str:
    """Why tensor cores do not attend over these codes, in one launch for keys and values; empty if they do."""
    if reason := launch.why_no_bitcode(live) or launch.why_no_hopper(live):
        return reason
    from tikv.kernels.attention.sm80 import coded, coded_tiles

    widths = codes[0].codes.shape[3], codes[1].factors.shape[3]
    if not {*widths} <= {*coded_tiles.WIDTHS}:
        return f"heads are {widths[0]} wide for keys and {widths[1]} for values"
    if q.dtype.short not in coded.QUERIES:
        return f"q is {q.dtype.name}"
    begins = [n % coded_tiles.PIECE for of in codes for a in of.arrays for n in (a.ptr or 0, a.offset)]
    return f"codes do not begin at a multiple of {coded_tiles.PIECE} bytes" if any(begins) else ""


def fused_parts_of(
    live: runtime.Runtime, q: ArrayView, codes: tuple[TileCodes, TileCodes], format: TileFormat, tiles: int
) -> int:
    """In how many parts tensor cores read the tiles of a sequence."""
    from tikv.kernels.attention.coded_tiles import WeightForm
    from tikv.kernels.attention.sm80 import coded_tiles

    heads = codes[0].codes.shape[1]
    keys, values = (forms_of(format, of, 1, heads)[0] for of in codes)
    form = coded_tiles.FusedForm(keys, values, WeightForm(1, False, False, 0))
    blocks: int = q.shape[0] * heads * -(-q.shape[1] // heads * q.shape[2] // coded_tiles.ROWS)
    return tile_parts(blocks, tiles, launch.multiprocessors(live), coded_tiles.resident(form), coded_tiles.WARPS)


@functools.cache
def tile_parts(blocks: int, tiles: int, multiprocessors: int, resident: int, warps: int) -> int:
    """The number of parts that take the least time, if blocks take turns as long as those on their multiprocessor.

    `resident` blocks are on a multiprocessor at once. On an H200, 256 blocks of 64 tiles take 124 us in 1 part, and
    147, 135 and 140 us in 2, 3 and 4.
    """

    def turns(parts: int) -> float:
        full, rest = divmod(blocks * parts, multiprocessors * resident)
        last = max(KEEPING_BUSY, -(-rest // multiprocessors)) if rest else 0
        of_block: float = math.ceil(-(-tiles // parts) / warps) + STARTING_TURNS
        return (full * resident + last) * of_block

    parts = min(range(1, max(1, min(MOST_PARTS, -(-tiles // warps))) + 1), key=turns)
    each = -(-tiles // parts)
    return -(-tiles // each)


def band_of(rows: int) -> int:
    """Rows that a GPU's thread computes together."""
    return next(n for n in (4, 3, 2, 1) if rows % n == 0)


def attend_tiles(
    live: runtime.Runtime,
    operation: str,
    q: ArrayView,
    codes: tuple[TileCodes, TileCodes],
    format: TileFormat,
    seen: SeenTiles,
    asked: AttentionScale,
    scratch: TileScratch,
    to: tuple[ArrayView, ArrayView],
) -> None:
    """Attention of (B, Hq, T, D) queries over keys and values; float32 results, and log-sum-exps in base e.

    Raises:
        CapacityError: an array is larger than 32-bit indices reach.
    """
    keys, values = codes
    codes_of = [f"the {what} of {of}" for of in "KV" for what in ("codes", "scales", "factors")]
    names = ("q", *codes_of, "rotated queries", "scores", "parts of results", "out", "lse")
    arrays = [q, *keys.arrays, *values.arrays, scratch.rotated, scratch.scores, scratch.parts, *to]
    _run(
        live,
        operation,
        FUSED if scratch.is_fused else "",
        dict(zip(names, arrays, strict=True)),
        keys,
        (format, seen, asked),
    )


def weigh_tiles(
    live: runtime.Runtime,
    operation: str,
    q: ArrayView,
    keys: TileCodes,
    format: TileFormat,
    seen: SeenTiles,
    asked: AttentionScale,
    scratch: TileScratch,
    weighing: tuple[ArrayView, ArrayView, str],
) -> None:
    """The mass that (B, Hq, T, D) queries give the tokens; `weighing` has log-sum-exps, the mass, and its kind.

    They are those of `AttentionPlan.weigh`; `scratch.parts` is not used.
    """
    lse, mass, kind = weighing
    names = ("q", "the codes of K", "the scales of K", "the factors of K", "rotated queries", "scores", "lse", "mass")
    arrays = [q, *keys.arrays, scratch.rotated, scratch.scores, lse, mass]
    _run(live, operation, kind, dict(zip(names, arrays, strict=True)), keys, (format, seen, asked))


def _run(
    live: runtime.Runtime, operation: str, kind: str, named: dict[str, ArrayView], keys: TileCodes,
    options: tuple[TileFormat, SeenTiles, AttentionScale],
) -> None:  # fmt: skip
    """Run the plan over these arrays."""
    named |= {name: a for name, a in (("block tables", keys.table), ("lengths", keys.lens)) if a is not None}
    format, seen, asked = options
    key = ("tiles", kind, *named, *[a.key for a in named.values()], format, seen.tiles, seen.span, seen.ring, *asked)
    plan: Any = live.plans.get(key)
    if plan is None:
        of_plan = _FusedPlan if kind == FUSED else _TilePlan
        plan = live.plans.keep(key, of_plan(live, operation, kind, tuple(named), options))
    length, first_valid = seen.length, seen.first_valid
    if seen.ring and length > 2 * seen.ring:  # the same tokens in the same slots, in 32 bits
        short = seen.ring + length % seen.ring
        length, first_valid = short, max(0, first_valid - (length - short))
    plan.run([*named.values()], {"length": length, "first_valid": first_valid, "ahead": seen.ahead})


class _TilePlan(Plan):
    """The launches over arrays of one form and one number of tiles, and the memory of CPU workers.

    Without a `kind` of mass they attend, otherwise they weigh.
    """

    def __init__(
        self, live: runtime.Runtime, operation: str, kind: str, names: tuple[str, ...],
        options: tuple[TileFormat, SeenTiles, AttentionScale],
    ) -> None:  # fmt: skip
        written = {"rotated queries", "scores", "parts of results", "out", "mass", *["lse"] * (not kind)}
        super().__init__(live, operation, names, [name in written for name in names])
        self.kind = kind
        self.format, self.seen, self.asked = options
        self.work: list[ArrayView] = []

    def bind(self, arrays: Sequence[ArrayView]) -> list[Launch]:
        """As in `Plan`; entries that change are set in each run."""
        live, operation, seen, self.work = self.live, self.operation, self.seen, []
        for name, a in zip(self.names, arrays, strict=True):
            checks.addressable(a, a.dtype.itemsize, live, name, operation)
        named = dict(zip(self.names, arrays, strict=True))
        q, rotated, scores = (named[name] for name in ("q", "rotated queries", "scores"))
        indices = named.get("block tables"), named.get("lengths")
        keys, shapes = TileCodes("keys", arrays[1], arrays[2], arrays[3], *indices), (q, scores)
        launches = [
            rotation_launch(live, operation, q, rotated, None),
            self._product(keys, rotated, scores, shapes, (seen.tiles, 1, 0)),
            self._weights(q, scores, indices[1], named["lse"], named.get("mass")),
        ]
        if not self.kind:
            values, parts = TileCodes("values", arrays[4], arrays[5], arrays[6], *indices), named["parts of results"]
            of_parts = parts.shape[0], -(-seen.tiles // parts.shape[0]), parts.strides[0]
            launches.append(self._product(values, scores, parts, shapes, of_parts))
            launches.append(rotation_launch(live, operation, parts, named["out"], None))
        return launches

    def _product(
        self, of: TileCodes, x: ArrayView, to: ArrayView, shapes: tuple[ArrayView, ArrayView],
        parts: tuple[int, int, int],
    ) -> Launch:  # fmt: skip
        """The launch that multiplies `x` with codes; `parts` are their number, tiles of each, and the step."""
        from tikv.kernels.attention import coded_tiles as kernels
        from tikv.kernels.attention.cpu import lines

        live, (q, scores) = self.live, shapes
        batch, heads, rows, tokens = scores.shape
        form, params = forms_of(self.format, of, rows // q.shape[2], heads)
        count, each, step = parts
        params = params._replace(
            tiles=self.seen.tiles, queries=q.shape[2], parts=count, each=each, part=step, tokens=tokens
        )
        tasks = batch * heads * count
        taken = [x, *of.arrays, of.table or x, of.lens or x, to]
        if not live.is_cpu:
            band = band_of(rows)
            items = tasks * (rows // band) * (form.columns // UNIT)
            checks.integer(items, "units of products", self.operation, high=2**31 - 1)
            kernel = launch.kernel(live, kernels.make_tile_products, live.kernel_style, band, form)
            return Launch(kernel.bind(items, *taken, params._replace(items=items)), taken)
        products = tasks * each * rows * form.columns * form.lines
        workers = live.threads if products >= SERIAL_PRODUCTS else 1
        floats = lines.line_work_floats(form.lines, form.columns)
        self.work.append(new_array((workers * floats,), dtypes.float32, live))
        kernel = launch.kernel(live, kernels.make_tile_products_cpu, workers, rows, form)
        params = params._replace(items=tasks, work=floats)
        return Launch(kernel.bind(workers, *taken, self.work[-1], params), taken)

    def _weights(
        self, q: ArrayView, scores: ArrayView, lens: ArrayView | None, lse: ArrayView, mass: ArrayView | None
    ) -> Launch:
        """The launch that turns scores into weights, or into the mass of tokens."""
        from tikv.kernels.attention import coded_tiles as kernels

        live, (batch, heads, rows, tokens) = self.live, scores.shape
        all_rows = batch * heads * rows
        items = all_rows if live.is_cpu else -(-all_rows * kernels.LANES // THREADS) * THREADS
        form, params, scalars = self._seen(q, rows, heads, tokens, lens, lse)
        params = params._replace(items=items)
        serial, style = live.is_cpu and all_rows * tokens < SERIAL_WEIGHTS, live.kernel_style
        if mass is not None:
            items = checks.integer(batch * heads * params.slots, "tokens", self.operation, high=2**31 - 1)
            params = params._replace(
                items=items, lse_sequence=lse.strides[0], lse_head=lse.strides[1], lse_token=lse.strides[2],
                mass_sequence=mass.strides[0], mass_head=mass.strides[1], mass_first=_first(mass),
            )  # fmt: skip
            kernel = launch.kernel(live, kernels.make_tile_mass, style, serial, self.kind == "max", form)
            taken = [scores, lens or lse, lse, mass]
            return Launch(kernel.bind(items, *taken, params, scalars), taken)
        kernel = launch.kernel(live, kernels.make_tile_weights, style, serial, form)
        taken = [scores, lens or lse, lse]
        return Launch(kernel.bind(items, *taken, params, scalars), taken)

    def _seen(
        self, q: ArrayView, rows: int, heads: int, tokens: int, lens: ArrayView | None, lse: ArrayView
    ) -> tuple[WeightForm, WeightParams, tuple[float, ...]]:
        """Which slots the rows of a KV head see, and what turns products into logits; `tokens` are a row of scores."""
        from tikv.kernels.attention.coded_tiles import WeightForm, WeightParams
        from tikv.kernels.attention.parameters import LOG2E, MAX_TOKENS, AttentionScalars

        seen, cap = self.seen, self.asked.softcap
        scale = 1 / math.sqrt(q.shape[3]) if self.asked.scale is None else self.asked.scale
        scalars = AttentionScalars(scale * LOG2E, 1.0, math.log(2))
        if cap is not None:
            scalars = scalars._replace(logit_scale=scale / cap, softcap=cap * LOG2E)
        form = WeightForm(rows // q.shape[2], seen.span is not None, cap is not None, _bits(lens))
        params = WeightParams(
            0, q.shape[0] * heads * rows, rows, q.shape[2], heads, tokens, seen.tiles * self.format.group,
            window=MAX_TOKENS if seen.span is None else min(seen.span, MAX_TOKENS), ring=seen.ring,
            lens_sequence=0 if lens is None else lens.strides[0], lens_first=_first(lens), lse_first=_first(lse),
        )  # fmt: skip
        return form, params, tuple(scalars)


class _FusedPlan(_TilePlan):
    """Three launches: queries are rotated, tensor cores attend over parts of the tiles, and parts are merged."""

    def bind(self, arrays: Sequence[ArrayView]) -> list[Launch]:
        """As in `Plan`; entries that change are set in each run."""
        from tikv.kernels.attention.sm80 import coded_tiles as kernels

        live, operation, seen = self.live, self.operation, self.seen
        for name, a in zip(self.names, arrays, strict=True):
            checks.addressable(a, a.dtype.itemsize, live, name, operation)
        named = dict(zip(self.names, arrays, strict=True))
        q, rotated, sums, parts, out, lse = (
            named[name] for name in ("q", "rotated queries", "scores", "parts of results", "out", "lse")
        )
        table, lens = named.get("block tables"), named.get("lengths")
        keys = TileCodes("keys", arrays[1], arrays[2], arrays[3], table, lens)
        values = TileCodes("values", arrays[4], arrays[5], arrays[6], table, lens)
        batch, heads, count = q.shape[0], keys.codes.shape[1], parts.shape[0]
        group = q.shape[1] // heads
        rows, of_all = group * q.shape[2], batch * q.shape[1] * q.shape[2]
        of_weights, seen_params, scalars = self._seen(q, rows, heads, 0, lens, lse)
        (of_keys, k_params), (of_values, v_params) = (forms_of(self.format, of, group, heads) for of in (keys, values))
        numbers = {"tiles": seen.tiles, "queries": q.shape[2], "parts": count, "each": -(-seen.tiles // count)}
        k_params, v_params = (a._replace(part=parts.strides[0], **numbers) for a in (k_params, v_params))
        items = batch * heads * -(-rows // kernels.ROWS) * count * THREADS
        checks.integer(items, "threads that attend", operation, high=2**31 - 1)
        taken = [
            rotated, keys.codes, values.codes, keys.factors, values.factors, keys.numbers, values.numbers,
            table or rotated, lens or rotated, parts, sums,
        ]  # fmt: skip
        form = kernels.FusedForm(of_keys, of_values, of_weights)
        kernel = launch.kernel(live, kernels.make_attend_tiles, form)
        attended = Launch(kernel.bind(items, *taken, k_params, v_params, seen_params, scalars), taken)
        merging = launch.kernel(live, kernels.make_merge_tiles, out.shape[3])
        items = -(-of_all * kernels.lanes_of(out.shape[3]) // THREADS) * THREADS
        merged = [parts, sums, out, lse]
        merge_params = kernels.MergeParams(items, of_all, count, parts.strides[0], _first(out), _first(lse))
        return [
            rotation_launch(live, operation, q, rotated, None),
            attended,
            Launch(merging.bind(items, *merged, merge_params, scalars), merged),
        ]


def forms_of(format: TileFormat, of: TileCodes, group: int, heads: int) -> tuple[ProductForm, ProductParams]:
    """The kernels' compile-time choices for tiles, and what is known of their numbers."""
    from tikv.kernels.attention.coded_tiles import ProductForm, ProductParams

    lines, columns = of.codes.shape[3], of.factors.shape[3]
    table, codes, numbers, factors = of.table, *of.arrays
    form = ProductForm(of.of, format.bits(of.of), lines, columns, group, _bits(table), _bits(of.lens))
    params = ProductParams(
        room=codes.shape[2], heads=heads, codes_first=codes.offset * 8 // (UNIT * form.bits),
        numbers_first=numbers.offset // 4, factors_first=_first(factors), blocks=codes.shape[0],
        table_sequence=0 if table is None else table.strides[0], table_first=_first(table),
        lens_sequence=0 if of.lens is None else of.lens.strides[0], lens_first=_first(of.lens),
    )  # fmt: skip
    return form, params


def _bits(indices: ArrayView | None) -> int:
    return 0 if indices is None else indices.dtype.itemsize * 8


def _first(a: ArrayView | None) -> int:
    return 0 if a is None else a.offset // a.dtype.itemsize
