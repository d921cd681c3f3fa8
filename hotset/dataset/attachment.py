"""The attachment: a cache's store, as each process of a job reaches it.

::

    made or found here     the store itself
    forked                 the same mapping; listed as one more process that keeps the cache alive
    unpickled              an address, attached to at first use; out of reach, samples come from the source
    closed                 nothing
"""

from __future__ import annotations

import os
from typing import Any

from torch.utils.data import get_worker_info

from hotset._warnings import warn
from hotset.determinism.draw_watch import DrawWatch
from hotset.errors import SegmentError
from hotset.session.job_cache import CacheHandle, attach_again
from hotset.session.session_cache import SessionCacheHandle
from hotset.store.ring import attach_store
from hotset.store.segment import Address
from hotset.store.store import Store

__all__ = ["Attachment"]


class Attachment:
    """This process's way to a store. It pickles.

    Args:
        store: it; None if nothing can be cached.
        registration: this process's share in it; None without a store.
        name: of the data set, for people.

    Attributes:
        watch: over what is read for the store; None for none.
    """

    def __init__(self, store: Store | None, registration: CacheHandle | None, name: str) -> None:
        self._store: Store | Address | str | None = store
        self.watch: DrawWatch | None = None
        self._registration = registration
        self._name = name
        self._joined = os.getpid()
        self._set_allowance(store)

    def store(self) -> Store | None:
        """The store, attached to if need be; None if there is none within reach, or after :meth:`close`."""
        if isinstance(self._store, (Address, str)):
            self._store = self._attach(self._store)
            self._joined = 0
        if self._store is not None and self._joined != os.getpid():
            self._join(self._store)
        if self._store is not None and self.watch is not None:
            self._store.filler.watch = self.watch
        return self._store

    def _join(self, store: Store) -> None:
        """List this process as one more that keeps the cache alive; a loader's worker does not outlive it."""
        self._joined = os.getpid()
        if self._registration is not None and get_worker_info() is None:
            self._registration.join(store.segment.fd)

    def _attach(self, address: Address | str) -> Store | None:
        try:
            store = attach_again(address, attach_store)
        except (SegmentError, OSError) as error:
            warn(
                f"the cache of {self._name} is out of reach, so samples come from the source: {error} "
                "Unpickle it on the same machine, while a process that has it lives."
            )
            return None
        self._set_allowance(store)
        return store

    def _set_allowance(self, store: Store | None) -> None:
        """Have it take no more than its session has to give."""
        if store is not None and isinstance(self._registration, SessionCacheHandle):
            store.room.allowance = self._registration
            store.room.knob = "the session's `--memory`"
            if store.spill is not None:
                store.spill.room.knob = "a new session's `--spill`"

    def close(self) -> None:
        """Detach."""
        store, self._store = self._store, None
        if isinstance(store, Store):
            store.close()
        if self._registration is not None:
            self._registration.close()
            self._registration = None

    def __getstate__(self) -> dict[str, Any]:
        store = self.store()
        return {**self.__dict__, "_store": store.address if store is not None else None}
