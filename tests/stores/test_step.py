"""A step of a store gives the bits of append and attend, follows its store, is captured, and dies with its runtime."""

import numpy as np
import oracle
import pytest

import tikv

pytestmark = pytest.mark.thorough

STORES = {
    "linear": {},
    "windows_and_sinks": {"window": [5, None], "sinks": 2},
    "int8_ring": {"dtype": "int8", "window": 4, "batch_size": 2},
}


@pytest.mark.full(unless=lambda case: case["case"] != "linear")
@pytest.mark.parametrize(("case", "layer"), [("linear", None), ("windows_and_sinks", 0), ("int8_ring", None)])
def test_a_step_gives_what_append_and_attend_give(arch, rng, case, layer):
    form = {"num_layers": 2, "num_kv_heads": 2, "head_dim": 8, "capacity": 12, "dtype": "float16", **STORES[case]}
    stepped, plain = tikv.KVCacheStore(**form), tikv.KVCacheStore(**form)
    batch = form.get("batch_size", 1)
    head_major = case == "linear"
    layout = "head_major" if head_major else "token_major"
    step = tikv.compile_step(stepped, layers=layer, layout=layout, return_lse=True, scale=0.4)
    layers = range(2) if layer is None else [layer]
    for tokens in (1, 2, 1, 1) if head_major else (1,) * 7:
        shape = (2, batch, 2, tokens, 8) if head_major else (2, batch, tokens, 2, 8)
        k, v = (oracle.numbers(rng, shape, np.float32) for _ in "kv")
        q = oracle.numbers(rng, (2, batch, 4, tokens, 8) if head_major else (2, batch, tokens, 4, 8), np.float16)
        k, v, q = (oracle.place(a if layer is None else a[layer], arch) for a in (k, v, q))
        found = step.run(k, v, q)
        for n, i in enumerate(layers):
            mine = [a if layer is not None else a[i] for a in (k, v, q)]
            plain.append(i, *mine[:2], layout=layout)
            # On CUDA the step does not know lengths, as in a captured step. Elsewhere a length on the host gives the
            # same bits; one case shows it, the others compile fewer kernels.
            lens = {"seq_lens": oracle.place(np.full(batch, plain.layer_length(i)), arch)}
            lens = {} if head_major and arch != "cuda" else lens
            want = plain.attend(i, mine[2], layout=layout, return_lse=True, impl="taichi", scale=0.4, **lens)
            for a, b in zip(found[n] if layer is None else found, want, strict=True):
                oracle.assert_same_bits(a, b, what=f"layer {i}")
        assert stepped.length == plain.length
        assert step.positions.copy_to_host().tolist() == [plain.length] * batch
    for i in layers:
        for a, b in zip(stepped.tokens(i), plain.tokens(i), strict=True):
            oracle.assert_same_bits(a, b)
        if case == "int8_ring":
            for a, b in zip(stepped.scales(i), plain.scales(i), strict=True):
                oracle.assert_same_bits(a, b)


def test_a_step_follows_what_else_happens_to_its_store(arch, rng):
    form = {"num_layers": 2, "num_kv_heads": 1, "head_dim": 8, "capacity": 9, "dtype": "float32", "window": [4, None]}
    stepped, plain = (tikv.KVCacheStore(**form, batch_size=2) for _ in range(2))
    step = tikv.compile_step(stepped)
    batch = 2

    def turn():
        k, v, q = (oracle.place(oracle.numbers(rng, (2, batch, 1, 1, 8), np.float32), arch) for _ in "kvq")
        q = q.reshape(2, batch, 1, 8)
        found = step.run(k, v, q)
        plain.append_all(k, v)
        for i in range(2):
            lens = {"seq_lens": oracle.place(np.full(batch, plain.length), arch)} if arch == "cuda" else {}
            oracle.assert_same_bits(found[i], plain.attend(i, q[i], impl="taichi", **lens), what=f"layer {i}")

    def both(change):
        change(stepped)
        change(plain)

    more = oracle.place(oracle.numbers(rng, (2, 2, 2, 1, 8), np.float32), arch)
    turn()
    both(lambda store: store.append_all(more, more))
    turn()
    turn()
    both(lambda store: store.trim(2))
    turn()
    turn()
    both(lambda store: store.select([1]))
    batch = 1
    turn()
    both(lambda store: store.reset())
    turn()
    assert stepped.length == plain.length == 1


def test_a_step_that_only_writes(arch, rng):
    form = {"num_layers": 2, "num_kv_heads": 2, "head_dim": 8, "capacity": 12, "dtype": "float16", "window": [4, None]}
    stepped, plain = tikv.KVCacheStore(**form), tikv.KVCacheStore(**form)
    step = tikv.compile_step(stepped, attend=False)
    for _ in range(6):
        k, v = (oracle.place(oracle.numbers(rng, (2, 1, 2, 8), np.float32), arch) for _ in "kv")
        assert step.run(k, v) is None
        plain.append_all(k, v)
    for i in range(2):
        for a, b in zip(stepped.tokens(i), plain.tokens(i), strict=True):
            oracle.assert_same_bits(a, b)


def test_what_a_step_refuses(arch, rng):
    store = tikv.KVCacheStore(num_layers=2, num_kv_heads=1, head_dim=4, capacity=2, dtype="float32")
    with pytest.raises(tikv.PositionError):
        tikv.compile_step(store, layers=2)
    with pytest.raises(tikv.OptionError, match="layout"):
        tikv.compile_step(store, layout="NHD")
    with pytest.raises(tikv.OptionError, match="no step"):
        tikv.compile_step(np.zeros(3))
    step = tikv.compile_step(store)
    row = oracle.place(oracle.numbers(rng, (2, 1, 1, 1, 4), np.float32), arch)
    q = row.reshape(2, 1, 1, 4)
    with pytest.raises(tikv.OptionError, match="q is missing"):
        step.run(row, row)
    with pytest.raises(tikv.OptionError, match="q is given"):
        tikv.compile_step(store, attend=False).run(row, row, q)
    with pytest.raises(tikv.ShapeError):
        step.run(row[:1], row, q)
    with pytest.raises(tikv.ShapeError):
        step.run(row, row, q[:, :, :, :2])
    step.prepare(row, row, q)
    assert store.length == 0
    assert step.positions.copy_to_host().tolist() == [0]
    step.run(row, row, q)
    store.append(0, row[0], row[0])
    with pytest.raises(tikv.PositionError, match=r"2 in layer 0, 1 in layer 1.*align"):
        step.run(row, row, q)
    store.append(1, row[1], row[1])
    before = [oracle.to_numpy(store.keys(i)).copy() for i in range(2)]
    with pytest.raises(tikv.CapacityError, match="capacity=2"):
        step.run(row, row, q)
    assert store.length == 2
    for i in range(2):
        oracle.assert_same_bits(store.keys(i), before[i])
    assert "all layers" in repr(step)
    assert "layer 1" in repr(tikv.compile_step(store, layers=1))


def test_a_step_dies_with_its_runtime(python):
    script = """
import numpy as np, tikv
store = tikv.KVCacheStore(num_layers=1, num_kv_heads=1, head_dim=4, capacity=4, dtype="float32")
step = tikv.compile_step(store, layers=0)
row = np.ones((1, 1, 4), np.float32)
step.run(row, row, row)
tikv.init("cpu")
for run in (lambda: step.run(row, row, row), lambda: tikv.compile_step(store)):
    try:
        run()
    except tikv.StaleRuntimeError as error:
        print("stale:", str(error).partition(":")[0])
"""
    found = [line for line in python(script).stdout.splitlines() if "stale" in line]
    assert found == ["stale: Step.run", "stale: compile_step"]


@pytest.mark.archs("cuda")
def test_a_step_is_captured(arch, rng, known_ptx):
    """A CUDA graph of a step's run is replayed: the step itself moves the positions on."""
    import torch

    def capture(call):
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            torch.ones(1, device="cuda")  # a graph must not be empty
            call()

    tikv.launch.choose_launcher("native")
    try:
        form = {
            "num_layers": 2,
            "num_kv_heads": 2,
            "head_dim": 16,
            "capacity": 64,
            "dtype": "float16",
            "window": [9, None],
        }
        stepped, plain = tikv.KVCacheStore(**form), tikv.KVCacheStore(**form)
        step = tikv.compile_step(stepped)
        feed = torch.from_numpy(oracle.numbers(rng, (12, 2, 2, 1, 1, 2, 16), np.float32)).cuda()
        queries = torch.from_numpy(oracle.numbers(rng, (12, 2, 1, 4, 16), np.float16)).cuda()
        k, v, q = feed[0, 0].clone(), feed[0, 1].clone(), queries[0].clone()
        with pytest.raises(tikv.ArchError, match=r"prepare|before"):
            capture(lambda: step.run(k, v, q))
        torch.cuda.synchronize()
        step.prepare(k, v, q)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = step.run(k, v, q)
        assert stepped.length == 0
        for n in range(12):
            for to, source in ((k, feed[n, 0]), (v, feed[n, 1]), (q, queries[n])):
                to.copy_(source)
            graph.replay()
            plain.append_all(k, v)
            lens = torch.full((1,), n + 1, device="cuda")
            for i in range(2):
                oracle.assert_same_bits(out[i], plain.attend(i, q[i], seq_lens=lens, impl="taichi"), what=f"token {n}")
        stepped.advance(12)
        assert step.positions.copy_to_host().tolist() == [12]
        assert stepped.length == 12
    finally:
        tikv.launch.choose_launcher(None)


@pytest.mark.archs("cpu", "cuda")
def test_a_step_of_all_layers_takes_queries_of_all_layers(arch):
    store = tikv.KVCacheStore(num_layers=2, num_kv_heads=1, head_dim=16, capacity=4, dtype="float32")
    step = tikv.compile_step(store)
    k, q = (oracle.place(np.ones(shape, np.float32), arch) for shape in ((2, 1, 1, 1, 16), (3, 1, 1, 16)))
    for wrong in (q[:1], q):
        with pytest.raises(tikv.ShapeError, match="the number of layers of q"):
            step.run(k, k, wrong)
    assert store.length == 0
    step.run(k, k, q[:2])
    assert store.length == 1
