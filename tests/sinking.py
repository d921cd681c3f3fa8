"""A small training with dropout, run plainly or sunk, and what stands for a GPU's graphs where there is none.

Losses are compared as numbers: float32 goes into a Python float without loss, so equal is equal to the bit.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

import torch
from helpers import seed_everything
from live import flip_and_crop
from samples import image_and_label
from sources import Samples
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DistributedSampler

import hotset
from hotset.device.sink import Sink, data_sink
from hotset.device.trees import map_tensors, tensors_of

N, BATCH = 46, 4  # twelve batches a pass, the last of two samples; neither 7 nor 100 goes into that
PASS, STEPS = 12, 108

MakeOptimizer = Callable[[Any], Optimizer]


def momentum(parameters: Any) -> Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


class Training:
    """A network with dropout and batch norm, its optimizer, and a step; equal whenever it is made.

    Attributes:
        seen: samples of each call of the step, in order.
        capturing: whether a capture is under way.
    """

    capturing = False

    def __init__(self, make: MakeOptimizer = momentum, features: int = 90) -> None:
        seed_everything(7)
        self.network = nn.Sequential(
            nn.Linear(features, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 5)
        )
        self.optimizer = make(self.network.parameters())
        self.seen: list[int] = []

    def step(self, images: Tensor, labels: Tensor) -> Tensor:
        self.seen.append(len(images))
        self.optimizer.zero_grad()
        scores = self.network(images.flatten(1).float() / 255)
        loss = nn.functional.cross_entropy(scores, labels % 5)
        loss.backward()
        self.optimizer.step()
        return loss

    def weights(self) -> list[Any]:
        return [one.tolist() for one in self.network.state_dict().values()]

    def gradients(self) -> list[Any]:
        return [one.grad.tolist() for one in self.network.parameters() if one.grad is not None]


def plain(training: Training, loader: Any, steps: int) -> list[float]:
    """The losses of a loop over the loader, pass after pass, each told of its epoch."""
    return [training.step(*batch).item() for batch in islice(_rounds(loader), steps)]


def features(live: bool) -> int:
    return 45 if live else 90


def loader_of(dataset: Any, workers: int = 0, **more: Any) -> Any:
    seed_everything(3)
    return hotset.DataLoader(
        dataset, batch_size=BATCH, shuffle="sampler" not in more, num_workers=workers, **more
    )


def make_resumable(kind: str, workers: int) -> tuple[Sink, Training]:
    dataset = hotset.cache(
        Samples(image_and_label, N), transform=[flip_and_crop] if kind == "live" else None, memory="4MiB"
    )
    more = {"sampler": DistributedSampler(dataset, 2, 0)} if kind == "dealt" else {}
    loader = loader_of(dataset, workers, **more)
    training = Training(features=features(kind == "live"))
    return data_sink(training.step, loader, 3, outputs="all"), training


def _rounds(loader: Any) -> Iterator[Any]:
    epoch = 0
    while True:
        if hasattr(getattr(loader, "sampler", None), "set_epoch"):
            loader.sampler.set_epoch(epoch)
        yield from loader
        epoch += 1


class FakeGraphs:
    """Graphs of a device whose memory is the training's tensors.

    A capture runs the step's Python, and leaves every tensor of the device as it was, as no kernel has run;
    what the step has made is uninitialised (NaN). A replay does the step under the settings and values that
    were captured, and insists on finding the optimizer's tensors where the capture found them. It writes
    gradients to those of the capture, whichever the parameters have by then.

    Args:
        training: whose tensors are on the device.
        error: what each capture raises halfway, if anything.
        others: the lowest vote of the other ranks, for each vote; those that are left out are the highest.
        waits: places in the code where the step waits for the device.
    """

    def __init__(
        self,
        training: Any,
        error: Exception | None = None,
        others: Sequence[int] = (),
        waits: Sequence[str] = (),
    ) -> None:
        self._training = training
        self._error = error
        self._others = list(others)
        self._waits = list(waits)
        self.sides = self.captures = self.replays = self.pools = 0
        self.votes: list[int] = []
        self._made: weakref.WeakSet[Any] = weakref.WeakSet()

    @property
    def alive(self) -> int:
        """Graphs that take memory."""
        return len(self._made)

    @contextlib.contextmanager
    def side(self) -> Iterator[None]:
        self.sides += 1
        yield

    @contextlib.contextmanager
    def waits(self) -> Iterator[list[str]]:
        yield self._waits

    def lowest(self, vote: int, groups: list[Any]) -> int:
        assert groups
        self.votes.append(vote)
        return min(vote, self._others.pop(0)) if self._others else vote

    def pool(self) -> Any:
        self.pools += 1
        return object()

    def capture(self, fn: Callable[[], Any], pool: Any) -> tuple[Callable[[], None], Any]:
        self.captures += 1
        optimizer = self._training.optimizer
        constants = [_settings(group) for group in optimizer.param_groups]
        values = self._values()
        places = self._places()
        gradients = self._gradients()
        with self._no_kernel_runs():
            out = map_tensors(_uninitialised, fn())
            if self._error is not None:
                raise self._error
        written = [gradient for gradient in self._gradients() if any(gradient is one for one in gradients)]
        del gradients
        parameters = list(self._training.network.parameters())
        captured = [one.grad for one in parameters]

        def replay() -> None:
            assert self._places() == places, "a graph writes where the optimizer does not look any more"
            there = self._gradients()
            assert all(any(one is found for found in there) for one in written), (
                "a graph adds to freed memory"
            )
            self.replays += 1
            now = [_settings(group) for group in optimizer.param_groups]
            for group, constant in zip(optimizer.param_groups, constants, strict=True):
                group.update(constant)
            held = self._values()
            self._set(values)
            bound = [one.grad for one in parameters]
            made = fn()
            for one, own, before in zip(parameters, captured, bound, strict=True):
                if own is not None and one.grad is not None:
                    own.copy_(one.grad)
                one.grad = before
            for group, setting in zip(optimizer.param_groups, now, strict=True):
                group.update(setting)
            self._set(held)
            for static, value in zip(tensors_of(out), tensors_of(made), strict=True):
                static.copy_(value.detach())

        self._made.add(replay)
        return replay, out

    def _values(self) -> list[dict[str, Any]]:
        """Numbers and modes that the step's Python reads."""
        owners = (self._training, *self._training.network.modules())
        return [{k: v for k, v in vars(one).items() if isinstance(v, (int, float))} for one in owners]

    def _set(self, values: list[dict[str, Any]]) -> None:
        for one, held in zip((self._training, *self._training.network.modules()), values, strict=True):
            vars(one).update(held)

    def _gradients(self) -> list[Tensor]:
        return [one.grad for one in self._training.network.parameters() if one.grad is not None]

    def _on_device(self) -> list[Tensor]:
        network, optimizer = self._training.network, self._training.optimizer
        found = [*network.parameters(), *network.buffers()]
        found += [one.grad for one in network.parameters() if one.grad is not None]
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                for name, value in optimizer.state.get(parameter, {}).items():
                    counted_on_host = name == "step" and not group.get("capturable")
                    if isinstance(value, Tensor) and not counted_on_host:
                        found.append(value)
        return found

    def _places(self) -> list[int]:
        states = self._training.optimizer.state.values()
        return [one.data_ptr() for state in states for one in state.values() if isinstance(one, Tensor)]

    @contextlib.contextmanager
    def _no_kernel_runs(self) -> Iterator[None]:
        before = [(tensor, tensor.detach().clone()) for tensor in self._on_device()]
        draws = torch.get_rng_state()
        self._training.capturing = True
        try:
            yield
        finally:
            self._training.capturing = False
            torch.set_rng_state(draws)
            known = {id(tensor) for tensor, _ in before}
            with torch.no_grad():
                for tensor, value in before:
                    tensor.copy_(value)
                for tensor in self._on_device():
                    if id(tensor) not in known:
                        _uninitialised(tensor)


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "params"}


def _uninitialised(tensor: Tensor) -> Tensor:
    return tensor.detach().fill_(torch.nan if tensor.is_floating_point() else -77)
