"""Samples that stay on the device: batches gathered from them are the loader's, bit for bit, or refused.

The device is the CPU here: rows, order, editions and refusals are the same on any.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from helpers import difference, equal_batches, is_a_sentence, rng_states, seed_everything
from live import draw_all
from samples import (
    every_dtype,
    image_and_label,
    mapping,
    named,
    odd_at_seven,
    ordered_mapping,
    ragged,
    ragged_pair,
    small_float,
)
from sources import Counting, GlobalDraws, ListedBatches, ReadLog, Samples
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, default_collate

import hotset
from hotset.collate import pad
from hotset.collate import ragged as collate_ragged
from hotset.device.gpu_cache import GpuCache, SampleSelector, parse_resident
from hotset.device.transfer import HostTransfer
from hotset.errors import ArgumentError, HotsetWarning, QuantityError

N = 22
CPU = torch.device("cpu")
ALL = 1 << 24


def bytes_of(batch: Any) -> int:
    found = batch.nbytes if isinstance(batch, torch.Tensor) else 0
    parts = batch.values() if isinstance(batch, dict) else batch if isinstance(batch, (list, tuple)) else ()
    return found + sum(map(bytes_of, parts))


@contextlib.contextmanager
def full(make: Callable[[int], Any], n: int = N, **given: Any) -> Iterator[Any]:
    """A cache that holds all of its samples."""
    with hotset.cache(Samples(make, n), **given) as cached:
        cached.__getitems__(list(range(n)))
        yield cached


def passes(loader: Any, residents: GpuCache | None, count: int = 2) -> list[Any]:
    """Passes of a training that draws, and the random states after each batch."""
    seed_everything()
    seen: list[Any] = []
    for _ in range(count):
        source: Any = iter(loader)
        serving = residents.serve(source) if residents is not None else None
        for batch in source if serving is None else serving:
            seen.append((batch, torch.rand(1), rng_states()))
        seen.append(rng_states())
    return seen


def numeric(index: int) -> dict[str, Any]:
    return {key: value for key, value in mapping(index).items() if key != "meta"}


def transposed(index: int) -> torch.Tensor:
    return (torch.arange(12.0) + index).view(3, 4).t()


def dtypes(index: int) -> dict[str, torch.Tensor]:
    return {name: value for name, value in every_dtype(index).items() if name != "complex32"}  # it warns


MAKES = [image_and_label, numeric, named, ordered_mapping, transposed, small_float, dtypes]


def test_a_loader_over_a_full_cache_selects_samples() -> None:
    with full(image_and_label) as cached:
        selector: Any = iter(hotset.DataLoader(cached, batch_size=4))
        assert isinstance(selector, SampleSelector)
        assert len(selector.sample_ids()) == N
    assert not isinstance(iter(DataLoader(Samples(image_and_label, N), batch_size=4)), SampleSelector)


@pytest.mark.parametrize("make", MAKES, ids=lambda make: make.__name__)
def test_batches_are_the_loaders_whatever_is_resident(make: Callable[[int], Any]) -> None:
    with full(make) as cached:
        loader = hotset.DataLoader(cached, batch_size=4, shuffle=True)
        expected = passes(loader, None)
        size = bytes_of(next(iter(hotset.DataLoader(cached, batch_size=1))))
        for kept in (N, 9, 1):
            residents = GpuCache(size * kept + size - 1, CPU)
            equal_batches(passes(loader, residents), expected)
            assert residents.count == kept
            assert residents.complete == (kept == N)


@pytest.mark.parametrize("size", [10, 1 << 18])
def test_batches_are_in_order_that_are_taken_past_the_resident_ones(size: int) -> None:
    """From an iterator that a program has begun, and goes on with after a queue."""
    with full(lambda index: torch.full((size,), index)) as cached:
        batches = iter(hotset.DataLoader(cached, batch_size=2))
        found = [next(batches)]
        serving = GpuCache(ALL, CPU).serve(batches)
        assert serving is not None
        found += [next(serving), next(serving), next(batches), next(serving), *batches]
        assert torch.cat([batch[:, 0] for batch in found]).tolist() == list(range(N))


ORDERS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "in order": lambda cached: {"batch_size": 5},
    "last dropped": lambda cached: {"batch_size": 5, "drop_last": True, "shuffle": True},
    "drawn with replacement": lambda cached: {"batch_size": 4, "sampler": GlobalDraws(N, 30)},
    "listed": lambda cached: {"batch_sampler": ListedBatches([[3], [-1, 0, 2, 2], list(range(9, 21)), [8]])},
    "as workers would draw": lambda cached: {"batch_size": 4, "shuffle": True, "num_workers": 2},
}


@pytest.mark.parametrize("order", ORDERS)
def test_orders_and_draws_are_the_loaders(order: str) -> None:
    with full(image_and_label) as cached:
        loader = hotset.DataLoader(cached, **ORDERS[order](cached))
        expected = passes(loader, None)
        for limit in (ALL, 98 * 7):
            equal_batches(passes(loader, GpuCache(limit, CPU)), expected)


@pytest.mark.parametrize(
    "view",
    [
        lambda cached: Subset(cached, [20, 3, 3, 7, 11, 0]),
        lambda cached: Subset(Subset(cached, range(5, 19)), range(0, 14, 3)),
        lambda cached: ConcatDataset([Subset(cached, [1, 2, 9, 9])]),
    ],
    ids=["subset", "subset of a subset", "concatenated"],
)
def test_views_of_a_cache(view: Callable[[Any], Dataset[Any]]) -> None:
    with full(image_and_label) as cached:
        loader = hotset.DataLoader(view(cached), batch_size=2, shuffle=True)
        expected = passes(loader, None)
        for limit in (ALL, 98 * 3):
            residents = GpuCache(limit, CPU)
            equal_batches(passes(loader, residents), expected)
        everything = GpuCache(ALL, CPU)
        everything.serve(iter(loader))
        assert everything.count == len(set(cached_numbers(loader.dataset))), "each sample once, and no other"


def cached_numbers(view: Any) -> list[int]:
    if isinstance(view, ConcatDataset):
        return [number for part in view.datasets for number in cached_numbers(part)]
    if isinstance(view, Subset):
        inside = cached_numbers(view.dataset)
        return [inside[number] for number in view.indices]
    return list(range(len(view)))


def test_batches_are_the_consumers_own() -> None:
    with full(image_and_label) as cached:
        loader = hotset.DataLoader(cached, batch_size=N)
        residents = GpuCache(ALL, CPU)
        expected = next(iter(loader))
        for _ in range(2):
            serving = residents.serve(iter(loader))
            assert serving is not None
            batch = next(serving)
            equal_batches(batch, expected)
            batch[0].zero_()


def test_the_device_is_filled_once_and_reads_nothing_more(tmp_path: Any) -> None:
    log = ReadLog(tmp_path / "reads")
    with hotset.cache(Counting(image_and_label, N, log)) as cached:
        loader = hotset.DataLoader(cached, batch_size=4)
        residents = GpuCache(ALL, CPU)
        assert residents.serve(iter(loader)) is None, "nothing is cached yet"
        list(loader)
        log.reset()
        places = set()
        for _ in range(3):
            serving = residents.serve(iter(loader))
            assert serving is not None
            list(serving)
            places.add(serving.cache.columns[0].data_ptr())
        assert (log.total(), len(places)) == (0, 1)


def test_rows_name_what_batches_hold() -> None:
    with full(image_and_label) as cached:
        loader = hotset.DataLoader(cached, batch_size=4, shuffle=True)
        expected = [batch for batch, *_ in passes(loader, None, 1)[:-1]]
        residents = GpuCache(ALL, CPU)
        seed_everything()
        serving = residents.serve(iter(loader))
        assert serving is not None
        assert serving.cache.complete
        got = []
        while True:
            try:
                rows = serving.rows()
            except StopIteration:
                break
            torch.rand(1)
            assert rows is not None
            got.append(residents.select(serving.cache.upload(rows)))
        equal_batches(got, expected)
        partial = GpuCache(98 * 6, CPU)
        other = partial.serve(iter(hotset.DataLoader(cached, batch_size=4)))
        assert other is not None
        assert not other.cache.complete
        first, second = other.rows(), other.rows()
        assert first is not None
        assert first.tolist() == [0, 1, 2, 3]
        assert second is None, "some of them are not resident"
        equal_batches(other.build(), next(iter(DataLoader(Samples(lambda i: image_and_label(i + 4)), 4))))


# ---- another content ----------------------------------------------------------------------------------


class Changing(Dataset[Any]):
    """Samples that are others once somebody says so."""

    plus = 0

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.full((8,), index + self.plus), index


def of(source: Changing) -> list[Any]:
    return list(DataLoader(source, 4))


@pytest.mark.parametrize("limit", [ALL, 72 * 9], ids=["all", "some"])
def test_nothing_stale_is_served_after_a_clear(limit: int) -> None:
    source = Changing()
    with hotset.cache(source) as cached:
        loader = hotset.DataLoader(cached, batch_size=4)
        list(loader)
        residents = GpuCache(limit, CPU)
        equal_batches([batch for batch, *_ in passes(loader, residents, 1)[:-1]], of(source))
        source.plus = 100
        cached.clear()
        for filled in (False, True, True):
            serving = residents.serve(iter(loader))
            assert (serving is not None) == filled
            equal_batches(list(serving if serving is not None else loader), of(source))
        again = residents.serve(iter(loader))
        assert again is not None
        assert again.rows() is not None, "the new samples are not resident"


@pytest.mark.parametrize("refilled", [False, True])
@pytest.mark.parametrize("limit", [ALL, 72 * 9], ids=["all", "some"])
def test_nothing_stale_is_served_in_the_midst_of_a_pass(limit: int, refilled: bool) -> None:
    source = Changing()
    with hotset.cache(source) as cached:
        loader = hotset.DataLoader(cached, batch_size=4)
        list(loader)
        before = of(source)
        serving = GpuCache(limit, CPU).serve(iter(loader))
        assert serving is not None
        got = [next(serving), next(serving)]
        source.plus = 100
        cached.clear()
        if refilled:
            cached.__getitems__(list(range(N)))
        assert serving.rows() is None
        got.append(serving.build())
        got += list(serving)
        equal_batches(got, before[:2] + of(source)[2:])


def test_a_cache_that_is_cleared_while_the_device_is_filled_gives_nothing_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = Changing()
    monkeypatch.setattr("hotset.device.gpu_cache._FILLED_AT_ONCE", 72 * 5)
    with hotset.cache(source) as cached:
        loader = hotset.DataLoader(cached, batch_size=4)
        list(loader)
        residents = GpuCache(ALL, CPU)
        local: Any = iter(loader)
        gather, calls = local.gather, []

        def cleared_meanwhile(ids: Any) -> Any:
            calls.append(ids.tolist())
            if len(calls) == 3:
                source.plus = 100
                cached.clear()
            return gather(ids)

        local.gather = cleared_meanwhile
        assert residents.serve(local) is None
        assert calls == [[0], [0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
        assert residents.count == 0
        equal_batches(list(local), of(source))
        serving = residents.serve(iter(loader))
        assert serving is not None
        equal_batches(list(serving), of(source))


def test_filling_in_parts_keeps_the_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hotset.device.gpu_cache._FILLED_AT_ONCE", 98 * 5)
    with full(image_and_label) as cached:
        loader = hotset.DataLoader(cached, batch_size=4, shuffle=True)
        equal_batches(passes(loader, GpuCache(ALL, CPU)), passes(loader, None))


# ---- what cannot be -----------------------------------------------------------------------------------


def refused(loader: Any, limit: int = ALL) -> str:
    """What is said, once, of samples that cannot be resident; the pass is as ever."""
    residents = GpuCache(limit, CPU)
    with pytest.warns(HotsetWarning) as told:
        assert residents.serve(iter(loader)) is None
    assert residents.serve(iter(loader)) is None  # silently
    assert len(told) == 1
    text = str(told[0].message)
    assert is_a_sentence(text)
    assert text.startswith("no samples are kept on cpu: ")
    return text


def with_text(index: int) -> tuple[torch.Tensor, str]:
    return torch.ones(3), f"sample {index}"


@pytest.mark.parametrize(
    ("make", "collate"), [(with_text, default_collate), (ragged_pair, collate_ragged), (ragged_pair, pad())]
)
def test_that_nothing_is_resident_is_said_after_the_second_pass(make: Any, collate: Any) -> None:
    with full(make) as cached:
        loader = hotset.DataLoader(cached, batch_size=4, collate_fn=collate)
        residents = GpuCache(ALL, CPU)
        assert residents.serve(iter(loader)) is None  # a first pass may fill the cache
        with pytest.warns(HotsetWarning, match="samples of different shape") as told:
            assert residents.serve(iter(loader)) is None
        assert is_a_sentence(str(told[0].message))
        assert residents.serve(iter(loader)) is None
        assert len(told) == 1


def shrinking(index: int) -> tuple[torch.Tensor, int]:
    """The first sample is the longest: what is filled in one go is padded to its length."""
    return torch.ones(30 - index), index


def test_padding_depends_on_the_batch_also_if_the_first_sample_is_the_longest() -> None:
    def compared() -> str | None:
        with full(shrinking) as cached, warnings.catch_warnings():
            warnings.simplefilter("ignore", HotsetWarning)
            loader = hotset.DataLoader(cached, batch_size=4, collate_fn=pad())
            return difference(passes(loader, GpuCache(ALL, CPU)), passes(loader, None))

    assert compared() is None


def test_a_limit_below_one_sample_is_refused() -> None:
    with full(image_and_label) as cached:
        text = refused(hotset.DataLoader(cached, batch_size=4), 97)
        assert "98 B" in text
        assert "resident=97 B" in text


def test_samples_without_tensors_are_refused() -> None:
    with full(lambda index: {}) as cached:
        assert "they hold no tensors" in refused(hotset.DataLoader(cached, batch_size=4))


def test_a_device_without_room_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(*_: Any, **__: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError

    with full(image_and_label) as cached:
        loader = hotset.DataLoader(cached, batch_size=4)
        iterator = iter(loader)
        residents = GpuCache(ALL, CPU)
        with monkeypatch.context() as patch:
            patch.setattr(torch, "empty", no_room)
            with pytest.warns(HotsetWarning, match="lower resident="):
                assert residents.serve(iterator) is None


@pytest.mark.parametrize("kind", ["torch's", "live", "own collate", "batch_size=None", "two caches", "list"])
def test_other_batches_come_as_ever_and_nothing_is_said(kind: str) -> None:
    with full(image_and_label, transform=[draw_all] if kind == "live" else None) as cached:
        loaders: dict[str, Callable[[], Any]] = {
            "torch's": lambda: DataLoader(cached, 4),
            "live": lambda: hotset.DataLoader(cached, batch_size=4),
            "own collate": lambda: hotset.DataLoader(cached, batch_size=4, collate_fn=list),
            "batch_size=None": lambda: hotset.DataLoader(cached, batch_size=None),
            "list": lambda: [torch.ones(1)],
        }
        if kind == "two caches":
            with full(image_and_label) as other:
                loader: Any = hotset.DataLoader(ConcatDataset([cached, other]), batch_size=4)
                assert GpuCache(ALL, CPU).serve(iter(loader)) is None
        else:
            assert GpuCache(ALL, CPU).serve(iter(loaders[kind]())) is None


@pytest.mark.parametrize("make", [ragged, odd_at_seven], ids=["ragged", "one odd"])
def test_what_default_collating_cannot_stack_raises_as_ever(make: Callable[[int], Any]) -> None:
    with hotset.cache(Samples(make, N)) as cached:
        loader = hotset.DataLoader(cached, batch_size=4)
        for _ in range(2):
            assert GpuCache(ALL, CPU).serve(iter(loader)) is None


def test_how_much() -> None:
    assert [parse_resident(given, CPU) for given in (None, "1KiB", 7)] == [None, 1024, 7]
    for given, kind in (
        ("0", ArgumentError),
        (0, ArgumentError),
        ("abc", QuantityError),
        (-1, QuantityError),
    ):
        with pytest.raises(kind, match="resident"):
            parse_resident(given, CPU)


# ---- through the queue --------------------------------------------------------------------------------


class AheadLane(HostTransfer):
    ahead = True

    def __init__(self, device: torch.device, depth: int) -> None:
        super().__init__(device)


@pytest.mark.parametrize("limit", ["1MiB", 98 * 9], ids=["all", "some"])
def test_a_queue_with_residents_goes_on_from_its_state(limit: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The queue sends ahead and stands at its own place, whatever of its samples is resident."""
    monkeypatch.setattr("hotset.device.queue.transfer_to", AheadLane)
    with full(image_and_label) as cached:

        def queue() -> Any:
            made = hotset.DeviceQueue(hotset.DataLoader(cached, batch_size=4, shuffle=True), device="cpu")
            made._gpu_cache = GpuCache(ALL if limit == "1MiB" else limit, CPU)
            return made

        loader = hotset.DataLoader(cached, batch_size=4, shuffle=True)
        seed_everything()
        expected = [list(loader), list(loader)]
        seed_everything()
        with queue() as first, queue() as second:
            equal_batches(list(first), expected[0])
            kept = N if limit == "1MiB" else 9
            assert first.stats() == (6, N * 98, first.stats().waited, kept)
            iterator = iter(first)
            equal_batches([next(iterator) for _ in range(2)], expected[1][:2])
            second.load_state_dict(first.state_dict())
            equal_batches(list(second), expected[1][2:])
            equal_batches(list(iterator), expected[1][2:])
            first.close()
            assert first.stats().resident == 0
            assert len(list(first)) == 6
            assert first.stats().resident == kept


def test_rows_are_found_by_name() -> None:
    """Names with gaps: rows are numbered in the order of the names that fit."""
    with full(small_float) as cached:
        chosen = [21, 4, 9, 15, 2]
        loader = hotset.DataLoader(Subset(cached, chosen), batch_size=2)
        residents = GpuCache(16 * 3, CPU)
        residents.serve(iter(loader))
        assert residents.rows(np.array([2, 4, 9, 15, 21, 3])).tolist() == [0, 1, 2, -1, -1, -1]


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.bfloat16, torch.float32, torch.complex128])
@pytest.mark.parametrize("shape", [(), (3,), (8,), (2, 6), (0,)])
def test_rows_of_any_width_are_gathered(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """They are moved as the widest integers of which a row is a multiple."""
    cache = GpuCache(1 << 20, CPU)
    column = torch.arange(7 * int(np.prod(shape))).view(7, *shape).to(dtype)
    cache.columns, cache.example = [column], (column[:1],)
    rows = torch.tensor([3, 0, 3])
    (found,) = cache.select(rows)
    assert (found.dtype, found.shape) == (dtype, (3, *shape))
    assert torch.equal(found, column[rows])
