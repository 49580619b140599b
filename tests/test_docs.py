"""The words are tested: every example in a docstring runs, and so does every Python block of the README."""

import ast
import doctest
import importlib
import pathlib
import re
import sys

import numpy as np
import pytest

ROOT = pathlib.Path(__file__).parent.parent
README = ROOT / "README.md"
NEEDS = {"torch_ops": ["torch"], "integrations.transformers": ["torch", "transformers"], "compat.vllm": ["torch"]}


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


@pytest.mark.archs("cpu")
def test_readme_python_blocks_run_in_order(arch, tmp_path, monkeypatch):
    found = blocks("python")
    assert found
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    namespace = {"__name__": "readme"}
    text = README.read_text(encoding="utf-8")
    for block in found:
        line = text[: text.index(block)].count("\n")
        exec(compile(ast.increment_lineno(ast.parse(block), line), str(README), "exec"), namespace)


def test_readme_has_the_two_commands():
    shell = blocks("sh")
    assert len(shell) >= 2
    assert "examples/generate.py" in shell[0]
    assert "pytest" in shell[1]
    for block in shell[:2]:
        assert "venv" in block, "each of the two makes its own virtual environment"


def test_the_readme_names_every_variant_and_every_home_of_the_layer_trait():
    from tikv.kv_layer import SEED_NAMES
    from tikv.spec import VARIANTS

    text = README.read_text(encoding="utf-8")
    table = text.partition("<!-- seed names -->")[2].partition("<!-- end of seed names -->")[0]
    rows = [line for line in table.splitlines() if line.startswith("| `")]
    homes = {name: ", ".join(f"`{home}`" for home in found) for name, found in SEED_NAMES.items()}
    assert rows == [f"| `{name}` | {found} |" for name, found in homes.items()]
    for row in VARIANTS.values():
        wanted = f"| `{row.name}` | {row.src_layout} > {row.cache_layout} | {row.tokens} | {row.src_dtype} > "
        assert wanted + row.cache_dtype in text, f"README.md has no row for {row.name}"
