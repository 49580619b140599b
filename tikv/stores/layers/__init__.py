"""Where the layers of a `KVCacheStore` lie: `storage` says what each way to store them does, `STORAGES` lists them.

`contiguous` serves all dtypes but groups along tokens, which `token_groups` serves. `memory` and `counts` are what a
layer of slots is, `append`, `attend`, `extend`, `compaction` and `drafts` what is done with it, `summaries` what is
known of pages of its keys; `growing` is one such layer with room that changes.
"""

from __future__ import annotations

from typing import Any

from tikv.stores.layers.contiguous import ContiguousLayers
from tikv.stores.layers.storage import LayerStorage, StoreConfig
from tikv.stores.layers.token_groups import TokenGroupLayers

STORAGES: list[type[LayerStorage]] = [TokenGroupLayers, ContiguousLayers]  # the first that serves a dtype has it


def storage_for(dtype: Any, config: StoreConfig) -> type[LayerStorage]:
    """The storage of a store with this ``dtype=`` and configuration, or OptionError."""
    found = next(storage for storage in STORAGES if storage.serves(dtype))
    found.check_summaries("KVCacheStore", config)
    return found


def saved_as(kind: str) -> type[LayerStorage]:
    """The storage that wrote a file of this kind; that of plain stores, which refuses it, where none did."""
    return next((storage for storage in STORAGES if storage.file_kind == kind), ContiguousLayers)
