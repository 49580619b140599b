"""Advances positions in device memory by the tokens of a step, so that a graph can repeat it without the host."""

from tikv.kernels.lanes import BLOCK
from tikv.runtime import ti

FIRST, COUNT, TOKENS = range(3)  # entries of the vector
NUMBERS = ti.types.vector(3, ti.i32)


def make_advance(style):
    """advance(positions, numbers): adds `TOKENS` to each of `COUNT` int64 positions from entry `FIRST` on."""
    P = ti.types.ndarray(dtype=ti.i64, ndim=1)

    @ti.kernel
    def advance(positions: P, numbers: NUMBERS):
        if ti.static(style == "spirv"):
            ti.loop_config(block_dim=BLOCK)
            for i in range(BLOCK):
                for n in range((numbers[COUNT] - i + BLOCK - 1) // BLOCK):
                    at = numbers[FIRST] + i + n * BLOCK
                    positions[at] = positions[at] + numbers[TOKENS]
        else:
            ti.loop_config(serialize=style == "cpu", block_dim=BLOCK)
            for i in range(positions.shape[0]):
                positions[numbers[FIRST] + i] = positions[numbers[FIRST] + i] + numbers[TOKENS]

    return advance
