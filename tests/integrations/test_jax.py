"""JAX over hotset.DataLoader: K steps in one scan train like K single steps, and no batch is aliased.

Each test runs in a forked child: once JAX's threads run, it warns of every later fork of the process that
runs all tests.
"""

from __future__ import annotations

import doctest
import functools
import gc
import importlib
import os
import re
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from helpers import failure, is_a_sentence
from kills import in_child
from torch.utils.data import DataLoader, TensorDataset

import hotset
from hotset.errors import ArgumentError

jax = pytest.importorskip("jax", reason="jax is not installed")

from hotset.integrations.jax import JaxSink  # noqa: E402

EXAMPLE = Path(__file__).parents[2] / "examples" / "lenet_jax.py"
SAMPLES, BATCH = 26, 4
LENGTH = 7  # batches of a pass; the last one has two samples


def alone(test: Callable[..., None]) -> Callable[..., None]:
    """Run a test in a child process, where JAX may start its threads."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        def body() -> None:
            test(*args, **kwargs)
            gc.collect()  # the child ends without the usual farewells of caches

        in_child(body)

    return run


def data() -> TensorDataset:
    rows = torch.arange(SAMPLES * 3).reshape(SAMPLES, 3) * 37 % 19 / 19.0
    return TensorDataset(rows, rows @ torch.tensor([0.5, -1.0, 2.0]) + 0.25)


def cached_loader(**options: Any) -> Any:
    torch.manual_seed(5)
    cached = hotset.cache(data(), memory="1MiB")
    return hotset.DataLoader(cached, batch_size=BATCH, **options)


def train_step(carry: Any, batch: Any) -> Any:
    """Linear regression by SGD with momentum."""
    (weights, bias), velocity = carry
    rows, targets = batch

    def loss_of(parameters: Any) -> Any:
        return ((rows @ parameters[0] + parameters[1] - targets) ** 2).mean()

    loss, slopes = jax.value_and_grad(loss_of)((weights, bias))
    velocity = jax.tree.map(lambda v, slope: 0.9 * v + slope, velocity, slopes)
    return (jax.tree.map(lambda p, v: p - 0.01 * v, (weights, bias), velocity), velocity), loss


def start() -> Any:
    zeros = (np.zeros(3, np.float32), 0.0)
    return zeros, zeros


class Ids:
    """Batches of one number each, 0 to n - 1; every row of one is that number.

    Attributes:
        given: how many batches were handed over, over all passes.
    """

    def __init__(self, n: int = LENGTH, log: list[str] | None = None) -> None:
        self.n = n
        self.given = 0
        self.log = log if log is not None else []

    def __iter__(self) -> Iterator[Any]:
        for number in range(self.n):
            self.given += 1
            self.log.append("draw")
            yield self.batch(number)

    def batch(self, number: int) -> Any:
        return torch.full((BATCH if number < self.n - 1 or self.n < LENGTH else 2,), number)


def first(total: Any, batch: Any) -> Any:
    """A step that counts in its carry and returns the batch's number."""
    return total + 1, batch[0]


# Steps


@alone
def test_sinks_of_any_size_train_as_a_plain_loop_over_torchs_loader() -> None:
    carry, losses = jax.tree.map(jax.numpy.asarray, start()), []
    step = jax.jit(train_step)
    torch.manual_seed(5)
    plain = DataLoader(data(), batch_size=BATCH, shuffle=True)
    for _ in range(15):
        for rows, targets in plain:
            carry, loss = step(carry, (rows.numpy(), targets.numpy()))
            losses.append(float(loss))
    assert losses[-1] < losses[0] / 10
    for size, calls in ((1, 105), (7, 15), (100, 1)):
        sink = JaxSink(train_step, start(), cached_loader(shuffle=True), size, outputs="all")
        sunk = np.concatenate([np.asarray(sink()[1]) for _ in range(calls)])
        np.testing.assert_allclose(sunk, losses[: len(sunk)], rtol=1e-4, atol=1e-7)
        assert (sink.steps, sink.epoch) == (len(sunk), len(sunk) // LENGTH)


@alone
def test_calls_go_on_where_the_last_one_stopped_and_drop_nothing() -> None:
    sink = JaxSink(first, 0, Ids(), sink_size=5, outputs="all")
    seen, epochs = [], []
    for _ in range(6):
        carry, numbers = sink()
        assert numbers.shape == (5,)
        seen += numbers.tolist()
        epochs.append(sink.epoch)
        assert int(carry) == sink.steps == len(seen)
    assert seen == [number % LENGTH for number in range(30)]
    assert epochs == [0, 1, 2, 2, 3, 4]


@alone
def test_the_last_result_is_what_a_call_returns_unless_all_are_asked_for() -> None:
    sink = JaxSink(first, 0, Ids(), sink_size=LENGTH)
    assert [int(sink()[1]) for _ in range(3)] == [LENGTH - 1] * 3


@alone
def test_a_call_is_one_dispatch_and_the_next_batches_are_drawn_behind_it() -> None:
    log: list[str] = []
    traced = []

    def step(total: Any, batch: Any) -> Any:
        traced.append(batch.shape)
        return first(total, batch)

    sink = JaxSink(step, 0, Ids(LENGTH - 1, log), sink_size=100)
    assert log == []
    run = sink._run
    sink._run = lambda *given: (log.append("run"), run(*given))[1]
    sink()
    assert log == ["draw"] * 100 + ["run"] + ["draw"] * 100
    sink()
    assert log[201:] == ["run"] + ["draw"] * 100
    assert set(traced) == {(BATCH,)}
    assert len(traced) < 5, "the step is traced once, not for each batch"


@alone
def test_few_programs_are_compiled_wherever_passes_end() -> None:
    sink = JaxSink(first, 0, Ids(29), sink_size=20, outputs="all")
    lengths, run = set(), sink._run

    def watched(carry: Any, batches: Any) -> Any:
        lengths.add(len(batches))
        return run(carry, batches)

    sink._run = watched
    seen = [number for _ in range(29) for number in sink()[1].tolist()]
    assert seen == list(range(29)) * 20
    # Ends of passes fall anywhere in a call, which would make all lengths from 1 to 20.
    assert {20} < lengths
    assert len(lengths) <= 1 + 4 + 5, lengths


@alone
def test_the_carry_given_at_first_stays_and_later_ones_are_donated() -> None:
    given = jax.numpy.zeros(1000)
    sink = JaxSink(lambda carry, batch: (carry + 1, carry + 1), given, Ids(), sink_size=3)
    carry, out = sink()
    for _ in range(3):
        sink()
    assert carry.is_deleted()
    assert not given.any()
    assert (out == 3).all(), "a result shares the carry's memory"
    view = np.asarray(sink()[0])
    sink()
    assert (view == 15).all(), "memory in use elsewhere was written to"


@alone
def test_random_keys_numbers_and_trees_are_carried_and_compiled_for_once() -> None:
    def step(carry: Any, batch: Any) -> Any:
        key, use = jax.random.split(carry["key"])
        return {
            "key": key,
            "sum": carry["sum"] + batch[0] * np.float32(0.5),
            "n": carry["n"] + 1,
        }, jax.random.normal(use)

    start = {"key": jax.random.key(3), "sum": 0.0, "n": np.int64(0)}
    one, three = (JaxSink(step, start, Ids(3), sink_size=k, outputs="all") for k in (1, 3))
    draws = np.concatenate([np.asarray(one()[1]) for _ in range(6)])
    assert one._run._cache_size() == 1, "compiled again for what the first call returned"
    carry, _ = three()
    carry, later = three()
    np.testing.assert_array_equal(draws[3:], later)
    assert len(set(draws.tolist())) == 6
    assert (float(carry["sum"]), int(carry["n"])) == (3.0, 6)


# Batches


class Reusing(Ids):
    """Writes each batch into the memory of the last one, which it overwrites first."""

    def __init__(self, memory: Any) -> None:
        super().__init__()
        self.memory = memory

    def __iter__(self) -> Iterator[Any]:
        for number in range(self.n):
            self.memory[...] = number
            yield self.memory
            self.memory[...] = -1


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("kind", ["torch", "numpy"])
@alone
def test_a_batch_overwritten_right_after_is_not_seen(kind: str, size: int) -> None:
    memory: Any = torch.empty(1 << 18)  # starts where JAX would take it as it is
    assert memory.data_ptr() % 64 == 0
    memory = memory if kind == "torch" else memory.numpy()
    sink = JaxSink(lambda n, batch: (n, batch[:: 1 << 16]), 0, Reusing(memory), size, outputs="all")
    for call in range(10):
        _, seen = sink()
        memory[...] = -1  # under the batches that were drawn ahead
        expected = [(call * size + step) % LENGTH for step in range(size)]
        assert seen.tolist() == [[number] * 4 for number in expected]


@alone
def test_batches_are_let_go_once_drawn() -> None:
    living: list[Any] = []

    class Watched(Ids):
        def batch(self, number: int) -> Any:
            made = torch.full((BATCH,), number)
            living.append(weakref.ref(made))
            return made

    sink = JaxSink(first, 0, Watched(), sink_size=4)
    sink()
    assert len(living) == 8
    assert sum(one() is not None for one in living) <= 1


@alone
def test_on_the_cpu_the_bank_is_the_devices_memory() -> None:
    sink = JaxSink(first, 0, Ids(LENGTH - 1), sink_size=50)
    made, room = [], sink._room
    sink._room = lambda *given: made.append(room(*given)) or made[-1]
    sink()
    (part,) = sink._ready
    assert part.batches.unsafe_buffer_pointer() == made[-1].ctypes.data


class Pair(NamedTuple):
    left: Any
    right: Any


@alone
def test_batches_keep_their_tree_their_values_and_jaxs_types() -> None:
    bfloat = torch.arange(6).to(torch.bfloat16).reshape(2, 3)
    batch = {
        "pair": Pair(torch.arange(4, dtype=torch.uint8), torch.tensor([True, False])),
        "list": [torch.tensor(2**31 - 1), torch.tensor(0.1, dtype=torch.float64), bfloat.t(), 7, None],
        "numpy": (np.arange(3, dtype=">i4"), np.float32(1.5), np.zeros((2, 0, 3)), True, 2.5),
        "small": torch.tensor([1.0, -2.0]).to(torch.float8_e4m3fn),
        "grad": torch.ones(2, requires_grad=True),
        "complex": torch.tensor([1 + 2j, 3 - 1j]).conj(),
    }
    _, seen = JaxSink(lambda n, given: (n, given), 0, [batch], sink_size=3)()
    assert seen["pair"]._fields == ("left", "right")
    assert (seen["pair"].left.tolist(), seen["pair"].left.dtype) == ([0, 1, 2, 3], np.uint8)
    assert (seen["pair"].right.tolist(), seen["pair"].right.dtype) == ([True, False], bool)
    wide, real, half, seven, none = seen["list"]
    assert (int(wide), wide.dtype, real.dtype, int(seven), none) == (2**31 - 1, np.int32, np.float32, 7, None)
    assert half.dtype == jax.numpy.bfloat16
    assert half.astype(float).tolist() == bfloat.t().tolist()
    swapped, number, empty, true, real = seen["numpy"]
    assert (swapped.tolist(), float(number), empty.shape) == ([0, 1, 2], 1.5, (2, 0, 3))
    assert (bool(true), float(real)) == (True, 2.5)
    assert seen["small"].astype(float).tolist() == [1.0, -2.0]
    assert seen["grad"].tolist() == [1.0, 1.0]
    assert seen["complex"].tolist() == [1 - 2j, 3 + 1j]


@alone
def test_wide_types_stay_wide_where_jax_is_told_so() -> None:
    jax.config.update("jax_enable_x64", True)
    _, seen = JaxSink(lambda n, batch: (n, batch), 0, [torch.tensor([2**40])])()
    assert (seen.tolist(), seen.dtype) == ([2**40], np.int64)


# Errors


@pytest.mark.parametrize("size", [0, -1, "10", 2.5, True, None])
def test_a_sink_size_that_is_none(size: Any) -> None:
    found = failure(lambda: JaxSink(first, 0, Ids(), sink_size=size))
    assert found.kind is ArgumentError
    assert is_a_sentence(found.text)
    assert repr(size) in found.text


def test_outputs_that_are_none() -> None:
    found = failure(lambda: JaxSink(first, 0, Ids(), outputs="first"))
    assert found.kind is ArgumentError
    assert "'first'" in found.text


def test_without_jax_it_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jax", None)
    found = failure(lambda: JaxSink(first, 0, Ids()))
    assert found.kind is ImportError
    assert "hotset[jax]" in found.text


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        ({"x": torch.zeros(2), "name": ["a", "b"]}, "text ('a') at ['name'][0]"),
        ([torch.zeros(2), np.array(["a"])], "a ndarray of <U1 at [1]"),
        (np.array([None]), "a ndarray of object, for which"),
        ([object()], "a object at [0]"),
        (torch.zeros(2, device="meta"), "got one on meta"),
    ],
    ids=["text", "numpy-text", "objects", "object", "elsewhere"],
)
@alone
def test_what_jax_has_no_arrays_for_is_named(batch: Any, words: str) -> None:
    found = failure(JaxSink(lambda n, b: (n, 0), 0, [batch]))
    assert found.kind is ArgumentError
    assert words in found.text
    assert is_a_sentence(found.text)


@pytest.mark.parametrize("kind", ["list", "drop_last"])
@alone
def test_an_empty_loader_is_an_error_at_once(kind: str) -> None:
    few = DataLoader(data(), batch_size=100, drop_last=True)
    found = failure(JaxSink(first, 0, [] if kind == "list" else few))
    assert found.kind is ArgumentError
    assert is_a_sentence(found.text)


@alone
def test_a_generator_is_gone_through_once_and_all_of_it_is_used() -> None:
    sink = JaxSink(first, 0, iter([torch.tensor([number]) for number in range(3)]), outputs="all")
    assert [sink()[1].item() for _ in range(3)] == [0, 1, 2]
    assert failure(sink).kind is ArgumentError


class Failing(Ids):
    """Raises once, instead of its batch number 10."""

    def __init__(self, error: type[BaseException]) -> None:
        super().__init__(100)
        self.error = error
        self.next = 0

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        self.next += 1
        if self.next == 11 and self.error is not None:
            error, self.error = self.error, None
            self.next -= 1
            self.fail(error)
        return torch.full((BATCH,), self.next - 1)

    def fail(self, error: type[BaseException]) -> None:
        raise error("a bad picture")


@alone
def test_an_error_of_the_loader_comes_with_its_call_and_costs_no_batch() -> None:
    sink = JaxSink(first, 0, Failing(OSError), sink_size=4, outputs="all")
    seen = [number for _ in range(2) for number in sink()[1].tolist()]
    found = failure(sink)
    assert (found.kind, found.text, found.frames[-1]) == (OSError, "a bad picture", "fail")
    assert sink.steps == 8
    seen += [number for _ in range(2) for number in sink()[1].tolist()]
    assert seen == list(range(16))


@alone
def test_an_interrupt_while_batches_are_drawn_costs_none() -> None:
    sink = JaxSink(first, 0, Failing(KeyboardInterrupt), sink_size=4, outputs="all")
    assert sink()[1].tolist() == [0, 1, 2, 3]
    with pytest.raises(KeyboardInterrupt):
        sink()
    assert (sink.steps, int(sink.carry)) == (8, 8)
    assert [number for _ in range(2) for number in sink()[1].tolist()] == list(range(8, 16))


@alone
def test_no_step_runs_twice_on_a_batch_if_there_is_no_room_for_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    batches = [torch.full((2 if number < 6 else 3,), number) for number in range(16)]
    sink = JaxSink(first, 0, batches, sink_size=4, outputs="all")
    room, failed = sink._room, []

    def no_room_once(count: int, like: Any) -> Any:
        if len(like) == 3 and not failed:
            failed.append(MemoryError("no room"))
            raise failed[0]
        return room(count, like)

    monkeypatch.setattr(sink, "_room", no_room_once)
    seen = sink()[1].tolist()
    assert failure(sink).kind is MemoryError
    seen += [number for _ in range(2) for number in sink()[1].tolist()]
    assert seen[:6] == list(range(6))
    assert len(set(seen)) == len(seen) == 12


@alone
def test_outputs_of_different_shapes_cannot_be_stacked_and_the_steps_count() -> None:
    sink = JaxSink(lambda n, batch: (n + 1, batch), 0, Ids(), sink_size=LENGTH, outputs="all")
    found = failure(sink)
    assert found.kind is ArgumentError
    assert "drop_last=True" in found.text
    assert sink.steps == int(sink.carry) == LENGTH


@alone
def test_a_closed_sink_begins_a_new_pass() -> None:
    with JaxSink(first, 0, Ids(), sink_size=3, outputs="all") as sink:
        sink()
    assert sink()[1].tolist() == [0, 1, 2]


# Documents


@alone
def test_the_docstrings_example_is_true() -> None:
    module = importlib.import_module("hotset.integrations.jax")
    failed, run = doctest.testmod(module, optionflags=doctest.NORMALIZE_WHITESPACE)
    assert (failed, run > 0) == (0, True)


def test_the_example_learns_its_digits(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), "--epochs", "2"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONWARNINGS": "error"},
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert done.returncode == 0, done.stderr
    losses = re.findall(r"^epoch: (\d+) step: 44, loss is ([\d.e-]+)$", done.stdout, re.MULTILINE)
    assert [number for number, _ in losses] == ["1", "2"]
    (accuracy,) = re.findall(r"^accuracy: ([\d.]+)$", done.stdout, re.MULTILINE)
    assert 0.85 < float(accuracy) <= 1, done.stdout
