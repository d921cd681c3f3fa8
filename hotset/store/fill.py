"""Filling: absent samples are claimed, read from the source, written, and published.

::

    absent ── claim a few ── read them ── take room ── write their records ── publish their words
                                 │            │ none in memory: on the disk, if there is a spill
                                 │            └── none there, or it cannot be stored: only the caller gets it
                                 └── a generator moved: it is put back, and each sample is read again alone;
                                     samples that move one are never stored, and are read at each use

Samples are claimed in chunks that take about eight milliseconds to read, so that processes which walk the
same order share the work instead of waiting for each other, and so that samples which are cheap to read share
the cost of claiming and writing. A chunk holds at most two megabytes, as samples stay in memory until they
are written. A sample that another living process has claimed is waited for after all others; after a bounded
time this process reads it from the source itself.

Where the samples are large, and another core is there, a thread takes room, writes and publishes while this
one reads on: to allocate and write the pages of a picture takes a fifth of the time in which it is decoded.
The thread has no work left when a fill ends, so that no sample changes before it is written, and no claim is
open between two batches. A loader's workers have none, as there are as many of them as cores.
"""

from __future__ import annotations

import functools
import math
import os
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from hotset.store import format as fmt
from hotset.store import irregular_records as forms
from hotset.store.allocator import Allocator
from hotset.store.claims import Claims, Ids, Index, Participant
from hotset.store.format import PRESENT, Live, Slot
from hotset.store.leaves.leaf import SchemaMismatch
from hotset.store.leaves.schema import Schema
from hotset.store.records import Record, Records
from hotset.store.spill import Spill

if TYPE_CHECKING:  # it imports torch, which a process that only holds a store does not need
    from torch.utils.data._utils.worker import WorkerInfo

    from hotset.store.torch_threads import HelperThread

__all__ = ["IN_TURN", "DrawWatch", "Filler", "NoDrawWatch"]


class _InTurn:
    """What a reader returns for a sample that must be read in its turn, for each use, as if it drew."""


IN_TURN = _InTurn()


class Read(Protocol):
    """Reads a sample from the source, by its sample id.

    A reader that reads several samples faster than one by one has a method ``many`` as well, which returns an
    iterable of their values, in order. What it raises is taken for the sample whose turn it is. A reader that
    reads several at once says in ``at_once`` how many. It returns :data:`IN_TURN` for a sample that is never
    to be cached.
    """

    def __call__(self, sample: int, /) -> Any: ...


# Samples that fit a record, by sample id.
Flattened = list[tuple[int, forms.Flattened]]

_CHUNK_SECONDS = 8e-3
_LARGEST_CHUNK = 64
_CHUNK_BYTES = 2 << 20
_LARGE = 64 << 10  # bytes of a record that is worth a thread
_PATIENCE_SECONDS = 2.0
_MOST_MISMATCHES = 1 << 14


class DrawWatch(Protocol):
    """Detects whether reading samples draws random numbers; a cache would repeat one draw in all uses."""

    def begin(self) -> None:
        """Start watching: draws from now on count."""

    def drew(self, read: object = None, read_again: Callable[[], object] | None = None) -> bool:
        """Whether reading has drawn since :meth:`begin`; puts all generators back.

        ``read_again`` repeats the reading of what was ``read``, which tells its draws from those of another
        thread.
        """


class NoDrawWatch:
    """For sources that are known not to draw, or whose draws are to be cached."""

    def begin(self) -> None:
        pass

    def drew(self, read: object = None, read_again: Callable[[], object] | None = None) -> bool:
        return False


class Filler:
    """Fills one store on behalf of this process.

    Attributes:
        watch: detects samples that draw random numbers.
        reads: how many samples this process has read from the source for the store.
        drawing: how many further samples it has found to draw random numbers.
        mismatches: which samples cannot be stored, and why; at most the first 16,384.
        ahead: whether this process reads ahead of use; its readings are then not counted as misses.
    """

    def __init__(
        self,
        participant: Participant,
        index: Index,
        allocator: Allocator,
        schema: Schema,
        spill: Spill | None,
    ) -> None:
        self.watch: DrawWatch = NoDrawWatch()
        self.ahead = False
        self.mismatches: dict[int, str] = {}
        self.reads = self.drawing = 0
        self.claims = Claims(participant, index)
        self._participant = participant
        self._index = index
        self._allocator = allocator
        self._spill = spill
        self._schema = schema
        self._records = Records(participant.segment, schema)
        # For each place in the index that is being filled here, by which thread: a claim does not name it.
        self._claimed: dict[int, int] = {}
        self._at_once = 1
        self._seconds = 0.0  # mean time that a sample took this process to read, 0 until known
        self._bytes = schema.stride  # of the largest record of the last chunk
        self._in_flight = 0  # samples of a loader's batches that are in memory at a time
        # For each claimant that was waited for: how many records it had published, and since when.
        self._waits: dict[int, tuple[int, float]] = {}

    def expect_batches(self, samples: int) -> None:
        """Leave room in memory for a loader's batches, of so many samples each."""
        self._in_flight = max(self._in_flight, samples * _batches_in_flight())

    def fill(self, ids: Ids, read: Read, keep: bool) -> dict[int, Any]:
        """See :meth:`hotset.store.store.Store.fill`."""
        missing = _unique(ids[self._index.missing(ids)])
        if not len(missing):
            return {}
        self._at_once = getattr(read, "at_once", 1)
        before = self._own()  # by a fill that this one is within
        try:
            return self._fill(missing, read, keep)
        finally:
            # An interrupt may come between a claim and the block that releases it.
            self._release_all_but(before)

    def _own(self) -> set[int]:
        """The places in the index that this thread was the last to claim, of all threads of this process."""
        thread = threading.get_ident()
        # By a copy, as other threads enter theirs.
        return {place for place, owner in list(self._claimed.items()) if owner == thread}

    def _release_all_but(self, before: set[int]) -> None:
        """Release what this thread has claimed, but for these places."""
        mine = self._own() - before
        if len(self.claims.own(np.array(list(mine), np.int64))):
            with self._participant.short_lock():
                # Looked up again: another thread may have claimed one that this one had released.
                self.claims.release(np.array(list(self._own() - before), np.int64))
        for place in mine & self._own():
            self._claimed.pop(place, None)

    def _fill(self, missing: Ids, read: Read, keep: bool) -> dict[int, Any]:
        self.watch.begin()
        if not self._is_worth_a_thread(len(missing)):
            return self._fill_missing(missing, read, keep, None)
        from hotset.store.torch_threads import HelperThread

        behind: HelperThread[None] = HelperThread("hotset-store")
        try:
            return self._fill_missing(missing, read, keep, behind)
        finally:
            behind.finish()

    def _is_worth_a_thread(self, count: int) -> bool:
        """Whether to write so many samples in a thread, while this one reads."""
        large = self._seconds > 0.0 and self._bytes >= _LARGE and count > self._chunk
        return large and not self.ahead and _worker() is None and len(os.sched_getaffinity(0)) > 1

    def _fill_missing(
        self, missing: Ids, read: Read, keep: bool, behind: HelperThread[None] | None
    ) -> dict[int, Any]:
        uncached: dict[int, Any] = {}
        while len(missing):
            absent = missing[self._index.words(missing) < fmt.CLAIMED]
            taken = missing[:0]
            if not self.is_full:
                taken = self.claims.take(missing, self._chunk, threads=self._claimed)
            if not len(taken):
                # Other processes may have published some of them meanwhile.
                missing = missing[self._index.missing(missing)]
                taken = self._unclaimable(missing, absent)[: self._chunk]
                if len(taken):
                    if self.is_full:
                        self.claims.refuse(taken)
                    self._read_watched(taken, read, uncached)
            else:
                self._fill_claimed(taken, read, uncached, keep, behind)
            missing = _without(missing, taken)
        return uncached

    def insert(self, samples: dict[int, Any], generation: int | None) -> bool:
        """See :meth:`hotset.store.store.Store.insert`."""
        ids = np.fromiter(samples, np.int64)
        ids = ids[self._index.missing(ids)]
        if not len(ids) or self.is_full:
            return False
        stored: set[int] = set()
        before = self._own()
        try:
            # What this process has claimed and no thread fills, another machine has asked for, and sends now:
            # such a claim counts as forgotten.
            taken = self.claims.take(ids, len(ids), threads=self._claimed, generation=generation)
            if generation not in (None, int(self._participant.segment.live[Live.CLEAR_GENERATION])):
                return False  # and what was claimed stays of this generation: a clear waits for claims
            self._store({sample: samples[sample] for sample in taken.tolist()}, stored)
        finally:
            self._release_all_but(before)
        return bool(self._index.missing(_without(ids, taken)).any())

    def spill(self, sample: int, prepared: forms.Flattened) -> bool:
        """Write and publish one claimed sample's record on the disk; False without room: the claim is given
        back.
        """
        written = 0
        try:
            written = self._write_to_spill(np.array([sample], np.int64), [prepared])
        finally:
            if not written:
                self.claims.release(np.array([sample], np.int64))
        self._count(written, [prepared.tail_lines])
        return written > 0

    @property
    def is_full(self) -> bool:
        """Whether room was refused less than half a second ago, in memory and on the disk."""
        return self._allocator.is_full and (self._spill is None or self._spill.allocator.is_full)

    @property
    def _chunk(self) -> int:
        """How many samples to claim at once; one while it is unknown what they cost."""
        by_size = _CHUNK_BYTES // max(self._bytes, 1)
        if self._at_once > 1:
            return max(self._at_once, min(by_size, _LARGEST_CHUNK))
        if self._seconds <= 0.0:
            return 1
        return max(1, min(math.ceil(_CHUNK_SECONDS / self._seconds), by_size, _LARGEST_CHUNK))

    def _fill_claimed(
        self, taken: Ids, read: Read, uncached: dict[int, Any], keep: bool, behind: HelperThread[None] | None
    ) -> None:
        values: dict[int, Any] = {}
        try:
            self._read_watched(taken, read, values)
        finally:  # what was read before an exception is stored all the same
            if behind is None:
                self._store_claimed(taken, values, uncached, keep)
            else:
                while behind.pending > 1:
                    behind.next()
                behind.ask(functools.partial(self._store_claimed, taken, values, uncached, keep))

    def _store_claimed(
        self, taken: Ids, values: dict[int, Any], uncached: dict[int, Any], keep: bool
    ) -> None:
        """Store the values of claimed samples; enter those that the caller gets: all, or the rest."""
        stored: set[int] = set()
        try:
            self._store(values, stored)
        finally:
            uncached.update(values if keep else {s: v for s, v in values.items() if s not in stored})
            # Only what was not published: the place of what was may be claimed anew, by the same word.
            rest = _without(taken, np.fromiter(stored, np.int64))
            self.claims.release(rest, tried=list(values))

    def read(self, sample: int, read: Read) -> Any:
        """Read a sample for one use, without storing it; random draws are the caller's own."""
        self._participant.row[Slot.MISSES] += 1
        return self._read({}, [sample], read)[sample]

    def read_next(self, samples: Ids, read: Read, values: dict[int, Any]) -> Ids:
        """Read the next few of these samples, which this process may read alone; returns the rest.

        As many at once, and watched, as in a fill; samples that draw are marked, and have no value.
        :meth:`DrawWatch.begin` was called.
        """
        self._at_once = getattr(read, "at_once", 1)
        few = samples[: self._chunk]
        self._read_watched(few, read, values)
        return samples[len(few) :]

    def _read_watched(self, samples: Ids, read: Read, values: dict[int, Any]) -> None:
        """Enter the values of these samples, except those that draw, which the index marks as drawing.

        All generators are where they were when it returns or raises.
        """
        some = samples.tolist()
        found: dict[int, Any] = {}
        drawing: list[int] = []
        try:
            self._read(found, some, read)
            if not self.watch.drew(found, lambda: self._read({}, some, read)):
                drawing = [sample for sample, value in found.items() if value is IN_TURN]
                for sample in drawing:
                    del found[sample]
                return
            found.clear()
            for sample in some if len(some) > 1 else []:
                alone = self._read({}, [sample], read)
                drew = self.watch.drew(alone, functools.partial(self._read, {}, [sample], read))
                if drew or alone[sample] is IN_TURN:
                    drawing.append(sample)
                else:
                    found.update(alone)
            if not drawing:  # only one sample, or none drew a second time: any of them may be random
                found.clear()
                drawing = some
        except BaseException:
            if self.watch.drew():
                found.clear()
            raise
        finally:
            values.update(found)
            self.reads += len(found)
            self._participant.row[Slot.MISSES] += 0 if self.ahead else len(found)
            self.drawing += len(drawing)
            if drawing:
                self.claims.mark_drawing(np.array(drawing, np.int64))

    def _read(self, values: dict[int, Any], samples: list[int], read: Read) -> dict[int, Any]:
        """Enter the values of these samples, and measure the time that sizes the next chunk."""
        before, start = len(values), time.perf_counter_ns()
        many = getattr(read, "many", None)
        try:
            values.update(zip(samples, map(read, samples) if many is None else many(samples), strict=True))
        finally:
            spent = time.perf_counter_ns() - start
            each = spent / 1e9 / max(len(values) - before, 1)
            self._seconds = each if self._seconds <= 0.0 else 0.9 * self._seconds + 0.1 * each
            self._participant.row[Slot.FILL_NS] += spent
        return values

    def _store(self, values: dict[int, Any], stored: set[int]) -> None:
        """Write and publish these claimed samples as far as there is room; enters which were stored."""
        fitting = forms.prepare_all(self._schema, values, self._note_mismatch)
        tails = [prepared.tail_lines for _, prepared in fitting]
        if fitting:
            self._bytes = self._schema.stride + max(tails) * fmt.LINE
            in_flight = self._in_flight * self._bytes
            self._allocator.in_flight = max(self._allocator.in_flight, in_flight)
        while fitting and (written := self._write(fitting, tails)):
            stored.update(sample for sample, _ in fitting[:written])
            del fitting[:written], tails[:written]

    def _note_mismatch(self, sample: int, mismatch: SchemaMismatch) -> None:
        if len(self.mismatches) < _MOST_MISMATCHES:
            self.mismatches.setdefault(sample, str(mismatch))

    def _write(self, fitting: Flattened, tails: list[int]) -> int:
        """Write and publish as many of these, whose tails have so many lines, as room is given for at once.

        Returns:
            How many.
        """
        samples = np.array([sample for sample, _ in fitting], np.int64)
        written = self._write_to_memory(samples, fitting, tails)
        if not written:
            written = self._write_to_spill(samples, [one for _, one in fitting])
        self._count(written, tails)
        return written

    def _count(self, written: int, tails: list[int]) -> None:
        counters = self._participant.row
        counters[Slot.STORED] += written
        counters[Slot.STORED_BYTES] += written * self._schema.stride + sum(tails[:written]) * fmt.LINE

    def _write_to_spill(self, samples: Ids, prepared: list[forms.Flattened]) -> int:
        """Write and publish as many of these on the disk as there is room for; returns how many."""
        if self._spill is None:
            return 0
        words = self._spill.write(samples, self._index.generations(samples), prepared)
        self._index.put(samples[: len(words)], words)
        return len(words)

    def _write_to_memory(self, samples: Ids, fitting: Flattened, tails: list[int]) -> int:
        places = self._index.places(samples).tolist()
        with self._participant.thread_lock:
            given = self._allocator.reserve(places, tails)
            try:
                if self._spill is not None and self._spill.keeps_all and given:
                    # Before they are published: a clear waits for what is claimed.
                    some = samples[: len(given)]
                    prepared = [one for _, one in fitting[: len(given)]]
                    self._spill.write(some, self._index.generations(some), prepared)
                return self._publish(samples, places, fitting, given)
            finally:
                self._allocator.settle()

    def _publish(
        self, samples: Ids, places: list[int], fitting: Flattened, given: list[tuple[int, int]]
    ) -> int:
        """Write records to where room was given for them, and publish their words; returns how many."""
        # Large records are laid out in the mapping, whose pages another process may be giving back.
        with self._participant.reading:
            if self._participant.segment.is_being_cleared:
                return 0
            generations = self._index.generations(samples)
            records = [
                Record(place, generation, prepared, *where)
                for place, generation, (_, prepared), where in zip(
                    places, generations.tolist(), fitting, given, strict=False
                )
            ]
            try:
                words = self._records.write(records)
            except OSError as error:
                self._allocator.refuse(f"its file cannot be written ({error}); give it another place")
                words = []
            self._index.put(samples[: len(words)], np.array(words, np.int64))
        return len(words)

    def _unclaimable(self, missing: Ids, absent: Ids) -> Ids:
        """Of samples that cannot be claimed, those to be read without a claim; if none, after a short wait.

        Without room no process claims. Otherwise another process has claimed each of them, and this one waits
        until that one is stuck. Those that were ``absent`` before the attempt to claim them, and still are,
        cannot be claimed: the short lock cannot be had. Those that another process has given back since are
        claimed at the next attempt.
        """
        if self.is_full or self._participant.slot < 0:
            return missing
        admitted = self._index.admit(missing)
        if len(admitted) < len(missing):
            return _without(missing, admitted)  # the claims in their slots are of other entries
        words = self._index.words(missing)
        claimed = (words >= fmt.CLAIMED) & (words < PRESENT)
        if not claimed.any():
            return missing[(words < fmt.CLAIMED) & np.isin(missing, absent)]
        stuck = self._stuck(set(words[claimed].tolist()))
        if not stuck:
            time.sleep(2e-4)
        return missing[claimed & np.isin(words, stuck)]

    def _stuck(self, claims: set[int]) -> list[int]:
        """Those of these claims whose holders are stuck: they have published nothing for two seconds, or for
        five times what a sample takes.
        """
        now, patience = time.monotonic(), max(_PATIENCE_SECONDS, 5 * self._seconds)
        stuck = []
        for word in claims:
            published = self.claims.published(word)
            before, since = self._waits.get(word, (-1, now))
            if published != before:
                since = now
            self._waits[word] = (published, since)
            if now - since > patience:
                stuck.append(word)
        return stuck


def _batches_in_flight() -> int:
    """How many batches a loader's workers and their consumer may have in memory at a time.

    torch asks each worker for two. The one that a worker is making is there twice: its samples, and collated.
    The consumer has one while it gets the next.
    """
    worker = _worker()
    return 2 + (3 * worker.num_workers if worker is not None else 0)


def _worker() -> WorkerInfo | None:
    """The loader's worker that this process is; None in any other process."""
    from torch.utils.data import get_worker_info

    return get_worker_info()


def _without(ids: Ids, some: Ids) -> Ids:
    """These ids less some of them."""
    if len(ids) == len(some):
        return ids[:0]
    gone = set(some.tolist())  # for a batch, numpy's set operations take ten times as long as Python's
    return np.array([each for each in ids.tolist() if each not in gone], np.int64)


def _unique(ids: Ids) -> Ids:
    """The distinct ids, in the order of their first occurrence."""
    return np.array(list(dict.fromkeys(ids.tolist())), np.int64)
