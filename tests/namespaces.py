"""Machines that have a network, a ``/dev/shm`` and a host name of their own, with Ray on each of them.

They are namespaces of the kernel's, which only root can make; all that is in them ends with them::

    switch ── bridge ──┬── eth0 10.77.0.1   machine 0: Ray's head
       │               ├── eth0 10.77.0.2   machine 1
       │               └── eth0 10.77.0.3   machine 2: whose cable is made slow; that of 1 or 2 is pulled
       └── 10.78.0.9 ───── eth1 10.78.0.1   machine 0's way to another network, where strangers are

The switch has no address on the bridge, so that nobody but the machines is in their network. What happens to
it is the program's: ``python tests/namespaces.py play FOLDER NAME`` prints what came of each claim, a line of
JSON, for ``test_cluster_namespaces`` to look at; nothing is judged here.
"""

from __future__ import annotations

import contextlib
import ctypes
import heapq
import json
import logging
import multiprocessing
import os
import secrets
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import ray_rank
from helpers import difference, eventually, seed_everything
from live import flip_and_crop
from ray_patient import PATIENCE
from ray_rank import BATCH, SAMPLES, Picture, Rank, SharedLog, all_wait, let_go
from sources import Samples, Transformed
from torch.utils.data import DataLoader, DistributedSampler

import hotset
from hotset.cluster import ray_join as joining
from hotset.cluster.ray_actors import NAMESPACE, directory_name
from hotset.dataset.dataset_proxy import current_of

__all__ = ["MACHINES", "remains", "remove"]

HERE = Path(__file__).parent
MACHINES = 3
HEAD = "10.77.0.1"
RAYLET = 7001
MEMORY = SAMPLES * 4096  # room for all, as none of what is claimed here is about room
# BPF's assembly of "IPv4, TCP, SYN without ACK, to a port from 32768 to 60999": drop it.
CLOSED = (
    "13,40 0 0 12,21 0 10 2048,48 0 0 23,21 0 8 6,177 0 0 14,80 0 0 27,84 0 0 18,21 0 4 2,"
    "72 0 0 16,53 0 2 32768,37 1 0 60999,6 0 0 2,6 0 0 0"
)


# ---- the network -----------------------------------------------------------------------------------------


class Cannot(Exception):
    """What this kernel has not got, or this user may not do; nothing of hotset's."""


def run(*command: str) -> str:
    """Run a command; what it prints.

    Raises:
        Cannot: it fails, with what it says of that.
    """
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except OSError as error:
        raise Cannot(f"{command[0]}: {error.strerror}") from error
    if done.returncode:
        raise Cannot(f"`{' '.join(command)}` says {done.stderr.strip() or done.returncode}")
    return done.stdout


def _names(name: str) -> list[str]:
    """The namespaces of a network: the switch, and the machines."""
    return [f"{name}-switch", *(f"{name}-{number}" for number in range(MACHINES))]


def _folder(name: str) -> Path:
    return Path("/tmp", name)  # a short path, as Ray's sockets lie in it


def remains(name: str) -> list[str]:
    """What is there of a network."""
    there = [line.split()[0] for line in run("ip", "netns", "list").splitlines()]
    return [*sorted(set(there) & set(_names(name))), *map(str, Path("/tmp").glob(name))]


def remove(name: str) -> None:
    """Remove a network, with every process that is in it; nothing happens if there is none."""
    for namespace in _names(name):
        with contextlib.suppress(Cannot):
            while found := run("ip", "netns", "pids", namespace).split():
                for pid in found:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(int(pid), signal.SIGKILL)
                time.sleep(0.05)
            run("ip", "netns", "delete", namespace)
    shutil.rmtree(_folder(name), ignore_errors=True)


@contextlib.contextmanager
def sent(namespace: str, do: Callable[[Connection], None]) -> Iterator[Connection]:
    """A child that calls something in another network, with a pipe to here; killed when the block ends."""
    context = multiprocessing.get_context("fork")
    pipe, theirs = context.Pipe()

    def body() -> None:
        with open(f"/run/netns/{namespace}") as file:
            assert ctypes.CDLL(None).setns(file.fileno(), 0) == 0
        do(theirs)

    process = context.Process(target=body)
    process.start()
    theirs.close()
    try:
        yield pipe
    finally:
        process.kill()
        process.join()


class Machine:
    """One machine of a network."""

    def __init__(self, network: Network, number: int) -> None:
        self._network, self.number = network, number
        self.name, self.address = _names(network.name)[1 + number], f"10.77.0.{1 + number}"
        run("ip", "netns", "add", self.name)
        network.lay_cable(self, "eth0", f"port{number}", self.address)
        network.switch("ip", "link", "set", f"port{number}", "master", "bridge")
        self.inside("ip", "link", "set", "lo", "up")
        private, shared = network.folder / str(number), network.folder / "ray"
        private.mkdir()
        begin = (
            f"echo machine{number} > /proc/sys/kernel/hostname && mount -t tmpfs -o mode=1777 tmpfs /dev/shm "
            f"&& mount --bind {private} {shared} && echo here && exec sleep infinity"
        )
        self._root = subprocess.Popen(
            ["ip", "netns", "exec", self.name, "unshare", "--uts", "sh", "-c", begin],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self._root.stdout is not None
        if self._root.stdout.readline() != "here\n":
            raise Cannot(f"a machine of its own says {self._root.communicate()[1].strip()}")

    def inside(self, *command: str) -> str:
        """Run a command in this machine's network."""
        return run("ip", "netns", "exec", self.name, *command)

    def start(self, *command: str, **how: Any) -> subprocess.Popen[str]:
        """Start a program on this machine."""
        enter = ["nsenter", "--target", str(self._root.pid), "--net", "--mount", "--uts"]
        return subprocess.Popen([*enter, *command], text=True, env=self._network.environment, **how)

    def join_ray(self) -> None:
        """Start Ray here."""
        where = [f"--address={HEAD}:6379"]
        if self.number == 0:
            where = ["--head", "--port=6379", "--include-dashboard=false"]
        # Its ports are given, so that none that others reach is one that the system chooses.
        ports = [f"--node-manager-port={RAYLET}", f"--object-manager-port={RAYLET + 1}"]
        rest = ["--num-cpus=1", "--object-store-memory=80000000", "--disable-usage-stats", "--block"]
        words = [f"--node-ip-address={self.address}", *where, *ports, *rest]
        ray = str(Path(sys.executable).with_name("ray"))
        with open(self._network.folder / f"said-{self.number}", "w") as file:
            self.start(ray, "start", *words, stdout=file, stderr=file)

    def close(self) -> None:
        self._root.kill()
        self._root.communicate()


class Network:
    """Machines, and the switch between them; a context manager.

    Args:
        name: of its namespaces and its folder.

    Raises:
        Cannot: they cannot be made here.
    """

    def __init__(self, name: str) -> None:
        self.name, self.folder = name, _folder(name)
        self.machines: list[Machine] = []
        # A token of its own, whatever this user has for other clusters.
        token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        paths = {"RAY_TMPDIR": str(self.folder / "ray"), "PYTHONPATH": f"{HERE}:{HERE.parent}"}
        self.environment = {**os.environ, **token, **paths}
        for foreign in ("RAY_ADDRESS", "HOTSET_RUNTIME_DIR"):
            self.environment.pop(foreign, None)
        try:
            (self.folder / "ray").mkdir(parents=True)
            run("ip", "netns", "add", _names(name)[0])
            self.switch("ip", "link", "add", "bridge", "type", "bridge")
            self.switch("ip", "link", "set", "bridge", "up")
            for number in range(MACHINES):
                self.machines.append(Machine(self, number))
            self.lay_cable(self.machines[0], "eth1", "outside", "10.78.0.1")
            self.switch("ip", "address", "add", "10.78.0.9/24", "dev", "outside")
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Network:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        remove(self.name)
        for machine in self.machines:
            machine.close()

    def switch(self, *command: str) -> str:
        """Run a command in the switch."""
        return run("ip", "netns", "exec", _names(self.name)[0], *command)

    def lay_cable(self, machine: Machine, device: str, port: str, address: str) -> None:
        """Lay a cable from a device of a machine to a port of the switch."""
        there = ["peer", "name", port, "netns", _names(self.name)[0]]
        run("ip", "link", "add", device, "netns", machine.name, "type", "veth", *there)
        machine.inside("ip", "address", "add", f"{address}/24", "dev", device)
        machine.inside("ip", "link", "set", device, "up")
        self.switch("ip", "link", "set", port, "up")

    def start_ray(self) -> None:
        """Start Ray on all machines; first on the one that the others join."""
        for machines in (self.machines[:1], self.machines[1:]):
            for machine in machines:
                machine.join_ray()
            for machine in machines:
                said = self.folder / f"said-{machine.number}"
                if not eventually(lambda said=said: "Ray runtime started" in said.read_text(), PATIENCE):
                    raise RuntimeError(said.read_text()[-2000:])

    @contextlib.contextmanager
    def closed(self, *numbers: int) -> Iterator[None]:
        """Machines that drop what would open a connection to a port that the system has chosen for them.

        That is ours, and none of Ray's.
        """
        for number in numbers:
            inside = self.machines[number].inside
            inside("tc", "qdisc", "add", "dev", "eth0", "clsact")
            bpf = ["bpf", "direct-action", "bytecode", CLOSED]
            inside("tc", "filter", "add", "dev", "eth0", "ingress", *bpf)
        try:
            yield
        finally:
            for number in numbers:
                self.machines[number].inside("tc", "qdisc", "delete", "dev", "eth0", "clsact")

    def pull(self, number: int) -> None:
        """Pull a machine's cable."""
        self.switch("ip", "link", "set", f"port{number}", "down")

    def plug(self, number: int) -> None:
        """Plug it in again."""
        self.switch("ip", "link", "set", f"port{number}", "up")

    @contextlib.contextmanager
    def narrow(self, number: int, rate: str) -> Iterator[None]:
        """A machine whose cable carries so much, each way."""
        queue = ["root", "tbf", "rate", rate, "burst", "32kb", "latency", "400ms"]
        ends = (self.switch, f"port{number}"), (self.machines[number].inside, "eth0")
        for execute, device in ends:
            execute("tc", "qdisc", "add", "dev", device, *queue)
        try:
            yield
        finally:
            for execute, device in ends:
                execute("tc", "qdisc", "delete", "dev", device, "root")

    @contextlib.contextmanager
    def far(self, number: int, seconds: float) -> Iterator[None]:
        """A machine to which, and from which, everything takes so long."""
        port = f"port{number}"
        self.switch("ip", "link", "add", "near", "type", "veth", "peer", "name", "bend")
        self.switch("ip", "link", "set", "bend", "master", "bridge", "up")
        self.switch("ip", "link", "set", "near", "up")
        try:
            with sent(_names(self.name)[0], lambda pipe: delay(port, "near", seconds, pipe)) as pipe:
                pipe.recv()
                self.switch("ip", "link", "set", port, "nomaster")
                yield
        finally:
            self.switch("ip", "link", "set", port, "master", "bridge")
            self.switch("ip", "link", "delete", "near")


def delay(one: str, other: str, seconds: float, pipe: Connection) -> None:
    """Pass on what comes at either of two devices at the other one, later; for the life of the process.

    Args:
        one, other: the devices.
        seconds: how much later.
        pipe: is told when it begins.
    """
    ends = []
    for device in (one, other):
        end = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
        # With the header that says what the sender has left to its card: sums, and cutting into packets.
        end.setsockopt(263, 15, 1)  # SOL_PACKET, PACKET_VNET_HDR
        end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16 << 20)
        end.bind((device, 3))  # ETH_P_ALL
        ends.append(end)
    pipe.send(None)
    waiting: list[tuple[float, int, int, bytes]] = []
    count = 0
    while True:
        now = time.monotonic()
        while waiting and waiting[0][0] <= now:
            _, _, to, packet = heapq.heappop(waiting)
            with contextlib.suppress(OSError):
                ends[to].send(packet)
        patience = waiting[0][0] - now if waiting else None
        for ready in select.select(ends, [], [], patience)[0]:
            packet, (_, _, kind, *_) = ready.recvfrom(1 << 17)
            if kind != socket.PACKET_OUTGOING:
                count += 1
                heapq.heappush(waiting, (time.monotonic() + seconds, count, int(ready is ends[0]), packet))


# ---- ranks -----------------------------------------------------------------------------------------------


def opens(host: str, port: int) -> bool:
    """Whether a port of a machine can be connected to from here."""
    try:
        with socket.create_connection((host, port), timeout=1.0):
            return True
    except OSError:
        return False


class Stepper(Rank):
    """A rank that takes the time of its steps; one on each machine."""

    def steps(
        self, number: int, rank: int, workers: int = 0, pause: float = 0.0, hold: str = ""
    ) -> dict[str, Any]:
        """Read this rank's part of an epoch; says what was wrong with it, and how long it took.

        Args:
            number: of the epoch.
            rank: whose part it is.
            workers: of the loaders.
            pause: seconds of training in each step.
            hold: stop after the fifth batch, until :func:`let_go` is called with this.
        """
        sampler: Any = DistributedSampler(range(SAMPLES), MACHINES, rank, seed=5)  # type: ignore[arg-type]
        sampler.set_epoch(number)
        uncached: Any = Transformed(Samples(Picture(0), SAMPLES), [flip_and_crop])
        seed_everything(number)
        expected = list(DataLoader(uncached, BATCH, sampler=sampler, num_workers=workers))
        cached = self._cached[0]
        before, begun, waits, wrong = cached.stats(), time.monotonic(), [], []
        with ray_rank._caught() as told:
            seed_everything(number)
            batches = iter(hotset.DataLoader(cached, BATCH, sampler=sampler, num_workers=workers))
            for step, right in enumerate(expected, 1):
                asked = time.monotonic()
                got = next(batches, None)
                waits.append(time.monotonic() - asked)
                found = difference(got, right)
                wrong += [f"batch {step}: {found}"] if found else []
                if hold and step == 5:
                    ray_rank._wait_at(hold, rank)
                time.sleep(pause)
            wrong += [f"{len(more)} batches too many"] if (more := list(batches)) else []
        seconds, after = time.monotonic() - begun, cached.stats()
        return {
            "wrong": wrong[:2],
            "told": told,
            "longest": round(max(waits), 3),
            "seconds": round(seconds, 2),
            "peer_hits": after.peer_hits - before.peer_hits,
            "misses": after.misses - before.misses,
        }

    def opens(self, host: str, port: int) -> bool:
        return opens(host, port)

    def received(self) -> dict[str, int]:
        """How many samples have come from each other machine so far."""
        return {name: peer.received for name, peer in current_of(self._cached[0]).remote.traffic().items()}

    def directory(self, session: str) -> str:
        """The address of the machine that a session's directory is on: it is Ray that chooses one."""
        import ray

        ray.init("auto", log_to_driver=False, logging_level=logging.ERROR)
        try:
            actor = ray.get_actor(directory_name(session), namespace=NAMESPACE)
            where = actor.__ray_call__.remote(lambda _: ray.util.get_node_ip_address())
            return str(ray.get(where, timeout=PATIENCE))
        finally:
            ray.shutdown()

    def stop(self, session: str) -> int:
        """End a session, on all machines."""
        return joining.stop("auto", session)


class Ordered:
    """A rank, on its machine, as it is ordered about; see :func:`ray_rank.main`."""

    def __init__(self, machine: Machine, folder: Path) -> None:
        self.number = machine.number
        command = [sys.executable, __file__, "rank", str(folder)]
        self._process = machine.start(*command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def begin(self, order: str, **arguments: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([order, arguments]) + "\n")
        self._process.stdin.flush()

    def answer(self) -> Any:
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], 2 * PATIENCE)[0]:
            raise RuntimeError(f"rank {self.number} has not answered")
        said = json.loads(self._process.stdout.readline() or '{"raised": "it has ended"}')
        if "raised" in said:
            raise RuntimeError(f"rank {self.number}: {said['raised']}")
        return said["answer"]

    def ask(self, order: str, **arguments: Any) -> Any:
        self.begin(order, **arguments)
        return self.answer()


# ---- what happens ----------------------------------------------------------------------------------------


class Play:
    """What happens, in the order of `PLOT`; each method is a claim, and returns what came of it."""

    def __init__(self, network: Network, folder: Path) -> None:
        self.network, self.folder = network, folder
        self.log = SharedLog(folder, 0)
        self.log.reset()
        self.ranks = [Ordered(machine, folder) for machine in network.machines]

    def each(self, order: str, **arguments: Any) -> list[Any]:
        """Have all ranks do something at once."""
        for rank in self.ranks:
            rank.begin(order, **arguments)
        return [rank.answer() for rank in self.ranks]

    def begin(self, number: int, **named: Any) -> Callable[[], dict[str, Any]]:
        """Begin an epoch of all ranks; what waits for it, and says how often the source was read in it."""
        self.log.reset()
        for rank in self.ranks:
            rank.begin("steps", number=number, rank=rank.number, **named)
        return lambda: {"ranks": [rank.answer() for rank in self.ranks], "reads": self.log.total()}

    def epoch(self, number: int, **named: Any) -> dict[str, Any]:
        return self.begin(number, **named)()

    def cache(self, session: str) -> dict[str, Any]:
        """Begin a session; what it is like to begin it, and where each machine reaches each."""
        cached = self.each("cache", data=0, session=session, memory=str(MEMORY))
        known = self.each("members")
        deadline = time.monotonic() + 20
        while any(len(each) < len(self.ranks) for each in known) and time.monotonic() < deadline:
            time.sleep(0.5)  # each hears of the others by heartbeats, one a second
            known = self.each("members")
        ends = [[endpoint for _, endpoint, _ in each] for each in known]
        return {"cache": cached, "endpoints": ends}

    def closed(self) -> Any:
        """A session in which nobody can connect to two of the machines."""
        with self.network.closed(1, 2):
            found = {**self.cache("closed"), "epochs": [self.epoch(0), self.epoch(1)]}
            self.each("close")
            return {**found, "freed": self.ranks[1].ask("stop", session="closed")}

    def opened(self) -> Any:
        found = self.cache("opened")
        # Whose cable is pulled: not where Ray's head is, nor the directory, which Ray may have put anywhere.
        away = self.ranks[0].ask("directory", session="opened") == self.network.machines[2].address
        self.cut = 1 if away else 2
        return {**found, "epochs": [self.epoch(2), self.epoch(3), self.epoch(4, workers=2)]}

    def doors(self) -> Any:
        """Who can connect to machine 0; where to Ray is said too, so that there is a way for others."""
        ends = [endpoint for _, endpoint, _ in self.ranks[0].ask("members")]
        port = next(int(end.rpartition(":")[2]) for end in ends if f"//{HEAD}:" in end)
        return {
            "a machine": self.ranks[1].ask("opens", host=HEAD, port=port),
            "itself, by loopback": self.ranks[0].ask("opens", host="127.0.0.1", port=port),
            "itself, by loopback, to Ray": self.ranks[0].ask("opens", host="127.0.0.1", port=RAYLET),
            "a stranger": self._opens_to_stranger("10.78.0.1", port),
            "a stranger, to Ray": self._opens_to_stranger("10.78.0.1", RAYLET),
            "who has no way there": opens(HEAD, port),
        }

    def _opens_to_stranger(self, host: str, port: int) -> bool:
        outside = _names(self.network.name)[0]
        with sent(outside, lambda pipe: pipe.send(opens(host, port))) as pipe:
            return pipe.recv() is True

    def narrow(self) -> Any:
        with self.network.narrow(2, "20mbit"):
            return self.epoch(5)

    def far(self) -> Any:
        with self.network.far(2, 0.02):
            return self.epoch(6)

    def known(self) -> list[int]:
        """How many machines each knows of."""
        return [len(members) for members in self.each("members")]

    def unplugged(self) -> Any:
        """In the midst of an epoch, and until the others have noticed."""
        hold = f"{self.folder}/hold"
        running = self.begin(7, hold=hold, pause=0.05)
        assert all_wait(hold, 0, 1, 2)
        pulled = time.monotonic()
        self.network.pull(self.cut)
        let_go(hold)
        epochs = [running()]
        while self.known().count(2) < 2 and time.monotonic() - pulled < PATIENCE:
            epochs.append(self.epoch(7 + len(epochs), pause=0.05))
        epochs.append(self.epoch(29))
        seconds = round(time.monotonic() - pulled, 1)
        return {"cut": self.cut, "epochs": epochs, "known": self.known(), "seconds": seconds}

    def plugged(self) -> Any:
        """Until all is as it was."""
        self.network.plug(self.cut)
        begun, epochs = time.monotonic(), []
        while time.monotonic() - begun < PATIENCE:
            before = self.each("received")
            epochs.append(self.epoch(30 + len(epochs), pause=0.02))
            after = self.each("received")
            if self.known() == [3, 3, 3] and epochs[-1]["reads"] == 0:
                break
        came = [
            {name.rpartition("-")[0]: now[name] - then.get(name, 0) for name in now}
            for then, now in zip(before, after, strict=True)
        ]
        seconds = round(time.monotonic() - begun, 1)
        return {"epochs": epochs, "known": self.known(), "received": came, "seconds": seconds}


PLOT = [Play.closed, Play.opened, Play.doors, Play.narrow, Play.far, Play.unplugged, Play.plugged]
# What asks the kernel for more than networks, as filters and queues, which it may have been built without.
WANTS_MORE = {Play.closed, Play.narrow, Play.far}


def play(folder: Path, name: str) -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("told to end"))
    begun = time.monotonic()

    def say(claim: str, came: dict[str, Any]) -> None:
        print(json.dumps({"claim": claim, "at": round(time.monotonic() - begun, 1), **came}), flush=True)

    try:
        network = Network(name)
    except Cannot as error:
        say("network", {"cannot": str(error)})
        return
    with network:
        say("network", {})
        network.start_ray()
        this = Play(network, folder)
        say("ray", {})
        for claim in PLOT:
            try:
                came = claim(this)
            except Exception as error:
                lacks = isinstance(error, Cannot) and claim in WANTS_MORE
                came = {"cannot": str(error)} if lacks else {"raised": traceback.format_exc()}
            say(claim.__name__, came)


def main(what: str, *words: str) -> None:
    if what == "play":
        play(Path(words[0]), words[1])
    elif what == "rank":
        ray_rank.Rank = Stepper  # type: ignore[misc]
        sys.argv = ["rank", *words]
        ray_rank.main()


if __name__ == "__main__":
    main(*sys.argv[1:])
