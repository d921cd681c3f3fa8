"""A step as one graph: captured once, replayed as often as there are batches.

    eager steps (real ones, on a side stream) ──> capture ──> copy batch ─> bank ─> replay ─> out
                                                  once        each step

Libraries choose kernels, and allocators grow, in the first steps; so these run eagerly, as steps of the
training like any others, on the stream that the capture will use. The capture itself runs no kernel: it
records them, on tensors at fixed places (the *bank*), into which each later batch is copied.

What runs Python at each step cannot be captured faithfully, and is looked for: the host's state of
optimizers, schedulers and random number generators must be after the capture what it was before
(:mod:`hotset.device.optimizer_state`). It is put back in any case, as nothing of that step has happened.

With ranks that train together all capture, or none does: a rank that replays a collective waits for the
others to replay it too.
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
    """The step cannot be one graph; says why."""


class Graphs(Protocol):
    """What captures and replays: CUDA's graphs, or what stands for them in a test."""

    def side(self) -> contextlib.AbstractContextManager[None]:
        """Run eager steps on the capture's stream."""

    def capture(self, fn: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        """Capture what ``fn`` does; returns what replays it, and the (static) result.

        Raises:
            RuntimeError: it cannot be captured.
        """

    def agree(self, good: bool) -> bool:
        """Whether it is good on all ranks."""


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
        # The outer context gives the stream back where a capture that fails would keep it.
        capturing = torch.cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local")
        try:
            with self.side(), capturing:
                try:
                    out = fn()
                except Exception as error:
                    failed = error
                    raise
        except Exception as error:
            # A capture that is broken off ends in an error that says no more than that, and leaves the
            # generator waiting for an end that does not come: dropout would raise from now on.
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
    """What captures on a device; None if nothing does."""
    return CudaGraphs(device) if device.type == "cuda" else None


class Step:
    """Runs one step a call, as a graph once it is warm.

    Args:
        run: does the step, given a batch.
        fn: the user's function behind it, for what is within its reach.
        graphs: what captures it; None: every step is eager.

    Attributes:
        why: why it is not captured; None if it is, or is going to be.
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
        """Whether a batch of the usual shape is a replay."""
        return self._replay is not None

    def begin(self) -> None:
        """Begin a call: where a setting was changed since the last one, the step is captured anew.

        After one eager step, which makes what the optimizer lacks (the momentum of parameters that were
        frozen). So a setting that is changed before every single step costs no captures.

        Optimizers are looked for at the first call, not before: a sink may be made earlier than they. They
        are made capturable at every call, as ``load_state_dict`` undoes it.
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
        """One step, of a call that was begun. The result may be overwritten by the next one."""
        if self._graphs is None or self.why is not None:
            return self._run(batch)
        signature = signature_of(batch)
        if self._usual is None:
            self._usual = signature
        elif self._left == _warm_up() - 1 and _is_shorter(self._usual, signature):
            # The first batch was the last one of a pass: a sink goes on there from a state.
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
        """Batches of another shape are run eagerly; a shorter last one is nothing to speak of."""
        assert self._usual is not None
        other = difference(self._usual, batch, shorter=True)
        if other and not self._said:
            self._said = True
            warn(
                f"a batch differs from the first ({other}), and such are run one kernel at a time; pad them "
                "to one shape to have all of them run as a graph."
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
        except Exception as error:  # what is the user's own is raised again by the eager step
            why = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
        finally:
            saved.put_back()
        if not self._graphs.agree(why is None):
            self.why = why or "another rank could not capture it"
            self._replay, self._out, self._bank = None, None, []
            saved.put_back_gradients()
        return self.why is None

    def _check(self, batch: Any) -> None:
        """
        Raises:
            NotCaptured: a graph of this step would not do what the step does.
        """
        assert self._host is not None
        if self._host.scales:
            raise NotCaptured(
                "its GradScaler asks the device after each step; train in bfloat16, which needs none"
            )
        left = others(batch)
        if left:
            place, value = left[0]
            raise NotCaptured(
                f"its batches hold a {type(value).__name__} at {place or 'their top'}, of which a graph "
                "would see the first one for ever; leave it out of the batches"
            )


def _warm_up() -> int:
    return _WARM_UP_RANKS if dist.is_available() and dist.is_initialized() else _WARM_UP


def _is_shorter(one: tuple[Signature, ...], other: tuple[Signature, ...]) -> bool:
    """Whether a batch is as another, with fewer samples."""
    return (
        one != other
        and len(one) == len(other)
        and all(
            (a.place, a.dtype, a.shape[1:]) == (b.place, b.dtype, b.shape[1:]) and a.shape[:1] <= b.shape[:1]
            for a, b in zip(one, other, strict=True)
        )
    )
