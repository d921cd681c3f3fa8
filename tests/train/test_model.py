"""Training, evaluation and prediction: the rules of epochs and sinks, and that sinking changes no result."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import seed_everything
from torch import nn
from torch.utils.data import IterableDataset
from training import BATCHES, CLASSES, Recorder, loader_of, model_of, one_thread, outcome, row, trained

import hotset
from hotset.device.queue import DeviceQueue
from hotset.device.sink import data_sink
from hotset.train.callbacks import Callback
from hotset.train.metrics import Accuracy, Loss
from hotset.train.model import Model
from hotset.train.run_state import RunState

__all__ = ["one_thread"]  # a fixture of each test here

BATCH = (torch.stack([row(i)[0] for i in range(4)]), torch.tensor([i % CLASSES for i in range(4)]))


def plain_loop(kind: str, epochs: int) -> list[float]:
    """The loop that people write, with nothing of ours but the loader."""
    seed_everything(1)
    model = model_of()
    network, losses = model.network.train(), []
    with loader_of(kind) as loader:
        for _ in range(epochs):
            for inputs, labels in loader:
                model.optimizer.zero_grad()
                loss = model.loss_fn(network(inputs), labels)
                loss.backward()
                model.optimizer.step()
                losses.append(loss.item())
    return losses


# ---- the same results --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["hotset", "torch"])
def test_training_is_the_plain_loop_bit_for_bit(kind: str) -> None:
    assert trained(kind).losses == plain_loop("torch", 3)


@pytest.mark.parametrize("kind", ["hotset", "torch"])
def test_sinking_changes_no_result(kind: str) -> None:
    """In sinks of 1, 7 and 100 steps, of a pass, and without sinking."""
    plain = trained(kind, 17)
    assert trained(kind, 17, dataset_sink_mode=True) == plain
    for size in (1, 7, 100):
        sunk = trained(kind, 100 // size, dataset_sink_mode=True, sink_size=size)
        assert sunk.losses == plain.losses[: sunk.steps], f"sink_size={size}"
        assert sunk.steps == 100 // size * size


def test_workers_change_no_result() -> None:
    plain = trained("torch", 2, workers=2)
    assert trained("hotset", 3, workers=2, dataset_sink_mode=True, sink_size=4).losses == plain.losses


@pytest.mark.parametrize("sinking", [True, False])
def test_only_a_sink_may_become_a_graph(sinking: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def look(*args: Any, **options: Any) -> Any:
        asked.append(options["graph"])
        return data_sink(*args, **options)

    monkeypatch.setattr("hotset.train.model.data_sink", look)
    model_of().train(1, [BATCH], dataset_sink_mode=sinking)
    assert asked == ["auto" if sinking else False]


# ---- epochs, sinks, counts ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "sinks", "steps"),
    [
        ({}, [1] * 12, 12),
        ({"sink_size": 4}, [1] * 12, 12),
        ({"dataset_sink_mode": True}, [6, 6], 12),
        ({"dataset_sink_mode": True, "sink_size": 4}, [4, 4], 8),
        ({"dataset_sink_mode": True, "sink_size": 20}, [20, 20], 40),
    ],
)
def test_what_an_epoch_and_a_sink_are(options: dict[str, Any], sinks: list[int], steps: int) -> None:
    recorder, model = Recorder(), model_of()
    with loader_of("hotset") as loader:
        model.train(2, loader, recorder, **options)
    assert [count for _, count in recorder.sinks] == sinks
    assert [step.step for step in recorder.steps] == list(range(1, steps + 1))
    in_epoch = [*range(1, steps // 2 + 1)]
    assert [step.step_in_epoch for step in recorder.steps] == in_epoch * 2
    assert [step.epoch for step in recorder.steps] == [1] * len(in_epoch) + [2] * len(in_epoch)
    assert model.steps == steps


class Kept(Callback):
    """What the network was given, as batches' first values."""

    def __init__(self, model: Model) -> None:
        self.seen: list[float] = []
        model.network.register_forward_pre_hook(lambda _, inputs: self.seen.append(float(inputs[0][0, 0])))


def test_the_next_epoch_goes_on_in_the_data_where_the_last_one_stopped() -> None:
    batches = [(torch.full((2, 8), float(i)), torch.zeros(2, dtype=torch.int64)) for i in range(5)]
    model = model_of()
    kept = Kept(model)
    model.train(3, batches, kept, dataset_sink_mode=True, sink_size=4)
    assert kept.seen == [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0, 1]


def test_another_call_trains_on_from_a_new_pass_and_counts_on() -> None:
    batches = [(torch.full((2, 8), float(i)), torch.zeros(2, dtype=torch.int64)) for i in range(5)]
    model, recorder = model_of(), Recorder()
    kept = Kept(model)
    model.train(1, batches, kept, dataset_sink_mode=True, sink_size=3)
    model.train(1, batches, [recorder, kept], dataset_sink_mode=True, sink_size=3)
    assert kept.seen == [0, 1, 2, 0, 1, 2]
    assert [(step.epoch, step.step, step.step_in_epoch) for step in recorder.steps] == [
        (1, 4, 1),
        (1, 5, 2),
        (1, 6, 3),
    ]


class Stream(IterableDataset[Any]):
    """Without a length; draws."""

    def __iter__(self) -> Iterator[Any]:
        for index in torch.randperm(22).tolist():
            yield row(index)[0] + torch.rand(8), index % CLASSES


def test_a_loader_without_a_length() -> None:
    def run(loader: Any, **options: Any) -> tuple[list[float], list[int]]:
        seed_everything(2)
        recorder, model = Recorder(), model_of()
        model.train(2, loader, recorder, **options)
        assert options or recorder.events.count("on_epoch_end") == 2
        return recorder.losses, [step.step_in_epoch for step in recorder.steps]

    streams = torch.utils.data.DataLoader(Stream(), batch_size=4)
    losses, in_epoch = run(streams)
    assert in_epoch == [1, 2, 3, 4, 5, 6] * 2
    assert run(streams, dataset_sink_mode=True, sink_size=6)[0] == losses
    assert run(DeviceQueue(hotset.DataLoader(Stream(), batch_size=4), device="cpu"))[0] == losses


def test_a_device_queue_and_an_iterable_are_loaders_too() -> None:
    model = model_of()
    model.train(2, DeviceQueue([BATCH] * 3, device="cpu"))
    model.train(1, iter([BATCH, BATCH]))
    model.train(1, (BATCH for _ in range(2)), dataset_sink_mode=True, sink_size=2)
    assert model.steps == 10


# ---- batches -----------------------------------------------------------------------------------------


class Named(nn.Module):
    """Takes its inputs by place or by name; returns the loss itself if it is given the label."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, CLASSES)

    def forward(self, image: Any, scale: Any, label: Any = None) -> Any:
        output = self.linear(image) * scale
        return output if label is None else nn.functional.cross_entropy(output, label)


@pytest.mark.parametrize("own_loss", [False, True])
def test_tuples_lists_and_dicts_train_alike(own_loss: bool) -> None:
    image, label = BATCH
    scale = torch.tensor(2.0)
    found = []
    for batch in (
        (image, scale, label),
        [image, scale, label],
        {"label": label, "scale": scale, "image": image},
    ):
        torch.manual_seed(3)
        network, recorder = Named(), Recorder()
        loss_fn = None if own_loss else nn.CrossEntropyLoss()
        optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
        model = Model(network, loss_fn, optimizer, {"loss": Loss()}, device="cpu")
        model.train(3, [batch], recorder)
        found.append((recorder.losses, model.eval([batch])))
    assert found[0] == found[1] == found[2]
    assert found[0][1]["loss"] < found[0][0][-1] < found[0][0][0]


# ---- eval, fit, predict ------------------------------------------------------------------------------


def modes(model: Model) -> list[bool]:
    return [module.training for module in model.network.modules()]


def test_eval_gives_metrics_and_leaves_the_network_as_it_was() -> None:
    with loader_of("hotset", shuffle=False) as loader:
        model = model_of({"accuracy": Accuracy(), "loss": Loss()})
        model.network[1].eval()  # a frozen normalisation
        before, weights = modes(model), {k: v.clone() for k, v in model.network.state_dict().items()}
        seed_everything(5)
        values = model.eval(loader)
        seed_everything(5)
        batches = list(loader)
        assert modes(model) == before
        assert all(torch.equal(value, weights[name]) for name, value in model.network.state_dict().items())
    model.network.eval()
    outputs = [(model.network(x), y) for x, y in batches]
    right = sum(int((output.argmax(1) == y).sum()) for output, y in outputs)
    assert values["accuracy"] == pytest.approx(right / 22)
    each = [(nn.functional.cross_entropy(output, y).item(), len(y)) for output, y in outputs]
    # The last batch is shorter, and weighs less.
    assert values["loss"] == pytest.approx(sum(loss * n for loss, n in each) / 22)
    assert values["loss"] != pytest.approx(sum(loss for loss, _ in each) / BATCHES)


def test_metrics_begin_anew_with_each_eval() -> None:
    model = model_of({"accuracy": Accuracy(), "loss": Loss()})
    first = model.eval([BATCH])
    assert model.eval([BATCH, (BATCH[0], (BATCH[1] + 1) % CLASSES)]) != first
    assert model.eval([BATCH]) == first


def test_accuracy_takes_classes_and_dense_outputs() -> None:
    accuracy = Accuracy()
    accuracy.update(torch.tensor([1, 2, 0]), torch.tensor([1, 2, 2]))
    accuracy.update(torch.eye(3)[None], torch.tensor([[0, 1, 0]]))  # (1, classes, 3)
    assert accuracy.compute() == pytest.approx(4 / 6)
    for output, label in ((torch.rand(3), torch.ones(3)), (torch.rand(2, 3), torch.ones(3))):
        with pytest.raises(hotset.ArgumentError, match=r"Accuracy takes outputs of shape"):
            accuracy.update(output, label)


@pytest.mark.parametrize("metric", [Accuracy(), Loss()])
def test_a_mean_of_nothing_is_refused(metric: Any) -> None:
    with pytest.raises(hotset.ArgumentError, match="was given no samples"):
        metric.compute()


def test_a_batch_that_does_not_show_its_samples_counts_as_one() -> None:
    class Absolute(nn.Module):
        def forward(self, graph: Any) -> torch.Tensor:
            return torch.tensor(graph.energy).abs()

    batches = [{"graph": SimpleNamespace(energy=energy)} for energy in (2.0, -4.0)]
    assert Model(Absolute(), metrics={"loss": Loss()}, device="cpu").eval(batches) == {"loss": 3.0}


@pytest.mark.chaos  # it is imported for seconds
def test_torchmetrics() -> None:
    torchmetrics = pytest.importorskip("torchmetrics")
    metrics = {
        "accuracy": torchmetrics.Accuracy(task="multiclass", num_classes=CLASSES, average="micro"),
        "each": torchmetrics.Accuracy(task="multiclass", num_classes=CLASSES, average="none"),
        "ours": Accuracy(),
    }
    values = model_of(metrics).eval([BATCH] * 3)
    assert values["accuracy"] == pytest.approx(values["ours"])
    assert values["each"].shape == (CLASSES,)


def test_fit_evaluates_after_each_epoch_and_trains_as_train_does() -> None:
    def run(valid: Any) -> tuple[Any, list[Any]]:
        seed_everything(1)
        recorder, model = Recorder(), model_of({"loss": Loss()})
        with loader_of("hotset") as loader:
            model.fit(3, loader, valid, recorder, dataset_sink_mode=True, sink_size=4)
        return outcome(model, recorder), recorder.events

    fitted, events = run([BATCH])
    trained_only, _ = run(None)
    assert fitted == trained_only
    assert [event for event in events if "eval" in event or "epoch" in event] == [
        "on_epoch_begin",
        "on_eval_begin",
        "on_eval_end",
        "on_epoch_end",
    ] * 3


def test_predict() -> None:
    model = model_of()
    model.network.train()
    first = model.predict(BATCH[0])
    assert not first.requires_grad
    assert torch.equal(first, model.predict(BATCH[0])), "dropout was at work"
    assert model.network.training


def test_training_mode_in_training_only_and_frozen_modules_stay_frozen() -> None:
    class Look(Callback):
        def on_step_end(self, run: RunState) -> None:
            seen.append([module.training for module in run.network])

    seen: list[list[bool]] = []
    model = model_of()
    model.network.eval()
    model.train(1, [BATCH], Look())
    assert seen == [[True] * 5]
    assert not any(modes(model))
    model.network.train()
    model.network[1].eval()
    model.train(1, [BATCH], Look())
    assert seen[1] == [True, False, True, True, True]
    assert [module.training for module in model.network] == seen[1]


def test_a_loss_with_weights_is_moved_with_the_network() -> None:
    weights = torch.ones(CLASSES)
    network = nn.Linear(8, CLASSES)
    model = Model(network, nn.CrossEntropyLoss(weight=weights), device="meta")
    assert model.loss_fn is not None
    assert {t.device.type for t in (*model.network.parameters(), model.loss_fn.weight)} == {"meta"}  # type: ignore[attr-defined]
