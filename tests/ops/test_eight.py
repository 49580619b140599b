"""Attention of prompts in 8 bits by the warpgroups of compute capability 9, against its definition in float64.

The kernels round queries as the definition does. Over int8 all else is as exact as in 16 bits. Over float8_e4m3fn they
round weights too, at powers of two of their own, and add up products with fewer bits than float32 has: so there either
weights are powers of two, which are not rounded, or the difference from the definition is compared with what rounding
weights costs it.
"""

import itertools

import ml_dtypes
import numpy as np
import oracle
import pytest
from ops.test_attention_terms import Terms
from ops.test_hopper import CUDA, OPTIONS, expected, on_cuda, place_of, trees
from ops.test_tensor_codes import codes_given
from ops.test_tensor_cores import array_of, check, given, make

from tikv import reference
from tikv.ops.attention.families import Form, explain, family_for
from tikv.ops.attention.families.warpgroups import WarpgroupCodes

INT8, E4M3 = np.int8, ml_dtypes.float8_e4m3fn
NAMES = {"int8": INT8, "float8_e4m3fn": E4M3}
LENS = (300, 0, 64, 41)
ROUNDED = 2.0  # two results whose weights are rounded apart differ by sqrt(2) of what rounding costs one of them


def prompt(rng, name, place="linear", **options):
    """A `Case`, and what runs it: K and V are codes, and there are 40 queries for each of 4 heads of a KV head."""
    options = {"queries": 40, "lens": LENS, "capacity": 300, "query_dtype": "float16", **options}
    case, cache = make(rng, place, dtype=name, **options)
    if name == "int8":  # whose numbers meet their weights as halves
        half = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16}[case.query_dtype]
        case.v_real = case.v_real.astype(half).astype(np.float64)
    return case, cache


def in_powers(rng, case, cache):
    """Let scores of a scale of log(2) be whole numbers, so that all weights are powers of two.

    A query has a 7, which becomes the largest code, in a column that K does not have, and four ones of any sign.
    """
    case.q[...] = 0
    for row in case.q.reshape(-1, case.q.shape[-1]):
        row[1 + rng.choice(len(row) - 1, 4, replace=False)] = rng.choice([-1, 1], 4)
    case.q[..., 0] = 7
    for keys in (cache.k, case.k_real):
        keys[...] = np.where(np.isnan(keys.astype(np.float32)), np.nan, np.sign(keys.astype(np.float32)))
        keys[..., 0] = 0
    return {"scale": float(np.log(2))}


def defined(case, name, **options):
    return expected(case, code_dtype=NAMES[name], **options)


def close(case, got, want, exact):
    """Over float8_e4m3fn: `want` is the definition, `exact` the same without rounded weights."""
    seen = np.isfinite(want[1])
    np.testing.assert_array_equal(got[0][~seen], 0)
    assert np.isfinite(got[0]).all()
    np.testing.assert_allclose(got[1], want[1], atol=of_sums(case))
    cost = np.sqrt(np.mean((want[0] - exact[0]) ** 2))
    found = np.sqrt(np.mean((got[0] - want[0]) ** 2))
    assert cost > 0
    assert found <= ROUNDED * cost, f"{found:.2e}, and rounding costs {cost:.2e}"


def of_sums(case):
    """What sums of products may cost a logit: of 32 at a time, each loses what is below 2 ** -13 of the largest."""
    width = case.q.shape[-1]
    largest = np.abs(case.q.astype(np.float64)).max() * np.abs(case.k_real[np.isfinite(case.k_real)]).max()
    return width / 32 * 33 * 2.0**-13 * largest * width**-0.5


def compare(rng, arch, name, place="linear", asked=None, seen=None, **options):
    """Compare a prompt with the definition: `asked` goes to the call, `seen` to both."""
    asked, seen = asked or {}, seen or {}
    case, cache = prompt(rng, name, place, **options)
    got = cache.run(arch, **asked, **seen)
    if name == "int8":
        check(case, got, defined(case, name, **seen))
        return
    close(case, got, defined(case, name, **seen), expected(rounded(case, name), **seen))
    case, cache = prompt(rng, name, place, **options)
    of_powers = in_powers(rng, case, cache)
    got = cache.run(arch, **asked, **seen, **of_powers)
    check(case, got, defined(case, name, **seen, **of_powers), tolerance=2)


def rounded(case, name):
    """The case with queries that have been rounded to codes."""
    other = type(case).__new__(type(case))
    vars(other).update(vars(case))
    other.q = np.zeros(case.q.shape)
    for at in np.ndindex(case.q.shape[:-1]):
        codes, factor = reference.query_codes(case.q[at], NAMES[name])
        other.q[at] = codes.astype(np.float64) * factor
    return other


@on_cuda
@pytest.mark.parametrize("query", ["float16", "bfloat16"])
@pytest.mark.parametrize("width", [64, 96, 128, 256])
@pytest.mark.parametrize("name", NAMES)
def test_widths(arch, rng, eight, name, width, query):
    compare(rng, arch, name, width=width, query_dtype=query)


@on_cuda
@pytest.mark.parametrize("place", ["linear", "NHD", "HND"])
@pytest.mark.parametrize("window", [None, 37])
@pytest.mark.parametrize("name", NAMES)
def test_storages_and_windows(arch, rng, eight, name, place, window):
    compare(rng, arch, name, place, seen={"window": window}, group=7, lens=(530, 0, 77, 41), capacity=530)


@on_cuda
@pytest.mark.parametrize("name", NAMES)
def test_rings(arch, rng, eight, name):
    ring = {"ring": 99, "sinks": 3, "capacity": 99, "lens": (98, 99, 100, 777, 41)}
    case, cache = prompt(rng, name, **ring)
    got = cache.run(arch)
    if name == "int8":
        check(case, got, defined(case, name, window=99))
    else:
        close(case, got, defined(case, name, window=99), expected(rounded(case, name), window=99))


@on_cuda
@pytest.mark.parametrize("page", [1, 3, 48])
@pytest.mark.parametrize("name", NAMES)
def test_page_sizes(arch, rng, eight, name, page):
    compare(rng, arch, name, "NHD", page=page, width=64, lens=(400, 64, 0, 41), capacity=400)


@on_cuda
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("name", NAMES)
def test_splits(arch, rng, eight, name, splits):
    form = {"lens": (1500, 40, 1023), "capacity": 1500, "width": 64}
    compare(rng, arch, name, asked={"num_splits": splits}, **form)


@on_cuda
@pytest.mark.parametrize("width", [64, 128, 256])
@pytest.mark.parametrize("name", NAMES)
def test_sinks_and_windows(arch, rng, eight, name, width):
    case, cache = prompt(rng, name, capacity=700, lens=(700, 290, 86), sinks=4, queries=86, width=width)
    got = cache.run(arch, window=75, sinks=4)
    if name == "int8":
        check(case, got, defined(case, name, window=75))
    else:
        close(case, got, defined(case, name, window=75), expected(rounded(case, name), window=75))


@on_cuda
@pytest.mark.parametrize("place", ["linear", "ring", "NHD"])
@pytest.mark.parametrize("name", NAMES)
def test_terms(arch, rng, eight, name, place):
    """Sink logits, slopes and trees; a soft cap is not linear in what a query's row is multiplied by."""
    form, window = place_of(place)
    form["lens"] = tuple(max(n, 41) for n in form["lens"])
    case, cache = prompt(rng, name, place, **form)
    terms = Terms(rng, case, slopes="head")
    masks, tree = trees(rng, arch, "parents", len(case.lens), 40)
    for given_terms, given_masks, softcap in ((terms, None, None), (None, masks, None), (None, None, 2.5)):
        asked = {**(given_terms.given(arch) if given_terms else {}), **(tree if given_masks is not None else {})}
        got = cache.run(arch, **asked, **({"softcap": softcap} if softcap else {}))
        want = defined(case, name, terms=given_terms, masks=given_masks, softcap=softcap, **window)
        if name == "int8":
            check(case, got, want, tolerance=2)
            continue
        exact = expected(rounded(case, name), given_terms, given_masks, softcap, **window)
        close(case, got, want, exact)


@on_cuda
@pytest.mark.parametrize("place", ["linear", "NHD"])
@pytest.mark.parametrize("name", NAMES)
def test_what_a_query_does_not_see_may_be_nan(arch, rng, eight, name, place):
    """The newest key, which the last query alone sees; int8 has the largest code there, and a scale that is NaN."""
    case, cache = prompt(rng, name, place, lens=(140, 63), capacity=140, spoiled=-1)
    got, want = cache.run(arch, window=29), defined(case, name, window=29)
    assert all(np.isnan(a[:, :, -1]).all() for a in got)
    got, want = ([a[:, :, :-1] for a in both] for both in (got, want))
    if name == "int8":
        check(case, got, want)
    else:
        exact = [a[:, :, :-1] for a in expected(rounded(case, name), window=29)]
        close(case, got, want, exact)


@on_cuda
@pytest.mark.parametrize("name", NAMES)
def test_queries_of_zeros_and_of_no_numbers(arch, rng, eight, name):
    """A row of zeros weighs all keys alike; one with a NaN or an infinity is NaN, and no other."""
    case, cache = prompt(rng, name, lens=(300, 41))
    case.q[:, 0, 0] = 0
    case.q[:, 1, 3, 5], case.q[:, 2, 7, 6] = np.nan, np.inf
    out, lse = cache.run(arch)
    spoiled = np.zeros(out.shape[:3], bool)
    spoiled[:, 1, 3] = spoiled[:, 2, 7] = True
    np.testing.assert_array_equal(np.isnan(out).all(-1), spoiled)
    np.testing.assert_array_equal(np.isnan(out).any(-1), spoiled)
    np.testing.assert_array_equal(np.isnan(lse), spoiled)
    np.testing.assert_allclose(lse[:, 0, 0], np.log([300 - 39, 2]), rtol=1e-5)


@on_cuda
@pytest.mark.parametrize("place", ["linear", "NHD"])
def test_scales_of_floats(arch, rng, eight, place):
    """One of a KV head of K, and one of V."""
    case, cache = prompt(rng, "float8_e4m3fn", place)
    of_powers = in_powers(rng, case, cache)
    scales = {"k_scale": np.float32([1.0, 2.0]), "v_scale": np.float32([3.0, 0.3])}
    got = cache.run(arch, **of_powers, **{side: oracle.place(a, arch) for side, a in scales.items()})
    case.k_real, case.v_real = (
        real * scales[side].astype(np.float64)[:, None, None]
        for side, real in (("k_scale", case.k_real), ("v_scale", case.v_real))
    )
    check(case, got, defined(case, "float8_e4m3fn", **of_powers), tolerance=2)


# --- the definition, and which calls are served


@pytest.mark.archs("cpu")
@pytest.mark.parametrize("name", NAMES)
def test_the_definition_rounds_queries_and_weights_alone(arch, rng, name):
    q, k, v = (rng.standard_normal(shape) for shape in ((64,), (50, 64), (50, 64)))
    k, v = (a.astype(np.float32).astype(E4M3).astype(np.float64) for a in (k, v))
    codes, factor = reference.query_codes(q, NAMES[name])
    assert codes.dtype == NAMES[name]
    assert np.abs(codes.astype(np.float64)).max() == (127 if name == "int8" else 448)
    steps = np.abs(codes.astype(np.float64) * factor - q)
    assert (
        steps <= (factor / 2 if name == "int8" else np.maximum(np.abs(q) * 2.0**-4, factor * 2.0**-10)) + 1e-6
    ).all()
    want, lse = reference.attention(codes.astype(np.float64) * factor, k, v, scale=0.125)
    out, found = reference.attention(q, k, v, scale=0.125, code_dtype=NAMES[name])
    assert found == lse
    if name == "int8":
        np.testing.assert_array_equal(out, want)
    else:
        assert 0 < np.abs(out - want).max() <= 2.0**-4 * np.abs(v).max()


@pytest.mark.archs("cpu")
def test_the_definition_of_a_query_of_zeros(arch):
    for dtype in NAMES.values():
        codes, factor = reference.query_codes(np.zeros(3), dtype)
        assert (codes.astype(np.float64).tolist(), factor) == ([0.0, 0.0, 0.0], 0.0)


@pytest.mark.archs("cpu")
@pytest.mark.parametrize(
    ("name", "form", "why"),
    [
        ("int8", {}, ""),
        ("float8_e4m3fn", {}, ""),
        ("float8_e4m3fn", {"width": 256}, ""),
        ("float8_e5m2", {}, "K and V are float8_e5m2"),
        ("float16", {}, "K and V are float16"),
        ("quant8_64", {}, "K and V are quant8_64"),
        ("int8", {"queries": 31}, "124 query rows"),
        ("int8", {"ptr": 8}, "multiple of 16 bytes"),
        ("int8", {"bits": 16}, "attention_bits=8) is not set"),
    ],
)
def test_which_prompts_are_served(arch, hopper_gpu, monkeypatch, name, form, why):
    monkeypatch.setattr(CUDA, "attention_bits", form.get("bits", 8))
    width = form.get("width", 128)
    arrays, query, cache = given(name, width=width) if name == "float16" else codes_given(name, width=width)
    arrays |= {side: array_of(arrays[side].dtype, form.get("ptr", 0)) for side in "kv"}
    form = Form(CUDA, arrays, query._replace(queries=form.get("queries", 40)), cache, OPTIONS)
    assert why in WarpgroupCodes.why_not(form)
    assert bool(why) == bool(WarpgroupCodes.why_not(form))
    assert family_for(form).eight != bool(why)
    assert f"warpgroups over prompts in 8 bits{f': {WarpgroupCodes.why_not(form)}' if why else ''}" in explain(form)


@pytest.mark.archs("cpu")
def test_keys_of_values_lie_as_weights_do(arch):
    """Of 16 keys in the order of `sm90.ir.values_of_codes`, each lane's four are those of which it has weights."""
    keys = np.arange(64).reshape(2, 4, 8)  # two tiles of 32 keys, of which a lane has two of each 8
    turned = np.array([[8 * m + 2 * lane + e for m in (0, 1) for e in (0, 1)] for lane in range(4)])
    assert sorted(turned.ravel()) == list(range(16))
    for step, half, lane in itertools.product(range(2), range(2), range(4)):
        of_lane = keys[step, 2 * half : 2 * half + 2, 2 * lane : 2 * lane + 2].ravel()
        np.testing.assert_array_equal(of_lane, 32 * step + 16 * half + turned[lane])
