"""Compiles ahead what a store, a pool or a model's cache will need, by making its own calls while it is empty.

`asked` holds what a caller wants; `stores` and `models` make the calls; `beside` compiles in other processes, and `ptx`
does so for CUDA.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

from tikv import launch, runtime
from tikv.arrays import runtime_of
from tikv.compat.seeds import variants
from tikv.errors import OptionError
from tikv.ops import checks
from tikv.stores.pool import PagedKVCacheStore
from tikv.stores.store import KVCacheStore
from tikv.tools.progress import is_shown, progress
from tikv.tools.warmup import beside, ptx, stores
from tikv.tools.warmup.asked import OPERATION, Asked, Job, require_empty


def warmup(
    *what: Any,
    query_heads: int | None = None,
    tokens: int | Sequence[int] = (1,),
    formats: str | Sequence[str] | None = None,
    steps: bool = False,
    processes: int | None = None,
    quiet: bool = False,
    wait: bool = True,
    num_kv_heads: int = 8,
    head_dim: int = 128,
) -> list[str]:
    """Compile now what a model will need later: kernels are otherwise compiled by the first call that needs them.

    It makes the model's calls with zeros, on the store itself: prompts and single tokens, with few and with many tokens
    in the store, in one layer for each size of window. The store must be empty, and is empty again afterwards; no
    second store is allocated. The calls are plain: kernels for `return_mass`, ``indices``, masks, trees, soft caps,
    sink logits, slopes, `compact` and other methods are compiled by the first call that uses them.

    Args:
        *what: a `KVCacheStore` without tokens; a `PagedKVCacheStore` without sequences; a `TikvCache` without tokens,
            which is copied; or names in `tikv.variants`. Without arguments, all variants.
        query_heads: heads of the model's queries. For a `TikvCache`, None takes the configuration's.
        tokens: how many new tokens a call brings, one number or several: 1 for decoding, or a prompt's length. All
            prompts longer than a few hundred tokens use the same kernels.
        formats: dtypes of queries and of new keys and values: "float32", "float16", "bfloat16". None takes the store's
            dtype if it is one of these, else "float32"; for a `TikvCache` it takes the configuration's.
        steps: also the decode step of `tikv.compile_step`, for each layer; for a `TikvCache`, as always on CUDA, steps
            that torch compiles or `captured` captures.
        processes: how many processes compile side by side, before this one loads what they made; None for one per core
            if there are at least 3, 1 for only this one, as for a store's ``steps``. On CPU, Vulkan and Metal they need
            the engine's cache on disk and a process that has compiled no kernel; on CUDA the native launcher, Linux and
            a C compiler. If one fails, a warning says so.
        quiet: show nothing. Otherwise a bar shows what is compiled if stderr is a terminal; if not, a message does.
        wait: False to return while the processes compile, by default as many as cores but one: for example before a
            model's weights are loaded. A call that needs one of the kernels then waits for it, and outside CUDA for
            all of them. Where processes cannot be used, this waits too.
        num_kv_heads, head_dim: for named variants, the shape to compile for.

    Returns:
        A list with the purpose of each compiled kernel, such as "copy" or "attend cpu"; empty if all had been compiled
        before, or if it did not wait. For variants, their names.

    Raises:
        OptionError: the object is not one of these, or is not empty; query_heads is missing; a dtype or variant does
            not exist.
        CapacityError: a layer has no room for so many tokens, or a pool has too few free blocks.
        ShapeError: num_kv_heads does not divide query_heads.
        TikvError: as `extend` raises it.

    Cost: 0.1 to 2 s per kernel in the first process, later the time to read it from the engine's cache on disk; plus
        the time of the calls. For each number in ``tokens`` up to 8 and each size of window, the longest call attends
        over a full layer: over at most 65,536 tokens in a pool, and over 4,096 in a `TikvCache` whose memory grows.

    Examples:
        >>> import tikv
        >>> store = tikv.KVCacheStore(num_layers=2, num_kv_heads=2, head_dim=8, capacity=32, dtype="float32")
        >>> made = tikv.warmup(store, query_heads=4, tokens=(5, 1), quiet=True)
        >>> tikv.warmup(store, query_heads=4, tokens=(5, 1), quiet=True), store.length
        ([], 0)
        >>> tikv.warmup("kv_cache_copy_f32", num_kv_heads=2, head_dim=8)
        ['kv_cache_copy_f32']
    """
    if all(isinstance(name, str) for name in what):
        return variants.warmup(*what, num_kv_heads=num_kv_heads, head_dim=head_dim)
    if len(what) > 1:
        raise OptionError(f"{OPERATION}: {len(what)} objects were given. Warm up one store or cache at a time.")
    asked, target = Asked.checked(query_heads, tokens, formats, steps), what[0]
    if processes is not None:
        processes = checks.integer(processes, "processes", OPERATION, low=1)
    if isinstance(target, KVCacheStore):
        if asked.steps:  # the recording of a step cannot be recorded
            processes = 1
        with target.lock:
            require_empty(target, max(target.layer_length(i) for i in range(target.num_layers)))
            try:
                return _done(stores.jobs_of_store(target, asked), target.runtime, processes, quiet, wait)
            finally:
                target.reset()
    if isinstance(target, PagedKVCacheStore):
        with target.lock:
            require_empty(target, len(target), "sequences")
            return _done(stores.jobs_of_pool(target, asked), target.runtime, processes, quiet, wait)
    module = sys.modules.get("tikv.integrations.transformers")
    if module is None or not isinstance(target, module.TikvCache):
        raise OptionError(
            f"{OPERATION}: {type(target).__name__} cannot be warmed up. Pass a KVCacheStore, a PagedKVCacheStore, a "
            f"TikvCache, or names of tikv.variants."
        )
    from tikv.tools.warmup.models import jobs_of_cache

    return _done(list(jobs_of_cache(target, asked)), runtime_of(), processes, quiet, wait)


def _say_nothing(now: str, done: int) -> None:
    pass


def _done(jobs: Sequence[Job], live: runtime.Runtime, processes: int | None, quiet: bool, wait: bool) -> list[str]:
    """Do all jobs; return the titles of the kernels that were compiled for them. Without `wait`, only begin."""
    compile_in = ptx.compile_ptx if live.is_cuda else beside.compile_beside
    if not wait and (count := beside.processes_for(live, processes, wait)):
        compile_in(beside.kernels_of([job.run for job in jobs], live), live, count, _say_nothing, wait)
        return []
    before = set(live.kernels)
    shown = is_shown() and not quiet
    count = beside.processes_for(live, processes)
    if count > 1:
        kernels = beside.kernels_of([job.run for job in jobs], live)
        with progress(OPERATION, len(kernels)) if shown else contextlib.nullcontext(_say_nothing) as step:
            compile_in(kernels, live, count, step)
    with progress(OPERATION, len(jobs)) if shown else contextlib.nullcontext(_say_nothing) as step:
        for i, job in enumerate(jobs):
            step(job.title, i)
            heard: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
            if shown or quiet:
                heard = launch.notice.heard_by(functools.partial(_show, step, job.title, i))
            with heard:
                job.run()
        live.synchronize()
    return [kernel.title for key, kernel in live.kernels.items() if key not in before]


def _show(step: Callable[[str, int], None], title: str, done: int, kernel: str) -> None:
    step(f"{title}: {kernel}", done)
