"""Layers with a state, alone or beside keys and values, and what is refused when a cache is made."""

import copy

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

import tiny_models  # noqa: E402
from model_cache import given  # noqa: E402
from transformers import DynamicCache  # noqa: E402

import tikv  # noqa: E402
from tikv.integrations.transformers import TikvCache, TikvLayer  # noqa: E402
from tikv.integrations.transformers.versions.installed import VERSION  # noqa: E402

pytestmark = [
    pytest.mark.archs("cpu"),
    pytest.mark.filterwarnings("default"),
    pytest.mark.usefixtures("one_thread"),
]
with_states = pytest.mark.skipif(VERSION < (5, 19), reason="layers with a state came with transformers 5.19")

BESIDE = {"falcon_h1": "FalconH1ForCausalLM", "zaya": "ZayaForCausalLM", "inkling": "InklingForCausalLM"}
INDEXED = {"deepseek_v32": "DeepseekV32ForCausalLM", "glm5_next": "Glm5NextForConditionalGeneration"}
ALONE = {"qwen3_next": "Qwen3NextForCausalLM", "lfm2_moe": "Lfm2MoeForCausalLM", "zamba2": "Zamba2ForCausalLM"}
OUTSIDE = {"recurrent_gemma": "RecurrentGemmaForCausalLM"}


def model_of(family):
    if family not in tiny_models.folders():
        pytest.skip(f"transformers {transformers.__version__} has no {family}")
    name = {**BESIDE, **ALONE, **INDEXED, **OUTSIDE}[family]
    return tiny_models.tiny_model(next(cls for cls in tiny_models.generators(family) if cls.__name__ == name))


def ids(rows, tokens):
    torch.manual_seed(1)
    return torch.randint(tiny_models.ORDINARY.start, tiny_models.ORDINARY.stop, (rows, tokens))


@torch.no_grad()
def last_logits(model, tokens, cache):
    return model(tokens, **given(cache), use_cache=True).logits[:, -1]


@with_states
@pytest.mark.parametrize("family", [*BESIDE, *ALONE, *INDEXED])
def test_text_and_logits_are_those_of_transformers_own_cache(family, arch):
    model = model_of(family)
    options = {"do_sample": False, "max_new_tokens": 12, "eos_token_id": None, "pad_token_id": 0}
    options |= {"return_dict_in_generate": True, "output_logits": True}
    want = model.generate(ids(2, 9), **given(DynamicCache(config=model.config)), **options)
    got = model.generate(ids(2, 9), **given(TikvCache(model.config)), **options)
    assert torch.equal(got.sequences, want.sequences)
    for a, b in zip(got.logits, want.logits, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-5 * float(b.std()))


@with_states
@pytest.mark.parametrize("family", BESIDE)
def test_keys_beside_a_state_lie_in_memory_of_ours(family, arch):
    model = model_of(family)
    cache = TikvCache(model.config)
    last_logits(model, ids(2, 9), cache)
    for layer in cache.layers:
        assert isinstance(layer, TikvLayer)
        assert layer.get_seq_length() == 9 == layer.store.length
        assert any(layer.has_previous_state.values())
    assert cache.nbytes > 0
    assert cache.get_seq_length() == 9
    assert not any(cache.is_linear)


@with_states
@pytest.mark.parametrize("family", ["falcon_h1", "deepseek_v32"])
def test_a_copy_of_keys_and_states_goes_on_alone(family, arch):
    model = model_of(family)
    cache, want = TikvCache(model.config), DynamicCache(config=model.config)
    tokens = ids(2, 12)
    for one in (cache, want):
        last_logits(model, tokens[:, :9], one)
    twin = copy.deepcopy(cache)
    last_logits(model, tokens[:, :3], cache)  # changes what it holds
    cache.reset()
    for i in range(9, 12):
        a, b = (last_logits(model, tokens[:, i : i + 1], one) for one in (twin, want))
        torch.testing.assert_close(a, b, rtol=0, atol=1e-5 * float(b.std()))


@with_states
@pytest.mark.parametrize("family", ["falcon_h1", "qwen3_next", *INDEXED])
def test_sequences_are_repeated_and_chosen_with_their_states(family, arch):
    model = model_of(family)
    tokens = ids(2, 9)
    cache = TikvCache(model.config)
    last_logits(model, tokens[:, :8], cache)
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([3, 0, 2]))
    chosen = tokens[[1, 0, 1]]
    want = DynamicCache(config=model.config)
    last_logits(model, chosen[:, :8], want)
    a, b = (last_logits(model, chosen[:, 8:], one) for one in (cache, want))
    torch.testing.assert_close(a, b, rtol=0, atol=1e-5 * float(b.std()))


@with_states
def test_streamed_layers_have_their_states_too(arch):
    model = model_of("falcon_h1")
    tokens = ids(1, 9)
    caches = TikvCache(model.config, window=32), TikvCache(model.config)
    for one in caches:
        last_logits(model, tokens[:, :6], one)
    for i in range(6, 9):
        a, b = (last_logits(model, tokens[:, i : i + 1], one) for one in caches)
        torch.testing.assert_close(a, b, rtol=0, atol=1e-5 * float(b.std()))
    assert [layer.window for layer in caches[0].layers] == [32] * len(caches[0].layers)
    assert caches[0].get_seq_length() == 9


@with_states
def test_a_window_is_not_for_layers_with_an_indexer(arch):
    with pytest.raises(tikv.OptionError, match="window=8 does not work here: layer 0 chooses its keys with an indexer"):
        TikvCache(model_of("deepseek_v32").config, window=8)


@with_states
def test_keys_of_an_indexer_are_taken_back_and_reordered_with_the_others(arch, tmp_path):
    model = model_of("deepseek_v32")
    tokens = ids(2, 12)
    cache, want = TikvCache(model.config), DynamicCache(config=model.config)
    last_logits(model, tokens[:, :9], cache)
    last_logits(model, tokens[:, :3], cache)
    cache.crop(-3)
    cache.reorder_cache(torch.tensor([1, 1]))
    assert cache.layers[0].indexer_keys.shape[:2] == (2, 9)
    last_logits(model, tokens[[1, 1], :9], want)
    a, b = (last_logits(model, tokens[:, 9:], one) for one in (cache, want))
    torch.testing.assert_close(a, b, rtol=0, atol=1e-5 * float(b.std()))
    with pytest.raises(tikv.OptionError, match="layer 0 keeps keys of an indexer, which cannot be saved"):
        cache.save(tmp_path / "cache.safetensors")
    cache.reset()
    assert cache.layers[0].indexer_keys is None


def lengths(cache):
    return [layer.get_seq_length() for layer in cache.layers if isinstance(layer, TikvLayer)]


@with_states
def test_what_is_kept_of_a_convolution_is_taken_back(arch):
    """lfm2: its layers without attention remember tokens, not a sum of them."""
    model = model_of("lfm2_moe")
    tokens = ids(2, 12)
    cache = TikvCache(model.config)
    last_logits(model, tokens[:, :9], cache)
    with pytest.raises(
        tikv.PositionError,
        match=r"crop\(-1\) is not possible: the layer keeps the states of the last 0 tokens. Call activate",
    ):
        cache.crop(-1)
    assert lengths(cache) == [9]
    cache.activate_past_recording()
    last_logits(model, tokens[:, :3], cache)
    with pytest.raises(
        tikv.PositionError, match=r"crop\(-4\) is not possible: the layer keeps the states of the last 3 tokens"
    ):
        cache.crop(-4)
    assert lengths(cache) == [12]
    cache.crop(-3)
    want = DynamicCache(config=model.config)
    last_logits(model, tokens[:, :9], want)
    a, b = (last_logits(model, tokens[:, 9:], one) for one in (cache, want))
    torch.testing.assert_close(a, b, rtol=0, atol=1e-5 * float(b.std()))


@with_states
def test_a_convolution_of_few_tokens_is_taken_back_to_the_first(arch):
    model = model_of("lfm2_moe")
    tokens = ids(1, 6)
    cache = TikvCache(model.config)
    cache.activate_past_recording()
    last_logits(model, tokens[:, :2], cache)
    last_logits(model, tokens[:, 3:], cache)
    cache.crop(-4)
    want = DynamicCache(config=model.config)
    last_logits(model, tokens[:, :1], want)
    a, b = (last_logits(model, tokens[:, 1:2], one) for one in (cache, want))
    torch.testing.assert_close(a, b, rtol=0, atol=1e-5 * float(b.std()))


@with_states
@pytest.mark.parametrize("family", ["falcon_h1", "qwen3_next"])
def test_a_state_of_all_tokens_is_not_taken_back(family, arch):
    model = model_of(family)
    cache = TikvCache(model.config)
    cache.activate_past_recording()
    last_logits(model, ids(2, 9), cache)
    before = lengths(cache)
    assert not cache.is_croppable
    with pytest.raises(tikv.PositionError, match=r"layer 0: crop\(-2\) is not possible: the state sums up all tokens"):
        cache.crop(-2)
    assert lengths(cache) == before
    cache.crop(0)
    assert lengths(cache) == before


@with_states
@pytest.mark.parametrize("family", ["falcon_h1", "qwen3_next"])
def test_beams_go_on_with_their_states(family, arch):
    model = model_of(family)
    tokens = ids(3, 9)
    cache, want = TikvCache(model.config), DynamicCache(config=model.config)
    last_logits(model, tokens[:, :8], cache)
    cache.reorder_cache(torch.tensor([2, 2, 0]))
    chosen = tokens[[2, 2, 0]]
    last_logits(model, chosen[:, :8], want)
    a, b = (last_logits(model, chosen[:, 8:], one) for one in (cache, want))
    torch.testing.assert_close(a, b, rtol=0, atol=1e-5 * float(b.std()))


@with_states
@pytest.mark.parametrize("family", ["falcon_h1", "qwen3_next", "lfm2_moe"])
@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda cache: cache.reorder_cache(torch.tensor([0])), tikv.ShapeError),
        (lambda cache: cache.reorder_cache(torch.tensor([0, 1, 1])), tikv.ShapeError),
        (lambda cache: cache.reorder_cache(torch.tensor([0, 5])), tikv.PositionError),
        (lambda cache: cache.reorder_cache(torch.tensor([-1, 0])), tikv.PositionError),
        (lambda cache: cache.batch_select_indices(torch.tensor([0, 5])), tikv.PositionError),
        (lambda cache: cache.batch_select_indices(torch.tensor([True])), tikv.ShapeError),
    ],
)
def test_refused_sequences_leave_keys_and_states_as_they_were(family, call, error, arch):
    """States were parted from keys: those had already followed an index that the keys refused."""
    model = model_of(family)
    tokens = ids(2, 9)
    cache, want = TikvCache(model.config), DynamicCache(config=model.config)
    for one in (cache, want):
        last_logits(model, tokens[:, :8], one)
    with pytest.raises(error):
        call(cache)
    a, b = (last_logits(model, tokens[:, 8:], one) for one in (cache, want))
    torch.testing.assert_close(a, b, rtol=0, atol=1e-5 * float(b.std()))


@with_states
@pytest.mark.parametrize("family", ["lfm2_moe", "falcon_h1"])
def test_assisted_decoding_keeps_states_or_is_refused(family, arch):
    """A state that remembers tokens goes back with the keys; of one that sums them transformers itself says no."""
    model = model_of(family)
    prompt = torch.cat([ids(1, 6)] * 3, 1)
    options = {"do_sample": False, "max_new_tokens": 12, "eos_token_id": None, "pad_token_id": 0}
    cache = TikvCache(model.config)
    if model._is_stateful:
        with pytest.raises(ValueError, match="not supported with stateful models"):
            model.generate(prompt, **given(cache), **options, prompt_lookup_num_tokens=3)
        assert cache.get_seq_length() == 0
        return
    want = model.generate(prompt, **given(DynamicCache(config=model.config)), **options)
    got = model.generate(prompt, **given(cache), **options, prompt_lookup_num_tokens=3)
    assert torch.equal(got, want)


@with_states
def test_a_state_in_the_models_own_modules_follows_no_change_of_the_cache(arch, tmp_path):
    """RecurrentGemma's: the keys were cropped, repeated and reordered, and the state was still that of before."""
    model = model_of("recurrent_gemma")
    cache, tokens = TikvCache(model.config), ids(2, 9)
    copy.deepcopy(cache).crop(-1)  # before the first token there is nothing to follow
    last_logits(model, tokens[:, :8], cache)
    before = [(len(layer.keys), layer.get_seq_length()) for layer in cache.layers if isinstance(layer, TikvLayer)]
    for call in (
        lambda: cache.crop(-3),
        lambda: cache.batch_repeat_interleave(2),
        lambda: cache.batch_select_indices(torch.tensor([1])),
        lambda: cache.reorder_cache(torch.tensor([1, 1])),
        lambda: copy.deepcopy(cache),
        lambda: cache.save(tmp_path / "cache.safetensors"),
        cache.snapshot,
    ):
        with pytest.raises(tikv.OptionError, match="the state of layer 0 is not in the cache but in the model's own"):
            call()
    cache.crop(0)
    after = [(len(layer.keys), layer.get_seq_length()) for layer in cache.layers if isinstance(layer, TikvLayer)]
    assert before == after
    got = last_logits(model, tokens[:, 8:], cache)
    want = model(tokens, use_cache=False).logits[:, -1].detach()  # which makes the model forget its state
    torch.testing.assert_close(got, want, rtol=0, atol=1e-3 * float(want.std()))
    cache.reset()
    assert torch.equal(
        last_logits(model, tokens[:, :8], cache), last_logits(model, tokens[:, :8], TikvCache(model.config))
    )


# Each family whose layers keep states, or share the keys of others.
WITHOUT_KEYS = (
    "bailing_hybrid", "bamba", "falcon_h1", "gemma3n", "gemma4", "granitemoehybrid", "inkling", "jamba", "kimi_linear",
    "lara_mini", "lfm2", "lfm2_moe", "nemotron_h", "olmo_hybrid", "qwen3_5", "qwen3_5_moe", "qwen3_next",
    "qwen4_exp", "recurrent_gemma", "zamba", "zamba2", "zaya",
)  # fmt: skip


@with_states
@pytest.mark.parametrize("family", WITHOUT_KEYS)
def test_layers_without_keys_are_warmed_up_too(family, arch):
    """In each family whose layers keep states, or share the keys of others; only layers with keys have kernels."""
    if family not in tiny_models.folders():
        pytest.skip(f"transformers {transformers.__version__} has no {family}")
    cache = TikvCache(tiny_models.tiny_model(tiny_models.generators(family)[0]).config)
    tikv.warmup(cache, tokens=(5, 1), quiet=True)
    assert (cache.get_seq_length(), cache.nbytes) == (0, 0)
    assert tikv.warmup(cache, tokens=(5, 1), quiet=True) == []


@with_states
@pytest.mark.parametrize("family", WITHOUT_KEYS)
def test_states_arrive_in_the_cache_unless_the_model_is_known_to_keep_them(family, arch):
    """What decides whether a state can follow: it holds for each family, so that none is refused for nothing."""
    if family not in tiny_models.folders():
        pytest.skip(f"transformers {transformers.__version__} has no {family}")
    model = tiny_models.tiny_model(tiny_models.generators(family)[0])
    cache = TikvCache(model.config)
    last_logits(model, ids(1, 5), cache)
    states = [layer for layer in cache.layers if hasattr(layer, "refuse_state_outside")]
    outside = [layer for layer in states if layer._sequences() is None]
    assert outside == (states if family == "recurrent_gemma" else [])
    assert states or family in ("gemma3n", "gemma4")


REFUSED = {
    "MambaConfig": "no layer of MambaConfig has attention",
    "RwkvConfig": "RwkvForCausalLM has a cache of its own kind, and its configuration is RwkvConfig",
    "XLNetConfig": "XLNetLMHeadModel has a cache of its own kind",
    "MiniMaxConfig": "MiniMaxForCausalLM has a cache of its own kind",
    "OpenAIGPTConfig": "OpenAIGPTLMHeadModel takes no cache, and its configuration is OpenAIGPTConfig. "
    "Use the model without cache=",
    "DeepseekV4Config": "layer 0 of DeepseekV4Config is of type 'heavily_compressed_attention', which keeps keys",
    "BltConfig": "BltConfig does not say what its layers are: .*num_hidden_layers",
}


@with_states
@pytest.mark.parametrize("name", REFUSED)
def test_models_that_cannot_be_served_say_so_when_the_cache_is_made(name):
    if not hasattr(transformers, name):
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    with pytest.raises(tikv.OptionError, match=REFUSED[name]):
        TikvCache(getattr(transformers, name)())


def test_an_encoder_that_convolves_is_no_state(arch):
    """SpeechT5 has a field `conv_kernel`, as Mamba has: that of its encoder."""
    assert len(TikvCache(transformers.SpeechT5Config()).layers) == transformers.SpeechT5Config().decoder_layers


@pytest.mark.parametrize("window", [None, 4])
def test_rows_in_pieces_are_stored_as_any(arch, window):
    """Inkling's keys come from a convolution over time, with tokens side by side."""
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, head_dim=8
    )
    cache = TikvCache(config, window=window)
    torch.manual_seed(0)
    k, v = (torch.randn(2, 2, 8, 5) for _ in range(2))
    cache.update(k[..., :3].transpose(2, 3), v[..., :3].transpose(2, 3), 0)
    for i in (3, 4):
        keys, values = cache.update(k[..., i : i + 1].transpose(2, 3), v[..., i : i + 1].transpose(2, 3), 0)
    seen = slice(1, 5) if window else slice(0, 5)
    for got, want in ((keys, k), (values, v)):
        order = got.sum(-1).argsort(-1), want[..., seen].sum(2).argsort(-1)  # a streamed layer is in no order
        assert torch.equal(
            *(a.gather(2, o[..., None].expand_as(a)) for a, o in zip((got, want[..., seen].mT), order, strict=True))
        )
