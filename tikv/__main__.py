"""The command line: `tikv` and `python -m tikv`.

info      versions, back end, device, memory        (elsewhere: show-config, collect-env)
doctor    run real operations on each back end      (elsewhere: env-report, diagnose)
variants  the named copies
support   operation x dtype x back end
bench     20 seconds of timings beside numpy and torch
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

from tikv import doctor, spec
from tikv.errors import TikvError


def table(
    title: str, header: Sequence[str], rows: Sequence[Sequence[Any]], styles: dict[str, str] | None = None
) -> None:
    """Print a table: with rich on a terminal that has it, as aligned plain text elsewhere."""
    cells = [[str(cell) for cell in row] for row in rows]
    if sys.stdout.isatty():
        try:
            from rich.console import Console
            from rich.table import Table
        except ImportError:
            pass
        else:
            drawn = Table(title=title, title_justify="left")
            for name in header:
                drawn.add_column(name)
            for row in cells:
                drawn.add_row(*(f"[{styles[c]}]{c}[/]" if styles and c in styles else c for c in row))
            Console().print(drawn)
            return
    widths = [max(len(row[i]) for row in [list(header), *cells]) for i in range(len(header))]
    print(title)
    for row in [list(header), ["-" * w for w in widths], *cells]:
        print("  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip())


def show_info(arguments: argparse.Namespace) -> int:
    """`tikv info`."""
    found = doctor.info()
    if arguments.json:
        print(json.dumps(found, indent=2))
        return 0
    memory = found["memory_bytes"]
    state = "running" if found["started"] else "would be started"
    rows = [
        ("tikv", found["version"]),
        ("python", f"{found['python']} on {found['platform']}"),
        *((name, version or "not installed") for name, version in found["packages"].items()),
        (
            "arch",
            f"{found['arch']} ({state}; order {', '.join(found['arch_order'])})",
        ),
        ("device", found["device"]),
        ("memory", "unknown" if memory is None else f"{memory / 1e9:.1f} GB"),
        ("launcher", f"{found['launcher']['launcher']} ({found['launcher']['why']})"),
    ]
    table("tikv info", ("what", "value"), rows)
    return 0


def run_doctor(arguments: argparse.Namespace) -> int:
    """`tikv doctor`."""
    archs = tuple(arguments.arch or doctor.runtime.ARCHS)
    checks = doctor.doctor(archs)
    if arguments.json:
        print(doctor.as_json(checks))
    else:
        default = next(iter(doctor.runtime.candidate_archs()))
        rows = [(c.arch + (" *" if c.arch == default else ""), c.status, c.detail, c.remedy) for c in checks]
        table(
            "tikv doctor (* is what auto takes)",
            ("arch", "status", "detail", "remedy"),
            rows,
            {"PASS": "green", "FAIL": "red", "absent": "yellow"},
        )
    return doctor.exit_status(checks) if not arguments.arch else int(any(c.status != "PASS" for c in checks))


def show_variants(arguments: argparse.Namespace) -> int:
    """`tikv variants`."""
    rows = [
        (
            row.name,
            f"{row.src_layout} > {row.cache_layout}",
            row.tokens,
            f"{row.src_dtype} > {row.cache_dtype}",
            "K+V" if row.streams == 2 else "K or V",
            {"flag": "linear, or ring if is_sliding", "slot": "the slot itself", "ring": "position % capacity"}[
                row.mapping
            ],
            "nearest even" if row.converts and row.src_dtype == "float32" else "exact",
        )
        for row in spec.VARIANTS.values()
    ]
    header = ("name", "layout", "tokens", "dtype", "streams", "position", "bits")
    if arguments.json:
        print(json.dumps([dict(zip(header, row, strict=True)) for row in rows], indent=2))
    else:
        table("tikv variants", header, rows)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="tikv",
        description="KV-cache operations for research models: one Taichi source for Metal, CUDA, Vulkan and CPU.",
        epilog="Not the TiKV database. `tikv COMMAND --help` tells more of each command.",
    )
    parser.add_argument("--version", action="version", version=f"tikv {doctor.VERSION}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    info = commands.add_parser(
        "info", help="versions, back end, device, memory (also looked for as show-config, collect-env)"
    )
    info.add_argument("--json", action="store_true", help="as JSON, for a bug report")
    info.set_defaults(run=show_info)
    check = commands.add_parser(
        "doctor", help="run real operations on each back end and compare bits (also: env-report, diagnose)"
    )
    check.add_argument(
        "arch", nargs="*", choices=[*doctor.runtime.ARCHS, []], help="only these back ends; then each must pass"
    )
    check.add_argument("--json", action="store_true", help="as JSON")
    check.set_defaults(run=run_doctor)
    variants = commands.add_parser("variants", help="the named copies and what each does")
    variants.add_argument("--json", action="store_true", help="as JSON")
    variants.set_defaults(run=show_variants)
    arguments = parser.parse_args(argv)
    try:
        return int(arguments.run(arguments))
    except TikvError as error:
        print(f"tikv: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("tikv: stopped", file=sys.stderr)
        return 130


if __name__ == "__main__":
    raise SystemExit(main())
