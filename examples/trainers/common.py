"""What the trainers share: pictures to train on, and how an epoch is told. None of it is about caching.

They import it first: it makes torchvision importable where its compiled operators do not load.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

with contextlib.suppress(ImportError):
    # Some torchvisions cannot be imported beside a torch without CUDA; this tree's own helper mends that.
    from benchmarks.operators import define_torchvision_operators

    define_torchvision_operators()

SIZE = (480, 360)


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """What each trainer takes: a folder for its data, epochs, samples, workers; with hotset or without."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path, help="where its data are made, unless they are there")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--samples", type=int, default=256)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument(
        "--hotset", action="store_true", help="with the line that adds hotset, if there is one"
    )
    return parser.parse_args(words)


def pictures(folder: Path, count: int) -> list[Path]:
    """So many JPEGs of 480x360 in two classes, with the statistics of photographs: noise, smoothed."""
    classes = [folder / "pictures" / name for name in ("cats", "dogs")]
    files = [classes[number % 2] / f"{number:05}.jpg" for number in range(count)]
    rng = np.random.default_rng(0)
    for file in files:
        coarse = rng.integers(0, 256, (24, 32, 3), np.uint8)
        if not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            part = file.with_suffix(f".{time.time_ns()}")
            Image.fromarray(coarse).resize(SIZE, Image.Resampling.BICUBIC).save(part, "JPEG", quality=90)
            part.rename(file)
    return files


class Epochs:
    """Prints a line of JSON for each epoch: its seconds and its losses."""

    def __init__(self) -> None:
        self._losses: list[float] = []
        self._start = time.perf_counter()

    def begin(self, *_: Any) -> None:
        """An epoch begins."""
        self._start = time.perf_counter()

    def step(self, loss: float) -> None:
        """A step was made, with this loss."""
        self._losses.append(loss)

    def end(self, *_: Any) -> None:
        """The epoch has ended."""
        seconds, losses, self._losses = time.perf_counter() - self._start, self._losses, []
        print(json.dumps({"seconds": seconds, "losses": losses}), flush=True)
