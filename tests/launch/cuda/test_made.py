"""Kernels made beforehand: found by what they compute, before anything is compiled; other files are named once."""

import os
import subprocess
import sys

import pytest

from tikv.launch.cuda import compiler, disk_cache, keys, made

FACTS = {"tikv": "0.0", "engine": "taichi 1.7.4", "forms": []}


def make_nothing(*choices):
    """A factory that another process could name."""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty folder of kernels made beforehand, beside an empty cache; what would be compiled is "compiled"."""
    monkeypatch.setenv("TIKV_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv(made.VARIABLE, str(tmp_path / "made"))
    monkeypatch.setattr(made, "PACKAGE_FOLDER", tmp_path / "of the package")
    monkeypatch.setattr(made, "_warned", set())
    monkeypatch.setattr(compiler, "_compile", lambda factory, choices: "compiled")
    (tmp_path / "made").mkdir()
    return tmp_path / "made"


def put(folder, capability=(8, 0), text="made beforehand", choices=(1, "a")):
    path = folder / f"sm_{capability[0]}{capability[1]}.zip"
    path.write_bytes(made.packed(capability, {keys.made_key_of(make_nothing, choices): text}, FACTS))
    return path


@pytest.mark.parametrize("target", ["sm_80", "sm_86", "sm_89", "sm_90", "sm_120"])
def test_a_kernel_is_found_without_a_compiler(folder, monkeypatch, target):
    put(folder)
    monkeypatch.setattr(compiler, "_compile", lambda factory, choices: pytest.fail("compiled"))
    assert compiler.ptx_of(make_nothing, (1, "a"), target) == "made beforehand"
    assert not disk_cache.folder().exists(), "it is on the disk already"


def test_the_file_of_the_newest_capability_that_the_gpu_has_comes_first(folder):
    put(folder, (8, 0), "for 8.0")
    put(folder, (9, 0), "for 9.0")
    put(folder, (12, 0), "for 12.0")
    texts = [compiler.ptx_of(make_nothing, (1, "a"), target) for target in ("sm_89", "sm_90", "sm_100", "sm_120")]
    assert texts == ["for 8.0", "for 9.0", "for 9.0", "for 12.0"]
    assert compiler.ptx_of(make_nothing, (1, "a"), "sm_75") == "compiled"


def test_what_is_missing_is_compiled(folder):
    put(folder)
    assert compiler.ptx_of(make_nothing, (1, "b"), "sm_80") == "compiled"


def test_several_folders_are_searched_then_the_packages(folder, tmp_path, monkeypatch):
    for name, choices in (("first", (1,)), ("second", (2,)), ("of the package", (3,))):
        (tmp_path / name).mkdir()
        put(tmp_path / name, text=name, choices=choices)
    monkeypatch.setenv(made.VARIABLE, os.pathsep.join([str(tmp_path / "first"), str(tmp_path / "second")]))
    texts = [compiler.ptx_of(make_nothing, (n,), "sm_80") for n in (1, 2, 3)]
    assert texts == ["first", "second", "of the package"]


def test_an_empty_variable_turns_them_off(folder, tmp_path, monkeypatch):
    (tmp_path / "of the package").mkdir()
    put(tmp_path / "of the package")
    monkeypatch.setenv(made.VARIABLE, "")
    assert compiler.ptx_of(make_nothing, (1, "a"), "sm_80") == "compiled"


@pytest.mark.parametrize("damage", ["cut", "no zip", "entry", "empty"])
def test_a_damaged_file_is_named_once_and_kernels_are_compiled(folder, caplog, damage):
    path = put(folder, text="made beforehand " * 100)
    data = bytearray(path.read_bytes())
    if damage == "cut":
        del data[len(data) // 2 :]
    elif damage == "no zip":
        data[:] = b"nonsense"
    elif damage == "empty":
        data.clear()
    else:
        at = data.index(b".ptx") + 40  # within the compressed text
        data[at : at + 8] = b"\0" * 8
    path.write_bytes(data)
    for choices in ((1, "a"), (1, "b")):
        assert compiler.ptx_of(make_nothing, choices, "sm_80") == "compiled"
    (record,) = (record for record in caplog.records if record.levelname == "WARNING")
    assert str(path) in record.getMessage()
    assert "damaged" in record.getMessage()
    assert "tikv kernels build" in record.getMessage()


def test_a_file_of_other_sources_is_named_once_and_kernels_are_compiled(folder, caplog, monkeypatch):
    path = put(folder)
    monkeypatch.setattr(keys, "sources", lambda: "other sources")
    for choices in ((1, "a"), (1, "b")):
        assert compiler.ptx_of(make_nothing, choices, "sm_80") == "compiled"
    (record,) = (record for record in caplog.records if record.levelname == "WARNING")
    assert f"{path} are not used" in record.getMessage()
    assert "tikv 0.0 made it from other sources" in record.getMessage()


def test_a_file_that_was_replaced_is_read_again(folder):
    path = put(folder, text="old")
    assert made.read(keys.made_key_of(make_nothing, (1, "a")), "sm_80") == "old"
    os.utime(put(folder, text="newer"), ns=(0, 0))
    assert made.read(keys.made_key_of(make_nothing, (1, "a")), "sm_80") == "newer"
    path.unlink()
    assert made.read(keys.made_key_of(make_nothing, (1, "a")), "sm_80") is None


def test_the_key_names_neither_the_engine_nor_the_gpu(monkeypatch):
    first = keys.made_key_of(make_nothing, (1, "a"))
    assert keys.made_key_of(make_nothing, (1, "b")) != first
    monkeypatch.setattr(keys.runtime, "version_of", lambda name: "0")
    assert keys.made_key_of(make_nothing, (1, "a")) == first
    monkeypatch.setattr(make_nothing, "fast_math", True, raising=False)
    assert keys.made_key_of(make_nothing, (1, "a")) != first


def test_the_same_kernels_are_the_same_bytes(folder):
    assert put(folder).read_bytes() == put(folder).read_bytes()


def test_no_file_is_opened_before_a_kernel_is_looked_up(folder):
    put(folder)
    script = """
import tikv
from tikv.launch.cuda import made
made.folders = None  # an error, if it is called
tikv.init("cpu")
"""
    child = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert child.returncode == 0, child.stderr
