"""What every kernel's Metal source computes beside Taichi's CPU back end, on random numbers.

`python metal_comparison.py SPIRV LIBRARIES GROUP OPTIONS ...`: the folder that metal_source.py filled with the kernels
of a group of calls, a folder for compiled code, the group, and each `Options` to run it with, as JSON. Prints for each
of these a line of JSON: the kernels that were launched, and what differs.
"""

import json
import pathlib
import sys

import metal_calls
import numpy as np
import oracle
from metal_on_cpu import Options, back_end, taichi_source

import tikv
from tikv.launch import subgroups

# Each back end is at most so far from the truth, over values around 1: as in tests/ops/test_attention.py.
TOLERANCE = {"float32": 1e-5, "float16": 2.0**-11 + 1e-5, "bfloat16": 2.0**-8 + 1e-5}


def random_values():
    """A function of shape and dtype: ordinary numbers, the same ones in the same order each time."""
    rng = np.random.default_rng(0)

    def values(shape, dtype):
        dtype = np.dtype(dtype)
        if dtype == np.int8:
            return rng.integers(-127, 128, shape).astype(dtype)
        return rng.standard_normal(shape).astype(dtype)

    return values


def called(arch, group):
    """[(call, its arrays on the host)] of a group of calls on a back end."""
    tikv.init(arch=arch)
    return [
        (name, [np.array(oracle.to_numpy(array)) for array in arrays])
        for name, arrays in metal_calls.GROUPS[group](random_values())
    ]


def difference(got, want, is_exact):
    """What is wrong with an array, or None."""
    if is_exact or got.dtype.name not in TOLERANCE:
        try:
            oracle.assert_same_bits(got, want)
        except AssertionError as error:
            return str(error)
        return None
    dtype = got.dtype.name
    got, want = got.astype(np.float64), want.astype(np.float64)
    error = np.abs(got - want).max() / max(1.0, np.abs(want).max())
    return None if error <= 2 * TOLERANCE[dtype] else f"differs by {error:.2e} > {2 * TOLERANCE[dtype]:.2e}"


def main(spirv, libraries, group, every):
    names = [kernel["name"] for kernel in json.loads((spirv / "kernels.json").read_text(encoding="utf-8"))]
    known = dict(zip(names, taichi_source.sources_in(spirv), strict=True))
    here = back_end.BackEnd(Options(), libraries, known)
    back_end.install(here, "cpu")
    want = called("cpu", group)
    for here.options in every:
        here.launched.clear()
        subgroups._reasons.clear()  # they are tried out at each width
        got, wrong = called("metal", group), []
        for number, ((call, a), (same_call, b)) in enumerate(zip(got, want, strict=True)):
            assert call == same_call
            for n, (x, y) in enumerate(zip(a, b, strict=True)):
                if found := difference(x, y, not group.startswith("attention")):
                    wrong.append(f"call {number}, {call}, array {n}: {found}")
        print(json.dumps({"launched": here.launched, "calls": len(got), "wrong": wrong}), flush=True)


if __name__ == "__main__":
    main(
        pathlib.Path(sys.argv[1]),
        pathlib.Path(sys.argv[2]),
        sys.argv[3],
        [Options(**json.loads(o)) for o in sys.argv[4:]],
    )
