"""Device time of stores on an NVIDIA GPU: shared prefixes, keys by channel, rotated keys; 8 KV heads of 128.

    python benches/stores_gpu.py prefix      # 64 sequences share 8,192 tokens and have 256 of their own
    python benches/stores_gpu.py channels    # 4 bits: keys by channel over groups of tokens, beside groups along rows;
                                             # KVarN's tiles
    python benches/stores_gpu.py rotated     # writes and decode attention with rotate="hadamard" and without

Decode attention is over 32 sequences of 8,192 tokens. benches/gpu.py says how time is measured.
"""

import functools

import torch
from gpu import HEADS, PAGE, WIDTH, Table, check, check_attention, ratio, started

import tikv

SIZES = {False: (32, 8192), True: (2, 128)}  # sequences, tokens of each; of small runs


def prefix(machine):
    """A step of sequences that share what they begin with: read once for all, and by each alone."""
    sequences, shared, own = (4, 64, 20) if machine.small else (64, 8192, 256)
    table = Table("stored in", "query heads per KV head", "shared_prefix", "us", "GB/s", "times that of each alone")
    for dtype in ("float16", "int8"):
        blocks = shared // PAGE + sequences * (own // PAGE + 1)
        pool = tikv.PagedKVCacheStore(
            num_layers=1, num_kv_heads=HEADS, head_dim=WIDTH, num_blocks=blocks, block_size=PAGE, dtype=dtype
        )
        seqs = [pool.add()]
        pool.append(0, *(machine.randn(shared, HEADS, WIDTH) for _ in "kv"), seqs, [0, shared])
        seqs += [pool.fork(seqs[0]) for _ in range(sequences - 1)]
        rows = [machine.randn(own * sequences, HEADS, WIDTH) for _ in "kv"]
        pool.append(0, *rows, seqs, [own * n for n in range(sequences + 1)])
        for group in (1, 4):
            q = machine.randn(sequences, HEADS * group, WIDTH)
            alone, base = pool.attend(0, q, seqs, shared_prefix="off"), ""
            for how in ("off", "auto"):
                with table.attempt(dtype, str(group), how):
                    call = functools.partial(pool.attend, 0, q, seqs, shared_prefix=how)
                    check(call(), alone)
                    us = machine.us(call)
                    base = us if how == "off" else base
                    read = (shared if how == "auto" else shared * sequences) + own * sequences
                    nbytes = read * pool.nbytes / (blocks * PAGE)
                    table.row(dtype, str(group), how, us, nbytes / us / 1e3, ratio(us, base))


def store_of(machine, stored, batch, tokens):
    """A store with room for so many tokens, and rows for it."""
    form = {"num_layers": 1, "num_kv_heads": HEADS, "head_dim": WIDTH, "batch_size": batch, "capacity": tokens}
    store = tikv.KVCacheStore(**form, **stored)
    return store, [machine.randn(batch, tokens, HEADS, WIDTH) for _ in "kv"]


def attend(machine, store, group, most=2e-3):
    """Microseconds of decode attention, checked first."""
    q = machine.randn(store.batch_size, HEADS * group, WIDTH)
    call = functools.partial(store.attend, 0, q)
    numbers = [torch.from_dlpack(a)[0] for a in store.tokens(0)]
    check_attention(call()[0][:, None], q[0][:, None], *numbers, most=most)
    return machine.us(call)


def channels(machine):
    """Decode attention where keys are quantised by channel, and where they are not."""
    table = Table("stored as", "query heads per KV head", "us", "GB/s", "times the speed of quant4_64", "of float16")
    along = tikv.Quant(4, 64)
    ways = {
        "float16": {"dtype": "float16"},
        "quant4_64": {"dtype": along},
        "K by channel, the newest 64 in float16; V quant4_64": {
            "dtype": tikv.Quant(4, 64, "tokens", 64),
            "v_dtype": along,
        },
        "K by channel; V float16": {"dtype": tikv.Quant(4, 64, "tokens", 64), "v_dtype": "float16"},
        "kvarn_k4v2": {"dtype": "kvarn_k4v2"},
        "kvarn_k4v4": {"dtype": "kvarn_k4v4"},
    }
    found = {}
    for name, stored in ways.items():
        with table.attempt(name):
            store, rows = store_of(machine, stored, *SIZES[machine.small])
            store.append(0, *rows)
            for group in (1, 4):
                us = found[name, group] = attend(machine, store, group)
                others = (ratio(found.get((other, group), ""), us) for other in ("quant4_64", "float16"))
                table.row(name, str(group), us, store.nbytes / us / 1e3, *others)


def rotated(machine):
    """A write of all tokens and decode attention, with and without rotation."""
    table = Table("format", "work", "us", "GB/s", "times that without rotate")
    batch, tokens = SIZES[machine.small]
    for bits in (8, 4, 3, 2) if machine.on_gpu else (4,):
        base = {}
        for rotate in (None, "hadamard"):
            quant = tikv.Quant(bits, 64, rotate=rotate)
            with table.attempt(str(quant)):
                store, rows = store_of(machine, {"dtype": quant}, batch, tokens)

                def write(store=store, rows=rows):
                    store.reset()
                    store.append(0, *rows)

                times = {f"write of {batch * tokens:,} tokens": machine.us(write)}
                groups = (1, 4) if bits in (8, 4) else (1,)
                times |= {
                    f"decode, query heads per KV head: {group}": attend(machine, store, group, 5e-3) for group in groups
                }
                name = f"quant{bits}_64" + (", hadamard" if rotate else "")
                if rotate is None:
                    base = times
                for what, us in times.items():
                    nbytes = store.nbytes + (sum(a.nbytes for a in rows) if what.startswith("write") else 0)
                    table.row(name, what, us, nbytes / us / 1e3, ratio(us, base.get(what, "")))


if __name__ == "__main__":
    programs = {each.__name__: each for each in (prefix, channels, rotated)}
    what, machine = started(__doc__, programs)
    programs[what](machine)
