"""FlashAttention-3 from its own package, in its own process: a peer of benches/attention_gpu.py.

    python benches/flash_attention_3.py '[[1, 512, 8192, 4, 16]]'

The command prints microseconds for each shape: sequences, new tokens of each, keys of each, query heads per KV head,
and tokens of a page or 0. Attention is causal, in float16 with 8 KV heads of 128, at the fastest of a few numbers of
splits. One of two packages is used. The one for torch, `flash_attn_interface`, is timed like tikv. The one for JAX,
`flash_attn3_jax`, launches on its own stream, so consecutive calls are timed.
"""

import functools
import importlib.util
import json
import os
import statistics
import sys
import time

PACKAGES = ("flash_attn_interface", "flash_attn3_jax")
HEADS, WIDTH = 8, 128
CALLS = 30  # in a row


def times(shapes):
    """Microseconds of each shape; or, for all of them, why they could not be measured."""
    if not any(importlib.util.find_spec(name) for name in PACKAGES):
        return ["not installed"] * len(shapes)
    from gpu import printed_by, reason

    try:
        return json.loads(printed_by([__file__, json.dumps(shapes)]).splitlines()[-1])
    except RuntimeError as error:
        return [reason(error)] * len(shapes)


def by_torch(batch, new, keys, group, page, splits):
    """Microseconds of a shape by the package for torch."""
    import torch
    from flash_attn_interface import flash_attn_with_kvcache

    machine = started()
    q = machine.randn(batch, new, HEADS * group, WIDTH)
    k, v = (machine.randn(batch, keys, HEADS, WIDTH) for _ in "kv")
    options = {"cache_seqlens": machine.lens(batch, keys), "causal": True}
    if page:
        k, v = (a.view(-1, page, HEADS, WIDTH) for a in (k, v))
        options["page_table"] = torch.randperm(len(k), device="cuda").int().view(batch, -1)
    call = functools.partial(flash_attn_with_kvcache, q, k, v, **options)
    return min(machine.us(functools.partial(call, num_splits=n)) for n in splits)


@functools.cache
def started():
    """The machine, for all shapes."""
    import gpu  # and torch with it, which JAX does without

    return gpu.Machine(small=False)


def by_jax(batch, new, keys, group, page, splits):
    """Microseconds of a shape by the package for JAX."""
    import jax
    import numpy as np
    from flash_attn3_jax import flash_mha_with_kvcache

    key = jax.random.PRNGKey(0)
    q = jax.random.normal(key, (batch, new, HEADS * group, WIDTH), np.float16)
    k = jax.random.normal(key, (batch, keys, HEADS, WIDTH), np.float16)
    v, options = k * 0.5, {"is_causal": True}
    if page:
        k, v = (a.reshape(-1, page, HEADS, WIDTH) for a in (k, v))
        table = np.random.default_rng(0).permutation(len(k)).astype(np.int32).reshape(batch, -1)
        options |= {"page_table": jax.numpy.asarray(table), "cache_seqlens": keys}
    found = []
    for n in splits:
        call = jax.jit(functools.partial(flash_mha_with_kvcache, num_splits=n, **options))
        call(q, k, v).block_until_ready()
        rounds = []
        for _ in range(5):
            start = time.perf_counter()
            for _ in range(CALLS):
                out = call(q, k, v)
            out.block_until_ready()
            rounds.append((time.perf_counter() - start) / CALLS * 1e6)
        found.append(statistics.median(rounds))
    return min(found)


def main(shapes):
    """The figures as one line."""
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    measure = by_torch if importlib.util.find_spec(PACKAGES[0]) else by_jax
    found = []
    for shape in shapes:
        try:
            found.append(measure(*shape, splits=(1, 2) if shape[1] >= 512 else (1, 4, 16)))
        except Exception as error:
            found.append(" ".join(f"failed: {error!r}"[:100].replace("|", "/").split()))
    print(json.dumps(found))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
