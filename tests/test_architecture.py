"""The house: an import goes to a lower floor, never round in a circle, and one module knows the engines apart."""

import ast
import functools
import pathlib
import re

import pytest

pytestmark = pytest.mark.thorough

PACKAGE = pathlib.Path(__file__).parent.parent / "tikv"

# From the ground up. A name is a module or a folder of tikv; those of one line do not import each other.
# The outer __init__ only lists public names, and nobody inside imports it.
FLOORS = [
    ["errors"],
    ["extras"],
    ["engines"],
    ["dtypes"],
    ["formats", "forks", "opaque", "reference"],
    ["runtime"],
    ["arrays"],
    ["kernels"],
    ["launch"],
    ["ops"],
    ["graphs"],
    ["stores"],
    ["compat", "distributed", "integrations"],
    ["tools"],
    ["__main__"],
]
FLOOR = {name: number for number, names in enumerate(FLOORS) for name in names}
# What transformers gets is as large as the rest of `integrations`, and has floors of its own.
WITHIN = "tikv.integrations.transformers"
FLOORS_WITHIN = [
    ["names"],
    ["versions"],
    ["memory"],
    ["attention"],
    ["batching", "layers"],
    ["cache", "registration"],
    ["loop"],
]
FLOOR_WITHIN = {name: number for number, names in enumerate(FLOORS_WITHIN) for name in names}
TOP = (
    "__init__",
    "__main__",
    "dtypes",
    "engines",
    "errors",
    "extras",
    "formats",
    "forks",
    "opaque",
    "reference",
)  # modules that lie directly in tikv/
MOST_LINES = 145  # of a function, without docstrings
MOST_DOCSTRING_LINES = 50  # one screen: rules beyond what a caller has to know at once are in the manual
MOST_PARAMETERS = 10  # of what is neither public nor a kernel


@functools.cache
def modules() -> dict[str, pathlib.Path]:
    """Every module of the package by its dotted name."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = ["tikv", *path.relative_to(PACKAGE).with_suffix("").parts]
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@functools.cache
def tree_of(module: str) -> ast.Module:
    """A module, parsed once for all tests."""
    return ast.parse(modules()[module].read_text(encoding="utf-8"))


@functools.cache
def imports_of(module: str, typed: bool = True) -> tuple[str, ...]:
    """What a module imports; `typed`: also what it imports for type checkers alone."""
    tree = tree_of(module)
    if not typed:
        tree = WithoutTypeChecking().visit(ast.parse(ast.unparse(tree)))
    return tuple(imports(tree, module, modules()[module].name == "__init__.py"))


class WithoutTypeChecking(ast.NodeTransformer):
    def visit_If(self, node: ast.If) -> ast.AST | None:
        return None if isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING" else node


def imports(tree: ast.Module, module: str, is_package: bool = False) -> list[str]:
    """The absolute name of everything a module imports, inside functions and by ``importlib`` as well."""
    found = []
    package = module.split(".") if is_package else module.split(".")[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            stem = ".".join([*base, *([node.module] if node.module else [])])
            found += [f"{stem}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            function = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if function in ("import_module", "__import__") and isinstance(node.args[0].value, str):
                found.append(node.args[0].value)
    return found


def upward(names: list[str], module: str, package: str = "tikv", floor: dict[str, int] = FLOOR) -> list[str]:
    """Those of these imports of a module that its floor within a package does not allow."""
    folder = part_of(module, package)
    wrong = []
    for name in names:
        other = part_of(name, package)
        if other is None or other == folder:
            continue
        if other not in floor or floor[other] >= floor[folder]:
            wrong.append(name)
    return wrong


def part_of(name: str, package: str) -> str | None:
    """The module or folder of a package in which something is; empty for the package itself, None for another one."""
    if name != package and not name.startswith(f"{package}."):
        return None
    return name.removeprefix(package).removeprefix(".").split(".")[0]


def needed_modules(module: str) -> set[str]:
    """The modules of tikv that a module needs, whether named themselves or by what is in them.

    What type checkers alone need counts too, but in `stores/`.
    """
    found = set()
    for name in imports_of(module, typed=not module.startswith("tikv.stores.")):
        while name and name not in modules():
            name = name.rpartition(".")[0]
        if name not in ("", "tikv", module):
            found.add(name)
    return found


def inside() -> list[str]:
    return [name for name in modules() if name != "tikv"]


def test_every_module_lies_on_a_floor():
    homeless = [module for module in inside() if module.split(".")[1] not in FLOOR]
    assert homeless == [], "add its folder to FLOORS"
    assert sorted(FLOOR) == sorted({name.split(".")[1] for name in inside()})


def test_every_folder_is_a_package():
    """Python imports from one that is none as well; tools that read sources, and the manual's, do not."""
    assert [path.parent for path in PACKAGE.rglob("*.py") if not (path.parent / "__init__.py").exists()] == []


@pytest.mark.parametrize("module", inside())
def test_imports_go_downwards(module):
    assert upward(list(imports_of(module)), module) == []


def test_imports_go_downwards_within_transformers():
    folders = {module: part_of(module, WITHIN) for module in modules() if module.startswith(f"{WITHIN}.")}
    assert sorted(FLOOR_WITHIN) == sorted(set(folders.values())), "add its folder to FLOORS_WITHIN"
    wrong = {module: upward(list(imports_of(module)), module, WITHIN, FLOOR_WITHIN) for module in folders}
    assert {module: names for module, names in wrong.items() if names} == {}
    source = f"from {WITHIN}.cache import files\nfrom {WITHIN}.names import CACHE\nfrom {WITHIN} import TikvCache"
    above = [f"{WITHIN}.cache.files", f"{WITHIN}.TikvCache"]
    assert (
        upward(imports(ast.parse(source), f"{WITHIN}.layers.ring"), f"{WITHIN}.layers.ring", WITHIN, FLOOR_WITHIN)
        == above
    )


def test_no_imports_go_round_in_a_circle():
    below: dict[str, int] = {}  # modules seen to the end

    def visit(module: str, way: tuple[str, ...]) -> None:
        assert module not in way, " -> ".join([*way[way.index(module) :], module])
        if module not in below:
            for other in sorted(needed_modules(module)):
                # A package's __init__ is its front door: what stands behind it may come in by it from elsewhere only.
                if not module.startswith(f"{other}."):
                    visit(other, (*way, module))
            below[module] = len(way)

    for module in inside():
        visit(module, ())


def found_upward(source: str, module: str) -> list[str]:
    return upward(imports(ast.parse(source), module), module)


def test_an_upward_import_is_found():
    assert found_upward("from tikv.stores import store", "tikv.launch.bound") == ["tikv.stores.store"]
    assert found_upward("def f():\n    from tikv import stores", "tikv.launch.bound") == ["tikv.stores"]
    assert found_upward("from .. import stores", "tikv.launch.bound") == ["tikv.stores"]
    assert found_upward("from ..ops import copy", "tikv.kernels.copy") == ["tikv.ops.copy"]
    assert found_upward("import importlib; importlib.import_module('tikv.ops')", "tikv.launch.bound") == ["tikv.ops"]
    assert found_upward("import tikv", "tikv.ops.copy") == ["tikv"]
    assert found_upward("from tikv import dtypes", "tikv.errors") == ["tikv.dtypes"]
    assert found_upward("from tikv.integrations import torch_ops", "tikv.compat.vllm") == [
        "tikv.integrations.torch_ops"
    ]
    below = "from tikv.errors import TikvError\nfrom .kernels import copy\nfrom tikv import runtime\nimport numpy"
    assert found_upward(below, "tikv.launch.bound") == []


def test_an_engine_is_started_in_one_module():
    for module in modules():
        calls = [
            node
            for node in ast.walk(tree_of(module))
            if isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in ("init", "reset")
            and isinstance(node.func.value, ast.Name)
            and node.func.value.id in ("ti", "qd", "taichi", "quadrants")
        ]
        assert module.startswith("tikv.runtime") or calls == [], module


@pytest.mark.parametrize("module", [name for name in modules() if name.startswith("tikv.kernels")])
def test_kernels_keep_their_annotations(module):
    names = [name.split(".")[0] for name in imports_of(module)]
    assert "__future__" not in names, "Taichi reads annotations as objects, not as text"


@pytest.mark.parametrize("module", ["tikv.reference", "tikv.tools.roofline", "tikv.compat.seeds.spec"])
def test_the_oracle_needs_no_device(module):
    assert not any(name.startswith(("tikv.runtime", "tikv.kernels", "torch")) for name in imports_of(module))


@pytest.mark.parametrize("module", ["tikv.ops.copy", "tikv.ops.checks", "tikv.stores.store"])
def test_arguments_are_not_checked_by_assert(module):
    asserts = [node.lineno for node in ast.walk(tree_of(module)) if isinstance(node, ast.Assert)]
    assert asserts == [], "python -O removes them"


def test_no_module_is_a_drawer():
    drawers = {"utils", "helpers", "common", "misc"}
    assert drawers.isdisjoint(name.split(".")[-1] for name in modules())


def test_few_modules_lie_at_the_top():
    assert {path.stem for path in PACKAGE.glob("*.py")} == set(TOP)


# What an engine has inside under a name that another has otherwise, and how one would ask which engine it is.
APART = [
    "_ti_core", "_qd_core", "arg_metas", "compiled_kernels", "materialized_kernels", "compiled_kernel_data",
    "get_pos_info", "FuncContext", "reduce_add", "reduce_all", r"_prog\b", "HEADER_PRINT", "OFFLINE_CACHE",
    r"(taichi|quadrants)\.lang", r"engines?\.(TAICHI|QUADRANTS)\b", r"engine\.(name|title) *(==|!=)",
    r"(==|!=|\bis|\bin) *\(?[\"']quadrants",
]  # fmt: skip


def test_one_module_knows_the_engines_apart():
    """By name none is imported; `runtime.engine` alone imports the one that was chosen."""
    found = [name for name in modules() if {"taichi", "quadrants"} & {i.split(".")[0] for i in imports_of(name)}]
    assert found == []
    for module, path in modules().items():
        code = ast.unparse(WithoutText().visit(ast.parse(path.read_text(encoding="utf-8"))))
        told = [each for each in APART if re.search(each, code)]
        assert bool(told) == (module == "tikv.engines"), (module, told)


class WithoutText(ast.NodeTransformer):
    """Drops docstrings."""

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        return ast.Pass() if isinstance(node.value, ast.Constant) else node


def test_kernels_are_imported_by_import_statements():
    """Where a type checker and an editor see them."""
    for module in inside():
        text = modules()[module].read_text(encoding="utf-8")
        assert not re.search(r"import_module\(f?[\"']tikv", text), module


def lines_of_docstrings(tree: ast.AST) -> int:
    """Lines of a piece of code that are docstrings: of a store's public calls more than half."""
    found = 0
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            found += node.body[0].end_lineno - node.body[0].lineno + 1
    return found


def test_functions_are_of_a_readable_size():
    large = []
    for module in modules():
        for name, node in functions(tree_of(module)):
            if (lines := node.end_lineno - node.lineno + 1 - lines_of_docstrings(node)) > MOST_LINES:
                large.append(f"{module}.{name}: {lines} lines")
    assert large == []


def long_docstrings(tree: ast.AST, module: str) -> list[str]:
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef
    nodes = [node for node in ast.walk(tree) if isinstance(node, kinds)]
    lengths = [(getattr(node, "name", "itself"), len((ast.get_docstring(node) or "").splitlines())) for node in nodes]
    return [f"{module}, {name}: {lines} lines" for name, lines in lengths if lines > MOST_DOCSTRING_LINES]


def test_docstrings_are_one_screen():
    assert [text for module in modules() for text in long_docstrings(tree_of(module), module)] == []


def unexplained(tree: ast.AST) -> list[str]:
    """The classes whose docstring is missing, or too short to say anything."""
    classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    return [node.name for node in classes if len((ast.get_docstring(node) or "").split()) < 5]


def test_every_class_is_explained():
    apart = ("tikv.kernels.", "tikv.integrations.transformers.")
    classes = {module: unexplained(tree_of(module)) for module in modules() if not module.startswith(apart)}
    assert {module: names for module, names in classes.items() if names} == {}
    source = 'class A:\n    """Keys of a layer, on the host."""\nclass B: ...\nclass C:\n    """Prompts."""'
    assert unexplained(ast.parse(source)) == ["B", "C"]


DOTTED = re.compile(r"`((?:kernels|ops|launch|stores|runtime|arrays|graphs|compat|distributed|tools)(?:\.\w+)+)`")


def homeless(name: str) -> bool:
    """Whether a dotted name, such as `ops.plan.Plan`, is neither a module nor something that a module has."""
    parts = ["tikv", *name.split(".")]
    end = next(i for i in range(len(parts), 0, -1) if ".".join(parts[:i]) in modules())
    text = modules()[".".join(parts[:end])].read_text(encoding="utf-8")
    return any(not re.search(rf"\b{part}\b", text) for part in parts[end : end + 1])


def test_every_module_that_is_named_is_there():
    texts = {module: path.read_text(encoding="utf-8") for module, path in modules().items()}
    named = {module: set(DOTTED.findall(text)) - {"kernels.json"} for module, text in texts.items()}
    assert sum(map(len, named.values())) > 20
    assert {module: wrong for module, names in named.items() if (wrong := [n for n in names if homeless(n)])} == {}
    assert homeless("kernels.fused.Change")
    assert not homeless("ops.plan.Plan")


def test_a_long_docstring_is_found():
    text = "\n".join(["a"] * (MOST_DOCSTRING_LINES + 1))
    for source in (f'"""{text}"""', f'class f:\n    """{text}"""', f'class g:\n    def f(x):\n        """{text}"""'):
        assert len(long_docstrings(ast.parse(source), "here")) == 1
    assert long_docstrings(ast.parse(f'"""{text[2:]}"""'), "here") == []


def functions(tree: ast.AST, within: str = "") -> list[tuple[str, ast.FunctionDef]]:
    """The functions of a module and of its classes with their names, such as `Plan.run`, and those within them."""
    found = []
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            name = f"{within}{node.name}"
            found += [(name, node)] if isinstance(node, ast.FunctionDef) else []
            found += functions(node, f"{name}.")
        else:
            found += functions(node, within)
    return found


def is_public(module: str, name: str, node: ast.FunctionDef) -> bool:
    """Whether users call a function: by `tikv`, by a module of peers' names, or as an operator of torch's."""
    import tikv

    if any("custom_op" in ast.unparse(decorator) for decorator in node.decorator_list):
        return True  # torch takes its arguments one by one
    owner, *inner = name.replace(".__init__", "").split(".")
    folder, *rest = module.split(".")[1:]
    named = not any(part.startswith("_") for part in (*rest, owner, *inner))
    return named and (folder in ("compat", "distributed", "integrations") or owner in dir(tikv))


ARRAYS = {
    "q", "k", "v", "qkv", "k_cache", "v_cache", "k_pool", "v_pool", "out", "seq_lens", "block_tables", "context_lens",
    "slot_mapping", "positions", "sink_logits", "alibi_slopes", "mask", "parents", "indices", "keep", "index",
}  # fmt: skip


def of_any_type(node: ast.FunctionDef) -> list[str]:
    """The parameters that are arrays by their names, but not by their annotations."""
    arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    untyped = ("Any", "Any | None")
    return [a.arg for a in arguments if a.arg in ARRAYS and a.annotation and ast.unparse(a.annotation) in untyped]


def test_arrays_are_annotated_as_arrays():
    """By `tikv.arrays.Array`; classes of transformers pass tensors, and the reference imports nothing of tikv."""
    apart = re.compile(r"transformers|reference")
    wrong = {
        f"{module}.{name}": names
        for module in inside()
        for name, node in functions(tree_of(module))
        if is_public(module, name, node) and not apart.search(module) and (names := of_any_type(node))
    }
    assert wrong == {}
    source = "def f(q: Any, k: Array, out: Any | None = None, dtype: Any = None): ..."
    assert of_any_type(ast.parse(source).body[0]) == ["q", "out"]


def parameters(node: ast.FunctionDef) -> int:
    names = [a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
    return len(names) - (names[:1] in (["self"], ["cls"]))


def with_many_parameters(tree: ast.Module, module: str) -> list[str]:
    return [
        f"{module}.{name}"
        for name, node in functions(tree)
        if parameters(node) > MOST_PARAMETERS and not is_public(module, name, node)
    ]


def test_functions_inside_have_few_parameters():
    """What travels together is one object: a request, the results, the caches. Users get keywords."""
    for module in inside():
        if not module.startswith("tikv.kernels"):
            assert with_many_parameters(tree_of(module), module) == []


def test_many_parameters_are_found():
    given = ", ".join(f"a{i}" for i in range(MOST_PARAMETERS + 1))
    tree = ast.parse(
        f"def f({given}): pass\nclass C:\n    def g(self, {given[4:]}): pass\n    def h(self, *, {given}): pass"
    )
    assert with_many_parameters(tree, "tikv.ops.plan") == ["tikv.ops.plan.f", "tikv.ops.plan.C.h"]
    assert with_many_parameters(tree, "tikv.compat._inside") == ["tikv.compat._inside.f", "tikv.compat._inside.C.h"]
    assert with_many_parameters(tree, "tikv.compat.vllm") == []
    copy = ast.parse(f"def copy({given}): pass")
    assert with_many_parameters(copy, "tikv.ops.copy") == []


def test_a_class_has_its_name_alone():
    """But in kernels, where two ways to do one thing have the same parts, and in the oracle."""
    apart = ("tikv.kernels", "tikv.reference")
    found = [
        (node.name, module)
        for module in inside()
        if not module.startswith(apart)
        for node in ast.walk(tree_of(module))
        if isinstance(node, ast.ClassDef)
    ]
    names = [name for name, _ in found]
    assert [(name, module) for name, module in found if names.count(name) > 1] == []


STORES = {"KVCacheStore": "tikv.stores.store", "PagedKVCacheStore": "tikv.stores.pool"}


def class_of(module: str, name: str) -> ast.ClassDef:
    return next(node for node in tree_of(module).body if isinstance(node, ast.ClassDef) and node.name == name)


def test_nothing_inherits_from_a_store():
    """What stores tokens otherwise is a `LayerStorage`, which a store has."""
    for module in modules():
        for node in ast.walk(tree_of(module)):
            if isinstance(node, ast.ClassDef):
                assert not STORES.keys() & {ast.unparse(base).split(".")[-1] for base in node.bases}, (
                    module,
                    node.name,
                )


@pytest.mark.parametrize("name", STORES)
def test_the_public_methods_of_a_store_are_in_one_file(name):
    import tikv

    own = {node.name for node in class_of(STORES[name], name).body if isinstance(node, ast.FunctionDef)}
    public = {each for each in dir(getattr(tikv, name)) if not each.startswith("_")}
    assert public - own == {"instead"}  # which words copying is refused with


def test_types_are_not_asserted_in_stores():
    """Where a type has to be asserted, one class stands for two."""
    for module in modules():
        if module.startswith("tikv.stores"):
            asserts = [node for node in ast.walk(tree_of(module)) if isinstance(node, ast.Assert)]
            assert not [node for node in asserts if "isinstance" in ast.unparse(node)], module


ROOT = PACKAGE.parent
FOLDERS = (".ci", ".github", "benches", "docs", "examples", "tests", "tikv")
KINDS = {".cfg", ".cpp", ".ll", ".md", ".py", ".pyi", ".sh", ".toml", ".yaml", ".yml"}
# From the root of the repository; not what a command is told to write, nor what a reader is to name.
NAMED = re.compile(rf"(?<![\w/.:-])(?<!--write )((?:{'|'.join(map(re.escape, FOLDERS))})/[\w./-]*\w)")


def own_files() -> list[pathlib.Path]:
    found = [path for path in ROOT.iterdir() if path.is_file() and path.suffix in KINDS]
    for folder in FOLDERS:
        found += [p for p in (ROOT / folder).rglob("*") if p.is_file() and (p.suffix in KINDS or folder == ".ci")]
    return [path for path in found if "__pycache__" not in path.parts]


def missing_paths(text: str) -> list[str]:
    """The paths that a text names and that are not there; of several files the start of their names will do."""
    named = [name for name in NAMED.findall(text) if "NAME" not in name]
    return [name for name in named if not (ROOT / name).exists() and not list(ROOT.glob(f"{name}*"))]


def test_a_path_that_is_not_there_is_found():
    assert missing_paths("see benches/bench_attention.py, and docs/performance, docs/performance.md") == [
        "benches/bench_attention.py"
    ]
    assert missing_paths("tikv/ops/NAME.py of https://example.org/docs/no.md: --write docs/none.md") == []


def test_every_path_that_is_named_is_there():
    """In comments, docstrings, pages and scripts: files move, and what names them is not run."""
    files = own_files()
    assert len(files) > 300
    wrong = {path.relative_to(ROOT).as_posix(): missing_paths(path.read_text(encoding="utf-8")) for path in files}
    del wrong["tests/test_architecture.py"]
    assert {path: names for path, names in wrong.items() if names} == {}


GUIDE = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


def missing_names(text: str) -> list[str]:
    """The files and folders in backquotes that exist nowhere, also not under the folder that a sentence speaks of."""
    named = re.findall(r"`([\w.-]*(?:/[\w.-]+)*(?:/|\.(?:py|md|ll|toml)))`", text)
    there = [f"/{path.relative_to(ROOT).as_posix()}" for path in own_files()]
    made = ("dist/",)  # by commands
    return [name for name in named if "NAME" not in name and name not in made and not is_in(there, name)]


def is_in(paths: list[str], name: str) -> bool:
    return any(f"/{name}" in path if name.endswith("/") else path.endswith(f"/{name}") for path in paths)


def test_a_name_that_is_nowhere_is_found():
    assert missing_names("`layers/no.py`, `layers/storage.py`, `stores/layers/`, `no/` and `tikv/ops/NAME.py`") == [
        "layers/no.py",
        "no/",
    ]


def test_each_file_that_the_guide_names_is_there():
    assert missing_names(GUIDE) == []


def test_the_map_has_each_folder():
    named = set(re.findall(r"^\| `(\w[\w/]*)/` \|", GUIDE, re.MULTILINE))
    folders = {path.parent.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("__init__.py")}
    assert named <= folders
    assert {folder for folder in folders if "/" not in folder} - named == {"."}


MOST_PATCHES = 290  # only ever fewer
INSIDE = "tests/inside.py"  # where tests look into stores


def patches(tree: ast.AST) -> list[int]:
    """The lines that replace something for a test: `monkeypatch.setattr`, under any name."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return [node.lineno for node in calls if isinstance(node.func, ast.Attribute) and node.func.attr == "setattr"]


def looks_inside(tree: ast.AST) -> list[int]:
    """The lines that read how a store keeps its layers."""
    return [node.lineno for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node.attr == "_storage"]


def test_tests_use_what_users_have():
    """A test that replaces a function of a module, or looks into a store, breaks when these move, and not the library.

    Fixtures of conftest.py stand in for devices and say how much room there is; `launch_counter` counts launches.
    """
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in (ROOT / "tests").rglob("*.py")}
    lines = {path.relative_to(ROOT).as_posix(): (patches(tree), looks_inside(tree)) for path, tree in trees.items()}
    assert sum(len(found) for found, _ in lines.values()) <= MOST_PATCHES
    assert [path for path, (_, found) in lines.items() if found] == [INSIDE]


def test_a_patch_and_a_look_are_found():
    tree = ast.parse("def test(gpu, store):\n    gpu.setattr(driver, 'device', None)\n    return store._storage.counts")
    assert (patches(tree), looks_inside(tree)) == ([2], [3])


MOST_CHANGELOG_LINES = 3


def test_an_entry_of_the_changelog_is_short():
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    entries = re.findall(r"^- .*(?:\n  .*)*", text, re.MULTILINE)
    assert len(entries) > 100
    assert [entry for entry in entries if entry.count("\n") >= MOST_CHANGELOG_LINES] == []
