"""What changes on the host and a captured step does not see: the optimizers within its reach, their state.

A graph replays kernels; whatever Python computed while it was captured is a constant in it. For an optimizer
that is its learning rate and other settings, and with some a count of steps that lies on the host. So

- settings are read before each call: if a scheduler has changed one, the step is captured anew. So it is if
  parameters or the optimizer's state lie elsewhere than before, as ``load_state_dict`` would have it: a graph
  goes on writing to the old place;
- an optimizer that can count on the device (``capturable``) is told to;
- a step that changes any of it *itself* (a scheduler inside the step, a count on the host) is not captured;
- nor is one that draws on the host (mixup with numpy): a graph would repeat the one draw for ever;
- nor is one with a GradScaler, which asks the device after each backward pass whether to step at all.

Two more things show in an eager step, the *rehearsal* that comes before each capture:

=========================  ================================================================================
tensors within reach       A name that the step binds to a new tensor (``ema = 0.9 * ema + loss``): the graph
                           would read the tensor that the name meant when it was captured.
gradients                  Those that the step sets to None and makes anew are in the graph's own memory.
                           Those that it *keeps* (``set_to_none=False``, accumulation) are where they were
                           before: they are held, and where somebody replaces them the graph is made anew. A
                           step whose optimizer reads gradients of the step before and then drops them would
                           read freed memory.
=========================  ================================================================================
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch.amp.grad_scaler import GradScaler
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset

from hotset.determinism.draws.rng import Generators
from hotset.determinism.objects.object_graph import within_reach
from hotset.device.host_values import HostValues

__all__ = ["Gradients", "HostState", "Rehearsal", "Saved"]

# torch.compile's own graphs: what it is given for mode="reduce-overhead" and "max-autotune".
_Compiled: Any = torch._TorchCompileInductorWrapper


class Saved(NamedTuple):
    """The host's state before a capture.

    Attributes:
        changes: says what the step's Python has changed since; None if nothing.
        put_back: makes it what it was before: a capture runs the step's Python, but does not train.
        put_back_gradients: lets go of gradients that no kernel has computed, as the capture failed.
    """

    changes: Callable[[], str | None]
    put_back: Callable[[], None]
    put_back_gradients: Callable[[], None]


class HostState:
    """The optimizers and schedulers within reach of a step.

    Attributes:
        optimizers: those that were found.
        scales: whether there is a gradient scaler that is in use.
        graphs: whether something was compiled so that it makes graphs of its own.
        groups: the process groups over which DistributedDataParallel averages gradients in the step.
    """

    def __init__(self, fn: Callable[..., Any]) -> None:
        self._fn = fn
        found = _found(fn, Optimizer, LRScheduler, GradScaler, _Compiled)
        self.optimizers: list[Optimizer] = [one for one in found if isinstance(one, Optimizer)]
        self._schedulers = [one for one in found if isinstance(one, LRScheduler)]
        self.scales = any(isinstance(one, GradScaler) and one.is_enabled() for one in found)
        self.graphs = any(isinstance(one, _Compiled) and one.config.get("triton.cudagraphs") for one in found)
        parallel = _found(fn, DistributedDataParallel)
        self.groups: list[Any] = list({id(one.process_group): one.process_group for one in parallel}.values())
        self._parameters: list[torch.Tensor] = _found(fn, torch.nn.Parameter)
        # Of ranks that capture together none may do so alone, and what each prints or counts is its own.
        self._values = HostValues(fn, modes_alone=bool(self.groups))

    def values(self) -> list[Any]:
        """The plain values that the step's Python may read: see :mod:`hotset.device.host_values`."""
        return self._values.now()

    def parameters(self) -> list[torch.Tensor]:
        """The parameters within reach, and those of the optimizers."""
        groups = [group["params"] for optimizer in self.optimizers for group in optimizer.param_groups]
        known = [*self._parameters, *(parameter for group in groups for parameter in group)]
        return list({id(parameter): parameter for parameter in known}.values())

    def tensors(self, devices: Iterable[torch.device]) -> dict[str, torch.Tensor]:
        """The tensors within reach on these devices, by where they are kept; none of optimizers or data."""
        there, kinds = set(devices), (torch.Tensor, Optimizer, DataLoader, Dataset)
        return {
            path: one
            for path, one in within_reach([self._fn], kinds)
            if isinstance(one, torch.Tensor) and one.device in there
        }

    def make_capturable(self) -> None:
        """Have the optimizers count their steps on the device."""
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
        gradients = [(parameter, parameter.grad) for parameter in self.parameters()]

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


class Rehearsal:
    """An eager step that is watched, as the next one is to be captured.

    It holds none of the tensors that the step lets go of, which may be large.

    Args:
        host: what is within reach of the step.
        devices: where the tensors are that a graph would read.
    """

    def __init__(self, host: HostState, devices: Iterable[torch.device]) -> None:
        self._host = host
        self._devices = list(devices)
        self._named = {path: weakref.ref(one) for path, one in host.tensors(self._devices).items()}
        self._entry = [(one, _seen(one.grad)) for one in host.parameters()]
        self._seen = {id(one): seen for one, seen in self._entry}
        self._read: set[int] = set()  # parameters whose gradient of before an optimizer has read
        self._hooks: list[Any] = []

    def __enter__(self) -> Rehearsal:
        self._hooks = [one.register_step_pre_hook(self._note) for one in self._host.optimizers]
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def _note(self, optimizer: Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                seen = self._seen.get(id(parameter))
                if seen is not None and seen.tensor() is parameter.grad:
                    self._read.add(id(parameter))

    def found(self) -> Gradients | str:
        """What the step does with gradients; or, as text, why it cannot be captured."""
        now = self._host.tensors(self._devices)
        known = {id(one) for one in now.values()}
        for path, ref in self._named.items():
            before = ref()  # a tensor of several names has one path
            if before is None or (now[path] is not before if path in now else id(before) not in known):
                return (
                    f"it binds {path} to a new tensor, and a graph would go on reading the old one; write "
                    "into the tensor (copy_, mul_, add_), or return the value"
                )
        found = Gradients(self._entry, self._host.optimizers)
        if self._read - found.kept:
            return (
                "its optimizer steps with the gradients of the step before, which it drops; call "
                "zero_grad(), backward() and step() in this order, or zero_grad(set_to_none=False)"
            )
        return found


class _Seen(NamedTuple):
    """A gradient as it was before the step, not held: the tensor, and how often it had been written."""

    tensor: weakref.ref[torch.Tensor]
    version: int


def _seen(gradient: torch.Tensor | None) -> _Seen | None:
    return None if gradient is None else _Seen(weakref.ref(gradient), gradient._version)


class Gradients:
    """What a step does with its parameters' gradients.

    Args:
        entry: the parameters, each with its gradient before the step; the step has been run since.
        optimizers: those of the step.

    Attributes:
        clear: whether it could be seen: a step that finds none and leaves some may add to them the next time,
            or make them anew.
        kept: ids of the parameters whose gradients stay where they are.
    """

    def __init__(
        self, entry: list[tuple[torch.Tensor, _Seen | None]], optimizers: Iterable[Optimizer]
    ) -> None:
        self.clear = True
        self.kept: set[int] = set()
        self._parameters: list[torch.Tensor] = []
        self._held: list[torch.Tensor | None] = []
        groups = [group["params"] for optimizer in optimizers for group in optimizer.param_groups]
        optimized = {id(parameter) for group in groups for parameter in group}
        for parameter, seen in entry:
            now = parameter.grad
            if seen is None and now is not None:
                self.clear = False
            if seen is not None and now is not None and now is seen.tensor():
                if id(parameter) not in optimized and now._version == seen.version:
                    continue  # the gradient of another step, which this one does not touch
                self.kept.add(id(parameter))
            elif seen is None and now is None:
                continue
            self._parameters.append(parameter)

    @property
    def ready(self) -> bool:
        """Whether a capture now would find the gradients to which the step adds."""
        return self.clear and all(one.grad is not None for one in self._parameters if id(one) in self.kept)

    def hold(self) -> None:
        """Hold the gradients as the capture has left them: the graph writes there."""
        self._held = [parameter.grad for parameter in self._parameters]

    def rebind(self) -> bool:
        """Have each parameter's gradient be the one to which the graph writes, after something else ran.

        False if one was replaced to which the graph adds: its value is elsewhere now.
        """
        for parameter, held in zip(self._parameters, self._held, strict=True):
            if parameter.grad is not held:
                if id(parameter) in self.kept:
                    return False
                parameter.grad = held
        return True


def _found(fn: Callable[..., Any], *kinds: type) -> list[Any]:
    return list({id(thing): thing for _, thing in within_reach([fn], kinds)}.values())


def _saved(dicts: list[dict[str, Any]]) -> Callable[[], None]:
    """Returns a function that gives these dicts their present content back, and the tensors on the host in
    them their present numbers.
    """
    held = [(one, dict(one)) for one in dicts]
    values = [value for _, before in held for value in before.values() if isinstance(value, torch.Tensor)]
    numbers = [(value, value.detach().clone()) for value in values if _on_host(value)]

    def put_back() -> None:
        for one, before in held:
            one.clear()
            one.update(before)
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
