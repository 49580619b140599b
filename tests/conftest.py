"""What tests of several folders share."""

import os
import subprocess
import sys

import pytest


@pytest.fixture
def python(request):
    """Run a script in a process of its own, where the package, the oracle and this run's engine are at hand.

    It has to succeed, or with `fails` to fail. Keywords are environment variables; what it printed is `.stdout`.
    """
    path = os.pathsep.join(map(str, (request.config.rootpath, request.config.rootpath / "tests")))

    def run(script, *arguments, options=(), fails=False, **environment):
        child = subprocess.run(
            [sys.executable, *options, "-c", script, *arguments],
            capture_output=True,
            text=True,
            timeout=500,
            env={**os.environ, "PYTHONPATH": path, **environment},
        )
        assert (child.returncode != 0) == fails, child.stdout + child.stderr[-3000:]
        return child

    return run
