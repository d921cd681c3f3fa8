"""Memory: four processes with two workers each over one cache hold about one copy of it.

The measure is the proportional set size (PSS), in which a page that n processes map counts 1/n for each;
summed over all processes it is what they take together. Each measurement is a job of its own
(:mod:`benchmarks.memory_job`), once with the cache and once without, so that nothing of this process is in
the sums.
"""

from __future__ import annotations

from functools import partial

from benchmarks.harness import Outcome, Spread, Target, compare
from benchmarks.jobs import run_once
from benchmarks.settings import Settings

__all__ = ["memory"]

WITHOUT = "4 processes x 2 workers, no cache"
HOTSET = "4 processes x 2 workers, one hotset.cache"


def memory(settings: Settings) -> Outcome:
    """At most 1.1x of the cached bytes beyond what the same processes take without the cache."""
    count = str(settings.shared_images)
    answers: dict[str, list[dict[str, int]]] = {WITHOUT: [], HOTSET: []}

    def measure(name: str) -> float:
        answers[name].append(run_once("benchmarks.memory_job", "hotset" if name == HOTSET else "none", count))
        return answers[name][-1]["pss"] / 2**20

    found = compare(
        {name: partial(measure, name) for name in answers},
        WITHOUT,
        settings.pairs,
        title=f"Summed PSS, {settings.shared_images:,} images",
        unit="MiB",
        subjects=(HOTSET,),
        limits=(WITHOUT,),
        lower_is_better=True,
        warm_up=False,
    )
    text = "one cache under 4 processes x 2 workers: summed PSS beyond no cache, in cached bytes"
    if reason := found.rows[HOTSET].unfit or found.rows[WITHOUT].unfit:
        return Outcome([found], [Target(text, None, 1.1, at_least=False, reason=reason)])
    pairs = list(zip(answers[HOTSET], answers[WITHOUT], strict=True))
    beyond = Spread.of((a["pss"] - b["pss"]) / a["cached"] for a, b in pairs)
    everything = Spread.of(
        (a["pss"] + a["unmapped"] - b["pss"] - b["unmapped"]) / a["cached"] for a, b in pairs
    )
    notes = [
        f"the cache holds {answers[HOTSET][0]['cached'] / 2**20:,.0f} MiB",
        f"counting memory that no process maps, as torch's batches in flight: {everything.median:.2f}x",
    ]
    return Outcome([found], [Target(text, beyond, 1.1, at_least=False)], notes)
