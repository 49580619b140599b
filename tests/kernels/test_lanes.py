"""How neighbours in a block of threads agree: by subgroup, by warp, alone. And attention by each of them."""

import os

import numpy as np
import pytest

import tikv
from tikv import launch, reference, runtime

pytestmark = pytest.mark.archs("vulkan", "metal", "cuda")


@pytest.fixture
def lanes(arch):
    from tikv.kernels import lanes

    return lanes


def tried(lanes, way):
    """What a trial of a way leaves."""
    live = runtime.current()
    found = np.zeros(lanes.SELF_TEST_ROWS * lanes.BLOCK, np.float32)
    kernel = launch.kernel(live, lanes.make_self_test, way)
    with live.compiling(kernel.fast_math):
        kernel.function(found)
    return found


def test_the_parties_are_a_partition_of_the_block(arch, lanes):
    """For every way that the back end has."""
    for way in (lanes.WARP if arch == "cuda" else lanes.SUBGROUP, lanes.SINGLE):
        assert lanes.self_test_passed(tried(lanes, way)), way


def test_a_driver_whose_subgroups_are_wrong_is_found_out(arch, lanes):
    """Each number of a trial matters."""
    found = tried(lanes, lanes.SINGLE)
    for n in range(lanes.SELF_TEST_ROWS):
        wrong = found.copy()
        wrong[n * lanes.BLOCK + 37] += 1
        assert not lanes.self_test_passed(wrong), n


def check(width=64, group=3, keys=200, dtype=np.float16):
    """Decode attention over a few keys against the oracle."""
    rng = np.random.default_rng(5)
    q = rng.standard_normal((1, group, width)).astype(np.float32)
    k, v = (rng.standard_normal((1, 1, keys + 3, width)).astype(dtype) for _ in "kv")
    k[:, :, keys:], v[:, :, keys:] = np.nan, np.nan
    got = np.asarray(tikv.decode_attention(q, k, v, keys))
    for h in range(group):
        want, _ = reference.attention(q[0, h], k[0, 0, :keys], v[0, 0, :keys], scale=width**-0.5)
        np.testing.assert_allclose(got[0, h], want, atol=1e-5)


@pytest.mark.archs("vulkan", "metal")
def test_attention_without_subgroups(arch, no_plans, lanes, monkeypatch):
    """As on a device that has none."""
    live = runtime.current()
    monkeypatch.setattr(live, "why_no_subgroups", "as on a device that has none")
    check()
    check(width=6, group=1)
    assert any(lanes.SINGLE in kernel.choices for kernel in live.kernels.values())


NARROW = """
import sys
import numpy as np
sys.path.insert(0, {tests!r})
import test_lanes, tikv
from tikv import launch
from tikv.kernels import lanes
live = tikv.init(arch="vulkan")
assert not launch.why_no_subgroups(live)
print(int(test_lanes.tried(lanes, lanes.SUBGROUP)[lanes.BLOCK]))
test_lanes.check()
test_lanes.check(width=200, group=2, keys=130, dtype=np.float32)
"""


@pytest.mark.archs("vulkan")
def test_attention_by_subgroups_of_another_width(arch, python):
    """Mesa's lavapipe makes its subgroups as wide as it is told; in a process of its own, since it reads that once."""
    if "llvmpipe" not in runtime.device_name("vulkan"):
        pytest.skip("only a software driver can be told how wide its subgroups are")
    options = {
        "LP_NATIVE_VECTOR_WIDTH": "128",
        "MESA_SHADER_CACHE_DISABLE": "true",  # it would bring back kernels of the other width
    }
    script = NARROW.format(tests=os.path.dirname(__file__))
    assert python(script, **options).stdout.split()[-1] == "4"
