"""Kernels of several real functions are found again in the engine's cache on disk, in every process."""

import itertools

import numpy as np

import tikv
from tikv import runtime
from tikv.runtime import real_functions

ATTEND = """
import sys
import numpy as np, tikv
tikv.init(arch=sys.argv[1])
before = [bytearray(n) for n in map(int, sys.argv[2:])]  # memory lies elsewhere in each process
rows, lens = np.ones((2, 1, 2, 8, 32), np.float16), np.array([8], np.int32)
assert tikv.decode_attention(np.zeros((1, 4, 32), np.float16), *rows, lens).all()
"""


def test_attention_is_compiled_once_for_all_processes(arch, tmp_path, python):
    cache = {runtime.engine_in_use().cache_variable: str(tmp_path)}
    found = []
    for sizes in ((), ("100", "500", "700"), ("3000", "600", "600", "600")):
        python(ATTEND, arch, *sizes, **cache)
        found.append(sorted(path.name for path in tmp_path.rglob("*") if path.is_file()))
    assert len(found[0]) > 1
    assert found[1] == found[2] == found[0]


class Program:
    """Makes objects at addresses of no order, as an engine's program does."""

    def __init__(self, rng):
        self.places = list(rng.permutation(100_000))

    def create(self, key):
        return int(self.places.pop()), key


def test_a_kernel_takes_them_by_ascending_address(rng):
    functions = real_functions.RealFunctions(Program.create, lambda *key: key, lambda function: function[0])
    program = Program(rng)
    taken = []
    for count in (1, 20, 32, 5, 31, 32):
        functions.begin_kernel(program)
        kernel = [functions.take(program, ("name", number, 0)) for number in range(count)]
        assert kernel == sorted(kernel)
        taken += kernel
    assert len({key for _, key in taken}) == len(taken) == len({place for place, _ in taken})
    for _ in range(100):  # more than are ready: then as the engine does it
        functions.take(program, ("name", 0, 0))


def test_the_caller_has_real_functions_too(arch, rng):
    """The engine knows functions by numbers, and a caller's kernel may come before ours or after them."""
    for start in range(2):
        program = runtime.current().program
        for number in range(100 * start, 100 * start + 100):
            program.create_function(runtime.engine_in_use().core.FunctionKey("a caller's", number, 0))
        rows, cache = rng.standard_normal((2, 1, 8 + 8 * start)).astype(np.float32), np.zeros((1, 4, 8 + 8 * start))
        cache = cache.astype(np.float32)
        tikv.copy(rows, cache, position=1)
        assert (cache[0, 1:3] == rows[:, 0]).all()


def test_addresses_are_those_of_the_objects_of_the_engine(arch):
    """They differ, and functions that were made one after another lie near each other."""
    program = runtime.current().program
    key = runtime.engine_in_use().core.FunctionKey
    made = [program.create_function(key("test_addresses", number, -2)) for number in range(100)]
    places = sorted(map(runtime.engine_in_use().address_of, made))
    assert len(set(places)) == 100
    assert places[0] > 1 << 16
    assert sorted(b - a for a, b in itertools.pairwise(places))[50] < 1 << 24, "half of them lie in one heap"
