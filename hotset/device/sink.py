"""``hotset.data_sink``: many training steps in one call from the host.

    sink = hotset.data_sink(train_step, loader, sink_size=100)
    loss = sink()                    # 100 steps; the host gets the last one's

A call takes batches from the queue, going round the loader without end, and runs the step on each. On a GPU
the step is captured as one graph and replayed (:mod:`hotset.device.cuda_graph`). Nothing in a call waits for
the device: the host runs ahead as far as the device's queue of work allows. On the CPU the same call runs the
same steps, in the same order, with the same draws.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch

from hotset._warnings import warn
from hotset.device.batch_cycle import BatchCycle, StepInput
from hotset.device.cuda_graph import Step, graphs_on
from hotset.device.gpu_cache import ResidentBatches
from hotset.device.queue import DeviceQueue
from hotset.device.trees import call, difference, map_tensors, signature_of
from hotset.errors import ArgumentError, StateError
from hotset.policy.sink_size import SizeSearch

__all__ = ["Sink", "data_sink"]


def data_sink(
    fn: Callable[..., Any],
    loader: Iterable[Any],
    sink_size: int | Literal["auto"] = 1,
    *,
    graph: bool | Literal["auto"] = "auto",
    device: Any = None,
    input_signature: Any = None,
    outputs: Literal["last", "all"] = "last",
) -> Sink:
    """Bind a training step and its data into a callable that runs ``sink_size`` steps at a time.

    Each call goes on where the last one stopped, and round the data without end: sinks of 1 step, of an
    epoch (``len(loader)``) and of all epochs at once train alike.

    Args:
        fn: the step: ``fn(*batch)`` for batches that are tuples or lists, ``fn(batch)`` for others. It does
            all that a step does, from ``zero_grad()`` to ``optimizer.step()``, and returns its loss, or any
            tree of tensors and numbers, or nothing.
        loader: a DataLoader, any other iterable of batches, or a :class:`hotset.DeviceQueue`.
        sink_size: steps of a call. ``"auto"`` tries sizes in the first calls, and stays with the smallest one
            past which throughput no longer grows.
        graph: on a GPU, ``"auto"`` captures the step as one graph after a few eager steps (they are steps of
            the training like any others); what cannot be captured is run eagerly, after one warning that
            says why. ``True`` raises instead of warning, ``False`` never captures. On the CPU every step is
            eager.
        device: where the batches go: see :class:`hotset.DeviceQueue`.
        input_signature: tensors (of the meta device, say) of the shapes and dtypes that batches must have;
            the last batch of a pass may have fewer samples.
        outputs: ``"last"`` returns the last step's result, ``"all"`` those of all steps, stacked.

    Raises:
        ArgumentError: an argument is not valid.

    Note:
        After Mindspore's ``mindspore.data_sink``, whose three ways of calling work here. A captured step is
        replayed without its Python: what that does besides (prints, counts in lists) happens once. An
        optimizer within reach of ``fn`` is made ``capturable`` where it can be.

    Example:
        >>> import torch
        >>> weight = torch.zeros((), requires_grad=True)
        >>> optimizer = torch.optim.SGD([weight], lr=0.1)
        >>> def step(x, y):
        ...     optimizer.zero_grad()
        ...     loss = (weight * x - y).square().mean()
        ...     loss.backward()
        ...     optimizer.step()
        ...     return loss
        >>> sink = data_sink(step, [(torch.ones(2), torch.ones(2))], sink_size=20, device="cpu")
        >>> sink().item() < 0.01, sink.steps
        (True, 20)
    """
    return Sink(fn, loader, sink_size, graph, device, input_signature, outputs)


class Sink:
    """A training step bound to its data; made by :func:`data_sink`.

    Attributes:
        queue: where its batches come from.
        steps: that were run so far, over all calls.
        sink_size: as it was given.

    Example:
        >>> sink = data_sink(lambda batch: batch.sum(), [torch.ones(2), torch.zeros(2)], device="cpu")
        >>> sink(), sink(steps=3), sink.steps, sink.epoch
        (tensor(2.), tensor(0.), 4, 2)
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        loader: Any,
        sink_size: Any,
        graph: Any,
        device: Any,
        input_signature: Any,
        outputs: Any,
    ) -> None:
        if not callable(fn):
            raise ArgumentError(f"fn must be callable, got {fn!r}; give the function of one training step.")
        if not isinstance(graph, bool) and graph != "auto":
            raise ArgumentError(f'graph must be "auto", True or False, got {graph!r}.')
        if outputs not in ("last", "all"):
            raise ArgumentError(f'outputs must be "last" or "all", got {outputs!r}.')
        self.sink_size = sink_size
        self._search = SizeSearch() if sink_size == "auto" else None
        self._size = 1 if sink_size == "auto" else _checked(sink_size)
        self.queue: DeviceQueue[Any] = _queue(loader, device)
        self.steps = 0
        self._fn = fn
        self._graph = graph
        self._all = outputs == "all"
        self._expected = signature_of(input_signature) if input_signature is not None else None
        if self._expected == ():
            raise ArgumentError(
                "input_signature must hold tensors, and holds none; give one for each tensor of a batch."
            )
        self._cycle = BatchCycle(self.queue, own=self.queue is not loader)
        self._graphs = graphs_on(self.queue.device) if graph is not False else None
        self._step = self._current = Step(lambda batch: call(fn, batch), fn, self._graphs)
        # A weak reference, so that samples that were released do not keep the device's memory.
        self._resident: tuple[weakref.ref[torch.Tensor], Step] | None = None
        self._has_warned = False

    # ---- what it is ----------------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        """Where the steps' batches are."""
        return self.queue.device

    @property
    def size(self) -> int:
        """Steps of the next call."""
        return self._search.size if self._search is not None else self._size

    @property
    def batches(self) -> int | None:
        """Steps of one pass over the data; None if the loader has no length."""
        return self._cycle.length

    @property
    def epoch(self) -> int:
        """Passes over the data that were completed."""
        return self._cycle.epoch

    @property
    def captured(self) -> bool:
        """Whether steps are replayed as a graph."""
        return self._current.captured

    @property
    def why(self) -> str | None:
        """Why they are not; None if they are, or may be after the first few."""
        if self._graphs is None:
            return "graph=False" if self._graph is False else f"there are no graphs on {self.device.type}"
        return self._current.why

    # ---- steps ---------------------------------------------------------------------------------------

    def __call__(self, steps: int | None = None) -> Any:
        """Run ``steps`` steps (``sink_size`` if None); return the last one's result, or all, stacked.

        Results carry no gradient.

        Raises:
            ArgumentError: the loader is empty; a batch is not as ``input_signature`` says.
            Exception: what the step or the loader raises. What came before counts, and the next call goes on
                after it.
        """
        count = self.size if steps is None else _checked(steps)
        try:
            return self._run(count)
        except BaseException as error:
            if not isinstance(error, Exception):
                self._cycle.give_way()
            raise

    def _run(self, count: int) -> Any:
        begun = time.perf_counter()
        self._current.begin()
        found: list[Any] = []
        result: Any = None
        for left in range(count, 0, -1):
            taken = self._cycle.take(left)
            if self._expected is not None:
                self._check(taken)
            step = self._step_for(taken)
            result = step(taken.batch)
            self.steps += 1
            if step.why is not None:
                self._say_why(step.why)
            if self._all:
                found.append(_kept(result))
        if self._search is not None and not self._search.done:
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            self._search.record(count, count / max(time.perf_counter() - begun, 1e-9))
        return _stacked(found) if self._all else _kept(result)

    def _step_for(self, taken: StepInput) -> Step:
        step = self._step if taken.resident is None else self._step_on(taken.resident)
        if step is not self._current:
            self._current.release()  # two graphs of one step would take its memory twice
            self._current = step
            step.begin()
        return step

    def _step_on(self, resident: ResidentBatches) -> Step:
        first = resident.cache.columns[0]
        if self._resident is None or self._resident[0]() is not first:
            made = Step(_from_rows(self._fn, resident), self._fn, self._graphs)
            self._resident = (weakref.ref(first), made)
        return self._resident[1]

    def _check(self, taken: StepInput) -> None:
        assert self._expected is not None
        batch = taken.batch
        if taken.resident is not None:
            rows, example = len(taken.batch), taken.resident.cache.example
            batch = map_tensors(lambda tensor: tensor.expand(rows, *tensor.shape[1:]), example)
        wrong = difference(self._expected, batch, shorter=self._cycle.may_end)
        if wrong:
            raise ArgumentError(f"a batch does not match input_signature: {wrong}.")

    def _say_why(self, why: str) -> None:
        if self._graph is True:
            raise ArgumentError(f"graph=True, and the step cannot be one graph: {why}.")
        if not self._has_warned:
            self._has_warned = True
            warn(f"steps are run one kernel at a time, as the step cannot be one graph: {why}.")

    # ---- life ----------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Where in the data it stands, in plain values; model, optimizer and random states are not in it.

        Raises:
            StateError: the loader cannot say where it stands (hotset.DataLoader can).
        """
        return {"steps": self.steps, **self._cycle.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from where the sink that gave this state stood.

        Raises:
            StateError: it is not such a state, or the loader cannot continue from it.
        """
        try:
            steps = int(state["steps"])
        except (TypeError, KeyError, ValueError) as error:
            raise StateError(
                f"state must be what Sink.state_dict() returned, and is something else or damaged: {error!r}."
            ) from error
        self._cycle.load_state_dict(state)
        self.steps = steps

    def close(self) -> None:
        """Let go of the loader, and of the graph with its memory. The next call begins a new pass."""
        self._step.release()
        self._current.release()
        self._resident = None
        self._cycle.close()

    def __enter__(self) -> Sink:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _from_rows(fn: Callable[..., Any], resident: ResidentBatches) -> Callable[[torch.Tensor], Any]:
    cache = resident.cache
    return lambda rows: call(fn, cache.select(rows))


def _checked(size: Any) -> int:
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise ArgumentError(f'sink_size must be a number of steps, 1 or more, or "auto", got {size!r}.')
    return size


def _queue(loader: Any, device: Any) -> DeviceQueue[Any]:
    if not isinstance(loader, DeviceQueue):
        return DeviceQueue(loader, device=device)
    if device is not None and DeviceQueue([], device=device).device != loader.device:
        raise ArgumentError(f"device must be the queue's, {loader.device}, got {device!r}; leave it out.")
    return loader


def _kept(result: Any) -> Any:
    """A result that no later step overwrites: a graph's, or a total that the step adds to."""
    return map_tensors(lambda tensor: tensor.detach().clone(), result)


def _stacked(results: list[Any]) -> Any:
    """The results of several steps as one tree, each leaf with the steps as its first dimension.

    Where they are not of one make (shapes differ, or one step returns nothing), the list of them.
    """
    first = results[0]
    if all(isinstance(one, (int, float)) for one in results):
        floats = any(isinstance(one, float) for one in results)
        return torch.tensor(results, dtype=torch.float64 if floats else None)
    if any(type(one) is not type(first) for one in results):
        return results
    if isinstance(first, torch.Tensor):
        alike = len({(one.shape, one.dtype) for one in results}) == 1
        return torch.stack(results) if alike else results
    if isinstance(first, dict):
        alike = all(one.keys() == first.keys() for one in results)
        return {key: _stacked([one[key] for one in results]) for key in first} if alike else results
    if isinstance(first, (list, tuple)):
        if any(len(one) != len(first) for one in results):
            return results
        parts = (_stacked(list(part)) for part in zip(*results, strict=True))
        return first._make(parts) if hasattr(first, "_make") else type(first)(parts)
    return None if first is None else results
