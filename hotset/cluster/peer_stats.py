"""Traffic: what passed between this process and one peer, and how long a peer that fails is left alone."""

from __future__ import annotations

import time
from dataclasses import dataclass

__all__ = ["Backoff", "PeerStats"]

_FIRST = 0.5
_LONGEST = 30.0


@dataclass
class PeerStats:
    """What passed between this process and one peer.

    Attributes:
        asked: samples asked for.
        received: records received, verified.
        bytes: of those records.
        stored: records that the peer took.
        unsound: records that were damaged, or another sample's.
        refused: requests that it had no records for: no such cache, or too many requests.
        late: answers that nobody waited for any more.
        failures: of the peer.
        answers: that came in time.
        seconds: from asking to the answer being there, summed over those.
        why: what the last failure was, as the end of a sentence; empty if there was none.
    """

    asked: int = 0
    received: int = 0
    bytes: int = 0
    stored: int = 0
    unsound: int = 0
    refused: int = 0
    late: int = 0
    failures: int = 0
    answers: int = 0
    seconds: float = 0.0
    why: str = ""

    @property
    def latency(self) -> float:
        """Mean seconds from asking to the answer being there; 0 before the first."""
        return self.seconds / self.answers if self.answers else 0.0


class Backoff:
    """How long something is left alone: half a second, then twice as long each time, half a minute at most.

    One is forgotten when what it is of does well again.
    """

    def __init__(self) -> None:
        self._seconds = _FIRST
        self._until = 0.0

    @property
    def lasts(self) -> bool:
        """Whether it is left alone now."""
        return time.monotonic() < self._until

    def begin(self) -> None:
        """Leave it alone from now on."""
        self._until = time.monotonic() + self._seconds
        self._seconds = min(2 * self._seconds, _LONGEST)
