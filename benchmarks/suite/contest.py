"""Opening contestants, closing all of them, and the targets that a comparison answers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack

from benchmarks.harness import Comparison, Epochs, Measure, Spread, Target, Unfit, compare, explain
from benchmarks.peers import Epoch
from benchmarks.settings import Settings
from benchmarks.truth import Truth

__all__ = ["ahead_of_all", "contest", "guarded", "lead", "speed"]


def contest(
    settings: Settings,
    title: str,
    truth: Truth,
    loaders: Mapping[str, Callable[[ExitStack], Epoch]],
    reference: str,
    *,
    subjects: tuple[str, ...],
    limits: tuple[str, ...] = (),
    others: Mapping[str, Callable[[ExitStack], Measure]] | None = None,
) -> Comparison:
    """Open everyone, compare, close everyone.

    Args:
        truth: what each loader's batches must hold.
        loaders: name to a function that opens a loader and returns how it begins an epoch. One that raises
            is reported with the reason.
        others: contestants that time and check themselves.
    """

    def measured(stack: ExitStack, open_loader: Callable[[ExitStack], Epoch]) -> Measure:
        return Epochs(open_loader(stack), truth, settings.seconds)

    with ExitStack() as stack:
        contestants = {name: guarded(measured, stack, opening) for name, opening in loaders.items()}
        contestants |= {name: guarded(opening, stack) for name, opening in (others or {}).items()}
        return compare(contestants, reference, settings.pairs, title=title, subjects=subjects, limits=limits)


def guarded(opening: Callable[..., Measure], *arguments: object) -> Measure:
    """Return ``opening(*arguments)``, or a contestant that tells why it could not be opened."""
    try:
        return opening(*arguments)
    except Exception as reason:
        words = explain(reason)

    def unfit() -> float:
        raise Unfit(words)

    return unfit


def lead(text: str, found: Comparison, name: str, over: str, bound: float) -> Target:
    """The target that ``name`` is at least ``bound`` times as good as ``over``."""
    reason = found.rows[name].unfit or found.rows[over].unfit
    return Target(text, found.lead(name, over), bound, reason=reason)


def ahead_of_all(text: str, found: Comparison, name: str, peers: Iterable[str] = ()) -> Target:
    """The target that ``name`` is ahead of every one of ``peers`` (of all, where none are named).

    What is measured is the lead over the one that comes nearest; peers that are unfit do not count.
    """
    over = [peer for peer in peers or found.peers() if found.rows[peer].figures]
    leads = {peer: spread for peer in over if (spread := found.lead(name, peer)) is not None}
    if not leads:
        return Target(text, None, 1.0, reason=found.rows[name].unfit or "no peer could be measured")
    nearest = min(leads, key=lambda peer: leads[peer].median)
    return Target(f"{text} (the nearest: {nearest})", leads[nearest], 1.0)


def speed(text: str, found: Comparison, name: str, bound: float) -> Target:
    """The target that ``name`` reaches ``bound`` in the comparison's unit."""
    row = found.rows[name]
    measured = Spread.of(row.figures) if row.figures else None
    at_least = not found.lower_is_better
    return Target(text, measured, bound, at_least=at_least, unit=found.unit, reason=row.unfit)
