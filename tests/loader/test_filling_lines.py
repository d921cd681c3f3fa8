"""While an epoch fills the cache, the log says how far that is; a short epoch, or a later one, is silent."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

import hotset
from hotset.loader import epoch_summary

N = 64


class SlowClock:
    """The loader's clock, on which each read takes ten seconds."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


class Reads(Dataset[torch.Tensor]):
    def __init__(self, clock: SlowClock) -> None:
        self.clock = [clock]  # not part of what is read

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> torch.Tensor:
        self.clock[0].now += 10.0
        return torch.full((1024,), float(index))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> SlowClock:
    clock = SlowClock()
    monkeypatch.setattr(epoch_summary, "time", clock)
    caplog.set_level(logging.INFO, "hotset")
    return clock


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    found = [record.getMessage() for record in caplog.records if "are cached" in record.getMessage()]
    caplog.clear()
    return found


@pytest.mark.parametrize("live", [False, True])
def test_a_line_every_half_minute_says_how_far_the_filling_is(
    clock: SlowClock, caplog: pytest.LogCaptureFixture, live: bool
) -> None:
    with hotset.cache(Reads(clock), memory="1MiB", transform=draw if live else None, key="rows") as cached:
        loader = hotset.DataLoader(cached, batch_size=8)
        list(loader)
        told = lines(caplog)
        assert len(told) == N // 8 - 1, "each batch takes longer than half a minute, and the last one ends it"
        assert told[0].startswith("epoch 0: 8 of 64 samples are cached (")
        assert "0.1 more a second; the cache is filled in about 560 s" in told[0]
        assert told[-1].startswith("epoch 0: 56 of 64 samples")
        assert told[-1].endswith("filled in about 80 s")
        list(loader)
        assert not lines(caplog), "nothing is filled any more"


class Enlarged(Reads):
    scale = 1

    def __getitem__(self, index: int) -> torch.Tensor:
        return super().__getitem__(index) * self.scale

    def enlarge(self) -> None:
        self.scale = 2


@pytest.mark.filterwarnings("ignore:.*scale was set")
def test_a_line_makes_no_plan_after_a_method_has_set_an_attribute_in_mid_pass(
    clock: SlowClock, caplog: pytest.LogCaptureFixture
) -> None:
    with hotset.cache(Enlarged(clock), memory="1MiB") as cached:
        loader = hotset.DataLoader(cached, batch_size=8)
        for number, _ in enumerate(loader):
            if number == 1:
                cached.enlarge()
        assert len(lines(caplog)) == N // 8 - 1
        assert [float(batch[0, 0]) for batch in loader] == [2.0 * index for index in range(0, N, 8)]


def test_a_short_epoch_has_no_line(clock: SlowClock, caplog: pytest.LogCaptureFixture) -> None:
    with hotset.cache(Reads(clock), memory="1MiB", key="rows") as cached:
        for number, _ in enumerate(hotset.DataLoader(cached, batch_size=1)):
            if number == 1:
                break
        assert not lines(caplog)


@pytest.mark.filterwarnings("ignore:.*fit")
def test_it_ends_when_the_room_does(clock: SlowClock, caplog: pytest.LogCaptureFixture) -> None:
    with hotset.cache(Reads(clock), memory="120KiB", key="rows") as cached:
        list(hotset.DataLoader(cached, batch_size=8))
    told = lines(caplog)
    assert told
    assert len(told) < N // 8 - 1


def draw(sample: Any) -> Any:
    return sample + torch.rand(())
