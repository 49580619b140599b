"""Device time of what methods that compress a cache call, on an NVIDIA GPU; 8 KV heads of 128, 4 query heads for each.

    python benches/compression_gpu.py tiles      # KVarN: tokens, writes of tiles, prompts, beside quant4_64 and float16
    python benches/compression_gpu.py mass       # 64 queries over 8,192 tokens, with the mass that they give each
    python benches/compression_gpu.py budget     # uneven numbers of tokens for 8 heads of 32,768, 64 sequences
    python benches/compression_gpu.py rewrite    # a block of 32 tokens: replaced and attended, or appended and attended

benches/gpu.py says how time is measured. A call that appends is timed with a store of its own for each time.
"""

import functools

import torch
from gpu import HEADS, ROUNDS, WIDTH, Table, ratio, started

import tikv

GROUP = 4
TOKENS = {False: (32, 8192), True: (2, 256)}  # sequences, tokens of each; of small runs
PROMPTS = {False: (2048, (8192, 32768)), True: (128, (256,))}  # new tokens, over so many
MASS = {False: ((1, 8), 64, 8192), True: ((1,), 8, 64)}  # sequences, queries, tokens
BUDGET = {False: (64, 32768, 2048), True: (2, 128, 32)}  # sequences, tokens, kept of each head
BLOCK = {False: (32, 8192), True: (8, 64)}
FORMATS = ("float16", "quant4_64", "kvarn_k4v2", "kvarn_k4v4")
TILE = 128
CALLS = ROUNDS + 2  # of one store: the first, those that are timed, and one before


def filled(machine, name, batch, tokens, room=0):
    """A store that holds so many tokens, with room for more."""
    dtype = tikv.Quant(4, 64) if name == "quant4_64" else name
    form = {"num_layers": 1, "num_kv_heads": HEADS, "head_dim": WIDTH, "batch_size": batch, "capacity": tokens + room}
    store = tikv.KVCacheStore(**form, dtype=dtype)
    store.append(0, *(machine.randn(batch, tokens, HEADS, WIDTH) for _ in "kv"))
    return store


def rows_for(machine, batch, tokens):
    """Queries, keys and values of new tokens."""
    return [machine.randn(batch, tokens, heads, WIDTH) for heads in (HEADS * GROUP, HEADS, HEADS)]


def tiles(machine):
    """A token, the write of a tile, and prompts, over each format."""
    table = Table("stored as", "work", "us", "times the speed of quant4_64", "of float16")
    batch, tokens = TOKENS[machine.small]
    new, lengths = PROMPTS[machine.small]
    found = {}

    def row(name, what, us):
        found[name, what] = us
        table.row(name, what, us, *(ratio(found.get((base, what), ""), us) for base in ("quant4_64", "float16")))

    for name in FORMATS:
        with table.attempt(name):
            store = filled(machine, name, batch, tokens, CALLS * TILE)
            q, k, v = rows_for(machine, batch, TILE)
            one = [a[:, :1].contiguous() for a in (q, k, v)]
            store.append(0, *one[1:])
            row(name, f"a token of {batch} x {tokens:,}", machine.us(functools.partial(store.attend, 0, one[0])))
            what = f"append of {TILE} tokens to {batch} sequences: a tile for each head"
            row(name, what, machine.us(functools.partial(store.append, 0, k, v)))
            del store
        for held in lengths:
            with table.attempt(name, f"{held:,}"):
                q, k, v = rows_for(machine, 1, new)
                store = filled(machine, name, 1, held, new)
                call = functools.partial(store.extend, 0, q, k, v, keep=False)
                row(name, f"{new:,} new tokens over {held:,}, attention", machine.us(call))
                stores = [filled(machine, name, 1, held - new, 2 * new) for _ in range(ROUNDS)]
                calls = [functools.partial(each.extend, 0, q, k, v) for each in stores]
                row(name, f"{new:,} new tokens over {held:,}, attention and append", machine.us(*calls))


def mass(machine):
    """Attention of some queries, and with the mass that they give each token."""
    batches, queries, tokens = MASS[machine.small]
    table = Table("stored in", "sequences", "mass", "us", "times that of attention alone")
    for name in ("float16", "int8", "quant4_64", "kvarn_k4v2"):
        for batch in batches:
            base = ""
            with table.attempt(name, str(batch)):
                store = filled(machine, name, batch, tokens - queries, queries)
                q, k, v = rows_for(machine, batch, queries)
                store.append(0, k, v)
                for kind in ("", "sum", "max", "last"):
                    us = machine.us(functools.partial(store.attend, 0, q, return_mass=kind or False))
                    base = us if not kind else base
                    table.row(name, str(batch), kind or "none", us, ratio(us, base))


def budget(machine):
    """Which tokens heads keep that share a budget, beside the choice of as many for each head."""
    batch, tokens, kept = BUDGET[machine.small]
    table = Table("call", "us", "GB/s of scores", "times that of select")
    scores = torch.rand(batch, HEADS, tokens, device=machine.device)
    layers = torch.rand(2, batch, HEADS, tokens, device=machine.device)
    calls = {
        f"select, {kept:,} of {tokens:,} for each head": functools.partial(tikv.select, scores[:, :, None], kept),
        f"budget, {kept:,} for each head on average": functools.partial(tikv.budget, scores, HEADS * kept),
        "budget over two layers": functools.partial(tikv.budget, layers, 2 * HEADS * kept, over="layers"),
    }
    base = ""
    for what, call in calls.items():
        with table.attempt(what):
            us = machine.us(call)
            base = base or us
            read = (layers if "layers" in what else scores).nbytes
            table.row(what, us, read / us / 1e3, ratio(us, base))


def rewrite(machine):
    """A step of a diffusion language model: a block's rows are replaced; beside a step that appends a block."""
    block, tokens = BLOCK[machine.small]
    table = Table("stored in", "work", "us", "times that of append and attention")
    for name in ("float16", "int8", "quant4_64"):
        with table.attempt(name):
            q, k, v = rows_for(machine, 1, block)
            store = filled(machine, name, 1, tokens, CALLS * block)
            store.append(0, k, v)

            def replaced(store=store, q=q, k=k, v=v):
                store.rewrite(0, tokens, k, v)
                return store.attend(0, q, block=block)

            def appended(store=store, q=q, k=k, v=v):
                store.append(0, k, v)
                return store.attend(0, q)

            again, once = machine.us(replaced), machine.us(appended)
            table.row(name, f"append of {block} tokens, attention of {block}", once, "")
            table.row(name, f"rewrite of {block} tokens, attention of {block}", again, ratio(again, once))


if __name__ == "__main__":
    programs = {each.__name__: each for each in (tiles, mass, budget, rewrite)}
    what, machine = started(__doc__, programs)
    programs[what](machine)
