"""Attaching: how fast a second process reads a cache that another one has filled.

It maps the same memory, but has no page tables for it yet: its first epoch pays a page fault for every few
pages (the kernel maps some neighbours along), and then reads as fast as anyone. ``MADV_POPULATE_READ`` maps
all of it in one call instead. Measured are both ways, beside the first process in the same round, what the
call costs, and whether the two together beat the faults.

Each round spawns new processes, because a first epoch happens once in each. One epoch is one figure, in the
first process too, after an epoch that is not counted: the same length, the same luck.
"""

from __future__ import annotations

import multiprocessing
from contextlib import ExitStack
from typing import Any

from benchmarks import data, hotset_entries
from benchmarks.attach_job import Answer, second
from benchmarks.harness import Comparison, Outcome, Row, Spread, Unfit, compare
from benchmarks.reader import Reader
from benchmarks.settings import Settings
from benchmarks.suite.contest import lead

__all__ = ["attach"]

WARM = "first process, warm"
AS_IS = "second process, first epoch"
AHEAD = "second process, first epoch, pages mapped ahead"
LATER = "second process, second epoch"

_BATCH = 64
_PATIENCE_SECONDS = 120.0


def attach(settings: Settings) -> Outcome:
    """A second process reaches 0.9x of the first one's warm speed once its pages are mapped."""
    from hotset import cache

    answers: dict[str, list[Answer]] = {AS_IS: [], AHEAD: []}
    with ExitStack() as stack:
        cached = stack.enter_context(cache(data.Generated(settings.shared_images)))
        _fill(cached)
        reader = Reader(cached, _BATCH)

        def first_process() -> float:
            reader.epoch()
            return reader.epoch().speed

        def second_process(name: str) -> float:
            answers[name].append(_spawn(cached, ahead=name == AHEAD))
            return answers[name][-1].epochs[0].speed

        found = compare(
            {
                WARM: first_process,
                AS_IS: lambda: second_process(AS_IS),
                AHEAD: lambda: second_process(AHEAD),
            },
            WARM,
            1 if settings.quick else settings.pairs,
            title=f"A second process, {settings.shared_images:,} images of 150 KB, batch {_BATCH}",
            subjects=(AS_IS, AHEAD, LATER),
            limits=(WARM,),
            warm_up=False,
        )
    as_is = found.rows[AS_IS]
    speeds = [answer.epochs[1].speed for answer in answers[AS_IS]]
    found.rows[LATER] = Row(LATER, [] if as_is.unfit else speeds, as_is.unfit)
    targets = [
        lead(
            "second process, its pages mapped ahead, of the first one's warm speed", found, AHEAD, WARM, 0.9
        ),
        lead("second process, second epoch, of the first one's warm speed", found, LATER, WARM, 0.9),
    ]
    return Outcome([found], targets, _notes(found, answers))


def _fill(cached: Any) -> None:
    with ExitStack() as stack:
        for _ in hotset_entries.loader(stack, cached, _BATCH, 2)():
            pass
    hotset_entries.require_filled(cached)


def _spawn(cached: Any, ahead: bool) -> Answer:
    """Run :func:`benchmarks.attach_job.second` in a new process.

    Raises:
        Unfit: it ended or hung without an answer.
        Exception: what it sent instead.
    """
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=second, args=(cached, _BATCH, ahead, sender))
    process.start()
    # Only the process itself may hold the sending end, or its death would not be seen here.
    sender.close()
    try:
        if not receiver.poll(_PATIENCE_SECONDS):
            raise Unfit(f"the second process gave no answer in {_PATIENCE_SECONDS:g} s")
        answer = receiver.recv()
    except EOFError:
        raise Unfit("the second process ended without an answer") from None
    finally:
        receiver.close()
        process.join(5.0)
        if process.is_alive():
            process.kill()
            process.join()
    if isinstance(answer, Exception):
        raise answer
    assert isinstance(answer, Answer)
    return answer


def _notes(found: Comparison, answers: dict[str, list[Answer]]) -> list[str]:
    if found.rows[AS_IS].unfit or found.rows[AHEAD].unfit:
        return []
    mappings = [answer.mapping for answer in answers[AHEAD]]
    calls = Spread.of(1e3 * mapping.seconds / (mapping.size / 2**30) for mapping in mappings)
    faults = {name: Spread.of(answer.epochs[0].faults for answer in given) for name, given in answers.items()}
    epoch = {name: Spread.of(answer.epochs[0].seconds for answer in given) for name, given in answers.items()}
    ahead = Spread.of(mapping.seconds for mapping in mappings)
    return [
        f"MADV_POPULATE_READ took {calls.median:.1f} ms per GiB ({calls.low:.1f} - {calls.high:.1f})",
        f"page faults in the first epoch: {faults[AS_IS].median:,.0f} as it is, "
        f"{faults[AHEAD].median:,.0f} with the pages mapped ahead",
        f"the first epoch as it is took {epoch[AS_IS].median * 1e3:.0f} ms; mapping ahead and that epoch "
        f"took {ahead.median * 1e3:.0f} + {epoch[AHEAD].median * 1e3:.0f} ms",
    ]
