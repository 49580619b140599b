"""Positions in device memory, and what CUDA adds: streams, graphs, both launchers. The former run on every back end."""

import collections
import threading
import types

import ml_dtypes
import numpy as np
import pytest
from oracle import assert_same_bits, numbers, place, random_bits, to_numpy

import tikv
from tikv import launch
from tikv.ops.attention import launches

pytestmark = pytest.mark.full(each_value=True)

H, D = 2, 8


def index_array(values, arch):
    return place(np.array(values, np.int32), arch)


def new_store(**options):
    options = {"num_layers": 2, "num_kv_heads": H, "head_dim": D, "capacity": 12, "dtype": "float32", **options}
    return tikv.KVCacheStore(**options)


def contents(store):
    """Every slot of every layer, filled or not, as the raw memory holds it."""
    arrays = [a for i in range(store.num_layers) for a in (store.keys(i), store.values(i))]
    if store.dtype.name == "int8":
        arrays += [a for i in range(store.num_layers) for a in store.scales(i)]
    return [to_numpy(a) for a in arrays]


OPTIONS = {
    "linear": {},
    "ring": {"window": 5},
    "sinks": {"window": 5, "sinks": 2},
    "mixed": {"window": [None, 4]},
    "batch": {"batch_size": 3, "window": 5},
    "float16": {"dtype": "float16"},
    "int8": {"dtype": "int8", "window": 5},
}


@pytest.mark.parametrize("stacked", [False, True], ids=["append", "append_all"])
@pytest.mark.parametrize("case", OPTIONS)
def test_positions_on_the_device_write_what_lengths_on_the_host_write(arch, rng, case, stacked):
    batch = OPTIONS[case].get("batch_size", 1)
    by_host, by_device = new_store(**OPTIONS[case]), new_store(**OPTIONS[case])
    for tokens in (3, 1, 1, 2, 1):
        rows = [numbers(rng, (2, batch, tokens, H, D), np.float32) for _ in "kv"]
        positions = index_array([by_host.length] * batch, arch)
        if stacked:
            k, v = (place(a, arch) for a in rows)
            by_host.append_all(k, v)
            by_device.append_all(k, v, positions=positions)
        else:
            for layer in range(2):
                k, v = (place(a[layer], arch) for a in rows)
                by_host.append(layer, k, v)
                by_device.append(layer, k, v, positions=positions)
        assert by_device.length == by_host.length - tokens
        by_device.advance(tokens)
        assert by_device.length == by_host.length
    for layer in range(2):
        for name, got, want in zip("kv", by_device.tokens(layer), by_host.tokens(layer), strict=True):
            assert_same_bits(to_numpy(got), to_numpy(want), what=f"{name} of layer {layer}")


def test_each_sequence_has_its_own_position(arch, rng):
    store = new_store(batch_size=3, num_layers=1)
    k, v = (numbers(rng, (3, 2, H, D), np.float32) for _ in "kv")
    want = [a.copy() for a in contents(store)]
    store.append(0, place(k, arch), place(v, arch), positions=index_array([4, 0, 9], arch))
    for cache, rows in zip(want, (k, v), strict=True):
        for b, at in enumerate((4, 0, 9)):
            cache[b, :, at : at + 2] = rows[b].swapaxes(0, 1)
    for got, expected in zip(contents(store), want, strict=True):
        assert_same_bits(got, expected)


@pytest.mark.parametrize("at", [-1, -2, 11, 12, 2**31 - 1, -(2**31)])
def test_positions_outside_are_skipped(arch, rng, at):
    store = new_store(num_layers=1)
    k, v = (numbers(rng, (2, H, D), np.float32) for _ in "kv")
    want = [a.copy() for a in contents(store)]
    store.append(0, place(k, arch), place(v, arch), positions=index_array([at], arch))
    for cache, rows in zip(want, (k, v), strict=True):
        for t in range(2):
            if 0 <= at + t < 12:
                cache[0, :, at + t] = rows[t]
    for got, expected in zip(contents(store), want, strict=True):
        assert_same_bits(got, expected)


def test_positions_are_checked(arch, rng):
    store = new_store(num_layers=1)
    k, v = (place(numbers(rng, (2, H, D), np.float32), arch) for _ in "kv")
    with pytest.raises(tikv.ShapeError, match="the length of positions is 2 where 1 is needed"):
        store.append(0, k, v, positions=index_array([0, 1], arch))
    with pytest.raises(tikv.DTypeError, match="positions"):
        store.append(0, k, v, positions=place(np.zeros(1, np.float32), arch))
    with pytest.raises(tikv.CapacityError, match=r"KVCacheStore\.advance"):
        store.advance(13)
    with pytest.raises(tikv.PositionError):
        store.advance(-1)
    assert store.length == 0


# --- CUDA


@pytest.fixture(params=["native", "direct", "public"])
def launcher(request, arch):
    """Each launcher in turn; calls bound by another are forgotten."""
    live = tikv.arrays.runtime_of()
    if request.param == "native":
        request.getfixturevalue("known_ptx")
    launch.choose_launcher(request.param)
    live.plans.clear()
    yield request.param
    launch.choose_launcher(None)
    live.plans.clear()


@pytest.fixture
def native(arch, known_ptx):
    """The native launcher, whatever this run was started with; missing is a failure."""
    live = tikv.arrays.runtime_of()
    launch.choose_launcher("native")
    live.plans.clear()
    yield live
    launch.choose_launcher(None)
    live.plans.clear()


def capture(call):
    """Capture one call into a CUDA graph."""
    import torch

    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        torch.ones(1, device="cuda")  # a graph must not be empty
        call()


def writes(rng, arch):
    """One call of each form of the copy, and of the fused write: what they wrote."""
    f32, f16, bf16 = np.float32, np.float16, ml_dtypes.bfloat16
    wrote = []
    for src, dst, width in ((f32, f32, 128), (f32, f16, 128), (f32, bf16, 128), (bf16, f32, 64), (f16, f16, 7)):
        for window in (None, 5):
            cache = place(random_bits(rng, (3, 6, width), dst), arch)
            tikv.copy(
                place(numbers(rng, (4, 3, width), src), arch), cache, position=2 if window is None else 9, window=window
            )
            wrote.append(cache)
    for layout, shape in (("NHD", (4, 16, 2, 64)), ("HND", (4, 2, 16, 64))):
        pools = [place(random_bits(rng, shape, f16), arch) for _ in "kv"]
        rows = [place(numbers(rng, (5, 2, 64), f16), arch) for _ in "kv"]
        tikv.write_slots(*rows, *pools, place(np.array([63, -1, 0, 17, 5]), arch), layout=layout)
        wrote += pools
    pools = [place(random_bits(rng, (4, 16, 2, 64), np.int8), arch) for _ in "kv"]
    scales = [place(random_bits(rng, (4, 16, 2), f16), arch) for _ in "kv"]
    rows = [place(numbers(rng, (5, 2, 64), f32), arch) for _ in "kv"]
    slots = place(np.array([63, -1, 0, 17, 5]), arch)
    tikv.write_slots(*rows, *pools, slots, k_scale=scales[0], v_scale=scales[1])
    for mode, src, width in (("norm_half", f32, 128), ("norm_interleaved", f32, 80), ("norm_half", bf16, 64)):
        angle = rng.uniform(-3, 3, (9, width // 2))
        tables = {"cos": np.cos(angle), "sin": np.sin(angle)}
        weights = {name: numbers(rng, (width,), f32) for name in ("q_weight", "k_weight")}
        how = tikv.NormRope(mode=mode, **{n: place(a.astype(f32), arch) for n, a in (tables | weights).items()})
        caches = [place(random_bits(rng, (2, 8, width), src), arch) for _ in "kv"]
        qkv = place(numbers(rng, (7, 8 * width), src), arch)
        wrote += [tikv.write_qkv(qkv, *caches, num_q_heads=4, norm_rope=how, position=1), *caches]
    return [to_numpy(a) for a in wrote + pools + scales]


@pytest.mark.archs("cuda")
def test_both_launchers_give_the_same_bits(arch, known_ptx):
    found = {}
    for name in ("native", "direct"):
        launch.choose_launcher(name)
        tikv.arrays.runtime_of().plans.clear()
        found[name] = writes(np.random.default_rng(1), arch)
    launch.choose_launcher(None)
    tikv.arrays.runtime_of().plans.clear()
    for i, (a, b) in enumerate(zip(found["native"], found["direct"], strict=True)):
        assert_same_bits(a, b, what=f"buffer {i}")


@pytest.mark.archs("cuda")
def test_a_call_runs_in_the_order_of_torchs_current_stream(launcher, rng):
    import torch

    wanted = [torch.from_numpy(numbers(rng, (4, H, D), np.float32)) for _ in "kv"]
    given = [torch.zeros(4, H, D, device="cuda") for _ in "kv"]
    caches = [torch.zeros(H, 16, D, device="cuda") for _ in "kv"]
    late = [w.cuda() for w in wanted]
    busy = torch.rand(2048, 2048, device="cuda")
    tikv.copy_kv(*given, *caches, position=0)  # compiled before anything is timed by sleeping
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    for _ in range(8):
        busy = busy @ busy * 1e-3  # work on the default stream, beside
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        for a, b in zip(given, late, strict=True):
            a.copy_(b)
        tikv.copy_kv(*given, *caches, position=3)
        for a in given:
            a.zero_()  # a call that ran late would copy these
        seen = [c.clone() for c in caches]
    stream.synchronize()
    for cache, rows in zip(seen, wanted, strict=True):
        expected = torch.zeros(H, 16, D)
        expected[:, 3:7] = rows.transpose(0, 1)
        assert_same_bits(to_numpy(cache), expected.numpy())


@pytest.mark.archs("cuda")
def test_a_stream_may_be_given(native, rng):
    import torch

    stream = torch.cuda.Stream()
    given, late = torch.zeros(2, H, D, device="cuda"), torch.rand(2, H, D, device="cuda")
    cache = torch.zeros(H, 4, D, device="cuda")
    tikv.copy(given, cache, position=0)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        given.copy_(late)
    with launch.use_stream(stream.cuda_stream):
        tikv.copy(given, cache, position=1)
    stream.synchronize()
    assert_same_bits(to_numpy(cache[:, 1:3]), to_numpy(late.transpose(0, 1)))


@pytest.mark.archs("cuda")
def test_threads_of_their_own_may_call(native, rng):
    import torch

    caches = [torch.zeros(H, 4, D, device="cuda") for _ in range(4)]
    src = torch.rand(2, H, D, device="cuda")
    failures = []

    def call(cache):
        try:
            tikv.copy(src, cache, position=1)
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=call, args=(cache,)) for cache in caches]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    torch.cuda.synchronize()
    for cache in caches:
        assert_same_bits(to_numpy(cache[:, 1:3]), to_numpy(src.transpose(0, 1)))


@pytest.mark.archs("cuda")
def test_host_arrays_are_taken_as_well(launcher, rng):
    src = numbers(rng, (2, H, D), np.float32)
    cache = np.zeros((H, 4, D), np.float32)
    tikv.copy(src, cache, position=1)
    assert_same_bits(cache[:, 1:3], src.swapaxes(0, 1))


@pytest.mark.archs("cuda")
def test_a_store_freed_while_work_is_in_flight_harms_nobody(native, rng):
    import torch

    def make():
        return new_store(num_layers=1, capacity=4096, head_dim=128)

    k = torch.full((4096, H, 128), 7.0, device="cuda")
    make().append(0, k, k)
    torch.cuda.synchronize()
    store = make()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        store.append(0, k, k)
    del store
    others = [make() for _ in range(4)]
    torches = [a.torch() for other in others for a in (other.keys(0), other.values(0))]
    for a in torches:
        a.fill_(3.0)
    torch.cuda.synchronize()
    assert all(bool((a == 3.0).all()) for a in torches)


@pytest.mark.archs("cuda")
def test_a_captured_step_is_replayed_a_thousand_times(native, rng):
    import torch

    layers, steps = 4, 1000
    store = new_store(num_layers=layers, capacity=1100, window=[None, 37, None, 64], sinks=3, dtype="float16")
    pool = torch.zeros(2, 80, 16, H, D, dtype=torch.float16, device="cuda")
    positions, slots = store.positions_on_device().torch(), torch.zeros(1, dtype=torch.int64, device="cuda")
    feed = torch.from_numpy(numbers(rng, (steps + 1, 2, layers, 1, 1, H, D), np.float32)).cuda()
    k, v = (torch.zeros(layers, 1, 1, H, D, device="cuda") for _ in "kv")
    count = torch.zeros(1, dtype=torch.int64, device="cuda")

    def step():
        row = feed.index_select(0, count)[0]
        k.copy_(row[0])
        v.copy_(row[1])
        for layer in range(layers):
            store.append(layer, k[layer], v[layer], positions=positions)
        halves = k[0, 0].half(), v[0, 0].half()
        tikv.write_slots(*halves, pool[0], pool[1], slots)
        positions.add_(1)
        slots.add_(1)
        count.add_(1)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    for a in (positions, slots, count):
        a.zero_()
    keys = store.keys(0).torch()
    before = keys.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for _ in range(steps):
        graph.replay()
    torch.cuda.synchronize()
    store.advance(steps)
    host = new_store(num_layers=layers, capacity=1100, window=[None, 37, None, 64], sinks=3, dtype="float16")
    for n in range(steps):
        for layer in range(layers):
            host.append(layer, feed[n, 0, layer], feed[n, 1, layer])
    for layer in range(layers):
        for got, want in zip(store.tokens(layer), host.tokens(layer), strict=True):
            assert_same_bits(to_numpy(got), to_numpy(want), what=f"layer {layer}")
    rows = to_numpy(feed[:steps, :, 0, 0, 0].half())
    whole = np.zeros((2, 80 * 16, H, D), np.float16)
    whole[:, :steps] = rows.swapaxes(0, 1)
    assert_same_bits(to_numpy(pool), whole.reshape(2, 80, 16, H, D))
    assert positions.tolist() == [steps]
    assert_same_bits(to_numpy(keys[:, :, steps:]), to_numpy(before[:, :, steps:]), what="slots that no step reaches")


@pytest.mark.archs("cuda")
def test_what_a_graph_would_bake_in_is_refused(native, rng):
    import torch

    store = new_store(num_layers=1)
    k = torch.rand(1, H, D, device="cuda")
    cache = torch.zeros(H, 4, D, device="cuda")
    pool = tikv.PagedKVCacheStore(num_layers=1, num_kv_heads=H, head_dim=D, num_blocks=4, dtype="float32")
    seq = pool.add()
    pool.append(0, k, k, [seq])
    uneven = new_store(num_layers=1, capacity=64)
    uneven.append(0, *torch.rand(2, 3, H, D, device="cuda"))
    uneven.compact(0, [[[True, True, True], [False, True, False]]])
    calls = [
        lambda: tikv.copy(k, cache, position=0),
        lambda: store.append(0, k, k),
        lambda: store.append_all(k[None], k[None]),
        lambda: store.tokens(0),
        lambda: pool.tokens(0, seq),
        lambda: tikv.linearize(cache, torch.zeros_like(cache), length=7),
        lambda: tikv.rotate(cache[None], [0, 1, 2, 3], [3, 2, 1, 0], tikv.Rope([0.5])),
        lambda: uneven.append(0, k, k),
    ]
    for call in calls:
        call()
    torch.cuda.synchronize()
    length = store.length
    for call in calls:
        with pytest.raises(tikv.ArchError, match="baked into the CUDA graph"):
            capture(call)
        torch.cuda.synchronize()
    assert store.length == length
    for call in calls:
        call()


@pytest.mark.archs("cuda")
def test_a_kernel_is_not_loaded_while_a_graph_is_captured(native, rng):
    import torch

    store = new_store(num_layers=1, head_dim=24)  # a width that no other test has compiled
    k = torch.rand(1, H, 24, device="cuda")
    positions = store.positions_on_device().torch()
    with pytest.raises(tikv.ArchError, match="Run the step once before"):
        capture(lambda: store.append(0, k, k, positions=positions))
    torch.cuda.synchronize()
    store.append(0, k, k, positions=positions)
    assert_same_bits(to_numpy(store.keys(0))[0, :, 0], to_numpy(k)[0])


@pytest.mark.archs("cuda")
def test_taichis_launcher_is_refused_in_a_graph(arch, rng):
    import torch

    launch.choose_launcher("direct")
    try:
        store = new_store(num_layers=1)
        k = torch.rand(1, H, D, device="cuda")
        positions = store.positions_on_device().torch()
        store.append(0, k, k, positions=positions)
        torch.cuda.synchronize()
        with pytest.raises(tikv.ArchError, match="cannot capture"):
            capture(lambda: store.append(0, k, k, positions=positions))
    finally:
        launch.choose_launcher(None)


@pytest.mark.archs("cpu")
def test_memory_between_launches_stays_where_a_graph_may_use_it(arch, monkeypatch):
    """A launch on a stream of its own may have been captured, with the address of what there was then."""
    scratch = collections.defaultdict(list)
    live = types.SimpleNamespace(is_cuda=True, index=0, side_streams=set(), scratch=scratch, synchronize=lambda: None)
    made = lambda nbytes, live: types.SimpleNamespace(nbytes=nbytes)  # noqa: E731
    monkeypatch.setattr(launches, "lasting_memory", made)
    monkeypatch.setattr(launches, "Memory", made)
    streams = types.SimpleNamespace(is_captured=lambda live: False, stream_of=lambda live: 3)
    monkeypatch.setattr(launches, "launch", streams)
    first = launches.scratch_of(live, 1)
    assert launches.scratch_of(live, first.nbytes) is first
    second = launches.scratch_of(live, first.nbytes + 1)
    assert live.scratch == {3: [second]}, "nothing was captured"
    live.side_streams.add(7)
    third = launches.scratch_of(live, second.nbytes + 1)
    assert third.nbytes == 2 * second.nbytes
    assert live.scratch == {3: [second, third]}
    streams.stream_of = lambda live: 4
    fourth = launches.scratch_of(live, 1)
    assert live.scratch[4] == [fourth], "launches on another stream may overlap"


@pytest.mark.archs("cuda")
def test_a_captured_attention_keeps_its_memory_between_launches(arch):
    """Attention over more, which needs more of it, comes after the capture; then others use what memory is free."""
    torch = pytest.importorskip("torch")
    tikv.runtime.current().scratch.clear()
    k, v = torch.randn(2, 1, 1, 4096, 64, device="cuda")
    q, lens = torch.randn(1, 8, 64, device="cuda"), torch.tensor([4096], device="cuda")
    want = tikv.decode_attention(q, k, v, lens, num_splits=8)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        tikv.decode_attention(q, k, v, lens, num_splits=8)
    torch.cuda.current_stream().wait_stream(side)
    graph, out = torch.cuda.CUDAGraph(), torch.empty_like(want)
    with torch.cuda.graph(graph):
        tikv.decode_attention(q, k, v, lens, num_splits=8, out=out)
    large = torch.randn(2, 32, 1, 4096, 64, device="cuda")
    tikv.decode_attention(torch.randn(32, 64, 64, device="cuda"), *large, 4096, num_splits=16)
    others = [torch.full((1 << 14,), 7.0, device="cuda") for _ in range(64)]
    graph.replay()
    assert torch.equal(out, want)
    assert all(bool((a == 7).all()) for a in others)


@pytest.mark.archs("cuda")
def test_attention_on_two_streams_at_a_time(arch):
    """Few blocks each, so that both run together."""
    torch = pytest.importorskip("torch")
    caches = [torch.randn(2, 1, 1, 4096, 64, device="cuda") for _ in "ab"]
    queries = [torch.randn(1, 8, 64, device="cuda") for _ in "ab"]
    lens = torch.tensor([4096], device="cuda", dtype=torch.int32)
    want = [tikv.decode_attention(q, *kv, lens, num_splits=8) for q, kv in zip(queries, caches, strict=True)]
    torch.cuda.synchronize()
    streams, outs = [torch.cuda.Stream() for _ in "ab"], [[], []]
    for _ in range(200):
        for stream, q, kv, out in zip(streams, queries, caches, outs, strict=True):
            with torch.cuda.stream(stream):
                out.append(tikv.decode_attention(q, *kv, lens, num_splits=8))
    torch.cuda.synchronize()
    for expected, out in zip(want, outs, strict=True):
        assert all(torch.equal(a, expected) for a in out)


@pytest.mark.archs("cuda")
def test_a_scale_on_the_host_stays_where_a_graph_reads_it(arch):
    torch = pytest.importorskip("torch")
    k, v = (torch.randn(1, 1, 256, 64, device="cuda").to(torch.float8_e4m3fn) for _ in "kv")
    q, lens = torch.randn(1, 8, 64, device="cuda"), torch.tensor([256], device="cuda", dtype=torch.int32)
    out = torch.empty_like(q)

    def call(scale):
        tikv.decode_attention(q, k, v, lens, k_scale=scale, v_scale=scale, out=out)

    call(0.5)
    want = out.clone()
    with pytest.raises(tikv.ArchError, match=r"k_scale=0.37 is not on the device yet"):
        capture(lambda: call(0.37))
    out.zero_()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call(0.5)
    plans = tikv.runtime.current().plans
    for i in range(10000):
        plans.keep(("another", i), i)
    others = [torch.full((16,), 7.0, device="cuda") for _ in range(64)]
    graph.replay()
    assert torch.equal(out, want)
    assert others


@pytest.mark.archs("cuda")
def test_memory_between_launches_is_not_of_a_pool_that_torch_gives_a_thread(arch):
    """While torch's compiler warms up what it will capture, it accounts for every block of the graph's pool."""
    torch = pytest.importorskip("torch")
    tikv.runtime.current().scratch.clear()
    k, v = torch.randn(2, 1, 1, 4096, 64, device="cuda")
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        tikv.decode_attention(torch.randn(1, 8, 64, device="cuda"), k, v, 4096, num_splits=8)
    address = tikv.runtime.current().scratch[0][-1].ptr
    segments = [(s["address"], s["address"] + s["total_size"]) for s in pool.snapshot()]
    assert segments, "the result was made there"
    assert not any(first <= address < last for first, last in segments)
