"""Where a window stands, as the live words of its ring say it, for all processes of a machine."""

from __future__ import annotations

from typing import NamedTuple

from hotset.store.format import Live
from hotset.store.ring import Ring

__all__ = ["WindowState"]


class WindowState(NamedTuple):
    """Where a window stands. Of two, the greater one is further.

    Attributes:
        loads: how often it was put where a state had it: what stood further before does not count any more.
        epoch: how many epochs have begun, 0 before the first.
        cursor: how many entries have left.
        behind: how many of those that were due have not come in.
        late: how many that were, ever.
    """

    loads: int
    epoch: int
    cursor: int
    behind: int
    late: int

    @classmethod
    def of(cls, ring: Ring) -> WindowState:
        """Where a ring's window stands here."""
        live = ring.segment.live
        words = (Live.LOADS, Live.EPOCH, Live.CURSOR, Live.BEHIND, Live.LATE)
        return cls(*(int(live[word]) for word in words))

    def put(self, ring: Ring) -> None:
        """Have a ring's window stand there; the caller has the short lock."""
        live = ring.segment.live
        # The cursor before the epoch: who sees that one has begun reads where it begins.
        live[Live.CURSOR], live[Live.BEHIND], live[Live.LATE] = self.cursor, self.behind, self.late
        live[Live.LOADS], live[Live.EPOCH] = self.loads, self.epoch

    def begin(self, ring: Ring) -> WindowState:
        """Have an epoch begin here, if it has not begun, wherever; returns where the window stands then."""
        self._make_way(ring)
        with ring.member.short_lock() as held:
            if held and self[:_PLACE] > WindowState.of(ring)[:_PLACE]:
                self.put(ring)
            return WindowState.of(ring)

    def advance(self, ring: Ring) -> WindowState:
        """Have a ring's window stand no less far than this; returns where it stands then."""
        self._make_way(ring)
        with ring.member.short_lock() as held:
            if held and self > WindowState.of(ring):
                self.put(ring)
            return WindowState.of(ring)

    def put_back(self, ring: Ring) -> None:
        """Have a ring's window stand there, also if it stands further."""
        self._make_way(ring)
        with ring.member.short_lock():
            self.put(ring)

    def _make_way(self, ring: Ring) -> None:
        """Forget the records of a window that a state puts back.

        An entry is never claimed twice, so none of those that have left may be there. Where somebody goes on
        writing, what is there is given up slot by slot.
        """
        now = WindowState.of(ring)
        if self.loads > now.loads and self.cursor < now.cursor:
            ring.clear(_CLEAR_SECONDS)


_CLEAR_SECONDS = 1.0  # others wait to be served meanwhile
_PLACE = 2  # loads and epoch, which tell one beginning of an epoch from the others'
