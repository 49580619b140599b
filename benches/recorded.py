"""The H200's picture, from the files that the manual's tables are made of: python benches/report.py --h200.

docs/figures_h200.json is what `benches/tables.py run cuda` writes; the other two files have figures of earlier runs.
Rows and columns are found by their names. If a name is no longer in any table, the command stops and says so; then put
the new name into the lists below.
"""

import functools
import json
import pathlib
import re
import textwrap
from typing import NamedTuple

import picture

ROOT = pathlib.Path(__file__).resolve().parent.parent
STEM = str(ROOT / "docs" / "performance-h200")
COLOURS = {
    "tikv": picture.COLOURS["tikv"],
    "torch": picture.COLOURS["torch"],
    "Triton": "#a371f7",
    "FlashAttention-3": "#d29922",
    "tikv on one GPU": "#8c959f",
}
INSIDE = picture.INK["light"]  # of words in a bar, whose colour is that of both themes
LOSS = {"light": "#cf222e", "dark": "#ff7b72"}  # of a ratio below 1
NUMBER = re.compile(r"\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+(?:\.\d+)?")

# (what the picture calls it, the file of benches below benches/, the row's name there)
COPIES = [
    ("prefill,\nfloat16", "ops/bench_copy.py", "prefill, float16"),
    ("prefill, float32\nto float16", "ops/bench_copy.py", "prefill, float32 to float16"),
    (
        "64 sequences\nx 64 rows",
        "ops/bench_ragged.py",
        "append ragged, 64 sequences, 64 rows each, float16",
    ),
    (
        "131,072 tokens,\npages of 16",
        "ops/bench_paged.py",
        "write slots, 131,072 tokens, random pages of 16, float16",
    ),
]
# The same, and whose time it is compared with: torch's by the name of its operation, or one of the others in the row.
CALLS = [
    ("one layer", "stores/bench_append.py", "copy kv one token, 1 token, float16", "two index_copy_"),
    ("32 layers", "stores/bench_append.py", "append all, 1 token, 32 layers", "64 index_copy_"),
    ("32 layers,\ncaptured", "launch/bench_cuda.py", "captured step, 1 token, 32 layers, append",
     "64 index_copy_ captured"),
    ("TikvCache,\n20,000 tokens", "integrations/bench_transformers.py", "update, at 20000 tokens",
     "DynamicCache"),
]  # fmt: skip
HEADS = "8"  # query heads per KV head, of decode attention
DECODES = ["32 x 8,192", "1 x 32,768", "128 x 1,024"]  # sequences x tokens
PROMPTS = ["64", "2,048"]  # new tokens
SHARED = [
    ("1 x 524,288,\ncaptured", ["attend, 1 x 524,288 tokens", "the same, captured"]),
    ("32 x 8,192,\nfrom Python", ["attend, 32 x 8,192"]),
    ("32 x 8,192,\ncaptured", ["attend, 32 x 8,192", "the same, captured"]),
]
WIDTH = 4.6  # inches: words are large enough on a phone


class Bar(NamedTuple):
    """A figure, whose it is, how many times the peer's speed that is, and what is written in the bar."""

    who: str
    figure: float
    speed: float | None = None
    word: str = ""

    @property
    def text(self) -> str:
        """What is drawn beside it: the figure as the table has it, and two digits of the ratio."""
        figure = "" if self.figure == self.speed else f"{self.figure:,g}"
        ratio = "" if self.speed is None else f"{self.speed:.{2 if self.speed < 10 else 0}f}x"
        return f" {figure}  {ratio}".rstrip() if figure else f" {ratio}"

    @property
    def is_loss(self) -> bool:
        """Whether it is slower than its peer by what the label shows."""
        return self.speed is not None and round(self.speed, 2) < 1


class Group(NamedTuple):
    """The bars of one case."""

    name: str
    bars: list[Bar]
    roof: float | None = None


class Panel(NamedTuple):
    title: str
    axis: str
    groups: list[Group]
    scale: str = "linear"
    room: float = 1.2  # the axis goes to so many times the longest bar: labels stand there


class Table(NamedTuple):
    """A table of a page; its cells are without the marks of code."""

    columns: list[str]
    rows: list[list[str]]

    @property
    def cells(self) -> list[dict[str, str]]:
        """Each row by the names of its columns."""
        return [dict(zip(self.columns, row, strict=True)) for row in self.rows]

    def row(self, name: str, *below: str) -> dict[str, str]:
        """The row whose first cell begins so, or that of the rows "the same ..." just below it."""
        at = only([i for i, row in enumerate(self.rows) if row[0].startswith(name)], f"a row {name!r}")
        for other in below:
            end = next((i for i in range(at + 1, len(self.rows)) if not self.rows[i][0].startswith("the same")), None)
            found = [i for i in range(at + 1, end or len(self.rows)) if self.rows[i][0].startswith(other)]
            at = only(found, f"a row {other!r} below {name!r}")
        return self.cells[at]


def only(found, what):
    """The only one of these; it is an error if there are others, or none."""
    if len(found) != 1:
        raise SystemExit(f"report: the H200's files in docs/ have {len(found)} times {what} instead of once")
    return found[0]


def tables_of(text: str) -> list[Table]:
    """All tables of a page or a part of it."""
    found = []
    for block in re.findall(r"(?:^\|.*\|\n)+", text, re.MULTILINE):
        head, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in plain(block).splitlines()]
        found.append(Table(head, rows))
    return found


def plain(text: str) -> str:
    return text.replace("`", "")


def figure(cell: str, part: int = 0, after: str = "") -> float | None:
    """A figure of a cell: the first number, of a range the lower one, between slashes the one that is asked for.

    What stands in brackets does not count. `after`: the words that stand before the figures.
    """
    text = re.sub(r"\([^)]*\)", "", cell)
    if after not in text:
        raise SystemExit(f"report: no {after!r} in the cell {cell!r} of the H200's files in docs/")
    parts = re.split(r"\s/(?:\s|$)", text.partition(after)[2] if after else text)
    if part >= len(parts):
        raise SystemExit(
            f"report: no figure number {part + 1} between slashes in {cell!r} of the H200's files in docs/"
        )
    found = NUMBER.search(parts[part])
    return float(found[0].replace(",", "")) if found else None


def needed(cell: str, part: int = 0, after: str = "", unit: str = "") -> float:
    """The same where there has to be one, in that unit."""
    found = figure(cell, part, after)
    if found is None or unit not in cell:
        raise SystemExit(f"report: no figure in {unit or 'numbers'} in {cell!r} of the H200's files in docs/")
    return found


def copies(row_of) -> Panel:
    """Writes of many tokens, and the compaction, with the speed of memcpy that their share of it says."""
    groups = []
    for name, file, work in COPIES:
        cells = row_of(file, work)
        ours, theirs, share = (needed(cells[column]) for column in ("tikv GB/s", "torch GB/s", "of a copy"))
        groups.append(Group(name, [Bar("tikv", ours, ours / theirs), Bar("torch", theirs)], 100 * ours / share))
    return Panel("writes of many tokens", "GB/s read and written; line: the device's memcpy", groups, room=1.45)


def calls(row_of) -> Panel:
    """Microseconds of calls that write a token."""
    groups = []
    for name, file, work, peer in CALLS:
        cells = row_of(file, work)
        ours = needed(cells["tikv us"])
        theirs = needed(cells["torch us"]) if cells["torch us"] else needed(cells["others"], after=peer)
        groups.append(Group(name, [Bar("tikv", ours, theirs / ours), Bar("torch", theirs, word=peer)]))
    return Panel("writes of one token", "microseconds a call; shorter is better", groups, "log", 12)


def formats(written: Table, read: Table) -> Panel:
    """Writes, and decode attention over contiguous caches, of each format, as times the speed of float16."""
    times = {}
    for cells in written.cells:
        for part, name in enumerate(cells["kept as"].split(" / ")):
            times[name] = figure(cells["write"], part)
    heads, speed = read.columns[0], "times float16's speed"
    rows = [
        row
        for row in read.cells
        if row["storage"] == "contiguous" and row["format"] != "float16" and row[heads] == HEADS
    ]
    groups = []
    for name in dict.fromkeys(row["format"] for row in rows if "," not in row["format"]):
        time = times.get(name)
        bars = [] if time is None else [Bar("tikv", 1 / time, 1 / time, "write")]
        for row in rows:
            if row["format"] == name:
                bars.append(Bar("tikv", needed(row[speed]), needed(row[speed]), "decode"))
        groups.append(Group(name, bars, 1.0))
    axis = "times tikv's float16, which is the line"
    return Panel("fewer bits: writes, and decode over 32 x 8,192 tokens", axis, groups)


def decodes(attention: Table) -> Panel:
    """Decode attention over pages beside Triton, over contiguous memory beside torch."""
    groups = []
    for shape in DECODES:
        rows = [row for row in attention.cells if row[attention.columns[0]] == f"{shape}, {HEADS}"]
        bars = []
        for storage, peer in (("pages", "Triton"), ("contiguous", "torch")):
            row = only([row for row in rows if row["storage"] == storage], f"{shape}, {HEADS}, {storage}")
            ours, theirs, third = (needed(row[name]) for name in ("tikv, GB/s", peer, "FlashAttention-3"))
            bars += [Bar("tikv", ours, ours / max(theirs, third), storage), Bar(peer, theirs, word=storage)]
            bars.append(Bar("FlashAttention-3", third, word=storage))
        groups.append(Group(shape, bars))
    axis = "GB/s of K and V; ratio: to the faster peer"
    return Panel("decode, float16: sequences x tokens", axis, groups, room=1.35)


def prompts(new: Table) -> Panel:
    """Attention of prompts beside FlashAttention-3 over the same storage, and torch's."""
    groups = []
    for count in PROMPTS:
        rows = [row for row in new.cells if row["new tokens"] == count]
        bars = []
        for row in rows:
            ours, theirs = needed(row["tikv, TFLOP/s"]), needed(row["FlashAttention-3"])
            bars += [Bar("tikv", ours, ours / theirs, row["storage"])]
            bars += [Bar("FlashAttention-3", theirs, word=row["storage"])]
        bars.append(Bar("torch", needed(rows[0]["torch, flash"]), word="flash"))
        bars.append(Bar("torch", needed(rows[0]["torch, cuDNN, no mask"]), word="cuDNN"))
        groups.append(Group(f"{count}\nnew tokens", bars))
    axis = "TFLOP/s; ratio: to FlashAttention-3; cuDNN: no causal mask"
    return Panel("prompts over 8,192 tokens", axis, groups, room=1.35)


def shared(gpus: Table) -> Panel:
    """Attention over one cache whose tokens are split over two GPUs."""
    groups = []
    for name, row in SHARED:
        cells = gpus.row(*row)
        one, two = needed(cells["one H200"], unit="us"), needed(cells["two"], unit="us")
        bars = [Bar("tikv", two, one / two, "two GPUs"), Bar("tikv on one GPU", one, word="one GPU")]
        groups.append(Group(name, bars))
    return Panel("decode, tokens split over two H200", "microseconds; shorter is better", groups, room=1.35)


def panels(docs: pathlib.Path = ROOT / "docs") -> tuple[list[Panel], list[str]]:
    """The panels, and the lines below them, of what the files say."""
    saved = [
        json.loads((docs / name).read_text(encoding="utf-8"))
        for name in ("figures_h200.json", "figures_h200_earlier.json", "figures_two_gpus.json")
    ]
    tables = [table for found in saved for table in found["tables"]]

    def measured(program: str, title: str = "") -> Table:
        of_program = [each for each in tables if each["command"].endswith(program) and each["title"].startswith(title)]
        found = only(of_program, f"a table of {program}")
        return Table(found["columns"], [[plain(cell) for cell in row] for row in found["rows"]])

    def bench(file: str, work: str) -> dict[str, str]:
        rows = [
            dict(zip(table["columns"], row, strict=True))
            for table in saved[0]["tables"]
            for row in table["rows"]
            if f"benches/{file} " in table["command"]
        ]
        return only([row for row in rows if row.get("work") == work], f"a row {work!r} of {file}")

    codes = measured("attention_gpu.py codes")
    drawn = [
        decodes(measured("attention_gpu.py decode")),
        prompts(measured("attention_gpu.py prompts")),
        formats(measured("bench_quantize.py --arch cuda"), codes),
        copies(bench),
        calls(bench),
        shared(measured("gpus.sh", "One cache")),
    ]
    versions = ", ".join(f"{name} {version}" for name, version in saved[1]["environment"]["versions"].items())
    about = f"NVIDIA H200, {versions}; {HEADS} query heads per KV head; from the tables in docs/"
    return drawn, [*textwrap.wrap(about, 76), "x: times the peer's speed, red where tikv is slower"]


def labels(found: list[Panel]) -> list[str]:
    """The texts at all bars, in the order in which they are drawn."""
    bars = [bar for panel in found for group in panel.groups for bar in group.bars]
    return [text for bar in bars for text in (bar.word and f" {bar.word}", bar.text) if text]


def fill(axes, panel: Panel, theme: str):
    """The groups of a panel one below the other."""
    ink = picture.INK[theme]
    longest = max(max(group.roof or 0, *(bar.figure for bar in group.bars)) for group in panel.groups)
    start = 1 if panel.scale == "log" else 0
    letter = 0.022 * panel.room * longest
    y, ticks = 0.0, []
    for group in panel.groups:
        top = y
        for bar in group.bars:
            axes.barh(y, bar.figure, 0.92, color=COLOURS[bar.who])
            if bar.word:
                axes.text(start, y, f" {bar.word}", va="center", fontsize=8, color=INSIDE)
            # A label that the line would cross stands behind it.
            crossed = group.roof and bar.figure <= group.roof < bar.figure + letter * len(bar.text)
            colour, weight = (LOSS[theme], "bold") if bar.is_loss else (ink, "normal")
            at = group.roof if crossed else bar.figure
            if panel.scale == "linear":  # nor over the word in a short bar
                at = max(at, letter * (len(bar.word) + 1.5) if bar.word else 0)
            axes.text(at, y, bar.text, va="center", fontsize=8, color=colour, weight=weight)
            y += 1
        ticks.append((top + y - 1) / 2)
        if group.roof:
            axes.plot([group.roof] * 2, [top - 0.6, y - 0.4], color=ink, lw=1.5)
        y += 0.7
    axes.set_yticks(ticks, [group.name for group in panel.groups], fontsize=8)
    axes.set_ylim(y - 0.9, -0.8)
    axes.set_xscale(panel.scale)
    axes.set_xlim(start, panel.room * longest)
    axes.set_xlabel(panel.axis, fontsize=8, loc="left")
    axes.set_title(panel.title, fontsize=10, loc="left")


def figure_of(drawn: list[Panel], lines: list[str], theme: str):
    """One panel below the other, each as high as the number of its bars needs."""
    from matplotlib import patches, pyplot

    heights = [sum(len(group.bars) + 0.7 for group in panel.groups) for panel in drawn]
    size = WIDTH, 0.15 * sum(heights) + 0.7 * len(drawn) + 0.5
    whole, places = pyplot.subplots(len(drawn), 1, figsize=size, height_ratios=heights, layout="constrained")
    for axes, panel in zip(places, drawn, strict=True):
        picture.plain(axes)
        fill(axes, panel, theme)
    keys = [patches.Patch(color=colour, label=who) for who, colour in COLOURS.items()]
    whole.legend(handles=keys, frameon=False, loc="outside upper center", ncols=3)
    whole.text(0.01, -0.005, "\n".join(lines), fontsize=7, va="top")
    return whole


def draw(stem: str):
    """Draw the figures that the tables have now, in a light and a dark version."""
    picture.save(functools.partial(figure_of, *panels()), stem)
