"""Results for people (tables, a plot) and for programs (JSON).

A row where hotset is behind a peer says so in the table, and its bar is drawn in another colour: a
benchmark that shows only where its owner wins is an advertisement.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from benchmarks.harness import Comparison, Outcome, Row, Spread, Target

__all__ = ["Report"]


@dataclass
class Report:
    """What has been measured so far, printed as it comes."""

    console: Console
    machine: dict[str, Any]
    quick: bool
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    broken: dict[str, str] = field(default_factory=dict)

    def print_machine(self) -> None:
        table = Table(title="The machine", show_header=False)
        for key, value in self.machine.items():
            table.add_row(key, str(value))
        self.console.print(table)
        if self.quick:
            self.console.print("Tiny data (--quick): the figures below mean nothing.", style="yellow")

    def add(self, name: str, outcome: Outcome) -> None:
        """Keep and print the outcome of the benchmark ``name``."""
        self.outcomes[name] = outcome
        for comparison in outcome.comparisons:
            self.console.print(comparison_table(comparison))
        for note in outcome.notes:
            self.console.print(note, style="dim")

    def print_targets(self) -> None:
        table = Table(title="Targets")
        for header in ("target", "bound", "measured", "lowest - highest", ""):
            table.add_column(header)
        for outcome in self.outcomes.values():
            for target in outcome.targets:
                table.add_row(*_target_cells(target))
        self.console.print(table)
        for name, why in self.broken.items():
            self.console.print(f"[bold red]{name} broke off:[/] {why}")

    def save_json(self, path: Path) -> None:
        content = {
            "machine": self.machine,
            "quick": self.quick,
            "benchmarks": {name: _outcome(outcome) for name, outcome in self.outcomes.items()},
            "broken": self.broken,
        }
        path.write_text(json.dumps(content, indent=1) + "\n")

    def save_plot(self, path: Path) -> None:
        """Draw every comparison's ratios to its reference, hotset's bars and lost ones in their colours."""
        import matplotlib

        matplotlib.use("agg")
        from matplotlib import pyplot
        from matplotlib.layout_engine import ConstrainedLayoutEngine

        comparisons = [c for outcome in self.outcomes.values() for c in outcome.comparisons if _drawable(c)]
        if not comparisons:
            return
        layout = ConstrainedLayoutEngine(h_pad=0.15, w_pad=0.1)
        columns = min(2, len(comparisons))
        lines = math.ceil(len(comparisons) / columns)
        figure, axes = pyplot.subplots(
            lines, columns, figsize=(9 * columns, 4 * lines), squeeze=False, layout=layout
        )
        for place in axes.flat[len(comparisons) :]:
            place.set_visible(False)
        for place, comparison in zip(axes.flat, comparisons, strict=False):
            _draw(place, comparison)
        figure.suptitle(f"{self.machine['cpu']}, {self.machine['cores']} cores: medians, lowest to highest")
        figure.savefig(path, dpi=90)
        pyplot.close(figure)


def comparison_table(found: Comparison) -> Table:
    """Return the table of one comparison, best first, the unfit last."""
    better = "lower is better" if found.lower_is_better else "higher is better"
    table = Table(title=f"{found.title}  ({found.unit}, {better})")
    table.add_column("contestant")
    for header in ("median", f"of {found.reference}", "lowest - highest", "hotset's lead"):
        table.add_column(header, justify="right")
    table.add_column("remark")
    for name in _ranked(found):
        row = found.rows[name]
        if row.unfit:
            table.add_row(name, "", "", "", "", Text(row.unfit, "yellow"))
        else:
            table.add_row(*_cells(found, row), style="bold green" if name in found.subjects else "")
    return table


def _ranked(found: Comparison) -> list[str]:
    def place(name: str) -> tuple[bool, float]:
        row = found.rows[name]
        if not row.figures:
            return True, 0.0
        median = Spread.of(row.figures).median
        return False, median if found.lower_is_better else -median

    return sorted(found.rows, key=place)


def _cells(found: Comparison, row: Row) -> list[str]:
    ratio = found.ratio(row.name, found.reference)
    held = "held batches are overwritten" if row.holds is False else ""
    return [
        row.name,
        _figure(Spread.of(row.figures).median),
        f"{ratio.median:.3g}x" if ratio else "",
        f"{ratio.low:.3g} - {ratio.high:.3g}" if ratio else "",
        _lead(found, row.name),
        held,
    ]


def _lead(found: Comparison, name: str) -> str:
    """Return the lead of hotset's first or matching entry over a peer, and say so where one is behind it."""
    if name not in found.peers():
        return "the limit" if name in found.limits else ""
    subject = next(iter(found.opponents(name)), "")
    lead = found.lead(subject, name) if subject else None
    behind = dict(found.losses(name))
    cell = f"{lead.median:.3g}x" if lead else ""
    if lead and behind.pop(subject, None):
        cell = f"[bold red]BEHIND {cell}[/]"
    others = ", ".join(f"BEHIND {loss.median:.3g}x: {subject}" for subject, loss in behind.items())
    return f"{cell} [red]({others})[/]" if others else cell


def _target_cells(target: Target) -> list[str | Text]:
    sign = "≥" if target.at_least else "≤"
    bound = f"{sign} {_figure(target.bound)} {target.unit}"
    if target.measured is None:
        return [target.text, bound, "-", "", Text(f"not measured: {target.reason}", "yellow")]
    measured = target.measured
    verdict = "[green]met[/]" if target.met else "[bold red]MISSED[/]"
    spread = f"{_figure(measured.low)} - {_figure(measured.high)}"
    return [target.text, bound, _figure(measured.median), spread, verdict]


def _figure(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _outcome(outcome: Outcome) -> dict[str, Any]:
    return {
        "comparisons": [_comparison(found) for found in outcome.comparisons],
        "targets": [
            {
                "target": target.text,
                "bound": target.bound,
                "at_least": target.at_least,
                "unit": target.unit,
                "measured": _spread(target.measured),
                "met": target.met,
                "reason": target.reason,
            }
            for target in outcome.targets
        ],
        "notes": outcome.notes,
    }


def _comparison(found: Comparison) -> dict[str, Any]:
    return {
        "title": found.title,
        "unit": found.unit,
        "lower_is_better": found.lower_is_better,
        "reference": found.reference,
        "contestants": [
            {
                "name": name,
                "hotset": name in found.subjects,
                "limit": name in found.limits,
                "figures": row.figures,
                "median": Spread.of(row.figures).median if row.figures else None,
                "ratio": _spread(found.ratio(name, found.reference)),
                "hotset_behind": [subject for subject, _ in found.losses(name)],
                "held_batch_stays_right": row.holds,
                "unfit": row.unfit,
            }
            for name, row in found.rows.items()
        ],
    }


def _spread(spread: Spread | None) -> dict[str, float] | None:
    return None if spread is None else {"median": spread.median, "low": spread.low, "high": spread.high}


def _drawable(found: Comparison) -> bool:
    return bool(found.rows[found.reference].figures)


def _draw(place: Any, found: Comparison) -> None:
    names = [name for name in _ranked(found) if found.rows[name].figures]
    ratios = [found.ratio(name, found.reference) for name in names]
    spreads = [ratio for ratio in ratios if ratio is not None]
    medians = [spread.median for spread in spreads]
    whiskers = [
        [spread.median - spread.low for spread in spreads],
        [spread.high - spread.median for spread in spreads],
    ]
    colours = [_colour(found, name) for name in names]
    place.barh(names, medians, xerr=whiskers, color=colours, error_kw={"elinewidth": 1, "capsize": 2})
    place.invert_yaxis()
    place.set_title(found.title, fontsize=11)
    place.set_xlabel(f"{'cost' if found.lower_is_better else 'speed'} as a multiple of: {found.reference}")
    place.axvline(1, color="black", linewidth=0.8, linestyle=":")
    place.spines[["top", "right"]].set_visible(False)
    place.set_xlim(0, max(spread.high for spread in spreads) * 1.25)
    for i, name in enumerate(names):
        figure = _figure(Spread.of(found.rows[name].figures).median)
        text = f" {figure} {found.unit}" + ("  (hotset is behind)" if found.losses(name) else "")
        place.text(spreads[i].high, i, text, va="center", fontsize=8)


def _colour(found: Comparison, name: str) -> str:
    if name in found.subjects:
        return "#1b7837"
    if name in found.limits:
        return "#404040"
    return "#d6604d" if found.losses(name) else "#9ecae1"
