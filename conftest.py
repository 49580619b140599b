"""What tests/ and benches/ share: which back ends run, in which order, and what is said about those that did not.

    pytest                        on the CPU
    pytest --arch cpu,vulkan      on both; one that is missing is an error
    pytest --arch all             on every back end that works here; the others are skipped and counted

Taichi holds one back end a process and frees every array when it is started again, so the tests are ordered by back end
and Taichi is started once for each.
"""

import gc
import os
import subprocess
import sys
import tempfile
import zlib
from collections import Counter

# Read by Taichi when it is imported, so set before anything imports it; children inherit them.
os.environ["ENABLE_TAICHI_HEADER_PRINT"] = "0"
os.environ["TI_SKIP_VERSION_CHECK"] = "ON"

import numpy as np
import pytest

ARCHS = ("cpu", "vulkan", "cuda", "metal")

_cache_dir = pytest.StashKey[tempfile.TemporaryDirectory]()
_absent = pytest.StashKey[dict[str, str]]()
_outcomes = pytest.StashKey[dict[str, dict[str, str]]]()


def pytest_addoption(parser):
    group = parser.getgroup("tikv")
    group.addoption(
        "--arch",
        default=os.environ.get("TIKV_ARCHS", "cpu"),
        help="back ends to run on: a comma-separated list of cpu, vulkan, cuda, metal, each of which must work here; "
        "or 'all' for those that do. Default: $TIKV_ARCHS, or cpu.",
    )
    group.addoption(
        "--launcher",
        choices=("direct", "public", "native"),
        default=None,
        help="how kernels are launched; sets TIKV_LAUNCHER for this run",
    )


def _wanted(config) -> list[str]:
    text = config.getoption("--arch")
    names = list(ARCHS) if text == "all" else [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in names if name not in ARCHS]
    if unknown or not names:
        raise pytest.UsageError(
            f"--arch {text}: unknown {', '.join(unknown) or 'nothing'}; choose from {', '.join(ARCHS)}"
        )
    return list(dict.fromkeys(names))


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
    config.stash[_outcomes] = {}
    config.stash[_absent] = {}
    if launcher := config.getoption("--launcher"):
        os.environ["TIKV_LAUNCHER"] = launcher
    if "TI_OFFLINE_CACHE_FILE_PATH" not in os.environ:
        # A cache of this test run's own: kernels are compiled once for all tests and children, never an older run's.
        config.stash[_cache_dir] = tempfile.TemporaryDirectory(prefix="tikv-kernels-")
        os.environ["TI_OFFLINE_CACHE_FILE_PATH"] = config.stash[_cache_dir].name
    wanted = _wanted(config)
    if config.option.help or config.option.collectonly:
        return
    absent = {arch: why for arch in wanted if arch != "cpu" and (why := _why_absent(arch))}
    if absent and config.getoption("--arch") != "all":
        raise pytest.UsageError(
            "; ".join(f"--arch {arch} was asked for and does not start: {why}" for arch, why in absent.items())
        )
    config.stash[_absent] = absent


def pytest_unconfigure(config):
    if _cache_dir in config.stash:
        os.environ.pop("TI_OFFLINE_CACHE_FILE_PATH", None)
        config.stash[_cache_dir].cleanup()


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


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items):
    def rank(item):
        arch = getattr(item, "callspec", None) and item.callspec.params.get("arch")
        return -1 if arch is None else ARCHS.index(arch)

    items.sort(key=rank)


@pytest.fixture(scope="session")
def arch(request) -> str:
    """The back end of this test, started; asking for it is what makes a test run on each of them."""
    import tikv

    gc.collect()  # a stale array that is freed after Taichi has started again may free a new one
    assert tikv.init(arch=request.param).arch == request.param
    yield request.param
    gc.collect()


@pytest.fixture
def rng(request) -> np.random.Generator:
    """Random numbers that depend on the test's id alone: the same alone, in any order and on any machine."""
    return np.random.default_rng(zlib.crc32(request.node.nodeid.encode()))


def pytest_runtest_makereport(item, call):
    arch = getattr(item, "callspec", None) and item.callspec.params.get("arch")
    if arch and (call.when == "call" or call.excinfo is not None):
        skipped = call.excinfo is not None and call.excinfo.errisinstance(pytest.skip.Exception)
        outcome = "skipped" if skipped else "failed" if call.excinfo is not None else "passed"
        item.config.stash[_outcomes].setdefault(arch, {})[item.nodeid] = outcome


def pytest_terminal_summary(terminalreporter, config):
    counts = {name: Counter(outcomes.values()) for name, outcomes in config.stash[_outcomes].items()}
    if not counts:
        return
    terminalreporter.section("back ends")
    for name in ARCHS:
        if name in config.stash[_absent]:
            skipped = sum(counts.get(name, Counter()).values())
            terminalreporter.line(f"{name}: absent here, {skipped} skipped: {config.stash[_absent][name]}")
        elif name in counts:
            terminalreporter.line(
                f"{name}: {', '.join(f'{n} {outcome}' for outcome, n in sorted(counts[name].items()))}"
            )
        else:
            terminalreporter.line(f"{name}: not asked for (--arch)")
