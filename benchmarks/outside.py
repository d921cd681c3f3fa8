"""Peers that want an interpreter of their own: FFCV, which has to be compiled, and tf.data.

Each runs in one child process of ``--peer-python``, on the same rows (a ``.npy`` file), checks itself with
the same code, and waits in silence between its turns; so it takes part in the same interleaved rounds as
everyone else. The interpreter needs numpy and what is to be measured. To make one on Debian::

    apt-get install libopencv-dev libturbojpeg0-dev pkg-config g++
    python3 -m venv peers
    peers/bin/pip install torch==2.13.0 numba opencv-python-headless pandas pyyaml psutil tqdm fastargs pillow
    peers/bin/pip install --no-build-isolation --no-deps ffcv
    peers/bin/pip install tensorflow-cpu
"""

from __future__ import annotations

import json
import select
import subprocess
import tempfile
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import torch

from benchmarks.harness import Unfit

__all__ = ["PEERS", "Outside", "rows_file"]

PEERS = {
    "FFCV raw": "ffcv",
    "FFCV raw, batches_ahead=1": "ffcv:1:1",
    "FFCV raw, batches_ahead=1, 2 workers": "ffcv:1:2",
    "tf.data cache, shuffle, batch": "tf.data",
}

# A child that says nothing for so long is taken to hang: opening writes FFCV's file, which takes seconds.
_PATIENCE = 180.0


def rows_file(stack: ExitStack, rows: torch.Tensor) -> Path:
    """Write ``rows`` where children can read them, in a folder that goes with the stack."""
    folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="hotset-bench-"))
    path = Path(folder) / "rows.npy"
    np.save(path, rows.numpy())
    return path


class Outside:
    """A contestant in a child process; called, it makes the child measure once."""

    def __init__(
        self, stack: ExitStack, python: str, peer: str, rows: Path, batch_size: int, seconds: float
    ) -> None:
        self.holds: bool | None = None
        self._log = rows.with_name(f"{peer}.log")
        arguments = [peer, str(rows), str(batch_size), str(seconds)]
        with self._log.open("wb") as errors:
            self._child = subprocess.Popen(
                [python, "-m", "benchmarks.outside_child", *arguments],
                cwd=Path(__file__).parents[1],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
            )
        stack.callback(self._end)

    def __call__(self) -> float:
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        try:
            self._child.stdin.write(b"measure\n")
            self._child.stdin.flush()
        except BrokenPipeError:
            raise Unfit(self._last_words()) from None
        if not select.select([self._child.stdout], [], [], _PATIENCE)[0]:
            raise Unfit(f"no answer within {_PATIENCE:.0f} s")
        line = self._child.stdout.readline()
        if not line:
            raise Unfit(self._last_words())
        answer = json.loads(line)
        if "unfit" in answer:
            raise Unfit(answer["unfit"])
        self.holds = answer["holds"]
        return float(answer["figure"])

    def _last_words(self) -> str:
        self._child.wait()
        lines = self._log.read_text(errors="replace").splitlines()
        said = next((line.strip() for line in reversed(lines) if line.strip()), "nothing")
        return f"its process ended with status {self._child.returncode}: {said}"

    def _end(self) -> None:
        try:
            self._child.communicate(timeout=10)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.communicate()
