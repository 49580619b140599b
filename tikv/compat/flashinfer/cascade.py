"""FlashInfer's functions that merge attention over several parts of a context, and its wrappers over shared parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tikv import dtypes
from tikv.arrays import Array, describe, new_like, refuse_backward, runtime_of, view
from tikv.compat.flashinfer.decode import BatchDecodeWithPagedKVCacheWrapper
from tikv.compat.flashinfer.prefill import (
    BatchPrefillWithPagedKVCacheWrapper,
    single_prefill_with_kv_cache_return_lse,
)
from tikv.compat.indices import flag, library_of
from tikv.errors import DTypeError, OptionError, ShapeError
from tikv.ops import checks
from tikv.ops.attention.merge import merge_into, merge_parts
from tikv.ops.attention.options import QUERIES

BUFFERS = ("qo_indptr_buf", "paged_kv_indptr_buf", "paged_kv_indices_buf", "paged_kv_last_page_len_buf")


def merge_state(v_a: Array, s_a: Array, v_b: Array, s_b: Array) -> tuple[Array, Array]:
    """(v, s): attention over two parts of a context, as if they were one; ``s`` is the log-sum-exp of base 2.

    Args:
        v_a, v_b: (T, H, D).
        s_a, s_b: (T, H) float32, with any strides.

    Raises:
        ShapeError, DTypeError: as `tikv.merge_states`.
    """
    return _merged("flashinfer.merge_state", v_a, s_a, v_b, s_b)


def _merged(operation: str, *states: Any) -> tuple[Any, Any]:
    merged = merge_into(operation, states, True, None, None)
    refuse_backward(merged, *states)
    return merged


def merge_state_in_place(v: Array, s: Array, v_other: Array, s_other: Array, mask: Array | None = None) -> None:
    """Merge another state into ``(v, s)`` in place, as `merge_state` does; named as in FlashInfer.

    Args:
        v, v_other: (T, H, D), NumPy or torch; the first is written.
        s, s_other: (T, H) float32; the first is written.
        mask: (T,) bool: the tokens whose states are merged; None for all.

    Raises:
        ShapeError, DTypeError: the arrays do not agree, or cannot be written. Nothing is written.

    Exactness: as `tikv.merge_states`; a state that the mask leaves out keeps its bits. Cost: the same, plus a copy of
        the result.

    Examples:
        >>> import numpy as np
        >>> from tikv.compat import flashinfer
        >>> v, s = np.ones((2, 1, 1), np.float32), np.zeros((2, 1), np.float32)
        >>> flashinfer.merge_state_in_place(v, s, 3 * v, s.copy(), np.array([True, False]))
        >>> v.ravel().tolist(), s.ravel().tolist()
        ([2.0, 1.0], [1.0, 0.0])
    """
    operation = "flashinfer.merge_state_in_place"
    library = library_of(v)
    for name, a in (("v", v), ("s", s)):
        checks.writable(view(a, name, operation), name, operation)
        if library_of(a) is not library or (library is np and not isinstance(a, np.ndarray)):
            raise DTypeError(
                f"{operation}: {name} is {type(a).__name__}. Pass v and s both from NumPy or both from torch."
            )
    merged = _merged(operation, v, s, v_other, s_other)
    where = None
    if mask is not None:
        if not str(getattr(mask, "dtype", type(mask))).endswith("bool") or tuple(mask.shape) != (v.shape[0],):
            shown = f"{getattr(mask, 'dtype', type(mask).__name__)} {tuple(getattr(mask, 'shape', ()))}"
            raise ShapeError(f"{operation}: mask is {shown}; it must be bool ({v.shape[0]},), one for each token.")
        where = np.asarray(mask) if library is np else library.as_tensor(mask, device=v.device)
    for to, result in ((v, merged[0]), (s, merged[1])):
        selected = None if where is None else where.reshape(-1, *[1] * (len(to.shape) - 1))
        if library is np:
            np.copyto(to, result, where=True if selected is None else selected)
        else:
            detached = to.detach()
            detached.copy_(result if selected is None else library.where(selected, result, detached))


def merge_states(v: Array, s: Array) -> tuple[Array, Array]:
    """(v, s): attention over any number of parts of a context, as if they were one; ``s`` is the log-sum-exp of base 2.

    Args:
        v: (T, parts, H, D), NumPy or torch, float32, float16 or bfloat16.
        s: (T, parts, H) float32, with any strides.

    Returns:
        (T, H, D) in v's dtype and (T, H) float32; 0 and -inf if there are no parts.

    Raises:
        ShapeError, DTypeError: the arrays do not agree.

    Exactness: computed in float32, and rounded once at the end. Cost: a copy of the parts in float32, and one launch.

    Examples:
        >>> import numpy as np
        >>> from tikv.compat import flashinfer
        >>> v, s = np.arange(4, dtype=np.float32).reshape(1, 4, 1, 1), np.zeros((1, 4, 1), np.float32)
        >>> v, s = flashinfer.merge_states(v, s)
        >>> v.ravel().round(4).tolist(), s.round(4).tolist()
        ([1.5], [[2.0]])
    """
    operation = "flashinfer.merge_states"
    parts, lse = view(v, "v", operation), view(s, "s", operation)
    checks.rank(parts, (4,), "v", "(T, parts, H, D)", operation)
    library = library_of(v)
    if library_of(s) is not library or (library is np and not isinstance(v, np.ndarray)):
        raise DTypeError(
            f"{operation}: v is {type(v).__name__} and s {type(s).__name__}. Pass both from NumPy or both from torch."
        )
    if parts.dtype not in QUERIES or lse.dtype is not dtypes.float32:
        raise DTypeError(
            f"{operation}: v is {describe(parts)} and s {describe(lse)}; v must be float32, float16 or "
            f"bfloat16, and s float32."
        )
    if lse.shape != parts.shape[:3] or lse.device != parts.device:
        raise ShapeError(
            f"{operation}: s is {describe(lse)} on {lse.device} where {parts.shape[:3]} on {parts.device} is needed."
        )
    tokens, number, heads, width = parts.shape
    live = runtime_of(v)
    out = new_like(v, (tokens, heads, width), parts.dtype, live, zeroed=True)
    out_lse = new_like(v, (tokens, heads), dtypes.float32, live)
    if number == 0 or 0 in parts.shape:
        out_lse[:] = -np.inf
        return out, out_lse
    if library is np:
        packed = np.concatenate((v.astype(np.float32), s[..., None]), -1)
        packed = np.ascontiguousarray(np.moveaxis(packed, 1, 0))
    else:
        packed = library.cat((v.detach().float(), s.detach()[..., None]), -1).movedim(1, 0).contiguous()
    seen = view(packed, "v", operation)
    seen = seen.restrided((number, tokens, heads, 1, width + 1), (*seen.strides[:3], 0, 1))
    to, to_lse = view(out, "out", operation), view(out_lse, "lse", operation)
    to = to.restrided((tokens, heads, 1, width), (*to.strides[:2], 0, 1))
    to_lse = to_lse.restrided((tokens, heads, 1), (*to_lse.strides, 0))
    merge_parts(operation, seen, to, to_lse, base2=True)
    refuse_backward((out, out_lse), s)
    return out, out_lse


class _Level(BatchPrefillWithPagedKVCacheWrapper):
    """One level of a cascade: its plan is checked first, and taken once those of all levels are."""

    def __init__(self, level: int, *arguments: Any, **buffers: Any) -> None:
        self.level = level
        self.take: Callable[[], None] | None = None
        super().__init__(*arguments, **buffers)

    def _operation(self, method: str) -> str:
        return f"flashinfer.MultiLevelCascadeAttentionWrapper.{method} of level {self.level}"

    def _take(self, *arguments: Any) -> None:
        self.take = self._prepared(*arguments)


class MultiLevelCascadeAttentionWrapper:
    """Attention over pages that requests share, level by level, the last of which are each request's own.

    Args:
        num_levels: how many levels there are.
        float_workspace_buffer, kv_layout, use_cuda_graph: as in `BatchPrefillWithPagedKVCacheWrapper`.
        qo_indptr_buf_arr, paged_kv_indptr_buf_arr, paged_kv_indices_buf_arr, paged_kv_last_page_len_buf_arr: with
            ``use_cuda_graph``, lists of its buffers, one for each level.

    Raises:
        OptionError, ShapeError, DTypeError: an option is not supported, or a list has the wrong length.

    Examples:
        >>> import numpy as np
        >>> from tikv.compat import flashinfer
        >>> k, v = np.zeros((3, 2, 1, 1), np.float32), np.arange(6, dtype=np.float32).reshape(3, 2, 1, 1)
        >>> wrapper = flashinfer.MultiLevelCascadeAttentionWrapper(2, np.empty(0, np.uint8))
        >>> queries, pages = [np.array([0, 2]), np.array([0, 1, 2])], [np.array([1]), np.array([0, 2])]
        >>> starts, last = [np.array([0, 1]), np.array([0, 1, 2])], [np.array([2]), np.array([2, 2])]
        >>> wrapper.plan(queries, starts, pages, last, 1, 1, 1, 2, q_data_type="float32")
        >>> wrapper.run(np.ones((2, 1, 1), np.float32), (k, v)).ravel().tolist()
        [1.5, 3.5]
    """

    def __init__(
        self,
        num_levels: int,
        float_workspace_buffer: Array,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf_arr: list[Array] | None = None,
        paged_kv_indptr_buf_arr: list[Array] | None = None,
        paged_kv_indices_buf_arr: list[Array] | None = None,
        paged_kv_last_page_len_buf_arr: list[Array] | None = None,
    ) -> None:
        operation = "flashinfer.MultiLevelCascadeAttentionWrapper"
        levels = checks.integer(num_levels, "num_levels", operation, low=1)
        self._graphs = flag(use_cuda_graph, "use_cuda_graph", operation)
        lists = (qo_indptr_buf_arr, paged_kv_indptr_buf_arr, paged_kv_indices_buf_arr, paged_kv_last_page_len_buf_arr)
        buffers: list[dict[str, Any]] = [{} for _ in range(levels)]
        for name, arrays in zip(BUFFERS, lists, strict=True):
            if not self._graphs and arrays is not None:
                raise OptionError(f"{operation}: {name}_arr needs use_cuda_graph=True. Leave it out, or pass that.")
            if self._graphs:
                for of_level, array in zip(buffers, _of_levels(operation, f"{name}_arr", arrays, levels), strict=True):
                    of_level[name] = array
        self._levels = [
            _Level(i, float_workspace_buffer, kv_layout, self._graphs, **of_level) for i, of_level in enumerate(buffers)
        ]

    @property
    def is_cuda_graph_enabled(self) -> bool:
        """Whether the wrapper was made for CUDA graphs."""
        return self._graphs

    def reset_workspace_buffer(self, float_workspace_buffer: Array, int_workspace_buffers: list[Array]) -> None:
        """Take other workspaces; as in the constructor, only the device of the first one is read."""
        for level in self._levels:
            level.reset_workspace_buffer(float_workspace_buffer, None)

    def plan(
        self,
        qo_indptr_arr: list[Array],
        paged_kv_indptr_arr: list[Array],
        paged_kv_indices_arr: list[Array],
        paged_kv_last_page_len: list[Array],
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: Any = "float16",
        kv_data_type: Any = None,
    ) -> None:
        """Say which queries and pages each part has, level by level, and the options of the runs that follow.

        Args:
            qo_indptr_arr, paged_kv_indptr_arr, paged_kv_indices_arr, paged_kv_last_page_len: lists with the four arrays
                of `BatchPrefillWithPagedKVCacheWrapper.plan` for each level, whose queries are the same: on a level
                that all requests share, they belong to one request.
            causal: on the last level, each query sees the tokens up to its own; it sees all of the others.
            num_qo_heads, num_kv_heads, head_dim, page_size, use_fp16_qk_reduction, sm_scale: as there, on each level.
            pos_encoding_mode, window_left, logits_soft_cap, rope_scale, rope_theta: as there, on each level. As in
                FlashInfer, windows and position encodings count from the end of each part.
            q_data_type, kv_data_type: as there.

        Raises:
            OptionError, ShapeError, DTypeError, PositionError: an argument is not supported, or does not fit the
                others. The plan before stays.
        """
        operation, number = "flashinfer.MultiLevelCascadeAttentionWrapper.plan", len(self._levels)
        names = ("qo_indptr_arr", "paged_kv_indptr_arr", "paged_kv_indices_arr", "paged_kv_last_page_len")
        lists = (qo_indptr_arr, paged_kv_indptr_arr, paged_kv_indices_arr, paged_kv_last_page_len)
        tables = zip(*(_of_levels(operation, *pair, number) for pair in zip(names, lists, strict=True)), strict=True)
        last = flag(causal, "causal", operation)
        sizes = (num_qo_heads, num_kv_heads, head_dim, page_size)
        options: dict[str, Any] = {
            "pos_encoding_mode": pos_encoding_mode, "use_fp16_qk_reduction": use_fp16_qk_reduction,
            "sm_scale": sm_scale, "window_left": window_left, "logits_soft_cap": logits_soft_cap,
            "rope_scale": rope_scale, "rope_theta": rope_theta, "q_data_type": q_data_type,
            "kv_data_type": kv_data_type,
        }  # fmt: skip
        for level, (starts, *pages) in zip(self._levels, tables, strict=True):
            level.plan(
                starts, pages[0], pages[1], pages[2], *sizes, causal=last and level.level == number - 1, **options
            )
        for level in self._levels:
            assert level.take is not None
            level.take()

    begin_forward = plan

    def run(self, q: Array, paged_kv_cache: Array | tuple[Array, Array]) -> Array:
        """Attend as planned, and merge the levels.

        Args:
            q: (total, Hq, D), the queries of all requests.
            paged_kv_cache: as in `batch_decode_with_paged_kv_cache`, in the wrapper's layout.

        Returns:
            (total, Hq, D). A query that sees nothing gives 0.

        Raises:
            OptionError, ShapeError, DTypeError: there is no plan, or an argument does not fit it.

        Exactness: as `tikv.paged_decode_attention` on each level; results are rounded to q's dtype on each level, and
            in each merge. Cost: one attention for each level, in which queries of one part share reads, and a merge for
            each level after the first.
        """
        *above, last = self._levels
        out, lse = last.run(q, paged_kv_cache, return_lse=True)
        for level in above:
            out, lse = merge_state(out, lse, *level.run(q, paged_kv_cache, return_lse=True))
        return out

    forward = run


class BatchDecodeWithSharedPrefixPagedKVCacheWrapper:
    """Attention of the newest tokens of requests that share a prefix, over its rows and each request's own pages.

    Args:
        float_workspace_buffer, kv_layout: as in `BatchDecodeWithPagedKVCacheWrapper`.

    FlashInfer recommends `MultiLevelCascadeAttentionWrapper` in its place.
    """

    def __init__(self, float_workspace_buffer: Array, kv_layout: str = "NHD") -> None:
        self._pages, self._kv_layout = BatchDecodeWithPagedKVCacheWrapper(float_workspace_buffer, kv_layout), kv_layout

    def reset_workspace_buffer(self, float_workspace_buffer: Array, int_workspace_buffer: Any) -> None:
        """As in `BatchDecodeWithPagedKVCacheWrapper`."""
        self._pages.reset_workspace_buffer(float_workspace_buffer, int_workspace_buffer)

    def begin_forward(
        self,
        unique_kv_indptr: Array,
        unique_kv_indices: Array,
        unique_kv_last_page_len: Array,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        data_type: Any = "float16",
    ) -> None:
        """Say which pages each request has beside the prefix.

        Args:
            unique_kv_indptr, unique_kv_indices, unique_kv_last_page_len: as ``indptr``, ``indices`` and
                ``last_page_len`` in `BatchDecodeWithPagedKVCacheWrapper.plan`.
            num_qo_heads, num_kv_heads, head_dim, page_size: the shapes of q and of the pages.
            data_type: the dtype of q, of the prefix and of the pages.

        Raises:
            OptionError, ShapeError, DTypeError, PositionError: as in `BatchDecodeWithPagedKVCacheWrapper.plan`.
        """
        table = (unique_kv_indptr, unique_kv_indices, unique_kv_last_page_len)
        self._pages.plan(*table, num_qo_heads, num_kv_heads, head_dim, page_size, q_data_type=data_type)

    def forward(
        self, q: Array, k_shared: Array, v_shared: Array, unique_kv_cache: Array | tuple[Array, Array]
    ) -> Array:
        """Attention over the prefix and the pages.

        Args:
            q: (B, Hq, D).
            k_shared, v_shared: (length, H, D) in NHD, (H, length, D) in HND: the prefix.
            unique_kv_cache: as ``paged_kv_cache`` in `BatchDecodeWithPagedKVCacheWrapper.run`.

        Returns:
            (B, Hq, D).

        Raises:
            OptionError, ShapeError, DTypeError: as in `BatchDecodeWithPagedKVCacheWrapper.run`.
        """
        return _with_prefix(
            q, (k_shared, v_shared), self._kv_layout, {}, self._pages.run_return_lse(q, unique_kv_cache)
        )

    def end_forward(self) -> None:
        """Does nothing, as in FlashInfer."""


class BatchPrefillWithSharedPrefixPagedKVCacheWrapper:
    """Attention of the new tokens of requests that share a prefix, over its rows and each request's own pages.

    Args:
        float_workspace_buffer, kv_layout: as in `BatchPrefillWithPagedKVCacheWrapper`.

    FlashInfer recommends `MultiLevelCascadeAttentionWrapper` in its place.
    """

    def __init__(self, float_workspace_buffer: Array, kv_layout: str = "NHD") -> None:
        self._pages, self._kv_layout = BatchPrefillWithPagedKVCacheWrapper(float_workspace_buffer, kv_layout), kv_layout

    def reset_workspace_buffer(self, float_workspace_buffer: Array, int_workspace_buffer: Any) -> None:
        """As in `BatchPrefillWithPagedKVCacheWrapper`."""
        self._pages.reset_workspace_buffer(float_workspace_buffer, int_workspace_buffer)

    def begin_forward(
        self,
        qo_indptr: Array,
        paged_kv_indptr: Array,
        paged_kv_indices: Array,
        paged_kv_last_page_len: Array,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
    ) -> None:
        """Say which queries each request has, and which pages beside the prefix; all are float16, as in FlashInfer.

        Args:
            qo_indptr, paged_kv_indptr, paged_kv_indices: as in `BatchPrefillWithPagedKVCacheWrapper.plan`.
            paged_kv_last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size: as there.

        Raises:
            OptionError, ShapeError, DTypeError, PositionError: as there.
        """
        table = (qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
        self._pages.plan(*table, num_qo_heads, num_kv_heads, head_dim, page_size)

    def forward(
        self,
        q: Array,
        k_shared: Array,
        v_shared: Array,
        unique_kv_cache: Array | tuple[Array, Array],
        causal: bool = False,
        use_fp16_qk_reduction: bool = False,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
    ) -> Array:
        """Attention over the prefix, which each query sees, and the pages.

        Args:
            q: (total, Hq, D), the queries of all requests.
            k_shared, v_shared: (length, H, D) in NHD, (H, length, D) in HND: the prefix.
            unique_kv_cache: as ``paged_kv_cache`` in `BatchPrefillWithPagedKVCacheWrapper.run`.
            causal: of the pages, each query sees the tokens up to its own.
            use_fp16_qk_reduction, rope_scale, rope_theta: have no effect.
            sm_scale: None for ``1 / sqrt(D)``.

        Returns:
            (total, Hq, D).

        Raises:
            OptionError, ShapeError, DTypeError: as in `BatchPrefillWithPagedKVCacheWrapper.run`.
        """
        options: dict[str, Any] = {"use_fp16_qk_reduction": use_fp16_qk_reduction, "sm_scale": sm_scale}
        options |= {"rope_scale": rope_scale, "rope_theta": rope_theta}
        state = self._pages.forward_return_lse(q, unique_kv_cache, causal, **options)
        return _with_prefix(q, (k_shared, v_shared), self._kv_layout, options, state)

    def end_forward(self) -> None:
        """Does nothing, as in FlashInfer."""


def _with_prefix(q: Array, prefix: tuple[Array, Array], layout: str, options: dict[str, Any], state: Any) -> Array:
    """The state of attention over pages, merged with attention over a prefix that each query sees."""
    return merge_state(*single_prefill_with_kv_cache_return_lse(q, *prefix, kv_layout=layout, **options), *state)[0]


def _of_levels(operation: str, name: str, arrays: Any, levels: int) -> list[Any]:
    """A list with an array for each level.

    Raises:
        ShapeError: it is no such list.
    """
    if not isinstance(arrays, tuple | list) or len(arrays) != levels:
        shown = f"{len(arrays)} arrays" if isinstance(arrays, tuple | list) else type(arrays).__name__
        raise ShapeError(f"{operation}: {name} is {shown}. Pass a list of {levels} arrays, one for each level.")
    return list(arrays)
