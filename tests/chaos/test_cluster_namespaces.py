"""A session over three machines with a network each: doors, firewalls, slow cables, and one that is pulled.

The machines are namespaces of the kernel's, which ``namespaces`` makes, with Ray on each of them and one rank
each, outside of Ray, as under torchrun. What happens to them is a program of its own, once for all tests, and
ends with it; each test looks at what came of one claim.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ray_here import require_ray

pytest.importorskip("ray", reason="Ray, over whose clusters sessions are shared, is not installed")
pytest.importorskip("zmq", reason="pyzmq, which carries records between machines, is not installed")

import namespaces

N = 3000
LONGEST = 600.0  # seconds; a tenth of it where nothing else runs
STEP = 20.0  # seconds, in which a machine that does not answer is given up ten times

# It takes a minute, and root's rights: part of `make chaos`.
pytestmark = [pytest.mark.timeout(LONGEST + 60), pytest.mark.chaos]

Said = Callable[[str], dict[str, Any]]


@pytest.fixture(scope="module")
def _all_said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    folder, name = tmp_path_factory.mktemp("namespaces"), f"hs-net-{secrets.token_hex(3)}"
    program = str(Path(__file__).parents[1] / "namespaces.py")
    try:
        with (
            open(folder / "said", "w") as out,
            open(folder / "errors", "w") as errors,
            subprocess.Popen(
                [sys.executable, program, "play", str(folder), name], stdout=out, stderr=errors
            ) as running,
        ):
            try:
                running.wait(LONGEST)
            except subprocess.TimeoutExpired:
                pass  # what it has said until then is looked at all the same
            finally:
                running.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    running.wait(20)
                running.kill()
        lines = map(json.loads, (folder / "said").read_text().splitlines())
        said = {line.pop("claim"): line for line in lines}
        said["errors"] = {"text": (folder / "errors").read_text()[-3000:]}
        if "cannot" in said.get("network", {}):
            pytest.skip(f"no networks can be made here: {said['network']['cannot']}")
        if "ray" not in said:
            require_ray()
        said["end"] = {"remains": namespaces.remains(name)}
        return said
    finally:
        namespaces.remove(name)


@pytest.fixture
def said(_all_said: dict[str, dict[str, Any]]) -> Said:
    """What came of a claim."""

    def of(claim: str) -> dict[str, Any]:
        assert claim in _all_said, f"the program has ended before:\n{_all_said['errors']['text']}"
        assert "raised" not in _all_said[claim], _all_said[claim]["raised"]
        if "cannot" in _all_said[claim]:
            pytest.skip(_all_said[claim]["cannot"])
        return _all_said[claim]

    return of


def right(epoch: dict[str, Any]) -> None:
    """Fail unless all ranks got what an uncached loader gives."""
    assert [rank["wrong"] for rank in epoch["ranks"]] == [[], [], []]


def quiet(epoch: dict[str, Any]) -> None:
    """Fail if a rank was warned of anything."""
    assert [rank["told"] for rank in epoch["ranks"]] == [[], [], []]


def soon(epoch: dict[str, Any]) -> None:
    """Fail if a step was held up as by who is waited for again and again."""
    assert max(rank["longest"] for rank in epoch["ranks"]) < STEP


def shared(session: dict[str, Any]) -> None:
    """Fail unless the first epoch read each sample once, and later ones got two thirds from the others."""
    assert session["cache"] == [{"told": [], "error": None}] * 3
    for epoch in session["epochs"]:
        right(epoch)
        quiet(epoch)
    cold, *later = session["epochs"]
    assert N <= cold["reads"] <= 1.02 * N
    for epoch in later:
        assert epoch["reads"] == 0
        assert all(N / 3 * 0.5 < rank["peer_hits"] < N / 3 * 0.8 for rank in epoch["ranks"])


# ---- doors -------------------------------------------------------------------------------------------


def test_samples_pass_between_networks(said: Said) -> None:
    opened = said("opened")
    shared(opened)
    for known in opened["endpoints"]:
        assert [end.rpartition(":")[0] for end in known] == [f"tcp://10.77.0.{i}" for i in (1, 2, 3)]


def test_the_port_opens_at_the_address_of_the_cluster_alone(said: Said) -> None:
    doors = said("doors")
    del doors["at"]
    assert doors == {
        "a machine": True,
        "itself, by loopback": False,
        "itself, by loopback, to Ray": True,
        "a stranger": False,
        "a stranger, to Ray": True,
        "who has no way there": False,
    }


def test_samples_come_from_the_source_where_a_firewall_closes_the_port(said: Said) -> None:
    """Of machines 1 and 2, which still reach machine 0."""
    closed = said("closed")
    assert closed["cache"] == [{"told": [], "error": None}] * 3
    for epoch in closed["epochs"]:
        right(epoch)
        soon(epoch)
    first, *later = closed["epochs"]
    for number, unreachable in enumerate((2, 1, 1)):
        told = first["ranks"][number]["told"]
        assert len(told) == unreachable, "once for each machine"
        assert all("samples come from the source" in sentence for sentence in told)
    for epoch in later:
        quiet(epoch)
        assert epoch["reads"] > 0
        assert [rank["peer_hits"] > 0 for rank in epoch["ranks"]] == [False, True, True]
    assert closed["freed"] > 0


# ---- slow cables -------------------------------------------------------------------------------------


def test_a_narrow_cable_is_slow_and_no_more(said: Said) -> None:
    narrow = said("narrow")
    right(narrow)
    quiet(narrow)
    soon(narrow)
    assert narrow["reads"] == 0
    # Two thirds of machine 2's part have come through it.
    assert narrow["ranks"][2]["seconds"] > narrow["ranks"][2]["peer_hits"] * 3072 * 8 / 20e6 * 0.9


def test_a_machine_that_is_far_away_is_slow_and_no_more(said: Said) -> None:
    far = said("far")
    right(far)
    quiet(far)
    soon(far)
    assert far["reads"] == 0
    # There and back, for each two of 32 steps: the next one's samples are asked for with this one's.
    assert all(rank["seconds"] > 32 / 2 * 0.04 * 0.9 for rank in far["ranks"])


# ---- a cable that is pulled --------------------------------------------------------------------------


def test_a_cable_pulled_in_mid_epoch_fails_no_rank(said: Said) -> None:
    """Of each machine that a rank does not reach any more it is told once."""
    epochs = said("unplugged")["epochs"]
    for epoch in epochs:
        right(epoch)
        soon(epoch)
    for rank in range(3):
        told = [sentence for epoch in epochs for sentence in epoch["ranks"][rank]["told"]]
        assert len(told) == (2 if rank == said("unplugged")["cut"] else 1)
        assert all("Its samples come from the source meanwhile" in sentence for sentence in told)


def test_both_sides_of_a_pulled_cable_go_on_from_memory_and_the_source(said: Said) -> None:
    """The two machines that have each other give the third one up; it keeps what it has, and waits."""
    unplugged = said("unplugged")
    for number, rank in enumerate(unplugged["epochs"][-1]["ranks"]):
        if number == unplugged["cut"]:
            assert unplugged["known"][number] == 3
            assert rank["peer_hits"] == 0
            assert N / 3 * 0.5 < rank["misses"] < N / 3 * 0.8
        else:
            assert unplugged["known"][number] == 2
            assert rank["peer_hits"] > N / 3 * 0.2


def test_a_cable_plugged_in_again_makes_it_as_it_was(said: Said) -> None:
    plugged = said("plugged")
    for epoch in plugged["epochs"]:
        right(epoch)
        soon(epoch)
    assert plugged["known"] == [3, 3, 3]
    assert plugged["epochs"][-1]["reads"] == 0
    for number, came in enumerate(plugged["received"]):
        others = {f"machine{other}" for other in range(3)} - {f"machine{number}"}
        assert set(came) == others
        assert all(count > 0 for count in came.values())


def test_nothing_is_left_of_the_networks(said: Said) -> None:
    assert said("end")["remains"] == []
