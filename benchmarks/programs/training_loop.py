"""The loop of the programs that write theirs themselves: a line of JSON for each epoch."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["train"]


def train(
    net: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    loss_of: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    loader: Any,
    epochs: int,
) -> None:
    """Train, and print each epoch's seconds and all of its losses.

    Args:
        net: gets the first element of a batch.
        optimizer: over its parameters.
        loss_of: gives the loss of the network's output and the batch's second element.
        loader: gives batches of two elements.
        epochs: how many.
    """
    for _ in range(epochs):
        start, losses = time.perf_counter(), []
        for inputs, targets in loader:
            loss = loss_of(net(inputs), targets)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            losses.append(loss.item())
        print(json.dumps({"seconds": time.perf_counter() - start, "losses": losses}), flush=True)
