"""Sessions that live with change: an edited transform, caches that nobody uses any more, and a resize."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import is_a_sentence
from session_places import reboot, spilled
from torch.utils.data import Dataset
from typer.testing import CliRunner

import hotset
from hotset.cli.main import app
from hotset.errors import HotsetError
from hotset.session import sessions
from hotset.session.reclaim import reclaim, room_of
from hotset.session.reports import report
from hotset.session.session_files import retire

pytestmark = pytest.mark.usefixtures("runtime", "patient")

FORK = multiprocessing.get_context("fork")
N, ROW = 200, 4096
ALL = N * (ROW + 200)  # with what a record and its place take besides
ROOM = ALL * 5 // 4  # for one cache, and not for two


class Numbers(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((ROW // 4,), float(index))


class Scale:
    """The transform that is edited."""

    def __init__(self, factor: int) -> None:
        self.factor = factor

    def __call__(self, sample: torch.Tensor) -> torch.Tensor:
        return sample * self.factor


def train(factor: int, workers: int, orders: Connection) -> None:
    """A user's program: an epoch for each order."""
    told: list[str] = []
    warnings.showwarning = lambda message, *_: told.append(str(message))  # type: ignore[assignment]
    warnings.simplefilter("always")
    cached = hotset.cache(Numbers(), transform=[Scale(factor)], session="a")
    loader = hotset.DataLoader(cached, batch_size=10, num_workers=workers)
    orders.send("ready")
    while orders.recv():
        values: list[float] = []
        for batch in loader:
            assert (batch == batch[:, :1]).all()
            values += batch[:, 0].tolist()
        assert values == [factor * index for index in range(N)]
        found = cached.stats()
        orders.send((found.cached, found.misses, told))


class Job:
    """A process that trains; see :func:`train`."""

    def __init__(self, factor: int, workers: int = 0) -> None:
        self._orders, theirs = multiprocessing.Pipe()
        self._process = FORK.Process(target=train, args=(factor, workers, theirs))
        self._process.start()
        theirs.close()
        self.pid = self._process.pid or 0
        assert self._orders.recv() == "ready"

    def epoch(self) -> tuple[int, int, list[str]]:
        """Go over the data once; return how many are cached, how many were read, and what was warned of."""
        self._orders.send(True)
        found: tuple[int, int, list[str]] = self._orders.recv()
        return found

    def end(self) -> None:
        self._orders.send(False)
        self._process.join(100)
        assert self._process.exitcode == 0

    def kill(self) -> None:
        self._process.kill()
        self._process.join(100)


Start = Callable[..., Job]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts a job of the session "a"."""
    jobs: list[Job] = []

    def begin(factor: int, workers: int = 0) -> Job:
        jobs.append(Job(factor, workers))
        return jobs[-1]

    yield begin
    for job in jobs:
        job.kill()


def command(*arguments: str) -> str:
    done = CliRunner().invoke(app, ["session", *arguments], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def shown() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(command("show", "a", "--json"))
    return found


def run_once(start: Start, factor: int, **how: int) -> tuple[int, int, list[str]]:
    job = start(factor, **how)
    found = job.epoch()
    job.end()
    return found


def create(*options: str, memory: int = ROOM) -> None:
    command("create", "a", "--memory", str(memory), *options)


# An edited transform


@pytest.mark.parametrize("workers", [0, 2])
def test_an_edited_transform_finds_room(start: Start, workers: int) -> None:
    create()
    assert run_once(start, 2, workers=workers)[:2] == (N, N)
    job = start(3, workers=workers)
    cached, _, told = job.epoch()
    assert cached == N
    [sentence] = told
    assert "made room" in sentence
    assert "Numbers" in sentence
    assert "hotset session pin" in sentence
    assert job.epoch() == (N, N, told), "it is said once, and the second epoch reads nothing"
    job.end()
    [cache] = shown()["caches"]
    assert cache["cached"] == N
    assert run_once(start, 2)[:2] == (N, N), "the first one is made anew, and makes the second go"


def test_as_long_as_there_is_room_nothing_goes(start: Start) -> None:
    create(memory=ROOM * 2)
    assert run_once(start, 2) == (N, N, [])
    assert run_once(start, 3) == (N, N, [])
    assert run_once(start, 2) == (N, N, []), "and what is there is found"
    assert len(shown()["caches"]) == 2


def test_the_least_recently_used_goes_first(start: Start) -> None:
    create(memory=ROOM * 2)
    for factor in (2, 3, 2):  # that of 2 was made first, and used last
        run_once(start, factor)
    assert run_once(start, 4)[0] == N
    assert run_once(start, 2)[1] == N, "it was still there: nothing more was read"
    assert run_once(start, 3)[1] == N, "it was made anew"


def test_no_more_goes_than_is_needed_to_the_byte(start: Start) -> None:
    create(memory=ROOM * 2)
    run_once(start, 2)
    run_once(start, 3)
    session = sessions.find("a")
    held = [cache.memory for cache in report(session).caches]
    assert len(set(held)) == 1
    assert [one.bytes for one in reclaim(session, held[0])] == held[:1]
    assert len(report(session).caches) == 1


def test_what_runs_is_not_dropped_and_neither_is_what_is_stopped(start: Start) -> None:
    create()
    first = start(2)
    assert first.epoch()[0] == N
    os.kill(first.pid, signal.SIGSTOP)
    second = start(3)
    cached, _, told = second.epoch()
    assert cached < N
    assert len(told) == 1
    assert "no more fit" in told[0]
    os.kill(first.pid, signal.SIGCONT)
    assert first.epoch()[:2] == (N, N)
    first.end()
    deadline = time.monotonic() + 60
    while (found := second.epoch())[0] < N and time.monotonic() < deadline:
        time.sleep(0.1)
    assert found[0] == N, "a running job goes on filling once there is room"
    assert "made room" in found[2][-1]


def test_a_killed_job_uses_nothing(start: Start) -> None:
    create()
    first = start(2)
    assert first.epoch()[0] == N
    first.kill()
    assert run_once(start, 3)[0] == N


def test_jobs_that_come_at_once_share_what_a_third_one_left(start: Start) -> None:
    create(memory=ROOM * 2)
    run_once(start, 2)
    run_once(start, 3)
    jobs = [start(4), start(5)]
    assert [job.epoch()[0] for job in jobs] == [N, N]
    assert [job.epoch()[1] for job in jobs] == [N, N]


def test_who_needs_room_while_another_process_makes_it_waits_for_that(start: Start) -> None:
    create()
    run_once(start, 2)
    slowly = (
        "import time\n"
        "from hotset.session import reclaim, sessions\n"
        "remove = reclaim.remove_cache\n"
        "def slow(*where):\n"
        "    print('now', flush=True)\n"
        "    time.sleep(1)\n"
        "    return remove(*where)\n"
        "reclaim.remove_cache = slow\n"
        "reclaim.reclaim(sessions.find('a'), 1)\n"
    )
    job = start(3)
    other = subprocess.Popen([sys.executable, "-c", slowly], stdout=subprocess.PIPE, text=True)
    assert other.stdout is not None
    assert other.stdout.readline() == "now\n"
    assert job.epoch()[0] == N
    assert other.wait(100) == 0
    other.stdout.close()


def test_who_comes_for_a_cache_while_it_is_dropped_gets_the_right_samples(start: Start) -> None:
    """Two versions in turn, each begun while the other still runs or has just ended; values are checked."""
    create()
    before = start(2)
    for factor in (3, 2, 3, 2):
        before.epoch()
        job = start(factor)
        before.end()
        job.epoch()
        before = job
    assert before.epoch()[0] > 0


def test_what_it_spilled_goes_too(start: Start, disk: str) -> None:
    create("--spill", disk, memory=ALL // 2)
    assert run_once(start, 2)[0] == N
    [file] = spilled(disk)
    assert run_once(start, 3)[0] == N
    [other] = spilled(disk)
    assert other != file
    [cache] = shown()["caches"]
    assert cache["memory"] > ALL // 4, "memory was there for it"


def test_what_persists_stays_on_the_disk(start: Start, disk: str, runtime: Path) -> None:
    create("--spill", disk, "--persist")
    run_once(start, 2)
    assert run_once(start, 3)[0] == N
    assert len([file for file in spilled(disk) if file.endswith(".spill")]) == 2
    assert len(shown()["caches"]) == 1
    assert run_once(start, 2)[:2] == (N, 0), "what made room is read from the disk, not from the source"
    reboot(runtime)
    assert run_once(start, 3)[:2] == (N, 0)


# Pins


def test_a_pinned_cache_stays(start: Start) -> None:
    create()
    run_once(start, 2)
    [cache] = shown()["caches"]
    assert (cache["in_use"], cache["pinned"]) == (False, False)
    assert "Pinned Numbers" in command("pin", "a", str(cache["id"]))
    assert shown()["memory"]["unused"] == 0
    assert "pinned" in command("show", "a")
    cached, _, told = run_once(start, 3)
    assert cached < N
    assert "no more fit" in told[0]
    assert "Unpinned" in command("pin", "a", str(cache["id"]), "--off")
    assert run_once(start, 3)[0] == N


def test_what_is_pinned_is_no_room_for_others(start: Start) -> None:
    create()
    run_once(start, 2)
    held = room_of(sessions.find("a")).unused
    assert held > 0
    command("pin", "a", "Numbers")
    room = room_of(sessions.find("a"))
    assert (room.unused, room.used) == (0, held)


def test_what_cannot_be_pinned_is_said(start: Start) -> None:
    create(memory=ROOM * 2)

    def refusal() -> str:
        with pytest.raises(HotsetError) as caught:
            command("pin", "a", "Numbers")
        assert is_a_sentence(str(caught.value))
        return str(caught.value)

    assert "no cache" in refusal()
    run_once(start, 2)
    assert "Pinned Numbers" in command("pin", "a", "Numbers"), (
        "a name will do where there is one of that name"
    )
    run_once(start, 3)
    assert "several caches" in (said := refusal())
    assert all(str(cache["id"]) in said for cache in shown()["caches"])


# What could be dropped


def test_the_list_shows_what_could_be_dropped(start: Start) -> None:
    create()
    job = start(2)
    job.epoch()
    [found] = json.loads(command("list", "--json"))
    assert found["memory"]["unused"] == 0
    assert found["memory"]["used"] > 0
    [cache] = found["caches"]
    assert cache["in_use"]
    job.end()
    [found] = json.loads(command("list", "--json"))
    assert found["memory"]["unused"] == found["memory"]["used"] > 0
    assert "unused" in command("list")
    assert "of it unused" in command("show", "a")


# Resize


def test_a_job_that_found_the_session_full_goes_on_after_a_resize(start: Start) -> None:
    create(memory=ALL // 4)
    job = start(2)
    cached, _, told = job.epoch()
    assert 0 < cached < N // 2
    assert "no more fit" in told[0]
    assert "may hold" in command("resize", "a", "--memory", str(ROOM))
    deadline = time.monotonic() + 60
    while (found := job.epoch())[0] < N and time.monotonic() < deadline:
        time.sleep(0.1)
    assert found[0] == N
    assert len(found[2]) == 1, "nothing more is said"
    misses = job.epoch()[1]
    assert job.epoch()[1] == misses
    assert shown()["memory"]["limit"] == ROOM


def test_a_smaller_session_keeps_what_is_in_use_and_drops_what_is_not(start: Start) -> None:
    create(memory=ROOM * 2)
    run_once(start, 2)
    job = start(3)
    job.epoch()
    used = shown()["memory"]["used"]
    found = json.loads(command("resize", "a", "--memory", str(ALL // 2), "--json"))
    assert [dropped["name"] for dropped in found["dropped"]] == ["Numbers"]
    assert found["session"]["memory"]["used"] < used
    assert 0 < found["over"] < ROOM
    said = command("resize", "a", "--memory", str(ALL // 2))
    assert "in use or pinned" in said
    assert job.epoch()[:2] == (N, N), "what is in use stays"
    job.end()
    found = json.loads(command("resize", "a", "--memory", str(ALL // 4), "--json"))
    assert (found["over"], found["session"]["memory"]["used"], found["session"]["caches"]) == (0, 0, [])


def test_a_resize_outlives_a_reboot_with_the_session(disk: str, runtime: Path) -> None:
    create("--spill", disk, "--persist")
    command("resize", "a", "--memory", "3MiB")
    reboot(runtime)
    assert shown()["memory"]["limit"] == 3 << 20


@pytest.mark.parametrize("memory", ["-1", "12 parsecs", "1e9", "9" * 200])
def test_no_amount_is_a_sentence(memory: str) -> None:
    create()
    with pytest.raises(HotsetError) as caught:
        command("resize", "a", f"--memory={memory}")
    assert is_a_sentence(str(caught.value))
    assert shown()["memory"]["limit"] == ROOM


# Crashes


@pytest.mark.parametrize("at", ["retire", "remove_spilled", "unlink", "leave"])
def test_who_dies_while_dropping_leaves_nothing_for_good(start: Start, disk: str, at: str) -> None:
    create("--spill", disk)
    run_once(start, 2)
    die = (
        "import os, sys\n"
        "from hotset.session import session_files, reclaim, sessions\n"
        "from hotset.session.quota import Quota\n"
        "def die(*_): os._exit(7)\n"
        f"setattr(Quota if {at!r} == 'leave' else session_files, {at!r}, die)\n"
        "reclaim.reclaim(sessions.find('a'), 1)\n"
    )
    assert subprocess.run([sys.executable, "-c", die], timeout=100).returncode == 7
    assert run_once(start, 3)[0] == N
    assert len(shown()["caches"]) == 1
    assert run_once(start, 2)[0] == N


def test_who_wants_the_cache_that_its_remover_died_over_makes_it_anew(start: Start, runtime: Path) -> None:
    create(memory=ROOM * 2)
    run_once(start, 2)
    (cache,) = runtime.glob("*.cache")
    retire(str(cache))
    assert run_once(start, 2) == (N, N, [])
