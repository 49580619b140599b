"""What tests of several folders share."""

import os
import subprocess
import sys

import pytest


@pytest.fixture
def python(request):
    """Run a script in a process of its own, where the package, the oracle and this run's engine are at hand.

    It has to succeed, or with `fails` to fail. Keywords are environment variables; what it printed is `.stdout`. How
    long compiling takes is left out.
    """
    folders = (request.config.rootpath, request.config.rootpath / "tests", os.environ.get("PYTHONPATH", ""))
    path = os.pathsep.join(str(folder) for folder in folders if str(folder))

    def run(script, *arguments, options=(), fails=False, **environment):
        child = subprocess.run(
            [sys.executable, *options, "-c", script, *arguments],
            capture_output=True,
            text=True,
            timeout=500,
            env={**os.environ, "PYTHONPATH": path, "TIKV_QUIET": "1", **environment},
        )
        assert (child.returncode != 0) == fails, child.stdout + child.stderr[-3000:]
        return child

    return run


@pytest.fixture
def no_plans(arch):
    """No call's plan is of another test, nor is one of this test left for another."""
    from tikv import arrays

    arrays.runtime_of().plans.clear()
    yield
    arrays.runtime_of().plans.clear()


@pytest.fixture
def known_ptx(arch):
    """For tests of the native CUDA launcher, on whose account alone they are left out with another engine."""
    from tikv import runtime

    live = runtime.current()
    if live.is_cuda and not live.engine.has_known_ptx:
        pytest.skip(f"the native launcher does not know the PTX of {live.engine.title}")


@pytest.fixture(autouse=True)
def few_rows(request, monkeypatch):
    """On Vulkan a task of attention has 4 rows of queries at most, not 8, but for tests marked `eight_rows`.

    All rows are unrolled: a kernel of 8 is the code of one of 4, which shorter prompts take, and lavapipe compiles it
    for three times as long. With --full it has 8.
    """
    params = request.node.callspec.params if hasattr(request.node, "callspec") else {}
    full = {name.strip() for name in request.config.getoption("--full").split(",")} & {"all", "vulkan"}
    if params.get("arch") == "vulkan" and not full and request.node.get_closest_marker("eight_rows") is None:
        monkeypatch.setattr("tikv.ops.attention.families.family.MOST_ROWS", 4)
