"""Where the tokens of a cache that several processes share lie, for positions in device memory."""

from typing import NamedTuple

from tikv.kernels.address import index_array
from tikv.kernels.lanes import make_loop
from tikv.runtime import ti


class DealParams(NamedTuple):
    """Numbers of a launch: positions, how they lie, and how tokens are dealt."""

    items: int = 0
    step: int = 1  # between two positions
    first: int = 0
    out_first: int = 0
    rank: int = 0
    world: int = 1
    interleave: int = 1


P = DealParams(*range(len(DealParams._fields)))
PARAMS = ti.types.vector(len(P), ti.i32)


def make_deal(style, bits, counts):
    """deal(positions, out, params): of each position the rank's tokens before it, or, not `counts`, its own token.

    A token that lies on another rank, and a negative position, are -1.
    """
    POSITIONS, OUT = index_array(bits), ti.types.ndarray(dtype=ti.i32, ndim=1)

    @ti.func
    def deal_position(i, arrays: ti.template(), params):
        positions, out = ti.static(arrays)
        position = ti.max(ti.cast(positions[params[P.first] + i * params[P.step]], ti.i64), ti.i64(-1))
        size = ti.cast(params[P.interleave], ti.i64)
        found = ti.i64(-1)
        if position >= 0:
            rounds, rest = position // (size * params[P.world]), position % (size * params[P.world])
            inside = rest - size * params[P.rank]
            if ti.static(counts):
                found = rounds * size + ti.min(ti.max(inside, ti.i64(0)), size)
            elif inside >= 0 and inside < size:
                found = rounds * size + inside
        elif ti.static(counts):
            found = ti.i64(0)
        out[params[P.out_first] + i] = ti.cast(found, ti.i32)

    loop = make_loop(style, True, deal_position, P.items)

    @ti.kernel
    def deal(positions: POSITIONS, out: OUT, params: PARAMS):
        loop(positions, params, ((positions, out), params))

    return deal
