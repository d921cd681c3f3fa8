"""Programs with Ray: their end, and whether Ray itself can start here; where not, they are not to blame."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile

import psutil
import pytest

__all__ = ["end", "require_ray", "skip_where_ray_was_late"]

_SECONDS = 120.0
_START = (
    "import ray; ray.init(num_cpus=1, include_dashboard=False, object_store_memory=80 << 20); ray.shutdown()"
)


def require_ray() -> None:
    """Skip, with what Ray says, if a cluster of one machine cannot be started by Ray alone.

    To be asked when something of ours has not started: while Ray starts, that is our fault.
    """
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        environment = {**os.environ, "RAY_TMPDIR": folder}
        environment.pop("RAY_ADDRESS", None)
        try:
            done = subprocess.run(
                [sys.executable, "-c", _START],
                env=environment,
                capture_output=True,
                text=True,
                timeout=_SECONDS,
            )
        except subprocess.TimeoutExpired:
            pytest.skip(f"Ray does not start here within {_SECONDS:.0f} s")
    if done.returncode:
        pytest.skip(f"Ray does not start here: {(done.stderr.strip().splitlines() or ['no reason'])[-1]}")


def skip_where_ray_was_late(raised: str) -> None:
    """Skip if an error is that a node of Ray's has not started in the half minute that Ray gives it."""
    if "The current node timed out during startup" in raised:
        pytest.skip("a node of Ray's does not start here within 30 s")


def end(running: subprocess.Popen[bytes]) -> None:
    """End a program, which ends what it has started; what is left after that is killed."""
    if running.poll() is not None:
        return
    every = psutil.Process(running.pid).children(recursive=True)
    running.terminate()
    try:
        running.wait(20)
    except subprocess.TimeoutExpired:
        running.kill()
        for process in every:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
