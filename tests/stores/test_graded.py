"""`KVCacheStore.extend(..., grad=True)`: gradients against those of float64, and the same bits as without them."""

import copy
import math

import pytest

import tikv

torch = pytest.importorskip("torch")

from allocations import measure  # noqa: E402

pytestmark = pytest.mark.archs("cpu")

HEADS, QUERY_HEADS, WIDTH, WIDTH_V = 2, 4, 16, 8
TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2, "float16": 4e-3}


def store_of(dtype="float32", batch=2, capacity=64, **options):
    form = {"num_layers": 1, "num_kv_heads": HEADS, "head_dim": WIDTH, "head_dim_v": WIDTH_V, **options}
    return tikv.KVCacheStore(**form, capacity=capacity, batch_size=batch, dtype=dtype)


def rows(count, dtype="float32", batch=2, layout="token_major", seed=0, graded=True):
    """Queries, keys and values of new tokens."""
    numbers = torch.Generator().manual_seed(seed)
    made = []
    for heads, width in ((QUERY_HEADS, WIDTH), (HEADS, WIDTH), (HEADS, WIDTH_V)):
        shape = (batch, count, heads, width) if layout == "token_major" else (batch, heads, count, width)
        a = torch.randn(shape, generator=numbers).to(getattr(torch, dtype))
        made.append(a.requires_grad_(graded))
    return made


def defined(q, k, v, scale=None, softcap=None, sinks=None):
    """Head-major causal attention in float64, and its log-sum-exp; queries are the newest tokens."""
    q, k, v = q.double(), *(a.double().repeat_interleave(QUERY_HEADS // HEADS, 1) for a in (k, v))
    scores = q @ k.mT * (1 / math.sqrt(WIDTH) if scale is None else scale)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    seen = torch.arange(k.shape[2]) <= torch.arange(k.shape[2] - q.shape[2], k.shape[2])[:, None]
    scores = scores.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks.double()[None, :, None, None].expand(*scores.shape[:3], 1)), -1)
    return torch.softmax(scores, -1)[..., : k.shape[2]] @ v, torch.logsumexp(scores, -1)


def head_major(a, layout):
    return a.transpose(1, 2) if layout == "token_major" else a


def near(got, want, dtype):
    assert got.dtype is getattr(torch, dtype)
    off = float((got.double() - want.double()).abs().max() / want.double().abs().max())
    assert off <= TOLERANCE[dtype]


OPTIONS = [{}, {"scale": 0.3}, {"softcap": 2.0}, {"sink_logits": torch.tensor([0.5, -1.0, 0.0, 2.0])}]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("layout", ["token_major", "head_major"])
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: next(iter(options), "plain"))
def test_gradients_are_those_of_the_definition(arch, dtype, layout, options):
    """Of queries, new keys and values and a prefix, over frozen tokens too; out has the bits of a call without them."""
    store, plain = store_of(dtype), store_of(dtype)
    prefix, new = rows(3, dtype, layout=layout, seed=1), rows(7, dtype, layout=layout, seed=3)
    frozen = rows(9, dtype, layout=layout, seed=2, graded=False)
    store.append(0, *prefix[1:], layout=layout, grad=True)
    store.append(0, *frozen[1:], layout=layout)
    with torch.no_grad():
        plain.append(0, *prefix[1:], layout=layout)
        plain.append(0, *frozen[1:], layout=layout)
        bits = plain.extend(0, *new, layout=layout, return_lse=True, **options)
    out, lse = store.extend(0, *new, layout=layout, return_lse=True, grad=True, **options)
    assert torch.equal(out, bits[0])
    assert torch.equal(lse, bits[1])
    numbers = torch.Generator().manual_seed(9)
    weights = torch.randn(out.shape, generator=numbers), torch.randn(lse.shape, generator=numbers)
    trained = [*prefix[1:], *new]
    got = torch.autograd.grad((out.float() * weights[0]).sum() + (lse * weights[1]).sum(), trained)

    parts = [[head_major(a, layout) for a in part] for part in zip(prefix, frozen, new, strict=True)]
    q, joined = parts[0][2], [torch.cat(part, 2) for part in parts[1:]]
    named = {"sinks" if name == "sink_logits" else name: value for name, value in options.items()}
    exact, exact_lse = defined(q, *joined, **named)
    loss = (exact * head_major(weights[0], layout)).sum()
    loss = loss + (exact_lse * (weights[1].transpose(1, 2) if layout == "token_major" else weights[1])).sum()
    for a, b in zip(got, torch.autograd.grad(loss, trained), strict=True):
        near(a, b, dtype)


def test_keys_are_read_some_at_a_time(arch):
    """With so many queries, backward takes one head of them at a time, and 32 keys; the first of them are frozen."""
    store, old, new = store_of(batch=1, capacity=1800), rows(200, batch=1, seed=2, graded=False), rows(1500, batch=1)
    store.append(0, *old[1:])
    got = torch.autograd.grad(store.extend(0, *new, grad=True).square().sum(), new)
    q, k, v = (
        a.transpose(1, 2) for a in (new[0], *(torch.cat(pair, 1) for pair in zip(old[1:], new[1:], strict=True)))
    )
    want = torch.autograd.grad(defined(q, k, v)[0].square().sum(), new)
    for a, b in zip(got, want, strict=True):
        near(a, b, "float32")


@pytest.mark.parametrize(("which", "softcap"), [("q", None), ("k", None), ("k", 2.0), ("v", None)])
def test_a_nan_reaches_only_gradients_that_depend_on_it(arch, which, softcap):
    """Queries do not see the NaN of a later key or value, nor keys and values that of an earlier query."""
    place, found = 4, []
    for number in (0.5, math.nan):
        store, new = store_of(), rows(7)
        with torch.no_grad():
            new["qkv".index(which)][:, place, :, 3] = number
        out = store.extend(0, *new, grad=True, softcap=softcap)
        ahead = torch.randn(out.shape, generator=torch.Generator().manual_seed(9))
        found.append([out.detach(), *torch.autograd.grad(out, new, ahead)])
    of_queries = [n for n in range(7) if n < place or (which == "q" and n > place)]
    of_keys = [5, 6] if which == "q" else []
    for clean, other, tokens in zip(*found, (of_queries, of_queries, of_keys, of_keys), strict=True):
        assert torch.equal(other[:, tokens], clean[:, tokens])
    _, of_q, of_k, _ = found[1]
    assert of_q[:, place].isnan().any()
    assert of_k[:, 0].isnan().any()


def test_memory_of_backward_is_bounded_by_the_gradients(arch):
    """No matrix of scores exists, nor what grows with the number of tokens that are held."""
    held, tokens, form = 4096, 256, {"head_dim": 64, "head_dim_v": 64}
    store = store_of(batch=1, capacity=held + tokens, **form)
    numbers = torch.Generator().manual_seed(0)
    q, k, v, *old = (
        torch.randn(1, count, heads, 64, generator=numbers)
        for heads, count in ((QUERY_HEADS, tokens), *((HEADS, tokens),) * 2, *((HEADS, held),) * 2)
    )
    store.append(0, *old)
    new = [a.requires_grad_() for a in (q, k, v)]
    out = store.extend(0, *new, grad=True)
    ahead = torch.ones_like(out)
    peak = measure(lambda: torch.autograd.grad(out, new, ahead)).peak
    assert peak <= out.nbytes + 2 * sum(a.nbytes for a in new)


def test_tokens_of_earlier_calls_get_gradients_too(arch):
    """A text in chunks and single tokens is like the whole one."""
    whole, new = store_of(), rows(11)
    want = torch.autograd.grad(whole.extend(0, *new, grad=True).square().sum(), new)
    store, loss = store_of(), 0
    for part in zip(*(a.split([6, 1, 4], 1) for a in new), strict=True):
        loss = loss + store.extend(0, *part, grad=True).square().sum()
    for a, b in zip(torch.autograd.grad(loss, new), want, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-5 * float(b.abs().max()))


def test_one_sequence_needs_no_batch_axis(arch):
    new = rows(5, batch=1)
    want = torch.autograd.grad(store_of(batch=1).extend(0, *new, grad=True).square().sum(), new)
    flat = [a.detach()[0].requires_grad_() for a in new]
    got = torch.autograd.grad(store_of(batch=1).extend(0, *flat, grad=True).square().sum(), flat)
    assert all(torch.equal(a, b[0]) for a, b in zip(got, want, strict=True))


def test_what_is_frozen(arch):
    """Tokens without grad=True, those of a copy, and all after their rows were moved; no graph is made for them."""
    store, old, new = store_of(), rows(4, seed=1), rows(3, seed=2, graded=False)
    store.append(0, *(a.detach() for a in old[1:]))
    assert not store.extend(0, *new, grad=True).requires_grad
    store.reset()
    store.append(0, *old[1:], grad=True)
    twin = copy.deepcopy(store)
    assert not twin.extend(0, *new, grad=True).requires_grad
    out = store.extend(0, *new, grad=True)
    assert torch.autograd.grad(out.sum(), old[2])[0].abs().sum() > 0
    store.trim(5)  # two of the prefix, too
    kept = torch.autograd.grad(store.extend(0, *new, grad=True).sum(), old[2])[0]
    assert kept[:, :2].abs().sum() > 0
    assert not kept[:, 2:].any()
    store.reorder([1, 0])
    assert not store.extend(0, *new, grad=True).requires_grad
    with torch.no_grad():
        assert not store.extend(0, *rows(2), grad=True).requires_grad


def test_attend_refuses_gradients_as_before(arch):
    store, new = store_of(), rows(4)
    store.extend(0, *new, grad=True)
    with pytest.raises(tikv.OptionError, match="gradients do not flow"):
        store.attend(0, new[0]).sum().backward()


@pytest.mark.parametrize(
    "change",
    [lambda s: s.trim(1), lambda s: s.reset(), lambda s: s.reorder([1, 0]), lambda s: s.compact(0, [[0, 1, 2]] * 2)],
)
def test_backward_refuses_rows_that_are_gone(arch, change):
    store, new = store_of(), rows(4)
    out = store.extend(0, *new, grad=True)
    change(store)
    with pytest.raises(tikv.OptionError, match=r"no longer holds the 4 tokens of layer 0 .* Call backward\(\) before"):
        out.sum().backward()


def test_later_tokens_do_not_disturb(arch):
    store, new = store_of(), rows(4)
    out = store.extend(0, *new, grad=True)
    want = torch.autograd.grad(out.square().sum(), new, retain_graph=True)
    store.append(0, *(a.detach() for a in rows(9, seed=5)[1:]))
    assert all(torch.equal(a, b) for a, b in zip(torch.autograd.grad(out.square().sum(), new), want, strict=True))


@pytest.mark.parametrize(
    ("form", "options", "why"),
    [
        ({"dtype": "int8"}, {}, "codes have no gradient, and the store has int8"),
        ({"dtype": "float8_e4m3fn"}, {}, "codes have no gradient"),
        ({"window": 8}, {}, "layer 0 has a window"),
        ({}, {"return_mass": True}, "return_mass= is not supported"),
        ({}, {"parents": torch.tensor([[-1, 0, 0], [-1, 0, 1]])}, "parents= is not supported"),
        ({}, {"keep": False}, "keep= is not supported"),
        ({}, {"block": 2}, "block= is not supported"),
        ({}, {"alibi_slopes": torch.ones(QUERY_HEADS)}, "alibi_slopes= is not supported"),
        ({}, {"sink_logits": torch.ones(QUERY_HEADS, requires_grad=True)}, "sink_logits get no gradient"),
    ],
)
def test_what_has_no_gradients_is_refused(arch, form, options, why):
    store = store_of(**form)
    with pytest.raises(tikv.OptionError, match=f"KVCacheStore.extend: grad=True is not possible: {why}"):
        store.extend(0, *rows(3), grad=True, **options)
    assert store.length == 0
    with pytest.raises(tikv.OptionError, match="grad=True is not possible: k is not a tensor of torch"):
        store_of().append(0, *(a.detach().numpy() for a in rows(3)[1:]), grad=True)
