"""A program over one library's data: whether a cached run equals torch's, and what its epochs cost.

Each module of this folder has the programs of one library. :class:`Compatibility` runs them as tests, and
``python -m tests.compatibility`` measures them and writes docs/compatibility.md.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from observed import compare, record
from PIL import Image

import hotset

__all__ = [
    "SPAWNED",
    "Compatibility",
    "Figures",
    "Program",
    "measured",
    "numbers_of",
    "photograph",
    "programs_of",
    "write_objects",
]

SPAWNED = {"multiprocessing_context": "spawn"}  # for Program.loader
PAIRS = 3
TESTED = 21


@dataclass(frozen=True)
class Program:
    """A dataset over data that are made here, and how it is loaded and cached.

    Attributes:
        name: what the page calls it.
        write: makes the data of so many samples in an empty folder.
        make: makes the dataset; it gets the folder, or what ``place`` gives.
        samples: how many samples are measured.
        loader: arguments of the loader.
        cache: arguments of :func:`hotset.cache`.
        needs: what a user has to write beyond the two lines of the README; empty if nothing.
        place: a context in which the data can be read, a server of the folder for example.
    """

    name: str
    write: Callable[[Path, int], None]
    make: Callable[[Any], Any]
    samples: int = 400
    loader: Mapping[str, Any] = field(default_factory=dict)
    cache: Mapping[str, Any] = field(default_factory=dict)
    needs: str = ""
    place: Callable[[Path], AbstractContextManager[Any]] = contextlib.nullcontext

    def options(self, workers: int) -> dict[str, Any]:
        """The loader's arguments; those about workers only if there are any."""
        about_workers = {"multiprocessing_context", "persistent_workers", "worker_init_fn"}
        own = {name: value for name, value in self.loader.items() if workers or name not in about_workers}
        # A spawned worker imports torch, which takes longer than all epochs.
        stay = {"persistent_workers": True} if "multiprocessing_context" in own else {}
        return {"batch_size": 8, "shuffle": True, "num_workers": workers, **stay, **own}


class Compatibility:
    """The tests of a library's programs: a subclass lists these."""

    programs: list[Program]

    @pytest.mark.parametrize("workers", [0, 2])
    def test_a_cached_run_equals_torchs(self, program: Program, workers: int, tmp_path: Path) -> None:
        """Samples, order, draws and random states of three epochs; each sample is read once."""
        program.write(tmp_path, TESTED)
        options = program.options(workers)
        with program.place(tmp_path) as place:
            expected = record(lambda: torch.utils.data.DataLoader(program.make(place), **options), 3)
            gc.collect()  # some libraries open a database once in a process
            with hotset.cache(program.make(place), memory="1GiB", **program.cache) as cached:
                compare(record(lambda: hotset.DataLoader(cached, **options), 3), expected)
                stats = cached.stats()
                assert (stats.cached, stats.misses) == (len(cached), len(cached))


def programs_of(module: Any) -> list[Program]:
    """The programs of one of this folder's modules."""
    kinds = [kind for kind in vars(module).values() if isinstance(kind, type) and kind is not Compatibility]
    return [program for kind in kinds if issubclass(kind, Compatibility) for program in kind.programs]


@dataclass(frozen=True)
class Figures:
    """What was measured of a program: medians of pairs, as multiples of torch's time.

    Attributes:
        first, later: the time of an epoch.
        plan: seconds that ``hotset.cache`` took.
        torch_us: microseconds that torch takes for a sample in the first epoch.
    """

    first: float
    later: float
    plan: float
    torch_us: float


def measured(program: Program, folder: Path, workers: int = 2) -> Figures:
    """Run some epochs with hotset and some with torch, in turns."""
    program.write(folder, program.samples)
    options = {**program.options(workers), "batch_size": program.loader.get("batch_size", 32)}
    options.setdefault("persistent_workers", workers > 0)
    found: dict[str, list[tuple[float, float]]] = {"hotset": [], "torch": []}
    plans = []

    def epochs(loader: Any) -> tuple[float, float]:
        seconds = []
        for _ in range(3):
            begun = time.perf_counter()
            for _batch in loader:
                pass
            seconds.append(time.perf_counter() - begun)
        return seconds[0], (seconds[1] + seconds[2]) / 2

    def run(name: str, place: Any) -> None:
        if name == "torch":
            found[name].append(epochs(torch.utils.data.DataLoader(program.make(place), **options)))
        else:
            dataset = program.make(place)
            begun = time.perf_counter()
            with hotset.cache(dataset, memory="4GiB", **program.cache) as cached:
                plans.append(time.perf_counter() - begun)
                found[name].append(epochs(hotset.DataLoader(cached, **options)))
        gc.collect()

    with program.place(folder) as place:
        for _, name in itertools.product(range(PAIRS), ("torch", "hotset")):
            run(name, place)
    pairs = list(zip(found["hotset"], found["torch"], strict=True))
    return Figures(
        first=statistics.median(ours[0] / theirs[0] for ours, theirs in pairs),
        later=statistics.median(ours[1] / theirs[1] for ours, theirs in pairs),
        plan=statistics.median(plans),
        torch_us=statistics.median(theirs[0] for _, theirs in pairs) / program.samples * 1e6,
    )


def photograph(number: int, width: int = 320, height: int = 240) -> Image.Image:
    """A picture with the statistics of a photograph: smooth, with some noise."""
    drawn = np.random.default_rng(number)
    coarse = drawn.integers(0, 255, (height // 20, width // 20, 3), dtype=np.uint8)
    smooth = np.asarray(Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC), np.int16)
    noisy = smooth + drawn.integers(-6, 7, smooth.shape, dtype=np.int16)
    return Image.fromarray(noisy.clip(0, 255).astype(np.uint8))


def write_objects(folder: Path, count: int) -> None:
    """Write objects of a thousand equal numbers, and one that says how many there are."""
    (folder / "count").write_text(str(count))
    for number in range(count):
        np.full((20, 50), number, np.float32).tofile(folder / f"{number:05}.bin")


def numbers_of(content: Any) -> torch.Tensor:
    """The numbers in the content of one of these objects."""
    return torch.frombuffer(bytearray(content), dtype=torch.float32).reshape(20, 50)
