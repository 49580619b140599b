"""`GrowingGroups`: one layer whose older tokens become codes in groups, with room that changes, for `TikvCache`.

It is to groups what `GrowingLayer` is to rows. When a window moves on, the oldest groups are dropped as a whole, so a
few more tokens may be held than were asked for.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tikv.arrays import Array, CacheArray, Host, new_array, read_host, runtime_of, to_device
from tikv.dtypes import DType
from tikv.formats import Aging
from tikv.ops import checks
from tikv.ops.attention.request import AttendRequest
from tikv.runtime import require_alive
from tikv.stores.layers.channel_codes import ChannelCodes
from tikv.stores.layers.group_compaction import put_newest
from tikv.stores.layers.growing import Growing, droppable
from tikv.stores.layers.storage import StoreConfig
from tikv.stores.layers.token_group_form import room_of
from tikv.stores.layers.token_groups import TokenGroupLayers
from tikv.stores.picture import counted, size_in_words, tokens_in_words


class GrowingGroups(Growing[TokenGroupLayers]):
    """Keys by channel and values of one layer without a window, in `TokenGroupLayers`; see the module.

    Args:
        quant: the format, in which older tokens are codes.
        row_dtype: the dtype of the newest keys, and of the newest values if these become codes.
        capacity: as in `KVCacheStore`.
        sinks: how many first tokens are never codes; nothing is dropped before them.
        **form: num_kv_heads, head_dim, head_dim_v, batch_size, v_dtype, as in `KVCacheStore`.

    Attributes:
        capacity: how many tokens `make_room` was asked to have room for; there may be room for a few more.
        origin: the position of the oldest token that is held, if none after it was dropped by `compact`; `end` is that
            of the next token.

    Arguments, errors and exactness are those of `KVCacheStore`; making room keeps every bit.
    """

    instead = "Use copy.deepcopy()."
    plain = False  # as in `GrowingLayer`

    def __init__(self, *, quant: Aging, row_dtype: Any, capacity: int, sinks: int = 0, **form: Any) -> None:
        config = StoreConfig.checked("GrowingGroups", num_layers=1, capacity=capacity, dtype=quant, **form)
        self.row_dtype, self.capacity = row_dtype, capacity
        super().__init__(TokenGroupLayers(runtime_of(), config, row_dtype, sinks))
        self.sinks = sinks
        self._before = 0  # tokens before the first that was ever appended here

    @property
    def _codes(self) -> ChannelCodes:
        return self._layers.codes[0]

    @property
    def quantised(self) -> int:
        """How many of the oldest tokens held are codes."""
        return self._codes.tokens - self._codes.dropped

    @property
    def length(self) -> int:
        """Tokens held."""
        return self._layer.length - self._codes.dropped

    @property
    def end(self) -> int:
        """Position of the next token."""
        return self._before + self._layer.length

    @property
    def origin(self) -> int:
        """Position of the oldest token that is held."""
        return self._before + self._codes.dropped

    @origin.setter
    def origin(self, origin: int) -> None:
        self._before = origin - self._codes.dropped

    def attend(self, q: Array, request: AttendRequest, first: int) -> Any:
        """Attention of (batch, Hq, T, D) queries of the newest tokens over those held from the `first` on, in place."""
        operation = "attention 'tikv'"
        require_alive(self.runtime, operation)
        with self._layers.lock:
            since = self._codes.dropped + first
            return self._layers.attend_since(operation, 0, q, request._replace(layout="head_major"), since)

    def decoded(self, first: int, dtype: DType | None = None) -> tuple[CacheArray, CacheArray]:
        """A copy of the tokens held from the `first` on, K (batch, H, n, D) and V (batch, H, n, D_v) of this dtype."""
        operation = "GrowingGroups.decoded"
        require_alive(self.runtime, operation)
        first = checks.integer(first, "first", operation, high=self.length)
        return self._layers.tokens_from(operation, 0, self._codes.dropped + first, dtype)

    def make_room(self, *, capacity: int, drop: int = 0) -> None:
        """Have room for `capacity` tokens, after dropping the `drop` oldest; those that are codes go in whole groups.

        Raises:
            CapacityError: they are more than a launch can address.
        """
        operation = "GrowingGroups.make_room"
        require_alive(self.runtime, operation)
        layers, codes, quant = self._layers, self._codes, self._layers.quant
        held = self.quantised
        gone = min(checks.integer(drop, "drop", operation), held) // quant.group * quant.group
        needed = checks.integer(capacity, "capacity", operation, low=1) + drop - gone
        counts = self._layer
        there = counts.slots - codes.dropped
        if gone == 0 and there >= needed and (capacity == self.capacity or there < 2 * needed):
            self.capacity = capacity
            return
        with layers.lock:
            before, counts.slots = counts.slots, needed
            try:
                made = codes.moved(max(room_of(counts, quant), held - gone), gone, layers.memory)
            except BaseException:
                counts.slots = before
                raise
            codes.hold(made)
            codes.dropped += gone
            counts.slots, counts.valid_from = codes.dropped + needed, codes.dropped
            self.capacity = capacity

    def refuse_trim(self, n: int) -> None:
        """Raise PositionError if `trim` would."""
        operation = "TikvCache.crop"
        n = droppable(operation, n, self.length, self.end, self.whole_from)
        self._layers.refuse_trim(operation, n, self._layer.length)

    def trim(self, n: int) -> None:
        """Drop the `n` newest tokens; those that are codes are dropped in whole groups."""
        require_alive(self.runtime, "TikvCache.crop")
        self.refuse_trim(n)
        if n == self.length == self.end:
            self.reset()
        elif n:
            with self._layers.lock:
                self._layers.trim("TikvCache.crop", n)

    def reset(self) -> None:
        """Forget all tokens; the next one is at position 0. The memory stays."""
        require_alive(self.runtime, "GrowingGroups.reset")
        slots, counts = self._layer.slots - self._codes.dropped, self._layer
        self._layers.reset()
        counts.slots, self._before, self.whole_from = slots, 0, 0

    def compact(self, keep: Any) -> None:
        """Keep whole groups and any of the newest tokens, as `KVCacheStore.compact`; `end` stays."""
        operation = "TikvLayer.compact"
        require_alive(self.runtime, operation)
        layers, counts, end = self._layers, self._layer, self.end
        with layers.lock:
            layers.compact(operation, {0: keep}, None)
            history: Any = counts.history
            self.whole_from = max(self.whole_from, self._before + history.first_whole)
            self._before = end - history.tokens
            layers.memory.recount(counts, history.tokens, None)

    @property
    def newest_keys(self) -> CacheArray:
        """The memory of the newest keys."""
        return CacheArray(self._layers.newest.counts[0].k, self.runtime)

    def to_host(self) -> dict[str, Host]:
        """Copies of the newest tokens in temporal order, and of the codes, by their names in files."""
        operation, layers, codes, live = "TikvCache.save", self._layers, self._codes, self.runtime
        require_alive(live, operation)
        ring, lead = layers.newest.counts[0], (self.batch_size, layers.config.num_kv_heads)
        count = ring.length - codes.tokens
        rows = [new_array((*lead, count, row.width), row.stored, live) for row in layers.form.newest_rows]
        fixed = min(ring.length, self.sinks)
        layers.memory.gather(operation, ring, rows, tokens=fixed, position=0, at=0)
        behind = self.sinks + codes.tokens
        layers.memory.gather(operation, ring, rows, tokens=count - fixed, position=behind, at=fixed)
        copies = [*(read_host(a, live) for a in rows), *codes.copy_to_host()]
        return dict(zip(layers.form.names_of_arrays, copies, strict=True))

    def from_host(self, arrays: dict[str, Host], *, length: int, origin: int, whole_from: int, coded: int) -> None:
        """Take over what `to_host` of a layer of this form returned, with its counts."""
        layers, codes, counts = self._layers, self._codes, self._layer
        named = [arrays[name] for name in layers.form.names_of_arrays]
        if codes.room < coded:
            codes.hold(codes.like(self.batch_size, coded))
        codes.take_over(coded, named[2:])
        rows = [to_device(np.ascontiguousarray(a), self.runtime) for a in named[:2]] if length > coded else []
        fixed = min(length, self.sinks)
        for first, end, before in ((0, fixed, 0), (fixed, length - coded, fixed + coded)):
            part = [a.part(2, first, end) for a in rows] if end > first else []
            put_newest("TikvCache.load", layers.newest, 0, before, part)
        layers.memory.recount(counts, length, None)
        counts.slots = max(counts.slots, length)
        codes.dropped, self._before, self.whole_from = 0, origin, whole_from

    def twin(self, make: Any = None) -> GrowingGroups:
        """An independent copy of this layer in its own memory."""
        layers, counts, codes = self._layers, self._layer, self._codes
        config, (width, width_v) = layers.config, self.rows.widths
        copied = GrowingGroups(
            quant=layers.quant, row_dtype=self.row_dtype, num_kv_heads=config.num_kv_heads, head_dim=width,
            head_dim_v=width_v, capacity=counts.slots - codes.dropped, sinks=self.sinks, batch_size=self.batch_size,
            v_dtype=config.rows.get("v_dtype"),
        )  # fmt: skip
        to, copies = copied._layer, copied._codes
        if copies.room < codes.room:
            copies.hold(copies.like(self.batch_size, codes.room))
        to.slots, copies.dropped, copied._before = counts.slots, codes.dropped, self._before
        copied.capacity, copied.whole_from = self.capacity, self.whole_from
        copied._layers.restore("copy.deepcopy", layers.capture(), (repr(self), repr(copied)))
        return copied

    def __repr__(self) -> str:
        heads = counted(self._layers.config.num_kv_heads, "head")
        return (
            f"GrowingGroups(batch {self.batch_size} x {heads} x {self.rows.width}, {self.rows.name}, "
            f"{tokens_in_words(self.end, self.length, self.capacity)}, {self.quantised} of them codes, "
            f"{size_in_words(self.nbytes)}, {self.runtime.arch})"
        )
