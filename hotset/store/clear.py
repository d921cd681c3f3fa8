"""Clearing: every sample forgotten at once, in all processes. Nothing else gives rows to other samples.

A live word, the *era*, counts: it is even while the store may be read, and odd while it is cleared::

    era 2 ──> short lock, and no living claim ──> era 3 ──> words, extents, counters, pages ──> era 4
              else it is tried again                └── the process died: whoever fills next ends it

*Readers* take no lock. They look at the era before they begin and once they have copied: an odd one, or
another one, means that what they have is not what they asked for. *Writers* must be done: a record that is
published after the rows were given anew would lie in somebody else's. So a clear waits until no living
process has a claim open, and as claims are given under the short lock, none is opened then.

A store that was *condemned*, because what is in it is not right or its session is gone, is not read either.
(In a ring rows are used again without a clear, and its readers look at more: :mod:`hotset.store.ring`.)
"""

from __future__ import annotations

import time

from hotset.store.allocator import Allocator
from hotset.store.claims import Claims, Participant
from hotset.store.format import CLAIMED, PRESENT, Live, Slot
from hotset.store.segment import Segment
from hotset.store.spill import Spill

__all__ = ["Clearing", "era_of"]

_READERS_SECONDS = 2.0


def era_of(segment: Segment) -> int | None:
    """Which clear the segment's content comes after; None while one is under way, or once condemned."""
    era = int(segment.live[Live.ERA])
    return era if era % 2 == 0 and not segment.live[Live.INVALIDATED] else None


class Clearing:
    """Clears one store on behalf of this process.

    Args:
        member: this process's place in the segment.
        claims: to know who writes.
        room: to be given anew.
        spill: the second tier, cleared too; None if there is none.
    """

    def __init__(self, member: Participant, claims: Claims, room: Allocator, spill: Spill | None) -> None:
        self._member = member
        self._claims = claims
        self._room = room
        self._spill = spill

    def clear(self, timeout: float) -> bool:
        """Forget every sample; False if some process did not finish writing within so many seconds."""
        deadline = time.monotonic() + timeout
        while True:
            with self._member.short_lock() as held:
                words = self._member.segment.index
                claimed = words[(words >= CLAIMED) & (words < PRESENT)]
                if held and not any(self._claims.is_open(word) for word in set(claimed.tolist())):
                    self._forget_everything()
                    return True
            if time.monotonic() > deadline:
                return False
            time.sleep(2e-3)

    def finish(self) -> None:
        """Bring to an end what a process began to clear and died over."""
        live = self._member.segment.live
        with self._member.short_lock() as held:
            # Who condemned it meanwhile is not to be overruled.
            if held and live[Live.ERA] % 2 and not live[Live.INVALIDATED]:
                self._forget_everything()

    def _forget_everything(self) -> None:
        """Empty the segment; the caller has the short lock."""
        segment, geometry = self._member.segment, self._member.segment.geometry
        segment.live[Live.ERA] |= 1
        segment.index[:] = 0
        segment.slots[:, Slot.ROW_NEXT : Slot.LINE_END + 1] = 0
        segment.slots[:, Slot.STORED_BYTES] = 0
        if self._spill is not None:
            self._spill.clear()
        told = [Live.TOLD, Live.DRAWS_TOLD]
        segment.live[[Live.ROWS_NEXT, Live.LINES_NEXT, Live.INVALIDATED, Live.FULL, *told]] = 0
        if self._member.unread(_READERS_SECONDS):  # else its pages are written again as they are
            segment.discard(geometry.rows_at, geometry.size - geometry.rows_at)
        if self._room.allowance is not None:
            self._room.allowance.take(0)
        self._room.reopen()
        segment.live[Live.ERA] += 1
