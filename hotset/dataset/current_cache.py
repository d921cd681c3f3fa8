"""The current cache of a dataset: what its samples are read by, replaced as a whole once it has changed.

The cached samples are those of the dataset as it was. :class:`~hotset.dataset.changes.Changes` tells what has
changed of it. What follows is decided here, by the first of these lines that is true:

================================================================  ============================================
a loader's worker notices it                                      it reads its dataset, as it is there
the cached dataset is closed                                      samples come from the source
a ``key=`` names what was cached                                  the same, with a warning
content, and running workers have the dataset as it was           nothing until they end, but no more audits
content that they share, so that they have it as it is            no process is served any more; a warning
content, or an attribute, that had changed before, and its cache  samples come from the source, with a warning
has not paid: samples were read, and it has served no epoch
any other                                                         a new plan and cache, by the same arguments;
                                                                  if that fails, the same
================================================================  ============================================

So sizes that grow every few epochs are followed, and a counter of epochs is followed once.
"""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from torch.utils.data import get_worker_info

from hotset._warnings import warn
from hotset.dataset.arguments import CacheArguments
from hotset.dataset.attachment import Attachment
from hotset.dataset.changes import Change, Changes, SetSince
from hotset.dataset.fill_now import fill_now
from hotset.dataset.held_attributes import HeldAttributes
from hotset.dataset.identity import Identity
from hotset.dataset.pipeline import Cuts, Pipeline, Source
from hotset.dataset.sample_access import SampleAccess
from hotset.dataset.stats import Stats
from hotset.dataset.torch_fetcher import calling_fetcher
from hotset.determinism.objects.safe_access import has

__all__ = ["CurrentCache", "Make", "pass_begins"]

# Caches a dataset with the arguments of hotset.cache; told whether that is done again. It pickles.
Make = Callable[[Any, CacheArguments, bool], SampleAccess]


class CurrentCache:
    """Holds what reads the samples of a dataset, and follows changes of the dataset. It pickles.

    Args:
        inner: the current caches of the cached datasets that the dataset reads.

    Attributes:
        access: reads the samples; another object once they are cached anew.
        make: makes it.
        pass_of: refers to an object that lives as long as the loader's pass that this process makes.
        made_by_pass: what reads the samples since a pass has found the dataset changed as it began.
        workers_keep: whether that pass is read by workers that have the dataset as it was.
    """

    pass_of: weakref.ref[Any] | None = None
    made_by_pass: SampleAccess | None = None
    workers_keep = False
    _is_closed = False

    def __init__(
        self,
        dataset: Any,
        arguments: CacheArguments,
        make: Make,
        set_since: SetSince,
        inner: Sequence[CurrentCache],
    ) -> None:
        self._dataset, self._arguments, self.make, self._set_since = dataset, arguments, make, set_since
        self._inner = inner
        self._followed: set[str] = set()  # of what content samples were cached anew
        self._fetchers: weakref.WeakSet[Any] = weakref.WeakSet()  # of the passes of torch's loader so far
        self._use(make(dataset, arguments, False))

    def _use(self, access: SampleAccess) -> None:
        """Read samples through this from now on; it was made of the dataset as it is now."""
        self.access = access
        self.changes = Changes(self._arguments, access, self._set_since, self._inner)

    @property
    def in_pass(self) -> bool:
        """Whether this process is in the midst of a loader's pass."""
        return self.pass_of is not None and self.pass_of() is not None

    # ---- when changes are asked for ------------------------------------------------------------------

    def at_use(self, *, in_pass: bool | None = None) -> SampleAccess:
        """Follow what has changed, at any use of the cached dataset, and return what reads the samples.

        Args:
            in_pass: whether a pass is not over yet, until whose end what a method sets does not count; None
                to find out.
        """
        change = self.changes.at_use(in_pass=self.in_pass if in_pass is None else in_pass)
        if change is not None:
            self._follow(change)
        return self.access

    def at_sample(self) -> SampleAccess:
        """As :meth:`at_use`, where a sample is read by its index: torch's loader may begin a pass with it."""
        if not self.in_pass and get_worker_info() is None:
            fetcher = calling_fetcher()
            if fetcher is not None and fetcher not in self._fetchers:
                self._fetchers.add(fetcher)
                return self.as_pass_begins()
        return self.at_use(in_pass=False)  # a pass that was broken off may live on in a variable

    def as_pass_begins(self) -> SampleAccess:
        """As :meth:`at_use`, where a pass begins: there is time to compare more."""
        in_pass, workers_keep, before = self.in_pass, self.workers_keep, self.access
        self._follow(self.changes.as_pass_begins(in_pass=in_pass, workers_keep=workers_keep))
        if self.access is not before:
            self.made_by_pass = self.access
        return self.access

    def attribute_was_set(self, name: str) -> None:
        """Follow a change: this attribute was set on the cached dataset, and so on the dataset."""
        self._follow(self.changes.was_set(name, is_new=True))

    def set_epoch(self, epoch: int) -> None:
        """Call the dataset's ``set_epoch``, and follow what it has changed."""
        source = self.at_use().source
        held = HeldAttributes.of(self._dataset)
        # If the chain was cut, samples are read from a copy of the dataset.
        for dataset in {id(known): known for known in (self._dataset, source.dataset)}.values():
            if has(dataset, "set_epoch"):
                dataset.set_epoch(epoch)
        in_pass, workers_keep = self.in_pass, self.workers_keep
        self._follow(self.changes.by_set_epoch(held, in_pass=in_pass, workers_keep=workers_keep))
        if self.access.window is not None:
            self.access.window.announce(epoch)

    def fill_for_workers(self) -> None:
        """Cache, in this process, what a network on a device computes: worker processes must not use it."""
        if self.access.device is not None:
            fill_now(self.at_use(), sys.stderr.isatty(), 0)

    # ---- what follows --------------------------------------------------------------------------------

    def _follow(self, change: Change | None) -> None:
        """Decide what follows from a change, if there is one: see the table above."""
        if change is None:
            return
        what, key = change.what, self._arguments.key
        if get_worker_info() is not None:
            # If it is not new, the main process notices it as its next pass begins.
            advice = "" if change.advice is None else f", or, {change.advice}"
            sentence = (
                f"{what} was set in a loader's worker, so this worker reads its samples uncached; have the "
                f"dataset set it itself as it first reads a sample{advice}."
            )
            self._read_uncached(sentence if change.is_new else None)
        elif self._is_closed:
            self._read_uncached(None)
        elif key is not None:
            self._read_uncached(
                f'{what} {change.event}, but key="{key}" names what was cached before, so samples '
                "come from the source; change it before you call hotset.cache, with another key."
            )
        elif change.is_content:
            self._follow_content(change)
        elif change.advice:
            self._follow_once(change, self.access.stats())
        else:
            self._cache_anew(change, self.access.stats().cached)

    def _follow_content(self, change: Change) -> None:
        if self.workers_keep and not change.is_shared:
            self.access.leave_off_audits()
            return
        stats, store = self.access.stats(), self.access.any_store
        if change.is_shared and store is not None:
            store.invalidate()
        if self.workers_keep:
            self.changes.ignore_content()
            warn(self._has_changed(change))
        else:
            self._follow_once(change, stats)

    def _follow_once(self, change: Change, stats: Stats) -> None:
        """Cache samples anew, unless that was in vain after the last such change; ``stats``: of the cache."""
        is_stored = self.access.any_store is not None
        # What is set before training begins, perhaps more than once, costs nothing.
        is_used = stats.misses > 0 or not is_stored
        if change.what in self._followed and is_used and stats.hits < max(stats.cached, 1):
            again = self._has_changed(change, " again before its cache has served an epoch")
            self._read_uncached(again if is_stored else None)
            return
        if is_used:
            self._followed.add(change.what)
        self._cache_anew(change, stats.cached)

    @staticmethod
    def _has_changed(change: Change, again: str = "") -> str:
        return (
            f"{change.what} has changed{again}, and samples may depend on it, so they come from the source "
            f"from now on. Move what depends on it to transform=[...], or {change.advice}."
        )

    def _cache_anew(self, change: Change, dropped: int) -> None:
        """Make another plan and cache, unless it is the same cache, or none can be made.

        Args:
            dropped: how many samples were cached.
        """
        old, what, event = self.access, change.what, change.event
        try:
            pipeline = Pipeline.of(self._dataset, self._arguments.transform)
            alike = _finds_again(old, pipeline, Identity.of(pipeline, self._arguments))
            if alike and change.is_content:  # a cache that it would find again holds other samples
                self._read_uncached(self._has_changed(change))
                return
            if not alike:  # free the old cache's memory for the new one
                old.close()
            current = self.make(self._dataset, self._arguments, True)
        except Exception as error:
            self._read_uncached(f"{what} {event}, and samples come from the source: {error}")
            return
        old.close()
        note = f"this plan was made again after {what} {event}"
        current.plan = replace(current.plan, notes=(*current.plan.notes, note))
        self._use(current)
        self._resume_window(old)
        if dropped and not alike and change.advice is not None:
            advice = f"; {change.advice}" if change.advice else ""
            warn(
                f"{what} {event}, and samples may depend on it, so {dropped:,} cached samples were dropped, "
                f"and samples are cached anew{advice}."
            )

    def _resume_window(self, old: SampleAccess) -> None:
        """Continue the window at the old window's position."""
        before, now = old.window, self.access.window
        if before is None or now is None or before.position.epoch < 0 or before.sizes != now.sizes:
            return
        now.go_to(before.position)

    def _read_uncached(self, why: str | None) -> None:
        """Read all samples from the dataset as it is now, uncached."""
        old = self.access
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

    def close(self) -> None:
        """Detach from the cache; samples then come from the source."""
        self._is_closed = True
        self.changes.ignore_content()
        self.access.close()

    def __getstate__(self) -> dict[str, Any]:
        names = ("_dataset", "_arguments", "make", "_set_since", "_inner", "access", "_is_closed")
        return {name: getattr(self, name) for name in names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _followed=set(), _fetchers=weakref.WeakSet())
        self._use(self.access)


def _finds_again(old: SampleAccess, pipeline: Pipeline, identity: Identity) -> bool:
    """Whether the dataset as it is now would find the cache that it had.

    Of transforms that were tried, the lookup key has the names alone, and the fingerprint what they hold.
    """
    if identity.lookup_key != old.lookup_key or old.any_store is None:
        return identity.lookup_key == old.lookup_key
    about = old.any_store.segment.metadata
    cuts = Cuts.from_json(about["cuts"])
    found = identity.fingerprint(pipeline, cuts, pipeline.cut(cuts))
    return found.digest == str(about["fingerprint"])


@contextlib.contextmanager
def pass_begins(caches: Sequence[CurrentCache], *, running: bool, persistent: bool) -> Iterator[None]:
    """Begin a loader's pass: what was set counts from here on, even in the midst of an earlier pass.

    Until the context ends it is beginning: samplers ask for the length meanwhile, and to compare again each
    time what the dataset holds took 20 ms.

    Args:
        running: whether the loader's workers run already, and have the dataset as it was.
        persistent: whether those that it starts now will run in its next pass.
    """
    beginning = _Beginning()
    try:
        for cache in caches:
            cache.pass_of, cache.workers_keep = None, running
            cache.as_pass_begins()
            cache.pass_of, cache.workers_keep = weakref.ref(beginning), persistent
        yield
    finally:
        del beginning


class _Beginning:
    """Stands for a pass that begins, until this process makes its batches."""
