"""``hotset.batched``: a deterministic transform that takes several samples at once, such as a frozen encoder.

::

    samples ── load ── preprocess ──╮ collated, at most `size` of them
                                    ├──> function ──╮ a result for each of them
                                    ╯               ╰──> cached

A transform of a chain takes one sample, and a network that takes one sample at a time leaves most of a
processor idle. So where hotset reads several samples for the cache, it collates them, calls the function
once, and caches each of the results as a sample. How many there are depends on the batches that the loader
asks for, and on what other processes have claimed: at most ``size``. A network need not give the same last
bits for batches of other sizes (libraries choose other kernels for them), and neither does the cache.

hotset caches such a transform or refuses it: after the cut it would get single samples, at each use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import default_collate, get_worker_info

from hotset.determinism.batch_transform import TakesBatches
from hotset.determinism.declare import declared
from hotset.determinism.objects.object_graph import within_reach
from hotset.errors import ArgumentError, NotCacheable

__all__ = ["Batched", "batched"]


def batched(transform: Callable[[Any], Any], size: int = 64) -> Batched:
    """Make a transform of ``transform=`` that is called with collated batches while the cache is filled.

    Its results are cached as samples. Parameters, buffers and code of ``transform`` are part of the cache's
    fingerprint, so a network with other weights has another cache.

    It runs without gradients. Where ``transform`` is itself a :class:`torch.nn.Module`, tensors of the batch
    are moved to the device of its parameters; results are moved to the CPU. A module on a GPU is never
    called in a worker process: :class:`hotset.DataLoader` fills the cache in the main process before it
    starts its workers, and ranks share that work.

    Args:
        transform: gets what :func:`torch.utils.data.default_collate` makes of the samples, and returns a row
            for each of them: a tensor or array whose first dimension counts them, a list with one item for
            each, or a dict or tuple of these. The rows of a dict or tuple are dicts or tuples.
        size: the most samples in one call.

    Returns:
        The transform. Called with one sample, it returns that sample's row.

    Raises:
        ArgumentError: ``transform`` is not callable, or ``size`` is not a positive whole number.

    Example:
        >>> encoder = torch.nn.Linear(3, 2).eval()
        >>> features = batched(encoder, size=32)
        >>> features(torch.ones(3)).shape
        torch.Size([2])
    """
    return Batched(transform, size)


class Batched(TakesBatches):
    """What :func:`batched` returns; its arguments are attributes of the same names."""

    def __init__(self, transform: Callable[[Any], Any], size: int) -> None:
        if not callable(transform):
            raise ArgumentError(f"hotset.batched must be given a callable, got {transform!r}.")
        if type(size) is not int or size < 1:
            raise ArgumentError(f"size= must be a whole number of at least 1, got {size!r}; 64 suits most.")
        self.transform = transform
        self.size = size

    def __call__(self, sample: Any) -> Any:
        """The row of one sample, in a batch of one."""
        (row,) = self.many([sample])
        return row

    def many(self, samples: Sequence[Any]) -> list[Any]:
        """The rows of several samples, in order, in one call.

        Raises:
            ArgumentError: the samples cannot be collated, or there is not one row for each.
            NotCacheable: a module that the function reaches was put into training mode since the cache was
                made, as ``model.train()`` does with all parts of a model.
            RuntimeError: the function's module is on a device, and this is a worker process; or it is on a
                device that cannot be used.
            Exception: what the function raises.
        """
        module = self.in_training
        if module is not None and declared(self) != "deterministic":
            raise NotCacheable(
                f"{self!r} must be called in evaluation mode, got {module} in training mode, and its results "
                "would be cached; call .eval() on it after model.train(), or give hotset.batched a copy of "
                "its own: copy.deepcopy(encoder).eval()."
            )
        device = self.device
        if device is not None and get_worker_info() is not None:
            raise RuntimeError(
                f"{self!r} runs on {device}, and must not be called in a worker process; call "
                "cached.fill() before the loader is used, with memory= or spill= for all samples, or give "
                "num_workers=0."
            )
        batch = self._collated(samples)
        with torch.no_grad():
            if device is not None and isinstance(self.transform, torch.nn.Module):
                batch = self._moved(batch, device)
            made = self.transform(batch)
            return self._rows(self._moved(made, torch.device("cpu")), len(samples))

    @property
    def device(self) -> torch.device | None:
        """Where the modules that the function reaches are, if that is not the CPU."""
        modules = (module for _, module in self._modules())
        tensors = (each for module in modules for each in (*module.parameters(), *module.buffers()))
        return next((each.device for each in tensors if each.device.type != "cpu"), None)

    @property
    def in_training(self) -> str | None:
        """The name of a module in training mode that the function reaches; None if there is none."""
        parts = ((path, *named) for path, module in self._modules() for named in module.named_modules())
        found = (f"{path}.{name}" if name else path for path, name, part in parts if part.training)
        return next(found, None)

    def _modules(self) -> Iterator[tuple[str, Any]]:
        return within_reach([self.transform], (torch.nn.Module,))

    def _collated(self, samples: Sequence[Any]) -> Any:
        try:
            return default_collate(list(samples))
        except (TypeError, RuntimeError) as error:
            raise ArgumentError(
                f"the samples that {self!r} takes must be tensors, arrays or numbers, or containers of "
                f"these, of one shape; got some that default_collate refuses ({error}). Let an earlier "
                "transform convert or resize them."
            ) from error

    def _moved(self, value: Any, device: torch.device) -> Any:
        """A batch with its tensors on a device."""
        try:
            return _to_device(value, device)
        except (RuntimeError, NotImplementedError) as error:
            where = self.device or device
            raise RuntimeError(
                f"{self!r} runs on {where}, which cannot be used here ({error}); move its module to a device "
                "that can."
            ) from error

    def _rows(self, made: Any, count: int) -> list[Any]:
        """Take what the function returned apart, into one row for each sample."""
        if isinstance(made, torch.Tensor) and made.layout is not torch.strided:
            raise ArgumentError(f"{self!r} must return dense tensors, got one of layout {made.layout}.")
        if isinstance(made, Mapping):
            columns = {name: self._rows(column, count) for name, column in made.items()}
            if columns:
                return [{name: column[i] for name, column in columns.items()} for i in range(count)]
        elif isinstance(made, tuple) and made:
            rows = zip(*(self._rows(column, count) for column in made), strict=True)
            return list(map(getattr(made, "_make", tuple), rows))
        elif isinstance(made, list) or (isinstance(made, (torch.Tensor, np.ndarray)) and made.ndim):
            if len(made) == count:
                return list(made)
            got = f"{len(made)} rows for {count} samples"
            raise ArgumentError(
                f"{self!r} must return one row for each sample, got {got}; return a tuple if these are "
                "several columns, as a list has one item for each sample."
            )
        raise ArgumentError(
            f"{self!r} must return a tensor or array whose first dimension counts the samples, a list with "
            f"one item for each, or a dict or tuple of these, got {type(made).__name__}."
        )

    def __repr__(self) -> str:
        transform = self.transform
        name = getattr(transform, "__qualname__", type(transform).__qualname__).rpartition("<locals>.")[2]
        return f"hotset.batched({name})"


def _to_device(value: Any, device: torch.device) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, Mapping):
        return {name: _to_device(part, device) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        kind = list if isinstance(value, list) else getattr(value, "_make", tuple)
        return kind(_to_device(part, device) for part in value)
    return value
