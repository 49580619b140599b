"""The older tokens of a layer as codes: keys by channel over groups of tokens, values by token or as numbers.

A group of tokens is quantised once, from the rows that a ring still has, and never written again. Of a window the
slots of groups go round: a group is overwritten as a whole, once none of its tokens is seen.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from tikv import dtypes, runtime
from tikv.arrays import ArrayView, Memory, memory_of_host, new_array, read_host, to_device, write_host
from tikv.errors import CapacityError
from tikv.ops.attention.by_channel import ChannelKeys, ScoredValues, channel_scores, scored_plan
from tikv.ops.attention.launches import AttendedTokens
from tikv.ops.attention.plan import Results
from tikv.ops.attention.request import AttentionScale
from tikv.ops.layouts import LINEAR, Placement, Rows, Scale
from tikv.runtime.cache import BoundedCache
from tikv.stores.layers.counts import Layer
from tikv.stores.layers.memory import LayerMemory, copy_rows, rows_of
from tikv.stores.layers.token_group_form import CodeForm
from tikv.stores.limits import BLOCK_BYTES

RING = Placement("ring")
MOST_SCRATCH = 8


class ScoreMemory:
    """Float32 memory of what one launch leaves for the next, by its purpose and shape.

    So a decode loop finds it where it was, and its launches need not be told of another.
    """

    def __init__(self, live: runtime.Runtime) -> None:
        self._runtime = live
        self._arrays: BoundedCache[tuple[str, tuple[int, ...]], ArrayView] = BoundedCache(MOST_SCRATCH)

    def array(self, purpose: str, shape: tuple[int, ...]) -> ArrayView:
        """Memory of this shape, whatever is in it."""
        found = self._arrays.get((purpose, shape))
        if found is None:
            found = self._arrays.keep((purpose, shape), new_array(shape, dtypes.float32, self._runtime))
        return found


class ChannelCodes:
    """The codes of one layer's tokens behind its sinks, in memory of their own.

    Args:
        live: the runtime.
        form: how they are kept.
        batch: sequences.
        room: tokens that there is memory for, whole groups.
        rings: whether the slots of groups go round.
        scratch: memory between launches, which layers share.
        on_host: the memory is the host's.

    Attributes:
        tokens: how many became codes, those included that were overwritten since.
        dropped: how many of the first were let go of, whole groups, where slots do not go round.

    Raises:
        CapacityError: an array is larger than a launch on this arch can address.
    """

    def __init__(
        self,
        live: runtime.Runtime,
        form: CodeForm,
        batch: int,
        room: int,
        rings: bool,
        scratch: ScoreMemory,
        on_host: bool = False,
    ) -> None:
        self.runtime, self.form, self.format, self.rings = live, form, form.keys, rings
        self.heads, self.width = form.heads, form.width
        self.tokens, self.dropped, self.scratch, self.on_host = 0, 0, scratch, on_host
        self._turned: Any = None
        self.hold(self.like(batch, room))

    @property
    def nbytes(self) -> int:
        """Bytes of codes, scales and biases, filled or not."""
        return sum(a.nbytes for a in self.arrays)

    @property
    def first(self) -> int:
        """Of the tokens that became codes, how many were overwritten or let go of."""
        return max(0, self.tokens - self.room) if self.rings else self.dropped

    @property
    def slots(self) -> int:
        """Slots of tokens that were ever written, from the first on."""
        return min(self.tokens - self.dropped, self.room)

    def encode(self, operation: str, layer: Layer) -> None:
        """Quantise the next group of tokens, whose rows the layer's ring has, in three launches."""
        group, at, live = self.format.group, (self.tokens - self.dropped) % self.room, self.runtime
        of_ring: dict[str, Any] = {
            "src_place": RING,
            "src_position": layer.slot_of(layer.sinks + self.tokens),
            "sinks": layer.sinks,
            "ring": layer.ring,
        }
        k, v, shape, pairs = (
            rows_of(layer.k),
            rows_of(layer.v),
            (self.batch, self.heads, group),
            self.batch * self.heads,
        )
        turned, channels = self._by_channel(self._turned)
        copy_rows(live, operation, [k], [channels], [self.width], shape, **of_ring)
        copy_rows(live, operation, [turned], [self._keys(at // group)], [group], (pairs, 1, self.width))
        copy_rows(live, operation, [v], [self._values], [self.form.values.width], shape, dst_position=at, **of_ring)
        self.tokens += group

    def _by_channel(self, a: ArrayView) -> tuple[Rows, Rows]:
        """Keys (B * H, groups * width, group): one row for each channel of a group, and as rows of tokens."""
        group, one_head = self.format.group, a.strides[0]
        tokens = Rows(a, sequence=self.heads * one_head, head=one_head, block=self.width * group, token=1)
        return Rows(a, sequence=one_head, token=group), tokens._replace(inner=(1, group))

    def _keys(self, group: int) -> Rows:
        """The keys of a group of tokens and those behind, a channel a row, each head a sequence of its own."""
        codes, numbers = self.k_codes.strides, self.k_numbers.strides
        scale = Scale(self.k_numbers, sequence=numbers[1], token=numbers[3], first=group * numbers[2])
        return Rows(
            self.k_codes, sequence=codes[1], token=codes[3], first=group * codes[2], format=self.format, scale=scale
        )

    @property
    def _values(self) -> Rows:
        scale, numbers = None, self.v_numbers
        if numbers is not None:
            sequence, head, token = numbers.strides[:3]
            scale = Scale(numbers, sequence=sequence, head=head, token=token)
        return rows_of(self.v_codes)._replace(format=self.form.values.format, scale=scale)

    def decode(self, operation: str, k: ArrayView, v: ArrayView, first: int = 0) -> None:
        """The numbers that tokens from the given one on stand for, to the start of (batch, H, n, D) float32 arrays."""
        live, group = self.runtime, self.format.group
        at, end = first // group * group, self.tokens
        while at < end:  # as far as slots follow one another
            slot = (at - self.dropped) % self.room
            count = min(end - at, self.room - slot)
            skip = max(0, first - at)
            shape, to = (self.batch, self.heads, count - skip), max(0, at - first)
            pairs, channels = self.batch * self.heads, count // group * self.width
            turned, by_channel = self._by_channel(new_array((pairs, channels, group), dtypes.float32, live))
            copy_rows(live, operation, [self._keys(slot // group)], [turned], [group], (pairs, 1, channels))
            place, widths = Placement("linear", group), (self.width, self.form.values.width)
            copy_rows(
                live, operation, [by_channel], [rows_of(k, to)], [widths[0]], shape, src_place=place, src_position=skip
            )
            copy_rows(
                live, operation, [self._values], [rows_of(v, to)], [widths[1]], shape, src_place=LINEAR,
                src_position=slot + skip,
            )  # fmt: skip
            at += count

    def attend(
        self,
        operation: str,
        q: ArrayView,
        scores: AttentionScale,
        oldest: int = 0,
        window: tuple[int, int] | None = None,
    ) -> tuple[Any, Any]:
        """Attention of (batch, Hq, T, D) queries over the codes from token `oldest` on.

        All of them see all of these, or with a `window` the newest so many up to their own token, where the last query
        stands so many tokens behind the last that is codes. Float32 (batch, Hq, T, D_v) and log-sum-exps, in two
        launches, or three where the keys are split; K's and V's codes are read in place.
        """
        live, group = self.runtime, self.format.group
        rows = q.shape[1] // self.heads * q.shape[2]
        products = self.scratch.array("scores", (self.batch, self.heads, rows, self.room))
        keys = ChannelKeys(self.k_codes, self.k_numbers, self.format)
        channel_scores(live, operation, q, keys, products, self.slots // group)
        arrays = {"q": q, "k": products, "v": self.v_codes}
        if self.v_numbers is not None:
            arrays["v_scale"] = self.v_numbers
        span, ahead = window or (None, 0)
        values = ScoredValues(self._values, self.form.values.width, self.room, self.room if self.rings else 0, span)
        plan = scored_plan(live, operation, arrays, values, scores)
        part = self.scratch.array("of codes", (*q.shape[:3], values.width))
        lse = self.scratch.array("sums of codes", q.shape[:3])
        attended = AttendedTokens(self.tokens - self.dropped, oldest - self.dropped, ahead)
        plan.attend(None, arrays, attended, Results(part, True, lse, is_partial=True, is_new=True))
        return part, lse

    def selected(self, sequences: np.ndarray[Any, Any], memory: LayerMemory) -> list[ArrayView]:
        """What some sequences hold, in new memory, which `hold` then takes."""
        index, made = to_device(sequences, self.runtime), self.like(len(sequences))
        for (a, slots), to in zip(self.filled, made, strict=True):
            memory.move_slots(_of_slots(a), _of_slots(to), slots, index)
        return made

    def moved(self, room: int, drop: int, memory: LayerMemory) -> list[ArrayView]:
        """What is held without the `drop` oldest tokens, whole groups, in new memory for `room`; `hold` takes it."""
        made = self.like(self.batch, room)
        for (a, slots), (_, _, tokens), to in zip(self.filled, self.form.arrays().values(), made, strict=True):
            rows, gone = _of_slots(a), drop // tokens
            memory.move_slots(rows.part(2, gone, rows.shape[2]), _of_slots(to), slots - gone)
        return made

    def like(self, batch: int, room: int | None = None) -> list[ArrayView]:
        """New memory for so many sequences, and tokens; None: for as many.

        Raises:
            CapacityError: an array is larger than a launch on this arch can address.
        """
        live, room, made = self.runtime, self.room if room is None else room, []
        for name, (shape, dtype, tokens) in self.form.arrays().items():
            whole = (batch, self.form.heads, room // tokens, *shape)
            needed, limit = math.prod(whole) * dtype.itemsize, BLOCK_BYTES[live.arch]
            if needed > limit:
                raise CapacityError(
                    f"KVCacheStore: {name} of a layer need {needed} bytes in one piece of memory, and {live.arch} "
                    f"addresses {limit}. Use a smaller capacity, or several stores."
                )
            block = memory_of_host(needed, live) if self.on_host else Memory(needed, live)
            made.append(block.array(whole, dtype))
        return made

    def hold(self, arrays: list[ArrayView]) -> None:
        """Let these, which `like` made, be the memory."""
        group, self.arrays = self.format.group, arrays
        self.k_codes, self.k_numbers, self.v_codes, *rest = arrays
        self.v_numbers = rest[0] if rest else None
        self.batch, self.room = self.k_codes.shape[0], self.k_codes.shape[2] * group
        turned = (self.batch * self.heads, self.width, group)
        if self._turned is None or self._turned.shape != turned:
            self._turned = new_array(turned, self.form.rows, self.runtime)  # keys of a group by channel

    @property
    def filled(self) -> list[tuple[ArrayView, int]]:
        """`arrays`, and how many of the third axis were ever written."""
        tokens = [tokens for _, _, tokens in self.form.arrays().values()]
        return [(a, self.slots // n) for a, n in zip(self.arrays, tokens, strict=True)]

    def copy_to_host(self) -> list[np.ndarray[Any, Any]]:
        """The filled parts of `arrays` on the host."""
        return [read_host(a, self.runtime)[:, :, :n] for a, n in self.filled]

    def take_over(self, tokens: int, arrays: Sequence[np.ndarray[Any, Any]]) -> None:
        """Hold what `copy_to_host` of such codes gave."""
        for to, given in zip(self.arrays, arrays, strict=True):
            host = np.zeros(to.shape, to.dtype.numpy)
            host[:, :, : given.shape[2]] = given
            write_host(host, to)
        self.tokens = tokens


def _of_slots(a: ArrayView) -> ArrayView:
    """An array (batch, heads, slots, ...) as rows (batch, heads, slots, width), or (batch, heads, slots)."""
    if a.ndim < 5:
        return a
    return a.restrided((*a.shape[:3], math.prod(a.shape[3:])), (*a.strides[:3], 1))
