"""Rows of queries rotated in the same way as the keys that they meet: see `kernels.hadamard`."""

from __future__ import annotations

import math

from tikv import launch, runtime
from tikv.arrays import ArrayView
from tikv.formats import block_of
from tikv.ops import checks
from tikv.ops.plan import Launch

SERIAL_NUMBERS = 1 << 14  # on CPU, below this the calling thread finishes before another one wakes


def rotation_launch(live: runtime.Runtime, operation: str, q: ArrayView, to: ArrayView, seed: int) -> Launch:
    """The launch that rotates rows (B, H, D) or (B, H, T, D) of any strides into `to`, contiguous and of that shape.

    Raises:
        CapacityError: an array is larger than 32-bit indices reach.
    """
    from tikv.kernels.hadamard import HELD, TurnParams, make_turn_rows
    from tikv.kernels.lanes import BLOCK

    width, rows = q.shape[-1], math.prod(q.shape[:-1])
    items = rows if live.is_cpu else -(-rows * (width // HELD) // BLOCK) * BLOCK
    checks.countable(items, operation)
    for name, a in (("q", q), ("q, rotated", to)):
        checks.addressable(a, a.dtype.itemsize, live, name, operation)
    serial = live.is_cpu and rows * width < SERIAL_NUMBERS
    n = block_of(width)
    kernel = launch.kernel(live, make_turn_rows, live.kernel_style, serial, q.dtype.short, width, n, seed)
    sequence, head, token = q.strides[0], q.strides[1], q.strides[2] if q.ndim == 4 else 0
    firsts = [a.offset // a.dtype.itemsize for a in (q, to)]
    tokens = q.shape[2] if q.ndim == 4 else 1
    params = TurnParams(items, rows, q.shape[1], tokens, sequence, head, token, *firsts)
    return Launch(kernel.bind(items, q, to, tuple(params)), [q, to])
