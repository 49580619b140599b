"""`TikvCache(config, record_states=k)`: crops of hybrids, drafted tokens, and prompts in chunks."""

import copy
import pathlib

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

import family_page  # noqa: E402
import hybrids  # noqa: E402
import tiny_models  # noqa: E402
from hybrids import read, steps, tokens, whole  # noqa: E402
from model_cache import BASE, given  # noqa: E402

import tikv  # noqa: E402
from tikv.integrations.transformers import TikvCache  # noqa: E402
from tikv.integrations.transformers.versions.installed import VERSION  # noqa: E402

pytestmark = [
    pytest.mark.archs("cpu"),
    pytest.mark.filterwarnings("default"),
    pytest.mark.usefixtures("one_thread"),
]
if VERSION < (5, 24):
    pytest.skip("models read their states through the cache from transformers 5.24 on", allow_module_level=True)

PAGE = pathlib.Path(__file__).parent.parent.parent / "docs" / "families.md"
FEW = ("falcon_h1", "qwen3_next")
SOME = [*FEW, *(pytest.param(family, marks=pytest.mark.full) for family in ("inkling", "jamba"))]
FAMILIES = [
    pytest.param(family, marks=() if family in FEW else pytest.mark.full)
    for family in hybrids.FAMILIES
    if family != "recurrent_gemma"
]
DRAFTED = 6


def model_of(family):
    if family not in tiny_models.folders():
        pytest.skip(f"transformers {transformers.__version__} has no {family}")
    return tiny_models.tiny_model(tiny_models.generators(family)[0])


@pytest.mark.parametrize("family", hybrids.FAMILIES)
def test_a_family_does_what_the_page_says(arch, family):
    """Crops, drafted tokens, prompts in pieces, snapshots, files, forks and other orders of sequences."""
    if family not in tiny_models.folders():
        pytest.skip(f"transformers {transformers.__version__} has no {family}")
    text, row = PAGE.read_text(encoding="utf-8"), hybrids.row(family)
    assert "no" not in row
    if family_page.versions(text)[0] == transformers.__version__:
        assert row in hybrids.rows_of(text)


def near(got, want):
    # Zamba2's own cache differs by 7e-5 from a run without one.
    torch.testing.assert_close(got, want, rtol=0, atol=1e-3 * float(want.std()))


@pytest.mark.parametrize("family", FAMILIES)
def test_crops_are_exact(arch, family):
    """To where a step began with the same bits; between tokens that came together with those of one after another."""
    model, ids = model_of(family), tokens(2, 20)
    cache = TikvCache(model.config, record_states=DRAFTED)
    prompt = read(model, cache, ids[:, :9])
    near(prompt, whole(model, ids[:, :9]))
    want = steps(model, cache, ids[:, 9:15])
    near(want, whole(model, ids)[:, 9:15])
    cache.crop(-6)
    assert torch.equal(steps(model, cache, ids[:, 9:15]), want)
    cache.crop(-2)
    assert torch.equal(steps(model, cache, ids[:, 13:15]), want[:, 4:])
    cache.crop(-6)
    read(model, cache, ids[:, 3:8])  # drafted tokens
    cache.crop(-5)
    assert torch.equal(steps(model, cache, ids[:, 9:15]), want)
    cache.crop(-6)
    near(read(model, cache, torch.cat([ids[:, 9:12], ids[:, 2:5]], 1))[:, :3], want[:, :3])
    cache.crop(-3)
    near(steps(model, cache, ids[:, 12:15]), want[:, 3:])
    cache.crop(-1)
    cache.crop(-2)
    near(steps(model, cache, ids[:, 12:15]), want[:, 3:])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_crop_goes_back_into_the_prompt_and_to_nothing(arch, family):
    model, ids = model_of(family), tokens(2, 12)
    cache, want = TikvCache(model.config, record_states=DRAFTED), whole(model, ids)
    read(model, cache, ids[:, :10])
    cache.crop(-4)
    near(read(model, cache, ids[:, 6:8]), want[:, 6:8])
    near(steps(model, cache, ids[:, 8:]), want[:, 8:])
    cache.reset()
    read(model, cache, ids[:, 4:7])
    cache.crop(-3)
    assert cache.get_seq_length() == 0
    near(read(model, cache, ids), want)


@pytest.mark.parametrize("family", FAMILIES)
def test_prompts_in_chunks_are_like_whole_ones(arch, family):
    """Jamba's and Zamba's scans of several tokens began without a state: their logits were off by 2.6 deviations."""
    model, ids = model_of(family), tokens(1, 19)
    options = {"do_sample": False, "max_new_tokens": 4, "eos_token_id": None, "pad_token_id": 0}
    options |= {"return_dict_in_generate": True, "output_logits": True}
    want = model.generate(ids, **given(TikvCache(model.config)), **options)
    got = model.generate(ids, **given(TikvCache(model.config)), **options, prefill_chunk_size=8)
    assert torch.equal(got.sequences, want.sequences)
    for a, b in zip(got.logits, want.logits, strict=True):
        near(a, b)


def forwards(model, run):
    """How often a model is called, and what `run` returns."""
    calls = []
    handle = model.register_forward_hook(lambda *_: calls.append(1))
    try:
        return run(), len(calls)
    finally:
        handle.remove()


def forwards_with_drafts(text, prompt, drafted):
    """How many calls write a text if each takes as many drafted tokens as are right."""
    from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

    generator = PromptLookupCandidateGenerator(num_output_tokens=drafted, max_length=text.shape[1])
    length, calls = prompt, 0
    while length < text.shape[1]:
        drafts = generator.get_candidates(text[:, :length])[0][0, length : text.shape[1]]
        right = (drafts == text[0, length : length + len(drafts)]).long().cumprod(0).sum() if len(drafts) else 0
        length, calls = length + int(right) + 1, calls + 1
    return calls


GREEDY = {"do_sample": False, "max_new_tokens": 24, "eos_token_id": None, "pad_token_id": 0}


@pytest.mark.parametrize("family", FAMILIES)
def test_prompt_lookup_writes_the_same_text_in_fewer_calls(arch, family):
    model, prompt = model_of(family), tokens(1, 5).repeat(1, 4)
    want = model.generate(prompt, **given(TikvCache(model.config)), **GREEDY)
    cache = TikvCache(model.config, record_states=DRAFTED)
    got, calls = forwards(
        model, lambda: model.generate(prompt, **given(cache), **GREEDY, prompt_lookup_num_tokens=DRAFTED)
    )
    assert torch.equal(got, want)
    assert calls == forwards_with_drafts(want, prompt.shape[1], DRAFTED)
    assert cache.get_seq_length() == want.shape[1] - 1


@pytest.mark.parametrize("family", SOME)
def test_an_assistant_drafts_for_a_hybrid(arch, family):
    model, prompt = model_of(family), tokens(1, 9)
    config = transformers.LlamaConfig(**BASE | {"vocab_size": model.config.get_text_config().vocab_size})
    assistant = transformers.LlamaForCausalLM(config).eval()
    assistant.generation_config.num_assistant_tokens = 5
    assistant.generation_config.num_assistant_tokens_schedule = "constant"
    want = model.generate(prompt, **given(TikvCache(model.config)), **GREEDY)
    cache = TikvCache(model.config, record_states=5)
    assert torch.equal(model.generate(prompt, **given(cache), **GREEDY, assistant_model=assistant), want)


def test_only_a_cache_that_records_lets_a_hybrid_be_assisted(arch):
    model, prompt = model_of("qwen3_next"), tokens(1, 5).repeat(1, 3)
    options = {**GREEDY, "prompt_lookup_num_tokens": 3}
    model.generate(prompt, **given(TikvCache(model.config, record_states=3)), **options)
    for cache in (TikvCache(model.config), transformers.DynamicCache(config=model.config)):
        with pytest.raises(ValueError, match="not supported with stateful models"):
            model.generate(prompt, **given(cache), **options)
    assert type(model)._is_stateful


@pytest.mark.parametrize("family", SOME)
def test_beyond_the_record_nothing_changes(arch, family):
    model, ids = model_of(family), tokens(1, 16)
    cache = TikvCache(model.config, record_states=4)
    read(model, cache, ids[:, :9])
    want = read(model, copy.deepcopy(cache), ids[:, 9:10])
    with pytest.raises(
        tikv.PositionError,
        match=r"crop\(-5\) is not possible: record_states=4, and the states before the last 4 tokens",
    ):
        cache.crop(-5)
    assert cache.get_seq_length() == 9
    assert torch.equal(read(model, cache, ids[:, 9:10]), want)


@pytest.mark.parametrize("family", SOME)
def test_records_follow_copies_and_sequences(arch, family, tmp_path):
    model, ids = model_of(family), tokens(3, 14)
    cache = TikvCache(model.config, record_states=3)
    read(model, cache, ids[:, :9])
    snapshot, twin = cache.snapshot(), copy.deepcopy(cache)
    changes = {
        "batch_select_indices": (torch.tensor([2, 0]), [2, 0]),
        "reorder_cache": (torch.tensor([1, 1, 0]), [1, 1, 0]),
        "batch_repeat_interleave": (2, [0, 0, 1, 1, 2, 2]),
    }
    for name, (argument, rows) in changes.items():
        getattr(cache, name)(argument)
        cache.crop(-2)
        near(steps(model, cache, ids[rows, 7:10]), whole(model, ids[rows, :10])[:, 7:])
        cache.restore(snapshot)
    for one in (cache, twin):
        one.crop(-3)
        near(steps(model, one, ids[:, 6:9]), whole(model, ids[:, :9])[:, 6:])
    cache.save(tmp_path / "text.safetensors")
    loaded = TikvCache.load(tmp_path / "text.safetensors", model.config)
    assert loaded.record_states == 3
    with pytest.raises(tikv.PositionError, match="the states before the last 0 tokens are recorded"):
        loaded.crop(-1)
    a, b = (steps(model, one, ids[:, 9:12]) for one in (cache, loaded))
    assert torch.equal(a, b)
    for one in (cache, loaded):
        one.crop(-2)
    assert torch.equal(*(steps(model, one, ids[:, 10:12]) for one in (cache, loaded)))


def test_memory_of_records_is_used_again(arch):
    model = model_of("qwen3_next")
    cache, ids = TikvCache(model.config, record_states=2), tokens(1, 12)
    read(model, cache, ids[:, :6])
    layer = next(layer for layer in cache.layers if hasattr(layer, "records"))
    before = {each.recurrent.data_ptr() for each in layer.records[0]}
    steps(model, cache, ids[:, 6:])
    assert {each.recurrent.data_ptr() for each in layer.records[0]} == before
    assert [each.tokens for each in layer.records[0]] == [1, 1]


def test_a_call_that_was_interrupted_in_a_module_is_undone(arch, monkeypatch):
    model, ids = model_of("qwen3_next"), tokens(1, 14)
    cache = TikvCache(model.config, record_states=4)
    read(model, cache, ids[:, :9])
    want = read(model, copy.deepcopy(cache), ids[:, 9:12])
    first = next(layer.linear_attn for layer in model.model.layers if hasattr(layer, "linear_attn"))

    def stop(*_):
        raise KeyboardInterrupt

    handle = first.norm.register_forward_pre_hook(stop)  # after the states were written
    with pytest.raises(KeyboardInterrupt):
        read(model, cache, ids[:, 9:12])
    handle.remove()
    assert torch.equal(read(model, cache, ids[:, 9:12]), want)


@pytest.mark.parametrize("family", SOME)
@pytest.mark.parametrize("count", [1, 3])
def test_layers_are_aligned_after_an_interrupt(arch, family, count):
    model, ids = model_of(family), tokens(2, 14)
    layers = next(m for name, m in model.named_modules() if name.endswith("layers"))
    want = None

    def stop(*_):
        raise KeyboardInterrupt

    for layer in layers:
        cache = TikvCache(model.config, record_states=4)
        read(model, cache, ids[:, :9])
        want = read(model, copy.deepcopy(cache), ids[:, 9:12]) if want is None else want
        handle = layer.register_forward_pre_hook(stop)
        with pytest.raises(KeyboardInterrupt):
            read(model, cache, ids[:, 9 : 9 + count])
        handle.remove()
        assert cache.align() == 9
        assert torch.equal(read(model, cache, ids[:, 9:12]), want)


@pytest.mark.parametrize("family", ["qwen3_next", "jamba"])
def test_tokens_beyond_the_memory_reach_no_state(arch, family):
    """The states of layers before the first attention took them, and then attention refused them."""
    model, ids = model_of(family), tokens(1, 14)
    cache = TikvCache(model.config, max_cache_len=10)
    read(model, cache, ids[:, :9])
    want = read(model, copy.deepcopy(cache), ids[:, 9:10])
    with pytest.raises(tikv.CapacityError):
        read(model, cache, ids[:, 9:12])
    assert torch.equal(read(model, cache, ids[:, 9:10]), want)


def test_a_model_without_states_takes_the_option(arch):
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**BASE)).eval()
    cache, ids = TikvCache(model.config, record_states=4), tokens(1, 9)
    want = read(model, cache, ids)
    cache.crop(-8)
    near(read(model, cache, ids[:, 1:]), want[:, 1:])


@pytest.mark.parametrize("value", [-1, 1.5, True, "2"])
def test_what_is_no_number_of_tokens_is_refused(arch, value):
    with pytest.raises(tikv.OptionError, match=r"record_states=.* is not supported"):
        TikvCache(transformers.LlamaConfig(**BASE), record_states=value)


def test_a_state_in_the_models_own_modules_cannot_be_recorded_and_takes_one_token_at_a_time(arch):
    model, ids = model_of("recurrent_gemma"), tokens(1, 14)
    with pytest.raises(tikv.OptionError, match="record_states=4 is not possible: no module of RecurrentGemmaConfig"):
        TikvCache(model.config, record_states=4)
    cache, want = TikvCache(model.config), whole(model, ids)
    read(model, cache, ids[:, :9])
    with pytest.raises(tikv.OptionError, match="4 new tokens together: the state of layer 0 is not in the cache"):
        read(model, cache, ids[:, 9:13])
    near(steps(model, cache, ids[:, 9:]), want[:, 9:])


@pytest.mark.parametrize("family", SOME)
@pytest.mark.parametrize(
    "options",
    [{"max_cache_len": 40}, {"window": 32, "sinks": 2}, {"dtype": "float16"}, {"dtype": "int8"}, {"place": "host"}],
    ids=str,
)
def test_keys_may_have_any_format_and_place_beside_states(arch, family, options):
    """The same logits after crops, in a copy, from a file and after a snapshot, whatever attention's layers store."""
    model, ids = model_of(family), tokens(2, 20)
    if "place" in options and family in ("falcon_h1", "inkling"):
        with pytest.raises(tikv.OptionError, match="a state in addition to keys and values"):
            TikvCache(model.config, **options)
        return
    cache = TikvCache(model.config, record_states=DRAFTED, **options)
    read(model, cache, ids[:, :9])
    snapshot, twin = cache.snapshot(), copy.deepcopy(cache)
    want = steps(model, cache, ids[:, 9:13])
    assert torch.equal(steps(model, twin, ids[:, 9:13]), want)
    cache.crop(-4)
    assert torch.equal(steps(model, cache, ids[:, 9:13]), want)
    cache.crop(-2)
    read(model, cache, ids[:, :4])
    cache.crop(-4)
    assert torch.equal(steps(model, cache, ids[:, 11:13]), want[:, 2:])
    cache.reset()
    read(model, cache, ids)
    cache.restore(snapshot)
    assert torch.equal(steps(model, cache, ids[:, 9:13]), want)
