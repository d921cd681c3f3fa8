"""Statistics of a cache: what it holds and has served."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from hotset.cluster.peer_stats import PeerStats
from hotset.store.claims import Ids
from hotset.store.format import ON_DISK, PRESENT, Live, Slot
from hotset.store.store import Store

__all__ = ["Stats", "stats_of"]


@dataclass(frozen=True)
class Stats:
    """What a cache holds and has served so far, over all processes that use it.

    Attributes:
        cached: samples in the cache; with a window, residents in the cache.
        uncached: samples of the dataset, or residents of the window, that are not.
        spilled: samples of ``cached`` that lie on disk.
        bytes: bytes of the cached records.
        hits: samples served from the cache.
        misses: samples read from the source.
        fill_seconds: time spent in the source and the cached transforms, summed over processes.
        peer_hits: samples served from other machines' memory to processes of this one.
        peers: the traffic between this machine and each other one, for all caches of the session: by name,
            :class:`~hotset.cluster.peer_stats.PeerStats`.
        audited: hits that were read again from the source and compared.
        late: samples that were not ready at the boundary where they should have entered the window.
        replaced: samples that have left the window, as this process sees it.
    """

    cached: int
    uncached: int
    spilled: int
    bytes: int
    hits: int
    misses: int
    fill_seconds: float
    late: int = 0
    replaced: int = 0
    peer_hits: int = 0
    peers: Mapping[str, PeerStats] = field(default_factory=dict, hash=False)
    audited: int = 0

    @property
    def hit_rate(self) -> float:
        """Share of the samples served that came from the cache, 0 to 1; 0 before the first."""
        hits = self.hits + self.peer_hits
        served = hits + self.misses
        return hits / served if served else 0.0

    @property
    def audit_rate(self) -> float:
        """Share of the hits that were audited, 0 to 1; 0 before the first."""
        hits = self.hits + self.peer_hits
        return self.audited / hits if hits else 0.0

    def to_dict(self) -> dict[str, Any]:
        """All statistics as JSON types: the attributes, ``hit_rate`` and ``audit_rate``.

        Each of ``peers`` is a dictionary.

        Example:
            >>> stats = Stats(cached=3, uncached=1, spilled=0, bytes=96, hits=3, misses=1, fill_seconds=0.5)
            >>> stats.to_dict()["hit_rate"]
            0.75
        """
        peers = {name: asdict(traffic) for name, traffic in self.peers.items()}
        numbers = {each.name: getattr(self, each.name) for each in fields(self)}
        return {**numbers, "peers": peers, "hit_rate": self.hit_rate, "audit_rate": self.audit_rate}


def stats_of(
    store: Store, used: int, entries: Ids | None, peers: Mapping[str, PeerStats], replaced: int = 0
) -> Stats:
    """The statistics of a store.

    Args:
        used: the number of samples that an epoch uses.
        entries: their sample ids, with a window; None for all.
        peers: the traffic between machines.
    """
    words = store.segment.used_index if entries is None else store.words(entries)
    cached = int((words >= PRESENT).sum())
    sums = store.segment.slots.sum(axis=0).tolist()
    return Stats(
        cached=cached,
        uncached=used - cached,
        spilled=int((words[words >= PRESENT] & ON_DISK != 0).sum()),
        bytes=store.stored_bytes,
        hits=sums[Slot.HITS],
        misses=sums[Slot.MISSES],
        fill_seconds=sums[Slot.FILL_NS] / 1e9,
        late=int(store.segment.live[Live.WINDOW_LATE]),
        replaced=replaced,
        peer_hits=sums[Slot.PEER_HITS],
        peers=peers,
        audited=sums[Slot.AUDITS],
    )
