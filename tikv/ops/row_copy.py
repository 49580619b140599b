"""The copy of rows: binds a launch of the copy kernel from where rows lie at both ends.

An operation says where rows lie (`Rows`, in elements) and which placement each end has. This module decides, for all
operations, what depends on alignment, the pair of dtypes and the arch: words, codec, lanes, and form of the loop.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from tikv import launch, runtime
from tikv.arrays import ArrayView, describe
from tikv.errors import ShapeError
from tikv.formats import GROUP_FORMATS, block_of
from tikv.ops import checks
from tikv.ops.layouts import LINEAR, Placement, Rows, Scale, WrittenPages
from tikv.ops.plan import Launch

WORDS_IN_FLIGHT = 4  # words that a GPU thread reads before it writes: both fewer and more are slower
SERIAL_BYTES = 1 << 19  # on CPU, below this the calling thread finishes before another one wakes
BYTES_COUNTED = 1 << 31  # on CPU, larger arrays of codes are stored word by word, which takes twice as long


def alignment(end: Rows, width: int) -> int:
    """The largest power of two, in bytes up to 8, that divides every address at which a row or chunk may start."""
    array, itemsize = end.array, end.array.dtype.itemsize
    chunk, chunk_stride = end.inner
    offsets = [end.sequence, end.token, end.head, end.first, end.block, chunk_stride, chunk or width]
    common = math.gcd(8, array.ptr or 0, array.offset, *[n * itemsize for n in offsets])
    return common & -common if common else 8


def unaligned(operation: str, src: Rows, dst: Rows) -> ShapeError:
    """The error for elements that must be converted but do not lie at multiples of their size."""
    array = next(e.array for e in (src, dst) if ((e.array.ptr or 0) + e.array.offset) % e.array.dtype.itemsize)
    return ShapeError(
        f"{operation}: an array, {describe(array)}, is at address {array.ptr + array.offset:#x}, which is not a "
        f"multiple of its {array.dtype.itemsize}-byte elements, and converting needs aligned ones. Pass an aligned "
        "copy: numpy.array(...)."
    )


def choose_codec(
    operation: str, style: str, src: Rows, dst: Rows, width: int, scale: str, by_element: bool = False
) -> tuple[int, Any]:
    """(units in a row, codec) for one stream: the widest words that alignment allows; whole words when casting.

    On CPU, words have at most 32 bits, and when casting, a unit is one element, which LLVM vectorises. Codes of groups
    are stored by bytes. When codes are dequantised, a unit is a group, or on a GPU a few codes. With `by_element`, a
    word on CPU is an element.

    Raises:
        ShapeError: elements that must be converted do not lie at multiples of their size.
    """
    if src.format != dst.format:
        return _codec_of_groups(operation, style, src, dst, width)
    from tikv.kernels.codec import Codec

    src_align, dst_align = alignment(src, width), alignment(dst, width)
    s, d = src.array.dtype, dst.array.dtype
    if s is d and not scale:
        word = math.gcd(src_align, dst_align, 4 if style == "cpu" else 8)
        if by_element and style == "cpu" and word >= s.itemsize:
            word = s.itemsize
        return width * s.itemsize // word, Codec("raw", "raw", 0, word * 8, word * 8)
    for elements in (1,) if style == "cpu" else (4, 2, 1):
        src_word, dst_word = min(8, elements * s.itemsize), min(8, elements * d.itemsize)
        chunks_whole = all(chunk % elements == 0 for chunk in (src.inner[0] or elements, dst.inner[0] or elements))
        if width % elements == 0 and src_align % src_word == 0 and dst_align % dst_word == 0 and chunks_whole:
            return width // elements, Codec(s.short, d.short, elements, src_word * 8, dst_word * 8)
    raise unaligned(operation, src, dst)


def _codec_of_groups(operation: str, style: str, src: Rows, dst: Rows, width: int) -> tuple[int, Any]:
    """`choose_codec` for rows that become codes of groups, or are dequantised."""
    from tikv.kernels.codec import Codec
    from tikv.kernels.group_lanes import PART
    from tikv.kernels.groups import UNIT, has_halves
    from tikv.kernels.hadamard import HELD

    format = src.format or dst.format
    assert format is not None
    if any(((e.array.ptr or 0) + e.array.offset) % e.array.dtype.itemsize for e in (src, dst)):
        raise unaligned(operation, src, dst)
    bits = [e.array.dtype.itemsize * 8 for e in (src, dst)]
    turn = None if format.seed is None else (block_of(width), format.seed)
    unit = format.group
    if dst.format and style != "cpu":
        bits[0] = min(alignment(src, width), PART * src.array.dtype.itemsize) * 8
    elif dst.format and dst.array.offset + dst.array.span <= BYTES_COUNTED:
        bits[1] = 8
    elif src.format and style != "cpu":
        unit = HELD if turn else UNIT
        if not turn and not has_halves(format.name):
            bits[1] = min(alignment(dst, width), UNIT * dst.array.dtype.itemsize, 8) * 8
    return width // unit, Codec(src.storage, dst.storage, unit, *bits, turn)


def choose_lanes(streams: Sequence[Any], cooperative: bool) -> int:
    """Threads of a GPU that share a row: as few as give each `WORDS_IN_FLIGHT` to read before it writes.

    Rows whose threads agree on a scale take a power of two, which divides a block; groups take what they need.
    """
    from tikv.kernels.group_lanes import lanes_of_group

    turns = [s.codec.turn[0] for s in streams if s.codec.turn]
    if streams[0].codec.dst in GROUP_FORMATS:
        lanes = max(int(s.units * lanes_of_group(s.codec.dst)) for s in streams)
        kind = GROUP_FORMATS[streams[0].codec.dst]
        together = max((n // kind.group * lanes_of_group(kind.name) for n in turns), default=1)
        return -(-lanes // together) * together  # the threads of a rotated block begin at a multiple of their number
    if turns:
        return max(int(s.units) for s in streams)
    units = max(s.units for s in streams)
    rounds = max(1, WORDS_IN_FLIGHT // sum(s.codec.src_words for s in streams))
    lanes = min(32, -(-units // rounds))
    return int(1 << (lanes - 1).bit_length()) if cooperative else lanes


def bind_copy(
    live: runtime.Runtime,
    operation: str,
    *,
    src: Sequence[Rows],
    dst: Sequence[Rows],
    widths: Sequence[int],
    heads: int,
    tokens: int,
    groups: int = 1,
    src_place: Placement = LINEAR,
    dst_place: Placement = LINEAR,
) -> Launch:
    """Bind the copy of `groups` x `tokens` x `heads` rows, of K or of K and V.

    Args:
        live: the runtime.
        operation: the operation's name, for messages.
        src, dst: `Rows` of K, or of K and V. On CPU a launch is cheaper if both `dst` share one array. Scales have the
            same strides for K and V: the source's are read, the destination's are computed, or divide what is stored.
        widths: elements in a row of each stream.
        heads, tokens, groups: extents; none is zero. A group is a sequence, or a sequence of one layer.
        src_place, dst_place: placements of the two ends.

    Raises:
        CapacityError: an array or the launch is larger than 32-bit indices reach.
    """
    return RowCopy(live, operation, src, dst, widths, (groups, tokens, heads), src_place, dst_place).bind()


def bind_copies(
    live: runtime.Runtime,
    operation: str,
    *,
    src: Sequence[Rows],
    dst: Sequence[Rows],
    widths: Sequence[int],
    **options: Any,
) -> list[Launch]:
    """`bind_copy` of K and V: one launch if they are stored alike, else one each.

    Args:
        live, operation, src, dst, widths: as in `bind_copy`.
        **options: the other arguments of `bind_copy`.
    """
    ends = zip(src, dst, strict=True)
    # K and V of one format are written together, even if only K is rotated.
    kinds = {(a.format, a.array.dtype, b.storage, b.array.dtype, (a.scale or b.scale) is None) for a, b in ends}
    parts = [slice(0, 2)] if len(kinds) == 1 else [slice(i, i + 1) for i in range(len(src))]
    return [bind_copy(live, operation, src=src[part], dst=dst[part], widths=widths[part], **options) for part in parts]


class RowCopy:
    """A copy of rows, from what `bind_copy` takes: what its kernel is chosen by, what the kernel gets, and its launch.

    Attributes:
        shape: how many groups, tokens and heads there are.
        streams: how K, or K and V, are moved.
        strides: those of their four ends, in words; K alone has its own in place of V's.
        index: the array by which an end finds its slots; None if it needs none.
        pages: the arrays of a destination in pages, instead of `index`.
        scales: where the scales of K and V lie, as far as there are any.
        summaries: the summaries of pages that the same launch writes, if any; there are no scales then.
        lanes: threads of a GPU that share a row.
        items: iterations of the kernel's loop, without those of summaries.
    """

    def __init__(
        self, live: runtime.Runtime, operation: str, src: Sequence[Rows], dst: Sequence[Rows], widths: Sequence[int],
        shape: tuple[int, int, int], src_place: Placement, dst_place: Placement,
    ) -> None:  # fmt: skip
        from tikv.kernels.lanes import BLOCK

        self.live, self.operation, self.src, self.dst, self.widths = live, operation, src, dst, widths
        self.shape, self.src_place, self.dst_place = shape, src_place, dst_place
        self.index, self.pages, self.summaries = src_place.array or dst_place.array, dst_place.pages, dst[0].pages
        self.scales = [scale for a, b in zip(src, dst, strict=True) if (scale := b.scale or a.scale) is not None]
        self.scale_code = self.scales[0].array.dtype.short if self.scales else ""
        self.streams, self.strides = self._moved()
        cooperative = not live.is_cpu and any(
            s.codec.finds_scale or s.codec.turn or s.codec.dst in GROUP_FORMATS for s in self.streams
        )
        self.lanes = 1 if live.is_cpu else choose_lanes(self.streams, cooperative)
        # On CPU an iteration is a token of one stream, on a GPU a unit.
        groups, tokens, heads = shape
        self.items = groups * tokens * (len(self.streams) if live.is_cpu else heads * self.lanes)
        if cooperative:
            self.items = -(-self.items // BLOCK) * BLOCK
        checks.countable(self.items, operation)

    def _moved(self) -> tuple[list[Any], tuple[int, ...]]:
        """The streams and the strides."""
        from tikv.kernels.copy import Stream

        streams: list[Any] = []
        strides: list[int] = []
        form = self.scale_code, self.summaries is not None
        for name, a, b, width in zip("kv", self.src, self.dst, self.widths, strict=False):
            units, codec = choose_codec(self.operation, self.live.kernel_style, a, b, width, *form)
            streams.append(Stream(units, codec))
            for rows, bits in ((a, codec.src_bits), (b, codec.dst_bits)):
                checks.addressable(rows.array, bits // 8, self.live, name, self.operation)
                strides += strides_in_words(rows, bits // 8)
        return streams, tuple(strides if len(streams) == 2 else strides * 2)

    @property
    def plain(self) -> bool:
        """Whether the kernel reads neither an index nor scales."""
        return self.index is None and not self.pages and not self.scale_code

    @property
    def joint(self) -> bool:
        """Whether K and V go to one array, which the kernel gets once."""
        dst, (k, v) = self.dst, (self.streams[0].codec, self.streams[-1].codec)
        one = len(dst) == 2 and dst[0].array is dst[1].array and k.dst_bits == v.dst_bits
        return self.live.is_cpu and self.plain and one

    def bind(self) -> Launch:
        """The launch over these arrays."""
        kernel, arrays = self._kernel(), self._arrays()
        items, vectors = self._vectors()
        return Launch(kernel.bind(items, *arrays, *vectors), arrays)

    def _kernel(self) -> Any:
        """The kernel for this form of copy."""
        from tikv.kernels.copy import make_copy
        from tikv.kernels.page_summaries import WrittenForm

        (groups, tokens, heads), cpu, index, summaries = self.shape, self.live.is_cpu, self.index, self.summaries
        bits: Any = 0 if index is None else index.dtype.itemsize * 8
        if self.pages:
            bits = tuple(a.dtype.itemsize * 8 for a in self.pages)
        written: tuple[Any, ...] = ()
        if summaries is not None:
            names = self.src[0].array.dtype.short, self.dst[0].array.dtype.short
            written = (WrittenForm(*names, self.widths[0], summaries.unfinished),)
        serial, streams = False, tuple(self.streams)
        if cpu:
            moved = sum(w * a.array.dtype.itemsize for a, w in zip(self.src, self.widths, strict=True))
            serial = groups * tokens * heads * moved < SERIAL_BYTES
            streams = tuple(s._replace(units=0) for s in streams)  # known at run time
        ends = self._end(self.src_place, self.src, "src_bits"), self._end(self.dst_place, self.dst, "dst_bits")
        return launch.kernel(
            self.live, make_copy, self.live.kernel_style, serial, heads, groups > 1, streams, *ends, self.lanes,
            bits, self.scale_code, self.joint, *written,
        )  # fmt: skip

    def _end(self, place: Placement, rows: Sequence[Rows], bits: str) -> Any:
        """The compile-time description of one end of the copy; `bits` is the codec's name for those of its words."""
        from tikv.kernels.copy import EndLayout

        of_k, of_v = getattr(self.streams[0].codec, bits), getattr(self.streams[-1].codec, bits)
        return EndLayout(place.kind, place.page, inner_words(rows[0], of_k), inner_words(rows[-1], of_v))

    def _arrays(self) -> list[ArrayView]:
        """The arrays that the kernel gets, with placeholders for those that it takes but does not read."""
        src, dst, index = self.src[0].array, self.dst[0].array, [] if self.index is None else [self.index]
        arrays = [src, dst, self.src[-1].array, *([] if self.joint else [self.dst[-1].array]), *self.pages]
        if self.summaries is not None:
            least = self.summaries.least.array
            checks.addressable(least, least.dtype.itemsize, self.live, "the summaries of pages", self.operation)
            return [*arrays, *(index if self.live.is_cpu else [*(index or [src]), src, dst]), least]
        if self.plain or self.pages:
            return arrays
        scales = [scale.array for scale in self.scales] or index
        return [*arrays, *(index or scales[:1]), scales[0], scales[-1]]

    def _vectors(self) -> tuple[int, list[Any]]:
        """The number of all iterations, and the vectors of numbers that the kernel gets."""
        from tikv.kernels.address import CopyParams, PageNumbers

        (groups, tokens, heads), cpu, items, summaries = self.shape, self.live.is_cpu, self.items, self.summaries
        entries = place_entries(self.src_place, self.dst_place)
        if not self.plain and not self.pages:
            entries |= scale_entries(self.scales) | tensor_entries(self.src, self.dst)
        of_k, of_v = self.streams[0].units, self.streams[-1].units
        numbers = CopyParams(items, k_units=of_k, v_units=of_v, groups=groups, tokens=tokens, **entries)
        written = []
        if summaries is not None:
            items += groups * tokens * (1 if cpu else heads * self.widths[0])
            checks.countable(items, self.operation)
            written.append(self._written_numbers(summaries, items))
        vectors = [launch.joined(numbers, self.strides, *written)] if cpu else [self.strides, numbers, *written]
        if self.pages:
            places = [n for a in self.pages for n in (a.offset // a.dtype.itemsize, a.strides[0])]
            requests, pages = self.pages[3].shape[0] - 1, self.pages[2].shape[0]
            vectors.append(PageNumbers(*places, requests=requests, pages=pages))
        return items, vectors

    def _written_numbers(self, summaries: WrittenPages, all_items: int) -> Any:
        """`kernels.page_summaries.WrittenParams` of the pages that the copy writes."""
        from tikv.kernels.page_summaries import WrittenParams

        src, dst, to = self.src[0], self.dst[0], summaries.least
        firsts = [a.first + a.array.offset // a.array.dtype.itemsize for a in (src, dst, to)]
        return WrittenParams(
            all_items=all_items, copied_items=self.items, summary_heads=self.shape[2], page=summaries.page,
            row_step=summaries.row_step, new_sequence=src.sequence, new_token=src.token, new_head=src.head,
            new_first=firsts[0], stored_sequence=dst.sequence, stored_block=dst.block, stored_token=dst.token,
            stored_head=dst.head, stored_first=firsts[1], to_sequence=to.sequence, to_page=to.token, to_head=to.head,
            least_first=firsts[2], greatest_first=firsts[2] + summaries.distance,
        )  # fmt: skip


def place_entries(src: Placement, dst: Placement) -> dict[str, int]:
    """The entries of `kernels.address.CopyParams` for the placements of both ends."""
    indexed, ring = src if src.array is not None else dst, src if src.ring else dst
    src_index, dst_index = (
        0 if end.array is None else end.first + end.array.offset // end.array.dtype.itemsize for end in (src, dst)
    )
    return {
        "src_position": src.position, "src_limit": src.limit, "src_index": src_index,
        "dst_position": dst.position, "dst_limit": dst.limit, "dst_index": dst_index,
        "index_group": indexed.group, "index_step": indexed.step,
        "sinks": ring.sinks, "ring": ring.ring, "keep": ring.keep,
    }  # fmt: skip


def scale_entries(scales: Sequence[Scale]) -> dict[str, int]:
    """The entries of `kernels.address.CopyParams` for the scales of K and V, or of one of them; none without scales."""
    if not scales:
        return {}
    firsts = [scale.first + scale.array.offset // scale.array.dtype.itemsize for scale in scales]
    steps = {"scale_group": scales[0].sequence, "scale_step": scales[0].token, "scale_head": scales[0].head}
    return {**steps, **dict(zip(("k_scale", "v_scale"), firsts, strict=False))}


def tensor_entries(src: Sequence[Rows], dst: Sequence[Rows]) -> dict[str, int]:
    """The entries of `kernels.address.CopyParams` for the scales of whole tensors, as the bits of float32."""
    formats = [b.format or a.format for a, b in zip(src, dst, strict=True)]
    scales = [1.0 if format is None else format.tensor_scale for format in formats]
    return {name: bits_of(scale) for name, scale in zip(("k_tensor", "v_tensor"), scales, strict=False)}


def bits_of(x: float) -> int:
    """The bits of a float32, as a signed integer."""
    return int(np.float32(x).view(np.int32))


def strides_in_words(end: Rows, word_bytes: int) -> tuple[int, ...]:
    """The strides of rows in words, in the order of `kernels.address.RowStrides`."""
    itemsize = end.array.dtype.itemsize
    offset = end.array.offset // word_bytes
    group, block, step, head, first = [
        n * itemsize // word_bytes for n in (end.sequence, end.block, end.token, end.head, end.first)
    ]
    return group, block, step, head, first + offset


def inner_words(end: Rows, bits: int) -> tuple[int, int]:
    """(chunk, stride) of an end's rows, in words of that many bits."""
    itemsize = end.array.dtype.itemsize
    return end.inner[0] * itemsize * 8 // bits, end.inner[1] * itemsize * 8 // bits
