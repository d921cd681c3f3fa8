"""``hotset doctor``: a program is watched for a minute, ended as by Ctrl-C, and what would help is told."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
import threading
from collections.abc import Sequence

from hotset._warnings import printable
from hotset.errors import ArgumentError
from hotset.run.doctor.advice import as_json, judge
from hotset.run.doctor.ending import end_program
from hotset.run.doctor.observed import Observed, empty_loader, read, takes_batches, training_processes
from hotset.run.doctor.others import Others
from hotset.run.doctor.text import lines
from hotset.run.environment import WatchOptions, watched_environment
from hotset.run.ledger import (
    DONE,
    INTERRUPTED,
    OURS,
    REACHED,
    THREADS,
    TOLD,
    TRYING,
    Ledger,
    make_ledger,
    why_full,
)
from hotset.run.program import run_program, tell, tell_lines

__all__ = ["doctor"]

_NO_LOADER = 3  # the exit code of a program that iterates over no loader
_LOOK_SECONDS = 0.05
_PAUSE_SECONDS = 3.0  # a process that is stopped for longer goes on, whatever the program does


def doctor(command: Sequence[str], *, seconds: float, keep: bool, as_json_text: bool) -> int:
    """Run ``command``, and say what its training waits for and what would help.

    Args:
        command: the program and its arguments.
        seconds: how long it is watched, from its first batch.
        keep: whether it goes on afterwards.
        as_json_text: print JSON to stdout, where the program's own output goes to stderr; otherwise text to
            stderr.

    Returns:
        The status of the program, as that of :func:`os.waitpid`, if it failed by itself; otherwise that of an
        exit with 0, or with 3 if it iterated over no loader.

    Raises:
        ArgumentError: there is no command, ``seconds`` is not positive, or there is no room in the folder for
            temporary files.
    """
    if not command:
        raise ArgumentError("hotset doctor needs a program; write hotset doctor -- python train.py.")
    if not seconds > 0.0:
        raise ArgumentError(f"--seconds must be more than 0, got {seconds:g}; leave it out for a minute.")
    others = Others()
    ledger = make_ledger("hotset-doctor-")
    watcher = _Watcher(ledger, keep=keep, quiet=as_json_text)
    try:
        environment = watched_environment(WatchOptions(ledger, seconds, ends=not keep), os.environ)
        stdout = 2 if as_json_text else 1
        status = run_program(command, environment, _say, watcher.start, stdout=stdout, takes_sigint=not keep)
        watcher.stop()
        # The status does not tell: some ways to start Python end with 1.
        by_ctrl_c = Ledger(ledger).has(INTERRUPTED)
        if not watcher.ended and status != 0 and not by_ctrl_c:
            if watcher.began:
                _say(f"{printable(shlex.join(command), 60)} failed by itself, {_how(status)}: no report.")
            return status
        seen = read(ledger)
        if seen is not None:
            seen = seen._replace(others=others.processors())
        if by_ctrl_c and not watcher.ended:
            if seen is not None:
                _tell(seen, shlex.join(command), as_json_text)
            return status
        if seen is None:
            _say(_no_loader(ledger, shlex.join(command), seconds if watcher.ended else None))
            return _NO_LOADER << 8
        _tell(seen, shlex.join(command), as_json_text)
        return 0
    finally:
        watcher.stop()
        shutil.rmtree(ledger, ignore_errors=True)


def _tell(seen: Observed, command: str, as_json_text: bool) -> None:
    report = judge(seen, command)
    if as_json_text:
        sys.stdout.write(json.dumps(as_json(report), indent=2) + "\n")
        return
    tell_lines(lines(report, printable(command, 60)))


def _no_loader(ledger: str, command: str, watched: float | None) -> str:
    """Why there is nothing to judge.

    Args:
        watched: the seconds after which the program was ended; None if it has ended by itself.
    """
    trouble = why_full(ledger)
    if trouble:
        return trouble
    if not Ledger(ledger).has(REACHED):
        return (
            f"no Python process of {printable(command, 60)} was reached: it is not a Python program, hotset "
            "is not installed for its interpreter, or that ignores PYTHONPATH (python -I, -E or -S)."
        )
    if Ledger(ledger).has(OURS):
        return (
            f"{printable(command, 60)} takes its batches from hotset.DataLoader, which is not judged; "
            "print(loader.last_epoch) says how long training waits for it."
        )
    if Ledger(ledger).has(THREADS):
        return (
            f"{printable(command, 60)} takes its batches in another thread than the main one, which is not "
            "judged; run its loop over the loader in the main thread."
        )
    empty = empty_loader(ledger)
    if empty:
        return (
            f"a DataLoader of {printable(command, 60)} has given no batch: {printable(empty, 60)}; check "
            "where its samples come from, and drop_last=True."
        )
    if not takes_batches(ledger):
        return (
            f"{printable(command, 60)} has taken no batch from a torch.utils.data.DataLoader, and batches "
            "that a program makes without one are not judged."
        )
    if watched is not None:
        return (
            f"{printable(command, 60)} has taken fewer than three batches from a torch.utils.data.DataLoader "
            f"in the {watched:g} s for which it was watched, without the first of each epoch, so there is "
            f"nothing to judge; give it more time: --seconds {4.0 * watched:g}."
        )
    return (
        f"{printable(command, 60)} has taken fewer than three batches from a torch.utils.data.DataLoader, "
        "without the first of each epoch, so there is nothing to judge; let it train for a few steps, in "
        "epochs of several batches. Where each batch comes from next(iter(loader)), which begins an epoch "
        "with new workers, take them in a loop over the loader."
    )


def _how(status: int) -> str:
    if os.WIFSIGNALED(status):
        return f"by signal {os.WTERMSIG(status)}"
    return f"with exit code {os.waitstatus_to_exitcode(status)}"


def _say(sentence: str) -> None:
    tell(f"hotset: {sentence}\n")


class _Watcher:
    """A thread that looks into the ledger while the program runs.

    It ends the program when that was watched for long enough, and continues processes that were stopped for a
    moment by one that has died since.

    Attributes:
        began: whether there is a program.
        ended: whether it has ended the program.
    """

    def __init__(self, folder: str, *, keep: bool, quiet: bool) -> None:
        self.began = self.ended = False
        self._folder, self._ledger = folder, Ledger(folder)
        self._keep, self._quiet = keep, quiet
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, program: int) -> None:
        """Begin to watch the group of processes ``program``."""
        self.began = True
        self._thread = threading.Thread(target=self._run, args=(program,), name="hotset-doctor", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Watch no more, and continue all that is stopped; what is being ended ends first."""
        self._over.set()
        if self._thread is not None:
            self._thread.join()
        self._ledger.resume_all()

    def _run(self, program: int) -> None:
        while not self._over.wait(_LOOK_SECONDS):
            self._ledger.resume_all(_PAUSE_SECONDS)
            if self._ledger.has(DONE):
                break
            self._say_tries()
        else:
            return
        if self._keep:
            _say("that was long enough; the program goes on, and the report follows when it has ended.")
            return
        self.ended = True
        _say(
            "the program was watched for long enough, and is ended as by Ctrl-C, of which it may print a "
            "KeyboardInterrupt; the report follows."
        )
        end_program(program, lambda: training_processes(self._folder), _say, lambda: self._ledger.mark(TOLD))

    def _say_tries(self) -> None:
        if not self._quiet and self._ledger.has(TRYING):
            self._quiet = True
            _say("a cache of the dataset is tried now, for a minute at most; the program waits meanwhile.")
