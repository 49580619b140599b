"""Builds files of kernels on a machine without a GPU, over a stand-in for NVIDIA's driver."""

from __future__ import annotations

import os
import pathlib
import pickle
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from tikv import runtime
from tikv.errors import ArchError, OptionError
from tikv.launch.cuda import keys, made
from tikv.stores.files import replacing
from tikv.tools.kernels import stand_in
from tikv.tools.kernels.collect import Collected
from tikv.tools.kernels.forms import KernelForm, chosen
from tikv.tools.kernels.stand_in import ENGINE, OPERATION

CAPABILITIES = ((8, 0), (9, 0))
PARTS = 1000  # of the progress that is shown, for each compute capability
_COLLECTING = 50  # of them, until it is known which kernels are needed
Step = Callable[[str, int], None]


class Built(NamedTuple):
    """A file that was written, and what is not in it, with the reason."""

    file: made.MadeFile
    left_out: dict[str, str]


def parse_capability(text: str) -> tuple[int, int]:
    """A compute capability such as 9.0.

    Raises:
        OptionError: it is not written in this way, or is older than kernels of tikv support.
    """
    match = re.fullmatch(r"(\d+)\.(\d)", text)
    if match is None or int(match[1]) < 6:
        raise OptionError(
            f"{OPERATION}: --capability {text!r} is not a compute capability. Use one such as 8.0 or 9.0."
        )
    return int(match[1]), int(match[2])


def build(
    folder: str | os.PathLike[str],
    capabilities: Sequence[tuple[int, int]] = CAPABILITIES,
    patterns: Sequence[str] = (),
    processes: int | None = None,
    step: Step = lambda now, done: None,
) -> list[Built]:
    """Write a file of kernels for each compute capability into a folder; an old file is replaced in one step.

    Args:
        folder: made if it does not exist.
        capabilities: compute capabilities, as (major, minor). Kernels for 8.0 also serve 8.6 and 8.9.
        patterns: only forms whose names match one of these; all without patterns.
        processes: how many compile at the same time; None for as many as the process may use cores.
        step: called with a text, and how much is done of `PARTS` for each compute capability.

    Raises:
        ArchError: the machine lacks a C compiler, Taichi or cuda-bindings, or does not run Linux.
        OptionError: a pattern matches no form.
        CacheFileError: a file cannot be written.
    """
    forms = chosen(patterns)
    keys.sources()  # read before the kernels are made: if a source changes meanwhile, the file is not used
    stand_in.require_tools()
    target = pathlib.Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    results = []
    with tempfile.TemporaryDirectory(prefix="tikv-build-") as work:
        stand_in.build_driver(pathlib.Path(work))
        for number, capability in enumerate(capabilities):
            title = f"compute capability {capability[0]}.{capability[1]}"
            environment = stand_in.environment_of(pathlib.Path(work), capability)

            def show(now: str, part: int, title: str = title, begin: int = number * PARTS) -> None:
                step(f"{title}, {now}", begin + part)

            collected = collect(pathlib.Path(work) / "kernels.pickle", forms, environment, show)
            count = processes or runtime.usable_cores()
            results.append(write_file(target, capability, forms, collected, count, environment, show))
    return results


def write_file(
    folder: pathlib.Path,
    capability: tuple[int, int],
    forms: Sequence[KernelForm],
    collected: Collected,
    processes: int,
    environment: Mapping[str, str],
    show: Step = lambda now, done: None,
) -> Built:
    """Compile the kernels of forms for a compute capability, and write them to its file in a folder.

    Raises:
        CacheFileError: the file cannot be written.
    """
    texts, failed, count = {}, {}, len(collected.kernels)
    with stand_in.SideBySide(collected.kernels, processes, environment) as answers:
        for number, (kernel, answer) in enumerate(answers):
            if "ptx" in answer:
                texts[kernel.key] = answer["ptx"]
            else:
                failed[kernel.name] = answer["error"]
            show(f"{count:,} kernels: {kernel.name}", _COLLECTING + (PARTS - _COLLECTING) * number // count)
    facts = {
        "tikv": sys.modules["tikv"].__version__,
        "engine": f"{ENGINE.name} {ENGINE.version()}",
        "forms": [form.name for form in forms if form.name not in collected.refused],
    }
    path = folder / f"sm_{capability[0]}{capability[1]}.zip"
    replacing.replace(path, made.packed(capability, texts, facts), OPERATION, path.suffix)
    return Built(made.contents(path), {**collected.refused, **failed})


def collect(
    file: pathlib.Path, forms: Sequence[KernelForm], environment: Mapping[str, str], show: Step = lambda now, done: None
) -> Collected:
    """The kernels that forms need, found out in a process of its own.

    Raises:
        ArchError: the process failed.
    """
    folders = os.pathsep.join(path or os.curdir for path in sys.path)
    with tempfile.TemporaryFile("w+") as errors:
        child = subprocess.Popen(
            [sys.executable, "-m", "tikv.tools.kernels.collect", str(file)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env={**os.environ, "PYTHONPATH": folders, **environment, "TIKV_LAUNCHER": "native"},
        )
        with _ended(child):
            assert child.stdin is not None
            assert child.stdout is not None
            child.stdin.write("".join(f"{form.name}\n" for form in forms))
            child.stdin.close()
            for number, line in enumerate(child.stdout):
                show(f"finding kernels: {line.strip()}", _COLLECTING * min(number, len(forms)) // len(forms))
            if child.wait():
                errors.seek(0)
                last = (errors.read().strip().splitlines() or [f"exit status {child.returncode}"])[-1]
                raise ArchError(
                    f"{OPERATION}: the process that finds out which kernels are needed failed: {last}. Run `python -m "
                    "tikv doctor cpu` to see whether the engine works here."
                )
    with open(file, "rb") as stream:
        result: Collected = pickle.load(stream)
    return result


@contextmanager
def _ended(child: subprocess.Popen[str]) -> Iterator[None]:
    """Within it, a child runs; after it, the child has ended."""
    try:
        yield
    finally:
        if child.poll() is None:
            child.kill()
        child.wait()
        if child.stdout is not None:
            child.stdout.close()
