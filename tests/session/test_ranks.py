"""Ranks of one job share one cache without being told, in whatever order they come, die and come again.

Most ranks here are forked: their environment says that they are ranks, and this process is what launched
them. Real launches by torchrun are at the end.
"""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from helpers import equal_batches, eventually, failure, is_a_sentence, rarely, recorded
from kills import in_child
from samples import image_and_label, mapping
from samples import number as its_number
from sources import PlainError, ReadLog, Samples, Stalling
from stores import store_of
from torch.utils.data import Dataset
from torch.utils.data.distributed import DistributedSampler

import hotset
from hotset.dataset.dataset_proxy import current_of
from hotset.session import catalog, find_or_create, job
from hotset.session.named_lock import LOCK_FILE
from hotset.store.format import Geometry
from hotset.store.segment import Segment

N = 48
ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.usefixtures("patient")


@pytest.fixture(autouse=True)
def no_rank(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("LOCAL_RANK", "RANK", "WORLD_SIZE", "MASTER_PORT"):
        monkeypatch.delenv(variable, raising=False)


class Counted(Dataset[Any]):
    """Samples whose every read is logged; the log is no part of what they are."""

    def __init__(self, log: ReadLog, make: Callable[[int], Any] = mapping, n: int = N) -> None:
        self._hotset_log = log
        self.make = make
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> Any:
        self._hotset_log.add(index)
        return self.make(index)


class Rank:
    """A forked process that is a rank, and does one thing after the other on request.

    What it is to do is a function of its state, a namespace of its own.
    """

    def __init__(self, number: int, **environment: str) -> None:
        context = multiprocessing.get_context("fork")
        self.pipe, theirs = context.Pipe()
        environment = {"LOCAL_RANK": str(number), "MASTER_PORT": "29500"} | environment
        self.process = context.Process(target=_serve, args=(self.pipe, theirs, environment))
        self.process.start()
        theirs.close()

    def begin(self, action: Callable[..., Any], *arguments: Any) -> None:
        self.pipe.send((action, arguments))

    def answer(self, within: float = 60.0) -> Any:
        assert self.pipe.poll(within), "a rank does not answer"
        done, value = self.pipe.recv()
        assert done, value
        return value

    def do(self, action: Callable[..., Any], *arguments: Any) -> Any:
        self.begin(action, *arguments)
        return self.answer()

    def kill(self) -> None:
        self.process.kill()
        self.process.join()

    def end(self) -> None:
        """Let it end in order."""
        self.pipe.send(None)
        self.process.join(60)
        assert self.process.exitcode == 0


def _serve(ours: Any, pipe: Any, environment: dict[str, str]) -> None:
    ours.close()
    torch.set_num_threads(1)  # the parent's team is not there
    os.environ.update(environment)
    state: dict[str, Any] = {}
    while True:
        request = pipe.recv()
        if request is None:
            for value in state.values():
                value.close()
            return
        action, arguments = request
        try:
            pipe.send((True, action(state, *arguments)))
        except Exception as error:
            pipe.send((False, repr(error)))


@pytest.fixture
def start() -> Iterator[Callable[..., Rank]]:
    """Starts ranks, and ends all that are left."""
    started: list[Rank] = []

    def start(number: int, **environment: str) -> Rank:
        started.append(Rank(number, **environment))
        return started[-1]

    yield start
    for rank in started:
        rank.kill()
        rank.pipe.close()


# What ranks are asked to do


def make_cache(state: dict[str, Any], dataset: Any, name: str = "cached", **arguments: Any) -> list[str]:
    """Call hotset.cache; return its warnings."""
    with recorded() as caught:
        state[name] = hotset.cache(dataset, **arguments)
    return [str(w.message) for w in caught]


def make_with_key(state: dict[str, Any], dataset: Any) -> list[str]:
    return make_cache(state, dataset, key="one")


def nonce(state: dict[str, Any], name: str = "cached") -> str:
    found: str = store_of(state[name]).segment.nonce.hex()
    return found


def make_and_tell(state: dict[str, Any], dataset: Any) -> str:
    assert make_cache(state, dataset) == []
    return nonce(state)


def read_all(state: dict[str, Any]) -> int:
    cached = state["cached"]
    for i in range(len(cached)):
        equal_batches(cached[i], mapping(i))
    found: int = cached.stats().cached
    return found


def plan(state: dict[str, Any]) -> hotset.dataset.plan.Plan:
    return state["cached"].plan


def close(state: dict[str, Any], name: str = "cached") -> None:
    state.pop(name).close()


def quick(state: dict[str, Any], seconds: float) -> None:
    find_or_create.PATIENCE_SECONDS = seconds


def holders(runtime: Path) -> list[str]:
    return sorted(path.name for path in runtime.iterdir())


def collected(runtime: Path) -> bool:
    """Whether nothing is left but what the next start collects."""
    hotset.cache(Samples(mapping, 3)).close()
    return holders(runtime) == []


# Who is a rank, and of which job


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, False),
        ({"LOCAL_RANK": "0"}, True),
        ({"RANK": "0", "WORLD_SIZE": "2"}, True),
        ({"RANK": "0"}, False),
        ({"WORLD_SIZE": "2"}, False),
        ({"OMPI_COMM_WORLD_LOCAL_RANK": "1"}, True),
        ({"SLURM_LOCALID": "1", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4"}, True),
        ({"SLURM_LOCALID": "0", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "1"}, False),
        ({"SLURM_LOCALID": "0", "SLURM_JOB_ID": "7"}, False),
        ({"LOCAL_RANK": "-1", "LOCAL_WORLD_SIZE": "1"}, False),
        ({"LOCAL_RANK": "-1", "RANK": "-1", "WORLD_SIZE": "1"}, False),
        ({"LOCAL_RANK": "-1", "RANK": "0", "WORLD_SIZE": "2"}, True),
        ({"LOCAL_RANK": "", "LOCAL_WORLD_SIZE": "2"}, False),
        ({"LOCAL_RANK": "${SLURM_LOCALID}", "WORLD_SIZE": "2"}, False),
        ({"OMPI_COMM_WORLD_LOCAL_RANK": "none"}, False),
        ({"SLURM_LOCALID": "", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4"}, False),
    ],
)
def test_the_environment_says_who_is_a_rank(environment: dict[str, str], expected: bool) -> None:
    assert job.is_rank(environment) is expected
    assert bool(job.this_job(environment).takes) is expected


def test_a_launcher_is_known_by_more_than_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that has the number of one that died is another launcher."""
    environment = {"LOCAL_RANK": "0"}
    before = job.this_job(environment)
    assert job.this_job(environment) == before
    own, parent = job._process(os.getpid()), job._process(os.getppid())
    assert own[1:] != parent[1:]
    begun = psutil.boot_time() + int(own[2]) / os.sysconf("SC_CLK_TCK")
    assert begun == pytest.approx(psutil.Process().create_time(), abs=2.0)
    monkeypatch.setattr(job, "_process", lambda pid: (own[0], str(pid), "1"))
    assert not set(job.this_job(environment).offers) & set(before.takes)


def test_a_launcher_whose_state_is_hidden_is_known_by_its_number() -> None:
    assert job._process(1 << 30)[2] == ""


# Sharing


def test_ranks_that_come_at_once_share_one_cache(
    start: Callable[..., Rank], tmp_path: Path, runtime: Path
) -> None:
    log = ReadLog(tmp_path / "reads")
    ranks = [start(number) for number in range(4)]
    for rank in ranks:
        rank.begin(make_and_tell, Counted(log))
    assert len({rank.answer() for rank in ranks}) == 1
    probed = log.total()
    assert (probed, len(log.counts())) == (17, 8), "one of them alone has read samples to make the plan"
    for rank in ranks:
        rank.begin(read_all)
    for rank in ranks:
        assert rank.answer() >= N - 1
    assert log.total() - probed == N
    plans = [rank.do(plan) for rank in ranks]
    assert len({(p.sample_bytes, p.sample_seconds, p.limit, p.fingerprint) for p in plans}) == 1
    assert sum("of this job made the cache" in str(p) for p in plans) == 3
    for rank in ranks:
        rank.end()
    assert holders(runtime) == []


def test_what_reading_does_to_the_source_does_not_part_the_ranks(start: Callable[..., Rank]) -> None:
    """The fingerprint is taken before samples are read."""
    first, second = start(0), start(1)
    assert first.do(make_and_tell, Changing()) == second.do(make_and_tell, Changing())


class Changing(Samples):
    """Remembers what it has read."""

    def __init__(self) -> None:
        super().__init__(mapping, N)
        self.seen: list[int] = []

    def __getitem__(self, index: int) -> Any:
        self.seen.append(index)
        return super().__getitem__(index)


@hotset.deterministic
class Loading:
    """Counts its calls, and makes what it needs when it is called first."""

    def __init__(self) -> None:
        self.calls, self.weights = 0, None

    def __call__(self, sample: Any) -> Any:
        self.calls += 1
        self.weights = torch.ones(1) if self.weights is None else self.weights
        return sample


def make_with(state: dict[str, Any], transform: Any) -> Any:
    state["cached"] = hotset.cache(Samples(mapping, N), transform=[transform])
    return nonce(state)


def test_a_transform_that_is_another_once_it_was_called_does_not_part_the_ranks(
    start: Callable[..., Rank],
) -> None:
    first, second = start(0), start(1)
    assert first.do(make_with, Loading()) == second.do(make_with, Loading())


def test_what_differs_is_not_shared(start: Callable[..., Rank]) -> None:
    one = start(0).do(make_and_tell, Samples(mapping, N))
    assert start(1).do(make_and_tell, Samples(mapping, N)) == one
    apart = [
        start(2).do(make_and_tell, Samples(image_and_label, N)),
        start(3).do(make_and_tell, Samples(mapping, N - 1)),
        start(4, MASTER_PORT="29501").do(make_and_tell, Samples(mapping, N)),
        start(5, TORCHELASTIC_RUN_ID="other").do(make_and_tell, Samples(mapping, N)),
        _of_another_launcher(Samples(mapping, N)),
    ]
    with hotset.cache(Samples(mapping, N)) as cached:  # no rank: takes nothing
        apart.append(nonce({"cached": cached}))
    assert len({one, *apart}) == 7


GAIN = {"all": 1.0}


class Gained(Samples):
    """Reads a global."""

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((2,), index * GAIN["all"])


def begin_with_gain(state: dict[str, Any], gain: float) -> None:
    GAIN["all"] = gain
    state["pass"] = iter(hotset.DataLoader(state["cached"], batch_size=N))


def read_pass(state: dict[str, Any]) -> list[float]:
    return [float(row[0]) for batch in state.pop("pass") for row in batch]


@pytest.mark.parametrize("changed_reads_first", [False, True])
def test_a_rank_that_changes_a_global_before_any_sample_is_cached_has_a_cache_of_its_own(
    changed_reads_first: bool, start: Callable[..., Rank]
) -> None:
    """No cached sample could tell it then that the change counts."""
    gains = {start(0): 1.0, start(1): 3.0}
    for rank in gains:
        assert rank.do(make_cache, Gained(mapping, N)) == []
    for rank, gain in gains.items():
        rank.do(begin_with_gain, gain)
    for rank in sorted(gains, key=gains.__getitem__, reverse=changed_reads_first):
        assert rank.do(read_pass) == [gains[rank] * i for i in range(N)]


def test_one_key_for_data_sets_of_two_lengths_makes_two_caches(start: Callable[..., Rank]) -> None:
    ranks = [start(number) for number in range(3)]
    for rank, n in zip(ranks, (N, N - 1, N), strict=True):
        assert rank.do(make_with_key, Samples(mapping, n)) == []
    first, shorter, third = (rank.do(nonce) for rank in ranks)
    assert first == third != shorter


def _of_another_launcher(dataset: Any) -> str:
    """What a rank gets that a child of this process launches."""
    read, write = os.pipe()

    def launch() -> None:
        rank = Rank(0)
        os.write(write, rank.do(make_and_tell, dataset).encode())
        rank.kill()

    in_child(launch)
    with os.fdopen(write, "wb"), os.fdopen(read, "rb") as pipe:
        return pipe.read(32).decode()


def test_a_live_part_after_the_cut_lays_samples_out_otherwise(start: Callable[..., Rank]) -> None:
    first, second = start(0), start(1)
    assert first.do(make_cache, Samples(mapping, N)) == []
    assert second.do(_with_live, Samples(mapping, N)) == []
    assert first.do(nonce) != second.do(nonce)


def _with_live(state: dict[str, Any], dataset: Any) -> list[str]:
    return make_cache(state, dataset, transform=[_unchanged])


def _unchanged(sample: Any) -> Any:
    return sample


def test_a_rank_that_asks_twice_gets_the_same_content_and_two_things_to_close(
    start: Callable[..., Rank], tmp_path: Path, runtime: Path
) -> None:
    log = ReadLog(tmp_path / "reads")
    rank = start(0)
    first = rank.do(make_and_tell, Counted(log))
    assert rank.do(make_cache, Counted(log), "other") == []
    assert rank.do(nonce, "other") == first
    assert rank.do(read_all) == N
    log.reset()
    rank.do(close, "other")
    assert rank.do(read_all) == N
    assert rank.do(make_cache, Counted(log), "other") == []
    rank.do(close)  # what was listed first is closed, and the memory reached through the second
    later = start(1)
    assert later.do(make_and_tell, Counted(log)) == first
    assert later.do(read_all) == N
    assert log.total() == 0
    rank.do(_clear, "other")
    assert later.do(read_all) == N
    assert log.total() == N
    rank.end()
    later.end()
    assert holders(runtime) == []


def _clear(state: dict[str, Any], name: str) -> None:
    state[name].clear()


def test_the_first_ranks_memory_holds_and_anothers_is_told_in_its_plan(start: Callable[..., Rank]) -> None:
    first, second, third = (start(number) for number in range(3))
    assert first.do(_make_with_memory, "2MiB") == ""
    assert second.do(_make_with_memory, "1MiB") == ""
    assert third.do(_make_with_memory, "2 parsecs") == "QuantityError"
    plans = [rank.do(plan) for rank in (first, second)]
    assert [p.limit for p in plans] == [2 << 20] * 2
    assert ["'1MiB' has no effect" in str(p) for p in plans] == [False, True]


def _make_with_memory(state: dict[str, Any], memory: str) -> str:
    try:
        make_cache(state, Samples(mapping, N), memory=memory)
    except hotset.QuantityError as error:
        return type(error).__name__
    return ""


def test_a_source_that_is_refused_is_refused_in_every_rank(start: Callable[..., Rank], runtime: Path) -> None:
    ranks = [start(number) for number in range(2)]
    for rank in ranks:
        rank.begin(_refused)
    assert [rank.answer() for rank in ranks] == ["NotCacheable"] * 2
    assert holders(runtime) == []


def _refused(state: dict[str, Any]) -> str:
    return failure(lambda: hotset.cache(Samples(_draw, N))).kind.__name__


def _draw(index: int) -> Any:
    return torch.rand(3)


# Rank 0 as the launcher, as with Lightning


def test_ranks_take_what_their_parent_made_before_it_launched_them(
    start: Callable[..., Rank], tmp_path: Path
) -> None:
    log = ReadLog(tmp_path / "reads")
    with hotset.cache(Counted(log)) as cached:
        read_all({"cached": cached})
        log.reset()
        for number in (1, 2):
            rank = start(number)
            assert rank.do(make_and_tell, Counted(log)) == nonce({"cached": cached})
            assert rank.do(read_all) == N
        assert log.total() == 0


def test_a_parent_that_has_become_rank_0_takes_what_its_children_made(
    start: Callable[..., Rank], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = ReadLog(tmp_path / "reads")
    rank = start(1)
    made = rank.do(make_and_tell, Counted(log))
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("MASTER_PORT", "29500")
    log.reset()
    with hotset.cache(Counted(log)) as cached:
        assert nonce({"cached": cached}) == made
    assert log.total() == 0


# Death


@pytest.mark.parametrize(
    "order", rarely([[*order] for order in itertools.permutations(range(3))], [0, 2, 1], [1, 0, 2], [2, 0, 1])
)
def test_the_cache_lives_with_whichever_rank_is_left(
    order: list[int], start: Callable[..., Rank], tmp_path: Path, runtime: Path
) -> None:
    log = ReadLog(tmp_path / "reads")
    ranks = [start(number) for number in range(3)]
    (made,) = {rank.do(make_and_tell, Counted(log)) for rank in ranks}
    assert ranks[0].do(read_all) == N
    log.reset()
    for number in order[:2]:
        ranks[number].kill()
    # Restarted beside the last one, it finds the memory through that one, whoever made it.
    newcomer = start(order[0])
    assert newcomer.do(make_and_tell, Counted(log)) == made
    assert newcomer.do(read_all) == N
    assert log.total() == 0
    ranks[order[2]].kill()
    assert start(order[1]).do(make_and_tell, Counted(log)) == made
    assert log.total() == 0


def test_after_all_ranks_were_killed_new_ones_begin_anew(
    start: Callable[..., Rank], tmp_path: Path, runtime: Path
) -> None:
    """An elastic restart: the same launcher, the same environment."""
    log = ReadLog(tmp_path / "reads")
    seen = set()
    for _ in range(3):
        ranks = [start(number) for number in range(2)]
        for rank in ranks:
            rank.begin(make_and_tell, Counted(log))
        (made,) = {rank.answer() for rank in ranks}
        seen.add(made)
        assert [rank.do(read_all) for rank in ranks] == [N, N]
        assert holders(runtime) == [f"{made}.json"], "what the last ones left was collected"
        for rank in ranks:
            rank.kill()
    assert len(seen) == 3
    assert collected(runtime)


def test_a_creator_that_is_killed_at_its_first_sample_is_followed_by_the_next(
    start: Callable[..., Rank], tmp_path: Path, runtime: Path
) -> None:
    source = Stalling(mapping, N, 0, tmp_path / "armed")
    source.arm()
    ranks = [start(number) for number in range(3)]
    for rank in ranks:
        rank.begin(make_with_key, source)
    creator = source.stalled_pid()
    (first,) = (rank for rank in ranks if rank.process.pid == creator)
    others = [rank for rank in ranks if rank is not first]
    assert not any(rank.pipe.poll(0.2) for rank in others), "they wait for the one that makes the cache"
    os.kill(creator, signal.SIGKILL)
    assert [rank.answer() for rank in others] == [[], []]
    assert len({rank.do(nonce) for rank in others}) == 1
    assert [rank.do(read_all) for rank in others] == [N, N]
    for rank in others:
        rank.end()
    assert holders(runtime) == [], "the killed one's lock was taken over, and ended"


def test_a_child_forked_while_the_cache_was_made_does_not_keep_its_dead_parents_lock(
    start: Callable[..., Rank], tmp_path: Path
) -> None:
    first, second = start(0), start(1)
    first.begin(_share_and_fork, tmp_path / "child")
    assert eventually((tmp_path / "child").exists)
    first.kill()
    try:
        assert second.do(_share_thing) == []
    finally:
        os.kill(int((tmp_path / "child").read_text()), signal.SIGKILL)


def _share_and_fork(state: dict[str, Any], told: Path) -> None:
    def create() -> None:
        pid = os.fork()
        if pid == 0:
            signal.pause()
        told.with_suffix(".part").write_text(str(pid))
        told.with_suffix(".part").rename(told)
        signal.pause()

    find_or_create.find_or_create_in_job("thing", "thing", create=create, attach=_no)


def _share_thing(state: dict[str, Any]) -> list[str]:
    """Share a bare segment under the key "thing"; return the warnings."""
    made = Bare(Segment.create(Geometry(8, 64, 8, 0, 0), limit=1 << 20))
    with recorded() as caught:
        shared = find_or_create.find_or_create_in_job("thing", "thing", create=lambda: made, attach=_no)
    assert shared.value is made
    assert not shared.joined
    state["thing"], state["handle"] = made, shared.handle
    return [str(w.message) for w in caught]


class Bare:
    def __init__(self, segment: Segment) -> None:
        self.segment = segment

    def close(self) -> None:
        self.segment.close()


def _no(address: Any) -> Any:
    raise AssertionError("there is nothing to attach to")


def test_what_create_raises_comes_out_and_the_next_rank_creates(
    start: Callable[..., Rank], runtime: Path
) -> None:
    assert start(0).do(_share_failing) == "PlainError"
    assert holders(runtime) == []
    assert start(1).do(_share_thing) == []


def _share_failing(state: dict[str, Any]) -> str:
    def create() -> None:
        raise PlainError("broken")

    return failure(
        lambda: find_or_create.find_or_create_in_job("thing", "thing", create=create, attach=_no)
    ).kind.__name__


# Not being able to meet


def test_waiting_for_a_stopped_creator_is_bounded(
    start: Callable[..., Rank], tmp_path: Path, runtime: Path
) -> None:
    source = Stalling(mapping, N, 0, tmp_path / "armed")
    source.arm()
    first, second, third = (start(number) for number in range(3))
    first.begin(make_with_key, source)
    os.kill(source.stalled_pid(), signal.SIGSTOP)
    second.do(quick, 0.3)
    third.do(quick, 0.3)
    (warning,) = second.do(make_with_key, source)
    assert is_a_sentence(warning)
    assert "stopped" in warning
    assert second.do(read_all) == N
    # Who comes later shares at least that one.
    assert third.do(make_with_key, source) == []
    assert third.do(nonce) == second.do(nonce)
    source.disarm()
    os.kill(source.stalled_pid(), signal.SIGCONT)
    assert first.answer() == []
    assert first.do(read_all) == N
    for rank in (first, second, third):
        rank.end()
    assert holders(runtime) == []


def test_without_a_folder_to_meet_in_every_rank_has_its_own_cache_and_one_warning(
    start: Callable[..., Rank], runtime: Path
) -> None:
    runtime.chmod(0o755)
    ranks = [start(number) for number in range(2)]
    for rank in ranks:
        (warning,) = rank.do(make_cache, Samples(mapping, N))
        assert is_a_sentence(warning)
        assert "HOTSET_RUNTIME_DIR" in warning
        assert "other ranks" in warning
        assert rank.do(read_all) == N
    assert len({rank.do(nonce) for rank in ranks}) == 2
    runtime.chmod(0o700)
    assert holders(runtime) == []


@pytest.mark.parametrize("trap", ["symlink", "open to all", "hard link", "folder"])
def test_a_trap_in_place_of_the_lock_file_is_told_and_not_touched(
    trap: str, start: Callable[..., Rank], runtime: Path
) -> None:
    path = runtime / LOCK_FILE
    victim = runtime / "victim"  # a hard link stays on one file system
    victim.write_text("precious")
    victim.chmod(0o600)
    if trap == "symlink":
        path.symlink_to(victim)
    elif trap == "hard link":
        path.hardlink_to(victim)
    elif trap == "folder":
        path.mkdir()
    else:
        path.touch()
        path.chmod(0o666)
    before = path.lstat()
    (warning,) = start(0).do(_share_thing)
    assert is_a_sentence(warning)
    assert str(path) in warning
    assert victim.read_text() == "precious"
    assert (path.lstat().st_ino, path.lstat().st_mode) == (before.st_ino, before.st_mode)


def test_a_listing_that_leads_elsewhere_is_not_attached_to(start: Callable[..., Rank], runtime: Path) -> None:
    """The nonce in the memory decides, whatever a file in the list says."""
    first = start(0)
    made = first.do(make_and_tell, Samples(mapping, N))
    file = runtime / f"{made}.json"
    head = json.loads(file.read_bytes()[:4096])
    forged = "f" * 32
    other = runtime / f"{forged}.json"
    other.touch(mode=0o600)
    other.write_text(json.dumps(head | {"nonce": forged, "created": 1.0}))
    holder = catalog.CatalogHandle(forged, "forged")
    assert holder.join()
    assert start(1).do(make_and_tell, Samples(mapping, N)) == made
    holder.close()


# Hands that the cache passes through


@pytest.mark.parametrize("method", rarely(["fork", "spawn"], "spawn"))
def test_a_ranks_loader_workers_use_its_cache(
    method: str, start: Callable[..., Rank], tmp_path: Path
) -> None:
    log = ReadLog(tmp_path / "reads")
    rank = start(0)
    assert rank.do(make_cache, Counted(log, image_and_label)) == []
    log.reset()
    assert rank.do(_epoch, method) == N
    assert set(log.counts().values()) == {1}


def _epoch(state: dict[str, Any], method: str) -> int:
    loader = hotset.DataLoader(state["cached"], batch_size=8, num_workers=1, multiprocessing_context=method)
    return sum(len(labels) for _, labels in loader)


def test_unpickled_after_the_creators_death_it_is_found_with_another_rank(
    start: Callable[..., Rank], tmp_path: Path
) -> None:
    log = ReadLog(tmp_path / "reads")
    creator, other = start(0), start(1)
    assert creator.do(make_and_tell, Counted(log)) == other.do(make_and_tell, Counted(log))
    assert other.do(read_all) == N
    data = creator.do(_pickled)
    creator.kill()
    log.reset()
    with pickle.loads(data) as cached:
        assert read_all({"cached": cached}) == N
        other.kill()
        assert [entry.alive for entry in catalog.entries()] == [True]
        # Now only this process has the memory, which the pickle knows nothing of.
        assert start(2).do(_read_pickled, data) == N
    assert log.total() == 0


def _pickled(state: dict[str, Any]) -> bytes:
    return pickle.dumps(state["cached"])


def _read_pickled(state: dict[str, Any], data: bytes) -> int:
    state["cached"] = pickle.loads(data)
    return read_all(state)


def test_changing_shards_fill_the_cache_together(start: Callable[..., Rank], tmp_path: Path) -> None:
    log = ReadLog(tmp_path / "reads")
    ranks = [start(number) for number in range(2)]
    for rank in ranks:
        assert rank.do(make_cache, Counted(log)) == []
    log.reset()
    for epoch in range(3):
        for number, rank in enumerate(ranks):
            rank.begin(_shard, number, epoch)
        shards = [rank.answer() for rank in ranks]
        assert sorted(itertools.chain(*shards)) == list(range(N))
        assert log.total() == N, "each sample is read once, and none after the first epoch"
        assert set(log.counts().values()) == {1}


def _shard(state: dict[str, Any], number: int, epoch: int) -> list[int]:
    cached = state["cached"]
    sampler: DistributedSampler[Any] = DistributedSampler(cached, num_replicas=2, rank=number, seed=3)
    sampler.set_epoch(epoch)
    cached.set_epoch(epoch)
    loader = hotset.DataLoader(cached, batch_size=6, sampler=sampler, collate_fn=list)
    ids = list(sampler)
    for sample, i in zip(itertools.chain.from_iterable(loader), ids, strict=True):
        equal_batches(sample, mapping(i))
    return ids


def test_a_data_set_is_told_the_epoch_and_asked_to_be_declared() -> None:
    told = Told()
    with pytest.warns(hotset.HotsetWarning, match=r"deterministic\(dataset\)") as warned:
        cached = hotset.cache(told)
    assert warned[0].filename == __file__
    with cached, hotset.cache(cached) as twice:
        twice.set_epoch(3)
        assert told.epochs == [3]
    declared = hotset.deterministic(Told())
    with hotset.cache(declared) as cached:
        cached.set_epoch(1)
        assert declared.epochs == [1]
    with hotset.cache(Samples(mapping, 3)) as cached:
        cached.set_epoch(2)
        equal_batches(cached[1], mapping(1))


class Told(Samples):
    def __init__(self) -> None:
        super().__init__(mapping, N)
        self.epochs: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)


def test_two_lambdas_of_one_name_are_never_mistaken_for_one_another_between_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ranks meet by the names of transforms that only a trial can judge; what they do decides."""
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("MASTER_PORT", "29500")
    source = Samples(its_number, N)
    with hotset.cache(source, transform=lambda x: x + 1) as one:
        assert [one[i] for i in range(N)] == [its_number(i) + 1 for i in range(N)]
        with hotset.cache(source, transform=lambda x: x + 2) as other:
            assert other.plan.fingerprint != one.plan.fingerprint
            assert [other[i] for i in range(N)] == [its_number(i) + 2 for i in range(N)]
        with hotset.cache(source, transform=lambda x: x + 1) as same:
            assert same.plan.fingerprint == one.plan.fingerprint
            assert same.stats().cached == N, "shared"
    # By key the user says that it is one. What comes after the other's cut is live.
    with (
        hotset.cache(source, transform=lambda x: x + 1, key="ours") as one,
        hotset.cache(source, transform=[lambda x: x + 1, lambda x: 2 * x], key="ours") as other,
    ):
        assert [2 * one[i] for i in range(N)] == [other[i] for i in range(N)]


def test_a_key_is_not_shared_by_transforms_of_other_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("MASTER_PORT", "29500")
    source = Samples(its_number, N)
    with (
        hotset.cache(source, transform=_shifted, key="ours") as one,
        hotset.cache(source, transform=_doubled, key="ours") as other,
    ):
        assert [one[i] for i in range(N)] == [its_number(i) + 1 for i in range(N)]
        assert [other[i] for i in range(N)] == [2 * its_number(i) for i in range(N)]


def test_both_halves_of_a_data_set_that_was_cut_are_told_the_epoch() -> None:
    source = Cut()
    with hotset.cache(hotset.deterministic(source), cut=1) as cached:
        assert current_of(cached).source.dataset is not source
        cached.set_epoch(5)
        assert (source.epoch, current_of(cached).source.dataset.epoch) == (5, 5)


class Cut(Dataset[Any]):
    """Its own transform is cut after the first part, so that what is read is a copy of it."""

    def __init__(self) -> None:
        self.transform = [hotset.deterministic(_unchanged), _shifted]
        self.epoch = 0

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> Any:
        sample = torch.arange(4) + index
        for part in self.transform if isinstance(self.transform, list) else [self.transform]:
            sample = part(sample)
        return sample, index

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


def _shifted(value: torch.Tensor) -> torch.Tensor:
    return value + 1


def _doubled(value: torch.Tensor) -> torch.Tensor:
    return 2 * value


# Real launches


def torchrun(script: Path, ranks: int, *options: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), *options]
    return subprocess.Popen(
        [*command, str(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
    )


def output(launched: subprocess.Popen[str]) -> str:
    try:
        said, errors = launched.communicate(timeout=200)
    finally:
        launched.kill()
    assert launched.returncode == 0, errors
    return said


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def check_example(said: str, ranks: int) -> None:
    assert said.startswith(f"{ranks} ranks")
    assert "equal" in said
    assert "problems in the cache: []" in said
    # Less than one would mean that it had samples from another job's cache.
    (reads,) = re.findall(r"([\d.]+) per sample", said)
    # As many as ranks would mean that they share nothing; who stands still for long is read for by others.
    assert 1.0 <= float(reads) < 1.5


@pytest.mark.chaos  # six processes with torch; the test of restarts has two ranks that torchrun starts
def test_two_jobs_of_torchrun_at_once_train_like_without_a_cache_and_stay_apart(runtime: Path) -> None:
    ports = free_port(), free_port()
    jobs = [torchrun(ROOT / "examples" / "ddp.py", 2, "--master-port", port) for port in ports]
    for launched in jobs:
        check_example(output(launched), 2)
    assert holders(runtime) == []


@pytest.mark.chaos  # the test above has two ranks in each of two jobs
def test_four_ranks_read_each_sample_about_once(runtime: Path) -> None:
    check_example(output(torchrun(ROOT / "examples" / "ddp.py", 4, "--standalone")), 4)
    assert holders(runtime) == []


def test_ranks_that_torchrun_restarts_share_anew(runtime: Path, tmp_path: Path) -> None:
    script = tmp_path / "rank.py"
    script.write_text(RESTARTED)
    said = output(torchrun(script, 2, "--standalone", "--max-restarts", "1", "--monitor-interval", "0.1"))
    found = [line.split() for line in said.splitlines()]
    first = [nonce for restart, nonce in found if restart == "0"]
    second = [nonce for restart, nonce in found if restart == "1"]
    assert (len(first), len(second)) == (2, 2)
    assert len(set(first)) == len(set(second)) == 1
    assert first[0] != second[0]
    assert holders(runtime) == []


# Without torch, whose import takes longer than all of this. Both ranks have joined when one of them dies.
RESTARTED = """
import os, time
from hotset.session.find_or_create import find_or_create_in_job
from hotset.store.format import Geometry
from hotset.store.segment import Segment

class Bare:
    def __init__(self, segment):
        self.segment = segment

shared = find_or_create_in_job(
    "thing", "thing",
    create=lambda: Bare(Segment.create(Geometry(8, 64, 8, 0, 0), limit=1 << 20)),
    attach=lambda address: Bare(Segment.attach(address)),
)
index = shared.value.segment.index
restart = os.environ["TORCHELASTIC_RESTART_COUNT"]
index[int(os.environ["LOCAL_RANK"])] = 1
deadline = time.monotonic() + 60
while index[0] + index[1] < 2 and time.monotonic() < deadline:
    time.sleep(0.01)
os.write(1, f"{restart} {shared.value.segment.nonce.hex()}\\n".encode())
index[2 + int(os.environ["LOCAL_RANK"])] = 1
while index[2] + index[3] < 2 and time.monotonic() < deadline:
    time.sleep(0.01)
if restart == "0":
    if os.environ["LOCAL_RANK"] == "1":
        os.kill(os.getpid(), 9)
    time.sleep(60)
"""
