"""Warm caches of rows of one shape: against the limit and against everyone."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial

import torch

from benchmarks import hotset_entries, outside, peers
from benchmarks.data import CROP, Samples, byte_rows, flip_and_crop, image_rows, kilobyte_rows
from benchmarks.harness import Comparison, Measure, Outcome
from benchmarks.peers import Epoch
from benchmarks.settings import Settings
from benchmarks.suite.contest import ahead_of_all, contest, lead, speed
from benchmarks.truth import CropTruth, RowTruth

__all__ = ["bytes_rows", "kilobytes", "live", "unmodified", "warm"]

Loaders = dict[str, Callable[[ExitStack], Epoch]]

HOTSET = "hotset, 2 workers"
HOTSET_0 = "hotset, 0 workers"
LIMIT = "limit: index_select(out=)"
SHARED_LIMIT = "the same limit over shared memory"
RAM_0 = "RAM tensor, 0 workers"
RAM_2 = "RAM tensor, 2 workers"
RAM_BATCHED = "RAM tensor, batched, 0 workers"
STOCACHING_0 = "stocaching, 0 workers"
STOCACHING_2 = "stocaching, 2 workers"


def warm(settings: Settings) -> Outcome:
    """Images in memory, batch 64: 0.9 of the limit, ahead of every peer, 8 times stocaching's workers."""
    rows, batch = image_rows(settings.images), 64
    loaders = {
        **_loaders(rows, batch),
        "MONAI CacheDataset, 0 workers": lambda stack: peers.monai(stack, rows, batch, 0),
        "MONAI CacheDataset, ThreadDataLoader": lambda stack: peers.monai(stack, rows, batch, 0, thread=True),
        "MONAI CacheDataset, 2 workers": lambda stack: peers.monai(stack, rows, batch, 2),
    }
    with ExitStack() as stack:
        file = outside.rows_file(stack, rows)

        def open_outside(stack: ExitStack, peer: str) -> Measure:
            return outside.Outside(stack, settings.peer_python, peer, file, batch, settings.seconds)

        found = contest(
            settings,
            "Warm, images of 150,528 B, batch 64",
            RowTruth(rows.numpy()),
            loaders,
            LIMIT,
            subjects=(HOTSET, HOTSET_0),
            limits=(LIMIT, SHARED_LIMIT),
            others={name: partial(open_outside, peer=peer) for name, peer in outside.PEERS.items()},
        )
    targets = [
        lead("warm images: 0.9 of the limit", found, HOTSET, LIMIT, 0.9),
        lead("warm images: 0.9 of the limit, 0 workers", found, HOTSET_0, LIMIT, 0.9),
        lead("warm images: 0.9 of the limit over shared memory", found, HOTSET, SHARED_LIMIT, 0.9),
        ahead_of_all("warm images: ahead of every peer", found, HOTSET),
        lead("warm images: 8x stocaching with 2 workers", found, HOTSET, STOCACHING_2, 8.0),
    ]
    return Outcome([found], targets)


def live(settings: Settings) -> Outcome:
    """A random flip and crop after the cache, in 2 workers: 2x stocaching's workers, 1.5x it without workers.

    What stands in the way of the latter is again the copy of each sample, which the transform may write into:
    stocaching in one process, with its samples copied first, is the measure of that.
    """
    rows, batch, cut = image_rows(settings.images), 64, flip_and_crop
    copied_0 = "stocaching, each sample copied, 0 workers"
    loaders: Loaders = {
        copied_0: lambda stack: peers.stocaching(stack, rows, batch, 0, _copied_then_cut),
        STOCACHING_2: lambda stack: peers.stocaching(stack, rows, batch, 2, cut),
        HOTSET: lambda stack: hotset_entries.warm(stack, Samples(rows), batch, 2, transform=[cut]),
        RAM_0: lambda stack: peers.ram(stack, rows, batch, 0, cut),
        RAM_2: lambda stack: peers.ram(stack, rows, batch, 2, cut),
        STOCACHING_0: lambda stack: peers.stocaching(stack, rows, batch, 0, cut),
        "MONAI CacheDataset, 0 workers": lambda stack: peers.monai(stack, rows, batch, 0, cut),
        "MONAI CacheDataset, 2 workers": lambda stack: peers.monai(stack, rows, batch, 2, cut),
    }
    found = contest(
        settings,
        f"Warm, images with a live flip and crop to {CROP}, batch 64",
        CropTruth(rows.numpy(), CROP),
        loaders,
        STOCACHING_2,
        subjects=(HOTSET,),
    )
    text = "live flip and crop, 2 workers"
    targets = [
        lead(f"{text}: 2x stocaching, 2 workers", found, HOTSET, STOCACHING_2, 2.0),
        lead(f"{text}: 1.5x stocaching, 0 workers", found, HOTSET, STOCACHING_0, 1.5),
        lead(f"{text}: 1.5x the same with copies", found, HOTSET, copied_0, 1.5),
    ]
    return Outcome([found], targets)


def _copied_then_cut(sample: peers.Sample) -> peers.Sample:
    return flip_and_crop(_image_copied(sample))


def unmodified(settings: Settings) -> Outcome:
    """torch's own DataLoader over a warm hotset.cache: at least as fast as over stocaching.

    What stands in the way is one copy: stocaching's samples are views into its cache, into which whoever
    changes a sample writes. The same samples, each copied once, are the limit.
    """
    rows, batch = image_rows(settings.images), 64
    outcome = Outcome()
    for workers in (0, 2):
        entry, peer = f"hotset.cache, {workers} workers", f"stocaching, {workers} workers"
        copies = f"stocaching, each sample copied, {workers} workers"
        loaders: Loaders = {
            copies: partial(
                peers.stocaching, rows=rows, batch_size=batch, workers=workers, suffix=_image_copied
            ),
            peer: partial(peers.stocaching, rows=rows, batch_size=batch, workers=workers),
            entry: partial(
                hotset_entries.unmodified, dataset=Samples(rows), batch_size=batch, workers=workers
            ),
        }
        found = contest(
            settings,
            f"Warm, images, torch's own DataLoader, {workers} workers, batch 64",
            RowTruth(rows.numpy()),
            loaders,
            peer,
            subjects=(entry,),
            limits=(copies,),
        )
        outcome.comparisons.append(found)
        text = f"unmodified DataLoader over hotset.cache: stocaching's speed, {workers} workers"
        outcome.targets.append(lead(text, found, entry, peer, 1.0))
    return outcome


def _image_copied(sample: peers.Sample) -> peers.Sample:
    image, label = sample
    return image.clone(), label


def bytes_rows(settings: Settings) -> Outcome:
    """Rows of 210 B: a million rows/s at batch 32, three at 256, and never slower than no cache."""
    rows = byte_rows(settings.small_rows)
    outcome = Outcome()
    for batch, bound in ((32, 1e6), (256, 3e6)):
        found = _small(settings, f"Warm, rows of 210 B, batch {batch}", rows, batch)
        outcome.comparisons.append(found)
        text = f"210 B rows, batch {batch}"
        without = (RAM_0, RAM_2)
        outcome.targets += [
            speed(f"{text}: rows/s", found, HOTSET, bound),
            ahead_of_all(f"{text}: never slower than no cache", found, HOTSET, without),
        ]
    return outcome


def kilobytes(settings: Settings) -> Outcome:
    """Rows of 1 KB, batch 256."""
    found = _small(settings, "Warm, rows of 1 KB, batch 256", kilobyte_rows(settings.small_rows), 256)
    return Outcome([found], [ahead_of_all("1 KB rows: ahead of every peer", found, HOTSET)])


def _small(settings: Settings, title: str, rows: torch.Tensor, batch: int) -> Comparison:
    return contest(
        settings,
        title,
        RowTruth(rows.numpy()),
        _loaders(rows, batch),
        LIMIT,
        subjects=(HOTSET, HOTSET_0),
        limits=(LIMIT, SHARED_LIMIT),
    )


def _loaders(rows: torch.Tensor, batch: int) -> Loaders:
    """Those that take rows of any shape."""
    return {
        LIMIT: lambda stack: peers.limit(rows, batch),
        SHARED_LIMIT: lambda stack: peers.limit(peers.in_shared_memory(rows), batch),
        HOTSET: lambda stack: hotset_entries.warm(stack, Samples(rows), batch, 2),
        HOTSET_0: lambda stack: hotset_entries.warm(stack, Samples(rows), batch, 0),
        RAM_0: lambda stack: peers.ram(stack, rows, batch, 0),
        RAM_2: lambda stack: peers.ram(stack, rows, batch, 2),
        RAM_BATCHED: lambda stack: peers.ram_batched(stack, rows, batch, 0),
        STOCACHING_0: lambda stack: peers.stocaching(stack, rows, batch, 0),
        STOCACHING_2: lambda stack: peers.stocaching(stack, rows, batch, 2),
    }
