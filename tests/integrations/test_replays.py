"""A model reads a text over a `TikvCache` of which nothing is kept, and weighs the tokens that are held."""

import copy

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from model_cache import FORMATS, build, given  # noqa: E402

import tikv  # noqa: E402
from tikv.integrations.transformers import TikvCache  # noqa: E402
from tikv.integrations.transformers.versions.installed import VERSION  # noqa: E402

pytestmark = [pytest.mark.archs("cpu"), pytest.mark.usefixtures("one_thread")]
if VERSION < (4, 56):
    pytest.skip("families of newer versions of transformers", allow_module_level=True)
GROUPS = tikv.Quant(bits=4, group=32, axis="tokens", residual=32)


def tokens(rows, count, seed=0):
    return torch.randint(2, 97, (rows, count), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def read(model, cache, ids):
    return model(ids, **given(cache)).logits


def bits(cache):
    return [layer.store.to_host() for layer in cache.layers_with_keys]


def made(family, attention, rows=2, prompt=11, head_dim=8, **options):
    model = build("cpu", family, head_dim=head_dim)
    model.set_attn_implementation(attention)
    cache = TikvCache(model.config, **options)
    read(model, cache, tokens(rows, prompt))
    return model, cache


def assert_unchanged(model, cache, before):
    for now, then in zip(bits(cache), bits(before), strict=True):
        for name, a in now.items():
            assert a.tobytes() == then[name].tobytes(), name
    after = [read(model, c, tokens(2, 3, seed=9)) for c in (cache, before)]
    assert torch.equal(*after)


@pytest.mark.parametrize("attention", ["tikv", "eager"])
@pytest.mark.parametrize("family", ["Llama", "Mistral", "Gemma2", "GptOss", "Gemma3n"])
def test_a_text_sees_what_is_held_and_itself(family, attention):
    model, cache = made(family, attention)
    for count in (5, 1, 9):
        before = copy.deepcopy(cache)
        with cache.replay():
            seen = [read(model, cache, tokens(2, count, seed=1)) for _ in range(2)]
        assert torch.equal(*seen)
        want = read(model, copy.deepcopy(before), tokens(2, count, seed=1))
        torch.testing.assert_close(seen[0], want, atol=2e-5, rtol=1e-4)
        assert_unchanged(model, cache, before)


@pytest.mark.parametrize("options", [*FORMATS, {"dtype": GROUPS}, {"max_cache_len": 24}], ids=str)
def test_formats_and_fixed_memory(options):
    """New rows are read as they came; so only the rounding of their own rows differs from a text that is kept."""
    model, cache = made("Gemma2", "tikv", head_dim=32, **options)
    before = copy.deepcopy(cache)
    with cache.replay():
        seen = read(model, cache, tokens(2, 20, seed=1))
        one = read(model, cache, tokens(2, 20, seed=1)[:, :1])
    if "dtype" not in options:
        want = read(model, TikvCache(model.config), torch.cat((tokens(2, 11), tokens(2, 20, seed=1)), 1))[:, 11:]
        torch.testing.assert_close(seen, want, atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(one, seen[:, :1], atol=2e-5, rtol=1e-4)
    assert_unchanged(model, cache, before)


def weights_of(model, cache, ids, layer):
    """(batch, KV heads, group, T, held) of attention by the definition."""
    held, kept = cache.get_seq_length(), copy.deepcopy(cache)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        weights = model(ids, output_attentions=True, **given(kept)).attentions[layer]
    model.set_attn_implementation("tikv")
    return weights[..., :held].unflatten(1, (model.config.num_key_value_heads, -1))


@pytest.mark.parametrize("family", ["Llama", "Gemma2", "GptOss"])
@pytest.mark.parametrize("kind", ["sum", "max", "last", True])
def test_mass(family, kind):
    """Over several texts it accumulates."""
    model, cache = made(family, "tikv")
    with cache.replay(return_mass=kind) as replay:
        for seed, count in ((1, 6), (2, 1), (3, 8)):
            read(model, cache, tokens(2, count, seed=seed))
    for layer in range(2):
        if model.config.layer_types[layer] != "full_attention" if hasattr(model.config, "layer_types") else False:
            assert replay.mass[layer] is None
            continue
        parts = [weights_of(model, cache, tokens(2, n, seed=seed), layer) for seed, n in ((1, 6), (2, 1), (3, 8))]
        if kind == "max":
            want = torch.stack([w.amax((2, 3)) for w in parts]).amax(0)
        elif kind == "last":
            want = parts[-1][..., -1, :].sum(2)
        else:
            want = torch.stack([w.sum((2, 3)) for w in parts]).sum(0)
        torch.testing.assert_close(replay.mass[layer], want, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("options", [{"dtype": "int8"}, {"dtype": GROUPS}], ids=str)
def test_mass_of_codes_and_a_compaction(options):
    """KVzip over a model's cache: what the context's own repetition needs is kept."""
    model, cache = made("Llama", "tikv", prompt=40, head_dim=32, **options)
    with cache.replay(return_mass="max") as replay:
        read(model, cache, tokens(2, 40))
    for layer, mass in zip(cache.layers, replay.mass, strict=True):
        assert mass.shape == (2, 2, 40)
        assert ((mass > 0) & (mass <= 1)).all()
        layer.compact(mass.topk(34).indices.sort().values.int())
    assert cache.layers[0].keys.shape[2] == 34
    assert cache.get_seq_length() == 40


def test_nothing_is_held_yet():
    model = build("cpu", "Llama")
    cache = TikvCache(model.config)
    with cache.replay(return_mass=True) as replay:
        seen = read(model, cache, tokens(2, 5))
    torch.testing.assert_close(seen, read(model, TikvCache(model.config), tokens(2, 5)))
    assert replay.mass == [None, None]
    assert cache.get_seq_length() == 0


def test_refused():
    model, cache = made("Llama", "tikv")
    error = tikv.OptionError
    with pytest.raises(error, match="already in a replay"), cache.replay(), cache.replay():
        pass
    with cache.replay():  # the one before has ended
        with pytest.raises(error, match="generate"):
            model.generate(tokens(2, 12), max_new_tokens=2, **given(cache))
        with pytest.raises(tikv.ShapeError, match="the cache holds 11 tokens"):
            read(model, cache, tokens(3, 4))
    with pytest.raises(error, match="Use one of 'sum', 'max', 'last'"):
        cache.replay(return_mass="mean")
    padding = torch.ones(2, 15, dtype=torch.long)
    padding[0, :3] = 0
    with pytest.raises(error, match="without padding"), cache.replay(return_mass=True), torch.no_grad():
        model(tokens(2, 4), attention_mask=padding, **given(cache))
    with pytest.raises(error, match="without padding"), cache.replay(return_mass=True):
        model(tokens(2, 4), **given(cache))  # gradients are followed
    with cache.replay() as replay:
        loss = model(tokens(2, 4), **given(cache)).logits.sum()
    with pytest.raises(error, match="gradients do not flow"):
        loss.backward()
    assert replay.mass == [None, None]
    with cache.replay(return_mass=True):
        read(model, cache, tokens(2, 4))
        cache.crop(-3)
        with pytest.raises(error, match="holds 8 tokens, and the mass is that of 11"):
            read(model, cache, tokens(2, 4))
    with pytest.raises(tikv.CopyError), cache.replay():
        copy.deepcopy(cache)
    model.set_attn_implementation("sdpa")
    with pytest.raises(error, match="attention"), cache.replay(return_mass=True):
        pass
    model.set_attn_implementation("tikv")
    for options, why in (({"window": 8}, "StreamingLayer keeps"), ({"grad": True}, "gradients would not flow")):
        with pytest.raises(error, match=why), TikvCache(model.config, **options).replay():
            pass
    assert cache.get_seq_length() == 8


def test_a_half_step_is_refused():
    cache = made("Llama", "tikv")[1]
    cache.layers[0].update(*torch.ones(2, 2, 2, 1, 8))
    with pytest.raises(tikv.PositionError, match="align"):
        cache.replay()
