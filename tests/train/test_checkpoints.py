"""Going on from a checkpoint: a run that is resumed equals one that was never interrupted, bit for bit.

Interrupted by a stop, an exception, or a kill while it saves; the files themselves are in
``test_model_checkpoint_files.py``.
"""

from __future__ import annotations

import errno
import os
import random
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import all_pairs, rarely, seed_everything
from kills import child, kill
from sources import Samples
from torch import nn
from torch.utils.data import IterableDataset
from training import (
    BATCHES,
    WAYS,
    N,
    Outcome,
    Recorder,
    check_resumed,
    loader_of,
    model_of,
    one_thread,
    outcome,
    resumed,
    row,
    trained,
)

import hotset
from hotset.train.callbacks import Callback, EarlyStopping, ModelCheckpoint
from hotset.train.metrics import Loss
from hotset.train.model import Model
from hotset.train.run_state import RunState

__all__ = ["one_thread"]  # a fixture of each test here

BATCH = (torch.ones(4, 8), torch.zeros(4, dtype=torch.int64))


def step_of(path: Path) -> int:
    return int(path.stem.split("-")[1])


# ---- bit for bit -------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["hotset", "torch"])
def test_a_resumed_run_equals_an_uninterrupted_one(kind: str, way: str, tmp_path: Path) -> None:
    """From checkpoints in the midst of a pass, at its end, at the end of all."""
    options = WAYS[way]
    whole = trained(kind, 2, **options)
    saving = ModelCheckpoint(tmp_path, save_steps=1, keep=None)
    assert trained(kind, 2, saving, **options) == whole, "saving changed the run"
    steps = {step_of(path): path for path in tmp_path.iterdir()}
    assert len(steps) == (2 * BATCHES if not options else 2)
    chosen = (1, BATCHES - 1, BATCHES, BATCHES + 1, 2 * BATCHES) if not options else steps
    for step in chosen:
        check_resumed(resumed(steps[step], kind, 2, **options), whole, step)


class Rows(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return map(row, range(N))


@pytest.mark.parametrize("cached", [False, True])
def test_a_resumed_run_over_a_stream_without_a_length(cached: bool, tmp_path: Path) -> None:
    stream: Any = Rows()
    if cached:
        stream = hotset.cache(stream, memory="4MiB")
        stream.fill()

    def run(*others: Callback, **options: Any) -> Outcome:
        seed_everything(99 if options else 1)
        recorder, model = Recorder(), model_of()
        model.train(2, hotset.DataLoader(stream, batch_size=4), [recorder, *others], **options)
        return outcome(model, recorder)

    whole = run(ModelCheckpoint(tmp_path, save_steps=1, keep=None))
    for step in (1, BATCHES, BATCHES + 1):
        check_resumed(run(resume=tmp_path / f"model-{step}.pt"), whole, step)


@pytest.mark.parametrize("sized", [True, False])
@pytest.mark.parametrize("way", ["the same call again", "a checkpoint"])
def test_interrupted_in_an_evaluation_an_epoch_is_not_trained_twice(
    sized: bool, way: str, tmp_path: Path
) -> None:
    class Interrupt(Callback):
        done = False

        def on_eval_begin(self, run: RunState) -> None:
            if not self.done:
                self.done = True
                run.save_checkpoint(tmp_path / "here.pt")
                raise KeyboardInterrupt

    def run(*others: Callback) -> Outcome:
        seed_everything(1)
        recorder, model = Recorder(), model_of({"loss": Loss()})
        loader: Any = hotset.DataLoader(Samples(row, N) if sized else Rows(), batch_size=4)
        resume = None
        if others:
            with pytest.raises(KeyboardInterrupt):
                model.fit(2, loader, [BATCH], [recorder, *others])
            if way == "a checkpoint":
                model, resume = model_of({"loss": Loss()}), tmp_path / "here.pt"
        model.fit(2, loader, [BATCH], [recorder, *others], resume=resume)
        assert recorder.events.count("on_epoch_end") == 2
        return outcome(model, recorder)

    assert run(Interrupt()) == run()


@pytest.mark.parametrize(
    ("step", "options", "way"),
    all_pairs([3, 4, BATCHES, 8], WAYS.values(), ["the same call again", "a checkpoint"]),
)
def test_what_evaluations_and_callbacks_draw_counts_once(
    way: str, options: dict[str, Any], step: int, tmp_path: Path
) -> None:
    """A run that stops as the last step of an epoch is over evaluates only after it goes on."""

    class Draws(Callback):
        def on_epoch_begin(self, run: RunState) -> None:
            torch.rand(()), random.random()

        def on_epoch_end(self, run: RunState) -> None:
            torch.rand(())

    class Interrupt(Callback):
        last = done = False

        def on_sink_end(self, run: RunState) -> None:
            if run.step >= step and not self.done:
                self.done = True
                run.save_checkpoint(tmp_path / "here.pt")
                raise KeyError

    def run(*others: Callback) -> Outcome:
        seed_everything(1)
        recorder, model = Recorder(), model_of({"loss": Loss()})
        valid: Any = hotset.DataLoader(Samples(row, 8), batch_size=4)  # draws as a pass begins
        with loader_of("hotset") as loader:
            resume = None
            if others:
                with pytest.raises(KeyError):
                    model.fit(3, loader, valid, [recorder, Draws(), *others], **options)
                if way == "a checkpoint":
                    model, resume = model_of({"loss": Loss()}), tmp_path / "here.pt"
            model.fit(3, loader, valid, [recorder, Draws(), *others], resume=resume, **options)
        return outcome(model, recorder)

    assert run(Interrupt()) == run()


@pytest.mark.parametrize("kind", ["hotset", "torch"])
def test_workers(kind: str, tmp_path: Path) -> None:
    whole = trained(kind, 2, ModelCheckpoint(tmp_path, save_steps=4), workers=2)
    check_resumed(resumed(tmp_path / "model-4.pt", kind, 2, workers=2), whole, 4)


def test_resumed_with_other_sinks_the_steps_are_the_same(tmp_path: Path) -> None:
    whole = trained("hotset", 3, ModelCheckpoint(tmp_path, save_steps=4))
    losses = resumed(tmp_path / "model-4.pt", "hotset", dataset_sink_mode=True, sink_size=BATCHES).losses
    assert losses == whole.losses[4:]


class Schedule(Callback):
    """A learning rate's scheduler, as users write it."""

    def __init__(self, model: Model) -> None:
        self.scheduler = torch.optim.lr_scheduler.StepLR(model.optimizer, 1, gamma=0.5)
        self.state_dict = self.scheduler.state_dict
        self.load_state_dict = self.scheduler.load_state_dict

    def on_epoch_end(self, run: RunState) -> None:
        self.scheduler.step()


def test_schedules_and_early_stops_go_on(tmp_path: Path) -> None:
    """The callbacks' states are saved after this step's callbacks, whatever their order in the list."""

    def run(folder: Path, resume: Path | None = None) -> tuple[Outcome, int, float]:
        seed_everything(1 if resume is None else 99)
        recorder, model = Recorder(), model_of({"loss": Loss()})
        stopping = EarlyStopping("loss", patience=3, min_delta=100.0)  # stops after the fourth epoch
        saving = ModelCheckpoint(folder, keep=None)
        with loader_of("hotset") as loader:
            model.fit(9, loader, [BATCH], [saving, recorder, Schedule(model), stopping], resume=resume)
        return outcome(model, recorder), model.steps, model.optimizer.param_groups[0]["lr"]

    whole, steps, rate = run(tmp_path / "a")
    assert (steps, rate) == (4 * BATCHES, 0.05 / 16)
    for epoch in (1, 2, 3):
        got = run(tmp_path / f"from-{epoch}", tmp_path / "a" / f"model-{epoch * BATCHES}.pt")
        assert got == (whole._replace(losses=whole.losses[epoch * BATCHES :]), steps, rate)


def test_a_callbacks_state_without_the_callback_is_said(tmp_path: Path) -> None:
    loader = hotset.DataLoader([(BATCH[0][0], 0)] * 8, batch_size=2)
    model = model_of()
    model.train(1, loader, [Schedule(model), ModelCheckpoint(tmp_path)])
    with pytest.warns(
        hotset.HotsetWarning, match="the state of a Schedule, which is not among the callbacks"
    ):
        model.train(2, loader, resume=tmp_path / "model-4.pt")


class Halt(Callback):
    """Fails, or asks for a stop, once, after so many steps."""

    def __init__(self, step: int, error: type[BaseException] | None) -> None:
        self.step, self.error = step, error

    def on_sink_end(self, run: RunState) -> None:
        if run.step >= self.step:
            self.step = 1 << 60
            if self.error is None:
                run.request_stop()
            else:
                raise self.error("here")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["hotset", "torch"])
@pytest.mark.parametrize("step", rarely([5, BATCHES, 12], 12))
def test_a_run_that_an_exception_ended_is_taken_up_by_the_same_call(kind: str, way: str, step: int) -> None:
    whole = trained(kind, 3, **WAYS[way])
    seed_everything(1)
    recorder, model = Recorder(), model_of()
    callbacks = [recorder, Halt(step, KeyError)]
    with loader_of(kind) as loader:
        with pytest.raises(KeyError, match="here"):
            model.train(3, loader, callbacks, progress=True, **WAYS[way])
        assert model.steps == len(recorder.steps) >= step
        model.train(3, loader, callbacks, **WAYS[way])
        assert outcome(model, recorder) == whole
        model.train(1, loader, recorder)  # the run came to its end: this one is new
    assert model.steps == whole.steps + BATCHES


def test_interrupted_again_before_the_first_step_the_place_is_kept() -> None:
    class Refuse(Callback):
        def on_train_begin(self, run: RunState) -> None:
            raise KeyboardInterrupt

    whole = trained("hotset")
    seed_everything(1)
    recorder, model = Recorder(), model_of()
    with loader_of("hotset") as loader:
        for error, callback in ((KeyError, Halt(8, KeyError)), (KeyboardInterrupt, Refuse())):
            with pytest.raises(error):
                model.train(3, loader, [recorder, callback])
            assert model.steps == 8
        model.train(3, loader, recorder)
    assert outcome(model, recorder) == whole


def test_with_other_data_a_run_is_new() -> None:
    model, recorder = model_of(), Recorder()
    with pytest.raises(KeyError):
        model.train(3, [BATCH] * 3, Halt(5, KeyError))
    model.train(1, [BATCH] * 3, recorder)  # equal, and yet another one
    assert [(step.epoch, step.step, step.step_in_epoch) for step in recorder.steps] == [
        (1, 6, 1),
        (1, 7, 2),
        (1, 8, 3),
    ]


def test_of_a_list_an_interrupted_epoch_begins_again() -> None:
    """It cannot say where it stands."""
    seen: list[float] = []
    model = model_of()
    model.network.register_forward_pre_hook(lambda _, inputs: seen.append(float(inputs[0][0, 0])))
    batches = [(torch.full((2, 8), float(i)), torch.zeros(2, dtype=torch.int64)) for i in range(3)]
    with pytest.raises(KeyError):
        model.train(3, batches, callback := Halt(5, KeyError))
    model.train(3, batches, callback)
    assert seen == [0, 1, 2, 0, 1, 0, 1, 2, 0, 1, 2]


def test_of_a_list_an_epoch_that_lacks_its_evaluation_alone_is_not_trained_again() -> None:
    class Interrupt(Callback):
        done = False

        def on_eval_begin(self, run: RunState) -> None:
            self.done, first = True, not self.done
            if first:
                raise KeyboardInterrupt

    model, interrupt, batches = model_of({"loss": Loss()}), Interrupt(), [BATCH] * 3
    with pytest.raises(KeyboardInterrupt):
        model.fit(2, batches, [BATCH], interrupt)
    assert model.steps == 3
    model.fit(2, batches, [BATCH], interrupt)
    assert model.steps == 6


def test_a_run_that_was_stopped_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    whole = trained("hotset")
    stopped = trained("hotset", 3, Halt(8, None), saving := ModelCheckpoint(tmp_path, save_steps=100))
    assert stopped.losses == whole.losses[:8]
    assert saving.latest == tmp_path / "model-8.pt"
    check_resumed(resumed(saving.latest, "hotset"), whole, 8)


def test_load_checkpoint_alone_gives_the_network_and_then_the_rest(tmp_path: Path) -> None:
    whole = trained("hotset", 3, ModelCheckpoint(tmp_path, save_steps=4))
    seed_everything(99)
    recorder, model = Recorder(), model_of()
    model.load_checkpoint(tmp_path / "model-16.pt")
    saved = torch.load(tmp_path / "model-16.pt", weights_only=True)["network"]
    assert all(torch.equal(value, saved[name]) for name, value in model.network.state_dict().items())
    assert model.steps == 16
    model.predict(BATCH[0])
    with loader_of("hotset") as loader:
        model.train(3, loader, recorder)
    check_resumed(outcome(model, recorder), whole, 16)


def test_a_checkpoint_of_a_gpu_goes_on_on_the_cpu(tmp_path: Path) -> None:
    """There optimizers were made capturable, which on the CPU they cannot be."""

    def adam() -> Model:
        network = nn.Linear(8, 3)
        return Model(network, nn.CrossEntropyLoss(), torch.optim.Adam(network.parameters()), device="cpu")

    path = tmp_path / "model-1.pt"
    loader = hotset.DataLoader([(BATCH[0][0], 0)] * 4, batch_size=4)
    adam().train(1, loader, ModelCheckpoint(tmp_path))
    content = torch.load(path, weights_only=True)
    content["optimizer"]["param_groups"][0]["capturable"] = True
    torch.save(content, path)
    (model := adam()).train(2, loader, resume=path)
    assert model.steps == 2


# ---- killed ------------------------------------------------------------------------------------------


def test_a_file_system_that_cannot_flush_a_folder_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flush, said = os.fsync, errno.EINVAL

    def of_files_alone(fd: int) -> None:
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            raise OSError(said, os.strerror(said))
        flush(fd)

    monkeypatch.setattr(os, "fsync", of_files_alone)
    saving = ModelCheckpoint(tmp_path)
    with loader_of("torch") as loader:
        model_of().train(1, loader, saving)
        assert saving.latest is not None
        model_of().load_checkpoint(saving.latest)
        said = errno.EIO
        with pytest.raises(OSError, match="Input/output"):
            model_of().train(1, loader, ModelCheckpoint(tmp_path, prefix="other"))


def train_for_ever(folder: Path) -> int:
    """Start a process that trains on from the latest checkpoint, if there is one, and saves each step."""

    def train() -> None:
        saving = ModelCheckpoint(folder, save_steps=1, keep=3)
        seed_everything(1)
        model = model_of()
        with loader_of("torch") as loader:
            model.train(100_000, loader, saving, resume=saving.latest)

    return child(train)


def test_killed_at_any_moment_the_latest_checkpoint_is_whole(tmp_path: Path) -> None:
    """Processes that save after each step are killed, and the last one goes on as if none had been."""
    saving = ModelCheckpoint(tmp_path, save_steps=1, keep=3)
    least = 0
    for more in (20, 7, 13):
        pid = train_for_ever(tmp_path)
        try:
            deadline = time.monotonic() + 60
            while saving.latest is None or step_of(saving.latest) < least + more:
                assert os.waitpid(pid, os.WNOHANG) == (0, 0), "the training ended"
                assert time.monotonic() < deadline, "no checkpoint came"
                time.sleep(0.002)
        finally:
            kill(pid)
        assert saving.latest is not None
        least = step_of(saving.latest)
        assert 1 <= len([path for path in tmp_path.iterdir() if path.suffix == ".pt"]) <= 4
    epochs = -(-least // BATCHES) + 1
    check_resumed(resumed(saving.latest, "torch", epochs), trained("torch", epochs), least)
