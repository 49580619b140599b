"""FlashInfer's attention over latent pages, as in its module of this name."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np

from tikv.arrays import Array, Arrays, ArrayView, describe, view
from tikv.compat.flashinfer.planned import Heads, Keys, PlannedAttention, Requests, Run, pages_of
from tikv.compat.flashinfer.pools import PageLists
from tikv.compat.flashinfer.scores import Scores, scores_of
from tikv.compat.flashinfer.wrappers import (
    Wrapper,
    check_pdl,
    paged_requests,
    planned_dtypes,
    refuse_passed,
    starts_of,
)
from tikv.compat.indices import Indices, flag, for_operation, refuse_option
from tikv.compat.ragged_rows import joined, on_device_of, require_library, with_one_head
from tikv.errors import DTypeError, OptionError, PositionError, ShapeError
from tikv.ops import checks
from tikv.ops.indices import host_integers
from tikv.runtime import current

NAMES = ("kv_indptr", "kv_indices", "kv_len_arr")
CSR, DENSE = ("qo_indptr", *NAMES), ("cum_seq_lens_q", "block_tables", "seq_lens")
CHOICES = {
    "query_layout": ("packed", "split"),
    "kv_cache_layout": ("packed", "split"),
    "lse_mode": ("none", "base2", "basee"),
    "output_scale": ("none",),
    "scale_mode": ("default",),
}


class MLAPlanMetadata(NamedTuple):
    """Which queries and pages each request has, for `BatchMLAPagedAttentionWrapper.plan`; made by `csr` or `dense`."""

    qo_indptr: Any = None
    kv_indptr: Any = None
    kv_indices: Any = None
    kv_len_arr: Any = None
    cum_seq_lens_q: Any = None
    block_tables: Any = None
    seq_lens: Any = None
    max_q_len: Any = None

    @classmethod
    def csr(cls, qo_indptr: Array, kv_indptr: Array, kv_indices: Array, kv_len_arr: Array) -> MLAPlanMetadata:
        """The pages of all requests, one after the other; the arrays are those of `plan`."""
        return cls(qo_indptr, kv_indptr, kv_indices, kv_len_arr)

    @classmethod
    def dense(
        cls, cum_seq_lens_q: Array, block_tables: Array, seq_lens: Array, max_q_len: int | None = None
    ) -> MLAPlanMetadata:
        """A table with a row of pages for each request; the arrays are those of `plan`."""
        return cls(cum_seq_lens_q=cum_seq_lens_q, block_tables=block_tables, seq_lens=seq_lens, max_q_len=max_q_len)


class BatchMLAPagedAttentionWrapper(Wrapper):
    """Attention with latent keys, whose first part is the values too, over the pages of several requests.

    Args:
        float_workspace_buffer: an array on the device of the queries; its memory is not used.
        backend: "auto", "fa2" or "fa3", without effect.
        use_cuda_graph: as in `BatchPrefillWithPagedKVCacheWrapper`, over keys that are read in place.
        qo_indptr, kv_indptr, kv_indices, kv_len_arr: with ``use_cuda_graph``, arrays into which plans copy their
            indices.

    Raises:
        OptionError, DTypeError: an option is not supported.
    """

    def __init__(
        self,
        float_workspace_buffer: Array,
        use_cuda_graph: bool = False,
        qo_indptr: Array | None = None,
        kv_indptr: Array | None = None,
        kv_indices: Array | None = None,
        kv_len_arr: Array | None = None,
        backend: str = "auto",
    ) -> None:
        buffers = {
            "qo_indptr": qo_indptr,
            "kv_indptr": kv_indptr,
            "kv_indices": kv_indices,
            "kv_len_arr": kv_len_arr,
        }
        super().__init__(float_workspace_buffer, "NHD", backend, {}, (use_cuda_graph, buffers), tiled=True)

    def plan(
        self,
        qo_indptr: Array | None = None,
        kv_indptr: Array | None = None,
        kv_indices: Array | None = None,
        kv_len_arr: Array | None = None,
        num_heads: int | None = None,
        head_dim_ckv: int | None = None,
        head_dim_kpe: int | None = None,
        page_size: int | None = None,
        causal: bool | None = None,
        sm_scale: float | None = None,
        q_data_type: Any = None,
        kv_data_type: Any = None,
        use_profiler: bool = False,
        *,
        metadata: MLAPlanMetadata | None = None,
        cum_seq_lens_q: Array | None = None,
        block_tables: Array | None = None,
        seq_lens: Array | None = None,
        max_q_len: int | None = None,
        query_layout: str | None = None,
        kv_cache_layout: str | None = None,
        lse_mode: str = "none",
        output_dtype: Any = None,
        output_scale: str = "none",
        scale_mode: str = "default",
        skip_softmax: bool = False,
        enable_pdl: bool | None = None,
        use_sinks: bool = False,
    ) -> None:
        """Say which queries and pages each request has, and the options of the runs that follow. Indices are copied.

        Args:
            qo_indptr: (B + 1,): where each request's queries start, on the host or the device.
            kv_indptr: (B + 1,): where its pages start; more entries are not read, as in FlashInfer.
            kv_indices: the pages of all requests, one after the other.
            kv_len_arr: (B,): the tokens of each request.
            num_heads, head_dim_ckv, head_dim_kpe, page_size: the shapes of q and of the pages; ``head_dim_kpe`` may be
                0.
            causal: each query sees the tokens up to its own; otherwise it sees all.
            sm_scale: factor of the scores.
            q_data_type, kv_data_type: the dtypes of q and of the pages, which `run` checks; no 8-bit floats.
            use_profiler, skip_softmax: must be False.
            metadata: an `MLAPlanMetadata` in place of the four arrays, or of the next three.
            cum_seq_lens_q, block_tables, seq_lens: in place of the four arrays, ``qo_indptr``, (B, pages) the pages of
                each request, and its tokens.
            max_q_len, enable_pdl: have no effect.
            query_layout, kv_cache_layout: None, "packed" or "split", without effect: `run` takes both.
            lse_mode: "none", "base2" or "basee", without effect: `run` says what is returned.
            output_dtype: None, or the dtype of q.
            output_scale, scale_mode: must be "none" and "default".
            use_sinks: whether runs have ``sinks``.

        Raises:
            OptionError, ShapeError, DTypeError, PositionError: an argument is not supported, or does not fit the
                others. The plan before stays.
        """
        operation = self._operation("plan")
        refuse_passed(operation, use_profiler=use_profiler, skip_softmax=skip_softmax)
        options = {"query_layout": query_layout, "kv_cache_layout": kv_cache_layout, "lse_mode": lse_mode}
        options |= {"output_scale": output_scale, "scale_mode": scale_mode}
        for name, value in options.items():
            if not (value is None and name.endswith("layout")) and value not in CHOICES[name]:
                refuse_option(operation, **{name: (value, " or ".join(map(repr, CHOICES[name])))})
        checks.integer_or_none(max_q_len, "max_q_len", operation)
        check_pdl(operation, enable_pdl)
        has_sinks = flag(use_sinks, "use_sinks", operation)
        heads = checks.integer(num_heads, "num_heads", operation, low=1)
        width_v = checks.integer(head_dim_ckv, "head_dim_ckv", operation, low=1)
        width = width_v + checks.integer(head_dim_kpe, "head_dim_kpe", operation)
        page = checks.integer(page_size, "page_size", operation, low=1)
        if sm_scale is None:
            refuse_option(operation, sm_scale=(None, "a number"))
        scores = scores_of(operation, "NONE", -1, causal, None, sm_scale, (None, None))
        for name, value in (("q_data_type", q_data_type), ("kv_data_type", kv_data_type)):
            if value is None:
                refuse_option(operation, **{name: (None, "a dtype")})
        dtypes_of = planned_dtypes(operation, q_data_type, kv_data_type, output_dtype, name="output_dtype")
        if dtypes_of[1].itemsize == 1:
            raise DTypeError(f"{operation}: kv_data_type={dtypes_of[1].name} is not supported. Use 16 or 32 bits.")
        csr = (qo_indptr, kv_indptr, kv_indices, kv_len_arr)
        dense = (cum_seq_lens_q, block_tables, seq_lens)
        of_queries, *arrays = _lists(operation, metadata, csr, dense, page)
        starts = starts_of(operation, "qo_indptr", of_queries)
        requests = paged_requests(operation, starts, (arrays[0], arrays[1], arrays[2]), page, NAMES, of_lengths=True)
        self._take(operation, requests, Heads(heads, 1, width, width_v), scores, dtypes_of, (of_queries, *arrays))
        self._copies: tuple[PlannedAttention, Any] | None = None
        self._has_sinks = has_sinks

    def run(
        self,
        q_nope: Array | None = None,
        q_pe: Array | None = None,
        ckv_cache: Array | None = None,
        kpe_cache: Array | None = None,
        out: Array | None = None,
        lse: Array | None = None,
        return_lse: bool = False,
        profiler_buffer: Array | None = None,
        kv_len: Array | None = None,
        page_table: Array | None = None,
        return_lse_base_on_e: bool = False,
        o_scale: float | None = None,
        *,
        query: Array | tuple[Array, Array] | None = None,
        kv_cache: Array | tuple[Array, Array] | None = None,
        ckv_scale: float | None = None,
        ckv_scale_arr: Array | None = None,
        kpe_scale: float | None = None,
        sinks: Array | None = None,
        skip_softmax_threshold_scale_factor: float | None = None,
        bmm1_scale: Any = None,
        bmm2_scale: Any = None,
    ) -> Arrays:
        """Attend as planned: scores are ``q_nope . ckv + q_pe . kpe``, and the values are ckv.

        Args:
            q_nope, q_pe: (total, H, head_dim_ckv) and (total, H, head_dim_kpe).
            ckv_cache, kpe_cache: (N, page_size, head_dim_ckv) and (N, page_size, head_dim_kpe). If they are adjacent
                columns of one array, ckv first, they are read in place; otherwise each run copies the requests' pages.
            out, lse: arrays for the results, shaped as q_nope and (total, H) float32; None for new ones.
            return_lse: also return the log-sum-exp, of base 2.
            return_lse_base_on_e: the log-sum-exp is of base e.
            query, kv_cache: in place of the four arrays, (q_nope, q_pe) and (ckv_cache, kpe_cache), or each as one
                array with the columns of both, which is read in place.
            sinks: (H,) float32, with ``use_sinks`` in the plan: one more logit for each head, which counts in the
                denominator only.
            profiler_buffer, kv_len, page_table, o_scale: must be None.
            ckv_scale, ckv_scale_arr, kpe_scale, bmm1_scale, bmm2_scale, skip_softmax_threshold_scale_factor: must be
                None.

        Returns:
            (total, H, head_dim_ckv); with ``return_lse``, a pair. A query that sees nothing gives 0 and -inf.

        Raises:
            OptionError, ShapeError, DTypeError, PositionError: an argument is not supported, or does not fit the plan.
                Nothing is written.

        Exactness: as `tikv.paged_decode_attention`. Cost: one attention; the two parts of q are copied side by side
            unless ``query`` is one array.
        """
        operation = self._operation("run")
        refuse_passed(
            operation, profiler_buffer=profiler_buffer, kv_len=kv_len, page_table=page_table, o_scale=o_scale,
            ckv_scale=ckv_scale, ckv_scale_arr=ckv_scale_arr, kpe_scale=kpe_scale, bmm1_scale=bmm1_scale,
            bmm2_scale=bmm2_scale, skip_softmax_threshold_scale_factor=skip_softmax_threshold_scale_factor,
        )  # fmt: skip
        base_e = flag(return_lse_base_on_e, "return_lse_base_on_e", operation)
        wants_lse = flag(return_lse, "return_lse", operation)
        of_q = _parts(operation, "query", query, {"q_nope": q_nope, "q_pe": q_pe})
        of_keys = _parts(operation, "kv_cache", kv_cache, {"ckv_cache": ckv_cache, "kpe_cache": kpe_cache})
        first_name, first = next(iter(of_keys.items()))
        pages = view(first, first_name, operation)
        checks.rank(pages, (3,), first_name, "(N, page_size, columns)", operation)
        plan = self._planned(operation, next(iter(of_q.values())), pages, ())
        if (sinks is not None) is not self._has_sinks:
            raise OptionError(
                f"{operation}: sinks are {'missing' if sinks is None else 'passed'}, and the plan has "
                f"use_sinks={self._has_sinks}. Pass sinks if the plan says so."
            )
        q = self._queries(operation, plan, of_q)
        plan, keys = self._keys(operation, plan, of_keys)
        return plan.run(Run(q, keys, {}, sinks, out, lse, wants_lse, base2=not base_e))

    def _queries(self, operation: str, plan: PlannedAttention, of_q: dict[str, Any]) -> Any:
        """The queries with the columns of both parts."""
        width, beside = plan.heads.width_v, plan.heads.width - plan.heads.width_v
        if len(of_q) == 1:
            return of_q["query"]
        require_library(operation, of_q, "Latent attention")
        _check_parts(operation, of_q, width, beside)
        return joined([*of_q.values()]) if beside else of_q["q_nope"]

    def _keys(self, operation: str, plan: PlannedAttention, of_keys: dict[str, Any]) -> tuple[PlannedAttention, Keys]:
        """The pages of keys, in place if the columns of both parts are adjacent, and a plan over them."""
        width, beside = plan.heads.width_v, plan.heads.width - plan.heads.width_v
        if len(of_keys) == 1:
            cache = view(of_keys["kv_cache"], "kv_cache", operation)
            return plan, Keys(with_one_head(cache, 2), None, (of_keys["kv_cache"],) * 2)
        _check_parts(operation, of_keys, width, beside)
        ckv_cache, kpe_cache = arrays = tuple(of_keys.values())
        keys = _adjacent(view(ckv_cache, "ckv_cache", operation), kpe_cache, beside, operation)
        if keys is None and self._graphs:
            raise OptionError(
                f"{operation}: with use_cuda_graph=True, ckv_cache and kpe_cache must be adjacent columns of one array."
            )
        if keys is None:
            require_library(operation, of_keys, "A copy of pages")
            plan, pages = self._copies = self._copies or _of_copies(plan)
            both = joined([pages_of(operation, a, pages) for a in arrays])[:, :, None]
            return plan, Keys(view(both, "ckv_cache", operation), None, (both, both))
        return plan, Keys(keys, None, (ckv_cache, kpe_cache))

    run_return_lse = functools.partialmethod(run, return_lse=True)


def _parts(operation: str, name: str, value: Any, pair: dict[str, Any]) -> dict[str, Any]:
    """The arrays of queries or keys by name: one with the columns of both parts, or two.

    Raises:
        OptionError: neither is passed, or both.
    """
    if value is None:
        for missing in (part for part, array in pair.items() if array is None):
            raise OptionError(f"{operation}: {missing} is missing. Pass {name}, or {' and '.join(pair)}.")
        return pair
    for part in (part for part, array in pair.items() if array is not None):
        raise OptionError(f"{operation}: {name} and {part} are both given. Pass one of them.")
    if not isinstance(value, tuple | list):
        return {name: value}
    if len(value) != 2 or any(isinstance(part, tuple | list) for part in value):
        raise OptionError(f"{operation}: {name} has {len(value)} parts. Pass one array, or {' and '.join(pair)}.")
    return dict(zip(pair, value, strict=True))


def _lists(
    operation: str, metadata: Any, csr: tuple[Any, ...], dense: tuple[Any, ...], page: int
) -> tuple[Any, Any, Any, Any]:
    """(qo_indptr, kv_indptr, kv_indices, kv_len_arr) of a plan, however they are passed.

    Raises:
        OptionError: they are passed in two ways, or some are missing.
        PositionError: a request needs more pages than a row of the table has.
    """
    if metadata is not None:
        if any(a is not None for a in (*csr, *dense)):
            raise OptionError(f"{operation}: metadata and arrays of indices are both given. Pass one of them.")
        for names in (CSR, DENSE):
            if not all(hasattr(metadata, name) for name in names):
                raise OptionError(
                    f"{operation}: metadata is {type(metadata).__name__}. Pass MLAPlanMetadata.csr(...) or "
                    "MLAPlanMetadata.dense(...)."
                )
        csr, dense = (tuple(getattr(metadata, name) for name in names) for names in (CSR, DENSE))
    passed = [any(a is not None for a in arrays) for arrays in (csr, dense)]
    if all(passed):
        raise OptionError(f"{operation}: {CSR[0]} and {DENSE[0]} are two descriptions of the pages. Pass one of them.")
    names, arrays = (DENSE, dense) if passed[1] else (CSR, csr)
    for name, array in zip(names, arrays, strict=True):
        if array is None:
            raise OptionError(f"{operation}: {name} is missing. Pass {', '.join(CSR)}, or {', '.join(DENSE)}.")
    if not passed[1]:
        return csr[0], csr[1], csr[2], csr[3]
    starts = starts_of(operation, "cum_seq_lens_q", dense[0])
    lengths = np.array(host_integers(dense[2], "seq_lens", operation, current()), np.int64)
    table = Indices(operation, {"block_tables": dense[1]}).array("block_tables", (None, None), "(B, pages)")
    pages = -(-lengths // page)
    if len(lengths) != len(starts) - 1 or table.shape[0] != len(lengths):
        raise ShapeError(
            f"{operation}: {len(starts) - 1} requests have {len(lengths)} seq_lens and {table.shape[0]} rows of "
            "block_tables; all need one number."
        )
    wrong = (lengths < 0) | (pages > table.shape[1])
    if wrong.any():
        b = int(np.argmax(wrong))
        raise PositionError(
            f"{operation}: seq_lens[{b}]={int(lengths[b])}; {table.shape[1]} pages of {page} tokens have room for 0 to "
            f"{table.shape[1] * page}."
        )
    indptr = np.cumsum([0, *pages])
    rows = np.repeat(np.arange(len(pages)), pages)
    entries = rows * table.shape[1] + np.arange(indptr[-1]) - indptr[:-1][rows]
    indices = table.reshape(-1)[on_device_of(entries, table)]
    return dense[0], indptr, indices, lengths


def _check_parts(operation: str, parts: dict[str, Any], width: int, beside: int) -> None:
    """Check that two arrays have one dtype, these widths, and otherwise one shape."""
    names = tuple(parts)
    first, second = (view(a, name, operation) if a.shape[-1] else a for name, a in parts.items())
    shapes = tuple(first.shape), tuple(second.shape)
    if shapes[0][:-1] != shapes[1][:-1] or (shapes[0][-1], shapes[1][-1]) != (width, beside):
        raise ShapeError(
            f"{operation}: {names[0]} is {shapes[0]} and {names[1]} {shapes[1]}; the plan needs the widths {width} and "
            f"{beside}, and otherwise one shape."
        )
    if beside and first.dtype is not second.dtype:
        raise DTypeError(
            f"{operation}: {names[0]} is {describe(first)} and {names[1]} {describe(second)}; both need one dtype."
        )


def _adjacent(ckv: ArrayView, kpe_cache: Any, beside: int, operation: str) -> ArrayView | None:
    """Both parts of the keys as pages (N, page_size, 1, width) in place, if they are columns of one array."""
    (pages, page, width), (row, token, last) = ckv.shape, ckv.strides
    if beside:
        kpe = view(kpe_cache, "kpe_cache", operation)
        apart = (kpe.ptr + kpe.offset) - (ckv.ptr + ckv.offset)
        if ckv.handle is not kpe.handle or ckv.strides != kpe.strides or ckv.device != kpe.device:
            return None
        if apart != width * ckv.dtype.itemsize:
            return None
    return ckv.restrided((pages, page, 1, width + beside), (row, token, 0, last))


def _of_copies(plan: PlannedAttention) -> tuple[PlannedAttention, Any]:
    """The same plan for copies of the requests' pages, and these pages."""
    requests: Requests = plan.requests
    lists: Any = requests.lists
    first, last = int(lists.starts[0]), int(lists.starts[-1])
    copies = PageLists(lists.starts - first, lists.lengths, np.arange(last - first))
    requests = requests._replace(lists=copies)
    scores: Scores = plan.scores
    pages = for_operation(lists.pages[first:last], plan.like)
    return PlannedAttention(plan.operation, requests, plan.heads, scores, plan.like), pages
