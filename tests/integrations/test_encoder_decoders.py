"""TikvCache in encoder-decoders: a layer's role is what the model does with it, and queries see the whole encoder."""

import copy

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from model_cache import generate, given  # noqa: E402
from transformers import EncoderDecoderCache  # noqa: E402

import tikv  # noqa: E402
from tikv.integrations.transformers import TikvCache  # noqa: E402
from tikv.integrations.transformers.versions.installed import VERSION  # noqa: E402

pytestmark = [
    pytest.mark.archs("cpu"),
    pytest.mark.filterwarnings("default"),
    pytest.mark.usefixtures("one_thread"),
]

COMMON = {"vocab_size": 61, "pad_token_id": 0, "eos_token_id": None, "decoder_start_token_id": 2}
T5 = {**COMMON, "d_model": 32, "d_kv": 8, "d_ff": 32, "num_heads": 4}
BART = {
    **COMMON,
    **{"d_model": 32, "encoder_attention_heads": 2, "decoder_attention_heads": 4, "encoder_ffn_dim": 32},
    **{"decoder_ffn_dim": 32, "bos_token_id": 2, "forced_eos_token_id": None},
}
SLIDING = {
    **{"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "head_dim": 8, "sliding_window": 4, "query_pre_attn_scalar": 8, "pad_token_id": 0},
    "layer_types": ["sliding_attention", "full_attention"],
}
MODELS = {
    "T5": ("T5", {**T5, "num_layers": 2}),
    "Bart": ("Bart", {**BART, "encoder_layers": 2, "decoder_layers": 2}),
    "T5Gemma": ("T5Gemma", {**COMMON, "encoder": SLIDING, "decoder": dict(SLIDING), "bos_token_id": 2}),
    "T5 of 2 and 4 layers": ("T5", {**T5, "num_layers": 2, "num_decoder_layers": 4}),
    "T5 of 3 and 1 layers": ("T5", {**T5, "num_layers": 3, "num_decoder_layers": 1}),
    "Bart of 1 and 3 layers": ("Bart", {**BART, "encoder_layers": 1, "decoder_layers": 3}),
}


def build(name):
    family, options = MODELS[name]
    if family == "T5Gemma" and VERSION < (5, 0):
        pytest.skip("its configuration does not say how many layers there are, to transformers' own cache either")
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**options)
    model = getattr(transformers, f"{family}ForConditionalGeneration")(config).eval()
    model.set_attn_implementation("eager")  # by "sdpa" transformers 5.18 leaves out the soft cap of T5Gemma
    for parameter in model.parameters():  # so that the encoder counts
        torch.nn.init.normal_(parameter, std=0.3)
    return model


def source(first=None):
    """Sentences of 11 tokens, of which one is padded at the right; `first`: another first token."""
    torch.manual_seed(1)
    ids = torch.randint(3, 61, (2, 11))
    ids[:, 0] = ids[:, 0] if first is None else first
    mask = torch.tensor([[1] * 11, [1] * 8 + [0] * 3])
    return {"input_ids": ids * mask, "attention_mask": mask}


CACHES = {
    "alone": TikvCache,
    "two": lambda config, **options: EncoderDecoderCache(TikvCache(config, **options), TikvCache(config, **options)),
}


def logits(model, cache, first=None, **options):
    return torch.stack(generate(model, cache, source(first), 9, min_new_tokens=9, **options).logits)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("kind", CACHES)
def test_generate_writes_what_it_writes_without_a_cache(arch, name, kind):
    model = build(name)
    want = logits(model, None, use_cache=False)
    assert (logits(model, None, first=5, use_cache=False) - want).abs().max() > 1e-3
    for attention in ("eager", "tikv"):
        model.set_attn_implementation(attention)
        torch.testing.assert_close(logits(model, CACHES[kind](model.config)), want, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["T5", "Bart", "T5Gemma"])
@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.parametrize("dtype", [None, "int8"])
def test_steps_of_the_model_itself_see_the_whole_encoder(arch, name, kind, dtype):
    """Also where the decoder slides, and after copies, other orders of beams and a reset."""
    model = build(name)
    torch.manual_seed(2)
    target = torch.randint(3, 61, (2, 9))

    def steps(cache, rows=slice(None)):
        given_ids = {"decoder_input_ids": target[rows], "use_cache": cache is not None}
        if cache is None:
            return model(encoder_outputs=encoded, attention_mask=mask, **given_ids).logits
        found = []
        for part in target[rows].split([3, 1, 1, 4], 1):
            options = {"encoder_outputs": encoded, "attention_mask": mask, **given(cache)}
            found.append(model(**options, decoder_input_ids=part, use_cache=True).logits)
        return torch.cat(found, 1)

    with torch.no_grad():
        mask = source()["attention_mask"]
        encoded = model.get_encoder()(**source())
        want = steps(None)
        cache = CACHES[kind](model.config, dtype=dtype)
        tolerance = {"rtol": 0, "atol": 1e-4 if dtype is None else 0.6}
        torch.testing.assert_close(steps(cache), want, **tolerance)
        assert [layer.get_seq_length() for layer in cache.cross_attention_cache.layers] == [11] * 2
        assert cache.get_seq_length() == 9
        assert all(layer.keys.shape[2] == 11 for layer in cache.cross_attention_cache.layers)
        other = copy.deepcopy(cache)
        assert all(layer.keys.shape[2] == 11 for layer in other.cross_attention_cache.layers)
        cache.reorder_cache(torch.tensor([1, 0]))
        next_ids = torch.tensor([[7], [8]])
        options = {"decoder_input_ids": next_ids, "use_cache": True}
        got = model(encoder_outputs=encoded, attention_mask=mask, **options, **given(other)).logits
        turned = model(
            encoder_outputs=encoded, attention_mask=mask.flip(0), **{**options, "decoder_input_ids": next_ids.flip(0)},
            **given(cache),
        ).logits  # fmt: skip
        torch.testing.assert_close(turned.flip(0), got, rtol=0, atol=1e-5)
        cache.reset()
        assert cache.get_seq_length() == cache.cross_attention_cache.get_seq_length() == 0
        torch.testing.assert_close(steps(cache), want, **tolerance)


@pytest.mark.parametrize("kind", CACHES)
def test_beams(arch, kind):
    model = build("T5Gemma")
    want = generate(model, None, source(), 6, num_beams=3).sequences
    assert torch.equal(generate(model, CACHES[kind](model.config), source(), 6, num_beams=3).sequences, want)


def test_a_window_for_the_decoder_leaves_the_encoder_whole(arch):
    """Given to both caches; the same as one that is given to the decoder's alone."""
    if VERSION < (5, 0):
        pytest.skip("Bart makes its masks by itself, of as many keys as there were tokens")
    model = build("Bart")
    config = model.config
    both = EncoderDecoderCache(TikvCache(config, window=5, sinks=1), TikvCache(config, window=5, sinks=1))
    for cache in (both, TikvCache(config, window=5, sinks=1)):
        want = logits(model, EncoderDecoderCache(TikvCache(config, window=5, sinks=1), TikvCache(config)))
        torch.testing.assert_close(logits(model, cache), want, rtol=0, atol=1e-5)
        assert cache.cross_attention_cache.layers[0].keys.shape[2] == 11


def test_a_cache_of_an_encoder_decoder_changes_its_batch_and_length(arch):
    config = build("Bart").config
    cache = TikvCache(config, dtype="int8")
    assert isinstance(cache, EncoderDecoderCache)
    assert cache.is_updated == {0: False, 1: False}
    torch.manual_seed(3)
    for part, tokens in ((cache.self_attention_cache, 3), (cache.cross_attention_cache, 7)):
        for layer in range(2):
            part.update(torch.randn(2, 4, tokens, 8), torch.randn(2, 4, tokens, 8), layer)
    assert cache.nbytes == sum(part.nbytes for part in (cache.self_attention_cache, cache.cross_attention_cache))
    before = cache.cross_attention_cache.layers[1].keys.clone()
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([3, 0]))
    cache.crop(-1)
    assert torch.equal(cache.cross_attention_cache.layers[1].keys, before[[1, 0]])
    assert cache.get_seq_length() == 2
    assert cache.layers is cache.self_attention_cache.layers


def test_a_decoder_alone_has_an_ordinary_cache(arch):
    for config in (
        transformers.BartConfig(**BART, is_decoder=True, is_encoder_decoder=False),
        transformers.GPT2Config(),
    ):
        assert type(TikvCache(config)) is TikvCache
        assert not isinstance(TikvCache(config), EncoderDecoderCache)


def test_a_cache_is_made_by_the_names_of_transformers_own(arch):
    """As generate of T5Gemma does from the class of a cache, for an encoder's tokens."""
    config = transformers.LlamaConfig(num_hidden_layers=2)
    assert len(TikvCache(config=config, offloading=False, offload_only_non_sliding=True).layers) == 2
    with pytest.raises(tikv.OptionError, match=r"offloading=True is not an option here\. Use place='host'"):
        TikvCache(config=config, offloading=True)


def test_what_t5gemma_makes_anew_keeps_the_storage(arch):
    """It replaces the cache of the encoder's tokens by one of the same class without options."""
    model = build("T5Gemma")
    cache = TikvCache(model.config, dtype="int8")
    logits(model, cache)
    stores = [layer.store for part in (cache, cache.cross_attention_cache) for layer in part.layers]
    assert {str(store.dtype) for store in stores} == {"int8"}


class Counting(TikvCache):
    """A user's own kind of cache."""

    calls = 0

    def update(self, *args, **options):
        type(self).calls += 1
        return super().update(*args, **options)


def test_a_subclass_serves_an_encoder_decoder_too(arch):
    model = build("Bart")
    cache = Counting(model.config)
    assert isinstance(cache, Counting)
    assert type(cache.cross_attention_cache) is Counting
    want = logits(model, None, use_cache=False)
    torch.testing.assert_close(logits(model, cache), want, rtol=0, atol=1e-5)
    assert Counting.calls == 2 * 9 + 2
