"""Saving replaces a file in one step: with its mode, behind its link, under any name, and clears what was left."""

import os
import signal
import stat
import subprocess
import sys

import pytest

import tikv
from tikv.stores.files import replacing

fcntl = pytest.importorskip("fcntl", reason="modes, pipes and locks are those of POSIX")
LIMIT = 255  # bytes of a name, on every file system that tests run on


def names(folder):
    return sorted(entry.name for entry in folder.iterdir())


@pytest.fixture
def path(tmp_path):
    found = tmp_path / "cache.safetensors"
    found.write_bytes(b"old")
    return found


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o664, 0o444, 0o755])
def test_a_replaced_file_keeps_its_mode(path, mode):
    path.chmod(mode)
    before = os.umask(0o077)
    try:
        replacing.replace(path, b"new", "test")
    finally:
        os.umask(before)
    assert (path.read_bytes(), stat.S_IMODE(path.stat().st_mode)) == (b"new", mode)


@pytest.mark.parametrize("umask", [0o022, 0o077, 0o007])
def test_a_new_file_has_the_mode_of_the_umask(tmp_path, umask):
    before = os.umask(umask)
    try:
        replacing.replace(tmp_path / "new.safetensors", b"new", "test")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "new.safetensors").stat().st_mode) == 0o666 & ~umask


def test_what_is_private_is_so_while_it_is_written(path, monkeypatch):
    path.chmod(0o600)
    seen = []

    def look(handle):
        if stat.S_ISREG(os.fstat(handle).st_mode):
            seen.append(stat.S_IMODE(os.fstat(handle).st_mode))

    monkeypatch.setattr(os, "fsync", look)
    replacing.replace(path, b"new", "test")
    assert seen == [0o600]


def test_a_link_stays_and_its_target_is_replaced(tmp_path, path):
    other = tmp_path / "folder"
    other.mkdir()
    link, next_link, dangling = (other / f"{name}.safetensors" for name in ("link", "next", "dangling"))
    link.symlink_to(os.path.join("..", path.name))
    next_link.symlink_to(link.name)
    dangling.symlink_to("not_yet.bin")
    replacing.replace(next_link, b"new", "test")
    assert path.read_bytes() == b"new"
    assert (os.readlink(next_link), os.readlink(link)) == (link.name, os.path.join("..", path.name))
    replacing.replace(dangling, b"first", "test")
    assert ((other / "not_yet.bin").read_bytes(), os.readlink(dangling)) == (b"first", "not_yet.bin")
    round_about = other / "round.safetensors"
    round_about.symlink_to(round_about.name)
    with pytest.raises(tikv.CacheFileError, match=r"test: cannot write .* Give another name"):
        replacing.replace(round_about, b"new", "test")
    assert names(tmp_path) == ["cache.safetensors", "folder"]
    assert names(other) == sorted([*(p.name for p in (link, next_link, dangling, round_about)), "not_yet.bin"])


@pytest.mark.parametrize("letter", ["a", "é"])
def test_names_of_any_length_that_the_system_takes(tmp_path, letter):
    room = (LIMIT - len(replacing.SUFFIX)) // len(letter.encode())
    name = letter * room + replacing.SUFFIX
    for data in (b"one", b"two"):
        replacing.replace(tmp_path / name, data, "test")
    assert ((tmp_path / name).read_bytes(), names(tmp_path)) == (b"two", [name])
    for impossible in (f"{letter}{name}", f"a\0{replacing.SUFFIX}"):
        with pytest.raises(tikv.CacheFileError, match=r"test: (cannot write|there is no folder)"):
            replacing.replace(tmp_path / impossible, b"new", "test")


@pytest.mark.parametrize("kind", ["folder", "pipe"])
def test_what_is_no_file_is_not_replaced(tmp_path, kind):
    path = tmp_path / "cache.safetensors"
    (os.mkdir if kind == "folder" else os.mkfifo)(path)
    with pytest.raises(tikv.CacheFileError, match=r"cache\.safetensors' is not a file, so it is not replaced"):
        replacing.replace(path, b"new", "test")
    assert not path.is_file()
    assert names(tmp_path) == [path.name]


def killed(path, where):
    """A process that is killed where it would call a function of `os` in a save."""
    code = (
        "import os, signal, sys\n"
        "from tikv.stores.files import replacing\n"
        f"os.{where} = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"
        "replacing.replace(sys.argv[1], b'new', 'test')\n"
    )
    ended = subprocess.run([sys.executable, "-c", code, str(path)], check=False, timeout=60)
    assert ended.returncode == -signal.SIGKILL


@pytest.mark.parametrize("where", ["fsync", "replace"])
def test_what_killed_saves_left_is_removed_by_the_next(tmp_path, path, where):
    killed(path, where)
    killed(tmp_path / "another.safetensors", where)
    assert (len(names(tmp_path)), path.read_bytes()) == (2, b"old"), "of two, one cleared by the other"
    replacing.replace(path, b"new", "test")
    assert (names(tmp_path), path.read_bytes()) == ([path.name], b"new")


def test_what_is_being_written_and_what_is_not_ours_stays(tmp_path, path, monkeypatch):
    """A save within a save: the inner one must not take the outer one's file for left behind."""
    others = [".tikv-0123.tmp", ".tikv-0123456789abcdeg.tmp", "tikv-0123456789abcdef.tmp"]
    for name in others:
        (tmp_path / name).touch()
    os.mkfifo(tmp_path / ".tikv-00000000000000ff.tmp")
    (tmp_path / ".tikv-0000000000000000.tmp").symlink_to(path)
    kept = names(tmp_path)
    fsync = os.fsync

    def save_another(handle):
        monkeypatch.setattr(os, "fsync", fsync)
        replacing.replace(tmp_path / "another.safetensors", b"another", "test")
        fsync(handle)

    monkeypatch.setattr(os, "fsync", save_another)
    replacing.replace(path, b"new", "test")
    assert (path.read_bytes(), (tmp_path / "another.safetensors").read_bytes()) == (b"new", b"another")
    assert names(tmp_path) == sorted([*kept, "another.safetensors"])


def test_where_there_are_no_locks_only_what_is_old_is_removed(tmp_path, path, monkeypatch):
    def refuse(*_):
        raise OSError("no locks here")

    monkeypatch.setattr(fcntl, "flock", refuse)
    old, fresh = (tmp_path / f".tikv-{n:016x}.tmp" for n in (1, 2))
    for each in (old, fresh):
        each.touch()
    os.utime(old, (1, 1))
    replacing.replace(path, b"new", "test")
    assert (names(tmp_path), path.read_bytes()) == ([fresh.name, path.name], b"new")


def test_a_file_taken_away_before_it_was_locked_is_written_again(path, monkeypatch):
    flock, taken = fcntl.flock, []

    def late(file, how):
        if not taken:
            taken.extend(path.parent.glob(".tikv-*.tmp"))
            taken[0].unlink()
        flock(file, how)

    monkeypatch.setattr(fcntl, "flock", late)
    replacing.replace(path, b"new", "test")
    assert (len(taken), path.read_bytes(), names(path.parent)) == (1, b"new", [path.name])


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError, OSError])
@pytest.mark.parametrize("where", ["fsync", "replace", "chmod"])
def test_a_save_that_is_stopped_leaves_the_old_file_and_nothing_else(path, monkeypatch, error, where):
    def stop(*_):
        raise error

    before = path.stat()
    monkeypatch.setattr(os, where, stop)
    if (error, where) == (OSError, "chmod"):  # a file system without modes
        replacing.replace(path, b"new", "test")
        return
    with pytest.raises(tikv.CacheFileError if error is OSError else error):
        replacing.replace(path, b"new", "test")
    assert (path.read_bytes(), path.stat().st_ino, names(path.parent)) == (b"old", before.st_ino, [path.name])
