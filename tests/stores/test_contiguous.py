"""KVCacheStore against plain lists of tokens: what it holds after anything that was done to it."""

import copy
import gc
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import oracle
import pytest
from inside import storage_of
from launch_counter import count_launches

import tikv
from tikv import arrays, dtypes, reference
from tikv.stores import limits
from tikv.stores.layers import memory as layer_module

pytestmark = pytest.mark.full(each_value=True)

HEADS, LAYERS = 2, 3


class Row(NamedTuple):
    """A store to test. Widths are such that rows of every dtype have the same bytes, and so share kernels."""

    name: str
    dtype: str
    source: str
    window: Any = None
    sinks: int = 0
    batch: int = 1
    v_is_wider: bool = False

    @property
    def widths(self):
        size = self.storage.itemsize
        return 16 // size, (24 if self.v_is_wider else 16) // size

    @property
    def source_type(self):
        return dtypes.parse(self.source, "test").numpy

    @property
    def storage(self):
        return dtypes.parse(self.dtype, "test").numpy

    def make(self, **changes):
        keywords = {
            "num_layers": LAYERS,
            "num_kv_heads": HEADS,
            "head_dim": self.widths[0],
            "head_dim_v": self.widths[1],
            "capacity": 16,
            "batch_size": self.batch,
            "dtype": self.dtype,
            "window": self.window,
            "sinks": self.sinks,
        }
        return tikv.KVCacheStore(**{**keywords, **changes})


ROWS = [
    Row("f16_linear", "float16", "float16"),
    Row("bf16_ring", "bfloat16", "bfloat16", window=5),
    Row("f16_sinks", "float16", "float16", window=6, sinks=2, batch=2, v_is_wider=True),
    Row("f32_mixed", "float32", "float32", window=[None, 4, 7], sinks=1, batch=2, v_is_wider=True),
    Row("f16_mixed_alone", "float16", "float16", window=[3, None, 8]),
    Row("f32_to_f16_ring", "float16", "float32", window=5, batch=2),
    Row("f32_to_bf16_linear", "bfloat16", "float32"),
    Row("f16_to_int8_sinks", "int8", "float16", window=7, sinks=2),
    Row("f32_to_int8_linear", "int8", "float32", batch=2, v_is_wider=True),
    Row("e5m2_ring", "float8_e5m2", "float8_e5m2", window=5),
    Row("f16_to_e4m3_sinks", "float8_e4m3fn", "float16", window=6, sinks=2),
]
FLOAT64 = Row("f64_ring", "float64", "float64", window=5)
by_row = pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)


class Model:
    """What a store should hold: a history a layer, of tokens that are (K, V) of all sequences."""

    def __init__(self, row, capacity=16):
        self.row = row
        windows = row.window if isinstance(row.window, list) else [row.window] * LAYERS
        self.layers = [reference.History(capacity, w, row.sinks if w is not None else 0) for w in windows]

    def tokens(self, rng, count, layers=LAYERS):
        """New (layers, batch, T, H, D) rows of K and V: any bits where they are only copied."""
        make = oracle.random_bits if self.row.source == self.row.dtype else oracle.numbers
        batch = self.row.batch
        return [make(rng, (layers, batch, count, HEADS, width), self.row.source_type) for width in self.row.widths]

    def append(self, layer, k, v):
        """Rows (batch, T, H, D), as the store keeps them."""
        self.layers[layer].append([tuple(stored(self.row, a[:, t]) for a in (k, v)) for t in range(k.shape[1])])

    def map(self, change):
        """Apply a change of the batch axis to every token."""
        for layer in self.layers:
            layer._tokens = [tuple(change(a) for a in token) for token in layer._tokens]


def stored(row, values):
    """Values as they come back from a store."""
    if row.dtype == "int8":
        return reference.dequantize(*reference.quantize(values, np.float16))
    return reference.encode(values, row.storage)


def expect(kept, model, layers=range(LAYERS)):
    """Compare everything a store holds, and its counts, with the model."""
    row = model.row
    type_out = np.dtype(np.float32) if row.dtype == "int8" else row.storage
    for layer in layers:
        history = model.layers[layer]
        assert kept.layer_length(layer) == history.length
        found = [oracle.to_numpy(a) for a in kept.tokens(layer)]
        for i, (name, width) in enumerate(zip("kv", row.widths, strict=True)):
            held = [token[i] for token in history.kept()]
            shape = (kept.batch_size, HEADS, 0, width)
            want = np.stack(held, axis=2) if held else np.zeros(shape, type_out)
            oracle.assert_same_bits(found[i], want, what=f"{name} of layer {layer}", any_nan=row.source != row.dtype)


def give(arch, k, v, layout="token_major"):
    """Arrays for `append` or `append_all`, tokens and heads in the order of the layout."""
    if layout == "head_major":
        k, v = (np.ascontiguousarray(a.swapaxes(-3, -2)) for a in (k, v))
    return [oracle.place(a.copy(), arch) for a in (k, v)]


def append_everywhere(rng, arch, kept, model, count, *, together, layout="token_major"):
    k, v = model.tokens(rng, count)
    if together:
        kept.append_all(*give(arch, k, v, layout), layout=layout)
    for layer in range(LAYERS):
        if not together:
            kept.append(layer, *give(arch, k[layer], v[layer], layout), layout=layout)
        model.append(layer, k[layer], v[layer])


@pytest.fixture
def launches(monkeypatch):
    """A list that grows by one with each launch."""
    return count_launches(monkeypatch)


@by_row
@pytest.mark.parametrize("layout", ["token_major", "head_major"])
def test_appends(arch, rng, row, layout):
    """One token, several, none and more than a window; a layer at a time and all together."""
    kept, model = row.make(), Model(row)
    for count, together in [(1, False), (1, True), (2, True), (0, True), (4, False), (1, True), (3, True), (0, False)]:
        append_everywhere(rng, arch, kept, model, count, together=together, layout=layout)
        expect(kept, model)
    assert kept.length == 12
    assert kept.seq_lens.tolist() == [12] * row.batch
    assert kept.seq_lens.dtype == np.int32


@pytest.mark.archs("cpu", "cuda")
def test_float64(arch, rng):
    kept, model = FLOAT64.make(), Model(FLOAT64)
    for count in (4, 1, 9):
        append_everywhere(rng, arch, kept, model, count, together=True)
    expect(kept, model)


@pytest.mark.archs("vulkan", "metal")
def test_float64_is_refused_where_there_is_none(arch):
    with pytest.raises(tikv.DTypeError, match=f"{arch} has no float64"):
        FLOAT64.make()


@by_row
def test_a_long_append_keeps_what_fits(arch, rng, row):
    """More tokens than any ring at once, from nothing and behind something."""
    for first in (0, 3):
        kept, model = row.make(), Model(row)
        append_everywhere(rng, arch, kept, model, first, together=True)
        append_everywhere(rng, arch, kept, model, 13, together=True)
        expect(kept, model)


@by_row
def test_a_prompt_is_its_tokens_one_by_one(arch, rng, row):
    model = Model(row)
    k, v = model.tokens(rng, 11)
    together, apart = row.make(), row.make()
    together.append_all(*give(arch, k, v))
    for t in range(11):
        apart.append_all(*give(arch, k[:, :, t : t + 1], v[:, :, t : t + 1]))
    for layer in range(LAYERS):
        for one, other in zip(together.tokens(layer), apart.tokens(layer), strict=True):
            oracle.assert_same_bits(one, oracle.to_numpy(other))


def test_a_ring_is_the_end_of_a_linear_store(arch, rng):
    row = ROWS[1]
    ring, linear = row.make(), row.make(window=None)
    k, v = Model(row).tokens(rng, 14)
    for kept in (ring, linear):
        kept.append_all(*give(arch, k, v))
    for one, other in zip(ring.tokens(1), linear.tokens(1), strict=True):
        oracle.assert_same_bits(one, oracle.to_numpy(other)[:, :, -5:])


@by_row
def test_anything_in_any_order(arch, rng, row):
    """Random appends, trims, snapshots, reorders and resets; after each the store holds what the model holds."""
    kept, model = row.make(), Model(row)
    saved = None
    for _ in range(14):
        what = rng.choice(["append", "append", "append", "trim", "snapshot", "restore", "reorder", "reset"])
        length = model.layers[0].length
        if what == "append":
            count = int(rng.choice([1, 1, 2, 5]))
            if length + count > 16 and any(layer.window is None for layer in model.layers):
                what = "trim"
            else:
                append_everywhere(rng, arch, kept, model, count, together=bool(rng.integers(2)))
        if what == "trim":
            oldest = max((x._oldest for x in model.layers if x.window is not None and x._oldest > x.sinks), default=0)
            n = int(rng.integers(0, max(0, length - oldest) + 1))
            kept.trim(n)
            for layer in model.layers:
                layer.trim(n)
        elif what == "snapshot":
            saved = kept.snapshot(), copy.deepcopy(model.layers)
        elif what == "restore" and saved:
            kept.restore(saved[0])
            model.layers = copy.deepcopy(saved[1])
        elif what == "reorder":
            index = rng.integers(0, row.batch, row.batch)
            kept.reorder(index)
            model.map(lambda a, index=index: a[index])
        elif what == "reset":
            kept.reset()
            model.layers = Model(row).layers
        expect(kept, model)


@pytest.mark.parametrize("row", [ROWS[1], ROWS[2], ROWS[3]], ids=lambda row: row.name)
def test_trim_after_the_ring_has_wrapped(arch, rng, row):
    """As far back as nothing is overwritten; further is refused and changes nothing; then it fills up again."""
    kept, model = row.make(), Model(row)
    append_everywhere(rng, arch, kept, model, 11, together=True)
    rings = [x for x in model.layers if x.window is not None]
    most = min(11 - layer._oldest for layer in rings)
    with pytest.raises(tikv.PositionError, match=rf"cannot drop {most + 1} tokens after the window .* at most {most}"):
        kept.trim(most + 1)
    expect(kept, model)
    kept.trim(most)
    for layer in model.layers:
        layer.trim(most)
    expect(kept, model)
    for count in (1, 3, 2):
        append_everywhere(rng, arch, kept, model, count, together=True)
        expect(kept, model)


def test_trim_back_to_the_sinks(arch, rng):
    """They were never overwritten, so a store may always return to them."""
    row = ROWS[2]
    kept, model = row.make(), Model(row)
    append_everywhere(rng, arch, kept, model, 15, together=True)
    kept.trim(13)
    for layer in model.layers:
        layer.trim(13)
        layer._oldest = 2
    expect(kept, model)
    append_everywhere(rng, arch, kept, model, 3, together=True)
    expect(kept, model)
    kept.trim(kept.length)
    assert kept.length == 0


def test_trim_of_more_than_there_is(arch, rng):
    kept, model = ROWS[0].make(), Model(ROWS[0])
    append_everywhere(rng, arch, kept, model, 3, together=True)
    with pytest.raises(tikv.PositionError, match=r"cannot drop 4 tokens of length=3\. Drop at most 3"):
        kept.trim(4)
    with pytest.raises(tikv.PositionError, match="n=-1 is outside"):
        kept.trim(-1)
    expect(kept, model)


def test_trimmed_tokens_were_never_appended(arch, rng):
    row = ROWS[0]
    kept, model, other = row.make(), Model(row), Model(row)
    append_everywhere(rng, arch, kept, model, 4, together=True)
    k, v = other.tokens(rng, 6)
    kept.append_all(*give(arch, k, v))
    kept.trim(6)
    append_everywhere(rng, arch, kept, model, 3, together=True)
    expect(kept, model)


@pytest.mark.parametrize("row", [ROWS[2], ROWS[3], ROWS[8]], ids=lambda row: row.name)
def test_the_batch_changes(arch, rng, row):
    """Select and repeat change its size, reorder its order; appends go on with what was chosen."""
    kept, model = row.make(), Model(row)
    append_everywhere(rng, arch, kept, model, 9, together=True)
    old = kept.keys(0)
    before = oracle.to_numpy(old).copy()
    for index in ([1, 0], [1, 1]):
        kept.reorder(index)
        model.map(lambda a, index=index: a[index])
        expect(kept, model)
    kept.repeat(2)
    model.map(lambda a: np.repeat(a, 2, axis=0))
    model.row = row._replace(batch=4)
    expect(kept, model)
    append_everywhere(rng, arch, kept, model, 2, together=False)
    expect(kept, model)
    kept.select([3, 0, 2])
    model.map(lambda a: a[[3, 0, 2]])
    model.row = row._replace(batch=3)
    append_everywhere(rng, arch, kept, model, 2, together=True)
    expect(kept, model)
    kept.select(np.array([1]))
    model.map(lambda a: a[[1]])
    model.row = row._replace(batch=1)
    append_everywhere(rng, arch, kept, model, 1, together=True)
    expect(kept, model)
    assert old.shape == before.shape, "memory handed out before keeps its form"


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda s: s.reorder([0]), tikv.ShapeError, r"index has 1 entries for batch_size=2\. Use select\(\)"),
        (lambda s: s.reorder([0, 2]), tikv.PositionError, r"index 2 is outside 0\.\.1"),
        (lambda s: s.select([]), tikv.ShapeError, "at least one integer"),
        (lambda s: s.select([-1]), tikv.PositionError, r"index -1 is outside 0\.\.1"),
        (lambda s: s.select([0.5]), tikv.ShapeError, "at least one integer"),
        (lambda s: s.select([[0], [0, 1]]), tikv.ShapeError, "at least one integer"),
        (lambda s: s.repeat(0), tikv.PositionError, "n=0 is outside"),
        (lambda s: s.keys(3), tikv.PositionError, r"layer=3 is outside 0\.\.2"),
        (lambda s: s.values(-1), tikv.PositionError, r"layer=-1 is outside 0\.\.2"),
        (lambda s: s.tokens("0"), tikv.DTypeError, "layer is '0', not an integer"),
        (lambda s: s.scales(0), tikv.DTypeError, "a float16 store has no scales"),
    ],
)
def test_refusals_change_nothing(arch, rng, call, error, message):
    row = ROWS[2]
    kept, model = row.make(), Model(row)
    append_everywhere(rng, arch, kept, model, 7, together=True)
    with pytest.raises(error, match=message):
        call(kept)
    expect(kept, model)


def test_a_batch_that_finds_no_memory_changes_nothing(arch, rng, monkeypatch):
    """Whether a launch could not address it or the device has no more: also of several blocks, made one by one."""
    row = ROWS[2]
    layer_bytes = row.batch * HEADS * 6 * row.widths[1] * 2
    monkeypatch.setitem(limits.BLOCK_BYTES, arch, 2 * layer_bytes)
    kept, model = row.make(), Model(row)
    append_everywhere(rng, arch, kept, model, 4, together=True)
    kept.repeat(2)
    larger = kept.snapshot()
    kept.select([0, 2])

    made = []

    def scarce(*given):
        made.append(given)
        if len(made) > 1:
            raise MemoryError("no more")
        return arrays.Memory(*given)

    for call in (lambda: kept.repeat(3), lambda: kept.select([0] * 6)):
        with pytest.raises(tikv.CapacityError, match=r"in one block .* addresses"):
            call()
        expect(kept, model)
    monkeypatch.setattr(layer_module, "Memory", scarce)
    for call in (lambda: kept.repeat(2), lambda: kept.restore(larger)):
        made.clear()
        with pytest.raises(MemoryError):
            call()
        assert kept.batch_size == row.batch
        expect(kept, model)
        append_everywhere(rng, arch, kept, model, 1, together=True)
        expect(kept, model)


def test_snapshots_are_kept_apart(arch, rng):
    """Two of them, one of another batch; each is restored whole, more than once."""
    row = ROWS[2]
    kept, model = row.make(), Model(row)
    append_everywhere(rng, arch, kept, model, 4, together=True)
    early, early_layers = kept.snapshot(), copy.deepcopy(model.layers)
    append_everywhere(rng, arch, kept, model, 5, together=True)
    late, late_layers = kept.snapshot(), copy.deepcopy(model.layers)
    kept.select([1])
    for snapshot, layers in ((early, early_layers), (late, late_layers), (early, early_layers)):
        kept.restore(snapshot)
        model.layers = copy.deepcopy(layers)
        expect(kept, model)
        append_everywhere(rng, arch, kept, model, 2, together=True)
        expect(kept, model)
    assert repr(late) == "Snapshot(3 layers, length 9)"


@pytest.mark.parametrize("row", [ROWS[0], ROWS[8]], ids=lambda row: row.name)
def test_a_snapshot_goes_into_a_store_of_another_capacity(arch, rng, row):
    """Which has room for its tokens, keeps its own capacity, and goes on from there; else it is refused."""
    kept, model = row.make(), Model(row, 40)
    append_everywhere(rng, arch, kept, model, 9, together=True)
    snapshot = kept.snapshot()
    for capacity in (9, 40):
        other = row.make(capacity=capacity)
        append_everywhere(rng, arch, other, copy.deepcopy(model), 5, together=True)
        other.restore(snapshot)
        expect(other, model)
        assert other.capacity == capacity
    append_everywhere(rng, arch, other, model, 20, together=True)
    expect(other, model)
    small = row.make(capacity=8)
    append_everywhere(rng, arch, small, before := Model(row), 3, together=True)
    with pytest.raises(tikv.CapacityError, match=r"9 tokens in layer 0, .* room for 8 here\. .* capacity=9 or more"):
        small.restore(snapshot)
    expect(small, before)


@pytest.mark.parametrize(
    "changes",
    [
        {"num_layers": 2},
        {"num_kv_heads": 1},
        {"head_dim": 2},
        {"head_dim_v": 2},
        {"dtype": "bfloat16"},
        {"window": 8},
        {"sinks": 1},
        {"window": None, "sinks": 0},
        {"scale_dtype": "float32"},
    ],
    ids=lambda changes: next(iter(changes)) if len(changes) == 1 else "linear",
)
def test_a_snapshot_of_another_store_is_refused(arch, rng, changes):
    row = ROWS[7] if "scale_dtype" in changes else ROWS[2]
    kept, model = row.make(), Model(row)
    append_everywhere(rng, arch, kept, model, 9, together=True)
    other = row.make(**changes)
    with pytest.raises(tikv.ShapeError, match=r"Restore it into the store it was taken from\."):
        other.restore(kept.snapshot())
    assert other.length == 0
    with pytest.raises(tikv.OptionError, match=r"^KVCacheStore\.restore: 3 is not a snapshot\. Give what"):
        other.restore(3)


@by_row
def test_an_append_is_one_launch(arch, rng, row, launches):
    """Append writes K and V of one layer, append_all those of all; both for any number of tokens."""
    kept, model = row.make(), Model(row)
    for count in (1, 1, 3, 1):
        k, v = model.tokens(rng, count)
        given = [give(arch, k[layer], v[layer]) for layer in range(LAYERS)]
        launches.clear()
        for layer in range(LAYERS):
            kept.append(layer, *given[layer])
        assert len(launches) == LAYERS
        given = give(arch, k, v)
        launches.clear()
        kept.append_all(*given)
        assert len(launches) == 1


def test_counting_launches_counts(arch, launches):
    src, cache = (oracle.place(np.zeros((1, slots, 4), np.float32), arch) for slots in (1, 2))
    tikv.copy(src, cache, position=0)
    assert len(launches) == 1


@pytest.mark.parametrize("uneven", ["k", "kv", "gaps"])
@pytest.mark.parametrize("window", [None, [None, 8, 5]], ids=["linear", "windows"])
def test_layers_of_a_source_that_lie_unevenly_take_a_launch_each(arch, rng, launches, uneven, window):
    """Sequences outside of layers, or layers apart from each other; the slots are those of a source in one piece."""
    form = {"num_layers": LAYERS, "num_kv_heads": HEADS, "head_dim": 8, "batch_size": 2, "capacity": 16}
    kept, plain = (tikv.KVCacheStore(**form, window=window, dtype="float32") for _ in range(2))

    def apart(a):
        whole = np.zeros((LAYERS, 3, *a.shape[2:]), a.dtype) if uneven == "gaps" else a.swapaxes(0, 1).copy()
        whole = oracle.place(whole, arch) if arch == "cuda" else whole
        found = whole[:, :2] if uneven == "gaps" else whole.swapaxes(0, 1)
        found[:] = oracle.place(a, arch) if arch == "cuda" else a
        return found

    for count in (3, 1, 1, 9):
        k, v = (oracle.random_bits(rng, (LAYERS, 2, count, HEADS, 8), np.float32) for _ in "kv")
        plain.append_all(*give(arch, k, v))
        given = apart(k), apart(v) if uneven == "kv" else give(arch, v, v)[0]
        launches.clear()
        kept.append_all(*given)
        assert len(launches) == LAYERS
        assert [kept.layer_length(i) for i in range(LAYERS)] == [plain.length] * LAYERS
    before = [[oracle.to_numpy(a).copy() for a in (plain.keys(i), plain.values(i))] for i in range(LAYERS)]
    for k in (oracle.random_bits(rng, (LAYERS, 2, 3, HEADS, 8), np.float32), np.ones((LAYERS, 2, 1, HEADS, 4), "f4")):
        with pytest.raises(tikv.TikvError, match=r"^KVCacheStore\.append_all"):
            kept.append_all(apart(k), apart(k))
        for i in range(LAYERS):
            for a, b in zip((kept.keys(i), kept.values(i)), before[i], strict=True):
                oracle.assert_same_bits(oracle.to_numpy(a)[:, :, : kept.length], b[:, :, : kept.length])


def test_a_refused_append_all_writes_to_no_layer(arch, rng):
    """One layer has no room: the others are not written either."""
    row = ROWS[3]
    kept, model = row.make(), Model(row)
    append_everywhere(rng, arch, kept, model, 14, together=True)
    before = [[oracle.to_numpy(a).copy() for a in (kept.keys(x), kept.values(x))] for x in range(LAYERS)]
    for count in (3, 3, 12):
        k, v = model.tokens(rng, count)
        with pytest.raises(tikv.CapacityError, match=rf"position=14 \+ num_tokens={count} > capacity=16"):
            kept.append_all(*give(arch, k, v))
    for layer in range(LAYERS):
        for a, b in zip((kept.keys(layer), kept.values(layer)), before[layer], strict=True):
            oracle.assert_same_bits(a, b)
    expect(kept, model)
    append_everywhere(rng, arch, kept, model, 2, together=True)
    with pytest.raises(tikv.CapacityError, match="linear cache is full"):
        append_everywhere(rng, arch, kept, model, 1, together=True)


@pytest.mark.parametrize(
    ("shapes", "keywords", "error", "message"),
    [
        (
            ((2, 1, HEADS, 8), (2, 2, HEADS, 12)),
            {},
            tikv.ShapeError,
            "the number of tokens of v is 2 where 1 is needed",
        ),
        (((2, 1, 3, 8), (2, 1, HEADS, 12)), {}, tikv.ShapeError, "the number of heads of k is 3 where 2 is needed"),
        (((3, 1, HEADS, 8), (2, 1, HEADS, 12)), {}, tikv.ShapeError, "the batch of k is 3 where 2 is needed"),
        (((2, 1, HEADS, 8), (2, 1, HEADS, 8)), {}, tikv.ShapeError, "the head width of v is 8 where 12 is needed"),
        (((1, HEADS, 8), (1, HEADS, 12)), {}, tikv.ShapeError, "with 3 axes; it must be"),
        (((2, 1, HEADS, 8), (2, 1, HEADS, 12)), {"layout": "rows"}, tikv.OptionError, "unknown layout 'rows'"),
        (((2, 3, HEADS, 8), (2, 3, HEADS, 12)), {"layout": "head_major"}, tikv.ShapeError, "the number of heads of k"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(arch, rng, shapes, keywords, error, message):
    row = ROWS[2]
    kept, model = row.make(), Model(row)
    append_everywhere(rng, arch, kept, model, 4, together=True)
    with pytest.raises(error, match=f"^KVCacheStore.append: .*{message}"):
        kept.append(0, *(oracle.place(np.zeros(shape, np.float16), arch) for shape in shapes), **keywords)
    expect(kept, model)


@pytest.mark.parametrize("dtypes", [("float32", "float16"), ("float64", "float64"), ("int8", "int8")])
def test_dtypes_that_do_not_fit_are_refused(arch, dtypes):
    kept = Row("bf16", "bfloat16", "bfloat16").make()
    k, v = (oracle.place(np.zeros((1, HEADS, 8), dtype), arch) for dtype in dtypes)
    with pytest.raises(tikv.DTypeError, match=r"^KVCacheStore.append: "):
        kept.append(0, k, v)
    assert kept.length == 0


def test_its_own_memory_is_no_source(arch, rng):
    """What is read would be overwritten on the way; also when a call of the same form was fine before."""
    row = Row("f16", "float16", "float16")
    kept, other = (row.make(num_layers=1) for _ in range(2))
    if arch == "vulkan":
        with pytest.raises(tikv.ShapeError, match="overlap in memory"):
            kept.append(0, kept.keys(0), kept.values(0), layout="head_major")
        return
    k, v = (oracle.place(np.zeros((1, 2, HEADS, 8), np.float16), arch) for _ in "kv")
    for source in (other, kept):
        source.append(0, k, v)
    as_array = "torch" if arch == "cuda" else "numpy"
    given = [tuple(getattr(a, as_array)()[:, :, :2] for a in (s.keys(0), s.values(0))) for s in (other, kept)]
    kept.append(0, *given[0], layout="head_major")
    with pytest.raises(tikv.ShapeError, match="overlap in memory"):
        kept.append(0, *given[1], layout="head_major")
    assert kept.length == 4
    positions = oracle.place(np.array([4], np.int32), arch)
    for append, lead in ((lambda *a, **b: kept.append(0, *a, **b), ()), (kept.append_all, (None,))):
        append(*(a[lead] for a in given[0]), layout="head_major", positions=positions)
        with pytest.raises(tikv.ShapeError, match="overlap in memory"):
            append(*(a[lead] for a in given[1]), layout="head_major", positions=positions)


def test_memory_is_handed_out_as_it_is(arch, rng):
    """Keys and values are the slots themselves: (batch, heads, slots, width), in the true dtype."""
    row = ROWS[1]
    kept = row.make()
    k, v = Model(row).tokens(rng, 7)
    kept.append_all(*give(arch, k, v))
    for handed, given in ((kept.keys(2), k[2]), (kept.values(2), v[2])):
        assert handed.shape == (1, HEADS, 5, 8)
        assert handed.dtype.name == "bfloat16"
        slots = oracle.to_numpy(handed)
        for t in range(2, 7):
            oracle.assert_same_bits(slots[0, :, t % 5], given[0, t])


@pytest.mark.archs("cpu")
def test_memory_is_shared_with_numpy_and_torch(arch, rng):
    row = ROWS[1]
    kept = row.make()
    k, v = Model(row).tokens(rng, 2)
    kept.append_all(*give(arch, k, v))
    array = kept.keys(0).numpy()
    assert array.dtype == ml_dtypes.bfloat16
    assert np.shares_memory(array, kept.keys(0).numpy())
    array[0, 1, 0] = 3
    assert (oracle.to_numpy(kept.tokens(0)[0])[0, 1, 0] == 3).all()
    torch = pytest.importorskip("torch")
    tensor = kept.keys(0).torch()
    assert tensor.dtype == torch.bfloat16
    assert tensor.data_ptr() == array.ctypes.data
    del kept
    gc.collect()
    tensor[0, 1, 0] = 4
    assert (array[0, 1, 0] == 4).all(), "both keep the memory alive"


@by_row
def test_sizes_and_words(arch, row):
    kept = row.make()
    windows = row.window if isinstance(row.window, list) else [row.window] * LAYERS
    slots = sum(16 if w is None else w for w in windows) * row.batch * HEADS
    scales = 2 * 2 if row.dtype == "int8" else 0
    assert kept.nbytes == slots * (sum(row.widths) * row.storage.itemsize + scales)
    assert kept.capacity == 16
    assert len(kept) == kept.length == 0
    text = repr(kept)
    assert text.startswith(f"KVCacheStore({LAYERS} layers")
    for word in (
        row.dtype,
        "0/16 tokens",
        "B,",
        arch,
        f"{HEADS} heads",
        *([f"{row.sinks} sink"] if row.sinks else []),
    ):
        assert word in text, text


def test_a_store_without_tokens_is_true(arch):
    """So that ``cache = cache or make()`` does not take it for none."""
    store = tikv.KVCacheStore(num_layers=1, num_kv_heads=1, head_dim=8, capacity=4)
    assert len(store) == 0
    assert bool(store) is True


def test_a_helpful_repr(arch):
    kept = ROWS[3].make()
    assert repr(kept) == (
        f"KVCacheStore(3 layers x batch 2 x 2 heads x 4|6, float32, window 4/7 and linear, 1 sink, 0/16 tokens, "
        f"4.3 kB, {arch})"
    )
    compacted = tikv.KVCacheStore(num_layers=1, num_kv_heads=2, head_dim=4, capacity=16)
    compacted.append(0, *np.zeros((2, 9, 2, 4), np.float32))
    compacted.compact(0, np.arange(18).reshape(1, 2, 9) % 9 < [[3], [5]])
    assert ", 9 tokens, up to 5/16 held, " in repr(compacted)


@pytest.mark.archs("cpu")
@pytest.mark.parametrize(("windows", "words"), [(64, "tokens: 653 seen, 64 held"), ([64, None], "653/1024 tokens")])
def test_tokens_that_a_window_dropped_are_not_counted_as_held(arch, windows, words):
    store = tikv.KVCacheStore(num_layers=2, num_kv_heads=1, head_dim=4, capacity=1024, window=windows)
    store.append_all(*np.zeros((2, 2, 653, 1, 4), np.float32))
    assert f", {words}, " in repr(store)


@pytest.mark.archs("cpu")
@pytest.mark.parametrize("dtype", ["float32", tikv.Quant(4, 32, "tokens", 32)])
def test_layers_of_different_lengths_are_said(arch, dtype):
    """In the middle of a step, or where an append was left out: attention answers from what the layer holds."""
    store = tikv.KVCacheStore(num_layers=3, num_kv_heads=1, head_dim=32, capacity=96, dtype=dtype)
    assert ", 0/96 tokens, " in repr(store)
    rows = np.ones((2, 5, 1, 32), np.float32)
    for layer in (0, 1):
        store.append(layer, *rows)
    assert ", 0/96 tokens, layers differ: 5 in layers 0-1, 0 in layer 2, " in repr(store)
    assert [store.layer_length(i) for i in range(3)] == [5, 5, 0]
    assert store.length == 0
    store.append(2, *rows)
    assert ", 5/96 tokens, " in repr(store)
    store.append(0, *rows[:, :1])
    assert ", 5/96 tokens, layers differ: 6 in layer 0, 5 in layers 1-2, " in repr(store)


@pytest.mark.archs("cpu")
def test_a_store_names_its_device(arch):
    store = tikv.KVCacheStore(num_layers=1, num_kv_heads=1, head_dim=4, capacity=4)
    pool = tikv.PagedKVCacheStore(num_layers=1, num_kv_heads=1, head_dim=4, num_blocks=1)
    for each in (store, pool):
        assert each.device == each.keys(0).device
        assert each.device.split(":")[0] == arch


def test_an_empty_store_is_true(arch):
    """`store or make()` and `if store:` ask whether there is one, not what it holds."""
    store = tikv.KVCacheStore(num_layers=1, num_kv_heads=1, head_dim=4, capacity=4)
    layers = tikv.ContiguousKVLayer(4, 1, 4), tikv.PagedKVLayer(2, 2, 1, 4)
    for each in (store, *layers):
        assert len(each) == 0
        assert each
    assert (store or None) is store


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"num_layers": 0}, tikv.PositionError, "num_layers=0 is outside"),
        ({"head_dim": 2.5}, tikv.DTypeError, "head_dim is 2.5, not an integer"),
        ({"capacity": -1}, tikv.PositionError, "capacity=-1 is outside"),
        ({"dtype": "int32"}, tikv.DTypeError, "dtype int32 cannot be stored"),
        ({"dtype": "float8"}, tikv.DTypeError, "unknown dtype 'float8'"),
        (
            {"dtype": "int5"},
            tikv.DTypeError,
            "int8, int4, q8_0, q4_0, mxfp8, mxfp4, nvfp4, kvarn_k4v2, kvarn_k4v4, or a tikv.Quant of 2, 3, 4 or 8 bits",
        ),
        ({"window": [4, 4]}, tikv.ShapeError, "window has 2 entries for num_layers=3"),
        ({"dtype": None}, tikv.DTypeError, "unknown dtype None"),
        ({"window": 0}, tikv.PositionError, "window=0 is outside"),
        ({"window": 2.5}, tikv.DTypeError, "window is 2.5, not an integer"),
        ({"window": [None, None, True]}, tikv.DTypeError, "window is True, not an integer"),
        ({"window": 1000}, tikv.CapacityError, "window=1000 exceeds capacity="),
        ({"sinks": 2}, tikv.OptionError, "sinks=2 needs a window"),
        ({"window": 4, "sinks": 4}, tikv.CapacityError, "sinks=4 leave no room for other tokens in window=4"),
        ({"dtype": "int8", "scale_dtype": "bfloat16"}, tikv.DTypeError, "scale_dtype bfloat16 is not supported"),
    ],
)
def test_arguments_that_make_no_store(arch, changes, error, message):
    with pytest.raises(error, match=f"^KVCacheStore: .*{message}"):
        ROWS[0].make(**changes)


def test_blocks_are_split_where_a_launch_ends(arch, rng, monkeypatch, launches):
    """As if a launch addressed a few hundred bytes: two layers a block, then one; append_all is one launch a block.

    In between as if layers might share less than one of them needs, as on Metal.
    """
    row = ROWS[2]
    layer_bytes = row.batch * HEADS * 6 * row.widths[1] * 2
    whole = 2**20
    for limit, shared, blocks in ((2 * layer_bytes, whole, 2), (whole, layer_bytes - 1, 3), (layer_bytes, whole, 3)):
        monkeypatch.setitem(limits.BLOCK_BYTES, arch, limit)
        monkeypatch.setitem(limits.SHARED_BYTES, arch, shared)
        kept, model = row.make(), Model(row)
        k, v = model.tokens(rng, 9)
        given = give(arch, k, v)
        launches.clear()
        kept.append_all(*given)
        assert len(launches) == blocks
        for layer in range(LAYERS):
            model.append(layer, k[layer], v[layer])
        append_everywhere(rng, arch, kept, model, 1, together=True)
        kept.reorder([1, 0])
        model.map(lambda a: a[[1, 0]])
        expect(kept, model)
    monkeypatch.setitem(limits.BLOCK_BYTES, arch, layer_bytes - 1)
    with pytest.raises(tikv.CapacityError, match=rf"layer 0 needs {layer_bytes} bytes in one block .* addresses"):
        row.make()


@pytest.mark.archs("cpu")
@pytest.mark.parametrize("row", [ROWS[0], ROWS[2], ROWS[5], FLOAT64], ids=lambda row: row.name)
def test_keys_and_values_are_one_array_to_a_launch_or_two(arch, rng, monkeypatch, row):
    """One where it can address all of it, two where not: the same is kept, layer by layer and all at once."""
    for joint_bytes, arrays_given in ((layer_module.JOINT_BYTES, 3), (64, 4)):
        monkeypatch.setattr(layer_module, "JOINT_BYTES", joint_bytes)
        kept, model = row.make(), Model(row)
        for together in (False, True, False):
            append_everywhere(rng, arch, kept, model, 2, together=together)
        bound = [bound for plan in storage_of(kept).appends.plans.values() for bound in plan.launches]
        assert [sum(map(bool, b.kernel.words)) - 1 for b in bound] == [arrays_given] * len(bound)
        expect(kept, model)


def test_a_length_that_int32_does_not_hold_is_refused_by_what_gives_int32(arch):
    kept = ROWS[2].make(window=3)
    kept.advance(2**31 - 1)
    assert kept.seq_lens.tolist() == oracle.to_numpy(kept.positions_on_device()).tolist() == [2**31 - 1] * 2
    kept.advance(1)
    with pytest.raises(tikv.PositionError, match=r"seq_lens: length=2147483648 does not fit int32\. Read `length`"):
        _ = kept.seq_lens
    with pytest.raises(tikv.PositionError, match=r"positions_on_device: length=2147483648 does not fit int32\."):
        kept.positions_on_device()


@pytest.mark.parametrize("start", [2**31 - 3, 2**32 - 2, 2**40 + 1])
@pytest.mark.parametrize("row", [ROWS[2], ROWS[4]], ids=lambda row: row.name)
def test_a_sequence_without_end(arch, rng, row, start):
    """Positions past 32 bits, as if so many tokens had been appended in graphs."""
    kept, model = (
        row.make(window=[6, 6, 6] if row.sinks else [3, 5, 8]),
        Model(row._replace(window=[6, 6, 6] if row.sinks else [3, 5, 8])),
    )
    append_everywhere(rng, arch, kept, model, 1, together=True)
    kept.advance(start - kept.length)
    newest = []
    for count in (2, 1, 1, 7, 1):
        k, v = model.tokens(rng, count)
        kept.append_all(*give(arch, k, v))
        newest += [(k[:, :, t], v[:, :, t]) for t in range(count)]
    assert kept.length == start + len(newest)
    for x, window in enumerate(kept.windows):
        for i, found in enumerate(kept.tokens(x)):
            want = np.stack([token[i][x] for token in newest[kept.sinks - window :]], axis=2)
            oracle.assert_same_bits(oracle.to_numpy(found)[:, :, kept.sinks :], want)


STALE = """
import sys
import numpy as np, oracle, tikv
arch = sys.argv[1]
tikv.init(arch=arch)
store = tikv.KVCacheStore(num_layers=1, num_kv_heads=1, head_dim=4, capacity=8, dtype="float32")
k = np.ones((1, 1, 4), np.float32)
store.append(0, k, k)
array, snapshot = store.keys(0), store.snapshot()
tikv.init(arch=arch)
calls = {
    "append": lambda: store.append(0, k, k), "append_all": lambda: store.append_all(k[None], k[None]),
    "tokens": lambda: store.tokens(0), "keys": lambda: store.keys(0), "trim": lambda: store.trim(1),
    "reset": store.reset, "reorder": lambda: store.reorder([0]), "select": lambda: store.select([0]),
    "repeat": lambda: store.repeat(2), "snapshot": store.snapshot, "restore": lambda: store.restore(snapshot),
    "array": lambda: tikv.linearize(array, np.zeros((1, 8, 4), np.float32), length=8), "host": array.copy_to_host,
}
for name, call in calls.items():
    try:
        call()
    except tikv.StaleRuntimeError as error:
        assert "epoch 1" in str(error) and "Call init() once" in str(error), error
    else:
        raise SystemExit(f"{name} was not refused")
fresh = tikv.KVCacheStore(num_layers=1, num_kv_heads=1, head_dim=4, capacity=8, dtype="float32")
fresh.append(0, k, k)
print(store.length, fresh.length, repr(store).split("(")[0])
"""


def test_a_store_of_a_runtime_that_is_gone(arch, python):
    assert python(STALE, arch).stdout.split() == ["1", "1", "KVCacheStore"]


def test_memory_of_a_dropped_store_is_given_back(arch):
    """Plans hold addresses, not arrays: neither the caller's arrays nor a store outlive their last reference."""
    import weakref

    live = arrays.runtime_of()
    kept = ROWS[0].make()
    k, v = (oracle.place(np.zeros((1, HEADS, 8), np.float16), arch) for _ in "kv")
    kept.append(0, k, v)
    kept.append(0, k, v)
    memory = kept.keys(0)._array.owner
    watched = [weakref.ref(a) for a in (k, v, memory, kept)]
    assert isinstance(memory, arrays.Memory)
    assert memory.runtime is live
    del k, v, memory, kept
    gc.collect()
    assert [w() is None for w in watched] == [True] * 4


@pytest.mark.archs("cpu", "vulkan")
def test_tokens_are_copied_into_some_of_the_columns(arch, rng):
    """As a storage does whose columns lie in several parts, also of a ring that has gone round behind its sinks."""
    store = tikv.KVCacheStore(num_layers=1, num_kv_heads=2, head_dim=8, capacity=6, dtype="float32", window=6, sinks=2)
    for rows in np.split(rng.standard_normal((9, 2, 8)).astype(np.float32), 3):
        store.append(0, rows, 2 * rows)
    memory, live = storage_of(store).memory, store.runtime
    k, v = (arrays.new_array((1, 2, 6, 20), dtypes.float32, live, zeroed=True) for _ in "kv")
    memory.copy_tokens("test", memory.layers[0], k.part(3, 8, 16), v.part(3, 4, 12))
    for a, first, held in zip((k, v), (8, 4), store.tokens(0), strict=True):
        found = arrays.read_host(a, live)
        np.testing.assert_array_equal(found[..., first : first + 8], oracle.to_numpy(held))
        assert not np.delete(found, np.s_[first : first + 8], -1).any()


@pytest.mark.archs("cpu")
def test_a_layer_without_tokens_beside_others(arch, rng):
    """Its past can be merged with other results, in the first chunk of a prompt too; alone it is a forgotten append."""
    store = tikv.KVCacheStore(num_layers=2, num_kv_heads=2, head_dim=8, capacity=16, dtype="float32")
    q = rng.standard_normal((1, 1, 4, 8)).astype(np.float32)
    k, v = rng.standard_normal((2, 1, 3, 2, 8)).astype(np.float32)
    assert not store.attend(0, q).any(), "no layer has any"
    store.append(0, k, v)
    with pytest.raises(tikv.PositionError, match=r"layer 1 holds no tokens, and layer 0 holds 3\. .* return_lse=True"):
        store.attend(1, q)
    past, lse = store.attend(1, q, return_lse=True)
    assert not past.any()
    assert (lse == -np.inf).all()
    store.append(1, k, v)
    assert store.attend(1, q).any()


@pytest.mark.parametrize("dtype", ["float32", "float16", "int8", "q8_0"])
@pytest.mark.parametrize("tokens", [1, 5])
def test_a_launch_for_one_layer_serves_others_of_its_form(arch, rng, dtype, tokens):
    """What was bound for the first says nothing of where the rows and the memory of the next ones lie."""
    form = {"num_layers": 1, "num_kv_heads": HEADS, "head_dim": 32, "capacity": 16, "dtype": dtype}
    one, other = rng.standard_normal((2, 1, tokens, HEADS, 32), np.float32)
    stores = [tikv.KVCacheStore(**form) for _ in range(3)]
    rows = [(one, one), (one, other), (other, one)]  # K and V of the first are one array
    for store, (k, v) in zip(stores, rows, strict=True):
        store.append(0, k, v)
    for store, (k, v) in zip(reversed(stores), reversed(rows), strict=True):
        store.append(0, v, k)
    for store, (k, v) in zip(stores, rows, strict=True):
        alone = tikv.KVCacheStore(**{**form, "num_layers": 2})  # whose launches are of two layers at once
        alone.append_all(np.stack([k, v]), np.stack([v, k]))
        alone.append_all(np.stack([v, k]), np.stack([k, v]))
        for found, wanted in zip(store.tokens(0), alone.tokens(0), strict=True):
            np.testing.assert_array_equal(found.copy_to_host(), wanted.copy_to_host())


@pytest.mark.archs("cpu", "cuda")
def test_stores_alike_add_no_launches(arch, rng):
    """Wherever their keys and values lie: `v_dtype` puts these into two pieces of memory, as CUDA does for all."""
    form = {"num_layers": 1, "num_kv_heads": HEADS, "head_dim": 32, "capacity": 16, "dtype": "float32"}
    form["v_dtype"] = "float16"
    rows, live = oracle.place(rng.standard_normal((1, HEADS, 32), np.float32), arch), arrays.runtime_of()
    kept, entries, distances = [], [], set()
    for i in range(20):
        hole = arrays.new_array((HEADS * 16 * 32,), dtypes.float32, live)  # for the keys; the values lie behind `apart`
        apart = arrays.new_array((256 * i + 256,), dtypes.float32, live)
        del hole
        kept.append((tikv.KVCacheStore(**form), apart))
        kept[-1][0].append(0, rows, rows)
        layer = storage_of(kept[-1][0]).memory.layers[0]
        distances.add(layer.v.ptr - layer.k.ptr)
        entries.append(len(live.plans))
    assert len(distances) > 2
    assert entries[1:] == [entries[1]] * 19


@pytest.mark.archs("cpu")
def test_lengths_of_prompts_do_not_add_up(arch):
    """A store that is reset for each prompt keeps the launches of few lengths; so does a pool."""
    form = {"num_layers": 2, "num_kv_heads": HEADS, "head_dim": 4, "dtype": "float32"}
    store, pool = tikv.KVCacheStore(**form, capacity=256), tikv.PagedKVCacheStore(**form, num_blocks=64, block_size=4)
    plans, writes = storage_of(store).memory.plans, pool._pages.pools.writes
    for tokens in range(1, 100):
        rows, seq = np.full((tokens, HEADS, 4), tokens, np.float32), pool.add()
        store.reset()
        for layer in range(2):
            store.append(layer, rows, rows)
            pool.append(layer, rows, rows, [seq], [0, tokens])
        for owner, which in ((store, (1,)), (pool, (1, seq))):
            np.testing.assert_array_equal(oracle.to_numpy(owner.tokens(*which)[1]).reshape(-1), tokens)
        pool.free(seq)
    assert len(plans) <= plans.limit == limits.FORMS_OF_LAYER * 2
    assert len(writes) <= writes.limit == limits.FORMS_OF_LAYER * 2
