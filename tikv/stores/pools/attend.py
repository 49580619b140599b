"""Attention over the pages of a layer: `attend`, and `extend`, which also appends."""

from __future__ import annotations

from typing import Any

import numpy as np

from tikv import dtypes
from tikv.arrays import describe, new_like, view
from tikv.ops import checks
from tikv.ops.attention.paged import paged_call
from tikv.ops.attention.plan import AttentionCall
from tikv.ops.attention.request import AttendRequest
from tikv.ops.attention.terms import tree_of
from tikv.runtime.interrupts import Held
from tikv.stores.draft import Parents
from tikv.stores.layers.attend import last_queries, results_of
from tikv.stores.layers.queries import AXES, Queries, attend_queries, with_tokens
from tikv.stores.pools.append import PageAppends, check_rank
from tikv.stores.pools.pages import Pages
from tikv.stores.pools.ragged import RaggedAttention, even_starts
from tikv.stores.pools.sequences import refuse_missed
from tikv.stores.pools.shared_prefix import SharedAttention, as_one, pool_call, serves


def attend(operation: str, pages: Pages, layer: int, q: Any, seqs: Any, request: AttendRequest) -> Any:
    """Attention of queries over the tokens of their sequences in one layer; `PagedKVCacheStore.attend`."""
    config, live, sequences = pages.config, pages.runtime, pages.sequences
    ids = pages.ids(seqs, operation)
    states = [sequences.state(seq, operation) for seq in ids]
    if not request.return_lse and 0 in [state.lengths[layer] for state in states]:
        refuse_missed(operation, layer, states)
    sizes = len(ids), config.num_kv_heads, config.rows.k.width
    given = view(q, "q", operation)
    queries = attend_queries(operation, given, request.layout, *sizes, live)
    read = queries.as_read(given)
    if queries.tokens > 1 or sequences.compacted:
        for state in states:
            remedy = queries.remedy(state.came(layer), config.num_kv_heads)
            state.check_queries(operation, layer, queries.tokens, request, remedy)
    tables, lens, held = pages.tables.block_tables(layer, sequences, ids, states)
    wanted = request.asked_mass(operation, config.rows.k.format)
    caches = pages.pools.caches[layer]._replace(block_tables=tables, context_lens=lens)
    attending = paged_call(operation, read, caches, request)
    if serves(live, request, config.per_head):
        shared = _attend_shared(pages, layer, q, queries, request, attending)
        if shared is not None:
            return shared
    result = attending.attend(q, queries.results(request.out, request.return_lse or wanted != 0))
    if wanted == 0:
        return result
    result, lse = result
    shape: tuple[int, ...] = (len(ids), config.num_kv_heads, int(np.max(held, initial=0)))
    if request.indices is not None:
        shape = attending.plan.mass_shape
    mass = new_like(q, shape, dtypes.float32, live, zeroed=True)
    to_lse = queries.as_read(view(lse, "lse", operation))
    asking, their_lse = last_queries(read, to_lse, wanted)
    paged_call(operation, asking, caches, request).weigh(their_lse, view(mass, "mass", operation))
    return results_of(result, lse if request.return_lse else None, mass)


def _attend_shared(
    pages: Pages, layer: int, q: Any, queries: Queries, request: AttendRequest, alone: AttentionCall
) -> Any:
    """`attend` that reads each shared block once; None if each sequence is to be read `alone`."""
    config, live, operation = pages.config, pages.runtime, alone.plan.operation
    asking = with_tokens(alone.arrays["q"], 4)
    runs, own_lens = pages.tables.neighbours(0, asking.shape[0], queries.tokens, pages.block)
    if own_lens is None or as_one(asking) is None:
        return None
    result, to = queries.result(operation, q, request.out, config.rows.v.width, live)
    if request.out is not None:
        checks.disjoint([(n, a, n == "out") for n, a in {**alone.arrays, "out": to}.items()], operation)
    lse = queries.new_lse(q, live) if request.return_lse else None
    to_lse = None if lse is None else with_tokens(queries.as_read(view(lse, "lse", operation)), 3)
    call = pool_call(operation, pages.pools.caches[layer], request.terms.views(operation))
    given = operation, live, request, call, alone.arrays["table"], own_lens, runs, config.block_size
    SharedAttention(*given).attend(asking, with_tokens(queries.as_read(to), 4), to_lse)
    return results_of(result, lse, None)


def extend(
    operation: str,
    appends: PageAppends,
    layer: int,
    arrays: tuple[Any, Any, Any],
    seqs: Any,
    cu_seqlens: Any,
    request: AttendRequest,
) -> Any:
    """Append new tokens of some sequences and attend with their queries; `PagedKVCacheStore.extend`."""
    pages, (q, k, v) = appends.pages, arrays
    sequences, live = pages.sequences, pages.runtime
    ids = pages.ids(seqs, operation)
    terms = request.terms.views(operation)
    call = RaggedAttention(operation, pages, layer, q, request, len(ids), terms)
    if tree_of(terms) and cu_seqlens is not None:
        cu_seqlens = even_starts(operation, cu_seqlens, len(ids), call.q.shape[0], live)
    rows = view(k, "k", operation), view(v, "v", operation)
    check_rank(operation, "k", rows[0], request.layout)
    tokens = rows[0].shape[AXES[request.layout].index("T") - 1]
    if call.q.shape[0] != tokens:
        detail = f"k: {describe(rows[0])}"
        checks.extent(call.q.shape[0], tokens, "the number of rows of q", operation, detail)
    if sequences.compacted:
        for seq in ids:
            sequences.state(seq, operation).check_queries(operation, layer, 1, request)
    step, before = None, [sequences.state(seq, operation).draft for seq in ids]
    parents = Parents(operation, terms["parents"], live) if layer == 0 and "parents" in terms else None
    try:
        with Held():
            step = appends.append(operation, layer, rows, ids, cu_seqlens, request.layout)
            if parents is not None:
                sequences.grow_tree(step, parents)
        return call.attend(step.cu_seqlens, *pages.tables.block_tables(layer, sequences, step.ids, step.states))
    except BaseException:
        if step is not None:
            with Held():
                sequences.revoke(layer, step)
                for state, draft in zip(step.states, before, strict=True):
                    state.draft = draft
        raise
