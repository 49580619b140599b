"""A decode step as one graph, as the same calls one by one, and on CUDA as a replay of the graph that was captured.

Contexts are short, so that what is timed is the calls. Each step is checked first: the graph gives the calls' bits.
"""

import numpy as np
import oracle
import pytest
import shapes
from capture import captured

import tikv
from tikv import arrays, dtypes, runtime
from tikv.tools import roofline

PAGE = 16
SLOTS = 64  # of each context, all of them in use


def place(array, arch):
    """An array in memory that a launch reads in place: the library's own on Vulkan and Metal."""
    if arch in ("cpu", "cuda"):
        return oracle.place(array, arch)
    live = runtime.current()
    return arrays.CacheArray(arrays.to_device(array, live), live)


class Step:
    """A decode step in two forms over the same rows: `forms` are their calls, `written` is what one of them wrote."""

    def __init__(self, arch, rng, smoke):
        self.heads, self.width, self.layers = shapes.SMOKE if smoke else shapes.MODELS["2x64"]
        if arch == "vulkan":
            self.layers = min(4, self.layers)  # a CPU computes them, most of the time
        self.arch, self.rng = arch, rng
        self.launched_layers = 1

    def rows(self, *shape):
        return place(oracle.numbers(self.rng, shape, np.float16), self.arch)

    def zeros(self, *shape):
        return place(np.zeros(shape, np.float16), self.arch)

    @property
    def nbytes(self):
        """K and V that are written, and those that attention reads."""
        new = roofline.bytes_moved(1, self.heads, self.width, *[dtypes.float16] * 2, num_layers=self.launched_layers)
        return new + SLOTS * new // 2


class Prefixed(Step):
    """Write a token, attend to a shared prefix and to the sequence's own tokens, merge both: positions on the host."""

    case = "write, attend twice, merge"
    captures = False

    def __init__(self, arch, rng, smoke):
        super().__init__(arch, rng, smoke)
        heads, width, own = self.heads, self.width, SLOTS // 2
        flat = {n: self.zeros(heads, own, width) for n in ("k_rows", "v_rows")}
        self.given = {"q": self.rows(1, 4 * heads, width), "k": self.rows(1, heads, width)}
        self.given |= {"v": self.rows(1, heads, width), **flat}
        for name, cache in flat.items():  # the same memory, as attention sees it
            self.given[name.replace("rows", "cache")] = self.batched(cache)
        self.given |= {"k_prefix": self.rows(1, heads, own, width), "v_prefix": self.rows(1, heads, own, width)}
        builder = tikv.GraphBuilder()
        builder.copy_kv("k", "v", "k_rows", "v_rows", position="position")
        builder.decode_attention("q", "k_cache", "v_cache", "length", out="own", lse="own_lse")
        builder.decode_attention("q", "k_prefix", "v_prefix", own, out="shared", lse="shared_lse")
        builder.merge_states("own", "own_lse", "shared", "shared_lse", out="out", lse="lse")
        graph = builder.compile()
        values = self.given | {"position": own - 1, "length": own}

        def run_graph():
            found = graph.run(values)
            return found["out"], found["lse"]

        def run_calls():
            g = self.given
            tikv.copy_kv(g["k"], g["v"], g["k_rows"], g["v_rows"], position=own - 1)
            options = {"return_lse": True, "impl": "taichi"}
            first = tikv.decode_attention(g["q"], g["k_cache"], g["v_cache"], own, **options)
            second = tikv.decode_attention(g["q"], g["k_prefix"], g["v_prefix"], own, **options)
            return tikv.merge_states(*first, *second)

        self.forms = {"graph": run_graph, "calls": run_calls}

    def batched(self, cache):
        if self.arch in ("cpu", "cuda"):
            return cache[None]
        array = cache.view_for("bench")
        return arrays.CacheArray(
            array.restrided((1, *array.shape), (array.strides[0], *array.strides)), runtime.current()
        )

    def written(self, form):
        return [self.given[n] for n in ("k_rows", "v_rows")]


class Paged(Step):
    """Write a token of each sequence into its page, attend through the block table: all indices on the device."""

    case = "write_slots, paged attention"
    captures = True

    def __init__(self, arch, rng, smoke):
        super().__init__(arch, rng, smoke)
        pages = SLOTS // PAGE
        pools = [self.zeros(pages, PAGE, self.heads, self.width) for _ in "kv"]
        rows = [self.rows(1, self.heads, self.width) for _ in "kv"]
        table = rng.permutation(pages).astype(np.int32)[None]
        slot, lens = np.array([table[0, -1] * PAGE + PAGE - 1]), np.array([SLOTS], np.int32)
        slot, table, lens = (place(a, arch) for a in (slot, table, lens))
        q = self.rows(1, 4 * self.heads, self.width)
        self.pools = pools
        builder = tikv.GraphBuilder()
        builder.write_slots("k", "v", "k_pool", "v_pool", "slots")
        builder.paged_decode_attention("q", "k_pool", "v_pool", "tables", "lens")
        graph = builder.compile()
        values = {"k": rows[0], "v": rows[1], "k_pool": pools[0], "v_pool": pools[1], "q": q}
        values |= {"slots": slot, "tables": table, "lens": lens}

        def run_graph():
            return (graph.run(values)["out"],)

        def run_calls():
            tikv.write_slots(*rows, *pools, slot)
            return (tikv.paged_decode_attention(q, *pools, table, lens),)

        self.forms = {"graph": run_graph, "calls": run_calls}

    def written(self, form):
        return self.pools


class Stored(Step):
    """`tikv.compile_step` against the store's own calls, over rings, so that any number of steps fits."""

    captures = True

    def __init__(self, arch, rng, smoke, layer):
        super().__init__(arch, rng, smoke)
        self.case = "compile_step, 1 layer" if layer is not None else f"compile_step, {self.layers} layers"
        self.launched_layers = self.layers if layer is None else 1
        form = {"num_layers": self.layers, "num_kv_heads": self.heads, "head_dim": self.width}
        self.stores = {n: tikv.KVCacheStore(**form, capacity=SLOTS, window=SLOTS) for n in ("graph", "calls")}
        lead = (self.layers,) if layer is None else ()
        k, v = (self.rows(*lead, 1, 1, self.heads, self.width) for _ in "kv")
        q = self.rows(*lead, 1, 4 * self.heads, self.width)
        queries = [self.layer_of(q, i) for i in range(self.layers)] if layer is None else [q]
        step, store = tikv.compile_step(self.stores["graph"], layers=layer), self.stores["calls"]
        self.written_layers = range(self.layers) if layer is None else [layer]

        def run_graph():
            found = step.run(k, v, q)
            return tuple(found) if layer is None else (found,)

        def run_calls():
            if layer is None:
                store.append_all(k, v)
            else:
                store.append(layer, k, v)
            layers = zip(self.written_layers, queries, strict=True)
            return tuple(store.attend(i, mine, impl="taichi") for i, mine in layers)

        self.forms = {"graph": run_graph, "calls": run_calls}

    def layer_of(self, q, i):
        if self.arch in ("cpu", "cuda"):
            return q[i]
        array = q.view_for("bench")
        at = array.restrided(array.shape[1:], array.strides[1:], i * array.strides[0])
        return arrays.CacheArray(at, runtime.current())

    def written(self, form):
        return [a for i in self.written_layers for a in self.stores[form].tokens(i)]


STEPS = {
    "prefixed": Prefixed,
    "paged": Paged,
    "one_layer": lambda *given: Stored(*given, 0),
    "all_layers": lambda *given: Stored(*given, None),
}


@pytest.mark.parametrize("kind", STEPS)
def bench_decode_step(arch, rng, kind, sizes, smoke, timed, by_turns, benchmark):
    step = STEPS[kind](arch, rng, smoke)
    for _ in range(3):
        found = {name: call() for name, call in step.forms.items()}
    for got, want in zip(found["graph"], found["calls"], strict=True):
        got, want = oracle.to_numpy(got), oracle.to_numpy(want)
        assert np.abs(want).max() > 0
        if arch == "cuda" and isinstance(step, Stored):  # only the device knows a step's length: it may split otherwise
            np.testing.assert_allclose(got.astype(np.float32), want.astype(np.float32), atol=2e-3)
        else:
            oracle.assert_same_bits(got, want, what=kind)
    if isinstance(step, Stored):
        for mine, theirs in zip(step.written("graph"), step.written("calls"), strict=True):
            oracle.assert_same_bits(mine, theirs, what=kind)
    assert all(np.abs(oracle.to_numpy(a)).max() > 0 for a in step.written("graph"))
    if arch == "cuda" and step.captures:
        step.forms["captured"] = captured(step.forms["graph"])
    calls = max(1, sizes.calls // (4 * step.launched_layers))
    timed(step.forms["graph"], op="decode step", peer="tikv", case=step.case, bytes_moved=step.nbytes, calls=calls)
    if not smoke:
        forms_us, return_us = by_turns(step.forms, calls)
        benchmark.extra_info.update(forms_us=forms_us, return_us=return_us)
