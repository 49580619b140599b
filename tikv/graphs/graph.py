"""Several operations that run as one, many times: they are checked and bound once and launched together.

The first run of a `Graph` with arrays of a kind makes each call, but records its launches instead of doing them. Later
runs repeat the checks of values, put in addresses and numbers, and launch. The graph's backend decides how they launch,
see `GraphBuilder.compile`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from tikv import launch, runtime
from tikv.arrays import Array, ArrayView, CacheArray, Memory, handed_over, new_like, view, write_host
from tikv.errors import ArchError, OptionError
from tikv.graphs.calls import LENGTHS, GraphCall, Roles
from tikv.ops import checks
from tikv.ops.indices import index_array
from tikv.ops.plan import NO_ENTRIES, Entries, Plan, Use, in_turn
from tikv.ops.staging import KnownOnHost, Staging
from tikv.runtime.cache import BoundedCache

BACKENDS = ("auto", "ti.graph", "launches")
# Parameters whose values are checked if the host knows them.
_INDICES = ("slot_mapping", "rope_positions", "block_tables", "indices", *LENGTHS)
_FindSetter = Callable[[int, str], Callable[[int], None]]  # for the number of a launch and the name of an entry


def choose_backend(backend: str, live: runtime.Runtime, operation: str) -> str:
    """One of "ti.graph" and "launches", see `GraphBuilder.compile`.

    Raises:
        OptionError, ArchError: the backend does not exist, or not on this arch.
    """
    checks.option(backend, "backend", operation, BACKENDS)
    if backend == "ti.graph" and not live.engine.has_graphs:
        raise ArchError(
            f"{operation}: {live.engine.title} has no compiled graphs. Use backend='launches', or 'auto'; "
            f"with Taichi a ti.graph runs on Vulkan and Metal."
        )
    if backend == "ti.graph" and not live.is_spirv:
        raise ArchError(
            f"{operation}: on {live.arch} a ti.graph cannot take arrays by their address. Use backend='launches', "
            f"or 'auto'; ti.graph runs on Vulkan and Metal."
        )
    if backend == "auto":
        by_hand = launch.launcher_report(live)["launcher"] == "public"
        return "ti.graph" if live.is_spirv and live.engine.has_graphs and not by_hand else "launches"
    return backend


class Graph(runtime.NotCopied):
    """Operations that run together, many times.

    Runs may use arrays of any shapes, strides, dtypes and devices that the operations take. These make up the kind of
    the arrays: the first run with arrays of a kind checks, compiles and binds for it, and later runs mainly launch.

    Attributes:
        arrays: names that `run` takes an array for.
        scalars: names that it takes an int for.
        lengths: names that it takes an array or an int for.
        outputs: names of the results that it returns.
        backend: "ti.graph" or "launches", see `GraphBuilder.compile`.
    """

    instead = "Let GraphBuilder.compile make another."

    def __init__(self, calls: tuple[GraphCall, ...], live: runtime.Runtime, backend: str) -> None:
        self.runtime = live
        self.backend = backend
        roles = Roles(calls)
        order = dict.fromkeys(n for call in calls for n in (*call.arrays.values(), *call.numbers.values()))
        self.arrays = [str(n) for n in order if n in roles.arrays]
        self.scalars = [str(n) for n in order if n in roles.numbers]
        self.lengths = [str(n) for n in order if n in roles.either]
        self.outputs = [n for call in calls for n in call.outputs]
        self._calls = calls
        self._names = {*self.arrays, *self.scalars, *self.lengths}
        self._index_arrays = {n for call in calls for p, n in call.arrays.items() if p in _INDICES}
        written = {call.arrays[p] for call in calls for p in call.written}
        self._written = [n in written for n in (*self.arrays, *self.lengths)]
        self._like: dict[str, str] = {}  # for each output, the given array whose kind it has
        for call in calls:
            first = next(iter(call.arrays.values()))
            self._like |= dict.fromkeys(call.outputs, self._like.get(first, first))
        self._plans: BoundedCache[Any, GraphPlan] = BoundedCache()
        self._lock = threading.RLock()

    def run(self, values: Mapping[str, Array | int]) -> dict[str, Array]:
        """Run all calls, in the order they were added.

        Args:
            values: an array for each name in `arrays`, an int for each in `scalars`, either for each in `lengths`.

        Returns:
            The results of the calls by name, each an array of the same library as its call's first array. The graph
            owns their memory, and the next run overwrites it; arrays of JAX and other libraries are copies.

        Raises:
            OptionError: a name is missing or unknown.
            DTypeError: an int is given where an array is needed, or an array where an int is needed.
            StaleRuntimeError: Taichi was started again since `compile`.
            ArchError: a CUDA graph is being captured, and it would keep this run's numbers or host arrays, or no run or
                `prepare` has seen arrays of this kind.
            ShapeError, DTypeError, CapacityError, PositionError: as the calls raise them, before anything is launched.

        Exactness: the same bits as the calls one by one.
        Cost: one launch per kernel. After the first run with arrays of a kind, only numbers, indices on the host and
            overlaps are checked again. Arrays that the device cannot see are copied there, and back.
        """
        return self._run("Graph.run", values)

    def prepare(self, values: Mapping[str, Array | int]) -> None:
        """Do all that `run` does except launch: check, compile and bind for arrays of this kind; change none of them.

        Raises:
            As `run`.
        """
        self._run("Graph.prepare", values, prepare_only=True)

    def _run(self, operation: str, values: Mapping[str, Any], prepare_only: bool = False) -> dict[str, Any]:
        live = self.runtime
        runtime.require_alive(live, operation)
        if values.keys() != self._names:
            missing, unknown = sorted(self._names - values.keys()), sorted(values.keys() - self._names)
            problem = f"missing {', '.join(missing)}" if missing else f"unknown {', '.join(unknown)}"
            raise OptionError(f"{operation}: {problem}. This graph takes {', '.join(sorted(self._names))}.")
        numbers = {n: checks.integer(values[n], n, operation) for n in self.scalars}
        views: dict[str, ArrayView] = {}
        for name in (*self.arrays, *self.lengths):
            value = index_array(values[name], name, operation) if name in self._index_arrays else values[name]
            if name in self.lengths and isinstance(value, int | np.integer):
                numbers[name] = checks.integer(value, name, operation)
            else:
                views[name] = view(value, name, operation)
        with self._lock:
            arrays, stage = views, None
            if not live.is_cpu and any(a.is_staged for a in views.values()):
                written = [w for w, n in zip(self._written, (*self.arrays, *self.lengths), strict=True) if n in views]
                checks.on_device(list(views.items()), live, operation)
                for (name, a), is_written in zip(views.items(), written, strict=True):
                    if is_written:  # the copy on the device is writable even if the original is read-only
                        checks.writable(a, name, operation)
                stage = Staging(live, list(views.values()), written)
                arrays = dict(zip(views, stage.arrays, strict=True))
            plan, entries = self._plan(operation, views, arrays, numbers)
            plan.operation = operation
            if entries:
                launch.refuse_during_capture(live, operation, "a number on the host")
            if prepare_only:
                plan.check_overlaps(list(arrays.values()))
            else:
                plan.run(list(arrays.values()), entries)
                if stage is not None:
                    stage.finish()
            return {n: plan.result(n, values[like], views[like]) for n, like in self._like.items()}

    def _plan(
        self, operation: str, views: dict[str, ArrayView], arrays: dict[str, ArrayView], numbers: dict[str, int]
    ) -> tuple[GraphPlan, Entries]:
        """The plan for arrays of this kind, and the entries of this run; values are checked.

        `arrays` are the `views`, where those of host arrays are replaced by copies on the device.
        """
        key: Any = (*[a.key for a in arrays.values()], *arrays)
        if self.runtime.is_spirv:
            key += tuple(str(a.handle.dtype) for a in arrays.values())
        plan = self._plans.get(key)
        if plan is not None:
            choice, entries = plan.revalidate(views, numbers)
            if choice == plan.choice:
                return plan, entries
            plan = self._plans.get((key, choice))
        if plan is None:
            if launch.is_captured(self.runtime):
                raise ArchError(
                    f"{operation}: this graph has not run with arrays of this kind yet, and a CUDA graph is being "
                    "captured. Call run or prepare with such arrays once before the capture."
                )
            plan = GraphPlan(self._calls, self.runtime, self.backend, operation, arrays, numbers)
            _, entries = plan.revalidate(views, numbers)
            self._plans[key, plan.choice] = plan
        self._plans[key] = plan
        return plan, entries

    def __repr__(self) -> str:
        return f"Graph({', '.join(call.operation for call in self._calls)}; {self.backend}, {self.runtime!r})"


class GraphPlan(Plan):
    """The calls of a graph over arrays of one kind, as bound launches or as one `ti.graph`; see `ops.plan`.

    The calls are recorded when the plan is made. That checks them, and finds which launch arguments each of the graph's
    arrays is. Arrays and numbers have the graph's names; an entry has the number of its call and its own name.

    Attributes:
        choice: what decided which launches were taken, see `revalidate`.
        outputs: what the calls return, by name.
    """

    def __init__(
        self,
        calls: tuple[GraphCall, ...],
        live: runtime.Runtime,
        backend: str,
        operation: str,
        arrays: dict[str, ArrayView],
        numbers: dict[str, int],
    ) -> None:
        super().__init__(live, operation, tuple(arrays), (), None)
        self.calls = calls
        self.outputs: dict[str, CacheArray] = {}
        self._cleared: list[Memory] = []  # results that a launch may not write in whole
        self._checked: list[_CheckedCall] = []
        self._results: dict[tuple[str, type], Any] = {}
        self.check_overlaps(list(arrays.values()))
        recorded = self._record(arrays, numbers)
        # Memory of the graph or of its calls, which bound kernels do not keep alive.
        self._private = [a for x in recorded for i, a in _arrays_of(x.launch) if i not in x.uses]
        self.choice, entries = self.revalidate(arrays, numbers)
        find_setter = (self._compile if backend == "ti.graph" and recorded else self._bind_each)(recorded, arrays)
        for entry in entries:
            call, _, name = entry.partition(".")
            indices = [n for n, x in enumerate(recorded) if x.call == int(call) and name in x.launch.named]
            self._setters[entry] = in_turn([find_setter(n, name) for n in indices])
        self.pointers = tuple([a.ptr for a in arrays.values()])
        if live.is_spirv:
            self._release()

    def _record(self, arrays: dict[str, ArrayView], numbers: dict[str, int]) -> list[_CallLaunch]:
        """Record the launches of all calls; put what each run must check into `_checked`."""
        known: dict[str, Any] = {n: a.restrided(a.shape, a.strides) for n, a in arrays.items()}
        for name, a in arrays.items():
            known[name].owner = _NamedOwner(name, a)
        plans: BoundedCache[Any, Any] = BoundedCache()
        launches: list[_CallLaunch] = []
        for number, call in enumerate(self.calls):
            with launch.recording(self.live, plans) as recorded:
                results = call.apply(known, numbers)
            known |= results
            self.outputs |= results
            launches += [_CallLaunch(x, number, _uses_in(x, arrays)) for x in recorded]
            skips = "rope_positions" in call.arrays and not self.live.is_cpu
            if call.options.get("return_mass") or skips:
                self._cleared += [a.view_for("Graph.run").owner for a in results.values()]
            names = {name: f"{number}.{name}" for x in recorded for name in x.named}
            for key, plan in list(plans.items()):
                if not isinstance(plan, Memory):  # calls share memory, since they run one after another
                    del plans[key]
                if isinstance(plan, Plan) and type(plan).revalidate is not Plan.revalidate:
                    indices = [(p, n) for p, n in call.arrays.items() if p in _INDICES and n in arrays]
                    values = [(p, n) for p, n in call.arrays.items() if n in numbers]
                    values += [(p, n) for p, n in call.numbers.items() if isinstance(n, str)]
                    constants = {p: n for p, n in call.numbers.items() if not isinstance(n, str)}
                    self._checked.append(_CheckedCall(plan, indices, values, constants, names if values else {}))
        return launches

    def _bind_each(self, recorded: list[_CallLaunch], arrays: dict[str, ArrayView]) -> _FindSetter:
        """Bind the launches one by one, and return a function that finds setters."""
        self.launches = bounds = [launch.bind_again(x.launch) for x in recorded]
        uses: dict[str, list[Use]] = {name: [] for name in arrays}
        for bound, x in zip(bounds, recorded, strict=True):
            for i, (name, jump) in x.uses.items():
                uses[name].append(Use(bound, i, jump))
        self._uses = list(uses.values())
        return lambda n, name: bounds[n].setter(name)

    def _compile(self, recorded: list[_CallLaunch], arrays: dict[str, ArrayView]) -> _FindSetter:
        """Make one `ti.graph`, whose ndarrays have the graph's names, and return a function that finds setters."""
        ndarrays = {name: arrays[name].handle for x in recorded for name, _ in x.uses.values()}
        ndarrays |= {f"#{id(a.handle)}": a.handle for a in self._private}
        launches = []
        for x in recorded:
            arguments = list(x.launch.arguments)
            for i, a in _arrays_of(x.launch):
                arguments[i] = x.uses[i][0] if i in x.uses else f"#{id(a.handle)}"
            launches.append((x.launch.kernel, arguments))
        graph = launch.TaichiGraph(launches, ndarrays)
        self.launches, order = [graph], list(ndarrays)
        self._uses = [[Use(graph, order.index(name))] if name in ndarrays else [] for name in arrays]
        return graph.setter

    def check_overlaps(self, arrays: Sequence[ArrayView]) -> None:
        """Raise unless what a call writes overlaps no other array of that call."""
        named = dict(zip(self.names, arrays, strict=True))
        for call in self.calls:
            if call.written:
                used = {n: p in call.written for p, n in call.arrays.items() if n in named}
                checks.disjoint([(n, named[n], written) for n, written in used.items()], self.operation)

    def revalidate(self, arrays: Mapping[str, ArrayView], numbers: Mapping[str, int]) -> tuple[Any, Entries]:
        """Check the values that a run brings, as each call's plan does."""
        choices, entries = [], {}
        for plan, indices, values, constants, names in self._checked:
            of_call = constants | {p: numbers[n] for p, n in values}
            choice, call_entries = plan.revalidate({p: arrays[n] for p, n in indices}, of_call)
            choices.append(choice)
            for name in call_entries if names else ():
                entries[names[name]] = call_entries[name]
        return tuple(choices), entries

    def run(self, arrays: Sequence[ArrayView], entries: Entries = NO_ENTRIES) -> None:
        """Launch over these arrays; the graph holds its lock meanwhile."""
        pointers = tuple([a.ptr for a in arrays])
        if pointers != self.pointers:
            self._move(arrays, pointers)
        for memory in self._cleared:
            memory.clear()
        for name in entries:
            self._setters[name](entries[name])
        for bound in self.launches or ():
            bound.launch()
        if self.live.is_spirv:
            self._release()

    def result(self, name: str, like: Any, seen: ArrayView) -> Any:
        """What a call returned, as an array of the kind of `like`."""
        output = self.outputs[name]
        result = self._results.get((name, type(like)))
        if result is not None:
            return result
        is_numpy, is_torch = isinstance(like, np.ndarray), hasattr(like, "new_empty")
        if (is_numpy or is_torch) and seen.device in (output.device, "mps"):
            result = output.numpy() if is_numpy else output.torch()
        else:
            array = output.view_for("Graph.run")
            result = new_like(like, array.shape, array.dtype, self.live)
            if type(result) is not CacheArray:  # `result` is a new array, not the memory that the next run overwrites
                write_host(output.copy_to_host(), view(result, name, "Graph.run"))
                return handed_over(result)
            result = output
        self._results[name, type(like)] = result
        return result


class _NamedOwner(KnownOnHost):
    """The owner, while calls are recorded, of an array that runs bring by name, and so of all views of it."""

    __slots__ = ("array", "name")

    def __init__(self, name: str, array: ArrayView) -> None:
        super().__init__(array.owner, getattr(array.owner, "on_host", None))
        self.name = name
        self.array = array


class _CallLaunch(NamedTuple):
    """A recorded launch, the number of its call, and the arguments that runs bring.

    `uses` gives for each such argument the name of the array, and at which byte of that array it begins.
    """

    launch: launch.Recorded
    call: int
    uses: dict[int, tuple[str, int]]


class _CheckedCall(NamedTuple):
    """A call of a graph whose positions, lengths or indices differ from run to run and are checked in each."""

    plan: Plan
    indices: list[tuple[str, str]]  # (parameter, name) of the index arrays that a run brings
    values: list[tuple[str, str]]  # (parameter, name) of the numbers that it brings
    constants: dict[str, int]
    names: dict[str, str]  # name in a launch -> name in the graph, for the entries that those numbers change


def _arrays_of(recorded: launch.Recorded) -> list[tuple[int, ArrayView]]:
    return [(i, a) for i, a in enumerate(recorded.arguments) if isinstance(a, ArrayView)]


def _uses_in(recorded: launch.Recorded, arrays: Mapping[str, ArrayView]) -> dict[int, tuple[str, int]]:
    """The arguments of a launch that runs bring, see `_CallLaunch`."""
    uses = {}
    for i, a in _arrays_of(recorded):
        if isinstance(a.owner, _NamedOwner):
            whole = a.owner.array
            uses[i] = a.owner.name, a.ptr + a.offset - whole.ptr - whole.offset
        else:
            assert not any(_inside(a, b) for b in arrays.values()), "an operation hid where an array is from"
    return uses


def _inside(argument: ArrayView, a: ArrayView) -> bool:
    if a.handle is not None or argument.handle is not None:
        return argument.handle is a.handle and a.offset <= argument.offset < a.offset + a.span
    return a.ptr <= argument.ptr < a.ptr + a.span
