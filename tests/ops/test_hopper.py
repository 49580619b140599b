"""Attention of prompts by the warpgroups of compute capability 9, against the float64 oracle; and what they leave."""

import itertools
import math
import shutil
import subprocess
import types

import numpy as np
import oracle
import pytest
from ops.test_attention_terms import Terms, tree_of
from ops.test_tensor_cores import CUDA, array_of, attend, check, given, make

import tikv
from tikv import dtypes, launch, reference
from tikv.kernels.attention.parameters import MAX_TOKENS
from tikv.ops.attention.families import Form, family_for
from tikv.ops.attention.families.warpgroups import WarpgroupLatents, WarpgroupPrompts
from tikv.ops.attention.options import AttentionOptions
from tikv.ops.attention.splits import Lengths
from tikv.ops.layouts import Scale

on_cuda = pytest.mark.archs("cuda")
LENS = (300, 0, 64, 41)


@on_cuda
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("place", ["linear", "ring", "NHD", "HND"])
def test_storages(arch, rng, warpgroups, place, dtype):
    """Where a KV head has 160 query rows, of which the second task has 32."""
    if place == "ring":
        ring = {"ring": 99, "sinks": 3, "capacity": 99}
        case, _ = make(rng, dtype=dtype, queries=40, lens=(98, 99, 100, 777, 41), **ring)
        check(case, case.run(arch), case.expected(window=99))
        return
    for window in (None, 37):
        attend(rng, arch, place, {"window": window}, dtype=dtype, queries=40, lens=LENS, capacity=300)


@on_cuda
@pytest.mark.parametrize("width", [64, 96, 128, 256])
@pytest.mark.parametrize("group", [2, 7])
def test_widths_and_groups(arch, rng, warpgroups, width, group):
    attend(rng, arch, width=width, group=group, queries=100, lens=(530, 100), capacity=530)


@on_cuda
@pytest.mark.parametrize("page", [1, 3, 16, 48])
def test_page_sizes(arch, rng, warpgroups, page):
    for window in (None, 5, 170):
        attend(rng, arch, "NHD", {"window": window}, page=page, width=64, queries=40, lens=(400, 64, 0, 41))


@on_cuda
@pytest.mark.parametrize("splits", [1, 3, 8])
@pytest.mark.parametrize("place", ["linear", "NHD"])
def test_splits(arch, rng, warpgroups, place, splits):
    """Of which some have no keys."""
    asked = {"num_splits": splits}
    attend(rng, arch, place, {"window": 500}, asked, lens=(1500, 40, 0, 1023), capacity=1500, queries=40, width=64)


@on_cuda
def test_options_of_the_softmax(arch, rng, warpgroups):
    attend(rng, arch, seen={"scale": 0.4}, queries=40, lens=(140, 41), capacity=140)
    attend(rng, arch, seen={"scale": 1.3, "softcap": 2.5}, queries=40, lens=(140, 41), capacity=140, tolerance=2)
    case, _ = make(rng, queries=40, lens=(140, 0), capacity=140)
    out, lse = case.run(arch, lse_base2=True)
    check(case, (out, lse * np.log(2)), case.expected())


@on_cuda
def test_queries_that_see_all_keys(arch, rng, warpgroups):
    attend(rng, arch, seen={"causal": False}, queries=40, lens=(300, 41), capacity=300)


@on_cuda
@pytest.mark.parametrize("sinks", [4, 130])
def test_sinks_and_windows(arch, rng, warpgroups, sinks):
    """Tiles of sinks come first, then those of the window of a task's rows."""
    case, _ = make(rng, capacity=900, lens=(900, 290, 86), sinks=sinks, queries=86)
    check(case, case.run(arch, window=sinks + 71, sinks=sinks), case.expected(window=sinks + 71))


@on_cuda
def test_kv_heads_of_different_lengths(arch, rng, warpgroups):
    case, _ = make(rng, capacity=300, lens=(300, 300), queries=40)
    lens = np.array([[300, 40], [0, 164]])
    got = case.run(arch, lens=lens)
    for b in range(2):
        for h in range(2):
            one, _ = make(rng, capacity=300, heads=1, lens=(int(lens[b, h]),), queries=40)
            one.q = case.q[b : b + 1, h * 4 : h * 4 + 4]
            one.k_real, one.v_real = case.k_real[b : b + 1, h : h + 1], case.v_real[b : b + 1, h : h + 1]
            check(case, [a[b : b + 1, h * 4 : h * 4 + 4] for a in got], one.expected())


@on_cuda
def test_the_mass_of_what_warpgroups_attend_to(arch, rng, warpgroups):
    case, _ = make(rng, lens=(300, 41), queries=40, capacity=300)
    arrays = [oracle.place(a, arch) for a in (case.q, case.k, case.v)]
    lens = oracle.place(np.array(case.lens, np.int32), arch)
    out, lse, mass = map(oracle.to_numpy, tikv.decode_attention(*arrays, lens, return_lse=True, return_mass=True))
    check(case, (out.astype(np.float64), lse.astype(np.float64)), case.expected())
    np.testing.assert_allclose(mass.sum(-1), 4 * 40, rtol=1e-3)


@on_cuda
@pytest.mark.parametrize("place", ["linear", "NHD"])
def test_what_a_query_does_not_see_may_be_nan(arch, rng, warpgroups, place):
    """The newest key, which the last query alone sees: to it all is NaN, to the others nothing."""
    case, cache = make(rng, place, queries=40, lens=(140, 63), capacity=140, spoiled=-1)
    got, want = cache.run(arch, window=29), case.expected(window=29)
    check(case, [a[:, :, :-1] for a in got], [a[:, :, :-1] for a in want])
    assert all(np.isnan(a[:, :, -1]).all() for a in got)


@on_cuda
@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize("column", [0, 3, 127])
def test_infinities_and_nans_of_values_count_for_those_who_see_them(arch, rng, warpgroups, column, splits):
    """Keys 275 and 280 of 300, in a tile of which each of 40 queries sees another part; key 10 in a whole one."""
    cache = make(rng, "NHD", lens=(300,), queries=40)[1]
    spoiled = {275: np.inf, 280: -np.inf, 290: np.nan, 10: -np.inf}
    for at, value in spoiled.items():
        cache.v[cache.table[0, at // 16], at % 16, :, column] = value
    out = cache.run(arch, num_splits=splits)[0]
    assert np.isfinite(np.delete(out, column, axis=-1)).all()
    for t in range(40):
        with np.errstate(invalid="ignore"):
            want = sum(value for at, value in spoiled.items() if at <= 260 + t)
        np.testing.assert_array_equal(out[:, :, t, column], want)


@on_cuda
@pytest.mark.parametrize("place", ["linear", "NHD"])
def test_lengths_and_tables_that_only_the_device_knows_are_bounded(arch, rng, device_knows, warpgroups, place):
    case, cache = make(rng, place, **({"guard": 3} if place == "linear" else {}), queries=40, lens=(40, 40, 40))
    lens, case.lens = (2**31 - 1, -5, 41), (40, 0, 40)
    if place == "NHD":
        cache.table = cache.table[:, :3].copy()
        cache.table[0, 2], cache.table[2, 2] = len(cache.k), -(2**31)
    got = cache.run(arch, lens=lens)
    if place == "linear":
        check(case, got, case.expected())
        return
    np.testing.assert_array_equal(got[0][1], 0)
    for b, length in ((0, 48), (2, 41)):  # the first is bounded by its table, and of both the third page is missing
        for h, t in itertools.product(range(8), range(40)):
            keys = min(32, length - 39 + t)
            seen = (a[b, h // 4, :keys] for a in (case.k_real, case.v_real))
            out, lse = reference.attention(case.q[b, h, t], *seen, scale=128**-0.5)
            np.testing.assert_allclose(got[0][b, h, t], out, atol=4e-3)
            np.testing.assert_allclose(got[1][b, h, t], lse, rtol=1e-4)


@on_cuda
@pytest.mark.parametrize("steep", [1.0, 40.0])
def test_maxima_that_grow_along_a_sequence(arch, rng, warpgroups, steep):
    case, _ = make(rng, width=64, lens=(700,), capacity=700, queries=40)
    case.k[...] = case.k + (steep * np.linspace(-1, 1, 700))[:, None].astype(np.float16)
    case.k_real, case.q = case.k.astype(np.float64), np.abs(case.q)
    check(case, case.run(arch, num_splits=1), case.expected(), tolerance=2)


@on_cuda
def test_results_whose_columns_begin_at_odd_places(arch, rng, warpgroups):
    """Columns are stored two at a time where that is possible."""
    case, _ = make(rng, lens=(140, 41), capacity=140, queries=40)
    q, k, v = (oracle.to_torch(a, arch) for a in (case.q, case.k, case.v))
    lens, out = oracle.to_torch(np.array(case.lens, np.int32), arch), q.new_empty((*q.shape[:-1], 129))[..., 1:]
    got = tikv.decode_attention(q, k, v, lens, return_lse=True, out=out)
    check(case, [oracle.to_numpy(a).astype(np.float64) for a in got], case.expected())


@on_cuda
def test_another_launcher_takes_other_kernels(arch, rng, warpgroups):
    """Only the native one gives a launch shared memory, and a plan may have been made before it was left."""
    case, _ = make(rng, lens=(140, 41), capacity=140, queries=40)
    first = case.run(arch)
    try:
        launch.choose_launcher("direct")
        check(case, case.run(arch), case.expected())
    finally:
        launch.choose_launcher(None)
    check(case, first, case.expected())


# --- terms


def expected(case, terms=None, masks=None, softcap=None, causal=True, scale=None, code_dtype=None, **seen):
    """(out, lse) in float64 with `Terms`, where new tokens see each other by `masks` if there are any."""
    tokens = case.q.shape[2]
    out, lse = np.zeros((*case.q.shape[:3], case.v_real.shape[-1])), np.zeros(case.q.shape[:3])
    for b, h, t in itertools.product(*map(range, case.q.shape[:3])):
        length = case.lens[b]
        if masks is None:
            at = reference.visible_positions(length, t, tokens, causal=causal, sinks=case.sinks, held=case.ring, **seen)
            positions, own = at, length - tokens + t
        else:
            at, positions = reference.visible_in_tree(length, t, masks[b], sinks=case.sinks, **seen)
            held = [
                n
                for n, p in enumerate(at)
                if case.ring is None or p < case.sinks or p >= length - case.ring + case.sinks
            ]
            at, positions = [at[n] for n in held], [positions[n] for n in held]
            own = length - tokens + max(int(masks[b][t].sum()) - 1, 0)
        keys, values = (a[b, h // case.group, at] for a in (case.k_real, case.v_real))
        added = terms.of(b, h, positions, own) if terms else {}
        out[b, h, t], lse[b, h, t] = reference.attention(
            case.q[b, h, t],
            keys,
            values,
            scale=scale or case.q.shape[-1] ** -0.5,
            softcap=softcap,
            code_dtype=code_dtype,
            **added,
        )
    return out, lse


def place_of(place, **form):
    """The form of `make`'s cache of a place, for 40 queries, and the window that all of it has."""
    if place == "ring":
        return {"ring": 99, "sinks": 3, "capacity": 99, "lens": (98, 777, 41), **form}, {"window": 99}
    return {"lens": (300, 0, 64, 41), "capacity": 300, **form}, {}


@on_cuda
@pytest.mark.parametrize("place", ["linear", "ring", "NHD"])
@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize(("sinks", "slopes"), [(True, None), (False, "head"), (True, "sequence")])
def test_sink_logits_and_slopes(arch, rng, warpgroups, place, width, sinks, slopes):
    """A sink is counted once however many splits there are, and where a query sees nothing it is all there is."""
    form, window = place_of(place, width=width, queries=40)
    case, cache = make(rng, place, **form)
    terms = Terms(rng, case, sinks=sinks, slopes=slopes)
    want = expected(case, terms, **window)
    for splits in (1, 3):
        check(case, cache.run(arch, num_splits=splits, **terms.given(arch)), want)


@on_cuda
@pytest.mark.parametrize(("width", "dtype"), [(96, "float16"), (256, "float16"), (128, "bfloat16")])
def test_terms_with_windows_and_sinks(arch, rng, warpgroups, width, dtype):
    case, _ = make(rng, capacity=700, lens=(700, 90), sinks=4, queries=86, width=width, dtype=dtype)
    terms = Terms(rng, case, slopes="head")
    check(case, case.run(arch, window=75, sinks=4, **terms.given(arch)), expected(case, terms, window=75))


@on_cuda
@pytest.mark.parametrize("width", [64, 128, 256])
def test_terms_behind_a_soft_cap(arch, rng, warpgroups, width):
    case, cache = make(rng, "NHD", queries=40, lens=(140, 41), width=width)
    terms = Terms(rng, case, slopes="sequence")
    check(case, cache.run(arch, softcap=2.5, **terms.given(arch)), expected(case, terms, softcap=2.5), tolerance=2)


@on_cuda
def test_slopes_of_queries_that_see_all_keys(arch, rng, warpgroups):
    """Of which the last stands at the last key, and the others before it."""
    case, _ = make(rng, queries=40, lens=(300, 41), capacity=300)
    terms = Terms(rng, case, slopes="head")
    check(case, case.run(arch, causal=False, **terms.given(arch)), expected(case, terms, causal=False))


@on_cuda
@pytest.mark.parametrize("number", [np.nan, np.inf])
def test_a_sink_logit_that_is_no_number_spoils_its_head(arch, rng, warpgroups, number):
    case, _ = make(rng, queries=40, lens=(300, 41), capacity=300)
    terms = Terms(rng, case)
    want = expected(case, terms)
    terms.sink_logits[3] = number
    got = case.run(arch, num_splits=2, **terms.given(arch))
    assert all(np.isnan(a[:, 3]).all() for a in got)
    check(case, [np.delete(a, 3, axis=1) for a in got], [np.delete(a, 3, axis=1) for a in want])


def trees(rng, arch, form, count, tokens):
    """(which new tokens see each other, the same as an argument): parents, a mask of bytes or of bits."""
    parents = np.array([tree_of(rng, tokens, 0.8) for _ in range(count)], np.int32)
    masks = np.stack([reference.tree_mask(p) for p in parents])
    if form == "parents":
        return masks, {"parents": oracle.place(parents, arch)}
    masks[0] = rng.random((tokens, tokens)) < 0.5
    masks[0, 5] = False  # it sees nothing new
    return masks, {"mask": oracle.to_torch(masks if form == "mask" else np.packbits(masks, -1, "little"), arch)}


@on_cuda
@pytest.mark.parametrize("place", ["linear", "ring", "NHD"])
@pytest.mark.parametrize(("form", "width"), [("parents", 128), ("mask", 64), ("bits", 128)])
@pytest.mark.parametrize("slopes", [None, "head"])
def test_masks_and_trees(arch, rng, warpgroups, place, form, width, slopes):
    """More than a word of new tokens, of which the tiles of a sequence begin in the middle."""
    options, window = place_of(place, width=width, queries=40)
    if place != "ring":
        options["lens"] = (300, 64, 41, 40)
    case, cache = make(rng, place, **options)
    masks, given = trees(rng, arch, form, len(case.lens), 40)
    terms = Terms(rng, case, sinks=False, slopes=slopes) if slopes else None
    want = expected(case, terms, masks, **window)
    for splits in (1, 3):
        got = cache.run(arch, num_splits=splits, **given, **(terms.given(arch) if terms else {}))
        check(case, got, want)


@on_cuda
@pytest.mark.parametrize("width", [64, 96, 256])
@pytest.mark.parametrize("window", [15, 60])
def test_trees_whose_branches_are_longer_than_a_window(arch, rng, warpgroups, window, width):
    """Or shorter; a window counts depths."""
    case, _ = make(rng, capacity=400, lens=(400, 150, 131), sinks=3, queries=130, width=width)
    masks, given = trees(rng, arch, "parents", 3, 130)
    terms = Terms(rng, case, slopes="sequence")
    got = case.run(arch, window=window, sinks=3, **given, **terms.given(arch))
    check(case, got, expected(case, terms, masks, window=window))


@on_cuda
@pytest.mark.parametrize("place", ["linear", "NHD"])
def test_what_a_branch_does_not_see_may_be_nan(arch, rng, warpgroups, place):
    """The newest token is NaN, which its own query alone sees; infinite values of others count for their branches."""
    case, cache = make(rng, place, queries=40, lens=(140, 63), capacity=140, spoiled=-1)
    masks, given = trees(rng, arch, "parents", 2, 40)
    got, want = cache.run(arch, **given), expected(case, None, masks)
    check(case, [a[:, :, :-1] for a in got], [a[:, :, :-1] for a in want])
    assert all(np.isnan(a[:, :, -1]).all() for a in got)
    case, cache = make(rng, place, queries=40, lens=(140,), capacity=140)
    for t, value in ((3, np.inf), (20, -np.inf)):
        (cache.v[0, :, 100 + t] if place == "linear" else cache.v[cache.table[0, (100 + t) // 16], (100 + t) % 16])[
            ..., 7
        ] = value
    out = cache.run(arch, **{name: a[:1] for name, a in given.items()})[0]
    assert np.isfinite(np.delete(out, 7, axis=-1)).all()
    for t in range(40):
        with np.errstate(invalid="ignore"):
            count = (np.inf if masks[0, t, 3] else 0.0) + (-np.inf if masks[0, t, 20] else 0.0)
        found = out[:, :, t, 7]
        np.testing.assert_array_equal(found if count else np.isfinite(found), count if count else True)


# --- without a GPU


OPTIONS = AttentionOptions(None, True, None, None, None, False)


@pytest.mark.archs("cpu")
@pytest.mark.parametrize(
    ("form", "why"),
    [
        ({}, ""),
        ({"dtype": "bfloat16", "width": 256}, ""),
        ({"width": 128, "width_v": 64}, "128 and 64 wide"),
        ({"width": 160}, "160 and 160 wide"),
        ({"dtype": "int8", "q_dtype": "float32"}, "q is float32"),
        ({"queries": 1, "group": 128}, "128 query rows"),
        ({"queries": 31}, "124 query rows"),
        ({"terms": ["sink_logits", "alibi_slopes", "parents"]}, ""),
        ({"terms": ["mask"], "softcap": 30.0}, ""),
        ({"terms": ["alibi_slopes"], "softcap": 30.0}, ""),
        ({"terms": ["alibi_slopes", "mask"], "softcap": 30.0}, "alibi_slopes and mask are given with softcap"),
        ({"terms": ["alibi_slopes"], "sharded": (16, 16)}, "alibi_slopes count tokens of other ranks"),
        ({"ptr": 8}, "not every row begins"),
        ({"scale": -1.0}, "scaled by -1.0"),
        ({"scale": math.inf}, "scaled by inf"),
        ({"q_ptr": 8}, "not every row of q begins"),
        ({"q_strides": (8, 4, 128)}, "not every row of q begins"),
    ],
)
def test_what_warpgroups_leave_to_other_kernels(arch, hopper_gpu, form, why):
    form = dict(form)
    asked = OPTIONS._replace(**{name: form.pop(name) for name in ("scale", "softcap", "sharded") if name in form})
    strides, ptr = form.pop("q_strides", (0, 0, 0)), form.pop("q_ptr", 0)
    arrays, query, cache = given(**{"queries": 40, **form})
    arrays["q"] = array_of(arrays["q"].dtype, ptr)
    scale = Scale(array_of(dtypes.float16))
    query = query._replace(strides=strides)
    cache = cache._replace(k=cache.k._replace(scale=scale), v=cache.v._replace(scale=scale))
    form = Form(CUDA, arrays, query, cache, asked)
    found = WarpgroupPrompts.why_not(form)
    assert why in found
    assert bool(why) == bool(found)
    assert family_for(form).in_warpgroups != bool(why)


@pytest.mark.archs("cpu")
@pytest.mark.parametrize(
    ("form", "in_keys", "why"),
    [
        ({}, True, ""),
        ({"dtype": "bfloat16", "group": 3, "queries": 9}, True, ""),
        ({"terms": ["indices"]}, True, ""),
        ({}, False, "an array of their own"),
        ({"width_v": 384}, True, "576 and 384 wide"),
        ({"dtype": "float32"}, True, "K and V are float32"),
        ({"q_dtype": "bfloat16"}, True, "q is bfloat16"),
        ({"terms": ["sink_logits"]}, True, "sink_logits are given"),
        ({"ptr": 8}, True, "not every row begins"),
        ({"q_ptr": 8}, True, "not every row of q begins"),
        ({"kv_heads": 2}, True, ""),
        ({"sinks": 4}, True, ""),
        ({"ring": 90, "sinks": 4}, True, ""),
        ({"starts": True}, True, ""),
    ],
)
def test_which_latents_warpgroups_leave_to_other_kernels(arch, hopper_gpu, form, in_keys, why):
    form = dict(form)
    ptr, heads = form.pop("q_ptr", 0), form.pop("kv_heads", 1)
    kept = {name: form.pop(name) for name in ("sinks", "ring", "starts") if name in form}
    arrays, query, cache = given(**{"width": 576, "width_v": 512, **form})
    arrays["q"] = array_of(arrays["q"].dtype, ptr)
    form = Form(CUDA, arrays, query, cache._replace(in_keys=in_keys, heads=heads, **kept), OPTIONS)
    found = WarpgroupLatents.why_not(form)
    assert why in found
    assert bool(why) == bool(found)
    assert family_for(form).in_warpgroups != bool(why)


@pytest.mark.archs("cpu")
@pytest.mark.parametrize(("batch", "group", "rows", "splits"), [(32, 16, 16, 4), (64, 128, 64, 1), (1, 16, 16, 32)])
def test_latents_fill_the_device_with_one_block_of_each_multiprocessor(arch, hopper_gpu, batch, group, rows, splits):
    arrays, query, cache = given(width=576, width_v=512)
    cache, query = cache._replace(heads=1, in_keys=True), query._replace(batch=batch, heads=group)
    family = family_for(Form(CUDA, arrays, query, cache, OPTIONS))
    assert (family.in_warpgroups, family.rows, family.splits_of(8192)) == (True, rows, splits)


@pytest.mark.archs("cpu")
def test_where_there_are_none_the_report_says_why(arch, hopper_gpu):
    assert launch.why_no_warpgroups(CUDA) == ""
    assert "is cpu" in tikv.info()["warpgroups"]
    hopper_gpu.launcher = "direct"
    assert "'direct' (asked for)" in launch.why_no_warpgroups(CUDA)
    for hopper_gpu.generation in (8, 10):
        assert f"compute capability {hopper_gpu.generation}" in launch.why_no_warpgroups(CUDA)


@pytest.mark.archs("cpu")
@pytest.mark.parametrize(("queries", "rows", "splits"), [(64, 128, 8), (512, 128, 1), (8192, 128, 1)])
def test_a_block_of_each_multiprocessor_has_128_query_rows(arch, hopper_gpu, queries, rows, splits):
    arrays, query, cache = given(queries=queries)
    form = Form(CUDA, arrays, query._replace(heads=32), cache._replace(heads=8), OPTIONS)
    family = family_for(form)
    assert (family.in_warpgroups, family.rows, family.splits_of(8192)) == (True, rows, splits)


@pytest.mark.archs("cpu")
@pytest.mark.parametrize("form", [{}, {"dtype": "int8", "q_dtype": "float16"}])
def test_under_invariant_warpgroups_serve_any_number_of_queries(arch, hopper_gpu, form):
    """With one kernel for at most 64 rows, and one for more; tasks that fill the GPU merge the parts of their keys."""
    live = types.SimpleNamespace(**vars(CUDA) | {"invariant": True})
    found = {}
    for batch, queries in itertools.product((1, 32), (1, 2, 16, 17, 512)):
        arrays, query, cache = given(queries=queries, **form)
        cache = cache._replace(heads=8, capacity=8192)
        family = family_for(Form(live, arrays, query._replace(heads=32, batch=batch), cache, OPTIONS))
        assert isinstance(family, WarpgroupPrompts)
        assert family.tile.consumers == (1 if queries <= 16 else 2)
        found[batch, queries] = family.shares(Lengths(8192))
        assert family.shares(Lengths(8192, 2000)).splits == 8
    merged = {calls for calls, shares in found.items() if shares.splits == 1}
    here = {(32, 1), (32, 2), (32, 16)} | ({(1, 512), (32, 17), (32, 512)} if form == {} else set())
    assert merged == here
    assert {(found[calls].least_share, found[calls].split_keys) for calls in merged} <= {(1024, MAX_TOKENS)}
    terms = given(queries=1, terms=("sink_logits",))
    assert not family_for(Form(live, *terms, OPTIONS)).in_warpgroups
    assert "invariant=True" in WarpgroupLatents.why_not(Form(live, *given(), OPTIONS))


@pytest.mark.archs("cpu")
def test_the_bitcode_is_what_its_program_writes(arch, tmp_path):
    from tikv.kernels.attention.sm90 import ir
    from tikv.kernels.attention.sm90.attend import BITCODE

    assembler = shutil.which("llvm-as-14")
    if assembler is None:
        pytest.skip("needs llvm-as-14, whose bitcode it is")
    (tmp_path / "hopper.ll").write_text(ir.text())
    subprocess.run([assembler, "hopper.ll", "-o", "made.bc"], check=True, cwd=tmp_path)
    assert (tmp_path / "made.bc").read_bytes() == BITCODE.read_bytes()


@pytest.mark.archs("cpu")
def test_what_lies_in_shared_memory_fits_and_begins_where_products_read(arch):
    from tikv.kernels.attention.sm90 import tiles as kernels

    every = itertools.product(kernels.KEYS_OF, (0, 4, 8))
    of_eight = itertools.product(kernels.KEYS_OF, (False, True))
    memories = [kernels.memory_of(*form) for form in every] + [kernels.memory_of_eight(*form) for form in of_eight]
    for memory in memories:
        assert memory.nbytes <= 227 << 10
        assert memory.stages >= 2
        assert not memory.k % 1024
        assert not memory.tile % 1024
        assert not memory.tile_v % 1024
    for width, bits, rows in itertools.product(kernels.KEYS_OF, (0, 4, 8), (64, 128)):
        memory = kernels.memory_of(width, bits, rows)
        if kernels.merges(rows, width, bits):
            assert memory.nbytes <= 227 << 10
            assert memory.barriers - memory.merged == rows * (4 * width + 8)
            assert memory.merged >= memory.codes + 2 * memory.ahead * memory.of_codes
            assert not memory.barriers % 16
