"""The command line: what it prints, its JSON, its exit statuses, and what is left of an interrupted run."""

import contextlib
import importlib
import io
import json
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import numpy as np
import pytest

import tikv
from tikv import __main__ as cli
from tikv import runtime
from tikv.compat.seeds import spec
from tikv.tools import bench, doctor, support, table

ROOT = Path(__file__).parent.parent


def run(*arguments, timeout=600, env=None):
    return subprocess.run(
        [sys.executable, "-m", "tikv", *arguments],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "200"} | (env or {}),
    )


@pytest.mark.parametrize("command", ["info", "doctor", "variants", "support", "bench"])
def test_every_command_explains_itself(command):
    child = run(command, "--help")
    assert child.returncode == 0, child.stderr
    assert f"tikv {command}" in child.stdout
    assert "--json" in child.stdout
    assert "[]" not in child.stdout.replace("[ARCH ...]", "")
    if command in ("doctor", "support"):
        assert "[ARCH ...]" in child.stdout
        assert ", ".join(runtime.ARCHS) in child.stdout


def test_help_names_what_people_look_for():
    child = run("--help")
    assert child.returncode == 0
    for word in ("show-config", "collect-env", "env-report", "diagnose", "benchmark", "not the tikv database"):
        assert word in " ".join(child.stdout.lower().split()), word
    assert run("--version").stdout == f"tikv {tikv.__version__}\n"


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("nothing",),
        ("doctor", "abacus"),
        ("support", "abacus"),
        ("bench", "--arch", "abacus"),
        ("bench", "--seconds", "0"),
        ("bench", "--plot", "out.gif"),
        ("bench", "--plot", "no/such/folder/out.svg"),
    ],
)
def test_wrong_usage_ends_with_2_and_says_why(arguments):
    child = run(*arguments)
    assert child.returncode == 2
    assert child.stdout == ""
    assert "usage: tikv" in child.stderr
    assert "Traceback" not in child.stderr
    if "abacus" in arguments:
        assert all(arch in child.stderr for arch in runtime.ARCHS)


def test_an_option_that_a_command_lacks_shows_those_that_it_has():
    child = run("doctor", "--jsn")
    assert (child.returncode, child.stdout) == (2, "")
    assert "[--json]" in child.stderr
    assert child.stderr.endswith("tikv doctor: error: unrecognized arguments: --jsn\n")


def test_no_command_shows_all_commands():
    child = run()
    assert (child.returncode, child.stdout) == (2, "")
    assert "run real operations on each back end" in child.stderr


def test_info_is_json_alone():
    child = run("info", "--json")
    assert child.returncode == 0, child.stderr
    found = json.loads(child.stdout)
    assert found["version"] == tikv.__version__
    assert found["arch_order"][-1] == "cpu"
    assert found["packages"]["numpy"] == np.__version__


def test_variants_lists_all_twelve():
    found = json.loads(run("variants", "--json").stdout)
    assert [row["name"] for row in found] == list(spec.VARIANTS)
    plain = run("variants").stdout
    assert all(name in plain for name in spec.VARIANTS)


class Terminal(io.StringIO):
    """A terminal of 80 columns without colours."""

    def isatty(self):
        return True


def on_terminal(monkeypatch):
    """From here on stdout is a terminal; called in the test itself, as pytest puts its own stdout there before."""
    pytest.importorskip("rich")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setattr(sys, "stdout", Terminal())
    return sys.stdout


def test_a_narrow_terminal_shows_whole_names(monkeypatch):
    terminal = on_terminal(monkeypatch)
    assert cli.main(["variants"]) == 0
    lines = terminal.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    parts = sum(line.startswith("tikv variants") for line in lines)
    first = "".join(line.split("│")[1].strip() for line in lines if "│" in line)
    assert first == "".join(spec.VARIANTS) * parts


def test_a_pipe_keeps_to_the_columns_that_it_is_told():
    whole = run("variants").stdout
    narrow = run("variants", env={"COLUMNS": "80"}).stdout
    assert max(map(len, narrow.splitlines())) <= 80 < max(map(len, whole.splitlines()))
    assert all(name in narrow for name in spec.VARIANTS)
    cells = {cell for line in whole.splitlines()[3:] for cell in re.split("  +", line)}
    assert all(cell in narrow for cell in cells)
    assert "tikv variants, continued" in narrow


def test_what_stands_around_a_table_keeps_to_its_width(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "30")
    table.show("a title of more than thirty characters", ("a", "b"), [("1", "2")])
    table.tell("a sentence below the table that is longer than a line")
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 30
    words = "a title of more than thirty characters a b - - 1 2 a sentence below the table that is longer than a line"
    assert " ".join(" ".join(lines).split()) == words
    monkeypatch.delenv("COLUMNS")
    table.tell("a sentence below the table that is longer than a line")
    assert len(capsys.readouterr().out.splitlines()) == 1


@pytest.mark.parametrize(
    ("alias", "command"),
    [
        ("show-config", "info"),
        ("collect-env", "info"),
        pytest.param("diagnose", "doctor", marks=pytest.mark.full),  # which times first calls
    ],
)
def test_other_names_of_a_command_work(alias, command):
    arguments = ["--arch", "cpu"] if command == "doctor" else []
    found, wanted = run(alias, *arguments), run(command, *arguments)
    without_times = [re.sub(r"([\d.]+ to )?[\d.]+ s *", "some time", child.stdout) for child in (found, wanted)]
    assert found.returncode == 0
    assert without_times[0] == without_times[1]


@pytest.mark.thorough
def test_back_ends_are_named_alike(capsys):
    assert cli.main(["doctor", "--arch", "cpu", "--arch", "cpu,auto", "--json"]) == 0
    assert {row["arch"] for row in json.loads(capsys.readouterr().out)} == {
        "cpu",
        runtime.candidate_archs()[0],
    }
    for command in ("doctor", "support", "bench"):
        with pytest.raises(SystemExit):
            cli.main([command, "--arch", "cpu,nowhere"])
        assert "'nowhere' is not one of auto, " in capsys.readouterr().err


def test_figures_of_a_noisy_run_are_marked(capsys):
    rows = [bench.Row("a case", "cpu", 1000, 1.0, 7.0, {}, spread) for spread in (1.1, 2.0)]
    cli.show_bench("a machine", rows)
    steady, noisy = capsys.readouterr().out.splitlines()[3:5]
    assert (steady.split()[-2:], noisy.split()[-1]) == (["700", "%"], "noisy")


def test_a_table_prints_brackets_as_they_are(monkeypatch):
    terminal = on_terminal(monkeypatch)
    table.show("title", ("status", "detail"), [("FAIL", "cannot open [/tmp/x] now"), ("[red]", "")], {"FAIL": "red"})
    printed = terminal.getvalue()
    assert "cannot open [/tmp/x] now" in printed
    assert "[red]" in printed
    assert "FAIL" in printed


@pytest.mark.skipif(os.name == "nt", reason="pipes break otherwise there")
def test_a_reader_that_has_enough_is_no_error():
    reader, writer = os.pipe()
    os.close(reader)
    child = subprocess.run(
        [sys.executable, "-m", "tikv", "variants", "--json"],
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    os.close(writer)
    assert child.stderr == ""
    assert child.returncode == 141


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="Linux has a device that is always full")
@pytest.mark.parametrize(
    ("redirection", "words"), [("> /dev/full", "No space left"), (">&-", "stdout is closed"), ("> /dev/full 2>&-", "")]
)
@pytest.mark.parametrize("command", ["info", "variants --json"])
def test_output_that_nobody_takes_is_one_line_and_a_status(command, redirection, words):
    child = subprocess.run(
        ["sh", "-c", f'exec "$0" -m tikv {command} {redirection}', sys.executable],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert child.returncode == 1
    assert child.stderr.count("\n") == bool(words)
    assert words in child.stderr


@pytest.mark.thorough
def test_doctor_passes_on_the_cpu_and_names_what_is_absent():
    child = run("doctor", "cpu", "--json")
    assert child.returncode == 0, child.stdout
    (found,) = json.loads(child.stdout)
    assert (found["arch"], found["status"], found["remedy"]) == ("cpu", "PASS", "")
    for shortest, longest in (found["first_calls"], found["later_calls"]):
        assert 0.03 < shortest <= longest < 100
    assert set(found["parts"]) == set(found["later_parts"]) == set(doctor.PARTS)
    assert all(seconds > 0 for seconds in found["parts"].values())
    assert found["later_parts"]["compile"] < found["parts"]["compile"]  # it finds the kernels on disk
    if sys.platform != "darwin":
        child = run("doctor", "metal")
        assert child.returncode == 1
        assert "absent" in child.stdout
        assert "macOS" in child.stdout
        assert max(map(len, child.stdout.splitlines())) <= 80


def test_doctor_says_how_far_it_is(monkeypatch):
    """On a terminal, with rich or without it."""
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(doctor, "check", lambda arch: doctor.Check(arch, "absent", "not here", 0.0, "None."))
    monkeypatch.setitem(sys.modules, "rich.progress", None)
    assert cli.main(["doctor", "metal", "vulkan"]) == 1
    assert "tikv doctor: metal (0 of 2)" in terminal.getvalue()
    assert "tikv doctor: vulkan (1 of 2)" in terminal.getvalue()
    assert terminal.getvalue().endswith("\r\x1b[K")


def test_doctor_says_how_far_it_is_in_a_pipe():
    if sys.platform != "darwin":
        child = run("doctor", "metal", "--json")
        assert child.stderr == "tikv doctor: metal (0 of 1)\n"
        assert json.loads(child.stdout)[0]["status"] == "absent"


@pytest.mark.parametrize(
    ("probe", "status", "words"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "FAIL", "-9"),
        ("import time; time.sleep(60)", "FAIL", "no answer"),
        ("raise RuntimeError('a driver spoke')", "FAIL", "a driver spoke"),
        ('print(\'noise\'); print(\'{"status": "PASS", "detail": "fine"}\')', "PASS", "fine"),
    ],
)
def test_doctor_outlives_its_children(monkeypatch, probe, status, words):
    monkeypatch.setattr(doctor, "_PROBE", probe)
    found = doctor.check("cpu", timeout=1.0 if "sleep" in probe else 60.0)
    assert (found.status, words in found.detail) == (status, True), found
    assert bool(found.remedy) == (status != "PASS")


def plant(monkeypatch, operation):
    """Leave one operation of the trials, in a child that reads the planted table instead of `tikv.tools.support`."""
    table = f"t.OPERATIONS = {{'copy': t.OPERATIONS['copy'], {operation}}}"
    script = f"import sys, tikv.tools.support as t; {table}; t.main(sys.argv[-1])"
    popen = subprocess.Popen

    def start(command, **options):
        return popen([command[0], "-c", script, command[-1]], **options)

    monkeypatch.setattr(doctor.subprocess, "Popen", start)


@pytest.mark.thorough
def test_support_runs_reports_and_outlives_a_crash(monkeypatch, capsys):
    plant(monkeypatch, "'broken': lambda *_: __import__('os')._exit(7)")
    assert cli.main(["support", "cpu", "--json"]) == 1
    found = [doctor.Trial(**trial) for trial in json.loads(capsys.readouterr().out)]
    status = {trial.dtype: trial.status for trial in found if trial.operation == "copy"}
    # `copy` takes no scales
    assert status == {name: "not offered" if name == "int8" else "tested" for name in support.DTYPES}
    assert found[-1].status == "FAIL"
    assert "exit status 7" in found[-1].detail


@pytest.mark.thorough
def test_the_bar_of_support_ends_at_its_total(monkeypatch, capsys):
    plant(monkeypatch, "'none': lambda *_: iter([])")  # no dtype means anything to it
    monkeypatch.setattr(support, "OPERATIONS", {"copy": None, "none": None})
    steps, totals = [], []

    @contextlib.contextmanager
    def progress(title, total):
        totals.append(total)
        yield lambda now, done: steps.append(done)

    monkeypatch.setattr(cli, "progress", progress)
    assert cli.main(["support", "cpu", "cpu", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)) == len(support.DTYPES)
    assert totals == [2 * len(support.DTYPES)]
    assert steps == [*range(1, len(support.DTYPES) + 1), *totals]


@pytest.mark.thorough
def test_support_finds_a_wrong_result(monkeypatch, capsys):
    plant(monkeypatch, "'wrong': lambda bench, src, stored: iter([(bench.rows(src, 3), bench.rows(src, 3), None)])")
    assert cli.main(["support", "cpu"]) == 1
    out, err = capsys.readouterr()
    assert "FAIL cpu wrong float32: 12 of 12 bytes differ" in err
    assert "tikv support, cpu: tested here, now" in out


@pytest.mark.skipif(sys.platform == "darwin", reason="Metal is there")
def test_support_says_what_is_not_on_this_machine(capsys):
    assert cli.main(["support", "metal"]) == 1
    assert "metal: not on this machine" in capsys.readouterr().out


# Each dtype has kernels of its own, which the operations' own tests compile too. On Vulkan attention's take longest.
EVERY, FEW = ("copy", "write_slots", "decode_attention"), ("float32", "float64", "int8", "quant4_64")
ATTENDS = ("paged_decode_attention", "KVCacheStore", "PagedKVCacheStore")


@pytest.mark.parametrize(
    ("operation", "columns"),
    [
        *(pytest.param(op, FEW, id=f"{op}-few",
                       marks=[pytest.mark.thorough] + [pytest.mark.full("vulkan")] * (op in ATTENDS))
          for op in support.OPERATIONS if op not in EVERY or op == "decode_attention"),
        *(pytest.param(op, tuple(support.DTYPES), id=op,
                       marks=[pytest.mark.thorough] * (op != "copy") + [pytest.mark.full] * (op not in EVERY)
                       + [pytest.mark.full("vulkan")] * (op == "decode_attention"))
          for op in support.OPERATIONS),
    ],
)  # fmt: skip
def test_each_operation_agrees_with_the_reference(arch, operation, columns):
    live = runtime.current()
    found = {dtype: support.attempt(live, operation, dtype) for dtype in columns}
    known = [trial for trial in found.values() if trial is not None]
    assert [trial.detail for trial in known if trial.status == "FAIL"] == []
    assert found["float32"].status == "tested"
    if found["float64"] is not None and not live.has_float64:
        assert found["float64"].status == "not offered"


def test_the_comparison_sees_one_bit_and_one_tolerance():
    want = np.float32([1.0, -0.0, np.nan])
    assert support.differs(want.copy(), want, None) == ""
    assert "1 of 12 bytes" in support.differs(np.float32([1.0, 0.0, np.nan]), want, None)
    assert "dtype" in support.differs(want.astype(np.float64), want, None)
    assert "shape" in support.differs(want[:2], want, None)
    assert "more than 0.1" in support.differs(np.float32([1.2]), np.float64([1.0]), 0.1)


def can_be_imported(module):
    try:
        importlib.import_module(module)
    except ImportError:
        return False
    return True


@pytest.mark.thorough
def test_bench_times_every_case_and_draws_it(tmp_path):
    child = run("bench", "--arch", "cpu", "--seconds", "1", "--json", "--plot", str(tmp_path / "out.svg"))
    assert child.returncode == 0, child.stderr
    found = json.loads(child.stdout)
    assert [row["case"] for row in found["rows"]] == list(bench.CASES)
    for row in found["rows"]:
        assert row["us"] > 0
        assert row["memcpy_us"] > 0
        assert row["arch"] == "cpu"
        assert row["gb_per_s"] == pytest.approx(row["bytes_moved"] / row["us"] / 1e3, rel=1e-2, abs=1e-3)
        assert ("numpy" in row["peers_us"]) == (not row["case"].startswith("attention"))
        for module, peer in (("torch", "torch"), ("mlx.core", "mlx")):
            assert (peer in row["peers_us"]) == can_be_imported(module)
        assert row["left_out"] == {}
    assert "taichi 1.7" in found["machine"]
    texts = [node.text for node in ElementTree.parse(tmp_path / "out.svg").iter() if node.text]
    assert set(bench.CASES) <= set(texts)
    assert "out.svg" in child.stderr


def test_an_interrupted_bench_prints_what_is_done(monkeypatch, capsys):
    row = bench.Row("a case", "cpu", 2_000_000, 100.0, 50.0, {"numpy": 400.0})

    def interrupted(arch, seconds):
        yield row
        raise KeyboardInterrupt

    monkeypatch.setattr(bench, "bench", interrupted)
    monkeypatch.setattr(bench, "about", lambda arch: "a machine")
    assert cli.main(["bench", "--arch", "cpu"]) == 130
    out, err = capsys.readouterr()
    assert [line.split() for line in out.splitlines()][3] == ["a", "case", "100.0", "400.0", "50.0", "20.0", "50", "%"]
    assert "stopped" in err


def test_a_peer_that_fails_or_is_wrong_is_left_out_and_named(arch, monkeypatch, capsys):
    right, wrong = (lambda: [(np.ones(2), np.ones(2))]), (lambda: [(np.zeros(2), np.ones(2))])

    def case(machine):
        return 8, {
            "tikv": bench.Contender(lambda: None, right),
            "numpy": bench.Contender(lambda: None, wrong),
            "torch": bench.Contender(lambda: {}["no kernel for this"], right),
            "mlx": bench.Contender(lambda: None, right, wait=lambda: None),
        }

    monkeypatch.setattr(bench, "CASES", {"a case": case})
    row = bench.time_case(bench.Machine(runtime.current()), "a case", 0.01)
    assert list(row.peers_us) == ["mlx"]
    assert list(row.as_dict()["left_out"]) == ["numpy", "torch"]
    cli.show_bench("a machine", [row])
    told = " ".join(capsys.readouterr().out.split())  # a sentence is wrapped where the terminal ends
    assert "left out: numpy in a case: TikvError: bench: a case: the result of numpy is wrong" in told
    assert "left out: torch in a case: KeyError: 'no kernel for this'" in told


def test_a_wrong_result_is_not_timed(arch, monkeypatch, capsys):
    def wrong(machine):
        return 8, {"tikv": bench.Contender(lambda: None, lambda: [(np.zeros(2), np.ones(2))])}

    monkeypatch.setattr(bench, "CASES", {"a case": wrong})
    with pytest.raises(tikv.TikvError, match="a case: the result of tikv is wrong"):
        bench.time_case(bench.Machine(runtime.current()), "a case", 0.1)
