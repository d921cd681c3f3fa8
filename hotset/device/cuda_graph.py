"""A step as one CUDA graph: captured once, replayed for each batch.

    eager steps (real ones, on a side stream) ──> capture ──> copy batch ─> bank ─> replay ─> out
          the last one is the rehearsal           once        each step

In the first steps libraries choose kernels and allocators grow. So these steps run eagerly, on the stream
that the capture will use; they are steps of the training like all others. The capture runs no kernel: it
records them, on tensors at fixed addresses (the *bank*), into which each later batch is copied.

A replay runs no Python, so a step that changes state on the host cannot be captured faithfully. The last
eager step, the *rehearsal*, is watched for what a graph would not do right: where it waits for the device,
which of its tensors it binds anew, what it does with gradients. And the state of optimizers, schedulers and
random number generators on the host must be the same before and after the capture
(:mod:`hotset.device.optimizer_state`). It is restored in any case, because the capture has executed nothing.

What is left of a step is detached from autograd, and batches of other shapes run on the side stream too: a
loss that is kept keeps the nodes that add to gradients, and those of the default stream cannot be captured.

Ranks whose gradients DistributedDataParallel averages capture together or not at all: a rank that replays a
collective waits until the others replay it too. They vote, over its process group, at steps that are the
same for all: each step past the warm-up that is not replayed.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
import torch.distributed as dist

from hotset._warnings import warn
from hotset.device.optimizer_state import Gradients, HostState, Rehearsal
from hotset.device.trees import Signature, difference, map_tensors, others, signature_of, tensors_of

__all__ = ["CudaGraphs", "Graphs", "NotCaptured", "Step", "graphs_on"]

# DistributedDataParallel rebuilds its buckets and counts on eleven eager steps before a capture.
_WARM_UP, _WARM_UP_RANKS = 3, 11
_REHEARSALS = 5  # until a step counts as one that does something else with gradients each time

# What ranks vote.
_NEVER, _NOT_YET, _READY = 0, 1, 2


class NotCaptured(Exception):
    """The step cannot be captured; the message says why."""


class Graphs(Protocol):
    """Captures and replays steps: CUDA's graphs, or a stand-in for tests."""

    def side(self) -> contextlib.AbstractContextManager[None]:
        """Run eager steps on the capture's stream."""

    def waits(self) -> contextlib.AbstractContextManager[list[str]]:
        """Run an eager step; at the end the list holds the places in the code that waited for the device."""

    def capture(self, fn: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        """Capture what ``fn`` does; returns a function that replays it, and the (static) result.

        Raises:
            RuntimeError: it cannot be captured.
        """

    def lowest(self, vote: int, groups: list[Any]) -> int:
        """The lowest vote of all ranks of these process groups."""


class CudaGraphs:
    """CUDA's graphs on one device.

    A capture that fails leaves torch half in it: the allocator goes on giving memory of the graph's pool,
    and never takes it back; the generator is in capture mode, so that dropout raises. So the pool is ours, to
    be ended and released; and a capture of nothing much, which ends in order, takes the generator out of that
    mode. (Another state in the generator's place would leave other graphs with the old one.)

    Args:
        device: the GPU.
        api, core: ``torch.cuda`` and ``torch._C``, or what stands for them in a test.
    """

    def __init__(self, device: torch.device, api: Any = torch.cuda, core: Any = torch._C) -> None:
        self._device = device
        self._api = api
        self._core = core
        self._stream = side_stream(device, api)

    @contextlib.contextmanager
    def side(self) -> Iterator[None]:
        outer = self._api.current_stream(self._device)
        self._stream.wait_stream(outer)
        try:
            with self._api.stream(self._stream):
                yield
        finally:
            outer.wait_stream(self._stream)

    @contextlib.contextmanager
    def waits(self) -> Iterator[list[str]]:
        places: list[str] = []
        other: list[Any] = []
        consumer = threading.get_ident()

        def note(message: Any, category: Any, filename: str, lineno: int, *_: Any, **__: Any) -> None:
            if "synchronizing CUDA operation" in str(message):
                if threading.get_ident() == consumer:  # another thread may wait: it prepares batches
                    places.append(f"{filename}:{lineno}")
            elif "Synchronization debug mode is a prototype" not in str(message):
                other.append((message, category, filename, lineno))

        before = self._api.get_sync_debug_mode()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("always")
                warnings.showwarning = note
                self._api.set_sync_debug_mode("warn")
                try:
                    yield places
                finally:
                    self._api.set_sync_debug_mode(before)
        finally:
            for one in other:
                warnings.warn_explicit(*one)

    def capture(self, fn: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        graph, pool = self._api.CUDAGraph(), self._api.graph_pool_handle()
        failed: BaseException | None = None
        # The outer context restores the stream, also if the capture fails.
        capturing = self._api.graph(graph, pool=pool, stream=self._stream, capture_error_mode="thread_local")
        try:
            with self.side(), capturing:
                try:
                    out = fn()
                except BaseException as error:
                    failed = error
                    raise
        except BaseException as error:
            self._recover(graph, pool)
            try:
                raise failed or error from None  # that of an interrupted capture's end says no reason
            finally:
                failed = None  # its traceback holds this frame, which holds the graph's memory
        return graph.replay, out

    def _recover(self, graph: Any, pool: Any) -> None:
        """Take allocator and generator out of a capture that has failed."""
        core = self._core
        end = getattr(core, "_cuda_endAllocateToPool", None) or core._cuda_endAllocateCurrentStreamToPool
        with contextlib.suppress(RuntimeError):  # raised if the capture's end has done it
            end(self._device.index, pool)
        try:
            graph.pool()  # raised unless the capture has ended in order: then the graph releases it
        except RuntimeError:
            with contextlib.suppress(RuntimeError):
                core._cuda_releasePool(self._device.index, pool)
        with self.side():
            with contextlib.suppress(RuntimeError):  # the first launch reports the capture's error once more
                self._api._sleep(1)
            with contextlib.suppress(RuntimeError):
                mended = self._api.CUDAGraph()
                mended.capture_begin(capture_error_mode="thread_local")
                self._api._sleep(1)  # torch warns of a graph that is empty
                mended.capture_end()

    def lowest(self, vote: int, groups: list[Any]) -> int:
        for group in groups:
            on_device = dist.get_backend(group) == "nccl"
            votes = torch.tensor(vote, device=self._device if on_device else "cpu")
            dist.all_reduce(votes, dist.ReduceOp.MIN, group)
            vote = int(votes.item())
        return vote


@functools.cache
def side_stream(device: torch.device, api: Any = torch.cuda) -> Any:
    """The stream of a device's eager steps and captures: memory that one of them frees another can have."""
    return api.Stream(device)


def graphs_on(device: torch.device) -> Graphs | None:
    """What captures steps on this device; None if nothing can."""
    return CudaGraphs(device) if device.type == "cuda" else None


class Step:
    """Runs one step for each call, as a graph after the first eager steps.

    Args:
        run: runs the step, given a batch.
        fn: the user's function behind it, whose closure and globals are searched for optimizers.
        graphs: captures it; None: every step is eager.

    Attributes:
        why: why it is not captured; None if it is, or will be.
    """

    def __init__(self, run: Callable[[Any], Any], fn: Callable[..., Any], graphs: Graphs | None) -> None:
        self._run: Callable[[Any], Any] = lambda batch: map_tensors(_detached, run(batch))
        self._fn = fn
        self._graphs = graphs
        self._host: HostState | None = None
        self._groups: list[Any] = []
        self._steps = 0
        self._warm_up = self._left = _WARM_UP
        self._unclear = 0
        self._usual: tuple[Signature, ...] | None = None
        self._settings: list[Any] = []
        self._said = False
        self.why: str | None = None
        self.release()

    @property
    def captured(self) -> bool:
        """Whether a batch of the usual shape is replayed."""
        return self._replay is not None

    def release(self) -> None:
        """Let go of the graph and its memory. The next steps are eager, and one of them is captured again."""
        self._replay: Callable[[], None] | None = None
        self._bank: list[torch.Tensor] = []
        self._out: Any = None
        self._gradients: Gradients | None = None
        self._rehearsed: Gradients | str | None = None
        self._bound = False  # whether the gradients are known to be where the graph writes
        self._left = max(self._left, 1)

    def begin(self) -> None:
        """Begin a call: if a setting has changed since the last one, the step is captured again.

        Before the capture comes one eager step, which creates what the optimizer lacks (the momentum of
        parameters that were frozen). So a setting that changes before every single step costs no captures.

        Optimizers are searched for at the first call, because a sink may be made before they are. They are
        made capturable at every call, because ``load_state_dict`` undoes it.
        """
        if self._graphs is None:
            return
        if self._host is None:
            self._host = HostState(self._fn)
            self._groups = self._host.groups
            self._warm_up = self._left = _WARM_UP_RANKS if self._groups else _WARM_UP
        self._host.make_capturable()
        self._bound = False
        settings = self._host.settings()
        if settings != self._settings:
            self.release()
            self._settings = settings

    def __call__(self, batch: Any) -> Any:
        """Run one step; :meth:`begin` was called before. The next step may overwrite the result."""
        if self._graphs is None or self.why is not None:
            return self._run(batch)
        self._steps += 1
        usual = self._is_usual(batch)
        if usual and self._replay is not None and not self._is_bound():
            self.release()
        if self._replay is None and not (self._may_capture(usual) and self._capture(batch)):
            return self._eager(batch, usual)
        if not usual:
            return self._eager(batch, usual)
        assert self._replay is not None
        for place, tensor in zip(self._bank, tensors_of(batch), strict=True):
            place.copy_(tensor, non_blocking=True)
        self._replay()
        return self._out

    def _is_usual(self, batch: Any) -> bool:
        """Whether a batch is of the shape that is captured: that of the first."""
        signature = signature_of(batch)
        if self._usual is None:
            self._usual = signature
        elif self._steps == 2 and _is_shorter(self._usual, signature):
            # The first batch was the last one of a pass: the sink has resumed there from a state.
            self._usual, self._left = signature, self._warm_up
        if signature == self._usual:
            return True
        other = difference(self._usual, batch, shorter=True)
        if other and not self._said:
            self._said = True
            warn(
                f"a batch differs from the first ({other}), and such batches run one kernel at a time; pad "
                "them to one shape, so that all of them run as a graph."
            )
        return False

    def _is_bound(self) -> bool:
        """Whether the gradients are where the graph writes, or could be bound there again."""
        self._bound = self._bound or self._gradients is None or self._gradients.rebind()
        return self._bound

    def _eager(self, batch: Any, usual: bool) -> Any:
        """Run the step eagerly; the last time before the capture is the rehearsal."""
        assert self._graphs is not None
        assert self._host is not None
        self._bound = False
        with self._graphs.side():
            if not usual or self._left > 1 or self.why is not None:
                result = self._run(batch)
            else:
                with Rehearsal(self._host, _devices(batch)) as watched, self._graphs.waits() as places:
                    result = self._run(batch)
                more = f" and {len(places) - 1} more" if len(places) > 1 else ""
                self._rehearsed = (
                    f"it waits for the device at {places[0]}{more}" if places else watched.found()
                )
        if usual:
            self._left = max(self._left - 1, 0)
        return result

    def _may_capture(self, usual: bool) -> bool:
        """Whether to capture now: after the rehearsal, on all ranks."""
        assert self._graphs is not None
        ready = usual and self._left == 0
        if ready and isinstance(self._rehearsed, Gradients):
            ready = self._rehearsed.ready
            self._unclear = 0 if ready else self._unclear + 1
            if self._unclear == _REHEARSALS:
                ready = True  # to be refused
                self._rehearsed = (
                    "its gradients are cleared between calls, and whether it adds to them cannot be told; "
                    "clear them in the step"
                )
        if not self._groups:
            return ready
        if self._steps <= _WARM_UP_RANKS:
            return False
        return self._graphs.lowest(_READY if ready else _NOT_YET, self._groups) == _READY

    def _capture(self, batch: Any) -> bool:
        """Capture the step on a bank like this batch; False, with :attr:`why`, if it cannot be."""
        assert self._graphs is not None
        assert self._host is not None
        saved = self._host.save()
        why: str | None = None
        try:
            gradients = self._check(batch)
            bank = map_tensors(lambda tensor: tensor.clone(), batch)
            settings = self._host.settings()
            with _casts_of_its_own():
                self._replay, self._out = self._graphs.capture(lambda: self._run(bank))
            self._bank, self._settings, self._gradients = tensors_of(bank), settings, gradients
            gradients.hold()
            why = saved.changes()
        except Exception as error:  # the user's own error is raised again by the eager step
            why = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
            if "legacy stream" in why or (self._groups and not isinstance(error, NotCaptured)):
                why += (
                    " (what autograd keeps of the default stream cannot be captured: detach losses that are "
                    "kept, make DistributedDataParallel under torch.cuda.stream(torch.cuda.Stream()))"
                )
        finally:
            saved.put_back()
            if self._replay is None:
                saved.put_back_gradients()
        good = why is None
        if self._groups:
            good = self._graphs.lowest(_READY if good else _NEVER, self._groups) == _READY
        if not good:
            self.why = why or "another rank could not capture it"
            self.release()
            saved.put_back_gradients()
        return good

    def _check(self, batch: Any) -> Gradients:
        """Refuse a step whose graph would not do what the step does; returns what it does with gradients.

        Raises:
            NotCaptured: says why.
        """
        assert self._host is not None
        if self._host.graphs:
            raise NotCaptured(
                "something in it was compiled into graphs of its own, which cannot be part of another; leave "
                'out mode="reduce-overhead", or compile with mode="max-autotune-no-cudagraphs"'
            )
        if self._host.scales:
            raise NotCaptured(
                "its GradScaler reads from the device after each step; train in bfloat16, which needs none"
            )
        left = others(batch)
        if left:
            place, value = left[0]
            raise NotCaptured(
                f"its batches hold a {type(value).__name__} at {place or 'their top'}, and a graph would use "
                "the value of the first batch in all steps; leave it out of the batches"
            )
        if not isinstance(self._rehearsed, Gradients):
            raise NotCaptured(self._rehearsed or "it has not been rehearsed")
        return self._rehearsed


def _detached(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach()


def _devices(batch: Any) -> set[torch.device]:
    return {tensor.device for tensor in tensors_of(batch)}


@contextlib.contextmanager
def _casts_of_its_own() -> Iterator[None]:
    """Have the step cast its weights itself. An outer autocast keeps casts of earlier steps, and would keep
    those of the capture, which no kernel has computed.
    """
    before = torch.is_autocast_cache_enabled()
    if not (torch.is_autocast_enabled("cuda") or torch.is_autocast_enabled("cpu")):
        yield
        return
    torch.clear_autocast_cache()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)
        torch.clear_autocast_cache()


def _is_shorter(one: tuple[Signature, ...], other: tuple[Signature, ...]) -> bool:
    """Whether ``one`` is like ``other``, but with fewer samples."""
    return (
        one != other
        and len(one) == len(other)
        and all(
            (a.place, a.dtype, a.shape[1:]) == (b.place, b.dtype, b.shape[1:]) and a.shape[:1] <= b.shape[:1]
            for a, b in zip(one, other, strict=True)
        )
    )
