"""The route from a loader's indices to the caches behind them, through Subset and ConcatDataset.

``random_split``, for example, wraps a cached dataset in a Subset, which maps indices. A route does the same
for a whole batch of indices in one numpy expression, so that the batch can be gathered like the cached
dataset's own.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from torch.utils.data import ConcatDataset, Subset

from hotset.dataset.cached_dataset import CachedDataset, cache_of
from hotset.dataset.current_cache import CurrentCache
from hotset.dataset.dataset_proxy import DatasetProxy, current_of
from hotset.dataset.sample_access import SampleAccess
from hotset.dataset.streams.cached_stream import CachedStream, passes_of
from hotset.errors import ArgumentError
from hotset.store.claims import Ids
from hotset.store.leaves.schema import Schema

__all__ = ["Indices", "Route", "fetched", "route_to", "samples_in"]

Indices = npt.NDArray[np.int64]


class Route:
    """The caches behind a dataset, and the way from its indices to their samples.

    ::

        index in the loader's dataset ──> cache, index in its dataset ──> sample id in its store
                                 resolve                      sample_ids

    Args:
        caches: the cached datasets and streams, in the order of their samples.
        inner: for each index the index in its cache's dataset; None if the two are equal.
        which: for each index the number of its cache; None with one cache.

    Attributes:
        caches: the cached datasets and streams.
        by_row: whether torch reads the samples of a batch one by one, as through a ConcatDataset.
    """

    def __init__(
        self,
        caches: list[DatasetProxy[Any]],
        inner: Indices | None = None,
        which: Indices | None = None,
        *,
        by_row: bool = False,
    ) -> None:
        self.caches = caches
        self.by_row = by_row
        self._which = which
        self._inner = inner
        self._begun_with = self.currents

    @functools.cached_property
    def length(self) -> int:
        """Of the dataset that the indices belong to."""
        # Not before it is asked for: a cache's length is a comparison of all that its dataset holds.
        return len(self._inner) if self._inner is not None else len(self.caches[0])

    @property
    def followed(self) -> list[CurrentCache]:
        """What follows changes of each cached dataset; a stream looks itself as a pass over it begins."""
        return [cache_of(cached) for cached in self.caches if isinstance(cached, CachedDataset)]

    def follow(self, *, may_go_on: bool) -> bool:
        """Follow what has changed since the pass began.

        Args:
            may_go_on: whether the pass may go on with what another pass has found changed as it began.

        Returns:
            Whether it is to go on with another route: samples are read by something else now.

        Raises:
            ArgumentError: a transform, or another attribute, was set since.
        """
        for cache in self.followed:
            cache.at_use(in_pass=True)
        is_other = False
        for cached, before in zip(self.caches, self._begun_with, strict=True):
            now = current_of(cached)
            if now is not before:
                by_pass = isinstance(cached, CachedDataset) and cache_of(cached).made_by_pass is now
                if not (may_go_on and by_pass):
                    raise self.refusal(before)
                is_other = True
        return is_other

    def refusal(self, access: SampleAccess) -> ArgumentError:
        """The error for a pass that cannot go on."""
        return ArgumentError(
            f"{access.plan.name} was given another transform or attribute in the midst of a pass, whose "
            "batches are made ahead; begin a new pass: iter(loader)."
        )

    @property
    def currents(self) -> list[SampleAccess]:
        """What the samples of each cache are read by now; a worker may come to read its dataset uncached."""
        return [current_of(cached) for cached in self.caches]

    @property
    def single(self) -> SampleAccess | None:
        """What samples are read by now, if there is only one cache."""
        return current_of(self.caches[0]) if len(self.caches) == 1 else None

    @property
    def schema(self) -> Schema | None:
        """The schema of all samples; None if there are several, or none is known."""
        single = self.single
        store = single.store if single is not None and not single.source.live else None
        return store.schema if store is not None else None

    def resolve(self, given: Sequence[Any]) -> Indices | None:
        """The given indices, in ``range(length)``; None if one is not an integer, or is out of range."""
        try:
            indices = np.asarray(given)
        except ValueError:  # lists of different lengths
            return None
        if indices.ndim != 1 or indices.dtype.kind not in "iu" or not len(indices):
            return None
        # The ufuncs, not the arrays' methods, which are Python code around them: this runs for every batch.
        low = int(np.minimum.reduce(indices))
        if low < -self.length or int(np.maximum.reduce(indices)) >= self.length:
            return None
        indices = indices.astype(np.int64, copy=False)  # not before: 2**64 - 1 would become -1
        return np.where(indices < 0, indices + self.length, indices) if low < 0 else indices

    def sample_ids(self, indices: Indices) -> Ids:
        """The sample ids, in the single cache's store, of indices that :meth:`resolve` returned."""
        return current_of(self.caches[0]).sample_ids(self._inner_indices(indices))

    def ids_of(self, given: Any) -> Ids | None:
        """The sample ids, in the single cache's store, of these indices; None as :meth:`resolve`."""
        resolved = self.resolve(given)
        return self.sample_ids(resolved) if resolved is not None else None

    @property
    def spills(self) -> bool:
        """Whether some of the samples may lie on a disk."""
        return any(each.spills for each in self.currents)

    @property
    def has_peers(self) -> bool:
        """Whether other machines may have samples of the single cache."""
        single = self.single
        return single is not None and single.remote is not None

    def prefetch(self, given: Any) -> None:
        """Announce that these samples are needed soon, so that those on a disk are read meanwhile."""
        indices = self.resolve(given)
        if indices is None:
            return
        which, inner = self._numbers_of_caches(indices), self._inner_indices(indices)
        for number, each in enumerate(self.currents):
            each.prefetch(each.sample_ids(inner[which == number]))

    def _inner_indices(self, indices: Indices) -> Indices:
        """The indices of the same samples in their cached datasets."""
        return indices if self._inner is None else self._inner[indices]

    def _numbers_of_caches(self, indices: Indices) -> Indices:
        """For each of these indices the number of its cache."""
        return np.zeros(len(indices), np.int64) if self._which is None else self._which[indices]

    def samples(self, indices: Indices, uncached: dict[int, Any] | None = None) -> list[Any]:
        """The samples, live part included, in order.

        Args:
            indices: returned by :meth:`resolve`.
            uncached: samples by id that were just read to fill the single cache.
        """
        single = self.single
        if single is not None:
            records_at_cut = single.records(self.sample_ids(indices), uncached)
            if self.by_row:
                return [single.source.finish(sample) for sample in records_at_cut]
            return single.source.finish_batch(records_at_cut)
        which, inside = self._numbers_of_caches(indices), self._inner_indices(indices)
        currents = self.currents
        records: dict[int, Iterator[Any]] = {}
        for number in np.unique(which).tolist():
            access = currents[number]
            records[number] = access.records(access.sample_ids(inside[which == number]))
        # Live parts run in the batch's order, as they draw random numbers.
        return [currents[number].source.finish(next(records[number])) for number in which.tolist()]

    def all_present(self) -> bool:
        """Whether all samples of the dataset are cached now."""
        single = self.single
        if single is not None:
            return single.holds(self._inner)
        return all(each.holds(None) for each in self.currents)


def fetched(dataset: Any, indices: Sequence[Any]) -> list[Any]:
    """The samples of a batch, read as torch's loader reads them."""
    many = getattr(dataset, "__getitems__", None)
    return many(indices) if many else [dataset[index] for index in indices]


def route_to(dataset: Any, *, in_part: bool = False) -> Route | None:
    """The route to the caches behind a dataset; None if there are none, or another wrapper is in between.

    Args:
        in_part: for a stream that is recorded in part, the route to that part.
    """
    if isinstance(dataset, CachedDataset):
        return Route([dataset])
    if isinstance(dataset, CachedStream):
        passes = passes_of(dataset)
        return Route([dataset], passes.ids()) if passes.has_index(in_part=in_part) else None
    if type(dataset) is Subset:
        inner = route_to(dataset.dataset)
        chosen = inner.resolve(dataset.indices) if inner is not None and len(dataset.indices) else None
        if inner is None or chosen is None:
            return None
        inside, numbers = inner._inner_indices(chosen), inner._numbers_of_caches(chosen)
        return Route(inner.caches, inside, numbers, by_row=inner.by_row)
    if type(dataset) is ConcatDataset:
        parts = [route_to(part) for part in dataset.datasets]
        caches: list[DatasetProxy[Any]] = []
        insides, which = [], []
        # torch's keeps the lengths that its parts had when it was made.
        for part, length in zip(parts, np.diff(dataset.cumulative_sizes, prepend=0), strict=False):
            if part is None or part.length < length:
                return None
            indices = np.arange(length)
            which.append(part._numbers_of_caches(indices) + len(caches))
            insides.append(part._inner_indices(indices))
            caches += part.caches
        return Route(caches, np.concatenate(insides), np.concatenate(which), by_row=True)
    return None


def samples_in(index: Any) -> int:
    """How many samples an element of a loader's order stands for: a list of indices, or one index.

    Example:
        >>> samples_in([3, 1]), samples_in(7), samples_in("seven")
        (2, 1, 1)
    """
    try:
        return 1 if isinstance(index, (str, bytes)) else len(index)
    except TypeError:
        return 1
