"""Plots of the tables in docs/benchmarks.md, docs/compatibility.md and docs/trainers.md, as SVG.

``python docs/tools/plots.py`` writes them to docs/plots. A table stays the source of each figure: nothing is
measured here. The pictures follow the reader's dark or light setting; the standard library draws them.
"""

from __future__ import annotations

import html
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

DOCS = Path(__file__).parents[1]
FOLDER = DOCS / "plots"
LEFT, RIGHT, WIDTH, ROW = 310, 110, 880, 26
STYLE = """  <style>
    svg { --ground: #fbfcfe; --grid: #d8dfe8;
          --ink: #1d2733; --quiet: #47525f; --first: #a86500; --later: #1f5fa8 }
    @media (prefers-color-scheme: dark) {
      svg { --ground: #141b24; --grid: #354153;
            --ink: #e8edf3; --quiet: #b3bfcc; --first: #e0a526; --later: #7db4f0 }
    }
    text { font-size: 13px; fill: var(--ink) }
    .quiet { fill: var(--quiet) } .end { text-anchor: end } .middle { text-anchor: middle }
    .head { font-size: 15px; font-weight: 600 }
    .grid { stroke: var(--grid); stroke-width: 1 } .one { stroke: var(--quiet); stroke-width: 1.5 }
    .first { fill: var(--first) } .later { fill: var(--later) } .other { fill: var(--quiet); opacity: .55 }
    .range { stroke-width: 2; opacity: .6 }
    .range.first { stroke: var(--first) } .range.later { stroke: var(--later) }
  </style>
"""


class Ratio(NamedTuple):
    """A median, with the lowest and the highest if there are any; and the median as the table writes it."""

    median: float
    low: float
    high: float
    text: str


class Compared(NamedTuple):
    """A row of a table of ratios: its name, the first epoch, later epochs."""

    name: str
    first: Ratio
    later: Ratio


class Speed(NamedTuple):
    """What one library does, in samples a second."""

    name: str
    value: float


def rows_of(page: str, heading: str) -> list[list[str]]:
    """The cells of the first table after a heading, without its own head."""
    text = page.split(heading, 1)[1]
    lines = re.search(r"(?:^\|.*\n)+", text, re.M)
    assert lines is not None, heading
    return [[cell.strip() for cell in line.strip("|\n").split(" | ")] for line in lines[0].splitlines()[2:]]


def ratio(cell: str) -> Ratio:
    found = re.match(r"([\d.]+)x(?: \(([\d.]+) to ([\d.]+)\))?", cell)
    assert found is not None, cell
    median = float(found[1])
    return Ratio(median, float(found[2] or median), float(found[3] or median), found[1])


def speeds(cell: str) -> list[Speed]:
    """``FFCV 58,300/s; stocaching, MONAI 8,000/s`` as one entry for each."""
    found = []
    for part in cell.split(";"):
        match = re.search(r"([\w ,.']+?) (?:[\d,]+ to )?([\d,]+)/s", part.strip())
        assert match is not None, part
        name = re.sub(r"^with 0 workers (.+)", r"\1, 0 workers", match[1])
        found.append(Speed(name, float(match[2].replace(",", ""))))
    return found


# ---- drawing -------------------------------------------------------------------------------------------


class Picture:
    """Collects the parts of an SVG."""

    def __init__(self, height: int, label: str) -> None:
        self._parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
            f'aria-label="{html.escape(label)}" '
            'font-family="system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif">\n' + STYLE,
            f'<rect width="{WIDTH}" height="{height}" rx="12" style="fill: var(--ground)"/>\n',
        ]

    def text(self, x: float, y: float, words: str, kind: str = "") -> None:
        self._parts.append(f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}">{html.escape(words)}</text>\n')

    def line(self, x: float, y: float, to_x: float, to_y: float, kind: str) -> None:
        self._parts.append(
            f'<line x1="{x:.1f}" y1="{y:.1f}" x2="{to_x:.1f}" y2="{to_y:.1f}" class="{kind}"/>\n'
        )

    def bar(self, x: float, y: float, width: float, kind: str) -> None:
        self._parts.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="16" rx="2" class="{kind}"/>\n'
        )

    def dot(self, x: float, y: float, kind: str) -> None:
        self._parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" class="{kind}"/>\n')

    def __str__(self) -> str:
        return "".join([*self._parts, "</svg>\n"])


def plain(markdown: str) -> str:
    return re.sub(r"`([^`]*)`", r"\1", markdown)


def wrapped(name: str, most: int = 40) -> list[str]:
    """A name in at most two lines."""
    if len(name) <= most:
        return [name]
    cut = name.rfind(" ", 0, most)
    rest = name[cut + 1 :]
    return [name[:cut], rest if len(rest) <= most else rest[: most - 1] + "\N{HORIZONTAL ELLIPSIS}"]


def dots(rows: Sequence[Compared], title: str) -> str:
    """First and later epochs of each row on one logarithmic axis, with torch's time at 1."""
    names = [wrapped(row.name) for row in rows]
    tops = [68]
    for lines in names:
        tops.append(tops[-1] + ROW + 15 * (len(lines) - 1))
    height = tops[-1] + 40
    values = [v for row in rows for each in (row.first, row.later) for v in each[:3]]
    low, high = math.log10(min(values)) - 0.1, math.log10(max(values)) + 0.1
    steps = (1, 2, 5) if high - low < 1.5 else (1,)
    low = low if len(steps) > 1 else math.floor(low + 0.1)
    scale = (WIDTH - LEFT - RIGHT) / (high - low)

    def at(value: float) -> float:
        return LEFT + (math.log10(value) - low) * scale

    picture = Picture(height, title)
    picture.text(20, 28, title, "head")
    picture.dot(LEFT + 6, 47, "first")
    picture.text(LEFT + 18, 52, "first epoch", "quiet")
    picture.dot(LEFT + 116, 47, "later")
    picture.text(LEFT + 128, 52, "later epochs", "quiet")
    picture.text(LEFT + 226, 52, "left of 1: hotset is faster", "quiet")
    ticks = [step * 10.0**power for power in range(math.floor(low), math.ceil(high)) for step in steps]
    for tick in ticks:
        if low <= math.log10(tick) <= high:
            picture.line(at(tick), 62, at(tick), height - 30, "one" if tick == 1 else "grid")
            picture.text(at(tick), height - 12, f"{tick:g}x", "quiet middle")
    for row, lines, top in zip(rows, names, tops, strict=False):
        y = top + 12 + 7.5 * (len(lines) - 1)
        for number, line in enumerate(lines):
            picture.text(LEFT - 12, top + 17 + 15 * number, line, "end")
        for each, kind, beside in ((row.first, "first", -4), (row.later, "later", 4)):
            if each.low < each.high:
                picture.line(at(each.low), y + beside, at(each.high), y + beside, f"range {kind}")
            picture.dot(at(each.median), y + beside, kind)
        picture.text(WIDTH - 12, y + 5, f"{row.first.text} / {row.later.text}", "quiet end")
    return str(picture)


def bars(groups: Sequence[tuple[str, Sequence[Speed]]], title: str) -> str:
    """Samples a second of each library, in groups; hotset's stand out."""
    height = 44 + sum(34 + ROW * len(rows) for _, rows in groups) + 14
    most = max(row.value for _, rows in groups for row in rows)
    scale = (WIDTH - LEFT - RIGHT) / most
    picture = Picture(height, title)
    picture.text(20, 28, title, "head")
    y = 44.0
    for name, rows in groups:
        picture.text(20, y + 22, name, "quiet")
        y += 34
        for row in sorted(rows, key=lambda row: -row.value):
            picture.text(LEFT - 12, y + 14, row.name, "end")
            picture.bar(LEFT, y + 1, row.value * scale, "later" if row.name == "hotset" else "other")
            picture.text(LEFT + row.value * scale + 8, y + 14, f"{row.value:,.0f}/s", "quiet")
            y += ROW
    return str(picture)


# ---- the plots -----------------------------------------------------------------------------------------


def plots() -> dict[str, str]:
    """The text of each plot, by its file's name."""
    benchmarks = (DOCS / "benchmarks.md").read_text()
    compatibility = (DOCS / "compatibility.md").read_text()
    machine = rows_of(benchmarks, "## One machine")

    def speed_of(begin: str) -> list[Speed]:
        row = next(row for row in machine if row[0].startswith(begin))
        return [Speed("hotset", speeds("hotset " + row[1])[0].value), *speeds(row[2])]

    at = next(number for number, row in enumerate(machine) if row[0].startswith("warm, pictures of 150 KB"))
    groups = [
        ("2 workers", speed_of("warm, pictures of 150 KB")),
        ("0 workers", [Speed("hotset", speeds("hotset " + machine[at + 1][1])[0].value)]),
        ("2 workers, random flip and crop live", speed_of("warm, random flip and crop")),
    ]
    groups[1][1].extend(speeds(machine[at + 1][2]))
    first, above = [], ""
    for cells in rows_of(benchmarks, "## First epochs"):
        name = cells[0]
        if name.startswith("the same"):
            name = above + name.removeprefix("the same")
        else:
            above = re.sub(r", (\d workers|`concurrency=16`)$", "", name)
        first.append(Compared(plain(name), ratio(cells[1]), ratio(cells[2])))
    programs = [
        Compared(plain(cells[0]), ratio(cells[2]), ratio(cells[3]))
        for cells in rows_of(compatibility, "<!-- rows -->")
    ]
    trainers = [
        Compared(plain(cells[0]), ratio(cells[2]), ratio(cells[3]))
        for cells in rows_of((DOCS / "trainers.md").read_text(), "<!-- rows -->")
    ]
    return {
        "trainers.svg": dots(trainers, "Time of an epoch, as a multiple of the program without hotset"),
        "speed.svg": bars(groups, "Pictures of 150 KB from a warm cache, batch 64"),
        "first-epochs.svg": dots(first, "Time of an epoch, as a multiple of torch's DataLoader"),
        "compatibility.svg": dots(programs, "Time of an epoch, as a multiple of torch's, 2 workers"),
    }


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for name, text in plots().items():
        (FOLDER / name).write_text(text)


if __name__ == "__main__":
    main()
