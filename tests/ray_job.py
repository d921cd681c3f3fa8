"""What happens to a Ray cluster, and to the jobs on it: ``python tests/ray_job.py FOLDER``.

There are three machines at the beginning. What comes of each claim is printed, a line of JSON, for
``test_cluster_ray`` to look at: nothing is judged here. All that was started ends with the program, also when
it is told to end.

::

    small     a session whose machines can hold little more than a third each: epochs, status, stop
    wide      a session with room for all of the data on any two machines: all else, in the order of `PLOT`
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import ray
from helpers import eventually
from ray_machines import RAY_GIVES_UP, Machine, Machines, Plain
from ray_patient import HOOK, PATIENCE
from ray_rank import SAMPLES, Rank, SharedLog, all_wait, let_go

from hotset.cluster import ray_join as joining

RECORD = 3 * 32 * 32 + 24
# Shares are drawn at random: this is five of their standard deviations more than a third.
SMALL = int(SAMPLES * RECORD / 2.65)
WIDE = 4 * SMALL


def small_actors() -> list[str]:
    """The actors of the small session that Ray still knows of."""
    named = ray.util.list_named_actors(all_namespaces=True)
    return [str(actor["name"]) for actor in named if "small" in str(actor["name"])]


class Play:
    """What happens, in the order of `PLOT`; each method is a claim, and returns what came of it."""

    def __init__(self, folder: Path, machines: Machines) -> None:
        self.folder, self.machines = folder, machines
        self.logs = [SharedLog(folder, data) for data in (0, 1)]
        for log in self.logs:
            log.reset()
        # The first machine's folder is theirs too.
        self.plain = [Plain(folder, machines.memory / name) for name in ("0", "0", "nowhere")]
        self.ranks: list[Any] = []
        with socket.create_server(("127.0.0.1", 0)) as closed:
            address = f"127.0.0.1:{closed.getsockname()[1]}"
        self.plain[2].send("cache", data=0, session="none", address=address)

    # ---- helpers -------------------------------------------------------------------------------------

    def rank(self, machine: Machine) -> Any:
        return ray.remote(Rank).options(**machine.here).remote(str(self.folder))

    def each(self, method: str, *arguments: Any, **named: Any) -> list[Any]:
        """Have all ranks do something at once."""
        return list(ray.get([getattr(rank, method).remote(*arguments, **named) for rank in self.ranks]))

    def begin(self, number: int, **named: Any) -> list[Any]:
        """Begin an epoch of all ranks."""
        world = len(self.ranks)
        return [rank.epoch.remote(number, i, world, **named) for i, rank in enumerate(self.ranks)]

    def epochs(self, *numbers: int, **named: Any) -> list[dict[str, Any]]:
        """Epochs of all ranks, one after the other, with the reads of each."""
        found = []
        for number in numbers:
            self.logs[0].reset()
            ranks = ray.get(self.begin(number, **named))
            found.append({"ranks": ranks, **self.reads()})
        return found

    def reads(self, data: int = 0) -> dict[str, int]:
        """How often the source was read since its log was begun; in all, and the sample that was most."""
        counts = self.logs[data].counts()
        return {"reads": counts.total(), "most": max(counts.values(), default=0)}

    def status(self) -> list[dict[str, Any]]:
        return joining.status(self.machines.address, "wide")

    def until(self, count: int) -> float:
        """Wait until all ranks know of so many machines; the seconds that it took, or -1 if they do not."""
        start = time.monotonic()
        known = eventually(lambda: all(len(m) == count for m in self.each("members")), PATIENCE)
        return round(time.monotonic() - start, 2) if known else -1.0

    # ---- small ---------------------------------------------------------------------------------------

    def start(self) -> Any:
        while len(self.machines.all) < 3:
            self.machines.add()
        quiet = {"log_to_driver": False, "logging_level": logging.ERROR}
        ray.init(self.machines.address, namespace="a job", runtime_env=HOOK, **quiet)
        self.ranks = [self.rank(machine) for machine in self.machines.all]
        return {"cache": self.each("cache", 0, "small", SMALL), **self.reads()}

    def share(self) -> Any:
        first, second, third = [*self.epochs(0, 1), *self.epochs(2, workers=2)]
        held, damage = self.each("held"), self.each("damage")
        return {"first": first, "later": [second, third], "held": held, "damage": damage}

    def end_session(self) -> Any:
        address = self.machines.address
        before = joining.status(address, "small")
        bytes_before = [machine.taken() for machine in self.machines.all]
        freed = joining.stop(address, "small")
        eventually(lambda: not small_actors())
        try:
            after = str(joining.status(address, "small"))
        except Exception as error:
            after = f"{type(error).__name__}: {error}"
        return {
            "status": before,
            "freed": freed,
            "actors": small_actors(),
            "before": bytes_before,
            "after": [machine.taken() for machine in self.machines.all],
            "status after": after,
            "epoch": self.epochs(3),
            "closed": self.each("close"),
        }

    # ---- wide ----------------------------------------------------------------------------------------

    def two_jobs(self) -> Any:
        """One job of three ranks, in Ray; one of two, outside; other data; at the same time."""
        address = self.machines.address
        self.each("cache", 0, "wide", WIDE)
        cached = [p.send("cache", data=1, session="wide", address=address) for p in self.plain[:2]]
        told = [plain.answer() for plain in cached]
        found = []
        for number in (4, 5):
            for log in self.logs:
                log.reset()
            ours = self.begin(number)
            for i, plain in enumerate(self.plain[:2]):
                plain.send("epoch", number=number, rank=i, world=2, data=1)
            theirs = [plain.answer() for plain in self.plain[:2]]
            found.append({"ranks": ray.get(ours) + theirs, "reads": [self.reads(0), self.reads(1)]})
        return {"cache": told, "epochs": found}

    def second_job(self) -> Any:
        self.logs[0].reset()
        plain, address = self.plain[0], self.machines.address
        cached = plain.send("cache", data=0, session="wide", address=address).answer()
        epoch = plain.send("epoch", number=6).answer()
        where = [plain.send("machine").answer(), ray.get(self.ranks[0].machine.remote())]
        return {"cache": cached, "epoch": epoch, "where": where, **self.reads()}

    def without_ray(self) -> Any:
        self.logs[0].reset()
        plain = self.plain[0]
        plain.send("forget_ray").answer()
        return {"epoch": plain.send("epoch", number=7, workers=2).answer(), **self.reads()}

    def task(self) -> Any:
        def train(folder: str) -> Any:
            rank = Rank(folder)
            return {"cache": rank.cache(0, "wide"), "epoch": rank.epoch(8)}

        self.logs[0].reset()
        run: Any = ray.remote(train).options(**self.machines.all[1].here)
        return {**ray.get(run.remote(str(self.folder))), **self.reads()}

    def kill_node_actor(self) -> Any:
        machine = ray.get(self.ranks[1].machine.remote())

        def said() -> dict[str, Any]:
            return next((known for known in self.status() if known["name"] == machine), before)

        before: dict[str, Any] = {}
        before = said()
        os.kill(before["pid"], signal.SIGKILL)
        eventually(lambda: said()["pid"] != before["pid"], PATIENCE)
        after = said()
        eventually(lambda: self._know_all([machine, after["endpoint"], after["key"]]), PATIENCE)
        return {"before": before, "after": after, "epochs": self.epochs(9)}

    def _know_all(self, member: list[Any]) -> bool:
        return all(member in known for known in self.each("members"))

    def kill_directory(self) -> Any:
        before = self._directory()
        os.kill(before[0], signal.SIGKILL)
        fewest, start, again = 9, time.monotonic(), float("inf")
        while time.monotonic() - start < PATIENCE and time.monotonic() < again + 2.5:
            fewest = min(fewest, *(len(known) for known in self.each("members")))
            if again == float("inf"):
                with contextlib.suppress(Exception):
                    again = time.monotonic() if len(self.status()) == 3 else again
            time.sleep(0.1)
        return {
            "before": before,
            "after": self._directory(),
            "fewest": fewest,
            "status": len(self.status()),
            "epochs": self.epochs(10),
        }

    def _directory(self) -> list[int]:
        """Processes of the directory."""
        every = psutil.Process().children(recursive=True)
        names = {process.pid: process.cmdline() for process in every if process.is_running()}
        return [pid for pid, line in names.items() if line and line[0].startswith("ray::DirectoryActor")]

    def lose_machine(self) -> Any:
        """In the midst of an epoch."""
        held = self.each("held")
        hold = f"{self.folder}/hold-lose"
        running = self.begin(11, hold=hold)
        assert all_wait(hold, 0, 1, 2)
        self.machines.lose(self.machines.all[2])
        let_go(hold)
        midst = ray.get(running[:2])
        del self.ranks[2]
        seconds = self.until(2)
        again, after = self.epochs(12, 13)
        return {"held": held, "midst": midst, "noticed": seconds, "again": again, "after": after}

    def gain_machine(self) -> Any:
        self.ranks.append(self.rank(self.machines.add()))
        self.logs[0].reset()
        cached = ray.get(self.ranks[2].cache.remote(0, "wide", WIDE))
        reads, seconds = self.reads(), self.until(3)
        machine = ray.get(self.ranks[2].machine.remote())
        epochs = self.epochs(14, 15, 16)

        def served() -> dict[str, Any]:
            found: dict[str, Any] = next(each for each in self.status() if each["name"] == machine)["served"]
            return found

        eventually(lambda: served()["records"] > 0.05 * SAMPLES, PATIENCE)  # says one of its next beats
        return {
            "cache": cached,
            "probe": reads,
            "known": seconds,
            "epochs": epochs,
            "held": self.each("held"),
            "served": served(),
        }

    def end_cluster(self) -> Any:
        """In the midst of an epoch of a job that is not Ray's."""
        plain, hold = self.plain[1], f"{self.folder}/hold-end"
        cached = plain.send("cache", data=0, session="wide", address=self.machines.address).answer()
        plain.send("epoch", number=17, hold=hold)
        assert all_wait(hold, 0)
        self.machines.shutdown()
        let_go(hold)
        found = [plain.answer()]
        time.sleep(2 * RAY_GIVES_UP)
        found.append(plain.send("epoch", number=18, workers=2).answer())
        return {"cache": cached, "epochs": found, "held": plain.send("held").answer()}

    def no_cluster(self) -> Any:
        """It was asked for at the beginning, at a port where nothing listens."""
        return self.plain[2].answer()


PLOT = [
    Play.start,
    Play.share,
    Play.end_session,
    Play.two_jobs,
    Play.second_job,
    Play.without_ray,
    Play.task,
    Play.no_cluster,
]
DEATHS = [
    Play.kill_node_actor,
    Play.kill_directory,
    Play.lose_machine,
    Play.gain_machine,
    Play.end_cluster,
]


def main(folder: Path, plot: list[Callable[[Play], Any]]) -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("told to end"))
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what Ray prints
    with Machines() as machines, contextlib.ExitStack() as stack:
        play = Play(folder, machines)
        for plain in play.plain:
            stack.callback(plain.end)
        for claim in plot:
            start = time.monotonic()
            try:
                came = claim(play)
            except Exception:
                came = {"raised": traceback.format_exc()}
            seconds = round(time.monotonic() - start, 1)
            print(json.dumps({"claim": claim.__name__, "seconds": seconds, **came}), file=answers, flush=True)
            if not play.ranks:
                break


if __name__ == "__main__":
    main(Path(sys.argv[1]), PLOT + (DEATHS if sys.argv[2:] == ["deaths"] else []))
