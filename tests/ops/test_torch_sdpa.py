"""Which calls of attention "auto" leaves to torch."""

import types

import numpy as np
import pytest

import tikv
from tikv import dtypes, reference
from tikv.ops.attention import plan
from tikv.ops.attention.torch_sdpa import torch_is_faster

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.archs("cpu")


@pytest.mark.parametrize(
    ("device", "dtype", "queries", "tile", "faster"),
    [
        ("cpu", "float32", 63, None, False),
        ("cpu", "float32", 64, None, True),
        ("cpu", "float16", 1023, None, False),
        ("cpu", "float16", 1024, None, True),
        ("cpu", "bfloat16", 5000, None, False),
        ("cuda", "float32", 1, None, True),
        ("cuda", "float16", 1, object(), False),
        ("cuda", "float16", 2048, object(), False),
    ],
)
def test_torch_serves_where_it_is_faster(device, dtype, queries, tile, faster):
    live, cache = types.SimpleNamespace(is_cpu=device == "cpu"), types.SimpleNamespace(tile=tile)
    assert torch_is_faster(live, queries, cache, dtypes.parse(dtype, "test")) == faster


@pytest.mark.parametrize(("queries", "served"), [(63, False), (64, True)])
def test_a_prompt_on_cpu_is_the_same_by_either(arch, rng, monkeypatch, queries, served):
    calls = []
    attend = plan.attend_by_torch
    monkeypatch.setattr(plan, "attend_by_torch", lambda *arguments: (calls.append(1), attend(*arguments)))
    q = rng.standard_normal((1, 4, queries, 16)).astype(np.float32)
    k, v = (rng.standard_normal((1, 2, 90, 16)).astype(np.float32) for _ in "kv")
    for window in (None, 9):
        got = tikv.decode_attention(q, k, v, 80, window=window)
        for h, t in ((0, 0), (3, queries - 1), (1, 20)):
            at = reference.visible_positions(80, t, queries, window=window)
            want, _ = reference.attention(q[0, h, t], k[0, h // 2, at], v[0, h // 2, at], scale=0.25)
            assert np.abs(got[0, h, t] - want).max() < 1e-5
    assert bool(calls) == served
    tikv.decode_attention(q, k, v, 80, impl="taichi")
    assert len(calls) == 2 * served
