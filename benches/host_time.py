"""What a call costs the host: microseconds until it returns, while the GPU has little to do, beside the calls of peers.

    python benches/host_time.py calls     # operations, stores and pools; float16, 8 KV heads of 128
    python benches/host_time.py models    # caches of transformers

Times are medians of rounds of 20 calls. Between rounds the program waits for the device, which is not counted.
"""

import functools
import statistics
import time

import torch
from gpu import HEADS, PAGE, WIDTH, Table, ratio, started

import tikv

GROUP, LAYERS, CALLS, ROUNDS = 4, 32, 20, 31
form = {"num_kv_heads": HEADS, "head_dim": WIDTH}


def host_us(machine, call):
    """Median microseconds of a call until it returns."""
    times = []
    for _ in range(3 if machine.small else ROUNDS):
        start = time.perf_counter()
        for _ in range(CALLS):
            call()
        times.append((time.perf_counter() - start) / CALLS)
        if machine.on_gpu:
            torch.cuda.synchronize()
    return statistics.median(times[1:]) * 1e6


def index_copies(caches, rows, position):
    """The call of torch that puts a token of each row into its cache (heads, tokens, width)."""

    def call():
        for cache, row in zip(caches, rows, strict=True):
            cache.index_copy_(1, position, row)

    return call


def cases(machine):
    """(name, a call, torch's name for it, its call)."""
    k, v = (machine.randn(LAYERS, 1, HEADS, WIDTH) for _ in "kv")
    caches = [machine.randn(HEADS, 256, WIDTH) for _ in range(2 * LAYERS)]
    turned = [a[layer].transpose(0, 1) for layer in range(LAYERS) for a in (k, v)]
    position = torch.tensor([77], device=machine.device)
    two, all_layers = (index_copies(caches[:n], turned[:n], position) for n in (2, 2 * LAYERS))
    copy = functools.partial(tikv.copy_kv, k[0], v[0], *caches[:2], position=77)
    yield "copy_kv, 1 token", copy, "two index_copy_", two
    ring = tikv.KVCacheStore(**form, num_layers=LAYERS, capacity=256, window=256)
    yield "KVCacheStore.append, 1 token", functools.partial(ring.append, 0, k[0], v[0]), "two index_copy_", two
    store = tikv.KVCacheStore(**form, num_layers=LAYERS, capacity=256, window=256)
    append_all = functools.partial(store.append_all, k, v)
    yield f"KVCacheStore.append_all, {LAYERS} layers", append_all, f"{2 * LAYERS} index_copy_", all_layers
    q = machine.randn(1, GROUP * HEADS, WIDTH)
    sdpa = functools.partial(
        torch.nn.functional.scaled_dot_product_attention,
        q[:, :, None], *(a[None] for a in caches[:2]), enable_gqa=True,
    )  # fmt: skip
    yield "KVCacheStore.attend", functools.partial(ring.attend, 0, q), "SDPA", sdpa
    extended = tikv.KVCacheStore(**form, num_layers=1, capacity=256, window=256)
    extend = functools.partial(extended.extend, 0, q, k[0], v[0])
    yield "KVCacheStore.extend", extend, "two index_copy_ and SDPA", lambda: (two(), sdpa())
    quant = tikv.KVCacheStore(**form, num_layers=1, capacity=256, window=256, dtype=tikv.Quant(4, 64))
    yield "the same, 4 bits", functools.partial(quant.extend, 0, q, k[0], v[0]), "", None
    sequences = 8
    pool = tikv.PagedKVCacheStore(**form, num_layers=1, num_blocks=sequences * 64, block_size=PAGE)
    seqs = [pool.add() for _ in range(sequences)]
    q, k, v = machine.randn(sequences, GROUP * HEADS, WIDTH), *(machine.randn(sequences, HEADS, WIDTH) for _ in "kv")
    yield f"PagedKVCacheStore.extend, {sequences} sequences", functools.partial(pool.extend, 0, q, k, v, seqs), "", None
    yield f"PagedKVCacheStore.attend, {sequences} sequences", functools.partial(pool.attend, 0, q, seqs), "", None
    pools = [machine.randn(64, PAGE, HEADS, WIDTH) for _ in "kv"]
    slots = torch.randperm(64 * PAGE, device=machine.device)[:sequences]

    def by_index():
        for cache, row in zip(pools, (k, v), strict=True):
            cache.view(-1, HEADS, WIDTH)[slots] = row

    yield "write_slots, 8 tokens", functools.partial(tikv.write_slots, k, v, *pools, slots), "indexing", by_index


def calls(machine):
    """Of operations, stores and pools."""
    table = Table("call", "us until it returns", "beside it, by torch", "us", "times torch's time")
    for name, call, peer, other in cases(machine):
        with table.attempt(name):
            us, other_us = host_us(machine, call), "" if other is None else host_us(machine, other)
            table.row(name, us, peer, other_us, ratio(us, other_us))


def models(machine):
    """`update` of a token of one layer with 8 KV heads of 64."""
    import transformers

    from tikv.integrations.transformers import TikvCache

    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=512, intermediate_size=1024, num_hidden_layers=1, num_attention_heads=HEADS,
        num_key_value_heads=HEADS, pad_token_id=0, eos_token_id=None,
    )  # fmt: skip
    table, room = Table("update of a token at 1,024 tokens", "us until it returns", "times StaticCache's"), 2048
    made = {
        "StaticCache": lambda: transformers.StaticCache(config, max_cache_len=room),
        "DynamicCache": lambda: transformers.DynamicCache(config=config),
        "TikvCache": lambda: TikvCache(config, max_cache_len=room),
        "TikvCache, int8": lambda: TikvCache(config, max_cache_len=room, dtype="int8"),
        "TikvCache, 4 bits": lambda: TikvCache(config, max_cache_len=room, dtype=tikv.Quant(4, 32)),
    }
    token, base = [torch.randn(1, HEADS, 1, 64, device=machine.device) for _ in "kv"], ""
    position = {"cache_position": torch.tensor([1024], device=machine.device)}  # what versions before 5.4 ask for
    for name, make in made.items():
        with table.attempt(name), torch.no_grad():
            cache = make()
            rows = [torch.randn(1, HEADS, 1024, 64, device=machine.device) for _ in "kv"]
            cache.update(*rows, 0, {"cache_position": torch.arange(1024, device=machine.device)})
            us = host_us(machine, lambda cache=cache: cache.update(*token, 0, position))
            base = us if name == "StaticCache" else base
            table.row(name, us, ratio(us, base))


if __name__ == "__main__":
    programs = {each.__name__: each for each in (calls, models)}
    what, machine = started(__doc__, programs)
    programs[what](machine)
