"""How evenly samples spread over 4 to 1,024 machines, and how few move when a machine goes or comes.

Nothing here depends on this machine's speed: the figures are counts, of 100 million samples. What moves, and
how unequal machines fill, is counted on 20 million where there are more than 64 machines: one of 1,024 then
moves 19,531 samples, with a standard deviation of 0.7 %, a seventh of what the target leaves. The machine
that goes is the one that owns most, the worst case.
"""

from __future__ import annotations

import time

import numpy as np

from benchmarks import placement as simulated
from benchmarks.harness import Outcome, Spread, Target
from benchmarks.settings import Settings
from hotset.policy.rendezvous import Placement

__all__ = ["placement"]

_MACHINES = (4, 16, 64, 256, 1024)
_SAMPLES = 100_000_000
_FEWER = 20_000_000
_ALL_UP_TO = 64
_QUICK = 20_000
_BOUND = 1.05
_BATCH = 256


def placement(settings: Settings) -> Outcome:
    """The largest share is 1.05 times the mean at most; one machine of N moves 1.05 / N at most."""
    outcome = Outcome()
    for count in _MACHINES:
        samples = _QUICK if settings.quick else _SAMPLES
        fewer = samples if count <= _ALL_UP_TO else min(samples, _FEWER)
        machines, equal = simulated.names(count), [1] * count
        owned = simulated.owners(machines, equal, samples)
        _target(outcome, f"{count} machines: largest share to the mean", simulated.fullest(owned, equal))

        gone = int(np.bincount(owned).argmax())
        left = machines[:gone] + machines[gone + 1 :]
        share = simulated.moved(machines, owned[:fewer], left)
        _target(outcome, f"{count} machines: moved as the fullest goes, to 1/N", share * count)
        share = simulated.moved(machines, owned[:fewer], simulated.names(count + 1))
        _target(outcome, f"{count} machines: moved as one comes, to 1/(N+1)", share * (count + 1))

        unequal = [1 + number % 2 for number in range(count)]
        filled = simulated.owners(machines, unequal, fewer)
        text = f"{count} machines, every other twice as large: fullest to its share"
        _target(outcome, text, simulated.fullest(filled, unequal))
        outcome.notes.append(
            f"{count} machines: chi squared per degree of freedom {simulated.chi_squared(owned, equal):.3f}, "
            f"unequal ones {simulated.chi_squared(filled, unequal):.3f} "
            f"(chance alone: 1 ± {(2 / (count - 1)) ** 0.5:.3f}); {samples:,} samples, {fewer:,} for moves; "
            f"a batch of {_BATCH} takes {_batch_seconds(machines) * 1e6:.0f} us"
        )
    return outcome


def _target(outcome: Outcome, text: str, figure: float) -> None:
    outcome.targets.append(Target(text, Spread.of([figure]), _BOUND, at_least=False))


def _batch_seconds(machines: list[str]) -> float:
    """The median over batches of ids in no order."""
    placed = Placement(machines, [1] * len(machines))
    seconds = []
    for ids in np.random.default_rng(0).integers(0, _SAMPLES, (50, _BATCH)):
        start = time.perf_counter()
        placed.owners(ids)
        seconds.append(time.perf_counter() - start)
    return Spread.of(seconds).median
