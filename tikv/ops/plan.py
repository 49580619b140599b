"""The plan of an operation: checked once for arrays of one form, launched again and again.

Every operation takes the same steps, in this order:

check       its `check_*` function checks shapes, dtypes and options, and makes a `Plan`
key         `Runtime.plans` keeps the plan under the forms of the arrays (`Views.key`) and the options
revalidate  values that differ from run to run are checked (positions, lengths, slots); it returns entries by name
bind        kernels are bound to arrays, at the first run
run         addresses and entries that changed are set, and the kernels are launched

A `Graph` records the launches of plans, repeats their `revalidate`, and launches them together.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from tikv import launch, runtime
from tikv.arrays import ArrayView, Views
from tikv.ops import checks
from tikv.ops.staging import Staging

Entries = Mapping[str, int]  # values for the kernels' vectors, by the name of the entry
NO_ENTRIES: Entries = {}


class Launch(NamedTuple):
    """A bound kernel and the arrays that it was bound to, in the order of its arguments."""

    bound: launch.Bound
    arrays: Sequence[ArrayView]


class Use(NamedTuple):
    """An argument that is one of the caller's arrays, and its offset in bytes from that array's first element."""

    bound: Any  # a `launch.Bound` or a `launch.TaichiGraph`
    argument: int
    jump: int = 0


class _Setters(dict[str, Callable[[int], None]]):
    """By name, a function that sets the entry of that name in every launch that has it; made at first use."""

    def __init__(self, bounds: Sequence[launch.Bound]) -> None:
        self.bounds = bounds

    def __missing__(self, name: str) -> Callable[[int], None]:
        setter = self[name] = in_turn([bound.setter(name) for bound in self.bounds if name in bound.places])
        return setter


def in_turn(calls: Sequence[Callable[..., None]]) -> Callable[..., None]:
    """A function that makes each of these calls; if there is only one call, that one."""
    if len(calls) == 1:
        return calls[0]

    def each(*arguments: Any) -> None:
        for call in calls:
            call(*arguments)

    return each


def _both(put: Callable[[int], None], start: Callable[[], None]) -> Callable[[int], None]:
    """A function that sets a value and launches; it keeps no plan alive."""

    def launch_again(value: int) -> None:
        put(value)
        start()

    return launch_again


class Plan:
    """A checked operation over arrays of one form, which can run over others of that form; see the module.

    It keeps none of the caller's arrays alive. If a device cannot see the host's arrays, they are staged, and each run
    binds again, as does a run that a graph records.

    Args:
        live: the runtime.
        operation: the operation's name, for messages.
        names: the names of the arrays that `run` takes, for messages.
        written: which of them are destinations.
        launches: makes the launches over such arrays; None: there is nothing to move, or a subclass has its own `bind`.

    Attributes:
        lock: held from the first change of a bound kernel to its launch.
        loop_entry: the only entry that changes in a decode loop; empty if no single entry does.
        launch_again: launches over the arrays of the last run with another value of that entry, with the least work;
            None before the first run.
    """

    lock: Any
    loop_entry = ""
    launch_again: Callable[[int], None] | None = None

    def __init__(
        self,
        live: runtime.Runtime,
        operation: str,
        names: Sequence[str],
        written: Sequence[bool],
        launches: Callable[[Sequence[ArrayView]], Sequence[Launch]] | None = None,
    ) -> None:
        self.live = live
        self.operation = operation
        self.names = names
        self.written = written
        self.nothing = launches is None and type(self).bind is Plan.bind  # there is nothing to move
        self._make_launches = launches
        self.lock = threading.RLock()
        self.launches: Sequence[Any] | None = None  # each a `launch.Bound` or a `launch.TaichiGraph`
        self.pointers: tuple[int, ...] | None = None  # those of the arrays that the launches now read and write
        self._uses: list[list[Use]] = []  # for each array, the arguments that it is
        self._setters: dict[str, Callable[[int], None]] = {}
        self._start: Callable[[], None]  # makes the launches

    def revalidate(self, arrays: Mapping[str, ArrayView], numbers: Mapping[str, int]) -> tuple[Any, Entries]:
        """Check the values that a run brings.

        Args:
            arrays: index arrays by the operation's parameters; their values are checked as far as the host knows them.
            numbers: positions and lengths by the operation's parameters.

        Returns:
            The value that selects the launches of the run, and the entries of their vectors.

        Raises:
            CapacityError, PositionError: a value does not fit the arrays.
        """
        return None, NO_ENTRIES

    def bind(self, arrays: Sequence[ArrayView]) -> Sequence[Launch]:
        """The launches over these arrays."""
        assert self._make_launches is not None
        return self._make_launches(arrays)

    def check_overlaps(self, arrays: Sequence[ArrayView]) -> None:
        """Check that destinations share no element with another array.

        Raises:
            ShapeError: one does.
        """
        checks.disjoint(list(zip(self.names, arrays, self.written, strict=True)), self.operation)

    def run(self, arrays: Sequence[ArrayView], entries: Entries = NO_ENTRIES) -> None:
        """Launch over these arrays, with these entries in the kernels' vectors.

        Raises:
            ShapeError: a destination overlaps another array.
        """
        if self.nothing:
            return
        pointers = arrays.pointers if type(arrays) is Views else tuple([a.ptr for a in arrays])
        if self.launches is None and not self._bind_and_keep(arrays, pointers):
            self._run_alone(arrays, entries)
            return
        with self.lock:
            if pointers != self.pointers:
                self._move(arrays, pointers)
            for name, value in entries.items():
                self._setters[name](value)
            self._start()
            if self.live.is_spirv and 0 in pointers:
                self._release()

    def prepare(self, arrays: Sequence[ArrayView]) -> None:
        """Do every step of `run` that can fail, but launch nothing: for calls that first write and then read.

        Raises:
            As `run` does, and what binding raises.
        """
        if self.nothing:
            return
        pointers = tuple([a.ptr for a in arrays])
        if self.launches is None and not self._bind_and_keep(arrays, pointers):
            self.check_overlaps(arrays)
            self.bind(Staging(self.live, arrays, self.written, filled=False).arrays)
            return
        with self.lock:
            if pointers != self.pointers:
                self._move(arrays, pointers)
            if self.live.is_spirv and 0 in pointers:
                self._release()

    def _bind_and_keep(self, arrays: Sequence[ArrayView], pointers: tuple[int, ...]) -> bool:
        """Bind for this run and later ones, unless arrays are staged or launches recorded; return whether it did."""
        if launch.is_recording() or (not self.live.is_cpu and any(a.is_staged for a in arrays)):
            return False
        with self.live.lock:  # several threads at their first run bind only once
            if self.launches is None:
                self._bind_once(arrays, pointers)
        return True

    def _bind_once(self, arrays: Sequence[ArrayView], pointers: tuple[int, ...]) -> None:
        self.check_overlaps(arrays)
        apart = [a.restrided(a.shape, a.strides) for a in arrays]  # an array that is given twice counts as two here
        launches = self.bind(apart)
        bounds = [bound for bound, _ in launches]
        self._uses = [[Use(b, i) for b, used in launches for i, u in enumerate(used) if u is a] for a in apart]
        self._setters = _Setters(bounds)
        self.pointers = pointers
        self._start = in_turn([bound.launcher() for bound in bounds])
        if self.loop_entry:
            self.launch_again = _both(self._setters[self.loop_entry], self._start)
        self.launches = bounds

    def _move(self, arrays: Sequence[ArrayView], pointers: tuple[int, ...]) -> None:
        """Let the launches read and write these arrays, of the form that was bound."""
        self.check_overlaps(arrays)
        before = self.pointers
        self.pointers = None  # if this fails half-way, the next run sets all again
        for j, pointer in enumerate(pointers):
            if before is None or pointer != before[j] or not pointer:
                for bound, i, jump in self._uses[j]:
                    if pointer:
                        bound.set_pointer(i, pointer + jump)
                    else:
                        bound.set_array(i, arrays[j])
        self.pointers = pointers

    def _release(self) -> None:
        """Keep none of the caller's memory alive that has no address."""
        for uses in self._uses:
            for bound, i, _ in uses:
                bound.release((i,))
        self.pointers = None

    def _run_alone(self, arrays: Sequence[ArrayView], entries: Entries) -> None:
        """Bind for this run only: over copies of host arrays, or for launches that are recorded and not made."""
        self.check_overlaps(arrays)
        stage = Staging(self.live, arrays, self.written)
        bounds = [bound for bound, _ in self.bind(stage.arrays)]
        setters = _Setters(bounds)
        for name in entries:
            setters[name](entries[name])
        for bound in bounds:
            bound.launch()
        stage.finish()


class PlannedCall(NamedTuple):
    """A plan and the arrays of one call, whose values are checked: `run` launches it."""

    plan: Plan
    arrays: Sequence[ArrayView]
    owners: tuple[Any, ...] = ()  # objects that own the memory, which views do not keep alive

    def prepare(self) -> None:
        """`Plan.prepare` over these arrays."""
        self.plan.prepare(self.arrays)

    def run(self) -> None:
        """`Plan.run` over these arrays."""
        self.plan.run(self.arrays)
