"""How far a stream is recorded: one row of words for each of its parts.

An iterable dataset has no indices. torch runs it once in each worker of each rank, and each run gives a
*part* of its samples, in an order of its own. A recorded sample is known by its part and its position there::

    sample id = position * parts + part

so the ids of parts that are about equally long lie close together, and no list of ids is needed. The words of
part ``k`` lie in slot ``k`` of the segment (:class:`~hotset.store.format.Slot`), whichever process holds that
slot::

    kept     its first ``kept`` samples are recorded: recording stops where there is no room
    given    how many samples it has, as far as a pass has come; final once it has ended
    ended    a pass has come to its end; and why it is recorded no further, if it is not
    owner    the claim word of the process that records it: a claim that dies with the process
    pass     the pass in which it does so: of two passes of the same program, the later one records

::

    nothing recorded ──> recording ──> all parts have ended ─┬─> whole      all samples are recorded
        ^                    │                               └─> in part    the rest comes from the stream
        └────── a clear ─────┘

A pass by another number of ranks or workers divides the samples otherwise, so it has to clear the store. An
earlier pass may go on meanwhile, and the numbers of its parts are those of other parts then. So a row is
changed only under the short lock, under which a store is cleared too, and only by the pass that it names:
:class:`StreamPart` is a row as one pass changes it, :class:`StreamParts` are all rows.
"""

from __future__ import annotations

import secrets
from typing import Literal

import numpy as np

from hotset.store.claims import Ids
from hotset.store.format import SLOTS, Live, Slot
from hotset.store.segment import Words
from hotset.store.store import Store

__all__ = ["DREW", "NO_ROOM", "OTHER_KIND", "StreamPart", "StreamParts", "StreamState"]

# Why a part is recorded no further: no room; reading drew random numbers; a sample that no record can hold.
NO_ROOM, DREW, OTHER_KIND = 1, 2, 3
StreamState = Literal["nothing", "recording", "in part", "whole"]
_WORKERS = 16  # bits
_PASS_BITS = 48
_MOST_WORKERS = (1 << _WORKERS) - 1


class StreamParts:
    """All parts of the stream that a store records, as this process sees them."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self._rows: Words = store.segment.slots
        self._live: Words = store.segment.live

    # ---- what is recorded ----------------------------------------------------------------------------

    @property
    def division(self) -> tuple[int, int]:
        """Among how many ranks, and how many workers each, the samples are divided; (0, 0) before that."""
        word = int(self._live[Live.STREAM_PARTS])
        return word >> _WORKERS, word & _MOST_WORKERS

    @property
    def count(self) -> int:
        """How many parts there are."""
        ranks, workers = self.division
        return ranks * workers

    @property
    def kept(self) -> Words:
        """For each part, how many of its first samples are recorded."""
        return self._column(Slot.PART_KEPT)

    @property
    def given(self) -> Words:
        """For each part, how many samples it has, as far as a pass has come."""
        return self._column(Slot.PART_GIVEN)

    @property
    def ended(self) -> Words:
        """For each part, whether a pass has come to its end."""
        return self._column(Slot.PART_ENDED) & 1

    def _column(self, word: int) -> Words:
        return self._rows[: self.count, word].copy()

    @property
    def state(self) -> StreamState:
        """How far all parts are recorded."""
        # Read once: another process may clear the store meanwhile, and there are other parts, or none.
        rows = self._rows[: self.count].copy()
        if not len(rows) or self.store.clear_generation() is None:
            return "nothing"
        if not (rows[:, Slot.PART_ENDED] & 1).all() or self.is_other:
            return "recording"
        return "whole" if (rows[:, Slot.PART_KEPT] >= rows[:, Slot.PART_GIVEN]).all() else "in part"

    @property
    def is_other(self) -> bool:
        """Whether a pass gave other samples than were recorded."""
        return bool(self._live[Live.STREAM_DIFFERS])

    def ids(self) -> Ids:
        """The sample ids of all recorded samples: first the parts' first ones, then their second, and so on.

        Example:
            Two parts of 3 and 1 samples have the ids 0, 1, 2, 4: those of part 0 are even.
        """
        kept = self.kept
        count = len(kept)
        positions = np.concatenate([np.arange(each) for each in kept] or [np.zeros(0, np.int64)])
        parts = np.repeat(np.arange(count), kept)
        ids: Ids = np.sort(positions.astype(np.int64) * count + parts)
        return ids

    def sample_id(self, part: int, position: int) -> int:
        """The id of a sample; it may be beyond the store's index."""
        return position * self.count + part

    # ---- recording -----------------------------------------------------------------------------------

    def divide(self, ranks: int, workers: int) -> bool:
        """Divide the samples among the workers of each rank; False if that cannot be or is done otherwise."""
        word = ranks << _WORKERS | workers
        if not 0 < ranks * workers <= SLOTS:
            return False
        with self.store.participant.short_lock() as held:
            if held and not self._live[Live.STREAM_PARTS]:
                self._live[Live.STREAM_PARTS] = word
        return int(self._live[Live.STREAM_PARTS]) == word

    def is_recorded_by_others(self) -> bool:
        """Whether another program records a part now."""
        mine = self.store.participant.slot + 1
        owners = {
            int(row[Slot.PART_OWNER])
            for row in self._rows[: self.count]
            if row[Slot.PART_OWNER] and int(row[Slot.PART_PASS]) >> _PASS_BITS != mine
        }
        return any(map(self.store.filler.claims.is_open, owners))

    def new_pass(self) -> int:
        """A word for a pass that this process begins; 0 if it cannot record."""
        slot = self.store.participant.slot
        return (slot + 1) << _PASS_BITS | secrets.randbits(_PASS_BITS) if slot >= 0 else 0

    @property
    def is_alone(self) -> bool:
        """Whether only one rank records into this store: see :meth:`go_alone`."""
        return bool(self._live[Live.STREAM_ALONE])

    def go_alone(self, rank: int) -> bool:
        """Note that only this rank records, and end the others' parts; False if one of these was begun."""
        ranks, workers = self.division
        others = [part for part in range(ranks * workers) if part // workers != rank]
        with self.store.participant.short_lock() as held:
            if not held or self._rows[others][:, [Slot.PART_GIVEN, Slot.PART_OWNER]].any():
                return False
            self._rows[others, Slot.PART_ENDED] |= 1
            self._live[Live.STREAM_ALONE] = 1
        return True

    def use(self, count: int) -> None:
        """Note that sample ids below this number are in use; before one of them is stored."""
        store = self.store
        if count > int(self._live[Live.STREAM_IDS]):
            with store.participant.short_lock():
                for tier in (store, store.spill) if store.spill is not None else (store,):
                    live = tier.segment.live
                    live[Live.STREAM_IDS] = max(int(live[Live.STREAM_IDS]), count)

    def reasons(self) -> set[int]:
        """Why parts are recorded no further: constants of this module."""
        return set((self._column(Slot.PART_ENDED) >> 1).tolist()) - {0}

    def note_other(self, generation: int) -> None:
        """Note that a pass gave other samples than were recorded: nothing recorded is used any more.

        Nothing is noted in another clear generation than that in which they were recorded.
        """
        with self.store.participant.short_lock():
            if self.store.clear_generation() == generation:
                self._live[Live.STREAM_DIFFERS] = 1


class StreamPart:
    """One part, as one pass records it.

    A pass of the same program that begins later takes over: then nothing is noted for this one any more.

    Args:
        number: of the part.
        of_pass: the pass, by :meth:`StreamParts.new_pass`.
    """

    def __init__(self, store: Store, number: int, of_pass: int) -> None:
        self.number = number
        self._store, self._pass = store, of_pass
        self._row: Words = store.segment.slots[number]

    @property
    def kept(self) -> int:
        """How many of its first samples are recorded; of a part that there is not, anything."""
        return int(self._row[Slot.PART_KEPT])

    def own(self, generation: int) -> bool:
        """Have this process record it, in this pass; False if another program records it.

        A pass of the same program gives way: it may be one that was broken off, and whose workers are still
        there because a traceback refers to it. It is False too in another clear generation than the given
        one, in which the part would be another one.
        """
        claims, row = self._store.filler.claims, self._row
        mine = claims.word
        with self._store.participant.short_lock() as held:
            owner, before = int(row[Slot.PART_OWNER]), int(row[Slot.PART_PASS])
            theirs = owner not in (0, mine) and before >> _PASS_BITS != self._pass >> _PASS_BITS
            if not held or mine < 0 or (theirs and claims.is_open(owner)):
                return False
            if self._store.clear_generation() != generation:
                return False
            row[Slot.PART_OWNER], row[Slot.PART_PASS] = mine, self._pass
            row[Slot.PART_ENDED] &= 1  # there may be room now
        return True

    @property
    def is_own(self) -> bool:
        """Whether this pass still records it."""
        return int(self._row[Slot.PART_PASS]) == self._pass

    def disown(self, owner: int = Slot.PART_OWNER, of_pass: int = Slot.PART_PASS) -> None:
        """Let others record it.

        Without the lock, as a run of a stream that is collected calls this, perhaps while its thread has the
        lock. If a later pass takes over just then, other programs may record the part instead of that one.
        """
        # The defaults are bound here: at the interpreter's end, this module's own names may be gone.
        if int(self._row[of_pass]) == self._pass:
            self._row[owner] = 0

    def note(self, kept: int) -> bool:
        """Note that so many of its first samples are recorded; False if this pass does not record it."""
        row = self._row
        with self._store.participant.short_lock() as held:
            if not held or not self.is_own:
                return False
            row[Slot.PART_GIVEN] = max(int(row[Slot.PART_GIVEN]), kept)
            row[Slot.PART_KEPT] = max(int(row[Slot.PART_KEPT]), kept)
        return True

    def stop(self, why: int) -> None:
        """Note why it is recorded no further."""
        with self._store.participant.short_lock() as held:
            if held and self.is_own:
                self._row[Slot.PART_ENDED] |= why << 1

    def end(self, count: int) -> None:
        """Note that it has ended after so many samples."""
        row = self._row
        with self._store.participant.short_lock() as held:
            if not held or not self.is_own:
                return
            if count < int(row[Slot.PART_GIVEN]):
                self._store.segment.live[Live.STREAM_DIFFERS] = 1
            row[Slot.PART_GIVEN] = count
            row[Slot.PART_ENDED] |= 1
