"""examples/trainers: each program, without hotset and with it, gives the same losses, bit for bit."""

from __future__ import annotations

import doctest
import importlib
import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from programs import Programs

ROOT = Path(__file__).parents[2]
TRAINERS = ROOT / "examples" / "trainers"
sys.path.insert(0, str(TRAINERS))
table: Any = importlib.import_module("table")
sys.path.remove(str(TRAINERS))


Run = Callable[[list[str]], "subprocess.CompletedProcess[str]"]


def in_an_interpreter(command: list[str]) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    command = [sys.executable, *command]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)


def losses(run: Run, command: list[str]) -> list[list[float]]:
    done = run(command)
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line)["losses"] for line in done.stdout.splitlines() if line.startswith('{"seconds"')]


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name == "tokens" else pytest.mark.chaos) for name in table.TRAINERS],
)
def test_losses_are_equal_with_hotset(name: str, tmp_path: Path, programs: Programs) -> None:
    trainer = table.TRAINERS[name]
    for module in trainer.needs:
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} is not installed; it comes with the extra `trainers`")
    program = [
        str(TRAINERS / trainer.file),
        str(tmp_path),
        *(["--samples", "8", "--workers", "0"] if name == "tokens" else ["--samples", "32"]),
        *("--epochs", "2"),
    ]

    def forked(command: list[str]) -> subprocess.CompletedProcess[str]:
        return programs.run(command, tmp_path, trains=True)

    run = forked if name == "tokens" else in_an_interpreter
    ours = (
        [*program, "--hotset"] if trainer.changes else ["-m", "hotset", "run", "--", sys.executable, *program]
    )
    expected = losses(run, program)
    assert len(expected) == 2
    assert all(expected)
    assert losses(run, ours) == expected


def test_the_lines_that_hotset_takes_are_those_that_the_page_shows() -> None:
    page = (ROOT / "docs" / "trainers.md").read_text()
    (shown,) = re.findall(r"```diff\n\+ (.*)\n```", page)
    for trainer in table.TRAINERS.values():
        text = (TRAINERS / trainer.file).read_text()
        lines = re.findall(r"if given\.hotset:\n\s+(.*)", text)
        assert lines == [shown] * trainer.changes
        assert len(re.findall(r"^(?:import|from) hotset", text, re.M)) == trainer.changes
        assert text.count("hotset.cache") == trainer.changes


def test_the_tables_arithmetic() -> None:
    failed, tried = doctest.testmod(table)
    assert (failed, tried > 0) == (0, True)
    rows = [table.Row("A", 0, [1.0, 1.2, 1.1], [0.5], (0, 0), False)]
    assert table.shown(rows, 4)[2] == "| A | 0 | 1.10x (1.00 to 1.20) | 0.50x (0.50 to 0.50) | - | **no** |"
