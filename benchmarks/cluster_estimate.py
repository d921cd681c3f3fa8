"""The epoch time of clusters that are not here, on paper, from rates that were measured here.

A cluster of N machines shares D bytes; each machine takes its part of every epoch, ``c = D / N`` bytes, and
finds one of N samples in its own memory::

    local(N)   =  c * 1/N / g                   g: gathering what the machine holds, bytes a second
    asked(N)   =  c * (N - 1)/N / p             p: asking another machine, bytes a second
    wire(N)    =  c * (N - 1)/N / b             b: the machine's network, each way at once

    later(N)   =  max(local(N) + asked(N), wire(N))
    source(N)  =  D / s                         s: the source, shared by all machines
    first(N)   =  max(source(N), later(N))      each sample once from the source, then to its owner

``g`` and ``p`` are of one process that loads, and of one that serves: one core each, and nothing overlaps.
More loading processes on a machine divide ``local`` and ``asked``, up to what its one serving thread and its
network give. That each machine is asked for as much as it asks is what placement sees to: the largest share
is within 5 % of the mean (the benchmark ``placement``). What is not in it: a network that is slower where all
machines talk at once, machines that wait for each other's steps, and whatever training itself takes.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Rates", "Times", "estimate"]


class Rates(NamedTuple):
    """Bytes a second.

    Attributes:
        local: gathering what the machine holds.
        peer: asking another machine.
        wire: of a machine's network, each way.
        source: of the storage, shared by all machines.
    """

    local: float
    peer: float
    wire: float
    source: float


class Times(NamedTuple):
    """Seconds of an epoch: reading the source, with the cluster in the first epoch, and in each later one."""

    source: float
    first: float
    later: float


def estimate(machines: int, size: float, rates: Rates) -> Times:
    """Return the epoch times of so many machines; the formula is in the module's docstring.

    Args:
        machines: N.
        size: D, bytes of the data.
        rates: of one machine.

    Example:
        >>> estimate(4, 4e9, Rates(local=2e9, peer=5e8, wire=1.25e9, source=2e8))
        Times(source=20.0, first=20.0, later=1.625)
    """
    part = size / machines
    others = part * (machines - 1) / machines
    later = max(part / machines / rates.local + others / rates.peer, others / rates.wire)
    source = size / rates.source
    return Times(source, max(source, later), later)
