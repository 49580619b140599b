"""The older tokens of a layer as codes: keys by channel over groups of tokens, values by token.

A group of tokens is quantised once, from the rows that a ring still has, and never written again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from tikv import dtypes, runtime
from tikv.arrays import (
    ArrayView,
    Memory,
    contiguous_strides,
    memory_of_host,
    new_array,
    read_host,
    to_device,
    view,
    write_host,
)
from tikv.dtypes import DType
from tikv.errors import CapacityError
from tikv.formats import GroupFormat
from tikv.ops.attention.by_channel import channel_scores
from tikv.ops.attention.launches import AttendedTokens
from tikv.ops.attention.plan import Results
from tikv.ops.attention.request import AttentionScale
from tikv.ops.layouts import Placement, Rows, Scale
from tikv.ops.quantize import scale_of_groups
from tikv.runtime.cache import BoundedCache
from tikv.stores.layers.attend import cache_plan
from tikv.stores.layers.counts import Layer
from tikv.stores.layers.memory import copy_rows, rows_of
from tikv.stores.limits import BLOCK_BYTES

ARRAYS = ("k_codes", "k_numbers", "v_codes", "v_numbers")  # by the names that files have
RING = Placement("ring")


class ChannelCodes:
    """The codes of one layer's first tokens, in memory of their own.

    Args:
        live: the runtime.
        batch, heads, widths: of the layer, and of rows of K and V.
        room: tokens that there is memory for, whole groups.
        format: of K along tokens and of V along its columns.
        dtype: of the rows that are quantised, and of scales and biases.
        scratch: arrays of attention, by the rows of queries of a KV head, which layers share.
        on_host: the memory is the host's.

    Attributes:
        tokens: how many are codes.

    Raises:
        CapacityError: an array is larger than a launch on this arch can address.
    """

    def __init__(
        self,
        live: runtime.Runtime,
        batch: int,
        heads: int,
        widths: tuple[int, int],
        room: int,
        format: GroupFormat,
        dtype: DType,
        scratch: BoundedCache[int, tuple[ArrayView, ArrayView]],
        on_host: bool = False,
    ) -> None:
        self.runtime, self.format, self.room = live, format, room
        self.batch, self.heads, (self.width, self.width_v) = batch, heads, widths
        self.tokens, self._scratch = 0, scratch
        group, words = format.group, dtypes.uint32
        forms = {
            "k_codes": ((room // group, self.width, format.words(group)), words),
            "k_numbers": ((room // group, self.width, format.numbers), dtype),
            "v_codes": ((room, format.words(self.width_v)), words),
            "v_numbers": ((room, self.width_v // group * format.numbers), dtype),
        }
        for name, (shape, stored) in forms.items():
            needed, limit = batch * heads * math.prod(shape) * stored.itemsize, BLOCK_BYTES[live.arch]
            if needed > limit:
                raise CapacityError(
                    f"KVCacheStore: {name} of a layer need {needed} bytes in one piece of memory, and {live.arch} "
                    f"addresses {limit}. Use a smaller capacity, or several stores."
                )
        self.arrays = []  # `ARRAYS`
        for shape, stored in forms.values():
            nbytes = batch * heads * math.prod(shape) * stored.itemsize
            block = memory_of_host(nbytes, live) if on_host else Memory(nbytes, live)
            self.arrays.append(block.array((batch, heads, *shape), stored))
        self.k_codes, self.k_numbers, self.v_codes, self.v_numbers = self.arrays
        self._turned = new_array((batch * heads, self.width, group), dtype, live)  # keys of a group by channel

    @property
    def nbytes(self) -> int:
        """Bytes of codes, scales and biases, filled or not."""
        return sum(a.nbytes for a in self.arrays)

    def encode(self, operation: str, layer: Layer) -> None:
        """Quantise the next group of tokens, whose rows the layer's ring has, in three launches."""
        group, at, live = self.format.group, self.tokens, self.runtime
        of_ring: dict[str, Any] = {"src_place": RING, "src_position": layer.slot_of(at), "ring": layer.ring}
        k, v, shape, pairs = (
            rows_of(layer.k),
            rows_of(layer.v),
            (self.batch, self.heads, group),
            self.batch * self.heads,
        )
        turned, channels = self._by_channel(self._turned)
        copy_rows(live, operation, [k], [channels], [self.width], shape, **of_ring)
        copy_rows(live, operation, [turned], [self._keys(at // group)], [group], (pairs, 1, self.width))
        copy_rows(live, operation, [v], [self._values], [self.width_v], shape, dst_position=at, **of_ring)
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
        sequence, head, token, _ = self.v_codes.strides
        scale = scale_of_groups(self.v_numbers, token=2, head=1, sequence=0)
        return Rows(self.v_codes, sequence=sequence, head=head, token=token, format=self.format, scale=scale)

    def decode(self, operation: str, k: ArrayView, v: ArrayView) -> None:
        """The numbers that the codes stand for, into the first tokens of (batch, H, n, D) float32 arrays."""
        group, channels, live = self.format.group, self.tokens // self.format.group * self.width, self.runtime
        if not channels:
            return
        pairs, shape = self.batch * self.heads, (self.batch, self.heads, self.tokens)
        turned, by_channel = self._by_channel(new_array((pairs, channels, group), dtypes.float32, live))
        place = Placement("linear", group)
        copy_rows(live, operation, [self._keys(0)], [turned], [group], (pairs, 1, channels))
        copy_rows(live, operation, [by_channel], [rows_of(k)], [self.width], shape, src_place=place)
        copy_rows(live, operation, [self._values], [rows_of(v)], [self.width_v], shape)

    def attend(self, operation: str, q: ArrayView, scores: AttentionScale) -> tuple[Any, Any]:
        """Attention of (batch, Hq, T, D) queries over all that is codes: float32 (batch, Hq, T, D_v) and log-sum-exps.

        In two launches, or three where the keys are split; K's and V's codes are read in place.
        """
        live, (batch, q_heads, queries, width) = self.runtime, q.shape
        rows, pairs = q_heads // self.heads * queries, batch * self.heads
        found = self._scratch.get(rows)
        if found is None:
            ones = to_device(np.ones((pairs, rows, 1), np.float32), live)
            found = self._scratch.keep(rows, (ones, new_array((pairs, rows, self.room), dtypes.float32, live)))
        ones, products = found
        channel_scores(
            live, operation, q, self.k_codes, self.k_numbers, products, self.format, self.tokens // self.format.group
        )
        of_rows = [
            a.restrided((pairs, rows, *a.shape[2:]), (a.strides[1], 0, *a.strides[2:]))
            for a in (self.v_codes, self.v_numbers)
        ]
        keys = products.restrided((pairs, rows, self.room, 1), (rows * self.room, self.room, 1, 1))
        arrays = {"q": ones, "k": keys, "v": of_rows[0], "v_scale": of_rows[1]}
        of_one = AttentionScale(width**-0.5 if scores.scale is None else scores.scale, scores.softcap)
        plan = cache_plan(live, operation, arrays, of_one, 0, 0, 0, (None, self.format))
        out, lse = plan.attend(None, arrays, AttendedTokens(self.tokens), Results(return_lse=True))
        lead = (batch, q_heads, queries)
        part, sums = (
            view(a, "a part", operation).restrided(shape, contiguous_strides(shape))
            for a, shape in ((out, (*lead, self.width_v)), (lse, lead))
        )
        return part, sums

    @property
    def filled(self) -> list[tuple[ArrayView, int]]:
        """`arrays`, and how many of the third axis are filled."""
        filled = (self.tokens // self.format.group,) * 2 + (self.tokens,) * 2
        return list(zip(self.arrays, filled, strict=True))

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
