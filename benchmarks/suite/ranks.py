"""Ranks: four processes under torchrun, each with two workers, share one cache automatically.

Each calls ``hotset.cache`` itself and reads its shard by ``DistributedSampler``. Counted is how often the
source was read, over two epochs and the plan, and measured, as in "memory", the proportional set size of all
of them together beyond what they take without a cache.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import NamedTuple

from benchmarks.footprint import of_tree
from benchmarks.harness import Outcome, Spread, Target, Unfit, compare
from benchmarks.settings import Settings

__all__ = ["ranks"]

WITHOUT = "4 ranks x 2 workers, no cache"
HOTSET = "4 ranks x 2 workers, each calls hotset.cache"

_RANKS = 4
_PATIENCE = 240.0


class _Answer(NamedTuple):
    """What one job took: bytes of PSS, bytes of shared memory that nobody maps, reads, bytes cached."""

    pss: int
    unmapped: int
    reads: int
    cached: int


def ranks(settings: Settings) -> Outcome:
    """At most 1.02 reads of the source per sample, and 1.1x of the cached bytes beyond no cache."""
    count = settings.shared_images
    answers: dict[str, list[_Answer]] = {WITHOUT: [], HOTSET: []}

    def measure(name: str) -> float:
        answers[name].append(_job("hotset" if name == HOTSET else "none", count))
        return answers[name][-1].pss / 2**20

    found = compare(
        {name: partial(measure, name) for name in answers},
        WITHOUT,
        settings.pairs,
        title=f"Summed PSS under torchrun, {count:,} images",
        unit="MiB",
        subjects=(HOTSET,),
        limits=(WITHOUT,),
        lower_is_better=True,
        warm_up=False,
    )
    once = "4 ranks under torchrun, two epochs: reads of the source per sample"
    copy = "4 ranks under torchrun: summed PSS beyond no cache, in cached bytes"
    if reason := found.rows[HOTSET].unfit or found.rows[WITHOUT].unfit:
        limits = ((once, 1.02), (copy, 1.1))
        targets = [Target(text, None, limit, at_least=False, reason=reason) for text, limit in limits]
        return Outcome([found], targets)
    pairs = list(zip(answers[HOTSET], answers[WITHOUT], strict=True))
    beyond = Spread.of((a.pss - b.pss) / a.cached for a, b in pairs)
    everything = Spread.of((a.pss + a.unmapped - b.pss - b.unmapped) / a.cached for a, b in pairs)
    reads = Spread.of(answer.reads / count for answer in answers[HOTSET])
    return Outcome(
        [found],
        [Target(once, reads, 1.02, at_least=False), Target(copy, beyond, 1.1, at_least=False)],
        [
            f"the cache holds {answers[HOTSET][0].cached / 2**20:,.0f} MiB",
            f"without a cache each sample was read {answers[WITHOUT][0].reads / count:.2f} times",
            f"counting memory that no process maps, as torch's batches in flight: {everything.median:.2f}x",
        ],
    )


def _job(kind: str, count: int) -> _Answer:
    """Run the ranks once."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(_RANKS)]
        with open(folder / "errors", "w+") as errors:
            torchrun = subprocess.Popen(
                [sys.executable, *launch, "-m", "benchmarks.ranks_job", kind, str(count), name],
                cwd=Path(__file__).parents[2],
                stdout=subprocess.DEVNULL,
                stderr=errors,
            )
            try:
                _wait(torchrun, folder, "ready")
                taken = of_tree(torchrun.pid)
                (folder / "go").touch()
                _wait(torchrun, folder, "done")
                torchrun.wait(_PATIENCE)
            except Unfit as unfit:
                errors.seek(0)
                raise Unfit(f"{unfit}; {errors.read().strip().rpartition(chr(10))[2]}") from None
            finally:
                torchrun.terminate()  # it ends its ranks
                torchrun.wait()
        cached = int((folder / "done.0").read_text())
        return _Answer(*taken, (folder / "reads").stat().st_size, cached)


def _wait(torchrun: subprocess.Popen[bytes], folder: Path, what: str) -> None:
    deadline = time.monotonic() + _PATIENCE
    while not all((folder / f"{what}.{rank}").exists() for rank in range(_RANKS)):
        if torchrun.poll() is not None or time.monotonic() > deadline:
            raise Unfit(f"the ranks ended or hung before they were {what}")
        time.sleep(0.05)
