"""TikvCache whose rows are groups of codes: what a plain store of that format holds, and the text of a model."""

import copy

import numpy as np
import oracle
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from model_cache import given  # noqa: E402

import tikv  # noqa: E402
from tikv.integrations.transformers import TikvCache, TikvLayer  # noqa: E402

pytestmark = [pytest.mark.archs("cpu"), pytest.mark.filterwarnings("default")]

WINDOW, WIDTH = 7, 64


def config(**more):
    return transformers.Gemma3TextConfig(
        vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=WIDTH, query_pre_attn_scalar=8, max_position_embeddings=256, pad_token_id=0,
        bos_token_id=1, eos_token_id=None, sliding_window=WINDOW,
        layer_types=["sliding_attention", "full_attention"], **more,
    )  # fmt: skip


def rows(rng, tokens, dtype=torch.float32):
    return [torch.from_numpy(oracle.numbers(rng, (1, 2, tokens, WIDTH), np.float32)).to(dtype) for _ in "kv"]


@pytest.mark.parametrize(
    ("stored", "dtype"),
    [
        ({"dtype": tikv.Quant(4)}, torch.float32),
        ({"dtype": "q8_0"}, torch.bfloat16),
        ({"dtype": "int8", "v_dtype": tikv.Quant(4)}, torch.float32),
        ({"dtype": None, "v_dtype": "q8_0"}, torch.bfloat16),
        ({"dtype": "float8_e4m3fn", "k_scale": (0.3, 4.0), "v_scale": 0.5}, torch.float32),
        ({"dtype": tikv.Quant(4, rotate="hadamard", seed=2)}, torch.float32),
        ({"dtype": "nvfp4", "k_scale": 0.25, "v_scale": 0.3}, torch.bfloat16),
    ],
)
def test_layers_hold_what_a_store_does(arch, rng, set_room, stored, dtype):
    """However often the tokens are moved to the front, cropped, copied and selected."""
    set_room(rollback=2, spare=4, first=4)
    cache = TikvCache(config(), **stored)
    stored["dtype"] = stored["dtype"] or str(dtype).removeprefix("torch.")
    store = tikv.KVCacheStore(num_layers=1, num_kv_heads=2, head_dim=WIDTH, capacity=64, **stored)
    for tokens in (6, 1, 1, 9, 1, 1, 2, 1):
        k, v = rows(rng, tokens, dtype)
        store.append(0, k, v, layout="head_major")
        seen = [cache.update(k, v, layer) for layer in range(2)]
        if store.length == 17:
            cache.crop(-1)
            store.trim(1)
            continue
        want = [a.torch().to(dtype) for a in store.tokens(0)]
        for layer, span in enumerate((WINDOW - 1 + tokens, store.length)):
            for got, held in zip(seen[layer], want, strict=True):
                assert got.dtype is dtype
                assert torch.equal(got, held[:, :, -span:])
    twin = copy.deepcopy(cache)
    twin.batch_repeat_interleave(2)
    for got, held in zip((twin.layers[1].keys, twin.layers[1].values), want, strict=True):
        assert torch.equal(got[1], held[0])
    layer = cache.layers[1].store
    assert layer.nbytes / layer.capacity == store.nbytes / store.capacity
    assert (layer.dtype, layer.v_dtype) == (store.dtype, store.v_dtype)


def test_a_streaming_layer_overwrites_codes(arch, rng):
    """The sinks and the newest tokens of a ring of the same formats, in order again where they are asked for."""
    cache = TikvCache(config(), dtype="float32", v_dtype="q8_0", window=8, sinks=2)
    form = {"num_layers": 1, "num_kv_heads": 2, "head_dim": WIDTH, "capacity": 8, "window": 8, "sinks": 2}
    store = tikv.KVCacheStore(**form, dtype="float32", v_dtype="q8_0")
    for tokens in (6, 1, 1, 1, 1, 1):
        k, v = rows(rng, tokens)
        store.append(0, k, v, layout="head_major")
        cache.update(k, v, 1)
    for got, held in zip((cache.layers[1].keys, cache.layers[1].values), store.tokens(0), strict=True):
        assert torch.equal(got, torch.cat((held.torch()[:, :, :2], held.torch()[:, :, 3:]), 2))


@pytest.mark.parametrize(
    "stored",
    [
        {"dtype": tikv.Quant(8, 32)},
        {"dtype": "q4_0"},
        {"dtype": None, "v_dtype": tikv.Quant(8, 32)},
        {"dtype": tikv.Quant(8, 32, rotate="hadamard")},
        {"dtype": "nvfp4", "k_scale": 0.5, "v_scale": 0.1},
        pytest.param({"dtype": tikv.Quant(8, 32), "v_dtype": "int8"}, marks=pytest.mark.full),
        pytest.param({"dtype": "float8_e4m3fn", "k_scale": 0.1}, marks=pytest.mark.full),
    ],
)
def test_attention_by_name_reads_the_codes(arch, stored, monkeypatch):
    """The logits of torch's attention over the numbers that the codes stand for, to rounding."""
    logits, decoded = [], []
    read = TikvLayer._read
    monkeypatch.setattr(TikvLayer, "_read", lambda *a: (decoded.append(1), read(*a))[1])
    for implementation in ("sdpa", "tikv"):
        decoded.clear()
        torch.manual_seed(0)
        model = transformers.Gemma3ForCausalLM(config()).eval()
        model.set_attn_implementation(implementation)
        found = model.generate(
            torch.arange(2, 13)[None], **given(TikvCache(model.config, **stored)), max_new_tokens=12,
            do_sample=False, return_dict_in_generate=True, output_logits=True,
        )  # fmt: skip
        logits.append(torch.stack(found.logits))
    assert len(decoded) == 2  # the prompt of each layer
    # A difference of rounding can move a stored value to its neighbour.
    torch.testing.assert_close(
        logits[1], logits[0], rtol=0, atol=2e-1 if stored["dtype"] in ("q4_0", "nvfp4", "float8_e4m3fn") else 2e-2
    )


def test_what_a_cache_of_groups_refuses(arch, rng):
    cache = TikvCache(config(), dtype=tikv.Quant(4, 128))
    with pytest.raises(tikv.ShapeError, match="TikvCache layer 1: a head of keys is 64 wide"):
        cache.update(*rows(rng, 3), 1)
    with pytest.raises(tikv.OptionError, match="TikvCache: v_dtype quant4_64_hadamard has rotated rows"):
        TikvCache(config(), v_dtype=tikv.Quant(4, rotate="hadamard"))
    cache = TikvCache(config(), dtype="q8_0")
    with pytest.raises(tikv.DTypeError, match="keys of float64 cannot be stored as q8_0"):
        cache.update(*rows(rng, 3, torch.float64), 1)
    assert cache.get_seq_length() == 0
    with pytest.raises(tikv.DTypeError, match=r"dtype=int32 cannot be stored.*a tikv\.Quant"):
        TikvCache(config(), dtype="int32")
    with pytest.raises(tikv.DTypeError, match="v_dtype=int32 cannot be stored"):
        TikvCache(config(), v_dtype="int32")
    with pytest.raises(tikv.OptionError, match="k_scale scales 8-bit floats and nvfp4, but K is stored as int8"):
        TikvCache(config(), dtype="int8", k_scale=1.0)
    for other in ("int8", "nvfp4"):
        with pytest.raises(tikv.OptionError, match=f"{other} has one scale per row"):
            TikvCache(config(), dtype="float8_e4m3fn", v_dtype=other, k_scale=1.0)
    with pytest.raises(tikv.DTypeError, match="values of float64 cannot be stored as q8_0"):
        TikvCache(config(), v_dtype="q8_0").update(*rows(rng, 3, torch.float64), 1)
