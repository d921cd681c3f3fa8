"""Accelerate: let a loader read from the cache again after ``Accelerator.prepare``.

``prepare`` and ``skip_first_batches`` wrap a loader: they take its arguments, shard or shorten its batch
sampler, and build a plain ``torch.utils.data.DataLoader`` (or torchdata's stateful one) inside the wrapper,
whatever the loader's class was. The wrapper does Accelerate's work: it moves batches to the device, keeps the
ranks' generators equal, and knows the last batch for ``gather_for_metrics``. So the wrapper stays, and only
the loader inside it is replaced, by a :class:`hotset.DataLoader` with the same arguments.

The alternative, to prepare everything but the loader and shard by ``DistributedSampler``, was rejected: only
the wrapper handles the last batch and gradient accumulation.
"""

from __future__ import annotations

from typing import Any, TypeVar

from torch.utils.data import IterableDataset

from hotset.loader.loader import DataLoader

__all__ = ["from_cache"]

P = TypeVar("P")

_KEPT = (
    "num_workers",
    "collate_fn",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "generator",
    "prefetch_factor",
    "persistent_workers",
    "pin_memory_device",
    "in_order",
)


def from_cache(prepared: P) -> P:
    """Let a loader that Accelerate has wrapped read its batches from the cache; returns the same wrapper.

    Use it on what ``Accelerator.prepare`` and ``skip_first_batches`` return. Batches, their order and their
    device stay the same. With ``DataLoaderConfiguration(use_stateful_dataloader=True)``, ``save_state`` and
    ``load_state`` save and load this loader's state: an interrupted epoch is resumed, and
    ``skip_first_batches`` must not be used as well. A state that was saved after the last batch is that of
    the next epoch. Accelerate keeps one loader state for all ranks, from the rank that wrote last: ranks
    whose live transforms draw from different seeds do not resume their own draws.

    Args:
        prepared: a ``DataLoaderShard`` or ``DataLoaderDispatcher``. Without a batch sampler (an iterable
            dataset, ``batch_size=None``) it is returned as it is, as no batches can be gathered.

    Raises:
        TypeError: ``prepared`` is not a loader that Accelerate has wrapped.

    Example:
        >>> import hotset, torch
        >>> from accelerate import Accelerator
        >>> from torch.utils.data import TensorDataset
        >>> accelerator = Accelerator(cpu=True)
        >>> cached = hotset.cache(TensorDataset(torch.arange(8)), memory="1MiB")
        >>> loader = from_cache(accelerator.prepare(hotset.DataLoader(cached, batch_size=4)))
        >>> [x.tolist() for x, in loader]
        [[0, 1, 2, 3], [4, 5, 6, 7]]
    """
    wrapper: Any = prepared
    if "base_dataloader" not in getattr(wrapper, "__dict__", ()):
        raise TypeError(
            f"prepared must be a loader that Accelerate has wrapped, got a {type(prepared).__name__}; call "
            "Accelerator.prepare with the loader first."
        )
    plain = wrapper.base_dataloader
    if plain.batch_sampler is None or isinstance(plain.dataset, IterableDataset):
        return prepared
    wrapper.base_dataloader = DataLoader(
        plain.dataset, batch_sampler=plain.batch_sampler, **{name: getattr(plain, name) for name in _KEPT}
    )
    # Accelerate saves a copy of the state that it takes at each batch: this is the state before the first.
    wrapper.dl_state_dict = wrapper.base_dataloader.state_dict()
    return prepared
