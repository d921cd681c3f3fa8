"""What goes wrong, and when: a seed draws one action after the other, some thirty of them a second."""

from __future__ import annotations

import contextlib
import mmap
import os
import random
import resource
import signal
import socket
import time
from typing import Any

import numpy as np

from hotset.cli import server, session
from hotset.errors import HotsetError, SessionError
from hotset.server.options import Options
from hotset.server.pidfile import ServerError
from hotset.session import recovery, reports
from tests.kills import dying

from . import HAPPENS, KILLS
from .jobs import ENDS_WELL, FILE_LAYERS, WRONG, job
from .places import Place
from .processes import Processes, children

MOST_JOBS = 4

# name: memory, spill, persist, whether it is the server's
SESSIONS: dict[str, tuple[str, bool, bool, bool]] = {
    "enough": ("12MiB", False, False, False),
    "little": ("150kB", False, False, False),
    "spilled": ("150kB", True, False, False),
    "kept": ("300kB", True, True, False),
    "served": ("4MiB", False, False, True),
    "served-spilled": ("150kB", True, False, True),
}


class Director:
    """Starts processes and lets go wrong what can.

    Attributes:
        port: where the server is.
        checked: for each job, how many samples it has compared.
    """

    def __init__(self, seed: int, runtime: Place, disk: Place, processes: Processes) -> None:
        self.random = random.Random(seed)
        self.runtime, self.disk = runtime, disk
        self.processes, self.counts = processes, processes.counts
        self.port = _free_port()
        self.checked = np.frombuffer(mmap.mmap(-1, 1 << 20), np.int64)
        self.full_until = 0.0

    def run(self, kills: int, seconds: float) -> None:
        """Go on until there were so many kills, everything has happened once, and the time is over."""
        actions = {
            self.start_job: 30, self.create: 14, self.destroy: 5, self.look: 4, self.serve: 3, self.kill: 8,
            self.kill_worker: 8, self.kill_server: 2, self.stop: 5, self.fill: 3,
        }  # fmt: skip
        until, last = time.monotonic() + seconds, time.monotonic() + max(10 * seconds, 10.0 * kills)
        self.serve()
        for name in SESSIONS:
            self.create(name)
        while not self.processes.failures and time.monotonic() < last:
            if time.monotonic() > until and self.kills >= kills and all(self.counts[k] for k in HAPPENS):
                break
            time.sleep(self.random.uniform(0, 0.06))
            self.processes.reap()
            if self.is_full and time.monotonic() > self.full_until:
                self.make_room()
            action = self.random.choices(list(actions), list(actions.values()))[0]
            if action is not self.start_job or len(self.processes.of("job")) < MOST_JOBS:
                action()
        self.make_room()
        self.processes.wait()

    @property
    def kills(self) -> int:
        return sum(self.counts[f"{kind} kills"] for kind in KILLS)

    def lines(self, share: float) -> int:
        """After how many lines a process is to die; 0, not at all, for the others."""
        return round(10 ** self.random.uniform(0, 3.3)) if self.random.random() < share else 0

    # -- processes that use, make and destroy

    def start_job(self) -> None:
        draw = self.random
        if draw.random() < 0.75:
            options: dict[str, Any] = {"session": draw.choice(sorted(SESSIONS))}
            if draw.random() < 0.2:
                options["memory"] = "100kB"
        else:
            options = {"memory": draw.choice(["20kB", "300kB", "64MiB"]), "spill": str(self.disk.folder)}
        seed, dies, word = draw.getrandbits(60), self.lines(0.1), self.counts["jobs"]
        size = draw.randrange(1 << 20) if self.is_full and not self.disk.mounted else None

        def body() -> int:
            if size is not None:
                resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
            return job(options, seed, self.checked[word : word + 1], dies)

        self.processes.start("job", body)

    def create(self, name: str | None = None) -> None:
        dies = self.lines(0.5) if name is None else 0
        name = name or self.random.choice(sorted(SESSIONS))
        memory, spills, persist, served = SESSIONS[name]
        spill = str(self.disk.folder) if spills else None
        port = self.port if served else None

        def body() -> int:
            # There already, no server, a full disk.
            with (
                dying(FILE_LAYERS, dies),
                contextlib.suppress(HotsetError),
            ):  # there already, no server, a full disk
                session.create(name, memory=memory, spill=spill, ttl=None, persist=persist, port=port)
            return ENDS_WELL

        self.processes.start("create", body)

    def destroy(self) -> None:
        name, dies = self.random.choice(sorted(SESSIONS)), self.lines(0.5)

        def body() -> int:
            with dying(FILE_LAYERS, dies), contextlib.suppress(SessionError):  # there is none
                session.destroy(name)
            return ENDS_WELL

        self.processes.start("destroy", body)

    def look(self) -> None:
        """Check and collect, in the midst of it all."""

        def body() -> int:
            with contextlib.suppress(SessionError):  # who makes or destroys one is stopped
                recovery.gc()
            session.list_all()
            problems = [
                f"{report.name}: {problem}"
                for report in reports.check_caches()
                for problem in report.problems
            ]
            print(*problems, sep="\n")
            return WRONG if problems else ENDS_WELL

        self.processes.start("look", body)

    def serve(self) -> None:
        """Start the server, unless it runs or begins to."""
        if self.processes.of("start") or self.processes.server() is not None or self.is_full:
            return
        options = Options.parse(port=self.port, memory="8MiB", spill=str(self.disk.folder))

        def body() -> int:
            with contextlib.suppress(ServerError):  # the file system was filled meanwhile
                server.start(options)
            return ENDS_WELL

        self.processes.start("start", body)

    # -- what befalls them

    def kill_server(self) -> None:
        pid = self.processes.server()
        if pid is not None and not self.processes.of("start"):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            self.counts["server kills"] += 1
            self.processes.daemon = None
            self.serve()

    def kill_worker(self) -> None:
        jobs = self.processes.of("job")
        for child in self.random.sample(jobs, len(jobs)):
            workers = children(child.pid)
            if workers:
                child.excused = True
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self.random.choice(workers), signal.SIGKILL)
                    self.counts["worker kills"] += 1
                return

    def kill(self) -> None:
        victims = [child for child in self.processes.alive if child.kind in KILLS]
        if victims:
            os.kill(self.random.choice(victims).pid, signal.SIGKILL)

    def stop(self) -> None:
        alive = self.processes.alive
        victims = [child for child in alive if child.kind != "start" and child.continues is None]
        if victims:
            child = self.random.choice(victims)
            os.kill(child.pid, signal.SIGSTOP)
            child.continues = time.monotonic() + self.random.choice([0.05, 0.3, 3.0])
            self.counts["stops"] += 1

    @property
    def is_full(self) -> bool:
        return self.full_until > 0

    def fill(self) -> None:
        if not self.is_full:
            place, name = self.random.choice([(self.runtime, "tmpfs"), (self.disk, "disk")])
            if place.mounted:
                place.fill(self.random.choice([0, 0, 5000, 300_000, 3_000_000]))
            self.counts[f"{name} full"] += 1
            self.full_until = time.monotonic() + self.random.uniform(0.2, 1.5)

    def make_room(self) -> None:
        self.runtime.empty()
        self.disk.empty()
        self.full_until = 0.0


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port
