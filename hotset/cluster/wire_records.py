"""Records on their way between machines, and what two machines must agree on before one is sent.

They lie side by side, each as in its owner's segment (:mod:`hotset.store.format`). Both ends verify the
records that they receive before they use them: a checksum shows whether a record is what its writer wrote for
that very sample.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hotset.errors import ArgumentError
from hotset.store import format as fmt
from hotset.store.format import OWN_STAMP
from hotset.store.record_batch import RecordBatch

__all__ = [
    "ABSENT",
    "FULL",
    "PENDING",
    "TRUNCATED",
    "UNANSWERED",
    "Bytes",
    "CacheIdentity",
    "Longs",
    "WireRecords",
]

Bytes = npt.NDArray[np.uint8]
Longs = npt.NDArray[np.int64]

# In place of a generation:
ABSENT = -1  # the sample is not there
TRUNCATED = -2  # it is there, but the answer was full
PENDING = -3  # another process reads it
FULL = -4  # it is not there, and there is no room for it
UNANSWERED = -5  # the machine has not answered, or has no such cache; never sent


@dataclass(frozen=True)
class CacheIdentity:
    """What two machines must agree on about a cache before a record passes between them.

    Attributes:
        fingerprint: 16 bytes; of source, transforms and versions.
        layout: 16 bytes; of how a record is laid out.
        samples: length of the dataset.
        stride: bytes of a row.
        clears: how often the cluster had cleared it when what is asked for was begun; no part of what they
            agree on.

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
    clears: int = field(default=0, compare=False)

    def __post_init__(self) -> None:
        if len(self.fingerprint) != 16 or len(self.layout) != 16:
            raise ArgumentError(
                "a cache's fingerprint and layout must have 16 bytes each, got "
                f"{len(self.fingerprint)} and {len(self.layout)}."
            )

    @classmethod
    def of(cls, fingerprint: bytes, *, samples: int, stride: int, schema: Any) -> CacheIdentity:
        """Describe a cache; ``schema`` is of JSON's types."""
        said = json.dumps([fmt.VERSION, samples, stride, schema], sort_keys=True).encode()
        layout = hashlib.blake2b(said, digest_size=16).digest()
        return cls(fingerprint, layout, samples, stride)


class WireRecords(NamedTuple):
    """Records as they travel, or what became of a request for them.

    Attributes:
        generations: int64 for each sample asked for: of its record; or ``ABSENT``, ``TRUNCATED``,
            ``PENDING``, ``FULL``, ``UNANSWERED``. Of an answer to a put: of a sample that is stored, any.
        batch: records of the samples that are present, in the same order; an answer to a put has none.
    """

    generations: Longs
    batch: RecordBatch

    @classmethod
    def none(cls, count: int, stride: int, state: int = ABSENT) -> WireRecords:
        """No records: all of ``count`` samples are in this state."""
        nothing = np.empty(0, np.int64)
        return cls(np.full(count, state, np.int64), RecordBatch.new(bytearray, nothing, stride))

    @property
    def present(self) -> npt.NDArray[np.bool_]:
        """For each sample whether its record is here (of a put: whether it is stored)."""
        return self.generations >= 0

    def verified(self) -> WireRecords:
        """The records that are as their writers wrote them for these samples; the others are absent."""
        places = np.flatnonzero(self.present)
        stamps = self.generations[places] | self.batch.stamps & OWN_STAMP
        sound = self.batch.are_sound(stamps)
        if sound.all():
            return self
        generations = self.generations.copy()
        generations[places[~sound]] = ABSENT
        return WireRecords(generations, self.batch.only(sound))
