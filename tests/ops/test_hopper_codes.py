"""Attention of prompts over codes by the warpgroups of compute capability 9, against the float64 oracle.

The producers make halves of q's dtype of the numbers that codes stand for, as the docstring of `decode_attention` says.
So the oracle attends over the numbers rounded in this way, and the bounds are those of float16 and bfloat16.
"""

import ml_dtypes
import numpy as np
import oracle
import pytest
from ops.test_attention_terms import Terms
from ops.test_hopper import CUDA, OPTIONS, expected, on_cuda, place_of, trees
from ops.test_tensor_codes import Coded, codes_given
from ops.test_tensor_cores import check, given

import tikv
from tikv.ops.attention.families import Form, family_for
from tikv.ops.attention.families.warpgroups import WarpgroupPrompts

FLOATS = ["float8_e4m3fn", "float8_e5m2"]
FORMATS = [
    "int8", *FLOATS, "quant8_64", "quant4_64", "q8_0", "q4_0", "quant8_32", "quant4_32", "quant8_128", "quant4_128",
]  # fmt: skip
SOME = ["int8", "float8_e4m3fn", "quant8_32", "quant4_64", "q8_0", "q4_0"]
LENS = (300, 0, 64, 41)
HALF = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


class Prompt(Coded):
    """A `Case` or `Pages` whose K and V are codes, with 40 queries for each of 4 heads of a KV head."""

    def __init__(self, rng, arch, name, place="linear", *, query="float16", **options):
        options = {"queries": 40, "lens": LENS, "capacity": 300, **options}
        super().__init__(rng, arch, name, place, query=query, **options)
        for side in "kv":
            self.stands_for(side, getattr(self.case, f"{side}_real"))

    def stands_for(self, side, numbers):
        """Let these be the numbers of K or V, which products have as halves of q's dtype."""
        rounded = numbers.astype(np.float32).astype(HALF[self.case.query_dtype])
        setattr(self.case, f"{side}_real", rounded.astype(np.float64))


def attend(rng, arch, monkeypatch, name, place="linear", seen=None, asked=None, tolerance=1.0, **options):
    """Compare with the oracle: `asked` goes to the call, `seen` to both."""
    prompt = Prompt(rng, arch, name, place, **options)
    with monkeypatch.context() as patch:
        got = prompt.run(arch, patch, **(seen or {}), **(asked or {}))
    check(prompt.case, got, prompt.case.expected(**(seen or {})), tolerance)


@on_cuda
@pytest.mark.parametrize("query", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", FORMATS)
def test_formats(arch, rng, warpgroups, monkeypatch, name, query):
    attend(rng, arch, monkeypatch, name, query=query)


@on_cuda
@pytest.mark.parametrize(
    ("place", "name"),
    [*((place, name) for place in ("ring", "NHD") for name in SOME), *(("HND", name) for name in ("int8", *FLOATS))],
)  # a `Quantized` has no other layout
def test_storages(arch, rng, warpgroups, monkeypatch, place, name):
    if place == "ring":
        lens = (98, 99, 100, 777, 41)
        prompt = Prompt(rng, arch, name, lens=lens, ring=99, sinks=3, capacity=99)
        check(prompt.case, prompt.run(arch, monkeypatch), prompt.case.expected(window=99))
        return
    for window in (None, 37):
        attend(rng, arch, monkeypatch, name, place, {"window": window})


@on_cuda
@pytest.mark.parametrize("name", ["int8", "float8_e5m2", "quant8_64", "quant4_32", "q8_0", "q4_0"])
def test_heads_of_64_columns(arch, rng, warpgroups, monkeypatch, name):
    attend(rng, arch, monkeypatch, name, "NHD", width=64, group=7, lens=(530, 40, 77))


@on_cuda
@pytest.mark.parametrize(
    ("name", "width"),
    [(name, width) for name in FORMATS for width in (96, 256) if width == 256 or not name.endswith(("_64", "_128"))],
)  # groups of 64 and 128 do not divide 96 columns
def test_heads_of_96_and_256_columns(arch, rng, warpgroups, monkeypatch, width, name):
    """The second panel of 96 columns is half empty; of 256, a warp has 32 of 64 keys."""
    attend(rng, arch, monkeypatch, name, width=width)
    other = {"query": "bfloat16", "group": 7, "lens": (530, 40, 77)}
    attend(rng, arch, monkeypatch, name, "NHD", {"window": 37}, width=width, **other)


@on_cuda
@pytest.mark.parametrize("name", ["int8", "q4_0"])
@pytest.mark.parametrize("page", [1, 3, 48])
def test_page_sizes(arch, rng, warpgroups, monkeypatch, name, page):
    for window in (None, 5, 170):
        attend(rng, arch, monkeypatch, name, "NHD", {"window": window}, page=page, width=64, lens=(400, 64, 0, 41))


@on_cuda
@pytest.mark.parametrize("name", ["int8", "float8_e4m3fn", "quant4_64"])
@pytest.mark.parametrize("splits", [1, 3, 8])
def test_splits(arch, rng, warpgroups, monkeypatch, name, splits):
    """Of which some have no keys."""
    form = {"lens": (1500, 40, 0, 1023), "capacity": 1500, "width": 64}
    attend(rng, arch, monkeypatch, name, "linear", {"window": 500}, {"num_splits": splits}, **form)


@on_cuda
@pytest.mark.parametrize("name", ["int8", "quant8_32"])
def test_options_of_the_softmax(arch, rng, warpgroups, monkeypatch, name):
    form = {"lens": (140, 41), "capacity": 140}
    attend(rng, arch, monkeypatch, name, "linear", {"scale": 1.3, "softcap": 2.5}, tolerance=2, **form)
    attend(rng, arch, monkeypatch, name, "linear", {"causal": False}, **form)
    attend(rng, arch, monkeypatch, name, "NHD", {"softcap": 2.5, "window": 60}, query="bfloat16", tolerance=2, **form)


@on_cuda
@pytest.mark.parametrize("sinks", [4, 130])
def test_sinks_and_windows(arch, rng, warpgroups, monkeypatch, sinks):
    prompt = Prompt(rng, arch, "int8", capacity=900, lens=(900, 290, 86), sinks=sinks, queries=86)
    got = prompt.run(arch, monkeypatch, window=sinks + 71, sinks=sinks)
    check(prompt.case, got, prompt.case.expected(window=sinks + 71))


@on_cuda
@pytest.mark.parametrize("query", ["float16", "bfloat16"])
def test_int8_with_scales_of_float32(arch, rng, warpgroups, monkeypatch, query):
    prompt = Prompt(rng, arch, "int8", query=query)
    for side in "kv":
        scale = getattr(prompt.cache, f"{side}_scale")
        setattr(prompt.cache, f"{side}_scale", scale.astype(np.float32))
    check(prompt.case, prompt.run(arch, monkeypatch), prompt.case.expected())


@on_cuda
@pytest.mark.parametrize("query", ["float16", "bfloat16"])
def test_groups_with_scales_of_float32(arch, rng, warpgroups, monkeypatch, query):
    prompt = Prompt(rng, arch, "quant4_64", query=query)
    for side in "kv":
        rows = getattr(prompt.case, f"{side}_real").astype(np.float16)
        coded = tikv.quantize(oracle.place(rows, arch), "quant4_64", scale_dtype="float32")
        setattr(prompt.cache, side, coded)
        prompt.stands_for(side, oracle.to_numpy(tikv.dequantize(coded)))
    check(prompt.case, prompt.run(arch, monkeypatch), prompt.case.expected())


@on_cuda
@pytest.mark.parametrize("query", ["float16", "bfloat16"])
@pytest.mark.parametrize("dtype", [np.float16, np.float32])
@pytest.mark.parametrize("name", FLOATS)
def test_floats_with_scales(arch, rng, warpgroups, monkeypatch, name, dtype, query):
    """One for each KV head."""
    prompt = Prompt(rng, arch, name, "NHD", query=query)
    scales = {side: rng.uniform(0.25, 2, 2).astype(dtype) for side in "kv"}
    for side, scale in scales.items():
        real = getattr(prompt.case, f"{side}_real")
        prompt.stands_for(side, real * scale.astype(np.float64)[:, None, None])
    given = {f"{side}_scale": oracle.place(scale, arch) for side, scale in scales.items()}
    check(prompt.case, prompt.run(arch, monkeypatch, **given), prompt.case.expected())


@on_cuda
@pytest.mark.parametrize("query", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", FORMATS)
def test_a_query_that_sees_one_key_gets_its_numbers(arch, rng, warpgroups, monkeypatch, name, query):
    """Rounded to halves, and each in its column."""
    prompt = Prompt(rng, arch, name, query=query, lens=(300,))
    out, _ = prompt.run(arch, monkeypatch, window=1)
    numbers = prompt.case.v_real[0, :, 260:]
    np.testing.assert_array_equal(out[0].reshape(2, 4, 40, 128), np.repeat(numbers[:, None], 4, axis=1))


@on_cuda
@pytest.mark.parametrize("query", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", FLOATS)
def test_every_float_of_8_bits(arch, rng, warpgroups, monkeypatch, name, query):
    """Infinities and NaNs, too."""
    prompt = Prompt(rng, arch, name, query=query, lens=(300,))
    cache = prompt.cache
    cache.v[0, :, 260:] = np.arange(2 * 40 * 128).astype(np.uint8).reshape(2, 40, 128).view(cache.v.dtype)
    out, _ = prompt.run(arch, monkeypatch, window=1)
    want = cache.v[0, :, 260:].astype(np.float32).astype(np.float64)
    np.testing.assert_array_equal(out[0].reshape(2, 4, 40, 128), np.repeat(want[:, None], 4, axis=1))


@on_cuda
@pytest.mark.parametrize("name", SOME)
@pytest.mark.parametrize("place", ["linear", "NHD"])
def test_what_nobody_sees_may_be_nan(arch, rng, warpgroups, monkeypatch, name, place):
    options = {} if name in ("int8", *FLOATS) else {"spoil": True}
    attend(rng, arch, monkeypatch, name, place, lens=(139, 63, 47), **options)
    attend(rng, arch, monkeypatch, name, place, {"causal": False}, lens=(139, 63, 47), **options)


@on_cuda
@pytest.mark.parametrize("name", ["int8", *FLOATS])
@pytest.mark.parametrize("place", ["linear", "NHD"])
def test_what_a_query_does_not_see_may_be_nan(arch, rng, warpgroups, monkeypatch, name, place):
    """The newest key, which the last query alone sees: to it all is NaN, to the others nothing."""
    prompt = Prompt(rng, arch, name, place, lens=(140, 63), capacity=140)
    cache = prompt.cache
    spoiled = [cache.k_scale, cache.v_scale] if name == "int8" else [cache.k, cache.v]
    for b, length in enumerate((140, 63)):
        for array in spoiled:
            if place == "linear":
                array[b, :, length - 1] = np.nan
            else:
                array[cache.table[b, (length - 1) // 16], (length - 1) % 16] = np.nan
    got, want = prompt.run(arch, monkeypatch, window=29), prompt.case.expected(window=29)
    check(prompt.case, [a[:, :, :-1] for a in got], [a[:, :, :-1] for a in want])
    assert all(np.isnan(a[:, :, -1]).all() for a in got)


@on_cuda
@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize("column", [0, 127])
def test_infinities_and_nans_of_values_count_for_those_who_see_them(arch, rng, warpgroups, monkeypatch, column, splits):
    prompt = Prompt(rng, arch, "float8_e5m2", "NHD", lens=(300,))
    cache = prompt.cache
    spoiled = {275: np.inf, 280: -np.inf, 290: np.nan, 10: -np.inf}
    for at, value in spoiled.items():
        cache.v[cache.table[0, at // 16], at % 16, :, column] = value
    out = prompt.run(arch, monkeypatch, num_splits=splits)[0]
    assert np.isfinite(np.delete(out, column, axis=-1)).all()
    for t in range(40):
        with np.errstate(invalid="ignore"):
            want = sum(value for at, value in spoiled.items() if at <= 260 + t)
        np.testing.assert_array_equal(out[:, :, t, column], want)


@on_cuda
@pytest.mark.parametrize("name", ["int8", "float8_e4m3fn", "quant4_64"])
def test_pages_that_do_not_exist_are_seen_by_nobody(arch, rng, warpgroups, monkeypatch, device_knows, name):
    """Where the device alone knows the table."""
    prompt = Prompt(rng, arch, name, "NHD", lens=(41, 47))
    cache, case = prompt.cache, prompt.case
    cache.table = cache.table[:, :3].copy()
    cache.table[0, 2], cache.table[1, 2] = 2**20, -(2**31)
    out, lse = prompt.run(arch, monkeypatch)
    for b, length in enumerate((41, 47)):
        for h in range(8):
            for t in (0, 17, 39):
                keys = min(32, length - 39 + t)
                seen = (a[b, h // 4, :keys] for a in (case.k_real, case.v_real))
                want, want_lse = tikv.reference.attention(case.q[b, h, t], *seen, scale=128**-0.5)
                np.testing.assert_allclose(out[b, h, t], want, atol=4e-3)
                np.testing.assert_allclose(lse[b, h, t], want_lse, atol=1e-3)


# --- terms


@on_cuda
@pytest.mark.parametrize("place", ["linear", "ring", "NHD"])
@pytest.mark.parametrize(
    ("name", "width", "slopes"),
    [("int8", 128, None), ("float8_e4m3fn", 64, "head"), ("quant4_32", 96, "sequence"), ("q4_0", 256, "head")],
)
def test_sink_logits_and_slopes(arch, rng, warpgroups, monkeypatch, place, name, width, slopes):
    form, window = place_of(place, width=width)
    prompt = Prompt(rng, arch, name, place, **form)
    terms = Terms(rng, prompt.case, slopes=slopes)
    want = expected(prompt.case, terms, **window)
    for splits in (1, 3):
        with monkeypatch.context() as patch:
            got = prompt.run(arch, patch, num_splits=splits, **terms.given(arch))
        check(prompt.case, got, want)


@on_cuda
@pytest.mark.parametrize(("name", "width"), [("int8", 96), ("quant8_32", 256), ("quant4_32", 128), ("q8_0", 64)])
@pytest.mark.parametrize("query", ["float16", "bfloat16"])
def test_terms_with_windows_sinks_and_a_soft_cap(arch, rng, warpgroups, monkeypatch, name, width, query):
    options = {"lens": (700, 90), "capacity": 700, "sinks": 4, "queries": 86}
    prompt = Prompt(rng, arch, name, query=query, width=width, **options)
    terms = Terms(rng, prompt.case, slopes="head")
    got = prompt.run(arch, monkeypatch, window=75, sinks=4, softcap=2.5, **terms.given(arch))
    check(prompt.case, got, expected(prompt.case, terms, softcap=2.5, window=75), tolerance=2)


@on_cuda
@pytest.mark.parametrize("place", ["linear", "ring", "NHD"])
@pytest.mark.parametrize(
    ("form", "name", "width", "slopes"),
    [
        ("parents", "int8", 128, None),
        ("mask", "quant4_64", 64, "head"),
        ("bits", "float8_e5m2", 128, "head"),
        ("parents", "q8_0", 96, "sequence"),
        ("mask", "int8", 256, None),
        ("bits", "quant8_32", 128, "sequence"),
    ],
)
def test_masks_and_trees(arch, rng, warpgroups, monkeypatch, place, form, name, width, slopes):
    options, window = place_of(place, width=width)
    if place != "ring":
        options["lens"] = (300, 64, 41, 40)
    prompt = Prompt(rng, arch, name, place, **options)
    masks, given = trees(rng, arch, form, len(options["lens"]), 40)
    terms = Terms(rng, prompt.case, sinks=False, slopes=slopes) if slopes else None
    want = expected(prompt.case, terms, masks, **window)
    for splits in (1, 3):
        with monkeypatch.context() as patch:
            got = prompt.run(arch, patch, num_splits=splits, **given, **(terms.given(arch) if terms else {}))
        check(prompt.case, got, want)


@on_cuda
@pytest.mark.parametrize(("name", "width"), [("int8", 128), ("quant4_32", 64), ("q4_0", 96), ("float8_e4m3fn", 256)])
@pytest.mark.parametrize("window", [15, 60])
def test_trees_whose_branches_are_longer_than_a_window(arch, rng, warpgroups, monkeypatch, window, name, width):
    """Or shorter; behind a soft cap without slopes."""
    options = {"lens": (400, 150, 131), "capacity": 400, "sinks": 3, "queries": 130}
    prompt = Prompt(rng, arch, name, width=width, **options)
    masks, given = trees(rng, arch, "parents", 3, 130)
    terms = Terms(rng, prompt.case, slopes="sequence" if window == 15 else None)
    softcap = None if window == 15 else 2.5
    got = prompt.run(arch, monkeypatch, window=window, sinks=3, softcap=softcap, **given, **terms.given(arch))
    check(prompt.case, got, expected(prompt.case, terms, masks, softcap=softcap, window=window), tolerance=2)


# --- without a GPU


@pytest.mark.archs("cpu")
@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"name": "int8"}, ""),
        ({"name": "int8", "scale": "float32", "width": 64}, ""),
        ({"name": "int8", "width": 256}, ""),
        ({"name": "quant4_64", "q_dtype": "bfloat16"}, ""),
        ({"name": "q4_0", "width": 64, "scale": "float16"}, ""),
        ({"name": "quant8_64", "scale": "float32"}, ""),
        ({"name": "quant4_64", "q_dtype": "float32"}, "q is float32, over codes"),
        ({"name": "quant3_64"}, "K and V are quant3_64"),
        ({"name": "mxfp8"}, "K and V are mxfp8"),
        ({"name": "q4_0", "width": 96}, ""),
        ({"name": "int8", "width": 160}, "160 and 160 wide"),
        ({"name": "int8", "width": 128, "width_v": 64}, "128 and 64 wide"),
    ],
)
def test_what_warpgroups_leave_to_other_kernels(arch, hopper_gpu, options, why):
    arrays, query, cache = codes_given(**options)
    form = Form(CUDA, arrays, query._replace(queries=40), cache, OPTIONS)
    found = WarpgroupPrompts.why_not(form)
    assert why in found
    assert bool(why) == bool(found)
    assert family_for(form).in_warpgroups != bool(why)


@pytest.mark.archs("cpu")
@pytest.mark.parametrize(
    ("form", "why"),
    [({}, ""), ({"ptr": 8}, "multiple of 16 bytes"), ({"terms": ["alibi_slopes", "mask", "sink_logits"]}, "")],
)
def test_8_bit_floats_without_scales(arch, hopper_gpu, form, why):
    arrays, query, cache = given("float8_e4m3fn", "bfloat16", queries=40, **form)
    found = WarpgroupPrompts.why_not(Form(CUDA, arrays, query, cache, OPTIONS))
    assert why in found
    assert bool(found) == bool(why)


@pytest.mark.archs("cpu")
def test_registers_are_those_of_the_launch(arch):
    """A warpgroup would wait forever for more."""
    from tikv.kernels.attention.sm90 import ir

    for producers, consumers, first, producer, consumer in ir.REGISTERS:
        assert producers * producer + consumers * consumer == (producers + consumers) * first
        assert (producers + consumers) * first * 128 <= 65536
        assert producer % 8 == consumer % 8 == 0
