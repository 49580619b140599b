"""The two engines side by side on the CPU: `python benches/engines.py`. Both must be installed, and torch too.

Words after the command, such as `append index_copy`, choose the cases whose names have one of them.

A process has one engine, so each engine runs in its own process. The processes alternate in short rounds, so that both
meet the same machine. For each case the fastest round and the lower quartile of the rounds are printed, since a round
that another program disturbed says nothing about an engine.
"""

import importlib.util
import json
import os
import statistics
import subprocess
import sys
import time

import environment

ROUNDS = 61
SECONDS = 0.01  # of a round of one case, about


def cases():
    """Name -> a call. Each case is checked against the reference or the peer before it is timed."""
    import numpy as np
    import oracle
    import torch

    import tikv
    from tikv import reference

    tikv.init("cpu")
    rng = np.random.default_rng(0)
    found = {}

    def numbers(*shape, dtype):
        return torch.from_numpy(rng.standard_normal(shape).astype(dtype))

    for dtype in ("float32", "float16"):
        rows = [numbers(1, 8, 128, dtype=dtype) for _ in "kv"]
        # For one token small ones, which stay in the processor's caches.
        caches = [torch.from_numpy(np.zeros((8, 256, 128), dtype)) for _ in "kv"]
        theirs, index = [cache.clone() for cache in caches], torch.tensor([77])
        turned = [row.transpose(0, 1).contiguous() for row in rows]

        def index_copy(theirs=theirs, index=index, turned=turned):
            theirs[0].index_copy_(1, index, turned[0])
            theirs[1].index_copy_(1, index, turned[1])

        def copy_kv(rows=rows, caches=caches):
            tikv.copy_kv(*rows, *caches, position=77)

        form = {"num_layers": 1, "num_kv_heads": 8, "head_dim": 128, "dtype": dtype}
        store = tikv.KVCacheStore(capacity=256, window=256, **form)

        def append(store=store, rows=rows):
            store.append(0, *rows)

        for call in (index_copy, copy_kv, append):
            call()
        for mine, other in zip(caches, theirs, strict=True):
            oracle.assert_same_bits(mine.numpy(), other.numpy())
        oracle.assert_same_bits(oracle.to_numpy(store.tokens(0)[0])[0, :, -1], rows[0][0].numpy())
        found[f"append, 1 token, {dtype}"] = append
        found[f"copy_kv, 1 token, {dtype}"] = copy_kv
        found[f"two index_copy_ of torch, {dtype}"] = index_copy

        many = [numbers(4096, 8, 128, dtype=dtype) for _ in "kv"]
        caches = [torch.from_numpy(np.zeros((8, 4096, 128), dtype)) for _ in "kv"]

        def prefill(many=many, caches=caches):
            tikv.copy_kv(*many, *caches, position=0)

        prefill()
        for mine, given in zip(caches, many, strict=True):
            oracle.assert_same_bits(mine.numpy(), given.numpy().swapaxes(0, 1))
        found[f"copy_kv, 4,096 tokens, {dtype}"] = prefill

        for tokens in (1, 64):
            q = numbers(1, 32, tokens, 128, dtype=dtype)
            k, v = (cache[None, :, :4096] for cache in caches)
            lens, out = torch.tensor([4096], dtype=torch.int32), torch.zeros(1, 32, tokens, 128, dtype=q.dtype)

            def attend(q=q, k=k, v=v, lens=lens, out=out):
                tikv.decode_attention(q, k, v, lens, out=out, impl="taichi")

            attend()
            want, _ = reference.attention(
                q[0, 5, tokens - 1].double().numpy(),
                k[0, 1].double().numpy(),
                v[0, 1].double().numpy(),
                scale=128**-0.5,
            )
            np.testing.assert_allclose(out[0, 5, tokens - 1].double().numpy(), want, atol=2e-3)
            found[f"decode_attention, {tokens} x 32 queries, 4,096 keys, {dtype}"] = attend
    return found


def serve():
    """A process of one engine: a line with a case's name comes in, the seconds of a call go out."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    calls = cases()
    times = {}
    for name, call in calls.items():
        for _ in range(3):
            call()
        start = time.perf_counter()
        call()
        times[name] = max(1, int(SECONDS / (time.perf_counter() - start)))
    print(json.dumps(list(calls)), file=answers, flush=True)
    for line in sys.stdin:
        call, count = calls[line.strip()], times[line.strip()]
        for _ in range(3):  # another case of this operation may have been the last: what is known of it is learnt anew
            call()
        start = time.perf_counter()
        for _ in range(count):
            call()
        print((time.perf_counter() - start) / count, file=answers, flush=True)


def main(words):
    if why := [name for name in ("quadrants", "torch") if importlib.util.find_spec(name) is None]:
        raise SystemExit(f"engines: {' and '.join(why)} not installed. Use pip install 'taichi-kv[quadrants,torch]'.")
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    children = {}
    for name in ("taichi", "quadrants"):
        path = os.pathsep.join([root, os.path.join(root, "tests"), os.environ.get("PYTHONPATH", "")])
        children[name] = subprocess.Popen(
            [sys.executable, __file__, "serve"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "TIKV_ENGINE": name, "PYTHONPATH": path},
        )
    names, _ = (json.loads(child.stdout.readline()) for child in children.values())
    names = [name for name in names if not words or any(word in name for word in words)]
    seconds = {(engine, name): [] for engine in children for name in names}
    for turn in range(ROUNDS):
        order = list(children.items())
        for name in names:
            for engine, child in order if turn % 2 else order[::-1]:
                child.stdin.write(f"{name}\n")
                child.stdin.flush()
                seconds[engine, name].append(float(child.stdout.readline()))
    for child in children.values():
        child.stdin.close()
        child.wait()
    print(f"{environment.line(environment.environment(['cpu']))}\n")
    print("| case | taichi, fastest / lower quartile | quadrants | times taichi's time |\n| --- | --- | --- | --- |")
    for name in names:
        both = [[which(seconds[engine, name]) * 1e6 for engine in children] for which in (min, lower_quartile)]
        times = " | ".join(f"{a:,.1f} / {b:,.1f} us" for a, b in zip(*both, strict=True))
        print(f"| {name} | {times} | {' / '.join(f'{quadrants / taichi:.2f}' for taichi, quadrants in both)} |")


def lower_quartile(times):
    return statistics.quantiles(times, n=4)[0]


if __name__ == "__main__":
    serve() if sys.argv[1:] == ["serve"] else main(sys.argv[1:])
