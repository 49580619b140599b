"""The plan of attention: one form of call, checked once; see `ops.plan`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tikv import dtypes, launch, runtime
from tikv.arrays import Array, ArrayView, describe, handed_over, new_like, view_of_new, view_without_owner
from tikv.errors import OptionError, ShapeError
from tikv.ops import checks
from tikv.ops.attention.families import Form, family_for, log_choice, that_need_native
from tikv.ops.attention.invariance import refuse_splits
from tikv.ops.attention.launches import ALL, AttendedTokens, AttentionLaunches, length_entries
from tikv.ops.attention.mass import NO_MASS, Mass
from tikv.ops.attention.options import (
    AttentionOptions,
    CacheLayout,
    check_form,
    check_length,
    check_table,
    lens_by_head,
    query_shape,
)
from tikv.ops.attention.splits import Lengths, Shares, choose_mass_splits, most_keys
from tikv.ops.attention.terms import check_parents, check_selected, check_terms
from tikv.ops.attention.torch_sdpa import TorchAttention
from tikv.ops.indices import host_indices, values_known
from tikv.ops.plan import NO_ENTRIES, Entries, Plan
from tikv.runtime.cache import BoundedCache

if TYPE_CHECKING:
    from tikv.ops.attention.families.family import Family

FOLLOWED = {  # by parameter: the arrays that may change in a graph
    "seq_lens": "lens",
    "context_lens": "lens",
    "block_tables": "table",
    "indices": "indices",
}
RESULTS = ("out", "lse", "mass")  # arrays that are not part of a plan's form
MOST_ADDRESSES = 256  # per plan: those at which `out` was checked
MOST_LAUNCHES = 64  # per plan: they differ by alignment of results and by the splits that lengths on the host need


class Results(NamedTuple):
    """Where a call's results go, and the caller's order of axes, if it is not the plan's."""

    out: Any = None  # None: a new array of the queries' kind
    return_lse: bool = False
    lse: Any = None  # float32 of any strides, in the plan's order of axes; None: a new array, if it is wanted
    is_partial: bool = False  # `out` is float32 for any dtype of q, since it is merged before it is rounded
    is_new: bool = False  # `out` was made for this call, so there is nothing to check
    mass: Mass = NO_MASS  # the one that the plan's options name
    lead: tuple[int, ...] = ()  # the caller's axes except the columns
    as_read: Callable[[ArrayView], ArrayView] | None = None  # makes a view in the plan's order of axes


NEW = Results()


class ReadyAttention(NamedTuple):
    """A call of attention that is fully checked and not yet computed."""

    results: tuple[Any, ...] = ()  # arrays that the caller gets, once `run` has computed them
    start: Callable[[], None] | None = None  # None if there is nothing to compute
    launches: AttentionLaunches | None = None
    arrays: Mapping[str, ArrayView] = MappingProxyType({})
    lse: Any = None  # the caller's array for the log-sum-exp, if there is one
    owners: tuple[Any, ...] = ()  # objects that own the memory, which views do not keep alive

    def prepared(self, *owners: Any) -> ReadyAttention:
        """The same call, after every step of `run` that can fail, as in `Plan.prepare`."""
        if self.launches is not None:
            self.launches.prepare(list(self.arrays.values()))
        return self._replace(owners=owners)

    def run(self) -> Any:
        """Attend, and return the result or results."""
        if self.start is not None:
            self.start()
        return _handed_over(self.results, self.lse)


def _handed_over(results: tuple[Any, ...], lse: Array) -> Any:
    """What the caller gets: one result or several, one of which may be an array that it gave."""
    if len(results) == 1:
        return handed_over(results[0])
    return tuple([a if a is lse else handed_over(a) for a in results])


class AttentionPlan(Plan):
    """Attention over arrays of one form with one set of options, which are checked when the plan is made.

    Each call brings the values of lengths and tables on the host, and the result. How the keys are split depends on
    them, so a plan has an `AttentionLaunches` for each way of splitting.
    """

    def __init__(
        self, live: runtime.Runtime, operation: str, arrays: dict[str, ArrayView], cache: CacheLayout,
        options: AttentionOptions,
    ) -> None:  # fmt: skip
        super().__init__(live, operation, tuple(arrays), [False] * len(arrays))
        q, batch = arrays["q"], arrays.get("table", arrays["k"]).shape[0]
        self.options = options
        self.query = query_shape(q, "q", operation)
        check_form(operation, arrays, self.query, cache, batch, options)
        refuse_splits(live, operation, options)
        check_terms(operation, arrays, self.query, cache, options, live)
        form = Form(live, arrays, self.query, cache, options)
        log_choice(operation, form)
        self.family = family_for(form)
        self.needs_native = self.family.needs_native(form)
        self.refused: set[type[Family]] = set()  # families whose kernels the native launcher does not launch
        self.cache = self.family.cache
        self.shape = (*q.shape[:-1], cache.width_v)
        self.mass_shape: tuple[int, ...] = (batch, cache.heads, cache.capacity)
        if form.selects:
            self.mass_shape = (batch, cache.heads, self.query.queries, arrays["indices"].shape[-1])
        self.empty = 0 in self.shape
        self.device_only = "lens" in arrays and not values_known(arrays["lens"], live)
        self.by_torch = TorchAttention(live, arrays, cache, options, self.family.on_tensor_cores)
        self.by_split: BoundedCache[tuple[Any, ...], AttentionLaunches] = BoundedCache(MOST_LAUNCHES)
        self.last_shares = Lengths(-1), Shares(0, 0)  # the last lengths, and their shares
        # By the form of `out` and all addresses.
        self.fitting_out: BoundedCache[tuple[Any, ...], bool] = BoundedCache(MOST_ADDRESSES)
        self.by_head = lens_by_head(arrays)
        self.limit = checks.MAX_POSITION if cache.kind == "ring" else cache.capacity  # the greatest length
        self.needed = self.query.queries if options.causal and not options.short else 0  # the least length, if not 0

    def attend(
        self,
        like: Any,
        arrays: dict[str, ArrayView],
        tokens: AttendedTokens = ALL,
        results: Results = NEW,
        impl: str = "taichi",
    ) -> Any:
        """Attention over arrays of this form.

        Args:
            like: what the caller gave as q; new arrays are of its kind.
            arrays: q, k, v; lens, table, k_scale and v_scale if there are any. The results are added.
            tokens: the tokens that are attended over.
            results: where the results go.
            impl: one of `IMPLEMENTATIONS`.
        """
        lengths, tokens = self._checked_tokens(arrays, tokens)
        outputs = self._add_results(like, arrays, results)
        if impl != "taichi":
            longest, oldest = lengths.longest, tokens.first_valid
            if self.by_torch.serves(self.operation, arrays, longest, oldest, results.return_lse, impl):
                if not self.by_torch.attend(self.operation, arrays, longest, oldest):
                    self._launches(arrays, lengths).attend(arrays, tokens)
                return _handed_over(outputs, results.lse)
        if self.options.mass:
            results.mass.start(outputs[-1])
        if not self.empty:
            self._launches(arrays, lengths).attend(arrays, tokens)
        return _handed_over(outputs, results.lse)

    def ready(
        self, like: Any, arrays: dict[str, ArrayView], tokens: AttendedTokens = ALL, results: Results = NEW
    ) -> ReadyAttention:
        """`attend` with tikv's kernels, without the launches: values are checked and results are allocated."""
        lengths, tokens = self._checked_tokens(arrays, tokens)
        outputs = self._add_results(like, arrays, results)
        if self.empty:
            return ReadyAttention(outputs, lse=results.lse)
        launches = self._launches(arrays, lengths)
        start = functools.partial(launches.attend, arrays, tokens)
        return ReadyAttention(outputs, start, launches, arrays, results.lse)

    def _checked_tokens(self, arrays: dict[str, ArrayView], tokens: AttendedTokens) -> tuple[Lengths, AttendedTokens]:
        """The most keys that a query may have, and the tokens in the kernels' form; their values are checked."""
        if "parents" in arrays:
            check_parents(self.operation, arrays["parents"], self.live)
        if tokens.first_valid:  # reduced to 32 bits together with a length on the host
            high = 2**31 - 1 if "lens" in arrays or self.cache.kind != "ring" else checks.MAX_POSITION
            oldest = self._first_valid(tokens.first_valid, high)
            if oldest is not tokens.first_valid:
                tokens = tokens._replace(first_valid=oldest)
        return self._lengths(arrays, tokens.length, tokens.ahead), tokens

    def _add_results(self, like: Any, arrays: dict[str, ArrayView], results: Results) -> tuple[Any, ...]:
        """The arrays that a caller gets, its own or new ones; adds views, which keep no array alive, to `arrays`."""
        live, operation, out, as_read = self.live, self.operation, results.out, results.as_read
        shape = self.shape if as_read is None else (*results.lead, self.shape[-1])
        if out is None:
            output = new_like(like, shape, arrays["q"].dtype, live)
            to = view_of_new(output, "out", operation)
        else:
            output, to = out, view_without_owner(out, "out", operation)
            if not results.is_new:
                self._check_out(arrays, to, shape, results.is_partial)
        arrays["out"] = to if as_read is None else as_read(to)
        if not results.return_lse and not self.options.mass:
            return (output,)
        outputs = [output]
        if results.return_lse:
            if results.lse is None:
                outputs.append(new_like(like, shape[:-1], dtypes.float32, live))
                to = view_of_new(outputs[-1], "lse", operation)
                arrays["lse"] = to if as_read is None else as_read(to)
            else:
                outputs.append(results.lse)
                arrays["lse"] = view_without_owner(results.lse, "lse", operation)
        if self.options.mass:
            outputs.append(results.mass.array(operation, like, self.mass_shape, live, arrays))
            arrays["mass"] = view_without_owner(outputs[-1], "mass", operation)
        return tuple(outputs)

    def _check_out(
        self, arrays: dict[str, ArrayView], out: ArrayView, shape: tuple[int, ...], is_partial: bool
    ) -> None:
        """Check that `out` has this shape and q's dtype, is writable, and shares nothing with the other arrays."""
        pointers = (out.ptr, *[a.ptr for a in arrays.values()])
        key = (out.key, shape, is_partial, *pointers)
        if key in self.fitting_out:
            return
        operation = self.operation
        checks.on_device([("out", out)], self.live, operation)
        checks.writable(out, "out", operation)
        if not is_partial:
            checks.same_dtype(arrays["q"], out, "q", "out", operation)
        if out.shape != shape:
            raise ShapeError(f"{operation}: out is {describe(out)} where {shape} is needed.")
        checks.disjoint([("out", out, True), *[(name, a, False) for name, a in arrays.items()]], operation)
        if 0 not in pointers and not self.live.is_spirv:  # an address alone identifies memory
            self.fitting_out[key] = True

    def _launches(self, arrays: dict[str, ArrayView], lengths: Lengths) -> AttentionLaunches:
        """The launches over arrays of this form and these lengths."""
        if self.needs_native and launch.why_not_native(self.live):  # another launcher has been chosen since
            self._leave(arrays)
        shares = self._shares(lengths)
        key = (shares, *[arrays[name].key for name in RESULTS if name in arrays])
        launches = self.by_split.get(key)
        if launches is None:
            launches = AttentionLaunches(self.operation, arrays, self.family, shares, self.options.mass)
            if self.needs_native:
                try:
                    launches.prepare(list(arrays.values()))
                except launch.NeedsNativeLauncher:  # it refused the kernel: `launcher_report` says why
                    self._leave(arrays, type(self.family))
                    return self._launches(arrays, lengths)
            self.by_split.keep(key, launches)
        return launches

    def _leave(self, arrays: dict[str, ArrayView], family: type[Family] | None = None) -> None:
        """From now on, use kernels of other families than this one, or than all that need the native launcher."""
        form = Form(self.live, arrays, self.query, self.cache, self.options)
        self.refused |= that_need_native(form) if family is None else {family}
        log_choice(self.operation, form, self.refused)
        self.family = family_for(form, self.refused)
        self.needs_native = self.family.needs_native(form)
        self.by_torch = TorchAttention(self.live, arrays, self.cache, self.options, self.family.on_tensor_cores)
        self.last_shares = Lengths(-1), Shares(0, 0)
        self.by_split.clear()

    def weigh(
        self, arrays: dict[str, ArrayView], lse: ArrayView, mass: ArrayView, tokens: AttendedTokens = ALL,
        kind: str = "sum", between: int = 0,
    ) -> None:  # fmt: skip
        """The attention mass of the keys, from the weights that the queries gave each of them.

        Args:
            arrays, tokens: as in `attend`; the queries are those of `attend`, or the last of them.
            lse: the log-sum-exps that `attend` gave for them.
            mass: (batch, heads, n) float32, which accumulates: for keys in the order of a store's `tokens`, at most n
                per head.
            kind: one of `mass.MASSES`; "last" is the sum, for queries that are the newest ones.
            between: the number of other tokens in `mass` between the sinks and the tokens after them.
        """
        self.ready_to_weigh(arrays, lse, mass, tokens, kind, between).run()

    def ready_to_weigh(
        self, arrays: dict[str, ArrayView], lse: ArrayView, mass: ArrayView, tokens: AttendedTokens = ALL,
        kind: str = "sum", between: int = 0,
    ) -> ReadyAttention:  # fmt: skip
        """`weigh` without the launches."""
        lengths = self._lengths(arrays, tokens.length, tokens.ahead)
        if self.empty or 0 in mass.shape:
            return ReadyAttention()
        arrays |= {"lse": lse, "mass": mass}
        workers = self.family.workers(most_keys(self.cache, lengths))
        shares = Shares(1, workers, mass_splits=choose_mass_splits(self.cache, lengths))
        key = (*shares, kind, between, *[a.key for a in arrays.values()])
        launches = self.by_split.get(key)
        if launches is None:
            made = AttentionLaunches(self.operation, arrays, self.family, shares, kind, between)
            launches = self.by_split.keep(key, made)
        start = functools.partial(launches.attend, arrays, tokens)
        return ReadyAttention((), start, launches, arrays)

    def _first_valid(self, value: Any, high: int) -> int:
        """The oldest position that is still stored, checked."""
        if self.by_head and value:
            raise OptionError(
                f"{self.operation}: first_valid={value} is one position, and KV heads of different lengths each "
                "count their own positions. Use lengths of (B,), or first_valid=None."
            )
        return checks.integer(value, "first_valid", self.operation, high=high)

    def _lengths(self, arrays: dict[str, ArrayView], length: int, ahead: int = 0) -> Lengths:
        """Check lengths that the host knows, and selected tokens; return the most keys that a query may have."""
        lengths = Lengths(self.cache.capacity) if self.device_only else self._known_lengths(arrays, length, ahead)
        if not self.family.selects:
            return lengths
        check_selected(self.operation, arrays, self.cache, length, self.live)
        return Lengths(arrays["indices"].shape[-1])

    def _known_lengths(self, arrays: dict[str, ArrayView], length: int, ahead: int) -> Lengths:
        """Check the lengths that the host knows; return the most tokens that a sequence may have."""
        cache, operation, limit, needed = self.cache, self.operation, self.limit, max(0, self.needed - ahead)
        if "lens" not in arrays:
            check_length(length, needed, limit, cache, "the length", operation)
            if "table" in arrays:
                check_table(operation, host_indices(arrays["table"], self.live), length, cache)
            return Lengths(length)
        known = host_indices(arrays["lens"], self.live)
        if known is None:
            return Lengths(cache.capacity)
        known = known[::2] if cache.starts else known
        if known.size == 0:
            return Lengths(0)
        shortest, longest = (int(known.item()),) * 2 if known.size == 1 else (int(known.min()), int(known.max()))
        if longest > limit or shortest < needed:
            for at in np.flatnonzero((known > limit) | ((known < needed) & (known != 0)))[:1]:
                where = ", ".join(map(str, np.unravel_index(at, known.shape)))
                check_length(int(known.flat[at]), needed, limit, cache, f"lengths[{where}]", operation)
        if "table" in arrays:
            check_table(operation, host_indices(arrays["table"], self.live), known, cache)
        return Lengths(longest, -(-int(known.sum(dtype=np.int64)) // known.size) if self.by_head else None)

    def _shares(self, lengths: Lengths) -> Shares:
        """How the keys of these lengths are split."""
        known, shares = self.last_shares
        if known != lengths:
            shares = self.family.shares(lengths)
            if self.options.mass:
                shares = shares._replace(mass_splits=choose_mass_splits(self.cache, lengths))
            self.last_shares = lengths, shares
        return shares

    def alike_until(self, length: int, last: int) -> int:
        """The greatest length, at most `last`, whose keys are split as those of `length`, so one launch serves both."""
        shares = self._shares(Lengths(length))
        while last > length and self._shares(Lengths(last)) != shares:  # more keys never give fewer parts
            last = (length + last) // 2
        return last

    def revalidate(
        self, arrays: Mapping[str, ArrayView], numbers: Mapping[str, int]
    ) -> tuple[tuple[int, ...], Entries]:
        """Check lengths and blocks that the host knows; how the keys are split selects the launches."""
        followed = {FOLLOWED[name]: a for name, a in arrays.items() if name in FOLLOWED}
        length = numbers.get("seq_lens", numbers.get("context_lens", 0))
        oldest = self._first_valid(numbers.get("first_valid", 0), 2**31 - 1)
        on_host = "lens" not in followed or oldest > 0
        choice = (*self._shares(self._lengths(followed, length)), on_host)
        newer = self.options.newer
        return choice, length_entries(self.cache, self.query.queries, length, oldest, newer) if on_host else NO_ENTRIES
