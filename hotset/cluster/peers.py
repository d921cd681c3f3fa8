"""The company: the machines that share a session, as one process knows them from the roster.

A peer to ask for each of the others, who owns what among them now, and who did before they changed. What
passes between this machine and the others is added to the session's tally.
"""

from __future__ import annotations

import contextlib

from hotset.cluster.client import Peer, PeerClients
from hotset.cluster.membership import PATIENCE, Membership, MembershipFile
from hotset.cluster.ownership import Owned, Ownership
from hotset.cluster.peer_stats import PeerStats
from hotset.cluster.peer_stats_file import Tally, read_tally
from hotset.cluster.wire_records import Longs

__all__ = ["Peers"]


class Peers:
    """The machines of a session. Used by one thread at a time.

    Args:
        number: of the session on this machine.

    Attributes:
        peers: the other machines, by name.
        troubles: what is wrong with machines, and their names: to be told by who uses this.
        owners: who owns what; None before this machine was told who is there. Another object whenever the
            list of machines has changed.
    """

    def __init__(self, number: int) -> None:
        self._number = number
        self._file = MembershipFile(number)
        self._roster: Membership | None = None  # what all else is made of
        self._former: Ownership | None = None
        self._connections: PeerClients | None = None
        self._tally = Tally(number)
        self.peers: dict[str, Peer] = {}
        self.owners: Ownership | None = None
        self.troubles: list[tuple[str, str]] = []

    @property
    def roster(self) -> Membership | None:
        """Which machines there are, as far as this one knows; None before it was told."""
        return self._file.current()

    def look(self) -> None:
        """See who is there; peers are made for machines that have come, and closed for those that left."""
        roster = self._file.current()
        if roster is None or self._roster is roster:
            return
        if self._connections is None or self._roster is None or self._roster.keys != roster.keys:
            if self._connections is not None:
                self._connections.close()
            self._connections, self.peers = PeerClients(roster.keys, self._hear), {}
        there = {member.name: member for member in roster.members if member.name != roster.me}
        for name in [name for name in self.peers if name not in there]:
            del self.peers[name]
            self._connections.remove(name)
        for name, member in there.items():
            known = self.peers.get(name)
            if known is None or known.endpoint != member.endpoint:
                self.count(now=known is not None)
                self.peers[name] = self._connections.add(name, member.endpoint, member.key.encode())
        self._roster, self.owners = roster, Ownership(roster.me, roster.members)
        self._former = Ownership(roster.me, roster.former) if roster.former else None

    def _hear(self, sentence: str, machine: str) -> None:
        self.troubles.append((sentence, machine))

    @property
    def me(self) -> str:
        """This machine's name."""
        assert self._roster is not None
        return self._roster.me

    @property
    def capacity(self) -> int:
        """Bytes that this machine can hold."""
        assert self._roster is not None
        return next((m.capacity for m in self._roster.members if m.name == self._roster.me), 0)

    def patience(self, name: str) -> float:
        """Seconds that an answer of this machine is waited for."""
        assert self._roster is not None
        return next((m.patience for m in self._roster.members if m.name == name), PATIENCE)

    def others(self, ids: Longs) -> list[Owned]:
        """The other machines that own some of these samples, and which."""
        assert self.owners is not None
        return self.owners.others(ids)

    def after(self, ids: Longs, turn: int) -> list[Owned]:
        """The machines, this one too, that come so many places after these samples' owners."""
        assert self.owners is not None
        return self.owners.after(ids, turn)

    def former(self, ids: Longs) -> list[Owned]:
        """Who owned these samples before the roster changed, as far as they are still there, and not this."""
        owners = self._former.others(ids) if self._former is not None else []
        return [(name, some) for name, some in owners if name in self.peers]

    def gone(self) -> list[str]:
        """The machines that left a short while ago, by name: they may come back with what they had."""
        former = self._roster.former if self._roster is not None else ()
        return [member.name for member in former if member.name not in {*self.peers, self.me}]

    # ---- counting ------------------------------------------------------------------------------------

    def count(self, *, now: bool = False) -> None:
        """Add what was counted to the tally, if that is not just done; ``now``: in any case."""
        self._tally.add({name: peer.traffic for name, peer in self.peers.items()}, now=now)

    def traffic(self) -> dict[str, PeerStats]:
        """What passed between this machine and each other one, for all caches of the session; by name."""
        with contextlib.suppress(OSError):
            return read_tally(self._number)
        return {}

    def close(self) -> None:
        """Close all connections."""
        if self._connections is not None:
            self.count(now=True)
            self._connections.close()
        self._connections, self._roster, self.owners, self.peers = None, None, None, {}
