"""Kernels made beforehand: found by what they compute, before anything is compiled; other files are named once."""

import os
import subprocess
import sys
import threading

import pytest

import tikv
from tikv.launch.cuda import compiler, disk_cache, keys, made

FACTS = {"tikv": "0.0", "engine": "taichi 1.7.4", "forms": []}
CANNOT_BE_SENT = threading.Lock()  # a choice that no other process can be asked to compile


def make_nothing(*choices):
    """A factory."""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty folder of kernels made beforehand, beside an empty cache."""
    monkeypatch.setenv("TIKV_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv(made.VARIABLE, str(tmp_path / "made"))
    (tmp_path / "made").mkdir()
    return tmp_path / "made"


def put(folder, capability=(8, 0), text="made beforehand", choices=(1, "a"), **facts):
    path = folder / f"sm_{capability[0]}{capability[1]}.zip"
    path.write_bytes(made.packed(capability, {keys.made_key_of(make_nothing, choices): text}, FACTS | facts))
    return path


def read(target="sm_80", choices=(1, "a")):
    return made.read(keys.made_key_of(make_nothing, choices), target)


@pytest.mark.parametrize("target", ["sm_80", "sm_86", "sm_89", "sm_90", "sm_120"])
def test_a_kernel_is_found_without_a_compiler(folder, target):
    with pytest.raises(tikv.ArchError, match="cannot be sent"):
        compiler.ptx_of(make_nothing, (CANNOT_BE_SENT,), target)
    put(folder, choices=(CANNOT_BE_SENT,))
    assert compiler.ptx_of(make_nothing, (CANNOT_BE_SENT,), target) == "made beforehand"
    assert not disk_cache.folder().exists(), "it is on the disk already"


def test_the_file_of_the_newest_capability_that_the_gpu_has_comes_first(folder):
    put(folder, (8, 0), "for 8.0")
    put(folder, (9, 0), "for 9.0")
    put(folder, (12, 0), "for 12.0")
    targets = ("sm_75", "sm_89", "sm_90", "sm_100", "sm_120")
    assert [read(target) for target in targets] == [None, "for 8.0", "for 9.0", "for 9.0", "for 12.0"]
    assert read("sm_90", (1, "b")) is None


def test_several_folders_are_searched_then_the_packages(folder, tmp_path, monkeypatch):
    for name, choices in (("first", (1,)), ("second", (2,))):
        (tmp_path / name).mkdir()
        put(tmp_path / name, text=name, choices=choices)
    monkeypatch.setenv(made.VARIABLE, os.pathsep.join([str(tmp_path / "first"), str(tmp_path / "second")]))
    assert [read(choices=(n,)) for n in (1, 2, 3)] == ["first", "second", None]
    assert made.folders() == [tmp_path / "first", tmp_path / "second", made.PACKAGE_FOLDER]
    monkeypatch.delenv(made.VARIABLE)
    assert made.folders() == [made.PACKAGE_FOLDER]
    monkeypatch.setenv(made.VARIABLE, "")
    assert made.folders() == [], "they are turned off"


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
    assert [read(), read()] == [None, None]
    (record,) = (record for record in caplog.records if record.levelname == "WARNING")
    assert str(path) in record.getMessage()
    assert "damaged" in record.getMessage()
    assert "tikv kernels build" in record.getMessage()


def test_a_file_of_other_sources_is_named_once_and_kernels_are_compiled(folder, caplog):
    path = put(folder, sources="a digest of others")
    assert [read(), read()] == [None, None]
    (record,) = (record for record in caplog.records if record.levelname == "WARNING")
    assert f"{path} are not used" in record.getMessage()
    assert "tikv 0.0 made it from other sources" in record.getMessage()


def test_a_file_that_was_replaced_is_read_again(folder):
    path = put(folder, text="old")
    assert read() == "old"
    os.utime(put(folder, text="newer"), ns=(0, 0))
    assert read() == "newer"
    path.unlink()
    assert read() is None


def test_the_key_names_the_arithmetic():
    def factory(fast_math):
        def make(*choices):
            """A factory of that name."""

        make.fast_math = fast_math
        return make

    exact, fast = (keys.made_key_of(factory(fast_math), (1,)) for fast_math in (False, True))
    assert exact == keys.made_key_of(factory(False), (1,)) != fast
    assert exact != keys.made_key_of(factory(False), (2,))


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
