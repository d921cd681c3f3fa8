"""``hotset.DeviceQueue``: a loader's batches on the device, sent ahead of use.

    loader ── next() ──> transfer.send ──> [ sent, sent ] ──> transfer.receive ──> the step
              in the consumer's thread       depth

To a GPU, batches are sent up to ``depth`` batches ahead (:mod:`hotset.device.transfer`). On the CPU nothing
is sent, and a DataLoader's batch is fetched when it is asked for: the draws of model and data come in the
order in which a plain loop makes them. A pass begins after the last step of the pass before, so that is when
its sampler makes its first draws.

=====================  ====================================================================================
what is iterated over  which thread reads it
=====================  ====================================================================================
a DataLoader, and      the consumer's. It works ahead in workers and threads of its own, and draws random
anything with a state  numbers where it is asked for the next batch: in another thread these draws would
                       race the model's dropout
any other iterable     a prefetch thread, up to ``depth`` items ahead: a generator that reads a socket, or a
                       list, prepares nothing by itself. For one that draws from global generators,
                       give ``depth=0``
=====================  ====================================================================================

An exception of the loader, in whichever thread, is raised at the consumer when its batch's turn comes. A
stall monitor, another thread, warns of waits that last too long.
"""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch.utils.data import DataLoader

from hotset._warnings import warn
from hotset.device.gpu_cache import GpuCache, ResidentBatches, parse_resident
from hotset.device.prefetch_thread import PrefetchThread
from hotset.device.stall_monitor import StallMonitor
from hotset.device.transfer import Transfer, resolve_device, transfer_to
from hotset.device.trees import HostSizes, others, tensors_of
from hotset.errors import ArgumentError, StateError

__all__ = ["DeviceQueue", "QueuePass", "QueueStats"]

T = TypeVar("T")

_TIMEOUT = 60.0
_LAST_FETCHES = 5

# Which pass reads a loader now: two queues that read one loader would each get a part of its data.
_readers: weakref.WeakKeyDictionary[Any, weakref.ref[QueuePass[Any]]] = weakref.WeakKeyDictionary()


class QueueStats(NamedTuple):
    """What a queue has done since it was made.

    Attributes:
        batches: handed over.
        bytes: of their dense tensors.
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
            dataclasses. Other values stay on the host as they are.
        depth: how many batches are sent ahead of use; 0 for none.
        device: where to; the machine's accelerator if None, and the CPU where there is none.
        resident: how much of the device's memory samples may take for good, as bytes or text ("40GiB");
            "50%" is of what is free there.
            Once a loader's samples are all cached by ``hotset.cache`` with nothing live after it, as many as
            fit are kept there, and batches are gathered on the device. On the CPU the cache is in memory
            already, and nothing is kept twice.
        timeout: seconds of waiting for a batch after which a warning says what starves.

    Raises:
        ArgumentError: an argument is out of its range; the machine has no such device; the loader cannot be
            iterated over.

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
            raise ArgumentError(f"loader must be iterable, got {type(loader).__name__}; give a DataLoader.")
        if isinstance(depth, bool) or not isinstance(depth, int) or depth < 0:
            raise ArgumentError(f"depth must be a number of batches, 0 or more, got {depth!r}; give 2.")
        if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not timeout > 0:
            raise ArgumentError(f"timeout must be a positive number of seconds, got {timeout!r}; give 60.")
        self.loader = loader
        self.depth = depth
        self.device = _device(device)
        self.timeout = float(timeout)
        self.resident = parse_resident(resident, self.device)
        self._gpu_cache: GpuCache | None = None
        if self.resident is not None and self.device.type != "cpu":
            self._gpu_cache = GpuCache(self.resident, self.device)
        self._transfer: Transfer | None = None
        self._pass: QueuePass[T] | None = None
        self._state: dict[str, Any] | None = None
        self._tally = _Tally(self.device)

    def __iter__(self) -> QueuePass[T]:
        self.end_pass()
        if self._transfer is None:
            self._transfer = transfer_to(self.device, self.depth)
        begun = self._pass = QueuePass(self, self._transfer)
        return begun

    def __len__(self) -> int:
        """Batches of a pass.

        Raises:
            TypeError: the loader has no length.
        """
        return len(self.loader)  # type: ignore[arg-type]

    def stats(self) -> QueueStats:
        """What it has done so far."""
        kept = self._gpu_cache.count if self._gpu_cache is not None else 0
        return QueueStats(self._tally.batches, self._tally.bytes, self._tally.waited, kept)

    def state_dict(self) -> dict[str, Any]:
        """The loader's state after the last batch that was handed over: those sent ahead are sent again.

        Raises:
            StateError: the loader has no state.
        """
        if not hasattr(self.loader, "state_dict"):
            raise StateError(
                f"a {type(self.loader).__module__}.{type(self.loader).__name__} cannot say where it stands; "
                "hotset.DataLoader can, with the same arguments, over a dataset without a cache too."
            )
        ahead = self._pass.state if self._pass is not None else self._state
        state: dict[str, Any] = self.loader.state_dict() if ahead is None else ahead
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
        self._state = None

    def close(self) -> None:
        """End the pass under way, and free what is on the device. The queue can be iterated over again."""
        self.end_pass()
        if self._transfer is not None:
            self._transfer.close()
            self._transfer = None
        if self._gpu_cache is not None:
            self._gpu_cache.clear()

    def end_pass(self) -> None:
        """End the pass under way; what is resident on the device stays."""
        if self._pass is not None:
            self._pass.close()
            self._state = self._pass.state
            self._pass = None

    def __enter__(self) -> DeviceQueue[T]:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Tally:
    """What a queue counts, of all its passes. They hold this instead of the queue, which holds the last one:
    in a cycle workers and threads would live until the garbage collector comes.
    """

    def __init__(self, device: torch.device) -> None:
        self.batches = self.bytes = 0
        self.waited = 0.0
        self._said = device.type == "cpu"  # where nothing is brought anywhere

    def count(self, batch: Any) -> None:
        """Count a batch that is handed over; say once what of it stays on the host."""
        self.batches += 1
        self.bytes += sum(one.nbytes for one in tensors_of(batch) if one.layout is torch.strided)
        if self._said:
            return
        self._said = True
        left = [(place, value) for place, value in others(batch) if not isinstance(value, HostSizes)]
        if left:
            place, value = left[0]
            warn(
                f"batches hold a {type(value).__name__} at {place or 'their top'}, which stays on the host"
                + (f", as do {len(left) - 1} more values" if len(left) > 1 else "")
                + "; only tensors are copied to the device."
            )


class _Fetched(NamedTuple):
    """A batch that was sent, or the error that came in its place; and the loader's state before it."""

    sent: Any
    error: Exception | None
    state: dict[str, Any] | None


class QueuePass(Generic[T]):
    """One pass over a queue's loader. It begins with its first batch: a caller that only checks whether a
    queue can be iterated over (Lightning does) begins nothing, and draws nothing.

    Attributes:
        state: of the loader before the first batch that is not handed over yet; None if that is the loader's
            own.
    """

    def __init__(self, queue: DeviceQueue[T], transfer: Transfer) -> None:
        self._queue = weakref.ref(queue)
        self._tally = queue._tally
        self._transfer = transfer
        self._loader: Any = queue.loader
        self._depth = queue.depth
        self._gpu_cache = queue._gpu_cache
        self._stall = _StallWarning(queue)
        self._closed = self._over = self._stuck = False
        self._gives_way = False
        self._fetched: deque[_Fetched] = deque()
        self.state = queue._state
        self._ahead = queue.depth if transfer.ahead else 0
        self._given = 0  # batches that were handed over, and errors
        self._stateful = hasattr(self._loader, "state_dict")
        self._source: Iterator[Any] | None = None
        self._resident: ResidentBatches | None = None
        self._watch: StallMonitor | None = None

    def _begin(self) -> Iterator[Any]:
        """What gives the batches, begun now if it has not been."""
        if self._source is None:
            loader = self._loader
            self._claim(loader)
            # The state of a loader would count what a thread has read, not what was handed over.
            own = isinstance(loader, DataLoader) or self._stateful or self._depth == 0
            self._source = iter(loader) if own else PrefetchThread(loader, self._depth)
            self._resident = self._gpu_cache.serve(self._source) if self._gpu_cache is not None else None
            # After the loader's workers were forked: threads are better begun then.
            self._watch = StallMonitor(self._stall.timeout, self._stall)
        return self._resident if self._resident is not None else self._source

    def _claim(self, loader: Any) -> None:
        try:
            found = _readers.get(loader)
            reader = found() if found is not None else None
            if reader is not None and reader is not self and reader.reads:
                if reader._gives_way:
                    reader.close()
                    return self._claim(loader)
                raise ArgumentError(
                    f"this {type(loader).__name__} is being read by another queue or sink, and each would "
                    "get a part of its batches; make a loader for each, or close() the other."
                )
            _readers[loader] = weakref.ref(self)
        except TypeError:  # a list cannot be referred to weakly, and can be read by many
            return None

    @property
    def reads(self) -> bool:
        """Whether it is under way."""
        return self._source is not None and not (self._closed or self._over)

    def __iter__(self) -> QueuePass[T]:
        return self

    def __next__(self) -> T:
        if self._closed:
            raise ArgumentError(
                "this pass was ended, as the queue was closed or iterated over anew, or was interrupted and "
                "another one reads its loader; make a queue for each loop, and a loader for each queue."
            )
        if self._over:
            raise StopIteration
        self._gives_way = False
        # One more is sent ahead of each batch than of the one before: the first step waits for its own alone.
        while not self._stuck and len(self._fetched) <= min(self._ahead, self._given):
            self._fetch_one()
        sent, error, _ = self._fetched.popleft()
        self._given += 1
        self.state = self._fetched[0].state if self._fetched else None
        if error is not None:
            self._stuck = False
            if isinstance(error, StopIteration):
                self._over = True
                self._stop_watch()
            try:
                raise error
            finally:
                del error  # its traceback holds this frame, and workers end when the frame does
        batch: T = self._transfer.receive(sent)
        self._tally.count(batch)
        return batch

    def _fetch_one(self) -> None:
        """Fetch a batch and send it; what is raised is kept until its turn comes."""
        source = self._begin()
        assert self._watch is not None
        state = self._loader.state_dict() if self._ahead and self._stateful else None
        self._stall.sent = len(self._fetched)
        begun = time.perf_counter()
        try:
            try:
                batch = self._watch.watched(partial(next, source))
            finally:
                took = time.perf_counter() - begun
                self._stall.took.append(took)
                self._tally.waited += took
            self._fetched.append(_Fetched(self._transfer.send(batch), None, state))
        except Exception as error:  # StopIteration, or whatever the user's code raises
            self._stuck = True
            self._fetched.append(_Fetched(None, error, state))
        except BaseException:
            self.give_way()
            raise

    def give_way(self) -> None:
        """Its consumer was interrupted: until it goes on, another pass over the loader ends this one.

        A traceback may be all that holds it, as in a notebook, where nobody can close it any more.
        """
        self._gives_way = True

    def close(self) -> None:
        self._closed = True
        self._stop_watch()
        self._fetched.clear()
        if isinstance(self._source, PrefetchThread):
            self._source.stop()  # a traceback may hold it for long
        # Workers end with their iterator, and the consumer may hold this pass for long.
        self._source, self._resident = None, None

    def _stop_watch(self) -> None:
        if self._watch is not None:
            self._watch.stop()

    def count(self, batch: Any) -> None:
        """Count a batch that is handed over in another way than by ``next()``."""
        self._tally.count(batch)

    @property
    def resident(self) -> ResidentBatches | None:
        """The resident samples; None if there are none, or if the pass was ended."""
        if not self._closed:
            self._begin()
        return self._resident


class _StallWarning:
    """The warning about a consumer that waits. It holds nothing of the pass, which the monitor's thread would
    keep alive.

    Attributes:
        timeout: seconds of patience.
        took: seconds, of the last fetches.
        sent: batches that were on their way when the waiting began.
    """

    def __init__(self, queue: DeviceQueue[Any]) -> None:
        self.took: deque[float] = deque(maxlen=_LAST_FETCHES)
        self.sent = 0
        self._depth = queue.depth
        self._kind = type(queue.loader).__name__
        self.timeout = queue.timeout
        self._workers = getattr(queue.loader, "num_workers", None)

    def __call__(self, seconds: float) -> str:
        took = ", ".join(f"{one:.3g}" for one in list(self.took))  # the consumer appends
        last = f" The last fetches took {took} s." if took else ""
        left = f"{self.sent} of depth={self._depth} batches are" if self.sent else "nothing is"
        knob = f"Raise num_workers={self._workers}" if self._workers is not None else "Make it faster"
        return (
            f"the step has waited {seconds:.0f} s for a batch: its {self._kind} gives none, and {left} left "
            f"in the queue.{last} {knob}, or cache the dataset (hotset.cache); if this is as it should be, "
            f"raise timeout={self.timeout:g} of the DeviceQueue."
        )


def _device(device: Any) -> torch.device:
    try:
        found = resolve_device(device)
        if found.type != "cpu":
            torch.empty(0, device=found)
    except (RuntimeError, TypeError, AssertionError, ImportError) as error:
        why = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ArgumentError(f"device must be one that this machine has, got {device!r}: {why}") from error
    return found
