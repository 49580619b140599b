"""The layers: an import goes to a lower rank, or to an earlier name of its own rank, and Taichi is imported once."""

import ast
import pathlib

import pytest

PACKAGE = pathlib.Path(__file__).parent.parent / "tikv"

# Each name is a module or a package of tikv. The outer __init__ only re-exports, and nobody inside imports it.
RANKS = [
    ["errors", "dtypes"],
    ["spec", "reference", "roofline"],
    ["runtime", "arrays", "checks"],
    ["kernels"],
    ["cuda", "launch", "moves"],
    ["ops", "variants", "quant", "pools", "plans", "qkv", "attention", "graphs"],
    ["files", "blocks", "draw", "store", "paged", "layers", "kv_layer"],
    ["torch_ops", "integrations", "compat"],
    ["timing", "doctor", "trials", "__main__"],
]
PLACE = {name: (rank, index) for rank, names in enumerate(RANKS) for index, name in enumerate(names)}


def modules() -> dict[str, pathlib.Path]:
    """Every module of the package by its dotted name."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = ["tikv", *path.relative_to(PACKAGE).with_suffix("").parts]
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(source: str, module: str, is_package: bool = False) -> list[str]:
    """The absolute name of everything a module imports, inside functions and by ``importlib`` as well."""
    found = []
    package = module.split(".") if is_package else module.split(".")[:-1]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            stem = ".".join([*base, *([node.module] if node.module else [])])
            # `from tikv import x` and `from . import x` name modules, `from tikv.x import y` names what is in one.
            found += [f"{stem}.{alias.name}" for alias in node.names] if stem == "tikv" else [stem]
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            function = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if function in ("import_module", "__import__") and isinstance(node.args[0].value, str):
                found.append(node.args[0].value)
    return found


def upward(source: str, module: str, is_package: bool = False) -> list[str]:
    """The imports of a module that its rank does not allow."""
    own = module.split(".")[1]
    wrong = []
    for name in imports(source, module, is_package):
        parts = name.split(".")
        if parts[0] != "tikv" or (len(parts) > 1 and parts[1] == own):
            continue
        if len(parts) == 1 or parts[1] not in PLACE or PLACE[parts[1]] > PLACE[own]:
            wrong.append(name)
    return wrong


def inside() -> list[str]:
    return [name for name in modules() if name != "tikv"]


def read(module: str) -> tuple[str, bool]:
    path = modules()[module]
    return path.read_text(encoding="utf-8"), path.name == "__init__.py"


@pytest.mark.parametrize("module", inside())
def test_every_module_has_a_rank(module):
    assert module.split(".")[1] in PLACE, f"{module} stands in no layer: add it to RANKS"


def test_every_rank_is_of_a_module_and_named_once():
    names = [name for rank in RANKS for name in rank]
    assert sorted(names) == sorted({name.split(".")[1] for name in inside()})


@pytest.mark.parametrize("module", inside())
def test_imports_go_downwards(module):
    source, is_package = read(module)
    assert upward(source, module, is_package) == []


def test_an_upward_import_is_found():
    assert upward("from tikv.store import KVCacheStore", "tikv.launch") == ["tikv.store"]
    assert upward("def f():\n    from tikv import store", "tikv.launch") == ["tikv.store"]
    assert upward("from . import store", "tikv.launch") == ["tikv.store"]
    assert upward("from ..ops import copy", "tikv.kernels.copy") == ["tikv.ops"]
    assert upward("import importlib; importlib.import_module('tikv.ops')", "tikv.launch") == ["tikv.ops"]
    assert upward("import tikv", "tikv.ops") == ["tikv"]
    assert upward("from tikv import dtypes", "tikv.errors") == ["tikv.dtypes"]
    assert upward("from tikv.errors import TikvError\nfrom .kernels import copy\nimport numpy", "tikv.launch") == []


@pytest.mark.parametrize("module", modules())
def test_taichi_is_imported_in_one_module(module):
    source, is_package = read(module)
    roots = {name.split(".")[0] for name in imports(source, module, is_package)}
    assert ("taichi" in roots) == (module == "tikv.runtime.engine")


@pytest.mark.parametrize("module", modules())
def test_taichi_is_started_in_one_module(module):
    calls = [
        node
        for node in ast.walk(ast.parse(read(module)[0]))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in ("init", "reset")
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id in ("ti", "taichi", "_taichi")
    ]
    assert module == "tikv.runtime.engine" or calls == []


@pytest.mark.parametrize("module", [name for name in modules() if name.startswith("tikv.kernels")])
def test_kernels_keep_their_annotations(module):
    assert "__future__" not in imports(read(module)[0], module), "Taichi reads annotations as objects, not as text"


@pytest.mark.parametrize("module", ["tikv.reference", "tikv.roofline", "tikv.spec"])
def test_the_oracle_needs_no_device(module):
    source, is_package = read(module)
    assert {"tikv.runtime", "tikv.kernels", "torch"}.isdisjoint(imports(source, module, is_package))


@pytest.mark.parametrize("module", ["tikv.ops", "tikv.checks", "tikv.store"])
def test_arguments_are_not_checked_by_assert(module):
    asserts = [node.lineno for node in ast.walk(ast.parse(read(module)[0])) if isinstance(node, ast.Assert)]
    assert asserts == [], "python -O removes them"


def test_no_module_is_a_drawer():
    assert {"utils", "helpers", "common", "misc"}.isdisjoint(name.split(".")[-1] for name in modules())
