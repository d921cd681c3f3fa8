"""Shares of memory: ``"50%"`` is allowed wherever an amount is, and of which amount it is a share."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import is_a_sentence
from server_process import environment_in, run
from torch.utils.data import TensorDataset

import hotset
from hotset.errors import HotsetError
from hotset.session import sessions
from hotset.store import memory_limits as memory

GIB = 1 << 30
FREE = memory.Headroom(3 * GIB, 8 * GIB, "the machine's memory")
DATA = TensorDataset(torch.arange(1000.0).repeat(100, 1))  # 4,000 bytes a sample, and a few more


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that always has the same free memory, so that shares of it can be compared."""
    monkeypatch.setattr(memory, "headroom", lambda: FREE)


def limit(**how: Any) -> int:
    with hotset.cache(DATA, **how) as cached:
        return cached.plan.limit


def test_auto_is_half_of_the_free_memory() -> None:
    assert limit(memory="50%") == limit() == FREE.bytes // 2
    assert limit(memory="12.5 %") == FREE.bytes // 8
    assert limit(memory="100%") == FREE.bytes


def test_in_a_session_a_percentage_is_of_the_sessions_memory(runtime: Path) -> None:
    sessions.create("a", memory=100_000)
    with hotset.cache(DATA, session="a", memory="25%") as cached:
        assert cached.plan.limit == 25_000
        with pytest.warns(hotset.HotsetWarning, match="no more fit"):
            for _ in hotset.DataLoader(cached, batch_size=10):
                pass
        assert 3 <= cached.stats().cached <= 6


def test_a_windows_percentage_is_an_amount_of_memory() -> None:
    def residents(resident: str) -> int:
        with hotset.cache(DATA, window=hotset.Window(resident, 0)) as cached:
            assert cached.plan.window is not None
            return cached.plan.window.resident

    some = residents("100KB")  # of 400 and a little more
    assert 0 < some < 100
    assert abs(residents(f"{100 * 100_000 / FREE.bytes:.9f}%") - some) <= 1


def test_a_device_queue_takes_a_percentage() -> None:
    with hotset.cache(DATA, memory="1MiB") as cached:
        loader = hotset.DataLoader(cached, batch_size=10)
        assert hotset.DeviceQueue(loader, device="cpu", resident="50%").resident is not None


def test_a_sessions_percentage_is_of_the_machines_memory(tmp_path: Path) -> None:
    """The real machine's, in separate processes: exactly half of it."""
    environment = environment_in(tmp_path)
    for share, name in (("20%", "a"), ("10%", "b")):
        done = run("session", "create", name, "--memory", share, environment=environment)
        assert done.returncode == 0, done.stderr
    listed = run("session", "list", "--json", environment=environment).stdout
    first, second = (session["memory"]["limit"] for session in json.loads(listed))
    assert abs(first - 2 * second) <= 1
    assert second > 1 << 20
    done = run("session", "resize", "a", "--memory", "10%", environment=environment)
    assert done.returncode == 0, done.stderr
    resized = json.loads(run("session", "show", "a", "--json", environment=environment).stdout)
    assert resized["memory"]["limit"] == second


@pytest.mark.parametrize("share", ["0%", "101%", "-1%", "%", "fifty%", "1e1%", "50%%"])
@pytest.mark.parametrize(
    "give",
    [
        lambda share: hotset.cache(DATA, memory=share),
        lambda share: hotset.Window(share),
        lambda share: hotset.DeviceQueue([], device="cpu", resident=share),
    ],
)
def test_a_wrong_percentage_is_refused_with_a_sentence(give: Callable[[str], Any], share: str) -> None:
    with pytest.raises(HotsetError) as caught:
        give(share)
    assert is_a_sentence(str(caught.value))
    assert share.rstrip("%") in str(caught.value)


def test_the_command_refuses_a_wrong_percentage_too(tmp_path: Path) -> None:
    done = run("session", "create", "a", "--memory", "150%", environment=environment_in(tmp_path))
    assert done.returncode == 2
    assert is_a_sentence(done.stderr.strip())
