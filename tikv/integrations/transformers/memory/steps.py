"""What a compiled step of a model knows about a layer: all of it on the device, at fixed addresses.

A step that torch compiles, or that a CUDA graph replays, reads no numbers from the host. So the position of the next
token is a tensor, `Counted.count`, which the step itself advances; the host learns of it afterwards, from the chain of
`Steps` that each call extends.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling as _is_traced

from tikv.errors import CapacityError
from tikv.integrations.transformers.memory import stored_ops as ops
from tikv.integrations.transformers.memory.gradients import writable_tensors
from tikv.integrations.transformers.memory.slot_map import SlotMap
from tikv.integrations.transformers.memory.stored import stored_tensors


class Steps:
    """Tokens that compiled steps have added and the host has not counted yet, one link for each step.

    A link may be a use of a state instead, see `Counted.note_use`.

    A number that changes with each step would make torch compile again; a new object of the same class does not.
    """

    def __init__(self, before: Steps | None, tokens: int, uses: int = 0) -> None:
        self.before, self.tokens, self.uses = before, tokens, uses


class Counted:
    """A layer's memory and the number of its tokens, as a compiled step reads them.

    Position p is in slot p, or after the sinks of a ring in slot ``sinks + (p - sinks) % ring``.

    Attributes:
        keys, values, k_scale, v_scale: the layer's memory, all slots.
        formats: the names of the formats of keys and values; "" for plain numbers.
        widths: the widths of a head of keys and of values.
        dtype: the model's dtype.
        slots, sinks, ring: as above; `ring` is 0 without a ring.
        window: how many tokens a query sees, if the ring has room for more; else 0.
        starts: (batch,) int64, the position of each row's first token, from which its slots are counted; or None.
        count: (batch,) int64, the position of the next token.
        current: whether `count` and the slots match the layer.
        stepped: whether a compiled step has run since the host last counted.
        steps: the steps that the host has not counted.
        on_device: whether a step of `on_device` runs.
        changes: how often the host has set `count`.
        uses: (1,) int64, how often compiled steps have begun to use a state, if the model has some; else None.
    """

    def __init__(
        self, layer: Any, slots: int, sinks: int = 0, ring: int = 0, starts: tuple[int, ...] | None = None, end: int = 0
    ) -> None:
        memory = layer._here()
        self.keys, self.values = memory.k, memory.v
        self.k_scale, self.v_scale = memory.scales
        self.formats = tuple(ops.name_of(format) for format in layer.store.rows.formats)
        self.widths = memory.widths
        self.dtype = layer.dtype
        self.slots, self.sinks, self.ring = slots, sinks, ring
        self.window = layer.window if ring and slots > layer.window else 0
        with writable_tensors():
            self.count = torch.full((layer.batch_size,), end, dtype=torch.int64, device=layer.device)
            self.starts = None if starts is None else torch.tensor(starts, device=layer.device)
        self.current, self.stepped, self.on_device = True, False, False
        self.changes = 0
        self.steps = self._noted = Steps(None, 0)
        self.uses = self._new_uses() if layer.counts_uses else None
        self._finished = 0  # how many uses of states belong to steps that ran to their end
        for a in (self.keys, self.values, self.k_scale, self.v_scale, self.count, self.starts, self.uses):
            if a is not None and a.is_cuda:  # a CUDA graph reads this address; for another cache it is captured again
                torch._dynamo.mark_static_address(a, guard=False)

    def _new_uses(self) -> Any:
        with writable_tensors():
            return torch.zeros(1, dtype=torch.int64, device=self.count.device)

    @property
    def hides(self) -> bool:
        """Whether there may be slots in use that the newest token of a row does not see."""
        return bool(self.window) or self.starts is not None

    def set(self, end: int) -> None:
        """Set the position of the next token to `end`."""
        self.count.fill_(end)
        self.changes += 1
        self.current, self.stepped = True, False

    def taken(self) -> int:
        """How many tokens compiled steps have added since the last call of this method."""
        tokens, step = 0, self.steps
        while step.before is not None:
            self._finished += step.uses
            tokens, step = tokens + int(step.tokens), step.before
        self.steps = self._noted = Steps(None, 0)
        self.stepped = self.stepped or tokens > 0
        return tokens

    def note_use(self, state: Any) -> None:
        """In traced code, note that a state is about to be used.

        The device counts it before the state changes, and the host after the program, of which this is a part.
        """
        ops.note_use_of_state(state, self.uses)
        self.steps = Steps(self.steps, 0, 1)

    def is_half_used(self) -> bool:
        """Whether a compiled step has used states and did not run to its end. The host has counted its tokens."""
        return self.uses is not None and not self.on_device and int(self.uses) != self._finished

    def forget_uses(self) -> None:
        """The states are others from here on."""
        if self.uses is not None:
            self.uses.zero_()
        self._finished = 0

    def ran(self, tokens: int) -> None:
        """Note how many tokens replayed steps have added since the last call, whatever was noted while they ran."""
        self.steps = self._noted = Steps(self._noted, tokens)

    def refuse_beyond(self, end: int, name: str) -> None:
        """Raise CapacityError if steps continued to `end` tokens, and thus beyond the memory."""
        if end > self.slots:
            self.current = False
            raise CapacityError(
                f"{name}: compiled steps continued to {end} tokens, and those beyond max_cache_len={self.slots} were "
                f"not cached. Use a larger max_cache_len."
            )

    def positions(self, end: Any) -> Any:
        """The position in each slot when the newest is `end` - 1; a greater number for an empty slot.

        (slots,) or, if rows begin at different positions, (batch, slots).
        """
        slots = torch.arange(self.slots, device=self.keys.device)
        if not self.ring:
            return slots
        starts = None if self.starts is None else self.starts[:, None]
        behind = (end if starts is None else end - starts) - 1 - self.sinks
        token = self.sinks + behind - (behind - (slots - self.sinks)) % self.ring
        token = torch.where((slots < self.sinks) | (token < self.sinks), slots, token)
        return token if starts is None else token + starts

    def traced_sizes(self) -> tuple[int, Any]:
        """`get_mask_sizes` of a step on the device: all slots, and what to add to a slot's number for its position."""
        where = self.positions(self.count[0] + 1)
        offset = where - torch.arange(self.slots, device=where.device)
        offset.tikv_counted = self
        return self.slots, offset

    def _of_rows(self) -> Any:
        """(batch,) the number of the next token, counted from the first token of its row."""
        return self.count if self.starts is None else self.count - self.starts

    def append(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[Any, Any]:
        """Write the new tokens of a step on the device, count them and return `read()`."""
        append: Any = ops.append_stored if _is_traced() else ops.append
        append(
            keys, values, self.keys, self.values, self.k_scale, self.v_scale, self._of_rows(), self.ring, self.sinks,
            *self.formats,
        )  # fmt: skip
        self.count.add_(keys.shape[2])
        self.steps = Steps(self.steps, keys.shape[2])
        return self.read()

    def read(self) -> tuple[Any, Any]:
        """Keys and values of all slots; they are decoded if something other than `attend` reads them.

        Traced code decodes them, which the compiler removes if nothing reads them.
        """
        if _is_traced():
            return self.numbers()
        shape = *self.keys.shape[:2], self.slots
        k_shape, v_shape = ((*shape, width) for width in self.widths)
        keys, values = stored_tensors(Unread(self), k_shape, v_shape, self.dtype, self.keys.device)
        keys.tikv_counted = values.tikv_counted = self
        return keys, values

    def numbers(self) -> tuple[Any, Any]:
        """Keys and values of all slots, decoded, and zeros where nothing is written yet."""
        used = self._of_rows().clamp(min=0, max=self.slots)
        written = used[:, None] > torch.arange(self.slots, device=self.count.device)
        both = []
        for a, scale, width, format in (
            (self.keys, self.k_scale, self.widths[0], self.formats[0]),
            (self.values, self.v_scale, self.widths[1], self.formats[1]),
        ):
            numbers = a if scale is None else ops.decode_stored(a, scale, width, format)
            numbers = numbers.to(self.dtype).where(written[:, None, :, None], 0)
            numbers.tikv_counted = self
            both.append(numbers)
        return both[0], both[1]

    def attend(
        self,
        query: torch.Tensor,
        scale: float | None,
        softcap: float | None,
        sink_logits: Any,
        starts: torch.Tensor | None = None,
    ) -> Any:
        """In a step on the device, attention of the newest tokens' queries: (batch, heads, 1, value width)."""
        length = self._of_rows()  # of a ring with room for more than its window: of all tokens
        length = length if self.window else length.clamp(min=0, max=self.slots)
        attend: Any = ops.attend_stored if _is_traced() else ops.attend
        return attend(
            query, self.keys, self.values, self.k_scale, self.v_scale, length, sink_logits, scale, softcap,
            self.widths[1], *self.formats, starts, self.slots if self.window else 0, self.window,
        )  # fmt: skip

    def next_slots(self, tokens: int) -> Any:
        """(batch, tokens) the slots of a ring that the next tokens go to; 0 for padding."""
        token = self._of_rows()[:, None] + torch.arange(tokens, device=self.count.device)
        slots = torch.where(token < self.sinks, token, self.sinks + (token - self.sinks) % self.ring)
        return slots.clamp(min=0)


class Unread:
    """The keys and values of all slots in a step on the device, decoded when something reads them.

    They are what `stored_tensors` takes as a pair.
    """

    __slots__ = ("_counted", "_numbers")

    def __init__(self, counted: Counted) -> None:
        self._counted = counted
        self._numbers: tuple[Any, Any] | None = None

    def numbers(self) -> tuple[Any, Any]:
        """Both, decoded."""
        if self._numbers is None:
            self._numbers = self._counted.numbers()
        return self._numbers

    def stored(self) -> None:
        """None, since no one but `Counted.attend` knows which slots are in use."""


class RowsAhead:
    """The rows of a ring that its next tokens overwrite, so that these tokens can be taken back.

    Args:
        layer: the layer, whose slots are a ring.
        tokens: how many tokens, at most as many as the ring has slots.
    """

    def __init__(self, layer: Any, tokens: int) -> None:
        self._counted, self._words, self._tokens = layer._counted, layer._memory.words(), tokens
        count = self._counted.count
        self._rows = torch.arange(len(count), device=count.device)[:, None]
        self._slots = torch.zeros((len(count), tokens), dtype=torch.int64, device=count.device)
        self._copies = [a.new_empty((*self._slots.shape, a.shape[1], *a.shape[3:])) for a in self._words]

    def keep(self) -> None:
        """Copy the rows that the next tokens overwrite."""
        self._slots.copy_(self._counted.next_slots(self._tokens))
        for words, copy in zip(self._words, self._copies, strict=True):
            copy.copy_(words[self._rows, :, self._slots])

    def put_back(self, first: int) -> None:
        """Undo what all but the `first` of these tokens overwrote."""
        slots = self._slots[:, first:]
        for words, copy in zip(self._words, self._copies, strict=True):
            words[self._rows, :, slots] = copy[:, first:]


class StatesAhead:
    """The states of a layer before each of its next tokens, so that these tokens can be taken back.

    Args:
        layer: the layer, whose states exist.
        tokens: how many tokens.
    """

    def __init__(self, layer: Any, tokens: int) -> None:
        self._states = layer.states()
        self._copies = [a.new_empty((tokens, *a.shape)) for a in self._states]
        self._token = torch.zeros(1, dtype=torch.int64, device=self._states[0].device)

    def keep(self) -> None:
        """Begin with the first of the next tokens."""
        self._token.zero_()

    def keep_before_step(self) -> None:
        """Copy the states, which a step is about to change."""
        for state, copy in zip(self._states, self._copies, strict=True):
            copy.index_copy_(0, self._token, state[None])
        self._token.add_(1)

    def put_back(self, first: int) -> None:
        """Undo all but the `first` of these tokens."""
        for state, copy in zip(self._states, self._copies, strict=True):
            state.copy_(copy[first])


@contextlib.contextmanager
def on_device(cache: Any) -> Iterator[None]:
    """While a step runs that reads no numbers, and so can be captured: each layer answers as to traced code.

    The host counts its tokens afterwards, see `Counted.ran`.
    """
    counted = [layer._counted for layer in cache.layers if getattr(layer, "_counted", None) is not None]
    try:
        for each in (cache, *counted):
            each.on_device = True
        yield
    finally:
        for each in (cache, *counted):
            each.on_device = False


class SlotsOffset(int):
    """The offset of a layer's keys, 0, in a mask of all slots for one new token.

    Attributes:
        counted: the layer's `Counted`.
        end: the number of tokens, the new one included.
    """

    counted: Counted
    end: int

    @classmethod
    def of(cls, counted: Counted, end: int) -> SlotsOffset:
        """The offset of the slots of a layer that will have `end` tokens."""
        offset = cls(0)
        offset.counted, offset.end = counted, end
        return offset


class KnownOffset(int):
    """The position of the first key of a layer whose steps may be compiled; masks recognise it by its class."""


class StreamedOffset(int):
    """The offset of the keys of a streamed layer, as one number, and the map that tells each key's position.

    Attributes:
        map: where the keys lie once the new tokens are written.
        tokens: how many of them are new.
        window: that of the layer.
    """

    map: SlotMap
    tokens: int
    window: int

    @classmethod
    def sizes(cls, to: SlotMap, tokens: int, window: int) -> tuple[int, StreamedOffset]:
        """The number of keys that a map has with its new tokens, and their offset."""
        offset = cls(to.end - to.used)
        offset.map, offset.tokens, offset.window = to, tokens, window
        return to.used, offset
