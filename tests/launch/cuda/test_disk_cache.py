"""Compiled kernels on the disk."""

import pathlib
import sys

import pytest

from tikv.launch.cuda import disk_cache


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("TIKV_CACHE_DIR", str(tmp_path / "kernels"))
    return tmp_path / "kernels"


def test_a_kernel_is_kept_whole(folder):
    assert disk_cache.read("key") is None
    disk_cache.write("key", "text of a kernel\nπ\n")
    assert disk_cache.read("key") == "text of a kernel\nπ\n"
    assert [p.name for p in folder.iterdir()] == ["key.ptx"]


@pytest.mark.parametrize(
    "damage",
    [
        lambda raw: raw[:-1],
        lambda raw: raw[: len(disk_cache.MAGIC) + 10],
        lambda raw: b"",
        lambda raw: raw.replace(b"kernel", b"kernfl"),
        lambda raw: raw + b"\n",
        lambda raw: b"#!/bin/sh\n",
        lambda raw: b"\xff" * 100,
    ],
    ids=["shorter", "header", "empty", "a bit", "longer", "foreign", "noise"],
)
def test_a_damaged_entry_is_not_trusted(folder, damage, caplog):
    disk_cache.write("key", "text of a kernel\n")
    (folder / "key.ptx").write_bytes(damage((folder / "key.ptx").read_bytes()))
    assert disk_cache.read("key") is None
    assert "damaged or foreign" in caplog.text
    disk_cache.write("key", "text of a kernel\n")
    assert disk_cache.read("key") == "text of a kernel\n"


def test_an_entry_of_another_key_is_foreign(folder):
    disk_cache.write("one", "text")
    (folder / "one.ptx").rename(folder / "two.ptx")
    assert disk_cache.read("two") is None


def test_what_was_used_longest_ago_goes(folder, monkeypatch):
    import os

    for age, key in enumerate("abcd"):
        disk_cache.write(key, key * 1000)
        os.utime(folder / f"{key}.ptx", (age, age))
    assert disk_cache.read("a") == "a" * 1000, "reading counts as use"
    monkeypatch.setattr(disk_cache, "LIMIT_BYTES", 3500)
    disk_cache.write("e", "e" * 1000)
    assert sorted(p.stem for p in folder.iterdir()) == ["a", "d", "e"]


def test_a_folder_that_cannot_be_written_is_said_not_raised(tmp_path, monkeypatch, caplog):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TIKV_CACHE_DIR", str(tmp_path / "file" / "kernels"))
    disk_cache.write("key", "text")
    assert "cannot be written" in caplog.text
    assert disk_cache.read("key") is None


def test_the_folder_is_the_platforms(monkeypatch):
    for name in ("TIKV_CACHE_DIR", "XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    home = pathlib.Path.home()
    for platform, want in (
        ("linux", home / ".cache"),
        ("darwin", home / "Library" / "Caches"),
        ("win32", home / "AppData" / "Local"),
    ):
        monkeypatch.setattr(sys, "platform", platform)
        assert disk_cache.folder() == want / "taichi-kv"
