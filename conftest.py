"""What tests/ and benches/ share: which back ends run, in which order, and what is said about those that did not.

    pytest                        on the CPU
    pytest --arch cpu,vulkan      on both; one that is missing is an error
    pytest --arch all             on every back end that works here; the others are skipped and counted
    pytest --engine quadrants     with another engine than Taichi

An engine holds one back end a process and frees every array when it is started again, so the tests are ordered by back
end and it is started once for each.
"""

import gc
import math
import os
import pathlib
import subprocess
import sys
import tempfile
import time
import zlib
from collections import Counter

import numpy as np
import pytest

from tikv import engines, runtime

# Read by an engine when it is imported, so set before anything imports it; children inherit them.
for engine in engines.ALL.values():
    os.environ.update(engine.quiet)

ARCHS = runtime.ARCHS[::-1]  # in this order the tests run
OPERATIONS = pathlib.Path(__file__).parent / "tests" / "ops"

_cache_dir = pytest.StashKey[tempfile.TemporaryDirectory]()
_absent = pytest.StashKey[dict[str, str]]()
_done = pytest.StashKey[set[str]]()
_thorough = pytest.StashKey[bool]()
_end = pytest.StashKey[float]()  # the time after which no test begins
LATE = "left for the lack of time (--within)"


def pytest_addoption(parser):
    group = parser.getgroup("tikv")
    group.addoption(
        "--arch",
        default=os.environ.get("TIKV_ARCHS", "cpu"),
        help=f"back ends to run on: a comma-separated list of {', '.join(ARCHS)}, each of which must work here; "
        "or 'all' for those that do. Default: $TIKV_ARCHS, or cpu.",
    )
    group.addoption(
        "--engine",
        choices=tuple(engines.ALL),
        default=None,
        help="what compiles and runs the kernels; sets TIKV_ENGINE for this run",
    )
    group.addoption(
        "--launcher",
        choices=("direct", "public", "native"),
        default=None,
        help="how kernels are launched; sets TIKV_LAUNCHER for this run",
    )
    group.addoption(
        "--gpu",
        type=int,
        default=0,
        help="on CUDA, the number of the GPU that is torch's current one, on which all tests run that do not need the "
        "engine's own launchers or memory",
    )
    group.addoption(
        "--full",
        metavar="ARCHS",
        default="",
        help="back ends, or 'all', on which the cases marked full run too: each is put together from parts of the code "
        "that other cases run, and compiles for seconds",
    )
    group.addoption(
        "--thorough",
        action="store_true",
        help="run also the tests marked thorough, and the cases of other tests whose parameters all have values of "
        "earlier cases, these not on vulkan, where tests outside of tests/ops and those marked thorough have one case; "
        "--full of a back end runs all cases, and where paths are given all that are not marked full run too",
    )
    group.addoption(
        "--within",
        metavar="MINUTES",
        type=float,
        default=math.inf,
        help="begin no test later than this after the start, and say how many were left: for a machine that is slower "
        "than usual, and that has only so long",
    )
    group.addoption(
        "--done",
        metavar="FILE",
        default=None,
        help="leave out the tests that FILE names, and add those of back ends, or marked once, that pass: of several "
        "runs, with more packages installed in each, one runs them. Write --done=FILE: behind a blank, pytest would "
        "take the path for one of tests",
    )


def _archs(option: str, text: str) -> list[str]:
    names = list(ARCHS) if text == "all" else [name.strip() for name in text.split(",") if name.strip()]
    if unknown := [name for name in names if name not in ARCHS]:
        raise pytest.UsageError(f"{option} {text}: unknown {', '.join(unknown)}; choose from {', '.join(ARCHS)}, all")
    return list(dict.fromkeys(names))


def _wanted(config) -> list[str]:
    if names := _archs("--arch", config.getoption("--arch")):
        return names
    raise pytest.UsageError(f"--arch names no back end; choose from {', '.join(ARCHS)}, all")


def _why_absent(arch: str) -> str | None:
    """Start the back end in a process of its own, where a driver that crashes takes no tests with it."""
    script = f"import tikv; assert tikv.init(arch={arch!r}).arch == {arch!r}"
    child = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
    if child.returncode == 0:
        return None
    lines = (child.stderr or child.stdout).strip().splitlines()
    return lines[-1] if lines else f"exit status {child.returncode}"


def pytest_configure(config):
    config.addinivalue_line("markers", "archs(*names): run on these back ends only")
    config.addinivalue_line(
        "markers",
        "full(*archs, unless=None, each_value=False): run with --full only, on these back ends or on all; but for "
        "cases whose parameters, a dict, `unless` is true of, or with `each_value` for those that bring a value of a "
        "parameter that no case before them has",
    )
    config.addinivalue_line(
        "markers",
        "thorough: puts together what other files test, or checks the sources; runs with --thorough, as in CI",
    )
    config.addinivalue_line("markers", "long: takes minutes, and runs with --full all only")
    config.addinivalue_line("markers", "eight_rows: a task of attention has 8 rows of queries on Vulkan too")
    config.addinivalue_line("markers", "once: depends on no package that may be missing, see --done")
    if launcher := config.getoption("--launcher"):
        os.environ["TIKV_LAUNCHER"] = launcher
    if name := config.getoption("--engine"):
        os.environ["TIKV_ENGINE"] = name
    for engine in engines.ALL.values():
        if engine.cache_variable not in os.environ:
            # A cache of this test run's own: kernels are compiled once for all its processes, never an older run's.
            if _cache_dir not in config.stash:
                config.stash[_cache_dir] = tempfile.TemporaryDirectory(prefix="tikv-kernels-")
            os.environ[engine.cache_variable] = os.path.join(config.stash[_cache_dir].name, engine.name)
        # Else the engine deletes a quarter of a cache that exceeds 100 MB whenever a process ends.
        os.environ.setdefault(engine.policy_variable, "never")
    # What a user has measured decides nothing here.
    os.environ["TIKV_ATTENTION_TABLE"] = "off"
    if hasattr(config, "workerinput"):  # a process of pytest-xdist: its parent has found this out
        config.stash[_absent], done, config.stash[_thorough], config.stash[_end] = config.workerinput["tikv"]
        config.stash[_done] = set(done)
        return
    config.stash[_absent], config.stash[_done] = {}, set()
    config.stash[_end] = time.time() + 60 * config.getoption("--within")
    config.stash[_thorough] = config.getoption("--thorough") or config.args_source is config.ArgsSource.ARGS
    wanted = _wanted(config)
    if config.option.help or config.option.collectonly:
        return
    if (done := config.getoption("--done")) and os.path.exists(done):
        with open(done, encoding="utf-8") as file:
            config.stash[_done] = set(file.read().splitlines())
    absent = {arch: why for arch in wanted if arch != "cpu" and (why := _why_absent(arch))}
    if absent and config.getoption("--arch") != "all":
        raise pytest.UsageError(
            "; ".join(f"--arch {arch} was asked for and does not start: {why}" for arch, why in absent.items())
        )
    config.stash[_absent] = absent
    config.pluginmanager.register(_Outcomes(config))


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node):
    """Tell a process of pytest-xdist what its parent knows."""
    stash = node.config.stash
    node.workerinput["tikv"] = stash[_absent], sorted(stash[_done]), stash[_thorough], stash[_end]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Each process takes one stretch of the tests in their order, so it seldom changes its back end or its kernels."""
    if config.getoption("dist") != "load":
        return None  # chosen on the command line
    from xdist.scheduler import WorkStealingScheduling

    return WorkStealingScheduling(config, log)


def pytest_unconfigure(config):
    if _cache_dir in config.stash:
        folder = config.stash[_cache_dir]
        for engine in engines.ALL.values():
            if os.environ.get(engine.cache_variable, "").startswith(folder.name):
                del os.environ[engine.cache_variable]
        folder.cleanup()


def pytest_generate_tests(metafunc):
    if "arch" not in metafunc.fixturenames:
        return
    wanted, absent = _wanted(metafunc.config), metafunc.config.stash[_absent]
    marker = metafunc.definition.get_closest_marker("archs")
    names = [arch for arch in wanted if marker is None or arch in marker.args]
    params = [
        pytest.param(arch, marks=pytest.mark.skip(reason=f"{arch} is absent: {absent[arch]}"))
        if arch in absent
        else arch
        for arch in names
    ]
    if not params:
        reason = f"runs on {', '.join(marker.args)} only"
        params = [pytest.param(wanted[0], marks=pytest.mark.skip(reason=reason))]
    metafunc.parametrize("arch", params, indirect=True, scope="session")


def _arch_of(item) -> str | None:
    return item.callspec.params.get("arch") if hasattr(item, "callspec") else None


def _waits_for(item, arch, full: list[str], seen: dict[tuple, set]) -> str:
    """The option a test waits for, or ""; one of no back end goes with the CPU's."""
    if item.get_closest_marker("long") and set(full) != set(ARCHS):
        return "--full"
    if (arch or "cpu") in full:
        return ""
    if _is_left(item, arch, seen):
        return "--full"
    if item.config.stash[_thorough]:
        return ""
    return "--thorough" if item.get_closest_marker("thorough") or not _has_new_value(item, arch, seen) else ""


def _is_left(item, arch, seen: dict[tuple, set]) -> bool:
    """Whether a case marked full is put together from parts of others. `seen`: of each test, what cases before had."""
    params = item.callspec.params if hasattr(item, "callspec") else {}
    markers = [marker for marker in item.iter_markers("full") if not marker.args or arch in marker.args]
    for marker in markers:
        unless = marker.kwargs.get("unless")
        if not marker.kwargs.get("each_value") and not (unless and unless(params)):
            return True
    each_value = any(marker.kwargs.get("each_value") for marker in markers)
    on_vulkan = arch == "vulkan" and item.config.getoption("--thorough")  # whose kernels compile slowly without a GPU
    if on_vulkan and (item.get_closest_marker("thorough") or OPERATIONS not in item.path.parents):
        return bool(_values_before(item, arch, seen)) or not _has_new_value(item, arch, seen)
    return (each_value or on_vulkan) and item.config.stash[_thorough] and not _has_new_value(item, arch, seen)


def _has_new_value(item, arch, seen: dict[tuple, set]) -> bool:
    """Whether a case is the first of its test, or brings a value of a parameter that no case before it has."""
    params = item.callspec.params if hasattr(item, "callspec") else {}
    before, values = _values_before(item, arch, seen), {(name, repr(value)) for name, value in params.items()}
    if before and values <= before:
        return False
    before |= values
    return True


def _values_before(item, arch, seen: dict[tuple, set]) -> set:
    """The values of parameters of the cases before this one of a test that were not left out."""
    return seen.setdefault((item.parent.nodeid, getattr(item, "originalname", item.name), arch), set())


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    done, full = config.stash[_done], _archs("--full", config.getoption("--full"))
    if out := [item for item in items if item.nodeid in done]:
        config.hook.pytest_deselected(items=out)
        items[:] = [item for item in items if item.nodeid not in done]
    items.sort(key=lambda item: ARCHS.index(arch) if (arch := _arch_of(item)) else -1)
    seen: dict[tuple, set] = {}
    for item in items:
        arch = _arch_of(item)
        # Properties travel with a report from the process that ran the test to the one that counts.
        item.user_properties += [("arch", arch), ("once", bool(arch or item.get_closest_marker("once")))]
        if option := _waits_for(item, arch, full, seen):
            item.user_properties.append(("left", option))
            item.add_marker(pytest.mark.skip(reason=f"left for {option}"))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    if time.time() > item.config.stash[_end]:
        pytest.skip(LATE)


def _use_gpu(number: int) -> None:
    """Let torch's current GPU be this one; tests of what the first one alone has are skipped."""
    import torch

    from tikv import launch

    torch.cuda.set_device(number)
    choose = launch.choose_launcher

    def refuse(*arguments, **options):
        pytest.skip("memory of the engine's own lies on the first GPU")

    def choose_native(name):
        if name in ("direct", "public"):
            pytest.skip("the engine's launchers drive the first GPU alone")
        choose(name)

    runtime.ti.ndarray = runtime.ti.Vector.ndarray = refuse
    launch.choose_launcher = choose_native


@pytest.fixture(scope="session")
def arch(request) -> str:
    """The back end of this test, started; asking for it is what makes a test run on each of them."""
    import tikv

    if request.param == "cuda" and (gpu := request.config.getoption("--gpu")):
        _use_gpu(gpu)
    gc.collect()  # a stale array that is freed after the engine has started again may free a new one
    assert tikv.init(arch=request.param).arch == request.param
    yield request.param
    gc.collect()


@pytest.fixture
def rng(request) -> np.random.Generator:
    """Random numbers that depend on the test's id alone: the same alone, in any order and on any machine."""
    return np.random.default_rng(zlib.crc32(request.node.nodeid.encode()))


class _Outcomes:
    """How each test of a back end went, in whichever process it ran."""

    def __init__(self, config):
        self.config = config
        self.seen: dict[str, dict[str, str]] = {}
        self.done = set(config.stash[_done])

    def pytest_runtest_logreport(self, report):
        properties = dict(report.user_properties)
        if properties.get("once"):
            if report.failed:
                self.done.discard(report.nodeid)
            elif report.passed and report.when == "call":
                self.done.add(report.nodeid)
        arch = properties.get("arch")
        if arch and (report.when == "call" or report.outcome != "passed"):
            left = report.outcome == "skipped" and "left" in properties
            self.seen.setdefault(arch, {})[report.nodeid] = f"left for {properties['left']}" if left else report.outcome

    def pytest_sessionfinish(self):
        if done := self.config.getoption("--done"):
            with open(done, "w", encoding="utf-8") as file:
                file.writelines(f"{test}\n" for test in sorted(self.done))

    def pytest_terminal_summary(self, terminalreporter, config):
        self._back_ends(terminalreporter, config)
        skipped = terminalreporter.stats.get("skipped", [])
        if line := _left_out(skipped):
            terminalreporter.line(line)
        if late := sum(LATE in report.longrepr[2] for report in skipped):
            told = f"{late} tests were not run, since {config.getoption('--within'):g} minutes were over (--within)"
            terminalreporter.line(told, red=True)

    def _back_ends(self, terminalreporter, config):
        counts = {arch: Counter(tests.values()) for arch, tests in self.seen.items()}
        absent, done = config.stash[_absent], config.stash[_done]
        if not counts and not done:
            return
        terminalreporter.section("back ends")
        for arch in ARCHS:
            told = ", ".join(f"{n} {outcome}" for outcome, n in sorted(counts.get(arch, Counter()).items()))
            if arch in absent:
                skipped = sum(counts.get(arch, Counter()).values())
                told = f"absent here, {skipped} skipped: {absent[arch]}"
            elif arch not in _wanted(config):
                told = "not asked for (--arch)"
            terminalreporter.line(f"{arch}: {told or 'nothing'}")
        if done:
            terminalreporter.line(f"{len(done)} more had passed in an earlier run (--done)")


def _left_out(skipped) -> str:
    """What was left out, in a line: how many tests, and the reasons that most of them have."""
    reasons = Counter(report.longrepr[2].removeprefix("Skipped: ") for report in skipped)
    if not reasons:
        return ""
    most = ", ".join(f"{count} {reason}" for reason, count in reasons.most_common(3))
    others = f", and {len(reasons) - 3} more reasons" if len(reasons) > 3 else ""
    return f"left out: {sum(reasons.values())} ({most}{others}); -rs lists them"
