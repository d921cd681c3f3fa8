"""Machines that share a session, without Ray: a runtime folder each, and forked children that use it.

::

    the test ── directory, behind a socket <── beats ── node      a child of the test, one on each machine
                        └─────────────── plans, parts ── trainer   children too, as many as are asked for

The nodes are the library's, and so is how a trainer joins: what Ray does in between is done here by a socket,
which a test may close.

No time passes here unless a test has it pass: the directory's clock stands still, nobody is tired of waiting
for who is merely slow, and no lease ends. So a machine that is busy with other things changes no outcome.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import pickle
import shutil
import signal
import socket
import socketserver
import sys
import tempfile
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from helpers import difference, eventually, recorded, scribble
from kills import child, ended, kill
from samples import kilobyte
from sources import Counting, ReadLog, Samples
from stores import attached

import hotset
import hotset.dataset.build  # as `hotset.cache` would in each child
from hotset.cluster import batch_fetch, membership, node, peer_stats, sockets, store_service
from hotset.cluster import ray_join as joining
from hotset.cluster import remote_cache as neighbours
from hotset.cluster.directory import SILENT, Directory
from hotset.cluster.membership import Member
from hotset.cluster.node import Node
from hotset.dataset.dataset_proxy import current_of
from hotset.policy.rendezvous import Placement
from hotset.session import sessions
from hotset.store import fill
from hotset.store.format import PRESENT

SESSION = "shared"
BEAT, SHORTLY = 0.05, 0.02
MIB = 1 << 20
SOON = 120.0
# Seconds that no test lasts: what waits for so long waits for ever.
NEVER = 600.0


# ---- the directory, and how it is reached ----------------------------------------------------------------


class _Server(socketserver.ThreadingUnixStreamServer):
    """Has a thread for each who asks: one that is stopped in the midst of it holds up nobody."""

    request_queue_size = 64

    def server_close(self) -> None:
        # Who waits is told at once: children have inherited the socket, so that closing it ends nothing.
        self.socket.shutdown(socket.SHUT_RDWR)
        with contextlib.suppress(OSError):
            while True:
                self.socket.accept()[0].close()
        super().server_close()


class Post:
    """The directory of a session, in this process, as others reach it.

    Attributes:
        path: of its socket.
        directory: the one that answers; None while there is none.
        now: what time it is for the directory.
    """

    def __init__(self, path: str) -> None:
        self.path, self.now = path, 0.0
        self.expected = 0
        self.directory: Directory | None = None
        self._lock = threading.Lock()

    def open(self) -> None:
        """Begin, knowing of nothing."""
        self.directory = Directory(lambda: self.expected, lambda: self.now)
        call = self.call

        class Handler(socketserver.StreamRequestHandler):
            def handle(self) -> None:
                with contextlib.suppress(OSError, EOFError, pickle.UnpicklingError):
                    what, args = pickle.load(self.rfile)
                    pickle.dump(call(what, *args), self.wfile)

        self._server = _Server(self.path, Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self._thread.start()

    def call(self, what: str, *args: Any) -> Any:
        """Call a method of the directory, one at a time."""
        with self._lock:
            return getattr(self.directory, what)(*args)

    def silence(self, gone: str) -> None:
        """Have time pass, in which all machines beat but this one, until it has left."""

        def heard() -> bool:
            return all(each["silent"] == 0 for each in self.call("status") if each["name"] != gone)

        # In steps in which no machine that beats is taken for silent; the last beat of the one that has gone
        # may come in after the first step.
        for _ in range(8):
            with self._lock:
                self.now += 0.4 * SILENT
            assert eventually(heard)
            if all(each["name"] != gone for each in self.call("status")):
                return

    def close(self) -> None:
        """Be gone; nothing happens a second time."""
        if self.directory is not None:
            # By its name, as the children have inherited what is behind it.
            os.unlink(self.path)
            self._server.shutdown()
            self._thread.join()
            self._server.server_close()
            self.directory = None


def ask(path: str, what: str, *args: Any) -> Any:
    """Call a directory's method."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(SOON)
        connection.connect(path)
        with connection.makefile("rwb") as file:
            pickle.dump((what, args), file)
            file.flush()
            return pickle.load(file)


class _Handle:
    """What a trainer has of the directory: an actor's handle, as far as it is used."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __getattr__(self, what: str) -> Any:
        return types.SimpleNamespace(remote=lambda *args: partial(ask, self._path, what, *args))


# ---- children --------------------------------------------------------------------------------------------


class Told(NamedTuple):
    """What a child's method has returned, and what it was warned of meanwhile."""

    value: Any
    warnings: list[str]


class Child:
    """A child that makes an object in a runtime folder, and calls its methods as it is told."""

    def __init__(self, folder: Path, make: Callable[[], Any]) -> None:
        self._pipe, theirs = multiprocessing.Pipe()
        parent = os.getpid()

        def run() -> None:
            os.environ["HOTSET_RUNTIME_DIR"] = str(folder)
            os.environ["XDG_STATE_HOME"] = str(folder / "state")
            with recorded() as told:
                made = make()
                theirs.send(None)
                while True:
                    while not theirs.poll(1):
                        if os.getppid() != parent:
                            return
                    what, args = theirs.recv()
                    try:
                        answer = getattr(made, what)(*args)
                    except Exception as error:
                        answer = error
                    theirs.send(Told(answer, [str(each.message) for each in told]))
                    told.clear()
                    if what == "close":
                        return

        self.pid = child(run)
        theirs.close()
        self._receive()

    def begin(self, what: str, *args: Any) -> None:
        """Call a method, and do not wait for it."""
        self._pipe.send((what, args))

    def result(self, within: float = SOON) -> Told:
        """What the method that was begun has returned; what it has raised is raised."""
        told = self.told(within)
        if isinstance(told.value, Exception):
            raise told.value
        return told

    def told(self, within: float = SOON) -> Told:
        """What it has returned or raised."""
        told: Told = self._receive(within)
        return told

    def call(self, what: str, *args: Any) -> Any:
        """Call a method; fails if it warns."""
        self.begin(what, *args)
        told = self.result()
        assert told.warnings == []
        return told.value

    def _receive(self, within: float = SOON) -> Any:
        assert self._pipe.poll(within), f"child {self.pid} has not answered for {within:.0f} s"
        return self._pipe.recv()

    def kill(self) -> None:
        kill(self.pid)

    def stop(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def end(self) -> None:
        """End it in good order, if it was not killed."""
        with self._pipe, contextlib.suppress(OSError, EOFError, ChildProcessError):
            os.kill(self.pid, signal.SIGCONT)
            self.begin("close")
            assert ended(self.pid, SOON) == 0


class _Node:
    def __init__(self, path: str, memory: int) -> None:
        self._node = Node(SESSION, memory, "127.0.0.1", partial(ask, path, "beat"))

    def member(self) -> Member:
        return self._node.member

    def be_waited_for(self, seconds: float) -> None:
        self._node.member = self._node.member._replace(patience=seconds)

    def status(self) -> dict[str, Any]:
        return self._node.status()

    def destroy(self) -> int:
        return self._node.destroy()

    def close(self) -> None:
        self._node.close()


class Walk(NamedTuple):
    """What became of an epoch.

    Attributes:
        wrong: samples that were not what they must be.
        warnings: what the process was warned of.
    """

    wrong: list[int]
    warnings: list[str]


class _Trainer:
    def __init__(self, path: str) -> None:
        def join(address: str, session: str, memory: int | None) -> joining.Joined:
            return joining.Joined(session, sessions.find(session).number, _Handle(path))

        joining.join = join
        sys.modules["ray"] = types.SimpleNamespace(get=lambda call, timeout: call())  # type: ignore[assignment]
        self._cached: Any = None

    def cache(self, dataset: Any, make: Callable[[int], Any], how: dict[str, Any]) -> None:
        how = {"cluster": "auto", "session": SESSION, "key": "the data", **how}
        self._cached, self._make = hotset.cache(dataset, **how), make

    def walk(self, batches: Sequence[Sequence[int]]) -> list[int]:
        wrong: list[int] = []
        for batch in batches:
            wrong += self._differing(batch, self._cached.__getitems__(batch))
        return wrong

    def use(self, batches: Sequence[Sequence[int]]) -> None:
        """As :meth:`walk`, whatever the samples are."""
        for batch in batches:
            self._cached.__getitems__(batch)

    def prefetch(self, batch: Sequence[int]) -> None:
        """Ask for a batch ahead of its use."""
        current_of(self._cached).ask_ahead(np.array(batch))

    def scribble(self, batches: Sequence[Sequence[int]]) -> list[int]:
        """As :meth:`walk`, and overwrite each sample before the next one is looked at."""
        wrong: list[int] = []
        for batch in batches:
            for index, value in zip(batch, self._cached.__getitems__(batch), strict=True):
                wrong += self._differing([index % len(self._cached)], [value])
                scribble(value)
        return wrong

    def load(self, batches: Sequence[Sequence[int]], workers: int, context: str | None) -> Any:
        """As :meth:`walk`, by a loader of samples that collate to ``(data, index)``."""
        loader = hotset.DataLoader(
            self._cached,
            batch_sampler=[list(batch) for batch in batches],
            num_workers=workers,
            multiprocessing_context=context,
        )
        wrong: list[int] = []
        for batch, (data, labels) in zip(batches, loader, strict=True):
            assert labels.tolist() == list(batch)
            wrong += self._differing(batch, list(zip(data, labels.tolist(), strict=True)))
        return wrong

    def sunk(self, count: int, workers: int) -> tuple[list[float], list[float]]:
        """Losses of a training by ``data_sink`` from the cache, and of a plain loop over the source."""
        import sinking

        found = []
        for cached in (True, False):
            data = self._cached if cached else Samples(self._make, count)
            training = sinking.Training()
            loader = sinking.loader_of(data, workers)
            if not cached:
                found.append(sinking.plain(training, loader, sinking.STEPS))
                continue
            with hotset.data_sink(training.step, loader, 7, outputs="all") as sink:
                losses: list[float] = []
                while len(losses) < sinking.STEPS:
                    losses += sink(steps=min(7, sinking.STEPS - len(losses))).tolist()
            found.append(losses)
        return found[0], found[1]

    def _differing(self, batch: Sequence[int], got: list[Any]) -> list[int]:
        found = [difference(value, self._make(index)) for index, value in zip(batch, got, strict=True)]
        return [index for index, sentence in zip(batch, found, strict=True) if sentence is not None]

    def repickle(self) -> None:
        """Go on with a copy, as another process would have it."""
        copy = pickle.loads(pickle.dumps(self._cached))
        self._cached.close()
        self._cached = copy

    def stats(self) -> Any:
        return self._cached.stats()

    def clear(self) -> None:
        self._cached.clear()

    def destroy_session(self) -> int:
        """As ``hotset session destroy`` does; returns the bytes that were freed."""
        return sessions.destroy(sessions.find(SESSION))

    def fill_session(self, count: int) -> int:
        """Leave a session nothing, by a cache of this machine's own; returns how many samples that holds."""
        self._other = hotset.cache(Samples(kilobyte, count), session=SESSION, key="something else")
        for start in range(0, count, 100):
            self._other.__getitems__(range(start, start + 100))
        return int(self._other.stats().cached)

    def close(self) -> None:
        if self._cached is not None:
            self._cached.close()


class Trainer(Child):
    """A process that trains on a machine."""

    def cache(self, dataset: Any, make: Callable[[int], Any], **how: Any) -> list[str]:
        """Call ``hotset.cache(dataset, cluster="auto", session=..., **how)``; returns what it warned of."""
        self.begin("cache", dataset, make, how)
        return self.result().warnings

    def walk(self, batches: Sequence[Sequence[int]]) -> Walk:
        """Read these batches, and compare each sample with what ``make`` gives."""
        self.begin("walk", batches)
        return self.walked()

    def load(self, batches: Sequence[Sequence[int]], workers: int, context: str | None = None) -> Walk:
        """Read them by a ``hotset.DataLoader``."""
        self.begin("load", batches, workers, context)
        return self.walked()

    def walked(self) -> Walk:
        """The outcome of a walk that was begun."""
        return Walk(*self.result())


# ---- machines ----------------------------------------------------------------------------------------------


class Machine:
    """A machine: a folder, a node, trainers.

    Attributes:
        name: as the other machines know it.
    """

    def __init__(self, post: Post, memory: int) -> None:
        self._post, self._memory = post, memory
        self.folder = Path(tempfile.mkdtemp(prefix="test-hotset-", dir="/dev/shm"))
        self.trainers: list[Trainer] = []
        self.node: Child | None = None
        self.begin()

    def begin(self) -> None:
        """Start its node, or start it anew."""
        self.node = Child(self.folder, lambda: _Node(self._post.path, self._memory))
        self.member: Member = self.node.call("member")
        self.name = self.member.name

    def trainer(self) -> Trainer:
        trainer = Trainer(self.folder, lambda: _Trainer(self._post.path))
        self.trainers.append(trainer)
        return trainer

    def kill(self) -> None:
        """As if its power had failed; what is in its memory can still be looked at."""
        for each in (self.node, *self.trainers):
            if each is not None:
                each.kill()

    def end(self) -> None:
        with contextlib.ExitStack() as stack:
            for each in (self.node, *self.trainers):  # the trainers first
                if each is not None:
                    stack.callback(each.end)

    def membership(self) -> list[str]:
        """The names of the machines that it knows of."""
        return [each[0] for file in self.folder.glob("*.cluster") for each in self._members(file)]

    @staticmethod
    def _members(file: Path) -> list[Any]:
        members: list[Any] = json.loads(file.read_bytes())["members"]
        return members

    def endpoints(self) -> list[str]:
        """Where the machines serve that it knows of."""
        return [each[2] for file in self.folder.glob("*.cluster") for each in self._members(file)]

    def patience(self) -> list[float]:
        """How long it waits for an answer of each machine that it knows of."""
        return [each[-1] for file in self.folder.glob("*.cluster") for each in self._members(file)]

    def shared(self) -> list[Path]:
        """Its parts of caches; caches of its own are none."""
        found = []
        for file in sorted(self.folder.glob("*.cache")):
            with attached(file) as store:
                if "meeting" in store.segment.metadata:
                    found.append(file)
        return found

    @property
    def file(self) -> Path:
        """Its part of the cache, of which there is one."""
        (file,) = self.shared()
        return file

    def holds(self) -> set[int]:
        """Which samples are in its memory."""
        with attached(self.file) as store:
            return set(np.flatnonzero(store.segment.index >= PRESENT).tolist())

    def check(self) -> list[str]:
        """What is wrong with the records in its memory."""
        with attached(self.file) as store:
            return store.check()


class Town:
    """Some machines, their directory, and one dataset whose readings are counted.

    Attributes:
        post: the directory.
        machines: those that were made.
        log: who has read what.
    """

    def __init__(self, tmp_path: Path, make: Callable[[int], Any], n: int, seconds: float):
        self.post = Post(str(tmp_path / "directory"))
        self.make, self.n = make, n
        self.log = ReadLog(tmp_path / "log")
        self.source = Counting(make, n, self.log, seconds)
        self.machines: list[Machine] = []

    def add(self, count: int = 1, memory: int = 16 * MIB) -> Machine:
        """Add machines of one size; returns the last one."""
        self.post.expected += count
        self.machines += [Machine(self.post, memory) for _ in range(count)]
        return self.machines[-1]

    def settled(self, *names: str) -> None:
        """Wait until all these machines know of each other and of no others."""
        wanted = sorted(names or [machine.name for machine in self.machines])
        there = [machine for machine in self.machines if machine.name in wanted]
        assert eventually(lambda: all(machine.membership() == wanted for machine in there))

    def silence(self, gone: Machine) -> None:
        """Have all others know that a machine that beats no more has left."""
        self.post.silence(gone.name)
        self.settled(*(machine.name for machine in self.machines if machine is not gone))

    def wait_for(self, machine: Machine, seconds: float) -> None:
        """Have all machines wait so long for an answer of that one, and no longer."""
        assert machine.node is not None
        machine.node.call("be_waited_for", seconds)
        assert eventually(lambda: all(seconds in each.patience() for each in self.machines))

    def trainers(self, *machines: Machine, **how: Any) -> list[Trainer]:
        """A trainer on each machine, with the dataset cached; its readings are counted from then on."""
        self.settled()
        made = [machine.trainer() for machine in machines or self.machines]
        for trainer in made:
            trainer.begin("cache", self.source, self.make, how)
        assert [trainer.result().warnings for trainer in made] == [[] for _ in made]
        self.log.reset()
        return made

    def owned(self, *machines: Machine) -> list[set[int]]:
        """Which samples each of these machines owns, by the capacities of all of them."""
        chosen = sorted(machines or self.machines, key=lambda machine: machine.name)
        placement = Placement([m.name for m in chosen], [m.member.capacity for m in chosen])
        owners = placement.owners(np.arange(self.n))
        return [
            set(np.flatnonzero(owners == chosen.index(machine)).tolist())
            for machine in machines or self.machines
        ]

    def reads(self) -> int:
        """How many samples were read from the source since this was asked last."""
        total = self.log.total()
        self.log.reset()
        return total

    def order(self, seed: int, *, rank: int = 0, ranks: int = 1, size: int = 16) -> list[list[int]]:
        """Batches of an epoch of one of several ranks."""
        mine = np.random.default_rng(seed).permutation(self.n)[rank::ranks].tolist()
        return [mine[start : start + size] for start in range(0, len(mine), size)]

    def epoch(self, trainers: Sequence[Trainer], seed: int) -> list[Walk]:
        """All of these together walk all samples once."""
        for rank, trainer in enumerate(trainers):
            trainer.begin("walk", self.order(seed, rank=rank, ranks=len(trainers)))
        return [trainer.walked() for trainer in trainers]

    def close(self) -> None:
        with contextlib.ExitStack() as stack:  # all of it, also where one child has not ended as it should
            for machine in self.machines:
                stack.callback(shutil.rmtree, machine.folder)
            stack.callback(self.post.close)
            for machine in self.machines:
                stack.callback(machine.end)


@contextlib.contextmanager
def town(
    tmp_path: Path,
    make: Callable[[int], Any],
    n: int,
    *,
    count: int = 3,
    memory: int = 16 * MIB,
    seconds: float = 0.0,
    lease: float = NEVER,
) -> Iterator[Town]:
    """Some machines that know of each other.

    Args:
        tmp_path: for the directory's socket, and the log.
        make: gives the samples.
        n: how many there are.
        count: of machines.
        memory: of each one's session.
        seconds: that each reading of the source takes.
        lease: seconds that a sample is waited for which somebody has promised to read.
    """
    with pytest.MonkeyPatch.context() as patch:
        _stop_clocks(patch, lease)
        made = Town(tmp_path, make, n, seconds)
        try:
            made.post.open()
            made.add(count, memory)
            yield made
        finally:
            made.close()


def _stop_clocks(patch: pytest.MonkeyPatch, lease: float) -> None:
    """Have nothing in the children depend on how fast they are: they inherit what is set here."""
    patch.setattr(node, "BEAT_SECONDS", BEAT)
    patch.setattr(node, "_JOIN_SECONDS", SHORTLY)
    patch.setattr(node, "Member", partial(Member, patience=NEVER))
    patch.setattr(sockets, "_HEARTBEAT", 0)
    patch.setattr(sockets, "_HANDSHAKE", 0)
    patch.setattr(store_service, "LEASE", lease)
    patch.setattr(batch_fetch, "PATIENCE", lease)
    patch.setattr(fill, "_PATIENCE_SECONDS", NEVER)
    patch.setattr(joining, "_READY_SECONDS", SOON)
    patch.setattr(joining, "_LOOK_SECONDS", SHORTLY)
    patch.setattr(neighbours, "_CLEAR_SECONDS", 2 * NEVER)
    patch.setattr(peer_stats, "_PATIENCE", NEVER)
    patch.setattr(membership, "_LOOK_SECONDS", 0.0)  # who is there is known at once
