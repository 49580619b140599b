"""Layers of a `TikvCache` whose keys are quantised by channel over groups of tokens."""

from __future__ import annotations

from typing import Any

from tikv import dtypes
from tikv.arrays import runtime_of
from tikv.integrations.transformers.layer import TikvLayer
from tikv.integrations.transformers.slots import CacheSlots
from tikv.ops.attention.request import AttendRequest
from tikv.stores.layers.growing_groups import GrowingGroups
from tikv.stores.layers.token_group_form import TokenGroupForm


class GroupsLayer(TikvLayer):
    """`TikvLayer` of a cache with ``dtype=tikv.Quant(axis="tokens")``: older keys are codes, the newest are not.

    As with any format, several new tokens see what is stored after they were appended. A decoded token reads it in
    place, by `attend_stored`, if attention is "tikv". Full and sliding layers work alike: a window drops whole groups.
    """

    def _new_store(self, **form: Any) -> Any:
        for name in ("k_scale", "v_scale", "dtype"):
            form.pop(name, None)
        form["v_dtype"] = self._v_dtype
        quant: Any = self.storage.quant
        return GrowingGroups(quant=quant, row_dtype=dtypes.parse(self.dtype, self._name), **form)

    @property
    def _v_dtype(self) -> Any:
        """The format of values; None for codes like those of keys."""
        return None if self.storage.v is self.storage.k else self.storage.v

    def form_of(self, operation: str, num_kv_heads: int, dtype: str, **widths: int) -> TokenGroupForm:
        """How a layer with these heads and a model's dtype keeps its rows."""
        rows = {"dtype": self.storage.quant, "v_dtype": self._v_dtype, **widths}
        return TokenGroupForm.checked(operation, runtime_of(), num_kv_heads, rows, dtype)

    def _attach(self) -> None:
        """Update what follows from the memory and its room; torch reads none of the memory."""
        store: Any = self._store
        usual = self._usual_room()
        self.has_prompt_room = usual is not None and store.capacity > usual
        self._counted = None
        self.batch_size, self.num_heads = store.batch_size, store._layers.config.num_kv_heads
        self.max_batch_size = self.batch_size
        self.head_dim, self._v_width = store.rows.widths
        self._k = self._v = self._slots = None
        self._scales: list[Any] = []
        self._as_stored = self._whole = False
        self._bound = self._bound_of(store)

    def _device_of(self, store: Any) -> Any:
        return store.newest_keys.torch().device

    def _is_memory(self, tensor: Any) -> bool:
        return False

    def _read(self, first: int, end: int) -> tuple[Any, Any]:
        store: Any = self.store
        k, v = (a.torch(wait=False) for a in store.decoded(first, dtypes.parse(self.dtype, self._name)))
        return k, v

    def _stored(self, first: int, end: int) -> Any:
        return None  # only the layer itself can read it

    def _slots_from(self, first: int, end: int) -> CacheSlots | None:
        return None

    def attend_stored(self, first: int, query: Any, request: AttendRequest) -> Any:
        """Attention of the newest token's queries over the tokens from slot `first` on, in place."""
        store: Any = self.store
        return store.attend(query, request, first)

    def _cropped_to(self, tokens_to_remove: int) -> int:
        target = super()._cropped_to(tokens_to_remove)
        store: Any = self.store
        if store is not None:
            store.refuse_trim(self.get_seq_length() - target)
        return target
