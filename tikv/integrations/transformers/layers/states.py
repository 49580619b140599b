"""Layers of a `TikvCache` that keep a state beside keys and values, or instead of them; the state is transformers' own.

This module is imported only for models with such layers, since old versions of transformers have no classes for them.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from transformers import cache_utils

from tikv.errors import OptionError, PositionError, ShapeError
from tikv.integrations.transformers.layers.layer import TikvLayer
from tikv.integrations.transformers.layers.state_calls import StateCall
from tikv.integrations.transformers.layers.streaming import StreamingLayer
from tikv.integrations.transformers.memory.state_copies import STATES, StateCopies
from tikv.integrations.transformers.names import CACHE


class EarlierState(NamedTuple):
    """A state before a call of its module.

    Attributes:
        tokens: how many tokens the call had.
        conv, recurrent: copies of the state; both are None before the first token.
    """

    tokens: int
    conv: Any
    recurrent: Any

    @property
    def is_start(self) -> bool:
        """Whether no token came before."""
        return self.conv is None and self.recurrent is None

    def changed(self, change: Any) -> EarlierState:
        """The same of other sequences."""
        return EarlierState(self.tokens, *(None if a is None else change(a) for a in (self.conv, self.recurrent)))


def _copied(state: Any, spare: Any) -> Any:
    """A copy of a state, in the memory of a spare one if that is as large."""
    if state is None or spare is None or spare.shape != state.shape or spare.is_inference() != state.is_inference():
        return None if state is None else state.detach().clone()
    with torch.inference_mode(spare.is_inference()), torch.no_grad():
        return spare.copy_(state)


class StateLayer(cache_utils.LinearAttentionLayer):  # type: ignore[misc]
    """Transformers' own layer with a state, and the methods that a cache needs and that layer lacks.

    Args:
        index: the layer's number, for messages.
        record_states: how many tokens `crop` can always drop; 0 for none.
        is_here: whether a module of the model is known that keeps its state in the cache.
        **options: those of transformers' layer.

    Attributes:
        records: of each state, what it was before the newest calls of its module, if states are recorded.
        seen: how many tokens each state includes, if states are recorded.
    """

    def __init__(self, index: int, record_states: int = 0, is_here: bool = True, **options: Any) -> None:
        super().__init__(**options)
        self.record_past: bool = False  # as transformers' layer begins
        self.index, self.record_states, self.is_here = index, record_states, is_here
        self._options: Mapping[str, Any] = {"record_states": record_states, "is_here": is_here, **options}
        self._from_start: set[int] = set()  # the states that include all tokens since the first
        self.records: dict[int, list[EarlierState]] = {i: [] for i in range(self.number_of_states)}
        self.seen = dict.fromkeys(range(self.number_of_states), 0)

    def update_conv_state(self, conv_states: Any, state_idx: int = 0, **kwargs: Any) -> Any:
        """As transformers' layer does."""
        recording = self.record_past
        if recording and self.record_states:  # as a layer with sliding keys may; then `records` serve
            self.record_past = False
        elif recording and not self.has_previous_state[state_idx]:
            self._from_start.add(state_idx)
        try:
            return super().update_conv_state(conv_states, state_idx, **kwargs)
        finally:
            self.record_past = recording

    def record(self, state_idx: int, call: StateCall | None) -> None:
        """Record a state, which a call of its module is about to change.

        Args:
            state_idx: its number.
            call: the call; None if it is unknown, and with it how many tokens it has: then no record leads back.
        """
        records = self.records[state_idx]
        if call is None:
            records.clear()
            return
        if not call.note(self.index, state_idx):
            return
        self.seen[state_idx] += call.tokens
        spare = EarlierState(0, None, None)
        while records and sum(each.tokens for each in records[1:]) + call.tokens >= self.record_states:
            spare = records.pop(0)
        conv = recurrent = None
        if self.has_previous_state[state_idx]:
            conv = _copied(self.conv_states[state_idx], spare.conv)
            recurrent = _copied(self.recurrent_states[state_idx], spare.recurrent)
        records.append(EarlierState(call.tokens, conv, recurrent))

    def _record_before(self, state_idx: int, back: int) -> int | None:
        """The index of the record of the state before the last `back` tokens; None if it is not recorded."""
        records = self.records[state_idx]
        for i in reversed(range(len(records))):
            back -= records[i].tokens
            if back == 0 or (back > 0 and i == 0 and records[i].is_start):
                return i
        return None

    def take_back(self, state_idx: int, back: int) -> bool:
        """Let a state be what it was before the last `back` tokens; whether that is recorded."""
        records, at = self.records[state_idx], self._record_before(state_idx, back)
        if at is None:
            return False
        self.seen[state_idx] -= back
        if records[at].is_start:
            self._forget_state(state_idx)
        else:
            copies = StateCopies()
            self._put(self.conv_states, {state_idx: records[at].conv}, copies)
            self._put(self.recurrent_states, {state_idx: records[at].recurrent}, copies)
            copies.make()
        del records[at:]
        return True

    def refuse_state_outside(
        self,
        operation: str,
        instead: str = "Call reset() and process the whole text again, as the batch that it should be.",
    ) -> None:
        """Raise if the model keeps the state elsewhere: nothing has arrived here, although the cache holds tokens.

        `instead` is the way out.

        RecurrentGemma does so, in attributes of its modules, which a cache cannot see.

        Raises:
            OptionError: it does. Nothing is changed.
        """
        if self._sequences() is None:
            raise OptionError(
                f"{operation}: the state of layer {self.index} is not in the cache but in the model's own modules, "
                f"which the cache does not reach. {instead}"
            )

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Let each sequence b continue from the state of sequence ``beam_idx[b]``.

        Raises:
            ShapeError, PositionError: there is not one index per sequence, or an index has no sequence. Nothing is
                changed.
        """
        index = torch.as_tensor(beam_idx)
        operation = f"{CACHE}.reorder_cache"
        batch = self._sequences()
        if batch is None:
            return
        if index.shape != (batch,):
            raise ShapeError(
                f"{operation}: index has shape {tuple(index.shape)}, and layer {self.index} keeps the states of "
                f"{batch} sequences. Pass an index for each."
            )
        self._check_sequences(operation, index, 0, batch)
        super().reorder_cache(index)
        self._change_records(lambda state: state.index_select(0, index.to(state.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each sequence: 0, 0, 1, 1 for 2."""
        self._change_states(lambda state: state.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep these sequences, in this order.

        Raises:
            ShapeError, PositionError: a mask has the wrong length, or an index has no sequence. Nothing is changed.
        """
        rows = torch.as_tensor(indices)
        operation = f"{CACHE}.batch_select_indices"
        batch = self._sequences()
        if batch is None:
            return
        if rows.dtype == torch.bool:
            if rows.shape != (batch,):
                raise ShapeError(
                    f"{operation}: the mask has shape {tuple(rows.shape)}, and layer {self.index} keeps the "
                    f"states of {batch} sequences. Pass one entry for each."
                )
        else:
            self._check_sequences(operation, rows, -batch, batch)
        self._change_states(lambda state: state[rows.to(state.device)])

    def _sequences(self) -> int | None:
        """How many sequences have a state; None before the first."""
        states = (state for each in (self.conv_states, self.recurrent_states) for state in each.values())
        return next((state.shape[0] for state in states if state is not None), None)

    def _check_sequences(self, operation: str, index: torch.Tensor, low: int, high: int) -> None:
        """Raise unless indices on the host are those of existing sequences; it never waits for the device."""
        if index.device.type != "cpu":
            return
        outside = [i for i in index.flatten().tolist() if not low <= i < high]
        if outside:
            raise PositionError(
                f"{operation}: there is no sequence {outside[0]}; layer {self.index} keeps the states of {high} "
                f"sequences. Use {low} to {high - 1}."
            )

    def _change_states(self, change: Any) -> None:
        for states in (self.conv_states, self.recurrent_states):
            for i, state in states.items():
                if state is not None:
                    states[i] = change(state)
        self._change_records(change)

    def _change_records(self, change: Any) -> None:
        for records in self.records.values():
            records[:] = [each.changed(change) for each in records]

    @property
    def is_croppable(self) -> bool:
        """Whether `crop` can take the state back."""
        return self.record_states > 0 or bool(super().is_croppable)

    def activate_past_recording(self) -> None:
        """As `TikvCache.activate_past_recording`; a layer whose states are recorded anyway stays as it is."""
        if not self.record_states:
            super().activate_past_recording()

    def reset(self) -> None:
        """Forget the state, so that another batch may come."""
        super().reset()
        for i in range(self.number_of_states):
            self._forget_state(i)
            self.records[i].clear()

    def _forget_state(self, i: int) -> None:
        self._from_start.discard(i)
        self.conv_states[i] = self.recurrent_states[i] = None
        self.is_conv_states_initialized[i] = self.is_recurrent_states_initialized[i] = False
        self.has_previous_state[i] = False
        self.seen[i] = 0

    def count_all(self, length: int) -> None:
        """Note that the states, which came from a file, include so many tokens."""
        self.seen = {i: length if self.has_previous_state[i] else 0 for i in self.seen}

    def shortest(self) -> int:
        """How many tokens the state includes that includes fewest, of those that the model has used."""
        return min((seen for seen in self.seen.values() if seen), default=0)

    def check_align(self, length: int) -> None:
        """Raise PositionError unless `align` can take each state back to the first tokens."""
        for i, seen in self.seen.items():
            if seen > length and self._record_before(i, seen - length) is None:
                raise PositionError(
                    f"{CACHE}.align: the state of layer {self.index} includes {seen} tokens, and what it was after "
                    f"{length} is no longer recorded. Use restore() of a snapshot, or reset()."
                )

    def align(self, length: int) -> None:
        """Take each state back to what it was after the first tokens, if it includes more."""
        for i, seen in [*self.seen.items()]:
            if seen > length:
                self.take_back(i, seen - length)

    def why_no_steps(self) -> str:
        """Why a step with this layer cannot be captured; empty if it can."""
        if not self.is_here:
            return f"the state of layer {self.index} is in the model's own modules"
        if self.record_states:
            return f"states are recorded (record_states={self.record_states})"
        return ""

    def states(self) -> list[Any]:
        """The tensors of the state; from the first token until `reset`, or other sequences, they stay the same."""
        both = (*self.conv_states.values(), *self.recurrent_states.values())
        return [state for state in both if state is not None]

    def keep_address(self, state_idx: int) -> None:
        """Let graphs of torch's compiler use a state where it lies, also one that was copied or selected."""
        for state in (self.conv_states[state_idx], self.recurrent_states[state_idx]):
            if state is not None:
                torch._dynamo.mark_static_address(state, guard=False)

    def state(self) -> dict[str, Any]:
        """The state, and what is known of it, by the names of attributes; nothing is copied."""
        return {name: getattr(self, name) for name in self._names}

    @functools.cached_property
    def _names(self) -> tuple[str, ...]:
        """The attributes of the state, without those of keys and values and what the constructor was called with."""
        constant = ("index", "_options", *self._options)
        return tuple(name for name in vars(StateLayer(self.index, **self._options)) if name not in constant)

    def set_state(self, state: Mapping[str, Any], copies: StateCopies) -> None:
        """Take what `state` returned, the states by `copies`; those that are as large are written in place."""
        for name, value in state.items():
            if name in STATES:
                self._put(getattr(self, name), value, copies)
            else:
                setattr(self, name, copies.copied(value))

    @staticmethod
    def _put(states: dict[int, Any], saved: Mapping[int, Any], copies: StateCopies) -> None:
        for i, state in saved.items():
            if state is not None and states[i] is not None and states[i].shape == state.shape:
                copies.add(states[i], state)
            else:
                states[i] = copies.new(state)

    def _cropped_to(self, tokens_to_remove: int) -> Any:
        """Raise if the state after fewer tokens is no longer known."""
        back = abs(tokens_to_remove)
        if not back or not any(self.has_previous_state.values()):
            return
        name = f"{CACHE} layer {self.index}"
        if self.record_states:
            self._refuse_beyond_records(name, tokens_to_remove)
            return
        if any(self.is_recurrent_states_initialized.values()):
            raise PositionError(
                f"{name}: crop({tokens_to_remove}) is not possible: the state sums up all tokens. Make the "
                "cache with record_states=, or take a snapshot() of it before tokens that may be dropped and restore() "
                "it; or reset()."
            )
        for i, state in self.conv_states.items():
            if state is None:
                continue
            needed = 0 if i in self._from_start else self.conv_kernel_size[i]
            recorded = max(0, state.shape[-1] - needed) if self.record_past else 0
            if recorded < back:
                raise PositionError(
                    f"{name}: crop({tokens_to_remove}) is not possible: the layer keeps the states of the last "
                    f"{recorded} tokens. Call activate_past_recording() before the tokens that may be dropped, or "
                    "reset()."
                )

    def _refuse_beyond_records(self, name: str, tokens_to_remove: int) -> None:
        """Raise if a state before the last tokens is not recorded."""
        back = abs(tokens_to_remove)
        for i, records in self.records.items():
            if self.has_previous_state[i] and self._record_before(i, back) is None:
                recorded = sum(each.tokens for each in records[bool(records and records[0].tokens > 1) :])
                raise PositionError(
                    f"{name}: crop({tokens_to_remove}) is not possible: record_states={self.record_states}, and the "
                    f"states before the last {recorded} tokens are recorded. Crop at most {recorded}, restore() a "
                    f"snapshot, or call reset() and pass the whole text; a cache with record_states={back} goes back "
                    f"that far."
                )

    def crop(self, tokens_to_remove: int) -> None:
        """Take the state back by a number of tokens, given as a negative number.

        Raises:
            PositionError: that state is no longer known. Nothing is changed.
        """
        self._cropped_to(tokens_to_remove)
        self._crop_states(tokens_to_remove)

    def _crop_states(self, tokens_to_remove: int) -> None:
        """`crop` after its check."""
        if self.record_states:
            if tokens_to_remove:
                for i in self.records:
                    self.take_back(i, abs(tokens_to_remove))
            return
        if not self.record_past or not any(self.has_previous_state.values()):
            return
        super().crop(tokens_to_remove)
        for i, state in self.conv_states.items():
            if state is not None and state.shape[-1] >= self.conv_kernel_size[i]:
                self._from_start.discard(i)


class _KeysBeside(StateLayer):
    """The base of layers that have both; the class of their keys and values comes next in the order of classes."""

    _keys: type[TikvLayer]
    is_croppable: Any = StateLayer.is_croppable
    is_compileable: Any = TikvLayer.is_compileable
    is_replayable = False
    supports_early_init = True

    def why_no_steps(self) -> str:
        """As `StateLayer.why_no_steps`."""
        if self.is_sliding:
            return f"layer {self.index} has a sliding window and a state"
        return StateLayer.why_no_steps(self)

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Initialise keys and values, passed by position, or a state, passed by keyword."""
        (StateLayer if kwargs else self._keys).lazy_initialization(self, *args, **kwargs)

    def get_max_length(self) -> int:
        """As `TikvLayer.get_max_length`."""
        return self._keys.get_max_length(self)

    def reset(self) -> None:
        """Forget all tokens and the state; the memory stays."""
        StateLayer.reset(self)
        self._keys.reset(self)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """As `TikvLayer.reorder_cache`, of both."""
        StateLayer.reorder_cache(self, beam_idx)
        self._keys.reorder_cache(self, beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """As `TikvLayer.batch_repeat_interleave`, for both."""
        StateLayer.batch_repeat_interleave(self, repeats)
        self._keys.batch_repeat_interleave(self, repeats)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """As `TikvLayer.batch_select_indices`, of both."""
        StateLayer.batch_select_indices(self, indices)
        self._keys.batch_select_indices(self, indices)

    def activate_past_recording(self) -> None:
        """As `TikvLayer.activate_past_recording`, of both."""
        StateLayer.activate_past_recording(self)
        self._keys.activate_past_recording(self)

    def _cropped_to(self, tokens_to_remove: int) -> int:
        target = self._keys._cropped_to(self, tokens_to_remove)
        StateLayer._cropped_to(self, tokens_to_remove)
        return target

    def check_align(self, length: int) -> None:
        """Raise PositionError unless `align` can take keys and states back to the first tokens."""
        StateLayer.check_align(self, length)
        if self.appended > length:
            self._keys._cropped_to(self, length - self.appended)

    def align(self, length: int) -> None:
        """Take keys and states back to the first tokens, if they have more."""
        StateLayer.align(self, length)
        if self.appended > length:
            self.cut(length)

    def crop(self, tokens_to_remove: int) -> None:
        """As `TikvLayer.crop`, for both or for neither."""
        self._keys.crop(self, tokens_to_remove)  # asks `_cropped_to` first, which may refuse what is left after it
        self._crop_states(tokens_to_remove)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        layer = self._keys.__deepcopy__(self, memo)
        copies = StateCopies()
        layer.set_state(self.state(), copies)
        copies.make()
        return layer

    def __repr__(self) -> str:
        return f"{self._keys.__repr__(self)[:-1]}, and a state)"


class KeysAndState(_KeysBeside, TikvLayer):
    """`TikvLayer` with a state beside it.

    Args:
        index, window, max_cache_len, dtype, config: as in `TikvLayer`.
        **options: of transformers' layer with a state.
    """

    _keys = TikvLayer

    def __init__(
        self, index: int, window: int | None, max_cache_len: int | None, dtype: Any, config: Any, **options: Any
    ) -> None:
        TikvLayer.__init__(self, index, window, max_cache_len, dtype, config)
        StateLayer.__init__(self, index, **options)


class StreamingKeysAndState(_KeysBeside, StreamingLayer):
    """`StreamingLayer` with a state beside it; the state includes all tokens."""

    _keys = StreamingLayer

    def __init__(self, index: int, window: int, sinks: int, dtype: Any, config: Any, **options: Any) -> None:
        StreamingLayer.__init__(self, index, window, sinks, dtype, config)
        StateLayer.__init__(self, index, **options)
