"""Sample access: where each sample of a cached dataset comes from, in this process.

::

    in the store            copied from there: a hit
    another machine's       sent by it, or read here and passed on to it
    missing                 read from the source, and stored if there is room
    draws random numbers    read from the source each time, in its turn among the samples of its batch
    without a store         the same

Reads for the store are watched, and generators that they moved are restored
(:mod:`hotset.determinism.draws.draw_watch`). So random numbers are drawn only where a sample is used, in the
order of the batch, and are those that torch's loader would have drawn over the dataset itself.

Samples are addressed by sample id: the index in the dataset, or a window's entry
(:mod:`hotset.dataset.active_window`). The caller owns every sample that it gets. A failure of anything but
the source costs time, but no sample; the user is warned of it, once for all processes.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from torch.utils.data import get_worker_info

from hotset._warnings import Warner
from hotset.dataset.active_window import ActiveWindow
from hotset.dataset.attachment import Attachment
from hotset.dataset.audit import Audit, first_difference
from hotset.dataset.held_attributes import HeldAttributes, outer_code
from hotset.dataset.pipeline import Source
from hotset.dataset.plan import Plan
from hotset.dataset.source_reader import NotingReader, SourceReader
from hotset.dataset.stats import Stats, stats_of
from hotset.dataset.streams.source import StreamSource
from hotset.errors import SegmentError
from hotset.session.job import this_job
from hotset.store.claims import Ids
from hotset.store.fill import Read
from hotset.store.format import DESTROYED, PRESENT, Live, Slot
from hotset.store.record_batch import RecordBatch
from hotset.store.store import Store

if TYPE_CHECKING:  # what it needs is an extra
    from hotset.cluster.remote_cache import RemoteCache

__all__ = ["SampleAccess", "Told"]

# The user is warned of this many samples that cannot be cached; of a large dataset, of a hundredth of it.
_MISMATCHES_WORTH_WARNING = 16
# How many samples a warning names.
_NAMED = 8
_DRAWS = "samples that draw"
_OTHERWISE = ", or treated otherwise than the rest by the dataset's own code around its transforms"


class Told(NamedTuple):
    """A warning for the user.

    Attributes:
        sentence: what it says.
        about: its subject, if a process is to warn of that once.
        once: a live word of the store, and what it is once any process has given this warning; None if others
            may give it, too. The process that gives it enters this, and not one that has it given: that may
            never happen.
    """

    sentence: str
    about: str = ""
    once: tuple[int, int] | None = None


class SampleAccess:
    """All that belongs to one plan of a cached dataset; reads samples at the cut, by sample id. It pickles.

    Args:
        attachment: how this process reaches the store.
        concurrency: how many samples to read from the source at once.

    Attributes:
        source: the dataset and its chains, cut in two.
        plan: what is cached, what stays live, and why.
        window: the running window; None if there is none.
        remote: the other machines' parts of the cache; None without other machines.
        lookup_key: what ranks find this cache by: see :class:`~hotset.dataset.identity.Identity`.
        moved: the attributes that reading samples changes, as ``class.name``.
        tell: gets the warnings of this process, to have them given by another; None to give them here.
        uncached: how many samples this process has read from the source without storing them.
        draws: whether this process has read samples in their turn, which may have drawn random numbers.
    """

    def __init__(
        self,
        source: Source,
        plan: Plan,
        attachment: Attachment,
        window: ActiveWindow | None,
        remote: RemoteCache | None,
        lookup_key: str,
        moved: Collection[str] = (),
        concurrency: int = 1,
    ) -> None:
        self.source, self.plan, self.window, self.remote = source, plan, window, remote
        self.lookup_key, self.moved = lookup_key, moved
        self._reader = SourceReader(source, concurrency)
        self._attachment = attachment
        self._audit = Audit(source, plan.sample_seconds, self._audited()) if plan.audited else None
        self._job = _job_word()  # of the main process, also in its workers
        self._readers: set[int] = set()  # the threads that have read samples in this process
        self._read_ahead: set[int] = set()  # samples that this process has cached and not used yet
        self._ended = False  # whether the user was warned that the session was destroyed
        self.tell: Callable[[Told], None] | None = None
        self._warner = Warner()
        self.uncached = 0
        self.draws = False
        self._served = 0, 0  # by the store, when that was looked at last: it is gone after close()

    # ---- the store -----------------------------------------------------------------------------------

    @property
    def store(self) -> Store | None:
        """The store as this process sees it.

        None if nothing can be cached, after :meth:`close`, and after an audit found a difference.
        """
        store = self._attachment.store()
        if store is None or not store.invalidated:
            return store
        self._warn_of_destruction(store)
        return None

    @property
    def any_store(self) -> Store | None:
        """The store, even if no samples are served from it any more."""
        return self._attachment.store()

    @property
    def spills(self) -> bool:
        """Whether some samples may lie on a disk."""
        store = self.store
        return store is not None and store.spill is not None

    def sample_ids(self, positions: Ids) -> Ids:
        """The sample ids at these positions of the epoch; without a window they are the same."""
        return positions if self.window is None else self.window.entries(positions)

    def holds(self, positions: Ids | None) -> bool:
        """Whether all samples at these positions of the epoch, or at all, are cached now."""
        store = self.store
        ids = positions if self.window is None else self.window.entries(positions)
        return store is not None and store.holds(ids)

    @property
    def at_once(self) -> int:
        """How many samples the source is best asked for together."""
        return self._reader.at_once

    @property
    def read_here(self) -> int:
        """How many samples this process has read from the source so far."""
        return self._reader.calls

    # ---- samples -------------------------------------------------------------------------------------

    def records(self, ids: Ids, uncached: dict[int, Any] | None = None) -> Iterator[Any]:
        """Samples as they are at the cut; the caller owns each.

        A sample that draws random numbers is read when the iterator reaches it: finish each sample before you
        take the next.

        Args:
            uncached: what :meth:`fill` has just returned for them, if it was called.
        """
        store = self.store
        if store is None and self.window is None and self._reader.in_groups:
            self.draws = True
            self.uncached += len(ids)
            self._readers.add(threading.get_ident())
            yield from self._reader.many_whole(ids.tolist())  # the batch, as torch's loader reads it
            return
        failed: dict[int, Exception] = {}
        hits: Collection[int] = range(len(ids))
        copies = self._copies(store, ids) if uncached is None else None
        if copies is None:
            was_filled = uncached is not None
            drawing_before = store.filler.drawing if store is not None else 0
            if uncached is None:
                if store is not None:
                    store.filler.expect_batches(len(ids))
                uncached = self._fill_or_note(ids, failed)
            left = np.array(
                [place for place, sample in enumerate(ids.tolist()) if sample not in uncached], int
            )
            if store is not None:
                drawing = store.index.drawing(ids[left])
                if not was_filled and drawing.sum() > store.filler.drawing - drawing_before:
                    self.warn_of_draws()  # some were known before, so it is not the first epoch
                left = left[~drawing]
            copies = self._copies(store, ids[left])
            hits = set(left.tolist()) if copies is not None else ()
        yield from self._in_turn(ids, hits, copies or iter(()), uncached or {}, failed)

    def _in_turn(
        self,
        ids: Ids,
        hits: Collection[int],
        copies: Iterator[Any],
        uncached: dict[int, Any],
        failed: dict[int, Exception],
    ) -> Iterator[Any]:
        """Each of these samples as its turn comes.

        Args:
            hits: the places in the batch of those that ``copies`` are of, which may end early.
            uncached: samples that were read and not stored.
            failed: what the source has raised for others.
        """
        copy: list[Any] = []  # popped from it, so that nothing here refers to a sample that was taken
        for place, sample in enumerate(ids.tolist()):
            if place in hits:
                copy += itertools.islice(copies, 1)
            if copy:
                yield copy.pop()
            elif sample in uncached:
                # Returned once: a second use, in the same batch too, must not share the object.
                yield uncached.pop(sample)
            elif sample in failed:
                raise failed.pop(sample)
            else:
                yield self._read_again(sample)

    def _copies(self, store: Store | None, ids: Ids) -> Iterator[Any] | None:
        """Copies of these samples, as hits; None if one of them is not in the store, or left it meanwhile."""
        copies = store.read_in_turn(ids) if store is not None and len(ids) else None
        return copies if copies is not None and self.count_hits(ids) else None

    def _fill_or_note(self, ids: Ids, failed: dict[int, Exception]) -> dict[int, Any]:
        """As :meth:`fill`, but records an exception of the source, to be raised at that sample's turn.

        Samples before it in the batch are used first, as without a cache: their live parts draw.
        """
        try:
            return self.fill(ids, read=NotingReader(self._read, failed))
        except Exception:
            if not failed:
                raise
            return {}

    def fill(self, ids: Ids, *, keep: bool = True, read: Read | None = None) -> dict[int, Any]:
        """Fill the cache with these samples, as far as there is room: see :meth:`Store.fill`.

        Samples that other machines own are requested from them.

        Returns:
            The samples that were not stored, by sample id.
        """
        records, uncached = self.receive(ids, keep=keep, read=read)
        return {**self.decoded(records), **uncached}

    def fill_ahead(self, ids: Ids) -> bool:
        """Fill the cache with samples that this process will use later; their first use is no hit then.

        Returns:
            Whether none of them was read in vain.
        """
        store = self.store
        if store is None:
            return False
        self.fill(ids, keep=False)
        stored = store.present(ids)
        self._read_ahead.update(ids[stored].tolist())
        return bool((stored | store.index.drawing(ids)).all())

    def receive(
        self, ids: Ids, *, keep: bool = True, read: Read | None = None
    ) -> tuple[list[RecordBatch], dict[int, Any]]:
        """As :meth:`fill`, but the records that other machines sent are returned undecoded, and first."""
        store, read = self.store, read or self._read
        if store is None:
            return [], {}
        self._readers.add(threading.get_ident())
        if isinstance(self.source.dataset, StreamSource):
            # Lost samples. They are not stored, as this rank cannot run another rank's part, and a pass that
            # records the stream anew gives their ids to samples of its own.
            lost = ids[~store.present(ids)].tolist()
            self.uncached += len(lost)
            return [], {sample: read(sample) for sample in lost}
        if self._read_ahead:  # what has left the cache since is read once more
            self._read_ahead.difference_update(ids[store.index.missing(ids)].tolist())
        generation = store.clear_generation()
        records: list[RecordBatch] = []
        uncached: dict[int, Any] = {}
        if self.remote is not None:
            fetched = self.remote.fetch(store, ids, read)
            self.warn_of_machines()
            records, uncached = fetched.records, fetched.read
            if fetched.unkept:
                self.warn_of_shortage()
            self._audit_theirs(records, store)
            ids = ids[np.isin(ids, fetched.ids(), invert=True)]
        got = store.fill(ids, read, keep=keep)
        if self._reader.trouble is not None:
            trouble, self._reader.trouble = self._reader.trouble, None
            self.warn(trouble, "concurrency")
        while store.allocator.notes:  # about caches that were freed; the process that freed them warns
            self.warn(f"{self.plan.name}: {store.allocator.notes.pop()}")
        if got and (self.remote is None or not self.remote.pass_on(store, got, generation)):
            self.warn_of_shortage()
        return records, {**uncached, **got}

    def decoded(self, records: list[RecordBatch]) -> dict[int, Any]:
        """The samples of received records, by sample id; the caller owns each."""
        store = self.store
        if store is None:
            return {}
        found: dict[int, Any] = {}
        for each in records:
            # An irregular record whose type this process cannot import: its sample comes from the source.
            with contextlib.suppress(SegmentError):
                found.update(each.samples(store.schema))
        return found

    def check(self) -> list[str]:
        """Verify every record. Returns a sentence for each problem, or an empty list."""
        store = self.store
        return store.check() if store is not None else []

    def clear(self) -> None:
        """Drop every cached sample, in all processes. A cache that an audit has disabled is used again.

        Raises:
            SegmentError: its session was destroyed, or others went on writing samples for five seconds.
        """
        store, name = self.any_store, self.plan.name
        if store is None:
            return
        if store.segment.live[Live.INVALIDATED] == DESTROYED:
            raise SegmentError(f"{name} cannot be cleared: its session was destroyed.")
        # Heartbeats pass the number on to machines that cannot be asked now.
        clears = int(store.segment.live[Live.CLEARS]) + 1 if self.remote is not None else None
        if not store.clear(clears=clears):
            raise SegmentError(f"{name} cannot be cleared while other processes fill it; stop them first.")
        if self.remote is not None:
            self.remote.clear(store, name)

    def prefetch(self, ids: Ids) -> None:
        """Announce that these samples are needed soon: those on a disk are read ahead."""
        store = self.any_store
        # Called in a thread, which must not warn: the warning comes with the next batch.
        if store is not None and not store.invalidated:
            store.prefetch(ids)

    def ask_ahead(self, ids: Ids) -> None:
        """Announce that these samples are needed next: other machines send theirs ahead."""
        store = self.store
        if store is not None and self.remote is not None:
            self.remote.prefetch(store, ids)

    def _read_again(self, sample: int) -> Any:
        """A sample that was cached or uncached a moment ago: from the cache if possible, else the source."""
        store = self.store
        ids = np.array([sample])
        if store is not None:
            copies = store.read(ids)
            if copies is not None and self.count_hits(ids):
                return copies[0]
            store = self.store
        if store is not None and self.remote is not None and not store.index.drawing(ids).any():
            records, uncached = self.receive(ids)
            received = {**self.decoded(records), **uncached}
            if received:
                return received[sample]
        self.draws = True
        if store is not None:
            return store.filler.read(sample, self._read_whole)
        self.uncached += 1
        return self._read_whole(sample)

    def _read_whole(self, sample: int) -> Any:
        """Read a sample in its turn; it may draw, so its chains are not cut."""
        self._readers.add(threading.get_ident())
        return self._reader.whole(self._index(sample))

    @property
    def _read(self) -> Read:
        """Reads samples from the source, up to the cut, by their sample ids."""
        return self._reader if self.window is None else self.window.read

    # ---- counters and audits ----------------------------------------------------------

    def served(self) -> tuple[int, int]:
        """Hits and misses so far, over all processes."""
        self._note_served(self.any_store)
        hits, misses = self._served
        return hits, misses + self.uncached

    def _note_served(self, store: Store | None) -> None:
        if store is not None:
            sums = store.segment.slots.sum(axis=0).tolist()
            self._served = sums[Slot.HITS] + sums[Slot.PEER_HITS], sums[Slot.MISSES]

    def stats(self) -> Stats:
        """What the cache holds and has served, over all processes."""
        window, store, used = self.window, self.store, self.plan.used
        replaced = window.cursor() if window is not None else 0
        if store is None:
            return Stats(0, used, 0, 0, 0, self.uncached, 0.0, replaced=replaced)
        entries = window.entries(None) if window is not None else None
        peers = self.remote.traffic() if self.remote is not None else {}
        return stats_of(store, used, entries, peers, replaced)

    def stored(self) -> int:
        """How many samples all processes have stored so far."""
        store = self.store
        return int(store.segment.slots[:, Slot.STORED].sum()) if store is not None else 0

    def count_hits(self, ids: Ids, less: int = 0) -> bool:
        """Count samples that this process has served from the store, and now and then audit one of them.

        Args:
            less: how many of them were read for this batch.

        Returns:
            False if they must not be served, as the cache holds what the source does not return any more.
        """
        store = self.store
        if store is None:
            return False
        if self._read_ahead:
            used = self._read_ahead.intersection(ids.tolist())
            self._read_ahead -= used
            less += len(used)
        store.count_hits(len(ids) - less)
        due = self._audit.due(len(ids) - less, self._audited) if self._audit is not None else None
        if due is not None:
            number = int(ids[due])
            copies = store.read(np.array([number]))
            if copies is not None:
                self._compare(number, copies[0], store)
        return not store.invalidated

    def count_waiting(self, seconds: float) -> None:
        """Add time that the consumer of a loader in this process has waited for batches."""
        store = self.store
        if store is not None:
            store.participant.row[Slot.WAIT_NS] += int(seconds * 1e9)

    def leave_off_audits(self) -> None:
        """Audit no more in this process, as its dataset is no longer that of the workers that are served."""
        self._audit = None

    def _audit_theirs(self, records: list[RecordBatch], store: Store) -> None:
        """Audit now and then a sample that another machine has sent."""
        theirs = sum(len(each.ids) for each in records)
        due = self._audit.due(theirs, self._audited) if self._audit is not None else None
        if due is not None:
            for number, value in list(self.decoded(records).items())[due : due + 1]:
                self._compare(number, value, store)

    def _compare(self, number: int, cached: Any, store: Store) -> None:
        """Compare a cached sample with what the source returns now; if they differ, disable the cache."""
        assert self._audit is not None
        found = self._audit.differs(cached, self._index(number), self._is_only_reader)
        store.participant.row[Slot.AUDITS] += 1
        store.participant.row[Slot.AUDIT_NS] += int(self._audit.last_seconds * 1e9)
        if found is not None and store.invalidate():
            self.warn(f"{self.plan.name}: {found}")

    def differs_from_source(self) -> bool:
        """Whether one of a few cached samples is another if it is read now.

        It may be if none was read yet: another process may be about to cache them as they were.
        """
        store, window = self.store, self.window
        if store is None:
            return False
        if self.stats().misses == 0:
            return True
        ids = window.held() if window is not None else None
        return first_difference(self.source, store, ids, self._index) is not None

    @contextlib.contextmanager
    def in_place_of_workers(self) -> Iterator[None]:
        """Leave nothing open that is opened as this process reads what workers of a loader would have read:
        those that are forked later would share it.
        """
        steps = self.source.cached_steps
        held = HeldAttributes.near(self.source.dataset, steps, outer_code(self.source.dataset, steps))
        try:
            yield
        finally:
            if self._is_only_reader():
                held.put_back()

    def _is_only_reader(self) -> bool:
        """Whether no other thread that is alive has read samples here."""
        alive = {each.ident for each in threading.enumerate()}
        return self._readers & alive <= {threading.get_ident()}

    def _audited(self) -> float:
        """Seconds that all processes have spent on audits of this cache."""
        store = self.any_store
        return float(store.segment.slots[:, Slot.AUDIT_NS].sum()) / 1e9 if store is not None else 0.0

    def _index(self, number: int) -> int:
        """The index in the dataset of a sample id."""
        return number if self.window is None else self.window.sample(number)

    # ---- warnings -------------------------------------------------------------------------------------

    def warn(self, sentence: str, about: str = "", once: tuple[int, int] | None = None) -> None:
        """Warn, or have another process warn: see :class:`Told`."""
        if self.tell is not None:
            self.tell(Told(sentence, about, once))
        elif once is None or self._is_first(*once):
            self._warner(sentence, about)

    def _is_first(self, word: int, said: int) -> bool:
        """Whether no process has given this warning yet; several run out of room together."""
        store = self.store
        if store is None:
            return True
        live = store.segment.live
        with store.participant.short_lock():
            before, live[word] = int(live[word]), said
        return before != said

    def warn_of_machines(self) -> None:
        """Warn of problems with other machines."""
        if self.remote is not None:
            for sentence, machine in self.remote.troubles():
                self.warn(sentence, machine)

    def warn_of_shortage(self) -> None:
        """Warn, once for all processes, that samples stay uncached, and which argument to change.

        Only if this process knows why.
        """
        store = self.store
        if store is None or store.segment.live[Live.WARNED]:
            return
        met: Any = store.filler.mismatches
        if self.window is not None:  # with a window a sample has several ids
            met = dict.fromkeys(map(self._index, met))
        why = _shortage(store, self.plan.used, self.plan.samples, met)
        if why is not None:
            about = f"samples stay uncached {store.segment.nonce.hex()} {store.clear_generation()}"
            self.warn(f"{self.plan.name}: {why}.", about, (Live.WARNED, 1))

    def warn_of_draws(self) -> None:
        """Warn, once in each job, which samples are known to draw random numbers."""
        store = self.store
        if store is None or store.segment.live[Live.WARNED_DRAWS] == self._job:
            return
        ids = np.arange(len(store.segment.used_index))
        if self.window is not None:
            ids = np.sort(self.window.entries(None))
        drawing = ids[store.index.drawing(ids)].tolist()
        if drawing:
            complete = self.window is None and not store.index.missing(ids).any()
            cut = self._reader.cuts
            sentence = _draws(sorted(map(self._index, drawing)), len(ids), complete=complete, cut=cut)
            # Two jobs that run at the same time overwrite each other's word: each process tells once.
            about = f"{_DRAWS} {store.segment.nonce.hex()} {store.clear_generation()}"
            self.warn(f"{self.plan.name}: {sentence}.", about, (Live.WARNED_DRAWS, self._job))

    def _warn_of_destruction(self, store: Store) -> None:
        if self._ended or store.segment.live[Live.INVALIDATED] != DESTROYED:
            return
        self._ended = True
        if get_worker_info() is None:  # each job warns once, and not each of its processes
            self.warn(
                f"{self.plan.name}: its session was destroyed, so samples come from the source from now on; "
                "create another with `hotset session create`, and call hotset.cache again."
            )

    @property
    def device(self) -> Any | None:
        """The device of a network whose results are cached; None for the CPU."""
        return next((step.device for step in self.source.batched if step.device is not None), None)

    def close(self) -> None:
        """Detach from the cache; samples come from the source from then on."""
        self._note_served(self._attachment.attached)  # a finalizer must not attach in order to close
        if self.window is not None:
            self.window.close()
        if self.remote is not None:
            self.remote.close()
        self._attachment.close()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "tell": None, "_warner": Warner()}


# ---- warnings about samples that stay uncached -------------------------------------------------------------


def _shortage(store: Store, used: int, samples: int, mismatches: Collection[int]) -> str | None:
    """Return a sentence without its full stop, which names the argument to change; None for no warning.

    Args:
        used: the number of samples to be cached: all, or a window's residents.
        mismatches: the indices of the samples that this process found uncacheable.
    """
    if store.why_full is not None:
        if store.allocator.why_full is None:  # there is room in memory; the disk should hold all samples, too
            return f"not all samples are stored on the disk: {store.why_full}"
        cached = int((store.segment.used_index >= PRESENT).sum())
        return f"{cached:,} of {used:,} samples are cached, and no more fit: {store.why_full}"
    if len(mismatches) < max(_MISMATCHES_WORTH_WARNING, samples // 100):
        return None
    reason = next(iter(store.filler.mismatches.values()))
    return (
        f"at least {len(mismatches):,} samples stay uncached; sample {next(iter(mismatches))} cannot be "
        f"cached: {reason}"
    )


def _draws(drawing: Sequence[int], used: int, *, complete: bool, cut: bool) -> str:
    """Return a sentence about samples that draw random numbers, and what to do; without its full stop.

    Args:
        drawing: the indices of the samples that are known to draw; at least one.
        used: the number of samples to be cached: all, or a window's residents.
        complete: whether all others are known not to draw.
        cut: whether the dataset's own chains are cut; these samples may only treat them otherwise.

    Example:
        >>> print(_draws([17], 400, complete=True, cut=False)[:59])
        1 sample (17) draws random numbers when it is read, so it c
    """
    count = len(drawing)
    some = ", ".join(map(str, drawing[:_NAMED])) + (", ..." if count > _NAMED else "")
    so_far = "" if complete else " so far"
    one = count == 1
    otherwise = _OTHERWISE if cut else ""
    sentence = (
        f"{count:,} sample{'' if one else 's'}{so_far} ({some}) draw{'s' if one else ''} random numbers when "
        f"{'it is' if one else 'they are'} read{otherwise}, so {'it comes' if one else 'they come'} from the "
        "source for each use; "
    )
    if count > used // 2:
        sentence += f"that is most of the {used:,}, so a cache helps little. "
    else:
        sentence += "the others stay cached. "
    return f"{sentence}Move the random part to transform=[...], so that the part before it is cached"


def _job_word() -> int:
    """A number that all ranks of a job have, and no other job; never 0."""
    with contextlib.suppress(OSError):
        return int(this_job().offers[0][:15], 16) | 1
    return 1  # without /proc, where nothing is shared
