"""`tikv doctor --report`: one file with all that was found, however the run ended."""

import json

import pytest

from tikv import __main__ as cli
from tikv.tools import bench, doctor, report, support

ROWS = {"machine": "a machine", "rows": [{"case": "one"}, {"case": "two"}]}


@pytest.fixture
def machine(monkeypatch):
    """What each back end answers, without running it: `machine[arch] = (check status, trial status, benches)`."""
    answers = {"cpu": ("PASS", doctor.TESTED, ROWS), "vulkan": ("absent", None, None)}

    def check(arch):
        return doctor.Check(arch, answers[arch][0], "a detail", 0.5)

    def trials(archs, done):
        for arch in archs:
            for dtype in ("float32", "int8"):
                if answers[arch][1] is KeyboardInterrupt:
                    raise KeyboardInterrupt
                done(doctor.Trial(arch, "copy", dtype, answers[arch][1]))

    monkeypatch.setattr(doctor, "check", check)
    monkeypatch.setattr(doctor, "support", trials)
    monkeypatch.setattr(report, "_benched", lambda arch, seconds: answers[arch][2])
    monkeypatch.setattr(doctor.runtime, "candidate_archs", lambda: ["cpu"])
    return answers


def test_one_file_holds_all_of_it(machine, tmp_path, capsys):
    path = tmp_path / "report.json"
    assert cli.main(["doctor", "cpu", "vulkan", "--report", str(path)]) == 0
    found = json.loads(path.read_text())
    assert list(found) == ["form", "stopped", "info", "checks", "trials", "benches"]
    assert (found["form"], found["stopped"]) == (1, False)
    assert found["info"]["version"] == doctor.VERSION
    assert [(c["arch"], c["status"]) for c in found["checks"]] == [("cpu", "PASS"), ("vulkan", "absent")]
    assert [(t["operation"], t["dtype"]) for t in found["trials"]] == [("copy", "float32"), ("copy", "int8")]
    assert found["benches"] == [{"arch": "cpu", **ROWS}]
    told = capsys.readouterr().out
    assert "2 tested" in told
    assert "2 cases" in told
    assert str(path) in told


@pytest.mark.parametrize(
    "answer",
    [("FAIL", doctor.TESTED, ROWS), ("PASS", doctor.FAILED, ROWS), ("PASS", doctor.TESTED, {"error": "exit status 1"})],
    ids=["check", "trial", "bench"],
)
def test_a_failure_is_the_exit_status_and_in_the_file(machine, answer, tmp_path):
    machine["cpu"] = answer
    assert cli.main(["doctor", "cpu", "--report", str(tmp_path / "report")]) == 1
    assert json.loads((tmp_path / "report").read_text())["stopped"] is False


def test_what_was_done_before_it_was_stopped_is_written(machine, tmp_path, capsys):
    machine["vulkan"] = ("PASS", KeyboardInterrupt, None)
    assert cli.main(["doctor", "cpu", "vulkan", "--report", str(tmp_path / "report")]) == 130
    found = json.loads((tmp_path / "report").read_text())
    assert found["stopped"] is True
    assert [c["arch"] for c in found["checks"]] == ["cpu", "vulkan"]
    assert len(found["benches"]) == 1
    assert "up to where it was stopped" in capsys.readouterr().out


def test_steps_grow_to_their_end(machine):
    seen = []
    report.report(("vulkan", "cpu"), step=lambda now, done: seen.append(done))
    assert seen == sorted(seen)
    assert (
        seen[-1]
        == report.steps(("vulkan", "cpu"))
        == 2 * (1 + len(support.OPERATIONS) * len(support.DTYPES) + len(bench.CASES))
    )


@pytest.mark.parametrize(
    ("path", "why"), [("no/such/folder/report.json", "there is no folder 'no/such/folder'"), (".", "'.' is not a file")]
)
def test_a_file_that_cannot_be_written_is_refused_before_the_work(machine, monkeypatch, tmp_path, capsys, path, why):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(report, "report", lambda *args, **kwargs: pytest.fail("it began"))
    assert cli.main(["doctor", "cpu", "--report", path]) == 1
    assert why in capsys.readouterr().err


@pytest.mark.full
@pytest.mark.archs("cpu")
def test_benches_are_those_of_the_command(arch):
    found = report._benched(arch, 1.0)
    assert [row["case"] for row in found["rows"]] == list(bench.CASES)


def test_a_bench_that_ends_before_its_time_says_how():
    assert "'abacus'" in report._benched("abacus", 1.0)["error"]
