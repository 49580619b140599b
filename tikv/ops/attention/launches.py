"""The launches of attention: a family's kernels, bound for one way of splitting the keys.

If there are several splits, they leave normalised parts and their log-sum-exps in scratch memory, and a second launch
merges them. The mass of each key takes one more launch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from tikv import dtypes, launch, runtime
from tikv.arrays import ALIGNMENT, ArrayView, Memory, lasting_memory
from tikv.ops import checks
from tikv.ops.attention.invariance import queries_of_launch
from tikv.ops.attention.options import MOST_ROWS, CacheLayout, QueryShape, lens_by_head, query_shape, table_by_head
from tikv.ops.attention.splits import MASS_KEYS, SERIAL_MERGE, Shares
from tikv.ops.attention.terms import indices_by_head, term_numbers, tree_launch, tree_words
from tikv.ops.plan import NO_ENTRIES, Launch, Plan
from tikv.ops.rotate_queries import rotation_launch

if TYPE_CHECKING:
    from tikv.ops.attention.families.family import Family

LEAST_SCRATCH = 1 << 16  # bytes
MOST_DOUBLED = 1 << 26  # up to here scratch memory doubles, so that old blocks never exceed the newest


def length_entries(cache: CacheLayout, queries: int, length: int, first_valid: int, ahead: int = 0) -> dict[str, int]:
    """The entries of a length and a first position, reduced to 32 bits with the same tokens in the same slots.

    They include how far the queries are ahead of the keys.
    """
    if cache.kind == "ring" and length >= 2**30:
        enough = cache.sinks + 2 * cache.ring + queries
        short = enough + (length - enough) % cache.ring
        length, first_valid = short, max(0, first_valid - (length - short))
    return {"length": length, "first_valid": first_valid, "ahead": ahead}


def scratch_of(live: runtime.Runtime, nbytes: int) -> Memory:
    """Memory for results that one launch leaves for the next; it grows as needed.

    All plans of a runtime share it that launch on the same CUDA stream; launches on different streams may overlap. A
    captured CUDA graph keeps using the memory of its capture, so old memory is kept if there may be such a graph: a
    captured launch is on a stream of its own.
    """
    scratch = live.scratch[launch.stream_of(live)]
    if not scratch or scratch[-1].nbytes < nbytes:
        if scratch and not live.side_streams:
            live.synchronize()
            scratch.clear()
        capturing = launch.is_captured(live)
        make = Memory if capturing else lasting_memory  # memory made during a capture belongs to the graph anyway
        least = 2 * scratch[-1].nbytes if scratch and scratch[-1].nbytes < MOST_DOUBLED else LEAST_SCRATCH
        scratch.append(make(max(nbytes, least), live))
    newest: Memory = scratch[-1]
    return newest


class AttendedTokens(NamedTuple):
    """The tokens that a call attends over, if there is no array of lengths, and the positions of its queries."""

    length: int = 0  # the length of all sequences
    first_valid: int = 0  # oldest position after the sinks that is still stored
    ahead: int = 0  # tokens between the newest key and the newest query, whose position is length - 1 + ahead
    first_query: int = 0  # for keys that are sharded over ranks, as in `AttentionTerms`


ALL = AttendedTokens()


class Scratch(NamedTuple):
    """The memory that the launches of a call use among themselves: the offsets of its parts and its size, in bytes."""

    partials: int  # the results of splits begin at 0 and end here
    lse: int  # the result's log-sum-exps, if the caller gets none
    tree: int  # the words of the new tokens, if they form a tree
    rotated: int  # the queries, if keys are stored rotated
    work: int  # the memory of a CPU's workers
    nbytes: int


class AttentionLaunches(Plan):
    """The launches of an `AttentionPlan` for one number of splits, bound at the first run; see `ops.plan`.

    Without an array for the result there is only the launch of the mass, from the log-sum-exps that attention left: for
    keys in the order of a store's `tokens`, `between` of which lie between the sinks and the others. With one, the mass
    is by slot. Results of splits, and log-sum-exps that the
    caller does not get, go to memory that all plans of a runtime share.
    """

    def __init__(
        self, operation: str, arrays: dict[str, ArrayView], family: Family, shares: Shares, mass: str = "",
        between: int = 0,
    ) -> None:  # fmt: skip
        live, query, cache = family.live, family.query, family.cache
        self.weighs_only = "out" not in arrays
        written = [name == "mass" or (name in ("out", "lse") and not self.weighs_only) for name in arrays]
        super().__init__(live, operation, tuple(arrays), written)
        self.lock = live.lock  # only its holder uses the scratch memory
        self.family, self.query, self.cache, self.options = family, query, cache, family.options
        self.shares, self.splits, self.mass, self.between = shares, shares.splits, mass, between
        self.rows = query.batch * query.heads * query.queries
        whole = family.has_tree or self.options.sharded != (0, 0) or cache.scored  # these count queries from the first
        self.of_launch = queries_of_launch(live, query, self.splits, cache.width_v, whole)
        partials = query.batch * query.heads * self.of_launch * self.splits if self.splits > 1 else 0
        checks.integer(partials * cache.width_v, "elements of the parts of splits", operation, high=2**31 - 1)
        partial_bytes = partials * cache.width_v * 4
        lse = partial_bytes + partials * 4
        tree = lse + (0 if "lse" in arrays else self.rows) * 4
        in_tree = query.batch * query.queries * tree_words(query.queries) if family.has_tree else 0
        rotated = -(-(tree + in_tree * 4) // ALIGNMENT) * ALIGNMENT
        in_rotated = 0 if self._seed is None else self.rows * cache.width * arrays["q"].dtype.itemsize
        work = -(-(rotated + in_rotated) // ALIGNMENT) * ALIGNMENT
        by_head = lens_by_head(arrays) or table_by_head(arrays) or indices_by_head(arrays)
        self.head_pass = family.head_pass(shares, by_head)
        nbytes = work + shares.workers * self.head_pass.work_floats * 4
        self.scratch = Scratch(partial_bytes, lse, tree, rotated, work, nbytes)
        self.memory: Memory | None = None  # the scratch memory that the launches are bound to
        self.on_host = "lens" not in arrays  # whether the host knows the lengths
        self.shifted = False  # whether the launches have a first position, or queries ahead of the keys

    @property
    def _seed(self) -> int | None:
        """The seed of the signs by which the keys are rotated; None if they are not."""
        return None if self.cache.k.format is None else self.cache.k.format.seed

    def check_overlaps(self, arrays: Sequence[ArrayView]) -> None:
        """Check nothing: a given `out` was checked before, and a new array overlaps nothing."""

    def attend(self, arrays: dict[str, ArrayView], tokens: AttendedTokens) -> None:
        """Launch over these arrays and tokens."""
        length, oldest, ahead, first_query = tokens
        with self.lock:
            self._find_scratch()
            entries, shifted = NO_ENTRIES, oldest > 0 or ahead > 0
            # A CUDA graph would bake in a length on the host: it is set again each time, so that a capture refuses it.
            if self.on_host or shifted or self.shifted:
                options = self.options
                entries = length_entries(self.cache, self.query.queries, length, oldest, ahead + options.newer)
                if options.sharded[0]:
                    entries["first_query"] = first_query
                self.shifted = True  # even if the run is interrupted
            self.run(list(arrays.values()), entries)
            self.shifted = shifted

    def attend_again(self, pointers: tuple[int, ...], length: int) -> bool:
        """`attend` over arrays of the bound forms, at these addresses, with the least work.

        The queries are those of the newest of `length` tokens, all of which are valid; False if nothing is bound yet.
        """
        with self.lock:
            self._find_scratch()
            if self.launches is None:
                return False
            if pointers != self.pointers:
                self._move((), pointers)
            put = self._setters
            put["length"](length)
            put["first_valid"](0)
            put["ahead"](self.options.newer)
            self._start()
        return True

    def prepare(self, arrays: Sequence[ArrayView]) -> None:
        """As in `Plan`, over the current scratch memory."""
        with self.lock:
            self._find_scratch()
            super().prepare(arrays)

    def _find_scratch(self) -> None:
        """Find the scratch memory; if it has grown, the launches are bound again."""
        memory = scratch_of(self.live, self.scratch.nbytes)
        if memory is not self.memory:
            self.memory, self.launches, self.shifted = memory, None, False

    def bind(self, views: Sequence[ArrayView]) -> list[Launch]:
        """The launches over these arrays; lengths that the host knows are set in each run."""
        arrays = dict(zip(self.names, views, strict=True))
        live, cache, memory = self.live, self.cache, self.memory
        assert memory is not None
        family, launches = self.family, list[Launch]()
        if self._seed is not None:
            q = arrays["q"]
            arrays["q"] = memory.array(q.shape, q.dtype, self.scratch.rotated)
            launches.append(rotation_launch(live, self.operation, q, arrays["q"], self._seed))
        style, split, query = live.kernel_style, self.splits > 1, self.query
        unused = memory.array((1,), dtypes.float32)
        to, bits = arrays.get("out", arrays["q"]), family.word_bits
        for name, of in zip("kv", bits, strict=True):
            checks.addressable(arrays[name], of // 8, live, name.upper(), self.operation)
        choices = self._choices(arrays)
        partials = memory.array((max(1, self.scratch.partials // 4),), dtypes.float32)
        partial_lse = memory.array((1,), dtypes.float32, self.scratch.partials)
        lse = arrays.get("lse") or memory.array((1,), dtypes.float32, self.scratch.lse)
        strides = self._strides(arrays)
        params = self._params(partials if split else to, partial_lse if split else lse)._replace(
            lens_head=arrays["lens"].strides[1] if lens_by_head(arrays) else 0,
            table_head=arrays["table"].strides[1] if table_by_head(arrays) else 0,
            **_numbers_of_indices(arrays),
        )
        # The log-sum-exps that attention leaves include these terms.
        plain = choices._replace(sink_logits=False, alibi=False, two_sided=False, block=0, tree=False)
        rows = family.rows_of_task(MOST_ROWS)
        plain = plain._replace(rows=rows, values=None, eight=False, invariant=False, masked=family.masked)
        if self.weighs_only:
            return [*launches, self._mass_launch(arrays, plain, strides, params, lse)]
        scalars = self._scalars()
        cached = [arrays.get(name, unused) for name in ("q", "k", "v", "lens", "table", "k_scale", "v_scale")]
        written = [partials, partial_lse] if split else [to, lse]
        if style == "cpu":
            written.append(memory.array((1,), dtypes.float32, self.scratch.work))
        terms, term_vector = [], []
        if choices.terms:
            tree = memory.array((1,), dtypes.float32, self.scratch.tree) if choices.tree else None
            if tree is not None:
                launches.append(tree_launch(live, arrays, tree))
            logits, slopes, indices = (arrays.get(name, unused) for name in ("sink_logits", "alibi_slopes", "indices"))
            terms = [logits, slopes, tree or unused, indices]
            numbers = term_numbers(arrays, tree, self.query.queries)
            term_vector = [numbers._replace(newer=self.options.newer, others=self.options.sharded[1])]
        paired = split or _in_pairs(to, query_shape(to, "out", self.operation))
        factory, family_choices = family.attend_kernel(choices, self.shares.workers, paired)
        kernel = launch.kernel(live, factory, *family_choices, split, choices)
        used, merged = [*cached, *written, *terms], [partials, partial_lse, to, lse]
        numbers = params._replace(out_lse_first=_first(lse))
        for at, piece in self._pieces(strides, numbers, split):
            items = piece.tasks * family.threads
            launches.append(Launch(kernel.bind(items, *used, at, piece, scalars, *term_vector), used))
            if split:
                items = query.batch * query.heads * piece.queries
                serial = items * self.splits * cache.width_v < SERIAL_MERGE
                items *= family.merge_threads
                merging = launch.kernel(live, family.merge_kernel, style, serial, plain._replace(out=to.dtype.short))
                launches.append(Launch(merging.bind(items, *merged, at, piece._replace(tasks=items), scalars), merged))
        if self.mass:
            launches.append(self._mass_launch(arrays, plain, strides, params, lse))
        return launches

    def _pieces(self, strides: Any, params: Any, split: bool) -> Iterator[tuple[Any, Any]]:
        """The strides and numbers of each launch that attends; there are several if one does not take all queries."""
        queries, most = self.query.queries, self.of_launch
        if most == queries:
            yield strides, params
            return
        for begin in range(0, queries, most):
            end = min(queries, begin + most)
            row_blocks = self.family.row_blocks(end - begin)
            of_lse = begin * strides.lse_token
            yield (
                strides._replace(
                    q_first=strides.q_first + begin * strides.q_token,
                    out_first=strides.out_first + begin * strides.out_token,
                ),
                params._replace(
                    tasks=params.tasks // params.row_blocks * row_blocks,
                    row_blocks=row_blocks,
                    queries=end - begin,
                    later=queries - end,
                    lse_first=params.lse_first + (0 if split else of_lse),
                    out_lse_first=params.out_lse_first + of_lse,
                    indices_first=params.indices_first + begin * params.indices_query,
                ),
            )

    def _mass_launch(
        self, arrays: dict[str, ArrayView], choices: Any, strides: Any, params: Any, lse: ArrayView
    ) -> Launch:
        """The launch that weighs the keys by the log-sum-exps of their queries; `params` are those of attention."""
        to, family, cache, last = arrays["mass"], self.family, self.cache, self.query.queries - 1
        bits = family.mass_bits
        if not bits and (cache.k.format is not None or cache.scored):  # these are read in the words that they have
            bits = arrays["k"].dtype.itemsize * 8
        if bits:
            strides = self._strides(arrays, (bits, family.word_bits[1]))
            choices = choices._replace(bits=bits, k_inner=(0, 0))
        mass = family.mass_kernel(choices, self.shares.workers, not self.weighs_only, self.mass == "max")
        heads, splits = self.query.batch * cache.heads, self.shares.mass_splits
        keys, blocks = min(splits * MASS_KEYS, cache.capacity), 1
        if family.selects:
            keys, blocks = arrays["indices"].shape[-1], self.query.queries
        splits *= mass.parts
        items = heads * blocks * (keys if mass.by_key else splits * family.mass_threads)
        numbers = params._replace(
            tasks=items if mass.by_key else heads * blocks * splits,
            splits=splits,
            row_blocks=blocks,
            heads_per_task=1,
            least_share=0,
            lse_first=_first(lse),
            keys=keys,
        )
        strides = strides._replace(
            out_first=_first(to), out_sequence=to.strides[0], out_head=to.strides[1], out_token=self.between
        )
        if mass.query_unit > 1:
            words = {name: n // mass.query_unit for name, n in strides._asdict().items() if name.startswith("q_")}
            strides = strides._replace(**words)
        if self.mass == "last":
            strides = strides._replace(q_first=strides.q_first + last * strides.q_token)
            numbers = numbers._replace(queries=1, lse_first=numbers.lse_first + last * strides.lse_token)
        names = ["q", "k", "lens", "table", *["indices"] * mass.selects, "k_scale"]
        if family.selects:
            strides = strides._replace(out_token=to.strides[2])
        assert self.memory is not None
        unused = self.memory.array((1,), dtypes.float32)
        weighed = [*(arrays.get(name, unused) for name in names), lse, to]
        if self.live.is_cpu:
            weighed.append(self.memory.array((1,), dtypes.float32, self.scratch.work))
        kernel = launch.kernel(self.live, mass.factory, *mass.choices, choices._replace(out="f32"))
        return Launch(kernel.bind(items, *weighed, strides, numbers, self._scalars()), weighed)

    def _choices(self, arrays: dict[str, ArrayView]) -> Any:
        """The compile-time choices of the kernels."""
        from tikv.kernels.attention.parameters import Choices, StoredValues

        family, cache, options, bits = self.family, self.cache, self.options, self.family.word_bits
        unit, unit_v = (of // (arrays[name].dtype.itemsize * 8) for name, of in zip("kv", bits, strict=True))
        scales = [cache.scales[0].array.dtype.short if f"{name}_scale" in arrays else "" for name in "kv"]
        return Choices(
            kind=cache.kind,
            page=cache.page,
            sinks=cache.sinks > 0,
            cache=cache.k.storage,
            bits=bits[0],
            scale=scales[0],
            k_inner=(cache.k.inner[0] // unit, cache.k.inner[1] // unit),
            v_inner=(cache.v.inner[0] // unit_v, cache.v.inner[1] // unit_v),
            query=arrays["q"].dtype.short,
            out="f32" if self.splits > 1 else arrays.get("out", arrays["q"]).dtype.short,
            width=cache.width,
            width_v=cache.width_v,
            group=family.group,
            rows=family.rows,
            causal=options.causal,
            masked=self.live.invariant or family.masked,
            softcap=options.softcap is not None,
            lens_bits=arrays["lens"].dtype.itemsize * 8 if "lens" in arrays else 0,
            table_bits=arrays["table"].dtype.itemsize * 8 if "table" in arrays else 0,
            lens_by_head=lens_by_head(arrays),
            starts=cache.starts,
            table_by_head=table_by_head(arrays),
            sink_logits="sink_logits" in arrays,
            alibi="alibi_slopes" in arrays,
            two_sided="alibi_slopes" in arrays and options.newer > 0,
            block=options.sharded[0],
            tree=family.has_tree,
            values=None if cache.alike else StoredValues(cache.v.storage, bits[1], scales[1]),
            index_bits=arrays["indices"].dtype.itemsize * 8 if family.selects else 0,
            scored=cache.scored,
            eight=family.eight,
            invariant=self.live.invariant,
        )

    def _strides(self, arrays: dict[str, ArrayView], word_bits: tuple[int, int] | None = None) -> Any:
        """The strides of q, of the result, of K and V in words, and of scales, lengths and table."""
        from tikv.kernels.attention.parameters import AttentionStrides

        to, lens, table = arrays.get("out", arrays["q"]), arrays.get("lens"), arrays.get("table")
        strides: list[int] = [*query_shape(arrays["q"], "q", self.operation).strides, _first(arrays["q"])]
        strides += [*query_shape(to, "out", self.operation).strides, _first(to)]
        strides += self._lse_strides(arrays.get("lse"))
        both = (self.cache.k, arrays["k"]), (self.cache.v, arrays["v"])
        for (rows, a), of in zip(both, word_bits or self.family.word_bits, strict=True):
            unit = of // (a.dtype.itemsize * 8)
            strides += [n // unit for n in (rows.sequence, rows.block, rows.token, rows.head)]
            strides.append(a.offset * 8 // of)
        strides += [*self.cache.scale_strides, *(_first(arrays.get(name)) for name in ("k_scale", "v_scale"))]
        of_sequence = 2 if self.cache.starts else 1
        strides += [lens.strides[0] * of_sequence if lens is not None else 0, _first(lens)]
        strides += [table.strides[0], table.strides[-1], _first(table)] if table is not None else [0, 0, 0]
        return AttentionStrides(*strides)

    def _lse_strides(self, lse: ArrayView | None) -> tuple[int, int, int]:
        """The strides of a sequence, a head and a query, in the given array or in scratch memory."""
        queries = self.query.queries
        if lse is None:
            return self.query.heads * queries, queries, 1
        return (*lse.strides, 0) if lse.ndim == 2 else lse.strides  # type: ignore[return-value]

    def _params(self, out: ArrayView, lse: ArrayView) -> Any:
        """The numbers of the launch that attends; it writes `out` and `lse`."""
        from tikv.kernels.attention.parameters import MAX_TOKENS, AttentionParams

        cache, query, options = self.cache, self.query, self.options
        row_blocks, head_pass = self.family.row_blocks(query.queries), self.head_pass
        return AttentionParams(
            tasks=query.batch * -(-cache.heads // head_pass.heads) * row_blocks * self.shares.tasks,
            splits=self.splits,
            heads=cache.heads,
            queries=query.queries,
            row_blocks=row_blocks,
            capacity=cache.capacity if cache.kind != "table" or cache.blocks else 0,
            sinks=cache.sinks,
            window=MAX_TOKENS if options.span is None else min(options.span, MAX_TOKENS),
            ring=cache.ring,
            ahead=options.newer,
            blocks=cache.blocks,
            lse_first=_first(lse),
            out_lse_first=_first(lse),
            part_first=_first(out),
            batch=query.batch,
            heads_per_task=head_pass.heads,
            keys_per_pass=head_pass.keys,
            prefetch=head_pass.prefetch,
            work_floats=head_pass.work_floats,
            least_share=self.shares.least_share,
            split_keys=self.shares.split_keys,
        )

    def _scalars(self) -> tuple[float, ...]:
        """The scales of the logits, the soft cap and the log-sum-exps."""
        from tikv.kernels.attention.parameters import LOG2E, AttentionScalars

        options, cap = self.options, self.options.softcap
        scale = 1 / math.sqrt(self.cache.width) if options.scale is None else options.scale
        of_keys, of_values = (1.0 if a is None else a.tensor_scale for a in (self.cache.k.format, self.cache.v.format))
        scale *= of_keys
        return tuple(
            AttentionScalars(
                logit_scale=scale * LOG2E if cap is None else scale / cap,
                softcap=1.0 if cap is None else cap * LOG2E,
                lse_scale=1.0 if options.base2 else math.log(2),
                value_scale=of_values,
            )
        )


def _numbers_of_indices(arrays: dict[str, ArrayView]) -> dict[str, int]:
    """The entries of `AttentionParams` for selected tokens: where those of a query lie, and how many there are."""
    if "indices" not in arrays:
        return {}
    a, by_head = arrays["indices"], indices_by_head(arrays)
    return {
        "keys": a.shape[-1],
        "indices_sequence": a.strides[0],
        "indices_head": a.strides[1] if by_head else 0,
        "indices_query": a.strides[-2],
        "indices_first": _first(a),
    }


def _first(array: ArrayView | None) -> int:
    """The offset of an array's first element from where its memory begins; 0 for None."""
    return 0 if array is None else array.offset // array.dtype.itemsize


def _in_pairs(out: ArrayView, shape: QueryShape) -> bool:
    """Whether each pair of columns of a result is aligned to the size of both."""
    both = 2 * out.dtype.itemsize
    return not any(n % both for n in (out.ptr or 0, out.offset, *(n * out.dtype.itemsize for n in shape.strides)))
