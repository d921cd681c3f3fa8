"""Deaths of processes: children that die, at which line they do, and what a parent sees of it.

A child here is a bare fork that never returns into the test: it runs a body and ends with ``os._exit``, so
that nothing of pytest runs twice. A test that waits for one waits within a bound, and kills it after that.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing import forkserver
from typing import Any

import psutil
import torch


def die() -> None:
    """End this process as ``kill -9`` does."""
    os.kill(os.getpid(), signal.SIGKILL)


def child(body: Callable[[], object]) -> int:
    """Run ``body`` in a forked child; returns its pid. It ends with 0, or with 1 and a traceback."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            torch.set_num_threads(1)  # torch's other threads were not forked, and would be waited for
            vars(forkserver)["_forkserver"]._forkserver_pid = None  # an earlier test's
            body()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return pid


def ended(pid: int, within: float = 100.0) -> int:
    """Wait for a child; its exit code, or minus the signal that ended it. Killed and failed after that."""
    deadline = time.monotonic() + within
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done == pid:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    raise AssertionError(f"the child was still at it after {within:.0f} s")


def in_child(body: Callable[[], object], within: float = 100.0) -> None:
    """Run ``body`` in a forked child, and fail unless it ends well within a bound."""
    code = ended(child(body), within)
    assert code == 0, f"the child ended with {code}"


@contextlib.contextmanager
def lingering(body: Callable[[], object]) -> Iterator[int]:
    """A child that has run ``body`` and lives on until the block ends, or until it is killed inside it.

    What ``body`` returns lives as long.
    """
    ready, tell = os.pipe()

    def run() -> None:
        os.close(ready)
        kept = body()
        os.write(tell, b"k")
        while kept is not run:
            signal.pause()

    pid = child(run)
    os.close(tell)
    try:
        told = os.read(ready, 1)
        os.close(ready)
        assert told == b"k", "the child failed before it was ready"
        yield pid
    finally:
        kill(pid)


def kill(pid: int) -> None:
    """SIGKILL a child and reap it; nothing happens if that was done already."""
    with contextlib.suppress(ProcessLookupError, ChildProcessError):
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def stop(pid: int) -> None:
    """SIGSTOP a child, and return once it has stopped."""
    os.kill(pid, signal.SIGSTOP)
    os.waitpid(pid, os.WUNTRACED)


def gone(pid: int) -> bool:
    """Whether a process has ended, be it reaped or not: its files are closed, and its locks are gone.

    A killed process may be a zombie while threads of it still end, and until then its files are open.
    """
    try:
        process = psutil.Process(pid)
        return process.status() == psutil.STATUS_ZOMBIE and process.num_threads() <= 1
    except psutil.NoSuchProcess:
        return True


@contextlib.contextmanager
def dying(folders: tuple[str, ...], after: int) -> Iterator[list[int]]:
    """Have this process killed at the so-manieth line that it runs of the code in these folders.

    It is not killed if ``after`` is -1, and the lines are not counted if it is 0. Yields their number.
    """
    lines = [0]

    def trace(frame: Any, event: str, _: Any) -> Any:
        if not frame.f_code.co_filename.startswith(folders):
            return None
        if event == "line":
            lines[0] += 1
            if lines[0] == after:
                die()
        return trace

    sys.settrace(trace if after else None)
    try:
        yield lines
    finally:
        sys.settrace(None)
