"""TikvCache whose keys are by channel over groups of tokens, as a store and as a plain cache of the same codes."""

import copy

import numpy as np
import oracle
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from model_cache import given  # noqa: E402
from transformers import cache_utils  # noqa: E402

import tikv  # noqa: E402
from tikv import reference  # noqa: E402
from tikv.integrations.transformers import TikvCache  # noqa: E402
from tikv.stores import files  # noqa: E402

pytestmark = [pytest.mark.archs("cpu"), pytest.mark.filterwarnings("default")]

WINDOW, WIDTH = 45, 64
QUANT = tikv.Quant(4, 32, "tokens", 32)


def config(**more):
    return transformers.Gemma3TextConfig(
        vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=WIDTH, query_pre_attn_scalar=8, max_position_embeddings=256, pad_token_id=0,
        bos_token_id=1, eos_token_id=None, sliding_window=WINDOW,
        layer_types=["sliding_attention", "full_attention"], **more,
    )  # fmt: skip


def rows(rng, tokens, dtype, batch=1):
    return [torch.from_numpy(oracle.numbers(rng, (batch, 2, tokens, WIDTH), np.float32)).to(dtype) for _ in "kv"]


@pytest.mark.parametrize("values", [None, "float16", tikv.Quant(8, 32)], ids=str)
def test_layers_hold_what_a_store_does(arch, rng, set_room, values):
    """However often room is made, and whole groups let go of by a window; cropped, copied and selected."""
    set_room(rollback=2, spare=4, first=4)
    cache = TikvCache(config(), dtype=QUANT, v_dtype=values)
    form = {"num_layers": 1, "num_kv_heads": 2, "head_dim": WIDTH, "capacity": 400}
    store = tikv.KVCacheStore(**form, dtype=QUANT, v_dtype=values)
    dropped = []
    for tokens in (50, 1, 1, 30, 1, 70, 3, 1, 1, 40, *[1] * 40):
        k, v = rows(rng, tokens, torch.float16)
        store.append(0, k, v, layout="head_major")
        seen = [cache.update(k, v, layer) for layer in range(2)]
        if tokens == 3:
            cache.crop(-2)
            store.trim(2)
            continue
        want = [a.torch().to(torch.float16) for a in store.tokens(0)]
        for layer, span in enumerate((WINDOW - 1 + tokens, store.length)):
            for got, held in zip(seen[layer], want, strict=True):
                assert got.dtype is torch.float16
                assert torch.equal(got, held[:, :, -span:])
        dropped.append(cache.layers[0].store.origin)
        assert cache.layers[1].store.quantised == store.quantised(0)
    assert dropped[-1] >= 96
    assert all(n % 32 == 0 for n in dropped)
    twin = copy.deepcopy(cache)
    twin.batch_repeat_interleave(2)
    for layer in range(2):
        k, v = rows(rng, 33, torch.float16, 2)
        found = twin.update(k, v, layer)
        assert found[0].shape[0] == 2
        assert torch.equal(found[0][0, :, -64:-33], found[0][1, :, -64:-33])
    for got, held in zip((cache.layers[1].keys, cache.layers[1].values), want, strict=True):
        assert torch.equal(got, held)
    assert "of them codes" in repr(cache.layers[1])


class PlainLayer(cache_utils.DynamicLayer):
    """A layer that keeps all rows as they came, and gives for older ones what the codes of NumPy stand for."""

    coded = 0
    window = None

    def update(self, key_states, value_states, *args, **kwargs):
        k, v = super().update(key_states, value_states)
        n, group = k.shape[2], QUANT.group
        while n - self.coded > QUANT.residual + group:
            self.coded += group
        k, v = k.clone(), v.clone()
        if self.coded:
            old = k[:, :, : self.coded].numpy()
            b, h, _, d = old.shape
            by_channel = np.ascontiguousarray(old.reshape(b, h, -1, group, d).swapaxes(3, 4))
            numbers = through_codes(by_channel).swapaxes(3, 4).reshape(old.shape)
            k[:, :, : self.coded] = torch.from_numpy(np.ascontiguousarray(numbers))
            v[:, :, : self.coded] = torch.from_numpy(through_codes(v[:, :, : self.coded].numpy()))
        return k, v


def through_codes(a):
    codes, scales, biases = reference.quantize_groups(np.ascontiguousarray(a), 4, 32, "affine", np.float16)
    return reference.dequantize_groups(codes, scales, biases, 4, "affine")


def plain_cache(layers):
    found = cache_utils.DynamicCache()
    found.layers = [PlainLayer() for _ in range(layers)]
    return found


def llama(implementation="sdpa"):
    torch.manual_seed(0)
    made = transformers.LlamaConfig(
        vocab_size=61, hidden_size=64, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=512, pad_token_id=0, bos_token_id=1,
        eos_token_id=None, initializer_range=0.3,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(made).eval()
    model.set_attn_implementation(implementation)
    return model


@pytest.mark.parametrize("limit", [None, 200], ids=["growing", "of fixed room"])
@pytest.mark.parametrize("implementation", ["sdpa", "tikv"])
def test_text_is_that_of_a_plain_cache_of_the_same_codes(arch, rng, implementation, limit):
    """Prompts of two texts, one padded, and 40 tokens, in which groups become codes."""
    prompt = torch.from_numpy(rng.integers(2, 61, (2, 90)))
    mask = torch.ones_like(prompt)
    prompt[0, :7], mask[0, :7] = 0, 0
    options = {"attention_mask": mask, "max_new_tokens": 40, "do_sample": False}
    want = llama().generate(prompt, **given(plain_cache(2)), **options)
    model = llama(implementation)
    cache = TikvCache(model.config, dtype=QUANT, max_cache_len=limit)
    assert not cache.is_compileable
    assert torch.equal(model.generate(prompt, **given(cache), **options), want)
    assert cache.layers[1].store.quantised == 96
    if implementation == "tikv":
        assert torch.equal(want, model.generate(prompt, **given(TikvCache(model.config, dtype=QUANT)), **options))


def test_beams_and_assisted_decoding(arch, rng):
    prompt = torch.from_numpy(rng.integers(2, 61, (1, 70)))
    model = llama("tikv")
    options = {"max_new_tokens": 30, "do_sample": False}
    want = llama().generate(prompt, num_beams=3, **given(plain_cache(2)), **options)
    cache = TikvCache(model.config, dtype=QUANT)
    assert torch.equal(model.generate(prompt, num_beams=3, **given(cache), **options), want)
    alone = model.generate(prompt, **given(TikvCache(model.config, dtype=QUANT)), **options)
    torch.manual_seed(1)
    helper = transformers.LlamaForCausalLM(model.config).eval()
    for assistant in (model, helper):  # whose drafts are taken, or not
        cache = TikvCache(model.config, dtype=QUANT)
        found = model.generate(prompt, **given(cache), assistant_model=assistant, **options)
        assert torch.equal(found[:, :80], alone[:, :80])


@pytest.mark.parametrize("values", [None, "int8"], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_saved_cache_goes_on(arch, rng, tmp_path, values, dtype):
    """Full and sliding layers, after a window let go of groups and after a crop to whole groups: every bit."""
    of_model, path = config(), tmp_path / "text.safetensors"
    cache = TikvCache(of_model, dtype=QUANT, v_dtype=values)
    for tokens in (3, 97, -68, 149):
        if tokens < 0:
            cache.crop(tokens)
        for layer in range(2) if tokens > 0 else ():
            cache.update(*rows(rng, tokens, dtype), layer)
        cache.save(path)
        found = TikvCache.load(path, of_model)
        assert repr(found) == repr(cache)
        more = [rows(rng, 70, dtype) for _ in range(2)]
        for a, b, (k, v) in zip(found.layers, copy.deepcopy(cache).layers, more, strict=True):
            assert (a.get_seq_length(), a.store.quantised) == (b.get_seq_length(), b.store.quantised)
            for new in ([], [k[:, :, :1], v[:, :, :1]], [k[:, :, 1:], v[:, :, 1:]]):
                if new:
                    a.update(*new)
                    b.update(*new)
                assert torch.equal(a.keys, b.keys)
                assert torch.equal(a.values, b.values)
        cache = TikvCache.load(path, of_model)


@pytest.mark.parametrize(
    "change",
    [
        lambda layer, made: layer.update(coded=33),
        lambda layer, made: layer.update(coded=0),
        lambda layer, made: layer.update(length=101),
        lambda layer, made: layer.update(capacity=2**50),
        lambda layer, made: layer["form"].update(head_dim=2**40),
        lambda layer, made: layer["form"].pop("head_dim_v"),
        lambda layer, made: made["dtype"].update(residual=0),
        lambda layer, made: made["dtype"].update(axis="head_dim"),
        lambda layer, made: made["dtype"].update(speed=1),
    ],
)
def test_a_file_that_lies_is_refused(arch, rng, tmp_path, change):
    cache, path = TikvCache(config(), dtype=QUANT), tmp_path / "text.safetensors"
    for layer in range(2):
        cache.update(*rows(rng, 100, torch.float32), layer)
    cache.save(path)
    tensors, facts = files.read(path, "TikvCache", "test")
    change(facts["parts"]["layers"][1], facts["made"])
    files.write(path, "TikvCache", tensors, facts, "test")
    with pytest.raises(tikv.CacheFileError, match=r"TikvCache\.load"):
        TikvCache.load(path, config())


@pytest.mark.parametrize("values", [None, "float16"], ids=str)
def test_a_full_layer_keeps_whole_groups_of_each_head(arch, rng, tmp_path, values):
    """As a store does: then it goes on, also from a file and as a copy, and drops no token that it lacks."""
    cache = TikvCache(config(), dtype=QUANT, v_dtype=values)
    form = {"num_layers": 1, "num_kv_heads": 2, "head_dim": WIDTH, "capacity": 400, "batch_size": 2}
    store = tikv.KVCacheStore(**form, dtype=QUANT, v_dtype=values)

    def append(tokens, *caches):
        k, v = rows(rng, tokens, torch.float16, 2)
        store.append(0, k, v, layout="head_major")
        for each in caches:
            for layer in range(2):
                each.update(k, v, layer)

    def check(found):
        layer = found.layers[1]
        assert (layer.get_seq_length(), layer.store.length) == (store.length, store.held(0))
        for got, held in zip((layer.keys, layer.values), store.tokens(0), strict=True):
            assert torch.equal(got, held.torch().to(torch.float16))

    append(150, cache)
    groups = {number: [*range(32 * number, 32 * number + 32)] for number in range(3)}
    keep = np.array([[[*groups[0], *groups[2], *range(97, 150, 2)], [*groups[1], *groups[2], *range(123, 150)]]] * 2)
    store.compact(0, keep)
    cache.layers[1].compact(torch.from_numpy(keep))
    check(cache)
    with pytest.raises(tikv.PositionError, match=r"cannot go back beyond position 148.*Drop at most 1"):
        cache.crop(-2)
    check(cache)
    append(50, cache)
    check(cache)
    cache.save(tmp_path / "cache.safetensors")
    both = [TikvCache.load(tmp_path / "cache.safetensors", config()), copy.deepcopy(cache)]
    for found in both:
        check(found)
        with pytest.raises(tikv.PositionError, match="cannot go back beyond position 148"):
            found.layers[1].crop(-60)
    append(40, cache, *both)
    for found in (cache, *both):
        check(found)
    held = np.arange(store.held(0))
    few = np.broadcast_to(held[-5:], (2, 2, 5))
    store.compact(0, few)
    before = cache.layers[1].store.nbytes
    cache.layers[1].compact(few)
    assert cache.layers[1].store.nbytes <= before
    check(cache)
    cache.reset()
    append_none = cache.layers[1].store
    assert (append_none.length, append_none.end, append_none.whole_from) == (0, 0, 0)


def test_what_is_refused(arch, tmp_path):
    for more, match in (
        ({"window": 40}, "overwrites single tokens"),
        ({"place": "host"}, "share no scales"),
        ({"v_dtype": QUANT}, "groups along tokens"),
        ({"k_scale": 2.0}, "k_scale"),
    ):
        with pytest.raises(tikv.OptionError, match=match):
            TikvCache(config(), dtype=QUANT, **more)
    with pytest.raises(tikv.OptionError, match="an encoder"):
        TikvCache(transformers.T5Config(num_layers=1, num_decoder_layers=1), dtype=QUANT)
    cache = TikvCache(config(), dtype=QUANT, max_cache_len=200)
    assert "counts which of them did" in cache.why_not_compiled()
    k, v = rows(np.random.default_rng(0), 100, torch.float32)
    for layer in range(2):
        cache.update(k, v, layer)
    with pytest.raises(tikv.PositionError, match="cannot keep 1 of its tokens 0 to 31, which share scales"):
        cache.layers[1].compact([[0]])
    with pytest.raises(tikv.OptionError, match="only on layers with full attention"):
        cache.layers[0].compact([[0]])
    with pytest.raises(tikv.PositionError, match="for whole groups"):
        cache.crop(-50)
    assert cache.get_seq_length() == 100
    cache.crop(-60 - 8)
    assert [layer.get_seq_length() for layer in cache.layers] == [32, 32]
    with pytest.raises(tikv.CapacityError, match="200"):
        cache.update(*rows(np.random.default_rng(0), 169, torch.float32), 1)
