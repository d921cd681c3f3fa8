"""The ledger: a private folder in which the processes of a program leave what the command above them reads.

Its files need no process to end well. Of both commands:

======================  ==================================================================================
``lock``                is held while the command runs
``reached``             a Python process was reached
======================  ==================================================================================

Of ``hotset run``:

======================  ==================================================================================
``attached``            the memos' store is there, or never will be
``left``                what was left alone, a line of JSON for each: process, function, reason, how many
                        calls so far; written at the first call, the second, the fourth and so on, so that
                        the sum over processes is at least half of the truth
``wait-<pid>``          three doubles, which a main process changes in place: the seconds that it has waited
                        for its loaders, the number of batches, and the seconds since it asked for the first
``imported-<module>``   a module of which ``--memo`` names a function was imported
``slow-<function>``     to keep what a function returns takes longer than that saves
``unreached``           the interpreters that started without hotset, a line for each
======================  ==================================================================================

Of ``hotset doctor``:

======================  ==================================================================================
``watch-<pid>.json``    what a process has seen so far
``paused-<pid>``        the workers that this process has stopped for a moment: if it dies, they are continued
``trying``              a process of the program tries a cache, or has; nothing that is seen from then on
                        counts
``trial.json``          what came out
``done``                the program was watched for long enough, and may be ended
``told``                each process that trains was sent the signal that ends it
``interrupted``         it was ended by Ctrl-C
``memory``              a worker that lived shortly has told its memory; one is enough
``ours``                it takes batches from hotset.DataLoader
``threads``             it takes batches in another thread than the main one
======================  ==================================================================================
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Iterable, Iterator

from hotset.errors import ArgumentError
from hotset.run.environment import LEDGER

__all__ = [
    "ATTACHED",
    "CALLED",
    "DONE",
    "IMPORTED",
    "INTERRUPTED",
    "MEMORY",
    "OURS",
    "REACHED",
    "SLOW",
    "THREADS",
    "TOLD",
    "TRIAL",
    "TRYING",
    "WATCHED",
    "Ledger",
    "ledger_here",
    "left_alone",
    "make_ledger",
    "read_left",
    "unreached",
    "wait_for_store",
    "why_full",
]

REACHED, ATTACHED, IMPORTED, CALLED = "reached", "attached", "imported-", "called-"
SLOW, _LEFT = "slow-", "left"
WATCHED, _PAUSED, TRYING, TRIAL, DONE = "watch-", "paused-", "trying", "trial.json", "done"
INTERRUPTED, MEMORY, OURS, THREADS, TOLD = "interrupted", "memory", "ours", "threads", "told"
_CURRENT = "."  # is there for those who may look into the folder: not after another user's id was taken
_PATIENCE_SECONDS = 60.0
_ROOM = 1 << 20  # bytes, for some files of a few KiB for each process


class Ledger:
    """A ledger's files. One that cannot be written is left out."""

    def __init__(self, folder: str) -> None:
        self._folder = folder

    def path(self, name: str) -> str:
        """Where a file is."""
        return os.path.join(self._folder, name)

    def write(self, name: str, text: str) -> bool:
        """Write a file; readers see all of it, or what was there before.

        Returns:
            Whether it was written.
        """
        # No reader looks for a name that begins so: resume_all() would remove what is not whole yet.
        new = self.path(f"new-{name}.{os.getpid()}")
        try:
            with open(new, "w") as file:
                file.write(text)
            os.replace(new, self.path(name))
        except OSError:
            return False
        return True

    def has(self, name: str) -> bool:
        return os.path.exists(self.path(name))

    def mark(self, name: str) -> bool:
        """Make an empty file; whether this process is the first of all to make it."""
        try:
            flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY
            os.close(os.open(self.path(name), flags, 0o600))
        except OSError:
            return False
        return True

    def pause(self, pids: list[int]) -> bool:
        """Stop these processes; the ledger says so before, so that they do not stay stopped.

        Returns:
            Whether they are stopped: they are not where the ledger cannot say so.
        """
        is_said = not pids or self.write(f"{_PAUSED}{os.getpid()}", json.dumps(pids))
        if is_said:
            _signal(pids, signal.SIGSTOP)
        return is_said

    def resume(self, pids: list[int]) -> None:
        """Let these processes go on."""
        _signal(pids, signal.SIGCONT)
        with contextlib.suppress(OSError):
            os.unlink(self.path(f"{_PAUSED}{os.getpid()}"))

    def resume_all(self, stopped_for: float = 0.0) -> None:
        """Let all processes go on that some process has stopped, if that was so many seconds ago."""
        names: list[str] = []
        with contextlib.suppress(OSError):
            names = os.listdir(self._folder)
        for path in (self.path(name) for name in names if name.startswith(_PAUSED)):
            with contextlib.suppress(OSError, ValueError):  # it is gone by now, or not written to its end
                if time.time() - os.stat(path).st_mtime >= stopped_for:
                    with open(path) as file:
                        pids = json.load(file)
                    os.unlink(path)
                    _signal(pids, signal.SIGCONT)


def _signal(pids: Iterable[int], number: int) -> None:
    for pid in pids:
        # It may have ended, and another user's process may have its number.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def ledger_here() -> Ledger:
    """The ledger of the ``hotset run`` above this process; without one, whatever is written goes nowhere."""
    return Ledger(os.environ.get(LEDGER) or os.devnull)


def make_ledger(prefix: str) -> str:
    """Make a folder for what processes write while the program runs.

    It is this process's for as long as that lives. Those of commands that were killed are removed.

    Raises:
        ArgumentError: there is no room for it.
    """
    import tempfile  # here: each process of the program imports this module as it starts

    _remove_dead(prefix)
    try:
        folder = tempfile.mkdtemp(prefix=prefix)
    except OSError as error:
        raise ArgumentError(
            f"there must be a folder for temporary files that can be written to, got: {error}; set TMPDIR."
        ) from error
    trouble = why_full(folder)
    if trouble:
        os.rmdir(folder)
        raise ArgumentError(trouble)
    _hold(folder)
    return folder


def _hold(folder: str) -> None:
    """Lock a file in the folder until this process ends, however it does."""
    import fcntl

    new = os.path.join(folder, "new-lock")
    with contextlib.suppress(OSError):  # without a lock it stays if this process is killed
        fcntl.flock(os.open(new, os.O_CREAT | os.O_RDWR, 0o600), fcntl.LOCK_EX)
        os.rename(new, os.path.join(folder, "lock"))  # only now: one that nobody holds is a dead process's


def _remove_dead(prefix: str) -> None:
    import fcntl
    import shutil
    import tempfile

    with contextlib.suppress(OSError), os.scandir(tempfile.gettempdir()) as found:
        for one in found:
            with contextlib.suppress(OSError):
                if one.name.startswith(prefix) and one.stat(follow_symlinks=False).st_uid == os.getuid():
                    with open(os.path.join(one.path, "lock"), "r+b") as lock:
                        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                        shutil.rmtree(one.path, ignore_errors=True)


def why_full(ledger: str) -> str:
    """What keeps processes from writing to a ledger, as a sentence; empty if nothing does."""
    path = os.path.join(ledger, "room")
    try:
        with open(path, "wb") as file:
            os.posix_fallocate(file.fileno(), 0, _ROOM)
    except OSError as error:
        return (
            f"what the program does cannot be written to {ledger}: {error.strerror}; set TMPDIR to a folder "
            "with room."
        )
    finally:
        with contextlib.suppress(OSError):
            os.unlink(path)
    return ""


def unreached(ledger: str) -> list[str]:
    """The interpreters that started without hotset: it is not installed for them."""
    with contextlib.suppress(OSError), open(Ledger(ledger).path("unreached")) as file:
        return file.read().splitlines()
    return []


def wait_for_store() -> None:
    """Wait until `hotset run` has the store, which starts when the program does.

    A store that a worker made would go with the last worker, and its figures with it.
    """
    ledger, deadline = ledger_here(), time.monotonic() + _PATIENCE_SECONDS
    while ledger.has(_CURRENT) and time.monotonic() < deadline:
        if ledger.has(ATTACHED):
            return
        time.sleep(0.005)


_counts: dict[tuple[str, str], int] = {}
_lock = threading.Lock()


def _forget_counts() -> None:
    """A forked child counts only what it does itself, and needs a lock that no thread holds."""
    global _lock
    _counts.clear()
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_forget_counts)


def left_alone(function: str, reason: str) -> None:
    """Note that a call of a decoder was not memoised, and why."""
    with _lock:
        count = _counts[function, reason] = _counts.get((function, reason), 0) + 1
    if count & (count - 1):
        return
    line = json.dumps([os.getpid(), function, reason, count]) + "\n"
    with contextlib.suppress(OSError):
        # One write at the file's end: lines of several processes do not mix.
        file = os.open(ledger_here().path(_LEFT), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            os.write(file, line.encode())
        finally:
            os.close(file)


def read_left(ledger: str) -> dict[tuple[str, str], int]:
    """Function and reason of what was left alone, with the least number of calls."""
    counts: dict[tuple[int, str, str], int] = {}
    for pid, function, reason, count in _lines(Ledger(ledger).path(_LEFT)):
        counts[pid, function, reason] = max(count, counts.get((pid, function, reason), 0))
    sums: dict[tuple[str, str], int] = {}
    for (_, function, reason), count in counts.items():
        sums[function, reason] = sums.get((function, reason), 0) + count
    return sums


def _lines(path: str) -> Iterator[tuple[int, str, str, int]]:
    with contextlib.suppress(OSError), open(path) as file:
        for line in file:
            with contextlib.suppress(ValueError):  # a process that died in the midst of it
                pid, function, reason, count = json.loads(line)
                yield pid, function, reason, count
