"""Files that examples/whole_model.py writes, as tables of the manual and as a picture, light and dark.

    python examples/whole_model.py --json mine.json             measures, and adds a run to the file
    python benches/whole_models.py mine.json --svg mine         draws mine-light.svg and mine-dark.svg
    python benches/whole_models.py                              draws docs/whole-model from docs/whole_models_h200.json

`python benches/tables.py write FILE PAGE ...` puts the tables into pages.
"""

import argparse
import functools
import json
import pathlib
import textwrap

import picture

DOCS = pathlib.Path(__file__).resolve().parent.parent / "docs"
OURS = "TikvCache"
COLOURS = {OURS: picture.COLOURS["tikv"], "transformers": picture.COLOURS["torch"]}
LOSS = {"light": "#cf222e", "dark": "#ff7b72"}
# Each is a column of the tables; those with True are in short ones too.
FIELDS = {
    "prompt_ms": ("prompt", False),
    "token_ms": ("each new token", True),
    "later_ms": ("each after the second", False),
    "peak_mb": ("peak memory beyond the weights", True),
    "cache_mb": ("the cache alone", False),
    "first_call_s": ("first call", False),
    "as_dynamic": ("new tokens that equal DynamicCache's", True),
    "as_eager": ("that equal those with torch's attention", False),
}
PANELS = ("token_ms", "prompt_ms", "peak_mb", "first_call_s")
# Of several runs, those that the picture leaves out for one text and for more: a phone shows it, too.
LEFT_OUT = {"one": ("peak_mb",), "more": ("prompt_ms", "first_call_s")}
WIDTH = 4.6  # inches


def interval(figure) -> tuple[float, float]:
    """The least and the greatest of several runs; most figures are the median of one."""
    return tuple(figure) if isinstance(figure, list) else (figure, figure)


def spelled(figure, field: str) -> str:
    """A figure with its unit: 2.70 ms, 14.0 to 19.1 ms, 17.3 GB."""
    ends, unit = interval(figure), field.rpartition("_")[2]
    if unit == "mb":
        return f"{ends[1] / 1000:.1f} GB" if ends[1] >= 1000 else f"{number(ends[1])} MB"
    return f"{' to '.join(dict.fromkeys(map(number, ends)))} {unit}"


def number(value) -> str:
    """Three digits that count, and all that stand before the point; a whole number as it is."""
    digits = 0 if isinstance(value, int) else 2 if value < 9.995 else 1 if value < 99.95 else 0
    return f"{value:,.{digits}f}"


def ratio(figure, others) -> tuple[float, float]:
    """How many times the best of the others it is, at least and at most."""
    best = min(map(interval, others))
    least, most = interval(figure)
    return least / best[1], most / best[0]


def title(run: dict) -> str:
    """How many texts of how many tokens."""
    if "batch" not in run:
        return "all runs"
    return f"{run['batch']} text{'s' * (run['batch'] > 1)} of {run['prompt']:,} tokens"


def parts(found: dict) -> list[dict]:
    """The runs, and what is known of all of them together."""
    together = found.get("of_all_runs")
    return [*found["runs"], *([{"rows": together}] if together else [])]


def measured(run: dict, field: str) -> dict:
    """Cache to figure, of those that have it."""
    return {row["name"]: row[field] for row in run["rows"] if row.get(field) is not None}


def about(found: dict) -> str:
    """The model, the machine and the versions, which are those of all runs.

    Raises:
        SystemExit: they are not.
    """
    lines = set()
    for run in found["runs"]:
        versions = ", ".join(f"{name} {version}" for name, version in run["versions"].items())
        lines.add(f"{run['machine']}, {versions}; {run['model']}")
    if len(lines) != 1:
        raise SystemExit(f"whole_models: the runs of a file are of one model and machine, not {' and '.join(lines)}")
    return lines.pop()


def markdown(found: dict, short: bool = False) -> str:
    """The table as a page has it, one row for each run and cache; `short`: fewer columns, and no commands."""
    fields = [field for field, (_, brief) in FIELDS.items() if brief or not short]
    fields = [field for field in fields if any(measured(part, field) for part in parts(found))]
    lines = [["texts", "cache", *(FIELDS[field][0] for field in fields)], ["---"] * (2 + len(fields))]
    for part in parts(found):
        for row in part["rows"]:
            if row.get("failed") or any(row.get(field) is not None for field in fields):
                lines.append([title(part), row["name"], *(cell(part, field, row) for field in fields)])
    text = about(found)
    if not short:
        text += (
            f"; {' and '.join(f'`{command}`' for command in dict.fromkeys(run['command'] for run in found['runs']))}"
        )
    told = [textwrap.fill(f"{text}:", 128, break_long_words=False, break_on_hyphens=False)]
    told.append("\n".join(f"| {' | '.join(cells)} |" for cells in lines))
    if any("(*)" in each for line in lines for each in line):
        told.append("(*) from another run.")
    return "\n\n".join(told) + "\n"


def cell(run: dict, field: str, row: dict) -> str:
    """A figure of a row as the table has it, or why the row failed, or "not measured"."""
    if row.get("failed"):
        return row["failed"].partition(":")[0]
    if row.get(field) is None:
        return "not measured"
    text = f"{row[field]} of {run['tokens']}" if field.startswith("as_") else spelled(row[field], field)
    return text + " (*)" * (field in row.get("another_run", ()))


def panels(found: dict) -> list[tuple[str, list[tuple[str, tuple[float, float], str, bool]]]]:
    """Of each panel the title and the bars: cache, (least, greatest), label, whether transformers' best is less."""
    drawn = []
    for part in parts(found):
        left_out = ()
        if len(found["runs"]) > 1 and "batch" in part:
            left_out = LEFT_OUT["one" if part["batch"] == 1 else "more"]
        for field in [field for field in PANELS if field not in left_out]:
            figures = measured(part, field)
            others = [figure for name, figure in figures.items() if not name.startswith(OURS)]
            bars = []
            for name, figure in figures.items():
                label, lost = f" {spelled(figure, field)}", False
                if name.startswith(OURS) and others:
                    times = ratio(figure, others)
                    label += f"  {' to '.join(dict.fromkeys(f'{end:.2f}' for end in times))}x"
                    lost = round(times[1], 2) > 1
                bars.append((name, interval(figure), label, lost))
            if bars:
                drawn.append((f"{title(part)}: {FIELDS[field][0]}", bars))
    return drawn


def line(found: dict) -> str:
    """What stands below the picture."""
    words = "x: times the better of transformers' two, red where it is more; pale: up to the greatest of several runs"
    return "\n".join(textwrap.fill(each, 78) for each in (about(found), words))


def figure_of(found: dict, theme: str):
    """A panel below the other, so that words are large enough on a phone."""
    from matplotlib import patches, pyplot

    drawn = panels(found)
    figure, axes = pyplot.subplots(
        len(drawn), 1, figsize=(WIDTH, 0.5 + 1.35 * len(drawn)), layout="constrained", squeeze=False
    )
    for place, (name, bars) in zip(axes.flat, drawn, strict=True):
        picture.plain(place)
        for at, (cache, (least, most), label, lost) in enumerate(bars):
            colour = COLOURS[OURS if cache.startswith(OURS) else "transformers"]
            place.barh(at, most, 0.85, color=colour, alpha=0.4 if least < most else 1)
            place.barh(at, least, 0.85, color=colour)
            look = {"color": LOSS[theme], "weight": "bold"} if lost else {}
            place.text(most, at, label, va="center", fontsize=8, **look)
        place.set_yticks(range(len(bars)), [cache for cache, *_ in bars], fontsize=8)
        place.set_xlim(0, 1.75 * max(most for _, (_, most), *_ in bars))
        place.set_xticks([])
        place.set_title(name, fontsize=9, loc="left")
        place.invert_yaxis()
    keys = [patches.Patch(color=colour, label=who) for who, colour in COLOURS.items()]
    figure.legend(handles=keys, frameon=False, loc="outside upper center", ncols=2)
    figure.text(0.01, -0.01, line(found), fontsize=7, va="top")
    return figure


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", nargs="?", type=pathlib.Path, default=DOCS / "whole_models_h200.json")
    parser.add_argument(
        "--svg", metavar="STEM", default=str(DOCS / "whole-model"), help="draw STEM-light.svg and STEM-dark.svg"
    )
    given = parser.parse_args()
    found = json.loads(given.file.read_text(encoding="utf-8"))
    picture.save(functools.partial(figure_of, found), given.svg)


if __name__ == "__main__":
    main()
