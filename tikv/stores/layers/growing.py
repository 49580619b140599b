"""One layer whose tokens are always in temporal order, and which can grow, shrink and drop its oldest tokens.

Model libraries need this to pass a plain slice of memory, oldest token first, to any attention function. A ring's
window would have to be copied for each token; this layer moves its tokens to the front only once in many.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tikv import runtime
from tikv.arrays import ArrayView, CacheArray, last_call_test, new_array, runtime_of, view_all
from tikv.dtypes import DType
from tikv.errors import PositionError
from tikv.ops import checks
from tikv.runtime import require_alive
from tikv.stores.layers.append import ROWS, Appends
from tikv.stores.layers.compaction import compact_layers
from tikv.stores.layers.counts import Layer
from tikv.stores.layers.memory import LayerMemory
from tikv.stores.picture import counted, size_in_words, tokens_in_words
from tikv.stores.row_format import RowFormats

# append_alike(k, v, room): `append` of (batch, H, T, D) tokens of the same form as the last ones, without the checks
# that the form decides; returns how many tokens are then held. Tokens of another form, or more than fit into the first
# `room` slots, are not appended, and 0 is returned. Like `append`, it raises ShapeError and StaleRuntimeError before it
# writes.
AppendAlike = Callable[[Any, Any, int], int]


def _slots(a: ArrayView, first: int, count: int) -> ArrayView:
    """`count` slots of a (batch, heads, slots[, width]) array."""
    return a.restrided((*a.shape[:2], count, *a.shape[3:]), a.strides, first * a.strides[2])


def droppable(operation: str, n: int, length: int, end: int, whole_from: int) -> int:
    """The number of newest tokens to drop, of `length` up to position `end`, all there from `whole_from` on.

    Raises:
        PositionError: the layer has fewer, or one that would have to stay was dropped.
    """
    n = checks.integer(n, "n", operation)
    if n > length:
        raise PositionError(f"{operation}: cannot drop {n} tokens of {length}. Drop at most {length}.")
    if n and end - n < whole_from:
        raise PositionError(
            f"{operation}: cannot drop {n} tokens, since a layer cannot go back beyond position {whole_from - 1}, "
            f"which was dropped. Drop at most {end - whole_from}, or reset()."
        )
    return n


def takes_nothing(k: Any, v: Any, room: int) -> int:
    """An `append_alike` that appends nothing."""
    return 0


class GrowingLayer(runtime.NotCopied):
    """Keys and values of one layer without a window, head-major, with room that changes.

    Slot ``i`` holds the token at position ``origin + i``; ``length`` counts the tokens held, ``end`` all ever appended
    less those trimmed. ``rows`` says how keys and values are stored, ``dtype`` and ``v_dtype`` in which dtypes; for
    groups of codes ``keys`` or ``values`` are words.

    Arguments, errors and exactness are those of `KVCacheStore`; making room keeps every bit.
    Cost: `make_room` reads and writes the tokens it keeps, once into new memory or twice in place.

    Examples:
        >>> import numpy as np
        >>> layer = GrowingLayer(num_kv_heads=1, head_dim=2, capacity=3, dtype="float32")
        >>> rows = np.arange(6, dtype=np.float32).reshape(1, 1, 3, 2)
        >>> layer.append(rows, rows)
        >>> layer.make_room(capacity=8, drop=1)
        >>> layer.origin, layer.end, layer.capacity, layer.keys.numpy()[0, 0, :2].tolist()
        (1, 3, 8, [[2.0, 3.0], [4.0, 5.0]])
    """

    on_host = False  # the memory is that of the device
    instead = "Use copy.deepcopy(), or append what `keys` and `values` hold to a tikv.KVCacheStore and save() it."

    def __init__(self, *, num_kv_heads: int, capacity: int, batch_size: int = 1, **rows: Any) -> None:
        operation = "GrowingLayer"
        self.runtime = runtime_of()
        heads = checks.integer(num_kv_heads, "num_kv_heads", operation, low=1)
        self._layer = Layer(0, checks.integer(capacity, "capacity", operation, low=1), None, 0)
        formats = self.rows = RowFormats.checked(operation, self.runtime, heads, **rows)
        batch = checks.integer(batch_size, "batch_size", operation, low=1)
        self._memory = LayerMemory(self.runtime, [self._layer], formats, heads, batch, on_host=self.on_host)
        self._appends = Appends(self._memory)
        self.dtype, self.v_dtype = formats.k.dtype, formats.v.dtype
        # Whether torch can write rows as they are stored.
        self.plain = formats.formats == (None, None) and formats.alike and not formats.divided
        self.origin = 0
        self.whole_from = 0  # the position from which on no compaction dropped a token
        self.append_alike: AppendAlike = takes_nothing

    @property
    def length(self) -> int:
        """Tokens held."""
        return self._layer.length

    @property
    def end(self) -> int:
        """Position of the next token."""
        return self.origin + self._layer.length

    @property
    def capacity(self) -> int:
        """The number of slots."""
        return self._layer.slots

    @property
    def batch_size(self) -> int:
        """The current number of sequences."""
        return self._memory.batch_size

    @property
    def nbytes(self) -> int:
        """Bytes of keys, values and scales, filled or not."""
        return self._memory.nbytes

    @property
    def keys(self) -> CacheArray:
        """(batch, num_kv_heads, capacity, head_dim): the keys in place, not a copy."""
        return CacheArray(self._layer.k, self.runtime)

    @property
    def values(self) -> CacheArray:
        """(batch, num_kv_heads, capacity, head_dim_v): the values in place, not a copy."""
        return CacheArray(self._layer.v, self.runtime)

    @property
    def scales(self) -> tuple[CacheArray | None, CacheArray | None]:
        """The scales of K and of V, as `KVCacheStore.scales` returns them; None for one that has no scales."""
        k, v = (None if a is None else CacheArray(a, self.runtime) for a in self._layer.read_scales)
        return k, v

    def append(self, k: Any, v: Any) -> None:
        """Append (batch, H, T, D) tokens; `append_alike` then takes tokens of this form, if they are torch tensors."""
        operation = "TikvCache.update"
        require_alive(self.runtime, operation)
        rows = view_all((k, v), ROWS, operation)
        with self._memory.lock:
            self._appends.append(operation, self._layer, rows, "head_major")
        self.append_alike = self._like_the_last(operation)

    def _like_the_last(self, operation: str) -> AppendAlike:
        """An `append_alike` for tokens of the forms just appended; to avoid a cycle, it does not refer to this layer.

        `benches/integrations/bench_transformers.py` justifies it: a decoded token's `TikvCache.update` is mostly work
        of the host, and this saves the views, the key and the checks that the forms decide.
        """
        test = last_call_test(operation, ROWS)
        if test is None:
            return takes_nothing
        same, address, key, same_at = test
        plan = self._appends.plans.get((operation, self._layer.index, key, "head_major"))
        launch_again = None if plan is None else plan.launch_again
        if plan is None or launch_again is None or not plan.pointers:
            return takes_nothing
        layer, tokens, slots, live = self._layer, plan.tokens, self.capacity, self.runtime
        lock, program, move_to = plan.lock, live.program, plan.move_to

        def append_alike(k: Any, v: Any, room: int) -> int:
            length = layer.length
            end = length + tokens
            if end > room or end > slots:
                return 0
            if live.front.prog is not program:  # as `require_alive`, inlined: a call costs time
                require_alive(live, operation)
            try:
                pointers = (address(k), address(v))
            except (TypeError, RuntimeError):
                return 0
            if not (same(k, v) if pointers == plan.pointers else same_at(pointers, k, v)):
                return 0
            with lock:
                if pointers != plan.pointers and not move_to(pointers):
                    return 0
                launch_again(length)
                layer.length = end
            return end

        return append_alike

    def make_room(self, *, capacity: int, drop: int = 0, sinks: int = 0) -> None:
        """Drop the ``drop`` oldest tokens after the first ``sinks``, close the gap, and have ``capacity`` slots.

        PositionError if fewer than ``drop`` are held there, CapacityError if the rest does not fit or there are more
        slots than a launch addresses. If sinks precede the gap, slots count from the back, as after `compact`.

        Cost: nothing if nothing changes; else one launch or two per array. If the capacity changes, new memory is
            allocated, and arrays that were handed out before still refer to the old.
        """
        operation = "GrowingLayer.make_room"
        require_alive(self.runtime, operation)
        layer, memory = self._layer, self._memory
        drop = checks.integer(drop, "drop", operation)
        sinks = checks.integer(sinks, "sinks", operation) if drop else 0
        most = max(0, layer.length - sinks)
        if drop > most:
            raise PositionError(f"{operation}: cannot drop {drop} tokens of {most}. Drop at most {most}.")
        capacity = checks.integer(capacity, "capacity", operation, low=1)
        keep = layer.length - drop
        checks.fits_linear(0, keep, capacity, operation)
        if capacity == self.capacity and drop == 0:
            return
        old, behind = layer.arrays, keep - sinks
        rest = [_slots(a, sinks + drop, behind) for a in old]
        if capacity == self.capacity:
            taken = [new_array(a.shape, a.dtype, self.runtime) for a in rest]
            for a, b in zip(rest, taken, strict=True):
                memory.move_slots(a, b, behind)
            rest = taken
        else:
            before, layer.slots = layer.slots, capacity
            try:
                memory.allocate(self.batch_size)
            except BaseException:
                layer.slots = before
                raise
            self.append_alike = takes_nothing  # the old one is bound to the old memory
            for a, b in zip(old, layer.arrays, strict=True):
                memory.move_slots(a, b, sinks)
        for a, b in zip(rest, layer.arrays, strict=True):
            memory.move_slots(a, _slots(b, sinks, behind), behind)
        layer.length = keep
        self.origin += drop
        if sinks:
            self.whole_from = max(self.whole_from, self.end - behind)

    def recount(self, *, length: int, origin: int) -> None:
        """Set how many tokens are held and the position of the first, after other code wrote or moved them."""
        self._layer.length = length
        self.origin = origin

    def decoded(self, first: int, dtype: DType | None = None) -> tuple[CacheArray, CacheArray]:
        """A copy of the tokens from slot ``first`` on, K (batch, H, n, D) and V (batch, H, n, D_v), in one launch.

        Without a dtype, int8 and groups are returned as float32.
        """
        operation = "GrowingLayer.decoded"
        require_alive(self.runtime, operation)
        first = checks.integer(first, "first", operation, high=self.length)
        return self._memory.tokens(operation, self._layer, first, dtype)

    def compact(self, keep: Any) -> None:
        """Keep some tokens, different but equally many for each head, in place, as `KVCacheStore.compact`.

        Slots then count from the back: the position of the next token is still ``end``.
        """
        operation = "TikvLayer.compact"
        require_alive(self.runtime, operation)
        layer, held = self._layer, self._layer.length
        with self._memory.lock:
            compact_layers(operation, self._memory, [layer], [keep], None, one_length=True)
            left: Any = layer.history
            self.whole_from = max(self.whole_from, self.origin + left.first_whole)
            self.origin += held - left.tokens
            self._memory.recount(layer, left.tokens, None)

    def trim(self, n: int) -> None:
        """Drop the ``n`` newest tokens; PositionError beyond the last token that `compact` dropped."""
        operation = "GrowingLayer.trim"
        require_alive(self.runtime, operation)
        self._layer.length -= droppable(operation, n, self.length, self.end, self.whole_from)

    def reset(self) -> None:
        """Forget all tokens; the next one is at position 0. The memory and its contents stay."""
        require_alive(self.runtime, "GrowingLayer.reset")
        self._layer.length = self._layer.valid_from = self.origin = self.whole_from = 0

    def reorder(self, index: Any) -> None:
        """Replace each sequence ``b`` by sequence ``index[b]``, as `KVCacheStore.reorder`."""
        require_alive(self.runtime, "TikvCache.reorder_cache")
        self._memory.reorder("TikvCache.reorder_cache", index)

    def select(self, index: Any) -> None:
        """Keep these sequences, in this order; as `KVCacheStore.select`."""
        operation = "TikvCache.batch_select_indices"
        require_alive(self.runtime, operation)
        self._select(self._memory.sequences_of(operation, index))

    def repeat(self, n: int) -> None:
        """Repeat every sequence ``n`` times; as `KVCacheStore.repeat`."""
        operation = "TikvCache.batch_repeat_interleave"
        require_alive(self.runtime, operation)
        n = checks.integer(n, "n", operation, low=1)
        self._select(np.repeat(np.arange(self.batch_size, dtype=np.int32), n))

    def _select(self, sequences: np.ndarray[Any, Any]) -> None:
        self._memory.select(sequences)
        self.append_alike = takes_nothing

    def to_host(self) -> dict[str, np.ndarray[Any, Any]]:
        """Copies of the filled slots, (batch, heads, length[, width]), by their names in files."""
        require_alive(self.runtime, "TikvCache.save")
        return dict(zip(self._layer.named, self._memory.to_host()[0], strict=True))

    def from_host(self, arrays: dict[str, np.ndarray[Any, Any]], *, length: int, origin: int, whole_from: int) -> None:
        """Take over what `to_host` copied, and its counts, into a layer of the same form."""
        self.recount(length=length, origin=origin)
        self.whole_from = whole_from
        self._memory.from_host([[arrays[name] for name in self._layer.named]])

    def twin(self, make: Callable[..., GrowingLayer] | None = None) -> GrowingLayer:
        """An independent copy of this layer in its own memory; `make` makes an empty layer."""
        found = (make or GrowingLayer)(**self.arguments())
        found.recount(length=self.length, origin=self.origin)
        found.whole_from = self.whole_from
        for a, to in zip(self._layer.arrays, found._layer.arrays, strict=True):
            self._memory.move_slots(a, to, self.length)
        return found

    def arguments(self) -> dict[str, Any]:
        """The arguments of a layer of this form."""
        sizes = {"capacity": self.capacity, "batch_size": self.batch_size}
        return {"num_kv_heads": self._memory.num_kv_heads, **sizes, **self.rows.arguments()}

    def __deepcopy__(self, memo: dict[int, Any]) -> GrowingLayer:
        return self.twin()

    def __repr__(self) -> str:
        memory = self._memory
        return (
            f"GrowingLayer(batch {memory.batch_size} x {counted(memory.num_kv_heads, 'head')} x {self.rows.width}, "
            f"{self.rows.name}, {tokens_in_words(self.end, self.length, self.capacity)}, "
            f"{size_in_words(self.nbytes)}, {self.runtime.arch})"
        )
