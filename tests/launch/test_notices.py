"""Who waits for a compiler is told so, once, and can have it quiet."""

import time

import pytest

from tikv.launch import notices


@pytest.fixture
def short(monkeypatch):
    monkeypatch.setattr(notices, "SECONDS", 0.1)
    monkeypatch.delenv("TIKV_QUIET", raising=False)


def compile_for(notice, seconds, kernel="copy rows"):
    with notice.compiling(kernel, "cpu"):
        time.sleep(seconds)


def wait_for(caplog):
    """Until the timer's thread has spoken."""
    for _ in range(100):
        if caplog.messages:
            return
        time.sleep(0.05)


def test_it_is_said_while_it_lasts_and_once(short, caplog):
    notice = notices.Notice()
    with notice.compiling("attend cpu", "cpu"):
        wait_for(caplog)
        assert len(caplog.messages) == 1
    for part in ("for cpu", "1 so far", "0.1 seconds", "'attend cpu'", "tikv.warmup", "TIKV_QUIET=1"):
        assert part in caplog.messages[0]
    compile_for(notice, 0.3)
    assert len(caplog.messages) == 1


def test_short_ones_add_up(short, caplog):
    notice = notices.Notice()
    compile_for(notice, 0.06)
    assert caplog.messages == []
    compile_for(notice, 0.06)
    compile_for(notice, 0.3, "merge")
    wait_for(caplog)
    assert len(caplog.messages) == 1
    assert "3 so far" in caplog.messages[0] or "2 so far" in caplog.messages[0]


def test_an_error_of_the_compiler_passes(short, caplog):
    notice = notices.Notice()
    with pytest.raises(ZeroDivisionError), notice.compiling("copy rows", "cpu"):
        raise ZeroDivisionError
    time.sleep(0.3)
    assert caplog.messages == []


def test_a_listener_hears_each_kernel_instead(short, caplog):
    notice, heard = notices.Notice(), []
    with notice.heard_by(heard.append):
        compile_for(notice, 0.3)
        compile_for(notice, 0, "merge")
    assert heard == ["copy rows", "merge"]
    assert caplog.messages == []
    with notice.compiling("copy rows", "cpu"):
        wait_for(caplog)
    assert len(caplog.messages) == 1


SCRIPT = """
import logging, sys
import numpy as np
import tikv
from tikv.launch import notices

notices.SECONDS = 0.0
if sys.argv[1:]:
    logging.getLogger("tikv").setLevel(sys.argv[1])
tikv.init(arch="cpu")
store = tikv.KVCacheStore(num_layers=1, num_kv_heads=1, head_dim=4, capacity=8, dtype="float32")
store.extend(0, *np.ones((3, 2, 1, 4), np.float32))
"""


@pytest.mark.archs("cpu")
@pytest.mark.parametrize(
    ("level", "variable", "lines"), [((), "", 1), (("ERROR",), "", 0), ((), "1", 0)], ids=["told", "level", "variable"]
)
def test_stderr_has_one_line_or_none(arch, python, level, variable, lines):
    said = python(SCRIPT, *level, TIKV_QUIET=variable).stderr
    assert said.count("tikv is compiling kernels for cpu") == lines
    assert said.count("\n") == lines, said
