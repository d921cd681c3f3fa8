"""Which machine owns a sample: weighted rendezvous hashing, the same answer everywhere without talking.

Every member of a cluster runs a race for every sample, and the first one home owns it (rendezvous hashing:
Thaler and Ravishankar, "Using name-based mappings to increase hit rates", 1998). The times are hashed from
the seed, the sample and the member's name, as if drawn from exponential distributions whose rates are the
capacities::

    time of m for s  =  -ln(u) / capacity(m)          0 < u(s, m) < 1, uniform

Then m is the first with the chance capacity(m) / sum of the capacities, and its time depends on no other
member. So when a member leaves, only its samples move; a member that joins takes its share evenly from all,
and a member that grows only gains. Neither the order of the members nor the unit of the capacities matters.

**The hash** has to be cheap, as one batch on a large cluster asks for 100,000s. A sample's id is mixed to a
word (SplitMix64, see :mod:`hotset.policy.permutation`), a name to an odd one (BLAKE2b), and u is the top of
their product modulo 2**64: multiplicative hashing (Dietzfelbinger et al., "A reliable randomized algorithm
for the closest-pair problem", 1997). Mixing each pair anew takes four times as long, and spreads no better.

**The race** is run for few of the pairs. By the time h = 8 / sum of the capacities eight members are home on
average, and a member is home by then only if u >= exp(-h * capacity): one comparison of integers. The times
of those are computed, and all members' for the one sample in 3,000 that nobody is home for. The filter saves
work, and never changes who is first.

**Agreement.** Products and comparisons are of integers. The logarithm isn't numpy's, of which the last bits
depend on its version and on the processor (1.26 differs with AVX-512 and without): it is a sum of what IEEE
754 rounds in one way only (+ - * /). So machines agree bit for bit, and equal times, of one sample in 2**40,
go to the name that sorts first. Where two machines disagree after all, as their lists of members do while one
is joining, the price is a detour: a sample isn't where it is looked for, and is read from the source. It
never is another sample.

A ring of points on a circle (consistent hashing) was rejected: to be as even takes millions of points at
1,024 machines, and capacity per point would have to be fixed for good. So were trees of groups: a group's
weight changes with its members, and samples then move between groups that lost none.
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

# Pairs of a sample and a member in hand at a time. Their products take 512 KiB: fewer cost calls, more cache.
_PAIRS = 1 << 16

# 1/3, 1/5, ..., each rounded as the nearest double: what is left out is below 2**-53 of the sum.
_ODD = [1 / odd for odd in range(3, 33, 2)]
_LN2 = 0.6931471805599453

# The time up to which the filter finds members home, in units of 1 / sum of the capacities. A time as close
# to it as _MARGIN may be on either side of it by rounding, and isn't relied on.
_HORIZON = 8.0
_MARGIN = 1 - 2.0**-20


class Placement:
    """Tells the owners of samples among members of unequal capacity.

    Args:
        names: of the members, each another one; the same on every machine.
        capacities: what each may hold, as ints in a unit of your choice; 0 owns nothing.
        seed: another seed, another placement.

    Raises:
        ArgumentError: names that are not as many as the capacities, or come twice; a capacity below 0;
            no member with a capacity above 0.

    Example:
        >>> placement = Placement(["a", "b", "c"], [100, 100, 200], seed=7)
        >>> placement.owners(np.arange(10))
        array([1, 2, 2, 2, 2, 1, 1, 0, 2, 0])
        >>> np.bincount(placement.owners(np.arange(4000)))
        array([1008, 1007, 1985])
    """

    def __init__(self, names: Sequence[str], capacities: Sequence[int], seed: int = 0) -> None:
        sizes = _checked(names, capacities)
        # By name, so that equal times go to the same member however the members are listed.
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
        # Of equal times the first in the order of names: backwards, as the last assignment stays.
        ahead = np.flatnonzero(times == best[sample])[::-1]
        first = np.zeros(len(samples), np.int64)
        first[sample[ahead]] = member[ahead]
        late = np.flatnonzero(best > horizon * _MARGIN)
        if horizon < np.inf and len(late):
            first[late] = self._race(samples[late], np.zeros_like(least), np.inf)
        return first


def _checked(names: Sequence[str], capacities: Sequence[int]) -> list[int]:
    if len(names) != len(capacities):
        raise ArgumentError(f"names and capacities must be as many, got {len(names)} and {len(capacities)}.")
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
    """The hash from which on a member of rate 1 is home by ``time``, but for rounding."""
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
