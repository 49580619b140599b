"""Layers of a `TikvCache` whose older tokens become codes in groups, and whose newest do not."""

from __future__ import annotations

from typing import Any

from tikv import dtypes
from tikv.arrays import Array, runtime_of
from tikv.formats import TileFormat
from tikv.integrations.transformers.layers.layer import TikvLayer
from tikv.ops.attention.request import AttendRequest
from tikv.stores.layers.growing_groups import GrowingGroups
from tikv.stores.layers.token_group_form import TokenGroupForm


class GroupsMemory:
    """The memory of `GrowingGroups` where a `TorchMemory` is expected: only the storage itself can read it."""

    k = v = slots = None
    as_stored = False

    def __init__(self, store: GrowingGroups, dtype: Any, name: str) -> None:
        self._store, self._dtype = store, dtypes.parse(dtype, name)
        self.shape = store.batch_size, store._layers.config.num_kv_heads
        self.widths = store.rows.widths
        self.device = store.newest_keys.torch().device

    def read(self, first: int, end: int) -> tuple[Any, Any]:
        """A copy of slots first..end, the last one held, in the model's dtype."""
        k, v = (a.torch(wait=False) for a in self._store.decoded(first, self._dtype))
        return k, v

    def holds(self, tensor: Array) -> bool:
        """Whether a tensor is in the memory: never."""
        return False

    def stored(self, first: int, end: int) -> None:
        """None, since only the storage can read it."""

    def slots_from(self, first: int, end: int) -> None:
        """None, as `stored`."""

    def attend(self, first: int, query: Array, request: AttendRequest) -> Any:
        """Attention of the newest token's queries over the tokens from slot `first` on, in place."""
        return self._store.attend(query, request, first)


class GroupsLayer(TikvLayer):
    """`TikvLayer` of a cache with ``dtype=tikv.Quant(axis="tokens")``, with KVarN's tiles, or with recent tokens.

    Older tokens are codes, the newest are not. As with any format, several new tokens see what is stored after they
    were appended; with tiles, they see each other unquantised. A decoded token reads what is stored, by
    `GroupsMemory.attend`, if attention is "tikv". Full and sliding layers work alike: a window drops whole groups.
    """

    keeps_rows = False  # rows become codes later

    def _new_store(self, **form: Any) -> Any:
        for name in ("k_scale", "v_scale", "dtype"):
            form.pop(name, None)
        form["v_dtype"] = self._v_dtype
        quant: Any = self.storage.quant
        row_dtype = dtypes.parse(self.dtype, self._name)
        return GrowingGroups(quant=quant, row_dtype=row_dtype, sinks=self.first_tokens, **form)

    @property
    def first_tokens(self) -> int:
        """How many first tokens never become codes; a sliding layer drops them."""
        return 0 if self.is_sliding else self.storage.sinks

    @property
    def _v_dtype(self) -> Any:
        """The format of values; None for that of the storage's `quant`."""
        alike = self.storage.v is self.storage.k or isinstance(self.storage.quant, TileFormat)
        return None if alike else self.storage.v

    def update(self, key_states: Array, value_states: Array, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """As `TikvLayer.update`; with tiles, several new tokens are returned unquantised."""
        keys, values = super().update(key_states, value_states, *args, **kwargs)
        tokens = key_states.shape[2]
        if tokens > 1 and isinstance(self.storage.quant, TileFormat) and not (keys.requires_grad or self.on_device):
            keys[:, :, -tokens:], values[:, :, -tokens:] = key_states, value_states  # copies that nobody else has
        return keys, values

    def form_of(self, operation: str, num_kv_heads: int, dtype: str, **widths: int) -> TokenGroupForm:
        """How a layer with these heads and a model's dtype keeps its rows."""
        rows = {"dtype": self.storage.quant, "v_dtype": self._v_dtype, **widths}
        return TokenGroupForm.checked(operation, runtime_of(), num_kv_heads, rows, dtype)

    def _new_memory(self, store: Any) -> Any:
        return GroupsMemory(store, self.dtype, self._name)

    def _cropped_to(self, tokens_to_remove: int) -> int:
        target = super()._cropped_to(tokens_to_remove)
        store: Any = self.store
        if store is not None:
            store.refuse_trim(self.get_seq_length() - target)
        return target
