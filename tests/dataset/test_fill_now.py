"""``cached.fill()``: everything is cached before training begins, as far as there is room."""

from __future__ import annotations

import os
import random
import signal
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import failure, is_a_sentence, recorded, rng_states, seed_everything
from kills import in_child
from programs import Programs
from samples import image_and_label
from sources import Armed, Counting, ReadLog, Samples
from torch.utils.data import Dataset

import hotset

N = 200


@pytest.fixture
def log(tmp_path: Path) -> ReadLog:
    return ReadLog(tmp_path / "reads")


@pytest.mark.parametrize("workers", [0, 2])
def test_each_sample_is_read_once_and_no_generator_moves(workers: int, log: ReadLog) -> None:
    with hotset.cache(Counting(image_and_label, N, log), memory="64MiB", key="x") as cached:
        log.reset()
        seed_everything()
        before = rng_states()
        cached.fill(num_workers=workers)
        assert rng_states() == before
        assert cached.stats().cached == N
        assert sorted(log.order()) == list(range(N))
        log.reset()
        cached.fill()
        assert sum(1 for _ in hotset.DataLoader(cached, 20)) == N // 20
        assert log.total() == 0


def test_two_processes_share_the_work(log: ReadLog) -> None:
    with hotset.cache(Counting(image_and_label, N, log, seconds=0.002), memory="64MiB", key="x") as cached:
        log.reset()
        children = threading.Thread(target=in_child, args=(cached.fill,))
        children.start()
        cached.fill()
        children.join()
        assert cached.stats().cached == N
        assert log.total() <= N + 8


def test_ctrl_c_keeps_what_was_read_and_the_next_call_reads_the_rest(log: ReadLog) -> None:
    with hotset.cache(Counting(image_and_label, N, log, seconds=0.005), memory="64MiB", key="x") as cached:
        timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        try:
            with pytest.raises(KeyboardInterrupt):
                cached.fill()
        finally:
            timer.join()
        assert 0 < (first := cached.stats().cached) < N
        log.reset()
        cached.fill()
        assert cached.stats().cached == N
        assert N - first <= log.total() <= N - first + 2


class OpenFile:
    def __init__(self, path: Path) -> None:
        self.number = os.open(path, os.O_RDONLY)

    def __del__(self) -> None:
        os.close(self.number)


class InOneFile(Dataset[torch.Tensor]):
    """Opens its file as it reads first, so that each worker has its own place in it."""

    file: Any = None

    def __init__(self, path: Path) -> None:
        self.path = path
        path.write_bytes(torch.arange(N).repeat_interleave(512).numpy().tobytes())

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.file is None:
            self.file = OpenFile(self.path)
        os.lseek(self.file.number, 4096 * index, os.SEEK_SET)
        return torch.frombuffer(bytearray(os.read(self.file.number, 4096)), dtype=torch.int64)


@pytest.mark.parametrize("workers", [0, 2])
def test_forked_workers_do_not_share_a_file_that_filling_has_opened(workers: int, tmp_path: Path) -> None:
    dataset = InOneFile(tmp_path / "numbers")
    with hotset.cache(dataset, memory=N * 1024) as cached, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cached.fill(num_workers=workers)
        assert dataset.file is None
        assert 0 < cached.stats().cached < N
        got = torch.cat(list(hotset.DataLoader(cached, 8, num_workers=2)))
        assert torch.equal(got, torch.arange(N)[:, None].expand(N, 512))


@pytest.mark.parametrize("workers", [0, 1, 2, 3])
def test_a_full_cache_is_told_once_whichever_process_finds_it(workers: int) -> None:
    with hotset.cache(Samples(image_and_label, 1000), memory="40KiB") as cached:
        with recorded() as told:
            cached.fill(num_workers=workers)
        said = [str(one.message) for one in told if "max number of worker" not in str(one.message)]
        assert len(said) == 1
        assert "raise `memory=`" in said[0]
        with recorded() as told:
            cached.fill(num_workers=workers)
        assert not [one for one in told if "raise `memory=`" in str(one.message)]


class Raising(Armed):
    def misbehave(self) -> None:
        raise OSError("sample 77 cannot be read")


@pytest.mark.parametrize("workers", [0, 1])
def test_what_the_dataset_raises_is_raised(workers: int, tmp_path: Path) -> None:
    source = Raising(image_and_label, N, 77, tmp_path / "armed")
    with hotset.cache(source, memory="64MiB", key="x") as cached:
        source.arm()
        with pytest.raises(OSError, match="sample 77 cannot be read"):
            cached.fill(num_workers=workers)
        source.disarm()
        cached.fill(num_workers=workers)
        assert cached.stats().cached == N


def test_a_bar_moves_no_generator(programs: Programs, tmp_path: Path) -> None:
    """In a process of its own: the library that draws it moves Python's generator as it is first imported."""
    program = tmp_path / "program.py"
    program.write_text("""
import random, sys, hotset
assert "rich" not in sys.modules
cached = hotset.cache([float(number) for number in range(20)], memory="1MiB")
before = random.getstate()
cached.fill(progress=True)
print(random.getstate() == before)
""")
    done = programs.run([str(program)], tmp_path)
    assert done.stdout == "True\n", done.stderr


@pytest.mark.parametrize("workers", [0, 1])
def test_without_room_it_ends_early_with_one_warning(workers: int, log: ReadLog) -> None:
    source = Counting(lambda index: torch.full((50_000,), index, dtype=torch.uint8), N, log)
    with hotset.cache(source, memory="1MiB", key="x") as cached:
        log.reset()
        with pytest.warns(hotset.HotsetWarning, match="no more fit") as told:
            cached.fill(num_workers=workers)
        assert len([each for each in told if each.category is hotset.HotsetWarning]) == 1
        assert 5 < cached.stats().cached < N
        assert log.total() < N, "what would not be kept is not read"


def test_samples_that_draw_stay_uncached_and_are_named() -> None:
    def make(index: int) -> Any:
        return torch.tensor([random.random() if index == 50 else 0.0, float(index)])

    with hotset.cache(Samples(make, N), memory="64MiB", key="x") as cached:
        with pytest.warns(hotset.HotsetWarning, match="50"):
            cached.fill()
        assert cached.stats().cached == N - 1


def test_a_bar_shows_samples_mebibytes_and_the_time_left(capsys: pytest.CaptureFixture[str]) -> None:
    with hotset.cache(Samples(image_and_label, N), memory="64MiB", key="x") as cached:
        cached.fill(progress=True)
    shown = capsys.readouterr().err
    assert f"{N}/{N}" in shown
    assert "MiB" in shown
    assert "samples/s" in shown


@pytest.mark.parametrize("wrong", [-1, 1.5, "two", True])
def test_a_number_of_workers_that_is_none_is_refused(wrong: Any) -> None:
    with hotset.cache(Samples(image_and_label, N), memory="64MiB", key="x") as cached:
        found = failure(lambda: cached.fill(num_workers=wrong))
        assert found.kind is hotset.ArgumentError
        assert is_a_sentence(found.text)


def test_a_window_fills_itself() -> None:
    with hotset.cache(Samples(image_and_label, N), window=hotset.Window(resident=20)) as cached:
        found = failure(cached.fill)
    assert found.kind is hotset.ArgumentError
    assert is_a_sentence(found.text)


def test_where_nothing_can_be_cached_nothing_is_read(log: ReadLog) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", hotset.HotsetWarning)
        cached = hotset.cache(Counting(lambda index: object(), N, log), memory="64MiB", key="x")
    with cached:
        log.reset()
        cached.fill()
        assert log.total() == 0
