"""How the layers of a `KVCacheStore` are stored: `storage` has the interface of all ways, `STORAGES` lists them.

`contiguous` serves all dtypes except groups along tokens, which `token_groups` serves; `coded_arrays` defines how codes
are laid out, in a pool as in a store. `memory` and `counts` define a layer of slots; `append`, `attend`, `extend`,
`compaction` and `drafts` are the operations on it; `summaries` has the page summaries of its keys, and
`shared_launches` what layers of one form bind together. `growing` is one such layer with room that changes. `host`
keeps any of these storages in the host's memory, and `residents` knows which of its layers the device has.
"""

from __future__ import annotations

from typing import Any

from tikv.runtime import Runtime
from tikv.stores.layers.contiguous import ContiguousLayers
from tikv.stores.layers.host import HostLayers
from tikv.stores.layers.residents import why_plain
from tikv.stores.layers.storage import LayerStorage, StoreConfig
from tikv.stores.layers.token_groups import TokenGroupLayers

STORAGES: list[type[LayerStorage]] = [TokenGroupLayers, ContiguousLayers]  # the first that serves a dtype is used


def new_storage(live: Runtime, config: StoreConfig) -> LayerStorage:
    """A storage of this configuration, or OptionError."""
    kind = next(storage for storage in STORAGES if storage.serves(config.rows["dtype"]))
    kind.check_summaries("KVCacheStore", config)
    if lies_apart(live, config.place):
        HostLayers.check_summaries("KVCacheStore", config)
        return HostLayers(config, kind(live, config))
    return kind(live, config._replace(place="device"))


def loaded_storage(
    kind: str, path: Any, live: Runtime, operation: str, placed: dict[str, Any]
) -> tuple[StoreConfig, LayerStorage]:
    """The configuration and the storage of a store in a file of this kind, placed as `placed` asks."""
    storage_class = next((s for s in STORAGES if s.file_kind == kind), ContiguousLayers)  # which refuses it
    if lies_apart(live, placed["place"]):
        config, storage = storage_class.load(path, live, operation, **placed)
        HostLayers.check_summaries(operation, config)
        return config, HostLayers(config, storage)
    config, storage = storage_class.load(path, live, operation)
    return config._replace(place=placed["place"]), storage


def lies_apart(live: Runtime, place: str) -> bool:
    """Whether layers at this place are outside the memory in which the device computes.

    Raises:
        ArchError: they would be, and this device cannot reach them.
    """
    return place == "host" and not why_plain(live, "KVCacheStore")
