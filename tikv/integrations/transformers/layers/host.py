"""Layers of a `TikvCache` in the host's memory, whose keys and values a model reads in a copy on the device."""

from __future__ import annotations

import copy
from typing import Any

from torch.compiler import is_dynamo_compiling as _is_traced

from tikv.arrays import Array, runtime_of
from tikv.integrations.transformers.layers import traced
from tikv.integrations.transformers.layers.layer import TikvLayer
from tikv.integrations.transformers.memory.storage import Storage
from tikv.integrations.transformers.names import CACHE
from tikv.stores.layers.growing import GrowingLayer
from tikv.stores.layers.hosted import HostedLayer, Places


class HostLayer(TikvLayer):
    """`TikvLayer` of a cache with ``place="host"``; a plain one if the device computes in the host's memory.

    `update` returns a view of the copy. As long as that view is referenced, the copy does not change.

    Args:
        index, window, max_cache_len, dtype, config: as in `TikvLayer`.
        places: where the copies of the cache's layers are.
    """

    def __init__(
        self, index: int, window: int | None, max_cache_len: int | None, dtype: Storage, config: Any, places: Places
    ) -> None:
        self._places = places
        self._content: GrowingLayer | None = None  # the copy that is attached
        super().__init__(index, window, max_cache_len, dtype, config)

    @property
    def is_hosted(self) -> bool:
        """Whether it is in the host's memory while the device computes elsewhere."""
        return isinstance(self._store, HostedLayer)

    def _new_store(self, **form: Any) -> GrowingLayer:
        if self._places.why_plain(runtime_of(), CACHE):
            return GrowingLayer(**form)
        return HostedLayer(self._places, self.index, self._leave, **form)

    def _bring(self, ahead: bool = False) -> None:
        """Attach the copy, which launches from now on may read."""
        store = self._store
        if isinstance(store, HostedLayer) and store.bring(ahead) is not self._content:
            self._attach()

    def _attach(self) -> None:
        super()._attach()
        store = self._store
        self._content = store.bring() if isinstance(store, HostedLayer) else None

    def _leave(self) -> None:
        """Detach the copy, whose memory another layer takes."""
        self._recall()
        self._content = self._memory = None

    def update(self, key_states: Array, value_states: Array, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """As `TikvLayer.update`."""
        if not _is_traced() and not self._staged:
            self._bring(ahead=True)
        return super().update(key_states, value_states)

    def _traced_update(self, key_states: Array, value_states: Array) -> tuple[Any, Any]:
        if not self.is_hosted:
            return super()._traced_update(key_states, value_states)
        return traced.update_outside(self, key_states, value_states)

    def _here(self) -> Any:
        self._bring()
        return self._memory

    def _blank(self) -> TikvLayer:
        return HostLayer(self.index, self.sliding_window, self.limit, self.storage, self.config, self._places)

    def __deepcopy__(self, memo: dict[int, Any]) -> TikvLayer:
        places, self._places = self._places, copy.deepcopy(self._places, memo)  # copies of the layers share new ones
        try:
            return super().__deepcopy__(memo)
        finally:
            self._places = places

    def __repr__(self) -> str:
        words, store = super().__repr__()[:-1], self._store
        if store is None:
            return f"{words}, place='host')"
        why = self._places.why_plain(store.runtime, CACHE)
        return f"{words}, place='host'{f' makes an ordinary layer: {why}' if why else ''})"
