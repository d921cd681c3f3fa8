"""Where to cut a chain: after all transforms that may be cached, unless an earlier cut is clearly cheaper.

A later cut saves more work per hit; after an earlier cut samples may be smaller, so that more of them fit.
With S samples, M bytes of memory, and b(c) bytes a sample after the first c transforms, the fraction
h(c) = min(1, M / (S b(c))) of the uses are hits, and one use takes on average::

    cost(c) = (1 - h(c)) * (read + t(1) + ... + t(c))  +  t(c+1) + ... + t(n)

Where everything fits, cost(n) is 0. A decoded picture takes four times the bytes once it is converted to
float32: if only a quarter of the converted pictures fits, a cache of the unconverted ones has four times the
hits.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["cheapest_cut", "cost_of_cut", "share_that_fits"]

# Measured seconds vary: an earlier cut is taken only if it saves at least a fifth.
_CLEARLY = 0.8


def share_that_fits(samples: int, size: float, limit: float) -> float:
    """The share of so many samples of this size that fit, 0 to 1; those without a size (empty texts) do."""
    total = samples * size
    return min(1.0, limit / total) if total > 0 else 1.0


def cost_of_cut(
    cut: int, read: float, seconds: Sequence[float], sizes: Sequence[float], samples: int, limit: float
) -> float:
    """Return the mean seconds that one use of a sample takes, up to the end of what may be cached.

    Args:
        cut: how many transforms are cached, 0 to ``len(seconds)``.
        read: seconds that reading a sample takes.
        seconds: of each transform that may be cached.
        sizes: bytes of a sample at each cut; one more than there are transforms.
        samples: length of the dataset.
        limit: bytes that the cache may take.

    Example:
        >>> cost_of_cut(1, read=2.0, seconds=[1.0], sizes=[10, 40], samples=10, limit=200)
        1.5
    """
    hits = share_that_fits(samples, sizes[cut], limit)
    return (1 - hits) * (read + sum(seconds[:cut])) + sum(seconds[cut:])


def cheapest_cut(
    read: float, seconds: Sequence[float], sizes: Sequence[float], samples: int, limit: float, least: int = 0
) -> int:
    """Return the cut to take: the last one, unless the cheapest costs less than four fifths of that.

    The arguments are those of :func:`cost_of_cut`; ``least`` is the first cut that may be taken.

    Example:
        >>> cheapest_cut(read=2.0, seconds=[0.1], sizes=[10, 40], samples=10, limit=100)  # a quarter fits
        0
        >>> cheapest_cut(read=2.0, seconds=[0.1], sizes=[10, 40], samples=10, limit=400)  # all fit
        1
    """
    last = len(seconds)
    costs = [cost_of_cut(cut, read, seconds, sizes, samples, limit) for cut in range(last + 1)]
    best = min(range(least, last + 1), key=lambda cut: (costs[cut], -cut))
    return best if costs[best] < _CLEARLY * costs[last] else last
