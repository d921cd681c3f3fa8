"""A seeded stress run: ``python -m tests.stress --seed 7 --seconds 60``.

Several processes use one cache, in every way and in random order: they fill it and read it, sample by sample
and in batches, take gathered batches from a loader, clear it now and then, fork, send themselves pickled
copies and close those. Meanwhile they are killed, replaced, stopped and continued. Every sample is its
number, and each one that any of them gets is compared with it. In the end the cache is checked.

It prints the seed and how often each thing was done, and exits with 1 if a sample was wrong, a process ended
otherwise than it should, or the check found a problem. A seed gives the same orders again, though not the
same moments: what it found once it may find again on the third try.
"""

from __future__ import annotations

import argparse
import mmap
import os
import pickle
import random
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

import hotset
from hotset.collate import ragged
from hotset.dataset.dataset_proxy import current_of

N = 600
ACTORS = 4
ENDS_WELL = 0
WRONG = 3
ACTIONS = (
    "get",
    "batch",
    "fill",
    "gather",
    "clear",
    "fork",
    "pickle",
    "wait",
    "killed",
    "stopped",
    "samples",
)


def sample(i: int) -> Any:
    """Its number in each leaf; one in fifty fits no schema."""
    if i % 50 == 49:
        return {"rows": torch.full((2, 2), float(i))}
    return {
        "row": torch.full((96,), i),
        "rows": torch.full((i % 23, 3), float(i)),
        "text": f"{i} " * (i * 7 % 90),
        "label": i,
    }


class Numbers(torch.utils.data.Dataset[Any]):
    """``N`` samples, each its number."""

    def __len__(self) -> int:
        return N

    def __getitem__(self, i: int) -> Any:
        return sample(range(N)[i])


def is_right(i: int, got: Any) -> bool:
    """Whether this is sample ``i``, whole and unaltered."""
    wanted = sample(i)
    if list(got) != list(wanted):
        return False
    return all(
        torch.equal(got[key], value) and got[key].dtype == value.dtype
        if isinstance(value, torch.Tensor)
        else type(got[key]) is type(value) and got[key] == value
        for key, value in wanted.items()
    )


class Wrong(Exception):
    """A sample that is not what it should be."""


class Actor:
    """One process's part: random actions on the cache until the time is over."""

    def __init__(self, cached: Any, seed: int, until: float, counts: Any) -> None:
        self.cached = cached
        self.random = random.Random(seed)
        self.until = until
        self.counts = counts  # this process's own row: no other writes to it
        self.actions: list[tuple[float, str, Callable[[], None]]] = [
            (30, "get", self.get),
            (30, "batch", self.batch),
            (20, "fill", self.fill),
            (12, "gather", self.gather),
            (0.3, "clear", self.clear),
            (1, "fork", self.fork),
            (2, "pickle", self.pickle),
            (2, "wait", self.wait),
        ]

    def run(self) -> None:
        weights = [weight for weight, _, _ in self.actions]
        while time.monotonic() < self.until:
            _, name, action = self.random.choices(self.actions, weights)[0]
            action()
            self.count(name)

    def count(self, name: str, by: int = 1) -> None:
        self.counts[ACTIONS.index(name)] += by

    def some(self) -> list[int]:
        """Random samples, or a run of neighbours, so that processes meet."""
        count = self.random.choice([1, 4, 32])
        if self.random.random() < 0.5:
            return [self.random.randrange(N) for _ in range(count)]
        first = int(time.monotonic() * 200) % N
        return [(first + place) % N for place in range(count)]

    def check(self, numbers: list[int], found: list[Any]) -> None:
        for i, got in zip(numbers, found, strict=True):
            if not is_right(i, got):
                raise Wrong(f"sample {i} came as {got}")
        self.count("samples", len(numbers))

    def get(self) -> None:
        for i in self.some()[:4]:
            self.check([i], [self.cached[i]])

    def batch(self) -> None:
        numbers = self.some()
        found = self.cached.__getitems__(numbers)
        self.check(numbers, found)
        for got in found:
            got["rows"].zero_()  # a hit is the caller's own

    def fill(self) -> None:
        uncached = current_of(self.cached).fill(np.array(self.some()))
        self.check(list(uncached), list(uncached.values()))

    def gather(self) -> None:
        numbers = [i for i in self.some() if i % 50 != 49] or [1]
        loader = hotset.DataLoader(self.cached, batch_sampler=[numbers], collate_fn=ragged)
        for batch in loader:
            parts = zip(batch["row"], batch["rows"], batch["text"], batch["label"].tolist(), strict=True)
            self.check(numbers, [dict(zip(batch, part, strict=True)) for part in parts])

    def clear(self) -> None:
        try:
            self.cached.clear()
        except hotset.SegmentError:  # another process is stopped with a claim in hand
            self.count("clear", -1)

    def all_three(self) -> None:
        self.batch()
        self.fill()
        self.gather()

    def fork(self) -> None:
        pid = os.fork()
        if pid == 0:
            end(self.all_three)
        _, status = os.waitpid(pid, 0)
        if os.waitstatus_to_exitcode(status) != ENDS_WELL:
            raise Wrong("a forked child ended badly")

    def pickle(self) -> None:
        mine, self.cached = self.cached, pickle.loads(pickle.dumps(self.cached))
        try:
            self.batch()
            self.fill()
        finally:
            self.cached.close()
            self.cached = mine

    def wait(self) -> None:
        time.sleep(self.random.random() * 0.02)


def end(body: Callable[[], object]) -> None:
    """Run ``body`` in this forked process, and end it with a code that says how that went."""
    code = WRONG
    try:
        body()
        code = ENDS_WELL
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


class Director:
    """Starts the actors, and kills, replaces, stops and continues them."""

    def __init__(self, cached: Any, seed: int, seconds: float) -> None:
        self.cached = cached
        self.random = random.Random(seed)
        self.until = time.monotonic() + seconds
        self.memory = mmap.mmap(-1, mmap.PAGESIZE * (ACTORS + 1))
        self.counts = np.frombuffer(self.memory, np.int64).reshape(ACTORS + 1, -1)
        self.pids: dict[int, int] = {}  # to the row of counts
        self.failures: list[str] = []

    def start(self, row: int) -> None:
        seed = self.random.getrandbits(60)
        pid = os.fork()
        if pid == 0:
            end(Actor(self.cached, seed, self.until, self.counts[row]).run)
        self.pids[pid] = row

    def run(self) -> None:
        for row in range(ACTORS):
            self.start(row)
        while time.monotonic() < self.until:
            time.sleep(self.random.random() * 0.1)
            pid = self.random.choice(list(self.pids))
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                self.ended(pid, status)
            elif self.random.random() < 0.4:
                os.kill(pid, signal.SIGKILL)
                self.counts[ACTORS, ACTIONS.index("killed")] += 1
                os.waitpid(pid, 0)
                self.start(self.pids.pop(pid))
            else:
                os.kill(pid, signal.SIGSTOP)
                time.sleep(self.random.random() * 0.2)
                os.kill(pid, signal.SIGCONT)
                self.counts[ACTORS, ACTIONS.index("stopped")] += 1
        self.finish()

    def finish(self) -> None:
        """Wait for all, each within a bound: a process that wedges is a failure too."""
        deadline = time.monotonic() + 60
        while self.pids and time.monotonic() < deadline:
            time.sleep(0.01)
            for pid in list(self.pids):
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    self.ended(pid, status)
        for pid in self.pids:
            self.failures.append(f"process {pid} did not end")
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)

    def ended(self, pid: int, status: int) -> None:
        del self.pids[pid]
        code = os.waitstatus_to_exitcode(status)
        if code != ENDS_WELL:
            self.failures.append(f"process {pid} ended with {code}")
            self.until = time.monotonic()


def stress(seed: int, seconds: float) -> list[str]:
    """Run it; returns a sentence for each thing that was wrong."""
    warnings.simplefilter("ignore", hotset.HotsetWarning)
    torch.set_num_threads(1)
    # Room for all, for most, or for few: what is not stored has to come right all the same.
    memory = (300_000, 10_000_000, 30_000)[seed % 3]
    with hotset.cache(Numbers(), memory=memory) as cached:
        director = Director(cached, seed, seconds)
        director.run()
        problems = [*director.failures, *cached.check()]
        for i in range(N):
            if not is_right(i, cached[i]):
                problems.append(f"sample {i} is wrong in the end")
        problems += cached.check()
        sums = director.counts.sum(axis=0)
        done = ", ".join(f"{name} {sums[place]:,}" for place, name in enumerate(ACTIONS))
        print(f"seed {seed}, {seconds:g} s, {memory:,} bytes, {cached.stats().cached} cached: {done}")
    return problems


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.stress", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    parser.add_argument("--seconds", type=float, default=30.0)
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}", flush=True)
    problems = stress(arguments.seed, arguments.seconds)
    for problem in problems:
        print(problem)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
