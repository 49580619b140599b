"""Run the campaign: python tests/campaign/run.py --help."""

import argparse
import importlib
import os
import pathlib
import sys
import tempfile

os.environ.setdefault("ENABLE_TAICHI_HEADER_PRINT", "0")
os.environ.setdefault("TI_OFFLINE_CACHE_CLEANING_POLICY", "never")
TESTS = pathlib.Path(__file__).resolve().parent.parent
sys.path[0] = str(TESTS)  # modules of this folder are `campaign.NAME`, and hide none of the standard library
sys.path.insert(1, str(TESTS.parent))

from campaign import processes  # noqa: E402
from campaign.progress import Progress, Settings  # noqa: E402

PARTS = {
    "operations": "1,000,000 random calls of stores and functions; all memory compared (on a GPU after a 4th)",
    "compactions": "100,000 random sequences of 12 appends, compactions, trims, reorders, saves and others",
    "summaries": "100,000 random sequences of 12 appends, trims, forks, attention and others, summaries compared",
    "lives": "100,000 whole lives of a TikvCache in tiny models, compared with the models without a cache (CPU)",
    "memory": "1,000,000 appends, trims and resets; the process must not grow",
    "threads": "8 threads on one ring, one store, one pool for 300 seconds (--count: seconds)",
    "files": "3,000 damaged files and 300 crafted ones, whose checksums are right",
    "kills": "200 processes killed while they save; the file is the one before or the one after",
    "reinits": "1,000 starts of the runtime; what was made before is refused afterwards",
}

EPILOG = """
Each part ends at its goal or when its time is over, whichever comes first; the table at the end says how far it came.
Ctrl-C ends the part that runs and prints the table of what was done. Exit status: 0, or 1 after a failure.

A failure names the seed and a number. The same work, alone and in words:
    python tests/campaign/run.py --arch cpu --seed 1 --only 12345 operations
Operations come in rows of 100 on one store: it repeats the row up to that number. Threads, kills and memory depend on
the moment as well; there it begins with the same choices.

examples:
    python tests/campaign/run.py                                 all parts on the CPU, 10 minutes each
    python tests/campaign/run.py --seconds 60 operations files   two of them, a minute each
    python tests/campaign/run.py --arch vulkan --seconds 3600 operations
    python tests/campaign/run.py --count 20 kills
    python tests/campaign/run.py --processes 16                  shared by 16 processes with seeds 1000 to 1015
"""


def parsed(arguments: list[str] | None) -> argparse.Namespace:
    parts = "\n".join(f"    {name:<12}{what}" for name, what in PARTS.items())
    parser = argparse.ArgumentParser(
        prog="tests/campaign/run.py",
        description=f"Random work on tikv against plain models, until a goal or a time is reached.\n\nparts:\n{parts}",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help="parts to run, in this order; none for all")
    parser.add_argument("--arch", default="cpu", choices=("cpu", "vulkan", "cuda", "metal"), help="back end (cpu)")
    parser.add_argument("--seconds", type=float, default=600, metavar="S", help="time of each part (600)")
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="of all random choices (1)")
    parser.add_argument("--count", type=int, metavar="N", help="goal of each part instead of its own")
    parser.add_argument("--only", type=int, metavar="N", help="repeat the one that a failure names; for a single part")
    parser.add_argument("--processes", type=int, default=1, metavar="N", help="that share each part (1)")
    parser.add_argument("--facts", type=pathlib.Path, help=argparse.SUPPRESS)  # of one process among several
    parser.add_argument("--quiet", action="store_true", help="no lines of progress, only failures and the table")
    found = parser.parse_args(arguments)
    if unknown := [part for part in found.parts if part not in PARTS]:
        parser.error(f"unknown part {', '.join(unknown)}; choose from {', '.join(PARTS)}")
    if found.only is not None and len(found.parts) != 1:
        parser.error("--only repeats something of one part: name it")
    if found.processes < 1 or (found.processes > 1 and found.only is not None):
        parser.error("--processes is at least 1; --only repeats something in one process")
    if found.seconds <= 0 or (found.count or 1) <= 0 or (found.only or 0) < 0 or found.seed < 0:
        parser.error("--seconds and --count are more than 0; --only and --seed at least 0")
    return found


def table(done: list[Progress], given: argparse.Namespace) -> str:
    rows = [("part", "done", "goal", "failures", "seconds", "per second", "remarks")]
    for part in done:
        rate = part.done / part.seconds if part.seconds else 0
        facts = [part.done, part.goal, part.failures, f"{part.seconds:.1f}", f"{rate:.4g}", part.remarks or part.unit]
        rows.append((part.part, *map(str, facts)))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    lines += [
        f"{part.part}: {', '.join(f'{name} {count}' for name, count in part.kinds.most_common())}"
        for part in done
        if part.kinds
    ]
    return "\n".join([f"{given.arch}, seed {given.seed}, {os.cpu_count()} CPU cores", *lines])


def main(arguments: list[str] | None = None) -> int:
    given = parsed(arguments)
    names = given.parts or list(PARTS)
    if given.processes > 1:
        parts = {name: importlib.import_module(f"campaign.{name}") for name in names}
        done = processes.run(given, {name: (part.GOAL, part.UNIT) for name, part in parts.items()})
    else:
        done = run_here(given, names)
    if done:
        print(table(done, given))
    return 1 if any(part.failures for part in done) else 0


def run_here(given: argparse.Namespace, names: list[str]) -> list[Progress]:
    """Run parts in this process."""
    import tikv

    done: list[Progress] = []
    with tempfile.TemporaryDirectory(prefix="tikv-campaign-") as folder:
        settings = Settings(
            given.arch, given.seed, given.seconds, given.count, given.only, pathlib.Path(folder), given.quiet,
            given.facts,
        )  # fmt: skip
        tikv.init(arch=given.arch)
        for part in names:
            if stopped_in(importlib.import_module(f"campaign.{part}"), settings, done):
                print("stopped: what was done until then", file=sys.stderr)
                break
    return done


def stopped_in(module, settings: Settings, done: list[Progress]) -> bool:
    """Run a part; whether Ctrl-C ended it."""
    progress = Progress(settings, module.__name__.rpartition(".")[2], module.GOAL, module.UNIT)
    done.append(progress)
    try:
        module.run(settings, progress)
    except KeyboardInterrupt:
        return True
    finally:
        progress.end()
    return False


if __name__ == "__main__":
    sys.exit(main())
