"""``hotset run``: a program with its decoders memoised, and a report on stderr when it has ended."""

from __future__ import annotations

import contextlib
import os
import secrets
import shlex
import shutil
import threading
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from hotset._warnings import printable
from hotset.errors import ArgumentError
from hotset.run import loader_wait
from hotset.run.environment import JOB, Options, environment_for
from hotset.run.ledger import ATTACHED, CALLED, IMPORTED, REACHED, Ledger, make_ledger, read_left, unreached
from hotset.run.program import run_program, tell, tell_lines
from hotset.run.report import Outcome, report
from hotset.session.sessions import find
from hotset.units import parse_bytes

__all__ = ["run"]

_NOT_IMPORTED = "no process imported this module, so the function is not kept; check --memo"
_NOT_CALLED = (
    "nothing called it by this name; if its module hands it on as it is imported "
    "(`other.name = function`), name a function that calls it"
)


def _unused(places: Sequence[str], ledger: Ledger, known: Collection[str]) -> dict[tuple[str, str], int]:
    """Which functions that ``--memo`` names kept nothing, and why; without those of which that is known."""
    found = {}
    for place in places:
        if not ledger.has(f"{IMPORTED}{place.partition(':')[0]}"):
            found[place, _NOT_IMPORTED] = 1
        elif not ledger.has(f"{CALLED}{place}") and place not in known:
            found[place, _NOT_CALLED] = 1
    return found


def run(options: Options, command: Sequence[str]) -> int:
    """Run ``command`` with ``options`` and report to stderr.

    Returns:
        The program's status, as that of :func:`os.waitpid`.

    Raises:
        SessionError: there is no such session.
        ArgumentError: an option is not valid, or there is no command.
        QuantityError: ``memory`` is not an amount of memory.
    """
    _check(options, command)
    if options.spill is not None:  # the program's processes may be in other folders
        options = options._replace(spill=os.path.abspath(options.spill))
    ledger = make_ledger("hotset-run-")
    job = _Job(options, secrets.token_hex(8), ledger)
    start = time.monotonic()
    try:
        environment = environment_for(options, job.name, ledger, os.environ)
        status = run_program(command, environment, _say, job.attach)
        seconds = time.monotonic() - start
        if not job.attached:
            return status  # the program could not be started
        left = dict(read_left(ledger))
        left |= _unused(options.functions, Ledger(ledger), {name for name, _ in left})
        outcome = Outcome(
            command=printable(shlex.join(command), 60),
            seconds=seconds,
            functions=job.functions(),
            left=left,
            waits=loader_wait.read_waits(ledger),
            unreached=unreached(ledger),
            reached=Ledger(ledger).has(REACHED),
        )
        tell_lines(report(outcome))
        return status
    finally:
        job.close()
        shutil.rmtree(ledger, ignore_errors=True)


def _check(options: Options, command: Sequence[str]) -> None:
    if not command:
        raise ArgumentError("hotset run needs a program; write hotset run -- python train.py.")
    if options.memory != "auto":
        parse_bytes(options.memory, whole=lambda: 1 << 30)
    if options.evict not in (None, "lru"):
        raise ArgumentError(
            f'--evict must be "lru", got {options.evict!r}; leave it out to keep what is kept.'
        )
    for place in options.functions:
        module, colon, name = place.partition(":")
        if not colon or not module or not name:
            raise ArgumentError(f"--memo must be module:function, got {place!r}.")
    if options.session is not None:
        if options.spill is not None:
            raise ArgumentError("a session has a spill folder of its own; leave out --spill or --session.")
        find(options.session)
    if options.spill is not None and not (options.spill and Path(options.spill).absolute().parent.is_dir()):
        raise ArgumentError(
            f"--spill must be a folder, or a new one in a folder that is there, got {options.spill!r}; "
            "correct the path, or mount the disk."
        )


def _say(sentence: str) -> None:
    tell(f"hotset: {sentence}\n")


def _since(before: dict[str, Any] | None, now: dict[str, Any]) -> dict[str, Any]:
    """What was counted since; entries and bytes are what there is."""
    kept = ("entries", "bytes")
    return {
        name: value if name in kept else value - (before or {}).get(name, 0) for name, value in now.items()
    }


class _Job:
    """The memos' store, held in this process: what workers have kept stays when they end.

    It is attached by a thread while the program starts, as that imports numpy. It needs no torch, whose
    import takes a second and a half of a core.
    """

    def __init__(self, options: Options, name: str, ledger: str) -> None:
        self.name = name
        self._ledger = ledger
        self._options = options
        self._store: Any = None
        self._before: dict[str, dict[str, Any]] = {}  # what earlier jobs of a session have counted
        self._thread: threading.Thread | None = None

    @property
    def attached(self) -> bool:
        return self._thread is not None

    def attach(self, group: int) -> None:
        """Begin to hold the store, while the program's processes start."""
        os.environ[JOB] = self.name
        self._thread = threading.Thread(target=self._attach, name="hotset-attach", daemon=True)
        self._thread.start()

    def _attach(self) -> None:
        try:
            from hotset.run.kept import attach

            store = attach(self._options)
            self._before = {name: stats._asdict() for name, stats in store.functions()}
            self._store = store
        except Exception as error:
            _say(f"the memos' store cannot be held here ({type(error).__name__}: {printable(str(error))}).")
        finally:
            Ledger(self._ledger).mark(ATTACHED)

    def functions(self) -> list[tuple[str, Any]]:
        if self._thread is not None:
            self._thread.join()
        try:
            found = self._store.functions() if self._store is not None else []
            return [(name, _since(self._before.get(name), stats._asdict())) for name, stats in found]
        except Exception as error:
            _say(f"there are no figures ({type(error).__name__}: {printable(str(error))}).")
            return []

    def close(self) -> None:
        if self._store is not None:
            with contextlib.suppress(Exception):
                self._store.leave()
