"""The folder in which the processes of a watched program leave what ``hotset doctor`` reads.

=================  =======================================================================================
``watch-<pid>``    what a process has seen so far
``paused-<pid>``   the workers that this process has stopped for a moment: if it dies, they are continued
``trying``         a process of the program tries a cache, or has; nothing that is seen from then on counts
``trial.json``     what came out
``done``           the program was watched for long enough, and may be ended
``told``           each process that trains was sent the signal that ends it
``interrupted``    it was ended by Ctrl-C
``memory``         a worker that lived shortly has told its memory; one is enough
``ours``           it takes batches from hotset.DataLoader
``threads``        it takes batches in another thread than the main one
=================  =======================================================================================
"""

from __future__ import annotations

import contextlib
import glob
import json
import os
import signal
import time
from collections.abc import Iterable

__all__ = [
    "DONE",
    "INTERRUPTED",
    "LEAST_BATCHES",
    "MEMORY",
    "OURS",
    "PAUSED",
    "THREADS",
    "TOLD",
    "TRIAL",
    "TRYING",
    "WATCHED",
    "Ledger",
]

WATCHED, PAUSED, TRYING, TRIAL, DONE = "watch-", "paused-", "trying", "trial.json", "done"
INTERRUPTED, MEMORY, OURS, THREADS, TOLD = "interrupted", "memory", "ours", "threads", "told"
LEAST_BATCHES = 3  # that a loop must have taken, without the first of each worker, to be judged


class Ledger:
    """The ledger, as the program's processes and ``hotset doctor`` see it.

    A file that cannot be written is left out.
    """

    def __init__(self, folder: str) -> None:
        self._folder = folder

    def write(self, name: str, text: str) -> bool:
        """Write a file; readers see all of it, or what was there before.

        Returns:
            Whether it was written.
        """
        # No reader looks for a name that begins so: resume_all() would remove what is not whole yet.
        new = os.path.join(self._folder, f"new-{name}.{os.getpid()}")
        try:
            with open(new, "w") as file:
                file.write(text)
            os.replace(new, os.path.join(self._folder, name))
        except OSError:
            return False
        return True

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

    def pause(self, pids: list[int]) -> bool:
        """Stop these processes; the ledger says so before, so that they do not stay stopped.

        Returns:
            Whether they are stopped: they are not where the ledger cannot say so.
        """
        is_said = not pids or self.write(f"{PAUSED}{os.getpid()}", json.dumps(pids))
        if is_said:
            _signal(pids, signal.SIGSTOP)
        return is_said

    def resume(self, pids: list[int]) -> None:
        """Let these processes go on."""
        _signal(pids, signal.SIGCONT)
        with contextlib.suppress(OSError):
            os.unlink(os.path.join(self._folder, f"{PAUSED}{os.getpid()}"))

    def resume_all(self, stopped_for: float = 0.0) -> None:
        """Let all processes go on that some process has stopped, if that was so many seconds ago."""
        for name in glob.glob(f"{PAUSED}*", root_dir=self._folder):
            path = os.path.join(self._folder, name)
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
