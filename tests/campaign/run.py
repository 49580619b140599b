"""Run the campaign: python tests/campaign/run.py --help."""

import argparse
import importlib
import os
import pathlib
import signal
import sys
import tempfile

os.environ.setdefault("ENABLE_TAICHI_HEADER_PRINT", "0")
os.environ.setdefault("TI_OFFLINE_CACHE_CLEANING_POLICY", "never")
TESTS = pathlib.Path(__file__).resolve().parent.parent
sys.path[0] = str(TESTS)  # modules of this folder are `campaign.NAME`, and hide none of the standard library
sys.path.insert(1, str(TESTS.parent))

from campaign import processes  # noqa: E402
from campaign.progress import Progress, Settings, Table  # noqa: E402

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
Ctrl-C and SIGTERM end the part that runs; the table of what was done is printed whatever ends it, and --table keeps it
in a file as it grows. Exit status: 0, or 1 after a failure.

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
    parser.add_argument("--table", type=pathlib.Path, metavar="FILE", help="that holds the table, new each second")
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


def main(arguments: list[str] | None = None) -> int:
    given = parsed(arguments)
    names = given.parts or list(PARTS)
    table = Table(f"{given.arch}, seed {given.seed}, {os.cpu_count()} CPU cores", given.table)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C
    try:
        if given.processes > 1:
            parts = {name: importlib.import_module(f"campaign.{name}") for name in names}
            processes.run(given, {name: (part.GOAL, part.UNIT) for name, part in parts.items()}, table)
        else:
            run_here(given, names, table)
    except KeyboardInterrupt:
        if given.facts is None:
            print("stopped: what was done until then", file=sys.stderr)
    finally:  # whatever ends it
        if table.parts:
            print(table, flush=True)
    return 1 if any(part.failures for part in table.parts) else 0


def run_here(given: argparse.Namespace, names: list[str], table: Table) -> None:
    """Run parts in this process."""
    import tikv

    with tempfile.TemporaryDirectory(prefix="tikv-campaign-") as folder:
        settings = Settings(
            given.arch, given.seed, given.seconds, given.count, given.only, pathlib.Path(folder), given.quiet,
            given.facts, table,
        )  # fmt: skip
        tikv.init(arch=given.arch)
        for part in names:
            module = importlib.import_module(f"campaign.{part}")
            progress = Progress(settings, part, module.GOAL, module.UNIT)
            table.parts.append(progress)
            try:
                module.run(settings, progress)
            finally:
                progress.end()


if __name__ == "__main__":
    sys.exit(main())
