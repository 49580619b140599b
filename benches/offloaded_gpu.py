"""A decode step over caches in the memory of the host, beside transformers' own and the rate of the link to the GPU.

    python benches/offloaded_gpu.py

There are 8 texts of 16,384 tokens, and the model of examples/whole_model.py with 16 layers of 2,048, 8 KV heads of 128,
in bfloat16. Steps run without `generate`, and the program waits for each. Times are medians of 8.
"""

import argparse
import pathlib
import statistics
import sys
import time

import environment
import torch
import transformers
from gpu import Machine, Table, ratio

import tikv
from tikv.integrations.transformers import TikvCache

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "examples"))
import whole_model

SIZES = {False: ("large", "bfloat16", 8, 16384, 8), True: ("small", "float32", 2, 24, 2)}  # texts, tokens, steps


def link_rate(machine):
    """GB/s of copies of 1 GiB of page-locked memory; the best of a few, since it is a limit."""
    host = torch.empty(1 << 30, dtype=torch.uint8).pin_memory()
    there = torch.empty_like(host, device="cuda")
    return host.nbytes / min(machine.us(lambda: there.copy_(host, non_blocking=True)) for _ in range(3)) / 1e3


def generated(machine, model, ids, cache, steps):
    """(milliseconds of the prompt, of a step, the tokens)."""

    def forward(tokens):
        start = time.perf_counter()
        logits = model(tokens, **{whole_model.CACHE: cache}, use_cache=True, logits_to_keep=1).logits
        found = logits[:, -1:].argmax(-1)
        if machine.on_gpu:
            torch.cuda.synchronize()
        return found, 1e3 * (time.perf_counter() - start)

    with torch.no_grad():
        token, prompt = forward(ids)
        tokens, times = [token], []
        for _ in range(steps):
            token, step = forward(token)
            tokens.append(token)
            times.append(step)
    return prompt, statistics.median(times), torch.cat(tokens, 1)


def bytes_of(cache):
    """Keys, values and scales of all layers, wherever they are."""
    if isinstance(cache, TikvCache):
        return cache.nbytes
    return sum(a.nbytes for layer in cache.layers for a in (layer.keys, layer.values))


def main():
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="a small model, also without a GPU")
    machine = Machine(parser.parse_args().small)
    size, dtype, batch, prompt, steps = SIZES[machine.small]
    print(environment.line(environment.environment([machine.device])), flush=True)
    model = whole_model.model_of(size, machine.device, getattr(torch, dtype))
    ids = torch.randint(1, model.config.vocab_size, (batch, prompt), device=machine.device)
    made = {"max_cache_len": prompt + steps + 1, "place": "host"}
    ways = {
        "DynamicCache, offloaded": lambda: transformers.DynamicCache(config=model.config, offloading=machine.on_gpu),
        "TikvCache, host": lambda: TikvCache(model.config, **made),
        "TikvCache, host, int8": lambda: TikvCache(model.config, **made, dtype="int8"),
        "TikvCache, host, 4 bits": lambda: TikvCache(model.config, **made, dtype=tikv.Quant(4, 64)),
    }
    columns = ("cache, MB", "GB/s", "of the link's rate", "times offloaded's speed", "tokens as with offloading")
    table = Table("cache", "prompt, ms", "a step, ms", *columns)
    link = ""
    if machine.on_gpu:
        with table.attempt("a copy of page-locked memory to the GPU"):
            link = link_rate(machine)
            table.row("a copy of page-locked memory to the GPU", "", "", "", link)
    base, text = "", None
    for name, make in ways.items():
        with table.attempt(name):
            model.set_attn_implementation("tikv" if name.startswith("Tikv") else "sdpa")
            cache = make()
            first, step, tokens = generated(machine, model, ids, cache, steps)
            if name.startswith("DynamicCache"):
                base, text = step, tokens
            megabytes = bytes_of(cache) / 1e6
            same = "" if text is None else f"{whole_model.same(tokens, text)} of {steps + 1}"
            rates = (megabytes / step, ratio(megabytes / step, link), ratio(base, step))
            table.row(name, first, step, megabytes, *rates, same)
            del cache


if __name__ == "__main__":
    main()
