"""hotset's helper threads, and copies for which torch uses one thread only.

torch runs larger operations on a team of OpenMP threads, which spin while they wait for the next operation:
beside a busy process that took 400 times as long as the copy itself. So hotset's threads use a team of one,
and its copies in the user's thread run in that thread alone.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch

__all__ = ["HelperThread", "one_thread"]

T = TypeVar("T")


def one_thread(run: Callable[[], T]) -> T:
    """Return what ``run()`` returns, with torch limited to this thread meanwhile.

    Not a context manager: an interrupt may come before the first line of its ``__exit__``, and leave the
    user's training with one thread. The ``finally`` here begins with a call of C code.
    """
    threads = torch.get_num_threads()
    if threads == 1:
        return run()
    try:
        torch.set_num_threads(1)
        return run()
    finally:
        torch.set_num_threads(threads)


class HelperThread(Generic[T]):
    """A daemon thread that runs jobs in order and hands back what they return or raise.

    The thread starts with the first job. It holds its queues and the jobs, not this object, and ends when
    this object is stopped or collected. A forked child has no such thread: nothing is pending there, and the
    child's first job starts a thread of its own. Where no thread can be started, as a limit of the system's
    is reached, each job runs at once, in the thread that asks for it.

    Args:
        name: of the thread.
        at_end: called in the thread as its last job; what it raises is dropped.
    """

    def __init__(self, name: str, at_end: Callable[[], object] | None = None) -> None:
        self._name = name
        self._at_end = at_end
        self._pid = 0  # of the process in which the thread runs

    @property
    def pending(self) -> int:
        """How many results were asked for and not taken."""
        return self._pending if self._pid == os.getpid() else 0

    def ask(self, job: Callable[[], T]) -> None:
        """Run a job after those before it; :meth:`next` gives its result."""
        self._put(job, wanted=True)
        self._pending += 1

    def post(self, job: Callable[[], object]) -> None:
        """Run a job after those before it; what it returns or raises is dropped."""
        self._put(job, wanted=False)

    def next(self) -> T:
        """The result of the first job that was asked for and whose result was not taken; waits for it.

        Raises:
            BaseException: what the job has raised.
        """
        self._pending -= 1  # before: after an interrupt there may be one more, and is not one less
        result, error = self._results.get()
        if error is None:
            return result  # type: ignore[no-any-return]
        try:
            raise error
        finally:
            del error  # its traceback holds this frame

    def stop(self) -> None:
        """End the thread after the jobs that it has."""
        if self._pid:
            self._pid = 0
            self._jobs.put(None)
            if self._thread is None:
                _call(self._at_end)

    def finish(self) -> None:
        """Wait until the thread has ended after the jobs that it has; raises what the first of them raised.

        An interrupt is raised after that.
        """
        if self._pid != os.getpid():
            return
        results = self._results
        self.stop()
        interrupt: BaseException | None = None
        while self._thread is not None and self._thread.is_alive():
            try:
                self._thread.join()
            except BaseException as error:
                interrupt = error
        if interrupt is not None:
            raise interrupt
        errors = [error for _, error in (results.get() for _ in range(results.qsize())) if error is not None]
        if errors:
            raise errors[0]

    def __del__(self) -> None:
        self.stop()

    def _put(self, job: Callable[[], object], *, wanted: bool) -> None:
        if self._pid != os.getpid():
            self._start()
        if self._thread is not None:
            self._jobs.put((job, wanted))
            return
        result: tuple[Any, BaseException | None]
        try:
            result = (one_thread(job), None)
        except Exception as error:  # not an interrupt, which is the caller's
            result = (None, error)
        if wanted:
            self._results.put(result)

    def _start(self) -> None:
        # SimpleQueue.put may be called by a destructor that runs inside another put; Queue's may not.
        jobs: queue.SimpleQueue[_Job] = queue.SimpleQueue()
        results: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._jobs, self._results, self._pending, self._pid = jobs, results, 0, os.getpid()
        at_end = self._at_end
        threads = torch.get_num_threads()  # this call fixes the caller's own number
        started = threading.Event()

        def run() -> None:
            torch.set_num_threads(1)
            # A thread's number is set from the process-wide default at its first call: make that now, while
            # the default is one.
            torch.get_num_threads()
            started.set()
            _run_jobs(jobs, results)
            _call(at_end)

        thread = threading.Thread(target=run, name=self._name, daemon=True)
        self._thread: threading.Thread | None = thread
        try:
            thread.start()
        except RuntimeError:  # no more threads
            self._thread = None
            return
        started.wait()
        # The thread has set its own number of threads, and with it the default of new threads: restore that.
        torch.set_num_threads(threads)


# A job and whether its result is wanted; or the end.
_Job = tuple[Callable[[], object], bool] | None


def _run_jobs(jobs: queue.SimpleQueue[_Job], results: queue.SimpleQueue[Any]) -> None:
    while (taken := jobs.get()) is not None:
        job, wanted = taken
        result: tuple[Any, BaseException | None]
        try:
            result = (job(), None)
        except BaseException as error:
            result = (None, error)
        if wanted:
            results.put(result)
        # Kept until the next job comes, they would keep a batch's block in use, and a traceback this frame.
        del taken, job, result


def _call(at_end: Callable[[], object] | None) -> None:
    if at_end is not None:
        with contextlib.suppress(BaseException):
            at_end()
