"""``hotset explain``: the plan of a dataset from the shell."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import failure, is_a_sentence
from typer.testing import CliRunner

import hotset
from hotset.cli.explain import load
from hotset.cli.main import app
from hotset.errors import ArgumentError, HotsetError

MODULE = """
import random

import torch

import hotset

log = []


class Data:
    def __init__(self, transform):
        self.transform = transform

    def __len__(self):
        return 100

    def __getitem__(self, index):
        return self.transform(torch.full((8, 8), float(range(100)[index]))), index


def halve(picture):
    return picture / 2


def jitter(picture):
    return picture + random.random()


class Both:
    def __call__(self, picture):
        return jitter(halve(picture))


class Derived(torch.utils.data.Dataset):
    __init__, __len__, __getitem__ = Data.__init__, Data.__len__, Data.__getitem__


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(torch.arange(100.0).split(10))


def already_cached():
    return hotset.cache(plain, memory="1MiB")


plain = Data(halve)
derived, stream = Derived(halve), Stream()
nothing = 3


def train(transform=jitter):
    return Data(transform)


class Holder:
    inner = plain


class Scaled:
    def __init__(self, factor):
        self.factor = factor


compose = torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Sequential(torch.nn.Dropout(), torch.nn.Tanh()))
chain = [torch.nn.ReLU(), halve, torch.nn.Dropout()]


def make_chain():
    return chain


def of_a_file():
    return Data(float(open("no_such_file").read()))
"""


@pytest.fixture(autouse=True)
def _module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    (tmp_path / "explained_here.py").write_text(MODULE)
    (tmp_path / "needs_more.py").write_text("import no_such_module_anywhere\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    sys.modules.pop("explained_here", None)


def explain(*arguments: str) -> str:
    found = CliRunner().invoke(app, ["explain", *arguments], catch_exceptions=False)
    assert found.exit_code == 0, found.output
    return found.output


def test_it_prints_the_plan() -> None:
    text = explain("explained_here:plain", "--batch-size", "32", "--steps", "100")
    assert "cached  halve" in text
    assert "probed" in text
    assert "4 an epoch, in batches of 32" in text
    assert "100 steps are 25 epochs" in text


@pytest.mark.parametrize("place", ["derived", "stream"])
def test_a_dataset_of_torchs_class_is_no_transform(place: str) -> None:
    text = explain(f"explained_here:{place}")
    assert "source: " in text
    assert "steps" in text


def test_a_stream_has_no_steps_before_it_was_read() -> None:
    text = explain("explained_here:stream", "--steps", "100")
    assert "known once the stream was read" in text
    assert "epochs" not in text


def test_a_function_that_makes_the_data_set_is_called() -> None:
    text = explain("explained_here.py:train")
    assert "live    jitter" in text
    assert "random's global state moved" in text


@pytest.mark.parametrize(
    ("place", "kinds"),
    [
        ("compose", ["cached  ReLU", "live    Dropout", "live    Tanh"]),
        ("chain", ["cached  ReLU", "cached  halve", "live    Dropout", "tried on samples"]),
        ("make_chain", ["cached  ReLU", "cached  halve", "live    Dropout"]),
        ("halve", ["cached  halve", "unknown"]),
    ],
)
def test_transforms_without_a_data_set_are_explained(place: str, kinds: list[str]) -> None:
    text = explain(f"explained_here:{place}")
    for kind in kinds:
        assert kind in text
    assert "name a dataset with these transforms" in text


def test_unknown_transforms_stay_live_where_that_is_asked_for() -> None:
    assert "live    halve" in explain("explained_here:chain", "--strict")


def test_no_time_is_zero() -> None:
    text = explain("explained_here:plain")
    assert "under 1 ms of reading and transforming" in text
    assert " 0 s" not in text


def test_a_slow_first_call_does_not_make_the_estimate() -> None:
    seen: list[int] = []

    def halve(picture: Any) -> Any:
        assert torch.get_num_threads() == 1  # or the others' spinning is what is measured
        if not seen:
            seen.append(1)
            time.sleep(0.2)
        return picture / 2

    threads = torch.get_num_threads()
    with hotset.cache(
        load("explained_here:Holder.inner").__class__(hotset.deterministic(halve)), memory="1MiB"
    ) as cached:
        row = cached.plan.rows[1]
        assert row.seconds is not None
        assert 0 < row.seconds < 0.005
        assert cached.plan.sample_seconds < 0.005
        assert torch.get_num_threads() == threads


def test_windows_and_cuts() -> None:
    text = explain("explained_here:Holder.inner", "--resident", "0.2", "--replace", "auto")
    assert "20 of 100 samples are resident" in text
    assert "up to 10" in text
    assert "live    halve" in explain("explained_here:plain", "--cut", "0")
    text = explain("explained_here:plain", "--resident", "1000")
    assert "all are cached and none" in text


@pytest.mark.parametrize(
    ("place", "says"),
    [
        ("explained_here", "must be module:object"),
        (":plain", "must be module:object"),
        ("explained_here:absent", "has no 'absent'"),
        ("no_module_here:plain", "there is no module"),
        ("no_file_here.py:plain", "there is no file"),
        ("explained_here:of_a_file", "No such file or directory: 'no_such_file'"),
        ("explained_here:Scaled", "missing a required argument: 'factor'"),
    ],
)
def test_what_is_not_there_is_a_sentence(place: str, says: str) -> None:
    found = failure(lambda: load(place))
    assert found.kind is ArgumentError
    assert says in found.text
    assert is_a_sentence(found.text)


@pytest.mark.parametrize(
    ("place", "says"), [("explained_here:nothing", "got an object of type int"), ("builtins:dict", "dict")]
)
def test_what_is_no_data_set_is_a_sentence(place: str, says: str) -> None:
    result = CliRunner().invoke(app, ["explain", place])
    assert isinstance(result.exception, HotsetError)
    assert says in str(result.exception)
    assert is_a_sentence(str(result.exception))


def test_a_cached_dataset_shows_its_own_plan() -> None:
    assert "cached  halve" in explain("explained_here:already_cached")


def test_what_a_module_needs_and_has_not_is_its_own_error() -> None:
    found = failure(lambda: load("needs_more:plain"))
    assert found.kind is ModuleNotFoundError
    assert "no_such_module_anywhere" in found.text
