"""A cached dataset takes every index that its source takes: slices, lists, arrays, masks, keys."""

from __future__ import annotations

import itertools
import random
from typing import Any

import numpy as np
import pytest
import torch
from helpers import equal_batches, failure, rarely, rng_states, seed_everything
from torch.utils.data import BatchSampler, DataLoader, Dataset, SequentialSampler, Subset, TensorDataset

import hotset

N = 10


class Columns(Dataset[Any]):
    """Like Hugging Face's: a row by its number, several by slices and lists, a column by its name."""

    def __init__(self) -> None:
        self.columns = {"x": torch.arange(2.0 * N).view(N, 2), "y": np.arange(N)}

    def __len__(self) -> int:
        return N

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, str):
            return self.columns[key]
        return {name: column[key] for name, column in self.columns.items()}


class Rows(Dataset[Any]):
    """Single rows only."""

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < N:
            raise IndexError(f"no row {index}")
        return torch.full((3,), float(index))


class Many(Rows):
    """Has a method of its own for lists of keys."""

    def __getitems__(self, keys: list[Any]) -> list[Any]:
        return [f"many {key}" if isinstance(key, str) else self[key] for key in keys]


class InWords(Dataset[Any]):
    def __len__(self) -> int:
        return 3

    def __getitem__(self, key: Any) -> Any:
        words = {"one": 1, "two": 2, "three": 3}
        return torch.tensor(words[key] if isinstance(key, str) else list(words.values())[key])


SOURCES: dict[str, Any] = {
    "tensors": lambda: TensorDataset(torch.arange(3.0 * N).view(N, 3), torch.arange(N)),
    "columns": Columns,
    "rows": Rows,
    "list": lambda: [torch.tensor(i) for i in range(N)],
}

INDICES: dict[str, Any] = {
    "slice": slice(2, 5),
    "stepped": slice(1, None, 3),
    "list": [3, 1, 1, 7],
    "empty": [],
    "array": np.array([3, 1]),
    "array of one": np.array([3]),
    "tensor": torch.tensor([4, 0]),
    "tensor of one": torch.tensor([4]),
    "mask": torch.arange(N) % 2 == 0,
    "list mask": [True, False] * (N // 2),
    "numpy scalar": np.int16(4),
    "torch scalar": torch.tensor(4),
    "array scalar": np.array(4),
    "bool": True,
    "numpy bool": np.True_,
    "name": "y",
    "no name": "z",
    "tuple": (1, 2),
    "none": None,
    "float": 1.5,
    "out of range": N,
    "ellipsis": ...,
}


@pytest.mark.parametrize("index", INDICES)
@pytest.mark.parametrize("kind", SOURCES)
def test_every_index_gives_what_the_dataset_gives(kind: str, index: str) -> None:
    source, key = SOURCES[kind](), INDICES[index]
    with hotset.cache(SOURCES[kind](), memory="1MiB") as cached:
        for _ in range(2):
            try:
                expected = source[key]
            except Exception:
                theirs, ours = failure(lambda: source[key]), failure(lambda: cached[key])
                assert (ours.kind, ours.text) == (theirs.kind, theirs.text)
            else:
                equal_batches(cached[key], expected)


def test_integers_of_every_type_come_from_the_cache() -> None:
    with hotset.cache(Rows(), memory="1MiB") as cached:
        for key in (
            4,
            np.int16(4),
            np.uint64(4),
            torch.tensor(4),
            torch.tensor(4, dtype=torch.uint8),
            np.array(4),
        ):
            equal_batches(cached[key], torch.full((3,), 4.0))
        assert (cached.stats().cached, cached.stats().hits, cached.stats().misses) == (1, 5, 1)


@pytest.mark.parametrize(
    ("kind", "made_by", "workers"),
    rarely(
        itertools.product(["tensors", "columns"], [DataLoader, hotset.DataLoader], [0, 2]),
        ("tensors", DataLoader, 2),
        ("columns", hotset.DataLoader, 2),
    ),
)
def test_a_batch_sampler_as_the_sampler(kind: str, made_by: Any, workers: int) -> None:
    def batches(dataset: Any, loader: Any) -> list[Any]:
        sampler = BatchSampler(SequentialSampler(dataset), 4, False)
        made = loader(dataset, batch_size=None, sampler=sampler, num_workers=workers)
        return [batch for _ in range(2) for batch in made]

    expected = batches(SOURCES[kind](), DataLoader)
    with hotset.cache(SOURCES[kind](), memory="1MiB") as cached:
        equal_batches(batches(cached, made_by), expected)


@pytest.mark.parametrize("source", [Many, InWords])
def test_lists_of_keys_are_passed_to_the_dataset(source: Any) -> None:
    keys = ["one", "three"]
    plain = DataLoader(source(), batch_sampler=[keys, [0, 1]])
    with hotset.cache(source(), memory="1MiB") as cached:
        equal_batches(list(DataLoader(cached, batch_sampler=[keys, [0, 1]])), list(plain))
        equal_batches(list(hotset.DataLoader(cached, batch_sampler=[keys, [0, 1]])), list(plain))
        equal_batches(cached.__getitems__([0, 1]), [source()[0], source()[1]])


def test_a_subset_hands_lists_on() -> None:
    part = Subset(TensorDataset(torch.arange(N)), [5, 6, 7])
    with hotset.cache(TensorDataset(torch.arange(N)), memory="1MiB") as cached:
        equal_batches(Subset(cached, [5, 6, 7]).__getitems__([2, 0]), part.__getitems__([2, 0]))


def test_what_transform_means_for_several_samples_is_not_guessed() -> None:
    with hotset.cache(Columns(), memory="1MiB", transform=lambda row: row["x"] * 2) as cached:
        equal_batches(cached[1], torch.tensor([4.0, 6.0]))
        for key in (slice(2), [1, 2], "y"):
            with pytest.raises(TypeError, match="transform= takes one sample"):
                cached[key]


def test_a_windows_samples_are_numbered_by_the_window() -> None:
    with hotset.cache(Columns(), window=hotset.Window(4, replace=0.5)) as cached:
        assert cached[3].keys() == {"x", "y"}
        with pytest.raises(TypeError, match="indices are not the dataset's"):
            cached[1:3]


class DrawsForMany(Rows):
    def __getitems__(self, keys: list[int]) -> list[Any]:
        random.random()
        return [self[key] for key in keys]


def test_to_find_out_that_batches_draw_moves_no_generator() -> None:
    seed_everything()
    before = rng_states()
    with pytest.raises(hotset.NotCacheable, match="__getitems__ returns other samples"):
        hotset.cache(DrawsForMany(), memory="1MiB")
    assert rng_states() == before


class OneArray(Dataset[Any]):
    """Fills one array for each sample, and new ones for several."""

    def __init__(self) -> None:
        self.array = np.zeros(3)

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> Any:
        self.array[:] = index
        return self.array

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [np.full(3, float(index)) for index in indices]


def test_a_dataset_that_fills_one_array_for_each_sample_may_make_new_ones_for_several() -> None:
    with hotset.cache(OneArray(), memory="1MiB") as cached:
        for _ in range(2):
            equal_batches(list(hotset.DataLoader(cached, 2)), list(DataLoader(OneArray(), 2)))
            equal_batches(cached[2], np.full(3, 2.0))
