"""The map from positions to slots: what it says is what a list of tokens per slot says."""

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")

from tikv.integrations.transformers.memory.slot_map import SlotMap

pytestmark = pytest.mark.archs("cpu")


def written(end, sinks, ring, start):
    """The position in each slot after positions up to `end` were written one by one."""
    slots = [-1] * (sinks + ring)
    for position in range(start, end):
        token = position - start
        slots[token if token < sinks else sinks + (token - sinks) % ring] = position
    return slots


@pytest.mark.parametrize("sinks", [0, 2])
@pytest.mark.parametrize("starts", [None, (0, 3, 9)])
@pytest.mark.parametrize("end", [0, 1, 4, 5, 6, 11, 12])
def test_positions_are_those_that_were_written(arch, sinks, starts, end):
    ring = 4
    found = SlotMap(end, max(sinks, end - ring), sinks, ring, starts)
    rows = [written(end, sinks, ring, start) for start in starts or (0,)]
    assert np.atleast_2d(found.positions()).tolist() == [row[: found.used] for row in rows]
    assert all(slot == -1 for row in rows for slot in row[found.used :])


@pytest.mark.parametrize("starts", [None, (0, 3, 9)])
@pytest.mark.parametrize("end", [7, 11, 12])
@pytest.mark.parametrize("dropped", [0, 1, 3])
def test_tokens_move_from_map_to_map(arch, starts, end, dropped):
    """Whatever is held, in temporal order or in rings of different sizes."""
    first = max(2, end - 4) + dropped
    maps = [SlotMap(end, first, 2, ring, starts) for ring in (0, 4, 7)]
    for before in maps:
        for after in maps:
            moved = np.take_along_axis(np.atleast_2d(before.positions()), np.atleast_2d(before.sources(after)), axis=1)
            want = np.atleast_2d(after.positions())
            assert (moved[want >= 0] == want[want >= 0]).all()
