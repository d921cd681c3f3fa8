"""Large samples are stored in a thread while the next ones are read, and nothing else changes."""

from __future__ import annotations

import os
import threading
import time
from typing import Any

import pytest
import torch
from helpers import equal_batches, rng_states, seed_everything
from torch.utils.data import DataLoader, Dataset

import hotset
from hotset.dataset.dataset_proxy import current_of
from hotset.store.records import Records

N = 24
pytestmark = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core has no thread to spare")


@hotset.deterministic  # the tests change what it holds, which no sample depends on
class Posters(Dataset[Any]):
    """Of 600 KB; notes which threads there are while a sample is read. Some raise."""

    def __init__(self) -> None:
        self.threads: list[set[str]] = []
        self.errors: dict[int, BaseException] = {}

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> Any:
        self.threads.append({thread.name for thread in threading.enumerate()})
        if index in self.errors:
            raise self.errors[index]
        return torch.arange(600_000, dtype=torch.int32).to(torch.uint8).add_(index), index


def noisy(sample: Any) -> Any:
    """Works in place, and draws."""
    picture, label = sample
    return picture.add_(int(torch.randint(100, ()))), label


def storing() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "hotset-store"]


@pytest.fixture
def slow_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Writing lags behind: what does not wait for it is ahead of it."""
    write = Records.write

    def lagging(*given: Any) -> Any:
        time.sleep(0.02)
        return write(*given)

    monkeypatch.setattr(Records, "write", lagging)


@pytest.mark.usefixtures("slow_writes")
def test_samples_are_stored_while_others_are_read_and_equal_torchs() -> None:
    seed_everything()
    expected = [
        [torch.utils.data.default_collate([noisy(sample) for sample in samples]), rng_states()]
        for samples in DataLoader(Posters(), batch_size=8, shuffle=True, collate_fn=list)
    ]
    posters = Posters()
    with hotset.cache(posters, memory="64MiB", transform=noisy) as cached:
        posters.threads.clear()
        seed_everything()
        loader = hotset.DataLoader(cached, batch_size=8, shuffle=True)
        for batch, (wanted, states) in zip(loader, expected, strict=True):
            equal_batches(batch, wanted)
            assert rng_states() == states
            assert not storing(), "its work is done before the batch is"
        assert cached.stats().cached == N
        assert any("hotset-store" in names for names in posters.threads)
        for number, (picture, label) in enumerate(current_of(cached).records(torch.arange(N).numpy())):
            assert label == number
            assert torch.equal(picture, posters[number][0])


@pytest.mark.parametrize("error", [LookupError, KeyboardInterrupt])
def test_what_was_read_before_an_error_is_stored_and_the_rest_at_the_next_attempt(
    error: type[BaseException],
) -> None:
    posters = Posters()
    with hotset.cache(posters, memory="64MiB", transform=noisy) as cached:
        before = cached.stats().cached
        loader = hotset.DataLoader(cached, batch_size=N)
        posters.errors[13] = error()
        with pytest.raises(error):
            list(loader)
        assert not storing()
        assert cached.stats().cached == max(13, before)
        posters.errors.clear()
        posters.threads.clear()
        list(loader)
        assert cached.stats().cached == N
        assert len(posters.threads) == N - 13, "none was read twice"


@pytest.mark.usefixtures("slow_writes")
@pytest.mark.filterwarnings("ignore:.*no more fit")
def test_without_room_each_sample_comes_all_the_same() -> None:
    posters = Posters()
    with hotset.cache(posters, memory="6MB", transform=noisy) as cached:
        before = cached.stats().cached
        posters.threads.clear()
        labels = [label for _, some in hotset.DataLoader(cached, batch_size=8) for label in some.tolist()]
        assert labels == list(range(N))
        assert before < cached.stats().cached < N
        assert len(posters.threads) == N - before, "none was read twice"
    assert not storing()
