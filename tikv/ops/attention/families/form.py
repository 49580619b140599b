"""A form of call: everything by which a family of kernels is chosen, and what the families ask about it."""

from __future__ import annotations

import math
from typing import NamedTuple

from tikv import runtime
from tikv.arrays import ArrayView
from tikv.ops.attention.options import AttentionOptions, CacheLayout, QueryShape
from tikv.ops.attention.terms import TREES, Terms, tree_of
from tikv.ops.layouts import Rows


class Form(NamedTuple):
    """A form of call; of the arrays, by name, only the forms are looked at."""

    live: runtime.Runtime
    arrays: dict[str, ArrayView]
    query: QueryShape
    cache: CacheLayout
    options: AttentionOptions

    @property
    def group(self) -> int:
        """Query heads of a KV head."""
        return self.query.heads // self.cache.heads

    @property
    def selects(self) -> bool:
        """Whether each query reads tokens of its own, so that queries share no keys."""
        return "indices" in self.arrays

    @property
    def rows(self) -> int:
        """The query rows of a KV head that read the same keys."""
        return self.group * (1 if self.selects else self.query.queries)

    @property
    def masked(self) -> bool:
        """Whether queries of a task may see different keys; if tokens are selected, a task has one query."""
        several = self.query.queries > 1 and not self.selects
        return self.options.causal and (several or bool(tree_of(self.arrays)))

    @property
    def stored(self) -> str:
        """How K is stored, for messages."""
        return str(self.cache.k.format or self.cache.k.array.dtype.name)

    @property
    def widths(self) -> str:
        """The widths of heads, for messages."""
        return f"heads are {self.cache.width} and {self.cache.width_v} wide"

    @property
    def why_not_terms(self) -> str:
        """Which terms are given that only some kernels have; empty if no term is given."""
        names = dict.fromkeys((*Terms._fields, *TREES))
        terms = [name for name in names if name in self.arrays and name != "indices"]
        return f"{' and '.join(terms)} are given" if terms else ""

    @property
    def why_not_pieces(self) -> str:
        """Why kernels that need rows in one piece cannot read them; empty if they can."""
        return "rows are stored in several pieces" if self.cache.k.inner[0] or self.cache.v.inner[0] else ""

    def why_not_begin_at(self, nbytes: int) -> str:
        """Why rows of K and V cannot be read in pieces of so many bytes; empty if they can."""
        begin = self.row_bytes(nbytes) == nbytes
        return "" if begin else f"not every row begins at a multiple of {nbytes} bytes"

    def why_not_queries(self, nbytes: int) -> str:
        """Why rows of queries cannot be read in pieces of so many bytes; empty if they can."""
        q = self.arrays["q"]
        if any(n % nbytes for n in (q.ptr or 0, q.offset, *(n * q.dtype.itemsize for n in self.query.strides))):
            return f"not every row of q begins at a multiple of {nbytes} bytes"
        return ""

    def row_bytes(self, most: int) -> int:
        """The largest power of two, up to `most`, to which every row of K and V, or piece of one, is aligned."""
        cache = self.cache
        both = (cache.k, self.arrays["k"], cache.width), (cache.v, self.arrays["v"], cache.width_v)
        return min(bytes_of_rows(rows, a, width, most) for rows, a, width in both)

    def scales_begin_at(self, nbytes: int) -> bool:
        """Whether the scales of every row of K and V begin at a multiple of so many bytes."""
        scales = [scale.array for scale in self.cache.scales]
        starts = (*(a.ptr or 0 for a in scales), *(a.offset for a in scales))
        steps = (n * a.dtype.itemsize for a in scales for n in self.cache.scale_strides)
        return not any(n % nbytes for n in (*starts, *steps))

    def word_bits(self, most: int) -> tuple[int, int]:
        """Bits of a word of K and of V: the widest, of at most so many bytes, to which every row is aligned.

        Codes of groups have words of their own. If K and V are stored alike, their words have the same width.
        """
        cache, k, v = self.cache, self.arrays["k"], self.arrays["v"]
        if cache.alike:
            bits = max(k.dtype.itemsize, 0 if cache.k.format else self.row_bytes(most)) * 8
            return bits, bits
        of_k, of_v = (
            max(a.dtype.itemsize, 0 if rows.format else bytes_of_rows(rows, a, width, most)) * 8
            for rows, a, width in ((cache.k, k, cache.width), (cache.v, v, cache.width_v))
        )
        return of_k, of_v


def bytes_of_rows(rows: Rows, a: ArrayView, width: int, most: int) -> int:
    """`Form.row_bytes` for K, or for V."""
    jumps = (rows.sequence, rows.block, rows.token, rows.head, rows.inner[1], rows.inner[0] or width)
    common = math.gcd(most, a.ptr or 0, a.offset, *(n * a.dtype.itemsize for n in jumps))
    return common & -common
