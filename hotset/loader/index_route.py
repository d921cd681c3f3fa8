"""The route from a loader's indices to the caches behind them, through Subset and ConcatDataset.

``random_split`` and friends wrap a cached data set in index arithmetic. Seen through, a whole batch of
indices is one numpy expression, and can be gathered like the cached data set's own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from torch.utils.data import ConcatDataset, Subset

from hotset.dataset.cached_dataset import CachedDataset
from hotset.errors import ArgumentError
from hotset.store.claims import Ids
from hotset.store.schema import Schema

__all__ = ["Route", "fetched", "route_to", "samples_in"]


class Route:
    """Caches behind a data set, and the way to them.

    Attributes:
        caches: the cached data sets, in the order of their samples.
        length: of the data set that the indices belong to.
    """

    def __init__(self, caches: list[CachedDataset[Any]], which: Ids, local: Ids | None) -> None:
        self.caches = caches
        self.length = len(which) if local is not None else len(caches[0])
        self._which = which
        self._local = local
        self._currents = [cached._current for cached in caches]

    def require_unchanged(self) -> None:
        """Refuse to go on with a pass whose dataset is not what it was when the pass began.

        Raises:
            ArgumentError: a transform, or another attribute, was set since.
        """
        for cached, current in zip(self.caches, self._currents, strict=True):
            if cached._up_to_date() is not current:
                raise ArgumentError(
                    f"{current.plan.name} was given another transform or attribute in the midst of a pass, "
                    "whose batches are made ahead; begin a new pass: iter(loader)."
                )

    @property
    def single(self) -> CachedDataset[Any] | None:
        """The only cache, if there is one only."""
        return self.caches[0] if len(self.caches) == 1 else None

    @property
    def schema(self) -> Schema | None:
        """The schema of the samples that come this way; None if there is not one for all of them."""
        single = self.single
        if single is None or single._store is None or single._source.live:
            return None
        return single._store.schema

    def resolve(self, indices: Sequence[Any]) -> Ids | None:
        """The indices as numbers in ``range(length)``; None if they are something else, or out of range."""
        try:
            ids = np.asarray(indices)
        except ValueError:  # lists of different lengths
            return None
        if ids.ndim != 1 or ids.dtype.kind not in "iu" or not len(ids):
            return None
        ids = ids.astype(np.int64, copy=False)
        # The ufuncs themselves: the arrays' methods are Python around them, and this is done for every batch.
        low = int(np.minimum.reduce(ids))
        if low < -self.length or int(np.maximum.reduce(ids)) >= self.length:
            return None
        return np.where(ids < 0, ids + self.length, ids) if low < 0 else ids

    def local(self, ids: Ids) -> Ids:
        """What the single cache's store calls these samples."""
        return self.caches[0]._access.numbers(self._places(ids))

    @property
    def spills(self) -> bool:
        """Whether some of the samples may lie on a disk."""
        return any(cached._access.spills for cached in self.caches)

    @property
    def has_neighbours(self) -> bool:
        """Whether other machines may have samples of the single cache."""
        return self.single is not None and self.single._remote is not None

    def announce(self, indices: Any) -> None:
        """Say that these indices' samples are wanted soon: what lies on a disk is fetched meanwhile."""
        ids = self.resolve(indices)
        if ids is None:
            return
        places = self._places(ids)
        for number, cached in enumerate(self.caches):
            mine = places if len(self.caches) == 1 else places[self._which[ids] == number]
            cached._access.announce(cached._access.numbers(mine))

    def _places(self, ids: Ids) -> Ids:
        """The samples' places in their caches."""
        return ids if self._local is None else self._local[ids]

    def samples(self, ids: Ids, in_hand: dict[int, Any] | None = None) -> list[Any]:
        """The samples, live part included, in order.

        Args:
            ids: numbers that :meth:`resolve` gave.
            in_hand: what filling the single cache has just returned for them.
        """
        if len(self.caches) == 1:
            finish = self.caches[0]._source.finish
            return [finish(sample) for sample in self.caches[0]._access.records(self.local(ids), in_hand)]
        which, inside = self._which[ids], self._places(ids)
        records: dict[int, Iterator[Any]] = {}
        for number in np.unique(which).tolist():
            supply = self.caches[number]._access
            records[number] = supply.records(supply.numbers(inside[which == number]))
        # In the batch's order, each with its live part: that is the order of random draws.
        return [self.caches[number]._source.finish(next(records[number])) for number in which.tolist()]

    def all_present(self) -> bool:
        """Whether every sample that these indices can name is cached now."""
        if len(self.caches) > 1:
            return all(cached._access.holds(None) for cached in self.caches)
        return self.caches[0]._access.holds(self._local)


def fetched(dataset: Any, indices: Sequence[Any]) -> list[Any]:
    """The samples of a batch, asked for as torch's loader asks."""
    many = getattr(dataset, "__getitems__", None)
    return many(indices) if many else [dataset[index] for index in indices]


def route_to(dataset: Any) -> Route | None:
    """The route to the caches behind a data set; None if something else is in the way."""
    if isinstance(dataset, CachedDataset):
        return Route([dataset], np.empty(0, np.int64), None)
    if type(dataset) is Subset:
        inner = route_to(dataset.dataset)
        chosen = inner.resolve(dataset.indices) if inner is not None and len(dataset.indices) else None
        if inner is None or chosen is None:
            return None
        which = inner._which[chosen] if len(inner.caches) > 1 else np.zeros(len(chosen), np.int64)
        return Route(inner.caches, which, inner._places(chosen))
    if type(dataset) is ConcatDataset:
        parts = [route_to(part) for part in dataset.datasets]
        caches: list[CachedDataset[Any]] = []
        within, local = [], []
        for part in parts:
            if part is None:
                return None
            numbers = np.arange(part.length)
            inside = part._which if len(part.caches) > 1 else np.zeros(part.length, np.int64)
            within.append(inside + len(caches))
            local.append(part._places(numbers))
            caches += part.caches
        return Route(caches, np.concatenate(within), np.concatenate(local))
    return None


def samples_in(index: Any) -> int:
    """How many samples an index of a loader's order stands for: a list of them, or one.

    Example:
        >>> samples_in([3, 1]), samples_in(7), samples_in("seven")
        (2, 1, 1)
    """
    try:
        return 1 if isinstance(index, (str, bytes)) else len(index)
    except TypeError:
        return 1
