"""Several GPUs in one process: an operation runs where its arrays lie, a store where it was made.

What runs on the second GPU is compared with the same on the first, bit for bit; `pytest --arch cuda --gpu 1` runs all
other tests on the second one.
"""

import contextlib
import threading

import numpy as np
import oracle
import pytest

import tikv
from tikv import arrays, launch, runtime

torch = pytest.importorskip("torch")

pytestmark = [
    pytest.mark.archs("cuda"),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
H, D = 2, 64


@pytest.fixture(autouse=True)
def first_is_current(arch, request):
    """Torch's current GPU is the first, and stays so whatever is called."""
    if launch.launcher_report(runtime.current())["launcher"] != "native":
        pytest.skip("another GPU needs the native launcher")
    with torch.cuda.device(0):
        yield
        assert torch.cuda.current_device() == 0


def on(index, *rows):
    found = [torch.from_numpy(np.array(a)).to(f"cuda:{index}") for a in rows]
    return found if len(found) > 1 else found[0]


def numbers(rng, *shape, dtype=np.float16):
    return oracle.numbers(rng, shape, dtype)


def full(rng, *shape):
    """A cache that is full of random bits."""
    return oracle.random_bits(rng, shape, np.float16)


def copies(rng):
    rows, caches = [numbers(rng, 3, H, D) for _ in "kv"], [full(rng, H, 8, D) for _ in "kv"]

    def run(index):
        k, v, k_cache, v_cache = on(index, *rows, *caches)
        tikv.copy_kv(k, v, k_cache, v_cache, position=6, window=8)
        out = torch.empty_like(k_cache)
        tikv.linearize(k_cache, out, length=9)
        return k_cache, v_cache, out

    return run


def ragged(rng):
    rows, caches = [numbers(rng, 2, H, 3, D) for _ in "kv"], [full(rng, 2, H, 8, D) for _ in "kv"]

    def run(index):
        k, v, k_cache, v_cache = on(index, *rows, *caches)
        tikv.append_ragged(k, v, k_cache, v_cache, np.array([6, -1]))
        tikv.append_ragged(k, v, k_cache, v_cache, on(index, np.array([1, 2])))
        return k_cache, v_cache

    return run


def pages(rng):
    rows = [numbers(rng, 9, H, D) for _ in "kv"]
    pools = [full(rng, 6, 4, H, D) for _ in "kv"]
    q = numbers(rng, 2, 4, D)

    def run(index):
        k, v, k_pool, v_pool, queries = on(index, *rows, *pools, q)
        tikv.write_slots(k, v, k_pool, v_pool, [0, 1, 2, 3, 9, 10, -1, 12, 13])
        tikv.copy_blocks(k_pool, v_pool, [(0, 5)])
        gathered = tikv.gather_paged(k_pool, [5, 3], 6)
        host = np.zeros_like(pools[0])
        tikv.swap_blocks(k_pool, host, [(3, 0)])
        out, lse = tikv.paged_decode_attention(queries, k_pool, v_pool, [[0, -1], [5, 3]], [4, 6], return_lse=True)
        return k_pool, v_pool, gathered, host, out, lse

    return run


def attention(rng):
    q, k, v = numbers(rng, 2, 4, 40, D), numbers(rng, 2, H, 700, D), numbers(rng, 2, H, 700, D)

    def run(index):
        queries, keys, values = on(index, q, k, v)
        prompt = tikv.decode_attention(queries, keys, values, 700, impl="taichi")
        one, lse = tikv.decode_attention(queries[:, :, 0], keys, values, [300, 700], return_lse=True)
        first = tikv.decode_attention(queries[:, :, 0], keys[:, :, :256], values[:, :, :256], 256, return_lse=True)
        merged, _ = tikv.merge_states(one, lse, *first)
        return prompt, one, lse, merged

    return run


def fused(rng):
    qkv = numbers(rng, 3, 4 * D)
    angles = np.arange(16, dtype=np.float32)[:, None] * np.linspace(1, 0.1, D // 2, dtype=np.float32)
    how = tikv.NormRope(mode="norm_half", cos=np.cos(angles), sin=np.sin(angles))  # one for both GPUs
    caches = [full(rng, 1, 8, D) for _ in "kv"]

    def run(index):
        rows, k, v = on(index, qkv, *caches)
        q = tikv.write_qkv(rows, k, v, num_q_heads=2, norm_rope=how, position=2)
        return q, k, v

    return run


def quantised(rng):
    rows, q = numbers(rng, 1, H, 32, D), numbers(rng, 1, 4, D)
    keep = np.sort(rng.permutation(32)[:10])[None]

    def run(index):
        x, queries = on(index, rows, q)
        codes, scale = tikv.quantize(x)
        groups = tikv.quantize(x, tikv.Quant(bits=4, group=32))
        out = tikv.decode_attention(queries, groups, groups, 32)
        kept = tikv.compact(x.clone(), keep)[:, :, :10]
        turned = tikv.rotate(x.clone(), np.arange(32), np.arange(32)[::-1] + 5, tikv.Rope(np.ones(D // 2)))
        return codes, scale, groups.codes, groups.scales, tikv.dequantize(groups), out, kept, turned

    return run


OPERATIONS = {f.__name__: f for f in (copies, ragged, pages, attention, fused, quantised)}


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_runs_where_its_arrays_lie(rng, name):
    run = OPERATIONS[name](rng)
    for want, got in zip(run(0), run(1), strict=True):
        if not isinstance(got, np.ndarray):
            assert str(got.device) == "cuda:1"
        oracle.assert_same_bits(got, want)
    for want, got in zip(run(0), run(1), strict=True):  # with plans and kernels that are there
        oracle.assert_same_bits(got, want)


STORES = {
    "plain": {},
    "windows": {"window": [None, 20], "sinks": 2},
    "int8": {"dtype": "int8"},
    "groups": {"dtype": tikv.Quant(bits=4, group=32)},
    "float8": {"dtype": "float8_e4m3fn", "k_scale": 0.5, "v_scale": [1.0, 2.0]},
}


@pytest.mark.parametrize("name", STORES)
def test_a_store_stays_where_it_was_made(rng, name, tmp_path):
    form = {"num_layers": 2, "num_kv_heads": H, "head_dim": D, "capacity": 64, **STORES[name]}
    stores = []
    for index in (0, 1):
        with torch.cuda.device(index):
            stores.append(tikv.KVCacheStore(**form))
    assert [store.keys(0).device for store in stores] == ["cuda:0", "cuda:1"]
    for tokens in (30, 1, 1, 5):
        given = [numbers(rng, 2, tokens, n, D) for n in (4, H, H)]
        for layer in (0, 1):
            outs = []
            for index, store in enumerate(stores):
                outs.append(store.extend(layer, *(a[layer] for a in on(index, *given))))
                outs.append(store.attend(layer, on(index, given[0])[layer, None, -1]))
            oracle.assert_same_bits(outs[2], outs[0])
            oracle.assert_same_bits(outs[3], outs[1])
    held = stores[1].snapshot()
    for store in stores:
        store.trim(3)
        store.save(tmp_path / f"{store.keys(0).device[-1]}.safetensors")
    stores[1].restore(held)
    stores[1].trim(3)
    with torch.cuda.device(1):
        stores.append(tikv.KVCacheStore.load(tmp_path / "0.safetensors"))
    for layer in (0, 1):
        want = stores[0].tokens(layer)
        for store in stores[1:]:
            for a, b in zip(store.tokens(layer), want, strict=True):
                assert a.device == "cuda:1"
                oracle.assert_same_bits(a, b)


def test_a_pool_stays_where_it_was_made(rng):
    pools = []
    for index in (0, 1):
        with torch.cuda.device(index):
            pools.append(tikv.PagedKVCacheStore(num_layers=2, num_kv_heads=H, head_dim=D, num_blocks=32, block_size=4))
    rows = [numbers(rng, 2, 13, n, D) for n in (4, H, H)]
    found = []
    for index, pool in enumerate(pools):
        a, b = pool.add(), pool.add()
        given = on(index, *rows)
        outs = [pool.extend(i, *(x[i] for x in given), [a, b], cu_seqlens=[0, 9, 13]) for i in (0, 1)]
        c = pool.fork(a)
        outs += [pool.extend(i, *(x[i, :3] for x in given), [a, b, c]) for i in (0, 1)]
        pool.swap_out(b)
        pool.swap_in(b)
        pool.truncate(c, 7)
        found.append([*outs, *(rows for i in (0, 1) for seq in (a, b, c) for rows in pool.tokens(i, seq))])
    for want, got in zip(*found, strict=True):
        assert str(got.device) == "cuda:1"
        oracle.assert_same_bits(got, want)


def test_arrays_of_two_gpus_are_refused_before_anything_is_written(rng):
    k, v = on(0, numbers(rng, 1, H, D), numbers(rng, 1, H, D))
    caches = on(1, *(full(rng, H, 8, D) for _ in "kv"))
    before = [a.clone() for a in caches]
    with pytest.raises(
        tikv.ArchError, match=r"copy_kv: k is on cuda:0, but the arrays that it is used with are on cuda:1"
    ):
        tikv.copy_kv(k, v, *caches, position=0)
    with torch.cuda.device(1):
        store = tikv.KVCacheStore(num_layers=1, num_kv_heads=H, head_dim=D, capacity=8)
    with pytest.raises(
        tikv.ArchError, match=r"append: k is on cuda:0, but the arrays that it is used with are on cuda:1"
    ):
        store.append(0, k, v)
    with pytest.raises(tikv.ArchError, match=r"q is on cuda:0, but the arrays that it is used with are on cuda:1"):
        store.attend(0, k[:, None].expand(1, 1, H, D))
    assert store.length == 0
    for a, b in zip(caches, before, strict=True):
        oracle.assert_same_bits(a, b)


def test_the_engines_launcher_is_refused_on_another_gpu(rng, monkeypatch):
    monkeypatch.setenv("TIKV_LAUNCHER", "direct")
    k, cache = on(1, numbers(rng, 1, 3, D), full(rng, 3, 8, D))
    before = cache.clone()
    with pytest.raises(tikv.ArchError, match=r"copy: cuda:1 needs the native launcher, .*'direct' \(asked for\)"):
        tikv.copy(k, cache, position=0)
    oracle.assert_same_bits(cache, before)


def test_host_arrays_go_to_the_current_gpu_and_back(rng):
    k, v = numbers(rng, 2, H, D), numbers(rng, 2, H, D)
    with torch.cuda.device(1):
        store = tikv.KVCacheStore(num_layers=1, num_kv_heads=H, head_dim=D, capacity=8)
        cache = np.zeros((H, 8, D), np.float16)
        tikv.copy(k, cache, position=1)
    oracle.assert_same_bits(cache[:, 1:3], k.swapaxes(0, 1))
    store.append(0, k, v)
    oracle.assert_same_bits(store.tokens(0)[0].copy_to_host()[0], k.swapaxes(0, 1))
    assert isinstance(store.attend(0, numbers(rng, 1, 4, D)), np.ndarray)


def test_launches_go_to_the_stream_of_their_gpu(rng):
    """A side stream of the second GPU is busy; what is launched on it comes behind what it is given."""
    side = torch.cuda.Stream(device=1)
    with torch.cuda.device(1):
        store = tikv.KVCacheStore(num_layers=1, num_kv_heads=H, head_dim=D, capacity=8)
    k, v = on(1, numbers(rng, 1, H, D), numbers(rng, 1, H, D))
    late = torch.zeros_like(k)
    store.append(0, late, late)
    torch.cuda.synchronize(1)
    with torch.cuda.stream(side):  # which makes the second GPU torch's current one
        torch.cuda._sleep(50_000_000)
        late.copy_(k)
        store.append(0, late, v)
        got = store.tokens(0)[0]
    oracle.assert_same_bits(got.copy_to_host()[0, :, 1], oracle.to_numpy(k)[0])


@pytest.mark.parametrize("current", [0, 1])
def test_a_step_is_captured_on_the_second_gpu(rng, current):
    with torch.cuda.device(1):
        store, plain = (tikv.KVCacheStore(num_layers=1, num_kv_heads=H, head_dim=D, capacity=16) for _ in range(2))
        positions = store.positions_on_device().torch()
        lens, k, v, q = positions + 1, *on(1, *(numbers(rng, 1, n, D) for n in (H, H, 4)))
        out = torch.empty_like(q)

        def step():
            with torch.cuda.device(current):
                store.append(0, k[:, None], v[:, None], positions=positions)
                store.attend(0, q, seq_lens=lens, out=out)
            positions.add_(1)
            lens.add_(1)

        step()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
            with pytest.raises(tikv.ArchError, match="baked into the CUDA graph"):
                plain.append(0, k[:, None], v[:, None])
        positions.zero_()
        lens.fill_(1)
        for _ in range(5):
            for a in (k, v, q):
                a.copy_(on(1, numbers(rng, *a.shape)))
            graph.replay()
            plain.append(0, k[:, None], v[:, None])
            torch.testing.assert_close(out, plain.attend(0, q), rtol=2e-3, atol=2e-3)


def test_a_thread_for_each_gpu(rng):
    rows = [numbers(rng, 40, 1, H, D) for _ in "kv"]
    stores, failures = [None, None], []

    def decode(index):
        try:
            torch.cuda.set_device(index)
            store = stores[index] = tikv.KVCacheStore(num_layers=1, num_kv_heads=H, head_dim=D, capacity=64)
            for k, v in zip(*on(index, *rows), strict=True):
                store.append(0, k, v)
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=decode, args=(i,)) for i in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    for i in (0, 1):
        got = stores[i].tokens(0)[0]
        assert got.device == f"cuda:{i}"
        oracle.assert_same_bits(got.copy_to_host()[0], rows[0][:, 0].swapaxes(0, 1))


def test_layers_of_a_model_on_two_gpus(rng):
    transformers = pytest.importorskip("transformers")
    from tikv.integrations.transformers import TikvCache

    config = transformers.LlamaConfig(num_hidden_layers=2, num_attention_heads=H, hidden_size=H * D)
    cache, rows = TikvCache(config), [numbers(rng, 1, H, 5, D) for _ in "kv"]
    for index in (0, 1):
        for part in (slice(0, 3), slice(3, 5)):
            k, v = cache.update(*(a[:, :, part].contiguous() for a in on(index, *rows)), index)
        assert str(k.device) == f"cuda:{index}"
        oracle.assert_same_bits(k, rows[0])
        oracle.assert_same_bits(v, rows[1])


def test_a_graph_of_operations_on_the_second_gpu(rng):
    build = tikv.GraphBuilder()
    build.copy_kv("k", "v", "k_cache", "v_cache", position="position")
    given = [numbers(rng, 2, H, D) for _ in "kv"]
    results = []
    for index in (0, 1):
        with torch.cuda.device(index):
            graph = build.compile()
        caches = on(index, *(np.zeros((H, 8, D), np.float16) for _ in "kv"))
        for position in (0, 3):
            k, v = on(index, *given)
            graph.run({"k": k, "v": v, "k_cache": caches[0], "v_cache": caches[1], "position": position})
        results.append(caches)
    for want, got in zip(*results, strict=True):
        oracle.assert_same_bits(got, want)


def test_memory_lies_on_the_gpu_of_its_runtime():
    live = runtime.current()
    for index in (0, 1):
        memory = arrays.Memory(1 << 20, live.on_gpu(index))
        assert (memory.device, str(memory.block.device)) == (f"cuda:{index}",) * 2


SET_DEVICE = """
import sys, torch
torch.cuda.set_device(1)
import tikv
if sys.argv[1] == "init":
    tikv.init(arch="cuda")
store = tikv.KVCacheStore(num_layers=1, num_kv_heads=2, head_dim=64, capacity=64)
k = torch.randn(5, 2, 64, device="cuda", dtype=torch.float16)
out = store.extend(0, torch.cat([k, k], 1), k, k)
assert torch.equal(store.tokens(0)[0].torch()[0], k.transpose(0, 1))
print(store.keys(0).device, out.device, torch.cuda.current_device())
"""


@pytest.mark.parametrize("how", ["init", "by itself"])
def test_set_device_is_enough(python, how):
    assert python(SET_DEVICE, how).stdout.split() == ["cuda:1", "cuda:1", "1"]


def test_a_stream_of_the_other_gpu_is_an_error(rng):
    k, cache = on(1, numbers(rng, 1, H, D), np.zeros((H, 8, D), np.float16))
    tikv.copy(k, cache, position=0)
    other = torch.cuda.Stream(device=0)
    with launch.use_stream(other.cuda_stream), pytest.raises(tikv.ArchError, match="the CUDA driver says"):
        tikv.copy(k, cache, position=1)
    with contextlib.suppress(RuntimeError):
        torch.cuda.synchronize(1)
    assert not cache[:, 1].any()
    memory = arrays.Memory(1 << 20, runtime.current().on_gpu(1))
    del memory  # torch ends the process where it frees what a stream of another GPU is said to have used
    torch.cuda.synchronize(1)
