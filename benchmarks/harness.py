"""Rounds, ratios and targets: the arithmetic of a fair comparison.

``compare`` lets contestants take turns. With three of them and three pairs the order is::

    round 0 (not counted)   A B C      caches warm up, workers start, batches are checked
    round 1                 B C A
    round 2                 C A B
    round 3                 A B C

A drift of the machine's speed then hits all of a round alike and cancels in the round's ratio; a rotating
order keeps one from always running in the other's shadow (a neighbour's dirty cache lines, a turbo clock).
Ratios of medians were rejected: they pair figures of different minutes.

Figures are rates (higher is better) or, with ``lower_is_better``, costs. Either way a *ratio* is a figure
divided by the reference's, and a *lead* is above 1 exactly where the first is the better one.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from benchmarks.truth import Truth, WrongData

__all__ = [
    "Comparison",
    "Epochs",
    "Outcome",
    "Row",
    "Spread",
    "Target",
    "Unfit",
    "batches",
    "compare",
    "explain",
]

Measure = Callable[[], float]


class Unfit(Exception):
    """A contestant cannot be measured; the message says why, in a few words."""


@dataclass(frozen=True)
class Spread:
    """The median of some figures, with the lowest and the highest."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, figures: Iterable[float]) -> Spread:
        values = sorted(figures)
        return cls(statistics.median(values), values[0], values[-1])


@dataclass
class Row:
    """One contestant: a figure for each round, or the reason why there is none.

    ``holds`` is whether a batch that is held stays right while others follow; None where not tried.
    """

    name: str
    figures: list[float] = field(default_factory=list)
    unfit: str = ""
    holds: bool | None = None


@dataclass
class Comparison:
    """What :func:`compare` found. ``limits`` are not peers: no loader can be expected to beat them.

    ``matched`` names, for a peer that has a counterpart among hotset's entries, that one: a peer with a
    quarter of the data cached is no match for hotset with all of them. Other peers are against every entry.
    """

    title: str
    unit: str
    reference: str
    rows: dict[str, Row]
    subjects: tuple[str, ...] = ()
    limits: tuple[str, ...] = ()
    lower_is_better: bool = False
    matched: Mapping[str, str] = field(default_factory=dict)

    def ratio(self, name: str, to: str) -> Spread | None:
        """Return ``name``'s figures divided by ``to``'s, round by round; None where one was unfit."""
        first, second = self.rows[name].figures, self.rows[to].figures
        if not first or not second:
            return None
        return Spread.of(a / b for a, b in zip(first, second, strict=True))

    def lead(self, name: str, over: str) -> Spread | None:
        """Return how many times better ``name`` is than ``over``: above 1 is ahead, in either direction."""
        return self.ratio(over, name) if self.lower_is_better else self.ratio(name, over)

    def peers(self) -> list[str]:
        """Return the names of what hotset is measured against, without the limits."""
        return [name for name in self.rows if name not in self.subjects and name not in self.limits]

    def opponents(self, peer: str) -> tuple[str, ...]:
        """Return hotset's entries that ``peer`` is measured against."""
        return (self.matched[peer],) if peer in self.matched else self.subjects

    def losses(self, peer: str) -> list[tuple[str, Spread]]:
        """Return hotset's entries that are behind ``peer``, each with its lead (below 1)."""
        if peer not in self.peers():
            return []
        leads = [(subject, self.lead(subject, peer)) for subject in self.opponents(peer)]
        return [(subject, lead) for subject, lead in leads if lead is not None and lead.median < 1]


@dataclass(frozen=True)
class Target:
    """Something promised, and what was measured: None, with ``reason``, where nothing could be.

    ``at_least`` tells which side of ``bound`` is the good one.
    """

    text: str
    measured: Spread | None
    bound: float
    at_least: bool = True
    unit: str = "x"
    reason: str = ""

    @property
    def met(self) -> bool | None:
        if self.measured is None:
            return None
        return self.measured.median >= self.bound if self.at_least else self.measured.median <= self.bound


@dataclass
class Outcome:
    """What one benchmark found."""

    comparisons: list[Comparison] = field(default_factory=list)
    targets: list[Target] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def compare(
    contestants: Mapping[str, Measure],
    reference: str,
    pairs: int = 5,
    *,
    title: str = "",
    unit: str = "samples/s",
    subjects: tuple[str, ...] = (),
    limits: tuple[str, ...] = (),
    lower_is_better: bool = False,
    warm_up: bool = True,
) -> Comparison:
    """Measure ``contestants`` in ``pairs`` interleaved rounds.

    Args:
        contestants: name to a function that measures once and returns the figure. One that raises
            (:class:`Unfit`, :class:`~benchmarks.truth.WrongData`, or anything else) is out: its figures are
            dropped, the reason is kept, and the others go on.
        reference: the contestant that ratios are formed with.
        subjects: hotset's own entries.
        limits: entries that are bounds, not peers.
        warm_up: run one round first that is not counted.

    Example:
        >>> found = compare({"a": lambda: 6.0, "b": lambda: 3.0}, reference="b")
        >>> found.ratio("a", to="b").median
        2.0
    """
    rows = {name: Row(name) for name in contestants}
    names = list(contestants)
    for number in range(0 if warm_up else 1, pairs + 1):
        for turn in range(len(names)):
            row = rows[names[(number + turn) % len(names)]]
            if row.unfit:
                continue
            try:
                figure = contestants[row.name]()
            except Exception as reason:
                row.unfit, row.figures = explain(reason), []
                continue
            if number > 0:
                row.figures.append(figure)
            row.holds = getattr(contestants[row.name], "holds", None)
    return Comparison(title, unit, reference, rows, subjects, limits, lower_is_better)


def explain(reason: Exception) -> str:
    """Return why a contestant is out, in one line: of an error with a traceback within, the last one."""
    if isinstance(reason, ImportError):
        return f"not installed ({reason.name or reason})"
    lines = str(reason).split("\n")
    text = next((line.strip() for line in reversed(lines) if line.strip()), type(reason).__name__)
    if isinstance(reason, Unfit):
        return text
    return f"wrong data: {text}" if isinstance(reason, WrongData) else f"{type(reason).__name__}: {text}"


class Epochs:
    """A loader as a contestant: called, it checks one epoch and times the following ones.

    The timed part only iterates. It lasts whole epochs, for ``seconds`` at least, so that the price of
    beginning an epoch is in it.

    Args:
        epoch: returns an iterable over the batches of a new epoch.
        truth: what the batches must hold.
        seconds: of one timing, at least.

    Attributes:
        holds: whether the first batch of an epoch was still right at the end of it.
    """

    def __init__(self, epoch: Callable[[], Iterable[Any]], truth: Truth, seconds: float = 0.3) -> None:
        self._epoch = epoch
        self._truth = truth
        self._seconds = seconds
        self.holds: bool | None = None

    def __call__(self) -> float:
        last_ids = self.verify()
        epochs, elapsed, last = 0, 0.0, None
        start = time.perf_counter()
        while elapsed < self._seconds:
            for batch in self._epoch():
                last = batch
            epochs += 1
            elapsed = time.perf_counter() - start
        ids = self._truth.check(last)
        if len(ids) != last_ids:
            raise WrongData(f"an epoch ended with a batch of {len(ids)} instead of {last_ids}")
        return epochs * self._truth.size / elapsed

    def verify(self) -> int:
        """Compare a whole epoch with the truth; return the size of its last batch.

        Raises:
            WrongData: a sample differs, is missing, or came twice.
        """
        seen = bytearray(self._truth.size)
        first = first_ids = ids = None
        for batch in self._epoch():
            ids = self._truth.check(batch)
            for i in ids:
                seen[i] += 1
            if first is None:
                first, first_ids = batch, ids
        if ids is None or first_ids is None:
            raise WrongData("an epoch without batches")
        if seen.count(1) != len(seen):
            raise WrongData(f"{seen.count(0)} of {len(seen)} samples missing from an epoch")
        try:
            self.holds = self._truth.check(first) == first_ids
        except WrongData:
            self.holds = False
        return len(ids)


def batches(ids: Any, size: int) -> Iterator[Any]:
    """Yield ``ids`` in runs of ``size``, the last one shorter."""
    for start in range(0, len(ids), size):
        yield ids[start : start + size]
