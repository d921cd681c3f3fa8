"""A cached stream: an iterable dataset that is recorded in its first pass, and has an index from then on.

::

    first pass    stream ── cached transforms ─┬── recorded, part by part ──> [store]
                  (in each worker, as torch    └── live transforms ──> batches, as torch's loader gives them
                  runs it)
    later passes  [store] ── any order, any batch size, any number of workers ──> batches

The first pass is the stream's own: torch runs it in each worker of each rank, and
:mod:`hotset.dataset.streams.recording` stores what it gives. What each pass is, :mod:`.passes`
decides.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from torch.utils.data import get_worker_info

from hotset._progress import filling_bar
from hotset._warnings import warn
from hotset.dataset.arguments import CacheArguments
from hotset.dataset.current_cache import Make
from hotset.dataset.dataset_proxy import DatasetProxy
from hotset.dataset.fill_now import loader_of_items, require_worker_count
from hotset.dataset.plan import Plan
from hotset.dataset.sample_access import SampleAccess
from hotset.dataset.stats import Stats, stats_of
from hotset.dataset.streams.libraries import is_hugging_face
from hotset.dataset.streams.passes import StreamPasses

__all__ = ["CachedStream", "followed_passes", "passes_of"]

T = TypeVar("T")


class CachedStream(DatasetProxy[T]):
    """An iterable dataset that is recorded as it is read first; made by :func:`hotset.cache`.

    Give it to a :class:`hotset.DataLoader`. The first pass gives what torch's loader would give over the
    stream itself. Once all of it was read, it is a dataset with a length and an index: ``shuffle=True``
    shuffles it wholly, any sampler, batch size and number of workers will do, ``state_dict()`` resumes in
    constant time, and torch's own loader takes it as well.

    Attributes that it does not have itself are those of the stream, and can be set: the stream is then
    recorded anew.

    Attributes:
        dataset: the stream that was given to :func:`hotset.cache`.
        plan: what is cached, what stays live, and why; print it.
        recorded: whether all of the stream is recorded, so that there is a length and an index.

    Example:
        >>> import hotset
        >>> from torch.utils.data import IterableDataset
        >>> class Squares(IterableDataset):
        ...     def __iter__(self):
        ...         return (number * number for number in range(6))
        >>> squares = hotset.cache(Squares(), memory="1MiB")
        >>> loader = hotset.DataLoader(squares, batch_size=3)
        >>> [batch.tolist() for batch in loader]
        [[0, 1, 4], [9, 16, 25]]
        >>> squares.recorded, len(squares), squares[4]
        (True, 6, 16)
    """

    __slots__ = ("_hotset_make", "_hotset_passes")
    _hotset_make: Make
    _hotset_passes: StreamPasses

    def __init__(self, stream: Any, arguments: CacheArguments, make: Make) -> None:
        super().__init__(stream, arguments)
        self._hotset_make = make
        self._hotset_passes = StreamPasses(stream, arguments, make)

    @property
    def plan(self) -> Plan:
        passes = self._hotset_passes
        return replace(passes.access.plan, samples=len(passes.ids()) if self.recorded else 0)

    @property
    def recorded(self) -> bool:
        return self._hotset_passes.has_index()

    @property
    def _hotset_access(self) -> SampleAccess:
        return self._hotset_passes.access

    def _hotset_follow(self) -> None:
        """Record anew if a transform or an attribute was set on the stream itself, or by a method."""
        name = self._hotset_set_since.name()
        if name is not None:
            self._hotset_attribute_was_set(name)
        elif (change := self._hotset_passes.change()) is not None and not is_hugging_face(self.dataset):
            name = self._hotset_passes.name
            order = (
                " An epoch on which only the order depends is announced by set_epoch() of the cached stream."
            )
            warn(
                f"{name} is recorded anew: {change} has changed, and samples may depend on it. If none does, "
                f"declare it: hotset.deterministic({name}).{'' if self._hotset_passes.by_epoch else order}"
            )
            self._hotset_attribute_was_set(change.name)

    def _hotset_attribute_was_set(self, name: str) -> None:
        if get_worker_info() is not None:
            return
        self.close()
        try:
            CachedStream.__init__(self, self.dataset, self._hotset_arguments, self._hotset_make)
        except Exception as error:  # another attribute may be set that belongs to this one
            what = f"{self._hotset_passes.name}.{name}"
            self._hotset_passes.warn(f"{what} was set, and samples come from the stream: {error}", str(error))

    # ---- samples -------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[T]:
        info = get_worker_info()
        if info is not None and info.num_workers > 1:
            # A dataset over this one runs it in each worker of a loader, whose parts nobody has announced.
            if info.id == 0:
                self._hotset_passes.tell_of_workers()
            yield from self._hotset_passes.recording(0, replay=True)
            return
        if not self.recorded:
            yield from followed_passes(self).recording(0)
            self._hotset_passes.ended()
            return
        passes = self._hotset_passes
        ids = passes.ids()  # as the pass begins: it goes on if the cache is cleared or closed meanwhile
        for place in range(len(ids)):
            yield passes.samples_of(ids[place : place + 1])[0]

    def __bool__(self) -> bool:
        return True  # without this, Python would ask for the length, which a stream may not have

    def __add__(self, other: Any) -> Any:
        raise TypeError(
            "a cached stream must not be chained; chain the streams themselves: hotset.cache(first + second)."
        )

    def __copy__(self) -> CachedStream[T]:
        """A cached stream over a copy of the stream: what is set on one is not set on the other."""
        return type(self)(copy.copy(self.dataset), self._hotset_arguments, self._hotset_make)

    def __len__(self) -> int:
        # Before it is recorded as the stream says, which torch's loader believes, too.
        return len(self._hotset_passes.ids()) if self.recorded else self._hotset_passes.stated_length()

    def __getitem__(self, index: Any) -> T:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[Any]) -> list[T]:
        """The samples of a batch, as torch's DataLoader calls it."""
        return self._hotset_passes.indexed(indices)

    # ---- the rest ------------------------------------------------------------------------------------

    def fill(self, *, progress: bool = False, num_workers: int = 0) -> None:
        """Record the stream now, and not as training reads it.

        What an interrupted call has recorded stays, and the next call records the rest, if it has as many
        workers.

        Args:
            progress: show a bar on standard error.
            num_workers: processes that read; 0 reads in this one.

        Raises:
            ArgumentError: ``num_workers`` is not a number from 0 on.
            Exception: what the stream raises.

        Example:
            >>> import hotset
            >>> from torch.utils.data import IterableDataset
            >>> class Letters(IterableDataset):
            ...     def __iter__(self):
            ...         return iter("abc")
            >>> letters = hotset.cache(Letters(), memory="1MiB")
            >>> letters.fill()
            >>> list(letters), letters[-1]
            (['a', 'b', 'c'], 'c')
        """
        require_worker_count(num_workers)
        if self._hotset_passes.has_index(in_part=True) or self._hotset_passes.has_unknown_rest:
            return
        recording = followed_passes(self).recording(num_workers, 64)
        recording.silent = True
        store = self._hotset_access.store
        number = 0
        with filling_bar(self._hotset_passes.name, None, progress) as show:
            for number, _ in enumerate(loader_of_items(recording, num_workers), 1):
                if number % 64 == 0 and store is not None:
                    show(number, store.stored_bytes)
            if store is not None:
                show(number, store.stored_bytes)
        self._hotset_passes.wait_for_ranks()
        self._hotset_passes.ended()

    def stats(self) -> Stats:
        """What the cache holds and has served, over all processes.

        ``uncached`` counts samples that the stream has given so far and that are not recorded.
        """
        parts = self._hotset_passes.parts()
        if parts is None:
            return replace(self._hotset_access.stats(), uncached=0)  # how many it gave is not known
        return stats_of(parts.store, int(parts.given.sum()), None, {})

    def check(self) -> list[str]:
        """Verify every record. Returns a sentence for each problem, or an empty list."""
        return self._hotset_access.check()

    def clear(self) -> None:
        """Drop every recorded sample, in all processes. The next pass records the stream anew.

        Raises:
            SegmentError: another process went on writing samples for five seconds.
        """
        self._hotset_access.clear()

    def set_epoch(self, epoch: int) -> None:
        """Announce the epoch that begins; calls the stream's ``set_epoch`` as well, if it has one.

        If a probe has shown that another epoch gives other samples, the stream is recorded anew, with a
        warning. Otherwise its own shuffle counts in the pass that records it, and the order of later epochs
        is drawn by the sampler: a loader with ``shuffle=True`` has another one in each, any other the
        recorded one, and a warning.
        """
        self._hotset_passes.epoch = epoch
        before = self._hotset_passes.change()
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)
            if before is None and not self._hotset_passes.by_epoch:
                self._hotset_passes.look()

    def close(self) -> None:
        """Detach from the cache; the stream then comes as it is. Existing batches stay valid."""
        self._hotset_access.close()


# ---- for loaders -------------------------------------------------------------------------------------------
#
# Functions, as a public method of a cached stream would hide what the user's stream has by that name.


def passes_of(stream: CachedStream[Any]) -> StreamPasses:
    """Return what makes the passes over a stream: another object once it is recorded anew."""
    return stream._hotset_passes


def followed_passes(stream: CachedStream[Any]) -> StreamPasses:
    """As :func:`passes_of`, where a pass begins: first follow what was set on the stream."""
    stream._hotset_follow()
    return stream._hotset_passes
