"""pytest-benchmark's JSON as the README's tables, and as a picture in a light and a dark version.

pytest benches --benchmark-json=bench.json
python benches/report.py bench.json [more.json ...] [--svg benches/figures/prefill]
"""

import argparse
import json
import pathlib
import sys
from collections import defaultdict

PEERS = ("tikv", "torch", "numpy")
INK = {"light": "#1f2328", "dark": "#e6edf3"}
COLOURS = {"tikv": "#2da44e", "torch": "#e36209", "numpy": "#6e7781"}


def load(paths):
    """(machine line, rows) of each file; a row is the extra_info of a bench with the name of its question."""
    for path in paths:
        data = json.loads(pathlib.Path(path).read_text(encoding="utf-8"))
        about = data["machine_info"]["tikv"]
        rows = [
            {"question": bench["name"].split("[")[0].removeprefix("bench_"), **bench["extra_info"]}
            for bench in data["benchmarks"]
            if "us" in bench["extra_info"]
        ]
        archs = sorted({row["arch"] for row in rows})
        devices = ", ".join(about["devices"].get(arch, arch) for arch in archs)
        versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items() if version)
        line = (
            f"{devices}, {about['cores']} cores, {about['system']}, Python {about['python']}, {versions}; "
            f"{data['datetime'][:10]}, commit {about['commit']}"
        )
        yield line, rows


def by_case(rows):
    """(arch, question, case) to peer to row, in the order of the file."""
    cases = defaultdict(dict)
    for row in rows:
        cases[row["arch"], row["question"], row["case"]][row["peer"]] = row
    return cases


def is_bandwidth(peers) -> bool:
    """Whether a case moves so much that the memory is timed, rather than the call."""
    return peers["tikv"]["bytes_moved"] >= 1 << 22


def cell(row, field) -> str:
    return "" if row is None else f"{row[field]:.1f}"


def ratio(row, other) -> str:
    return "" if row is None or other is None else f"{row['us'] / other['us']:.2f}x"


def work(question, case) -> str:
    return f"{question.replace('_', ' ')}, {case}"


def tables(rows):
    """Markdown: one table for the rows that are bandwidth, one for those that are a call."""
    cases = {key: peers for key, peers in by_case(rows).items() if "tikv" in peers}
    bandwidth = [key for key in cases if is_bandwidth(cases[key])]
    calls = [key for key in cases if not is_bandwidth(cases[key])]
    if bandwidth:
        yield "| back end | work | tikv GB/s | of a plain copy | torch GB/s | torch / tikv, time | numpy GB/s |"
        yield "| --- | --- | ---: | ---: | ---: | ---: | ---: |"
        for key in bandwidth:
            ours, torch, numpy = (cases[key].get(peer) for peer in PEERS)
            cells = (cell(ours, "gb_per_s"), f"{ours['pct_of_copy']:.0f} %", cell(torch, "gb_per_s"))
            cells += (ratio(torch, ours), cell(numpy, "gb_per_s"))
            yield f"| {key[0]} | {work(*key[1:])} | {' | '.join(cells)} |"
        yield ""
    if calls:
        yield "| back end | work | tikv us | empty launch us | torch us | tikv / torch, time | numpy us |"
        yield "| --- | --- | ---: | ---: | ---: | ---: | ---: |"
        for key in calls:
            ours, torch, numpy = (cases[key].get(peer) for peer in PEERS)
            cells = (
                cell(ours, "us"),
                cell(ours, "launch_us"),
                cell(torch, "us"),
                ratio(ours, torch),
                cell(numpy, "us"),
            )
            yield f"| {key[0]} | {work(*key[1:])} | {' | '.join(cells)} |"
        yield ""


def draw(rows, machine, stem):
    """The prefill rows as bars, each peer beside the others, with the plain copy of that row as a line."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "tikv"
    from matplotlib import pyplot

    cases = {key: peers for key, peers in by_case(rows).items() if key[1] == "prefill" and "tikv" in peers}
    if not cases:
        sys.exit("report: no prefill rows to draw")
    for theme, ink in INK.items():
        matplotlib.rcParams.update(
            {"text.color": ink, "axes.labelcolor": ink, "axes.edgecolor": ink, "xtick.color": ink, "ytick.color": ink}
        )
        figure, axes = pyplot.subplots(figsize=(8, 0.62 * len(cases) + 1.4), layout="constrained")
        for at, peers in enumerate(cases.values()):
            for offset, peer in enumerate(PEERS):
                if peer in peers:
                    label = peer if at == 0 else None
                    rate = peers[peer]["gb_per_s"]
                    axes.barh(at + 0.27 * (offset - 1), rate, 0.25, color=COLOURS[peer], label=label)
                    axes.text(rate, at + 0.27 * (offset - 1), f" {rate:.1f}", va="center", fontsize=7)
            roof = peers["tikv"]["roof_gb_per_s"]
            axes.plot([roof, roof], [at - 0.42, at + 0.42], color=ink, lw=1.5, label="plain copy" if at == 0 else None)
        axes.set_yticks(range(len(cases)), [f"{case} ({arch})" for arch, _, case in cases])
        axes.invert_yaxis()
        axes.set_xlabel("GB/s read and written; K and V of a prefill into a head-major cache", fontsize=9)
        axes.spines[["top", "right"]].set_visible(False)
        figure.legend(frameon=False, fontsize=8, loc="outside upper center", ncols=len(PEERS) + 1)
        figure.text(0.01, -0.02, machine, fontsize=6)
        target = pathlib.Path(f"{stem}-{theme}.svg")
        target.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(target, transparent=True, metadata={"Date": None}, bbox_inches="tight")
        pyplot.close(figure)
        print(f"drew {target}", file=sys.stderr)


def main():
    """Print the tables, and draw if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("json", nargs="+", help="files that pytest --benchmark-json wrote")
    parser.add_argument("--svg", metavar="STEM", help="draw STEM-light.svg and STEM-dark.svg of the first file's rows")
    options = parser.parse_args()
    runs = list(load(options.json))
    for machine, rows in runs:
        print(f"{machine}\n")
        print("\n".join(tables(rows)))
    if options.svg:
        draw(runs[0][1], runs[0][0], options.svg)


if __name__ == "__main__":
    main()
