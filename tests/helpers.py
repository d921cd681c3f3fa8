"""Exact comparison of samples and batches, RNG states, and small machinery that the tests share.

The comparisons are deliberately written without the library: :func:`difference` is what *indistinguishable*
means in these tests, byte for byte. Datasets are in ``sources.py``, samples in ``samples.py``, live
transforms in ``live.py``; all of them at module level, because a worker may have to unpickle them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import hashlib
import itertools
import multiprocessing
import os
import random
import struct
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import default_collate


def _tensor_bytes(tensor: torch.Tensor) -> bytes:
    plain = tensor.detach().as_subclass(torch.Tensor).resolve_conj().resolve_neg().contiguous()
    return plain.reshape(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b""


def _shown(tensor: torch.Tensor) -> str:
    try:
        return str(tensor)
    except RuntimeError:  # torch 2.6 shows no tensors of bits
        return f"<{tensor.dtype}>"


def _tensor_difference(a: torch.Tensor, b: torch.Tensor, where: str) -> str | None:
    for name in ("dtype", "shape", "layout", "device", "requires_grad"):
        if getattr(a, name) != getattr(b, name):
            return f"{where}: {name} {getattr(a, name)} is not {getattr(b, name)}"
    if a.layout is not torch.strided:
        return difference(a.to_dense(), b.to_dense(), f"{where} (dense)")
    if a.numel() and a.stride() != b.stride():
        return f"{where}: strides {a.stride()} are not {b.stride()}"
    if _tensor_bytes(a) != _tensor_bytes(b):
        return f"{where}: values {_shown(a)} are not {_shown(b)}"
    if type(a) is not torch.Tensor:
        return difference(vars(a), vars(b), f"{where}.__dict__")
    return None


def _array_difference(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any], where: str) -> str | None:
    for name in ("dtype", "shape"):
        if getattr(a, name) != getattr(b, name):
            return f"{where}: {name} {getattr(a, name)} is not {getattr(b, name)}"
    if a.dtype.byteorder != b.dtype.byteorder:
        return f"{where}: byte order {a.dtype.byteorder} is not {b.dtype.byteorder}"
    if a.size and a.strides != b.strides:
        return f"{where}: strides {a.strides} are not {b.strides}"
    if a.dtype.hasobject:
        return difference(a.tolist(), b.tolist(), where)
    return None if _content(a) == _content(b) else f"{where}: values {a} are not {b}"


def _content(array: np.ndarray[Any, Any]) -> bytes:
    """The bytes of an array but for those that an extended float of 80 bits leaves as they were."""
    if array.dtype == np.longdouble and np.finfo(np.longdouble).nmant == 63:
        raw = np.frombuffer(array.tobytes(), np.uint8).reshape(-1, array.itemsize)
        return raw[:, :10].tobytes()
    return array.tobytes()


def _image_difference(a: Any, b: Any, where: str) -> str | None:
    for name in ("mode", "size", "info", "format"):
        if getattr(a, name) != getattr(b, name):
            return f"{where}: image {name} {getattr(a, name)} is not {getattr(b, name)}"
    if a.getpalette() != b.getpalette():
        return f"{where}: palettes differ"
    return None if a.tobytes() == b.tobytes() else f"{where}: pixels differ"


def _children(value: Any) -> list[tuple[object, Any]] | None:
    """The parts of a container with their names, or None for a leaf."""
    if isinstance(value, Mapping):
        return list(value.items())
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes, bytearray, range)):
        return list(enumerate(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [(f.name, getattr(value, f.name)) for f in dataclasses.fields(value) if hasattr(value, f.name)]
    return None


def difference(a: Any, b: Any, where: str = "sample") -> str | None:
    """Where and how two samples or batches differ, None if nothing tells them apart.

    Exact types, tree, keys in order, dtypes, shapes, strides, byte order, bits (NaN equals the same NaN, -0.0
    is not 0.0), and the attributes of tensor subclasses.
    """
    if type(a) is not type(b):
        return f"{where}: type {type(a).__name__} is not {type(b).__name__}"
    if isinstance(a, torch.Tensor):
        return _tensor_difference(a, b, where)
    if isinstance(a, np.ndarray):
        return _array_difference(a, b, where)
    if isinstance(a, np.generic):
        return _array_difference(np.asarray(a), np.asarray(b), where)
    if hasattr(a, "getpalette"):
        return _image_difference(a, b, where)
    if isinstance(a, (float, complex)):
        same = struct.pack("dd", a.real, a.imag) == struct.pack("dd", b.real, b.imag)
        return None if same else f"{where}: {a!r} is not {b!r}"
    ours, theirs = _children(a), _children(b)
    if ours is None or theirs is None:
        if vars(type(a)).get("__module__") == "samples" and hasattr(a, "__dict__"):
            return difference(vars(a), vars(b), f"{where}.__dict__")
        return None if a == b else f"{where}: {a!r} is not {b!r}"
    if [name for name, _ in ours] != [name for name, _ in theirs]:
        return f"{where}: {[n for n, _ in ours]} is not {[n for n, _ in theirs]}"
    for (name, left), (_, right) in zip(ours, theirs, strict=True):
        found = difference(left, right, f"{where}[{name!r}]")
        if found:
            return found
    return None


def equal_batches(got: Any, expected: Any, where: str = "batch") -> None:
    """Fail with a sentence unless the two batches (or samples) are indistinguishable."""
    found = difference(got, expected, where)
    assert found is None, found


def rng_states() -> tuple[str, str, str]:
    """A digest each of the state of ``random``, ``numpy.random`` and ``torch``."""
    numpy_state: Any = np.random.get_state(legacy=True)
    return (
        hashlib.sha256(repr(random.getstate()).encode()).hexdigest(),
        hashlib.sha256(numpy_state[1].tobytes() + repr(numpy_state[2:]).encode()).hexdigest(),
        hashlib.sha256(torch.get_rng_state().numpy().tobytes()).hexdigest(),
    )


def seed_everything(seed: int = 1234) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.default_generator.manual_seed(seed)  # torch.manual_seed notes a traceback for each absent device


def leaves(value: Any) -> Iterator[Any]:
    """Every leaf of a sample or batch, depth first."""
    parts = _children(value)
    if parts is None:
        yield value
        return
    for _, part in parts:
        yield from leaves(part)


def scribble(value: Any) -> int:
    """Overwrite in place everything in a sample or batch that can be; returns how many things were."""
    if isinstance(value, torch.Tensor):
        if value.numel():
            flat = value.as_subclass(torch.Tensor)
            flat.copy_(~flat if flat.dtype == torch.bool else (flat == 0).to(flat.dtype))
        return 1
    if isinstance(value, np.ndarray):
        assert value.flags.writeable, "an array came out read-only"
        value[...] = np.zeros((), value.dtype) if any(value.tobytes()) else np.ones((), value.dtype)
        return 1
    if hasattr(value, "putpixel"):
        value.putpixel((0, 0), 0 if value.getpixel((0, 0)) else 1)
        return 1
    done = sum(scribble(part) for _, part in _children(value) or ())
    if isinstance(value, list):
        value.append("scribbled")
        return done + 1
    if isinstance(value, dict):
        value["scribbled"] = True
        return done + 1
    return done


def walk(dataset: Any, indices: Sequence[int], make: Callable[[int], Any], gate: Any, answers: Any) -> None:
    """A child process's body: read samples in the given order once the gate opens, report errors."""
    gate.wait(120)
    wrong = [i for i in indices if difference(dataset[i], make(i)) is not None]
    answers.put((os.getpid(), wrong))


def in_threads(count: int, body: Callable[[int], None]) -> None:
    """Run ``body(0..count-1)`` in threads at once; the first exception of any comes out."""
    errors: list[BaseException] = []

    def run(number: int) -> None:
        try:
            body(number)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "a reading thread hangs"
    if errors:
        raise errors[0]


def finish(*processes: Any, within: float = 60.0) -> None:
    """Join child processes within a bound, and fail unless each exited with 0."""
    for process in processes:
        process.join(within)
        alive = process.is_alive()
        if alive:
            process.kill()
            process.join()
        assert not alive, f"{process.name} did not finish within {within:.0f} s"
        assert process.exitcode == 0, f"{process.name} ended with {process.exitcode}"


class Walkers:
    """Processes that read a cache in given orders, all from one moment on."""

    def __init__(
        self, dataset: Any, orders: Sequence[Sequence[int]], make: Any, method: str = "fork"
    ) -> None:
        context: Any = multiprocessing.get_context(method)
        self.gate, self.answers = context.Event(), context.SimpleQueue()
        self.processes = [
            context.Process(target=walk, args=(dataset, list(order), make, self.gate, self.answers))
            for order in orders
        ]
        for process in self.processes:
            process.start()

    def go(self) -> None:
        self.gate.set()

    def finish(self, *processes: Any, within: float = 60.0) -> None:
        chosen = processes or tuple(self.processes)
        finish(*chosen, within=within)
        for _ in chosen:
            pid, wrong = self.answers.get()
            assert wrong == [], f"process {pid} read wrong samples at {wrong}"


def check_from_queue(queue: Any, answers: Any, make: Callable[[int], Any]) -> None:
    """A child process's body: keep every ``(indices, batch)`` from a queue until None, then check all."""
    kept = list(iter(queue.get, None))
    found = [difference(batch, default_collate([make(i) for i in ids])) for ids, batch in kept]
    answers.put((len(kept), [sentence for sentence in found if sentence]))


class Failure(NamedTuple):
    """An exception taken apart: its type, its text, and the names of its frames, outermost first."""

    kind: type[BaseException]
    text: str
    frames: list[str]

    @property
    def last_line(self) -> str:
        return self.text.rstrip().splitlines()[-1]


def taken_apart(error: BaseException) -> Failure:
    """Take an exception apart and let go of its frames.

    torch re-raises a worker's exception from a frame that holds it: a reference cycle with the loader's
    iterator in it, which waits five seconds for each of its workers if the garbage collector is what ends it.
    """
    found = Failure(type(error), str(error), [f.name for f in traceback.extract_tb(error.__traceback__)])
    chained: BaseException | None = error
    while chained is not None:
        traceback.clear_frames(chained.__traceback__)
        chained = chained.__cause__ or chained.__context__
    return found


def failure(run: Callable[[], object]) -> Failure:
    """What ``run()`` raises, taken apart; fails if it raises nothing."""
    try:
        run()
    except Exception as error:
        return taken_apart(error)
    raise AssertionError("nothing was raised")


def is_a_sentence(text: str) -> bool:
    return len(text) > 40 and text.rstrip().endswith(".")


def often(usual: int, thorough: int) -> int:
    """How often something is tried: usually, and in `make chaos`, which sets ``HOTSET_THOROUGH``."""
    return thorough if os.environ.get("HOTSET_THOROUGH") else usual


def rarely(cases: Iterable[Any], *rare: Any) -> list[Any]:
    """Parameters of which the ``rare`` ones run in `make chaos` only, as others hold what they hold."""
    import pytest

    listed = list(cases)
    assert all(case in listed for case in rare), f"not among the cases: {rare}"
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.chaos)
        if case in rare
        else case
        for case in listed
    ]


def all_pairs(*choices: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Combinations in which each two values of different choices meet, in a fixed order.

    Faults come from one value or from two that meet, hardly ever from three: 72 combinations of four
    choices shrink to 18.
    """
    lists = [list(choice) for choice in choices]
    sizes = [range(len(choice)) for choice in lists]
    places = list(itertools.combinations(range(len(lists)), 2))

    def pairs(row: tuple[int, ...]) -> set[tuple[int, int, int, int]]:
        return {(a, b, row[a], row[b]) for a, b in places}

    rows = list(itertools.product(*sizes))
    missing = set().union(*map(pairs, rows))
    chosen = []
    while missing:
        best = max(rows, key=lambda row: len(pairs(row) & missing))
        missing -= pairs(best)
        chosen.append(best)
    return [tuple(choice[at] for choice, at in zip(lists, row, strict=True)) for row in sorted(chosen)]


def interrupted_everywhere(body: Callable[[], object]) -> Iterator[None]:
    """Interrupt a body at one place after the other, until it runs through.

    The places are those at which a signal's handler may run: where a function of Python begins, and where one
    of C has returned. The interrupts are kept, as a notebook keeps its last one, with all their frames.
    """
    kept = []
    for event in ("call", "c_return"):
        left = place = 0

        def interrupt(frame: Any, what: str, function: Any) -> None:
            nonlocal left
            # Python 3.14 calls a lock's __enter__ as any function, after which an interrupt may come that
            # `with` does not see (python/cpython#148874): no code could be written to bear that.
            enters = getattr(function, "__name__", "") == "__enter__" and sys.version_info >= (3, 14)
            if what == event and function is not sys.setprofile and not enters:  # noqa: B023
                left -= 1
                if left < 0:
                    sys.setprofile(None)
                    raise KeyboardInterrupt

        while left <= 0:  # the last one came to an interrupt, if perhaps inside a destructor, which drops it
            left, collects = place, gc.isenabled()
            gc.disable()  # its callbacks, of other libraries' too, would be interrupted, and nobody told
            try:
                sys.setprofile(interrupt)
                body()
            except KeyboardInterrupt as error:
                kept.append(error)
            finally:
                sys.setprofile(None)
                if collects:
                    gc.enable()
            place += 1
            yield


def eventually(true: Callable[[], object], within: float = 60.0) -> bool:
    """Whether ``true()`` becomes True within a bound that only a hanging test reaches."""
    deadline = time.monotonic() + within
    while not true():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


class Clock:
    """Replaces :mod:`time` in a module, so that a test sets the time."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@contextlib.contextmanager
def recorded() -> Iterator[list[warnings.WarningMessage]]:
    """The warnings of a block, without Python's own (from 3.12 on) about forking a process with threads."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
        yield caught


def descriptors() -> int:
    """How many this process has open."""
    return len(os.listdir("/proc/self/fd"))


def memory_files() -> set[str]:
    """Descriptors of anonymous memory files, as ``/proc/self/fd`` names them."""
    found = set()
    for entry in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{entry}")
        except OSError:
            continue
        if target.startswith("/memfd:"):
            found.add(f"descriptor {entry} of {target}")
    return found
