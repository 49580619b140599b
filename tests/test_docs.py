"""The words are tested: docstrings' examples and the pages' blocks run, and print what the pages say they print."""

import ast
import contextlib
import doctest
import importlib
import inspect
import io
import json
import os
import pathlib
import platform
import re
import subprocess
import sys

import numpy as np
import pytest

ROOT = pathlib.Path(__file__).parent.parent
README = ROOT / "README.md"
PAGES = {path.relative_to(ROOT).as_posix(): path for path in (README, *sorted((ROOT / "docs").rglob("*.md")))}
NEEDS = {
    "integrations.torch_ops": ["torch"],
    "integrations.transformers": ["torch", "transformers"],
    "compat.vllm": ["torch"],
}


def documented() -> list[str]:
    """The modules with examples in their docstrings; kernels are compiled by Taichi, not run by Python."""
    names = []
    for path in sorted((ROOT / "tikv").rglob("*.py")):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        if ">>>" in path.read_text(encoding="utf-8") and not name.startswith("tikv.kernels"):
            names.append(name)
    return names


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


@pytest.mark.thorough
@pytest.mark.archs("cpu")
@pytest.mark.parametrize("name", documented())
def test_docstring_examples(name, arch):
    import tikv

    for needed in NEEDS.get(name.removeprefix("tikv."), []):
        pytest.importorskip(needed)
    module = importlib.import_module(name)
    flags = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS
    runner = doctest.DocTestRunner(optionflags=flags)
    report: list[str] = []
    for test in doctest.DocTestFinder(exclude_empty=True).find(module, extraglobs={"np": np, "tikv": tikv}):
        runner.run(test, out=report.append)
    assert runner.summarize(verbose=False).failed == 0, "".join(report)
    assert runner.summarize(verbose=False).attempted > 0


def test_every_public_name_has_a_docstring():
    import tikv

    for name in tikv.__all__:
        assert getattr(tikv, name).__doc__ or not callable(getattr(tikv, name)), f"tikv.{name} has no docstring"


BLOCK = re.compile(r"^```python\n(.*?)^```\n(?:\n```text\n(.*?)^```)?", re.DOTALL | re.MULTILINE)


@pytest.mark.thorough
@pytest.mark.archs("cpu")
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("page", [name for name, path in PAGES.items() if "```python" in path.read_text("utf-8")])
def test_blocks_of_a_page_run_in_order_and_print_what_follows_them(page, arch, tmp_path, monkeypatch):
    text = PAGES[page].read_text(encoding="utf-8")
    for needed in ("torch", "transformers"):
        if f"import {needed}" in text:
            pytest.importorskip(needed)
    found = list(BLOCK.finditer(text))
    assert len(found) == text.count("```python\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    namespace = {"__name__": "page"}
    for block in found:
        line = text[: block.start(1)].count("\n")
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(ast.increment_lineno(ast.parse(block[1]), line), page, "exec"), namespace)
        assert printed.getvalue() == (block[2] or ""), f"{page}, line {line + 1}"


@pytest.mark.filterwarnings("default")
@pytest.mark.archs("cpu")
def test_readme_block_for_transformers_runs(arch, monkeypatch):
    pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    monkeypatch.syspath_prepend(ROOT / "examples")
    model = importlib.import_module("hf_generate").tiny_model().eval()
    (block,) = blocks("py")
    seen = {}

    def generate(**given):
        seen["text"] = transformers.GenerationMixin.generate(model, max_new_tokens=3, do_sample=False, **given)

    monkeypatch.setattr(model, "generate", generate)
    import torch

    exec(compile(block, str(README), "exec"), {"model": model, "inputs": {"input_ids": torch.tensor([[1, 2, 3]])}})
    assert seen["text"].shape == (1, 6)


def output(name: str) -> list[str]:
    """The lines that a page shows as printed by a command."""
    pattern = re.compile(rf"^<!-- output: {name} -->\n```text\n(.*?)^```", re.DOTALL | re.MULTILINE)
    found = [match[1] for path in PAGES.values() for match in pattern.finditer(path.read_text(encoding="utf-8"))]
    assert len(found) == 1, f"{len(found)} pages show what tikv {name} prints"
    return found[0].splitlines()


def columns(lines: list[str]) -> list[list[str]]:
    """The cells of a plain table, by the rule below its header."""
    rule = next(i for i, line in enumerate(lines) if set(line) == {"-", " "})
    ends = [match.span() for match in re.finditer("-+", lines[rule])]
    rows = [line for line in lines[rule - 1 :] if line is not lines[rule]]
    return [[line[start:end].strip() for start, end in ends] for line in rows]


EXECUTE = """
import json, sys
import nbclient, nbformat

notebook = nbformat.read(sys.argv[1], as_version=4)
notebook.cells.insert(0, nbformat.v4.new_code_cell("import tikv\\ntikv.init(arch='cpu');"))
nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3").execute()
print(json.dumps([cell.get("outputs", []) for cell in notebook.cells]))
"""


@pytest.mark.thorough
@pytest.mark.archs("cpu")
@pytest.mark.parametrize("name", sorted(path.name for path in (ROOT / "docs" / "tutorials").glob("*.ipynb")))
def test_a_notebook_runs_and_shows_what_it_was_saved_with(name, arch):
    """In a kernel, as a reader runs it: so nothing of the engine may be in what a cell shows."""
    for needed in ("nbclient", "ipykernel"):
        pytest.importorskip(needed)
    path = ROOT / "docs" / "tutorials" / name
    child = subprocess.run(
        [sys.executable, "-c", EXECUTE, str(path)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TIKV_QUIET": "1"},  # a slow machine is told what it compiles
    )
    assert child.returncode == 0, child.stderr
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    for cell, outputs in zip([{"id": "tikv.init"}, *cells], json.loads(child.stdout), strict=True):
        saved = [seen_by_a_reader(output) for output in cell.get("outputs", [])]
        found = [seen_by_a_reader(output) for output in outputs]
        assert found == saved, f"{name}, {cell['id']}; jupyter execute --inplace saves it anew"


def seen_by_a_reader(output: dict) -> tuple[str, ...]:
    """A stream's name and text, or a picture with its text; Jupyter keeps a text as a string or a list of lines."""
    if output["output_type"] == "stream":
        return output["name"], "".join(output["text"])
    return tuple("".join(output["data"].get(kind, "")) for kind in ("text/plain", "text/html"))


def run(*arguments: str) -> list[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    environment.pop("COLUMNS", None)  # a table would keep to it
    child = subprocess.run(
        [sys.executable, "-m", "tikv", *arguments],
        capture_output=True,
        text=True,
        check=True,
        env=environment,
    )
    return child.stdout.splitlines()


def test_the_manual_shows_what_commands_print():
    """Word for word where no machine is in it; else the same rows and columns."""
    from tikv import runtime
    from tikv.tools import bench, doctor, support

    assert output("variants") == run("variants")
    shown, printed = columns(output("info")), columns(run("info"))
    assert [row[0] for row in shown] == [row[0] for row in printed]
    printed = output("doctor")
    shown = columns(printed[: 3 + len(runtime.ARCHS)])
    assert shown[0] == ["arch", "status", "first calls", "in a later process"]
    assert [row[0].removesuffix(" *") for row in shown[1:]] == list(runtime.ARCHS)
    told = " ".join(line.strip() for line in printed)
    for arch, status, first, later in shown[1:]:
        assert status in ("PASS", "absent")
        assert bool(first) == bool(later) == (status == "PASS")
        assert (doctor.REMEDIES[arch.removesuffix(" *")] in told) == (status == "absent")
    assert "where the time of first calls goes" in printed
    assert [title for title in doctor.PARTS.values() if f"cpu     {title}" in "\n".join(printed)]
    assert max(map(len, printed)) <= 80
    *table, legend = output("support")
    assert legend.startswith("not offered: ")
    shown = columns(table)
    assert shown[0] == ["operation", *support.DTYPES]
    assert [row[0] for row in shown[1:]] == list(support.OPERATIONS)
    assert {cell for row in shown[1:] for cell in row[1:]} == {"tested", "not offered", ""}
    *table, machine = output("bench")
    shown = columns(table)
    assert shown[0][:2] == ["case", "tikv us"]
    assert shown[0][-3:] == ["memcpy us", "tikv GB/s", "of memcpy"]
    assert [row[0] for row in shown[1:]] == list(bench.CASES)
    assert "cpu" in machine


def test_every_command_that_is_named_is_one():
    from tikv import __main__ as cli

    text = "\n".join(path.read_text(encoding="utf-8") for path in PAGES.values())
    named = set(re.findall(r"(?:^|`)(?:python -m )?tikv ([a-z]+)", text, re.MULTILINE))
    assert named >= {"info", "doctor", "variants", "support", "bench"}
    for name in named:
        with contextlib.redirect_stdout(io.StringIO()), pytest.raises(SystemExit) as stopped:
            cli.main([name, "--help"])
        assert stopped.value.code == 0


@pytest.mark.parametrize("page", PAGES)
def test_what_a_page_refers_to_exists(page):
    text = re.sub(r"<!-- performance picture.*?-->", "", PAGES[page].read_text(encoding="utf-8"), flags=re.DOTALL)
    linked = {link for link in links(text) if "://" not in link}
    quoted = set(re.findall(r"`((?:examples|benches|tests|docs|\.ci)/[\w./-]+)`", text))
    assert [name for name in sorted(linked) if not (PAGES[page].parent / name).exists()] == []
    assert [name for name in sorted(quoted) if not (ROOT / name).exists()] == []


def links(text: str) -> list[str]:
    text = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    return re.findall(r"\]\(([^)#]+)[^)]*\)", text) + re.findall(r"(?:src|srcset)=\"([^\"]+)\"", text)


def test_every_picture_and_page_is_shown():
    shown = {(path.parent / link).resolve() for path in PAGES.values() for link in links(path.read_text("utf-8"))}
    pictures = {path.resolve() for path in (ROOT / "docs").glob("*.svg")}
    assert pictures <= shown
    assert [name for name, path in PAGES.items() if not path.read_text("utf-8").startswith("# ")] == []
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    pages = {name.removeprefix("docs/") for name in PAGES if name != "README.md"}
    notebooks = (ROOT / "docs").rglob("*.ipynb")  # docs/notebooks.py makes a page of each
    pages |= {path.relative_to(ROOT / "docs").with_suffix(".md").as_posix() for path in notebooks}
    assert {page for page in pages if f": {page}\n" not in navigation} == set()


def test_the_picture_of_the_h200_has_the_figures_of_the_tables():
    """Every figure and word at its bars, in order; matplotlib writes a text as a comment above its outlines."""
    recorded = importlib.import_module("recorded")
    drawn_panels, lines = recorded.panels()
    for theme in ("light", "dark"):
        comments = re.findall(
            "<!-- (.*?) -->", pathlib.Path(f"{recorded.STEM}-{theme}.svg").read_text(encoding="utf-8")
        )
        drawn = [text for text in comments if text.startswith(" ")]
        assert drawn == recorded.labels(drawn_panels), (
            "python benches/report.py --h200 draws it from the tables as they are"
        )
        assert set(lines) <= set(comments)


def test_the_picture_of_the_h200_is_what_the_command_draws(tmp_path):
    matplotlib = pytest.importorskip("matplotlib")
    kept = {
        theme: (ROOT / f"docs/performance-h200-{theme}.svg").read_text(encoding="utf-8") for theme in ("light", "dark")
    }
    if f"Matplotlib v{matplotlib.__version__}," not in kept["light"] or platform.machine() != "x86_64":
        pytest.skip("another matplotlib or another machine places outlines otherwise by a hair")
    command = [sys.executable, str(ROOT / "benches" / "report.py"), "--h200", "--svg", str(tmp_path / "picture")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    child = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert child.returncode == 0, child.stderr
    for theme, text in kept.items():
        drawn = (tmp_path / f"picture-{theme}.svg").read_text(encoding="utf-8")
        assert drawn == text, "python benches/report.py --h200 draws it anew"


def test_a_figure_of_a_table_is_found_by_names_or_missed_by_name():
    recorded = importlib.import_module("recorded")
    assert recorded.figure("0.76 / 0.68 (0.5 / 0.4 before)", 1) == 0.68
    assert recorded.figure("0.79 / ", 1) is None
    assert recorded.figure("two `index_copy_` 14.4 / 14.9", 1, "`index_copy_`") == 14.9
    assert recorded.figure("1,234.5 to 2,000 us") == 1234.5
    with pytest.raises(SystemExit, match="no figure number 3"):
        recorded.figure("1 / 2", 2)
    table = recorded.tables_of("| a | b |\n| --- | --- |\n| `x`, 1 | 2 |\n| the same, y | 3 |\n| z | 4 |\n")[0]
    assert table.row("x, 1", "the same, y") == {"a": "the same, y", "b": "3"}
    for names in (["w"], ["z", "the same"]):
        with pytest.raises(SystemExit, match="0 times a row"):
            table.row(*names)


def test_the_readme_is_one_that_is_read_to_its_end():
    assert len(README.read_text(encoding="utf-8").splitlines()) <= 200


def test_the_manual_names_every_public_operation_extra_and_error():
    import tikv

    operations = PAGES["docs/operations.md"].read_text(encoding="utf-8")
    errors = PAGES["docs/errors.md"].read_text(encoding="utf-8")
    index = PAGES["docs/api.md"].read_text(encoding="utf-8")
    described = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "docs" / "api").glob("*.md"))
    apart = {"__version__", "init", "info", "CacheArray", "KVCacheAppendDescriptor", "KVCacheAppendArgs"}
    apart |= {"Quantized", "QuantizedTiles"}
    for name in tikv.__all__:
        found = getattr(tikv, name)
        if inspect.ismodule(found) or name == "__version__":
            continue
        assert f"[`{name}`][tikv.{name}]" in index, f"docs/api.md does not list {name}"
        assert f"::: tikv.{name}\n" in described, f"no page in docs/api describes {name}"
        if name not in apart:
            where = errors if isinstance(found, type) and issubclass(found, Exception) else operations
            assert re.search(rf"`(tikv\.)?{name}`", where), f"the manual does not name {name} where it belongs"
    text = README.read_text(encoding="utf-8")
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    extras = re.findall(
        r"^(\w+) = \[", project.partition("optional-dependencies]")[2].partition("\n[")[0], re.MULTILINE
    )
    for extra in extras:
        assert f"`{extra}`" in text or f"[{extra}]" in text, f"README.md does not name the extra {extra}"
    assert f"version = {{{tikv.__version__}}}" in text


def test_readme_has_the_two_commands():
    shell = blocks("sh")
    assert len(shell) >= 2
    assert "examples/generate.py" in shell[0]
    assert "pytest" in shell[1]
    for block in shell[:2]:
        assert "venv" in block, "each of the two makes its own virtual environment"
    contributing = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    assert f"```sh\n{shell[-1]}```" in contributing


def test_the_manual_names_every_home_of_the_layer_trait():
    from tikv.compat.seeds import layers

    text = PAGES["docs/names.md"].read_text(encoding="utf-8")
    table = text.partition("<!-- seed names -->")[2].partition("<!-- end of seed names -->")[0]
    rows = [line for line in table.splitlines() if line.startswith("| `")]
    homes = {name: ", ".join(f"`{home}`" for home in found) for name, found in layers.SEED_NAMES.items()}
    assert rows == [f"| `{name}` | {found} |" for name, found in homes.items()]
