"""Passes over a cached stream: what the next one is, decided by how far the stream is recorded.

=====================================  =======================================================================
all parts have ended                   the dataset has a length and an index
all have ended, but not all fit        the recorded samples first, in any order; then the stream is run again,
                                       and gives those that are not recorded
the same, and its order may change     the stream is run, as its rest cannot be told
other ranks or workers than before     nothing recorded can be used: recorded anew, with a warning
the stream gave other samples          the same
recorded by another living process     this pass is not recorded
what it holds has changed since        recorded anew (:mod:`.cached_stream`), with a warning
=====================================  =======================================================================

A pass that is broken off leaves what it has recorded. The next one is a first pass as well: it gives all
samples, stores those that are new, and compares some of the others with the recorded ones.
"""

from __future__ import annotations

import contextlib
import operator
import time
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np

from hotset._warnings import Warner, warn
from hotset.dataset.arguments import CacheArguments
from hotset.dataset.content_watch import Comparing
from hotset.dataset.current_cache import Make
from hotset.dataset.held_attributes import Difference, HeldAttributes
from hotset.dataset.streams.libraries import may_reorder
from hotset.dataset.streams.probe import StreamFacts
from hotset.dataset.streams.recording import StreamRecording, StreamRest
from hotset.dataset.streams.source import StreamSource
from hotset.dataset.torch_fetcher import calling_fetcher
from hotset.determinism.declare import declared
from hotset.determinism.equality import differs
from hotset.determinism.objects.held_values import Room
from hotset.determinism.objects.reading_names import reading_code
from hotset.session.job import local_rank
from hotset.store.claims import Ids
from hotset.store.format import PRESENT
from hotset.store.stream_parts import DREW, NO_ROOM, OTHER_KIND, StreamParts, StreamState

__all__ = ["StreamPasses"]

# After so many passes in a row that did not reach the end of the stream, the user is warned.
_BROKEN_OFF = 3
# How long a rank that has finished its own parts waits for a rank that makes no progress with its parts.
_PATIENCE_SECONDS = 15.0


class StreamPasses:
    """How far a stream is recorded, and what passes over it are made of. It pickles if the stream does.

    Args:
        stream: the user's.
        arguments: those of :func:`hotset.cache`.
        make: plans and makes the cache.

    Attributes:
        access: reads the recorded samples, by sample id.
        name: of the stream's class.
        by_epoch: whether another epoch gives other samples.
        epoch: the last one that was announced.
        warn: warns with a sentence; a second argument names its subject, if it is to be warned of once.
    """

    def __init__(self, stream: Any, arguments: CacheArguments, make: Make) -> None:
        self._stream = stream
        self._source = StreamSource(stream)
        self.access = make(self._source, arguments, False)
        self._source.divided(1, 1)  # it is planned
        self.name = self._source.name
        self.by_epoch = self._source.by_epoch
        self.epoch = 0
        self.warn = Warner()
        self._known: tuple[Any, Ids] | None = None
        self._of_pass: tuple[weakref.ref[object], Ids] | None = None  # the fetcher of torch's loader, and ids
        self._is_believed = declared(stream) == "deterministic" or arguments.key is not None
        self._comparing = Comparing(self.name)
        self._by_workers = False  # whether a pass that records was begun, and runs in processes of its own
        self._began: HeldAttributes | None = None  # what the stream held as that pass began
        self._moved: frozenset[str] = frozenset()  # what such a pass has changed, in this process
        self.look()
        self._open = 0  # how many passes were begun here since one reached the stream's end

    def parts(self) -> StreamParts | None:
        """How far the stream is recorded; None without a store."""
        store = self.access.store
        return StreamParts(store) if store is not None else None

    @property
    def state(self) -> StreamState:
        """How far the stream is recorded for this process, which may be another rank than then."""
        parts = self.parts()
        state = parts.state if parts is not None else "nothing"
        # The rest can come from the stream only as it was divided when the others were recorded.
        is_told = _own_parts(parts) is not None and not self.has_unknown_rest
        return "recording" if state == "in part" and not is_told else state

    @property
    def has_unknown_rest(self) -> bool:
        """Whether not all samples are recorded, and the rest cannot be told: its order is not always one."""
        parts = self.parts()
        if parts is None or parts.state != "in part":
            return False
        facts = StreamFacts.of(parts.store)
        return facts.shuffled or facts.by_epoch

    def ids(self) -> Ids:
        """The ids of the recorded samples, in the order of their indices."""
        parts = self.parts()
        assert parts is not None
        about = (id(parts.store), parts.store.clear_generation(), parts.division, tuple(parts.kept))
        if self._known is None or self._known[0] != about:
            self._known = about, parts.ids()
            self._source.divided(parts.count, parts.division[1])
        return self._known[1]

    def has_index(self, *, in_part: bool = False) -> bool:
        """Whether all samples are recorded, or ``in_part``: all were read, but not all could be recorded."""
        state = self.state
        return state == "whole" or (in_part and state == "in part")

    @property
    def batch_size(self) -> int:
        """How many samples each item of the stream seems to hold, if it gives batches; otherwise 0."""
        parts = self.parts()
        return StreamFacts.of(parts.store).batch_size if parts is not None else 0

    def stated_length(self) -> int:
        """The length that the stream itself states.

        Raises:
            TypeError: it states none.
        """
        with contextlib.suppress(TypeError):  # also of a ChainDataset over streams that state none
            return len(self._stream)
        self.require_index("length")
        return len(self.ids())  # it was recorded meanwhile

    def rest(self) -> StreamRest | None:
        """What this rank gets from the stream in a pass that begins now; None if nothing."""
        parts = self.parts()
        own = _own_parts(parts) if self.state == "in part" else None
        if parts is None or own is None:
            return None
        return StreamRest(own.start, tuple(parts.kept[own].tolist()), tuple(parts.given[own].tolist()))

    def ranks(self) -> tuple[int, int]:
        """The number of this process among the ranks that share the samples, and how many these are."""
        return _rank_of(self.parts())

    def recording(
        self, workers: int, group: int = 1, *, rest: StreamRest | None = None, replay: bool = False
    ) -> StreamRecording:
        """The dataset that torch's loader runs in each worker: it gives the samples, and records them.

        Args:
            workers: how many workers the loader has.
            group: how many samples the loader collects before it makes a batch of them.
            rest: give only these samples, and record nothing.
            replay: record nothing, as this pass repeats one that was recorded.
        """
        parts = self.parts()
        rank, ranks = _rank_of(parts)
        number, division = 0, parts.division if parts is not None else (0, 0)
        records = parts is not None and rest is None and not (replay or self.has_unknown_rest)
        if parts is not None and records and self._begin(parts, ranks, max(workers, 1)):
            number, division = parts.new_pass(), (ranks, max(workers, 1))
            self._by_workers = workers > 0
            self.look()
            self._began = self._held or self._held_now()
        return StreamRecording(
            self._stream, self.access, rank, number, rest=rest, group=group, division=division
        )

    def _begin(self, parts: StreamParts, ranks: int, workers: int) -> bool:
        """Prepare the parts for a pass by so many workers; False if it cannot be recorded."""
        name, store = self.name, parts.store
        self._open += 1
        generation = store.clear_generation()
        why = _why_anew(parts, ranks, workers)
        unnamed = parts.count == 0 and bool((store.segment.used_index >= PRESENT).any())
        if why is not None and parts.is_recorded_by_others():
            self.warn(
                f"{name} is being recorded by other processes, with {_division(*parts.division)}, so this "
                "pass is not recorded; wait until they have read it.",
            )
            return False
        if why is not None:
            warn(
                f"{name} is recorded anew: {why}. Let one pass come to its end with the same ranks and "
                "workers; later passes may have any."
            )
        # Another rank may have cleared it meanwhile, and record already.
        if (why is not None or unnamed) and not store.clear(generation=generation):
            return False
        if self._open == _BROKEN_OFF:
            self.warn(
                f"{name} was begun three times and has never come to its end, so nothing is served from the "
                "cache: it has an index once one pass has read all of it. Let one pass come to its end, or "
                "call fill(); if the stream is endless, bound it (WebDataset: with_epoch)."
            )
        return parts.divide(ranks, workers)

    def look(self) -> None:
        """From here on, compare with what the stream holds now.

        Not while this process records it itself: what reading changes (a position, a counter) could not be
        told from what the user does.
        """
        recorded = self.has_index(in_part=True)
        self._held = self._held_now() if recorded or self._by_workers else None

    def _held_now(self) -> HeldAttributes | None:
        """What the stream holds now; without what changes as this process runs it for the rest."""
        if self._is_believed:
            return None
        stream, names = self._stream, reading_code(self._stream).names
        moved = self._moved if self.state == "in part" else frozenset()

        def counts(owner: Any, name: str) -> bool:
            if f"{type(owner).__name__}.{name}" in moved:
                return False
            return owner is not stream or names is None or name in names

        return self._comparing.run(lambda: HeldAttributes.of(stream, room=Room(outermost=0), counts=counts))

    def change(self) -> Difference | None:
        """An attribute that samples may depend on, and that has changed since the stream was recorded."""
        held = self._held
        return self._comparing.run(held.changed) if held is not None else None

    def ended(self) -> None:
        """Warn of what a pass that has reached its end could not record."""
        self._open = 0
        if self._held is None:
            if self._began is not None:
                self._moved = frozenset(self._comparing.run(self._began.moved) or ())
            self.look()
        parts = self.parts()
        if parts is None or parts.state not in ("whole", "in part"):
            return
        name, kept, given = self.name, int(parts.kept.sum()), int(parts.given.sum())
        if parts.state == "in part":
            reasons = parts.reasons()
            why = "; ".join(text for reason, text in _REASONS.items() if reason in reasons)
            then = "In each epoch the recorded ones come first, and then the stream is run for the rest."
            if self.has_unknown_rest:
                then = (
                    "Its order may be another in each run, so the rest cannot be told from them, and all "
                    "samples come from the stream; or leave out its shuffle, and shuffle by the loader."
                )
            self.warn(f"{kept:,} of {given:,} samples of {name} are recorded: {why}. {then}", "in part")
        self._warn_of_copies(parts)

    def tell_of_order(self) -> None:
        """Warn before a pass in the recorded order, if without a cache each pass would have its own."""
        parts = self.parts()
        shuffled = parts is not None and StreamFacts.of(parts.store).shuffled
        announced = self.epoch or self.change() is not None
        if shuffled or (announced and may_reorder(self._stream)):
            self.warn(
                f"{self.name} may give its samples in another order in each epoch, or other samples, but "
                "recorded ones come as they were recorded; give the loader shuffle=True to have another "
                "order in each, and do not cache a stream whose samples themselves change with the epoch.",
                "one order",
            )

    def tell_of_replay(self) -> None:
        """Warn before a pass over the stream itself goes on, if no run of it repeats another one's order."""
        parts = self.parts()
        if parts is not None and not StreamFacts.of(parts.store).repeats:
            self.warn(
                f"{self.name} draws the order of each run from the clock or the system's entropy, so the "
                "pass that goes on may give some samples twice and miss others; give its shuffle a seed, or "
                "record it first: let one pass come to its end, or call fill().",
                "replay",
            )

    def tell_of_workers(self) -> None:
        """Warn that a worker of a loader that does not know the cache runs the stream itself."""
        self.warn(
            f"{self.name} is run by another dataset in the workers of a loader, each of which gets a part of "
            "its own, so samples come from the stream there and none is recorded; give the cached stream "
            "itself to hotset.DataLoader, and what the other dataset does with samples to hotset.cache as "
            "transform=.",
            "workers",
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
                    if common and differs(store.read(ids[0]), store.read(ids[1])) is None:
                        self.warn(
                            f"{self.name} gives the same samples to {count} workers, so each comes "
                            f"{count} times in an epoch: have __iter__ divide them by "
                            "torch.utils.data.get_worker_info(), or use one worker.",
                            "copies",
                        )
                        return

    def wait_for_ranks(self) -> None:
        """Wait for other ranks that still read their parts, if this rank has finished its own."""
        parts = self.parts()
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
        name = self.name
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

    def samples(self, indices: Sequence[Any]) -> list[Any]:
        """Samples by their numbers among the recorded ones, also if these are not all."""
        return self.samples_of(_at(self.ids(), indices))

    def indexed(self, indices: Sequence[Any]) -> list[Any]:
        """Samples by index. A pass of torch's loader goes on if the cache is cleared or closed meanwhile.

        Raises:
            TypeError: see :meth:`require_index`.
        """
        fetcher = calling_fetcher()
        began = fetcher is not None and self._of_pass is not None and self._of_pass[0]() is fetcher
        if began and self.state != "whole":
            assert self._of_pass is not None
            return self.samples_of(_at(self._of_pass[1], indices))
        self.require_index("index")
        ids = self.ids()
        if fetcher is not None:
            self._of_pass = weakref.ref(fetcher), ids
        return self.samples_of(_at(ids, indices))

    def samples_of(self, ids: Ids) -> list[Any]:
        """Samples by their ids; those that are no longer recorded come from the stream."""
        return self.access.source.finish_batch(self.access.records(ids))

    def require_index(self, what: str) -> None:
        """Refuse what only a recorded stream has.

        Args:
            what: ``"length"`` or ``"index"``.

        Raises:
            TypeError: it is not recorded, or not wholly.
        """
        state, name = self.state, self.name
        if state == "whole":
            return
        if state == "in part" or self.has_unknown_rest:
            raise TypeError(
                f"{name} has no {what}, as not all of it could be recorded; give more memory= or a spill=, "
                "or use hotset.DataLoader, which runs the stream again for the rest."
            )
        raise TypeError(
            f"{name} has no {what} before it was read once; read it to its end with hotset.DataLoader, or "
            "call fill()."
        )

    def __del__(self, suppress: type[contextlib.suppress] = contextlib.suppress) -> None:
        # At interpreter exit anything may be gone already, this module's imports included.
        with suppress(Exception):
            self.access.close()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_known": None, "_of_pass": None, "_held": None, "_began": None}


_REASONS = {
    NO_ROOM: "no more fit; give more memory= or a spill=",
    DREW: (
        "one drew random numbers as it was read, or another thread did meanwhile, and a cache would repeat a "
        "draw; move random transforms out of the stream, to transform=[...], or call fill() before other "
        "threads draw"
    ),
    OTHER_KIND: "one is of a type that cannot be cached",
}


def _at(ids: Ids, indices: Sequence[Any]) -> Ids:
    return ids[[operator.index(index) for index in indices]]


def _rank_of(parts: StreamParts | None) -> tuple[int, int]:
    """The rank of this process among those of this machine that record into one cache, and their number."""
    alone = parts is None or parts.is_alone or StreamFacts.of(parts.store).alone
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


def _why_anew(parts: StreamParts, ranks: int, workers: int) -> str | None:
    """Why a pass by so many workers cannot use what is recorded, as a phrase; None if it can."""
    if parts.is_other:
        return "it gave other samples than in the pass before (is it shuffled anew in each?)"
    # A stream that is shuffled anew cannot be continued. Of several ranks, another may have begun anew.
    broken_off = ranks == 1 and parts.state == "recording" and bool(parts.given.any())
    if broken_off and StreamFacts.of(parts.store).shuffled and not parts.is_recorded_by_others():
        return "the pass before was broken off, and it is shuffled anew in each"
    if parts.division not in ((0, 0), (ranks, workers)):
        return f"{_division(*parts.division)} divided it before, and now it is {_division(ranks, workers)}"
    return None


def _division(ranks: int, workers: int) -> str:
    """A phrase for so many ranks of so many workers each."""
    text = f"{workers} worker{'s' if workers != 1 else ''}"
    return text if ranks == 1 else f"{ranks} ranks of {text}"
