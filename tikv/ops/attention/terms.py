"""The terms that a caller adds to the scores, the tokens that queries see or read, and the checks of both."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from tikv import dtypes, launch, runtime
from tikv.arrays import Array, ArrayView, describe, view
from tikv.errors import CapacityError, DTypeError, OptionError, PositionError, ShapeError
from tikv.ops import checks
from tikv.ops.attention.options import MOST_QUERIES, AttentionOptions, CacheLayout, QueryShape
from tikv.ops.indices import host_indices, view_indices
from tikv.ops.plan import Launch


class Terms(NamedTuple):
    """The arrays as a caller gave them, None for those that it did not give; parents and indices may be lists."""

    sink_logits: Array | None = None
    alibi_slopes: Array | None = None
    mask: Array | None = None
    parents: Array | None = None
    indices: Array | None = None

    def views(self, operation: str) -> dict[str, ArrayView]:
        """A view of each array that was given, by its name; "mask_bits" is a mask with 8 keys per byte."""
        views: dict[str, ArrayView] = {}
        if self is NO_TERMS:
            return views
        for name, array in zip(self._fields, self, strict=True):
            if array is None or name in ("mask", "parents"):
                continue
            views[name] = (view_indices if name == "indices" else view)(array, name, operation)
        if self.mask is not None and self.parents is not None:
            raise OptionError(f"{operation}: mask and parents say the same in two ways. Pass one of them.")
        if self.parents is not None:
            views["parents"] = view_indices(self.parents, "parents", operation)
        if self.mask is not None:
            name, array = _bytes_of(self.mask, operation)
            views[name] = view(array, "mask", operation)
        return views


NO_TERMS = Terms()
TREES = ("mask", "mask_bits", "parents")  # names of arrays that say which of the new tokens a query sees
NAMES = ("sink_logits", "alibi_slopes", *TREES)
UNCOUNTED = NAMES[1:]  # with these, the mass of keys is not computed
MOST_RING_LENGTH = 2**30  # a ring's length, given as one number, is reduced from here on


def _bytes_of(mask: Array, operation: str) -> tuple[str, Any]:
    """("mask" or "mask_bits", the same memory as int8) for a mask of bool or uint8, dtypes that no other array has.

    Raises:
        DTypeError: it is neither.
    """
    name = str(getattr(mask, "dtype", type(mask).__name__)).removeprefix("torch.")
    if name not in ("bool", "uint8") or not hasattr(mask, "view"):
        raise DTypeError(
            f"{operation}: mask is {name}; it must be bool (B, T, T), or uint8 (B, T, ceil(T / 8)) of packed bits, "
            f"from NumPy or torch."
        )
    is_torch = type(mask).__module__.startswith("torch")
    int8 = dtypes.to_torch("int8") if is_torch else np.int8
    return ("mask" if name == "bool" else "mask_bits"), mask.view(int8)


def tree_of(arrays: Mapping[str, ArrayView]) -> str:
    """The name of the array that says which of the new tokens a query sees; empty if no array says it."""
    return next((name for name in TREES if name in arrays), "")


def check_terms(
    operation: str,
    arrays: Mapping[str, ArrayView],
    query: QueryShape,
    cache: CacheLayout,
    options: AttentionOptions,
    live: runtime.Runtime,
) -> None:
    """Check that the terms among the arrays fit the queries, the cache and the other options.

    Raises:
        ShapeError, DTypeError, ArchError, OptionError, CapacityError: one does not.
    """
    batch, tokens = query.batch, query.queries
    check_scores(operation, arrays, batch, query.heads, live)
    if "indices" in arrays:
        _check_indices(operation, arrays, query, cache, live)
    if options.mass and (uncounted := [name for name in UNCOUNTED if name in arrays]):
        shown = uncounted[0].removesuffix("_bits")
        raise OptionError(f"{operation}: return_mass cannot be combined with {shown}. Pass one of the two.")
    name = tree_of(arrays)
    if not name:
        return
    a = arrays[name]
    checks.on_device([("parents" if name == "parents" else "mask", a)], live, operation)
    if name == "parents":
        checks.indices(a, "parents", operation)
    shape = {"mask": (batch, tokens, tokens), "mask_bits": (batch, tokens, -(-tokens // 8)), "parents": (batch, tokens)}
    if a.shape != shape[name]:
        axes = {"mask": "(B, T, T)", "mask_bits": "(B, T, ceil(T / 8))", "parents": "(B, T)"}[name]
        shown = name.removesuffix("_bits")
        raise ShapeError(f"{operation}: {shown} is {describe(a)} where {axes} = {shape[name]} is needed.")
    if not options.causal:
        raise OptionError(
            f"{operation}: a {name.removesuffix('_bits')} and causal=False both say what queries see. Pass one of them."
        )
    if cache.kind == "ring" and tokens > cache.ring:
        raise CapacityError(
            f"{operation}: {tokens} new tokens do not fit the {cache.ring} slots of the ring, so some of the tree "
            f"would be overwritten. Use at most {cache.ring} new tokens."
        )


def check_scores(
    operation: str, arrays: Mapping[str, ArrayView], batch: int, heads: int, live: runtime.Runtime
) -> None:
    """Check that the arrays added to the scores fit the numbers of sequences and query heads.

    Raises:
        ShapeError, DTypeError, ArchError: it does not.
    """
    if not arrays:
        return
    fitting: dict[str, tuple[str, list[tuple[int, ...]]]] = {
        "sink_logits": ("(Hq,)", [(heads,)]),
        "alibi_slopes": ("(Hq,) or (B, Hq)", [(heads,), (batch, heads)]),
    }
    for name, (axes, shapes) in fitting.items():
        a = arrays.get(name)
        if a is None:
            continue
        checks.on_device([(name, a)], live, operation)
        if a.dtype is not dtypes.float32:
            raise DTypeError(f"{operation}: {name} is {describe(a)}; it must be float32.")
        if a.shape not in shapes:
            needed = " or ".join(map(str, shapes))
            raise ShapeError(f"{operation}: {name} is {describe(a)} where {axes} = {needed} is needed.")


def check_new_tokens(operation: str, terms: Mapping[str, ArrayView], tokens: int, live: runtime.Runtime) -> None:
    """Check a mask or a tree of so many new tokens, if one of the terms is that; a tree as `check_parents`.

    Raises:
        ShapeError: there are more tokens than one launch has queries.
        PositionError: a parent does not come before its token.
    """
    if tree_of(terms) and tokens > MOST_QUERIES:
        raise ShapeError(
            f"{operation}: a mask or a tree covers {tokens} new tokens. Use at most {MOST_QUERIES} at a time."
        )
    if "parents" in terms:
        check_parents(operation, terms["parents"], live)


def check_parents(operation: str, parents: ArrayView, live: runtime.Runtime) -> None:
    """Check that each parent known to the host comes before its token; -1 is the prefix.

    Raises:
        PositionError: one does not.
    """
    known = host_indices(parents, live)
    if known is None:
        return
    wrong = (known >= np.arange(known.shape[1])) | (known < -1)
    if wrong.any():
        b, t = (int(n) for n in np.argwhere(wrong)[0])
        raise PositionError(
            f"{operation}: parents[{b}, {t}]={int(known[b, t])}, which is not a token before token {t}. Use -1 (the "
            f"prefix) to {t - 1}."
        )


def indices_by_head(arrays: Mapping[str, ArrayView]) -> bool:
    """Whether each KV head reads its own tokens."""
    return "indices" in arrays and arrays["indices"].ndim == 4


def _check_indices(
    operation: str, arrays: Mapping[str, ArrayView], query: QueryShape, cache: CacheLayout, live: runtime.Runtime
) -> None:
    """Check that the form of the indices fits the queries and the cache.

    Raises:
        ShapeError, DTypeError, ArchError: it does not.
    """
    a = arrays["indices"]
    checks.on_device([("indices", a)], live, operation)
    checks.indices(a, "indices", operation)
    checks.rank(a, (3, 4), "indices", "(B, T, K), or (B, H, T, K) per KV head", operation)
    lead = (query.batch, cache.heads) if a.ndim == 4 else (query.batch,)
    needed = (*lead, query.queries)
    if a.shape[:-1] != needed:
        axes = "(B, H, T, K)" if a.ndim == 4 else "(B, T, K)"
        shown = ", ".join(map(str, needed))
        raise ShapeError(f"{operation}: indices is {describe(a)} where {axes} = ({shown}, K) is needed.")
    checks.addressable(a, a.dtype.itemsize, live, "indices", operation)


def check_selected(
    operation: str, arrays: Mapping[str, ArrayView], cache: CacheLayout, length: int, live: runtime.Runtime
) -> None:
    """Check that each index known to the host is -1 or a token of its sequence; in debug mode, also for duplicates.

    Args:
        operation: the operation's name, for messages.
        arrays: indices, and lens if they are given.
        cache: the cache that is attended over.
        length: the length of all sequences, if there is no array of lengths.
        live: the runtime.

    Raises:
        PositionError: an index is not, or a query has it twice.
        CapacityError: a ring's length is too large for its indices to be counted.
    """
    if "lens" not in arrays and cache.kind == "ring" and length >= MOST_RING_LENGTH:
        raise CapacityError(
            f"{operation}: indices count from the first token, and length={length} is beyond {MOST_RING_LENGTH}. "
            "Pass lengths as an array."
        )
    known = host_indices(arrays["indices"], live)
    if known is None or known.size == 0:
        return
    ends = _ends(arrays, cache, length, live)
    if int(known.min()) < -1 or int(known.max()) >= int(ends.min()):
        ends = ends.reshape(*ends.shape, *[1] * (known.ndim - ends.ndim))
        wrong = (known < -1) | (known >= ends)
        if wrong.any():
            at = tuple(int(n) for n in np.argwhere(wrong)[0])
            end = int(np.broadcast_to(ends, known.shape)[at])
            raise PositionError(
                f"{operation}: indices[{', '.join(map(str, at))}]={int(known[at])} is not a token of its sequence, "
                f"which has {end}. Use 0 to {end - 1}, or -1 for no token."
            )
    if live.debug:
        ordered = np.sort(known, axis=-1)
        twice = (ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)
        if twice.any():
            at = tuple(int(n) for n in np.argwhere(twice)[0])
            raise PositionError(
                f"{operation}: indices[{', '.join(map(str, at[:-1]))}] name token {int(ordered[at])} more than "
                "once, so it would be counted more than once. Name each token once."
            )


def _ends(
    arrays: Mapping[str, ArrayView], cache: CacheLayout, length: int, live: runtime.Runtime
) -> np.ndarray[Any, Any]:
    """The most tokens that there can be: of all sequences, of each, or of each KV head if it has its own indices."""
    if "lens" not in arrays:
        return np.array(length)
    lens = host_indices(arrays["lens"], live)
    if lens is None:
        return np.array(2**62 if cache.kind == "ring" else cache.capacity)
    return lens.max(axis=1) if lens.ndim == 2 and not indices_by_head(arrays) else lens


def tree_words(tokens: int) -> int:
    """The number of words for a new token: its depth, and a bit for each new token."""
    return 1 + -(-tokens // 32)


def term_numbers(arrays: Mapping[str, ArrayView], tree: ArrayView | None, tokens: int) -> Any:
    """The strides of the terms, as `AttentionTerms`."""
    from tikv.kernels.attention.parameters import AttentionTerms

    sinks, slopes = arrays.get("sink_logits"), arrays.get("alibi_slopes")
    terms: Any = AttentionTerms()
    if sinks is not None:
        terms = terms._replace(sink_head=sinks.strides[0], sink_first=sinks.offset // 4)
    if slopes is not None:
        sequence = slopes.strides[0] if slopes.ndim == 2 else 0
        terms = terms._replace(slope_sequence=sequence, slope_head=slopes.strides[-1], slope_first=slopes.offset // 4)
    if tree is not None:
        terms = terms._replace(tree_first=tree.offset // 4, tree_words=tree_words(tokens))
    return terms


def tree_launch(live: runtime.Runtime, arrays: Mapping[str, ArrayView], words: ArrayView) -> Launch:
    """The launch that writes the words of a tree."""
    from tikv.kernels.attention.tree import TreeParams, make_tree

    name = tree_of(arrays)
    source = arrays[name]
    batch, tokens = source.shape[:2]
    form = source.dtype.itemsize * 8 if name == "parents" else name.removeprefix("mask_")
    numbers = TreeParams(
        rows=batch * tokens,
        tokens=tokens,
        words=tree_words(tokens),
        to=words.offset // 4,
        source=source.offset // source.dtype.itemsize,
        source_sequence=source.strides[0],
        source_token=source.strides[1],
        source_key=source.strides[2] if source.ndim == 3 else 0,
    )
    kernel = launch.kernel(live, make_tree, live.kernel_style, form)
    return Launch(kernel.bind(numbers.rows, source, words, numbers), [source, words])
