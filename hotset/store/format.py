"""The format of a segment, byte by byte.

A segment is one sparse file: a memfd, or a file on a tmpfs or a disk. Address space is free, so each region
is as large as it could ever need to be, and memory is taken extent by extent.

::

    0                 header        4,096 B   see _HEADER; the metadata's CRC-32 at METADATA_CRC_AT; live
                                          words at LIVE_AT
    metadata_at       metadata      JSON: name, fingerprint, schema
    slots_at          slots         1,024 x 192 B, one for each process that attaches to write
    index_at          index         samples x 8 B
    rows_at           rows          rows x stride: the fixed part of each record
    lines_at          lines         lines x 256 B: the tails, each a run of lines
    keys_at           keys          in a keyed segment only: see :mod:`hotset.store.key_table`

Every region begins on a page. All integers are little-endian.

**Index word** (int64, aligned, so that a store or a load of it never tears)::

    0                                      absent
    00 | lap + 1                           absent, and reading it in that lap has failed (in a ring only)
    001 | lap + 1 (zero but in a ring)     absent, and draws random numbers: never stored, nor claimed
    01 | slot:13 | incarnation:48          claimed by the process that holds that slot
    1  | own | disk | generation:20 | row:40  present: in this segment, or in that on the disk; in the form
                                              that most samples have, or in one of its own

The two top bits below the sign say the state, so ``word >= PRESENT`` is one comparison for a whole batch,
and ``word & ROW_MASK`` is its row number.

**Record**: one row, ``stride`` bytes, and one run of lines, if it has a tail::

    +0   length      u32   bytes of the row and its tail that the checksum covers
    +4   stamp       u32   generation:20, and above that a zero and the bit ``own``, as in the index word
    +8   checksum    u32   over sample id, length, stamp, then row from +16, then tail
    +12  run         u32   lines of the run that the row owns, where records are written again; else zero
    +16  tail        u64   first line:40 | number of lines:24; zero without one
    ...  the dimensions of variable leaves (u32 each), then the fixed leaves; zeros up to the stride

In a record with a form of its own, the tail word is followed by a body that describes itself
(:mod:`hotset.store.irregular_records`). The bit ``own`` of the stamp says which of the two it is, and so the
checksum covers that too.

The checksum is a CRC-32 of sums: in each part, the whole pages are added up as 512 columns of u64 (modulo
2**64), and the CRC runs over the 4,096 bytes of the sums and over the rest of the part. It detects what
happens to memory and files (flipped bits, lost or stale pages, another record's bytes), but not two pages of
one record that have changed places. It costs a fifth of a CRC over everything (8 and 40 us for 150 KB).

The sample id is part of the checksum, so a damaged index word that points at another sample's record
is detected like a damaged record. A writer stores the record first and the index word last. x86-64 guarantees
that other processors see the stores in this order; on other processors every read is verified.

**Slot** (24 words): incarnation, the extents that its holder has reserved and not used up, and counters.
The incarnation counts the slot's holders, so that a claim of a dead one is not taken for its successor's.
A holder's extents pass to the next: room that a killed process had reserved is not lost. (Not so in a ring,
where the generation of a record is its lap, and the extents of a dead process are free:
:mod:`hotset.store.ring`.)

**Locks** are open-file-description locks on the file's own bytes. Byte 0 is the short lock, under which
processes take claims and extents. The process in slot k holds byte 1 + k for as long as it lives. Every
thread that reads records holds byte 2048, shared, if the segment is a file with a name.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import astuple, dataclass
from functools import cached_property
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from hotset.errors import SegmentError

__all__ = [
    "CLAIMED",
    "DESTROYED",
    "DRAWS",
    "FUNCTIONS",
    "FUNCTION_BYTES",
    "FUNCTION_WORDS",
    "GENERATION_MASK",
    "GENERATION_SHIFT",
    "HEADER_BYTES",
    "INCARNATION_MASK",
    "KEY_WORDS",
    "LINE",
    "LIVE_AT",
    "LIVE_WORDS",
    "METADATA_CRC_AT",
    "ON_DISK",
    "OWN_FORM",
    "OWN_STAMP",
    "PAGE",
    "PRESENT",
    "RECORD",
    "RECORD_AND_TAIL",
    "RECORD_HEADER",
    "ROW_MASK",
    "SLOTS",
    "SLOT_SHIFT",
    "SLOT_WORDS",
    "STAMP_MASK",
    "TAIL",
    "TAIL_COUNT_MASK",
    "Checksum",
    "Geometry",
    "Live",
    "Slot",
    "checksum",
    "next_generation",
    "pack_header",
    "split_tail",
    "tail_word",
    "unpack_header",
]

MAGIC = b"hotset\x00\x1a"
VERSION = 6
PAGE = 4096
HEADER_BYTES = PAGE
METADATA_CRC_AT = 256
LIVE_AT = 512
LIVE_WORDS = 24
LINE = 256
SLOTS = 1024
SLOT_WORDS = 24
RECORD_HEADER = 16
KEY_WORDS = 5
FUNCTIONS = 1024
FUNCTION_BYTES = 256
FUNCTION_WORDS = 8

PRESENT = 1 << 62
CLAIMED = 1 << 61
DRAWS = 1 << 60
ROW_MASK = (1 << 40) - 1
GENERATION_SHIFT = 40
GENERATION_MASK = (1 << 20) - 1
SLOT_SHIFT = 48
INCARNATION_MASK = (1 << 48) - 1
_TAIL_COUNT_BITS = 24
TAIL_COUNT_MASK = (1 << _TAIL_COUNT_BITS) - 1
ON_DISK = 1 << 60
OWN_FORM = 1 << 61
OWN_STAMP = OWN_FORM >> GENERATION_SHIFT
STAMP_MASK = GENERATION_MASK | OWN_STAMP

# magic, version, flags, samples, stride, rows, lines, metadata bytes, nonce; then the CRC of all that.
_HEADER = struct.Struct("<8sIIQQQQQ16s")
_KEYED = 1  # the only flag
_CRC = struct.Struct("<I")
RECORD = struct.Struct("<III4x")  # length, stamp, checksum
TAIL = struct.Struct("<Q")  # the tail word, behind that
RECORD_AND_TAIL = struct.Struct("<IIIIQ")  # length, stamp, checksum, run; tail word
_RECORD_PREFIX = struct.Struct("<QII")  # as long as a record's header
_RECORD_PREFIX_DTYPE = np.dtype([("sample", "<u8"), ("length", "<u4"), ("stamp", "<u4")])

_Longs = npt.NDArray[np.int64]
_Bytes = npt.NDArray[np.uint8]
_Words = TypeVar("_Words", int, npt.NDArray[np.int64])


class Live:
    """Positions of the header's live words, which change while the segment is used (int64 each)."""

    ROWS_NEXT = 0  # rows that slots have reserved so far
    LINES_NEXT = 1  # lines that slots have reserved so far
    LIMIT = 2  # bytes that extents may take
    CLEAR_GENERATION = 3  # counted up when a clear begins and ends: odd in between; the generation of records
    WARNED = 4  # 1 once the user was warned that samples stay uncached
    INVALIDATED = 5  # not 0: it serves nothing; 1: an audit found another record in the source; or DESTROYED
    WINDOW_EPOCH = 6  # how many epochs have begun, up to the one that the cursor belongs to
    WINDOW_CURSOR = 7  # how many samples have left it
    WINDOW_LATE = 8  # samples that were not ready at the boundary where they were due
    WARNED_LATE = 9  # 1 once the user was warned of that
    WINDOW_BEHIND = 10  # how many samples that were due have not come in yet
    FULL = 11  # 1 once room was refused, until a part of the limit is free again
    WINDOW_LOADS = 12  # how often a saved state was loaded
    CLEARS = 13  # of a cluster: how often its machines had to clear this cache, as far as is known
    WARNED_DRAWS = 14  # a number of the job whose user was warned last which samples draw random numbers
    FREED_IN_VAIN = 15  # 1 once freeing another cache's memory has given the control group no more room
    KEYS = 16  # of a keyed segment: how many sample ids were given to keys
    FUNCTIONS = 17  # of a keyed segment: how many functions are entered
    KEYS_FREED = 18  # of a keyed segment: 1 once records were forgotten, until no free run is long enough
    STREAM_PARTS = 19  # ranks << 16 | workers of the pass that records it; 0 before the first
    STREAM_DIFFERS = 20  # 1 once a pass gave other samples than were recorded
    STREAM_IDS = 21  # no sample id from here on is in use; 0: any may be
    STREAM_ALONE = 22  # 1 once it is known that no other rank records into this store


DESTROYED = 2  # in INVALIDATED: the cache's session was destroyed, or the cache was dropped


class Slot:
    """Positions of the words in a slot."""

    INCARNATION = 0
    PID = 1  # for debugging; no decision depends on it
    ROW_NEXT = 2
    ROW_END = 3
    LINE_NEXT = 4
    LINE_END = 5
    HITS = 6
    MISSES = 7
    STORED = 8
    FILL_NS = 10  # time spent in the source and its prefix
    STORED_BYTES = 11
    EPOCH = 12  # of a window: the epoch that its holder and its workers are in
    CURSOR = 13  # the window's cursor in that epoch
    WAIT_NS = 14  # time that its holder's training loop has waited for batches
    PEER_HITS = 15  # samples that other machines sent
    # 9 and 16 are free
    AUDITS = 17  # hits that were compared with what the source gives
    AUDIT_NS = 18  # time spent on that
    # Of a stream's part with this slot's number, whichever process holds the slot (see stream_parts):
    PART_KEPT = 19  # how many of its first samples are recorded
    PART_GIVEN = 20  # how many samples it has, as far as a pass has come
    PART_ENDED = 21  # bit 0: a pass has come to its end; above: why it is recorded no further
    PART_OWNER = 22  # the claim word of the process that records it
    PART_PASS = 23  # the pass that records it: the slot of the process that began it:13 | a random number:48


def _page_up(offset: int) -> int:
    return -(-offset // PAGE) * PAGE


@dataclass(frozen=True)
class Geometry:
    """Sizes of a segment's regions, and the offsets that follow from them.

    Attributes:
        samples: length of the index.
        stride: bytes of a row, a multiple of 8, at least 24.
        rows: number of rows there is address space for.
        lines: number of 256-byte lines there is address space for.
        metadata: bytes of the metadata.
        keyed: whether sample ids are given to keys as they come (:mod:`hotset.store.key_table`).
    """

    samples: int
    stride: int
    rows: int
    lines: int
    metadata: int
    keyed: bool = False

    @cached_property
    def slots_at(self) -> int:
        return HEADER_BYTES + _page_up(self.metadata)

    @cached_property
    def index_at(self) -> int:
        return self.slots_at + SLOTS * SLOT_WORDS * 8

    @cached_property
    def rows_at(self) -> int:
        return _page_up(self.index_at + 8 * self.samples)

    @cached_property
    def lines_at(self) -> int:
        return _page_up(self.rows_at + self.rows * self.stride)

    @cached_property
    def keys_at(self) -> int:
        return _page_up(self.lines_at + self.lines * LINE)

    @cached_property
    def counters_at(self) -> int:
        return self.keys_at + _page_up(8 * KEY_WORDS * self.samples)

    @cached_property
    def functions_at(self) -> int:
        return self.counters_at + SLOTS * FUNCTIONS * FUNCTION_WORDS * 8

    @cached_property
    def table_at(self) -> int:
        return self.functions_at + FUNCTIONS * FUNCTION_BYTES

    @cached_property
    def table_words(self) -> int:
        """Length of the hash table, which is at most half full: all its levels together."""
        return 2 << (2 * self.samples - 1).bit_length()

    @cached_property
    def size(self) -> int:
        return self.table_at + _page_up(4 * self.table_words) if self.keyed else self.keys_at

    def taken(self, rows: int, lines: int) -> int:
        """Bytes that this many rows and lines take of a limit; rows of a keyed segment count as its index."""
        return (0 if self.keyed else rows * self.stride) + lines * LINE


def pack_header(geometry: Geometry, nonce: bytes) -> bytes:
    """Return the header's fixed part, ready to be written at offset 0."""
    *sizes, keyed = astuple(geometry)
    fixed = _HEADER.pack(MAGIC, VERSION, _KEYED if keyed else 0, *sizes, nonce)
    return fixed + _CRC.pack(zlib.crc32(fixed))


def unpack_header(page: bytes, size: int, name: str) -> tuple[Geometry, bytes]:
    """Return geometry and nonce of a segment of ``size`` bytes.

    A header is used only if its checksum matches, and it contains no offsets: offsets follow from the sizes,
    and the last region must end exactly where the file does. So a forged header cannot make a reader look
    outside the mapping.

    Raises:
        SegmentError: it is not usable; the sentence names the segment and the reason.
    """

    def refuse(why: str) -> SegmentError:
        return SegmentError(f"{name} is not a usable hotset segment: {why}. `hotset gc` frees what is dead.")

    if len(page) < _HEADER.size + _CRC.size:
        raise refuse(f"it ends after {len(page)} bytes, inside the header")
    magic, version, flags, samples, stride, rows, lines, metadata, nonce = _HEADER.unpack_from(page)
    if magic != MAGIC:
        raise refuse("it does not begin with hotset's magic bytes")
    if _CRC.unpack_from(page, _HEADER.size)[0] != zlib.crc32(page[: _HEADER.size]):
        raise refuse("its header's checksum does not match")
    if version != VERSION:
        raise refuse(f"it has format version {version}, and this hotset reads version {VERSION}")
    geometry = Geometry(samples, stride, rows, lines, metadata, flags == _KEYED)
    if not (stride >= RECORD_HEADER + 8 and stride % 8 == 0 and rows <= ROW_MASK and lines <= ROW_MASK):
        raise refuse("its header names impossible sizes")
    if flags not in (0, _KEYED):
        raise refuse("its header has unknown flags")
    if geometry.size != size:
        raise refuse(f"its header says {geometry.size} bytes, and the file has {size}")
    return geometry, nonce


def tail_word(first: int, lines: int) -> int:
    """Return the word of a row that says where its tail lies."""
    return first << _TAIL_COUNT_BITS | lines


def split_tail(word: _Words) -> tuple[_Words, _Words]:
    """Return the tail's first line, and how many lines it has; of one word, or of an array of them.

    Example:
        >>> split_tail(tail_word(7, 3))
        (7, 3)
    """
    return word >> _TAIL_COUNT_BITS, word & TAIL_COUNT_MASK


def next_generation(before: int, clear_generation: int) -> int:
    """Return the generation of a record that is written over another; above zero, which is no record's.

    Args:
        before: the generation of the record that the row held; zero if it held none.
        clear_generation: of the segment: after a clear, rows begin at zero again.
    """
    return (max(before, clear_generation) + 1) & GENERATION_MASK or 1


def checksum(sample: int, length: int, stamp: int, row: memoryview, tail: memoryview | None) -> int:
    """Checksum of a record: its identity, its row from the record header on, and its tail."""
    crc = _checksum_of_part(row, zlib.crc32(_RECORD_PREFIX.pack(sample, length, stamp)))
    return _checksum_of_part(tail, crc) if tail is not None else crc


class Checksum:
    """As :func:`checksum`, of a record whose tail comes in spans.

    Attributes:
        value: the checksum, once the whole tail was added.
    """

    def __init__(self, sample: int, length: int, stamp: int, row: memoryview, tail_bytes: int) -> None:
        self.value = checksum(sample, length, stamp, row, None)
        whole = tail_bytes // PAGE * PAGE
        self._whole = whole if whole > PAGE else 0  # bytes that are summed up, not yet added
        self._sums: npt.NDArray[np.uint64] | None = np.zeros(PAGE // 8, np.uint64) if self._whole else None

    def add(self, span: memoryview) -> None:
        """Add the next bytes of the tail; whole pages but for the last time."""
        summed = min(len(span), self._whole)
        if summed:
            pages = np.frombuffer(span, "<u8", summed // 8).reshape(-1, PAGE // 8)
            self._sums += np.add.reduce(pages, axis=0)
            self._whole -= summed
        if not self._whole:
            if self._sums is not None:
                self.value = zlib.crc32(self._sums.data, self.value)
                self._sums = None
            self.value = zlib.crc32(span[summed:], self.value)


def checksums(
    samples: _Longs, lengths: _Longs, stamps: _Longs, rows: _Bytes, places: _Longs | slice = slice(None)
) -> list[int]:
    """Checksums of records without tails, as :func:`checksum` computes them, but with two calls for each.

    Args:
        samples, lengths, stamps: of each record.
        rows: uint8 of shape (rows, stride), record headers included.
        places: which rows are the records', in order; all if not given.
    """
    width = rows.shape[1] - RECORD_HEADER
    whole = width // PAGE * PAGE
    whole = whole if whole > PAGE else 0  # bytes that are summed up
    rest_at = RECORD_HEADER + (PAGE if whole else 0)
    # What the CRC runs over, side by side: prefix, sums, rest.
    covered = np.empty((len(samples), rest_at + width - whole), np.uint8)
    prefix = np.empty(len(samples), _RECORD_PREFIX_DTYPE)
    prefix["sample"], prefix["length"], prefix["stamp"] = samples, lengths, stamps
    covered[:, :RECORD_HEADER] = prefix.view(np.uint8).reshape(-1, RECORD_HEADER)
    covered[:, rest_at:] = rows[places, RECORD_HEADER + whole :]
    if whole:
        words = rows[:, RECORD_HEADER : RECORD_HEADER + whole].view("<u8")
        pages = words.reshape(len(rows), whole // PAGE, PAGE // 8)
        sums = covered[:, RECORD_HEADER:rest_at].view("<u8")
        # One by one: taken with an array of places, they would be copied.
        for number, place in enumerate(np.arange(len(rows))[places].tolist()):
            np.add.reduce(pages[place], axis=0, out=sums[number])
    flat, size = covered.reshape(-1).data, covered.shape[1]
    return [zlib.crc32(flat[start : start + size]) for start in range(0, len(flat), size)]


def _checksum_of_part(part: memoryview, crc: int) -> int:
    whole = len(part) // PAGE * PAGE
    if whole <= PAGE:
        return zlib.crc32(part, crc)
    pages = np.frombuffer(part, "<u8", whole // 8).reshape(-1, PAGE // 8)
    return zlib.crc32(part[whole:], zlib.crc32(np.add.reduce(pages, axis=0), crc))
