"""Several operations compiled into one graph that runs many times: checked and bound once, launched together.

A `GraphBuilder` takes the library's calls over names instead of arrays. The first run of a `Graph` with arrays of a
kind makes each call with its launches recorded instead of done; later runs repeat the checks of values, put in
addresses and numbers, and launch. How they launch is the graph's backend, see `GraphBuilder.compile`.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from tikv import launch, runtime
from tikv.arrays import ArrayView, CacheArray, Memory, as_numpy, describe, new_like, to_device, view, write_host
from tikv.errors import ArchError, OptionError
from tikv.launch import Recorded
from tikv.launch.cuda import driver
from tikv.ops import checks
from tikv.ops.attention.plan import decode_attention, merge_states, paged_decode_attention
from tikv.ops.copy import copy, copy_kv
from tikv.ops.paged import index_array, write_slots
from tikv.ops.ragged import append_ragged
from tikv.ops.row_copy import MAX_PLANS, Held, Staging
from tikv.ops.write_qkv import write_qkv
from tikv.runtime.cache import BoundedCache

_LIBRARY: dict[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (
        copy,
        copy_kv,
        append_ragged,
        write_slots,
        write_qkv,
        decode_attention,
        paged_decode_attention,
        merge_states,
    )
}
_WRITTEN = ("cache", "k_cache", "v_cache", "k_pool", "v_pool", "k_dst", "v_dst")  # parameters of writes
_LENGTHS = ("seq_lens", "context_lens")  # parameters that are an array or a number
_NUMBERS = ("position", "first_valid")  # parameters that are numbers
_INDICES = ("slot_mapping", "rope_positions", "block_tables", *_LENGTHS)  # whose values are checked where known
BACKENDS = ("auto", "ti.graph", "launches")


class Call(NamedTuple):
    """One operation of a graph: names of its arrays and numbers by parameter, options, names for what it returns."""

    operation: str
    function: Callable[..., Any] | None  # None: the library's function of that name
    arrays: dict[str, str]
    numbers: dict[str, str | int]
    options: dict[str, Any]
    outputs: tuple[str, ...]
    written: tuple[str, ...]  # parameters

    def apply(self, arrays: Mapping[str, Any], numbers: Mapping[str, int]) -> dict[str, Any]:
        """Make the call with these arrays and numbers; its results by their names."""
        given = {p: arrays[n] if n in arrays else numbers[n] for p, n in self.arrays.items()}
        given |= {p: numbers[n] if isinstance(n, str) else n for p, n in self.numbers.items()}
        results = (self.function or _LIBRARY[self.operation])(**given, **self.options)
        if not self.outputs:
            return {}
        return dict(zip(self.outputs, results if isinstance(results, tuple) else (results,), strict=True))


@functools.cache
def _parameters(operation: str) -> frozenset[str]:
    return frozenset(inspect.signature(_LIBRARY[operation]).parameters)


class GraphBuilder:
    """Collect operations over named arrays and numbers; `compile` makes a `Graph` of them.

    The methods take what the functions of the same names take, with names in place of arrays. ``position``,
    ``first_valid`` and lengths may be an int, or a name whose number each run gives. A length may also be the name of
    an array, and where a length or a position lies in device memory it may change there: ``seq_lens``,
    ``context_lens``, ``cache_offsets``, ``slot_mapping``, ``rope_positions``. Attention, merges and the fused write
    name what they return, for later calls and for the caller of `Graph.run`.

    Raises:
        OptionError: a name that is none, or is taken, or stands for an array here and a number there; an option that
            the function does not have.

    Example:
        A decode step with a prefix that is shared: write the new token, attend to the prefix and to the sequence's own
        tokens, merge both.

        >>> import numpy as np, tikv
        >>> g = tikv.GraphBuilder()
        >>> g.copy_kv("k", "v", "k_rows", "v_rows", position="position")
        >>> g.decode_attention("q", "k_cache", "v_cache", "length", out="own", lse="own_lse")
        >>> g.decode_attention("q", "k_prefix", "v_prefix", 4, out="shared", lse="shared_lse")
        >>> g.merge_states("own", "own_lse", "shared", "shared_lse", out="out", lse="lse")
        >>> step = g.compile()
        >>> caches, prefix = np.zeros((2, 1, 2, 8, 4), np.float32), np.ones((2, 1, 2, 4, 4), np.float32)
        >>> fixed = {"k_cache": caches[0], "v_cache": caches[1], "k_rows": caches[0, 0], "v_rows": caches[1, 0]}
        >>> fixed |= {"k_prefix": prefix[0], "v_prefix": prefix[1]}
        >>> for position in range(4):
        ...     k, v, q = np.ones((3, 1, 2, 4), np.float32)
        ...     results = step.run(fixed | {"k": k, "v": 2 * v, "q": q, "position": position, "length": position + 1})
        >>> caches[1, 0, 0, :, 0].tolist()
        [2.0, 2.0, 2.0, 2.0, 0.0, 0.0, 0.0, 0.0]
        >>> results["out"][0, 0].tolist()  # 4 own values of 2 and 4 shared ones of 1, all with one weight
        [1.5, 1.5, 1.5, 1.5]
    """

    def __init__(self) -> None:
        self._calls: list[Call] = []
        self._compiled: dict[str, tuple[int, Graph]] = {}

    def copy(self, src: str, cache: str, *, position: str | int, **options: Any) -> None:
        """`tikv.copy`."""
        self._add("copy", {"src": src, "cache": cache}, {"position": position}, options)

    def copy_kv(self, k: str, v: str, k_cache: str, v_cache: str, *, position: str | int, **options: Any) -> None:
        """`tikv.copy_kv`."""
        names = {"k": k, "v": v, "k_cache": k_cache, "v_cache": v_cache}
        self._add("copy_kv", names, {"position": position}, options)

    def append_ragged(self, k_new: str, v_new: str, k_cache: str, v_cache: str, cache_offsets: str) -> None:
        """`tikv.append_ragged`."""
        names = {"k_new": k_new, "v_new": v_new, "k_cache": k_cache, "v_cache": v_cache, "cache_offsets": cache_offsets}
        self._add("append_ragged", names, {}, {})

    def write_slots(
        self,
        k: str,
        v: str,
        k_pool: str,
        v_pool: str,
        slot_mapping: str,
        *,
        k_scale: str | None = None,
        v_scale: str | None = None,
        **options: Any,
    ) -> None:
        """`tikv.write_slots`."""
        names = {"k": k, "v": v, "k_pool": k_pool, "v_pool": v_pool, "slot_mapping": slot_mapping}
        self._add("write_slots", names | _given(k_scale=k_scale, v_scale=v_scale), {}, options)

    def write_qkv(
        self,
        qkv: str,
        k_dst: str,
        v_dst: str,
        *,
        num_q_heads: int,
        position: str | int | None = None,
        slot_mapping: str | None = None,
        rope_positions: str | None = None,
        k_scale: str | None = None,
        v_scale: str | None = None,
        out: str = "q",
        **options: Any,
    ) -> None:
        """`tikv.write_qkv`; ``out`` names the Q that it returns."""
        names = {"qkv": qkv, "k_dst": k_dst, "v_dst": v_dst}
        names |= _given(slot_mapping=slot_mapping, rope_positions=rope_positions, k_scale=k_scale, v_scale=v_scale)
        numbers = {} if position is None else {"position": position}
        self._add("write_qkv", names, numbers, {"num_q_heads": num_q_heads, **options}, {"out": out})

    def decode_attention(
        self,
        q: str,
        k_cache: str,
        v_cache: str,
        seq_lens: str | int,
        *,
        first_valid: str | int | None = None,
        k_scale: str | None = None,
        v_scale: str | None = None,
        out: str = "out",
        lse: str | None = None,
        mass: str | None = None,
        **options: Any,
    ) -> None:
        """`tikv.decode_attention`; ``out`` and, if wanted, ``lse`` and ``mass`` name what it returns."""
        names = {"q": q, "k_cache": k_cache, "v_cache": v_cache, **_given(k_scale=k_scale, v_scale=v_scale)}
        numbers: dict[str, str | int] = {"seq_lens": seq_lens}
        if first_valid is not None:
            numbers["first_valid"] = first_valid
        outputs = {"out": out, **_given(return_lse=lse, return_mass=mass)}
        self._add("decode_attention", names, numbers, options, outputs)

    def paged_decode_attention(
        self,
        q: str,
        k_pool: str,
        v_pool: str,
        block_tables: str,
        context_lens: str | int,
        *,
        k_scale: str | None = None,
        v_scale: str | None = None,
        out: str = "out",
        lse: str | None = None,
        **options: Any,
    ) -> None:
        """`tikv.paged_decode_attention`; ``out`` and, if wanted, ``lse`` name what it returns."""
        names = {"q": q, "k_pool": k_pool, "v_pool": v_pool, "block_tables": block_tables}
        names |= _given(k_scale=k_scale, v_scale=v_scale)
        outputs = {"out": out, **_given(return_lse=lse)}
        self._add("paged_decode_attention", names, {"context_lens": context_lens}, options, outputs)

    def merge_states(
        self, out_a: str, lse_a: str, out_b: str, lse_b: str, *, out: str = "out", lse: str = "lse", **options: Any
    ) -> None:
        """`tikv.merge_states`; ``out`` and ``lse`` name what it returns."""
        names = {"out_a": out_a, "lse_a": lse_a, "out_b": out_b, "lse_b": lse_b}
        self._add("merge_states", names, {}, options, {"out": out, "lse": lse})

    def _add(
        self,
        operation: str,
        arrays: dict[str, str],
        numbers: dict[str, str | int],
        options: dict[str, Any],
        outputs: Mapping[str, str] | None = None,  # by the parameter that they stand for
    ) -> None:
        where, outputs = f"GraphBuilder.{operation}", outputs or {}
        for parameter, value in [*arrays.items(), *outputs.items()]:
            if not isinstance(value, str):
                raise OptionError(f"{where}: {parameter} is {value!r}; give the name of an array, a str.")
        for parameter, number in numbers.items():
            if not isinstance(number, str):
                checks.integer(number, parameter, where)
        known = _parameters(operation) - {*arrays, *numbers, "out", "return_lse", "return_mass"}
        unknown = sorted(options.keys() - known)
        if unknown:
            raise OptionError(f"{where}: unknown option {', '.join(unknown)}. It has {', '.join(sorted(known))}.")
        if options.get("impl", "taichi") not in ("auto", "taichi"):
            raise OptionError(f"{where}: impl={options['impl']!r} is none of Taichi's kernels. Leave impl out.")
        options |= {p: True for p in outputs if p.startswith("return_")}
        if "impl" in known:
            options["impl"] = "taichi"
        lengths = {p: n for p, n in numbers.items() if p in _LENGTHS and isinstance(n, str)}
        numbers = {p: n for p, n in numbers.items() if p not in lengths}
        written = tuple(p for p in arrays if p in _WRITTEN or (p.endswith("_scale") and operation.startswith("write")))
        call = Call(operation, None, {**arrays, **lengths}, numbers, options, tuple(outputs.values()), written)
        self._check_names(where, call)
        self._calls.append(call)

    def _check_names(self, where: str, call: Call) -> None:
        """Each name stands for one thing."""
        roles = _Roles([*self._calls, call._replace(outputs=())])
        both = sorted((roles.arrays | roles.outputs) & roles.numbers)
        if both:
            raise OptionError(f"{where}: {', '.join(both)} names an array and a number. Choose another name for one.")
        for name in call.outputs:
            if name in roles.arrays | roles.outputs | roles.numbers | roles.either or call.outputs.count(name) > 1:
                raise OptionError(f"{where}: the output {name!r} is a name already taken. Choose another.")

    def compile(self, *, backend: str = "auto") -> Graph:
        """The graph of the calls so far, in the runtime that lives now; the same one until a call is added.

        Args:
            backend: how runs launch. "ti.graph": Taichi runs one compiled `ti.graph`. "launches": kernels that were
                bound once are launched one after the other, on CPU by launch contexts that are kept, on CUDA by the
                driver on torch's current stream, where a CUDA graph may capture them. "auto": "ti.graph" on Vulkan and
                Metal, "launches" on CPU and CUDA, and where ``TIKV_LAUNCHER=public``.

        Raises:
            OptionError: there are no calls, or no such backend.
            ArchError: "ti.graph" on CPU or CUDA. It takes nothing but whole `ti.ndarray`s, no address of NumPy's or
                torch's, and the kernels there take the number of their iterations from an array's extent.

        Exactness: the same bits by both.
        Cost: none yet; the first `Graph.run` with arrays of a kind compiles the kernels. A launch by a `ti.graph` takes
            0.65 of one by hand on Vulkan (lavapipe), and 6 times a kept one on CPU:
            ``pytest benches/graphs/bench_graph.py --arch cpu,vulkan`` measures it.
        """
        operation = "GraphBuilder.compile"
        if not self._calls:
            raise OptionError(f"{operation}: no calls were added. Add some, for instance copy_kv.")
        checks.option(backend, "backend", operation, BACKENDS)
        live = runtime.current()
        if backend == "ti.graph" and not live.is_spirv:
            raise ArchError(
                f"{operation}: on {live.arch} a ti.graph cannot take arrays by their address. Use backend='launches', "
                f"or 'auto'; ti.graph runs on Vulkan and Metal."
            )
        if backend == "auto":
            by_hand = launch.launcher_report(live)["launcher"] == "public"
            backend = "ti.graph" if live.is_spirv and not by_hand else "launches"
        count, graph = self._compiled.get(backend, (0, None))
        if graph is None or count != len(self._calls) or graph.runtime is not live:
            graph = Graph(tuple(self._calls), live, backend)
            self._compiled[backend] = (len(self._calls), graph)
        return graph

    def __repr__(self) -> str:
        return f"GraphBuilder({', '.join(call.operation for call in self._calls)})"


def _given(**names: str | None) -> dict[str, str]:
    return {parameter: name for parameter, name in names.items() if name is not None}


class _Roles:
    """What the names of some calls stand for: arrays and numbers to be given, or either, and outputs."""

    def __init__(self, calls: Sequence[Call]) -> None:
        self.arrays: set[str] = set()
        self.numbers: set[str] = set()
        self.either: set[str] = set()
        self.outputs: set[str] = set()
        for call in calls:
            for parameter, name in call.arrays.items():
                if name not in self.outputs:
                    (self.either if parameter in _LENGTHS else self.arrays).add(name)
            self.numbers |= {n for n in call.numbers.values() if isinstance(n, str)}
            self.outputs |= set(call.outputs)
        self.either -= self.arrays | self.numbers


class Graph:
    """Operations that run together, many times, with arrays of the kinds they first saw or of others.

    Attributes:
        arrays, scalars: names that `run` takes an array and an int for.
        lengths: names that it takes either for.
        outputs: names of what it returns.
        backend: "ti.graph" or "launches", see `GraphBuilder.compile`.
    """

    def __init__(self, calls: tuple[Call, ...], live: runtime.Runtime, backend: str) -> None:
        self.runtime = live
        self.backend = backend
        roles = _Roles(calls)
        order = dict.fromkeys(n for call in calls for n in (*call.arrays.values(), *call.numbers.values()))
        self.arrays = [str(n) for n in order if n in roles.arrays]
        self.scalars = [str(n) for n in order if n in roles.numbers]
        self.lengths = [str(n) for n in order if n in roles.either]
        self.outputs = [n for call in calls for n in call.outputs]
        self._calls = calls
        self._wanted = {*self.arrays, *self.scalars, *self.lengths}
        self._lists = {n for call in calls for p, n in call.arrays.items() if p in _INDICES}
        written = {call.arrays[p] for call in calls for p in call.written}
        self._written = [n in written for n in (*self.arrays, *self.lengths)]
        self._like: dict[str, str] = {}  # of each output, the array that was given whose kind it has
        for call in calls:
            first = next(iter(call.arrays.values()))
            self._like |= dict.fromkeys(call.outputs, self._like.get(first, first))
        self._plans: dict[Any, _Plan] = {}
        self._places: list[Any] = []
        self._lock = threading.RLock()

    def run(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Run all calls, in the order they were added.

        Args:
            values: an array for each name in `arrays`, an int for each in `scalars`, either for each in `lengths`.

        Returns:
            What the calls return, by their names, each of the kind of its call's first array. The memory is the
            graph's own: the next run writes it again.

        Raises:
            OptionError: a name is missing or unknown.
            DTypeError: an int where an array is needed, or an array where an int is.
            StaleRuntimeError: Taichi was started again since `compile`.
            ArchError: a CUDA graph is being captured, and a number or an array on the host would be baked into it, or
                these arrays are of a kind that no run or `prepare` has seen.
            ShapeError, DTypeError, CapacityError, PositionError: as the calls raise them, before anything is launched.

        Exactness: the bits of the calls one by one.
        Cost: one launch a kernel; of the checks, after the first run with arrays of a kind, only those of numbers, of
            indices on the host and of overlaps. Arrays that the device cannot see are copied there, and back.
        """
        return self._run("Graph.run", values, True)

    def prepare(self, values: Mapping[str, Any]) -> None:
        """Do all that `run` does but launch: check, compile and bind for arrays of this kind, and leave them alone.

        Raises:
            As `run`.
        """
        self._run("Graph.prepare", values, False)

    def _run(self, operation: str, values: Mapping[str, Any], wet: bool) -> dict[str, Any]:
        live = self.runtime
        runtime.require_alive(live, operation)
        if values.keys() != self._wanted:
            missing, unknown = sorted(self._wanted - values.keys()), sorted(values.keys() - self._wanted)
            problem = f"missing {', '.join(missing)}" if missing else f"unknown {', '.join(unknown)}"
            raise OptionError(f"{operation}: {problem}. This graph takes {', '.join(sorted(self._wanted))}.")
        held = {
            n: index_array(values[n]) for n in self._lists if n in values
        }  # arrays of lists live as long as the run
        numbers = {n: checks.integer(values[n], n, operation) for n in self.scalars}
        views: dict[str, ArrayView] = {}
        for name in (*self.arrays, *self.lengths):
            value = held.get(name, values[name])
            if name in self.lengths and isinstance(value, int | np.integer):
                numbers[name] = checks.integer(value, name, operation)
            else:
                views[name] = view(value, name, operation)
        with self._lock:
            self._apart(operation, views)
            given, stage = views, None
            if not live.is_cpu and any(a.device == "cpu" for a in views.values()):
                written = [w for w, n in zip(self._written, (*self.arrays, *self.lengths), strict=True) if n in views]
                stage = Staging(live, list(views.values()), written)
                given = dict(zip(views, stage.arrays, strict=True))
            plan, entries = self._plan(operation, views, given, numbers)
            if any(entries):
                launch.refuse_baked(live, operation, "a number on the host")
            if wet:
                plan.run(given, entries)
                if stage is not None:
                    stage.finish()
            return {n: plan.result(n, values[like], views[like]) for n, like in self._like.items()}

    def _apart(self, operation: str, views: Mapping[str, ArrayView]) -> None:
        """What is written overlaps nothing else of its call; looked at again when an array lies elsewhere."""
        places = [n for a in views.values() for n in (a.ptr, a.key)]
        if places == self._places:
            return
        self._places = []
        for call in self._calls:
            if call.written:
                used = {n: p in call.written for p, n in call.arrays.items() if n in views}
                checks.disjoint([(n, views[n], written) for n, written in used.items()], operation)
        if all(a.ptr for a in views.values()):
            self._places = places

    def _plan(
        self, operation: str, views: dict[str, ArrayView], given: dict[str, ArrayView], numbers: dict[str, int]
    ) -> tuple[_Plan, list[tuple[int, ...]]]:
        """The launches for arrays of this kind, and the entries that this run puts in; checks the rest."""
        key: Any = (*[a.key for a in given.values()], *given)
        if self.runtime.is_spirv:
            key += tuple(str(a.handle.dtype) for a in given.values())
        plan = self._plans.get(key)
        if plan is not None:
            choice, entries = plan.again(views, numbers)
            if choice == plan.choice:
                return plan, entries
            plan = self._plans.get((key, choice))
        if plan is None:
            if self.runtime.is_cuda and driver.capturing():
                raise ArchError(
                    f"{operation}: these arrays are of a kind that this graph has not seen, and a CUDA graph is being "
                    f"captured. Call run or prepare with such arrays once before."
                )
            if len(self._plans) >= MAX_PLANS:
                self._plans.clear()
            plan = _Plan(self._calls, self.runtime, self.backend, given, numbers)
            plan.choice, entries = plan.again(views, numbers)
            self._plans[key, plan.choice] = plan
        self._plans[key] = plan
        return plan, entries

    def __repr__(self) -> str:
        return f"Graph({', '.join(call.operation for call in self._calls)}; {self.backend}, {self.runtime!r})"


class _Named(Held):
    """Owner of an array that a name of the graph stands for while calls are recorded, and so of all views of it."""

    __slots__ = ("array", "name")

    def __init__(self, name: str, array: ArrayView) -> None:
        super().__init__(array.owner, getattr(array.owner, "on_host", None))
        self.name = name
        self.array = array

    def view(self) -> ArrayView:
        found = self.array.moved(self.array.shape, self.array.strides)
        found.owner = self
        return found


class _Replaced(NamedTuple):
    """An array argument that each run replaces: by which name, and how many bytes behind its first element."""

    argument: int
    name: str
    jump: int


class _Launch:
    """One recorded launch."""

    def __init__(self, recorded: Recorded, views: Mapping[str, ArrayView]) -> None:
        self.kernel = recorded.kernel
        self.iterations = recorded.iterations
        self.arguments = list(recorded.arguments)
        self.entries = recorded.entries
        self.replaced: list[_Replaced] = []
        self.kept = []  # memory that the graph owns, or its calls
        for i, argument in enumerate(recorded.arguments):
            if not isinstance(argument, ArrayView):
                continue
            if isinstance(argument.owner, _Named):
                a = argument.owner.array
                jump = argument.ptr + argument.offset - a.ptr - a.offset
                self.replaced.append(_Replaced(i, argument.owner.name, jump))
            else:
                assert not any(_inside(argument, a) for a in views.values()), "an operation hid where an array is from"
                self.kept.append(argument)


def _inside(argument: ArrayView, a: ArrayView) -> bool:
    if a.handle is not None or argument.handle is not None:
        return argument.handle is a.handle and a.offset <= argument.offset < a.offset + a.span
    return a.ptr <= argument.ptr < a.ptr + a.span


class _Followed(NamedTuple):
    """A call whose values are checked at each run."""

    call: Call
    plan: Any  # what the operation planned; its `again` checks
    moves: bool  # whether a run brings a number for the vectors of its launches
    launches: list[int]


class _Plan:
    """The launches of a graph for arrays of one kind, as one `ti.graph` or bound one by one."""

    def __init__(
        self,
        calls: tuple[Call, ...],
        live: runtime.Runtime,
        backend: str,
        given: dict[str, ArrayView],
        numbers: dict[str, int],
    ) -> None:
        self.live = live
        self.choice: Any = None
        self.outputs: dict[str, CacheArray] = {}
        self.cleared: list[Memory] = []  # results of which a launch may leave parts alone
        self.followed: list[_Followed] = []
        self.launches: list[_Launch] = []
        self._results: dict[tuple[str, type], Any] = {}
        known: dict[str, Any] = {n: _Named(n, a).view() for n, a in given.items()}
        scratch: BoundedCache[Any, Any] = BoundedCache()
        for call in calls:
            first = len(self.launches)
            with launch.recording(live, scratch) as recorded:
                results = call.apply(known, numbers)
            known |= results
            self.outputs |= results
            self.launches += [_Launch(r, given) for r in recorded]
            skips = "rope_positions" in call.arrays and not live.is_cpu
            if call.options.get("return_mass") or skips:
                self.cleared += [a.view_for("Graph.run").owner for a in results.values()]
            for plan in scratch.values():
                if hasattr(plan, "again"):
                    moves = any(isinstance(n, str) for n in call.numbers.values()) or any(
                        n in numbers for n in call.arrays.values()
                    )
                    self.followed.append(_Followed(call, plan, moves, list(range(first, len(self.launches)))))
            for key in [k for k, plan in scratch.items() if not isinstance(plan, Memory)]:
                del scratch[key]  # memory is shared, for calls follow one another
        self.names = {r.name for x in self.launches for r in x.replaced}
        self.graph: launch.TaichiGraph | None = None
        self.bound: list[launch.Bound] = []
        if backend == "ti.graph":
            self.graph = self._compile(given)
        else:
            self.bound = [x.kernel.bind(x.iterations, *x.arguments) for x in self.launches]
        self.places: list[int] = []
        for x in self.launches:
            for r in x.replaced:
                x.arguments[r.argument] = None  # the caller's memory is not kept
        if 0 in [a.ptr for a in given.values()]:
            self._let_go()

    def _compile(self, given: dict[str, ArrayView]) -> launch.TaichiGraph | None:
        """The launches as one `ti.graph`, whose ndarrays go by the graph's names, or by number."""
        ndarrays = {r.name: given[r.name].handle for x in self.launches for r in x.replaced}
        kept = {id(a.handle): a.handle for x in self.launches for a in x.kept}
        ndarrays |= {f"#{i}": handle for i, handle in kept.items()}
        launches = []
        for x in self.launches:
            names = {r.argument: r.name for r in x.replaced}
            arguments = [
                names.get(i) or f"#{id(a.handle)}" if isinstance(a, ArrayView) else a for i, a in enumerate(x.arguments)
            ]
            launches.append((x.kernel, arguments))
        return launch.TaichiGraph(launches, ndarrays) if launches else None

    def again(
        self, views: Mapping[str, ArrayView], numbers: Mapping[str, int]
    ) -> tuple[tuple[Any, ...], list[tuple[int, ...]]]:
        """Check the values that a run brings: what launches are chosen by, and what goes into their vectors."""
        choices, entries = [], []
        for call, plan, moves, _ in self.followed:
            arrays = {p: views[n] for p, n in call.arrays.items() if p in _INDICES and n in views}
            given = {p: numbers[n] for p, n in call.arrays.items() if n in numbers}
            given |= {p: numbers[n] if isinstance(n, str) else n for p, n in call.numbers.items()}
            choice, found = plan.again(self.live, call.operation, arrays, given)
            choices.append(choice)
            entries.append(found if moves else ())
        return tuple(choices), entries

    def run(self, given: Mapping[str, ArrayView], entries: list[tuple[int, ...]]) -> None:
        """Launch over these arrays."""
        for memory in self.cleared:
            memory.clear()
        if self.graph is not None:
            self.graph.values |= {n: given[n].handle for n in self.names}
            for (*_, launches), values in zip(self.followed, entries, strict=True):
                for n in launches if values else ():
                    for (i, j), value in zip(self.launches[n].entries, values, strict=True):
                        self.graph.set_entry(n, i, j, value)
            self.graph.run()
            self._let_go()
            return
        places = [a.ptr for a in given.values()]
        if places != self.places:
            for bound, x in zip(self.bound, self.launches, strict=True):
                for i, name, jump in x.replaced:
                    a = given[name]
                    if a.ptr:
                        bound.set_pointer(i, a.ptr + jump)
                    else:
                        bound.set_array(i, a)
            self.places = places
        for (*_, launches), values in zip(self.followed, entries, strict=True):
            for n in launches if values else ():
                for (i, j), value in zip(self.launches[n].entries, values, strict=True):
                    self.bound[n].set_entry(i, j, value)
        for bound in self.bound:
            bound.launch()
        if 0 in places:
            self._let_go()

    def _let_go(self) -> None:
        """Keep no memory of the caller's alive, where it has no address."""
        self.places = []
        if self.graph is not None:
            self.graph.values |= dict.fromkeys(self.names)
        for bound, x in zip(self.bound, self.launches, strict=False):
            bound.release([r.argument for r in x.replaced])

    def result(self, name: str, like: Any, seen: ArrayView) -> Any:
        """What a call returned, as an array of the kind of `like`."""
        own = self.outputs[name]
        found = self._results.get((name, type(like)))
        if found is not None:
            return found
        if isinstance(like, np.ndarray) or hasattr(like, "new_empty"):
            if seen.device != own.device:
                array = own.view_for("Graph.run")
                found = new_like(like, array.shape, array.dtype, self.live)
                as_numpy(view(found, name, "Graph.run"))[...] = own.copy_to_host()
                return found
            found = own.numpy() if isinstance(like, np.ndarray) else own.torch()
        else:
            found = own
        self._results[name, type(like)] = found
        return found


def compile_step(
    store: Any,
    *,
    layers: int | None = None,
    layout: str = "token_major",
    attend: bool = True,
    scale: float | None = None,
    softcap: float | None = None,
    return_lse: bool = False,
    backend: str = "auto",
) -> Step:
    """A decode step of a store as one graph: append the new tokens, move the positions on, attend to all.

    Positions live in device memory, one a sequence, and the step itself advances them: on CUDA it may be captured in a
    CUDA graph and replayed, after which `KVCacheStore.advance` tells the store how many tokens the replays appended.

    Args:
        store: a `KVCacheStore`, of any dtype, with windows and sinks or without.
        layers: one layer's index; None for all layers at once, whose arrays are stacked on a leading axis. That is
            for callers who have the arrays of all layers before any attends: a drafted or replayed step, a bench.
        layout: of k and v, "token_major" or "head_major".
        attend: False for a step that only writes.
        scale, softcap, return_lse: as in `KVCacheStore.attend`.
        backend: as in `GraphBuilder.compile`.

    Raises:
        PositionError, DTypeError: no such layer.
        OptionError: no such layout or backend; a store of another kind.
        StaleRuntimeError: the store's runtime is gone, now or at a run.

    Exactness: the bits of `KVCacheStore.append` and `KVCacheStore.attend` one after the other.
    Cost: the launches of both, and one that moves the positions on.

    Example:
        >>> import numpy as np, tikv
        >>> store = tikv.KVCacheStore(num_layers=2, num_kv_heads=1, head_dim=4, capacity=8, dtype="float32", window=4)
        >>> step = tikv.compile_step(store)
        >>> for n in range(6):
        ...     k, v, q = np.full((3, 2, 1, 1, 1, 4), n, np.float32)
        ...     out = step.run(k, v, q[:, 0])
        >>> store.length, step.positions.copy_to_host().tolist()
        (6, [6])
        >>> out[0].shape, out[1][0, 0].round(2).tolist()
        ((1, 1, 4), [5.0, 5.0, 5.0, 5.0])
    """
    operation = "compile_step"
    if not hasattr(store, "positions_on_device"):
        raise OptionError(f"{operation}: {type(store).__name__} has no step. Pass a KVCacheStore.")
    runtime.require_alive(store.runtime, operation)
    if layers is not None:
        layers = checks.integer(layers, "layers", operation, high=store.num_layers - 1)
    checks.option(layout, "layout", operation, checks.LAYOUTS)
    options = {"scale": scale, "softcap": softcap, "return_lse": bool(return_lse)} if attend else None
    return Step(store, layers, layout, options, backend)


class Step:
    """A store's decode step, see `compile_step`.

    Attributes:
        store: the store.
        graph: the `Graph` that runs.
        positions: (batch,) int64 on the device: where each sequence's next token goes.
    """

    def __init__(
        self, store: Any, layer: int | None, layout: str, options: dict[str, Any] | None, backend: str
    ) -> None:
        self.store = store
        self._layers = range(store.num_layers) if layer is None else range(layer, layer + 1)
        self._stacked = layer is None
        self._token_axis = -3 if layout == "token_major" else -2
        self._layout = layout
        self._options = options
        self._backend = backend
        self._build()

    def _build(self) -> None:
        """The graph for the store's memory as it is now."""
        store, stacked = self.store, self._stacked
        self._batch = store.batch_size
        self._allocations = store.allocations
        self._at = store.layer_length(self._layers[0])
        positions = to_device(np.full(self._batch, self._at, np.int64), store.runtime)
        # What attention reads behind the write is known on the host, except where a replay has moved on without it.
        self._lens = np.zeros(self._batch, np.int64)
        lens = positions.moved(positions.shape, positions.strides)
        lens.owner = Held(positions.owner, None if store.runtime.is_cuda else self._lens)
        self._arrays = {"positions": positions} | ({} if self._options is None else {"lens": lens})
        self.positions = CacheArray(positions, store.runtime)

        def write(k: Any, v: Any, positions: Any) -> None:
            options = {"layout": self._layout, "positions": positions}
            store.append_all(k, v, **options) if stacked else store.append(self._layers[0], k, v, **options)

        def advance(k: ArrayView, positions: ArrayView) -> None:
            _advance(store.runtime, positions, k.shape[self._token_axis])

        def attend(i: int, q: ArrayView, seq_lens: ArrayView, first_valid: int) -> Any:
            mine = q.moved(q.shape[1:], q.strides[1:], i * q.strides[0]) if stacked else q
            return store.attend(self._layers[i], mine, impl="taichi", seq_lens=seq_lens, **(self._options or {}))

        rows = {"k": "k", "v": "v", "positions": "positions"}
        calls = [
            Call("append", write, rows, {}, {}, (), ()),
            Call("advance", advance, {"k": "k", "positions": "positions"}, {}, {}, (), ()),
        ]
        for i in range(len(self._layers)) if self._options is not None else ():
            names = (f"out{i}", f"lse{i}") if self._options and self._options["return_lse"] else (f"out{i}",)
            call = functools.partial(attend, i)
            arrays = {"q": "q", "seq_lens": "lens"}
            calls.append(Call("attend", call, arrays, {"first_valid": f"first_valid{i}"}, {}, names, ()))
        builder = GraphBuilder()
        builder._calls = calls
        self.graph = builder.compile(backend=self._backend)

    def run(self, k: Any, v: Any, q: Any = None) -> Any:
        """Append k and v, and attend with q.

        Args:
            k, v: as `KVCacheStore.append` takes them, or `append_all` for all layers.
            q: (batch, Hq, D) or (batch, Hq, T, D), with a leading axis of layers for all of them; None when the step
                only writes.

        Returns:
            What `KVCacheStore.attend` returns, in a list for all layers; None when the step only writes. The memory
            is the step's own: the next run writes it again.

        Raises:
            CapacityError: a layer without a window has no room. Nothing is written.
            PositionError: the layers of the step are of different lengths.
            OptionError: q is missing, or there is one too many.
            ShapeError, DTypeError, StaleRuntimeError: as `KVCacheStore.append` and `KVCacheStore.attend`.
            ArchError: a CUDA graph is being captured, and no `prepare` or run came before it.
        """
        return self._run("Step.run", k, v, q, True)

    def prepare(self, k: Any, v: Any, q: Any = None) -> None:
        """Do all that `run` does but launch and count: what a CUDA graph needs before it captures a run.

        Raises:
            As `run`.
        """
        self._run("Step.prepare", k, v, q, False)

    def _run(self, operation: str, k: Any, v: Any, q: Any, wet: bool) -> Any:
        store = self.store
        runtime.require_alive(store.runtime, operation)
        if (q is None) != (self._options is None):
            has = "attends and needs q" if q is None else "only writes and takes no q"
            raise OptionError(f"{operation}: this step {has}. compile_step(store, attend=...) chooses.")
        if q is not None and self._stacked:
            queries = view(q, "q", operation)
            checks.rank(queries, (4, 5), "q", "(layers, batch, Hq, D) or (layers, batch, Hq, T, D)", operation)
            checks.extent(
                queries.shape[0], len(self._layers), "the number of layers of q", operation, describe(queries)
            )
        if store.allocations != self._allocations:
            self._build()
        keys = view(k, "k", operation)
        tokens = keys.shape[self._token_axis] if keys.ndim >= 3 else 0
        capturing = store.runtime.is_cuda and driver.capturing()
        first_valid = store.begin_step(operation, self._layers, tokens)
        length = store.layer_length(self._layers[0])
        if length != self._at:
            launch.refuse_baked(store.runtime, operation, "the store's length, which is not where this step left it,")
            write_host(np.full(self._batch, length, np.int64), self._arrays["positions"])
            self._at = length
        self._lens[:] = length + tokens
        values = {"k": k, "v": v, **self._arrays}
        if q is not None:
            values["q"] = q
            values |= {f"first_valid{i}": n for i, n in enumerate(first_valid)}
        results = (self.graph.run if wet else self.graph.prepare)(values)
        if wet and not capturing:
            store.end_step(self._layers, tokens)
            self._at = length + tokens
        if self._options is None or results is None:
            return None
        found = [results[f"out{i}"] for i in range(len(self._layers))]
        if self._options["return_lse"]:
            found = [(out, results[f"lse{i}"]) for i, out in enumerate(found)]
        return found if self._stacked else found[0]

    def __repr__(self) -> str:
        what = "all layers" if self._stacked else f"layer {self._layers[0]}"
        return f"Step({what} of {self.store!r}; {self.graph.backend})"


def _advance(live: runtime.Runtime, positions: ArrayView, tokens: int) -> None:
    """Move positions in device memory on, in one launch."""
    kernel = launch.kernel(live, importlib.import_module("tikv.kernels.advance").make_advance, live.kernel_style)
    count = positions.shape[0]
    kernel.bind(count, positions, (positions.offset // positions.dtype.itemsize, count, tokens)).launch()


__all__ = ["Graph", "GraphBuilder", "Step", "compile_step"]
