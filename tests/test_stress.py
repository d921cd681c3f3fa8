"""The stress run, for a few seconds: ``make stress`` runs it for minutes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def test_a_short_stress_run_finds_nothing() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.stress", "--seed", "1", "--seconds", "3"],
        cwd=Path(__file__).parent.parent,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "seed 1" in done.stdout
