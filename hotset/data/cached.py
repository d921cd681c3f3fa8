"""The cached data set: what :func:`hotset.cache` returns, and every process of the job holds.

It can stand wherever the data set itself could. A sample is looked for in the store, and brought there from
the source if it is absent; what the store cannot have comes from the source each time. With a window its
positions are those of the epoch's residents, which the store knows by other numbers
(:mod:`hotset.data.residents`).
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np
from torch.utils.data import Dataset, get_worker_info

from hotset.data.attachment import Attachment
from hotset.data.audit import Audit
from hotset.data.plan import Plan
from hotset.data.residents import Position, Residents
from hotset.data.shortage import first_to_tell, shortage
from hotset.data.source import Source
from hotset.data.stats import Stats, stats_of
from hotset.errors import SegmentError
from hotset.session.retire import DESTROYED
from hotset.session.share import Share
from hotset.store.claims import Ids
from hotset.store.format import Live, Slot
from hotset.store.loose import Loose
from hotset.store.ring import Ring
from hotset.store.store import Store
from hotset.told import Teller

if TYPE_CHECKING:  # what it needs is an extra
    from hotset.cluster.neighbours import Neighbours

__all__ = ["CachedDataset"]

T = TypeVar("T")


class CachedDataset(Dataset[T], Generic[T]):
    """A data set whose samples are cached; made by :func:`cache`.

    It can be used wherever the data set itself could: with any DataLoader, in ``Subset`` and
    ``ConcatDataset``, in forked and spawned workers. Attributes that it does not have itself are the data
    set's (``cached.classes``).

    Attributes:
        dataset: the data set that was given to :func:`cache`.
        source: the data set and its chain, cut in two.
        plan: what is cached, what stays live, and why; print it.
        residents: the running window; None if there is none.
        neighbours: other machines, which have a part of the cache; None if this one is alone.
        tell: gets a sentence, and what it is about if that is to be told once; warns. A loader's worker
            hands it on instead.
        epoch: what :meth:`set_epoch` was told last; 0 before.

    Example:
        >>> import hotset, torch
        >>> from torch.utils.data import TensorDataset
        >>> with hotset.cache(TensorDataset(torch.arange(4)), memory="1MiB") as cached:
        ...     samples = [cached[i] for i in (0, 3, 0)]
        ...     print(samples[1], cached.stats().hits, cached.check())
        (tensor(3),) 1 []
    """

    def __init__(
        self,
        dataset: Dataset[T],
        source: Source,
        plan: Plan,
        store: Store | None,
        registration: Share | None,
        residents: Residents | None,
        neighbours: Neighbours | None = None,
    ) -> None:
        self.dataset = dataset
        self.source = source
        self.plan = plan
        self.residents = residents
        self.neighbours = neighbours
        self._attachment = Attachment(store, registration, plan.name)
        self._length = plan.used
        self._own_misses = 0
        self._ended = False  # and that was told
        self._audit = Audit(source, plan.sample_seconds) if plan.audited else None
        self.tell: Callable[..., None] = Teller()
        self.epoch = 0

    # ---- the data set --------------------------------------------------------------------------------

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> T:
        number = operator.index(index)
        if not -self._length <= number < self._length:
            if self.residents is not None:
                raise IndexError(f"the window has {self._length:,} resident samples, and no number {number}")
            # Out of range: whatever the data set itself says to that.
            return self.source.finish(self.source.read(number))  # type: ignore[no-any-return]
        return self.__getitems__([number])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[T]:
        """The samples of a batch, as DataLoader asks for them."""
        ids = np.array([operator.index(index) for index in indices], np.int64)
        if len(ids) and not (-self._length <= ids.min() and ids.max() < self._length):
            return [self[index] for index in ids.tolist()]
        ids[ids < 0] += self._length
        if self.residents is not None:
            self.residents.count(len(ids), self._ring, self.tell)
        return [self.source.finish(sample) for sample in self.records(self.numbers(ids))]

    def numbers(self, positions: Ids) -> Ids:
        """What the store calls the samples at these places of the epoch; without a window the same."""
        return positions if self.residents is None else self.residents.entries(positions, self._ring)

    def holds(self, positions: Ids | None) -> bool:
        """Whether all samples at these places of the epoch, or at all of them, are cached now."""
        store = self.store
        if store is None:
            return False
        if self.residents is not None:
            return store.holds(self.residents.entries(positions, self._ring))
        return store.holds(positions)

    def read(self, number: int) -> Any:
        """Read a sample from the source, as far as it is cached, by what the store calls it."""
        return self.source.read(number) if self.residents is None else self.residents.read(number)

    def records(self, ids: Ids, in_hand: dict[int, Any] | None = None) -> list[Any]:
        """Samples as they are at the cut, each the caller's own.

        Args:
            ids: what :meth:`numbers` gave.
            in_hand: what :meth:`fill` has just returned for them, if it was called.
        """
        store = self.store
        if store is None:
            return [self._uncached(sample) for sample in ids.tolist()]
        if in_hand is None:
            in_hand = self.fill(ids)
        numbers = ids.tolist()
        stored = [place for place, sample in enumerate(numbers) if sample not in in_hand]
        found: dict[int, Any] = {}
        if stored:
            there = ids[stored]
            copies = store.read(there) if store.present(there).all() else None
            if copies is not None:
                found = dict(zip(stored, copies, strict=True))
                self.count_hits(there)
        samples = []
        for place, sample in enumerate(numbers):
            if place in found:
                samples.append(found[place])
            elif sample in in_hand:
                # Given out once: who asks for it again, in the same batch too, must not share the object.
                samples.append(in_hand.pop(sample))
            else:
                samples.append(self._again(sample))
        return samples

    def fill(self, ids: Ids, *, keep: bool = True) -> dict[int, Any]:
        """Bring these samples into the cache where there is room: see :meth:`Store.fill`.

        What belongs to other machines is got from them, and is in hand.
        """
        records, in_hand = self.bring(ids, keep=keep)
        return {**self.taken_apart(records), **in_hand}

    def bring(self, ids: Ids, *, keep: bool = True) -> tuple[list[Loose], dict[int, Any]]:
        """As :meth:`fill`; what other machines have sent is returned first, as it came."""
        store = self.store
        if store is None:
            return [], {}
        records: list[Loose] = []
        in_hand: dict[int, Any] = {}
        if self.neighbours is not None:
            brought = self.neighbours.bring(store, ids, self.read)
            self._tell_of_machines()
            records, in_hand = brought.records, brought.read
            if brought.unkept:
                self._tell(store)
            self._audit_theirs(records, store)
            ids = ids[np.isin(ids, brought.ids(), invert=True)]
        read = store.fill(ids, self.read, keep=keep)
        if read and (self.neighbours is None or not self.neighbours.pass_on(store, read)):
            self._tell(store)
        return records, {**in_hand, **read}

    def taken_apart(self, records: list[Loose]) -> dict[int, Any]:
        """The samples of loose records, each the caller's own, by number."""
        store = self.store
        if store is None or not records:
            return {}
        return {sample: value for each in records for sample, value in each.samples(store.schema).items()}

    def _audit_theirs(self, records: list[Loose], store: Store) -> None:
        """Now and then compare a sample that another machine has sent with what the source gives."""
        due = self._audit.due(sum(len(each.ids) for each in records)) if self._audit is not None else None
        if due is not None:
            number, value = list(self.taken_apart(records).items())[due]
            self._compare(number, value, store)

    def _again(self, sample: int) -> Any:
        """A sample that was in the cache or in hand a moment ago: from there, else from the source."""
        store = self.store
        ids = np.array([sample])
        if store is not None and store.present(ids).all():
            copies = store.read(ids)
            if copies is not None:
                self.count_hits(ids)
                return copies[0]
        if store is not None and self.neighbours is not None:
            records, in_hand = self.bring(ids)
            theirs = {**self.taken_apart(records), **in_hand}
            if theirs:
                return theirs[sample]
        return self._uncached(sample)

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
        due = self._audit.due(len(ids) - less) if self._audit is not None else None
        if due is not None:
            self._look_at(int(ids[due]), store)

    def count_waiting(self, seconds: float) -> None:
        """Count time that a loader's consumer in this process has waited for batches."""
        store = self.store
        if store is not None:
            store.member.row[Slot.WAIT_NS] += int(seconds * 1e9)

    def announce(self, ids: Ids) -> None:
        """Say that these samples are wanted soon: what lies on a disk is fetched meanwhile.

        Args:
            ids: what :meth:`numbers` gave.
        """
        store = self._attachment.store()
        # Asked in a thread, whose warnings nobody hears: that the cache has ended is told with the batches.
        if store is not None and not store.condemned:
            store.announce(ids)

    def ask_ahead(self, ids: Ids) -> None:
        """Say that these samples are wanted next: what other machines have of them is sent meanwhile.

        Args:
            ids: what :meth:`numbers` gave.
        """
        store = self.store
        if store is not None and self.neighbours is not None:
            self.neighbours.announce(store, ids)

    @property
    def spills(self) -> bool:
        """Whether some of its samples may lie on a disk."""
        store = self.store
        return store is not None and store.spill is not None

    def _look_at(self, number: int, store: Store) -> None:
        """Compare a cached sample with what the source gives now; if it is another, stop serving."""
        copies = store.read(np.array([number]))
        if copies is not None:
            self._compare(number, copies[0], store)

    def _compare(self, number: int, cached: Any, store: Store) -> None:
        assert self._audit is not None
        found = self._audit.differs(cached, self._index(number))
        if found is not None and store.condemn():
            self.tell(f"{self.plan.name}: {found}")

    def _uncached(self, sample: int) -> Any:
        self._own_misses += 1
        return self.read(sample)

    def _tell_of_machines(self) -> None:
        if self.neighbours is not None:
            for sentence, machine in self.neighbours.troubles():
                self.tell(sentence, machine)

    def _tell(self, store: Store) -> None:
        """Tell the user, once for all processes, that samples stay uncached, and which knob to turn."""
        if store.segment.live[Live.TOLD]:
            return
        met: Any = store.filler.misfits
        if self.residents is not None:  # a window meets them again, under other numbers
            met = dict.fromkeys(map(self._index, met))
        why = shortage(store, len(self), self.plan.samples, met)
        if why is not None and first_to_tell(store):
            self.tell(f"{self.plan.name}: {why}.")

    def _index(self, number: int) -> int:
        """The user's number of what the store calls so."""
        return number if self.residents is None else self.residents.sample(number)

    # ---- the store -----------------------------------------------------------------------------------

    @property
    def store(self) -> Store | None:
        """The store as this process sees it.

        None when nothing can be cached, after :meth:`close`, and when an audit found that it is not right.
        """
        store = self._attachment.store()
        if store is None or not store.condemned:
            return store
        self._tell_of_the_end(store)
        return None

    @property
    def _ring(self) -> Ring | None:
        """What holds the window's cursor, whether or not it is still to be read."""
        store = self._attachment.store()
        return store if isinstance(store, Ring) else None

    def _tell_of_the_end(self, store: Store) -> None:
        if self._ended or store.segment.live[Live.CONDEMNED] != DESTROYED:
            return
        self._ended = True
        if get_worker_info() is None:  # each job is to hear it, and not from all of its processes
            self.tell(
                f"{self.plan.name}: its session was destroyed, so samples come from the source from now on; "
                "make another with `hotset session create`, and call hotset.cache again."
            )

    def stats(self) -> Stats:
        """What the cache holds and has served, over all processes."""
        store = self.store
        if store is None:
            return Stats(0, len(self), 0, 0, 0, self._own_misses, 0.0)
        entries = self.residents.entries(None, self._ring) if self.residents is not None else None
        peers = self.neighbours.traffic() if self.neighbours is not None else {}
        return stats_of(store, len(self), entries, peers)

    def served(self) -> tuple[int, int]:
        """Hits and misses of :meth:`stats`, without counting what is cached."""
        store = self.store
        if store is None:
            return 0, self._own_misses
        sums = store.segment.slots.sum(axis=0).tolist()
        return sums[Slot.HITS] + sums[Slot.PEER_HITS], sums[Slot.MISSES]

    def check(self) -> list[str]:
        """Verify every record; a sentence for each problem, an empty list if there is none."""
        store = self.store
        return store.check() if store is not None else []

    def clear(self) -> None:
        """Forget every cached sample, in all processes; also those that an audit has found not to be right.

        Raises:
            SegmentError: another process went on writing samples for five seconds, or another machine of the
                cluster has not said that it has forgotten its part.
        """
        store = self._attachment.store()
        if store is not None and store.segment.live[Live.CONDEMNED] == DESTROYED:
            raise SegmentError(f"{self.plan.name} cannot be cleared: its session was destroyed.")
        if store is not None and not store.clear():
            raise SegmentError(
                f"{self.plan.name} cannot be cleared while other processes fill it; stop them."
            )
        if store is not None and self.neighbours is not None:
            self.neighbours.clear(store, self.plan.name)

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch begins; the data set is told as well, if it has a ``set_epoch``.

        The order of samples is the sampler's: call ``loader.sampler.set_epoch(epoch)`` as ever. A cached
        sample does not change with the epoch. A window moves on, if this is another epoch than the last;
        with :class:`hotset.DataLoader` it does so by itself, and not a second time.

        Raises:
            Exception: what the data set has raised in a process that prepares a window's next samples.
        """
        self.epoch = epoch
        if self.residents is not None:
            self.residents.announce(epoch, self._ring, self.tell)
            self._tell_of_machines()
        # Two, where the chain was cut: what is read is a copy then.
        for dataset in {id(known): known for known in (self.dataset, self.source.dataset)}.values():
            if hasattr(dataset, "set_epoch"):
                dataset.set_epoch(epoch)

    def begin_next(self, processes: int, context: Any) -> None:
        """Begin the next epoch of the window, if there is one and the user has not begun it.

        Args:
            processes: how many prepare samples in the background.
            context: a multiprocessing context, or its name, by which they are started.
        """
        if self.residents is not None:
            self.residents.begin_next(self._ring, processes, context, self.tell)
            self._tell_of_machines()

    def prepare(self, processes: int, context: Any) -> None:
        """Have the window's next samples prepared, in the midst of an epoch that goes on here.

        Takes what :meth:`begin_next` does.
        """
        if self.residents is not None:
            self.residents.prepare(self._ring, processes, context)

    def go_to(self, position: Position) -> None:
        """Take up the window where it stood."""
        if self.residents is not None:
            self.residents.go_to(position, self._ring)

    def close(self) -> None:
        """Detach from the cache; samples come from the source from then on. Batches in hand stay valid."""
        if self.residents is not None:
            self.residents.close()
        if self.neighbours is not None:
            self.neighbours.close()
        self._attachment.close()

    def __enter__(self) -> CachedDataset[T]:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # at the interpreter's end anything may be gone already
            self.close()

    # ---- the rest ------------------------------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or "dataset" not in self.__dict__:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.dataset, name)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "tell": Teller()}

    def __repr__(self) -> str:
        return f"CachedDataset({self.dataset!r})"
