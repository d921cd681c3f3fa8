"""The benchmarks: one function for each target, by the name that the command line knows it by."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.harness import Outcome
from benchmarks.settings import Settings
from benchmarks.suite import (
    attach,
    doctor,
    draws,
    first,
    first_epoch,
    fixed,
    memo,
    memory,
    mindspore,
    peers,
    placement,
    planning,
    ragged,
    ranks,
    resume,
    run_programs,
    sessions,
    spill,
    startup,
    streams,
    sweep,
    window,
)

__all__ = ["BENCHMARKS"]


def _cluster(settings: Settings) -> Outcome:
    from benchmarks.suite.cluster import cluster  # needs the extra hotset[ray]

    return cluster(settings)


BENCHMARKS: dict[str, Callable[[Settings], Outcome]] = {
    "startup": startup.startup,
    "planning": planning.planning,
    "first-epoch": first.first_epoch,
    "first-epochs": first_epoch.first_epochs,
    "streams": streams.streams,
    "run-programs": run_programs.run_programs,
    "doctor": doctor.doctor,
    "draws": draws.draws,
    "memo": memo.memo,
    "warm": fixed.warm,
    "live": fixed.live,
    "unmodified": fixed.unmodified,
    "bytes": fixed.bytes_rows,
    "kilobytes": fixed.kilobytes,
    "ragged": ragged.ragged,
    "jpeg-bytes": ragged.jpeg_bytes,
    "molecules": ragged.molecules,
    "memory": memory.memory,
    "ranks": ranks.ranks,
    "sweep": sweep.sweep,
    "attach": attach.attach,
    "resume": resume.resume,
    "session-second": sessions.session_second,
    "session-jobs": sessions.session_jobs,
    "session-cost": sessions.session_cost,
    "spill": spill.spill,
    "spill-large": spill.spill_large,
    "spill-half": spill.spill_half,
    "spill-tiny": spill.spill_tiny,
    "mindspore": mindspore.mindspore,
    "mindspore-tiny": mindspore.mindspore_tiny,
    "window": window.window,
    "window-monai": window.window_monai,
    "placement": placement.placement,
    "peers": peers.peers,
    "cluster": _cluster,
}
