"""What a captured step cannot see change: the optimizers within its reach, and their state on the host.

A graph replays kernels; whatever Python computed while it was captured is a constant in it. For an optimizer
that is its learning rate and other settings, and with some a count of steps that lies on the host. So

- settings are read before each call: if a scheduler has changed one, the step is captured anew. So it is if
  parameters or the optimizer's state lie elsewhere than before, as ``load_state_dict`` would have it: a graph
  goes on writing to the old place;
- an optimizer that can count on the device (``capturable``) is told to;
- a step that changes any of it *itself* (a scheduler inside the step, a count on the host) is not captured;
- nor is one that draws on the host (mixup with numpy): a graph would repeat the one draw for ever;
- nor is one with a GradScaler, which asks the device after each backward pass whether to step at all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from hotset.determinism.object_graph import within_reach
from hotset.determinism.rng import Generators

__all__ = ["HostState", "Saved"]


class Saved(NamedTuple):
    """The host's state before a capture.

    Attributes:
        changes: says what the step's Python has changed since; None if nothing.
        put_back: makes it what it was: a capture runs the step's Python, and no step.
        put_back_gradients: lets go of gradients that no kernel has computed, as the capture failed.
    """

    changes: Callable[[], str | None]
    put_back: Callable[[], None]
    put_back_gradients: Callable[[], None]


class HostState:
    """The optimizers and schedulers within reach of a step.

    Args:
        fn: the step.

    Attributes:
        optimizers: those that were found.
        scales: whether there is a gradient scaler that is in use.
    """

    def __init__(self, fn: Callable[..., Any]) -> None:
        self._fn = fn
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
        """The optimizers' settings in plain values, and where parameters and states lie."""
        found: list[Any] = []
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                found.append({name: _plain(value) for name, value in group.items() if name != "params"})
                found += [(one.data_ptr(), one.requires_grad) for one in group["params"]]
            for state in optimizer.state.values():
                found += [value.data_ptr() for value in state.values() if isinstance(value, torch.Tensor)]
        return found

    def counts(self) -> list[Any]:
        """All else that lies on the host: counts of steps, the schedulers' epochs."""
        counts: list[Any] = [one.last_epoch for one in self._schedulers]
        for optimizer in self.optimizers:
            for state in optimizer.state.values():
                counts += [_plain(value) for value in state.values() if _on_host(value)]
        return counts

    def save(self) -> Saved:
        """Note all that the step's Python may change."""
        before = (self.settings(), self.counts())
        generators = Generators([self._fn])

        def changes() -> str | None:
            moved = generators.moved()
            if moved:
                return (
                    f"{moved[0]}, and a graph would repeat what was drawn for ever; draw in the dataset, or "
                    "on the device"
                )
            if (self.settings(), self.counts()) != before:
                return "it changes what its optimizer or scheduler keeps on the host, which a graph would not"
            return None

        restore = [self._settings_saved(), self._states_saved(), generators.restore]
        gradients = [
            (parameter, parameter.grad)
            for optimizer in self.optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
        ]

        def put_back() -> None:
            for one in restore:
                one()

        def put_back_gradients() -> None:
            for parameter, gradient in gradients:
                parameter.grad = gradient

        return Saved(changes, put_back, put_back_gradients)

    def _settings_saved(self) -> Callable[[], None]:
        put_back_groups = _saved([group for one in self.optimizers for group in one.param_groups])
        schedulers = [(one, one.state_dict()) for one in self._schedulers]

        def put_back() -> None:
            put_back_groups()
            for scheduler, before in schedulers:
                scheduler.load_state_dict(before)

        return put_back

    def _states_saved(self) -> Callable[[], None]:
        put_back_states = _saved([state for one in self.optimizers for state in one.state.values()])
        known = [(one.state, set(one.state)) for one in self.optimizers]

        def put_back() -> None:
            put_back_states()
            for states, parameters in known:
                for parameter in set(states) - parameters:
                    del states[parameter]

        return put_back


def _saved(shelves: list[dict[str, Any]]) -> Callable[[], None]:
    """Returns what makes dicts hold what they hold now; the host's tensors, the same numbers too."""
    held = [(shelf, dict(shelf)) for shelf in shelves]
    values = [value for _, before in held for value in before.values() if isinstance(value, torch.Tensor)]
    numbers = [(value, value.detach().clone()) for value in values if _on_host(value)]

    def put_back() -> None:
        for shelf, before in held:
            shelf.clear()
            shelf.update(before)
        with torch.no_grad():
            for value, number in numbers:
                value.copy_(number)

    return put_back


def _on_host(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.device.type == "cpu"
    return isinstance(value, (int, float))


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.tolist() if value.device.type == "cpu" and value.numel() < 64 else id(value)
    return tuple(value) if isinstance(value, list) else value
