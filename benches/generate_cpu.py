"""Whole models on a CPU beside transformers' own cache, alternating in one process.

    python benches/generate_cpu.py                     # `generate` of 8 layers, prompts of 512 and 4,096 tokens
    python benches/generate_cpu.py step                # a step of 16 layers so small that Python takes most of it
    python benches/generate_cpu.py --threads 2         # `generate` on two threads

One thread is timed in its CPU time, so that other work on the machine counts little; several threads are timed by the
clock.
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
    """What alternates: (name, attention, a function that makes a cache from a configuration and a length)."""
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


def generations(prompts, tokens, rounds, clock):
    """Seconds of `generate`, of its prompt and of a token, for each dtype of the model."""
    print("| model | prompt | new tokens | cache | seconds | of the prompt | ms a token | seconds, of DynamicCache's |")
    print("| --- | ---: | ---: | --- | ---: | ---: | ---: | ---: |")
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
                        start = clock()
                        model.generate(ids, **given, max_new_tokens=new, do_sample=False)
                        seconds.append(clock() - start)
                    if turn:
                        found.setdefault(name, []).append(seconds)
            base = None
            for name, times in found.items():
                first, whole = (statistics.median(t[i] for t in times) for i in (0, 1))
                base = base or whole
                row = f"| {str(dtype).removeprefix('torch.')} | {prompt:,} | {tokens} | {name} | {whole:.2f} | "
                print(f"{row}{first:.2f} | {(whole - first) / tokens * 1e3:.2f} | {whole / base:.2f} |", flush=True)


def step(steps, rounds):
    """Milliseconds of a new cache with its prompt, and of a step, for a model with almost no arithmetic."""
    model = model_of(16, 32, 2, 2, 32)
    ids, found = torch.randint(1, 256, (1, 32)), {}
    for turn in range(rounds + 1):
        for name, attention, make in caches(["model", "int8"]):
            model.set_attn_implementation(attention)
            token, prompts, seconds = ids[:, :1], *found.setdefault(name, ([], []))
            with torch.no_grad():
                start = time.thread_time()
                given = {CACHE: make(model.config, 1024)}
                model(ids, **given, use_cache=True)
                model(token, **given, use_cache=True)
                if turn:
                    prompts.append(time.thread_time() - start)
                for _ in range(steps):
                    start = time.thread_time()
                    model(token, **given, use_cache=True)
                    if turn:
                        seconds.append(time.thread_time() - start)
    print("| cache | prompt and first token, ms | a step, ms | of DynamicCache |\n| --- | ---: | ---: | ---: |")
    base = None
    for name, times in found.items():
        prompt, milliseconds = (statistics.median(t) * 1e3 for t in times)
        base = base or milliseconds
        print(f"| {name} | {prompt:.1f} | {milliseconds:.3f} | {milliseconds / base:.2f} |", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", default="generate", choices=["generate", "step"])
    parser.add_argument("--prompts", type=int, nargs="+", default=[512, 4096])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1, help="threads of generate")
    args = parser.parse_args()
    threads = 1 if args.what == "step" else args.threads
    torch.set_num_threads(threads)
    tikv.init("cpu", cpu_max_num_threads=threads)
    print(f"{environment.line(environment.environment(['cpu']), ['cpu'])}\n")
    if args.what == "step":
        step(60, args.rounds)
    else:
        generations(args.prompts, args.tokens, args.rounds, time.thread_time if threads == 1 else time.perf_counter)


if __name__ == "__main__":
    main()
