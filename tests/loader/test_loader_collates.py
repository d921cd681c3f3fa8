"""Any collate function, and ``batch_size=None``: served from the cache, bit for bit as torch's loader does.

A collate function draws from all global generators, says which worker and which dataset it sees, and returns
any object: the samples themselves, one tensor in two places, objects of its own.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import all_pairs, equal_batches, eventually, rarely, seed_everything
from kills import child, ended, gone
from live import draw_all
from resuming import same, training
from samples import image_and_label, number, poster_and_label
from sources import Counting, Listed, ReadLog, Samples, Streamed, Transformed
from test_loader_equals_torch import compare, record
from test_resume_epochs import through_json
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    default_collate,
    default_convert,
    get_worker_info,
)
from torch.utils.data._utils.collate import default_collate_fn_map

import hotset
from hotset.determinism.objects.code_dependencies import loaded_globals
from hotset.session import recovery

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")

N = 22


@dataclass
class Made:
    """A batch of a user's class, which torch does not know."""

    images: torch.Tensor
    labels: Any


def as_they_are(samples: Any) -> Any:
    return samples


def drawing(samples: Any) -> Any:
    drawn = random.random(), np.random.rand(2), torch.rand(3)
    info = get_worker_info()
    seen = (-1, 0, "") if info is None else (info.id, info.seed % 2**62, len(info.dataset))
    together = default_collate if isinstance(samples, list) else default_convert
    return {"batch": together(samples), "drawn": drawn, "worker": seen}


def drawing_only(samples: Any) -> Any:
    """Leave out the seeds with which workers began: they cannot be given to workers again."""
    made = drawing(samples)
    return made["batch"], made["drawn"], made["worker"][0]


def of_all_kinds(samples: Any) -> Any:
    images = torch.stack([sample[0] for sample in samples])
    return {
        "images": images,
        "again": images,
        "part": images[:, :1],
        "turned": images.transpose(0, 1),
        "empty": torch.empty(0, 3),
        "grad": torch.ones(2, requires_grad=True),
        "text": "text",
        3: [None, (1.5, torch.tensor(7))],
    }


def tidy(samples: Any) -> Any:
    """A collate function whose batches can be laid out in a block."""
    images = torch.stack([sample[0] for sample in samples])
    return {"images": images, "labels": [torch.tensor([sample[1]]) for sample in samples], "n": len(samples)}


def objects(samples: Any) -> Any:
    return Made(torch.stack([sample[0] for sample in samples]), np.array([sample[1] for sample in samples]))


def _order(kind: str, data: Any) -> dict[str, Any]:
    if kind == "shuffle":
        return {"shuffle": True}
    if kind == "generator=":
        return {"shuffle": True, "generator": torch.Generator().manual_seed(5)}
    return {"sampler": Listed([3, 1, torch.tensor(4), -1, np.int64(7), 3])}


WORKERS: dict[str, dict[str, Any]] = {
    "no workers": {},
    "workers": {"num_workers": 2, "prefetch_factor": 1, "timeout": 600},
    "persistent workers": {"num_workers": 2, "persistent_workers": True},
}


def _as_torchs(options: Callable[[Any], dict[str, Any]], live: bool = False) -> None:
    suffix = [draw_all] if live else []
    plain = Transformed(Samples(image_and_label, N), suffix)
    with hotset.cache(Samples(image_and_label, N), transform=suffix or None, memory="16MiB") as cached:
        expected = record(lambda: DataLoader(plain, **options(plain)))
        loaders: list[Any] = []

        def ours() -> Any:
            loaders.append(hotset.DataLoader(cached, **options(cached)))
            return loaders[-1]

        got = record(ours)
        compare(got, expected)
        assert len(expected) > 8
        assert loaders[-1].last_epoch.hit_rate == 1.0


@pytest.mark.parametrize(
    ("collate", "order", "workers"),
    rarely(
        all_pairs([as_they_are, drawing, of_all_kinds, tidy], ["shuffle", "listed"], WORKERS),
        (as_they_are, "listed", "workers"),
        (of_all_kinds, "shuffle", "workers"),
        (drawing, "shuffle", "persistent workers"),
    ),
)
def test_a_collate_function_of_the_users(collate: Any, order: str, workers: str) -> None:
    _as_torchs(
        lambda data: {"batch_size": 4, "collate_fn": collate, **_order(order, data), **WORKERS[workers]}
    )


@pytest.mark.parametrize(
    ("collate", "order", "workers"),
    rarely(
        all_pairs([None, as_they_are, drawing], ["shuffle", "listed"], WORKERS),
        (drawing, "shuffle", "workers"),
        (as_they_are, "shuffle", "workers"),
        (None, "listed", "persistent workers"),
    ),
)
def test_batch_size_none_equals_torchs(collate: Any, order: str, workers: str) -> None:
    """``batch_size=None``, with ``default_convert`` and with functions of the user's."""
    _as_torchs(
        lambda data: {"batch_size": None, "collate_fn": collate, **_order(order, data), **WORKERS[workers]}
    )


@pytest.mark.parametrize(
    ("batched", "workers"),
    rarely(itertools.product([True, False], ["no workers", "workers"]), (True, "workers")),
)
def test_with_live_transforms(batched: bool, workers: str) -> None:
    _as_torchs(
        lambda data: {
            "batch_size": 4 if batched else None,
            "collate_fn": drawing if batched else None,
            **_order("generator=", data),
            **WORKERS[workers],
        },
        live=True,
    )


@pytest.mark.parametrize("workers", [0, 2])
def test_objects_of_the_users_arrive_as_they_are(workers: int) -> None:
    with hotset.cache(Samples(image_and_label, N), memory="1MiB") as cached:
        options: dict[str, Any] = {"batch_size": 4, "collate_fn": objects, "num_workers": workers}
        theirs = list(DataLoader(Samples(image_and_label, N), **options))
        for _ in range(2):
            ours = list(hotset.DataLoader(cached, **options))
            assert {type(batch) for batch in ours} == {Made}
            equal_batches([vars(batch) for batch in ours], [vars(batch) for batch in theirs])


@pytest.mark.parametrize("workers", [0, 2])
def test_one_memory_stays_one_memory(workers: int) -> None:
    """Writing to one of two views of a batch's memory changes both, as with torch's loader."""
    with hotset.cache(Samples(image_and_label, N), memory="1MiB") as cached:
        for data in (Samples(image_and_label, N), cached, cached):
            kind = DataLoader if data is not cached else hotset.DataLoader
            for batch in kind(data, batch_size=4, collate_fn=of_all_kinds, num_workers=workers):
                assert batch["again"] is batch["images"]
                batch["images"].fill_(9)
                assert (batch["part"] == 9).all()
                assert (batch["turned"] == 9).all()
                assert not batch["turned"].is_contiguous()
                assert batch["grad"].requires_grad


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_that_are_nested_deeply_arrive_as_from_torch(workers: int) -> None:
    class Nested(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> Any:
            value: Any = index
            for _ in range(450):
                value = [value]
            return value

    arguments: dict[str, Any] = {"batch_size": 2, "num_workers": workers, "collate_fn": tuple}
    expected = list(DataLoader(Nested(), **arguments))
    with pytest.warns(hotset.HotsetWarning, match="nested too deeply"):
        cached = hotset.cache(Nested(), memory="1MiB")
    assert list(hotset.DataLoader(cached, **arguments)) == expected
    cached.close()


@pytest.mark.parametrize(
    ("make", "workers"), [(image_and_label, 0), (image_and_label, 2), (poster_and_label, 0)]
)
def test_functions_that_the_user_has_registered_for_default_collate_are_used(
    make: Callable[[int], Any], workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In batches of more than a megabyte, too, which the main process collates into memory of its own."""

    def as_list(batch: Any, *, collate_fn_map: Any = None) -> list[Any]:
        return list(batch)

    monkeypatch.setitem(default_collate_fn_map, torch.Tensor, as_list)
    data = Samples(make, N)
    expected = list(DataLoader(data, batch_size=4, num_workers=workers))
    assert isinstance(expected[0][0], list)
    with hotset.cache(data, memory="16MiB") as cached:
        loader = hotset.DataLoader(cached, batch_size=4, num_workers=workers)
        for _ in range(2):
            equal_batches(list(loader), expected)


def numbers_in_a_dict(samples: Any) -> Any:
    return {"image": torch.stack([image for image, _ in samples]), "count": torch.tensor(len(samples))}


@pytest.mark.parametrize("workers", [0, 2])
def test_tensors_without_dimensions_of_the_users_collate_function(workers: int) -> None:
    options: dict[str, Any] = {"batch_size": 4, "collate_fn": numbers_in_a_dict, "num_workers": workers}
    with hotset.cache(Samples(image_and_label, N), memory="1MiB") as cached:
        theirs = list(DataLoader(Samples(image_and_label, N), **options))
        for _ in range(2):
            equal_batches(list(hotset.DataLoader(cached, **options)), theirs)


class Bulk(Samples):
    """A dataset that takes lists of indices, and returns a batch for each."""

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, list):
            return default_collate([self.make(i) for i in index]), [type(i).__name__ for i in index]
        return super().__getitem__(index)


@pytest.mark.parametrize("workers", [0, 2])
def test_indices_that_are_lists(workers: int) -> None:
    """``sampler=BatchSampler(...)`` with ``batch_size=None``: the dataset is given lists, not arrays."""

    source = Bulk(number, N)
    for order in (SequentialSampler(source), RandomSampler(source)):
        options: dict[str, Any] = {"sampler": BatchSampler(order, 4, False), "num_workers": workers}
        seed_everything(1)
        expected = list(DataLoader(source, batch_size=None, **options))
        seed_everything(1)
        loader = hotset.DataLoader(source, batch_size=None, **options)
        equal_batches(list(loader), expected)
        assert (loader.last_epoch.batches, loader.last_epoch.samples) == (6, N)


@pytest.mark.parametrize("workers", [0, 1])
def test_samples_are_read_once_and_then_come_from_the_cache(workers: int, tmp_path: Path) -> None:
    log = ReadLog(tmp_path / "reads")
    with hotset.cache(Counting(image_and_label, N, log), memory="1MiB") as cached:
        for options in ({"batch_size": 4, "collate_fn": drawing}, {"batch_size": None}):
            cached.clear()
            log.reset()
            loader = hotset.DataLoader(cached, num_workers=workers, **options)
            list(loader)
            assert loader.last_epoch.hit_rate == 0.0
            list(loader)
            assert loader.last_epoch.hit_rate == 1.0
            assert (loader.last_epoch.samples, log.total()) == (N, N)


def refusing(samples: Any) -> Any:
    labels = [sample[1] for sample in samples]
    if image_and_label(9)[1] in labels:
        raise KeyError("no nines")
    return labels


@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_in_a_collate_function_is_the_users_own(workers: int) -> None:
    options: dict[str, Any] = {"batch_size": 4, "collate_fn": refusing, "num_workers": workers}

    def story(loader: Any) -> list[Any]:
        seen: list[Any] = []
        batches = iter(loader)
        while True:
            try:
                seen.append(next(batches))
            except StopIteration:
                return seen
            except KeyError as error:
                seen.append((type(error).__name__, str(error).splitlines()[0]))

    expected = story(DataLoader(Samples(image_and_label, N), **options))
    failed = sum(type(part) is tuple for part in expected)
    assert 0 < failed < len(expected)
    with hotset.cache(Samples(image_and_label, N), memory="1MiB") as cached:
        loader = hotset.DataLoader(cached, **options)
        for _ in range(2):
            assert story(loader) == expected
            assert loader.last_epoch.batches == len(expected) - failed


# ---- what a pass was like -------------------------------------------------------------------------------

PASSES: dict[str, Callable[[Any], Any]] = {
    "a collate function": lambda **o: hotset.DataLoader(o.pop("cached"), 4, collate_fn=as_they_are, **o),
    "one by one": lambda **o: hotset.DataLoader(o.pop("cached"), None, **o),
    "without a cache": lambda **o: o.pop("cached") and hotset.DataLoader(Samples(number, N), 4, **o),
    "without a cache, dropping": lambda **o: (
        o.pop("cached")
        and hotset.DataLoader(Samples(number, N + 3), 4, drop_last=True, sampler=range(N + 1), **o)
    ),
    "without a cache, one by one": lambda **o: (
        o.pop("cached") and hotset.DataLoader(Samples(number, N), None, **o)
    ),
    "without a cache, other batches": lambda **o: (
        o.pop("cached")
        and hotset.DataLoader(
            Samples(number, N), batch_sampler=[list(range(2)), list(range(19)), [1], [], [], []], **o
        )
    ),
    "a stream": lambda **o: o.pop("cached") and hotset.DataLoader(Streamed(24), 4, **o),
}


@pytest.mark.parametrize(
    ("kind", "workers"),
    rarely(
        itertools.product(PASSES, [0, 2]),
        ("without a cache, one by one", 2),
        ("without a cache, other batches", 2),
        ("one by one", 2),
    ),
)
def test_a_pass_is_summed_up_whichever_way_it_took(kind: str, workers: int) -> None:
    if kind.endswith("other batches"):
        collate: dict[str, Any] = {"collate_fn": as_they_are}
    else:
        collate = {}
    with hotset.cache(Samples(number, N), memory="1MiB") as cached:
        loader = PASSES[kind](cached=cached, num_workers=workers, **collate)
        assert loader.last_epoch is None
        for pass_ in range(2):
            batches = len(list(loader))
            summary = loader.last_epoch
            assert (summary.number, summary.batches) == (pass_, batches)
            assert summary.samples == {"a stream": 24, "without a cache, dropping": 20}.get(kind, N)
            assert summary.hit_rate == (0.0 if "without" in kind or kind == "a stream" or not pass_ else 1.0)
            assert f"epoch {pass_}: " in str(summary)


# ---- going on -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "workers"),
    rarely(
        itertools.product(["a collate function", "one by one", "lists"], WORKERS),
        ("one by one", "workers"),
        ("a collate function", "workers"),
        ("a collate function", "persistent workers"),
        ("lists", "persistent workers"),
    ),
)
def test_a_resumed_pass_equals_an_uninterrupted_one(kind: str, workers: str) -> None:
    """Bit for bit, with what live transforms and the collate function itself draw."""
    options: dict[str, Any] = {"batch_size": 4, "shuffle": True, "collate_fn": drawing_only}
    if kind == "one by one":
        options["batch_size"] = None
    with hotset.cache(Samples(image_and_label, N), transform=[draw_all], memory="1MiB") as cached:

        def make() -> Any:
            if kind == "lists":
                order = BatchSampler(RandomSampler(cached), 4, False)
                return hotset.DataLoader(_Lists(cached), batch_size=None, sampler=order, **WORKERS[workers])
            return hotset.DataLoader(cached, **options, **WORKERS[workers])

        seed_everything(1)
        loader = make()
        batches = iter(loader)
        training(batches, 3)
        state = through_json(loader.state_dict())
        expected = [training(batches)]
        between = through_json(loader.state_dict())
        expected += [training(loader), training(loader)]
        del batches, loader
        for saved, following in ((state, expected), (between, expected[1:])):
            seed_everything(2)
            loader = make()
            loader.load_state_dict(saved)
            if workers == "persistent workers" and saved is between and kind == "lists":
                continue  # torch's own workers, which draw on where nobody can begin them
            same([training(loader) for _ in following], following)


class _Lists(Samples):
    """A dataset of the user's around a cached one: the loader is then torch's own."""

    def __init__(self, cached: Any) -> None:
        self.cached = cached

    def __len__(self) -> int:
        return len(self.cached)

    def __getitem__(self, index: Any) -> Any:
        return self.cached.__getitems__(index)


# ---- workers end ----------------------------------------------------------------------------------------


class Stuck(Samples):
    """In a worker, reading from sample 4 on waits for a disk that is gone."""

    def __init__(self, told: Path) -> None:
        super().__init__(number, 8)
        self.told = told

    def __getitem__(self, index: int) -> Any:
        if get_worker_info() is not None:
            self.stick()
        return super().__getitem__(index)

    def stick(self) -> None:
        with self.told.open("a") as file:
            file.write(f"{os.getpid()}\n")
        time.sleep(1000)

    def collate(self, samples: Any) -> Any:
        self.stick()


class StuckStream(IterableDataset[Any]):
    def __init__(self, told: Path) -> None:
        self.source = Stuck(told)

    def __iter__(self) -> Iterator[Any]:
        yield self.source[0]


STUCK: dict[str, Callable[[Any, Path], Any]] = {
    "without a cache": lambda loader, told: loader(Stuck(told), 2, num_workers=2),
    "a stream": lambda loader, told: loader(StuckStream(told), 2, num_workers=2),
    "a collate function": lambda loader, told: loader(
        hotset.cache(Samples(number, 8)), 2, num_workers=2, collate_fn=Stuck(told).collate
    ),
    "one by one": lambda loader, told: loader(
        hotset.cache(Samples(number, 8)), None, num_workers=2, collate_fn=Stuck(told).collate
    ),
    "around a cache": lambda loader, told: loader(
        Transformed(hotset.cache(Samples(number, 8)), [lambda sample: Stuck(told)[0]]), 2, num_workers=2
    ),
}


@pytest.mark.parametrize("kind", STUCK)
def test_workers_in_the_midst_of_something_end_with_their_main_process(kind: str, tmp_path: Path) -> None:
    told = tmp_path / "workers"

    def job() -> None:
        held = iter(STUCK[kind](hotset.DataLoader, told))
        assert eventually(lambda: told.exists() and len(told.read_text().split()) == 2)
        os.kill(os.getpid(), signal.SIGKILL)
        del held

    assert ended(child(job)) == -signal.SIGKILL
    workers = [int(pid) for pid in told.read_text().split()]
    ends = eventually(lambda: all(map(gone, workers)))
    for worker in workers if not ends else ():
        os.kill(worker, signal.SIGKILL)
    assert ends
    recovery.gc()


@pytest.mark.parametrize("data", ["cached", "without a cache", "a subset"])
@pytest.mark.parametrize("collate", [drawing, None])
def test_worker_init_fn_sees_the_users_dataset(data: str, collate: Any, tmp_path: Path) -> None:
    with hotset.cache(Samples(image_and_label, N), memory="1MiB") as cached:
        given: Any = {"cached": cached, "without a cache": Samples(image_and_label, N)}.get(data)
        given = Subset(cached, range(9)) if data == "a subset" else given

        def init(worker: int) -> None:
            info = get_worker_info()
            assert info is not None
            (tmp_path / f"{worker}").write_text(f"{type(info.dataset).__name__} {len(info.dataset)}")

        options: dict[str, Any] = {"collate_fn": collate, "num_workers": 2, "worker_init_fn": init}
        loader = hotset.DataLoader(given, batch_size=None if collate is None else 4, **options)
        list(loader)
        assert loader.worker_init_fn is init
        told = [(tmp_path / f"{worker}").read_text() for worker in range(2)]
        assert told == [f"{type(given).__name__} {len(given)}"] * 2


@pytest.mark.parametrize("workers", [0, 1])
def test_rows_of_a_mapped_file_and_default_dicts_are_cached_and_stacked_as_torch_stacks_them(
    workers: int, tmp_path: Path
) -> None:
    np.arange(40.0 * 6).tofile(tmp_path / "x")
    mapped = np.memmap(tmp_path / "x", np.float64, "c", shape=(40, 6))

    def make(index: int) -> Any:
        return {"x": mapped[index], "y": defaultdict(int, a=index), "z": np.float32(index)}

    options: dict[str, Any] = {"batch_size": 6, "num_workers": workers}
    expected = list(DataLoader(Samples(make), **options))
    with hotset.cache(Samples(make), memory="4MiB") as cached:
        for _ in range(2):
            equal_batches(list(hotset.DataLoader(cached, **options)), expected)
            equal_batches(list(DataLoader(cached, **options)), expected)
        assert cached.stats().cached == 40
        assert type(cached[3]["x"]) is np.memmap
        cached[3]["x"][:] = 0.0  # the caller's own
        assert cached[3]["x"].tolist() == mapped[3].tolist()
        assert cached.check() == []


class Paired:
    """A collate function with code of the user's behind it, as those with a tokenizer have."""

    def __call__(self, samples: list[int]) -> list[int]:
        return self.worked_out(samples)

    def worked_out(self, samples: list[int]) -> list[int]:
        return [loaded_globals.cache_info().misses, *samples]


def test_forked_workers_need_not_work_out_what_the_code_of_a_collate_function_reaches() -> None:
    with hotset.cache(Samples(number), memory="1MiB") as cached:
        loader = hotset.DataLoader(cached, batch_size=4, num_workers=1, collate_fn=Paired())
        misses = [batch[0] for _ in range(2) for batch in loader]
        assert len(set(misses)) == 1  # looked up in the main process, before the worker was forked
