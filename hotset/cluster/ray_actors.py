"""Actors: the directory and the nodes of a session, as Ray keeps them alive.

::

    hotset-<session>              the directory: one, anywhere; restarted with its machine's death
    hotset-<session>:<node>       a node: one on each machine of the Ray cluster, bound to it

The directory starts the nodes, of machines that join later too. All are detached, as the session outlives its
jobs: they are there until the session is stopped, or the Ray cluster ends. They take no CPU of Ray's.

Ray is imported here and in :mod:`hotset.cluster.ray_join` alone; the extra ``hotset[ray]`` brings it along.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from typing import Any

from hotset.cluster.directory import Directory, Heartbeat, HeartbeatReply

__all__ = ["ANSWER_SECONDS", "NAMESPACE", "DirectoryActor", "directory_name", "node_name"]

NAMESPACE = "hotset"
_LOOK_SECONDS = 1.0
ANSWER_SECONDS = 5.0


class DirectoryActor(Directory):
    """The directory, which also sees to it that each machine has a node."""

    def __init__(self, session: str, memory: int | None) -> None:
        self._nodes: dict[str, Any] = {}
        super().__init__(expected=lambda: len(self._nodes))
        self._session, self._memory = session, memory
        self._why: dict[str, str] = {}
        threading.Thread(target=self._supervise, name="hotset directory", daemon=True).start()

    def why(self, node: str) -> str:
        """Why there is no node on a machine, as a sentence; empty if nothing is known to be wrong."""
        return self._why.get(node, "")

    def _supervise(self) -> None:
        while True:
            with contextlib.suppress(Exception):  # Ray is busy, or just losing a machine
                self._start_nodes()
            time.sleep(_LOOK_SECONDS)

    def _start_nodes(self) -> None:
        import ray
        from ray.exceptions import RayActorError
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        for machine in _machines():
            node = machine["NodeID"]
            if not machine["Alive"]:
                self._nodes.pop(node, None)
                continue
            if node in self._nodes:
                try:
                    ready, _ = ray.wait([self._nodes[node][1]], timeout=0)
                    if ready:
                        ray.get(ready[0])
                        self._why.pop(node, None)
                except RayActorError as error:
                    self._why[node] = str(error).strip().splitlines()[-1]
                    del self._nodes[node]
                continue
            actor = ray.remote(NodeActor).options(
                name=node_name(self._session, node),
                namespace=NAMESPACE,
                lifetime="detached",
                get_if_exists=True,
                max_restarts=-1,
                max_concurrency=4,
                num_cpus=0,
                scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
            )
            handle: Any = actor.remote(self._session, self._memory, machine["NodeManagerAddress"])
            self._nodes[node] = handle, handle.ping.remote()


class NodeActor:
    """A machine's node."""

    def __init__(self, session: str, memory: int | None, host: str) -> None:
        import ray

        from hotset.cluster.node import Node  # brings torch along, which the directory does without
        from hotset.store.memory_limits import keep_freed_memory

        keep_freed_memory()  # what is sent and received is allocated for each message

        directory: list[Any] = []

        def beat(said: Heartbeat) -> HeartbeatReply:
            # Looked up anew where it did not answer: it may have begun again under another address.
            if not directory:
                directory.append(ray.get_actor(directory_name(session), namespace=NAMESPACE))
            try:
                heard: HeartbeatReply = ray.get(directory[0].beat.remote(said), timeout=ANSWER_SECONDS)
            except Exception:
                directory.clear()
                raise
            return heard

        self._node = Node(session, memory, host, beat)

    def ping(self) -> int:
        """The number of the process."""
        return os.getpid()

    def session_number(self) -> int:
        """The number of the session on this machine."""
        return self._node.session.number

    def trouble(self) -> str:
        """What the node's last beat could not do, and why; empty if it has done all."""
        return self._node.trouble

    def destroy(self) -> int:
        """Serve no more, and destroy the session; returns the bytes that were freed."""
        self._node.close()
        return self._node.destroy()


def _machines() -> list[dict[str, Any]]:
    import ray

    found: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    return found


def directory_name(session: str) -> str:
    return f"hotset-{session}"


def node_name(session: str, node: str) -> str:
    return f"{directory_name(session)}:{node[:16]}"  # no session has a colon in its name
