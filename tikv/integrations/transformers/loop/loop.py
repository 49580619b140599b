"""The loop of `captured`: each step of a model, with the choice of the next token, is work on the device alone.

The host launches several steps and then looks at their tokens. If the text has ended before the last of them, the steps
after its end are taken back: the cache, the random numbers and all else are as if they had never run.
"""

from __future__ import annotations

import contextlib
import warnings
import weakref
from typing import Any, NamedTuple

import torch
import transformers
from transformers import generation

from tikv.errors import PositionError
from tikv.integrations.transformers.attention.masks import starts_of
from tikv.integrations.transformers.layers.ring import RingLayer
from tikv.integrations.transformers.loop.replays import Numbers, replayed, waits
from tikv.integrations.transformers.memory import steps
from tikv.integrations.transformers.names import CACHE
from tikv.integrations.transformers.versions import generate

# Processors of logits whose work does not depend on the number of tokens, and which read nothing from the device.
_IN_A_STEP = {
    getattr(generation, name, None)
    for name in (
        "TemperatureLogitsWarper", "TopKLogitsWarper", "TopPLogitsWarper", "MinPLogitsWarper", "TypicalLogitsWarper",
        "EpsilonLogitsWarper", "EtaLogitsWarper", "RepetitionPenaltyLogitsProcessor", "SuppressTokensLogitsProcessor",
        "InfNanRemoveLogitsProcessor", "LogitNormalization",
    )
}  # fmt: skip

# Of each model the forms of steps that can be captured, and whether with the choice of the token.
_capturable: weakref.WeakKeyDictionary[Any, dict[Any, bool]] = weakref.WeakKeyDictionary()
_refused: weakref.WeakSet[Any] = weakref.WeakSet()  # models that a warning has named


class Options(NamedTuple):
    """Those of `captured.with_options`."""

    compile: bool = False
    check_every: int = 8
    streamer: Any = None


class Loop:
    """One text of `generate`.

    Args:
        model, cache, ids, processors, criteria, config: what `generate` gives, and the `TikvCache` in it.
        options: those of the user.
        kwargs: what else `generate` passes to the model.
    """

    def __init__(
        self, model: Any, cache: Any, ids: Any, processors: Any, criteria: Any, config: Any, options: Options,
        kwargs: dict[str, Any],
    ) -> None:  # fmt: skip
        self._model, self._cache, self._config, self._options = model, cache, config, options
        self._processors, self._kwargs = processors, kwargs
        self._layers = cache.layers_with_keys
        self._rings = [layer for layer in self._layers if isinstance(layer, RingLayer)]
        self._with_states = cache.layers_with_states
        self._prompt = ids
        self._length = self._begin = ids.shape[1]  # the number of tokens, and that of the prompt's
        self._max_length = min(each.max_length for each in criteria if hasattr(each, "max_length"))
        self._ends = [each for each in criteria if hasattr(each, "eos_token_id")]
        self._others = [each for each in criteria if not hasattr(each, "eos_token_id")]
        self._judged = any(type(each) is not generation.MaxLengthCriteria for each in self._others)
        self._numbers = Numbers(ids.device)
        self._places: list[Any] = []  # where the random numbers of the steps since the last look begin
        self._replay: Any = None
        self._rows: list[steps.RowsAhead | steps.StatesAhead] = []  # what the next steps overwrite
        self._states: list[steps.StatesAhead] = []
        self._saved: Any = None  # saves these rows
        self._inside = all(type(each) in _IN_A_STEP for each in processors)  # whether a step chooses the token too
        self._over = torch.zeros(len(ids), dtype=torch.bool)  # rows that other criteria than an end token have ended

    def run(self) -> Any:
        """The text, as `generate` returns it."""
        with torch.no_grad():
            outputs, kwargs = generate.prompt(self._model, self._prompt, self._config, self._kwargs)
            self._allocate(outputs.logits)
            del outputs
            self._choose(self._prompt)
            self._length += 1
            decode: Any = getattr(self._model, "_optimize_model_for_decode", contextlib.nullcontext)
            with decode():
                # A step is captured while the device computes the prompt, if that changes nothing should the text end.
                ahead = not (self._ends or self._judged) or not (self._rings or self._with_states)
                if ahead and self._length < self._max_length:
                    self._make_ready(kwargs)
                ended = self._look(1, 0)
                if not (ended or ahead):
                    self._make_ready(kwargs)
                try:
                    while not ended:
                        ended = self._look(*[self._some_steps()] * 2)
                except BaseException:
                    self._count_by_device()
                    raise
        if self._options.streamer is not None:
            self._options.streamer.end()
        return self._result()

    def _allocate(self, logits: Any) -> None:
        """Make the tensors in which steps leave what they compute, and put the logits of the prompt there."""
        config, ids = self._config, self._prompt
        batch, new = len(ids), self._max_length - self._begin
        self._logits = logits[:, -1].to(copy=True, dtype=torch.float32)
        # For each row and token: the token, and whether the row goes on after it.
        self._record = torch.zeros((2, batch, self._max_length), dtype=ids.dtype, device=ids.device)
        self._ids = self._record[0]
        self._ids[:, : self._begin] = ids
        self._at = torch.full((1,), self._begin, device=ids.device)  # a tensor from a list would wait for the prompt
        self._columns = torch.arange(self._max_length, device=ids.device)
        self._goes_on = torch.ones(batch, dtype=ids.dtype, device=ids.device)
        self._token = torch.zeros((batch, 1), dtype=ids.dtype, device=ids.device)
        pad = config._pad_token_tensor
        self._pad = None if pad is None else pad.to(ids.device)
        whole, shape = config.return_dict_in_generate, (new, *self._logits.shape)
        self._kept_scores = self._logits.new_empty(shape) if whole and config.output_scores else None
        self._kept_logits = self._logits.new_empty(shape) if whole and config.output_logits else None

    def _make_ready(self, kwargs: dict[str, Any]) -> None:
        """Bring the cache into the order of steps, and make what they get besides the token."""
        cache, layers, config = self._cache, self._layers, self._config
        self._held = cache.get_seq_length()
        for layer in layers:
            layer.make_ready()
        for layer in self._with_states:
            layer.refuse_state_outside(f"{CACHE}: captured", "Leave custom_generate out.")
        self._changes = [(layer._counted, layer._counted.changes) for layer in layers]
        self._most = min([self._options.check_every, *(layer.ring for layer in self._rings)])
        ends_early = self._most > 1 and bool(self._ends or self._judged)
        if ends_early:
            self._states = [steps.StatesAhead(layer, self._most) for layer in self._with_states]
            self._rows = [*(steps.RowsAhead(layer, self._most) for layer in self._rings), *self._states]
        self._addresses = [layer.states() for layer in self._with_states]
        more = self._max_length - self._length
        self._more = generate.kwargs_of_steps(self._model, kwargs, self._held, more)
        self._moving = [self._more[name] for name in ("position_ids", "cache_position") if name in self._more]
        padding = self._more.get("attention_mask")
        if padding is not None:
            now = padding[:, : self._held + 1]
            starts = None if bool(now.all()) else starts_of(now)
            self._more["attention_mask"] = None if bool(now.all()) else padding
            if starts is not None and all(
                each.starts is None or bool((each.starts == starts).all()) for each, _ in self._changes
            ):
                padding.tikv_starts = starts
        self._call = self._model
        if self._options.compile:
            self._call = _compiled_call(self._model, config.compile_config)
        form = [len(self._token), self._options.compile, config.do_sample, padding is not None]
        form += [type(each).__name__ for each in self._processors]
        form += [(type(layer).__name__, layer.storage[:2], layer._counted.slots) for layer in layers]
        self._form = tuple(map(str, form))
        self._trials = 2 if self._token.is_cuda else 0  # how often it is tried whether a step can be captured
        inside = _capturable.setdefault(self._model, {}).get(self._form)
        if self._trials and inside is not None:
            self._capture(inside)

    def _step(self) -> None:
        """One step: the newest token goes to the cache, and the logits of the next one are computed."""
        for each in self._states:
            each.keep_before_step()
        with steps.on_device(self._cache):
            inputs = generate.inputs_of_step(self._model, self._token, self._more)
            logits = self._call(**inputs, return_dict=True).logits
        self._logits.copy_(logits[:, -1])
        for each in self._moving:
            each.add_(1)

    def _whole_step(self) -> None:
        """A step, and the choice of the next token."""
        self._step()
        self._choose(self._ids)

    def _choose(self, ids: Any) -> None:
        """Choose the next token of each row by the logits, as `generate` does, and note it.

        In a step, `ids` are as many as the text may have: the newest token is repeated.
        """
        logits, at = self._logits, self._at
        if self._kept_logits is not None:
            self._kept_logits.index_copy_(0, at - self._begin, logits[None])
        scores = self._processors(ids, logits.clone()) if self._processors else logits
        if self._kept_scores is not None:
            self._kept_scores.index_copy_(0, at - self._begin, scores[None])
        if self._config.do_sample:
            token = torch.multinomial(torch.softmax(scores, dim=-1), num_samples=1).squeeze(1)
        else:
            token = torch.argmax(scores, dim=-1)
        if self._ends:
            token = token * self._goes_on + self._pad * (1 - self._goes_on)
        self._token.copy_(token[:, None])
        if self._processors:
            self._ids.copy_(torch.where(self._columns < at, self._ids, self._token))
        else:
            self._ids.index_copy_(1, at, self._token)
        for criterion in self._ends:
            self._goes_on.mul_(~criterion(self._token, None))
        self._record[1].index_copy_(1, at, self._goes_on[:, None])
        at.add_(1)

    def _capture(self, inside: bool) -> None:
        """Capture a step for replays, with the choice of the token if `inside`; if it fails, steps are calls."""
        device, used = self._token.device, self._cache.step_use.uses()
        try:
            self._replay = replayed(self._whole_step if inside else self._step, device)
            self._saved = replayed(self._save_rows, device) if self._rows else None
        except Exception as error:
            self._replay = None
            if not _capturable[self._model].pop(self._form, False):  # it may have been compiled for another cache
                self._name_model(f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}")
        else:
            self._inside = inside
            _capturable[self._model][self._form] = inside
        self._cache.step_use.go_back_to(used)  # nothing was computed, whether it failed or not
        for each, _ in self._changes:
            each.ran(0)

    def _name_model(self, why: str) -> None:
        """Run the steps one by one, and say once per model why."""
        self._trials = 0
        if self._model not in _refused:
            _refused.add(self._model)
            warnings.warn(
                f"{CACHE}: a step of {type(self._model).__name__} cannot be captured in a CUDA graph, so its steps "
                f"run one by one: {why}",
                stacklevel=2,
            )

    def _run_step(self) -> None:
        """Run a step and choose the next token."""
        ids = self._ids if self._inside else self._ids[:, : self._length]
        if self._replay is not None:
            self._replay()
            if not self._inside:
                self._choose(ids)
        elif not self._trials:
            self._step()
            self._choose(ids)
        else:
            step, choice = waits(self._step), waits(lambda: self._choose(ids))
            self._trials -= 1
            if not (step or choice) or not (step or self._trials):
                self._capture(self._inside and not choice)
            elif not self._trials:
                self._name_model(step)

    def _save_rows(self) -> None:
        for rows in self._rows:
            rows.keep()

    def _some_steps(self) -> int:
        """Run steps until the next look; how many."""
        room = self._cache.token_limit
        number = int(min(self._most, self._max_length - self._length))
        if room is not None:
            number = min(number, room - self._held)
            if number < 1:
                for layer in self._layers:
                    layer.refuse_beyond_limit(1)
        if self._judged or self._options.streamer is not None:
            self._refuse_changes()
        self._places = []
        if self._rows:
            (self._saved or self._save_rows)()
        for _ in range(number):
            if self._config.do_sample or not self._inside:
                self._places.append(self._numbers.place())
            self._run_step()
            self._length += 1
        return number

    def _look(self, new: int, number: int) -> bool:
        """Look at the `new` tokens, which that many steps have made; whether the text has ended."""
        first = self._length - new
        tokens, goes_on = self._record[:, :, first : self._length].cpu()
        ended, good, stopped = False, new, False
        for i in range(new):
            length = first + i + 1
            alive = goes_on[:, i].bool() & ~self._over
            stopped = self._judged and self._stop(length, alive, i == new - 1)
            ended = length >= self._max_length or not bool((alive & ~self._over).any())
            if self._options.streamer is not None:
                self._options.streamer.put(tokens[:, i].clone())
            if ended or (stopped and self._ends):  # then padding follows in these rows
                good = i + 1
                break
        if number:
            if good < new:
                self._take_back(new - good, good, goes_on[:, good - 1])
            for each, _ in self._changes:
                each.ran(good)
            self._held += good
        if self._ends and bool(self._over.any()):
            self._goes_on.masked_fill_(self._over.to(self._goes_on.device), 0)
        return ended

    def _stop(self, length: int, alive: Any, newest: bool) -> bool:
        """Ask all criteria but the end tokens about the text up to `length`; whether rows have ended only by them."""
        scores = None
        if self._kept_scores is not None:
            scores = tuple(self._kept_scores[: length - self._begin])
        ids, before = self._ids[:, :length], self._over.clone()
        for criterion in self._others:
            if newest or not isinstance(criterion, transformers.generation.MaxTimeCriteria):  # which asks the clock
                self._over |= torch.as_tensor(criterion(ids, scores)).cpu().bool()
        return bool((self._over & ~before & alive).any())

    def _take_back(self, number: int, good: int, goes_on: Any) -> None:
        """Undo the last steps, of which `good` before them stay; `goes_on` is of the newest token that stays."""
        for rows in self._rows:
            rows.put_back(good)
        for each, _ in self._changes:
            each.count.sub_(number)
        for each in (*self._moving, self._at):
            each.sub_(number)
        self._length -= number
        if self._places:
            self._numbers.go_to(self._places[good])
        self._goes_on.copy_(goes_on)
        self._token.copy_(self._ids[:, self._length - 1 : self._length].clone())
        self._ids[:, self._length :] = self._token

    def _refuse_changes(self) -> None:
        """Raise PositionError if the cache was changed since the last look, by a streamer or by criteria."""
        for layer, (counted, changes) in zip(self._layers, self._changes, strict=True):
            if (
                layer._counted is not counted
                or counted.changes != changes
                or not layer._goes_by_steps()
                or layer.get_seq_length() != self._held
            ):
                raise PositionError(
                    f"{CACHE}: between two steps of captured, layer {layer.index} of the cache was changed, or the "
                    f"model's attention: it holds {layer.get_seq_length()} tokens, and {self._held} were cached. Let "
                    f"streamers and stopping criteria only read the cache, or leave custom_generate out."
                )
        for layer, states in zip(self._with_states, self._addresses, strict=True):
            if [*map(id, layer.states())] != [*map(id, states)]:
                raise PositionError(
                    f"{CACHE}: between two steps of captured, the state of layer {layer.index} was replaced. Let "
                    f"streamers and stopping criteria only read the cache, or leave custom_generate out."
                )

    def _count_by_device(self) -> None:
        """After an interrupt, count what each layer has on the device."""
        with contextlib.suppress(RuntimeError):  # of a device that has failed
            for layer, (counted, changes) in zip(self._layers, self._changes, strict=True):
                if layer._counted is counted and counted.changes == changes and counted.current:
                    counted.ran(0)
                    before = layer.slot_map.end
                    counted.ran(int(counted.count[0]) - before)

    def _result(self) -> Any:
        text, new = self._ids[:, : self._length].clone(), self._length - self._begin
        if not self._config.return_dict_in_generate:
            return text
        scores, logits = (None if a is None else tuple(a[:new]) for a in (self._kept_scores, self._kept_logits))
        return generate.generated(text, scores, logits, self._cache)


def _compiled_call(model: Any, config: Any) -> Any:
    """The model, compiled by torch without CUDA graphs of its own; torch keeps the code, and nothing here the model."""
    options = dict((config or generation.CompileConfig()).to_dict())
    if options.get("mode") in ("reduce-overhead", "max-autotune"):
        options["mode"] = {"reduce-overhead": None, "max-autotune": "max-autotune-no-cudagraphs"}[options["mode"]]
    return torch.compile(model.forward, **options)
