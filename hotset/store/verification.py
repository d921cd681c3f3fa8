"""Verification: a record that may be damaged is verified before it is served; a damaged one never is served.

========================  ===============================================  ==============================
where the record is       when it is verified                              a damaged one
========================  ===============================================  ==============================
in memory                 never: only its writer wrote there               \\
in a file on a disk       on this process's first touch, again when its    is forgotten, and read and
                          index word has changed, and after a minute       stored again
in the second tier        at each read, in the copy that is made of it     the same
                          (:class:`hotset.store.spill.StagedBatch`)
========================  ===============================================  ==============================

Wherever the record is, its index word and its tail's place are checked at each read; if they point outside
the segment, the record is damaged. So it is if its dimensions exceed the record, where a disk can damage them
after they were verified.

The format relies on x86-64's order of stores; on other processors the first two are verified at every read.
There a record in memory that does not verify yet comes from the source, and stays.

A process warns of the first damaged record that it finds; all of them come from the source.
"""

from __future__ import annotations

import platform
import time

import numpy as np
import numpy.typing as npt

from hotset._warnings import warn
from hotset.store.claims import Ids, Index, Participant
from hotset.store.format import ON_DISK, OWN_FORM, ROW_MASK, Slot
from hotset.store.fsck import record_problem
from hotset.store.leaves.schema import Schema
from hotset.store.record_batch import VariableTails
from hotset.store.segment import Words
from hotset.store.spill import Spill, StagedBatch

__all__ = ["FULL_CHECK", "Verification"]

_BELIEVED_SECONDS = 60.0

FULL_CHECK = platform.machine() not in ("x86_64", "AMD64")


class Verification:
    """Verifies one store's records, and remembers which this process has verified.

    Attributes:
        verified: the index word under which each sample was found sound; None if none needs verifying.
    """

    def __init__(self, participant: Participant, index: Index, schema: Schema, spill: Spill | None) -> None:
        self._participant = participant
        self._segment = participant.segment
        self._index = index
        self._schema = schema
        self._spill = spill
        # Without a second tier a word that names it names no row.
        self._row = ROW_MASK if spill is not None else ROW_MASK | ON_DISK
        self._damaged = 0
        self._begun = time.monotonic()
        self.verified: Words | None = None
        if FULL_CHECK or not self._segment.trusted:
            self.verified = np.zeros(self._segment.geometry.samples, np.int64)

    def rows_exist(self, ids: Ids, words: Words) -> bool:
        """Whether all of these words, of present samples, name existing rows; the others are forgotten."""
        rows = words & self._row
        if int(np.maximum.reduce(rows, initial=0)) < self._segment.geometry.rows:
            return True
        outside = rows >= self._segment.geometry.rows
        if self._spill is not None:
            outside &= words & ON_DISK == 0  # the second tier checks its own rows
        return self._none_damaged(outside, ids, words, "its index word names a row that does not exist")

    def tails_fit(self, ids: Ids, words: Words, tails: VariableTails) -> bool:
        """Whether these tails, of records in the first tier, lie in it; those that do not are forgotten.

        In a segment that may be damaged, each tail must also hold what its record's dimensions say.
        """
        outside = tails.outside(self._segment.geometry.lines)
        if outside is not None:
            return self._none_damaged(outside, ids, words, "its record's tail lies outside the segment")
        if self.verified is None or not self._schema.has_tail:
            return True
        common = words & OWN_FORM == 0  # other forms are checked when they are read
        outgrown = self._schema.outgrown(tails.heads[common], tails.counts[common])
        if outgrown is None:
            return True
        return self._none_damaged(outgrown, ids[common], words[common], "its record's dimensions are damaged")

    def _none_damaged(self, damaged: npt.NDArray[np.bool_], ids: Ids, words: Words, why: str) -> bool:
        """Forget those of these records that are damaged; True if none is."""
        places = self._index.places(ids)
        for number in np.flatnonzero(damaged).tolist():
            self.forget_damaged(int(places[number]), int(words[number]), why)
        return not damaged.any()

    def is_sound(self, sample: int, word: int) -> bool:
        """Whether the record that this index word names is what its writer wrote."""
        assert self.verified is not None
        if time.monotonic() > self._begun + _BELIEVED_SECONDS:
            self._begun = time.monotonic()
            self.verified[:] = 0
        if self.verified[sample] == word:
            return True
        problem = self.problem(sample, word)
        if problem is not None:
            # In memory it is not damaged: what its writer wrote has not all come here yet.
            if not self._segment.trusted:
                self.forget_damaged(sample, word, problem)
            return False
        if not FULL_CHECK:
            self.verified[sample] = word
        return True

    def problem(self, sample: int, word: int) -> str | None:
        """What is wrong with the record that this index word names, as a sentence; None if it is sound."""
        if not word & ON_DISK:
            return record_problem(self._segment, sample, word)
        if self._spill is not None:
            return None  # verified in the copy that is made of it
        return f"sample {sample}: its index word names a tier that does not exist"

    def forget(self, staged: StagedBatch) -> None:
        """Forget the records that were found damaged in a copy from the second tier."""
        for sample, word, why in staged.damaged:
            self.forget_damaged(sample, word, why)

    def forget_damaged(self, sample: int, word: int, why: str) -> None:
        """Forget a record that is damaged, so that it is read from the source and stored again.

        ``sample`` is the place of its index word, which is ``word`` unless it was cleared meanwhile.
        """
        if not self._forget(sample, word):
            return
        why = why.removeprefix(f"sample {sample}: ")
        self._damaged += 1
        if self._damaged == 1:
            spilled = self._spill is not None and word & ON_DISK
            where = "in memory" if self._segment.trusted and not spilled else "on the disk"
            warn(f"sample {sample} is damaged {where} ({why}), and is read from the source again.")

    def _forget(self, sample: int, word: int) -> bool:
        """Forget a record; False if it has gone already, or if other processes cannot be kept out."""
        with self._participant.short_lock() as held:
            if not held:
                return False  # perhaps this process has closed the file, and the record is sound
            if self._segment.clear_generation is None or int(self._segment.index[sample]) != word:
                return False
            if word & ON_DISK and self._spill is not None:
                self._spill.forget(sample)
            self._segment.index[sample] = 0
            # The size of its tail is not known any more.
            self._participant.row[Slot.STORED_BYTES] -= self._segment.geometry.stride
            return True
