"""Pictures as SVG text: a cache's slots, a pool's page table, bars beside a roof. They are made from plain numbers.

A picture has its own background and follows the reader's light or dark setting, so that it can be read on a page of
either colour. Its size is bounded: an ellipsis stands for what does not fit; the newest tokens are always drawn.
"""

from __future__ import annotations

import math
import os
import pathlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from tikv import extras
from tikv.errors import OptionError
from tikv.stores.files import replacing

# class: (property, light, dark). The colours are opaque, or are drawn over the background only.
COLOURS = {
    "panel": "fill:#ffffff;stroke:#d0d7de|fill:#0d1117;stroke:#3d444d",
    "ink": "fill:#1f2328|fill:#f0f6fc",
    "soft": "fill:#59636e|fill:#9198a1",
    "held": "fill:#54aeff;stroke:#0969da|fill:#1f6feb;stroke:#58a6ff",
    "newest": "fill:#54aeff;stroke:#0a3069;stroke-width:2.5|fill:#1f6feb;stroke:#f0f6fc;stroke-width:2.5",
    "sink": "fill:#eac54f;stroke:#9a6700|fill:#9e6a03;stroke:#e3b341",
    "shared": "fill:#eac54f;stroke:#9a6700|fill:#9e6a03;stroke:#e3b341",
    "empty": "fill:#f6f8fa;stroke:#d0d7de|fill:#151b23;stroke:#3d444d",
    "next": "fill:none;stroke:#cf222e;stroke-width:2;stroke-dasharray:4 3|"
    "fill:none;stroke:#ff7b72;stroke-width:2;stroke-dasharray:4 3",
    "arrow": "fill:#cf222e|fill:#ff7b72",
    "line": "fill:none;stroke:#59636e;stroke-width:1.5|fill:none;stroke:#9198a1;stroke-width:1.5",
    "tikv": "fill:#2da44e|fill:#3fb950",
    "torch": "fill:#e16f24|fill:#db6d28",
    "numpy": "fill:#8c959f|fill:#656c76",
}
MARGIN, PANEL, COLUMN = 16, 324, 8
WHEEL, GRID, SINKS = 20, 64, 8  # the most cells that are drawn
MAX_PANELS, MAX_SEQUENCES, MAX_BLOCKS, MAX_POOL, POOL_COLUMN = 4, 12, 14, 128, 16


def counted(number: int, what: str) -> str:
    """A number and what it counts, in the singular for 1.

    Examples:
        >>> counted(1, "layer"), counted(0, "layer"), counted(2, "layer")
        ('1 layer', '0 layers', '2 layers')
    """
    return f"{number} {what}{'s' * (number != 1)}"


def tokens_in_words(seen: int | str, held: int, capacity: int) -> str:
    """The tokens of a store: of how many it has room for, or how many of those that it has seen it still holds.

    Examples:
        >>> tokens_in_words(40, 40, 64), tokens_in_words(653, 64, 1024)
        ('40/64 tokens', 'tokens: 653 seen, 64 held')
    """
    if str(held) == str(seen).rpartition(" ")[2]:
        return f"{seen}/{counted(capacity, 'token')}"
    return f"tokens: {seen} seen, {held} held"


def size_in_words(nbytes: int) -> str:
    """Bytes in the unit that shows them best.

    Examples:
        >>> size_in_words(512), size_in_words(2304), size_in_words(33554432), size_in_words(2**36)
        ('512 B', '2.3 kB', '33.6 MB', '68.7 GB')
    """
    if nbytes < 1000:
        return f"{nbytes} B"
    if nbytes >= 10_000_000_000:
        return f"{nbytes / 1e9:.1f} GB"
    return f"{nbytes / 1e3:.1f} kB" if nbytes < 100_000 else f"{nbytes / 1e6:.1f} MB"


def _style() -> str:
    light, dark = (
        "".join(f".tk-{name}{{{value.split('|')[theme]}}}" for name, value in COLOURS.items()) for theme in (0, 1)
    )
    return f"<style>{light}@media (prefers-color-scheme:dark){{{dark}}}</style>"


def _text(x: float, y: float, words: object, kind: str = "ink", size: float = 12, anchor: str = "middle") -> str:
    weight = ' font-weight="600"' if size > 12 else ""
    return (
        f'<text class="tk-{kind}" x="{x:.1f}" y="{y:.1f}" font-size="{size:g}" text-anchor="{anchor}"{weight}>'
        f"{escape(str(words))}</text>"
    )


def _label(x: float, y: float, words: object, kind: str, room: float, most: float) -> str:
    """Text in a cell, as large as its width allows, from 6 to `most` pixels."""
    return _text(x, y, words, kind, max(6.0, min(most, room / len(str(words)))))


def _box(x: float, y: float, width: float, height: float, kind: str, opacity: float = 1.0) -> str:
    faded = f' fill-opacity="{opacity:.2f}"' if opacity < 1 else ""
    return f'<rect class="tk-{kind}" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="4"{faded}/>'


def _picture(width: float, height: float, title: str, parts: Iterable[str]) -> str:
    """The parts on a panel, with the title as its accessible name."""
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" '
            f'height="{height:g}" role="img" font-family="ui-sans-serif, system-ui, Helvetica, Arial, sans-serif">',
            f"<title>{escape(title)}</title>",
            _style(),
            f'<rect class="tk-panel" x="0.5" y="0.5" width="{width - 1:g}" height="{height - 1:g}" rx="10"/>',
            *parts,
            "</svg>",
            "",
        ]
    )


def _fitted(words: str, width: float, size: float = 12) -> str:
    """Text shortened with an ellipsis to about that many pixels."""
    room = int(width / (0.58 * size))
    return words if len(words) <= room else words[: room - 1] + "…"


def _heading(title: str, width: float) -> list[str]:
    """A repr as a heading: the name, and below it what is in its brackets."""
    name, _, about = title.partition("(")
    parts = [_text(MARGIN, 30, _fitted(name, width - 2 * MARGIN, 15), size=15, anchor="start")]
    if about:
        words = _fitted(about.removesuffix(")"), width - 2 * MARGIN, 11)
        parts.append(_text(MARGIN, 48, words, "soft", 11, "start"))
    return parts


def ranges(numbers: Sequence[int]) -> str:
    """Ascending integers as words.

    Examples:
        >>> ranges([0, 1, 2, 5, 7, 8])
        '0-2, 5, 7-8'
    """
    runs: list[list[int]] = []
    for n in numbers:
        if runs and n == runs[-1][1] + 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def around(count: int, anchors: Iterable[int], limit: int) -> list[int | None]:
    """Which of ``count`` cells to draw in ``limit`` places: all, or those around the anchors, with None for a gap.

    Examples:
        >>> around(5, [2], 8)
        [0, 1, 2, 3, 4]
        >>> around(1000, [500], 9)
        [0, 1, None, 499, 500, 501, None, 998, 999]
    """
    if count <= limit:
        return list(range(count))
    centres = sorted({0, count - 1, *(min(max(a, 0), count - 1) for a in anchors)})
    best: list[int | None] = []
    for radius in range(limit):
        near = sorted({s for c in centres for s in range(max(0, c - radius), min(count, c + radius + 1))})
        cells: list[int | None] = []
        for s in near:
            if s != (cells[-1] if cells else -1):
                if s and s - 1 != (cells[-1] if cells else None):
                    cells.append(None)
                cells.append(s)
        if best and len(cells) > limit:
            break
        best = cells
    return best


@dataclass(frozen=True)
class Slots:
    """The slots of one layer, or of several in the same state.

    Args:
        name: the heading above them.
        slots: how many there are, sinks included.
        sinks: how many of them never move.
        wraps: whether the others are a ring.
        length: tokens appended.
        valid_from: the oldest position after the sinks that is not overwritten.
        true_positions: the position in each slot, -1 for an empty one, if a compaction left holes: the other arguments
            then count as if there were no holes.
        weights: a weight from 0 to 1 for each slot, which colours it instead of its age.

    Examples:
        >>> [Slots("layer 0", slots=4, sinks=1, wraps=True, length=6, valid_from=3).position_in(s) for s in range(4)]
        [0, 4, 5, 3]
    """

    name: str
    slots: int
    sinks: int
    wraps: bool
    length: int
    valid_from: int
    true_positions: tuple[int, ...] = ()
    weights: tuple[float, ...] = ()

    def label(self, slot: int, position: int) -> int:
        """The position to write into a slot."""
        return self.true_positions[slot] if self.true_positions else position

    def position_in(self, slot: int) -> int | None:
        """The position in a slot, or None."""
        if not self.wraps or slot < self.sinks:
            return slot if slot < self.length else None
        if self.length <= self.sinks:
            return None
        newest = self.length - 1
        behind = (self.slot_of(newest) - slot) % (self.slots - self.sinks)
        position = newest - behind
        return position if position >= max(self.valid_from, self.sinks) else None

    def slot_of(self, position: int) -> int:
        """The slot in which a position is or would be."""
        if not self.wraps or position < self.sinks:
            return position
        return self.sinks + (position - self.sinks) % (self.slots - self.sinks)

    @property
    def oldest(self) -> int:
        """The oldest position after the sinks that can be read."""
        return max(self.valid_from, self.sinks) if self.wraps else 0

    def age(self, position: int) -> float:
        """0 for the oldest position held after the sinks, 1 for the newest."""
        span = self.length - 1 - self.oldest
        return (position - self.oldest) / span if span > 0 else 1.0


def _cell_kind(row: Slots, slot: int, position: int | None) -> tuple[str, float]:
    if position is None:
        return "empty", 1.0
    if row.weights:
        return "held", 0.06 + 0.9 * row.weights[slot]
    if position == row.length - 1:
        return "newest", 0.9
    if row.wraps and position < row.sinks:
        return "sink", 0.75
    return "held", 0.18 + 0.62 * row.age(position)


def _wedge(cx: float, cy: float, inner: float, outer: float, start: float, end: float) -> str:
    points = [
        (cx + radius * math.sin(angle), cy - radius * math.cos(angle))
        for radius, angle in ((outer, start), (outer, end), (inner, end), (inner, start))
    ]
    (ax, ay), (bx, by), (px, py), (qx, qy) = points
    large = int(end - start > math.pi)
    return (
        f"M{ax:.1f} {ay:.1f}A{outer} {outer} 0 {large} 1 {bx:.1f} {by:.1f}L{px:.1f} {py:.1f}"
        f"A{inner} {inner} 0 {large} 0 {qx:.1f} {qy:.1f}Z"
    )


def _wheel(row: Slots, x: float, y: float) -> list[str]:
    """A ring as a wheel, its first slot on top, clockwise; a number is the position in its slot."""
    ring, outer, inner = row.slots - row.sinks, 118.0, 70.0
    cx, cy = x + PANEL / 2, y + 152
    next_slot = row.slot_of(row.length)
    marks = [row.slot_of(p) - row.sinks for p in (row.length - 1, row.length) if p >= row.sinks]
    shown = around(ring, marks, WHEEL)
    turn, middle = 2 * math.pi / len(shown), (outer + inner) / 2
    parts, over = [], []
    for i, cell in enumerate(shown):
        # An arc needs two different ends, so even a ring of one slot is drawn with a small gap.
        start, end = i * turn + 0.012, (i + 1) * turn - 0.012
        angle = (start + end) / 2
        at = (cx + middle * math.sin(angle), cy - middle * math.cos(angle) + 4)
        if cell is None:
            parts.append(_text(*at, "…", "soft", 16))
            continue
        slot = row.sinks + cell
        position = row.position_in(slot)
        kind, opacity = _cell_kind(row, slot, position)
        path = _wedge(cx, cy, inner, outer, start, end)
        parts.append(f'<path class="tk-{kind}" fill-opacity="{opacity:.2f}" d="{path}"/>')
        if slot == next_slot and row.length >= row.sinks:
            over.append(f'<path class="tk-next" d="{_wedge(cx, cy, inner + 3, outer - 3, start, end)}"/>')
            tip, base = inner - 3, inner - 15
            corners = [(tip, 0.0), (base, 0.09), (base, -0.09)]
            points = " ".join(
                f"{cx + r * math.sin(angle + d):.1f},{cy - r * math.cos(angle + d):.1f}" for r, d in corners
            )
            over.append(f'<polygon class="tk-arrow" points="{points}"/>')
        if position is not None:
            over.append(_label(*at, row.label(slot, position), "ink", (min(middle * turn, 44) - 4) / 0.65, 12.0))
    rounds = max(0, row.length - row.sinks) // ring
    over += [
        _text(cx, cy - 12, counted(row.length, "token"), size=15),
        _text(cx, cy + 6, f"ring of {ring}", "soft", 11),
        _text(cx, cy + 22, f"full {rounds}×" if rounds else "not full yet", "soft", 11),
    ]
    return parts + over


def _strip(row: Slots, cells: Sequence[int | None], x: float, y: float) -> list[str]:
    """Cells in rows of eight; a number is the position in its slot."""
    parts = []
    size = PANEL / COLUMN
    for i, slot in enumerate(cells):
        cell_x, cell_y = x + i % COLUMN * size, y + i // COLUMN * 31
        if slot is None:
            parts.append(_text(cell_x + size / 2, cell_y + 18, "…", "soft", 16))
            continue
        position = row.position_in(slot)
        kind, opacity = _cell_kind(row, slot, position)
        parts.append(_box(cell_x + 2, cell_y, size - 4, 27, kind, opacity))
        if slot == row.length and not (row.wraps and slot >= row.sinks):
            parts.append(_box(cell_x + 4, cell_y + 2, size - 8, 23, "next"))
        if position is not None:
            label = row.label(slot, position)
            parts.append(_label(cell_x + size / 2, cell_y + 17.5, label, "ink", (size - 8) / 0.65, 11.0))
    return parts


def _held(row: Slots) -> str:
    """The positions that can be read, in words."""
    if row.length == 0:
        return "no tokens" if row.true_positions else "no tokens yet"
    if row.true_positions:
        return f"holds positions {ranges(sorted(p for p in row.true_positions if p >= 0))}"
    newest, oldest = row.length - 1, row.oldest
    sinks = f"0-{min(row.sinks, row.length) - 1}" if row.wraps and row.sinks else ""
    rest = f"{oldest}-{newest}" if newest >= oldest else ""
    return "holds positions " + " and ".join(part for part in (sinks, rest) if part)


def _legend(x: float, y: float, entries: Sequence[tuple[str, float, str]]) -> list[str]:
    parts = []
    for kind, opacity, words in entries:
        parts += [_box(x, y - 10, 13, 13, kind, opacity), _text(x + 19, y, words, "soft", 11, "start")]
        x += 34 + 5.9 * len(words)
    return parts


def slots(title: str, rows: Sequence[Slots]) -> str:
    """The slots of a contiguous cache: a wheel for each ring, a strip for each layer without one.

    Args:
        title: a repr: its name is written large, and what is in its brackets small.
        rows: the different states that layers are in; four are drawn, the others counted.

    Returns:
        An SVG document, of at most 1,400 by 500 pixels whatever the capacity.
    """
    shown = rows[:MAX_PANELS]
    width = max(2 * MARGIN + len(shown) * (PANEL + MARGIN) - MARGIN, 2 * MARGIN + 2 * PANEL)
    sinks = any(row.wraps and row.sinks for row in shown)
    parts = _heading(title, width)
    height = 0.0
    for i, row in enumerate(shown):
        x, y = MARGIN + i * (PANEL + MARGIN), 80.0
        form = f"window {row.slots}" if row.wraps else f"capacity {row.slots}"
        if row.wraps and row.sinks:
            form += f", {counted(row.sinks, 'sink')}"
        parts.append(_text(x, y, _fitted(f"{row.name}: {form}", PANEL, 12), anchor="start"))
        parts.append(_text(x, y + 17, _fitted(_held(row), PANEL, 11), "soft", 11, "start"))
        y += 30
        if row.wraps:
            if row.sinks:
                parts += _strip(row, around(row.sinks, [], SINKS), x, y)
            y += 42 if sinks else 8
            parts += _wheel(row, x, y)
            height = max(height, y + 300)
        else:
            cells = around(row.slots, [row.length - 1, row.length], GRID)
            parts += _strip(row, cells, x, y)
            height = max(height, y + 31 * -(-len(cells) // COLUMN) + 10)
    entries = [("newest", 0.9, "newest"), ("held", 0.8, "newer"), ("held", 0.18, "older")]
    if any(row.weights for row in shown):
        entries = [("held", 0.96, "most mass"), ("held", 0.06, "none")]
    entries += [("sink", 0.75, "sink, never overwritten")] if sinks else []
    entries += [("empty", 1.0, "empty"), ("next", 1.0, "where the next token goes")]
    parts += _legend(MARGIN, height + 12, entries)
    numbers = "A number is the position of the token in that slot."
    if any(row.wraps for row in shown):
        numbers += " The first slot of a ring is on top, the next one to its right."
    parts.append(_text(MARGIN, height + 30, numbers, "soft", 11, "start"))
    if len(rows) > len(shown):
        parts.append(_text(width - MARGIN, 30, f"and {len(rows) - len(shown)} other states", "soft", 11, "end"))
    return _picture(width, height + 46, title, parts)


@dataclass(frozen=True)
class Table:
    """One sequence's row of a page table: its number, tokens and blocks; no blocks while it is swapped out."""

    seq: int | str
    length: int
    blocks: Sequence[int]
    swapped: bool = False


def _block(x: float, y: float, block: int, holders: int, filled: float, width: float) -> list[str]:
    """A block with its number, filled from the left, and with the number of its holders if there are several."""
    kind = "shared" if holders > 1 else "held"
    parts = [_box(x, y, width, 27, "empty")]
    if filled > 0:
        parts.append(_box(x, y, max(width * filled, 4), 27, kind, 0.7))
    words = f"{block} ×{holders}" if holders > 1 else str(block)
    parts.append(_label(x + width / 2, y + 17.5, words, "ink", (width - 6) / 0.6, 11.0))
    return parts


def table(
    title: str, block_size: int, num_blocks: int, free: int, holders: Callable[[int], int], rows: Sequence[Table]
) -> str:
    """The page table of a pool: each sequence's blocks in order, and all blocks with those that are shared or free.

    Args:
        title: a repr: its name is written large, and what is in its brackets small.
        block_size: tokens of a block.
        num_blocks: blocks of the pool.
        free: how many of them no sequence holds.
        holders: how many sequences hold each block.
        rows: the sequences; twelve are drawn, the others counted.

    Returns:
        An SVG document, of at most 940 by 900 pixels whatever the pool.
    """
    cell, indent = 52.0, 170.0
    width = 2 * MARGIN + indent + MAX_BLOCKS * cell
    shown = rows[:MAX_SEQUENCES]
    parts = _heading(title, width)
    about = f"page table: the numbers of blocks of {counted(block_size, 'token')}, in order"
    parts.append(_text(MARGIN, 76, about, "soft", 11, "start"))
    y = 88.0
    for row in shown:
        parts.append(_text(MARGIN, y + 18, f"sequence {row.seq}", anchor="start"))
        parts.append(_text(MARGIN + indent - 14, y + 18, counted(row.length, "token"), "soft", 11, "end"))
        if row.swapped:
            parts.append(_text(MARGIN + indent, y + 18, "swapped out to the host", "soft", 11, "start"))
        for i, at in enumerate(around(len(row.blocks), [], MAX_BLOCKS)):
            x = MARGIN + indent + i * cell
            if at is None:
                parts.append(_text(x + cell / 2, y + 18, "…", "soft", 16))
                continue
            filled = min(1.0, max(0.0, (row.length - at * block_size) / block_size))
            parts += _block(x + 2, y, row.blocks[at], holders(row.blocks[at]), filled, cell - 4)
        y += 33
    if not rows:
        parts.append(_text(MARGIN, y + 18, "no sequences", "soft", 11, "start"))
        y += 33
    if len(rows) > len(shown):
        parts.append(_text(MARGIN, y + 14, f"and {len(rows) - len(shown)} more sequences", "soft", 11, "start"))
        y += 24
    y += 24
    parts.append(_text(MARGIN, y, f"pool: {counted(num_blocks, 'block')}, {free} free", "soft", 11, "start"))
    y += 12
    size = (width - 2 * MARGIN) / POOL_COLUMN
    named = [b for row in shown for b in (*row.blocks[:1], *row.blocks[-1:])]
    cells = around(num_blocks, [max(named)] if named else [], MAX_POOL)
    for i, block in enumerate(cells):
        x, top = MARGIN + i % POOL_COLUMN * size, y + i // POOL_COLUMN * 26
        if block is None:
            parts.append(_text(x + size / 2, top + 16, "…", "soft", 16))
            continue
        n = holders(block)
        parts.append(_box(x + 2, top, size - 4, 22, "shared" if n > 1 else "held" if n else "empty", 0.7 if n else 1.0))
        parts.append(_label(x + size / 2, top + 15, block, "ink" if n else "soft", (size - 8) / 0.65, 10.0))
    y += 26 * -(-len(cells) // POOL_COLUMN) + 20
    entries = [("held", 0.7, "held by one sequence"), ("shared", 0.7, "shared, × its holders"), ("empty", 1.0, "free")]
    parts += _legend(MARGIN, y, entries)
    return _picture(width, y + 16, title, parts)


@dataclass(frozen=True)
class Bars:
    """One group of bars: its name, a value for each peer, the label of each bar, and the roof."""

    name: str
    values: dict[str, float]
    labels: dict[str, str]
    roof: float | None = None


def bars(title: str, note: str, groups: Sequence[Bars]) -> str:
    """Horizontal bars, each group on its own scale; a line marks its roof.

    Args:
        title: a repr: its name is written large, and what is in its brackets small.
        note: the small line below.
        groups: the groups; a longer bar is better. A group's longest bar or its roof takes the whole width.

    Returns:
        An SVG document that is 900 pixels wide.
    """
    indent, width, room = 250.0, 900.0, 430.0
    parts = _heading(title, width)
    y = 66.0
    for group in groups:
        scale = room / max([*group.values.values(), group.roof or 0.0])
        tall = 17 * len(group.values)
        parts.append(_text(MARGIN + indent - 12, y + tall / 2 + 4, _fitted(group.name, indent - 12), anchor="end"))
        for i, (peer, value) in enumerate(group.values.items()):
            kind = peer if peer in COLOURS else "held"
            parts.append(_box(MARGIN + indent, y + 17 * i, max(value * scale, 2), 14, kind))
            after = MARGIN + indent + max(value, group.roof or 0) * scale + 8
            parts.append(_text(after, y + 17 * i + 11, f"{peer} {group.labels[peer]}", "soft", 11, "start"))
        if group.roof is not None:
            x = MARGIN + indent + group.roof * scale
            parts.append(f'<path class="tk-line" d="M{x:.1f} {y - 3:.1f}V{y + tall:.1f}"/>')
        y += tall + 14
    for at in range(0, len(note), 140):
        y += 15
        parts.append(_text(MARGIN, y, note[at : at + 140], "soft", 10, "start"))
    return _picture(width, y + 18, title, parts)


def layers(title: str, states: Iterable[tuple[int, tuple[str, tuple[Any, ...]]]]) -> str:
    """`slots` of the layers of a cache, of which those in the same state share one drawing.

    `states` has the number of each layer, and what it shows: words after the layer's number, and the other arguments of
    `Slots`.
    """
    groups: dict[tuple[str, tuple[Any, ...]], list[int]] = {}
    for index, state in states:
        groups.setdefault(state, []).append(index)
    rows = [
        Slots(f"layer{'s' * (len(group) > 1)} {ranges(group)}{words}", *shown)
        for (words, shown), group in groups.items()
    ]
    return slots(title, rows)


def target_of(path: str | os.PathLike[str], operation: str) -> pathlib.Path:
    """The path to write to.

    Raises:
        OptionError: it ends in neither .svg nor .png.
        CacheFileError: it cannot be written.
        MissingPackageError: it ends in .png, and the packages that make one are not installed.
    """
    suffix = pathlib.Path(path).suffix
    if suffix not in (".svg", ".png"):
        raise OptionError(
            f"{operation}: {os.fspath(path)!r} does not end in .svg or .png, the formats drawn. Give the file one of "
            "these suffixes."
        )
    if suffix == ".png":
        _png_packages(operation)
    return replacing.target_of(path, operation, suffix)


def save(svg: str, path: str | os.PathLike[str] | None, operation: str) -> str:
    """Return a picture's text, and write it to `path`, as SVG or as PNG, unless that is None."""
    if path is not None:
        target = target_of(path, operation)
        data = svg.encode() if target.suffix == ".svg" else _as_png(svg, operation)
        replacing.replace(target, data, operation, target.suffix)
    return svg


def _png_packages(operation: str) -> tuple[Any, Any]:
    """What draws an SVG, and what has a font, since a machine may have none."""
    return extras.need("resvg_py", f"{operation} as PNG"), extras.need("matplotlib", f"{operation} as PNG")


def _as_png(svg: str, operation: str) -> bytes:
    """The picture in its light colours, with two pixels for each unit."""
    resvg, matplotlib = _png_packages(operation)
    fonts = pathlib.Path(matplotlib.get_data_path(), "fonts", "ttf")
    font = "DejaVu Sans"
    return bytes(
        resvg.svg_to_bytes(
            svg_string=svg, zoom=2, font_dirs=[str(fonts)], font_family=font, sans_serif_family=font
        )
    )  # fmt: skip
