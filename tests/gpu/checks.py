"""What must be so on a GPU; each a function of the device that raises AssertionError where it is not.

Losses are compared bit for bit where kernels are deterministic, which they are told to be. What is sunk is
compared with a plain loop over the same batches.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import multiprocessing
import os
import random
import subprocess
import sys
import tempfile
import time
import types
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

# Before the first use of cuBLAS, which is not deterministic without.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import numpy as np
import torch
from PIL import Image
from torch.utils.data import TensorDataset

import hotset
from hotset.device.transfer import StreamTransfer
from hotset.run.doctor.observed import read
from hotset.run.doctor.watch import Watch
from hotset.run.environment import WatchOptions

from .figures import kernels_of
from .networks import grey, lenet, sgd, training_step

BATCH, PASS, STEPS = 32, 7, 100
SAMPLES = BATCH * (PASS - 1) + 12  # the last batch of a pass is shorter

OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "sgd": sgd,
    "adam": lambda network: torch.optim.Adam(network.parameters(), lr=1e-3),
    "adamw": lambda network: torch.optim.AdamW(network.parameters(), lr=1e-3),
    "fused adamw": lambda network: torch.optim.AdamW(network.parameters(), lr=1e-3, fused=True),
}


@contextlib.contextmanager
def _deterministic() -> Iterator[None]:
    # Not use_deterministic_algorithms: it forbids max pooling, which is so where windows are disjoint.
    before = torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
    try:
        yield
    finally:
        torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = before


def digits(count: int = SAMPLES) -> TensorDataset:
    made = torch.Generator().manual_seed(1)
    images = torch.randint(0, 256, (count, 1, 32, 32), dtype=torch.uint8, generator=made)
    return TensorDataset(images, torch.randint(0, 10, (count,), generator=made))


class Training:
    """LeNet-5 and its optimizer, equal whenever it is made."""

    def __init__(
        self, device: str, optimizer: str = "sgd", dropout: float = 0.0, autocast: torch.dtype | None = None
    ) -> None:
        torch.manual_seed(7)
        self.network = lenet(dropout).to(device)
        self.optimizer = OPTIMIZERS[optimizer](self.network)
        # As a sink has it: Adam's corrections, computed on the host, have other last bits.
        for group in self.optimizer.param_groups:
            if group.get("capturable") is False and device != "cpu":
                group["capturable"] = True
        self.optimizer._warned_capturable_if_run_uncaptured = True
        self.step = training_step(self.network, self.optimizer, grey, autocast)


def loader_of(dataset: Any, **more: Any) -> Any:
    torch.manual_seed(3)
    return hotset.DataLoader(dataset, batch_size=BATCH, shuffle=True, **more)


def losses_of(
    training: Training,
    source: Any,
    device: str,
    size: int,
    graph: Any,
    between: Callable[[], None] | None = None,
) -> tuple[list[float], Any]:
    """The losses of a hundred steps in sinks of this size, and the sink, closed."""
    with hotset.data_sink(training.step, source, size, graph=graph, device=device, outputs="all") as sink:
        found: list[float] = []
        while sink.steps < STEPS:
            found += sink(steps=min(size, STEPS - sink.steps)).tolist()
            if between is not None:
                between()
        assert sink.steps == STEPS
        assert graph is False or device == "cpu" or sink.captured, sink.why
    return found, sink


def _close(found: list[float], expected: list[float], tolerance: float) -> None:
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=tolerance, atol=tolerance)


def plain(training: Training, loader: Any, device: str) -> list[float]:
    found: list[float] = []
    while True:
        for images, labels in loader:
            found.append(training.step(images.to(device), labels.to(device)).item())
            if len(found) == STEPS:
                return found


# The machine


def the_machine_captures_and_profiles(device: str) -> None:
    """What all else here stands on, in a few seconds: a graph by hand, a sink, the profiler."""
    shared = os.statvfs("/dev/shm")
    print(f"/dev/shm has {shared.f_bavail * shared.f_frsize >> 20} MiB", flush=True)
    if device != "cpu":
        free, whole = torch.cuda.mem_get_info(device)
        nccl = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
        print(
            f"{free >> 20} of {whole >> 20} MiB are free, cuDNN {torch.backends.cudnn.version()}, NCCL {nccl}"
        )
        graph, total = torch.cuda.CUDAGraph(), torch.zeros((), device=device)
        total.add_(1)  # a kernel's first launch loads it
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            total.add_(1)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            graph.replay()
            torch.cuda.synchronize()
        assert total.item() == 2
        assert kernels_of(profiler), "the profiler saw no kernel"
    with hotset.cache(digits(), memory="16MiB") as cached:
        losses_of(Training(device), loader_of(cached, pin_memory=device != "cpu"), device, 10, True)


# Data


class _Recycled:
    """Pinned batches in one block of memory each, which is overwritten the moment that its last view dies."""

    def __init__(self, count: int, size: int) -> None:
        self._memory = [torch.empty(size, dtype=torch.uint8, pin_memory=True) for _ in range(count)]
        self.overwritten = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        for number, memory in enumerate(self._memory):
            memory.fill_(number)
            lent = (ctypes.c_uint8 * len(memory)).from_address(memory.data_ptr())
            weakref.finalize(lent, self._overwrite, memory)
            yield torch.frombuffer(lent, dtype=torch.uint8)

    def _overwrite(self, memory: torch.Tensor) -> None:
        memory.fill_(255)
        self.overwritten += 1


def blocks_are_held_until_their_copies_have_ended(device: str) -> None:
    if device == "cpu":
        return
    # About a tenth of a second, and longer where the host has stood still for that time.
    assert any(
        _sends_while_copies_are_to_come(device, cycles) for cycles in (2 * 10**8, 2 * 10**9, 2 * 10**10)
    )


def _sends_while_copies_are_to_come(device: str, cycles: int) -> bool:
    """Send batches behind so many cycles of nothing; whether the last one was sent before they were over."""
    recycled = _Recycled(8, 32 << 20)
    transfer = StreamTransfer(torch.device(device))
    over = torch.cuda.Event()
    with torch.cuda.stream(transfer._stream):
        del [torch.empty(32 << 20, dtype=torch.uint8, device=device) for _ in range(8)][
            :
        ]  # to allocate may wait
        torch.cuda._sleep(cycles)
        over.record()
    sent = [transfer.send(batch) for batch in recycled]
    let_go, in_time = recycled.overwritten, not over.query()
    assert let_go == 0 or not in_time, "a block was let go of before its copy had begun"
    for number, one in enumerate(sent):
        batch = transfer.receive(one)
        assert bool((batch == number).all()), f"batch {number} was overwritten while it was copied"
    transfer.close()
    del sent, one, batch
    assert recycled.overwritten >= 7  # the generator still holds the last one
    return in_time


def queues_give_what_the_loader_gives(device: str) -> None:
    with hotset.cache(digits(), memory="16MiB") as cached:
        for pinned in (False, True) if device != "cpu" else (False,):
            loader, again = (loader_of(cached, pin_memory=pinned) for _ in range(2))
            queue = hotset.DeviceQueue(loader, depth=3, device=device)
            for _ in range(3):
                torch.manual_seed(4)
                expected = list(again)
                torch.manual_seed(4)
                found = list(queue)
                assert len(found) == len(expected) == PASS
                for ours, theirs in zip(found, expected, strict=True):
                    assert all(x.device.type == torch.device(device).type for x in ours)
                    assert all(torch.equal(x.cpu(), y) for x, y in zip(ours, theirs, strict=True))
            queue.close()


def pinned_batches_are_whole_in_a_plain_loop(device: str) -> None:
    """Though each is dropped long before its copy begins, and the loader makes others meanwhile."""
    data = TensorDataset(torch.arange(64, dtype=torch.uint8)[:, None].repeat(1, 1 << 20))
    with hotset.cache(data, memory="256MiB") as cached:
        for workers in (0, 2):
            loader: Any = hotset.DataLoader(cached, 4, num_workers=workers, pin_memory=device != "cpu")
            for _ in range(3):
                found = []
                for (batch,) in loader:
                    _slow(device)
                    moved = batch.to(device, non_blocking=True)
                    del batch
                    found += moved.float().mean(1)
                assert [int(one) for one in found] == list(range(64)), workers


class _Numbers(torch.utils.data.Dataset[Any]):
    """Samples of which collating makes tensors on the default device, and one that stays where it is."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Any:
        image = torch.full((3, 16, 16), index, dtype=torch.uint8, device="cpu")
        return image, index, index / 2, np.full(4, index)


def batches_are_where_torchs_loader_has_them(device: str) -> None:
    """After ``torch.set_default_device``, and as drawn from a generator of that device."""

    def batches(make: Any, dataset: Any) -> list[Any]:
        drawn = torch.Generator(device).manual_seed(5)
        loader = make(dataset, batch_size=5, shuffle=True, generator=drawn)
        return [
            (str(part.device), part.dtype, part.tolist())
            for _ in range(3)
            for batch in loader
            for part in batch
        ]

    torch.set_default_device(device)
    try:
        expected = batches(torch.utils.data.DataLoader, _Numbers())
        with hotset.cache(_Numbers(), memory="1MiB") as cached:
            assert batches(hotset.DataLoader, cached) == expected
            cached.clear()
            cached.fill()
            assert batches(hotset.DataLoader, cached) == expected
            assert cached.check() == []
    finally:
        torch.set_default_device(None)


# Losses


def losses_are_those_of_a_plain_loop(device: str) -> None:
    """K = 1, 7, 100, eager and graph, each optimizer: to the bit."""
    with _deterministic(), hotset.cache(digits(), memory="16MiB") as cached:
        for name in OPTIMIZERS:
            if name.startswith("fused") and device == "cpu":
                continue
            eager, _ = losses_of(Training(device, name), loader_of(cached), device, 1, graph=False)
            assert eager == plain(Training(device, name), loader_of(cached), device), name
            captured: list[list[float]] = []
            for size in (1, 7, 100):
                assert losses_of(Training(device, name), loader_of(cached), device, size, False)[0] == eager
                captured.append(losses_of(Training(device, name), loader_of(cached), device, size, True)[0])
            assert captured[0] == captured[1] == captured[2] == eager, name


def schedules_are_followed(device: str) -> None:
    def run(size: int, graph: Any) -> list[float]:
        training = Training(device)
        schedule = torch.optim.lr_scheduler.StepLR(training.optimizer, 1, gamma=0.8)
        return losses_of(training, loader_of(digits()), device, size, graph, schedule.step)[0]

    with _deterministic():
        assert run(10, graph="auto") == run(10, graph=False)


def a_learning_rate_in_a_tensor_costs_no_capture(device: str) -> None:
    def run(graph: Any) -> list[float]:
        training = Training(device)
        rate = torch.tensor(1e-3, device=device)
        training.optimizer = torch.optim.Adam(
            training.network.parameters(), lr=rate, capturable=device != "cpu"
        )
        step = training_step(training.network, training.optimizer, grey)
        schedule = torch.optim.lr_scheduler.StepLR(training.optimizer, 1, gamma=0.9)
        found: list[float] = []
        with hotset.data_sink(step, loader_of(digits()), 1, graph=graph, device=device) as sink:
            for _ in range(2 * PASS):
                replayed = sink.captured
                found.append(sink().item())
                assert sink.captured or not replayed, "the step is to be captured again"
                schedule.step()
            assert graph is False or device == "cpu" or sink.captured, sink.why
        return found

    with _deterministic():
        _close(run("auto"), run(False), 1e-4)


def dropout_draws_as_in_single_steps(device: str) -> None:
    with _deterministic():
        runs = []
        for size, graph in ((1, False), (1, True), (7, True), (100, True)):
            training = Training(device, dropout=0.5)
            torch.manual_seed(11)
            runs.append(losses_of(training, loader_of(digits()), device, size, graph)[0])
    assert len(set(runs[0])) == STEPS
    for run in runs[1:]:
        _close(run, runs[0], 1e-4)


def bfloat16_is_captured(device: str) -> None:
    with _deterministic():
        eager, captured = (
            losses_of(Training(device, autocast=torch.bfloat16), loader_of(digits()), device, 20, graph)[0]
            for graph in (False, True)
        )
    _close(captured, eager, 1e-2)


def resident_samples_train_alike(device: str) -> None:
    with _deterministic(), hotset.cache(digits(), memory="16MiB") as cached:
        for _ in loader_of(cached):
            pass  # everything is cached, as after a first epoch
        expected = losses_of(Training(device), loader_of(cached), device, 25, graph="auto")[0]
        training = Training(device)
        queue = hotset.DeviceQueue(loader_of(cached), device=device, resident="16MiB")
        with hotset.data_sink(training.step, queue, 25, outputs="all") as sink:
            found = [loss for _ in range(STEPS // 25) for loss in sink().tolist()]
            assert device == "cpu" or queue.stats().resident == SAMPLES
        assert found == expected


class _Grey(torch.nn.Module):
    def forward(self, images: Any) -> Any:
        return grey(images)


def a_model_that_is_resumed_trains_on_alike(device: str) -> None:
    """Sunk, with dropout: from a checkpoint at the end of its second epoch."""

    def model() -> hotset.Model:
        torch.manual_seed(7)
        network = torch.nn.Sequential(_Grey(), *lenet(0.5)).to(device)  # type: ignore[misc]
        metrics = {"accuracy": hotset.Accuracy(), "loss": hotset.Loss()}
        return hotset.Model(network, torch.nn.CrossEntropyLoss(), sgd(network), metrics, device=device)

    def found(trained: hotset.Model) -> Any:
        weights = [one.tolist() for one in trained.network.parameters()]
        return trained.steps, trained.eval(loader_of(digits(100))), weights

    with tempfile.TemporaryDirectory() as folder, _deterministic():
        sunk: dict[str, Any] = {"dataset_sink_mode": True, "sink_size": 2 * PASS}
        whole, again = model(), model()
        whole.train(3, loader_of(digits()), hotset.ModelCheckpoint(folder, keep=None), **sunk)
        again.train(3, loader_of(digits()), resume=f"{folder}/model-{4 * PASS}.pt", **sunk)
        assert found(again) == found(whole)


# What cannot be one graph


def _falls_back(device: str, make: Callable[[Training], Any], sentence: str) -> None:
    def run(graph: Any) -> list[float]:
        training = Training(device, dropout=0.2)
        training.step = make(training)
        random.seed(1)
        torch.manual_seed(12)
        with hotset.data_sink(
            training.step, loader_of(digits()), 10, device=device, graph=graph, outputs="all"
        ) as sink:
            found = [loss for _ in range(3) for loss in sink().tolist()]
            assert not sink.captured
            assert (sink.steps, len(found)) == (30, 30)
        return found

    with _deterministic(), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        expected = run(False)
        found = run("auto")
    _close(found, expected, 1e-4)
    if device != "cpu":
        ours = [str(one.message) for one in said if issubclass(one.category, hotset.HotsetWarning)]
        assert len(ours) == 1, ours
        assert sentence in ours[0], ours


def a_step_that_asks_the_device_is_eager(device: str) -> None:
    def make(training: Training) -> Any:
        step = training.step

        def asking(images: Any, labels: Any) -> Any:
            loss = step(images, labels)
            assert loss.item() < 1e6
            return loss

        return asking

    _falls_back(device, make, "the step cannot be one graph")


def a_failed_capture_leaves_no_gradients_behind(device: str) -> None:
    """The step asks the device between backward and the optimizer, and clears gradients at its end."""

    def make(training: Training) -> Any:
        def step(images: Any, labels: Any) -> Any:
            loss = torch.nn.functional.cross_entropy(training.network(grey(images)), labels)
            loss.backward()
            assert loss.item() < 1e6
            training.optimizer.step()
            training.optimizer.zero_grad()
            return loss

        return step

    _falls_back(device, make, "the step cannot be one graph")


def a_step_that_draws_on_the_host_is_eager(device: str) -> None:
    def make(training: Training) -> Any:
        step = training.step
        return lambda images, labels: step((images * random.random()).byte(), labels)

    _falls_back(device, make, "random's global state moved")


def a_step_compiled_into_graphs_of_its_own_is_eager(device: str) -> None:
    if device == "cpu":
        return

    def make(training: Training) -> Any:
        network = torch.compile(training.network, mode="reduce-overhead")
        return training_step(network, training.optimizer, grey)

    _falls_back(device, make, "compiled into graphs of its own")


def _is_captured(device: str, make: Callable[[Training], Any]) -> None:
    """What is compiled is captured, and trains as it does eagerly."""
    if device == "cpu":
        return

    def run(graph: Any) -> list[float]:
        step = make(Training(device))
        loader = loader_of(digits(), drop_last=True)  # each shape is compiled
        with hotset.data_sink(step, loader, 10, device=device, graph=graph, outputs="all") as sink:
            found = [loss for _ in range(3) for loss in sink().tolist()]
            assert graph is False or sink.captured, sink.why
        return found

    with _deterministic():
        _close(run(True), run(False), 1e-4)


def a_compiled_network_is_captured(device: str) -> None:
    _is_captured(
        device,
        lambda training: training_step(torch.compile(training.network), training.optimizer, grey),
    )


def a_step_compiled_as_a_whole_is_captured(device: str) -> None:
    _is_captured(device, lambda training: torch.compile(training.step))


def a_scheduler_inside_the_step_is_eager(device: str) -> None:
    def make(training: Training) -> Any:
        step = training.step
        schedule = torch.optim.lr_scheduler.StepLR(training.optimizer, 1, gamma=0.9)

        def scheduled(images: Any, labels: Any) -> Any:
            loss = step(images, labels)
            schedule.step()
            return loss

        return scheduled

    _falls_back(device, make, "optimizer or scheduler keeps on the host")


def loaded_states_are_captured_anew(device: str) -> None:
    def run(graph: Any) -> list[float]:
        training = Training(device)
        with hotset.data_sink(
            training.step, loader_of(digits()), 10, device=device, graph=graph, outputs="all"
        ) as sink:
            sink()
            saved = {
                name: {
                    key: value.clone() if torch.is_tensor(value) else value for key, value in state.items()
                }
                for name, state in training.optimizer.state_dict()["state"].items()
            }
            groups = training.optimizer.state_dict()["param_groups"]
            sink()
            training.optimizer.load_state_dict({"state": saved, "param_groups": groups})
            return [loss for _ in range(2) for loss in sink().tolist()]

    with _deterministic():
        assert run("auto") == run(False)


# What a captured step may hold, and what may happen between calls


def _equal_runs(device: str, run: Callable[[Any], Any]) -> None:
    """What ``run(graph)`` gives is the same, to the bit, eager and captured."""
    with _deterministic():
        assert run("auto") == run(False)


def _normed(device: str) -> Training:
    """LeNet-5 with batch norm, whose step clips gradients."""
    training = Training(device)
    layers: list[Any] = []
    for layer in training.network:  # type: ignore[attr-defined]
        layers.append(layer)
        if isinstance(layer, torch.nn.Conv2d):
            layers.append(torch.nn.BatchNorm2d(layer.out_channels).to(device))
    network = torch.nn.Sequential(*layers)
    training.network, training.optimizer = network, sgd(network)

    def step(images: Any, labels: Any) -> Any:
        training.optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(network(grey(images)), labels)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 0.5)
        training.optimizer.step()
        return loss

    training.step = step
    return training


def batch_norm_and_clipping_are_captured(device: str) -> None:
    def run(graph: Any) -> Any:
        training = _normed(device)
        losses, _ = losses_of(training, loader_of(digits()), device, 20, graph)
        return losses, [one.tolist() for one in training.network.buffers()]

    _equal_runs(device, run)


def evaluation_between_sinks_changes_nothing(device: str) -> None:
    held_out = digits(100)

    def run(graph: Any) -> Any:
        training = _normed(device)
        scores: list[float] = []

        def evaluate() -> None:
            training.network.eval()
            with torch.no_grad(), hotset.DeviceQueue(loader_of(held_out), device=device) as queue:
                scores.extend(training.network(grey(images)).sum().item() for images, _ in queue)
            training.network.train()

        return losses_of(training, loader_of(digits()), device, 20, graph, evaluate)[0], scores

    _equal_runs(device, run)


def modes_and_numbers_that_change_between_calls_are_followed(device: str) -> None:
    def run(graph: Any) -> Any:
        training, settings = Training(device, dropout=0.5), types.SimpleNamespace(weight=1.0)
        training.step = training_step(
            training.network, training.optimizer, lambda images: grey(images) * settings.weight
        )

        def change() -> None:
            settings.weight *= 0.8
            training.network.train(not training.network.training)

        return losses_of(training, loader_of(digits()), device, 20, graph, change)[0]

    _equal_runs(device, run)


def loaded_weights_are_trained_on(device: str) -> None:
    def run(graph: Any) -> Any:
        training = _normed(device)
        first = {name: value.clone() for name, value in training.network.state_dict().items()}
        return losses_of(
            training,
            loader_of(digits()),
            device,
            20,
            graph,
            lambda: training.network.load_state_dict(first) and None,
        )[0]

    _equal_runs(device, run)


def a_sink_goes_on_from_its_state(device: str) -> None:
    def run(graph: Any, stop: bool) -> list[float]:
        training = Training(device)
        found: list[float] = []
        more: dict[str, Any] = {"device": device, "graph": graph, "outputs": "all"}
        with hotset.data_sink(training.step, loader_of(digits()), 10, **more) as sink:
            found += sink().tolist()
            if not stop:
                return found + sink().tolist()
            state = sink.state_dict()
        with hotset.data_sink(training.step, loader_of(digits()), 10, **more) as sink:
            sink.load_state_dict(state)
            return found + sink().tolist()

    with _deterministic():
        expected = run(False, stop=False)
        assert run(False, stop=True) == run("auto", stop=True) == run("auto", stop=False) == expected


def _added_to(training: Training) -> Any:
    def step(images: Any, labels: Any) -> Any:
        loss = torch.nn.functional.cross_entropy(training.network(grey(images)), labels)
        loss.backward()
        return loss

    return step


def gradients_that_the_caller_clears_are_not_written_to(device: str) -> None:
    """Something else takes their memory, and must find it as it was."""

    def run(graph: Any, to_none: bool) -> Any:
        training = Training(device)
        step, losses = _added_to(training), []
        with hotset.data_sink(
            step, loader_of(digits()), 12, device=device, graph=graph, outputs="all"
        ) as sink:
            for _ in range(6):
                losses += sink().tolist()
                training.optimizer.step()
                training.optimizer.zero_grad(set_to_none=to_none)
                taken = [torch.full_like(one, 7.0) for one in training.network.parameters()]
                losses += sink().tolist()
                assert all(bool((one == 7.0).all()) for one in taken), "a replay wrote to freed memory"
            assert graph is False or device == "cpu" or sink.captured, sink.why
        return losses

    for to_none in (False, True):
        _equal_runs(device, lambda graph, to_none=to_none: run(graph, to_none))


def gradients_after_a_shorter_batch_are_the_steps_own(device: str) -> None:
    def run(graph: Any) -> Any:
        training = Training(device)
        found = []
        with hotset.data_sink(training.step, loader_of(digits()), 1, device=device, graph=graph) as sink:
            for _ in range(3 * PASS):
                sink()
                found.append([one.grad.sum().item() for one in training.network.parameters()])
        return found

    _equal_runs(device, run)


def casts_of_an_outer_autocast_are_made_anew(device: str) -> None:
    """Against a step that casts its weights each time: casts that are kept are of old weights."""
    kind = torch.device(device).type
    with _deterministic():
        training = Training(device)
        with torch.autocast(kind, torch.bfloat16, cache_enabled=False):
            expected = losses_of(training, loader_of(digits()), device, 20, False)[0]
        training = Training(device)
        with hotset.data_sink(training.step, loader_of(digits()), 1, device=device, outputs="all") as sink:
            found = []
            for _ in range(STEPS):
                with torch.autocast(kind, torch.bfloat16):
                    found += sink().tolist()
    _close(found, expected, 1e-2)


def a_name_that_is_bound_anew_is_refused(device: str) -> None:
    class Averaged:
        def __init__(self, training: Training) -> None:
            self.plain, self.average = training.step, torch.zeros((), device=device)

        def step(self, images: Any, labels: Any) -> Any:
            self.average = 0.9 * self.average + self.plain(images, labels).detach()
            return self.average

    _falls_back(device, lambda training: Averaged(training).step, "Averaged.average to a new tensor")


def gradients_of_the_step_before_are_refused(device: str) -> None:
    def make(training: Training) -> Any:
        def step(images: Any, labels: Any) -> Any:
            training.optimizer.step()
            training.optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(training.network(grey(images)), labels)
            loss.backward()
            return loss

        return step

    _falls_back(device, make, "gradients of the step before")


def a_wait_for_the_device_is_named(device: str) -> None:
    def make(training: Training) -> Any:
        step = training.step

        def asking(images: Any, labels: Any) -> Any:
            loss = step(images, labels)
            assert loss.item() < 1e6
            return loss

        return asking

    _falls_back(device, make, f"it waits for the device at {__file__}:")


# Failed captures

# The error of CUDA's that a capture ends with; a wait that the rehearsal has seen has no such sentence.
_INTERRUPTED = "CUDA error: operation not permitted when stream is capturing"


def _interrupted(training: Training) -> Any:
    """A step that cannot be captured, for a reason that shows in its capture alone."""
    step = training.step

    def waiting(images: Any, labels: Any) -> Any:
        loss = step(images, labels)
        if images.is_cuda:
            torch.cuda.synchronize()
        return loss

    return waiting


_SLACK = 4 << 20  # two segments of the allocator's: how far the host runs ahead varies


def _reserved(device: str) -> int:
    """Bytes of the device's memory that torch keeps, when it has given back all that it can."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved(device)


def a_failed_capture_leaves_torch_as_it_was(device: str) -> None:
    """Memory is used again and given back, dropout draws, and another step can be captured."""
    _falls_back(device, _interrupted, _INTERRUPTED)
    if device == "cpu":
        return
    torch.cuda.empty_cache()  # an error of the allocator's own if it is still capturing
    reserved = []
    for _ in range(50):
        del [torch.empty(1 << 22, device=device) for _ in range(8)][:]
        reserved.append(torch.cuda.memory_reserved(device))
    assert reserved[-1] == reserved[1], "memory is not used again"
    kept = []
    for _ in range(3):
        _falls_back(device, _interrupted, _INTERRUPTED)
        kept.append(_reserved(device))
    assert kept[2] <= kept[0] + _SLACK, "the memory of a failed capture is not given back"
    losses_of(Training(device, dropout=0.5), loader_of(digits()), device, 20, True)


def a_failed_capture_leaves_other_graphs_their_draws(device: str) -> None:
    def run(failing: bool) -> list[float]:
        training = Training(device, dropout=0.5)
        torch.manual_seed(11)
        with hotset.data_sink(training.step, loader_of(digits()), 10, device=device, outputs="all") as sink:
            found = sink().tolist()
            if failing:
                draws = torch.get_rng_state()
                there = torch.cuda.get_rng_state() if device != "cpu" else None
                _falls_back(device, _interrupted, _INTERRUPTED)
                torch.set_rng_state(draws)
                if there is not None:
                    torch.cuda.set_rng_state(there)
            return found + sink().tolist() + sink().tolist()

    with _deterministic():
        assert run(failing=True) == run(failing=False)


# Memory


def _slow(device: str) -> None:
    if device != "cpu":
        torch.cuda._sleep(10**7)


def slow_steps_hold_a_few_batches(device: str) -> None:
    size, depth = 64 << 20, 2
    batches = [torch.empty(size, dtype=torch.uint8, pin_memory=device != "cpu")] * 40
    if device == "cpu":
        return
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    # Not what is allocated: a batch that was dropped is not, and its memory is held until its step has ended.
    before = torch.cuda.memory_stats(device)["active_bytes.all.current"]
    with hotset.DeviceQueue(batches, depth, device) as queue:
        for batch in queue:
            _slow(device)
            batch.add_(1)
            del batch
    held = (torch.cuda.memory_stats(device)["active_bytes.all.peak"] - before) / size
    assert held <= 2 * depth + 5, f"{held:.0f} batches were on the device at once"


def memory_does_not_grow(device: str) -> None:
    """Over five hundred steps, and over fifty evaluations, each with a queue of its own."""

    def reserved() -> int:
        if device == "cpu":
            return 0
        torch.cuda.synchronize()
        return torch.cuda.memory_reserved(device)

    training = _normed(device)
    with hotset.data_sink(training.step, loader_of(digits()), 100, device=device) as sink:
        sink()
        found = []
        for _ in range(4):
            sink()
            found.append(reserved())
        assert found[-1] <= found[0] + _SLACK, found  # a batch a step would be ten megabytes
        found = []
        for number in range(50):
            with torch.no_grad(), hotset.DeviceQueue(loader_of(digits(100)), device=device) as queue:
                for images, _ in queue:
                    training.network(grey(images))
            if number in (5, 49):
                found.append(reserved())
        assert found[-1] <= found[0] + _SLACK, found


def a_closed_sink_gives_its_memory_back(device: str) -> None:
    if device == "cpu":
        return
    training = Training(device)
    found = []
    for _ in range(3):
        with hotset.data_sink(training.step, loader_of(digits()), 20, device=device, graph=True) as sink:
            sink()
            assert sink.captured
        training.optimizer.zero_grad()
        found.append(_reserved(device))
    assert found[2] <= found[0] + _SLACK, found


# hotset doctor


def the_doctor_times_steps_that_return_before_the_gpu_is_done(device: str) -> None:
    with tempfile.TemporaryDirectory() as ledger:
        observer = Watch(WatchOptions(ledger, 600.0))
        loader = torch.utils.data.DataLoader(torch.arange(48), batch_size=4)
        batches = iter(loader)
        for _ in range(12):
            observer.before(batches)
            batch = next(batches)
            observer.after(batches, 1e-3, failed=False, batch=lambda batch=batch: batch)
            _slow(device)
        if device != "cpu":
            torch.cuda.synchronize()
        observer.before(batches)
        observer.after(batches, 1e-3, failed=True, batch=lambda: None)
        observer.stop()
        seen = read(ledger)
    assert seen is not None
    if device != "cpu":
        assert seen.gpu is not None
        assert seen.gpu > 2 * seen.step_beside, (seen.gpu, seen.step_beside)
        assert seen.step.seconds * seen.batch_size >= 0.99 * seen.gpu


def programs_train_alike_under_hotset_run_and_doctor(device: str) -> None:
    """A program without a line of hotset's; the doctor tells what its steps take on the GPU."""
    program = str(Path(__file__).with_name("program.py"))
    with tempfile.TemporaryDirectory() as folder:
        made = np.random.default_rng(1)
        for number in range(240):
            noise = made.integers(0, 256, (200, 200, 3), np.uint8)
            Image.fromarray(noise).save(f"{folder}/{number:03}.jpg")

        def run(*before: str) -> str:
            command = [sys.executable, *before, program, folder, device]
            ended = subprocess.run(command, capture_output=True, text=True, timeout=100)
            assert ended.returncode == 0, ended.stderr[-2000:]
            return ended.stdout + ended.stderr

        def losses(said: str) -> list[str]:
            return [line for line in said.splitlines() if line.startswith("loss ")]

        plain = losses(run())
        assert len(plain) == 180
        assert losses(run("-m", "hotset", "run", "--", sys.executable)) == plain
        said = run("-m", "hotset", "doctor", "--", sys.executable)
    assert losses(said) == plain
    assert "a step" in said, said
    assert device == "cpu" or "on the GPU" in said, said


# Streams, and several ranks


def a_consumer_on_a_stream_of_its_own_reads_whole_batches(device: str) -> None:
    batches = [torch.full((1 << 22,), number, dtype=torch.uint8) for number in range(12)]
    own: Any = torch.cuda.stream(torch.cuda.Stream(device)) if device != "cpu" else contextlib.nullcontext()
    with own, hotset.DeviceQueue(batches, 2, device) as queue:
        found = []
        for batch in queue:
            _slow(device)
            found.append(batch.float().mean())
            del batch
        assert [int(one) for one in found] == list(range(12))


def batches_that_an_iterable_makes_on_the_device_are_whole(device: str) -> None:
    """A thread reads the iterable, and the consumer has a stream of its own."""

    def made() -> Iterator[torch.Tensor]:
        for number in range(12):
            batch = torch.zeros(1 << 22, device=device)
            _slow(device)
            yield batch.add_(number)

    own: Any = torch.cuda.stream(torch.cuda.Stream(device)) if device != "cpu" else contextlib.nullcontext()
    with own, hotset.DeviceQueue(made(), 2, device) as queue:
        assert [int(batch.mean()) for batch in queue] == list(range(12))


def sparse_batches_are_read_whole(device: str) -> None:
    dense = [torch.eye(512) * number for number in range(12)]
    with hotset.DeviceQueue([one.to_sparse() for one in dense], 2, device) as queue:
        found = []
        for batch in queue:
            _slow(device)
            found.append(batch.to_dense().sum())
            del batch
    assert [int(one) for one in found] == [512 * number for number in range(12)]


def one_rank_of_distributed_data_parallel_is_captured(device: str) -> None:
    """Made under a stream. Made on the default stream it is captured or falls back, and trains alike."""
    group: Any = torch.distributed
    group.init_process_group(
        "gloo" if device == "cpu" else "nccl", store=group.HashStore(), rank=0, world_size=1
    )
    try:
        with _deterministic():
            expected = losses_of(Training(device), loader_of(digits()), device, 20, False)[0]
            for own in (True, False):
                training = Training(device)
                stream: Any = contextlib.nullcontext()
                if own and device != "cpu":
                    stream = torch.cuda.stream(torch.cuda.Stream(device))
                with stream:
                    network = torch.nn.parallel.DistributedDataParallel(training.network)
                step = training_step(network, training.optimizer, grey)
                with (
                    warnings.catch_warnings(),
                    hotset.data_sink(step, loader_of(digits()), 20, device=device, outputs="all") as sink,
                ):
                    warnings.simplefilter("always" if own else "ignore")
                    found = [loss for _ in range(STEPS // 20) for loss in sink().tolist()]
                    assert device == "cpu" or not own or sink.captured, sink.why
                _close(found, expected, 1e-4)
                del network, step, sink
    finally:
        group.destroy_process_group()


# Kills


def _copy_for_ever(cached: Any, device: str, pipe: Any) -> None:
    with hotset.DeviceQueue(hotset.DataLoader(cached, 4, pin_memory=device != "cpu"), device=device) as queue:
        while True:
            for (batch,) in queue:
                batch.add_(1)
            pipe.send("once")


def a_process_that_is_killed_while_it_copies_takes_nothing_with_it(device: str) -> None:
    """Its memory on the device is given back; the cache, which it has read from, is as it was."""
    context = multiprocessing.get_context("spawn")
    data = TensorDataset(torch.arange(32, dtype=torch.uint8)[:, None].repeat(1, 4 << 20))
    with hotset.cache(data, memory="512MiB") as cached:
        for _ in hotset.DataLoader(cached, 4):
            pass
        for number in range(3):
            free = torch.cuda.mem_get_info(device)[0] if device != "cpu" else 0
            ours, theirs = context.Pipe()
            copying = context.Process(target=_copy_for_ever, args=(cached, device, theirs))
            copying.start()
            theirs.close()
            assert ours.recv() == "once"
            time.sleep(0.003 * number)
            copying.kill()
            copying.join()
            with hotset.DeviceQueue(hotset.DataLoader(cached, 4), device=device) as queue:
                found = torch.cat([batch.cpu() for (batch,) in queue])
            assert torch.equal(found, data.tensors[0])
            until = time.monotonic() + 5
            while device != "cpu" and torch.cuda.mem_get_info(device)[0] < free - (256 << 20):
                assert time.monotonic() < until, "the device's memory is not given back"
                time.sleep(0.05)


# Resident samples


def samples_that_are_resident_in_part_train_alike(device: str) -> None:
    with _deterministic(), hotset.cache(digits(), memory="16MiB") as cached:
        for _ in loader_of(cached):
            pass
        expected = losses_of(Training(device), loader_of(cached), device, 25, graph="auto")[0]
        training = Training(device)
        half = SAMPLES // 2 * (32 * 32 + 8)
        queue = hotset.DeviceQueue(loader_of(cached), device=device, resident=half)
        with hotset.data_sink(training.step, queue, 25, outputs="all") as sink:
            found = [loss for _ in range(STEPS // 25) for loss in sink().tolist()]
            assert device == "cpu" or 0 < queue.stats().resident < SAMPLES
    assert found == expected


def samples_for_which_there_is_no_room_come_from_the_cache(device: str) -> None:
    if device == "cpu":
        return
    free, _ = torch.cuda.mem_get_info(device)
    taken = torch.empty(max(0, free - (600 << 20)), dtype=torch.uint8, device=device)
    data = TensorDataset(torch.zeros(1000, 1 << 20, dtype=torch.uint8))
    with hotset.cache(data, memory="2GiB") as cached, warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in hotset.DataLoader(cached, batch_size=10):
            pass
        queue = hotset.DeviceQueue(hotset.DataLoader(cached, batch_size=10), device=device, resident="2GiB")
        assert sum(len(batch) for (batch,) in queue) == 1000
        assert queue.stats().resident == 0
        queue.close()
    del taken
    torch.cuda.empty_cache()
    assert any("no samples are kept" in str(one.message) for one in said)


# In the order in which they are run: what matters most comes first.
CHECKS: list[Callable[[str], None]] = [
    the_machine_captures_and_profiles,
    losses_are_those_of_a_plain_loop,
    dropout_draws_as_in_single_steps,
    bfloat16_is_captured,
    blocks_are_held_until_their_copies_have_ended,
    queues_give_what_the_loader_gives,
    pinned_batches_are_whole_in_a_plain_loop,
    batches_are_where_torchs_loader_has_them,
    schedules_are_followed,
    a_learning_rate_in_a_tensor_costs_no_capture,
    resident_samples_train_alike,
    a_model_that_is_resumed_trains_on_alike,
    a_step_that_asks_the_device_is_eager,
    a_failed_capture_leaves_no_gradients_behind,
    a_step_that_draws_on_the_host_is_eager,
    a_scheduler_inside_the_step_is_eager,
    loaded_states_are_captured_anew,
    batch_norm_and_clipping_are_captured,
    evaluation_between_sinks_changes_nothing,
    modes_and_numbers_that_change_between_calls_are_followed,
    loaded_weights_are_trained_on,
    a_sink_goes_on_from_its_state,
    gradients_that_the_caller_clears_are_not_written_to,
    gradients_after_a_shorter_batch_are_the_steps_own,
    casts_of_an_outer_autocast_are_made_anew,
    a_name_that_is_bound_anew_is_refused,
    gradients_of_the_step_before_are_refused,
    a_wait_for_the_device_is_named,
    a_failed_capture_leaves_torch_as_it_was,
    a_failed_capture_leaves_other_graphs_their_draws,
    slow_steps_hold_a_few_batches,
    memory_does_not_grow,
    the_doctor_times_steps_that_return_before_the_gpu_is_done,
    a_closed_sink_gives_its_memory_back,
    a_consumer_on_a_stream_of_its_own_reads_whole_batches,
    batches_that_an_iterable_makes_on_the_device_are_whole,
    sparse_batches_are_read_whole,
    one_rank_of_distributed_data_parallel_is_captured,
    samples_that_are_resident_in_part_train_alike,
    samples_for_which_there_is_no_room_come_from_the_cache,
    a_process_that_is_killed_while_it_copies_takes_nothing_with_it,
]
# They start programs, or compile for a minute or two, so they are run after the figures.
LAST: list[Callable[[str], None]] = [
    programs_train_alike_under_hotset_run_and_doctor,
    a_compiled_network_is_captured,
    a_step_compiled_as_a_whole_is_captured,
    a_step_compiled_into_graphs_of_its_own_is_eager,
]
# Seconds, for those that may take more than half a minute.
LIMITS: dict[Callable[[str], None], float] = {
    losses_are_those_of_a_plain_loop: 120.0,
    one_rank_of_distributed_data_parallel_is_captured: 60.0,
    samples_for_which_there_is_no_room_come_from_the_cache: 60.0,
    a_process_that_is_killed_while_it_copies_takes_nothing_with_it: 90.0,
    programs_train_alike_under_hotset_run_and_doctor: 120.0,
    a_compiled_network_is_captured: 180.0,
    a_step_compiled_as_a_whole_is_captured: 180.0,
    a_step_compiled_into_graphs_of_its_own_is_eager: 240.0,
}
