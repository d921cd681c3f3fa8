"""Threads that a fork loses: those of libraries that a forked worker lacks, and would wait for.

A fork copies no threads. Most libraries begin theirs anew in the child (torch, OpenMP), but polars does not,
nor does what runs on tokio (libraries in Rust: obstore, for one): a worker that asks them waits for ever.

To plan, hotset reads samples in the main process, before a loader forks its workers; without hotset workers
may be the first that read. So the plan says so where reading the samples is what began threads of polars.
(Whoever used them before has the same workers without hotset.) Of tokio's a loader says so as it forks.
"""

from __future__ import annotations

import contextlib
import os
import re

__all__ = ["has_threads", "polars_was_begun"]

_NAMES = {"polars": re.compile(r"polars-\d+"), "tokio": re.compile(r"tokio.*")}


def has_threads(library: str) -> bool:
    """Whether this process has threads of polars, or of tokio."""
    with contextlib.suppress(OSError):  # without /proc
        for thread in os.listdir("/proc/self/task"):
            with contextlib.suppress(OSError), open(f"/proc/self/task/{thread}/comm") as file:
                if _NAMES[library].fullmatch(file.read().strip()):
                    return True
    return False


def polars_was_begun(name: str) -> str:
    """A sentence for the user whose dataset, of that class, has begun polars' threads as it was read."""
    return (
        f"reading samples of {name} began threads of polars in this process, and a forked worker that reads "
        "with polars waits for them for ever; with workers, give the loader "
        'multiprocessing_context="forkserver".'
    )
