"""All processes that a run has started: who has ended, and whether as it should.

Each is a fork of this one, which never has a thread. Children's orphans become this process's own, so that
none is overlooked; the server, which detaches itself, is found among them.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from .jobs import ENDS_WELL, FAILED, LOST_A_WORKER, NO_SESSION, code_of

PATIENCE = 120.0
_SUBREAPER = 36


class Child:
    """A process that was started here.

    Attributes:
        kind: ``job``, ``create``, ``destroy``, ``look``, ``reader``, or ``start`` (of the server).
        excused: whether a worker of it was killed.
        continues: when it is to be continued, if it is stopped.
    """

    def __init__(self, pid: int, kind: str, log: Path) -> None:
        self.pid, self.kind, self.log = pid, kind, log
        self.excused = False
        self.continues: float | None = None


class Processes:
    """Starts processes, and judges how they end.

    Attributes:
        counts: how often what has happened.
        failures: a text for each thing that was wrong.
        daemon: the server's process, once it has answered.
    """

    def __init__(self, logs: Path) -> None:
        self.logs = logs
        self.alive: list[Child] = []
        self.counts: Counter[str] = Counter()
        self.failures: list[str] = []
        self.daemon: int | None = None
        ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)

    def start(self, kind: str, body: Callable[[], int]) -> None:
        """Run ``body`` in a child, which ends with what it returns, its output in a log."""
        self.counts[f"{kind}s"] += 1
        log = self.logs / f"{kind}-{self.counts[f'{kind}s']}"
        pid = os.fork()
        if pid == 0:
            _run_and_exit(body, log)
        self.alive.append(Child(pid, kind, log))

    def of(self, kind: str) -> list[Child]:
        return [child for child in self.alive if child.kind == kind]

    def server(self) -> int | None:
        """The server's process, by its command line."""
        return next((pid for pid in children() if b"hotset.server" in command_line(pid)), None)

    def reap(self) -> None:
        """Look who has ended, and whether as it should; continue who has been stopped long enough."""
        for child in list(self.alive):
            if child.continues is not None and time.monotonic() > child.continues:
                child.continues = None
                os.kill(child.pid, signal.SIGCONT)
            done, status = os.waitpid(child.pid, os.WNOHANG)
            if done:
                self.alive.remove(child)
                self._judge(child, os.waitstatus_to_exitcode(status))
        known = {child.pid for child in self.alive}
        for pid in children():
            if pid not in known:
                done, status = os.waitpid(pid, os.WNOHANG)
                if done and pid == self.daemon:
                    self.failures.append(f"the server ended by itself, with status {status}")

    def _judge(self, child: Child, code: int) -> None:
        if child.kind == "start":
            self.daemon = self.server()
        if code == -signal.SIGKILL:
            self.counts[f"{child.kind} kills"] += 1
        elif code == NO_SESSION and child.kind == "job":
            self.counts["jobs without a session"] += 1
        elif code == LOST_A_WORKER and child.excused:
            self.counts["jobs that lost a worker"] += 1
        elif code == ENDS_WELL:
            self.counts[f"{child.kind}s that ended well"] += 1
        else:
            self._fail(child, f"ended with {code}")

    def _fail(self, child: Child, how: str) -> None:
        excused = ", a worker of which was killed," if child.excused else ""
        self.failures.append(f"{child.log.name}{excused} {how}:\n{child.log.read_text()[-6000:]}")

    def wait(self) -> None:
        """Let all end, each within a bound: a process that wedges is a failure too."""
        until = time.monotonic() + PATIENCE
        while self.alive and time.monotonic() < until:
            time.sleep(0.01)
            self.reap()
        for child in self.alive:
            os.kill(child.pid, signal.SIGUSR1)  # where it is goes into its log
            time.sleep(0.5)
            os.kill(child.pid, signal.SIGKILL)
            os.waitpid(child.pid, 0)
            self._fail(child, "did not end")
        self.alive.clear()


def _run_and_exit(body: Callable[[], int], log: Path) -> None:
    code = FAILED
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        try:
            fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            os.dup2(fd, 1)
            os.dup2(fd, 2)
            faulthandler.enable()
            faulthandler.register(signal.SIGUSR1, all_threads=True)
            code = body()
        except BaseException as error:
            code = code_of(error)
            traceback.print_exc()
    except BaseException as error:
        code = code_of(error)
        traceback.print_exc()
    finally:
        try:
            sys.stderr.flush()
        finally:  # torch's handler may raise at any time that a worker was killed
            os._exit(code)


def children(pid: int | None = None) -> list[int]:
    """The children of a process, of this one if None."""
    pid = os.getpid() if pid is None else pid
    with contextlib.suppress(OSError):
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


def command_line(pid: int) -> bytes:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


def end_all() -> None:
    """End whatever this process has started; orphans become its children, and come next."""
    while found := children():
        for pid in found:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
