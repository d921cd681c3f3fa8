"""How much of its time a process may spend on audits.

The budget grows by a share of the elapsed time. It is kept for a while, so that a sample that takes a second
is due after a hundred, but not for ever: a notebook that was idle for a night must not begin the day with
minutes of audits.
"""

from __future__ import annotations

import time

__all__ = ["AuditBudget"]

_KEPT_SECONDS = 0.5


class AuditBudget:
    """The seconds that this process may spend on audits now.

    Args:
        share: the part of the elapsed time that may be spent, 0 to 1.
        seconds: what may be spent at once.
    """

    __slots__ = ("_counted", "_left", "_share")

    def __init__(self, share: float, seconds: float = 0.0) -> None:
        self._share = share
        self._left = seconds
        self._counted = time.monotonic()  # up to when the elapsed time is in the budget

    def covers(self, seconds: float) -> bool:
        """Whether an audit that takes so long can be afforded now."""
        now = time.monotonic()
        earned = self._left + self._share * (now - self._counted)
        self._left, self._counted = min(earned, max(_KEPT_SECONDS, seconds)), now
        return self._left >= seconds

    def spend(self, seconds: float) -> None:
        """Take what an audit took."""
        self._left -= seconds
