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
import gc
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from hotset._warnings import warn
from hotset.device.optimizer_state import Gradients, HostState, Rehearsal
from hotset.device.trees import Signature, difference, map_tensors, others, signature_of, tensors_of

__all__ = ["CudaGraphs", "NotCaptured", "Step", "graphs_on"]

# DistributedDataParallel rebuilds its buckets and counts on eleven eager steps before a capture.
_WARM_UP, _WARM_UP_RANKS = 3, 11
_REHEARSALS = 5  # until a step counts as one that does something else with gradients each time
_SHORTER = 3  # shapes of shorter batches that are captured as well

# What ranks vote.
_NEVER, _NOT_YET, _READY = 0, 1, 2


class NotCaptured(Exception):
    """The step cannot be captured; the message says why."""


class CudaGraphs:
    """Captures and replays steps on one GPU.

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
        """Run eager steps on the capture's stream."""
        outer = self._api.current_stream(self._device)
        self._stream.wait_stream(outer)
        try:
            with self._api.stream(self._stream):
                yield
        finally:
            outer.wait_stream(self._stream)

    @contextlib.contextmanager
    def waits(self) -> Iterator[list[str]]:
        """Run an eager step; at the end the list holds the places in the code that waited for the device."""
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

    def pool(self) -> Any:
        """Memory for captures whose replays never run at the same time. It lasts while one of them does."""
        # In a capture the allocator frees nothing of what it keeps for others.
        self._api.synchronize(self._device)
        self._api.empty_cache()
        return self._api.graph_pool_handle()

    def capture(self, fn: Callable[[], Any], pool: Any) -> tuple[Callable[[], None], Any]:
        """Capture what ``fn`` does; returns a function that replays it, and the (static) result.

        Raises:
            RuntimeError: it cannot be captured.
        """
        graph = self._api.CUDAGraph()
        failed: BaseException | None = None
        begun = False
        try:
            with self.side(), _no_collection():
                graph.capture_begin(pool, capture_error_mode="thread_local")
                begun = True
                try:
                    out = fn()
                except BaseException as error:
                    failed = error
                    raise
                finally:
                    graph.capture_end()
        except BaseException as error:
            self._recover(graph, pool, begun)
            try:
                raise failed or error from None  # that of an interrupted capture's end says no reason
            finally:
                failed = None  # its traceback holds this frame, which holds the graph's memory
        return graph.replay, out

    def _recover(self, graph: Any, pool: Any, begun: bool) -> None:
        """Take allocator and generator out of a capture that has failed.

        Args:
            graph, pool: that were captured, and where.
            begun: whether the capture's beginning had succeeded; if not, the pool may not know of this graph.
        """
        self._clear_error()
        try:
            graph.pool()  # raised unless the capture has ended in order: then the graph releases it
            releases = True
        except RuntimeError:
            releases = False
        with contextlib.suppress(RuntimeError):
            graph.reset()  # first: newer builds of torch end what must not have been ended before (2.15)
        begun = self._end_recording(pool) or begun
        if begun and not releases and not self._torch_releases_pools():
            with contextlib.suppress(RuntimeError):
                self._core._cuda_releasePool(self._device.index, pool)
        with contextlib.suppress(RuntimeError), self.side():
            mended = self._api.CUDAGraph()
            mended.capture_begin(capture_error_mode="thread_local")
            try:
                self._api._sleep(1)  # torch warns of a graph that is empty
            finally:
                mended.capture_end()

    def _clear_error(self) -> None:
        """The first launch after a capture that was interrupted reports its error once more."""
        with contextlib.suppress(RuntimeError), self.side():
            self._api._sleep(1)

    def _end_recording(self, pool: Any) -> bool:
        """Have the allocator give no more memory of a graph's pool; whether it did until now."""
        core = self._core
        end = getattr(core, "_cuda_endAllocateToPool", None) or core._cuda_endAllocateCurrentStreamToPool
        try:
            end(self._device.index, pool)
        except RuntimeError:  # the capture's end has done it
            return False
        return True

    def _torch_releases_pools(self) -> bool:
        """Whether a graph whose capture has failed releases its pool, as it does in torch's builds since July
        2026. Released twice, a pool ends the process, or is freed while another graph writes to it.

        A capture that fails on purpose shows it. If its graph has released the pool, which has no memory,
        then emptying the cache removes the pool, and the allocator does not know it any more.
        """
        graph, pool = self._api.CUDAGraph(), self._api.graph_pool_handle()
        with contextlib.suppress(RuntimeError), self.side():
            graph.capture_begin(pool, capture_error_mode="thread_local")
            try:
                self._api.synchronize(self._device)  # not permitted in a capture
            finally:
                graph.capture_end()
        self._clear_error()
        graph.reset()
        self._end_recording(pool)
        self._api.empty_cache()
        try:
            self._core._cuda_releasePool(self._device.index, pool)
        except RuntimeError:
            return True
        return False

    def lowest(self, vote: int, groups: list[Any]) -> int:
        """The lowest vote of all ranks of these process groups."""
        for group in groups:
            on_device = dist.get_backend(group) == "nccl"
            votes = torch.tensor(vote, device=self._device if on_device else "cpu")
            dist.all_reduce(votes, dist.ReduceOp.MIN, group)
            vote = int(votes.item())
        return vote


@functools.cache
def side_stream(device: torch.device, api: Any) -> Any:
    """The stream of a device's eager steps and captures: memory that one of them frees another can have."""
    return api.Stream(device)


def graphs_on(device: torch.device) -> CudaGraphs | None:
    """What captures steps on this device; None if nothing can."""
    return CudaGraphs(device) if device.type == "cuda" else None


class _Graph(NamedTuple):
    """A captured step: what replays it, where it reads its batch, its result, what it does to gradients."""

    replay: Callable[[], None]
    bank: list[torch.Tensor]
    out: Any
    gradients: Gradients


class _Shape:
    """What is known of the batches of one shape.

    Attributes:
        left: eager steps until the capture.
        rehearsed: what the last of them showed; as text, why the step is not captured.
        unclear: how many rehearsals in a row did not show what the step does with gradients.
        graph: the step on such a batch.
        refused: whether it cannot be captured for this shape.
    """

    def __init__(self, left: int) -> None:
        self.left = left
        self.rehearsed: Gradients | str | None = None
        self.unclear = 0
        self.graph: _Graph | None = None
        self.refused = False

    def release(self) -> None:
        """Let go of the graph; one eager step comes before the next capture."""
        self.graph, self.rehearsed, self.left = None, None, max(self.left, 1)


class Step:
    """Runs one step for each call, as a graph after the first eager steps.

    The first batch's shape is the usual one. Shorter batches, as the last of each pass, have graphs of their
    own in the same memory. All others run eagerly.

    Args:
        fn: the user's function behind it, whose closure and globals are searched for optimizers.
        graphs: captures it; None: every step is eager.

    Attributes:
        why: why it is not captured; None if it is, or will be.
    """

    def __init__(self, run: Callable[[Any], Any], fn: Callable[..., Any], graphs: CudaGraphs | None) -> None:
        self._run: Callable[[Any], Any] = lambda batch: map_tensors(lambda one: one.detach(), run(batch))
        self._fn = fn
        self._graphs = graphs
        self._host: HostState | None = None
        self._groups: list[Any] = []
        self._steps = 0
        self._warm_up = _WARM_UP
        self._usual: tuple[Signature, ...] | None = None
        self._shapes: dict[tuple[Signature, ...], _Shape] = {}
        self._pool: Any = None
        self._replaced: list[Callable[[], None]] = []  # they keep the pool, until another graph does
        self._bound: _Graph | None = None  # whose gradients those of the parameters are known to be
        self._settings: list[Any] = []
        self._values: list[Any] = []  # as the step's Python has found, or left, them
        self._said = False
        self.why: str | None = None

    @property
    def captured(self) -> bool:
        """Whether a batch of the usual shape is replayed."""
        return self._usual is not None and self._shapes[self._usual].graph is not None

    def release(self) -> None:
        """Let go of the graphs and their memory. The next steps are eager, and then captured again."""
        self._pool, self._bound, self._replaced = None, None, []
        for shape in self._shapes.values():
            shape.release()

    def _renew(self) -> None:
        """Have the step captured again, in the memory of the graphs as they are now."""
        pool, graphs = self._pool, [one.graph.replay for one in self._shapes.values() if one.graph]
        self.release()
        if graphs:
            self._pool, self._replaced = pool, graphs

    def begin(self) -> None:
        """Begin a call: if a setting or value has changed since the last one, the step is captured again.

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
            self._warm_up = _WARM_UP_RANKS if self._groups else _WARM_UP
        self._host.make_capturable()
        self._bound = None
        now = self._host.settings(), self._host.values()
        if now != (self._settings, self._values):
            self._renew()
            self._settings, self._values = now

    def __call__(self, batch: Any) -> Any:
        """Run one step; :meth:`begin` was called before. The next step may overwrite the result."""
        if self._graphs is None or self.why is not None:
            return self._run(batch)
        self._steps += 1
        shape = self._shape_of(batch)
        graph = shape.graph if shape is not None else None
        if graph is not None and graph is not self._bound and not graph.gradients.rebind():
            self._renew()
            graph = None
        if graph is None and self._may_capture(shape):
            assert shape is not None
            graph = self._capture(shape, batch)
        if graph is None:
            return self._eager(shape, batch)
        self._bound = graph
        for place, tensor in zip(graph.bank, tensors_of(batch), strict=True):
            place.copy_(tensor, non_blocking=True)
        graph.replay()
        return graph.out

    def _shape_of(self, batch: Any) -> _Shape | None:
        """What is known of batches like this one; None if they are not captured."""
        signature = signature_of(batch)
        if signature in self._shapes:
            return self._shapes[signature]
        # The first batch may be the last one of a pass: the sink has resumed there from a state.
        if self._usual is None or (self._steps == 2 and _is_shorter(self._usual, signature)):
            self._usual = signature
            self._shapes = {signature: _Shape(self._warm_up)}
            return self._shapes[signature]
        if _is_shorter(signature, self._usual):
            if len(self._shapes) > _SHORTER or self._groups:
                return None
            return self._shapes.setdefault(signature, _Shape(_WARM_UP))
        if not self._said:
            self._said = True
            other = difference(self._usual, batch)
            warn(
                f"a batch differs from the first ({other}), and such batches run one kernel at a time; pad "
                "them to one shape, so that all of them run as a graph."
            )
        return None

    def _eager(self, shape: _Shape | None, batch: Any) -> Any:
        """Run the step eagerly; the last time before the capture is the rehearsal."""
        assert self._graphs is not None
        assert self._host is not None
        self._bound = None
        with self._graphs.side():
            if shape is None or shape.left > 1 or shape.refused or self.why is not None:
                result = self._run(batch)
            else:
                devices = {tensor.device for tensor in tensors_of(batch)}
                with Rehearsal(self._host, devices) as watched, self._graphs.waits() as places:
                    result = self._run(batch)
                more = f" and {len(places) - 1} more" if len(places) > 1 else ""
                shape.rehearsed = (
                    f"it waits for the device at {places[0]}{more}" if places else watched.found()
                )
        if shape is not None:
            shape.left = max(shape.left - 1, 0)
        self._values = self._host.values()
        return result

    def _may_capture(self, shape: _Shape | None) -> bool:
        """Whether to capture now: after the rehearsal; of ranks, all of them."""
        assert self._graphs is not None
        ready = shape is not None and not shape.refused and shape.left == 0
        if ready and shape is not None and isinstance(shape.rehearsed, Gradients):
            ready = shape.rehearsed.ready
            shape.unclear = 0 if ready else shape.unclear + 1
            if shape.unclear == _REHEARSALS:
                ready = True  # to be refused
                shape.rehearsed = (
                    "its gradients are cleared between calls, and whether it adds to them cannot be told; "
                    "clear them in the step"
                )
        if not self._groups:
            return ready
        if self.captured or self._steps <= _WARM_UP_RANKS:
            return False
        return self._graphs.lowest(_READY if ready else _NOT_YET, self._groups) == _READY

    def _capture(self, shape: _Shape, batch: Any) -> _Graph | None:
        """Capture the step on a bank like this batch; None if it cannot be, and for the usual shape never."""
        assert self._graphs is not None
        assert self._host is not None
        saved = self._host.save()
        why: str | None = None
        try:
            gradients = self._check(shape, batch)
            bank = map_tensors(lambda tensor: tensor.clone(), batch)
            settings = self._host.settings()
            self._pool = self._graphs.pool() if self._pool is None else self._pool
            with _casts_of_its_own():
                replay, out = self._graphs.capture(lambda: self._run(bank), self._pool)
            gradients.hold()
            shape.graph, self._settings = _Graph(replay, tensors_of(bank), out, gradients), settings
            self._replaced = []
            why = saved.changes()
        except Exception as error:  # the user's own error is raised again by the eager step
            why = _reason(error, ranks=bool(self._groups))
        finally:
            saved.put_back()
            self._values = self._host.values()
            if shape.graph is None:
                saved.put_back_gradients()
        good = why is None
        if self._groups:
            good = self._graphs.lowest(_READY if good else _NEVER, self._groups) == _READY
        if not good:
            shape.release()
            saved.put_back_gradients()
            shape.refused = True
            # After a capture that failed, torch (2.11, for one) takes no other into its pool, and page-locked
            # memory goes on being recorded to it. The graphs that are in it keep it.
            self._pool, self._replaced = None, []
            if self._usual is not None and shape is self._shapes[self._usual]:
                self.why = why or "another rank could not capture it"
                self.release()
        return shape.graph

    def _check(self, shape: _Shape, batch: Any) -> Gradients:
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
        if not isinstance(shape.rehearsed, Gradients):
            raise NotCaptured(shape.rehearsed or "it has not been rehearsed")
        return shape.rehearsed


def _reason(error: Exception, ranks: bool) -> str:
    """Why a capture failed, and what may help."""
    why = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
    if "legacy stream" in why or (ranks and not isinstance(error, NotCaptured)):
        why += (
            " (what autograd keeps of the default stream cannot be captured: detach losses that are kept, "
            "make DistributedDataParallel under torch.cuda.stream(torch.cuda.Stream()))"
        )
    return why


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Run no finalizer of garbage: one that asks an event (a transfer's, say) would interrupt the capture."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


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
