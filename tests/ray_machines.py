"""A Ray cluster on this machine, whose nodes stand for machines, and ranks that are outside of it."""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import psutil
import ray
from ray.cluster_utils import Cluster
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from ray_patient import PATIENCE

__all__ = ["RAY_GIVES_UP", "Machine", "Machines", "Plain"]

HERE = Path(__file__).parent
# How long a process of Ray's looks for a cluster that is gone, before it ends itself; a minute by default.
RAY_GIVES_UP = 2


class Machine:
    """A Ray node."""

    def __init__(self, node: Any, folder: Path) -> None:
        self.node, self.folder = node, folder
        self.id: str = node.node_id
        self.here = {
            "num_cpus": 0,
            "scheduling_strategy": NodeAffinitySchedulingStrategy(self.id, soft=False),
        }

    def kill(self) -> None:
        """End all its processes at once, as a loss of power does."""
        raylet = psutil.Process(self.node.all_processes["raylet"][0].process.pid)
        for process in [raylet, *raylet.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    def taken(self) -> int:
        """Bytes that its sessions take."""
        return sum(file.stat().st_blocks * 512 for file in self.folder.iterdir() if file.is_file())


class Machines:
    """The cluster; a context manager."""

    def __init__(self) -> None:
        self.memory = Path(tempfile.mkdtemp(prefix="hs-ray-", dir="/dev/shm"))
        # A path short enough for sockets. What "auto" means is written down there too, as others may run.
        self._ray = Path(tempfile.mkdtemp(prefix="hs-ray-", dir="/tmp"))
        os.environ["RAY_TMPDIR"] = str(self._ray)
        os.environ["PYTHONPATH"] = f"{HERE}:{HERE.parent}"
        self._cluster = Cluster()
        self.all: list[Machine] = []
        self._is_up = True

    def __enter__(self) -> Machines:
        return self

    def __exit__(self, *exception: object) -> None:
        self.shutdown()
        for folder in (self.memory, self._ray):
            shutil.rmtree(folder, ignore_errors=True)

    @property
    def address(self) -> str:
        return str(self._cluster.address)

    def add(self) -> Machine:
        folder = self.memory / str(len(self.all))
        folder.mkdir(mode=0o700, exist_ok=True)
        head = {} if self.all else {"include_dashboard": False}
        node = self._cluster.add_node(
            num_cpus=1, object_store_memory=80 << 20, env_vars={"HOTSET_RUNTIME_DIR": str(folder)}, **head
        )
        self.all.append(Machine(node, folder))
        return self.all[-1]

    def lose(self, machine: Machine) -> None:
        machine.kill()
        self._cluster.remove_node(machine.node, allow_graceful=False)

    def shutdown(self) -> None:
        if self._is_up:
            self._is_up = False
            ray.shutdown()
            self._cluster.shutdown()  # type: ignore[no-untyped-call]


class Plain:
    """A rank in a process that is not Ray's."""

    def __init__(self, folder: Path, runtime: Path) -> None:
        runtime.mkdir(mode=0o700, exist_ok=True)
        environment = {
            **os.environ,
            "HOTSET_RUNTIME_DIR": str(runtime),
            **({"RAY_gcs_rpc_server_reconnect_timeout_s": str(RAY_GIVES_UP)} if runtime.name == "0" else {}),
        }
        self.process = subprocess.Popen(
            [sys.executable, "-c", "import ray_rank; ray_rank.main()", str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def send(self, order: str, **arguments: Any) -> Plain:
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps([order, arguments]) + "\n")
            self.process.stdin.flush()
        return self

    def answer(self, within: float = PATIENCE) -> Any:
        assert self.process.stdout is not None
        if not select.select([self.process.stdout], [], [], within)[0]:
            raise RuntimeError(f"the rank has not answered in {within:.0f} s")
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"the rank has ended with {self.process.wait(PATIENCE)}")
        said = json.loads(line)
        if "raised" in said:
            raise RuntimeError(said["raised"])
        return said["answer"]

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()
