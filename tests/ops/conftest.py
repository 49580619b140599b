"""Fixtures of the tests of CUDA's tensor cores."""

import pytest

from tikv import arrays, launch
from tikv.launch.cuda import driver
from tikv.ops.attention import hopper, tensor_cores


@pytest.fixture
def tiles(monkeypatch, request):
    """The tiles that plans of this test got."""
    if not arrays.runtime_of().engine.has_bitcode:
        pytest.skip(f"{arrays.runtime_of().engine.title} cannot link bitcode, which tensor cores need")
    found = []
    choose = tensor_cores.choose_tile

    def choose_and_tell(*arguments, **options):
        found.append(choose(*arguments, **options))
        return found[-1]

    monkeypatch.setattr("tikv.ops.attention.plan.choose_tile", choose_and_tell)
    monkeypatch.setattr("tikv.ops.attention.plan.choose_warpgroups", lambda *arguments: None)
    arrays.runtime_of().plans.clear()
    yield found
    assert found, "no plan was made"
    assert all(tile is not None for tile in found), "the tensor cores were not used"


@pytest.fixture
def ampere(monkeypatch):
    """A driver that tells of a GPU with tensor cores."""
    monkeypatch.setattr(driver, "generation", lambda index: 8)
    monkeypatch.setattr(driver, "multiprocessors", lambda index: 132)
    return monkeypatch


@pytest.fixture
def warpgroups(monkeypatch):
    """What plans of this test got to share out the work of warpgroups by."""
    live = arrays.runtime_of()
    if reason := launch.why_no_warpgroups(live):
        pytest.skip(reason)
    found, choose = [], hopper.choose_warpgroups

    def choose_and_tell(*arguments):
        found.append(choose(*arguments))
        return found[-1]

    monkeypatch.setattr("tikv.ops.attention.plan.choose_warpgroups", choose_and_tell)
    live.plans.clear()
    before = launch.launcher_report(live)["fallbacks"].keys() | set()  # of other tests of this process
    yield found
    assert found, "no plan was made"
    assert all(found), "warpgroups were not used"
    assert launch.launcher_report(live)["fallbacks"].keys() <= before
