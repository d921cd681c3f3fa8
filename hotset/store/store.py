"""The store: samples of one cache in one segment, written once, read by every process.

::

    fill(ids, read)   absent samples: claim, read from the source, write the record, publish its word
    read(ids)         present samples: one copy of their rows (and tails) into a recycled block, decoded there
    check()           every record's checksum, every index word, every extent

A reader takes no lock. It loads the index words of its whole batch, copies the rows they name, and then reads
the clear generation: only a clear ever gives rows to other samples, it counts the generation up before and
after, and a reader that sees it odd, or changed, discards its copy. In :mod:`hotset.store.ring` rows are used
again all the time, so the reader also loads the words a second time. What a reader returns is always a copy:
a user may write to it without changing the cache.

A store has one or two *tiers*::

    first     in memory, always        its index is in charge; its metadata say what the samples are (schema),
                                       whether it is a ring, and where the second tier is (spill)
    second    on a disk, if wanted     for records that memory has no room for (hotset.store.spill)

A full store, a dead claimant or a damaged record is not an error: such samples are not in the store, and come
from the source.

**Clearing**: every sample forgotten at once, in all processes. Nothing else gives rows to other samples.

A live word, the *clear generation*, is even while the store may be read, and odd while it is being cleared::

    2 ──> short lock, and no living claim ──> 3 ──> words, extents, counters, pages ──> 4
              else the clear is tried again    └── the process died: the next process that fills ends it

*Readers* take no lock. They read the clear generation before they begin and after they have copied: if it is
odd, or has changed, the copy may hold other samples. *Writers* must be done: a record that is published after
its row was given to another sample would lie in that sample's row. So a clear waits until no living process
has an open claim; claims are made under the short lock, so none is opened meanwhile.

A store that was *invalidated*, because its content is wrong or its session is gone, is not read either.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from hotset._warnings import warn
from hotset.errors import SegmentError
from hotset.store import format as fmt
from hotset.store.allocator import Allocator, distrust_allocator
from hotset.store.blocks import Blocks
from hotset.store.claims import Ids, Index, Participant
from hotset.store.fill import Filler, Read
from hotset.store.format import CLAIMED, DESTROYED, PRESENT, RECORD_HEADER, ROW_MASK, Geometry, Live, Slot
from hotset.store.fsck import check_segment, check_tiers
from hotset.store.leaves.schema import Schema
from hotset.store.locks import Pauses
from hotset.store.record_batch import RecordBatch, VariableTails
from hotset.store.segment import Address, Segment, Words, require_index_room
from hotset.store.spill import Spill, SpillTo, StagedBatch, attach_spill
from hotset.store.verification import Verification

__all__ = ["Store"]

Bytes = npt.NDArray[np.uint8]
AnyStore = TypeVar("AnyStore", bound="Store")

# Live words that a clear sets to zero.
_CLEARED = [
    Live.ROWS_NEXT,
    Live.LINES_NEXT,
    Live.INVALIDATED,
    Live.FULL,
    Live.WARNED,
    Live.WARNED_DRAWS,
    Live.KEYS,
    Live.FUNCTIONS,
    Live.KEYS_FREED,
    Live.STREAM_PARTS,
    Live.STREAM_DIFFERS,
    Live.STREAM_ALONE,
]
_READERS_SECONDS = 2.0


class Store:
    """Samples of one dataset in one segment, as this process sees them.

    Attributes:
        segment: the mapped file.
        schema: the tree that its samples share.
        index: which index word is whose.
        filler: reads absent samples and stores them; counts them.
        allocator: of their rows and lines in memory.
        verification: verifies records that may be damaged.
        spill: the second tier, on a disk; None if there is none.
        path: of the segment's file; None if it has no name.
    """

    _index_type: type[Index] = Index
    _allocator_type: type[Allocator] = Allocator
    _is_ring = False  # entered in the metadata, for processes that attach or check
    _is_keyed = False  # entered in the geometry

    def __init__(self, segment: Segment, schema: Schema, spill: Spill | None = None) -> None:
        self.segment = segment
        self.schema = schema
        self.spill = spill
        self.path: str | None = None
        geometry = segment.geometry
        self.participant = Participant(segment)
        self.index = self._index_type(segment)
        self.allocator = self._allocator_type(self.participant)
        self.rows = _view(segment.buffer, geometry.rows_at, geometry.rows, geometry.stride)
        self.lines = _view(segment.buffer, geometry.lines_at, geometry.lines, fmt.LINE)
        width, at = schema.head.itemsize, geometry.rows_at + RECORD_HEADER
        rows = geometry.rows
        self._heads: Bytes = np.ndarray(
            (rows,), f"V{width}", segment.buffer if rows else None, at if rows else 0, (geometry.stride,)
        )
        self.filler = Filler(self.participant, self.index, self.allocator, schema, spill)
        self.verification = Verification(self.participant, self.index, schema, spill)
        self._block = Blocks().array
        self._warned_of_forms = False
        if not segment.trusted:
            distrust_allocator(self.participant)
            if spill is not None:
                distrust_allocator(spill.participant)

    @classmethod
    def create(
        cls: type[AnyStore],
        schema: Schema,
        samples: int,
        limit: int,
        *,
        about: dict[str, Any],
        path: str | None = None,
        spill: SpillTo | None = None,
    ) -> AnyStore:
        """Make an empty store.

        Args:
            samples: length of the dataset, at least 1.
            limit: bytes that rows and tails may take.
            about: what the metadata says besides the schema (name, fingerprint); JSON's types only.
            path: a new file; a memfd if None.
            spill: where records go that memory has no room for; None: nowhere.

        Raises:
            OSError: a file cannot be made, or its index alone takes more memory than there is.
        """
        rows, lines = cls._address_space(schema, samples, limit)
        about = {**about, "schema": schema.to_json(), **({"ring": True} if cls._is_ring else {})}
        # The second tier first, as the metadata of the first name it.
        second = spill.create(schema, samples, about) if spill is not None else None
        try:
            if spill is not None and second is not None:
                about["spill"] = spill.said(second)
            metadata = json.dumps(about).encode()
            geometry = Geometry(samples, schema.stride, rows, lines, len(metadata), cls._is_keyed)
            require_index_room(geometry)
            store = cls(Segment.create(geometry, metadata, path=path, limit=limit), schema, second)
        except BaseException:
            if spill is not None and second is not None:
                spill.remove(second)
            raise
        store.path = path
        return store

    @staticmethod
    def _address_space(schema: Schema, samples: int, limit: int) -> tuple[int, int]:
        """How many rows and lines there may ever be."""
        # A row for every sample that the limit has room for, and some for what killed processes lose.
        rows = min(samples, limit // schema.stride) + fmt.SLOTS
        return rows, max(limit // fmt.LINE, 1)

    @classmethod
    def attach(cls: type[AnyStore], where: str | Address) -> AnyStore:
        """Attach to an existing store.

        Raises:
            SegmentError: it is gone, damaged, or not such a store: the schema must describe the rows, and the
                second tier must be of the same samples.
        """
        segment, second = Segment.attach(where), None
        try:
            schema = Schema.from_json(segment.metadata.get("schema"))
            geometry = segment.geometry
            if schema.stride != geometry.stride or (schema.has_tail and not geometry.lines):
                raise SegmentError("the segment's schema does not describe its rows; `hotset gc` frees it.")
            if segment.metadata.get("ring", False) is not cls._is_ring:
                raise SegmentError(
                    "either the existing cache or the requested one has a window, not both; make them agree."
                )
            second = attach_spill(where, segment, schema)
            store = cls(segment, schema, second)
        except BaseException:
            if second is not None:
                second.close()
            segment.close()
            raise
        store.path = where if isinstance(where, str) else None
        return store

    def __len__(self) -> int:
        return self.segment.geometry.samples

    @property
    def address(self) -> str | Address:
        """Where other processes attach to it."""
        return self.path or self.segment.address

    @property
    def why_full(self) -> str | None:
        """Why no more samples can be stored; None if nothing was refused so far."""
        return self.allocator.why_full if self.spill is None else self.spill.allocator.why_full

    def has_room(self) -> bool:
        """Whether this process can store one more record, in memory or on the disk."""
        return self.allocator.has_room() or (self.spill is not None and self.spill.allocator.has_room())

    # ---- filling -------------------------------------------------------------------------------------

    def fill(self, ids: Ids, read: Read, *, keep: bool = True) -> dict[int, Any]:
        """Bring these samples into the store as far as there is room for them.

        Samples that another living process is reading are waited for, boundedly, after all others.

        Args:
            ids: sample ids, each in ``range(len(self))``.
            read: the source and its prefix.
            keep: return stored samples too. A caller that copies the batch from the store afterwards passes
                False: each sample is then freed once it is stored, and the next is read into the same, warm
                memory.

        Returns:
            The samples that this call read, by id; without ``keep`` only those that are not stored.

        Raises:
            Whatever ``read`` raises, untouched.
        """
        self.finish_clear()
        return self.filler.fill(ids, read, keep)

    def insert(self, samples: dict[int, Any], generation: int | None = None) -> bool:
        """Store samples that came from another machine, or from a stream, where there is room and no process
        is reading them.

        Args:
            samples: by sample id; as the source and its prefix give them, or packed: see
                :func:`hotset.store.irregular_records.prepare`.
            generation: the clear generation for which these ids hold; None for any.

        Returns:
            Whether some could not be claimed, as another process held them: it stores them, or gives them
            back, so that the same call stores them a moment later.
        """
        return self.clear_generation() is not None and self.filler.insert(samples, generation)

    # ---- reading -------------------------------------------------------------------------------------

    def holds(self, ids: Ids | None = None) -> bool:
        """Whether all of these samples (of all samples, if None) are in the store now."""
        words = self.segment.used_index if ids is None else self.words(ids)
        return self.clear_generation() is not None and len(words) > 0 and int(words.min()) >= PRESENT

    def present(self, ids: Ids) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """Which of these samples are in the store, and sound."""
        words = self.words(ids)
        here = (words >= PRESENT) & (self.clear_generation() is not None)
        if self.verification.verified is not None:
            places = self.index.places(ids)
            for i in np.flatnonzero(here):
                here[i] = self.verification.is_sound(int(places[i]), int(words[i]))
        return here

    def in_common_form(self, ids: Ids) -> Ids:
        """Those of these samples that are in the store, sound, and in the form that most have."""
        common: Ids = ids[self.present(ids) & (self.words(ids) & fmt.OWN_FORM == 0)]
        return common

    def read(self, ids: Ids) -> list[Any] | None:
        """Return copies of these samples; None if one is not present, and sound.

        The copies lie in one recycled block, which is free again when the last of them is dropped.
        """
        copied = self._copied(ids)
        if copied is None:
            return None
        try:
            return copied.read(self.schema)
        except SegmentError as error:
            self._warn_unreadable(error)
            return None

    def read_in_turn(self, ids: Ids) -> Iterator[Any] | None:
        """As :meth:`read`, but large samples are built as they are taken: see :meth:`RecordBatch.in_turn`.

        It ends early if a sample's own form cannot be read here.
        """
        copied = self._copied(ids)
        return self._in_turn(copied) if copied is not None else None

    def _in_turn(self, copied: RecordBatch) -> Iterator[Any]:
        try:
            yield from copied.in_turn(self.schema)
        except SegmentError as error:
            self._warn_unreadable(error)

    def _copied(self, ids: Ids) -> RecordBatch | None:
        if self.verification.verified is not None and not self.present(ids).all():
            return None
        clear_generation = self.clear_generation()
        words = self.words(ids)
        if clear_generation is None or int(np.minimum.reduce(words, initial=PRESENT)) < PRESENT:
            return None
        return self.copy_out(ids, words, clear_generation)

    def copy_out(
        self, ids: Ids, words: Words, clear_generation: int, memory: Bytes | None = None
    ) -> RecordBatch | None:
        """Copy records, from both tiers; None if one has changed since its word was loaded, or is damaged.

        Args:
            words: their index words, of present samples.
            clear_generation: from before the words were loaded.
            memory: to copy to, where no record is on the disk; one-dimensional. The batch then is of as many
                of the first records as there is room for. None: a recycled block, with room for all.
        """
        if not self.verification.rows_exist(ids, words):
            return None
        if self.on_disk(words):
            copied = self._copy_staged(ids, words, memory)
        else:
            with self.participant.reading:
                copied = self._copy_mapped(ids, words, clear_generation, memory)
        return copied if self.unchanged(words, clear_generation) else None

    def _copy_staged(self, ids: Ids, words: Words, memory: Bytes | None) -> RecordBatch | None:
        """As :meth:`copy_out`, of records that are on the disk, or some of which are."""
        assert self.spill is not None
        self.spill.prefetch(words)
        staged = self.stage(ids, words)
        if not self.load(staged):
            return None
        records = staged.records
        if memory is None:
            return records
        return records.first(RecordBatch.fitting(len(memory), len(ids), self.schema.stride, records.lines))

    def _copy_mapped(
        self, ids: Ids, words: Words, clear_generation: int, memory: Bytes | None
    ) -> RecordBatch | None:
        """As :meth:`copy_out`, of records that are all in the first tier."""
        found = self.locate(ids, words, clear_generation)
        if found is None:
            return None
        rows, tails = found
        lines = tails.counts if tails is not None else None
        if memory is not None:
            fits = RecordBatch.fitting(len(memory), len(ids), self.schema.stride, lines)
            ids, rows = ids[:fits], rows[:fits]
            lines = lines[:fits] if lines is not None else None
        allocate = self._block if memory is None else lambda size: memory
        copied = RecordBatch.new(allocate, ids, self.schema.stride, lines)
        # Whole rows are contiguous, so numpy copies them as fast as torch does, and in this thread alone:
        # torch would wake its team, whose spinning beside a busy process takes 400 times as long.
        np.take(self.rows, rows, axis=0, out=copied.rows, mode="clip")
        if tails is not None and len(copied.tails):
            np.take(self.lines, tails.lines()[: len(copied.tails)], axis=0, out=copied.tails, mode="clip")
        return copied

    def locate(
        self, ids: Ids, words: Words, clear_generation: int
    ) -> tuple[Words, VariableTails | None] | None:
        """Find the rows and tails of these records, in memory; None if one has changed, or is damaged.

        The first half of a double-checked copy, :meth:`copy_out`'s and the gather's: the caller then copies
        the bytes, and compares the words once more (:meth:`unchanged`). It holds ``participant.reading``
        while it looks at records, so that no page is given back meanwhile.

        Args:
            ids: of the samples.
            words: their index words, of present samples, whose rows exist (:meth:`Verification.rows_exist`).
            clear_generation: from before the words were loaded.

        Returns:
            The row of each record, and the tails; None in place of these if no record can have one.
        """
        if not self.unchanged(words, clear_generation):
            return None
        rows = words & ROW_MASK
        if not self.have_tails(words):
            return rows, None
        tails = self.tails(rows)
        # The tails' places may be half of one record and half of another.
        if not self.unchanged(words, clear_generation) or not self.verification.tails_fit(ids, words, tails):
            return None
        return rows, tails

    def on_disk(self, words: Words) -> bool:
        """Whether any of these words, of present samples, names a record on the disk."""
        return self.spill is not None and bool((words & fmt.ON_DISK).any())

    def have_tails(self, words: Words) -> bool:
        """Whether any of the records that these words, of present samples, name may have a tail."""
        return self.schema.has_tail or not self.are_common(words)

    def are_common(self, words: Words) -> bool:
        """Whether the records that these words, of present samples, name all have the common form."""
        return not int(np.bitwise_or.reduce(words)) & fmt.OWN_FORM

    def stage(self, ids: Ids, words: Words) -> StagedBatch:
        """Prepare to copy these samples' records from both tiers: see :class:`StagedBatch`."""
        assert self.spill is not None
        return StagedBatch(self.spill, self.rows, self.lines, ids, words, self._block)

    def load(self, staged: StagedBatch) -> bool:
        """Copy staged records; False if one is damaged. A damaged record is forgotten."""
        with self.participant.reading:
            if self.clear_generation() is None:
                return False
            sound = staged.load(self.schema.head if self.have_tails(staged.words) else None)
        self.verification.forget(staged)
        return sound

    def _warn_unreadable(self, error: SegmentError) -> None:
        """Warn once that a record's own form cannot be read here."""
        if not self._warned_of_forms:
            warn(f"{error} Such samples are read from the source.")
        self._warned_of_forms = True

    def prefetch(self, ids: Ids) -> None:
        """Prefetch these samples: the kernel begins to read those of them that are on the disk."""
        if self.spill is not None:
            words = self.words(ids)
            self.spill.prefetch(words[words >= PRESENT])

    def words(self, ids: Ids) -> Words:
        """The index words of these samples: ``PRESENT`` or more where a record is."""
        return self.index.words(ids)

    def refuse(self, ids: Ids) -> None:
        """Note that reading these samples failed. Only a ring uses this: its window passes over them."""

    def unchanged(self, words: Words, clear_generation: int) -> bool:
        """Whether the records that these words, of present samples, name have stayed the same.

        Called after the records were copied. The clear generation is from before the words were loaded: in a
        store that is not a ring, only a clear changes records.
        """
        return self.clear_generation() == clear_generation

    def clear_generation(self) -> int | None:
        """The clear generation; None during a clear, and once the store is invalidated."""
        return self.segment.clear_generation

    @property
    def invalidated(self) -> bool:
        """Whether the store is no longer read, because its content is wrong or its session is gone."""
        return bool(self.segment.live[Live.INVALIDATED])

    def invalidate(self) -> bool:
        """Stop serving this store. Returns True to the first caller."""
        with self.participant.short_lock():
            if self.invalidated:
                return False  # perhaps as its session was destroyed
            self.segment.live[Live.INVALIDATED] = 1
            if self.spill is not None:
                self.spill.segment.live[Live.INVALIDATED] = 1  # it may outlive the machine's memory
        return True

    def tails(self, rows: Words) -> VariableTails:
        """Where the tails of these rows lie, and where each goes when they are gathered."""
        return VariableTails(self._heads[rows].view(self.schema.head))

    @property
    def stored_bytes(self) -> int:
        """Bytes of all records that all processes have stored."""
        return int(self.segment.slots[:, Slot.STORED_BYTES].sum())

    def count_hits(self, count: int) -> None:
        """Count samples that this process served from the store without reading the source."""
        self.participant.row[Slot.HITS] += count

    # ---- maintenance ---------------------------------------------------------------------------------

    def check(self) -> list[str]:
        """Verify every record and every index word; an empty list if all is well."""
        problems = check_segment(self.segment)
        if self.spill is None:
            return problems
        second = self.spill.segment
        return [*problems, *check_segment(second), *check_tiers(self.segment, second)]

    def clear(
        self, timeout: float = 5.0, *, generation: int | None = None, clears: int | None = None
    ) -> bool:
        """Forget every sample, in all processes; False if some process did not finish writing in time.

        It is also False once the store's session was destroyed. With a ``generation`` nothing is forgotten in
        another clear generation: another process has cleared the store since, and may have filled it again.
        With ``clears`` it is one of a cluster, which has cleared the cache so often with this one.
        """
        pauses, live = Pauses(timeout), self.segment.live
        while True:
            with self.participant.short_lock() as held:
                if live[Live.INVALIDATED] == DESTROYED:
                    return False
                if held and generation not in (None, int(live[Live.CLEAR_GENERATION])):
                    return True
                words = self.segment.used_index
                claimed = words[(words >= CLAIMED) & (words < PRESENT)]
                if held and not any(self.filler.claims.is_open(word) for word in set(claimed.tolist())):
                    self._forget_everything(clears)
                    return True
            if not pauses.pause():
                return False

    def finish_clear(self) -> None:
        """Finish a clear whose process died during it, if there is one."""
        live = self.segment.live
        if self.clear_generation() is not None or self.invalidated:
            return
        with self.participant.short_lock() as held:
            # A store that was invalidated meanwhile stays so.
            if held and live[Live.CLEAR_GENERATION] % 2 and not live[Live.INVALIDATED]:
                self._forget_everything()

    def _forget_everything(self, clears: int | None = None) -> None:
        """Empty the segment; the caller holds the short lock."""
        segment, geometry = self.segment, self.segment.geometry
        segment.live[Live.CLEAR_GENERATION] |= 1
        segment.used_index[:] = 0
        segment.slots[:, Slot.ROW_NEXT : Slot.LINE_END + 1] = 0
        segment.slots[:, Slot.STORED_BYTES] = 0
        if self.spill is not None:
            self.spill.clear()
        segment.slots[:, Slot.PART_KEPT : Slot.PART_PASS + 1] = 0
        segment.live[_CLEARED] = 0
        if clears is not None:
            segment.live[Live.CLEARS] = max(int(segment.live[Live.CLEARS]), clears)
        # If a reader does not end, the pages are written again as they are.
        if self.participant.wait_for_readers(_READERS_SECONDS):
            segment.discard(geometry.rows_at, geometry.size - geometry.rows_at)
        if self.allocator.allowance is not None:
            self.allocator.allowance.take(0)
        self.allocator.reopen()
        segment.live[Live.CLEAR_GENERATION] += 1

    def close(self) -> None:
        """Detach. What was read stays valid: it is not part of the segment."""
        if self.spill is not None:
            self.spill.close()
        self.participant.leave()
        self.segment.close()


def _view(memory: Any, offset: int, rows: int, width: int) -> Bytes:
    """Rows of so many bytes that lie side by side in memory; without rows, of none of it."""
    return np.ndarray((rows, width), np.uint8, memory if rows else None, offset if rows else 0)
