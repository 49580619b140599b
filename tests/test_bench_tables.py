"""The benches' tables in a file, and the pages that are made from it."""

import importlib
import importlib.util
import json
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
    for path in (ROOT / "docs").rglob("*.md"):
        assert tables.stale(path) == [], f"{path}: python benches/tables.py write makes it from its file"
    with pytest.raises(SystemExit, match=r"no <!-- figures: other\.json -->"):
        tables.filled(page.read_text(), "other.json", FOUND)


@pytest.mark.thorough
@pytest.mark.archs("cpu")
def test_one_command_makes_all_tables(arch, tmp_path):
    """On tiny sizes, one bench and one program; figures of such a run go into no page."""
    tables = importlib.import_module("tables")
    file, page = tmp_path / "cpu.json", tmp_path / "page.md"
    page.write_text(PAGE.format(""))
    command = [sys.executable, str(ROOT / "benches" / "tables.py")]
    chosen = ["--small", "--only", "copy_kv_one_token or host"]
    child = subprocess.run(
        [*command, "run", "cpu", str(file), *chosen], check=True, capture_output=True, text=True, env=tables.PATHS
    )
    found = json.loads(file.read_text())
    assert child.stdout == tables.markdown(found)
    assert found["environment"]["versions"]["numpy"]
    titles = [table["title"] for table in found["tables"]]
    assert titles[0] == "pytest benches --arch cpu"
    assert [row[1] for row in found["tables"][0]["rows"]] == [
        "copy kv one token, 1 token, float32", "copy kv one token, 1 token, float16",
    ]  # fmt: skip
    if importlib.util.find_spec("torch"):
        assert titles[1:] == ["What a call of one token costs the host"]
        assert found["left_out"] == {}
    else:
        (why,) = found["left_out"].values()
        assert "torch" in why
    refused = subprocess.run(
        [*command, "write", str(file), str(page)], check=False, capture_output=True, text=True, env=tables.PATHS
    )
    assert (refused.returncode, page.read_text()) == (1, PAGE.format(""))
    assert "small sizes" in refused.stderr
