"""The benchmarks of sessions, spill and mindspore, tiny: what they count, refuse, and leave behind."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import hotset
from benchmarks import session_job
from benchmarks.data import Generated, photographs
from benchmarks.harness import Unfit
from benchmarks.jobs import Job, run_once
from benchmarks.session_job import new_session
from benchmarks.settings import Settings
from benchmarks.suite import mindspore, sessions, spill
from benchmarks.truth import WrongData
from hotset.session.sessions import sessions as all_sessions

pytestmark = pytest.mark.benchmark

ECHO = """
import sys
from benchmarks.jobs import serve
def answer(question):
    print("noise")
    if question["what"] == "end":
        print("its last words", file=sys.stderr)
        sys.exit(3)
    if question["what"] == "raise":
        raise ValueError("no such thing")
    return {"got": question["what"]}
serve(answer)
"""


def test_a_job_answers_in_order_and_says_why_it_could_not_or_why_it_ended(tmp_path: Path) -> None:
    (tmp_path / "echo_job.py").write_text(ECHO)
    path = os.pathsep.join([str(tmp_path), str(Path(__file__).parents[2])])
    with Job("echo_job", environment={"PYTHONPATH": path}) as job:
        job.send(what=1)
        job.send(what=2)
        assert [job.receive()["got"], job.receive()["got"]] == [1, 2]
        with pytest.raises(Unfit, match="ValueError: no such thing"):
            job.ask(what="raise")
        assert job.ask(what=3) == {"got": 3}
        with pytest.raises(Unfit, match="status 3: its last words"):
            job.ask(what="end")


def test_a_program_run_once_answers_by_its_last_line_or_is_unfit_by_its_last_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = "import sys; print('noise'); print(sys.argv[1]); sys.exit(' '.join(sys.argv[2:]) or 0)"
    (tmp_path / "once_job.py").write_text(program)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert run_once("once_job", '{"got": 7}') == {"got": 7}
    with pytest.raises(Unfit, match=r"^its last words$"):
        run_once("once_job", "{}", "first\nits last words")


def test_jobs_at_once_take_as_long_as_the_slowest_and_in_turn_as_long_as_all() -> None:
    class Fake:
        def __init__(self, seconds: float) -> None:
            self.answer = {"seconds": seconds}

        def send(self, **question: Any) -> None:
            sent.append(question)

        def receive(self) -> dict[str, Any]:
            assert len(sent) == 3, "all are asked before one is waited for"
            return self.answer

        def ask(self, **question: Any) -> dict[str, Any]:
            return self.answer

    sent: list[dict[str, Any]] = []
    jobs: Any = [Fake(seconds) for seconds in (1.0, 4.0, 2.0)]
    assert sessions._ask_all(jobs, {}, in_turn=False) == 4.0
    assert sessions._ask_all(jobs, {}, in_turn=True) == 7.0


def second(session: str, count: int, ahead: bool = False) -> dict[str, Any]:
    return session_job.answer(
        {"do": "second", "session": session, "count": count, "ahead": ahead, "later": 2}
    )


def test_the_second_job_measures_what_is_cached_and_nothing_else() -> None:
    with new_session() as session:
        with hotset.cache(Generated(70), session=session) as cached:
            for i in range(69):
                cached[i]
            with pytest.raises(Unfit, match="came from the source"):
                second(session, 70)
        answer, ahead = second(session, 70), second(session, 70, ahead=True)
    assert len(answer["later"]) == 2
    assert answer["mapping"] == 0 < ahead["mapping"]
    assert answer["mapped"] >= 70 * 150_528
    assert all_sessions() == []


def test_readings_are_counted_over_jobs_that_share_a_session_and_apart_from_it(tmp_path: Path) -> None:
    photographs(tmp_path, 12)
    log = tmp_path / "reads"

    def train(session: str | None, caches: bool, name: str = "reads") -> int:
        before = log.stat().st_size if log.exists() else 0
        question = {"session": session, "caches": caches, "folder": str(tmp_path), "epochs": 2}
        session_job.answer({"do": "train", "log": str(log), **question})
        return log.stat().st_size - before

    with new_session() as session:
        alone, first, again = train(None, True), train(session, True), train(session, True)
    # Twelve for the cache, and those that decide what can be cached: how many is a matter of time.
    assert min(alone, first) > 12
    assert again == 0
    assert train(None, False) == 24


def test_a_disk_forgets_what_lies_on_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spill, "_DROP", tmp_path / "drop")
    disk = spill.Disk(tmp_path / "disk")
    assert (tmp_path / "drop").read_text() == "1"
    assert disk.drops
    assert spill._told(disk) == []
    with spill._plain_file(disk.folder, 2) as plain:
        assert _is_cached(plain)
        disk.forget()
        if _is_cached(plain):
            pytest.skip("this file system keeps its files in memory")
        assert disk.cold(lambda: spill.sequential(plain)) > 0
        assert _is_cached(plain)
    assert not list(disk.folder.iterdir())

    monkeypatch.setattr(spill, "_DROP", tmp_path / "none" / "drop")
    assert "one has to be root" in spill._told(spill.Disk(tmp_path / "disk"))[0]


def _is_cached(file: Path) -> bool:
    fd = os.open(file, os.O_RDONLY)
    try:
        return os.preadv(fd, [bytearray(4096)], 8192, os.RWF_NOWAIT) == 4096
    except BlockingIOError:
        return False
    finally:
        os.close(fd)


def test_spill_measures_sessions_of_which_all_half_and_nothing_is_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spill, "_DROP", tmp_path / "drop")
    held: list[tuple[int, int]] = []
    made = spill._session_of

    def noting(*arguments: Any) -> Any:
        cached, epoch = made(*arguments)
        stats = cached.stats()
        held.append((stats.cached, stats.spilled))
        return cached, epoch

    monkeypatch.setattr(spill, "_session_of", noting)
    outcome = spill.spill_half(Settings(tmp_path, sys.executable, quick=True))
    assert [cached for cached, _ in held] == [96, 96, 96]
    everything, half, nothing = (spilled for _, spilled in held)
    assert (everything, nothing) == (0, 96)
    assert 40 <= half <= 56
    (found,) = outcome.comparisons
    assert all(len(row.figures) == 2 and min(row.figures) > 0 for row in found.rows.values()), found.rows
    assert not [file for file in (tmp_path / "spill").rglob("*") if file.is_file()]
    assert all_sessions() == []


@pytest.mark.parametrize("measure", [spill.spill, spill.spill_tiny])
def test_spill_finds_figures_for_everyone_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, measure: Any
) -> None:
    monkeypatch.setattr(spill, "_DROP", tmp_path / "drop")
    outcome = measure(Settings(tmp_path, sys.executable, quick=True))
    rows = [row for found in outcome.comparisons for row in found.rows.values()]
    assert len(rows) >= 3
    assert all(len(row.figures) == 2 and min(row.figures) > 0 for row in rows), rows
    assert all(target.met is not None for target in outcome.targets)
    assert not [file for file in (tmp_path / "spill").rglob("*") if file.is_file()]
    assert all_sessions() == []


def test_without_an_interpreter_mindspore_is_left_out_and_how_to_get_it_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(mindspore.VARIABLE, raising=False)
    outcome = mindspore.mindspore_tiny(Settings(tmp_path, sys.executable, quick=True))
    assert outcome.comparisons == []
    assert "pip install mindspore" in outcome.notes[0]
    assert [(target.met, target.reason) for target in outcome.targets] == [(None, mindspore.MISSING)] * 5


class FakeJob:
    """Answers as a pipeline would that takes a second more with each epoch."""

    def __init__(self, wrong: str = "") -> None:
        self.wrong = wrong
        self.asked: list[tuple[str, str | None, int]] = []

    def ask(self, **question: Any) -> dict[str, Any]:
        self.asked.append((question["engine"], question["session"], question["epochs"]))
        seconds = [float(1 + k) for k in range(question["epochs"])]
        sums = [1, 2, 2] if question["session"] == self.wrong else [2, 1, 3]
        whole = sums if question["whole"] else []
        return {"opening": 0.5, "seconds": seconds, "count": self.count(question), "sums": whole}

    def count(self, question: dict[str, Any]) -> int:
        return 3


def side(first: Any, other: Any) -> mindspore.Side:
    @contextlib.contextmanager
    def session(spills: bool) -> Iterator[str]:
        yield "spilling" if spills else "roomy"

    return mindspore.Side(first, other, "plain", "cached", session, {})


def test_a_round_tells_first_epochs_with_their_opening_from_later_ones() -> None:
    first, other = FakeJob(), FakeJob()
    without, cached, opening = mindspore._round(side(first, other), whole=False)
    assert first.asked == [("plain", None, 2), ("cached", "roomy", 4), ("cached", "spilling", 4)]
    assert other.asked == [("cached", "roomy", 1)]
    assert opening == (0.5, 0.5)
    firsts = {mindspore.FIRST, mindspore.SECOND, mindspore.SPILLED_FIRST}
    for figures in (without, cached):
        assert {scenario for scenario, seconds in figures.items() if seconds == 1.5} == firsts
    assert {without[scenario] for scenario in (mindspore.LATER, mindspore.SPILLED_LATER)} == {2.0}
    assert {cached[scenario] for scenario in (mindspore.LATER, mindspore.SPILLED_LATER)} == {3.0}


@pytest.mark.parametrize("wrong", ["roomy", "spilling"])
def test_samples_of_a_cache_that_differ_from_the_uncached_ones_give_no_figure(wrong: str) -> None:
    with pytest.raises(WrongData, match="1 samples differ"):
        mindspore._round(side(FakeJob(wrong), FakeJob()), whole=True)
    mindspore._round(side(FakeJob(), FakeJob()), whole=True)


def test_an_epoch_of_a_cache_that_lacks_samples_gives_no_figure() -> None:
    class Short(FakeJob):
        def count(self, question: dict[str, Any]) -> int:
            return 2 if question["session"] == "roomy" else 3

    for first, other in ((Short(), FakeJob()), (FakeJob(), Short())):
        with pytest.raises(WrongData, match="an epoch of 2 samples, and of 3 uncached"):
            mindspore._round(side(first, other), whole=False)
