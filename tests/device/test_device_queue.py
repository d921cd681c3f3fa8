"""The device queue hands over what its loader gives: its batches, draws and errors, in the same order."""

from __future__ import annotations

import collections
import gc
import itertools
import os
import queue as queues
import signal
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from helpers import (
    difference,
    equal_batches,
    eventually,
    failure,
    in_threads,
    interrupted_everywhere,
    is_a_sentence,
    recorded,
    rng_states,
    seed_everything,
)
from kills import child, ended
from live import draw_all
from samples import Loose, Pair, Record, image_and_label, mapping, named, nested
from sources import PlainError, Raising, Samples, Streamed
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import DataLoader, default_collate

import hotset
from hotset._warnings import warn
from hotset.device.prefetch_thread import PrefetchThread
from hotset.device.queue import DeviceQueue
from hotset.device.stall_monitor import StallMonitor
from hotset.device.transfer import HostTransfer
from hotset.errors import ArgumentError, HotsetWarning, QuantityError, StateError

N = 22
on_cpu: Any = {"device": "cpu"}


class AheadLane(HostTransfer):
    """A lane worth sending ahead, as a GPU's is."""

    ahead = True

    def __init__(self, device: torch.device, depth: int) -> None:
        super().__init__(device)


@pytest.fixture
def ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Queues send ahead."""
    monkeypatch.setattr("hotset.device.queue.transfer_to", AheadLane)


class Clock:
    """A watch's time, which stands still until it is moved."""

    now = 0.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    clocks = SimpleNamespace(monotonic=lambda: found.now, perf_counter=time.perf_counter)
    monkeypatch.setattr("hotset.device.stall_monitor.time", clocks)
    return found


def ours() -> set[str]:
    """Names of the library's threads."""
    return {thread.name for thread in threading.enumerate() if thread.name.startswith("hotset")}


def training(batches: Any) -> list[Any]:
    """A pass, with a step that draws as a model does; and the random states that it leaves."""
    seen: list[Any] = []
    for batch in batches:
        seen.append((batch, torch.rand(2)))
    return [*seen, rng_states()]


# ---- what a loader gives ------------------------------------------------------------------------------


def torchs(workers: int) -> Any:
    return DataLoader(
        Samples(mapping, N),
        4,
        shuffle=True,
        num_workers=workers,
        persistent_workers=workers > 0,
        multiprocessing_context="fork" if workers else None,
    )


def same_training(make: Callable[[], Any], *, depth: int = 2) -> None:
    """Two passes and a broken one, beside a plain loop's."""
    seed_everything()
    loader = make()
    expected = [training(loader), training(loader)]
    next(iter(loader))
    expected.append(training(loader))
    del loader
    seed_everything()
    with DeviceQueue(make(), depth, **on_cpu) as queue:
        got = [training(queue), training(queue)]
        for _ in queue:
            break
        got.append(training(queue))
    equal_batches(got, expected)


@pytest.mark.parametrize("workers", [0, 2])
def test_torchs_loader(workers: int) -> None:
    same_training(lambda: torchs(workers))


@pytest.mark.parametrize("depth", [0, 1, 5])
@pytest.mark.parametrize("live", [False, True])
def test_the_caches_loader(live: bool, depth: int) -> None:
    """The first pass fills the cache, the others come from it; with a live part that draws too."""
    with (
        hotset.cache(Samples(image_and_label, N), transform=[draw_all] if live else None) as plain,
        hotset.cache(Samples(image_and_label, N), transform=[draw_all] if live else None) as cached,
    ):
        made = iter([plain, cached])
        same_training(lambda: hotset.DataLoader(next(made), batch_size=4, shuffle=True), depth=depth)


def test_an_iterable_data_set_with_workers() -> None:
    loader: Any = DataLoader(Streamed(N), 4, num_workers=2)
    with DeviceQueue(loader, **on_cpu) as queue:
        equal_batches(list(queue), list(loader))


class Generating:
    """An iterable with a beginning at each ``iter()``."""

    def __init__(self, make: Callable[[int], Any], n: int = 6) -> None:
        self.make = make
        self.n = n
        self.threads: set[str] = set()
        self.ended = 0

    def __iter__(self) -> Iterator[Any]:
        try:
            for i in range(self.n):
                self.threads.add(threading.current_thread().name)
                yield self.make(i)
        finally:
            self.ended += 1


@pytest.mark.parametrize("make", [nested, mapping, named, lambda i: [Pair(i, Loose(Record(i, "a"), {}))]])
@pytest.mark.parametrize("depth", [0, 1, 4])
def test_iterables_of_trees_are_read_ahead_in_a_thread(make: Callable[[int], Any], depth: int) -> None:
    loader = Generating(make)
    with DeviceQueue(loader, depth, **on_cpu) as queue:
        for _ in range(2):
            equal_batches(list(queue), [make(i) for i in range(6)])
        main = threading.current_thread().name
        assert loader.threads == ({"hotset-ahead"} if depth else {main})
        assert loader.ended == 2


def test_lists_and_what_can_be_read_once() -> None:
    batches = [torch.full((2,), i) for i in range(4)]
    with DeviceQueue(batches, **on_cpu) as queue:
        assert [len(queue), *(a is b for a, b in zip(queue, batches, strict=True))] == [4] + [True] * 4
    with DeviceQueue(iter(batches), **on_cpu) as queue:
        equal_batches([list(queue), list(queue)], [batches, []])
        with pytest.raises(TypeError):
            len(queue)


def test_at_most_depth_batches_are_read_before_they_are_wanted() -> None:
    read: list[int] = []

    def reading() -> Iterator[int]:
        for i in range(20):
            read.append(i)
            yield i

    with DeviceQueue(reading(), 3, **on_cpu) as queue:
        iterator = iter(queue)
        for wanted in range(1, 5):
            next(iterator)
            assert eventually(lambda: len(read) >= wanted + 3)  # noqa: B023
            time.sleep(0.02)
            assert len(read) <= wanted + 3


def test_the_first_step_waits_for_its_own_batch_alone(ahead: None) -> None:
    read: list[int] = []
    loader: Any = DataLoader(Samples(lambda i: read.append(i) or torch.tensor(i), 12), batch_size=None)
    with DeviceQueue(loader, 3, **on_cpu) as queue:
        for _ in range(2):
            counts = [len(read) for _ in queue]
            assert counts == [1, 3, 5, 7, 8, 9, 10, 11, 12, 12, 12, 12]
            read.clear()


def test_a_pass_begins_with_its_first_batch_and_does_not_reach_into_the_next() -> None:
    begun: list[str] = []

    class Loader:
        def __iter__(self) -> Iterator[int]:
            begun.append("pass")
            return iter([1, 2])

    with DeviceQueue(Loader(), 0, **on_cpu) as queue:
        iterator = iter(queue)
        assert begun == []
        assert [*iterator, len(begun)] == [1, 2, 1]
        with pytest.raises(StopIteration):
            next(iterator)
        assert len(begun) == 1


def test_sparse_batches_are_handed_over_too() -> None:
    sparse = torch.eye(3).to_sparse()
    with DeviceQueue([(sparse, torch.ones(2))], **on_cpu) as queue:
        assert next(iter(queue))[0] is sparse
        assert queue.stats()[:2] == (1, 8)


@pytest.mark.parametrize("depth", [0, 2])
def test_stats_count_over_all_passes(depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = {"x": torch.zeros(4, 3), "y": [torch.zeros(2, dtype=torch.uint8), "text"]}
    clock = 0.0
    waits = threading.Event()

    def now() -> float:
        before = clock
        waits.set()
        return before

    def slowly(index: int) -> Any:
        nonlocal clock
        assert waits.wait(60)
        clock += 0.25
        return batch

    monkeypatch.setattr("hotset.device.queue.time.perf_counter", now)
    queue: DeviceQueue[Any] = DeviceQueue(Generating(slowly, 1), depth, **on_cpu)
    assert queue.stats() == (0, 0, 0.0, 0)
    for passes in (1, 2, 3):
        waits.clear()
        for _ in queue:
            clock += 8.0  # a slow step waits for nothing
        assert queue.stats() == (passes, passes * 50, passes * 0.25, 0)
    queue.close()
    assert queue.stats().batches == 3


# ---- errors -------------------------------------------------------------------------------------------


def failing_at_two() -> Iterator[torch.Tensor]:
    for i in range(4):
        if i == 2:
            raise PlainError("two")
        yield torch.tensor(i)


def story(batches: Any) -> list[Any]:
    """All that comes of a pass, with errors in place of batches: type, text and the innermost frame."""
    seen: list[Any] = []
    iterator = iter(batches)
    while True:
        try:
            seen.append(next(iterator))
        except StopIteration:
            return seen
        except Exception as error:
            frames = traceback.extract_tb(error.__traceback__)
            seen.append((type(error).__name__, str(error).splitlines()[-1], frames[-1].name))
            traceback.clear_frames(error.__traceback__)


@pytest.mark.parametrize("sends", [False, True])
@pytest.mark.parametrize("depth", [0, 1, 3])
def test_an_iterables_error_comes_at_its_turn(
    depth: int, sends: bool, request: pytest.FixtureRequest
) -> None:
    if sends:
        request.getfixturevalue("ahead")
    with DeviceQueue(failing_at_two(), depth, **on_cpu) as queue:
        expected = [torch.tensor(0), torch.tensor(1), ("PlainError", "two", "failing_at_two")]
        equal_batches(story(queue), expected)


@pytest.mark.parametrize("sends", [False, True])
@pytest.mark.parametrize(("kind", "workers"), [(DataLoader, 0), (DataLoader, 2), (hotset.DataLoader, 0)])
def test_a_loaders_error_comes_at_its_turn_and_other_batches_after_it(
    kind: Any, workers: int, sends: bool, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if sends:
        request.getfixturevalue("ahead")
    source = Raising(image_and_label, N, 9, tmp_path / "armed")
    source.arm()
    expected = story(DataLoader(source, 4, num_workers=workers))
    assert [type(one) for one in expected] == [list, list, tuple, list, list, list]
    with DeviceQueue(kind(source, 4, num_workers=workers), **on_cpu) as queue:
        equal_batches(story(queue), expected)


@pytest.mark.parametrize("depth", [0, 2])
def test_what_iter_raises_is_raised_with_the_first_batch(depth: int) -> None:
    class Broken:
        def __iter__(self) -> Iterator[Any]:
            raise PlainError("no beginning")

    with DeviceQueue(Broken(), depth, **on_cpu) as queue:
        for _ in range(2):
            found = failure(lambda: next(iter(queue)))
            assert (found.kind, found.frames[-1]) == (PlainError, "__iter__")


@pytest.mark.parametrize("loader", [[0, 1], DataLoader(Samples(int, 2), None)], ids=["thread", "loader"])
@pytest.mark.parametrize("raising", [False, True])
def test_what_ends_a_pass_holds_nothing(raising: bool, loader: Any, ahead: None) -> None:
    """Else workers and threads would live until the garbage collector comes."""
    gc.disable()
    try:
        given = failing_at_two() if raising else loader
        queue: Any = DeviceQueue(given, 2, **on_cpu)
        iterator = iter(queue)
        ended = False
        try:
            for _ in range(3):
                next(iterator)
        except (PlainError, StopIteration):
            ended = True
        assert ended
        alive = weakref.ref(iterator)
        del queue, iterator
        assert alive() is None
        assert eventually(lambda: not ours()), ours()
    finally:
        gc.enable()


# ---- the end ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("end", "sends"),
    [("drop", True), ("drop", False), ("close with the iterator kept", True), ("with", False)],
)
def test_workers_and_threads_end_with_the_queue(
    sends: bool, end: str, request: pytest.FixtureRequest
) -> None:
    if sends:
        request.getfixturevalue("ahead")
    servants = set(psutil.Process().children())
    gc.collect()
    gc.disable()
    try:
        for loader in (DataLoader(Samples(image_and_label, 60), 2, num_workers=2), Generating(torch.tensor)):
            queue: Any = DeviceQueue(loader, **on_cpu)
            iterator = iter(queue)
            next(iterator)
            if end.startswith("close"):
                queue.close()
            elif end == "with":
                with queue:
                    pass
            if "kept" not in end:
                del iterator, queue
            del loader
            assert eventually(lambda: set(psutil.Process().children()) <= servants)
            assert eventually(lambda: not ours()), ours()
    finally:
        gc.enable()


def test_a_generator_is_ended_where_it_stands_when_nobody_reads_on() -> None:
    loader = Generating(torch.tensor)
    queue: Any = DeviceQueue(loader, 1, **on_cpu)
    for _ in queue:
        break
    held = queue._pass._source  # as the traceback of an interrupt holds it
    queue.close()
    assert eventually(lambda: loader.ended == 1)
    del held


def test_a_pass_that_was_interrupted_gives_way_until_it_goes_on() -> None:
    """In a notebook the traceback of Ctrl-C holds the pass, and nobody can close its queue any more."""
    stops: list[BaseException] = []

    def number(index: int) -> int:
        if index == 2 and stops:
            raise stops.pop()
        return index

    loader = DataLoader(Samples(number, 8), 2)
    for goes_on in (False, True):
        queue: Any = DeviceQueue(loader, **on_cpu)
        interrupted = iter(queue)
        stops.append(KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt) as held:
            list(interrupted)
        if goes_on:
            next(interrupted)
            with pytest.raises(ArgumentError, match="is being read by another"):
                next(iter(DeviceQueue(loader, **on_cpu)))
            queue.close()
        queue = DeviceQueue(loader, **on_cpu)
        assert [batch.tolist() for batch in queue] == [[0, 1], [2, 3], [4, 5], [6, 7]]
        with pytest.raises(ArgumentError, match="this pass was ended"):
            next(interrupted)
        del held


def test_of_two_passes_whose_queues_nobody_keeps_one_reads() -> None:
    numbers = (torch.tensor(number) for number in range(6))
    first, second = (iter(DeviceQueue(numbers, 0, **on_cpu)) for _ in range(2))
    assert int(next(first)) == 0
    with pytest.raises(ArgumentError, match="is being read by another"):
        next(second)
    assert int(next(first)) == 1


class StuckAtFour:
    """Gives numbers, and is inside number four for longer than anybody waits."""

    def __init__(self, reached: Path) -> None:
        self.reached = reached

    def __call__(self, index: int) -> int:
        if index >= 4:
            self.reached.touch()
            time.sleep(600)
        return index


@pytest.mark.parametrize("workers", [None, 2])
def test_ctrl_c_comes_out_at_once_and_leaves_nothing(workers: int | None, tmp_path: Path) -> None:
    """A real one, to the whole group of processes, as a terminal sends it."""
    came, stuck = tmp_path / "a batch came", tmp_path / "none comes"

    def train() -> None:
        os.setsid()
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
        loader: Any = map(StuckAtFour(stuck), range(9))
        if workers is not None:
            loader = DataLoader(Samples(StuckAtFour(stuck), 40), 2, num_workers=workers)
        queue = DeviceQueue(loader, **on_cpu)
        with pytest.raises(KeyboardInterrupt):
            collections.deque((came.touch() for _ in queue), 0)
        queue.close()
        del loader
        assert eventually(lambda: not psutil.Process().children())
        kept = {"hotset-ahead"} if workers is None else set()  # it is in the midst of the user's code
        assert eventually(lambda: {t.name for t in threading.enumerate()} == {"MainThread"} | kept)

    pid = child(train)
    assert eventually(lambda: came.exists() and stuck.exists())
    group = psutil.Process(pid).children()
    assert len(group) == (workers or 0)
    os.killpg(pid, signal.SIGINT)
    assert ended(pid) == 0
    assert eventually(lambda: not any(one.is_running() for one in group))


# ---- one pass at a time -------------------------------------------------------------------------------


def test_two_queues_do_not_share_a_loader() -> None:
    loader = DataLoader(Samples(image_and_label, N), 4)
    first, second = DeviceQueue(loader, **on_cpu), DeviceQueue(loader, **on_cpu)
    iterator = iter(first)
    next(iterator)
    with pytest.raises(ArgumentError) as found:
        next(iter(second))
    assert is_a_sentence(str(found.value))
    first.close()
    assert len(list(second)) == 6
    assert len(list(first)) == 6, "the second one's pass is over"
    held = iter(second)
    next(held)
    del second
    with pytest.raises(ArgumentError):
        next(iter(first))
    del held
    assert len(list(first)) == 6, "who was dropped reads no more"


def test_lists_are_read_by_many() -> None:
    batches = [torch.ones(1)] * 3
    with DeviceQueue(batches, **on_cpu) as first, DeviceQueue(batches, **on_cpu) as second:
        assert len(list(zip(first, second, strict=True))) == 3


@pytest.mark.parametrize("end", ["iter", "close"])
def test_a_pass_that_was_ended_says_so(end: str) -> None:
    with DeviceQueue(DataLoader(Samples(image_and_label, N), 4), **on_cpu) as queue:
        first = iter(queue)
        next(first)
        second = iter(queue) if end == "iter" else queue.close()
        with pytest.raises(ArgumentError) as found:
            next(first)
        assert is_a_sentence(str(found.value))
        assert len(list(second if second is not None else queue)) == 6


# ---- stalls -------------------------------------------------------------------------------------------


class StalledAtTwo:
    """Gives numbers, and is inside number two until it is let go."""

    def __init__(self, go: Path) -> None:
        self.go = go

    def __call__(self, index: int) -> torch.Tensor:
        assert index != 2 or eventually(self.go.exists)
        return torch.tensor(index)


@pytest.mark.parametrize("kind", ["generator", "workers", "ahead"])
def test_a_stall_is_said_and_the_pass_goes_on(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind == "ahead":
        request.getfixturevalue("ahead")
    go, said = tmp_path / "go", []

    def let_go(sentence: str) -> None:
        warn(sentence)
        took = sentence.partition("took ")[2].partition(" s.")[0]
        if took.count(",") == 1:  # two fetches were made: earlier ones may stall too, on a slow machine
            said.append(sentence)
            go.touch()

    monkeypatch.setattr("hotset.device.stall_monitor.warn", let_go)
    loader: Any = map(StalledAtTwo(go), range(3))
    if kind == "workers":
        loader = DataLoader(Samples(StalledAtTwo(go), 3), None, num_workers=1)
    with DeviceQueue(loader, timeout=0.2, **on_cpu) as queue, pytest.warns(HotsetWarning):
        assert [int(batch) for batch in queue] == [0, 1, 2]
    text = said[0]
    assert is_a_sentence(text)
    assert "timeout=0.2" in text
    assert ("Raise num_workers=1" if kind == "workers" else "Make it faster") in text
    assert ("1 of depth=2 batches are left" if kind == "ahead" else "nothing is left") in text


@pytest.mark.parametrize("timeout", [0.04, float("inf"), 1e300])
def test_nothing_is_said_if_batches_come_in_time(timeout: float, clock: Clock) -> None:
    with recorded() as told:
        with DeviceQueue(map(torch.tensor, range(3)), 0, timeout=timeout, **on_cpu) as queue:
            for _ in queue:
                clock.now += 1000.0  # a slow step starves nobody
                time.sleep(0.05)  # for a watch that would say so
        assert eventually(lambda: not ours())
    assert [str(one.message) for one in told] == []


# ---- arguments ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "kind"),
    [
        ({"depth": -1}, ArgumentError),
        ({"depth": True}, ArgumentError),
        ({"depth": "2"}, ArgumentError),
        ({"depth": 1.0}, ArgumentError),
        ({"timeout": 0}, ArgumentError),
        ({"timeout": -1}, ArgumentError),
        ({"timeout": True}, ArgumentError),
        ({"timeout": "60"}, ArgumentError),
        ({"timeout": float("nan")}, ArgumentError),
        ({"resident": "0"}, ArgumentError),
        ({"resident": 0}, ArgumentError),
        ({"resident": "abc"}, QuantityError),
        ({"resident": -1}, QuantityError),
        ({"device": "cuda"}, ArgumentError),
        ({"device": "cuda:0"}, ArgumentError),
        ({"device": "hpu"}, ArgumentError),
        ({"device": "elsewhere"}, ArgumentError),
        ({"device": 3.5}, ArgumentError),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused_with_a_sentence(given: dict[str, Any], kind: type[Exception]) -> None:
    if str(given.get("device", "")).startswith("cuda") and torch.cuda.is_available():
        pytest.skip("there is one")
    found = failure(lambda: DeviceQueue([], **{**on_cpu, **given}))
    (name, value) = next(iter(given.items()))
    assert found.kind is kind
    assert name in found.text
    assert str(value) in found.text
    assert len(found.text) > 30


def test_what_cannot_be_iterated_over_is_refused() -> None:
    loader: Any = 7
    found = failure(lambda: DeviceQueue(loader))
    assert found.kind is ArgumentError
    assert is_a_sentence(found.text)


def test_amounts_that_are_good(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    queue: DeviceQueue[Any] = DeviceQueue([], 0, resident="1KiB", timeout=1)
    assert (queue.device, queue.resident, queue.timeout, list(queue)) == (torch.device("cpu"), 1024, 1.0, [])


def test_strings_are_said_once_to_stay_on_the_host() -> None:
    batches = [{"x": torch.ones(2), "names": ["a", "b"]}] * 3
    with DeviceQueue(batches, device="meta") as queue:
        with pytest.warns(HotsetWarning) as told:
            got = list(queue)
        assert [str(one.message) for one in told] == [
            "batches hold a str at ['names'][0], which stays on the host, as do 1 more values; "
            "only tensors are copied to the device."
        ]
        assert [batch["x"].device.type for batch in got] == ["meta"] * 3
        assert [batch["names"] for batch in got] == [["a", "b"]] * 3
        list(queue)  # a second pass says nothing, as warnings are errors here
    packed = pack_sequence([torch.ones(2)])  # torch wants its sizes there
    for device, batch in (("cpu", batches[0]), ("meta", torch.ones(1)), ("meta", packed)):
        with DeviceQueue([batch], device=device) as other:
            list(other)


# ---- going on -----------------------------------------------------------------------------------------


def rest_after(make: Callable[[], Any], stop: int, take: str) -> tuple[list[Any], list[Any] | None]:
    """What comes after ``stop`` batches in a queue that goes on from another's state, and in that other."""
    seed_everything(1)
    rest: list[Any] | None = None
    with DeviceQueue(make(), 2, **on_cpu) as first:
        iterator = iter(first)
        for _ in range(stop):
            next(iterator)
        if take == "closed":
            first.close()
        elif take == "looked at again":
            iter(first)
        state = first.state_dict()
        if take == "under way":
            rest = list(iterator)
    seed_everything(2)
    with DeviceQueue(make(), 2, **on_cpu) as second:
        second.load_state_dict(state)
        assert difference(second.state_dict(), state) is None
        got = list(second)
        assert len(list(second)) == 6
    return got, rest


@pytest.mark.parametrize("take", ["under way", "closed", "looked at again"])
@pytest.mark.parametrize("sends", [False, True])
def test_a_state_is_of_what_was_handed_over(sends: bool, take: str, request: pytest.FixtureRequest) -> None:
    """Not of what was sent ahead; at any place of a pass, its end included."""
    if sends:
        request.getfixturevalue("ahead")
    with hotset.cache(Samples(image_and_label, N)) as cached:

        def make() -> Any:
            return hotset.DataLoader(cached, batch_size=4, shuffle=True)

        seed_everything(1)
        order = [batch[0] for batch in make()]
        for stop in (1, 3, 5, 6):
            got, rest = rest_after(make, stop, take)
            equal_batches([batch[0] for batch in got], order[stop:])
            assert rest is None or difference(got, rest) is None


def test_a_state_after_an_error_goes_on_behind_it(ahead: None, tmp_path: Path) -> None:
    source = Raising(image_and_label, N, 9, tmp_path / "armed")
    source.arm()
    loader = hotset.DataLoader(source, 4)
    queue: DeviceQueue[Any] = DeviceQueue(loader, 2, **on_cpu)
    iterator = iter(queue)
    next(iterator)
    before = queue.state_dict()
    next(iterator)
    due = queue.state_dict()
    failure(lambda: next(iterator))
    queue.close()
    source.disarm()
    everything = list(DataLoader(source, 4))
    for state, done in ((before, 1), (due, 2)):
        with DeviceQueue(hotset.DataLoader(source, 4), 2, **on_cpu) as second:
            second.load_state_dict(state)
            equal_batches(list(second), everything[done:])


class Stateful:
    """An iterable of the user's that says where it stands."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[int]:
        while self.at < 8:
            self.at += 1
            yield self.at
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


@pytest.mark.parametrize("sends", [False, True])
def test_an_iterable_with_a_state_of_its_own_loses_nothing(
    sends: bool, request: pytest.FixtureRequest
) -> None:
    if sends:
        request.getfixturevalue("ahead")
    first, second = DeviceQueue(Stateful(), 3, **on_cpu), DeviceQueue(Stateful(), 3, **on_cpu)
    iterator = iter(first)
    assert [next(iterator) for _ in range(3)] == [1, 2, 3]
    time.sleep(0.05)  # for a thread that reads on
    second.load_state_dict(first.state_dict())
    assert list(second) == [4, 5, 6, 7, 8]
    assert list(iterator) == [4, 5, 6, 7, 8]


def test_loaders_without_a_state_say_so() -> None:
    with DeviceQueue(DataLoader(Samples(image_and_label, N)), **on_cpu) as queue:
        for ask in (queue.state_dict, lambda: queue.load_state_dict({})):
            found = failure(ask)
            assert found.kind is StateError
            assert is_a_sentence(found.text)


# ---- reading ahead, alone -----------------------------------------------------------------------------


def test_ahead_gives_all_in_order_then_ends() -> None:
    ahead = PrefetchThread(range(50), 4)
    assert iter(ahead) is ahead
    assert list(ahead) == list(range(50))
    assert list(ahead) == []


def test_ahead_waits_with_depth_items_at_most() -> None:
    read: list[int] = []
    ahead = PrefetchThread((read.append(number) or number for number in range(50)), 3)
    assert eventually(lambda: len(read) == 3)
    time.sleep(0.02)
    assert (len(read), next(ahead)) == (3, 0)
    assert eventually(lambda: len(read) == 4)


def test_ahead_goes_on_after_any_interrupt() -> None:
    ahead, taken = PrefetchThread(itertools.count(), 1), list[int]()

    def take(_: int = 0) -> None:
        taken.append(next(ahead))

    for _ in interrupted_everywhere(take):
        in_threads(1, take)
    ahead.stop()
    assert taken == sorted(set(taken))


def test_ahead_ends_with_its_consumer() -> None:
    for end in ("stop", "drop"):
        loader = Generating(int)
        ahead: Any = PrefetchThread(loader, 2)
        next(ahead)
        if end == "stop":
            ahead.stop()
        else:
            del ahead
        assert eventually(lambda: loader.ended == 1)  # noqa: B023
        assert eventually(lambda: not ours())


class FailsToClose:
    """An iterator whose close() raises, as that of a cursor that is closed already."""

    def __iter__(self) -> FailsToClose:
        return FailsToClose()

    def __next__(self) -> int:
        raise StopIteration

    def close(self) -> None:
        raise PlainError("closed already")


def test_an_iterator_that_fails_to_close_does_not_hang_the_consumer() -> None:
    with pytest.raises(PlainError):
        next(PrefetchThread(FailsToClose(), 2))


def test_a_generator_that_was_given_is_its_owners_to_close() -> None:
    given = (i for i in range(9))
    ahead = PrefetchThread(given, 1)
    assert next(ahead) == 0
    ahead.stop()
    assert eventually(lambda: not ours())
    assert next(given) in (2, 3)


# ---- the watch, alone ---------------------------------------------------------------------------------


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> queues.SimpleQueue[str]:
    found: queues.SimpleQueue[str] = queues.SimpleQueue()
    monkeypatch.setattr("hotset.device.stall_monitor.warn", found.put)
    return found


def test_a_watch_tells_again_and_again_while_one_waits(said: queues.SimpleQueue[str], clock: Clock) -> None:
    watch = StallMonitor(0.125, str)

    def wait() -> None:
        for _ in range(3):
            clock.now += 0.0625
            time.sleep(0.05)  # for a watch that would say it too soon
            assert said.empty()
            clock.now += 0.0625
            assert float(said.get(timeout=60)) == clock.now

    try:
        watch.watched(wait)
    finally:
        watch.stop()


def test_a_watch_says_nothing_of_many_short_waits(said: queues.SimpleQueue[str], clock: Clock) -> None:
    watch = StallMonitor(0.02, str)

    def wait() -> None:
        clock.now += 0.015
        time.sleep(0.006)

    for _ in range(50):
        watch.watched(wait)
    watch.stop()
    assert said.empty()


def test_a_watch_ends_with_its_owner() -> None:
    watch: Any = StallMonitor(1e6, str)
    assert ours() == {"hotset-watch"}
    del watch
    assert eventually(lambda: not ours())


def test_default_batches_are_what_collating_gives() -> None:
    """The truth behind the comparisons above."""
    with DeviceQueue(DataLoader(Samples(mapping, 4), 2), **on_cpu) as queue:
        equal_batches(list(queue)[1], default_collate([mapping(2), mapping(3)]))
