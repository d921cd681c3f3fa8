"""Clocks in a program that ``hotset doctor`` runs: around each batch, in each worker, around each decoder.

A process writes what it has seen to a file of its own in the ledger, ``watch-<pid>.json``, twice a second at
most, and at its end. ``hotset doctor`` reads these when the program has ended. Nothing is sent while a batch
is waited for.

Where the loop asks for a batch and where it gets one, three clocks are read: the time, the processor time of
the thread, and that of the process. So a step is known by its length and by what it takes of the cores. But
beside busy workers a step takes longer than it would alone. So now and then, for one step, the workers are
stopped (SIGSTOP) when the loop has got its batch, and go on when it asks for the next. That is done at most
eight times, for at most a hundredth of the time; ``hotset doctor`` continues them if the loop does not.

On a GPU a step returns before its kernels have run. So an event is recorded on the current stream where the
loop gets a batch and where it asks for the next, and the time between them is read when both have happened;
nothing waits for them.

The first batch of a worker, and as many of a pass as there are workers, are left out of all sums: they pay
for opening files and starting processes, and come in a burst.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import multiprocessing.util
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from hotset.run import decoders, pillow
from hotset.run.environment import WatchOptions
from hotset.run.import_hook import Hook

__all__ = [
    "DONE",
    "INTERRUPTED",
    "OURS",
    "PAUSED",
    "THREADS",
    "TRIAL",
    "WATCHED",
    "Observer",
    "Settings",
    "hooks",
    "left_out",
    "watch_no_more",
]

# Files of the ledger.
WATCHED, TRIAL, DONE, PAUSED, OURS, THREADS = "watch-", "trial.json", "done", "paused-", "ours", "threads"
INTERRUPTED = "interrupted"
_TRYING, _MEMORY = "trying", "memory"
_WRITE_SECONDS = 0.5
_MEMORY_AFTER_SECONDS, _MEMORY_SECONDS = 0.5, 5.0
_ALONE_STEPS, _ALONE_SHARE = 8, 0.01
_LEAST_EPOCH_SECONDS = 10.0  # a pass that took as long is enough to judge by
_LEAST_BATCHES = 3
_LONGEST_ALONE_SECONDS = 2.0  # a longer step is not measured alone
_DEFAULT_BATCH = 32
_STEPS_KEPT = 512
_WARM_UP = 2  # steps of a process that are left out: they compile, and allocate


class _Clocks(NamedTuple):
    """Seconds: of the wall, of this thread's processor time, of the process's."""

    wall: float
    thread: float
    process: float

    @classmethod
    def now(cls) -> _Clocks:
        return cls(time.perf_counter(), time.thread_time(), time.process_time())

    def since(self, earlier: _Clocks) -> _Clocks:
        return _Clocks(self.wall - earlier.wall, self.thread - earlier.thread, self.process - earlier.process)


class _Sums:
    """Counts and seconds by name, as they are written."""

    def __init__(self) -> None:
        self.of: dict[str, float] = {}

    def add(self, **values: float) -> None:
        for name, value in values.items():
            self.of[name] = self.of.get(name, 0.0) + value


# ---- in whatever process makes samples -------------------------------------------------------------------


class Fetching:
    """What this process does to make batches."""

    def __init__(self) -> None:
        self.sums = _Sums()
        self.decoders: dict[str, list[float]] = {}  # name: calls, processor seconds, bytes
        self._inside = False  # a fetch
        self._decoding = False
        self._begun: dict[str, float] | None = None
        self._memory: list[tuple[float, float]] = []  # when it was read first, and last, and the bytes
        self._memory_at = 0.0  # when to read it next

    def fetch(self, fetcher: Any, plain: Callable[[Any, Any], Any], indices: Any) -> Any:
        """Call torch's ``fetch`` between two readings of the clocks."""
        if not isinstance(fetcher.collate_fn, _TimedCollate):
            fetcher.collate_fn = _TimedCollate(fetcher.collate_fn, self)
        begin = _Clocks.now()
        self._inside = True
        try:
            return plain(fetcher, indices)
        finally:
            self._inside = False
            self._count(_Clocks.now().since(begin), len(indices) if fetcher.auto_collation else 1)

    def _count(self, taken: _Clocks, samples: int) -> None:
        if self._begun is not None:
            self.sums.add(batches=1, samples=samples, wall=taken.wall, cpu=taken.thread)
            return
        self.sums.of.clear()
        self.decoders.clear()
        self._begun = _process_figures()
        self._memory_at = self._begun["wall"] + _MEMORY_AFTER_SECONDS

    def collated(self, cpu: float) -> None:
        self.sums.add(collate_cpu=cpu)

    def decode(self, name: str, call: Callable[[], Any], size: Callable[[Any], int]) -> Any:
        """Call a decoder between two readings of the clocks; one within another counts once."""
        if not self._inside or self._decoding or threading.current_thread() is not threading.main_thread():
            return call()
        self._decoding = True
        begin = time.thread_time()
        try:
            value = call()
        finally:
            self._decoding = False
            taken = time.thread_time() - begin
        row = self.decoders.get(name)
        if row is None:
            row = self.decoders[name] = [0.0, 0.0, 0.0]
        row[0] += 1.0
        row[1] += taken
        row[2] += size(value)
        return value

    @property
    def is_unread(self) -> bool:
        """Whether this process has made batches, and not read its memory."""
        return self._begun is not None and not self._memory

    def to_json(self, *, memory: bool) -> dict[str, Any] | None:
        """What is known so far.

        Args:
            memory: whether to read this process's memory now, even if that is not due.
        """
        if self._begun is None:
            return None
        now = _process_figures()
        if memory or now["wall"] > self._memory_at:
            self._memory_at = now["wall"] + _MEMORY_SECONDS
            self._memory = [*self._memory[:1], *((now["wall"], size) for size in _memory())]
        figures = {name: [value, now.get(name)] for name, value in self._begun.items()}
        return {
            **self.sums.of,
            "decoders": self.decoders,
            "process": figures,
            "memory": self._memory,
        }


class _TimedCollate:
    """The loader's collate function, timed."""

    def __init__(self, plain: Callable[[Any], Any], fetching: Fetching) -> None:
        self.plain = plain
        self._fetching = fetching

    def __call__(self, samples: Any) -> Any:
        begin = time.thread_time()
        try:
            return self.plain(samples)
        finally:
            self._fetching.collated(time.thread_time() - begin)


def _bytes_of(value: Any) -> int:
    """The bytes of an array or a tensor, or of the first of a tuple; 0 of anything else."""
    size = getattr(value[0] if isinstance(value, tuple) and value else value, "nbytes", None)
    return size if isinstance(size, int) else 0


def _bytes_of_picture(image: Any) -> int:
    return int(image.width) * int(image.height) * len(image.getbands())


def _process_figures() -> dict[str, float]:
    """What the kernel says of this process: each figure that it does not say is left out."""
    found: dict[str, float] = {"wall": time.perf_counter(), "cpu": time.process_time()}
    with contextlib.suppress(OSError, ValueError, IndexError), open("/proc/self/schedstat") as file:
        found["queued"] = int(file.read().split()[1]) / 1e9
    with contextlib.suppress(OSError, ValueError), open("/proc/self/io") as file:
        for line in file:
            name, _, value = line.partition(":")
            if name in ("rchar", "read_bytes"):
                found[name] = int(value)
    return found


def _memory() -> list[float]:
    """The bytes of this process, where what it shares with others counts in part; empty if unknown."""
    with contextlib.suppress(OSError, ValueError), open("/proc/self/smaps_rollup") as file:
        return [1024.0 * int(line.split()[1]) for line in file if line.startswith("Pss:")]
    return []


# ---- in the process that trains --------------------------------------------------------------------------


class _GpuClock:
    """The time that steps take on the GPU, if the program uses one."""

    def __init__(self, sums: _Sums) -> None:
        self._sums = sums
        self._begun: Any = None
        self._pending: list[tuple[Any, Any]] = []

    def begin(self) -> None:
        """The step begins."""
        self._begun = self._event()

    def end(self) -> None:
        """It has ended, as far as the processor has to do with it."""
        begun, self._begun = self._begun, None
        if begun is not None and len(self._pending) < _STEPS_KEPT:
            self._pending.append((begun, self._event()))
        while self._pending and self._pending[0][1].query():
            first, last = self._pending.pop(0)
            self._sums.add(gpu_steps=1, gpu=first.elapsed_time(last) / 1e3)

    @staticmethod
    def _event() -> Any:
        cuda = getattr(sys.modules.get("torch"), "cuda", None)
        if cuda is None or not cuda.is_initialized() or cuda.is_current_stream_capturing():
            return None
        event = cuda.Event(enable_timing=True)
        event.record()
        return event


class Loop:
    """What is known of the passes over one loader, or over loaders that look the same."""

    def __init__(self, facts: dict[str, Any], ledger: _Ledger) -> None:
        self.facts = facts
        self._ledger = ledger
        self.sums = _Sums()
        self._gpu = _GpuClock(self.sums)
        self.first_waits: list[float] = []
        self.steps: list[float] = []  # the lengths of the last ones
        self.alone: list[tuple[float, float]] = []  # length and processor time of a step beside no workers
        self._left_out = 0  # batches of this pass, still
        self._exited: _Clocks | None = None  # when the loop got its last batch; None before a pass's first
        self._entered: _Clocks | None = None  # when it asked for the next
        self._paused: list[int] = []
        self._next_pause = 0.0

    def asked(self, iterator: Any) -> None:
        """The loop asks for a batch."""
        now = _Clocks.now()
        paused = bool(self._paused)
        self.let_go_on()
        if not iterator._num_yielded:  # of torch's iterators: a pass begins
            self._exited = None
            self._left_out = left_out(_length(iterator), int(iterator._num_workers))
        elif self._exited is not None:
            self._count_step(now.since(self._exited), paused)
        self._entered = _Clocks.now() if paused else now

    def _count_step(self, taken: _Clocks, paused: bool) -> None:
        self._gpu.end()
        if paused:
            self.alone.append((taken.wall, taken.process))
        elif not self._left_out:
            self.sums.add(steps=1, step=taken.wall, step_process=taken.process)
            self.steps.append(taken.wall)
            del self.steps[:-_STEPS_KEPT]

    def got(self, iterator: Any) -> None:
        """The loop gets a batch."""
        if self._entered is None:
            return
        now = _Clocks.now()
        self._count_batch(now.since(self._entered))
        self._pause(iterator, now.wall)
        self._gpu.begin()
        self._exited = _Clocks.now()

    def _count_batch(self, taken: _Clocks) -> None:
        if self._exited is None:
            self.first_waits.append(taken.wall)
        if self._left_out:
            self._left_out -= 1
        else:
            self.sums.add(batches=1, wait=taken.wall, wait_thread=taken.thread)

    def ended(self) -> None:
        """There is no further batch in this pass."""
        self._exited = self._entered = None

    def _pause(self, iterator: Any, now: float) -> None:
        """Stop the workers for this step, if it is time for that."""
        if now < self._next_pause or len(self.steps) < _WARM_UP or len(self.alone) >= _ALONE_STEPS:
            return
        length = sorted(self.steps)[len(self.steps) // 2]
        self._next_pause = now + min(length, _LONGEST_ALONE_SECONDS) / _ALONE_SHARE
        workers = _workers(iterator)
        if workers and length <= _LONGEST_ALONE_SECONDS:
            self._paused = workers
            self._ledger.pause(workers)

    def let_go_on(self) -> None:
        """Continue the workers, if they were stopped."""
        if self._paused:
            self._ledger.resume(self._paused)
            self._paused = []

    def to_json(self) -> dict[str, Any]:
        return {
            "facts": self.facts,
            "sums": self.sums.of,
            "first_waits": self.first_waits,
            "steps": self.steps,
            "alone": self.alone,
        }


def left_out(length: int | None, workers: int) -> int:
    """How many batches of a pass are left out of the sums: the first of each worker.

    Args:
        length: the batches of a pass; None for one without end.
        workers: the loader's.
    """
    return max(1, workers if length is None or length >= 4 * workers else 1)


def _length(iterator: Any) -> int | None:
    try:
        return len(iterator)
    except TypeError:
        return None


def _workers(iterator: Any) -> list[int]:
    """The processes of an iterator's workers."""
    return [one.pid for one in getattr(iterator, "_workers", ()) if one.pid is not None and one.is_alive()]


def _facts(iterator: Any) -> dict[str, Any]:
    """What the loader is, as far as its iterator tells."""
    dataset = iterator._dataset
    try:
        length: int | None = len(dataset)
    except Exception:
        length = None
    return {
        "dataset": type(dataset).__name__,
        "length": length,
        "batch_size": getattr(iterator._index_sampler, "batch_size", None),
        "workers": int(iterator._num_workers),
        "world": os.environ.get("LOCAL_WORLD_SIZE"),
    }


class Settings(NamedTuple):
    """What a trial needs of a loader; not its iterator, whose workers end when nothing refers to it."""

    dataset: Any
    workers: int
    batch_size: int | None
    collate_fn: Callable[[Any], Any]
    worker_init_fn: Callable[[int], None] | None
    batches: int | None
    """Of a pass with the same workers; None for a pass without end."""

    @classmethod
    def of(cls, iterator: Any, facts: dict[str, Any]) -> Settings:
        collate = iterator._collate_fn
        size = facts["batch_size"]
        if size is None and iterator._auto_collation:
            size = _DEFAULT_BATCH  # a batch sampler of the user's own
        init = getattr(iterator, "_worker_init_fn", None)
        batches = None if getattr(iterator, "_persistent_workers", False) else _length(iterator)
        return cls(iterator._dataset, facts["workers"], size, collate, init, batches)


class _Ledger:
    """The folder in which ``hotset doctor`` finds what processes have written."""

    def __init__(self, folder: str) -> None:
        self._folder = folder

    def write(self, name: str, text: str) -> None:
        """Write a file; readers see all of it, or what was there before."""
        path = os.path.join(self._folder, name)
        with contextlib.suppress(OSError):
            with open(f"{path}.{os.getpid()}", "w") as file:
                file.write(text)
            os.replace(f"{path}.{os.getpid()}", path)

    def has(self, name: str) -> bool:
        return os.path.exists(os.path.join(self._folder, name))

    def is_first(self, name: str) -> bool:
        """Whether this process is the first of all to make this file."""
        try:
            flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY
            os.close(os.open(os.path.join(self._folder, name), flags, 0o600))
        except OSError:
            return False
        return True

    def pause(self, pids: list[int]) -> None:
        """Stop these processes; the ledger says so before, so that they do not stay stopped."""
        if pids:
            self.write(f"{PAUSED}{os.getpid()}", json.dumps(pids))
        _signal(pids, signal.SIGSTOP)

    def resume(self, pids: list[int]) -> None:
        """Let these processes go on."""
        _signal(pids, signal.SIGCONT)
        with contextlib.suppress(OSError):
            os.unlink(os.path.join(self._folder, f"{PAUSED}{os.getpid()}"))


def _signal(pids: list[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


# ---- a process -------------------------------------------------------------------------------------------


class _Process:
    """All that is known in this process; a forked one begins anew."""

    def __init__(self, options: WatchOptions) -> None:
        self.options = options
        self.pid = os.getpid()
        self.fetching = Fetching()
        self._ledger = _Ledger(options.ledger)
        self._loops: dict[str, tuple[Loop, Settings]] = {}
        self._loop_of: weakref.WeakKeyDictionary[Any, Loop] = weakref.WeakKeyDictionary()
        self._begun: float | None = None  # when the first batch was there
        self._written = time.perf_counter()
        self._over = False
        self._tried = self._has_threads = False
        self._is_worker = multiprocessing.parent_process() is not None
        if self._is_worker:  # atexit does not run there
            multiprocessing.util.Finalize(None, self.write, kwargs={"last": True}, exitpriority=0)

    def fetch(self, fetcher: Any, plain: Callable[[Any, Any], Any], indices: Any) -> Any:
        """A fetch, which whoever trains without workers calls, too."""
        if self._over or threading.current_thread() is not threading.main_thread():
            return plain(fetcher, indices)
        value = self.fetching.fetch(fetcher, plain, indices)
        self.write_soon()
        return value

    # As an observer of torch's iterators: see hotset.run.loader_wait

    def before(self, iterator: Any) -> None:
        if self._is_watched():
            self._loop(iterator).asked(iterator)
            self._end_if_time(iterator, pass_ended=False)

    def after(self, iterator: Any, seconds: float, failed: bool) -> None:
        if not self._is_watched():
            return
        if self._begun is None:
            self._begun = time.perf_counter()
            if not self._is_worker:
                atexit.register(self._at_exit)
        if failed:
            self._loop(iterator).ended()
            self._end_if_time(None, pass_ended=True)
        else:
            self._loop(iterator).got(iterator)
        self.write_soon()

    def _is_watched(self) -> bool:
        if self._over:
            return False
        if threading.current_thread() is threading.main_thread():
            return True
        if not self._has_threads:
            self._has_threads = True
            self._ledger.write(THREADS, "")
        return False

    def _loop(self, iterator: Any) -> Loop:
        loop = self._loop_of.get(iterator)
        if loop is None:
            facts = _facts(iterator)  # once: the dataset's length may take long
            key = json.dumps(facts, default=str)
            if key not in self._loops:
                self._loops[key] = Loop(facts, self._ledger), Settings.of(iterator, facts)
            loop = self._loop_of[iterator] = self._loops[key][0]
        return loop

    def _end_if_time(self, iterator: Any, *, pass_ended: bool) -> None:
        if self._begun is None or self._is_worker:
            return
        watched = time.perf_counter() - self._begun
        if watched >= self.options.seconds or (pass_ended and watched >= _LEAST_EPOCH_SECONDS):
            self._stop(iterator)
            # The program is ended when this is there: of several ranks, the one that has tried writes it.
            if self._tried or not self._ledger.has(_TRYING):
                self._ledger.write(DONE, "")

    def _at_exit(self) -> None:
        """The program ends before its time, by itself or by Ctrl-C; if by an error, there is no report."""
        error = getattr(sys, "last_type", None)
        if error is not None and not issubclass(error, KeyboardInterrupt):
            return
        if error is not None:
            self._ledger.write(INTERRUPTED, "")
        if os.getpid() == self.pid and not self._over:
            with contextlib.suppress(Exception):  # the program has ended well
                self._stop(None)
        if error is not None:
            # Python ends by SIGINT if the last text that it has executed ended so; the trial's have not.
            with contextlib.suppress(KeyboardInterrupt):
                exec("raise KeyboardInterrupt")

    def _stop(self, iterator: Any) -> None:
        """Stop watching, and have one process of the program try what a cache would give."""
        self._over = True
        for loop, _ in self._loops.values():
            loop.let_go_on()
        self.write(last=True)
        main = self._main_settings()
        if main is not None and self._ledger.is_first(_TRYING):
            self._tried = True
            workers = _workers(iterator)
            self._ledger.pause(workers)
            try:
                # Imported here: it imports torch, as the program has done by now.
                from hotset.run.doctor.trial import in_fork

                self._ledger.write(TRIAL, in_fork(main))
            finally:
                self._ledger.resume(workers)

    def _main_settings(self) -> Settings | None:
        """Of the loop that has taken the most time."""

        def seconds(one: tuple[Loop, Settings]) -> float:
            return one[0].sums.of.get("wait", 0.0) + one[0].sums.of.get("step", 0.0)

        seen = [one for one in self._loops.values() if one[0].sums.of.get("batches", 0) >= _LEAST_BATCHES]
        return max(seen, key=seconds)[1] if seen else None

    # The ledger

    def write_soon(self) -> None:
        """Write now if that is due: twice a second."""
        now = time.perf_counter()
        if now - self._written > _WRITE_SECONDS:
            self._written = now
            self.write()

    def write(self, *, last: bool = False) -> None:
        """Write what this process has seen; ``last`` as it ends."""
        if os.getpid() != self.pid or self._ledger.has(_TRYING):
            return  # a worker that was stopped for the trial has a fetch as long as that
        # Of workers that live shortly one is enough: the kernel takes milliseconds to say their memory.
        remembers = last and self.fetching.is_unread and self._ledger.is_first(_MEMORY)
        fetching = self.fetching.to_json(memory=remembers)
        loops = [loop.to_json() for loop, _ in self._loops.values()]
        if fetching or loops:
            found = {"pid": self.pid, "fetching": fetching, "loops": loops}
            self._ledger.write(f"{WATCHED}{self.pid}.json", json.dumps(found))


_here: _Process | None = None
_off = False


def _process(options: WatchOptions) -> _Process:
    global _here
    if _here is None or _here.pid != os.getpid():
        _here = _Process(options)
    return _here


def watch_no_more() -> None:
    """In a trial: neither this process nor those that it forks are of the program."""
    global _off
    _off = True


class Observer:
    """What torch's iterators call, in whichever process.

    If watching fails, it ends, and the report says so: the program must not fail.
    """

    def __init__(self, options: WatchOptions) -> None:
        self._options = options
        self._said = False

    def before(self, iterator: Any) -> None:
        if not _off and not self._is_ours(iterator):
            try:
                _process(self._options).before(iterator)
            except Exception as error:
                self._end_watching(error)

    def after(self, iterator: Any, seconds: float, failed: bool) -> None:
        if not _off and not self._is_ours(iterator):
            try:
                _process(self._options).after(iterator, seconds, failed)
            except Exception as error:
                self._end_watching(error)

    def _is_ours(self, iterator: Any) -> bool:
        """Whether it is the iterator by which hotset.DataLoader has its workers: its samples are tasks."""
        ours = type(getattr(iterator, "_dataset", None)).__module__.startswith("hotset.loader.")
        if ours and not self._said:
            self._said = True
            _Ledger(self._options.ledger).write(OURS, "")
        return ours

    def _end_watching(self, error: Exception) -> None:
        watch_no_more()
        ledger = _Ledger(self._options.ledger)
        ledger.write(TRIAL, json.dumps({"refused": f"{type(error).__name__}: {error}", "loaders": {}}))
        ledger.write(DONE, "")


# ---- hooks -----------------------------------------------------------------------------------------------


def hooks(options: WatchOptions) -> Iterator[tuple[str, Hook]]:
    """The hooks that put the clocks around fetches and decoders."""
    yield "torch.utils.data._utils.fetch", functools.partial(_time_fetches, options)
    for decoder in decoders.TABLE:
        yield decoder.module, functools.partial(_time_decoder, options, decoder.name)
    yield "PIL.ImageFile", functools.partial(_time_pillow, options)


def _time_fetches(options: WatchOptions, module: Any) -> None:
    for kind in (module._MapDatasetFetcher, module._IterableDatasetFetcher):
        plain = kind.fetch

        def fetch(self: Any, indices: Any, plain: Any = plain) -> Any:
            return plain(self, indices) if _off else _process(options).fetch(self, plain, indices)

        kind.fetch = functools.wraps(plain)(fetch)


def _time_decoder(options: WatchOptions, path: str, module: Any) -> None:
    *parents, name = path.split(".")
    owner = functools.reduce(getattr, parents, module)
    function = getattr(owner, name, None)
    if function is None or hasattr(function, "__hotset__"):
        return
    title = f"{module.__name__}.{path}"

    def call(*args: Any, **keywords: Any) -> Any:
        if _off:
            return function(*args, **keywords)
        return _process(options).fetching.decode(title, lambda: function(*args, **keywords), _bytes_of)

    setattr(owner, name, decoders.stand_in(function, call))


def _time_pillow(options: WatchOptions, module: Any) -> None:
    plain = module.ImageFile.load

    def load(self: Any) -> Any:
        if _off or not self.tile:  # loaded before
            return plain(self)
        fetching = _process(options).fetching
        return fetching.decode(pillow.NAME, lambda: plain(self), lambda _: _bytes_of_picture(self))

    module.ImageFile.load = functools.wraps(plain)(load)
