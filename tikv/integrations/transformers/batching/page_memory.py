"""The memory of pages of transformers' continuous batching, in this library's layout and in any format.

transformers keeps the pages of all layers side by side, in sectors that it gives to layers of one kind or another. A
launch cannot address such memory on a large GPU, and kernels read the scales of a layer from one array. So the same
bytes are cut into parts: all codes of keys, all of values, and their scales. A part has as many stripes as a sector has
pages, and a stripe has a page for each sector. A layer gets as many neighbouring stripes as a sector has blocks of its
kind: block `b` of a layer is page `b // blocks` of stripe `b % blocks`. So layers of both kinds share the memory, and a
sector has the same bytes for both.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from tikv import dtypes
from tikv.arrays import runtime_of, to_device, view
from tikv.errors import DTypeError
from tikv.integrations.transformers.memory.storage import Storage
from tikv.integrations.transformers.memory.views import INDEXED
from tikv.integrations.transformers.names import PAGES
from tikv.ops import paged
from tikv.ops.attention.call import Caches
from tikv.ops.attention.contiguous import ContiguousLayout
from tikv.ops.attention.paged import PagedLayout
from tikv.ops.plan import PlannedCall
from tikv.stores.row_format import ROWS, SCALES, RowFormats

PLAIN = Storage(None, None)  # the model's dtype

_storage: contextvars.ContextVar[Storage | None] = contextvars.ContextVar("storage", default=None)
_making: contextvars.ContextVar[PageFormat | None] = contextvars.ContextVar("format", default=None)


def storage_in_use() -> Storage | None:
    """What the innermost `pages` asks for; None outside of it."""
    return _storage.get()


@contextlib.contextmanager
def using(storage: Storage | None) -> Iterator[None]:
    """Within this context, `storage_in_use` returns this."""
    token = _storage.set(storage)
    try:
        yield
    finally:
        _storage.reset(token)


def name_of(storage: Storage | None) -> str:
    """What pages hold, for messages."""
    if storage is None:
        return "the model's dtype"
    k, v = ("the model's dtype" if of is None else str(of) for of in (storage.k, storage.v))
    return k if k == v else f"{k} and {v}"


@contextlib.contextmanager
def making(format: PageFormat | None) -> Iterator[None]:
    """Within this context, allocators of pages are made for this format."""
    token = _making.set(format)
    try:
        yield
    finally:
        _making.reset(token)


def format_in_making() -> PageFormat | None:
    """The format of `making`; None for the model's dtype."""
    return _making.get()


class PageFormat:
    """How tokens are kept in pages.

    Args:
        rows: the formats of keys and values.
        heads: KV heads.
        plain: whether pages hold what the model computes.

    Attributes:
        parts: the shape of a head's row and the dtype of each part, by the names of arguments.
        nbytes: bytes of a token.
    """

    def __init__(self, rows: RowFormats, heads: int, plain: bool) -> None:
        self.rows, self.heads, self.plain = rows, heads, plain
        self.parts = {name: (shape, dtypes.to_torch(dtype.name)) for name, (shape, dtype) in rows.arrays().items()}
        self.nbytes = sum(self.bytes_of(name) for name in self.parts)

    @classmethod
    def of_model(cls, storage: Storage | None, dtype: Any, heads: int, width: int) -> PageFormat:
        """The format for a model.

        Args:
            storage: what `pages` asks for.
            dtype: the model's dtype.
            heads, width: its KV heads, and the width of a head.

        Raises:
            DTypeError, ShapeError, OptionError: keys and values of the model cannot be kept so.
        """
        model, asked = dtypes.parse(dtype, PAGES), storage or PLAIN
        rows = RowFormats.checked(
            PAGES, runtime_of(), heads, head_dim=width, dtype=asked.k or model, v_dtype=asked.v or model,
            k_scale=asked.k_scale, v_scale=asked.v_scale,
        )  # fmt: skip
        if model.name not in rows.appended:
            raise DTypeError(
                f"{PAGES}: keys and values of {model.name} cannot be stored as {rows.name}, which takes "
                f"{' and '.join(rows.appended) or 'none'}. Use another format, or the model in another dtype."
            )
        return cls(rows, heads, rows.k.dtype is model is rows.v.dtype)

    def with_heads(self, heads: int) -> PageFormat:
        """The same for another number of KV heads: under tensor parallelism, each rank has some of them."""
        return self if heads == self.heads else PageFormat(self.rows, heads, self.plain)

    def bytes_of(self, part: str) -> int:
        """Bytes of a part of a token."""
        shape, dtype = self.parts[part]
        return int(self.heads * math.prod(shape) * dtype.itemsize)

    @property
    def most_tokens(self) -> int:
        """The most tokens of a layer: kernels count its elements in 31 bits."""
        return (2**31 - 1) // max(self.heads * math.prod(shape) for shape, _ in self.parts.values())

    def rows_of(self, part: str, memory: Any) -> Any:
        """A part's bytes (n, ...) as rows (n, page, heads, ...), or (n, heads, ...) of bytes of single tokens."""
        shape, dtype = self.parts[part]
        return memory.view(dtype).unflatten(-1, (-1, self.heads, *shape))

    @functools.cached_property
    def divisors(self) -> dict[str, Any]:
        """The scales of 8-bit floats that a caller gave, on the device."""
        numbers = zip(SCALES, self.rows.divisors, strict=True)
        return {name: to_device(np.array(n, np.float32), runtime_of()) for name, n in numbers if n is not None}

    def write(self, operation: str, k: torch.Tensor, v: torch.Tensor, arrays: dict[str, Any], slots: Any) -> None:
        """Write rows k and v (n, heads, width) into pages, by their slots (n,), in one launch."""
        scales = {**arrays, **self.divisors}
        scaled = [name for name in SCALES if name in scales]
        arguments = (k, arrays["k"], v, arrays["v"], slots, *(scales[name] for name in scaled))
        names = ("k", "k_pool", "v", "v_pool", "slots", *scaled)
        views = [view(a, name, operation) for a, name in zip(arguments, names, strict=True)]
        live, formats = runtime_of(k), self.rows.formats
        key = (operation, "pages", formats, *[a.key for a in views])
        plan = live.plans.get(key)
        if plan is None:
            plan = live.plans.keep(key, paged.check_write_slots(live, operation, views, "NHD", formats, scaled))
        PlannedCall(plan, views, arguments).run()

    def caches(self, layout: Any, arrays: dict[str, Any], lengths: torch.Tensor, table: Any = None) -> Caches:
        """Parts as attention takes them."""
        scales = {name: a for name, a in (arrays | self.divisors).items() if name not in ROWS}
        formats = None if self.plain else self.rows.formats
        return Caches(layout, arrays["k"], arrays["v"], lengths, table, formats=formats, **scales)


class PageMemory:
    """Memory that is cut into parts, for the layers of one kind.

    Args:
        format: the format.
        memory: (bytes,) uint8.
        page: tokens of a page.
        sectors: how many sectors there are.
        blocks: blocks of a sector.
        layers: how many layers the kind has.
        width: the width of a head.
    """

    def __init__(
        self, format: PageFormat, memory: Any, *, page: int, sectors: int, blocks: int, layers: int, width: int
    ) -> None:
        self.format, self.page, self.sectors, self.blocks = format, page, sectors, blocks
        self.width, self.device = width, memory.device
        pages, end = layers * blocks * sectors, 0
        self.parts: dict[str, Any] = {}  # (layers, pages of a layer, bytes of a page)
        for name in format.parts:
            nbytes = pages * page * format.bytes_of(name)
            self.parts[name] = memory[end : end + nbytes].view(layers, blocks * sectors, -1)
            end += nbytes

    def page_of(self, block: Any) -> Any:
        """The page of each layer that is a block's."""
        return block % self.blocks * self.sectors + block // self.blocks

    def layer(self, number: int) -> PagesOfLayer:
        """The pages of a layer, by its number among those of its kind."""
        return PagesOfLayer(self.format, {name: a[number] for name, a in self.parts.items()}, self.page, self.width)

    # What transformers calls on its view (blocks, bytes of a block) to copy blocks and to move them off the device.

    def index_select(self, axis: int, blocks: Any) -> Any:
        """Copies of blocks, (n, bytes of a block)."""
        pages = self.page_of(blocks)
        return torch.cat([a[:, pages].transpose(0, 1).flatten(1) for a in self.parts.values()], 1)

    def index_copy_(self, axis: int, blocks: Any, copies: Any) -> None:
        """Write what `index_select` returned into blocks."""
        pages, first = self.page_of(blocks), 0
        for a in self.parts.values():
            nbytes = a.shape[0] * a.shape[2]
            part = copies[:, first : first + nbytes].unflatten(1, (a.shape[0], a.shape[2]))
            a.index_copy_(1, pages, part.transpose(0, 1))
            first += nbytes


class PagesOfLayer:
    """The pages of a layer.

    Args:
        format: the format.
        memory: (pages, bytes of a page) uint8, of each part.
        page: tokens of a page.
        width: the width of a head.

    Attributes:
        shape: (heads, width).
        arrays: (pages, page, heads, ...) of each part.
    """

    def __init__(self, format: PageFormat, memory: dict[str, Any], page: int, width: int) -> None:
        self.format, self.plain, self.page, self.shape = format, format.plain, page, (format.heads, width)
        self.arrays = {name: format.rows_of(name, a) for name, a in memory.items()}

    def caches(self, lengths: torch.Tensor, table: Any) -> Caches:
        """The pages of requests, as attention takes them."""
        return self.format.caches(PagedLayout(), self.arrays, lengths, table)

    def write(self, operation: str, k: torch.Tensor, v: torch.Tensor, rows: torch.Tensor) -> None:
        """Write new keys and values (n, heads, width) to these rows; rows below 0 are skipped."""
        self.format.write(operation, k, v, self.arrays, rows)

    def stored(self, operation: str, k: torch.Tensor, v: torch.Tensor) -> tuple[Any, ...]:
        """New keys and values in the format of the pages, one after the other: (n, heads, ...) of each part."""
        if self.plain:
            return k, v
        total = k.shape[0]
        arrays = {name: a.new_empty((-(-total // self.page), *a.shape[1:])) for name, a in self.arrays.items()}
        self.format.write(operation, k, v, arrays, torch.arange(total, device=k.device))
        return tuple(a.flatten(0, 1)[:total] for a in arrays.values())

    def taken(self, rows: torch.Tensor) -> tuple[Any, ...]:
        """A copy of what these rows hold, as `stored` returns it."""
        return tuple(_indexed(a.flatten(0, 1)).index_select(0, rows).view(a.dtype) for a in self.arrays.values())

    def contiguous(self, stored: Sequence[Any], lengths: torch.Tensor, batch: int, starts: bool) -> Caches:
        """What `stored` or `taken` returned as a cache that `batch` sequences share."""
        rows = zip(self.arrays, stored, strict=True)
        arrays = {name: a.transpose(0, 1)[None].expand(batch, *[-1] * a.ndim) for name, a in rows}
        return self.format.caches(ContiguousLayout(starts=starts), arrays, lengths)


def put_among(older: Sequence[Any], rows: torch.Tensor, new: Sequence[Any]) -> None:
    """Write what `PagesOfLayer.stored` returned to rows of what `taken` returned."""
    for to, a in zip(older, new, strict=True):
        _indexed(to).index_copy_(0, rows, _indexed(a))


def joined(pair: Sequence[Any]) -> Any:
    """Two parts of `PagesOfLayer.stored` or `taken`, one after the other."""
    return torch.cat([_indexed(a) for a in pair]).view(pair[0].dtype)


def _indexed(a: Any) -> Any:
    """The same memory in a dtype that torch can index."""
    return a.view(INDEXED.get(a.dtype.itemsize, a.dtype))
