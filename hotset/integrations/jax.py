"""JAX: K steps of a jitted function in one ``lax.scan``, fed from a loader.

::

    host     take K batches ─> bank ─┐   take the next K ─> bank ─┐   take ...
    device                           └─> scan: K steps ───────────┴─> scan: K steps ──
                                         (dispatched, not waited for)

Each step costs the host a dispatch, and training waits for that if steps are short. In a scan the loop runs
on the device: the host dispatches once for K steps, and takes the next K batches meanwhile.

**A batch is copied once, and never aliased.** It is copied to its row of a *bank*, ``[K, *shape]`` on the
host, as soon as it is taken, so that its memory can be used again. Passing the batch's own memory to JAX (by
dlpack, or as a numpy array) was rejected: JAX may use it as its device's memory, and a loader that writes the
next batch there would change it under the running step. A bank is written once. Its start is aligned as JAX
needs it, so on the CPU the bank *is* the device's memory.

**Only equal batches are stacked.** The batches of a scan have the same tree, shapes and dtypes (their
*layout*). Before a batch that differs, as a shorter last one does, the scan ends; the batch gets a scan of
its own, and the order stays. JAX compiles for each layout and each number of steps, and as scans end with
passes, a call may need any number of steps. So the first few lengths are compiled as they are, and others are
composed of powers of two.

**The carry is donated**: the next carry uses its memory. What the user passed in is copied first. A view of
the carry (numpy's, torch's) keeps its values, because JAX copies then. On the CPU, JAX 0.7 waits for a step
with a donation, so the host takes batches after it, not meanwhile; JAX 0.10 does not wait.

**On the CPU a scan may be slower.** XLA's code for convolutions on the CPU is slower within a loop than
outside: a LeNet-5 step takes 1.7 times as long in a scan (JAX 0.7.1 and 0.10.2, two cores and one).
"""

from __future__ import annotations

import math
import operator
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from hotset.device.batch_cycle import BatchCycle
from hotset.device.queue import DeviceQueue
from hotset.errors import ArgumentError

__all__ = ["JaxSink"]

C = TypeVar("C")

_ALIGNMENT = 64  # bytes; JAX copies host memory that begins elsewhere
_EXACT = 4  # how many lengths of scans, besides the usual one, are compiled as they are


class JaxSink(Generic[C]):
    """Runs ``sink_size`` steps in each call, on batches that continue where the last call stopped, endlessly.

    Batches are taken in the calling thread. The first call takes its own; each call then takes the next
    call's batches while the device works. So ``2 * sink_size`` batches are on the device, and everything that
    draws random numbers or counts batches (:meth:`hotset.DataLoader.state_dict`) is one call ahead. A loader
    with workers starts them here, and JAX warns of any fork: give the loader
    ``multiprocessing_context="forkserver"``. A loader that gathers from a full cache starts no workers.

    Args:
        step: ``step(carry, batch) -> (carry, out)``, as for ``lax.scan``; it is compiled here. The batch has
            the loader's tree, of JAX arrays; int64 and float64 become 32 bits wide, unless JAX is configured
            otherwise (``jax_enable_x64``).
        carry: the first step's carry: a tree of arrays and numbers. It is copied.
        loader: an iterable of batches, each a tree (of dicts, lists, tuples, and types registered with JAX)
            of torch tensors on the CPU, numpy arrays or numbers. It is iterated over repeatedly.
        sink_size: how many steps a call runs.
        outputs: ``"last"``: a call returns the last step's ``out``; ``"all"``: those of all steps, stacked
            along a new first dimension of ``sink_size``.

    Attributes:
        carry: of the last step.
        steps: how many steps have run.
        epoch: how many passes over the data they have completed.
        sink_size: how many steps a call runs.

    Raises:
        ArgumentError: ``sink_size`` is not a positive number, or ``outputs`` is neither of the two.
        ImportError: JAX is not installed.

    Example:
        >>> import hotset, torch
        >>> from torch.utils.data import TensorDataset
        >>> cached = hotset.cache(TensorDataset(torch.arange(10)), memory="1MiB")
        >>> def step(total, batch):
        ...     (numbers,) = batch
        ...     return total + numbers.sum(), len(numbers)
        >>> sink = JaxSink(step, 0, hotset.DataLoader(cached, batch_size=4), sink_size=3, outputs="all")
        >>> total, sizes = sink()
        >>> int(total), sizes.tolist(), sink.steps
        (45, [4, 4, 2], 3)
    """

    def __init__(
        self,
        step: Callable[[C, Any], tuple[C, Any]],
        carry: C,
        loader: Iterable[Any],
        sink_size: int = 1,
        *,
        outputs: str = "last",
    ) -> None:
        if outputs not in ("last", "all"):
            raise ArgumentError(f'outputs must be "last" or "all", got {outputs!r}.')
        self.sink_size = _positive(sink_size)
        self.steps = 0
        self.epoch = 0
        self._jax = _import_jax()
        self.carry: C = self._jax.tree.map(self._own, carry)
        self._all = outputs == "all"
        self._run = self._jax.jit(self._scan_of(step), donate_argnums=0)
        self._lengths: dict[Any, set[int]] = {}
        queue = loader if isinstance(loader, DeviceQueue) else DeviceQueue(loader, depth=0, device="cpu")
        self._cycle = BatchCycle(queue, own=queue is not loader)
        self._ready: deque[_Part] = deque()
        self._failure: Exception | None = None

    def __call__(self) -> tuple[C, Any]:
        """Run the next ``sink_size`` steps.

        Returns:
            The carry, and what ``outputs`` selects. JAX computes them while the host goes on; reading a value
            waits for it. The carry's arrays are valid until the next call, which uses their memory: copy what
            you keep.

        Raises:
            ArgumentError: the loader is empty; a batch holds text, or is not a tree of arrays; the outputs of
                steps that are to be stacked differ in shape.
            Exception: what the loader raises, in the call that takes the batch.
        """
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure
        self._take()
        epoch = self._cycle.epoch
        outs = []
        while self._ready:
            part = self._ready[0]
            self.carry, out = self._run(self.carry, part.batches)
            self._ready.popleft()
            self.steps += part.steps
            outs.append(out)
        self.epoch = epoch
        try:
            self._take()
        except Exception as error:  # it belongs to the next call: the steps of this one are done
            self._failure = error
        return self.carry, self._together(outs)

    def close(self) -> None:
        """Release the loader, and the batches taken ahead. The next call begins a new pass."""
        self._ready.clear()
        self._failure = None
        self._cycle.close()

    def __enter__(self) -> JaxSink[C]:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- steps ---------------------------------------------------------------------------------------

    def _scan_of(self, step: Callable[[C, Any], tuple[C, Any]]) -> Callable[[C, Any], tuple[C, Any]]:
        scan, tree_map, stacked = self._jax.lax.scan, self._jax.tree.map, self._all

        def run(carry: C, batches: Any) -> tuple[C, Any]:
            carry, outs = scan(step, carry, batches)
            return carry, outs if stacked else tree_map(lambda out: out[-1], outs)

        return run

    def _own(self, leaf: Any) -> Any:
        """A copy of a leaf of the carry, of the type that steps return: a copy may be donated."""
        array = self._jax.numpy.array(leaf, copy=True)
        # Python's numbers have a weak type, which no step returns: the step would be compiled twice.
        return array.astype(array.dtype) if getattr(array, "weak_type", False) else array

    def _together(self, outs: list[Any]) -> Any:
        if not self._all or len(outs) == 1:
            return outs[-1]
        try:
            return self._jax.tree.map(lambda *parts: self._jax.numpy.concatenate(parts), *outs)
        except (TypeError, ValueError) as error:
            raise ArgumentError(
                f"the steps have run, but their outputs cannot be stacked ({error}): a batch of another "
                'shape has an output of another shape. Use drop_last=True, or outputs="last".'
            ) from error

    # ---- batches -------------------------------------------------------------------------------------

    def _take(self) -> None:
        """Bring the batches of a whole call to the device, fewer if an interrupted call has left some."""
        missing = self.sink_size - sum(part.steps for part in self._ready)
        bank: _Bank | None = None
        try:
            while missing:
                arrays, tree = self._arrays(self._cycle.take(missing).batch)
                layout = (tree, tuple((array.shape, array.dtype) for array in arrays))
                if bank is None or bank.layout != layout:
                    self._send(bank)
                    bank = _Bank(layout, [self._room(missing, array) for array in arrays])
                bank.add(arrays)
                missing -= 1
        finally:  # batches taken before an error, or Ctrl-C, are sent too, and wait for their steps
            self._send(bank)

    def _send(self, bank: _Bank | None) -> None:
        """Send what a bank holds to the device, in parts of lengths for which the step is compiled.

        What was sent of it before an error is not sent again: no step runs twice on a batch.
        """
        if bank is None or bank.sent == bank.count:
            return
        for count in self._split(bank.layout, bank.count - bank.sent):
            rows = [array[bank.sent : bank.sent + count] for array in bank.arrays]
            batches = self._jax.tree.unflatten(bank.layout[0], self._jax.device_put(rows))
            self._ready.append(_Part(count, batches))
            bank.sent += count

    def _split(self, layout: Any, count: int) -> list[int]:
        known = self._lengths.setdefault(layout, {self.sink_size})
        if count in known or len(known) <= _EXACT:
            known.add(count)
            return [count]
        return [1 << bit for bit in reversed(range(count.bit_length())) if count >> bit & 1]

    def _arrays(self, batch: Any) -> tuple[list[npt.NDArray[Any]], Any]:
        """A batch's leaves, over its own memory, and its tree."""
        leaves, tree = self._jax.tree.flatten(batch)
        arrays = [_array(leaf) for leaf in leaves]
        for number, array in enumerate(arrays):
            if array is None or not self._is_number(array.dtype):
                path, leaf = self._jax.tree_util.tree_flatten_with_path(batch)[0][number]
                place = self._jax.tree_util.keystr(path)
                raise ArgumentError(
                    f"a batch holds {_described(leaf)}{' at ' + place if place else ''}, for which JAX has "
                    "no arrays; leave it out of the samples, or out of the batch in the loader's collate_fn."
                )
        return arrays, tree  # type: ignore[return-value]  # none of them is None

    def _is_number(self, dtype: np.dtype[Any]) -> bool:
        return any(self._jax.numpy.issubdtype(dtype, kind) for kind in (np.number, np.bool_))

    def _room(self, count: int, like: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Room for ``count`` arrays like this one, of the type that JAX makes of its type."""
        dtype = np.dtype(self._jax.dtypes.canonicalize_dtype(like.dtype.newbyteorder("=")))
        shape = (count, *like.shape)
        size = math.prod(shape) * dtype.itemsize
        memory = np.empty(size + _ALIGNMENT, np.uint8)
        start = -memory.ctypes.data % _ALIGNMENT
        return memory[start : start + size].view(dtype).reshape(shape)


class _Part(NamedTuple):
    """Batches on the device for one scan, stacked."""

    steps: int
    batches: Any


class _Bank:
    """Batches of one layout, side by side on the host.

    Args:
        layout: their tree, and shape and dtype of each leaf.
        arrays: for each leaf, room for the most batches that may be added.
    """

    def __init__(self, layout: Any, arrays: list[npt.NDArray[Any]]) -> None:
        self.layout = layout
        self.arrays = arrays
        self.count = self.sent = 0

    def add(self, leaves: list[npt.NDArray[Any]]) -> None:
        for array, leaf in zip(self.arrays, leaves, strict=True):
            array[self.count] = leaf
        self.count += 1


def _array(leaf: Any) -> npt.NDArray[Any] | None:
    """A leaf as an array, over its own memory if possible; None if it cannot be one."""
    if not isinstance(leaf, torch.Tensor):
        is_array = isinstance(leaf, (int, float, complex)) or hasattr(leaf, "__array__")
        return np.asarray(leaf) if is_array else None
    if leaf.device.type != "cpu":
        raise ArgumentError(
            f"batches must be on the CPU, as JAX brings them to its device itself, got one on {leaf.device}; "
            "give the loader, not an object that moves its batches."
        )
    plain = leaf.detach().resolve_conj().resolve_neg()
    try:
        return plain.numpy()
    except TypeError:  # a type that numpy lacks; ml_dtypes, which JAX requires, has it
        import ml_dtypes

        bits = {1: torch.uint8, 2: torch.int16}[plain.itemsize]
        name = str(plain.dtype).removeprefix("torch.")
        array: npt.NDArray[Any] = plain.view(bits).numpy().view(getattr(ml_dtypes, name))
        return array


def _described(leaf: Any) -> str:
    if isinstance(leaf, (str, bytes)):
        return f"text ({leaf!r:.40})"
    dtype = f" of {leaf.dtype}" if isinstance(leaf, np.ndarray) else ""
    return f"a {type(leaf).__name__}{dtype}"


def _positive(sink_size: Any) -> int:
    try:
        number = operator.index(sink_size)
    except TypeError:
        number = 0
    if number < 1 or isinstance(sink_size, bool):
        raise ArgumentError(
            f"sink_size must be a number of steps, 1 or more, got {sink_size!r}; give len(loader) for a pass "
            "over the data."
        )
    return number


def _import_jax() -> Any:
    try:
        import jax
    except ImportError as error:
        raise ImportError(
            f"JaxSink runs steps with JAX, which cannot be imported ({error}); install it with: "
            "pip install 'hotset[jax]'."
        ) from error
    return jax
