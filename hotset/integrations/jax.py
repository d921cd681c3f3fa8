"""JAX: K steps of a jitted function in one ``lax.scan``, fed from a loader.

::

    host     draw K batches ─> bank ─┐   draw the next K ─> bank ─┐   draw ...
    device                           └─> scan: K steps ───────────┴─> scan: K steps ──
                                         (dispatched, not waited for)

A step costs the host a dispatch, and where steps are short that is what training waits for. A scan has the
loop on the device: the host hears back once for K steps, and uses the time to draw the next K batches.

**A batch is copied once, and never aliased.** It goes to its row of a *bank*, ``[K, *shape]`` on the host,
as soon as it is drawn, so that its memory can be used again. Handing JAX the batch's own memory (by dlpack,
or as a numpy array) was rejected: JAX may keep it as its device's memory, and a loader that writes the next
batch there changes it under the running step. A bank is written once. Its start is aligned as JAX wants it,
and then on the CPU the bank *is* the device's memory.

**Batches of one make go together.** What is stacked has the same tree, shapes and dtypes. Where a batch
differs, as a shorter last one does, the scan ends before it, it has its own, and order is kept. JAX compiles
for each make and for each number of steps; cut by the ends of passes, a call may have scans of any length. So
the first few lengths are compiled as they come, and others are made up of powers of two.

**The carry is donated**: its memory is that of the next carry. What the user passed in is copied first. A
view of it (numpy's, torch's) keeps the values, as JAX then copies. On the CPU, JAX 0.7 computes a donation
before it goes on, so that the host draws after it, not meanwhile; 0.10 does not.

**On the CPU a scan may lose.** XLA's code for convolutions is slower within a loop than outside of one there:
a LeNet-5 step takes 1.7 times as long in a scan (JAX 0.7.1 and 0.10.2, two cores and one).
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
_EXACT = 4  # how many lengths of scans, besides the usual one, are compiled as they come


class JaxSink(Generic[C]):
    """Runs ``sink_size`` steps a call, over batches that go on where the last call stopped, without end.

    Batches are drawn in the thread that calls: those of the first call in it, and after that each call draws
    the next one's while the device works. ``2 * sink_size`` batches are thus on the device, and what draws
    random numbers, or counts batches handed over (:meth:`hotset.DataLoader.state_dict`), is a call ahead.
    A loader that starts workers starts them here, and JAX warns of any fork: give the loader
    ``multiprocessing_context="forkserver"``. One whose batches are gathered from a full cache starts none.

    Args:
        step: ``step(carry, batch) -> (carry, out)``, as ``lax.scan`` wants it; it is compiled here. The batch
            has the loader's tree, of JAX arrays; int64 and float64 become 32 bits wide, unless JAX is told
            otherwise (``jax_enable_x64``).
        carry: what the first step gets: a tree of arrays and numbers. It is copied.
        loader: an iterable of batches, each a tree (of dicts, lists, tuples, and what is registered with JAX)
            of torch tensors on the CPU, numpy arrays or numbers. It is iterated over again and again.
        sink_size: how many steps a call runs.
        outputs: ``"last"``: a call returns what the last step gave beside the carry; ``"all"``: of all steps,
            stacked along a new first dimension of ``sink_size``.

    Attributes:
        carry: that of the last step.
        steps: how many steps were run.
        epoch: how many passes over the data they have completed.
        sink_size: how many steps a call runs.

    Raises:
        ArgumentError: ``sink_size`` is not a positive number, or ``outputs`` neither of the two.
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
        self._cycle = BatchCycle(queue)
        self._ready: deque[_Part] = deque()
        self._failure: Exception | None = None

    def __call__(self) -> tuple[C, Any]:
        """Run the next ``sink_size`` steps.

        Returns:
            The carry, and what ``outputs`` asks for. JAX computes them while the host goes on; reading a
            value waits for it. The carry's arrays are valid until the next call, which makes its own of
            their memory: copy what is to be kept.

        Raises:
            ArgumentError: the loader is empty; a batch holds text, or what is no tree of arrays; steps that
                are to be stacked gave different shapes.
            Exception: what the loader raised, in the call whose batches it was to give.
        """
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure
        self._draw()
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
            self._draw()
        except Exception as error:  # not of this call, whose steps are done
            self._failure = error
        return self.carry, self._together(outs)

    def close(self) -> None:
        """Let go of the loader, and of the batches drawn ahead. The next call begins a new pass."""
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
        """A copy of a leaf of the carry, as steps give it: one that may be donated."""
        array = self._jax.numpy.array(leaf, copy=True)
        # Python's numbers are of a weak type, which no step gives back: it would be compiled twice.
        return array.astype(array.dtype) if getattr(array, "weak_type", False) else array

    def _together(self, outs: list[Any]) -> Any:
        if not self._all or len(outs) == 1:
            return outs[-1]
        try:
            return self._jax.tree.map(lambda *parts: self._jax.numpy.concatenate(parts), *outs)
        except (TypeError, ValueError) as error:
            raise ArgumentError(
                f"the steps are done, but what they gave cannot be stacked ({error}): a batch of another "
                'shape has an output of another shape. Use drop_last=True, or outputs="last".'
            ) from error

    # ---- batches -------------------------------------------------------------------------------------

    def _draw(self) -> None:
        """Have the batches of a whole call on the device, less those that an interrupted one has left."""
        missing = self.sink_size - sum(part.steps for part in self._ready)
        bank: _Bank | None = None
        try:
            while missing:
                arrays, tree = self._arrays(self._cycle.draw(missing).batch)
                make = (tree, tuple((array.shape, array.dtype) for array in arrays))
                if bank is None or bank.make != make:
                    self._send(bank)
                    bank = _Bank(make, [self._room(missing, array) for array in arrays])
                bank.add(arrays)
                missing -= 1
        finally:  # also what came before an error, or Ctrl-C, waits for its steps
            self._send(bank)

    def _send(self, bank: _Bank | None) -> None:
        """Put a bank on the device, in parts of lengths that are compiled for."""
        if bank is None:
            return
        start = 0
        for count in self._split(bank):
            rows = [array[start : start + count] for array in bank.arrays]
            batches = self._jax.tree.unflatten(bank.make[0], self._jax.device_put(rows))
            self._ready.append(_Part(count, batches))
            start += count

    def _split(self, bank: _Bank) -> list[int]:
        known = self._lengths.setdefault(bank.make, {self.sink_size})
        if bank.count in known or len(known) <= _EXACT:
            known.add(bank.count)
            return [bank.count]
        return [1 << bit for bit in reversed(range(bank.count.bit_length())) if bank.count >> bit & 1]

    def _arrays(self, batch: Any) -> tuple[list[npt.NDArray[Any]], Any]:
        """A batch's leaves, over its own memory, and its tree."""
        leaves, tree = self._jax.tree.flatten(batch)
        arrays = [_array(leaf) for leaf in leaves]
        for number, array in enumerate(arrays):
            if array is None or not self._is_number(array.dtype):
                path, leaf = self._jax.tree_util.tree_flatten_with_path(batch)[0][number]
                place = self._jax.tree_util.keystr(path)
                raise ArgumentError(
                    f"a batch holds {_described(leaf)}{' at ' + place if place else ''}, which JAX has no "
                    "arrays for; leave it out of the samples, or out of the batch by the loader's collate_fn."
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
    """Batches of one make, side by side on the host.

    Args:
        make: their tree, and shape and dtype of each leaf.
        arrays: for each leaf room for as many as may come.
    """

    def __init__(self, make: Any, arrays: list[npt.NDArray[Any]]) -> None:
        self.make = make
        self.arrays = arrays
        self.count = 0

    def add(self, leaves: list[npt.NDArray[Any]]) -> None:
        for array, leaf in zip(self.arrays, leaves, strict=True):
            array[self.count] = leaf
        self.count += 1


def _array(leaf: Any) -> npt.NDArray[Any] | None:
    """A leaf as an array over its own memory, if it has any; None for what is none."""
    if not isinstance(leaf, torch.Tensor):
        is_array = isinstance(leaf, (int, float, complex)) or hasattr(leaf, "__array__")
        return np.asarray(leaf) if is_array else None
    if leaf.device.type != "cpu":
        raise ArgumentError(
            f"a batch lies on {leaf.device}, and JAX brings batches to its device itself; give the loader, "
            "not what brings its batches to torch's device."
        )
    plain = leaf.detach().resolve_conj().resolve_neg()
    try:
        return plain.numpy()
    except TypeError:  # a type that numpy has not, but ml_dtypes, which JAX brings along
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
            f"sink_size must be the number of steps of a call, 1 or more, got {sink_size!r}; for a pass over "
            "the data give len(loader)."
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
