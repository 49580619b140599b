"""The wheel a user installs holds what it should, and nothing else."""

import email
import json
import os
import pathlib
import platform
import re
import shutil
import subprocess
import sys
import zipfile

import pytest

pytestmark = pytest.mark.thorough

ROOT = pathlib.Path(__file__).parent.parent


def wheel_of(root, target):
    """The wheel of a source tree, built by hatchling itself, so that no network is needed."""
    pytest.importorskip("hatchling", reason="hatchling builds the wheel; pip install 'taichi-kv[test]'")
    script = "import sys, hatchling.build; print(hatchling.build.build_wheel(sys.argv[1]))"
    child = subprocess.run(
        [sys.executable, "-c", script, str(target)], cwd=root, capture_output=True, text=True, check=False
    )
    assert child.returncode == 0, child.stderr
    return target / child.stdout.split()[-1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    with zipfile.ZipFile(wheel_of(ROOT, tmp_path_factory.mktemp("wheel"))) as archive:
        yield archive


def test_the_wheel_holds_the_package_and_its_types(wheel):
    packed = {name for name in wheel.namelist() if ".dist-info/" not in name}
    sources = {str(path.relative_to(ROOT).as_posix()) for path in (ROOT / "tikv").rglob("*.py")}
    assert "tikv/py.typed" in packed
    assert sources <= packed
    assert {name.split("/")[0] for name in packed} == {"tikv"}


def test_the_wheel_holds_the_kernels_that_were_built_before_it(tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(ROOT / "tikv", copy / "tikv", ignore=shutil.ignore_patterns("__pycache__", "made"))
    for name in ("pyproject.toml", "README.md", "LICENSE", ".gitignore"):
        shutil.copy(ROOT / name, copy)
    made = copy / "tikv" / "launch" / "cuda" / "made"
    made.mkdir()
    for name in ("sm_80.zip", "sm_90.zip", "notes.txt"):
        (made / name).write_bytes(b"kernels")
    with zipfile.ZipFile(wheel_of(copy, tmp_path)) as archive:
        names = set(archive.namelist())
    assert {name.rpartition("made/")[2] for name in names if "/made/" in name} == {"sm_80.zip", "sm_90.zip"}
    assert "tikv/tools/kernels/driver.c" in names


def test_the_metadata_says_what_it_is(wheel):
    import tikv

    (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    metadata = email.message_from_bytes(wheel.read(name))
    assert metadata["Name"] == "taichi-kv"
    assert metadata["Version"] == tikv.__version__
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == "<3.15,>=3.10"
    core = {line.split(";")[0].strip() for line in metadata.get_all("Requires-Dist") if "extra ==" not in line}
    libraries = {"numpy>=1.26", "ml-dtypes>=0.5", "safetensors>=0.4.5"}
    assert core == {"taichi<1.8,>=1.7.4", "quadrants<1.5,>=1.4", *libraries}
    assert {"test", "bench", "torch", "transformers", "quadrants", "examples"} <= set(
        metadata.get_all("Provides-Extra")
    )


@pytest.mark.parametrize(
    ("python", "system", "machine", "expected"),
    [
        ("3.10", "linux", "x86_64", "taichi"),
        ("3.13", "linux", "x86_64", "taichi"),
        ("3.13", "darwin", "arm64", "taichi"),
        ("3.13", "win32", "AMD64", "taichi"),
        ("3.14", "linux", "x86_64", "quadrants"),
        ("3.14", "darwin", "arm64", "quadrants"),
        ("3.14", "win32", "AMD64", "quadrants"),
        ("3.12", "linux", "aarch64", "quadrants"),
        ("3.14", "linux", "aarch64", "quadrants"),
    ],
)
def test_each_machine_gets_the_engine_that_it_can_have(wheel, monkeypatch, python, system, machine, expected):
    """One and no more, of the versions that the library accepts; and the library chooses it where none is installed."""
    from packaging.requirements import Requirement

    from tikv import engines

    (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    lines = email.message_from_bytes(wheel.read(name)).get_all("Requires-Dist")
    facts = {"python_version": python, "sys_platform": system, "platform_machine": machine, "extra": ""}
    wanted = [each for each in map(Requirement, lines) if each.name in engines.ALL and each.marker.evaluate(facts)]
    assert [each.name for each in wanted] == [expected]
    engine = engines.ALL[expected]
    assert str(wanted[0].specifier) == f"<{engine.below},>={engine.least}"
    (extra,) = (each for each in map(Requirement, lines) if each.marker and 'extra == "quadrants"' in str(each.marker))
    assert str(extra.specifier) == f"<{engines.QUADRANTS.below},>={engines.QUADRANTS.least}"
    monkeypatch.setattr(engines.sys, "version_info", tuple(map(int, python.split("."))))
    monkeypatch.setattr(engines.sys, "platform", system)
    monkeypatch.setattr(platform, "machine", lambda: machine)
    without_taichi = engines._has_no_taichi()
    monkeypatch.undo()
    assert without_taichi == (expected == "quadrants")


@pytest.mark.parametrize("extra", ["", "quadrants", "test", "docs"])
def test_no_python_is_asked_for_an_engine_that_it_cannot_have(wheel, extra):
    """A resolver for all machines at once, as uv's, refuses a project of which any machine's part has no solution."""
    from packaging.requirements import Requirement

    (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    lines = email.message_from_bytes(wheel.read(name)).get_all("Requires-Dist")
    engines = [each for each in map(Requirement, lines) if each.name == "quadrants"]
    assert len(engines) == 2
    for python in ("3.10", "3.11"):
        for system, machine in (("linux", "x86_64"), ("linux", "aarch64"), ("darwin", "arm64"), ("win32", "AMD64")):
            facts = {"python_version": python, "sys_platform": system, "platform_machine": machine, "extra": extra}
            assert not any(each.marker.evaluate(facts) for each in engines)


def test_the_wheel_holds_the_licence_and_the_command(wheel):
    names = {name.split(".dist-info/")[1]: name for name in wheel.namelist() if ".dist-info/" in name}
    assert "Apache License" in wheel.read(names["licenses/LICENSE"]).decode()
    assert "tikv = tikv.__main__:main" in wheel.read(names["entry_points.txt"]).decode()


@pytest.mark.skipif(sys.platform == "win32", reason="releases are made where bash is")
def test_a_release_is_refused_where_the_tag_names_another_version():
    import tikv

    child = subprocess.run(["bash", ROOT / ".ci" / "release", "v9.9"], capture_output=True, text=True, check=False)
    assert child.returncode == 1
    assert f"The tag is v9.9, and tikv.__version__ is {tikv.__version__}." in child.stderr
    workflow = (ROOT / ".github" / "workflows" / "release.yml").read_text(encoding="utf-8")
    assert '.ci/release "$GITHUB_REF_NAME"' in workflow
    assert f"\n## [{tikv.__version__}] - 20" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_a_strict_type_checker_knows_every_name_and_no_other(tmp_path):
    pytest.importorskip("mypy", reason="mypy checks the types; pip install mypy")
    import tikv

    names = dir(tikv)
    lines = ["import tikv", *(f"print(tikv.{name})" for name in names), "from tikv import KVCacheStor"]
    (tmp_path / "user.py").write_text("\n".join(lines) + "\n", encoding="utf-8")
    # Libraries that a user may have; reading them is most of the time.
    ignored = "".join(
        f"[mypy-{name}.*]\nignore_missing_imports = true\nfollow_imports = skip\n"
        for name in ("taichi", "quadrants", "torch", "transformers", "safetensors", "cuda", "rich", "jax")
    )
    (tmp_path / "mypy.ini").write_text(f"[mypy]\nstrict = true\nfollow_imports = silent\n{ignored}", encoding="utf-8")
    child = subprocess.run(
        [sys.executable, "-m", "mypy", "--no-error-summary", "--cache-dir", os.devnull, "user.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "MYPYPATH": str(ROOT)},
    )
    (told,) = (child.stdout + child.stderr).splitlines()
    assert told.startswith(f"user.py:{len(lines)}: error:")
    assert '"KVCacheStor"' in told


def test_commits_are_checked_by_the_versions_that_developers_have():
    hooks = (ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8")
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    asked = re.findall(r'"(\w+>=[\w.]+)"', "".join(re.findall(r"additional_dependencies: (.*)", hooks)))
    assert {name.partition(">=")[0] for name in asked} == {"ruff", "mypy", "numpy", "ml_dtypes"}
    assert [name for name in asked if f'"{name}"' not in project] == []


def test_who_reports_a_fault_is_asked_for_what_the_command_line_tells():
    form = (ROOT / ".github" / "ISSUE_TEMPLATE" / "bug.yml").read_text(encoding="utf-8")
    found = subprocess.run(
        [sys.executable, "-m", *re.search(r"`(tikv info --json)`", form)[1].split()],
        capture_output=True,
        text=True,
        check=True,
    )
    assert {"version", "engine", "arch", "launcher", "packages"} <= json.loads(found.stdout).keys()


@pytest.fixture
def uncompiled(request, tmp_path):
    """Run Python with no byte code at hand, as after `uv pip install`: it compiles every file that it imports."""
    environment = {
        **os.environ,
        "PYTEST_ADDOPTS": "",  # options of this run, which pytest does not know away from its conftest.py
        "PYTHONPATH": str(request.config.rootpath),
        "PYTHONPYCACHEPREFIX": str(tmp_path / "no byte code"),
        "PYTHONDONTWRITEBYTECODE": "1",
    }

    def run(*arguments):
        return subprocess.run(
            [sys.executable, *map(str, arguments)], capture_output=True, text=True, check=False, env=environment,
            timeout=300,
        )  # fmt: skip

    return run


def test_the_engine_is_compiled_quietly(uncompiled):
    """Python finds fault with an engine's sources; warnings about any others stay errors here."""
    script = "import numpy, tikv; tikv.init(arch='cpu'); tikv.copy(*numpy.zeros((2, 1, 1, 4), 'f4'), position=0)"
    child = uncompiled("-W", "error::SyntaxWarning", "-W", "error::DeprecationWarning", "-c", script)
    assert (child.returncode, child.stdout, child.stderr) == (0, "", "")


def test_the_tests_run_where_the_engine_was_not_compiled(uncompiled, request, tmp_path):
    """By the filters of pyproject.toml alone: this test imports the engine without the library."""
    from tikv import runtime

    test = tmp_path / "test_import.py"
    test.write_text(f"def test_import():\n    import {runtime.engine_in_use().name}\n", encoding="utf-8")
    configuration = request.config.rootpath / "pyproject.toml"
    child = uncompiled("-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", configuration, test)
    assert child.returncode == 0, child.stdout + child.stderr


def test_workflows_name_what_is_there():
    found = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
    assert [path.stem for path in found] == ["ci", "full", "macos", "release", "wheels"]
    text = "".join(path.read_text(encoding="utf-8") for path in found)
    named = set(re.findall(r"(?:tests|\.ci)/[\w./]+", text))
    assert ".ci/run" in named
    assert len(named) >= 4
    assert [name for name in named if not (ROOT / name).exists()] == []
    extras = set(re.findall(r"^(\w+) = \[", (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE))
    assert set(",".join(re.findall(r"\[([a-z,]+)\]\"", text)).split(",")) <= extras
