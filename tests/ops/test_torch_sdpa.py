"""Which calls of attention "auto" leaves to torch, and what torch's attention gives."""

import itertools
import types

import numpy as np
import oracle
import pytest

import tikv
from tikv import dtypes, reference
from tikv.ops.attention import measured, plan
from tikv.ops.attention.torch_sdpa import MASKED, torch_is_faster

torch = pytest.importorskip("torch")
TOLERANCE = {"float32": 1e-5, "float16": 4e-3, "bfloat16": 3e-2}  # torch rounds the weights to float16 and bfloat16


@pytest.mark.archs("cpu")
@pytest.mark.parametrize(
    ("device", "dtype", "queries", "tensor_cores", "faster"),
    [
        ("cpu", "float32", 63, False, False),
        ("cpu", "float32", 64, False, True),
        ("cpu", "float16", 63, False, False),
        ("cpu", "float16", 64, False, True),
        ("cpu", "bfloat16", 5000, False, False),
        ("cuda", "float32", 1, False, True),
        ("cuda", "float16", 1, True, False),
        ("cuda", "float16", 2048, True, False),
    ],
)
def test_torch_serves_where_it_is_faster(monkeypatch, device, dtype, queries, tensor_cores, faster):
    live = types.SimpleNamespace(is_cpu=device == "cpu", invariant=False, arch=device)
    monkeypatch.setattr(measured, "timings", lambda live: None)
    for kind in (*measured.KINDS, MASKED):
        assert torch_is_faster(live, kind, queries, tensor_cores, dtypes.parse(dtype, "test"), 128) == faster


@pytest.mark.archs("cpu")
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


class NotCpu:
    """A runtime whose calls of torch are those that CUDA gets."""

    is_cpu = False

    def __init__(self, live):
        self.live = live

    def __getattr__(self, name):
        return getattr(self.live, name)


@pytest.fixture
def as_on_cuda(no_plans, monkeypatch):
    """Calls of torch are those that CUDA gets; the fixture has whether the result of each could be used."""
    used, init, attend = [], plan.TorchAttention.__init__, plan.TorchAttention.attend
    monkeypatch.setattr(
        plan.TorchAttention,
        "__init__",
        lambda self, live, *given: init(self, NotCpu(live) if live.is_cpu else live, *given),
    )
    monkeypatch.setattr(plan.TorchAttention, "attend", lambda *given: used.append(attend(*given)) or used[-1])
    return used


CALLS = {
    "square": (70, 70, {}),
    "square after trimmed tokens": (70, 90, {"first_valid": 20}),
    "rectangular": (70, 150, {}),
    "rectangular after trimmed tokens": (70, 150, {"first_valid": 20}),
    "not causal": (70, 150, {"causal": False}),
    "one query": (1, 150, {}),
    "window": (70, 150, {"window": 30}),
}


@pytest.mark.archs("cpu", "cuda")
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("unseen", [None, ("k", np.nan), ("v", np.nan), ("k", np.inf), ("v", np.inf)], ids=str)
def test_no_query_gets_what_it_does_not_see(arch, rng, as_on_cuda, dtype, call, unseen):
    """Slots around the tokens hold NaN. With `unseen`, the newest token does too, which only the last query sees."""
    queries, length, options = CALLS[call]
    first = options.get("first_valid", 0)
    rows = {"q": (2, 8, queries, 64), "k": (2, 2, 160, 64), "v": (2, 2, 160, 64)}
    given = {name: rng.standard_normal(shape).astype(dtypes.parse(dtype, "test").numpy) for name, shape in rows.items()}
    for name in "kv":
        given[name][:, :, :first] = given[name][:, :, length:] = np.nan
    if unseen:
        given[unseen[0]][:, :, length - 1, 3] = unseen[1]
    real = {name: a.astype(np.float64) for name, a in given.items()}
    placed = [oracle.place(given[name], arch) for name in "qkv"]
    got = oracle.to_numpy(tikv.decode_attention(*placed, length, impl="torch", **options)).astype(np.float64)
    assert len(as_on_cuda) == 1
    assert unseen or as_on_cuda == [True], "torch's own result"
    causal = options.get("causal", True)
    for b, h, t in itertools.product((0, 1), (0, 7), sorted({0, queries // 2, queries - 2, queries - 1} - {-1})):
        if unseen and (t == queries - 1 or not causal):
            continue
        at = reference.visible_positions(length, t, queries, window=options.get("window"), causal=causal)
        at = [p for p in at if p >= first]
        want, _ = reference.attention(real["q"][b, h, t], *(real[name][b, h // 4, at] for name in "kv"), scale=0.125)
        assert np.abs(got[b, h, t] - want).max() < TOLERANCE[dtype]


@pytest.mark.archs("cpu", "cuda")
@pytest.mark.parametrize("call", ["square", "rectangular", "not causal"])
def test_torch_makes_no_mask_where_it_needs_none(arch, as_on_cuda, monkeypatch, call):
    """With a mask, torch has no flash attention."""
    queries, length, options = CALLS[call]
    monkeypatch.setattr(plan.TorchAttention, "_mask", lambda *given: pytest.fail("a mask"))
    q, cache = np.ones((1, 2, queries, 64), np.float16), np.ones((1, 1, length, 64), np.float16)
    placed = [oracle.place(a, arch) for a in (q, cache, cache)]
    got = oracle.to_numpy(tikv.decode_attention(*placed, length, impl="torch", **options))
    assert as_on_cuda == [True]
    assert (got == 1).all()


@pytest.mark.archs("cuda")
@pytest.mark.parametrize("call", CALLS)
def test_no_graph_captures_a_length_of_the_host(arch, call):
    """Each replay would use it again; `auto` refuses it by tikv's kernels."""
    queries, length, options = CALLS[call]
    q, cache = (
        torch.ones(shape, dtype=torch.float16, device="cuda") for shape in ((1, 2, queries, 64), (1, 1, 160, 64))
    )
    out = torch.empty_like(q)
    captured = torch.zeros(1, device="cuda")  # torch warns of a graph in which nothing is captured
    for impl in ("torch", "auto"):
        tikv.decode_attention(q, cache, cache, length, out=out, impl=impl, **options)
        torch.cuda.synchronize()
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            captured += 1
            with pytest.raises(tikv.ArchError, match="baked into"):
                tikv.decode_attention(q, cache, cache, length, out=out, impl=impl, **options)
