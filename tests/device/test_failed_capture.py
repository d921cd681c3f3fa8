"""What a capture that fails leaves of torch's allocator and generator, with a fake of both.

The fake is made after torch's sources (CUDAGraph.cpp, CUDACachingAllocator.cpp, CachingHostAllocator.h):
``capture_end`` raises where the stream's capture was interrupted, before it has told the generator and, up to
torch 2.12, the allocator. That of page-locked memory is told only by an end in order (torch 2.11).
"""

from __future__ import annotations

import contextlib
import gc
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from hotset.device.cuda_graph import CudaGraphs, side_stream

DEVICE = torch.device("cuda", 0)


class Queue:
    def wait_stream(self, other: Queue) -> None: ...


class Cuda:
    """``torch.cuda`` and ``torch._C`` in one.

    Attributes:
        recording: pools to which the allocator gives what is allocated.
        users: how many graphs use a pool.
        in_capture: whether the generator is in capture mode.
        interrupted: whether the stream's capture is.
        pending: whether the next launch reports an error of before.
        full: how many of the next captures find the device's memory full.
        refused: how many of the next captures the stream does not begin.
        locked: pools to which the allocator of page-locked memory gives what is allocated.

    Args:
        ends: whether the end of an interrupted capture tells the allocator.
        releases: whether a graph whose capture has failed releases its pool.
    """

    def __init__(self, ends: bool = False, releases: bool = False) -> None:
        self.recording: list[int] = []
        self.users: dict[int, int] = {}
        self.in_capture = self.interrupted = self.pending = False
        self.mode = 0
        self.full = self.refused = 0
        self.locked: list[int] = []
        self.ends = ends
        self.releases = releases
        self._pools = 0
        self._default = self._current = Queue()

    def Stream(self, device: torch.device) -> Queue:
        return Queue()

    def current_stream(self, device: torch.device) -> Queue:
        return self._current

    @contextlib.contextmanager
    def stream(self, stream: Queue) -> Iterator[None]:
        outer, self._current = self._current, stream
        try:
            yield
        finally:
            self._current = outer

    def graph_pool_handle(self) -> int:
        self._pools += 1
        return self._pools

    def CUDAGraph(self) -> Graph:
        return Graph(self)

    def synchronize(self, device: torch.device) -> None:
        if self.recording:
            self.wait()

    def empty_cache(self) -> None:
        assert not self.recording, "captures_underway.empty() INTERNAL ASSERT FAILED"
        self.users = {pool: users for pool, users in self.users.items() if users}

    def wait(self) -> None:
        """What cannot be done in a capture."""
        self.interrupted = self.pending = True
        raise RuntimeError("operation not permitted when stream is capturing")

    def _sleep(self, cycles: int) -> None:
        if self.pending:
            self.pending = False
            raise RuntimeError("operation failed due to a previous error during capture")

    def draw(self) -> None:
        if self.in_capture:
            raise RuntimeError("Offset increment outside graph capture encountered unexpectedly.")

    def _cuda_endAllocateToPool(self, device: int, pool: int) -> None:
        assert device == 0
        if pool not in self.recording:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self.recording.remove(pool)

    def _cuda_releasePool(self, device: int, pool: int) -> None:
        if pool not in self.users:
            raise RuntimeError("it != graph_pools.end() INTERNAL ASSERT FAILED")
        self.users[pool] -= 1
        assert self.users[pool] >= 0, "a pool was released twice"

    def get_sync_debug_mode(self) -> int:
        return self.mode

    def set_sync_debug_mode(self, mode: int | str) -> None:
        self.mode = 1 if mode == "warn" else int(mode)
        warnings.warn("Synchronization debug mode is a prototype feature", stacklevel=2)

    def item(self) -> None:
        if self.mode:
            warnings.warn("called a synchronizing CUDA operation", stacklevel=2)


class Graph:
    def __init__(self, cuda: Cuda) -> None:
        self._cuda = cuda
        self._pool = 0
        self._recording = self._ended = False

    def capture_begin(self, pool: int | None = None, capture_error_mode: str = "global") -> None:
        cuda = self._cuda
        assert not cuda.recording, "another capture is under way"
        assert capture_error_mode == "thread_local"
        if cuda.full:
            cuda.full -= 1
            raise torch.OutOfMemoryError("no room for the generator's state")
        self._pool = cuda.graph_pool_handle() if pool is None else pool
        assert cuda.users.get(self._pool) != 0, "use_count > 0 INTERNAL ASSERT FAILED"
        cuda.users[self._pool] = cuda.users.get(self._pool, 0) + 1
        cuda.recording.append(self._pool)
        if self._pool in cuda.locked:
            raise RuntimeError("beginAllocateToPool: already recording to mempool_id")
        cuda.locked.append(self._pool)
        self._recording = cuda.in_capture = True
        if cuda.refused:
            cuda.refused -= 1
            raise RuntimeError("cudaStreamBeginCapture failed")

    def capture_end(self) -> None:
        cuda = self._cuda
        if cuda.interrupted:
            cuda.interrupted = False
            if cuda.ends:
                cuda._cuda_endAllocateToPool(0, self._pool)
                self._recording = False
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture")
        cuda._cuda_endAllocateToPool(0, self._pool)
        cuda.locked.remove(self._pool)
        self._recording = cuda.in_capture = False
        self._ended = True

    def replay(self) -> None: ...

    def pool(self) -> int:
        if not self._ended:
            raise RuntimeError("Called CUDAGraph::pool() without a preceding successful capture.")
        return self._pool

    def reset(self) -> None:
        cuda = self._cuda
        if self._recording and cuda.releases:
            cuda._cuda_endAllocateToPool(0, self._pool)  # torch 2.15; what it raises ends the process
        if self._ended or (self._pool and cuda.releases):
            cuda._cuda_releasePool(0, self._pool)
        self._pool, self._recording, self._ended = 0, False, False

    def __del__(self) -> None:
        self.reset()


def graphs_of(cuda: Any, core: Any = None) -> CudaGraphs:
    return CudaGraphs(DEVICE, cuda, core or cuda)


def capture(cuda: Any, step: Callable[[], Any], core: Any = None) -> Any:
    graphs = graphs_of(cuda, core)
    return graphs.capture(step, graphs.pool())


@pytest.mark.parametrize(
    ("ends", "releases"),
    [(False, False), (True, False), (True, True)],
    ids=["torch 2.6", "the capture's end tells the allocator", "the graph releases its pool"],
)
@pytest.mark.parametrize("kind", [KeyError, KeyboardInterrupt, None])
def test_a_failed_capture_leaves_nothing_behind(
    kind: type[BaseException] | None, ends: bool, releases: bool
) -> None:
    """By an error of the step's own, whose capture ends in order, or one that interrupts it."""
    cuda = Cuda(ends, releases)

    def step() -> None:
        if kind is not None:
            raise kind("no such class")
        cuda.wait()

    with pytest.raises(kind or RuntimeError, match=r"no such class|not permitted"):
        capture(cuda, step)
    assert cuda.recording == [], "the allocator goes on giving memory of the graph's pool"
    assert not any(cuda.users.values()), "the pool is never freed"
    assert not cuda.pending, "the next step reports the error"
    cuda.draw()
    assert cuda.current_stream(DEVICE) is cuda._default
    replay, out = capture(cuda, lambda: 5)
    assert (out, list(cuda.users.values()).count(1)) == (5, 1)
    del replay
    assert not any(cuda.users.values())


@pytest.mark.parametrize("releases", [False, True])
def test_a_graph_keeps_its_pool_when_the_next_capture_cannot_begin(releases: bool) -> None:
    """As the device's memory is full, or as torch takes no capture into the pool of one that has failed."""
    cuda = Cuda(releases, releases)
    graphs = graphs_of(cuda)
    pool = graphs.pool()
    replay, _ = graphs.capture(lambda: 5, pool)
    cuda.full = 1
    with pytest.raises(torch.OutOfMemoryError):
        graphs.capture(lambda: 5, pool)
    assert cuda.users[pool] == 1, "memory of a graph that is replayed was given away"
    for message in ("not permitted", "already recording"):
        with pytest.raises(RuntimeError, match=message):
            graphs.capture(cuda.wait, pool)
        assert (cuda.users[pool], cuda.recording) == (1, [])
    del replay
    assert not any(cuda.users.values())


@pytest.mark.parametrize(("ends", "releases"), [(False, False), (True, False), (True, True)])
def test_a_capture_that_the_stream_does_not_begin_leaves_nothing_behind(ends: bool, releases: bool) -> None:
    cuda = Cuda(ends, releases)
    cuda.refused = 1
    with pytest.raises(RuntimeError, match="cudaStreamBeginCapture failed"):
        capture(cuda, lambda: 5)
    assert (cuda.recording, any(cuda.users.values())) == ([], False)
    cuda.draw()
    assert capture(cuda, lambda: 5)[1] == 5


def test_finalizers_of_garbage_do_not_interrupt_a_capture() -> None:
    cuda = Cuda()

    class Asks:
        def __init__(self) -> None:
            self.itself = self

        def __del__(self) -> None:
            if cuda.recording:
                cuda.interrupted = True

    def step() -> int:
        for _ in range(3 * gc.get_threshold()[0]):
            Asks()
        return 5

    replay, out = capture(cuda, step)
    assert (out, gc.isenabled()) == (5, True)
    gc.disable()
    try:
        capture(cuda, lambda: 5)
        assert not gc.isenabled(), "the user had disabled it"
    finally:
        gc.enable()
    del replay
    gc.collect()


def test_the_allocator_of_older_versions() -> None:
    class Core:
        def __init__(self, cuda: Cuda) -> None:
            self._cuda_endAllocateCurrentStreamToPool = cuda._cuda_endAllocateToPool
            self._cuda_releasePool = cuda._cuda_releasePool

    cuda = Cuda()
    with pytest.raises(RuntimeError, match="not permitted"):
        capture(cuda, cuda.wait, Core(cuda))
    assert (cuda.recording, any(cuda.users.values())) == ([], False)


def test_graphs_of_a_device_share_a_stream() -> None:
    cuda = Cuda()
    assert graphs_of(cuda)._stream is graphs_of(cuda)._stream is side_stream(DEVICE, cuda)


# Where a step waits


def rehearsed(cuda: Cuda, step: Callable[[], None]) -> list[str]:
    with graphs_of(cuda).waits() as places:
        step()
    return places


def test_waits_are_found_with_file_and_line_and_warnings_pass_on() -> None:
    cuda = Cuda()

    def step() -> None:
        cuda.item()
        warnings.warn("something of the step's own", UserWarning, stacklevel=1)
        cuda.item()

    line = step.__code__.co_firstlineno
    with pytest.warns(UserWarning, match="something of the step's own") as said:
        places = rehearsed(cuda, step)
    assert places == [f"{__file__}:{line + 1}", f"{__file__}:{line + 3}"]
    assert [(one.filename, one.lineno) for one in said] == [(__file__, line + 2)]
    assert cuda.mode == 0
    assert rehearsed(cuda, lambda: None) == []


def test_what_another_thread_waits_for_is_not_the_steps() -> None:
    cuda = Cuda()

    def step() -> None:
        thread = threading.Thread(target=cuda.item)
        thread.start()
        thread.join()

    assert rehearsed(cuda, step) == []


def test_the_mode_is_put_back_after_an_error() -> None:
    cuda = Cuda()
    cuda.mode = 2

    def step() -> None:
        raise KeyError("no such class")

    with pytest.raises(KeyError):
        rehearsed(cuda, step)
    assert cuda.mode == 2
