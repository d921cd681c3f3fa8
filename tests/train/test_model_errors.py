"""What is refused, with a sentence; and what passes through, leaving nothing behind and the model of use."""

from __future__ import annotations

import itertools
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from helpers import eventually, rarely, seed_everything
from torch import nn
from training import BATCHES, Recorder, loader_of, model_of, one_thread

import hotset
from hotset.device.queue import DeviceQueue
from hotset.train.callbacks import Callback
from hotset.train.metrics import Accuracy, Loss
from hotset.train.model import Model
from hotset.train.run_state import RunState

__all__ = ["one_thread"]  # a fixture of each test here

BATCH = (torch.ones(4, 8), torch.zeros(4, dtype=torch.int64))


# ---- arguments ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("sink_size", [0, -2, -100, "7", "auto", True, False, 1.0, None])
@pytest.mark.parametrize("sinking", [True, False])
def test_sink_sizes(sink_size: Any, sinking: bool) -> None:
    model = model_of()
    with pytest.raises(hotset.ArgumentError, match=r"sink_size must be a number of steps, 1 or more, or -1"):
        model.train(1, [BATCH], dataset_sink_mode=sinking, sink_size=sink_size)
    assert model.steps == 0


@pytest.mark.parametrize("epoch", [0, -1, "3", True, 1.0, None])
def test_epochs(epoch: Any) -> None:
    with pytest.raises(hotset.ArgumentError, match=r"epoch must be a whole number, 1 or more"):
        model_of().train(epoch, [BATCH])
    with pytest.raises(hotset.ArgumentError, match="epoch must be"):
        model_of().fit(epoch, [BATCH])


@pytest.mark.parametrize("mode", [1, "yes", None])
def test_sink_modes(mode: Any) -> None:
    with pytest.raises(hotset.ArgumentError, match=r"dataset_sink_mode must be True or False"):
        model_of().train(1, [BATCH], dataset_sink_mode=mode)


@pytest.mark.parametrize("name", ["step_end", "on_train_step_end", "on_batch_end", "begin"])
def test_a_callback_that_would_never_be_called(name: str) -> None:
    kind: Any = type("Mine", (Callback,), {name: lambda self, run: None})
    model = model_of()
    with pytest.raises(hotset.ArgumentError, match=rf"Mine\.{name} is named like an event .* on_step_end"):
        model.train(1, [BATCH], callbacks=[kind()])
    assert model.steps == 0


def test_a_callback_may_have_other_methods_and_those_of_another_framework() -> None:
    class Others:
        def on_fit_start(self) -> None:
            raise AssertionError

    class Mine(Callback, Others):
        _on_hold, rebegin = None, len

        def on_step_end(self, run: RunState) -> None:
            self.latest = run.step

        def spend(self) -> None:
            raise AssertionError

    mine = Mine()
    model_of().train(1, [BATCH], callbacks=mine)
    assert mine.latest == 1


class Nothing(torch.utils.data.IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(())


@pytest.mark.parametrize("sinking", [True, False])
@pytest.mark.parametrize(
    "loader",
    [
        list,
        lambda: hotset.DataLoader([]),
        lambda: torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.empty(0, 1))),
        lambda: DeviceQueue([], device="cpu"),
        lambda: iter(()),
        lambda: torch.utils.data.DataLoader(Nothing()),
    ],
    ids=["list", "hotset", "torch", "queue", "iterator", "iterable dataset"],
)
def test_empty_loaders(loader: Any, sinking: bool) -> None:
    with pytest.raises(hotset.ArgumentError, match=r"has no batches|gave no batch in a whole pass"):
        model_of().train(2, loader(), dataset_sink_mode=sinking, sink_size=3)
    with pytest.raises(hotset.ArgumentError, match=r"has no batches|gave no batch to evaluate"):
        model_of({"loss": Loss()}).eval(loader())


def test_an_iterator_that_is_used_up() -> None:
    model = model_of()
    with pytest.raises(hotset.ArgumentError, match="an iterator that is used up"):
        model.train(2, iter([BATCH] * 3))
    assert model.steps == 3


def test_a_pass_of_unknown_length_is_no_sink() -> None:
    with pytest.raises(hotset.ArgumentError, match=r"has no length.*give sink_size"):
        model_of().train(1, iter([BATCH]), dataset_sink_mode=True)


@pytest.mark.parametrize("loader", [3, None, object()])
def test_no_loader(loader: Any) -> None:
    with pytest.raises(hotset.ArgumentError, match="must be iterable"):
        model_of().train(1, loader)


@pytest.mark.parametrize(
    "callbacks",
    [3, "loss", [print], [Callback], Callback, [None], {"a": 1}, object()],
    ids=lambda given: f"{given!r:.12}",
)
def test_no_callbacks(callbacks: Any) -> None:
    with pytest.raises(hotset.ArgumentError, match="callback"):
        model_of().train(1, [BATCH], callbacks)
    with pytest.raises(hotset.ArgumentError, match="callback"):
        model_of({"loss": Loss()}).eval([BATCH], callbacks)


class Half:
    def update(self, output: Any, label: Any) -> None: ...

    def compute(self) -> float:
        return 0.0


@pytest.mark.parametrize(
    ("metrics", "sentence"),
    [
        ([Accuracy()], "must be a dict"),
        ("accuracy", "must be a dict"),
        ({"half": Half()}, r"metrics\['half'\] is without reset\(\)"),
        ({"a": "accuracy"}, r"without update, compute, reset\(\)"),
        ({"a": Accuracy}, "its class: make one of it"),
    ],
)
def test_no_metrics(metrics: Any, sentence: str) -> None:
    with pytest.raises(hotset.ArgumentError, match=sentence):
        model_of(metrics)


def test_what_a_model_is_made_of() -> None:
    with pytest.raises(hotset.ArgumentError, match=r"must be a torch.nn.Module"):
        Model(print)  # type: ignore[arg-type]
    with pytest.raises(hotset.ArgumentError, match="must be callable"):
        Model(nn.Identity(), "mse")  # type: ignore[arg-type]
    with pytest.raises(hotset.ArgumentError, match=r"must have zero_grad\(\) and step\(\)"):
        Model(nn.Identity(), None, "sgd")
    for device in ("nowhere", "cuda:99"):
        with pytest.raises(hotset.ArgumentError, match="device must be"):
            Model(nn.Identity(), device=device)


def test_what_a_model_lacks() -> None:
    with pytest.raises(hotset.ArgumentError, match="no optimizer to train with"):
        Model(nn.Linear(8, 3), nn.CrossEntropyLoss()).train(1, [BATCH])
    with pytest.raises(hotset.ArgumentError, match="no metrics to evaluate"):
        model_of().eval([BATCH])
    model = model_of()
    with pytest.raises(hotset.ArgumentError, match="no metrics to evaluate"):
        model.fit(1, [BATCH], [BATCH])
    assert model.steps == 0
    with pytest.raises(hotset.ArgumentError, match="wants the network's output, and with loss_fn=None"):
        Model(nn.Identity(), metrics={"accuracy": Accuracy()}).eval([BATCH])


def test_a_queue_to_another_device() -> None:
    with pytest.raises(hotset.ArgumentError, match="batches are on cpu, and the network is on meta"):
        Model(nn.Linear(8, 3), nn.CrossEntropyLoss(), device="meta", optimizer=model_of().optimizer).train(
            1, DeviceQueue([BATCH], device="cpu")
        )


# ---- batches -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("batch", "sentence"),
    [
        (BATCH[0], "holds Tensor alone and no label"),
        ((BATCH[0],), "holds Tensor alone and no label"),
        ((), "holds nothing alone and no label"),
        ({"image": BATCH[0], "target": BATCH[1]}, r'has no "label", only \'image\', \'target\''),
        ({}, 'has no "label", only nothing'),
    ],
)
def test_a_batch_without_a_label(batch: Any, sentence: str) -> None:
    model = model_of({"loss": Loss()})
    with pytest.raises(hotset.ArgumentError, match=sentence):
        model.train(1, [batch])
    with pytest.raises(hotset.ArgumentError, match=sentence):
        model.eval([batch])
    assert model.steps == 0


@pytest.mark.parametrize("loss", [torch.ones(2), 1.0, None])
def test_a_loss_that_is_not_one_number(loss: Any) -> None:
    network = nn.Linear(8, 3)
    model = Model(network, lambda output, label: loss, torch.optim.SGD(network.parameters()), device="cpu")
    with pytest.raises(hotset.ArgumentError, match=r"loss_fn must return one number"):
        model.train(1, [BATCH])


def check_ended(threads: set[threading.Thread], raised: pytest.ExceptionInfo[BaseException]) -> None:
    """No thread has come, though the exception, if anybody keeps it, holds on to all that was under way."""
    assert raised.traceback
    ended = eventually(lambda: set(threading.enumerate()) <= threads)
    assert ended, f"still there: {set(threading.enumerate()) - threads}"


# ---- exceptions --------------------------------------------------------------------------------------


class Raising(Callback):
    """Raises at one event, once."""

    def __init__(self, event: str) -> None:
        self.event = event

    def __getattribute__(self, name: str) -> Any:
        if name == object.__getattribute__(self, "event"):
            return object.__getattribute__(self, "fail")
        return object.__getattribute__(self, name)

    def on_step_end(self, run: RunState) -> None:
        if self.event == "on_step_end":
            self.fail(run)

    def fail(self, run: RunState) -> None:
        self.event = "none"
        raise LookupError("of the user's own")


EVENTS = sorted(name for name in vars(Callback) if name.startswith("on_"))


@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.parametrize("sinking", [True, False])
def test_an_exception_in_a_callback_passes_through(event: str, sinking: bool) -> None:
    model, callback = model_of({"loss": Loss()}), Raising(event)
    model.network.eval()
    threads = set(threading.enumerate())
    with loader_of("hotset") as loader, loader_of("torch") as valid:
        with pytest.raises(LookupError, match="of the user's own") as raised:
            model.fit(2, loader, valid, callback, dataset_sink_mode=sinking)
        check_ended(threads, raised)
        assert not model.network.training
        model.fit(2, loader, valid, callback, dataset_sink_mode=sinking)
    assert model.steps == 2 * BATCHES


class Broken(torch.utils.data.Dataset[Any]):
    """Raises at its tenth sample, once."""

    armed = True

    def __len__(self) -> int:
        return 22

    def __getitem__(self, index: int) -> Any:
        if index == 9 and self.armed:
            self.armed = False
            raise LookupError("of the user's own")
        return torch.ones(8), 0


@pytest.mark.parametrize("options", [{}, {"dataset_sink_mode": True, "sink_size": 5}])
def test_an_exception_in_the_data_passes_through(options: dict[str, Any]) -> None:
    recorder, model = Recorder(), model_of()
    loader = torch.utils.data.DataLoader(Broken(), batch_size=2)
    with pytest.raises(LookupError, match="of the user's own") as raised:
        model.train(2, loader, recorder, **options)
    assert any(entry.name == "__getitem__" for entry in raised.traceback)
    assert model.steps == 4, "four batches came before it"


def test_an_exception_in_an_evaluation_passes_through() -> None:
    model = model_of({"loss": Loss()})
    threads = set(threading.enumerate())
    with pytest.raises(LookupError, match="of the user's own") as raised:
        model.eval(hotset.DataLoader(Broken(), batch_size=2))
    check_ended(threads, raised)
    assert model.network.training


def endless() -> Iterator[Any]:
    while True:
        yield BATCH


def test_an_exception_over_a_loader_without_a_length_ends_its_thread() -> None:
    threads = set(threading.enumerate())
    with pytest.raises(LookupError) as raised:
        model_of().train(1, endless(), Raising("on_sink_end"))
    check_ended(threads, raised)


@pytest.mark.parametrize(
    ("kind", "workers"), rarely(itertools.product(["hotset", "torch"], [0, 2]), ("torch", 2), ("hotset", 2))
)
def test_ctrl_c_in_the_midst_of_a_sink(kind: str, workers: int) -> None:
    """The steps that were done count, and the same call again does those that are left."""
    seed_everything(1)
    recorder, model = Recorder(), model_of()
    passes = 0

    def interrupt(*_: Any) -> None:
        nonlocal passes
        passes += 1
        if passes == 10:
            signal.raise_signal(signal.SIGINT)

    model.network.register_forward_pre_hook(interrupt)
    threads = set(threading.enumerate())
    with loader_of(kind, workers) as loader:
        with pytest.raises(KeyboardInterrupt) as raised:
            model.train(2, loader, recorder, dataset_sink_mode=True, sink_size=50)
        check_ended(threads, raised)
        assert model.steps == 9
        assert recorder.steps == []
        model.train(2, loader, recorder, dataset_sink_mode=True, sink_size=50)
    assert [step.step for step in recorder.steps] == list(range(10, 101))
    assert recorder.sinks == [(50, 41), (100, 50)]
    assert [(step.epoch, step.step_in_epoch) for step in recorder.steps[:42]] == [
        *((1, number) for number in range(10, 51)),
        (2, 1),
    ]
