"""A running window over a dataset larger than memory: how large, which samples, how fast.

D samples are all there are, N of them are resident, and R more are prepared while an epoch uses the N.
The samples enter in an endless sequence, cycle after cycle, each cycle a permutation of all D. The *cursor*
counts the samples that have left::

    entry     0                cursor          cursor+N   cursor+N+R
    sequence  ──── left ────────┤── resident ───┤─ incoming ─┤──── to come ────

At an epoch's boundary the cursor moves by as many of the R as are ready. It is the only state: everything
else is a pure function of it, of the sizes and of the seed, so that processes agree without talking.

Room is kept for A samples beside the N (``ahead``), twice R where that is possible. The second R of them is
for samples that were late at a boundary and are made up at the next; while nothing is late, samples that have
just left stay there, for processes that have not come to the boundary yet.

**What is promised.** Every sample enters once in a cycle, and stays for N/R epochs (rounded down or up, if R
does not divide N). Where filling keeps up, ceil((D-N)/R) + 1 epochs from the beginning use every sample.
No sample is resident twice, and none that is resident is also incoming: any N+A consecutive entries differ.

**The order.** Within one cycle entries differ anyway; the last of one cycle and the first of the next may
not. Let S = D - (N+A) be the samples for which no room is kept. One permutation, drawn from the
seed, lines the samples up for good. The line is cut into segments of nearly equal length, at most S+1, and
each cycle permutes every segment anew. A sample's places in two cycles are in one segment, hence at most S
apart, and its entries at least D - S = N+A apart, as they must be, and at most D + S.

Nothing that draws cycles independently of one another could mix more: two places that a sample can have must
not be more than S apart, or it could come back too early. (At S = 0 every cycle is the same, by necessity.)
Repairing free permutations where they collide was rejected: a cycle would depend on all that came before.

Any entry is found without drawing the cycle that it is in: see :mod:`hotset.policy.permutation`.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from fractions import Fraction
from numbers import Real

import numpy as np
import numpy.typing as npt

from hotset.errors import ArgumentError
from hotset.policy.permutation import key, permute
from hotset.units import format_bytes, parse_bytes

__all__ = [
    "AUTO",
    "RunningWindow",
    "ahead_count",
    "epoch_order",
    "epochs_until_all_seen",
    "replaced_count",
    "resident_count",
]

# In place of a rate: all samples that are ready at a boundary enter, up to half of the residents.
AUTO = "auto"

# What a permutation is for, so that no two uses draw the same numbers.
_LINE, _CYCLE, _EPOCH = range(3)


# How large


def resident_count(
    resident: float | str, replace: float | str, samples: int, *, sample_bytes: float = 0
) -> int:
    """Return N, how many samples are resident: from 1 to ``samples``, which means that all fit.

    An amount of memory also holds the samples being prepared: see :func:`ahead_count`.

    Args:
        resident: a count (int), a fraction of the samples (float in (0, 1]) or an amount of memory (string).
        replace: r in [0, 1], the share of the residents that is replaced after an epoch, or ``"auto"``.
        samples: D, the size of the dataset.
        sample_bytes: what one sample takes, in bytes; needed for an amount of memory only.

    Raises:
        ArgumentError: a value outside its range, or memory for less than one sample and its replacement.
        QuantityError: a string that is not an amount of memory.

    Example:
        >>> resident_count(50, 0.1, samples=100), resident_count(0.29, 0.1, samples=100)
        (50, 29)
        >>> resident_count("1GiB", 0.1, samples=5000, sample_bytes=2**20)  # 852 + 2 * 86 fit in 1,024
        852
    """
    _check_samples(samples)
    _rate(replace)
    if isinstance(resident, str):
        return _count_in_memory(resident, replace, samples, sample_bytes)
    if isinstance(resident, (int, np.integer)) and not isinstance(resident, bool):
        _check_resident(int(resident))
        return min(int(resident), samples)
    share = _share(resident, "resident", 'a count (int), a fraction in (0, 1], or memory such as "20GiB"')
    if not share:
        raise ArgumentError(
            f"resident={resident} must keep at least one sample in memory; give a fraction above 0."
        )
    return max(1, math.floor(samples * share))


def _count_in_memory(resident: str, replace: float | str, samples: int, sample_bytes: float) -> int:
    if not (sample_bytes > 0 and math.isfinite(sample_bytes)):
        raise ArgumentError(f"sample_bytes={sample_bytes!r} must be a finite number above 0.")
    # The caller has turned a percentage into bytes: this module does not know of which memory it is.
    size = parse_bytes(resident, name="resident", whole=lambda: sys.maxsize)
    fit = math.floor(size / Fraction(sample_bytes))
    if fit >= samples:
        return samples
    # N and what is kept ahead grow together, so the largest N that fits is found by halving.
    count, too_many = 0, fit + 1
    while too_many - count > 1:
        middle = (count + too_many) // 2
        if middle + ahead_count(middle, replace, samples) <= fit:
            count = middle
        else:
            too_many = middle
    if not count:
        least = math.ceil(Fraction(sample_bytes) * min(samples, 2 if _rate(replace) else 1))
        raise ArgumentError(
            f"resident={resident!r} has no room for one resident sample of {format_bytes(sample_bytes)} and "
            f"those being prepared; give at least {least} bytes."
        )
    return count


def replaced_count(resident: int, replace: float | str, samples: int) -> int:
    """Return R, how many samples are replaced at a boundary: ceil(N * r), and at most D - N.

    With ``"auto"`` it is the most that may be: half of N. The product is that of the numbers as people write
    them: 7 % of 100 is 7, not the 8 that ``ceil(100 * 0.07)`` gives. So r > 0 replaces at least one sample,
    if any is left to come in.

    Args:
        resident: N, a count of samples.
        replace: r in [0, 1]; 0 never replaces; or ``"auto"``.
        samples: D, the size of the dataset.

    Raises:
        ArgumentError: a value outside its range.

    Example:
        >>> replaced_count(50, 0.1, samples=100), replaced_count(90, 0.5, samples=100)
        (5, 10)
    """
    _check_sizes(samples, resident, ahead=0)
    return min(math.ceil(resident * _rate(replace)), samples - resident)


def ahead_count(resident: int, replace: float | str, samples: int) -> int:
    """Return for how many samples beside the residents room is kept: A = 2 R, and at most N and D - N.

    With ``"auto"`` it is R, which is large then: late samples are not made up, as none is ever due.

    Takes and raises what :func:`replaced_count` does.

    Example:
        >>> ahead_count(50, 0.1, samples=100), ahead_count(50, 0.8, samples=100), ahead_count(50, "auto", 90)
        (10, 50, 25)
    """
    replaced = replaced_count(resident, replace, samples)
    return min(replaced if replace == AUTO else 2 * replaced, resident, samples - resident)


# How fast


def epochs_until_all_seen(samples: int, resident: int, replaced: int) -> int | None:
    """Return how many epochs use every sample, where filling keeps up: ceil((D-N)/R) + 1; None for never.

    Args:
        samples: D, the size of the dataset.
        resident: N, a count of samples.
        replaced: R, how many are replaced at each boundary.

    Raises:
        ArgumentError: sizes that no window has.

    Example:
        >>> epochs_until_all_seen(100, 50, 5)
        11
    """
    _check_sizes(samples, resident, replaced)
    if resident == samples:
        return 1
    return -(-(samples - resident) // replaced) + 1 if replaced else None


# Which samples


@dataclass(frozen=True)
class RunningWindow:
    """Which samples are resident, and which come next, at any cursor.

    Another ``samples``, ``resident``, ``ahead`` or ``seed`` is another sequence.

    Attributes:
        samples: D, the size of the dataset.
        resident: N, from 1 to D.
        ahead: A, the most that are ever prepared at once, from 0 to N, and to D - N.
        seed: any int, of which 64 bits count.
        shuffle: whether each cycle is permuted; if not, samples enter in the dataset's order.

    Raises:
        ArgumentError: sizes that no window has.

    Example:
        >>> window = RunningWindow(samples=10, resident=4, ahead=2, shuffle=False)
        >>> cursor = 7
        >>> window.entries(cursor, 4), window.entries(cursor + 4, 2)  # residents, and those that come next
        (array([7, 8, 9, 0]), array([1, 2]))
    """

    samples: int
    resident: int
    ahead: int
    seed: int = 0
    shuffle: bool = True

    def __post_init__(self) -> None:
        _check_sizes(self.samples, self.resident, self.ahead)

    @property
    def segments(self) -> int:
        """Into how many segments the line of samples is cut: ceil(D / (S+1)) with S = D - (N+A)."""
        longest = self.samples - self.resident - self.ahead + 1
        return -(-self.samples // longest)

    def entries(self, start: int, count: int) -> npt.NDArray[np.int64]:
        """Return entries ``start`` to ``start + count - 1`` of the sequence: shape ``[count]``, indices.

        Raises:
            ArgumentError: ``start`` is negative.
        """
        if start < 0:
            raise ArgumentError(f"start={start} must be 0 or more, a count of entries.")
        cycle, place = np.divmod(np.arange(start, start + count, dtype=np.int64), self.samples)
        if not self.shuffle:
            return place
        shorter, longer_ones = divmod(self.samples, self.segments)
        # The first segments have one sample more than the others, if they cannot all be equal.
        segment = np.maximum(place // (shorter + 1), (place - longer_ones) // shorter)
        first = segment * shorter + np.minimum(segment, longer_ones)
        length = shorter + (segment < longer_ones)
        place = first + permute(place - first, length, key(self.seed, _CYCLE, cycle, segment))
        return permute(place, np.full_like(place, self.samples), key(self.seed, _LINE))


def epoch_order(seed: int, epoch: int, cursor: int, resident: int) -> npt.NDArray[np.int64]:
    """Return the order in which an epoch uses the window's members: shape ``[N]``, a permutation of 0 to N-1.

    The k-th of n ranks that share the window takes ``order[k::n]``.

    Args:
        seed, epoch, cursor: the window's seed, the epoch's number, and the window's cursor in that epoch.
        resident: N, a count of samples.

    Raises:
        ArgumentError: N is below 1.

    Example:
        >>> window = RunningWindow(samples=100, resident=50, ahead=5)
        >>> residents = window.entries(20, window.resident)
        >>> sorted(residents[epoch_order(window.seed, 4, 20, window.resident)]) == sorted(residents)
        True
    """
    _check_resident(resident)
    place = np.arange(resident, dtype=np.int64)
    return permute(place, np.full_like(place, resident), key(seed, _EPOCH, epoch, cursor))


# Bad values


def _check_samples(samples: int) -> None:
    if samples < 1:
        raise ArgumentError(
            f"samples={samples} must be 1 or more; a window needs a dataset that is not empty."
        )


def _check_resident(resident: int) -> None:
    if resident < 1:
        raise ArgumentError(f"resident={resident} must keep at least one sample in memory; give 1 or more.")


def _check_sizes(samples: int, resident: int, ahead: int) -> None:
    _check_samples(samples)
    _check_resident(resident)
    if resident > samples:
        raise ArgumentError(f"resident={resident} must be at most the number of samples, {samples}.")
    most = min(resident, samples - resident)  # more than N would leave again without having been used
    if not 0 <= ahead <= most:
        raise ArgumentError(
            f"ahead={ahead} must be from 0 to {most} with {resident} of {samples} samples resident."
        )


def _rate(replace: float | str) -> Fraction:
    if replace == AUTO:
        return Fraction(1, 2)
    return _share(replace, "replace", 'a share of the residents, in [0, 1], or "auto"')


def _share(value: object, name: str, wanted: str) -> Fraction:
    """Return a share in [0, 1] as the fraction that was meant: 0.07 is 7/100, 0.8333333333333334 is 5/6."""
    if isinstance(value, bool) or not isinstance(value, Real) or not 0.0 <= float(value) <= 1.0:
        raise ArgumentError(f"{name}={value!r} must be {wanted}.")
    # Fractions this simple are further apart than a float's rounding; only a tiny one has none but 0 near it.
    exact = Fraction(str(value))  # that of the float itself would take a float32 of 0.07 for more
    return exact.limit_denominator(10**9) or exact
