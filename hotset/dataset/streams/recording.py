"""The recording of a stream: each worker stores the samples of its part, as it gives them to the loader.

In a first pass torch runs the stream in each worker of each rank, with a :class:`StreamRecording` in its
place. That gives what the stream gives, and stores it (:mod:`hotset.store.stream_parts` says under which
sample ids). Samples that an earlier pass has recorded are not stored again, but some of them are compared. A
sample that draws random numbers, or for which there is no room, ends the recording of its part, and not the
pass.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from torch.utils.data import IterableDataset, get_worker_info

from hotset.dataset.pipeline import Source
from hotset.dataset.sample_access import SampleAccess
from hotset.dataset.streams.libraries import is_node, run
from hotset.dataset.streams.probe import StreamFacts, held_by_run
from hotset.determinism.draws import entropy
from hotset.determinism.draws.rng import Generators
from hotset.determinism.equality import differs
from hotset.store.format import PRESENT, Slot
from hotset.store.locks import Pauses
from hotset.store.store import Store
from hotset.store.stream_parts import DREW, NO_ROOM, OTHER_KIND, StreamPart, StreamParts

__all__ = ["StreamRecording", "StreamRest"]

# Which recorded samples a further pass compares with the stream: the first few, then one in so many.
_COMPARED, _LATER = 8, 64
# How long a pass that takes over a part waits for the samples that the earlier pass is storing.
_TAKE_OVER_SECONDS = 5.0


class StreamRest(NamedTuple):
    """The samples that a pass gets from the stream, after those that are recorded as it begins.

    It is fixed then: if the cache is cleared in the midst of the pass, no sample comes twice.

    Attributes:
        first: the number of the rank's first part.
        kept: how many samples of each of its parts are recorded.
        given: how many each part has.
    """

    first: int
    kept: tuple[int, ...]
    given: tuple[int, ...]

    @property
    def workers(self) -> int:
        """How many workers divided the samples as they were recorded: as many have to read the rest."""
        return len(self.kept)

    def sizes(self, size: int | None, *, drop_last: bool) -> deque[int]:
        """The sizes of the batches.

        torch's loader takes one batch from each worker in turn, as long as the worker has one.

        Args:
            size: of a batch; None for single samples.
            drop_last: leave out a worker's smaller last batch.
        """
        left = [given - kept for given, kept in zip(self.given, self.kept, strict=True)]
        sizes: deque[int] = deque()
        while any(left):
            for worker, each in enumerate(left):
                taken = min(each, size or 1)
                left[worker] -= taken
                if taken and not (drop_last and taken < (size or 1)):
                    sizes.append(taken)
        return sizes


class StreamRecording(IterableDataset[Any]):
    """The stream as torch runs it in a worker: it gives the stream's samples, and records them.

    Args:
        dataset: the user's stream; also what ``get_worker_info().dataset`` is in a worker.
        access: reads recorded samples, and has their store.
        rank: the number of this process on this machine.
        number: what :meth:`StreamParts.new_pass` returned for this pass; 0 to record nothing.
        rest: the samples to give; None for all.
        group: how many samples the loader collects before it makes a batch of them.
        division: how many ranks, and how many workers in each, divide the samples in this pass.

    Attributes:
        silent: whether to give zeros in place of samples, as only the recording is wanted.
    """

    def __init__(
        self,
        dataset: Any,
        access: SampleAccess,
        rank: int,
        number: int,
        *,
        rest: StreamRest | None,
        group: int,
        division: tuple[int, int],
    ) -> None:
        self.dataset = dataset
        self.silent = False
        self._access = access
        self._rank = rank
        self._number = number
        self._rest = rest
        self._group = group
        self._division = division

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info is not None else (0, 1)
        if info is not None and info.dataset is self:  # the stream must find itself there
            object.__setattr__(info, "dataset", self.dataset)
        source, store = self._access.source, self._access.store
        samples = _only_once(self.dataset, worker)
        passed = self._rest.kept[worker] if self._rest is not None else 0
        if store is None or not (self._number or passed):
            yield from map(source.finish, itertools.islice(_values(source, samples), passed, None))
            return
        group = 1 if source.live else self._group
        part = worker + (self._rest.first if self._rest is not None else self._rank * workers)
        recorder = _PartRecorder(store, source, self.dataset, part, self._number, group, self._division)
        try:
            for number, value in enumerate(_values(source, samples)):
                if not number:
                    recorder.draws.begin(samples)
                recorder.take(value)
                if number < passed:
                    continue
                yield source.finish(value) if not self.silent else 0
                recorder.resume()
            recorder.end()
        finally:
            recorder.part.disown()


def _only_once(stream: Any, worker: int) -> Iterator[Any]:
    """A run of the stream in this worker; only the first worker runs a node of torchdata.

    Such a node does not divide itself among workers.
    """
    if worker and is_node(stream):
        return iter(())
    return run(stream)


def _values(source: Any, samples: Iterator[Any]) -> Iterator[Any]:
    """The samples, with the cached transforms applied."""
    while True:
        try:
            value = source.of_stream(samples)
        except StopIteration:
            return
        yield value


class _Draws:
    """Tells whether a run of a stream draws random numbers since the loader had its last sample.

    Watched are the cached transforms and what has drawn nothing as the stream was probed.
    """

    def __init__(self, facts: StreamFacts, source: Source, stream: Any) -> None:
        self._facts, self._stream = facts, stream
        self._holders = [*([source.prefix] if source.prefix else []), *([] if facts.draws else [stream])]
        self._generators = Generators(self._holders) if self._holders else None
        self._entropy: int | None = None  # that was taken up to then; None if that does not count

    def begin(self, samples: Iterator[Any]) -> None:
        """The run has given its first sample: watch also the generators that it holds itself."""
        if self._facts.own:
            self._generators = Generators([*self._holders, *held_by_run(samples, self._stream)])
        if not self._facts.entropy:
            self._entropy = entropy.taken()

    def any(self) -> bool:
        """Whether it has drawn some."""
        if self._entropy is not None and entropy.taken() != self._entropy:
            return True
        return self._generators is not None and self._generators.any_moved

    def note(self) -> None:
        """From here on, compare with the present states."""
        if self._generators is not None:
            self._generators.note()
        if self._entropy is not None:
            self._entropy = entropy.taken()


class _PartRecorder:
    """Records one part of a stream, as this process gives it.

    Samples are recorded in groups, as that takes a tenth of the time. A group is recorded before its last
    sample is given: until then torch's loader only collects them, and none has been collated or changed.

    Args:
        store: the cache's store.
        source: applies the cached transforms.
        stream: the user's stream.
        part: the number of the part.
        number: the pass; 0 to record nothing.
        group: how many samples are given before one of them may be changed.
        division: the division of the pass, by which the part is numbered. Another pass, with other workers,
            may have divided the stream anew since this one was begun: then the number means another part now.

    Attributes:
        part: how far this one is recorded.
        draws: tells whether reading draws random numbers.
        records: whether to record: not if another process records this part, nor beyond what can be kept.
    """

    def __init__(
        self,
        store: Store,
        source: Source,
        stream: Any,
        part: int,
        number: int,
        group: int,
        division: tuple[int, int],
    ) -> None:
        self._parts = StreamParts(store)
        self.part = StreamPart(store, part, number)
        # Read in this order: a process that divides the stream anew clears the store before that.
        generation = store.clear_generation()
        self._generation = generation if self._parts.division == division else None  # None: uses no record
        self.records = self._generation is not None and number > 0 and self.part.own(self._generation)
        self._number = number
        self._store = store
        self._group = group
        self._held: list[Any] = []
        # Not by the number of parts: a process that divides the stream anew has none for a moment.
        self._kept = self.part.kept if self._generation is not None else 0
        self._position = 0
        self.draws = _Draws(StreamFacts.of(store), source, stream)

    @property
    def _is_current(self) -> bool:
        """Whether what is recorded has not been cleared since this run was begun."""
        return self._store.clear_generation() == self._generation

    def take(self, value: Any) -> None:
        """Take the next sample."""
        position, self._position = self._position, self._position + 1
        if not self._is_current:
            self.records = False  # recorded anew by others meanwhile
        elif position < self._kept:
            if position < _COMPARED or position % _LATER == 0:
                self._compare(position, value)
        elif self.records:
            self._held.append(value)
            if len(self._held) >= self._group:
                self.flush()
        elif not self._number:  # the rest of a stream
            self._store.participant.row[Slot.MISSES] += 1

    def resume(self) -> None:
        """Compare with the present states from here on: the loader may have drawn since the last sample."""
        if not self._held:
            self.draws.note()

    def flush(self) -> None:
        """Record the samples that were taken last."""
        held, self._held = self._held, []
        self.records = self._is_current and self.part.is_own
        if not held or not self.records:
            return
        if self.draws.any():
            self._stop(DREW)
            return
        begin = time.perf_counter_ns()
        store, first = self._store, self._kept
        ids = [self._parts.sample_id(self.part.number, first + number) for number in range(len(held))]
        ids = [sample for sample in ids if sample < len(store)]
        if ids:
            self._parts.use(ids[-1] + 1)
        mismatches = len(store.filler.mismatches)
        self._insert(dict(zip(ids, held, strict=False)))
        absent = np.flatnonzero(store.segment.index[np.array(ids, np.int64)] < PRESENT) if ids else [0]
        kept = int(absent[0]) if len(absent) else len(ids)
        self._kept = first + kept
        self.records = self.part.note(self._kept)
        if kept < len(held):
            self._stop(OTHER_KIND if len(store.filler.mismatches) > mismatches else NO_ROOM)
        row = store.participant.row
        row[Slot.MISSES] += len(held)
        row[Slot.FILL_NS] += time.perf_counter_ns() - begin

    def _insert(self, samples: dict[int, Any]) -> None:
        """Store samples.

        Of two passes by one program the later one takes over. The earlier one may be storing the same samples
        now: wait until it has stored them, or has ended.
        """
        pauses = Pauses(_TAKE_OVER_SECONDS)
        while self._store.insert(samples, self._generation) and pauses.pause():
            pass

    def _stop(self, why: int) -> None:
        self.part.stop(why)
        self.records = False

    def _compare(self, position: int, value: Any) -> None:
        """Compare a recorded sample with what the stream gives now."""
        assert self._generation is not None  # or nothing would count as recorded
        copies = self._store.read(np.array([self._parts.sample_id(self.part.number, position)]))
        if copies is not None and differs(copies[0], value, across=True) is not None:
            self._parts.note_other(self._generation)
            self.records = False

    def end(self) -> None:
        """Store what is left, and note that the part has ended."""
        self.flush()
        if self._number > 0:
            self.part.end(self._position)
