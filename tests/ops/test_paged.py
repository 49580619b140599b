"""Page pools: writes by slot, gathers, blocks copied and swapped. Whole pools as raw bits, in every layout."""

import ml_dtypes
import numpy as np
import oracle
import pytest
from launch_counter import count_launches, refuse_plans

import tikv
from tikv import arrays, reference, runtime

pytestmark = pytest.mark.full(each_value=True)

BF16 = ml_dtypes.bfloat16
LAYOUTS = ("NHD", "HND", "VLLM")
PAIRS = {
    "f32": (np.float32, np.float32),
    "f16": (np.float16, np.float16),
    "bf16": (BF16, BF16),
    "f64": (np.float64, np.float64),
    "f32_f16": (np.float32, np.float16),
    "f32_bf16": (np.float32, BF16),
    "bf16_f32": (BF16, np.float32),
}
BLOCKS, PAGE, HEADS, WIDTHS = 5, 4, 3, (16, 8)
SLOTS = [7, -1, 0, 19, 4, 5, -7, 6, 13, 12, 3]


def pool_shape(layout, stream, dtype, *, blocks=BLOCKS, page=PAGE, heads=HEADS, width=None):
    width = WIDTHS[stream] if width is None else width
    x = 16 // np.dtype(dtype).itemsize
    return {
        "NHD": (blocks, page, heads, width),
        "HND": (blocks, heads, page, width),
        "VLLM": ((blocks, heads, width // x, page, x), (blocks, heads, width, page))[stream],
    }[layout]


class Case:
    """Rows of K and V, and pools full of random bits between guards, as the back end takes them."""

    def __init__(self, rng, arch, layout="NHD", dtypes=(np.float32, np.float32), tokens=None, **shape):
        if np.dtype(np.float64) in map(np.dtype, dtypes) and arch not in ("cpu", "cuda"):
            pytest.skip("there is no float64 on this back end")
        self.arch, self.layout = arch, layout
        tokens = len(SLOTS) if tokens is None else tokens
        heads, widths = shape.get("heads", HEADS), [shape.get("width", w) for w in WIDTHS]
        make = oracle.random_bits if dtypes[0] == dtypes[1] else oracle.numbers
        self.rows = [make(rng, (tokens, heads, width), dtypes[0]) for width in widths]
        shapes = [pool_shape(layout, stream, dtypes[1], **shape) for stream in (0, 1)]
        self.before = [oracle.random_bits(rng, shape, dtypes[1]) for shape in shapes]
        self.guarded = [oracle.Guarded(rng, pool) for pool in self.before]
        self.pools = [oracle.place(g.array, arch) for g in self.guarded]
        self.placed = [oracle.place(a, arch) for a in self.rows]

    def write(self, slots):
        tikv.write_slots(*self.placed, *self.pools, slots, layout=self.layout)

    def check(self, slots, rows=None):
        for i, name in enumerate("kv"):
            want = reference.write_slots((rows or self.rows)[i], self.before[i], slots, layout=self.layout)
            oracle.assert_same_bits(self.pools[i], want, what=name)
            self.guarded[i].check()

    def unchanged(self):
        self.check([-1] * len(self.rows[0]))


def on_device(values, arch):
    """An index array that only the device knows."""
    values = np.asarray(values)
    if arch == "cuda":
        return oracle.place(values, arch)
    ti = runtime.ti
    array = ti.ndarray(ti.i32 if values.dtype == np.int32 else ti.i64, values.shape)
    array.from_numpy(values)
    return array


@pytest.mark.parametrize("dtypes", PAIRS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_go_to_their_slots(arch, rng, layout, dtypes):
    case = Case(rng, arch, layout, PAIRS[dtypes])
    case.write(oracle.place(np.array(SLOTS), arch))
    case.check(SLOTS)


@pytest.mark.parametrize("width", [1, 3, 80])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_odd_widths(arch, rng, layout, width):
    case = Case(rng, arch, layout, (np.float16, np.float16), heads=2, width=width, page=3)
    slots = [7, -1, 0, 14, 4, 5, -7, 6, 13, 12, 3]
    case.write(oracle.place(np.array(slots), arch))
    case.check(slots)


@pytest.mark.parametrize("where", ["numpy", "torch", "taichi", "list"])
@pytest.mark.parametrize("index", [np.int32, np.int64], ids=["int32", "int64"])
def test_slots_may_lie_anywhere(arch, rng, where, index):
    case = Case(rng, arch)
    slots = np.array(SLOTS, index)
    if where == "torch":
        pytest.importorskip("torch")
        given = oracle.to_torch(slots, arch)
    else:
        given = {"numpy": slots, "taichi": on_device(slots, arch), "list": SLOTS}[where]
    case.write(given)
    case.check(SLOTS)


def test_strided_rows_and_interleaved_pools_are_used_in_place(arch, rng):
    tokens, heads, width = 6, 2, 8
    fused = oracle.random_bits(rng, (tokens, 4 * heads * width), np.float16)
    both = oracle.random_bits(rng, (4, 2, 3, heads, width), np.float16)
    want, slots = both.copy(), [11, 0, -1, 4, 5, 7]
    pair, rows = oracle.place(both, arch), oracle.place(fused, arch)

    def part(array, i):
        return array[:, i * heads * width : (i + 1) * heads * width].reshape(tokens, heads, width)

    tikv.write_slots(part(rows, 1), part(rows, 3), pair[:, 0], pair[:, 1], np.array(slots))
    for i, piece in ((0, 1), (1, 3)):
        want[:, i] = reference.write_slots(part(fused, piece), both[:, i].copy(), slots)
    oracle.assert_same_bits(pair, want)


def test_head_major_rows_are_read_as_what_they_are(arch, rng):
    """The original handed (H, T, D) scratch to an append that read it as (T, H, D)."""
    case = Case(rng, arch)
    head_major = [np.ascontiguousarray(rows.swapaxes(0, 1)) for rows in case.rows]
    scrambled = [rows.reshape(len(SLOTS), HEADS, -1) for rows in head_major]
    case.placed = [oracle.place(rows, arch).swapaxes(0, 1) for rows in head_major]
    case.write(np.array(SLOTS))
    case.check(SLOTS)
    with pytest.raises(AssertionError):
        case.check(SLOTS, scrambled)


@pytest.mark.parametrize("length", [0, 1, PAGE - 1, PAGE, 2 * PAGE])
def test_a_token_goes_to_the_slot_of_its_position(arch, rng, length):
    """The original's plan counted with and without the new token, indexed HND pages as NHD, and refused 32.

    Here the caller says where: position `length`, counted from 0, is slot `length % bs` of its page. Whichever way the
    original is read, one of these lengths (none written yet, a page just full) goes wrong.
    """
    table = [3, 1, 4]
    case = Case(rng, arch, "HND", (np.float16, np.float16), tokens=1, width=32)
    page, offset = table[length // PAGE], length % PAGE
    case.write(np.array([page * PAGE + offset]))
    for rows, before, pool in zip(case.rows, case.before, case.pools, strict=True):
        want = before.copy()
        want[page, :, offset] = rows[0]
        oracle.assert_same_bits(pool, want)
        got = tikv.gather_paged(pool, np.array(table), length + 1, layout="HND")
        oracle.assert_same_bits(oracle.to_numpy(got)[length], rows[0])


@pytest.mark.parametrize("what", ["tokens", "heads", "blocks", "page"])
def test_an_extent_of_zero_is_a_success(arch, rng, what):
    case = Case(rng, arch, **{what: 0})
    slots = np.full(len(case.rows[0]), -1)
    case.write(slots)
    case.unchanged()


@pytest.mark.parametrize("widths", [(16, 0), (0, 8), (0, 0)], ids=str)
def test_a_width_of_zero_skips_that_tensor_only(arch, rng, monkeypatch, widths):
    monkeypatch.setitem(globals(), "WIDTHS", widths)
    case = Case(rng, arch)
    for _ in range(2):
        case.write(np.array(SLOTS))
        case.check(SLOTS)


def test_keys_and_values_take_one_launch(arch, rng, monkeypatch):
    launches = count_launches(monkeypatch)
    case = Case(rng, arch, page=7)
    case.write(np.array(SLOTS))
    case.check(SLOTS)
    assert len(launches) == 1


def test_later_calls_only_launch(arch, rng, monkeypatch):
    case = Case(rng, arch)
    index = oracle.place(np.array(SLOTS), arch)
    case.write(index)
    case.check(SLOTS)
    if arch in ("cpu", "cuda"):  # elsewhere these arrays are the host's, and each call brings them over
        refuse_plans(monkeypatch)
    case.before = [oracle.to_numpy(pool).copy() for pool in case.pools]
    other = [SLOTS[-1], *SLOTS[:-1]]
    index[:] = oracle.place(np.array(other), arch)
    case.write(index)
    case.check(other)


@pytest.mark.parametrize("slot", [BLOCKS * PAGE, BLOCKS * PAGE + 1, 2**40 + 3], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_slot_of_the_host_beyond_the_pool_raises(arch, rng, layout, slot):
    case = Case(rng, arch, layout)
    slots = np.array([*SLOTS[:-1], slot])
    match = rf"slot_mapping\[10\]={slot} is beyond the pool of 20 slots \(5 blocks of 4\)"
    for _ in range(2):  # before and after the call is planned
        with pytest.raises(tikv.PositionError, match=match):
            case.write(slots)
        case.unchanged()
    case.write(np.array(SLOTS))
    with pytest.raises(tikv.PositionError, match=match):
        case.write(slots)
    case.check(SLOTS)


@pytest.mark.archs("vulkan", "cuda", "metal")
@pytest.mark.parametrize("slot", [BLOCKS * PAGE, 2**31 - 1, 2**40 + 3, -(2**40)], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_slot_of_the_device_beyond_the_pool_is_skipped(arch, rng, layout, slot, debug):
    case = Case(rng, arch, layout)
    slots = np.array([*SLOTS[:-1], slot])
    case.write(on_device(slots, arch))
    case.check([*SLOTS[:-1], -1])
    case.before = [oracle.to_numpy(pool).copy() for pool in case.pools]
    debug()
    if slot > 0:
        with pytest.raises(tikv.PositionError, match=rf"slot_mapping\[10\]={slot}"):
            case.write(on_device(slots, arch))
        case.unchanged()
    else:
        case.write(on_device(slots, arch))


@pytest.mark.parametrize("where", ["host", "device"])
def test_two_tokens_for_one_slot_are_an_error_in_debug_mode(arch, rng, where, debug):
    case = Case(rng, arch, tokens=5)
    slots = np.array([3, -1, 7, -1, 3])
    given = slots if where == "host" else on_device(slots, arch)
    debug()
    with pytest.raises(tikv.PositionError, match="slot_mapping names destination 3 more than once"):
        case.write(given)
    case.unchanged()
    debug(False)
    case.write(given)  # either row may stay, on CUDA of each word, nothing else may happen
    for before, rows, pool in zip(case.before, case.rows, case.pools, strict=True):
        written = oracle.to_numpy(pool)[0, 3]
        for head in range(HEADS):
            got, one, other = (oracle.bits(row) for row in (written[head], rows[0, head], rows[4, head]))
            assert ((got == one) | (got == other)).all()
            if arch != "cuda":  # where the threads of a row do not wait for each other
                assert any(np.array_equal(got, row) for row in (one, other))
        want = reference.write_slots(rows, before, [-1, -1, 7, -1, -1])
        want[0, 3] = written
        oracle.assert_same_bits(pool, want)


REFUSED = {
    "k without an axis": (0, lambda a: a[0], tikv.ShapeError, "axes"),
    "v of other heads": (1, lambda a: a[:, :2], tikv.ShapeError, "heads of v "),
    "v of fewer tokens": (1, lambda a: a[:5], tikv.ShapeError, "tokens of v "),
    "v of another dtype": (1, lambda a: np.zeros_like(a, np.float16), tikv.DTypeError, "the same dtype"),
    "k of another width": (0, lambda a: a[:, :, :8], tikv.ShapeError, "head width of k_pool"),
    "k that is not contiguous": (0, lambda a: np.asfortranarray(a), tikv.ShapeError, "not contiguous"),
    "a pool of other heads": (2, lambda a: a[:, :, :2], tikv.ShapeError, "heads of k_pool"),
    "a pool of fewer blocks": (3, lambda a: a[:4], tikv.ShapeError, "blocks of v_pool"),
    "a pool of smaller blocks": (3, lambda a: a[:, :3], tikv.ShapeError, "block size of v_pool"),
    "a pool of five axes": (2, lambda a: a[None], tikv.ShapeError, "axes"),
    "a pool that no rows convert to": (3, lambda a: a.view(np.int32), tikv.DTypeError, "dtype"),
    "a pool that is read-only": (2, lambda a: np.broadcast_to(a, a.shape), tikv.ShapeError, "read-only"),
    "one pool for both": (3, None, tikv.ShapeError, "overlap"),
    "too few slots": (4, lambda a: a[:-1], tikv.ShapeError, "length of slot_mapping"),
    "slots in two axes": (4, lambda a: a[None], tikv.ShapeError, "axes"),
    "slots that are not integers": (4, lambda a: a.astype(np.float32), tikv.DTypeError, "int32 or int64"),
    "slots that are not an array": (4, lambda a: "slots", tikv.DTypeError, "not an array"),
}


@pytest.mark.archs("cpu", "vulkan", "metal")
@pytest.mark.parametrize("what", REFUSED)
def test_a_refusal_writes_nothing(arch, rng, what):
    place, change, error, match = REFUSED[what]
    case = Case(rng, arch, width=16)
    arrays = [*case.placed, *case.pools, np.array(SLOTS)]
    arrays[place] = arrays[2] if change is None else change(arrays[place])
    with pytest.raises(error, match=match) as refusal:
        tikv.write_slots(*arrays)
    assert str(refusal.value).startswith("write_slots: ")
    case.unchanged()


@pytest.mark.archs("cpu", "vulkan", "metal")
def test_layouts_scales_and_chunks_are_checked(arch, rng):
    case = Case(rng, arch, "VLLM")
    scale = np.zeros((BLOCKS, PAGE, HEADS), np.float32)
    with pytest.raises(tikv.OptionError, match="unknown layout 'NDH'"):
        tikv.write_slots(*case.placed, *case.pools, SLOTS, layout="NDH")
    with pytest.raises(tikv.DTypeError, match="only pools of int8 and of 8-bit floats have scales"):
        tikv.write_slots(*case.placed, *case.pools, SLOTS, layout="VLLM", k_scale=scale, v_scale=scale.copy())
    with pytest.raises(tikv.ShapeError, match="v_scale is missing"):
        tikv.write_slots(*case.placed, *case.pools, SLOTS, layout="VLLM", k_scale=scale)
    halves = case.pools[0].reshape(BLOCKS, HEADS, 8, PAGE, 2)
    with pytest.raises(tikv.ShapeError, match=r"its last axis, x, has 2 elements where 4 are needed \(16 bytes\)"):
        tikv.write_slots(*case.placed, halves, case.pools[1], SLOTS, layout="VLLM")
    case.unchanged()


# Gathers.


@pytest.mark.parametrize("stream", [0, 1], ids=["k", "v"])
@pytest.mark.parametrize(
    ("layout", "dtypes"),
    [(layout, pair) for layout in LAYOUTS for pair in PAIRS if layout == "NHD" or "_" not in pair],
)
def test_a_gather_reads_tokens_in_order(arch, rng, layout, dtypes, stream):
    to, stored = (np.dtype(d) for d in PAIRS[dtypes][::-1])
    case = Case(rng, arch, layout, (stored, stored))
    table, length = [4, 0, 2, -1], 2 * PAGE + 3
    if stored != to:
        case.pools[stream][...] = oracle.place(oracle.numbers(rng, case.before[stream].shape, stored), arch)
    pool = oracle.to_numpy(case.pools[stream])
    want = reference.encode(reference.gather_paged(pool, table, length, layout=layout), to)
    if stored == to:
        got = tikv.gather_paged(case.pools[stream], np.array(table), length, layout=layout)
        assert got.shape == want.shape
        oracle.assert_same_bits(got, want)
    guarded = oracle.Guarded(rng, oracle.random_bits(rng, want.shape, to))
    out = oracle.place(guarded.array, arch)
    assert tikv.gather_paged(case.pools[stream], table, length, layout=layout, out=out) is out
    oracle.assert_same_bits(out, want)
    guarded.check()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_was_written_is_gathered(arch, rng, layout):
    tokens, table = 14, np.array([4, 0, 2, 1], np.int32)
    case = Case(rng, arch, layout, (np.float16, np.float16), tokens=tokens)
    case.write(np.concatenate([block * PAGE + np.arange(PAGE) for block in table])[:tokens])
    for pool, rows in zip(case.pools, case.rows, strict=True):
        for length in (0, 1, PAGE, tokens):
            got = tikv.gather_paged(pool, oracle.place(table, arch), length, layout=layout)
            oracle.assert_same_bits(got, rows[:length])


@pytest.mark.parametrize(
    ("table", "length", "match"),
    [
        ([1, 2], 2 * PAGE + 1, "length=9 takes 3 blocks of 4, and block_table has 2. Read at most 8 tokens"),
        ([1, BLOCKS], PAGE + 1, r"block_table\[1\]=5 is not one of the pool's 5 blocks"),
        ([-1, 1], 1, r"block_table\[0\]=-1"),
        ([1], -1, "length=-1"),
    ],
    ids=["too short", "beyond the pool", "padding", "negative"],
)
def test_a_gather_that_is_refused(arch, rng, table, length, match):
    case = Case(rng, arch)
    guarded = oracle.Guarded(rng, oracle.random_bits(rng, (max(0, length), HEADS, 16), np.float32))
    before = guarded.array.copy()
    out = oracle.place(guarded.array, arch)
    with pytest.raises(tikv.PositionError, match=match):
        tikv.gather_paged(case.pools[0], np.array(table), length, out=out)
    oracle.assert_same_bits(out, before)
    guarded.check()


@pytest.mark.archs("vulkan", "cuda", "metal")
@pytest.mark.parametrize("outside", [np.array([2**33, -1]), np.array([-(2**30), -(2**31)], np.int32)])
def test_blocks_that_only_the_device_knows_to_be_outside_are_not_read(arch, rng, debug, outside):
    case = Case(rng, arch)
    table = on_device(np.array([2, *outside, 1], outside.dtype), arch)
    length = 4 * PAGE
    rows = reference.pool_rows(case.before[0])
    want = np.zeros((length, HEADS, 16), np.float32)
    want[:PAGE], want[3 * PAGE :] = rows[2 * PAGE : 3 * PAGE], rows[PAGE : 2 * PAGE]
    oracle.assert_same_bits(tikv.gather_paged(case.pools[0], table, length), want)
    before = oracle.random_bits(rng, want.shape, np.float32)
    out = oracle.place(before.copy(), arch)
    tikv.gather_paged(case.pools[0], table, length, out=out)
    before[:PAGE], before[3 * PAGE :] = want[:PAGE], want[3 * PAGE :]
    oracle.assert_same_bits(out, before)
    debug()
    with pytest.raises(tikv.PositionError, match=r"block_table\[1\]"):
        tikv.gather_paged(case.pools[0], table, length)


@pytest.mark.archs("cpu", "vulkan", "metal")
def test_the_out_of_a_gather_is_checked(arch, rng):
    case = Case(rng, arch)
    pool = case.pools[0]
    with pytest.raises(tikv.ShapeError, match=r"\(length, H, D\) = \(3, 3, 16\)"):
        tikv.gather_paged(pool, [1], 3, out=np.zeros((3, 3, 15), np.float32))
    with pytest.raises(tikv.DTypeError, match="cannot copy float32 into int32"):
        tikv.gather_paged(pool, [1], 3, out=np.zeros((3, 3, 16), np.int32))
    with pytest.raises(tikv.DTypeError, match="a pool of float32 has no scale"):
        tikv.gather_paged(pool, [1], 3, scale=np.zeros((BLOCKS, PAGE, HEADS), np.float32))
    with pytest.raises(tikv.ShapeError, match="overlap"):
        tikv.gather_paged(pool, [1], 4, out=pool[2])
    with pytest.raises(tikv.DTypeError, match="int32 or int64"):
        tikv.gather_paged(pool, np.zeros(3), 4)
    case.unchanged()


# Blocks.

MOVES = [(0, 3), (2, 4), (-1, 1), (1, -5), (0, 0)]


@pytest.mark.parametrize("where", ["host", "device"])
@pytest.mark.parametrize("dtype", ["f32", "bf16", "i8"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_blocks_are_copied(arch, rng, layout, dtype, where):
    dtype = {"f32": np.float32, "bf16": BF16, "i8": np.int8}[dtype]
    case = Case(rng, arch, layout, (dtype, dtype), width=16)
    pairs = np.array(MOVES, np.int32)
    tikv.copy_blocks(*case.pools, pairs if where == "host" or arch != "cuda" else oracle.place(pairs, arch))
    for name, pool, before, guarded in zip("kv", case.pools, case.before, case.guarded, strict=True):
        oracle.assert_same_bits(pool, reference.copy_blocks(before, before, MOVES), what=name)
        guarded.check()


def test_blocks_of_interleaved_pools_and_of_their_scales(arch, rng):
    both = oracle.random_bits(rng, (4, 2, 3, 5), np.float16)
    placed = oracle.place(both.copy(), arch)
    tikv.copy_blocks(placed[:, 0], placed[:, 1], [(3, 1)])
    both[1] = both[3]
    oracle.assert_same_bits(placed, both)


def place_pool(pool, arch, where):
    """A pool on the host, or in the device's own memory; and how to read it."""
    if where == "host":
        return pool
    if arch == "cuda":
        return oracle.place(pool, arch)
    live = arrays.runtime_of()
    from tikv.arrays import CacheArray, to_device

    return CacheArray(to_device(pool, live), live)


@pytest.mark.parametrize(
    "way", [("host", "device"), ("device", "host"), ("device", "device"), ("host", "host")], ids=str
)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_blocks_are_swapped_between_host_and_device(arch, rng, layout, way):
    dtype = np.dtype(np.float16)
    source = oracle.random_bits(rng, pool_shape(layout, 0, dtype, blocks=7), dtype)
    target = oracle.random_bits(rng, pool_shape(layout, 0, dtype), dtype)
    want = reference.copy_blocks(source, target, [(6, 1), (0, 0), (5, 4), (-1, 2)])
    src, dst = place_pool(source.copy(), arch, way[0]), place_pool(target.copy(), arch, way[1])
    tikv.swap_blocks(src, dst, np.array([(6, 1), (0, 0), (5, 4), (-1, 2)]))
    oracle.assert_same_bits(dst, want)
    oracle.assert_same_bits(src, source)
    tikv.swap_blocks(dst, src, [(1, 2)])
    source[2] = want[1]
    oracle.assert_same_bits(src, source)


def test_a_sequence_survives_being_swapped_out_and_in(arch, rng):
    """The original kept the books of a swap and moved no data."""
    case = Case(rng, arch, dtypes=(np.float16, np.float16), tokens=2 * PAGE)
    pool = place_pool(case.before[0].copy(), arch, "device")
    other = place_pool(case.before[1].copy(), arch, "device")
    tikv.write_slots(*case.placed, pool, other, np.arange(2 * PAGE) + PAGE)
    host = np.zeros((2, PAGE, HEADS, 16), np.float16)
    tikv.swap_blocks(pool, host, [(1, 1), (2, 0)])
    tikv.swap_blocks(host, pool, [(1, 4), (0, 0)])
    got = tikv.gather_paged(pool, [4, 0], 2 * PAGE)
    oracle.assert_same_bits(got, case.rows[0])


def test_blocks_within_one_pool_by_swap(arch, rng):
    before = oracle.random_bits(rng, (4, 2, 3, 5), np.float16)
    pool = oracle.place(before.copy(), arch)
    tikv.swap_blocks(pool, pool, [(1, 3)])
    oracle.assert_same_bits(pool, reference.copy_blocks(before, before, [(1, 3)]))


@pytest.mark.parametrize(
    ("pairs", "error", "match"),
    [
        ([(0, BLOCKS)], tikv.PositionError, r"pairs\[0\] copies to block 5, and the pool has 5 blocks"),
        ([(0, 1), (9, 1)], tikv.PositionError, r"pairs\[1\] copies from block 9"),
        ([(0, 1), (2, 1)], tikv.PositionError, "names destination 1 more than once"),
        ([(0, 1), (1, 2)], tikv.PositionError, "block 1 is the source of one pair and the destination of another"),
        ([(0, 1, 2)], tikv.ShapeError, r"\(P, 2\)"),
        ([0, 1], tikv.ShapeError, r"\(P, 2\)"),
        ([(0.0, 1.0)], tikv.DTypeError, "int32 or int64"),
    ],
    ids=str,
)
def test_pairs_that_are_refused(arch, rng, pairs, error, match):
    case = Case(rng, arch)
    with pytest.raises(error, match=match):
        tikv.copy_blocks(*case.pools, pairs)
    with pytest.raises(error, match=match):
        tikv.swap_blocks(case.pools[0], case.pools[0], pairs)
    case.unchanged()


def test_no_pairs_move_nothing(arch, rng):
    case = Case(rng, arch)
    for pairs in ([], np.zeros((0, 2), np.int32)):
        tikv.copy_blocks(*case.pools, pairs)
        tikv.swap_blocks(case.pools[0], case.pools[0], pairs)
    case.unchanged()


@pytest.mark.archs("cpu", "vulkan", "metal")
def test_pools_whose_blocks_cannot_be_moved(arch, rng):
    pool = oracle.random_bits(rng, (4, 3, 2, 8), np.float32)
    before = pool.copy()
    for other, error, match in (
        (np.zeros((3, 3, 2, 8), np.float32), tikv.ShapeError, "number of blocks of v_pool"),
        (np.zeros((4, 3, 2, 9), np.float32)[..., :8], tikv.ShapeError, "gaps"),
        (np.zeros(4, np.float32), tikv.ShapeError, "blocks on its first axis"),
        (np.broadcast_to(np.zeros((4, 3, 2, 8), np.float32), (4, 3, 2, 8)), tikv.ShapeError, "read-only"),
        (pool, tikv.ShapeError, "overlap"),
    ):
        with pytest.raises(error, match=match):
            tikv.copy_blocks(pool, other, [(0, 1)])
    for other, error, match in (
        (np.zeros((4, 2, 3, 8), np.float32), tikv.ShapeError, "have the same layout"),
        (np.zeros((4, 2, 3, 8), np.float32).swapaxes(1, 2), tikv.ShapeError, "have the same layout"),
        (np.zeros((4, 3, 2, 8), np.float16), tikv.DTypeError, "the same dtype"),
        (pool[1:], tikv.ShapeError, "overlap"),
    ):
        with pytest.raises(error, match=match):
            tikv.swap_blocks(pool, other, [(0, 1)])
    oracle.assert_same_bits(pool, before)


@pytest.mark.archs("cpu", "cuda")
def test_views_of_one_pool_that_begin_together_are_not_the_same_pool(arch):
    pool = oracle.place(np.arange(8, dtype=np.float32).reshape(4, 2, 1, 1), arch)
    for part in (pool[:2], pool[::2]):
        with pytest.raises(tikv.ShapeError, match="overlap"):
            tikv.swap_blocks(part, pool, [(0, 3)])
    oracle.assert_same_bits(oracle.to_numpy(pool).ravel(), np.arange(8, dtype=np.float32))
    tikv.swap_blocks(pool, pool, [(0, 3)])
    oracle.assert_same_bits(oracle.to_numpy(pool).ravel(), np.array([0, 1, 2, 3, 4, 5, 0, 1], np.float32))


@pytest.mark.archs("cpu", "cuda")
def test_scales_of_pages_of_one_slot_may_have_any_stride_there(arch, rng):
    k, v = (oracle.place(oracle.numbers(rng, (2, 2, 8), np.float32), arch) for _ in "kv")
    found = []
    for flat in (False, True):
        pools = [oracle.place(np.zeros((4, 1, 2, 8), np.int8), arch) for _ in "kv"]
        scales = [oracle.place(np.ones((4, 2), np.float32), arch) for _ in "kv"]
        scales = [a.reshape(4, 1, 2) if flat else a[:, None] for a in scales]
        tikv.write_slots(k, v, *pools, np.array([3, 0]), k_scale=scales[0], v_scale=scales[1])
        rows = tikv.gather_paged(pools[0], np.array([3, 0]), 2, scale=scales[0])
        found.append([oracle.to_numpy(a) for a in (*pools, *scales, rows)])
    for one, other in zip(*found, strict=True):
        oracle.assert_same_bits(one, other)
    assert found[0][0][[0, 3]].any()


def test_a_list_that_is_no_array_is_refused(arch):
    pool = np.zeros((4, 2, 1, 1), np.float32)
    with pytest.raises(tikv.ShapeError, match=r"^copy_blocks: pairs is a list that cannot .*[^.]\. Pass rows"):
        tikv.copy_blocks(pool, pool.copy(), [(0, 1), (2,)])
