"""Going on from a checkpoint: a run that is resumed equals one that was never interrupted, bit for bit.

And checkpoints as files: whole or not there, whatever dies while they are written; the oldest go; what is
damaged or somebody else's is refused with a sentence.
"""

from __future__ import annotations

import os
import resource
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import in_fork, rng_states, seed_everything
from torch import nn
from training import BATCHES, Outcome, Recorder, loader_of, model_of, one_thread, outcome, trained

import hotset
from hotset.train import checkpoint
from hotset.train.callbacks import Callback, EarlyStopping
from hotset.train.metrics import Loss
from hotset.train.model import Model
from hotset.train.run import Run
from hotset.train.saving import ModelCheckpoint

__all__ = ["one_thread"]  # a fixture of each test here

BATCH = (torch.ones(4, 8), torch.zeros(4, dtype=torch.int64))
WAYS: dict[str, dict[str, Any]] = {
    "step by step": {},
    "sinks that end within a pass": {"dataset_sink_mode": True, "sink_size": 4},
    "sinks of a pass": {"dataset_sink_mode": True},
}


def resumed(path: Path, kind: str, epoch: int = 3, workers: int = 0, **options: Any) -> Outcome:
    """The outcome of a run that goes on from a checkpoint, in a process that has drawn other numbers."""
    seed_everything(99)
    recorder, model = Recorder(), model_of()
    with loader_of(kind, workers) as loader:
        model.train(epoch, loader, recorder, resume=path, **options)
    return outcome(model, recorder)


def check_resumed(got: Outcome, whole: Outcome, step: int) -> None:
    assert got == whole._replace(losses=whole.losses[step:]), f"resumed at step {step}"


def step_of(path: Path) -> int:
    return int(path.stem.split("-")[1])


# ---- bit for bit -------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["hotset", "torch"])
def test_a_resumed_run_equals_an_uninterrupted_one(kind: str, way: str, tmp_path: Path) -> None:
    """From each checkpoint: in the midst of a pass, at its end, at the end of all."""
    options = WAYS[way]
    whole = trained(kind, 2, **options)
    saving = ModelCheckpoint(tmp_path, save_steps=1, keep=None)
    assert trained(kind, 2, saving, **options) == whole, "saving changed the run"
    steps = {step_of(path): path for path in tmp_path.iterdir()}
    assert len(steps) == (2 * BATCHES if not options else 2)
    for step, path in steps.items():
        check_resumed(resumed(path, kind, 2, **options), whole, step)


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

    def on_epoch_end(self, run: Run) -> None:
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

    def on_sink_end(self, run: Run) -> None:
        if run.step >= self.step:
            self.step = 1 << 60
            if self.error is None:
                run.request_stop()
            else:
                raise self.error("here")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["hotset", "torch"])
@pytest.mark.parametrize("step", [5, BATCHES, 12])
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
        def on_train_begin(self, run: Run) -> None:
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


def train_for_ever(folder: Path) -> int:
    """Start a process that trains on from the latest checkpoint, if there is one, and saves each step."""
    pid = os.fork()
    if pid:
        return pid
    try:
        saving = ModelCheckpoint(folder, save_steps=1, keep=3)
        seed_everything(1)
        model = model_of()
        with loader_of("torch") as loader:
            model.train(100_000, loader, saving, resume=saving.latest)
    finally:
        os._exit(1)


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
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        assert saving.latest is not None
        least = step_of(saving.latest)
        assert 1 <= len([path for path in tmp_path.iterdir() if path.suffix == ".pt"]) <= 4
    epochs = -(-least // BATCHES) + 1
    check_resumed(resumed(saving.latest, "torch", epochs), trained("torch", epochs), least)


def test_what_a_killed_process_left_unfinished_is_removed(tmp_path: Path) -> None:
    mine, others = tmp_path / ".model-7.pt.unfinished", tmp_path / ".model-big-7.pt.unfinished"
    mine.write_bytes(b"half"), others.write_bytes(b"half")
    saving = ModelCheckpoint(tmp_path)
    assert saving.latest is None
    trained("torch", 1, saving)
    assert sorted(path.name for path in tmp_path.iterdir()) == [others.name, f"model-{BATCHES}.pt"]


def test_a_full_disk_raises_and_leaves_what_was_there(tmp_path: Path) -> None:
    trained("torch", 1, ModelCheckpoint(tmp_path))
    (first,) = tmp_path.iterdir()
    before = first.read_bytes()

    def body() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) // 2, len(before) // 2))
        with pytest.raises((OSError, RuntimeError)):
            checkpoint.write(first, {"large": torch.zeros(len(before))})

    in_fork(body)
    assert [path.name for path in tmp_path.iterdir()] == [first.name]
    assert first.read_bytes() == before


# ---- files -------------------------------------------------------------------------------------------


def test_what_a_checkpoint_holds_and_that_saving_draws_nothing(tmp_path: Path) -> None:
    class Look(Callback):
        def on_sink_end(self, run: Run) -> None:
            before = rng_states()
            run.save_checkpoint(tmp_path / "here.pt")
            assert rng_states() == before

    trained("torch", 1, Look(), dataset_sink_mode=True, sink_size=2)
    content = torch.load(tmp_path / "here.pt", weights_only=True)
    parts = {"format", "network", "optimizer", "run", "data", "callbacks", "random"}
    assert set(content) == parts
    assert content["run"] == {"epochs": 0, "step_in_epoch": 2, "step": 2}
    assert set(content["random"]) == {
        "random's global state",
        "numpy.random's global state",
        "torch's global state",
    }


def test_a_checkpoint_made_in_a_step_is_of_the_sinks_end(tmp_path: Path) -> None:
    class Look(Callback):
        def on_step_end(self, run: Run) -> None:
            run.save_checkpoint(tmp_path / f"{run.step}.pt")

    whole = trained("torch", 3, Look(), **WAYS["sinks that end within a pass"])
    check_resumed(resumed(tmp_path / "5.pt", "torch", **WAYS["sinks that end within a pass"]), whole, 8)


def names(folder: Path) -> list[str]:
    return sorted((path.name for path in folder.iterdir()), key=lambda name: (len(name), name))


@pytest.mark.parametrize(
    ("options", "way", "expected"),
    [
        ({}, "step by step", [6, 12, 18]),
        ({"keep": 2}, "step by step", [12, 18]),
        ({"save_steps": 4, "keep": None}, "step by step", [4, 8, 12, 16, 18]),
        ({"save_steps": 4, "keep": 1}, "step by step", [18]),
        ({"save_steps": 5, "keep": None}, "sinks that end within a pass", [8, 12]),
        ({"save_steps": 100}, "sinks of a pass", [18]),
    ],
)
def test_which_are_saved_and_kept(
    options: dict[str, Any], way: str, expected: list[int], tmp_path: Path
) -> None:
    (tmp_path / "other-3.pt").write_text("somebody else's")
    (tmp_path / "model-3.pt.bak").write_text("somebody else's")
    saving = ModelCheckpoint(tmp_path, **options)
    trained("torch", 3, saving, **WAYS[way])
    expected_names = [f"model-{step}.pt" for step in expected]
    assert [
        name for name in names(tmp_path) if name.startswith("model") and name.endswith("pt")
    ] == expected_names
    assert len(names(tmp_path)) == len(expected) + 2
    assert saving.latest == tmp_path / expected_names[-1]


def test_a_new_run_in_an_old_folder_is_told_and_removes_nothing_of_it(tmp_path: Path) -> None:
    trained("torch", 3, ModelCheckpoint(tmp_path, keep=1))
    with pytest.warns(hotset.HotsetWarning, match="holds a checkpoint of step 18, and this run begins at 0"):
        trained("torch", 2, saving := ModelCheckpoint(tmp_path, keep=1))
    assert names(tmp_path) == ["model-12.pt", "model-18.pt"]
    assert saving.latest == tmp_path / "model-18.pt"


def test_ranks_write_files_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained("torch", 1, ModelCheckpoint(tmp_path))
    monkeypatch.setattr("hotset.train.saving.rank_of_job", lambda: (1, 2))
    saving = ModelCheckpoint(tmp_path)
    assert saving.latest is None, "another rank's or job's"
    trained("torch", 1, saving)
    assert saving.latest == tmp_path / "model-6-rank1.pt"


# ---- refused -----------------------------------------------------------------------------------------


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def _flipped(path: Path) -> None:
    """One bit of the first record's name in the archive's directory."""
    data = bytearray(path.read_bytes())
    data[-60] ^= 0xFF
    path.write_bytes(data)


def _changed(**parts: Any) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        torch.save({**torch.load(path, weights_only=True), **parts}, path)

    return change


class Harm:
    """Runs code when it is unpickled."""

    def __reduce__(self) -> Any:
        return os.mkdir, ("harm-was-done",)


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "empty": (lambda path: path.write_bytes(b""), "cannot be read as a checkpoint"),
    "text": (lambda path: path.write_text("weights"), "cannot be read as a checkpoint"),
    "cut": (_cut, "cannot be read as a checkpoint"),
    "flipped": (_flipped, "cannot be read as a checkpoint"),
    "code in it": (lambda path: torch.save({"network": Harm()}, path), "cannot be read as a checkpoint"),
    "weights alone": (
        lambda path: torch.save(model_of().network.state_dict(), path),
        "no checkpoint of hotset",
    ),
    "a list": (lambda path: torch.save([1, 2], path), "no checkpoint of hotset"),
    "a later format": (_changed(format=2), "has format 2, and this hotset reads format 1"),
    "no step": (_changed(run={"epochs": 1}), "does not say at which step"),
    "a step below zero": (_changed(run={"epochs": 1, "step_in_epoch": 0, "step": -1}), "at which step"),
    "another network": (_changed(network=nn.Linear(2, 2).state_dict()), "does not fit this network"),
    "another optimizer": (_changed(optimizer={"state": {}, "param_groups": []}), "does not fit this network"),
    "damaged randomness": (_changed(random={"torch's global state": b"ab"}), "the state is damaged"),
    "damaged position": (_changed(data={"steps": 1}), "no state of a sink, or it is damaged"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_and_foreign_files_are_refused(
    damage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    trained("torch", 1, ModelCheckpoint(tmp_path))
    path = tmp_path / "model-6.pt"
    spoil, sentence = DAMAGES[damage]
    spoil(path)
    with pytest.raises(hotset.StateError, match=sentence):
        resumed(path, "torch")
    assert not (tmp_path / "harm-was-done").exists()


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        model_of().load_checkpoint(tmp_path / "none.pt")


def test_a_checkpoint_of_other_data_is_refused(tmp_path: Path) -> None:
    trained("torch", 1, ModelCheckpoint(tmp_path))
    with pytest.raises(hotset.StateError, match="a data set of 22 samples, and this one has 4"):
        (model := model_of()).train(
            2, hotset.DataLoader([(BATCH[0][0], 0)] * 4), resume=tmp_path / "model-6.pt"
        )
    model.train(1, [BATCH])  # the bad state is not tried again
    assert model.steps == 7


def test_a_loader_that_cannot_say_where_it_stands_is_refused_before_the_first_step(tmp_path: Path) -> None:
    model = model_of()
    with pytest.raises(hotset.StateError, match=r"cannot say where it stands; hotset.DataLoader can"):
        model.train(1, [BATCH], ModelCheckpoint(tmp_path))
    assert model.steps == 0


@pytest.mark.parametrize(
    "options",
    [{"save_steps": 0}, {"save_steps": True}, {"save_steps": "1"}, {"keep": 0}, {"keep": 1.5}]
    + [{"prefix": prefix} for prefix in ("", "a/b", "../a", ".hidden", "a b", None)],
)
def test_arguments(options: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(hotset.ArgumentError):
        ModelCheckpoint(tmp_path, **options)


def test_no_checkpoint_of_an_evaluation(tmp_path: Path) -> None:
    class Look(Callback):
        def on_eval_end(self, run: Run) -> None:
            run.save_checkpoint(tmp_path / "here.pt")

    with pytest.raises(hotset.ArgumentError, match="no training under way"):
        model_of({"loss": Loss()}).eval([BATCH], Look())
    assert not list(tmp_path.iterdir())
