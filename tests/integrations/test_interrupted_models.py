"""Ctrl-C between two layers of a model: the cache is refused until `align` has brought all layers to one length."""

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from model_cache import BASE, given  # noqa: E402

import tikv  # noqa: E402
from tikv.integrations.transformers import TikvCache  # noqa: E402
from tikv.integrations.transformers.versions.installed import VERSION  # noqa: E402

pytestmark = [
    pytest.mark.archs("cpu"),
    pytest.mark.filterwarnings("default"),
    pytest.mark.usefixtures("one_thread"),
]

HYBRID = {"sliding_window": 7, "layer_types": ["sliding_attention", "full_attention"] * 2}
FAMILIES = {
    "Llama": {},
    "Mistral": {"sliding_window": 7},
    "Gemma3": {**HYBRID, "query_pre_attn_scalar": 8, "config": "Gemma3TextConfig"},
    "GptOss": {**HYBRID, "num_local_experts": 2, "num_experts_per_tok": 1},
}
OPTIONS = [{}, {"max_cache_len": 60}, {"window": 8, "sinks": 3}, {"dtype": "int8"}]


def build(family):
    options = {**BASE, "initializer_range": 0.3, **FAMILIES[family]}
    config = getattr(transformers, options.pop("config", f"{family}Config"))(**options)
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    model.set_attn_implementation("tikv")
    return model


def stop_at(model, layer, call):
    """Make a call during which Ctrl-C comes before a layer."""

    def stop(*_):
        raise KeyboardInterrupt

    handle = model.model.layers[layer].register_forward_pre_hook(stop)
    try:
        with pytest.raises(KeyboardInterrupt):
            call()
    finally:
        handle.remove()


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("layer", [1, 3])
def test_a_cache_is_refused_until_it_is_aligned(arch, family, options, layer):
    if "window" in options and family == "Mistral":
        pytest.skip("no layer of it attends in full")
    model, ids = build(family), torch.randint(1, 97, (1, 40), generator=torch.Generator().manual_seed(0))
    cache, other = (TikvCache(model.config, **options) for _ in range(2))

    def step(cache, first, end):
        return model(ids[:, first:end], **given(cache)).logits[:, -1]

    for end, tokens in ((20, 20), (21, 1), (22, 1), (25, 3)):
        stop_at(model, layer, lambda end=end, tokens=tokens: step(cache, end - tokens, end))
        before = [layer.get_seq_length() for layer in cache.layers]
        assert len(set(before)) == 2
        with pytest.raises(tikv.PositionError, match=rf"the layers hold {end}, .*Call align\(\)"):
            step(cache, end - tokens, end)
        assert [layer.get_seq_length() for layer in cache.layers] == before
        assert cache.align() == end - tokens == cache.align()
        torch.testing.assert_close(step(cache, end - tokens, end), step(other, end - tokens, end), rtol=0, atol=1e-5)


@torch.no_grad()
def test_layers_without_a_mask_are_refused_too(arch):
    """By `update` of the first layer, since nothing has asked for a mask."""
    cache, rows = TikvCache(build("Llama").config), torch.ones(1, 2, 3, 8)
    cache.update(rows, rows, 0)
    cache.update(rows, rows, 1)
    with pytest.raises(tikv.PositionError, match="the layers hold 3, 3, 0, 0 tokens"):
        cache.update(rows, rows, 0)
    assert [layer.get_seq_length() for layer in cache.layers] == [3, 3, 0, 0]
    cache.update(rows, rows, 2)  # the step goes on
    cache.update(rows, rows, 3)
    cache.update(rows, rows, 0)


@torch.no_grad()
def test_a_ring_that_cannot_go_back_changes_nothing(arch):
    """A prompt that only some layers have, which keep no more than their window of it."""
    model = build("Gemma3")
    cache, rows = TikvCache(model.config), torch.ones(1, 2, 300, 8)
    for i in range(4):
        cache.update(rows[:, :, :100], rows[:, :, :100], i)
    for i in range(2):
        cache.update(rows, rows, i)
    cache.layers[0].let_go_of_prompt()
    with pytest.raises(tikv.PositionError, match="layer 0: cannot go back from 400 to 100 tokens"):
        cache.align()
    assert [layer.get_seq_length() for layer in cache.layers] == [400, 400, 100, 100]
    cache.reset()
    assert cache.align() == 0


@torch.no_grad()
@pytest.mark.parametrize("layer", [1, 2, 3])
def test_a_state_cannot_go_back(arch, layer):
    """Wherever the step was interrupted: between states, or between a state and keys."""
    if VERSION < (5, 19):
        pytest.skip("this transformers has no such cache")
    config = transformers.Lfm2Config(**BASE, layer_types=["conv", "full_attention"] * 2, conv_L_cache=3)
    torch.manual_seed(0)
    model = transformers.Lfm2ForCausalLM(config).eval()
    ids, cache = torch.randint(1, 97, (1, 20)), TikvCache(config)
    model(ids[:, :10], **given(cache))
    stop_at(model, layer, lambda: model(ids[:, 10:11], **given(cache)))
    used = r"a step was interrupted after it had used layers? 0.* of 4\..*restore\(\) of a snapshot.*reset\(\)"
    with pytest.raises(tikv.PositionError, match=f"{used}|the layers hold 11, 10 tokens"):
        model(ids[:, 10:11], **given(cache))
    with pytest.raises(tikv.PositionError, match=used):
        cache.align()
    cache.reset()
    got = model(ids[:, :12], **given(cache)).logits
    torch.testing.assert_close(got, model(ids[:, :12], use_cache=False).logits, rtol=0, atol=1e-5)
