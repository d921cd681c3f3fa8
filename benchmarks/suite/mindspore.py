"""MindSpore's cache on the same images and transforms, and on tiny rows.

One round runs every scenario once in each engine: the pipeline without a cache; a new session, filled and
read again; the same session in a second process; a new session that has to spill. The processes are started
before and have imported what they need; figures are seconds from opening the pipeline (``hotset.cache(...)``,
building mindspore's) to the end of the first epoch, or of a later epoch alone.

mindspore decodes in C++ threads and torch in worker processes, by other libraries, so that the pipelines
differ before any cache: both uncached ones stand beside the cached ones. Samples that a cache gives are
compared with those of its own uncached pipeline, by checksum.

It needs an interpreter that has mindspore, in an environment of its own (2.8 GB), named by the environment
variable ``HOTSET_BENCH_MINDSPORE``::

    python3.11 -m venv ms
    ms/bin/pip install mindspore==2.10.0
    HOTSET_BENCH_MINDSPORE=ms/bin/python python -m benchmarks mindspore mindspore-tiny
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks import data
from benchmarks.harness import Comparison, Outcome, Row, Spread, Target, Unfit, explain
from benchmarks.jobs import Job
from benchmarks.session_job import new_session
from benchmarks.settings import Settings
from benchmarks.suite.contest import lead
from benchmarks.truth import WrongData

__all__ = ["Server", "mindspore", "mindspore_tiny"]

VARIABLE = "HOTSET_BENCH_MINDSPORE"
MISSING = (
    "mindspore is not here; `pip install mindspore==2.10.0` in an environment of its own, and name its "
    f"interpreter by the environment variable {VARIABLE}"
)

PLAIN = "mindspore, no cache"
CACHE = "mindspore, its cache"
TORCH = "torch's DataLoader, no cache"
HOTSET = "hotset, in a session"

FIRST = "first epoch"
LATER = "later epochs"
SECOND = "second process in the session, first epoch"
SPILLED_FIRST = "all spilled, first epoch"
SPILLED_LATER = "all spilled, later epochs"

_JOB = "benchmarks.mindspore_job"
_LATER_EPOCHS = 3
# Without a cache an epoch is as long as the last one, and torch's take seconds.
_LATER_PLAIN = 1
_PATIENCE_SECONDS = 60

# Scenario to seconds, of one engine in one round.
Figures = dict[str, float]


class Side(NamedTuple):
    """One of the two sides: two processes, and how each opens a session.

    Attributes:
        first, second: processes with everything imported.
        plain, cached: names of the engine without a cache and with it, as a job knows them.
        session: begins a session, which spills everything if so asked.
        more: what a question says besides.
    """

    first: Job
    second: Job
    plain: str
    cached: str
    session: Callable[[bool], contextlib.AbstractContextManager[str]]
    more: dict[str, Any]


def mindspore(settings: Settings) -> Outcome:
    """500 JPEGs of 1000x750 to float32: ahead of mindspore's cache in each row."""
    count = 24 if settings.quick else 500
    return _contest(settings, "images", f"{count} JPEGs of 1000x750", image_folder(settings.out, count))


def mindspore_tiny(settings: Settings) -> Outcome:
    """Rows of 210 B: ahead of mindspore's cache in each row."""
    count = settings.small_rows
    return _contest(settings, "rows", f"{count:,} rows of 210 B", _rows(settings.out, count))


def image_folder(out: Path, count: int) -> Path:
    """A folder of JPEG files of 1000x750, cut from photographs; made where missing."""
    from PIL import Image

    from hotset.demo.photographs import build

    folder = out / f"photographs-1000x750-{count}"
    if len(sorted(folder.rglob("*.jpg"))) != count:
        build(folder, count=count, size=1000)
        for file in sorted(folder.rglob("*.jpg")):
            with Image.open(file) as picture:
                cut = picture.crop((0, 0, 1000, 750))
            cut.save(file, quality=90)
    return folder


def _rows(out: Path, count: int) -> Path:
    folder = out / f"rows-{count}"
    folder.mkdir(exist_ok=True)
    np.save(folder / "rows.npy", data.byte_rows(count).numpy())
    return folder


def _contest(settings: Settings, kind: str, title: str, folder: Path) -> Outcome:
    scenarios = (FIRST, LATER, SECOND, SPILLED_FIRST, SPILLED_LATER)
    python = os.environ.get(VARIABLE)
    if not python:
        targets = [_target(title, scenario, None, MISSING) for scenario in scenarios]
        return Outcome([], targets, [MISSING])
    figures: dict[str, list[Figures]] = {}
    openings: dict[str, list[float]] = {}
    unfit: dict[str, str] = {}
    spill = settings.out / "spill-mindspore"
    spill.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        server = stack.enter_context(Server(Path(python).parent / "dataset-cache", spill))
        jobs = [stack.enter_context(Job(_JOB, python)) for _ in range(2)]
        ours = [stack.enter_context(Job(_JOB)) for _ in range(2)]
        if kind == "rows":
            jobs[0].ask(do="write", folder=str(folder))
        more = {"data": kind, "folder": str(folder)}
        sides = [
            Side(jobs[0], jobs[1], "mindspore", "mindspore", server.session, {**more, "port": server.port}),
            Side(ours[0], ours[1], "torch", "hotset", _ours(spill), more),
        ]
        names = {0: (PLAIN, CACHE), 1: (TORCH, HOTSET)}
        # A first round is not counted: it warms the page cache, and has every sample compared.
        for number in range(1 + (1 if settings.quick else settings.pairs)):
            for turn in range(2):
                which = (number + turn) % 2
                plain, cached = names[which]
                try:
                    without, with_cache, opened = _round(sides[which], whole=number == 0)
                except (Unfit, WrongData) as reason:
                    unfit[plain] = unfit[cached] = explain(reason)
                    continue
                if number:
                    figures.setdefault(plain, []).append(without)
                    figures.setdefault(cached, []).append(with_cache)
                    for name, seconds in zip((plain, cached), opened, strict=True):
                        openings.setdefault(name, []).append(seconds)
    outcome = Outcome(notes=[_told(name, Spread.of(seconds)) for name, seconds in openings.items()])
    for scenario in scenarios:
        found = _comparison(f"{title}: {scenario}", scenario, figures, unfit)
        outcome.comparisons.append(found)
        outcome.targets.append(_target(title, scenario, found, ""))
    return outcome


def _round(side: Side, whole: bool) -> tuple[Figures, Figures, tuple[float, float]]:
    """Each scenario once: seconds without a cache, with it, and what opening took."""
    without, sums = _ask(side.first, side, side.plain, None, False, _LATER_PLAIN, whole)
    plain = {FIRST: without["opening"] + without["seconds"][0], LATER: _later(without)}
    plain |= {SECOND: plain[FIRST], SPILLED_FIRST: plain[FIRST], SPILLED_LATER: plain[LATER]}
    with side.session(False) as session:
        filled, of_filled = _ask(side.first, side, side.cached, session, False, _LATER_EPOCHS, whole)
        second, of_second = _ask(side.second, side, side.cached, session, False, 0, whole)
    with side.session(True) as session:
        spilled, of_spilled = _ask(side.first, side, side.cached, session, True, _LATER_EPOCHS, whole)
    for answer in (filled, second, spilled):
        if answer["count"] != without["count"]:
            raise WrongData(f"an epoch of {answer['count']} samples, and of {without['count']} uncached")
    if whole:
        for what, found in (("filled", of_filled), ("second", of_second), ("spilled", of_spilled)):
            if found != sums:
                raise WrongData(f"{what}: {(found - sums).total()} samples differ from the uncached ones")
    cached = {
        FIRST: filled["opening"] + filled["seconds"][0],
        LATER: _later(filled),
        SECOND: second["opening"] + second["seconds"][0],
        SPILLED_FIRST: spilled["opening"] + spilled["seconds"][0],
        SPILLED_LATER: _later(spilled),
    }
    return plain, cached, (without["opening"], filled["opening"])


def _later(answer: dict[str, Any]) -> float:
    return Spread.of(answer["seconds"][1:]).median


def _ask(
    job: Job, side: Side, engine: str, session: str | None, spills: bool, later: int, whole: bool
) -> tuple[dict[str, Any], Counter[int]]:
    answer = job.ask(
        engine=engine, session=session, spills=spills, epochs=1 + later, whole=whole, **side.more
    )
    return answer, Counter(answer["sums"])


def _comparison(
    title: str, scenario: str, figures: dict[str, list[Figures]], unfit: dict[str, str]
) -> Comparison:
    rows = {}
    for name in (PLAIN, CACHE, TORCH, HOTSET):
        why = unfit.get(name, "")
        rows[name] = Row(name, [] if why else [one[scenario] for one in figures.get(name, [])], why)
    return Comparison(title, "s/epoch", CACHE, rows, (HOTSET,), (), lower_is_better=True)


def _target(title: str, scenario: str, found: Comparison | None, reason: str) -> Target:
    text = f"{title}, {scenario}: ahead of mindspore's cache"
    return Target(text, None, 1.0, reason=reason) if found is None else lead(text, found, HOTSET, CACHE, 1.0)


def _told(name: str, opening: Spread) -> str:
    return f"{name}: opening took {1e3 * opening.median:.0f} ms, which is in the figures of first epochs"


def _ours(spill: Path) -> Callable[[bool], contextlib.AbstractContextManager[str]]:
    return lambda spills: new_session(0, spill) if spills else new_session()


class Server:
    """mindspore's cache server while the context lasts.

    Args:
        program: its command line.
        spill: the folder that it spills to.

    Attributes:
        port: where it listens.
    """

    def __init__(self, program: Path, spill: Path) -> None:
        self._program = program
        self._spill = spill
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = int(free.getsockname()[1])

    def __enter__(self) -> Server:
        self._run("--start", "-s", str(self._spill), "-w", "2", "-l", "2")
        return self

    def __exit__(self, *_: object) -> None:
        self._run("--stop")

    @contextlib.contextmanager
    def session(self, spills: bool) -> Iterator[str]:
        """The number of a new session; whether it spills is each cache's own matter there."""
        number = self._run("--generate_session").split()[-1]
        try:
            yield number
        finally:
            self._run("--destroy_session", number)

    def _run(self, *words: str) -> str:
        # The server looks for its libraries by the environment that its interpreter's folder begins.
        path = f"{self._program.parent}{os.pathsep}{os.environ.get('PATH', '')}"
        done = subprocess.run(
            [str(self._program), *words, "-p", str(self.port)],
            env={**os.environ, "PATH": path},
            capture_output=True,
            text=True,
            check=False,
            timeout=_PATIENCE_SECONDS,
        )
        if done.returncode:
            raise Unfit(f"dataset-cache {words[0]}: {(done.stderr or done.stdout).strip().splitlines()[-1]}")
        return done.stdout
