"""The second tier: records on a disk, for which memory had no room.

A spill is a segment like any other, with its own index and allocator; the store's index says of each sample
in which of the two its record is. The spill's index names its own records, so that it can be checked by
itself, and a session that outlives a reboot is rebuilt from it.

Nothing is read through the mapping: one page fault at a time is slow, and a failing disk would be SIGBUS.
The kernel gets the places of all records of a batch at once, reads them in parallel (and, as the order of
samples is known, long before they are needed: :meth:`Spill.prefetch`), and they are copied from its page
cache. The kernel knows better than a cache of hotset's how much memory is free for that.

A batch that has records in the second tier is *staged* as a whole
(:class:`hotset.store.record_batch.RecordBatch`). A record is verified at each read, in its copy,
so that what was verified is what is used; a damaged record is forgotten, and read from the source again.
(Verifying it once in each process was the alternative: a page that was dropped from memory comes from the
disk again, and only the kernel can tell, page by page, before each read.)
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from hotset._warnings import warn
from hotset.errors import SegmentError
from hotset.store import format as fmt
from hotset.store.allocator import Allocator
from hotset.store.claims import Ids, Participant
from hotset.store.format import ON_DISK, PAGE, RECORD, RECORD_HEADER, ROW_MASK, Geometry, Live, Slot
from hotset.store.irregular_records import Flattened
from hotset.store.leaves.schema import Schema
from hotset.store.memory_limits import Headroom
from hotset.store.record_batch import RecordBatch, VariableTails, heads_of
from hotset.store.records import Record, Records
from hotset.store.segment import Address, Segment, Words, attach_second
from hotset.units import format_bytes

__all__ = ["Spill", "SpillTo", "StagedBatch", "attach_spill"]

Bytes = npt.NDArray[np.uint8]

_SMALLEST_MARGIN = 64 << 20
_LARGEST_FILE = 15 << 40  # a little less than ext4's
# Rows nearer to each other than this are read together, and so much of them at once.
_NEAR = 16 << 10
_AT_ONCE = 4 << 20


class _DiskAllocator(Allocator):
    """Allocates room on a disk, which is bounded by the disk; its messages name `spill=`."""

    def __init__(self, participant: Participant, free: Callable[[], Headroom]) -> None:
        super().__init__(participant, free)
        self.knob = "`spill=`"

    def _limit_reached(self) -> str:
        return f"the spill file is as large as it may be; name another folder by {self.knob}"

    def _file_system_full(self) -> str:
        return f"the file system of the spill folder is full; free some, or name another by {self.knob}"

    def _no_memory(self, free: Headroom) -> str:
        margin = format_bytes(_margin(free.limit))
        return (
            f"{free.what} has no more to give than the {margin} that stay free; free some, or name another "
            f"by {self.knob}"
        )


def _margin(size: int) -> int:
    """Bytes of a disk of that size that are left free."""
    return max(_SMALLEST_MARGIN, size // 100)


class Spill:
    """The segment on the disk, of the same samples and schema as the store's, as this process sees it.

    ``keeps_all`` says whether it also gets the records that memory has room for.
    """

    def __init__(self, segment: Segment, schema: Schema, *, keeps_all: bool) -> None:
        self.segment = segment
        self.keeps_all = keeps_all
        self.participant = Participant(segment)
        self.allocator = _DiskAllocator(self.participant, self._free)
        self._schema = schema
        self._records = Records(segment, schema)

    def _free(self) -> Headroom:
        """What the disk has left, less a margin: others write there too."""
        status = os.fstatvfs(self.segment.fd)
        size = status.f_blocks * status.f_frsize
        left = status.f_bavail * status.f_frsize - _margin(size)
        # The allocator subtracts what the index may still take; here that is on the disk already.
        return Headroom(left + self.segment.geometry.rows_at, size, "the file system of the spill folder")

    def write(self, samples: Ids, generations: Words, prepared: Sequence[Flattened]) -> Words:
        """Write as many of these records as are given room at once; returns words for the store's index."""
        tails = [one.tail_lines for one in prepared]
        with self.participant.thread_lock:
            places = self.allocator.reserve(samples.tolist(), tails)
            records = [
                Record(sample, generation, one, *place)
                for sample, generation, one, place in zip(
                    samples.tolist(), generations.tolist(), prepared, places, strict=False
                )
            ]
            try:
                words = np.array(self._records.write(records), np.int64)
            except OSError as error:
                self.allocator.refuse(
                    f"the spill folder cannot be written ({error}); name another by `spill=`"
                )
                words = np.empty(0, np.int64)
        self.segment.index[samples[: len(words)]] = words
        return words | ON_DISK

    def prefetch(self, words: Words) -> None:
        """Prefetch the records that these words name: the kernel reads them in the background."""
        stride, rows_at = self.segment.geometry.stride, self.segment.geometry.rows_at
        starts = np.sort(words[words & ON_DISK != 0] & ROW_MASK) * stride + rows_at
        if not len(starts):
            return
        first, last = starts // PAGE, (starts + stride - 1) // PAGE
        # Rows on neighbouring pages are fetched as one: of tiny rows, many.
        apart = np.flatnonzero(first[1:] > last[:-1] + 1)
        begins, ends = first[np.append(0, apart + 1)], last[np.append(apart, -1)]
        for begin, end in zip(begins.tolist(), ends.tolist(), strict=True):
            self.segment.read_ahead(begin * PAGE, (end + 1 - begin) * PAGE)

    def read_rows(self, words: Words, places: Ids, into: Bytes) -> list[int]:
        """Copy the rows that these words name to these places; returns the places that failed."""
        geometry = self.segment.geometry
        rows = words[places] & ROW_MASK
        outside = rows >= geometry.rows
        lost: list[int] = places[outside].tolist()
        if lost:
            places, rows = places[~outside], rows[~outside]
        if geometry.stride >= _NEAR:
            return lost + self._read_each(rows, places, into)
        order = np.argsort(rows, kind="stable")
        rows, places = rows[order], places[order]
        # Tiny rows near each other are read as one: reading the gap costs less than a call.
        cuts = np.flatnonzero(np.diff(rows) * geometry.stride > _NEAR) + 1
        begins, ends = np.append(0, cuts), np.append(cuts, len(rows))
        single = ends - begins == 1
        lost += self._read_each(rows[begins[single]], places[begins[single]], into)
        for begin, end in zip(begins[~single].tolist(), ends[~single].tolist(), strict=True):
            lost += self._read_run(rows[begin:end], places[begin:end], into)
        return lost

    def _read_each(self, rows: Words, places: Ids, into: Bytes) -> list[int]:
        stride, lost = self.segment.geometry.stride, []
        flat = into.reshape(-1).data
        starts = (rows * stride + self.segment.geometry.rows_at).tolist()
        for place, start in zip(places.tolist(), starts, strict=True):
            if not self.segment.read(start, flat[place * stride : (place + 1) * stride]):
                lost.append(place)
        return lost

    def _read_run(self, rows: Words, places: Ids, into: Bytes) -> list[int]:
        """Read rows, in order, with all that lies between them."""
        geometry = self.segment.geometry
        stride = geometry.stride
        lost: list[int] = []
        begin = 0
        while begin < len(rows):
            first = int(rows[begin])
            end = int(np.searchsorted(rows, first + max(_AT_ONCE // stride, 1)))
            some, run = rows[begin:end], np.empty((int(rows[end - 1]) - first + 1, stride), np.uint8)
            if self.segment.read(geometry.rows_at + first * stride, run.reshape(-1).data):
                into[places[begin:end]] = run[some - first]
            else:  # perhaps only one of them fails
                lost += self._read_each(some, places[begin:end], into)
            begin = end
        return lost

    def read_lines(self, first: int, into: memoryview) -> bool:
        """Copy a run of lines; False if it cannot be read."""
        geometry = self.segment.geometry
        inside = first >= 0 and first * fmt.LINE + len(into) <= geometry.lines * fmt.LINE
        return inside and self.segment.read(geometry.lines_at + first * fmt.LINE, into)

    def forget(self, sample: int) -> None:
        """Forget a record that is damaged; its row is lost."""
        self.segment.index[sample] = 0

    def clear(self) -> None:
        """Forget every record; the caller holds the store's short lock, and no claim is open."""
        segment, geometry = self.segment, self.segment.geometry
        self.allocator.reopen()
        segment.used_index[:] = 0
        segment.slots[:, Slot.ROW_NEXT : Slot.LINE_END + 1] = 0
        segment.live[[Live.ROWS_NEXT, Live.LINES_NEXT, Live.INVALIDATED]] = 0
        with contextlib.suppress(OSError):  # a file system without holes: its blocks are reused
            segment.discard(geometry.rows_at, geometry.size - geometry.rows_at)

    def close(self) -> None:
        """Detach."""
        self.participant.leave()
        self.segment.close()


class StagedBatch:
    """A batch's records on their way out of both tiers.

    Args:
        rows, lines: the first tier's.
        ids, words: of the batch, which all are present.
        block: gives memory for that many bytes.

    Attributes:
        words: of the batch.
        records: the records, once :meth:`load` has run.
        tails: where the tails of the records lie in ``records.tails``; None if no record can have one.
        damaged: samples whose records are not sound, each with its word and what is wrong.
        is_loaded: whether :meth:`load` has run.
    """

    def __init__(
        self, spill: Spill, rows: Bytes, lines: Bytes, ids: Ids, words: Words, block: Callable[[int], Any]
    ) -> None:
        self._spill = spill
        self._from = rows, lines
        self.words = words
        self._on_disk = np.flatnonzero(words & ON_DISK)
        self._memory = np.flatnonzero(words & ON_DISK == 0)
        self._allocate = block
        self.records = RecordBatch.new(block, ids, rows.shape[1])
        self.tails: VariableTails | None = None
        self.damaged: list[tuple[int, int, str]] = []
        self.is_loaded = False

    def load(self, head: np.dtype[np.void] | None) -> bool:
        """Copy the records; False if one is damaged or cannot be read.

        ``head`` is :attr:`Schema.head`, which says where a row's tail is; None without tails.
        """
        self.is_loaded = True
        rows = self.records.rows
        rows[self._memory] = self._from[0][self.words[self._memory] & ROW_MASK]
        for place in self._spill.read_rows(self.words, self._on_disk, rows):
            self._refuse(place, "its record cannot be read")
        if not self.damaged and head is not None:
            self._load_tails(head)
        if not self.damaged:
            stamps = self.words[self._on_disk] >> fmt.GENERATION_SHIFT & fmt.STAMP_MASK
            sound = self.records.are_sound(stamps, self._on_disk)
            for place in self._on_disk[~sound].tolist():
                self._refuse(place, "its record's header or checksum does not match")
        return not self.damaged

    def _load_tails(self, head: np.dtype[np.void]) -> None:
        ids, _, rows, *_ = self.records
        tails = self.tails = VariableTails(heads_of(rows, head))
        limit, stride = self._spill.segment.geometry.lines, rows.shape[1]
        outside = (tails.first < 0) | (tails.first + tails.counts > len(self._from[1]))
        for place in self._memory[outside[self._memory]].tolist():
            self._refuse(place, "its record's tail lies outside the segment")
        disk: list[int] = self._on_disk.tolist()
        for place in disk:
            first, count = int(tails.first[place]), int(tails.counts[place])
            # Two fields hold the tail's length: memory is allocated only if they agree.
            length, *_ = RECORD.unpack_from(rows[place].data)
            size = length - (stride - RECORD_HEADER)
            if first + count > limit or not 0 <= count * fmt.LINE - size < fmt.LINE:
                self._refuse(place, "its record's header is damaged")
        if self.damaged:
            return
        self.records = RecordBatch.new(self._allocate, ids, stride, tails.counts)
        self.records.rows[:] = rows
        lines = self.records.tails
        of = np.repeat(self.words & ON_DISK == 0, tails.counts)
        lines[of] = self._from[1][tails.lines()[of]]
        for place in disk:
            start, count = int(tails.starts[place]), int(tails.counts[place])
            if count and not self._spill.read_lines(
                int(tails.first[place]), lines[start : start + count].data.cast("B")
            ):
                self._refuse(place, "its record's tail cannot be read")

    def _refuse(self, place: int, why: str) -> None:
        self.damaged.append((int(self.records.ids[place]), int(self.words[place]), why))


@dataclass(frozen=True)
class SpillTo:
    """Where a second tier is to be made.

    Attributes:
        folder: hotset's own folder on the disk, for a nameless file.
        path: a new file there instead; None for a nameless one.
        keeps_all: whether it also gets the records that memory has room for.
    """

    folder: str
    path: str | None = None
    keeps_all: bool = False

    def create(self, schema: Schema, samples: int, about: dict[str, Any]) -> Spill | None:
        """Make the second tier; None, with a warning, if it cannot be made."""
        try:
            return self._create(schema, samples, about)
        except OSError as error:
            warn(
                f"nothing is spilled to {self.folder} ({error.strerror or error}), so samples that memory "
                "has no room for come from the source. Free space there, or name another folder by `spill=`."
            )
            return None

    def _create(self, schema: Schema, samples: int, about: dict[str, Any]) -> Spill:
        metadata = json.dumps(about).encode()
        status = os.statvfs(self.folder)
        size = min(status.f_blocks * status.f_frsize, _LARGEST_FILE // 2)
        rows = min(samples, size // schema.stride) + fmt.SLOTS
        lines = max(size // fmt.LINE, 1)
        geometry = Geometry(samples, schema.stride, rows, lines, len(metadata))
        folder = None if self.path is not None else self.folder
        # The disk is the limit: the file never takes more.
        segment = Segment.create(geometry, metadata, path=self.path, folder=folder, limit=geometry.size)
        return Spill(segment, schema, keeps_all=self.keeps_all)

    def remove(self, spill: Spill) -> None:
        """Remove it again: the first tier cannot be made."""
        spill.close()
        if self.path is not None:
            os.unlink(self.path)

    def said(self, spill: Spill) -> dict[str, Any]:
        """What the first tier's metadata say of the second, so that other processes find it."""
        if self.path is not None:
            return {"path": self.path, "keeps_all": self.keeps_all}
        segment = spill.segment
        inode = os.fstat(segment.fd).st_ino
        return {"inode": inode, "nonce": segment.nonce.hex(), "keeps_all": self.keeps_all}


def attach_spill(where: str | Address, segment: Segment, schema: Schema) -> Spill | None:
    """Attach to the second tier of a store; None if it has none. Its first tier, the segment, lies ``where``.

    Raises:
        SegmentError: it is gone, or damaged.
    """
    said = segment.metadata.get("spill")
    if said is None:
        return None
    second = attach_second(where, said)
    ours, theirs = segment.geometry, second.geometry
    if (ours.samples, ours.stride) != (theirs.samples, theirs.stride):
        second.close()
        raise SegmentError("the cache's spill file is another cache's.")
    return Spill(second, schema, keeps_all=bool(said["keeps_all"]))
