"""Whatever is killed, stopped, destroyed or full: jobs get right samples, and nothing is left behind."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from chaos import HAPPENS, KILLS

ROOT = Path(__file__).parents[2]


@pytest.mark.chaos
@pytest.mark.timeout(300)
def test_fifty_deaths_harm_nobody_and_leave_nothing() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.chaos", "--kills", "50", "--seed", "7"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    counts = {name: int(count) for name, count in re.findall(r"([a-z][a-z ]*) (\d+)", done.stdout)}
    for kind in (*HAPPENS, "jobs that ended well", "destroys that ended well"):
        assert counts.get(kind, 0) > 0, f"{kind}: never; {done.stdout}"
    assert sum(counts[f"{kind} kills"] for kind in KILLS) >= 50
    assert counts["samples"] > 1000
