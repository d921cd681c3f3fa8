"""The command line, and a run from its file systems to its verdict."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import pkgutil
import random
import signal
import sys
import tempfile
import warnings
from pathlib import Path

import torch

import hotset

from . import __doc__ as theory
from .aftermath import look_after
from .director import Director
from .places import Place, own_mounts
from .processes import Processes, end_all

TMPFS, DISK = 24 << 20, 160 << 20


def chaos(seed: int, kills: int, seconds: float) -> list[str]:
    """Run it; returns a text for each thing that was wrong."""
    warnings.simplefilter("ignore", hotset.HotsetWarning)
    torch.set_num_threads(1)
    for module in pkgutil.walk_packages(hotset.__path__, "hotset."):
        if (
            not module.name.startswith(("hotset.demo", "hotset.integrations"))
            and "__main__" not in module.name
        ):
            importlib.import_module(module.name)  # once here, and not in each child
    own = own_mounts()
    with contextlib.ExitStack() as stack:
        temporary = (tempfile.TemporaryDirectory(prefix="chaos-hotset-", dir=at) for at in (None, "/dev/shm"))
        folder, shared = (Path(stack.enter_context(made)) for made in temporary)
        runtime = Place(shared / "runtime", "tmpfs" if own else "", TMPFS)
        stack.callback(runtime.close)
        disk = Place(folder / "disk", "ext4" if own else "", DISK)
        stack.callback(disk.close)
        os.environ["HOTSET_RUNTIME_DIR"] = str(runtime.folder)
        os.environ["XDG_STATE_HOME"] = str(folder / "state")
        (folder / "logs").mkdir()
        before = runtime.used() if runtime.mounted else 0
        processes = Processes(folder / "logs")
        stack.callback(end_all)
        director = Director(seed, runtime, disk, processes)
        director.run(kills, seconds)
        if not processes.failures:
            look_after(director)
            if runtime.mounted and runtime.used() != before:
                processes.failures.append(f"{runtime.used() - before:,} bytes of memory are not given back")
        processes.counts["samples"] = int(director.checked.sum())
        done = ", ".join(f"{name} {count}" for name, count in sorted(processes.counts.items()))
        how = "mounted" if disk.mounted and runtime.mounted else "limited"
        print(f"file systems {how}, seed {seed}, kills {director.kills}, {done}", flush=True)
    return processes.failures


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=(theory or "").split("\n")[0])
    parser.add_argument("--kills", type=int, default=50, help="at least so many")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    parser.add_argument("--seconds", type=float, default=0.0, help="at least so long")
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}", flush=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("told to end"))
    failures = chaos(arguments.seed, arguments.kills, arguments.seconds)
    print(*failures, sep="\n")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
