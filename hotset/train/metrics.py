"""Metrics: sums over an evaluation, kept on the device, and read by the host once, at the end.

A metric is anything with ``update(output, label)``, ``compute()`` and ``reset()``: torchmetrics' objects are,
and there are many of them, so only two are here. They add nothing to the host's work for a batch, and sum
over all ranks of a job, as torchmetrics' do: so all ranks stop early, or none.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from hotset.errors import ArgumentError
from hotset.train.run_state import rank_of_job
from hotset.train.step import loss_of, parts_of

__all__ = ["Accuracy", "Loss", "checked_metrics", "evaluate"]


class _Mean:
    """A sum and a count, float64, on the device of what comes first."""

    def __init__(self) -> None:
        self._sums: torch.Tensor | None = None

    def reset(self) -> None:
        """Begin anew."""
        self._sums = None

    def compute(self) -> float:
        """The mean over all that was given since :meth:`reset`, of all ranks; waits for the device.

        Raises:
            ArgumentError: nothing was given.
        """
        total, count = _sum_over_ranks(self._sums).tolist() if self._sums is not None else (0.0, 0.0)
        if not count:
            raise ArgumentError(f"{type(self).__name__} was given no samples; evaluate on some.")
        return float(total / count)

    def _add(self, total: torch.Tensor, count: int) -> None:
        sums = torch.stack([total.detach().double(), total.new_tensor(count, dtype=torch.float64)])
        self._sums = sums if self._sums is None else self._sums + sums


class Accuracy(_Mean):
    """The share of samples for which the network's largest output is at the label.

    Example:
        >>> accuracy = Accuracy()
        >>> accuracy.update(torch.tensor([[0.1, 0.9], [0.8, 0.2]]), torch.tensor([1, 1]))
        >>> accuracy.compute()
        0.5
    """

    def update(self, output: torch.Tensor, label: torch.Tensor) -> None:
        """Count a batch.

        Args:
            output: ``(n, classes, ...)``, or classes themselves: integers ``(n, ...)``.
            label: ``(n, ...)``, integers.

        Raises:
            ArgumentError: the shapes do not go together.
        """
        found = output.argmax(1) if output.dim() == label.dim() + 1 else output
        if found.shape != label.shape or found.is_floating_point():
            raise ArgumentError(
                f"Accuracy takes outputs of shape (n, classes, ...) for labels of shape (n, ...), and got "
                f"{tuple(output.shape)} ({output.dtype}) for {tuple(label.shape)}; give a metric that fits."
            )
        self._add((found == label).sum(), label.numel())


class Loss(_Mean):
    """The mean loss over the samples.

    :meth:`Model.eval` gives it each batch's loss instead of output and label, weighted by the batch's
    samples: a last batch of fewer weighs less.

    Example:
        >>> loss = Loss()
        >>> loss.update(torch.tensor(2.0), 3)
        >>> loss.update(torch.tensor(6.0), 1)
        >>> loss.compute()
        3.0
    """

    def update(self, loss: torch.Tensor, samples: int = 1) -> None:
        """Count a batch's mean loss, of shape ``()``, over its samples."""
        self._add(loss.reshape(()) * samples, samples)


def checked_metrics(metrics: Any) -> dict[str, Any]:
    """The metrics by name, if that is what they are.

    Raises:
        ArgumentError: they are not a dict of names to metrics.
    """
    if metrics is None:
        return {}
    if not isinstance(metrics, Mapping):
        raise ArgumentError(
            f'metrics must be a dict, got {metrics!r}; give names, as in {{"accuracy": Accuracy()}}.'
        )
    for name, metric in metrics.items():
        missing = [
            part for part in ("update", "compute", "reset") if not callable(getattr(metric, part, None))
        ]
        if missing or isinstance(metric, type):
            hint = (
                "its class: make one of it" if isinstance(metric, type) else f"without {', '.join(missing)}()"
            )
            raise ArgumentError(
                f"metrics[{name!r}] is {hint}; give an object with update, compute and reset, such as "
                "torchmetrics' or hotset.Accuracy()."
            )
    return dict(metrics)


def evaluate(
    network: nn.Module, loss_fn: Any, metrics: Mapping[str, Any], batches: Iterable[Any], device: torch.device
) -> dict[str, Any]:
    """Give batches to the network and what comes of it to the metrics; return their values by name.

    A value of one element is a plain number; another one is as the metric computes it.

    Raises:
        ArgumentError: there is no batch; a batch has no label; without a ``loss_fn`` there is no output that
            metrics other than :class:`Loss` could be given.
    """
    for name, metric in metrics.items():
        if loss_fn is None and not isinstance(metric, Loss):
            raise ArgumentError(
                f"metrics[{name!r}] wants the network's output, and with loss_fn=None the network returns "
                "the loss; leave hotset.Loss() alone, or give a loss_fn."
            )
        if not isinstance(metric, _Mean) and hasattr(metric, "to"):
            metric.to(device)
        metric.reset()
    seen = False
    for batch in batches:
        seen = True
        _count(network, loss_fn, metrics, tuple(batch) if isinstance(batch, (list, tuple)) else (batch,))
    if not seen:
        raise ArgumentError("the loader gave no batch to evaluate on; give one that is not empty.")
    return {name: _plain(metric.compute()) for name, metric in metrics.items()}


def _count(network: nn.Module, loss_fn: Any, metrics: Mapping[str, Any], batch: tuple[Any, ...]) -> None:
    losses = [metric for metric in metrics.values() if isinstance(metric, Loss)]
    if loss_fn is None:
        loss, label = loss_of(network, batch), None
    else:
        parts = parts_of(batch)
        label = parts.label
        output = network(*parts.args, **parts.kwargs)
        for metric in metrics.values():
            if not isinstance(metric, Loss):
                metric.update(output, label)
        if not losses:
            return
        loss = loss_fn(output, label)
    for metric in losses:
        metric.update(loss, _samples(label, batch))


def _samples(label: Any, batch: tuple[Any, ...]) -> int:
    """How many samples a batch holds: the first dimension of its label, or of its first tensor."""
    elements = batch[0].values() if isinstance(batch[0], Mapping) else batch
    for value in (label, *elements):
        if isinstance(value, torch.Tensor) and value.dim():
            return len(value)
    return 1


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        value = value if value.numel() != 1 else value.item()
    elif isinstance(value, (np.ndarray, np.generic)):
        value = value if value.size != 1 else value.item()
    return value


def _sum_over_ranks(values: torch.Tensor) -> torch.Tensor:
    """The sum of this tensor over all ranks; each must ask."""
    if rank_of_job()[1] == 1:
        return values
    total = values.clone()
    dist.all_reduce(total)
    return total
