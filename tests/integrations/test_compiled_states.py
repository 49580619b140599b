"""Compiled steps of models whose layers keep a state: the texts and states of eager steps, and no half of a step."""

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

import hybrids  # noqa: E402
import tiny_models  # noqa: E402
from hybrids import steps, tokens  # noqa: E402
from model_cache import compiling, generate, given  # noqa: E402
from torch._dynamo.utils import counters  # noqa: E402

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

OFTEN = ("falcon_h1", "lfm2", "qwen3_next")
ROOM = {"max_cache_len": 64}


@pytest.fixture(autouse=True)
def fresh():
    torch.compiler.reset()
    counters.clear()


def build(family):
    if family not in tiny_models.folders():
        pytest.skip(f"transformers {transformers.__version__} has no {family}")
    model = tiny_models.tiny_model(tiny_models.generators(family)[0])
    model.set_attn_implementation("tikv")
    return model


def write(model, cache, ids, new_tokens=6, **options):
    return generate(model, cache, {"input_ids": ids}, new_tokens, eos_token_id=None, pad_token_id=0, **options)


def states(cache):
    return [state for layer in cache.layers_with_states for state in layer.states()]


@pytest.mark.parametrize(
    "family", [f if f in OFTEN else pytest.param(f, marks=pytest.mark.full) for f in hybrids.FAMILIES]
)
def test_texts_and_states_are_those_of_eager_steps(arch, family):
    model, ids = build(family), tokens(1, 9)
    eager, compiled = (TikvCache(model.config, **ROOM) for _ in range(2))
    if why := eager.why_not_compiled():
        assert "own modules" in why or "keys of an indexer" in why or "sliding window and a state" in why
        return
    want = write(model, eager, ids, disable_compile=True)
    got = write(model, compiled, ids, **compiling(arch))
    assert torch.equal(got.sequences, want.sequences)
    assert counters["stats"]["unique_graphs"] == 1
    for a, b in zip(got.logits, want.logits, strict=True):
        assert (a - b).abs().max() <= 1e-5 * b.abs().max()
    for a, b in zip(states(compiled), states(eager), strict=True):
        assert (a - b).abs().max() <= 1e-5 * b.abs().max()
    later = tokens(1, 3, seed=2)
    a, b = (steps(model, cache, later) for cache in (compiled, eager))
    assert (a - b).abs().max() <= 1e-4 * b.abs().max()


def test_what_is_not_compiled_says_why(arch):
    config = build("qwen3_next").config
    recorded, growing = TikvCache(config, **ROOM, record_states=4), TikvCache(config, **ROOM)
    assert recorded.why_not_compiled() == "states are recorded (record_states=4)"
    assert growing.is_compileable
    growing.activate_past_recording()
    assert growing.why_not_compiled() == "layers record the past"
    assert not growing.is_compileable


def test_one_program_serves_caches_and_texts(arch):
    model, texts = build("qwen3_next"), []
    for how in ({"disable_compile": True}, compiling(arch)):
        for _ in range(2):
            cache = TikvCache(model.config, **ROOM)
            for seed in range(2):
                ids = tokens(1, 9, seed=seed)
                for turn in range(2):
                    ids = write(model, cache, ids, 4, **how).sequences
                    ids = torch.cat((ids, tokens(1, 2, seed=5 + turn)), 1)
                texts.append(ids)
                cache.reset()
    assert all(torch.equal(a, b) for a, b in zip(texts[:4], texts[4:], strict=True))
    assert counters["stats"]["unique_graphs"] == 1


def test_forks_snapshots_and_other_sequences_go_on(arch):
    model, ids, found = build("lfm2"), tokens(2, 9), []
    for how in ({"disable_compile": True}, compiling(arch)):
        cache = TikvCache(model.config, **ROOM)
        text = write(model, cache, ids, 4, **how).sequences
        before = cache.snapshot()
        fork = cache.fork(2)
        write(model, cache, torch.cat((text, tokens(2, 1, seed=3)), 1), 4, **how)
        cache.restore(before)
        cache.reorder_cache(torch.tensor([1, 0]))
        again = write(model, cache, torch.cat((text.flip(0), tokens(2, 2, seed=4)), 1), 4, **how).sequences
        forked = torch.cat((text.repeat_interleave(2, 0), tokens(4, 1, seed=6)), 1)
        found.append((again, write(model, fork, forked, 4, **how).sequences))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


STOP = []  # at how many more calls of `stop` Ctrl-C comes


@torch.library.custom_op("tikv_tests::stop", mutates_args=())
def stop(a: torch.Tensor) -> torch.Tensor:
    """A copy, in compiled programs too; or Ctrl-C."""
    STOP[:] = [calls - 1 for calls in STOP]
    if 0 in STOP:
        raise KeyboardInterrupt
    return a.clone()


@stop.register_fake
def _(a):
    return torch.empty_like(a)


def write_until_interrupted(model, cache, ids, **how):
    """Text until Ctrl-C comes before the last layer of the second step after the prompt."""
    STOP[:] = [3]
    with pytest.raises(KeyboardInterrupt):
        write(model, cache, ids, **how)
    STOP.clear()


@pytest.fixture
def stoppable():
    model = build("qwen3_next")
    model.model.layers[-1].register_forward_pre_hook(lambda layer, args: (stop(args[0]), *args[1:]))
    return model


@torch.no_grad()
def test_after_an_interrupt_within_a_step_the_next_use_is_refused(arch, stoppable):
    model, ids, how = stoppable, tokens(1, 9), compiling(arch)
    want = write(model, TikvCache(model.config, **ROOM), ids, disable_compile=True)
    cache = TikvCache(model.config, **ROOM)
    before = cache.snapshot()
    write_until_interrupted(model, cache, ids, **how)
    for use in (
        lambda: model(ids[:, :1], **given(cache)),
        lambda: cache.snapshot(),
        lambda: cache.fork(2),
        lambda: cache.batch_repeat_interleave(2),
        lambda: cache.crop(-1),
    ):
        with pytest.raises(tikv.PositionError, match="a compiled step was interrupted"):
            use()
    for go_back in (lambda: cache.restore(before), cache.reset):
        go_back()
        assert torch.equal(write(model, cache, ids, **how).sequences, want.sequences)
        write_until_interrupted(model, cache, torch.cat((want.sequences, ids), 1), **how)


@torch.no_grad()
def test_an_interrupt_leaves_no_half_of_a_step_where_states_are_written_at_its_end(arch, stoppable):
    """Compilers other than the eager one may write all states after everything else."""
    model, ids, how = stoppable, tokens(1, 9), compiling(arch)
    how["compile_config"].backend = "aot_eager"
    cache = TikvCache(model.config, **ROOM)
    write_until_interrupted(model, cache, ids, **how)
    length = cache.get_seq_length()
    eager = TikvCache(model.config, **ROOM)
    text = write(model, eager, ids, disable_compile=True).sequences
    again = TikvCache(model.config, **ROOM)
    write(model, again, ids, length - 8, disable_compile=True)
    assert again.get_seq_length() == length
    want = model(text[:, length : length + 1], **given(again)).logits
    try:
        got = model(text[:, length : length + 1], **given(cache)).logits
    except tikv.PositionError:
        return
    assert (got - want).abs().max() <= 1e-5 * want.abs().max()
