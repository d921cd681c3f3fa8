"""The demo's results: one table and one plot.

Both are computed from the measurements of the two runs. An epoch's time is split by what the trainer does: it
either waits for a batch or computes on one, and the loader can only change the waiting.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hotset.units import format_bytes

if TYPE_CHECKING:
    from rich.table import Table

    from hotset.demo.training import EpochResult

__all__ = ["Comparison", "draw", "table"]


@dataclass(frozen=True)
class Comparison:
    """Both runs over the same epochs.

    Attributes:
        title: of the table and the plot: what the runs trained on.
        samples: number of samples in the dataset.
        plain: the epochs with torch's DataLoader.
        cached: the epochs with hotset's.
        lookups: hits and misses of each epoch with hotset's.
        cached_samples: how many samples the cache held at the end.
        cached_bytes: how much memory they took.
    """

    title: str
    samples: int
    plain: Sequence[EpochResult]
    cached: Sequence[EpochResult]
    lookups: Sequence[tuple[int, int]]
    cached_samples: int
    cached_bytes: int

    @property
    def identical(self) -> bool:
        """Whether every step of every epoch had the same loss in both runs, bit for bit."""
        return [epoch.losses for epoch in self.plain] == [epoch.losses for epoch in self.cached]


def table(comparison: Comparison) -> Table:
    """Return the table: each epoch of both runs, their sums, and below them the cache and the losses."""
    from rich.table import Table
    from rich.text import Text

    result = Table(
        title=comparison.title, caption=Text.from_markup(_caption(comparison)), caption_justify="left"
    )
    result.add_column("epoch")
    result.add_column("DataLoader")
    for heading in ("seconds", "samples/s", "hit rate", "waited, s"):
        result.add_column(heading, justify="right")
    rows = zip(comparison.plain, comparison.cached, comparison.lookups, strict=True)
    for number, (plain, cached, lookups) in enumerate(rows, start=1):
        result.add_row(str(number), "torch", *_cells([plain], []))
        result.add_row("", "hotset", *_cells([cached], [lookups]), end_section=True)
    result.add_row("all", "torch", *_cells(comparison.plain, []))
    result.add_row("", "hotset", *_cells(comparison.cached, comparison.lookups))
    return result


def _cells(epochs: Sequence[EpochResult], lookups: Sequence[tuple[int, int]]) -> list[str]:
    seconds = sum(epoch.seconds for epoch in epochs)
    hits = sum(hit for hit, _ in lookups)
    reads = hits + sum(miss for _, miss in lookups)
    return [
        f"{seconds:.2f}",
        f"{sum(epoch.samples for epoch in epochs) / seconds:,.0f}",
        f"{hits / reads:.1%}" if reads else "-",
        f"{sum(epoch.waited for epoch in epochs):.2f}",
    ]


def _caption(comparison: Comparison) -> str:
    lines = [
        f"Cached: {comparison.cached_samples:,} of {comparison.samples:,} samples, "
        f"{format_bytes(comparison.cached_bytes)}."
    ]
    warm = list(zip(comparison.plain, comparison.cached, strict=True))[1:]
    if warm:
        ratio = sum(plain.seconds for plain, _ in warm) / sum(cached.seconds for _, cached in warm)
        lines.append(f"After epoch 1, which fills the cache: {ratio:.2f}x torch's speed.")
    steps = sum(len(epoch.losses) for epoch in comparison.plain)
    if comparison.identical:
        lines.append(f"[green]The losses of all {steps:,} steps are identical.[/green]")
    else:
        lines.append(f"[bold red]The losses differ: {_first_difference(comparison)}.[/bold red]")
    return "\n".join(lines)


def _first_difference(comparison: Comparison) -> str:
    for number, (plain, cached) in enumerate(zip(comparison.plain, comparison.cached, strict=True), start=1):
        if len(plain.losses) != len(cached.losses):
            return (
                f"epoch {number} took {len(plain.losses)} steps with torch, {len(cached.losses)} with hotset"
            )
        for step, (one, other) in enumerate(zip(plain.losses, cached.losses, strict=True), start=1):
            if one != other:
                return f"first in epoch {number}, step {step}: {one!r} with torch, {other!r} with hotset"
    raise AssertionError("called on runs whose losses are identical")


def draw(comparison: Comparison, path: Path) -> None:
    """Save the plot as a PNG at ``path``: a bar per epoch and loader, split into waiting and computing."""
    # Not pyplot: its figures and its choice of backend are global to the process.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), dpi=150, layout="constrained")
    axes = figure.subplots()
    width = 0.38
    runs = (("torch", comparison.plain, "#8c8c8c", -1), ("hotset", comparison.cached, "#d9480f", 1))
    for name, epochs, colour, side in runs:
        positions = [number + side * width / 2 for number in range(1, len(epochs) + 1)]
        waited = [epoch.waited for epoch in epochs]
        computed = [epoch.seconds - epoch.waited for epoch in epochs]
        axes.bar(positions, waited, width * 0.95, color=colour, label=f"{name}: waiting for data")
        bars = axes.bar(
            positions, computed, width * 0.95, waited, color=colour, alpha=0.35, label=f"{name}: computing"
        )
        # With more epochs the labels would overlap.
        if len(epochs) <= 10:
            axes.bar_label(bars, [f"{epoch.seconds:.2f}" for epoch in epochs], padding=2, fontsize=9)
    axes.set_xticks(range(1, len(comparison.plain) + 1))
    axes.set_xlabel("epoch")
    axes.set_ylabel("seconds")
    axes.set_title(comparison.title, fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(y=0.1)
    axes.legend(frameon=False, ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.14))
    figure.savefig(path, format="png")
