"""The benches' tables in a file, and the pages that are made from it."""

import importlib
import importlib.util
import json
import os
import platform
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOUND = {
    "form": 1,
    "small": False,
    "environment": {
        "devices": {"cpu": "a processor"}, "cores": 2, "load": 0.1, "system": "Linux x86_64", "python": "3.11.7",
        "versions": {"taichi": "1.7.4", "torch": None}, "commit": "abc", "date": "2026-11-25",
    },
    "tables": [
        {"title": "Copies", "command": "python a", "columns": ["work", "us"], "rows": [["one", "1.5"], ["two", "3"]]},
        {"title": "Copies", "command": "python a", "columns": ["call", "us"], "rows": [["one", "2"]]},
    ],
    "left_out": {"python b": "no such peer"},
}  # fmt: skip
SHOWN = """\
Measured on a processor, 2 cores, load 0.1 before, Linux x86_64, Python 3.11.7, taichi 1.7.4; 2026-11-25, commit abc.

**Copies** (`python a`)

| work | us |
| --- | --- |
| one | 1.5 |
| two | 3 |

| call | us |
| --- | --- |
| one | 2 |

Left out: `python b` (no such peer).
"""
PAGE = "# Page\n\n<!-- figures: cpu.json -->\n{}<!-- end of figures -->\n\nAfter.\n"


def test_a_page_has_the_tables_of_its_file(tmp_path):
    tables = importlib.import_module("tables")
    assert tables.markdown(FOUND) == SHOWN
    file, page = tmp_path / "cpu.json", tmp_path / "page.md"
    file.write_text(json.dumps(FOUND))
    page.write_text(PAGE.format("old\n"))
    assert tables.stale(page) == ["cpu.json"]
    command = [sys.executable, str(ROOT / "benches" / "tables.py"), "write", str(file), str(page)]
    subprocess.run(command, check=True, env=tables.PATHS)
    assert page.read_text() == PAGE.format(SHOWN)
    assert tables.stale(page) == []
    page.write_text(page.read_text().replace("1.5", "1.4"))
    assert tables.stale(page) == ["cpu.json"]
    for path in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md")):
        assert tables.stale(path) == [], f"{path}: python benches/tables.py write makes it from its file"
    with pytest.raises(SystemExit, match=r"no <!-- figures: other\.json -->"):
        tables.filled(page.read_text(), "other.json", FOUND)


@pytest.fixture
def three(monkeypatch, tmp_path):
    """A run of three programs, the third of which fails and the second of which is cut off once; and what was begun."""
    tables = importlib.import_module("tables")
    file, begun, about = tmp_path / "cpu.json", [], FOUND["environment"] | {}

    def made_by(command):
        begun.append(Path(command[0]).stem)
        if begun == ["first", "second"]:
            raise KeyboardInterrupt
        if begun[-1] == "third":
            return [], "no such peer"
        return [tables.recorded.Table(["work"], [[begun[-1]]])], ""

    def run(*options):
        words = ["--only", "first.py or second.py or third.py"]
        monkeypatch.setattr(sys, "argv", ["tables.py", "run", "cpu", str(file), *words, *options])
        with pytest.raises((SystemExit, KeyboardInterrupt)):
            tables.main()
        return json.loads(file.read_text())

    programs = [(name.title(), [f"{name}.py"], []) for name in ("first", "second", "third")]
    monkeypatch.setattr(tables, "PROGRAMS", {"cpu": programs})
    monkeypatch.setattr(tables, "made_by", made_by)
    monkeypatch.setattr(tables.environment, "environment", lambda archs: about | {})
    return run, begun, about


def named(program):
    """Its command."""
    return f"python {Path('benches', program)}.py"


def test_a_run_that_was_cut_off_goes_on(three, capsys):
    run, begun, _ = three
    assert [table["title"] for table in run()["tables"]] == ["First"]
    found = run("--minutes", "-1")
    assert [table["title"] for table in found["tables"]] == ["First"]
    assert found["left_out"] == dict.fromkeys([named("second"), named("third")], "not begun after 0 minutes")
    found = run()
    assert [table["title"] for table in found["tables"]] == ["First", "Second"]
    assert found["left_out"] == {named("third"): "no such peer"}
    assert begun == ["first", "second", "second", "third"]
    assert run() == found
    assert begun[4:] == ["third"]
    said = capsys.readouterr()
    assert re.search(rf"2 of 2, \d+ s: {re.escape(named('third'))}", said.err)
    assert f"Left out: `{named('third')}` (no such peer)." in said.out


def test_a_table_of_another_machine_says_so(three, capsys):
    run, begun, about = three
    run()
    run()
    about["commit"], about["load"] = "def", 3.0
    found = run("--again", "--only", "first.py")
    assert begun[4:] == ["first"]
    assert [table["title"] for table in found["tables"]] == ["First", "Second"]
    assert [table.get("environment", {}).get("commit") for table in found["tables"]] == ["def", None]
    heading = f"**First** (`{named('first')}`), measured on a processor, 2 cores, load 3.0"
    assert heading in capsys.readouterr().out
    tables, file = importlib.import_module("tables"), Path(sys.argv[3])
    for arch, small in (("cuda", False), ("cpu", True)):
        with pytest.raises(SystemExit, match="tables of another kind"):
            tables.begun(file, arch, small)


def test_a_peer_that_fails_says_why(monkeypatch, tmp_path):
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("FlashAttention-3 would have to be there")
    peer = importlib.import_module("flash_attention_3")
    monkeypatch.setattr(peer.importlib.util, "find_spec", lambda name: None)
    assert peer.times([[1, 1, 64, 4, 0]] * 2) == ["not installed"] * 2
    monkeypatch.undo()
    (tmp_path / "flash_attn_interface.py").write_text("flash_attn_with_kvcache = None")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.syspath_prepend(tmp_path)
    (why,) = peer.times([[1, 1, 64, 4, 0]])
    assert why.startswith("failed: RuntimeError: no NVIDIA GPU was found")


def test_processes_of_a_whole_generate_become_one_run():
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    generate_gpu = importlib.import_module("generate_gpu")
    base = {"name": "DynamicCache", "token_ms": 20.5, "peak_mb": None, "as_dynamic": 32, "failed": ""}
    other = {**base, "name": "TikvCache", "token_ms": 2.5, "peak_mb": 17.0}
    runs = [{"batch": 1, "rows": [base, other]}, {"batch": 1, "rows": [{**base, "token_ms": 13.5, "as_dynamic": 31}]}]
    run = generate_gpu.together(runs, "python a")
    assert (run["command"], run["batch"]) == ("python a", 1)
    assert run["rows"] == [{**base, "token_ms": [13.5, 20.5], "as_dynamic": 31}, other]


QUICK = ("stores_gpu.py prefix",)


@pytest.mark.archs("cpu")
@pytest.mark.parametrize(
    "program",
    [
        pytest.param(
            program, id=(name := " ".join(program)), marks=pytest.mark.thorough if name in QUICK else pytest.mark.long
        )
        for _, program, _ in importlib.import_module("tables").PROGRAMS["cuda"]
    ],
)
def test_a_program_for_a_gpu_works_on_tiny_sizes(arch, program):
    """Without a GPU too: every row of its tables is measured."""
    pytest.importorskip("transformers")
    tables = importlib.import_module("tables")
    found, why = tables.made_by([str(ROOT / "benches" / program[0]), *program[1:], "--small"])
    assert why == ""
    assert found
    for table in found:
        assert table.rows
        for row in table.rows:
            assert len(row) == len(table.columns)
            assert not any("failed" in cell for cell in row), row


@pytest.mark.thorough
@pytest.mark.archs("cpu")
def test_one_command_makes_all_tables(arch, tmp_path):
    """On tiny sizes, one bench and one program; figures of such a run go into no page."""
    tables = importlib.import_module("tables")
    file, page = tmp_path / "cpu.json", tmp_path / "page.md"
    page.write_text(PAGE.format(""))
    command = [sys.executable, str(ROOT / "benches" / "tables.py")]
    chosen = ["--small", "--only", "bench_copy.py or attention_cpu.py host"]
    child = subprocess.run(
        [*command, "run", "cpu", str(file), *chosen], check=True, capture_output=True, text=True, env=tables.PATHS
    )
    found = json.loads(file.read_text())
    assert child.stdout == tables.markdown(found)
    assert found["environment"]["versions"]["numpy"]
    titles = [table["title"] for table in found["tables"]]
    assert titles[-1].startswith("Prefill: many tokens, K and V")
    assert [row[1] for row in found["tables"][-1]["rows"]][:2] == ["prefill, float32", "prefill, float16"]
    if importlib.util.find_spec("torch"):
        assert titles[:-1] == ["What a call of one token costs the host"]
        assert found["left_out"] == {}
    else:
        (why,) = found["left_out"].values()
        assert "torch" in why
    refused = subprocess.run(
        [*command, "write", str(file), str(page)], check=False, capture_output=True, text=True, env=tables.PATHS
    )
    assert (refused.returncode, page.read_text()) == (1, PAGE.format(""))
    assert "small sizes" in refused.stderr


MODEL = {"model": "a model", "machine": "a processor", "versions": {"torch": "2.13", "tikv": "0.2"}}
WHOLE = {
    "form": 1,
    "runs": [
        {
            **MODEL, "command": "python a", "batch": 1, "prompt": 4096, "tokens": 32,
            "rows": [
                {"name": "DynamicCache", "prompt_ms": 30, "token_ms": [13, 26.04], "as_dynamic": 32},
                {"name": "StaticCache", "prompt_ms": 40, "token_ms": 3.4, "as_dynamic": 32},
                {"name": "TikvCache", "prompt_ms": 1234.5, "token_ms": 1.7, "as_dynamic": 31},
                {"name": "TikvCache, more", "failed": "does not fit: no room"},
                {"name": "TikvCache, 4 bits"},
            ],
        },
        {**MODEL, "command": "python b", "batch": 2, "prompt": 8, "tokens": 3, "rows": [
            {"name": "TikvCache", "peak_mb": 17300, "another_run": ["peak_mb"]},
        ]},
    ],
    "of_all_runs": [{"name": "TikvCache", "first_call_s": [22, 31]}],
}  # fmt: skip
LONG = """\
a processor, torch 2.13, tikv 0.2; a model; `python a` and `python b`:

| texts | cache | prompt | each new token | peak memory beyond the weights | first call \
| new tokens that equal DynamicCache's |
| --- | --- | --- | --- | --- | --- | --- |
| 1 text of 4,096 tokens | DynamicCache | 30 ms | 13 to 26.0 ms | not measured | not measured | 32 of 32 |
| 1 text of 4,096 tokens | StaticCache | 40 ms | 3.40 ms | not measured | not measured | 32 of 32 |
| 1 text of 4,096 tokens | TikvCache | 1,234 ms | 1.70 ms | not measured | not measured | 31 of 32 |
| 1 text of 4,096 tokens | TikvCache, more \
| does not fit | does not fit | does not fit | does not fit | does not fit |
| 2 texts of 8 tokens | TikvCache | not measured | not measured | 17.3 GB (*) | not measured | not measured |
| all runs | TikvCache | not measured | not measured | not measured | 22 to 31 s | not measured |

(*) from another run.
"""
SHORT = """\
a processor, torch 2.13, tikv 0.2; a model:

| texts | cache | each new token | peak memory beyond the weights | new tokens that equal DynamicCache's |
| --- | --- | --- | --- | --- |
| 1 text of 4,096 tokens | DynamicCache | 13 to 26.0 ms | not measured | 32 of 32 |
| 1 text of 4,096 tokens | StaticCache | 3.40 ms | not measured | 32 of 32 |
| 1 text of 4,096 tokens | TikvCache | 1.70 ms | not measured | 31 of 32 |
| 1 text of 4,096 tokens | TikvCache, more | does not fit | does not fit | does not fit |
| 2 texts of 8 tokens | TikvCache | not measured | 17.3 GB (*) | not measured |

(*) from another run.
"""


def test_a_page_has_the_table_of_whole_models(tmp_path):
    tables = importlib.import_module("tables")
    (tmp_path / "docs").mkdir()
    file, page, index = tmp_path / "docs" / "NAME.json", tmp_path / "README.md", tmp_path / "docs" / "index.md"
    file.write_text(json.dumps(WHOLE))
    text = "<!-- figures: {} -->\n{}<!-- end of figures -->\n"
    page.write_text(text.format("docs/NAME.json, short", ""))
    index.write_text(text.format("NAME.json", "old\n"))
    command = [sys.executable, str(ROOT / "benches" / "tables.py"), "write", str(file), str(page), str(index)]
    subprocess.run(command, check=True, env=tables.PATHS)
    assert page.read_text() == text.format("docs/NAME.json, short", SHORT)
    assert index.read_text() == text.format("NAME.json", LONG)
    first, second = WHOLE["runs"]
    with pytest.raises(SystemExit, match="of one model and machine"):
        tables.markdown({"runs": [first, {**second, "machine": "another"}]})


def test_a_picture_of_whole_models_names_gains_and_losses():
    whole_models = importlib.import_module("whole_models")
    assert [(title, [(label, lost) for *_, label, lost in bars]) for title, bars in whole_models.panels(WHOLE)] == [
        ("1 text of 4,096 tokens: each new token",
         [(" 13 to 26.0 ms", False), (" 3.40 ms", False), (" 1.70 ms  0.50x", False)]),
        ("1 text of 4,096 tokens: prompt", [(" 30 ms", False), (" 40 ms", False), (" 1,234 ms  41.15x", True)]),
        ("2 texts of 8 tokens: peak memory beyond the weights", [(" 17.3 GB", False)]),
        ("all runs: first call", [(" 22 to 31 s", False)]),
    ]  # fmt: skip
    assert whole_models.ratio([22, 31], [[15, 17], 20]) == (22 / 17, 31 / 15)


def test_the_picture_of_whole_models_has_the_figures_of_its_file(tmp_path):
    """Every label, in order; and the same picture where matplotlib is that which drew it."""
    whole_models = importlib.import_module("whole_models")
    found = json.loads((ROOT / "docs" / "whole_models_h200.json").read_text(encoding="utf-8"))
    labels = [label for _, bars in whole_models.panels(found) for *_, label, _ in bars]
    kept = {theme: (ROOT / f"docs/whole-model-{theme}.svg").read_text(encoding="utf-8") for theme in ("light", "dark")}
    for text in kept.values():
        drawn = [comment for comment in re.findall("<!-- (.*?) -->", text) if comment.startswith(" ")]
        assert drawn == labels, "python benches/whole_models.py draws it from the file as it is"
    matplotlib = pytest.importorskip("matplotlib")
    if f"Matplotlib v{matplotlib.__version__}," not in kept["light"] or platform.machine() != "x86_64":
        pytest.skip("another matplotlib or another machine places outlines otherwise by a hair")
    command = [sys.executable, str(ROOT / "benches" / "whole_models.py"), "--svg", str(tmp_path / "picture")]
    subprocess.run(command, check=True, env=importlib.import_module("tables").PATHS)
    for theme, text in kept.items():
        assert (tmp_path / f"picture-{theme}.svg").read_text(encoding="utf-8") == text
