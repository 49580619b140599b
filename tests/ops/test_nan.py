"""NaN and infinities in attention: what a query sees counts, whatever it is, and what it does not see never does.

By the float64 oracle: one number after another is spoiled, in a place that all queries see, or some, or none.
"""

import itertools

import numpy as np
import oracle
import pytest
from ops.test_attention import TOLERANCE, Case, Pages

import tikv
from tikv import launch, reference
from tikv.ops.attention.merge import merge_parts

pytestmark = pytest.mark.thorough

on_cpu = pytest.mark.archs("cpu")
NAN, INFINITE = float("nan"), float("inf")
NEGATIVE_NAN = np.uint32(0xFFC00001).view(np.float32)  # what x86 makes of infinity less itself
TENSOR_TOLERANCE = {"float16": 2.0**-10, "bfloat16": 2.0**-7}  # beside the result's, the weights' rounding


def agree(got, want, tolerance, what):
    """Fail unless (out, lse) are NaN and infinite where they must be, and close elsewhere."""
    for name, a, b, allowed in zip(("out", "lse"), got, want, (tolerance, 2e-5), strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        finite = np.isfinite(b)
        np.testing.assert_array_equal(a[~finite], b[~finite], err_msg=f"{name}, {what}")
        assert np.isfinite(a[finite]).all(), f"{name}, {what}: not finite where it should be"
        error = np.abs(a[finite] - b[finite]).max(initial=0) / max(1.0, np.abs(b[finite]).max(initial=0))
        assert error <= allowed, f"{name}, {what}: error {error:.2e} > {allowed:.2e}"


class Spoiled:
    """A cache of one of the places, of which a number at a time is spoiled, and then is what it was."""

    def __init__(self, rng, place, *, tolerance=None, **options):
        paged = place not in ("linear", "ring")
        self.cache = Pages(rng, layout=place, **options) if paged else Case(rng, **options)
        self.case = self.cache.case if paged else self.cache
        self.paged = paged
        self.tolerance = tolerance or TOLERANCE[self.case.query_dtype]
        assert not np.isnan(self.case.k_real).any()

    def spot(self, b, h, p):
        """Where token p of a head is kept, as an index of a cache; None where a ring has overwritten it."""
        case = self.case
        if self.paged:
            page = self.cache.k.shape[2 if self.cache.layout == "HND" else 1]
            block, inside = self.cache.table[b, p // page], p % page
            return (block, h, inside) if self.cache.layout == "HND" else (block, inside, h)
        if case.ring is None:
            return b, h, p
        slots = reference.slots(0, case.lens[b], case.ring, case.ring, case.sinks)
        return None if slots[p] in slots[p + 1 :] else (b, h, slots[p])

    def compare(self, arch, what, seen, asked):
        got, want = self.cache.run(arch, **asked), self.case.expected(**seen)
        agree(got, want, self.tolerance, what)
        return want

    def check_query(self, arch, row, value, seen, asked):
        """A number of one query is `value`: row = (b, head) or (b, head, token)."""
        at = (*row, 3)
        before = self.case.q[at]
        self.case.q[at] = value
        want = self.compare(arch, f"q at {at} is {value}", seen, asked)
        self.case.q[at] = before
        return want

    def check_token(self, arch, side, b, h, p, value, seen, asked):
        """A number of token p, or its scale, is `value` in K or V."""
        spot = self.spot(b, h, p)
        if spot is None:
            return
        real = getattr(self.case, f"{side}_real")
        scale = getattr(self.cache, f"{side}_scale")
        kept, column = (getattr(self.cache, side), 5) if scale is None else (scale, None)
        at = spot if column is None else (*spot, column)
        before, numbers = kept[at], real[b, h, p].copy()
        kept[at] = value
        if column is None:
            real[b, h, p] = value
        else:
            real[b, h, p, column] = value
        self.compare(arch, f"{side} of token {p} of {self.case.lens[b]}, head {h}, is {value}", seen, asked)
        kept[at], real[b, h, p] = before, numbers

    def check(self, arch, seen=None, asked=None, values=(NAN, INFINITE, -INFINITE)):
        """Each kind of number in K and V of a few tokens, and in queries."""
        seen = seen or {}
        asked = {**seen, **(asked or {})}
        if "held" in seen or self.case.ring:
            asked.pop("window", None)
        self.compare(arch, "nothing is spoiled", seen, asked)
        length = self.case.lens[0]
        tokens = sorted(
            {0, 1, length // 2, *range(max(0, length - 4), length), max(0, length - (seen.get("window") or 9))}
        )
        if self.case.k_scale is not None:  # an infinite scale and a code of 0 are NaN, and need not be in a product
            values = (NAN,)
        for (side, p), value in itertools.product(itertools.product("kv", tokens), values):
            self.check_token(arch, side, 0, 1, p, value, seen, asked)
        queries = [(0, 1)] if self.case.q.ndim == 3 else [(0, 1, 0), (0, 1, self.case.q.shape[2] - 1)]
        for row, value in itertools.product(queries, (NAN, NEGATIVE_NAN)):
            want = self.check_query(arch, row, value, seen, asked)
            assert np.isnan(want[0][row]).all()
            assert np.isnan(want[1][row])
            assert np.isfinite(want[0][0, 0]).all()


FORMS = [
    ("linear", "float16", None), ("linear", "float16", 2), ("linear", "float32", 5), ("linear", "bfloat16", None),
    ("linear", "int8", 2), ("ring", "float16", None), ("ring", "int8", 5), ("NHD", "float16", 2), ("NHD", "int8", None),
    ("HND", "bfloat16", 2), ("linear", "float8_e4m3fn", None), ("NHD", "float8_e5m2", 2),
]  # fmt: skip
BASIC = FORMS[:2] + FORMS[4:6] + FORMS[7:8]


@pytest.mark.full(unless=lambda case: case["form"] in BASIC)
@pytest.mark.parametrize("form", FORMS, ids=lambda form: "-".join(map(str, form)))
def test_what_is_seen_counts_and_what_is_not_does_not(arch, rng, form):
    """5 queries of 2 heads fill a task of a prompt on CPU, whose keys are made numbers first."""
    place, dtype, queries = form
    options = {"dtype": dtype, "group": 2, "queries": queries, "lens": (40, 23)}
    if place == "ring":
        spoiled = Spoiled(rng, place, ring=24, sinks=3, **{**options, "lens": (77, 23)})
        spoiled.check(arch, {"window": 24})
        return
    values = (NAN,) if dtype == "float8_e4m3fn" else (NAN, INFINITE, -INFINITE)
    spoiled = Spoiled(rng, place, **options)
    spoiled.check(arch, values=values)
    spoiled.check(arch, {"window": 9}, values=values)


@pytest.mark.parametrize("splits", [1, 3])
def test_a_split_of_nothing_but_nan(arch, rng, splits):
    spoiled = Spoiled(rng, "linear", capacity=300, lens=(300, 2), queries=2)
    spoiled.check(arch, asked={"num_splits": splits}, values=(NAN, INFINITE))
    spoiled.case.k[0, 1, 100:200] = spoiled.case.k_real[0, 1, 100:200] = np.nan
    spoiled.compare(arch, "the second of three splits is NaN", {}, {"num_splits": splits})


@pytest.mark.parametrize("queries", [None, 2])
def test_sinks_and_softcap(arch, rng, queries):
    spoiled = Spoiled(rng, "linear", lens=(40, 23), sinks=4, queries=queries)
    spoiled.check(arch, {"window": 10}, {"sinks": 4})
    spoiled.check(arch, {"softcap": 2.5}, {"sinks": 4}, values=(NAN,))


@pytest.mark.parametrize("splits", [1, 3])
def test_scores_of_minus_infinity_weigh_nothing(arch, rng, splits):
    """Also where all are, of a row or of a split; numbers as low as float32 has do weigh."""
    case = Case(rng, dtype="float32", capacity=300, lens=(300, 40))
    case.q[0, 0, 5], case.q[0, 1, 5] = -1, 1
    case.q[1] = 3e4
    case.k[1, :, :40] = -np.abs(case.k_real[1, :, :40]) * 1e30
    case.k_real[1, :, :40] = case.k[1, :, :40]
    for tokens in (slice(0, 300), slice(100, 200), slice(7, 8)):
        k, real = case.k.copy(), case.k_real.copy()
        case.k[0, 0, tokens, 5] = case.k_real[0, 0, tokens, 5] = np.inf
        got, want = case.run(arch, num_splits=splits), case.expected()
        agree(got, want, 1e-5, f"K is infinite at {tokens}")
        assert np.isnan(got[0][0, 1]).all()  # of scores of infinity
        assert np.isneginf(got[1][0, 0]) == (tokens == slice(0, 300))
        case.k[...], case.k_real[...] = k, real


def test_logits_of_sinks_and_slopes(arch, rng):
    """Of four heads: NaN, infinity, -infinity, which counts for nothing, and a number."""
    for queries in (None, 2):
        case = Case(rng, dtype="float32", lens=(40, 23), queries=queries)
        want = [a.reshape(2, 4, -1, *a.shape[3 if queries else 2 :]) for a in case.expected()]
        logits = np.float32([NAN, INFINITE, -INFINITE, 0.5])
        got = [
            a.reshape(b.shape)
            for a, b in zip(case.run(arch, sink_logits=oracle.place(logits, arch)), want, strict=True)
        ]
        assert all(np.isnan(a[:, :2]).all() for a in got)
        agree([a[:, 2] for a in got], [a[:, 2] for a in want], 1e-5, "a sink of -infinity")
        lse = np.logaddexp(want[1][:, 3], 0.5)
        share = np.exp(want[1][:, 3] - lse)[..., None]
        agree([a[:, 3] for a in got], [want[0][:, 3] * share, lse], 1e-5, "a sink")
        slopes = np.float32([NAN, 0, 0, 0])
        got = [
            a.reshape(b.shape)
            for a, b in zip(case.run(arch, alibi_slopes=oracle.place(slopes, arch)), want, strict=True)
        ]
        assert all(np.isnan(a[:, 0]).all() for a in got)
        agree([a[:, 1:] for a in got], [a[:, 1:] for a in want], 1e-5, "no slope")


@pytest.mark.parametrize("side", ["k", "v"])
def test_a_tree_hides_what_its_branches_do_not_share(arch, rng, side):
    """Of four new tokens the second and third are children of the first, the fourth of the third."""
    parents = np.array([[-1, 0, 0, 2], [-1, 0, 0, 2]], np.int32)
    mask = reference.tree_mask(parents[0])
    for spoiled in range(4):
        case = Case(rng, dtype="float32", lens=(20, 20), queries=4)
        position = 16 + spoiled
        for array in (getattr(case, side), getattr(case, f"{side}_real")):
            array[0, 0, position, 2] = np.nan
        out, lse = case.run(arch, parents=oracle.place(parents, arch))
        for h, t in itertools.product(range(2), range(4)):
            at = list(range(16)) + [16 + int(n) for n in np.flatnonzero(mask[t])]
            want = reference.attention(case.q[0, h, t], case.k_real[0, 0, at], case.v_real[0, 0, at], scale=0.25)
            agree((out[0, h, t], lse[0, h, t]), want, 1e-5, f"query {t}, token {spoiled}")
            assert np.isnan(out[0, h, t]).any() == mask[t, spoiled]
        assert np.isfinite(out[1]).all()


@pytest.mark.parametrize("queries", [None, 3])
@pytest.mark.parametrize("dtype", ["float16", "int8"])
def test_mass(arch, rng, dtype, queries):
    """A NaN among the scores of a row makes its share of each key that it sees NaN; V counts for nothing."""
    for spoil in ("q", "k", "hidden", "v"):
        case = Case(rng, dtype=dtype, lens=(40, 23), queries=queries)
        tokens, window = queries or 1, 9
        rows, real = (case.k, case.k_real) if spoil != "v" else (case.v, case.v_real)
        scales = case.k_scale if spoil != "v" else case.v_scale
        token = {"k": 38, "v": 38, "hidden": 40 - window - tokens}.get(spoil)
        if spoil == "q":
            case.q[(0, 1, tokens - 1, 3) if queries else (0, 1, 3)] = np.nan
        elif scales is None:
            rows[0, 0, token, 3] = real[0, 0, token, 3] = np.nan
        else:
            scales[0, 0, token] = real[0, 0, token] = np.nan
        place = lambda a: oracle.place(a, arch)  # noqa: E731
        arrays = [place(a) for a in (case.q, case.k, case.v, np.array(case.lens, np.int32))]
        mass = oracle.to_numpy(
            tikv.decode_attention(*arrays, return_mass=True, window=window, **case.scales(arch))[-1]
        )  # fmt: skip
        want, q = np.zeros(mass.shape), case.q if queries else case.q[:, :, None]
        for b, h, t in itertools.product(range(2), range(4), range(tokens)):
            at = reference.visible_positions(case.lens[b], t, tokens, window=window)
            want[b, h // 2, at] += reference.attention(
                q[b, h, t], case.k_real[b, h // 2, at], np.eye(len(at)), scale=0.25
            )[0]
        np.testing.assert_allclose(mass, want, atol=2e-5, err_msg=spoil)
        assert np.isnan(mass).any() == (spoil in ("q", "k"))


def attend_over_codes(rng, arch, name, window, tolerance, **options):
    """Compare with the oracle where the scale or the bias of one group of a token is NaN, and one behind a length."""
    for side, p, number in itertools.product("kv", (10, 38, 39), ("scales", "biases")):
        case = Case(rng, lens=(40, 23), **options)
        rows = {one: np.nan_to_num(getattr(case, one)) for one in "kv"}
        codes = {one: tikv.quantize(oracle.place(a, arch), name) for one, a in rows.items()}
        for one, of in codes.items():
            real = getattr(case, f"{one}_real")
            real[...] = oracle.to_numpy(tikv.dequantize(of))[:, :, : real.shape[2]]
        if getattr(codes[side], number) is None:
            continue
        numbers = oracle.to_numpy(getattr(codes[side], number)).copy()
        numbers[0, 1, p, -1] = numbers[1, 1, 30, 0] = np.nan
        codes[side] = codes[side]._replace(**{number: oracle.place(numbers, arch)})
        getattr(case, f"{side}_real")[0, 1, p, -(case.k.shape[-1] // numbers.shape[-1]) :] = np.nan
        given = [oracle.place(case.q, arch), codes["k"], codes["v"], oracle.place(np.array(case.lens, np.int32), arch)]
        got = [oracle.to_numpy(a) for a in tikv.decode_attention(*given, return_lse=True, window=window)]
        agree(got, case.expected(window=window), tolerance, f"{side} of token {p}, {number}")


@pytest.mark.parametrize("name", ["quant8_32", "quant4_32", "q8_0", "q4_0"])
@pytest.mark.parametrize("queries", [None, 2])
def test_groups(arch, rng, name, queries):
    attend_over_codes(rng, arch, name, 9, 1e-5, width=32, queries=queries)


def test_values_that_are_columns_of_the_keys(arch, rng):
    """Latent attention: a NaN behind those columns reaches scores alone, and so all of the row."""
    for column, queries in itertools.product((2, 14), (None, 2)):
        case = Case(rng, dtype="float32", heads=1, lens=(20, 7), queries=queries)
        case.k[0, 0, 12, column] = case.k_real[0, 0, 12, column] = np.nan
        case.v_real = case.k_real[..., :8]
        q, k, lens = (oracle.place(a, arch) for a in (case.q, case.k, np.array(case.lens, np.int32)))
        got = tikv.decode_attention(q, k, None, lens, head_dim_v=8, return_lse=True)
        agree([oracle.to_numpy(a) for a in got], case.expected(), 1e-5, f"column {column}")


# --- states that are merged


@pytest.mark.parametrize("base2", [False, True])
def test_merge_states(arch, rng, base2):
    """What is empty counts nothing, whatever its result; a NaN makes its column NaN, as a log-sum-exp all."""
    outs = rng.standard_normal((2, 5, 2, 8)).astype(np.float32)
    lses = rng.standard_normal((2, 5, 2)).astype(np.float32)
    lses[0, 0], outs[0, 0] = -np.inf, np.nan
    lses[1, 1], outs[1, 1] = -np.inf, np.nan
    lses[:, 2] = -np.inf
    lses[0, 3, 0] = np.nan
    outs[1, 4, 1, 6] = np.nan
    place = lambda a: oracle.place(a, arch)  # noqa: E731
    got = tikv.merge_states(place(outs[0]), place(lses[0]), place(outs[1]), place(lses[1]), lse_base2=base2)
    out, lse = map(oracle.to_numpy, got)
    unit = np.log(2) if base2 else 1.0
    scores = lses.astype(np.float64) * unit
    for row in itertools.product(range(5), range(2)):
        counts = [i for i in range(2) if scores[(i, *row)] != -np.inf]
        want = reference.attention(
            np.ones(1), scores[(counts, *row)][:, None], outs[(counts, *row)].reshape(-1, 8), scale=1.0
        )  # fmt: skip
        agree((out[row], lse[row]), (want[0], want[1] / unit), 1e-5, row)
    assert np.isnan(out[3, 0]).all()
    assert np.isnan(lse[3, 0])
    assert np.isnan(out[4, 1]).sum() == 1


@pytest.mark.parametrize("sinks", [False, True])
def test_merge_parts(arch, rng, sinks):
    """The same of any number of parts, with logits that count once."""
    live = tikv.arrays.runtime_of()
    parts = rng.standard_normal((3, 1, 4, 5, 9)).astype(np.float32)
    parts[1, 0, :, 0, 8], parts[1, 0, :, 0, :8] = -np.inf, np.nan
    parts[:, 0, :, 1, 8] = -np.inf
    parts[2, 0, 1, 2, 8] = np.nan
    parts[0, 0, 1, 3, 4] = np.nan
    logits = np.float32([-INFINITE, 0.5, NAN, INFINITE])
    given = [
        tikv.arrays.to_device(a, live) for a in (parts, np.zeros((1, 4, 5, 8), np.float32), parts[0, ..., 8].copy())
    ]
    merge_parts("test", *given, *([tikv.arrays.to_device(logits, live)] if sinks else []))
    out, lse = (tikv.arrays.read_host(a, live) for a in given[1:])
    for h, t in itertools.product(range(4), range(5)):
        found = parts[:, 0, h, t].astype(np.float64)
        found = found[found[:, 8] != -np.inf]
        logit = float(logits[h]) if sinks else None
        want = reference.attention(np.ones(1), found[:, 8:], found[:, :8], scale=1.0, sink_logit=logit)
        agree((out[0, h, t], lse[0, h, t]), want, 1e-5, (h, t))


# --- torch's attention, which hides nothing


@on_cpu
@pytest.mark.parametrize("impl", ["auto", "torch"])
@pytest.mark.parametrize("window", [None, 20])
def test_prompts_that_are_left_to_torch(arch, rng, monkeypatch, impl, window):
    pytest.importorskip("torch")
    case = Case(rng, dtype="float32", capacity=120, lens=(100,), queries=64)
    want = case.expected(window=window)[0]
    for side, p, value in itertools.product("kv", (3, 36, 60, 99), (NAN, INFINITE)):
        kept, real = getattr(case, side), getattr(case, f"{side}_real")
        before = kept[0, 1, p, 3]
        kept[0, 1, p, 3] = real[0, 1, p, 3] = value
        out = tikv.decode_attention(case.q, case.k, case.v, 100, impl=impl, window=window)
        want = case.expected(window=window)[0]
        finite = np.isfinite(want)
        np.testing.assert_array_equal(out[~finite], want[~finite])
        np.testing.assert_allclose(out[finite], want[finite], atol=1e-5)
        kept[0, 1, p, 3] = real[0, 1, p, 3] = before


# --- CUDA's tensor cores


TENSOR_FORMS = [
    # width, group, queries, page: warps share out the keys of few rows, the rows of many, the columns of wide heads
    (128, 4, None, 0), (128, 4, 3, 0), (128, 4, 40, 0), (128, 4, 40, 16), (64, 2, 40, 48), (256, 4, 30, 0),
    (320, 16, 3, 16),
]  # fmt: skip


@pytest.mark.archs("cuda")
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("form", TENSOR_FORMS, ids=lambda form: "-".join(map(str, form)))
def test_tensor_cores(arch, rng, tiles, form, dtype):
    width, group, queries, page = form
    options = {"dtype": dtype, "query_dtype": dtype, "width": width, "group": group, "queries": queries}
    options |= {"lens": (75, 40), "tolerance": TENSOR_TOLERANCE[dtype]}
    if width > 256:
        options |= {"width_v": 256, "heads": 2}
    spoiled = Spoiled(rng, "NHD", page=page, **options) if page else Spoiled(rng, "linear", capacity=75, **options)
    spoiled.check(arch)
    spoiled.check(arch, {"window": 21})
    spoiled.check(arch, {"window": 21}, {"num_splits": 3}, values=(NAN,))
    assert launch.launcher_report(tikv.arrays.runtime_of())["fallbacks"] == {}


@pytest.mark.archs("cuda")
@pytest.mark.parametrize("queries", [None, 3, 40])
def test_tensor_cores_behind_sinks(arch, rng, tiles, queries):
    options = {"dtype": "float16", "query_dtype": "float16", "width": 128, "group": 4, "queries": queries}
    spoiled = Spoiled(rng, "ring", ring=56, sinks=3, capacity=56, lens=(150, 60), tolerance=2.0**-10, **options)
    spoiled.check(arch, {"window": 56})


@pytest.mark.archs("cuda")
@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("place", ["linear", "NHD"])
@pytest.mark.parametrize("queries", [None, 3, 40])
def test_tensor_cores_over_floats_of_8_bits(arch, rng, tiles, name, place, queries):
    options = {"dtype": name, "query_dtype": "float16", "width": 128, "group": 4, "queries": queries}
    options |= {"page": 16} if place == "NHD" else {"capacity": 75}
    spoiled = Spoiled(rng, place, lens=(75, 40), tolerance=2.0**-10, **options)
    values = (NAN,) if name == "float8_e4m3fn" else (NAN, INFINITE, -INFINITE)
    spoiled.check(arch, values=values)
    spoiled.check(arch, {"window": 21}, values=values)
    assert launch.launcher_report(tikv.arrays.runtime_of())["fallbacks"] == {}


@pytest.mark.archs("cuda")
@pytest.mark.parametrize("name", ["int8", "quant8_64", "quant4_64", "q8_0", "q4_0", "mxfp8", "mxfp4", "nvfp4"])
@pytest.mark.parametrize("queries", [None, 3, 40])
def test_tensor_cores_over_codes(arch, rng, tiles, name, queries):
    """Of a group's numbers a scale or a bias is NaN."""
    if name == "int8":
        options = {"dtype": "int8", "query_dtype": "float16", "width": 128, "group": 4, "queries": queries}
        Spoiled(rng, "NHD", page=16, lens=(75, 40), tolerance=2.0**-10, **options).check(arch, {"window": 21})
        return
    options = {"width": 128, "group": 4, "queries": queries, "query_dtype": "float16"}
    attend_over_codes(rng, arch, name, 21, 2.0**-10, **options)
