"""TikvCache in tiny random models of transformers' families: a dozen here, every one of them with --full."""

import pathlib

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

import family_page  # noqa: E402
import family_settings as settings  # noqa: E402
import family_verdicts as verdicts  # noqa: E402
import hybrids  # noqa: E402
import tiny_models  # noqa: E402

from tikv.integrations.transformers import TikvCache  # noqa: E402
from tikv.integrations.transformers.versions.installed import VERSION  # noqa: E402

pytestmark = [
    pytest.mark.archs("cpu"),
    pytest.mark.filterwarnings("default"),
    pytest.mark.usefixtures("one_thread"),
]

PAGE = pathlib.Path(__file__).parent.parent.parent / "docs" / "families.md"
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
    if family == "gemma3n" and VERSION < (5, 0):
        pytest.skip("without a cache it is another model: layers share keys through the cache alone")
    found = verdicts.survey(class_of(family))
    word, notes = verdicts.outcome(found)
    if family == "qwen3_next" and VERSION < (5, 19):
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


def test_the_page_is_what_the_survey_writes():
    text = PAGE.read_text(encoding="utf-8")
    rows = family_page.rows(text)
    with_states = hybrids.rows_of(text)
    assert family_page.page_of(rows, with_states, *family_page.versions(text)) == text
    assert "no" not in {cell for row in with_states for cell in row}
    assert {row.word for row in rows} <= set(family_page.WORDS)
    assert [row for row in rows if row.word == "differs"] == []
    assert rows == sorted(rows, key=lambda row: row.family)
    assert {row.cls for row in rows} >= set(DOZEN.values())


def test_the_page_has_a_row_for_every_family():
    text = PAGE.read_text(encoding="utf-8")
    version, _ = family_page.versions(text)
    if version != transformers.__version__:
        pytest.skip(f"the page is of transformers {version}, here is {transformers.__version__}")
    assert sorted({row.family for row in family_page.rows(text)}) == tiny_models.folders()


@pytest.mark.full
@pytest.mark.parametrize("family", tiny_models.folders())
def test_every_family(family, arch):
    """As the page says, where it is of this version of transformers; else nothing differs."""
    text = PAGE.read_text(encoding="utf-8")
    same = family_page.versions(text)[0] == transformers.__version__
    found = {row.cls: row.word for row in family_page.rows(text) if row.family == family}
    for cls in tiny_models.generators(family):
        word, notes = verdicts.outcome(verdicts.survey(cls))
        assert word != "differs", (cls.__name__, notes)
        assert not same or word == found[cls.__name__], (cls.__name__, word, notes)
