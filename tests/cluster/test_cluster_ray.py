"""A session over the machines of a real Ray cluster: what it promises while machines die, join and restart.

The cluster runs in a program of its own, ``ray_job``, once for all tests, and ends with it; each test looks
at what came of one claim. A claim in which something was raised fails with that traceback. The deaths of
machines come last.
"""

from __future__ import annotations

import json
import subprocess
import sys
import types
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from helpers import failure, is_a_sentence
from ray_here import end, require_ray, skip_where_ray_was_late
from ray_patient import PATIENCE
from samples import number
from sources import Samples

pytest.importorskip("ray", reason="Ray, over whose clusters sessions are shared, is not installed")
pytest.importorskip("zmq", reason="pyzmq, which carries records between machines, is not installed")

import hotset
from hotset.cluster import ray_join as joining
from hotset.session import sessions

N = 3000
PROBE = 40  # what a probe reads at most: a few samples, most of them twice
COMPARED = 4  # samples at most that a job reads to compare which joins another's cache
LONGEST = 600.0  # seconds; a tenth of it where nothing else runs

# It takes more processor time than any other file, and is part of `make chaos` therefore; what machines do
# with each other is held without Ray in the other files of this folder.
pytestmark = [pytest.mark.timeout(LONGEST + 60), pytest.mark.chaos]

Said = Callable[[str], dict[str, Any]]


@pytest.fixture(scope="module")
def _all_said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("ray")
    command = [sys.executable, str(Path(__file__).parents[1] / "ray_job.py"), str(folder), "deaths"]
    with (
        open(folder / "said", "w") as out,
        open(folder / "errors", "w") as errors,
        subprocess.Popen(command, stdout=out, stderr=errors) as running,
    ):
        try:
            running.wait(LONGEST)
        except subprocess.TimeoutExpired:
            pass  # what it has said until then is looked at all the same
        finally:
            end(running)
    lines = map(json.loads, (folder / "said").read_text().splitlines())
    said = {line.pop("claim"): line for line in lines}
    said["errors"] = {"text": (folder / "errors").read_text()[-3000:]}
    if "start" not in said:
        require_ray()
    else:
        skip_where_ray_was_late(said["start"].get("raised", ""))
    return said


@pytest.fixture
def said(_all_said: dict[str, dict[str, Any]]) -> Said:
    """What came of a claim."""

    def of(claim: str) -> dict[str, Any]:
        assert claim in _all_said, f"the program has ended before:\n{_all_said['errors']['text']}"
        raised = _all_said[claim].get("raised", "")
        skip_where_ray_was_late(raised)
        assert not raised, raised
        return _all_said[claim]

    return of


def right(ranks: Iterable[dict[str, Any]], *, quiet: bool = True) -> None:
    """Fail unless all these parts of epochs were what an uncached loader gives, and without a warning."""
    for rank in ranks:
        assert rank["wrong"] == []
        assert rank["all"], "batches are missing"
        if quiet:
            assert rank["told"] == []


# ---- three machines ----------------------------------------------------------------------------------


def test_one_machine_makes_the_plan_for_all(said: Said) -> None:
    start = said("start")
    assert start["cache"] == [{"told": [], "error": None}] * 3
    assert 0 < start["reads"] <= PROBE


def test_a_cold_cluster_reads_each_sample_once(said: Said) -> None:
    first = said("share")["first"]
    right(first["ranks"])
    assert N <= first["reads"] <= 1.02 * N
    assert sum(said("share")["held"]) == N
    assert said("share")["damage"] == [[], [], []]


@pytest.mark.parametrize("workers", [0, 2])
def test_later_epochs_are_the_same_bits_without_the_source(said: Said, workers: int) -> None:
    """With a random transform behind the cache, whose draws must be those of an uncached loader."""
    epoch = said("share")["later"][workers // 2]
    right(epoch["ranks"])
    assert epoch["reads"] == 0
    # Two thirds of each rank's part belong to other machines.
    assert all(N / 3 * 0.5 < rank["peer_hits"] < N / 3 * 0.8 for rank in epoch["ranks"])


def test_no_machine_has_room_for_all(said: Said) -> None:
    """Else the tests above would show nothing of sharing."""
    status = said("end_session")["status"]
    assert all(machine["stored"] <= machine["capacity"] for machine in status)
    assert sum(machine["stored"] for machine in status) > 2.5 * status[0]["capacity"]


def test_status_names_each_machine_and_what_it_holds(said: Said) -> None:
    status = said("end_session")["status"]
    assert len({machine["name"] for machine in status}) == 3
    assert len({machine["pid"] for machine in status}) == 3
    assert {machine["patience"] for machine in status} == {PATIENCE}, "or all depends on how fast this is"
    assert sorted(machine["cached"] for machine in status) == sorted(said("share")["held"])
    assert all(machine["served"]["records"] > 0 for machine in status)


def test_stop_frees_the_memory_of_all_machines_and_leaves_no_actor(said: Said) -> None:
    """While ranks have the cache still mapped; they go on with the source."""
    end = said("end_session")
    assert end["actors"] == []
    assert all(taken > N / 3 * 3000 * 0.8 for taken in end["before"])
    assert end["after"] == [0, 0, 0]
    assert end["freed"] > N * 3000
    assert "no machine of this Ray cluster shares a session 'small'" in end["status after"]
    right((rank for epoch in end["epoch"] for rank in epoch["ranks"]), quiet=False)


# ---- several jobs ------------------------------------------------------------------------------------


def test_two_jobs_with_different_data_under_one_name_get_their_own(said: Said) -> None:
    jobs = said("two_jobs")
    cold, warm = jobs["epochs"]
    assert [cached["error"] for cached in jobs["cache"]] == [None, None]
    right(cold["ranks"])
    right(warm["ranks"])
    assert all(N <= log["reads"] <= 1.02 * N for log in cold["reads"])
    assert [log["reads"] for log in warm["reads"]] == [0, 0]
    assert all(rank["peer_hits"] > 0 for rank in warm["ranks"])


def test_a_second_job_with_the_same_data_reads_a_few_samples_to_compare(said: Said) -> None:
    """As a job that joins a session does."""
    job = said("second_job")
    assert job["cache"] == {"told": [], "error": None}
    right([job["epoch"]])
    assert job["reads"] <= COMPARED
    assert job["epoch"]["peer_hits"] > N / 2
    assert job["where"][0] == job["where"][1]


def test_a_rank_needs_no_ray_once_it_has_the_cache(said: Said) -> None:
    """Nor do its loader's workers."""
    right([said("without_ray")["epoch"]])
    assert said("without_ray")["reads"] == 0
    assert said("without_ray")["epoch"]["peer_hits"] > N / 2


def test_a_task_can_use_the_cache(said: Said) -> None:
    task = said("task")
    assert task["cache"] == {"told": [], "error": None}
    right([task["epoch"]])
    assert task["reads"] <= COMPARED
    assert task["epoch"]["peer_hits"] > N / 2


# ---- deaths ------------------------------------------------------------------------------------------


def test_a_killed_node_actor_comes_back_as_the_same_machine(said: Said) -> None:
    before, after = said("kill_node_actor")["before"], said("kill_node_actor")["after"]
    assert before["pid"] != after["pid"]
    for same in ("name", "key", "host", "capacity", "cached"):
        assert before[same] == after[same]


def test_what_a_killed_node_actor_had_is_served_still(said: Said) -> None:
    (epoch,) = said("kill_node_actor")["epochs"]
    assert epoch["reads"] == 0
    right(epoch["ranks"], quiet=False)  # connections were lost, and that may be told
    assert all(len(rank["told"]) <= 1 for rank in epoch["ranks"])
    assert all(rank["peer_hits"] > N / 3 * 0.5 for rank in epoch["ranks"])


def test_nobody_leaves_while_the_directory_is_away(said: Said) -> None:
    killed = said("kill_directory")
    assert len(killed["before"]) == len(killed["after"]) == 1
    assert killed["before"] != killed["after"]
    assert killed["fewest"] == 3
    assert killed["status"] == 3
    (epoch,) = killed["epochs"]
    right(epoch["ranks"])
    assert epoch["reads"] == 0


def test_a_machine_dies_in_mid_epoch_and_no_rank_fails(said: Said) -> None:
    """All that ranks are told of it is one sentence each."""
    midst = said("lose_machine")["midst"]
    assert len(midst) == 2
    right(midst, quiet=False)
    assert all(len(rank["told"]) <= 1 for rank in midst)


def test_what_a_dead_machine_held_is_read_once_and_held_by_the_others(said: Said) -> None:
    lost = said("lose_machine")
    assert lost["noticed"] >= 0
    again, after = lost["again"], lost["after"]
    assert lost["held"][2] <= again["reads"] <= 1.02 * lost["held"][2]
    right(again["ranks"])
    right(after["ranks"])
    assert after["reads"] == 0


def test_a_machine_that_joins_is_filled_by_its_neighbours(said: Said) -> None:
    gained = said("gain_machine")
    assert gained["cache"] == {"told": [], "error": None}
    assert gained["probe"]["reads"] == 0
    assert gained["known"] >= 0
    for epoch in gained["epochs"]:
        right(epoch["ranks"])
    assert [epoch["reads"] for epoch in gained["epochs"]] == [0, 0, 0]


def test_a_machine_that_joins_serves_its_share(said: Said) -> None:
    gained = said("gain_machine")
    assert gained["held"][2] > 0.8 * N / 3
    assert gained["served"]["records"] > 0.05 * N  # the others still have some of it themselves


def test_training_goes_on_when_the_cluster_ends(said: Said) -> None:
    """In a process that is none of Ray's: Ray ends those that look for a cluster in vain, after a minute."""
    ended = said("end_cluster")
    assert ended["cache"] == {"told": [], "error": None}
    right(ended["epochs"], quiet=False)
    assert ended["held"] > 0
    told = [sentence for epoch in ended["epochs"] for sentence in epoch["told"]]
    assert len(told) <= 2, told


# ---- what cannot be ----------------------------------------------------------------------------------


def test_no_cluster_at_an_address_is_said_at_once(said: Said) -> None:
    found = said("no_cluster")
    assert found["kind"] == "ClusterError"
    assert is_a_sentence(found["error"])
    assert "127.0.0.1:" in found["error"]
    assert "ray start" in found["error"]


def test_a_client_of_ray_is_not_a_machine_of_it() -> None:
    found = failure(lambda: hotset.cache(Samples(number), cluster="ray://10.0.0.1:10001", session="none"))
    assert found.kind is hotset.ClusterError
    assert "Ray Client" in found.text
    assert is_a_sentence(found.text)


@pytest.mark.parametrize(
    "ask", [joining.status, joining.stop, lambda where, session: joining.join(where, session, None)]
)
def test_ray_that_is_not_installed_is_a_sentence(ask: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    found = failure(lambda: ask("auto", "none"))
    assert found.kind is hotset.ClusterError
    assert "pip install 'hotset[ray]'" in found.text
    assert is_a_sentence(found.text)


def test_a_cache_over_a_cluster_without_ray_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    found = failure(lambda: hotset.cache(Samples(number), cluster="auto", session="none"))
    assert found.kind is hotset.ClusterError
    assert "not installed" in found.text


def test_a_session_that_is_made_anew_is_waited_for(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joining, "_ANEW_SECONDS", 600.0)
    numbers = with_a_node(monkeypatch)
    gone = sessions.create("one", memory=1 << 20)
    sessions.destroy(gone)
    there = sessions.create("one", memory=1 << 20)
    numbers += [there.number, gone.number, gone.number]
    assert joining.join("auto", "one", None).here() == there


def test_a_session_that_is_not_there_is_named_as_the_user_did(
    runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(joining, "_ANEW_SECONDS", 0.3)
    with_a_node(monkeypatch).append(4711)
    found = failure(lambda: hotset.cache(Samples(number), cluster="auto", session="one"))
    assert found.kind is hotset.SessionError
    assert "session 'one'" in found.text
    assert "4711" not in found.text
    assert is_a_sentence(found.text)


def test_a_machine_that_does_not_say_that_it_is_freed_is_named_and_ended_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    killed: list[str] = []
    answers: dict[str, Any] = {
        "hotset-one:aa": 100,
        "hotset-one:bb": TimeoutError(),
        "hotset-one:cc": OSError(),  # of a machine that is gone
        "hotset-one:dd": OSError(),  # of one whose process is dead
    }

    def get(answer: Any, timeout: float) -> Any:
        if isinstance(answer, Exception):
            raise answer
        return answer

    def actor(name: str, namespace: str) -> Any:
        return types.SimpleNamespace(
            name=name, destroy=types.SimpleNamespace(remote=lambda: answers.get(name))
        )

    names = [*answers, "hotset-one-more", "hotset-one-more:aa", "hotset-other:aa"]  # of three sessions
    there = [{"name": name, "namespace": joining.NAMESPACE} for name in names]
    fake = types.SimpleNamespace(
        util=types.SimpleNamespace(list_named_actors=lambda all_namespaces: there),
        nodes=lambda: [{"NodeID": name, "Alive": name != "cc"} for name in ("aa", "bb", "cc", "dd")],
        get_actor=actor,
        get=get,
        kill=lambda actor: killed.append(actor.name),
    )
    monkeypatch.setattr(joining, "_connect", lambda address: fake)
    found = failure(lambda: joining.stop("auto", "one"))
    assert found.kind is hotset.ClusterError
    assert "(Ray's nodes bb, dd)" in found.text
    assert "hotset session destroy one" in found.text
    assert is_a_sentence(found.text)
    assert sorted(killed) == ["hotset-one", *(f"hotset-one:{name}" for name in ("aa", "bb", "cc", "dd"))]
    answers.update({"hotset-one:bb": 11, "hotset-one:dd": 5})
    assert joining.stop("auto", "one") == 116
    assert joining.sessions("auto") == ["one-more"]


def with_a_node(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Stands for a Ray cluster whose node says numbers from the end on; the first remains."""
    numbers: list[int] = []

    def answering(answer: Callable[[], Any]) -> Any:
        return types.SimpleNamespace(remote=lambda *_: answer)

    node = answering(lambda: numbers.pop() if len(numbers) > 1 else numbers[0])
    directory = types.SimpleNamespace(why=answering(lambda: ""))
    context = types.SimpleNamespace(get_node_id=lambda: "here")
    fake = types.SimpleNamespace(
        is_initialized=lambda: True,
        remote=lambda actor: types.SimpleNamespace(
            options=lambda **_: types.SimpleNamespace(remote=lambda *_: directory)
        ),
        get_runtime_context=lambda: context,
        get_actor=lambda name, namespace: types.SimpleNamespace(session_number=node),
        get=lambda call, timeout: call(),
    )
    monkeypatch.setitem(sys.modules, "ray", fake)  # type: ignore[arg-type]
    return numbers
