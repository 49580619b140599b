"""One token into a transformers cache, and a whole generation: TikvCache beside transformers' own."""

import types

import oracle
import pytest

import tikv
from tikv import dtypes
from tikv.tools import roofline

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from model_cache import given  # noqa: E402

PEERS = ("tikv", "StaticCache", "DynamicCache")
pytestmark = [pytest.mark.archs("cpu", "cuda"), pytest.mark.filterwarnings("default")]


def llama(smoke, layers):
    """A Llama's configuration: 8 KV heads of 64."""
    width = 64 if smoke else 512
    return transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=8,
        max_position_embeddings=1 << 16,
        pad_token_id=0,
        eos_token_id=None,
    )


def cache_of(peer, config, capacity):
    from tikv.integrations.transformers import TikvCache

    if peer == "DynamicCache":
        return transformers.DynamicCache(config=config)
    return (TikvCache if peer == "tikv" else transformers.StaticCache)(config, max_cache_len=capacity)


@pytest.mark.parametrize("peer", PEERS)
@pytest.mark.parametrize("length", [2_000, 20_000])
def bench_update(arch, rng, length, peer, smoke, sizes, timed):
    length = length // 100 if smoke else length
    config = llama(smoke, layers=1)
    heads, width = config.num_key_value_heads, config.hidden_size // config.num_attention_heads
    calls = 3 if peer == "DynamicCache" else sizes.calls  # it grows by concatenation, so what is timed grows with it
    cache = cache_of(peer, config, capacity=length + 24 * calls)
    rows = [torch.randn(1, heads, length, width, device=arch) for _ in "kv"]
    k, v = (torch.randn(1, 1, heads, width, device=arch).transpose(1, 2) for _ in "kv")
    cache.update(*rows, 0, {"cache_position": torch.arange(length, device=arch)})
    position = {"cache_position": torch.tensor([length], device=arch)}  # what versions before 5.4 ask for

    def call():
        return cache.update(k, v, 0, position)

    with torch.no_grad():
        for row, past, cached in zip((k, v), rows, call(), strict=True):
            oracle.assert_same_bits(cached[:, :, length].cpu().numpy(), row[:, :, 0].cpu().numpy(), what=peer)
            oracle.assert_same_bits(cached[:, :, :length].cpu().numpy(), past.cpu().numpy(), what=f"{peer}: the past")
        moved = roofline.bytes_moved(1, heads, width, *[dtypes.float32] * 2)
        timed(call, op="update", peer=peer, case=f"at {length} tokens", bytes_moved=moved, calls=calls)


@pytest.mark.parametrize("peer", ["tikv", "quanto", "hqq"])
def bench_decode_in_4_bits(arch, peer, smoke, timed):
    """One token into a layer of 4 bits and its attention; the others are the back ends of transformers' QuantizedCache.

    A QuantizedCache dequantises all its tokens for each new one.
    """
    if peer != "tikv":
        pytest.importorskip({"quanto": "optimum.quanto"}.get(peer, peer), reason=f"{peer} is not installed")
    from tikv.integrations.transformers import TikvCache
    from tikv.integrations.transformers.attention import attend as attention

    torch.manual_seed(0)
    config, length = llama(False, layers=1), 256 if smoke else 8192
    config._attn_implementation = "tikv"
    heads, width = config.num_key_value_heads, config.hidden_size // config.num_attention_heads
    if peer == "tikv":
        cache, attend = TikvCache(config, dtype=tikv.Quant(4)), attention.attend
    else:
        axis = {"axis_key": 1, "axis_value": 1} if peer == "hqq" else {}
        cache = transformers.QuantizedCache(peer, config, nbits=4, **axis)
        attend = transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS["sdpa"]
    rows = [torch.randn(1, heads, length, width, device=arch) for _ in "kv"]
    k, v, q = (torch.randn(1, heads, 1, width, device=arch) for _ in "kvq")
    module = types.SimpleNamespace(is_causal=True, num_key_value_groups=1, training=False)

    def call():
        keys, values = cache.update(k, v, 0)
        return attend(module, q, keys, values, None)[0]

    with torch.no_grad():
        cache.update(*rows, 0)
        exact = torch.nn.functional.scaled_dot_product_attention(
            q, *(torch.cat(pair, 2) for pair in zip(rows, (k, v), strict=True))
        )
        torch.testing.assert_close(call(), exact.transpose(1, 2), rtol=0, atol=0.1)
        moved = 2 * length * heads * width * 9 // 16
        timed(call, op="decode", peer=peer, case=f"4 bits, {length:,} tokens", bytes_moved=moved)


@pytest.mark.parametrize("peer", ["tikv", "DynamicCache"])
def bench_generate(arch, peer, smoke, timed):
    """512 tokens of a model with 4 layers and random weights."""
    torch.manual_seed(0)
    config, tokens = llama(smoke, layers=4), 8 if smoke else 512
    model = transformers.LlamaForCausalLM(config).eval().to(arch)
    ids = torch.randint(1, 256, (1, 16), device=arch)

    def call(peer=peer):
        cache = cache_of(peer, config, capacity=ids.shape[1] + tokens)
        return model.generate(ids, **given(cache), max_new_tokens=tokens, do_sample=False)

    assert torch.equal(call(), call("DynamicCache"))
    heads, width = config.num_key_value_heads, config.hidden_size // config.num_attention_heads
    moved = 4 * roofline.bytes_moved(tokens, heads, width, *[dtypes.float32] * 2)
    timed(call, op="generate", peer=peer, case=f"{tokens} tokens", bytes_moved=moved, calls=1, rounds=5)
