"""What a user waits for before anything happens: ``import hotset`` and ``hotset --help``.

Medians of ten new processes each, interleaved like everything else.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from benchmarks.harness import Outcome, Unfit, compare
from benchmarks.settings import Settings
from benchmarks.suite.contest import speed

__all__ = ["startup"]

PYTHON = "python -c pass"
IMPORT = "import hotset, within python"
HELP = "hotset --help"

# The import alone is timed, inside; torch must not have come with it.
_PROGRAM = """
import sys, time
start = time.perf_counter()
import hotset
print(time.perf_counter() - start, "torch" in sys.modules)
"""


def startup(settings: Settings) -> Outcome:
    """``import hotset`` under 0.1 s and without torch, ``hotset --help`` under 0.4 s."""
    found = compare(
        {PYTHON: _python, IMPORT: _import, HELP: _help},
        PYTHON,
        2 if settings.quick else 10,
        title="Start-up",
        unit="s",
        subjects=(IMPORT, HELP),
        limits=(PYTHON,),
        lower_is_better=True,
    )
    return Outcome(
        [found],
        [
            speed("import hotset, without torch, under 0.1 s", found, IMPORT, 0.1),
            speed("hotset --help under 0.4 s", found, HELP, 0.4),
        ],
    )


def _python() -> float:
    return _seconds([sys.executable, "-c", "pass"])


def _import() -> float:
    done = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise Unfit(_last_line(done.stderr))
    seconds, with_torch = done.stdout.split()
    if with_torch != "False":
        raise Unfit("import hotset imports torch")
    return float(seconds)


def _help() -> float:
    command = Path(sys.executable).with_name("hotset")
    if not command.exists():
        raise Unfit("the command is not installed beside this python: pip install .")
    return _seconds([str(command), "--help"])


def _seconds(command: list[str]) -> float:
    start = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    elapsed = time.perf_counter() - start
    if done.returncode != 0:
        raise Unfit(_last_line(done.stderr))
    return elapsed


def _last_line(text: str) -> str:
    return text.strip().rpartition("\n")[2] or "it failed without a word"
