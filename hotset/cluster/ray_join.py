"""Joining: how a program gets to a session that the machines of a Ray cluster share, and manages it.

A process that trains needs Ray once, in :func:`join`. After that it reads the membership file, and
disconnects from Ray if it was connected for this alone. Ray Client (``ray://``) is refused: its process is on
no machine of the cluster.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import time
from collections.abc import Iterator
from typing import Any

from hotset.cluster.directory import Described
from hotset.cluster.membership import read_membership
from hotset.cluster.ray_actors import ANSWER_SECONDS, NAMESPACE, DirectoryActor, directory_name, node_name
from hotset.errors import ClusterError, SessionError
from hotset.session.session_definition import Session
from hotset.session.sessions import find

__all__ = ["Joined", "join", "sessions", "status", "stop"]

_LOOK_SECONDS = 0.1
_JOIN_SECONDS = 60.0
_PLAN_SECONDS = 120.0
_READY_SECONDS = 20.0
_ANEW_SECONDS = 10.0
# Processes of the machine that are reading are waited for: see hotset.session.session_files.
_DESTROY_SECONDS = 30.0


class Joined:
    """A session that several machines share, as a process has joined it.

    Attributes:
        session: its name.
        number: its number on this machine.
    """

    def __init__(
        self, session: str, number: int, directory: Any, *, node: Any = None, alone: bool = False
    ) -> None:
        self.session, self.number = session, number
        self._directory, self._node, self._alone = directory, node, alone
        self._who = f"{os.uname().nodename}-{os.getpid()}"

    def here(self) -> Session:
        """The session as it is on this machine.

        Raises:
            SessionError: it is not there.
        """
        try:
            return find(self.number)
        except SessionError:
            raise SessionError(
                f"session {self.session!r} of the cluster is not there on this machine. If it was just "
                "destroyed, or has expired, its node makes it anew: try again. If that does not help, "
                "HOTSET_RUNTIME_DIR or the user is another one here than for `ray start`."
            ) from None

    def is_gone(self) -> bool:
        """Whether the session is not there; what else may be wrong :meth:`here` says."""
        try:
            self.here()
        except SessionError:
            return True
        except OSError:
            pass
        return False

    @contextlib.contextmanager
    def planning(self, meeting: str) -> Iterator[Described | None]:
        """A block that gets a dataset's cache as it is planned; None if this process has to plan.

        A process that plans does so for all machines, and calls :meth:`publish` in the block; if it does not,
        the next process plans. If the directory does not answer, every process plans.
        """
        found: Described | bool | None = False
        deadline = time.monotonic() + _PLAN_SECONDS
        while found is False and time.monotonic() < deadline:
            found = _answer(self._directory, "plan", meeting, self._who)
            if found is False:
                time.sleep(_LOOK_SECONDS)
        try:
            yield found if isinstance(found, Described) else None
        finally:
            if found is True:
                _answer(self._directory, "give_up", meeting, self._who)

    def leave(self) -> None:
        """Disconnect from Ray, if this process is connected to it for this alone.

        Otherwise Ray would end the process a minute after the Ray cluster has ended.
        """
        if self._alone:
            import ray

            ray.shutdown()

    @property
    def machine(self) -> str:
        """This machine's name, which outlives its session; empty before it has one."""
        membership = read_membership(self.number)
        return membership.me if membership is not None else ""

    def publish(self, described: Described) -> None:
        """Enter how a dataset is cached in the directory."""
        _answer(self._directory, "publish", described)

    def has_alike(self, name: str, samples: int) -> bool:
        """Whether another machine caches a dataset of that class and length."""
        return bool(_answer(self._directory, "has_alike", name, samples, self.machine))

    def wait_for_all(self, meeting: str) -> str | None:
        """Wait, not for long, until all machines have their part of a cache, and this one knows of them.

        Returns:
            Why they have not, after that time; None if they have.
        """
        deadline = time.monotonic() + _READY_SECONDS
        known, lacking = False, None
        while time.monotonic() < deadline:
            answer = _answer(self._directory, "lack", meeting)
            lacking = lacking if answer is None else answer
            known = read_membership(self.number) is not None
            if known and lacking == 0:
                return None
            time.sleep(_LOOK_SECONDS)
        if lacking is None:
            return "the directory of the session does not answer"
        if not known:
            return f"the node of this machine does not know the other machines{self._trouble()}"
        return f"{lacking} of the machines have not made their part of the cache{self._trouble()}"

    def _trouble(self) -> str:
        """What this machine's node says is wrong, in parentheses; empty if it says nothing."""
        trouble = _answer(self._node, "trouble")
        return f" ({trouble})" if trouble else ""


def _answer(actor: Any, method: str, *args: Any) -> Any:
    """What an actor's method returns; None if it has not answered in time, or has failed."""
    import ray

    with contextlib.suppress(Exception):
        return ray.get(getattr(actor, method).remote(*args), timeout=ANSWER_SECONDS)
    return None


def join(address: str, session: str, memory: int | None) -> Joined:
    """Join a session that the machines of a Ray cluster share; it is made where it is not there.

    Args:
        address: of the Ray cluster; ``"auto"``: the one that this process or this machine belongs to.
        session: name.
        memory: bytes that it may hold on each machine where it has to be made; None: half of what is free.

    Raises:
        ClusterError: Ray is not installed, no cluster runs there, or this machine has no part in it.
    """
    alone = not _is_connected()
    ray = _connect(address)
    directory = ray.remote(DirectoryActor).options(
        name=directory_name(session),
        namespace=NAMESPACE,
        lifetime="detached",
        get_if_exists=True,
        max_restarts=-1,
        num_cpus=0,
    )
    handle = directory.remote(session, memory)
    here = ray.get_runtime_context().get_node_id()
    begun = time.monotonic()
    why = "it has not started in time; look at `ray status`, and whether hotset is installed on all machines"
    while time.monotonic() < begun + _JOIN_SECONDS:
        with contextlib.suppress(Exception):
            node = ray.get_actor(node_name(session, here), namespace=NAMESPACE)
            number = ray.get(node.session_number.remote(), timeout=ANSWER_SECONDS)
            joined = Joined(session, number, handle, node=node, alone=alone)
            # It may be gone for the moment, and under another number with one of the node's next beats.
            if not joined.is_gone() or time.monotonic() > begun + _ANEW_SECONDS:
                return joined
        with contextlib.suppress(Exception):
            why = ray.get(handle.why.remote(here), timeout=ANSWER_SECONDS) or why
        time.sleep(_LOOK_SECONDS)
    if alone:
        ray.shutdown()
    raise ClusterError(f"session {session!r} has no node on this machine: {why}.")


def status(address: str, session: str) -> list[dict[str, Any]]:
    """What each machine of a session says of itself.

    Raises:
        ClusterError: there is no such session in that cluster, or it does not answer.
    """
    ray = _connect(address)
    directory = _find(ray, session)
    try:
        found: list[dict[str, Any]] = ray.get(directory.status.remote(), timeout=ANSWER_SECONDS)
    except ray.exceptions.RayError as error:
        raise ClusterError(
            f"the directory of session {session!r} does not answer; Ray may be starting it again, so ask "
            f"once more: {str(error).splitlines()[0]}"
        ) from error
    return found


def stop(address: str, session: str) -> int:
    """End a session on all machines; returns the bytes that were freed.

    Raises:
        ClusterError: there is no such session in that cluster, or a machine has not said that it is freed.
    """
    ray = _connect(address)
    directory = _find(ray, session)
    ray.kill(directory)  # first, or it would start the nodes anew
    asked = {}
    for name in _names(ray):
        if name.startswith(node_name(session, "")):
            with contextlib.suppress(ValueError):  # it has just ended
                node = ray.get_actor(name, namespace=NAMESPACE)
                asked[name] = node, node.destroy.remote()
    freed, silent = 0, []
    deadline = time.monotonic() + _DESTROY_SECONDS
    for name, (node, answer) in asked.items():
        try:
            freed += ray.get(answer, timeout=max(deadline - time.monotonic(), 0.1))
        except Exception:  # it is late, or its process, or its machine, is dead
            silent.append(name)
        with contextlib.suppress(Exception):
            ray.kill(node)
    # With a machine its memory is gone.
    alive = {node_name(session, each["NodeID"]) for each in ray.nodes() if each["Alive"]} if silent else {}
    late = [name.rpartition(":")[2] for name in silent if name in alive]
    if late:
        raise ClusterError(
            f"session {session!r} has ended, but {len(late)} of its machines (Ray's nodes {', '.join(late)}) "
            f"did not say within {_DESTROY_SECONDS:.0f} s that its memory is free; run `hotset session "
            f"destroy {session}` there."
        )
    return freed


def sessions(address: str) -> list[str]:
    """Names of the sessions that the machines of a cluster share.

    Raises:
        ClusterError: it cannot be reached.
    """
    names = _names(_connect(address))
    return [name.removeprefix(directory_name("")) for name in names if ":" not in name]


def _names(ray: Any) -> list[str]:
    """All actors of hotset's, sorted."""
    found = ray.util.list_named_actors(all_namespaces=True)
    return sorted(actor["name"] for actor in found if actor["namespace"] == NAMESPACE)


def _connect(address: str) -> Any:
    """Connect to a Ray cluster, unless this process is connected; returns the module ``ray``.

    Raises:
        ClusterError: it is not installed, or there is no cluster.
    """
    if address.startswith("ray://"):
        raise ClusterError(
            f"cluster={address!r} is Ray Client, whose process is on no machine of the cluster; run the "
            "program in the cluster (`ray job submit`), with cluster='auto'."
        )
    try:
        import ray
    except ImportError as error:
        raise ClusterError(
            "cluster= needs Ray, which is not installed here; run `pip install 'hotset[ray]'` on all "
            "machines."
        ) from error
    if not ray.is_initialized():
        try:
            _require_open(address)
            ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, logging_level=logging.ERROR)
        except (OSError, ValueError, RuntimeError) as error:
            raise ClusterError(
                f"no Ray cluster can be reached by cluster={address!r}: {error}. Start one "
                "(`ray start --head`, and `ray start --address=...` on the others), give this process the "
                "token of one that asks for it (`RAY_AUTH_MODE=token`), or leave out cluster=."
            ) from error
    return ray


def _is_connected() -> bool:
    with contextlib.suppress(ImportError):
        import ray

        return bool(ray.is_initialized())
    return False


def _require_open(address: str) -> None:
    """Check that a process listens there: Ray itself would wait for minutes.

    Raises:
        OSError: none does.
        ValueError: it is not an address.
    """
    host, _, port = address.rpartition(":")
    if host:
        socket.create_connection((host, int(port)), ANSWER_SECONDS).close()


def _find(ray: Any, session: str) -> Any:
    try:
        return ray.get_actor(directory_name(session), namespace=NAMESPACE)
    except ValueError as error:
        raise ClusterError(
            f"no machine of this Ray cluster shares a session {session!r}; a job makes it by "
            f"hotset.cache(..., cluster='auto', session={session!r})."
        ) from error
