"""The command line: `tikv` and `python -m tikv`.

info      versions, back end, device, memory                      (also: show-config, collect-env)
doctor    run real operations on each back end                    (also: env-report, diagnose)
variants  the named copies
support   operation x dtype x back end
bench     20 seconds of timings beside numpy, torch and memcpy    (also: benchmark, performance)
export    kernels as SPIR-V and Metal source
kernels   kernels for CUDA, made beforehand: build, list
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import pathlib
import sys
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tikv import runtime
from tikv.compat.seeds import spec
from tikv.errors import TikvError
from tikv.stores import picture
from tikv.stores.files import replacing
from tikv.tools import doctor, table
from tikv.tools.progress import progress

if TYPE_CHECKING:
    from tikv.launch.cuda import made
    from tikv.tools import bench


def show_info(arguments: argparse.Namespace) -> int:
    """`tikv info`."""
    info = doctor.info()
    if arguments.json:
        print(json.dumps(info, indent=2))
        return 0
    memory = info["memory_bytes"]
    state = "running" if info["started"] else "would be started"
    rows = [
        ("tikv", info["version"]),
        ("python", f"{info['python']} on {info['platform']}"),
        *((name, version or "not installed") for name, version in info["packages"].items()),
        ("engine", f"{info['engine']} ({info['engine_why']})"),
        (
            "arch",
            f"{info['arch']} ({state}; auto tries {', '.join(info['arch_order'])}; {info['arch_why']})",
        ),
        ("device", info["device"]),
        ("memory", "unknown" if memory is None else f"{memory / 1e9:.1f} GB"),
        ("launcher", f"{info['launcher']['launcher']} ({info['launcher']['why']})"),
        ("made kernels", info["made_kernels"]),
        ("subgroups", info["subgroups"]),
        ("place='host'", info["place_host"]),
    ]
    table.show("tikv info", ("what", "value"), rows)
    return 0


def run_doctor(arguments: argparse.Namespace) -> int:
    """`tikv doctor`."""
    asked = asked_archs(arguments)
    archs = tuple(asked or runtime.ARCHS)
    if arguments.report:
        return write_report(archs, arguments.report)
    with progress("tikv doctor", len(archs), in_lines=True) as step:
        checks = doctor.doctor(archs, step)
    if arguments.json:
        print(doctor.as_json(checks))
    else:
        show_checks(checks)
    return doctor.exit_status(checks) if not asked else int(any(c.status != "PASS" for c in checks))


def show_checks(checks: Sequence[doctor.Check]) -> None:
    """Print a row for each back end, then a paragraph for each; no line is wider than 80 characters."""
    default = runtime.candidate_archs()[0]
    rows = [
        (c.arch + (" *" if c.arch == default else ""), c.status, span(c.first_calls), span(c.later_calls))
        for c in checks
    ]
    table.show(
        "tikv doctor (* is what auto takes)",
        ("arch", "status", "first calls", "in a later process"),
        rows,
        {"PASS": "green", "FAIL": "red", "absent": "yellow"},
    )
    parts = [
        (c.arch, title, f"{c.parts[part]:.2f} s", f"{c.later_parts[part]:.2f} s")
        for c in checks
        if c.parts and c.later_parts
        for part, title in doctor.PARTS.items()
        if part in c.parts and part in c.later_parts
    ]
    if parts:
        print()
        table.show("where the time of first calls goes", ("arch", "part", "first calls", "in a later process"), parts)
        print()
    paragraphs = [f"{c.arch}: {c.detail}.{' ' * bool(c.remedy)}{c.remedy}" for c in checks]
    if any(c.first_calls for c in checks):
        paragraphs.insert(
            0,
            "The first call of each kind compiles a kernel and keeps it on disk, where a later process finds it. Calls "
            "after the first take none of this time. The second table has the sums of all first calls.",
        )
    if any(c.arch == "cuda" and c.status != "absent" for c in checks):
        paragraphs.append(f"kernels made beforehand for CUDA: {doctor.made_kernels()}.")
    for text in paragraphs:
        width = min(80, table.line_width() or 80)
        print(textwrap.fill(text, width, subsequent_indent="  ", break_on_hyphens=False))


def span(times: tuple[float, float] | None) -> str:
    """The shortest and the longest time of some calls, as text."""
    return "" if times is None else f"{times[0]:.1f} to {times[1]:.1f} s"


def write_report(archs: tuple[str, ...], path: str) -> int:
    """`tikv doctor --report`."""
    from tikv.tools import report

    target = replacing.target_of(path, "doctor", suffix="")
    with progress("tikv doctor", report.steps(archs)) as step:
        results = report.report(archs, step=step)
    text = json.dumps(results, indent=1) + "\n"
    replacing.replace(target, text.encode(), "doctor", suffix="")
    header = ("arch", "check", "operations in each dtype", "benches")
    table.show("tikv doctor: tested here, now", header, report.summary(results))
    print(f"{'the report, up to where it was stopped,' if results['stopped'] else 'the report'} is in {target}")
    if results["stopped"]:
        raise KeyboardInterrupt
    return report.exit_status(results)


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
        table.show("tikv variants", header, rows)
    return 0


def show_support(arguments: argparse.Namespace) -> int:
    """`tikv support`."""
    from tikv.tools import support

    asked = asked_archs(arguments)
    archs = tuple(asked or runtime.ARCHS)
    trials: list[doctor.Trial] = []
    stopped = False
    with progress("tikv support", len(archs) * support.trials()) as step:

        def done(trial: doctor.Trial) -> None:
            trials.append(trial)
            before = archs.index(trial.arch) * support.trials()
            step(f"{trial.arch} {trial.operation} {trial.dtype}", before + support.over_with(trial))

        try:
            doctor.support(archs, done)
            step("done", len(archs) * support.trials())
        except KeyboardInterrupt:
            stopped = True
    if arguments.json:
        print(json.dumps([vars(trial) for trial in trials], indent=2))
    else:
        styles = {"tested": "green", "FAIL": "red", "not offered": "dim"}
        for arch in archs:
            mine = {(trial.operation, trial.dtype): trial for trial in trials if trial.arch == arch}
            whole = mine.pop(("all", "all"), None)
            if whole is not None:
                print(f"{arch}: {whole.status}: {whole.detail}\n")
            if mine:
                rows = [
                    [name, *(mine[name, d].status if (name, d) in mine else "" for d in support.DTYPES)]
                    for name in support.OPERATIONS
                ]
                table.show(f"tikv support, {arch}: tested here, now", ("operation", *support.DTYPES), rows, styles)
                table.tell("not offered: refused with an error; empty: not tried")
                print()
        for trial in trials:
            if trial.status == doctor.FAILED:
                print(f"FAIL {trial.arch} {trial.operation} {trial.dtype}: {trial.detail}", file=sys.stderr)
    if stopped:
        raise KeyboardInterrupt
    missing = {trial.arch for trial in trials if trial.status == doctor.NOT_HERE} & set(asked)
    return int(bool(missing) or any(trial.status == doctor.FAILED for trial in trials))


def run_bench(arguments: argparse.Namespace) -> int:
    """`tikv bench`."""
    from tikv.tools import bench

    archs = list(dict.fromkeys(itertools.chain(*arguments.arch))) or ["auto"]
    if arguments.attention:
        return bench_attention(arguments, archs)
    if arguments.plot and len(archs) > 1:
        return _fail("bench: --plot draws one back end; name one with --arch", 2)
    runs: list[tuple[str, list[bench.Row]]] = []  # for each back end: the machine in words, and the rows so far
    stopped = False
    with progress("tikv bench", len(bench.CASES) * len(archs)) as step:
        try:
            for i, arch in enumerate(archs):
                names = [*bench.CASES, "done"]
                step(names[0], i * len(bench.CASES))
                for row in bench.bench(arch, arguments.seconds):
                    if len(runs) == i:
                        runs.append((bench.about(row.arch), []))
                    rows = runs[i][1]
                    rows.append(row)
                    step(names[len(rows)], i * len(bench.CASES) + len(rows))
        except KeyboardInterrupt:
            stopped = True
    if arguments.json and runs:
        results = [{"machine": machine, "rows": [row.as_dict() for row in rows]} for machine, rows in runs]
        print(json.dumps(results[0] if len(archs) == 1 else results, indent=2))
    elif not arguments.json:
        for machine, rows in runs:
            show_bench(machine, rows)
    if arguments.plot and runs:
        picture.save(bench.picture(runs[0][1], runs[0][0]), arguments.plot, "bench")
        print(f"drew {arguments.plot}", file=sys.stderr)
    if stopped:
        raise KeyboardInterrupt
    return 0


def bench_attention(arguments: argparse.Namespace, archs: list[str]) -> int:
    """`tikv bench --attention`."""
    from tikv.ops.attention import measured
    from tikv.tools import bench
    from tikv.tools import bench_attention as timed

    if arguments.plot or len(archs) > 1:
        return _fail("bench: --attention measures one back end, without --plot; name one with --arch", 2)
    machine = timed.start(archs[0])
    shapes = timed.shapes(machine.live.arch)
    rows: list[measured.Timing] = []
    with progress("tikv bench --attention", len(shapes)) as step:
        step("first calls", 0)
        for row in timed.measure(machine, arguments.seconds):
            rows.append(row)
            step(f"{row.kind}, {row.dtype}, {row.queries} queries of {row.head_dim}", len(rows))
    timings = timed.timings(rows)
    file = measured.write(machine.live, timings)
    if arguments.json:
        print(json.dumps({"machine": bench.about(machine.live.arch), "file": str(file), **timings.as_dict()}, indent=2))
        return 0
    for kind in measured.KINDS:
        table.show(
            f"tikv bench --attention, {kind} (one sequence; results compared)",
            ("dtype", "head_dim", "queries", "keys", "tikv us", "torch us", "faster"),
            [
                (
                    row.dtype,
                    f"{row.head_dim}",
                    f"{row.queries:,}",
                    f"{row.keys:,}",
                    f"{row.tikv_us:,.1f}",
                    f"{row.torch_us:,.1f}",
                    "torch" if row.torch_us < row.tikv_us else "tikv",
                )
                for row in rows
                if row.kind == kind
            ],
        )
    table.tell(bench.about(machine.live.arch))
    table.tell(f'wrote {file}: impl="auto" uses it on this device; tikv.info()["attention_auto"] says so')
    return 0


def run_export(arguments: argparse.Namespace) -> int:
    """`tikv export`."""
    from tikv.tools import export

    archs = list(dict.fromkeys(arguments.arch)) or list(export.ARCHS)
    operations = list(dict.fromkeys(itertools.chain(*arguments.op))) or list(export.OPERATIONS)
    dtypes = list(dict.fromkeys(itertools.chain(*arguments.dtype))) or list(export.DTYPES)
    sizes = export.Sizes(arguments.head_dim, arguments.q_heads, arguments.kv_heads, arguments.block_size)
    folder = export.check(arguments.folder, archs, operations, dtypes, sizes)
    with progress("tikv export", len(export.pairs(operations, dtypes))) as step:
        index = export.export(folder, archs, operations, dtypes, sizes, step)
    rows = []
    for name, kernel in index["kernels"].items():
        launched = f"{kernel['threadgroups']} x {kernel['threads_per_threadgroup']}"
        files = ", ".join(kernel[arch] for arch in ("spirv", "metal") if arch in kernel)
        checked = "valid" if kernel["validated"] else "not checked: no spirv-val"
        rows.append((name, files, checked, launched, f"{kernel['threadgroup_memory_bytes']:,}"))
    table.show("tikv export", ("kernel", "files", "SPIR-V", "threads", "bytes a group shares"), rows)
    table.tell(
        f"{len(rows)} kernels for {len(index['launches'])} launches; {folder / export.INDEX} says how to bind arguments"
    )
    return 0


def build_kernels(arguments: argparse.Namespace) -> int:
    """`tikv kernels build`."""
    from tikv.tools.kernels import building

    named = [building.parse_capability(text) for text in arguments.capability or ("8.0", "9.0")]
    capabilities = sorted(set(named))
    with progress("tikv kernels build", building.PARTS * len(capabilities)) as step:
        results = building.build(arguments.folder, capabilities, arguments.only, arguments.processes, step)
    show_kernel_files([each.file for each in results])
    for each in results:
        for name, why in each.left_out.items():
            table.tell(f"left out of {each.file.path.name}: {name}: {why}")
    return int(any(each.left_out for each in results))


def list_kernels(arguments: argparse.Namespace) -> int:
    """`tikv kernels list`."""
    from tikv.launch.cuda import made

    folders = [pathlib.Path(arguments.folder)] if arguments.folder else made.folders()
    files = [made.contents(path) for folder in folders for path in made.paths_in(folder).values()]
    if arguments.json:
        rows = [
            {
                "file": str(file.path),
                "capability": ".".join(map(str, file.capability)),
                "kernels": len(file.kernels),
                "bytes": file.path.stat().st_size,
                "refusal": file.refusal,
                **{name: file.manifest.get(name) for name in ("tikv", "engine", "forms")},
            }
            for file in files
        ]
        print(json.dumps(rows, indent=2))
    elif files:
        show_kernel_files(files)
    else:
        table.tell(
            f"no kernels made beforehand in {', '.join(map(str, folders)) or 'any folder: TIKV_KERNELS_DIR is empty'}"
        )
    return int(any(file.refusal for file in files) or (bool(arguments.folder) and not files))


def show_kernel_files(files: Sequence[made.MadeFile]) -> None:
    """Print a row for each file of kernels, and whether this version of tikv uses it."""
    rows = [
        (
            str(file.path),
            ".".join(map(str, file.capability)),
            f"{len(file.kernels):,}",
            f"{file.path.stat().st_size / 1e6:.1f} MB",
            file.refusal or "used by this version",
        )
        for file in files
    ]
    table.show("tikv kernels", ("file", "capability", "kernels", "size", "state"), rows)


def show_bench(machine: str, rows: Sequence[bench.Row]) -> None:
    """Print the table of one back end; figures of a noisy run are marked, and have no share of memcpy."""
    peers = list(dict.fromkeys(peer for row in rows for peer in row.peers_us))
    header = ["case", "tikv us", *(f"{peer} us" for peer in peers), "memcpy us", "tikv GB/s", "of memcpy"]
    cells = [
        [
            row.case,
            f"{row.us:,.1f}",
            *(f"{row.peers_us[peer]:,.1f}" if peer in row.peers_us else "" for peer in peers),
            f"{row.memcpy_us:,.1f}",
            f"{row.gb_per_s:.1f}",
            "noisy" if row.noisy else f"{row.percent_of_memcpy:.0f} %",
        ]
        for row in rows
    ]
    table.show("tikv bench (each result checked; memcpy moves the same bytes)", header, cells, {"noisy": "yellow"})
    table.tell(machine)
    for row in rows:
        for peer, why in row.left_out.items():
            table.tell(f"left out: {peer} in {row.case}: {why}")
    if any(row.noisy for row in rows):
        table.tell(
            "noisy: rounds of the same call differed by a third or more, as happens when other programs run; try again"
        )


def back_ends(text: str) -> list[str]:
    """An argument that is one back end, or several with commas between them."""
    archs = list(dict.fromkeys(text.split(",")))
    for name in archs:
        if name not in (*runtime.ARCHS, "auto"):
            raise argparse.ArgumentTypeError(f"{name!r} is not one of auto, {', '.join(runtime.ARCHS)}")
    return archs


def add_archs(command: argparse.ArgumentParser, what: str) -> None:
    """Let a command accept back ends, by position or as --arch."""
    help_text = f"only these back ends: {', '.join(runtime.ARCHS)} or auto; the exit status is 1 unless each {what}"
    command.add_argument("back_ends", nargs="*", type=back_ends, metavar="ARCH", help=help_text)
    command.add_argument(
        "--arch", action="append", default=[], type=back_ends, metavar="ARCH[,ARCH...]", help="the same as ARCH"
    )


def asked_archs(arguments: argparse.Namespace) -> list[str]:
    """The back ends that were named, each once; an empty list means all."""
    named = itertools.chain(*arguments.back_ends, *arguments.arch)
    return list(dict.fromkeys(runtime.candidate_archs()[0] if name == "auto" else name for name in named))


def seconds(text: str) -> float:
    """An argument that is a time."""
    value = float(text)
    if not 0 < value < 3600:
        raise argparse.ArgumentTypeError(f"{text} is not a time between 0 and 3600 seconds")
    return value


def svg(text: str) -> str:
    """An argument that is a picture to write; it is checked before anything is timed."""
    try:
        return str(picture.target_of(text, "bench"))
    except TikvError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def add_export(commands: Any) -> None:
    """The arguments of `tikv export`."""
    made = commands.add_parser(
        "export",
        help="write kernels as SPIR-V and Metal source, for programs without Python",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Compile the kernels of operations ahead of time, for programs that launch them without Python.",
        epilog="""\
For each kernel, the folder then has NAME.spv for Vulkan 1.1 and NAME.metal for Metal 2.3. It also has kernels.json:

  kernels   threads, shared memory, capabilities, and the arguments of each kernel: the binding of each array
            (a storage buffer of descriptor set 0; in Metal [[buffer(n)]]), and the byte offset of each number in the
            uniform buffer that has the arguments
  launches  the launches of one call of each operation, in order, with their arguments: shapes and numbers.
            A program changes the named ones, such as dst_position, and the strides, which count words

A kernel takes any number of tokens, heads, slots and pages; the sizes above and the dtype are compiled in. int8 and
float8 caches take float16 rows, and attention over them has float16 queries and results. The export needs a Vulkan
driver (Mesa's on the CPU is enough), and spirv-cross for Metal source; spirv-val checks the SPIR-V if it is installed.
examples/export_vulkan/ has a C++ program that launches such kernels.

  tikv export kernels --op copy_kv,decode_attention --dtype float16 --head-dim 128
""",
    )
    made.add_argument("folder", metavar="DIR", help="a new folder, or the folder of an earlier export")
    made.add_argument(
        "--arch",
        action="append",
        default=[],
        metavar="ARCH",
        help="metal for Metal source only, vulkan for SPIR-V only (default: both)",
    )
    made.add_argument(
        "--op",
        action="append",
        default=[],
        type=names,
        metavar="NAME[,NAME...]",
        help="only these operations (default: all)",
    )
    made.add_argument(
        "--dtype",
        action="append",
        default=[],
        type=names,
        metavar="NAME[,NAME...]",
        help="stored dtypes: float32, float16, bfloat16, int8, float8_e4m3fn, float8_e5m2 (default: all)",
    )
    for name, default, what in (
        ("--head-dim", 128, "elements of a head"),
        ("--q-heads", 32, "query heads"),
        ("--kv-heads", 8, "KV heads"),
        ("--block-size", 16, "tokens of a page"),
    ):
        made.add_argument(name, type=int, default=default, metavar="N", help=f"{what} ({default})")
    made.set_defaults(run=run_export)


def add_kernels(commands: Any) -> None:
    """The arguments of `tikv kernels`."""
    made = commands.add_parser(
        "kernels",
        help="make kernels for CUDA beforehand, on any Linux machine, so that first calls compile nothing",
        description="Kernels for CUDA, made beforehand. tikv looks for them in the folders that TIKV_KERNELS_DIR "
        "names, then in its own; what it does not find is compiled when a call first needs it.",
    )
    actions = made.add_subparsers(dest="action", metavar="ACTION", required=True)
    build = actions.add_parser(
        "build",
        help="write a file for each compute capability; no GPU is needed",
        description="Compile the kernels that stores, pools and a TikvCache need, in the formats and sizes of usual "
        "models, and write sm_80.zip, sm_90.zip and so on. It needs Linux, Taichi, cuda-bindings and a C compiler, "
        "which builds a stand-in for NVIDIA's driver; and 2 to 3 seconds per kernel on one core.",
        epilog="A form has a name such as store-bfloat16-int8-d128-g4-token: store, pool or cache; the dtype of "
        "queries; what is stored: same, int8, float8_e4m3fn, quant4_32, quant4_64; head_dim; query heads per KV head; "
        "token, few or prompt. Example: tikv kernels build made --capability 9.0 --only '*-bfloat16-*-d128-*'",
    )
    build.add_argument("folder", metavar="DIR", help="where the files go; old files of these names are replaced")
    build.add_argument("--capability", nargs="+", metavar="X.Y", help="compute capabilities (default: 8.0 9.0)")
    build.add_argument(
        "--only", action="append", default=[], metavar="PATTERN", help="only forms of these names; * is any text"
    )
    build.add_argument(
        "--processes", type=processes, metavar="N", help="compile in N processes (default: one per core)"
    )
    build.set_defaults(run=build_kernels)
    shown = actions.add_parser(
        "list",
        help="say which files exist, and whether this version of tikv uses them",
        description="List files of kernels. The exit status is 1 if this version does not use one of them.",
    )
    shown.add_argument("folder", nargs="?", metavar="DIR", help="a folder (default: those where tikv looks)")
    shown.add_argument("--json", action="store_true", help="as JSON")
    shown.set_defaults(run=list_kernels)


def processes(text: str) -> int:
    """An argument that is a number of processes."""
    value = int(text)
    if not 1 <= value <= 1024:
        raise argparse.ArgumentTypeError(f"{text} is not a number of processes between 1 and 1024")
    return value


def names(text: str) -> list[str]:
    """An argument that is one name, or several with commas between them."""
    return text.split(",")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="tikv",
        description="KV-cache operations for research models: one Taichi source for Metal, CUDA, Vulkan and CPU.",
        epilog="This is not the TiKV database. `tikv COMMAND --help` says more about a command.",
    )
    parser.add_argument("--version", action="version", version=f"tikv {doctor.VERSION}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    info = commands.add_parser(
        "info",
        aliases=["show-config", "collect-env"],
        help="show versions, back end, device, memory",
        description="Say what is installed, which back end an operation would start or has started, and why. It starts "
        "nothing itself.",
    )
    info.add_argument("--json", action="store_true", help="as JSON, for a bug report")
    info.set_defaults(run=show_info)
    check = commands.add_parser(
        "doctor",
        aliases=["env-report", "diagnose"],
        help="run real operations on each back end and compare bits",
        description="Test each back end in a separate process: run operations there, compare their bits with the NumPy "
        "reference, and say how long first calls take. If a back end does not work, say what is missing.",
    )
    add_archs(check, "passes")
    check.add_argument("--json", action="store_true", help="as JSON")
    check.add_argument(
        "--report",
        metavar="FILE",
        help="also run every operation in every dtype and a minute of benches on each back end, and write everything "
        "to one JSON file for an issue; it takes some minutes",
    )
    check.set_defaults(run=run_doctor)
    variants = commands.add_parser(
        "variants",
        help="list the named copies and what each does",
        description="List the named copies of the source systems, with their layouts, dtypes and slots.",
    )
    variants.add_argument("--json", action="store_true", help="as JSON")
    variants.set_defaults(run=show_variants)
    matrix = commands.add_parser(
        "support",
        help="run every operation with every dtype on every back end, and compare with the reference",
        description="Run every operation with every dtype on each back end and compare it with the NumPy reference. "
        "The first run compiles each kernel, which takes some minutes per back end.",
    )
    add_archs(matrix, "works")
    matrix.add_argument("--json", action="store_true", help="as JSON, with the reason for each refusal")
    matrix.set_defaults(run=show_support)
    times = commands.add_parser(
        "bench",
        aliases=["benchmark", "performance"],
        help="compare speed with numpy, torch and memcpy, in about 20 seconds",
        description="Time prefill, decode and attention, and compare them with NumPy, torch if it is installed, and a "
        "plain copy of the same bytes. Each result is checked before it is timed.",
    )
    times.add_argument(
        "--arch",
        action="append",
        default=[],
        type=back_ends,
        metavar="ARCH[,ARCH...]",
        help=f"any of {', '.join(runtime.ARCHS)}, one after the other (default: the first that works)",
    )
    times.add_argument(
        "--seconds", type=seconds, default=20.0, help="time for all cases together, without compiling (default: 20)"
    )
    times.add_argument(
        "--attention",
        action="store_true",
        help="compare tikv's attention with torch's, and write a table from which impl='auto' takes the faster one",
    )
    times.add_argument(
        "--plot", type=svg, metavar="OUT.svg", help="draw the times of tikv, NumPy, torch and the plain copy"
    )
    times.add_argument("--json", action="store_true", help="as JSON")
    times.set_defaults(run=run_bench)
    add_export(commands)
    add_kernels(commands)
    arguments, unknown = parser.parse_known_args(argv)
    if arguments.command is None:
        parser.print_help(sys.stderr)
        return 2
    if unknown:  # told by the command, whose usage lists what it takes
        commands.choices[arguments.command].error(f"unrecognized arguments: {' '.join(unknown)}")
    if sys.stdout is None:  # `>&-`
        return _fail("stdout is closed; give it a file or a terminal", 1)
    try:
        status = int(arguments.run(arguments))
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # for example, `head` has read enough
        _drop_output()
        return 141
    except OSError as error:  # for example, stdout is a file on a full disk
        _drop_output()
        return _fail(str(error), 1)
    except TikvError as error:
        return _fail(str(error), 1)
    except KeyboardInterrupt:
        return _fail("stopped", 130)


def _fail(message: str, status: int) -> int:
    """Print the reason on stderr, if there is a stderr."""
    if sys.stderr is not None:
        with contextlib.suppress(OSError):
            print(f"tikv: {message}", file=sys.stderr)
    return status


def _drop_output() -> None:
    """Drop the output that stdout no longer accepts, which Python would try to write again at exit."""
    try:
        sys.stdout.flush()
    except OSError:
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    raise SystemExit(main())
