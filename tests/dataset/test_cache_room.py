"""Too little memory, or a far too large limit: the cache keeps what fits, warns once, and stays right."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import equal_batches, is_a_sentence, memory_files, recorded
from kills import in_child
from PIL import Image
from samples import half_megabyte, kilobyte
from sources import Counting, ReadLog, Samples

import hotset


@pytest.fixture
def caught() -> Iterator[list[warnings.WarningMessage]]:
    with recorded() as found:
        yield found


def _hotsets(caught: list[warnings.WarningMessage]) -> list[str]:
    assert [str(w.message) for w in caught if not issubclass(w.category, hotset.HotsetWarning)] == []
    return [str(w.message) for w in caught]


def test_too_little_memory_caches_what_fits_with_one_warning(caught: list[warnings.WarningMessage]) -> None:
    with hotset.cache(Samples(half_megabyte, 64), memory="8MB") as cached:
        for _ in range(3):
            for i in range(64):
                equal_batches(cached[i], half_megabyte(i))
        stats = cached.stats()
        assert 8 <= stats.cached <= 15
        assert stats.bytes <= 8_000_000
        assert stats.hits >= 2 * stats.cached
        said = _hotsets(caught)
        assert len(said) == 1
        assert "memory" in said[0]
        assert is_a_sentence(said[0])


@pytest.mark.parametrize("child_first", [False, True])
def test_of_several_processes_one_warns(child_first: bool, tmp_path: Path) -> None:
    """A new process has given no warning yet, and knows of another's by the cache alone."""
    with hotset.cache(Samples(half_megabyte, 64), memory="8MB") as cached:

        def read() -> None:
            with recorded() as found:
                for i in range(64):
                    equal_batches(cached[i], half_megabyte(i))
            with open(tmp_path / "said", "a") as said:
                said.writelines("x" for _ in _hotsets(found))

        for here in (not child_first, child_first):
            read() if here else in_child(read)
        assert (tmp_path / "said").read_text() == "x"


def picture(index: int) -> Image.Image:
    return Image.new("RGB", (340, 340 + index % 20), index)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("make", [half_megabyte, picture])
def test_memory_of_the_samples_size_holds_all_of_them(make: Any, workers: int) -> None:
    """Those of a fixed size, and those that differ, whose room is taken in pieces."""
    plan = hotset.cache(Samples(make, 60)).plan
    with hotset.cache(Samples(make, 60), memory=int(1.1 * plan.total_bytes)) as cached:
        for _ in hotset.DataLoader(cached, batch_size=4, shuffle=True, num_workers=workers, collate_fn=list):
            pass
        assert cached.stats().cached == 60


@pytest.mark.parametrize("workers", [0, 2])
def test_too_little_memory_never_breaks_a_loader(workers: int, caught: list[warnings.WarningMessage]) -> None:
    """In MindSpore, running out of memory breaks a cache. Here each epoch must be as good as the last."""
    with hotset.cache(Samples(half_megabyte, 64), memory="8MB") as cached:
        loader = hotset.DataLoader(cached, batch_size=8, num_workers=workers)
        for _ in range(3):
            for number_, batch in enumerate(loader):
                expected = torch.stack([half_megabyte(i) for i in range(8 * number_, 8 * number_ + 8)])
                equal_batches(batch, expected)
        assert cached.stats().cached >= 8
        assert cached.check() == []
        assert len(_hotsets(caught)) <= 1


@pytest.mark.parametrize("memory", [0, 1, "1KB", "64KiB"])
def test_almost_no_memory_at_all_still_serves_right_samples(
    memory: Any, caught: list[warnings.WarningMessage]
) -> None:
    """stocaching: a limit that is too small gives a negative length."""
    with hotset.cache(Samples(kilobyte, 200), memory=memory) as cached:
        for _ in range(2):
            for i in range(200):
                equal_batches(cached[i], kilobyte(i))
            loader = hotset.DataLoader(cached, batch_size=50)
            assert torch.cat(list(loader)).equal(torch.stack([kilobyte(i) for i in range(200)]))
        assert cached.check() == []
        assert cached.stats().bytes <= 65536
        assert len(_hotsets(caught)) <= 1


def test_any_samples_may_be_the_cached_ones_unlike_stocachings_first_n(
    tmp_path: Path, caught: list[warnings.WarningMessage]
) -> None:
    log = ReadLog(tmp_path / "reads")
    with hotset.cache(Counting(half_megabyte, 64, log), memory="16MB") as cached:
        wanted = list(range(56, 64))
        for i in wanted:
            cached[i]
        log.reset()
        for i in wanted:
            equal_batches(cached[i], half_megabyte(i))
        assert log.total() == 0


def test_memory_limits_one_cache_and_not_the_machine_unlike_mindspores_size() -> None:
    """MindSpore's ``size`` caps what the machine has in use, so that ``size=50`` cached 0 of 500 rows."""
    with hotset.cache(Samples(kilobyte, 500), memory="2MB") as cached:
        for i in range(500):
            cached[i]
        assert cached.stats().cached == 500


def test_memory_far_above_the_machines_is_clamped_and_touches_almost_nothing(
    caught: list[warnings.WarningMessage],
) -> None:
    """stocaching touches every page at once. Here, few of ten million samples of 100 KB are ever read."""
    before = memory_files()
    with hotset.cache(Samples(_hundred_kilobytes, 10_000_000), memory="100TiB") as cached:
        for i in (0, 9_999_999, 123_456):
            equal_batches(cached[i], _hundred_kilobytes(i))
            equal_batches(cached[i], _hundred_kilobytes(i))
        taken = 0
        for line in memory_files() - before:
            taken += Path(f"/proc/self/fd/{line.split()[1]}").stat().st_blocks * 512
        assert 0 < taken < 20_000_000
    assert len(_hotsets(caught)) <= 1


def _hundred_kilobytes(index: int) -> torch.Tensor:
    return torch.full((100_000,), index % 251, dtype=torch.uint8)
