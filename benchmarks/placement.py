"""A simulated cluster: who owns how many of 100 million samples, and how many change hands.

A figure is a ratio to what an ideal placement gives. Chance alone makes the largest of N shares larger than
their mean, by about sqrt(2 ln N) standard deviations of sqrt(N / samples) each: 1.2 % for 1,024 machines and
100 million samples. So a simulation of fewer samples can only overstate how uneven a placement is.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt

from hotset.policy.rendezvous import Placement

__all__ = ["chi_squared", "fullest", "moved", "names", "owners"]

_CHUNK = 1 << 18

Owners = npt.NDArray[np.uint16]


def names(machines: int) -> list[str]:
    """As a cluster's machines are often called: alike but for a number."""
    return [f"node-{number}" for number in range(machines)]


def owners(machines: Sequence[str], capacities: Sequence[int], samples: int) -> Owners:
    """Return the owner of each sample, two bytes each, so that 100 million fit in memory."""
    placement = Placement(machines, capacities)
    owned = np.empty(samples, np.uint16)

    def place(start: int) -> None:
        part = owned[start : start + _CHUNK]
        part[:] = placement.owners(np.arange(start, start + len(part)))

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for _ in pool.map(place, range(0, samples, _CHUNK)):
            pass
    return owned


def moved(machines: Sequence[str], before: Owners, others: Sequence[str]) -> float:
    """Return what share of the samples changes hands when ``machines``, all equal, become ``others``."""
    number_before = {name: number for number, name in enumerate(machines)}
    # A newcomer has a number that no machine had.
    known = np.array([number_before.get(name, len(machines)) for name in others], np.uint16)
    after = owners(others, [1] * len(others), len(before))
    return float(np.count_nonzero(known[after] != before) / len(before))


def fullest(owned: Owners, capacities: Sequence[int]) -> float:
    """Return the largest of the machines' loads, each as a ratio to its capacity's share of the samples."""
    return float((np.bincount(owned, minlength=len(capacities)) / _expected(owned, capacities)).max())


def chi_squared(owned: Owners, capacities: Sequence[int]) -> float:
    """Return chi squared per degree of freedom: about 1 where only chance makes shares uneven."""
    expected = _expected(owned, capacities)
    excess = np.bincount(owned, minlength=len(capacities)) - expected
    return float((excess**2 / expected).sum() / (len(capacities) - 1))


def _expected(owned: Owners, capacities: Sequence[int]) -> npt.NDArray[np.float64]:
    return len(owned) * np.array(capacities, np.float64) / sum(capacities)
