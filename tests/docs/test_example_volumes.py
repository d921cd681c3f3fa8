"""The example of 3-D segmentation: all three trainings run, are compared, and leave nothing but the plot."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "segmentation_volumes.py"
SMALL = "--volumes 8 --size 40 --crop 16 --resident 4 --replace 0.5 --steps 12 --workers 1 --plot volumes.png"

pytestmark = pytest.mark.chaos  # three trainings: half a minute


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, Path]:
    """What the example printed, where it ran, and its folder for temporary files."""
    pytest.importorskip("monai")
    pytest.importorskip("nibabel")
    cwd, temporary = tmp_path_factory.mktemp("cwd"), tmp_path_factory.mktemp("temporary")
    ran = subprocess.run(
        [sys.executable, str(EXAMPLE), *SMALL.split()],
        cwd=cwd,
        env={**os.environ, "TMPDIR": str(temporary)},
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout, cwd, temporary


def test_the_table_compares_three_trainings_of_finite_losses(done: tuple[str, Path, Path]) -> None:
    rows = {}
    for line in done[0].partition("later steps")[2].splitlines():
        if "s/step" in line:
            name, *cells = (cell for cell in line.replace("s/step", "  ").split("  ") if cell.strip())
            rows[name] = [float(cell.strip().rstrip("%")) for cell in cells]
    assert list(rows) == ["no cache", "window of 4", "all cached"]
    for early, later, waited, loss, dice in rows.values():
        assert early > 0
        assert later > 0
        assert 0 <= waited <= 100
        assert math.isfinite(loss)
        assert 0 <= dice <= 1


def test_what_is_random_stays_live_and_the_window_moves(done: tuple[str, Path, Path]) -> None:
    plan = done[0].splitlines()
    for name in ("LoadImaged", "Spacingd", "ScaleIntensityRanged"):
        assert any(line.startswith(f"cached  {name}") for line in plan)
    for name in ("RandSpatialCropd", "RandFlipd"):
        assert any(line.startswith(f"live    {name}") for line in plan)
    assert "window       4 of 8 samples are resident, 2 are replaced after each epoch" in done[0]
    said = next(line for line in plan if line.startswith("replaced so far: "))
    left, late = map(int, re.findall(r"\d+", said))
    assert left + late > 0, "what was not ready in time is said to be late"


def test_only_the_plot_is_left(done: tuple[str, Path, Path]) -> None:
    _, cwd, temporary = done
    assert [path.name for path in cwd.iterdir()] == ["volumes.png"]
    assert (cwd / "volumes.png").read_bytes().startswith(b"\x89PNG")
    assert list(temporary.iterdir()) == []
