"""A cached stream: an iterable dataset that is recorded in its first pass, and has an index from then on.

::

    first pass    stream ── cached transforms ─┬── recorded, part by part ──> [store]
                  (in each worker, as torch    └── live transforms ──> batches, as torch's loader gives them
                  runs it)
    later passes  [store] ── any order, any batch size, any number of workers ──> batches

The first pass is the stream's own: torch runs it in each worker of each rank, and
:mod:`hotset.dataset.stream_recording` stores what it gives. A pass that is broken off leaves what it has
recorded. The next one is a first pass as well: it gives all samples, stores those that are new, and compares
some of the others with the recorded ones.

=====================================  =======================================================================
all parts have ended                   the dataset has a length and an index
all have ended, but not all fit        the recorded samples first, in any order; then the stream is run again,
                                       and gives those that are not recorded
other ranks or workers than before     nothing recorded can be used: recorded anew, with a warning
the stream gave other samples          the same
recorded by another living process     this pass is not recorded
=====================================  =======================================================================
"""

from __future__ import annotations

import contextlib
import operator
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import torch
from torch.utils.data import DataLoader, get_worker_info

from hotset._progress import filling_bar
from hotset._warnings import Warner, warn
from hotset.dataset.arguments import CacheArguments
from hotset.dataset.cached_dataset import CachedDataset, Maker, current_of
from hotset.dataset.dataset_proxy import DatasetProxy, Own
from hotset.dataset.fill_now import require_worker_count
from hotset.dataset.parent_death import parent_death_signal
from hotset.dataset.plan import Plan
from hotset.dataset.stats import Stats, stats_of
from hotset.dataset.stream_probe import may_reorder
from hotset.dataset.stream_recording import StreamRecording, StreamRest
from hotset.dataset.stream_source import StreamSource
from hotset.determinism.equality import same
from hotset.session.job import local_rank
from hotset.store.claims import Ids
from hotset.store.format import PRESENT
from hotset.store.stream_parts import DREW, NO_ROOM, OTHER_KIND, StreamParts, StreamState

__all__ = ["CachedStream"]

T = TypeVar("T")
# After so many passes in a row that did not reach the end of the stream, the user is warned.
_BROKEN_OFF = 3
# How long a rank that has finished its own parts waits for a rank that makes no progress with its parts.
_PATIENCE_SECONDS = 15.0


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
        epoch: the last epoch given to :meth:`set_epoch`; 0 before.

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

    _maker = Own[Maker]()
    _source = Own[StreamSource]()
    _cached = Own[CachedDataset[Any]]()
    _known = Own["tuple[Any, Ids] | None"]()
    _warn = Own[Warner]()
    _open = Own[int]()

    def __init__(self, stream: Any, arguments: CacheArguments, maker: Maker) -> None:
        super().__init__(stream, arguments)
        self._maker = maker
        self._source = StreamSource(stream)
        self._cached = CachedDataset(self._source, arguments, maker)
        self._known = None
        self._warn = Warner()
        self._open = 0  # how many passes over the stream were begun here since one reached its end

    @property
    def plan(self) -> Plan:
        return replace(self._cached.plan, samples=len(self._ids()) if self.recorded else 0)

    @property
    def recorded(self) -> bool:
        return self._state() == "whole"

    def _parts(self) -> StreamParts | None:
        """How far the stream is recorded; None without a store."""
        store = current_of(self._cached).access.store
        return StreamParts(store) if store is not None else None

    def _state(self) -> StreamState:
        parts = self._parts()
        state = parts.state if parts is not None else "nothing"
        # The rest can come from the stream only as it was divided when the others were recorded.
        return "recording" if state == "in part" and _own_parts(parts) is None else state

    def _ids(self) -> Ids:
        """The ids of the recorded samples, in the order of their indices."""
        parts = self._parts()
        assert parts is not None
        about = (id(parts.store), parts.store.clear_generation(), parts.division, tuple(parts.kept))
        if self._known is None or self._known[0] != about:
            self._known = about, parts.ids()
            self._source.divided(parts.count, parts.division[1])
        return self._known[1]

    # ---- for loaders ---------------------------------------------------------------------------------

    def _indexed(self, *, in_part: bool = False) -> tuple[CachedDataset[Any], Ids] | None:
        """The cache, and the ids of the samples in it; None if not all are recorded.

        Args:
            in_part: also give what there is if all has been read, but not all could be recorded.
        """
        state = self._state()
        return (self._cached, self._ids()) if state == "whole" or (in_part and state == "in part") else None

    @property
    def _batch_size(self) -> int:
        """How many samples each item of the stream seems to hold, if it gives batches; otherwise 0."""
        parts = self._parts()
        return int(parts.store.segment.metadata.get("stream_batches", 0)) if parts is not None else 0

    def _stated_length(self) -> int:
        """The length that the stream itself states.

        Raises:
            TypeError: it states none.
        """
        if hasattr(type(self._dataset), "__len__"):
            return len(self._dataset)
        self._require_index("length")
        raise TypeError(f"{self._source.name} has no length.")

    def _rest(self) -> StreamRest | None:
        """What this rank gets from the stream in a pass that begins now; None if nothing."""
        parts = self._parts()
        own = _own_parts(parts) if self._state() == "in part" else None
        if parts is None or own is None:
            return None
        return StreamRest(own.start, tuple(parts.kept[own].tolist()), tuple(parts.given[own].tolist()))

    def _ranks(self) -> tuple[int, int]:
        """The number of this process among the ranks that share the samples, and how many these are."""
        return _rank_of(self._parts())

    def _recording(
        self, workers: int, group: int = 1, *, rest: StreamRest | None = None, replay: bool = False
    ) -> StreamRecording:
        """The dataset that torch's loader runs in each worker: it gives the samples, and records them.

        Args:
            workers: how many workers the loader has.
            group: how many samples the loader collects before it makes a batch of them.
            rest: give only these samples, and record nothing.
            replay: record nothing, as this pass repeats one that was recorded.
        """
        self._follow()
        parts = self._parts()
        rank, ranks = _rank_of(parts)
        number, division = 0, parts.division if parts is not None else (0, 0)
        if parts is not None and rest is None and not replay and self._begin(parts, ranks, max(workers, 1)):
            number, division = parts.new_pass(), (ranks, max(workers, 1))
        return StreamRecording(
            self._dataset, self._cached, rank, number, rest=rest, group=group, division=division
        )

    def _begin(self, parts: StreamParts, ranks: int, workers: int) -> bool:
        """Prepare the parts for a pass by so many workers; False if it cannot be recorded."""
        name = self._source.name
        self._open += 1
        store = parts.store
        # A stream that is shuffled anew cannot be continued. Of several ranks, another may have begun anew.
        broken = (
            ranks == 1
            and bool(store.segment.metadata.get("stream_shuffled"))
            and parts.state == "recording"
            and bool(parts.given.any())
            and not parts.is_recorded_by_others()
        )
        stale = broken or parts.is_other or parts.division not in ((0, 0), (ranks, workers))
        unnamed = parts.count == 0 and bool((store.segment.used_index >= PRESENT).any())
        if stale and parts.is_recorded_by_others():
            self._warn(
                f"{name} is being recorded by other processes, with {_division(*parts.division)}, so this "
                "pass is not recorded; wait until they have read it.",
            )
            return False
        if stale or unnamed:
            self._warn_recorded_anew(parts, ranks, workers, broken=broken)
            if not store.clear():
                return False
        if self._open == _BROKEN_OFF:
            self._warn(
                f"{name} was begun three times and has never come to its end, so nothing is served from the "
                "cache: it has an index once one pass has read all of it. Let one pass come to its end, or "
                "call fill(); if the stream is endless, bound it (WebDataset: with_epoch)."
            )
        return parts.divide(ranks, workers)

    def _warn_recorded_anew(self, parts: StreamParts, ranks: int, workers: int, *, broken: bool) -> None:
        name, before = self._source.name, parts.division
        if parts.is_other:
            why = "it gave other samples than in the pass before (is it shuffled anew in each?)"
        elif broken:
            why = "the pass before was broken off, and it is shuffled anew in each"
        elif before not in ((0, 0), (ranks, workers)):
            why = f"{_division(*before)} divided it before, and now it is {_division(ranks, workers)}"
        else:
            return
        warn(
            f"{name} is recorded anew: {why}. Let one pass come to its end with the same ranks and workers; "
            "later passes may have any."
        )

    def _ended(self) -> None:
        """Warn of what a pass that has reached its end could not record."""
        self._open = 0
        parts = self._parts()
        if parts is None or parts.state not in ("whole", "in part"):
            return
        name, kept, given = self._source.name, int(parts.kept.sum()), int(parts.given.sum())
        if parts.state == "in part":
            reasons = parts.reasons()
            why = "; ".join(text for reason, text in _REASONS.items() if reason in reasons)
            self._warn(
                f"{kept:,} of {given:,} samples of {name} are recorded: {why}. In each epoch the recorded "
                "ones come first, and then the stream is run again for the rest.",
                "in part",
            )
        self._warn_of_copies(parts)

    def _tell_of_order(self) -> None:
        """Warn before a pass in the recorded order, if without a cache each pass would have its own."""
        parts = self._parts()
        shuffled = parts is not None and parts.store.segment.metadata.get("stream_shuffled")
        if shuffled or (self._epoch and may_reorder(self._dataset)):
            self._warn(
                f"{self._source.name} may give its samples in another order in each epoch, but recorded ones "
                "come in the order in which they were recorded; give the loader shuffle=True to have another "
                "order in each.",
                "one order",
            )

    def _warn_of_copies(self, parts: StreamParts) -> None:
        """Warn if two parts begin with the same samples: the stream does not divide itself."""
        store, count, kept = parts.store, parts.count, parts.kept
        with contextlib.suppress(Exception):
            for one in range(min(count, 8)):
                for other in range(one):
                    common = int(min(kept[one], kept[other], 3))
                    ids = [
                        np.array([parts.sample_id(part, at) for at in range(common)]) for part in (one, other)
                    ]
                    if common and same(store.read(ids[0]), store.read(ids[1])) is None:
                        self._warn(
                            f"{self._source.name} gives the same samples to {count} workers, so each comes "
                            f"{count} times in an epoch: have __iter__ divide them by "
                            "torch.utils.data.get_worker_info(), or use one worker.",
                            "copies",
                        )
                        return

    def _wait_for_ranks(self) -> None:
        """Wait for other ranks that still read their parts, if this rank has finished its own."""
        parts = self._parts()
        rank, ranks = _rank_of(parts)
        if parts is None or ranks < 2 or parts.division[0] != ranks:
            return
        workers = parts.division[1]
        if not parts.ended[rank * workers : (rank + 1) * workers].all():
            return
        since, before = time.monotonic(), -1
        while parts.state == "recording" and not parts.is_other:
            given = int(parts.given.sum())
            if given != before:
                since, before = time.monotonic(), given
            if time.monotonic() - since > _PATIENCE_SECONDS:
                self._warn_of_ranks(parts, rank)
                return
            time.sleep(5e-3)

    def _warn_of_ranks(self, parts: StreamParts, rank: int) -> None:
        name = self._source.name
        if parts.go_alone(rank):
            warn(
                f"{name}: no other rank records into the cache of this one, so each rank has the samples of "
                "its own part alone; give hotset.cache the same key= in all ranks to share them."
            )
        else:
            warn(
                f"{name}: other ranks have not read their part to its end, so this epoch comes from the "
                "stream again; let each rank read all of its part once."
            )

    def _follow(self) -> None:
        """Record anew if a transform was set on the stream itself, or a method has set an attribute."""
        by_method = self._set_by_method()
        if not self._snapshot.is_current() or by_method is not None:
            self._attribute_was_set(by_method or "transform")

    def _attribute_was_set(self, name: str) -> None:
        if get_worker_info() is None:
            self._cached.close()
            self.__dict__.update(CachedStream(self._dataset, self._arguments, self._maker).__dict__)

    # ---- samples -------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[T]:
        indexed = self._indexed()
        if indexed is None:
            yield from self._recording(0)
            self._ended()
            return
        for index in range(len(indexed[1])):
            yield self[index]

    def __bool__(self) -> bool:
        return True  # without this, Python would ask for the length, which a stream may not have

    def __len__(self) -> int:
        self._require_index("length")
        return len(self._ids())

    def __getitem__(self, index: Any) -> T:
        self._require_index("index")
        return self._recorded_at(index)

    def __getitems__(self, indices: Sequence[Any]) -> list[T]:
        """The samples of a batch, as torch's DataLoader calls it."""
        self._require_index("index")
        return self._cached.__getitems__(self._ids()[np.asarray(indices, np.int64)].tolist())

    def _recorded_at(self, index: Any) -> T:
        """A sample by its number among the recorded ones, also if these are not all."""
        return self._cached[self._ids()[operator.index(index)].item()]  # type: ignore[no-any-return]

    def _require_index(self, what: str) -> None:
        """Refuse what only a recorded stream has.

        Args:
            what: ``"length"`` or ``"index"``.

        Raises:
            TypeError: it is not recorded, or not wholly.
        """
        state, name = self._state(), self._source.name
        if state == "whole":
            return
        if state == "in part":
            raise TypeError(
                f"{name} has no {what}, as not all of it could be recorded; give more memory= or a spill=, "
                "or use hotset.DataLoader, which runs the stream again for the rest."
            )
        raise TypeError(
            f"{name} has no {what} before it was read once; read it to its end with hotset.DataLoader, or "
            "call fill()."
        )

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
        if self._state() in ("whole", "in part"):
            return
        recording = self._recording(num_workers, 64)
        recording.silent = True
        # The generator: workers' seeds must not be drawn from the program's.
        loader = DataLoader(
            recording,
            batch_size=None,
            num_workers=num_workers,
            worker_init_fn=parent_death_signal().arm_in_worker,
            generator=torch.Generator(),
        )
        store = current_of(self._cached).access.store
        number = 0
        with filling_bar(self._source.name, None, progress) as show:
            for number, _ in enumerate(loader, 1):
                if number % 64 == 0 and store is not None:
                    show(number, store.stored_bytes)
            if store is not None:
                show(number, store.stored_bytes)
        self._wait_for_ranks()
        self._ended()

    def stats(self) -> Stats:
        """What the cache holds and has served, over all processes.

        ``uncached`` counts samples that the stream has given so far and that are not recorded.
        """
        parts = self._parts()
        if parts is None:
            return self._cached.stats()
        return stats_of(parts.store, int(parts.given.sum()), None, {})

    def check(self) -> list[str]:
        """Verify every record. Returns a sentence for each problem, or an empty list."""
        return self._cached.check()

    def clear(self) -> None:
        """Drop every recorded sample, in all processes. The next pass records the stream anew.

        Raises:
            SegmentError: another process went on writing samples for five seconds.
        """
        self._cached.clear()

    def set_epoch(self, epoch: int) -> None:
        """Announce the epoch that begins; calls the stream's ``set_epoch`` as well, if it has one.

        The stream's own shuffle counts in the pass that records it. The order of later epochs is drawn by the
        sampler: a loader with ``shuffle=True`` has another one in each, any other the recorded one, and a
        warning.
        """
        self._epoch = epoch
        if hasattr(self._dataset, "set_epoch"):
            self._dataset.set_epoch(epoch)

    def close(self) -> None:
        """Detach from the cache; the stream then comes as it is. Existing batches stay valid."""
        self._cached.close()

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = super().__getstate__()
        state["_own"]["_known"] = None
        return state


_REASONS = {
    NO_ROOM: "no more fit; give more memory= or a spill=",
    DREW: (
        "one drew random numbers as it was read, which a cache would repeat; move random transforms out of "
        "the stream, to transform=[...]"
    ),
    OTHER_KIND: "one is of a type that cannot be cached",
}


def _rank_of(parts: StreamParts | None) -> tuple[int, int]:
    """The rank of this process among those of this machine that record into one cache, and their number."""
    alone = parts is None or parts.is_alone or parts.store.segment.metadata.get("stream_alone", True)
    return (0, 1) if alone else local_rank()


def _own_parts(parts: StreamParts | None) -> slice | None:
    """The parts that this process's rank has recorded; None if other ranks than now have divided them."""
    if parts is None or not parts.count:
        return None
    ranks, workers = parts.division
    rank = local_rank()[0] if parts.is_alone else _rank_of(parts)[0]
    own = slice(rank * workers, (rank + 1) * workers)
    if not parts.is_alone and ranks != _rank_of(parts)[1]:
        return None
    return own if parts.given[own].any() or not parts.is_alone else None


def _division(ranks: int, workers: int) -> str:
    """A phrase for so many ranks of so many workers each."""
    text = f"{workers} worker{'s' if workers != 1 else ''}"
    return text if ranks == 1 else f"{ranks} ranks of {text}"
