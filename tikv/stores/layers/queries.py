"""The order of the axes of queries and results of attention: in callers' arrays and in kernels.

Callers have tokens before heads ("token_major", as K and V of an append) or heads before tokens; kernels read
(batch, Hq, T, D). An array in one order is viewed in the other through its strides, and nothing is moved.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

from tikv import dtypes, runtime
from tikv.arrays import Array, ArrayView, describe, new_like, view_of_new, view_without_owner
from tikv.arrays.array_view import MAX_FORMS
from tikv.errors import DTypeError, PositionError, ShapeError
from tikv.ops import checks
from tikv.ops.attention.options import QUERIES
from tikv.ops.attention.plan import NEW, Results
from tikv.runtime.cache import BoundedCache

OTHER = {"token_major": "head_major", "head_major": "token_major"}
AXES = {"token_major": "BTH", "head_major": "BHT"}  # the columns of a head follow
_PLACES = {"BTH": (0, 2, 1), "TH": (None, 1, 0), "HT": (None, 0, 1), "H": (None, 0)}  # of sequence, head and token
WORDS = {"B": "batch", "T": "T", "H": "Hq"}


class Queries(NamedTuple):
    """Queries of one form, in a caller's order of axes, which is the order of attention's results too.

    Attributes:
        q: the first queries of this form, whose memory may be gone.
        axes: the order of their axes, with the letters B, T and H for sequences, tokens and heads; columns come last.
        layout: "token_major" or "head_major".
        tokens: how many queries a sequence has.
        new: a description of attention's new result, in the caller's order of axes.
    """

    q: ArrayView
    axes: str
    layout: str
    tokens: int
    new: Results

    @classmethod
    def of(cls, q: ArrayView, axes: str, layout: str) -> Queries:
        """The form that `q` has."""
        tokens = q.shape[axes.index("T")] if "T" in axes else 1
        new = NEW if axes in ("BH", "BHT") else Results(lead=q.shape[:-1], as_read=partial(heads_first, axes=axes))
        return cls(q.at_address(q.ptr), axes, layout, tokens, new)

    def as_read(self, a: ArrayView) -> ArrayView:
        """Queries of this form, or a result for them, in the kernels' order: (batch, Hq, T, ...), or without T."""
        return heads_first(a, self.axes)

    def results(self, out: Array, return_lse: bool) -> Results:
        """`new`, or a caller's array, and whether the log-sum-exps are wanted too."""
        return self.new if out is None and not return_lse else self.new._replace(out=out, return_lse=return_lse)

    def new_out(self, like: Any, width: int, live: runtime.Runtime) -> Any:
        """A new array of the kind of `like` for the result."""
        return new_like(like, (*self.q.shape[:-1], width), self.q.dtype, live)

    def new_lse(self, like: Any, live: runtime.Runtime) -> Any:
        """A new array of the kind of `like` for the log-sum-exps."""
        return new_like(like, self.q.shape[:-1], dtypes.float32, live)

    def result(self, operation: str, like: Any, out: Array, width: int, live: runtime.Runtime) -> tuple[Any, ArrayView]:
        """An array for the result, new or a caller's `out`, which must fit, and its view."""
        if out is None:
            out = self.new_out(like, width, live)
            return out, view_of_new(out, "out", operation)
        to = view_without_owner(out, "out", operation)
        key = ("out", self.q.key, to.key, width)
        if live.plans.get(key) is None:
            self._check_out(operation, to, width, live)
            live.plans.keep(key, True)
        return out, to

    def _check_out(self, operation: str, out: ArrayView, width: int, live: runtime.Runtime) -> None:
        checks.on_device([("out", out)], live, operation)
        checks.writable(out, "out", operation)
        checks.same_dtype(self.q, out, "q", "out", operation)
        shape = (*self.q.shape[:-1], width)
        if out.shape != shape:
            raise ShapeError(f"{operation}: out is {describe(out)} where {shape} is needed.")

    def remedy(self, tokens: int, num_kv_heads: int) -> str:
        """The way out for a message if there are more queries than tokens: whether the other layout would fit."""
        if "T" not in self.axes:
            return ""
        *_, first, second, _ = self.q.shape
        others, heads = (second, first) if self.layout == "token_major" else (first, second)
        if others > tokens or heads % num_kv_heads:
            return ""
        axes = AXES[OTHER[self.layout]][-len(self.axes) :]
        return f" Read as {named(axes)}, q would fit: use layout={OTHER[self.layout]!r}."

    def refuse_more_than(self, operation: str, tokens: int, num_kv_heads: int) -> None:
        """Raise PositionError if a layer has some tokens, but fewer than there are queries."""
        if 0 < tokens < self.tokens:
            raise PositionError(
                f"{operation}: the {self.tokens} queries belong to the newest tokens, and there are {tokens} (q: "
                f"{describe(self.q)}, {named(self.axes)}). Append the tokens first, or use "
                f"extend().{self.remedy(tokens, num_kv_heads)}"
            )


_heads_first: BoundedCache[tuple[int, str], ArrayView] = BoundedCache(MAX_FORMS)  # one of each form


def heads_first(a: ArrayView, axes: str) -> ArrayView:
    """An array with these axes, and others after them, as (batch, heads, tokens, ...), or without tokens if it is."""
    places = _PLACES.get(axes)
    if places is None:
        return a
    like = _heads_first.get((a.key, axes))
    if like is None or not a.ptr:
        rest = len(axes)
        shape = tuple([1 if at is None else a.shape[at] for at in places]) + a.shape[rest:]
        strides = tuple([0 if at is None else a.strides[at] for at in places]) + a.strides[rest:]
        result = a.restrided(shape, strides)
        if a.ptr:
            _heads_first.keep((a.key, axes), result.without_owner())
        return result
    result = like.at_address(a.ptr)
    result.owner = a.owner
    return result


def rows_first(a: ArrayView, layout: str) -> ArrayView:
    """An array (T, heads, ...) of either layout as (T, heads, ...)."""
    return a if layout == "token_major" else a.transposed(1, 0, *range(2, a.ndim))


def with_tokens(a: ArrayView, ndim: int) -> ArrayView:
    """An array with `ndim` axes, (batch, heads, tokens, ...); a single query's may lack the axis of tokens."""
    if a.ndim == ndim:
        return a
    return a.restrided((*a.shape[:2], 1, *a.shape[2:]), (*a.strides[:2], 0, *a.strides[2:]))


def named(axes: str) -> str:
    """Axes in a message: `(batch, T, Hq, D)`."""
    return f"({', '.join(WORDS[axis] for axis in axes)}, D)"


def check_heads(operation: str, name: str, heads: int, tokens: int, expected: int, detail: str, layout: str) -> None:
    """Raise ShapeError if new rows have another number of heads; it names the other layout if that would fit."""
    if heads != expected:
        remedy = ""
        if tokens == expected:
            remedy = f" In the other order of axes it fits: use layout={OTHER[layout]!r}."
        elif heads and heads % expected == 0:
            remedy = (
                " If these are queries, mind the order of arguments; if heads were repeated for the query heads, pass "
                "them without the repetition."
            )
        raise ShapeError(
            f"{operation}: the number of heads of {name} is {heads} where {expected} is needed ({detail}).{remedy}"
        )


def attend_queries(
    operation: str, q: ArrayView, layout: str, batch: int, num_kv_heads: int, width: int, live: runtime.Runtime
) -> Queries:
    """The queries of `attend`, for the newest tokens of `batch` sequences.

    Token-major they are (batch, T, Hq, D), or (batch, Hq, D) for one query each; head-major (batch, Hq, T, D), or
    (batch, Hq, D). If the batch is 1, its axis may be left out: then three axes are (T, Hq, D) or (Hq, T, D), which
    is (batch, Hq, D) if the first of them is 1. Other shapes are refused.
    """
    key = ("queries", q.key, checks.name(layout, "layout", operation, checks.LAYOUTS), batch, num_kv_heads, width)
    queries: Queries | None = live.plans.get(key)
    if queries is None:
        checks.option(layout, "layout", operation, checks.LAYOUTS)
        axes = _axes_of(operation, q, layout, batch, num_kv_heads)
        _check(operation, q, axes, layout, (batch, num_kv_heads, width), live, (AXES[layout], "BH"))
        queries = live.plans.keep(key, Queries.of(q, axes, layout))
    return queries


def _axes_of(operation: str, q: ArrayView, layout: str, batch: int, num_kv_heads: int) -> str:
    """Which axes the queries of `attend` have; ShapeError if they can be read in two ways."""
    axes = AXES[layout]
    if q.ndim == 2 and batch == 1:
        return "H"
    if q.ndim != 3:
        return axes
    if batch == 1 and q.shape[0] != 1:
        return axes[1:]
    if layout == "head_major" and batch == num_kv_heads == 1 and q.shape[1] > 1:
        raise ShapeError(
            f"{operation}: q is {describe(q)}, which with layout='head_major' and one KV head may be {q.shape[1]} "
            f"query heads of one token or {q.shape[1]} tokens of one query head. Pass (batch, Hq, T, D), or "
            f"one query per sequence without layout."
        )
    return "BH"  # one token of one sequence is the same


def extend_queries(
    operation: str,
    q: ArrayView,
    layout: str,
    batch: int,
    num_kv_heads: int,
    width: int,
    tokens: int,
    live: runtime.Runtime,
) -> Queries:
    """The queries of `extend`: one per new token, (batch, T, Hq, D) or head-major (batch, Hq, T, D).

    The axis of the batch may be left out if it is 1. Other shapes are refused.
    """
    key = ("new queries", q.key, layout, batch, num_kv_heads, width)
    queries: Queries | None = live.plans.get(key)
    if queries is None:
        axes = AXES[layout][1:] if q.ndim == 3 and batch == 1 else AXES[layout]
        _check(operation, q, axes, layout, (batch, num_kv_heads, width), live, (AXES[layout],))
        queries = live.plans.keep(key, Queries.of(q, axes, layout))
    if queries.tokens != tokens:
        detail = f"q: {describe(q)}, {named(queries.axes)}"
        checks.extent(queries.tokens, tokens, "the number of tokens of q", operation, detail)
    return queries


def rows_of_queries(
    operation: str, q: ArrayView, layout: str, num_kv_heads: int, width: int, live: runtime.Runtime
) -> ArrayView:
    """Queries (T, Hq, D) of several sequences, or head-major (Hq, T, D), as (T, Hq, D); others are refused."""
    axes = AXES[checks.option(layout, "layout", operation, checks.LAYOUTS)][1:]
    _check(operation, q, axes, layout, (0, num_kv_heads, width), live, (axes,))
    return rows_first(q, layout)


def _check(
    operation: str, q: ArrayView, axes: str, layout: str, form: tuple[int, int, int], live: runtime.Runtime,
    taken: Sequence[str],
) -> None:  # fmt: skip
    """Raise unless queries with these axes, some of those that are taken, fit these sequences, KV heads and width."""
    key, (batch, num_kv_heads, width) = ("these queries fit", q.key, axes, form), form
    if live.plans.get(key) is not None:
        return
    checks.on_device([("q", q)], live, operation)
    shapes = " or ".join(map(named, taken)) + ", or without the batch" * (batch == 1)
    checks.rank(q, (len(axes) + 1,), "q", shapes, operation)
    checks.readable(q, "q", operation)
    if q.dtype not in QUERIES:
        raise DTypeError(f"{operation}: q is {describe(q)}; queries must be float32, float16 or bfloat16.")
    extents, as_read = dict(zip(axes, q.shape, strict=False)), f"q: {describe(q)}, {named(axes)}"
    checks.extent(extents.get("B", batch), batch, "the batch of q", operation, as_read)
    checks.extent(q.shape[-1], width, "the head width of q", operation, as_read)
    if extents["H"] % num_kv_heads:
        remedy = f"Use a multiple of {num_kv_heads}."
        others = extents.get("T", 0)
        if others and others % num_kv_heads == 0:
            swapped = axes.translate(str.maketrans("TH", "HT"))
            remedy = f"Read as {named(swapped)}, it fits: use layout={OTHER[layout]!r}."
        raise ShapeError(
            f"{operation}: {extents['H']} query heads do not divide among {num_kv_heads} KV heads ({as_read}). {remedy}"
        )
    live.plans.keep(key, True)
