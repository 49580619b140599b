"""`captured`: the texts of eager `generate`, and caches that go on as after it, wherever a text ends."""

import gc
import inspect
import warnings
import weakref

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")

import transformers  # noqa: E402
from model_cache import FAMILIES, FORMATS, OFTEN, build, generate, given, inputs  # noqa: E402

import tikv  # noqa: E402
from tikv.integrations.transformers import TikvCache, captured  # noqa: E402
from tikv.integrations.transformers.versions.installed import VERSION  # noqa: E402

module = inspect.getmodule(type(captured))

pytestmark = [
    pytest.mark.archs("cpu", "cuda"),
    pytest.mark.filterwarnings("default"),
    pytest.mark.usefixtures("one_thread"),
]

ROOM = {"max_cache_len": 64}
SINKS = {"window": 8, "sinks": 2}
SAMPLED = {"do_sample": True, "top_k": 20, "top_p": 0.9, "temperature": 1.3, "repetition_penalty": 1.2}


def goes_on(model, cache, text, tokens=3):
    """The logits of single tokens after a text, and of several at once, by a cache that holds all but the newest."""
    made, ids = [], text.new_tensor([[5, 9, 3, 7, 11, 2, 8]]).repeat(len(text), 1)
    fed = torch.cat((text[:, -1:], ids), 1)
    for at in range(tokens):
        made.append(model(fed[:, at : at + 1], **given(cache)).logits)
    made.append(model(fed[:, tokens:], **given(cache)).logits[:, -1:])
    return torch.cat(made, 1)


@torch.no_grad()
def both(model, given_prompts, new_tokens=20, cache=None, loop=captured, padded=False, **options):
    """Both texts and caches: those of eager `generate`, and of `captured`, which are compared."""
    made = []
    for more in ({"disable_compile": True}, {"custom_generate": loop}):
        held = TikvCache(model.config, **(ROOM if cache is None else cache))
        with warnings.catch_warnings():
            warnings.filterwarnings("error", "TikvCache")
            text = generate(model, held, given_prompts, new_tokens, **options, **more)
        made.append((text, held, torch.rand(1, device=text.sequences.device)))
    (want, eager, number), (got, replayed, same) = made
    assert torch.equal(got.sequences, want.sequences)
    assert len(got.logits) == len(want.logits)
    for a, b in zip(got.logits, want.logits, strict=True):
        assert (a - b).abs().max() <= 1e-5 * b.abs().max()
    assert torch.equal(number, same), "random numbers go on alike"
    maps = [[layer.slot_map for layer in each.layers_with_keys] for each in (replayed, eager)]
    assert maps[0] == maps[1]
    if not padded:
        a, b = (goes_on(model, held, want.sequences) for held in (replayed, eager))
        assert (a - b).abs().max() <= 1e-4 * b.abs().max()
    return got, replayed


def known(family):
    if not hasattr(transformers, f"{family}ForCausalLM"):
        pytest.skip(f"this transformers has no {family}")


@pytest.mark.parametrize("family", [f if f in OFTEN else pytest.param(f, marks=pytest.mark.full) for f in FAMILIES])
@pytest.mark.parametrize("options", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_every_family(arch, family, options):
    known(family)
    if arch == "cuda" and family == "Gemma3n" and VERSION < (5, 18):
        pytest.skip("the host waits for the device in its steps, so they are not captured")
    both(build(arch, family), inputs(arch, 11), **options)


@pytest.mark.parametrize("family", ["Llama", "Mistral", pytest.param("Gemma3", marks=pytest.mark.full)])
@pytest.mark.parametrize("cache", [ROOM, SINKS], ids=str)
def test_left_padding(arch, family, cache):
    if cache is SINKS and family == "Mistral":
        pytest.skip("no layer of it attends in full")
    both(build(arch, family), inputs(arch, 3, 11, 8), cache=cache, padded=True)


@pytest.mark.parametrize(
    "stored", [FORMATS[0], *[pytest.param(f, marks=pytest.mark.full) for f in FORMATS[1:]]], ids=str
)
def test_every_format(arch, stored):
    model = build(arch, head_dim=32, num_hidden_layers=1)
    both(model, inputs(arch, 11), 12, {"max_cache_len": 40, **stored}, check_every(3))


def check_every(number, **options):
    return captured.with_options(check_every=number, **options)


def ending(model, ids, cache, at, **options):
    """An end token that a text has for the first time as its token `at`, or as near to it as there is one."""
    text = generate(model, TikvCache(model.config, **cache), ids, 20, disable_compile=True, **options).sequences
    for row in text[:, ids["input_ids"].shape[1] :].tolist():
        firsts = [i for i, token in enumerate(row) if token not in row[:i]]
        near = min(firsts, key=lambda i: abs(i - at))
        return row[near]


@pytest.mark.parametrize("number", [1, 3, 8, 50])
@pytest.mark.parametrize("at", [0, 6, pytest.param(9, marks=pytest.mark.full)])
@pytest.mark.parametrize(
    ("family", "cache"),
    [
        ("Llama", ROOM),
        ("Llama", SINKS),
        ("Mistral", ROOM),
        pytest.param("Gemma3", ROOM, marks=pytest.mark.full),
        pytest.param("GptOss", {**SINKS, "dtype": "int8"}, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_a_text_that_ends_early_leaves_no_trace_of_later_steps(arch, number, at, family, cache):
    known(family)
    model, ids = build(arch, family), inputs(arch, 11)
    end = ending(model, ids, cache, at)
    got, _ = both(model, ids, cache=cache, loop=check_every(number), eos_token_id=end)
    assert got.sequences[0, -1] == end
    end = ending(model, ids, cache, at, **SAMPLED)
    both(model, ids, cache=cache, loop=check_every(number), eos_token_id=end, **SAMPLED)


@pytest.mark.parametrize("number", [1, 4, 30])
@pytest.mark.parametrize("cache", [ROOM, SINKS], ids=str)
def test_rows_end_one_after_the_other(arch, number, cache):
    model, ids = build(arch), inputs(arch, 5, 11, 8)
    ends = [ending(model, {k: a[i : i + 1] for k, a in ids.items()}, cache, 4 + 3 * i) for i in range(3)]
    both(model, ids, cache=cache, loop=check_every(number), eos_token_id=ends, padded=True)


@pytest.mark.parametrize("cache", [ROOM, SINKS], ids=str)
def test_several_texts_for_a_prompt(arch, cache):
    got, _ = both(build(arch), inputs(arch, 11), cache=cache, num_return_sequences=3, **SAMPLED)
    assert len({tuple(row) for row in got.sequences.tolist()}) > 1


@pytest.mark.parametrize(
    "options",
    [
        {"min_new_tokens": 7},
        {"no_repeat_ngram_size": 2},
        {"do_sample": True, "min_new_tokens": 7, "bad_words_ids": [[5, 6], [7]]},
        {"repetition_penalty": 1.5, "suppress_tokens": [3, 4]},
        {"do_sample": True, "typical_p": 0.8, "epsilon_cutoff": 1e-3, "min_p": 0.01},
        {"output_scores": True, "repetition_penalty": 1.5},
    ],
    ids=str,
)
def test_processors_of_logits(arch, options):
    model, ids = build(arch), inputs(arch, 11)
    end = ending(model, ids, ROOM, 4)
    got, _ = both(model, ids, eos_token_id=end, **options)
    if "output_scores" in options:
        want = generate(
            model, TikvCache(model.config, **ROOM), ids, 20, disable_compile=True, eos_token_id=end, **options
        )
        for a, b in zip(got.scores, want.scores, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


class Even(transformers.StoppingCriteria):
    """Ends rows whose text has `most` even tokens, and notes each text that it is asked about."""

    def __init__(self, most):
        self.most, self.seen = most, []

    def __call__(self, input_ids, scores, **kwargs):
        self.seen.append(input_ids.tolist())
        return (input_ids % 2 == 0).sum(1) >= self.most


@pytest.mark.parametrize("number", [1, 4, 30])
@pytest.mark.parametrize("end", [None, 5])
@pytest.mark.parametrize("options", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_criteria_in_python_end_rows_where_they_would(arch, number, end, options):
    """With an end token padding follows in an ended row, without one its text goes on."""
    model, ids, made = build(arch), inputs(arch, 9, 11, 8), []
    for most in (8, 10):
        lists = [transformers.StoppingCriteriaList([Even(most)]) for _ in range(2)]
        for one, more in zip(lists, ({"disable_compile": True}, {"custom_generate": check_every(number)}), strict=True):
            cache = TikvCache(model.config, **SINKS)
            made.append(generate(model, cache, ids, 20, stopping_criteria=one, eos_token_id=end, **options, **more))
        assert torch.equal(made[-1].sequences, made[-2].sequences)
        if hasattr(lists[0][0], "seen"):
            assert lists[0][0].seen == lists[1][0].seen


def test_a_limit_of_time_and_criteria_that_answer_in_plain_bools(arch):
    class Never(transformers.StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            return torch.zeros(len(input_ids), dtype=torch.bool)

    model = build(arch)
    cache = TikvCache(model.config, **ROOM)
    criteria = transformers.StoppingCriteriaList([Never()])
    if arch == "cuda":
        criteria = transformers.StoppingCriteriaList()
    text = generate(
        model, cache, inputs(arch, 11), 30, max_time=0.0, custom_generate=captured, stopping_criteria=criteria
    )
    assert text.sequences.shape[1] == 12


class Streamer(transformers.generation.streamers.BaseStreamer):
    def __init__(self):
        self.told = []

    def put(self, value):
        self.told += value.flatten().tolist()

    def end(self):
        self.told.append("end")


@pytest.mark.parametrize("by_option", [True, False])
def test_text_is_streamed(arch, by_option):
    model, ids = build(arch), inputs(arch, 11)
    end = ending(model, ids, ROOM, 6)
    streamer, cache = Streamer(), TikvCache(model.config, **ROOM)
    how = {"custom_generate": check_every(4, streamer=streamer)}
    if not by_option:
        how = {"custom_generate": check_every(4), "streamer": streamer}
    text = generate(model, cache, ids, 20, eos_token_id=end, **how).sequences
    assert streamer.told == [*text[0].tolist(), "end"]


@torch.no_grad()
@pytest.mark.parametrize(("family", "cache"), [("Llama", ROOM), ("Llama", SINKS), ("Gemma3", {"max_cache_len": 90})])
def test_a_conversation_goes_on(arch, family, cache):
    model, texts = build(arch, family), []
    for how in ({"disable_compile": True}, {"custom_generate": captured}):
        held, ids = TikvCache(model.config, **cache), inputs(arch, 11)["input_ids"]
        for turn in range(3):
            out = generate(model, held, {"input_ids": ids}, 9, eos_token_id=[3, 8, 20, 40], **how)
            ids = torch.cat((out.sequences, ids[:, turn : turn + 4]), 1)
        texts.append(ids)
    assert torch.equal(*texts)


def test_the_prompt_comes_in_chunks(arch):
    both(build(arch), inputs(arch, 11), prefill_chunk_size=4)


def test_a_compiled_forward_gives_the_same_text(arch):
    config = transformers.CompileConfig(fullgraph=True, **({"backend": "eager", "mode": None} if arch == "cpu" else {}))
    torch.compiler.reset()
    model, ids = build(arch), inputs(arch, 3, 11)
    options = {"compile_config": config, "loop": captured.with_options(compile=True)}
    both(model, ids, padded=True, **options)
    both(model, ids, padded=True, **options)


@pytest.mark.archs("cpu")
def test_a_compiled_model_is_compiled_once_and_goes_with_its_last_reference(arch):
    """It is not the garbage collector that gives its memory back, and no later text compiles it again."""
    torch.compiler.reset()
    model, ids, compiled = build(arch), inputs(arch, 11), []

    def backend(graph, _):
        compiled.append(graph)
        return graph.forward

    options = {"compile_config": transformers.CompileConfig(backend=backend, mode=None)}
    gc.collect()
    gc.disable()
    try:
        for _ in range(3):
            held = TikvCache(model.config, **ROOM)
            generate(model, held, ids, 8, custom_generate=captured.with_options(compile=True), **options)
        assert len(compiled) == 1
        watched = weakref.ref(model), weakref.ref(held.layers[0].store)
        del model, held
        compiled.clear()
        assert [each() for each in watched] == [None, None]
    finally:
        gc.enable()


def test_other_caches_and_other_ways_go_on_and_say_so_once(arch):
    model, ids = build(arch), inputs(arch, 11)
    ways = [
        (lambda: TikvCache(model.config, **ROOM), {"num_beams": 2}, "this is beam search"),
        (lambda: transformers.DynamicCache(config=model.config), {}, "the cache is a DynamicCache"),
        (lambda: TikvCache(model.config), {}, "its memory grows: pass max_cache_len"),
        (lambda: TikvCache(model.config, **ROOM), {"output_hidden_states": True}, "attentions or hidden states"),
    ]
    if VERSION >= (5, 0):
        ways.append((lambda: TikvCache(model.config, **ROOM), {"prompt_lookup_num_tokens": 2}, "assisted generation"))
    for make, options, why in ways:
        module._warn_once.cache_clear()
        want = generate(model, make(), ids, 8, disable_compile=True, **options)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):
                got = generate(model, make(), ids, 8, custom_generate=captured, disable_compile=True, **options)
        said = [str(each.message) for each in caught if "without captured" in str(each.message)]
        assert len(said) == 1
        assert why in said[0]
        assert torch.equal(got.sequences, want.sequences)


def test_another_attention_goes_on_and_says_so(arch):
    model = build(arch)
    model.set_attn_implementation("sdpa")
    module._warn_once.cache_clear()
    with pytest.warns(UserWarning, match='without captured, because attention is not "tikv"'):
        text = generate(model, TikvCache(model.config, **ROOM), inputs(arch, 11), 8, custom_generate=captured)
    assert text.sequences.shape[1] == 19


class Meddler(Streamer):
    """A streamer that changes the cache at its sixth token."""

    def __init__(self, change):
        super().__init__()
        self.change = change

    def put(self, value):
        super().put(value)
        if len(self.told) == 17:
            self.change()


CHANGES = {
    "reset": lambda cache, model: cache.reset(),
    "crop": lambda cache, model: cache.crop(-1),
    "moved": lambda cache, model: cache.batch_repeat_interleave(2),
    "another model": lambda cache, model: model(torch.tensor([[3]], device=model.device), **given(cache)),
    "another attention": lambda cache, model: model.set_attn_implementation("sdpa"),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("cache", [ROOM, SINKS], ids=str)
def test_a_cache_that_changes_between_steps_is_refused(arch, change, cache):
    if (change, cache) == ("crop", SINKS):
        pytest.skip("a window of full layers has no room for a crop")
    model = build(arch)
    held = TikvCache(model.config, **cache)
    streamer = Meddler(lambda: CHANGES[change](held, model))
    with pytest.raises(tikv.PositionError, match="between two steps of captured, layer 0 of the cache was changed"):
        generate(model, held, inputs(arch, 11), 30, custom_generate=check_every(2, streamer=streamer))
    model.set_attn_implementation("tikv")
    held.reset()
    want = generate(model, TikvCache(model.config, **cache), inputs(arch, 11), 9, disable_compile=True)
    assert torch.equal(generate(model, held, inputs(arch, 11), 9).sequences, want.sequences)


@torch.no_grad()
@pytest.mark.parametrize("cache", [ROOM, SINKS], ids=str)
def test_after_an_interrupt_the_cache_holds_what_was_computed(arch, cache):
    def interrupt():
        raise KeyboardInterrupt

    model, ids = build(arch), inputs(arch, 11)
    held, fresh = (TikvCache(model.config, **cache) for _ in range(2))
    with pytest.raises(KeyboardInterrupt):
        generate(model, held, ids, 30, custom_generate=check_every(4, streamer=Meddler(interrupt)))
    text = generate(model, fresh, ids, 20, disable_compile=True).sequences
    lengths = {layer.get_seq_length() for layer in held.layers}
    assert len(lengths) == 1
    (length,) = lengths
    assert length >= 16
    again = TikvCache(model.config, **cache)
    model(text[:, :11], **given(again))
    for at in range(11, length):
        model(text[:, at : at + 1], **given(again))
    a, b = (model(text[:, length : length + 1], **given(each)).logits for each in (held, again))
    torch.testing.assert_close(a, b, rtol=0, atol=1e-5)


@pytest.mark.parametrize("number", [0, -1, 2.5, True, "8"])
def test_a_wrong_number_of_steps_is_refused(number):
    with pytest.raises(tikv.OptionError, match=r"check_every=.* is not supported. Use an integer of at least 1"):
        captured.with_options(check_every=number)


def test_too_small_a_cache_is_refused_before_anything_is_computed(arch):
    model = build(arch)
    held = TikvCache(model.config, max_cache_len=20)
    with pytest.raises(tikv.CapacityError, match="Use max_cache_len >= 40"):
        generate(model, held, inputs(arch, 11), 30, custom_generate=captured)
    assert held.get_seq_length() == 0


class Reading(transformers.LlamaForCausalLM):
    """A model that looks at numbers of the device."""

    def forward(self, *args, **kwargs):
        out = super().forward(*args, **kwargs)
        assert out.logits.sum().item() != 0.5
        return out

    forward.__signature__ = inspect.signature(transformers.LlamaForCausalLM.forward)


@pytest.mark.archs("cuda")
def test_a_model_that_reads_numbers_runs_without_a_graph_and_is_named_once(arch):
    model, ids = build(arch), inputs(arch, 11)
    want = generate(model, TikvCache(model.config, **ROOM), ids, 12, disable_compile=True).sequences
    reading = Reading(model.config).to(arch).eval()
    reading.load_state_dict(model.state_dict())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            got = generate(reading, TikvCache(model.config, **ROOM), ids, 12, custom_generate=captured).sequences
            assert torch.equal(got, want)
    (said,) = [str(each.message) for each in caught if "cannot be captured" in str(each.message)]
    assert "a step of Reading" in said


@pytest.mark.archs("cuda")
@pytest.mark.parametrize("options", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_steps_are_replays_and_a_second_cache_is_captured_at_once(arch, options):
    model, ids, calls = build(arch), inputs(arch, 11), []
    model.register_forward_hook(lambda *call: calls.append(1))
    for new in ((3, 4), (2,)):  # the prompt, one or two to try a step and one to capture it; then without a trial
        before = len(calls)
        generate(model, TikvCache(model.config, **ROOM), ids, 20, custom_generate=captured, **options)
        assert len(calls) - before in new
