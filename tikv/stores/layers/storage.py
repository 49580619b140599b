"""LayerStorage: how the layers of a `KVCacheStore` are stored. Each way to store them is one class in one file.

A new storage implements the abstract methods, and those of the others that it can: a method that it leaves out raises
an error that names it. `layers.STORAGES` lists which storage serves which dtype.
"""

from __future__ import annotations

import abc
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar, NamedTuple, NoReturn

import numpy as np

from tikv.arrays import Array, ArrayView, CacheArray, Views
from tikv.errors import CapacityError, OptionError, ShapeError
from tikv.formats import TileFormat, parse_aging
from tikv.ops import checks
from tikv.ops.attention.request import AttendRequest
from tikv.ops.rotate import Rope
from tikv.runtime import Runtime
from tikv.stores.draft import Draft
from tikv.stores.layers.attempt import attempt
from tikv.stores.layers.counts import Layer, ends_of
from tikv.stores.layers.memory import LayerMemory
from tikv.stores.locking import StoreLock
from tikv.stores.picture import counted
from tikv.stores.row_format import RowFormats

Triple = tuple[Any, Any, Any]  # q, k and v as a caller gave them
NO_PAGES = "A layer with a window keeps no summaries, because each new token moves all others to another page."
PLACES = ("device", "host")


class StoreConfig(NamedTuple):
    """The checked arguments of a `KVCacheStore`; a storage still has to check those of `RowFormats.checked`."""

    num_layers: int
    num_kv_heads: int
    capacity: int
    batch_size: int
    windows: tuple[int | None, ...]
    sinks: int
    rows: Mapping[str, Any]
    page_summaries: int | None = None
    place: str = "device"  # "host" for the host's memory
    resident_layers: int = 2  # how many layers of each window have a copy on the device, if place is "host"

    @classmethod
    def checked(
        cls,
        operation: str,
        *,
        num_layers: Any,
        num_kv_heads: Any,
        capacity: Any,
        batch_size: Any = 1,
        window: Any = None,
        sinks: Any = 0,
        page_summaries: Any = None,
        place: Any = "device",
        resident_layers: Any = 2,
        **rows: Any,
    ) -> StoreConfig:
        """The configuration that a caller's arguments ask for, or an error that says which is wrong."""
        layers = checks.integer(num_layers, "num_layers", operation, low=1)
        heads = checks.integer(num_kv_heads, "num_kv_heads", operation, low=1)
        capacity = checks.integer(capacity, "capacity", operation, low=1)
        batch_size = checks.integer(batch_size, "batch_size", operation, low=1)
        sinks = checks.integer(sinks, "sinks", operation)
        one_each = isinstance(window, Iterable) and getattr(window, "ndim", 1) != 0
        entries = list(window) if one_each else [window] * layers
        if len(entries) != layers:
            raise ShapeError(
                f"{operation}: window has {len(entries)} entries for num_layers={layers}. Pass one per layer."
            )
        windows = tuple(checks.window_of(w, capacity, operation) for w in entries)
        if sinks and all(w is None for w in windows) and not isinstance(parse_aging(rows.get("dtype")), TileFormat):
            raise OptionError(f"{operation}: sinks={sinks} needs a window, which no layer has. Give one, or sinks=0.")
        for w in windows:
            if w is not None and sinks >= w:
                raise CapacityError(
                    f"{operation}: sinks={sinks} leave no room for other tokens in window={w}. Use sinks < {w}."
                )
        if page_summaries is not None:
            page_summaries = checks.integer(page_summaries, "page_summaries", operation, low=1, high=2**31 - 1)
            if None not in windows:
                raise OptionError(
                    f"{operation}: page_summaries={page_summaries} has no effect, since all layers have windows. "
                    f"{NO_PAGES} Leave it out."
                )
        place = checks.option(place, "place", operation, PLACES)
        resident_layers = checks.integer(resident_layers, "resident_layers", operation, low=1)
        return cls(layers, heads, capacity, batch_size, windows, sinks, rows, page_summaries, place, resident_layers)

    def arguments(self, rows: RowFormats) -> dict[str, Any]:
        """The arguments of a store of this configuration with these rows, in JSON's types."""
        sizes = {name: getattr(self, name) for name in ("num_layers", "num_kv_heads", "capacity", "batch_size")}
        if self.page_summaries is not None:
            sizes["page_summaries"] = self.page_summaries
        return sizes | {"window": list(self.windows), "sinks": self.sinks} | rows.arguments()

    def counts(self) -> list[Layer]:
        """New counts for these layers."""
        return [Layer(i, self.capacity, w, self.sinks) for i, w in enumerate(self.windows)]


class LayerStorage(abc.ABC):
    """The memory of all layers of a store, how tokens get into it, and how attention reads it.

    The store has checked the layer's index and holds `lock` in every call. ``q``, and the arrays of `extend`, are as
    the caller gave them: `view` checks that each is an array. A method raises before it writes if it cannot do what was
    asked. ``operation`` is the name of the caller's function in messages.

    Attributes:
        title: the name of this kind of store in messages.
        remedy: the way out for methods that this kind does not support.
        file_kind: the kind in files, by which `KVCacheStore.load` finds it; empty if it writes none.
        keeps_summaries: whether it serves a configuration with ``page_summaries``.
        counts: the token counts of each layer, from which `length`, `held`, `positions` and pictures follow.
        memory: the memory of all tokens, of this process's tokens, or of the newest.
        rows: how rows are stored, as the store reports it.
        place: where the layers are kept, "device" or "host".
    """

    place: str = "device"
    title: str
    remedy: str = "Use another dtype."
    file_kind: ClassVar[str] = ""
    keeps_summaries: ClassVar[bool] = False

    runtime: Runtime
    lock: StoreLock
    counts: list[Layer]
    memory: LayerMemory
    rows: RowFormats

    @abc.abstractmethod
    def __init__(self, live: Runtime, config: StoreConfig) -> None:
        """Memory for a store of this configuration."""

    @classmethod
    @abc.abstractmethod
    def serves(cls, dtype: Any) -> bool:
        """Whether a store with this ``dtype=`` is one of this kind."""

    @classmethod
    def check_summaries(cls, operation: str, config: StoreConfig) -> None:
        """Raise OptionError if a configuration has page summaries and this kind keeps none."""
        if config.page_summaries is not None and not cls.keeps_summaries:
            raise OptionError(
                f"{operation}: page_summaries={config.page_summaries} is not supported: {cls.title} keeps no summaries "
                f"of pages. Leave it out. {cls.remedy}"
            )

    # --- its form

    @property
    def batch_size(self) -> int:
        """The current number of sequences."""
        return self.memory.batch_size

    @property
    def nbytes(self) -> int:
        """Bytes of all that is stored, filled or not."""
        return self.memory.nbytes

    def described(self, config: StoreConfig) -> str:
        """What is stored, for the `repr` of a store of this configuration."""
        slides = sorted({str(w) for w in config.windows if w is not None})
        kind = "linear" if not slides else f"window {'/'.join(slides)}"
        if slides and None in config.windows:
            kind += " and linear"
        if config.sinks:
            kind += f", {counted(config.sinks, 'sink')}"
        if config.page_summaries is not None:
            kind += f", summaries of {counted(config.page_summaries, 'token')}"
        return f"{self.rows.name}, {kind}"

    @property
    def resident_layers(self) -> int:
        """How many layers the device has memory for."""
        return len(self.counts)

    @property
    def resident_nbytes(self) -> int:
        """Bytes of the device's memory, filled or not."""
        return self.nbytes

    @property
    def drawn(self) -> list[Layer]:
        """The layers that a picture shows."""
        return self.counts

    # --- operations of every storage

    @abc.abstractmethod
    def append(self, operation: str, layer: int, rows: Views, layout: str) -> None:
        """Append K and V to one layer, and count them; `KVCacheStore.append`."""

    @abc.abstractmethod
    def append_all(self, operation: str, rows: Views, layout: str) -> None:
        """Append K and V, stacked, to all layers or to none; `KVCacheStore.append_all`."""

    @abc.abstractmethod
    def attend(self, operation: str, layer: int, q: Array, request: AttendRequest) -> Any:
        """Attention over what a layer holds; `KVCacheStore.attend`."""

    @abc.abstractmethod
    def extend(self, operation: str, layer: int, arrays: Triple, request: AttendRequest) -> Any:
        """Attention over what a layer holds and over new tokens, which are appended; `KVCacheStore.extend`."""

    def rewrite(self, operation: str, layer: int, start: int, rows: Views, layout: str) -> None:
        """Write new rows to the places of the tokens from position `start` on; `KVCacheStore.rewrite`."""
        self._refuse(operation)

    @abc.abstractmethod
    def tokens(self, operation: str, layer: int) -> tuple[CacheArray, CacheArray]:
        """What a layer holds, in temporal order, as a copy; `KVCacheStore.tokens`."""

    @abc.abstractmethod
    def trim(self, operation: str, n: int) -> None:
        """Drop the `n` newest tokens, which exist, of every layer or of none; `KVCacheStore.trim`."""

    def refuse_align(self, operation: str, length: int) -> None:
        """Raise PositionError if a layer that has more tokens cannot go back to this length."""
        for layer in self.counts:
            layer.refuse_align(operation, length)

    def align(self, operation: str, length: int) -> None:
        """Bring every layer back to the length of the shortest, or none of them; `KVCacheStore.align`."""
        self.refuse_align(operation, length)
        self.trim(operation, max(ends_of(self.counts)) - length)

    @abc.abstractmethod
    def reset(self) -> None:
        """Forget all tokens."""

    @property
    def captures(self) -> type[LayerStorage]:
        """The class of storage that `restore` takes `capture`'s copies from; the store refuses those of others."""
        return type(self)

    @abc.abstractmethod
    def capture(self) -> Any:
        """A copy of all that is held, for `restore`."""

    @abc.abstractmethod
    def restore(self, operation: str, captured: Any, shown: tuple[str, str]) -> None:
        """Return to what `capture` copied from a storage of this class, if it has the same form; else raise, unchanged.

        `shown` are the snapshot and the store, for messages.
        """

    # --- operations of some storages

    def save(self, path: str | os.PathLike[str], config: StoreConfig, operation: str) -> None:
        """Write all that is held and all counts to a file, which `load` reads."""
        self._refuse(operation)

    @classmethod
    def load(
        cls, path: str | os.PathLike[str], live: Runtime, operation: str, **placed: Any
    ) -> tuple[StoreConfig, Any]:
        """The configuration of a saved store, placed as `placed` asks, and a storage that holds what it held."""
        raise NotImplementedError  # no file names a kind that saves none

    def append_at(self, operation: str, layer: int | None, arrays: Views, layout: str) -> None:
        """Append K and V to a layer, or to all, at positions that the launch reads; the host's counts do not change."""
        self._refuse(operation)

    def require_positions(self, operation: str, remedy: str) -> None:
        """Raise unless slots follow from positions, which code that counts on the device assumes."""
        self._refuse(operation)

    def advance(self, operation: str, tokens: int) -> None:
        """Count what `append_at` wrote; `KVCacheStore.advance`."""
        self._refuse(operation)

    def layer(self, operation: str, layer: int) -> Layer:
        """The arrays of a layer, in place, for `KVCacheStore.keys`, `values` and `scales`."""
        self._refuse(operation, "Read tokens().")

    def page_summaries(self, operation: str, layer: int) -> tuple[ArrayView, ArrayView]:
        """The least and the greatest of each page of a layer's keys; `KVCacheStore.page_summaries`."""
        self._refuse(operation)

    def compact(self, operation: str, keeps: Mapping[int, Any], rope: Rope | None, merge: Any = None) -> None:
        """Keep some of the tokens of these layers, of one if rows are merged; `KVCacheStore.compact`."""
        self._refuse(operation)

    def commit(self, operation: str, path: Any, drafted: int | None, draft: Draft) -> None:
        """Keep a path of the newest tokens, of which `draft` tells; `KVCacheStore.commit`."""
        self._refuse(operation, "Trim the drafted tokens that were not accepted.")

    def reorder(self, operation: str, index: Array) -> None:
        """Let sequences continue from others; `KVCacheStore.reorder`."""
        self._refuse(operation)

    def select(self, operation: str, index: Array) -> None:
        """Keep some of the sequences, in this order; `KVCacheStore.select`."""
        self._refuse(operation)

    def check_drawn_mass(self, operation: str) -> None:
        """Raise unless attention can return the mass that a picture is to be coloured by."""
        return None

    def quantised(self, operation: str, layer: int) -> int:
        """How many of a layer's oldest tokens are codes; `KVCacheStore.quantised`."""
        self._refuse(operation, "Use dtype=tikv.Quant(axis='tokens').")

    def to_host(self, operation: str) -> list[tuple[Layer, list[np.ndarray[Any, Any]]]]:
        """Each layer's counts and host copies of its filled slots: K, V, and any scales."""
        self._refuse(operation)

    def filled(self, layer: int) -> list[tuple[ArrayView, int]]:
        """All arrays of a layer's tokens, (batch, heads, n, ...), and how many of the n are filled."""
        self._refuse("place='host'")

    def attempted(self, operation: str, layer: int) -> AbstractContextManager[None]:
        """An `attempt` for code that appends to a layer."""
        return attempt(operation, [self.counts[layer]])

    def count_as(self, layer: int, other: Any, index: int) -> None:
        """Give a layer the counts of layer `index` of another storage of this kind, after its arrays were copied."""
        self._refuse("place='host'")

    def take_over(self, operation: str, counts: Sequence[Sequence[int]], arrays: Sequence[Sequence[Any]]) -> None:
        """Hold what `to_host` returned: (length, oldest valid position) and filled slots of each layer."""
        self._refuse(operation)

    def _refuse(self, operation: str, remedy: str = "") -> NoReturn:
        raise OptionError(f"{operation}: {self.title} does not support this. {remedy or self.remedy}")
