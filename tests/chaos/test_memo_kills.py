"""Kills of workers, ranks and jobs of one memoised function: no wrong value, nothing wedged, nothing left."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from helpers import eventually, often
from kills import child, kill

import hotset
from hotset.session.sessions import create, destroy

KEYS = 300


def value_of(number: int) -> np.ndarray[Any, Any]:
    """Its bytes say whose it is; its size depends on it."""
    return np.full(200 + 3000 * (number % 17), number * 37 % 251, np.uint8)


def compute(number: int) -> np.ndarray[Any, Any]:
    time.sleep(5e-4)
    return value_of(number)


def call_for_ever(kept: Any, report: Path) -> None:
    draw = random.Random(os.getpid() * 7 + time.monotonic_ns())
    while True:
        number = draw.randrange(KEYS)
        if not np.array_equal(kept(number), value_of(number)):
            report.write_text(f"{number} was another's value")
            os._exit(3)


def keep_alive(bodies: list[Callable[[], None]]) -> None:
    """Run each body in a child, again whenever it has died."""
    children: dict[int, Callable[[], None]] = {}
    for body in bodies:
        children[child(body)] = body
    while True:
        pid, _ = os.wait()
        body = children.pop(pid)
        children[child(body)] = body


def memoised(evict: Any) -> Any:
    warnings.simplefilter("ignore", hotset.HotsetWarning)
    return hotset.memo(compute, session="kills", key="compute", evict=evict)


def job(evict: Any, report: Path) -> None:
    """A job of two ranks, which attach by themselves, with two workers each, which are forked."""
    os.setsid()  # so that all of them can be killed at once

    def rank() -> None:
        kept = memoised(evict)
        keep_alive([lambda: call_for_ever(kept, report)] * 2)

    keep_alive([rank] * 2)


def end(pid: int) -> None:
    """Kill a job with all of its processes."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    kill(pid)


@pytest.mark.chaos
@pytest.mark.timeout(600)
@pytest.mark.parametrize("evict", [None, "lru"])
def test_kills_leave_no_wrong_value_and_nothing_wedged(evict: Any, runtime: Path, tmp_path: Path) -> None:
    draw, report = random.Random(11), tmp_path / "report"
    session = create("kills", memory=6 << 20)
    jobs = [child(lambda: job(evict, report)) for _ in range(2)]
    try:
        for _ in range(often(250, 1000)):
            time.sleep(draw.random() * 0.08)
            at = draw.randrange(2)
            below = psutil.Process(jobs[at]).children(recursive=True)
            if below and draw.random() < 0.95:
                with contextlib.suppress(psutil.NoSuchProcess):
                    draw.choice(below).kill()
            elif below:
                end(jobs[at])
                jobs[at] = child(lambda: job(evict, report))
    finally:
        for pid in jobs:
            end(pid)
    assert not report.exists(), report.read_text()

    with warnings.catch_warnings(), memoised(evict) as kept:
        assert kept.check() == []
        begun = time.monotonic()
        for number in range(KEYS):
            assert np.array_equal(kept(number), value_of(number))
        assert time.monotonic() - begun < 60.0, "a dead process's claim held it up"
        assert kept.check() == []
        assert kept.stats().hits > 0
    destroy(session)
    assert eventually(lambda: not list(runtime.rglob("*.cache")))
