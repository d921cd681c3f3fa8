"""The sweep's plot: what an epoch takes against how much of the data is cached.

One panel for each source. A straight line leads from no cache to everything cached, as hotset's later epochs
have them: what a cache saves is in proportion to what it holds, unless it costs something in between.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness import Spread

__all__ = ["Curve", "Panel", "draw"]

_COLOURS = ("#1b7837", "#d6604d", "#4393c3")


@dataclass(frozen=True)
class Curve:
    """One loader, or as many of its limits as could be measured.

    Attributes:
        name: for the legend.
        cached: the share of the data that the cache held, for each limit, ascending, 0 to 1.
        first: seconds of the first epoch at each.
        later: seconds of a later epoch at each.
    """

    name: str
    cached: Sequence[float]
    first: Sequence[Spread]
    later: Sequence[Spread]


@dataclass(frozen=True)
class Panel:
    """One source: the curves, each of which begins at ``cached`` = 0; the line is the first one's."""

    title: str
    curves: Sequence[Curve]


def draw(path: Path, panels: Sequence[Panel]) -> None:
    """Save the panels, side by side, as a PNG."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(
        1, len(panels), figsize=(7 * len(panels), 5), squeeze=False, layout="constrained"
    )
    for place, panel in zip(axes.flat, panels, strict=True):
        _draw(place, panel)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _draw(place: Any, panel: Panel) -> None:
    for curve, colour in zip(panel.curves, _COLOURS, strict=False):
        shares = [100 * share for share in curve.cached]
        for label, spreads, style, fill in (
            ("first epoch", curve.first, "--", "white"),
            ("later epochs", curve.later, "-", colour),
        ):
            medians = [spread.median for spread in spreads]
            whiskers = [
                [spread.median - spread.low for spread in spreads],
                [spread.high - spread.median for spread in spreads],
            ]
            place.errorbar(
                shares,
                medians,
                whiskers,
                color=colour,
                linestyle=style,
                marker="o",
                markerfacecolor=fill,
                elinewidth=1,
                capsize=2,
                label=f"{curve.name}, {label}",
            )
    line = panel.curves[0]
    if line.cached:
        place.plot(
            [100 * line.cached[0], 100 * line.cached[-1]],
            [line.later[0].median, line.later[-1].median],
            color="black",
            linestyle=":",
            label="the straight line, later epochs",
        )
    place.set_title(panel.title)
    place.set_xlabel("cached, % of the data")
    place.set_ylabel("seconds an epoch")
    place.set_ylim(bottom=0)
    place.spines[["top", "right"]].set_visible(False)
    place.legend(fontsize=8)
