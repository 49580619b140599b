"""The campaign itself, for a moment: it starts, finds what is planted, and says how to have it again."""

import os
import pathlib
import subprocess
import sys
import time

import numpy as np
import pytest
from campaign import contiguous, paged, summarized

from tikv.stores.layers import contiguous as contiguous_layers
from tikv.stores.layers.memory import LayerMemory
from tikv.stores.pools.memory import LayerPools
from tikv.stores.pools.summaries import LayerPages

pytestmark = pytest.mark.thorough

RUN = pathlib.Path(__file__).parent / "campaign" / "run.py"


def campaign(*arguments):
    command = [sys.executable, str(RUN), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env={**os.environ})


def test_it_runs():
    ended = campaign("--seconds", "1", "--count", "200", "operations")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    header, row = ended.stdout.splitlines()[-2:]
    assert header.split()[:4] == ["part", "done", "goal", "failures"]
    part, done, goal, failures, *_ = row.split()
    assert (part, int(done) > 0, goal, failures) == ("operations", True, "200", "0")


@pytest.mark.parametrize("processes", ["1", "2"])
def test_a_signal_ends_it_with_its_table(tmp_path, processes):
    """Which a file has held until then."""
    file = tmp_path / "table"
    arguments = "--processes", processes, "--seconds", "200", "--table", str(file), "operations"
    with subprocess.Popen([sys.executable, str(RUN), *arguments], stdout=subprocess.PIPE, text=True) as running:
        end = time.perf_counter() + 100
        while not (file.exists() and done_in(file.read_text())):
            assert time.perf_counter() < end
            time.sleep(0.1)
        before = file.read_text()
        running.terminate()
        out, _ = running.communicate(timeout=100)
    assert running.returncode == 0
    table = out[out.index("cpu, seed") :]
    assert done_in(table) >= done_in(before) > 0
    assert file.read_text() == table


FAULT = """
import sys
sys.path[:0] = sys.argv[1:]
from campaign import operations, run

def fail(settings, progress):
    progress.count(3)
    raise ZeroDivisionError

operations.run = fail
run.main(["operations"])
"""


def test_a_fault_of_the_campaign_itself_does_not_cost_the_table():
    tests = RUN.parent.parent
    command = [sys.executable, "-c", FAULT, str(tests), str(tests.parent)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert "ZeroDivisionError" in ended.stderr
    assert ended.returncode == 1
    assert done_in(ended.stdout[ended.stdout.index("cpu, seed") :]) == 3


def done_in(table):
    """How much a table says of its only part."""
    return int(table.splitlines()[2].split()[1])


@pytest.mark.parametrize("arguments", [["nothing"], ["--only", "3"], ["--seconds", "0"]], ids=" ".join)
def test_what_it_does_not_understand_is_said(arguments):
    ended = campaign(*arguments)
    assert ended.returncode == 2
    assert "run.py: error:" in ended.stderr


def steps(subject, arch, folder, number):
    """Rows of 100 steps of one form, each from another beginning."""
    for seed in range(5):
        made = subject(np.random.default_rng(seed), arch, number, folder)
        for _ in range(100):
            made.step()


def sequences(subject, arch, folder, numbers):
    """Sequences of 12 steps, each on a new store with summaries of pages."""
    for number in numbers:
        made = subject(np.random.default_rng([5, number]), arch, number, folder)
        for _ in range(12):
            made.step()


@pytest.mark.archs("cpu")
@pytest.mark.parametrize("subject", [summarized.SummarizedStore, summarized.SummarizedPool])
def test_summaries_of_pages(arch, tmp_path, subject):
    """A few of the 100,000 sequences of `run.py summaries`, of a form whose kernels other tests have."""
    sequences(subject, arch, tmp_path, range(0, 48, 12))


@pytest.mark.full
@pytest.mark.archs("cpu")
@pytest.mark.parametrize("what", ["a trim", "moved rows", "blocks that moved"])
def test_a_summary_that_is_left_out_is_noticed(arch, tmp_path, monkeypatch, what):
    if what == "a trim":
        monkeypatch.setattr(contiguous_layers, "summarize_last", lambda *_: None)
    elif what == "moved rows":
        monkeypatch.setattr(contiguous_layers, "summarize", lambda *_: None)
    else:
        monkeypatch.setattr(LayerPages, "summarize_slots", lambda *_: None)
    subject = summarized.SummarizedPool if what == "blocks that moved" else summarized.SummarizedStore
    with pytest.raises(AssertionError, match="elements differ"):
        sequences(subject, arch, tmp_path, range(0, 600, 12))


@pytest.mark.full
@pytest.mark.archs("cpu")
@pytest.mark.parametrize("what", ["a reorder", "a copy of a shared block"])
def test_what_is_left_out_is_noticed(arch, tmp_path, monkeypatch, what):
    subject = contiguous.Contiguous if what == "a reorder" else paged.Paged
    if what == "a reorder":
        monkeypatch.setattr(LayerMemory, "reorder", lambda *_: None)
    else:
        monkeypatch.setattr(LayerPools, "copy_blocks", lambda *_: None)
    with pytest.raises(AssertionError, match="elements differ"):
        steps(subject, arch, tmp_path, 1)  # a form without attention, whose kernels take seconds to compile
