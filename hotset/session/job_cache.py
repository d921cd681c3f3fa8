"""Sharing: the ranks of one job that ask for the same thing get one, whoever of them comes first.

::

    rank ── its turn ── a living one in the list? ── yes ── take a share, attach ─────────────> joined
                                  └── no ── create (reads the source) ── list it ── turn ends ─> made

Creating takes seconds, and all ranks come at once, so they take turns (:mod:`hotset.session.named_lock`): the
first creates, the others wait and then find it. What if the creator dies:

===================================  =====================================================================
before it has listed the cache       the memory dies with it, its turn ends, the next rank creates
after that, nobody else has joined   the lock on the list's file is gone: dead, the next rank creates
after others have joined             they keep the memory, and are listed as holders: reached through them
===================================  =====================================================================

Waiting is bounded, because a creator may be stopped. Who has waited in vain, or finds no folder to meet in,
makes one for itself: that takes memory and costs one warning, and training goes on.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from hotset._warnings import warn
from hotset.errors import SegmentError
from hotset.session import catalog as registry
from hotset.session.entry import Entry
from hotset.session.job import Job, this_job
from hotset.session.named_lock import Turns
from hotset.session.runtime_dir import KNOB
from hotset.store.segment import Address, Segment

__all__ = ["CacheHandle", "HasSegment", "Shared", "address_of", "attach_again", "share"]

PATIENCE_SECONDS = 120.0


class HasSegment(Protocol):
    """What can be shared: something over a segment in a memfd, a :class:`~hotset.store.store.Store` say."""

    segment: Segment


class CacheHandle(Protocol):
    """A process's share in what others use too."""

    def join(self, memory: int = -1) -> bool:
        """Take a share of this process's own; False if there is nothing to share any more."""

    def close(self) -> None:
        """Give the share back."""


S = TypeVar("S", bound=HasSegment)


@dataclass(frozen=True)
class Shared(Generic[S]):  # Python 3.10 has no generic named tuples
    """What :func:`share` found or made.

    Attributes:
        value: what ``create`` or ``attach`` returned; None only if ``create`` did.
        registration: this process's share in it; close it when ``value`` is closed. None without a value.
        joined: whether another one's was attached, and ``create`` was not called.
    """

    value: S | None
    registration: CacheHandle | None
    joined: bool


def share(
    key: str, name: str, *, create: Callable[[], S | None], attach: Callable[[Address], S]
) -> Shared[S]:
    """Return what another rank of this job has made for ``key`` here; if none has, make it and list it.

    A process that is no rank always makes its own. What one rank asks for twice is shared as well.

    Args:
        key: what is in it, all of it: two processes with one key must want the same. Any length.
        name: a label for people.
        create: makes it, or returns None if that cannot be done: then the next rank tries. Nobody else in the
            job creates for this key meanwhile.
        attach: attaches to one that lives.

    Returns:
        The value, and this process's share in it.

    Raises:
        Whatever ``create`` raises, untouched; the next rank creates then.

    Warns:
        HotsetWarning: the ranks could not meet, so that this one made its own, or it could not be listed.
    """
    job = this_job()
    key = _digest(key)
    if not job.takes:
        return _make(job, key, name, create, "")
    turn = _Turn([_digest(launcher, key) for launcher in job.launchers], PATIENCE_SECONDS)
    with turn:
        found, why = None, turn.why
        try:
            found = _join(job, key, attach)
        except OSError as error:
            why = _unusable(error)
        return found or _make(job, key, name, create, why)


class _Turn(Turns):
    """A turn without which one goes on, for a reason."""

    why = ""

    def take(self) -> bool:
        try:
            mine = super().take()
        except OSError as error:
            self.why = _unusable(error)
            return False
        if not mine:
            self.why = (
                f"another rank began to make it and has not ended for {PATIENCE_SECONDS:.0f} s; look "
                "whether one is stopped, or reads its first samples that slowly"
            )
        return mine


def _unusable(error: OSError) -> str:
    return f"the runtime folder cannot be used; set {KNOB} to a folder of your own: {error}"


def _make(job: Job, key: str, name: str, create: Callable[[], S | None], why: str) -> Shared[S]:
    """Make it and list it; with a warning if ``why`` says why it is not another rank's."""
    value = create()
    if value is None:
        return Shared(None, None, joined=False)
    registration = _list(value.segment.address, name, key, job)
    if why and registration.joined:  # else it has warned of the same folder
        warn(f"The cache {name!r} is this rank's own, and takes memory besides the other ranks' one: {why}.")
    return Shared(value, registration, joined=False)


def _join(job: Job, key: str, attach: Callable[[Address], S]) -> Shared[S] | None:
    """Attach to the oldest cache of that key that is offered to this job and can be reached."""
    for entry in registry.entries():
        if entry.key != key or not set(entry.groups) & set(job.takes):
            continue
        registration = registry.CatalogHandle(entry.nonce, entry.name)
        # The share first: what is attached and not listed could be collected, and made a second time.
        if registration.join():
            with contextlib.suppress(OSError):
                value = attach(address_of(entry))
                registration.join(value.segment.fd)
                return Shared(value, registration, joined=True)
            registration.close()  # of a dead one, that removes what it has left
    return None


def attach_again(address: Any, attach: Callable[[Any], S]) -> S:
    """Attach to a cache where it was when its address was sent, or to whoever has its memory open by now.

    Args:
        address: an :class:`Address`, or the path of a session's.
        attach: takes that.

    Raises:
        OSError: what ``attach`` raises, if nobody within reach has.
    """
    try:
        return attach(address)
    except OSError:
        entry = registry.find(address.nonce.hex()) if isinstance(address, Address) else None
        if entry is None:
            raise
        return attach(address_of(entry))


def address_of(entry: Entry) -> Address:
    """Return where the memory of a listed cache can be had now.

    Raises:
        SegmentError: nobody within reach has it open.
    """
    if entry.at is None:
        raise SegmentError(f"the memory of {entry.name!r} is out of reach: nobody here has it open any more.")
    return Address(*entry.at, entry.inode, bytes.fromhex(entry.nonce))


def _list(address: Address, name: str, key: str, job: Job) -> registry.CatalogHandle:
    with contextlib.suppress(OSError):
        registry.gc()  # what dead processes left; whether the folder is usable, register says
    return registry.register(
        pid=address.pid,
        fd=address.fd,
        inode=address.inode,
        nonce=address.nonce.hex(),
        name=name,
        key=key,
        groups=job.offers,
    )


def _digest(*parts: str) -> str:
    """Return 32 hexadecimal digits for these texts."""
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        encoded = part.encode("utf-8", "surrogatepass")
        digest.update(len(encoded).to_bytes(8, "little") + encoded)
    return digest.hexdigest()
