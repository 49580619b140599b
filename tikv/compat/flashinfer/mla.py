"""FlashInfer's attention over latent pages, as in its module of this name."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from tikv.arrays import Array, Arrays, ArrayView, describe, view
from tikv.compat.flashinfer.planned import Heads, Keys, PlannedAttention, Requests, Run, pages_of
from tikv.compat.flashinfer.pools import PageLists
from tikv.compat.flashinfer.scores import Scores, scores_of
from tikv.compat.flashinfer.wrappers import (
    Wrapper,
    paged_requests,
    planned_dtypes,
    refuse_passed,
    starts_of,
)
from tikv.compat.indices import flag, for_operation, refuse_option
from tikv.compat.ragged_rows import joined, require_library
from tikv.errors import DTypeError, OptionError, ShapeError
from tikv.ops import checks

NAMES = ("kv_indptr", "kv_indices", "kv_len_arr")


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
        qo_indptr: Array,
        kv_indptr: Array,
        kv_indices: Array,
        kv_len_arr: Array,
        num_heads: int,
        head_dim_ckv: int,
        head_dim_kpe: int,
        page_size: int,
        causal: bool,
        sm_scale: float | None,
        q_data_type: Any,
        kv_data_type: Any,
        use_profiler: bool = False,
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
            use_profiler: must be False.

        Raises:
            OptionError, ShapeError, DTypeError, PositionError: an argument is not supported, or does not fit the
                others. The plan before stays.
        """
        operation = self._operation("plan")
        refuse_passed(operation, use_profiler=use_profiler)
        heads = checks.integer(num_heads, "num_heads", operation, low=1)
        width_v = checks.integer(head_dim_ckv, "head_dim_ckv", operation, low=1)
        width = width_v + checks.integer(head_dim_kpe, "head_dim_kpe", operation)
        if sm_scale is None:
            refuse_option(operation, sm_scale=(None, "a number"))
        scores = scores_of(operation, "NONE", -1, causal, None, sm_scale, (None, None))
        dtypes_of = planned_dtypes(operation, q_data_type, kv_data_type, None)
        if dtypes_of[1].itemsize == 1:
            raise DTypeError(f"{operation}: kv_data_type={dtypes_of[1].name} is not supported. Use 16 or 32 bits.")
        starts = starts_of(operation, "qo_indptr", qo_indptr)
        arrays = (kv_indptr, kv_indices, kv_len_arr)
        requests = paged_requests(operation, starts, arrays, page_size, NAMES, of_lengths=True)
        self._take(operation, requests, Heads(heads, 1, width, width_v), scores, dtypes_of, (qo_indptr, *arrays))
        self._copies: tuple[PlannedAttention, Any] | None = None

    def run(
        self,
        q_nope: Array,
        q_pe: Array,
        ckv_cache: Array,
        kpe_cache: Array,
        out: Array | None = None,
        lse: Array | None = None,
        return_lse: bool = False,
        profiler_buffer: Array | None = None,
        kv_len: Array | None = None,
        page_table: Array | None = None,
        return_lse_base_on_e: bool = False,
        o_scale: float | None = None,
        *,
        ckv_scale: float | None = None,
        ckv_scale_arr: Array | None = None,
        kpe_scale: float | None = None,
    ) -> Arrays:
        """Attend as planned: scores are ``q_nope . ckv + q_pe . kpe``, and the values are ckv.

        Args:
            q_nope, q_pe: (total, H, head_dim_ckv) and (total, H, head_dim_kpe).
            ckv_cache, kpe_cache: (N, page_size, head_dim_ckv) and (N, page_size, head_dim_kpe). If they are adjacent
                columns of one array, ckv first, they are read in place; otherwise each run copies the requests' pages.
            out, lse: arrays for the results, shaped as q_nope and (total, H) float32; None for new ones.
            return_lse: also return the log-sum-exp, of base 2.
            return_lse_base_on_e: the log-sum-exp is of base e.
            profiler_buffer, kv_len, page_table, o_scale: must be None.
            ckv_scale, ckv_scale_arr, kpe_scale: must be None.

        Returns:
            (total, H, head_dim_ckv); with ``return_lse``, a pair. A query that sees nothing gives 0 and -inf.

        Raises:
            OptionError, ShapeError, DTypeError, PositionError: an argument is not supported, or does not fit the plan.
                Nothing is written.

        Exactness: as `tikv.paged_decode_attention`. Cost: one attention, with the two parts of q copied side by side.
        """
        operation = self._operation("run")
        refuse_passed(
            operation, profiler_buffer=profiler_buffer, kv_len=kv_len, page_table=page_table, o_scale=o_scale,
            ckv_scale=ckv_scale, ckv_scale_arr=ckv_scale_arr, kpe_scale=kpe_scale,
        )  # fmt: skip
        base_e = flag(return_lse_base_on_e, "return_lse_base_on_e", operation)
        wants_lse = flag(return_lse, "return_lse", operation)
        ckv = view(ckv_cache, "ckv_cache", operation)
        checks.rank(ckv, (3,), "ckv_cache", "(N, page_size, head_dim_ckv)", operation)
        plan = self._planned(operation, q_nope, ckv, ())
        require_library(operation, {"q_nope": q_nope, "q_pe": q_pe}, "Latent attention")
        beside = plan.heads.width - plan.heads.width_v
        _check_parts(operation, (q_nope, q_pe), ("q_nope", "q_pe"), plan.heads.width_v, beside)
        _check_parts(operation, (ckv_cache, kpe_cache), ("ckv_cache", "kpe_cache"), plan.heads.width_v, beside)
        q, keys = (joined([q_nope, q_pe]) if beside else q_nope), _adjacent(ckv, kpe_cache, beside, operation)
        arrays = (ckv_cache, kpe_cache)
        if keys is None and self._graphs:
            raise OptionError(
                f"{operation}: with use_cuda_graph=True, ckv_cache and kpe_cache must be adjacent columns of one array."
            )
        if keys is None:
            require_library(operation, {"ckv_cache": ckv_cache, "kpe_cache": kpe_cache}, "A copy of pages")
            plan, pages = self._copies = self._copies or _of_copies(plan)
            both = joined([pages_of(operation, a, pages) for a in arrays])[:, :, None]
            keys, arrays = view(both, "ckv_cache", operation), (both, both)
        return plan.run(Run(q, Keys(keys, None, arrays), {}, None, out, lse, wants_lse, base2=not base_e))

    run_return_lse = functools.partialmethod(run, return_lse=True)


def _check_parts(operation: str, parts: tuple[Any, Any], names: tuple[str, str], width: int, beside: int) -> None:
    """Check that two arrays have one dtype, these widths, and otherwise one shape."""
    first, second = (view(a, name, operation) if a.shape[-1] else a for a, name in zip(parts, names, strict=True))
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
