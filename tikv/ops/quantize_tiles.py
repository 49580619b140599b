"""KVarN's tiles as plain functions: tokens in whole groups to codes, and back; see `kernels/tiles.py`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from tikv import dtypes, launch, runtime
from tikv.arrays import Array, ArrayView, CacheArray, describe, new_array, view
from tikv.errors import DTypeError, OptionError, ShapeError
from tikv.formats import TileFormat
from tikv.ops import checks
from tikv.ops.plan import Launch, Plan
from tikv.ops.quantized_arrays import copied_together, merged_axes, parts_of, side_by_side, target_of

TILES_OF = ("keys", "values")
COLUMNS = 32  # that a row has a multiple of
NAMES = ("codes", "scales", "factors")
WIDE_BYTES = 8  # of the words in which a GPU accesses rows, scales and factors
SERIAL_ROWS = 128  # on CPU, up to as many are decoded before another thread wakes


class QuantizedTiles(NamedTuple):
    """Tokens as KVarN's codes, which `quantize` makes; `dequantize` turns them back into numbers.

    A tile's codes are R rows of C: D channels of G tokens for keys, G tokens of D channels for values.

    Attributes:
        codes: (..., T / G, R, C * bits / 32) uint32, the first code of a row in the lowest bits.
        scales: (..., T / G, R) float16, one per row.
        biases: the same.
        factors: (..., T / G, C) float16: what a row's numbers are multiplied by, for each column.
        format: the format, as `tikv.formats` defines it.
        of: "keys" or "values".
        shape: the shape of the tokens, (..., T, D).
    """

    codes: Array
    scales: Array
    biases: Array
    factors: Array
    format: TileFormat
    of: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """The bytes of codes, scales, biases and factors together."""
        return int(sum(a.nbytes for a in (self.codes, self.scales, self.biases, self.factors)))


def quantize_tiles(
    live: runtime.Runtime, operation: str, x: Array, format: TileFormat, of: str | None, others: Mapping[str, Any]
) -> QuantizedTiles:
    """`quantize` for KVarN; `others` are arguments of other formats."""
    if of not in TILES_OF:
        raise OptionError(
            f"{operation}: of={of!r} is not supported with {format}, which encodes keys and values differently. Use "
            f"of='keys' or of='values'."
        )
    for name, value in others.items():
        if value is not None:
            raise OptionError(
                f"{operation}: {name} does not apply to {format}, whose scales are float16. Leave it out."
            )
    rows = view(x, "x", operation)
    checks.on_device([("x", rows)], live, operation)
    if rows.dtype not in dtypes.QUANTIZABLE:
        raise DTypeError(f"{operation}: x is {describe(rows)}. Pass float32, float16 or bfloat16.")
    checks.readable(rows, "x", operation)
    shapes = shapes_of(operation, format, of, rows.shape, describe(rows))
    codes, numbers, factors = (
        new_array(shape, dtype, live)
        for shape, dtype in zip(shapes, (dtypes.uint32, dtypes.float16, dtypes.float16), strict=True)
    )
    if 0 not in rows.shape:
        _run(live, operation, format, of, (rows, codes, numbers, factors), writes_tiles=True)
    scales, biases = (a.restrided(a.shape[:-1], a.strides[:-1]) for a in parts_of(numbers, 2))
    made = [CacheArray(a, live) for a in (codes, scales, biases, factors)]
    return QuantizedTiles(made[0], made[1], made[2], made[3], format, of, rows.shape)


def dequantize_tiles(live: runtime.Runtime, operation: str, tiles: QuantizedTiles, out: Array) -> Any:
    """`dequantize` for KVarN."""
    format, of, shape = tiles.format, tiles.of, tuple(tiles.shape)
    if of not in TILES_OF:
        raise OptionError(f"{operation}: of={of!r} is not supported. Use 'keys' or 'values'.")
    shapes = shapes_of(operation, format, of, shape, f"shape {shape}")
    named = {name: view(getattr(tiles, name), name, operation) for name in ("codes", "scales", "biases", "factors")}
    checks.on_device([*named.items()], live, operation)
    expected = (shapes[0], shapes[1][:-1], shapes[1][:-1], shapes[2])
    for (name, a), needed in zip(named.items(), expected, strict=True):
        dtype = dtypes.uint32 if name == "codes" else dtypes.float16
        if a.dtype is not dtype:
            raise DTypeError(f"{operation}: {name} is {describe(a)}, not {dtype.name}.")
        if a.shape != needed:
            raise ShapeError(f"{operation}: {name} is {describe(a)} where {needed} is needed.")
    codes, factors = named["codes"], named["factors"]
    apart = [a.restrided((*a.shape, 1), (*a.strides, 2)) for a in (named["scales"], named["biases"])]
    numbers = side_by_side(apart)
    if numbers is None:
        numbers = copied_together(apart, live)
    for name, a in (("codes", codes), ("scales", numbers), ("factors", factors)):
        _, strides = merged_axes(a.shape, [a.strides])
        if 0 not in a.shape and strides[0] not in ((1,), ()):
            raise ShapeError(f"{operation}: {name} is not contiguous. Pass what tikv.quantize returned, or copies.")
    target, out = target_of(live, operation, out, shape)
    if 0 not in shape:
        _run(live, operation, format, of, (target, codes, numbers, factors), writes_tiles=False)
    return out


def shapes_of(
    operation: str, format: TileFormat, of: str, shape: Sequence[int], described: str
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """The shapes of codes, scales with biases, and factors of tokens (..., T, D).

    Raises:
        ShapeError: the number of tokens is not a multiple of the group, or channels do not fill whole words.
    """
    if len(shape) < 2 or shape[-2] % format.group:
        raise ShapeError(
            f"{operation}: x is {described}; {format} encodes whole tiles of {format.group} tokens. Pass (..., T, D) "
            f"with T a multiple of {format.group}."
        )
    *lead, tokens, width = shape
    check_width(operation, format, width, f"x is {described}")
    rows, columns = format.sides(of, width)
    count = tokens // format.group
    words = columns * format.bits(of) // 32
    return (*lead, count, rows, words), (*lead, count, rows, 2), (*lead, count, columns)


def check_width(operation: str, format: TileFormat, width: int, what: str) -> None:
    """Raise ShapeError unless the channels of a head fill whole words."""
    if width == 0 or width % COLUMNS:
        raise ShapeError(
            f"{operation}: {what}; {format} supports heads whose width is a multiple of {COLUMNS}. Use another format."
        )


class TileRows(NamedTuple):
    """Tokens of several heads, and the tiles that they become or come from.

    Attributes:
        sequences, heads, tokens: how many there are; those of a head follow each other.
        sequence, head, token: the steps from one row to the next, in elements.
        step: how many tiles lie between those of a head and those of the next; with a table, those of a block.
        firsts: where the first row begins, and the codes, the scales and the factors of the first head's first tile.
        skip: how many tokens before the first are not read.
        table: (sequences, blocks) of the blocks that hold a sequence's tiles; None if they follow each other.
    """

    sequences: int
    heads: int
    tokens: int
    sequence: int
    head: int
    token: int
    step: int
    firsts: tuple[int, int, int, int]
    skip: int = 0
    table: ArrayView | None = None


def _run(
    live: runtime.Runtime, operation: str, format: TileFormat, of: str, arrays: Sequence[ArrayView], writes_tiles: bool
) -> None:
    """Encode rows, or decode them: rows (..., T, D), codes, scales with biases, and factors."""
    x = arrays[0]
    extents, strides = merged_axes(x.shape[:-1], [x.strides[:-1]])
    if len(extents) > 2:
        name = "x" if writes_tiles else "out"
        raise ShapeError(
            f"{operation}: {name} ({describe(x)}, strides {x.strides} elements) has more than two axes that cannot be "
            "merged into one. Pass a contiguous array."
        )
    sequences, tokens = (1,) * (2 - len(extents)) + tuple(extents)
    sequence, token = (0,) * (2 - len(extents)) + strides[0]
    first, *others = (a.offset // a.dtype.itemsize for a in arrays)
    rows = TileRows(
        sequences, 1, tokens, sequence, 0, token, tokens // format.group, (first, others[0], others[1], others[2])
    )
    run_tiles(live, operation, format, of, arrays, rows, x.shape[-1], writes_tiles)


def run_tiles(
    live: runtime.Runtime,
    operation: str,
    format: TileFormat,
    of: str,
    arrays: Sequence[ArrayView],
    rows: TileRows,
    width: int,
    writes_tiles: bool,
) -> None:
    """Encode rows, or decode tiles to rows; `arrays` are those of rows, codes, scales with biases, and factors."""
    from tikv.kernels.tiles_cuda import WIDEST

    if not writes_tiles:
        _decode(live, operation, format, of, arrays, rows, width)
    elif live.is_cpu or (live.is_cuda and live.engine.has_bitcode and width <= WIDEST):
        _encode(live, operation, format, of, arrays, rows, width)
    else:
        _encode_by_passes(live, operation, format, of, arrays, rows, width)


def _encode(
    live: runtime.Runtime, operation: str, format: TileFormat, of: str, arrays: Sequence[ArrayView], rows: TileRows,
    width: int,
) -> None:  # fmt: skip
    """`run_tiles` that encodes, in one launch."""

    def make() -> Plan:
        from tikv.kernels import tiles as kernels
        from tikv.kernels.tiles_cuda import THREADS, make_encode_tiles_cuda

        form = kernels.Tiles(format.name, of, arrays[0].dtype.short, width)
        tiles = rows.sequences * rows.heads * rows.tokens // format.group
        each, workers = kernels.places_of(form.name, form.width).end, min(live.threads, tiles)
        work = [new_array((workers * each,), dtypes.float32, live)] if live.is_cpu else []  # which the plan keeps alive
        items = checks.integer(
            workers if live.is_cpu else tiles * THREADS, "threads that encode tiles", operation, high=2**31 - 1
        )

        def bind(arrays: Sequence[ArrayView]) -> list[Launch]:
            _check_addresses(live, operation, arrays)
            params = _params_of(rows, tiles)._replace(work=each)
            if live.is_cpu:
                kernel = launch.kernel(live, kernels.make_encode_tiles_cpu, workers, form)
            else:
                kernel = launch.kernel(live, make_encode_tiles_cuda, form)
            taken = [*arrays, *work]
            return [Launch(kernel.bind(items, *taken, params), taken)]

        return Plan(live, operation, ("x", *NAMES), (False, True, True, True), bind)

    _run_kept(live, "encode_tiles", operation, format, of, arrays, rows, make)


def _encode_by_passes(
    live: runtime.Runtime, operation: str, format: TileFormat, of: str, arrays: Sequence[ArrayView], rows: TileRows,
    width: int,
) -> None:  # fmt: skip
    """`run_tiles` that encodes, with a launch for each pass over all tiles."""
    from tikv.kernels import tiles as kernels

    tiles = rows.sequences * rows.heads * rows.tokens // format.group
    form = kernels.Tiles(format.name, of, arrays[0].dtype.short, width)
    each = kernels.places_of(form.name, form.width).end
    checks.integer(tiles * each, "floats between the passes over tiles", operation, high=2**31 - 1)
    work = new_array((tiles * each,), dtypes.float32, live)  # launches keep no memory alive: this function does

    def bind(arrays: Sequence[ArrayView]) -> list[Launch]:
        _check_addresses(live, operation, arrays)
        taken = [*arrays, work]
        params = _params_of(rows, tiles)._replace(work=each)

        def passes(*named: str, first: int = 0) -> list[Launch]:
            launches = []
            for name in named:
                items = tiles * kernels.items_of(name, form)
                kernel = launch.kernel(live, kernels.make_tile_pass, live.kernel_style, name, first, form)
                launches.append(Launch(kernel.bind(items, *taken, tuple(params._replace(items=items))), taken))
            return launches

        start = [*passes("load"), *passes("channels", first=1), *passes("tokens"), *passes("choose", first=1)]
        turn = passes("channels", "tokens", "choose")
        return [*start, *turn * kernels.TURNS, *passes("encode")]

    Plan(live, operation, ("x", *NAMES), (False, True, True, True), bind).run(arrays)


def _decode(
    live: runtime.Runtime, operation: str, format: TileFormat, of: str, arrays: Sequence[ArrayView], rows: TileRows,
    width: int,
) -> None:  # fmt: skip
    """`run_tiles` that decodes, in one launch."""
    table = rows.table
    # Tiles have whole words of everything, so only their beginnings and the rows may lie between words.
    steps = [rows.sequence, rows.head, rows.token, rows.firsts[0]]
    wide = not live.is_cpu and not any(n * arrays[0].dtype.itemsize % WIDE_BYTES for n in steps)
    wide = wide and not any((a.ptr or 0) % WIDE_BYTES for a in (arrays[0], *arrays[2:]))
    wide = wide and not any(n * 2 % WIDE_BYTES for n in rows.firsts[2:])
    arrays = [*arrays, *([] if table is None else [table])]
    at = 0 if table is None else table.strides[0]

    def make() -> Plan:
        def bind(arrays: Sequence[ArrayView]) -> list[Launch]:
            from tikv.kernels import tiles as kernels
            from tikv.kernels.hadamard import HELD
            from tikv.kernels.lanes import BLOCK

            _check_addresses(live, operation, arrays)
            heads, table = rows.sequences * rows.heads, arrays[4] if len(arrays) > 4 else None
            parts = -(-rows.tokens // kernels.TOGETHER) + 1  # one more if the first token is not the first of a part
            count, threads = heads * rows.tokens, heads * parts * width // HELD
            items = count if live.is_cpu else -(-threads // BLOCK) * BLOCK
            checks.integer(items, "threads that decode tiles", operation, high=2**31 - 1)
            bits = 0 if table is None else table.dtype.itemsize * 8
            form = kernels.Tiles(format.name, of, arrays[0].dtype.short, width, bits)
            first = 0 if table is None else table.offset // table.dtype.itemsize
            params = _params_of(rows, items)._replace(rows=count, parts=parts, table_sequence=at, table_first=first)
            serial = live.is_cpu and count < SERIAL_ROWS
            kernel = launch.kernel(live, kernels.make_decode_tiles, live.kernel_style, serial, wide, form)
            taken = [*arrays[:4], table or arrays[0]]
            return [Launch(kernel.bind(items, *taken, params), taken)]

        names = ("out", *NAMES, *["block tables"] * (table is not None))
        return Plan(live, operation, names, [name == "out" for name in names], bind)

    name = "decode_tiles in words" if wide else "decode_tiles"
    _run_kept(live, name, operation, format, of, arrays, rows, make)


def _params_of(rows: TileRows, items: int) -> Any:
    """The `TileParams` of rows."""
    from tikv.kernels.tiles import TileParams

    return TileParams(
        items, rows.tokens, rows.heads, rows.sequence, rows.head, rows.token, rows.step, rows.skip, *rows.firsts
    )


def _run_kept(
    live: runtime.Runtime, name: str, operation: str, format: TileFormat, of: str, arrays: Sequence[ArrayView],
    rows: TileRows, make: Callable[[], Plan],
) -> None:  # fmt: skip
    """Run a plan over tiles, which is made once for arrays of one form."""
    key = (name, operation, *[a.key for a in arrays], format, of, *rows[: TileRows._fields.index("firsts")])
    plan: Plan | None = live.plans.get(key)
    if plan is None:
        plan = live.plans.keep(key, make())
    names = ("first", "codes_first", "numbers_first", "factors_first", "skip")
    plan.run(arrays, dict(zip(names, (*rows.firsts, rows.skip), strict=True)))


def _check_addresses(live: runtime.Runtime, operation: str, arrays: Sequence[ArrayView]) -> None:
    for name, a in zip(("rows", *NAMES), arrays, strict=False):
        checks.addressable(a, a.dtype.itemsize, live, name, operation)
