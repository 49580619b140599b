"""The older tokens of a layer as codes: keys by channel over groups of tokens, values by token.

A group of tokens is quantised once, from the rows that a ring still has, and never written again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tikv import dtypes, runtime
from tikv.arrays import ArrayView, contiguous_strides, new_array, read_host, to_device, view, write_host
from tikv.dtypes import DType
from tikv.errors import CapacityError
from tikv.formats import GroupFormat
from tikv.ops.attention.by_channel import channel_scores
from tikv.ops.attention.launches import AttendedTokens
from tikv.ops.attention.plan import Results
from tikv.ops.attention.request import AttentionScale
from tikv.ops.layouts import Placement, Rows, Scale
from tikv.ops.quantize import scale_of_groups
from tikv.ops.row_copy import bind_copy
from tikv.runtime.cache import BoundedCache
from tikv.stores.layers.attend import cache_plan
from tikv.stores.layers.counts import Layer
from tikv.stores.layers.memory import rows_of
from tikv.stores.limits import BLOCK_BYTES

ARRAYS = ("k_codes", "k_numbers", "v_codes", "v_numbers")  # by the names that files have
RING = Placement("ring")


class ChannelCodes:
    """The codes of one layer's first tokens, in memory of their own.

    Args:
        live: the runtime.
        batch, heads, width, width_v: of the layer.
        room: tokens that there is memory for, whole groups.
        format: of K along tokens and of V along its columns.
        row_dtype: of the rows that are quantised.
        scale_dtype: of scales and biases.
        scratch: arrays of attention, by the rows of queries of a KV head, which layers share.

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
        width: int,
        width_v: int,
        room: int,
        format: GroupFormat,
        row_dtype: DType,
        scale_dtype: DType,
        scratch: BoundedCache[int, tuple[ArrayView, ArrayView]],
    ) -> None:
        self.runtime, self.format, self.room = live, format, room
        self.batch, self.heads, self.width, self.width_v = batch, heads, width, width_v
        self.tokens, self._scratch = 0, scratch
        group, lead = format.group, (batch, heads)
        shapes = {
            "k_codes": (*lead, room // group, width, format.words(group)),
            "k_numbers": (*lead, room // group, width, format.numbers),
            "v_codes": (*lead, room, format.words(width_v)),
            "v_numbers": (*lead, room, width_v // group * format.numbers),
        }
        for name, shape in shapes.items():
            dtype = scale_dtype if name.endswith("numbers") else dtypes.uint32
            needed, limit = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize, BLOCK_BYTES[live.arch]
            if needed > limit:
                raise CapacityError(
                    f"KVCacheStore: {name} of a layer need {needed} bytes in one piece of memory, and {live.arch} "
                    f"addresses {limit}. Use a smaller capacity, or several stores."
                )
        self.k_codes, self.k_numbers, self.v_codes, self.v_numbers = (
            new_array(shape, scale_dtype if name.endswith("numbers") else dtypes.uint32, live)
            for name, shape in shapes.items()
        )
        self._turned = new_array((batch * heads, width, group), row_dtype, live)  # keys of a group, channel by channel

    @property
    def arrays(self) -> list[ArrayView]:
        """The four, as `ARRAYS` names them."""
        return [self.k_codes, self.k_numbers, self.v_codes, self.v_numbers]

    @property
    def nbytes(self) -> int:
        """Bytes of codes, scales and biases, filled or not."""
        return sum(a.nbytes for a in self.arrays)

    def encode(self, operation: str, layer: Layer) -> None:
        """Quantise the next group of tokens, whose rows the layer's ring has, in three launches."""
        group, at = self.format.group, self.tokens
        k, v = rows_of(layer.k), rows_of(layer.v)
        turned = self._turned
        of_ring: dict[str, Any] = {"src_place": RING, "src_position": layer.slot_of(at), "ring": layer.ring}
        of_sequences: dict[str, Any] = {"heads": self.heads, "tokens": group, "groups": self.batch}
        one_head = self.width * group
        bind_copy(
            self.runtime,
            operation,
            src=[k],
            dst=[Rows(turned, sequence=self.heads * one_head, head=one_head, token=1, inner=(1, group))],
            widths=[self.width],
            **of_sequences,
            **of_ring,
        ).bound.launch()
        bind_copy(
            self.runtime,
            operation,
            src=[Rows(turned, sequence=one_head, token=group)],
            dst=[self._keys(at // group)],
            widths=[group],
            heads=1,
            tokens=self.width,
            groups=self.batch * self.heads,
        ).bound.launch()
        bind_copy(
            self.runtime,
            operation,
            src=[v],
            dst=[self._values],
            widths=[self.width_v],
            dst_position=at,
            **of_sequences,
            **of_ring,
        ).bound.launch()
        self.tokens += group

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
        group, groups = self.format.group, self.tokens // self.format.group
        if not groups:
            return
        turned = new_array((self.batch * self.heads, groups * self.width, group), dtypes.float32, self.runtime)
        one_head = turned.strides[0]
        bind_copy(
            self.runtime,
            operation,
            src=[self._keys(0)],
            dst=[Rows(turned, sequence=one_head, token=group)],
            widths=[group],
            heads=1,
            tokens=groups * self.width,
            groups=self.batch * self.heads,
        ).bound.launch()
        of_sequences: dict[str, Any] = {"heads": self.heads, "tokens": self.tokens, "groups": self.batch}
        to = [rows_of(k), rows_of(v)]
        block = self.width * group
        by_channel = Rows(turned, sequence=self.heads * one_head, head=one_head, block=block, token=1, inner=(1, group))
        bind_copy(
            self.runtime,
            operation,
            src=[by_channel],
            dst=to[:1],
            widths=[self.width],
            src_place=Placement("linear", group),
            **of_sequences,
        ).bound.launch()
        bind_copy(
            self.runtime,
            operation,
            src=[self._values],
            dst=to[1:],
            widths=[self.width_v],
            **of_sequences,
        ).bound.launch()

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
        words, numbers = self.v_codes.strides, self.v_numbers.strides
        arrays = {
            "q": ones,
            "k": products.restrided((pairs, rows, self.room, 1), (rows * self.room, self.room, 1, 1)),
            "v": self.v_codes.restrided((pairs, rows, *self.v_codes.shape[2:]), (words[1], 0, *words[2:])),
            "v_scale": self.v_numbers.restrided(
                (pairs, rows, *self.v_numbers.shape[2:]), (numbers[1], 0, *numbers[2:])
            ),
        }
        of_one = AttentionScale(width**-0.5 if scores.scale is None else scores.scale, scores.softcap)
        plan = cache_plan(live, operation, arrays, of_one, 0, 0, 0, (None, self.format))
        out, lse = plan.attend(None, arrays, AttendedTokens(self.tokens), Results(return_lse=True))
        of_rows = (batch, q_heads, queries)
        shapes = [(*of_rows, self.width_v), of_rows]
        part, sums = (
            view(a, "a part", operation).restrided(shape, contiguous_strides(shape))
            for a, shape in zip((out, lse), shapes, strict=True)
        )
        return part, sums

    def copy_to_host(self) -> list[np.ndarray[Any, Any]]:
        """The filled parts of `arrays` on the host."""
        filled = (self.tokens // self.format.group,) * 2 + (self.tokens,) * 2
        return [read_host(a, self.runtime)[:, :, :n] for a, n in zip(self.arrays, filled, strict=True)]

    def take_over(self, tokens: int, arrays: Sequence[np.ndarray[Any, Any]]) -> None:
        """Hold what `copy_to_host` of such codes gave."""
        for to, given in zip(self.arrays, arrays, strict=True):
            host = np.zeros(to.shape, to.dtype.numpy)
            host[:, :, : given.shape[2]] = given
            write_host(host, to)
        self.tokens = tokens
