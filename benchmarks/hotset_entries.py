"""hotset as a contestant.

An entry is opened as a user opens it, filled by one epoch, and refused when after that a sample is still
not cached: a benchmark of a cache that stepped aside would measure the source.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

from torch.utils.data import Dataset

from benchmarks import peers
from benchmarks.harness import Unfit
from benchmarks.peers import Epoch

__all__ = ["loader", "require_filled", "unmodified", "warm"]


def loader(
    stack: ExitStack,
    cached: Dataset[Any],
    batch_size: int,
    workers: int,
    collate: Callable[[Any], Any] | None = None,
) -> Epoch:
    """hotset's DataLoader over ``cached``, shuffled, with workers that stay."""
    from hotset import DataLoader

    return peers.loader(stack, cached, batch_size, workers, collate, DataLoader)


def warm(
    stack: ExitStack,
    dataset: Dataset[Any],
    batch_size: int,
    workers: int,
    *,
    transform: Sequence[Callable[[Any], Any]] | None = None,
    collate: Callable[[Any], Any] | None = None,
) -> Epoch:
    """hotset.cache and hotset.DataLoader, filled."""
    from hotset import cache

    cached = stack.enter_context(cache(dataset, transform=transform))
    return _filled(cached, loader(stack, cached, batch_size, workers, collate))


def unmodified(stack: ExitStack, dataset: Dataset[Any], batch_size: int, workers: int) -> Epoch:
    """hotset.cache, filled, under torch's own DataLoader."""
    from hotset import cache

    cached = stack.enter_context(cache(dataset))
    return _filled(cached, peers.loader(stack, cached, batch_size, workers))


def _filled(cached: Any, epoch: Epoch) -> Epoch:
    """Run one epoch, and return ``epoch``.

    Raises:
        Unfit: the cache then lacks samples.
    """
    for _ in epoch():
        pass
    require_filled(cached)
    return epoch


def require_filled(cached: Any) -> None:
    """Raise :class:`Unfit` unless ``cached`` holds every sample."""
    held = cached.stats().cached
    if held != len(cached):
        raise Unfit(f"after an epoch {held} of {len(cached)} samples are cached")
