"""Filling a whole cache at once, before training: ``cached.fill(progress=True)``.

The samples that are not cached are read part by part, in this process or in torch's worker processes over a
private dataset whose items are the parts. Claims divide them among all processes that fill, ranks too. What
is read is kept at once, so that an interrupted fill resumes where it was. Nothing is drawn from a random
number generator of the program.

It ends as soon as the cache is full, as what is read after that could not be stored.
"""

from __future__ import annotations

import contextlib
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from hotset._progress import filling_bar
from hotset.dataset.parent_death import parent_death_signal
from hotset.dataset.sample_access import SampleAccess, Told
from hotset.errors import ArgumentError
from hotset.store.claims import Ids

__all__ = ["fill_now", "loader_of_items", "require_worker_count"]

_PART = 64


class _Done(NamedTuple):
    """The result of filling a part: warnings for the user, and whether the cache is full."""

    warnings: list[Told]
    full: bool


class _Parts(Dataset[_Done]):
    """The private dataset: reading item number k fills the cache with the k-th part."""

    def __init__(self, access: SampleAccess, ids: Ids) -> None:
        self._access = access
        self.size = max(_PART, access.at_once)
        self._parts = [ids[start : start + self.size] for start in range(0, len(ids), self.size)]

    def __len__(self) -> int:
        return len(self._parts)

    def __getitem__(self, number: int) -> _Done:
        access, noted = self._access, list[Told]()
        access.tell = noted.append
        try:
            access.fill(self._parts[number], keep=False)
        finally:
            access.tell = None
        store = access.store
        return _Done(noted, full=store is None or store.filler.is_full)


def fill_now(access: SampleAccess, progress: bool, num_workers: int) -> None:
    """Read all samples that are not cached, as far as there is room.

    Raises:
        Exception: what the dataset raises.
    """
    store = access.store
    if store is None:
        return
    ids = np.arange(len(store))
    missing = ids[store.index.missing(ids)]
    parts = _Parts(access, missing)
    # What the dataset opens as it reads, forked workers of a later loader would share.
    kept_closed = contextlib.nullcontext() if num_workers else access.in_place_of_workers()
    with kept_closed, filling_bar(access.plan.name, len(ids), progress) as show:
        show(len(ids) - len(missing), store.stored_bytes)
        here = map(parts.__getitem__, range(len(parts)))
        for number, done in enumerate(loader_of_items(parts, num_workers) if num_workers else here, 1):
            for told in done.warnings:
                access.warn(*told)
            show(len(ids) - max(len(missing) - number * parts.size, 0), store.stored_bytes)
            if done.full:
                return
    access.warn_of_draws()


def require_worker_count(num_workers: object) -> None:
    """Refuse what is not a number of workers.

    Raises:
        ArgumentError: ``num_workers`` is not a whole number from 0 on.
    """
    if type(num_workers) is not int or num_workers < 0:
        raise ArgumentError(f"num_workers= must be a whole number from 0 on, got {num_workers!r}.")


def loader_of_items(dataset: Dataset[Any], num_workers: int) -> DataLoader[Any]:
    """A loader that gives item by item, and whose workers die with this process."""
    return DataLoader(
        dataset,
        batch_size=None,
        num_workers=num_workers,
        worker_init_fn=parent_death_signal().arm_in_worker,
        # Not the program's, and of the device on which the loader draws the seed of its workers from it.
        generator=torch.Generator(torch.get_default_device()),
    )
