"""Patience of the tests' Ray processes: what comes of a claim must not depend on how busy this machine is.

Ray calls :func:`be_patient` in each process that it starts, before anything else; see ``HOOK``.
"""

from __future__ import annotations

from hotset.cluster import sockets
from hotset.cluster.membership import Member

__all__ = ["HOOK", "PATIENCE", "be_patient"]

PATIENCE = 60.0  # seconds
HOOK = {"worker_process_setup_hook": "ray_patient.be_patient"}


def be_patient() -> None:
    """Have a node that begins in this process be waited for, and others not be missed here."""
    Member.__new__.__defaults__ = (PATIENCE,)
    sockets._HEARTBEAT = sockets._HANDSHAKE = 0
