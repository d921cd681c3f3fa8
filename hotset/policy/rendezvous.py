"""Which machine owns a sample: weighted rendezvous hashing, computed alike on each machine, with no messages.

For each sample, every member of a cluster has a time, and the member with the least time owns the sample
(rendezvous hashing: Thaler and Ravishankar, "Using name-based mappings to increase hit rates", 1998). The
times are hashed from the seed, the sample and the member's name, as if drawn from exponential distributions
whose rates are the capacities::

    time of m for s  =  -ln(u) / capacity(m)          0 < u(s, m) < 1, uniform

Then m is first with the probability capacity(m) / sum of the capacities, and its time depends on no other
member. So when a member leaves, only its samples move; a member that joins takes its share evenly from all,
and a member that grows only gains. Neither the order of the members nor the unit of the capacities matters.

**The hash** has to be cheap, as one batch on a large cluster needs 100,000s of them. A sample's id is mixed
to a word (SplitMix64, see :mod:`hotset.policy.permutation`), a name to an odd word (BLAKE2b), and u is the
top of their product modulo 2**64: multiplicative hashing (Dietzfelbinger et al., "A reliable randomized
algorithm for the closest-pair problem", 1997). Mixing each pair anew takes four times as long, and spreads no
better.

**Few times are computed.** On average eight members have a time below h = 8 / sum of the capacities, and a
time can be below h only if u >= exp(-h * capacity): one comparison of integers. The times of these members
are computed; for the one sample in 3,000 for which there are none, those of all members. The filter saves
work, and never changes the result.

**Agreement.** Products and comparisons are of integers. The logarithm is not numpy's, whose last bits depend
on its version and on the processor (1.26 differs with AVX-512 and without): it is a sum of operations that
IEEE 754 rounds in one way only (+ - * /). So machines agree bit for bit, and of equal times, which one sample
in 2**40 has, the name that sorts first wins. Where two machines disagree after all, as their lists of members
do while one is joining, the cost is a detour: the sample is not found at the machine that is asked, and is
read from the source. A wrong sample is never returned.

A ring of points on a circle (consistent hashing) was rejected: to be as even it needs millions of points at
1,024 machines, and the capacity of a point could never change. So were trees of groups: a group's weight
changes with its members, and samples would then move between groups that have lost none.
"""

from __future__ import annotations

import hashlib
import math
import operator
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from hotset.errors import ArgumentError
from hotset.policy.permutation import key

__all__ = ["Placement"]

_Ids: TypeAlias = npt.NDArray[np.int64]
_Words: TypeAlias = npt.NDArray[np.uint64]
_Times: TypeAlias = npt.NDArray[np.float64]

# Pairs of a sample and a member at a time. Their products take 512 KiB: fewer pairs mean more calls, and more
# products do not fit into the processor's cache.
_PAIRS = 1 << 16

# 1/3, 1/5, ..., each rounded to the nearest double: the terms left out are below 2**-53 of the sum.
_ODD = [1 / odd for odd in range(3, 33, 2)]
_LN2 = 0.6931471805599453

# The time up to which the filter lets members through, in units of 1 / sum of the capacities. A time within
# _MARGIN of it may be on either side by rounding, so the filter's result is not used there.
_HORIZON = 8.0
_MARGIN = 1 - 2.0**-20


class Placement:
    """Computes the owners of samples among members of unequal capacity.

    Args:
        names: of the members, all different; the same on every machine.
        capacities: what each may hold, as ints in a unit of your choice; a member with 0 owns nothing.
        seed: each seed gives another placement.

    Raises:
        ArgumentError: the numbers of names and capacities differ; a name occurs twice; a capacity is below 0;
            no capacity is above 0.

    Example:
        >>> placement = Placement(["a", "b", "c"], [100, 100, 200], seed=7)
        >>> placement.owners(np.arange(10))
        array([1, 2, 2, 2, 2, 1, 1, 0, 2, 0])
        >>> np.bincount(placement.owners(np.arange(4000)))
        array([1008, 1007, 1985])
    """

    def __init__(self, names: Sequence[str], capacities: Sequence[int], seed: int = 0) -> None:
        sizes = _checked(names, capacities)
        # By name, so that equal times give the same owner in whatever order the members are listed.
        members = sorted((number for number, size in enumerate(sizes) if size), key=names.__getitem__)
        self._members = np.array(members, np.int64)
        self._words = np.array([_word(names[number]) for number in members], np.uint64)
        self._rates = np.array([float(sizes[number]) for number in members])
        self._horizon = _HORIZON / sum(sizes)
        self._least = np.array([_least(sizes[number] * self._horizon) for number in members], np.uint64)
        self._seed = operator.index(seed)

    def owners(self, ids: _Ids) -> _Ids:
        """Return the owner of each sample, as a position in ``names``.

        Args:
            ids: shape ``[count]``, sample ids.

        Returns:
            Shape ``[count]``.
        """
        samples = key(self._seed, ids)
        first = np.empty(len(ids), np.int64)
        step = max(1, _PAIRS // len(self._words))
        for start in range(0, len(ids), step):
            part = slice(start, start + step)
            first[part] = self._race(samples[part], self._least, self._horizon)
        return self._members[first]

    def order(self, ids: _Ids, count: int) -> _Ids:
        """Return the members that come first for each sample: its owner, and the next ones.

        Args:
            ids: shape ``[n]``, sample ids; few, as the time of every member is computed.
            count: how many of them.

        Returns:
            Shape ``[n, count]``, positions in ``names``; as many columns as there are members, if these are
            fewer.

        Example:
            >>> placement = Placement(["a", "b", "c"], [100, 100, 200], seed=7)
            >>> placement.order(np.arange(3), 2)
            array([[1, 2],
                   [2, 1],
                   [2, 1]])
        """
        times = _minus_log(key(self._seed, ids)[:, None] * self._words) / self._rates
        first: _Ids = self._members[np.argsort(times, axis=1, kind="stable")[:, :count]]
        return first

    def _race(self, samples: _Words, least: _Words, horizon: float) -> _Ids:
        """Return the first member for each sample, among those whose hash is at least ``least``."""
        hashes = samples[:, None] * self._words
        pairs = np.flatnonzero(hashes >= least)
        sample, member = np.divmod(pairs, len(self._words))
        times = _minus_log(hashes.ravel()[pairs]) / self._rates[member]
        best = np.full(len(samples), np.inf)
        np.minimum.at(best, sample, times)
        # Of equal times the first in the order of names: backwards, as the last assignment counts.
        ahead = np.flatnonzero(times == best[sample])[::-1]
        first = np.zeros(len(samples), np.int64)
        first[sample[ahead]] = member[ahead]
        late = np.flatnonzero(best > horizon * _MARGIN)
        if horizon < np.inf and len(late):
            first[late] = self._race(samples[late], np.zeros_like(least), np.inf)
        return first


def _checked(names: Sequence[str], capacities: Sequence[int]) -> list[int]:
    if len(names) != len(capacities):
        raise ArgumentError(
            f"capacities must be one for each name, got {len(capacities)} for {len(names)} names."
        )
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ArgumentError(f"names must differ, got {twice!r} twice; give each member a name of its own.")
    sizes = [operator.index(capacity) for capacity in capacities]
    if any(size < 0 for size in sizes):
        raise ArgumentError(
            f"capacities must be 0 or more, got {min(sizes)}; give 0 to a member that owns nothing."
        )
    if not any(sizes):
        raise ArgumentError("a member must have a capacity above 0, got none; give one.")
    return sizes


def _word(name: str) -> int:
    """The member's word, odd so that multiplying by it loses nothing."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little") | 1


def _least(time: float) -> int:
    """The least hash whose time, at rate 1, is below ``time``, but for rounding."""
    return min(int(math.exp(-time) * 2.0**64), 2**64 - 1)


def _minus_log(hashes: _Words) -> _Times:
    """Return -ln(u) for u = the top 52 bits of each hash and a half: exact, and neither 0 nor 1.

    With u = (1 - s) / (1 + s) * 2**e it is 2 artanh(s) - e ln(2), and artanh(s) = s + s**3 / 3 + s**5 / 5 ...
    """
    u = ((hashes >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52
    fraction, exponent = np.frexp(u)
    s = (1 - fraction) / (1 + fraction)
    square = s * s
    series = np.zeros_like(s)
    for term in reversed(_ODD):
        series = (series + term) * square
    result: _Times = 2 * (s + s * series) - exponent * _LN2
    return result
