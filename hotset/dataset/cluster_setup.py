"""Several machines: what :func:`hotset.cache` does differently with ``cluster=``.

One process makes the plan for all machines; the others take it over, as ranks of one job do, and each machine
holds its part of the cache in a session of its own. A process gets the samples that its machine does not hold
from the machines that do (:mod:`hotset.cluster.remote_cache`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from hotset._warnings import warn
from hotset.dataset.arguments import CacheOptions
from hotset.dataset.identity import Identity
from hotset.dataset.pipeline import Pipeline
from hotset.dataset.planning.planner import PlanResult, joined_plan, make_plan
from hotset.errors import ClusterError
from hotset.store.leaves.schema import Schema
from hotset.store.memory_limits import headroom
from hotset.store.store import Store
from hotset.units import parse_bytes

if TYPE_CHECKING:  # what they need is an extra
    from hotset.cluster.ray_join import Joined
    from hotset.cluster.remote_cache import RemoteCache

__all__ = ["join_machines", "planned_by_all", "remote_cache"]


def join_machines(cluster: str, session: str, memory: int | str) -> Joined:
    """Join a session that several machines share.

    Raises:
        ClusterError: a package is not installed, or no Ray cluster can be reached.
    """
    try:
        import zmq  # noqa: F401

        from hotset.cluster.ray_join import join
    except ImportError as error:
        raise ClusterError(
            f"cluster= needs {error.name}, which is not installed here; run `pip install 'hotset[ray]'` on "
            "all machines."
        ) from error
    whole = headroom().limit  # the default of `hotset session create`; for machines without such a session
    return join(cluster, session, None if memory == "auto" else parse_bytes(memory, whole=lambda: whole))


def planned_by_all(
    joined: Joined,
    pipeline: Pipeline,
    options: CacheOptions,
    identity: Identity,
    create: Callable[[PlanResult], Store | None],
) -> tuple[PlanResult, Store | None]:
    """Take over another machine's plan, or make one, and make this machine's part of the cache.

    Raises:
        Exception: see :func:`make_plan`.
    """
    from hotset.cluster.directory import Described

    metadata = {"meeting": identity.lookup_key, "maker": joined.machine}
    with joined.planning(identity.lookup_key) as described:
        if described is not None:
            result = joined_plan(pipeline, options, identity, described.about)
            schema = Schema.from_json(described.schema)
            result = result._replace(schema=schema, metadata={**result.metadata, **metadata})
            return result, create(result)
        result = make_plan(pipeline, options, identity)
        result = result._replace(metadata={**result.metadata, **metadata})
        if joined.has_alike(result.plan.name, result.plan.samples):
            warn(
                f"{result.plan.name}: another machine caches a dataset of this class and length under "
                "another fingerprint, so the two share nothing. If they are the same data (for example, "
                "files whose dates or folders differ between machines), name them: "
                'hotset.cache(..., key="...").'
            )
        store = create(result)
        if store is not None:
            joined.publish(Described.of(identity.lookup_key, len(store), store.segment.metadata))
        return result, store


def remote_cache(options: CacheOptions, identity: Identity, store: Store | None) -> RemoteCache | None:
    """The other machines' parts of the cache, once all are made; None without other machines."""
    joined = options.joined
    if joined is None or store is None:
        return None
    from hotset.cluster.node import fingerprint_of
    from hotset.cluster.remote_cache import RemoteCache

    why = joined.wait_for_all(identity.lookup_key)
    if why is not None:
        warn(
            f"session {joined.session!r} is not ready on all machines: {why}. Samples that other machines "
            "own come from the source until it is; `hotset cluster status` shows the machines."
        )
    return RemoteCache(
        joined.number, fingerprint_of(store.segment.metadata), replicate=options.given.replicate
    )
