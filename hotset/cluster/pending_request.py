"""Tickets: a request that was sent to a peer, and its answer once somebody waits for it.

Nothing of an answer is believed. What is none of this request is a failure of the peer; a record that is
damaged, or another sample's, is absent, and counted.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from hotset.cluster import protocol as messages
from hotset.cluster.peer_stats import PeerStats
from hotset.cluster.protocol import Head, Malformed, Operation, Status
from hotset.cluster.wire_records import (
    LEFT,
    PROMISED,
    ROOMLESS,
    Bytes,
    CacheIdentity,
    Longs,
    WireRecords,
    only,
    sound,
)
from hotset.store.format import LINE

__all__ = ["Answer", "Asked", "PendingRequest"]

T = TypeVar("T")


class Asked(Protocol):
    """Whom a ticket is of: a :class:`hotset.cluster.client.Peer`, which is told what its answer was like."""

    name: str
    traffic: PeerStats

    def look(self, timeout: float) -> None: ...

    def fail(self, why: str) -> None: ...

    def wrong(self, count: int) -> None: ...

    def refuses(self, status: Status, cache: CacheIdentity) -> None: ...

    def well(self, seconds: float, cache: CacheIdentity) -> None: ...


class Answer(NamedTuple):
    """What became of a request.

    Attributes:
        present: bool for each sample: its record is there, verified. (Of a put: it is stored.)
        left: bool for each sample: the peer has it, but the answer was full; ask for it again.
        promised: bool for each sample: another one reads it now, and will bring it.
        roomless: bool for each sample: it is absent, and the peer has no room for it.
        answered: whether the peer has answered at all, and has this cache.
        lines: int64 for each sample: of its tail; 0 unless it is present.
        rows: uint8 of shape (present samples, stride), in their order; read-only, as are the tails.
        tails: uint8 of shape (sum of lines, 256).
    """

    present: npt.NDArray[np.bool_]
    left: npt.NDArray[np.bool_]
    promised: npt.NDArray[np.bool_]
    roomless: npt.NDArray[np.bool_]
    answered: bool
    lines: Longs
    rows: Bytes
    tails: Bytes


class PendingRequest:
    """A request that was sent, or was not; see :meth:`wait`."""

    def __init__(self, peer: Asked, cache: CacheIdentity, ids: Longs, operation: Operation) -> None:
        self._peer, self.cache, self.ids, self.operation = peer, cache, ids, operation
        self._pid = os.getpid()
        self._asked_at = time.monotonic()
        self.frames: Sequence[memoryview] | None = None
        self.head: Head | None = None
        self.is_lost = False

    @property
    def name(self) -> str:
        """Of the peer."""
        return self._peer.name

    @property
    def is_refused_for_now(self) -> bool:
        """Whether the peer has answered that it is busy: it may be asked again at once."""
        return self.head is not None and self.head.status is Status.BUSY

    def wait(self, deadline: float) -> Answer:
        """Wait for the answer, and verify its records.

        Args:
            deadline: of :func:`time.monotonic`. The peer has failed if it passes.
        """
        found = self._answered(deadline, self._parse)
        if found is None:
            return self._nothing()
        if self.operation is Operation.PUT:
            stored, roomless = found.generations >= 0, found.generations == ROOMLESS
            self._peer.traffic.stored += int(np.count_nonzero(stored))
            return self._nothing()._replace(present=stored, roomless=roomless, answered=True)
        return self._verified(found)

    def words(self, deadline: float) -> Longs | None:
        """Wait for the words that answer words; None if there are none.

        Args:
            deadline: see :meth:`wait`.
        """
        return self._answered(deadline, self._parse_words)

    def _answered(self, deadline: float, parse: Callable[[Head, Sequence[memoryview]], T]) -> T | None:
        peer = self._peer
        if self._pid != os.getpid():
            self.is_lost = True
        while self.frames is None and not self.is_lost:
            left = deadline - time.monotonic()
            peer.look(max(left, 0.0))
            if left <= 0 and self.frames is None and not self.is_lost:
                self.is_lost = True
                peer.fail("has not answered in time")
        if self.frames is None or self.head is None:
            return None
        frames, self.frames, self.is_lost = self.frames, None, True
        if self.head.status not in (Status.OK, Status.MALFORMED):
            peer.refuses(self.head.status, self.cache)
            return None
        try:
            if self.head.status is not Status.OK:
                raise Malformed(self.head.status.sentence)
            said = (self.head.operation, self.head.fingerprint, self.head.layout)
            if said != (self.operation, self.cache.fingerprint, self.cache.layout):
                raise Malformed("answers what it was not asked")
            found = parse(self.head, frames)
        except Malformed as error:
            peer.fail(str(error))
            return None
        peer.well(time.monotonic() - self._asked_at, self.cache)
        return found

    def _parse(self, head: Head, frames: Sequence[memoryview]) -> WireRecords:
        if head.samples != len(self.ids):
            raise Malformed("answers what it was not asked")
        return messages.parse_records(head, frames[1:], self.cache, bare=self.operation is Operation.PUT)

    def _parse_words(self, head: Head, frames: Sequence[memoryview]) -> Longs:
        return messages.parse_words(head, frames[1:])

    def _verified(self, records: WireRecords) -> Answer:
        """The sound ones of these records: nothing else ever reaches the caller."""
        left, promised, roomless = (records.generations == state for state in (LEFT, PROMISED, ROOMLESS))
        present = sound(self.cache, self.ids, records)
        wrong = int(np.count_nonzero((records.generations >= 0) & ~present))
        if wrong:
            self._peer.wrong(wrong)
            records = only(records, present)
        self._peer.traffic.received += int(np.count_nonzero(present))
        self._peer.traffic.bytes += records.rows.nbytes + records.tails.nbytes
        return Answer(present, left, promised, roomless, True, records.lines, records.rows, records.tails)

    def _nothing(self) -> Answer:
        count = len(self.ids)
        no, lines = np.zeros(count, np.bool_), np.zeros(count, np.int64)
        rows, tails = np.empty((0, self.cache.stride), np.uint8), np.empty((0, LINE), np.uint8)
        return Answer(no, no, no, no, False, lines, rows, tails)
