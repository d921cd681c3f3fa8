"""The keyed store: results of functions in one segment, found by keys (:mod:`hotset.store.key_table`).

A sample id is given to each new key. Claims, index words, records, the spill and the check are as in any
store, with three differences.

**Each record has a form of its own** (:mod:`hotset.store.irregular_records`), as results of different
functions have nothing in common. Its row holds the header and the tail's place only.

**Records are written again**: when what their key names has got another version (a file was changed), and
when their lines are given up for others. Each record of a row has a higher generation than the one before,
and the index word holds it. So a reader loads the word, copies the record, and loads the word again::

    absent ── claim ──> claimed ── version, record, word ──> present, version v, generation g + 1
       ^                   │ ^                                  │   │
       ├── failed, died ───┘ └── another version is wanted ─────┘   │
       └── its lines are given up, or the function is cleared <─────┘

**Room.** Results are kept until there is no room for more: while every epoch asks for all of them, replacing
one by another gains nothing. Without room these go: results of functions whose code is gone (another function
of that name was entered since, and no living process uses this one), then, of functions that asked for it
(``EVICTABLE``), the least recently used. A search compares all runs of lines that are long enough, and takes
the one whose latest use is the earliest. Results of functions whose callers hold views (``VIEWED``) never go.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from hotset.errors import SegmentError
from hotset.store import format as fmt
from hotset.store import irregular_records as forms
from hotset.store import memory_limits
from hotset.store.body_writer import BodyWriter, Unfilled
from hotset.store.claims import Ids, Index, Participant
from hotset.store.fixed_rows import FixedRowAllocator
from hotset.store.format import DRAWS, LINE, ON_DISK, OWN_STAMP, PRESENT, RECORD_HEADER, Live, Slot
from hotset.store.key_table import EVICTABLE, VIEWED, KeyTable
from hotset.store.leaves.schema import Schema
from hotset.store.leaves.strided import with_strides
from hotset.store.segment import Segment, Words
from hotset.store.spill import Spill, SpillTo
from hotset.store.store import Store

__all__ = ["MISSING", "KeyedAllocator", "KeyedIndex", "KeyedStore"]

MISSING = object()
_STRIDE = RECORD_HEADER + fmt.TAIL.size
_FEWEST, _MOST = 1 << 16, 1 << 23
_BYTES_A_KEY = 1024  # for each of these many bytes of the limit there may be a key
_SHARES = 256  # an extent is at most this part of all lines, unless one record needs more
_LARGEST_EXTENT = (4 << 20) // LINE  # of lines that were never used before
_LARGE = 64 << 10


class KeyedIndex(Index):
    """The index words of a keyed segment, whose records are written again."""

    def generations(self, ids: Ids) -> Words:
        segment, geometry = self._segment, self._segment.geometry
        at = geometry.rows_at + 4
        stamps: npt.NDArray[np.uint32] = np.ndarray(
            (geometry.rows,), np.uint32, segment.buffer, at, (geometry.stride,)
        )
        before = stamps[ids].astype(np.int64) & fmt.GENERATION_MASK
        # As fmt.next_generation, of many records.
        before = np.maximum(before, int(segment.live[Live.CLEAR_GENERATION]))
        return np.maximum((before + 1) & fmt.GENERATION_MASK, 1)


class KeyedAllocator(FixedRowAllocator):
    """Allocates lines: first those never used, then those that no record needs, or that records give up."""

    _reserves_memory = False

    def __init__(self, participant: Participant) -> None:
        super().__init__(participant)
        self.keys = KeyTable(participant)

    def place(self, row: int) -> bool:
        return True  # reserved when the key was entered

    def _find(self, count: int) -> tuple[int, int]:
        live, geometry = self._segment.live, self._geometry
        capacity = max(min(geometry.lines, self._limit() // LINE), 0)
        used, share = int(live[Live.LINES_NEXT]), max(count, capacity // _SHARES)
        why = self._limit_reached()
        if not live[Live.KEYS_FREED]:
            for wanted in (max(count, min(share, _LARGEST_EXTENT)), count):
                refused = why if used + wanted > capacity else self._grow(used + wanted)
                if refused is None:
                    return used, wanted
                why = refused
        for wanted in (share, count):
            first, lines = self._give_up(wanted, min(used, capacity))
            if lines:
                return first, lines
        if live[Live.KEYS_FREED]:
            live[Live.KEYS_FREED] = 0  # no run is long enough: take new lines from now on
            return self._find(count)
        self.refuse(why)
        return 0, 0

    def _grow(self, lines: int) -> str | None:
        total = self._geometry.taken(int(self._segment.live[Live.ROWS_NEXT]), lines)
        if self.allowance is not None and not self.allowance.take(total):
            return self._limit_reached()
        return super()._grow(lines)

    def _give_up(self, needed: int, high: int) -> tuple[int, int]:
        """Forget the records in the best run of so many lines; its first line and length, 0 if there is none.

        ``high`` is the line after the last that may be used.
        """
        firsts, ends, ages, samples = self._runs()
        # A run may begin where a record ends, and ends where a later record begins, or at the highest line.
        begins = np.append(0, np.maximum.accumulate(ends))
        last = np.searchsorted(firsts, begins + needed)
        fits = np.append(firsts, high)[last] - begins >= needed
        # Before some of them are left out below: among many that have to stay, one gap is easily missed.
        stay = np.append(0, np.cumsum(np.isinf(ages)))
        starts = np.flatnonzero(fits & (stay[last] == stay[: len(begins)]))
        if not len(starts):
            return 0, 0
        # Runs overlap; where each covers many records, only some of them are compared.
        step = max(1, int(np.median(last[starts] - starts)) // 4)
        starts = starts[::step]
        costs = np.array([ages[i:j].max(initial=-1.0) for i, j in zip(starts, last[starts], strict=True)])
        i = int(starts[int(costs.argmin())])
        j = int(last[i])
        self._segment.index[samples[i:j]] = 0
        end = int(np.append(firsts, high)[j])
        return int(begins[i]), end - int(begins[i])

    def _runs(self) -> tuple[Words, Words, npt.NDArray[np.float64], Ids]:
        """Runs of lines in use, in order: first line, end, when it was last used, sample id.

        Infinity for what must stay. Extents come before words: a record that is published meanwhile is seen
        twice, not missed.
        """
        begins, ends = self._extents_of_others()
        index = self._segment.index[: len(self.keys)]
        samples = np.flatnonzero((index >= PRESENT) & (index & ON_DISK == 0))
        firsts, counts = fmt.split_tail(self._tails[samples])
        known = self.keys.functions()
        newest = {function.name: function.number for function in known}
        used, of = self.keys.used(samples), self.keys.functions_of(samples)
        ages = np.full(len(samples), np.inf)  # of what was forgotten, but is looked at, too
        for function in known:
            mine = of == function.number
            if function.flags & VIEWED:
                continue
            if newest[function.name] != function.number and not self.keys.in_use(function.number):
                ages[mine] = 0.0
            elif function.flags & EVICTABLE:
                ages[mine] = used[mine]
        order = np.argsort(np.concatenate([firsts, begins]), kind="stable")
        return (
            np.concatenate([firsts, begins])[order],
            np.concatenate([firsts + counts, ends])[order],
            np.concatenate([ages, np.full(len(begins), np.inf)])[order],
            np.concatenate([samples, np.zeros(len(begins), np.int64)])[order],
        )


class KeyedStore(Store):
    """Results of functions in one segment, as this process sees them.

    Attributes:
        keys: gives sample ids to keys.

    Example:
        >>> store = KeyedStore.make(1 << 20, about={})
        >>> number = store.keys.enter("squares", bytes(16), 0)
        >>> sample = store.keys.add(b"the key of 7".ljust(16), number)
        >>> store.get(sample, 0) is MISSING
        True
        >>> store.claim(sample, 0)
        True
        >>> store.put(sample, 0, number, [49])
        True
        >>> store.get(sample, 0)
        [49]
        >>> store.close()
    """

    _index_type = KeyedIndex
    _allocator_type = KeyedAllocator
    _is_keyed = True

    def __init__(self, segment: Segment, schema: Schema, spill: Spill | None = None) -> None:
        if not segment.geometry.keyed:
            raise SegmentError("the existing cache holds a dataset, not results of functions.")
        super().__init__(segment, schema, spill)
        assert isinstance(self.allocator, KeyedAllocator)
        self.keys = self.allocator.keys
        whole = memoryview(segment.buffer)
        geometry = segment.geometry
        self._whole = whole
        self._bodies = BodyWriter(segment)
        self._words = whole[geometry.index_at : geometry.index_at + 8 * geometry.samples].cast("q")
        self._marks = whole[fmt.LIVE_AT : fmt.LIVE_AT + 8 * fmt.LIVE_WORDS].cast("q")

    @classmethod
    def make(
        cls, limit: int, *, about: dict[str, Any], path: str | None = None, spill: SpillTo | None = None
    ) -> KeyedStore:
        """Make an empty one: see :meth:`Store.create`."""
        keys = min(max(limit // _BYTES_A_KEY, _FEWEST), _MOST)
        # A schema that hardly a value has: each is stored in a form of its own.
        schema = Schema.infer([None], keep_order=True)
        return cls.create(schema, keys, limit, about=about, path=path, spill=spill)

    @staticmethod
    def _address_space(schema: Schema, samples: int, limit: int) -> tuple[int, int]:
        # The limit may be raised later.
        return samples, max(limit, memory_limits.total()) // LINE

    # ---- reading -------------------------------------------------------------------------------------

    def get(self, sample: int, version: int, *, view: bool = False) -> Any:
        """A copy of a sample's value; ``MISSING`` if it is not here, or of another version.

        With ``view``, arrays may be read-only views of the store's memory, which stay valid.
        """
        clear_generation, word = self._marks[Live.CLEAR_GENERATION], self._words[sample]
        if word < PRESENT or clear_generation & 1 or self._marks[Live.INVALIDATED]:
            return MISSING
        if self.keys.version(sample) != version:
            return MISSING
        if word & ON_DISK or self.verification.verified is not None:
            return self._get_verified(sample, word)
        if self.segment.bounded:
            with self.participant.reading:
                body = self._copy(sample, word, clear_generation, False)
        else:
            body = self._copy(sample, word, clear_generation, view)
        if body is None:
            return MISSING
        self.keys.use(sample)
        try:
            return forms.unpack(body)
        except SegmentError as error:
            self._warn_unreadable(error)
            return MISSING

    def _copy(self, sample: int, word: int, clear_generation: int, view: bool) -> Any:
        """A copy of a record's body, or, if that is possible, a view of it; None if it changed meanwhile."""
        geometry, whole = self.segment.geometry, self._whole
        at = geometry.rows_at + sample * geometry.stride
        length, _, _, _, tail = fmt.RECORD_AND_TAIL.unpack_from(whole, at)
        first, count = fmt.split_tail(tail)
        size = length - (_STRIDE - RECORD_HEADER)
        # The header may be half of one record and half of another: it is believed if the word is the same.
        if self._words[sample] != word or not 0 <= size <= count * LINE or first + count > geometry.lines:
            return None
        start = geometry.lines_at + first * LINE
        there = whole[start : start + size]
        if view and forms.viewable(there):
            return there.toreadonly()
        body: Any
        if size < _LARGE:
            body = bytearray(there)
        else:
            body = np.empty(size, np.uint8)
            np.copyto(body, np.frombuffer(there, np.uint8))
        same = self._words[sample] == word and self._marks[Live.CLEAR_GENERATION] == clear_generation
        return body if same else None

    def _get_verified(self, sample: int, word: int) -> Any:
        """The value, by way of what verifies records and reads them from the spill."""
        ids = np.array([sample], np.int64)
        if not self.present(ids)[0]:
            return MISSING
        found = self.read(ids)
        if found is None or self._words[sample] != word:
            return MISSING
        self.keys.use(sample)
        return found[0]

    # ---- writing -------------------------------------------------------------------------------------

    def claim(self, sample: int, version: int) -> bool:
        """Claim a sample whose value is absent, or of another version; False if that cannot be done.

        It cannot if the value is there, if it is never kept, or if another process is computing it. The
        caller sees to it that no other thread of this process claims the same sample.
        """
        word = self._words[sample]
        if self.is_never_kept(sample) or (word >= PRESENT and self.keys.version(sample) == version):
            return False
        before = self.filler.claims.take_one(sample, overwrite=word >= PRESENT)
        if before is not None and before >= PRESENT and before & ON_DISK and self.spill is not None:
            self.spill.forget(sample)
        return before is not None

    def claim_new(self, key: bytes, function: int, may: Callable[[int], bool]) -> tuple[int, bool]:
        """Give a key a sample id, and claim it if the key is new: its id, and whether it is claimed.

        ``may`` says, given the id, whether this thread may claim it.
        """
        claimed = []

        def claim(sample: int) -> None:
            if self.filler.claims.word >= 0 and may(sample):
                self._words[sample] = self.filler.claims.word
                claimed.append(sample)

        sample = self.keys.add(key, function, claim)
        return sample, bool(claimed)

    def is_claimed(self, sample: int) -> bool:
        """Whether a sample's value is being computed, or was by a process that is dead."""
        return fmt.CLAIMED <= self._words[sample] < PRESENT

    def is_never_kept(self, sample: int) -> bool:
        """Whether a sample's value is never kept."""
        return DRAWS <= self._words[sample] < fmt.CLAIMED

    def never_keep(self, sample: int) -> None:
        """Note that a sample's value is never to be kept; this process has claimed it."""
        self.filler.claims.mark_drawing(np.array([sample], np.int64))

    def release(self, sample: int) -> None:
        """Give a claim back."""
        self.filler.claims.release(np.array([sample], np.int64))

    def put(self, sample: int, version: int, function: int, value: Any) -> bool:
        """Store the value of a claimed sample; False if there is no room: the claim is given back then.

        The value may be an :class:`~hotset.store.body_writer.Unfilled` one.

        Raises:
            SchemaMismatch: it cannot be stored; says why. The claim stays.
        """
        if self._words[sample] != self.filler.claims.word:
            return False
        unfilled = value if isinstance(value, Unfilled) else None
        if unfilled is not None:
            value = unfilled.value if unfilled.is_large else unfilled.filled()
        value = with_strides(value)
        size, whole = forms.pieces(value)
        pieces = unfilled.pieces(whole) if unfilled is not None and unfilled.is_large else whole
        self.keys.set_version(sample, version, function)
        with self.participant.thread_lock:
            given = self.allocator.reserve([sample], [-(-size // LINE)])
            try:
                if given and self._write(sample, given[0][1], size, pieces):
                    return True
            finally:
                self.allocator.settle()
        if unfilled is not None:
            unfilled.filled()
        return self.filler.spill(sample, forms.lay_out(value, self.schema.stride))

    def _write(self, sample: int, line: int, size: int, pieces: Iterable[memoryview]) -> bool:
        """Write a record and publish it; False if the file cannot be written.

        What :mod:`hotset.store.records` does for many records, for one: a third of the time.
        """
        geometry = self.segment.geometry
        lines, length = -(-size // LINE), _STRIDE - RECORD_HEADER + size
        row_at = geometry.rows_at + sample * _STRIDE
        before = fmt.RECORD_AND_TAIL.unpack_from(self._whole, row_at)[1] & fmt.GENERATION_MASK
        generation = fmt.next_generation(before, self._marks[Live.CLEAR_GENERATION])
        stamp = generation | OWN_STAMP
        row = memoryview(bytearray(_STRIDE))
        fmt.TAIL.pack_into(row, RECORD_HEADER, fmt.tail_word(line, lines))
        checksum = fmt.Checksum(sample, length, stamp, row[RECORD_HEADER:], size)
        with self.participant.reading:
            if self._marks[Live.CLEAR_GENERATION] & 1:
                return False
            try:
                self._bodies.write(geometry.lines_at + line * LINE, pieces, checksum)
                fmt.RECORD.pack_into(row, 0, length, stamp, checksum.value)
                self.segment.write(row, row_at)
            except OSError as error:
                return self.allocator.refuse(f"its file cannot be written ({error}); give it another place")
            self._words[sample] = PRESENT | stamp << fmt.GENERATION_SHIFT | sample
        counters = self.participant.row
        counters[Slot.STORED] += 1
        counters[Slot.STORED_BYTES] += lines * LINE
        return True

    def forget(self, function: int, samples: Ids | None = None) -> int:
        """Forget all values of a function, or those of these samples; returns how many.

        A value that is being computed is forgotten, too: nobody finds its sample by its key any more. Memory
        of which callers may have views is never used again.
        """
        with self.participant.short_lock():
            if samples is None:
                samples = np.arange(len(self.keys))
            samples = samples[self.keys.functions_of(samples) == function]
            words = self.segment.index[samples]
            samples, words = samples[words >= DRAWS], words[words >= DRAWS]
            if self.keys.flags(function) & VIEWED:
                self.keys.forget(samples)
                return len(samples)
            claimed = (words >= fmt.CLAIMED) & (words < PRESENT)
            self.keys.forget(samples[claimed])
            samples = samples[~claimed]
            if self.spill is not None:
                for sample in samples[self.segment.index[samples] & ON_DISK != 0].tolist():
                    self.spill.forget(sample)
            self.segment.index[samples] = 0
            self.segment.live[Live.KEYS_FREED] = 1
        return len(samples)

    def raise_limit(self, limit: int) -> None:
        """Let records take this many bytes, if that is more than they may take now."""
        with self.participant.short_lock():
            self.segment.live[Live.LIMIT] = max(int(self.segment.live[Live.LIMIT]), limit)
        self.allocator.reopen()

    def held(self, function: int) -> tuple[int, int]:
        """How many values of a function are here, and how many bytes their records in memory take."""
        index = self.segment.index[: len(self.keys)]
        samples = np.flatnonzero(index >= PRESENT)
        samples = samples[self.keys.functions_of(samples) == function]
        in_memory = samples[index[samples] & ON_DISK == 0]
        assert isinstance(self.allocator, KeyedAllocator)
        lines = int(self.allocator.tails_of(in_memory).sum())
        return len(samples), lines * LINE

    def check(self) -> list[str]:
        """Verify every record, every index word and every key; an empty list if all is well."""
        return [*super().check(), *self.keys.check()]
