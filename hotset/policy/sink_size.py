"""The size of a sink: the smallest number of steps in a call past which throughput no longer grows.

The search begins at one step, and doubles the size after a few calls each. The best of a size's calls counts,
as disturbances only slow a call down. Two sizes in a row that are not clearly faster than a smaller one end
the search: one poor measurement must not end it.
"""

from __future__ import annotations

__all__ = ["SizeSearch"]

_CALLS = 3
_GAIN = 1.05
_MOST = 1 << 12
_PATIENCE = 2


class SizeSearch:
    """Finds a sink size from the rates of the calls that are made anyway.

    Attributes:
        size: of the next call; when :attr:`done`, of all calls.
        done: whether the search is over.

    Example:
        >>> search = SizeSearch()
        >>> while not search.done:
        ...     search.record(search.size, min(search.size, 8) * 1000.0)
        >>> search.size
        8
    """

    def __init__(self) -> None:
        self.size = 1
        self.done = False
        self._rates: dict[int, float] = {}
        self._calls = 0

    def record(self, size: int, rate: float) -> None:
        """Record a call of ``size`` steps that ran at ``rate`` steps a second."""
        if self.done or size != self.size:
            return
        self._rates[size] = max(self._rates.get(size, 0.0), rate)
        self._calls += 1
        if self._calls < _CALLS:
            return
        self._calls = 0
        best = self._smallest_good()
        if self.size >= _MOST or self.size >= best << _PATIENCE:
            self.size, self.done = best, True
        else:
            self.size *= 2

    def _smallest_good(self) -> int:
        """The smallest size of which no larger one is clearly faster."""
        fastest = max(self._rates.values())
        return min(size for size, rate in self._rates.items() if rate * _GAIN >= fastest)
