"""The benchmarks of windows: what they refuse to measure, that they run, and that the accuracies repeat."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.digits import train_once
from benchmarks.suite.window import Turns, Work
from benchmarks.truth import RowTruth, WrongData

pytestmark = pytest.mark.benchmark

ROOT = Path(__file__).parents[2]
ROWS = np.arange(12 * 3, dtype=np.uint8).reshape(12, 3)


def turns(*epochs: list[list[int]], resident: int = 4) -> Turns:
    """A window whose epochs have these batches, the last one again and again."""
    left = list(epochs)

    def epoch() -> Iterator[Any]:
        for ids in left.pop(0) if len(left) > 1 else left[0]:
            yield ROWS[ids], np.array(ids)

    return Turns(epoch, RowTruth(ROWS), resident, seconds=1e-9, work=Work(0.0))


def test_an_epoch_of_a_window_has_each_resident_once_whichever_they_are() -> None:
    assert turns([[3, 9], [1, 0]], [[5, 6], [7, 8]])() > 0
    for wrong in ([[3, 9], [1, 3]], [[3, 9], [1]], [[3, 9], [1, 0], [2]]):
        with pytest.raises(WrongData, match="an epoch of"):
            turns(wrong)()


def test_the_last_batch_of_a_timing_is_compared_too() -> None:
    made = turns([[0, 1], [2, 3]])
    made()
    made._truth = RowTruth(ROWS + 1)
    with pytest.raises(WrongData, match="differs"):
        made()


def test_work_is_in_proportion_to_what_was_asked_for() -> None:
    assert Work(0.0)._times == 0
    assert Work(1.0)._times > 10 * Work(1e-3)._times > 0


def test_batches_of_volumes_are_compared_with_their_files(tmp_path: Path) -> None:
    program = f"""
from contextlib import ExitStack
from pathlib import Path
from benchmarks import volumes
from benchmarks.truth import WrongData
items = volumes.write(Path({str(tmp_path)!r}), 6, 16)
truth = volumes.VolumeTruth(items, 8)
with ExitStack() as stack:
    epoch, window = volumes.monai_window(stack, items, 8, 4, 0)
    epochs = [sorted(i for batch in epoch() for i in truth.check(batch)) for _ in range(3)]
    assert [len(set(ids)) for ids in epochs] == [4, 4, 4] and epochs[0] != epochs[1], epochs
    batch = next(iter(volumes.plain(items, 8, 0)()))
    truth.check(batch)
    batch["image"][1, 0, 3, 3, 3] += 0.01
    try:
        truth.check(batch)
    except WrongData as wrong:
        print(wrong)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False, timeout=250
    )
    assert done.returncode == 0, done.stderr
    assert "is not a crop of its original" in done.stdout


def test_the_accuracies_of_windows_repeat() -> None:
    program = [sys.executable, "-m", "benchmarks.digits", "--steps", "80", "--every", "20", "--seeds", "1"]
    tables = [
        subprocess.run(program, cwd=ROOT, capture_output=True, text=True, check=True, timeout=250).stdout
        for _ in range(2)
    ]
    assert tables[0] == tables[1]
    lines = tables[0].splitlines()
    assert len(lines) == 6
    assert all(10 < float(line.rpartition("|")[0].rpartition("|")[2].split()[0]) < 100 for line in lines[2:])


def test_a_training_depends_on_its_seed_and_batches_alone() -> None:
    x, y = torch.rand(64, 64), torch.arange(64) % 10
    test = torch.utils.data.TensorDataset(x, y)
    batches = [(x[:32], y[:32]), (x[32:], y[32:])]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        once, again, other = (train_once(batches, test, seed, 60, 10) for seed in (0, 0, 1))
    finally:
        torch.set_num_threads(threads)
    assert once == again != other
    assert once[-1] > once[0]
