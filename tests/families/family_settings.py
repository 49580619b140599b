"""What a cache has to get right in a model: each setting gives logits with a cache and those of the model without any.

The reference is the model's own attention over the whole sequence each time, ``use_cache=False``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple

import family_table as table
import torch
import transformers
from tiny_models import HIDDEN, ORDINARY
from transformers import DynamicCache, EncoderDecoderCache
from transformers.modeling_outputs import ModelOutput

NAME = "cache" if "cache" in inspect.signature(transformers.LlamaForCausalLM.forward).parameters else "past_key_values"
PROMPT, STEPS, ENCODED = 9, 6, 7
LENGTHS = (PROMPT, 4, 6)  # of the padded batch
CHUNKS = (4, 3, 2)
TOLERANCE = 1e-3  # of logits' standard deviation, in float32
CODES_TOLERANCE = 0.05  # the same for codes of 8 bits, of which a few round to the other side


@dataclasses.dataclass
class Encoded(ModelOutput):
    """What an encoder gives, with all that single families ask for."""

    last_hidden_state: Any = None
    hidden_states: Any = None
    attentions: Any = None
    attention_mask: Any = None
    router_logits: Any = None


class NoCache(Exception):
    """A model whose forward takes no cache."""


class Call(NamedTuple):
    """How a model is called: what it gets with each call and with the first one, and the names of what grows."""

    model: Any
    always: dict[str, Any]
    first: dict[str, Any]
    ids: str
    mask: str | None
    cache: str

    def logits(self, tokens: Any, mask: Any = None, cache: Any = None, past: int = 0) -> Any:
        """(batch, vocabulary): those of the last token; with a cache, which holds `past` tokens, given the rest."""
        rows = tokens.shape[0]
        given = self.always if past else {**self.always, **self.first}
        whole = cache is None or type(self.model).__name__ in table.WHOLE
        new = tokens if whole else tokens[:, past:]
        arguments = {self.ids: new, **{name: _rows(value, new) for name, value in given.items()}}
        if mask is not None and self.mask:
            arguments[self.mask] = mask
        if cache is not None:
            arguments[self.cache] = cache
        with torch.no_grad():
            out = self.model(**arguments, use_cache=cache is not None)
        found = getattr(out, "logits", None)
        found = out[0] if found is None else found
        return found[:, -1].reshape(rows, -1).float()


def _rows(value: Any, tokens: Any) -> Any:
    """What is given with these tokens."""
    if isinstance(value, torch.Tensor):
        return value[: tokens.shape[0]].clone()  # some models write into what they are given
    if isinstance(value, Encoded):
        return Encoded(last_hidden_state=value.last_hidden_state[: tokens.shape[0]].clone())
    return value(tokens)


def forget(model: Any) -> None:
    """Have a model forget what it keeps from one call to the next, which would not fit another batch."""
    for module in model.modules():
        if getattr(module, "rope_deltas", None) is not None:
            module.rope_deltas = None


def call_of(model: Any) -> Call:
    """How this model is called for one more token.

    Raises:
        NoCache: it takes none.
    """
    parameters = inspect.signature(model.forward).parameters
    if NAME not in parameters and "input_ids" not in parameters:
        raise NoCache("its forward takes neither tokens nor a cache")
    inner = inspect.signature(model.base_model.forward).parameters  # to which some pass on what they do not name
    if NAME not in parameters and NAME not in inner and model.config.get_text_config(decoder=True) is model.config:
        raise NoCache(f"its forward takes no {NAME}")
    name, config = type(model).__name__, model.config
    always = table.ALWAYS[name](config) if name in table.ALWAYS else {}
    first = table.FIRST[name](config) if name in table.FIRST else {}
    decoder = "decoder_input_ids" in parameters and config.is_encoder_decoder
    if decoder and not always and not first:
        always = {"encoder_outputs": Encoded(table.random(len(LENGTHS), ENCODED, HIDDEN))}
    ids = "decoder_input_ids" if decoder else "input_ids"
    mask = "decoder_attention_mask" if decoder else "attention_mask"
    return Call(model, always, first, ids, mask if mask in parameters else None, NAME)


def tokens_of(model: Any, rows: int) -> Any:
    """(rows, PROMPT + STEPS) ordinary tokens, the same each time."""
    seeded = torch.Generator().manual_seed(1)
    shape = table.token_shape(model, rows, PROMPT + STEPS)
    return torch.randint(ORDINARY.start, ORDINARY.stop, shape, generator=seeded)


def padded(model: Any) -> tuple[Any, Any]:
    """A batch of prompts padded on the left, with room for the steps, and its mask."""
    tokens = tokens_of(model, len(LENGTHS))
    mask = torch.ones(tokens.shape[:2], dtype=torch.long)
    for row, length in enumerate(LENGTHS):
        mask[row, : PROMPT - length] = 0
        tokens[row, : PROMPT - length] = 1
    return tokens, mask


class Row(NamedTuple):
    """What one call gave, and of what; or what it should have given."""

    call: Call
    logits: Any
    tokens: Any
    mask: Any = None
    wanted: Any = None


class Reference:
    """Logits without a cache, kept by what they are of."""

    def __init__(self) -> None:
        self.kept: dict[Any, Any] = {}

    def of(self, row: Row) -> Any:
        """Those that the row should have."""
        if row.wanted is not None:
            return row.wanted
        key = (
            id(row.call.always),
            tuple(row.tokens.shape),
            tuple(row.tokens.flatten().tolist()),
            None if row.mask is None else tuple(row.mask.flatten().tolist()),
        )
        if key not in self.kept:
            self.kept[key] = row.call, row.call.logits(row.tokens, row.mask)
        return self.kept[key][1]


def difference(got: list[Any], want: list[Any]) -> float:
    """The largest of all logits, in standard deviations of those wanted; nan where one is not finite."""
    worst = 0.0
    for a, b in zip(got, want, strict=True):
        found = float((a - b).abs().max() / b.std().clamp(min=1e-12))
        if found != found:
            return found
        worst = max(worst, found)
    return worst


def steps(call: Call, cache: Any) -> Iterator[Row]:
    """A prompt of two sequences and single tokens after it."""
    tokens = tokens_of(call.model, 2)
    past = 0
    for end in range(PROMPT, PROMPT + STEPS + 1):
        yield Row(call, call.logits(tokens[:, :end], None, cache, past), tokens[:, :end])
        past = end


def left_padded(call: Call, cache: Any) -> Iterator[Row]:
    """A batch of three lengths, padded on the left."""
    tokens, mask = padded(call.model)
    past = 0
    for end in range(PROMPT, PROMPT + STEPS + 1):
        yield Row(call, call.logits(tokens[:, :end], mask[:, :end], cache, past), tokens[:, :end], mask[:, :end])
        past = end


def chunked(call: Call, cache: Any) -> Iterator[Row]:
    """A prompt in three pieces, then a token, then two at once."""
    tokens = tokens_of(call.model, 2)
    past = 0
    for piece in (*CHUNKS, 1, 2):
        end = past + piece
        yield Row(call, call.logits(tokens[:, :end], None, cache, past), tokens[:, :end])
        past = end


def cropped(call: Call, cache: Any) -> Iterator[Row]:
    """Three tokens that are taken back after the prompt, and others in their place."""
    tokens = tokens_of(call.model, 2)
    wrong = tokens.clone()
    wrong[:, PROMPT : PROMPT + 3] = tokens[:, :3].flip(0)
    call.logits(tokens[:, :PROMPT], None, cache)
    if hasattr(cache, "activate_past_recording"):
        cache.activate_past_recording()
    for end in range(PROMPT + 1, PROMPT + 4):
        call.logits(wrong[:, :end], None, cache, end - 1)
    if not getattr(cache, "is_croppable", True):
        raise NotCroppable
    getattr(cache, "self_attention_cache", cache).crop(-3)
    for end in range(PROMPT + 1, PROMPT + STEPS + 1):
        yield Row(call, call.logits(tokens[:, :end], None, cache, end - 1), tokens[:, :end])


def reordered(call: Call, cache: Any) -> Iterator[Row]:
    """Both sequences go on from what the second one holds, as beams do."""
    tokens = tokens_of(call.model, 2)
    always, first = ({name: _same_rows(value) for name, value in given.items()} for given in (call.always, call.first))
    call = call._replace(always=always, first=first)
    call.logits(tokens[:, :PROMPT], None, cache)
    cache.reorder_cache(torch.tensor([1, 1]))
    tokens[0, :PROMPT] = tokens[1, :PROMPT]
    for end in range(PROMPT + 1, PROMPT + STEPS + 1):
        yield Row(call, call.logits(tokens[:, :end], None, cache, end - 1), tokens[:, :end])


_generated: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()  # without a cache, by the model


def generated(call: Call, cache: Any) -> Iterator[Row]:
    """What `generate` makes of a prompt, greedily: it prepares positions, masks and inputs in its own way."""
    if call.first or type(call.model).__name__ in table.CHANNELS or type(call.model).__name__ in table.WHOLE:
        raise NotOffered
    if call.model not in _generated:  # first asked for under the model's own attention
        _generated[call.model] = _greedy(call, use_cache=False)
    want = _generated[call.model]
    found = _greedy(call, **{call.cache: cache})
    for step, (got, wanted) in enumerate(zip(found.logits, want.logits, strict=True)):
        tokens = found.sequences[:, : found.sequences.shape[1] - STEPS + step]
        yield Row(call, got.reshape(2, -1).float(), tokens, wanted=wanted.reshape(2, -1).float())


def _greedy(call: Call, **options: Any) -> Any:
    """The greedy text of a prompt of two sequences."""
    tokens = tokens_of(call.model, 2)[:, :PROMPT]
    given = {name: _rows(value, tokens) for name, value in call.always.items()}
    forget(call.model)
    with torch.no_grad():
        return call.model.generate(
            **given,
            **{call.ids: tokens},
            **options,
            do_sample=False,
            min_new_tokens=STEPS,
            max_new_tokens=STEPS,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_logits=True,
        )


class NotOffered(Exception):
    """A setting that a model is not made for."""


class NotCroppable(Exception):
    """The cache says that it cannot be taken back."""


def _same_rows(value: Any) -> Any:
    """Every row as the second one: beams of one sequence have one encoder."""
    if isinstance(value, torch.Tensor):
        return value[1:2].expand_as(value)
    if isinstance(value, Encoded):
        return Encoded(last_hidden_state=_same_rows(value.last_hidden_state))
    return value


SETTINGS = {
    "steps": steps,
    "left-padded": left_padded,
    "chunks": chunked,
    "crop": cropped,
    "reorder": reordered,
    "generate": generated,
    "two caches": steps,
}


def transformers_cache(model: Any) -> Any:
    """What transformers itself would use, with all tokens of an encoder."""
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    return EncoderDecoderCache(cache, DynamicCache()) if model.config.is_encoder_decoder else cache


def tikv_cache(model: Any, **options: Any) -> Any:
    """The same of this library."""
    from tikv.integrations.transformers import TikvCache

    return TikvCache(model.config, **options)


def tikv_caches(model: Any) -> Any:
    """The same as two: one for the decoder's tokens, one for those of the encoder."""
    if not model.config.is_encoder_decoder:
        raise NotOffered
    return EncoderDecoderCache(tikv_cache(model), tikv_cache(model))


@contextlib.contextmanager
def attention(model: Any, name: str) -> Any:
    """The model with another attention, for as long as it lasts."""
    parts = [module for module in model.modules() if isinstance(module, transformers.PreTrainedModel)]
    before = [(module.config, module.config._attn_implementation) for module in parts]
    try:
        model.set_attn_implementation(name)
        yield
    finally:
        for config, implementation in before:
            config._attn_implementation_internal = implementation
