"""What callbacks are told, and when; what the monitors print; when training stops; the bar on a terminal."""

from __future__ import annotations

import math
import os
import pty
import re
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from helpers import seed_everything
from kills import child, ended, in_child
from torch import distributed
from training import Recorder, Step, loader_of, model_of, one_thread

import hotset
from hotset import LossNotFinite
from hotset.train.callbacks import Callback, EarlyStopping, LossMonitor, TimeMonitor
from hotset.train.metrics import Accuracy, Loss
from hotset.train.run_state import RunState

__all__ = ["one_thread"]  # a fixture of each test here

BATCH = (torch.ones(4, 8), torch.zeros(4, dtype=torch.int64))
SINKING = {"dataset_sink_mode": True, "sink_size": 4}


def recorded(epoch: int = 2, *others: Callback, batches: Any = None, **options: Any) -> Recorder:
    seed_everything(1)
    recorder = Recorder()
    if batches is not None:
        model_of().train(epoch, batches, [*others, recorder], **options)
        return recorder
    with loader_of("hotset") as loader:
        model_of().train(epoch, loader, [*others, recorder], **options)
    return recorder


# ---- events ------------------------------------------------------------------------------------------


def test_the_order_of_events_step_by_step() -> None:
    step = ["on_step_end", "on_sink_end"]
    epoch = ["on_epoch_begin", *step * 3, "on_epoch_end"]
    assert recorded(batches=[BATCH] * 3).events == ["on_train_begin", *epoch * 2, "on_train_end"]


def test_the_order_of_events_with_sinking() -> None:
    epoch = ["on_epoch_begin", *["on_step_end"] * 4, "on_sink_end", "on_epoch_end"]
    events = recorded(batches=[BATCH] * 3, **SINKING).events
    assert events == ["on_train_begin", *epoch * 2, "on_train_end"]


def test_every_step_is_told_of_with_its_own_count_and_loss() -> None:
    """As without sinking, though the host hears of four at once."""
    sunk = recorded(3, **SINKING).steps
    plain = recorded(2).steps
    assert [(step.step, step.loss) for step in sunk] == [(step.step, step.loss) for step in plain]
    assert sunk[5] == Step(2, 6, 2, plain[5].loss)


def test_what_a_run_says() -> None:
    class Look(Callback):
        def on_train_begin(self, run: RunState) -> None:
            assert math.isnan(run.loss)

        def on_sink_end(self, run: RunState) -> None:
            assert (run.model, run.network, run.optimizer) == (model, model.network, model.optimizer)
            assert run.loader is batches
            assert (run.epochs, run.steps_in_epoch, run.step_in_epoch) == (2, 4, 4)
            assert run.losses.shape == (4,)
            assert run.loss == run.losses[-1].item()
            seen.append(run.step)

    seen: list[int] = []
    model, batches = model_of(), [BATCH] * 3
    model.train(2, batches, Look(), **SINKING)
    assert seen == [4, 8]


def test_a_single_callback_and_a_tuple_of_them() -> None:
    first, second = Recorder(), Recorder()
    model_of().train(1, [BATCH], (first, second))
    model_of().train(1, [BATCH], first)
    assert first.events == second.events * 2


# ---- stops -------------------------------------------------------------------------------------------


class Stop(Callback):
    def __init__(self, event: str, step: int) -> None:
        self.event, self.step = event, step

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("on_") and name == object.__getattribute__(self, "event"):
            return object.__getattribute__(self, "stop")
        return object.__getattribute__(self, name)

    def on_step_end(self, run: RunState) -> None:
        if self.event == "on_step_end":
            self.stop(run)

    def stop(self, run: RunState) -> None:
        if run.step >= self.step:
            run.request_stop()


@pytest.mark.parametrize(
    ("event", "step", "options", "steps", "epochs_ended"),
    [
        ("on_step_end", 4, {}, 4, 1),
        ("on_step_end", 6, {}, 6, 2),  # the epoch's last step: it has ended
        ("on_sink_end", 1, {}, 1, 0),
        ("on_epoch_end", 4, {}, 6, 2),
        ("on_step_end", 5, SINKING, 8, 2),  # at the sink's end
        ("on_sink_end", 1, SINKING, 4, 1),
        ("on_train_begin", 0, {}, 0, 0),
    ],
)
def test_a_stop_is_honoured_at_the_sinks_end(
    event: str, step: int, options: dict[str, Any], steps: int, epochs_ended: int
) -> None:
    recorder = recorded(9, Stop(event, step), batches=[BATCH] * 3, **options)
    assert len(recorder.steps) == steps
    assert recorder.events.count("on_epoch_end") == epochs_ended
    assert recorder.events[-1] == "on_train_end"


class Given:
    """A metric that gives these values, one for each evaluation."""

    def __init__(self, values: list[Any]) -> None:
        self.values = iter(values)

    def update(self, output: Any, label: Any) -> None: ...

    def reset(self) -> None: ...

    def compute(self) -> Any:
        return next(self.values)


@pytest.mark.parametrize(
    ("values", "options", "epochs"),
    [
        ([3, 2, 1, 2, 2, 2], {}, 6),
        ([3, 2, 2, 2, 2, 1], {}, 5),  # equal is not better
        ([3, 2, 3, 3, 1, 2, 3, 4], {}, 8),  # three in a row
        ([1, 2, 3, 3, 3, 3], {"mode": "max"}, 6),
        ([1, 0.5], {"mode": "max", "patience": 1}, 2),
        ([3, 2.9, 2.8, 2.5, 2], {"min_delta": 0.5, "patience": 2}, 3),
        ([3, math.nan, math.nan, math.nan, 1], {}, 4),
        ([math.nan, 2, 1, 3, 3, 3], {}, 6),
        ([torch.tensor(3.0), torch.tensor(4.0)], {"patience": 1}, 2),
        ([np.float32(3.0), np.float32(2.0), np.array([4.0])], {"patience": 1}, 3),
        ([np.int64(3), np.int64(4)], {"patience": 1}, 2),
    ],
)
def test_early_stopping(values: list[Any], options: dict[str, Any], epochs: int) -> None:
    stopping = EarlyStopping("given", **options)
    for _ in range(2):  # each training begins anew
        model = model_of({"given": Given([*values, *[100.0] * 9])})
        model.fit(len(values), [BATCH], [BATCH], stopping)
        assert model.steps == epochs


def test_early_stopping_without_the_metric() -> None:
    model = model_of({"loss": Loss(), "each": Given([torch.ones(3)] * 9)})
    with pytest.raises(hotset.ArgumentError, match=r"'los' must be a number, got None; .*'loss', 'each'"):
        model.fit(2, [BATCH], [BATCH], EarlyStopping("los"))
    with pytest.raises(hotset.ArgumentError, match="'each' must be a number, got tensor"):
        model.fit(2, [BATCH], [BATCH], EarlyStopping("each"))
    with pytest.raises(hotset.ArgumentError, match=r"none, as fit\(\) has no valid_dataset"):
        model.train(2, [BATCH], EarlyStopping("loss"))


@pytest.mark.parametrize(
    "options",
    [{"mode": "auto"}, {"patience": 0}, {"patience": True}, {"min_delta": -1}, {"min_delta": math.nan}]
    + [{"min_delta": "0"}],
)
def test_arguments_of_early_stopping(options: dict[str, Any]) -> None:
    with pytest.raises(hotset.ArgumentError):
        EarlyStopping("loss", **options)


def test_metrics_are_of_all_ranks(tmp_path: Any) -> None:
    """So that all ranks stop early, or none."""

    def rank(number: int) -> None:
        distributed.init_process_group(
            "gloo", init_method=f"file://{tmp_path}/store", rank=number, world_size=2
        )
        labels = torch.tensor([[0, 1, 1, 1], [0, 0, 0, 1]][number])[: 4 - number]
        accuracy, loss = Accuracy(), Loss()
        accuracy.update(torch.zeros(len(labels), 2), labels)  # class 0
        loss.update(torch.tensor(float(number)), len(labels))
        assert accuracy.compute() == 4 / 7
        assert loss.compute() == 3 / 7
        distributed.destroy_process_group()

    other = child(lambda: rank(1))
    in_child(lambda: rank(0))
    assert ended(other) == 0


# ---- monitors ----------------------------------------------------------------------------------------


def lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return capsys.readouterr().out.splitlines()


def test_the_loss_monitors_lines(capsys: pytest.CaptureFixture[str]) -> None:
    steps = recorded(2, LossMonitor()).steps
    printed = lines(capsys)
    assert printed == [f"epoch: {s.epoch} step: {s.step_in_epoch}, loss is {s.loss}" for s in steps]
    assert re.fullmatch(r"epoch: 2 step: 6, loss is \d\.\d+", printed[-1])


def test_the_loss_monitor_prints_once_a_sink(capsys: pytest.CaptureFixture[str]) -> None:
    steps = recorded(3, LossMonitor(), **SINKING).steps
    expected = [f"epoch: {epoch} step: 4, loss is {steps[4 * epoch - 1].loss}" for epoch in (1, 2, 3)]
    assert lines(capsys) == expected


@pytest.mark.parametrize(
    ("every", "options", "printed"),
    [(5, {}, [5, 10]), (6, SINKING, [8, 16]), (100, {}, [])],
)
def test_per_print_times(
    every: int, options: dict[str, Any], printed: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    steps = {step.step: step for step in recorded(4 if options else 2, LossMonitor(every), **options).steps}
    expected = [f"step: {steps[n].step_in_epoch}, loss is {steps[n].loss}" for n in printed]
    assert [line.split(" ", 2)[2] for line in lines(capsys)] == expected


def test_the_loss_monitor_prints_metrics_after_an_epoch(capsys: pytest.CaptureFixture[str]) -> None:
    model_of({"given": Given([0.5, 0.75])}).fit(2, [BATCH], [BATCH], LossMonitor())
    assert lines(capsys)[1::2] == [
        "Eval result: epoch 1, metrics: {'given': 0.5}",
        "Eval result: epoch 2, metrics: {'given': 0.75}",
    ]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_not_finite_ends_the_training(value: float) -> None:
    class Spoil(Callback):
        def on_sink_end(self, run: RunState) -> None:
            if run.step == 2:
                with torch.no_grad():
                    run.network[4].bias[0] = value

    model = model_of()
    with pytest.raises(LossNotFinite, match=r"the loss is (nan|inf) at epoch 1, step 3: a smaller learning"):
        model.train(1, [BATCH] * 5, [LossMonitor(), Spoil()])
    assert model.steps == 3
    assert issubclass(LossNotFinite, hotset.HotsetError)


@pytest.mark.parametrize("every", [0, -1, True, "1", 1.0])
def test_arguments_of_the_loss_monitor(every: Any) -> None:
    with pytest.raises(hotset.ArgumentError, match="per_print_times"):
        LossMonitor(every)


def test_the_time_monitor_counts_training_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = 100.0

    class Ticks:
        """Two seconds a batch of training, and a minute one of evaluation."""

        def __init__(self, seconds: float) -> None:
            self.seconds = seconds

        def __len__(self) -> int:
            return 4

        def __iter__(self) -> Iterator[Any]:
            nonlocal clock
            for _ in range(4):
                clock += self.seconds
                yield BATCH

    monkeypatch.setattr("hotset.train.callbacks.time.perf_counter", lambda: clock)
    train, valid = (hotset.train.model.DeviceQueue(Ticks(s), depth=0, device="cpu") for s in (2.0, 60.0))
    model_of({"loss": Loss()}).fit(2, train, valid, TimeMonitor())
    model_of().train(1, train, TimeMonitor())
    assert lines(capsys) == ["Train epoch time: 8000.000 ms, per step time: 2000.000 ms"] * 3


# ---- the bar -----------------------------------------------------------------------------------------


def on_a_terminal(**options: Any) -> str:
    """What a training prints on a terminal; a callback fails in the second epoch if there is an ``error``."""
    error = options.pop("error", None)

    class Fail(Callback):
        def on_epoch_begin(self, run: RunState) -> None:
            if error is not None and run.epoch == 2:
                raise error

    pid, terminal = pty.fork()
    if pid == 0:
        try:
            os.environ.update(TERM="xterm", COLUMNS="100", LINES="30")
            torch.set_num_threads(1)
            sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
            try:
                model_of().train(3, [BATCH] * 5, [LossMonitor(5), Fail()], **options)
            except BaseException as raised:
                print("RAISED", type(raised).__name__, flush=True)
            sys.stdout.flush()
        finally:
            os._exit(0)
    out = b""
    try:
        while chunk := os.read(terminal, 65536):
            out += chunk
    except OSError:  # the child has closed the other end
        pass
    finally:
        os.close(terminal)
        os.waitpid(pid, 0)
    return out.decode()


HIDE, SHOW = "\x1b[?25l", "\x1b[?25h"


def test_the_bar_on_a_terminal() -> None:
    out = on_a_terminal()
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", out)
    assert re.search(r"epoch 3/3 \S+ +5/5 .*loss \d", plain)
    assert "steps/s" in plain
    assert "epoch: 3 step: 5, loss is" in plain
    assert out.count(HIDE) == 1
    assert out.index(HIDE) < out.rindex(SHOW)


@pytest.mark.parametrize("error", [KeyError(), KeyboardInterrupt()])
def test_the_bar_is_closed_when_an_exception_passes(error: BaseException) -> None:
    out = on_a_terminal(error=error, dataset_sink_mode=True)
    before, _, after = out.partition(f"RAISED {type(error).__name__}")
    assert "epoch 1/3" in before
    assert SHOW in before
    assert "epoch" not in after


def test_no_bar_if_none_is_wanted_or_nobody_sees_it(capfd: pytest.CaptureFixture[str]) -> None:
    out = on_a_terminal(progress=False)
    assert "\x1b" not in out
    assert [line.split(",")[0] for line in out.splitlines()] == [f"epoch: {n} step: 5" for n in (1, 2, 3)]
    model_of().train(2, [BATCH] * 3)
    assert capfd.readouterr() == ("", "")


def test_steps_are_counted_without_a_callback_that_hears_of_each() -> None:
    model = model_of()
    model.train(2, [BATCH] * 3, LossMonitor(100), **SINKING)
    assert model.steps == 8
