"""pytest-benchmark's JSON as tables, and as a picture of prefill rates, roofline and decode latency, light and dark.

pytest benches --benchmark-json=bench.json
python benches/report.py bench.json [more.json ...] [--svg docs/performance]

The picture of the H200 is drawn from the current tables in docs/ (benches/recorded.py names the rows):

python benches/report.py --h200
"""

import argparse
import functools
import json
import pathlib
import sys
from collections import defaultdict

import environment
import recorded
from picture import COLOURS, INK, number, plain, save

PEERS = ("tikv", "torch", "numpy")  # those with a column and a colour of their own


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
        yield environment.line(about, archs), rows


def by_case(rows):
    """(arch, question, case) to peer to row, in the order of the file."""
    cases = defaultdict(dict)
    for row in rows:
        cases[row["arch"], row["question"], row["case"]][row["peer"]] = row
    return cases


def is_bandwidth(peers) -> bool:
    """Whether a case moves so much that the memory is timed, rather than the call."""
    return peers["tikv"]["bytes_moved"] >= 1 << 22 and peers["tikv"]["op"] != "generate"


def cell(row, field) -> str:
    return "" if row is None else number(row[field])


def others(peers, field) -> str:
    """The peers without a column of their own, by name."""
    return ", ".join(f"{peer} {number(row[field])}" for peer, row in peers.items() if peer not in PEERS)


def ratio(row, other) -> str:
    if row is None or other is None:
        return ""
    found = row["us"] / other["us"]
    return f"{found:.2f}x" if found >= 0.01 else f"{found:.1g}x"


def work(question, case) -> str:
    return f"{question.replace('_', ' ')}, {case}"


def tables(rows):
    """Markdown: a table for the rows that are bandwidth, one for those that are a call, one for graphs of calls."""
    graphs = [row for row in rows if "forms_us" in row]
    cases = by_case([row for row in rows if "forms_us" not in row])
    cases = {key: peers for key, peers in cases.items() if "tikv" in peers}
    bandwidth = [key for key in cases if is_bandwidth(cases[key])]
    calls = [key for key in cases if not is_bandwidth(cases[key])]
    if bandwidth:
        yield "| back end | work | tikv GB/s | of a copy | torch GB/s | torch / tikv, time | numpy GB/s | others |"
        yield "| --- | --- | ---: | ---: | ---: | ---: | ---: | --- |"
        for key in bandwidth:
            ours, torch, numpy = (cases[key].get(peer) for peer in PEERS)
            cells = (cell(ours, "gb_per_s"), f"{ours['pct_of_copy']:.0f} %", cell(torch, "gb_per_s"))
            cells += (ratio(torch, ours), cell(numpy, "gb_per_s"), others(cases[key], "gb_per_s"))
            yield f"| {key[0]} | {work(*key[1:])} | {' | '.join(cells)} |"
        yield ""
    if calls:
        yield "| back end | work | tikv us | empty launch us | torch us | tikv / torch, time | numpy us | others |"
        yield "| --- | --- | ---: | ---: | ---: | ---: | ---: | --- |"
        for key in calls:
            ours, torch, numpy = (cases[key].get(peer) for peer in PEERS)
            cells = (
                cell(ours, "us"),
                cell(ours, "launch_us"),
                cell(torch, "us"),
                ratio(ours, torch),
                cell(numpy, "us"),
                others(cases[key], "us"),
            )
            yield f"| {key[0]} | {work(*key[1:])} | {' | '.join(cells)} |"
        yield ""
    if graphs:
        yield "| back end | decode step | calls us | graph us | captured us | until return: calls | graph | captured |"
        yield "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |"
        for row in graphs:
            times = [row[us].get(form) for us in ("forms_us", "return_us") for form in ("calls", "graph", "captured")]
            cells = ["" if us is None else f"{us:.1f}" for us in times]
            yield f"| {row['arch']} | {row['case']} | {' | '.join(cells)} |"
        yield ""


def is_copy(row) -> bool:
    """Whether a bench moves bytes and does little else, so that bytes a second say how well it does it."""
    return row["op"] not in ("decode_attention", "decode step", "generate")


def is_decode(question) -> bool:
    """Whether a bench writes one token."""
    return question in ("copy_kv_one_token", "append_all", "append_after")


def prefill_panel(axes, cases, ink):
    """GB/s of each peer's prefill, the plain copy of that row as a line."""
    chosen = {key: peers for key, peers in cases.items() if key[1] == "prefill"}
    room = 0.1 * max(row["gb_per_s"] for peers in chosen.values() for row in peers.values())  # of a label
    for at, peers in enumerate(chosen.values()):
        roof = peers["tikv"]["roof_gb_per_s"]
        for offset, peer in enumerate(PEERS):
            if peer in peers:
                rate = peers[peer]["gb_per_s"]
                axes.barh(at + 0.27 * (offset - 1), rate, 0.25, color=COLOURS[peer])
                label = roof if rate <= roof < rate + room else rate
                axes.text(label, at + 0.27 * (offset - 1), f" {number(rate)}", va="center", fontsize=6)
        axes.plot([roof, roof], [at - 0.42, at + 0.42], color=ink, lw=1.5)
    axes.set_yticks(range(len(chosen)), [case.replace(" to ", "\nto ") for _, _, case in chosen])
    axes.invert_yaxis()
    axes.set_title("prefill: K and V into a head-major cache", fontsize=9, loc="left")
    axes.set_xlabel("GB/s read and written")


def roofline_panel(axes, cases, ink):
    """GB/s over bytes a call: under the plain copy of so many bytes, and under what an empty launch leaves time for."""
    cases = {key: peers for key, peers in cases.items() if is_copy(peers["tikv"])}
    ours = [peers["tikv"] for peers in cases.values()]
    sizes = sorted({row["bytes_moved"] for row in ours})
    roofs = [max(row["roof_gb_per_s"] for row in ours if row["bytes_moved"] == size) for size in sizes]
    launch = min(row["launch_us"] for row in ours)
    top = 3 * max(roofs)
    axes.plot(sizes, roofs, color=ink, lw=1.5)
    slope = (sizes[0], max(sizes[0], top * launch * 1e3))
    axes.plot(slope, [size / launch / 1e3 for size in slope], color=ink, lw=1, ls="--")
    for peer in reversed(PEERS):
        rows = [peers[peer] for peers in cases.values() if peer in peers]
        axes.scatter([r["bytes_moved"] for r in rows], [r["gb_per_s"] for r in rows], s=14, color=COLOURS[peer])
    axes.set(xscale="log", yscale="log", ylim=(None, top), xlabel="bytes read and written by a call", ylabel="GB/s")
    axes.set_title(f"roofline of every write; dashed: one empty launch, {launch:.1f} us", fontsize=9, loc="left")


def decode_panel(axes, cases, ink):
    """Microseconds of one token's write, the empty launch of that row as a line."""
    chosen = {key: peers for key, peers in cases.items() if is_decode(key[1])}
    for at, peers in enumerate(chosen.values()):
        for offset, peer in enumerate(PEERS):
            if peer in peers:
                us = peers[peer]["us"]
                axes.barh(at + 0.27 * (offset - 1), us, 0.25, color=COLOURS[peer])
                axes.text(us, at + 0.27 * (offset - 1), f" {number(us)}", va="center", fontsize=6)
        launch = peers["tikv"]["launch_us"]
        axes.plot([launch, launch], [at - 0.42, at + 0.42], color=ink, lw=1, ls="--")
    axes.set_yticks(range(len(chosen)), [case for _, _, case in chosen])
    axes.invert_yaxis()
    longest = max((row["us"] for peers in chosen.values() for row in peers.values()), default=1.0)
    axes.set(xscale="log", xlim=(None, 8 * longest), xlabel="microseconds a call; shorter is better")
    axes.set_title("decode: one token's K and V", fontsize=9, loc="left")


def draw(rows, machine, stem):
    """Prefill rates, the roofline and decode latencies of one machine, in a light and a dark version."""
    cases = {key: peers for key, peers in by_case(rows).items() if "tikv" in peers}
    archs = list(dict.fromkeys(key[0] for key in cases))
    for arch in archs:
        if not any(key[0] == arch and key[1] == "prefill" for key in cases):
            sys.exit(f"report: no prefill rows of {arch} to draw")
    for arch in archs:
        mine = {key: peers for key, peers in cases.items() if key[0] == arch}
        about = f"{arch}: {machine}"
        save(functools.partial(figure_of, mine, about), stem if len(archs) == 1 else f"{stem}-{arch}")


def figure_of(cases, about, theme):
    """The three panels of one back end."""
    from matplotlib import lines, patches, pyplot

    ink = INK[theme]
    figure, panels = pyplot.subplot_mosaic(
        [["prefill", "roofline"], ["prefill", "decode"]], figsize=(10, 6), layout="constrained"
    )
    for panel, fill in (("prefill", prefill_panel), ("roofline", roofline_panel), ("decode", decode_panel)):
        plain(panels[panel])
        fill(panels[panel], cases, ink)
    keys = [patches.Patch(color=COLOURS[peer], label=peer) for peer in PEERS]
    keys.append(lines.Line2D([], [], color=ink, label="plain copy of the same bytes"))
    keys.append(lines.Line2D([], [], color=ink, ls="--", lw=1, label="empty launch"))
    figure.legend(handles=keys, frameon=False, loc="outside upper center", ncols=len(keys))
    figure.text(0.01, -0.02, about, fontsize=6)
    return figure


def main():
    """Print the tables, and draw if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("json", nargs="*", help="files that pytest --benchmark-json wrote")
    parser.add_argument("--svg", metavar="STEM", help="draw STEM-light.svg and STEM-dark.svg from the first file")
    parser.add_argument("--h200", action="store_true", help="draw the H200's tables in docs/, without any file")
    options = parser.parse_args()
    if options.h200 == bool(options.json):
        parser.error("give files, or --h200")
    if options.h200:
        recorded.draw(options.svg or recorded.STEM)
        return
    runs = list(load(options.json))
    for machine, rows in runs:
        print(f"{machine}\n")
        print("\n".join(tables(rows)))
    if options.svg:
        draw(runs[0][1], runs[0][0], options.svg)


if __name__ == "__main__":
    main()
