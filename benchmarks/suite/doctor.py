"""``hotset doctor`` against what it predicts: twelve trainings, each judged once and then run both ways.

Each is bound by something else: reading, waiting, decoding, live transforms, collate, the step, with 0 to 4
workers. What was predicted is compared with the program's own figure of a run without hotset, with a run over
a cache, and with a sweep over numbers of workers.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.harness import Outcome, Spread, Target
from benchmarks.settings import Settings
from hotset.run.environment import WatchOptions, watched_environment

__all__ = ["doctor"]

_PROGRAM = Path(__file__).parents[1] / "programs" / "doctor_program.py"
_CASES = (
    ("read", 0),
    ("read", 2),
    ("wait", 1),
    ("wait", 4),
    ("decode", 0),
    ("decode", 2),
    ("live", 2),
    ("collate", 1),
    ("small", 0),
    ("large", 2),
    ("step", 2),
    ("device", 1),
)
_SWEEP = (0, 1, 2, 3, 4)
_PATIENCE = 300.0


def doctor(settings: Settings) -> Outcome:
    """Predicted over measured, as a factor of 1 or more: 1.10 as it is, 1.15 with a cache."""
    cases = _CASES[:1] if settings.quick else _CASES
    seconds = 0.5 if settings.quick else 4.0
    now, cached, best, watching, notes = [], [], [], [], []
    for name, workers in cases:
        one = _case(settings.out / "doctor", name, workers, seconds)
        now.append(_off(one["judged"]["now"]["samples_per_second"], one["plain"]))
        cached.append(_off(one["judged"]["cached"]["samples_per_second"] or 0.0, one["cached"]))
        best.append(max(one["sweep"].values()) / one["sweep"][one["named"]])
        watching.append(one["watching"])
        notes.append(
            f"{name}, {workers} workers: {one['judged']['now']['samples_per_second']:,.0f} said, "
            f"{one['plain']:,.0f} as it is, {one['watching']:.3f} of the time without clocks; "
            f"cached {one['judged']['cached']['samples_per_second'] or 0:,.0f} said, "
            f"{one['cached']:,.0f}; {one['named']} workers named, of the best of the sweep "
            f"{1 / best[-1]:.2f}"
        )
    return Outcome(
        [],
        [
            Target("as it is, the worst of twelve: predicted and measured, the greater over the less",
                   _worst(now), 1.10, at_least=False),
            Target("with a cache, the same", _worst(cached), 1.15, at_least=False),
            Target("best of a sweep over the workers that are named", _worst(best), 1.05, at_least=False),
            Target("time with clocks over time without, the median of twelve", Spread.of(watching), 1.02,
                   at_least=False),
        ],
        notes,
    )  # fmt: skip


def _worst(factors: list[float]) -> Spread:
    """All must be below the bound: the greatest counts."""
    return Spread(max(factors), min(factors), max(factors))


def _off(said: float, measured: float) -> float:
    return max(said / measured, measured / said) if said and measured else float("inf")


def _case(folder: Path, name: str, workers: int, seconds: float) -> dict[str, Any]:
    def rate(count: int, *more: str) -> float:
        return float(json.loads(_run(_command(folder, name, count, seconds) + [*more]))["rate"])

    rate(0)  # makes the data
    plain = [rate(workers)]
    watched = _command(folder, name, workers, 1e6)
    hotset = [
        sys.executable,
        "-m",
        "hotset",
        "doctor",
        "--json",
        "--seconds",
        str(2 * seconds),
        "--",
        *watched,
    ]
    judged = json.loads(_run(hotset))
    plain.append(rate(workers))
    plain.append(rate(workers))
    named = judged["num_workers"]["best"]
    sweep = {count: rate(count) for count in {*_SWEEP, named}}
    return {
        "judged": judged,
        "plain": statistics.median(plain),
        "watching": _watching(_command(folder, name, workers, 2 * seconds)),
        "cached": rate(workers, "--cached"),
        "named": named,
        "sweep": sweep,
    }


def _watching(command: list[str]) -> float:
    """The time of an epoch with clocks, as a multiple of one without: the median of pairs in one process."""
    with tempfile.TemporaryDirectory() as ledger:
        environment = watched_environment(WatchOptions(ledger, 1e6), os.environ)
        ratios = json.loads(_run([*command, "--watching"], environment))["ratios"]
    return statistics.median(ratios)


def _command(folder: Path, name: str, workers: int, seconds: float) -> list[str]:
    return [sys.executable, str(_PROGRAM), name, str(workers), str(seconds), str(folder / name)]


def _run(command: list[str], environment: Mapping[str, str] | None = None) -> str:
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=_PATIENCE, check=True, env=environment
    )
    return done.stdout
