"""The index of a ring: which word is an entry's, and which entry a word is of.

Slot, lap and refusal are drawn in :mod:`hotset.store.ring`.
"""

from __future__ import annotations

import numpy as np

from hotset.store.claims import Ids, Index
from hotset.store.format import CLAIMED, DRAWS, GENERATION_MASK, GENERATION_SHIFT, OWN_FORM, PRESENT, Live
from hotset.store.segment import Words

__all__ = ["RingIndex"]


class RingIndex(Index):
    """The index words of a ring: one for each slot, which entries use in turn."""

    def words(self, ids: Ids) -> Words:
        """The words of the slots, but 0 where a slot has another lap's record, or says that it draws."""
        laps, slots = np.divmod(ids, len(self._words))
        found: Words = self._words[slots]
        wanted = (laps & GENERATION_MASK) << GENERATION_SHIFT | PRESENT | slots
        other = found & ~OWN_FORM != wanted
        if np.logical_or.reduce(other):
            drawing = (found >= DRAWS) & (found < CLAIMED) & (found & ~DRAWS != (laps & GENERATION_MASK) + 1)
            found[(other & (found >= PRESENT)) | drawing] = 0
        return found

    def places(self, ids: Ids) -> Ids:
        return ids % len(self._words)

    def generations(self, ids: Ids) -> Words:
        return ids // len(self._words) & GENERATION_MASK

    def refusals(self, ids: Ids) -> Words:
        return self.generations(ids) + 1

    def admit(self, ids: Ids) -> Ids:
        if not len(ids):
            return ids
        slots, cursor = self.places(ids), self.cursor
        held = self._held(slots, self._words[slots], cursor)
        # What lies a lap or more ahead is wanted by a process that does not know that the window moved back.
        beyond = cursor + len(self._words)
        free = (held < cursor) | (held >= beyond) | (held == ids)
        here: Ids = ids[(ids >= cursor) & (ids < beyond) & free & (slots < self._segment.geometry.rows)]
        return here

    def records(self) -> tuple[Ids, Ids]:
        """The slots that have records, those of entries that have left first and in that order; and those."""
        words, cursor = self._words.copy(), self.cursor
        slots = np.flatnonzero(words >= PRESENT)
        held = self._held(slots, words[slots], cursor)
        slots = slots[np.argsort(held)]
        return slots, slots[: int((held < cursor).sum())]

    @property
    def cursor(self) -> int:
        """How many entries have left."""
        return int(self._segment.live[Live.CURSOR])

    def _held(self, slots: Ids, words: Words, cursor: int) -> Ids:
        """The entries that these slots have records or refusals of; -1 for none.

        The words hold 20 bits of the lap. Of the entries that one may mean, it is the one next to the cursor.
        """
        count, half = len(self._words), GENERATION_MASK // 2 + 1
        words = np.where((words >= DRAWS) & (words < CLAIMED), words & ~DRAWS, words)
        laps = np.where(words >= PRESENT, words >> GENERATION_SHIFT, words - 1)
        ahead = ((laps - cursor // count + half) & GENERATION_MASK) - half
        told = (words >= PRESENT) | ((words > 0) & (words <= GENERATION_MASK + 1))
        return np.where(told, (cursor // count + ahead) * count + slots, -1)
