"""Entries of a launch's vectors by name."""

from typing import NamedTuple

import numpy as np
import oracle
import pytest

import tikv
from tikv import launch, runtime
from tikv.arrays import CacheArray, runtime_of, to_device
from tikv.kernels import advance
from tikv.launch import vectors
from tikv.runtime.cache import BoundedCache


class Step(NamedTuple):
    """The numbers of `kernels.advance`."""

    first: int
    count: int
    tokens: int


class Place(NamedTuple):
    step: int
    first: int


def test_vectors_are_joined_with_their_names():
    both = launch.joined(Step(1, 2, 3), (7, 8), Place(4, 5))
    assert both == (1, 2, 3, 7, 8, 4, 5)
    again = both._make(range(7))
    assert again == (0, 1, 2, 3, 4, 5, 6)
    for vector in (both, again, launch.joined(both)):
        places = vectors.places_of(vectors.fields_of([0, vector], [False, False]))
        assert places == {"count": (1, 1), "tokens": (1, 2), "step": (1, 5)}


def test_names_of_several_arguments():
    given = [Step(1, 2, 3), (4, 5), Place(6, 7), Place(0, 0)]
    places = vectors.places_of(vectors.fields_of(given, [False, False, False, True]))
    assert places == {"count": (0, 1), "tokens": (0, 2), "step": (2, 0)}, "vectors of float32 have no such entries"


def bind(live, arch, *numbers):
    """The kernel that moves positions on, over four of them."""
    kernel = launch.kernel(live, advance.make_advance, live.kernel_style)
    positions = oracle.place(np.arange(4), arch)
    return positions, kernel.bind(4, tikv.arrays.view(positions, "positions", "example"), *numbers)


@pytest.fixture(params=["direct", "public"])
def route(request):
    launch.choose_launcher(request.param)
    yield
    launch.choose_launcher(None)


def test_a_launch_takes_entries_by_name(arch, route):
    live = runtime_of()
    positions, bound = bind(live, arch, Step(first=0, count=4, tokens=1))
    bound.launch()
    bound.set("tokens", 10)
    bound.launch()
    put = bound.setter("tokens")
    for tokens in (100, 1000):
        put(tokens)
        bound.launch()
    assert oracle.to_numpy(positions).tolist() == [1111, 1112, 1113, 1114]


def test_a_name_that_is_not_there_is_an_error_of_ours(arch):
    live = runtime_of()
    _, bound = bind(live, arch, Step(0, 4, 1))
    for use in (lambda: bound.set("slots", 1), lambda: bound.setter("slots")):
        with pytest.raises(KeyError, match=r"'slots' is not the name of exactly one entry.*first, count, tokens"):
            use()
    _, bound = bind(live, arch, (0, 4, 1))
    with pytest.raises(KeyError, match="such names: none"):
        bound.set("tokens", 1)


def test_a_recorded_launch_knows_its_names(arch):
    live = runtime_of()
    with launch.recording(live, {}) as recorded:
        positions, bound = bind(live, arch, Step(0, 4, 1))
        bound.setter("tokens")(7)
        bound.launch()
    (found,) = recorded
    assert found.named == {"first": (1, 0), "count": (1, 1), "tokens": (1, 2)}
    assert found.arguments[1] == Step(0, 4, 7)
    again = found.kernel.bind(found.iterations, *found.arguments)
    again.set("tokens", 5)
    again.launch()
    assert oracle.to_numpy(positions).tolist() == [5, 6, 7, 8]


def test_a_plan_is_recorded_as_often_as_it_runs(arch, rng):
    """Two copies of one form, of other arrays and to another position; what is kept of them has no array."""
    live, plans = runtime_of(), BoundedCache()
    hosts = rng.standard_normal((2, 2, 1, 16)).astype(np.float32), np.zeros((2, 1, 6, 16), np.float32)
    new, caches = ([CacheArray(to_device(a, live), live) for a in pair] for pair in hosts)  # which are aligned alike
    with launch.recording(live, plans) as recorded:
        for i, position in enumerate((1, 3)):
            tikv.copy(new[i], caches[i], position=position)
    (plan,) = plans.values()
    assert plan.launches is None
    assert len(recorded) == 2
    for found in recorded:
        found.kernel.bind(found.iterations, *found.arguments).launch()
    for k, want, cache, position in zip(*hosts, caches, (1, 3), strict=True):
        want[0, position : position + 2] = k[:, 0]
        oracle.assert_same_bits(cache, want)


@pytest.mark.archs("cpu")
def test_numbers_in_memory_of_the_launch_go_by_name(arch):
    """On CPU a kernel may take all its numbers in one array."""
    caches = [np.zeros((1, 4, 2), np.float32) for _ in "ab"]
    bound = None
    original = launch.Kernel.bind

    def bind(self, iterations, *arguments):
        nonlocal bound
        bound = original(self, iterations, *arguments)
        return bound

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch.Kernel, "bind", bind)
        runtime_of().plans.clear()
        tikv.copy(np.ones((1, 1, 2), np.float32), caches[0], position=0)
    bound.setter("dst_position")(2)
    bound.launch()
    assert caches[0][0, :, 0].tolist() == [1, 0, 1, 0]


@pytest.mark.archs("vulkan", "metal")
def test_a_taichi_graph_takes_entries_by_name(arch):
    live = runtime_of()
    if not live.engine.has_graphs:
        pytest.skip(f"{live.engine.title} has no graphs")
    kernel = launch.kernel(live, advance.make_advance, live.kernel_style)
    positions = runtime.ti.ndarray(runtime.ti.i64, 4)
    positions.from_numpy(np.arange(4))
    graph = launch.TaichiGraph([(kernel, ["p", Step(0, 4, 1)])], {"p": positions})
    graph.launch()
    graph.setter(0, "tokens")(10)
    graph.launch()
    assert positions.to_numpy().tolist() == [11, 12, 13, 14]
    with pytest.raises(KeyError, match="'slots'"):
        graph.setter(0, "slots")
