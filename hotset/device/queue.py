"""``hotset.DeviceQueue``: a loader's batches on the device, sent ahead of use.

    loader ── next() ──> lane.send ──> [ sent, sent ] ──> lane.receive ──> the step
              in the consumer's thread       depth

Batches are drawn from a DataLoader in the consumer's thread, where torch would draw them (it works ahead in
workers and threads of its own); from any other iterable in a thread of ours (:mod:`hotset.device.ahead`). To
a GPU they are sent up to ``depth`` batches ahead (:mod:`hotset.device.lanes`). On the CPU nothing is sent,
and a DataLoader's batch is drawn when it is asked for: the draws of model and data come in the order in which
a plain loop makes them.

A pass does not reach into the next one: what a sampler draws at its beginning comes after the last step of
the pass before.
"""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch.utils.data import DataLoader

from hotset.device.ahead import Ahead
from hotset.device.lanes import Lane, lane_to, resolve_device
from hotset.device.resident import Residents, Serving, parse_resident
from hotset.device.trees import others, tensors_of
from hotset.device.watch import Watch
from hotset.errors import ArgumentError, StateError
from hotset.told import tell

__all__ = ["DeviceQueue", "QueueStats"]

T = TypeVar("T")

_TIMEOUT = 60.0
_LAST_FETCHES = 5

# Which queue reads a loader at present: two that take turns at one loader would each get a part of its data.
_readers: weakref.WeakKeyDictionary[Any, weakref.ref[_Pass]] = weakref.WeakKeyDictionary()


class QueueStats(NamedTuple):
    """What a queue has done since it was made.

    Attributes:
        batches: handed over.
        bytes: of their tensors.
        waited: seconds that the consumer waited for the loader.
        resident: samples that are kept on the device.
    """

    batches: int
    bytes: int
    waited: float
    resident: int


class DeviceQueue(Generic[T]):
    """Batches of a loader on a device; each ``for`` is one pass over the loader.

    On a GPU the copies of the next batches run while the step computes. The same program runs on the CPU,
    where a DataLoader's batches are handed over as they are.

    Args:
        loader: a DataLoader, or any iterable of batches: tensors, in dicts, lists, tuples, namedtuples and
            dataclasses. What is no tensor stays as it is, on the host.
        depth: how many batches are sent ahead of use; 0 for none.
        device: where to; the machine's accelerator if None, and the CPU where there is none.
        resident: how much of the device's memory samples may take for good, as bytes or text ("40GiB").
            Once a loader's samples are all cached by ``hotset.cache`` with nothing live after it, as many as
            fit are kept there, and batches are gathered on the device. On the CPU the cache is in memory
            already, and nothing is kept twice.
        timeout: seconds of waiting for a batch after which a warning says what starves.

    Raises:
        ArgumentError: depth, resident or timeout are not what they may be; there is no such device; the
            loader cannot be iterated over.

    Example:
        >>> import torch
        >>> queue = DeviceQueue([torch.zeros(2), torch.ones(2)], device="cpu")
        >>> [batch.tolist() for batch in queue]
        [[0.0, 0.0], [1.0, 1.0]]
    """

    def __init__(
        self,
        loader: Iterable[T],
        depth: int = 2,
        device: Any = None,
        resident: int | str | None = None,
        *,
        timeout: float = _TIMEOUT,
    ) -> None:
        if not hasattr(loader, "__iter__"):
            raise ArgumentError(f"{type(loader).__name__} cannot be iterated over; give a DataLoader.")
        if isinstance(depth, bool) or not isinstance(depth, int) or depth < 0:
            raise ArgumentError(f"depth={depth!r} is no number of batches; give 0, 1, 2 or so.")
        if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not timeout > 0:
            raise ArgumentError(f"timeout={timeout!r} is no time; give a number of seconds above zero.")
        self.loader = loader
        self.depth = depth
        self.device = _device(device)
        self.timeout = float(timeout)
        self.resident = parse_resident(resident)
        self._residents: Residents | None = None
        if self.resident is not None and self.device.type != "cpu":
            self._residents = Residents(self.resident, self.device)
        self._lane: Lane | None = None
        self._pass: _Pass | None = None
        self._said = False
        self._batches = self._bytes = 0
        self._waited = 0.0

    def __iter__(self) -> Iterator[T]:
        if self._pass is not None:
            self._pass.close()
        if self._lane is None:
            self._lane = lane_to(self.device)
        self._pass = _Pass(self, self._lane)
        return self._pass

    def __len__(self) -> int:
        """Batches of a pass.

        Raises:
            TypeError: the loader has no length.
        """
        return len(self.loader)  # type: ignore[arg-type]

    def stats(self) -> QueueStats:
        """What it has done so far."""
        kept = self._residents.count if self._residents is not None else 0
        return QueueStats(self._batches, self._bytes, self._waited, kept)

    def state_dict(self) -> dict[str, Any]:
        """The loader's state after the last batch that was handed over: those sent ahead are sent again.

        Raises:
            StateError: the loader has no state.
        """
        if not hasattr(self.loader, "state_dict"):
            raise StateError(
                f"a {type(self.loader).__module__}.{type(self.loader).__name__} cannot say where it stands; "
                "hotset.DataLoader can, with the same arguments, over a data set without a cache too."
            )
        if self._pass is not None and self._pass.state is not None:
            return self._pass.state
        state: dict[str, Any] = self.loader.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on, with the next pass, where the loader that gave this state had stopped.

        Raises:
            StateError: the loader cannot, or not from this state.
        """
        if not hasattr(self.loader, "load_state_dict"):
            raise StateError(
                f"a {type(self.loader).__name__} cannot go on from a state; take hotset.DataLoader."
            )
        self.close()
        self.loader.load_state_dict(state)

    def close(self) -> None:
        """End the pass under way, and let go of what is on the device. It can be iterated over again."""
        if self._pass is not None:
            self._pass.close()
            self._pass = None
        if self._lane is not None:
            self._lane.close()
            self._lane = None
        if self._residents is not None:
            self._residents.clear()

    def __enter__(self) -> DeviceQueue[T]:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- for the pass --------------------------------------------------------------------------------

    def count(self, batch: Any) -> None:
        """Count a batch that is handed over; say once what of it stays on the host."""
        tensors = tensors_of(batch)
        self._batches += 1
        self._bytes += sum(tensor.nbytes for tensor in tensors)
        if self._said or self.device.type == "cpu":
            return
        self._said = True
        left = others(batch)
        if left:
            place, value = left[0]
            tell(
                f"batches hold a {type(value).__name__} at {place or 'their top'}, which stays on the host"
                + (f", as do {len(left) - 1} more values" if len(left) > 1 else "")
                + "; only tensors are copied to the device."
            )

    def count_waiting(self, seconds: float) -> None:
        """Count time for which the consumer waited for the loader."""
        self._waited += seconds

    @property
    def residents(self) -> Residents | None:
        """The samples that are kept on the device; None if none are to be."""
        return self._residents


class _Pass:
    """One pass over a queue's loader. It begins with its first batch: who only looks whether a queue can be
    iterated over (Lightning does) begins nothing, and draws nothing.

    Attributes:
        state: of the loader before the first batch that is not handed over yet; None if that is the loader's
            own.
    """

    def __init__(self, queue: DeviceQueue[Any], lane: Lane) -> None:
        loader = queue.loader
        self._queue = queue
        self._lane = lane
        self._loader = loader
        self._closed = self._over = False
        self._ended: Exception | None = None
        self._sent: deque[tuple[Any, dict[str, Any] | None]] = deque()
        self._took: deque[float] = deque(maxlen=_LAST_FETCHES)
        self.state: dict[str, Any] | None = None
        self._ahead = queue.depth if lane.ahead else 0
        self._snapshot = loader.state_dict if self._ahead and hasattr(loader, "state_dict") else None
        self._source: Iterator[Any] | None = None
        self._residents: Serving | None = None
        self._watch: Watch | None = None

    def _begin(self) -> Iterator[Any]:
        """What gives the batches, begun now if it has not been."""
        if self._source is None:
            queue, loader = self._queue, self._loader
            self._claim(loader)
            own = isinstance(loader, DataLoader) or queue.depth == 0
            self._source = iter(loader) if own else Ahead(loader, queue.depth)
            self._residents = queue.residents.serve(self._source) if queue.residents is not None else None
            # After the loader's workers were forked: threads are better begun then.
            self._watch = Watch(queue.timeout, _Starving(self._took, queue))
        return self._residents if self._residents is not None else self._source

    def _claim(self, loader: Any) -> None:
        try:
            found = _readers.get(loader)
            reader = found() if found is not None else None
            if reader is not None and reader._queue is not self._queue and reader.reads:
                raise ArgumentError(
                    f"this {type(loader).__name__} is being read by another queue or sink, and each would "
                    "get a part of its batches; make a loader for each, or close() the other."
                )
            _readers[loader] = weakref.ref(self)
        except TypeError:  # a list cannot be referred to weakly, and can be read by many
            return

    @property
    def reads(self) -> bool:
        """Whether it is under way."""
        return self._source is not None and not (self._closed or self._over)

    def __iter__(self) -> _Pass:
        return self

    def __next__(self) -> Any:
        if self._closed:
            raise ArgumentError(
                "this pass was ended, as the queue was closed or iterated over anew; make a queue for each "
                "loop that is to run at one time."
            )
        if self._over:
            raise StopIteration
        while self._ended is None and len(self._sent) <= self._ahead:
            self._send_one()
        if not self._sent:
            error, self._ended = self._ended, None
            if isinstance(error, StopIteration):
                self._over = True
                self._stop_watch()
            assert error is not None
            raise error
        sent, _ = self._sent.popleft()
        self.state = self._sent[0][1] if self._sent else None
        batch = self._lane.receive(sent)
        self._queue.count(batch)
        return batch

    def _send_one(self) -> None:
        """Draw a batch and send it; what is raised is kept until its turn comes."""
        source = self._begin()
        assert self._watch is not None
        state = self._snapshot() if self._snapshot is not None else None
        begun = time.perf_counter()
        try:
            with self._watch:
                batch = next(source)
        except Exception as error:  # StopIteration, or whatever the user's code raises
            self._ended = error
            return
        finally:
            self._took.append(time.perf_counter() - begun)
            self._queue.count_waiting(self._took[-1])
        self._sent.append((self._lane.send(batch), state))

    def close(self) -> None:
        self._closed = True
        self._stop_watch()
        self._sent.clear()
        if isinstance(self._source, Ahead):
            self._source.stop()

    def _stop_watch(self) -> None:
        if self._watch is not None:
            self._watch.stop()

    @property
    def serving(self) -> Serving | None:
        """The resident samples; None if there are none."""
        self._begin()
        return self._residents


class _Starving:
    """What to say of a consumer that waits. It holds nothing of the pass: the watch would keep it alive."""

    def __init__(self, took: deque[float], queue: DeviceQueue[Any]) -> None:
        self._took = took
        self._kind = type(queue.loader).__name__
        self._timeout = queue.timeout
        self._workers = getattr(queue.loader, "num_workers", None)

    def __call__(self, seconds: float) -> str:
        took = ", ".join(f"{one:.3g}" for one in self._took) or "none yet"
        knob = (
            f"num_workers={self._workers}: raise it, or cache the data set (hotset.cache)"
            if self._workers is not None
            else "make it faster, or cache its data set (hotset.cache)"
        )
        return (
            f"the step has waited {seconds:.0f} s for a batch: its {self._kind} gives none, and nothing was "
            f"left in the queue. The last fetches took {took} s. {knob}; if this is as it should be, raise "
            f"timeout={self._timeout:g} of the DeviceQueue."
        )


def _device(device: Any) -> torch.device:
    try:
        found = resolve_device(device)
        if found.type != "cpu":
            torch.empty(0, device=found)
    except (RuntimeError, TypeError, AssertionError) as error:
        raise ArgumentError(f"device={device!r} is not there: {str(error).splitlines()[0]}") from error
    return found
