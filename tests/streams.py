"""Iterable datasets for tests of recorded streams."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import IterableDataset, get_worker_info

__all__ = ["Numbers", "share", "values"]


def share(count: int, rank: int = 0, ranks: int = 1) -> range:
    """The numbers below ``count`` that this worker of this rank gives."""
    info = get_worker_info()
    worker, workers = (info.id, info.num_workers) if info is not None else (0, 1)
    return range(rank * workers + worker, count, ranks * workers)


class Numbers(IterableDataset[Any]):
    """Gives ``(tensor of the number, number)``, divided among workers and ranks."""

    def __init__(
        self, count: int = 60, *, rank: int = 0, ranks: int = 1, shape: tuple[int, ...] = (4,)
    ) -> None:
        self.count = count
        self.rank, self.ranks = rank, ranks
        self.shape = shape
        self.fails_at = -1

    def __iter__(self) -> Iterator[Any]:
        for number in share(self.count, self.rank, self.ranks):
            if number == self.fails_at:
                raise ValueError(f"number {number} cannot be read")
            yield torch.full(self.shape, float(number)), number


class Shuffled(Numbers):
    """The same numbers, in another order in each run."""

    def __iter__(self) -> Iterator[Any]:
        numbers = list(share(self.count))
        random.shuffle(numbers)
        for number in numbers:
            yield torch.full(self.shape, float(number)), number


def values(batches: Any) -> list[int]:
    """The numbers in batches of :class:`Numbers`, in order."""
    return [number for _, numbers in batches for number in numbers.tolist()]
