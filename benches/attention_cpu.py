"""Attention on CPU beside torch's, by turns in one process: prompts, and what a call of one token costs the host.

    python benches/attention_cpu.py host                         # microseconds a call over tiny caches
    python benches/attention_cpu.py prompts --tokens 64 512      # times torch's speed over 4,096 keys

One thread each, timed by the time that this thread computed, so that other work on the machine counts little.
"""

import argparse
import time

import environment
import torch

import tikv

WIDTH = 128


def best_times(calls, repeats, rounds):
    """Least seconds of each call, by turns."""
    found = dict.fromkeys(calls, float("inf"))
    for _ in range(rounds + 1):  # the first turn compiles
        for name, call in calls.items():
            start = time.thread_time()
            for _ in range(repeats):
                call()
            found[name] = min(found[name], (time.thread_time() - start) / repeats)
    return found


def host(rounds):
    """Calls of one token whose arithmetic takes no time."""
    heads, width = 1, 16
    q, out = torch.randn(1, heads, width), torch.empty(1, heads, width)
    k, v = torch.randn(2, 1, heads, 16, width)
    k_pool, v_pool = torch.randn(2, 4, 4, heads, width)
    table, lens = torch.tensor([[0, 1, 2, 3]], dtype=torch.int32), torch.tensor([8], dtype=torch.int32)
    store = tikv.KVCacheStore(num_layers=1, num_kv_heads=heads, head_dim=width, capacity=16, dtype="float32")
    store.append(0, *torch.randn(2, 8, heads, width))
    calls = {
        "decode_attention, one int length": lambda: tikv.decode_attention(q, k, v, 8),
        "decode_attention, out given": lambda: tikv.decode_attention(q, k, v, 8, out=out),
        "decode_attention, array of lengths": lambda: tikv.decode_attention(q, k, v, lens),
        "paged_decode_attention": lambda: tikv.paged_decode_attention(q, k_pool, v_pool, table, lens),
        "store.attend": lambda: store.attend(0, q),
        "torch SDPA": lambda: torch.nn.functional.scaled_dot_product_attention(q[:, :, None], k, v),
    }
    print("| call | us |\n| --- | ---: |")
    for name, seconds in best_times(calls, 300, 4 * rounds).items():
        print(f"| {name} | {seconds * 1e6:.1f} |")


def prompts(tokens, keys, rounds):
    """The newest of `keys` tokens attend, each by its own causal mask; 2 KV heads."""
    print("| new tokens | query heads a KV head | dtype | torch ms | auto, times torch's speed | own kernel |")
    print("| ---: | ---: | --- | ---: | ---: | ---: |")
    for count in tokens:
        for group in (1, 4):
            for dtype in (torch.float32, torch.float16):
                q = torch.randn(1, 2 * group, count, WIDTH).to(dtype)
                k, v = torch.randn(2, 1, 2, keys, WIDTH).to(dtype)
                mask = torch.ones(count, keys, dtype=torch.bool).tril(keys - count)
                calls = {
                    "torch": lambda q=q, k=k, v=v, mask=mask: torch.nn.functional.scaled_dot_product_attention(
                        q, k, v, attn_mask=mask, enable_gqa=True
                    ),
                    "auto": lambda q=q, k=k, v=v: tikv.decode_attention(q, k, v, keys),
                    "own": lambda q=q, k=k, v=v: tikv.decode_attention(q, k, v, keys, impl="taichi"),
                }
                wanted = calls["torch"]().float()
                for name in ("auto", "own"):
                    error = (calls[name]().float() - wanted).abs().max().item()
                    assert error < 5e-3, f"{name} differs from torch by {error}"
                found = best_times(calls, 1, rounds)
                ratios = [found["torch"] / found[name] for name in ("auto", "own")]
                row = f"| {count} | {group} | {str(dtype).removeprefix('torch.')} | {found['torch'] * 1e3:.1f} |"
                print(f"{row} {ratios[0]:.2f} | {ratios[1]:.2f} |", flush=True)


def main():
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["host", "prompts"])
    parser.add_argument("--tokens", type=int, nargs="+", default=[64, 512, 2048])
    parser.add_argument("--keys", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    torch.set_num_threads(1)
    tikv.init("cpu", cpu_max_num_threads=1)
    print(f"{environment.line(environment.environment(['cpu']))}\n")
    if given.what == "host":
        host(given.rounds)
    else:
        prompts(given.tokens, given.keys, given.rounds)


if __name__ == "__main__":
    main()
