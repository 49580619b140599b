"""Models whose layers choose keys by an indexer: text as of attention under a mask, from the chosen rows alone."""

import copy
import types

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

import family_settings as settings  # noqa: E402
import family_verdicts as verdicts  # noqa: E402
import tiny_models  # noqa: E402
from model_cache import given  # noqa: E402
from transformers import DynamicCache  # noqa: E402

import tikv  # noqa: E402
from tikv.integrations.transformers import TikvCache  # noqa: E402
from tikv.integrations.transformers.attention import attend as attention  # noqa: E402
from tikv.integrations.transformers.attention import chosen, latents  # noqa: E402
from tikv.integrations.transformers.layers.indexed import IndexedLayer, IndexerKeys  # noqa: E402
from tikv.integrations.transformers.memory.stored import StoredTensor  # noqa: E402

pytestmark = [
    pytest.mark.archs("cpu"),
    pytest.mark.filterwarnings("default"),
    pytest.mark.usefixtures("one_thread"),
]

# Each family's class, and how it says which keys it chose.
BY_NUMBER = {
    "axk2": "AXK2ForCausalLM",
    "deepseek_v32": "DeepseekV32ForCausalLM",
    "dots3_note": "Dots3NoteForCausalLM",
    "glm_moe_dsa": "GlmMoeDsaForCausalLM",
    "hy_v4": "HYV4ForCausalLM",
    "hy_v4_vl": "HYV4VLForConditionalGeneration",
    "mistral_large4": "MistralLarge4ForConditionalGeneration",
}
BY_BLOCK = {"minimax_m3_vl": "MiniMaxM3VLForCausalLM"}
BY_MASK = {"glm5_next": "Glm5NextForConditionalGeneration", "qwen4_exp": "Qwen4ExpForCausalLM"}
FAMILIES = {**BY_NUMBER, **BY_BLOCK, **BY_MASK}
LATENT = {*BY_NUMBER, "glm5_next"}
PROMPT, NEW = 40, 12


def model_of(family, **changes):
    if family not in tiny_models.folders():
        pytest.skip(f"transformers {transformers.__version__} has no {family}")
    cls = next(cls for cls in tiny_models.generators(family) if cls.__name__ == FAMILIES[family])
    config = tiny_models.tiny_config(cls)
    text = config.get_text_config(decoder=True)
    for name, value in changes.items():
        if hasattr(text, name):
            setattr(text, name, value)
    torch.manual_seed(0)
    model = cls(config).float().eval()
    tiny_models.enlarge(model, 0)
    try:
        TikvCache(model.config)
    except tikv.OptionError as error:
        pytest.skip(f"transformers {transformers.__version__}: {error}")  # of states, which older versions do not tell
    return model


def ids(rows, tokens, seed=1):
    numbers = torch.Generator().manual_seed(seed)
    return torch.randint(tiny_models.ORDINARY.start, tiny_models.ORDINARY.stop, (rows, tokens), generator=numbers)


def padded(rows, tokens):
    """Prompts padded on the left, of three lengths, and their mask."""
    mask = torch.ones(rows, tokens, dtype=torch.long)
    for row in range(1, rows):
        mask[row, : 7 * row] = 0
    return {"input_ids": torch.where(mask.bool(), ids(rows, tokens), 1), "attention_mask": mask}


def text_of(model, cache, inputs, **options):
    with torch.no_grad():
        return model.generate(
            **inputs, **given(cache), do_sample=False, max_new_tokens=NEW, eos_token_id=None, pad_token_id=0,
            return_dict_in_generate=True, output_logits=True, **options,
        )  # fmt: skip


@torch.no_grad()
def step(model, tokens, cache):
    return model(tokens, **given(cache), use_cache=True).logits[:, -1]


def assert_alike(got, want, near=1e-4):
    assert torch.equal(got.sequences, want.sequences)
    for a, b in zip(got.logits, want.logits, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=near * float(b.std()))


class Seen:
    """What `chosen_keys` said of each call of attention, while a test runs."""

    def __init__(self, monkeypatch):
        self.calls = []
        before = attention.chosen_keys

        def chosen_keys(module, query, key, mask, causal, said, keywords):
            numbers = before(module, query, key, mask, causal, said, keywords)
            of_latents = latents.made_of_latents(key)
            self.calls.append((getattr(module, "layer_idx", None), query.shape[2], numbers, of_latents))
            return numbers

        monkeypatch.setattr(attention, "chosen_keys", chosen_keys)

    def steps(self):
        """(layer, numbers, whether keys were latents yet) of single tokens."""
        return [(layer, numbers, lazy) for layer, tokens, numbers, lazy in self.calls if tokens == 1]


@pytest.mark.parametrize("family", FAMILIES)
def test_text_is_that_of_attention_under_a_mask(family, arch, monkeypatch):
    """A prompt of which few keys are chosen, padded on the left, and single tokens."""
    model = model_of(family)
    inputs = padded(3, PROMPT) if family != "minimax_m3_vl" else {"input_ids": ids(3, PROMPT)}  # shifts its blocks
    want = text_of(model, DynamicCache(config=model.config.get_text_config(decoder=True)), inputs)
    with settings.attention(model, "tikv"):
        text_of(model, TikvCache(model.config), inputs)  # the first call of a class has keys already
        seen = Seen(monkeypatch)
        got = text_of(model, TikvCache(model.config), inputs)
    assert_alike(got, want)
    held = PROMPT + NEW - 1
    indexed = [call for call in seen.steps() if call[1] is not None]
    assert indexed
    assert all(numbers.shape[-1] < held / 2 for _, numbers, _ in indexed)
    assert all(lazy == (family in LATENT) for _, _, lazy in indexed)


@pytest.mark.parametrize("family", ["minimax_m3_vl", "deepseek_v32"])
def test_padding_and_chunks(family, arch):
    """Blocks count from the first slot, padding included, so the mask is of the same padded batch."""
    model = model_of(family)
    inputs = padded(3, PROMPT)
    want = text_of(model, DynamicCache(config=model.config), inputs)
    tokens, cache, dense = ids(2, PROMPT + 9), TikvCache(model.config), DynamicCache(config=model.config)
    with settings.attention(model, "tikv"):
        assert_alike(text_of(model, TikvCache(model.config), inputs), want)
        ends = (11, PROMPT - 3, PROMPT, PROMPT + 1, PROMPT + 4, PROMPT + 9)
        got = [step(model, tokens[:, a:b], cache) for a, b in zip((0, *ends), ends, strict=False)]
    for a, b, x in zip((0, *ends), ends, got, strict=False):
        y = step(model, tokens[:, a:b], dense)
        torch.testing.assert_close(x, y, rtol=0, atol=1e-4 * float(y.std()))


@pytest.mark.parametrize("family", ["deepseek_v32", "qwen4_exp"])
def test_a_prompt_of_which_many_keys_are_chosen_goes_under_a_mask(family, arch, monkeypatch):
    changes = {"index_topk": 24, "indexer_budget": 24}
    model = model_of(family, **changes)
    want = text_of(model, DynamicCache(config=model.config), {"input_ids": ids(2, PROMPT)})
    seen = Seen(monkeypatch)
    with settings.attention(model, "tikv"):
        got = text_of(model, TikvCache(model.config), {"input_ids": ids(2, PROMPT)})
    assert_alike(got, want)
    prompts = [numbers for _, tokens, numbers, _ in seen.calls if tokens == PROMPT]
    assert prompts
    assert all(numbers is None for numbers in prompts)


def test_layers_that_take_the_choice_of_another(arch):
    """Only some layers have an indexer; transformers hands their choice on."""
    model = model_of("glm_moe_dsa", indexer_types=["full", "shared"])
    assert model.model.layers[1].self_attn.indexer is None
    inputs = padded(2, PROMPT)
    want = text_of(model, DynamicCache(config=model.config), inputs)
    with settings.attention(model, "tikv"):
        cache = TikvCache(model.config)
        assert_alike(text_of(model, cache, inputs), want)
    assert cache.layers[0].indexer_keys is not None
    assert cache.layers[1].indexer_keys is None


WIDE = {"kv_lora_rank": 32, "qk_rope_head_dim": 32, "head_dim": 32, "index_head_dim": 32}  # as groups want it
FORMATS = {
    "int8": {"dtype": "int8"},
    "float16": {"dtype": "float16"},
    "float8": {"dtype": "float8_e4m3fn", "v_dtype": "float8_e5m2"},
    "scaled": {"dtype": "float8_e4m3fn", "k_scale": 0.5, "v_scale": 0.25},
    "groups": {"dtype": tikv.Quant(8, group=32)},
    "mixed": {"dtype": tikv.Quant(4, group=32), "v_dtype": "float16"},
}


OFTEN = ("int8", "groups")  # with rows of other widths


@pytest.mark.parametrize(
    ("family", "format"),
    [
        *[("deepseek_v32", name) for name in FORMATS],
        *[pytest.param("minimax_m3_vl", name, marks=() if name in OFTEN else pytest.mark.full) for name in FORMATS],
    ],
)
def test_text_in_each_format_is_that_of_the_same_cache_under_a_mask(family, format, arch, monkeypatch):
    model = model_of(family, **WIDE)
    inputs = {"input_ids": ids(2, PROMPT)}
    want = text_of(model, TikvCache(model.config, **FORMATS[format]), inputs)
    seen = Seen(monkeypatch)
    with settings.attention(model, "tikv"):
        cache = TikvCache(model.config, **FORMATS[format])
        assert_alike(text_of(model, cache, inputs), want, 0.05)
    assert any(numbers is not None for _, numbers, _ in seen.steps())


def spoil(layer, keep):
    """Let all rows that a layer holds be NaN, but for those of the tokens that each head of each sequence keeps."""
    held = layer.get_seq_length()
    store = layer.store
    for rows, scales in zip((store.keys, store.values), store.scales, strict=True):
        rows, scales = rows.torch(), None if scales is None else scales.torch()
        for b, h in np.ndindex(*rows.shape[:2]):
            kept = keep[b, min(h, keep.shape[1] - 1)].flatten().tolist()
            gone = [i for i in range(held) if i not in kept]
            if scales is not None:
                scales[b, h, gone] = float("nan")
            elif rows.element_size() == 1:
                rows.view(torch.uint8)[b, h, gone] = 0x7F
            else:
                rows[b, h, gone] = float("nan")


@pytest.mark.parametrize(
    ("family", "format"),
    [
        *[(family, None) for family in FAMILIES],
        ("deepseek_v32", "int8"),
        ("deepseek_v32", "groups"),
        ("minimax_m3_vl", "int8"),
        ("minimax_m3_vl", "groups"),
    ],
)
def test_a_step_reads_nothing_of_the_rows_that_were_not_chosen(family, format, arch, monkeypatch):
    """All others are NaN before the step: those of its choice are known from the same step of a copy."""
    model = model_of(family, **(WIDE if format == "groups" else {}))
    tokens = ids(2, PROMPT + 1)
    options = FORMATS[format] if format else {}
    with settings.attention(model, "tikv"):
        cache = TikvCache(model.config, **options)
        step(model, tokens[:, :PROMPT], cache)
        step(model, tokens[:, :1], copy.deepcopy(cache))  # after which the class leaves latents as they are
        seen = Seen(monkeypatch)
        want = step(model, tokens[:, PROMPT:], copy.deepcopy(cache))
        spoiled = 0
        for layer, numbers, _ in seen.steps():
            if numbers is not None and isinstance(cache.layers[layer], IndexedLayer):
                keep = numbers if numbers.ndim == 4 else numbers[:, None]
                spoil(cache.layers[layer], keep)
                spoiled += 1
        assert spoiled == sum(isinstance(layer, IndexedLayer) for layer in cache.layers) > 0
        dense = copy.deepcopy(cache)
        got = step(model, tokens[:, PROMPT:], cache)
    assert torch.equal(got, want)
    assert bool(got.isfinite().all())
    assert bool(step(model, tokens[:, PROMPT:], dense).isnan().any())  # under a mask all rows are read


@pytest.mark.parametrize("family", ["deepseek_v32", "minimax_m3_vl"])
def test_keys_of_the_indexer_are_taken_back_and_reordered_with_the_rows(family, arch):
    model = model_of(family)
    tokens = ids(2, PROMPT + 6)
    swapped = tokens[[1, 1]]
    want = DynamicCache(config=model.config)
    step(model, swapped[:, :PROMPT], want)
    with settings.attention(model, "tikv"):
        cache = TikvCache(model.config)
        step(model, tokens[:, :PROMPT], cache)
        for _ in range(2):
            for i in range(3):
                step(model, ids(2, 1, seed=5 + i), cache)
            cache.crop(-3)
        cache.crop(0)
        cache.reorder_cache(torch.tensor([1, 1]))
        layer = next(layer for layer in cache.layers if isinstance(layer, IndexedLayer))
        assert layer.indexer_keys.shape[:2] == (2, PROMPT)
        indexers = [layer._indexer._memory for layer in cache.layers if isinstance(layer, IndexedLayer)]
        held = sum(layer.store.nbytes for layer in cache.layers) + sum(memory.nbytes for memory in indexers)
        assert cache.nbytes == held > sum(memory.nbytes for memory in indexers) > 0
        twin = copy.deepcopy(cache)
        cache.batch_repeat_interleave(2)
        cache.batch_select_indices(torch.tensor([3, 0]))
        for i in range(PROMPT, PROMPT + 6):
            a, b, c = (step(model, swapped[:, i : i + 1], one) for one in (cache, twin, want))
            torch.testing.assert_close(a, c, rtol=0, atol=1e-4 * float(c.std()))
            torch.testing.assert_close(b, c, rtol=0, atol=1e-4 * float(c.std()))


@pytest.mark.parametrize("family", ["deepseek_v32", "minimax_m3_vl"])
def test_assisted_decoding_and_beams(family, arch):
    """Several new tokens at once, of which some are taken back; beams that are chosen anew with each token."""
    model = model_of(family)
    prompt = {"input_ids": torch.cat([ids(1, 12)] * 3, 1)}
    options = {"num_beams": 3, "early_stopping": True}
    want = text_of(model, DynamicCache(config=model.config), prompt)
    beams = text_of(model, DynamicCache(config=model.config), prompt, **options)
    with settings.attention(model, "tikv"):
        cache = TikvCache(model.config)
        got = text_of(model, cache, prompt, prompt_lookup_num_tokens=3)
        assert torch.equal(got.sequences, want.sequences)
        layer = next(layer for layer in cache.layers if isinstance(layer, IndexedLayer))
        assert layer.indexer_keys.shape[1] == layer.get_seq_length() > 36
        assert torch.equal(text_of(model, TikvCache(model.config), prompt, **options).sequences, beams.sequences)


def hooked(module, scale):
    return module.register_forward_hook(lambda m, given, out: out * scale)


def test_what_stands_between_latents_and_keys_is_not_passed_over(arch, monkeypatch):
    """A hook, a bias, another linear layer or another method: then keys and values are made as the model says."""
    model = model_of("deepseek_v32")
    prompt = {"input_ids": ids(2, PROMPT)}
    module = model.model.layers[0].self_attn
    with settings.attention(model, "tikv"):
        step(model, prompt["input_ids"], TikvCache(model.config))

    def compare():
        want = text_of(model, DynamicCache(config=model.config), prompt)
        seen = Seen(monkeypatch)
        with settings.attention(model, "tikv"):
            assert_alike(text_of(model, TikvCache(model.config), prompt), want)
        monkeypatch.undo()
        return {layer: lazy for layer, _, lazy in seen.steps()}, want

    assert compare()[0] == {0: True, 1: True}
    _, plain = compare()
    hook = hooked(module.kv_b_proj, 3.0)
    kept, changed = compare()
    hook.remove()
    assert kept == {0: False, 1: True}
    assert not torch.equal(changed.logits[0], plain.logits[0])
    linear = module.kv_b_proj
    torch.manual_seed(1)
    module.kv_b_proj = torch.nn.Linear(linear.in_features, linear.out_features, bias=True)
    assert compare()[0] == {0: False, 1: True}
    module.kv_b_proj = torch.nn.Sequential(linear)
    assert compare()[0] == {0: False, 1: True}
    module.kv_b_proj = linear

    class Other(type(module)):
        def expand_kv(self, kv_nope, k_rot):
            keys, values = super().expand_kv(kv_nope, k_rot)
            return keys.flip(-1), values * 2

    module.__class__ = Other
    with settings.attention(model, "tikv"):
        step(model, prompt["input_ids"], TikvCache(model.config))
    kept, changed = compare()
    assert kept == {0: False, 1: True}
    assert not torch.equal(changed.logits[0], plain.logits[0])


def test_keys_that_something_else_uses_are_made(arch):
    """Whoever asks for numbers of them gets the model's."""
    model = model_of("deepseek_v32")
    module = model.model.layers[0].self_attn
    kv, rot = torch.randn(2, 1, 5, model.config.kv_lora_rank), torch.randn(2, 1, 5, model.config.qk_rope_head_dim)
    with torch.no_grad():
        want = module.expand_kv(kv, rot)
        latents.keep_latents(type(module))
        assert not isinstance(module.expand_kv(kv, rot)[0], StoredTensor)  # another attention than "tikv"
        with settings.attention(model, "tikv"):
            got = module.expand_kv(kv, rot)
    assert all(isinstance(a, StoredTensor) for a in got)
    assert [a.shape for a in got] == [a.shape for a in want]
    assert all(torch.equal(a + 0, b) for a, b in zip(got, want, strict=True))
    assert latents.latents_of(*got) is None
    query = torch.randn(2, want[0].shape[1], 1, want[0].shape[3])
    with torch.no_grad(), settings.attention(model, "tikv"):  # in a layer that sees all keys and chooses none
        out, _ = attention.attend(module, query, *module.expand_kv(kv, rot), None)
    everything = torch.ones(2, query.shape[1], 1, 5, dtype=torch.bool)
    torch.testing.assert_close(out, dense(query, *want, everything, query.shape[3] ** -0.5).float(), rtol=0, atol=1e-5)
    with settings.attention(model, "tikv"):
        with_gradient = module.expand_kv(kv, rot)
    assert with_gradient[0].requires_grad
    assert not isinstance(with_gradient[0], StoredTensor)


def dense(query, key, value, seen, scale):
    """Attention in float64 to the keys that (batch, heads, T, n) bools let through."""
    groups = query.shape[1] // key.shape[1]
    k, v = (a.double().repeat_interleave(groups, 1) for a in (key, value))
    scores = (query.double() @ k.mT * scale).masked_fill(~seen, float("-inf"))
    return (scores.softmax(-1).nan_to_num() @ v).transpose(1, 2)


class Blocks:
    """An indexer that chooses blocks."""

    block_size = 4

    def build_block_mask(self, *args):
        raise AssertionError("it is not asked where rows are read")


@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize("told", ["indices", "block_indices", "a mask"])
@pytest.mark.parametrize("masked", ["not", "bools", "numbers"])
def test_each_way_to_say_it_under_each_mask(tokens, told, masked, arch):
    torch.manual_seed(0)
    batch, heads, kv_heads, held, width = 2, 4, 2, 31, 8
    query, key, value = (
        torch.randn(batch, h, t, width) for h, t in ((heads, tokens), (kv_heads, held), (kv_heads, held))
    )
    module = types.SimpleNamespace(indexer=Blocks(), is_causal=True, masked_key_indices=None)
    newest = torch.arange(held - tokens, held)[:, None]
    seen = (torch.arange(held) <= newest).expand(batch, 1, tokens, held).clone()
    if masked != "not":
        seen[1, :, :, :9] = False
    keywords = {}
    if told == "block_indices":
        blocks = torch.rand(batch, kv_heads, tokens, 8).topk(3).indices
        blocks[0, :, :, 2] = -1
        keywords["block_indices"] = blocks
        of_keys = torch.arange(held) // 4
        picked = (blocks[..., None] == of_keys).any(-2).repeat_interleave(heads // kv_heads, 1)
    else:
        numbers = torch.rand(batch, tokens, held).topk(7).indices.int()
        numbers[0, :, 3] = -1
        picked = (numbers[..., None] == torch.arange(held)).any(-2)[:, None]
        if told == "indices":
            keywords["indices"] = numbers
    want = dense(query, key, value, seen & picked, 0.3)
    if told == "a mask":
        seen = seen & picked
    if masked == "not" and told != "a mask":
        mask = None
    else:
        least = torch.finfo(torch.float32).min
        mask = torch.zeros(seen.shape).masked_fill(~seen, least) if masked == "numbers" else seen
    said = tuple(keywords)
    found = chosen.chosen_keys(module, query, key, mask, tokens > 1, said, keywords)
    assert found is not None
    got = chosen.attend_chosen(query, key, value, found, attention.AttendRequest(scale=0.3))
    np.testing.assert_allclose(got.numpy(), want.numpy(), rtol=0, atol=2e-6)


def test_what_cannot_be_told_goes_under_the_mask(arch):
    query, key = torch.zeros(2, 4, 1, 8), torch.zeros(2, 2, 31, 8)
    module = types.SimpleNamespace(indexer=Blocks())
    numbers = {"indices": torch.zeros(2, 1, 3, dtype=torch.int32)}

    def told(module, mask, said, keywords):
        return chosen.chosen_keys(module, query, key, mask, False, said, keywords)

    assert told(module, None, ("indices",), numbers) is not None
    assert told(module, torch.full((2, 1, 1, 31), 0.5), ("indices",), numbers) is None  # numbers to add
    assert told(module, torch.ones(2, 4, 1, 31, dtype=torch.bool), ("indices",), numbers) is None  # by head
    assert told(module, torch.ones(2, 1, 1, 31, dtype=torch.bool), (), {}) is None  # all keys
    assert told(types.SimpleNamespace(), torch.zeros(2, 1, 1, 31, dtype=torch.bool), (), {}) is None  # padding alone
    assert told(module, None, ("indices", "position_bias"), {**numbers, "position_bias": 1}) is None
    blocks = {"block_indices": torch.zeros(2, 4, 1, 3, dtype=torch.long)}
    assert told(module, None, ("block_indices",), blocks) is None  # of each query head
    assert told(types.SimpleNamespace(indexer=None), None, ("block_indices",), blocks) is None  # of which size


def test_memory_of_an_indexer_s_keys():
    keys, rows = IndexerKeys(), torch.randn(2, 600, 3)
    assert keys.rows is None
    with torch.no_grad():
        first = keys.append(rows[:, :200], 256)
        assert torch.equal(first, rows[:, :200])
        assert keys.append(rows[:, 200:201], 999).data_ptr() == first.data_ptr()  # in place
        assert torch.equal(keys.append(rows[:, 201:600], 675), rows)
    keys.cut(700)
    keys.cut(300)
    keys.choose(torch.tensor([1, 1, 0]))
    assert torch.equal(keys.rows, rows[[1, 1, 0], :300])
    twin = keys.copied()
    with torch.inference_mode():
        keys.append(torch.zeros(3, 1, 3), 300)
    assert twin.length == 300 == keys.length - 1
    with torch.no_grad():
        assert keys.append(torch.zeros(3, 1, 3, dtype=torch.float64), 400).dtype is torch.float64  # as torch.cat
        keys.cut(0)
        assert keys.append(torch.ones(1, 2, 5), 4).shape == (1, 2, 5)  # of another batch
        assert keys.append(torch.ones(1, 2, 5), 4).shape == (1, 4, 5)
    keys.forget()
    assert keys.rows is None
    graded = torch.ones(1, 2, 3, requires_grad=True)
    assert not keys.append(graded, 2).requires_grad


@pytest.mark.parametrize("indexer_first", [True, False])
def test_too_many_tokens_are_written_nowhere(indexer_first, arch):
    """Models give keys to the indexer before attention's, or after them."""
    layer = IndexedLayer(0, None, 4, None, types.SimpleNamespace(_attn_implementation="eager"))
    k, v, x = torch.randn(1, 1, 3, 8), torch.randn(1, 1, 3, 4), torch.randn(1, 3, 5)
    calls = [lambda: layer.update(k, v), lambda: layer.update_indexer(x)]
    calls = calls[::-1] if indexer_first else calls
    with torch.no_grad():
        for call in calls:
            call()
        with pytest.raises(tikv.CapacityError, match="3 cached \\+ 3 new tokens exceed max_cache_len=4"):
            calls[0]()
        assert layer.get_seq_length() == 3 == layer.indexer_keys.shape[1]
        if indexer_first:  # what the other refuses does not stay here
            layer.update_indexer(x[:, :1])
            with pytest.raises(tikv.ShapeError):
                layer.update(k[:, :, :1, :7], v[:, :, :1])
        k, v, x = k[:, :, :1], v[:, :, :1], x[:, 2:]
        for call in (lambda: layer.update_indexer(x), lambda: layer.update(k, v))[:: 1 if indexer_first else -1]:
            call()
    assert layer.get_seq_length() == 4 == layer.indexer_keys.shape[1]
    assert torch.equal(layer.indexer_keys[:, 3:], x)


def test_keys_that_an_indexer_numbers_stay_together(arch):
    """After a compaction, or with keys of another number, the numbers that an indexer chooses are of other rows."""
    layer = IndexedLayer(0, None, None, None, types.SimpleNamespace(_attn_implementation="eager"))
    k, v, x = torch.randn(1, 1, 3, 8), torch.randn(1, 1, 3, 4), torch.randn(1, 3, 5)
    with torch.no_grad():
        layer.update_indexer(x)
        layer.update(k, v)
        with pytest.raises(tikv.OptionError, match=r"compact\(\) would drop keys that the indexer"):
            layer.compact([[0, 2]])
        with pytest.raises(tikv.OptionError, match="keys cannot be set to 2 tokens, since the indexer has 3 keys"):
            layer.keys = k[:, :, :2]
        assert torch.equal(layer.keys, k)
        layer.keys = k + 1
        assert torch.equal(layer.keys, k + 1)
        assert torch.equal(layer.indexer_keys, x)
        layer.keys = None
    assert layer.indexer_keys is None


def test_the_survey_says_how_a_choice_was_told(arch):
    model = model_of("qwen4_exp")
    with settings.attention(model, "tikv"), verdicts.choices() as told_by:
        text_of(model, TikvCache(model.config), {"input_ids": ids(2, PROMPT)})
    assert told_by == {"a mask"}
