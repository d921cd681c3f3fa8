"""The plan counts memory that other caches hold as taken, and says what is missing and what would help."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset
from typer.testing import CliRunner

import hotset
from hotset.cli.main import app

N, ROW = 200, 4096
ALL = N * (ROW + 300)


class Numbers(Dataset[torch.Tensor]):
    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((ROW // 4,), float(self.factor * index))


def command(*arguments: str) -> None:
    found = CliRunner().invoke(app, [*arguments], catch_exceptions=False)
    assert found.exit_code == 0, found.output


@pytest.mark.usefixtures("runtime", "patient")
@pytest.mark.filterwarnings("ignore:.* samples are cached, and no more fit:hotset.HotsetWarning")
def test_memory_that_other_caches_hold_is_not_available() -> None:
    command("session", "create", "a", "--memory", str(ALL * 3 // 2))
    with hotset.cache(Numbers(1), session="a") as first:
        assert first.plan.fits == 1
        first_epoch = [first[i] for i in range(N)]
        assert len(first_epoch) == N
        with hotset.cache(Numbers(2), session="a") as second:
            text = str(second.plan)
            assert "all of them fit" not in text
            assert "less what others hold" in text
            assert "more are needed for all samples" in text
            assert "`hotset session resize a --memory" in text
            assert 0.2 < second.plan.fits < 0.8
            for i in range(N):
                assert float(second[i][1]) == 2.0 * i
            assert abs(second.stats().cached / N - second.plan.fits) < 0.15
            with hotset.cache(Numbers(2), session="a") as joined:
                assert abs(joined.plan.fits - second.plan.fits) < 0.15
                assert "more are needed for all samples" in str(joined.plan)
        with hotset.cache(Numbers(1), session="a") as again:
            assert again.plan.fits == 1  # what it holds itself is its own
    with hotset.cache(Numbers(3), session="a") as third:
        assert third.plan.fits == 1  # nobody uses the others, so that they make room


def test_remedies_come_with_figures(tmp_path: Path) -> None:
    with hotset.cache(Numbers(1), memory=ALL // 2) as cached:
        text = str(cached.plan)
    assert "spill=, a folder" in text
    assert "window=hotset.Window(resident=" in text
    assert 'memory="' in text
    with hotset.cache(Numbers(1), memory=ALL // 2, spill=tmp_path / "spill") as cached:
        text = str(cached.plan)
        assert "what would help" not in text
        assert "64 MiB or a hundredth of the disk, whichever is more, stay free" in text
    with hotset.cache(Numbers(1), memory=2 * ALL) as cached:
        assert "what would help" not in str(cached.plan)


class Files(Dataset[Any]):
    """Decodes files into samples that are twenty times as large."""

    def __init__(self, folder: Path, transform: Any = None) -> None:
        self.samples = [(str(folder / f"{i}.raw"), i % 3) for i in range(N)]
        for path, _ in self.samples:
            Path(path).write_bytes(bytes(500))
        self.transform = transform

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        path, label = self.samples[index]
        picture = torch.tensor(list(Path(path).read_bytes()), dtype=torch.uint8).repeat(20)
        return (picture if self.transform is None else self.transform(picture)), label


def test_files_that_are_smaller_than_the_cached_samples_are_named(tmp_path: Path) -> None:
    dataset = Files(tmp_path, torch.nn.Dropout())
    with hotset.cache(dataset, memory=N * 10_000 // 4) as cached:
        text = str(cached.plan)
    assert "the files have 500 B a sample" in text
    assert "cut=0 100% would fit" in text
    for path, _ in dataset.samples:
        Path(path).unlink()
    dataset.samples = [("elsewhere", 0)] * N
    with hotset.cache(Numbers(1), memory=ALL // 4) as cached:
        assert "the files have" not in str(cached.plan)


def test_files_without_a_size_say_nothing(tmp_path: Path) -> None:
    """As files of /proc, and of some network file systems."""

    (tmp_path / "file").touch()
    dataset = Numbers(1)
    dataset.paths = [str(tmp_path / "file")] * N  # type: ignore[attr-defined]
    with hotset.cache(dataset, memory=ALL // 4) as cached:
        text = str(cached.plan)
    assert "what would help" in text
    assert "the files have" not in text


def test_an_earlier_cut_with_smaller_samples_is_named() -> None:
    def widen(row: torch.Tensor) -> torch.Tensor:
        return row.double().repeat(2)

    with hotset.cache(Numbers(1), transform=[widen], memory=ALL, cut=1) as cached:
        text = str(cached.plan)
    assert "after Numbers a sample takes 4 KiB" in text
    assert "with cut=0 100% of them fit" in text


def test_a_dataset_that_is_as_fast_as_a_hit_is_told_which_loader_gains() -> None:
    with hotset.cache(Numbers(1), memory="4MiB") as cached:
        times = (2e-6, 2e-4, 2.345)
        fast, slow, slowest = (dataclasses.replace(cached.plan, sample_seconds=each) for each in times)
    assert "0.002 ms to read, about as long as a hit takes in torch's DataLoader: use hotset." in str(fast)
    assert "0.2 ms to read\n" in str(slow)
    assert "2,345 ms to read\n" in str(slowest)
