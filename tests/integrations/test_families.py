"""TikvCache in tiny random models of transformers' families: a dozen of them."""

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

import family_settings as settings  # noqa: E402
import family_verdicts as verdicts  # noqa: E402
import tiny_models  # noqa: E402

from tikv.integrations import _transformers_shim as shim  # noqa: E402
from tikv.integrations.transformers import TikvCache  # noqa: E402

pytestmark = [
    pytest.mark.archs("cpu"),
    pytest.mark.filterwarnings("default"),
    pytest.mark.usefixtures("one_thread"),
]

# Full, sliding and chunked layers, shared ones, states beside keys, latent keys, encoders, learned sinks, image models.
DOZEN = {
    "llama": "LlamaForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
    "gemma3n": "Gemma3nForCausalLM",
    "llama4": "Llama4ForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "gpt2": "GPT2LMHeadModel",
    "bloom": "BloomForCausalLM",
    "bart": "BartForConditionalGeneration",
    "whisper": "WhisperForConditionalGeneration",
    "llava": "LlavaForConditionalGeneration",
}


def class_of(family: str) -> type:
    """The class of the dozen, where this transformers has it."""
    if family not in tiny_models.folders():
        pytest.skip(f"transformers {transformers.__version__} has no {family}")
    return next(cls for cls in tiny_models.generators(family) if cls.__name__ == DOZEN[family])


@pytest.mark.parametrize("family", DOZEN)
def test_a_dozen_of_families(family, arch):
    if family == "gemma3n" and shim.VERSION < (5, 0):
        pytest.skip("without a cache it is another model: layers share keys through the cache alone")
    found = verdicts.survey(class_of(family))
    word, notes = verdicts.outcome(found)
    if family == "qwen3_next" and shim.VERSION < (5, 19):
        assert word == "refused"
        return
    assert word == "yes", notes
    assert found["sensitivity"] > verdicts.SENSITIVE
    assert {"eager", "tikv"} <= set(found)


class Faulty(TikvCache):
    """Forgets one token: what a survey that cannot fail would not see."""

    def update(self, keys, values, layer, *args, **kwargs):
        keys, values = super().update(keys, values, layer, *args, **kwargs)
        values = values.clone()
        values[:, :, -2] = 0
        return keys, values


@pytest.mark.parametrize("family", ["llama", "gemma3", "bart"])
def test_a_cache_that_forgets_a_token_is_seen(family, arch, monkeypatch):
    model = tiny_models.tiny_model(class_of(family))
    monkeypatch.setattr("tikv.integrations.transformers.TikvCache", Faulty)
    found = verdicts.survey_of_model(model, settings.call_of(model))
    every = set(settings.SETTINGS) if model.config.is_encoder_decoder else set(settings.SETTINGS) - {"two caches"}
    for attention in ("eager", "sdpa"):
        assert {name for name, (ours, *_) in found[attention].items() if ours > 0.01} == every
    assert verdicts.outcome({**found, "sensitivity": 1.0}).word == "differs"
