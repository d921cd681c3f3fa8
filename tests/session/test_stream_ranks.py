"""Recorded streams of several ranks, and of several jobs in a session."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers import recorded
from streams import Numbers, values

import hotset
from hotset.session import sessions

N = 90
RANK = """
import json, os, sys, warnings
from streams import Numbers, values
import hotset

def main():
    rank, ranks = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    stream = hotset.cache(Numbers(90, rank=rank, ranks=ranks), memory="10MiB", key="numbers")
    loader = hotset.DataLoader(stream, batch_size=4, shuffle=True, num_workers=3)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        epochs = [values(loader) for _ in range(3)]
    said = [str(one.message) for one in told if "max number of worker" not in str(one.message)]
    found = {"epochs": epochs, "said": said, "length": len(stream), "misses": stream.stats().misses}
    os.write(1, (json.dumps(found) + "\\n").encode())  # at once: two ranks share one pipe

if __name__ == "__main__":
    main()
"""


@contextlib.contextmanager
def session() -> Iterator[None]:
    """A session named ``numbers``."""
    made = sessions.create("numbers", memory=64 << 20)
    yield
    sessions.destroy(made)


def launched(tmp_path: Path, ranks: int) -> list[dict[str, Any]]:
    """What each rank of a job that torchrun launches has printed."""
    program = tmp_path / "rank.py"
    program.write_text(RANK)
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), str(program)]
    tests = str(Path(__file__).parents[1])
    path = os.pathsep.join([tests, str(Path(tests).parent), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, *command],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def test_two_ranks_of_three_workers_give_each_sample_once_an_epoch(tmp_path: Path) -> None:
    one, other = launched(tmp_path, 2)
    for epoch in range(3):
        counts = Counter(one["epochs"][epoch] + other["epochs"][epoch])
        assert counts == Counter(range(N)), f"epoch {epoch}"
    assert one["epochs"][1] != one["epochs"][2]
    assert one["length"] == other["length"] == N
    assert one["misses"] == N
    assert all("second on" in sentence for sentence in one["said"] + other["said"])


@pytest.mark.usefixtures("runtime")
class TestSessions:
    def test_a_second_job_starts_with_the_recorded_stream(self) -> None:
        with session():
            first = hotset.cache(Numbers(N), session="numbers")
            assert values(hotset.DataLoader(first, batch_size=8, num_workers=2)) != []
            order = [number for _, number in first]
            first.close()
            second = hotset.cache(Numbers(N), session="numbers")
            assert second.recorded
            assert [number for _, number in second] == order
            with recorded() as told:
                shuffled = values(hotset.DataLoader(second, batch_size=8, shuffle=True))
            assert sorted(shuffled) == list(range(N))
            assert shuffled != order
            assert told == []
            second.close()

    def test_another_stream_is_recorded_by_itself(self) -> None:
        with session():
            first = hotset.cache(Numbers(N), session="numbers")
            first.fill()
            other = hotset.cache(Numbers(N // 2), session="numbers")
            assert not other.recorded
            other.fill()
            assert len(other) == N // 2
            assert len(first) == N
            first.close()
            other.close()
