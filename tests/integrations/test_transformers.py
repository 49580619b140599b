"""TikvCache inside transformers: the text and logits of transformers' own cache, on whichever version is installed."""

import copy
import gc
import inspect
import pickle
import re
import types
import weakref

import numpy as np
import oracle
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")

import model_cache  # noqa: E402
import transformers  # noqa: E402
from model_cache import BASE, generate, given, prompts  # noqa: E402
from transformers import DynamicCache  # noqa: E402

import tikv  # noqa: E402
from tikv.integrations.transformers import TikvCache, TikvLayer  # noqa: E402
from tikv.integrations.transformers.attention import attend as by_name  # noqa: E402
from tikv.integrations.transformers.versions.caches import CROP_IS_RELATIVE, CROP_REFUSES_POSITIVE  # noqa: E402
from tikv.integrations.transformers.versions.installed import VERSION  # noqa: E402
from tikv.stores.layers.growing import GrowingLayer  # noqa: E402

pytestmark = [
    pytest.mark.archs("cpu"),
    pytest.mark.filterwarnings("default"),
    pytest.mark.usefixtures("one_thread"),
]

WINDOW = 7
HYBRID = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"] * 2}
SHARED = {
    **HYBRID,
    "num_kv_shared_layers": 2,
    "intermediate_size": [48] * 4,
    "activation_sparsity_pattern": [0.0] * 4,
    "vocab_size_per_layer_input": 97,
    "hidden_size_per_layer_input": 8,
    "laurel_rank": 4,
}
MODELS = {
    "llama": ("Llama", "LlamaConfig", {}),
    "qwen3": ("Qwen3", "Qwen3Config", {}),
    "mistral": ("Mistral", "MistralConfig", {"sliding_window": WINDOW}),
    "gemma3": ("Gemma3", "Gemma3TextConfig", {**HYBRID, "query_pre_attn_scalar": 8}),
    "gemma3n": ("Gemma3n", "Gemma3nTextConfig", SHARED),
}


@pytest.fixture(scope="module", params=MODELS)
def model(request):
    return build(request.param)


def build(name, **more):
    family, config, options = MODELS[name]
    torch.manual_seed(0)
    made = getattr(transformers, family + "ForCausalLM")(getattr(transformers, config)(**{**BASE, **options, **more}))
    return made.eval()


@pytest.fixture
def tight(set_room):
    """So little room beyond the window that tokens are moved every few steps."""
    set_room(rollback=2, spare=4, first=4)


def assert_same_text(model, cache, inputs, new_tokens=30, **options):
    """Token for token and logit for logit what transformers' own cache gives."""
    want = generate(model, DynamicCache(config=model.config), inputs, new_tokens, **options)
    got = generate(model, cache, inputs, new_tokens, **options)
    assert torch.equal(got.sequences, want.sequences)
    for step, (a, b) in enumerate(zip(got.logits, want.logits, strict=True)):
        assert torch.equal(a, b), f"logits of step {step} differ by {(a - b).abs().max()}"
    assert got.sequences.shape[1] == inputs["input_ids"].shape[1] + new_tokens


def test_greedy_text_is_the_same(arch, model):
    assert_same_text(model, TikvCache(model.config), prompts(11))


def test_greedy_text_is_the_same_while_tokens_move(arch, model, tight):
    assert_same_text(model, TikvCache(model.config), prompts(11), new_tokens=40)


@pytest.mark.parametrize("length", [1, WINDOW - 1, WINDOW, WINDOW + 1, 60])
def test_prompts_around_the_window(arch, length, tight):
    for name in ("mistral", "gemma3"):
        assert_same_text(build(name), TikvCache(build(name).config), prompts(length), new_tokens=12)


def test_static_capacity(arch, model):
    cache = TikvCache(model.config, max_cache_len=40)
    assert_same_text(model, cache, prompts(11))
    assert cache.get_seq_length() == 40


@pytest.mark.parametrize("max_cache_len", [40, WINDOW, WINDOW - 1, 2])
def test_layers_that_all_slide_go_on_beyond_the_capacity(arch, max_cache_len, tight):
    """As in transformers' own static cache, whose windows are no longer than its capacity."""
    model = build("mistral")
    want, got = (
        generate(model, cache(config=model.config, max_cache_len=max_cache_len), prompts(11), 60)
        for cache in (transformers.StaticCache, TikvCache)
    )
    assert torch.equal(got.sequences, want.sequences)
    for a, b in zip(got.logits, want.logits, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-5)
    layer = copy.deepcopy(getattr(got, model_cache.NAME)).layers[0]
    assert (layer.get_seq_length(), layer.get_max_length()) == (70, min(WINDOW, max_cache_len))
    assert_same_text(model, TikvCache(model.config, WINDOW), prompts(11), new_tokens=60)


def test_with_a_full_layer_none_goes_on(arch):
    model = build("gemma3")
    cache = TikvCache(model.config, max_cache_len=12)
    model(prompts(12)["input_ids"], **given(cache), use_cache=True)
    with pytest.raises(tikv.CapacityError, match=r"layer 0: 12 cached \+ 1 new tokens exceed max_cache_len=12"):
        model(prompts(1)["input_ids"], **given(cache), use_cache=True)
    assert [layer.get_seq_length() for layer in cache.layers] == [12] * 4


def test_left_padded_batches(arch, model, tight):
    assert_same_text(model, TikvCache(model.config), prompts(3, 11, 8))


def test_sampled_text_is_the_same(arch, model):
    assert_same_text(model, TikvCache(model.config), prompts(5, 9), do_sample=True, temperature=1.5, top_k=20)


def test_beam_search(arch, model, tight):
    want = generate(model, DynamicCache(config=model.config), prompts(4, 9), 14, num_beams=3)
    got = generate(model, TikvCache(model.config), prompts(4, 9), 14, num_beams=3)
    assert torch.equal(got.sequences, want.sequences)


@pytest.mark.parametrize("name", ["llama", "qwen3", "mistral", "gemma3"])
def test_assisted_generation(arch, name, tight):
    """The draft is wrong now and then, so tokens are taken back, beyond the window too."""
    model = build(name)
    # Before 5.14 transformers' own cache, which the assistant has, cannot go back behind a window.
    slides = any(TikvCache(model.config).is_sliding)
    assistant = build("llama") if slides and not CROP_IS_RELATIVE else copy.deepcopy(model)
    with torch.no_grad():
        torch.manual_seed(3)
        assistant.lm_head.weight.add_(torch.randn_like(assistant.lm_head.weight) * 0.02)
    inputs = prompts(9)
    want = generate(model, DynamicCache(config=model.config), inputs, 30)
    cache = TikvCache(model.config)
    crops = []
    cache_crop = TikvLayer.crop
    try:
        TikvLayer.crop = lambda self, n: (crops.append(n), cache_crop(self, n))[1]
        got = generate(model, cache, inputs, 30, assistant_model=assistant)
    finally:
        TikvLayer.crop = cache_crop
    assert torch.equal(got.sequences, want.sequences)
    assert crops


@pytest.mark.parametrize(("attention", "limit"), [("sdpa", None), ("tikv", 48)])
@pytest.mark.parametrize("name", ["mistral", "gemma3"])
def test_lookup_in_the_prompt(arch, name, attention, limit, tight, set_room, monkeypatch):
    """Guesses from the text itself, taken back beyond the window, from prompts shorter and longer than that."""
    if not CROP_IS_RELATIVE:  # such versions do not say before the guesses that some may be taken back
        set_room(rollback=6)
    model = build(name, vocab_size=31)
    cropped = []
    crop = TikvCache.crop
    monkeypatch.setattr(TikvCache, "crop", lambda self, n: (cropped.append(n), crop(self, n))[1])
    for n in (WINDOW - 1, WINDOW + 1, 17):
        torch.manual_seed(n)
        ids = torch.randint(2, 31, (1, n))
        text = ids
        with torch.no_grad():
            for _ in range(20):
                text = torch.cat([text, model(text, use_cache=False).logits[:, -1:].argmax(-1)], 1)
        model.set_attn_implementation(attention)
        end = min(set(range(31)) - set(text[0].tolist()))  # which old versions want to have
        options = {"max_new_tokens": 20, "do_sample": False, "prompt_lookup_num_tokens": 5, "eos_token_id": end}
        got = model.generate(ids, **given(TikvCache(model.config, limit)), **options)
        assert torch.equal(got[:, : text.shape[1]], text)  # old versions may give a guess more than was asked for
        model.set_attn_implementation("sdpa")
    assert any(cropped), "no guess was wrong"


def test_several_turns(arch, model, tight):
    caches = DynamicCache(config=model.config), TikvCache(model.config)
    texts = []
    for cache in caches:
        ids = prompts(6)["input_ids"]
        for turn in range(3):
            torch.manual_seed(turn)
            ids = torch.cat([ids, torch.randint(2, 97, (1, 5))], dim=1)
            ids = generate(model, cache, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, 9).sequences
        texts.append(ids)
    assert torch.equal(*texts)
    assert caches[0].get_seq_length() == caches[1].get_seq_length()


@pytest.mark.parametrize("chunk", [1, 2, WINDOW, 20])
def test_chunks_are_the_same_as_one_prompt(arch, model, chunk, tight):
    """Multi-token updates: the mask has the length that update returns, whatever was cached before."""
    ids = prompts(43)["input_ids"]
    caches = DynamicCache(config=model.config), TikvCache(model.config)
    for start in range(0, 43, chunk):
        part = ids[:, start : start + chunk]
        with torch.no_grad():
            want, got = (model(part, **given(cache), use_cache=True).logits for cache in caches)
        assert torch.equal(got, want)


def rows(rng, tokens, batch=1, heads=2, width=4):
    return [torch.from_numpy(oracle.numbers(rng, (batch, heads, tokens, width), np.float32)) for _ in "kv"]


def layer_of(window=None, limit=None, dtype=None):
    return TikvLayer(0, window, limit, dtype, transformers.LlamaConfig(**BASE))


@pytest.mark.parametrize("window", [None, 1, 2, 5])
@pytest.mark.parametrize("limit", [None, 64])
def test_the_mask_has_the_length_that_update_returns(arch, rng, window, limit, tight):
    layer, past = layer_of(window, limit), []
    for tokens in (3, 1, 1, 9, 1, 1, 1, 1, 1, 1, 2, 20, 1, 1):
        k, v = rows(rng, tokens)
        length, offset = layer.get_mask_sizes(tokens)
        assert layer.get_mask_sizes(tokens) == layer.get_mask_sizes(torch.arange(tokens))
        keys, values = layer.update(k, v)
        past.append((k, v))
        everything = [torch.cat(streams, dim=2) for streams in zip(*past, strict=True)]
        total = everything[0].shape[2]
        first = 0 if window is None else max(0, total - tokens - window + 1)
        assert (length, offset) == (total - first, first)
        for got, want in zip((keys, values), everything, strict=True):
            oracle.assert_same_bits(got.numpy(), want[:, :, first:].numpy())
        assert layer.get_seq_length() == layer.cumulative_length == total


def test_what_update_returns_is_the_cache_itself(arch, rng):
    layer = layer_of()
    with torch.no_grad():
        keys, _ = layer.update(*rows(rng, 3))
        layer.update(*rows(rng, 1))
        again, _ = layer.update(*rows(rng, 1))
    assert keys.data_ptr() == again.data_ptr() == layer.store.keys.numpy().ctypes.data
    oracle.assert_same_bits(keys.numpy(), again[:, :, :3].numpy())


def test_memory_grows_by_an_eighth(arch, rng):
    layer = layer_of()
    sizes = []
    for tokens in (300, 200, 300, 4000, 600, 1):
        layer.update(*rows(rng, tokens))
        sizes.append(layer.store.capacity)
    assert sizes == [556, 556, 1056, 5400, 5400, 6076]


def test_memory_of_a_window_goes_back_after_a_long_prompt(arch, rng):
    layer = layer_of(window=8)
    layer.update(*rows(rng, 5000))
    assert layer.store.capacity > 5000
    for _ in range(400):
        layer.update(*rows(rng, 1))
    assert layer.store.capacity < 300


@pytest.mark.parametrize(("dtype", "tolerance"), [("float16", 2e-3), ("bfloat16", 2e-2), ("int8", 2e-2)])
@pytest.mark.parametrize("window", [None, 5])
def test_narrower_storage(arch, rng, dtype, tolerance, window):
    layer, own = layer_of(window, None, tikv.dtypes.parse(dtype, "test")), layer_of(window)
    for tokens in (6, 1, 1, 3):
        k, v = rows(rng, tokens)
        got, want = layer.update(k, v), own.update(k, v)
        for a, b in zip(got, want, strict=True):
            assert a.dtype == torch.float32
            assert a.shape == b.shape
            error = (a - b).abs().max() / b.abs().max()
            assert 0 < error < tolerance
    assert layer.store.nbytes < own.store.nbytes


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_half_precision_models_keep_every_bit(arch, name):
    model = build("gemma3").to(getattr(torch, name))
    assert_same_text(model, TikvCache(model.config), prompts(11))


@pytest.mark.parametrize("implementation", ["sdpa", "tikv"])
@pytest.mark.parametrize("compiled", [False, True])
def test_autocast_widens_the_keys_alone(arch, implementation, compiled):
    model, text = build("llama", num_hidden_layers=2), []
    model.set_attn_implementation(implementation)
    torch.compiler.reset()
    forward = torch.compile(model.forward, backend="eager") if compiled else model
    with torch.autocast("cpu", torch.bfloat16):
        for cache, call in ((DynamicCache(config=model.config), model), (TikvCache(model.config, 20), forward)):
            text.append(steps(model, call, cache, prompts(9), 4)[1])
    assert cache.layers[0].keys.dtype == torch.float32
    torch.testing.assert_close(text[1], text[0], rtol=0, atol=2e-2)


# With narrower storage a difference of rounding can move a stored value to its neighbour.
@pytest.mark.parametrize(("dtype", "tolerance"), [(None, 2e-5), ("float16", 2e-3), ("int8", 2e-2)])
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3"])
def test_attention_by_name(arch, name, dtype, tolerance, read):
    """The library's attention on what is stored gives what torch's gives on the same values, to rounding."""
    model, other = build(name), build(name)
    other.set_attn_implementation("tikv")
    inputs = prompts(11)
    want = generate(model, TikvCache(model.config, dtype=dtype), inputs, 20)
    assert not read
    got = generate(other, TikvCache(other.config, dtype=dtype), inputs, 20)
    assert read == [(getattr(torch, dtype or "float32"),) * 2] * (19 * 4)
    for a, b in zip(got.logits, want.logits, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=tolerance)
    assert torch.equal(got.sequences, want.sequences)


@pytest.mark.parametrize("queries", [1, 4])
def test_attention_by_name_takes_the_dropout_by_its_place(arch, rng, queries):
    """As wrappers of all registered functions give it; it is none where it is 0, and stands before the scaling."""
    q = torch.from_numpy(oracle.numbers(rng, (1, 4, queries, 8), np.float32))
    k, v = rows(rng, 4, width=8)
    module = torch.nn.Module()
    module.is_causal, module.num_key_value_groups = True, 2
    want = by_name.attend(module, q, k, v, None, dropout=0.0, scaling=0.25)[0]
    functions = (by_name.attend, transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS["sdpa"])
    for function in functions:
        for got in (function(module, q, k, v, None, 0.0, scaling=0.25), function(module, q, k, v, None, 0.0, 0.25)):
            torch.testing.assert_close(got[0], want, rtol=0, atol=1e-5)


def test_attention_by_name_takes_padded_batches_and_beams(arch):
    model, other = build("gemma3"), build("gemma3")
    other.set_attn_implementation("tikv")
    for options in ({}, {"num_beams": 2}):
        want = generate(model, TikvCache(model.config, dtype="int8"), prompts(4, 11), 12, **options)
        got = generate(other, TikvCache(other.config, dtype="int8"), prompts(4, 11), 12, **options)
        assert torch.equal(got.sequences, want.sequences)


@pytest.mark.parametrize("dtype", [None, "int8"])
def test_attention_by_name_with_latent_vectors(arch, dtype):
    """Some versions cache what keys and values are computed from: no attention can read that in place."""
    latent = {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 12}
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
    options = {**BASE, **latent, **experts, "moe_intermediate_size": 16, "num_key_value_heads": 4}
    options = {name: value for name, value in options.items() if name != "head_dim"}
    torch.manual_seed(0)
    model = transformers.DeepseekV3ForCausalLM(transformers.DeepseekV3Config(**options)).eval()
    want = generate(model, TikvCache(model.config, dtype=dtype), prompts(4, 11), 12)
    model.set_attn_implementation("tikv")
    got = generate(model, TikvCache(model.config, dtype=dtype), prompts(4, 11), 12)
    assert torch.equal(got.sequences, want.sequences)


def test_a_soft_cap_is_applied(arch):
    options = {**BASE, "sliding_window": WINDOW, "attn_logit_softcapping": 0.05, "query_pre_attn_scalar": 8}
    torch.manual_seed(0)
    model = transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**options)).eval()
    for parameter in model.parameters():
        parameter.data.mul_(4)  # so that scores reach the cap
    text = {}
    for name in ("eager", "tikv"):
        model.set_attn_implementation(name)
        text[name] = torch.stack(generate(model, TikvCache(model.config), prompts(9), 12).logits)
    torch.testing.assert_close(text["tikv"], text["eager"], rtol=1e-4, atol=1e-4)


def attention_of(q, k, v, softcap=None):
    """Of all queries to all keys, one key head per query head."""
    scores = q @ k.transpose(2, 3) / q.shape[3] ** 0.5
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    return (scores.softmax(-1) @ v).transpose(1, 2)


def test_a_soft_cap_leaves_attention_to_all_tokens(arch, rng):
    module, (q, k), (v, _) = torch.nn.Module(), rows(rng, 4), rows(rng, 4)
    module.is_causal = False
    got = [by_name.attend(module, q, k, v, None, softcap=5.0)[0]]
    module.is_causal = True
    got.append(by_name.attend(module, q, k, v, None, softcap=5.0, is_causal=False)[0])
    for a in got:
        torch.testing.assert_close(a, attention_of(q, k, v, 5.0))


@pytest.mark.parametrize("graded", [0, 1, 2])
def test_attention_by_name_of_one_query_has_gradients(arch, rng, graded):
    q, k, v = rows(rng, 1)[0], *rows(rng, 4)
    new = (q, k, v)[graded].requires_grad_()
    outs = by_name.attend(torch.nn.Module(), q, k, v, None)[0], attention_of(q, k, v)
    got, want = (torch.autograd.grad(out.square().sum(), new)[0] for out in outs)
    torch.testing.assert_close(got, want)


def steps(model, compiled, cache, inputs, count):
    """Tokens of a prompt that `model` reads and `count` more that `compiled` does, and the last logits."""
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    text, forward = [], model
    with torch.no_grad():
        for _ in range(count + 1):
            positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1] :]
            logits = forward(ids, attention_mask=mask, position_ids=positions, **given(cache)).logits
            ids, forward = logits[:, -1:].argmax(-1), compiled
            mask = torch.cat([mask, torch.ones_like(ids)], 1)
            text.append(ids)
    return torch.cat(text, 1), logits


@pytest.mark.parametrize(
    ("name", "dtype", "lengths", "backend"),
    [
        ("llama", "int8", (4, 9), "aot_eager"),
        ("gemma3", "float16", (4, 9), "eager"),
        pytest.param("mistral", None, (9,), "eager", marks=pytest.mark.full),
    ],
)
def test_torch_compile_keeps_the_cache_in_its_graph(arch, name, dtype, lengths, backend, tight):
    """Without a graph break, while tokens of a window move, too; and the cache goes on outside."""
    model = build(name, num_hidden_layers=2, **({"layer_types": HYBRID["layer_types"][:2]} if name == "gemma3" else {}))
    torch.compiler.reset()
    compiled = torch.compile(model.forward, fullgraph=True, backend=backend)
    caches = [TikvCache(model.config, 23, dtype=dtype) for _ in range(2)]
    want, got = (
        steps(model, forward, cache, prompts(*lengths), 12)
        for forward, cache in zip((model, compiled), caches, strict=True)
    )
    assert torch.equal(got[0], want[0])
    torch.testing.assert_close(got[1], want[1], rtol=0, atol=1e-5)
    for a, b in zip(*(cache.layers for cache in caches), strict=True):
        assert a.get_seq_length() == b.get_seq_length() == lengths[-1] + 12
        torch.testing.assert_close(a.keys, b.keys, rtol=0, atol=1e-5)
        assert b.store.origin == a.store.origin
        assert (b.store.origin > 0) == a.is_sliding
    ids = torch.full((len(lengths), 1), 7)
    for _ in range(2):
        with torch.no_grad():
            a, b = (model(ids, **given(cache)).logits for cache in caches)
        torch.testing.assert_close(a, b, rtol=0, atol=1e-5)
    for cache in caches if name != "mistral" else ():
        with pytest.raises(tikv.CapacityError, match=r"23 cached \+ 1 new tokens exceed max_cache_len=23"):
            model(ids, **given(cache))
        cache.crop(-1)
        cache.batch_select_indices(torch.tensor([0]))
    with torch.no_grad():
        a, b = (model(ids[:1], **given(cache)).logits for cache in caches)
    torch.testing.assert_close(a, b, rtol=0, atol=1e-5)


def test_torch_compile_takes_a_prompt_into_memory_that_is_there(arch):
    model = build("llama", num_hidden_layers=2)
    cache, ids = TikvCache(model.config, 20), prompts(9)["input_ids"]
    cache.early_initialization(1, 2, 8, torch.float32, torch.device("cpu"))
    torch.compiler.reset()
    with torch.no_grad():
        got = torch.compile(model.forward, fullgraph=True, backend="eager")(ids, **given(cache)).logits
        torch.testing.assert_close(got, model(ids).logits, rtol=0, atol=1e-5)
    assert cache.get_seq_length() == 9


def test_torch_compile_leaves_its_graph_to_make_memory_or_to_refuse(arch, tight):
    model = build("llama", num_hidden_layers=2)
    torch.compiler.reset()
    compiled = torch.compile(model.forward, backend="eager")
    want, got = (steps(forward, forward, TikvCache(model.config), prompts(3), 9) for forward in (model, compiled))
    assert torch.equal(got[0], want[0])
    full = TikvCache(model.config, 5)
    with pytest.raises(tikv.CapacityError, match=r"5 cached \+ 1 new tokens exceed max_cache_len=5"):
        steps(model, compiled, full, prompts(4), 2)
    assert full.get_seq_length() == 5


def test_torch_compile_with_attention_by_name(arch):
    model = build("llama", num_hidden_layers=2)
    want = steps(model, model, TikvCache(model.config, 20), prompts(9), 4)
    model.set_attn_implementation("tikv")
    torch.compiler.reset()
    compiled = torch.compile(model.forward, fullgraph=True, backend="eager")
    got = steps(model, compiled, TikvCache(model.config, 20, dtype="float32"), prompts(9), 4)
    assert torch.equal(got[0], want[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.full)])
def test_torch_compile_reads_int8_in_the_models_dtype(arch, rng, dtype):
    layers = [layer_of(dtype=tikv.dtypes.int8) for _ in range(2)]
    torch.compiler.reset()
    compiled = torch.compile(layers[1].update, backend="eager")
    for tokens in (3, 1):
        new = [a.to(dtype) for a in rows(rng, tokens)]
        for want, got in zip(layers[0].update(*new), compiled(*new), strict=True):
            assert got.dtype == dtype
            assert torch.equal(got, want)


@pytest.mark.parametrize("dtype", [None, "int8"])
def test_torch_compile_goes_on_after_inference_mode(arch, rng, dtype):
    layer, own = (layer_of(dtype=dtype and tikv.dtypes.parse(dtype, "test")) for _ in range(2))
    torch.compiler.reset()
    compiled, first, new = torch.compile(layer.update, backend="aot_eager"), rows(rng, 3), rows(rng, 1)
    with torch.inference_mode():
        layer.update(*first)
    own.update(*first)
    with torch.no_grad():
        for want, got in zip(own.update(*new), compiled(*new), strict=True):
            oracle.assert_same_bits(got.numpy(), want.numpy())


def filled(rng, window=None, batch=3, tokens=6):
    layer = layer_of(window)
    k, v = rows(rng, tokens, batch)
    layer.update(k, v)
    return layer, k, v


@pytest.mark.parametrize("window", [None, 5])
def test_batches_are_reordered_repeated_and_selected(arch, rng, window):
    layer, k, v = filled(rng, window)
    first = 0 if window is None else 6 - window + 1
    k, v = k[:, :, first:], v[:, :, first:]

    def check(index):
        oracle.assert_same_bits(layer.keys.numpy(), k[index].numpy())
        oracle.assert_same_bits(layer.values.numpy(), v[index].numpy())
        assert layer.batch_size == len(index)

    layer.reorder_cache(torch.tensor([2, 0, 0]))
    check([2, 0, 0])
    layer.batch_repeat_interleave(2)
    check([2, 2, 0, 0, 0, 0])
    layer.batch_select_indices(torch.tensor([3, 0]))
    check([0, 2])
    layer.batch_select_indices(torch.tensor([-1, 0, -2]))
    check([2, 0, 0])
    with pytest.raises(tikv.TikvError):
        layer.batch_select_indices(torch.tensor([-4]))
    layer.batch_select_indices(torch.tensor([True, False, False]))
    check([2])
    new = rows(rng, 1)
    keys, _ = layer.update(*new)
    oracle.assert_same_bits(keys.numpy(), torch.cat([k[[2]], new[0]], dim=2).numpy())


def test_keys_and_values_can_be_set(arch, rng):
    """As compression methods do: prune, then assign keys, then values."""
    layer, k, v = filled(rng)
    kept = torch.tensor([0, 2, 5])
    layer.keys = layer.keys[:, :, kept]
    with pytest.raises(tikv.ShapeError, match="keys and values must be set to the same number"):
        layer.update(*rows(rng, 1, 3))
    layer.values = layer.values[:, :, kept]
    assert layer.get_seq_length() == 3
    oracle.assert_same_bits(layer.keys.numpy(), k[:, :, kept].numpy())
    oracle.assert_same_bits(layer.values.numpy(), v[:, :, kept].numpy())
    half = layer_of()
    half.keys = k
    with pytest.raises(tikv.ShapeError, match="keys and values must be set to the same number"):
        half.update(*rows(rng, 1, 3))
    assert half.store is None
    layer.keys = layer.keys * 2
    oracle.assert_same_bits(layer.keys.numpy(), (k[:, :, kept] * 2).numpy())
    new = rows(rng, 1, 3)
    _, values = layer.update(*new)
    oracle.assert_same_bits(values.numpy(), torch.cat([v[:, :, kept], new[1]], dim=2).numpy())


def test_fewer_keys_and_values_give_memory_back(arch, rng):
    layer, _, v = filled(rng, tokens=1100)
    assert layer.store.capacity == 1356
    layer.keys, layer.values = layer.keys[:, :, ::3], layer.values[:, :, ::3]
    assert (layer.store.length, layer.store.capacity) == (367, 623)
    oracle.assert_same_bits(layer.values.numpy(), v[:, :, ::3].numpy())


@pytest.mark.archs("cpu")
def test_a_full_layer_is_compacted_by_head_and_gives_memory_back(arch, rng):
    layer = layer_of()
    k, v = rows(rng, 300)
    layer.update(k, v)
    before = layer.store.nbytes
    with pytest.raises(tikv.ShapeError, match="would keep 1 to 2 tokens, but all heads have one length here"):
        layer.compact(torch.arange(300)[None, None] < torch.tensor([1, 2])[:, None])
    oracle.assert_same_bits(layer.keys.numpy(), k.numpy())
    index = torch.tensor([[[0, 5, 299], [1, 7, 299]]])
    layer.compact(index)
    assert (layer.get_seq_length(), layer.store.length) == (300, 3)
    assert layer.store.nbytes == before * 256 / 556
    kept = [a.gather(2, index[..., None].expand(-1, -1, -1, 4)) for a in (k, v)]
    new = rows(rng, 2)
    assert layer.get_mask_sizes(torch.zeros(2)) == (5, 297)
    for got, old, added in zip(layer.update(*new), kept, new, strict=True):
        oracle.assert_same_bits(got.numpy(), torch.cat([old, added], dim=2).numpy())
    with pytest.raises(tikv.PositionError, match=r"cannot go back beyond position 298.*Drop at most 3"):
        layer.store.trim(4)
    layer.crop(-2)
    assert (layer.get_seq_length(), layer.keys.shape[2]) == (300, 3)
    with pytest.raises(tikv.OptionError, match="compact"):
        layer_of(window=4).compact(index)


def test_crop_has_the_meaning_of_this_version(arch, rng):
    layer, k, _ = filled(rng)
    layer.crop(-2)
    assert layer.get_seq_length() == 4
    oracle.assert_same_bits(layer.keys.numpy(), k[:, :, :4].numpy())
    if CROP_REFUSES_POSITIVE:
        with pytest.raises(ValueError, match=r"With 4 tokens, crop\(-1\) keeps 3, and crop\(-3\) drops 3"):
            layer.crop(3)
    else:
        layer.crop(3)
        assert layer.get_seq_length() == 3
        layer.crop(100)
        assert layer.get_seq_length() == 3
    before = layer.get_seq_length()
    layer.crop(0)
    assert layer.get_seq_length() == (before if CROP_IS_RELATIVE else 0)
    layer.crop(-100)
    assert layer.get_seq_length() == 0


def test_a_crop_that_one_layer_refuses_changes_none(arch, tight):
    config = transformers.Gemma3TextConfig(**{**BASE, **HYBRID, "layer_types": HYBRID["layer_types"][::-1]})
    cache, model = TikvCache(config), transformers.Gemma3ForCausalLM(config).eval()
    with torch.no_grad():
        for _ in range(4):
            model(prompts(20)["input_ids"], **given(cache))
    with pytest.raises(tikv.PositionError, match="layer 1: cannot go back from 80 to 50 tokens"):
        cache.crop(-30)
    assert [layer.get_seq_length() for layer in cache.layers] == [80] * 4


def test_crop_is_what_transformers_own_does(arch, rng):
    own, ours = DynamicCache(), layer_of()
    k, v = rows(rng, 9)
    own.update(k, v, 0)
    ours.update(k, v)
    for n in (-2, -1, *([] if CROP_REFUSES_POSITIVE else [5, 4])):
        own.crop(n)
        ours.crop(n)
        assert ours.get_seq_length() == own.get_seq_length()
        oracle.assert_same_bits(ours.keys.numpy(), own.layers[0].keys.numpy())


def test_a_window_is_rolled_back(arch, rng, tight):
    layer, (k, v) = layer_of(5), rows(rng, 40)
    layer.update(k[:, :, :20], v[:, :, :20])
    layer.activate_past_recording()
    for i in range(20, 40):
        layer.update(k[:, :, i : i + 1], v[:, :, i : i + 1])
    layer.crop(-19)
    assert layer.get_seq_length() == 21
    oracle.assert_same_bits(layer.keys.numpy(), k[:, :, 17:21].numpy())
    layer = layer_of(5)
    for i in range(40):
        layer.update(k[:, :, i : i + 1], v[:, :, i : i + 1])
    with pytest.raises(
        tikv.PositionError, match=r"cannot go back from 40 to 21 tokens: a window of 5 needs positions from 17"
    ):
        layer.crop(-19)
    assert layer.get_seq_length() == 40
    oracle.assert_same_bits(layer.keys.numpy(), k[:, :, 36:].numpy())


def test_a_window_is_rolled_back_to_before_the_past_is_recorded(arch, rng, set_room):
    """By as many tokens as without recording, whenever memory runs out after it."""
    set_room(rollback=6, spare=2)
    k, v = rows(rng, 48)
    for recorded in range(28, 44):
        layer = layer_of(5)
        for i in range(recorded + 4):
            if i == recorded:
                layer.activate_past_recording()
            layer.update(k[:, :, i : i + 1], v[:, :, i : i + 1])
        layer.crop(-6)
        assert layer.get_seq_length() == recorded - 2
        oracle.assert_same_bits(layer.keys.numpy()[:, :, -4:], k[:, :, recorded - 6 : recorded - 2].numpy())


def test_reset_and_copies(arch, model):
    cache = TikvCache(model.config)
    generate(model, cache, prompts(11), 5)
    prefix = copy.deepcopy(cache)
    assert_same_text_after = generate(model, cache, {"input_ids": torch.arange(2, 22)[None]}, 4).sequences
    again = generate(model, prefix, {"input_ids": torch.arange(2, 22)[None]}, 4).sequences
    assert torch.equal(again, assert_same_text_after)
    cache.reset()
    assert cache.get_seq_length() == 0
    assert_same_text(model, cache, prompts(7, 4))


def test_a_copy_has_what_was_set_so_far(arch, rng):
    layer, k, v = filled(rng)
    layer.keys = k[:, :, :2]
    twin = copy.deepcopy(layer)
    for one in (twin, layer):
        one.values = v[:, :, :2]
        oracle.assert_same_bits(one.keys.numpy(), k[:, :, :2].numpy())
        oracle.assert_same_bits(one.values.numpy(), v[:, :, :2].numpy())


@pytest.mark.parametrize("keep", [pickle.dumps, copy.copy])
def test_what_would_share_or_lose_the_memory_is_refused(arch, rng, keep):
    layer, *_ = filled(rng)
    with pytest.raises(tikv.OptionError, match=r"layer 0: a cache is not pickled.*Use copy\.deepcopy\(\)"):
        keep(layer)


def test_a_shallow_copy_of_a_cache_is_refused(arch, model):
    with pytest.raises(tikv.OptionError, match=r"copy\.copy\(\) would share .* Use copy\.deepcopy\(\)"):
        copy.copy(TikvCache(model.config))


def test_gradients_are_refused_where_they_would_be_wrong(arch):
    model, inputs = build("llama", num_hidden_layers=1), prompts(5)
    want = model(**inputs, **given(DynamicCache(config=model.config))).logits
    for name in ("sdpa", "tikv"):
        model.set_attn_implementation(name)
        got = model(**inputs, **given(TikvCache(model.config))).logits
        assert torch.equal(got, want)
        with pytest.raises(tikv.OptionError, match="gradients do not flow through the cache"):
            got.sum().backward()
    for dtype in (None, "int8"):
        cache = TikvCache(model.config, dtype=dtype)
        for steps in (torch.no_grad, torch.no_grad, torch.no_grad, torch.enable_grad, torch.enable_grad):
            with steps():
                got = model(torch.tensor([[7]]), **given(cache)).logits
        with pytest.raises(tikv.OptionError, match="gradients do not flow through the cache"):
            got.sum().backward()
    model.requires_grad_(False)
    model.model.layers[0].self_attn.v_proj.requires_grad_(True)
    with pytest.raises(tikv.OptionError, match="gradients do not flow through the cache"):
        model(**inputs, **given(TikvCache(model.config))).logits.sum().backward()


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_gradients_of_queries_outlive_the_cache(arch, name, compiled, tight):
    """Memory that autograd saved is rewritten: by a crop and new tokens, by a move, by another order."""
    model, grads = build(name, num_hidden_layers=1), []
    model.requires_grad_(False)
    weight = model.model.layers[0].self_attn.q_proj.weight.requires_grad_()
    torch.compiler.reset()
    forward = torch.compile(model.forward, backend="eager") if compiled else model
    ids = prompts(9, 9)["input_ids"]
    for cache, call in ((DynamicCache(config=model.config), model), (TikvCache(model.config, 40), forward)):
        model(ids, **given(cache))
        logits = [forward(ids[:, i : i + 1], **given(cache)).logits for i in range(4)]
        if name == "llama":  # transformers' own window is not cropped
            cache.crop(-1)
        logits += [call(ids[:, i : i + 1], **given(cache)).logits for i in range(5, 9)]
        cache.reorder_cache(torch.tensor([1, 0]))
        logits.append(call(ids[:, :3], **given(cache)).logits)
        grads.append(torch.autograd.grad(sum(a.square().sum() for a in logits), weight)[0])
    torch.testing.assert_close(grads[1], grads[0])


def test_a_gradient_is_seen_behind_tokens_without(arch, rng):
    """Tokens like the last ones skip the checks; those with a gradient are not like them."""
    layer, (k, v) = layer_of(), rows(rng, 1)
    for graded in (False, False, False, True, True, False, True):
        with torch.enable_grad():
            keys, _ = layer.update(k.clone().requires_grad_(graded), v)
            assert keys.requires_grad == graded
            if graded:
                with pytest.raises(tikv.OptionError, match="gradients do not flow through the cache"):
                    keys.sum().backward()
    with torch.no_grad():
        assert not layer.update(k.clone().requires_grad_(), v)[0].requires_grad
    assert layer.get_seq_length() == 8


@pytest.mark.parametrize(
    ("model_dtype", "dtype"), [("float16", "bfloat16"), ("bfloat16", "float32"), ("float32", "float64")]
)
def test_a_storage_that_does_not_fit_the_model_is_refused(arch, model_dtype, dtype):
    model = build("llama", num_hidden_layers=1).to(getattr(torch, model_dtype))
    with pytest.raises(tikv.DTypeError, match=rf"{dtype}.*Use "):
        generate(model, TikvCache(model.config, dtype=dtype), prompts(5), 2)


@pytest.mark.parametrize("dtype", ["int32", torch.int64, "fp4"])
def test_what_is_no_storage_is_refused_at_once(arch, dtype):
    with pytest.raises(tikv.DTypeError, match=r"^TikvCache.*Use "):
        TikvCache(build("llama", num_hidden_layers=1).config, dtype=dtype)


@pytest.mark.parametrize("config", [None, "llama", torch.nn.Linear(1, 1)])
def test_what_is_no_configuration_is_refused(arch, config):
    with pytest.raises(tikv.OptionError, match=r"not a configuration of a model. Use model\.config"):
        TikvCache(config)


def test_capacity_getters(arch):
    gemma = build("gemma3").config
    assert [layer.get_max_length() for layer in TikvCache(gemma).layers] == [WINDOW, -1] * 2
    assert [layer.get_max_cache_shape() for layer in TikvCache(gemma, 20).layers] == [WINDOW, 20] * 2
    assert TikvCache(gemma).get_max_cache_shape() == -1
    assert TikvCache(gemma, 20).get_max_length() == 20
    assert [TikvCache(gemma, 20).get_max_length(i) for i in (0, 1, 99)] == [WINDOW, 20, -1]
    # Where PEFT's prefix tuning reads it, from an empty cache that is no DynamicCache.
    assert [TikvCache(build(name).config, n).max_cache_len for name in MODELS for n in (None, 20)] == [-1, 20] * 5
    assert TikvCache(gemma).is_sliding == [True, False] * 2
    assert not TikvCache(gemma).is_compileable
    shared = TikvCache(build("gemma3n").config)
    assert sum(isinstance(layer, TikvLayer) for layer in shared.layers) == 2


def test_chunked_layers_are_windows(arch, rng):
    config = transformers.Llama4TextConfig(
        num_hidden_layers=2, attention_chunk_size=6, layer_types=["chunked_attention", "full_attention"]
    )
    first, second = TikvCache(config).layers
    assert (first.sliding_window, second.sliding_window) == (6, None)


EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
FAMILIES = {
    "GptOss": {**HYBRID, **EXPERTS, "num_local_experts": 4},
    "Qwen2": {},
    "Phi3": {},
    "Olmo2": {},
    "Cohere2": {"sliding_window": WINDOW},
    "StableLm": {},
    "Gemma2": {"sliding_window": WINDOW},
    "Mixtral": {**EXPERTS, "num_local_experts": 4},
    "GPTNeoX": {},
}
WITH_STATES = {
    "Lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "RecurrentGemma": {"attention_window_size": WINDOW, "lru_width": 32, "block_types": ["recurrent", "attention"]},
    "Qwen3Next": {
        **EXPERTS,
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "num_experts": 4,
        "shared_expert_intermediate_size": 16,
    },
}


@pytest.mark.parametrize("family", [*FAMILIES, *WITH_STATES])
def test_families_write_the_same_text(arch, family):
    """With layers that attend in ours, and those with a state in transformers' own; also with attention by name."""
    if not hasattr(transformers, f"{family}Config") or (family in WITH_STATES and VERSION < (5, 19)):
        pytest.skip(f"transformers {transformers.__version__} has no {family}, or no layers for its states")
    options = {**BASE, **FAMILIES.get(family, {}), **WITH_STATES.get(family, {})}
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**options)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    want = generate(model, DynamicCache(config=model.config), prompts(11), 12)
    for name in (None, "tikv"):
        if name is not None:
            model.set_attn_implementation(name)
        got = generate(model, TikvCache(model.config), prompts(11), 12)
        assert torch.equal(got.sequences, want.sequences)


@pytest.mark.parametrize("queries", [1, 5])
@pytest.mark.parametrize("masked", [False, True])
def test_learned_sinks_take_their_share(arch, rng, queries, masked):
    """Of prompts and single tokens, by our kernel or, behind a mask or with gradients, step by step."""
    q = torch.from_numpy(rng.standard_normal((2, 4, queries, 8)).astype(np.float32))
    k, v = (torch.from_numpy(rng.standard_normal((2, 2, 9, 8)).astype(np.float32)) for _ in "kv")
    sinks = torch.from_numpy(rng.standard_normal(4).astype(np.float32))
    sees = torch.ones(queries, 9, dtype=torch.bool).tril(9 - queries)
    module = torch.nn.Module()
    scores = (q @ k.repeat_interleave(2, 1).transpose(2, 3) / 8**0.5).masked_fill(~sees, -torch.inf)
    wide = torch.cat([scores, sinks.reshape(1, 4, 1, 1).expand(2, 4, queries, 1)], -1).softmax(-1)
    want = (wide[..., :9] @ v.repeat_interleave(2, 1)).transpose(1, 2)
    for graded in (False, True):
        learned = sinks.clone().requires_grad_(graded)
        got, _ = by_name.attend(module, q, k, v, sees[None, None] if masked else None, s_aux=learned)
        torch.testing.assert_close(got.detach(), want)
        assert got.requires_grad is graded


@pytest.mark.parametrize("family", ["T5", "Bart"])
def test_encoder_decoders_write_the_same_text(arch, family):
    """With a cache for their own tokens, and one for the encoder's, which is written once."""
    if VERSION < (5, 0):
        pytest.skip("caches of an encoder-decoder take no configuration")
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_layers": 2, "decoder_layers": 3}
    options = {
        "T5": {"d_kv": 8, "d_ff": 48, "num_layers": 3, "num_heads": 4},
        "Bart": {**heads, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "forced_eos_token_id": None},
    }[family]
    common = {"vocab_size": 97, "d_model": 32, "pad_token_id": 0, "eos_token_id": None, "decoder_start_token_id": 2}
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**common, **options)
    model = getattr(transformers, f"{family}ForConditionalGeneration")(config).eval()
    want = generate(model, None, prompts(11), 12)
    for name in (None, "tikv") if family == "Bart" else (None,):
        if name is not None:
            model.set_attn_implementation(name)
        cache = transformers.EncoderDecoderCache(TikvCache(model.config), TikvCache(model.config))
        got = generate(model, cache, prompts(11), 12)
        assert torch.equal(got.sequences, want.sequences)
        assert [layer.get_seq_length() for layer in cache.cross_attention_cache.layers] == [11] * 3


REFUSED = [
    "MambaConfig",
    "xLSTMConfig",
    "BambaConfig",
    *([] if VERSION >= (5, 19) else ["Lfm2Config", "FalconH1Config"]),
]


@pytest.mark.parametrize("name", REFUSED)
def test_models_with_another_state_are_refused_by_name(arch, name):
    """The reason is a layer of states that the cache has no class for, or a model that takes no cache like ours."""
    with pytest.raises(
        tikv.OptionError, match=r"state|linear_attention|conv|hybrid|takes no cache|cache of its own kind"
    ) as error:
        TikvCache(getattr(transformers, name)())
    assert name in str(error.value)


def test_tokens_like_those_before_skip_the_checks_and_others_do_not(arch, rng, monkeypatch):
    """Each step brings tokens like the last one's, at other addresses; now and then of another form or alignment."""
    checked = []
    append = GrowingLayer.append
    monkeypatch.setattr(GrowingLayer, "append", lambda *args, **more: (checked.append(1), append(*args, **more))[1])
    layer, past = layer_of(), []

    def step(k, v):
        keys, values = layer.update(k, v)
        past.append((k.clone(), v.clone()))
        for got, want in zip((keys, values), zip(*past, strict=True), strict=True):
            oracle.assert_same_bits(got.numpy(), torch.cat(want, dim=2).numpy())

    kept = [[a.clone() for a in rows(rng, 1, width=16)] for _ in range(8)]  # where torch aligns them
    for new in kept + kept:  # memory at a new address is asked about once, by a test that the third call makes
        step(*new)
    checked.clear()
    for new in kept:
        step(*new)
    assert not checked, "tokens like those before were checked again"
    turned = [a.transpose(1, 2).contiguous().transpose(1, 2) for a in rows(rng, 1, width=16)]
    apart = [torch.cat([a.flatten()[:1], a.flatten()])[1:].view(a.shape) for a in rows(rng, 1, width=16)]
    several = rows(rng, 3, width=16)
    for other in (turned, apart, several, kept[0], rows(rng, 1, width=16)):
        step(*other)
    with torch.inference_mode():
        step(*rows(rng, 1, width=16))
    step(*rows(rng, 1, width=16))
    assert layer.get_seq_length() == layer.store.length == 24 + 3 + 6
    with pytest.raises(tikv.ShapeError, match="overlap"):
        layer.update(layer.keys[:, :, :1], layer.values[:, :, :1])
    assert layer.get_seq_length() == 33


def test_tokens_like_those_before_still_meet_the_limits(arch, rng):
    layer, k, v = layer_of(limit=9), *rows(rng, 1)
    for _ in range(9):
        keys, _ = layer.update(k, v)
    with pytest.raises(tikv.CapacityError, match=r"9 cached \+ 1 new tokens exceed max_cache_len=9"):
        layer.update(k, v)
    assert layer.get_seq_length() == 9
    oracle.assert_same_bits(keys.numpy(), k.expand(-1, -1, 9, -1).numpy())
    layer.crop(-1)
    layer.update(k, v)


def test_tokens_like_those_before_still_need_the_runtime(arch, rng, monkeypatch):
    """As after ti.reset(), which takes the program from the engine's runtime."""
    layer, (k, v) = layer_of(), rows(rng, 1)
    for _ in range(4):
        layer.update(k, v)
    with monkeypatch.context() as ended:
        ended.setattr(layer.store.runtime, "front", types.SimpleNamespace(prog=None))
        with pytest.raises(tikv.StaleRuntimeError, match=r"^TikvCache\.update: this object was made in"):
            layer.update(k, v)
    keys, _ = layer.update(k, v)
    assert layer.get_seq_length() == 5
    oracle.assert_same_bits(keys.numpy(), k.expand(-1, -1, 5, -1).numpy())


def test_a_cache_goes_with_its_last_reference(arch, rng):
    layer, (k, v) = layer_of(), rows(rng, 1)
    for _ in range(5):
        layer.update(k, v)
    store = weakref.ref(layer.store)
    gc.disable()
    try:
        del layer
        assert store() is None
    finally:
        gc.enable()


def test_another_models_shapes_are_refused(arch, rng):
    layer, k, _ = filled(rng)
    for other in (rows(rng, 1, batch=2), rows(rng, 1, 3, heads=4), rows(rng, 1, 3, width=8)):
        with pytest.raises(tikv.ShapeError, match=r"holds 6 tokens of keys \(3, 2, 'n', 4\)") as error:
            layer.update(*other)
        assert str(tuple(other[0].shape)) in str(error.value)
    with pytest.raises(tikv.ShapeError, match=r"torch.float32 on cpu; the new ones .* torch.float16"):
        layer.update(*(a.half() for a in rows(rng, 1, 3)))
    with pytest.raises(tikv.ShapeError, match=r"must be \(batch, heads, tokens, head_dim\), not \(2, 1, 4\)"):
        layer.update(*(a[0] for a in rows(rng, 1, 3)))
    oracle.assert_same_bits(layer.keys.numpy(), k.numpy())
    layer.reset()
    keys, _ = layer.update(*(wide := rows(rng, 2, batch=1, heads=4, width=8)))
    oracle.assert_same_bits(keys.numpy(), wide[0].numpy())


def test_another_device_is_refused(arch, rng):
    layer, *_ = filled(rng)
    with pytest.raises(tikv.ArchError, match=r"on cpu.*on meta"):
        layer.update(*(a.to("meta") for a in rows(rng, 1, 3)))
    with pytest.raises(tikv.ArchError, match="the model is on meta"):
        layer_of().update(*(a.to("meta") for a in rows(rng, 1, 3)))


def test_too_many_tokens_are_refused_before_a_write(arch, model):
    if model.config.model_type == "mistral":
        return  # its layers all slide, and go on
    cache = TikvCache(model.config, max_cache_len=12)
    model(prompts(10)["input_ids"], **given(cache), use_cache=True)
    with pytest.raises(tikv.CapacityError, match=r"layer 0: 10 cached \+ 3 new tokens exceed max_cache_len=12"):
        model(prompts(3)["input_ids"], **given(cache), use_cache=True)
    assert [layer.get_seq_length() for layer in cache.layers if isinstance(layer, TikvLayer)] == [10] * sum(
        isinstance(layer, TikvLayer) for layer in cache.layers
    )


@pytest.mark.parametrize("attention", ["sdpa", "tikv"])
@pytest.mark.parametrize("options", [{}, {"max_cache_len": 40}], ids=str)
def test_another_text_is_refused_before_a_write(arch, options, attention):
    """In a cache that was not reset, where its length, mask or positions show it; a longer text may be going on."""
    model = build("gemma3")
    model.set_attn_implementation(attention)
    cache = TikvCache(model.config, **options)
    generate(model, cache, prompts(11), 4)
    before = [(layer.keys.clone(), layer.values.clone()) for layer in cache.layers]
    for length in (5, 10, 12, 14):
        for mask in (True, False):  # which new versions leave out where all of it is seen
            text = {k: a for k, a in prompts(length).items() if mask or k == "input_ids"}
            with pytest.raises((tikv.ShapeError, tikv.PositionError, IndexError), match=ANOTHER_TEXT):
                generate(model, cache, text, 4)
    with torch.no_grad():
        for length in (2, 20):
            ids, mask = prompts(length).values()
            with pytest.raises(tikv.ShapeError, match=f"{length} are new, but the attention mask covers only {length}"):
                model(ids, attention_mask=mask, **given(cache))
            if VERSION >= (5, 4):
                with pytest.raises(tikv.PositionError, match="holds 14 tokens, and the new ones begin at position 0"):
                    model(ids, position_ids=torch.arange(length)[None], **given(cache))
        assert cache.get_seq_length() == 14
        for layer, kept in zip(cache.layers, before, strict=True):
            assert all(map(torch.equal, (layer.keys, layer.values), kept))
        model(
            ids,
            position_ids=torch.arange(20)[None],
            attention_mask=torch.ones(1, 34, dtype=torch.int64),
            **given(cache),
        )
    assert cache.get_seq_length() == 34, "what says that it means it"


# The second is transformers' own, of old versions.
ANOTHER_TEXT = (
    "holds 14 tokens, and the text has no new ones|holds 14 tokens, and the new ones begin at|index -1 is out"
)


def test_a_model_with_more_layers_is_refused(arch):
    small, large = build("llama", num_hidden_layers=2), build("llama")
    with pytest.raises(tikv.ShapeError, match=r"has 2 layers, as many as its .* asks for layer 2"):
        generate(large, TikvCache(small.config), prompts(5), 2)


@pytest.mark.parametrize("max_cache_len", [0, -3, True, "12", 12.5])
def test_a_capacity_that_is_none_is_refused(arch, max_cache_len):
    with pytest.raises(tikv.OptionError, match="max_cache_len"):
        TikvCache(build("llama").config, max_cache_len=max_cache_len)


def test_help_shows_the_arguments():
    told = list(inspect.signature(TikvCache).parameters)
    assert told[:4] == ["config", "max_cache_len", "dtype", "window"]
    assert told == list(inspect.signature(TikvCache.__init__).parameters)[1:]


def test_a_repr_has_a_line_for_all_equal_layers(arch):
    config = build("gemma3", num_hidden_layers=26, layer_types=["sliding_attention"] * 25 + ["full_attention"]).config
    cache = TikvCache(config)
    assert repr(cache) == (
        "TikvCache(26 layers, 0 B\n  layers 0-24: TikvLayer(window 7, empty)\n  layer 25: TikvLayer(full, empty))"
    )
    states = torch.ones(1, 1, 9, 8)
    for layer in (0, 1, 2, 25):
        cache.update(states, states, layer)
    assert [line.split(":")[0] for line in repr(cache).splitlines()[1:]] == [
        "  layers 0-2",
        "  layers 3-24",
        "  layer 25",
    ]
    for layer in range(3, 12):  # each another length
        cache.update(*(states[:, :, :1].repeat(1, 1, layer, 1) for _ in "kv"), layer)
    lines = repr(cache).splitlines()
    assert len(lines) == 5
    assert lines[-1].endswith(": of other kinds or lengths)")


@pytest.mark.parametrize("form", [{}, {"max_cache_len": 40}, {"window": 8, "sinks": 2}, {"dtype": "int8"}])
@pytest.mark.parametrize("padded", [0, 3])
def test_a_cache_draws_the_positions_that_its_layers_hold(arch, form, padded, tmp_path):
    model = build("gemma3")
    cache = TikvCache(model.config, **form)
    assert re.findall(r">(\d+)<", cache.draw()) == []
    ids = torch.arange(1, 23).reshape(2, 11)
    mask = torch.ones_like(ids)
    mask[0, :padded] = 0
    with torch.no_grad():
        model(input_ids=ids, attention_mask=mask, use_cache=True, **given(cache))
        for _ in range(9):
            mask = torch.nn.functional.pad(mask, (0, 1), value=1)
            model(input_ids=ids[:, :1], attention_mask=mask, use_cache=True, **given(cache))
    svg = cache.draw(tmp_path / "cache.svg")
    assert (tmp_path / "cache.svg").read_text(encoding="utf-8") == svg == cache._repr_html_()
    held = {p for layer in cache.layers for p in np.atleast_2d(layer.slot_map.positions())[0].tolist() if p >= 0}
    assert {int(word) for word in re.findall(r">(\d+)<", svg)} == held
    assert max(held) == 19


def test_a_repr_of_an_alternation_is_short(arch):
    config = build("gemma3", num_hidden_layers=48, layer_types=["sliding_attention", "full_attention"] * 24).config
    lines = repr(TikvCache(config)).splitlines()
    assert lines[1] == "  24 layers from 0 to 46: TikvLayer(window 7, empty)"
    assert len(lines) == 3


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_a_text_that_may_not_fit_is_refused_before_the_first_token(name, arch):
    model, calls = build(name), []
    hook = model.register_forward_pre_hook(lambda *_: calls.append(1))
    cache = TikvCache(model.config, max_cache_len=14)
    said = (
        r"max_new_tokens=6 the text may have 15 tokens to cache, and max_cache_len=14\. Use max_cache_len >= 15, or 1"
    )
    with pytest.raises(tikv.CapacityError, match=said):
        generate(model, cache, prompts(10, 7), 6)
    assert (len(calls), cache.get_seq_length()) == (0, 0)
    text = generate(model, cache, prompts(10, 7), 5).sequences
    assert (len(calls), cache.get_seq_length()) == (5, 14)
    hook.remove()
    assert torch.equal(text, generate(model, DynamicCache(config=model.config), prompts(10, 7), 5).sequences)
    with pytest.raises(tikv.CapacityError, match="max_length=40"):
        model.generate(**prompts(10), **given(TikvCache(model.config, max_cache_len=14)), max_length=40)


def test_a_continued_text_counts_what_the_cache_holds(arch):
    model = build("llama")
    cache = TikvCache(model.config, max_cache_len=20)
    first = generate(model, cache, prompts(10), 5).sequences
    both = torch.cat([first, torch.tensor([[5, 6]])], 1)
    inputs = {"input_ids": both, "attention_mask": torch.ones_like(both)}
    with pytest.raises(tikv.CapacityError, match="may have 21 tokens"):
        generate(model, cache, inputs, 5)
    assert cache.get_seq_length() == 14
    assert generate(model, cache, inputs, 4).sequences.shape == (1, 21)
    assert cache.get_seq_length() == 20


def test_sliding_layers_alone_take_more_tokens_than_max_cache_len(arch):
    model = build("mistral")
    cache = TikvCache(model.config, max_cache_len=14)
    generate(model, cache, prompts(10), 20)
    assert cache.get_seq_length() == 29
    assert cache.token_limit is None


def test_growing_caches_and_transformers_own_are_not_asked(arch):
    model = build("llama")
    TikvCache(model.config, max_cache_len=4)
    for cache in (TikvCache(model.config), DynamicCache(config=model.config)):
        assert generate(model, cache, prompts(10), 6).sequences.shape == (1, 16)
