"""What a rank does without other processes: which tokens are its own, its part of attention, and merging parts."""

import numpy as np
import pytest

import tikv
from tikv import runtime
from tikv.arrays import view
from tikv.distributed.token_shard import TokenShardLayers
from tikv.distributed.token_sharding import TokenSharding
from tikv.ops.attention.merge import merge_parts
from tikv.ops.attention.request import AttentionScale
from tikv.ops.attention.terms import Terms
from tikv.ops.local_positions import local_positions
from tikv.stores.layers.storage import StoreConfig

torch = pytest.importorskip("torch")
PLAIN = AttentionScale(None, None)


def sharded(sharding, **form):
    """A rank's store and the storage behind it."""
    found = StoreConfig.checked("KVCacheStore", **form)
    storage = TokenShardLayers(runtime.current(), found, sharding)
    return tikv.KVCacheStore.over(found, storage), storage


@pytest.mark.parametrize(("world", "interleave"), [(1, 1), (2, 1), (3, 4), (5, 64)])
def test_every_position_lies_on_one_rank(world, interleave):
    shards = [TokenSharding(rank, world, interleave) for rank in range(world)]
    counts = [0] * world
    for position in range(4 * world * interleave + 3):
        assert [each.count(position) for each in shards] == counts
        (owner,) = [each for each in shards if each.owns(position)]
        assert owner.rank == position // interleave % world
        assert owner.position(counts[owner.rank]) == position
        counts[owner.rank] += 1
    for each in shards:
        for first, end in ((0, 7), (3, 3), (5, 5 * interleave), (interleave, 9 * interleave + 1)):
            own = [p for run in each.runs(first, end) for p in range(*run)]
            assert own == [p for p in range(first, end) if each.owns(p)]
            assert len(own) <= each.most(max(0, end - first))


@pytest.mark.parametrize("bits", [32, 64])
def test_positions_on_the_device_are_sharded_alike(arch, bits):
    positions = np.array([-5, 0, 7, 8, 1000, 2**31 - 1], f"int{bits}")
    for rank in range(3):
        own = TokenSharding(rank, 3, 4)
        found = []
        for counts in (True, False):
            out = np.full(len(positions), 99, np.int32)
            arrays = (view(a, name, "test") for a, name in ((positions, "positions"), (out, "out")))
            local_positions(runtime.current(), "test", *arrays, own, counts)
            found.append(out.tolist())
        assert found[0] == [own.count(max(0, int(p))) for p in positions]
        assert found[1] == [own.count(int(p)) if p >= 0 and own.owns(int(p)) else -1 for p in positions]


@pytest.mark.parametrize("dtype", ["float32", pytest.param("float16", marks=pytest.mark.full)])
def test_parts_are_merged_by_their_log_sum_exps(arch, rng, dtype):
    parts = rng.standard_normal((3, 2, 4, 5, 9)).astype(np.float32)
    parts[1, ..., 8] = -np.inf
    parts[:, 0, 1, 2, 8] = -np.inf
    weights = np.exp(parts[..., 8:].astype(np.float64))
    total = weights.sum(0)
    want = np.divide((weights * parts[..., :8]).sum(0), total, out=np.zeros((2, 4, 5, 8)), where=total > 0)
    out, lse = np.full((2, 5, 4, 8), 7, dtype), np.full((2, 4, 5), 7, np.float32)
    to = view(out, "out", "merge_parts").transposed(0, 2, 1, 3)
    merge_parts("merge_parts", view(parts, "parts", "merge_parts"), to, view(lse, "lse", "merge_parts"))
    tolerance = 2e-6 if dtype == "float32" else 1e-3
    np.testing.assert_allclose(out.transpose(0, 2, 1, 3), want, rtol=tolerance, atol=tolerance)
    with np.errstate(divide="ignore"):
        np.testing.assert_allclose(lse, np.log(total[..., 0]), rtol=2e-6, atol=2e-6)


@pytest.mark.full("vulkan")  # kernels of attention, which compile there for long
@pytest.mark.parametrize("sloped", [False, pytest.param(True, marks=pytest.mark.full)])
def test_two_ranks_in_one_process_are_one_store(arch, rng, sloped):
    """A prompt longer than the window, single tokens and a trim, over a sliding and a plain layer."""
    slopes = {"alibi_slopes": (2.0 ** -np.arange(24)).astype(np.float32)} if sloped else {}
    own_slopes = Terms(**slopes).views("extend")
    form = {"num_layers": 2, "num_kv_heads": 6, "head_dim": 8, "capacity": 64, "dtype": "float32"}
    form |= {"window": [9, None], "sinks": 2}
    one, ranks = tikv.KVCacheStore(**form), [sharded(TokenSharding(rank, 2, 4), **form) for rank in range(2)]
    shares = [storage for _, storage in ranks]
    for tokens in (21, 1, 1, 6):
        if tokens == 6:
            for store in (one, *(store for store, _ in ranks)):
                store.trim(2)
        for layer in (0, 1):
            q = rng.standard_normal((1, tokens, 24, 8)).astype(np.float32)
            k, v = rng.standard_normal((2, 1, tokens, 6, 8)).astype(np.float32)
            want = one.extend(layer, q, k, v, return_mass=not sloped, **slopes)
            want, want_mass = (want, None) if sloped else want
            parts = np.zeros((2, 1, 24, tokens, 9), np.float32)
            for store, part in zip(shares, parts, strict=True):
                _, read, rows = store.extension("extend", layer, (q, k, v), "token_major", PLAIN)
                to = view(part, "part", "extend")
                store.extend_own("extend", layer, rows, "token_major", read, to, PLAIN, own_slopes)
            out, lse = np.zeros_like(want), np.zeros((1, 24, tokens), np.float32)
            to = view(out, "out", "extend").transposed(0, 2, 1, 3)
            merge_parts("extend", view(parts, "parts", "extend"), to, view(lse, "lse", "extend"))
            np.testing.assert_allclose(out, want, rtol=2e-6, atol=2e-6)
            if sloped:
                continue
            (owners, places), counts = TokenSharding(0, 2, 4).places(shares[0].held_positions(layer))
            masses = torch.zeros(2, 1, 6, max(counts))
            by_head = np.ascontiguousarray(q.swapaxes(1, 2))
            for store, mass in zip(shares, masses, strict=True):
                asked = view(by_head, "q", "extend"), view(lse, "lse", "extend")
                store.weigh_own("extend", layer, *asked, mass, PLAIN, "sum")
            np.testing.assert_allclose(masses[owners, 0, :, places].T, want_mass[0], rtol=1e-5, atol=1e-5)
    assert [store.length for store, _ in ranks] == [one.length] * 2


@pytest.mark.archs("cpu")
@pytest.mark.full
def test_groups_of_codes_are_sharded(arch, rng):
    form = {"num_layers": 1, "num_kv_heads": 1, "head_dim": 32, "capacity": 16, "dtype": "q8_0"}
    one, (own, share) = tikv.KVCacheStore(**form), sharded(TokenSharding(0, 1, 4), **form)
    k, v = rng.standard_normal((2, 6, 1, 32)).astype(np.float32)
    for store in (one, own):
        store.append(0, k, v)
    q, part = rng.standard_normal((1, 2, 1, 32)).astype(np.float32), np.zeros((1, 2, 1, 33), np.float32)
    share.attend_own("attend", 0, view(q, "q", "attend"), view(part, "part", "attend"), PLAIN, "raise")
    np.testing.assert_allclose(part[..., 0, :32], one.attend(0, q[:, :, 0]), rtol=2e-6, atol=2e-6)
