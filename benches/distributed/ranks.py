"""Caches over several GPUs: each result is checked against one store first, then timed.

    benches/distributed/gpus.sh              by torchrun, on two GPUs
    benches/distributed/gpus.sh --small      on a laptop, with gloo, to see that it runs

Each process takes the GPU of its local rank, by torch.cuda.set_device. Times are medians, of the slowest rank.
"""

import argparse
import os
import statistics
import time

import environment
import torch
import torch.distributed as dist
from capture import captured

import tikv
from tikv.arrays import view
from tikv.distributed import ShardedKVCacheStore, recv_sequence, send_sequence
from tikv.ops.attention.request import AttentionScale

HEADS, GROUP, WIDTH = 8, 4, 128
rows: list[tuple[str, str]] = []


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--small", action="store_true", help="sizes that a laptop does in seconds")
    small = parser.parse_args().small
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    tikv.init(arch="cuda" if cuda else "cpu")
    dist.init_process_group("nccl" if cuda else "gloo", **({"device_id": device} if cuda else {}))
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    for shard in ("heads", "tokens"):
        check(shard, device, rank, world)
    say(rank, f"equal to one store: split by heads, split by tokens, {world} ranks, {dist.get_backend()}")
    if cuda:
        check_captured(device, world)
        say(rank, "equal to one store: split by tokens, captured in a CUDA graph")
    for batch, tokens in ((1, 2048), (4, 128)) if small else ((1, 524288), (32, 8192)):
        time_attention(batch, tokens, device, cuda)
    time_transfer(256 if small else 32768, 2 if small else 32, device, rank)
    if rank == 0:
        about = environment.environment(["cuda" if cuda else "cpu"])
        print(f"\n{world} x {environment.line(about)}, {dist.get_backend()}\n")
        for left, right in rows:
            print(f"| {left} | {right} |")
    dist.barrier()
    dist.destroy_process_group()


def say(rank, text):
    if rank == 0:
        print(text, flush=True)


def random_rows(device, *shape):
    return torch.randn(*shape, device=device, dtype=torch.float32).to(torch.float16)


def check(shard, device, rank, world):
    """A prompt, decode steps and a long prompt over a sliding and a plain layer, against one store."""
    form = {"num_layers": 2, "num_kv_heads": HEADS, "head_dim": WIDTH, "capacity": 2048, "window": [200, None]}
    shared = ShardedKVCacheStore(None, shard=shard, interleave=16, sinks=4, **form)
    one = tikv.KVCacheStore(sinks=4, **form)
    heads = slice(shared.heads[0], shared.heads[-1] + 1)
    queries = slice(shared.heads[0] * GROUP, (shared.heads[-1] + 1) * GROUP)
    for tokens in (70, 1, 1, 1, 300, 1):
        for layer in (0, 1):
            k, v = (random_rows(device, tokens, HEADS, WIDTH) for _ in "kv")
            q = random_rows(device, tokens, HEADS * GROUP, WIDTH)
            want = one.extend(layer, q, k, v)[:, queries]
            got = shared.extend(layer, *(a.contiguous() for a in (q[:, queries], k[:, heads], v[:, heads])))
            torch.testing.assert_close(got, want, rtol=2e-3, atol=2e-3)
            newest = q[None, -1].contiguous()
            want = one.attend(layer, newest)[:, queries]
            got = shared.attend(layer, newest[:, queries].contiguous())
            torch.testing.assert_close(got, want, rtol=2e-3, atol=2e-3)


def check_captured(device, world):
    """A decode step in a CUDA graph, replayed, against one store."""
    form = {"num_layers": 1, "num_kv_heads": HEADS, "head_dim": WIDTH, "capacity": 512, "batch_size": 2}
    one, shared = tikv.KVCacheStore(**form), ShardedKVCacheStore(None, shard="tokens", interleave=8, **form)
    k, v, q = (random_rows(device, 2, n, WIDTH) for n in (HEADS, HEADS, HEADS * GROUP))
    positions = shared.positions_on_device().torch()
    lens, out = positions + 1, torch.empty_like(q)

    def step():
        shared.append(0, k[:, None], v[:, None], positions=positions)
        shared.attend(0, q, seq_lens=lens, out=out)
        positions.add_(1)
        lens.add_(1)

    replay = captured(step)  # which runs it once
    positions.zero_()
    lens.fill_(1)
    for _ in range(40):
        for a in (k, v, q):
            a.copy_(random_rows(device, *a.shape))
        replay()
        one.append(0, k[:, None], v[:, None])
        torch.testing.assert_close(out, one.attend(0, q), rtol=2e-3, atol=2e-3)


def timed(call, cuda, repeats=30, inner=10, undo=lambda result: None):
    """Median microseconds of a call, of the slowest rank; what the last one returned is undone before the next."""
    for _ in range(3):
        undo(call())
    found = []
    for _ in range(repeats):
        dist.barrier()
        if cuda:
            torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(inner):
            result = call()
        if cuda:
            torch.cuda.synchronize()
        found.append((time.perf_counter() - start) / inner * 1e6)
        undo(result)
    slowest = torch.tensor([statistics.median(found)], device="cuda" if cuda else "cpu")
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return slowest.item()


def time_attention(batch, tokens, device, cuda):
    """One GPU that holds all tokens against ranks that share them; and what merging adds."""
    form = {"num_layers": 1, "num_kv_heads": HEADS, "head_dim": WIDTH, "capacity": tokens, "batch_size": batch}
    one, shared = tikv.KVCacheStore(**form), ShardedKVCacheStore(None, shard="tokens", interleave=64, **form)
    part = max(1, min(tokens, 65536 // batch))
    for first in range(0, tokens, part):
        torch.manual_seed(first)
        k, v = (random_rows(device, batch, min(part, tokens - first), HEADS, WIDTH) for _ in "kv")
        for store in (one, shared):
            store.append(0, k, v)
    q = random_rows(device, batch, HEADS * GROUP, WIDTH)
    dist.broadcast(q, 0)
    out = torch.empty_like(q)
    torch.testing.assert_close(shared.attend(0, q), one.attend(0, q, impl="taichi"), rtol=2e-3, atol=2e-3)
    lens = torch.full((batch,), tokens, dtype=torch.int32, device=device)
    parts = torch.empty(batch, HEADS * GROUP, 1, WIDTH + 1, device=device)
    gathered = parts.new_empty(dist.get_world_size(), *parts.shape)

    def local(seq_lens=None):
        arrays = view(q[:, :, None], "q", "attend"), view(parts, "parts", "attend")
        shared.local.attend_own("attend", 0, *arrays, AttentionScale(None, None), "raise", seq_lens)

    calls = {
        "one": lambda: one.attend(0, q, out=out, impl="taichi"),
        "shared": lambda: shared.attend(0, q, out=out),
        "local": local,
        "gather": lambda: dist.all_gather_into_tensor(gathered.view(-1), parts.view(-1)),
    }
    found = {name: timed(call, cuda) for name, call in calls.items()}
    name = f"{batch} x {tokens}"
    report(f"{name}, from Python", found)
    if cuda:
        calls = {
            "one": lambda: one.attend(0, q, out=out, impl="taichi", seq_lens=lens),
            "shared": lambda: shared.attend(0, q, out=out, seq_lens=lens),
            "local": lambda: local(lens),
            "gather": calls["gather"],
        }
        report(f"{name}, captured", {each: timed(captured(call), cuda) for each, call in calls.items()})


def report(name, found):
    rows.append((f"attend {name}: one rank, all ranks", f"{found['one']:.1f} us, {found['shared']:.1f} us"))
    rows.append((f"attend {name}: ratio", f"{found['shared'] / found['one']:.2f}"))
    added = found["shared"] - found["local"]
    rows.append((f"attend {name}: a rank alone; merging adds; bare all_gather",
                 f"{found['local']:.1f} us; {added:.1f} us; {found['gather']:.1f} us"))  # fmt: skip


def time_transfer(tokens, layers, device, rank):
    """`send_sequence` of blocks side by side and apart, against torch's send of one tensor of as many bytes."""
    form = {"num_layers": layers, "num_kv_heads": HEADS, "head_dim": WIDTH, "block_size": 16}
    pool = tikv.PagedKVCacheStore(num_blocks=tokens // 16 * 2 + 2, **form)
    nbytes = 2 * 2 * tokens * HEADS * WIDTH * layers
    together = pool.add()
    for layer in range(layers) if rank == 0 else ():
        torch.manual_seed(layer)
        k, v = (random_rows(device, tokens, HEADS, WIDTH) for _ in "kv")
        pool.append(layer, k, v, [together], cu_seqlens=[0, tokens])
    whole = torch.empty(nbytes, dtype=torch.uint8, device=device)
    cuda = device.type == "cuda"

    def plain():
        (dist.send if rank == 0 else dist.recv)(whole, 1 - rank)

    def moved(seq):
        return send_sequence(pool, seq, 1) if rank == 0 else recv_sequence(pool, 0)

    def free(seq):
        if seq is not None:
            pool.free(seq)

    if rank > 1:
        return
    group = dist.new_group([0, 1]) if dist.get_world_size() > 2 else None
    assert group is None, "run it on two ranks"
    if rank == 0:
        send_sequence(pool, together, 1)
    else:
        got = recv_sequence(pool, 0)
        torch.manual_seed(layers - 1)
        k = random_rows(device, tokens, HEADS, WIDTH)
        assert torch.equal(pool.tokens(layers - 1, got)[0].torch(), k)
        pool.free(got)
    base = timed(plain, cuda, 9, 1)
    rows.append((f"send of one tensor, {nbytes / 1e9:.2f} GB", f"{base / 1e3:.2f} ms, {nbytes / base / 1e3:.0f} GB/s"))
    found = timed(lambda: moved(together), cuda, 9, 1, free)
    rows.append((f"send_sequence {tokens} tokens x {layers} layers, blocks side by side",
                 f"{found / 1e3:.2f} ms, {base / found:.2f} of send"))  # fmt: skip
    if rank == 0:  # two sequences that grew in turn
        pool.free(together)
        pair = [pool.add(), pool.add()]
        for _ in range(0, tokens // 2, 16):
            for layer in range(layers):
                k = torch.zeros(32, HEADS, WIDTH, dtype=torch.float16, device=device)
                pool.append(layer, k, k, pair, cu_seqlens=[0, 16, 32])
    apart = timed(lambda: moved(pair[0] if rank == 0 else None), cuda, 9, 1, free)
    rows.append(("send_sequence of half of it, every other block of the pool",
                 f"{apart / 1e3:.2f} ms, {base / 2 / apart:.2f} of send"))  # fmt: skip


if __name__ == "__main__":
    main()
