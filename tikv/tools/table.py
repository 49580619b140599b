"""Tables on a terminal or in a pipe: with rich on a terminal that has it, as aligned plain text elsewhere."""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
from collections.abc import Sequence
from typing import Any

NARROWEST = 12  # the least width, in characters, of a wrapped column


def show(
    title: str, header: Sequence[str], rows: Sequence[Sequence[Any]], styles: dict[str, str] | None = None
) -> None:
    """Print a table.

    A table wider than the terminal, or than the environment's COLUMNS, is printed in several parts, each with the first
    column; a cell that is still too wide continues on the next line.

    Args:
        title: the line above.
        header: names of the columns.
        rows: the rows, each with as many cells.
        styles: rich's style for a cell with exactly this text.
    """
    cells = [[str(cell) for cell in row] for row in rows]
    drawn = _rich_modules() if sys.stdout.isatty() else None
    gap, edge = (3, 4) if drawn else (2, 0)
    limit = line_width()
    widths = _fitted([max(len(row[i]) for row in [list(header), *cells]) for i in range(len(header))], limit, gap, edge)
    for i, columns in enumerate(parts(widths, limit, gap, edge)):
        part = [[row[c] for c in columns] for row in [list(header), *cells]]
        above = title if i == 0 else f"{title}, continued"
        if drawn:
            _draw(drawn, above, part, [widths[c] for c in columns], styles or {})
        else:
            print(end="\n" * (i > 0))
            tell(above)
            print("\n".join(_lines(part, [widths[c] for c in columns])))


def tell(text: str) -> None:
    """Print a sentence that belongs to a table, in lines no wider than the table's."""
    limit = line_width()
    print(text if limit is None else textwrap.fill(text, limit, break_on_hyphens=False))


def line_width() -> int | None:
    """Characters of a line: the environment's COLUMNS, else the terminal's; None in a pipe, where all fits."""
    if os.environ.get("COLUMNS", "").isdigit() or sys.stdout.isatty():
        return max(20, shutil.get_terminal_size().columns)
    return None


def parts(widths: Sequence[int], limit: int | None, gap: int, edge: int) -> list[list[int]]:
    """The columns of each part: the first column, then as many others as fit into `limit`.

    Examples:
        >>> parts([10, 8, 8, 8], 32, gap=2, edge=0)
        [[0, 1, 2], [0, 3]]
    """
    groups, used = [[0]], edge + widths[0]
    for column in range(1, len(widths)):
        if limit is not None and used + gap + widths[column] > limit and len(groups[-1]) > 1:
            groups.append([0])
            used = edge + widths[0]
        groups[-1].append(column)
        used += gap + widths[column]
    return groups


def _fitted(widths: list[int], limit: int | None, gap: int, edge: int) -> list[int]:
    """The widths, with no column wider than the space beside the first."""
    if limit is None:
        return widths
    first = min(widths[0], max(NARROWEST, limit - edge - gap - NARROWEST))
    return [first, *(min(width, max(NARROWEST, limit - edge - gap - first)) for width in widths[1:])]


def _lines(part: list[list[str]], widths: list[int]) -> list[str]:
    lines = []
    for number, row in enumerate(part):
        wrapped = [
            [cell] if len(cell) <= width else textwrap.wrap(cell, width) or [""]
            for cell, width in zip(row, widths, strict=True)
        ]
        for i in range(max(map(len, wrapped))):
            line = [column[i] if i < len(column) else "" for column in wrapped]
            lines.append("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
        if number == 0:
            lines.append("  ".join("-" * width for width in widths))
    return lines


def _rich_modules() -> Any:
    try:
        import rich.console
        import rich.table
        import rich.text
    except ImportError:
        return None
    return rich


def _draw(rich: Any, title: str, part: list[list[str]], widths: list[int], styles: dict[str, str]) -> None:
    drawn = rich.table.Table(title=title, title_justify="left")
    for name, width in zip(part[0], widths, strict=True):
        drawn.add_column(rich.text.Text(name), overflow="fold", min_width=min(width, NARROWEST), max_width=width)
    for row in part[1:]:
        drawn.add_row(*(rich.text.Text(c, styles.get(c, "")) for c in row))  # a path in brackets is not markup
    rich.console.Console().print(drawn)
