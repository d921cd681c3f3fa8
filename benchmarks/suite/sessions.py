"""Sessions: the second job, four jobs at once, and what ``session=`` costs.

*The second job* attaches to a cache that another process has filled and left. Its first epoch is compared
with its own later ones: those have every page mapped, and blocks that were written to before. What it does
ahead of the epoch is told apart: attaching (fingerprint, plan, mapping the file), and where that is tried,
mapping all pages in one call.

*Four jobs* begin at the same moment with one empty session, on photographs that have to be decoded. Each
trains for as many epochs as a sweep's members do; the clock runs until the last one has ended. Against them:
four jobs with caches of their own, at once and one after the other, and four without a cache.

*The cost* is that of a name: the same cache with a session and without, in one process.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import data, hotset_entries
from benchmarks.harness import Comparison, Outcome, Row, Spread, Target, compare
from benchmarks.jobs import Job
from benchmarks.peers import Epoch
from benchmarks.session_job import BATCH, new_session
from benchmarks.settings import Settings
from benchmarks.suite.contest import contest, lead
from benchmarks.truth import RowTruth

__all__ = ["JOBS", "session_cost", "session_jobs", "session_second"]

AS_IS = "second job, first epoch"
AHEAD = "second job, first epoch, pages mapped ahead"
LATER = "that job's later epochs"
LATER_AHEAD = "that job's later epochs, pages mapped ahead"

TOGETHER = "4 jobs at once, one session"
PRIVATE = "4 jobs at once, a cache each"
IN_TURN = "4 jobs one after the other, a cache each"
NONE = "4 jobs at once, no cache"

WITHOUT = "hotset.cache(dataset)"
WITH = 'hotset.cache(dataset, session="...")'

JOBS = 4
_JOB = "benchmarks.session_job"
_LATER_EPOCHS = 3
_EPOCHS = 3


def session_second(settings: Settings) -> Outcome:
    """A second job's first epoch: at least 0.9x of its own warm speed, once its pages are mapped."""
    from hotset import DataLoader, cache

    count = settings.shared_images
    answers: dict[str, list[dict[str, Any]]] = {AS_IS: [], AHEAD: []}
    with new_session() as session:
        with cache(data.Generated(count), session=session) as cached:
            for _ in DataLoader(cached, batch_size=BATCH, num_workers=2):
                pass
            hotset_entries.require_filled(cached)

        def second(name: str) -> float:
            with Job(_JOB) as job:
                answer = job.ask(
                    do="second", session=session, count=count, ahead=name == AHEAD, later=_LATER_EPOCHS
                )
            answers[name].append(answer)
            return count / float(answer["first"])

        found = compare(
            {name: partial(second, name) for name in answers},
            AS_IS,
            settings.pairs,
            title=f"A second job in a session, {count:,} images of 150 KB, batch {BATCH}",
            subjects=(AS_IS, AHEAD),
            limits=(LATER, LATER_AHEAD),
            warm_up=False,
        )
    for name, later in ((AS_IS, LATER), (AHEAD, LATER_AHEAD)):
        unfit = found.rows[name].unfit
        speeds = [count / Spread.of(answer["later"]).median for answer in answers[name]]
        found.rows[later] = Row(later, [] if unfit else speeds, unfit)
    found.reference = LATER
    target = "second job in a session, first epoch of its own warm speed"
    return Outcome(
        [found],
        [
            lead(f"{target}, pages mapped ahead", found, AHEAD, LATER_AHEAD, 0.9),
            lead(f"{target}, as it is", found, AS_IS, LATER, 0.9),
        ],
        _second_notes(found, answers),
    )


def _second_notes(found: Comparison, answers: dict[str, list[dict[str, Any]]]) -> list[str]:
    notes = []
    for name, given in answers.items():
        if found.rows[name].unfit:
            continue
        attaching, mapping, first = (
            Spread.of(1e3 * answer[part] for answer in given).median
            for part in ("attaching", "mapping", "first")
        )
        total = Spread.of(
            1e3 * (answer["attaching"] + answer["mapping"] + answer["first"]) for answer in given
        )
        faults = Spread.of(answer["faults"] for answer in given)
        notes.append(
            f"{name}: attaching {attaching:.0f} ms, mapping {mapping:.0f} ms, the epoch {first:.0f} ms, "
            f"together {total.median:.0f} ms ({total.low:.0f} - {total.high:.0f}); "
            f"{faults.median:,.0f} page faults in it"
        )
    if given := answers[AHEAD]:
        cost = Spread.of(1e3 * answer["mapping"] / (answer["mapped"] / 2**30) for answer in given)
        notes.append(f"mapping takes {cost.median:.0f} ms a GiB ({cost.low:.0f} - {cost.high:.0f})")
    return notes


def session_jobs(settings: Settings) -> Outcome:
    """Four jobs on one empty session read each sample 1.05 times or less."""
    count = min(settings.photographs, 600)
    files = data.photographs(settings.out, count)
    folder = settings.out / f"photographs-{count}"
    reads: dict[str, list[float]] = {name: [] for name in (TOGETHER, PRIVATE, IN_TURN)}

    def four(name: str) -> float:
        seconds, read = _four(folder, len(files), in_turn=name == IN_TURN, kind=name)
        reads[name].append(read)
        return seconds

    found = compare(
        {name: partial(four, name) for name in reads},
        PRIVATE,
        settings.pairs,
        title=f"{JOBS} jobs of {_EPOCHS} epochs, {count} JPEGs decoded and resized, no workers",
        unit="s in all",
        subjects=(TOGETHER,),
        lower_is_better=True,
        warm_up=False,
    )
    once = Target(
        f"{JOBS} jobs filling one session: reads of the source per sample",
        Spread.of(reads[TOGETHER]) if not found.rows[TOGETHER].unfit else None,
        1.05,
        at_least=False,
        reason=found.rows[TOGETHER].unfit,
    )
    notes = [
        f"{name}: {Spread.of(read).median:.2f} reads of the source per sample"
        for name, read in reads.items()
        if read
    ]
    leads = [
        lead(f"{JOBS} jobs, one session: times faster than {over}", found, TOGETHER, over, 1.0)
        for over in (PRIVATE, IN_TURN)
    ]
    return Outcome([found], [once, *leads], notes)


def _four(folder: Path, count: int, *, in_turn: bool, kind: str) -> tuple[float, float]:
    """Run the jobs once: seconds in all, and reads per sample."""
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        session = stack.enter_context(new_session()) if kind == TOGETHER else None
        jobs = [stack.enter_context(Job(_JOB)) for _ in range(JOBS)]
        for job in jobs:
            job.ask(do="hello")
        question = {
            "do": "train",
            "session": session,
            "caches": kind != NONE,
            "folder": str(folder),
            "log": str(scratch / "reads"),
            "epochs": _EPOCHS,
        }
        seconds = _ask_all(jobs, question, in_turn)
        return seconds, (scratch / "reads").stat().st_size / count


def _ask_all(jobs: Sequence[Job], question: dict[str, Any], in_turn: bool) -> float:
    """Seconds until all have answered: of the slowest one, or of all of them one after the other."""
    if in_turn:
        return sum(float(job.ask(**question)["seconds"]) for job in jobs)
    for job in jobs:
        job.send(**question)
    return max(float(job.receive()["seconds"]) for job in jobs)


def session_cost(settings: Settings) -> Outcome:
    """A warm epoch with ``session=`` against the same without."""
    outcome = Outcome()
    rows = data.image_rows(settings.images)
    small = data.byte_rows(settings.small_rows)
    for title, values, batch in (
        (f"{len(rows):,} images of 150 KB", rows, BATCH),
        (f"{len(small):,} rows of 210 B", small, 256),
    ):
        found = contest(
            settings,
            f"A warm epoch with a session and without, {title}, batch {batch}",
            RowTruth(values.numpy()),
            {
                WITHOUT: partial(_warm, data.Samples(values), batch, None),
                WITH: partial(_warm, data.Samples(values), batch, new_session),
            },
            WITHOUT,
            subjects=(WITH,),
            limits=(WITHOUT,),
        )
        outcome.comparisons.append(found)
        outcome.targets.append(lead(found.title, found, WITH, WITHOUT, 0.95))
    return outcome


def _warm(dataset: Any, batch: int, session: Callable[[], Any] | None, stack: ExitStack) -> Epoch:
    from hotset import cache

    name = stack.enter_context(session()) if session is not None else None
    cached = stack.enter_context(cache(dataset, session=name))
    epoch = hotset_entries.loader(stack, cached, batch, 0)
    for _ in epoch():
        pass
    hotset_entries.require_filled(cached)
    return epoch
