"""Gradients of torch: no result leaves them out silently, and where nothing is trained results are as ever."""

import numpy as np
import pytest

import tikv
from tikv.compat import flash_attn, flashinfer

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.archs("cpu")

FORM = {"num_layers": 1, "num_kv_heads": 2, "head_dim": 8, "dtype": "float32"}


def store(q, k, v):
    found = tikv.KVCacheStore(**FORM, capacity=8)
    found.append(0, k, v)
    return found.attend(0, q)


def store_with_lse(q, k, v):
    found = tikv.KVCacheStore(**FORM, capacity=8)
    found.append_all(k[None], v[None])
    return found.attend(0, q, return_lse=True, return_mass=True)[0]


def store_into(q, k, v):
    found = tikv.KVCacheStore(**FORM, capacity=8)
    found.append(0, k, v)
    return found.attend(0, q, out=torch.empty(3, 2, 8))


def extended(q, k, v):
    return tikv.KVCacheStore(**FORM, capacity=8).extend(0, q, k, v)


def extended_before(q, k, v):
    found = tikv.KVCacheStore(**FORM, capacity=8)
    found.extend(0, q.detach(), k, v)
    return found.attend(0, q)


def pool(q, k, v):
    found = tikv.PagedKVCacheStore(**FORM, num_blocks=4)
    seq = found.add()
    found.append(0, k, v, [seq], [0, 3])
    return found.attend(0, q, [seq])


def extended_pool(q, k, v):
    found = tikv.PagedKVCacheStore(**FORM, num_blocks=4)
    return found.extend(0, q, k, v, [found.add()], [0, 3])


def cached(q, k, v):
    return tikv.decode_attention(q.transpose(0, 1)[None], k.transpose(0, 1)[None], v.transpose(0, 1)[None], 3)


def paged(q, k, v):
    table, lens = torch.zeros(1, 1, dtype=torch.int32), torch.tensor([3], dtype=torch.int32)
    return tikv.paged_decode_attention(q.transpose(0, 1)[None], k[None], v[None], table, lens)


def merged(q, k, v):
    lse = torch.zeros(3, 2)
    return tikv.merge_states(q, lse, tikv.merge_states(k, lse, v, lse)[0], lse)[0]


def flash(q, k, v):
    return flash_attn.flash_attn_with_kvcache(q[None], k[None], v[None], cache_seqlens=torch.tensor([3]), causal=True)


def flash_of_new_rows(q, k, v):
    caches = torch.zeros(2, 1, 4, 2, 8)
    start = torch.zeros(1, dtype=torch.int32)
    return flash_attn.flash_attn_with_kvcache(q[None], *caches, k[None], v[None], cache_seqlens=start)


def flashinfer_merged(q, k, v):
    lse = torch.zeros(3, 2)
    return flashinfer.merge_state(q, lse, flashinfer.merge_state(k, lse, v, lse)[0], lse)[0]


STORES = [store, store_with_lse, store_into, extended, extended_before, pool, extended_pool]
EACH = [*STORES, cached, paged, merged, flash, flash_of_new_rows, flashinfer_merged]


def tensors(trained):
    torch.manual_seed(0)
    return [torch.randn(3, 2, 8, requires_grad=name in trained) for name in "qkv"]


@pytest.mark.parametrize("trained", ["q", "k", "v", "qkv"])
@pytest.mark.parametrize("call", EACH)
def test_to_go_back_through_a_result_raises(arch, call, trained):
    for _ in range(3):  # also once the forms are known
        assert not call(*tensors("")).requires_grad
    given = tensors(trained)
    got = call(*given)
    loss = got.sum() + sum((a * a).sum() for a in given)
    with pytest.raises(tikv.OptionError, match=r"gradients do not flow .* torch.no_grad\(\)"):
        loss.backward()
    assert torch.equal(got.detach(), call(*tensors("")))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("call", EACH)
def test_without_gradients_nothing_is_followed(arch, call, mode):
    given = tensors("qkv")
    with mode():
        assert not call(*given).requires_grad
    assert not call(*tensors("")).requires_grad


@pytest.mark.parametrize("call", [cached, flash])
def test_a_gradient_of_one_input_alone_raises_too(arch, call):
    q, k, v = tensors("qkv")
    loss = call(q, k, v).sum() + (q * q).sum()
    with pytest.raises(tikv.OptionError, match="gradients do not flow"):
        torch.autograd.grad(loss, q)


def test_a_store_forgets_with_its_tokens_that_they_were_followed(arch):
    q, k, v = tensors("kv")
    found = tikv.KVCacheStore(**FORM, capacity=8)
    found.append(0, k, v)
    assert found.attend(0, q).requires_grad
    with torch.no_grad():
        assert not found.attend(0, q).requires_grad
    found.reset()
    found.append(0, k.detach(), v.detach())
    assert not found.attend(0, q).requires_grad


def test_what_is_made_of_queries_alone(arch):
    """Of the functions that do not attend."""
    x = torch.randn(1, 2, 4, 8, requires_grad=True)
    least, greatest = tikv.summarize_pages(x, 4, page=2)
    half = tikv.NormRope(mode="half", cos=np.ones((4, 4), np.float32), sin=np.zeros((4, 4), np.float32))
    turned = tikv.norm_rope(x[0].transpose(0, 1), half, position=0)
    scores = tikv.page_scores(x.detach(), least, greatest.detach(), 4, page=2)
    batched = flashinfer.merge_state(x[0], torch.zeros(2, 4), x[0].detach(), torch.zeros(2, 4))[0]
    for found in (least, greatest, turned, scores, batched):
        with pytest.raises(tikv.OptionError, match="gradients do not flow"):
            found.sum().backward()
    assert not tikv.select(scores, 1, page=2).requires_grad


def test_a_step_whose_memory_stays(arch):
    q, k, v = (a[:1] for a in tensors("kv"))
    found = tikv.KVCacheStore(**FORM, capacity=8)
    step = tikv.compile_step(found, layers=0)
    assert not step.run(k.detach(), v.detach(), q).requires_grad
    got = step.run(k, v, q)
    with pytest.raises(tikv.OptionError, match="gradients do not flow"):
        (got.sum() + k.sum()).backward()
    with torch.no_grad():
        assert not step.run(k, v, q).requires_grad
