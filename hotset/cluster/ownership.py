"""Owners: which machine is asked for a sample, and who comes next where that one has no room for it.

Who owns what is computed (:mod:`hotset.policy.rendezvous`), of what the roster says. Shares are drawn, so
that one machine's is a hundredth too large and another's too small: what its owner has no room for the next
in the sample's order takes, or the one after that. No more of them are tried, as where the data are larger
than all memories together each of them would say no, for most of the samples, in every epoch.
"""

from __future__ import annotations

import numpy as np

from hotset.cluster.membership import Member
from hotset.cluster.wire_records import Longs
from hotset.policy.rendezvous import Placement

__all__ = ["FURTHER", "Owned", "Ownership"]

# Some samples of one machine: its name, and which.
Owned = tuple[str, Longs]

FURTHER = 2


class Ownership:
    """Who owns what, among some machines.

    Args:
        me: this machine's name.
        members: all of them.
    """

    def __init__(self, me: str, members: tuple[Member, ...]) -> None:
        self._me, self._names = me, [member.name for member in members]
        capacities = [member.capacity for member in members]
        self._placement = Placement(self._names, capacities) if any(capacities) else None

    def others(self, ids: Longs) -> list[Owned]:
        """The machines but this one that own some of these samples, and which."""
        if self._placement is None or not len(ids):
            return []
        owned = self._grouped(ids, self._placement.owners(ids))
        return [(name, some) for name, some in owned if name != self._me]

    def after(self, ids: Longs, turn: int) -> list[Owned]:
        """The machines, this one too, that come so many places after these samples' owners, and for which."""
        if self._placement is None or turn > FURTHER or not len(ids):
            return []
        order = self._placement.order(ids, turn + 1)
        return self._grouped(ids, order[:, turn]) if order.shape[1] > turn else []

    def _grouped(self, ids: Longs, owners: Longs) -> list[Owned]:
        return [(self._names[number], ids[owners == number]) for number in np.unique(owners).tolist()]
