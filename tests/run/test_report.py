"""The report: what was decoded, what was left alone, how long the loop waited, and what would help."""

from __future__ import annotations

from typing import Any

from hotset.run.environment import Options, environment_for, options_here
from hotset.run.loader_wait import Waits
from hotset.run.report import Outcome, report

STATS = {"calls": 12000, "hits": 9000, "uncached": 0, "bytes": 2_469_606_195, "seconds_saved": 45.2}


def outcome(**changes: Any) -> Outcome:
    usual = Outcome(
        command="python train.py",
        seconds=132.0,
        functions=[("cv2.imread", STATS)],
        left={},
        waits=[Waits(30.0, 1200, 124.0)],
        unreached=[],
        reached=True,
    )
    return usual._replace(**changes)


def advice(**changes: Any) -> str:
    return "\n".join(report(outcome(**changes))[1:])


def test_the_table() -> None:
    assert report(outcome())[:4] == [
        "hotset: python train.py ran for 132 s",
        "  function     calls   hits  time saved     kept",
        "  cv2.imread  12,000  9,000        45 s  2.3 GiB",
        "  DataLoader: the loop waited 30 s of its 124 s for 1,200 batches",
    ]


def test_what_would_help_follows_from_the_figures() -> None:
    assert "hotset.cache(dataset)" in advice()
    assert "hardly waited" in advice(waits=[Waits(2.0, 1200, 124.0)])
    assert "hardly waited" not in advice(waits=[Waits(2.0, 60, 4.0)])  # after a long start
    assert "more --memory" in advice(functions=[("cv2.imread", {**STATS, "uncached": 3000})])
    assert "second epoch" in advice(functions=[("cv2.imread", {**STATS, "hits": 10})])
    assert "waited most" in advice(waits=[Waits(30.0, 1200, 124.0), Waits(20.0, 1200, 124.0)])


def test_a_program_that_gains_nothing_is_told_so() -> None:
    assert "functions that hotset knows" in advice(functions=[], waits=[])
    in_memory = advice(functions=[])
    assert "--memo" in in_memory
    assert "hotset doctor" in in_memory
    assert "hotset doctor" not in advice(functions=[], waits=[])  # without a loader it has nothing to watch
    idle = advice(functions=[], waits=[Waits(2.0, 1200, 124.0)])
    assert "hardly waited" in idle
    assert "--memo" not in idle
    assert "No Python process was reached" in advice(functions=[], waits=[], reached=False)
    refused = {("cv2.imread", "results of functions are not kept, as no memory can be had for them"): 1}
    assert "less --memory" in advice(functions=[], waits=[], left=refused)
    assert "/other/python" in advice(functions=[], waits=[], reached=False, unreached=["/other/python"])


def test_what_was_left_alone_is_said_most_frequent_first() -> None:
    left = {("cv2.imread", f"reason {number}"): number for number in range(1, 10)}
    lines = [line for line in report(outcome(left=left)) if "left alone" in line]
    assert lines[0] == "  left alone: cv2.imread, at least 9 times: reason 9"
    assert lines[-1] == "  left alone: 3 more kinds of calls"


def test_options_reach_the_processes_below(monkeypatch: Any) -> None:
    options = Options(memory="1GiB", spill="/s", session="mine", evict="lru", functions=("a:b",))
    for name, value in environment_for(options, "job", "/ledger", {}).items():
        monkeypatch.setenv(name, value)
    assert options_here() == options
    monkeypatch.setenv("HOTSET_RUN", '{"of": "another version"}')
    assert options_here() is None
