"""The compiling process, with a stand-in for its Taichi."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

import tikv
from tikv import runtime
from tikv.launch.cuda import compiler, disk_cache, keys


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("TIKV_CACHE_DIR", str(tmp_path / "kernels"))
    return tmp_path / "kernels"


def make_nothing(*choices):
    """A factory that another process can name."""


def make_other(*choices):
    """Another one."""


def test_a_key_names_everything_that_the_ptx_depends_on(monkeypatch):
    first = keys.key_of(make_nothing, (1, "a"), "sm_90")
    assert keys.key_of(make_nothing, (1, "a"), "sm_90") == first
    others = [
        keys.key_of(make_nothing, (1, "b"), "sm_90"),
        keys.key_of(make_nothing, (1, "a"), "sm_80"),
        keys.key_of(make_other, (1, "a"), "sm_90"),
    ]
    monkeypatch.setattr(runtime, "version_of", lambda name: "0")
    others.append(keys.key_of(make_nothing, (1, "a"), "sm_90"))
    monkeypatch.undo()
    monkeypatch.setattr(keys, "sources_below", lambda directory: "another source")
    others.append(keys.key_of(make_nothing, (1, "a"), "sm_90"))
    monkeypatch.undo()
    monkeypatch.setattr(make_nothing, "fast_math", True, raising=False)
    others.append(keys.key_of(make_nothing, (1, "a"), "sm_90"))
    assert len({first, *others}) == len(others) + 1


@pytest.mark.parametrize("changed", ["copy.py", "attention/cuda.py", "attention/deeper/new.py"])
def test_a_key_names_the_bytes_of_every_file_below_kernels(changed, monkeypatch, tmp_path):
    """A kernel is made of functions from other files, above and below its own folder."""
    for name in ("copy.py", "attention/cuda.py", "attention/deeper/__init__.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("one\n")
    monkeypatch.setattr(keys, "kernels_folder", lambda: tmp_path)

    def both():
        keys.sources_below.cache_clear()
        found = []
        for name in ("copy.py", "attention/cuda.py"):
            monkeypatch.setattr(keys.inspect, "getsourcefile", lambda factory, name=name: str(tmp_path / name))
            found.append(keys.key_of(make_nothing, (1,), "sm_90"))
        return found

    before = both()
    assert both() == before
    (tmp_path / changed).write_text("two\n")
    assert all(old != new for old, new in zip(before, both(), strict=True))


def test_the_kernels_of_tikv_are_below_one_folder():
    from tikv.kernels import copy

    folder = keys.kernels_folder()
    assert pathlib.Path(copy.__file__).parent == folder
    assert list(folder.rglob("*.py"))


def test_the_child_starts_and_ends_with_its_input():
    boot = [sys.executable, "-c", compiler._BOOT, json.dumps([os.path.abspath(p or os.curdir) for p in sys.path])]
    child = subprocess.run(boot, input=b"", capture_output=True, timeout=120)
    assert (child.returncode, child.stdout) == (0, b""), child.stderr.decode()


SERVER = """
import json, pathlib, sys; sys.path[:] = json.loads(sys.argv[1])
from tikv import runtime
from tikv.launch.cuda import compile_server

kernels = set()


def init(arch, **options):
    print("noise on stdout", flush=True)
    kernels.clear()


def launch(factory, choices):
    text = f"ptx of {factory.__name__}{sorted(choices)}"
    if not choices:
        raise RuntimeError("an illegal address")
    if text not in kernels:
        pathlib.Path("taichi_kernel_nvptx_0001.ptx").write_text(text)
    kernels.add(text)


runtime.init = init
compile_server.serve(launch)
"""


@pytest.fixture
def child(folder, monkeypatch, tmp_path):
    """A compiling process whose Taichi is a stand-in."""
    compiler.close()
    monkeypatch.setattr(compiler, "_BOOT", SERVER)
    monkeypatch.chdir(tmp_path)
    yield
    compiler.close()


def test_a_child_compiles_once_and_leaves_no_trace(child, tmp_path):
    want = "ptx of make_nothing[1, 2]"
    assert compiler.ptx_of(make_nothing, (1, 2), "sm_90") == want
    process = compiler._child.process
    assert compiler.ptx_of(make_nothing, (3,), "sm_90") == "ptx of make_nothing[3]"
    assert compiler._child.process is process, "one process serves all"
    compiler.close()
    assert process.poll() == 0, "it ends with its parent's pipe"
    assert compiler.ptx_of(make_nothing, (1, 2), "sm_90") == want
    assert compiler._child is None, "the second time it comes from the disk"
    assert [p.name for p in tmp_path.iterdir()] == ["kernels"]


def test_a_damaged_entry_is_compiled_again(child, folder):
    want = compiler.ptx_of(make_nothing, (1,), "sm_90")
    (entry,) = folder.iterdir()
    entry.write_text("nonsense")
    assert compiler.ptx_of(make_nothing, (1,), "sm_90") == want
    assert disk_cache.read(entry.stem) == want


def test_a_child_that_died_is_replaced(child):
    compiler.ptx_of(make_nothing, (1,), "sm_90")
    compiler._child.process.kill()
    compiler._child.process.wait()
    assert compiler.ptx_of(make_nothing, (2,), "sm_90") == "ptx of make_nothing[2]"


def test_a_kernel_that_equals_another_is_generated_again(child):
    """Taichi shares the code of kernels that differ in their choices alone, and then writes none."""
    assert compiler.ptx_of(make_nothing, (1, 2), "sm_90") == "ptx of make_nothing[1, 2]"
    assert compiler.ptx_of(make_nothing, (2, 1), "sm_90") == "ptx of make_nothing[1, 2]"


def test_what_cannot_be_compiled_says_why(child, monkeypatch):
    with pytest.raises(tikv.ArchError, match="RuntimeError: an illegal address"):
        compiler.ptx_of(make_nothing, (), "sm_90")
    assert compiler.ptx_of(make_nothing, (1,), "sm_90"), "another process goes on"
    with pytest.raises(tikv.ArchError, match="cannot be sent"):
        compiler.ptx_of(lambda: None, (), "sm_90")
    monkeypatch.setattr(make_nothing, "__module__", "__main__")
    monkeypatch.setattr(sys.modules["__main__"], "make_nothing", make_nothing, raising=False)
    with pytest.raises(tikv.ArchError, match="__main__"):
        compiler.ptx_of(make_nothing, (5,), "sm_90")


def test_a_child_that_cannot_start_says_why(folder, monkeypatch):
    compiler.close()
    monkeypatch.setattr(compiler, "_BOOT", "raise SystemExit('no such GPU')")
    with pytest.raises(tikv.ArchError, match="the compiling process failed: no such GPU"):
        compiler.ptx_of(make_nothing, (1,), "sm_90")
    assert compiler._child is None
