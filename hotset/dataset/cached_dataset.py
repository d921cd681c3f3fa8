"""The cached dataset: what :func:`hotset.cache` returns, and every process of the job holds.

It can be used wherever the dataset itself could: it has few attributes of its own, and all others are read
from and set on the dataset. Loaders read samples by sample id from another object
(:mod:`hotset.dataset.sample_access`). With a window its indices are positions among the epoch's residents
(:mod:`hotset.dataset.active_window`).

**Setting an attribute always has an effect.** An attribute that is set on the cached dataset is set on the
dataset, as without a cache, and the samples are cached anew. So it is with all that changes of the dataset
otherwise: :mod:`hotset.dataset.changes` notices it, :mod:`hotset.dataset.current_cache` decides what follows.

**An index that is an integer** goes through the cache. Any other (a slice, a list, a mask, a column's name)
is passed to the dataset.
"""

from __future__ import annotations

import contextlib
import copy
import operator
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, SupportsIndex, TypeVar

import numpy as np
import torch
from torch.utils.data import ConcatDataset, Dataset, IterableDataset, MapDataPipe, Subset

from hotset._warnings import printable
from hotset.dataset.arguments import CacheArguments
from hotset.dataset.current_cache import CurrentCache, Make
from hotset.dataset.dataset_proxy import DatasetProxy
from hotset.dataset.fill_now import fill_now, require_worker_count
from hotset.dataset.pipeline import SampleStopped, stopped
from hotset.dataset.plan import Plan
from hotset.dataset.sample_access import SampleAccess
from hotset.dataset.special_methods import NOT_OF_SAMPLES, special_methods, with_special_methods
from hotset.dataset.stats import Stats
from hotset.dataset.wrapped_datasets import cached_in
from hotset.determinism.objects.safe_access import has, loaded_class
from hotset.errors import ArgumentError
from hotset.store.claims import Ids
from hotset.store.leaves.instances import solid_base

__all__ = ["CachedDataset", "cache_of"]

T = TypeVar("T")

# What programs take apart where they find one (`subset.dataset`; the table of a Hugging Face dataset), which
# would read past the cache, and what torch's loader treats otherwise.
_TAKEN_APART = (Subset, ConcatDataset, IterableDataset, MapDataPipe)


class CachedDataset(DatasetProxy[T]):
    """A dataset whose samples are cached; made by :func:`cache`.

    It can be used wherever the dataset itself could: with any DataLoader, in ``Subset`` and
    ``ConcatDataset``, in forked and spawned workers. It is an instance of the dataset's class, too, for
    ``isinstance``, unless something else is in that class to be taken out of it (a ``Subset``). Attributes
    that it does not have itself are those of the dataset (``cached.classes``). They can be set, too:
    ``cached.transform = t`` is ``dataset.transform = t``, and the samples are cached anew.

    ``cached[index]`` is what ``dataset[index]`` is for every index. Integers go through the cache; slices,
    lists and all other indices are passed to the dataset. So are ``for sample in cached`` and ``x in cached``
    if the dataset's class says itself what they are; otherwise they go through the indices.

    Attributes:
        dataset: the dataset that was given to :func:`cache`.
        plan: what is cached, what stays live, and why; print it.

    Example:
        >>> import hotset, torch
        >>> from torch.utils.data import TensorDataset
        >>> with hotset.cache(TensorDataset(torch.arange(4)), memory="1MiB") as cached:
        ...     samples = [cached[i] for i in (0, 3, 0)]
        ...     print(samples[1], cached.stats().hits, cached.check())
        ...     print(cached[1:3])
        (tensor(3),) 1 []
        (tensor([1, 2]),)
    """

    __slots__ = ("_hotset_cache",)
    _hotset_cache: CurrentCache
    _hotset_special: ClassVar[frozenset[str]] = frozenset()  # methods of the dataset's class, see below

    def __new__(cls, dataset: Any, *_: Any) -> Any:
        kind = _without_special_methods(cls)
        return _blank(kind, special_methods(dataset, kind) if _stands_in_for(dataset) else frozenset())

    def __init__(self, dataset: Dataset[T], arguments: CacheArguments, make: Make) -> None:
        super().__init__(dataset, arguments)
        inner = [cache_of(each) for each in cached_in(dataset) if isinstance(each, CachedDataset)]
        self._hotset_cache = CurrentCache(dataset, arguments, make, self._hotset_set_since, inner)

    def _hotset_attribute_was_set(self, name: str) -> None:
        self._hotset_cache.attribute_was_set(name)

    @property
    def __class__(self) -> type[Any]:
        """What ``isinstance`` also looks at: the dataset's class, as programs and libraries ask for it.

        A dataset that has an attribute ``dataset`` of its own is taken apart, too, and by the wrong one.
        """
        return type(self.dataset) if self._hotset_stands_in else type(self)

    @__class__.setter
    def __class__(self, kind: type[Any]) -> None:
        self.dataset.__class__ = kind
        self._hotset_attribute_was_set("__class__")

    @property
    def _hotset_stands_in(self) -> bool:
        return _stands_in_for(getattr(self, "_hotset_dataset", None))

    @property
    def plan(self) -> Plan:
        return self._hotset_cache.at_use().plan

    @property
    def _hotset_access(self) -> SampleAccess:
        return self._hotset_cache.access

    # ---- samples -------------------------------------------------------------------------------------

    def __len__(self) -> int:
        cache = self._hotset_cache
        # Samplers ask for the length as a pass begins.
        return (cache.at_use() if cache.in_pass else cache.as_pass_begins()).plan.used

    def __getitem__(self, index: Any) -> Any:
        try:
            return self._hotset_sample(index)
        except SampleStopped as error:
            raise stopped(error) from None

    def _hotset_sample(self, index: Any) -> Any:
        current, number = self._hotset_cache.at_sample(), _integer(index)
        if number is None:
            self._hotset_require_dataset_can_answer(f"dataset[{index!r}]")
            return self.dataset[index]
        if not -current.plan.used <= number < current.plan.used:
            if current.window is not None:
                raise IndexError(
                    f"index {number} is out of range for a window of {current.plan.used:,} resident samples"
                )
            # Out of range: the dataset itself raises, or returns something.
            return current.source.finish(current.source.read_whole(number))
        number += current.plan.used if number < 0 else 0
        (record,) = self._hotset_records(current, np.array([number], np.int64))
        return current.source.finish(record)

    def __getitems__(self, indices: Sequence[Any]) -> list[T]:
        """The samples of a batch, as torch's DataLoader calls it."""
        try:
            return self._hotset_samples(indices)
        except SampleStopped as error:
            raise stopped(error) from None

    def __iter__(self) -> Iterator[T]:
        return iter(self.dataset if self._hotset_answers("__iter__") else _ByIndex(self))

    def __contains__(self, value: object) -> bool:
        return value in (self.dataset if self._hotset_answers("__contains__") else iter(self))

    def __reversed__(self) -> Iterator[T]:
        if self._hotset_answers("__reversed__"):
            return reversed(self.dataset)  # type: ignore[no-any-return]
        return map(self.__getitem__, range(len(self) - 1, -1, -1))

    def __add__(self, other: Any) -> Any:
        if self._hotset_adds("__add__"):
            return self._hotset_or_self(self.dataset + other)
        return super().__add__(other)

    def __radd__(self, other: Any) -> Any:
        if self._hotset_adds("__radd__"):  # as by sum(), which begins with 0
            return self._hotset_or_self(other + self.dataset)
        return NotImplemented

    def _hotset_adds(self, method: str) -> bool:
        """Whether the dataset's class says itself what its sum is: torch's own is a ConcatDataset."""
        kind = type(self.dataset)
        own = issubclass(kind, Dataset) and getattr(kind, method, None) is not getattr(Dataset, method, None)
        return own and self._hotset_answers(method)

    def _hotset_or_self(self, result: Any) -> Any:
        return self if result is self.dataset else result

    def _hotset_answers(self, method: str) -> bool:
        """Whether the dataset's class has a special method that may know more than its indices do."""
        current = self._hotset_cache.at_use()
        indices_are_its_own = current.window is None and self._hotset_arguments.transform is None
        return indices_are_its_own and getattr(type(self.dataset), method, None) is not None

    def _hotset_call(self, method: str, *arguments: Any, **named: Any) -> Any:
        """Call a special method of the dataset's class."""
        if method not in NOT_OF_SAMPLES:
            self._hotset_require_dataset_can_answer(f"{method}()")
        self._hotset_set_since.method_was_looked_up()
        return self._hotset_or_self(getattr(self.dataset, method)(*arguments, **named))

    def _hotset_is_entered(self) -> bool:
        """Whether ``with`` is the dataset's as well: a list, or a Hugging Face dataset, is left as it is."""
        return self._hotset_stands_in and hasattr(type(self.dataset), "__enter__")

    def __enter__(self) -> Any:
        return self._hotset_call("__enter__") if self._hotset_is_entered() else self

    def __exit__(self, *exception: object) -> Any:
        self.close()
        return self._hotset_call("__exit__", *exception) if self._hotset_is_entered() else None

    def __setitem__(self, index: Any, value: Any) -> None:
        self._hotset_require_indices_are_the_datasets(index)
        super().__setitem__(index, value)

    def __delitem__(self, index: Any) -> None:
        self._hotset_require_indices_are_the_datasets(index)
        super().__delitem__(index)

    def _hotset_require_indices_are_the_datasets(self, index: Any) -> None:
        """Refuse to set or delete an element by its index.

        Raises:
            TypeError: there is a window.
        """
        if self._hotset_cache.access.window is not None:
            where = printable(f"[{index!r}]")
            raise TypeError(
                f"cached{where} cannot be set or deleted, as a window's indices are not the dataset's; set "
                f"or delete it by the dataset's own index, `.dataset{where}`."
            )

    def _hotset_samples(self, indices: Sequence[Any]) -> list[T]:
        current = self._hotset_cache.at_sample()
        numbers: list[Any] = [_integer(index) for index in indices]
        if None in numbers:
            many = getattr(self.dataset, "__getitems__", None)
            if many is not None:
                self._hotset_require_dataset_can_answer("a batch of these indices")
                return many(indices)  # type: ignore[no-any-return]
            return [self[index] for index in indices]
        length = current.plan.used
        if numbers and not (-length <= min(numbers) and max(numbers) < length):
            return [self[number] for number in numbers]
        ids = np.array(numbers, np.int64)
        ids[ids < 0] += length
        return current.source.finish_batch(self._hotset_records(current, ids))

    @staticmethod
    def _hotset_records(current: SampleAccess, ids: Ids) -> Iterator[Any]:
        """The samples at these indices, from 0 on and in range, as they are at the cut."""
        if current.window is not None:
            current.window.count(len(ids))
        return current.records(current.sample_ids(ids))

    def _hotset_require_dataset_can_answer(self, what: str) -> None:
        """Refuse an index that the dataset alone cannot answer.

        Raises:
            TypeError: there is a ``transform=`` or a window, which the dataset does not know.
        """
        if self._hotset_cache.access.window is not None:
            raise TypeError(
                f"{printable(what)} cannot be passed to the dataset, as a window's indices are not the "
                "dataset's; index it by integers."
            )
        if self._hotset_arguments.transform is not None:
            raise TypeError(
                f"transform= takes one sample, but {printable(what)} may return any number of them; index "
                "the cached dataset by integers, or give the transform to the dataset itself."
            )

    # ---- the store -----------------------------------------------------------------------------------

    def stats(self) -> Stats:
        """What the cache holds and has served, over all processes."""
        return self._hotset_cache.at_use().stats()

    def check(self) -> list[str]:
        """Verify every record. Returns a sentence for each problem, or an empty list."""
        return self._hotset_cache.at_use().check()

    def fill(self, *, progress: bool = False, num_workers: int = 0) -> None:
        """Cache all samples now, as far as there is room, and not as training comes to them.

        It may be interrupted: what was read stays, and a second call reads the rest. Several processes that
        call it, ranks for example, share the work.

        Args:
            progress: show a bar on standard error, with samples per second, MiB and the time that is left.
            num_workers: processes that read; 0 reads in this one.

        Raises:
            ArgumentError: the cache has a window, which is filled by processes of its own (``prefill=``);
                ``num_workers`` is not a number from 0 on, or not 0 although a ``hotset.batched`` runs on a
                device.
            Exception: what the dataset raises.

        Example:
            >>> import hotset
            >>> cached = hotset.cache([float(number) for number in range(100)], memory="1MiB")
            >>> cached.fill()
            >>> cached.stats().cached
            100
            >>> cached.close()
        """
        require_worker_count(num_workers)
        current = self._hotset_cache.as_pass_begins()
        if current.window is not None:
            raise ArgumentError(
                "fill() must not be called with window=: a window is filled by processes of its own; write "
                "hotset.Window(..., prefill=True) to have the first residents read before training begins."
            )
        device = current.device
        if num_workers and device is not None:
            raise ArgumentError(
                f"num_workers= must be 0, got {num_workers}: {current.source.batched[0]!r} runs on {device}, "
                "which worker processes must not use."
            )
        try:
            fill_now(current, progress, num_workers)
        finally:
            self._hotset_cache.changes.pass_ended()

    def clear(self) -> None:
        """Drop every cached sample, in all processes. A cache that an audit has disabled is used again.

        Raises:
            SegmentError: another process went on writing samples for five seconds, or another machine of the
                cluster has not confirmed that it dropped its part.
        """
        self._hotset_cache.at_use().clear()

    def set_epoch(self, epoch: int) -> None:
        """Announce the epoch that begins; calls the dataset's ``set_epoch`` as well, if it has one.

        The sampler determines the order: call ``loader.sampler.set_epoch(epoch)`` as usual. What the
        dataset's ``set_epoch`` changes counts as if it were called on the dataset: if samples may depend on
        it, they are cached anew, and come from the source if it changes again before the cache has served an
        epoch; in mid-pass, from the next pass on. A window moves on if the epoch differs from the last one;
        :class:`hotset.DataLoader` announces epochs to it itself, and not a second time.

        Raises:
            Exception: what the dataset has raised in a process that prepares a window's next samples.
        """
        self._hotset_cache.set_epoch(epoch)

    def close(self) -> None:
        """Detach from the cache; samples then come from the source. Existing batches stay valid."""
        self._hotset_cache.close()

    def __del__(self, suppress: type[contextlib.suppress] = contextlib.suppress) -> None:
        # At interpreter exit anything may be gone already, this module's imports included.
        with suppress(Exception):
            self.close()

    def __copy__(self) -> CachedDataset[T]:
        """A cached dataset over a copy of the dataset: what is set on one is not set on the other."""
        kind = _without_special_methods(type(self))
        return kind(copy.copy(self.dataset), self._hotset_arguments, self._hotset_cache.make)  # type: ignore[no-any-return]

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        # torch's loader pickles it for its workers before it asks for its length.
        self._hotset_cache.as_pass_begins()
        reduced: Any = super().__reduce_ex__(protocol)
        return _blank, (_without_special_methods(type(self)), self._hotset_special), reduced[2]


def _stands_in_for(dataset: Any) -> bool:
    """Whether a cached dataset is to be found an instance of the class of this dataset.

    A class with a base written in C (a list, an array) is not: what is in it is reached past its methods.
    """
    kind = type(dataset)
    from_python = issubclass(kind, Dataset) or solid_base(kind) is object
    taken_apart = (*_TAKEN_APART, *loaded_class("datasets", "Dataset"))
    return from_python and not issubclass(kind, taken_apart) and not has(dataset, "dataset")


def _without_special_methods(kind: type[CachedDataset[Any]]) -> Any:
    return kind.__base__ if kind._hotset_special else kind


def _blank(kind: Any, names: frozenset[str]) -> Any:
    """A cached dataset without its state, with these special methods of its dataset's class.

    Pickle itself makes one only where ``__class__`` is its type.
    """
    return object.__new__(with_special_methods(kind, names) if names else kind)


class _ByIndex:
    """A cached dataset as Python iterates over what has no ``__iter__``: index by index until IndexError."""

    def __init__(self, cached: CachedDataset[Any]) -> None:
        self._cached = cached

    def __getitem__(self, index: int) -> Any:
        return self._cached[index]


def cache_of(cached: CachedDataset[Any]) -> CurrentCache:
    """What loaders ask of a cached dataset, besides what users may ask.

    A function, as a public method would hide what the user's dataset has by that name.
    """
    return cached._hotset_cache


def _integer(index: Any) -> int | None:
    """An index as an integer; None for anything else, such as an array of one dimension or more."""
    if type(index) is int:
        return index
    if isinstance(index, bool) or getattr(index, "dtype", None) in (torch.bool, np.bool_):
        return None  # a tensor treats it as a mask
    if getattr(index, "shape", ()) != ():
        return None
    try:
        return operator.index(index)
    except TypeError:
        return None
