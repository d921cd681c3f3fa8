"""The training loop's clocks: how long it waits for its batches, and how long its steps take.

Where the loop asks for a batch and where it gets one, four clocks are read: the time, the processor time of
the thread, that of the process, and the time in which the thread waited for a processor. So a step is known
by its length and by what it takes of the cores. While the clocks rest (:class:`~.clocks.Rests`), only the
time is read.

But beside busy workers a step takes longer than it would alone. What it waited for a processor is taken off;
it also shares memory and caches with them, and its other threads wait, too. And within a step a loop drops
the batch before: to give 25 MB of shared memory back took 3 ms of a step of 5 ms, which it would not take
with another loader. So now and then, for one step, the workers are stopped (SIGSTOP) when the loop has got
its batch, and the batch before is kept; when the loop asks for the next one, the workers go on and the batch
is dropped. That is done at most eight times, for at most a hundredth of the time; ``hotset doctor`` continues
the workers if the loop does not.

On a GPU a step returns before its kernels have run. So an event is recorded on the current stream where the
loop gets a batch and where it asks for the next, and the time between them is read when both have happened;
nothing waits for them.

The first batches of a pass, one for each worker, are left out of all sums: they pay for starting processes,
and come in a burst. How long it takes until they are there, from the making of torch's iterator on, which
starts the workers, is noted for each pass: over a whole epoch it counts. So does what the loop waits for the
pass's end, while its workers end.
"""

from __future__ import annotations

import dataclasses
import operator
import os
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from hotset.run.doctor.clocks import Clocks, Rests
from hotset.run.doctor.fetching import Fetching
from hotset.run.ledger import Ledger

__all__ = [
    "LEAST_BATCHES",
    "ONE_THREAD",
    "LoaderSettings",
    "Loop",
    "LoopSums",
    "StepLength",
    "begins",
    "facts_of",
    "left_out",
    "step_alone",
    "workers_of",
]

LEAST_BATCHES = 3  # that a loop must have taken, without the first of each worker, to be judged
_ALONE_STEPS, _ALONE_SHARE = 8, 0.01
_LEAST_ALONE = 3
_LONGEST_ALONE_SECONDS = 2.0  # a longer step is not measured alone
ONE_THREAD = 1.2  # processor seconds in a second of a step, which threads that do little beside may take
_UNLIKE = 0.5  # steps whose processor time differs by this share of their length are not of one kind
_DEFAULT_BATCH = 32
_STEPS_KEPT = 128  # they are most of what is written
_WARM_UP = 2  # steps of a process that are left out: they compile, and allocate


@dataclasses.dataclass
class LoopSums:
    """Counts and seconds over a loop's batches and steps, as they are written.

    Attributes:
        batches, wait: all batches, and what the loop has waited for them.
        clocked_batches, wait_thread: those for which the clocks were read, and its thread's processor time.
        end: what it has waited for the ends of passes.
        steps, step: all steps beside workers, and their length.
        clocked_step, step_thread, step_process, step_queued: of those for which the clocks were read.
        gpu_steps, gpu: steps on a GPU, and their length there.
    """

    batches: int = 0
    wait: float = 0.0
    clocked_batches: int = 0
    wait_thread: float = 0.0
    end: float = 0.0
    steps: int = 0
    step: float = 0.0
    clocked_step: float = 0.0
    step_thread: float = 0.0
    step_process: float = 0.0
    step_queued: float = 0.0
    gpu_steps: int = 0
    gpu: float = 0.0

    @classmethod
    def total(cls, written: Iterable[Mapping[str, Any]]) -> LoopSums:
        """The sums over several loops, as each was written."""
        return cls(*map(sum, zip(*(dataclasses.astuple(cls(**each)) for each in written), strict=True)))

    def add_step(self, taken: Clocks) -> None:
        """Add what the clocks have said of a step."""
        self.clocked_step += taken.wall
        self.step_thread += taken.thread
        self.step_process += taken.process
        self.step_queued += taken.queued


class StepLength(NamedTuple):
    """What a step takes, in seconds.

    Attributes:
        seconds: its length, without what its thread waited for a processor.
        cpu: the processor time in it, of all threads of the process.
        thread: that of its own thread.
    """

    seconds: float
    cpu: float
    thread: float

    @classmethod
    def of(cls, taken: Clocks) -> StepLength:
        return cls(taken.wall - min(max(taken.queued, 0.0), taken.wall), taken.process, taken.thread)

    @classmethod
    def mean(cls, sums: LoopSums) -> StepLength:
        """Of all steps that a loop has counted: those whose clocks were read, scaled to the length of all."""
        length = sums.step / sums.steps
        if not sums.clocked_step:
            return cls(length, length, length)
        total = Clocks(sums.clocked_step, sums.step_thread, sums.step_process, sums.step_queued)
        return cls(*(each * length / total.wall for each in cls.of(total)))


class _Pass(NamedTuple):
    """A pass that has begun.

    Attributes:
        begun: when.
        length: in batches; None if that is not known.
        before: how many batches the passes before it have given.
        first: how many of its batches are left out of the sums.
    """

    begun: float = 0.0
    length: int | None = None
    before: int = 0
    first: int = 0


class _Wait(NamedTuple):
    """The loop has asked for a batch.

    Attributes:
        begun: when.
        clocks: of that time; None while they rest.
        is_first: whether it is the first batch of a pass.
    """

    begun: float
    clocks: Clocks | None
    is_first: bool


class _Step(NamedTuple):
    """The loop has got a batch.

    Attributes:
        begun: when.
        clocks: of that time; None while they rest.
        stopped: the workers that are stopped for this step; None if they run beside it.
    """

    begun: float
    clocks: Clocks | None
    stopped: list[int] | None


class Loop:
    """What is known of the passes over one loader, or over loaders that look the same."""

    def __init__(self, facts: dict[str, Any], ledger: Ledger) -> None:
        self.facts = facts
        self.fetching = Fetching()  # in this process, without workers
        self.sums = LoopSums()
        self.is_endless = False  # a pass has given more batches than its sampler has
        self._ledger = ledger
        self._gpu = _GpuClock(self.sums)
        self._workers: set[int] = set()  # the processes of all passes
        self._first_waits: list[float] = []
        self._starts: list[float] = []  # of each pass, in seconds
        self._steps: deque[Clocks] = deque(maxlen=_STEPS_KEPT)  # the last ones
        self._alone: list[StepLength] = []  # beside no workers, in which no batch is dropped
        self._stops: list[tuple[float, float]] = []  # from when to when the workers were stopped
        self._stopped_at = 0.0
        self._pass = _Pass()
        self._left_out = 0  # batches of this pass, still
        self._sum_left_out = 0  # of all passes
        self._looks = 0  # passes that were left at once, as by next(iter(loader))
        self._looked_at = 0  # the batches of these
        self._wait: _Wait | None = None  # this one, or the last
        self._step: _Step | None = None  # that the loop is in
        self._kept: Any = None  # a batch that the next step must not drop
        self._next_alone = 0.0
        self._clocks_rest = Rests()

    @property
    def seconds(self) -> float:
        """That it has taken so far, with its steps."""
        return self.sums.wait + self.sums.step

    @property
    def batches(self) -> int:
        """How many have counted."""
        return self.sums.batches

    @property
    def pass_batches(self) -> float | None:
        """The batches of a pass: of those that the loop has left or gone through, or as the loader says.

        A pass that was left at once, to look at a batch, is no epoch, unless all of them are left so.
        """
        if self.is_endless:
            return None
        passes = len(self._first_waits) - 1 - self._looks
        given = self._pass.before - self._looked_at
        if not passes and self._looks and self._given() <= self._pass.first:
            passes, given = self._looks, self._looked_at
        return given / passes if passes > 0 and given else self._pass.length

    def _given(self) -> int:
        """How many batches this pass has given."""
        return self.batches + self._sum_left_out - self._pass.before

    def asked_in_rest(self, now: float) -> bool:
        """The loop asks for a batch, not the first of a pass; whether that is all there is to note."""
        # What was kept is for the next step: of a later one the batch before would be another.
        if self._kept is not None or not self._clocks_rest.now(now):
            return False
        step = self._step
        if step is not None:
            self.sums.steps += 1
            self.sums.step += now - step.begun
            self._step = None
        self._wait = _Wait(now, None, False)
        return True

    def got_in_rest(self, now: float) -> bool:
        """The loop gets a batch; whether that is all there is to note."""
        wait = self._wait
        if wait is None or wait.clocks is not None:
            return False
        self.sums.batches += 1
        self.sums.wait += now - wait.begun
        self._step = _Step(now, None, None)
        return True

    def watched(self, seconds: float) -> None:
        """So long took watching, where the loop asked for a batch or got one."""
        self._clocks_rest.spent(seconds)

    def asked(self, iterator: Any, made: float | None) -> None:
        """The loop asks for a batch.

        Args:
            made: when it was made; None if that is not known.
        """
        now = Clocks.now()
        step, is_first = self._step, begins(iterator)
        was_alone = step is not None and step.stopped is not None
        if was_alone or is_first:  # the pass before may have been left after any batch
            self.let_go_on()
        if is_first:
            if self._wait is not None and self._given() <= self._pass.first:  # the pass before has not ended
                self._looks += 1
                self._looked_at += self._given()
            length = _length(iterator)
            begun = now.wall if made is None else made
            self._left_out = left_out(length, int(iterator._num_workers))
            self._pass = _Pass(begun, length, self.batches + self._sum_left_out, self._left_out)
            self._workers.update(workers_of(iterator))
        elif step is not None:
            self._count_step(step, now)
        length = self._pass.length
        self.is_endless |= length is not None and iterator._num_yielded > length
        self._step = None
        if not self._left_out:
            self._clocks_rest.count(now.wall)
        if was_alone:
            now = Clocks.now()
        self._wait = _Wait(now.wall, now, is_first)

    def _count_step(self, step: _Step, now: Clocks) -> None:
        self._gpu.end()
        taken = None if step.clocks is None else now.since(step.clocks)
        if taken is not None and step.stopped is not None:
            self._alone.append(StepLength.of(taken))
        elif not self._left_out:
            self.sums.steps += 1
            self.sums.step += now.wall - step.begun
            if taken is not None:
                self.sums.add_step(taken)
                self._steps.append(taken)

    def got(self, iterator: Any, batch: Callable[[], Any]) -> None:
        """The loop gets a batch."""
        if self._wait is None:
            return
        now = Clocks.now()
        self._count_batch(self._wait, now)
        self._step = _Step(now.wall, now, None)
        prepared = self._begin_alone(self._step, iterator, batch)
        has_gpu = self._gpu.begin()
        if prepared or has_gpu:  # that took time, which is not the step's
            self.begin_step()

    def begin_step(self) -> None:
        """The step begins only now: what was done since the loop has got its batch is not the step's."""
        if self._step is not None:
            now = Clocks.now()
            self._step = _Step(now.wall, now, self._step.stopped)

    def _count_batch(self, wait: _Wait, now: Clocks) -> None:
        if wait.is_first:
            self._first_waits.append(now.wall - wait.begun)
        if self._left_out:
            self._left_out -= 1
            self._sum_left_out += 1
            if not self._left_out:
                self._starts.append(now.wall - self._pass.begun)
        else:
            self.sums.batches += 1
            self.sums.wait += now.wall - wait.begun
            if wait.clocks is not None:
                self.sums.clocked_batches += 1
                self.sums.wait_thread += now.thread - wait.clocks.thread

    def ended(self) -> None:
        """There is no further batch in this pass: the workers have ended."""
        self.let_go_on()
        if self._wait is not None and not self._left_out:
            self.sums.end += time.perf_counter() - self._wait.begun
        self._wait = self._step = None

    def interrupt(self) -> None:
        """Another pass begins within a step of this one, a validation: that step does not count."""
        self.let_go_on()
        self._gpu.forget()
        self._step = None

    def _begin_alone(self, step: _Step, iterator: Any, batch: Callable[[], Any]) -> bool:
        """Have this step alone, if the batch before was kept for it, or keep this batch for the next.

        Returns:
            Whether anything was done.
        """
        if self._kept is not None:
            workers = workers_of(iterator)
            self._step = step._replace(stopped=workers)
            self._stopped_at = time.perf_counter()
            if not self._ledger.pause(workers):
                self._kept, self._step = None, step
            return True
        now = step.begun
        if now < self._next_alone or len(self._steps) < _WARM_UP or len(self._alone) >= _ALONE_STEPS:
            return False
        length = statistics.median(step.seconds for step in self._beside())
        self._next_alone = now + min(length, _LONGEST_ALONE_SECONDS) / _ALONE_SHARE
        if length <= _LONGEST_ALONE_SECONDS:
            self._kept = batch()
        return True

    def _beside(self) -> list[StepLength]:
        """The last steps beside the workers."""
        return list(map(StepLength.of, self._steps))

    def let_go_on(self) -> None:
        """Continue the workers, if they were stopped, and drop the batch that was kept."""
        if self._step is not None and self._step.stopped:
            self._ledger.resume(self._step.stopped)
            self._stops.append((self._stopped_at, time.perf_counter()))
        self._kept = None

    def step(self) -> tuple[StepLength | None, bool]:
        """A step, as :func:`step_alone` gives it; None if none was counted."""
        if not self.sums.steps:
            return None, False
        return step_alone(StepLength.mean(self.sums), self._beside(), self._alone)

    def to_json(self) -> dict[str, Any]:
        self._gpu.collect()  # where steps are short, the clocks rest as the GPU ends them
        return {
            "facts": self.facts,
            "sums": dataclasses.asdict(self.sums),
            "first_waits": self._first_waits,
            "starts": self._starts,
            "left_out": self._sum_left_out / max(len(self._starts), 1),
            "pass_batches": self.pass_batches,
            "steps": self._beside(),
            "alone": self._alone,
            "stops": self._stops,
            "fetching": self.fetching.to_json(memory=False),
            "workers": sorted(self._workers),
        }


def step_alone(
    mean: StepLength, beside: Sequence[StepLength], alone: Sequence[StepLength]
) -> tuple[StepLength, bool]:
    """A step beside no workers, and whether it drops a batch; the mean of all, if too few were alone.

    The steps that were measured alone are few: they give the ratio to the others, not the length. That holds
    for steps of one kind. Where gradients are accumulated, those alone may all be of the other kind. But
    steps of several threads differ because these spin while a worker has their core: alone they do not.

    Args:
        mean: of all steps beside workers.
        beside: the last of them.
        alone: those while the workers were stopped, and the batch before was kept.
    """
    if len(alone) < _LEAST_ALONE or len(beside) < _LEAST_ALONE:
        return mean, True
    usual = statistics.fmean(one.seconds for one in beside)
    tenths = statistics.quantiles([one.cpu for one in beside], n=10)
    spin = statistics.fmean(one.cpu for one in beside) > ONE_THREAD * usual
    if tenths[-1] - tenths[0] > _UNLIKE * usual and not (spin and len(alone) >= _ALONE_STEPS):
        return mean, True
    # Without the shortest and the longest. Not medians of both kinds: beside workers, where large batches are
    # dropped, the mean is a sixth above the median, and no step alone is longer for that.
    middle = sorted(alone)[len(alone) // 4 : len(alone) - len(alone) // 4]
    one = StepLength(*(statistics.fmean(column) for column in zip(*middle, strict=True)))
    if not usual or not one.seconds:
        return mean, True
    seconds = mean.seconds * min(1.0, one.seconds / usual)
    return StepLength(seconds, one.cpu * seconds / one.seconds, one.thread * seconds / one.seconds), False


def left_out(length: int | None, workers: int) -> int:
    """How many batches of a pass are left out of the sums: the first of each worker.

    Args:
        length: the batches of a pass; None for one without end.
        workers: the loader's.
    """
    return max(1, workers if length is None or length >= 4 * workers else 1)


# ---- the time of steps on a GPU --------------------------------------------------------------------------


class _GpuClock:
    """The time that steps take on the GPU, if the program uses one."""

    def __init__(self, sums: LoopSums) -> None:
        self._sums = sums
        self._begun: Any = None
        self._pending: list[tuple[Any, Any]] = []

    def begin(self) -> bool:
        """The step begins; whether there is a GPU."""
        self._begun = self._event()
        return self._begun is not None

    def end(self) -> None:
        """It has ended, as far as the processor has to do with it."""
        begun, self._begun = self._begun, None
        if begun is not None and len(self._pending) < _STEPS_KEPT:
            self._pending.append((begun, self._event()))
        self.collect()

    def collect(self) -> None:
        """Count the steps that the GPU has done by now."""
        try:
            while self._pending and self._pending[0][1].query():
                first, last = self._pending.pop(0)
                self._sums.gpu_steps += 1
                self._sums.gpu += first.elapsed_time(last) / 1e3
        except RuntimeError:  # the GPU has failed in one of them, and is of no use to this process any more
            self._pending.clear()

    def forget(self) -> None:
        """The step that has begun does not count."""
        self._begun = None

    @staticmethod
    def _event() -> Any:
        cuda = getattr(sys.modules.get("torch"), "cuda", None)
        if cuda is None or not cuda.is_initialized() or cuda.is_current_stream_capturing():
            return None
        event = cuda.Event(enable_timing=True)
        event.record()
        return event


# ---- what torch's iterator tells of its loader -----------------------------------------------------------


def begins(iterator: Any) -> bool:
    """Whether a pass begins: it has given no batch."""
    return not iterator._num_yielded


def workers_of(iterator: Any) -> list[int]:
    """The processes of an iterator's workers."""
    return [one.pid for one in getattr(iterator, "_workers", ()) if one.pid is not None and one.is_alive()]


def facts_of(iterator: Any) -> dict[str, Any]:
    """What the loader is, as far as its iterator tells."""
    dataset = iterator._dataset
    try:
        length: int | None = len(dataset)
    except Exception:
        length = None
    return {
        "dataset": type(dataset).__name__,
        "length": length,
        "batch_size": _batch_size(iterator._index_sampler),
        "workers": int(iterator._num_workers),
        "world": os.environ.get("LOCAL_WORLD_SIZE"),
    }


def _batch_size(sampler: Any) -> int | None:
    """A batch sampler of the user's own may have something else of that name, or a number of numpy's."""
    try:
        return operator.index(sampler.batch_size)
    except Exception:
        return None


def _length(iterator: Any) -> int | None:
    try:
        return len(iterator)
    except TypeError:
        return None


class LoaderSettings(NamedTuple):
    """What a trial needs of a loader; not its iterator, whose workers end when nothing refers to it."""

    dataset: Any
    workers: int
    batch_size: int | None
    collate_fn: Callable[[Any], Any]
    worker_init_fn: Callable[[int], None] | None
    batches: int | None
    """Of a pass with the same workers; None for a pass without end."""
    order: Any
    """The batch sampler."""
    forks: bool = True
    """Whether its workers, if it has some, are forks of the program."""

    @classmethod
    def of(cls, iterator: Any, facts: dict[str, Any]) -> LoaderSettings:
        collate = iterator._collate_fn
        size = facts["batch_size"]
        if size is None and iterator._auto_collation:
            size = _DEFAULT_BATCH  # a batch sampler of the user's own
        init = getattr(iterator, "_worker_init_fn", None)
        batches = None if getattr(iterator, "_persistent_workers", False) else _length(iterator)
        forks = all(worker._popen.method == "fork" for worker in getattr(iterator, "_workers", ()))
        order = iterator._index_sampler
        return cls(iterator._dataset, facts["workers"], size, collate, init, batches, order, forks)
