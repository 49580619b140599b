"""Steps of `generate` that torch compiles: one program for all of them, and the text of the eager ones.

On CPU torch's compiler traces the model and calls what it traced; on CUDA it is transformers' default, a CUDA graph.
"""

import contextlib
import copy
import gc
import inspect
import warnings
import weakref

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")

import transformers  # noqa: E402
from model_cache import (  # noqa: E402
    BASE,
    FAMILIES,
    FORMATS,
    OFTEN,
    TWO,
    build,
    compiling,
    generate,
    given,
    inputs,
    prompts,
)
from torch._dynamo.utils import counters  # noqa: E402

import tikv  # noqa: E402
from tikv.integrations.transformers import TikvCache  # noqa: E402
from tikv.integrations.transformers.attention import masks  # noqa: E402
from tikv.integrations.transformers.cache import cache as whole  # noqa: E402
from tikv.integrations.transformers.memory import steps, stored_ops  # noqa: E402
from tikv.integrations.transformers.versions.installed import VERSION  # noqa: E402

pytestmark = [
    pytest.mark.archs("cpu", "cuda"),
    pytest.mark.filterwarnings("default"),
    pytest.mark.usefixtures("one_thread"),
]


@pytest.fixture(autouse=True)
def fresh():
    torch.compiler.reset()
    counters.clear()
    whole._warn_once.cache_clear()  # each test hears what is said once


def both(model, arch, given_prompts, new_tokens=20, cache=None, graphs=1, **options):
    """Text and logits of compiled steps are those of eager ones; the cache of the compiled ones."""
    made = [TikvCache(model.config, **(cache or {"max_cache_len": 40})) for _ in range(2)]
    want = generate(model, made[0], given_prompts, new_tokens, disable_compile=True, **options)
    assert counters["stats"]["unique_graphs"] == 0
    got = generate(model, made[1], given_prompts, new_tokens, **compiling(arch), **options)
    assert torch.equal(got.sequences, want.sequences)
    for a, b in zip(got.logits, want.logits, strict=True):
        assert (a - b).abs().max() <= 1e-5 * b.abs().max()
    assert counters["stats"]["unique_graphs"] == graphs
    assert made[1].get_seq_length() == made[0].get_seq_length()
    return made[1]


@pytest.mark.parametrize("family", [f if f in OFTEN else pytest.param(f, marks=pytest.mark.full) for f in FAMILIES])
def test_a_model_is_compiled_once(arch, family):
    if not hasattr(transformers, f"{family}ForCausalLM"):
        pytest.skip(f"this transformers has no {family}")
    if family in ("GptOss", "Mixtral", "Qwen3Moe") and VERSION < (5, 0):
        pytest.skip("its experts are chosen by a loop that torch cannot trace")
    both(build(arch, family), arch, inputs(arch, 11))


@pytest.mark.parametrize("family", ["Llama", *[pytest.param(f, marks=pytest.mark.full) for f in ("Mistral", "Gemma3")]])
def test_left_padding(arch, family):
    both(build(arch, family), arch, inputs(arch, 3, 11, 8))


def hide_what_nobody_may_read(cache, padded):
    """NaN in the slots of the padding and behind the text, of all layers whose slots do not go round."""
    for layer in cache.layers:
        if layer.is_sliding or layer.store.dtype.name not in ("float32", "float16"):
            continue
        for a in (layer.store.keys.torch(), layer.store.values.torch()):
            a[:, :, layer.get_seq_length() :] = torch.nan
            for b, n in enumerate(padded):
                a[b, :, :n] = torch.nan


@torch.no_grad()
@pytest.mark.parametrize("family", ["Llama", *[pytest.param(f, marks=pytest.mark.full) for f in ("Gemma2", "GptOss")]])
def test_padding_is_not_read_and_no_slot_behind_the_text(arch, family, monkeypatch):
    """Whatever the capacity; of a mask with holes nothing behind the text."""
    model, ids = build(arch, family), inputs(arch, 3, 11, 8)
    caches = [TikvCache(model.config, max_cache_len=n) for n in (40, 2000)]
    want = generate(model, caches[0], ids, 6, disable_compile=True)
    prefilled, made = [], masks.mask_for_attend

    def mask(*args, **kwargs):
        found = made(*args, **kwargs)
        if isinstance(kwargs["kv_offset"], steps.SlotsOffset) and not kwargs["kv_offset"].counted.ring:
            prefilled.append(found.tikv_starts.tolist())
            hide_what_nobody_may_read(caches[1], (8, 0, 3))
        return found

    transformers.AttentionMaskInterface.register("tikv", mask)
    try:
        got = generate(model, caches[1], ids, 6, **compiling(arch))
    finally:
        transformers.AttentionMaskInterface.register("tikv", made)
    assert prefilled == [[8, 0, 3]] * 5
    assert torch.equal(got.sequences, want.sequences)
    for a, b in zip(got.logits, want.logits, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-5)
    assert counters["stats"]["unique_graphs"] == 1


def test_steps_of_generate_attend_by_what_is_stored(arch, monkeypatch):
    """In both layers of each step, by the mark of the mask, which no step reads."""
    called, call = [], stored_ops.attention_call
    monkeypatch.setattr(stored_ops, "attention_call", lambda *given: called.append(1) or call(*given))
    both(build(arch), arch, inputs(arch, 11), 6)
    assert len(called) == 10 if arch == "cpu" else len(called) >= 2, "replays of a CUDA graph go without"


def test_padding_that_is_not_on_the_left_alone_is_masked(arch):
    model, ids = build(arch), inputs(arch, 9, 11)
    ids["attention_mask"][:, 4] = 0
    ids["position_ids"] = torch.arange(11, device=ids["input_ids"].device).expand(2, -1)
    both(model, arch, ids, 6)


@pytest.mark.parametrize(
    "stored", [{}, *[pytest.param(f, marks=pytest.mark.full) for f in ({"dtype": "int8"}, {"dtype": "q8_0"})]], ids=str
)
def test_attention_begins_where_a_sequence_does(arch, stored):
    """As over the sequence alone, whose first slot that is."""
    config = transformers.LlamaConfig(
        hidden_size=64, num_attention_heads=2, num_key_value_heads=1, num_hidden_layers=1, vocab_size=50
    )
    torch.manual_seed(0)
    rows, query = torch.randn(3, 1, 700, 32, device=arch), torch.randn(3, 2, 1, 32, device=arch)
    cache = TikvCache(config, max_cache_len=1000, **stored)
    cache.update(rows, rows, 0)
    counted = steps.Counted(cache.layers[0], 1000, 0, 0)
    counted.set(650)
    starts = [0, 649, 300]
    got = counted.attend(query, 0.1, 5.0, None, torch.tensor(starts, device=arch))
    for b, first in enumerate(starts):
        alone = TikvCache(config, max_cache_len=1000, **stored)
        alone.update(*[rows[b : b + 1, :, first:650]] * 2, 0)
        one = steps.Counted(alone.layers[0], 1000, 0, 0)
        one.set(650 - first)
        want = one.attend(query[b : b + 1], 0.1, 5.0, None)
        torch.testing.assert_close(got[b : b + 1], want, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "stored", [FORMATS[0], *[pytest.param(f, marks=pytest.mark.full) for f in FORMATS[1:]]], ids=str
)
@pytest.mark.parametrize("lengths", [(11,), pytest.param((3, 11), marks=pytest.mark.full)], ids=str)
def test_every_format(arch, stored, lengths):
    model = build(arch, head_dim=32, num_hidden_layers=1)
    both(model, arch, inputs(arch, *lengths), 6, {"max_cache_len": 20, **stored})


@pytest.mark.parametrize("prompt", [3, pytest.param(11, marks=pytest.mark.full)])
@pytest.mark.parametrize("stored", [{}, pytest.param({"dtype": "int8"}, marks=pytest.mark.full)], ids=str)
def test_a_window_with_sinks(arch, prompt, stored):
    cache = both(build(arch), arch, inputs(arch, prompt), 20, {"window": 8, "sinks": 2, **stored})
    assert [layer.store.capacity for layer in cache.layers] == [8, 8]


@pytest.mark.full
@pytest.mark.parametrize("family", ["Llama", "Gemma3"])
@pytest.mark.parametrize(
    "options",
    [
        {"do_sample": True},
        {"num_beams": 3},
        {"prompt_lookup_num_tokens": 2},
    ],
    ids=str,
)
def test_other_ways_to_generate(arch, family, options):
    """Those that transformers compiles, and assisted ones, which it does not."""
    model, made, compiled = build(arch, family), [], compiling(arch)
    compiled["compile_config"].fullgraph = False  # of assisted ones several tokens come to slots that go round
    for more in ({"disable_compile": True}, compiled):
        cache = TikvCache(model.config, max_cache_len=40)
        made.append(generate(model, cache, inputs(arch, 11), 12, **{**options, **more}).sequences)
    assert torch.equal(*made)


def test_text_is_streamed_while_it_is_sampled(arch):
    """Token by token, in steps that are compiled."""
    model, made = build(arch), []

    class Streamer(transformers.generation.streamers.BaseStreamer):
        def put(self, value):
            self.told += value.flatten().tolist()

        def end(self):
            self.told.append("end")

    for more in ({"disable_compile": True}, compiling(arch)):
        streamer = Streamer()
        streamer.told = []
        cache = TikvCache(model.config, max_cache_len=40)
        text = generate(model, cache, inputs(arch, 11), 12, do_sample=True, streamer=streamer, **more).sequences
        assert streamer.told == [*text[0].tolist(), "end"]
        made.append(text)
    assert torch.equal(*made)
    assert counters["stats"]["unique_graphs"] == 1


EAGER = {  # family: options of its configuration and of the cache, and what is said
    "Bart": ({"d_model": 32, "encoder_layers": 1, "decoder_layers": 2, "encoder_attention_heads": 4,
              "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "forced_eos_token_id": None,
              "decoder_start_token_id": 2}, {}, "the model may have an encoder"),
    "Lfm2": ({"layer_types": ["conv", "full_attention"], "conv_L_cache": 3}, {"record_states": 2},
             "states are recorded"),
}  # fmt: skip


@pytest.mark.parametrize("family", EAGER)
def test_what_cannot_be_compiled_goes_on_and_says_so_once(arch, family, with_cuda):
    options, of_cache, why = EAGER[family]
    oldest = (5, 24) if of_cache else (5, 19)
    if not hasattr(transformers, f"{family}Config") or oldest > VERSION:
        pytest.skip("this transformers has no such cache")
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**{**BASE, **TWO, **options})
    kind = "ForConditionalGeneration" if family == "Bart" else "ForCausalLM"
    model = getattr(transformers, family + kind)(config).to(arch).eval()
    model.set_attn_implementation("tikv")
    with_cuda()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        want, *others = [
            generate(model, TikvCache(config, max_cache_len=40, **of_cache), inputs(arch, 11), 12, **how)
            for how in ({"disable_compile": True}, compiling(arch), compiling(arch))
        ]
    assert all(torch.equal(got.sequences, want.sequences) for got in others)
    assert counters["stats"]["unique_graphs"] == 0
    said = [str(each.message) for each in caught if "steps are not compiled" in str(each.message)]
    assert len(said) == 1
    assert why in said[0]


class Stepper:
    """A model compiled by hand, and a prompted cache."""

    def __init__(self, arch, family="Llama", prompt=9, batch=1, **options):
        self.model = build(arch, family, num_hidden_layers=FAMILIES[family].get("num_hidden_layers", 2))
        self.compiled = torch.compile(self.model, backend="eager" if arch == "cpu" else "inductor", fullgraph=True)
        self.options = options or {"max_cache_len": 32}
        self.ids = torch.randint(1, 96, (batch, 160), generator=torch.Generator().manual_seed(0)).to(arch)
        self.cache = self.prompted(prompt)

    def prompted(self, prompt):
        cache = TikvCache(self.model.config, **self.options)
        self.model(self.ids[:, :prompt], **given(cache))
        return cache

    def step(self, at, compiled=True, cache=None):
        call, more = self.compiled if compiled else self.model, {}
        if "cache_position" in inspect.signature(type(self.model).forward).parameters:  # which old versions ask of us
            more["cache_position"] = torch.tensor([at], device=self.ids.device)
        return call(self.ids[:, at : at + 1], **given(self.cache if cache is None else cache), **more).logits

    def check(self, logits, at):
        """They are those of the whole text up to there."""
        want = self.model(self.ids[:, : at + 1], use_cache=False).logits[:, -1:]
        torch.testing.assert_close(logits, want, rtol=0, atol=3e-5)


@torch.no_grad()
@pytest.mark.parametrize("family", ["Llama", pytest.param("Gemma3", marks=pytest.mark.full)])
def test_twenty_steps_by_hand_and_then_what_a_cache_can_do(arch, family):
    it = Stepper(arch, family)
    if family != "Llama":  # whose slots go round once steps of one token begin
        it.cache.get_mask_sizes(1, 0)
    for at in range(9, 29):
        it.check(it.step(at), at)
    assert counters["stats"]["unique_graphs"] == 1
    assert [layer.get_seq_length() for layer in it.cache.layers] == [29, 29]
    copied = copy.deepcopy(it.cache)
    it.check(it.step(29, compiled=False), 29)
    it.check(it.step(29, compiled=False, cache=copied), 29)
    assert it.cache.layers[1].keys.shape[2] == 30
    if family == "Llama":
        it.cache.crop(-10)
        it.check(it.step(20), 20)
    it.cache.reset()
    it.model(it.ids[:, :5], **given(it.cache))
    if family != "Llama":
        it.cache.get_mask_sizes(1, 0)
    it.check(it.step(5), 5)


@torch.no_grad()
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("back", [1, 3, 64])
def test_a_ring_has_room_for_a_crop_of_64_tokens(arch, back, compiled):
    """As temporal order has, and whatever the new length is."""
    it = Stepper(arch, "Mistral", prompt=80, max_cache_len=200)
    it.cache.get_mask_sizes(1, 0)  # slots go round from here on
    for at in range(80, 82 + back):
        it.step(at, compiled=compiled)
    with pytest.raises(tikv.PositionError, match=f"from {82 + back} to 11 tokens.* needs positions from 5 on"):
        it.cache.crop(11 - 82 - back)
    it.cache.crop(-back)
    for at in range(82, 86):
        it.check(it.step(at, compiled=compiled and at > 83), at)
    it.check(it.model(it.ids[:, 86:90], **given(it.cache)).logits[:, -1:], 89)


@torch.no_grad()
def test_the_past_of_a_window_is_recorded_from_any_step_on(arch):
    it = Stepper(arch, "Mistral", max_cache_len=200)
    it.cache.get_mask_sizes(1, 0)
    for at in range(9, 12):
        it.step(at, compiled=False)
    it.cache.activate_past_recording()
    for at in range(12, 100):
        it.step(at, compiled=False)
    it.cache.crop(-88)
    it.check(it.step(12, compiled=False), 12)


@torch.no_grad()
@pytest.mark.parametrize("family", ["Llama", "Mistral", "Gemma3", "GptOss"])
@pytest.mark.parametrize("options", [{"max_cache_len": 60}, {"window": 8, "sinks": 3}], ids=str)
@pytest.mark.parametrize("length", [6, 7, 8, 9, 13, 14, 15])
def test_one_wrong_token_is_taken_back_at_any_length(arch, family, options, length):
    """Also where the ring then holds one token fewer than it has slots."""
    if "window" in options and family == "Mistral":
        pytest.skip("no layer of it attends in full")
    it = Stepper(arch, family, prompt=length, **options)
    wrong = it.ids.clone()
    it.ids[:, length] += 1
    it.step(length, compiled=False)
    it.cache.crop(-1)
    it.ids = wrong
    fresh = it.prompted(length)
    for at in range(length, length + 4):
        got, want = it.step(at, compiled=False), it.step(at, compiled=False, cache=fresh)
        torch.testing.assert_close(got, want, rtol=0, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("family", ["Llama", "Mistral", "Gemma3"])
@pytest.mark.parametrize("names", [("tikv", "eager"), ("tikv", "sdpa", "tikv"), ("sdpa", "tikv", "eager")], ids=str)
@pytest.mark.parametrize("options", [{}, {"max_cache_len": 60}], ids=str)
def test_attention_changes_its_name_at_any_step(arch, family, names, options):
    it = Stepper(arch, family, prompt=12, **(options or {"dtype": None}))
    for at in range(12, 24):
        it.model.set_attn_implementation(names[(at - 12) // 4 % len(names)])
        it.check(it.step(at, compiled=False), at)


@torch.no_grad()
@pytest.mark.parametrize("change", ["update", "crop"])
def test_steps_count_what_another_attention_added_or_dropped(arch, change):
    config = transformers.LlamaConfig(**BASE | {"num_hidden_layers": 1}, attn_implementation="tikv")
    cache, rows = TikvCache(config, max_cache_len=64), torch.randn(1, 1, 14, 8, device=arch)
    cache.update(rows[:, :, :8], rows[:, :, :8], 0)
    config._attn_implementation = "sdpa"
    if change == "update":
        cache.update(rows[:, :, 8:13], rows[:, :, 8:13], 0)
    else:
        cache.layers[0].crop(-3)
    config._attn_implementation = "tikv"
    length = cache.get_seq_length()
    step = -rows[:, :, :1]
    torch.compile(lambda k: cache.update(k, k, 0)[0].shape, backend="eager")(step)
    assert cache.get_seq_length() == length + 1
    assert torch.equal(cache.layers[0].keys, torch.cat((rows[:, :, :length], step), 2))


@torch.no_grad()
def test_several_tokens_of_a_compiled_step_stay_when_its_slots_become_a_ring_again(arch):
    config = transformers.MistralConfig(**BASE | {"num_hidden_layers": 1, "sliding_window": 7})
    config._attn_implementation = "tikv"
    cache, rows = TikvCache(config, max_cache_len=300), torch.randn(1, 1, 93, 8, device=arch)
    for at in range(100):  # the ring has 71 slots
        row = rows[:, :, min(at, 90) : min(at, 90) + 1]
        cache.get_mask_sizes(1, 0)
        cache.update(row, row.clone(), 0)
    cache.crop(-10)
    new = rows[:, :, 90:]
    keys, values = torch.compile(lambda k: cache.update(k, k, 0), backend="eager")(new)
    assert cache.layers[0].slot_map.ring == 71
    assert torch.equal(keys, rows[:, :, -keys.shape[2] :])
    assert torch.equal(values, keys)


@torch.no_grad()
@pytest.mark.full
@pytest.mark.parametrize("family", ["Mistral", "Gemma3"])
def test_slots_that_go_round_are_left_for_whatever_needs_an_order(arch, family, tmp_path):
    it = Stepper(arch, family)
    it.cache.get_mask_sizes(1, 0)
    for at in range(9, 20):
        it.check(it.step(at), at)
    copied = copy.deepcopy(it.cache)
    it.check(it.step(20, cache=copied, compiled=False), 20)
    it.cache.save(tmp_path / "text.safetensors")
    loaded = TikvCache.load(tmp_path / "text.safetensors", it.model.config)
    it.check(it.step(20, cache=loaded, compiled=False), 20)
    it.cache.get_mask_sizes(1, 0)
    it.check(it.step(20), 20)
    it.cache.batch_repeat_interleave(2)
    got = it.model(it.ids[:, 21:24].repeat(2, 1), **given(it.cache)).logits
    it.check(got[:1, -1:], 23)
    it.cache.crop(-2)
    it.check(it.model(it.ids[:, 22:23].repeat(2, 1), **given(it.cache)).logits[:1], 22)


@torch.no_grad()
def test_another_cache_takes_the_same_program(arch):
    it = Stepper(arch)
    it.step(9)
    other = it.prompted(4)
    it.check(it.step(4, cache=other), 4)
    assert counters["stats"]["unique_graphs"] == 1
    assert (it.cache.get_seq_length(), other.get_seq_length()) == (10, 5)


@torch.no_grad()
def test_a_step_reads_what_is_stored_and_no_slot_more(arch):
    it = Stepper(arch)
    for layer in it.cache.layers:
        layer.store.keys.torch()[:, :, 9:] = layer.store.values.torch()[:, :, 9:] = torch.nan
    it.check(it.step(9), 9)


@pytest.fixture
def halved(monkeypatch):
    """Models use half of the keys that `update` returns."""
    update = TikvCache.update

    def of_halves(cache, keys, values, layer, *args, **options):
        keys, values = update(cache, keys, values, layer)
        return keys * 0.5, values

    monkeypatch.setattr(TikvCache, "update", of_halves)


@torch.no_grad()
def test_a_model_that_changes_the_keys_gets_their_numbers_and_a_mask(arch, halved):
    """What `update` returned is then not what attention is given."""
    it = Stepper(arch)
    got, want = it.step(9, cache=it.prompted(9)), it.step(9, compiled=False, cache=it.prompted(9))
    torch.testing.assert_close(got, want, rtol=0, atol=1e-5)


def test_keys_that_a_model_changes_are_masked_where_generate_makes_the_mask(arch, halved):
    """As where layers that share keys move them to their device; all slots are more than the text has.

    A model with two kinds of layers makes no mask of its own where `generate` says None for one of them.
    """
    both(build(arch, "Gemma2"), arch, inputs(arch, 11), 6)


@torch.no_grad()
def test_another_batch_is_refused_before_anything_is_written(arch):
    it = Stepper(arch)
    it.step(9)
    before = it.cache.layers[0].keys.clone()
    compiled = torch.compile(it.model, backend="eager")
    with pytest.raises(tikv.ShapeError, match="the new ones are keys"):
        compiled(torch.ones(2, 1, dtype=torch.int64, device=arch), **given(it.cache))
    assert torch.equal(it.cache.layers[0].keys, before)
    it.check(it.step(10), 10)


@torch.no_grad()
def test_a_capture_by_hand_is_refused_before_anything_is_written(arch, monkeypatch):
    """Nobody would see to it that its replays find the cache where it was."""
    it = Stepper(arch)
    it.step(9)
    keys = it.cache.layers[0].store.keys.torch().clone()
    if arch == "cpu":
        monkeypatch.setattr(stored_ops, "_captured", lambda cache: True)
        capture = contextlib.nullcontext()
    else:
        it.compiled = torch.compile(it.model, fullgraph=True)
        it.step(10)
        it.cache.crop(-1)
        capture = torch.cuda.graph(torch.cuda.CUDAGraph())
    with pytest.raises(tikv.ArchError, match="a CUDA graph is being captured by hand"), capture:
        it.step(10)
    monkeypatch.undo()
    assert torch.equal(it.cache.layers[0].store.keys.torch()[:, :, :10], keys[:, :, :10])
    assert it.cache.get_seq_length() == 10
    it.check(it.step(10), 10)


def test_a_capture_by_the_compiler_is_known(monkeypatch):
    """By the file of torch's that calls."""
    from torch._inductor import cudagraph_trees

    assert not stored_ops._by_compiler()
    there = eval(compile("lambda call: call()", cudagraph_trees.__file__, "eval"))
    assert there(stored_ops._by_compiler)


def test_texts_that_do_not_fit(arch):
    model = build(arch)
    cache = TikvCache(model.config, max_cache_len=14)
    for prompt, new in ((15, 3), (11, 9)):
        with pytest.raises(
            tikv.CapacityError, match=f"may have {prompt + new - 1} tokens to cache, and max_cache_len=14"
        ):
            generate(model, cache, inputs(arch, prompt), new, **compiling(arch))
        assert cache.get_seq_length() == 0
    with torch.no_grad(), pytest.raises(tikv.CapacityError, match="0 cached \\+ 15 new tokens exceed max_cache_len=14"):
        model(**inputs(arch, 15), **given(cache))
    generate(model, cache, inputs(arch, 11), 4, **compiling(arch))
    assert cache.get_seq_length() == 14
    # Old versions say it by an IndexError of their own.
    with pytest.raises((tikv.ShapeError, IndexError), match=r"holds 14 tokens, and the text has no new ones|index -1"):
        generate(model, cache, inputs(arch, 5), 3, **compiling(arch))
    cache.reset()
    generate(model, cache, inputs(arch, 5), 3, **compiling(arch))
    assert cache.get_seq_length() == 7


@torch.no_grad()
def test_steps_by_hand_beyond_the_memory_are_told_afterwards(arch):
    """Nothing is asked of the host before a step that is not `generate`'s; what has no slot is not written."""
    it = Stepper(arch, max_cache_len=10)
    for at in (9, 10, 11):
        it.step(at)
    with pytest.raises(tikv.CapacityError, match="continued to 12 tokens, and those beyond max_cache_len=10"):
        it.cache.get_seq_length()
    assert it.cache.get_seq_length() == 10


@torch.no_grad()
def test_a_cache_goes_with_its_last_reference(arch):
    it = Stepper(arch)
    it.step(9)
    gc.collect()  # what torch's compiler left
    it.step(10)
    kept = weakref.ref(it.cache.layers[0].store)
    gc.disable()
    try:
        it.cache = None
        assert kept() is None
    finally:
        gc.enable()


def test_what_is_not_compiled_says_why(arch, with_cuda):
    with_cuda()
    model = build(arch)
    assert not TikvCache(model.config).is_compileable  # which nobody asked for
    assert TikvCache(model.config, max_cache_len=9).is_compileable
    assert TikvCache(model.config, window=9).is_compileable
    model.set_attn_implementation("sdpa")
    with pytest.warns(UserWarning, match='attention is not "tikv": call model.set_attn_implementation'):
        assert not TikvCache(model.config, max_cache_len=9).is_compileable
    text = generate(model, TikvCache(model.config, max_cache_len=20), prompts(5), 6, **compiling(arch)).sequences
    assert text.shape == (1, 11)
    assert counters["stats"]["unique_graphs"] == 0


@pytest.mark.parametrize(
    "stored",
    [{"dtype": "q8_0_hadamard3"}, {"dtype": "nvfp4", "k_scale": 0.5, "v_scale": 0.25}],
    ids=["turned", "scaled"],
)
def test_a_step_writes_and_reads_by_all_that_a_format_says(arch, stored):
    """The seed of turned keys, and a scale of the whole tensor: the bits of the cache's own appends."""
    config = transformers.LlamaConfig(
        hidden_size=64, num_attention_heads=2, num_key_value_heads=2, num_hidden_layers=1, vocab_size=50
    )
    torch.manual_seed(0)
    rows, query = torch.randn(1, 2, 4, 32), torch.randn(1, 2, 1, 32)
    if arch == "cuda":
        rows, query = rows.cuda(), query.cuda()
    stepped, whole = (TikvCache(config, max_cache_len=8, **stored) for _ in range(2))
    stepped.update(rows[:, :, :3], rows[:, :, :3], 0)
    whole.update(rows, rows, 0)
    counted = steps.Counted(stepped.layers[0], 8, 0, 0)
    counted.set(3)
    keys, values = (a[:, :, :4] for a in counted.append(rows[:, :, 3:], rows[:, :, 3:]))
    for name in ("keys", "values"):
        a, b = (getattr(cache.layers[0].store, name).torch()[:, :, :4] for cache in (stepped, whole))
        assert torch.equal(a, b)
    assert torch.allclose(keys, rows, atol=0.5)
    want = torch.softmax(query @ keys.transpose(2, 3) * 32**-0.5, -1) @ values
    assert torch.allclose(counted.attend(query, None, None, None), want, atol=1e-5)
