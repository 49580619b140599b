"""Where a rank stores the tokens of a cache that several ranks share, for positions in device memory."""

from typing import NamedTuple

from tikv.kernels.address import index_array
from tikv.kernels.lanes import make_loop
from tikv.runtime import ti


class LocalPositionsParams(NamedTuple):
    """Numbers of a launch: positions, how they lie, and how tokens are sharded."""

    items: int = 0
    step: int = 1  # between two positions
    first: int = 0
    out_first: int = 0
    rank: int = 0
    world: int = 1
    interleave: int = 1


P = LocalPositionsParams(*range(len(LocalPositionsParams._fields)))
PARAMS = ti.types.vector(len(P), ti.i32)


def make_local_positions(style, bits, counts):
    """local_positions(positions, out, params): the rank's tokens before each position, or, not `counts`, its own token.

    A token that lies on another rank, and a negative position, are -1.
    """
    POSITIONS, OUT = index_array(bits), ti.types.ndarray(dtype=ti.i32, ndim=1)

    @ti.func
    def local_position(i, arrays: ti.template(), params):
        positions, out = ti.static(arrays)
        position = ti.max(ti.cast(positions[params[P.first] + i * params[P.step]], ti.i64), ti.i64(-1))
        size = ti.cast(params[P.interleave], ti.i64)
        local = ti.i64(-1)
        if position >= 0:
            rounds, rest = position // (size * params[P.world]), position % (size * params[P.world])
            inside = rest - size * params[P.rank]
            if ti.static(counts):
                local = rounds * size + ti.min(ti.max(inside, ti.i64(0)), size)
            elif inside >= 0 and inside < size:
                local = rounds * size + inside
        elif ti.static(counts):
            local = ti.i64(0)
        out[params[P.out_first] + i] = ti.cast(local, ti.i32)

    loop = make_loop(style, True, local_position, P.items)

    @ti.kernel
    def local_positions(positions: POSITIONS, out: OUT, params: PARAMS):
        loop(positions, params, ((positions, out), params))

    return local_positions
