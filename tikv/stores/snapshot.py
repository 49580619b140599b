"""What `KVCacheStore.snapshot` returns and `restore` takes."""

from __future__ import annotations

from typing import Any

from tikv import runtime
from tikv.stores.draft import Draft
from tikv.stores.layers.storage import LayerStorage
from tikv.stores.picture import counted


class Snapshot(runtime.NotCopied):
    """What a store held: copies of its filled slots, and its counts. Give it to `KVCacheStore.restore`.

    Nothing changes it, so a copy of it is itself. It is not pickled.
    """

    instead = "Restore it into its store, and save() the store."

    def __init__(self, storage: LayerStorage, num_layers: int, length: int, draft: Draft) -> None:
        self.runtime, self.kind = storage.runtime, storage.captures
        self.captured = storage.capture()
        self.draft = draft
        self._num_layers, self._length = num_layers, length

    def __copy__(self) -> Snapshot:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Snapshot:
        return self

    def __repr__(self) -> str:
        return f"Snapshot({counted(self._num_layers, 'layer')}, length {self._length})"
