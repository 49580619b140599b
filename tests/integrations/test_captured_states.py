"""`captured` with models whose layers keep a state: the texts of eager `generate`, and states as after it."""

import warnings

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

import tiny_models  # noqa: E402
from model_cache import generate, given  # noqa: E402

import tikv  # noqa: E402
from tikv.integrations.transformers import TikvCache, captured  # noqa: E402
from tikv.integrations.transformers.loop import custom_generate  # noqa: E402
from tikv.integrations.transformers.versions.installed import VERSION  # noqa: E402

pytestmark = [
    pytest.mark.archs("cpu", "cuda"),
    pytest.mark.filterwarnings("default"),
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(VERSION < (5, 19), reason="layers with a state came with transformers 5.19"),
]

OFTEN = ("falcon_h1", "lfm2_moe", "qwen3_next", "zamba2")
FAMILIES = (*OFTEN, "bamba", "granitemoehybrid", "jamba", "kimi_linear", "lfm2", "nemotron_h", "qwen3_5", "zaya")
ROOM = {"max_cache_len": 64}
STREAMED = {"window": 8, "sinks": 2}
SAMPLED = {"do_sample": True, "top_k": 20, "top_p": 0.9, "temperature": 1.3, "repetition_penalty": 1.2}


def build(arch, family):
    if family not in tiny_models.folders():
        pytest.skip(f"transformers {transformers.__version__} has no {family}")
    model = tiny_models.tiny_model(tiny_models.generators(family)[0]).to(arch)
    model.set_attn_implementation("tikv")
    return model


def tokens(arch, rows, count, seed=1):
    low, high = tiny_models.ORDINARY.start, tiny_models.ORDINARY.stop
    return torch.randint(low, high, (rows, count), generator=torch.Generator().manual_seed(seed)).to(arch)


def prompt(arch, rows=1, padded=0):
    mask = torch.ones((rows, 9), dtype=torch.long, device=arch)
    mask[0, :padded] = 0
    return {"input_ids": tokens(arch, rows, 9), "attention_mask": mask}


def check_every(number, **options):
    return captured.with_options(check_every=number, **options)


def write(model, cache, ids, new_tokens=20, **options):
    return generate(model, cache, ids, new_tokens, **{"eos_token_id": None, "pad_token_id": 0, **options})


@torch.no_grad()
def goes_on(model, cache, arch):
    """The logits of more tokens, each in a step of its own."""
    more = tokens(arch, 1, 4, seed=3)
    return torch.cat([model(more[:, i : i + 1], **given(cache)).logits for i in range(4)], 1)


def both(model, arch, ids, cache=None, loop=captured, new_tokens=20, **options):
    """Check that text, logits, random numbers and cache are those of eager `generate`."""
    made = []
    for more in ({"disable_compile": True}, {"custom_generate": loop}):
        held = TikvCache(model.config, **(ROOM if cache is None else cache))
        with warnings.catch_warnings():
            warnings.filterwarnings("error", "TikvCache")
            text = write(model, held, ids, new_tokens, **options, **more)
        made.append((text, held, torch.rand(1, device=arch)))
    (want, eager, number), (got, replayed, same) = made
    assert torch.equal(got.sequences, want.sequences)
    for a, b in zip(got.logits, want.logits, strict=True):
        assert (a - b).abs().max() <= 1e-5 * b.abs().max()
    assert torch.equal(number, same), "random numbers go on alike"
    assert replayed.get_seq_length() == eager.get_seq_length()
    if len(ids["input_ids"]) == 1:
        a, b = (goes_on(model, held, arch) for held in (replayed, eager))
        assert (a - b).abs().max() <= 1e-4 * b.abs().max()
    return got


@pytest.mark.parametrize("family", [f if f in OFTEN else pytest.param(f, marks=pytest.mark.full) for f in FAMILIES])
@pytest.mark.parametrize("options", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_every_family(arch, family, options):
    both(build(arch, family), arch, prompt(arch), **options)


@pytest.mark.parametrize("family", OFTEN)
def test_left_padding(arch, family):
    both(build(arch, family), arch, prompt(arch, 2, padded=3))


@pytest.mark.parametrize("number", [1, 3, 8])
@pytest.mark.parametrize(("family", "cache"), [("falcon_h1", STREAMED), *((family, ROOM) for family in OFTEN)], ids=str)
@pytest.mark.parametrize("options", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_a_text_that_ends_early_leaves_no_trace_of_later_steps(arch, number, family, cache, options):
    model, ids = build(arch, family), prompt(arch)
    held = TikvCache(model.config, **cache)
    whole = write(model, held, ids, disable_compile=True, **options).sequences[0, 9:].tolist()
    firsts = [i for i, token in enumerate(whole) if token not in whole[:i]]
    at = min(firsts, key=lambda i: abs(i - 5))
    got = both(model, arch, ids, cache, check_every(number), eos_token_id=whole[at], **options)
    assert got.sequences.shape[1] == 10 + at


def test_a_conversation_goes_on_and_a_cache_is_used_again(arch):
    model, texts = build(arch, "qwen3_next"), []
    for how in ({"disable_compile": True}, {"custom_generate": captured}):
        held = TikvCache(model.config, **ROOM)
        for _ in range(2):
            ids = tokens(arch, 1, 9)
            for turn in range(3):
                text = write(model, held, {"input_ids": ids}, 6, **how).sequences
                ids = torch.cat((text, tokens(arch, 1, 2, seed=turn)), 1)
            texts.append(ids)
            held.reset()
    assert all(torch.equal(text, texts[0]) for text in texts)


@pytest.mark.parametrize(
    ("options", "loop", "why"),
    [
        ({"record_states": 4}, captured, r"states are recorded \(record_states=4\)"),
        ({}, captured.with_options(compile=True), "compile=True is not for layers that keep a state"),
    ],
    ids=str,
)
def test_what_is_not_captured_goes_on_by_the_usual_loop_and_says_so(arch, options, loop, why):
    model, ids = build(arch, "qwen3_next"), prompt(arch)
    custom_generate._warn_once.cache_clear()
    want = write(model, TikvCache(model.config, **ROOM, **options), ids, disable_compile=True)
    with pytest.warns(UserWarning, match=f"without captured, because {why}"):
        got = write(model, TikvCache(model.config, **ROOM, **options), ids, custom_generate=loop, disable_compile=True)
    assert torch.equal(got.sequences, want.sequences)


def test_states_that_grow_are_not_captured(arch):
    model = build(arch, "lfm2_moe")
    held = TikvCache(model.config, **ROOM)
    held.activate_past_recording()
    custom_generate._warn_once.cache_clear()
    with pytest.warns(UserWarning, match="without captured, because layers record the past"):
        write(model, held, prompt(arch), 4, custom_generate=captured, disable_compile=True)


class Streamer(transformers.generation.streamers.BaseStreamer):
    """Calls a function at the sixth new token."""

    def __init__(self, function):
        self.function, self.seen = function, 0

    def put(self, value):
        self.seen += value.numel()
        if self.seen == 15:
            self.function()

    def end(self):
        pass


def test_a_state_that_is_replaced_between_steps_is_refused(arch):
    model = build(arch, "qwen3_next")
    held = TikvCache(model.config, **ROOM)
    layer = held.layers_with_states[0]
    streamer = Streamer(layer.reset)
    with pytest.raises(tikv.PositionError, match="between two steps of captured, the state of layer 0 was replaced"):
        write(model, held, prompt(arch), 30, custom_generate=check_every(2, streamer=streamer))


@torch.no_grad()
def test_after_an_interrupt_between_steps_the_cache_goes_on(arch):
    def interrupt():
        raise KeyboardInterrupt

    model, ids = build(arch, "qwen3_next"), prompt(arch)
    held, again = (TikvCache(model.config, **ROOM) for _ in range(2))
    text = write(model, TikvCache(model.config, **ROOM), ids, 30, disable_compile=True).sequences
    with pytest.raises(KeyboardInterrupt):
        write(model, held, ids, 30, custom_generate=check_every(4, streamer=Streamer(interrupt)))
    length = held.get_seq_length()
    assert length >= 14
    model(text[:, :9], **given(again))
    for at in range(9, length):
        model(text[:, at : at + 1], **given(again))
    a, b = (model(text[:, length : length + 1], **given(each)).logits for each in (held, again))
    torch.testing.assert_close(a, b, rtol=0, atol=1e-5 * float(b.std()))


@pytest.mark.archs("cpu")  # on CUDA a step is one launch
@torch.no_grad()
def test_after_an_interrupt_within_a_step_the_next_use_is_refused(arch):
    model, ids, calls = build(arch, "qwen3_next"), prompt(arch), []

    def interrupt(*_):
        calls.append(1)
        if len(calls) == 5:
            raise KeyboardInterrupt

    held = TikvCache(model.config, **ROOM)
    hook = model.model.layers[-1].register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        write(model, held, ids, 30, custom_generate=captured)
    hook.remove()
    with pytest.raises(tikv.PositionError, match=r"A state cannot go back: use restore|the layers hold"):
        model(ids["input_ids"][:, :1], **given(held))
    held.reset()
    want = write(model, TikvCache(model.config, **ROOM), ids, disable_compile=True).sequences
    assert torch.equal(write(model, held, ids, disable_compile=True).sequences, want)


@pytest.mark.archs("cuda")
def test_steps_are_replays(arch):
    model, ids, calls = build(arch, "falcon_h1"), prompt(arch), []
    model.register_forward_hook(lambda *call: calls.append(1))
    for new in ((3, 4), (2,)):  # the prompt, one or two to try a step and one to capture it; then without a trial
        before = len(calls)
        write(model, TikvCache(model.config, **ROOM), ids, custom_generate=captured)
        assert len(calls) - before in new
