"""The benchmark of clusters, tiny: what it counts, refuses and leaves behind, and its arithmetic on paper."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("ray", reason="Ray, which keeps track of a cluster's machines, is not installed")
pytest.importorskip("zmq", reason="pyzmq, which carries records between machines, is not installed")

from benchmarks.cluster_estimate import Rates, Times, estimate
from benchmarks.cluster_rank import Epoch, Noise
from benchmarks.harness import Outcome
from benchmarks.suite import cluster
from benchmarks.throttle import Throttle
from benchmarks.truth import WrongData

pytestmark = pytest.mark.benchmark

ROOT = Path(__file__).parents[2]
SIZE = 100

# Ray warns of itself in ways that change with its versions, and warnings are errors here: it runs elsewhere.
PROGRAM = """
import contextlib, json, os
from pathlib import Path
from benchmarks.suite import cluster
from benchmarks.cluster_nodes import ray_nodes
from benchmarks.cluster_wire import compared
from benchmarks.harness import Outcome

cluster._NODES = 2
outcome = Outcome()
said = {}
with ray_nodes(2) as nodes:
    found = compared(nodes, 1000, 4, 1, 0.01)
    said["ways"] = {name: (row.unfit, len(row.figures)) for name, row in found.rows.items()}
    with cluster._opened(nodes, 120, 1000, 1.0) as job:
        said["reads"] = job.link.counts().requests
        cluster._reads(nodes, job, "tiny", outcome)
        here, there = (nodes.folders[number] for number in (0, 1))
        said["machines"] = len(nodes.members())
        said["killed"] = nodes.kill(1)
        said["alive"] = os.path.exists(here)
        nodes.remove(1)
        said["removed"] = not os.path.exists(there)
    folders = list(nodes.folders.values())
said["targets"] = [[target.measured.median, bool(target.met)] for target in outcome.targets]
left = 0
for process in Path("/proc").glob("[0-9]*/environ"):
    with contextlib.suppress(OSError):
        words = process.read_bytes()
        left += any(folder.encode() in words for folder in folders)
said["left"] = left + sum(map(os.path.exists, folders))
print(json.dumps(said))
"""


@pytest.mark.timeout(240)
def test_two_nodes_exchange_records_read_the_source_once_and_leave_nothing_behind() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True, check=False, timeout=200
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    assert said["ways"].keys() == {
        "TCP copy loop",
        "TCP copy loop, encrypted",
        "ZeroMQ",
        "ZeroMQ without keys",
        "Ray objects",
    }
    assert all(way == ["", 1] for way in said["ways"].values())
    first, later = said["targets"]
    # What opening has read counts too, and an audit: they are more than 2 % of so few samples.
    assert 120 + said["reads"] <= first[0] * 120 <= 120 + said["reads"] + 2.5
    assert not first[1]
    assert later == [0, True]
    assert said["machines"] == 2
    assert said["killed"] > 2  # Ray's own processes, the node and the rank
    assert said["alive"]
    assert said["removed"]
    assert said["left"] == 0


def test_no_two_samples_are_alike_and_an_altered_one_is_found(tmp_path: Path) -> None:
    link = Throttle(tmp_path / "link", 1e9)
    noise = Noise(50, SIZE, link)
    read = [noise[i] for i in range(50)]
    assert link.counts() == (50, 50 * SIZE)
    assert len({bytes(value.numpy()) for value, _ in read}) == 50
    batch = torch.stack([value for value, _ in read]), torch.arange(50)
    assert noise.check(batch) == list(range(50))
    batch[0][7, SIZE - 1] ^= 1
    with pytest.raises(WrongData, match="sample 7 "):
        noise.check(batch)
    with pytest.raises(IndexError):
        noise[50]


class Told:
    """Nodes whose ranks say what they are given to say."""

    def __init__(self, *parts: Epoch) -> None:
        self._parts = list(parts)

    def together(self, *_: object, **__: object) -> list[Epoch]:
        return self._parts


def part(*ids: int, told: str = "", seconds: float = 1.0) -> Epoch:
    return Epoch(list(ids), seconds, 0.0, [told] if told else [])


def job(count: int) -> Any:
    return cluster._Job(Noise(count, SIZE), None, [], 0.0)  # type: ignore[arg-type]


def test_an_epoch_takes_as_long_as_its_slowest_rank_and_has_every_sample() -> None:
    def epoch(*parts: Epoch) -> float:
        return cluster._epoch(Told(*parts), job(4), 0)  # type: ignore[arg-type]

    assert epoch(part(0, 3), part(1, 2, seconds=2.0)) == 2.0
    assert epoch(part(0, 3), part(1, 2, told="700 of 800 samples are cached, and no more fit: ...")) == 1.0
    with pytest.raises(WrongData, match="without some of its samples"):
        epoch(part(0, 3), part(1, 1))
    with pytest.raises(cluster._Failed, match="a peer died"):
        epoch(part(0, 3), part(1, 2, told="a peer died"))


def test_what_cannot_be_measured_is_a_target_with_the_reason_and_the_others_go_on() -> None:
    def fail() -> None:
        raise WrongData("sample 3 differs")

    outcome = Outcome()
    with cluster._guarded(outcome, "it"):
        fail()
    assert [(t.text, t.met, t.reason) for t in outcome.targets] == [
        ("it", None, "wrong data: sample 3 differs")
    ]


def test_on_paper_the_slower_of_processor_and_network_counts_and_alone_there_is_nobody_to_ask() -> None:
    rates = Rates(local=1000.0, peer=100.0, wire=1e9, source=10.0)
    assert estimate(1, 8000, rates) == Times(800.0, 800.0, 8.0)
    # Four machines with 2,000 each: 500 from here, 1,500 from others.
    assert estimate(4, 8000, rates) == Times(800.0, 800.0, 0.5 + 15.0)
    assert estimate(4, 8000, rates._replace(wire=50.0)).later == 30.0
    # Where the source is the faster, the first epoch waits for the network all the same.
    assert estimate(4, 8000, rates._replace(source=1e9)).first == 15.5
