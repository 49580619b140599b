"""What tikv.init(invariant=True) costs on an NVIDIA GPU, in device time; 8 KV heads of 128.

    python benches/invariant_gpu.py          # attention: a token, and prompts
    python benches/invariant_gpu.py texts    # generate and generate_batch of transformers

Attention: one token of 32 sequences of 8,192 tokens, and prompts over 8,192 tokens of one sequence; benches/gpu.py says
how time is measured. Texts: whole calls with the model of benches/rollouts_gpu.py, the median of 3 after a first one.
`generate` writes 128 tokens by captured steps, its prompt included; `generate_batch` as many after each of 64 prompts
of 128 to 1,023 tokens. Each setting runs in its own process.
"""

import argparse
import functools
import json
import pathlib
import statistics
import sys
import time

import environment
import torch
from gpu import HEADS, PAGE, WIDTH, Machine, Table, printed_by, ratio, reason

import tikv

GROUP = 4  # query heads per KV head
SIZES = {False: (32, 8192, (64, 512, 2048, 8192)), True: (2, 128, (32,))}  # sequences, tokens of each; new tokens
TEXTS = {False: ((1, 4096), (8, 8192)), True: ((1, 24),)}  # texts, tokens of their prompts
NEW_TOKENS = {False: 128, True: 4}  # of each text


def calls(machine):
    """Each call by (dtype, what it is)."""
    batch, length, prompts = SIZES[machine.small]
    form = {"num_layers": 1, "num_kv_heads": HEADS, "head_dim": WIDTH}
    for dtype in ("float16", "bfloat16", "float8_e4m3fn", "int8", "quant4_64") if machine.on_gpu else ("float16",):
        like = torch.bfloat16 if dtype == "bfloat16" else torch.float16
        stored = tikv.Quant(4, 64) if dtype == "quant4_64" else dtype
        rows = [machine.randn(batch, length, HEADS, WIDTH).to(like) for _ in "kv"]
        store = tikv.KVCacheStore(**form, capacity=length, batch_size=batch, dtype=stored)
        store.append(0, *rows)
        q = machine.randn(batch, GROUP * HEADS, WIDTH).to(like)
        yield (dtype, f"a token of {batch} x {length:,}, contiguous"), functools.partial(store.attend, 0, q)
        pool = tikv.PagedKVCacheStore(**form, num_blocks=batch * length // PAGE, block_size=PAGE, dtype=stored)
        seqs = [pool.add() for _ in range(batch)]
        pool.append(0, *(a.flatten(0, 1) for a in rows), seqs, [n * length for n in range(batch + 1)])
        yield (dtype, "the same, pages of 16"), functools.partial(pool.attend, 0, q, seqs)
        for new in prompts:
            q = machine.randn(1, new, GROUP * HEADS, WIDTH).to(like)
            what = f"{new:,} new tokens over {length:,}, pages of 16"
            yield (dtype, what), functools.partial(pool.attend, 0, q, seqs[:1])


def texts(machine):
    """Each whole call of transformers by (what stores K and V, what it is)."""
    sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "examples"))
    import rollouts_gpu
    import whole_model

    from tikv.integrations.transformers import TikvCache, captured

    bench, new = rollouts_gpu.Bench(machine.small), NEW_TOKENS[machine.small]
    model, (count, stored) = bench.model, ((4, "float32") if machine.small else (64, "bfloat16"))

    def generate(ids, dtype):
        model.set_attn_implementation("tikv")
        cache = TikvCache(model.config, max_cache_len=ids.shape[1] + new, dtype=dtype)
        options = {whole_model.CACHE: cache, "custom_generate": captured, "max_new_tokens": new}
        model.generate(ids, do_sample=False, eos_token_id=None, **options)

    for dtype, form in ((None, "tikv"), ("int8", "tikv, int8")):
        for batch, length in TEXTS[machine.small]:
            ids = torch.tensor(bench.prompts([length] * batch), device=bench.device)
            what = f"generate: texts x tokens of the prompt {batch} x {length:,}"
            yield (dtype or stored, what), functools.partial(generate, ids, dtype)
        call = functools.partial(bench.call, bench.mixed(count), new, form)
        yield (dtype or stored, f"generate_batch: {count} prompts"), call


def whole_ms(machine, call):
    """The median time of a whole call in milliseconds, after a first one."""
    times = []
    for _ in range(2 if machine.small else 4):
        start = time.perf_counter()
        call()
        if machine.on_gpu:
            torch.cuda.synchronize()
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times[1:])


def measured(small, what, setting):
    """Print the time of each call, or why it could not be measured, as one line."""
    machine, found = Machine(small, invariant=setting), []
    for name, call in texts(machine) if what == "texts" else calls(machine):
        try:
            found.append((*name, whole_ms(machine, call) if what == "texts" else machine.us(call)))
        except Exception as error:
            found.append((*name, reason(error)))
        print(*found[-1], sep=" | ", file=sys.stderr, flush=True)
    print(json.dumps(found))


def main():
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", default="attention", choices=["attention", "texts"])
    parser.add_argument("--small", action="store_true", help="tiny sizes, once each, also without a GPU")
    parser.add_argument("--setting", choices=["default", "invariant"], help="measure this setting, in this process")
    given = parser.parse_args()
    if given.setting:
        measured(given.small, given.what, given.setting == "invariant")
        return
    found = []
    for setting in ("default", "invariant"):
        printed = printed_by([__file__, *sys.argv[1:], "--setting", setting])
        found.append(json.loads(printed.splitlines()[-1]))
    print(environment.line(environment.environment(["cuda" if torch.cuda.is_available() else "cpu"])))
    unit = "ms" if given.what == "texts" else "us"
    table = Table("stored in", "work", f"default, {unit}", f"invariant, {unit}", "times default")
    for (dtype, work, base), (_, _, took) in zip(*found, strict=True):
        table.row(dtype, work, base, took, ratio(took, base))


if __name__ == "__main__":
    main()
