"""Neighbours: this process's way to those samples of a cache that other machines own.

Each sample has an owner among the machines (:mod:`hotset.policy.placement`), whose memory keeps it. Of the
samples of a batch that are not in this machine's memory::

    owned here          left to the store: claimed, read, kept                      (Store.fill)
    owned elsewhere     asked for, of all owners at once, one request each:
      present           verified, copied, given out; kept here too with `replicate`
      absent            this process has promised to bring it: read here, and put to its owner
      promised          by another one, who reads it: waited for, after all else is done
      no answer         read here, and kept nowhere

Where the roster has changed, a sample's former owner is asked before the source is read: so a machine that
joins gets its share from its neighbours.

Nothing here raises but what reading the source does. Every wait is bounded: an answer's by the machine's
patience (:class:`hotset.cluster.roster.Member`), and that for what others promised by `PATIENCE`.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from multiprocessing.util import Finalize
from typing import Any

import numpy as np

from hotset.cluster.asking import Answer, Peer, Peers, Ticket
from hotset.cluster.messages import LARGEST, MOST, Cache, Longs
from hotset.cluster.packing import pack, unpack
from hotset.cluster.roster import PATIENCE, Member, Roster, RosterFile
from hotset.cluster.tally import Tally, read_tally
from hotset.cluster.traffic import Rest, Traffic
from hotset.errors import SegmentError
from hotset.policy.placement import Placement
from hotset.store.format import PRESENT, Slot
from hotset.store.schema import Schema
from hotset.store.store import Store

__all__ = ["Neighbours"]

Read = Callable[[int], Any]

_SHORTEST_PAUSE, _LONGEST_PAUSE = 2e-3, 50e-3
# What is brought to others at once: they are written down while the next samples are read.
_PUT_BYTES = 4 << 20
_PUTS = 8
_CLEAR_SECONDS = 10.0
_ESTIMATE, _ESTIMATE_SECONDS = 4000, 1.0


class _Owners:
    """Who owns what, among some machines."""

    def __init__(self, me: str, members: tuple[Member, ...]) -> None:
        self._me, self._names = me, [member.name for member in members]
        capacities = [member.capacity for member in members]
        self._placement = Placement(self._names, capacities) if any(capacities) else None

    def others(self, ids: Longs) -> list[tuple[str, Longs]]:
        """The machines but this one that own some of these samples, by name, and which."""
        if self._placement is None:
            return []
        owners = self._placement.owners(ids)
        numbers = [number for number in np.unique(owners).tolist() if self._names[number] != self._me]
        return [(self._names[number], ids[owners == number]) for number in numbers]


class Neighbours:
    """The other machines of a session, as this process uses them for one cache; it pickles.

    Args:
        number: of the session on this machine.
        fingerprint: of the cache, 16 bytes.
        replicate: keep here, as far as there is room, what others have sent.
    """

    def __init__(self, number: int, fingerprint: bytes, *, replicate: bool = False) -> None:
        self._number, self._fingerprint, self._replicate = number, fingerprint, replicate
        self._begin()

    def _begin(self) -> None:
        """What belongs to one process."""
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._file = RosterFile(self._number)
        self._roster: Roster | None = None  # what the following is made of
        self._owners: _Owners | None = None
        self._former: _Owners | None = None
        self._peers: Peers | None = None
        self._known: dict[str, Peer] = {}
        self._cache: Cache | None = None
        self._full: dict[str, Rest] = {}
        self._estimated = (float("-inf"), 0.0)
        self._tally = Tally(self._number)
        # A worker ends without collecting anything: what it has counted last would be lost.
        Finalize(None, _count_up, (weakref.ref(self),), exitpriority=0)

    def __reduce__(self) -> Any:
        return _restored, (self._number, self._fingerprint, self._replicate)

    @property
    def roster(self) -> Roster | None:
        """Which machines there are, as far as this one knows; None before it was told."""
        return self._file.current()

    def bring(self, store: Store, ids: Longs, read: Read) -> dict[int, Any]:
        """The samples of these that other machines own and this one has not got, each the caller's own.

        Args:
            store: this machine's part of the cache.
            ids: sample numbers.
            read: the source and its prefix.

        Raises:
            Whatever ``read`` raises, untouched.
        """
        missing = np.unique(ids[store.words(ids) < PRESENT])
        if not len(missing) or store.era() is None:
            return {}
        if self._pid != os.getpid():
            self._begin()
        with self._lock:
            self._look()
            if self._owners is None:
                return {}
            try:
                return _Errand(self, store, read).run(missing, self._owners.others(missing))
            finally:
                self._tally.add(self._traffics())

    def _traffics(self) -> dict[str, Traffic]:
        return {name: peer.traffic for name, peer in self._known.items()}

    def traffic(self) -> dict[str, Traffic]:
        """What passed between this machine and each other one, for all caches of the session; by name."""
        if self._pid == os.getpid():
            self._tally.add(self._traffics(), now=True)
        with contextlib.suppress(OSError):
            return read_tally(self._number)
        return {}

    def clear(self, store: Store, name: str) -> None:
        """Have all other machines forget their parts of the cache.

        Args:
            store: this machine's part.
            name: of the data set, for people.

        Raises:
            SegmentError: some have not said that they have.
        """
        if self._pid != os.getpid():
            self._begin()
        with self._lock:
            self._look()
            asked = [(name, peer.clear(self.cache(store))) for name, peer in self._known.items()]
            begun = time.monotonic()
            kept = [peer for peer, ticket in asked if not ticket.wait(begun + _CLEAR_SECONDS).answered]
        if kept:
            raise SegmentError(
                f"{name} is cleared here, but {', '.join(kept)} may still have a part of it; call clear() "
                "again once they answer, or end the session: `hotset cluster stop`."
            )

    # ---- who is there --------------------------------------------------------------------------------

    def _look(self) -> None:
        """See who owns what; peers are made for machines that have come, and closed for those that left."""
        roster = self._file.current()
        if roster is None or self._roster is roster:
            return
        if self._peers is None or self._roster is None or self._roster.keys != roster.keys:
            if self._peers is not None:
                self._peers.close()
            self._peers, self._known = Peers(roster.keys), {}
        there = {member.name: member for member in roster.members if member.name != roster.me}
        for name in [name for name in self._known if name not in there]:
            del self._known[name]
            self._peers.remove(name)
        for name, member in there.items():
            known = self._known.get(name)
            if known is None or known.endpoint != member.endpoint:
                self._tally.add(self._traffics(), now=known is not None)
                self._known[name] = self._peers.add(name, member.endpoint, member.key.encode())
        self._roster, self._owners = roster, _Owners(roster.me, roster.members)
        self._former = _Owners(roster.me, roster.former) if roster.former else None

    def former(self, ids: Longs) -> list[tuple[str, Longs]]:
        """Who owned these samples before the roster changed, as far as they are still there, and not this."""
        owners = self._former.others(ids) if self._former is not None and len(ids) else []
        return [(name, some) for name, some in owners if name in self._known]

    def peer(self, name: str) -> Peer:
        """The machine of this name, which is in the roster."""
        return self._known[name]

    def patience(self, name: str) -> float:
        """Seconds that an answer of this machine is waited for."""
        assert self._roster is not None
        return next((m.patience for m in self._roster.members if m.name == name), PATIENCE)

    def cache(self, store: Store) -> Cache:
        """The cache, as machines must agree on it."""
        if self._cache is None:
            schema = store.schema
            self._cache = Cache.of(
                self._fingerprint,
                samples=len(store),
                stride=schema.stride,
                has_tail=schema.has_tail,
                schema=schema.to_json(),
            )
        return self._cache

    def is_full(self, name: str) -> bool:
        """Whether a machine had no room for records a moment ago."""
        rest = self._full.get(name)
        return rest is not None and rest.lasts

    def note_full(self, name: str, full: bool) -> None:
        """Note whether a machine had room for what was brought to it."""
        if full:
            self._full.setdefault(name, Rest()).begin()
        else:
            self._full.pop(name, None)

    def keep(self, store: Store, samples: dict[int, Any]) -> None:
        """Keep what others sent where memory is left over: what this machine owns, and lacks, comes first."""
        if not self._replicate or not samples or store.room.why_full is not None:
            return
        mean = store.stored_bytes / max(1, int((store.segment.index >= PRESENT).sum()))
        # A sixteenth is left to extents that are not full, and to samples larger than the mean.
        room = self._capacity * 15 / 16 - store.stored_bytes
        if mean * (len(samples) + self._owned_and_missing(store)) <= room:
            store.adopt(samples)

    def _owned_and_missing(self, store: Store) -> float:
        """About how many samples this machine owns and has not got: an estimate, made now and then."""
        now = time.monotonic()
        if now - self._estimated[0] > _ESTIMATE_SECONDS:
            assert self._owners is not None
            total = len(store)
            ids = np.arange(total)
            if total > _ESTIMATE:
                ids = np.random.default_rng().integers(total, size=_ESTIMATE)
            missing = ids[store.words(ids) < PRESENT]
            others = sum(len(some) for _, some in self._owners.others(missing))
            self._estimated = now, (len(missing) - others) / len(ids) * total
        return self._estimated[1]

    @property
    def _capacity(self) -> int:
        assert self._roster is not None
        return next((m.capacity for m in self._roster.members if m.name == self._roster.me), 0)

    def close(self) -> None:
        """Close all connections of this process."""
        if self._peers is not None and self._pid == os.getpid():
            self._tally.add(self._traffics(), now=True)
            self._peers.close()
        self._peers, self._roster, self._known = None, None, {}


def _restored(number: int, fingerprint: bytes, replicate: bool) -> Neighbours:
    return Neighbours(number, fingerprint, replicate=replicate)


def _count_up(of: weakref.ref[Neighbours]) -> None:
    neighbours = of()
    if neighbours is not None:
        neighbours.traffic()


class _Errand:
    """One batch's way around the neighbours."""

    def __init__(self, neighbours: Neighbours, store: Store, read: Read) -> None:
        self._all, self._store, self._read = neighbours, store, read
        self._cache = neighbours.cache(store)
        self._schema: Schema = store.schema
        self._found: dict[int, Any] = {}
        self._puts: list[tuple[str, Ticket]] = []

    def run(self, missing: Longs, owned: list[tuple[str, Longs]]) -> dict[int, Any]:
        """Get the samples that these machines own; and this one's, from who owned them before."""
        promised = self._ask(owned)
        self._fetch_home(np.setdiff1d(missing, [sample for _, ids in owned for sample in ids.tolist()]))
        waited = time.monotonic() + PATIENCE
        pause = _SHORTEST_PAUSE
        while promised:
            if time.monotonic() > waited:
                for _, some in promised:
                    self._read_here(None, some)
                break
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
            promised = self._ask(promised)
        self._settle()
        return self._found

    def _ask(self, owned: list[tuple[str, Longs]]) -> list[tuple[str, Longs]]:
        """Ask all owners at once; read what is nobody's yet. Returns what others have promised."""
        asked = [
            (name, self._all.peer(name).ask(self._cache, part, claim=not self._all.is_full(name)))
            for name, ids in owned
            for part in self._parts(ids)
        ]
        begun = time.monotonic()
        promised: list[tuple[str, Longs]] = []
        absent: list[tuple[str | None, Longs]] = []
        while asked:
            again = []
            for name, ticket in asked:
                answer = ticket.wait(begun + self._all.patience(name))
                self._give_out(ticket.ids, answer)
                if answer.left.any():
                    left = self._all.peer(name).ask(self._cache, ticket.ids[answer.left], claim=True)
                    again.append((name, left))
                if answer.promised.any():
                    promised.append((name, ticket.ids[answer.promised]))
                rest = ticket.ids[~(answer.present | answer.left | answer.promised)]
                if len(rest):
                    absent.append((name if answer.answered else None, rest))
            asked = again
        for owner, ids in absent:
            self._read_here(owner, self._not_moved(owner, ids))
        return promised

    def _parts(self, ids: Longs) -> Iterator[Longs]:
        """Requests that one answer has room for."""
        most = max(1, min(MOST, LARGEST // self._cache.stride))
        for start in range(0, len(ids), most):
            yield ids[start : start + most]

    def _give_out(self, ids: Longs, answer: Answer) -> None:
        """Take the samples of an answer."""
        if not answer.present.any():
            return
        there = ids[answer.present].tolist()
        samples = unpack(self._schema, answer.lines[answer.present], answer.rows, answer.tails)
        came = dict(zip(there, samples, strict=True))
        self._found.update(came)
        counters = self._store.member.row
        counters[Slot.PEER_HITS] += len(came)
        self._all.keep(self._store, came)

    def _fetch_home(self, ids: Longs) -> None:
        """Get what this machine owns, and has not had so far, from who owned it before."""
        self._not_moved(None, ids)
        self._store.adopt({sample: self._found[sample] for sample in ids.tolist() if sample in self._found})

    def _not_moved(self, owner: str | None, ids: Longs) -> Longs:
        """Those of these samples that their former owners have not got either; the others are brought on."""
        asked = [(name, self._all.peer(name).ask(self._cache, some)) for name, some in self._all.former(ids)]
        begun = time.monotonic()
        for name, ticket in asked:
            self._give_out(ticket.ids, ticket.wait(begun + self._all.patience(name)))
        came = {sample: self._found[sample] for sample in ids.tolist() if sample in self._found}
        if owner is not None and came and not self._all.is_full(owner):
            self._put(owner, came)
        return np.array([sample for sample in ids.tolist() if sample not in came], np.int64)

    def _read_here(self, owner: str | None, ids: Longs) -> None:
        """Read samples from the source, and bring them to their owner if it is there."""
        brings = owner is not None and not self._all.is_full(owner)
        samples: dict[int, Any] = {}
        size = 0
        counters = self._store.member.row
        try:
            for sample in ids.tolist():
                start = time.perf_counter_ns()
                self._found[sample] = value = self._read(sample)
                counters[Slot.FILL_NS] += time.perf_counter_ns() - start
                counters[Slot.MISSES] += 1
                samples[sample] = value
                size += self._cache.stride
                if brings and size >= _PUT_BYTES:
                    self._put(owner, samples)
                    samples, size = {}, 0
        finally:
            if brings and samples:
                self._put(owner, samples)

    def _put(self, owner: str | None, samples: dict[int, Any]) -> None:
        """Bring samples to their owner, without waiting for it."""
        assert owner is not None
        ids, records = pack(self._schema, samples)
        if len(ids):
            self._settle(_PUTS - 1)
            self._puts.append((owner, self._all.peer(owner).put(self._cache, ids, records)))

    def _settle(self, left: int = 0) -> None:
        """Wait until what was brought is there, but for the last so many."""
        begun = time.monotonic()
        while len(self._puts) > left:
            owner, ticket = self._puts.pop(0)
            answer = ticket.wait(begun + self._all.patience(owner))
            if answer.answered:
                self._all.note_full(owner, not answer.present.any())
