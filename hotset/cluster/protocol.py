"""The messages between machines, byte by byte, and nothing that sends them.

A message is one run of bytes. All integers are little-endian, and the length of each part follows from what
was read before it: a message of another length is refused with a reason. ::

    get        header | ids                                     sample ids, i64 each
    claim      the same; the client will read and send the absent samples
    clear      header | a word, i64: how often, by now          forget all
    put        header | ids | entries | rows | tails
    key        header                                           over CURVE: credentials for a connection
    answer     header | entries | rows | tails                  of a put: header | entries; of a clear: it;
                                                                of a key: header | credentials
    refusal    header                                           with a status other than OK

    header     +0   magic        8 B
               +8   version      u16
               +10  operation    u8    1 get, 2 put, 3 claim, 4 clear, 5 key; 0x80 is set in answers
               +11  status       u8    of an answer; 0 in a request
               +12  count        u32   of samples, or words
               +16  number       u64   of the request, which its answer repeats
               +24  fingerprint  16 B  of the cache
               +40  layout       16 B  digest of schema, stride, samples and the segment's format
               +56  clears       u64   of a request: see below; 0 in others

    entry      +0   state:2 | generation:20, u32     0 absent, 1 present, 2 truncated: answer full, 3 pending
                    absent, with 1 for a generation: and there is no room for it
               +4   lines, u32                       of its tail

A *row* is a record's row as it lies in the sender's segment (:mod:`hotset.store.format`), header and checksum
included; a *tail* its run of 256-byte lines. Rows of present records lie side by side in the order of the
ids, and so do the tails, which begin at a multiple of 64 bytes after the first row: zeros fill the bytes
between. A row's head says at which line its tail begins **in the sender's segment**: a store that stores the
record elsewhere writes its own line there, and a new checksum.

The checksum travels with each record and covers the sample id, so that a record sent for another sample
is found like a damaged one. It does not protect against forgery; keys do.

ZeroMQ sends a message as one frame. (Of several frames, libzmq 4.3.5 ends the whole process if a connection
is closed at both ends with some of them sent, as where all ranks end together: its issue 3442.) What earlier
versions sent begins with a frame that is the header, so it is enough to look at the first one.

*Clears* is how often the cluster had cleared the cache, as the client knew when it began what it asks for. A
machine that has cleared it less often does so before it answers, and one that has cleared it more often takes
no records: so nothing from before a clear comes back from a machine that the clear has not reached yet.

The first 24 bytes stay what they are in every version, so that a sentence can name another version.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np

from hotset.cluster.wire_records import ABSENT, FULL, PENDING, TRUNCATED, CacheIdentity, Longs, WireRecords
from hotset.errors import ArgumentError
from hotset.store.format import GENERATION_MASK, TAIL_COUNT_MASK
from hotset.store.record_batch import RecordBatch

__all__ = [
    "LARGEST",
    "LONGEST",
    "MOST",
    "Head",
    "Malformed",
    "Operation",
    "Status",
    "answer",
    "clear",
    "get",
    "key",
    "key_answer",
    "parse_head",
    "parse_ids",
    "parse_records",
    "parse_words",
    "parts",
    "put",
    "records_at",
    "refusal",
    "refusal_of",
    "words_answer",
]

Message = memoryview | bytes

MAGIC = b"hotpeer\x1a"
VERSION = 4
_MOST_CLEARS = 1 << 32

_HEADER = struct.Struct("<8sHBBIQ16s16sQ")
_ANSWERS = 0x80
_STATE_SHIFT = 30
_WORD = _ENTRY = 8

# Samples of one message; bytes of its rows, and of its tails; bytes of all of it.
MOST = 1 << 16
LARGEST = 64 << 20
LONGEST = _HEADER.size + MOST * (_WORD + _ENTRY) + 2 * LARGEST


class Malformed(ValueError):
    """A malformed message; says why, as the end of a sentence that begins with the sending machine."""


class Operation(IntEnum):
    """What a request asks for: records; to keep some; some, and to promise others; to forget all; a key."""

    GET, PUT, CLAIM, CLEAR, KEY = 1, 2, 3, 4, 5


class Status(IntEnum):
    """How a request was met."""

    OK, UNKNOWN, LAYOUT, BUSY, MALFORMED, FAILED = range(6)

    @property
    def sentence(self) -> str:
        """The end of a sentence that begins with the machine that gave this status."""
        return _SENTENCES[self]


_SENTENCES = {
    Status.OK: "has answered",
    Status.UNKNOWN: "has no cache of this fingerprint: its data, transforms or library versions differ",
    Status.LAYOUT: "lays the samples of this cache out in another way",
    Status.BUSY: "has too many requests waiting",
    Status.MALFORMED: "does not understand what this process asks",
    Status.FAILED: "could not get at its own records",
}


class Head(NamedTuple):
    """What a message's header says."""

    operation: Operation
    status: Status
    samples: int
    number: int
    fingerprint: bytes
    layout: bytes
    clears: int = 0


# ---- writing: messages in parts, to be joined ----------------------------------------------------------


def parts(cache: CacheIdentity, ids: Longs) -> Iterator[Longs]:
    """Divide sample ids into parts whose rows fit into one message each."""
    most = max(1, min(MOST, LARGEST // cache.stride))
    for start in range(0, len(ids), most):
        yield ids[start : start + most]


def get(number: int, cache: CacheIdentity, ids: Longs, operation: Operation = Operation.GET) -> list[Any]:
    """Ask for these samples' records; see :class:`Operation`.

    Raises:
        ArgumentError: for more than ``MOST`` of them.
    """
    _fit(ids)
    return [_header(operation, 0, len(ids), number, cache), _little(ids)]


def put(number: int, cache: CacheIdentity, ids: Longs, records: WireRecords) -> list[Any]:
    """Send these samples' records.

    Raises:
        ArgumentError: more than ``MOST`` of them, or rows or tails of more than ``LARGEST`` bytes.
    """
    _fit(ids, max(records.batch.rows.nbytes, records.batch.tails.nbytes))
    header = _header(Operation.PUT, 0, len(ids), number, cache)
    return [header, _little(ids), _entries(records), *records.batch.parts]


def clear(number: int, cache: CacheIdentity, said: Longs) -> list[Any]:
    """Have a cache cleared; ``said`` is one word, see the module's table."""
    return [_header(Operation.CLEAR, 0, len(said), number, cache), _little(said)]


def key(number: int) -> list[Any]:
    """Ask for the credentials of a connection."""
    return [_HEADER.pack(MAGIC, VERSION, Operation.KEY, 0, 0, number, bytes(16), bytes(16), 0)]


def key_answer(head: Head, said: bytes) -> list[Any]:
    """Give the credentials of a connection."""
    return [*refusal(head, Status.OK), said]


def words_answer(head: Head, cache: CacheIdentity, said: Longs) -> list[Any]:
    """Answer a clear, with the word that it said."""
    return [_header(head.operation | _ANSWERS, 0, len(said), head.number, cache), _little(said)]


def answer(head: Head, cache: CacheIdentity, records: WireRecords) -> list[Any]:
    """Answer a request; of a put, ``records`` says what was taken, and has no rows."""
    header = _header(head.operation | _ANSWERS, 0, head.samples, head.number, cache)
    return [header, _entries(records), *records.batch.parts]


def records_at(samples: int) -> int:
    """At which byte of an answer about so many samples the rows begin."""
    return _HEADER.size + samples * _ENTRY


def refusal(head: Head, status: Status) -> list[Any]:
    """Refuse a request."""
    said = (MAGIC, VERSION, head.operation | _ANSWERS, status, 0, head.number, head.fingerprint, head.layout)
    return [_HEADER.pack(*said, 0)]


def _fit(ids: Longs, size: int = 0) -> None:
    if len(ids) > MOST or size > LARGEST:
        raise ArgumentError(
            f"one message must have at most {MOST:,} samples, and {LARGEST:,} bytes of rows or of tails, got "
            f"{len(ids):,} samples and {size:,} bytes; divide it into several messages."
        )


def _header(operation: int, status: int, count: int, number: int, cache: CacheIdentity) -> bytes:
    clears = 0 if operation & _ANSWERS else cache.clears
    said = (operation, status, count, number, cache.fingerprint, cache.layout, clears)
    return _HEADER.pack(MAGIC, VERSION, *said)


def _little(values: Longs) -> memoryview:
    return np.ascontiguousarray(values, "<i8").view(np.uint8).data


def _entries(records: WireRecords) -> bytes:
    entries = np.zeros((len(records.generations), 2), "<u4")
    present, batch = records.present, records.batch
    entries[present, 0] = records.generations[present] | 1 << _STATE_SHIFT
    for word, generation in ((2 << _STATE_SHIFT, TRUNCATED), (3 << _STATE_SHIFT, PENDING), (1, FULL)):
        entries[records.generations == generation, 0] = word
    if len(batch.ids):
        entries[present, 1] = batch.lines
    return entries.tobytes()


# ---- reading: nothing is believed ----------------------------------------------------------------------


def parse_head(message: Message, *, answers: bool) -> tuple[Head, Message]:
    """Read the header of a request, or of what answers one; returns what follows it, too.

    Raises:
        Malformed: it is not a header.
    """
    if len(message) < _HEADER.size or message[: len(MAGIC)] != MAGIC:
        raise Malformed("has sent something that is not a message of hotset's")
    said = _HEADER.unpack_from(message)
    _, version, operation, status, count, number, fingerprint, layout, clears = said
    if version != VERSION:
        raise Malformed(
            f"uses version {version} of hotset's messages, and this process uses version {VERSION}; "
            "install the same hotset on all machines"
        )
    if bool(operation & _ANSWERS) != answers or operation & ~_ANSWERS not in set(Operation):
        raise Malformed(f"has sent a message with the unknown operation {operation:#x}")
    if status not in set(Status) or (status and not answers):
        raise Malformed(f"has sent a message with the unknown status {status}")
    if count > MOST:
        raise Malformed(f"has sent a message with {count:,} samples, where {MOST:,} are allowed")
    if clears > (0 if answers else _MOST_CLEARS):
        raise Malformed(f"has sent a header that tells of {clears:,} clears")
    operation = Operation(operation & ~_ANSWERS)
    head = Head(operation, Status(status), count, number, fingerprint, layout, clears)
    return head, message[_HEADER.size :]


def parse_ids(head: Head, body: Message, cache: CacheIdentity) -> tuple[Longs, Message]:
    """Read the sample ids of a request; returns what follows them, too: nothing, unless it is a put.

    Raises:
        Malformed: they are not ``head.samples``, or not samples of this cache.
    """
    size = head.samples * _WORD
    rest = body[size:]
    if len(body) < size or (len(rest) and head.operation is not Operation.PUT):
        raise Malformed(f"has sent {len(body) / _WORD:g} sample ids, where its header says {head.samples}")
    ids = np.frombuffer(body[:size], "<i8")
    if head.samples and (int(ids.min()) < 0 or int(ids.max()) >= cache.samples):
        raise Malformed(f"has sent a sample id outside this cache, which has {cache.samples:,} samples")
    return ids, rest


def parse_words(head: Head, body: Message) -> Longs:
    """Read what follows the header of a message that is nothing but words.

    Raises:
        Malformed: they are not ``head.samples``.
    """
    if len(body) != head.samples * _WORD:
        raise Malformed(f"has sent a message without the {head.samples} words that its header says")
    return np.frombuffer(body, "<i8")


def parse_records(
    head: Head, said: Message, ids: Longs, cache: CacheIdentity, *, bare: bool = False
) -> WireRecords:
    """Read entries, rows and tails; views of the message, to be verified (:meth:`WireRecords.verified`).

    Args:
        said: the message, from its entries on.
        ids: of the samples that it is about, ``head.samples``.
        cache: whose records they are.
        bare: whether it is a put's answer, which has neither rows nor tails.

    Raises:
        Malformed: it has not as many entries as its header says, or another length than these say.
    """
    size = head.samples * _ENTRY
    rest = said[size:]
    if len(said) < size or (bare and len(rest)):
        raise Malformed(f"has sent {len(said) / _ENTRY:g} entries, where its header says {head.samples}")
    entries = np.frombuffer(said[:size], "<u4").reshape(head.samples, 2).astype(np.int64)
    states, lines = entries[:, 0] >> _STATE_SHIFT, entries[:, 1]
    generations = entries[:, 0] & ((1 << _STATE_SHIFT) - 1)
    present = states == 1
    if (generations > np.array([1, GENERATION_MASK, 0, 0])[states]).any():
        raise Malformed("has sent an entry that is not valid")
    full = generations * (states == 0) * (FULL - ABSENT)
    if (lines > TAIL_COUNT_MASK * present).any():
        raise Malformed("has sent an entry with a tail for a record that has none")
    generations = np.where(present, generations, np.array([ABSENT, 0, TRUNCATED, PENDING])[states] + full)
    if bare:
        return WireRecords.none(0, cache.stride)._replace(generations=generations)

    def of_size(size: int) -> Message:
        if len(rest) != size:
            raise Malformed(f"has sent {len(rest):,} bytes of records, where its entries say {size:,}")
        return rest

    batch = RecordBatch.new(of_size, ids[present], cache.stride, lines[present])
    return WireRecords(generations, batch._replace(block=None))


def refusal_of(message: Message) -> list[Any] | None:
    """Refuse a message that was malformed; None where it has not even a header's size."""
    if len(message) < _HEADER.size:
        return None
    *_, number, fingerprint, layout, _ = _HEADER.unpack_from(message)
    return refusal(Head(Operation.GET, Status.OK, 0, number, fingerprint, layout), Status.MALFORMED)
