"""Several Ray nodes on this machine, each with a runtime folder of its own.

A folder of its own is what makes a node a machine to hotset: it has its own session there, its own caches and
its own roster, and nothing of another node's is found. What nodes do share is this machine's processors, its
memory's bandwidth and a network that is no network: all addresses are this machine's. So what is measured on
them says what hotset does, and less of how fast a cluster is.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hotset.cluster.ray_join import status, stop

__all__ = ["Nodes", "ray_nodes"]

_ROOT = Path(__file__).parents[1]
_MEMORY = "/dev/shm"
_PATIENCE_SECONDS = 60.0


class Nodes:
    """A Ray cluster on this machine, to which this process is connected. Made by :func:`ray_nodes`.

    Args:
        objects: bytes of each node's object store.

    Attributes:
        session: a name that no other run has.
        folders: of the nodes, by number.
    """

    def __init__(self, objects: int) -> None:
        from ray.cluster_utils import Cluster

        self._cluster: Any = Cluster()
        self._objects = objects
        self._nodes: dict[int, Any] = {}
        self.session = f"bench-{secrets.token_hex(4)}"
        self.folders: dict[int, str] = {}

    def add(self) -> int:
        """Start a node, and return its number once Ray has it."""
        number = len(self.folders)
        self.folders[number] = tempfile.mkdtemp(prefix="benchmark-hotset-", dir=_MEMORY)
        first = {} if self._nodes else {"include_dashboard": False}
        self._nodes[number] = self._cluster.add_node(
            num_cpus=1,
            object_store_memory=self._objects,
            env_vars={
                "HOTSET_RUNTIME_DIR": self.folders[number],
                "PYTHONPATH": str(_ROOT),
                "OMP_NUM_THREADS": "1",
            },
            **first,
        )
        return number

    def place(self, number: int, kind: type, *arguments: Any) -> Any:
        """Start an actor of this class on a node; returns its handle."""
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        here = NodeAffinitySchedulingStrategy(self._nodes[number].node_id, soft=False)
        return ray.remote(kind).options(num_cpus=0, scheduling_strategy=here).remote(*arguments)

    def together(self, actors: list[Any], method: str, *arguments: Any, **named: Any) -> list[Any]:
        """Call a method of several actors at once; returns what each returns, in their order."""
        import ray

        found: list[Any] = ray.get([getattr(a, method).remote(*arguments, **named) for a in actors])
        return found

    def kill(self, number: int, kind: int = signal.SIGKILL) -> int:
        """Send a signal to all processes of a node, as if its machine lost power; returns how many."""
        pids = list(_processes(self.folders[number]))
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, kind)
        return len(pids)

    def remove(self, number: int) -> None:
        """Have Ray forget a node whose processes are dead."""
        self._cluster.remove_node(self._nodes.pop(number), allow_graceful=False)
        shutil.rmtree(self.folders[number], ignore_errors=True)

    def members(self) -> dict[str, dict[str, Any]]:
        """What each machine of the session says of itself, by name; none while its directory begins again."""
        try:
            return {said["name"]: said for said in status("auto", self.session)}
        except Exception:  # Ray's errors of an actor whose machine died are many
            return {}

    def wait_for(self, machines: int) -> None:
        """Wait until so many machines share the session.

        Raises:
            TimeoutError: they do not.
        """
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while (there := len(self.members())) != machines:
            if time.monotonic() > deadline:
                raise TimeoutError(f"the session has {there} machines instead of {machines}")
            time.sleep(0.1)

    def end_session(self) -> None:
        """End the session on all machines, and begin another one with what comes next."""
        with contextlib.suppress(Exception):  # it was never begun, or its directory is just being restarted
            stop("auto", self.session)
        self.session = f"bench-{secrets.token_hex(4)}"

    def close(self) -> None:
        """End all nodes, and free what they hold."""
        import ray

        ray.shutdown()
        with contextlib.suppress(Exception):
            self._cluster.shutdown()
        for number, folder in self.folders.items():
            self.kill(number)
            shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def ray_nodes(count: int, objects: int = 80 << 20) -> Iterator[Nodes]:
    """So many nodes, to which this process is connected as a driver; see :class:`Nodes`.

    Raises:
        ImportError: Ray is not installed.
    """
    import ray

    nodes = Nodes(objects)
    try:
        for _ in range(count):
            nodes.add()
        ray.init(
            address=nodes._cluster.address,
            namespace="bench",
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
        yield nodes
    finally:
        nodes.close()


def _processes(folder: str) -> Iterator[int]:
    """The processes of a node: those that have its runtime folder in their environment."""
    mark = f"HOTSET_RUNTIME_DIR={folder}".encode()
    for entry in os.listdir("/proc"):
        with contextlib.suppress(OSError):
            if entry.isdigit() and mark in Path("/proc", entry, "environ").read_bytes().split(b"\0"):
                yield int(entry)
