"""Fetch one batch's missing samples from their owners.

::

    owned here          left to the store: claimed, read, kept                      (Store.fill)
    owned elsewhere     all owners are asked at once; the answer for a sample is
      present           the record is verified, and returned as it was received
      absent            this process has claimed the sample: it reads it, and sends it to its owner
      pending           another process reads the sample: this one waits for it, after all other samples
      full              absent, and its owner has no room for it: the next machine in order is asked
      no answer         read here, and kept nowhere

A sample that this machine owns, and has no room for, is treated alike, from the next machine in order on.
After the membership has changed, a sample's former owner is asked before the source is read: so a machine
that joins gets its share from the other machines.

No exceptions are raised except those of reading the source. Every wait is bounded: for an answer by the
machine's patience (:class:`hotset.cluster.membership.Member`), for a sample that another process is reading
by `PATIENCE`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from hotset.cluster.client import PendingRequest, SessionPeers
from hotset.cluster.membership import PATIENCE, Owned
from hotset.cluster.protocol import LARGEST, MOST
from hotset.cluster.wire_records import (
    ABSENT,
    FULL,
    PENDING,
    TRUNCATED,
    UNANSWERED,
    CacheIdentity,
    Longs,
    WireRecords,
)
from hotset.store import irregular_records as forms
from hotset.store.fill import Read
from hotset.store.format import LINE, PRESENT, Slot
from hotset.store.leaves.leaf import SchemaMismatch
from hotset.store.leaves.schema import Schema
from hotset.store.locks import Pauses
from hotset.store.record_batch import RecordBatch
from hotset.store.records import lay_out
from hotset.store.store import Store

__all__ = ["BatchFetch", "Fetched", "pack"]


_PAUSES = 2e-3, 50e-3  # seconds: the first one, and the longest
# How many bytes of rows go to a machine in one put: it stores them while this process reads on; and how many
# puts may be unanswered.
_PUT_BYTES = 4 << 20
_PUTS = 8


class Fetched:
    """The result of a fetch.

    Attributes:
        records: sound records, as other machines have sent them.
        read: samples that were read from the source, by sample id.
        unkept: whether none of the machines that were asked has room for some sample.
    """

    def __init__(self) -> None:
        self.records: list[RecordBatch] = []
        self.read: dict[int, Any] = {}
        self.unkept = False

    def ids(self) -> Longs:
        """The ids of all of these samples."""
        read = np.fromiter(self.read, np.int64)
        return np.concatenate([read, *(records.ids for records in self.records)])


class _Waiting(NamedTuple):
    """Samples that another process reads: the machine to ask, and how far after their owner it is."""

    name: str
    ids: Longs
    turn: int


class _Put(NamedTuple):
    """Samples on their way to a machine, which is ``turn`` places after their owner."""

    samples: dict[int, Any]
    turn: int
    request: PendingRequest


class BatchFetch:
    """One fetch of a batch's missing samples.

    Args:
        peers: the other machines; no other thread asks them meanwhile.
        cache: as machines agree on it.
        generation: of this machine's part, from before the number of clears that ``cache`` tells the others;
            what they send is kept here in no other.
        keeps: whether this many records that others sent are kept here.
    """

    def __init__(
        self,
        peers: SessionPeers,
        cache: CacheIdentity,
        store: Store,
        generation: int | None,
        read: Read,
        keeps: Callable[[int], bool],
    ) -> None:
        self._peers, self._cache, self._store, self._read = peers, cache, store, read
        self._keeps = keeps
        self._generation = generation
        self._schema: Schema = store.schema
        self._got = Fetched()
        self._puts: list[_Put] = []

    def run(self, missing: Longs, asked: list[PendingRequest]) -> Fetched:
        """Get the samples that other machines own, and those of this one's own that it has no room for.

        Args:
            missing: the samples, ascending.
            asked: requests for some of them that were sent ahead.
        """
        for _ in self._answers(asked):
            pass
        missing = missing[np.isin(missing, self._got.ids(), invert=True)]
        owned = self._peers.known.others(missing)
        waiting = self._ask(owned)
        home = np.setdiff1d(missing, np.concatenate([missing[:0], *(ids for _, ids in owned)]))
        home = self._fetch_home(home)
        if len(home) and not self._store.has_room():
            waiting += self._ask_further(home, 1)
        pauses = Pauses(PATIENCE, *_PAUSES)
        while waiting:
            if not pauses.pause():
                for each in waiting:  # and put to that machine, which keeps the first to come
                    self._read_here(each.name, each.ids, each.turn)
                break
            waiting = [
                later
                for turn in sorted({each.turn for each in waiting})
                for later in self._ask([(each.name, each.ids) for each in waiting if each.turn == turn], turn)
            ]
        self._settle()
        return self._got

    def pass_on(self, samples: dict[int, Any]) -> bool:
        """Send samples to the machines that come after this one; whether all of them are kept now."""
        self._put_further(samples, 1)
        self._settle()
        return not self._got.unkept

    # ---- asking --------------------------------------------------------------------------------------

    def _ask(self, owned: list[Owned], turn: int = 0) -> list[_Waiting]:
        """Ask these machines at once, and read the samples that no process has claimed.

        Returns the samples that other processes are reading.

        Args:
            owned: machines, and what each is asked for.
            turn: how far after the samples' owners these come.
        """
        waiting: list[_Waiting] = []
        absent: list[tuple[str | None, Longs]] = []
        refused = [np.empty(0, np.int64)]
        for request, answer in self._answers(self._peers.ask(self._cache, owned, claim=True), claim=True):
            name = request.name
            pending, full, lacking, unanswered = (
                request.ids[answer.generations == state] for state in (PENDING, FULL, ABSENT, UNANSWERED)
            )
            if len(pending):
                waiting.append(_Waiting(name, pending, turn))
            refused.append(full)
            absent += [each for each in ((name, lacking), (None, unanswered)) if len(each[1])]
        for owner, ids in absent:
            self._read_here(owner, self._not_moved(owner, ids), turn)
        return waiting + self._ask_further(np.concatenate(refused), turn + 1)

    def _ask_further(self, ids: Longs, turn: int) -> list[_Waiting]:
        """Ask the next machines for samples that those asked before have no room for."""
        ids = np.sort(ids)
        owned = self._peers.known.after(ids, turn)
        others = [(name, some) for name, some in owned if name != self._peers.known.me]
        waiting = self._ask(others, turn) if others else []
        for name, some in owned:
            # With room for them here they are left to the store, as this machine's own are.
            if name == self._peers.known.me and not self._store.has_room():
                waiting += self._ask_further(some, turn + 1)
        if not owned and len(ids):
            self._got.unkept = True
            self._read_here(None, self._not_moved(None, ids))
        return waiting

    def _answers(
        self, asked: list[PendingRequest], *, claim: bool = False
    ) -> Iterator[tuple[PendingRequest, WireRecords]]:
        """Wait for all of these answers, and take their samples; what one had no room for is asked for again.

        The patience with a machine begins now, and anew with each of its answers.
        """
        while asked:
            again: list[PendingRequest] = []
            since = dict.fromkeys((request.name for request in asked), time.monotonic())
            for request in asked:
                answer = request.wait(since[request.name] + self._peers.patience(request.name))
                since[request.name] = time.monotonic()
                self._accept(answer)
                truncated = request.ids[answer.generations == TRUNCATED]
                again += self._peers.ask(self._cache, [(request.name, truncated)], claim=claim)
                yield request, answer
            asked = again

    def _accept(self, answer: WireRecords) -> None:
        """Take the samples of an answer."""
        records = answer.batch
        if not len(records.ids):
            return
        self._got.records.append(records)
        self._store.participant.row[Slot.PEER_HITS] += len(records.ids)
        if self._keeps(len(records.ids)):
            self._insert(records.samples(self._schema, decode=False))

    def _insert(self, samples: dict[int, Any]) -> None:
        """Keep samples here, unless the cache was cleared since they were asked for, or read."""
        if self._generation is not None:
            self._store.insert(samples, self._generation)

    # ---- samples that move, as machines join and leave ------------------------------------------------

    def _fetch_home(self, ids: Longs) -> Longs:
        """Get samples that this machine owns from their former owners, and keep them; returns the others."""
        left = self._not_moved(None, ids)
        came = np.setdiff1d(ids, left)
        if len(came):
            self._insert(self._some(came))
        return left

    def _not_moved(self, owner: str | None, ids: Longs) -> Longs:
        """Ask former owners; return the samples that they do not have, and put the others to ``owner``."""
        asked = self._peers.ask(self._cache, self._peers.former(ids))
        found = np.concatenate([ids[:0], *(answer.batch.ids for _, answer in self._answers(asked))])
        if owner is not None and len(found):
            self._put(owner, self._some(found))
        return ids[np.isin(ids, found, invert=True)]

    def _some(self, ids: Longs) -> dict[int, Any]:
        """The samples of these ids that other machines have sent, in the form in which they are stored."""
        found: dict[int, Any] = {}
        for records in self._got.records:
            if np.isin(records.ids, ids).any():
                found.update(records.samples(self._schema, decode=False))
        return {sample: found[sample] for sample in ids.tolist()}

    # ---- reading, and sending ------------------------------------------------------------------------

    def _read_here(self, owner: str | None, ids: Longs, turn: int = 0) -> None:
        """Read samples from the source, and send them to the machine that has promised room for them."""
        filler, got = self._store.filler, self._got.read
        samples: dict[int, Any] = {}
        left = ids
        filler.watch.begin()
        try:
            while len(left):
                values: dict[int, Any] = {}
                try:
                    left = filler.read_next(left, self._read, values)
                finally:  # also what was read before an exception
                    got.update(values)
                    samples.update(values)
                if owner is not None and len(samples) * self._cache.stride >= _PUT_BYTES:
                    self._put(owner, samples, turn)
                    samples = {}
        finally:
            # What draws is among these: each process that uses it reads it in its turn.
            unread = [sample for sample in ids.tolist() if sample not in got]
            if owner is not None and (samples or unread):
                self._put(owner, samples, turn, unread=unread)

    def _put(
        self, owner: str, samples: dict[int, Any], turn: int = 0, unread: list[int] | None = None
    ) -> None:
        """Send samples to a machine, and the ids of samples that will not come; does not wait for it."""
        for ids, records in pack(self._schema, samples, unread or []):
            self._settle(_PUTS - 1)
            request = self._peers.by_name[owner].put(self._cache, ids, records)
            self._puts.append(_Put(samples, turn, request))

    def _settle(self, left: int = 0) -> None:
        """Wait until all but the last ``left`` puts are answered; send refused ones to the next machine."""
        begun, since = time.monotonic(), dict[str, float]()
        while len(self._puts) > left:
            samples, turn, request = self._puts.pop(0)
            answer = request.wait(since.get(request.name, begun) + self._peers.patience(request.name))
            since[request.name] = time.monotonic()
            refused = request.ids[answer.generations == FULL].tolist()
            if refused:
                self._put_further({sample: samples[sample] for sample in refused}, turn + 1)

    def _put_further(self, samples: dict[int, Any], turn: int) -> None:
        """Put samples to the machines that come ``turn`` places after their owners."""
        if not samples:
            return
        further = self._peers.known.after(np.fromiter(samples, np.int64), turn)
        self._got.unkept |= not further
        for name, ids in further:
            some = {sample: samples[sample] for sample in ids.tolist()}
            if name != self._peers.known.me:
                self._put(name, some, turn)
                continue
            self._insert(some)
            left = ids[self._store.words(ids) < PRESENT].tolist()
            if left:
                self._put_further({sample: some[sample] for sample in left}, turn + 1)


# ---- samples as they travel ------------------------------------------------------------------------------


def pack(
    schema: Schema, samples: dict[int, Any], absent: Sequence[int] = ()
) -> Iterator[tuple[Longs, WireRecords]]:
    """Lay samples out side by side, as records that travel; as many at a time as one message may have.

    A record on its way is laid out as in a segment, but for two values that only a segment knows, its tail's
    first line and its generation: both are zero, and the store that takes the record in writes its own.

    Args:
        samples: by sample id. Those that cannot be stored, or are larger than a message, are absent.
        absent: ids of further samples that are absent, no more than one message may have.

    Yields:
        The sample ids of a message, those of absent ones last, and the records.
    """
    most_rows, most_lines = LARGEST // schema.stride, LARGEST // LINE
    fitting: list[tuple[int, forms.Flattened]] = []
    missing, lines = list(absent), 0
    for sample, value in samples.items():
        try:
            prepared = forms.prepare(schema, value)
            size = prepared.tail_lines
        except SchemaMismatch:
            size = most_lines + 1  # it fits into no message
        fits = most_rows > 0 and size <= most_lines
        is_over = fits and (len(fitting) == most_rows or lines + size > most_lines)
        if is_over or len(fitting) + len(missing) == MOST:
            yield _laid_out(schema, fitting, missing)
            fitting, missing, lines = [], [], 0
        if fits:
            fitting.append((sample, prepared))
            lines += size
        else:
            missing.append(sample)
    if fitting or missing:
        yield _laid_out(schema, fitting, missing)


def _laid_out(
    schema: Schema, fitting: list[tuple[int, forms.Flattened]], missing: list[int]
) -> tuple[Longs, WireRecords]:
    """One message of these samples, and of the ids of missing ones."""
    lines = np.array([prepared.tail_lines for _, prepared in fitting], np.int64)
    there = np.array([sample for sample, _ in fitting], np.int64)
    batch = RecordBatch.new(bytearray, there, schema.stride, lines)
    view = memoryview(batch.block)
    for number, ((sample, prepared), tail_at) in enumerate(zip(fitting, batch.tails_at, strict=True)):
        lay_out(schema, view, number * schema.stride, tail_at, prepared, sample)
    ids = np.concatenate([there, np.array(missing, np.int64)])
    generations = np.concatenate([np.zeros(len(there), np.int64), np.full(len(missing), ABSENT)])
    return ids, WireRecords(generations, batch)
