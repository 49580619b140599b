"""The SPIR-V that Metal's source of every kernel is made from: `python metal_source.py FOLDER [GROUP ...]`.

The kernels are those that the calls of `metal_calls` would launch on Vulkan, where the same source runs. Beside the
module lies kernels.json, which has of each kernel its factory and its name.
"""

import json
import pathlib
import sys

import metal_calls
import numpy as np

import tikv
from tikv import launch
from tikv.launch import ahead


class Unlaunched(launch.Bound):
    """A kernel bound to arguments as if it were launched: what is wanted is its source."""

    def launch(self) -> None:
        pass


def main(folder: pathlib.Path, groups: list[str]) -> None:
    live = tikv.init(arch="vulkan")
    launch.Kernel.bind = lambda self, iterations, *arguments: Unlaunched(self, iterations, arguments)
    for name in groups:
        for _ in metal_calls.GROUPS[name](np.zeros):
            pass
    folder.mkdir(exist_ok=True)
    ahead.save(list(live.kernels.values()), folder)
    facts = [{"factory": kernel.factory.__name__, "name": kernel.name} for kernel in live.kernels.values()]
    (folder / "kernels.json").write_text(json.dumps(facts), encoding="utf-8")


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]), sys.argv[2:] or list(metal_calls.GROUPS))
