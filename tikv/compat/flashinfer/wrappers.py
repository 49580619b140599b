"""What FlashInfer's wrappers share: their workspace, the options of plans that change nothing here, and dtypes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from tikv import dtypes
from tikv.arrays import Array, ArrayView, view
from tikv.compat.flashinfer.nvfp4 import code_pools, is_uint8
from tikv.compat.flashinfer.planned import Heads, Keys, PlannedAttention, PlanRoom, Requests, Run
from tikv.compat.flashinfer.pools import check_layout, page_lists, pools_of
from tikv.compat.flashinfer.scores import Scores
from tikv.compat.indices import flag, library_of, refuse_option
from tikv.errors import CapacityError, DTypeError, OptionError, PositionError, ShapeError
from tikv.formats import GROUP_FORMATS
from tikv.ops import checks
from tikv.ops.indices import host_integers
from tikv.ops.quantized_arrays import Quantized
from tikv.runtime import current

BACKENDS = ("auto", "fa2", "fa3")  # those of FlashInfer whose arguments mean the same
PAGED = ("paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len")


class Wrapper:
    """A wrapper of FlashInfer: `plan` sets its plan, which `run` follows.

    Args:
        workspace: an array whose device alone is read.
        kv_layout, backend: as in FlashInfer.
        refused: options that must be None or False, by name.
        graphs: whether plans keep their arrays for CUDA graphs, and then the caller's buffers, by name, into which each
            plan copies its indices.
        tiled: whether requests may have different numbers of queries.
        most_queries: with CUDA graphs, the most queries of a plan; None for those of the first plan.
    """

    def __init__(
        self, workspace: Any, kv_layout: Any, backend: Any, refused: dict[str, Any],
        graphs: tuple[Any, dict[str, Any]], tiled: bool, most_queries: Any = None,
    ) -> None:  # fmt: skip
        operation = self._operation("__init__")
        check_layout(kv_layout, operation)
        if not hasattr(workspace, "dtype"):
            raise DTypeError(
                f"{operation}: the workspace is {type(workspace).__name__}. Pass an array on the device of the queries."
            )
        check_backend(operation, backend)
        refuse_passed(operation, **refused)
        self._graphs, self._buffers, self._tiled = flag(graphs[0], "use_cuda_graph", operation), graphs[1], tiled
        if not self._graphs:
            refuse_passed(operation, **self._buffers)
        for name, buffer in self._buffers.items() if self._graphs else ():
            if buffer is None:
                raise OptionError(f"{operation}: use_cuda_graph=True needs {name}. Pass an int32 array on the device.")
            checks.rank(view(buffer, name, operation), (1,), name, "one axis", operation)
            checks.indices(view(buffer, name, operation), name, operation)
            checks.writable(view(buffer, name, operation), name, operation)
        self._most_queries = checks.integer_or_none(most_queries, "max_total_num_rows", operation)
        if self._most_queries is not None and not self._graphs:
            raise OptionError(f"{operation}: max_total_num_rows={most_queries} needs use_cuda_graph=True.")
        self._workspace, self._kv_layout = workspace, kv_layout
        self._plan: PlannedAttention | None = None
        self._dtypes: tuple[Any, Any] = (None, None)

    @property
    def is_cuda_graph_enabled(self) -> bool:
        """Whether the wrapper was made for CUDA graphs."""
        return self._graphs

    def reset_workspace_buffer(self, float_workspace_buffer: Any, int_workspace_buffer: Any) -> None:
        """Take other workspaces; as in the constructor, only the device of the first one is read."""
        self._workspace = float_workspace_buffer

    def end_forward(self) -> None:
        """Does nothing, as in FlashInfer."""

    def _operation(self, method: str) -> str:
        return f"flashinfer.{type(self).__name__}.{method}"

    def _take(self, *arguments: Any) -> None:
        """Make the plan that `_prepared` describes."""
        self._prepared(*arguments)()

    def _prepared(
        self, operation: str, requests: Requests, heads: Heads, scores: Scores, planned: tuple[Any, Any],
        indices: tuple[Any, ...], tokens: Any = None,
    ) -> Callable[[], None]:  # fmt: skip
        """A checked plan, which becomes the wrapper's when the result is called.

        `indices` are then copied into the buffers, in their order.

        Raises:
            OptionError, CapacityError: with CUDA graphs, the plan needs more than the first one, or other options.
        """
        like, run = self._workspace, self._operation("run")
        if not self._graphs:
            plan = PlannedAttention(run, requests, heads, scores, like, tokens)
            return functools.partial(self._become, plan, planned, None, ())
        if tokens is not None:
            raise OptionError(f"{operation}: a mask with use_cuda_graph=True is not supported. Use a wrapper without.")
        before, entries = self._plan, 0 if requests.lists is None else len(requests.lists.pages)
        for (name, buffer), array in zip(self._buffers.items(), indices, strict=True):
            if (len(array) > len(buffer)) if "indices" in name else (len(array) != len(buffer)):
                raise CapacityError(
                    f"{operation}: {name} has {len(buffer)} entries, and the plan has {len(array)}. With CUDA graphs, "
                    "the number of requests stays, and there are at most as many indices as their buffer has entries."
                )
        total = int(requests.starts[-1])
        if before is None:
            most = self._most_queries or total
            if not most:
                raise CapacityError(f"{operation}: no queries. With CUDA graphs, plan for the most queries first.")
            pages = [len(buffer) for name, buffer in self._buffers.items() if "indices" in name]
            room = PlanRoom(most, max(pages, default=0), self._tiled)
        else:
            assert before.room is not None
            room = before.room
            alike = (before.heads, before.scores, before.requests.page, self._dtypes)
            if (heads, scores, requests.page, planned) != alike:
                raise OptionError(
                    f"{operation}: these options are not those of the first plan, and captured graphs keep them. Use a "
                    "wrapper for each set of options."
                )
        if total > room.total or (total < room.total and not room.tiled):
            raise CapacityError(
                f"{operation}: {total} queries, and there is room for {room.total}. With CUDA graphs, plan for the "
                "most queries first."
            )
        plan = PlannedAttention(run, requests, heads, scores, like, room=room)
        if plan.tokens is not None or (plan.key_positions is not None and not entries and plan.pages is None):
            raise OptionError(
                f"{operation}: with use_cuda_graph=True, rows with ROPE_LLAMA and windows with ALIBI are not supported."
            )
        return functools.partial(self._become, plan, planned, before, indices)

    def _become(
        self, plan: PlannedAttention, planned: tuple[Any, Any], before: PlannedAttention | None, indices: Any
    ) -> None:
        """Take a plan, or let the plan before follow it; `indices` go into the buffers."""
        for buffer, array in zip(self._buffers.values(), indices, strict=False):
            fill(buffer, array)
        if before is None:
            self._plan, self._dtypes = plan, planned
        else:
            before.follow(plan)

    def _planned(self, operation: str, q: Array, k: ArrayView | Quantized, extra: tuple[Any, ...]) -> PlannedAttention:
        """The plan, once q and the keys have the dtypes that it was made for; nvfp4 is planned as uint8.

        Raises:
            OptionError: there is no plan, or arguments for kernels of a caller's own.
            DTypeError: the dtypes differ.
        """
        if extra:
            raise OptionError(f"{operation}: {len(extra)} more arguments, for kernels of your own. Leave them out.")
        if self._plan is None:
            raise OptionError(f"{operation}: there is no plan yet. Call plan first.")
        of_keys = GROUP_FORMATS["nvfp4"] if isinstance(k, Quantized) else k.dtype
        pairs = (("q", view(q, "q", operation).dtype, self._dtypes[0]), ("the keys", of_keys, self._dtypes[1]))
        for name, dtype, planned in pairs:
            if dtype is not planned:
                option = "q_data_type" if name == "q" else "kv_data_type"
                raise DTypeError(
                    f"{operation}: {name}: {dtype.name}, and the plan has {option}={planned.name}. Pass {option} to "
                    "plan."
                )
        return self._plan

    def _replan(self, operation: str, scores: Scores) -> None:
        """Give the plan other options, for this run and later ones, as `forward` of FlashInfer does.

        Raises:
            OptionError: there is no plan, a captured graph follows it, or its mask was read with another window.
        """
        plan = self._plan
        if plan is None:
            raise OptionError(f"{operation}: there is no plan yet. Call plan first.")
        if scores == plan.scores:
            return
        if self._graphs:
            raise OptionError(
                f"{operation}: with use_cuda_graph=True, options of forward must be those of the plan. Pass them to "
                "plan, and call run."
            )
        if plan.of_mask is not None and scores.sight.left != plan.scores.sight.left:
            refuse_option(operation, window_left=(scores.sight.left, f"{plan.scores.sight.left}, as in the plan"))
        self._plan = PlannedAttention(plan.operation, plan.requests, plan.heads, scores, plan.like, plan.of_mask)

    def _attend(self, operation: str, plan: PlannedAttention, run: Run, lse_base: Any, lse_layout: Any) -> Any:
        """`PlannedAttention.run`, with log-sum-exps of this base and layout.

        Raises:
            TikvError: an option or an array does not fit. Nothing is written.
        """
        for name, value, values in (("lse_base", lse_base, ("log2", "ln")), ("lse_layout", lse_layout, ("NH", "HN"))):
            if not isinstance(value, str) or value not in values:
                refuse_option(operation, **{name: (value, " or ".join(map(repr, values)))})
        return plan.run(run._replace(base2=lse_base == "log2", heads_first=lse_layout == "HN"))

    def _check_window(self, operation: str, window_left: Any) -> None:
        """Refuse another window than that of the plan."""
        if window_left is not None and self._plan is not None:
            planned = self._plan.scores.sight.left
            if checks.integer(window_left, "window_left", operation, low=-1) != planned:
                refuse_option(operation, window_left=(window_left, f"None, or {planned} as in the plan"))


def fill(buffer: Array, indices: Array) -> None:
    """Copy indices to the start of a buffer."""
    if isinstance(buffer, np.ndarray):
        buffer[: len(indices)] = np.asarray(indices)
    else:
        library = library_of(buffer)
        buffer[: len(indices)].copy_(library.as_tensor(indices))


def refuse_passed(operation: str, **options: Any) -> None:
    """Refuse every option that is neither None nor False.

    Raises:
        OptionError: it names the option.
    """
    for name, value in options.items():
        if value is not None and value is not False:
            shown = f"={value!r}" if isinstance(value, bool | int | float | str) else ""
            raise OptionError(f"{operation}: {name}{shown} is not supported. Leave it out.")


def check_backend(operation: str, backend: Any) -> None:
    """Refuse the backends of FlashInfer whose arguments mean something else."""
    if not isinstance(backend, str) or backend not in BACKENDS:
        refuse_option(operation, backend=(backend, "'auto', 'fa2' or 'fa3', which change nothing here"))


def check_hints(operation: str, flags: dict[str, Any], integers: dict[str, Any]) -> None:
    """Check options that change nothing here: True or False, and integers or None.

    Raises:
        OptionError, DTypeError: one is something else.
    """
    for name, value in flags.items():
        flag(value, name, operation)
    for name, value in integers.items():
        checks.integer_or_none(value, name, operation)


def check_pdl(operation: str, enable_pdl: Any) -> None:
    """Check an option that tunes FlashInfer's launches, and changes nothing here."""
    if enable_pdl is not None:
        flag(enable_pdl, "enable_pdl", operation)


def planned_dtypes(
    operation: str, of_queries: Any, of_keys: Any, of_results: Any, default: Any = None, codes: bool = False,
    name: str = "o_data_type",
) -> tuple[dtypes.DType, Any]:  # fmt: skip
    """The dtypes of queries and keys that a plan names; with `codes`, keys of uint8 are those of nvfp4.

    `name` is that of the argument `of_results`.

    Raises:
        DTypeError: one is not a dtype, or results are to have another one than queries.
    """
    queries = dtypes.parse(default if of_queries is None else of_queries, operation)
    of_keys = default if of_keys is None else of_keys
    if is_uint8(of_keys) and not codes:
        raise DTypeError(
            f"{operation}: kv_data_type={of_keys} is nvfp4, which is not supported here. Use pages, and a wrapper over "
            "them."
        )
    if is_uint8(of_keys):
        keys: Any = GROUP_FORMATS["nvfp4"]
    else:
        keys = queries if of_keys is None else dtypes.parse(of_keys, operation)
    if of_results is not None and dtypes.parse(of_results, operation) is not queries:
        raise DTypeError(
            f"{operation}: {name}={of_results} is not supported. Results have the dtype of q, {queries.name}."
        )
    return queries, keys


def heads_of(operation: str, **numbers: Any) -> tuple[int, ...]:
    """Sizes that a plan names, each at least 1.

    Raises:
        PositionError: one is less.
        ShapeError: the query heads do not divide among the KV heads.
    """
    sizes = {name: checks.integer(value, name, operation, low=1) for name, value in numbers.items()}
    queries, keys = sizes["num_qo_heads"], sizes["num_kv_heads"]
    if queries % keys:
        raise ShapeError(f"{operation}: {queries} query heads do not divide among {keys} KV heads.")
    return tuple(sizes.values())


def starts_of(operation: str, name: str, starts: Array) -> np.ndarray[Any, Any]:
    """(B + 1,) int64 on the host, ascending from 0.

    Raises:
        ShapeError, DTypeError, PositionError: they are not.
    """
    array = np.array(host_integers(starts, name, operation, current()), np.int64)
    if not array.size:
        raise ShapeError(f"{operation}: {name} is empty; it needs one more entry than there are requests.")
    if array[0] != 0 or (np.diff(array) < 0).any():
        raise PositionError(f"{operation}: {name} is {array.tolist()}; it must ascend from 0.")
    return array


def paged_requests(
    operation: str, starts: np.ndarray[Any, Any], arrays: tuple[Any, Any, Any], page: Any,
    names: tuple[str, str, str] = PAGED, of_lengths: bool = False,
) -> Requests:  # fmt: skip
    """Requests whose keys lie in pages; `arrays` and `names` as in `page_lists`."""
    page = checks.integer(page, "page_size", operation, low=1)
    lists = page_lists(operation, names, arrays, len(starts) - 1, page, of_lengths)
    return Requests(starts, lists.lengths, lists=lists, page=page)


def keys_in_pages(paged_kv_cache: Any, layout: str, operation: str, kv_cache_sf: Any = None) -> Keys:
    """The keys and values of FlashInfer's `paged_kv_cache`; in nvfp4 if there are scales of groups, `kv_cache_sf`."""
    if kv_cache_sf is not None:
        pools = code_pools(operation, paged_kv_cache, kv_cache_sf, layout)
        return Keys(pools.k, pools.v, (paged_kv_cache,) * 2, layout, pools.every)
    pair = isinstance(paged_kv_cache, tuple | list)
    if any(is_uint8(getattr(pool, "dtype", None)) for pool in (paged_kv_cache if pair else (paged_kv_cache,))):
        raise OptionError(f"{operation}: pages of uint8 hold nvfp4, and its scales are missing. Pass kv_cache_sf.")
    k, v = pools_of(paged_kv_cache, layout, operation)
    for a in (k, v):
        if not isinstance(a, ArrayView):
            raise DTypeError(f"{operation}: paged_kv_cache holds a {type(a).__name__}. Pass plain arrays.")
    arrays = tuple(paged_kv_cache) if pair else (paged_kv_cache,) * 2
    if library_of(*arrays) is not np or all(isinstance(a, np.ndarray) for a in arrays):
        axis = 1 if layout == "NHD" else 2
        pages = arrays if pair else (paged_kv_cache[:, 0], paged_kv_cache[:, 1])
        arrays = tuple(a if len(a.shape) == 4 else a.reshape(*a.shape[:axis], 1, *a.shape[axis:]) for a in pages)
    return Keys(k, v, arrays, layout)


def keys_in_rows(k: Array, v: Array, layout: str, operation: str) -> Keys:
    """Keys and values (total, H, D) in NHD, or (H, total, D) in HND."""
    views = []
    for name, a in (("k", k), ("v", v)):
        seen = view(a, name, operation)
        checks.rank(seen, (3,), name, "(total, H, D) in NHD, (H, total, D) in HND", operation)
        views.append(seen if layout == "NHD" else seen.transposed(1, 0, 2))
    if views[0].shape[:2] != views[1].shape[:2]:
        raise ShapeError(
            f"{operation}: k is {views[0].shape} and v {views[1].shape}; both need the same rows and heads."
        )
    arrays = (k, v)
    if layout == "HND" and all(hasattr(a, "swapaxes") for a in arrays):
        arrays = (k.swapaxes(0, 1), v.swapaxes(0, 1))
    return Keys(views[0], views[1], arrays)
