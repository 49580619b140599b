"""CUDA: one token of all layers by a captured graph, and the calls whose time is the launch, beside torch's own."""

import numpy as np
import oracle
import pytest
import shapes
from capture import captured

import tikv
from tikv import dtypes, reference
from tikv.tools import roofline

pytestmark = pytest.mark.archs("cuda")


@pytest.mark.parametrize("peer", ["tikv", "torch"], indirect=True)
@pytest.mark.parametrize("stacked", [False, True], ids=["append", "append_all"])
def bench_captured_step(arch, rng, peer, stacked, sizes, smoke, timed):
    """K and V of one token for every layer, at a position that a graph reads from the device and increments."""
    import torch

    heads, width, layers = shapes.SMOKE if smoke else shapes.MODELS["8x128"]
    slots = sizes.context
    rows = [oracle.numbers(rng, (layers, 1, heads, width), np.float16) for _ in "kv"]
    k, v = (oracle.place(row, arch) for row in rows)
    position = torch.zeros(1, dtype=torch.int64, device="cuda")
    if peer == "tikv":
        store = tikv.KVCacheStore(
            num_layers=layers, num_kv_heads=heads, head_dim=width, capacity=slots, window=slots, dtype="float16"
        )

        def step():
            if stacked:
                store.append_all(k, v, positions=position)
            else:
                for layer in range(layers):
                    store.append(layer, k[layer], v[layer], positions=position)
            position.add_(1).remainder_(slots)

        caches = [(store.keys(layer).torch()[0], store.values(layer).torch()[0]) for layer in range(layers)]
    else:
        if stacked:
            pytest.skip("torch has no call for all layers of a cache of its own kind")
        caches = [tuple(torch.zeros(heads, slots, width, dtype=k.dtype, device="cuda") for _ in "kv") for _ in k]

        def step():
            for layer, pair in enumerate(caches):
                for cache, row in zip(pair, (k, v), strict=True):
                    cache.index_copy_(1, position, row[layer].transpose(0, 1))
            position.add_(1).remainder_(slots)

    replay = captured(step)
    for pair in caches:
        for cache in pair:
            cache.zero_()
    position.fill_(3)
    replay()
    replay()
    for layer, pair in enumerate(caches):
        for name, cache, row in zip("kv", pair, rows, strict=True):
            want = np.zeros((heads, slots, width), np.float16)
            want[:, 3:5] = row[layer].swapaxes(0, 1)
            oracle.assert_same_bits(cache, want, what=f"{peer}: {name} of layer {layer}")
    moved = roofline.bytes_moved(1, heads, width, *[dtypes.float16] * 2, num_layers=layers)
    case = f"1 token, {layers} layers, {'append_all' if stacked else 'append'}"
    timed(replay, op="captured step", peer=peer, case=case, bytes_moved=moved, calls=max(1, sizes.calls // 10))


@pytest.mark.parametrize("peer", ["tikv", "torch"], indirect=True)
def bench_write_slots_few(arch, rng, peer, smoke, sizes, timed):
    """Eight tokens into random pages: what is timed is the call."""
    heads, width, _ = shapes.SMOKE if smoke else shapes.MODELS["8x128"]
    block, tokens, pages = 16, 8, 64
    rows = [oracle.random_bits(rng, (tokens, heads, width), np.float16) for _ in "kv"]
    before = [oracle.random_bits(rng, (pages, block, heads, width), np.float16) for _ in "kv"]
    slots = rng.permutation(pages * block)[:tokens].astype(np.int64)
    k, v, k_pool, v_pool = (oracle.place(a.copy(), arch) for a in (*rows, *before))
    mapping = oracle.place(slots, arch)
    if peer == "tikv":

        def call():
            tikv.write_slots(k, v, k_pool, v_pool, mapping)
    else:
        flat = [pool.view(-1, heads, width) for pool in (k_pool, v_pool)]

        def call():
            flat[0][mapping] = k
            flat[1][mapping] = v

    call()
    for name, row, old, pool in zip("kv", rows, before, (k_pool, v_pool), strict=True):
        oracle.assert_same_bits(pool, reference.write_slots(row, old, slots), what=f"{peer}: {name}")
    moved = roofline.bytes_moved(tokens, heads, width, *[dtypes.float16] * 2)
    timed(call, op="write_slots", peer=peer, case=f"{tokens} tokens", bytes_moved=moved, calls=sizes.calls)


@pytest.mark.parametrize("peer", ["tikv", "torch", "transformers"])
def bench_append_one_layer(arch, rng, peer, smoke, sizes, timed):
    """One token of one layer of a store, beside torch's two index copies and transformers' StaticCache.update."""
    import torch

    heads, width, layers = shapes.SMOKE if smoke else shapes.MODELS["8x128"]
    slots = sizes.context
    rows = [oracle.numbers(rng, (1, heads, width), np.float16) for _ in "kv"]
    k, v = (oracle.place(row, arch) for row in rows)
    position = torch.zeros(1, dtype=torch.int64, device="cuda")
    k_heads, v_heads = k.transpose(0, 1)[None], v.transpose(0, 1)[None]
    if peer == "tikv":
        store = tikv.KVCacheStore(
            num_layers=layers, num_kv_heads=heads, head_dim=width, capacity=slots, window=slots, dtype="float16"
        )
        caches = store.keys(0).torch()[0], store.values(0).torch()[0]

        def call():
            store.append(0, k, v)
    elif peer == "torch":
        caches = tuple(torch.zeros(1, heads, slots, width, dtype=k.dtype, device="cuda") for _ in "kv")

        def call():
            caches[0].index_copy_(2, position, k_heads)
            caches[1].index_copy_(2, position, v_heads)
    else:
        transformers = pytest.importorskip("transformers", reason="transformers is not installed")
        config = transformers.LlamaConfig(
            hidden_size=heads * width, num_attention_heads=heads, num_key_value_heads=heads, num_hidden_layers=layers
        )
        slots = 1 << 15  # it counts its own tokens, and has to hold those of all calls
        cache = transformers.StaticCache(config, max_cache_len=slots)
        caches = cache.update(k_heads, v_heads, 0, {"cache_position": position})

        def call():
            cache.update(k_heads, v_heads, 0, {"cache_position": position})

    call()
    for name, cached, row in zip("kv", caches, rows, strict=True):
        got = oracle.to_numpy(cached).reshape(heads, slots, width)[:, :1]
        oracle.assert_same_bits(got, row.swapaxes(0, 1), what=f"{peer}: {name}")
    moved = roofline.bytes_moved(1, heads, width, *[dtypes.float16] * 2)
    timed(call, op="append", peer=peer, case="1 token, 1 layer", bytes_moved=moved, calls=sizes.calls)
