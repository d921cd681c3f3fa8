"""Runs checks and figures so that one which hangs, or breaks the device for its process, costs only itself.

    parent ── fork ──> worker: item, item, item that fails │ <── fork ── worker: the rest
       └─ after each of them: a line, and all that is known so far in a file

A worker runs one item after the other; the next item after one that has failed gets a worker of its own. The
parent never uses the device: what is forked from it could not use it then. An item that takes longer than its
limit is killed, after it has said where it is.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["Item", "Outcome", "Report", "run"]

_ENDS = 5.0  # seconds in which a worker ends when it has nothing to do any more


class Item(NamedTuple):
    """Something to run.

    Attributes:
        name: of it.
        run: runs it; what it returns is iterated over, for values that are told as soon as they are there.
        limit: seconds that it may take.
    """

    name: str
    run: Callable[[], Iterable[Any] | None]
    limit: float = 60.0


class Outcome(NamedTuple):
    """What came of an item.

    Attributes:
        name: its.
        state: ``"ok"``, ``"FAILED"``, ``"HUNG"``, ``"CRASHED"`` or ``"not run"``.
        seconds: that it took.
        values: what it gave, as plain values.
        why: the last line of the error.
    """

    name: str
    state: str
    seconds: float
    values: list[Any]
    why: str


class Report:
    """All outcomes so far, printed and written as they come.

    Args:
        path: the file to write, JSON; None for none.
        line: how a value is printed; None: it is not.
    """

    def __init__(self, path: Path | None, line: Callable[[Any], str | None]) -> None:
        self.outcomes: list[Outcome] = []
        self._path = path
        self._line = line

    def value(self, name: str, value: Any) -> None:
        """A value of the item that runs."""
        text = self._line(value)
        if text is not None:
            print(text, flush=True)
        self._write([Outcome(name, "running", 0.0, [value], "")])

    def add(self, outcome: Outcome) -> None:
        """An item has ended."""
        self.outcomes.append(outcome)
        why = f"  {outcome.why}" if outcome.why else ""
        print(f"{outcome.state:8} {outcome.seconds:6.1f} s  {outcome.name}{why}", flush=True)
        self._write([])

    def _write(self, running: list[Outcome]) -> None:
        if self._path is not None:
            made = self._path.with_suffix(".part")
            made.write_text(json.dumps([one._asdict() for one in self.outcomes + running], indent=1) + "\n")
            made.replace(self._path)


def run(items: Sequence[Item], report: Report, seconds: float = float("inf")) -> None:
    """Run all items, one after the other, in no more than so many seconds."""
    left, end = list(items), time.monotonic() + seconds
    while left and time.monotonic() < end:
        with _Worker(left) as worker:
            while left and time.monotonic() < end:
                outcome = worker.outcome(left.pop(0), report, end)
                report.add(outcome)
                if outcome.state != "ok":
                    break
    for item in left:
        report.add(Outcome(item.name, "not run", 0.0, [], "there was no time left"))


class _Worker:
    """A process that runs items."""

    def __init__(self, items: Sequence[Item]) -> None:
        context = multiprocessing.get_context("fork")
        self._pipe, theirs = context.Pipe(duplex=False)
        self._process = context.Process(target=_work, args=(list(items), theirs))
        sys.stdout.flush()
        sys.stderr.flush()
        self._process.start()
        theirs.close()

    def __enter__(self) -> _Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.join(_ENDS)
        self._kill()
        self._process.join(_ENDS)  # not for ever: it may hang in the driver, where nothing can kill it
        self._pipe.close()

    def _kill(self) -> None:
        """Kill it, and those that it has started, which are of its group and may outlive it."""
        self._process.kill()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid or 0, signal.SIGKILL)

    def outcome(self, item: Item, report: Report, end: float) -> Outcome:
        """Wait for what comes of this item, which is the worker's next one."""
        begun, values = time.monotonic(), list[Any]()
        deadline = min(begun + item.limit, end)

        def ended(state: str, why: str) -> Outcome:
            return Outcome(item.name, state, time.monotonic() - begun, values, why)

        while True:
            if not self._pipe.poll(max(deadline - time.monotonic(), 0)):
                self._say_where()
                return ended("HUNG", f"killed after {time.monotonic() - begun:.0f} s")
            try:
                kind, value = self._pipe.recv()
            except EOFError:
                self._process.join(_ENDS)
                return ended("CRASHED", f"its process ended with {self._process.exitcode}")
            if kind != "value":
                return ended(kind, value)
            values.append(value)
            report.value(item.name, value)

    def _say_where(self) -> None:
        """Have the worker print where its threads are; then kill it."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._process.pid or 0, signal.SIGUSR1)
            time.sleep(0.5)
        self._kill()


def _work(items: list[Item], pipe: Any) -> None:
    os.setpgid(0, 0)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)
    for item in items:
        try:
            for value in item.run() or ():
                pipe.send(("value", value))
        except BaseException as error:
            traceback.print_exc()
            last = traceback.format_exception_only(error)[-1].strip().splitlines()
            pipe.send(("FAILED", last[0][:300] if last else type(error).__name__))
            return
        pipe.send(("ok", ""))
