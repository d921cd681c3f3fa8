"""Whether Ray itself can start on this machine: where it cannot, what builds on it is not to blame."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile

import pytest

__all__ = ["require_ray"]

_SECONDS = 90.0
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
