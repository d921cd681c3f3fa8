"""Warm caches of samples of different lengths: ragged batches, and padded ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from benchmarks import data, hotset_entries, peers
from benchmarks.harness import Comparison, Outcome
from benchmarks.peers import Epoch
from benchmarks.settings import Settings
from benchmarks.suite.contest import ahead_of_all, contest, lead
from benchmarks.truth import PaddedTruth, RaggedTruth

__all__ = ["jpeg_bytes", "molecules", "ragged"]

Loaders = dict[str, Callable[[ExitStack], Epoch]]

HOTSET = "hotset, collate.ragged, 2 workers"
HOTSET_PAD = "hotset, collate.pad, 2 workers"
LOOP = "bare loop of slice copies"
SHARED_LOOP = "the same loop over shared memory"


def ragged(settings: Settings) -> Outcome:
    """Ragged batches against a bare loop of slice copies: 2x at a mean of 1 KB, 0.9x at 32 KB."""
    outcome = Outcome()
    for mean, batch, bound in ((1 << 10, 256, 2.0), (32 << 10, 64, 0.9)):
        samples = data.ragged_samples(settings.ragged_bytes, mean)
        found = _contest(settings, f"Warm, ragged, mean {mean >> 10} KiB, batch {batch}", samples, batch)
        outcome.comparisons.append(found)
        text = f"ragged, mean {mean >> 10} KiB: {bound:g}x a bare loop"
        outcome.targets.append(lead(text, found, HOTSET, LOOP, bound))
        # A private tensor may have huge pages; memory that processes share has none on most machines.
        outcome.targets.append(lead(f"{text} over shared memory", found, HOTSET, SHARED_LOOP, bound))
    return outcome


def jpeg_bytes(settings: Settings) -> Outcome:
    """The undecoded JPEG files as ragged batches."""
    files = data.photographs(settings.out, settings.photographs)
    samples = [torch.from_numpy(np.fromfile(file, dtype=np.uint8)) for file in files]
    found = _contest(settings, "Warm, ragged, JPEG files undecoded, batch 64", samples, 64, data.Files(files))
    return Outcome([found], [ahead_of_all("JPEG bytes, ragged: ahead of no cache", found, HOTSET)])


def molecules(settings: Settings) -> Outcome:
    """Molecules ``(n_atoms, 3)``, padded to a batch's largest."""
    samples, batch = data.molecules(settings.molecules), 256
    loaders: Loaders = {
        "RAM tensors, pad_sequence, 0 workers": lambda stack: peers.loader(
            stack, data.Samples(samples), batch, 0, _pad
        ),
        "RAM tensors, pad_sequence, 2 workers": lambda stack: peers.loader(
            stack, data.Samples(samples), batch, 2, _pad
        ),
        HOTSET_PAD: lambda stack: _hotset(stack, data.Samples(samples), batch, "pad"),
    }
    found = contest(
        settings,
        "Warm, molecules of 3 to 29 atoms, padded, batch 256",
        PaddedTruth([sample.numpy() for sample in samples]),
        loaders,
        "RAM tensors, pad_sequence, 0 workers",
        subjects=(HOTSET_PAD,),
    )
    return Outcome([found], [ahead_of_all("molecules, padded: ahead of no cache", found, HOTSET_PAD)])


def _contest(
    settings: Settings,
    title: str,
    samples: Sequence[torch.Tensor],
    batch: int,
    source: data.Files | None = None,
) -> Comparison:
    dataset = source if source is not None else data.Samples(samples)
    loaders: Loaders = {
        LOOP: lambda stack: peers.bare_loop(samples, batch),
        SHARED_LOOP: lambda stack: peers.bare_loop(samples, batch, shared=True),
        HOTSET: lambda stack: _hotset(stack, dataset, batch, "ragged"),
        "no cache, torch.cat, 0 workers": lambda stack: peers.loader(stack, dataset, batch, 0, _concatenate),
        "no cache, torch.cat, 2 workers": lambda stack: peers.loader(stack, dataset, batch, 2, _concatenate),
    }
    truth = RaggedTruth([sample.numpy() for sample in samples])
    return contest(settings, title, truth, loaders, LOOP, subjects=(HOTSET,), limits=(LOOP, SHARED_LOOP))


def _hotset(stack: ExitStack, dataset: Any, batch: int, kind: str) -> Epoch:
    from hotset import collate

    chosen = collate.ragged if kind == "ragged" else collate.pad(0)
    return hotset_entries.warm(stack, dataset, batch, 2, collate=chosen)


def _pad(samples: list[data.Sample]) -> tuple[torch.Tensor, torch.Tensor]:
    values = pad_sequence([value for value, _ in samples], batch_first=True)
    return values, torch.tensor([i for _, i in samples])


def _concatenate(samples: list[data.Sample]) -> tuple[Any, torch.Tensor]:
    values = [torch.as_tensor(value) for value, _ in samples]
    lengths = torch.tensor([0, *map(len, values)])
    return (torch.cat(values), lengths.cumsum(0)), torch.tensor([i for _, i in samples])
