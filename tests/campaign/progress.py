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
        table: of all parts, told whenever a part says how far it is.
    """

    arch: str
    seed: int
    seconds: float
    count: int | None
    only: int | None
    folder: pathlib.Path
    quiet: bool = False
    facts: pathlib.Path | None = None
    table: "Table | None" = None


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
        self.write()
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
        self.write()
        return self

    def write(self) -> None:
        """Say in the files of the settings how far this is."""
        if self.settings.facts is not None:
            facts = {"done": self.done, "failures": self.failures, "remarks": self.remarks, "kinds": self.kinds}
            write_whole(self.settings.facts, json.dumps(facts))
        if self.settings.table is not None:
            self.settings.table.write()


class Table:
    """What all parts have done until now.

    Args:
        title: its first line.
        path: the file that holds it, from the first second on; None for none.
    """

    def __init__(self, title: str, path: pathlib.Path | None) -> None:
        self.title, self.path = title, path
        self.parts: list[Progress] = []

    def __str__(self) -> str:
        rows = [("part", "done", "goal", "failures", "seconds", "per second", "remarks")]
        for part in self.parts:
            rate = part.done / part.seconds if part.seconds else 0
            facts = [part.done, part.goal, part.failures, f"{part.seconds:.1f}", f"{rate:.4g}"]
            rows.append((part.part, *map(str, facts), part.remarks or part.unit))
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        lines += [
            f"{part.part}: {', '.join(f'{name} {count}' for name, count in part.kinds.most_common())}"
            for part in self.parts
            if part.kinds
        ]
        return "\n".join([self.title, *lines])

    def write(self) -> None:
        if self.path is not None:
            write_whole(self.path, f"{self}\n")


def write_whole(path: pathlib.Path, text: str) -> None:
    """Write a file that is whole at any moment."""
    unfinished = path.with_name(path.name + ".new")
    unfinished.write_text(text, encoding="utf-8")
    os.replace(unfinished, path)
