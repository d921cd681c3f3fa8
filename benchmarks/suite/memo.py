"""Memoised functions: how often results are computed, what they take, and what a hit and a miss cost.

**Windows**: two ranks with two workers each read windows of eight frames of one video, each frame in eight
windows: how often is a frame computed in the first epoch, and how many bytes are kept? **Hits**: a call of a
memoised function against a copy of its value, in this process. **Misses**: two processes at once compute
functions of one millisecond, with and without hotset.
"""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import Outcome, Spread, Target, Unfit, compare
from benchmarks.memo_job import FRAME_BYTES
from benchmarks.settings import Settings

__all__ = ["memo"]

_PATIENCE = 120.0
_ROOT = Path(__file__).parents[2]
_VALUES: dict[str, tuple[Callable[[], Any], float]] = {
    "an int": (lambda: 7, 20.0),
    "1 KB": (lambda: np.zeros(1024, np.uint8), 20.0),
    "562 KB": (lambda: np.zeros((500, 375, 3), np.uint8), 40.0),
}


def memo(settings: Settings) -> Outcome:
    """Frames are computed once, hits cost microseconds, and a miss costs little more than the function."""
    frames = max(40, settings.shared_images // 10)
    targets, notes = _windows(frames, settings.pairs)
    hits, more = _hits(200 if settings.shared_images < 500 else 3000)
    misses, cost = _misses(settings)
    return Outcome([misses], [*targets, *hits, *cost], [*notes, *more])


def _windows(frames: int, rounds: int) -> tuple[list[Target], list[str]]:
    computed, kept = [], []
    once = "windows of 8 frames, 2 ranks x 2 workers: computations of a frame in the first epoch"
    size = "the same: bytes kept, in bytes of the frames"
    try:
        for _ in range(rounds):
            count, taken = _job(frames)
            computed.append(count / frames)
            kept.append(taken / (frames * FRAME_BYTES))
    except Unfit as unfit:
        reason = str(unfit)
        return [
            Target(once, None, 1.02, at_least=False, reason=reason),
            Target(size, None, 1.05, at_least=False, reason=reason),
        ], []
    return [
        Target(once, Spread.of(computed), 1.02, at_least=False),
        Target(size, Spread.of(kept), 1.05, at_least=False),
    ], [f"{frames} frames of {FRAME_BYTES:,} bytes"]


def _job(frames: int) -> tuple[int, int]:
    """Run the ranks once: how many frames they computed, and the bytes that are kept."""
    with tempfile.TemporaryDirectory() as name:
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        command = [sys.executable, *launch, "-m", "benchmarks.memo_job", str(frames), name]
        run = subprocess.run(
            command,
            cwd=Path(__file__).parents[2],
            capture_output=True,
            text=True,
            timeout=_PATIENCE,
            check=False,
        )
        if run.returncode:
            raise Unfit(run.stderr.strip().rpartition("\n")[2] or "the ranks failed")
        kept, problems = map(int, Path(name, "done.0").read_text().split())
        if problems:
            raise Unfit(f"{problems} problems in the store")
        return Path(name, "computed").stat().st_size, kept


def _hits(calls: int) -> tuple[list[Target], list[str]]:
    """Microseconds that a hit takes beyond a copy of its value."""
    import hotset

    targets, notes = [], []
    for name, (make, limit) in _VALUES.items():
        value = make()
        copy = value.copy if isinstance(value, np.ndarray) else (lambda: None)
        with hotset.memo(lambda path, value=value: value, memory="64MiB", key=name) as kept:
            kept(__file__)
            pairs = [(_micros(lambda: kept(__file__), calls), _micros(copy, calls)) for _ in range(7)]
        beyond = Spread.of(hit - bare for hit, bare in pairs)
        label = f"a hit beyond the copy of {name}, by a file's path: microseconds"
        targets.append(Target(label, beyond, limit, at_least=False))
        notes.append(f"{name}: a copy takes {Spread.of(bare for _, bare in pairs).median:.1f} microseconds")
    return targets, notes


def _micros(call: Callable[[], object], calls: int) -> float:
    begun = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - begun) / calls * 1e6


def _slow(number: int) -> Any:
    """A function that computes for a millisecond."""
    end = time.perf_counter() + 1e-3
    while time.perf_counter() < end:
        pass
    return np.full(1024, number, np.uint8)


def _misses(settings: Settings) -> tuple[Any, list[Target]]:
    """Two processes at once compute results that nobody has."""
    calls = 100 if settings.shared_images < 500 else 1000

    def measure(kind: str) -> float:
        import hotset

        function = hotset.memo(_slow, memory="64MiB", key=str(time.time_ns())) if kind == "memo" else _slow
        fork = multiprocessing.get_context("fork")
        gate, answers = fork.Barrier(2), fork.Queue()
        runs = [fork.Process(target=_run, args=(function, gate, answers, part, calls)) for part in range(2)]
        for run in runs:
            run.start()
        seconds = max(answers.get(timeout=_PATIENCE) for _ in runs)
        for run in runs:
            run.join()
        if kind == "memo":
            function.close()  # type: ignore[attr-defined]
        return seconds / calls * 1e3

    found = compare(
        {"the function": lambda: measure("plain"), "hotset.memo": lambda: measure("memo")},
        "the function",
        settings.pairs,
        title="2 processes filling one memo of functions of 1 ms, 1 KB each",
        unit="ms a call",
        subjects=("hotset.memo",),
        limits=("the function",),
        lower_is_better=True,
    )
    cost = found.ratio("hotset.memo", "the function")
    return found, [Target("2 processes filling one memo of 1 ms functions: time", cost, 1.05, at_least=False)]


def _run(function: Callable[[int], Any], gate: Any, answers: Any, part: int, calls: int) -> None:
    function(-1 - part)
    gate.wait()
    begun = time.perf_counter()
    for number in range(calls):
        function(2 * number + part)
    answers.put(time.perf_counter() - begun)
