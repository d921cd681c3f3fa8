"""Programs that know nothing of hotset, as they are and below ``hotset run``: no line of them is changed.

=============  ========================================================================================
PIL            photographs, a crop and a flip at random
OpenCV         mosaics of four photographs, three of them at random
Trainer        a Hugging Face dataset of photographs, transformers' Trainer
Ultralytics    YOLO from scratch with its mosaics
video          single frames of a video by their times, as LeRobot reads them (``--memo``)
=============  ========================================================================================

A program says how long each epoch took and each of its losses. What is compared is the time of its second
epoch, the first that finds anything kept; a note says what the first one took, which keeps it. All losses of
all epochs must be equal, bit for bit. Programs whose library is missing are left out and said so.
"""

from __future__ import annotations

import importlib.util
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks import data
from benchmarks.harness import Outcome, Target, Unfit, compare
from benchmarks.settings import Settings
from benchmarks.truth import WrongData

__all__ = ["run_programs"]

PLAIN, OURS = "the program as it is", "below hotset run"
_EPOCHS = 3
_PROGRAMS = Path(__file__).parents[1] / "programs"


class _Program(NamedTuple):
    title: str
    file: str
    needs: tuple[str, ...]
    options: tuple[str, ...] = ()
    count: int = 500  # pictures, or frames


_ALL = (
    _Program("PIL", "pil_program.py", ("PIL",)),
    _Program("OpenCV, mosaics", "cv2_program.py", ("cv2",)),
    _Program("transformers' Trainer", "trainer_program.py", ("datasets", "transformers")),
    _Program("Ultralytics, mosaics", "ultralytics_program.py", ("ultralytics",)),
    _Program("video", "video_program.py", ("av",), ("--memo", "robot_frames:decode_video_frames"), 300),
)


def run_programs(settings: Settings) -> Outcome:
    """All programs; the second epoch's time as a multiple of the plain program's."""
    outcome = Outcome()
    for program in _ALL:
        one = _one(settings, program)
        outcome.comparisons += one.comparisons
        outcome.targets += one.targets
        outcome.notes += one.notes
    return outcome


def _one(settings: Settings, program: _Program) -> Outcome:
    missing = [name for name in program.needs if importlib.util.find_spec(name) is None]
    if missing:
        return Outcome([], [], [f"{program.title} is left out: {missing[0]} is not installed"])
    count = 24 if settings.quick else program.count
    source = _video(settings, count) if program.file == "video_program.py" else _pictures(settings, count)
    plain = _Runs([], program, source)
    ours = _Runs([sys.executable, "-m", "hotset", "run", *program.options, "--"], program, source, like=plain)
    found = compare(
        {PLAIN: plain, OURS: ours},
        PLAIN,
        min(settings.pairs, 3),
        title=f"Second epoch of {program.title}, s",
        subjects=(OURS,),
        lower_is_better=True,
    )
    text = f"{found.title}: below hotset run, as a multiple of the program's own"
    target = Target(text, found.ratio(OURS, PLAIN), 1.0, at_least=False, reason=found.rows[OURS].unfit)
    notes = ours.report[-8:]
    counted = zip(ours.first[1:], plain.first[1:], strict=False)  # after the round that warms up
    first = [below / alone for below, alone in counted]
    if first:
        said = f"{statistics.median(first):.2f}x ({min(first):.2f} to {max(first):.2f})"
        notes = [f"the first epoch took {said} of the plain program's", *notes]
    return Outcome([found], [target], [f"{program.title}: {note}" for note in notes])


class _Runs:
    """A contestant: runs the program, and says how long its second epoch took."""

    def __init__(self, before: list[str], program: _Program, source: Path, like: _Runs | None = None) -> None:
        self._command = [*before, sys.executable, str(_PROGRAMS / program.file), str(source), str(_EPOCHS)]
        self._like = like
        self.losses: list[list[float]] = []
        self.first: list[float] = []  # seconds, of each run
        self.report: list[str] = []

    def __call__(self) -> float:
        path = os.pathsep.join([str(_PROGRAMS.parents[1]), os.environ.get("PYTHONPATH", "")])
        done = subprocess.run(
            self._command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path}
        )
        epochs = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"seconds"')]
        if done.returncode != 0 or len(epochs) != _EPOCHS:
            raise Unfit(done.stderr.strip().rpartition("\n")[2] or "it failed without a word")
        losses = [epoch["losses"] for epoch in epochs]
        for before in (self.losses, self._like.losses if self._like is not None else []):
            if before and before != losses:
                raise WrongData("the losses are not those of the plain program")
        if not all(losses):
            raise WrongData("an epoch without losses")
        self.losses = losses
        self.first.append(float(epochs[0]["seconds"]))
        self.report = [line for line in done.stderr.splitlines() if line.startswith(("hotset:", "  "))]
        return float(epochs[1]["seconds"])


def _pictures(settings: Settings, count: int) -> Path:
    files = data.photographs(settings.out, count)
    return Path(os.path.commonpath(files))


def _video(settings: Settings, count: int) -> Path:
    """A video of noise that moves, with a key frame every 12 frames."""
    import av  # type: ignore[import-not-found]

    place = settings.out / f"video-{count}.mp4"
    if place.exists():
        return place
    settings.out.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    ground = rng.integers(0, 255, (480, 640, 3), np.uint8)
    with av.open(str(place), "w") as container:
        stream = container.add_stream("mpeg4", rate=10)
        stream.width, stream.height, stream.pix_fmt, stream.gop_size = 640, 480, "yuv420p", 12
        for number in range(count):
            picture = av.VideoFrame.from_ndarray(np.roll(ground, number * 3, axis=1), format="rgb24")
            container.mux(stream.encode(picture))
        container.mux(stream.encode())
    return place
