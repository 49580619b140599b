"""TikvCache of KVarN's tiles and with sinks and recent tokens, as a store of the same format."""

import copy

import numpy as np
import oracle
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from model_cache import given  # noqa: E402

import tikv  # noqa: E402
from tikv.integrations.transformers import TikvCache  # noqa: E402

pytestmark = [pytest.mark.archs("cpu"), pytest.mark.filterwarnings("default")]

WIDTH = 64
FORMATS = {
    "tiles": ("kvarn_k4v2_g64", {"sinks": 4}),
    "tiles without sinks": ("kvarn_k4v4_g64", {}),
    "recent": (tikv.Quant(4, 32, sinks=3, recent=40), {}),
    "by channel": (tikv.Quant(4, 32, "tokens", 32, sinks=2), {}),
    "rotated": (tikv.Quant(4, 64, recent=10, rotate="hadamard"), {}),
}


def llama(implementation="sdpa", **more):
    torch.manual_seed(0)
    made = transformers.LlamaConfig(
        vocab_size=61, hidden_size=64, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=WIDTH, max_position_embeddings=512, pad_token_id=0, bos_token_id=1,
        eos_token_id=None, initializer_range=0.3, **more,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(made).eval()
    model.set_attn_implementation(implementation)
    return model


def rows(rng, tokens):
    return [torch.from_numpy(oracle.numbers(rng, (1, 2, tokens, WIDTH), np.float32)).half() for _ in "kv"]


@pytest.mark.full(unless=lambda case: case["name"] in ("tiles", "by channel"))
@pytest.mark.parametrize("name", FORMATS)
def test_layers_hold_what_a_store_does(arch, rng, tmp_path, name):
    """In growing memory, after crops, in copies and from files; new tokens of tiles are returned as they came."""
    dtype, options = FORMATS[name]
    config = llama().config
    cache = TikvCache(config, dtype=dtype, **options)
    form = {"num_layers": 1, "num_kv_heads": 2, "head_dim": WIDTH, "capacity": 600}
    store = tikv.KVCacheStore(**form, dtype=dtype, **options)
    for tokens in (3, 60, 1, 1, 1, 5, 200, 1, 1, 40):
        k, v = rows(rng, tokens)
        store.append(0, k, v, layout="head_major")
        seen = [cache.update(k, v, layer) for layer in range(2)]
        if tokens == 5:
            cache.crop(-4)
            store.trim(4)
            continue
        for layer in range(2):
            for a, held, new in zip(seen[layer], store.tokens(0), (k, v), strict=True):
                expected = held.torch().half()
                if tokens > 1 and "tiles" in name:
                    expected[:, :, -tokens:] = new
                assert torch.equal(a, expected)
        assert cache.layers[1].store.quantised == store.quantised(0)
    assert store.quantised(0) >= 192
    path = tmp_path / "cache.safetensors"
    cache.save(path)
    for again in (TikvCache.load(path, config), copy.deepcopy(cache)):
        k, v = rows(rng, 1)
        taken = store.snapshot()
        for tokens in (1, 70, 1):
            k, v = rows(rng, tokens)
            store.append(0, k, v, layout="head_major")
            for layer in range(2):
                again.update(k, v, layer)
        for a, held in zip((again.layers[1].keys, again.layers[1].values), store.tokens(0), strict=True):
            assert torch.equal(a, held.torch().half())
        store.restore(taken)
    cache.batch_repeat_interleave(2)
    assert torch.equal(cache.layers[0].keys[1], store.tokens(0)[0].torch().half()[0])


@pytest.mark.parametrize("name", ["tiles", "recent"])
def test_texts(arch, rng, name):
    """Attention "tikv" reads what sdpa gets; assisted decoding gives the same text."""
    dtype, options = FORMATS[name]
    prompt = torch.from_numpy(rng.integers(2, 61, (1, 90)))
    asked = {"max_new_tokens": 50, "do_sample": False}
    texts = []
    for implementation in ("sdpa", "tikv"):
        model = llama(implementation)
        cache = TikvCache(model.config, dtype=dtype, **options)
        texts.append(model.generate(prompt, **given(cache), **asked))
        assert cache.layers[0].store.quantised >= 64
    assert torch.equal(*texts)
    model = llama()
    cache = TikvCache(model.config, dtype=dtype, **options)
    assisted = model.generate(prompt, **given(cache), prompt_lookup_num_tokens=3, **asked)
    assert torch.equal(assisted, texts[0]) or name == "tiles"  # drafts see each other as they came
    assert cache.get_seq_length() == assisted.shape[1] - 1


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"dtype": "kvarn_k4v2", "v_dtype": "int8"}, "v_dtype='int8' does not apply to kvarn_k4v2"),
        ({"dtype": "kvarn_k4v2", "window": 100}, "dtype=kvarn_k4v2 is not supported: window=100"),
        ({"dtype": "kvarn_k4v2", "place": "host"}, "dtype=kvarn_k4v2 is not supported: place='host'"),
        ({"dtype": tikv.Quant(4, recent=3), "window": 100}, "recent=3.* is not supported: window=100"),
        ({"dtype": tikv.Quant(4, sinks=3), "sinks": 100}, "sinks=100 need a window"),
        ({"dtype": "int8", "v_dtype": tikv.Quant(4, sinks=3)}, "sinks and recent tokens are supported only"),
        ({"dtype": "kvarn_k4v2", "k_scale": 2.0}, "k_scale"),
    ],
)
def test_refused(arch, options, match):
    with pytest.raises(tikv.OptionError, match=match):
        TikvCache(llama().config, **options)
