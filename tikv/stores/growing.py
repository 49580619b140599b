"""One layer of a cache whose tokens always lie in temporal order, and which can grow, shrink and let go of its oldest.

What a model library wants to hand to any attention function: a plain slice of memory, oldest token first. A ring would
need its window copied for each token; this layer moves its tokens to the front once in many.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tikv.arrays import ArrayView, CacheArray, last_test, new_array
from tikv.errors import PositionError
from tikv.ops import checks
from tikv.runtime import require_alive
from tikv.stores.contiguous import KVCacheStore

# again(k, v, room): `append` of (batch, H, T, D) tokens like the last ones, without looking at what their forms decide;
# returns how many tokens are held then. Tokens of another form, or more than fit into the first `room` slots, are not
# appended, and 0 is returned. It raises ShapeError and StaleRuntimeError as `append`, before it writes.
Again = Callable[[Any, Any, int], int]


def _other(k: Any, v: Any, room: int) -> int:
    """An `again` that knows no tokens."""
    return 0


class LayerStore(KVCacheStore):
    """A `KVCacheStore` of one layer without a window, with room that changes.

    Slot ``i`` holds the token at position ``origin + i``; ``length`` counts the tokens held, ``end`` all ever appended
    less those trimmed.

    Args:
        num_kv_heads, head_dim, capacity, batch_size, dtype, head_dim_v, scale_dtype: as in `KVCacheStore`.

    Raises:
        As `KVCacheStore`.

    Exactness: as `KVCacheStore`; making room keeps every bit.
    Cost: `make_room` reads and writes the tokens it keeps, once into new memory or twice in place.

    Example:
        >>> import numpy as np
        >>> layer = LayerStore(num_kv_heads=1, head_dim=2, capacity=3, dtype="float32")
        >>> rows = np.arange(6, dtype=np.float32).reshape(3, 1, 2)
        >>> layer.append(0, rows, rows)
        >>> layer.make_room(capacity=8, drop=1)
        >>> layer.origin, layer.end, layer.capacity, layer.keys(0).numpy()[0, 0, :2].tolist()
        (1, 3, 8, [[2.0, 3.0], [4.0, 5.0]])
    """

    def __init__(
        self,
        *,
        num_kv_heads: int,
        head_dim: int,
        capacity: int,
        batch_size: int = 1,
        dtype: Any = "float16",
        head_dim_v: int | None = None,
        scale_dtype: Any = "float16",
    ) -> None:
        self.origin = 0
        super().__init__(
            num_layers=1,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            capacity=capacity,
            batch_size=batch_size,
            dtype=dtype,
            head_dim_v=head_dim_v,
            scale_dtype=scale_dtype,
        )

    @property
    def length(self) -> int:
        """Tokens held."""
        return self._layers[0].length

    @property
    def end(self) -> int:
        """Position of the next token."""
        return self.origin + self._layers[0].length

    def _allocate(self) -> None:
        super()._allocate()
        self.again: Again = _other  # what is bound writes to the memory before

    def append_heads(self, k: Any, v: Any) -> None:
        """`append` of (batch, H, T, D) tokens, after which `again` takes tokens like these, if torch can tell them.

        Raises:
            As `append`.
        """
        self.append(0, k, v, layout="head_major")
        self.again = self._like_the_last()

    def _like_the_last(self) -> Again:
        """An `again` for tokens of the forms just appended. It holds no reference to the store, which holds it."""
        operation = "KVCacheStore.append"
        test = last_test(operation)
        if test is None:
            return _other
        same, address, key = test
        plan = self._appends.get((0, key, "head_major"))
        if plan is None:
            return _other
        layer, tokens, slots, live = self._layers[0], plan.tokens, self.capacity, self.runtime
        lock, put, launch = plan.bound.lock, plan.put, plan.bound.launcher()
        position, front, program = self._position, live.front, live.program

        def again(k: Any, v: Any, room: int) -> int:
            length = layer.length
            end = length + tokens
            if not same(k, v) or end > room or end > slots:
                return 0
            if front.prog is not program:  # `require_alive`, whose call takes its time
                require_alive(live, operation)
            pointers = (address(k), address(v))
            with lock:
                if pointers != plan.pointers:
                    if not plan.is_aligned(pointers):
                        return 0
                    plan.rebind(operation, pointers)
                put(position, length)
                launch()
                layer.length = end
            return end

        return again

    def make_room(self, *, capacity: int, drop: int = 0) -> None:
        """Forget the ``drop`` oldest tokens, move the others to the front, and have ``capacity`` slots.

        Raises:
            PositionError: fewer than ``drop`` tokens are held.
            CapacityError: the tokens kept do not fit, or the layer would be larger than a launch can address.

        Cost: nothing if nothing changes; else one launch or two per array. With another capacity memory is allocated
            anew, and arrays handed out before keep the old.
        """
        operation = "LayerStore.make_room"
        require_alive(self.runtime, operation)
        layer = self._layers[0]
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
        kept = [a.moved((*a.shape[:2], keep, *a.shape[3:]), a.strides, drop * a.strides[2]) for a in self._arrays()]
        if capacity == self.capacity:
            taken = []
            for a in kept:
                taken.append(new_array(a.shape, a.dtype, self.runtime))
                self._move_slots(a, taken[-1], keep, self.batch_size, None)
            kept = taken
        else:
            before, self.capacity = self.capacity, capacity
            layer.slots = capacity
            try:
                self._allocate()
            except Exception:
                self.capacity = layer.slots = before
                raise
            self._appends.clear()
        for a, b in zip(kept, self._arrays(), strict=True):
            self._move_slots(a, b, keep, self.batch_size, None)
        layer.length = keep
        self.origin += drop

    def recount(self, *, length: int, origin: int) -> None:
        """Say how many tokens are held, and the position of the first, after another wrote or moved them."""
        self._layers[0].length = length
        self.origin = origin

    def _arrays(self) -> list[ArrayView]:
        layer = self._layers[0]
        return [a for a in (layer.k, layer.v, layer.k_scale, layer.v_scale) if a is not None]

    def decoded(self, first: int) -> tuple[CacheArray, CacheArray]:
        """A copy of the tokens from slot ``first`` on, K (batch, H, n, D) and V (batch, H, n, D_v); int8 as float32.

        Cost: one launch, each row read and written once.
        """
        layer = self._layer(0, "LayerStore.decoded")
        first = checks.integer(first, "first", "LayerStore.decoded", high=layer.length)
        before = layer.valid_from
        layer.valid_from = first
        try:
            return self.tokens(0)
        finally:
            layer.valid_from = before

    def reset(self) -> None:
        """Forget all tokens; the next one is at position 0. The memory stays, with what was in it."""
        super().reset()
        self.origin = 0

    def twin(self) -> LayerStore:
        """A copy of this layer in memory of its own, from which it can continue on its own."""
        found = LayerStore(
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            capacity=self.capacity,
            batch_size=self.batch_size,
            dtype=self.dtype,
            head_dim_v=self.head_dim_v,
            scale_dtype=self.scale_dtype,
        )
        found.restore(self.snapshot())
        found.origin = self.origin
        return found
