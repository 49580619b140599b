"""What a `TikvCache` can do in each family whose layers keep a state: the second table of docs/families.md."""

from __future__ import annotations

import contextlib
import pathlib
import tempfile
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import tiny_models
import torch
from model_cache import compiling, given

import tikv
from tikv.integrations.transformers import TikvCache, captured

FAMILIES = (
    "bailing_hybrid", "bamba", "falcon_h1", "glm5_next", "granitemoehybrid", "inkling", "inkling2", "inkling2_loop",
    "jamba", "kimi_linear", "lara_mini", "lfm2", "lfm2_moe", "lfm3", "nemotron_h", "olmo_hybrid", "qwen3_5",
    "qwen3_5_moe", "qwen3_next", "qwen4_exp", "recurrent_gemma", "zamba", "zamba2", "zaya",
)  # fmt: skip
RECORDED = 6
NEAR = 1e-3  # of standard deviations: Zamba2's own cache differs by 7e-5 from a run without one
GREEDY = {"do_sample": False, "max_new_tokens": 12, "eos_token_id": None, "pad_token_id": 0}

HEADING = "## Models with a state\n"
INTRODUCTION = f"""
In each family of this page whose layers keep a state, the same command tries what a cache has to do with states.
`crop` and drafted tokens (prompt lookup) need `record_states=`, see
[Models with a state](tutorials/transformers.md#models-with-a-state). "yes" means the same bits as before, or logits
within {NEAR} standard deviations of a run without a cache; "refused", that an error says so before anything changes.
[Captured steps](tutorials/transformers.md#a-step-as-one-cuda-graph) end early there; "refused" means that `generate`
goes on with its own loop, and a warning says why. Compiled steps, those of `generate` with `max_cache_len=`, are one
program there for all of them, and they have the same texts as eager ones; "refused" means that they are eager.

"""


class Row(NamedTuple):
    """A family in the table; each field is a cell."""

    family: str
    crop: str
    drafts: str
    pieces: str
    snapshot: str
    file: str
    fork: str
    sequences: str
    captured: str
    compiled: str


def row(family: str) -> Row:
    """What a family does."""
    model = tiny_models.tiny_model(tiny_models.generators(family)[0])
    tries = (_crop, _drafts, _pieces, _snapshot, _file, _fork, _sequences, _captured, _compiled)
    return Row(family, *(_word(attempt, model) for attempt in tries))


def table(rows: list[Row]) -> str:
    """The section of the page."""
    titles = (
        "family",
        "`crop`",
        "drafted tokens",
        "prompt in pieces",
        "`snapshot`",
        "file",
        "`fork`",
        "reorder, select",
        "captured steps",
        "compiled steps",
    )
    lines = [titles, ("---",) * len(titles), *rows]
    return HEADING + INTRODUCTION + "".join(f"| {' | '.join(line)} |\n" for line in lines)


def rows_of(text: str) -> list[Row]:
    """Those of a page."""
    lines = [line for line in text.partition(HEADING)[2].splitlines() if line.startswith("| ")]
    return [Row(*line.removeprefix("| ").removesuffix(" |").split(" | ")) for line in lines[2:]]


def _word(attempt: Callable[[Any], bool], model: Any) -> str:
    try:
        return "yes" if attempt(model) else "no"
    except tikv.OptionError:
        return "refused"


def tokens(rows: int, count: int, seed: int = 1) -> Any:
    """Random tokens without a meaning."""
    low, high = tiny_models.ORDINARY.start, tiny_models.ORDINARY.stop
    return torch.randint(low, high, (rows, count), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def read(model: Any, cache: Any, ids: Any) -> Any:
    """The logits of new tokens."""
    held = cache.get_seq_length()
    positions = torch.arange(held, held + ids.shape[1])[None].expand(ids.shape[0], -1)  # Bamba's count from 0
    mask = torch.ones(ids.shape[0], held + ids.shape[1], dtype=torch.long)
    return model(ids, **given(cache), position_ids=positions, attention_mask=mask).logits


def steps(model: Any, cache: Any, ids: Any) -> Any:
    """The logits of tokens that come one at a time."""
    return torch.cat([read(model, cache, ids[:, i : i + 1]) for i in range(ids.shape[1])], 1)


@torch.no_grad()
def whole(model: Any, ids: Any) -> Any:
    """The logits of a text without a cache."""
    return model(ids, use_cache=False).logits


def _is_near(a: Any, b: Any) -> bool:
    return float((a - b).abs().max()) <= NEAR * float(b.std())


def _crop(model: Any) -> bool:
    ids, cache = tokens(2, 15), TikvCache(model.config, record_states=RECORDED)
    read(model, cache, ids[:, :9])
    want = steps(model, cache, ids[:, 9:])
    cache.crop(-6)
    same = torch.equal(steps(model, cache, ids[:, 9:]), want)
    cache.crop(-6)
    read(model, cache, torch.cat([ids[:, 9:11], ids[:, :4]], 1))
    cache.crop(-4)
    between = _is_near(steps(model, cache, ids[:, 11:]), want[:, 2:])
    cache.crop(-4)
    cache.crop(-2)  # and into the prompt, as far as is recorded
    return same and between and _is_near(want, whole(model, ids)[:, 9:])


def _drafts(model: Any) -> bool:
    prompt = tokens(1, 5).repeat(1, 3)
    want = model.generate(prompt, **given(TikvCache(model.config)), **GREEDY)
    cache = TikvCache(model.config, record_states=RECORDED)
    return torch.equal(model.generate(prompt, **given(cache), **GREEDY, prompt_lookup_num_tokens=RECORDED), want)


def _pieces(model: Any) -> bool:
    ids, cache = tokens(1, 14), TikvCache(model.config)
    parts = [read(model, cache, part) for part in ids.split([6, 5, 3], 1)]
    return _is_near(torch.cat(parts, 1), whole(model, ids))


def _snapshot(model: Any) -> bool:
    ids, cache = tokens(2, 12), TikvCache(model.config)
    read(model, cache, ids[:, :9])
    snapshot = cache.snapshot()
    want = steps(model, cache, ids[:, 9:])
    cache.reset()
    read(model, cache, ids[:, 2:])
    cache.restore(snapshot)
    return torch.equal(steps(model, cache, ids[:, 9:]), want)


def _file(model: Any) -> bool:
    ids, cache = tokens(2, 12), TikvCache(model.config)
    read(model, cache, ids[:, :9])
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "text.safetensors"
        cache.save(path)
        loaded = TikvCache.load(path, model.config)
    return torch.equal(steps(model, loaded, ids[:, 9:]), steps(model, cache, ids[:, 9:]))


def _fork(model: Any) -> bool:
    ids, cache = tokens(1, 9), TikvCache(model.config)
    read(model, cache, ids)
    later = tokens(3, 3, seed=2)
    return _is_near(steps(model, cache.fork(3), later), whole(model, torch.cat([ids.expand(3, -1), later], 1))[:, 9:])


def _sequences(model: Any) -> bool:
    ids, cache = tokens(3, 12), TikvCache(model.config)
    read(model, cache, ids[:, :9])
    cache.reorder_cache(torch.tensor([2, 2, 0]))
    cache.batch_select_indices(torch.tensor([2, 1]))
    order = [0, 2]
    return _is_near(steps(model, cache, ids[order, 9:]), whole(model, ids[order])[:, 9:])


def _captured(model: Any) -> bool:
    ids = tokens(1, 9)
    with _attention_of_tikv(model):
        caches = _with_room(model, 3)
        whole = model.generate(ids, **given(caches[2]), **GREEDY)
        options = GREEDY | {"eos_token_id": int(whole[0, -4])}
        want = model.generate(ids, **given(caches[0]), **options)
        text = model.generate(ids, **given(caches[1]), **options, custom_generate=captured)
        later = tokens(1, 3, seed=2)
        return torch.equal(text, want) and _is_near(*(steps(model, cache, later) for cache in caches[:2]))


def _compiled(model: Any) -> bool:
    ids = tokens(1, 9)
    with _attention_of_tikv(model):
        caches = _with_room(model, 2)
        want = model.generate(ids, **given(caches[0]), **GREEDY, disable_compile=True)
        text = model.generate(ids, **given(caches[1]), **GREEDY, **compiling("cpu"))
        torch.compiler.reset()
        later = tokens(1, 3, seed=2)
        return torch.equal(text, want) and _is_near(*(steps(model, cache, later) for cache in caches))


@contextlib.contextmanager
def _attention_of_tikv(model: Any) -> Iterator[None]:
    attention = model.config._attn_implementation
    model.set_attn_implementation("tikv")
    try:
        yield
    finally:
        model.set_attn_implementation(attention)


def _with_room(model: Any, count: int) -> list[TikvCache]:
    """Caches for steps on the device."""
    caches = [TikvCache(model.config, max_cache_len=40) for _ in range(count)]
    if why := caches[0].why_not_compiled():
        raise tikv.OptionError(f"steps: {why}")
    return caches
