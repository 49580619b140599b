"""Turn described ends into a bound launch of the copy kernel: words, codec, lanes and the form of the loop.

An operation says where rows lie (`End`, in elements) and which placement each end has; everything that depends on
alignment, dtype pair and arch is decided here, once, for all operations.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from tikv import dtypes, launch, runtime
from tikv.arrays import ArrayView, Memory, StagedNdarray, Views, describe, host_bytes, read_host, write_host
from tikv.dtypes import DType
from tikv.errors import ShapeError
from tikv.ops import checks

MAX_PLANS = 4096  # bound launches that a cache keeps; shapes that never come back must not pile up
INDEXED = ("ragged", "slots", "table", "group", "layers")  # placements that read an index array
WORDS_IN_FLIGHT = 4  # words that a GPU thread reads before it writes: fewer leave memory waiting, more crowd it
SERIAL_BYTES = 1 << 19  # on CPU, below this the calling thread is done before another one is awake


class End(NamedTuple):
    """One end of one stream: an array and its strides in elements; `inner` cuts a row into (chunk, stride) elements."""

    array: ArrayView
    group: int = 0
    step: int = 0
    head: int = 0
    first: int = 0
    block: int = 0
    inner: tuple[int, int] = (0, 0)


class Placement(NamedTuple):
    """Which slot a token goes to at one end (see `kernels.address`), and the page length where there are pages."""

    kind: str = "linear"
    page: int = 0


@functools.cache
def _kernels() -> Any:
    """The kernel modules, imported with Taichi on first use."""
    return (
        importlib.import_module("tikv.kernels.copy"),
        importlib.import_module("tikv.kernels.codec"),
        importlib.import_module("tikv.kernels.address"),
    )


def entry_of(name: str) -> int:
    """The place of an entry in the vector of placements that a bound copy takes."""
    return int(getattr(_kernels()[2].W, name))


def reduced_position(position: int, sinks: int, ring: int) -> int:
    """The smallest position in the same slot as an absolute one, which fits 32 bits however long the sequence is."""
    return position if ring == 0 or position < sinks else sinks + (position - sinks) % ring


def alignment(end: End, width: int) -> int:
    """The largest power of two, in bytes up to 8, that divides every address at which a row or chunk may start."""
    array, itemsize = end.array, end.array.dtype.itemsize
    chunk, chunk_stride = end.inner
    offsets = [end.group, end.step, end.head, end.first, end.block, chunk_stride, chunk or width]
    common = math.gcd(8, array.ptr or 0, array.offset, *(n * itemsize for n in offsets))
    return common & -common if common else 8


def unaligned(operation: str, src: End, dst: End) -> ShapeError:
    """What to say where elements would be converted that do not lie at multiples of their size."""
    array = next(e.array for e in (src, dst) if ((e.array.ptr or 0) + e.array.offset) % e.array.dtype.itemsize)
    return ShapeError(
        f"{operation}: an array, {describe(array)}, lies at address {array.ptr + array.offset:#x}, no multiple of its "
        f"{array.dtype.itemsize}-byte elements, which are converted. Pass an aligned copy: numpy.array(...)."
    )


def choose_codec(operation: str, style: str, src: End, dst: End, width: int, scale: str) -> tuple[int, Any]:
    """(units in a row, codec) for one stream: the widest words that alignment allows; whole words when casting.

    On CPU words are of 32 bits at most and a unit is one element when casting, which is what LLVM vectorises.

    Raises:
        ShapeError: elements that must be converted do not lie at multiples of their size.
    """
    codec = _kernels()[1].Codec
    src_align, dst_align = alignment(src, width), alignment(dst, width)
    s, d = src.array.dtype, dst.array.dtype
    if s is d and not scale:
        word = math.gcd(src_align, dst_align, 4 if style == "cpu" else 8)
        return width * s.itemsize // word, codec("raw", "raw", 0, word * 8, word * 8)
    for elements in (1,) if style == "cpu" else (4, 2, 1):
        src_word, dst_word = min(8, elements * s.itemsize), min(8, elements * d.itemsize)
        chunks_whole = all(chunk % elements == 0 for chunk in (src.inner[0] or elements, dst.inner[0] or elements))
        if width % elements == 0 and src_align % src_word == 0 and dst_align % dst_word == 0 and chunks_whole:
            return width // elements, codec(s.short, d.short, elements, src_word * 8, dst_word * 8)
    raise unaligned(operation, src, dst)


def choose_lanes(streams: Sequence[Any], cooperative: bool) -> int:
    """Threads of a GPU that share a row: as few as leave each `WORDS_IN_FLIGHT` to read before it writes.

    Rows whose threads agree on a scale take a power of two, which divides a block.
    """
    units = max(s.units for s in streams)
    rounds = max(1, WORDS_IN_FLIGHT // sum(s.codec.src_words for s in streams))
    lanes = min(32, -(-units // rounds))
    return int(1 << (lanes - 1).bit_length()) if cooperative else lanes


def bind_copy(
    live: runtime.Runtime,
    operation: str,
    *,
    src: Sequence[End],
    dst: Sequence[End],
    widths: Sequence[int],
    heads: int,
    tokens: int,
    groups: int = 1,
    src_place: Placement = Placement(),
    dst_place: Placement = Placement(),
    index: ArrayView | None = None,
    scales: Sequence[ArrayView] = (),
    scale: DType | None = None,
    **which: Any,
) -> launch.Bound:
    """Bind the copy of `groups` x `tokens` x `heads` rows, of K or of K and V.

    Args:
        live: the runtime.
        operation: for messages.
        src, dst: an `End` each for K, or for K and V. On CPU a launch is cheaper whose two ends `dst` are of one array.
        widths: elements in a row of each stream.
        heads, tokens, groups: extents; none is zero.
        src_place, dst_place: placements of the two ends.
        index: the index array of a placement that has one.
        scales: the scale array of each stream of an int8 copy that (de)quantises, with `scale` its dtype.
        **which: entries of `kernels.address.Which` by name.

    Raises:
        CapacityError: an array or the launch is larger than 32-bit indices reach.
    """
    copy, _, address = _kernels()
    style = live.kernel_style
    scale_code = scale.short if scale is not None else ""
    streams, wheres = [], []
    for k_or_v, (a, b, width) in enumerate(zip(src, dst, widths, strict=True)):
        units, codec = choose_codec(operation, style, a, b, width, scale_code)
        streams.append(copy.Stream(units, codec))
        for end, bits in ((a, codec.src_bits), (b, codec.dst_bits)):
            checks.addressable(end.array, bits // 8, live, "kv"[k_or_v], operation)
            wheres.append(words_of(end, bits // 8))
    if len(streams) == 1:
        wheres += wheres
    cooperative = style != "cpu" and any(s.codec.dst == "i8" and s.codec.src != "raw" for s in streams)
    lanes = 1 if style == "cpu" else choose_lanes(streams, cooperative)
    cpu = style == "cpu"
    iterations = groups * tokens * (len(streams) if cpu else heads * lanes)  # on CPU a token of one stream, else a unit
    if cooperative:
        block = importlib.import_module("tikv.kernels.lanes").BLOCK
        iterations = -(-iterations // block) * block
    checks.countable(iterations, operation)
    moved = groups * tokens * heads * sum(w * (a.array.dtype.itemsize) for a, w in zip(src, widths, strict=True))
    sides = [
        copy.Side(place.kind, place.page, *(inner_words(e, bits) for e, bits in zip(ends, words, strict=True)))
        for place, ends, words in (
            (src_place, (src[0], src[-1]), (streams[0].codec.src_bits, streams[-1].codec.src_bits)),
            (dst_place, (dst[0], dst[-1]), (streams[0].codec.dst_bits, streams[-1].codec.dst_bits)),
        )
    ]
    plain = index is None and not scale_code
    joint = cpu and plain and len(dst) == 2 and dst[0].array is dst[1].array
    joint = joint and streams[0].codec.dst_bits == streams[1].codec.dst_bits
    kernel = launch.kernel(
        live,
        copy.make_copy,
        style,
        cpu and moved < SERIAL_BYTES,
        heads,
        groups > 1,
        tuple(s._replace(units=0) for s in streams) if cpu else tuple(streams),  # known at run time on CPU
        *sides,
        lanes,
        0 if index is None else index.dtype.itemsize * 8,
        scale_code,
        joint,
    )
    arrays = [src[0].array, dst[0].array, src[-1].array, *([] if joint else [dst[-1].array])]
    if not plain:
        filler = index if index is not None else scales[0]
        arrays += [filler, scales[0] if scales else filler, scales[-1] if scales else filler]
        for position, place in (("src_index", src_place), ("dst_index", dst_place)):
            if index is not None and place.kind in INDEXED:
                which[position] = which.get(position, 0) + index.offset // index.dtype.itemsize
        for name, array in zip(("k_scale", "v_scale"), scales, strict=False):
            which[name] = which.get(name, 0) + array.offset // array.dtype.itemsize
    which.update(k_units=streams[0].units, v_units=streams[-1].units)
    numbers = address.Which(iterations=iterations, groups=groups, tokens=tokens, **which)
    strides = tuple(n for where in wheres for n in where)
    return kernel.bind(iterations, *arrays, *([(*numbers, *strides)] if cpu else [strides, tuple(numbers)]))


def words_of(end: End, word_bytes: int) -> tuple[int, ...]:
    """An end's strides in words, in the order of `kernels.address.Where`."""
    itemsize = end.array.dtype.itemsize
    offset = end.array.offset // word_bytes
    group, block, step, head, first = (
        n * itemsize // word_bytes for n in (end.group, end.block, end.step, end.head, end.first)
    )
    return group, block, step, head, first + offset


def inner_words(end: End, bits: int) -> tuple[int, int]:
    """How an end's rows are cut, in words of that many bits."""
    itemsize = end.array.dtype.itemsize
    return end.inner[0] * itemsize * 8 // bits, end.inner[1] * itemsize * 8 // bits


class Held:
    """Owner of an array on a device whose values the host knows as well; else like the owner that it stands for."""

    __slots__ = ("holds", "on_host")

    def __init__(self, holds: Any, on_host: ArrayView | np.ndarray[Any, Any] | None) -> None:
        self.holds = holds
        self.on_host = on_host

    def __getattr__(self, name: str) -> Any:
        return getattr(self.holds, name)


class Staging:
    """Host arrays on a device for the length of a call; nothing on CPU, where the kernels see them.

    Arrays whose bytes overlap share one device block, so what is written to one is not undone by the other's way back.
    """

    def __init__(self, live: runtime.Runtime, arrays: Sequence[ArrayView], written: Sequence[bool]) -> None:
        self.arrays = list(arrays)
        self._live = live
        self._back: list[tuple[Memory, int, int]] = []
        owners = [a.owner for a, w in zip(arrays, written, strict=True) if w]
        self._write_back = [owner for owner in owners if isinstance(owner, StagedNdarray)]
        if live.is_cpu:
            return
        hosted = sorted((a.ptr, a.ptr + a.span, i) for i, a in enumerate(arrays) if a.device == "cpu" and a.span)
        if hosted:
            launch.refuse_baked(live, "launch", "what an array on the host holds now")
        merged: list[tuple[int, int, list[int]]] = []
        for start, end, i in hosted:
            if merged and start < merged[-1][1]:
                merged[-1] = (merged[-1][0], max(end, merged[-1][1]), [*merged[-1][2], i])
            else:
                merged.append((start, end, [i]))
        for start, end, members in merged:
            base = start // 8 * 8  # keeps every word aligned as it was
            memory = Memory(end - base, live)
            raw = np.zeros(end - base, np.int8)
            raw[start - base :] = host_bytes(start, end - start).view(np.int8)
            write_host(raw, memory.array(raw.shape, dtypes.int8))
            for i in members:
                a = arrays[i]
                first = memory.array((1,), a.dtype, a.ptr - base)
                self.arrays[i] = ArrayView(
                    first.ptr,
                    a.shape,
                    a.strides,
                    a.dtype,
                    first.device,
                    handle=first.handle,
                    offset=first.offset,
                    owner=Held(memory, a),
                )
            if any(written[i] for i in members):
                self._back.append((memory, start, end))

    def finish(self) -> None:
        """Bring what was written back to the host."""
        for memory, start, end in self._back:
            base = start // 8 * 8
            found = read_host(memory.array((end - base,), dtypes.int8), self._live)[start - base :]
            ctypes.memmove(start, found.ctypes.data, end - start)
        for staged in self._write_back:
            staged.write_back()


class CopyCall:
    """A copy whose arrays have been checked: bound at its first run, later given addresses only.

    `bind` makes the launch from arrays like those that were checked; None: there is nothing to move. Nothing of the
    caller's is kept alive. Where a device cannot see the host's arrays they are staged, and each run binds anew.

    Args:
        live: the runtime.
        names: of the arrays that `run` takes, for messages.
        written: which of them are destinations.
        bind: a launch over the arrays it is given.
        chosen: which of the arrays each array argument of the kernel is.
    """

    __slots__ = ("bind", "bound", "chosen", "live", "names", "pointers", "put", "written")

    def __init__(
        self,
        live: runtime.Runtime,
        names: Sequence[str],
        written: Sequence[bool],
        bind: Callable[[Sequence[ArrayView]], launch.Bound] | None,
        chosen: Sequence[int] = (),
    ) -> None:
        self.live = live
        self.names = names
        self.written = written
        self.bind = bind
        self.chosen = chosen
        self.bound: launch.Bound | None = None
        self.put: Callable[[int, int], None]  # into the vector of placements of `bound`
        self.pointers: tuple[int, ...] | None = None

    def run(self, operation: str, arrays: Sequence[ArrayView], entry: int = 0, value: Any = 0) -> None:
        """Launch over these arrays, with `value` in entry `entry` of the vector of placements unless that is 0.

        Raises:
            ShapeError: a destination overlaps another array.
        """
        if self.bind is None:
            return
        pointers = arrays.pointers if type(arrays) is Views else tuple([a.ptr for a in arrays])
        bound = self.bound
        if bound is None:
            if not self.live.is_cpu and any(a.device == "cpu" for a in arrays):
                self._disjoint(operation, arrays)
                self._run_staged(arrays, entry, value)
                return
            with self.live.lock:  # threads that come first together bind once
                bound = self.bound
                if bound is None:
                    self._disjoint(operation, arrays)
                    bound = self.bind(arrays)
                    self.pointers = pointers
                    self.put = bound.setter(len(bound.arguments) - 1)
                    self.bound = bound
        with bound.lock:
            if pointers != self.pointers:
                self._disjoint(operation, arrays)
                for i, j in enumerate(self.chosen):
                    bound.set_array(i, arrays[j])
                self.pointers = pointers
            if entry:
                self._enter(self.put, entry, value)
            bound.launch()
            if self.live.is_spirv and 0 in pointers:
                bound.release()
                self.pointers = None

    def _run_staged(self, arrays: Sequence[ArrayView], entry: int, value: Any) -> None:
        assert self.bind is not None
        stage = Staging(self.live, arrays, self.written)
        bound = self.bind(stage.arrays)
        if entry:
            self._enter(bound.setter(len(bound.arguments) - 1), entry, value)
        bound.launch()
        stage.finish()

    def _enter(self, put: Callable[[int, int], None], entry: int, value: Any) -> None:
        """Put what a run brings into the vector of placements."""
        put(entry, value)

    def _disjoint(self, operation: str, arrays: Sequence[ArrayView]) -> None:
        checks.disjoint(list(zip(self.names, arrays, self.written, strict=True)), operation)


def keep_plan(live: runtime.Runtime, key: tuple[Any, ...], plan: Any) -> Any:
    """Keep the plan of a one-shot call for later ones with the same key; returns it."""
    return live.plans.keep(key, plan)
