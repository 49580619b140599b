"""One layer whose tokens are always in temporal order, and which can grow, shrink and drop its oldest tokens.

Model libraries need this to pass a plain slice of memory, oldest token first, to any attention function. A ring's
window would have to be copied for each token; this layer moves its tokens to the front only once in many.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

import numpy as np

from tikv import runtime
from tikv.arrays import Array, CacheArray, last_call_test, new_array, runtime_of, view_all
from tikv.dtypes import DType
from tikv.errors import PositionError
from tikv.ops import checks
from tikv.runtime import require_alive
from tikv.stores.layers.append import ROWS
from tikv.stores.layers.compaction import compact_layers
from tikv.stores.layers.contiguous import ContiguousLayers
from tikv.stores.layers.storage import LayerStorage, StoreConfig
from tikv.stores.picture import counted, size_in_words, tokens_in_words
from tikv.stores.row_format import RowFormats

Storage = TypeVar("Storage", bound=LayerStorage)

# append_alike(k, v, room): `append` of (batch, H, T, D) tokens of the same form as the last ones, without the checks
# that the form decides; returns how many tokens are then held. Tokens of another form, or more than fit into the first
# `room` slots, are not appended, and 0 is returned. Like `append`, it raises ShapeError and StaleRuntimeError before it
# writes.
AppendAlike = Callable[[Any, Any, int], int]


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


def takes_nothing(k: Array, v: Array, room: int) -> int:
    """An `append_alike` that appends nothing."""
    return 0


class Growing(runtime.NotCopied, Generic[Storage]):
    """The base of layers whose room changes: a `LayerStorage` of one layer, head-major, and its place in the text.

    Attributes:
        rows: how keys and values are stored; `dtype` and `v_dtype`, in which dtypes.
        whole_from: the position from which on no compaction dropped a token.
    """

    on_host = False  # the memory is that of the device

    def __init__(self, layers: Storage) -> None:
        self._layers = layers
        self._layer = layers.counts[0]
        self.runtime, self.rows = layers.runtime, layers.rows
        self.dtype, self.v_dtype = self.rows.k.dtype, self.rows.v.dtype
        self.whole_from = 0
        self.append_alike: AppendAlike = takes_nothing  # always of groups, of which one may have to be quantised first

    @property
    def batch_size(self) -> int:
        """The current number of sequences."""
        return self._layers.batch_size

    @property
    def nbytes(self) -> int:
        """Bytes of all that is stored, filled or not."""
        return self._layers.nbytes

    def append(self, k: Array, v: Array) -> None:
        """Append (batch, H, T, D) tokens."""
        operation = "TikvCache.update"
        require_alive(self.runtime, operation)
        with self._layers.lock:
            self._layers.append(operation, 0, view_all((k, v), ROWS, operation), "head_major")

    def reorder(self, index: Array) -> None:
        """Replace each sequence ``b`` by sequence ``index[b]``, as `KVCacheStore.reorder`."""
        self._move("TikvCache.reorder_cache", index, self._layers.reorder)

    def select(self, index: Array) -> None:
        """Keep these sequences, in this order; as `KVCacheStore.select`."""
        self._select("TikvCache.batch_select_indices", index)

    def repeat(self, n: int) -> None:
        """Repeat every sequence ``n`` times; as `KVCacheStore.repeat`."""
        operation = "TikvCache.batch_repeat_interleave"
        n = checks.integer(n, "n", operation, low=1)
        self._select(operation, np.repeat(np.arange(self.batch_size, dtype=np.int32), n))

    def _select(self, operation: str, index: Array) -> None:
        self._move(operation, index, self._layers.select)
        self.append_alike = takes_nothing  # the old one is bound to the old memory

    def _move(self, operation: str, index: Array, move: Callable[[str, Any], None]) -> None:
        """Let sequences continue from others."""
        require_alive(self.runtime, operation)
        with self._layers.lock:
            move(operation, index)

    def twin(self, make: Any = None) -> Any:
        """An independent copy of this layer in its own memory; `make` makes an empty layer."""
        raise NotImplementedError

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self.twin()


def _checked(live: runtime.Runtime, **arguments: Any) -> tuple[StoreConfig, RowFormats]:
    """The checked arguments of a `GrowingLayer`; equal ones are checked once, unless there are scales among them."""
    scaled = arguments.get("k_scale") is not None or arguments.get("v_scale") is not None
    key = ("GrowingLayer", *[(name, type(value), value) for name, value in arguments.items()])
    try:
        checked: tuple[StoreConfig, RowFormats] | None = None if scaled else live.plans.get(key)
    except TypeError:  # an argument without a hash, which the checks refuse
        scaled, checked = True, None
    if checked is None:
        config = StoreConfig.checked("GrowingLayer", **arguments)
        checked = config, RowFormats.checked("GrowingLayer", live, config.num_kv_heads, **config.rows)
        if not scaled:
            live.plans.keep(key, checked)
    return checked


class GrowingLayer(Growing[ContiguousLayers]):
    """Keys and values of one layer without a window, in `ContiguousLayers`, with room that changes.

    Slot ``i`` holds the token at position ``origin + i``; ``length`` counts the tokens held, ``end`` all ever appended
    less those trimmed. For groups of codes ``keys`` or ``values`` are words.

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

    instead = "Use copy.deepcopy(), or append what `keys` and `values` hold to a tikv.KVCacheStore and save() it."

    def __init__(self, *, capacity: int, **form: Any) -> None:
        live, place = runtime_of(), "host" if self.on_host else "device"
        config, rows = _checked(live, num_layers=1, capacity=capacity, place=place, **form)
        super().__init__(ContiguousLayers(live, config, "GrowingLayer", rows))
        # Whether torch can write rows as they are stored.
        self.plain = self.rows.formats == (None, None) and self.rows.alike and not self.rows.divided
        self.origin = 0

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

    def append(self, k: Array, v: Array) -> None:
        """As `Growing.append`; `append_alike` then takes tokens of this form, if they are torch tensors."""
        super().append(k, v)
        self.append_alike = self._like_the_last("TikvCache.update")

    def _like_the_last(self, operation: str) -> AppendAlike:
        """An `append_alike` for tokens of the forms just appended; to avoid a cycle, it does not refer to this layer.

        `benches/integrations/bench_transformers.py` justifies it: a decoded token's `TikvCache.update` is mostly work
        of the host, and this saves the views, the key and the checks that the forms decide.
        """
        test = last_call_test(operation, ROWS)
        if test is None:
            return takes_nothing
        same, address, key, same_at = test
        plan = self._layers.appends.plans.get((operation, self._layer.index, key, "head_major"))
        launch_again = None if plan is None else plan.launch_again
        if plan is None or launch_again is None or not plan.pointers:
            return takes_nothing
        layer, tokens, slots, live = self._layer, plan.tokens, self.capacity, self.runtime
        lock, program, move_to = plan.lock, live.program, plan.move_to

        def append_alike(k: Array, v: Array, room: int) -> int:
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

    def make_room(self, *, capacity: int, drop: int = 0) -> None:
        """Drop the ``drop`` oldest tokens, move the others to the first slots, and have ``capacity`` slots.

        PositionError if fewer than ``drop`` are held, CapacityError if the rest does not fit or there are more slots
        than a launch addresses.

        Cost: nothing if nothing changes; else one launch or two per array. If the capacity changes, new memory is
            allocated, and arrays that were handed out before still refer to the old.
        """
        operation = "GrowingLayer.make_room"
        require_alive(self.runtime, operation)
        layer, memory = self._layer, self._layers.memory
        drop = checks.integer(drop, "drop", operation)
        if drop > layer.length:
            raise PositionError(
                f"{operation}: cannot drop {drop} tokens of {layer.length}. Drop at most {layer.length}."
            )
        capacity = checks.integer(capacity, "capacity", operation, low=1)
        keep = layer.length - drop
        checks.fits_linear(0, keep, capacity, operation)
        if capacity == self.capacity and drop == 0:
            return
        rest = [a.restrided((*a.shape[:2], keep, *a.shape[3:]), a.strides, drop * a.strides[2]) for a in layer.arrays]
        if capacity == self.capacity:
            copies = [new_array(a.shape, a.dtype, self.runtime) for a in rest]
            for a, b in zip(rest, copies, strict=True):
                memory.move_slots(a, b, keep)
            rest = copies
        else:
            before, layer.slots = layer.slots, capacity
            try:
                memory.allocate(self.batch_size)
            except BaseException:
                layer.slots = before
                raise
            self.append_alike = takes_nothing  # the old one is bound to the old memory
        for a, b in zip(rest, layer.arrays, strict=True):
            memory.move_slots(a, b, keep)
        layer.length = keep
        self.origin += drop

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
        return self._layers.memory.tokens(operation, self._layer, first, dtype)

    def compact(self, keep: Any) -> None:
        """Keep some tokens, different but equally many for each head, in place, as `KVCacheStore.compact`.

        Slots then count from the back: the position of the next token is still ``end``.
        """
        operation = "TikvLayer.compact"
        require_alive(self.runtime, operation)
        layer, memory, held = self._layer, self._layers.memory, self._layer.length
        with self._layers.lock:
            compact_layers(operation, memory, [layer], [keep], None, one_length=True)
            history: Any = layer.history
            self.whole_from = max(self.whole_from, self.origin + history.first_whole)
            self.origin += held - history.tokens
            memory.recount(layer, history.tokens, None)

    def trim(self, n: int) -> None:
        """Drop the ``n`` newest tokens; PositionError beyond the last token that `compact` dropped."""
        operation = "GrowingLayer.trim"
        require_alive(self.runtime, operation)
        self._layer.length -= droppable(operation, n, self.length, self.end, self.whole_from)

    def reset(self) -> None:
        """Forget all tokens; the next one is at position 0. The memory and its contents stay."""
        require_alive(self.runtime, "GrowingLayer.reset")
        self._layer.length = self._layer.valid_from = self.origin = self.whole_from = 0

    def to_host(self) -> dict[str, np.ndarray[Any, Any]]:
        """Copies of the filled slots, (batch, heads, length[, width]), by their names in files."""
        require_alive(self.runtime, "TikvCache.save")
        return dict(zip(self._layer.named, self._layers.memory.to_host()[0], strict=True))

    def from_host(self, arrays: dict[str, np.ndarray[Any, Any]], *, length: int, origin: int, whole_from: int) -> None:
        """Take over what `to_host` copied, and its counts, into a layer of the same form."""
        self.recount(length=length, origin=origin)
        self.whole_from = whole_from
        self._layers.memory.from_host([[arrays[name] for name in self._layer.named]])

    def twin(self, make: Callable[..., GrowingLayer] | None = None) -> GrowingLayer:
        """An independent copy of this layer in its own memory; `make` makes an empty layer."""
        copied = (make or GrowingLayer)(**self.arguments())
        copied.recount(length=self.length, origin=self.origin)
        copied.whole_from = self.whole_from
        for a, to in zip(self._layer.arrays, copied._layer.arrays, strict=True):
            self._layers.memory.move_slots(a, to, self.length)
        return copied

    def arguments(self) -> dict[str, Any]:
        """The arguments of a layer of this form."""
        sizes = {"capacity": self.capacity, "batch_size": self.batch_size}
        return {"num_kv_heads": self._layers.memory.num_kv_heads, **sizes, **self.rows.arguments()}

    def __repr__(self) -> str:
        memory = self._layers.memory
        return (
            f"GrowingLayer(batch {memory.batch_size} x {counted(memory.num_kv_heads, 'head')} x {self.rows.width}, "
            f"{self.rows.name}, {tokens_in_words(self.end, self.length, self.capacity)}, "
            f"{size_in_words(self.nbytes)}, {self.runtime.arch})"
        )
