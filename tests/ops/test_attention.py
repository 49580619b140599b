"""Attention against a plain float64 softmax over an explicit list of visible positions.

Tolerances, relative to the largest value of V a query sees: the stored numbers are the oracle's too, so what is left is
float32 arithmetic (products, sums over up to a few hundred keys, a degree-6 exp2: 2e-6 in all, 1e-5 with a bound) and
one rounding to the dtype of q: 2**-11 for float16, 2**-8 for bfloat16.
"""

import importlib.util
import itertools
import math
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import oracle
import pytest

import tikv
from tikv import arrays, launch, reference
from tikv.arrays import view
from tikv.ops.attention.contiguous import contiguous_cache
from tikv.ops.attention.families import Form, family_for
from tikv.ops.attention.families.cpu import Cpu
from tikv.ops.attention.options import AttentionOptions, QueryShape
from tikv.ops.attention.splits import RESIDENT, Lengths, Shares, whole_waves

pytestmark = pytest.mark.full(each_value=True)

NEEDS_TORCH = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")

TOLERANCE = {"float32": 1e-5, "float16": 2.0**-11 + 1e-5, "bfloat16": 2.0**-8 + 1e-5}
DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "int8": np.int8}
FLOAT8 = {"float8_e4m3fn": ml_dtypes.float8_e4m3fn, "float8_e5m2": ml_dtypes.float8_e5m2}
PLACES = ("linear", "ring", "HND", "VLLM", "NHD")


def random_rows(rng, shape, dtype):
    """(rows as stored, their scales or None, the numbers they stand for in float64); a scale a row for int8."""
    if dtype == "int8":
        rows = rng.integers(-127, 128, shape).astype(np.int8)
        scales = (rng.uniform(0.5, 1.5, shape[:-1]) / 64).astype(np.float16)
        return rows, scales, rows.astype(np.float64) * scales.astype(np.float64)[..., None]
    rows = rng.standard_normal(shape).astype((DTYPES | FLOAT8)[dtype])
    return rows, None, rows.astype(np.float64)


class Case:
    """A batch of sequences in a contiguous cache or ring, and what attention over it must give."""

    def __init__(self, rng, *, dtype="float16", heads=2, group=2, width=16, width_v=None, capacity=40, lens=(40,),
                 ring=None, sinks=0, queries=None, query_dtype="float32", guard=0, spoiled=None):  # fmt: skip
        width_v = width_v or width
        self.lens, self.group, self.ring, self.sinks = lens, group, ring, sinks
        batch, longest = len(lens), max(1, np.max(lens))
        k, k_scale, k_real = random_rows(rng, (batch, heads, longest, width), dtype)
        v, v_scale, v_real = random_rows(rng, (batch, heads, longest, width_v), dtype)
        self.k_real, self.v_real = k_real, v_real
        slots = capacity if ring is None else ring
        whole = []
        for rows in (k, v, k_scale, v_scale):
            if rows is None:
                whole.append(None)
                continue
            # Anything but zeros in the slots nobody may read; NaN where the dtype has one.
            filler = 127 if dtype == "int8" and rows.dtype == np.int8 else np.nan
            cache = np.full((batch, heads, guard + capacity + guard, *rows.shape[3:]), filler, rows.dtype)
            for b, h in itertools.product(range(batch), range(heads)):
                length = self.length(b, h)
                where = reference.slots(0, length, slots, None if ring is None else ring, sinks)
                for p, slot in enumerate(where):
                    cache[b, h, guard + slot] = rows[b, h, p]
                if spoiled is not None and length >= -spoiled:
                    cache[b, h, guard + where[spoiled]] = filler
            whole.append(cache[:, :, guard : guard + capacity])
        self.k, self.v, self.k_scale, self.v_scale = whole
        shape = (batch, heads * group, width) if queries is None else (batch, heads * group, queries, width)
        self.q = rng.standard_normal(shape).astype(DTYPES[query_dtype])
        self.query_dtype = query_dtype

    def length(self, b, h):
        """Of KV head h of a sequence."""
        return self.lens[b] if np.ndim(self.lens) == 1 else self.lens[b][h]

    def scales(self, arch):
        if self.k_scale is None:
            return {}
        return {"k_scale": oracle.place(self.k_scale, arch), "v_scale": oracle.place(self.v_scale, arch)}

    def expected(self, *, scale=None, softcap=None, **seen):
        """(out, lse) in float64."""
        q = self.q if self.q.ndim == 4 else self.q[:, :, None]
        out = np.zeros((*q.shape[:3], self.v_real.shape[-1]))
        lse = np.zeros(q.shape[:3])
        for b, h, t in itertools.product(*map(range, q.shape[:3])):
            at = reference.visible_positions(
                self.length(b, h // self.group), t, q.shape[2], sinks=self.sinks, held=self.ring, **seen
            )  # fmt: skip
            keys, values = self.k_real[b, h // self.group, at], self.v_real[b, h // self.group, at]
            out[b, h, t], lse[b, h, t] = reference.attention(
                q[b, h, t], keys, values, scale=scale or q.shape[-1] ** -0.5, softcap=softcap
            )
        return out.reshape(*self.q.shape[:-1], -1), lse.reshape(self.q.shape[:-1])

    def run(self, arch, lens=None, **options):
        """`decode_attention` of the case, or with other lengths, as float64: (out, lse)."""
        ring = {"ring": True, "sinks": self.sinks, "window": self.ring} if self.ring else {}
        place = lambda a: oracle.place(a, arch)  # noqa: E731
        lens = place(np.array(self.lens if lens is None else lens, np.int32))
        options = {**ring, **self.scales(arch), **options}
        arrays = [place(a) for a in (self.q, self.k, self.v)]
        got = tikv.decode_attention(*arrays, lens, return_lse=True, **options)
        out, lse = map(oracle.to_numpy, got)
        assert out.dtype == self.q.dtype
        assert lse.dtype == np.float32
        return out.astype(np.float64), lse.astype(np.float64)

    def check(self, arch, *, seen=None, softcap=None, scale=None, **options):
        """Fail unless the result is what it must be."""
        if softcap is not None:
            options["softcap"] = softcap
        if scale is not None:
            options["scale"] = scale
        want = self.expected(softcap=softcap, scale=scale, **(seen or {}))
        assert_close(self.run(arch, **options), want, self.query_dtype)


def assert_close(got, want, dtype):
    """Both the result and its log-sum-exp."""
    for name, a, b, tolerance in zip(("out", "lse"), got, map(np.asarray, want), (TOLERANCE[dtype], 1e-5), strict=True):
        assert a.shape == b.shape, f"{name}: shape {a.shape}, expected {b.shape}"
        finite = np.isfinite(b)
        np.testing.assert_array_equal(a[~finite], b[~finite], err_msg=name)
        assert np.isfinite(a[finite]).all(), f"{name}: not finite"
        error = np.abs(a[finite] - b[finite]).max(initial=0) / max(1.0, np.abs(b[finite]).max(initial=0))
        assert error <= tolerance, f"{name}: error {error:.2e} > {tolerance:.2e}"


def test_multi_query(arch, rng):
    Case(rng, heads=1, group=5, lens=(40, 7)).check(arch)


@pytest.mark.parametrize("query_dtype", ["float16", "bfloat16"])
def test_the_result_has_the_dtype_of_the_query(arch, rng, query_dtype):
    Case(rng, query_dtype=query_dtype, lens=(40, 3)).check(arch)


@pytest.mark.full(unless=lambda case: case["width"] in (5, 80))
@pytest.mark.parametrize(("width", "width_v"), [(32, 32), (80, 48), (256, 256), (5, 3), (24, 40)])
def test_widths(arch, rng, width, width_v):
    Case(rng, width=width, width_v=width_v, lens=(40, 9)).check(arch)


@pytest.mark.parametrize("window", [1, 7, 64, 200])
def test_window(arch, rng, window):
    case = Case(rng, capacity=150, lens=(150, 64, 65, 6))
    case.check(arch, window=window, seen={"window": window})


def test_sinks_of_a_linear_cache(arch, rng):
    case = Case(rng, capacity=100, lens=(100, 9, 3), sinks=4)
    case.check(arch, window=10, sinks=4, seen={"window": 10})


@pytest.mark.eight_rows
@pytest.mark.parametrize(("queries", "causal"), [(7, True), (64, True), (2, False)])
def test_several_queries_are_aligned_at_the_end(arch, rng, queries, causal):
    case = Case(rng, capacity=130, queries=queries, lens=(130, 64, 0))
    case.check(arch, causal=causal, seen={"causal": causal})


@pytest.mark.full(unless=lambda case: case["dtype"] == "int8")
@pytest.mark.parametrize("dtype", ["float16", "int8"])
def test_several_queries_with_a_window_and_sinks(arch, rng, dtype):
    case = Case(rng, dtype=dtype, capacity=130, queries=6, sinks=2, lens=(130, 70, 6))
    case.check(arch, window=9, sinks=2, seen={"window": 9})


def test_several_queries_in_a_ring_miss_what_was_overwritten(arch, rng):
    Case(rng, ring=16, sinks=2, queries=5, lens=(16, 17, 99, 5)).check(arch, seen={"window": 16})


def test_scale_and_softcap(arch, rng):
    case = Case(rng, lens=(40, 11))
    case.check(arch, scale=0.7)
    case.check(arch, scale=1.3, softcap=2.5)


def test_lse_in_base_2(arch, rng):
    case = Case(rng, lens=(40, 0))
    (out, lse), (want, natural) = case.run(arch, lse_base2=True), case.expected()
    assert_close((out, lse * np.log(2)), (want, natural), "float32")


@pytest.mark.parametrize("multiprocessors", [46, 108, 132])
@pytest.mark.parametrize("tasks", [1, 8, 100, 256, 512, 1024, 5000])
def test_splits_make_whole_waves_where_keys_allow_it(tasks, multiprocessors):
    least = -(-1056 // tasks)
    for most in (least, least + 1, 128, 1000):
        splits = whole_waves(tasks, min(least, most), most, multiprocessors)
        assert min(least, most) <= splits <= max(min(least, most), most)
        if tasks >= 64 and most == 1000:
            waves = [tasks * splits / (multiprocessors * n) for n in RESIDENT]
            assert min(n / math.ceil(n) for n in waves) >= 0.9
    assert whole_waves(256, 5, 32, 132) == 12
    assert whole_waves(256, 5, 5, 132) == 5


@pytest.mark.parametrize("splits", [1, 2, 3, 8, 32])
@pytest.mark.parametrize("place", ["linear", "ring"])
def test_split_counts_agree(arch, rng, splits, place):
    """Many splits leave some without a key, above all those of the short sequence."""
    ring = {"ring": 300, "sinks": 5} if place == "ring" else {}
    case = Case(rng, capacity=300, lens=(300, 2, 0, 299), queries=2, **ring)
    case.check(arch, num_splits=splits, seen={"window": 300} if ring else {})


@pytest.mark.parametrize(("dtype", "group"), [("float32", 1), ("float16", 2), ("int8", 4)])
def test_views_that_start_inside_an_array(arch, rng, dtype, group):
    """A cache that is a slice, with its own strides and a first element away from the buffer's."""
    Case(rng, dtype=dtype, group=group, guard=3, lens=(40, 13)).check(arch)


@pytest.mark.parametrize(("dtype", "group"), [("float32", 1), ("float16", 2), ("int8", 4)])
def test_the_heads_of_a_token_may_lie_side_by_side(arch, rng, dtype, group):
    """A task of a CPU then has several KV heads."""
    case = Case(rng, dtype=dtype, group=group, lens=(40, 13))
    for name in ("k", "v", "k_scale", "v_scale"):
        if (a := getattr(case, name)) is not None:
            setattr(case, name, a.swapaxes(1, 2).copy().swapaxes(1, 2))
    case.check(arch)


@pytest.mark.parametrize(
    ("dtype", "queries", "options", "choices"),
    [
        ("float16", None, {}, {"num_splits": 3}),
        ("float16", None, {"ring": 24, "sinks": 2}, {}),
        ("int8", 3, {}, {"window": 9}),
    ],
)
def test_heads_have_lengths_of_their_own(arch, rng, dtype, queries, options, choices):
    """Each KV head sees its own count of keys; one of none gives 0 and -inf."""
    lens = ((40, 0, 7), (3, 25, 40))
    case = Case(rng, dtype=dtype, heads=3, queries=queries, lens=lens, **options)
    got, want = case.run(arch, **choices), case.expected(window=choices.get("window"))
    assert_close(got, want, "float32")
    assert (got[0][0, 2:4] == 0).all()
    assert np.isneginf(got[1][0, 2:4]).all()


@pytest.mark.archs("cpu")
def test_heads_of_different_lengths_share_out_the_sum_of_their_keys(monkeypatch, arch):
    """On CUDA a task has as many keys as those of heads that all have the mean, on CPU each worker a part of each."""
    k = oracle.place(np.zeros((32, 8, 1, 128), np.float16), "cpu")
    cache = contiguous_cache({name: view(k, name, "t") for name in "kv"})._replace(capacity=8192)
    query = QueryShape(32, 32, 1, 128, (0, 0, 0))
    options = AttentionOptions(None, True, None, None, None, False)
    monkeypatch.setattr("tikv.launch.multiprocessors", lambda live: 132)
    monkeypatch.setenv("TIKV_LAUNCHER", "direct")
    engine = SimpleNamespace(has_bitcode=False, title="an engine without tensor cores")
    gpu = SimpleNamespace(
        is_cuda=True, kernel_style="cuda", arch="cuda", invariant=False, attention_bits=16, engine=engine
    )
    arrays = {"q": cache.k.array, "k": cache.k.array, "v": cache.v.array}
    shares_of = lambda live, lengths, asked=options: family_for(Form(live, arrays, query, cache, asked)).shares(lengths)  # noqa: E731
    even = shares_of(gpu, Lengths(4096)).splits
    shares = shares_of(gpu, Lengths(7372, 4096))
    assert shares.least_share == -(-4096 // even // 16) * 16 == 352
    assert shares.splits == -(-7372 // 352)
    far = shares_of(gpu, Lengths(8192, 100))
    assert 256 <= far.least_share < 1024
    assert far.splits * far.least_share >= 8192
    near = shares_of(gpu, Lengths(7372, 4096), options._replace(span=64))
    assert near.splits == 1
    cpu = SimpleNamespace(kernel_style="cpu", arch="cpu", threads=2, invariant=False)
    assert shares_of(cpu, Lengths(7372, 4096)) == Shares(2, 2)
    assert shares_of(cpu, Lengths(7372, 4096), options._replace(splits=5)) == Shares(5, 2)


@pytest.mark.archs("cpu")
def test_one_thread_does_little_work_of_a_cpu_unsplit(arch):
    k = oracle.place(np.zeros((1, 2, 1, 64), np.float32), "cpu")
    cache = contiguous_cache({name: view(k, name, "t") for name in "kv"})._replace(capacity=8192)
    query, options = QueryShape(1, 8, 1, 64, (0, 0, 0)), AttentionOptions(None, True, None, None, None, False)
    cpu = SimpleNamespace(kernel_style="cpu", arch="cpu", threads=2, invariant=False)
    form = Form(cpu, {"q": cache.k.array, "k": cache.k.array, "v": cache.v.array}, query, cache, options)
    family = Cpu(form)
    assert family.shares(Lengths(2047)) == Shares(1, 1)
    assert family.shares(Lengths(2048)) == Shares(4, 2)
    assert Cpu(form._replace(options=options._replace(splits=3))).shares(Lengths(2047)) == Shares(3, 1)
    cpu.threads = 16  # which save nearly all of one thread's time
    assert family.shares(Lengths(1092)) == Shares(1, 1)
    assert family.shares(Lengths(1093)).workers == 16


def test_one_key_gives_its_value(arch, rng):
    case = Case(rng, dtype="float32", lens=(1,))
    out, _ = case.run(arch)
    np.testing.assert_array_equal(out[0, 0], case.v_real[0, 0, 0])


def test_lengths_may_be_int64_and_a_list(arch, rng):
    case = Case(rng, lens=(40, 5))
    want = case.expected()[0]
    for lens in (np.array([40, 5]), [40, 5]):
        got = tikv.decode_attention(case.q, case.k, case.v, lens) if arch != "cuda" else None
        if got is not None:
            assert np.abs(oracle.to_numpy(got) - want).max() < 1e-5


class Pages:
    """Sequences in a page pool of shuffled blocks."""

    def __init__(self, rng, *, layout="NHD", dtype="float16", page=4, lens=(30, 5), heads=2, group=2, width=16,
                 width_v=None, **options):  # fmt: skip
        self.case = Case(rng, dtype=dtype, heads=heads, group=group, width=width, width_v=width_v, capacity=max(lens),
                         lens=lens, **options)  # fmt: skip
        each = -(-max(lens) // page)
        blocks = len(lens) * each + 3
        free = rng.permutation(blocks)
        self.table = np.full((len(lens), each + 1), -1, np.int32)
        pools = []
        for rows in (self.case.k, self.case.v, self.case.k_scale, self.case.v_scale):
            if rows is None:
                pools.append(None)
                continue
            filler = 127 if rows.dtype == np.int8 else np.nan
            flat = np.full((blocks * page, heads, *rows.shape[3:]), filler, rows.dtype)
            for b, length in enumerate(lens):
                used = -(-length // page)
                self.table[b, :used] = free[b * each : b * each + used]
                for p in range(length):
                    flat[self.table[b, p // page] * page + p % page] = rows[b, :, p]
            if rows.ndim == 3:
                pools.append(flat.reshape(blocks, page, heads))
                continue
            shape = (blocks, page, heads, rows.shape[-1])
            like = np.empty(shape, rows.dtype)
            if layout == "HND":
                like = like.swapaxes(1, 2)
            elif layout == "VLLM":
                x = 16 // rows.dtype.itemsize
                n, bs, h, d = shape
                like = np.empty((n, h, d // x, bs, x) if rows is self.case.k else (n, h, d, bs), rows.dtype)
            pools.append(reference.pool_from_rows(flat, like, layout))
        self.k, self.v, self.k_scale, self.v_scale = pools
        self.layout = layout

    def run(self, arch, lens=None, **options):
        place = lambda a: oracle.place(a, arch)  # noqa: E731
        lens = np.array(self.case.lens if lens is None else lens, np.int32)
        if self.k_scale is not None:
            options |= {"k_scale": place(self.k_scale), "v_scale": place(self.v_scale)}
        got = tikv.paged_decode_attention(
            place(self.case.q), place(self.k), place(self.v), place(self.table), place(lens), layout=self.layout,
            return_lse=True, **options,
        )  # fmt: skip
        return tuple(oracle.to_numpy(a).astype(np.float64) for a in got)


class HeadPages(Pages):
    """Sequences each of whose KV heads has blocks of its own, in pools of one head."""

    def __init__(self, rng, *, lens, heads, page=4, layout="NHD", **options):
        flat = [n for row in lens for n in row]
        super().__init__(rng, lens=flat, heads=1, page=page, layout=layout, **options)
        one, self.case = self.case, Case(rng, lens=lens, heads=heads, capacity=max(flat), **options)
        shape = (len(lens), heads)
        for name in ("k_real", "v_real"):
            rows = getattr(one, name)
            setattr(self.case, name, rows.reshape(*shape, *rows.shape[2:]))
        self.table = self.table.reshape(*shape, -1)


@pytest.mark.full(unless=lambda case: case["layout"] != "VLLM")
@pytest.mark.parametrize(
    ("layout", "dtype", "queries", "choices"),
    [("NHD", "float16", None, {"num_splits": 3}), ("HND", "int8", 3, {"window": 9}), ("VLLM", "float16", None, {})],
)
def test_heads_have_pages_of_their_own(arch, rng, layout, dtype, queries, choices):
    lens = ((40, 0, 7), (3, 25, 40))
    pages = HeadPages(rng, layout=layout, dtype=dtype, heads=3, queries=queries, lens=lens)
    assert_close(pages.run(arch, **choices), pages.case.expected(window=choices.get("window")), "float32")


@pytest.mark.parametrize("lens", [(30, 5), ((30, 4), (0, 30))])
def test_heads_share_pages_of_which_they_see_their_own_count(arch, rng, lens):
    """And have pages of their own of which they see equally many."""
    if np.ndim(lens) == 2:
        pages = Pages(rng, lens=(30, 30))
        pages.case.lens = lens
    else:
        pages = HeadPages(rng, lens=((30, 30), (5, 5)), heads=2)
        pages.case.lens = lens
    assert_close(pages.run(arch), pages.case.expected(), "float32")


def each_pair_once(case):
    """One grouping for each place and dtype, another one for the next: each meets each place, and each dtype."""
    place = "HND" if case["place"] == "NHD" else case["place"]  # two strides of one kernel on a GPU
    return case["group"] == (1, 4, 8)[(PLACES.index(place) + list(DTYPES).index(case["dtype"])) % 3]


@pytest.mark.eight_rows
@pytest.mark.full(unless=each_pair_once)
@pytest.mark.parametrize("group", [1, 4, 8])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("place", PLACES)
def test_every_storage_and_grouping(arch, rng, place, dtype, group):
    """Empty, short and full; each with a window that some exceed; rings around the first wrap and far past it."""
    if place == "ring":
        sinks = 3 if dtype in ("float16", "int8") else 0
        for length in (23, 24, 25, 24 * 7 + 5):
            Case(rng, dtype=dtype, group=group, ring=24, sinks=sinks, lens=(length, 4, length + 1)).check(arch)
        return
    lens = (40, 1, 0, 23)
    pages = Pages(rng, layout=place, dtype=dtype, group=group, lens=lens) if place != "linear" else None
    case = pages.case if pages else Case(rng, dtype=dtype, group=group, lens=lens)
    for window in (None, 7):
        got = (pages or case).run(arch, window=window)
        assert_close(got, case.expected(window=window), "float32")


def test_k_and_v_have_dtypes_of_their_own(arch, rng):
    q = rng.standard_normal((2, 4, 16)).astype(np.float32)
    k = rng.standard_normal((2, 2, 23, 16)).astype(np.float16)
    v = rng.standard_normal((2, 2, 23, 16)).astype(ml_dtypes.bfloat16)
    got = tikv.decode_attention(*(oracle.place(a, arch) for a in (q, k, v)), 23)
    want = np.empty(q.shape)
    for b, h in itertools.product(range(2), range(4)):
        keys, values = (a[b, h // 2].astype(np.float64) for a in (k, v))
        want[b, h] = reference.attention(q[b, h], keys, values, scale=16**-0.5)[0]
    np.testing.assert_allclose(oracle.to_numpy(got), want, rtol=TOLERANCE["float32"], atol=TOLERANCE["float32"])


@pytest.mark.parametrize(
    ("place", "dtype"), [("ring", "float8_e4m3fn"), ("HND", "float8_e4m3fn"), ("NHD", "float8_e5m2")]
)
def test_floats_of_8_bits(arch, rng, place, dtype):
    """The linear cache of both is read in tests/test_dtypes.py."""
    if place == "ring":
        Case(rng, dtype=dtype, group=1, ring=24, sinks=3, lens=(23, 4, 24 * 7 + 5)).check(arch)
        return
    pages = Pages(rng, layout=place, dtype=dtype, group=4, lens=(40, 1, 0, 23))
    assert_close(pages.run(arch), pages.case.expected(), "float32")


# Pages find their rows by code of their own, NaN is met by that of a dtype: NHD, a ring and the linear cache have each.
@pytest.mark.full(unless=lambda case: case["place"] not in ("HND", "VLLM") and case["dtype"] in ("int8", "float16"))
@pytest.mark.parametrize(
    ("place", "dtype"),
    [
        ("linear", "float32"), ("linear", "float16"), ("linear", "bfloat16"), ("linear", "int8"), ("ring", "float16"),
        ("NHD", "int8"), ("HND", "bfloat16"), ("VLLM", "float32"),
    ],
)  # fmt: skip
def test_what_a_query_does_not_see_may_be_nan(arch, rng, place, dtype):
    """Of two queries, one sees the newest token, the other one more behind the window: each is NaN to the other."""
    window = 9
    for query, spoiled in ((0, -1), (1, -window - 1)):
        options = {"dtype": dtype, "group": 1, "queries": 2, "lens": (40, 23), "spoiled": spoiled}
        if place == "ring":
            case, window = Case(rng, ring=24, **options), 24
            got = case.run(arch)
        elif place == "linear":
            case = Case(rng, **options)
            got = case.run(arch, window=window)
        else:
            pages = Pages(rng, layout=place, **options)
            case, got = pages.case, pages.run(arch, window=window)
        want = case.expected(window=window)
        assert_close([a[:, :, query] for a in got], [a[:, :, query] for a in want], "float32")
        if place == "ring":
            break  # both see all that the ring still holds


@pytest.mark.parametrize("place", ["linear", "NHD"])
def test_an_infinity_that_is_seen_stays_one(arch, rng, place):
    """It is the last key's, of an even and of an odd number."""
    lens = (8, 13)
    pages = Pages(rng, dtype="float32", layout=place, lens=lens) if place != "linear" else None
    case = pages.case if pages else Case(rng, dtype="float32", lens=lens)
    for b, length in enumerate(lens):
        if pages:
            block, slot = pages.table[b, (length - 1) // 4], (length - 1) % 4
            pages.v[block, slot, :, 3] = np.inf
        else:
            case.v[b, :, length - 1, 3] = np.inf
    out = (pages or case).run(arch)[0]
    assert (out[..., 3] == np.inf).all()
    assert np.isfinite(np.delete(out, 3, axis=-1)).all()


@pytest.mark.parametrize("place", ["linear", "NHD"])
def test_lengths_and_tables_that_only_the_device_knows_are_bounded(arch, rng, device_knows, place):
    """Too long is as long as there is room, less than nothing is nothing, and a missing page is not seen."""
    if place == "linear":
        case = Case(rng, guard=3, lens=(40, 40, 40))
        case.lens = (40, 0, 40)
        assert_close(case.run(arch, lens=(2**31 - 1, -5, 41)), case.expected(), "float32")
        return
    pages = Pages(rng, lens=(20, 20, 20))
    pages.table = pages.table[:, :5].copy()
    pages.table[0, 4], pages.table[2, 4] = len(pages.k), -(2**31)
    pages.case.lens = (16, 0, 16)
    assert_close(pages.run(arch, lens=(2**31 - 1, -5, 21)), pages.case.expected(), "float32")


@pytest.mark.parametrize("page", [1, 3, 16])
def test_page_sizes(arch, rng, page):
    pages = Pages(rng, page=page, lens=(70, 64, 0, 1))
    assert_close(pages.run(arch), pages.case.expected(), "float32")


@pytest.mark.full
@pytest.mark.parametrize(("dtype", "width"), [("int8", 128), ("float16", 256), ("float32", 256)])
def test_the_longest_kernels(arch, rng, dtype, width):
    """Many query rows that see different keys of pages, with a soft cap: on CUDA all of it has to stay one function."""
    pages = Pages(rng, dtype=dtype, width=width, lens=(150, 9), queries=4, page=16)
    options = {"window": 60, "softcap": 5.0}
    assert_close(pages.run(arch, **options), pages.case.expected(**options), "float32")
    assert launch.launcher_report(arrays.runtime_of())["fallbacks"] == {}


@pytest.mark.parametrize("group", [1, 4, 8])
@pytest.mark.parametrize("steep", [1.0, 4.0, 40.0])
def test_maxima_that_grow_along_a_sequence(arch, rng, group, steep):
    """A result is rescaled when its maximum grows, or later: by little, by much, and not at all."""
    case = Case(rng, dtype="float32", group=group, capacity=700, lens=(700,))
    ramp = (steep * np.linspace(-1, 1, 700, dtype=np.float32))[:, None]
    case.k[...] = case.k + ramp
    case.k_real = case.k.astype(np.float64)
    case.q = np.abs(case.q)
    case.check(arch, num_splits=1)


@pytest.mark.full(unless=lambda case: case["splits"] == 3)
@pytest.mark.parametrize("splits", [1, 3, 32])
def test_pages_with_a_window_queries_and_splits(arch, rng, splits):
    pages = Pages(rng, lens=(200, 30, 3), queries=3, page=16, width_v=32)
    assert_close(pages.run(arch, window=20, num_splits=splits), pages.case.expected(window=20), "float32")


@pytest.mark.full(unless=lambda case: case["window"] == 12)
@pytest.mark.parametrize(
    ("dtype", "window"), [("float32", None), ("float16", 12), ("bfloat16", None), ("int8", 12), ("float16", None)]
)
def test_a_store_attends_over_what_it_holds(arch, rng, dtype, window):
    """Token by token past the window, then trimmed."""
    store = tikv.KVCacheStore(num_layers=2, num_kv_heads=2, head_dim=16, capacity=40, dtype=dtype, window=window,
                              sinks=2 if window else 0, batch_size=2)  # fmt: skip
    rows = rng.standard_normal((30, 2, 2, 2, 16)).astype(np.float32)
    q = rng.standard_normal((2, 4, 16)).astype(np.float32)

    def check():
        k, v = (oracle.to_numpy(a).astype(np.float64) for a in store.tokens(1))
        out, lse = store.attend(1, oracle.place(q, arch), return_lse=True)
        for b, h in itertools.product(range(2), range(4)):
            want = reference.attention(q[b, h], k[b, h // 2], v[b, h // 2], scale=0.25)
            assert_close([oracle.to_numpy(a)[b, h].astype(np.float64) for a in (out, lse)], want, "float32")

    for i, (k, v) in enumerate(rows):
        store.append(1, oracle.place(k[:, None].copy(), arch), oracle.place(v[:, None].copy(), arch))
        if i in (0, 1, 10, 11, 12, 13, 29):
            check()
    store.append(0, *(oracle.place(np.zeros((2, 30, 2, 16), np.float32), arch) for _ in "kv"))
    store.trim(3)
    check()


@pytest.mark.archs("cpu")
@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"q": (2, 3, 16)}, tikv.ShapeError, "do not divide"),
        ({"q": (3, 4, 16)}, tikv.ShapeError, "batch"),
        ({"q": (2, 4, 8)}, tikv.ShapeError, "head width"),
        ({"lens": [41, 3]}, tikv.CapacityError, "41"),
        ({"lens": [3, -1]}, tikv.PositionError, "-1"),
        ({"q": (2, 4, 5, 16), "lens": [9, 4]}, tikv.PositionError, "5 queries"),
        ({"q": (2, 4, 5, 16), "lens": [0, 3]}, tikv.PositionError, r"lengths\[1\] is 3, and the 5 queries"),
        ({"lens": [9]}, tikv.ShapeError, "lengths"),
        ({"lens": [[9, 2, 1], [3, 4, 5]]}, tikv.ShapeError, "the heads of the lengths"),
        ({"lens": [[9, 2], [3, 41]]}, tikv.CapacityError, r"lengths\[1, 1\] is 41"),
        ({"lens": [[9, 2], [-3, 4]]}, tikv.PositionError, r"lengths\[1, 0\] is -3"),
        ({"lens": [[9, 2], [3, 4]], "first_valid": 1}, tikv.OptionError, "first_valid=1"),
        pytest.param(
            {"lens": [[9, 9], [9, 9]], "impl": "torch"}, tikv.OptionError, "different lengths", marks=NEEDS_TORCH
        ),
        ({"lens": np.ones((2, 2, 1), np.int32)}, tikv.ShapeError, "per KV head"),
        ({"lens": np.array([1.0, 2.0])}, tikv.DTypeError, "int32 or int64"),
        ({"dtype": np.int8}, tikv.DTypeError, "needs k_scale"),
        ({"dtype": np.float64}, tikv.DTypeError, "f64"),
        ({"window": 0}, tikv.PositionError, "window=0"),
        ({"window": 4, "sinks": 4}, tikv.CapacityError, "sinks=4"),
        ({"window": 41, "ring": True}, tikv.CapacityError, "window=41"),
        ({"num_splits": 0}, tikv.PositionError, "num_splits"),
        ({"softcap": -1.0}, tikv.OptionError, "softcap"),
        ({"scale": float("nan")}, tikv.OptionError, "scale"),
        ({"impl": "fast"}, tikv.OptionError, "impl"),
        ({"impl": "torch", "softcap": 1.0}, tikv.OptionError, "impl='torch'"),
        ({"k_scale": np.ones((2, 2, 40), np.float16)}, tikv.ShapeError, "v_scale is missing"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_written(change, error, says, arch):
    change = dict(change)
    dtype = change.pop("dtype", np.float16)
    k, v = np.zeros((2, 2, 2, 40, 16), dtype)
    q = np.zeros(change.pop("q", (2, 4, 16)), np.float32)
    lens = change.pop("lens", [3, 9])
    out = np.full((*q.shape[:-1], 16), 7, np.float32)
    with pytest.raises(error, match=says) as caught:
        tikv.decode_attention(q, k, v, lens, out=out, **change)
    assert str(caught.value).startswith("decode_attention: ")
    assert (out == 7).all()


@pytest.mark.archs("cpu")
@pytest.mark.parametrize(
    ("table", "lens", "says"),
    [
        ([[0, 1]], [9], "the table names 8 slots"),
        ([[0, 7]], [5], "not one of the pool's 3 blocks"),
        ([[0, -1]], [5], "not one of the pool's 3 blocks"),
        ([[0, -1]], 5, "not one of the pool's 3 blocks"),
    ],
)
def test_tables_that_do_not_reach_are_refused(table, lens, says, arch):
    k, v = np.zeros((2, 3, 4, 2, 16), np.float16)
    with pytest.raises(tikv.PositionError, match=says):
        tikv.paged_decode_attention(np.zeros((1, 2, 16), np.float32), k, v, np.array(table), lens)
    assert np.isfinite(tikv.paged_decode_attention(np.zeros((1, 2, 16), np.float32), k, v, [[0, -1]], 4)).all()


@pytest.mark.archs("cpu")
@pytest.mark.parametrize(
    ("heads", "table", "lens", "error", "says"),
    [
        (2, [[[0], [1]]], [2], tikv.ShapeError, "the pools have 2"),
        (1, [[[0], [1]]], [[5, 1]], tikv.PositionError, r"lengths\[0, 0\] is 5, but the table names 4 slots"),
        (1, [[[0], [3]]], [[4, 1]], tikv.PositionError, r"block_tables\[0, 1, 0\]=3 is not one of the pool's 3 blocks"),
        (1, [[[0], [-1]]], [4], tikv.PositionError, r"block_tables\[0, 1, 0\]=-1 is not one"),
        (2, [[0, -1]], [[4, 5]], tikv.PositionError, r"block_tables\[0, 1\]=-1 is not one"),
        (1, [[[0], [1], [2]]], [[4, 1]], tikv.ShapeError, "do not divide"),
        (1, [[[0], [1]]], [[4, 1, 1]], tikv.ShapeError, "the heads of the lengths"),
    ],
)
def test_tables_by_head_that_do_not_fit_are_refused(heads, table, lens, error, says, arch):
    k, v = np.zeros((2, 3, 4, heads, 16), np.float16)
    out = np.full((1, 4, 16), 7, np.float32)
    with pytest.raises(error, match=says):
        tikv.paged_decode_attention(np.zeros((1, 4, 16), np.float32), k, v, np.array(table), np.array(lens), out=out)
    assert (out == 7).all()


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("queries", [None, 3])
def test_torch_gives_the_same(arch, rng, dtype, queries):
    pytest.importorskip("torch")
    if arch not in ("cpu", "cuda"):
        pytest.skip(f"torch sees no memory of {arch}")
    case = Case(rng, dtype=dtype, query_dtype=dtype, lens=(37, 37), queries=queries)
    place = lambda a: oracle.to_torch(a, arch)  # noqa: E731
    got = tikv.decode_attention(place(case.q), place(case.k), place(case.v), [37, 37], window=9, impl="torch")
    # torch computes float16 and bfloat16 in float32 or in their own precision, as its kernels choose.
    error = np.abs(oracle.to_numpy(got).astype(np.float64) - case.expected(window=9)[0]).max()
    assert error < {"float32": 1e-5, "float16": 4e-3, "bfloat16": 3e-2}[dtype]


@pytest.mark.parametrize("base2", [False, True])
@pytest.mark.parametrize("queries", [None, 3])
def test_merged_halves_agree_with_the_whole(arch, rng, base2, queries):
    case = Case(rng, capacity=90, lens=(90, 41, 70), queries=queries)
    whole, (want, lse) = case.run(arch, lse_base2=base2, causal=False), case.expected(causal=False)
    place = lambda a: oracle.place(a, arch)  # noqa: E731
    halves = []
    for half, lens in ((slice(0, 40), (40, 40, 0)), (slice(40, 90), (50, 1, 30))):
        # The last sequence has its keys in the second half only.
        k, v = case.k[:, :, half], case.v[:, :, half]
        halves += tikv.decode_attention(
            place(case.q), place(k), place(v), place(np.int32(lens)), causal=False, return_lse=True, lse_base2=base2
        )
    case.k_real[2, :, :30], case.v_real[2, :, :30] = case.k_real[2, :, 40:70], case.v_real[2, :, 40:70]
    merged = tikv.merge_states(*halves, lse_base2=base2)
    case.lens = (90, 41, 30)
    want, lse = case.expected(causal=False)
    got = [oracle.to_numpy(a).astype(np.float64) for a in merged]
    got[1] *= np.log(2) if base2 else 1
    assert_close(got, (want, lse), "float32")
    assert_close((got[0][:2], got[1][:2]), (whole[0][:2], whole[1][:2] * (np.log(2) if base2 else 1)), "float32")


def test_merging_with_nothing_changes_nothing(arch, rng):
    out = rng.standard_normal((3, 2, 16)).astype(np.float32)
    lse, nothing = rng.standard_normal((3, 2)).astype(np.float32), np.full((3, 2), -np.inf, np.float32)
    junk = np.full_like(out, np.nan)
    place = lambda a: oracle.place(a, arch)  # noqa: E731
    for states in ((out, lse, junk, nothing), (junk, nothing, out, lse)):
        merged, merged_lse = tikv.merge_states(*map(place, states))
        oracle.assert_same_bits(merged, out)
        np.testing.assert_allclose(oracle.to_numpy(merged_lse), lse, rtol=1e-6)
    empty, empty_lse = tikv.merge_states(*map(place, (junk, nothing, junk, nothing)))
    assert (oracle.to_numpy(empty) == 0).all()
    assert np.isneginf(oracle.to_numpy(empty_lse)).all()


def test_log_sum_exps_of_any_strides_are_merged(arch, rng):
    """Transposed ones are read where they lie, and what negative strides cannot say is refused."""
    states = [rng.standard_normal((3, 2, 16)).astype(np.float32) for _ in "ab"]
    lses = [rng.standard_normal((2, 3)).astype(np.float32) for _ in "ab"]
    place = lambda a: oracle.place(a, arch)  # noqa: E731
    a, b, lse_a, lse_b = (place(x) for x in (*states, *lses))
    got = tikv.merge_states(a, lse_a.T, b, lse_b.T)
    want = tikv.merge_states(a, place(np.ascontiguousarray(lses[0].T)), b, place(np.ascontiguousarray(lses[1].T)))
    for one, other in zip(got, want, strict=True):
        oracle.assert_same_bits(one, oracle.to_numpy(other))
    with pytest.raises(tikv.ShapeError, match="lse_b has negative strides"):
        tikv.merge_states(states[0], lses[0].T, states[1], lses[1].T[::-1])


def test_equal_states_average_and_gain_one_bit(arch, rng):
    a, b = rng.standard_normal((2, 5, 8)).astype(np.float16)
    lse = np.full(5, 2.0, np.float32)
    place = lambda x: oracle.place(x, arch)  # noqa: E731
    out, got = tikv.merge_states(place(a), place(lse), place(b), place(lse), lse_base2=True)
    np.testing.assert_allclose(oracle.to_numpy(out), (a.astype(float) + b) / 2, atol=2e-3)
    np.testing.assert_allclose(oracle.to_numpy(got), 3.0, rtol=1e-6)


@pytest.mark.full(unless=lambda case: case["ring"] is not None)
@pytest.mark.parametrize(
    ("dtype", "queries", "ring", "lens"),
    [
        ("float16", None, None, (40, 9, 24)),
        ("float16", 3, 24, (40, 9, 24)),
        ("int8", 3, None, (40, 9, 24)),
        ("int8", None, 24, ((40, 0), (9, 24), (33, 1))),
    ],
)
def test_mass_of_each_slot(arch, rng, dtype, queries, ring, lens):
    """Against the weights of the plain softmax, put where the slots are; the mass of a query row is 1 in all."""
    case = Case(rng, dtype=dtype, ring=ring, sinks=2 if ring else 0, lens=lens, queries=queries, group=3)
    place = lambda a: oracle.place(a, arch)  # noqa: E731
    options = {"ring": True, "sinks": 2, "window": ring} if ring else {}
    lens = place(np.array(case.lens))
    arrays = [place(a) for a in (case.q, case.k, case.v)]
    _, mass = tikv.decode_attention(*arrays, lens, return_mass=True, num_splits=2, **options, **case.scales(arch))
    q = case.q if case.q.ndim == 4 else case.q[:, :, None]
    want = np.zeros((3, 2, 40))
    for b, h, t in itertools.product(*map(range, q.shape[:3])):
        seen = {"window": ring} if ring else {}
        length = case.length(b, h // 3)
        at = reference.visible_positions(length, t, q.shape[2], sinks=case.sinks, held=ring, **seen)
        weights = [reference.attention(q[b, h, t], case.k_real[b, h // 3, at], np.eye(len(at)), scale=0.25)[0]]
        slots = reference.slots(0, length, 40, ring, case.sinks)
        for p, w in zip(at, weights[0], strict=True):
            want[b, h // 3, slots[p]] += w
    np.testing.assert_allclose(oracle.to_numpy(mass), want, atol=2e-5)


@pytest.mark.archs("cpu", "cuda")
def test_rows_without_width_are_refused(arch):
    k = oracle.place(np.zeros((1, 1, 4, 32), np.float32), arch)
    with pytest.raises(tikv.ShapeError, match=r"V is .*width 0"):
        tikv.decode_attention(oracle.place(np.ones((1, 2, 32), np.float32), arch), k, k[..., :0], 3)
    state, lse = (oracle.place(np.zeros(shape, np.float32), arch) for shape in ((1, 2, 0), (1, 2)))
    with pytest.raises(tikv.ShapeError, match="width 0"):
        tikv.merge_states(state, lse, state, lse)


@pytest.mark.archs("cpu", "cuda")
def test_a_result_may_have_axes_of_one_with_any_stride(arch):
    state, lse = (oracle.place(np.ones(shape, np.float32), arch) for shape in ((2, 1, 4), (2, 1)))
    out = oracle.place(np.zeros((2, 4), np.float32), arch)[:, None]
    tikv.merge_states(state, lse, state, lse, out=out)
    assert oracle.to_numpy(out).ravel().tolist() == [1.0] * 8


@pytest.mark.archs("cpu")
def test_options_of_attention_are_told_apart_by_their_values(arch):
    q, k = np.ones((1, 1, 32), np.float32), np.zeros((1, 1, 4, 32), np.float32)
    v = np.broadcast_to(np.arange(4, dtype=np.float32)[:, None], (1, 1, 4, 32)).copy()
    window = np.array(4)
    assert tikv.decode_attention(q, k, v, 4, window=window)[0, 0, 0] == 1.5
    window[...] = 1
    assert tikv.decode_attention(q, k, v, 4, window=window)[0, 0, 0] == 3.0
    with pytest.raises(tikv.DTypeError, match="not an integer"):
        tikv.decode_attention(q, k, v, 4, window=1.0)
