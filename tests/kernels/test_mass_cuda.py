"""What a machine without CUDA can say of the mass's kernel there: the engine takes its source, and so its calls fit."""

import pytest

import tikv
from tikv import launch, runtime
from tikv.kernels.attention.cuda import attend, mass
from tikv.kernels.attention.parameters import Choices

PLAIN = Choices(
    kind="linear", page=0, sinks=False, cache="f16", bits=64, scale="", k_inner=(0, 0), v_inner=(0, 0), query="f16",
    out="f32", width=128, width_v=128, group=4, rows=4, causal=True, masked=False, softcap=False, lens_bits=32,
    table_bits=0,
)  # fmt: skip


@pytest.mark.parametrize("greatest", [False, True])
@pytest.mark.parametrize(
    ("changes", "single"),
    [
        ({}, True),
        ({"kind": "table", "page": 16, "table_bits": 32, "table_by_head": True, "lens_by_head": True, "cache": "i8",
          "scale": "f16", "softcap": True, "masked": True, "rows": 8, "sinks": True}, False),
    ],
)  # fmt: skip
def test_the_engine_takes_the_source(changes, single, greatest):
    tikv.init(arch="cpu")
    live, choices = runtime.current(), PLAIN._replace(**changes)
    if live.engine.title != "Taichi":
        pytest.skip("another engine asks which machine a warp is of")
    shape = attend.shape_of(choices.width, choices.unit, choices.rows, attend.is_long(choices))
    kernel = launch.kernel(live, mass.make_mass_lanes, shape, single, False, greatest, choices)
    with live.lock, live.compiling(kernel.fast_math):
        live.engine.traced(kernel.primal, [kernel._placeholder(i) for i in range(len(kernel.words))])
