"""What ``hotset run`` and ``hotset doctor`` tell the processes below them, through their environment.

=================  ======================================================================================
``HOTSET_JOB``     a random name, by which the memos of all processes find one store
``HOTSET_RUN``     the options of ``hotset run``, as JSON
``HOTSET_LEDGER``  its ledger: see :mod:`hotset.run.ledger`
``HOTSET_DOCTOR``  the options of ``hotset doctor``, as JSON, its ledger among them
``PYTHONPATH``     ``inject`` first, so that each Python process starts with ``inject/sitecustomize.py``
=================  ======================================================================================
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Literal, NamedTuple

__all__ = [
    "JOB",
    "LEDGER",
    "Options",
    "WatchOptions",
    "environment_for",
    "options_here",
    "watch_options_here",
    "watched_environment",
]

JOB, RUN, LEDGER, DOCTOR = "HOTSET_JOB", "HOTSET_RUN", "HOTSET_LEDGER", "HOTSET_DOCTOR"
_INJECT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "inject")


class Options(NamedTuple):
    """The options of ``hotset run``.

    Attributes:
        memory: the limit of all memos of the job together.
        spill: the folder for what memory has no room for.
        session: the session whose caches outlive the job.
        evict: "lru" if new values may take the place of those used least recently.
        functions: ``module:function`` of functions to memoise beside the well-known ones.
    """

    memory: str = "auto"
    spill: str | None = None
    session: str | None = None
    evict: Literal["lru"] | None = None
    functions: tuple[str, ...] = ()


def environment_for(
    options: Options, job: str, ledger: str, environment: Mapping[str, str]
) -> dict[str, str]:
    """The environment of the program."""
    return {
        **environment,
        JOB: job,
        RUN: json.dumps(options._asdict()),
        LEDGER: ledger,
        "PYTHONPATH": _python_path(environment),
    }


class WatchOptions(NamedTuple):
    """What ``hotset doctor`` tells the processes below it.

    Attributes:
        ledger: the folder for what processes have seen.
        seconds: how long a program is watched, from its first batch.
        epoch_seconds: an epoch that ends after so long is enough to judge by.
        ends: whether it is ended then.
    """

    ledger: str
    seconds: float = 60.0
    epoch_seconds: float = 10.0
    ends: bool = False


def watched_environment(options: WatchOptions, environment: Mapping[str, str]) -> dict[str, str]:
    """The environment of a program that is watched."""
    return {
        **environment,
        DOCTOR: json.dumps(options._asdict()),
        "PYTHONPATH": _python_path(environment),
    }


def _python_path(environment: Mapping[str, str]) -> str:
    before = environment.get("PYTHONPATH")
    return _INJECT + (os.pathsep + before if before else "")


def watch_options_here() -> WatchOptions | None:
    """The options of the ``hotset doctor`` above this process, None if there is none."""
    try:
        return WatchOptions(**json.loads(os.environ[DOCTOR]))
    except (KeyError, ValueError, TypeError):
        return None


def options_here() -> Options | None:
    """The options of the ``hotset run`` above this process, None if there is none."""
    text = os.environ.get(RUN)
    if not text or not os.environ.get(JOB):
        return None
    try:
        found = json.loads(text)
        return Options(**{**found, "functions": tuple(found["functions"])})
    except (ValueError, TypeError, KeyError):
        return None  # another version's
