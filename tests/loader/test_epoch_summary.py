"""``loader.last_epoch``: the figures of a pass, written to a logger as scalars."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

import hotset

NAMES = ["hotset/waited", "hotset/waited_fraction", "hotset/hit_rate", "hotset/samples_per_second"]


@pytest.fixture
def epoch() -> Any:
    """The second pass over a cached dataset."""
    with hotset.cache(TensorDataset(torch.arange(64)), memory="1MiB") as cached:
        loader = hotset.DataLoader(cached, batch_size=8)
        for _ in range(2):
            list(loader)
        yield loader.last_epoch


def test_to_tensorboard(epoch: Any) -> None:
    told: list[Any] = []
    epoch.log_to(SimpleNamespace(add_scalar=lambda *scalar: told.append(scalar)))
    epoch.log_to(SimpleNamespace(add_scalar=lambda *scalar: told.append(scalar)), step=700)
    assert [name for name, _, _ in told] == NAMES * 2
    assert [step for _, _, step in told] == [1] * 4 + [700] * 4
    assert told[2][1] == 1.0
    assert 0.0 <= told[1][1] <= 1.0
    assert told[0][1] == epoch.waited


def test_to_a_real_writer_of_events(epoch: Any, tmp_path: Path) -> None:
    writer = pytest.importorskip("tensorboardX").SummaryWriter(str(tmp_path))
    epoch.log_to(writer)
    writer.close()
    (file,) = tmp_path.iterdir()
    assert all(name.encode() in file.read_bytes() for name in NAMES)


def test_to_wandb_which_counts_its_own_steps(epoch: Any) -> None:
    told: list[Any] = []
    run = SimpleNamespace(log=lambda values, **named: told.append((list(values), named)))
    epoch.log_to(run)
    epoch.log_to(run, step=5)
    assert told == [(NAMES, {}), (NAMES, {"step": 5})]


def test_to_a_logger_of_lightnings(epoch: Any) -> None:
    told: list[Any] = []
    epoch.log_to(SimpleNamespace(log_metrics=lambda values, step: told.append((list(values), step))))
    assert told == [(NAMES, 1)]


def test_anything_else_is_refused_with_a_sentence(epoch: Any) -> None:
    with pytest.raises(hotset.ArgumentError, match=r"got object; write to_dict\(\) yourself"):
        epoch.log_to(object())


def test_a_pass_that_was_broken_off_leaves_no_sizes_of_its_batches_to_the_next() -> None:
    """torch's persistent workers have been told of all of them, the short last one too."""
    loader = hotset.DataLoader(
        TensorDataset(torch.arange(22)), batch_size=4, num_workers=2, persistent_workers=True
    )
    for _ in range(2):
        batches = iter(loader)
        for _ in range(3):
            next(batches)
    assert loader.last_epoch is not None
    assert (loader.last_epoch.batches, loader.last_epoch.samples) == (3, 12)


def test_a_cache_that_is_closed_in_mid_pass_has_served_what_came_before() -> None:
    cached = hotset.cache(TensorDataset(torch.arange(64)), memory="1MiB", transform=[torch.nn.Identity()])
    loader = hotset.DataLoader(cached, batch_size=4)
    for _ in range(3):
        list(loader)
    batches = iter(loader)
    for _ in range(4):
        next(batches)
    cached.close()  # not looked at before, which would note what was served
    list(batches)
    assert loader.last_epoch is not None
    assert 0.25 <= loader.last_epoch.hit_rate <= 0.5, "some may have been gathered ahead"


class _Slow:
    """A sampler that takes a while before its first index, which a loader wants as it starts workers."""

    def __len__(self) -> int:
        return 4

    def __iter__(self) -> Iterator[int]:
        time.sleep(0.2)
        yield from range(4)


@pytest.mark.parametrize("is_cached", [True, False])
def test_what_a_pass_takes_to_begin_is_waiting(is_cached: bool) -> None:
    """Starting workers takes seconds where they are no forks of the program."""
    dataset: Any = TensorDataset(torch.arange(4))
    with hotset.cache(dataset, memory="1MiB") as cached:
        source = cached if is_cached else dataset
        loader = hotset.DataLoader(source, sampler=_Slow(), num_workers=1)
        list(loader)
        assert loader.last_epoch is not None
        assert 0.2 <= loader.last_epoch.waited <= loader.last_epoch.seconds
