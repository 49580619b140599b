"""All tables of one kind of machine, in one file, and pages of the manual that are made from it.

    python benches/tables.py run cpu figures.json         every bench and program of the CPU, with nothing beside
    python benches/tables.py run cuda figures.json        those of an NVIDIA GPU, and of peers that are installed
    python benches/tables.py write figures.json PAGE.md   put its tables into a page

`--small` runs the same on tiny sizes, once each, to see that it works: its figures mean nothing. A page has the tables
between two lines, <!-- figures: NAME.json --> and <!-- end of figures -->; tests/test_docs.py compares the two.
"""

import argparse
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile

import environment
import recorded
import report

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent
# A process that tests beside others has a number, by which benches that it starts would take themselves for tests too.
OUTSIDE = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST_")}
PATHS = {**OUTSIDE, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
FORM = 1  # of the file; it grows when a reader of older ones would misread it
# A title, and the command below benches/ that prints such tables; what is added to it with --small.
PROGRAMS = {
    "cpu": [
        ("What a call of one token costs the host", ["attention_cpu.py", "host"], ["--rounds", "1"]),
        ("Prompts beside torch", ["attention_cpu.py", "prompts"], ["--tokens", "8", "--keys", "64", "--rounds", "1"]),
        ("Chosen tokens", ["attention_cpu.py", "chosen"], ["--keys", "64", "--chosen", "8", "--rounds", "1"]),
        ("Taichi and Quadrants", ["engines.py"], ["copy_kv, 1 token, float32"]),
    ],
    "cuda": [
        ("Decode attention", ["attention_gpu.py", "decode"], None),
        ("Prompts", ["attention_gpu.py", "prompts"], None),
        ("Formats", ["attention_gpu.py", "codes"], None),
        ("Dequantising", ["attention_gpu.py", "dequantize"], None),
        ("Latent attention", ["attention_gpu.py", "latent"], None),
    ],
}
MARKED = re.compile(r"(<!-- figures: ([\w.-]+) -->\n).*?(<!-- end of figures -->)", re.DOTALL)


def run(arch: str, small: bool, words: str) -> dict:
    """Every table of a back end; what could not run is named with the reason."""
    found = {"form": FORM, "small": small, "environment": environment.environment([arch]), "tables": [], "left_out": {}}
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder) / "bench.json"
        command = ["-m", "pytest", "benches", "-q", "--arch", arch, f"--benchmark-json={file}"]
        command += ["--small"] * small + (["-k", words] if words else [])
        if told(found, command) is not None:
            for _, rows in report.load([file]):
                title = f"pytest benches --arch {arch}"
                add(found, title, command, "\n".join(report.tables(rows)))
    for title, program, tiny in PROGRAMS[arch]:
        if words and not any(word in program[1:] for word in words.split(" or ")):
            continue
        if small and tiny is None:
            found["left_out"][" ".join(program)] = "it has no small sizes"
            continue
        command = [str(HERE / program[0]), *program[1:], *(tiny if small else [])]
        if (text := told(found, command)) is not None:
            add(found, title, command, text)
    return found


def told(found: dict, command: list[str]) -> str | None:
    """What a program printed; None if it failed, and why is then among what was left out."""
    print("...", named(command), file=sys.stderr, flush=True)
    child = subprocess.run([sys.executable, *command], capture_output=True, text=True, check=False, cwd=ROOT, env=PATHS)
    if child.returncode:
        lines = (child.stderr.strip() or child.stdout.strip() or "it said nothing").splitlines()
        found["left_out"][named(command)] = f"exit status {child.returncode}: {lines[-1]}"
        return None
    return child.stdout


def named(command: list[str]) -> str:
    """A command as a reader would type it."""
    words = [word.removeprefix(f"{ROOT}{os.sep}") for word in command if not word.startswith("--benchmark-json")]
    return " ".join(["python", *(f'"{word}"' if " " in word else word for word in words)])


def add(found: dict, title: str, command: list[str], text: str) -> None:
    """The tables of a text, under a title."""
    for table in recorded.tables_of(f"{text}\n"):
        found["tables"].append(
            {"title": title, "command": named(command), "columns": table.columns, "rows": table.rows}
        )


def markdown(found: dict) -> str:
    """The tables as a page has them."""
    parts = [f"Measured on {environment.line(found['environment'])}."]
    above = None
    for table in found["tables"]:
        if table["title"] != above:
            parts.append(f"**{table['title']}** (`{table['command']}`)")
        above = table["title"]
        lines = [table["columns"], ["---"] * len(table["columns"]), *table["rows"]]
        parts.append("\n".join(f"| {' | '.join(cells)} |" for cells in lines))
    parts += [f"Left out: `{command}` ({why})." for command, why in found["left_out"].items()]
    return "\n\n".join(parts) + "\n"


def filled(text: str, name: str, found: dict) -> str:
    """A page with the tables of a file between its marks.

    Raises:
        SystemExit: the page has no such marks.
    """
    if not any(mark[2] == name for mark in MARKED.finditer(text)):
        raise SystemExit(f"tables: the page has no <!-- figures: {name} --> with <!-- end of figures --> behind it")
    return MARKED.sub(lambda mark: f"{mark[1]}{markdown(found)}{mark[3]}" if mark[2] == name else mark[0], text)


def stale(page: pathlib.Path) -> list[str]:
    """Files whose tables a page shows otherwise than they are; they lie beside the page."""
    text = page.read_text(encoding="utf-8")
    wrong = []
    for name in [mark[2] for mark in MARKED.finditer(text)]:
        found = json.loads((page.parent / name).read_text(encoding="utf-8"))
        if found["small"] or filled(text, name, found) != text:
            wrong.append(name)
    return wrong


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    running = commands.add_parser("run", help="run every bench and program, and write one file")
    running.add_argument("arch", choices=sorted(PROGRAMS))
    running.add_argument("file", type=pathlib.Path)
    running.add_argument("--small", action="store_true", help="tiny sizes, once each, to see that it works")
    running.add_argument("--only", default="", metavar="WORDS", help="such benches, as for pytest's -k, and programs")
    writing = commands.add_parser("write", help="put the tables of a file into a page")
    writing.add_argument("file", type=pathlib.Path)
    writing.add_argument("page", type=pathlib.Path)
    given = parser.parse_args()
    if given.command == "run":
        found = run(given.arch, given.small, given.only)
        given.file.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        print(markdown(found), end="")
        sys.exit(not found["tables"])
    found = json.loads(given.file.read_text(encoding="utf-8"))
    if found["form"] != FORM or found["small"]:
        raise SystemExit(f"tables: {given.file} is of small sizes or of another form; run it anew")
    given.page.write_text(filled(given.page.read_text(encoding="utf-8"), given.file.name, found), encoding="utf-8")


if __name__ == "__main__":
    main()
