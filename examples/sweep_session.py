"""A sweep: four jobs that train on the same pictures with other learning rates, at the same time.

Jobs know nothing of each other; each is a Python program of its own, as a sweep's agent starts them. Three
ways to feed them are compared: no cache; hotset.cache(pictures), a cache for each job; and
hotset.cache(pictures, session=...), one for all, which they fill together. The source counts its reads.

    job lr=0.2  ──┐
    job lr=0.1  ──┤ one cache in the session ──── decode, resize: once for all four
    job lr=0.05 ──┤
    job lr=0.02 ──┘ each with its own order, random flips, network

Run it: python examples/sweep_session.py        (Pillow, scikit-learn, scikit-image, matplotlib; two minutes)
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from common import COLOURS, descend, print_table, session_for
from PIL import Image
from torch import nn
from torch.utils.data import Dataset

import hotset
from hotset.demo.photographs import Photographs, build
from hotset.units import format_bytes

WAYS = ("no cache", "a cache each", "one session")
RATES = (0.2, 0.1, 0.05, 0.02)
SIDE = 96


# ---- a job -----------------------------------------------------------------------------------------------


class Pictures(Dataset[tuple[torch.Tensor, int]]):
    """Decoded and resized photographs, uint8 (3, 96, 96); each read adds a byte to the file ``reads``."""

    def __init__(self, folder: Path, reads: Path) -> None:
        self.samples = Photographs(folder).samples
        # As numbers: a path counts in a dataset's fingerprint with that file's date.
        self.reads = tuple(os.fsencode(reads))

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        path, label = self.samples[index]
        with open(bytes(self.reads), "ab", buffering=0) as reads:
            reads.write(b".")
        with Image.open(path) as image:
            resized = image.convert("RGB").resize((SIDE, SIDE), Image.Resampling.BILINEAR)
        return torch.from_numpy(np.array(resized)).permute(2, 0, 1).contiguous(), label


def network(classes: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, 8, 8),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, 2, 1),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, 2, 1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, classes),
    )


def train(loader: Any, rate: float, epochs: int) -> list[float]:
    """Train from a fixed start; return each epoch's mean loss."""
    torch.manual_seed(0)
    net = network(6)
    means = []
    for _ in range(epochs):
        losses = []
        for pictures, labels in loader:
            flipped = pictures.flip(3) if torch.rand(()) < 0.5 else pictures
            losses.append(descend(net, flipped / 64 - 2, labels, rate))
        means.append(statistics.fmean(losses))
    return means


def job(words: argparse.Namespace) -> None:
    """Train as told; print the losses, and the bytes of the cache, for who started it."""
    torch.set_num_threads(1)
    pictures = Pictures(words.folder, words.reads)
    loading: dict[str, Any] = {"batch_size": 32, "shuffle": True, "num_workers": words.workers}
    loading["persistent_workers"] = words.workers > 0
    if words.way == "no cache":
        losses = train(torch.utils.data.DataLoader(pictures, **loading), words.rate, words.epochs)
        cached_bytes = 0
    else:
        session = words.session if words.way == "one session" else None
        with hotset.cache(pictures, session=session) as cached:
            losses = train(hotset.DataLoader(cached, **loading), words.rate, words.epochs)
            cached_bytes = cached.stats().bytes
    print(json.dumps({"losses": losses, "bytes": cached_bytes}))


# ---- the sweep -------------------------------------------------------------------------------------------


class Sweep(NamedTuple):
    """Seconds from the start of the first job to the end of the last; reads of the source; bytes of all
    caches; for each job its losses."""

    seconds: float
    reads: int
    bytes: int
    losses: list[list[float]]


def sweep(way: str, words: argparse.Namespace, folder: Path) -> Sweep:
    """Run all jobs at once."""
    reads = folder.parent / f"reads, {way}"
    reads.touch()
    told = [f"--folder={folder}", f"--reads={reads}", f"--way={way}", f"--session={words.session}"]
    told += [f"--epochs={words.epochs}", f"--workers={words.workers}"]
    begin = time.perf_counter()
    jobs = [
        subprocess.Popen(
            [sys.executable, __file__, *told, f"--rate={rate}"], stdout=subprocess.PIPE, text=True
        )
        for rate in RATES[: words.jobs]
    ]
    try:
        answers = [json.loads(one.communicate()[0]) for one in jobs]
    finally:
        for one in jobs:
            one.kill()  # does nothing to those that have ended, which after an error is not all of them
            one.wait()
    seconds = time.perf_counter() - begin
    sizes = [answer["bytes"] for answer in answers]
    held = max(sizes) if way == "one session" else sum(sizes)
    return Sweep(seconds, reads.stat().st_size, held, [answer["losses"] for answer in answers])


def print_sums(found: dict[str, Sweep], samples: int) -> None:
    rows = {
        way: (f"{one.seconds:.1f}", f"{one.reads / samples:.3f}", format_bytes(one.bytes))
        for way, one in found.items()
    }
    print_table("", ("seconds", "reads of a sample", "cached"), rows)
    same = all(one.losses == found["no cache"].losses for one in found.values())
    print(f"losses of the jobs, all three ways: {'equal' if same else 'DIFFERENT'}")


def draw(found: dict[str, Sweep], samples: int, path: Path) -> None:
    """Save the plot: total time, and reads of a sample."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 2.8), dpi=110, layout="constrained")
    seconds, reads = figure.subplots(1, 2, sharey=True)
    colours = (COLOURS[0], "#e8a87c", COLOURS[1])
    for axes, title, values, form in (
        (seconds, "seconds, all jobs", [one.seconds for one in found.values()], "%.1f"),
        (reads, "reads of a sample", [one.reads / samples for one in found.values()], "%.2f"),
    ):
        bars = axes.barh(list(found), values, 0.65, color=colours)
        axes.bar_label(bars, fmt=form, padding=3, fontsize=9)
        axes.set_title(title, fontsize=10)
        axes.margins(x=0.16)
        axes.spines[["top", "right"]].set_visible(False)
    seconds.invert_yaxis()
    figure.savefig(path, format="png")


def main() -> None:
    parser = argparse.ArgumentParser(
        description="four jobs of a sweep, without caches, with, and sharing one"
    )
    parser.add_argument("--session", help="name or number of a session; else one is made, and destroyed")
    parser.add_argument("--jobs", type=int, default=len(RATES), help=f"1 to {len(RATES)}")
    parser.add_argument("--samples", type=int, default=800, help="pictures to train on")
    parser.add_argument("--size", type=int, default=512, help="pixels of a picture's side, as a JPEG")
    parser.add_argument("--epochs", type=int, default=4, help="of each job")
    parser.add_argument("--workers", type=int, default=1, help="of each job's loader")
    parser.add_argument("--plot", type=Path, default=Path("session-sweep.png"), help="a PNG")
    for name, kind in (("--way", str), ("--rate", float), ("--folder", Path), ("--reads", Path)):
        parser.add_argument(name, type=kind, help=argparse.SUPPRESS)  # what jobs are told
    words = parser.parse_args()
    if words.way is not None:
        job(words)
        return
    with tempfile.TemporaryDirectory() as temporary, session_for(words.session) as words.session:
        folder = build(Path(temporary) / "pictures", count=words.samples, size=words.size)
        found = {way: sweep(way, words, folder) for way in WAYS}
    print_sums(found, words.samples)
    draw(found, words.samples, words.plot)
    print(f"saved {words.plot}")


if __name__ == "__main__":
    main()
