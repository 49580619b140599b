"""HostLayers: layers in the host's memory, with copies on the device of the few that are in use.

The memory of the host is page-locked: kernels of the device write new tokens directly to it, and read it for operations
that read a layer once. Attention reads a copy on the device, see `residents`. So the host always has all that is held,
and a copy may be dropped whenever updating it would cost more.
"""

from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from tikv import runtime
from tikv.arrays import Array, CacheArray, Views, view_all
from tikv.ops.attention.request import AttendRequest
from tikv.ops.rotate import Rope
from tikv.runtime.interrupts import uninterrupted
from tikv.stores.draft import Draft
from tikv.stores.layers.append import ROWS
from tikv.stores.layers.counts import Layer
from tikv.stores.layers.residents import Frame, Residents, Transfer, refuse_capture, transfer_of
from tikv.stores.layers.storage import LayerStorage, StoreConfig, Triple


class HostLayers(LayerStorage):
    """Layers in memory of the host, see the module.

    Args:
        config: the store's configuration.
        whole: the layers, made with ``place="host"``, in the storage that serves the store's dtype.
        transfer: makes the object that copies to a frame.

    Attributes:
        whole: as given.
        residents: copies of some layers, by the layers' window.
    """

    title = "a store in the host's memory"
    remedy = "Use place='device'."
    place = "host"

    def __init__(
        self, config: StoreConfig, whole: LayerStorage, transfer: Callable[[runtime.Runtime], Transfer] = transfer_of
    ) -> None:
        self.config, self.whole, self._transfer = config, whole, transfer
        self.runtime, self.lock, self.counts = whole.runtime, whole.lock, whole.counts
        self.memory, self.rows = whole.memory, whole.rows
        self.residents = self._new_residents(whole.batch_size)

    @classmethod
    def serves(cls, dtype: Any) -> bool:
        """False for every dtype: `whole` serves them."""
        return False

    def _new_residents(self, batch_size: int) -> dict[int | None, Residents[Frame]]:
        """Empty frames for layers of each window."""
        residents = {}
        for window in dict.fromkeys(self.config.windows):
            layers = [i for i, w in enumerate(self.config.windows) if w == window]
            of_one = self.config._replace(num_layers=1, batch_size=batch_size, windows=(window,), place="device")
            frames = []
            for _ in range(min(self.config.resident_layers, len(layers))):
                content = type(self.whole)(self.runtime, of_one)
                content.counts[0].is_copy = True
                forms = [[a.shape for a, _ in x.filled(i)] for x, i in ((content, 0), (self.whole, layers[0]))]
                assert batch_size != self.batch_size or forms[0] == forms[1], "a copy has the layout of its layer"
                frames.append(Frame(content, self._transfer(self.runtime)))
            residents[window] = Residents(layers, len(self.config.windows), frames)
        return residents

    def __deepcopy__(self, memo: dict[int, Any]) -> HostLayers:
        return HostLayers(self.config, copy.deepcopy(self.whole, memo), self._transfer)

    # --- its form

    @property
    def resident_layers(self) -> int:
        return sum(len(residents.frames) for residents in self.residents.values())

    @property
    def resident_nbytes(self) -> int:
        return sum(frame.content.nbytes for residents in self.residents.values() for frame in residents.frames)

    @property
    def nbytes(self) -> int:
        return self.whole.nbytes

    def described(self, config: StoreConfig) -> str:
        return self.whole.described(config)

    @property
    def drawn(self) -> list[Layer]:
        return self.whole.drawn

    def check_drawn_mass(self, operation: str) -> None:
        self.whole.check_drawn_mass(operation)

    def quantised(self, operation: str, layer: int) -> int:
        return self.whole.quantised(operation, layer)

    # --- copies on the device

    def _of(self, layer: int) -> Residents[Frame]:
        return self.residents[self.config.windows[layer]]

    def _fetch(self, layer: int, frame: Frame) -> None:
        """Start the copy of a layer's filled slots."""
        copies = [to for to, _ in frame.content.filled(0)]
        filled = self.whole.filled(layer)
        frame.transfer.start([(a, to, count) for (a, count), to in zip(filled, copies, strict=True)])

    def _bring(self, operation: str, layer: int) -> Frame:
        """The frame of a layer, for launches from now on; the next layer is being copied."""
        refuse_capture(self.runtime, operation)
        batches = {frame.content.batch_size for residents in self.residents.values() for frame in residents.frames}
        if batches != {self.batch_size}:
            self.residents = self._new_residents(self.batch_size)
        frame = self._of(layer).bring(layer, self._fetch)
        for residents in self.residents.values():
            residents.bring_next(layer, self._fetch)
        self._ready(layer, frame)
        return frame

    def _ready(self, layer: int, frame: Frame) -> None:
        """Make the next launches wait for a frame, and give it the layer's counts."""
        frame.transfer.wait()
        frame.content.count_as(0, self.whole, layer)

    @contextlib.contextmanager
    def _on_host(self) -> Iterator[None]:
        """As `Residents.on_host`, for all layers."""
        with contextlib.ExitStack() as stack:
            for residents in self.residents.values():
                stack.enter_context(residents.on_host())
            yield

    # --- writes

    @uninterrupted
    def append(self, operation: str, layer: int, rows: Views, layout: str) -> None:
        """As `LayerStorage.append`, to the host and to the copy, if there is one."""
        refuse_capture(self.runtime, operation)
        frame = self._of(layer).frame_of(layer)
        if frame is None:
            self.whole.append(operation, layer, rows, layout)
            return
        self._ready(layer, frame)
        with self._of(layer).writing(layer, frame):
            frame.content.append(operation, 0, rows, layout)
            self.whole.append(operation, layer, rows, layout)

    @uninterrupted
    def append_all(self, operation: str, rows: Views, layout: str) -> None:
        """As `LayerStorage.append_all`, to the host; copies are made again."""
        refuse_capture(self.runtime, operation)
        with self._on_host():
            self.whole.append_all(operation, rows, layout)

    # --- reads

    def attend(self, operation: str, layer: int, q: Array, request: AttendRequest) -> Any:
        """As `LayerStorage.attend`, over the copy on the device.

        Raises:
            OptionError: ``seq_lens`` are given, so that the host does not know what is to be copied.
        """
        request.refuse(operation, ("seq_lens",), f"{self.title} does not support", "Leave it out.")
        frame = self._bring(operation, layer)
        try:
            return frame.content.attend(operation, 0, q, request)
        finally:
            frame.transfer.used()

    def extend(self, operation: str, layer: int, arrays: Triple, request: AttendRequest) -> Any:
        """As `LayerStorage.extend`, over the copy; new tokens go to the host as well."""
        frame = self._bring(operation, layer)
        if not request.keep:
            try:
                return frame.content.extend(operation, 0, arrays, request)
            finally:
                frame.transfer.used()
        with self.whole.attempted(operation, layer), self._of(layer).writing(layer, frame):
            result = frame.content.extend(operation, 0, arrays, request)
            rows = view_all(arrays[1:], ROWS, operation)
            self._append_to_host(operation, layer, rows, request.layout)
            return result

    @uninterrupted
    def _append_to_host(self, operation: str, layer: int, rows: Views, layout: str) -> None:
        self.whole.append(operation, layer, rows, layout)

    def rewrite(self, operation: str, layer: int, start: int, rows: Views, layout: str) -> None:
        """As `LayerStorage.rewrite`, on the host; copies are made again."""
        refuse_capture(self.runtime, operation)
        with self._on_host():
            self.whole.rewrite(operation, layer, start, rows, layout)

    def tokens(self, operation: str, layer: int) -> tuple[CacheArray, CacheArray]:
        """As `LayerStorage.tokens`, from the host to the device."""
        return self.whole.tokens(operation, layer)

    # --- dropping and changing tokens

    def refuse_align(self, operation: str, length: int) -> None:
        self.whole.refuse_align(operation, length)

    def trim(self, operation: str, n: int) -> None:
        self.whole.trim(operation, n)

    def reset(self) -> None:
        self.whole.reset()

    def compact(self, operation: str, keeps: Mapping[int, Any], rope: Rope | None, merge: Any = None) -> None:
        with self._on_host():
            self.whole.compact(operation, keeps, rope, merge)

    def commit(self, operation: str, path: Any, drafted: int | None, draft: Draft) -> None:
        with self._on_host():
            self.whole.commit(operation, path, drafted, draft)

    def reorder(self, operation: str, index: Array) -> None:
        with self._on_host():
            self.whole.reorder(operation, index)

    def select(self, operation: str, index: Array) -> None:
        batch = len(self.memory.sequences_of(operation, index))
        copies = self.residents if batch == self.batch_size else self._new_residents(batch)
        with self._on_host():
            self.whole.select(operation, index)
            self.residents = copies

    # --- copies and files

    @property
    def captures(self) -> type[LayerStorage]:
        return self.whole.captures

    def capture(self) -> Any:
        return self.whole.capture()

    def restore(self, operation: str, captured: Any, shown: tuple[str, str]) -> None:
        with self._on_host():
            self.whole.restore(operation, captured, shown)

    def to_host(self, operation: str) -> list[tuple[Layer, list[np.ndarray[Any, Any]]]]:
        return self.whole.to_host(operation)

    def take_over(self, operation: str, counts: Sequence[Sequence[int]], arrays: Sequence[Sequence[Any]]) -> None:
        with self._on_host():
            self.whole.take_over(operation, counts, arrays)

    def save(self, path: str | os.PathLike[str], config: StoreConfig, operation: str) -> None:
        self.whole.save(path, config, operation)
