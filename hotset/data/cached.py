"""The cached data set: what :func:`hotset.cache` returns, and every process of the job holds.

It can stand wherever the data set itself could: its own attributes are few, and all others are the data
set's. What loaders need of it, samples by the store's numbers, is another object (:mod:`hotset.data.supply`).
With a window its positions are those of the epoch's residents (:mod:`hotset.data.residents`).
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np
from torch.utils.data import Dataset

from hotset.data.attachment import Attachment
from hotset.data.plan import Plan
from hotset.data.residents import Residents
from hotset.data.source import Source
from hotset.data.stats import Stats, stats_of
from hotset.data.supply import Supply
from hotset.errors import SegmentError
from hotset.session.retire import DESTROYED
from hotset.session.share import Share
from hotset.store.format import Live
from hotset.store.store import Store

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
        plan: what is cached, what stays live, and why; print it.
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
        self._source = source
        self.plan = plan
        self._residents = residents
        self._neighbours = neighbours
        attachment = Attachment(store, registration, plan.name)
        self._supply = Supply(source, plan, attachment, residents, neighbours)
        self._length = plan.used
        self.epoch = 0

    # ---- the data set --------------------------------------------------------------------------------

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> T:
        number = operator.index(index)
        if not -self._length <= number < self._length:
            if self._residents is not None:
                raise IndexError(f"the window has {self._length:,} resident samples, and no number {number}")
            # Out of range: whatever the data set itself says to that.
            return self._source.finish(self._source.read(number))  # type: ignore[no-any-return]
        return self.__getitems__([number])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[T]:
        """The samples of a batch, as DataLoader asks for them."""
        ids = np.array([operator.index(index) for index in indices], np.int64)
        if len(ids) and not (-self._length <= ids.min() and ids.max() < self._length):
            return [self[index] for index in ids.tolist()]
        ids[ids < 0] += self._length
        if self._residents is not None:
            self._residents.count(len(ids), self._supply.ring, self._supply.tell)
        return [self._source.finish(sample) for sample in self._supply.records(self._supply.numbers(ids))]

    # ---- the store -----------------------------------------------------------------------------------

    @property
    def _store(self) -> Store | None:
        """Where samples are kept; None if none are: see :attr:`Supply.store`."""
        return self._supply.store

    def stats(self) -> Stats:
        """What the cache holds and has served, over all processes."""
        residents, ring = self._residents, self._supply.ring
        replaced = residents.cursor(ring) if residents is not None else 0
        store = self._store
        if store is None:
            return Stats(0, len(self), 0, 0, 0, self._supply.uncached, 0.0, replaced=replaced)
        entries = residents.entries(None, ring) if residents is not None else None
        peers = self._neighbours.traffic() if self._neighbours is not None else {}
        return stats_of(store, len(self), entries, peers, replaced)

    def check(self) -> list[str]:
        """Verify every record; a sentence for each problem, an empty list if there is none."""
        store = self._store
        return store.check() if store is not None else []

    def clear(self) -> None:
        """Forget every cached sample, in all processes; also those that an audit has found not to be right.

        Raises:
            SegmentError: another process went on writing samples for five seconds, or another machine of the
                cluster has not said that it has forgotten its part.
        """
        store = self._supply.any_store
        if store is not None and store.segment.live[Live.CONDEMNED] == DESTROYED:
            raise SegmentError(f"{self.plan.name} cannot be cleared: its session was destroyed.")
        if store is not None and not store.clear():
            raise SegmentError(
                f"{self.plan.name} cannot be cleared while other processes fill it; stop them."
            )
        if store is not None and self._neighbours is not None:
            self._neighbours.clear(store, self.plan.name)

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch begins; the data set is told as well, if it has a ``set_epoch``.

        The order of samples is the sampler's: call ``loader.sampler.set_epoch(epoch)`` as ever. A cached
        sample does not change with the epoch. A window moves on, if this is another epoch than the last;
        with :class:`hotset.DataLoader` it does so by itself, and not a second time.

        Raises:
            Exception: what the data set has raised in a process that prepares a window's next samples.
        """
        self.epoch = epoch
        if self._residents is not None:
            self._residents.announce(epoch, self._supply.ring, self._supply.tell)
            self._supply.tell_of_machines()
        # Two, where the chain was cut: what is read is a copy then.
        for dataset in {id(known): known for known in (self.dataset, self._source.dataset)}.values():
            if hasattr(dataset, "set_epoch"):
                dataset.set_epoch(epoch)

    def close(self) -> None:
        """Detach from the cache; samples come from the source from then on. Batches in hand stay valid."""
        if self._residents is not None:
            self._residents.close()
        if self._neighbours is not None:
            self._neighbours.close()
        self._supply.close()

    def __enter__(self) -> CachedDataset[T]:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __del__(self, suppress: type[contextlib.suppress] = contextlib.suppress) -> None:
        # At the interpreter's end anything may be gone already, what this module has imported too.
        with suppress(Exception):
            self.close()

    # ---- the rest ------------------------------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or "dataset" not in self.__dict__:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.dataset, name)

    def __repr__(self) -> str:
        return f"CachedDataset({self.dataset!r})"
