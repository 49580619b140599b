"""The campaign in several processes: each does its share with a seed of its own, one table adds them up."""

import argparse
import contextlib
import json
import pathlib
import subprocess
import sys
import tempfile
import time
from collections import Counter

from campaign.progress import Progress, Settings, Table

SCRIPT = pathlib.Path(__file__).with_name("run.py")
SEEDS = 1000  # process i of seed n has seed n * SEEDS + i


def run(given: argparse.Namespace, parts: dict[str, tuple[int, str]], table: Table) -> None:
    """Run `parts`, name to goal and unit, one after the other, each in `given.processes` processes at once."""
    for part, (goal, unit) in parts.items():
        settings = Settings(
            given.arch, given.seed, given.seconds, given.count, None, pathlib.Path(), given.quiet, table=table
        )
        progress = Progress(settings, part, goal, unit)
        if unit == "seconds":  # time is not divided: every process works as long
            progress.goal *= given.processes
        table.parts.append(progress)
        try:
            run_part(given, progress)
        finally:
            progress.end()


def run_part(given: argparse.Namespace, progress: Progress) -> None:
    with tempfile.TemporaryDirectory(prefix="tikv-campaign-") as folder, contextlib.ExitStack() as ending:
        facts = [pathlib.Path(folder) / f"{i}.json" for i in range(given.processes)]
        children = []
        for i, path in enumerate(facts):
            command = [
                sys.executable, str(SCRIPT), "--arch", given.arch, "--seconds", str(given.seconds), "--quiet",
                "--seed", str(given.seed * SEEDS + i), "--count", str(-(-progress.goal // given.processes)),
                "--facts", str(path), progress.part,
            ]  # fmt: skip
            child = subprocess.Popen(command, stdout=subprocess.DEVNULL)
            ending.callback(end, child)
            children.append(child)
        try:
            while any(child.poll() is None for child in children):
                time.sleep(0.2)
                add_up(progress, facts)
        finally:
            ending.close()
            add_up(progress, facts)
        for i, (child, path) in enumerate(zip(children, facts, strict=True)):
            if child.returncode not in (0, 1) or not path.exists():
                progress.failures += 1
                print(f"FAILURE in {progress.part}: process {i} ended with {child.returncode}", file=sys.stderr)
        if progress.unit == "seconds":
            progress.remarks = f"{progress.remarks}; time of all processes"


def end(child: subprocess.Popen) -> None:
    if child.poll() is None:
        child.terminate()
    child.wait()


def add_up(progress: Progress, facts: list[pathlib.Path]) -> None:
    """What all processes have told until now."""
    found = [json.loads(path.read_text(encoding="utf-8")) for path in facts if path.exists()]
    progress.failures = sum(each["failures"] for each in found)
    progress.kinds = sum((Counter(each["kinds"]) for each in found), Counter())
    remarks = {each["remarks"] for each in found if each["remarks"]}
    progress.remarks = f"{progress.unit}, {len(facts)} processes" + (f"; one: {max(remarks)}" if remarks else "")
    progress.done = 0
    progress.count(sum(each["done"] for each in found))
