"""The directory: which machines share a session, and which of them is planning how a dataset is cached.

There is one for each session, in an actor of Ray's that Ray starts again, anywhere, if its machine dies. All
that it knows it has from the machines' nodes. Once a second each node sends a heartbeat, which says which
machine it is and which caches it has; the reply says which other machines there are, and describes the caches
that this one lacks. So after a restart a few seconds of heartbeats fill the directory again. Until then it
gives out no list of machines: a list of half of them would move half of the samples. A machine has

    joined       once it has its part of all caches, and all others accept its key; at the latest after
                 `PREPARING` seconds. But not with records from before a clear: it forgets them first
    left         after `SILENT` seconds without a heartbeat, for whatever reason. If most machines fall silent
                 at once, the directory itself was cut off, and it gathers them anew

A machine that has joined gets its samples from the machines that owned them before. So the former machines
are given out too, for `FORMER` seconds: by then all samples that are used at all have moved.

Two machines that plan for one dataset could cut its chain in two places, as the cut depends on measured
times. So the first process that asks for a plan makes it, for all machines; the others wait for it.

The directory knows nothing of Ray: :mod:`hotset.cluster.ray_actors` makes an actor of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from hotset.cluster.membership import Member

__all__ = ["FORMER", "PREPARING", "SILENT", "Described", "Directory", "Heartbeat", "HeartbeatReply"]

SILENT = 6.0
PREPARING = 10.0
FORMER = 600.0
_GATHERING = 15.0
_CUT_OFF = 120.0  # Ray takes a minute to see which machines are dead, and expects none of them then
_PLANNING = 60.0


class Described(NamedTuple):
    """The description of a cache, from which a machine can make its part.

    Attributes:
        meeting: by which machines find the cache: see :class:`hotset.dataset.identity.Identity`.
        samples: length of the dataset.
        schema: of its samples; JSON's types.
        about: its metadata; JSON's types.
    """

    meeting: str
    samples: int
    schema: Any
    about: dict[str, Any]

    @classmethod
    def of(cls, meeting: str, samples: int, metadata: dict[str, Any]) -> Described:
        """Describe a cache by its segment's metadata."""
        here_alone = ("schema", "spill", "meeting")
        about = {key: value for key, value in metadata.items() if key not in here_alone}
        return cls(meeting, samples, metadata["schema"], about)

    @property
    def fingerprint(self) -> str:
        """Identifies what is cached: 32 hexadecimal digits, or the user's own key."""
        return str(self.about["fingerprint"])


class Heartbeat(NamedTuple):
    """What a machine reports to the directory.

    Attributes:
        member: the machine.
        knows: names of the machines whose keys it accepts.
        caches: meetings of the caches that it has.
        news: descriptions of those caches that the directory has asked for.
        clears: how often each of its caches was cleared by the cluster, by meeting.
        status: counters, for users.
    """

    member: Member
    knows: frozenset[str]
    caches: tuple[str, ...]
    news: tuple[Described, ...]
    clears: dict[str, int]
    status: dict[str, Any]


class HeartbeatReply(NamedTuple):
    """The directory's reply to a heartbeat.

    Attributes:
        keys: public keys of all machines that send heartbeats, by name; the machine accepts each of them.
        members: the machines that have joined; None while the directory is gathering them.
        former: the members before the last change; empty after a while, or without a change.
        caches: those that this machine lacks.
        unknown: meetings of caches that the next heartbeat is to describe.
        clears: how often the cluster has cleared each cache that this machine has cleared less often, by
            meeting.
    """

    keys: dict[str, str]
    members: tuple[Member, ...] | None
    former: tuple[Member, ...]
    caches: tuple[Described, ...]
    unknown: tuple[str, ...]
    clears: dict[str, int]


@dataclass
class _Machine:
    """A machine that sends heartbeats: the last one, and by the clock, when that came and the first one."""

    beat: Heartbeat
    heard_at: float
    came_at: float
    has_joined: bool = False


class Directory:
    """The directory of one session.

    Args:
        expected: returns how many machines there should be, as far as that is known; at the beginning the
            directory waits for that many.
        clock: returns seconds.
    """

    def __init__(self, expected: Callable[[], int], clock: Callable[[], float] = time.monotonic) -> None:
        self._expected, self._clock = expected, clock
        self._begun = clock()
        self._has_gathered, self._patience = False, _GATHERING
        self._machines: dict[str, _Machine] = {}  # by name
        self._last: tuple[Member, ...] = ()
        self._former: tuple[Member, ...] = ()
        self._changed_at = self._begun
        self._caches: dict[str, Described] = {}
        self._clears: dict[str, int] = {}
        self._plans: dict[str, tuple[float, str]] = {}

    def beat(self, beat: Heartbeat) -> HeartbeatReply:
        """Take a machine's heartbeat, and reply with what the machine does not know."""
        now, there = self._clock(), set(beat.caches)
        machine = self._machines.setdefault(beat.member.name, _Machine(beat, now, now))
        machine.beat, machine.heard_at = beat, now
        self._drop_silent(now)
        for described in beat.news:
            self.publish(described)
        for meeting, clears in beat.clears.items():
            self._clears[meeting] = max(clears, self._clears.get(meeting, 0))
        self._let_join(now)
        keys = {name: other.beat.member.key for name, other in self._machines.items()}
        caches = tuple(cache for meeting, cache in self._caches.items() if meeting not in there)
        members = self.members()
        if members is not None and _weights(members) != _weights(self._last):
            self._last, self._former, self._changed_at = members, self._last, now
        former = self._former if now - self._changed_at < FORMER else ()
        unknown = tuple(there - set(self._caches))
        return HeartbeatReply(keys, members, former, caches, unknown, self._not_cleared(beat))

    def _not_cleared(self, beat: Heartbeat) -> dict[str, int]:
        """How often the caches were cleared that this machine has not cleared as often."""
        known = beat.clears
        return {meeting: count for meeting, count in self._clears.items() if count > known.get(meeting, 0)}

    def _drop_silent(self, now: float) -> None:
        silent = [name for name, one in self._machines.items() if now - one.heard_at > SILENT]
        if not silent:
            return
        # Machines that fell silent together are found silent one after the other, within a second.
        quiet = [now - one.heard_at > SILENT / 2 for one in self._machines.values() if one.has_joined]
        if 2 * sum(quiet) > len(quiet):  # rather the directory was cut off: gather the machines anew
            self._has_gathered, self._begun, self._patience = False, now, _CUT_OFF
        for gone in silent:
            del self._machines[gone]

    def _let_join(self, now: float) -> None:
        """Note which machines have joined: one that is asked too early refuses, and users are warned."""
        for name, machine in self._machines.items():
            if not machine.has_joined:
                caches = set(machine.beat.caches)
                known = all(name in other.beat.knows for other in self._machines.values())
                is_due = (known and caches >= set(self._caches)) or now - machine.came_at > PREPARING
                machine.has_joined = is_due and not caches & set(self._not_cleared(machine.beat))

    def members(self) -> tuple[Member, ...] | None:
        """The machines that have joined, by name; None while they are being gathered."""
        if not self._has_gathered:
            joined = sum(machine.has_joined for machine in self._machines.values())
            all_here = 0 < self._expected() <= joined
            if not all_here and self._clock() - self._begun < self._patience:
                return None
            self._has_gathered = True
        return tuple(sorted(one.beat.member for one in self._machines.values() if one.has_joined))

    def lack(self, meeting: str) -> int:
        """How many machines lack their part of a cache."""
        return sum(meeting not in machine.beat.caches for machine in self._machines.values())

    def status(self) -> list[dict[str, Any]]:
        """Each machine's counters, with the seconds since it beat last."""
        now = self._clock()
        return [
            {**machine.beat.member._asdict(), **machine.beat.status, "silent": now - machine.heard_at}
            for _, machine in sorted(self._machines.items())
        ]

    def plan(self, meeting: str, who: str) -> Described | bool:
        """Return how the dataset of this meeting is cached; ``who`` names the process that asks.

        Returns:
            The cache's description; True if this process has to plan, and :meth:`publish` the result; False
            if another process is planning.
        """
        if meeting in self._caches:
            return self._caches[meeting]
        now = self._clock()
        since, whose = self._plans.get(meeting, (float("-inf"), who))
        if whose != who and now - since < _PLANNING:
            return False
        self._plans[meeting] = now, who
        return True

    def publish(self, described: Described) -> None:
        """Enter how a dataset is cached; what the first process enters stays."""
        self._caches.setdefault(described.meeting, described)
        self._plans.pop(described.meeting, None)

    def has_alike(self, name: str, samples: int, maker: str) -> bool:
        """Whether another machine than ``maker`` has planned for a dataset of that class and length."""
        return any(
            cache.samples == samples and cache.about["name"] == name and cache.about.get("maker") != maker
            for cache in self._caches.values()
        )

    def give_up(self, meeting: str, who: str) -> None:
        """Let another process plan in place of this one."""
        if self._plans.get(meeting, (0.0, ""))[1] == who:
            del self._plans[meeting]


def _weights(members: tuple[Member, ...]) -> list[tuple[str, int]]:
    return [(member.name, member.capacity) for member in members]
