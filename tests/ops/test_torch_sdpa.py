"""Which calls of attention "auto" leaves to torch."""

import types

import numpy as np
import pytest

import tikv
from tikv import dtypes, reference
from tikv.ops.attention import measured, plan
from tikv.ops.attention.torch_sdpa import torch_is_faster

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.archs("cpu")


@pytest.mark.parametrize(
    ("device", "dtype", "queries", "tile", "faster"),
    [
        ("cpu", "float32", 63, None, False),
        ("cpu", "float32", 64, None, True),
        ("cpu", "float16", 63, None, False),
        ("cpu", "float16", 64, None, True),
        ("cpu", "bfloat16", 5000, None, False),
        ("cuda", "float32", 1, None, True),
        ("cuda", "float16", 1, object(), False),
        ("cuda", "float16", 2048, object(), False),
    ],
)
def test_torch_serves_where_it_is_faster(monkeypatch, device, dtype, queries, tile, faster):
    live = types.SimpleNamespace(is_cpu=device == "cpu", invariant=False, arch=device)
    cache = types.SimpleNamespace(tile=tile)
    monkeypatch.setattr(measured, "timings", lambda live: None)
    assert torch_is_faster(live, queries, cache, dtypes.parse(dtype, "test"), 128) == faster


@pytest.mark.parametrize(
    ("queries", "dtype", "served"),
    [(63, np.float32, False), (64, np.float32, True), (700, np.float32, True), (64, np.float16, True)],
)
def test_a_prompt_on_cpu_is_the_same_by_either(arch, rng, monkeypatch, queries, dtype, served):
    calls = []
    attend = plan.TorchAttention.attend
    monkeypatch.setattr(plan.TorchAttention, "attend", lambda *arguments: (calls.append(1), attend(*arguments)))
    q = rng.standard_normal((1, 4, queries, 16)).astype(dtype)
    length = max(80, queries)
    k, v = (rng.standard_normal((1, 2, length + 10, 16)).astype(dtype) for _ in "kv")
    for window in (None, 9):
        got = tikv.decode_attention(q, k, v, length, window=window)
        for h, t in ((0, 0), (3, queries - 1), (1, 20)):
            at = reference.visible_positions(length, t, queries, window=window)
            want, _ = reference.attention(q[0, h, t], k[0, h // 2, at], v[0, h // 2, at], scale=0.25)
            assert np.abs(got[0, h, t] - want).max() < (1e-5 if dtype is np.float32 else 2e-3)
    assert bool(calls) == served
    tikv.decode_attention(q, k, v, length, impl="taichi")
    assert len(calls) == 2 * served
