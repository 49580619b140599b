"""Fixtures of the tests of CUDA's tensor cores."""

import pytest

from tikv import arrays, launch
from tikv.launch import launcher
from tikv.launch.cuda import driver
from tikv.ops.attention import families


@pytest.fixture
def tiles(monkeypatch, request):
    """The tiles of the families that plans of this test got, None for those without tensor cores."""
    if not arrays.runtime_of().engine.has_bitcode:
        pytest.skip(f"{arrays.runtime_of().engine.title} cannot link bitcode, which tensor cores need")
    of_style = families.families_of
    monkeypatch.setattr(families, "families_of", lambda style: [f for f in of_style(style) if not f.in_warpgroups])
    found = families_of_plans(monkeypatch, lambda family: getattr(family, "tile", None))
    yield found
    assert found, "no plan was made"
    assert all(tile is not None for tile in found), "the tensor cores were not used"


def families_of_plans(monkeypatch, look):
    """What `look` says of the family of each plan that is made from now on, in a list that grows."""
    found, original = [], families.family_for

    def family_for(form, refused=()):
        family = original(form, refused)
        if not refused:  # else a plan leaves the native launcher, which is no new plan
            found.append(look(family))
        return family

    monkeypatch.setattr("tikv.ops.attention.plan.family_for", family_for)
    arrays.runtime_of().plans.clear()
    return found


class Gpu:
    """A GPU that is not here, as the driver describes it; a test sets what it needs.

    Attributes:
        generation: of its compute capability.
        launcher: which launcher serves it; None for the one of this machine.
    """

    def __init__(self, monkeypatch):
        self.generation, self.launcher = 8, None
        launcher_of = launcher.launcher_of
        monkeypatch.setattr(driver, "generation", lambda index: self.generation)
        monkeypatch.setattr(driver, "multiprocessors", lambda index: 132)
        monkeypatch.setattr(
            launcher, "launcher_of", lambda live: (self.launcher, "asked for") if self.launcher else launcher_of(live)
        )


@pytest.fixture
def ampere(monkeypatch):
    """A GPU with tensor cores."""
    return Gpu(monkeypatch)


@pytest.fixture
def hopper_gpu(ampere):
    """A GPU with warpgroups, and the launcher that they need."""
    ampere.generation, ampere.launcher = 9, "native"
    return ampere


@pytest.fixture
def device_knows(monkeypatch):
    """The host knows no lengths and no tables, as if they were computed on a device."""
    monkeypatch.setattr("tikv.ops.attention.plan.host_indices", lambda array, live: None)


@pytest.fixture
def debug(arch, monkeypatch):
    """A function that turns on the debug mode of this test's runtime, which asks the device for values."""
    return lambda on=True: monkeypatch.setattr(arrays.runtime_of(), "debug", on)


@pytest.fixture
def eight(monkeypatch):
    """As after ``tikv.init(attention_bits=8)``, in the runtime that all tests share; plans of this test compute so."""
    live = arrays.runtime_of()
    if reason := launch.why_no_warpgroups(live):
        pytest.skip(reason)
    found = families_of_plans(monkeypatch, lambda family: family.eight)
    before = launch.launcher_report(live)["fallbacks"].keys() | set()
    live.plans.clear()
    monkeypatch.setattr(live, "attention_bits", 8)
    yield
    live.plans.clear()
    assert found, "no plan was made"
    assert all(found), "products were not of 8 bits"
    assert launch.launcher_report(live)["fallbacks"].keys() <= before


@pytest.fixture
def warpgroups(monkeypatch):
    """Whether plans of this test got warpgroups."""
    live = arrays.runtime_of()
    if reason := launch.why_no_warpgroups(live):
        pytest.skip(reason)
    found = families_of_plans(monkeypatch, lambda family: family.in_warpgroups)
    before = launch.launcher_report(live)["fallbacks"].keys() | set()  # of other tests of this process
    yield found
    assert found, "no plan was made"
    assert all(found), "warpgroups were not used"
    assert launch.launcher_report(live)["fallbacks"].keys() <= before
