"""What a job does: it caches samples that it can make anew, reads them in several ways, and checks each one.

A job ends with an exit code that tells what befell it. :func:`dying` has a process killed at a chosen line of
hotset's code, which finds moments that a kill from without hardly ever meets.
"""

from __future__ import annotations

import os
import random
import time
import traceback
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
import torch.utils.data.dataloader as torch_loader

import hotset
from hotset.collate import ragged
from hotset.errors import SessionError
from tests.kills import dying

ENDS_WELL, FAILED, WRONG, LOST_A_WORKER, NO_SESSION = 0, 1, 3, 4, 5
N = 240
# The layers that handle files: a job is killed at any line of theirs.
FILE_LAYERS = tuple(f"{os.path.dirname(hotset.__file__)}/{layer}/" for layer in ("session", "store"))


def fixed(i: int) -> Any:
    return {"row": (torch.arange(2048) * 31 + i * 17).to(torch.int16), "label": i}


def uneven(i: int) -> Any:
    return {"rows": torch.full((i * 37 % 211, 5), float(i)), "text": f"{i} " * (i * 7 % 300), "label": i}


def large(i: int) -> Any:
    return {"row": (torch.arange(40_000) + i).to(torch.int16), "label": i}


MAKERS: dict[str, Callable[[int], Any]] = {"fixed": fixed, "uneven": uneven, "large": large}


class Source(torch.utils.data.Dataset[Any]):
    """Samples that take a moment each."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __len__(self) -> int:
        return N

    def __getitem__(self, i: int) -> Any:
        time.sleep(2e-4)
        return MAKERS[self.kind](i)


def is_right(kind: str, got: Any) -> bool:
    """Whether this is the sample that its label says, whole and unaltered."""
    wanted = MAKERS[kind](int(got["label"]))
    return list(got) == list(wanted) and all(
        torch.equal(got[key], value) and got[key].dtype == value.dtype
        if isinstance(value, torch.Tensor)
        else type(got[key]) is type(value) and got[key] == value
        for key, value in wanted.items()
    )


def read_all(cached: Any, kind: str, draw: random.Random, checked: Any) -> None:
    """One pass over all samples, by a loader or one by one."""
    seen: list[int] = []
    if draw.random() < 0.15:
        batches: Iterable[list[Any]] = [[cached[i]] for i in draw.sample(range(N), N)]
    else:
        loader = hotset.DataLoader(
            cached,
            batch_size=draw.choice([5, 16, 48]),
            shuffle=True,
            num_workers=draw.choice([0, 2]),
            collate_fn=ragged,
        )
        batches = (
            [dict(zip(batch, parts, strict=True)) for parts in zip(*map(_each, batch.values()), strict=True)]
            for batch in loader
        )
    for samples in batches:
        for got in samples:
            if not is_right(kind, got):
                raise AssertionError(f"sample {got['label']} came as {got}")
            seen.append(int(got["label"]))
        checked += len(samples)
    assert sorted(seen) == list(range(N)), f"a pass gave {len(seen)} samples: {sorted(seen)}"


def _each(column: Any) -> Any:
    return column.tolist() if isinstance(column, torch.Tensor) and column.dim() == 1 else column


def job(options: dict[str, Any], seed: int, checked: Any, dies: int) -> int:
    """Cache, read a few epochs, check everything; returns the exit code."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    kind = draw.choice(sorted(MAKERS))
    try:
        with dying(FILE_LAYERS, dies):
            cached = hotset.cache(Source(kind), **options)
    except SessionError:
        return NO_SESSION
    with cached:
        for _ in range(draw.randint(1, 4)):
            read_all(cached, kind, draw, checked)
    return ENDS_WELL


def code_of(error: BaseException) -> int:
    """With what a process ends that raised this."""
    if isinstance(error, AssertionError):
        return WRONG
    # It is torch's own error where torch waits for its workers, or where the kernel told of a death.
    places = {frame.filename for frame in traceback.extract_tb(error.__traceback__)}
    lost = torch_loader.__file__ in places or "DataLoader worker (pid" in str(error)
    return LOST_A_WORKER if lost else FAILED


def reader(name: str, kind: str) -> int:
    """A fresh job in a session that is left, from the first sample to the last."""
    with hotset.cache(Source(kind), session=name) as cached:
        for _ in range(2):
            read_all(cached, kind, random.Random(kind), np.zeros(1, np.int64))
    return ENDS_WELL
