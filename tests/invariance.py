"""What tests of ``tikv.init(invariant=True)`` share: the setting for a test, and the comparison of bits."""

import contextlib

import numpy as np
import oracle

from tikv import runtime
from tikv.ops.attention import invariance


@contextlib.contextmanager
def invariant(keys=None):
    """As after ``tikv.init(invariant=True)``, in the runtime that all tests share; splits of so many keys if given."""
    live = runtime.current()
    of_arch = invariance.SPLIT_KEYS[live.arch]
    live.plans.clear()
    live.invariant, invariance.SPLIT_KEYS[live.arch] = True, keys or of_arch
    try:
        yield live
    finally:
        live.invariant, invariance.SPLIT_KEYS[live.arch] = False, of_arch
        live.plans.clear()


def same(got, want, what=""):
    """Two results, or tuples of them, have the same bits; a NaN is any NaN."""
    if isinstance(got, tuple):
        for a, b in zip(got, want, strict=True):
            same(a, b, what)
        return
    a, b = (np.ascontiguousarray(oracle.to_numpy(x)) for x in (got, want))
    oracle.assert_same_bits(a, b, what=what, any_nan=True)
