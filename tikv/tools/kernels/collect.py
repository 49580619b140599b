"""Finds out which kernels forms of calls need, over a driver that does nothing: nothing is compiled for it.

`python -m tikv.tools.kernels.collect FILE` is started by `building`. It reads names of forms from stdin, a line each,
writes a line to stdout after each, and at the end the kernels of all of them to the file.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable, Iterable
from typing import NamedTuple

from tikv import runtime
from tikv.errors import TikvError
from tikv.launch.compilation import CompiledKernel
from tikv.launch.cuda import driver, keys, native
from tikv.tools.kernels.forms import FORMS
from tikv.tools.kernels.stand_in import Needed


class Collected(NamedTuple):
    """The kernels of forms, each once; and forms that a GPU of this capability refuses, with the reason."""

    kernels: list[Needed]
    refused: dict[str, str]


def collected(names: Iterable[str], say: Callable[[str], None]) -> Collected:
    """Make the calls of forms in a runtime on CUDA, and return what they would have compiled."""
    needed: dict[str, Needed] = {}
    refused: dict[str, str] = {}
    forms = {form.name: form for form in FORMS}

    def load(kernel: CompiledKernel) -> native.Native:
        """In place of compiling and loading: remember the kernel, and launch anything."""
        key = keys.made_key_of(kernel.factory, kernel.choices)
        request = pickle.dumps((kernel.factory, kernel.choices))
        needed.setdefault(key, Needed(key, kernel.name, kernel.fast_math, request))
        device = driver.device(kernel.runtime.index)
        offsets, size = native.argument_layout(kernel.words, kernel.lengths)
        return native.Native(device, device.load("", kernel.name), 128, offsets, size, False, kernel.shared_bytes)

    native.load_native = load
    for name in names:
        try:
            forms[name].call()
        except TikvError as error:
            refused[name] = str(error)
        say(name)
    return Collected(list(needed.values()), refused)


def main() -> None:
    """The child process."""
    runtime.init("cuda")
    names = [line.strip() for line in sys.stdin]
    result = collected(names, lambda name: print(name, flush=True))
    with open(sys.argv[1], "wb") as file:
        pickle.dump(result, file)


if __name__ == "__main__":
    from tikv.tools.kernels import collect  # not __main__, whose classes another process cannot unpickle

    collect.main()
