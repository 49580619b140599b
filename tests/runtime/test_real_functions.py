"""Kernels of several real functions are found again in Taichi's cache on disk, in every process."""

import itertools
import os
import subprocess
import sys

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


def test_attention_is_compiled_once_for_all_processes(arch, tmp_path):
    environment = {**os.environ, "TI_OFFLINE_CACHE_FILE_PATH": str(tmp_path)}
    found = []
    for sizes in ((), ("100", "500", "700"), ("3000", "600", "600", "600")):
        subprocess.run([sys.executable, "-c", ATTEND, arch, *sizes], env=environment, check=True, timeout=300)
        found.append(sorted(path.name for path in tmp_path.iterdir()))
    assert len(found[0]) > 1
    assert found[1] == found[2] == found[0]


class Program:
    """Makes objects at addresses of no order, as Taichi's program does."""

    def __init__(self, rng):
        self.places = list(rng.permutation(100_000))

    def create(self, key):
        return int(self.places.pop()), key


def test_a_kernel_takes_them_by_ascending_address(rng, monkeypatch):
    monkeypatch.setattr(real_functions, "_address", lambda function: function[0])
    functions, program = real_functions.RealFunctions(Program.create, lambda *key: key), Program(rng)
    taken = []
    for count in (1, 20, 32, 5, 31, 32):
        functions.begin_kernel(program)
        kernel = [functions.take(program, ("name", number, 0)) for number in range(count)]
        assert kernel == sorted(kernel)
        taken += kernel
    assert len({key for _, key in taken}) == len(taken) == len({place for place, _ in taken})
    for _ in range(100):  # more than are ready: then as Taichi does it
        functions.take(program, ("name", 0, 0))


def test_addresses_are_those_of_the_objects_of_taichi(arch):
    """They differ, and functions that were made one after another lie near each other."""
    program = runtime.current().program
    key = runtime.ti.lang.misc._ti_core.FunctionKey
    made = [program.create_function(key("test_addresses", number, -2)) for number in range(100)]
    places = sorted(map(real_functions._address, made))
    assert len(set(places)) == 100
    assert places[0] > 1 << 16
    assert sorted(b - a for a, b in itertools.pairwise(places))[50] < 1 << 16
