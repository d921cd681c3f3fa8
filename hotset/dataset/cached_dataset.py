"""The cached dataset: what :func:`hotset.cache` returns, and every process of the job holds.

It can be used wherever the dataset itself could: it has few attributes of its own, and all others are read
from and set on the dataset. Loaders read samples by sample id from another object
(:mod:`hotset.dataset.sample_access`). With a window its indices are positions among the epoch's residents
(:mod:`hotset.dataset.active_window`).

**Setting an attribute always has an effect.** Libraries set a dataset's transform after it was made; timm's
``create_loader`` does. An attribute that is set on the cached dataset is set on the dataset, as without a
cache. The cached samples are those of the dataset before, so they are dropped, and a new plan and cache are
made with the same arguments:

=========================================  ===================================================================
set on the cached dataset, any attribute   a new plan at once
set by one of the dataset's methods that   noticed at the next use, in mid-pass at the next pass
was looked up on the cached dataset
a transform set on the dataset itself, or  noticed at the next use (``len()``, indices, a loader's pass), by
in what it wraps, or put into a container  the identity of what it holds (:class:`Snapshot`); workers that
                                           had begun before that read their dataset uncached
any other attribute, set on the dataset    noticed as the next pass begins (:mod:`.content_watch`); a second
itself, or changed in place                change of the same attribute ends the cache
what samples depend on, changed by         the same, at once; in mid-pass at the next pass
the dataset's ``set_epoch``
set by a loader's worker                   that worker reads its dataset, as it is there, uncached
no new plan can be made, or there is a     samples come from the source, with a warning
``key=``, which names what was cached
=========================================  ===================================================================

What belongs to one plan is in one object, :class:`SampleAccess`, which is replaced as a whole.

**An index that is an integer** goes through the cache. Any other (a slice, a list, a mask, a column's name)
is passed to the dataset.
"""

from __future__ import annotations

import contextlib
import copy
import multiprocessing
import operator
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import torch
from torch.utils.data import Dataset, get_worker_info

from hotset._warnings import printable, warn
from hotset.dataset.arguments import CacheArguments
from hotset.dataset.attachment import Attachment
from hotset.dataset.content_watch import ContentWatch
from hotset.dataset.dataset_proxy import DatasetProxy, Own
from hotset.dataset.fill_now import fill_now, require_worker_count
from hotset.dataset.held_attributes import HeldAttributes
from hotset.dataset.identity import Identity
from hotset.dataset.pipeline import Pipeline, SampleStopped, Source, stopped
from hotset.dataset.plan import Plan
from hotset.dataset.sample_access import SampleAccess
from hotset.dataset.stats import Stats, stats_of
from hotset.dataset.streams.source import StreamSource
from hotset.dataset.transform_attributes import CopiedAttributes, names_transforms
from hotset.determinism.declare import declaration_of, declared
from hotset.determinism.objects.safe_access import has
from hotset.errors import ArgumentError, SegmentError
from hotset.store.claims import Ids
from hotset.store.format import DESTROYED, Live

__all__ = [
    "CachedDataset",
    "Make",
    "batches_made_here",
    "current_of",
    "fill_for_workers",
    "followed",
    "pass_begins",
    "pass_ends",
]

T = TypeVar("T")


# Caches a dataset with the arguments of hotset.cache; told whether that is done again. It pickles.
Make = Callable[[Any, CacheArguments, bool], SampleAccess]


class CachedDataset(DatasetProxy[T]):
    """A dataset whose samples are cached; made by :func:`cache`.

    It can be used wherever the dataset itself could: with any DataLoader, in ``Subset`` and
    ``ConcatDataset``, in forked and spawned workers. Attributes that it does not have itself are those of the
    dataset (``cached.classes``). They can be set, too: ``cached.transform = t`` is ``dataset.transform = t``,
    and the samples are cached anew.

    ``cached[index]`` is what ``dataset[index]`` is for every index. Integers go through the cache; slices,
    lists and all other indices are passed to the dataset. So are ``for sample in cached`` and ``x in cached``
    if the dataset's class says itself what they are; otherwise they go through the indices.

    Attributes:
        dataset: the dataset that was given to :func:`cache`.
        plan: what is cached, what stays live, and why; print it.
        epoch: the last epoch given to :meth:`set_epoch`; 0 before.

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

    _make = Own[Make]()
    _current = Own[SampleAccess]()
    _copied = Own[CopiedAttributes]()  # from the dataset to the copy of it that is read, if there is one
    _closed = Own[bool]()
    _pass = Own["weakref.ref[Any] | None"]()  # this process is in the midst of a pass while that is alive
    _watch = Own["ContentWatch | None"]()  # None if no change of content counts
    _workers_keep = Own[bool]()  # whether workers run that have the dataset as it was
    _followed = Own[set[str]]()  # the attributes after whose change samples were cached anew

    def __init__(self, dataset: Dataset[T], arguments: CacheArguments, make: Make) -> None:
        super().__init__(dataset, arguments)  # takes the snapshot before a transform is run
        self._make = make
        self._closed = False
        self._pass, self._workers_keep, self._followed = None, False, set()
        self._use(make(dataset, arguments, False))

    def _use(self, current: SampleAccess) -> None:
        """Read samples by these objects from now on."""
        self._current = current
        self._copied = CopiedAttributes(self._dataset, current.source.dataset)
        is_watched = current.any_store is not None and not isinstance(self._dataset, StreamSource)
        self._watch = None
        if is_watched and not self._is_believed() and get_worker_info() is None:
            self._watch = ContentWatch(self._dataset, current)

    def _is_believed(self) -> bool:
        """Whether the user says what samples depend on, so that nothing is compared."""
        return declared(self._dataset) == "deterministic" or self._arguments.key is not None

    @property
    def plan(self) -> Plan:
        return self._up_to_date().plan

    # ---- samples -------------------------------------------------------------------------------------

    def __len__(self) -> int:
        in_pass = self._in_pass()
        self._up_to_date(in_pass=in_pass)
        if in_pass:
            return self._current.plan.used
        if self._length_has_changed():
            self._length_was_changed()
        else:
            self._follow_content()  # samplers ask for the length as a pass begins
        return self._current.plan.used

    def _in_pass(self) -> bool:
        """Whether this process is in the midst of a loader's pass."""
        return self._pass is not None and self._pass() is not None

    def _length_has_changed(self) -> bool:
        """Whether the dataset has another length than when it was planned; a stream has none to compare."""
        current = self._current
        if current.window is not None or isinstance(self._dataset, StreamSource):
            return False
        return len(self._dataset) != current.plan.samples

    def _follow_content(self) -> None:
        """Cache anew, or no more, what may depend on something that the dataset holds and that has changed.

        A cache that is made anew must pay: if it has not served as many samples as it holds before the same
        changes again, there is no other. So sizes that grow every few epochs are followed, and a counter of
        epochs is followed once.

        Workers that run already see a change only of memory that processes share. After another one samples
        stay those of the dataset as it was, as without a cache.
        """
        if self._watch is None:
            return
        change = self._watch.change(shared=self._workers_keep)
        if change is None:
            if self._workers_keep and self._watch.change() is not None:
                self._current.leave_off_audits()
            return
        what, stats = str(change), self._stats_of(self._current)
        store = self._current.any_store
        # torch's loader does not tell whether its workers run.
        may_run = bool(multiprocessing.active_children()) and self._watch.change(shared=True) is not None
        if store is not None and (self._workers_keep or may_run):
            store.invalidate()
        if self._workers_keep:
            self._watch = None
            warn(self._has_changed(what))
        elif what in self._followed and stats.hits < max(stats.cached, 1):
            self._read_uncached(self._has_changed(what, " again before its cache has served an epoch"))
        else:
            self._followed.add(what)
            if self._make_anew(what, "has changed", in_place=True) and stats.cached:
                self._warn_dropped(what, "has changed", stats.cached, f"; {self._if_independent()}")

    def _has_changed(self, what: str, again: str = "") -> str:
        return (
            f"{what} has changed{again}, and samples may depend on it, so they come from the source from now "
            f"on. Move what depends on it to transform=[...], or {self._if_independent()}."
        )

    def _if_independent(self) -> str:
        return f"if no sample depends on it, declare it: {declaration_of(self._dataset)}"

    def __getitem__(self, index: Any) -> Any:
        try:
            return self._sample(index)
        except SampleStopped as error:
            raise stopped(error) from None

    def _sample(self, index: Any) -> Any:
        number = _integer(index)
        if number is None:
            return self._from_dataset(index)
        current = self._up_to_date()
        if not -current.plan.used <= number < current.plan.used:
            if current.window is not None:
                raise IndexError(
                    f"index {number} is out of range for a window of {current.plan.used:,} resident samples"
                )
            # Out of range: the dataset itself raises, or returns something.
            return current.source.finish(current.source.read_whole(number))
        (record,) = self._records(current, np.array([number], np.int64))
        return current.source.finish(record)

    def __getitems__(self, indices: Sequence[Any]) -> list[T]:
        """The samples of a batch, as torch's DataLoader calls it."""
        try:
            return self._samples(indices)
        except SampleStopped as error:
            raise stopped(error) from None

    def __iter__(self) -> Iterator[T]:
        return iter(self._dataset if self._answers("__iter__") else _ByIndex(self))

    def __contains__(self, value: object) -> bool:
        return value in (self._dataset if self._answers("__contains__") else iter(self))

    def _answers(self, method: str) -> bool:
        """Whether the dataset's class has a special method that may know more than its indices do."""
        current = self._up_to_date()
        indices_are_its_own = current.window is None and self._arguments.transform is None
        return indices_are_its_own and getattr(type(self._dataset), method, None) is not None

    def _samples(self, indices: Sequence[Any]) -> list[T]:
        current = self._up_to_date()
        numbers = [_integer(index) for index in indices]
        if None in numbers:
            many = getattr(self._dataset, "__getitems__", None)
            if many is not None:
                self._require_dataset_can_answer("a batch of these indices")
                return many(indices)  # type: ignore[no-any-return]
            return [self[index] for index in indices]
        ids = np.array(numbers, np.int64)
        length = current.plan.used
        if len(ids) and not (-length <= ids.min() and ids.max() < length):
            return [self[index] for index in ids.tolist()]
        return current.source.finish_batch(self._records(current, ids))

    @staticmethod
    def _records(current: SampleAccess, ids: Ids) -> Iterator[Any]:
        """The samples at these indices, which are in range, as they are at the cut."""
        ids[ids < 0] += current.plan.used
        if current.window is not None:
            current.window.count(len(ids))
        return current.records(current.sample_ids(ids))

    def _from_dataset(self, index: Any) -> Any:
        """What the dataset returns for an index that is not an integer."""
        self._up_to_date()
        self._require_dataset_can_answer(f"dataset[{index!r}]")
        return self._dataset[index]

    def _require_dataset_can_answer(self, what: str) -> None:
        """Refuse an index that the dataset alone cannot answer.

        Raises:
            TypeError: there is a ``transform=`` or a window, which the dataset does not know.
        """
        if self._current.window is not None:
            raise TypeError(
                f"{printable(what)} cannot be passed to the dataset, as a window's indices are not the "
                "dataset's; index it by integers."
            )
        if self._arguments.transform is not None:
            raise TypeError(
                f"transform= takes one sample, but {printable(what)} may return any number of them; index "
                "the cached dataset by integers, or give the transform to the dataset itself."
            )

    # ---- the store -----------------------------------------------------------------------------------

    def stats(self) -> Stats:
        """What the cache holds and has served, over all processes."""
        return self._stats_of(self._up_to_date())

    @staticmethod
    def _stats_of(current: SampleAccess) -> Stats:
        window = current.window
        replaced = window.cursor() if window is not None else 0
        store, used = current.store, current.plan.used
        if store is None:
            return Stats(0, used, 0, 0, 0, current.uncached, 0.0, replaced=replaced)
        entries = window.entries(None) if window is not None else None
        peers = current.remote.traffic() if current.remote is not None else {}
        return stats_of(store, used, entries, peers, replaced)

    def check(self) -> list[str]:
        """Verify every record. Returns a sentence for each problem, or an empty list."""
        store = self._up_to_date().store
        return store.check() if store is not None else []

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
        self._follow_content()
        current = self._up_to_date()
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
            pass_ends(self)

    def clear(self) -> None:
        """Drop every cached sample, in all processes. A cache that an audit has disabled is used again.

        Raises:
            SegmentError: another process went on writing samples for five seconds, or another machine of the
                cluster has not confirmed that it dropped its part.
        """
        current = self._up_to_date()
        store, name = current.any_store, current.plan.name
        if store is None:
            return
        if store.segment.live[Live.INVALIDATED] == DESTROYED:
            raise SegmentError(f"{name} cannot be cleared: its session was destroyed.")
        if not store.clear():
            raise SegmentError(f"{name} cannot be cleared while other processes fill it; stop them first.")
        if current.remote is not None:
            current.remote.clear(store, name)

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
        current = self._up_to_date()
        self._epoch = epoch
        held = HeldAttributes(self._dataset)
        # If the chain was cut, samples are read from a copy of the dataset.
        for dataset in {id(known): known for known in (self._dataset, current.source.dataset)}.values():
            if has(dataset, "set_epoch"):
                dataset.set_epoch(epoch)
        self._follow_epoch(held)
        if self._current.window is not None:
            self._current.window.announce(epoch)

    def _follow_epoch(self, held: HeldAttributes) -> None:
        """Follow what the dataset's ``set_epoch`` has changed, since when its attributes were ``held``."""
        in_worker = get_worker_info() is not None
        if self._length_has_changed():
            if (changed := held.changed()) is not None:
                self._attribute_was_set(changed, noticed=True)
            else:
                self._length_was_changed()
        elif in_worker and not self._is_believed() and (changed := held.changed()) is not None:
            self._attribute_was_set(changed)
        elif not self._in_pass():
            self._follow_content()
        elif self._watch is not None:
            self._watch.hold()

    def close(self) -> None:
        """Detach from the cache; samples then come from the source. Existing batches stay valid."""
        self._closed = True
        self._watch = None
        self._current.close()

    def __del__(self, suppress: type[contextlib.suppress] = contextlib.suppress) -> None:
        # At interpreter exit anything may be gone already, this module's imports included.
        with suppress(Exception):
            self.close()

    # ---- attributes ----------------------------------------------------------------------------------

    def _up_to_date(self, *, in_pass: bool = False) -> SampleAccess:
        """The current objects, made again if transforms have changed, or a method has set an attribute.

        Args:
            in_pass: in the midst of a loader's pass: what a method sets counts from the next one on.
        """
        by_method = self._set_by_method()
        self._copied.follow()
        if self._watch is not None and get_worker_info() is not None:
            watch, self._watch = self._watch, None
            if watch.change() is not None:  # torch's loader asks for len() once its workers run
                self._read_uncached(None)
        if not self._snapshot.is_current():
            self._attribute_was_set("transform", noticed=True)
        elif by_method is not None and not in_pass:
            self._attribute_was_set(by_method, noticed=True)
        return self._current

    def _attribute_was_set(self, name: str, *, noticed: bool = False) -> None:
        """Make another plan and cache after this attribute was set.

        Args:
            noticed: whether it was set on the dataset itself, or by its method, some time before.
        """
        advice = f"; {self._if_independent()}, and set it on `.dataset`"
        what = f"{type(self._dataset).__name__}.{name}"
        self._follow_change(what, "was set", None if names_transforms(name) else advice, noticed=noticed)

    def _length_was_changed(self) -> None:
        """Make another plan and cache, as the dataset has another length now."""
        what, then = f"the length of {type(self._dataset).__name__}", self._current.plan.samples
        event = f"changed from {then:,} to {len(self._dataset):,}"
        self._follow_change(what, event, "", noticed=True)

    def _follow_change(self, what: str, event: str, advice: str | None, *, noticed: bool) -> None:
        """Make another plan and cache, or read uncached, after something has changed.

        Args:
            advice: the end of the warning that samples were dropped; None: there is none.
            noticed: whether it has happened some time before.
        """
        self._take_snapshot()
        if get_worker_info() is not None:
            # Noticed: it was so before the worker began, and the main process notices it at its next epoch.
            sentence = f"{what} was set in a loader's worker, so this worker reads its samples uncached."
            self._read_uncached(None if noticed else sentence)
            return
        if self._closed:
            self._read_uncached(None)
            return
        if self._arguments.key is not None:
            self._read_uncached(
                f'{what} {event}, but key="{self._arguments.key}" names what was cached before, so samples '
                "come from the source; change it before you call hotset.cache, with another key."
            )
            return
        dropped = self._stats_of(self._current).cached
        if self._make_anew(what, event) and dropped and advice is not None:
            self._warn_dropped(what, event, dropped, advice)

    @staticmethod
    def _warn_dropped(what: str, event: str, dropped: int, advice: str) -> None:
        warn(
            f"{what} {event}, and samples may depend on it, so {dropped:,} cached samples were dropped, and "
            f"samples are cached anew{advice}."
        )

    def _make_anew(self, what: str, event: str, *, in_place: bool = False) -> bool:
        """Make another plan and cache; False if it is the same cache, or none can be made.

        Args:
            in_place: what a dataset holds has changed: a cache that it would find again holds other samples.
        """
        old = self._current
        try:
            pipeline = Pipeline.of(self._dataset, self._arguments.transform)
            alike = Identity.of(pipeline, self._arguments).lookup_key == old.lookup_key
            if alike and in_place:  # no fingerprint covers it
                self._read_uncached(self._has_changed(what))
                return False
            if not alike:  # free the old cache's memory for the new one
                old.close()
            current = self._make(self._dataset, self._arguments, True)
        except Exception as error:
            self._read_uncached(f"{what} {event}, and samples come from the source: {error}")
            return False
        old.close()
        note = f"this plan was made again after {what} {event}"
        current.plan = replace(current.plan, notes=(*current.plan.notes, note))
        self._use(current)
        self._resume_window(old)
        return not alike

    def _resume_window(self, old: SampleAccess) -> None:
        """Continue the window at the old window's position."""
        before, now = old.window, self._current.window
        if before is None or now is None or before.position.epoch < 0:
            return
        if before.sizes == now.sizes:
            now.go_to(before.position)

    def _read_uncached(self, why: str | None) -> None:
        """Read all samples from the dataset as it is now, uncached."""
        old = self._current
        pipeline = Pipeline.of(self._dataset, self._arguments.transform)
        source = Source(pipeline.dataset, (), (), pipeline.given, stores=False)
        nowhere = Attachment(None, None, old.plan.name)
        window = old.window.reading(source.read, nowhere) if old.window is not None else None
        rows = tuple(row._replace(cached=False) for row in old.plan.rows[:1])
        samples = old.plan.samples if window is not None else len(self._dataset)
        warnings = (why,) if why is not None else ()
        plan = replace(old.plan, rows=rows, samples=samples, sample_bytes=0, warnings=warnings)
        self._use(SampleAccess(source, plan, nowhere, window, None, old.lookup_key))
        old.close()
        if why is not None:
            warn(why)

    def __copy__(self) -> CachedDataset[T]:
        """A cached dataset over a copy of the dataset: what is set on one is not set on the other."""
        return type(self)(copy.copy(self._dataset), self._arguments, self._make)

    def __getstate__(self) -> dict[str, Any]:
        self._follow_content()  # torch's loader pickles it for its workers before it asks for len()
        self._up_to_date()
        return super().__getstate__()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._pass, self._workers_keep, self._followed = None, False, set()
        self._use(self._current)


class _ByIndex:
    """A cached dataset as Python iterates over what has no ``__iter__``: index by index until IndexError."""

    def __init__(self, cached: CachedDataset[Any]) -> None:
        self._cached = cached

    def __getitem__(self, index: int) -> Any:
        return self._cached[index]


# ---- for loaders -------------------------------------------------------------------------------------------
#
# All that loaders ask of a cached dataset, besides what users may ask. They are functions, as a public method
# of it would hide what the user's dataset has by that name.


def current_of(cached: CachedDataset[Any]) -> SampleAccess:
    """What samples are read by now, in this process: another object once they are cached anew."""
    return cached._current


def followed(cached: CachedDataset[Any]) -> SampleAccess:
    """The same in the midst of a pass, once what was set since it began was followed."""
    return cached._up_to_date(in_pass=True)


@contextlib.contextmanager
def pass_begins(caches: Sequence[CachedDataset[Any]], *, running: bool, persistent: bool) -> Iterator[None]:
    """Begin a loader's pass: what was set counts from here on, even in the midst of an earlier pass.

    Until the context ends it is beginning: samplers ask for the length meanwhile, and to compare again each
    time what the dataset holds took 20 ms.

    Args:
        running: whether the loader's workers run already, and have the dataset as it was.
        persistent: whether those that it starts now will run in its next pass.
    """
    beginning = _Beginning()
    try:
        for cached in caches:
            cached._pass, cached._workers_keep = None, running
            len(cached)
            cached._pass, cached._workers_keep = weakref.ref(beginning), persistent
        yield
    finally:
        del beginning


class _Beginning:
    """A pass that begins is this, until this process makes its batches."""


def batches_made_here(cached: CachedDataset[Any], batches: object) -> None:
    """This process makes a pass's batches: until they are gone, a new length waits for the next pass."""
    cached._pass = weakref.ref(batches)


def pass_ends(cached: CachedDataset[Any]) -> None:
    """End a pass that was read here: what reading samples in this process has changed does not count."""
    if cached._watch is not None:
        cached._watch.pass_ended()


def fill_for_workers(cached: CachedDataset[Any]) -> None:
    """Cache, in this process, what a network on a device computes: worker processes must not use it."""
    if cached._current.device is not None:
        current = cached._up_to_date()
        fill_now(current, sys.stderr.isatty(), 0)


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
