"""Launching: the routes give the same bits, a kept context forgets nothing, threads do not meet, plans stay few."""

import gc
import threading

import ml_dtypes
import numpy as np
import oracle
import pytest

import tikv
from tikv import launch, reference
from tikv.arrays import runtime_of
from tikv.launch import launcher
from tikv.ops import copy


@pytest.fixture
def fresh_plans():
    """No plan of an earlier test, and none left behind."""
    live = runtime_of()
    live.plans.clear()
    yield live.plans
    live.plans.clear()


@pytest.fixture(params=["native", "direct", "public"])
def route(request, fresh_plans):
    """Kernels are bound by this launcher."""
    before = launcher._selected
    if request.param == "native":
        request.getfixturevalue("known_ptx")
    launch.choose_launcher(request.param)
    yield request.param
    launch.choose_launcher(before)


@pytest.mark.parametrize(
    ("src_dtype", "cache_dtype"),
    [(np.float32, np.float16), (np.float16, np.float16), (ml_dtypes.bfloat16, np.float32)],
    ids=["f32_f16", "f16", "bf16_f32"],
)
@pytest.mark.parametrize("window", [None, 6], ids=["linear", "ring"])
def test_every_route_gives_the_same_bits(arch, rng, route, src_dtype, cache_dtype, window):
    """Three calls of one plan, with other arrays and positions each."""
    for position in (0, 2, 1):
        rows = [oracle.numbers(rng, (4, 2, 8), src_dtype) for _ in "kv"]
        before = [oracle.random_bits(rng, (2, 6, 8), cache_dtype) for _ in "kv"]
        caches = [oracle.place(a.copy(), arch) for a in before]
        tikv.copy_kv(*(oracle.place(a, arch) for a in rows), *caches, position=position, window=window)
        for name, src, old, cache in zip("kv", rows, before, caches, strict=True):
            want = reference.copy(src, old, position=position, window=window)
            oracle.assert_same_bits(cache, want, what=f"{name} by {route}")


def test_every_route_serves_a_store(arch, rng, route):
    k, v = (oracle.random_bits(rng, (2, 9, 2, 8), np.float16) for _ in "kv")
    store = tikv.KVCacheStore(num_layers=2, num_kv_heads=2, head_dim=8, capacity=9, window=[None, 4])
    for t in range(9):
        store.append_all(*(oracle.place(a[:, t : t + 1].copy(), arch) for a in (k, v)))
    for name, given, kept in zip("kv", (k, v), store.tokens(1), strict=True):
        oracle.assert_same_bits(oracle.to_numpy(kept)[0], given[1, -4:].swapaxes(0, 1), what=name)


def test_an_unknown_route_is_refused():
    with pytest.raises(tikv.ArchError, match=r"unknown launcher 'fast'\. Use one of native, direct, public"):
        launch.choose_launcher("fast")


def test_a_plan_is_made_once(arch, fresh_plans):
    """For all positions and addresses; another shape, option or alignment makes another."""
    caches = [oracle.place(np.zeros((2, 6, 8), np.float32), arch) for _ in range(3)]
    src = oracle.place(np.ones((1, 2, 8), np.float32), arch)
    for position, cache in enumerate(caches):
        tikv.copy(src, cache, position=position, window=6)
    aligned = {address_of(cache) % 64 for cache in caches}
    assert len(fresh_plans) == len(aligned)
    tikv.copy(src, caches[0], position=0, window=5)
    tikv.copy(src, caches[0], position=0)
    assert len(fresh_plans) == len(aligned) + 2


def address_of(array):
    return array.ctypes.data if isinstance(array, np.ndarray) else array.data_ptr()


def test_plans_stay_few(arch, fresh_plans, monkeypatch):
    """Calls whose form never comes back do not pile up, and are right all the same."""
    monkeypatch.setattr(fresh_plans, "limit", 8)
    cache = np.zeros((1, 40, 2), np.float32)
    placed = oracle.place(cache, arch)
    for window in range(1, 40):
        tikv.copy(
            oracle.place(np.full((1, 1, 2), window, np.float32), arch), placed, position=window - 1, window=window
        )
        assert len(fresh_plans) <= 8
    assert oracle.to_numpy(placed)[0, :39, 0].tolist() == list(range(1, 40))


def test_a_refused_call_leaves_no_plan(arch, fresh_plans):
    with pytest.raises(tikv.ShapeError):
        tikv.copy(oracle.place(np.zeros((1, 3, 8), np.float32), arch),
                  oracle.place(np.zeros((2, 6, 8), np.float32), arch), position=0)  # fmt: skip
    assert not fresh_plans


def test_a_kept_launch_forgets_nothing(arch, rng):
    """Sources and caches alternate between calls of one plan; each write lands where its own call said."""
    sources = [oracle.random_bits(rng, (1, 2, 8), np.float32) for _ in range(3)]
    want = [oracle.random_bits(rng, (2, 6, 8), np.float32) for _ in range(2)]
    given = [oracle.place(a.copy(), arch) for a in sources]
    caches = [oracle.place(a.copy(), arch) for a in want]
    for step in range(24):
        s, c, position = step % 3, (step // 2) % 2, int(rng.integers(0, 100))
        tikv.copy(given[s], caches[c], position=position, window=6)
        want[c] = reference.copy(sources[s], want[c], position=position, window=6)
        for name, cache, expected in zip("ab", caches, want, strict=True):
            oracle.assert_same_bits(cache, expected, what=f"{name} after step {step}")


@pytest.mark.full("vulkan")
def test_two_thousand_launches_with_other_data_each(arch, rng):
    """One kept copy and one kept attention; rows, queries, arrays, positions and lengths change from launch to launch.

    After each launch every bit of the cache, and what attention makes of two of them, is what it has to be.
    """
    launches, slots = 2000, 6
    rows, queries = (oracle.numbers(rng, (launches, 1, 2, 8), np.float32) for _ in "kq")
    want = [rng.standard_normal((2, slots, 8)).astype(np.float32) for _ in range(3)]
    caches = [oracle.place(each.copy(), arch) for each in want]
    lens = oracle.place(np.zeros(1, np.int32), arch)
    for n in range(launches):
        c, position, length = n % 3, int(rng.integers(0, 1 << 40)), int(rng.integers(1, slots + 1))
        tikv.copy(oracle.place(rows[n], arch), caches[c], position=position, window=slots)
        want[c] = reference.copy(rows[n], want[c], position=position, window=slots)
        oracle.assert_same_bits(caches[c], want[c], what=f"cache {c} after launch {n}")
        d, lens[0] = (c + 1) % 3, length
        out = tikv.decode_attention(oracle.place(queries[n], arch), caches[c][None], caches[d][None], lens, scale=0.25)
        keys, values = (want[i][:, :length].astype(np.float64) for i in (c, d))
        scores = 0.25 * np.einsum("hd,hsd->hs", queries[n, 0], keys)
        weights = np.exp(scores - scores.max(1, keepdims=True))
        expected = np.einsum("hs,hsd->hd", weights / weights.sum(1, keepdims=True), values)
        # Large scores: their rounding in float32 moves the weights of keys that are nearly as large.
        atol = 1e-5 + 1e-6 * abs(scores).max() * abs(values).max()
        np.testing.assert_allclose(oracle.to_numpy(out)[0], expected, rtol=1e-4, atol=atol, err_msg=f"launch {n}")


def test_memory_that_went_is_not_written(arch, rng):
    """A plan outlives the arrays of its last call; the next call brings its own."""
    src = oracle.place(oracle.random_bits(rng, (1, 2, 8), np.float32), arch)
    for position in range(6):
        cache = oracle.place(np.zeros((2, 6, 8), np.float32), arch)
        tikv.copy(src, cache, position=position)
        oracle.assert_same_bits(oracle.to_numpy(cache)[:, position], oracle.to_numpy(src)[0])
        del cache
        gc.collect()


@pytest.mark.archs("cpu")
@pytest.mark.parametrize("fused", [False, True], ids=["copy", "copy_kv"])
def test_threads(arch, rng, fresh_plans, fused):
    """Eight threads start together on a plan that is not there yet, each with its own arrays and positions."""
    count, steps = 8, 60
    sources = [oracle.random_bits(rng, (steps, 1, 2, 16), np.float16) for _ in range(count)]
    caches = [np.zeros((2, 2, steps, 16), np.float16) for _ in range(count)]
    start, errors = threading.Barrier(count), []

    def work(i):
        try:
            start.wait()
            for t in range(steps):
                if fused:
                    tikv.copy_kv(sources[i][t], sources[i][steps - 1 - t], *caches[i], position=t)
                else:
                    tikv.copy(sources[i][t], caches[i][0], position=t)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    for src, (k, v) in zip(sources, caches, strict=True):
        oracle.assert_same_bits(k, src[:, 0].swapaxes(0, 1))
        if fused:
            oracle.assert_same_bits(v, src[::-1, 0].swapaxes(0, 1))


@pytest.mark.archs("cpu")
def test_threads_that_bind_together_bind_once(arch, monkeypatch, fresh_plans):
    """A plan whose first binding is slow: whoever comes meanwhile waits for it."""
    bound, original = [], copy.bind_copy
    go = threading.Event()

    def slow(*args, **keywords):
        go.wait(5)
        bound.append(1)
        return original(*args, **keywords)

    monkeypatch.setattr(copy, "bind_copy", slow)
    src, caches = np.ones((1, 1, 4), np.float32), [np.zeros((1, 4, 4), np.float32) for _ in range(4)]
    live = runtime_of()
    views = [[copy.view(src, "src", "copy"), copy.view(cache, "cache", "copy")] for cache in caches]
    plan = copy.check_copy(live, "copy", views[0], ("src", "cache"), copy.CopyOptions())
    threads = [threading.Thread(target=plan.run, args=(arrays, plan.entries_at(i))) for i, arrays in enumerate(views)]
    for thread in threads:
        thread.start()
    go.set()
    for thread in threads:
        thread.join()
    assert len(bound) == 1
    for i, cache in enumerate(caches):
        assert cache[0, :, 0].tolist() == [float(slot == i) for slot in range(4)]
