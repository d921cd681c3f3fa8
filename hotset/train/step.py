"""A training step: which parts of a batch go to the network, which to the loss, and what is done with both.

=============================================  ======================================  ====================
a batch                                        the network is given                    the label
=============================================  ======================================  ====================
``(input, ..., label)``, a list or tuple       all but the last, one by one            the last element
``{"a": ..., "label": ...}``, a mapping        all but the label, by name              ``batch["label"]``
=============================================  ======================================  ====================

The loss is ``loss_fn(output, label)``. Without a ``loss_fn`` the network is given the whole batch, label and
all, and returns the loss itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from hotset.errors import ArgumentError

__all__ = ["Parts", "in_mode", "loss_of", "parts_of", "training_step"]

_LABEL = "label"


class Parts(NamedTuple):
    """A batch taken apart.

    Attributes:
        args, kwargs: what the network is given.
        label: what the loss is given beside the output.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    label: Any


def parts_of(batch: tuple[Any, ...]) -> Parts:
    """Take a batch apart.

    Args:
        batch: the arguments of a step: a mapping alone, or the batch's elements.

    Raises:
        ArgumentError: there is no label in it.

    Example:
        >>> parts_of((1, 2, 3))
        Parts(args=(1, 2), kwargs={}, label=3)
        >>> parts_of(({"image": 1, "label": 3},))
        Parts(args=(), kwargs={'image': 1}, label=3)
    """
    if len(batch) == 1 and isinstance(batch[0], Mapping):
        named = batch[0]
        if _LABEL not in named:
            raise ArgumentError(
                f'a batch has no "{_LABEL}", only {", ".join(map(repr, named)) or "nothing"}: name it so in '
                "the dataset, or give loss_fn=None and have the network return the loss itself."
            )
        return Parts((), {name: value for name, value in named.items() if name != _LABEL}, named[_LABEL])
    if len(batch) < 2:
        held = type(batch[0]).__name__ if batch else "nothing"
        raise ArgumentError(
            f"a batch holds {held} alone and no label: batches are (input, ..., label) or a dict with "
            f'"{_LABEL}"; or give loss_fn=None and have the network return the loss itself.'
        )
    return Parts(batch[:-1], {}, batch[-1])


def loss_of(network: Callable[..., Any], batch: tuple[Any, ...]) -> torch.Tensor:
    """The loss, of shape ``()``, that the network itself returns for a batch.

    Raises:
        ArgumentError: it returns something else.
    """
    one = batch[0] if len(batch) == 1 else None
    return _scalar(network(**one) if isinstance(one, Mapping) else network(*batch), "the network")


def training_step(
    network: Callable[..., Any], loss_fn: Callable[..., Any] | None, optimizer: Any
) -> Callable[..., torch.Tensor]:
    """Return the function of one training step: it takes a batch's elements and returns the loss, ``()``.

    The gradients are dropped first, not last, so that a callback finds those of the step that was.

    Raises:
        ArgumentError: (the step) a batch has no label; the loss is not one number.
    """

    def step(*batch: Any) -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        if loss_fn is None:
            loss = loss_of(network, batch)
        else:
            parts = parts_of(batch)
            loss = _scalar(loss_fn(network(*parts.args, **parts.kwargs), parts.label), "loss_fn")
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return loss.detach()

    return step


@contextmanager
def in_mode(network: nn.Module, *, training: bool) -> Iterator[None]:
    """Have the network train or evaluate; afterwards each of its modules is as it was.

    In a network that is in training mode already, modules that are not (frozen normalisations) stay so.
    """
    before = [(module, module.training) for module in network.modules()]
    if not (training and network.training):
        network.train(training)
    try:
        yield
    finally:
        for module, was in before:
            module.training = was


def _scalar(loss: Any, source: str) -> torch.Tensor:
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        what = (
            f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else repr(type(loss))
        )
        raise ArgumentError(
            f"{source} must return one number in a tensor, got {what}; reduce the loss to that."
        )
    return loss.reshape(()) if loss.dim() else loss  # one node less for each backward pass
