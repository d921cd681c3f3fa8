"""What ``hotset run`` tells the processes below it, through their environment, and what they tell it.

=================  ======================================================================================
``HOTSET_JOB``     a random name, by which the memos of all processes find one store
``HOTSET_RUN``     the options of the command, as JSON
``HOTSET_DOCTOR``  the options of ``hotset doctor``, as JSON, the folder for what it asks for among them
``HOTSET_LEDGER``  a private folder: what processes did, in files that need no process to end well
``PYTHONPATH``     ``inject`` first, so that each Python process starts with ``inject/sitecustomize.py``
=================  ======================================================================================

The ledger has three kinds of files. ``left`` has a line of JSON for what was left alone: process, function,
reason, how many calls so far; it is written at the first call, the second, the fourth and so on, so that the
sum over processes is at least half of the truth without any work at a process's end. ``wait-<pid>`` has two
doubles, the seconds a main process has waited for its loaders and the number of batches, which the process
changes in place. ``lock`` is held while the command runs. ``reached`` and ``unreached`` say whether Python
processes could be reached, ``attached`` that the store is there, ``imported-<module>`` that a module named by
``--memo`` was imported, and ``slow-<function>`` that to keep what a function returns takes longer than that
saves.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

from hotset.errors import ArgumentError

__all__ = [
    "DOCTOR",
    "JOB",
    "LEDGER",
    "Options",
    "WatchOptions",
    "environment_for",
    "imported",
    "is_slow",
    "left_alone",
    "make_ledger",
    "never_imported",
    "options_here",
    "reached",
    "read_left",
    "say_attached",
    "say_slow",
    "unreached",
    "wait_for_store",
    "was_reached",
    "watch_options_here",
    "watched_environment",
    "why_full",
]

_PATIENCE_SECONDS = 60.0
_ROOM = 1 << 20  # bytes in the ledger, for some files of a few KiB for each process
JOB, RUN, LEDGER, DOCTOR = "HOTSET_JOB", "HOTSET_RUN", "HOTSET_LEDGER", "HOTSET_DOCTOR"
_INJECT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "inject")


class Options(NamedTuple):
    """The options of ``hotset run``.

    Attributes:
        memory: the limit of all memos of the job together.
        spill: the folder for what memory has no room for.
        session: the session whose caches outlive the job.
        evict: "lru" if new values may take the place of those used least recently.
        functions: ``module:function`` of functions to memoise beside the well-known ones.
    """

    memory: str = "auto"
    spill: str | None = None
    session: str | None = None
    evict: Literal["lru"] | None = None
    functions: tuple[str, ...] = ()


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


def environment_for(
    options: Options, job: str, ledger: str, environment: Mapping[str, str]
) -> dict[str, str]:
    """The environment of the program."""
    return {
        **environment,
        JOB: job,
        RUN: json.dumps(options._asdict()),
        LEDGER: ledger,
        "PYTHONPATH": _python_path(environment),
    }


class WatchOptions(NamedTuple):
    """What ``hotset doctor`` tells the processes below it.

    Attributes:
        ledger: the folder for what processes have seen.
        seconds: how long a program is watched, from its first batch.
        epoch_seconds: an epoch that ends after so long is enough to judge by.
        ends: whether it is ended then.
    """

    ledger: str
    seconds: float = 60.0
    epoch_seconds: float = 10.0
    ends: bool = False


def watched_environment(options: WatchOptions, environment: Mapping[str, str]) -> dict[str, str]:
    """The environment of a program that is watched."""
    return {
        **environment,
        DOCTOR: json.dumps(options._asdict()),
        "PYTHONPATH": _python_path(environment),
    }


def _python_path(environment: Mapping[str, str]) -> str:
    before = environment.get("PYTHONPATH")
    return _INJECT + (os.pathsep + before if before else "")


def watch_options_here() -> WatchOptions | None:
    """The options of the ``hotset doctor`` above this process, None if there is none."""
    try:
        return WatchOptions(**json.loads(os.environ[DOCTOR]))
    except (KeyError, ValueError, TypeError):
        return None


def options_here() -> Options | None:
    """The options of the ``hotset run`` above this process, None if there is none."""
    text = os.environ.get(RUN)
    if not text or not os.environ.get(JOB):
        return None
    try:
        found = json.loads(text)
        return Options(**{**found, "functions": tuple(found["functions"])})
    except (ValueError, TypeError, KeyError):
        return None  # another version's


def reached() -> None:
    """Note that a Python process was reached."""
    watched = watch_options_here()
    for folder in (os.environ.get(LEDGER), watched and watched.ledger):
        _mark(folder or None, "reached")


def was_reached(ledger: str) -> bool:
    """Whether any Python process of the program was reached."""
    return os.path.exists(os.path.join(ledger, "reached"))


def unreached(ledger: str) -> list[str]:
    """The interpreters that started without hotset: it is not installed for them."""
    with contextlib.suppress(OSError), open(os.path.join(ledger, "unreached")) as file:
        return file.read().splitlines()
    return []


def imported(module: str) -> None:
    """Note that a module of which ``--memo`` names a function was imported."""
    _mark(os.environ.get(LEDGER), f"imported-{module}")


def say_slow(function: str) -> None:
    """Note that to keep what a function returns takes longer than that saves."""
    _mark(os.environ.get(LEDGER), f"slow-{function}")


def is_slow(function: str) -> bool:
    """Whether a process has noted that of this function."""
    return os.path.exists(os.path.join(os.environ.get(LEDGER) or os.devnull, f"slow-{function}"))


def _mark(folder: str | None, name: str) -> None:
    """Make an empty file."""
    if folder:
        with contextlib.suppress(OSError):
            os.close(os.open(os.path.join(folder, name), os.O_WRONLY | os.O_CREAT, 0o600))


def never_imported(ledger: str, functions: Sequence[str]) -> list[str]:
    """Those of these functions, as ``module:function``, whose module no process has imported."""
    return [
        place
        for place in functions
        if not os.path.exists(os.path.join(ledger, f"imported-{place.partition(':')[0]}"))
    ]


def say_attached(ledger: str) -> None:
    """Let the processes below use the memos' store: this one has it, or never will."""
    _mark(ledger, "attached")


def wait_for_store() -> None:
    """Wait until `hotset run` has the store, which starts when the program does.

    A store that a worker made would go with the last worker, and its figures with it.
    """
    folder, deadline = os.environ.get(LEDGER, ""), time.monotonic() + _PATIENCE_SECONDS
    while os.path.isdir(folder) and time.monotonic() < deadline:
        if os.path.exists(os.path.join(folder, "attached")):
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
    folder = os.environ.get(LEDGER)
    if not folder or count & (count - 1):
        return
    line = json.dumps([os.getpid(), function, reason, count]) + "\n"
    with contextlib.suppress(OSError):
        # One write at the file's end: lines of several processes do not mix.
        file = os.open(os.path.join(folder, "left"), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            os.write(file, line.encode())
        finally:
            os.close(file)


def read_left(ledger: str) -> dict[tuple[str, str], int]:
    """Function and reason of what was left alone, with the least number of calls."""
    counts: dict[tuple[int, str, str], int] = {}
    for pid, function, reason, count in _lines(os.path.join(ledger, "left")):
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
