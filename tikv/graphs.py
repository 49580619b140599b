"""Several operations compiled into one graph that runs many times: checked and bound once, launched together.

A `GraphBuilder` takes the library's calls over names instead of arrays. The first run of a `Graph` with arrays of a
kind checks every call and records its launches; later runs put in addresses and positions. Where all arrays are
Taichi's own memory (stores on Vulkan and Metal) the launches become one `ti.graph`; where memory has an address they
are relaunched one after the other, which costs less there than `ti.graph` does.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Mapping
from typing import Any, NamedTuple

from tikv import checks, launch, ops, runtime
from tikv.arrays import ArrayView, view
from tikv.errors import OptionError
from tikv.launch import Recorded
from tikv.moves import MAX_PLANS, reduced_position

_HOMES = {
    "copy": "ops",
    "copy_kv": "ops",
    "append_ragged": "plans",
    "write_slots": "pools",
    "write_qkv": "qkv",
    "decode_attention": "attention",
    "paged_decode_attention": "attention",
    "merge_states": "attention",
}


class Call(NamedTuple):
    """One operation of a graph: its arrays by name, its position, its options, and names for what it returns."""

    operation: str
    arrays: dict[str, str]
    positional: int
    position: str | int | None
    options: dict[str, Any]
    outputs: tuple[str, ...]


class GraphBuilder:
    """Collect operations over named arrays; `compile` makes a `Graph` of them.

    The methods take what the functions of the same names take, with names in place of arrays. ``position`` may be an
    int or the name of a scalar given to each run. Attention and merges name what they return, for later calls and for
    the caller of `Graph.run`.

    Example:
        One decode step: write the new token, attend to both halves of the context, merge.

        >>> import numpy as np, tikv
        >>> g = tikv.GraphBuilder()
        >>> g.copy_kv("k", "v", "k_cache", "v_cache", position="position")
        >>> graph = g.compile()
        >>> k, v = np.ones((1, 2, 4), np.float32), np.ones((1, 2, 4), np.float32)
        >>> k_cache, v_cache = np.zeros((2, 2, 8, 4), np.float32)
        >>> for position in range(3):
        ...     _ = graph.run({"k": k, "v": v, "k_cache": k_cache, "v_cache": v_cache, "position": position})
        >>> k_cache[0, :, 0].tolist()
        [1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    """

    def __init__(self) -> None:
        self._calls: list[Call] = []

    def copy(self, src: str, cache: str, *, position: str | int, **options: Any) -> None:
        """`tikv.copy`."""
        self._add("copy", {"src": src, "cache": cache}, 2, position, options)

    def copy_kv(self, k: str, v: str, k_cache: str, v_cache: str, *, position: str | int, **options: Any) -> None:
        """`tikv.copy_kv`."""
        self._add("copy_kv", {"k": k, "v": v, "k_cache": k_cache, "v_cache": v_cache}, 4, position, options)

    def append_ragged(self, k_new: str, v_new: str, k_cache: str, v_cache: str, cache_offsets: str) -> None:
        """`tikv.append_ragged`."""
        names = {"k_new": k_new, "v_new": v_new, "k_cache": k_cache, "v_cache": v_cache, "cache_offsets": cache_offsets}
        self._add("append_ragged", names, 5, None, {})

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
        self._add("write_slots", names | _given(k_scale=k_scale, v_scale=v_scale), 5, None, options)

    def write_qkv(
        self,
        qkv: str,
        k_dst: str,
        v_dst: str,
        *,
        num_q_heads: int,
        slot_mapping: str,
        out: str = "q",
        rope_positions: str | None = None,
        k_scale: str | None = None,
        v_scale: str | None = None,
        **options: Any,
    ) -> None:
        """`tikv.write_qkv` into a pool; ``out`` names the rotated queries, and slots and positions are arrays."""
        names = {"qkv": qkv, "k_dst": k_dst, "v_dst": v_dst, "slot_mapping": slot_mapping}
        names |= _given(rope_positions=rope_positions, k_scale=k_scale, v_scale=v_scale)
        self._add("write_qkv", names, 3, None, {"num_q_heads": num_q_heads, **options}, (out,))

    def decode_attention(
        self,
        q: str,
        k_cache: str,
        v_cache: str,
        seq_lens: str,
        *,
        out: str = "out",
        lse: str | None = None,
        k_scale: str | None = None,
        v_scale: str | None = None,
        **options: Any,
    ) -> None:
        """`tikv.decode_attention`; ``out`` and, if wanted, ``lse`` name what it returns."""
        names = {"q": q, "k_cache": k_cache, "v_cache": v_cache, "seq_lens": seq_lens}
        names |= _given(k_scale=k_scale, v_scale=v_scale)
        options = {"impl": "taichi", "return_lse": lse is not None, **options}
        self._add("decode_attention", names, 4, None, options, (out,) if lse is None else (out, lse))

    def paged_decode_attention(
        self,
        q: str,
        k_pool: str,
        v_pool: str,
        block_tables: str,
        context_lens: str,
        *,
        out: str = "out",
        lse: str | None = None,
        k_scale: str | None = None,
        v_scale: str | None = None,
        **options: Any,
    ) -> None:
        """`tikv.paged_decode_attention`; ``out`` and, if wanted, ``lse`` name what it returns."""
        names = {"q": q, "k_pool": k_pool, "v_pool": v_pool, "block_tables": block_tables, "context_lens": context_lens}
        names |= _given(k_scale=k_scale, v_scale=v_scale)
        options = {"return_lse": lse is not None, **options}
        self._add("paged_decode_attention", names, 5, None, options, (out,) if lse is None else (out, lse))

    def merge_states(
        self, out_a: str, lse_a: str, out_b: str, lse_b: str, *, out: str = "out", lse: str = "lse", **options: Any
    ) -> None:
        """`tikv.merge_states`; ``out`` and ``lse`` name what it returns."""
        names = {"out_a": out_a, "lse_a": lse_a, "out_b": out_b, "lse_b": lse_b}
        self._add("merge_states", names, 4, None, options, (out, lse))

    def _add(
        self,
        operation: str,
        arrays: dict[str, str],
        positional: int,
        position: str | int | None,
        options: dict[str, Any],
        outputs: tuple[str, ...] = (),
    ) -> None:
        for parameter, name in [*arrays.items(), *(("an output", name) for name in outputs)]:
            if not isinstance(name, str):
                raise OptionError(
                    f"GraphBuilder.{operation}: {parameter} is {name!r}; give the name of an array, a str."
                )
        earlier = {name for call in self._calls for name in call.outputs}
        for name in outputs:
            if name in earlier or name in arrays.values():
                raise OptionError(
                    f"GraphBuilder.{operation}: the output {name!r} is a name already taken. Choose another."
                )
        self._calls.append(Call(operation, arrays, positional, position, dict(options), outputs))

    def compile(self) -> Graph:
        """The graph of the calls so far, in the runtime that lives now.

        Raises:
            OptionError: there are none.

        Cost: none yet; the first `Graph.run` with arrays of a kind compiles the kernels.
        """
        if not self._calls:
            raise OptionError("GraphBuilder.compile: no calls were added. Add some, for instance copy_kv.")
        return Graph(tuple(self._calls), runtime.current())

    def __repr__(self) -> str:
        return f"GraphBuilder({', '.join(call.operation for call in self._calls)})"


def _given(**names: str | None) -> dict[str, str]:
    return {parameter: name for parameter, name in names.items() if name is not None}


class Graph:
    """Operations that run together, many times, with arrays of the kinds they first saw or of others."""

    def __init__(self, calls: tuple[Call, ...], live: runtime.Runtime) -> None:
        self.runtime = live
        self._calls = calls
        produced: set[str] = set()
        self.arrays: list[str] = []  # names of the arrays that `run` takes
        for call in calls:
            self.arrays += [n for n in call.arrays.values() if n not in produced and n not in self.arrays]
            produced.update(call.outputs)
        self.scalars = list(dict.fromkeys(call.position for call in calls if isinstance(call.position, str)))
        self._plans: dict[Any, _Plan] = {}
        self._lock = threading.RLock()

    def run(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Run all calls, in the order they were added.

        Args:
            values: an array for each name in `arrays`, an int for each in `scalars`.

        Returns:
            What the calls return, by their names. The memory is the graph's own: the next run writes it again.

        Raises:
            OptionError: a name is missing or unknown.
            StaleRuntimeError: Taichi was started again since `compile`.
            ShapeError, DTypeError, CapacityError, PositionError: as the calls raise them, before anything is launched.

        Exactness: the bits of the calls one by one.
        Cost: one launch a kernel, without the checks of each call after the first run with arrays of a kind.
        """
        operation = "Graph.run"
        runtime.require_alive(self.runtime, operation)
        wanted = {*self.arrays, *self.scalars}
        if values.keys() != wanted:
            missing, unknown = sorted(wanted - values.keys()), sorted(values.keys() - wanted)
            problem = f"missing {', '.join(missing)}" if missing else f"unknown {', '.join(unknown)}"
            raise OptionError(f"{operation}: {problem}. This graph takes {', '.join(sorted(wanted))}.")
        views = {name: view(values[name], name, operation) for name in self.arrays}
        positions = {name: checks.integer(values[name], name, operation) for name in self.scalars}
        if not self.runtime.is_cpu and any(a.device == "cpu" for a in views.values()):
            return self._one_by_one(values)
        key = tuple(a.key for a in views.values())
        with self._lock:
            plan = self._plans.get(key)
            if plan is None:
                if len(self._plans) >= MAX_PLANS:
                    self._plans.clear()
                plan = self._plans[key] = self._record(values, views)
            plan.run(views, positions)
            return dict(plan.outputs)

    def _one_by_one(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Each call by itself: what arrays that the device cannot see leave."""
        known = dict(values)
        outputs: dict[str, Any] = {}
        for call in self._calls:
            outputs.update(_apply(call, known))
            known.update(outputs)
        return outputs

    def _record(self, values: Mapping[str, Any], views: dict[str, ArrayView]) -> _Plan:
        """Check every call with these arrays, and keep its launches instead of launching."""
        own = all(a.handle is not None and str(a.handle.dtype) == "u32" for a in views.values())
        known, steps, outputs = dict(values), [], {}
        for call in self._calls:
            with launch.recording(self.runtime, word_bytes=4 if own else 8) as recorded:
                results = _apply(call, known)
                plan = next((p for p in self.runtime.plans.values() if isinstance(p, ops.WritePlan)), None)
            outputs.update(results)
            known.update(results)
            for step in recorded:
                moves_with = plan if isinstance(call.position, str) else None
                steps.append(_Step(step, views, call.position if moves_with else None, moves_with, call.operation))
        return _Plan(self.runtime, steps, outputs)

    def __repr__(self) -> str:
        return f"Graph({', '.join(call.operation for call in self._calls)}; {self.runtime!r})"


def _apply(call: Call, known: Mapping[str, Any]) -> dict[str, Any]:
    """Run one call on real arrays; its results by their names."""
    function = getattr(importlib.import_module(f"tikv.{_HOMES[call.operation]}"), call.operation)
    arrays = [known[name] for name in call.arrays.values()][: call.positional]
    named = {parameter: known[name] for parameter, name in list(call.arrays.items())[call.positional :]}
    if call.position is not None:
        named["position"] = known[call.position] if isinstance(call.position, str) else call.position
    results = function(*arrays, **named, **call.options)
    if not call.outputs:
        return {}
    return dict(zip(call.outputs, results if isinstance(results, tuple) else (results,), strict=True))


class _Step:
    """One recorded launch: which of its arrays a run replaces, and which position it follows."""

    def __init__(
        self,
        recorded: Recorded,
        views: dict[str, ArrayView],
        position: str | int | None,
        plan: ops.WritePlan | None,
        operation: str,
    ) -> None:
        self.recorded = recorded
        self.operation = operation
        self.position = position
        self.plan = plan
        self.replaced = [
            (i, name, argument.ptr - a.ptr if a.ptr else 0)
            for i, argument in enumerate(recorded.arguments)
            if isinstance(argument, ArrayView)
            for name, a in views.items()
            if _inside(argument, a)
        ]

    def entry(self, positions: Mapping[str, int]) -> tuple[int, int] | None:
        """(place in the vector of placements, value) for this run's position, checked."""
        if self.plan is None:
            return None
        plan, position = self.plan, positions[str(self.position)]
        if plan.window is None:
            checks.fits_linear(position, plan.tokens, plan.capacity, self.operation)
        return plan.position_entry, reduced_position(position, 0, plan.window or 0)


def _inside(argument: ArrayView, a: ArrayView) -> bool:
    if a.handle is not None or argument.handle is not None:
        return argument.handle is a.handle
    return a.ptr <= argument.ptr < a.ptr + max(1, a.span)


class _Plan:
    """The launches of a graph for arrays of one kind: as one `ti.graph`, or bound one by one."""

    def __init__(self, live: runtime.Runtime, steps: list[_Step], outputs: dict[str, Any]) -> None:
        self.steps = steps
        self.outputs = outputs
        self.compiled = _compile_taichi_graph(steps) if live.is_spirv else None
        self.bound = (
            []
            if self.compiled
            else [s.recorded.kernel.bind(s.recorded.iterations, *s.recorded.arguments) for s in steps]
        )

    def run(self, views: Mapping[str, ArrayView], positions: Mapping[str, int]) -> None:
        entries = [step.entry(positions) for step in self.steps]
        if self.compiled is not None:
            self._run_taichi_graph(views, entries)
            return
        for step, bound, entry in zip(self.steps, self.bound, entries, strict=True):
            with bound.lock:
                for i, name, jump in step.replaced:
                    a = views[name]
                    bound.set_array(i, a if jump == 0 else a.moved(a.shape, a.strides, jump // a.dtype.itemsize))
                if entry is not None:
                    bound.set_entry(len(bound.arguments) - 1, *entry)
                bound.launch()
                bound.release()

    def _run_taichi_graph(self, views: Mapping[str, ArrayView], entries: list[tuple[int, int] | None]) -> None:
        values: dict[str, Any] = {}
        for n, (step, entry) in enumerate(zip(self.steps, entries, strict=True)):
            arguments = list(step.recorded.arguments)
            for i, name, _ in step.replaced:
                arguments[i] = views[name]
            if entry is not None:
                numbers = list(arguments[-1])
                numbers[entry[0]] = entry[1]
                arguments[-1] = numbers
            for i, argument in enumerate(arguments):
                values[f"{n}.{i}"] = _taichi_value(step.recorded.kernel, i, argument)
        assert self.compiled is not None
        self.compiled.run(values)


def _taichi_value(kernel: launch.Kernel, i: int, argument: Any) -> Any:
    ti = runtime.ti
    if kernel.words[i]:
        return argument.handle
    if kernel.lengths[i]:
        return ti.Vector(list(argument), ti.f32 if kernel.is_float[i] else ti.i32)
    return argument


def _compile_taichi_graph(steps: list[_Step]) -> Any:
    """The launches as one compiled `ti.graph`, or None where an array is not of the words its kernel takes."""
    ti = runtime.ti
    kinds = ti.graph.ArgKind
    builder = ti.graph.GraphBuilder()
    for n, step in enumerate(steps):
        kernel = step.recorded.kernel
        arguments = []
        for i, argument in enumerate(step.recorded.arguments):
            name = f"{n}.{i}"
            if word := kernel.words[i]:
                if argument.handle is None or str(argument.handle.dtype) != word:
                    return None
                arguments.append(ti.graph.Arg(kinds.NDARRAY, name, getattr(ti, word), ndim=1))
            elif kernel.lengths[i]:
                number = ti.f32 if kernel.is_float[i] else ti.i32
                arguments.append(ti.graph.Arg(kinds.MATRIX, name, ti.types.vector(kernel.lengths[i], number)))
            else:
                arguments.append(ti.graph.Arg(kinds.SCALAR, name, ti.f32 if kernel.is_float[i] else ti.i32))
        with kernel.runtime.compiling(kernel.fast_math):
            builder.dispatch(kernel.function, *arguments)
    with steps[0].recorded.kernel.runtime.compiling(False):
        return builder.compile()


def compile_step(store: Any, *, layers: Any = None, layout: str = "token_major", attend: bool = True) -> Step:
    """A decode step of a store: append one token's K and V, then attend; for one layer or all of them.

    Args:
        store: a `KVCacheStore`.
        layers: one layer's index; None for all, whose arrays are then stacked on a leading axis.
        layout: of k and v.
        attend: also read; otherwise the step only writes.

    Returns:
        A `Step`: ``step.run(k, v, q)`` appends and returns the attention of ``q``, a list of it for all layers.

    Raises:
        StaleRuntimeError: the store's runtime is gone, now or at a run.

    Example:
        >>> import numpy as np, tikv
        >>> store = tikv.KVCacheStore(num_layers=2, num_kv_heads=1, head_dim=4, capacity=8, dtype="float32")
        >>> step = tikv.compile_step(store, attend=False)
        >>> rows = np.ones((2, 1, 1, 4), np.float32)
        >>> step.run(rows, rows)
        >>> store.length
        1
    """
    runtime.require_alive(store.runtime, "compile_step")
    if layers is not None:
        layers = checks.integer(layers, "layers", "compile_step", high=store.num_layers - 1)
    return Step(store, layers, checks.option(layout, "layout", "compile_step", checks.LAYOUTS), bool(attend))


class Step:
    """A store's decode step, see `compile_step`. Its launches are bound at the first run and kept by the store."""

    def __init__(self, store: Any, layer: int | None, layout: str, attend: bool) -> None:
        self.store = store
        self.layer = layer
        self.layout = layout
        self.attends = attend

    def run(self, k: Any, v: Any, q: Any = None, *, positions: Any = None) -> Any:
        """Append k and v, as `KVCacheStore.append` or `append_all` take them, and attend with q.

        Args:
            k, v: one token of each sequence.
            q: (batch, Hq, D), or (num_layers, batch, Hq, D) for all layers; None when the step only writes.
            positions: positions in device memory (`KVCacheStore.positions_on_device`) that the caller advances, for a
                step that is captured and replayed; None to count on the host.
        """
        runtime.require_alive(self.store.runtime, "Step.run")
        if self.layer is None:
            self.store.append_all(k, v, layout=self.layout, positions=positions)
        else:
            self.store.append(self.layer, k, v, layout=self.layout, positions=positions)
        if not self.attends:
            return None
        if q is None:
            raise OptionError("Step.run: this step attends and needs q. Pass q, or compile_step(store, attend=False).")
        if self.layer is not None:
            return self.store.attend(self.layer, q)
        return [self.store.attend(i, q[i]) for i in range(self.store.num_layers)]


__all__ = ["Graph", "GraphBuilder", "Step", "compile_step"]
