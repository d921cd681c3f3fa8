"""The remote cache: this process's way to those samples of a cache that other machines own.

Each sample has an owner among the machines (:mod:`hotset.cluster.membership`), whose memory keeps it. A batch
gets its missing samples from their owners (:mod:`hotset.cluster.batch_fetch`). The next batch's can be asked
for ahead (:meth:`RemoteCache.prefetch`), and come while this one is trained on. Asking ahead claims nothing:
a sample that is absent then is asked for again, with a claim, when it is needed.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from dataclasses import replace
from functools import partial
from multiprocessing.util import Finalize
from typing import Any, NamedTuple

import numpy as np

from hotset.cluster.batch_fetch import BatchFetch, Fetched
from hotset.cluster.client import Peer, PendingRequest, SessionPeers
from hotset.cluster.membership import PATIENCE
from hotset.cluster.peer_stats import PeerStats
from hotset.cluster.store_service import cache_of
from hotset.cluster.wire_records import CacheIdentity, Longs
from hotset.errors import SegmentError
from hotset.store.fill import Read
from hotset.store.format import PRESENT, Live
from hotset.store.store import Store

__all__ = ["RemoteCache"]

_CLEAR_SECONDS, _AGAIN_SECONDS = 10.0, 0.1
# Batches that are asked for before they are wanted.
_AHEAD = 4
_ESTIMATE, _ESTIMATE_SECONDS = 4000, 1.0

_beginning = threading.Lock()  # in a forked child, which has threads of its own


def _after_fork_in_child() -> None:
    global _beginning
    _beginning = threading.Lock()  # a thread of the parent may hold it


os.register_at_fork(after_in_child=_after_fork_in_child)


class _Ahead(NamedTuple):
    """Requests that were sent ahead of use, and the store's clear generation at that time."""

    clear_generation: int | None
    requests: list[PendingRequest]


class RemoteCache:
    """The other machines of a session, as this process uses them for one cache; it pickles.

    Its methods are given this machine's part of the cache, ``store``.

    Args:
        number: of the session on this machine.
        fingerprint: of the cache, 16 bytes.
        replicate: keep here, as far as there is room, what others have sent.
    """

    def __init__(self, number: int, fingerprint: bytes, *, replicate: bool) -> None:
        self._number, self._fingerprint, self._replicate = number, fingerprint, replicate
        self._begin()

    def _begin(self) -> None:
        """Make what belongs to one process."""
        self._lock = threading.Lock()
        self._peers = SessionPeers(self._number)
        self._cache: CacheIdentity | None = None
        self._ahead: dict[bytes, _Ahead] = {}  # by the ids of a batch
        self._estimated = (float("-inf"), 0.0)
        # A loader's worker ends without collecting garbage: what it counted last would be lost.
        Finalize(None, _count_up, (weakref.ref(self),), exitpriority=0)
        self._pid = os.getpid()  # last: another thread that sees it uses the rest

    def __reduce__(self) -> Any:
        return partial(RemoteCache, replicate=self._replicate), (self._number, self._fingerprint)

    def fetch(self, store: Store, ids: Longs, read: Read) -> Fetched:
        """Get the samples that this machine lacks, but for those that it has to read and keep itself.

        Raises:
            Whatever ``read``, the source and its prefix, raises, untouched.
        """
        missing = self._missing(store, ids)
        if not len(missing) or store.clear_generation() is None:
            return Fetched()
        with self._turn():
            self._peers.refresh()
            if self._peers.membership is None:
                return Fetched()
            try:
                generation = store.clear_generation()  # before the number of clears
                ahead = self._ahead.pop(ids.tobytes(), _Ahead(None, []))
                # Answers to requests from before a clear may hold what the clear removed.
                asked = ahead.requests if ahead.clear_generation == generation else []
                return self._batch_fetch(store, generation, read).run(missing, asked)
            finally:
                self._peers.count()

    def pass_on(self, store: Store, samples: dict[int, Any], generation: int | None) -> bool:
        """Send samples for which this machine has no room to others; whether all of them are kept now.

        Args:
            generation: the clear generation in which they were read.
        """
        if store.why_full is None:
            return False
        with self._turn():
            self._peers.refresh()
            if self._peers.membership is None:
                return False
            ids = np.fromiter(samples, np.int64)
            ids = ids[store.words(ids) < PRESENT]
            fetch = self._batch_fetch(store, generation, samples.__getitem__)
            if store.clear_generation() != generation:  # asked after the number of clears
                return False
            return fetch.pass_on({sample: samples[sample] for sample in ids.tolist()})

    def _batch_fetch(self, store: Store, generation: int | None, read: Read) -> BatchFetch:
        keeps = partial(self._keeps, store)
        return BatchFetch(self._peers, self._cache_now(store), store, generation, read, keeps)

    def prefetch(self, store: Store, ids: Longs) -> None:
        """Ask for those samples of a coming batch that this machine lacks; returns at once.

        The ids must be those of one batch, as :meth:`fetch` will be given them.
        """
        missing = self._missing(store, ids)
        if not len(missing) or store.clear_generation() is None or self._pid != os.getpid():
            return
        with self._turn():
            self._peers.refresh()
            if self._peers.membership is None or ids.tobytes() in self._ahead:
                return
            clear_generation, cache = store.clear_generation(), self._cache_now(store)
            requests = self._peers.ask(cache, self._peers.known.others(missing))
            self._ahead[ids.tobytes()] = _Ahead(clear_generation, requests)
            while len(self._ahead) > _AHEAD:  # an epoch was left before its end
                del self._ahead[next(iter(self._ahead))]

    @staticmethod
    def _missing(store: Store, ids: Longs) -> Longs:
        words = store.words(ids)
        if len(words) and int(np.minimum.reduce(words)) >= PRESENT:
            return ids[:0]  # the common answer, which every batch asks for
        missing: Longs = np.unique(ids[store.index.missing(ids)])
        return missing

    def troubles(self) -> list[tuple[str, str]]:
        """Sentences about machines that failed since the last call, each with the machine's name."""
        found: list[tuple[str, str]] = []
        while self._peers.troubles:
            found.append(self._peers.troubles.pop(0))
        return found

    def traffic(self) -> dict[str, PeerStats]:
        """What passed between this machine and each other one, for all caches of the session; by name."""
        if self._pid == os.getpid():
            self._peers.count(now=True)
        return self._peers.traffic()

    def _turn(self) -> threading.Lock:
        """The lock of the thread that uses the sockets, in this process."""
        if self._pid != os.getpid():
            with _beginning:
                if self._pid != os.getpid():
                    self._begin()
        return self._lock

    # ---- all of it -----------------------------------------------------------------------------------

    def clear(self, store: Store, name: str) -> None:
        """Make all other machines forget their parts of the cache; ``name`` is the dataset's, for people.

        Raises:
            SegmentError: some machines have not confirmed that they have.
        """
        deadline = time.monotonic() + _CLEAR_SECONDS
        with self._turn():
            self._peers.refresh()
            gone = self._peers.gone()
            kept = self._cleared(self._peers.by_name, store, deadline)
            last = deadline - PATIENCE  # an answer is to come in time
            while (busy := [peer for peer, again in kept.items() if again]) and time.monotonic() < last:
                time.sleep(_AGAIN_SECONDS)  # in which they serve others
                peers = {peer: self._peers.by_name[peer] for peer in busy}
                for peer in busy:
                    del kept[peer]
                kept |= self._cleared(peers, store, deadline)
        away = [*kept, *gone]
        if away:
            raise SegmentError(
                f"{name} is cleared here, but {', '.join(away)} may still have a part of it, until the "
                "clear reaches them; call clear() again to be certain."
            )

    def _cleared(self, peers: dict[str, Peer], store: Store, deadline: float) -> dict[str, bool]:
        """Ask these machines to clear it; returns those that have not, and whether to ask each again."""
        clears = int(store.segment.live[Live.CLEARS])
        asked = {name: peer.clear(self.cache(store), clears) for name, peer in peers.items()}
        return {
            name: request.is_refused_for_now
            for name, request in asked.items()
            if request.words(deadline) is None
        }

    # ---- of this cache -------------------------------------------------------------------------------

    def cache(self, store: Store) -> CacheIdentity:
        """What machines must agree on about the cache."""
        if self._cache is None:
            self._cache = cache_of(store, self._fingerprint)
        return self._cache

    def _cache_now(self, store: Store) -> CacheIdentity:
        """The same, with the number of clears, for what is asked and sent from now on."""
        return replace(self.cache(store), clears=int(store.segment.live[Live.CLEARS]))

    def _keeps(self, store: Store, count: int) -> bool:
        """Whether to keep this many records that other machines sent: in memory that is left over.

        What this machine owns, and lacks, comes first.
        """
        if not self._replicate or store.allocator.why_full is not None:
            return False
        mean = store.stored_bytes / max(1, int((store.segment.index >= PRESENT).sum()))
        # A sixteenth is left to extents that are not full, and to samples larger than the mean.
        room = self._peers.capacity * 15 / 16 - store.stored_bytes
        return mean * (count + self._owned_and_missing(store)) <= room

    def _owned_and_missing(self, store: Store) -> float:
        """About how many samples this machine owns and lacks: an estimate, made now and then."""
        now = time.monotonic()
        if now - self._estimated[0] > _ESTIMATE_SECONDS:
            total = len(store)
            ids = np.arange(total)
            if total > _ESTIMATE:
                ids = np.random.default_rng().integers(total, size=_ESTIMATE)
            missing = ids[store.index.missing(ids)]
            others = sum(len(some) for _, some in self._peers.known.others(missing))
            self._estimated = now, (len(missing) - others) / len(ids) * total
        return self._estimated[1]

    def close(self) -> None:
        """Close all connections of this process."""
        if self._pid == os.getpid():
            self._peers.close()
        self._ahead = {}


def _count_up(of: weakref.ref[RemoteCache]) -> None:
    remote = of()
    if remote is not None:
        remote.traffic()
