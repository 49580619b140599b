"""Rows of queries rotated in the same way as the keys that they meet: see `kernels.hadamard`."""

from __future__ import annotations

import math

from tikv import launch, runtime
from tikv.arrays import ArrayView
from tikv.formats import block_of
from tikv.ops import checks
from tikv.ops.plan import Launch

SERIAL_NUMBERS = 1 << 14  # on CPU, below this the calling thread finishes before another one wakes


def rotation_launch(live: runtime.Runtime, operation: str, q: ArrayView, to: ArrayView, seed: int | None) -> Launch:
    """The launch that rotates rows (B, H, D) or (B, H, T, D) of any strides into `to`, contiguous and of that shape.

    Without a seed there are no signs. If `q` has one more axis in front, the rows along it are added up first.

    Raises:
        CapacityError: an array is larger than 32-bit indices reach.
    """
    from tikv.kernels.hadamard import HELD, TurnParams, make_turn_rows
    from tikv.kernels.lanes import BLOCK

    width, rows = to.shape[-1], math.prod(to.shape[:-1])
    terms, term, *strides = (1, 0, *q.strides) if q.ndim == to.ndim else (q.shape[0], *q.strides)
    items = rows if live.is_cpu else -(-rows * (width // HELD) // BLOCK) * BLOCK
    checks.countable(items, operation)
    for name, a in (("q", q), ("q, rotated", to)):
        checks.addressable(a, a.dtype.itemsize, live, name, operation)
    serial = live.is_cpu and rows * width < SERIAL_NUMBERS
    n = block_of(width)
    choices = q.dtype.short, to.dtype.short, width, n, seed, terms > 1
    kernel = launch.kernel(live, make_turn_rows, live.kernel_style, serial, *choices)
    sequence, head, token, tokens = strides[0], strides[1], 0, 1
    if to.ndim == 4:
        token, tokens = strides[2], to.shape[2]
    firsts = [a.offset // a.dtype.itemsize for a in (q, to)]
    params = TurnParams(items, rows, to.shape[1], tokens, sequence, head, token, *firsts, terms, term)
    return Launch(kernel.bind(items, q, to, tuple(params)), [q, to])
