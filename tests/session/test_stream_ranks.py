"""Recorded streams of several ranks, and of several jobs in a session."""

from __future__ import annotations

import contextlib
import itertools
import warnings
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from helpers import recorded
from streams import Numbers, values
from test_ranks import Rank

import hotset
from hotset.session import sessions

N = 90


def trains(state: dict[str, Any], rank: int, ranks: int) -> dict[str, Any]:
    """What a rank sees in three epochs."""
    state["stream"] = stream = hotset.cache(Numbers(N, rank=rank, ranks=ranks), memory="10MiB", key="numbers")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        loader = hotset.DataLoader(stream, batch_size=4, shuffle=True, num_workers=3)
        epochs = [values(loader) for _ in range(3)]
    said = [str(one.message) for one in told if "max number of worker" not in str(one.message)]
    return {"epochs": epochs, "said": said, "length": len(stream), "misses": stream.stats().misses}


def resumes(state: dict[str, Any], rank: int, consumed: int | None) -> dict[str, Any]:
    """A rank's later epochs, and those of a loader that has resumed in the second."""
    state["stream"] = stream = hotset.cache(Numbers(N, rank=rank, ranks=2), memory="10MiB", key="numbers")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loader = hotset.DataLoader(stream, batch_size=4, shuffle=True)
        values(loader)
        batches = iter(loader)
        values(itertools.islice(batches, consumed))
        saved = loader.state_dict()
        expected = [values(batches), values(loader), values(loader)]
        other = hotset.DataLoader(stream, batch_size=4, shuffle=True)
        other.load_state_dict(saved)
        rest = [] if consumed is None else values(other)
        return {"expected": expected, "resumed": [rest, values(other), values(other)]}


@contextlib.contextmanager
def session() -> Iterator[None]:
    """A session named ``numbers``."""
    made = sessions.create("numbers", memory=64 << 20)
    yield
    sessions.destroy(made)


@pytest.mark.usefixtures("runtime", "patient")
def test_two_ranks_of_three_workers_give_each_sample_once_an_epoch() -> None:
    ranks = [Rank(number, RANK=str(number), LOCAL_WORLD_SIZE="2", WORLD_SIZE="2") for number in range(2)]
    for number, rank in enumerate(ranks):
        rank.begin(trains, number, 2)
    one, other = (rank.answer() for rank in ranks)
    for rank in ranks:
        rank.end()
    for epoch in range(3):
        counts = Counter(one["epochs"][epoch] + other["epochs"][epoch])
        assert counts == Counter(range(N)), f"epoch {epoch}"
    assert one["epochs"][1] != one["epochs"][2]
    assert one["length"] == other["length"] == N
    assert one["misses"] == N
    assert all("second on" in sentence for sentence in one["said"] + other["said"])


@pytest.mark.usefixtures("runtime")
@pytest.mark.parametrize("number", ["-1", ""])
def test_a_rank_that_is_no_number_is_none(number: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many programs say by a local rank of -1 that they have no ranks."""
    monkeypatch.setenv("LOCAL_RANK", number)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    stream = hotset.cache(Numbers(N), memory="10MiB")
    loader = hotset.DataLoader(stream, batch_size=4)
    for _ in range(3):
        assert sorted(values(loader)) == list(range(N))
    assert (stream.stats().misses, stream.stats().hits) == (N, 2 * N)
    stream.close()


@pytest.mark.usefixtures("runtime", "patient")
@pytest.mark.parametrize("consumed", [3, None])
def test_the_epochs_after_a_resumed_one_have_their_own_orders(consumed: int | None) -> None:
    """Also those after a state between two epochs."""
    ranks = [Rank(number, RANK=str(number), LOCAL_WORLD_SIZE="2", WORLD_SIZE="2") for number in range(2)]
    for number, rank in enumerate(ranks):
        rank.begin(resumes, number, consumed)
    answers = [rank.answer() for rank in ranks]
    for rank in ranks:
        rank.end()
    for answer in answers:
        assert answer["resumed"] == answer["expected"]


def begins(state: dict[str, Any], rank: int | None, count: int | None) -> list[int]:
    """So many batches of a pass; of the one that was begun before, if no rank is given."""
    if "stream" not in state:
        state["stream"] = hotset.cache(Numbers(N, rank=rank, ranks=2), memory="10MiB", key="numbers")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if rank is not None:
            state["pass"] = iter(hotset.DataLoader(state["stream"], batch_size=4, shuffle=True))
        found = values(itertools.islice(state["pass"], count))
    if count is None:
        del state["pass"]
    return found


def clears(state: dict[str, Any]) -> None:
    state["stream"].clear()


@pytest.mark.usefixtures("runtime", "patient")
def test_what_a_rank_reads_in_place_of_lost_samples_is_not_recorded() -> None:
    """It cannot read another rank's part."""
    ranks = [Rank(number, RANK=str(number), LOCAL_WORLD_SIZE="2", WORLD_SIZE="2") for number in range(2)]

    def whole() -> Counter[int]:
        for number, rank in enumerate(ranks):
            rank.begin(begins, number, None)
        return Counter(itertools.chain.from_iterable(rank.answer() for rank in ranks))

    for _ in range(2):
        assert whole() == Counter(range(N))
    one, other = ranks
    other.do(begins, 1, 1)
    one.do(clears)
    one.do(begins, 0, 1)  # it records anew
    other.do(begins, None, None)
    one.do(begins, None, None)
    other.do(begins, 1, None)
    for _ in range(2):
        assert whole() == Counter(range(N))
    for rank in ranks:
        rank.end()


@pytest.mark.usefixtures("runtime")
class TestSessions:
    def test_a_second_job_starts_with_the_recorded_stream(self) -> None:
        with session():
            first = hotset.cache(Numbers(N), session="numbers")
            assert values(hotset.DataLoader(first, batch_size=8, num_workers=2)) != []
            order = [number for _, number in first]
            first.close()
            second = hotset.cache(Numbers(N), session="numbers")
            assert second.recorded
            assert [number for _, number in second] == order
            with recorded() as told:
                shuffled = values(hotset.DataLoader(second, batch_size=8, shuffle=True))
            assert sorted(shuffled) == list(range(N))
            assert shuffled != order
            assert told == []
            second.close()

    def test_another_stream_is_recorded_by_itself(self) -> None:
        with session():
            first = hotset.cache(Numbers(N), session="numbers")
            first.fill()
            other = hotset.cache(Numbers(N // 2), session="numbers")
            assert not other.recorded
            other.fill()
            assert len(other) == N // 2
            assert len(first) == N
            first.close()
            other.close()
