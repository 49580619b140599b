"""Add weighted rows to other rows: sums of float32 rows, each product and each sum rounded on its own, in order."""

from typing import NamedTuple

from tikv.kernels.attention.parameters import FLOATS
from tikv.kernels.exact import make_product
from tikv.kernels.lanes import make_loop
from tikv.runtime import ti


class MergeParams(NamedTuple):
    """Numbers of a launch: items of work, columns of a row, and first entries."""

    items: int = 0
    width: int = 0
    first: int = 0


P = MergeParams(*range(len(MergeParams._fields)))
PARAMS = ti.types.vector(len(P), ti.i32)
NUMBERS = ti.types.ndarray(dtype=ti.i32, ndim=1)


def make_merge_rows(style, serial):
    """merge_rows(out, rows, targets, starts, sources, weights, params): the sums that rows of `out` become.

    Row r of `out` is row targets[r] of `rows`, plus weights[s] times row sources[s] for each s from starts[r] to
    starts[r + 1]; 0 if targets[r] is negative. `out` is contiguous, and its extent is the items.
    """
    product = make_product(style)

    @ti.func
    def merge_item(i, arrays: ti.template(), params):
        out, rows, targets, starts, sources, weights = ti.static(arrays)
        r, column = i // params[P.width], i % params[P.width]
        target, total = targets[r], ti.f32(0.0)
        if target >= 0:
            total = rows[params[P.first] + target * params[P.width] + column]
            for s in range(starts[r], starts[r + 1]):
                x = rows[params[P.first] + sources[s] * params[P.width] + column]
                total = total + product(weights[s], x, target)
        out[i] = total

    loop = make_loop(style, serial, merge_item, P.items)

    @ti.kernel
    def merge_rows(out: FLOATS, rows: FLOATS, targets: NUMBERS, starts: NUMBERS, sources: NUMBERS, weights: FLOATS,
                   params: PARAMS):  # fmt: skip
        loop(out, params, ((out, rows, targets, starts, sources, weights), params))

    return merge_rows
