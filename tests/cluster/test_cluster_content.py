"""What machines share must be right and known: forgetting it, auditing it, counting it, telling of it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import samples
import sinking
from helpers import eventually
from rich.console import Console
from samples import big_image_and_label as image
from samples import image_and_label

pytest.importorskip("zmq", reason="pyzmq, which carries records between machines, is not installed")

from machines import town

from hotset.cli import cluster as command
from hotset.cluster import peer_stats
from hotset.cluster.peer_stats import PeerStats, PeerStatsFile, make_peer_stats, read_peer_stats
from hotset.dataset import audit
from hotset.errors import ClusterError, SegmentError

N = 120


def test_clear_forgets_what_all_machines_have(tmp_path: Path) -> None:
    with town(tmp_path, image, N) as made:
        trainers = made.trainers()
        made.epoch(trainers, 0)
        assert made.reads() == N
        trainers[0].call("clear")
        assert [machine.holds() for machine in made.machines] == [set()] * 3
        assert [walk.wrong for walk in made.epoch(trainers, 1)] == [[], [], []]
        assert made.reads() == N, "each of them once more"


def test_clear_tells_who_may_not_have_forgotten(tmp_path: Path) -> None:
    with town(tmp_path, image, N) as made:
        trainers = made.trainers()
        made.epoch(trainers, 0)
        assert made.machines[1].node is not None
        made.machines[1].node.kill()
        trainers[0].begin("clear")
        with pytest.raises(SegmentError, match=f"{made.machines[1].name} may still have a part of it"):
            trainers[0].result()
        assert made.machines[0].holds() == made.machines[2].holds() == set()
        assert made.machines[1].holds(), "it is there, and was not reached"


class Changing:
    """Makes other samples once a file is there."""

    def __init__(self, flag: Path) -> None:
        self.flag = flag

    def __call__(self, index: int) -> Any:
        return samples.kilobyte(index + self.flag.exists())


def test_what_neighbours_send_is_audited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The source is another than when it was cached, by a machine on which nobody uses it any more."""
    monkeypatch.setattr(audit, "_SHARE", 1e6)  # at once: else when a reading's seconds, times 100, are over
    with town(tmp_path, Changing(tmp_path / "changed"), N, count=2) as made:
        trainers = made.trainers()
        made.epoch(trainers, 0)
        theirs = sorted(made.owned()[1])
        (tmp_path / "changed").touch()
        told: list[str] = []
        for _ in range(3):
            trainers[0].begin("use", [theirs] * (2500 // len(theirs)))
            told += trainers[0].result().warnings
        assert any("differs from what was cached of it" in sentence for sentence in told)
        assert trainers[0].walk([theirs]).wrong == [], "all samples come from the source now"


def test_what_was_asked_for_before_a_clear_is_not_used_after_it(tmp_path: Path) -> None:
    with town(tmp_path, Changing(tmp_path / "changed"), N, count=2) as made:
        trainer, _ = made.trainers()
        node = made.machines[1].node
        assert node is not None
        batch = sorted(made.owned()[1])[:8]
        trainer.walk([batch])
        trainer.call("prefetch", batch)
        assert eventually(lambda: node.call("status")["served"]["records"] == len(batch)), "it is on its way"
        (tmp_path / "changed").touch()
        trainer.call("clear")
        assert trainer.walk([batch]).wrong == []


def test_clear_tells_who_is_away_and_may_come_back(tmp_path: Path) -> None:
    with town(tmp_path, image, N, count=2) as made:
        trainers = made.trainers()
        away = made.machines[1]
        assert away.node is not None
        away.node.stop()
        made.silence(away)
        trainers[0].begin("clear")
        with pytest.raises(SegmentError, match=f"{away.name} may still have a part of it"):
            trainers[0].result()


def test_who_was_away_while_it_was_cleared_forgets_it_before_it_is_asked(tmp_path: Path) -> None:
    with town(tmp_path, Changing(tmp_path / "changed"), N, count=2) as made:
        trainers = made.trainers()
        made.epoch(trainers, 0)
        away = made.machines[1]
        theirs = sorted(made.owned()[1])
        assert away.node is not None
        away.node.stop()
        made.silence(away)
        trainers[0].begin("clear")
        with pytest.raises(SegmentError):
            trainers[0].result()
        made.silence(away)  # in which the other one tells the directory
        (tmp_path / "changed").touch()
        assert away.holds() == set(theirs)
        away.node.go_on()
        made.settled()
        assert away.holds() == set()
        assert trainers[0].walk([theirs]).wrong == []
        assert away.holds() == set(theirs), "it is cleared once, and not with each beat"


def test_machines_whose_data_look_alike_and_are_not_the_same_are_told(tmp_path: Path) -> None:
    with town(tmp_path, image, N, count=2) as made:
        made.settled()
        one, two = (machine.trainer() for machine in made.machines)
        assert one.cache(made.source, image, key="mine") == []
        (told,) = two.cache(made.source, image, key="yours")
        assert "another machine caches a dataset of this class and length" in told
        assert 'hotset.cache(..., key="...")' in told
        again = made.machines[1].trainer()
        assert again.cache(made.source, image, key="mine") == [], "the same, and shared"


# ---- counting ------------------------------------------------------------------------------------------


@pytest.fixture
def stats_file(runtime: Path) -> PeerStatsFile:
    make_peer_stats(7)
    return PeerStatsFile(7)


def test_what_processes_have_counted_is_added_up(stats_file: PeerStatsFile) -> None:
    here, there = PeerStats(asked=5, received=3, bytes=300, answers=2, seconds=0.5), PeerStats(failures=1)
    stats_file.add({"a": here, "b": there}, now=True)
    here.received, here.answers, here.seconds = 10, 4, 1.0
    stats_file.add({"a": here, "b": there}, now=True)
    PeerStatsFile(7).add({"a": PeerStats(received=100)}, now=True)  # another process
    found = read_peer_stats(7)
    assert found["a"] == PeerStats(asked=5, received=110, bytes=300, answers=4, seconds=1.0)
    assert found["a"].latency == 0.25
    assert found["b"] == PeerStats(failures=1)


def test_a_machine_that_comes_again_is_counted_from_the_beginning(stats_file: PeerStatsFile) -> None:
    stats_file.add({"a": PeerStats(received=3)}, now=True)
    stats_file.add({"a": PeerStats(received=4)}, now=True)
    assert read_peer_stats(7)["a"].received == 7


def test_nothing_is_counted_twice_soon_after(
    stats_file: PeerStatsFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_stats, "_EVERY_SECONDS", 600.0)
    stats_file.add({"a": PeerStats(received=3)})
    assert read_peer_stats(7) == {}, "so long has not passed"
    monkeypatch.setattr(peer_stats, "_EVERY_SECONDS", 0.0)
    stats_file.add({"a": PeerStats(received=3)})
    assert read_peer_stats(7)["a"].received == 3


def test_a_statistics_file_that_is_gone_or_damaged_harms_nobody(
    stats_file: PeerStatsFile, runtime: Path
) -> None:
    (runtime / "7.traffic").write_bytes(b"\xff" * 77)
    stats_file.add({"a": PeerStats(received=3)}, now=True)
    assert all(isinstance(name, str) for name in read_peer_stats(7))
    (runtime / "7.traffic").unlink()
    stats_file.add({"a": PeerStats(received=9)}, now=True)
    with pytest.raises(FileNotFoundError):
        read_peer_stats(7)


@pytest.mark.chaos  # a loader over machines and a sink over a loader are tested apart
@pytest.mark.parametrize("workers", [0, 2])
def test_steps_are_sunk_as_on_one_machine(tmp_path: Path, workers: int) -> None:
    with town(tmp_path, image_and_label, sinking.N, count=2) as made:
        trainers = made.trainers()
        for trainer in trainers:
            trainer.begin("sunk", sinking.N, workers)
        for trainer in trainers:
            sunk, plain = trainer.result().value
            assert sunk == plain
            assert len(set(sunk)) == sinking.STEPS
        assert all(trainer.call("stats").peer_hits for trainer in trainers)


def test_loader_workers_are_counted_though_they_end_at_once(tmp_path: Path) -> None:
    with town(tmp_path, image, N, count=2) as made:
        trainers = made.trainers()
        made.epoch(trainers, 0)
        before = trainers[0].call("stats")
        trainers[0].load(made.order(1), 2)
        after = trainers[0].call("stats")
        (name,) = [machine.name for machine in made.machines[1:]]
        came = after.peers[name].received - before.peers[name].received
        assert came == after.peer_hits - before.peer_hits > 0


# ---- telling -------------------------------------------------------------------------------------------


def test_what_the_command_shows_is_what_the_machines_say(tmp_path: Path) -> None:
    with town(tmp_path, image, N, count=2) as made:
        trainers = made.trainers()
        for epoch in range(2):
            made.epoch(trainers, epoch)
        for trainer in trainers:
            trainer.call("stats")  # counts up

        found: list[dict[str, Any]] = []

        def is_complete() -> bool:
            found[:] = made.post.call("status")
            return sum(each.get("cached", 0) for each in found) == N and all(each["peers"] for each in found)

        assert eventually(is_complete)
    with (tmp_path / "out").open("w") as out:
        console = Console(width=200, record=True, file=out)
        console.print(command.described({"shared": found}))
        shown = console.export_text()
    assert "session shared" in shown
    for machine in found:
        (peer,) = machine["peers"].values()
        line = next(line for line in shown.splitlines() if machine["endpoint"].removeprefix("tcp://") in line)
        for number in (machine["cached"], machine["hits"], peer["received"], machine["misses"]):
            assert f" {number:,} " in line
        assert shown.count(machine["name"]) == 3, "itself, what it got, and what was got from it"
    assert command.described({}) == "The machines of this Ray cluster share no session."


def test_the_command_without_ray_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ClusterError, match=r"pip install 'hotset\[ray\]'"):
        command.status("auto", None)


def test_one_sample_is_enough_for_replicas(tmp_path: Path) -> None:
    with town(tmp_path, image, 1, count=2) as made:
        for trainer in made.trainers(replicate=True):
            assert trainer.walk([[0]] * 3).wrong == []
        assert made.reads() == 1
        assert [machine.holds() for machine in made.machines] == [{0}, {0}]
