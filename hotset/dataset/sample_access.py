"""The supply: where each sample of a cached data set comes from, in this process.

::

    in the store            copied from there: a hit
    another machine's       sent by it, or read here and passed on to it
    absent                  read from the source, and put into the store where there is room
    draws random numbers    read from the source each time, in its turn among the samples of its batch
    without a store         the same

Reading for the store is watched, and what was drawn is put back (:mod:`hotset.determinism.draw_watch`). So a
draw is only ever made by who uses the sample, in the order of the batch, and is the one that torch's loader
would have made over the data set itself.

It goes by what the store calls a sample: its number in the data set, or a window's entry
(:mod:`hotset.dataset.active_window`). Whatever the way, a sample is the caller's own; and what goes wrong on
it, other than in the source, costs time and no sample. The user is told of it, once for all processes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
from torch.utils.data import get_worker_info

from hotset._warnings import Warner
from hotset.dataset.active_window import ActiveWindow, WindowPosition
from hotset.dataset.attachment import Attachment
from hotset.dataset.audit import Audit
from hotset.dataset.capacity_warning import draws, first_to_tell, shortage
from hotset.dataset.pipeline import Source
from hotset.dataset.plan import Plan
from hotset.determinism.declare import declared
from hotset.determinism.draw_watch import DrawWatch
from hotset.errors import SegmentError
from hotset.session.free_cache import DESTROYED
from hotset.store.claims import Ids
from hotset.store.format import Live, Slot
from hotset.store.record_batch import ReceivedRecords
from hotset.store.ring import Ring
from hotset.store.store import Store

if TYPE_CHECKING:  # what it needs is an extra
    from hotset.cluster.remote_cache import RemoteCache

__all__ = ["SampleAccess"]


class SampleAccess:
    """Samples at the cut, by the store's numbers. It pickles.

    Args:
        source: gives what is in no cache.
        plan: of the cache.
        attachment: this process's way to the store.
        residents: the running window; None if there is none.
        neighbours: other machines, which have a part of the cache; None if this one is alone.

    Attributes:
        tell: gets a sentence, and what it is about if that is to be told once; warns. A loader's worker
            hands it on instead.
        uncached: samples that this process has read from the source because nothing kept them.
        draws: whether this process has read samples in their turn, which may have drawn random numbers.
    """

    def __init__(
        self,
        source: Source,
        plan: Plan,
        attachment: Attachment,
        residents: ActiveWindow | None,
        neighbours: RemoteCache | None,
    ) -> None:
        self._source = source
        self._plan = plan
        self._attachment = attachment
        self._residents = residents
        self._neighbours = neighbours
        self._audit = Audit(source, plan.sample_seconds, self._audited()) if plan.audited else None
        if plan.audited and declared(source.dataset) != "deterministic":
            attachment.watch = DrawWatch([source.dataset, source.prefix])
        self._ended = False  # and that was told
        self.tell: Callable[..., None] = Warner()
        self.uncached = 0
        self.draws = False

    # ---- the store -----------------------------------------------------------------------------------

    @property
    def store(self) -> Store | None:
        """The store as this process sees it.

        None when nothing can be cached, after :meth:`close`, and when an audit found that it is not right.
        """
        store = self._attachment.store()
        if store is None or not store.invalidated:
            return store
        self._tell_of_the_end(store)
        return None

    @property
    def any_store(self) -> Store | None:
        """The store, whether or not samples are still to come from it."""
        return self._attachment.store()

    @property
    def ring(self) -> Ring | None:
        """What holds the window's cursor, whether or not samples are still to come from it."""
        store = self.any_store
        return store if isinstance(store, Ring) else None

    @property
    def spills(self) -> bool:
        """Whether some samples may lie on a disk."""
        store = self.store
        return store is not None and store.spill is not None

    def numbers(self, positions: Ids) -> Ids:
        """What the store calls the samples at these places of the epoch; without a window the same."""
        return positions if self._residents is None else self._residents.entries(positions, self.ring)

    def holds(self, positions: Ids | None) -> bool:
        """Whether all samples at these places of the epoch, or at all of them, are cached now."""
        store = self.store
        if store is None:
            return False
        if self._residents is not None:
            return store.holds(self._residents.entries(positions, self.ring))
        return store.holds(positions)

    # ---- samples -------------------------------------------------------------------------------------

    def records(self, ids: Ids, in_hand: dict[int, Any] | None = None) -> Iterator[Any]:
        """Samples as they are at the cut, each the caller's own.

        What draws random numbers is read when it is asked for: ask for each when the one before it is done.

        Args:
            ids: what :meth:`numbers` gave.
            in_hand: what :meth:`fill` has just returned for them, if it was called.
        """
        store = self.store
        before = store.filler.drawing if store is not None else 0
        known = in_hand is None
        failed: dict[int, Exception] = {}
        if in_hand is None:
            in_hand = self._fill_or_note(ids, failed)
        found: dict[int, Any] = {}
        numbers = ids.tolist()
        if store is not None:
            stored = np.array([place for place, sample in enumerate(numbers) if sample not in in_hand], int)
            drawing = store.index.drawing(ids[stored])
            if known and drawing.sum() > store.filler.drawing - before:
                self.tell_of_draws()  # not all were found just now, so it is not the first pass
            stored = stored[~drawing]
            there = ids[stored]
            copies = store.read(there) if len(there) and store.present(there).all() else None
            if copies is not None:
                found = dict(zip(stored.tolist(), copies, strict=True))
                self.count_hits(there)
        for place, sample in enumerate(numbers):
            if place in found:
                yield found.pop(place)
            elif sample in in_hand:
                # Given out once: who asks for it again, in the same batch too, must not share the object.
                yield in_hand.pop(sample)
            elif sample in failed:
                raise failed.pop(sample)
            else:
                yield self._again(sample)

    def _fill_or_note(self, ids: Ids, failed: dict[int, Exception]) -> dict[int, Any]:
        """As :meth:`fill`; enters what the source raised on a sample, to be raised when it is its turn.

        Samples before it in the batch are used first, as without a cache: their live parts draw.
        """

        def read(number: int) -> Any:
            try:
                return self._read(number)
            except Exception as error:
                failed[number] = error
                raise

        try:
            return self.fill(ids, read=read)
        except Exception:
            if not failed:
                raise
            return {}

    def fill(
        self, ids: Ids, *, keep: bool = True, read: Callable[[int], Any] | None = None
    ) -> dict[int, Any]:
        """Bring these samples into the cache where there is room: see :meth:`Store.fill`.

        What belongs to other machines is got from them, and is in hand.
        """
        records, in_hand = self.bring(ids, keep=keep, read=read)
        return {**self.taken_apart(records), **in_hand}

    def bring(
        self, ids: Ids, *, keep: bool = True, read: Callable[[int], Any] | None = None
    ) -> tuple[list[ReceivedRecords], dict[int, Any]]:
        """As :meth:`fill`; what other machines have sent is returned first, as it came."""
        store, read = self.store, read or self._read
        if store is None:
            return [], {}
        records: list[ReceivedRecords] = []
        in_hand: dict[int, Any] = {}
        if self._neighbours is not None:
            brought = self._neighbours.bring(store, ids, read)
            self.tell_of_machines()
            records, in_hand = brought.records, brought.read
            if brought.unkept:
                self._tell_of_shortage(store)
            self._audit_theirs(records, store)
            ids = ids[np.isin(ids, brought.ids(), invert=True)]
        got = store.fill(ids, read, keep=keep)
        while store.room.notes:  # of caches that made room, each told by the process that asked it to
            self.tell(f"{self._plan.name}: {store.room.notes.pop()}")
        if got and (self._neighbours is None or not self._neighbours.pass_on(store, got)):
            self._tell_of_shortage(store)
        return records, {**in_hand, **got}

    def taken_apart(self, records: list[ReceivedRecords]) -> dict[int, Any]:
        """The samples of loose records, each the caller's own, by number."""
        store = self.store
        if store is None or not records:
            return {}
        found: dict[int, Any] = {}
        for each in records:
            # A form of its own whose type this process has not got: these come from the source.
            with contextlib.suppress(SegmentError):
                found.update(each.samples(store.schema))
        return found

    def announce(self, ids: Ids) -> None:
        """Say that these samples are wanted soon: what lies on a disk is fetched meanwhile.

        Args:
            ids: what :meth:`numbers` gave.
        """
        store = self.any_store
        # Asked in a thread, whose warnings nobody hears: that the cache has ended is told with the batches.
        if store is not None and not store.invalidated:
            store.announce(ids)

    def ask_ahead(self, ids: Ids) -> None:
        """Say that these samples are wanted next: what other machines have of them is sent meanwhile.

        Args:
            ids: what :meth:`numbers` gave.
        """
        store = self.store
        if store is not None and self._neighbours is not None:
            self._neighbours.announce(store, ids)

    def _again(self, sample: int) -> Any:
        """A sample that was in the cache or in hand a moment ago: from there, else from the source."""
        store = self.store
        ids = np.array([sample])
        if store is not None and store.present(ids).all():
            copies = store.read(ids)
            if copies is not None:
                self.count_hits(ids)
                return copies[0]
        if store is not None and self._neighbours is not None and not store.index.drawing(ids).any():
            records, in_hand = self.bring(ids)
            theirs = {**self.taken_apart(records), **in_hand}
            if theirs:
                return theirs[sample]
        self.draws = True
        if store is not None:
            return store.filler.read(sample, self._read)
        self.uncached += 1
        return self._read(sample)

    def _read(self, number: int) -> Any:
        """Read a sample from the source, as far as it is cached, by what the store calls it."""
        return self._source.read(number) if self._residents is None else self._residents.read(number)

    # ---- a window in motion --------------------------------------------------------------------------

    def begin_next(self, processes: int, context: Any) -> None:
        """Begin the next epoch of the window, if there is one and the user has not begun it.

        Args:
            processes: how many prepare samples in the background.
            context: a multiprocessing context, or its name, by which they are started.
        """
        if self._residents is not None:
            self._residents.begin_next(self.ring, processes, context, self.tell)
            self.tell_of_machines()

    def prepare(self, processes: int, context: Any) -> None:
        """Have the window's next samples prepared, in the midst of an epoch that goes on here.

        Takes what :meth:`begin_next` does.
        """
        if self._residents is not None:
            self._residents.prepare(self.ring, processes, context)

    def go_to(self, position: WindowPosition) -> None:
        """Take up the window where it stood."""
        if self._residents is not None:
            self._residents.go_to(position, self.ring)

    # ---- counting, and now and then looking ----------------------------------------------------------

    def served(self) -> tuple[int, int]:
        """Hits and misses so far, over all processes."""
        store = self.store
        if store is None:
            return 0, self.uncached
        sums = store.segment.slots.sum(axis=0).tolist()
        return sums[Slot.HITS] + sums[Slot.PEER_HITS], sums[Slot.MISSES]

    def count_hits(self, ids: Ids, less: int = 0) -> None:
        """Count samples that this process has served from the store, and now and then audit one of them.

        Args:
            ids: what :meth:`numbers` gave.
            less: how many of them were read for this batch.
        """
        store = self.store
        if store is None:
            return
        store.count_hits(len(ids) - less)
        due = self._audit.due(len(ids) - less, self._audited) if self._audit is not None else None
        if due is not None:
            number = int(ids[due])
            copies = store.read(np.array([number]))
            if copies is not None:
                self._compare(number, copies[0], store)

    def count_waiting(self, seconds: float) -> None:
        """Count time that a loader's consumer in this process has waited for batches."""
        store = self.store
        if store is not None:
            store.member.row[Slot.WAIT_NS] += int(seconds * 1e9)

    def _audit_theirs(self, records: list[ReceivedRecords], store: Store) -> None:
        """Now and then compare a sample that another machine has sent with what the source gives."""
        theirs = sum(len(each.ids) for each in records)
        due = self._audit.due(theirs, self._audited) if self._audit is not None else None
        if due is not None:
            for number, value in list(self.taken_apart(records).items())[due : due + 1]:
                self._compare(number, value, store)

    def _compare(self, number: int, cached: Any, store: Store) -> None:
        """Compare a cached sample with what the source gives now; if it is another, stop serving."""
        assert self._audit is not None
        found = self._audit.differs(cached, self._index(number))
        store.member.row[Slot.AUDITS] += 1
        store.member.row[Slot.AUDIT_NS] += int(self._audit.last_seconds * 1e9)
        if found is not None and store.invalidate():
            self.tell(f"{self._plan.name}: {found}")

    def _audited(self) -> float:
        """Seconds that all processes have spent on audits of this cache."""
        store = self.any_store
        return float(store.segment.slots[:, Slot.AUDIT_NS].sum()) / 1e9 if store is not None else 0.0

    def _index(self, number: int) -> int:
        """The user's number of what the store calls so."""
        return number if self._residents is None else self._residents.sample(number)

    # ---- telling -------------------------------------------------------------------------------------

    def tell_of_machines(self) -> None:
        """Tell of other machines what there is to tell."""
        if self._neighbours is not None:
            for sentence, machine in self._neighbours.troubles():
                self.tell(sentence, machine)

    def _tell_of_shortage(self, store: Store) -> None:
        """Tell the user, once for all processes, that samples stay uncached, and which knob to turn."""
        if store.segment.live[Live.TOLD]:
            return
        met: Any = store.filler.mismatches
        if self._residents is not None:  # a window meets them again, under other numbers
            met = dict.fromkeys(map(self._index, met))
        why = shortage(store, self._plan.used, self._plan.samples, met)
        if why is not None and first_to_tell(store):
            self.tell(f"{self._plan.name}: {why}.")

    def tell_of_draws(self) -> None:
        """Tell the user, once for all processes, which samples draw random numbers, as far as is known."""
        store = self.store
        if store is None or store.segment.live[Live.DRAWS_TOLD]:
            return
        ids = np.arange(len(store))
        if self._residents is not None:
            ids = np.sort(self._residents.entries(None, self.ring))
        drawing = ids[store.index.drawing(ids)].tolist()
        if drawing and first_to_tell(store, Live.DRAWS_TOLD):
            complete = self._residents is None and not store.index.missing(ids).any()
            told = draws(sorted(map(self._index, drawing)), len(ids), complete=complete)
            self.tell(f"{self._plan.name}: {told}.")

    def _tell_of_the_end(self, store: Store) -> None:
        if self._ended or store.segment.live[Live.INVALIDATED] != DESTROYED:
            return
        self._ended = True
        if get_worker_info() is None:  # each job is to hear it, and not from all of its processes
            self.tell(
                f"{self._plan.name}: its session was destroyed, so samples come from the source from now on; "
                "make another with `hotset session create`, and call hotset.cache again."
            )

    def close(self) -> None:
        """Detach from the store; samples come from the source from then on."""
        self._attachment.close()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "tell": Warner()}
