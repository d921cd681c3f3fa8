"""Training from slow shared storage: each file is fetched once, and the random crops stay random.

What is slow is the source, so the cache stands right behind it, on the files' bytes. Shuffling, decoding and
random transforms come after it, live in every epoch. Ranks of a DistributedDataParallel training that each
take their shard of the data share the one cache.

    shared storage ── bytes of a file ──┤ cache ├── decode ── random crop, flip ── batches ── MobileNetV2

The storage is a stand-in for NFS and no NFS: files of this disk, whose reading is made to wait for a latency
and then for its turn on a link that all processes share. Nothing is fetched, and nothing left behind.

Run it: python examples/slow_storage.py [--ranks 2]        (Pillow, scikit-learn, scikit-image, matplotlib;
two minutes)
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import gc
import io
import os
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from common import descend, draw_epochs, print_table, session_for
from PIL import Image
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset
from torch.utils.data.distributed import DistributedSampler

import hotset
from hotset.demo.photographs import Photographs, build

CROPPED = 32
LEARNING_RATE = 0.02


# ---- data ------------------------------------------------------------------------------------------------


class Link:
    """The way to the storage: a latency for each request, and a bandwidth that all processes share.

    Its state is a file of this machine: the time at which it is free next, and the requests so far.
    """

    def __init__(self, file: Path, bytes_per_second: float, latency: float) -> None:
        # As numbers: a path counts in a dataset's fingerprint with that file's date, and this one changes
        # with every request.
        self.path = tuple(os.fsencode(file))
        self.bytes_per_second = bytes_per_second
        self.latency = latency

    @property
    def file(self) -> str:
        return os.fsdecode(bytes(self.path))

    def read(self, path: str) -> bytes:
        content = Path(path).read_bytes()
        with open(self.file, "r+b", buffering=0) as state:
            fcntl.flock(state, fcntl.LOCK_EX)
            free, requests = struct.unpack("dq", state.read(16).ljust(16, b"\0"))
            ready = max(time.monotonic() + self.latency, free) + len(content) / self.bytes_per_second
            os.pwrite(state.fileno(), struct.pack("dq", ready, requests + 1), 0)
        time.sleep(max(0.0, ready - time.monotonic()))
        return content

    @property
    def requests(self) -> int:
        """Of all processes."""
        return int(struct.unpack("dq", Path(self.file).read_bytes().ljust(16, b"\0"))[1])


def random_crop(content: bytes) -> torch.Tensor:
    """Decode a JPEG; return a random square of it, uint8 (3, 32, 32), mirrored half the time."""
    with Image.open(io.BytesIO(content)) as image:
        image.draft("RGB", (4 * CROPPED, 4 * CROPPED))  # decodes no larger than is needed
        side = float(torch.empty(()).uniform_(0.5, 1.0)) * min(image.size)
        left, top = (torch.rand(2) * torch.tensor([image.width - side, image.height - side])).tolist()
        box = (left, top, left + side, top + side)
        cropped = image.convert("RGB").resize((CROPPED, CROPPED), Image.Resampling.BILINEAR, box=box)
    pixels = torch.frombuffer(bytearray(cropped.tobytes()), dtype=torch.uint8).view(CROPPED, CROPPED, 3)
    return (pixels.flip(1) if torch.rand(()) < 0.5 else pixels).permute(2, 0, 1).contiguous()


class Pictures(Dataset[tuple[torch.Tensor, int]]):
    """Files of the storage, and what ``transform`` makes of their bytes."""

    def __init__(self, samples: list[tuple[str, int]], link: Link) -> None:
        self.samples = samples
        self.link = link
        self.transform = random_crop

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        path, label = self.samples[index]
        return self.transform(self.link.read(path)), label


# ---- network ---------------------------------------------------------------------------------------------


class Inverted(nn.Module):
    """MobileNetV2's block: widen, convolve each channel by itself, narrow."""

    def __init__(self, width_in: int, width: int, widen: int, stride: int) -> None:
        super().__init__()
        inner = width_in * widen
        self.adds = stride == 1 and width_in == width
        self.body = nn.Sequential(
            nn.Conv2d(width_in, inner, 1, bias=False),
            nn.BatchNorm2d(inner),
            nn.ReLU6(),
            nn.Conv2d(inner, inner, 3, stride, 1, groups=inner, bias=False),
            nn.BatchNorm2d(inner),
            nn.ReLU6(),
            nn.Conv2d(inner, width, 1, bias=False),
            nn.BatchNorm2d(width),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.body(x)
        return x + y if self.adds else y


def mobilenet(classes: int) -> nn.Module:
    """MobileNetV2 at half its width, 0.7 million parameters: a step keeps up with two decoding workers."""
    layers: list[nn.Module] = [nn.Conv2d(3, 16, 3, 2, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU6()]
    width_in = 16
    for widen, width, blocks, stride in (
        (1, 8, 1, 1),
        (6, 16, 2, 2),
        (6, 16, 3, 2),
        (6, 32, 4, 2),
        (6, 48, 3, 1),
        (6, 80, 3, 2),
        (6, 160, 1, 1),
    ):
        for number in range(blocks):
            layers.append(Inverted(width_in, width, widen, stride if number == 0 else 1))
            width_in = width
    layers += [nn.Conv2d(160, 1280, 1, bias=False), nn.BatchNorm2d(1280), nn.ReLU6()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(1280, classes))


# ---- training --------------------------------------------------------------------------------------------


class Epoch(NamedTuple):
    """Mean loss of this rank, seconds, and requests that the storage had from all ranks."""

    loss: float
    seconds: float
    requests: int


class Clock:
    """Measures epochs, one after the other, the same span in all ranks."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.begin, self.before = self.now()

    def now(self) -> tuple[float, int]:
        together()
        now = time.perf_counter(), self.link.requests
        together()
        return now

    def epoch(self, loss: float) -> Epoch:
        """What there was since the last one."""
        (begin, before), (self.begin, self.before) = (self.begin, self.before), self.now()
        return Epoch(loss, self.begin - begin, self.before - before)


def together() -> None:
    if dist.is_initialized():
        dist.barrier()


def train(loader: Any, epochs: int, classes: int, clock: Clock) -> list[Epoch]:
    """Train from a fixed start."""
    torch.manual_seed(0)
    net = mobilenet(classes)
    if dist.is_initialized():
        net = DistributedDataParallel(net)
    found = []
    for number in range(epochs):
        loader.sampler.set_epoch(number)
        losses = [step(net, pictures, labels) for pictures, labels in loader]
        found.append(clock.epoch(statistics.fmean(losses)))
    return found


def step(net: nn.Module, pictures: torch.Tensor, labels: torch.Tensor) -> float:
    return descend(net, pictures / 64 - 2, labels, LEARNING_RATE)


def compare(words: argparse.Namespace, link: Link) -> dict[str, list[Epoch]]:
    """Train without and with the cache."""
    photographs = Photographs(words.folder)
    pictures = Pictures(photographs.samples, link)
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    loading: dict[str, Any] = {"batch_size": 32, "num_workers": words.workers}
    loading["persistent_workers"] = words.workers > 0

    def trained(loader_type: Any, dataset: Any, clock: Clock) -> list[Epoch]:
        sampler: DistributedSampler[Any] = DistributedSampler(dataset, ranks, rank)  # this rank's shard
        loader = loader_type(dataset, sampler=sampler, **loading)
        return train(loader, words.epochs, len(photographs.classes), clock)

    # torch's preparations at a first step are not data loading.
    step(mobilenet(2), torch.zeros(32, 3, CROPPED, CROPPED), torch.zeros(32).long())
    found = {"without cache": trained(torch.utils.data.DataLoader, pictures, Clock(link))}
    clock = Clock(link)  # what it takes to make the cache is part of its first epoch
    with hotset.cache(pictures, session=words.session) as cached:
        if rank == 0:
            print(cached.plan)
        found["with cache"] = trained(hotset.DataLoader, cached, clock)
    return found


# ---- what came of it -------------------------------------------------------------------------------------


def print_times(found: dict[str, list[Epoch]], samples: int) -> None:
    runs = found.values()
    later = [statistics.fmean(epoch.seconds for epoch in run[1:]) for run in runs]
    rows = {
        name: (f"{one:.2f}", f"{other:.2f}", f"{other / one:.2f}x")
        for name, (one, other) in {
            "first epoch": [run[0].seconds for run in runs],
            "later epochs, mean": later,
        }.items()
    }
    reads = tuple(f"{sum(epoch.requests for epoch in run) / samples:.3f}" for run in runs)
    print_table("seconds", (*found, "ratio"), {**rows, "reads of each file": reads})
    plain, cached = ([epoch.loss for epoch in run] for run in runs)
    print(f"losses with and without: {'equal' if plain == cached else 'DIFFERENT'}")


# ---- one process, or ranks -------------------------------------------------------------------------------


@contextlib.contextmanager
def prepared(words: argparse.Namespace) -> Iterator[argparse.Namespace]:
    """A folder of pictures, and a session, unless there is one to use."""
    with tempfile.TemporaryDirectory() as temporary, contextlib.ExitStack() as stack:
        words.folder = build(Path(temporary) / "pictures", count=words.samples, size=words.size)
        words.link = Path(temporary) / "link"
        words.link.touch()
        words.session = stack.enter_context(session_for(words.session))
        yield words


def work(words: argparse.Namespace) -> None:
    """What one process does, be it the only one or a rank."""
    torch.set_num_threads(1)
    link = Link(words.link, words.mb_per_second * 1e6, words.latency / 1e3)
    found = compare(words, link)
    if not dist.is_initialized() or dist.get_rank() == 0:
        print_times(found, words.samples)
        seconds = {name: [epoch.seconds for epoch in run] for name, run in found.items()}
        draw_epochs(seconds, "epoch", "%.1f", words.plot)
        print(f"saved {words.plot}")


def rank_of_torchrun(words: argparse.Namespace) -> None:
    dist.init_process_group("gloo")
    work(words)
    gc.collect()  # a DistributedDataParallel lies in a reference cycle, and holds the group
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description="training from slow storage, with and without a cache")
    parser.add_argument("--session", help="name or number of a session; else one is made, and destroyed")
    parser.add_argument("--ranks", type=int, default=1, help="processes of the training, by torchrun")
    parser.add_argument("--samples", type=int, default=2000, help="pictures to train on")
    parser.add_argument("--size", type=int, default=512, help="pixels of a picture's side, as a JPEG")
    parser.add_argument("--epochs", type=int, default=3, help="of each training, at least 2")
    parser.add_argument("--workers", type=int, default=2, help="of each loader")
    parser.add_argument("--mb-per-second", type=float, default=6, help="bandwidth of the storage")
    parser.add_argument("--latency", type=float, default=2, help="of a request, in milliseconds")
    parser.add_argument("--plot", type=Path, default=Path("session-storage.png"), help="a PNG")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)  # what ranks are told
    parser.add_argument("--link", type=Path, help=argparse.SUPPRESS)
    words = parser.parse_args()
    if words.link is not None:
        rank_of_torchrun(words)
        return
    with prepared(words):
        if words.ranks == 1:
            work(words)
            return
        told = [f"--{name.replace('_', '-')}={value}" for name, value in vars(words).items()]
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        ranks = [*torchrun, f"--nproc-per-node={words.ranks}", __file__, *told]
        subprocess.run(ranks, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=True)


if __name__ == "__main__":
    main()
