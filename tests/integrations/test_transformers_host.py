"""`TikvCache(place="host")` beside one on the device: the same text, logits and bits; views stay as they were."""

import copy
import functools
import gc
import weakref

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")

import transformers  # noqa: E402
from model_cache import BASE, generate, given, prompts  # noqa: E402

import tikv  # noqa: E402
from tikv.integrations.transformers import TikvCache, TikvLayer  # noqa: E402
from tikv.stores.layers.hosted import HostedLayer, Place  # noqa: E402
from tikv.stores.layers.residents import CopiedByNumPy  # noqa: E402

pytestmark = [
    pytest.mark.archs("cpu", "cuda"),
    pytest.mark.filterwarnings("default"),
    pytest.mark.usefixtures("one_thread"),
]

LLAMA = "Llama", "LlamaConfig", {"head_dim": 32}
WINDOW = 7
HYBRID = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"] * 2}
GEMMA = "Gemma3", "Gemma3TextConfig", {**HYBRID, "query_pre_attn_scalar": 8, "num_hidden_layers": 4}
SHARED = "Gemma3n", "Gemma3nTextConfig", {
    **HYBRID,
    "num_kv_shared_layers": 2,
    "intermediate_size": [48] * 4,
    "activation_sparsity_pattern": [0.0] * 4,
    "vocab_size_per_layer_input": 97,
    "hidden_size_per_layer_input": 8,
    "laurel_rank": 4,
}  # fmt: skip
STORAGES = [{}, {"dtype": "float16"}, {"dtype": "int8"}, {"dtype": tikv.Quant(4, 32)}]


@functools.cache
def build(family, arch):
    name, config, options = family
    torch.manual_seed(0)
    made = getattr(transformers, name + "ForCausalLM")(getattr(transformers, config)(**{**BASE, **dict(options)}))
    return made.eval().to("cuda" if arch == "cuda" else "cpu")


def model_of(family, arch, attention="sdpa"):
    found = build.__wrapped__(family, arch)
    found.set_attn_implementation(attention)
    return found


def hosted(arch, config, late=True, **options):
    """A cache on the host; on CPU one whose copies are made by NumPy."""
    cache = TikvCache(config, **options, place="host")
    if arch == "cpu":
        cache._places.transfer = functools.partial(CopiedByNumPy, late=late)
    return cache


def on(model, inputs):
    return {name: a.to(model.device) for name, a in inputs.items()}


def assert_same(model, one, other, inputs, new_tokens=12, **options):
    want, got = (generate(model, cache, on(model, inputs), new_tokens, **options) for cache in (one, other))
    assert torch.equal(got.sequences, want.sequences)
    for a, b in zip(got.logits, want.logits, strict=True):
        assert torch.equal(a, b)


def assert_same_bits(one, other):
    for a, b in zip(one.layers, other.layers, strict=True):
        assert a.get_seq_length() == b.get_seq_length()
        assert torch.equal(a.keys, b.keys)
        assert torch.equal(a.values, b.values)


@pytest.mark.parametrize("attention", ["sdpa", "tikv"])
@pytest.mark.parametrize("storage", STORAGES, ids=["model's", "float16", "int8", "4 bits"])
def test_text_is_that_of_a_cache_on_the_device(arch, attention, storage):
    model = model_of(LLAMA, arch, attention)
    one, other = TikvCache(model.config, **storage), hosted(arch, model.config, **storage)
    assert_same(model, one, other, prompts(11, 8))
    assert_same_bits(one, other)
    assert (one.place, other.place, one.nbytes) == ("device", "host", other.nbytes)
    assert all(isinstance(layer.store, HostedLayer) for layer in other.layers)


@pytest.mark.parametrize("late", [True, pytest.param(False, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("resident_layers", [1, 2, 3, 9])
def test_memory_grows_and_layers_come_and_go(arch, resident_layers, late, set_room):
    set_room(first=4)
    model = model_of(LLAMA, arch)
    other = hosted(arch, model.config, late, resident_layers=resident_layers)
    assert_same(model, TikvCache(model.config), other, prompts(11), new_tokens=30)
    assert len({layer._content for layer in other.layers} - {None}) <= resident_layers


@pytest.mark.parametrize("family", [GEMMA, SHARED], ids=["layers that slide", "layers that share keys"])
def test_only_layers_that_attend_in_full_are_on_the_host(arch, family):
    model = model_of(family, arch)
    other = hosted(arch, model.config, resident_layers=1)
    assert_same(model, TikvCache(model.config), other, prompts(11))
    hosts = [i for i, layer in enumerate(other.layers) if getattr(layer, "is_hosted", False)]
    assert hosts == [i for i, layer in enumerate(other.layers) if isinstance(layer, TikvLayer) and not layer.is_sliding]
    assert hosts


def test_beams_and_drafts_and_rows_go_with_the_host(arch):
    model = model_of(LLAMA, arch)
    for options in ({"num_beams": 3}, {"num_return_sequences": 2, "num_beams": 2}):
        assert_same(model, TikvCache(model.config), hosted(arch, model.config), prompts(9), **options)
    one, other = TikvCache(model.config), hosted(arch, model.config)
    ids = prompts(10, 10)["input_ids"].to(model.device)
    with torch.no_grad():
        for cache in (one, other):
            model(ids, **given(cache))
            cache.crop(-3)
            cache.batch_repeat_interleave(2)
            cache.batch_select_indices(torch.tensor([3, 0, 1]))
            cache.reorder_cache(torch.tensor([1, 1, 0], device=model.device))
            model(ids[[0, 1, 0], :4], **given(cache))
    assert_same_bits(one, other)
    other.reset()
    assert_same(model, TikvCache(model.config), other, prompts(5))


def test_copies_and_files(arch, tmp_path):
    model = model_of(LLAMA, arch)
    first, other = on(model, prompts(9)), hosted(arch, model.config, dtype="int8", max_cache_len=40)
    generate(model, other, first, 4)
    twin = copy.deepcopy(other)
    assert twin._places is not other._places
    assert {layer._places for layer in twin.layers} == {twin._places}
    assert_same_bits(other, twin)
    path = tmp_path / "text.safetensors"
    other.save(path)
    back = TikvCache.load(path, model.config)
    assert back.place == "device"
    assert_same_bits(other, back)
    again = TikvCache.load(path, model.config, place="host", resident_layers=3)
    assert again.place == ("host" if arch == "cuda" else "device")
    assert again._places.resident_layers == 3
    ids = torch.full((1, 3), 5, device=model.device)
    with torch.no_grad():
        found = [model(ids, **given(cache)).logits for cache in (twin, back, again, other)]
    assert all(torch.equal(found[0], logits) for logits in found[1:])
    assert_same_bits(twin, back)


def rows(model, seed, tokens=1):
    torch.manual_seed(seed)
    return torch.randn(1, 2, tokens, 32, device=model.device)


def test_what_somebody_still_has_stays_as_it_is(arch):
    """Views of a copy that another layer's would overwrite, and numbers that nobody has decoded yet."""
    model = model_of(LLAMA, arch, "tikv")
    for storage in ({}, {"dtype": "int8"}):
        cache = hosted(arch, model.config, **storage)
        with torch.no_grad():
            for layer in range(4):
                cache.update(rows(model, layer, 5), rows(model, -layer - 1, 5), layer)
            kept = [cache.update(rows(model, 9), rows(model, 9), layer) for layer in range(4)]
            seen = [[a.clone() for a in pair] for pair in kept]
            for _ in range(3):
                for layer in range(4):
                    cache.update(rows(model, 10), rows(model, 11), layer)
        own = TikvCache(model.config, **storage)
        with torch.no_grad():
            for layer in range(4):
                own.update(rows(model, layer, 5), rows(model, -layer - 1, 5), layer)
                wanted = own.update(rows(model, 9), rows(model, 9), layer)
                for a, b, c in zip(kept[layer], seen[layer], wanted, strict=True):
                    assert torch.equal(a + 0, c + 0)
                    assert torch.equal(b, c + 0)


@pytest.mark.archs("cpu")
def test_a_copy_that_is_overwritten_too_early_is_seen(arch, monkeypatch):
    hand_out = Place.hand_out
    forgetful = lambda self, array: (hand_out(self, array), setattr(self, "_references", []))[0]  # noqa: E731
    monkeypatch.setattr(Place, "hand_out", forgetful)
    with pytest.raises(AssertionError):
        test_what_somebody_still_has_stays_as_it_is(arch)


@pytest.mark.archs("cpu")
def test_a_place_is_used_again_when_nobody_has_it(arch, monkeypatch):
    made, empty_copy = [], HostedLayer.empty_copy
    monkeypatch.setattr(HostedLayer, "empty_copy", lambda self: (made.append(self.number), empty_copy(self))[1])
    for attention in ("sdpa", "tikv"):
        for storage in ({}, {"dtype": "int8"}):
            model = model_of(LLAMA, arch, attention)
            generate(model, hosted(arch, model.config, max_cache_len=40, **storage), on(model, prompts(9)), 12)
            assert len(made) == 2
            made.clear()


def test_layers_may_be_emptied_one_by_one(arch):
    model = model_of(LLAMA, arch)
    one, other = TikvCache(model.config), hosted(arch, model.config)
    with torch.no_grad():
        for turn in range(3):
            for layer in range(4):
                for cache in (one, other):
                    cache.update(rows(model, turn), rows(model, layer), layer)
            for cache in (one, other):
                cache.layers[turn].keys = None
                cache.layers[turn + 1].values = cache.layers[turn + 1].values * 2
    for a, b in zip(one.layers, other.layers, strict=True):
        assert (a.keys is None) == (b.keys is None)
        assert a.keys is None or (torch.equal(a.keys, b.keys) and torch.equal(a.values, b.values))


@pytest.mark.archs("cpu")
def test_memory_goes_with_the_last_name_of_a_cache(arch):
    model = model_of(LLAMA, arch)
    cache = hosted(arch, model.config)
    with torch.no_grad():
        for layer in range(4):
            cache.update(rows(model, 0), rows(model, 1), layer)
    layer = cache.layers[3]
    memory = [weakref.ref(store._layer.k.owner) for store in (layer.store, layer.store.bring())]
    gc.disable()
    try:
        del cache, layer
        assert [one() for one in memory] == [None, None]
    finally:
        gc.enable()


@pytest.mark.archs("cpu")
def test_compiled_code_leaves_the_graph_for_it(arch):
    model = model_of(LLAMA, arch)
    one, other = TikvCache(model.config, max_cache_len=40), hosted(arch, model.config, max_cache_len=40)
    assert not other.is_compileable
    compiled = torch.compile(lambda cache, k, v: cache.update(k, v, 0)[0] * 2, backend="eager")
    with torch.no_grad():
        for seed in range(3):
            k, v = rows(model, seed, 2), rows(model, seed + 5, 2)
            assert torch.equal(compiled(other, k, v), one.update(k, v, 0)[0] * 2)


@pytest.mark.archs("cpu")
def test_on_a_cpu_it_is_a_plain_cache_and_says_so(arch):
    model = model_of(LLAMA, arch)
    cache = TikvCache(model.config, place="host")
    assert repr(cache.layers[0]) == "TikvLayer(full, empty, place='host')"
    assert_same(model, TikvCache(model.config), cache, prompts(9))
    assert cache.place == "device"
    assert "place='host' makes an ordinary layer: cpu computes in the host's memory" in repr(cache.layers[0])


@pytest.mark.archs("cpu")
@pytest.mark.parametrize(
    ("family", "options", "words"),
    [
        (LLAMA, {"place": "disk"}, "unknown place 'disk'"),
        (LLAMA, {"place": "host", "resident_layers": 0}, "resident_layers=0"),
        (LLAMA, {"place": "host", "window": 8}, "layers with window=8 are small and stay on the device"),
        (("", "MistralConfig", {"sliding_window": 7}), {"place": "host"}, "no layer of this model has full attention"),
        (("", "T5Config", {}), {"place": "host"}, "the model may have an encoder"),
        (LLAMA, {"offloading": True}, "Use place='host' to keep"),
    ],
)
def test_what_is_not_offered_is_refused(arch, family, options, words):
    config = getattr(transformers, family[1])(**family[2])
    with pytest.raises(tikv.OptionError, match=words):
        TikvCache(config, **options)
