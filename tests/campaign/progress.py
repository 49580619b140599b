"""How far a part of the campaign is: what it has done, what failed, and when it has to end."""

import dataclasses
import json
import os
import pathlib
import sys
import time
from collections import Counter

MOST_FAILURES = 10  # then a part ends: what follows would be the same again


@dataclasses.dataclass
class Settings:
    """What was asked for on the command line.

    Attributes:
        arch: back end.
        seed: of all random choices.
        seconds: time of each part.
        count: goal of each part instead of its own; None for that.
        only: number of the one thing to do again, as a failure names it; None for all.
        folder: where files may be made.
        quiet: print no progress.
        facts: file in which a process of several says how far it is; None for none.
    """

    arch: str
    seed: int
    seconds: float
    count: int | None
    only: int | None
    folder: pathlib.Path
    quiet: bool = False
    facts: pathlib.Path | None = None


class Progress:
    """Counts of one part, told at most once a second.

    Args:
        settings: the campaign's.
        part: its name.
        goal: how much there is to do, unless the settings say otherwise.
        unit: what is counted, in the plural.
    """

    def __init__(self, settings: Settings, part: str, goal: int, unit: str):
        self.settings, self.part, self.unit = settings, part, unit
        self.goal = goal if settings.count is None else settings.count
        self.done, self.failures, self.remarks = 0, 0, ""
        self.kinds: Counter[str] = Counter()  # how often each kind of what is counted was done, if a part says so
        self.begin = self.told = time.perf_counter()
        self.ended: float | None = None

    @property
    def seconds(self) -> float:
        return (self.ended or time.perf_counter()) - self.begin

    @property
    def over(self) -> bool:
        return self.done >= self.goal or self.failures >= MOST_FAILURES or self.seconds >= self.settings.seconds

    def count(self, number: int = 1) -> None:
        """Count what was done, and say how far this is when a second has passed."""
        self.done += number
        now = time.perf_counter()
        if now - self.told < 1:
            return
        self.told = now
        self.write_facts()
        if not self.settings.quiet:
            rate = self.done / self.seconds
            left = min(self.settings.seconds - self.seconds, (self.goal - self.done) / rate if rate else 0)
            print(
                f"{self.part}: {self.done} of {self.goal} {self.unit}, {self.failures} failures, {rate:.4g}/s, "
                f"{max(0, left):.0f} s left",
                flush=True,
            )

    def fail(self, number: int, what: str, error: BaseException | str) -> None:
        """Count a failure, and print how to have it again."""
        self.failures += 1
        named = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
        again = f"--arch {self.settings.arch} --seed {self.settings.seed} --only {number} {self.part}"
        print(
            f"FAILURE in {self.part}, number {number} of seed {self.settings.seed} ({what}): {named}\n"
            f"  again: python tests/campaign/run.py {again}",
            file=sys.stderr,
            flush=True,
        )

    def end(self) -> "Progress":
        """Stop the clock."""
        self.ended = time.perf_counter()
        self.write_facts()
        return self

    def write_facts(self) -> None:
        """Say in the file of the settings how far this is; the file is whole at any moment."""
        if self.settings.facts is not None:
            facts = {"done": self.done, "failures": self.failures, "remarks": self.remarks, "kinds": self.kinds}
            unfinished = self.settings.facts.with_suffix(".new")
            unfinished.write_text(json.dumps(facts), encoding="utf-8")
            os.replace(unfinished, self.settings.facts)
