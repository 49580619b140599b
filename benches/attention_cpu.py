"""Attention on a CPU beside torch's, alternating in one process: prompts, and what a call for one token costs the host.

    python benches/attention_cpu.py host                         # microseconds per call over tiny caches
    python benches/attention_cpu.py prompts --tokens 64 512      # as a multiple of torch's speed, over 4,096 keys
    python benches/attention_cpu.py chosen                       # 1,024 of 32,768 tokens, beside all of them and torch
    python benches/attention_cpu.py invariant                    # what tikv.init(invariant=True) costs

Everything runs on one thread and is timed in that thread's CPU time, so that other work on the machine counts little.
"""

import argparse
import statistics
import time

import environment
import torch

import tikv

WIDTH = 128


def best_times(calls, repeats, rounds):
    """The fewest seconds of each call; the calls alternate."""
    found = dict.fromkeys(calls, float("inf"))
    for _ in range(rounds + 1):  # the first turn compiles
        for name, call in calls.items():
            start = time.thread_time()
            for _ in range(repeats):
                call()
            found[name] = min(found[name], (time.thread_time() - start) / repeats)
    return found


def median_times(calls, rounds):
    """The median seconds of each call; the calls alternate."""
    found = {name: [] for name in calls}
    for n in range(rounds + 1):
        for name, call in calls.items():
            start = time.thread_time()
            call()
            if n:  # the first turn compiles
                found[name].append(time.thread_time() - start)
    return {name: statistics.median(each) for name, each in found.items()}


def host(rounds):
    """Calls for one token, whose arithmetic takes hardly any time."""
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
    """The newest of `keys` tokens attend, each under its causal mask, with 2 KV heads."""
    print("| new tokens | query heads per KV head | dtype | torch ms | auto, times torch's speed | own kernel |")
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


def chosen(chosen_tokens, keys, rounds):
    """One token with 32 query heads and 8 KV heads attends to some of `keys` tokens, which are drawn at random."""
    heads, group = 8, 4
    print("| dtype | order in memory | chosen by | ms | of all tokens | of as many in a row | torch / tikv, time |")
    print("| --- | --- | --- | ---: | ---: | ---: | ---: |")
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        for order in ("head_major", "token_major"):
            for by_head in (False, True):
                k, v = torch.randn(2, 1, heads, keys, WIDTH).to(dtype)
                if order == "token_major":
                    k, v = (a.transpose(1, 2).contiguous().transpose(1, 2) for a in (k, v))
                q = torch.randn(1, heads * group, 1, WIDTH).to(dtype)
                rows = [torch.randperm(keys)[:chosen_tokens] for _ in range(heads if by_head else 1)]
                indices = torch.stack(rows)[None, :, None] if by_head else rows[0][None, None]
                few_k, few_v = (a[:, :, :chosen_tokens].contiguous() for a in (k, v))

                def gather(q=q, k=k, v=v, indices=indices, by_head=by_head):
                    if by_head:
                        at = indices[:, :, 0, :, None].expand(-1, -1, -1, WIDTH)
                        some = [a.gather(2, at) for a in (k, v)]
                    else:
                        some = [a.index_select(2, indices[0, 0]) for a in (k, v)]
                    return torch.nn.functional.scaled_dot_product_attention(q, *some, enable_gqa=True)

                calls = {
                    "chosen": lambda q=q, k=k, v=v, i=indices: tikv.decode_attention(q, k, v, keys, indices=i),
                    "all": lambda q=q, k=k, v=v: tikv.decode_attention(q, k, v, keys, impl="taichi"),
                    "few": lambda q=q, k=few_k, v=few_v: tikv.decode_attention(q, k, v, k.shape[2], impl="taichi"),
                    "torch": gather,
                }
                widened = gather(*(a.float() for a in (q, k, v)))
                torch.testing.assert_close(calls["chosen"](), widened.to(dtype), msg="chosen tokens differ from torch")
                found = median_times(calls, 5 * rounds)
                own, name = found["chosen"], str(dtype).removeprefix("torch.")
                row = f"| {name} | {order} | {'head' if by_head else 'sequence'} | {own * 1e3:.2f} | "
                ratios = f"{own / found['all']:.3f} | {own / found['few']:.2f} | {found['torch'] / own:.1f} |"
                print(row + ratios, flush=True)


def of_invariant(keys):
    """Name -> call over `keys` tokens: single tokens with 8 KV heads, and prompts with 2."""
    calls = {}
    for dtype in (torch.float32, torch.float16, torch.bfloat16, "int8"):
        name = str(dtype).removeprefix("torch.")
        for group in (1, 4):
            store = tikv.KVCacheStore(
                num_layers=1, num_kv_heads=8, head_dim=WIDTH, capacity=keys, dtype=name, head_dim_v=WIDTH
            )
            store.append(0, *torch.randn(2, keys, 8, WIDTH))
            q = torch.randn(1, 8 * group, WIDTH)
            calls[name, f"one token, group of {group}"] = lambda store=store, q=q: store.attend(0, q)
        if dtype == "int8":
            continue
        pool = tikv.PagedKVCacheStore(
            num_layers=1, num_kv_heads=8, head_dim=WIDTH, num_blocks=keys // 16, block_size=16, dtype=name
        )
        seq = pool.add()
        pool.append(0, *torch.randn(2, keys, 8, WIDTH), [seq], [0, keys])
        calls[name, "one token, group of 4, pages of 16"] = lambda pool=pool, q=q, seq=seq: pool.attend(0, q, [seq])
        k, v = torch.randn(2, 1, 2, keys, WIDTH).to(dtype)
        for tokens in (16, 512):
            q = torch.randn(1, 8, tokens, WIDTH).to(dtype)
            for how in ("taichi", "auto"):
                what = f"{tokens} tokens of a prompt" + (", beside torch's" if how == "auto" else "")
                if how == "taichi" or (tokens >= 64 and dtype is not torch.bfloat16):
                    calls[name, what] = lambda q=q, k=k, v=v, how=how: tikv.decode_attention(q, k, v, keys, impl=how)
    return calls


def invariant(keys, rounds):
    """Time each call with the setting and without it."""
    found = {}
    for setting in (False, True):
        tikv.runtime.ti.reset()
        tikv.init("cpu", cpu_max_num_threads=1, invariant=setting)
        found[setting] = best_times(of_invariant(keys), 1, rounds)
    print("| dtype | call | default, ms | invariant, times default |\n| --- | --- | ---: | ---: |")
    for (dtype, what), seconds in found[False].items():
        print(f"| {dtype} | {what} | {seconds * 1e3:.2f} | {found[True][dtype, what] / seconds:.2f} |", flush=True)


def main():
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["host", "prompts", "chosen", "invariant"])
    parser.add_argument("--tokens", type=int, nargs="+", default=[64, 512, 2048])
    parser.add_argument("--keys", type=int, help="4,096 for prompts, 32,768 for chosen, 8,192 for invariant")
    parser.add_argument("--chosen", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    torch.set_num_threads(1)
    tikv.init("cpu", cpu_max_num_threads=1)
    print(f"{environment.line(environment.environment(['cpu']))}\n")
    if given.what == "host":
        host(given.rounds)
    elif given.what == "invariant":
        invariant(given.keys or 8192, given.rounds)
    elif given.what == "chosen":
        chosen(given.chosen, given.keys or 32768, given.rounds)
    else:
        prompts(given.tokens, given.keys or 4096, given.rounds)


if __name__ == "__main__":
    main()
