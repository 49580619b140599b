"""A `TikvCache` goes back to what a snapshot remembers, whatever was done to it since: the same logits, bit for bit."""

import collections
import copy
import gc
import pickle

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

import tiny_models  # noqa: E402
from model_cache import BASE, given  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

import tikv  # noqa: E402
from tikv.integrations.transformers import TikvCache, TikvSnapshot  # noqa: E402
from tikv.integrations.transformers.versions.installed import VERSION  # noqa: E402

pytestmark = [
    pytest.mark.archs("cpu"),
    pytest.mark.filterwarnings("default"),
    pytest.mark.usefixtures("one_thread"),
]
if VERSION < (5, 19):
    pytest.skip("the families and `crop` of newer versions of transformers", allow_module_level=True)

FAMILIES = (
    "LlamaForCausalLM", "Gemma3ForCausalLM", "GptOssForCausalLM", "DeepseekV32ForCausalLM", "Qwen3NextForCausalLM",
    "FalconH1ForCausalLM", "Lfm2ForCausalLM",
)  # fmt: skip
OPTIONS = ({}, {"max_cache_len": 64}, {"window": 12, "sinks": 2}, {"dtype": "float8_e4m3fn"})
GROUPS = tikv.Quant(bits=4, group=32, axis="tokens", residual=32)


def model_of(name):
    cls = getattr(transformers, name, None)
    if cls is None:
        pytest.skip(f"this transformers has no {name}")
    model = tiny_models.tiny_model(cls)
    model.set_attn_implementation("tikv")
    return model


def tokens(rows, count, seed=0):
    low, high = tiny_models.ORDINARY.start, tiny_models.ORDINARY.stop
    return torch.randint(low, high, (rows, count), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def read(model, cache, ids):
    return model(ids, **given(cache)).logits


def crop(cache):
    cache.crop(4 - cache.get_seq_length())


CHANGES = {
    "later tokens": lambda cache: None,
    "a crop below": crop,
    "reset": lambda cache: cache.reset(),
    "another order": lambda cache: cache.reorder_cache(torch.tensor([1, 0])),
    "repeats": lambda cache: cache.batch_repeat_interleave(2),
    "a selection": lambda cache: cache.batch_select_indices(torch.tensor([1])),
}


class Counted(TorchDispatchMode):
    """How often torch is asked to copy, by the name of its operation."""

    def __init__(self):
        super().__init__()
        self.copies = collections.Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        if "copy" in name or "clone" in name:
            self.copies[name] += 1
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["Lfm2ForCausalLM", "Qwen3NextForCausalLM", "FalconH1ForCausalLM"])
def test_states_of_all_layers_are_copied_at_once(arch, name):
    """On a GPU that is a launch for each kind, not one for each state."""
    model = model_of(name)
    cache = TikvCache(model.config)
    read(model, cache, tokens(2, 9))
    with Counted() as taken:
        snapshot = cache.snapshot()
    read(model, cache, tokens(2, 1))
    with Counted() as restored:
        cache.restore(snapshot)
    assert taken.copies == restored.copies == {"_foreach_copy_": 1}


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("name", FAMILIES)
def test_a_cache_goes_back_to_what_it_held(arch, name, options):
    if "window" in options and name == "DeepseekV32ForCausalLM":
        pytest.skip("its indexer needs all keys")
    model = model_of(name)
    cache = TikvCache(model.config, **options)
    later = tokens(2, 18).split(1, dim=1)
    read(model, cache, tokens(2, 9, seed=1))
    first = cache.snapshot()
    want = [read(model, cache, ids) for ids in later]
    second = cache.snapshot()
    after = read(model, cache, later[0])
    for what, change in CHANGES.items():
        try:
            change(cache)
            if cache.get_seq_length() < 9:
                read(model, cache, tokens(2, 1 if cache.get_seq_length() else 30, seed=3))
        except tikv.PositionError:
            assert what == "a crop below"
        cache.restore(second)
        assert torch.equal(read(model, cache, later[0]), after), what
        cache.restore(first)
        assert cache.get_seq_length() == first.length == 9
        assert all(torch.equal(read(model, cache, ids), logits) for ids, logits in zip(later, want, strict=True)), what
        cache.restore(second)
        assert torch.equal(read(model, cache, later[0]), after), what


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("name", FAMILIES)
def test_texts_go_on_from_one_prompt(arch, name, options):
    """As if each had read the prompt itself; the cache of the prompt stays as it is."""
    if "window" in options and name == "DeepseekV32ForCausalLM":
        pytest.skip("its indexer needs all keys")
    model = model_of(name)
    prompt, later = tokens(1, 9, seed=1), tokens(3, 6).split(1, dim=1)
    cache, alone = TikvCache(model.config, **options), TikvCache(model.config, **options)
    read(model, cache, prompt)
    read(model, alone, prompt.expand(3, -1))
    for texts in (cache.fork(3), cache.fork(3)):
        for ids in later:
            got, want = read(model, texts, ids), read(model, alone, ids)
            torch.testing.assert_close(got, want, rtol=0, atol=1e-5 * float(want.std()))
        alone.reset()
        read(model, alone, prompt.expand(3, -1))
    assert cache.get_seq_length() == 9
    pairs = cache.fork(2).fork(3)
    assert read(model, pairs, later[0].repeat(2, 1)).shape[0] == 6
    assert TikvCache(model.config).fork(2).get_seq_length() == 0
    with pytest.raises(tikv.OptionError, match="n=0 is not supported"):
        cache.fork(0)


def test_groups_along_tokens_go_back_too(arch):
    config = transformers.LlamaConfig(**BASE)
    cache, states = TikvCache(config, dtype=GROUPS), torch.randn(2, 1, 2, 70, 32)
    for layer in range(config.num_hidden_layers):
        cache.update(*states, layer)
    snapshot, before = cache.snapshot(), [a.clone() for layer in cache.layers for a in (layer.keys, layer.values)]
    for layer in range(config.num_hidden_layers):
        cache.update(*states, layer)
    cache.restore(snapshot)
    after = [a for layer in cache.layers for a in (layer.keys, layer.values)]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_what_is_copied_and_when(arch):
    """Full layers copy nothing until what was marked is about to change, and nothing for snapshots that are gone."""
    model = model_of("LlamaForCausalLM")
    cache = TikvCache(model.config)
    read(model, cache, tokens(1, 9))
    snapshot, forgotten = cache.snapshot(), cache.snapshot()
    for _ in range(2):
        read(model, cache, tokens(1, 1))
        cache.restore(snapshot)
    assert repr(snapshot) == "TikvSnapshot(9 tokens, 0 B copied)"
    del forgotten
    gc.collect()
    assert [len(layer.marks) for layer in cache.layers] == [1] * len(cache.layers)
    cache.crop(-1)
    assert snapshot.nbytes == cache.nbytes
    assert not any(layer.marks for layer in cache.layers)
    assert TikvCache(model.config).snapshot().length == 0
    for how in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(tikv.CopyError, match=r"save\(\) or copy\.deepcopy\(\) the cache"):
            how(snapshot)


def test_states_are_put_back_in_place(arch):
    model = model_of("Qwen3NextForCausalLM")
    cache = TikvCache(model.config)
    read(model, cache, tokens(2, 9))
    snapshot = cache.snapshot()
    states = [a for layer in cache.layers if hasattr(layer, "conv_states") for a in layer.recurrent_states.values()]
    assert snapshot.nbytes > sum(a.nbytes for a in states) > 0
    read(model, cache, tokens(2, 1))
    cache.restore(snapshot)
    for layer in cache.layers:
        for a in getattr(layer, "recurrent_states", {}).values():
            assert any(a is b for b in states)


def test_a_step_that_was_interrupted_is_undone(arch):
    model = model_of("Qwen3NextForCausalLM")
    cache = TikvCache(model.config)
    read(model, cache, tokens(1, 9))
    snapshot = cache.snapshot()
    want = read(model, cache, tokens(1, 1, seed=2))
    cache.restore(snapshot)

    def stop(*_):
        raise KeyboardInterrupt

    handle = model.model.layers[1].register_forward_pre_hook(stop)
    with pytest.raises(KeyboardInterrupt):
        read(model, cache, tokens(1, 1, seed=2))
    handle.remove()
    for call in (cache.snapshot, cache.align):
        with pytest.raises(tikv.PositionError, match=r"restore\(\) of a snapshot"):
            call()
    cache.restore(snapshot)
    assert torch.equal(read(model, cache, tokens(1, 1, seed=2)), want)


def test_layers_of_unequal_length_are_not_remembered(arch):
    cache, states = TikvCache(transformers.LlamaConfig(**BASE)), torch.ones(1, 2, 3, 8)
    for layer in (*range(len(cache.layers)), 0):
        cache.update(states, states, layer)
    with pytest.raises(tikv.PositionError, match=r"align\(\)"):
        cache.snapshot()


@pytest.mark.parametrize("of", ["another model's cache", "a copy"])
def test_a_snapshot_of_another_cache_is_refused(arch, of):
    model = model_of("LlamaForCausalLM")
    cache, other = TikvCache(model.config), TikvCache(model.config)
    read(model, cache, tokens(1, 9))
    read(model, other, tokens(1, 5))
    other = other if of != "a copy" else cache.__deepcopy__({})
    before = other.get_seq_length(), other.layers[0].keys.clone()
    with pytest.raises(tikv.OptionError, match="taken of another cache"):
        other.restore(cache.snapshot())
    assert other.get_seq_length() == before[0]
    assert torch.equal(other.layers[0].keys, before[1])


@torch.no_grad()
def test_an_encoder_decoder_goes_back(arch):
    model = tiny_models.tiny_model(transformers.T5GemmaForConditionalGeneration)
    source, later = tokens(1, 7), tokens(1, 6, seed=2).split(1, dim=1)
    cache = TikvCache(model.config)
    options = given(cache)
    first = model(source, decoder_input_ids=tokens(1, 3), **options)
    options["encoder_outputs"] = transformers.modeling_outputs.BaseModelOutput(first.encoder_last_hidden_state)
    snapshot = cache.snapshot()
    want = [model(decoder_input_ids=ids, **options).logits for ids in later]
    cache.reset()
    cache.restore(snapshot)
    assert isinstance(snapshot, TikvSnapshot)
    assert all(
        torch.equal(model(decoder_input_ids=ids, **options).logits, logits)
        for ids, logits in zip(later, want, strict=True)
    )
