"""Collect calls that name their arrays instead of holding them, and compile them to a `Graph`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from tikv import runtime
from tikv.arrays import runtime_of
from tikv.errors import OptionError
from tikv.graphs.calls import LENGTHS, GraphCall, Roles
from tikv.graphs.graph import Graph, choose_backend
from tikv.ops import checks
from tikv.ops.attention import decode_attention, merge_states, paged_decode_attention
from tikv.ops.copy import copy, copy_kv
from tikv.ops.paged import write_slots
from tikv.ops.ragged import append_ragged
from tikv.ops.write_qkv import write_qkv

_WRITTEN = ("cache", "k_cache", "v_cache", "k_pool", "v_pool", "k_dst", "v_dst")  # parameters that are written to


class GraphBuilder(runtime.NotCopied):
    """Collect operations over named arrays and numbers; `compile` makes a `Graph` of them.

    Each method takes the arguments of the function of the same name, with names in place of arrays; only ``mask`` and
    ``parents`` are given as arrays. ``position``, ``first_valid`` and lengths may be ints, or names for which each run
    gives a number. A length may also be the name of an array. Lengths, positions and indices in device memory may
    change between runs: ``seq_lens``, ``context_lens``, ``block_tables``, ``cache_offsets``, ``slot_mapping``,
    ``rope_positions``, ``indices``. Attention, merges and the fused write name what they return, for later calls and
    for the caller of `Graph.run`.

    Raises:
        OptionError: a name is not a string, is already taken, or stands for an array in one place and for a number in
            another; or an option is given that the function does not have.

    Examples:
        A decode step with a shared prefix writes the new token, attends to the prefix and to the sequence's own
        tokens, and merges both:

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
        >>> results["out"][0, 0].tolist()  # 4 own values of 2 and 4 shared ones of 1, all with the same weight
        [1.5, 1.5, 1.5, 1.5]
    """

    instead = "Call its methods again in the other process."

    def __init__(self) -> None:
        self._calls: list[GraphCall] = []
        self._compiled: dict[str, Graph] = {}  # by backend

    def __copy__(self) -> GraphBuilder:
        builder = type(self)()
        builder._calls = list(self._calls)
        return builder

    def __deepcopy__(self, memo: dict[int, Any]) -> GraphBuilder:
        return self.__copy__()  # a call names its arrays and holds none, so nothing deeper is to be copied

    def copy(self, src: str, cache: str, *, position: str | int, **options: Any) -> None:
        """`tikv.copy`."""
        self._add(copy, {"src": src, "cache": cache}, {"position": position}, options)

    def copy_kv(self, k: str, v: str, k_cache: str, v_cache: str, *, position: str | int, **options: Any) -> None:
        """`tikv.copy_kv`."""
        names = {"k": k, "v": v, "k_cache": k_cache, "v_cache": v_cache}
        self._add(copy_kv, names, {"position": position}, options)

    def append_ragged(self, k_new: str, v_new: str, k_cache: str, v_cache: str, cache_offsets: str) -> None:
        """`tikv.append_ragged`."""
        names = {"k_new": k_new, "v_new": v_new, "k_cache": k_cache, "v_cache": v_cache, "cache_offsets": cache_offsets}
        self._add(append_ragged, names, {}, {})

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
        self._add(write_slots, names | _given(k_scale=k_scale, v_scale=v_scale), {}, options)

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
        self._add(write_qkv, names, numbers, {"num_q_heads": num_q_heads, **options}, {"out": out})

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
        sink_logits: str | None = None,
        alibi_slopes: str | None = None,
        indices: str | None = None,
        **options: Any,
    ) -> None:
        """`tikv.decode_attention`; ``out`` and, if wanted, ``lse`` and ``mass`` name what it returns."""
        names = {"q": q, "k_cache": k_cache, "v_cache": v_cache, **_given(k_scale=k_scale, v_scale=v_scale)}
        names |= _given(sink_logits=sink_logits, alibi_slopes=alibi_slopes, indices=indices)
        numbers: dict[str, str | int] = {"seq_lens": seq_lens}
        if first_valid is not None:
            numbers["first_valid"] = first_valid
        outputs = {"out": out, **_given(return_lse=lse, return_mass=mass)}
        self._add(decode_attention, names, numbers, options, outputs)

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
        sink_logits: str | None = None,
        alibi_slopes: str | None = None,
        indices: str | None = None,
        **options: Any,
    ) -> None:
        """`tikv.paged_decode_attention`; ``out`` and, if wanted, ``lse`` name what it returns."""
        names = {"q": q, "k_pool": k_pool, "v_pool": v_pool, "block_tables": block_tables}
        names |= _given(k_scale=k_scale, v_scale=v_scale, sink_logits=sink_logits, alibi_slopes=alibi_slopes)
        names |= _given(indices=indices)
        outputs = {"out": out, **_given(return_lse=lse)}
        self._add(paged_decode_attention, names, {"context_lens": context_lens}, options, outputs)

    def merge_states(
        self, out_a: str, lse_a: str, out_b: str, lse_b: str, *, out: str = "out", lse: str = "lse", **options: Any
    ) -> None:
        """`tikv.merge_states`; ``out`` and ``lse`` name what it returns."""
        names = {"out_a": out_a, "lse_a": lse_a, "out_b": out_b, "lse_b": lse_b}
        self._add(merge_states, names, {}, options, {"out": out, "lse": lse})

    def _add(
        self,
        function: Callable[..., Any],
        arrays: dict[str, str],
        numbers: dict[str, str | int],
        options: dict[str, Any],
        outputs: Mapping[str, str] | None = None,  # by the parameter that they stand for
    ) -> None:
        operation, outputs = function.__name__, outputs or {}
        where = f"GraphBuilder.{operation}"
        for parameter, value in [*arrays.items(), *outputs.items()]:
            if not isinstance(value, str):
                raise OptionError(f"{where}: {parameter} is {value!r}. Pass the name of an array, a str.")
        for parameter, number in numbers.items():
            if not isinstance(number, str):
                checks.integer(number, parameter, where)
        known = inspect.signature(function).parameters.keys() - {*arrays, *numbers, "out", "return_lse", "return_mass"}
        unknown = sorted(options.keys() - known)
        if unknown:
            raise OptionError(f"{where}: unknown option {', '.join(unknown)}. Use any of {', '.join(sorted(known))}.")
        if options.get("impl", "taichi") not in ("auto", "taichi"):
            raise OptionError(f"{where}: impl={options['impl']!r} is not one of Taichi's kernels. Leave impl out.")
        options |= {p: True for p in outputs if p.startswith("return_")}
        if "impl" in known:
            options["impl"] = "taichi"
        lengths = {p: n for p, n in numbers.items() if p in LENGTHS and isinstance(n, str)}
        numbers = {p: n for p, n in numbers.items() if p not in lengths}
        written = tuple(p for p in arrays if p in _WRITTEN or (p.endswith("_scale") and operation.startswith("write")))
        names = {**arrays, **lengths}
        call = GraphCall(operation, function, names, numbers, options, tuple(outputs.values()), written)
        self._check_names(where, call)
        self._calls.append(call)
        self._compiled.clear()

    def _check_names(self, where: str, call: GraphCall) -> None:
        """Raise OptionError unless each name stands for one thing."""
        roles = Roles([*self._calls, call._replace(outputs=())])
        both = sorted((roles.arrays | roles.outputs) & roles.numbers)
        if both:
            raise OptionError(f"{where}: {', '.join(both)} names both an array and a number. Rename one of them.")
        for name in call.outputs:
            if name in roles.arrays | roles.outputs | roles.numbers | roles.either or call.outputs.count(name) > 1:
                raise OptionError(f"{where}: the output name {name!r} is already taken. Choose another.")

    def compile(self, *, backend: str = "auto") -> Graph:
        """The graph of the calls so far, for the current runtime; the same graph until a call is added.

        Args:
            backend: how runs launch. "ti.graph": Taichi runs one compiled `ti.graph`. "launches": kernels that were
                bound once are launched one after the other, on CPU through launch contexts that are kept, on CUDA by
                the driver on torch's current stream, where a CUDA graph may capture them. "auto": "ti.graph" on Vulkan
                and Metal, "launches" on CPU and CUDA, and where ``TIKV_LAUNCHER=public``.

        Raises:
            OptionError: there are no calls, or the backend does not exist.
            ArchError: the backend is "ti.graph" on CPU or CUDA. A `ti.graph` takes only whole `ti.ndarray`s, not the
                addresses of NumPy or torch arrays, and kernels on CPU and CUDA take the number of their iterations from
                an array's extent.

        Exactness: both backends give the same bits.
        Cost: none yet; the first `Graph.run` with arrays of a kind compiles the kernels. On Vulkan (lavapipe), a launch
            by a `ti.graph` takes 0.65 times as long as a separate one; on CPU, it would take 6 times as long as one
            through a kept launch context. ``pytest benches/graphs/bench_graph.py --arch cpu,vulkan`` times whole steps.
        """
        operation = "GraphBuilder.compile"
        if not self._calls:
            raise OptionError(f"{operation}: no calls were added. Add some, for instance copy_kv.")
        live = runtime_of()
        backend = choose_backend(backend, live, operation)
        graph = self._compiled.get(backend)
        if graph is None or graph.runtime is not live:
            graph = self._compiled[backend] = Graph(tuple(self._calls), live, backend)
        return graph

    def __repr__(self) -> str:
        return f"GraphBuilder({', '.join(call.operation for call in self._calls)})"


def _given(**names: str | None) -> dict[str, str]:
    return {parameter: name for parameter, name in names.items() if name is not None}
