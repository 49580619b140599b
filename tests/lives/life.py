"""One cache's life: what is done to it is plain data, and after each step attention and logits are compared.

Two things are compared. In each layer, what attention gives of all rows that `update` was ever given for the tokens
that are held now: computed in float64, from the numbers that the format stores, under a mask. And the logits of the
new tokens with those of the same model without any cache; not for narrow formats, nor with ``window=``, which a model
without a cache does not have.
"""

import contextlib
import copy
import dataclasses
import functools
import inspect
import pathlib
from typing import Any

import torch
from model_cache import NAME
from transformers.modeling_outputs import BaseModelOutput
from transformers.modeling_utils import AttentionInterface

import tikv
from lives import expected, families, traced
from lives.families import CHUNKED, SLIDING, STATE
from tikv.formats import TileFormat, parse_aging
from tikv.integrations.transformers import TikvCache
from tikv.integrations.transformers.versions.installed import VERSION

MOST_TOKENS = 420
MOST_ROWS = 4
ROLLBACK = 64  # what a layer with a window can always be cropped by, as its manual says
# Of standard deviations: sums in another order, and the roundings of a model in half precision.
OFF = {"float32": 2e-4, "float16": 3e-2, "bfloat16": 2e-1}
OFF_LOGITS = {"float32": 1e-3, "float16": 1e-1, "bfloat16": 5e-1}
OWN_ROUNDINGS = 1.5  # of what the same model in half precision without a cache is off by
SOURCE = 11  # tokens of an encoder's text
RECORDS = VERSION >= (5, 24)  # whether states can be recorded; then states take several tokens after a prompt too
ATTENTIONS = ("tikv", "sdpa", "eager")


class Wrong(AssertionError):
    """The cache did something that it must not do."""


class Interrupt(KeyboardInterrupt):
    """Ctrl-C of a life; one of the user's ends the test."""


@dataclasses.dataclass
class Text:
    """What a cache should hold.

    Attributes:
        cache: the cache.
        tokens: (batch, n).
        starts: (batch,), the number of padding tokens of each row.
        rows: for each layer, the keys and values that `update` was given.
        crossed: the same of what the encoder gave.
        source: what the encoder gave, and its mask; None without one.
        coded: where each layer's codes end, if only its older tokens are codes.
        longest: the greatest length since the cache was empty.
        recorded: from which length on the past is recorded; None if it is not.
        compiled: whether compiled steps have run since the cache was empty.
        reach: the least length to which states that are recorded can go back.
    """

    cache: Any
    tokens: Any
    starts: Any
    rows: dict[int, tuple[Any, Any]]
    crossed: dict[int, tuple[Any, Any]] = dataclasses.field(default_factory=dict)
    source: tuple[Any, Any] | None = None
    coded: dict[int, int] = dataclasses.field(default_factory=dict)
    longest: int = 0
    recorded: int | None = None
    compiled: bool = False
    reach: int = 0

    @property
    def length(self) -> int:
        return int(self.tokens.shape[1])

    def copied(self) -> "Text":
        return dataclasses.replace(self, rows=dict(self.rows), crossed=dict(self.crossed), coded=dict(self.coded))

    def take_rows(self, index: Any) -> None:
        self.tokens, self.starts = self.tokens[index], self.starts[index]
        self.rows, self.crossed = (
            {i: (k[index], v[index]) for i, (k, v) in rows.items()} for rows in (self.rows, self.crossed)
        )
        if self.source is not None:
            self.source = self.source[0][index], self.source[1][index]

    def has_held(self, length: int, recorded_states: int) -> None:
        """A layer at least has held so many tokens."""
        self.longest = max(self.longest, length)
        self.reach = max(self.reach, length - recorded_states)

    def cut(self, length: int) -> None:
        self.tokens = self.tokens[:, :length]
        self.rows = {i: (k[:, :, :length], v[:, :, :length]) for i, (k, v) in self.rows.items()}
        self.coded = {i: min(coded, length) for i, coded in self.coded.items()}


def _numbers(seed: int) -> Any:
    return torch.Generator().manual_seed(seed)


class Life:
    """The life of one cache, and of its copy.

    Args:
        family: name in `families.FAMILIES`.
        options: those of `TikvCache`, where a format is a name, and ``model``, the model's dtype if it is narrow.
        folder: where the cache is saved.
    """

    def __init__(self, family: str, options: dict[str, Any], folder: pathlib.Path) -> None:
        self.family, self.folder = families.FAMILIES[family], folder
        self.numbers = options.get("model", "float32")
        self.model, self.plain = families.models(family, self.numbers)
        self.model.set_attn_implementation("tikv")
        self.options = options = {k: v for k, v in options.items() if k != "model"}
        layers = families.decoder_layers(self.plain)
        self.cross: dict[Any, int] = {}  # modules that read what the encoder gave, and their layers
        if self.family.encoder:
            self.cross = {families.cross_attention(a): i for i, a in enumerate(families.decoder_layers(self.model))}
        self.exact = [getattr(layer, "self_attn", None) for layer in layers]
        self.limit, self.window = options.get("max_cache_len"), options.get("window")
        self.formats = options.get("dtype"), options.get("v_dtype", options.get("dtype"))
        self.scales = options.get("k_scale"), options.get("v_scale")
        self.aging = parse_aging(expected.format_of(self.formats[0]))  # a format in which older tokens are codes
        sight = expected.Sight
        self.sights = [sight(k, self.window, options.get("sinks", 0)) for k in self.family.layers]
        if all(kind in (SLIDING, CHUNKED) for kind in self.family.layers):
            self.limit = None  # such layers go on beyond it
        made = {n: expected.format_of(v) if n.endswith("dtype") else v for n, v in options.items()}
        self.text = self._empty(TikvCache(self.model.config, **made))
        self.other: Text | None = None
        self.taken: tuple[Any, Text] | None = None  # a snapshot, and what the cache held
        self.watched: Text | None = None
        self.fails: tuple[int, bool] | None = None  # the layer that is interrupted, and whether after its attention
        self.counts: dict[str, int] = {}
        self.off = self.off_logits = 0.0  # the greatest difference of attention and of logits

    @staticmethod
    def _empty(cache: Any) -> Text:
        nothing = torch.zeros((0, 0), dtype=torch.long)
        return Text(cache, nothing, torch.zeros(0, dtype=torch.long), {})

    # --- operations

    def do(self, operation: tuple[Any, ...]) -> None:
        """Do one operation, and compare.

        Raises:
            Wrong: something is not as it should be.
        """
        name, *arguments = operation
        if self.text.length == 0 and name not in ("begin", "attention", "record", "reset", "interrupt", "restore"):
            return
        try:
            done = getattr(self, name)(*arguments)
        except (Wrong, KeyboardInterrupt):
            raise
        except tikv.TikvError as error:
            raise Wrong(f"refused: {type(error).__name__}: {error}") from error
        except Exception as error:
            raise Wrong(f"{type(error).__name__}: {error}") from error
        if done is not False:
            self.counts[name] = self.counts.get(name, 0) + 1
        self._check_lengths()

    def begin(self, tokens: int, padding: list[int], seed: int) -> Any:
        """A prompt with so much padding in each row; before it a reset, if there is a text."""
        if self.text.length:
            self.reset()
        if self.limit is not None and tokens > self.limit:
            tokens = self.limit
        padding = [min(n, tokens - 1) for n in padding]
        padding[seed % len(padding)] = 0 if seed % 4 else padding[seed % len(padding)]
        text = self.text
        self.start(padding, seed)
        if any(padding) and self.family.states and min(padding):
            text.starts = text.starts - text.starts.min()
        self._feed(tokens, seed)

    def start(self, padding: list[int], seed: int) -> None:
        """The rows of a text without tokens, and what an encoder gives for them."""
        text, batch = self.text, len(padding)
        text.tokens, text.starts = torch.zeros((batch, 0), dtype=torch.long), torch.tensor(padding)
        if not self.family.encoder:
            return
        ids = torch.randint(2, families.COMMON["vocab_size"], (batch, SOURCE), generator=_numbers(seed))
        mask = (torch.arange(SOURCE)[None] < SOURCE - torch.arange(batch)[:, None] * 3).long()
        with torch.no_grad():
            encoded = self.plain.get_encoder()(input_ids=ids, attention_mask=mask).last_hidden_state
        text.source = encoded.to(getattr(torch, self.numbers)), mask

    def tokens(self, count: int, seed: int) -> Any:
        """New tokens at once."""
        if self.family.states and count > 1 and not RECORDS:
            count = 1  # a state takes single tokens after the prompt
        return self._feed(count, seed) if self._fits(count) else False

    def steps(self, count: int, seed: int) -> Any:
        """Single tokens, eager."""
        for i in range(count):
            if self._fits(1):
                self._feed(1, seed + i)

    def compiled(self, count: int, by_hand: bool, seed: int) -> Any:
        """Single tokens in compiled steps, of `generate` or by hand."""
        if self.family.encoder or self.aging is not None:
            return False
        if self.family.states and not self.text.cache.is_compileable:
            return False
        for i in range(count):
            if self._fits(1):
                self._feed(1, seed + i, "by hand" if by_hand else "generate")
        return None

    def beyond(self, extra: int, seed: int) -> Any:
        """Tokens beyond ``max_cache_len``, which are refused before anything is written."""
        if self.limit is None:
            return False
        try:
            self._feed(self.limit - self.text.length + extra, seed)
        except tikv.CapacityError:
            return None
        raise Wrong(f"{extra} tokens beyond max_cache_len={self.limit} were taken")

    def crop(self, count: int) -> Any:
        """The newest tokens are taken back."""
        text = self.text
        target = max(int(text.starts.max()) + 1, text.length - count)
        if target >= text.length:
            return False
        try:
            text.cache.crop(target - text.length)
        except tikv.TikvError:
            if self._must_go_back(target):
                raise
            return None
        text.cut(target)
        if text.recorded is not None:
            text.recorded = min(text.recorded, target)
        return None

    def empty(self, count: int, seed: int) -> Any:
        """All tokens are taken back, and the same rows begin with others."""
        text = self.text
        if bool(text.starts.any()):
            return False
        try:
            text.cache.crop(-text.length)
        except tikv.TikvError:
            if self._must_go_back(0):
                raise
            return None
        text.cut(0)
        if text.recorded is not None:
            text.recorded = 0
        return self._feed(count if self.limit is None else min(count, self.limit), seed)

    def _must_go_back(self, target: int) -> bool:
        """Whether the manual promises that the cache can be cropped to this length."""
        text, kinds = self.text, self.family.layers
        recorded = text.recorded is not None and target >= text.recorded
        if self.aging is not None and target and target < max(text.coded.values(), default=0):
            return False  # codes can be dropped in whole groups only, if a layer's groups end there
        if self.family.states and (not self.options.get("record_states") or target < text.reach):
            return False
        if self.window is not None and text.longest > self.window and target < text.longest - 1:
            return False
        if not {SLIDING, CHUNKED} & set(kinds) or target >= text.longest - ROLLBACK:
            return True
        return recorded and not text.compiled

    def reorder(self, seed: int) -> None:
        """Each row goes on from another row's text."""
        index = torch.randint(0, len(self.text.tokens), (len(self.text.tokens),), generator=_numbers(seed))
        self.text.cache.reorder_cache(index)
        self.text.take_rows(index)

    def repeat(self, repeats: int) -> Any:
        """Each row is repeated."""
        batch = len(self.text.tokens)
        if batch * repeats > MOST_ROWS:
            return False
        self.text.cache.batch_repeat_interleave(repeats)
        self.text.take_rows(torch.arange(batch).repeat_interleave(repeats))
        return None

    def select(self, seed: int) -> None:
        """Some rows are kept, in any order."""
        batch, numbers = len(self.text.tokens), _numbers(seed)
        index = torch.randperm(batch, generator=numbers)[: 1 + seed % batch]
        self.text.cache.batch_select_indices(index)
        self.text.take_rows(index)

    def fork(self, n: int) -> None:
        """Go on with several texts from each row; the original waits."""
        n = n if len(self.text.tokens) * n <= MOST_ROWS else 1
        forked = self.text.copied()
        forked.cache = self.text.cache.fork(n)
        forked.take_rows(torch.arange(len(forked.tokens)).repeat_interleave(n))
        self.other, self.text = self.text, forked

    def copy(self) -> None:
        """Go on with a copy; the original waits."""
        copied = self.text.copied()
        copied.cache = copy.deepcopy(self.text.cache)
        self.other, self.text = self.text, copied

    def swap(self) -> Any:
        """Go on with the cache that waits."""
        if self.other is None:
            return False
        self.text, self.other = self.other, self.text
        return None

    def save(self) -> Any:
        """Go on with what a file holds."""
        path = self.folder / "life.safetensors"
        self.text.cache.save(path)
        self.text.cache = TikvCache.load(path, self.model.config)
        self.text.recorded, self.text.reach = None, self.text.length
        return None

    def reset(self) -> None:
        """Forget everything."""
        self.text.cache.reset()
        empty = self._empty(self.text.cache)
        empty.recorded = None if self.text.recorded is None else 0
        self.text = empty

    def snapshot(self) -> None:
        """Remember the text."""
        self.taken = self.text.cache.snapshot(), self.text.copied()

    def restore(self) -> Any:
        """Go back to the text that was remembered of this cache."""
        if self.taken is None or self.taken[1].cache is not self.text.cache:
            return False
        snapshot, text = self.taken
        text.cache.restore(snapshot)
        self.text = text.copied()
        return None

    def attention(self, name: str) -> Any:
        """Another attention from now on."""
        if name == "sdpa" and not self.model._supports_sdpa:
            return False
        self.model.set_attn_implementation(name)
        return None

    def record(self) -> None:
        """From now on the past is kept for `crop`."""
        self.text.cache.activate_past_recording()
        self.text.recorded = self.text.length

    def interrupt(self, layer: int, after: bool, count: int, seed: int) -> Any:
        """Ctrl-C in the middle of a step, which is then repaired."""
        layers, layer = self.family.with_memory, layer % len(self.family.layers)
        if self.family.states and not RECORDS:
            count = 1
        if not self._fits(count):
            return False
        if not self.text.length:
            self.start([0], seed)
        text, before = self.text, self.text.copied()
        self.fails = layer, after
        try:
            self._feed(count, seed)
        except Interrupt:
            pass
        else:
            raise Wrong("the interrupt was not seen")
        finally:
            self.fails = None
        done = layer + after
        if done >= layers:  # the whole step
            text.has_held(text.length, self.options.get("record_states", 0))
            self.text = text
        elif done:
            self.text = before.copied()
            if seed % 3:  # a program may have counted the tokens that were lost
                self.text.tokens = text.tokens
            self._refuses_to_go_on(f"an interrupt after {done} of {layers} layers", seed)
            self.text = before
            before.has_held(before.length + count, self.options.get("record_states", 0))
            if seed % 2 or self.restore() is False:
                before.coded = {i: min(end, before.length) for i, end in text.coded.items()}  # codes stay codes
                self._align()
        return None

    def _refuses_to_go_on(self, what: str, seed: int) -> None:
        """Layers of unequal length take no more tokens."""
        try:
            self._feed(1, seed)
        except tikv.TikvError:
            return
        except Exception as error:
            raise Wrong(f"after {what} the cache was not refused: {error}") from error
        raise Wrong(f"after {what} the cache was not refused")

    def _align(self) -> None:
        """Bring all layers to the shortest one's length, or begin again where that is impossible."""
        text = self.text
        try:
            length = text.cache.align()
        except tikv.TikvError:
            if self._must_go_back(text.length) and self.aging is None:  # codes of an interrupted step stay
                raise
            self.reset()
            return
        if length != text.length:
            raise Wrong(f"align returned {length}, and the shortest layer has {text.length}")
        if text.recorded is not None:
            text.recorded = min(text.recorded, text.length)
        if not text.length:
            self.reset()

    # --- a step

    def _fits(self, count: int) -> bool:
        if self.text.length + count > MOST_TOKENS:
            return False
        return self.limit is None or self.text.length + count <= self.limit

    def _feed(self, count: int, seed: int, how: str = "eager") -> None:
        """The model gets new tokens; their logits are compared."""
        before, text = self.text.copied(), self.text
        new = torch.randint(2, families.COMMON["vocab_size"], (len(text.starts), count), generator=_numbers(seed))
        text.tokens = torch.cat((text.tokens, new), 1)
        end = text.length
        where = torch.arange(end)[None]
        mask = (where >= text.starts[:, None]).long()
        text.tokens = torch.where(mask.bool(), text.tokens, families.COMMON["pad_token_id"])
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        silent = not bool(text.starts.any()) and seed % 2 == 0  # neither a mask nor positions are passed
        self.watched = text
        try:
            logits = self._call(text, count, None if silent else mask, None if silent else positions, how)
        except BaseException:
            self.text = before if self.text is text else self.text
            raise
        finally:
            self.watched = None
        text.has_held(end, self.options.get("record_states", 0))
        text.compiled = text.compiled or how != "eager"
        if self.formats == (None, None) and self.window is None:
            self._compare_logits(logits, mask, positions, count)

    def _call(self, text: Text, count: int, mask: Any, positions: Any, how: str) -> Any:
        given = {NAME: text.cache, "use_cache": True}
        if text.source is not None:
            given.update(self.of_both(text.tokens[:, -count:], mask, positions, text))
            with torch.no_grad(), watching(self):
                return self.model(**given).logits
        if how == "generate" and text.cache.is_compileable:
            if mask is None:
                mask = torch.ones_like(text.tokens)
            inputs = self.model.prepare_inputs_for_generation(
                text.tokens, next_sequence_length=count, attention_mask=mask, position_ids=positions, **given
            )
        else:
            inputs = {"input_ids": text.tokens[:, -count:], **given}
            if mask is not None:
                inputs.update(attention_mask=mask, position_ids=positions[:, -count:])
        with torch.no_grad(), watching(self), traced.traced() if how != "eager" else contextlib.nullcontext():
            return self.model(**inputs).logits

    def of_both(self, ids: Any, mask: Any, positions: Any, text: Text) -> dict[str, Any]:
        """What a model with an encoder is given for a decoder's tokens."""
        encoded, of_source = text.source or (None, None)
        given = {"encoder_outputs": BaseModelOutput(encoded), "attention_mask": of_source, "decoder_input_ids": ids}
        if mask is not None:
            given["decoder_attention_mask"] = mask
            if "decoder_position_ids" in inspect.signature(self.model.forward).parameters:
                given["decoder_position_ids"] = positions[:, -ids.shape[1] :]
        return given

    def _compare_logits(self, logits: Any, mask: Any, positions: Any, count: int) -> None:
        text = self.text
        given = {"input_ids": text.tokens, "attention_mask": mask, "position_ids": positions}
        if text.source is not None:
            given = self.of_both(text.tokens, mask, positions, text)
            given["encoder_outputs"] = BaseModelOutput(text.source[0].to(self.plain.dtype))
        real = mask[:, -count:].bool()

        def off_from(want: Any, logits: Any) -> float:
            return float((logits - want).abs().amax(-1)[real].max() / want[real].std())

        with torch.no_grad():
            want = self.plain(**given, use_cache=False).logits[:, -count:]
            off = off_from(want, logits)
            self.off_logits = max(self.off_logits, off)
            if off <= OFF_LOGITS[self.numbers]:
                return
            if self.numbers != "float32" and text.source is None:  # the model's own roundings may be larger
                rounded = off_from(want, self.model(**given, use_cache=False).logits[:, -count:])
                if off <= OWN_ROUNDINGS * rounded:
                    return
        raise Wrong(f"logits are off by {off:.2g} standard deviations")

    def _check_lengths(self) -> None:
        text = self.text
        kinds = self.family.layers[: self.family.with_memory]
        lengths = [text.cache.get_seq_length(i) for i, kind in enumerate(kinds) if kind != STATE]
        if any(int(length) != text.length for length in lengths):
            raise Wrong(f"layers have {[int(n) for n in lengths]} tokens instead of {text.length}")

    # --- what is seen of a step

    def saw_update(self, cache: Any, key: Any, value: Any, layer: int) -> None:
        """Rows that a layer is about to get."""
        text = self.watched
        if text is None:
            return
        new = key.detach().clone(), value.detach().clone()
        if cache is getattr(text.cache, "cross_attention_cache", None):
            if layer in text.crossed:
                raise Wrong(f"layer {layer} takes what the encoder gave a second time")
            text.crossed[layer] = new
        if cache is not getattr(text.cache, "self_attention_cache", text.cache):
            return
        if layer in text.rows:
            new = tuple(torch.cat(pair, 2) for pair in zip(text.rows[layer], new, strict=True))  # type: ignore[assignment]
        text.rows[layer] = new  # type: ignore[assignment]
        if self.aging is not None:
            after, end = new[0].shape[2], text.coded.get(layer, 0)
            before = after - key.shape[2]
            text.coded[layer] = expected.end_of_codes(self.aging, self.sinks_of(layer), end, before, after)

    def saw_attention(self, module: Any, query: Any, out: Any, options: dict[str, Any]) -> None:
        """What a layer's attention gave, of which queries."""
        text = self.watched
        if text is None:
            return
        layer = self.cross.get(module, module.layer_idx)
        if module in self.cross:
            what, key, value = "the encoder", *self._as_stored(text.crossed[layer])
        elif self.aging is not None:
            what, key, value = self.sights[layer].kind, *self._with_codes(self.family.source(layer), query.shape[2])
        else:
            what, key, value = self.sights[layer].kind, *self._as_stored(text.rows[self.family.source(layer)])
        if hasattr(module, "kv_b_proj"):
            exact = self.exact[layer]
            expand, dtype = type(exact).expand_kv, exact.kv_b_proj.weight.dtype
            key, value = getattr(expand, "__wrapped__", expand)(exact, key.to(dtype), value.to(dtype))
        held, tokens = key.shape[2], query.shape[2]
        queries = torch.arange(text.length - tokens, text.length)
        if module in self.cross:
            mask = text.source[1].bool()[:, None].expand(-1, tokens, -1)  # type: ignore[index]
        else:
            mask = self.sights[layer].mask(text.starts, queries, held)
        scale = options.get("scaling")
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        bias = self.position_bias(module, tokens, held)
        want = expected.attention(query, key, value, mask, scale, options.get("softcap"), options.get("s_aux"), bias)
        real = queries[None] >= text.starts[:, None]
        off = float((out.double() - want).abs().amax((-1, -2))[real].max() / want[real].std())
        self.off = max(self.off, off)
        if not off <= OFF[self.numbers]:
            raise Wrong(f"attention of layer {layer} ({what}) is off by {off:.2g} deviations")

    def sinks_of(self, layer: int) -> int:
        """How many first tokens of a layer never become codes."""
        if self.sights[layer].kind in (SLIDING, CHUNKED):
            return 0
        return self.options.get("sinks", 0) or self.aging.sinks

    def _as_stored(self, pair: tuple[Any, Any]) -> Any:
        """Keys and values as their formats give them back."""
        forms = zip(pair, self.formats, self.scales, (True, False), strict=True)
        return (expected.as_stored(rows.float(), name, scale, keys) for rows, name, scale, keys in forms)

    def _with_codes(self, layer: int, new: int) -> Any:
        """Keys and values of which older ones are codes; in tiles, several new ones are seen as they came."""
        assert self.watched is not None
        codes = slice(self.sinks_of(layer), self.watched.coded.get(layer, 0))
        for i, rows in enumerate(self.watched.rows[layer]):
            numbers = expected.with_codes(rows, self.aging, codes, keys=i == 0)
            if isinstance(self.aging, TileFormat) and new > 1:
                numbers[:, :, -new:] = rows[:, :, -new:]
            yield numbers

    def position_bias(self, module: Any, tokens: int, held: int) -> Any:
        """What T5 adds to the scores of its decoder's own tokens; None for others."""
        if module in self.cross or not hasattr(module, "relative_attention_num_buckets"):
            return None
        first = families.self_attention(families.decoder_layers(self.plain)[0])
        return first.compute_bias(tokens, held, past_seen_tokens=held - tokens)

    def reached(self, layer: int, after: bool) -> None:
        """The model has come to a layer, or is behind its attention."""
        if self.fails == (layer, after):
            raise Interrupt


@contextlib.contextmanager
def watching(life: Life) -> Any:
    """Have a life see what its model's layers and attention do."""
    update, interface = TikvCache.update, AttentionInterface.get_interface

    @functools.wraps(update)
    def seen_update(cache: Any, key: Any, value: Any, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        life.saw_update(cache, key, value, layer_idx)
        return update(cache, key, value, layer_idx, *args, **kwargs)

    def get_interface(self: Any, *args: Any, **kwargs: Any) -> Any:
        attend = interface(self, *args, **kwargs)

        def attention(module: Any, query: Any, *arguments: Any, **options: Any) -> Any:
            out = attend(module, query, *arguments, **options)
            life.saw_attention(module, query, out[0], options)
            life.reached(module.layer_idx, True)
            return out

        return attention

    handles = []
    if life.fails is not None:
        for i, module in enumerate(families.decoder_layers(life.model)):
            handles.append(module.register_forward_pre_hook(lambda *_, i=i: life.reached(i, False)))
            if life.family.layers[i] == STATE:
                handles.append(module.register_forward_hook(lambda *_, i=i: life.reached(i, True)))
    TikvCache.update, AttentionInterface.get_interface = seen_update, get_interface  # type: ignore[method-assign]
    try:
        yield
    finally:
        TikvCache.update, AttentionInterface.get_interface = update, interface  # type: ignore[method-assign]
        for handle in handles:
            handle.remove()


def live(family: str, options: dict[str, Any], operations: list[tuple[Any, ...]], folder: pathlib.Path) -> Life:
    """A whole life; at its end the cache that waits goes on too.

    Raises:
        Wrong: something is not as it should be; `args` are what, and the number of the operation.
    """
    traced.install()
    try:
        life = Life(family, options, folder)
    except tikv.TikvError as error:
        raise Wrong(f"refused when made: {error}", 0) from error
    ending = [("steps", 1, 0), ("swap",), ("steps", 2, 1)]
    for number, operation in enumerate([*operations, *ending]):
        try:
            life.do(operation)
        except Wrong as error:
            raise Wrong(str(error), min(number, len(operations))) from error
    return life
