"""A session over two machines from inside Ray Train: loaders, reports, and ranks that are started again.

The job runs in a program of its own, ``ray_train_job``, once for all tests, and ends with it; each test looks
at a part of what its ranks found.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from ray_here import end, require_ray

pytest.importorskip("ray", reason="Ray, over whose clusters sessions are shared, is not installed")
pytest.importorskip("zmq", reason="pyzmq, which carries records between machines, is not installed")
pytest.importorskip("pyarrow", reason="pyarrow, which Ray Train needs, is not installed: make chaos")

N, BATCHES, RECORD = 3000, 47, 3 * 32 * 32 + 24
LONGEST = 600.0  # seconds; a tenth of it where nothing else runs

# A minute of waiting for Ray: part of `make chaos`.
pytestmark = [pytest.mark.timeout(LONGEST + 60), pytest.mark.chaos]


class Said(NamedTuple):
    """What came of the job.

    Attributes:
        first: each rank, as it was started first.
        again: each rank, as it was started again.
        job: what Ray Train says of it, and what the machines held.
    """

    first: list[dict[str, Any]]
    again: list[dict[str, Any]]
    job: dict[str, Any]


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> Said:
    folder = tmp_path_factory.mktemp("train")
    command = [sys.executable, str(Path(__file__).parents[1] / "ray_train_job.py"), str(folder)]
    with (
        open(folder / "said", "w") as out,
        open(folder / "errors", "w") as errors,
        subprocess.Popen(command, stdout=out, stderr=errors) as running,
    ):
        try:
            running.wait(LONGEST)
        finally:
            end(running)
    why = (folder / "errors").read_text()
    lines = [json.loads(line) for line in (folder / "said").read_text().splitlines()]
    if not lines:
        missing = re.search(r"^ImportError: (Can't import ray\.train.*)$", why, re.MULTILINE)
        if missing is not None:
            pytest.skip(missing[1])
        require_ray()
        pytest.fail(f"the program has ended before the job began:\n{why[-3000:]}")
    job = lines.pop()
    assert "raised" not in job, job["raised"]
    ranks = [[line for line in lines if line["rank"] == rank] for rank in range(2)]
    assert [len(starts) for starts in ranks] == [2, 2]
    return Said([first for first, _ in ranks], [again for _, again in ranks], job)


def right(*epochs: dict[str, Any]) -> None:
    """Fail unless all of these were what torch's loader gives without a cache, and without a warning."""
    for epoch in epochs:
        assert epoch["wrong"] == []
        assert epoch["all"], "batches are missing"
        assert epoch.get("told", []) == []


def test_each_rank_is_on_a_machine_of_its_own_and_joins_without_a_word(said: Said) -> None:
    for starts in (said.first, said.again):
        assert len({rank["machine"] for rank in starts}) == 2
        assert [rank["cache"] for rank in starts] == [{"told": [], "error": None}] * 2


def test_the_first_epoch_reads_each_sample_once_over_both_ranks(said: Said) -> None:
    for rank in said.first:
        right(rank["cold"])
        assert N <= rank["cold"]["reads"] <= 1.02 * N


@pytest.mark.parametrize("epoch", ["warm", "workers"])
def test_later_epochs_are_the_same_bits_without_the_source(said: Said, epoch: str) -> None:
    for rank in said.first:
        right(rank[epoch])
        assert rank[epoch]["reads"] == 0
        # Half of each rank's half belongs to the other machine.
        assert N / 4 * 0.7 < rank[epoch]["peer_hits"] < N / 4 * 1.3


def test_no_machine_has_room_for_all(said: Said) -> None:
    """Else the test above would show nothing of sharing."""
    assert all(N * RECORD / 3 < held < N * RECORD * 0.8 for held in said.job["held"])


@pytest.mark.parametrize("loader", ["torch", "hotset", "hotset, shuffled"])
def test_a_loader_that_ray_train_prepares_gives_the_same_batches(said: Said, loader: str) -> None:
    for rank in said.first:
        right(rank[loader])
        assert rank[loader]["reads"] == 0


def test_our_loader_stays_ours_where_it_has_a_distributed_sampler(said: Said) -> None:
    """Where it has none, Ray Train makes a loader of torch's anew, of the same dataset."""
    for rank in said.first:
        assert rank["hotset"]["by"] == "hotset.loader.loader"
        assert rank["hotset, shuffled"]["by"] == "torch.utils.data.dataloader"


def test_ranks_that_are_started_again_go_on_from_their_checkpoint(said: Said) -> None:
    """In the midst of an epoch, with the cache as it was before one of them was killed."""
    for rank in said.again:
        right(rank["rest"])
        assert rank["rest"]["reads"] == 0


def test_what_ranks_report_is_what_ray_train_returns(said: Said) -> None:
    assert said.job["metrics"] == {"batches": BATCHES}


def test_memory_is_free_once_the_session_is_stopped(said: Said) -> None:
    assert said.job["freed"] > 0.9 * N * RECORD
    assert said.job["left"] == [0, 0]
