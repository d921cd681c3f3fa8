"""What a captured step cannot see change: the optimizers within its reach, and their state on the host.

A graph replays kernels; whatever Python computed while it was captured is a constant in it. For an optimizer
that is its learning rate and other settings, and with some a count of steps that lies on the host. So

- settings are read before each call: if a scheduler has changed one, the step is captured anew;
- an optimizer that can count on the device (``capturable``) is told to;
- a step that changes any of it *itself* (a scheduler inside the step, a count on the host) is not captured;
- nor is one with a GradScaler, which asks the device after each backward pass whether to step at all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from hotset.determinism.reach import within_reach

__all__ = ["HostState"]


class HostState:
    """The optimizers and schedulers within reach of a step.

    Args:
        fn: the step.

    Attributes:
        optimizers: those that were found.
        scales: whether there is a gradient scaler that is in use.
    """

    def __init__(self, fn: Callable[..., Any]) -> None:
        found = {id(thing): thing for _, thing in within_reach([fn], (Optimizer, LRScheduler, GradScaler))}
        self.optimizers: list[Optimizer] = [one for one in found.values() if isinstance(one, Optimizer)]
        self._schedulers = [one for one in found.values() if isinstance(one, LRScheduler)]
        self.scales = any(isinstance(one, GradScaler) and one.is_enabled() for one in found.values())

    def make_capturable(self) -> list[str]:
        """Have the optimizers count their steps on the device; returns the names of those that changed."""
        changed = []
        for optimizer in self.optimizers:
            groups = [group for group in optimizer.param_groups if group.get("capturable") is False]
            for group in groups:
                group["capturable"] = True
                for parameter in group["params"]:
                    count = optimizer.state.get(parameter, {}).get("step")
                    if isinstance(count, torch.Tensor) and count.device != parameter.device:
                        optimizer.state[parameter]["step"] = count.to(parameter.device, torch.float32)
            if groups:
                # Its steps before the capture would have it say that this makes no sense.
                optimizer._warned_capturable_if_run_uncaptured = True
                changed.append(type(optimizer).__name__)
        return changed

    def settings(self) -> list[Any]:
        """The optimizers' settings, in plain values."""
        return [
            {name: _plain(value) for name, value in group.items() if name != "params"}
            for optimizer in self.optimizers
            for group in optimizer.param_groups
        ]

    def counts(self) -> list[Any]:
        """All else that lies on the host: counts of steps, the schedulers' epochs."""
        counts: list[Any] = [one.last_epoch for one in self._schedulers]
        for optimizer in self.optimizers:
            for state in optimizer.state.values():
                counts += [_plain(value) for value in state.values() if _on_host(value)]
        return counts

    def save(self) -> Callable[[], None]:
        """Returns what puts settings and counts back: a capture runs the step's Python, and no step."""
        groups = [(group, dict(group)) for one in self.optimizers for group in one.param_groups]
        states = [
            (state, name, value.clone() if isinstance(value, torch.Tensor) else value)
            for optimizer in self.optimizers
            for state in optimizer.state.values()
            for name, value in state.items()
            if _on_host(value)
        ]
        schedulers = [(one, one.state_dict()) for one in self._schedulers]

        def put_back() -> None:
            for group, before in groups:
                group.clear()
                group.update(before)
            for state, name, value in states:
                state[name] = value
            for scheduler, before in schedulers:
                scheduler.load_state_dict(before)

        return put_back


def _on_host(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.device.type == "cpu"
    return isinstance(value, (int, float))


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.tolist() if value.device.type == "cpu" and value.numel() < 64 else id(value)
    return tuple(value) if isinstance(value, list) else value
