"""Graphs give the bits of the calls one by one, run many times, follow what changes, and die with their runtime."""

import gc
import threading
import weakref

import numpy as np
import oracle
import pytest

import tikv
from tikv import arrays, launch, runtime

pytestmark = pytest.mark.full(each_value=True)


def on_device(array):
    """A CacheArray of the library's own memory: what Taichi's graph takes on Vulkan and Metal."""
    live = arrays.runtime_of()
    return arrays.CacheArray(arrays.to_device(np.ascontiguousarray(array), live), live)


def own_copy(array, arch, owned):
    return on_device(array) if owned else oracle.place(array.copy(), arch)


def same_bits(got, want):
    assert got.keys() == want.keys()
    for name in want:
        oracle.assert_same_bits(got[name], want[name], what=name)


class Decode:
    """Arrays of a decode step of two sequences, twice: for a graph, and for the calls one by one."""

    def __init__(self, rng, arch, owned, stored=np.float32, capacity=9):
        self.rng, self.arch, self.owned = rng, arch, owned
        shape = (2, 2, capacity, 8)
        self.caches = [oracle.numbers(rng, shape, np.float32) for _ in "kv"]
        self.scales = []
        if stored == np.int8:
            self.caches = [rng.integers(-127, 128, shape).astype(np.int8) for _ in "kv"]
            self.scales = [np.exp2(rng.integers(-6, 0, shape[:3])).astype(np.float16) for _ in "kv"]
        else:
            self.caches = [c.astype(stored) for c in self.caches]

    def own(self, array):
        return own_copy(array, self.arch, self.owned)

    def rows(self, *shape):
        return self.own(oracle.numbers(self.rng, shape, np.float32))


@pytest.mark.parametrize("owned", [False, True], ids=["caller", "owned"])
@pytest.mark.parametrize("window", [None, 5], ids=["linear", "ring"])
@pytest.mark.parametrize("dtypes_", [("f4", "f4"), ("f4", "f2"), ("f2", "f2")], ids=["f32", "f32_f16", "f16"])
def test_copies_follow_their_position(arch, rng, owned, window, dtypes_):
    builder = tikv.GraphBuilder()
    builder.copy_kv("k", "v", "k_cache", "v_cache", position="here", window=window)
    builder.copy("k", "other", position=1)
    builder.copy("v", "other", position="there", window=window)
    graph = builder.compile()
    before = {name: oracle.random_bits(rng, (2, 9, 6), dtypes_[1]) for name in ("k_cache", "v_cache", "other")}
    one, all_ = ({name: own_copy(a, arch, owned) for name, a in before.items()} for _ in range(2))
    for here, there in ((0, 3), (4, 6), (5, 0)):
        new = {name: own_copy(oracle.numbers(rng, (2, 2, 6), dtypes_[0]), arch, owned) for name in "kv"}
        assert graph.run({**new, **all_, "here": here, "there": there}) == {}
        tikv.copy_kv(new["k"], new["v"], one["k_cache"], one["v_cache"], position=here, window=window)
        tikv.copy(new["k"], one["other"], position=1)
        tikv.copy(new["v"], one["other"], position=there, window=window)
    for name in before:
        oracle.assert_same_bits(all_[name], one[name], what=name)
        assert (oracle.bits(one[name]) != oracle.bits(before[name])).any()


def test_slots_and_ragged_appends(arch, rng):
    builder = tikv.GraphBuilder()
    builder.write_slots("k", "v", "k_pool", "v_pool", "slots")
    builder.append_ragged("k_new", "v_new", "k_cache", "v_cache", "offsets")
    graph = builder.compile()
    pools = [oracle.random_bits(rng, (3, 4, 2, 8), np.float32) for _ in "kv"]
    caches = [oracle.random_bits(rng, (2, 2, 6, 8), np.float32) for _ in "kv"]
    kept = [[oracle.place(a.copy(), arch) for a in (*pools, *caches)] for _ in range(2)]
    for step in range(3):
        rows = [oracle.place(oracle.numbers(rng, (4, 2, 8), np.float32), arch) for _ in "kv"]
        new = [oracle.place(oracle.numbers(rng, (2, 2, 3, 8), np.float32), arch) for _ in "kv"]
        slots = oracle.place(np.array([step, 5, -1, 11 - step]), arch)
        offsets = oracle.place(np.array([step, 4 - 3 * step]), arch)
        values = dict(zip(("k_pool", "v_pool", "k_cache", "v_cache"), kept[0], strict=True))
        values |= {"k": rows[0], "v": rows[1], "slots": slots, "k_new": new[0], "v_new": new[1], "offsets": offsets}
        graph.run(values)
        tikv.write_slots(*rows, *kept[1][:2], slots)
        tikv.append_ragged(*new, *kept[1][2:], offsets)
    for a, b in zip(*kept, strict=True):
        oracle.assert_same_bits(a, b)


@pytest.mark.parametrize("owned", [False, True], ids=["caller", "owned"])
@pytest.mark.parametrize("stored", [np.float32, np.float16], ids=["f32", "f16"])
def test_write_attend_and_merge(arch, rng, owned, stored):
    """A whole decode step: a scalar position, a length in an array and one as a scalar, a constant, a merge."""
    builder = tikv.GraphBuilder()
    builder.append_ragged("k", "v", "k_cache", "v_cache", "offsets")
    builder.decode_attention("q", "k_cache", "v_cache", "lens", out="a", lse="a_lse", mass="mass")
    builder.decode_attention("q", "k_prefix", "v_prefix", "n", out="b", lse="b_lse", scale=0.3)
    builder.decode_attention("q", "k_prefix", "v_prefix", 3, out="c", window=2)
    builder.merge_states("a", "a_lse", "b", "b_lse", out="ab", lse="ab_lse")
    builder.copy("c", "kept", position="at", src_layout="head_major")
    graph = builder.compile()
    assert graph.scalars == ["at"]
    assert graph.lengths == ["lens", "n"]
    assert graph.outputs == ["a", "a_lse", "mass", "b", "b_lse", "c", "ab", "ab_lse"]
    work = Decode(rng, arch, owned, stored)
    kept = oracle.random_bits(rng, (2, 7, 8), np.float32)
    both = [[work.own(a) for a in (*work.caches, kept)] for _ in range(2)]
    prefix = [work.rows(2, 2, 5, 8) for _ in "kv"]
    for at, lens in enumerate(([1, 4], [5, 2], [9, 9])):
        q, k, v = work.rows(2, 4, 8), work.rows(2, 2, 1, 8), work.rows(2, 2, 1, 8)
        offsets, lens = (oracle.place(np.array(n), arch) for n in ([n - 1 for n in lens], lens))
        (k_cache, v_cache, one), (k_two, v_two, two) = both
        values = {"k": k, "v": v, "q": q, "k_cache": k_cache, "v_cache": v_cache, "offsets": offsets, "lens": lens}
        values |= {"k_prefix": prefix[0], "v_prefix": prefix[1], "n": at + 2, "kept": one, "at": at}
        got = graph.run(values)
        tikv.append_ragged(k, v, k_two, v_two, offsets)
        a, a_lse, mass = tikv.decode_attention(q, k_two, v_two, lens, return_lse=True, return_mass=True, impl="taichi")
        b, b_lse = tikv.decode_attention(q, *prefix, at + 2, return_lse=True, scale=0.3, impl="taichi")
        c = tikv.decode_attention(q, *prefix, 3, window=2, impl="taichi")
        ab, ab_lse = tikv.merge_states(a, a_lse, b, b_lse)
        tikv.copy(c, two, position=at, src_layout="head_major")
        names = ("a", "a_lse", "mass", "b", "b_lse", "c", "ab", "ab_lse")
        same_bits(got, dict(zip(names, (a, a_lse, mass, b, b_lse, c, ab, ab_lse), strict=True)))
        for mine, theirs in zip(*both, strict=True):
            oracle.assert_same_bits(mine, theirs)
        assert all(type(got[n]) is type(a) for n in names)


@pytest.mark.full(unless=lambda case: case["owned"])
@pytest.mark.parametrize("owned", [False, True], ids=["caller", "owned"])
def test_rings_int8_and_splits_are_chosen_anew_as_lengths_grow(arch, rng, owned):
    """What one call would split, the graph splits: bits do not depend on the lengths of the first run."""
    builder = tikv.GraphBuilder()
    for length in ("n", "lens"):
        builder.decode_attention(
            "q", "k_cache", "v_cache", length, k_scale="k_scale", v_scale="v_scale", ring=True, sinks=2,
            first_valid="first", out=f"out_{length}",
        )  # fmt: skip
    graph = builder.compile()
    work = Decode(rng, arch, owned, np.int8, capacity=540)  # two splits from 512 keys on
    k, v, k_scale, v_scale = (work.own(a) for a in (*work.caches, *work.scales))
    for n, first in ((3, 0), (539, 0), (20, 17), (5_000_000_000, 0), (540, 100), (20, 0)):
        q = work.rows(2, 4, 8)
        lens = np.array([n, max(1, n - 7)])
        fixed = {"k_cache": k, "v_cache": v, "k_scale": k_scale, "v_scale": v_scale}
        got = graph.run({"q": q, "n": n, "lens": lens, "first": first, **fixed})
        options = {"k_scale": k_scale, "v_scale": v_scale, "ring": True, "sinks": 2, "impl": "taichi"}
        want = {"out_n": tikv.decode_attention(q, k, v, n, first_valid=first, **options)}
        want["out_lens"] = tikv.decode_attention(q, k, v, lens, first_valid=first, **options)
        same_bits(got, want)


@pytest.mark.parametrize("layout", ["NHD", "VLLM"])
def test_pages(arch, rng, layout):
    builder = tikv.GraphBuilder()
    builder.write_slots("k", "v", "k_pool", "v_pool", "slots", layout=layout)
    builder.paged_decode_attention("q", "k_pool", "v_pool", "tables", "lens", layout=layout, lse="lse")
    builder.paged_decode_attention("q", "k_pool", "v_pool", "tables", "n", layout=layout, out="all")
    graph = builder.compile()
    shapes = [(5, 4, 2, 8)] * 2 if layout == "NHD" else [(5, 2, 1, 4, 8), (5, 2, 8, 4)]
    pools = [oracle.numbers(rng, shape, np.float16) for shape in shapes]
    one, two = ([oracle.place(a.copy(), arch) for a in pools] for _ in range(2))
    for tables, lens in (([[3, 1], [0, 4]], [7, 2]), ([[0, 1], [2, -1]], [8, 4])):
        k, v = (oracle.place(oracle.numbers(rng, (2, 2, 8), np.float16), arch) for _ in "kv")
        q = oracle.place(oracle.numbers(rng, (2, 4, 8), np.float16), arch)
        slots = np.array([tables[b][(n - 1) // 4] * 4 + (n - 1) % 4 for b, n in enumerate(lens)])
        slots, tables, lens = (oracle.place(np.array(a), arch) for a in (slots, tables, lens))
        values = {"k": k, "v": v, "q": q, "slots": slots, "tables": tables, "lens": lens, "n": 3}
        got = graph.run(values | dict(zip(("k_pool", "v_pool"), one, strict=True)))
        tikv.write_slots(k, v, *two, slots, layout=layout)
        out, lse = tikv.paged_decode_attention(q, *two, tables, lens, layout=layout, return_lse=True)
        third = tikv.paged_decode_attention(q, *two, tables, 3, layout=layout)
        same_bits(got, {"out": out, "lse": lse, "all": third})
        for a, b in zip(one, two, strict=True):
            oracle.assert_same_bits(a, b)


def test_chosen_tokens(arch, rng):
    """Other tokens in each run, of caches and of pages; one that there is not is refused before a launch."""
    builder = tikv.GraphBuilder()
    builder.decode_attention("q", "k", "v", "n", indices="indices", lse="lse", mass="mass")
    builder.paged_decode_attention("q", "k_pool", "v_pool", "tables", "lens", indices="indices", out="paged")
    graph = builder.compile()
    caches = [oracle.place(oracle.numbers(rng, (2, 2, 12, 16), np.float32), arch) for _ in "kv"]
    pools = [oracle.place(oracle.numbers(rng, (6, 4, 2, 16), np.float32), arch) for _ in "kv"]
    tables, lens = (oracle.place(np.array(a), arch) for a in ([[3, 1, 0], [0, 4, 5]], [10, 9]))
    values = dict(zip(("k", "v", "k_pool", "v_pool", "tables", "lens"), (*caches, *pools, tables, lens), strict=True))
    for _ in range(2):
        q = oracle.place(oracle.numbers(rng, (2, 4, 16), np.float32), arch)
        indices = oracle.place(np.stack([rng.permutation(9)[:5] for _ in range(2)])[:, None], arch)
        got = graph.run(values | {"q": q, "n": 9, "indices": indices})
        out, lse, mass = tikv.decode_attention(q, *caches, 9, indices=indices, return_lse=True, return_mass=True)
        paged = tikv.paged_decode_attention(q, *pools, tables, lens, indices=indices)
        same_bits(got, {"out": out, "lse": lse, "mass": mass, "paged": paged})
    if arch != "cuda":
        with pytest.raises(tikv.PositionError, match=r"indices\[0, 0, 0\]=9 is not a token"):
            graph.run(values | {"q": q, "n": 9, "indices": np.full((2, 1, 5), 9)})


@pytest.mark.parametrize("owned", [False, True], ids=["caller", "owned"])
def test_the_fused_write(arch, rng, owned):
    angles = rng.standard_normal((16, 4)).astype(np.float32)
    how = tikv.NormRope(
        mode="norm_half", cos=oracle.place(np.cos(angles), arch), sin=oracle.place(np.sin(angles), arch)
    )
    builder = tikv.GraphBuilder()
    builder.write_qkv("qkv", "k_cache", "v_cache", num_q_heads=4, position="here", window=5, norm_rope=how)
    builder.write_qkv(
        "qkv", "k_pool", "v_pool", num_q_heads=4, slot_mapping="slots", rope_positions="turns", norm_rope=how,
        layout="NHD", out="q_pool",
    )  # fmt: skip
    graph = builder.compile()
    before = [oracle.random_bits(rng, shape, np.float32) for shape in [(2, 6, 8)] * 2 + [(3, 4, 2, 8)] * 2]
    one, two = ([own_copy(a, arch, owned) for a in before] for _ in range(2))
    names = ("k_cache", "v_cache", "k_pool", "v_pool")
    for here, slots, turns in ((0, [3, -1, 0], [3, 4, 15]), (12, [7, 8, 11], [0, 0, 1])):
        qkv = own_copy(oracle.numbers(rng, (3, 64), np.float32), arch, owned)
        slots, turns = (oracle.place(np.array(a), arch) for a in (slots, turns))
        values = {"qkv": qkv, "here": here, "slots": slots, "turns": turns}
        got = graph.run(values | dict(zip(names, one, strict=True)))
        q = tikv.write_qkv(qkv, *two[:2], num_q_heads=4, position=here, window=5, norm_rope=how)
        q_pool = tikv.write_qkv(
            qkv, *two[2:], num_q_heads=4, slot_mapping=slots, rope_positions=turns, norm_rope=how, layout="NHD"
        )
        same_bits(got, {"q": q, "q_pool": q_pool})
        for a, b in zip(one, two, strict=True):
            oracle.assert_same_bits(a, b)
    with pytest.raises(tikv.PositionError, match=r"rope_positions|16 positions"):
        graph.run(values | dict(zip(names, one, strict=True)) | {"here": 14})


def test_results_are_of_the_kind_of_the_queries(arch, rng):
    torch = pytest.importorskip("torch")
    builder = tikv.GraphBuilder()
    builder.decode_attention("q", "k", "v", "n", lse="lse")
    graph = builder.compile()
    q, k, v = oracle.numbers(rng, (1, 2, 8), np.float32), *oracle.numbers(rng, (2, 1, 1, 4, 8), np.float32)
    want, want_lse = tikv.decode_attention(q, k, v, 3, return_lse=True, impl="taichi")
    for make, kind in ((on_device, arrays.CacheArray), (torch.from_numpy, torch.Tensor), (np.copy, np.ndarray)):
        got = graph.run({"q": make(q), "k": k, "v": v, "n": 3})
        assert all(isinstance(a, kind) for a in got.values())
        same_bits(got, {"out": want, "lse": want_lse})


def test_arrays_that_share_a_buffer_are_told_apart(arch, rng):
    """K and V interleaved in one buffer at first, in two buffers of the same strides later."""
    builder = tikv.GraphBuilder()
    builder.copy_kv("k", "v", "k_cache", "v_cache", position="at")
    graph = builder.compile()
    buffers = [oracle.random_bits(rng, (2, 2, 6, 8), np.float32) for _ in range(2)]
    mine, theirs = ([oracle.place(b.copy(), arch) for b in buffers] for _ in range(2))
    for at, (i, j) in enumerate(((0, 0), (0, 1), (1, 0))):
        k, v = (oracle.place(oracle.numbers(rng, (1, 2, 8), np.float32), arch) for _ in "kv")
        graph.run({"k": k, "v": v, "k_cache": mine[i][:, 0], "v_cache": mine[j][:, 1], "at": at})
        tikv.copy_kv(k, v, theirs[i][:, 0], theirs[j][:, 1], position=at)
        for a, b in zip(mine, theirs, strict=True):
            oracle.assert_same_bits(a, b)


def test_backends_give_the_same_bits(arch, rng):
    builder = tikv.GraphBuilder()
    builder.copy_kv("k", "v", "k_rows", "v_rows", position="at")
    builder.decode_attention("q", "k_cache", "v_cache", "n", lse="lse")
    live = arrays.runtime_of()
    if not (live.is_spirv and live.engine.has_graphs):
        why = "by their address" if live.engine.has_graphs else "has no compiled graphs"
        with pytest.raises(tikv.ArchError, match=why):
            builder.compile(backend="ti.graph")
        assert builder.compile().backend == builder.compile(backend="launches").backend == "launches"
        return
    found = {}
    before = [oracle.numbers(rng, (1, 2, 9, 8), np.float16) for _ in "kv"]
    inputs = [oracle.numbers(rng, (1, 2, 8), np.float16) for _ in "kvq"]
    for backend in ("ti.graph", "launches"):
        graph = builder.compile(backend=backend)
        assert graph.backend == backend
        k_cache, v_cache = (arrays.to_device(a, live) for a in before)
        k_rows, v_rows = (a.restrided(a.shape[1:], a.strides[1:]) for a in (k_cache, v_cache))
        values = {"k_cache": k_cache, "v_cache": v_cache, "k_rows": k_rows, "v_rows": v_rows}
        values |= dict(zip(("k", "v", "q"), map(on_device, inputs), strict=True))
        for at in (3, 4):
            results = graph.run({**values, "at": at, "n": at + 1})
        found[backend] = [arrays.read_host(a, live) for a in (k_cache, v_cache)]
        found[backend] += [results[n].copy_to_host() for n in ("out", "lse")]
        launches = next(iter(graph._plans.values())).launches
        assert len(launches) == (1 if backend == "ti.graph" else 2)
        assert isinstance(launches[0], launch.TaichiGraph) == (backend == "ti.graph")
    for a, b in zip(*found.values(), strict=True):
        oracle.assert_same_bits(a, b)


@pytest.mark.archs("vulkan", "metal")
def test_the_public_launcher_gets_no_ti_graph(arch):
    builder = tikv.GraphBuilder()
    builder.copy("src", "cache", position=0)
    has_graphs = runtime.engine_in_use().has_graphs
    assert builder.compile().backend == ("ti.graph" if has_graphs else "launches")
    tikv.launch.choose_launcher("public")
    try:
        assert builder.compile().backend == "launches"
    finally:
        tikv.launch.choose_launcher(None)


def test_a_graph_is_compiled_once(arch):
    builder = tikv.GraphBuilder()
    builder.copy("src", "cache", position=0)
    graph = builder.compile()
    assert builder.compile() is graph
    builder.copy("src", "cache", position=1)
    assert builder.compile() is not graph


def test_prepare_leaves_arrays_alone(arch, rng):
    builder = tikv.GraphBuilder()
    builder.copy("src", "cache", position="at")
    builder.decode_attention("q", "k", "k", 3)
    graph = builder.compile()
    values = {"src": oracle.numbers(rng, (1, 1, 8), np.float32), "k": oracle.numbers(rng, (1, 1, 4, 8), np.float32)}
    values["q"] = values["src"].copy()
    before = oracle.random_bits(rng, (1, 4, 8), np.float32)
    values = {n: oracle.place(a, arch) for n, a in values.items()} | {"cache": oracle.place(before.copy(), arch)}
    with pytest.raises(tikv.CapacityError):
        graph.prepare(values | {"at": 4})
    assert graph.prepare(values | {"at": 3}) is None
    oracle.assert_same_bits(values["cache"], before)
    graph.run(values | {"at": 3})
    assert (oracle.bits(values["cache"]) != oracle.bits(before)).any()


def test_a_graph_keeps_no_array_alive(arch, rng):
    builder = tikv.GraphBuilder()
    builder.copy("src", "cache", position=0)
    builder.decode_attention("q", "k", "v", "n")
    graph = builder.compile()
    shapes = {"src": (1, 1, 8), "cache": (1, 2, 8), "q": (1, 2, 8), "k": (1, 2, 4, 8), "v": (1, 2, 4, 8)}
    values = {n: on_device(oracle.numbers(rng, shape, np.float32)) for n, shape in shapes.items()}
    refs = [weakref.ref(a._array.owner) for a in values.values()]
    for _ in range(2):
        graph.run(values | {"n": 2})
    del values
    gc.collect()
    assert [r() for r in refs] == [None] * len(refs)


def test_what_a_builder_refuses(arch):
    with pytest.raises(tikv.OptionError, match="no calls"):
        tikv.GraphBuilder().compile()
    builder = tikv.GraphBuilder()
    with pytest.raises(tikv.OptionError, match="name of an array"):
        builder.copy(np.ones(3), "cache", position=0)
    with pytest.raises(tikv.OptionError, match=r"unknown option windo\..*window"):
        builder.copy("src", "cache", position=0, windo=3)
    with pytest.raises(tikv.OptionError, match="impl='torch'"):
        builder.decode_attention("q", "k", "v", "lens", impl="torch")
    with pytest.raises(tikv.OptionError, match="unknown option return_lse"):
        builder.decode_attention("q", "k", "v", "lens", return_lse=True)
    with pytest.raises(tikv.DTypeError, match=r"position is 1\.5"):
        builder.copy("src", "cache", position=1.5)
    with pytest.raises(tikv.PositionError, match="seq_lens=-1"):
        builder.decode_attention("q", "k", "v", -1)
    with pytest.raises(tikv.OptionError, match="an array and a number"):
        builder.copy("src", "cache", position="src")
    with pytest.raises(tikv.OptionError, match="already taken"):
        builder.decode_attention("q", "k", "v", "lens", out="k")
    with pytest.raises(tikv.OptionError, match="already taken"):
        builder.decode_attention("q", "k", "v", "lens", out="o", lse="o")
    builder.decode_attention("q", "k", "v", "lens")
    with pytest.raises(tikv.OptionError, match="already taken"):
        builder.decode_attention("q", "k", "v", "lens")
    with pytest.raises(tikv.OptionError, match="an array and a number"):
        builder.copy("src", "cache", position="out")
    assert repr(builder) == "GraphBuilder(decode_attention)"
    with pytest.raises(tikv.OptionError, match="unknown backend"):
        builder.compile(backend="cuda")


def test_what_a_run_refuses_before_it_writes(arch, rng):
    builder = tikv.GraphBuilder()
    builder.copy("src", "cache", position="at")
    builder.write_slots("rows", "rows", "k_pool", "v_pool", "slots")
    builder.decode_attention("q", "k", "v", "lens")
    graph = builder.compile()
    shapes = {"src": (2, 1, 8), "cache": (1, 6, 8), "rows": (2, 1, 8), "k_pool": (2, 3, 1, 8), "v_pool": (2, 3, 1, 8)}
    shapes |= {"q": (1, 2, 8), "k": (1, 1, 5, 8), "v": (1, 1, 5, 8)}
    given = {n: oracle.numbers(rng, shape, np.float32) for n, shape in shapes.items()}
    good = {n: oracle.place(a, arch) for n, a in given.items()}
    good |= {"at": 2, "slots": np.array([0, 5]), "lens": np.array([3])}
    before = {n: oracle.to_numpy(good[n]).copy() for n in ("cache", "k_pool", "v_pool")}
    overlapping = good["cache"][:, :2].reshape(2, 1, 8)
    bad = (
        ({"at": None}, tikv.DTypeError, "at is None"),
        ({"at": np.zeros(2)}, tikv.DTypeError, "at is array"),
        ({"at": 5}, tikv.CapacityError, "position=5"),
        ({"at": -1}, tikv.PositionError, "at=-1"),
        ({"src": 3}, tikv.DTypeError, "src is int, which is not an array"),
        ({"q": "q"}, tikv.DTypeError, "which is not an array"),
        ({"src": good["src"][:, :, :3]}, tikv.ShapeError, "width"),
        ({"cache": good["cache"][0]}, tikv.ShapeError, "cache"),
        ({"src": oracle.place(np.zeros((2, 1, 8), np.float16), arch)}, tikv.DTypeError, "cannot copy float16"),
        ({"src": overlapping}, tikv.ShapeError, "overlap"),
        ({"slots": np.array([0, 6])}, tikv.PositionError, "slot_mapping"),
        ({"slots": np.array([0, 1, 2])}, tikv.ShapeError, "slot_mapping"),
        ({"lens": np.array([6])}, tikv.CapacityError, "capacity=5"),
        ({"lens": 6}, tikv.CapacityError, "capacity=5"),
        ({"lens": np.array([-1])}, tikv.PositionError, r"lengths\[0\] is -1"),
        ({"lens": np.array([1], np.float32)}, tikv.DTypeError, "lengths"),
    )
    for _ in range(2):  # before the graph has seen such arrays, and after
        for change, error, words in bad:
            with pytest.raises(error, match=words):
                graph.run(good | change)
        for n, want in before.items():
            oracle.assert_same_bits(good[n], want, what=n)
        with pytest.raises(tikv.OptionError, match="missing at"):
            graph.run({n: a for n, a in good.items() if n != "at"})
        with pytest.raises(tikv.OptionError, match="unknown extra"):
            graph.run(good | {"extra": 1})
        graph.run(good)
        before = {n: oracle.to_numpy(good[n]).copy() for n in before}


def test_a_graph_dies_with_its_runtime(python):
    script = """
import numpy as np, tikv
builder = tikv.GraphBuilder()
builder.copy("src", "cache", position=0)
graph = builder.compile()
values = {"src": np.ones((1, 1, 4), np.float32), "cache": np.zeros((1, 2, 4), np.float32)}
graph.run(values)
tikv.init("cpu")
try:
    graph.run(values)
except tikv.StaleRuntimeError as error:
    print("stale:", str(error).partition(":")[0])
assert builder.compile() is not graph
builder.compile().run(values)
"""
    assert "stale: Graph.run" in python(script).stdout.splitlines()


@pytest.mark.archs("cuda")
def test_a_number_is_not_captured(arch, known_ptx):
    import torch

    tikv.launch.choose_launcher("native")
    try:
        builder = tikv.GraphBuilder()
        builder.copy("src", "cache", position="at")
        graph = builder.compile()
        values = {"src": torch.ones(1, 2, 16, device="cuda"), "cache": torch.zeros(2, 4, 16, device="cuda"), "at": 1}
        graph.run(values)

        def capture():
            with torch.cuda.graph(torch.cuda.CUDAGraph()):
                torch.ones(1, device="cuda")  # a graph must not be empty
                graph.run(values)

        with pytest.raises(tikv.ArchError, match="baked"):
            capture()
    finally:
        tikv.launch.choose_launcher(None)


@pytest.mark.archs("cpu")
def test_another_thread_is_not_recorded(arch, monkeypatch):
    """Its call writes, though it comes while the first run of a graph with the same call is recorded."""
    new, caches, offsets = np.ones((1, 1, 1, 9), np.float16), np.zeros((2, 1, 1, 4, 9), np.float16), np.array([2])
    builder = tikv.GraphBuilder()
    builder.append_ragged("k", "v", "k_cache", "v_cache", "offsets")
    graph = builder.compile()
    real, others = launch.kernel, []

    def kernel(*arguments):
        if not others and launch.is_recording():
            others.append(threading.Thread(target=tikv.append_ragged, args=(new, new, *caches, offsets)))
            others[0].start()
            others[0].join(0.3)  # it may wait for the recording's lock
        return real(*arguments)

    monkeypatch.setattr(launch, "kernel", kernel)
    graph.prepare({"k": new, "v": new, "k_cache": caches[0], "v_cache": caches[1], "offsets": offsets})
    others[0].join()
    assert caches[:, 0, 0, :, 0].tolist() == [[0, 0, 1, 0]] * 2
