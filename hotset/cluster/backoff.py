"""How long a machine that failed is left alone: half a second, then twice as long each time, at most 30 s."""

from __future__ import annotations

import time

__all__ = ["Backoff"]

_FIRST, _LONGEST = 0.5, 30.0  # seconds


class Backoff:
    """How long one machine is left alone; it is replaced by a new one when the machine answers again."""

    def __init__(self) -> None:
        self._seconds = _FIRST
        self._until = 0.0

    @property
    def is_active(self) -> bool:
        """Whether it is left alone now."""
        return time.monotonic() < self._until

    def begin(self) -> None:
        """Leave it alone from now on."""
        self._until = time.monotonic() + self._seconds
        self._seconds = min(2 * self._seconds, _LONGEST)
