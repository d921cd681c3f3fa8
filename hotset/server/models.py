"""The values of the API, as its OpenAPI description shows them: what may be sent, and what is answered.

What is sent is checked here for its form alone. What a name, an amount or a folder may be is known by those
who use them, and their sentences are the answer.
"""

from __future__ import annotations

from typing import Optional, Union

from pydantic import BaseModel, ConfigDict, Field

__all__ = [
    "Change",
    "Error",
    "Freed",
    "History",
    "NewSession",
    "Resized",
    "SessionModel",
    "Status",
    "Stopped",
]

# pydantic reads annotations at run time, and on Python 3.10 it needs Optional[X] for some of them.
# ruff: noqa: UP007, UP045


class Error(BaseModel):
    """Why a request was refused, in one sentence."""

    error: str


class NewSession(BaseModel):
    """A session to be made; everything has a default."""

    model_config = ConfigDict(extra="forbid", strict=True)

    name: Optional[str] = Field(
        None,
        description="Not digits only; the session's number if there is none.",
        json_schema_extra={"pattern": "^[A-Za-z0-9_-][A-Za-z0-9._-]{0,99}$"},
    )
    memory: Union[int, str, None] = Field(None, description="Bytes, or an amount such as 120GiB or 50%.")
    spill: Optional[str] = Field(None, description="Absolute path; the server's folder if not given.")
    ttl: Union[float, str, None] = Field(None, description="Seconds, or 90s, 30m, 24h, 7d.")
    persist: bool = Field(False, description="Whether what is spilled outlives a reboot.")


class Change(BaseModel):
    """What is to change of a session."""

    model_config = ConfigDict(extra="forbid", strict=True)

    memory: Union[int, str] = Field(description="Bytes, or an amount such as 120GiB or 50%.")


class Amount(BaseModel):
    """Bytes of memory."""

    limit: int
    used: int


class SessionMemory(Amount):
    """Bytes of memory; ``unused`` of those that are used make room for others when it is needed."""

    unused: int


class Disk(BaseModel):
    """Bytes on disk, and where; no folder if nothing is spilled."""

    folder: Optional[str]
    used: int


class ServerSpill(BaseModel):
    """The server's spill folder: bytes that its sessions take there, and that are left."""

    folder: str
    used: int
    free: Optional[int]


class CacheModel(BaseModel):
    """One cache of a session. Amounts are bytes, times seconds summed over processes."""

    id: int
    name: str
    samples: int
    cached: int
    spilled: int
    memory: int
    disk: int
    limit: int
    mean_bytes: float
    hits: int
    peer_hits: int
    misses: int
    hit_rate: Optional[float]
    fill_seconds: float
    waited_seconds: float
    processes: int
    in_use: bool
    pinned: bool
    state: str


class MachineModel(BaseModel):
    """A machine that shares a session: the bytes that it can hold, and what it has sent to this one (``me``).

    ``received`` records of ``bytes`` came from it, verified, besides those that were ``unsound``; it took
    ``stored`` records that were brought to it. ``latency`` is the mean of seconds until an answer of it. What
    passes between two machines is null for this one.
    """

    name: str
    host: str
    capacity: int
    me: bool
    received: Optional[int]
    bytes: Optional[int]
    latency: Optional[float]
    stored: Optional[int]
    unsound: Optional[int]
    failures: Optional[int]


class SessionModel(BaseModel):
    """A session and its caches; no machines unless it is one that several share."""

    number: int
    name: str
    memory: SessionMemory
    disk: Disk
    persist: bool
    ttl: Optional[float]
    created: float
    in_use: bool
    server: Optional[int]
    caches: list[CacheModel]
    machines: list[MachineModel]


class Status(BaseModel):
    """The server and all sessions of this user; ``memory`` counts the server's own alone."""

    version: str
    pid: int
    host: str
    port: int
    started: float
    log: Optional[str]
    memory: Amount
    spill: Optional[ServerSpill]
    sessions: list[SessionModel]


class Series(BaseModel):
    """A session's points, one for each of the history's times; null where unknown."""

    samples_per_second: list[Optional[float]]
    waited: list[Optional[float]]
    hit_rate: list[Optional[float]]
    cached: list[Optional[int]]
    memory: list[Optional[int]]
    disk: list[Optional[int]]


class History(BaseModel):
    """The last ten minutes, by session number."""

    interval: float
    times: list[float]
    sessions: dict[str, Series]


class Freed(BaseModel):
    """Bytes of memory and disk that were freed."""

    freed: int


class DroppedModel(BaseModel):
    """A cache that made room: its name, its bytes of memory, and how many seconds nobody had used it."""

    name: str
    bytes: int
    idle: float


class Resized(BaseModel):
    """The session as it is now, what made room, and the bytes in use or pinned beyond what it may hold."""

    session: SessionModel
    dropped: list[DroppedModel]
    over: int


class Stopped(BaseModel):
    """The server's sessions are destroyed, and it ends."""

    stopped: bool
