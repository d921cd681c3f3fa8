"""The benchmarks "sweep" and "attach": their arithmetic, what they refuse to measure, and that they run."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.data import Samples, image_rows
from benchmarks.harness import Comparison, Row, Spread, Unfit
from benchmarks.suite import attach, sweep
from benchmarks.training import train
from benchmarks.truth import WrongData

pytestmark = pytest.mark.benchmark


def training(later: float, held: float, first: float = 1.0) -> sweep._Training:
    return sweep._Training(
        first, later, held, opened=0.1, requested=0.0, audited=0.0, losses=[(0.5,), (0.25,)]
    )


def later_epochs(found: sweep._Sweep) -> Comparison:
    rows = {name: Row(name, [one.later for one in done]) for name, done in found.done.items()}
    return Comparison("", "s", sweep.NONE, rows, tuple(found.contestants("hotset")), lower_is_better=True)


@pytest.fixture
def found() -> sweep._Sweep:
    """Two rounds: uncached 10 and 20 s, wholly cached 2 and 4 s, half cached by half."""
    source = sweep._Source("memory", Samples(image_rows(2)), None)
    made = sweep._Sweep(source, (50, 100))
    made.done[sweep.NONE] = [training(10, 0), training(20, 0)]
    made.done["hotset, 50 %"] = [training(6, 0.5), training(18, 0.5)]
    made.done["hotset, 100 %"] = [training(2, 1), training(4, 1)]
    for name in made.contestants("stocaching"):
        made.done[name] = [training(9, 0.5), training(9, 0.5)]
    return made


def test_the_line_leads_within_a_round_from_nothing_to_everything_cached(found: sweep._Sweep) -> None:
    ratios = sweep._to_the_line(found, later_epochs(found))
    assert ratios == {"hotset, 50 %": Spread(1.25, 1.0, 1.5)}
    target = sweep._line_target(found, later_epochs(found))
    assert target.measured == Spread(1.25, 1.0, 1.5)
    assert target.met is False


def test_what_is_held_counts_and_not_what_was_asked_for(found: sweep._Sweep) -> None:
    found.done["hotset, 50 %"] = [training(8, 0.25), training(16, 0.25)]
    assert sweep._to_the_line(found, later_epochs(found)) == {"hotset, 50 %": Spread(1.0, 1.0, 1.0)}


def test_the_target_of_first_epochs_is_about_the_worst_limit() -> None:
    rows = {
        sweep.NONE: Row(sweep.NONE, [10, 10]),
        "hotset, 50 %": Row("hotset, 50 %", [10, 10]),
        "hotset, 100 %": Row("hotset, 100 %", [12, 11]),
    }
    first = Comparison("", "s", sweep.NONE, rows, ("hotset, 50 %", "hotset, 100 %"), lower_is_better=True)
    target = sweep._first_target(first)
    assert "the worst: hotset, 100 %" in target.text
    assert target.measured == Spread(1.15, 1.1, 1.2)
    rows["hotset, 50 %"].unfit = "a worker died"
    assert (sweep._first_target(first).met, sweep._first_target(first).reason) == (None, "a worker died")


def test_peers_are_measured_against_the_entry_they_match() -> None:
    rows = {
        name: Row(name, [figure]) for name, figure in (("h1", 4), ("h2", 1), ("p1", 5), ("p2", 2), ("q", 3))
    }
    plain = Comparison("", "s", "q", rows, ("h1", "h2"), lower_is_better=True)
    matched = Comparison("", "s", "q", rows, ("h1", "h2"), (), True, {"p1": "h1", "p2": "h2"})
    assert [plain.losses("p2"), matched.losses("p2")] == [[("h1", Spread(0.5, 0.5, 0.5))], []]
    assert plain.losses("q") == matched.losses("q") == [("h1", Spread(0.75, 0.75, 0.75))]


def test_a_training_whose_losses_differ_is_not_measured(
    found: sweep._Sweep, monkeypatch: pytest.MonkeyPatch
) -> None:
    right, wrong = training(3, 0.5), training(1, 0.5)._replace(losses=[(0.5,), (0.26,)])
    answers = iter([right, right, wrong])
    monkeypatch.setattr(found, "_train", lambda name: next(answers))
    found.warm_up()
    before = len(found.done["hotset, 50 %"])
    assert found("hotset, 50 %") == 3
    with pytest.raises(WrongData, match="losses of epoch 2"):
        found("hotset, 50 %")
    assert len(found.done["hotset, 50 %"]) == before + 1


def test_losses_are_equal_for_equal_batches_and_tell_one_sample_from_another() -> None:
    rows = image_rows(8)

    def epoch(order: list[int]) -> Iterator[Any]:
        for ids in map(torch.tensor, (order[:4], order[4:])):
            yield [rows[ids], ids]

    def losses(order: list[int]) -> list[tuple[float, ...]]:
        return [one.losses for one in train(lambda: epoch(order), 2)]

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        straight = losses([0, 1, 2, 3, 4, 5, 6, 7])
        assert straight == losses([0, 1, 2, 3, 4, 5, 6, 7])
        assert [len(epoch) for epoch in straight] == [2, 2]
        swapped = losses([0, 1, 2, 4, 3, 5, 6, 7])
        rows[6, 1, 111, 111] += 1  # of every third pixel in either direction
        altered = losses([0, 1, 2, 3, 4, 5, 6, 7])
    finally:
        torch.set_num_threads(threads)
    assert straight[0][0] != swapped[0][0]
    assert straight[0][0] == altered[0][0]
    assert straight[0][1] != altered[0][1]


class Deadly:
    """Ends the process that unpickles it."""

    def __reduce__(self) -> Any:
        return os._exit, (3,)


def test_a_second_process_that_dies_is_told() -> None:
    with pytest.raises(Unfit, match="ended without an answer"):
        attach._spawn(Deadly(), ahead=False)


def test_both_run_and_everyone_in_them_is_measured(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks", "sweep", "attach", "--quick", "--out", str(tmp_path)]
    done = subprocess.run(
        command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False, timeout=250
    )
    assert done.returncode == 0, done.stderr
    saved = json.loads((tmp_path / "results.json").read_text())["benchmarks"]
    tables = [comparison for benchmark in saved.values() for comparison in benchmark["comparisons"]]
    assert len(tables) == 5
    contestants = [contestant for table in tables for contestant in table["contestants"]]
    assert {c["name"]: c["unfit"] for c in contestants if c["unfit"] or not c["figures"]} == {}
    assert all(target["measured"] for benchmark in saved.values() for target in benchmark["targets"])
    # In three epochs: all samples once with room for all of them, half of them thrice with room for half; and
    # those that the audit has read again.
    requests, audits = (
        {
            name.strip(): float(figure)
            for note in saved["sweep"]["notes"]
            if told in note
            for name, figure in re.findall(r"([^:;]+): ([\d.]+)", note.partition(told)[2])
        }
        for told in ("requests to the link for a sample in 3 epochs: ", "of these made by the audit: ")
    )
    assert requests["no cache"] == 3.0
    for name, expected in (("hotset, 50 %", 2.0), ("hotset, 100 %", 1.0)):
        assert requests[name] - audits[name] == pytest.approx(expected, abs=0.05 * (expected == 1.0) + 1e-3)
        assert audits[name] < 0.2
    assert (tmp_path / "sweep.png").read_bytes().startswith(b"\x89PNG")
