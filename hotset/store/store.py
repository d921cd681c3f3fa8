"""The store: samples of one cache in one segment, written once, read by every process.

::

    fill(ids, read)   absent samples: claim, read from the source, write the record, publish its word
    read(ids)         present samples: one copy of their rows (and tails) into a recycled block, decoded there
    check()           every record's checksum, every index word, every extent

A reader takes no lock. It loads the index words of its whole batch, copies the rows they name, and looks at
the era: only ``clear()`` ever gives rows to other samples, it counts the era up before and after, and a
reader that sees it odd, or changed, forgets its copy. (In :mod:`hotset.store.ring` rows are used again all
the time, and the words are looked at a second time too.) What it returns is always a copy: a user may write
to it, and the cache never knows.

Nothing in here fails because there is no room, a claimant died, or a record is damaged: such samples are
simply not in the store, and come from the source.
"""

from __future__ import annotations

import errno
import json
import os
import platform
import time
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from hotset.errors import SegmentError
from hotset.store import format as fmt
from hotset.store import memory
from hotset.store.blocks import BlockPool
from hotset.store.check import check_segment, check_tiers, record_problem
from hotset.store.claims import Ids, Index, Membership
from hotset.store.fill import Filler
from hotset.store.format import PRESENT, RECORD_HEADER, ROW_MASK, Geometry, Live, Slot
from hotset.store.room import Room, distrust_room
from hotset.store.schema import Schema
from hotset.store.segment import Address, Segment, Words
from hotset.store.spill import Spill, SpillTo, Staged, attach_spill
from hotset.store.tails import Tails
from hotset.told import tell

__all__ = ["FULL_CHECK", "Store", "require_index_room"]

Bytes = npt.NDArray[np.uint8]
AnyStore = TypeVar("AnyStore", bound="Store")

FULL_CHECK = platform.machine() not in ("x86_64", "AMD64")
_ALIGN = 64
_READERS_SECONDS = 2.0


class Store:
    """Samples of one data set in one segment, as this process sees them.

    Attributes:
        segment: the mapped file.
        schema: the tree that its samples share.
        index: which index word is whose.
        filler: brings samples in, and counts what it met.
        room: what is left for them in memory.
        spill: the second tier, on a disk; None if there is none.
        path: of the segment's file; None if it has no name.
    """

    _index_type: type[Index] = Index
    _room_type: type[Room] = Room
    _is_ring = False  # entered in the metadata, for who attaches and who checks

    def __init__(self, segment: Segment, schema: Schema, spill: Spill | None = None) -> None:
        self.segment = segment
        self.schema = schema
        self.spill = spill
        self.path: str | None = None
        geometry = segment.geometry
        self.member = Membership(segment)
        self.index = self._index_type(segment)
        self.room = self._room_type(self.member)
        self.rows = _bytes_view(segment, geometry.rows_at, geometry.rows, geometry.stride)
        self.lines = _bytes_view(segment, geometry.lines_at, geometry.lines, fmt.LINE)
        self._heads: Bytes | None = None
        if schema.has_tail:
            width, at = schema.head.itemsize, geometry.rows_at + RECORD_HEADER
            self._heads = np.ndarray((geometry.rows,), f"V{width}", segment.buffer, at, (geometry.stride,))
        self.filler = Filler(self.member, self.index, self.room, schema)
        self.filler.spill = spill
        self._scratch: BlockPool | None = None
        # The index word under which each sample was found sound; None where that need not be looked at.
        self.verified: Words | None = None
        if FULL_CHECK or not segment.trusted:
            self.verified = np.zeros(geometry.samples, np.int64)
        if not segment.trusted:
            distrust_room(self.member)
            if spill is not None:
                distrust_room(spill.member)
        self._damaged = 0

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
            schema: of its samples.
            samples: length of the data set, at least 1.
            limit: bytes that rows and tails may take.
            about: what the metadata says besides the schema (name, fingerprint); JSON's types only.
            path: a new file; a memfd if None.
            spill: where records go that memory has no room for; None: nowhere.

        Raises:
            OSError: a file cannot be made, or its index alone takes more memory than there is.
        """
        about = {**about, "schema": schema.to_json(), **({"ring": True} if cls._is_ring else {})}
        second = _create_spill(spill, schema, samples, about) if spill is not None else None
        try:
            if spill is not None and second is not None:
                about = {**about, "spill": spill.said(second)}
            metadata = json.dumps(about).encode()
            rows, lines = cls._address_space(schema, samples, limit)
            geometry = Geometry(samples, schema.stride, rows, lines, len(metadata))
            require_index_room(geometry)
            store = cls(Segment.create(geometry, metadata, path=path, limit=limit), schema, second)
            store.path = path
            return store
        except BaseException:
            if second is not None:
                second.close()
            if second is not None and spill is not None and spill.path is not None:
                os.unlink(spill.path)
            raise

    @staticmethod
    def _address_space(schema: Schema, samples: int, limit: int) -> tuple[int, int]:
        """How many rows and lines there may ever be."""
        # A row for every sample that the limit has room for, and some for what killed processes lose.
        rows = min(samples, limit // schema.stride) + fmt.SLOTS
        return rows, max(limit // fmt.LINE, 1) if schema.has_tail else 0

    @classmethod
    def attach(cls: type[AnyStore], where: str | Address, schema: Schema | None = None) -> AnyStore:
        """Attach to an existing store.

        Raises:
            SegmentError: see :meth:`Segment.attach`, :meth:`Schema.from_json`.
        """
        segment = Segment.attach(where)
        try:
            if schema is None:
                schema = Schema.from_json(segment.metadata.get("schema"))
            geometry = segment.geometry
            if (schema.stride, schema.has_tail) != (geometry.stride, geometry.has_tail):
                raise SegmentError("the segment's schema does not describe its rows; `hotset gc` frees it.")
            if segment.metadata.get("ring", False) is not cls._is_ring:
                raise SegmentError(
                    "of the cache that is there and the one asked for only one has a window; make them agree."
                )
            store = cls(segment, schema, attach_spill(where, segment, schema))
            store.path = where if isinstance(where, str) else None
            return store
        except BaseException:
            segment.close()
            raise

    def __len__(self) -> int:
        return self.segment.geometry.samples

    @property
    def address(self) -> str | Address:
        """Where other processes attach to it."""
        return self.path or self.segment.address

    @property
    def why_full(self) -> str | None:
        """What stands in the way of more samples, once something did; None otherwise."""
        return self.room.why_full if self.spill is None else self.spill.room.why_full

    # ---- filling -------------------------------------------------------------------------------------

    def fill(self, ids: Ids, read: Callable[[int], Any], *, keep: bool = True) -> dict[int, Any]:
        """Bring these samples into the store as far as there is room for them.

        Samples that another living process is reading are waited for, boundedly, after all others.

        Args:
            ids: sample numbers, each in ``range(len(self))``.
            read: the source and its prefix.
            keep: return stored samples too. A caller that will copy the batch from the store anyway lets
                each go as soon as it is stored, so that the next one is read into the same, warm memory.

        Returns:
            The samples that this call read, by number; without ``keep`` only those that are not stored.

        Raises:
            Whatever ``read`` raises, untouched.
        """
        if self.era() is None and not self.condemned:
            self._finish_clear()
        return self.filler.fill(ids, read, keep)

    # ---- reading -------------------------------------------------------------------------------------

    def holds(self, ids: Ids | None = None) -> bool:
        """Whether all of these samples (of all samples, if None) are in the store now."""
        words = self.segment.index if ids is None else self.words(ids)
        return self.era() is not None and len(words) > 0 and int(words.min()) >= PRESENT

    def present(self, ids: Ids) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """Which of these samples are in the store, and sound."""
        words = self.words(ids)
        here = (words >= PRESENT) & (self.era() is not None)
        if self.verified is not None:
            places = self.index.places(ids)
            for i in np.flatnonzero(here):
                here[i] = self._sound(int(places[i]), int(words[i]))
        return here

    def read(self, ids: Ids) -> list[Any] | None:
        """Return copies of these samples, which all must be present; None if one no longer is.

        The copies lie in one recycled block, which is free again when the last of them is dropped.
        """
        era = self.era()
        words = self.words(ids)
        if era is None or not (words >= PRESENT).all():
            return None
        stride = self.segment.geometry.stride
        count = len(ids)
        if self.on_disk(words):
            return self._read_staged(ids, words, era)
        rows = words & ROW_MASK
        with self.member.reading:
            if not self.unchanged(words, era):
                return None
            tails = self.tails(rows) if self.schema.has_tail else None
            if tails is not None and not self.unchanged(words, era):
                return None  # the tails' places may be half of one record and half of another
            tails_at = -(-count * stride // _ALIGN) * _ALIGN
            block = self._block(tails_at + (tails.total * fmt.LINE if tails else 0))
            # Whole rows are contiguous, so numpy copies them as fast as torch does, and in this thread alone:
            # torch would wake its team, whose spinning beside a busy process cost a factor of 400.
            np.take(self.rows, rows, axis=0, out=_view(block, 0, count, stride), mode="clip")
            starts = np.zeros(count, np.int64)
            if tails is not None:
                starts = tails_at + tails.starts * fmt.LINE
                if tails.total:
                    out = _view(block, tails_at, tails.total, fmt.LINE)
                    np.take(self.lines, tails.lines(), axis=0, out=out, mode="clip")
            if not self.unchanged(words, era):
                return None
        return self.schema.read(block, 0, starts.tolist())

    def on_disk(self, words: Words) -> bool:
        """Whether any of these words, of present samples, names a record on the disk."""
        return self.spill is not None and bool((words & fmt.ON_DISK).any())

    def stage(self, ids: Ids, words: Words) -> Staged:
        """Make ready to copy these samples' records from both tiers side by side; see :class:`Staged`."""
        assert self.spill is not None
        return Staged(self.spill, self.rows, self.lines, ids, words, self._block)

    def load(self, staged: Staged) -> bool:
        """Copy staged records; False if one is damaged, which is forgotten then."""
        with self.member.reading:
            if self.era() is None:
                return False
            sound = staged.load(self.schema.head if self.schema.has_tail else None)
        for sample, word, why in staged.damaged:
            if not self._forget(sample, word):
                continue  # not damaged: cleared under our hands
            self._damaged += 1
            if self._damaged == 1:
                tell(f"sample {sample} is damaged on the disk ({why}), and is read from the source again.")
        return sound

    def _forget(self, sample: int, word: int) -> bool:
        """Forget a record on the disk that is damaged; False if it is not there any more."""
        assert self.spill is not None
        with self.member.short_lock():
            if self.era() is None or int(self.segment.index[sample]) != word:
                return False
            self.spill.forget(sample)
            self.segment.index[sample] = 0
            # What it had in its tail is not known any more.
            self.member.row[Slot.STORED_BYTES] -= self.segment.geometry.stride
            return True

    def _read_staged(self, ids: Ids, words: Words, era: int) -> list[Any] | None:
        assert self.spill is not None
        self.spill.announce(words)
        staged = self.stage(ids, words)
        if not self.load(staged) or not self.unchanged(words, era):
            return None
        starts = np.zeros(len(ids), np.int64)
        if staged.tails is not None:
            starts = staged.lines_at + staged.tails.starts * fmt.LINE
        return self.schema.read(staged.block, 0, starts.tolist())

    def announce(self, ids: Ids) -> None:
        """Say that these samples are wanted soon: what is on the disk is fetched meanwhile."""
        if self.spill is not None:
            words = self.words(ids)
            self.spill.announce(words[words >= PRESENT])

    def words(self, ids: Ids) -> Words:
        """The index words of these samples: ``PRESENT`` or more where a record is."""
        return self.index.words(ids)

    def refuse(self, ids: Ids) -> None:
        """Note that these samples were tried in vain. Here nobody asks; a ring passes over such entries."""

    def unchanged(self, words: Words, era: int) -> bool:
        """Whether the records that these words name are still what they were when the words were loaded.

        Asked after a copy was made of them. Here only a clear changes records.

        Args:
            words: of present samples.
            era: from before the words were loaded.
        """
        return self.era() == era

    def era(self) -> int | None:
        """Which clear the store's content comes after; None while one is under way, or once condemned."""
        era = int(self.segment.live[Live.ERA])
        return era if era % 2 == 0 and not self.condemned else None

    @property
    def condemned(self) -> bool:
        """Whether it was found that what is in it is not right, so that nobody reads it any more."""
        return bool(self.segment.live[Live.CONDEMNED])

    def condemn(self) -> bool:
        """Have nobody read it any more; True for who says so first."""
        with self.member.short_lock():
            before = bool(self.segment.live[Live.CONDEMNED])
            self.segment.live[Live.CONDEMNED] = 1
            if self.spill is not None:
                self.spill.segment.live[Live.CONDEMNED] = 1  # it may outlive the machine's memory
        return not before

    def tails(self, rows: Words) -> Tails:
        """Where the tails of these rows lie, and where each goes in a gathered run of lines."""
        assert self._heads is not None
        return Tails(self._heads[rows].view(self.schema.head))

    @property
    def stored_bytes(self) -> int:
        """Bytes of the records that are there, over all processes."""
        return int(self.segment.slots[:, Slot.STORED_BYTES].sum())

    def count_hits(self, count: int) -> None:
        """Count samples that this process served from the store without reading the source."""
        self.member.row[Slot.HITS] += count

    def _block(self, size: int) -> Any:
        pool = self._scratch
        if pool is None or not pool.is_ours or pool.block_bytes < size:
            pool = self._scratch = BlockPool(size + size // 4)
        return pool.lend(pool.take())

    # ---- care ----------------------------------------------------------------------------------------

    def _sound(self, sample: int, word: int) -> bool:
        """Whether a record is what its writer wrote; looked at once in a process (always off x86-64)."""
        assert self.verified is not None
        if self.verified[sample] == word:
            return True
        problem = self.problem(sample, word)
        if problem is not None:
            self._damaged += 1
            if self._damaged == 1:
                tell(f"{problem}; it is read from the source, like all others that are found damaged.")
            return False
        if not FULL_CHECK:
            self.verified[sample] = word
        return True

    def problem(self, sample: int, word: int) -> str | None:
        """What is wrong with the record that this index word names, in words; None if it is sound."""
        if not word & fmt.TIER_MASK:
            return record_problem(self.segment, sample, word)
        if self.spill is not None and word & fmt.TIER_MASK == fmt.ON_DISK:
            return None  # verified in the copy that is made of it
        return f"sample {sample}: its index word names a tier that there is not"

    def check(self) -> list[str]:
        """Verify every record and every index word; an empty list if all is well."""
        problems = check_segment(self.segment)
        if self.spill is None:
            return problems
        second = self.spill.segment
        return [*problems, *check_segment(second), *check_tiers(self.segment, second)]

    def clear(self, timeout: float = 5.0) -> bool:
        """Forget every sample, in all processes; False if some process did not finish writing in time.

        A clear while another process writes would let its record land in a row that is somebody else's by
        then; so it waits until no living process has a claim open.
        """
        deadline = time.monotonic() + timeout
        segment = self.segment
        while True:
            with self.member.short_lock() as held:
                words = segment.index
                claimed = words[(words >= fmt.CLAIMED) & (words < PRESENT)]
                if held and not any(self.filler.claims.is_open(word) for word in set(claimed.tolist())):
                    self._forget_everything()
                    return True
            if time.monotonic() > deadline:
                return False
            time.sleep(2e-3)

    def _finish_clear(self) -> None:
        """Bring to an end what a process began to clear and died over."""
        with self.member.short_lock() as held:
            if held and self.era() is None:
                self._forget_everything()

    def _forget_everything(self) -> None:
        """Empty the segment; the caller has the short lock.

        The era is odd meanwhile, so that nobody begins to read, and another one after that, so that who had
        begun before drops what he read.
        """
        segment, geometry = self.segment, self.segment.geometry
        segment.live[Live.ERA] |= 1
        segment.index[:] = 0
        segment.slots[:, Slot.ROW_NEXT : Slot.LINE_END + 1] = 0
        segment.slots[:, Slot.STORED_BYTES] = 0
        if self.spill is not None:
            self.spill.clear()
        segment.live[[Live.ROWS_NEXT, Live.LINES_NEXT, Live.TOLD, Live.CONDEMNED]] = 0
        if self.member.unread(_READERS_SECONDS):  # else its pages are written again as they are
            segment.discard(geometry.rows_at, geometry.size - geometry.rows_at)
        if self.room.allowance is not None:
            self.room.allowance.take(0)
        self.room.reopen()
        segment.live[Live.ERA] += 1

    def close(self) -> None:
        """Detach. What was read stays valid: it is no part of the segment."""
        if self.spill is not None:
            self.spill.close()
        self.member.leave()
        self.segment.close()


def _create_spill(spill: SpillTo, schema: Schema, samples: int, about: dict[str, Any]) -> Spill | None:
    try:
        return spill.create(schema, samples, about)
    except OSError as error:
        tell(
            f"nothing is spilled to {spill.folder}, and what memory has no room for comes from the source: "
            f"{error.strerror or error}. Name another folder by `spill=`, or free some."
        )
        return None


def require_index_room(geometry: Geometry) -> None:
    """Refuse a segment whose index alone is too much: it is touched wherever samples are asked for.

    Raises:
        OSError: there is not so much memory; nothing checks that again.
    """
    free = memory.headroom()
    if geometry.rows_at > free.bytes:
        raise OSError(
            errno.ENOMEM,
            f"the index of {geometry.samples:,} samples takes {geometry.rows_at:,} bytes of memory, "
            f"and {free.what} has {free.bytes:,} to give",
        )


def _bytes_view(segment: Segment, offset: int, rows: int, width: int) -> Bytes:
    return np.ndarray((rows, width), np.uint8, segment.buffer if rows else None, offset)


def _view(block: Any, offset: int, rows: int, width: int) -> Bytes:
    return np.ndarray((rows, width), np.uint8, block, offset)
