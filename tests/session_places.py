"""Where sessions lie in a test: a runtime folder of its own, a disk, and what is left after a reboot."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers import equal_batches

from hotset.session import recovery
from hotset.session import spill_dirs as spills

N = 40
MIB = 1 << 20


@contextlib.contextmanager
def own_runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A runtime folder in memory, which is where it is; it goes with what is in it."""
    folder = Path(tempfile.mkdtemp(prefix="test-hotset-", dir="/dev/shm"))
    monkeypatch.setenv("HOTSET_RUNTIME_DIR", str(folder))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    yield folder
    shutil.rmtree(folder)


def reboot(runtime: Path) -> None:
    """Memory is gone, and what lies on a disk is not."""
    shutil.rmtree(runtime)
    runtime.mkdir(mode=0o700)


def spilled(disk: str) -> list[str]:
    own = spills.spill_path(disk)
    return sorted(os.listdir(own)) if own.is_dir() else []


def old(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if a minute had passed: nobody is in the midst of anything any more."""
    monkeypatch.setattr(recovery, "_YOUNG_SECONDS", -1.0)


def read_all(cached: Any, make: Callable[[int], Any], n: int | None = None) -> None:
    """Fail unless all samples, or the first ``n``, are what ``make`` gives."""
    n = len(cached) if n is None else n
    equal_batches([cached[i] for i in range(n)], [make(i) for i in range(n)])
