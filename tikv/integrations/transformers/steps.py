"""What a compiled step of a model knows of a layer: all of it on the device, at addresses that stay.

A step that torch compiles, or that a CUDA graph replays, reads no number of the host's. So where the next token goes is
a tensor, `Counted.count`, which the step itself moves on; the host learns of it afterwards, from the chain of `Steps`
that each call leaves.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import torch

from tikv.errors import CapacityError
from tikv.integrations.transformers import stored_ops as ops


class Steps:
    """Tokens that compiled steps have added and the host has not counted yet, one link for each step.

    A number that each step changes would have torch compile anew; a new object of the same kind does not.
    """

    def __init__(self, before: Steps | None, tokens: int) -> None:
        self.before, self.tokens = before, tokens


class Counted:
    """Where a layer's tokens lie and how many there are, as a compiled step reads it.

    Position p lies in slot p, or from slot `sinks` on in a ring: ``sinks + (p - sinks) % ring``.

    Attributes:
        keys, values, k_scale, v_scale: the layer's memory, all slots.
        formats: the names of the formats of keys and values; "" for numbers.
        widths: of a head of keys and of values.
        dtype: the model's.
        slots, sinks, ring: as above; a ring of 0 for none.
        count: (batch,) int64, the position of the next token.
        current: whether `count` and the slots are those that the layer has.
        stepped: whether a compiled step has been taken since the host counted itself.
        steps: what the host has not counted.
    """

    def __init__(self, layer: Any, slots: int, sinks: int, ring: int) -> None:
        self.keys, self.values = layer._k, layer._v
        self.k_scale, self.v_scale = layer._scales
        self.formats = tuple(ops.name_of(format) for format in layer.store.rows.formats)
        self.widths = layer.head_dim, layer._v_width
        self.dtype = layer.dtype
        self.slots, self.sinks, self.ring = slots, sinks, ring
        with torch.inference_mode(False):
            self.count = torch.zeros(layer.batch_size, dtype=torch.int64, device=layer.device)
        self.current = self.stepped = False
        self.steps = Steps(None, 0)
        for a in (self.keys, self.values, self.k_scale, self.v_scale, self.count):
            if a is not None and a.is_cuda:  # a CUDA graph reads it where it is; another cache's is captured anew
                torch._dynamo.mark_static_address(a, guard=False)

    def set(self, end: int) -> None:
        """Let the next token be that of position `end`."""
        self.count.fill_(end)
        self.current, self.stepped = True, False

    def taken(self) -> int:
        """How many tokens compiled steps have added since this was last asked."""
        found, step = 0, self.steps
        while step.before is not None:
            found, step = found + int(step.tokens), step.before
        self.steps = Steps(None, 0)
        self.stepped = self.stepped or found > 0
        return found

    def positions(self, end: Any) -> Any:
        """(slots,) where each slot's token stands when the newest is at `end` - 1; beyond that for an empty slot."""
        slots = torch.arange(self.slots, device=self.keys.device)
        if not self.ring:
            return slots
        behind = end - 1 - self.sinks
        found = self.sinks + behind - (behind - (slots - self.sinks)) % self.ring
        return torch.where((slots < self.sinks) | (found < self.sinks), slots, found)

    def append(self, keys: Any, values: Any) -> tuple[Any, Any]:
        """Traced: write new tokens and count them; returns `read`."""
        ops.append_stored(
            keys, values, self.keys, self.values, self.k_scale, self.v_scale, self.count, self.ring, self.sinks,
            *self.formats,
        )  # fmt: skip
        self.count.add_(keys.shape[2])
        self.steps = Steps(self.steps, keys.shape[2])
        return self.read()

    def read(self) -> tuple[Any, Any]:
        """Traced: keys and values of all slots, decoded; of a compiled program where something reads them."""
        written = self.seen()[:, None] > torch.arange(self.slots, device=self.count.device)
        found = []
        for a, scale, width, format in (
            (self.keys, self.k_scale, self.widths[0], self.formats[0]),
            (self.values, self.v_scale, self.widths[1], self.formats[1]),
        ):
            numbers = a if scale is None else ops.decode_stored(a, scale, width, format)
            numbers = numbers.to(self.dtype).where(written[:, None, :, None], 0)
            numbers.tikv_counted = self
            found.append(numbers)
        return found[0], found[1]

    def seen(self) -> Any:
        """(batch,) slots that the newest token sees."""
        return self.count.clamp(max=self.slots)

    def attend(
        self, query: Any, scale: float | None, softcap: float | None, sink_logits: Any, starts: Any = None
    ) -> Any:
        """Traced: attention of the newest token's queries, (batch, heads, 1, width) of values, from `starts` on."""
        return ops.attend_stored(
            query, self.keys, self.values, self.k_scale, self.v_scale, self.seen(), sink_logits, scale, softcap,
            self.widths[1], *self.formats, starts,
        )  # fmt: skip


class SlotsOffset(int):
    """The offset of a layer's keys, 0, where a mask is made for all slots that there are, for one new token.

    Attributes:
        counted: of the layer.
        end: the number of tokens, the new one included.
    """

    counted: Counted
    end: int

    @classmethod
    def of(cls, counted: Counted, end: int) -> SlotsOffset:
        """The offset of the slots of a layer that will have so many tokens."""
        found = cls(0)
        found.counted, found.end = counted, end
        return found


class KnownOffset(int):
    """The position of the first key of a layer whose steps may be compiled; by its class a mask knows whose it is."""


def are_compiled(device: Any) -> bool:
    """Whether steps on a device may well be compiled: it is a GPU, or torch's compiler has been imported."""
    return device.type == "cuda" or "torch._dynamo" in sys.modules


def order_of_ring(end: int, slots: int, sinks: int) -> np.ndarray[Any, Any]:
    """Which token each slot of a full ring has, counted as they lie in temporal order."""
    ring = slots - sinks
    positions = np.r_[:sinks, end - ring : end]
    order = np.empty(slots, np.int64)
    order[np.where(positions < sinks, positions, sinks + (positions - sinks) % ring)] = np.arange(slots)
    return order


def refuse_skipped(name: str, end: int, limit: int) -> None:
    """Compiled steps have not gone on beyond the memory, which has dropped what they wrote there.

    Raises:
        CapacityError: they have.
    """
    if end > limit:
        raise CapacityError(
            f"{name}: compiled steps went on to {end} tokens > max_cache_len={limit}, and those beyond it were not "
            f"cached. Use a larger max_cache_len."
        )
