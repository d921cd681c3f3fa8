"""A window in several processes: ranks that share one, killed helpers and main processes, and exits.

Ranks are forked processes with the environment of ranks (``test_ranks.py``). A rank with another port belongs
to another job, and has a cold cache of its own.
"""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import textwrap
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import test_ranks
from helpers import eventually, is_a_sentence, rarely, recorded
from kills import gone
from programs import Programs
from resuming import through_a_checkpoint
from sources import ReadLog, Samples, Stalling
from test_ranks import Counted, Rank, make_cache, nonce
from test_window import QUARTER, D, Gated, N, R, Reference, cursor_of, loader_over, numbers, ready, tagged
from torch.utils.data.distributed import DistributedSampler

import hotset
from hotset.dataset.dataset_proxy import current_of
from hotset.errors import HotsetWarning
from hotset.policy.window import RunningWindow

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.usefixtures("patient")
Start = Callable[..., Rank]
Run = Callable[..., tuple[subprocess.CompletedProcess[str], list[int]]]
no_rank, start = test_ranks.no_rank, test_ranks.start  # fixtures


@pytest.fixture
def source(tmp_path: Path) -> Iterator[Gated]:
    found = Gated(tmp_path)
    yield found
    found.open()


def helpers_of(pid: int | None = None) -> list[psutil.Process]:
    """The processes that prepare samples: all living children without Python's own."""
    found = []
    for child in psutil.Process(pid).children(recursive=True):
        try:
            line = child.cmdline()
        except psutil.Error:  # it has just died
            continue
        if not any("from multiprocessing" in word and "spawn_main" not in word for word in line):
            found.append(child)
    return found


# ---- ranks -------------------------------------------------------------------------------------------


def make_loader(state: dict[str, Any], number: int, ranks: int, workers: int) -> None:
    """A loader over this rank's part of the window."""
    cached = state["cached"]
    sampler: Any = DistributedSampler(cached, num_replicas=ranks, rank=number, seed=5)
    state["loader"] = Loader(hotset.DataLoader(cached, batch_size=2, sampler=sampler, num_workers=workers))


class Loader:
    """The loader that a rank keeps between requests; closed with the rank."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self.batches: Any = None

    def close(self) -> None:
        self.batches = self.loader = None


def epoch(state: dict[str, Any], number: int) -> list[int]:
    """The samples of one epoch, set on the sampler only; each must be whole."""
    state["loader"].loader.sampler.set_epoch(number)
    return numbers(state["loader"].loader)


def begin(state: dict[str, Any], number: int, count: int) -> list[int]:
    """The first batches of an epoch."""
    state["loader"].loader.sampler.set_epoch(number)
    state["loader"].batches = iter(state["loader"].loader)
    return numbers(itertools.islice(state["loader"].batches, count))


def rest(state: dict[str, Any]) -> list[int]:
    return numbers(state["loader"].batches)


def prepared(state: dict[str, Any]) -> None:
    ready(state["cached"])


def position(state: dict[str, Any]) -> Any:
    return tuple(current_of(state["cached"]).window.position)


def saved(state: dict[str, Any]) -> Any:
    return state["loader"].loader.state_dict()


def load(state: dict[str, Any], from_state: Any) -> None:
    state["loader"].loader.load_state_dict(through_a_checkpoint(from_state))


def stats(state: dict[str, Any]) -> Any:
    # Not the bytes, and not the time: helpers go on storing what comes next.
    return replace(state["cached"].stats(), bytes=0, fill_seconds=0.0)


def all_do(ranks: list[Rank], action: Any, *arguments: Any) -> list[Any]:
    """Run on all ranks at once; ``arguments`` may hold a list with one value for each."""
    for number, rank in enumerate(ranks):
        rank.begin(action, *(a[number] if isinstance(a, list) else a for a in arguments))
    return [rank.answer() for rank in ranks]


def launched(
    begin_rank: Start, dataset: Any, window: Any, ranks: int, workers: int = 0, **environment: str
) -> list[Rank]:
    started = [begin_rank(number, **environment) for number in range(ranks)]
    for number, rank in enumerate(started):
        rank.begin(_make, dataset, window, number, ranks, workers)
    assert [rank.answer() for rank in started] == [[]] * ranks
    return started


def _make(
    state: dict[str, Any], dataset: Any, window: Any, number: int, ranks: int, workers: int
) -> list[str]:
    told = make_cache(state, dataset, window=window)
    make_loader(state, number, ranks, workers)
    return told


@pytest.mark.parametrize(("ranks", "workers"), rarely([(2, 0), (2, 2), (3, 0)], (3, 0)))
def test_unlike_monais_ranks_share_one_window_and_each_has_its_part(
    ranks: int,
    workers: int,
    start: Start,
    tmp_path: Path,
) -> None:
    """In MONAI each rank has its own cache, its own threads and its own random order."""
    window = hotset.Window(12, replace=0.25, wait=True)
    log = ReadLog(tmp_path / "reads")
    started = launched(start, Counted(log, tagged, 48), window, ranks, workers)
    log.reset()
    assert len({rank.do(nonce) for rank in started}) == 1
    reference = Reference(Samples(tagged, 48), window)
    for number in range(6):
        parts = all_do(started, epoch, number)
        assert sorted(itertools.chain(*parts)) == sorted(reference.at(number, 3 * number).order)
        assert [len(part) for part in parts] == [12 // ranks] * ranks
        assert {rank.do(position) for rank in started} == {(number, 3 * number, 0)}, "moved once"
    read = log.counts()
    assert set(read.values()) == {1}, "each sample is read by one of them, when it comes in"
    assert 12 + 15 <= len(read) <= 12 + 18
    assert len({rank.do(stats) for rank in started}) == 1
    for rank in started:
        rank.end()


def test_a_rank_some_batches_behind_keeps_its_epoch(start: Start) -> None:
    """The first rank has begun the next epoch; the second ends its own with the same samples."""
    first, second = launched(start, Samples(tagged, D), QUARTER, 2)
    reference = Reference(Samples(tagged, D), QUARTER)
    early, late = all_do([first, second], begin, 0, 1)
    early += first.do(rest)
    second_epoch = first.do(begin, 1, 1)
    late += second.do(rest)
    assert sorted(early + late) == sorted(reference.order)
    second_epoch += second.do(epoch, 1) + first.do(rest)
    assert sorted(second_epoch) == sorted(reference.at(1, R).order)
    assert first.do(position) == second.do(position) == (1, R, 0)


def test_a_killed_rank_leaves_the_window_to_the_others(start: Start, tmp_path: Path) -> None:
    log = ReadLog(tmp_path / "reads")
    first, second = launched(start, Counted(log, tagged, D), QUARTER, 2)
    log.reset()
    all_do([first, second], epoch, 0)
    first.do(prepared)  # a helper that is killed in its midst leaves a sample to be read again
    helpers = helpers_of(first.process.pid)
    assert helpers
    first.kill()
    assert eventually(lambda: all(gone(helper.pid) for helper in helpers))
    reference = Reference(Samples(tagged, D), QUARTER)
    for number in range(1, 5):
        part = second.do(epoch, number)
        assert len(part) == N // 2
        assert set(part) < set(reference.at(number, R * number).order)
    assert set(log.counts().values()) == {1}


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_new_job_with_a_cold_cache_resumes_in_mid_epoch(
    ranks: int,
    start: Start,
) -> None:
    before = launched(start, Samples(tagged, D), QUARTER, ranks)
    all_do(before, epoch, 0)
    all_do(before, epoch, 1)
    parts = all_do(before, begin, 2, 1)
    states = all_do(before, saved)
    expected = [all_do(before, rest), *(all_do(before, epoch, number) for number in range(3, 9))]
    for rank in before:
        rank.kill()
    after = launched(start, Samples(tagged, D), QUARTER, ranks, MASTER_PORT="29501")
    all_do(after, load, states)
    got = [all_do(after, begin, 2, 99), *(all_do(after, epoch, number) for number in range(3, 9))]
    assert got == expected
    used = [*itertools.chain(*parts), *itertools.chain(*got[0])]
    assert sorted(used) == sorted(Reference(Samples(tagged, D), QUARTER).at(2, 2 * R).order)
    assert {rank.do(position) for rank in after} == {(8, 8 * R, 0)}


def test_a_new_job_resumes_between_epochs(start: Start) -> None:
    before = launched(start, Samples(tagged, D), QUARTER, 2)
    for number in range(3):
        all_do(before, epoch, number)
    states = all_do(before, saved)
    expected = [all_do(before, epoch, number) for number in range(3, 6)]
    after = launched(start, Samples(tagged, D), QUARTER, 2, MASTER_PORT="29501")
    all_do(after, load, states)
    assert [all_do(after, epoch, number) for number in range(3, 6)] == expected
    assert {rank.do(position) for rank in after} == {(5, 5 * R, 0)}


# ---- deaths ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 2])
def test_a_killed_helper_gives_one_warning_and_filling_continues(
    workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "hotset.dataset.active_window._STARTING_SECONDS", 600.0
    )  # what is late then is not told
    source = Stalling(tagged, D, int(RunningWindow(D, N, 2 * R).entries(N + 1, 1)[0]), tmp_path / "armed")
    told: list[str] = []
    with hotset.cache(source, window=hotset.Window(N, replace=0.25)) as cached:
        source.arm()
        loader = loader_over(cached, num_workers=workers)
        numbers(loader)
        os.kill(source.stalled_pid(), signal.SIGKILL)
        assert eventually(lambda: gone(source.stalled_pid()))
        source.disarm()
        with recorded() as caught:
            for _ in range(12):
                assert len(set(numbers(loader))) == N
                ready(cached)
        told = [str(w.message) for w in caught]
        assert cursor_of(cached) >= 11 * R - 2 * R
        assert cached.check() == []
    assert len(told) == 1
    assert "killed by signal 9" in told[0]
    assert is_a_sentence(told[0])


def test_helpers_that_are_killed_again_and_again_make_no_sample_wrong() -> None:
    with hotset.cache(Samples(tagged, 200), window=hotset.Window(40, replace=0.5)) as cached:
        loader = loader_over(cached, batch_size=8)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", HotsetWarning)
            for round in range(20):
                assert len(set(numbers(loader))) == 40
                if round % 2:
                    for helper in helpers_of():
                        helper.kill()
            assert eventually(lambda: len(numbers(loader)) == 40 and cursor_of(cached) > 100)
        assert cached.check() == []


SCRIPT = """
import itertools, os, signal
from samples import image_and_label
from sources import Samples
from test_window import tagged
import hotset

def main():
    cached = hotset.cache(Samples(tagged, 2000), window=hotset.Window(100, replace=0.5))
    loader = hotset.DataLoader(cached, batch_size=10, num_workers=2, persistent_workers=True)
    for number in itertools.count():
        for batch in loader:
            pass
        if number == 1:
            import psutil
            print(*(p.pid for p in psutil.Process().children(recursive=True)), flush=True)
            {then}

if __name__ == "__main__":
    main()
"""


@pytest.fixture
def run(programs: Programs, tmp_path: Path) -> Run:
    """A function that runs a program with helpers, and returns how it ended and which children it had."""

    def run(then: str, **how: bool) -> tuple[subprocess.CompletedProcess[str], list[int]]:
        path = tmp_path / "program.py"
        path.write_text(textwrap.dedent(SCRIPT.format(then=then)))
        done = programs.run([str(path)], ROOT, {"OMP_NUM_THREADS": "1"}, **how)
        return done, [int(pid) for pid in done.stdout.split()]

    return run


def test_a_killed_main_process_leaves_nothing(run: Run) -> None:
    done, children = run("os.kill(os.getpid(), signal.SIGKILL)")
    assert done.returncode == -signal.SIGKILL
    assert len(children) >= 2, "helpers, at least"
    assert eventually(lambda: all(gone(pid) for pid in children))
    assert eventually(lambda: hotset.cache(Samples(tagged, 3)).close() is None and not _memory_held())


def _memory_held() -> list[str]:
    listed = Path(os.environ["HOTSET_RUNTIME_DIR"]).iterdir()
    return [path.name for path in listed if path.suffix == ".json"]


def test_the_end_of_the_program_is_the_end_of_its_helpers(run: Run) -> None:
    done, children = run("return", ends_whole=True)
    assert children
    assert (done.returncode, done.stderr) == (0, "")
    assert eventually(lambda: all(gone(pid) for pid in children))


def test_no_helper_remains_after_close_drop_or_exit() -> None:
    def helpers_after(use: Callable[[Any, Any], None]) -> list[psutil.Process]:
        cached = hotset.cache(Samples(tagged, D), window=hotset.Window(N, replace=0.25))
        loader = loader_over(cached)
        numbers(loader)
        assert helpers_of()
        use(cached, loader)
        return helpers_of()

    assert helpers_after(lambda cached, _: cached.close()) == []
    assert helpers_after(lambda cached, _: cached.__exit__(None, None, None)) == []
    helpers_after(lambda *_: None)
    assert eventually(lambda: helpers_of() == []), "dropped"
