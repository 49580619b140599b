"""`tikv doctor --report FILE`: checks, trials and benches of a machine, in one file that its owner can send.

Each back end does its work in processes of its own, so that a driver that crashes only costs a line of the report.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

from tikv.tools import bench, doctor, support

FORM = 1  # the version of the file; it grows when readers of older versions would misread it
BENCH_SECONDS = 60.0  # for each back end

Step = Callable[[str, int], None]


def steps(archs: tuple[str, ...]) -> int:
    """The number of steps of `report`: a check, the trials and the benches of each back end."""
    return len(archs) * (1 + support.trials() + len(bench.CASES))


def report(
    archs: tuple[str, ...], seconds: float = BENCH_SECONDS, step: Step = lambda now, done: None
) -> dict[str, Any]:
    """Check, try and time each back end; if it is interrupted, it returns what is done so far.

    Args:
        archs: the back ends.
        seconds: the time for the benches of each back end that works.
        step: called with the current step, and how many of `steps` are done.

    Returns:
        A dict for JSON: ``form``, ``stopped`` (whether Ctrl-C ended it), ``info``, ``checks``, ``trials``, ``benches``.
    """
    results: dict[str, Any] = {
        "form": FORM, "stopped": False, "info": doctor.info(), "checks": [], "trials": [], "benches": [],
    }  # fmt: skip
    try:
        for number, arch in enumerate(archs):
            begin = number * steps(archs) // len(archs)
            step(f"{arch}: checks", begin)
            check = doctor.check(arch)
            results["checks"].append(vars(check))
            if check.status == "absent":
                continue

            def tried(trial: doctor.Trial, begin: int = begin) -> None:
                results["trials"].append(vars(trial))
                step(f"{trial.arch}: {trial.operation} {trial.dtype}", begin + support.over_with(trial))

            doctor.support((arch,), tried)
            step(f"{arch}: benches", begin + 1 + support.trials())
            results["benches"].append({"arch": arch, **_benched(arch, seconds)})
        step("done", steps(archs))
    except KeyboardInterrupt:
        results["stopped"] = True
    return results


def _benched(arch: str, seconds: float) -> dict[str, Any]:
    """``machine`` and ``rows`` of `tikv bench`, or ``error``."""
    command = [sys.executable, "-m", "tikv", "bench", "--arch", arch, "--seconds", str(seconds), "--json"]
    child = subprocess.run(command, capture_output=True, text=True, check=False)
    if child.returncode:
        last = (child.stderr.strip().splitlines() or ["no message"])[-1]
        return {"error": f"exit status {child.returncode}: {last}"}
    results: dict[str, Any] = json.loads(child.stdout)
    return results


def summary(results: dict[str, Any]) -> list[tuple[str, str, str, str]]:
    """A row for each back end: its check, its trials counted by status, its benches."""
    rows = []
    for check in results["checks"]:
        arch = check["arch"]
        trials = Counter(trial["status"] for trial in results["trials"] if trial["arch"] == arch)
        benches = [entry for entry in results["benches"] if entry["arch"] == arch]
        timed = "".join(entry.get("error") or f"{len(entry['rows'])} cases" for entry in benches)
        rows.append((arch, check["status"], ", ".join(f"{n} {status}" for status, n in trials.items()), timed))
    return rows


def exit_status(results: dict[str, Any]) -> int:
    """0 if the back end that "auto" would take passes its check, and nothing failed."""
    broken = any(trial["status"] == doctor.FAILED for trial in results["trials"])
    broken |= any("error" in entry for entry in results["benches"])
    return int(broken) or doctor.exit_status([doctor.Check(**check) for check in results["checks"]])
