"""All tables for one kind of machine, in one file, and the pages of the manual that are made from it.

    python benches/tables.py run cpu figures.json         every program and bench for the CPU; let nothing else run
    python benches/tables.py run cuda figures.json        the same for an NVIDIA GPU, with the peers that are installed
    python benches/tables.py run cuda figures.json --only "generate_gpu or bench_copy"
    python benches/tables.py write figures.json PAGE.md   put its tables into a page, or into several

The file is written after each program. A second run with the same file adds what is missing, so a run may be
interrupted or split: with `--minutes 7`, no program starts after 7 minutes. `--again` measures everything again. On a
GPU, `--ahead 12` compiles first, by running the programs with tiny sizes in 12 processes.

`--small` runs everything once with tiny sizes, to see that it works; its figures mean nothing. A page has the tables
between two lines, <!-- figures: NAME.json --> and <!-- end of figures -->; tests/test_bench_tables.py compares the two.
A file of examples/whole_model.py is written into pages in the same way. After <!-- figures: NAME.json, short -->, its
table has few columns.
"""

import argparse
import ast
import concurrent.futures
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time

import environment
import recorded
import report
import shapes
import whole_models

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent
# A process that tests beside others has a number, by which benches that it starts would take themselves for tests too.
OUTSIDE = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST_")}
PATHS = {**OUTSIDE, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
FORM = 1  # of the file; it grows when a reader of older ones would misread it
SMALL = ["--small"]
# A title, and the command below benches/ that prints such tables; what is added to it with --small. In this order they
# run, the longest first.
PROGRAMS = {
    "cpu": [
        ("What a call of one token costs the host", ["attention_cpu.py", "host"], ["--rounds", "1"]),
        ("Prompts beside torch", ["attention_cpu.py", "prompts"], ["--tokens", "8", "--keys", "64", "--rounds", "1"]),
        ("Chosen tokens", ["attention_cpu.py", "chosen"], ["--keys", "64", "--chosen", "8", "--rounds", "1"]),
        ("The same bits whatever the batch", ["attention_cpu.py", "invariant"], ["--keys", "512", "--rounds", "1"]),
        (
            "Whole models, on two threads",
            ["generate_cpu.py", "generate", "--threads", "2", "--rounds", "3"],
            ["--prompts", "8", "--tokens", "2"],
        ),
        ("A step of a whole model on the host", ["generate_cpu.py", "step"], ["--rounds", "1"]),
        ("Taichi and Quadrants", ["engines.py"], ["copy_kv, 1 token, float32"]),
    ],
    "cuda": [
        ("Whole models: 8 texts of 16,384 tokens", ["generate_gpu.py", "long"], SMALL),
        ("Whole models: a text of 4,096 tokens", ["generate_gpu.py", "short"], SMALL),
        ("Whole models: a decode step over the memory of the host", ["offloaded_gpu.py"], SMALL),
        ("Prompts", ["attention_gpu.py", "prompts"], SMALL),
        ("Decode attention", ["attention_gpu.py", "decode"], SMALL),
        ("Windows and trees", ["attention_gpu.py", "visible"], SMALL),
        ("Formats", ["attention_gpu.py", "codes"], SMALL),
        ("Formats, prompts", ["attention_gpu.py", "code_prompts"], SMALL),
        (
            "Formats, prompts in 8 bits",
            ["attention_gpu.py", "code_prompts", "--attention-bits", "8", "--formats", "int8", "float8_e4m3fn"],
            SMALL,
        ),
        ("Latent attention", ["attention_gpu.py", "latent"], SMALL),
        ("Chosen tokens", ["chosen_gpu.py", "tokens"], SMALL),
        ("Chosen pages", ["chosen_gpu.py", "quest"], SMALL),
        ("Chosen tokens, latent attention", ["chosen_gpu.py", "latent"], SMALL),
        ("Shared prefixes", ["stores_gpu.py", "prefix"], SMALL),
        ("Keys by channel", ["stores_gpu.py", "channels"], SMALL),
        ("Rotated keys", ["stores_gpu.py", "rotated"], SMALL),
        ("Compression: KVarN's tiles", ["compression_gpu.py", "tiles"], SMALL),
        ("Compression: the mass of tokens", ["compression_gpu.py", "mass"], SMALL),
        ("Compression: budgets", ["compression_gpu.py", "budget"], SMALL),
        ("Compression: blocks", ["compression_gpu.py", "rewrite"], SMALL),
        ("The same bits whatever the batch", ["invariant_gpu.py"], SMALL),
        ("The same bits whatever the batch: whole calls of transformers", ["invariant_gpu.py", "texts"], SMALL),
        ("What calls cost the host", ["host_time.py", "calls"], SMALL),
        ("What caches of transformers cost the host", ["host_time.py", "models"], SMALL),
        ("First calls", ["first_call.py"], SMALL),
        ("Whole models: the same text", ["generate_gpu.py", "exact"], SMALL),
        ("Dequantising", ["attention_gpu.py", "dequantize"], SMALL),
    ],
}
COMPILED_AHEAD = ("attention_gpu.py", "chosen_gpu.py", "stores_gpu.py", "compression_gpu.py", "invariant_gpu.py")
MARKED = re.compile(r"(<!-- figures: ([\w./-]+)(, short)? -->\n).*?(<!-- end of figures -->)", re.DOTALL)


def commands(arch: str, small: bool, words: str) -> list[tuple[str, list[str]]]:
    """Title and command of each program, then of each file of benches, by its first sentence; `words` choose."""
    found = [
        (title, [str(HERE / program[0]), *program[1:], *(tiny if small else [])])
        for title, program, tiny in PROGRAMS[arch]
    ]
    for path in sorted(HERE.rglob("bench_*.py")):
        about = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or path.stem
        title = about.partition("\n\n")[0].partition(". ")[0].removesuffix(".")
        found.append((title, ["-m", "pytest", str(path), "-q", "--arch", arch, *SMALL * small]))
    wanted = [word.strip() for word in words.split(" or ")]
    return [(title, command) for title, command in found if any(word in named(command) for word in wanted)]


def run(file: pathlib.Path, found: dict, chosen: list[tuple[str, list[str]]], seconds: float) -> None:
    """Add the tables of commands to what a file has, one after the other; what cannot run is named with the reason."""
    start, (arch,) = time.monotonic(), found["environment"]["devices"]
    places = {named(command): place for place, (_, command) in enumerate(commands(arch, found["small"], ""))}
    for number, (title, command) in enumerate(chosen):
        name, passed = named(command), time.monotonic() - start
        if passed > seconds:
            found["left_out"][name] = f"not begun after {passed / 60:.0f} minutes"
            continue
        print(f"{number + 1} of {len(chosen)}, {passed:.0f} s: {name}", file=sys.stderr, flush=True)
        tables, why = made_by(command)
        found["tables"] = [table for table in found["tables"] if table["command"] != name]
        found["left_out"].pop(name, None)
        if why:
            found["left_out"][name] = why
        for table in tables:
            made = {"title": title, "command": name, "columns": table.columns, "rows": table.rows}
            add(found, made, environment.environment([arch]))
        found["tables"].sort(key=lambda table: places.get(table["command"], len(places)))
        save(file, found)
    save(file, found)


def add(found: dict, table: dict, now: dict) -> None:
    """Add a table, with its environment if that differs from the file's by more than load and date."""
    if any(now[key] != found["environment"][key] for key in now if key not in ("load", "date")):
        table["environment"] = now
    found["tables"].append(table)


def save(file: pathlib.Path, found: dict) -> None:
    """Write the file as a whole, or not at all."""
    half = file.with_name(f"{file.name}.half")
    half.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    half.replace(file)


def begun(file: pathlib.Path, arch: str, small: bool) -> dict:
    """What a file has, or nothing but this environment.

    Raises:
        SystemExit: it is of another back end, or of other sizes.
    """
    if not file.exists():
        about = environment.environment([arch])
        return {"form": FORM, "small": small, "environment": about, "tables": [], "left_out": {}}
    found = json.loads(file.read_text(encoding="utf-8"))
    if (found["form"], found["small"], list(found["environment"]["devices"])) != (FORM, small, [arch]):
        raise SystemExit(f"tables: {file} has tables of another kind; name another file")
    return found


def made_by(command: list[str]) -> tuple[list[recorded.Table], str]:
    """The tables that a program prints, or a file of benches; and why, if there is no table."""
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder) / "bench.json"
        is_bench = "pytest" in command
        added = [f"--benchmark-json={file}"] if is_bench else []
        child = subprocess.run(
            [sys.executable, *command, *added], capture_output=True, text=True, check=False, cwd=ROOT, env=PATHS
        )
        both = (child.stdout, child.stderr) if is_bench else (child.stderr, child.stdout)
        said = next((text.strip() for text in both if text.strip()), "it said nothing")
        if child.returncode:
            return [], f"exit status {child.returncode}: {said.splitlines()[-1]}"
        if not is_bench:
            return recorded.tables_of(f"{child.stdout}\n"), ""
        if not file.exists() or not file.stat().st_size:
            reasons = re.search(r"^left out: \d+ \((.*)\)", said, re.MULTILINE)
            return [], reasons[1] if reasons else said.splitlines()[-1]
        text = "\n".join("\n".join(report.tables(rows)) for _, rows in report.load([file]))
        return recorded.tables_of(f"{text}\n"), ""


def compile_ahead(processes: int, commands: list[list[str]]) -> None:
    """Run commands on tiny sizes, which compiles their kernels: those of the sizes that are measured are the same."""
    small = []
    for command in commands:
        if pathlib.Path(command[0]).name in COMPILED_AHEAD:
            # Formats share few kernels, so a process compiles those of one.
            one_by_one = command[-1] in ("codes", "code_prompts")
            small += [[*command, "--formats", name] for name in shapes.FORMATS] if one_by_one else [command]
    print(f"compiling ahead: {len(small)} programs on tiny sizes", file=sys.stderr, flush=True)
    start = time.monotonic()
    with concurrent.futures.ThreadPoolExecutor(processes) as pool:
        for command, (_, why) in zip(small, pool.map(lambda each: made_by([*each, *SMALL]), small), strict=True):
            if why:
                print(f"{named(command)} --small: {why}", file=sys.stderr, flush=True)
    print(f"compiled in {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)


def named(command: list[str]) -> str:
    """A command as a reader would type it."""
    words = [word.removeprefix(f"{ROOT}{os.sep}") for word in command if not word.startswith("--benchmark-json")]
    return " ".join(["python", *(f'"{word}"' if " " in word else word for word in words)])


def markdown(found: dict, short: bool = False) -> str:
    """The tables as a page has them; `short`: of whole models, with few columns."""
    if "runs" in found:
        return whole_models.markdown(found, short)
    parts = [f"Measured on {environment.line(found['environment'])}."]
    above = None
    for table in found["tables"]:
        heading = f"**{table['title']}**" + (f" (`{table['command']}`)" if table["command"] else "")
        if "environment" in table:
            heading += f", measured on {environment.line(table['environment'])}"
        if heading != above:
            parts.append(heading)
        above = heading
        columns = zip(table["columns"], zip(*table["rows"], strict=True), strict=True)
        shown = [(name, "---", *cells) for name, cells in columns if any(cells)]
        parts.append("\n".join(f"| {' | '.join(cells)} |" for cells in zip(*shown, strict=True)))
    parts += [f"Left out: `{command}` ({why})." for command, why in found["left_out"].items()]
    return "\n\n".join(parts) + "\n"


def filled(text: str, name: str, found: dict) -> str:
    """A page with the tables of a file between its marks.

    Raises:
        SystemExit: the page has no such marks.
    """
    if not any(mark[2] == name for mark in MARKED.finditer(text)):
        raise SystemExit(f"tables: the page has no <!-- figures: {name} --> with <!-- end of figures --> after it")

    def fill(mark: re.Match) -> str:
        return f"{mark[1]}{markdown(found, bool(mark[3]))}{mark[4]}" if mark[2] == name else mark[0]

    return MARKED.sub(fill, text)


def stale(page: pathlib.Path) -> list[str]:
    """Files whose tables a page does not show as they are; it names files relative to its own folder."""
    text = page.read_text(encoding="utf-8")
    wrong = []
    for name in [mark[2] for mark in MARKED.finditer(text)]:
        found = json.loads((page.parent / name).read_text(encoding="utf-8"))
        if found.get("small") or filled(text, name, found) != text:
            wrong.append(name)
    return wrong


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    actions = parser.add_subparsers(dest="command", required=True)
    running = actions.add_parser("run", help="run every bench and program, and write one file")
    running.add_argument("arch", choices=sorted(PROGRAMS))
    running.add_argument("file", type=pathlib.Path)
    running.add_argument("--small", action="store_true", help="run everything once with tiny sizes, to test it")
    running.add_argument(
        "--only", default="", metavar="WORDS", help="commands with one of these words, joined by ' or '"
    )
    running.add_argument("--minutes", type=float, default=float("inf"), help="start no program after this time")
    running.add_argument("--again", action="store_true", help="also measure again what the file already has")
    running.add_argument("--ahead", type=int, default=0, metavar="N", help="compile for CUDA first, in N processes")
    writing = actions.add_parser("write", help="put the tables of a file into pages")
    writing.add_argument("file", type=pathlib.Path)
    writing.add_argument("pages", type=pathlib.Path, nargs="+", metavar="page")
    given = parser.parse_args()
    if given.command == "run":
        found = begun(given.file, given.arch, given.small)
        done = set() if given.again else {table["command"] for table in found["tables"]}
        chosen = [each for each in commands(given.arch, given.small, given.only) if named(each[1]) not in done]
        if given.ahead and given.arch == "cuda":
            compile_ahead(given.ahead, [command for _, command in chosen])
        run(given.file, found, chosen, 60 * given.minutes)
        print(markdown(found), end="")
        sys.exit(not found["tables"])
    found = json.loads(given.file.read_text(encoding="utf-8"))
    if found["form"] != FORM or found.get("small"):
        raise SystemExit(f"tables: {given.file} has small sizes or a different form; run it again")
    for page in given.pages:
        name = pathlib.Path(os.path.relpath(given.file, page.parent)).as_posix()
        page.write_text(filled(page.read_text(encoding="utf-8"), name, found), encoding="utf-8")


if __name__ == "__main__":
    main()
