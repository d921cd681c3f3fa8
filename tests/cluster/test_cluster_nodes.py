"""Several machines that hold a dataset together, each of them a folder and real processes; no Ray.

Whatever happens to some of them, the others' samples are right, and no process fails or waits for ever.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import samples
from helpers import eventually, rarely
from samples import big_image_and_label as image
from sources import PlainError, Raising, Samples, Stalling
from stores import attached, ids, opened

pytest.importorskip("zmq", reason="pyzmq, which carries records between machines, is not installed")

from machines import MIB, Machine, Town, Trainer, Walk, town

from hotset.cluster import node
from hotset.cluster import remote_cache as neighbours
from hotset.cluster.node import find_or_make
from hotset.errors import SegmentError
from hotset.session import sessions
from hotset.store.format import ROW_MASK

N = 240
LEASE = 0.5


def all_right(walks: list[Walk], warnings: int = 0) -> list[str]:
    """Fail unless all samples were right, and each process was warned so often at most; returns of what."""
    assert [walk.wrong for walk in walks] == [[] for _ in walks]
    assert all(len(walk.warnings) <= warnings for walk in walks), [walk.warnings for walk in walks]
    return [sentence for walk in walks for sentence in walk.warnings]


def lie_with_their_owners(made: Town) -> None:
    """Fail unless each machine has what it owns, all of it, sound, and nothing else."""
    for machine, mine in zip(made.machines, made.owned(), strict=True):
        assert machine.holds() == mine
        assert machine.check() == []


def filled(made: Town, **how: Any) -> list[Trainer]:
    """Trainers on all machines, and every sample with its owner."""
    trainers = made.trainers(**how)
    all_right(made.epoch(trainers, 0))
    assert made.reads() == made.n
    return trainers


# ---- all is well ---------------------------------------------------------------------------------------


def test_each_sample_is_read_once_and_lies_with_its_owner(tmp_path: Path) -> None:
    with town(tmp_path, image, N) as made:
        trainers = made.trainers()
        for epoch in range(3):
            all_right(made.epoch(trainers, epoch))
            assert made.reads() == (0 if epoch else N)
        lie_with_their_owners(made)
        stats = [trainer.call("stats") for trainer in trainers]
        assert sum(each.misses for each in stats) == N
        assert sum(each.hits + each.peer_hits + each.misses for each in stats) == 3 * N
        late = made.trainers(made.machines[1])[0]
        all_right([late.walk(made.order(5))])
        assert made.reads() == 0, "another process of that machine, later"
        lie_with_their_owners(made)


@pytest.mark.parametrize("make", rarely([samples.ragged, samples.text, samples.of_many_forms], samples.text))
def test_samples_with_tails(tmp_path: Path, make: Callable[[int], Any]) -> None:
    with town(tmp_path, make, 120, count=2) as made:
        trainers = filled(made)
        all_right(made.epoch(trainers, 1))
        assert made.reads() == 0
        lie_with_their_owners(made)


@pytest.mark.chaos  # the test below has more processes, which meet at each sample
def test_all_walk_all_samples_at_the_same_time(tmp_path: Path) -> None:
    with town(tmp_path, image, N, seconds=2e-3) as made:
        trainers = made.trainers()
        for seed, trainer in enumerate(trainers):
            trainer.begin("walk", made.order(seed))
        all_right([trainer.walked() for trainer in trainers])
        assert made.reads() == N
        for seed, trainer in enumerate(trainers):
            trainer.begin("walk", made.order(10 + seed))
        all_right([trainer.walked() for trainer in trainers])
        assert made.reads() == 0
        lie_with_their_owners(made)


def test_all_walk_the_same_order_at_the_same_time(tmp_path: Path) -> None:
    with town(tmp_path, image, N, count=2, seconds=2e-3) as made:
        trainers = [*made.trainers(), *made.trainers()]  # two on each machine
        for trainer in trainers:
            trainer.begin("walk", made.order(0))
        all_right([trainer.walked() for trainer in trainers])
        assert made.reads() == N
        lie_with_their_owners(made)


def test_workers_of_loaders(tmp_path: Path) -> None:
    with town(tmp_path, image, N, count=2) as made:
        trainers = made.trainers()
        for epoch in range(2):
            for rank, trainer in enumerate(trainers):
                trainer.begin("load", made.order(epoch, rank=rank, ranks=2), 2, "fork")
            all_right([trainer.walked() for trainer in trainers])
            assert made.reads() == (0 if epoch else N)
        lie_with_their_owners(made)


@pytest.mark.chaos  # the two tests around this one hold forked workers, and copies by pickle
def test_workers_that_are_spawned(tmp_path: Path) -> None:
    with town(tmp_path, image, N, count=2) as made:
        trainer = filled(made)[0]
        all_right([trainer.load(made.order(1), 1, "spawn")])
        assert made.reads() == 0
        assert trainer.call("stats").peer_hits >= len(made.owned()[1]), "they know where the others are"


def test_a_copy_by_pickle_goes_on(tmp_path: Path) -> None:
    with town(tmp_path, image, N, count=2) as made:
        trainers = filled(made)
        for trainer in trainers:
            trainer.call("repickle")
        all_right(made.epoch(trainers, 1))
        assert made.reads() == 0


def test_a_sample_that_comes_twice_in_a_batch(tmp_path: Path) -> None:
    with town(tmp_path, image, N, count=2) as made:
        trainer = made.trainers()[0]
        batches = [[5, 9, 5, -1, 9, 5, N - 1], [5, 5], [7] * 4]
        assert trainer.call("scribble", batches) == []
        assert made.log.counts() == {5: 1, 9: 1, N - 1: 1, 7: 1}


# ---- replicas ------------------------------------------------------------------------------------------


def test_replicas_make_later_epochs_local(tmp_path: Path) -> None:
    with town(tmp_path, image, N, count=2) as made:
        trainers = made.trainers(replicate=True)
        for epoch in range(2):
            for trainer in trainers:
                all_right([trainer.walk(made.order(epoch))])
        assert made.reads() == N
        for machine in made.machines:
            assert eventually(lambda machine=machine: len(machine.holds()) == N)
            assert machine.check() == []
        before = [trainer.call("stats").peer_hits for trainer in trainers]
        all_right([trainer.walk(made.order(2)) for trainer in trainers])
        assert [trainer.call("stats").peer_hits for trainer in trainers] == before
        assert made.reads() == 0


def test_replicas_never_cost_a_machine_what_it_owns(tmp_path: Path) -> None:
    """Each machine has room for about a half of the data, of which it owns a third."""
    n = 300  # a process audits a hit now and then, by reading the source, and not yet with so few
    with town(tmp_path, samples.kilobyte, n, memory=n * 1100 * 52 // 100) as made:
        trainers = made.trainers(replicate=True)
        for epoch in range(3):
            # One after the other: who is first finds its memory empty, and others' samples to fill it with.
            all_right([trainer.walk(made.order(epoch, size=64)) for trainer in trainers], warnings=1)
            assert made.reads() == (0 if epoch else n)
        for machine, mine in zip(made.machines, made.owned(), strict=True):
            assert machine.holds() >= mine
            assert machine.check() == []
        assert sum(len(machine.holds()) for machine in made.machines) > n, "what is left over is used"


@pytest.mark.chaos  # the test above has room for what a machine owns, too
def test_replicas_leave_room_for_what_is_not_read_yet(tmp_path: Path) -> None:
    n = 400
    with town(tmp_path, samples.kilobyte, n, memory=n * 1100 * 52 // 100) as made:
        mine, *others = made.owned()
        theirs = sorted(set.union(*others))
        trainers = made.trainers(replicate=True)
        batches = [theirs[start : start + 16] for start in range(0, len(theirs), 16)]
        all_right([trainers[1].walk(batches)])
        all_right([trainers[0].walk(batches)])
        assert made.machines[0].holds(), "it has seen nothing but others' samples"
        all_right([trainers[0].walk([sorted(mine)])], warnings=1)
        assert made.machines[0].holds() >= mine


# ---- machines that fail --------------------------------------------------------------------------------


def test_a_machine_is_killed_in_mid_epoch(tmp_path: Path) -> None:
    with town(tmp_path, image, N, seconds=2e-3, lease=LEASE) as made:
        trainers = made.trainers()
        *others, dead = made.machines
        for rank, trainer in enumerate(trainers):
            trainer.begin("walk", made.order(0, rank=rank, ranks=3))
        assert eventually(lambda: made.log.total() > N // 4)
        dead.kill()
        survivors = [trainer.walked() for trainer in trainers[:2]]
        told = all_right(survivors, warnings=1)
        assert all(dead.name in sentence for sentence in told)
        made.silence(dead)
        all_right(made.epoch(trainers[:2], 1), warnings=1)
        made.reads()
        all_right(made.epoch(trainers[:2], 2))
        assert made.reads() == 0
        owned = made.owned(*others)
        assert owned[0] | owned[1] == set(range(N))
        for machine, mine in zip(others, owned, strict=True):
            assert machine.holds() >= mine
            assert machine.check() == []


@pytest.mark.chaos  # the tests around this one have dead machines
def test_of_a_dead_machine_a_loaders_workers_tell_once_together(tmp_path: Path) -> None:
    with town(tmp_path, image, N, count=2) as made:
        trainers = filled(made)
        made.machines[1].kill()
        walks = [trainers[0].load(made.order(epoch), 2) for epoch in (1, 2)]
        assert [walk.wrong for walk in walks] == [[], []]
        (told,) = [sentence for walk in walks for sentence in walk.warnings]
        assert made.machines[1].name in told


def test_what_a_dead_machine_had_is_read_once(tmp_path: Path) -> None:
    with town(tmp_path, image, N) as made:
        trainers = filled(made)
        dead = made.machines[2]
        lost = made.owned()[2]
        dead.kill()
        made.silence(dead)
        all_right(made.epoch(trainers[:2], 1), warnings=1)
        assert set(made.log.counts()) == lost
        assert made.reads() == len(lost)
        all_right(made.epoch(trainers[:2], 2))
        assert made.reads() == 0


def test_a_node_that_is_stopped_holds_nobody_up(tmp_path: Path) -> None:
    with town(tmp_path, image, N) as made:
        trainers = filled(made)
        machine = made.machines[2]
        made.wait_for(machine, 0.3)
        assert machine.node is not None
        machine.node.stop()
        for rank, trainer in enumerate(trainers):
            trainer.begin("walk", made.order(1, rank=rank, ranks=3, size=2))
        walks = [trainer.walked() for trainer in trainers]
        (told, _) = all_right(walks[:2], warnings=1)
        assert machine.name in told
        for trainer in trainers[:2]:
            failures = trainer.call("stats").peers[machine.name].failures
            assert 1 <= failures <= 8, "of 40 batches: it is left alone for longer each time"
        assert set(made.log.counts()) <= made.owned()[2]
        assert all(count == 1 for count in made.log.counts().values())
        machine.node.go_on()
        made.reads()

        def served() -> bool:
            all_right(made.epoch(trainers, 2))
            return made.reads() == 0

        assert eventually(served), "it is asked again"


def test_a_node_that_begins_again_is_the_same(tmp_path: Path) -> None:
    with town(tmp_path, image, N, count=2) as made:
        trainers = filled(made)
        machine = made.machines[1]
        before = machine.member
        assert machine.node is not None
        machine.node.kill()
        machine.begin()
        after = machine.member
        assert after._replace(endpoint=before.endpoint) == before, "so that nothing moves"
        assert after.endpoint != before.endpoint
        assert eventually(lambda: after.endpoint in made.machines[0].endpoints())
        assert eventually(lambda: after.endpoint in machine.endpoints())
        trainers.append(made.trainers(made.machines[0])[0])
        assert made.reads() == 0
        for trainer in trainers:
            all_right([trainer.walk(made.order(1))], warnings=1)
        assert made.reads() == 0
        lie_with_their_owners(made)


@pytest.mark.chaos  # the tests around this one begin one of them again
def test_all_nodes_and_the_directory_begin_again(tmp_path: Path) -> None:
    with town(tmp_path, image, N, count=2) as made:
        trainers = filled(made)
        made.post.close()
        for machine in made.machines:
            assert machine.node is not None
            machine.node.kill()
        for machine in made.machines:
            machine.begin()
        made.post.open()
        ends = sorted(machine.member.endpoint for machine in made.machines)
        assert eventually(lambda: all(sorted(m.endpoints()) == ends for m in made.machines))
        trainers += made.trainers()
        for trainer in trainers:
            all_right([trainer.walk(made.order(1))], warnings=1)
        assert made.reads() == 0
        lie_with_their_owners(made)


def test_training_goes_on_without_a_directory(tmp_path: Path) -> None:
    with town(tmp_path, image, N) as made:
        trainers = made.trainers()
        memberships = [machine.membership() for machine in made.machines]
        made.post.close()
        all_right(made.epoch(trainers, 0))
        assert made.reads() == N
        made.post.open()
        seen = set()
        assert eventually(
            lambda: seen.add(str([m.membership() for m in made.machines])) or made.post.call("members")
        )
        all_right(made.epoch(trainers, 1))
        assert made.reads() == 0
        seen.add(str([machine.membership() for machine in made.machines]))
        assert seen == {str(memberships)}, "nobody leaves meanwhile"
        lie_with_their_owners(made)


# ---- machines that come --------------------------------------------------------------------------------


def test_what_moves_to_who_joins_is_found_with_its_former_owner(tmp_path: Path) -> None:
    with town(tmp_path, image, N, count=2) as made:
        trainers = filled(made)
        made.add()
        made.settled()
        assert len(made.owned()[2]) > N // 6
        for epoch in (1, 2):
            all_right(made.epoch(trainers, epoch))
            assert made.reads() == 0


@pytest.mark.chaos  # the test above has a machine that joins
def test_who_joins_serves_what_is_read_anew(tmp_path: Path) -> None:
    with town(tmp_path, image, N, count=2) as made:
        trainers = made.trainers()
        made.add()
        made.settled()
        all_right(made.epoch(trainers, 0))
        assert made.reads() == N
        lie_with_their_owners(made)
        assert made.machines[2].holds() == made.owned()[2], "which has not trained yet"
        trainers += made.trainers(made.machines[2])
        all_right(made.epoch(trainers, 1))
        assert made.reads() == 0


@pytest.mark.chaos  # two tests above, a machine joins
def test_who_joins_gets_its_share_from_its_neighbours(tmp_path: Path) -> None:
    with town(tmp_path, image, N, count=2) as made:
        trainers = filled(made)
        made.add()
        trainers += made.trainers(made.machines[2])
        for epoch in (1, 2):
            all_right(made.epoch(trainers, epoch))
        assert made.reads() == 0


# ---- memory, data, sessions ----------------------------------------------------------------------------


def test_what_its_owner_has_no_room_for_the_next_machine_takes(tmp_path: Path) -> None:
    with town(tmp_path, image, N, count=2, memory=4 * MIB) as made:
        trainers = made.trainers()
        trainers[1].begin("fill_session", 6000)
        told = trainers[1].result()
        assert told.value < 6000
        assert len(told.warnings) == 1
        made.reads()
        for epoch in range(3):
            for trainer in trainers:
                all_right([trainer.walk(made.order(epoch))])
            assert made.reads() == (0 if epoch else N)
            there, lost = made.owned()
            held = made.machines[1].holds()
            assert held < lost
            assert made.machines[0].holds() == there | (lost - held)
        late = made.trainers(*made.machines)
        all_right(made.epoch(late, 3))
        assert made.reads() == 0, "processes that have met no machine without room so far"


@pytest.mark.chaos  # the test above has an owner without room
@pytest.mark.parametrize("make", [samples.kilobyte, samples.ragged])
def test_shares_that_are_drawn_too_large_find_room(tmp_path: Path, make: Callable[[int], Any]) -> None:
    n = 900
    with opened(make, n) as store:
        store.fill(ids(range(n)), make)
        size = store.stored_bytes
    # Shares of 300 samples differ by 14, and there is room for 6 more.
    with town(tmp_path, make, n, memory=size * 102 // 100 // 3) as made:
        trainers = made.trainers()
        for epoch in range(3):
            all_right(made.epoch(trainers, epoch))
            assert made.reads() == (0 if epoch else n)


def test_where_no_machine_has_room_samples_are_read_and_that_is_told_once(tmp_path: Path) -> None:
    with town(tmp_path, image, N, memory=N * 12400 // 4) as made:
        trainers = made.trainers()
        told = all_right(made.epoch(trainers, 0), warnings=1)
        told += all_right(made.epoch(trainers, 1), warnings=1)
        assert told
        assert all("no more fit" in sentence and "--memory" in sentence for sentence in told)
        assert len(told) <= 3
        made.reads()
        all_right(made.epoch(trainers, 2))
        held = set.union(*(machine.holds() for machine in made.machines))
        assert N // 2 < len(held) < N
        assert made.reads() == N - len(held), "each by who needs it, once"


@pytest.mark.chaos  # `test_a_cache_that_another_machines_job_uses_stays` has two keys
def test_other_data_in_the_same_session(tmp_path: Path) -> None:
    with town(tmp_path, image, N, count=2) as made:
        trainers = filled(made)
        others = [machine.trainer() for machine in made.machines]
        source = Samples(samples.kilobyte, N)
        for other in others:
            assert other.cache(source, samples.kilobyte, key="other data") == []
        for epoch in range(2):
            for rank, other in enumerate(others):
                all_right([other.walk(made.order(epoch, rank=rank, ranks=2))])
            all_right(made.epoch(trainers, epoch))
        assert made.reads() == 0
        assert all(len(machine.shared()) == 2 for machine in made.machines)


def test_a_session_is_destroyed_on_one_machine_in_mid_epoch(tmp_path: Path) -> None:
    with town(tmp_path, image, N, count=3, seconds=2e-3, lease=LEASE) as made:
        trainers = made.trainers()
        for rank, trainer in enumerate(trainers):
            trainer.begin("walk", made.order(0, rank=rank, ranks=3))
        assert eventually(lambda: made.log.total() > N // 3)
        node = made.machines[1].node
        assert node is not None
        assert node.call("destroy") > 0
        walks = [trainer.walked() for trainer in trainers]
        told = all_right(walks, warnings=1)
        assert [sentence for sentence in told if "its session was destroyed" in sentence] == walks[1].warnings
        for epoch in (1, 2):
            all_right(made.epoch(trainers, epoch), warnings=1)
        # Who has lost its session brings the others nothing: all samples by these two.
        all_right(made.epoch([trainers[0], trainers[2]], 3), warnings=1)
        survivors = [made.machines[0], made.machines[2]]
        for machine, mine in zip(survivors, made.owned(*survivors), strict=True):
            assert machine.holds() >= mine, "who has lost its session owns nothing any more"
            assert machine.check() == []
        made.reads()
        all_right(made.epoch([trainers[0], trainers[2]], 4), warnings=1)
        assert made.reads() == 0
        assert list(made.machines[1].folder.glob("*.cluster")) == []


@pytest.mark.chaos  # the tests around this one hold both halves
def test_a_session_that_a_person_destroys_on_one_machine_is_made_anew(tmp_path: Path) -> None:
    with town(tmp_path, image, N, count=2) as made:
        trainers = filled(made)
        machine = made.machines[1]
        (before,) = machine.folder.glob("*.session")
        assert trainers[1].call("destroy_session") > 0
        assert eventually(lambda: [f for f in machine.folder.glob("*.session") if f != before])
        (told,) = all_right([trainers[1].walk(made.order(1))], warnings=1)
        assert "its session was destroyed" in told, "who used it is not to go on with another one"
        made.settled()
        late = made.trainers(machine)[0]
        made.reads()
        for epoch in (2, 3):
            all_right(made.epoch([trainers[0], late], epoch))
            assert made.reads() == (0 if epoch == 3 else len(made.owned()[1])), "what was lost, once"
        lie_with_their_owners(made)


def test_a_session_is_made_anew_as_it_was_and_without_its_disk_if_that_is_gone(
    runtime: Path, tmp_path: Path
) -> None:
    disk = tmp_path / "disk"
    was = sessions.create("a", memory=MIB, spill=str(disk), persist=True, ttl=77.0)
    sessions.destroy(was)
    again = find_or_make("a", MIB, like=was)
    assert (again.memory, again.spill, again.persist, again.ttl) == (MIB, str(disk), True, 77.0)
    assert again.number != was.number
    sessions.destroy(again)
    shutil.rmtree(disk)
    disk.touch()
    bare = find_or_make("a", MIB, like=was)
    assert (bare.memory, bare.spill, bare.persist) == (MIB, None, False)


def test_a_clear_is_repeated_until_nobody_reads_and_holds_nobody_up(tmp_path: Path) -> None:
    with town(tmp_path, image, N, count=3) as made:
        theirs = sorted(made.owned()[1])
        source = Stalling(image, N, theirs[3], tmp_path / "marker")
        trainers = [machine.trainer() for machine in made.machines]
        for trainer in trainers:
            assert trainer.cache(source, image) == []
        all_right([trainers[1].walk([theirs[6:12]])])
        source.arm()
        trainers[1].begin("walk", [theirs[:6]])
        source.stalled_pid()
        trainers[0].begin("clear")
        for _ in range(4):
            all_right([trainers[2].walk([theirs[6:12]])])
        assert made.machines[1].holds() >= set(theirs[6:12])
        source.disarm()
        assert trainers[0].result().warnings == []
        all_right([trainers[1].walked()])
        assert not made.machines[1].holds() & set(theirs[6:12])


def test_a_clear_that_somebody_who_reads_prevents_says_so_and_nobody_is_to_blame(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with town(tmp_path, image, N, count=2) as made:
        # It is asked again for a second, and the last answer has half a minute to come.
        monkeypatch.setattr(neighbours, "PATIENCE", 30.0)
        monkeypatch.setattr(neighbours, "_CLEAR_SECONDS", 31.0)
        theirs = sorted(made.owned()[1])[:6]
        source = Stalling(image, N, theirs[3], tmp_path / "marker")
        trainers = [machine.trainer() for machine in made.machines]
        for trainer in trainers:
            assert trainer.cache(source, image) == []
        source.arm()
        trainers[1].begin("walk", [theirs])
        source.stalled_pid()
        trainers[0].begin("clear")
        told = trainers[0].told()
        assert isinstance(told.value, SegmentError)
        assert made.machines[1].name in str(told.value)
        assert told.warnings == []
        assert trainers[0].call("stats").peers[made.machines[1].name].failures == 0
        source.disarm()
        all_right([trainers[1].walked()])
        trainers[0].call("clear")


# ---- samples that are not as they should be ------------------------------------------------------------


def damage(machine: Machine, sample: int) -> None:
    """Change a byte of a record in a machine's memory."""
    with attached(machine.file) as store:
        row = int(store.words(ids(sample))[0]) & ROW_MASK
        at = store.segment.geometry.rows_at + row * store.segment.geometry.stride + 200
    with open(machine.file, "r+b") as file:
        file.seek(at)
        (byte,) = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ 0xFF]))


def test_a_damaged_record_reaches_nobody(tmp_path: Path) -> None:
    with town(tmp_path, image, N, count=3) as made:
        trainers = filled(made)
        owner = made.machines[1]
        spoilt = sorted(made.owned()[1])[:3]
        for sample in spoilt:
            damage(owner, sample)
        assert len(owner.check()) == 3
        for trainer in (trainers[0], trainers[2]):
            (told,) = all_right([trainer.walk(made.order(1))], warnings=1)
            assert owner.name in told
            assert "checksums" in told
        assert set(made.log.counts()) == set(spoilt)


def test_a_sample_of_another_form_is_read_once_like_any_other(tmp_path: Path) -> None:
    with town(tmp_path, samples.odd_at_seven, 60, count=2) as made:
        trainers = made.trainers()
        for epoch in range(2):
            all_right(made.epoch(trainers, epoch))
        assert made.log.counts() == dict.fromkeys(range(60), 1)
        assert set.union(*(machine.holds() for machine in made.machines)) == set(range(60))


@pytest.mark.parametrize("stalled", [0, 1])
def test_samples_whose_reader_stalls_or_dies_are_read_by_others_and_kept(
    tmp_path: Path, stalled: int
) -> None:
    """All of them belong to the second machine, whose own reader stalls, or the other one's, which dies."""
    with town(tmp_path, image, N, count=2, lease=LEASE) as made:
        theirs = sorted(made.owned()[1])[:6]
        source = Stalling(image, N, theirs[3], tmp_path / "marker")
        trainers = [machine.trainer() for machine in made.machines]
        for trainer in trainers:
            assert trainer.cache(source, image) == []
        source.arm()
        trainers[stalled].begin("walk", [theirs])
        source.stalled_pid()
        if stalled == 0:
            trainers[0].kill()
        all_right([trainers[1 - stalled].walk([theirs])])
        if stalled == 1:
            source.disarm()
            all_right([trainers[1].walked()])
            assert made.machines[0].holds() == set()
        assert made.machines[1].holds() == set(theirs)


def test_what_the_source_raises_reaches_the_user_and_what_was_read_is_kept(tmp_path: Path) -> None:
    with town(tmp_path, image, N, count=2) as made:
        theirs = sorted(made.owned()[1])[:8]
        bad = theirs[4]
        source = Raising(image, N, bad, tmp_path / "marker")
        trainers = [machine.trainer() for machine in made.machines]
        for trainer in trainers:
            assert trainer.cache(source, image) == []
        source.arm()
        with pytest.raises(PlainError, match=f"sample {bad} is broken"):
            trainers[0].walk([theirs])
        assert eventually(lambda: made.machines[1].holds() >= set(theirs[:4]))
        with pytest.raises(PlainError, match=f"sample {bad} is broken"):
            trainers[1].walk([theirs])
        source.disarm()
        all_right([trainer.walk([theirs]) for trainer in trainers])
        assert made.machines[1].holds() >= set(theirs)
        assert not made.machines[0].holds() & set(theirs)


def test_a_cache_that_no_machines_jobs_use_makes_room_on_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job with another key comes after the first has ended: no machine keeps what the first one had."""
    monkeypatch.setattr(node, "_UNASKED_SECONDS", 0.2)
    with town(tmp_path, image, N, count=2, memory=N * 12400 * 5 // 8) as made:
        first = filled(made)
        for trainer in first:
            trainer.end()
        second = [machine.trainer() for machine in made.machines]
        for trainer in second:
            trainer.begin("cache", made.source, made.make, {"key": "edited"})
        for trainer in second:
            trainer.result()  # and what it is warned of: another machine has the same data, by another key
        told: list[str] = []

        def all_cached() -> bool:
            made.reads()
            nonlocal told
            told += all_right(made.epoch(second, 0), warnings=9)
            return made.reads() == 0

        assert eventually(all_cached), "what was the first one's is not given back"
        assert not any("destroyed" in sentence for sentence in told)


def test_a_cache_that_another_machines_job_uses_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This machine has no job of it, but serves it."""
    monkeypatch.setattr(node, "_UNASKED_SECONDS", 600.0)
    with town(tmp_path, image, N, count=2, memory=N * 12400 * 5 // 8) as made:
        here, there = filled(made)
        here.end()
        other = made.machines[0].trainer()
        other.begin("cache", made.source, made.make, {"key": "edited"})
        other.result()
        made.reads()
        all_right([other.walk(made.order(0))], warnings=1)
        made.reads()
        all_right([there.walk(made.order(1))])
        assert made.reads() == 0
