"""Claims: which process reads which sample, so that each is read from the source once.

A process that attaches to write takes a *slot*: it holds an open-file-description lock on the slot's byte
for as long as it is attached, and the kernel drops it when the process dies. A claim is an index word that
names a slot and the incarnation of its holder. So there is no owner's pid to be reused, no lease to be
renewed, and nothing to clean up: a claim whose slot is free, or has had another holder since, is void.

::

    absent ── claim ──> claimed ── publish ──> present
       ^                   │
       │                   │
       ├── release, or its holder died and another process claims it
       │
       └── draws: never claimed again, as its reading has drawn random numbers (until a clear)

Where a sample's record has a place of its own (:mod:`hotset.store.slots`), a present one can be claimed as
well, to be written again; in a ring (:mod:`hotset.store.ring`) the place of one that has left is claimed for
the next. Nothing else goes from present to claimed.

Claims are taken under one short lock, which is tried for a bounded time, because its holder may be stopped. A
process that does not get it reads the source without a claim, at the cost of reading a sample twice.
Publishing needs no lock, since only a living claimant stores over its own claim.

A forked child must not keep the parent's lock descriptor, which would make a dead parent look alive. It is
closed in the child at once (:class:`hotset.store.locks.FileLock`), and the child takes a slot of its own when
it first needs one.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from hotset.store import locks
from hotset.store.format import (
    CLAIMED,
    DRAWS,
    GENERATION_MASK,
    INCARNATION_MASK,
    PRESENT,
    SLOT_SHIFT,
    SLOT_WORDS,
    SLOTS,
    Live,
    Slot,
)
from hotset.store.segment import Segment, Words

__all__ = ["Claims", "Index", "Participant"]

_SHORT_LOCK = 0
_READING = 1 << 11
_LOCK_SECONDS = 2.0
_AFTER_TIMEOUT_SECONDS = 1.0

Ids = npt.NDArray[np.int64]


class Participant:
    """This process's place in a segment: its lock descriptor and its slot.

    Attributes:
        segment: the segment that it belongs to.
        inherits: whether extents that a slot's last holder left are taken over with the slot.
        thread_lock: excludes other threads of this process, for what only this process writes.
    """

    def __init__(self, segment: Segment) -> None:
        self.segment = segment
        # In a file that may be damaged, an inherited extent might be somebody's record.
        self.inherits = segment.trusted
        self._locks = locks.FileLock(segment.own_fd, self._after_fork_in_child)
        self._slot = -1
        self.thread_lock: contextlib.AbstractContextManager[object] = threading.RLock()
        self._give_up_until = 0.0

    @property
    def slot(self) -> int:
        """Number of this process's slot, taken at first use; -1 when all 1,024 are held."""
        self._locks.notice_fork()
        if self._slot < 0:
            with self.thread_lock:
                if self._slot < 0:
                    self._slot = self._take_slot()
        return self._slot

    @property
    def row(self) -> Words:
        """This process's slot in shared memory: extents and counters, which no other process writes."""
        slot = self.slot
        # Where all are held, what is counted goes nowhere.
        return self.segment.slots[slot] if slot >= 0 else np.zeros(SLOT_WORDS, np.int64)

    def _take_slot(self) -> int:
        try:
            fd = self._locks.process().value
        except OSError:  # no descriptor left, or closed, or detached: this process reads without claims
            return -1
        for slot in range(SLOTS):
            if locks.try_lock(fd, 1 + slot):
                row = self.segment.slots[slot]
                row[Slot.INCARNATION] += 1
                row[Slot.PID] = os.getpid()
                if not self.inherits:
                    row[Slot.ROW_NEXT : Slot.LINE_END + 1] = 0
                return slot
        return -1

    def short_lock(self) -> locks.Held | contextlib.nullcontext[bool]:
        """A block that holds the segment's short lock; it gets False if the lock is taken for two seconds.

        After a time-out this process does not wait again for a second, so that a stopped holder costs it two
        seconds, and not two seconds a sample.
        """
        try:
            return _ShortLock(self, self._locks.thread())
        except OSError:  # no descriptor left, or detached
            return contextlib.nullcontext(False)

    @property
    def reading(self) -> locks.Held | contextlib.nullcontext[bool]:
        """A block that reads records through the mapping, while a lock shows other processes that it does.

        A cache that is destroyed frees its pages while processes have it mapped. Touching such a page
        allocates memory again, and if the file system has none left, that is SIGBUS. So the process that
        destroys the cache first makes the clear generation odd, then waits for the holders of this lock; a
        reader takes the lock first, then looks at the clear generation: one of them sees the other. It costs
        a few system calls a batch, and nothing if no file system bounds the segment.
        """
        if not self.segment.bounded:
            return contextlib.nullcontext(True)
        try:
            return locks.Held(self._locks.thread(), _READING, shared=True)
        except OSError:  # no descriptor left, or detached
            return contextlib.nullcontext(False)

    def is_alive(self, slot: int) -> bool:
        """Whether a process holds ``slot`` at this moment; True, too, where this process cannot tell."""
        try:
            return slot == self._slot or locks.is_locked(self._locks.process().value, 1 + slot)
        except OSError:  # no descriptor left, or closed, or detached
            return True

    def wait_for_readers(self, timeout: float) -> bool:
        """Wait until no process reads records; False if one still did after ``timeout`` seconds.

        To be called after the clear generation was made odd, and not by a thread that reads records.
        """
        if not self.segment.bounded:
            return True
        fd, pauses = self._locks.process().value, locks.Pauses(timeout)
        while locks.is_locked(fd, _READING):
            if not pauses.pause():
                return False
        return True

    def leave(self) -> None:
        """Give the slot back; claims that are still open become void."""
        self._slot = -1
        self._locks.close()

    def _after_fork_in_child(self) -> None:
        self._slot = -1
        self.thread_lock = threading.RLock()


class _ShortLock(locks.Held):
    """The segment's short lock, which is not waited for shortly after a time-out."""

    def __init__(self, participant: Participant, description: locks.Description) -> None:
        super().__init__(description, _SHORT_LOCK)
        self._participant = participant

    def take(self) -> bool:
        participant = self._participant
        patience = _LOCK_SECONDS if time.monotonic() >= participant._give_up_until else 0.0
        held = locks.lock(self.description.value, _SHORT_LOCK, patience)
        if not held:
            participant._give_up_until = time.monotonic() + _AFTER_TIMEOUT_SECONDS
        return held


class Index:
    """Maps samples to index words. Here each sample has its own; in a ring they share words in turn."""

    def __init__(self, segment: Segment) -> None:
        self._segment = segment
        self._words = segment.index

    def words(self, ids: Ids) -> Words:
        """The index words of these samples, as they are now."""
        return self._words[ids]

    def put(self, ids: Ids, words: Words | int) -> None:
        """Store the index words of these samples."""
        self._words[self.places(ids)] = words

    def places(self, ids: Ids) -> Ids:
        """Positions of these samples' words in the index; a record's checksum covers this position."""
        return ids

    def generations(self, ids: Ids) -> Words:
        """The generation of records written now, by which they differ from earlier ones in the same rows."""
        return np.full(len(ids), int(self._segment.live[Live.CLEAR_GENERATION]) & GENERATION_MASK)

    def refusals(self, ids: Ids) -> Words:
        """Index words that say "absent, and refused"; zeros where this is not distinguished from absent."""
        return np.zeros(len(ids), np.int64)

    def drawing(self, ids: Ids) -> npt.NDArray[np.bool_]:
        """Which of these samples are known to draw random numbers as they are read."""
        return _says_draws(self.words(ids))

    def missing(self, ids: Ids) -> npt.NDArray[np.bool_]:
        """Which of these samples are absent and may be stored."""
        words = self.words(ids)
        missing: npt.NDArray[np.bool_] = (words < PRESENT) & ~_says_draws(words)
        return missing

    def admit(self, ids: Ids) -> Ids:
        """Those of these samples that may be claimed now and together; called under the short lock."""
        return ids


def _are_absent(words: Words) -> npt.NDArray[np.bool_]:
    """Which of these index words say that nothing is there, and no process reads it; damaged ones do too."""
    absent: npt.NDArray[np.bool_] = (words < CLAIMED) & ~_says_draws(words)
    return absent


def _says_draws(words: Words) -> npt.NDArray[np.bool_]:
    """Which of these index words say that their samples draw; the lap in them is a ring's."""
    draws: npt.NDArray[np.bool_] = (words >= DRAWS) & (words <= (DRAWS | GENERATION_MASK + 1))
    return draws


class Claims:
    """Claims on the samples of one segment, by one process."""

    def __init__(self, participant: Participant, index: Index | None = None) -> None:
        self._participant = participant
        self._index = index or Index(participant.segment)

    def take(
        self,
        ids: Ids,
        most: int,
        *,
        threads: dict[int, int] | None = None,
        generation: int | None = None,
    ) -> Ids:
        """Claim up to ``most`` of those samples that are absent, or claimed by the dead; return which.

        Args:
            threads: for each place in the index that threads of this process have claimed, which of them was
                the last to do so: the word does not say. What is claimed is entered before it is. A claim of
                this process that is not in there as another thread's is a forgotten one, and void as well.
            generation: nothing is claimed in another clear generation: not even for a moment, in which a
                process to which the sample belongs would be refused.

        Returns an empty array also if every slot is held, or the short lock cannot be had.
        """
        slot = self._participant.slot
        if slot < 0:
            return ids[:0]
        mine, segment = self._word(slot), self._participant.segment
        with self._participant.short_lock() as held:
            # During a clear nothing may be claimed: a record published now could lie in a row that is given
            # to another sample after the clear.
            if not held or segment.is_being_cleared:
                return ids[:0]
            if generation not in (None, int(segment.live[Live.CLEAR_GENERATION])):
                return ids[:0]
            taken = self._free(ids, most, threads)
            if threads is not None:
                threads.update(dict.fromkeys(self._index.places(taken).tolist(), threading.get_ident()))
            self._index.put(taken, mine)
        return taken

    @property
    def word(self) -> int:
        """The index word of samples that this process has claimed; -1 if it has no slot."""
        slot = self._participant.slot
        return self._word(slot) if slot >= 0 else -1

    def own(self, ids: Ids) -> Ids:
        """Those of these samples that this process has claimed."""
        slot = self._participant.slot
        return ids[self._index.words(ids) == self._word(slot)] if slot >= 0 else ids[:0]

    def refuse(self, ids: Ids) -> None:
        """Mark as refused those of these samples that could be claimed."""
        if self._index.refusals(ids).any():
            self._note(ids, self._index.refusals)

    def mark_drawing(self, ids: Ids) -> None:
        """Mark as drawing those of these samples that this process has claimed or could claim."""
        mine = self.own(ids)
        self._index.put(mine, self._index.refusals(mine) | DRAWS)
        if len(mine) < len(ids):
            self._note(ids, lambda free: self._index.refusals(free) | DRAWS)

    def _note(self, ids: Ids, words: Callable[[Ids], Words]) -> None:
        """Store such words for those of these samples that could be claimed."""
        if self._participant.slot < 0:
            return
        with self._participant.short_lock() as held:
            if held and not self._participant.segment.is_being_cleared:
                free = self._free(ids, len(ids))
                self._index.put(free, words(free))

    def _free(self, ids: Ids, most: int, threads: dict[int, int] | None = None) -> Ids:
        """Up to ``most`` of those samples that are absent, claimed by the dead, or forgotten: see `take`."""
        ids = self._index.admit(ids)
        words = self._index.words(ids)
        free = _are_absent(words)
        claimed = words[(words >= CLAIMED) & (words < PRESENT)]
        if len(claimed) and int(free.sum()) < most:
            # One test of the lock for each claimant: all its claims have the same word.
            dead = [word for word in set(claimed.tolist()) if not self.is_open(word)]
            forgotten = np.zeros(len(ids), bool)
            if threads is not None:
                here, places = threading.get_ident(), self._index.places(ids).tolist()
                forgotten[:] = [threads.get(place, here) == here for place in places]
            # Between the words and these tests, a claimant may have published and left.
            words = self._index.words(ids)
            free = _are_absent(words) | np.isin(words, dead) | (forgotten & (words == self.word))
        return ids[free][:most]

    def take_one(self, sample: int, *, overwrite: bool) -> int | None:
        """Claim one sample that is absent, claimed by the dead, or, with ``overwrite``, present.

        No other thread of this process claims meanwhile, so a claim that this process holds is a forgotten
        one, and void.

        Returns:
            The index word that it had, or None if no claim can be had.
        """
        slot = self._participant.slot
        if slot < 0:
            return None
        mine = self._word(slot)
        with self._participant.short_lock() as held:
            if not held or self._participant.segment.is_being_cleared:
                return None
            words = self._participant.segment.index
            word = int(words[sample])
            void = CLAIMED <= word < PRESENT and (word == mine or not self.is_open(word))
            word = int(words[sample])  # as in _free: its claimant may have published, and left
            free = overwrite if word >= PRESENT else void or word < CLAIMED
            if free:
                words[sample] = mine
        return word if free else None

    def is_open(self, word: int) -> bool:
        """Whether this claim's claimant is alive, so that its sample is being read."""
        slot = (word - CLAIMED) >> SLOT_SHIFT
        if not 0 <= slot < SLOTS:
            return False
        incarnation = int(self._participant.segment.slots[slot, Slot.INCARNATION]) & INCARNATION_MASK
        return incarnation == word & INCARNATION_MASK and self._participant.is_alive(slot)

    def published(self, word: int) -> int:
        """How many records the claim's holder has published. A count that stays means the holder is stuck."""
        return int(self._participant.segment.slots[(word - CLAIMED) >> SLOT_SHIFT & (SLOTS - 1), Slot.STORED])

    def release(self, ids: Ids, tried: Sequence[int] = ()) -> None:
        """Release those of these claims that were not published; those in ``tried`` are marked as refused."""
        if len(ids):
            open_ = self.own(ids)
            words = self._index.refusals(open_)
            words[np.isin(open_, tried, invert=True)] = 0
            self._index.put(open_, words)

    def _word(self, slot: int) -> int:
        incarnation = int(self._participant.segment.slots[slot, Slot.INCARNATION]) & INCARNATION_MASK
        return CLAIMED | slot << SLOT_SHIFT | incarnation
