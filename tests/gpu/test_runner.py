"""What runs the checks on a lent GPU: whatever one of them does, the others are run, and nothing is lost."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from .runner import Item, Report, run


def gives() -> Iterator[Any]:
    yield {"ratio": 0.5}
    yield {"ratio": 0.75}


def fails() -> Iterator[Any]:
    yield {"ratio": 0.25}
    raise ValueError("it is broken")


def crashes() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def hangs() -> None:
    time.sleep(600)


def report_of(path: Path | None, *runs: Callable[[], Any], seconds: float = 60.0) -> Report:
    report = Report(path, lambda value: None)
    run([Item(one.__name__, one, limit=1.0 if one is hangs else 30.0) for one in runs], report, seconds)
    return report


def test_what_goes_wrong_costs_only_itself(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    report = report_of(path, gives, fails, crashes, hangs, gives)
    assert [(one.name, one.state, one.values) for one in report.outcomes] == [
        ("gives", "ok", [{"ratio": 0.5}, {"ratio": 0.75}]),
        ("fails", "FAILED", [{"ratio": 0.25}]),
        ("crashes", "CRASHED", []),
        ("hangs", "HUNG", []),
        ("gives", "ok", [{"ratio": 0.5}, {"ratio": 0.75}]),
    ]
    assert [one.why for one in report.outcomes[1:3]] == [
        "ValueError: it is broken",
        "its process ended with -9",
    ]
    assert json.loads(path.read_text()) == [one._asdict() for one in report.outcomes]


def test_one_process_runs_what_does_not_fail(tmp_path: Path) -> None:
    def notes() -> None:
        with (tmp_path / "processes").open("a") as file:
            file.write(f"{os.getpid()}\n")

    report_of(None, notes, notes, fails, notes)
    first, second, third = (tmp_path / "processes").read_text().split()
    assert first == second != third


def test_what_there_is_no_time_for_is_said(tmp_path: Path) -> None:
    report = report_of(None, lambda: time.sleep(600), gives, seconds=0.5)
    assert [one.state for one in report.outcomes] == ["HUNG", "not run"]


def test_values_are_written_before_the_item_has_ended(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "report.json"

    def looks() -> Iterator[Any]:
        yield 1
        until = time.monotonic() + 20
        while not path.exists():
            assert time.monotonic() < until
            time.sleep(0.01)
        yield json.loads(path.read_text())[-1]["values"]

    assert report_of(path, looks).outcomes[0].values == [1, [1]]
