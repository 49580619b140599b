"""What the processes of a group are sent to run, each function on all of them."""

import os

import numpy as np
import oracle
import pytest
from inside import sharding_of
from twins import CAPACITY, WRITES, Twins

import tikv
from tikv.distributed import ShardedKVCacheStore, recv_sequence, send_sequence

FORM = {"num_layers": 2, "num_kv_heads": 6, "head_dim": 8, "capacity": CAPACITY, "dtype": "float32"}


def mesh_of(shape):
    """A device mesh of all processes."""
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", shape)


def random_operations(rank, world, group, shard, mesh, interleave, changes, queries, kinds, count, seed, terms=()):
    """So many random operations on a shared store and on one, compared after each."""
    layouts = ("token_major",) if kinds == WRITES else ("token_major", "head_major")
    form = FORM | changes
    shared = ShardedKVCacheStore(mesh_of(mesh) if mesh else group, shard=shard, interleave=interleave, **form)
    sharding = sharding_of(shared.local)
    twins = Twins(shared, form, np.random.default_rng(seed), queries, sharding, layouts, terms)
    for n in range(count):
        try:
            twins.step(kinds)
        except BaseException as error:
            raise AssertionError(f"operation {n} of seed {seed}") from error
    return twins.one.length


def tiles_by_heads(rank, world, group):
    """KVarN's tiles of this rank's heads have the bits of a store of all heads; how many tokens are codes."""
    form = {**FORM, "num_layers": 1, "head_dim": 32, "dtype": "kvarn_k4v2_g64", "sinks": 2, "capacity": 300}
    shared, one = ShardedKVCacheStore(group, shard="heads", **form), tikv.KVCacheStore(**form)
    rng, own = np.random.default_rng(3), slice(shared.heads.start, shared.heads.stop)
    for count in (70, 1, 130):
        q, k, v = rng.standard_normal((3, count, 6, 32)).astype(np.float16)
        result, expected = shared.extend(0, q[:, own], k[:, own], v[:, own]), one.extend(0, q, k, v)
        np.testing.assert_allclose(result, expected[..., own, :], rtol=0, atol=2.0**-9)
        for a, b in zip(shared.local.tokens(0), one.tokens(0), strict=True):
            oracle.assert_same_bits(a, np.ascontiguousarray(b.copy_to_host()[:, own]))
    return shared.local.quantised(0)


def refusals(rank, world, group):
    """Messages of calls that are refused, in turn."""
    found = []

    def refused(call):
        try:
            call()
        except tikv.TikvError as error:
            found.append(f"{type(error).__name__}: {error}")
        else:
            found.append("nothing was refused")

    refused(lambda: ShardedKVCacheStore(group, shard="heads", **FORM | {"num_kv_heads": 5}))
    refused(lambda: ShardedKVCacheStore(group, shard="rows", **FORM))
    refused(lambda: ShardedKVCacheStore(group, shard=("heads", "tokens"), **FORM))
    refused(lambda: ShardedKVCacheStore(group, shard="tokens", interleave=0, **FORM))
    by_heads = ShardedKVCacheStore(group, shard="heads", **FORM)
    by_tokens = ShardedKVCacheStore(group, shard="tokens", interleave=4, **FORM)
    k = np.zeros((3, 6, 8), np.float32)
    refused(lambda: by_heads.append(0, k, k))
    refused(lambda: by_heads.attend(0, np.zeros((1, 7, 8), np.float32)))
    refused(lambda: by_tokens.append(0, k[:, :3], k[:, :3]))
    refused(lambda: by_tokens.append(0, np.zeros((49, 6, 8), np.float32), np.zeros((49, 6, 8), np.float32)))
    refused(lambda: by_tokens.extend(0, k, k[:2], k[:2]))
    refused(lambda: by_tokens.keys(0))
    refused(lambda: by_tokens.attend(0, k[None, 0], mask=np.ones((1, 1, 1), bool)))
    slopes = np.zeros(6, np.float32)
    refused(lambda: by_tokens.attend(0, k[None, 0], alibi_slopes=slopes[:5]))
    refused(lambda: by_tokens.attend(0, k[None, 0], alibi_slopes=slopes, return_mass=True))
    refused(lambda: by_tokens.attend(0, k[None, 0], alibi_slopes=slopes, seq_lens=np.array([0])))
    refused(lambda: by_tokens.attend(0, k[None, 0], return_mass=True, seq_lens=np.array([0])))
    refused(lambda: by_tokens.attend(0, k[None, 0], sink_logits=np.zeros(5, np.float32)))
    refused(lambda: by_tokens.attend(0, np.zeros((1, 2, 6, 8), np.float32), missing="maybe"))
    return [*found, by_tokens.length, hasattr(by_tokens, "tokens"), hasattr(by_heads, "tokens"), hasattr(by_heads, "x")]


def disagree(rank, world, group):
    """What each rank says where their calls differ."""
    store = ShardedKVCacheStore(group, shard="tokens", interleave=4, **FORM)
    k = np.zeros((2 + rank, 6, 8), np.float32)
    try:
        store.append(0, k, k)
    except tikv.TikvError as error:
        return f"{type(error).__name__}: {error}", store.length
    return "nothing was refused", store.length


def die(rank, world, group):
    """The last rank ends; what the others' next collective says."""
    store = ShardedKVCacheStore(group, shard="tokens", interleave=4, **FORM)
    store.append(0, *np.zeros((2, 3, 6, 8), np.float32))
    if rank == world - 1:
        os._exit(1)
    try:
        store.attend(0, np.zeros((1, 6, 8), np.float32))
    except tikv.TikvError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was refused"


def gone(rank, world, group):
    """A store whose group is destroyed."""
    import torch.distributed as dist

    group = dist.new_group(list(range(world)))
    dist.barrier(group)
    store = ShardedKVCacheStore(group, shard="tokens", interleave=4, **FORM)
    store.append(0, *np.zeros((2, 3, 6, 8), np.float32))
    dist.destroy_process_group(group)
    found = []
    for call in (
        lambda: store.attend(0, np.zeros((1, 6, 8), np.float32)),
        lambda: ShardedKVCacheStore(group, shard="tokens", **FORM),
    ):
        try:
            call()
        except tikv.TikvError as error:
            found.append(f"{type(error).__name__}: {error}")
    return found


POOL = {"num_layers": 3, "num_kv_heads": 2, "head_dim": 8, "num_blocks": 24, "block_size": 4, "dtype": "float16"}


def prompts(pool, rng):
    """Sequences of a pool: two with a prefix in common, one of which was forked, and one that nobody shares with."""
    ids = [int(i) for i in rng.integers(0, 100, 13)]
    first = pool.add(ids, "tenant")
    fill(pool, rng, first, 13)
    second = pool.add([*ids[:8], 1], "tenant")
    fill(pool, rng, second, 3)
    alone = pool.add()
    fill(pool, rng, alone, 6)
    fork = pool.fork(first)
    fill(pool, rng, fork, 1)
    pool.free(alone)
    last = pool.add()  # in blocks apart from each other
    fill(pool, rng, last, 9)
    whole = pool.add(ids[:12], "tenant")  # all of it is known, but for the token that is left to be computed
    assert pool.length(whole) == 11
    return [first, second, fork, last, whole], ids


def fill(pool, rng, seq, tokens):
    dtype = "float32" if pool.dtype.name == "int8" else pool.dtype.numpy
    for layer in range(pool.num_layers):
        k, v = rng.standard_normal((2, tokens, 2, 8)).astype(dtype)
        pool.append(layer, k, v, [seq], cu_seqlens=[0, tokens])


def send_and_receive(rank, world, group, changes):
    """Sequences from rank 0 to rank 1, which compares what came with what it makes itself."""
    form = POOL | changes
    model = tikv.PagedKVCacheStore(**form)
    seqs, ids = prompts(model, np.random.default_rng(7))
    if rank == 0:
        send_sequence(model, seqs[0], 1, group)
        send_sequence(model, seqs[1:], 1, group)
        return model.num_free_blocks
    pool = tikv.PagedKVCacheStore(**form | {"num_blocks": 40})
    pool.add([])
    apart = pool.add()
    fill(pool, np.random.default_rng(8), apart, 1)
    got = [recv_sequence(pool, 0, group)]
    free = pool.num_free_blocks
    got += recv_sequence(pool, 0, group)
    for mine, sent in zip(got, seqs, strict=True):
        assert pool.length(mine) == model.length(sent)
        for layer in range(pool.num_layers):
            for a, b in zip(pool.tokens(layer, mine), model.tokens(layer, sent), strict=True):
                oracle.assert_same_bits(a.numpy(), b.numpy())
            if "page_summaries" in changes:
                for a, b in zip(pool.page_summaries(layer, [mine]), model.page_summaries(layer, [sent]), strict=True):
                    oracle.assert_same_bits(a.numpy(), b.numpy())
    # Two blocks of the second and three of the fork came with the first; the fork copied its fourth.
    assert free - pool.num_free_blocks == 1 + 1 + 3, (free, pool.num_free_blocks)
    assert pool.length(pool.add(ids, "tenant")) == 12
    assert pool.length(pool.add(ids)) == 0
    fill(pool, np.random.default_rng(9), got[2], 5)  # a shared block is copied before it is written into
    for seq in got:
        pool.free(seq)
    return pool.num_free_blocks


def send_groups(rank, world, group):
    """Sequences with codes and new tokens, a fork among them; both pools go on to the same bits."""
    form = POOL | {"head_dim": 32, "block_size": 64, "dtype": tikv.Quant(4, 32, "tokens", 32), "num_blocks": 12}
    model, rng = tikv.PagedKVCacheStore(**form), np.random.default_rng(7)

    def grow(store, rng, seq, tokens):
        for layer in range(store.num_layers):
            store.append(layer, *rng.standard_normal((2, tokens, 2, 32)).astype(np.float16), [seq], [0, tokens])

    a, b = model.add(), model.add()
    grow(model, rng, a, 170)
    grow(model, rng, b, 40)
    seqs = [a, b, model.fork(a)]
    grow(model, rng, seqs[2], 9)
    if rank == 0:
        send_sequence(model, a, 1, group)
        send_sequence(model, seqs[1:], 1, group)
        with pytest.raises(tikv.GroupError, match="rank 1 refused"):
            send_sequence(model, a, 1, group)
        return
    pool = tikv.PagedKVCacheStore(**form | {"num_blocks": 20})
    grow(pool, np.random.default_rng(8), pool.add(), 100)
    got = [recv_sequence(pool, 0, group)]
    got += recv_sequence(pool, 0, group)
    small = tikv.PagedKVCacheStore(**form | {"num_blocks": 2})
    with pytest.raises(tikv.CapacityError):
        recv_sequence(small, 0, group)
    assert (small.num_free_blocks, small._pages.coded) == (2, {})
    for tokens in (1, 75):
        for mine, sent in zip(got, seqs, strict=True):
            for store, seq in ((pool, mine), (model, sent)):
                grow(store, np.random.default_rng(9), seq, tokens)
            assert pool.length(mine) == model.length(sent)
            for layer in range(pool.num_layers):
                for x, y in zip(pool.tokens(layer, mine), model.tokens(layer, sent), strict=True):
                    oracle.assert_same_bits(x.numpy(), y.numpy())


def refuse_to_receive(rank, world, group):
    """What both say where the receiver's pool is another, or too small; and that nothing changed there."""
    found = []
    for changes in ({"head_dim": 16}, {"num_blocks": 2}):
        pool = tikv.PagedKVCacheStore(**POOL | (changes if rank else {}))
        try:
            if rank == 0:
                seqs, _ = prompts(pool, np.random.default_rng(7))
                send_sequence(pool, seqs[0], 1, group)
            else:
                recv_sequence(pool, 0, group)
        except tikv.TikvError as error:
            found.append(f"{type(error).__name__}: {error}")
        assert rank == 0 or pool.num_free_blocks == pool.num_blocks
    try:
        send_sequence(pool, 0, 2, group) if rank == 0 else recv_sequence(pool, -1, group)
    except tikv.TikvError as error:
        found.append(f"{type(error).__name__}: {error}")
    return found


def masses(rank, world, group):
    """The mass of single queries over a sliding layer and one that is not, against one store."""
    rng = np.random.default_rng(12)
    form = FORM | {"window": [11, None], "sinks": 2}
    one = tikv.KVCacheStore(**form)
    shared = ShardedKVCacheStore(group, shard="tokens", interleave=4, **form)
    assert shared.attend(1, np.ones((1, 24, 8), np.float32), return_mass=True)[1].shape == (1, 6, 0)
    for tokens in (1, 5, 7, 9, 2):
        for layer in (0, 1):
            rows, q = rng.standard_normal((2, tokens, 6, 8)), rng.standard_normal((1, 24, 8))
            options = {"return_lse": tokens % 2 == 0, "return_mass": True, "mass_queries": (None, 1)[tokens > 5]}
            options["sink_logits"] = rng.standard_normal(24).astype(np.float32) if tokens == 7 else None
            for store in (one, shared):
                store.append(layer, *rows.astype(np.float32))
            for want, got in zip(*(s.attend(layer, q.astype("f"), **options) for s in (one, shared)), strict=True):
                np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5, err_msg=f"{tokens}, layer {layer}")
    return shared.held(0), shared.held(1)


def slopes(rank, world, group):
    """Prompts and single queries with slopes over a sliding layer, against float64: blocks of 4, and single tokens."""
    rng, heads, width = np.random.default_rng(13), 6, 8
    shared = ShardedKVCacheStore(group, shard="tokens", interleave=4, **FORM | {"window": 12, "sinks": 4})
    slopes, rows = (2.0 ** -np.arange(1, 7)).astype(np.float32), np.zeros((2, 0, heads, width), np.float32)

    def attended(q, at):
        """One query at a position, over the sinks and the 8 newest tokens behind them."""
        seen = np.r_[0 : min(4, at + 1), max(4, at - 7) : at + 1]
        k, v = rows[:, seen].astype(np.float64)
        logits = np.einsum("hd,nhd->hn", q, k) * width**-0.5 + slopes[:, None] * (seen - at)
        weights = np.exp(logits)
        return np.einsum("hn,nhd->hd", weights / weights.sum(1, keepdims=True), v), np.log(weights.sum(1))

    for tokens in (12, 1, 1, 1, 1, 12):
        q, k, v = rng.standard_normal((3, tokens, heads, width)).astype(np.float32)
        first, rows = rows.shape[1], np.concatenate([rows, np.stack([k, v])], axis=1)
        out, lse = shared.extend(0, q, k, v, return_lse=True, alibi_slopes=slopes)
        want = [attended(one, first + t) for t, one in enumerate(q)]
        np.testing.assert_allclose(out, [a for a, _ in want], rtol=1e-5, atol=1e-5, err_msg=f"{tokens}")
        np.testing.assert_allclose(lse, [b for _, b in want], rtol=1e-5, atol=1e-5)
        alone = shared.attend(0, q[-1][None], alibi_slopes=slopes[None])
        np.testing.assert_allclose(alone[0], want[-1][0], rtol=1e-5, atol=1e-5)
    return shared.length


def at_positions(rank, world, group):
    """A decode loop whose positions and lengths lie in arrays, against one store."""
    rng = np.random.default_rng(5)
    form = FORM | {"window": [None, 2 + 4 * world], "sinks": 2, "batch_size": 2}
    one = tikv.KVCacheStore(**form)
    shared = ShardedKVCacheStore(group, shard="tokens", interleave=2, **form)
    for store in (one, shared):
        store.append(0, *np.zeros((2, 2, 3, 6, 8), np.float32))
        store.append(1, *np.zeros((2, 2, 3, 6, 8), np.float32))
    positions = shared.positions_on_device()
    lens = np.array([3, 3])
    for step in range(20):
        lens += 1
        k, v, q = (
            rng.standard_normal((2, 2, 1, 6, 8)),
            rng.standard_normal((2, 2, 1, 6, 8)),
            rng.standard_normal((2, 24, 8)),
        )
        for layer in (0, 1):
            one.append(layer, k[layer].astype("f"), v[layer].astype("f"))
            shared.append(layer, k[layer].astype("f"), v[layer].astype("f"), positions=positions)
        for layer in (0, 1):
            want = one.attend(layer, q.astype("f"))
            got = shared.attend(layer, q.astype("f"), seq_lens=lens)
            np.testing.assert_allclose(got, want, rtol=2e-6, atol=2e-6, err_msg=f"step {step}, layer {layer}")
        positions.numpy()[:] += 1
    shared.advance(20)
    np.testing.assert_allclose(shared.attend(1, q.astype("f")), want, rtol=2e-6, atol=2e-6)
    uneven = ShardedKVCacheStore(group, shard="tokens", interleave=2, **FORM | {"window": 3})
    try:
        uneven.attend(0, np.zeros((1, 6, 8), np.float32), seq_lens=np.array([3]))
    except tikv.OptionError as error:
        return str(error)


def save_and_load(rank, world, group, folder):
    """A cache saved by three ranks that share tokens, loaded by three that share heads and by two that share tokens."""
    import torch.distributed as dist

    form = FORM | {"window": [9, None], "sinks": 2}
    pair = dist.new_group([0, 1])
    shared = ShardedKVCacheStore(group, shard="tokens", interleave=4, **form)
    twins = Twins(shared, form, np.random.default_rng(11), sharding=sharding_of(shared.local))
    found = []
    for _ in range(2):
        for _ in range(12):
            twins.step(WRITES)
        shared.save(f"{folder}/cache.json")
        dist.barrier()
        found.append(len(os.listdir(folder)))
        loaded = ShardedKVCacheStore.load(f"{folder}/cache.json", group, shard="heads")
        twins.beside(loaded).check()
        if rank < 2:
            loaded = ShardedKVCacheStore.load(f"{folder}/cache.json", pair, shard="tokens", interleave=3)
            twins.beside(loaded).reread_all()
        dist.barrier()
    loaded = ShardedKVCacheStore.load(f"{folder}/cache.json", group, shard="tokens", interleave=5)
    twins = twins.beside(loaded)
    for _ in range(8):
        twins.step(WRITES)
    loaded.save(f"{folder}/cache.json")
    dist.barrier()
    files = sorted(name for name in os.listdir(folder) if name != "cache.json")
    dist.barrier()
    if rank == 0:
        os.replace(f"{folder}/{files[0]}", f"{folder}/{files[1]}")
    dist.barrier()
    messages = []
    for call in (
        lambda: ShardedKVCacheStore.load(f"{folder}/cache.json", group, shard="heads"),
        lambda: ShardedKVCacheStore.load(f"{folder}/{files[1]}", group, shard="heads"),
        lambda: loaded.save(f"{folder}/cache.txt"),
        lambda: loaded.save(f"{folder}/{'nowhere' * (rank == 1)}/cache.json"),
    ):
        try:
            call()
        except tikv.CacheFileError as error:
            messages.append(str(error))
        dist.barrier()
    return found, messages


def count_bytes(rank, world, group):
    """Bytes that this rank received from others: in a decode step of all layers, and for a prompt of 5 tokens."""
    from tikv.distributed import ranks

    found = [0]
    gather = ranks.Ranks.gather

    def counted(self, mine, operation, gathered=None):
        gathered = gather(self, mine, operation, gathered)
        found[-1] += gathered.numel() * gathered.element_size() - mine.numel() * mine.element_size()
        return gathered

    store = ShardedKVCacheStore(group, shard="tokens", interleave=4, **FORM | {"batch_size": 2})
    ranks.Ranks.gather = counted
    try:
        for layer in (0, 1):
            store.append(layer, *np.zeros((2, 2, 3, 6, 8), np.float32))
            store.attend(layer, np.zeros((2, 24, 8), np.float32))
        found.append(0)
        for layer in (0, 1):
            store.extend(layer, np.zeros((2, 5, 24, 8), np.float32), *np.zeros((2, 2, 5, 6, 8), np.float32))
    finally:
        ranks.Ranks.gather = gather
    return found


def compiled_calls(rank, world, group):
    """Inside of what torch compiles, and refused there where a graph may not break: (tokens held, why)."""
    import torch
    from torch._dynamo.exc import Unsupported

    compiled, plain = (ShardedKVCacheStore(group, shard="tokens", interleave=4, **FORM) for _ in range(2))
    torch.manual_seed(0)  # all ranks have the same rows

    def call(store, x):
        return store.extend(0, x * 2, x, x + 1) + 1

    function = torch.compile(call, backend="eager")
    for tokens in (5, 1, 1):
        x = torch.randn(tokens, 6, 8)
        assert torch.equal(function(compiled, x), call(plain, x))
    torch.compiler.reset()
    try:
        torch.compile(call, backend="eager", fullgraph=True)(compiled, x)
    except Unsupported as error:
        return compiled.length, str(error)
    return compiled.length, "not refused"
