"""Checkpoints as files: whole or not there; the oldest go; what is damaged or foreign is refused.

What comes of going on from one is in ``test_checkpoints.py``.
"""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import rng_states
from kills import in_child
from torch import nn
from training import BATCHES, WAYS, check_resumed, model_of, one_thread, resumed, trained

import hotset
from hotset.train import checkpoint
from hotset.train.callbacks import Callback, ModelCheckpoint
from hotset.train.metrics import Loss
from hotset.train.run_state import RunState

__all__ = ["one_thread"]  # a fixture of each test here

BATCH = (torch.ones(4, 8), torch.zeros(4, dtype=torch.int64))


def test_what_a_killed_process_left_unfinished_is_removed(tmp_path: Path) -> None:
    mine, others = tmp_path / ".model-7.pt.unfinished", tmp_path / ".model-big-7.pt.unfinished"
    mine.write_bytes(b"half"), others.write_bytes(b"half")
    saving = ModelCheckpoint(tmp_path)
    assert saving.latest is None
    trained("torch", 1, saving)
    assert sorted(path.name for path in tmp_path.iterdir()) == [others.name, f"model-{BATCHES}.pt"]


def test_a_file_is_on_the_disk_before_its_name_and_the_name_before_writing_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed: list[list[str]] = []

    def fsync(fd: int) -> None:
        flushed.append([os.path.basename(os.readlink(f"/proc/self/fd/{fd}")), *os.listdir(tmp_path)])

    monkeypatch.setattr(os, "fsync", fsync)
    checkpoint.write(tmp_path / "a.pt", {})
    unfinished = ".a.pt.unfinished"
    assert flushed == [[unfinished, unfinished], [tmp_path.name, "a.pt"]]


def test_a_full_disk_raises_and_leaves_what_was_there(tmp_path: Path) -> None:
    trained("torch", 1, ModelCheckpoint(tmp_path))
    (first,) = tmp_path.iterdir()
    before = first.read_bytes()

    def body() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) // 2, len(before) // 2))
        with pytest.raises((OSError, RuntimeError)):
            checkpoint.write(first, {"large": torch.zeros(len(before))})

    in_child(body)
    assert [path.name for path in tmp_path.iterdir()] == [first.name]
    assert first.read_bytes() == before


# ---- files -------------------------------------------------------------------------------------------


def test_what_a_checkpoint_holds_and_that_saving_draws_nothing(tmp_path: Path) -> None:
    class Look(Callback):
        def on_sink_end(self, run: RunState) -> None:
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
        def on_step_end(self, run: RunState) -> None:
            run.save_checkpoint(tmp_path / f"{run.step}.pt")

    whole = trained("torch", 3, Look(), **WAYS["sinks that end within a pass"])
    check_resumed(resumed(tmp_path / "5.pt", "torch", **WAYS["sinks that end within a pass"]), whole, 8)


class Keeps(Callback):
    """Its state is what it was given."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


def test_numbers_of_numpy_are_read_again(tmp_path: Path) -> None:
    """A learning rate that a program has computed is often one, and so is a metric."""
    loader = hotset.DataLoader([(BATCH[0][0], 0)] * 8, batch_size=2)
    model = model_of()
    model.optimizer.param_groups[0]["lr"] = np.float64(0.25)
    kept = Keeps({"best": [np.float32(0.5)], "pair": (np.int64(1), np.bool_(True))})
    saving = ModelCheckpoint(tmp_path)
    model.train(1, loader, [kept, saving])
    other, found = model_of(), Keeps(None)
    other.train(1, loader, [found], resume=saving.latest)
    assert other.optimizer.param_groups[0]["lr"] == 0.25
    assert found.state == {"best": [0.5], "pair": (1, True)}
    assert model.optimizer.param_groups[0]["lr"].__class__ is np.float64, "the user's own was changed"


def test_what_would_not_be_read_again_is_not_written(tmp_path: Path) -> None:
    loader = hotset.DataLoader([(BATCH[0][0], 0)] * 8, batch_size=2)
    saving = ModelCheckpoint(tmp_path)
    with pytest.raises(hotset.StateError, match=r"must hold tensors and plain values.*numpy"):
        model_of().train(1, loader, [Keeps(np.zeros(3)), saving])
    assert names(tmp_path) == []


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
    monkeypatch.setattr("hotset.train.callbacks.rank_of_job", lambda: (1, 2))
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
        "must be a checkpoint of hotset",
    ),
    "a list": (lambda path: torch.save([1, 2], path), "must be a checkpoint of hotset"),
    "a later format": (_changed(format=2), "has format 2, and this hotset reads format 1"),
    "no step": (_changed(run={"epochs": 1}), "does not say at which step"),
    "a step below zero": (_changed(run={"epochs": 1, "step_in_epoch": 0, "step": -1}), "at which step"),
    "another network": (_changed(network=nn.Linear(2, 2).state_dict()), "does not fit this network"),
    "another optimizer": (_changed(optimizer={"state": {}, "param_groups": []}), "does not fit this network"),
    "damaged randomness": (_changed(random={"torch's global state": b"ab"}), "the state is damaged"),
    "damaged position": (_changed(data={"steps": 1}), "state must be what Sink"),
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
    with pytest.raises(hotset.StateError, match="a dataset of 22 samples, and this one has 4"):
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
        def on_eval_end(self, run: RunState) -> None:
            run.save_checkpoint(tmp_path / "here.pt")

    with pytest.raises(hotset.ArgumentError, match="during training only"):
        model_of({"loss": Loss()}).eval([BATCH], Look())
    assert not list(tmp_path.iterdir())
