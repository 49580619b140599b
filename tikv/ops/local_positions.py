"""Positions in device memory, as one rank counts them when tokens are sharded over ranks in blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tikv import launch, runtime
from tikv.arrays import ArrayView
from tikv.ops import checks
from tikv.ops.plan import Launch, Plan


def local_positions(
    live: runtime.Runtime,
    operation: str,
    positions: ArrayView,
    out: ArrayView,
    sharding: tuple[int, int, int],
    counts: bool,
) -> None:
    """For each position, how many of this rank's tokens precede it (`counts`), or the index of its token here, else -1.

    One launch.

    Args:
        live: the runtime.
        operation: the operation's name, for messages.
        positions: (B,) int32 or int64.
        out: (B,) int32.
        sharding: rank, number of ranks, tokens per block.
        counts: whether to count tokens, rather than give indices.

    Raises:
        ShapeError, DTypeError, ArchError: `positions` are not valid, or do not fit `out`.
    """
    key = ("local_positions", positions.key, out.key, sharding, counts)
    plan: Any = live.plans.get(key)
    if plan is None:
        checks.on_device([("positions", positions)], live, operation)
        checks.indices(positions, "positions", operation)
        checks.rank(positions, (1,), "positions", "(batch,)", operation)
        checks.extent(positions.shape[0], out.shape[0], "the number of positions", operation, "one per sequence")
        plan = live.plans.keep(key, _plan(live, operation, sharding, counts))
    plan.run([positions, out])


def _plan(live: runtime.Runtime, operation: str, sharding: tuple[int, int, int], counts: bool) -> Plan:
    def bind(arrays: Sequence[ArrayView]) -> list[Launch]:
        from tikv.kernels.local_positions import LocalPositionsParams, make_local_positions

        positions, out = arrays
        firsts = positions.offset // positions.dtype.itemsize, out.offset // 4
        numbers = LocalPositionsParams(positions.shape[0], positions.strides[0], *firsts, *sharding)
        kernel = launch.kernel(live, make_local_positions, live.kernel_style, positions.dtype.itemsize * 8, counts)
        return [Launch(kernel.bind(positions.shape[0], *arrays, tuple(numbers)), arrays)]

    return Plan(live, operation, ("positions", "out"), (False, True), bind)
