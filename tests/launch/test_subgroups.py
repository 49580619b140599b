"""Whether attention reduces over subgroups: tried out where a driver cannot take the process along, or switched off."""

import re
import sys

import numpy as np
import pytest

import tikv
from tikv import launch, reference, runtime
from tikv.launch import subgroups
from tikv.runtime.cache import BoundedCache
from tikv.tools import doctor

TRIALS = {
    "crashes": ("import os; os.abort()", r"ended with exit status -?\d+"),
    "ends at once": ("import os; os._exit(7)", "ended with exit status 7"),
    "raises": ("raise SystemExit('no such device')", r"ended with exit status 1 \(no such device\)"),
    "says nothing": ("pass", "ended with exit status 0"),
    "hangs": ("import time; time.sleep(60)", r"gave no answer within 0\.5 s"),
    "wrong numbers": (f"print('a banner'); print({subgroups._ENDED!r})", "a trial gave wrong numbers"),
    "right numbers": (f"print('a banner'); print({subgroups._RIGHT!r})", ""),
}


@pytest.fixture
def untried(no_plans, monkeypatch):
    """A runtime whose subgroups nobody has tried, in a process that has not either."""
    live = runtime.current()
    monkeypatch.delenv("TIKV_SUBGROUPS", raising=False)
    monkeypatch.setattr(live, "why_no_subgroups", None)
    monkeypatch.setattr(subgroups, "_reasons", BoundedCache())
    return live


@pytest.mark.archs("cpu")
@pytest.mark.parametrize("trial", TRIALS)
def test_however_a_trial_ends_the_process_goes_on(untried, monkeypatch, tmp_path, caplog, trial):
    """And tries once: a later runtime takes what was found. The CPU stands for a GPU, a script for the trial."""
    script, message = TRIALS[trial]
    counted = tmp_path / "trials"
    monkeypatch.setattr(subgroups, "_TRIAL", f"open({str(counted)!r}, 'a').write('x'); {script}")
    if trial == "hangs":
        monkeypatch.setattr(subgroups, "SECONDS", 0.5)
    assert tikv.info()["subgroups"] == "not tried yet: attention's first call tries them"
    for _ in range(2):
        untried.why_no_subgroups = None
        why = launch.why_no_subgroups(untried)
    assert re.fullmatch(rf"(a trial in a separate process )?{message}", why), why
    assert counted.read_text() == "x"
    assert tikv.info()["subgroups"] == (why or "in use")
    assert [record.levelname for record in caplog.records] == ["WARNING"] * bool(why)


@pytest.mark.archs("cpu")
def test_where_no_process_can_be_started(untried, monkeypatch):
    """A frozen program would start itself again."""
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    assert "a process to try them out could not be started" in subgroups.tried(untried)
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    assert "TIKV_SUBGROUPS=on uses them untested" in subgroups.tried(untried)


@pytest.mark.archs("cpu")
def test_the_switch(untried, monkeypatch):
    monkeypatch.setattr(subgroups, "tried", lambda live: pytest.fail("nothing is to be tried"))
    for choice, why in (("off", "TIKV_SUBGROUPS is off"), ("on", "")):
        monkeypatch.setenv("TIKV_SUBGROUPS", choice)
        untried.why_no_subgroups = None
        assert launch.why_no_subgroups(untried) == why
    monkeypatch.setenv("TIKV_SUBGROUPS", "never")
    untried.why_no_subgroups = None
    with pytest.raises(tikv.OptionError, match=r"TIKV_SUBGROUPS=never is not a choice\. Use one of auto, on, off"):
        launch.why_no_subgroups(untried)
    assert launch.subgroup_report(untried) == subgroups.NOT_TRIED


@pytest.mark.archs("cpu", "cuda")
def test_other_back_ends_have_no_use_for_them(arch):
    assert tikv.info()["subgroups"] == f"kernels on {arch} have no use for them"


@pytest.mark.archs("vulkan", "metal")
def test_they_are_used_where_they_are_announced(arch, untried):
    """On Mesa's lavapipe, and on whatever else announces them."""
    assert bool(launch.why_no_subgroups(untried)) == (arch == "vulkan" and not runtime.vulkan_subgroups())


@pytest.mark.archs("vulkan", "metal")
def test_attention_does_without_a_driver_that_crashes(untried, monkeypatch):
    """One that nobody knows, in a process of its own; whose numbers are right without, and with one that works."""
    monkeypatch.setattr(runtime, "vulkan_drivers_known", lambda: False)
    if untried.arch == "vulkan":
        assert subgroups.tried(untried) == ""
    monkeypatch.setattr(subgroups, "tried", subgroups._tried_apart)
    monkeypatch.setattr(subgroups, "_TRIAL", TRIALS["crashes"][0])
    rng = np.random.default_rng(5)
    q = rng.standard_normal((1, 3, 64)).astype(np.float32)
    k, v = (rng.standard_normal((1, 1, 203, 64)).astype(np.float16) for _ in "kv")
    got = np.asarray(tikv.decode_attention(q, k, v, 200))
    for h in range(3):
        want, _ = reference.attention(q[0, h], k[0, 0, :200], v[0, 0, :200], scale=64**-0.5)
        np.testing.assert_allclose(got[0, h], want, atol=1e-5)
    assert "exit status" in tikv.info()["subgroups"]


@pytest.mark.archs("vulkan")
def test_wrong_numbers_are_not_used(untried, monkeypatch):
    """Nor where the driver is known."""
    from tikv.kernels import lanes

    monkeypatch.setattr(lanes, "self_test_passed", lambda found: False)
    monkeypatch.setattr(runtime, "vulkan_drivers_known", lambda: True)
    assert launch.why_no_subgroups(untried) == subgroups.WRONG


@pytest.mark.archs("vulkan")
def test_the_doctor_says_whether_they_are_used(arch, monkeypatch):
    """As the report does that a Mac's owner sends."""
    monkeypatch.setenv("TIKV_SUBGROUPS", "off")
    found = doctor.check(arch)
    assert (found.status, found.detail.rpartition(", ")[2]) == ("PASS", "subgroups: TIKV_SUBGROUPS is off"), found
