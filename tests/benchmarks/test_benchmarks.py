"""The benchmarks' own arithmetic: known figures give known ratios, and wrong data gives no figure."""

from __future__ import annotations

import io
import json
import mmap
import multiprocessing
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

from benchmarks.__main__ import main
from benchmarks.data import CROP, Samples, flip_and_crop, image_rows, ragged_samples
from benchmarks.footprint import family, of_ranks, ready_to_stand, stand, summed_pss, unmapped_shared
from benchmarks.harness import Comparison, Epochs, Outcome, Spread, Target, Unfit, batches, compare
from benchmarks.peers import bare_loop, limit
from benchmarks.report import Report
from benchmarks.settings import Settings
from benchmarks.suite.contest import ahead_of_all, lead
from benchmarks.suite.peers import peers
from benchmarks.truth import CropTruth, PaddedTruth, RaggedTruth, RowTruth, WrongData

ROWS = np.arange(10 * 6, dtype=np.uint8).reshape(10, 6)


def figures(*values: float) -> Callable[[], float]:
    """A contestant whose figures are known; the first one is the warm-up's."""
    return iter(values).__next__


def ordered_epoch() -> Iterator[Any]:
    for ids in batches(np.arange(10), 4):
        yield ROWS[ids], ids


def test_ratios_are_formed_within_rounds_and_their_median_is_not_the_ratio_of_medians() -> None:
    found = compare({"fast": figures(0, 30, 2, 8), "slow": figures(0, 10, 4, 2)}, reference="slow", pairs=3)
    assert found.rows["fast"].figures == [30, 2, 8]
    assert found.ratio("fast", "slow") == Spread(median=3.0, low=0.5, high=4.0)
    assert found.ratio("slow", "slow") == Spread(1.0, 1.0, 1.0)


def test_a_drift_of_the_machine_cancels() -> None:
    drift = [1.0, 0.5, 0.1, 2.0, 0.3]
    found = compare(
        {
            "a": figures(0, *(600 * speed for speed in drift)),
            "b": figures(0, *(200 * speed for speed in drift)),
        },
        reference="b",
        pairs=5,
    )
    ratio = found.ratio("a", "b")
    assert ratio is not None
    assert (ratio.median, ratio.low, ratio.high) == pytest.approx((3, 3, 3))


def test_rounds_interleave_and_each_begins_with_another_contestant() -> None:
    turns: list[str] = []

    def takes_turn(name: str) -> Callable[[], float]:
        return lambda: float(turns.append(name) or 1)  # type: ignore[func-returns-value]

    compare({name: takes_turn(name) for name in "ABC"}, reference="A", pairs=3)
    assert "".join(turns) == "ABCBCACABABC"


def test_a_lead_is_above_one_for_the_better_one_whether_high_or_low_is_better() -> None:
    rates = compare({"a": figures(0, 6), "b": figures(0, 2)}, "b", pairs=1)
    costs = compare({"a": figures(0, 6), "b": figures(0, 2)}, "b", pairs=1, lower_is_better=True)
    assert rates.lead("a", "b") == Spread(3, 3, 3)
    assert costs.lead("b", "a") == Spread(3, 3, 3)
    assert costs.ratio("a", "b") == Spread(3, 3, 3)


def test_an_unfit_contestant_keeps_its_reason_and_no_figure_while_the_others_go_on() -> None:
    def missing() -> float:
        import there_is_no_such_loader  # type: ignore[import-not-found]  # noqa: F401

        return 1.0

    def breaks_in_the_second_round() -> float:
        if len(calls) == 2:
            raise RuntimeError("a worker died:\nits last words")
        calls.append(1)
        return 5.0

    calls: list[int] = []
    found = compare(
        {"a": figures(0, 1, 2), "missing": missing, "breaks": breaks_in_the_second_round}, "a", pairs=2
    )
    assert found.rows["missing"].unfit == "not installed (there_is_no_such_loader)"
    assert found.rows["breaks"].unfit == "RuntimeError: its last words"
    assert found.rows["breaks"].figures == []
    assert found.rows["a"].figures == [1, 2]
    assert found.ratio("breaks", "a") is None


def test_targets_tell_which_side_is_good_and_what_was_not_measured() -> None:
    found = compare({"h": figures(0, 9), "p": figures(0, 10), "q": unfit}, "p", pairs=1, subjects=("h",))
    assert lead("", found, "h", "p", 0.9).met is True
    assert lead("", found, "h", "p", 0.91).met is False
    assert Target("", Spread(1.05, 1, 2), 1.1, at_least=False).met is True
    assert Target("", Spread(1.15, 1, 2), 1.1, at_least=False).met is False
    missing = lead("", found, "h", "q", 1.0)
    assert (missing.met, missing.reason) == (None, "not installed")


def test_ahead_of_all_measures_against_the_nearest_peer_and_leaves_out_limits_and_the_unfit() -> None:
    found = compare(
        {"limit": figures(0, 99), "h": figures(0, 9), "p": figures(0, 6), "q": figures(0, 3), "r": unfit},
        "limit",
        pairs=1,
        subjects=("h",),
        limits=("limit",),
    )
    target = ahead_of_all("ahead", found, "h")
    assert target.text == "ahead (the nearest: p)"
    assert target.measured == Spread(1.5, 1.5, 1.5)


def unfit() -> float:
    raise Unfit("not installed")


def test_a_loader_that_yields_right_batches_is_measured() -> None:
    measure = Epochs(ordered_epoch, RowTruth(ROWS), seconds=0.01)
    assert measure() > 0
    assert measure.holds is True


def _altered(batches: list[Any]) -> None:
    batches[1][0][2, 3] ^= 1


def _relabelled(batches: list[Any]) -> None:
    batches[0][1][[0, 1]] = batches[0][1][[1, 0]]


def _one_missing(batches: list[Any]) -> None:
    batches[2] = tuple(part[:1] for part in batches[2])


def _one_twice(batches: list[Any]) -> None:
    batches[2] = tuple(np.repeat(part, 2, axis=0) for part in batches[2])


def _another_dtype(batches: list[Any]) -> None:
    batches[0] = batches[0][0].astype(np.int64), batches[0][1]


def _nothing(batches: list[Any]) -> None:
    batches.clear()


@pytest.mark.parametrize(
    "damage", [_altered, _relabelled, _one_missing, _one_twice, _another_dtype, _nothing]
)
def test_wrong_data_is_reported_and_not_measured(damage: Callable[[list[Any]], None]) -> None:
    def epoch() -> list[Any]:
        epoch_batches = [(x.copy(), ids.copy()) for x, ids in ordered_epoch()]
        damage(epoch_batches)
        return epoch_batches

    right = Epochs(ordered_epoch, RowTruth(ROWS), seconds=0.001)
    wrong = Epochs(epoch, RowTruth(ROWS), seconds=0.001)
    found = compare({"right": right, "wrong": wrong}, "right", pairs=2)
    assert found.rows["wrong"].unfit.startswith("wrong data: ")
    assert found.rows["wrong"].figures == []
    assert len(found.rows["right"].figures) == 2


def test_an_epoch_that_turns_wrong_only_while_it_is_timed_is_found_too() -> None:
    epochs: list[int] = []

    def epoch() -> Iterator[Any]:
        epochs.append(1)
        for x, ids in ordered_epoch():
            yield x ^ np.uint8(len(epochs) > 1), ids

    with pytest.raises(WrongData):
        Epochs(epoch, RowTruth(ROWS), seconds=0.001)()


def test_a_ring_that_overwrites_held_batches_is_told_from_one_that_does_not() -> None:
    rows = torch.from_numpy(ROWS)
    ring = Epochs(limit(rows, 2), RowTruth(ROWS), seconds=0.001)
    assert ring() > 0
    assert ring.holds is False


def test_crops_are_told_from_what_is_no_crop() -> None:
    rows = image_rows(3)
    truth = CropTruth(rows.numpy(), CROP)
    data = Samples(rows, flip_and_crop)
    drawn = [data[i] for i in range(3) for _ in range(6)]
    crops = torch.stack([crop for crop, _ in drawn])
    ids = [i for _, i in drawn]
    assert truth.check((crops, ids)) == ids
    with pytest.raises(WrongData):
        truth.check((crops, ids[::-1]))
    crops[7, 2, 100, 100] += 1
    with pytest.raises(WrongData):
        truth.check((crops, ids))


def test_ragged_and_padded_batches_are_compared_sample_by_sample() -> None:
    samples = ragged_samples(4000, 100)
    ragged = RaggedTruth([sample.numpy() for sample in samples])
    assert Epochs(bare_loop(samples, 7), ragged, seconds=0.001)() > 0
    values, offsets = torch.cat(samples[:2]), [0, len(samples[0]), len(samples[0]) + len(samples[1])]
    assert ragged.check(((values, offsets), [0, 1])) == [0, 1]
    with pytest.raises(WrongData):
        ragged.check(((values, [0, offsets[1] + 1, offsets[2]]), [0, 1]))

    padded = PaddedTruth([np.ones((2, 3)), np.ones((4, 3))])
    batch = np.ones((2, 4, 3))
    with pytest.raises(WrongData):
        padded.check((batch, [0, 1]))
    batch[0, 2:] = 0
    assert padded.check((batch, [0, 1])) == [0, 1]


def test_where_hotset_is_behind_the_table_and_the_file_say_so(tmp_path: Path) -> None:
    found = compare(
        {"hotset": figures(0, 5, 5), "slower": figures(0, 4, 4), "faster": figures(0, 10, 10), "gone": unfit},
        "slower",
        pairs=2,
        subjects=("hotset",),
    )
    text = printed(found)
    behind = [line for line in text.splitlines() if "BEHIND" in line]
    assert len(behind) == 1
    assert "faster" in behind[0]
    assert "0.5x" in behind[0]
    assert any("gone" in line and "not installed" in line for line in text.splitlines())

    report = Report(Console(quiet=True), {"cpu": "a cpu", "cores": 2}, quick=True)
    report.add("it", Outcome([found], [lead("ahead of faster", found, "hotset", "faster", 1.0)]))
    report.save_json(tmp_path / "results.json")
    saved = json.loads((tmp_path / "results.json").read_text())
    contestants = {c["name"]: c for c in saved["benchmarks"]["it"]["comparisons"][0]["contestants"]}
    assert contestants["faster"]["hotset_behind"] == ["hotset"]
    assert contestants["faster"]["ratio"] == {"median": 2.5, "low": 2.5, "high": 2.5}
    assert contestants["slower"]["hotset_behind"] == []
    assert contestants["gone"]["figures"] == []
    assert saved["benchmarks"]["it"]["targets"][0]["met"] is False


def printed(found: Comparison) -> str:
    page = io.StringIO()
    Report(Console(width=160, file=page), {}, quick=True).add("it", Outcome([found]))
    return page.getvalue()


def test_summed_pss_holds_what_a_child_process_takes() -> None:
    program = "import sys; held = b'x' * (64 << 20); print('ready', flush=True); sys.stdin.read()"
    before = summed_pss(family(os.getpid()))
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        grown = summed_pss(family(os.getpid())) - before
        child.communicate()
    assert 64 << 20 < grown < 128 << 20


def test_a_child_that_has_ended_and_that_nobody_waited_for_is_not_of_the_family() -> None:
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert pid not in family(os.getpid())
    os.waitpid(pid, 0)


def test_shared_memory_counts_as_unmapped_until_somebody_maps_it() -> None:
    fd = os.memfd_create("test", os.MFD_CLOEXEC)
    try:
        before = unmapped_shared([os.getpid()])
        os.posix_fallocate(fd, 0, 1 << 20)
        assert unmapped_shared([os.getpid()]) - before == 1 << 20
        with mmap.mmap(fd, 1 << 20):
            assert unmapped_shared([os.getpid()]) == before
    finally:
        os.close(fd)


def _hold(size: int, fails: bool, barrier: Any) -> None:
    with ready_to_stand(barrier):
        held = b"x" * size
        if fails:
            raise SystemExit(0)  # even so: who does not stand is not measured
        stand(barrier)
        del held


def test_ranks_are_measured_while_they_stand_and_not_at_all_if_one_does_not() -> None:
    context = multiprocessing.get_context("fork")
    less, more = (of_ranks(context, 2, _hold, size, False) for size in (1 << 10, 32 << 20))
    assert 48 << 20 < more.pss - less.pss < 96 << 20
    with pytest.raises(threading.BrokenBarrierError):
        of_ranks(context, 2, _hold, 1 << 10, True)


@pytest.mark.benchmark
def test_records_from_another_process_are_measured(tmp_path: Path) -> None:
    pytest.importorskip("zmq", reason="pyzmq, which carries records between machines, is not installed")
    measured = peers(Settings(tmp_path, sys.executable, quick=True)).comparisons
    assert [row.unfit for found in measured for row in found.rows.values() if row.unfit] == []
    assert len(measured) == 4


@pytest.mark.chaos
def test_the_command_measures_hotset_and_saves_json_and_a_plot(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks", "startup", "molecules", "--quick", "--out", str(tmp_path)]
    done = subprocess.run(
        command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False, timeout=250
    )
    assert done.returncode == 0, done.stderr
    saved = json.loads((tmp_path / "results.json").read_text())
    contestants = [
        contestant
        for benchmark in saved["benchmarks"].values()
        for comparison in benchmark["comparisons"]
        for contestant in comparison["contestants"]
    ]
    assert {c["name"]: c["unfit"] for c in contestants if c["unfit"]} == {}
    assert saved["machine"]["cores"] >= 1
    assert (tmp_path / "results.png").read_bytes().startswith(b"\x89PNG")


def test_an_unknown_benchmark_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["nonsense"])
    assert ended.value.code == 2
    assert "there is no benchmark 'nonsense'" in capsys.readouterr().err
