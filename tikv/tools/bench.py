"""`tikv bench`: seconds of timings beside NumPy, torch, mlx and a plain copy of the same bytes, each checked first.

Rounds alternate: tikv, the plain copy, the peers, repeated until a case's time is over, so that other load on the
machine affects all of them. A time is the best of the rounds.
"""

from __future__ import annotations

import concurrent.futures
import ctypes
import importlib
import itertools
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from tikv import arrays, dtypes, launch, reference, runtime
from tikv.errors import TikvError
from tikv.ops import attention, copy, paged
from tikv.stores import store
from tikv.stores.picture import Bars, bars
from tikv.tools import roofline

Array: TypeAlias = np.ndarray[Any, Any]
Call: TypeAlias = Callable[[], Any]
HEADS, WIDTH, LAYERS, BLOCK = 8, 128, 32, 16  # as in Llama 3 8B, Qwen3 8B and most models of their size
TORCH_DEVICES = {"cpu": "cpu", "cuda": "cuda", "metal": "mps"}  # the back ends that torch supports too
MLX_DEVICES = {"cpu": "cpu", "metal": "gpu"}
SHORTEST = 2e-3  # seconds of one round; a faster call is repeated within it
ROUNDS = 3  # the least number of rounds
NOISE = 1.3  # if the median round takes more than this times the fastest, something else used the machine


class Contender(NamedTuple):
    """A call of one library, its results and the expected ones; a tolerance of None means equal bits.

    `wait` waits until all of its calls are done, if the machine's own `wait` does not.
    """

    call: Call
    results: Callable[[], list[tuple[Any, Array]]]
    tolerance: float | None = None
    wait: Call | None = None


@dataclass(frozen=True)
class Row:
    """One case: the microseconds of tikv, each peer and a plain copy of the same bytes, each in its fastest round.

    `spread` is the largest ratio of a median round to the fastest round among them. `left_out` has the peers that could
    not be timed, and why.
    """

    case: str
    arch: str
    bytes_moved: int
    us: float
    memcpy_us: float
    peers_us: dict[str, float]
    spread: float = 1.0
    left_out: dict[str, str] = field(default_factory=dict)

    @property
    def noisy(self) -> bool:
        """Whether something else used the machine during the timing, so that the figures are unreliable."""
        return self.spread > NOISE

    @property
    def gb_per_s(self) -> float:
        """Gigabytes read and written per second."""
        return roofline.gb_per_s(self.bytes_moved, self.us / 1e6)

    @property
    def percent_of_memcpy(self) -> float:
        """The rate at which it moves its bytes, as a percentage of a plain copy's."""
        return roofline.percent_of(self.memcpy_us, self.us)

    def as_dict(self) -> dict[str, Any]:
        """This row as a dict for JSON."""
        fields = {
            **vars(self),
            "gb_per_s": self.gb_per_s,
            "percent_of_memcpy": self.percent_of_memcpy,
            "noisy": self.noisy,
        }
        fields["peers_us"] = {name: round(us, 3) for name, us in self.peers_us.items()}
        return {name: round(value, 3) if isinstance(value, float) else value for name, value in fields.items()}


def memcpy_on_host(nbytes: int) -> Call:
    """A call that copies so many bytes of host memory with the memcpy of all cores."""
    source, target = np.ones(nbytes, np.uint8), np.zeros(nbytes, np.uint8)
    if nbytes < 1 << 20:
        # Handing work to threads costs more than so small a copy.
        return lambda: ctypes.memmove(target.ctypes.data, source.ctypes.data, nbytes)
    threads = runtime.usable_cores()
    pool = concurrent.futures.ThreadPoolExecutor(threads)
    cuts = [nbytes * i // threads for i in range(threads + 1)]
    views = [(target[a:b], source[a:b]) for a, b in itertools.pairwise(cuts)]
    parts = [(to.ctypes.data, part.ctypes.data, part.nbytes) for to, part in views]

    def run() -> Array:
        list(pool.map(lambda part: ctypes.memmove(*part), parts))
        return target if source.size else source  # naming both keeps them alive

    return run


class Machine:
    """The back end that is timed: arrays on it, waiting for it, and its plain copy."""

    def __init__(self, live: runtime.Runtime) -> None:
        self.live = live
        self.torch = self._torch()
        self.mlx = self._mlx()
        self.rng = np.random.default_rng(0)

    def _torch(self) -> Any:
        """The torch module, if it works on this back end's device."""
        if self.live.arch not in TORCH_DEVICES:
            return None
        try:
            torch = importlib.import_module("torch")
        except ImportError:
            return None
        there = {"cpu": lambda: True, "cuda": torch.cuda.is_available, "metal": torch.backends.mps.is_available}
        return torch if there[self.live.arch]() else None

    def _mlx(self) -> Any:
        """The module mlx.core, if it works on this back end's device."""
        if self.live.arch not in MLX_DEVICES:
            return None
        try:
            mlx = importlib.import_module("mlx.core")
        except ImportError:
            return None
        if self.live.arch == "metal" and not mlx.metal.is_available():
            return None
        mlx.set_default_device(getattr(mlx, MLX_DEVICES[self.live.arch]))
        return mlx

    def numbers(self, dtype: str, *shape: int) -> Array:
        """Ordinary values: subnormals and NaN would slow some conversions down."""
        values = self.rng.random(shape, np.float32) - np.float32(0.5)
        array: Array = values.astype(dtypes.parse(dtype, "bench").numpy)
        return array

    def on_device(self, array: Array) -> Any:
        """A copy where the back end works: a NumPy array on the CPU, device memory elsewhere."""
        if self.live.is_cpu:
            return array.copy()
        return arrays.CacheArray(arrays.to_device(np.ascontiguousarray(array), self.live), self.live)

    def tensor(self, array: Array) -> Any:
        """A torch tensor on the same device."""
        return self.torch.from_numpy(array.copy()).to(TORCH_DEVICES[self.live.arch])

    def wait(self) -> None:
        """Wait until everything launched is done."""
        if not self.live.is_cpu:
            self.live.synchronize()
            if self.torch is not None:
                getattr(self.torch, TORCH_DEVICES[self.live.arch]).synchronize()

    def memcpy(self, nbytes: int) -> Call:
        """A call that copies half of so many bytes, so that it reads and writes them: all cores' memcpy, or a GPU's."""
        half = max(nbytes // 2, 1)
        if not self.live.is_cpu:
            a, b = (arrays.Memory(half, self.live) for _ in "ab")
            for memory in (a, b):
                memory.clear()
            method = "copy_" if hasattr(b.block, "copy_") else "copy_from"
            return lambda: getattr(b.block, method)(a.block)
        return memcpy_on_host(half)

    def seconds(self, call: Call, calls: int, wait: Call | None = None) -> float:
        """The seconds of one call, measured over `calls` calls with one wait at the end."""
        wait = wait or self.wait
        wait()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        wait()
        return (time.perf_counter() - start) / calls


Contenders: TypeAlias = dict[str, Contender]


def _prefill(machine: Machine, src: str, stored: str) -> tuple[int, Contenders]:
    """K and V of 4096 tokens, token-major, into head-major caches."""
    tokens, position = 4096, 3
    rows = [machine.numbers(src, tokens, HEADS, WIDTH) for _ in "kv"]
    before = [machine.numbers(stored, HEADS, tokens + 8, WIDTH) for _ in "kv"]
    expected = [reference.copy(r, b, position=position) for r, b in zip(rows, before, strict=True)]
    slots = slice(position, position + tokens)

    k, v = (machine.on_device(row) for row in rows)
    caches = [machine.on_device(b) for b in before]
    contenders: Contenders = {
        "tikv": Contender(lambda: copy.copy_kv(k, v, *caches, position=position), lambda: _zip(caches, expected))
    }
    if machine.live.is_cpu:
        mine = [b.copy() for b in before]

        def by_numpy() -> None:
            for cache, row in zip(mine, rows, strict=True):
                cache[:, slots] = row.swapaxes(0, 1)

        contenders["numpy"] = Contender(by_numpy, lambda: _zip(mine, expected))
    if machine.torch is not None:
        tensors, theirs = [machine.tensor(r) for r in rows], [machine.tensor(b) for b in before]

        def by_torch() -> None:
            for cache, row in zip(theirs, tensors, strict=True):
                cache[:, slots].copy_(row.transpose(0, 1))

        contenders["torch"] = Contender(by_torch, lambda: _zip(theirs, expected))
    if machine.mlx is not None:
        sources, filled = ([machine.mlx.array(a) for a in arrays] for arrays in (rows, before))

        def by_mlx() -> None:
            for cache, row in zip(filled, sources, strict=True):
                cache[:, slots] = machine.mlx.swapaxes(row, 0, 1)
            machine.mlx.async_eval(filled)

        contenders["mlx"] = Contender(by_mlx, lambda: _zip(filled, expected), wait=machine.mlx.synchronize)
    return _moved(tokens, src, stored), contenders


def _one_token(machine: Machine, layers: int) -> tuple[int, Contenders]:
    """K and V of one token into every layer of caches of 4096 slots, float16: the call is timed, not the memory."""
    slots = 4096
    rows = [machine.numbers("float16", layers, 1, HEADS, WIDTH) for _ in "kv"]
    cache = store.KVCacheStore(
        num_layers=layers, num_kv_heads=HEADS, head_dim=WIDTH, capacity=slots, window=slots, dtype="float16"
    )
    k, v = (machine.on_device(row) for row in rows)

    def last_tokens() -> list[tuple[Any, Array]]:
        streams = [stream for layer in range(layers) for stream in cache.tokens(layer)]
        expected = [row[layer].swapaxes(0, 1)[None] for layer in range(layers) for row in rows]
        return [(np.asarray(s)[:, :, -1:], e) for s, e in zip(streams, expected, strict=True)]

    contenders: Contenders = {"tikv": Contender(lambda: cache.append_all(k, v), last_tokens)}
    flat = [row[layer].swapaxes(0, 1) for layer in range(layers) for row in rows]
    if machine.live.is_cpu:
        mine = [np.zeros((HEADS, slots, WIDTH), np.float16) for _ in flat]

        def by_numpy() -> None:
            for to, row in zip(mine, flat, strict=True):
                to[:, 5:6] = row

        contenders["numpy"] = Contender(by_numpy, lambda: _zip([to[:, 5:6] for to in mine], flat))
    if machine.torch is not None:
        tensors = [machine.tensor(np.ascontiguousarray(row)) for row in flat]
        theirs = [machine.tensor(np.zeros((HEADS, slots, WIDTH), np.float16)) for _ in flat]
        index = machine.tensor(np.array([5]))

        def by_torch() -> None:
            for to, row in zip(theirs, tensors, strict=True):
                to.index_copy_(1, index, row)

        contenders["torch"] = Contender(by_torch, lambda: _zip([to[:, 5:6] for to in theirs], flat))
    if machine.mlx is not None:
        sources = [machine.mlx.array(np.ascontiguousarray(row)) for row in flat]
        filled = [machine.mlx.zeros((HEADS, slots, WIDTH), machine.mlx.float16) for _ in flat]

        def by_mlx() -> None:
            for to, row in zip(filled, sources, strict=True):
                to[:, 5:6] = row
            machine.mlx.async_eval(filled)

        contenders["mlx"] = Contender(
            by_mlx, lambda: _zip([to[:, 5:6] for to in filled], flat), wait=machine.mlx.synchronize
        )
    return layers * _moved(1, "float16", "float16"), contenders


def _pages(machine: Machine) -> tuple[int, Contenders]:
    """K and V of 4096 tokens into the slots of a page pool, its blocks in no order, float16."""
    tokens = 4096
    rows = [machine.numbers("float16", tokens, HEADS, WIDTH) for _ in "kv"]
    order = machine.rng.permutation(2 * tokens // BLOCK)[: tokens // BLOCK]
    slots = (order[:, None] * BLOCK + np.arange(BLOCK)).reshape(-1).astype(np.int32)
    empty = np.zeros((2 * tokens // BLOCK, BLOCK, HEADS, WIDTH), np.float16)
    expected = [reference.write_slots(row, empty, slots) for row in rows]
    k, v, index = (machine.on_device(a) for a in (*rows, slots))
    k_pool, v_pool = (machine.on_device(empty) for _ in "kv")
    contenders: Contenders = {
        "tikv": Contender(
            lambda: paged.write_slots(k, v, k_pool, v_pool, index), lambda: _zip([k_pool, v_pool], expected)
        )
    }
    if machine.live.is_cpu:
        mine = [empty.copy() for _ in "kv"]
        flat = [to.reshape(-1, HEADS, WIDTH) for to in mine]

        def by_numpy() -> None:
            for to, row in zip(flat, rows, strict=True):
                to[slots] = row

        contenders["numpy"] = Contender(by_numpy, lambda: _zip(mine, expected))
    if machine.torch is not None:
        theirs, tensors = [machine.tensor(empty) for _ in "kv"], [machine.tensor(row) for row in rows]
        where = machine.tensor(slots.astype(np.int64))

        def by_torch() -> None:
            for to, row in zip(theirs, tensors, strict=True):
                to.view(-1, HEADS, WIDTH).index_copy_(0, where, row)

        contenders["torch"] = Contender(by_torch, lambda: _zip(theirs, expected))
    if machine.mlx is not None:
        sources, mlx_slots = [machine.mlx.array(row) for row in rows], machine.mlx.array(slots)
        filled = [machine.mlx.array(empty.reshape(-1, HEADS, WIDTH)) for _ in "kv"]

        def by_mlx() -> None:
            for to, row in zip(filled, sources, strict=True):
                to[mlx_slots] = row
            machine.mlx.async_eval(filled)

        shaped = [want.reshape(-1, HEADS, WIDTH) for want in expected]
        contenders["mlx"] = Contender(by_mlx, lambda: _zip(filled, shaped), wait=machine.mlx.synchronize)
    return _moved(tokens, "float16", "float16"), contenders


def _attention(machine: Machine) -> tuple[int, Contenders]:
    """One query of 32 heads over 4096 tokens of 8 KV heads: reads K and V once."""
    tokens, queries = 4096, 4 * HEADS
    q = machine.numbers("float32", 1, queries, WIDTH)
    caches = [machine.numbers("float32", 1, HEADS, tokens, WIDTH) for _ in "kv"]
    expected = np.stack(
        [
            reference.attention(row, caches[0][0, h // 4], caches[1][0, h // 4], scale=WIDTH**-0.5)[0]
            for h, row in enumerate(q[0])
        ]
    )[None]
    asked, k_cache, v_cache, lens = (machine.on_device(a) for a in (q, *caches, np.array([tokens], np.int32)))
    out = machine.on_device(np.zeros_like(q))
    contenders: Contenders = {
        "tikv": Contender(
            lambda: attention.decode_attention(asked, k_cache, v_cache, lens, out=out, impl="taichi"),
            lambda: [(out, expected)],
            1e-5,
        )
    }
    if machine.torch is not None:
        sdpa = machine.torch.nn.functional.scaled_dot_product_attention
        row, k, v = (machine.tensor(a) for a in (q[:, :, None], *caches))
        outputs: list[Any] = []

        def by_torch() -> None:
            outputs[:] = [sdpa(row, k, v, enable_gqa=True)]

        contenders["torch"] = Contender(by_torch, lambda: [(outputs[0][:, :, 0], expected)], 1e-5)
    if machine.mlx is not None:
        attend, inputs = machine.mlx.fast.scaled_dot_product_attention, [q[:, :, None], *caches]
        asking, *stored = (machine.mlx.array(a) for a in inputs)
        made: list[Any] = []

        def by_mlx() -> None:
            made[:] = [attend(asking, *stored, scale=WIDTH**-0.5)]
            machine.mlx.async_eval(made)

        contenders["mlx"] = Contender(
            by_mlx, lambda: [(made[0][:, :, 0], expected)], 1e-5, wait=machine.mlx.synchronize
        )
    return sum(cache.nbytes for cache in caches), contenders


def _moved(tokens: int, src: str, stored: str) -> int:
    return roofline.bytes_moved(tokens, HEADS, WIDTH, dtypes.parse(src, "bench"), dtypes.parse(stored, "bench"))


def _zip(got: list[Any], expected: list[Array]) -> list[tuple[Any, Array]]:
    return list(zip(got, expected, strict=True))


CASES: dict[str, Callable[[Machine], tuple[int, Contenders]]] = {
    "prefill 4096, float16": lambda machine: _prefill(machine, "float16", "float16"),
    "prefill 4096, float32 > float16": lambda machine: _prefill(machine, "float32", "float16"),
    "4096 tokens into pages, float16": _pages,
    "1 token, 1 layer": lambda machine: _one_token(machine, 1),
    f"1 token, {LAYERS} layers": lambda machine: _one_token(machine, LAYERS),
    "attention over 4096, float32": _attention,
}


def check(name: str, case: str, contender: Contender) -> None:
    """Compare a contender's results with the reference.

    Raises:
        TikvError: they differ; a time without a right result means nothing.
    """
    for got, want in contender.results():
        host = (
            got.copy_to_host()
            if isinstance(got, arrays.CacheArray)
            else np.asarray(got.cpu() if _is_torch(got) else got)
        )
        if contender.tolerance is None:
            right = host.shape == want.shape and host.tobytes() == want.tobytes()
        else:
            right = host.shape == want.shape and float(np.abs(host - want).max()) <= contender.tolerance
        if not right:
            raise TikvError(
                f"bench: {case}: the result of {name} is wrong. Run `tikv support` and report what it says."
            )


def _is_torch(array: Array) -> bool:
    return type(array).__module__.split(".")[0] == "torch"


def time_case(machine: Machine, case: str, seconds: float) -> Row:
    """Check and time one case for about so many seconds, its preparation included.

    Raises:
        TikvError: a result of tikv's is wrong.
    """
    end = time.perf_counter() + seconds
    moved, contenders = CASES[case](machine)
    left_out = {}
    for name, contender in list(contenders.items()):
        try:
            contender.call()
            (contender.wait or machine.wait)()
            check(name, case, contender)
        except Exception as error:
            if name == "tikv":
                raise
            # If a version of a peer lacks a call, or gives other numbers, it is left out and the rest goes on.
            del contenders[name]
            left_out[name] = f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"
    calls = {name: (contender.call, contender.wait) for name, contender in contenders.items()}
    calls["memcpy"] = machine.memcpy(moved), None
    repeats = {name: max(1, int(SHORTEST / machine.seconds(call, 1, wait))) for name, (call, wait) in calls.items()}
    times: dict[str, list[float]] = {name: [] for name in calls}
    while len(times["tikv"]) < ROUNDS or time.perf_counter() < end:
        for name, (call, wait) in calls.items():
            times[name].append(machine.seconds(call, repeats[name], wait))
    us = {name: min(samples) * 1e6 for name, samples in times.items()}
    ours, copy = us.pop("tikv"), us.pop("memcpy")
    spread = max(statistics.median(samples) / min(samples) for samples in times.values())
    return Row(case, machine.live.arch, moved, ours, copy, us, spread, left_out)


def bench(arch: str = "auto", seconds: float = 20.0) -> Iterator[Row]:
    """Time the cases one after the other, in about so many seconds when kernels are in Taichi's cache.

    Args:
        arch: the back end, as in `tikv.init`.
        seconds: for all cases together.

    Yields:
        A row as each case ends.

    Raises:
        ArchError: the back end does not start.
        TikvError: a result is wrong.
    """
    machine = Machine(runtime.init(arch))
    for case in CASES:
        yield time_case(machine, case, seconds / len(CASES))


def about(arch: str) -> str:
    """One line that describes the machine, to print below a table."""
    versions = ", ".join(
        f"{name} {v}"
        for name in (runtime.engine_in_use().name, "numpy", "torch", "mlx")
        if (v := runtime.version_of(name))
    )
    route = launch.launcher_report(runtime.current())["launcher"]
    return f"{runtime.device_name(arch)}, {os.cpu_count()} cores, {arch}, launcher {route}, {versions}"


def picture(rows: Sequence[Row], machine: str) -> str:
    """The rates of tikv and its peers as bars, a plain copy of the same bytes as a line; SVG text."""
    groups = []
    for row in rows:
        us = {"tikv": row.us, **row.peers_us}
        groups.append(
            Bars(
                row.case,
                {peer: row.bytes_moved / t for peer, t in us.items()},
                {
                    peer: f"{t:,.1f} us, {roofline.gb_per_s(row.bytes_moved, t / 1e6):.1f} GB/s"
                    for peer, t in us.items()
                },
                row.bytes_moved / row.memcpy_us,
            )
        )
    return bars("tikv bench(longer is faster; the line is a plain copy of the same bytes)", machine, groups)
