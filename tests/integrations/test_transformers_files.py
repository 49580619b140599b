"""TikvCache.save and load: a model goes on as if its cache had never been saved, or the file is refused."""

import copy
import json

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

import tiny_models  # noqa: E402
from model_cache import BASE, given  # noqa: E402
from safetensors.numpy import load_file  # noqa: E402

import tikv  # noqa: E402
from tikv.integrations.transformers import TikvCache  # noqa: E402
from tikv.integrations.transformers.versions.installed import VERSION  # noqa: E402
from tikv.stores import files  # noqa: E402

pytestmark = [
    pytest.mark.archs("cpu"),
    pytest.mark.filterwarnings("default"),
    pytest.mark.usefixtures("one_thread"),
]

HYBRID = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"], "query_pre_attn_scalar": 8}


def build(family="Llama", **more):
    torch.manual_seed(0)
    options = {**BASE, "num_hidden_layers": 2, **more}
    config = getattr(transformers, family + ("TextConfig" if family == "Gemma3" else "Config"))(**options)
    return getattr(transformers, family + "ForCausalLM")(config).eval()


def read(model, cache, *parts):
    """The logits of parts of a text, one after another."""
    with torch.no_grad():
        return torch.cat([model(part, **given(cache)).logits for part in parts], 1)


OF_KEYS = {"dtype": tikv.Quant(4, 32, "tokens", 40), "v_dtype": "int8"}
CASES = {
    "full": ("Llama", {}, {}),
    "with a limit": ("Llama", {}, {"max_cache_len": 64}),
    "int8": ("Llama", {}, {"dtype": "int8"}),
    "8-bit floats": ("Llama", {}, {"dtype": "float8_e4m3fn", "k_scale": (0.5, 2.0), "v_scale": 0.25}),
    "groups": ("Llama", {"head_dim": 32}, {"dtype": tikv.Quant(4, 32), "v_dtype": "q8_0"}),
    "turned keys": ("Llama", {"head_dim": 32}, {"dtype": tikv.Quant(4, 32, rotate="hadamard", seed=3)}),
    "4-bit floats": ("Llama", {"head_dim": 32}, {"dtype": "nvfp4", "k_scale": 0.5, "v_scale": 0.25}),
    "groups along tokens": ("Llama", {"head_dim": 32}, {"dtype": tikv.Quant(4, 32, "tokens", 32)}),
    "groups along tokens of a sliding layer": ("Gemma3", {**HYBRID, "head_dim": 32}, OF_KEYS),
    "narrower values": ("Llama", {}, {"v_dtype": "float16"}),
    "a sliding layer": ("Gemma3", HYBRID, {"dtype": "int8"}),
    "a stream": ("Llama", {}, {"window": 7, "sinks": 2}),
    "bfloat16": ("Llama", {}, {}),
}


@pytest.mark.parametrize("attention", ["sdpa", "tikv"])
@pytest.mark.parametrize("case", CASES)
def test_a_model_goes_on_as_if_never_saved(arch, case, attention, tmp_path, set_room):
    """To the bit, wherever it was: in a prompt, where a window moved, where a stream went round."""
    set_room(rollback=2, spare=3, first=4)
    family, more, options = CASES[case]
    model = build(family, **more)
    model = model.bfloat16() if case == "bfloat16" else model
    model.set_attn_implementation(attention)
    torch.manual_seed(1)
    text = torch.randint(2, 97, (2, 24))
    for before in ([3], [6, 1, 1], [9, 1, 1, 1, 1]):
        cache = TikvCache(model.config, **options)
        read(model, cache, *text[:, : sum(before)].split(before, 1))
        same = copy.deepcopy(cache)
        cache.save(tmp_path / "text.safetensors")
        found = TikvCache.load(tmp_path / "text.safetensors", model.config)
        assert repr(found) == repr(cache)
        assert found.get_seq_length() == sum(before)
        assert found.max_cache_len == cache.max_cache_len
        # Looking at the keys of a stream puts them in order.
        for a, b in zip(copy.deepcopy(found).layers, copy.deepcopy(same).layers, strict=True):
            assert torch.equal(a.keys, b.keys)
            assert torch.equal(a.values, b.values)
        rest = text[:, sum(before) :].split([1, 1, 2, 1, 24 - 5 - sum(before)], 1)
        want = read(model, same, *rest)
        assert torch.equal(read(model, found, *rest), want)
        assert torch.equal(read(model, cache, *rest), want)


def test_what_may_be_taken_back_is_the_same(arch, tmp_path):
    config = transformers.MistralConfig(**BASE, sliding_window=5)
    cache = TikvCache(config)
    for tokens in (9, 1, 1):
        for layer in range(4):
            cache.update(torch.randn(1, 2, tokens, 8), torch.randn(1, 2, tokens, 8), layer)
    cache.activate_past_recording()
    cache.save(tmp_path / "a.safetensors")
    found = TikvCache.load(tmp_path / "a.safetensors", config)
    assert [layer.record_past for layer in found.layers] == [True] * 4
    if VERSION >= (5, 14):
        found.crop(0)
    assert found.get_seq_length() == 11


def test_an_empty_cache_and_one_of_an_encoder_decoder(arch, tmp_path):
    model = build()
    TikvCache(model.config, dtype="int8").save(tmp_path / "a.safetensors")
    found = TikvCache.load(tmp_path / "a.safetensors", model.config)
    assert found.get_seq_length() == 0
    assert found.layers[0].storage.k.name == "int8"
    config = transformers.BartConfig(
        vocab_size=97, d_model=32, encoder_layers=1, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=32, decoder_ffn_dim=32,
    )  # fmt: skip
    bart = transformers.BartForConditionalGeneration(config).eval()
    cache, ids = TikvCache(config), torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad():
        encoded = bart.get_encoder()(input_ids=ids)
        options = {"encoder_outputs": encoded, "use_cache": True}
        bart(decoder_input_ids=torch.tensor([[2, 9]]), **options, **given(cache))
        cache.save(tmp_path / "b.safetensors")
        found = TikvCache.load(tmp_path / "b.safetensors", config)
        assert found.is_updated == cache.is_updated == {0: True, 1: True}
        got, want = (
            bart(decoder_input_ids=torch.tensor([[11]]), **options, **given(each)).logits for each in (found, cache)
        )
    assert torch.equal(got, want)


def changed(path, change):
    """The file again, its facts changed and its checksums right."""
    tensors, facts = files.read(path, "TikvCache", "test")
    change(facts, tensors)
    files.write(path, "TikvCache", tensors, facts, "test")


WRONG = {
    "another length": lambda facts, _: facts["parts"]["layers"][0].update(length=5),
    "no room": lambda facts, _: facts["parts"]["layers"][1].update(capacity=3),
    "all memory": lambda facts, _: facts["parts"]["layers"][1].update(capacity=2**50),
    "a word for a number": lambda facts, _: facts["parts"]["layers"][0].update(origin="3"),
    "fewer layers": lambda facts, _: facts["parts"]["layers"].pop(),
    "another kind": lambda facts, _: facts["parts"]["layers"][0].update(kind="StreamingLayer"),
    "another storage": lambda facts, _: facts["made"].update(dtype="float16"),
    "no storage": lambda facts, _: facts["made"].update(dtype="int33"),
    "an unknown option": lambda facts, _: facts["made"].update(speed=3),
    "no parts": lambda facts, _: facts.pop("parts"),
    "a tensor too many": lambda _, tensors: tensors.update(other=tensors["layers.0.k"]),
    "a tensor too few": lambda _, tensors: tensors.pop("layers.1.k_scale"),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_file_that_lies_is_refused(arch, what, tmp_path):
    model, path = build(), tmp_path / "a.safetensors"
    cache = TikvCache(model.config, dtype="int8")
    read(model, cache, torch.tensor([[4, 5, 6, 7]]))
    cache.save(path)
    changed(path, lambda facts, tensors: None)
    assert TikvCache.load(path, model.config).get_seq_length() == 4
    changed(path, WRONG[what])
    with pytest.raises(tikv.CacheFileError, match=r"TikvCache\.load"):
        TikvCache.load(path, model.config)


def test_wrong_files_and_configurations_are_refused(arch, tmp_path):
    model, path = build(), tmp_path / "a.safetensors"
    cache = TikvCache(model.config)
    read(model, cache, torch.tensor([[4, 5, 6, 7]]))
    cache.save(path)
    for more, field in (({"num_key_value_heads": 4}, "num_key_value_heads=2"), ({"num_hidden_layers": 3}, "layers=2")):
        with pytest.raises(tikv.CacheFileError, match=rf"{field}, and config says"):
            TikvCache.load(path, build(**more).config)
    with pytest.raises(tikv.CacheFileError, match="model_type=llama"):
        TikvCache.load(path, transformers.MistralConfig(**{**BASE, "num_hidden_layers": 2}))
    with pytest.raises(tikv.OptionError, match="is not a configuration"):
        TikvCache.load(path, {"num_hidden_layers": 2})
    with pytest.raises(tikv.CacheFileError, match="there is no file"):
        TikvCache.load(tmp_path / "b.safetensors", model.config)
    with pytest.raises(tikv.CacheFileError, match=r"does not end in \.safetensors"):
        cache.save(tmp_path / "a.bin")
    store = tikv.KVCacheStore(num_layers=2, num_kv_heads=2, head_dim=8, capacity=4)
    store.save(tmp_path / "store.safetensors")
    with pytest.raises(tikv.CacheFileError, match="holds KVCacheStore, not a TikvCache"):
        TikvCache.load(tmp_path / "store.safetensors", model.config)
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)
    with pytest.raises(tikv.CacheFileError, match="is damaged"):
        TikvCache.load(path, model.config)


def test_half_set_keys_are_not_saved_and_an_old_file_stays(arch, tmp_path):
    model, path = build(), tmp_path / "a.safetensors"
    cache = TikvCache(model.config)
    read(model, cache, torch.tensor([[4, 5, 6, 7]]))
    cache.save(path)
    before = path.read_bytes()
    cache.layers[0].keys = torch.zeros(1, 2, 2, 8)
    with pytest.raises(tikv.ShapeError, match="Set the other one too"):
        cache.save(path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]
    assert set(load_file(path)) == {f"layers.{i}.{part}" for i in range(2) for part in "kv"}
    assert json.loads(json.dumps(cache._made)) == cache._made


STATES = {
    "beside keys": ("FalconH1ForCausalLM", {}),
    "instead of keys": ("Qwen3NextForCausalLM", {"dtype": "int8"}),
    "of the last tokens": ("Lfm2ForCausalLM", {"max_cache_len": 64}),
    "beside a stream": ("FalconH1ForCausalLM", {"window": 7, "sinks": 2}),
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", STATES)
def test_a_model_with_states_goes_on(arch, tmp_path, case, dtype):
    name, options = STATES[case]
    if VERSION < (5, 19):
        pytest.skip("this transformers has no layers for states")
    model, path = (
        tiny_models.tiny_model(getattr(transformers, name)).to(getattr(torch, dtype)),
        tmp_path / "a.safetensors",
    )
    ids = torch.randint(12, 60, (2, 9), generator=torch.Generator().manual_seed(1))
    cache = TikvCache(model.config, **options)
    read(model, cache, ids)
    cache.save(path)
    loaded = TikvCache.load(path, model.config)
    parts = ids.flip(1).split(1, dim=1)
    assert torch.equal(read(model, loaded, *parts), read(model, cache, *parts))
    loaded.save(path)
    assert TikvCache.load(path, model.config).get_seq_length() == 18


def changed_state(what, state):
    if what == "shape":
        state["shapes"]["conv.0"][1] += 1
    elif what == "an unknown state":
        state["shapes"]["conv.7"] = state["shapes"]["conv.0"]
    elif what == "no tensor":
        state["shapes"]["recurrent.1"] = [2, 2]
    elif what == "a short kernel":
        state["kernels"][0] = 10**6
    else:
        state["seen"] = what


@pytest.mark.parametrize("what", ["shape", "an unknown state", "no tensor", "a short kernel", [1], [], "no state"])
def test_a_file_whose_states_are_impossible(arch, tmp_path, what):
    if VERSION < (5, 19):
        pytest.skip("this transformers has no layers for states")
    model, path = tiny_models.tiny_model(transformers.Lfm2ForCausalLM), tmp_path / "a.safetensors"
    cache = TikvCache(model.config)
    read(model, cache, torch.tensor([[12, 13, 14]]))
    cache.save(path)
    tensors, metadata = files.read(path, "TikvCache", "test", lambda *_: None)
    said = next(layer for layer in metadata["parts"]["layers"] if layer and "state" in layer)
    if what == "no state":
        del said["state"]
    else:
        changed_state(what, said["state"])
    files.write(path, "TikvCache", tensors, metadata, "test")
    with pytest.raises(tikv.CacheFileError):
        TikvCache.load(path, model.config)


def test_the_keys_of_an_indexer_are_not_saved(arch, tmp_path):
    if not hasattr(transformers, "DeepseekV32ForCausalLM"):
        pytest.skip("this transformers has no DeepSeek V3.2")
    cache = TikvCache(tiny_models.tiny_model(transformers.DeepseekV32ForCausalLM).config)
    with pytest.raises(tikv.OptionError, match="layer 0 keeps keys of an indexer, which cannot be saved"):
        cache.save(tmp_path / "a.safetensors")
    assert not list(tmp_path.iterdir())


def test_layers_with_heads_of_their_own(arch, tmp_path):
    """Gemma 4's layers that attend in full are wider: the configuration has no one width, and says so by raising."""
    if not hasattr(transformers, "Gemma4TextConfig"):
        pytest.skip("this transformers has no Gemma 4")
    model, path = tiny_models.tiny_model(transformers.Gemma4ForCausalLM), tmp_path / "a.safetensors"
    parts = torch.tensor([[12, 13, 14, 15, 16, 17, 18]]), torch.tensor([[19]])
    cache = TikvCache(model.config)
    read(model, cache, parts[0])
    cache.save(path)
    loaded = TikvCache.load(path, model.config)
    assert torch.equal(read(model, loaded, parts[1]), read(model, cache, parts[1]))
    other = copy.deepcopy(model.config)
    other.get_text_config().per_layer_config = {1: {"head_dim": 24}}
    with pytest.raises(tikv.CacheFileError, match="head_dim="):
        TikvCache.load(path, other)
