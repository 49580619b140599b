"""Attention by CUDA's tensor cores, against the float64 oracle; and what they leave to the other kernels.

Weights are rounded to the dtype of K and V before they meet V, beside the rounding of the result.
"""

import pathlib
import shutil
import subprocess
import types

import numpy as np
import oracle
import pytest
from invariance import invariant
from ops.test_attention import Case, Pages
from ops.test_chosen import choose, expected, spoil

import tikv
from tikv import arrays, dtypes, engines, launch
from tikv.arrays import ArrayView
from tikv.formats import FORMATS
from tikv.launch.cuda import keys
from tikv.ops.attention import options
from tikv.ops.attention.families import Form, family_for
from tikv.ops.attention.families.tensor_cores import TensorCodes, TensorRows, why_no_mass_in_tiles
from tikv.ops.layouts import Rows

on_cuda = pytest.mark.archs("cuda")
TERMS = ("sink_logits", "alibi_slopes")
TOLERANCE = {"float16": 2.0**-10, "bfloat16": 2.0**-7}  # of the result, relative to its largest number


def check(case, got, want, tolerance=1.0):
    (out, lse), (want_out, want_lse) = got, want
    seen = np.isfinite(want_lse)
    np.testing.assert_array_equal(out[~seen], 0)
    np.testing.assert_array_equal(lse[~seen], want_lse[~seen])
    assert np.isfinite(out).all()
    error = np.abs(out - want_out).max() / max(1.0, np.abs(want_out).max())
    assert error <= tolerance * TOLERANCE[case.query_dtype], f"out: {error:.2e}"
    error = np.abs(lse[seen] - want_lse[seen]).max(initial=0) / max(1.0, np.abs(want_lse[seen]).max(initial=0))
    assert error <= 2e-5, f"lse: {error:.2e}"


def make(rng, place="linear", *, dtype="float16", width=128, group=4, page=16, **options):
    """A `Case` or `Pages` whose queries are of the dtype of K and V."""
    options = {"dtype": dtype, "query_dtype": dtype, "width": width, "group": group, **options}
    if place in ("NHD", "HND", "VLLM"):
        options.pop("capacity", None)
        pages = Pages(rng, layout=place, page=page, **options)
        return pages.case, pages
    case = Case(rng, **options)
    return case, case


def attend(rng, arch, place="linear", seen=None, asked=None, tolerance=1.0, **options):
    """Compare with the oracle: `asked` goes to the call, `seen` to both."""
    case, cache = make(rng, place, **options)
    got = cache.run(arch, **(seen or {}), **(asked or {}))
    check(case, got, case.expected(**(seen or {})), tolerance)


LENS = (300, 1, 0, 64, 17)


@on_cuda
@pytest.mark.parametrize("group", [1, 2, 5, 8, 12, 16, 20])
def test_groups(arch, rng, tiles, group):
    attend(rng, arch, group=group, capacity=300, lens=LENS)


@on_cuda
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("place", ["linear", "ring", "NHD", "HND"])
@pytest.mark.parametrize("queries", [None, 3, 40])
def test_storages_and_queries(arch, rng, tiles, place, dtype, queries):
    """Where a KV head has 4, 12 and 160 query rows: a warp has one tile of rows, or two, or a block has eight."""
    if place == "ring":
        lens = (98, 99, 100, 777, 41)
        ring = {"ring": 99, "sinks": 3, "capacity": 99}
        case, _ = make(rng, dtype=dtype, queries=queries, lens=lens, **ring)
        check(case, case.run(arch), case.expected(window=99))
        return
    lens = LENS if queries is None else (300, 0, 64, 41)
    for window in (None, 37):
        attend(rng, arch, place, {"window": window}, dtype=dtype, queries=queries, lens=lens, capacity=300)


@on_cuda
@pytest.mark.parametrize(
    ("width", "width_v"), [(64, 64), (96, 96), (64, 128), (128, 64), (160, 96), (192, 128), (256, 256), (224, 224)]
)
@pytest.mark.parametrize("queries", [None, 9])
def test_widths(arch, rng, tiles, width, width_v, queries):
    attend(rng, arch, width=width, width_v=width_v, queries=queries, lens=(130, 20), capacity=130)


@on_cuda
@pytest.mark.parametrize("page", [1, 3, 8, 16, 48, 64])
def test_page_sizes(arch, rng, tiles, page):
    """Pages of 16 tokens and more are looked up once for 16 keys, which begin where a window does not."""
    for window in (None, 5, 70):
        attend(rng, arch, "NHD", {"window": window}, page=page, width=64, lens=(200, 64, 0, 33))


@on_cuda
def test_pages_of_vllm_have_keys_in_pieces_and_values_by_column(arch, rng):
    """Which the other kernels read."""
    attend(rng, arch, "VLLM", width=64, lens=(70, 5))


@on_cuda
@pytest.mark.parametrize("splits", [1, 2, 3, 8, 32])
@pytest.mark.parametrize("place", ["linear", "NHD"])
def test_splits(arch, rng, tiles, place, splits):
    for queries in (None, 33):
        lens = (700, 33, 0, 699)
        asked = {"num_splits": splits}
        attend(rng, arch, place, {"window": 300}, asked, lens=lens, capacity=700, queries=queries, width=64)


@on_cuda
def test_options_of_the_softmax(arch, rng, tiles):
    attend(rng, arch, seen={"scale": 0.4}, lens=(40, 11))
    attend(rng, arch, seen={"scale": 1.3, "softcap": 2.5}, lens=(40, 11), tolerance=2)
    attend(rng, arch, seen={"causal": False}, queries=3, lens=(40, 11))
    case, _ = make(rng, lens=(40, 0))
    out, lse = case.run(arch, lse_base2=True)
    check(case, (out, lse * np.log(2)), case.expected())


@on_cuda
def test_sinks_of_a_linear_cache(arch, rng, tiles):
    for queries in (None, 6):
        case, _ = make(rng, capacity=200, lens=(200, 90, 6), sinks=20, queries=queries)
        check(case, case.run(arch, window=31, sinks=20), case.expected(window=31))


@on_cuda
def test_kv_heads_of_different_lengths(arch, rng, tiles):
    case, _ = make(rng, capacity=300, lens=(300, 300))
    lens = np.array([[300, 17], [0, 64]])
    got = case.run(arch, lens=lens)
    for b in range(2):
        for h in range(2):
            one, _ = make(rng, capacity=300, heads=1, lens=(int(lens[b, h]),))
            one.q = case.q[b : b + 1, h * 4 : h * 4 + 4]
            one.k_real, one.v_real = case.k_real[b : b + 1, h : h + 1], case.v_real[b : b + 1, h : h + 1]
            check(case, [a[b : b + 1, h * 4 : h * 4 + 4] for a in got], one.expected())


@on_cuda
@pytest.mark.parametrize("queries", [None, 9])
def test_the_mass_of_what_the_tensor_cores_attend_to(arch, rng, tiles, queries):
    """Its kernel has other tasks."""
    case, _ = make(rng, lens=(40, 11), queries=queries)
    arrays = [oracle.place(a, arch) for a in (case.q, case.k, case.v)]
    lens = oracle.place(np.array(case.lens, np.int32), arch)
    out, lse, mass = map(oracle.to_numpy, tikv.decode_attention(*arrays, lens, return_lse=True, return_mass=True))
    check(case, (out.astype(np.float64), lse.astype(np.float64)), case.expected())
    np.testing.assert_allclose(mass.sum(-1), 4 * (queries or 1), rtol=1e-3)


@on_cuda
def test_what_is_left_to_the_other_kernels(arch, rng):
    """Sink logits, and heads of a width that no product has."""
    case, _ = make(rng, lens=(40, 11))
    arrays = [oracle.place(a, arch) for a in (case.q, case.k, case.v)]
    lens = oracle.place(np.array(case.lens, np.int32), arch)
    sinks = oracle.place(np.full(8, -1e4, np.float32), arch)
    out, lse = map(oracle.to_numpy, tikv.decode_attention(*arrays, lens, return_lse=True, sink_logits=sinks))
    check(case, (out.astype(np.float64), lse.astype(np.float64)), case.expected())
    attend(rng, arch, width=80, lens=(40, 11))


@on_cuda
@pytest.mark.parametrize("place", ["linear", "NHD"])
@pytest.mark.parametrize("spoiled", [-1, -10])
def test_what_a_query_does_not_see_may_be_nan(arch, rng, tiles, place, spoiled):
    """Of two queries, one sees the newest token, the other one more behind the window: each is NaN to the other."""
    case, cache = make(rng, place, queries=2, lens=(40, 23), spoiled=spoiled)
    got, want, query = cache.run(arch, window=9), case.expected(window=9), 0 if spoiled == -1 else 1
    check(case, [a[:, :, query] for a in got], [a[:, :, query] for a in want])


@on_cuda
def test_an_infinity_that_is_seen_stays_one(arch, rng, tiles):
    cache = make(rng, "NHD", lens=(8, 13))[1]
    for b, length in enumerate((8, 13)):
        cache.v[cache.table[b, 0], length - 1, :, 3] = np.inf
    out = cache.run(arch)[0]
    assert (out[..., 3] == np.inf).all()
    assert np.isfinite(np.delete(out, 3, axis=-1)).all()


@on_cuda
@pytest.mark.parametrize("place", ["linear", "NHD"])
def test_lengths_and_tables_that_only_the_device_knows_are_bounded(arch, rng, device_knows, tiles, place):
    case, cache = make(rng, place, **({"guard": 3} if place == "linear" else {}), lens=(40, 40, 40))
    lens, case.lens = (2**31 - 1, -5, 41), (40, 0, 40)
    if place == "NHD":
        cache.table = cache.table[:, :3].copy()
        cache.table[0, 2], cache.table[2, 2] = len(cache.k), -(2**31)
        case.lens = (32, 0, 32)
    check(case, cache.run(arch, lens=lens), case.expected())


@on_cuda
@pytest.mark.parametrize("place", ["linear", "ring", "NHD"])
@pytest.mark.parametrize("queries", [None, 3, 40])
def test_under_invariant(arch, rng, tiles, place, queries):
    """Blocks that exchange logits, for one tile of rows and for two, and a block whose warps have rows of their own."""
    with invariant(64):
        if place == "ring":
            case, _ = make(rng, queries=queries, lens=(98, 777, 41), ring=99, sinks=3, capacity=99)
            check(case, case.run(arch), case.expected(window=99))
        else:
            for window in (None, 37):
                attend(rng, arch, place, {"window": window}, queries=queries, lens=(300, 0, 64, 41), capacity=300)
    assert launch.launcher_report(arrays.runtime_of())["fallbacks"] == {}


@on_cuda
@pytest.mark.parametrize("queries", [None, 40])
def test_options_under_invariant(arch, rng, tiles, queries):
    form = {"dtype": "bfloat16", "queries": queries, "lens": (300, 0, 64, 41), "capacity": 300}
    with invariant(64):
        attend(rng, arch, "NHD", {"softcap": 5.0}, tolerance=2, **form)
        attend(rng, arch, "NHD", {"causal": False}, **form)
        attend_chosen(rng, arch, "NHD", **form)
    assert launch.launcher_report(arrays.runtime_of())["fallbacks"] == {}


@on_cuda
@pytest.mark.parametrize(
    ("width", "width_v", "queries"),
    [
        *((w, v, None) for w, v in ((64, 64), (96, 96), (64, 128), (192, 192), (256, 256), (576, 512))),
        *((w, v, 9) for w, v in ((256, 256), (576, 512))),
    ],
)
def test_widths_under_invariant(arch, rng, tiles, width, width_v, queries):
    with invariant(64):
        attend(rng, arch, width=width, width_v=width_v, queries=queries, lens=(130, 20), capacity=130)
    assert launch.launcher_report(arrays.runtime_of())["fallbacks"] == {}


@on_cuda
@pytest.mark.parametrize("steep", [1.0, 4.0, 40.0])
def test_maxima_that_grow_along_a_sequence(arch, rng, tiles, steep):
    case, _ = make(rng, width=64, lens=(700,), capacity=700)
    case.k[...] = case.k + (steep * np.linspace(-1, 1, 700))[:, None].astype(np.float16)
    case.k_real, case.q = case.k.astype(np.float64), np.abs(case.q)
    check(case, case.run(arch, num_splits=1), case.expected(), tolerance=2)


@on_cuda
def test_views_that_start_inside_an_array_and_queries_with_strides(arch, rng, tiles):
    case, _ = make(rng, guard=4, lens=(40, 3))
    q = oracle.to_torch(np.repeat(case.q, 2, axis=1), arch)[:, ::2]
    k, v = (oracle.to_torch(a, arch) for a in (case.k, case.v))
    lens = oracle.to_torch(np.array([40, 3], np.int32), arch)
    got = tikv.decode_attention(q, k, v, lens, return_lse=True)
    check(case, [oracle.to_numpy(a).astype(np.float64) for a in got], case.expected())


@on_cuda
def test_the_longest_kernel_is_one_function(arch, rng, tiles):
    options = {"window": 60, "softcap": 5.0}
    attend(rng, arch, "NHD", options, dtype="bfloat16", width=256, lens=(150, 9), queries=4, tolerance=2)
    assert launch.launcher_report(arrays.runtime_of())["fallbacks"] == {}


# --- heads whose columns the warps of a block share out


@on_cuda
@pytest.mark.parametrize(("width", "width_v"), [(576, 512), (512, 512), (320, 256), (320, 128), (64, 512)])
@pytest.mark.parametrize(("group", "queries"), [(1, None), (16, None), (20, None), (5, 3)])
def test_wide_heads(arch, rng, tiles, width, width_v, group, queries):
    form = {"width": width, "width_v": width_v, "group": group, "queries": queries}
    attend(rng, arch, lens=(130, 20, 0), capacity=130, **form)
    assert {tile.shared_out for tile in tiles} == {"columns"}


@on_cuda
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("place", ["linear", "ring", "NHD", "HND"])
@pytest.mark.parametrize("queries", [None, 3])
def test_storages_of_wide_heads(arch, rng, tiles, place, dtype, queries):
    wide = {"width": 576, "width_v": 512, "group": 16, "heads": 1, "queries": queries, "dtype": dtype}
    if place == "ring":
        case, _ = make(rng, lens=(98, 100, 777, 41), ring=99, sinks=3, capacity=99, **wide)
        check(case, case.run(arch), case.expected(window=99))
        return
    for window in (None, 37):
        attend(rng, arch, place, {"window": window}, lens=(300, 0, 64, 41), capacity=300, **wide)


@on_cuda
@pytest.mark.parametrize("place", ["linear", "NHD"])
@pytest.mark.parametrize("splits", [1, 3, 16])
def test_splits_of_wide_heads(arch, rng, tiles, place, splits):
    wide = {"width": 576, "width_v": 512, "group": 16, "heads": 1}
    attend(rng, arch, place, {"window": 300}, {"num_splits": splits}, lens=(700, 33, 0, 699), capacity=700, **wide)


@on_cuda
@pytest.mark.parametrize("place", ["linear", "NHD"])
@pytest.mark.parametrize("spoiled", [-1, -10])
def test_what_a_query_of_wide_heads_does_not_see_may_be_nan(arch, rng, tiles, place, spoiled):
    wide = {"width": 576, "width_v": 512, "group": 16, "heads": 1}
    case, cache = make(rng, place, queries=2, lens=(40, 23), spoiled=spoiled, **wide)
    got, want, query = cache.run(arch, window=9), case.expected(window=9), 0 if spoiled == -1 else 1
    check(case, [a[:, :, query] for a in got], [a[:, :, query] for a in want])


@on_cuda
@pytest.mark.parametrize("group", [16, 128])
def test_values_may_be_columns_of_the_keys(arch, rng, tiles, group):
    case, _ = make(rng, width=576, width_v=512, heads=1, group=group, lens=(300, 17), capacity=300)
    case.v_real = case.k_real[..., :512]
    q, k, lens = (oracle.place(a, arch) for a in (case.q, case.k, np.array(case.lens, np.int32)))
    got = tikv.decode_attention(q, k, None, lens, head_dim_v=512, return_lse=True)
    check(case, [oracle.to_numpy(a).astype(np.float64) for a in got], case.expected())


@on_cuda
def test_the_longest_kernel_of_wide_heads_is_one_function(arch, rng, tiles):
    wide = {"width": 576, "width_v": 512, "group": 16, "heads": 1, "dtype": "bfloat16", "queries": 4}
    attend(rng, arch, "NHD", {"window": 60, "softcap": 5.0}, lens=(150, 9), tolerance=2, **wide)
    attend(rng, arch, "NHD", {"window": 60}, lens=(150, 9), page=8, **wide)
    assert [tile.row_tiles for tile in tiles] == [1, 1]
    assert launch.launcher_report(arrays.runtime_of())["fallbacks"] == {}


def attend_chosen(rng, arch, place="linear", *, k=70, by_head=False, seen=None, asked=None, index=np.int64, **options):
    """Compare attention over chosen tokens with the oracle; in a linear cache all others are NaN."""
    case, cache = make(rng, place, **options)
    indices = choose(rng, case, k, by_head=by_head, dtype=index)
    if place == "linear" and "ring" not in options:
        spoil(case, indices)
    got = cache.run(arch, indices=oracle.place(indices, arch), **(seen or {}), **(asked or {}))
    check(case, got, expected(case, indices, **(seen or {}))[:2], 2.0 if seen else 1.0)


@on_cuda
@pytest.mark.parametrize("group", [1, 4, 7, 12, 16, 64])
@pytest.mark.parametrize("queries", [None, 3])
def test_chosen_tokens_of_groups(arch, rng, tiles, group, queries):
    """The rows of a task are of one query: those behind them in a tile are not stored."""
    lens = (300, 1, 0, 64, 17) if queries is None else (300, 0, 64)
    attend_chosen(rng, arch, group=group, queries=queries, capacity=300, lens=lens)
    assert None not in tiles


@on_cuda
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("place", ["linear", "ring", "NHD", "HND"])
@pytest.mark.parametrize("by_head", [False, True])
def test_chosen_tokens_of_storages(arch, rng, tiles, place, dtype, by_head):
    if place == "ring":
        case, _ = make(rng, dtype=dtype, queries=3, lens=(98, 99, 777), ring=99, sinks=3, capacity=99)
        indices = choose(rng, case, 90, by_head=by_head)
        got = case.run(arch, indices=oracle.place(indices, arch))
        check(case, got, expected(case, indices, window=99)[:2])
        return
    for page in (3, 16):
        attend_chosen(rng, arch, place, dtype=dtype, by_head=by_head, lens=(300, 0, 64), capacity=300, page=page,
                      queries=2, index=np.int32)  # fmt: skip
    assert None not in tiles


@on_cuda
@pytest.mark.parametrize("splits", [1, 3, 8])
def test_chosen_tokens_in_splits_and_with_options(arch, rng, tiles, splits):
    asked = {"num_splits": splits}
    attend_chosen(rng, arch, k=300, queries=2, asked=asked, lens=(700, 33, 0), capacity=700)
    attend_chosen(rng, arch, k=300, queries=2, asked=asked, seen={"softcap": 2.5}, lens=(700, 33, 0), capacity=700)
    attend_chosen(rng, arch, "NHD", k=300, asked=asked, seen={"scale": 0.4}, lens=(700, 33, 0), page=8, width=64)


@on_cuda
@pytest.mark.parametrize(("width", "width_v"), [(64, 128), (160, 96), (256, 256)])
def test_chosen_tokens_in_other_widths(arch, rng, tiles, width, width_v):
    attend_chosen(rng, arch, width=width, width_v=width_v, queries=2, lens=(130, 20), capacity=130)


@on_cuda
@pytest.mark.parametrize(("group", "queries"), [(128, None), (16, 3), (20, 2)])
def test_chosen_latents(arch, rng, tiles, group, queries):
    """The values are the first columns of the keys."""
    case = Case(rng, dtype="float16", query_dtype="float16", heads=1, group=group, width=576, width_v=512,
                queries=queries, lens=(200, 90), capacity=200)  # fmt: skip
    case.v_real = case.k_real[..., :512]
    indices = choose(rng, case, 150)
    place = lambda a: oracle.place(a, arch)  # noqa: E731
    got = tikv.decode_attention(place(case.q), place(case.k), None, place(np.array(case.lens)), head_dim_v=512,
                                indices=place(indices), return_lse=True)  # fmt: skip
    check(case, [oracle.to_numpy(a).astype(np.float64) for a in got], expected(case, indices)[:2])
    assert None not in tiles
    assert launch.launcher_report(arrays.runtime_of())["fallbacks"] == {}


@on_cuda
def test_mass_of_chosen_tokens_beside_tensor_cores(arch, rng, tiles):
    """It is weighed by the log-sum-exps that they gave."""
    case, _ = make(rng, queries=2, lens=(40, 9), capacity=40)
    indices = choose(rng, case, 30)
    args = [oracle.place(a, arch) for a in (case.q, case.k, case.v, np.array(case.lens))]
    _, mass = tikv.decode_attention(*args, return_mass=True, indices=oracle.place(indices, arch))
    np.testing.assert_allclose(oracle.to_numpy(mass), expected(case, indices)[2], atol=2e-4)
    assert None not in tiles


# --- without a GPU


def array_of(dtype, ptr=0):
    """An array of which only the dtype and the address are looked at."""
    return ArrayView(ptr, (1,), (1,), dtype, "cuda:0")


def form_of(given, live=None, **asked):
    """The form of a call with these arrays, queries and cache, and these options."""
    arrays, query, cache = given
    return Form(live or CUDA, arrays, query, cache, options.AttentionOptions(**asked))


def given(dtype="float16", q_dtype=None, width=128, width_v=None, group=4, queries=1, ptr=0, inner=0, terms=()):
    """Arrays of a call, its queries and its cache, of which only the form is looked at."""
    dtype, q_dtype = dtypes.parse(dtype, "test"), dtypes.parse(q_dtype or dtype, "test")
    k, v = (array_of(dtype, ptr) for _ in range(2))
    cache = options.CacheLayout(
        Rows(k, head=width, token=width), Rows(v, head=width_v or width, token=width_v or width, inner=(inner, inner)),
        2, width, width_v or width, "linear", 40,
    )  # fmt: skip
    query = options.QueryShape(1, 2 * group, queries, width, (0, 0, 0))
    arrays = {"q": array_of(q_dtype), "k": k, "v": v, **dict.fromkeys(terms)}
    return arrays, query, cache


CUDA = types.SimpleNamespace(
    is_cuda=True, is_cpu=False, arch="cuda", index=0, engine=engines.TAICHI, kernel_style="cuda", invariant=False,
    attention_bits=16,
)  # fmt: skip


@pytest.mark.archs("cpu")
@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({}, ""),
        ({"dtype": "bfloat16", "group": 1}, ""),
        ({"width": 256, "width_v": 64}, ""),
        ({"dtype": "float32"}, "K and V are float32"),
        ({"dtype": "float8_e5m2", "q_dtype": "float16"}, ""),
        ({"q_dtype": "float32"}, "q is float32"),
        ({"q_dtype": "bfloat16"}, "q is bfloat16"),
        ({"width": 80}, "80 and 80 wide"),
        ({"width": 32}, "32 and 32 wide"),
        ({"width": 576, "width_v": 512}, ""),
        ({"width": 288}, "288 and 288 wide"),
        ({"width": 320, "width_v": 96}, "320 and 96 wide"),
        ({"width": 640, "width_v": 512}, "640 and 512 wide"),
        ({"width_v": 40}, "128 and 40 wide"),
        ({"ptr": 8}, "not every row begins at a multiple of 16 bytes"),
        ({"inner": 1}, "rows are stored in several pieces"),
        ({"terms": ["sink_logits", "alibi_slopes"]}, "sink_logits and alibi_slopes are given"),
        ({"terms": ["mask", "sink_logits"]}, "sink_logits and mask are given"),
        ({"terms": ["indices"]}, ""),
        ({"terms": ["indices", "sink_logits"]}, "sink_logits are given"),
    ],
)
def test_what_the_tensor_cores_leave_to_the_other_kernels(arch, ampere, options, why):
    form = form_of(given(**options))
    found = (TensorRows if form.cache.k.storage in ("f16", "bf16", "f32") else TensorCodes).why_not(form)
    assert why in found
    assert bool(why) == bool(found)
    assert family_for(form).on_tensor_cores != bool(why)


@pytest.mark.archs("cpu")
@pytest.mark.parametrize(
    ("options", "changed", "why"),
    [
        ({"queries": 3}, {}, ""),
        ({"queries": 3, "width": 96}, {}, ""),
        ({"queries": 3, "dtype": "float8_e5m2", "q_dtype": "bfloat16"}, {}, ""),
        ({"queries": 2}, {}, "8 query rows, which lanes hold"),
        ({"queries": 3, "width": 576, "width_v": 512}, {}, "576 and 512 wide"),
        ({"queries": 3, "q_dtype": "float32"}, {}, "q is float32"),
        ({"queries": 3, "dtype": "float8_e5m2", "q_dtype": "float16", "width": 256}, {}, "256 and 256 wide"),
        ({"group": 16, "terms": ["indices"]}, {}, "each query chooses its own tokens"),
        ({"queries": 3, "q_ptr": 2}, {}, "not every row of q begins at a multiple of 4 bytes"),
        ({"queries": 3}, {"invariant": True}, "invariant=True"),
        ({"queries": 3}, {"engine": engines.QUADRANTS}, "Quadrants cannot link bitcode"),
    ],
)
def test_which_masses_the_tensor_cores_leave_to_lanes(arch, ampere, options, changed, why):
    ampere.launcher, q_ptr = "native", options.pop("q_ptr", 0)
    form = form_of(given(**options), types.SimpleNamespace(**vars(CUDA) | changed))
    form.arrays["q"] = array_of(form.arrays["q"].dtype, q_ptr)
    found = why_no_mass_in_tiles(form)
    assert why in found
    assert bool(why) == bool(found)
    assert bool(family_for(form).mass_bits) != bool(why)


@pytest.mark.archs("cpu")
def test_where_there_are_none_todays_kernels_serve_and_the_report_says_why(arch, ampere, monkeypatch):
    assert launch.why_no_tensor_cores(CUDA) == ""
    assert "is cpu" in tikv.info()["tensor_cores"]
    quadrants = types.SimpleNamespace(**vars(CUDA) | {"engine": engines.QUADRANTS})
    ampere.launcher = "direct"
    assert "Quadrants cannot link bitcode" in launch.why_no_tensor_cores(quadrants)
    ampere.launcher = "native"  # for kernels made beforehand
    assert launch.why_no_tensor_cores(quadrants) == ""
    ampere.generation = 7
    assert "compute capability 7" in launch.why_no_tensor_cores(CUDA)
    assert not family_for(form_of(given())).on_tensor_cores
    ampere.generation = 9
    from tikv.kernels.attention.sm80 import instructions as kernels

    monkeypatch.setattr(kernels, "BITCODE", pathlib.Path("/nowhere.bc"))
    assert launch.why_no_tensor_cores(CUDA) == "/nowhere.bc is missing"


@pytest.mark.archs("cpu")
def test_under_invariant_rows_decide_only_how_the_work_is_divided(arch, ampere):
    live = types.SimpleNamespace(**vars(CUDA) | {"invariant": True})
    ampere.launcher = "direct"
    assert "by 'direct' (asked for)" in TensorRows.why_not(form_of(given(), live))
    ampere.launcher = "native"
    tile_of = lambda softcap=None, **form: family_for(form_of(given(**form), live, softcap=softcap)).tile  # noqa: E731
    tiles = [tile_of(queries=n) for n in (1, 2, 4, 8, 9, 100)]
    assert [(tile.shared_out, tile.row_tiles) for tile in tiles] == [
        ("exchange", 1), ("exchange", 1), ("exchange", 2), ("exchange", 2), ("rows", 2), ("rows", 2)
    ]  # fmt: skip
    assert [tile_of(width=96).shared_out, tile_of(width=576, width_v=512).shared_out] == ["rows", "columns"]
    assert tile_of(30.0, queries=4).row_tiles == 1
    assert tile_of(30.0, width=256).shared_out == "rows"


@pytest.mark.archs("cpu")
@pytest.mark.parametrize(
    ("batch", "keys", "group", "splits"),
    [(32, 8192, 8, 1), (1, 32768, 4, 32), (128, 1024, 4, 1), (20, 8192, 4, 2), (56, 8192, 4, 4), (16, 300, 4, 1)],
)
def test_splits_are_the_fewest_that_fill_the_device(arch, ampere, batch, keys, group, splits):
    arrays, query, cache = given(group=group)
    query = query._replace(batch=batch, heads=8 * group)
    assert family_for(form_of((arrays, query, cache._replace(heads=8)))).splits_of(keys) == splits


@pytest.mark.archs("cpu")
@pytest.mark.parametrize(
    ("queries", "group", "width", "rows"),
    [(1, 4, 128, 4), (1, 8, 128, 8), (1, 12, 128, 12), (1, 20, 128, 10), (1, 12, 256, 6), (2, 4, 128, 8),
     (3, 4, 128, 16), (9, 4, 128, 64), (2, 8, 256, 8), (3, 8, 256, 32), (1, 4, 512, 4), (1, 16, 512, 16),
     (1, 128, 512, 16)],
)  # fmt: skip
def test_query_rows_of_a_task(arch, ampere, queries, group, width, rows):
    assert family_for(form_of(given(group=group, queries=queries, width=width))).rows == rows


@pytest.mark.archs("cpu")
@pytest.mark.parametrize(
    ("queries", "group", "width", "rows"),
    [(1, 4, 128, 4), (40, 4, 128, 4), (3, 12, 128, 12), (1, 7, 64, 7), (3, 128, 576, 16), (1, 20, 576, 10)],
)
def test_rows_of_a_task_are_of_one_query_where_tokens_are_chosen(arch, ampere, queries, group, width, rows):
    form = given(group=group, queries=queries, width=width, width_v=min(width, 512), terms=["indices"])
    family = family_for(form_of(form))
    assert family.rows == rows
    assert group % family.rows == 0


@pytest.mark.archs("cpu")
@pytest.mark.parametrize(
    ("form", "rows"),
    [({"dtype": "float16", "queries": 3}, 8), ({"dtype": "int8"}, 8), ({"dtype": "float32", "terms": TERMS}, 8),
     ({"dtype": "int8", "queries": 3}, 4), ({"dtype": "float8_e4m3fn"}, 4), ({"format": "quant4_64"}, 4),
     ({"dtype": "float16", "queries": 3, "terms": ("parents", *TERMS)}, 4),
     ({"dtype": "int8", "queries": 3, "width": 128}, 8)],
)  # fmt: skip
def test_a_task_whose_code_would_be_too_long_has_fewer_rows(arch, form, rows):
    form = {"width": 288, **form}
    codes = form.pop("format", None)
    arrays, query, cache = given(**form, group=8)
    if codes is not None:
        arrays["k"].dtype = arrays["v"].dtype = dtypes.uint32
        cache = cache._replace(k=cache.k._replace(format=FORMATS[codes]), v=cache.v._replace(format=FORMATS[codes]))
    assert family_for(form_of((arrays, query, cache))).rows == rows


@pytest.mark.archs("cpu")
def test_the_bitcode_is_what_its_source_says(arch, tmp_path):
    from tikv.kernels.attention.sm80.instructions import BITCODE, SOURCE

    assembler = shutil.which("llvm-as-14")
    if assembler is None:
        pytest.skip("needs llvm-as-14, whose bitcode it is")
    subprocess.run([assembler, SOURCE.name, "-o", str(tmp_path / "made.bc")], check=True, cwd=SOURCE.parent)
    assert (tmp_path / "made.bc").read_bytes() == BITCODE.read_bytes()


@pytest.mark.archs("cpu")
def test_the_name_of_compiled_kernels_depends_on_the_bitcode(arch, tmp_path):
    folders = [tmp_path / name for name in "ab"]
    for n, folder in enumerate(folders):
        folder.mkdir()
        (folder / "kernel.py").write_text("same")
        (folder / "kernel.bc").write_bytes(bytes([n]))
    assert keys.sources_below(folders[0]) != keys.sources_below(folders[1])
