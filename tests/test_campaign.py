"""The campaign itself, for a moment: it starts, finds what is planted, and says how to have it again."""

import os
import pathlib
import subprocess
import sys

import pytest

RUN = pathlib.Path(__file__).parent / "campaign" / "run.py"


def campaign(*arguments):
    command = [sys.executable, str(RUN), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env={**os.environ})


def test_it_runs():
    ended = campaign("--seconds", "2", "--count", "200", "operations")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    header, row = ended.stdout.splitlines()[-2:]
    assert header.split()[:4] == ["part", "done", "goal", "failures"]
    part, done, goal, failures, *_ = row.split()
    assert (part, int(done) > 0, goal, failures) == ("operations", True, "200", "0")


@pytest.mark.parametrize("arguments", [["nothing"], ["--only", "3"], ["--seconds", "0"]], ids=" ".join)
def test_what_it_does_not_understand_is_said(arguments):
    ended = campaign(*arguments)
    assert ended.returncode == 2
    assert "run.py: error:" in ended.stderr
