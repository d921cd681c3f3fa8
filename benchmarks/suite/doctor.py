"""``hotset doctor`` against what it predicts: thirteen trainings, each judged and then run both ways.

Each is bound by something else: reading, waiting, decoding, live transforms, collate, the step, with 0 to 4
workers; and one by epochs of a few batches. All rates are of whole epochs. What was predicted is compared
with the program's own figure of a run without hotset, with a run over a cache (and one over a cache with
torch's loader, where that is advised), and with a sweep over numbers of workers. A round does each once; a
factor is the median over the rounds, because two runs of one program differ too: by how much is told beside
it, and so is how much of the cores other programs took meanwhile. A program without workers has OpenMP's
threads, which spin where another process has their core: it then runs at a fiftieth of its speed, and no
figure of that round means anything.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
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
    ("short", 2),
    ("collate", 1),
    ("small", 0),
    ("large", 2),
    ("step", 2),
    ("device", 1),
)
_SWEEP = (0, 1, 2, 3, 4)
_ROUNDS = 3
_PATIENCE = 300.0
_AS_IT_IS = "with the loader as it is"  # of a line of advice


@dataclass(frozen=True)
class _Round:
    """Rates in samples/s: what the doctor said, and what the program then measured."""

    said: float
    plain: float
    said_cached: float
    cached: float
    said_torch: float | None  # over a cache, with the loader as it is; None if that was not advised
    torch: float
    named: int
    sweep: dict[int, float]
    others: float  # cores that other programs took meanwhile


def doctor(settings: Settings) -> Outcome:
    """Predicted over measured, as a factor of 1 or more: 1.10 as it is, 1.15 with a cache."""
    cases = _CASES[:1] if settings.quick else _CASES
    seconds = 0.5 if settings.quick else 4.0
    now, cached, torchs, best, watching, notes = [], [], [], [], [], []
    for name, workers in cases:
        folder = settings.out / "doctor"
        _rate(folder, name, 0, seconds)  # makes the data
        rounds = [_round(folder, name, workers, seconds) for _ in range(1 if settings.quick else _ROUNDS)]
        now.append(statistics.median(_off(one.said, one.plain) for one in rounds))
        cached.append(statistics.median(_off(one.said_cached, one.cached) for one in rounds))
        advised = [(one.said_torch, one.torch) for one in rounds if one.said_torch]
        if advised:
            torchs.append(statistics.median(_off(said, measured) for said, measured in advised))
        best.append(_short_of_the_best(rounds))
        watching.append(_watching(_command(folder, name, workers, 2 * seconds)))
        notes.append(
            f"{name}, {workers} workers, said / measured: "
            f"as it is {_pairs((one.said, one.plain) for one in rounds)}, median factor {now[-1]:.2f}; "
            f"cached {_pairs((one.said_cached, one.cached) for one in rounds)}, "
            f"median factor {cached[-1]:.2f}; "
            f"with torch's loader {_pairs(advised) or 'not advised'}; "
            f"equal runs differ by {_differ(rounds):.2f}, "
            f"other programs took {max(one.others for one in rounds):.2f} cores; "
            f"named {', '.join(str(one.named) for one in rounds)} workers, {1 / best[-1]:.2f} of the best; "
            f"watching {watching[-1]:.3f}"
        )
        print(notes[-1], file=sys.stderr, flush=True)
    return Outcome(
        [],
        [
            Target("as it is, the worst of thirteen: predicted and measured, the greater over the less",
                   _worst(now), 1.10, at_least=False),
            Target("with a cache, the same", _worst(cached), 1.15, at_least=False),
            Target("with a cache and the loader as it is, where that is advised", _worst(torchs or [1.0]),
                   1.15, at_least=False),
            Target("best of a sweep over the workers that are named", _worst(best), 1.05, at_least=False),
            Target("time with clocks over time without, the median of thirteen", Spread.of(watching), 1.02,
                   at_least=False),
        ],
        notes,
    )  # fmt: skip


def _pairs(rates: Iterable[tuple[float, float]]) -> str:
    return ", ".join(f"{said:,.0f} / {measured:,.0f}" for said, measured in rates)


def _short_of_the_best(rounds: list[_Round]) -> float:
    """The best of the sweep over the number most often named, each the median of its rounds."""
    named = statistics.mode(one.named for one in rounds)
    counts = set.intersection(*(set(one.sweep) for one in rounds)) | {named}
    speeds = {
        count: statistics.median(one.sweep[count] for one in rounds if count in one.sweep) for count in counts
    }
    return max(speeds.values()) / speeds[named]


def _differ(rounds: list[_Round]) -> float:
    """The fastest over the slowest of runs that are equal, of those as it is and of those with a cache."""
    return max(
        max(rates) / min(rates) for rates in ([one.plain for one in rounds], [one.cached for one in rounds])
    )


def _worst(factors: list[float]) -> Spread:
    """All must be below the bound: the greatest counts."""
    return Spread(max(factors), min(factors), max(factors))


def _off(said: float, measured: float) -> float:
    return max(said / measured, measured / said) if said and measured else float("inf")


def _round(folder: Path, name: str, workers: int, seconds: float) -> _Round:
    begin, before = time.perf_counter(), _taken_by_others()
    plain = [_rate(folder, name, workers, seconds)]
    judged = _judged(folder, name, workers, seconds)
    plain += [_rate(folder, name, workers, seconds) for _ in range(2)]
    named = judged["num_workers"]["best"]
    cached = _rate(folder, name, workers, seconds, "--cached")
    said_torch = next(
        (one["samples_per_second"] for one in judged["advice"] if _AS_IT_IS in one["line"]), None
    )
    torch = _rate(folder, name, workers, seconds, "--cached-torch") if said_torch else 0.0
    sweep = {count: _rate(folder, name, count, seconds) for count in sorted({*_SWEEP, named})}
    others = (_taken_by_others() - before) / (time.perf_counter() - begin)
    return _Round(
        judged["now"]["samples_per_second"],
        statistics.median(plain),
        judged["cached"]["samples_per_second"] or 0.0,
        cached,
        said_torch,
        torch,
        named,
        sweep,
        others,
    )


def _taken_by_others() -> float:
    """Processor seconds of all processes of this machine but this one and those that it has waited for."""
    names = ("user", "nice", "system", "idle", "iowait", "irq", "softirq")
    fields = dict(zip(names, map(int, Path("/proc/stat").read_text().split()[1:8]), strict=True))
    busy = sum(value for name, value in fields.items() if name not in ("idle", "iowait"))
    ours = sum(os.times()[:4])
    return busy / os.sysconf("SC_CLK_TCK") - ours


def _rate(folder: Path, name: str, workers: int, seconds: float, *more: str) -> float:
    return float(json.loads(_run(_command(folder, name, workers, seconds) + [*more]))["rate"])


def _judged(folder: Path, name: str, workers: int, seconds: float) -> dict[str, Any]:
    doctor = [sys.executable, "-m", "hotset", "doctor", "--json", "--seconds", str(2 * seconds), "--"]
    judged: dict[str, Any] = json.loads(_run(doctor + _command(folder, name, workers, 1e6)))
    return judged


def _watching(command: list[str]) -> float:
    """The time of an epoch with clocks, as a multiple of one without: the median of pairs in one process."""
    with tempfile.TemporaryDirectory() as ledger:
        environment = watched_environment(WatchOptions(ledger, math.inf, epoch_seconds=math.inf), os.environ)
        ratios = json.loads(_run([*command, "--watching"], environment))["ratios"]
    return float(statistics.median(ratios))


def _command(folder: Path, name: str, workers: int, seconds: float) -> list[str]:
    return [sys.executable, str(_PROGRAM), name, str(workers), str(seconds), str(folder / name)]


def _run(command: list[str], environment: Mapping[str, str] | None = None) -> str:
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=_PATIENCE, check=True, env=environment
    )
    return done.stdout
