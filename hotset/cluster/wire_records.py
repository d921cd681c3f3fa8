"""Records on their way between machines, and what two machines must agree on before one is sent.

They lie side by side, each as in its owner's segment (:mod:`hotset.store.format`). A received record is
verified before it is used: it is *sound* if its checksum shows that it is what its writer wrote for that very
sample.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hotset.errors import ArgumentError
from hotset.store import format as fmt
from hotset.store.format import LINE, OWN_STAMP, RECORD_HEADER, split_tail

__all__ = [
    "ABSENT",
    "FULL",
    "PENDING",
    "TRUNCATED",
    "Bytes",
    "CacheIdentity",
    "Longs",
    "WireRecords",
    "only",
    "sound",
]

Bytes = npt.NDArray[np.uint8]
Longs = npt.NDArray[np.int64]

# In place of a generation:
ABSENT = -1  # the sample is not there
TRUNCATED = -2  # it is there, but the answer was full
PENDING = -3  # another process reads it
FULL = -4  # it is not there, and there is no room for it


@dataclass(frozen=True)
class CacheIdentity:
    """What two machines must agree on about a cache before a record passes between them.

    Attributes:
        fingerprint: 16 bytes; of source, transforms and versions.
        layout: 16 bytes; of how a record is laid out.
        samples: length of the dataset.
        stride: bytes of a row.

    Example:
        >>> one = CacheIdentity.of(bytes(16), samples=10, stride=64, schema={"kind": "tensor"})
        >>> other = CacheIdentity.of(bytes(16), samples=10, stride=72, schema={"kind": "tensor"})
        >>> one.layout == other.layout
        False
    """

    fingerprint: bytes
    layout: bytes
    samples: int
    stride: int

    def __post_init__(self) -> None:
        if len(self.fingerprint) != 16 or len(self.layout) != 16:
            raise ArgumentError(
                "a cache's fingerprint and layout must have 16 bytes each, got "
                f"{len(self.fingerprint)} and {len(self.layout)}."
            )

    @classmethod
    def of(cls, fingerprint: bytes, *, samples: int, stride: int, schema: Any) -> CacheIdentity:
        """Describe a cache; ``schema`` is of JSON's types."""
        said = json.dumps([fmt.VERSION, samples, stride, schema, False], sort_keys=True).encode()
        layout = hashlib.blake2b(said, digest_size=16).digest()
        return cls(fingerprint, layout, samples, stride)


class WireRecords(NamedTuple):
    """Records side by side, as they travel.

    Attributes:
        generations: int64 for each sample asked for: of its record; or ``ABSENT``, ``TRUNCATED``,
            ``PENDING``, ``FULL``.
        lines: int64 for each sample: of its record's tail; 0 where there is none.
        rows: uint8 of shape (records present, stride).
        tails: uint8 of shape (sum of lines, 256).
    """

    generations: Longs
    lines: Longs
    rows: Bytes
    tails: Bytes


def sound(cache: CacheIdentity, ids: Longs, records: WireRecords) -> npt.NDArray[np.bool_]:
    """Which of these samples' records are there, as their writer wrote them: length, stamp, checksum.

    Args:
        cache: whose records they are.
        ids: the samples that were asked for.
        records: what came.

    Returns:
        For each sample whether its record is there and sound.
    """
    found = records.generations >= 0
    if not found.any():
        return found
    heads = np.ascontiguousarray(records.rows[:, :12]).view("<u4").astype(np.int64)
    lengths, stamps = heads[:, 0], heads[:, 1]
    lines = records.lines[found]
    tail_bytes = lengths - (cache.stride - RECORD_HEADER)
    spare = lines * LINE - tail_bytes
    fits = (
        (stamps & ~OWN_STAMP == records.generations[found])
        & (_tails(records) == lines)  # the row and the answer must give the tail the same length
        & (tail_bytes >= 0)
        & (spare >= 0)
        & (spare < LINE)
    )
    if not lines.any():
        fits &= np.array(fmt.checksums(ids[found], lengths, stamps, records.rows)) == heads[:, 2]
        found[found] = fits
        return found
    row_at = 0
    starts = (np.cumsum(lines) - lines) * LINE
    rows, tails = records.rows.reshape(-1).data, records.tails.reshape(-1).data
    said = zip(ids[found].tolist(), heads.tolist(), tail_bytes.tolist(), starts.tolist(), strict=True)
    for number, (sample, (length, stamp, crc), size, start) in enumerate(said):
        if fits[number]:
            row = rows[row_at + RECORD_HEADER : row_at + cache.stride]
            tail = tails[start : start + size] if size else None
            fits[number] = fmt.checksum(sample, length, stamp, row, tail) == crc
        row_at += cache.stride
    found[found] = fits
    return found


def _tails(records: WireRecords) -> Longs:
    """How many lines each row says that its tail has."""
    words = np.ascontiguousarray(records.rows[:, RECORD_HEADER : RECORD_HEADER + 8]).view("<i8")[:, 0]
    return split_tail(words)[1]


def only(records: WireRecords, keep: npt.NDArray[np.bool_]) -> WireRecords:
    """The records of some of the samples; the others are absent.

    Args:
        records: of all of them.
        keep: for each sample whether its record, which is there, is kept.
    """
    found = records.generations >= 0
    generations = np.where(keep | ~found, records.generations, ABSENT)
    lines = np.where(keep, records.lines, 0)
    if keep[found].all():
        return records
    return WireRecords(
        generations,
        lines,
        records.rows[keep[found]],
        records.tails[np.repeat(keep, records.lines)],
    )
