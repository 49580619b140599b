"""Integer divisions by multiplying are those of Python."""

import numpy as np

from tikv import runtime

LARGEST = (1 << 31) - 1
DIVISORS = [1, 2, 3, 7, 10, 64, 641, 8191, 8192, 65537, 10**9 + 7, 1 << 30, LARGEST]


def test_quotients_are_exact(arch, rng):
    from tikv.kernels import address

    ti = runtime.ti

    @ti.kernel
    def kernel(x: ti.types.ndarray(dtype=ti.i32, ndim=1), y: ti.types.ndarray(dtype=ti.i32, ndim=1), by: ti.i32,
               shift: ti.i32):  # fmt: skip
        for i in range(x.shape[0]):
            y[i] = address.divided(x[i], by, shift)

    for divisor in DIVISORS:
        near = (rng.integers(0, LARGEST // divisor + 1, 2000) * divisor)[:, None] + [-1, 0, 1]
        given = np.concatenate([near.ravel(), rng.integers(0, LARGEST, 2000), np.arange(70), LARGEST - np.arange(70)])
        given = given[(given >= 0) & (given <= LARGEST)].astype(np.int32)
        found = np.full_like(given, -1)
        with runtime.current().compiling(False):
            kernel(given, found, *address.inverse_of(divisor))
        np.testing.assert_array_equal(found, given // divisor, err_msg=f"by {divisor}")
