"""Slots: each sample's record has a fixed row, and may be overwritten.

In other stores a record goes into the next free row and is immutable. Here row ``i`` belongs to sample ``i``:
the rows are one strided array, and a sample that is set again overwrites its record. Format, claims and room
are the store's; but here a reader may read a row while a writer overwrites it.

::

                      put                        publish
    absent ─────────────────────────> claimed ─────────────> present, generation g + 1
       ^                                 │ ^                    │
       └── the writer failed, or died ───┘ └── put, overwrite ──┘

Each record of a row has a higher generation than the one before, and the index word holds it. So a reader
loads the word, copies the record, and loads the word again (a seqlock whose counter is the word): the same
word means that the copy is whole. Another word means that the sample was overwritten meanwhile, and the
reader starts again. It waits, for a bounded time, for a living writer that replaces a record, because the
sample was present before and will be after; a sample whose first record is being written is absent.

A writer that is killed leaves a claim whose holder is dead: the slot is empty, and the next writer takes it.
The old record is lost too; keeping it would cost every slot a second row.

A tail (of samples whose shape varies) overwrites the old one if it fits into the run of lines that the row
owns, and goes to a new run otherwise; the fourth word of the record's header holds the length of the run. A
run that became too short, or that a killed writer had taken, is free again after a clear.
"""

from __future__ import annotations

import json
import struct
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hotset.store import format as fmt
from hotset.store.format import CLAIMED, PRESENT, RECORD, RECORD_HEADER, Geometry, Live, Slot
from hotset.store.fsck import content_problem
from hotset.store.leaves.schema import Prepared, Schema
from hotset.store.locks import Pauses
from hotset.store.records import lay_out
from hotset.store.segment import Address, Segment, require_index_room
from hotset.store.store import Store
from hotset.store.verification import FULL_CHECK

__all__ = ["Slots"]

Bytes = npt.NDArray[np.uint8]

_PATIENCE_SECONDS = 2.0
_SCRATCH = 1 << 20
_ALIGN = 64
_LINES = struct.Struct("<I")
_OWNED = struct.Struct("<IQ")  # lines of the run, and the tail word


class _Run(NamedTuple):
    """The run of lines that a row owns for its tail."""

    first: int
    lines: int


class Slots:
    """Samples in rows of their own in one segment, as this process sees them.

    Attributes:
        store: the segment's room and maintenance (``check``, ``clear``).
        segment: the mapped file.
    """

    def __init__(self, store: Store) -> None:
        self.store = store
        store.allocator.knob = "`size_limit_gib=`"
        self.segment = store.segment
        self._claims = store.filler.claims
        self._index = store.segment.index
        self._tail_at = -(-store.schema.stride // _ALIGN) * _ALIGN
        self._scratch: Bytes | None = None

    @classmethod
    def create(cls, schema: Schema, samples: int, lines: int, *, about: dict[str, Any]) -> Slots:
        """Make empty slots in a memfd; nothing but its header is touched.

        Args:
            samples: number of slots, at least 1.
            lines: number of 256-byte lines for tails, at least 1 if the schema has them, else 0.
            about: what the metadata says besides the schema; JSON's types only.

        Raises:
            OSError: the file cannot be made, or its index alone takes more memory than there is.
        """
        metadata = json.dumps({**about, "schema": schema.to_json()}).encode()
        geometry = Geometry(samples, schema.stride, samples, lines, len(metadata))
        require_index_room(geometry)
        limit = geometry.taken(samples, lines)
        return cls(Store(Segment.create(geometry, metadata, limit=limit), schema))

    @classmethod
    def attach(cls, where: Address) -> Slots:
        """Attach to slots that another process has.

        Raises:
            SegmentError: see :meth:`Segment.attach`.
        """
        return cls(Store.attach(where))

    def word(self, sample: int) -> int:
        """The sample's index word, which differs between one record of the sample and the next."""
        return int(self._index[sample])

    def present(self) -> npt.NDArray[np.bool_]:
        """Which slots are set."""
        here: npt.NDArray[np.bool_] = (self._index >= PRESENT) & (self.store.clear_generation() is not None)
        return here

    # ---- reading -------------------------------------------------------------------------------------

    def get(self, sample: int) -> tuple[Any, int] | None:
        """Return a copy of a sample and the index word of its record; None if it is not set."""
        pauses = Pauses(_PATIENCE_SECONDS)
        while True:
            clear_generation, word = self.store.clear_generation(), int(self._index[sample])
            if clear_generation is None or word < CLAIMED:
                return None
            if word >= PRESENT:
                copy = self._copy(sample, word, clear_generation)
                if copy is not None:
                    if FULL_CHECK and not self._sound(sample, word, copy):
                        return None
                    return self.store.schema.read(copy, 0, [self._tail_at])[0], word
                if pauses.are_over:
                    return None
            elif self._is_being_replaced(sample, word):
                if not pauses.pause():
                    return None
            elif self._index[sample] == word:  # else its claimant has published meanwhile, and left
                return None

    def _copy(self, sample: int, word: int, clear_generation: int) -> Bytes | None:
        """A copy of the sample's row and, at ``_tail_at``, its tail; None if it changed meanwhile."""
        store, stride, tail_at = self.store, self.store.schema.stride, self._tail_at
        row = store.rows[sample]
        first = count = 0
        if store.schema.has_tail:
            (tail,) = fmt.TAIL.unpack_from(row, RECORD_HEADER)
            if self._index[sample] != word:
                return None  # the tail word may be half of one and half of another
            first, count = fmt.split_tail(tail)
        # Fresh memory: a reader asks for one sample at a time, and recycled blocks were not faster for that.
        copy = np.empty(tail_at + count * fmt.LINE, np.uint8)
        copy[:stride] = row
        if count:
            copy[tail_at : tail_at + count * fmt.LINE] = store.lines[first : first + count].reshape(-1)
        return copy if self._index[sample] == word and store.clear_generation() == clear_generation else None

    def _sound(self, sample: int, word: int, copy: Bytes) -> bool:
        """Whether a copied record is what its writer wrote (for processors that reorder stores)."""
        row, tail = copy[: self.store.schema.stride].data, copy[self._tail_at :].data
        return content_problem(sample, word, row, tail if len(tail) else None) is None

    def _is_being_replaced(self, sample: int, word: int) -> bool:
        """Whether the claimed sample had a record before, and its claimant is alive."""
        return (
            self.store.participant.slot >= 0 and self._generation(sample) > 0 and self._claims.is_open(word)
        )

    def _generation(self, sample: int) -> int:
        """Generation in a row's record header, 0 if nothing was ever written there, or it cannot be read.

        Not read through the mapping: touching a row that was never written would allocate its memory.
        """
        at = self.store.segment.geometry.rows_at + sample * self.store.schema.stride
        header = bytearray(RECORD_HEADER)
        return int(RECORD.unpack(header)[1]) if self.store.segment.read(at, memoryview(header)) else 0

    # ---- writing -------------------------------------------------------------------------------------

    def put(self, sample: int, prepared: Prepared, *, overwrite: bool) -> int:
        """Set a sample; returns the index word of its record, or 0 if it was not set.

        It is not set if it is set already (without ``overwrite``), if another living process is setting it
        (with ``overwrite``, this one waits for a bounded time), or if there is no room. An old record whose
        replacement has no room is forgotten: it is out of date.
        """
        self.store.finish_clear()
        if self.store.allocator.is_full and int(self._index[sample]) < PRESENT:
            return 0
        # One thread at a time: a claim that this process holds then was left by an interrupt, and is void.
        with self.store.participant.thread_lock:
            return self._put(sample, prepared, overwrite)

    def _put(self, sample: int, prepared: Prepared, overwrite: bool) -> int:
        published = 0
        try:
            before = self._claim(sample, overwrite)
            if before is None:
                return 0
            run = self._room_for(sample, prepared, before)
            if run is not None:
                word = self._write(sample, prepared, run)
                self._index[sample] = word
                published = word
                counters = self.store.participant.row
                counters[Slot.STORED] += 1
                if before < PRESENT:
                    counters[Slot.STORED_BYTES] += self.store.schema.stride + prepared.tail_lines * fmt.LINE
        except OSError as error:
            self.store.allocator.refuse(
                f"its memory cannot be written ({error.strerror or error}); free some"
            )
        finally:
            if not published:
                self._claims.release(np.array([sample]))
        return published

    def _claim(self, sample: int, overwrite: bool) -> int | None:
        """Claim the sample; returns the word that it had, or None if another process keeps it too long."""
        pauses = Pauses(_PATIENCE_SECONDS)
        while True:
            before = self._claims.take_one(sample, overwrite=overwrite)
            if before is not None or not overwrite or not pauses.pause():
                return before

    def _room_for(self, sample: int, prepared: Prepared, before: int) -> _Run | None:
        """The run of lines for the record's tail; None if there is no room."""
        allocator, needed = self.store.allocator, prepared.tail_lines
        if before < PRESENT and not allocator.place(sample):
            return None
        if before >= PRESENT and self.store.schema.has_tail:  # a whole record, whose header is valid
            lines, tail = _OWNED.unpack_from(self.store.rows[sample], RECORD.size - 4)
            if needed <= lines:
                return _Run(fmt.split_tail(tail)[0], lines)
        line = allocator.take_lines(needed) if needed else 0
        return _Run(line, needed) if line >= 0 else None

    def _write(self, sample: int, prepared: Prepared, run: _Run) -> int:
        """Write the record; returns the index word that publishes it."""
        segment, schema = self.store.segment, self.store.schema
        geometry, stride = segment.geometry, schema.stride
        # After a clear rows begin at zero again: the clear generation makes their words differ from those
        # before it.
        generation = fmt.next_generation(self._generation(sample), int(segment.live[Live.CLEAR_GENERATION]))
        size = stride + prepared.tail_lines * fmt.LINE
        buffer = self._scratch_of(size)
        lay_out(schema, buffer, 0, stride, prepared, sample, generation, run.first)
        _LINES.pack_into(buffer, RECORD.size - 4, run.lines)
        segment.write(buffer[:stride], geometry.rows_at + sample * stride)
        if size > stride:
            segment.write(buffer[stride:size], geometry.lines_at + run.first * fmt.LINE)
        return PRESENT | generation << fmt.GENERATION_SHIFT | sample

    def _scratch_of(self, size: int) -> memoryview:
        """Memory to lay a record out in, zeros between its leaves; the caller excludes other threads."""
        if size > _SCRATCH:
            return np.zeros(size, np.uint8).data
        if self._scratch is None:
            self._scratch = np.zeros(_SCRATCH, np.uint8)
        if self.store.schema.has_tail:
            self._scratch[: self.store.schema.stride] = 0
        return self._scratch.data
