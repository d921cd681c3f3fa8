"""Several machines: what :func:`hotset.cache` does differently with ``cluster=``.

How a data set is cached is found out by one process, for all machines; the others take that over as ranks of
one job do, and each machine has its part of the cache in a session of its own. What a process then lacks it
gets from its neighbours (:mod:`hotset.cluster.remote_cache`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from hotset._warnings import warn
from hotset.dataset.identity import Identity
from hotset.dataset.pipeline import Pipeline
from hotset.dataset.planner import CacheOptions, PlanResult, joined_plan, make_plan
from hotset.errors import ArgumentError, ClusterError
from hotset.store.memory_limits import headroom
from hotset.store.schema import Schema
from hotset.store.store import Store
from hotset.units import parse_bytes

if TYPE_CHECKING:  # what they need is an extra
    from hotset.cluster.ray_join import Joined
    from hotset.cluster.remote_cache import RemoteCache

__all__ = ["join_machines", "neighbours_of", "planned_by_all", "require_machines"]


def require_machines(cluster: object, session: object, window: object) -> None:
    """Refuse what machines cannot share.

    Raises:
        ArgumentError: says what, and which argument to change.
    """
    if not isinstance(cluster, str) or not cluster:
        raise ArgumentError(f'cluster={cluster!r} is no address; write cluster="auto", or host:port.')
    if window is not None:
        raise ArgumentError(
            "window= and cluster= cannot be combined; give each machine its own torch.utils.data.Subset of "
            "the dataset with its own window=, and leave out cluster= and session=."
        )
    if not isinstance(session, str):
        raise ArgumentError(
            'the machines of a cluster find each other by their session\'s name; write session="...".'
        )


def join_machines(cluster: str, session: str, memory: int | str) -> Joined:
    """Join a session that several machines share.

    Raises:
        ClusterError: what that needs is not installed, or no Ray cluster can be reached.
    """
    try:
        import zmq  # noqa: F401

        from hotset.cluster.ray_join import join
    except ImportError as error:
        raise ClusterError(
            f"cluster= needs {error.name}, which is not installed here; run `pip install 'hotset[ray]'` on "
            "all machines."
        ) from error
    whole = headroom().limit  # as `hotset session create` has it; of this machine, for all that have none
    return join(cluster, session, None if memory == "auto" else parse_bytes(memory, whole=lambda: whole))


def planned_by_all(
    joined: Joined,
    uncut: Pipeline,
    wanted: CacheOptions,
    identity: Identity,
    create: Callable[[PlanResult], Store | None],
) -> tuple[PlanResult, Store | None]:
    """Take over how another machine caches this, or find it out, and make this machine's part of the cache.

    Raises:
        Exception: see :func:`make_plan`.
    """
    from hotset.cluster.directory import Described

    metadata = {"meeting": identity.lookup_key, "maker": joined.machine}
    with joined.planning(identity.lookup_key) as described:
        if described is not None:
            made = joined_plan(uncut, wanted, identity, described.about)
            made = made._replace(schema=Schema.from_json(described.schema), metadata=metadata)
            return made, create(made)
        made = make_plan(uncut, wanted, identity)._replace(metadata=metadata)
        if joined.has_alike(made.plan.name, made.plan.samples):
            warn(
                f"{made.plan.name}: another machine caches a data set of this class and length under another "
                "fingerprint, so the two share nothing. If they are the same data (files whose dates or "
                'folders differ from machine to machine, say), name them: hotset.cache(..., key="...").'
            )
        store = create(made)
        if store is not None:
            joined.publish(Described.of(identity.lookup_key, len(store), store.segment.metadata))
        return made, store


def neighbours_of(wanted: CacheOptions, identity: Identity, store: Store | None) -> RemoteCache | None:
    """The way to the other machines, once all have their part of the cache; None if there are none."""
    joined = wanted.joined
    if joined is None or store is None:
        return None
    from hotset.cluster.node import fingerprint_of
    from hotset.cluster.remote_cache import RemoteCache

    joined.wait_for_all(identity.lookup_key)
    return RemoteCache(joined.number, fingerprint_of(store.segment.metadata), replicate=wanted.replicate)
