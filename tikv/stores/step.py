"""The decode step of a store as one graph: append, advance the positions, attend."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from tikv import launch, runtime
from tikv.arrays import (
    Array,
    Arrays,
    ArrayView,
    CacheArray,
    describe,
    is_followed,
    refuse_backward,
    to_device,
    view,
    write_host,
)
from tikv.errors import OptionError
from tikv.graphs.calls import GraphCall
from tikv.graphs.graph import Graph, choose_backend
from tikv.ops import checks
from tikv.ops.staging import KnownOnHost
from tikv.runtime.interrupts import Held
from tikv.stores.layers.counts import advance_counts
from tikv.stores.store import KVCacheStore


def compile_step(
    store: KVCacheStore,
    *,
    layers: int | None = None,
    layout: str = "token_major",
    attend: bool = True,
    scale: float | None = None,
    softcap: float | None = None,
    return_lse: bool = False,
    backend: str = "auto",
) -> Step:
    """A decode step of a store as one graph: append the new tokens, advance the positions, attend to all tokens.

    Positions are in device memory, one per sequence, and the step itself advances them. On CUDA it may be captured in
    a CUDA graph and replayed; afterwards tell `KVCacheStore.advance` how many tokens the replays appended.

    Args:
        store: a `KVCacheStore`, of any dtype, with windows and sinks or without.
        layers: one layer's index; None for all layers at once, whose arrays are stacked on a leading axis. None is for
            callers who have the arrays of all layers before any layer attends; in a model, each layer needs the result
            of the one before.
        layout: of k, v and q, "token_major" or "head_major".
        attend: False for a step that only writes.
        scale, softcap, return_lse: as in `KVCacheStore.attend`.
        backend: as in `GraphBuilder.compile`.

    Raises:
        PositionError, DTypeError: the layer does not exist, or a layer was compacted.
        OptionError: the layout or the backend does not exist; the store is of another kind, or only the host can count
            its tokens, as in a store with groups along tokens (``tikv.Quant(axis="tokens")``).
        StaleRuntimeError: the store's runtime is gone, now or at a run.

    Exactness: the same bits as `KVCacheStore.append` and `KVCacheStore.attend` one after the other.
    Cost: the launches of both, and one that advances the positions.

    Examples:
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
    if not isinstance(store, KVCacheStore):
        raise OptionError(f"{operation}: {type(store).__name__} has no step. Pass a KVCacheStore.")
    runtime.require_alive(store.runtime, operation)
    if layers is not None:
        layers = checks.integer(layers, "layers", operation, high=store.num_layers - 1)
    checks.option(layout, "layout", operation, checks.LAYOUTS)
    store._storage.require_positions(operation, "Call append() and attend().")
    options = {"scale": scale, "softcap": softcap, "return_lse": bool(return_lse)} if attend else None
    return Step(store, layers, layout, options, backend)


class Step(runtime.NotCopied):
    """A store's decode step, prepared once: it appends a token and attends in one graph; see `compile_step`.

    Attributes:
        store: the store.
        graph: the `Graph` that runs.
        positions: (batch,) int64 on the device: the position of each sequence's next token, as of the last run or
            replay. After a call such as `KVCacheStore.append` or `KVCacheStore.trim`, the next run corrects them.
    """

    instead = "Call compile_step for each store."

    def __init__(
        self, store: KVCacheStore, layer: int | None, layout: str, options: dict[str, Any] | None, backend: str
    ) -> None:
        self.store = store
        self._layers = range(store.num_layers) if layer is None else range(layer, layer + 1)
        self._stacked = layer is None
        self._token_axis = -3 if layout == "token_major" else -2
        self._layout = layout
        self._options = options
        self._backend = choose_backend(backend, store.runtime, "compile_step")
        with store.lock:  # taken before the runtime's lock, in the order of all calls of a store
            self._build()

    def _build(self) -> None:
        """Make the graph for the store's current memory."""
        store = self.store
        self._batch = store.batch_size
        self._memory_version = store.memory_version
        self._length = store.layer_length(self._layers[0])  # the value of the positions on the device
        positions = to_device(np.full(self._batch, self._length, np.int64), store.runtime)
        # The lengths that attention reads after the write: the host knows them, unless replays advanced without it.
        self._lens = np.zeros(self._batch, np.int64)
        lens = positions.restrided(positions.shape, positions.strides)
        lens.owner = KnownOnHost(positions.owner, None if store.runtime.is_cuda else self._lens)
        self._arrays = {"positions": positions} | ({} if self._options is None else {"lens": lens})
        self.positions = CacheArray(positions, store.runtime)
        self.graph = Graph(self._calls(), store.runtime, self._backend)

    def _calls(self) -> tuple[GraphCall, ...]:
        """The calls that append, advance the positions, and attend in each layer."""
        # The calls must not refer to `self`, which refers to the graph: without a cycle, memory is freed with the step.
        store, stacked, asked, layers = self.store, self._stacked, self._options, self._layers
        layout, token_axis = self._layout, self._token_axis

        def append(k: Array, v: Array, positions: Array) -> None:
            options = {"layout": layout, "positions": positions}
            store.append_all(k, v, **options) if stacked else store.append(layers[0], k, v, **options)

        def advance(k: ArrayView, positions: ArrayView) -> None:
            advance_counts(store.runtime, positions, k.shape[token_axis])

        def attend(i: int, q: ArrayView, seq_lens: ArrayView, first_valid: int) -> Arrays:
            mine = q.restrided(q.shape[1:], q.strides[1:], i * q.strides[0]) if stacked else q
            return store.attend(layers[i], mine, layout=layout, impl="taichi", seq_lens=seq_lens, **(asked or {}))

        calls = [
            GraphCall("append", append, {"k": "k", "v": "v", "positions": "positions"}, {}, {}, (), ()),
            GraphCall("advance", advance, {"k": "k", "positions": "positions"}, {}, {}, (), ()),
        ]
        for i in range(len(layers)) if asked is not None else ():
            outputs = (f"out{i}", f"lse{i}") if asked and asked["return_lse"] else (f"out{i}",)
            function, arrays = functools.partial(attend, i), {"q": "q", "seq_lens": "lens"}
            calls.append(GraphCall("attend", function, arrays, {"first_valid": f"first_valid{i}"}, {}, outputs, ()))
        return tuple(calls)

    def run(self, k: Array, v: Array, q: Array | None = None) -> Arrays:
        """Append k and v, then attend with q, which comes last since a step that only writes has no q.

        Args:
            k, v: as `KVCacheStore.append` takes them, or `append_all` for all layers.
            q: as `KVCacheStore.attend` takes it, with a leading axis of layers if the step has all layers; None when
                the step only writes.

        Returns:
            What `KVCacheStore.attend` returns, as a list if the step has all layers; None when the step only writes.
            The step owns the memory, and the next run overwrites it.

        Raises:
            CapacityError: a layer without a window has no room. Nothing is written.
            PositionError: the layers of the step have different lengths.
            OptionError: q is missing, or is given to a step that only writes.
            ShapeError, DTypeError, StaleRuntimeError: as `KVCacheStore.append` and `KVCacheStore.attend`.
            ArchError: a CUDA graph is being captured, and no `prepare` or run came before it.
        """
        store = self.store
        with store.lock:
            results = self._run("Step.run", k, v, q)
            store._followed |= is_followed(k, v)
        if store._followed or is_followed(q):
            return _refusing(results, (q, k, v), store._followed)
        return results

    def prepare(self, k: Array, v: Array, q: Array | None = None) -> None:
        """Do all that `run` does except launch and count; before a CUDA graph captures a run, call this or `run`.

        Raises:
            As `run`.
        """
        with self.store.lock:
            self._run("Step.prepare", k, v, q, prepare_only=True)

    def _run(self, operation: str, k: Array, v: Array, q: Array, prepare_only: bool = False) -> Arrays:
        store = self.store
        runtime.require_alive(store.runtime, operation)
        if (q is None) != (self._options is None):
            wrong = "attends, and q is missing. Pass q" if q is None else "only writes, and q is given. Leave q out"
            other = "attend=False" if q is None else "attend=True"
            raise OptionError(f"{operation}: this step {wrong}, or make the step with {other}.")
        if q is not None and self._stacked:
            queries = view(q, "q", operation)
            order = "T, Hq, D" if self._layout == "token_major" else "Hq, T, D"
            shapes = f"(layers, batch, {order}) or (layers, batch, Hq, D), or without the batch where that is 1"
            checks.rank(queries, (3, 4, 5), "q", shapes, operation)
            checks.extent(
                queries.shape[0], len(self._layers), "the number of layers of q", operation, describe(queries)
            )
        if store.memory_version != self._memory_version:
            self._build()
        keys = view(k, "k", operation)
        tokens = keys.shape[self._token_axis] if keys.ndim >= 3 else 0
        capturing = launch.is_captured(store.runtime)
        first_valid = store.check_step(operation, self._layers, tokens)
        length = store.layer_length(self._layers[0])
        if length != self._length:
            what = "the store's length, which has changed since this step's last call,"
            launch.refuse_during_capture(store.runtime, operation, what, "Call Step.prepare before the capture.")
            write_host(np.full(self._batch, length, np.int64), self._arrays["positions"])
            self._length = length
        self._lens[:] = length + tokens
        values = {"k": k, "v": v, **self._arrays}
        if q is not None:
            values["q"] = q
            values |= {f"first_valid{i}": n for i, n in enumerate(first_valid)}
        if prepare_only:
            self.graph.prepare(values)
            return None
        with Held():
            results = self.graph.run(values)
            if not capturing:
                store.count_step(self._layers, tokens)
                self._length = length + tokens
        if self._options is None:
            return None
        outputs = [results[f"out{i}"] for i in range(len(self._layers))]
        if self._options["return_lse"]:
            outputs = [(out, results[f"lse{i}"]) for i, out in enumerate(outputs)]
        return outputs if self._stacked else outputs[0]

    def __repr__(self) -> str:
        what = "all layers" if self._stacked else f"layer {self._layers[0]}"
        return f"Step({what} of {self.store!r}; {self.graph.backend})"


def _refusing(results: Any, inputs: tuple[Any, ...], followed: bool) -> Any:
    """`refuse_backward` for a step's results, detached first: later runs may write to them without gradients."""
    if isinstance(results, (list, tuple)):
        return type(results)([_refusing(a, inputs, followed) for a in results])
    return refuse_backward(results.detach() if hasattr(results, "detach") else results, *inputs, followed=followed)
