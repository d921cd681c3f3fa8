"""A step as one CUDA graph: captured once, replayed for each batch.

    eager steps (real ones, on a side stream) ──> capture ──> copy batch ─> bank ─> replay ─> out
                                                  once        each step

In the first steps libraries choose kernels and allocators grow. So these steps run eagerly, on the stream
that the capture will use; they are steps of the training like all others. The capture runs no kernel: it
records them, on tensors at fixed addresses (the *bank*), into which each later batch is copied.

A replay runs no Python, so a step that changes state on the host cannot be captured faithfully. Such steps
are detected: the state of optimizers, schedulers and random number generators on the host must be the same
before and after the capture (:mod:`hotset.device.optimizer_state`). It is restored in any case, because the
capture has executed nothing.

Of ranks that train together either all capture or none does: a rank that replays a collective waits until the
others replay it too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
import torch.distributed as dist

from hotset._warnings import warn
from hotset.device.optimizer_state import HostState
from hotset.device.trees import Signature, difference, map_tensors, others, signature_of, tensors_of

__all__ = ["CudaGraphs", "Graphs", "NotCaptured", "Step", "graphs_on"]

# DistributedDataParallel rebuilds its buckets and counts on eleven eager steps before a capture.
_WARM_UP, _WARM_UP_RANKS = 3, 11


class NotCaptured(Exception):
    """The step cannot be captured; the message says why."""


class Graphs(Protocol):
    """Captures and replays steps: CUDA's graphs, or a stand-in for tests."""

    def side(self) -> contextlib.AbstractContextManager[None]:
        """Run eager steps on the capture's stream."""

    def capture(self, fn: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        """Capture what ``fn`` does; returns a function that replays it, and the (static) result.

        Raises:
            RuntimeError: it cannot be captured.
        """

    def agree(self, good: bool) -> bool:
        """Whether ``good`` is True on all ranks."""


class CudaGraphs:
    """CUDA's graphs on one device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    @contextlib.contextmanager
    def side(self) -> Iterator[None]:
        outer = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(outer)
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            outer.wait_stream(self._stream)

    def capture(self, fn: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        graph = torch.cuda.CUDAGraph()
        generator = torch.cuda.default_generators[self._device.index]
        draws = generator.clone_state()
        failed: Exception | None = None
        # The outer context restores the stream, also if the capture fails.
        capturing = torch.cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local")
        try:
            with self.side(), capturing:
                try:
                    out = fn()
                except Exception as error:
                    failed = error
                    raise
        except Exception as error:
            # A capture that was interrupted raises an error without the reason, and leaves the generator in
            # capture mode, so that dropout would raise from now on.
            generator.graphsafe_set_state(draws)
            try:
                raise failed or error from None
            finally:
                failed = None  # its traceback holds this frame, which holds the graph's memory
        return graph.replay, out

    def agree(self, good: bool) -> bool:
        if not (dist.is_available() and dist.is_initialized()):
            return good
        vote = torch.tensor(int(good), device=self._device if dist.get_backend() == "nccl" else "cpu")
        dist.all_reduce(vote, dist.ReduceOp.MIN)
        return bool(vote.item())


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
        self._run = run
        self._fn = fn
        self._graphs = graphs
        self._host: HostState | None = None
        self._left = _warm_up()
        self._usual: tuple[Signature, ...] | None = None
        self._replay: Callable[[], None] | None = None
        self._bank: list[torch.Tensor] = []
        self._out: Any = None
        self._settings: list[Any] = []
        self._said = False
        self.why: str | None = None

    @property
    def captured(self) -> bool:
        """Whether a batch of the usual shape is replayed."""
        return self._replay is not None

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
        self._host.make_capturable()
        settings = self._host.settings()
        if settings != self._settings:
            self._replay, self._left = None, max(self._left, 1)
            self._settings = settings

    def __call__(self, batch: Any) -> Any:
        """Run one step; :meth:`begin` was called before. The next step may overwrite the result."""
        if self._graphs is None or self.why is not None:
            return self._run(batch)
        signature = signature_of(batch)
        if self._usual is None:
            self._usual = signature
        elif self._left == _warm_up() - 1 and _is_shorter(self._usual, signature):
            # The first batch was the last one of a pass: the sink has resumed there from a state.
            self._usual, self._left = signature, _warm_up()
        if signature != self._usual:
            self._say_once(batch)
            return self._run(batch)
        if self._left > 0:
            self._left -= 1
            with self._graphs.side():
                return self._run(batch)
        if self._replay is None and not self._capture(batch):
            return self._run(batch)
        assert self._replay is not None
        for place, tensor in zip(self._bank, tensors_of(batch), strict=True):
            place.copy_(tensor, non_blocking=True)
        self._replay()
        return self._out

    def _say_once(self, batch: Any) -> None:
        """Warn once that batches of another shape run eagerly, unless it is a shorter last batch."""
        assert self._usual is not None
        other = difference(self._usual, batch, shorter=True)
        if other and not self._said:
            self._said = True
            warn(
                f"a batch differs from the first ({other}), and such batches run one kernel at a time; pad "
                "them to one shape, so that all of them run as a graph."
            )

    def _capture(self, batch: Any) -> bool:
        """Capture the step on a bank like this batch; False, with :attr:`why`, if it cannot be."""
        assert self._graphs is not None
        assert self._host is not None
        saved = self._host.save()
        why: str | None = None
        try:
            self._check(batch)
            bank = map_tensors(torch.Tensor.clone, batch)
            settings = self._host.settings()
            self._replay, self._out = self._graphs.capture(lambda: self._run(bank))
            self._bank, self._settings = tensors_of(bank), settings
            why = saved.changes()
        except Exception as error:  # the user's own error is raised again by the eager step
            why = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
        finally:
            saved.put_back()
        if not self._graphs.agree(why is None):
            self.why = why or "another rank could not capture it"
            self._replay, self._out, self._bank = None, None, []
            saved.put_back_gradients()
        return self.why is None

    def _check(self, batch: Any) -> None:
        """Refuse a step whose graph would not do what the step does.

        Raises:
            NotCaptured: says why.
        """
        assert self._host is not None
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


def _warm_up() -> int:
    return _WARM_UP_RANKS if dist.is_available() and dist.is_initialized() else _WARM_UP


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
