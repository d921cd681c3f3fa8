"""What may be sent to the API, and what it answers, beside the reports of :mod:`hotset.server.views`.

What is sent is checked here for its form alone. The functions that use a name, an amount or a folder check
its value, and the sentences of their errors are the answer.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from hotset.server.views import Amount, SessionView
from hotset.session.reports import CacheReport

__all__ = ["Change", "Error", "Freed", "History", "NewSession", "Status", "Stopped"]


class Error(BaseModel):
    """Why a request was refused, in one sentence."""

    error: str


class NewSession(BaseModel):
    """A session to be made; everything has a default."""

    model_config = ConfigDict(extra="forbid", strict=True)

    name: str | None = Field(
        None,
        description="Not digits only; the session's number if there is none.",
        json_schema_extra={"pattern": "^[A-Za-z0-9_-][A-Za-z0-9._-]{0,99}$"},
    )
    memory: int | str | None = Field(None, description="Bytes, or an amount such as 120GiB or 50%.")
    spill: str | None = Field(None, description="Absolute path; the server's folder if not given.")
    ttl: float | str | None = Field(None, description="Seconds, or 90s, 30m, 24h, 7d.")
    persist: bool = Field(False, description="Whether what is spilled outlives a reboot.")


class Change(BaseModel):
    """What is to change of a session."""

    model_config = ConfigDict(extra="forbid", strict=True)

    memory: int | str = Field(description="Bytes, or an amount such as 120GiB or 50%.")


class ServerSpill(BaseModel):
    """The server's spill folder: bytes that its sessions take there, and that are left."""

    folder: str
    used: int
    free: int | None


class Status(BaseModel):
    """The server and all sessions of this user; ``memory`` counts the server's own alone.

    ``jobs`` are the caches of this user's running jobs that are in no session.
    """

    version: str
    pid: int
    host: str
    port: int
    started: float
    log: str | None
    memory: Amount
    spill: ServerSpill | None
    sessions: list[SessionView]
    jobs: list[CacheReport]


class Series(BaseModel):
    """A session's points, one for each of the history's times; null where unknown."""

    samples_per_second: list[float | None]
    waited: list[float | None]
    hit_rate: list[float | None]
    cached: list[int | None]
    memory: list[int | None]
    disk: list[int | None]


class History(BaseModel):
    """The last ten minutes, by session number."""

    interval: float
    times: list[float]
    sessions: dict[str, Series]


class Freed(BaseModel):
    """Bytes of memory and disk that were freed."""

    freed: int


class Stopped(BaseModel):
    """The server's sessions are destroyed, and it ends."""

    stopped: bool
