"""A store's service to other machines: it copies records out, and stores records that other machines send.

A record is sent with its row and its lines as they are. A received record is unpacked, and its sample is
written anew, as it gets another row, other lines, and so another checksum.

A client that asks with a claim reads the absent samples, alone in the whole cluster. So the service claims
these samples in the store on the client's behalf: other machines get the answer that they are pending, and
processes of this machine wait for them as they would for each other. A client may die, so its claim is a
lease: after `LEASE` seconds the next client that asks gets it.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from hotset.cluster.wire_records import (
    ABSENT,
    FULL,
    PENDING,
    TRUNCATED,
    Bytes,
    CacheIdentity,
    Longs,
    WireRecords,
)
from hotset.store.format import CLAIMED, DESTROYED, GENERATION_MASK, GENERATION_SHIFT, PRESENT, Live

if TYPE_CHECKING:  # these bring torch along
    from hotset.store.store import Store

__all__ = ["LEASE", "StoreService", "StoreServices", "cache_of"]

# Less than a process waits for a sample that another one reads: see hotset.store.fill.
LEASE = 1.5
# In place of a generation: the record is there, but is larger than an answer, so it cannot be sent.
_TOO_LARGE = -9
# Requests wait while a cache is cleared, so that takes no longer; a client whose clear failed asks again.
_CLEAR_SECONDS = 0.5


def cache_of(store: Store, fingerprint: bytes) -> CacheIdentity:
    """What machines must agree on about a store's cache."""
    schema = store.schema
    return CacheIdentity.of(fingerprint, samples=len(store), stride=schema.stride, schema=schema.to_json())


class StoreService:
    """One store as other machines see it; any thread may serve it.

    Attributes:
        store: the store that is served.
        cache: what other machines must agree on.
        asked: when another machine's process last asked for records or sent some, by the monotonic clock.
    """

    def __init__(self, store: Store, fingerprint: bytes) -> None:
        self.store = store
        self._leases: dict[int, float] = {}  # when each ends
        self._lock = threading.RLock()
        self.cache = cache_of(store, fingerprint)
        self.asked = time.monotonic()

    def take(self, ids: Longs, memory: Bytes, *, claim: bool = False) -> WireRecords:
        """Copy the records that are there now; those that ``memory`` has no room for are ``TRUNCATED``.

        Args:
            ids: sample ids, each in ``range(cache.samples)``.
            memory: one-dimensional; the records returned may lie in it.
            claim: the client will read and send the samples that are ``ABSENT`` in the answer; a sample that
                another client has claimed, and has not sent yet, is ``PENDING``. Without room in the store,
                nothing is claimed, and absent samples are ``FULL``.
        """
        self.asked = time.monotonic()
        with self._lock:
            found = self._take(ids, memory)
            self.end_leases()
            large = found.generations == _TOO_LARGE
            absent = found.generations == ABSENT
            if claim and absent.any():
                if self.store.clear_generation() is None or self.store.has_room():
                    found.generations[absent] = np.where(self._lease(ids[absent]), ABSENT, PENDING)
                else:
                    found.generations[absent] = FULL
            found.generations[large] = ABSENT
        return found

    def _lease(self, ids: Longs) -> npt.NDArray[np.bool_]:
        """Claim these samples; True for those that the client may read: claimed for it, or not claimable."""
        granted = self.store.filler.claims.take(ids, len(ids))
        until = time.monotonic() + LEASE
        self._leases.update((sample, until) for sample in granted.tolist())
        # A sample that was published this moment is pending, too: the client asks again, and gets it.
        return np.isin(ids, granted) | (self.store.words(ids) < CLAIMED)

    def end_leases(self, ids: Longs | None = None) -> None:
        """Give back the claims on these samples; without ``ids``, those whose time is over."""
        with self._lock:
            if ids is None:
                now = time.monotonic()
                over = [sample for sample, until in self._leases.items() if until < now]
            else:
                over = [sample for sample in ids.tolist() if sample in self._leases]
            # Before the leases are deleted: if this fails for want of descriptors, the next call does it.
            self.store.filler.claims.release(np.array(over, np.int64))
            for sample in over:
                del self._leases[sample]

    def _take(self, ids: Longs, memory: Bytes) -> WireRecords:
        store = self.store
        clear_generation = store.clear_generation()
        words = store.words(ids)
        found = WireRecords.none(len(ids), self.cache.stride)
        # Their places are looked at after the words: a clear in between shows in the clear generation.
        here = np.flatnonzero((words >= PRESENT) & store.present(ids))
        if clear_generation is None or not len(here):
            return found
        batch = store.copy_out(ids[here], words[here], clear_generation, memory)
        if batch is None:
            return found
        fits = len(batch.ids)
        found.generations[here] = words[here] >> GENERATION_SHIFT & GENERATION_MASK
        found.generations[here[fits:]] = TRUNCATED
        if not fits:  # the first record alone is too large, and would be asked for again forever
            found.generations[here[0]] = _TOO_LARGE
        return found._replace(batch=batch)

    @property
    def clears(self) -> int:
        """How many of the cluster's clears of this cache this store has carried out."""
        return int(self.store.segment.live[Live.CLEARS])

    def clear(self, clears: int) -> bool:
        """Forget every record; False if some process is still writing, so that the client has to retry.

        Args:
            clears: how often the cluster has cleared this cache, this time included; becomes :attr:`clears`.
        """
        with self._lock:
            self.end_leases(np.fromiter(self._leases, np.int64))  # a clear waits for readers
            if self.store.segment.live[Live.INVALIDATED] == DESTROYED:
                return True  # the store is empty for good, and its leases have ended
            return self.store.clear(_CLEAR_SECONDS, clears=clears)

    def put(self, ids: Longs, records: WireRecords, clears: int) -> npt.NDArray[np.bool_]:
        """Store sound records that another machine has sent; returns which samples are in the store now.

        A sample that a process of this machine is reading counts as stored. The records' memory need be valid
        during the call only. They are not stored if the cache was cleared since that machine had carried out
        so many ``clears``.
        """
        self.asked = time.monotonic()
        store = self.store
        generation = store.clear_generation()  # before the number of clears
        there = records.present & (generation is not None) & (clears >= self.clears)
        if not there.any():
            self.end_leases(ids)  # the client that had claimed them will not send them
            return there
        with self._lock:
            # Under the claims that were made for the client that sends them.
            store.insert(records.batch.samples(store.schema, decode=False), generation)
            self.end_leases(ids)
        # What is claimed, a process of this machine is reading: it stores the sample in a moment.
        here = store.present(ids) | (store.words(ids) >= CLAIMED)
        return here & there & (store.clear_generation() is not None)


class StoreServices(dict[bytes, StoreService]):
    """Caches that are served, by fingerprint. The serving thread looks at it, and another one adds to it."""

    def __init__(self) -> None:
        super().__init__()
        self._retired: list[StoreService] = []

    def add(self, service: StoreService) -> None:
        """Serve this one from now on."""
        self[service.cache.fingerprint] = service

    def end_leases(self) -> None:
        """Give back all claims whose leases are over."""
        for service in list(self.values()):
            service.end_leases()

    def drop(self, fingerprint: bytes) -> None:
        """Stop serving this one."""
        if fingerprint in self:
            self._retired.append(self.pop(fingerprint))

    def retire(self) -> None:
        """Stop serving all of them. Another thread may be using one, so none is closed yet."""
        self._retired += self.values()
        self.clear()

    def close(self) -> None:
        """Stop serving, and detach from all stores; the serving thread has ended."""
        self.retire()
        for service in self._retired:
            service.store.close()
        self._retired.clear()
