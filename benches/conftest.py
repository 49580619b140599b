"""What every bench measures in addition to its own question: a copy of the same size, an empty launch, and the machine.

    pytest benches --benchmark-json=bench.json        times, each result checked first
    pytest benches --benchmark-disable                the same code on small shapes, without timing
    pytest benches --small                            with timing, once each; the figures mean nothing

`pct_of_copy` is a rate as a percentage of what a plain copy of the same bytes reaches on this machine, measured right
before and right after: all cores' memcpy on the CPU, the driver's device copy on CUDA. Times are medians.
"""

import os
import statistics
import time

import environment
import numpy as np
import oracle
import pytest
import shapes
from touch import make_touch

from tikv import arrays, launch, runtime
from tikv.tools import bench, roofline


def synchronize(arch) -> None:
    """Wait for the device, for whatever launched on it."""
    if arch == "cuda":
        import torch

        torch.cuda.synchronize()
    if arch != "cpu":
        runtime.current().synchronize()


def seconds(call, arch, calls, rounds) -> float:
    """Median seconds of one call, of rounds of `calls` calls with one wait at the end."""
    times = []
    for _ in range(rounds):
        synchronize(arch)
        start = time.perf_counter()
        for _ in range(calls):
            call()
        synchronize(arch)
        times.append((time.perf_counter() - start) / calls)
    return statistics.median(times)


class Roof:
    """How long a plain copy that moves the same bytes takes, and an empty launch."""

    def __init__(self, arch):
        self.arch = arch
        self._word = oracle.place(np.zeros(2, np.float32), arch)

    def copy(self, nbytes):
        """A call that copies `nbytes // 2` bytes, and so reads and writes `nbytes`."""
        half = nbytes // 2
        if self.arch == "cuda":
            import torch

            source = torch.empty(half, dtype=torch.uint8, device="cuda").fill_(1)
            target = torch.empty_like(source)
            return lambda: target.copy_(source)
        return bench.memcpy_on_host(half)

    def launch(self):
        """A call that launches the smallest kernel by the library's own route."""
        word = arrays.view(self._word, "word", "roof")
        return launch.kernel(runtime.current(), make_touch).bind(1, word).launch


@pytest.fixture(scope="session")
def roof(arch) -> Roof:
    return Roof(arch)


def _is_smoke(config) -> bool:
    return bool(config.getoption("benchmark_disable")) or hasattr(config, "workerinput")


def pytest_addoption(parser):
    parser.addoption("--small", action="store_true", help="time small shapes, once each: to see that it works")


def pytest_itemcollected(item):
    """Without timing, a row whose parameters all have values of rows before it needs --full, as in tests."""
    if _is_smoke(item.config):
        item.add_marker(pytest.mark.full(each_value=True))


@pytest.fixture
def smoke(request) -> bool:
    """Whether this is a run on small shapes: without timing, with --small, and in several processes side by side."""
    return _is_smoke(request.config) or request.config.getoption("--small")


@pytest.fixture
def sizes(arch, smoke) -> shapes.Sizes:
    return shapes.SMOKE_SIZES if smoke else shapes.SIZES[arch]


@pytest.fixture
def peer(request, arch):
    """The library that does the work in this row; torch moves to the device where tikv is."""
    name = request.param
    if name == "torch":
        torch = pytest.importorskip("torch", reason="torch is not installed; pip install 'taichi-kv[bench]'")
        if arch == "cpu":
            torch.set_num_threads(os.cpu_count() or 1)
    if name == "numpy" and arch != "cpu":
        pytest.skip("numpy is a peer on the CPU only")
    if name == "torch" and arch not in ("cpu", "cuda"):
        pytest.skip(f"torch cannot share memory on {arch}")
    return name


@pytest.fixture
def timed(benchmark, arch, roof, smoke, request):
    """Time a call that has been checked, and write down what it moved and what the machine can do.

    A round is one call on the CPU and ten elsewhere, where the host prepares the next while the device works, unless
    `calls` says how many.
    """

    def run(call, *, op, peer, case, bytes_moved, calls=None, rounds=15):
        calls = calls or (1 if arch == "cpu" else 10)

        def batch():
            for _ in range(calls):
                call()
            synchronize(arch)

        if _is_smoke(request.config):
            benchmark(batch)
            return
        if smoke:
            calls = rounds = 1
        copy, empty = roof.copy(bytes_moved), roof.launch()
        for warm in (copy, empty, call):
            seconds(warm, arch, calls, 1)
        before = seconds(copy, arch, calls, 5)
        benchmark.pedantic(batch, rounds=rounds, iterations=1, warmup_rounds=1)
        roof_s = statistics.median([before, seconds(copy, arch, calls, 5)])
        one = benchmark.stats.stats.median / calls
        rate, roof_rate = roofline.gb_per_s(bytes_moved, one), roofline.gb_per_s(bytes_moved, roof_s)
        benchmark.extra_info.update(
            arch=arch,
            op=op,
            peer=peer,
            case=case,
            bytes_moved=bytes_moved,
            us=round(one * 1e6, 3),
            gb_per_s=round(rate, 3),
            roof_gb_per_s=round(roof_rate, 3),
            pct_of_copy=round(roofline.percent_of(rate, roof_rate), 1),
            launch_us=round(seconds(empty, arch, max(calls, 100), 5) * 1e6, 3),
        )

    benchmark.group = request.node.originalname
    return run


@pytest.fixture
def by_turns(arch):
    """Median microseconds of a call of each form, to its end and until it returns.

    The forms take turns, so that what else the machine does slows all of them.
    """

    def run(forms, calls, rounds=15):
        times, returns = ({name: [] for name in forms} for _ in range(2))
        for _ in range(rounds):
            for name, call in forms.items():
                times[name].append(seconds(call, arch, calls, 1))
                start = time.perf_counter()
                call()
                returns[name].append(time.perf_counter() - start)
        return [{name: round(statistics.median(t) * 1e6, 3) for name, t in x.items()} for x in (times, returns)]

    return run


def _archs(config) -> list[str]:
    return [arch for arch in config.getoption("--arch").split(",") if arch != "all"]


def pytest_benchmark_update_machine_info(config, machine_info):
    machine_info["tikv"] = environment.environment(_archs(config))


def pytest_terminal_summary(terminalreporter, config):
    """Below pytest-benchmark's table: on what it was measured."""
    if not _is_smoke(config):
        terminalreporter.line(f"measured on {environment.line(environment.environment(_archs(config)))}")
