"""``hotset.batched``: a stage that gets collated batches while the cache is filled, for frozen encoders."""

from __future__ import annotations

import multiprocessing
import os
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from helpers import equal_batches, failure, finish, is_a_sentence, recorded, rng_states, seed_everything
from sources import ReadLog
from torch.utils.data import DataLoader, Dataset

import hotset

N = 100


@pytest.fixture
def log(tmp_path: Path) -> ReadLog:
    return ReadLog(tmp_path / "reads")


class Rows(Dataset[Any]):
    """Logs each read."""

    def __init__(self, log: ReadLog | None = None, length: int = N) -> None:
        self.log = log
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.log is not None:
            self.log.add(index)
        return torch.arange(4.0) + index


class GroupedRows(Rows):
    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        return [self[index] for index in indices]


class Doubling(torch.nn.Module):
    """Exact arithmetic, so that results do not depend on the batch. Writes down how many rows it gets."""

    def __init__(self, counts: Path | None = None) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((4,), 2.0))
        self.counts = counts
        self.eval()

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        if self.counts is not None:
            with open(self.counts, "a") as out:
                out.write(f"{len(batch)} ")
        return batch * self.weight


def counts_in(path: Path) -> list[int]:
    counts = [int(word) for word in path.read_text().split()]
    path.write_text("")
    return counts


def expected(index: int) -> torch.Tensor:
    return (torch.arange(4.0) + index) * 2


@pytest.mark.parametrize("concurrency", [1, 4])
@pytest.mark.parametrize("grouped", [False, True])
def test_a_fill_calls_it_with_batches_and_caches_a_row_for_each_sample(
    grouped: bool, concurrency: int, tmp_path: Path
) -> None:
    path = tmp_path / "counts"
    kind = GroupedRows if grouped else Rows
    stage = hotset.batched(Doubling(path), size=32)
    with hotset.cache(
        kind(), transform=[stage], memory="4MiB", key="doubled", concurrency=concurrency
    ) as cached:
        counts_in(path)
        cached.fill()
        counts = counts_in(path)
        assert max(counts) == 32
        assert len(counts) <= -(-N // 32) + 1, "the last of a part may be alone"
        for index in range(N):
            assert torch.equal(cached[index], expected(index))
            assert not cached[index].requires_grad
        assert counts_in(path) == []


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_of_loaders_are_those_of_single_samples(workers: int, log: ReadLog, tmp_path: Path) -> None:
    path = tmp_path / "counts"
    stage = [torch.sqrt, hotset.batched(Doubling(path)), lambda row: (row, row.sum())]
    reference = [stage[2](stage[0](Rows()[index]) * 2) for index in range(N)]
    with hotset.cache(Rows(log), transform=stage, memory="4MiB", key="x") as cached:
        counts_in(path)
        log.reset()
        seed_everything()
        plain = [[*batch] for batch in DataLoader(reference, 20, shuffle=True, num_workers=workers)]
        after = rng_states()
        for _ in range(2):
            seed_everything()
            ours = [[*batch] for batch in hotset.DataLoader(cached, 20, shuffle=True, num_workers=workers)]
            equal_batches(ours, plain)
            assert rng_states() == after
        assert log.total() <= N
        assert max(counts_in(path)) >= 10, "batches of the loader, unless workers share one"


def test_rows_of_dicts_tuples_arrays_and_lists_are_taken_apart() -> None:
    class Pair(NamedTuple):
        a: Any
        b: Any

    def encode(batch: dict[str, Any]) -> dict[str, Any]:
        x = batch["x"]
        pair = Pair(x[:, 0], x.numpy()[:, 1:])
        return {
            "pair": pair,
            "name": [f"row {i}" for i in batch["index"].tolist()],
            "deep": (x, {"y": x + 1}),
        }

    samples = [{"x": torch.arange(3.0) * index, "index": index} for index in range(40)]
    with hotset.cache(samples, transform=[hotset.batched(encode, size=7)], memory="4MiB", key="x") as cached:
        cached.fill()
        for index in range(40):
            row, x = cached[index], torch.arange(3.0) * index
            assert type(row["pair"]) is Pair
            assert torch.equal(row["pair"].a, x[0])
            assert isinstance(row["pair"].b, np.ndarray)
            assert row["pair"].b.tolist() == x[1:].tolist()
            assert row["name"] == f"row {index}"
            assert torch.equal(row["deep"][0], x)
            assert torch.equal(row["deep"][1]["y"], x + 1)


def test_a_fill_by_workers_takes_as_many_as_it_may(tmp_path: Path) -> None:
    path = tmp_path / "counts"
    with hotset.cache(
        Rows(), transform=[hotset.batched(Doubling(path), size=100)], memory="4MiB", key="x"
    ) as cached:
        counts_in(path)
        cached.fill(num_workers=1)
        assert counts_in(path) == [N]


def test_last_bits_that_depend_on_the_batch_are_no_difference_to_an_audit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def rounding(batch: torch.Tensor) -> torch.Tensor:
        return batch + 1e-6 * (len(batch) > 1)

    monkeypatch.setattr("hotset.dataset.audit._SHARE", 1e9)
    with hotset.cache(Rows(), transform=[hotset.batched(rounding)], memory="4MiB") as cached:
        with recorded() as told:
            for _ in range(5):
                assert len(list(hotset.DataLoader(cached, 10))) == 10
        assert told == []
        assert cached.stats().cached == N


def test_two_stages_of_different_sizes_and_a_container_around_them() -> None:
    from torchvision.transforms import v2

    def add(batch: torch.Tensor) -> torch.Tensor:
        return batch + 1

    chain = v2.Compose([hotset.batched(Doubling(), size=8), torch.abs, hotset.batched(add, size=5)])
    with hotset.cache(Rows(), transform=chain, memory="4MiB") as cached:
        cached.fill()
        for index in range(N):
            assert torch.equal(cached[index], expected(index) + 1)
        names = [row.name for row in cached.plan.rows]
        assert "batched(Doubling)" in names
        assert "batched(add)" in names
        assert any("last bits" in note for note in cached.plan.notes)


def test_other_weights_have_another_cache() -> None:
    encoder = Doubling()
    with hotset.cache(Rows(), transform=[hotset.batched(encoder)], memory="4MiB") as first:
        before = first.plan.fingerprint
    with hotset.cache(Rows(), transform=[hotset.batched(Doubling())], memory="4MiB") as same:
        assert same.plan.fingerprint == before
    with torch.no_grad():
        encoder.weight[3] += 1
    with hotset.cache(Rows(), transform=[hotset.batched(encoder)], memory="4MiB") as other:
        assert other.plan.fingerprint != before


def test_a_live_part_may_follow_and_draws_as_without_a_cache() -> None:
    def jitter(row: torch.Tensor) -> torch.Tensor:
        return row + torch.rand(())

    plain = [expected(index) for index in range(N)]

    class Jittered(Dataset[Any]):
        def __len__(self) -> int:
            return N

        def __getitem__(self, index: int) -> torch.Tensor:
            return jitter(plain[index])

    with hotset.cache(Rows(), transform=[hotset.batched(Doubling()), jitter], memory="4MiB") as cached:
        for _ in range(2):
            seed_everything()
            ours = list(hotset.DataLoader(cached, 16, num_workers=2))
            seed_everything()
            equal_batches(ours, list(DataLoader(Jittered(), 16, num_workers=2)))


# ---- what is refused -----------------------------------------------------------------------------------


class RarelyDrawing(Rows):
    def __getitem__(self, index: int) -> torch.Tensor:
        return super().__getitem__(index) + (torch.rand(4) if index == 55 else 0)


def test_a_sample_that_draws_is_not_frozen() -> None:
    with hotset.cache(RarelyDrawing(), memory="1MiB", transform=hotset.batched(Doubling(), size=8)) as cached:
        with pytest.raises(hotset.HotsetWarning, match=r"1 sample \(55\) draws random numbers"):
            cached.fill()
        assert not torch.equal(cached[55], cached[55])
        assert cached.stats().cached == N - 1


def test_a_module_in_training_mode_is_refused() -> None:
    encoder = torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.Dropout())
    for stage in (encoder, lambda batch: encoder(batch)):
        with pytest.raises(hotset.NotCacheable, match=r"training mode.*\.eval\(\)") as raised:
            hotset.cache(Rows(), transform=[hotset.batched(stage)], memory="4MiB")
        assert is_a_sentence(str(raised.value))
    with hotset.cache(Rows(), transform=[hotset.batched(encoder.eval())], memory="4MiB") as cached:
        assert cached[3].shape == (2,)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_module_that_is_put_into_training_mode_later_is_refused_and_nothing_is_frozen(workers: int) -> None:
    """``model.train()`` before each epoch reaches the encoder too, if it is a part of the model."""
    encoder = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout()).eval()
    model = torch.nn.ModuleDict({"encoder": encoder, "head": torch.nn.Linear(8, 2)})
    with hotset.cache(Rows(), transform=[hotset.batched(model["encoder"])], memory="4MiB") as cached:
        model.train()
        statistics = encoder[1].running_mean.clone()
        found = failure(lambda: list(hotset.DataLoader(cached, 10, num_workers=workers)))
        assert found.kind is hotset.NotCacheable
        assert "evaluation mode" in found.text
        assert cached.stats().cached == 0
        assert torch.equal(encoder[1].running_mean, statistics)
        encoder.eval()
        encoder[2].train()  # only a part of it
        found = failure(lambda: list(hotset.DataLoader(cached, 10, num_workers=workers)))
        assert found.kind is hotset.NotCacheable
        encoder.eval()
        assert len(list(hotset.DataLoader(cached, 10, num_workers=workers))) == 10


def centred(batch: torch.Tensor) -> torch.Tensor:
    return batch - batch.mean(0)


def test_rows_that_depend_on_their_batch_are_refused() -> None:
    with pytest.raises(hotset.NotCacheable, match="whatever else is in its batch") as raised:
        hotset.cache(Rows(), transform=[hotset.batched(centred)], memory="4MiB")
    assert is_a_sentence(str(raised.value))
    with hotset.cache(Rows(), transform=[hotset.batched(centred, size=1)], memory="4MiB") as cached:
        assert torch.equal(cached[3], torch.zeros(4))


def test_a_list_of_columns_is_not_taken_for_rows() -> None:
    samples = [(torch.arange(4.0) + index,) for index in range(N)]
    with pytest.raises(hotset.ArgumentError, match="return a tuple if these are several columns") as raised:
        hotset.cache(samples, transform=[hotset.batched(lambda batch: [batch[0] * 2])], memory="4MiB")
    assert is_a_sentence(str(raised.value))


def drop(batch: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.dropout(batch, training=True)


def flip(row: torch.Tensor) -> torch.Tensor:
    return row.flip(0) if torch.rand(()) < 0.5 else row


@pytest.mark.parametrize(
    ("transform", "why"),
    [
        ([hotset.batched(drop)], "global state moved"),
        ([flip, hotset.batched(Doubling())], "flip is random"),
    ],
    ids=["it draws", "something before it draws"],
)
def test_a_stage_that_would_be_live_is_refused(transform: Any, why: str) -> None:
    with pytest.raises(hotset.NotCacheable, match=why) as raised:
        hotset.cache(Rows(), transform=transform, memory="4MiB")
    assert is_a_sentence(str(raised.value))
    assert "must be cached" in str(raised.value)


def test_a_cut_before_it_is_refused_and_no_memory_moves_the_cut() -> None:
    class Widening(Doubling):
        def forward(self, batch: torch.Tensor) -> torch.Tensor:
            return super().forward(batch).repeat(1, 2_000)

    class Slow(Rows):
        def __getitem__(self, index: int) -> torch.Tensor:
            time.sleep(0.01)  # so that it would be cheaper to compute the stage anew than to read again
            return super().__getitem__(index)

    stage = hotset.batched(Widening())
    with pytest.raises(hotset.NotCacheable, match="must be cached"):
        hotset.cache(Rows(), transform=[torch.abs, stage], memory="4MiB", cut=1)
    with hotset.cache(Slow(), transform=[torch.abs, stage], memory="1MiB") as cached:
        assert [row.cached for row in cached.plan.rows] == [True, True, True]


def test_it_has_no_place_in_a_datasets_own_transform_or_in_a_window() -> None:
    dataset = Rows()
    dataset.transform = hotset.batched(Doubling())  # type: ignore[attr-defined]
    with pytest.raises(hotset.ArgumentError, match=r"must be in transform= of hotset\.cache") as raised:
        hotset.cache(dataset, memory="4MiB")
    assert is_a_sentence(str(raised.value))
    with pytest.raises(hotset.ArgumentError, match="window=") as raised:
        hotset.cache(Rows(), transform=[hotset.batched(Doubling())], window=hotset.Window(resident=10))
    assert is_a_sentence(str(raised.value))


@pytest.mark.parametrize("size", [0, -1, True, 2.0, "many"])
def test_a_wrong_size(size: Any) -> None:
    with pytest.raises(hotset.ArgumentError, match="size= must be") as raised:
        hotset.batched(Doubling(), size=size)
    assert is_a_sentence(str(raised.value))


def test_something_that_cannot_be_called() -> None:
    with pytest.raises(hotset.ArgumentError, match="must be given a callable") as raised:
        hotset.batched(3)  # type: ignore[arg-type]
    assert is_a_sentence(str(raised.value))


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (lambda batch: batch[:-1], "0 rows for 1 sample"),
        (lambda batch: [batch, batch], "2 rows for 1 sample"),
        (lambda batch: batch.sum(), "first dimension"),
        (lambda batch: None, "NoneType"),
        (lambda batch: {}, "dict"),
        (lambda batch: batch.to_sparse(), "dense"),
    ],
)
def test_a_function_that_returns_another_number_of_rows(function: Any, why: str) -> None:
    with pytest.raises(hotset.ArgumentError, match=why) as raised:
        hotset.cache(Rows(), transform=[hotset.batched(function)], memory="4MiB")
    assert is_a_sentence(str(raised.value))


def test_samples_that_cannot_be_collated() -> None:
    samples = [object() for _ in range(4)]
    with pytest.raises(hotset.ArgumentError, match="default_collate refuses") as raised:
        hotset.cache(samples, transform=[hotset.batched(lambda batch: batch)], memory="4MiB")
    assert is_a_sentence(str(raised.value))


# ---- when something fails ------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 2])
def test_an_exception_comes_at_its_sample_and_the_others_are_cached(workers: int, log: ReadLog) -> None:
    def picky(batch: torch.Tensor) -> torch.Tensor:
        if (batch[:, 0] == 37).any():
            raise ValueError("sample 37 is not to its taste")
        return batch * 2

    with hotset.cache(Rows(log), transform=[hotset.batched(picky, size=16)], memory="4MiB") as cached:
        found: list[int] = []

        def run() -> None:
            for batch in hotset.DataLoader(cached, 10, num_workers=workers):
                found.extend((batch[:, 0] / 2).int().tolist())

        assert failure(run).kind is ValueError
        assert found == list(range(30))
        assert torch.equal(cached[36], expected(36))
        with pytest.raises(ValueError, match="37"):
            cached[37]


def test_a_source_that_raises_in_the_midst_of_a_batch() -> None:
    class Broken(Rows):
        def __getitem__(self, index: int) -> torch.Tensor:
            if index == 42:
                raise OSError("cannot be read")
            return super().__getitem__(index)

    with hotset.cache(Broken(), transform=[hotset.batched(Doubling())], memory="4MiB") as cached:
        with pytest.raises(OSError, match="cannot be read"):
            cached.fill()
        assert torch.equal(cached[41], expected(41))
        assert 0 < cached.stats().cached < N


def test_a_batch_that_is_too_large_is_tried_sample_by_sample_with_a_warning() -> None:
    def small(batch: torch.Tensor) -> torch.Tensor:
        if len(batch) > 4:
            raise RuntimeError("out of memory")
        return batch * 2

    with hotset.cache(Rows(), transform=[hotset.batched(small)], memory="4MiB", key="x") as cached:
        with pytest.warns(hotset.HotsetWarning, match="smaller size=") as told:
            cached.fill()
        (sentence,) = [str(each.message) for each in told]
        assert is_a_sentence(sentence)
        assert torch.equal(cached[99], expected(99))


# ---- devices -------------------------------------------------------------------------------------------


class Elsewhere(torch.nn.Module):
    """Has a buffer on a device, as a network on a GPU has, and computes in this process."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.register_buffer("there", torch.empty(1, device="meta"))
        self.path = path
        self.eval()

    def encode(self, batch: torch.Tensor) -> torch.Tensor:
        with open(self.path, "a") as out:
            out.write(f"{os.getpid()} ")
        return batch * 2


def test_a_network_on_a_device_runs_in_the_main_process_only(tmp_path: Path) -> None:
    path = tmp_path / "processes"
    network = Elsewhere(path)
    with hotset.cache(Rows(), transform=[hotset.batched(network.encode)], memory="4MiB", key="x") as cached:
        with pytest.raises(hotset.ArgumentError, match="num_workers= must be 0") as raised:
            cached.fill(num_workers=2)
        assert is_a_sentence(str(raised.value))
        found = [row for batch in hotset.DataLoader(cached, 10, num_workers=2) for row in batch]
        assert torch.equal(found[50], expected(50))
        assert set(path.read_text().split()) == {str(os.getpid())}
        cached.clear()
        told = failure(lambda: list(DataLoader(cached, 10, num_workers=1)))
        assert told.kind is RuntimeError
        assert "must not be called in a worker process; call cached.fill" in told.text


def test_a_device_that_cannot_be_used_is_named() -> None:
    network = torch.nn.Linear(4, 2, device="meta").eval()
    with pytest.raises(RuntimeError, match="runs on meta, which cannot be used here") as raised:
        hotset.cache(Rows(), transform=[hotset.batched(network)], memory="4MiB", key="x")
    assert is_a_sentence(str(raised.value))


def test_processes_that_fill_together_compute_each_row_once(log: ReadLog) -> None:
    with hotset.cache(Rows(log), transform=[hotset.batched(Doubling())], memory="4MiB", key="x") as cached:
        log.reset()
        others = [multiprocessing.get_context("fork").Process(target=cached.fill) for _ in range(2)]
        for process in others:
            process.start()
        cached.fill()
        finish(*others)
        assert log.total() == N
        with recorded() as told:
            assert torch.equal(cached[7], expected(7))
        assert told == []
