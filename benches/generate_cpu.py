"""Whole models on CPU beside transformers' own cache, by turns in one process.

    python benches/generate_cpu.py                     # `generate` of 8 layers, prompts of 512 and 4,096 tokens
    python benches/generate_cpu.py host                # a step of 16 layers so small that Python is what it takes

One thread, timed by the time that it computed, so that other work on the machine counts little.
"""

import argparse
import inspect
import statistics
import time

import environment
import torch
import transformers

import tikv
from tikv.integrations.transformers import TikvCache

CACHE = "cache" if "cache" in inspect.signature(transformers.LlamaForCausalLM.forward).parameters else "past_key_values"


def model_of(layers, width, heads, kv_heads, head_dim):
    """A Llama with random weights."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=width, intermediate_size=2 * width, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=head_dim, max_position_embeddings=1 << 16,
        pad_token_id=0, eos_token_id=None,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


def caches(dtypes):
    """(name, attention, how a cache is made of a configuration and a length) by turns."""
    yield "DynamicCache", "sdpa", lambda config, length: transformers.DynamicCache(config=config)
    for dtype in dtypes:
        yield (
            f"TikvCache {dtype}",
            "tikv",
            lambda config, length, dtype=dtype: TikvCache(
                config, max_cache_len=length, dtype=None if dtype == "model" else dtype
            ),
        )
    yield "TikvCache growing", "tikv", lambda config, length: TikvCache(config)


def generations(prompts, tokens, rounds):
    """Seconds of `generate`, of its prompt and of a token, for each dtype of the model."""
    for dtype, formats in ((torch.float32, ["model", "float16", "int8"]), (torch.float16, ["model", "int8"])):
        model = model_of(8, 512, 8, 4, 64).to(dtype)
        for prompt in prompts:
            ids = torch.randint(1, 256, (1, prompt))
            found = {}
            for turn in range(rounds + 1):  # the first compiles
                for name, attention, make in caches(formats):
                    model.set_attn_implementation(attention)
                    seconds = []
                    for new in (1, 1 + tokens):
                        given = {CACHE: make(model.config, prompt + tokens + 8)}
                        start = time.thread_time()
                        model.generate(ids, **given, max_new_tokens=new, do_sample=False)
                        seconds.append(time.thread_time() - start)
                    if turn:
                        found.setdefault(name, []).append(seconds)
            print(f"\nmodel {dtype}, prompt {prompt:,}, {tokens} new tokens: seconds, of the prompt, ms a token")
            base = None
            for name, times in found.items():
                first, whole = (statistics.median(t[i] for t in times) for i in (0, 1))
                base = base or whole
                step = (whole - first) / tokens * 1e3
                print(f"  {name:20} {whole:7.2f}  {first:6.2f}  {step:6.2f}   {whole / base:.2f}x", flush=True)


def host(steps, rounds):
    """Milliseconds of a step of the model alone, whose arithmetic is next to nothing."""
    model = model_of(16, 32, 2, 2, 32)
    ids, found = torch.randint(1, 256, (1, 32)), {}
    for turn in range(rounds + 1):
        for name, attention, make in caches(["model", "int8"]):
            model.set_attn_implementation(attention)
            given, token = {CACHE: make(model.config, 1024)}, ids[:, :1]
            with torch.no_grad():
                model(ids, **given, use_cache=True)
                for step in range(steps):
                    start = time.thread_time()
                    model(token, **given, use_cache=True)
                    if turn and step > 4:
                        found.setdefault(name, []).append(time.thread_time() - start)
    base = None
    for name, times in found.items():
        milliseconds = statistics.median(times) * 1e3
        base = base or milliseconds
        print(f"  {name:20} {milliseconds:7.3f} ms  {milliseconds / base:.2f}x", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", default="generate", choices=["generate", "host"])
    parser.add_argument("--prompts", type=int, nargs="+", default=[512, 4096])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    tikv.init("cpu", cpu_max_num_threads=1)
    print(environment.line(environment.environment(["cpu"]), ["cpu"]))
    if args.what == "host":
        host(60, args.rounds)
    else:
        generations(args.prompts, args.tokens, args.rounds)


if __name__ == "__main__":
    main()
