"""An append of one token, as in decoding. Most of the time is the call: 8 heads of 128 are 4 KiB in 16 bits."""

import numpy as np
import oracle
import pytest
import shapes

import tikv
from tikv import dtypes, reference
from tikv.tools import roofline

PEERS = ("tikv", "torch", "numpy")


def writer(peer, caches, position):
    """One call of a peer that puts one token of each array, (H, 1, D) or (1, H, D) for tikv, into its head-major cache.

    torch gets its index tensor ready made, and so does less than it would in a model.
    """
    if peer == "numpy":

        def run(*rows):
            for cache, row in zip(caches, rows, strict=True):
                cache[:, position : position + 1] = row

        return run
    import torch

    index = torch.tensor([position], device=caches[0].device)

    def run(*rows):
        for cache, row in zip(caches, rows, strict=True):
            cache.index_copy_(1, index, row)

    return run


@pytest.mark.parametrize("peer", PEERS, indirect=True)
@pytest.mark.parametrize("case", ["float32", "float16"])
def bench_copy_kv_one_token(arch, rng, peer, case, sizes, smoke, timed):
    heads, width, _ = shapes.SMOKE if smoke else shapes.MODELS["8x128"]
    dtype, position = np.dtype(case), sizes.context // 2 + 1
    rows = [oracle.numbers(rng, (1, heads, width), dtype) for _ in "kv"]
    before = [oracle.random_bits(rng, (heads, sizes.context, width), dtype) for _ in "kv"]
    place = oracle.to_torch if peer == "torch" else oracle.place
    caches = [place(cache.copy(), arch) for cache in before]
    if peer == "tikv":
        k, v = (place(row, arch) for row in rows)

        def call():
            tikv.copy_kv(k, v, *caches, position=position)
    else:
        k, v = (place(row.swapaxes(0, 1).copy(), arch) for row in rows)
        write = writer(peer, caches, position)

        def call():
            write(k, v)

    call()
    for name, row, old, cache in zip("kv", rows, before, caches, strict=True):
        oracle.assert_same_bits(cache, reference.copy(row, old, position=position), what=f"{peer}: {name}")
    moved = roofline.bytes_moved(1, heads, width, *[dtypes.parse(dtype, "bench")] * 2)
    timed(call, op="copy_kv", peer=peer, case=f"1 token, {case}", bytes_moved=moved, calls=sizes.calls)


@pytest.mark.parametrize("peer", PEERS, indirect=True)
def bench_append_all(arch, rng, peer, sizes, smoke, timed):
    heads, width, layers = shapes.SMOKE if smoke else shapes.MODELS["8x128"]
    dtype, slots = np.dtype(np.float16), sizes.context
    rows = [oracle.numbers(rng, (layers, 1, heads, width), dtype) for _ in "kv"]
    if peer == "tikv":
        # A ring, so that any number of calls fits.
        store = tikv.KVCacheStore(
            num_layers=layers, num_kv_heads=heads, head_dim=width, capacity=slots, window=slots, dtype="float16"
        )
        k, v = (oracle.place(row, arch) for row in rows)

        def call():
            store.append_all(k, v)

        call()
        call()
        kept = [[oracle.to_numpy(stream)[0] for stream in store.tokens(layer)] for layer in range(layers)]
    else:
        place = oracle.to_torch if peer == "torch" else oracle.place
        caches = [place(np.zeros((heads, slots, width), dtype), arch) for _ in range(2 * layers)]
        tokens = [place(row[layer].swapaxes(0, 1).copy(), arch) for layer in range(layers) for row in rows]
        write = writer(peer, caches, 1)

        def call():
            write(*tokens)

        writer(peer, caches, 0)(*tokens)
        call()
        kept = [
            [oracle.to_numpy(cache)[:, :2] for cache in caches[2 * layer : 2 * layer + 2]] for layer in range(layers)
        ]

    for layer, streams in enumerate(kept):
        for name, row, got in zip("kv", rows, streams, strict=True):
            twice = np.concatenate([row[layer]] * 2).swapaxes(0, 1)
            oracle.assert_same_bits(got, twice, what=f"{peer}: {name} of layer {layer}")
    moved = roofline.bytes_moved(1, heads, width, *[dtypes.float16] * 2, num_layers=layers)
    calls = max(1, sizes.calls // 10)
    timed(call, op="append_all", peer=peer, case=f"1 token, {layers} layers", bytes_moved=moved, calls=calls)


@pytest.mark.parametrize("peer", ["tikv", "torch"], indirect=True)
@pytest.mark.parametrize("cached", ["short", "long"])
def bench_append_after(arch, rng, peer, cached, sizes, timed):
    """One more token after few and after many. torch concatenates, as a growing cache does."""
    heads, width, _ = shapes.MODELS["2x64"]
    dtype, length = np.dtype(np.float16), getattr(sizes, cached)
    old = [oracle.random_bits(rng, (length, heads, width), dtype) for _ in "kv"]
    new = [oracle.random_bits(rng, (1, heads, width), dtype) for _ in "kv"]
    rounds, calls = (15, sizes.calls) if peer == "tikv" or cached == "short" else (7, 1)
    if peer == "tikv":
        store = tikv.KVCacheStore(
            num_layers=1,
            num_kv_heads=heads,
            head_dim=width,
            capacity=length + 2 * rounds * calls + 100,
            dtype="float16",
        )
        step = 1 << 16
        for start in range(0, length, step):
            store.append(0, *(oracle.place(stream[start : start + step], arch) for stream in old))
        k, v = (oracle.place(row, arch) for row in new)

        def call():
            store.append(0, k, v)

        call()
        kept = [oracle.to_numpy(stream)[0] for stream in store.tokens(0)]
    else:
        import torch

        caches = [oracle.to_torch(stream.swapaxes(0, 1).copy(), arch) for stream in old]
        tokens = [oracle.to_torch(row.swapaxes(0, 1).copy(), arch) for row in new]

        def call():
            return [torch.cat((cache, token), dim=1) for cache, token in zip(caches, tokens, strict=True)]

        kept = [oracle.to_numpy(cache) for cache in call()]

    for name, before, row, got in zip("kv", old, new, kept, strict=True):
        want = np.concatenate([before, row]).swapaxes(0, 1)
        oracle.assert_same_bits(got, want, what=f"{peer}: {name}")
    moved = roofline.bytes_moved(1, heads, width, *[dtypes.float16] * 2)
    case = f"1 token after {length:,}"
    timed(call, op="append", peer=peer, case=case, bytes_moved=moved, calls=calls, rounds=rounds)
