"""Whoever needs a package that is not installed is told which extra brings it, by one error that is ours."""

import os
import pathlib
import re
import subprocess
import sys
import types

import pytest

import tikv
from tikv import extras

pytestmark = pytest.mark.thorough

ROOT = pathlib.Path(__file__).resolve().parents[1]
SMALL = (
    "import tikv, numpy as np; tikv.init('cpu'); "
    "store = tikv.KVCacheStore(num_layers=1, num_kv_heads=1, head_dim=8, capacity=8); "
)

# (the package that is missing, what is done, who needs it, the extra that brings it)
NEEDS = [
    ("transformers", "import tikv.integrations.transformers", "tikv.integrations.transformers", "transformers"),
    ("torch", "import tikv.integrations.transformers", "tikv.integrations.transformers", "transformers"),
    ("torch", "from tikv import torch_ops", "tikv.torch_ops", "torch"),
    ("torch", "from tikv.integrations import torch_ops", "tikv.torch_ops", "torch"),
    ("torch", SMALL + "store.keys(0).torch()", "CacheArray.torch", "torch"),
    (
        "torch",
        SMALL + "tikv.decode_attention(np.ones((1, 2, 8), 'e'), store.keys(0), store.values(0), 2, impl='torch')",
        "decode_attention: impl='torch'",
        "torch",
    ),
    (
        "torch",
        "from tikv.distributed import ShardedKVCacheStore as S; "
        "S(None, shard='heads', num_layers=1, num_kv_heads=1, head_dim=8, capacity=8)",
        "ShardedKVCacheStore",
        "torch",
    ),
    ("matplotlib", "from tikv import extras; extras.need('matplotlib', '--plot')", "--plot", "plot"),
]


@pytest.fixture
def without(tmp_path):
    """Run Python where a package is not installed."""

    def run(package, *arguments):
        found = f'raise ModuleNotFoundError("No module named {package!r}", name="{package}")'
        (tmp_path / f"{package}.py").write_text(found, encoding="utf-8")
        return subprocess.run(
            [sys.executable, *arguments],
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])},
        )

    return run


@pytest.mark.parametrize(("package", "script", "what", "extra"), NEEDS)
def test_one_error_names_the_extra_and_how_to_install_it(without, package, script, what, extra):
    if package == "transformers":
        pytest.importorskip("torch", reason="torch, which is asked for first, is not installed")
    child = without(package, "-c", script)
    *_, last = child.stderr.splitlines()
    assert last == (
        f"tikv.errors.MissingPackageError: {what} needs {package}, which is not installed. Install taichi-kv[{extra}] "
        f'(pip install "taichi-kv[{extra}]"; in a clone pip install -e ".[{extra}]").'
    )
    assert child.stderr.count("Error") == 1 + script.count("Error"), "one error, and no other before it"
    assert child.stderr.count("Traceback") == 1


def test_the_command_line_works_without_rich(without):
    for command in (["variants"], ["info"], ["bench", "--help"]):
        child = without("rich", "-m", "tikv", *command)
        assert (child.returncode, child.stderr) == (0, "")


def test_the_command_line_says_in_a_line_what_is_missing(without):
    child = without("taichi", "-m", "tikv", "bench")
    (line,) = child.stderr.splitlines()
    assert line.startswith("tikv: runtime: Taichi cannot be imported (")
    assert "Install taichi>=" in line
    assert child.returncode == 1


def test_an_extra_brings_what_it_is_named_for():
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    lines = dict(re.findall(r"^(\w+) = \[(.*)\]$", project.partition("optional-dependencies]")[2], re.MULTILINE))
    for package, extra in extras.EXTRAS.items():
        assert f'"{package}' in lines[extra]
    for package, least in extras.LEAST.items():
        assert f'"{package}>={".".join(map(str, least))}"' in lines[package]


def test_a_package_that_is_too_old_is_named():
    old = types.ModuleType("transformers")
    for version in ("4.55.4", "4.9", "0.1.dev0"):
        old.__version__ = version
        with pytest.raises(ImportError, match=rf"^{re.escape(version)} is older than 4\.56$") as caught:
            extras.require_version(old)
        told = str(extras.missing("TikvCache", caught.value))
        assert told.startswith(f"TikvCache needs transformers, which cannot be used ({version} is older than 4.56). ")
    for version in ("4.56.0", "5.24", "10.0+cu"):
        old.__version__ = version
        extras.require_version(old)


def test_the_error_is_caught_by_either_name():
    for kind in (ImportError, tikv.ArchError, tikv.TikvError, RuntimeError):
        with pytest.raises(kind) as caught:
            extras.need("no_such_package", "this")
        assert caught.value.name == "no_such_package"
        assert str(caught.value).startswith("this needs no_such_package, which is not installed. Install taichi-kv")
