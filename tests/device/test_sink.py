"""``data_sink``: K steps a call are K steps of a plain loop, to the bit, and whatever goes wrong is said.

On the CPU, where every step is eager; steps as graphs are in ``test_step_graph.py``.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from helpers import eventually, often, rarely, rng_states, seed_everything, taken_apart
from live import flip_and_crop
from programs import Programs
from samples import image_and_label
from sinking import BATCH, PASS, STEPS, N, Training, features, loader_of, make_resumable, plain
from sources import PlainError, RaisingKey, Samples
from torch.utils.data import DataLoader, DistributedSampler
from training import one_thread

import hotset
from hotset.device.gpu_cache import GpuCache
from hotset.device.queue import DeviceQueue
from hotset.device.sink import Sink, data_sink
from hotset.errors import ArgumentError, StateError

__all__ = ["one_thread"]  # a fixture of each test here


@pytest.fixture(params=[False, True], ids=["gathered", "live"])
def live(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture
def cached(live: bool) -> Iterator[Any]:
    with hotset.cache(
        Samples(image_and_label, N), transform=[flip_and_crop] if live else None, memory="4MiB"
    ) as dataset:
        yield dataset


def sunk(sink: Sink, calls: int) -> list[float]:
    found: list[float] = []
    for _ in range(calls):
        found += sink().tolist()
    return found


# As a plain loop


@pytest.mark.parametrize(
    ("workers", "sizes"), rarely([(0, (1, 7, 100)), (2, (7,)), (2, (1, 100))], (2, (7,)), (2, (1, 100)))
)
def test_any_sink_size_trains_to_the_bit_as_a_plain_loop(
    cached: Any, live: bool, workers: int, sizes: tuple[int, ...]
) -> None:
    training = Training(features=features(live))
    expected = plain(training, loader_of(cached, workers), STEPS)
    weights, draws = training.weights(), rng_states()
    assert len(set(expected)) == STEPS
    for size in sizes:
        training = Training(features=features(live))
        with data_sink(training.step, loader_of(cached, workers), size, outputs="all") as sink:
            losses = sunk(sink, STEPS // size)
            losses += sink(steps=STEPS % size).tolist() if STEPS % size else []
            assert losses == expected, size
            assert (training.weights(), rng_states()) == (weights, draws), size
            assert (sink.steps, sink.epoch) == (STEPS, STEPS // PASS)
        # The shorter last batch of each pass is run, not dropped.
        assert training.seen == ([BATCH] * (PASS - 1) + [2]) * (STEPS // PASS)


@pytest.mark.parametrize("live", [False], indirect=True)
def test_the_references_three_ways_of_calling_train_alike(cached: Any) -> None:
    epochs, found = 3, []
    for size in (1, PASS, epochs * PASS):
        training = Training()
        loader = loader_of(cached)
        assert len(loader) == PASS
        with data_sink(training.step, loader, sink_size=size) as sink:
            for _ in range(epochs * PASS // size):
                loss = sink()
        found.append((loss.item(), training.weights(), sink.steps, sink.epoch))
    assert found[0] == found[1] == found[2]
    assert found[0][2:] == (epochs * PASS, epochs)


@pytest.mark.parametrize("live", [False], indirect=True)
@pytest.mark.parametrize("size", [1, 4, 32])
def test_a_distributed_sampler_is_told_of_each_new_pass(cached: Any, size: int) -> None:
    def loader() -> Any:
        return loader_of(cached, sampler=DistributedSampler(cached, num_replicas=2, rank=1, seed=5))

    expected = plain(Training(), loader(), 32)
    with data_sink(Training().step, own := loader(), size, outputs="all") as sink:
        assert sunk(sink, 32 // size) == expected
        assert own.sampler.epoch == 5  # batches of 23 samples: six a pass


def test_torchs_own_loader_and_any_iterable_will_do() -> None:
    dataset = Samples(image_and_label, N)
    expected = plain(Training(), loader_of(dataset), 2 * PASS)
    seed_everything(3)
    training = Training()
    seed_everything(3)
    batches = DataLoader(dataset, batch_size=BATCH, shuffle=True)
    with data_sink(training.step, batches, 2 * PASS, outputs="all") as sink:
        assert sink().tolist() == expected
    listed = [(torch.ones(2) * number,) for number in range(3)]
    with data_sink(lambda x: x.sum(), listed, 4, outputs="all") as sink:
        assert sink().tolist() == [0.0, 2.0, 4.0, 0.0]
        assert sink().tolist() == [2.0, 4.0, 0.0, 2.0]


# Results


class Scores(NamedTuple):
    loss: Any
    right: Any


def results_of(fn: Callable[[Any], Any], count: int = 3, **more: Any) -> Any:
    numbers = [torch.tensor(float(number)) for number in range(count)]
    with data_sink(fn, numbers, count, outputs="all", **more) as sink:
        return sink()


def test_all_results_are_stacked_leaf_by_leaf() -> None:
    assert torch.equal(results_of(lambda x: x.repeat(2)), torch.tensor([[0.0, 0], [1, 1], [2, 2]]))
    assert results_of(lambda x: {"loss": x, "n": int(x)})["n"].dtype == torch.int64
    assert type(results_of(lambda x: OrderedDict(a=x))) is dict
    scores = results_of(lambda x: Scores(x, [x > 1, (bool(x > 1), None)]))
    assert type(scores) is Scores
    assert scores.right[0].tolist() == scores.right[1][0].tolist() == [False, False, True]
    assert scores.right[1][1] is None
    assert results_of(lambda x: None) is None


def test_numbers_keep_all_their_digits() -> None:
    third = results_of(lambda x: (float(x) + 1) / 3)
    assert third.dtype == torch.float64
    assert third.tolist() == [1 / 3, 2 / 3, 3 / 3]
    assert results_of(lambda x: 0.5 if x == 1 else 2).tolist() == [2, 0.5, 2]


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: torch.ones(int(x)),
        lambda x: x if x == 1 else None,
        lambda x: {"a": x} if x == 1 else {"b": x},
        lambda x: (x,) * int(x),
        lambda x: "step" * int(x),
        lambda x: x.int() if x == 1 else x,
    ],
    ids=["shape", "None", "keys", "length", "text", "dtype"],
)
def test_results_that_cannot_be_stacked_are_listed(fn: Callable[[Any], Any]) -> None:
    found = results_of(fn)
    assert type(found) is list
    assert [repr(one) for one in found] == [repr(fn(torch.tensor(float(x)))) for x in range(3)]


def test_results_have_no_gradient_and_are_not_overwritten() -> None:
    total, weight = torch.zeros(2), torch.ones(2, requires_grad=True)

    def step(x: torch.Tensor) -> Any:
        total.add_(x)
        return total, (weight * x).sum()

    with data_sink(step, [torch.tensor(1.0)], 3, outputs="all") as sink:
        totals, losses = sink()
        assert totals.tolist() == [[1.0, 1.0], [2.0, 2.0], [3.0, 3.0]]
        assert not losses.requires_grad
    with data_sink(step, [torch.tensor(1.0)]) as sink:
        (last, loss), again = sink(), sink()
        assert last.tolist() == [4.0, 4.0]
        assert again[0].tolist() == [5.0, 5.0]
        assert loss.grad_fn is None


def test_a_step_may_return_nothing() -> None:
    seen: list[float] = []
    with data_sink(lambda x: seen.append(x.item()), [torch.ones(()), torch.zeros(())], 3) as sink:
        assert sink() is None
    assert seen == [1.0, 0.0, 1.0]


def test_batches_that_are_no_tuples_are_one_argument() -> None:
    with data_sink(lambda batch: batch["x"] + 1, [{"x": torch.ones(1)}]) as sink:
        assert sink().item() == 2


# Arguments


@pytest.mark.parametrize("size", [0, -1, "ten", True, False, 2.0, None, torch.tensor(3)], ids=repr)
def test_a_sink_size_that_is_no_number_of_steps(size: Any) -> None:
    with pytest.raises(ArgumentError, match=r'must be a number of steps, 1 or more, or "auto"'):
        data_sink(abs, [torch.ones(1)], size)
    with data_sink(abs, [torch.ones(1)]) as sink:
        if size is not None:
            with pytest.raises(ArgumentError, match="must be a number of steps"):
                sink(steps=size)
        assert sink.steps == 0


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        ({"graph": "yes"}, "graph must be .*got 'yes'"),
        ({"graph": 1}, "graph must be .*got 1"),
        ({"outputs": "none"}, "outputs must be .*got 'none'"),
        ({"input_signature": "x"}, "input_signature must hold tensors"),
        ({"device": "marsrover"}, "device must be .*got 'marsrover'"),
    ],
)
def test_other_arguments(more: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ArgumentError, match=sentence):
        data_sink(abs, [torch.ones(1)], **more)


def test_a_step_that_cannot_be_called_and_data_that_cannot_be_read() -> None:
    with pytest.raises(ArgumentError, match="fn must be callable, got 3"):
        data_sink(3, [torch.ones(1)])  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="must be iterable, got int"):
        data_sink(abs, 3)  # type: ignore[arg-type]


def test_a_queue_is_read_as_it_is_unless_the_device_contradicts() -> None:
    queue = DeviceQueue([torch.ones(1)], device="cpu")
    with data_sink(abs, queue, device="cpu") as sink:
        assert sink.queue is queue
        assert sink() == 1
    with pytest.raises(ArgumentError, match=r"device must be the queue's, cpu, got 'meta'"):
        data_sink(abs, queue, device="meta")


def test_there_are_no_graphs_here_and_it_says_so() -> None:
    for graph in ("auto", True):
        with data_sink(abs, [torch.ones(1)], graph=graph) as sink:  # type: ignore[arg-type]
            assert sink() == 1
            assert (sink.captured, sink.why) == (False, "there are no graphs on cpu")
    assert data_sink(abs, [torch.ones(1)], graph=False).why == "graph=False"


# Data


@pytest.mark.parametrize(
    "make", [list, lambda: iter(()), lambda: (_ for _ in ()), lambda: DataLoader([], batch_size=2)]
)
def test_an_empty_loader(make: Callable[[], Any]) -> None:
    with data_sink(abs, make(), 3) as sink:
        for _ in range(2):
            with pytest.raises(ArgumentError, match="gave no batch in a whole pass: it is empty"):
                sink()
        assert sink.steps == 0


def test_a_generator_that_is_used_up() -> None:
    with data_sink(abs, (torch.ones(1) for _ in range(3)), 2) as sink:
        sink()
        with pytest.raises(ArgumentError, match="or an iterator that is used up"):
            sink()
        assert sink.steps == 3


def pairs(*sizes: int) -> list[Any]:
    return [(torch.ones(size, 2), torch.ones(size, dtype=torch.int64)) for size in sizes]


@pytest.mark.parametrize(
    ("batch", "sentence"),
    [
        ((torch.ones(4, 3), torch.ones(4, dtype=torch.int64)), r"at \[0\] it is torch.float32 \(4, 3\), not"),
        ((torch.ones(5, 2), torch.ones(5, dtype=torch.int64)), r"at \[0\] it is torch.float32 \(5, 2\), not"),
        ((torch.ones(4, 2), torch.ones(4)), r"at \[1\] it is torch.float32 \(4,\), not torch.int64"),
        ((torch.ones(4, 2),), "it has 1 tensors, not 2"),
    ],
    ids=["shape", "more", "dtype", "number"],
)
def test_a_batch_that_is_not_as_the_signature_says(batch: Any, sentence: str) -> None:
    signature = (torch.empty(4, 2, device="meta"), torch.empty(4, dtype=torch.int64, device="meta"))
    data = [*pairs(4), batch, *pairs(3)]
    with data_sink(lambda x, y: len(x), data, 2, input_signature=signature) as sink:
        with pytest.raises(ArgumentError, match="a batch does not match input_signature: " + sentence):
            sink()
        assert sink.steps == 1
        assert sink(steps=1) == 3  # the shorter last one passes


def test_only_the_last_batch_of_a_pass_may_be_shorter_than_the_signature() -> None:
    signature = (torch.empty(4, 2, device="meta"), torch.empty(4, dtype=torch.int64, device="meta"))
    data = [*pairs(3), *pairs(4), *pairs(3)]
    with data_sink(lambda x, y: len(x), data, input_signature=signature) as sink:
        with pytest.raises(ArgumentError, match="does not match input_signature"):
            sink()
        assert [sink(), sink()] == [4, 3]
    unknown = (batch for batch in data)  # where the end is not known, any may be the last
    with data_sink(lambda x, y: len(x), unknown, input_signature=signature) as sink:
        assert sink(steps=1) == 3


def test_a_loader_that_another_sink_is_reading() -> None:
    loader = DataLoader(Samples(image_and_label, 8), batch_size=2)
    first, second = (data_sink(lambda x, y: y.tolist(), loader) for _ in range(2))
    assert first() == [0, 1]
    with pytest.raises(ArgumentError, match="is being read by another queue or sink"):
        second()
    assert first() == [2, 3]
    first.close()
    assert second() == [0, 1]
    second.close()


def test_a_sink_that_was_interrupted_in_a_step_gives_way() -> None:
    """Its traceback holds it."""
    loader = DataLoader(Samples(image_and_label, 8), batch_size=2)

    def interrupt(x: Any, y: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as held:
        data_sink(interrupt, loader)()
    with data_sink(lambda x, y: y.tolist(), loader) as sink:
        assert sink() == [0, 1]
    del held


def test_after_close_a_new_pass_begins_and_passes_are_counted_true() -> None:
    with data_sink(lambda x: x.item(), [torch.tensor(n) for n in range(3)], 2) as sink:
        assert [sink(), sink.epoch] == [1, 0]
        sink.close()
        assert [sink(), sink.epoch] == [1, 0]
        assert [sink(steps=1), sink.epoch] == [2, 1]
        sink.close()
        assert [sink(), sink.epoch] == [1, 1]


# What is raised


@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_in_the_data_goes_through_and_the_next_call_goes_on(tmp_path: Path, workers: int) -> None:
    dataset = RaisingKey(image_and_label, 10, 5, tmp_path / "armed")
    dataset.arm()
    seen: list[list[int]] = []
    loader = hotset.DataLoader(dataset, batch_size=2, num_workers=workers)
    with data_sink(lambda x, y: seen.append(y.tolist()), loader, 4) as sink:
        with pytest.raises(KeyError, match="sample 5 is broken") as caught:
            sink()
        assert "misbehave" in taken_apart(caught.value).text or workers == 0
        assert sink.steps == 2
        sink()
        assert sink.steps == 6
    assert seen == [[0, 1], [2, 3], [6, 7], [8, 9], [0, 1], [2, 3]]


class Broken:
    """An iterable that cannot even begin."""

    def __iter__(self) -> Iterator[Any]:
        raise PlainError("no data today")


@pytest.mark.parametrize("depth", [0, 2])
def test_data_that_fail_at_once_are_not_called_empty(depth: int) -> None:
    with data_sink(abs, DeviceQueue(Broken(), depth=depth)) as sink:
        for _ in range(3):
            with pytest.raises(PlainError, match="no data today"):
                sink()
        assert sink.steps == 0


def test_an_error_in_the_step_goes_through_and_the_next_call_goes_on() -> None:
    seen: list[int] = []

    def step(x: torch.Tensor) -> None:
        seen.append(int(x))
        if seen == [0, 1, 2]:
            raise PlainError("diverged")

    with data_sink(step, [torch.tensor(n) for n in range(5)], 4) as sink:
        with pytest.raises(PlainError, match="diverged"):
            sink()
        assert sink.steps == 2
        sink()
        assert (sink.steps, seen, sink.epoch) == (6, [0, 1, 2, 3, 4, 0, 1], 1)


def test_what_was_resident_before_a_clear_is_not_given_after_it() -> None:
    """Nor by the call that goes on after an error in the midst of its steps."""
    plus, seen = [0], []

    def step(values: torch.Tensor, index: torch.Tensor) -> None:
        seen.extend(zip(index.tolist(), (values[:, 0] - index).tolist(), strict=True))
        if len(seen) in (20, 44):
            raise KeyError("in the step")

    def sample(index: int) -> tuple[torch.Tensor, int]:
        return torch.full((8,), index + plus[0]), index

    with hotset.cache(Samples(sample, 16), memory="1MiB") as cached:
        loader = hotset.DataLoader(cached, batch_size=2)
        list(loader)
        queue = DeviceQueue(loader, device="cpu")
        queue._gpu_cache = GpuCache(1 << 20, torch.device("cpu"))  # as a GPU has one
        sink = data_sink(step, queue)
        with pytest.raises(KeyError):
            sink(steps=12)
        plus[0] = 100
        cached.clear()
        with pytest.raises(KeyError):
            sink(steps=12)
        sink(steps=2)
        sink.close()
    assert [index for index, _ in seen] == [*range(16)] * 3
    assert [more for _, more in seen] == [0] * 20 + [100] * 28


def test_ctrl_c_goes_through_and_the_next_call_goes_on() -> None:
    seen: list[int] = []

    def step(x: torch.Tensor) -> None:
        seen.append(int(x))
        if seen == [0, 1]:
            signal.raise_signal(signal.SIGINT)

    with data_sink(step, [torch.tensor(n) for n in range(5)], 4) as sink:
        with pytest.raises(KeyboardInterrupt):
            sink()
        sink()
        assert (sink.steps, seen) == (5, [0, 1, 2, 3, 4, 0])


def test_ctrl_c_leaves_no_process(tmp_path: Path) -> None:
    script = tmp_path / "endless.py"
    script.write_text(
        textwrap.dedent(
            """
            import os, torch, hotset
            from torch.utils.data import TensorDataset

            def step(x):
                print(os.getpid(), flush=True)

            if __name__ == "__main__":
                loader = hotset.DataLoader(TensorDataset(torch.ones(64, 2)), batch_size=2, num_workers=2)
                sink = hotset.data_sink(step, loader, 1 << 30)
                sink()
            """
        )
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(hotset.__file__).parent.parent)}
    process = subprocess.Popen(
        [sys.executable, str(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline()
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does it: to the workers too
    _, errors = process.communicate(timeout=200)
    assert "KeyboardInterrupt" in errors
    assert process.returncode in (1, -signal.SIGINT)

    def gone() -> bool:
        try:
            os.killpg(process.pid, 0)
        except ProcessLookupError:
            return True
        return False

    assert eventually(gone)


# Size


def test_auto_finds_a_size_and_counts_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr("hotset.device.sink.time.perf_counter", lambda: clock[0])

    class Timed(list[Any]):
        """Each call of a sink costs 8 ms, and each step 10 ms: past 16 steps no more than 5 % are gained."""

    def step(x: torch.Tensor) -> torch.Tensor:
        clock[0] += 0.010
        return x

    with data_sink(step, Timed([torch.ones(1)] * 3), "auto") as sink:
        calls = 0
        while sink._search is not None and not sink._search.done:
            begin = sink._current.begin

            def begin_slowly(begin: Any = begin) -> None:
                clock[0] += 0.008
                begin()

            monkeypatch.setattr(sink._current, "begin", begin_slowly)
            before = sink.steps
            size = sink.size
            sink()
            monkeypatch.setattr(sink._current, "begin", begin)
            assert sink.steps == before + size
            calls += 1
        assert sink.size == 16
        assert calls == 21  # three each of 1, 2, 4 ... 64
        before = sink.steps
        sink()
        assert sink.steps == before + 16
        assert sink.sink_size == "auto"


# State


RESUMED = """
import torch
torch.set_num_threads(1)
from helpers import seed_everything
from sinking import make_resumable

sink, training = make_resumable({kind!r}, {workers})
saved = torch.load({saved!r}, weights_only=False)
training.network.load_state_dict(saved["network"])
training.optimizer.load_state_dict(saved["optimizer"])
sink.load_state_dict(saved["sink"])
torch.set_rng_state(saved["random"])
with sink:
    losses = sink(steps=20).tolist()
    torch.save((losses, sink.steps, sink.epoch), {found!r})
sink.queue.loader.dataset.close()
"""


def state_of(sink: Sink, training: Training) -> dict[str, Any]:
    return {
        "sink": sink.state_dict(),
        "network": training.network.state_dict(),
        "optimizer": training.optimizer.state_dict(),
        "random": torch.get_rng_state(),
    }


def test_a_new_sink_in_a_new_process_goes_on_to_the_bit(programs: Programs, tmp_path: Path) -> None:
    sink, training = make_resumable("gathered", 0)
    with sink, sink.queue.loader.dataset:  # type: ignore[attr-defined]
        sink(steps=PASS + 4)
        torch.save(state_of(sink, training), tmp_path / "saved")
        expected = (sink(steps=20).tolist(), sink.steps, sink.epoch)
    values = {
        "kind": "gathered",
        "workers": 0,
        "saved": str(tmp_path / "saved"),
        "found": str(tmp_path / "found"),
    }
    script = tmp_path / "resumed.py"
    script.write_text(RESUMED.format(**values))
    done = programs.run([str(script)], tmp_path, trains=True)
    assert done.returncode == 0, done.stderr
    assert torch.load(tmp_path / "found") == expected


@pytest.mark.parametrize(
    ("kind", "workers"),
    rarely(
        [("gathered", 0), ("live", 0), ("dealt", 0), ("live", 2), ("dealt", 2)], ("dealt", 2), ("live", 0)
    ),
)
def test_another_sink_goes_on_to_the_bit_wherever_it_stood(kind: str, workers: int, tmp_path: Path) -> None:
    length = PASS // 2 if kind == "dealt" else PASS
    first = (1, length - 1, length)
    later = (length + 1, 2 * length, 2 * length + 2)
    for before in (*first, *later) if not workers else later[: often(1, 3)]:
        sink, training = make_resumable(kind, workers)
        with sink, sink.queue.loader.dataset:  # type: ignore[attr-defined]
            sink(steps=before)
            torch.save(state_of(sink, training), tmp_path / "saved")
            expected = (sink(steps=length + 3).tolist(), sink.steps, sink.epoch)
        saved = torch.load(tmp_path / "saved", weights_only=False)
        again, training = make_resumable(kind, workers)
        with again, again.queue.loader.dataset:  # type: ignore[attr-defined]
            training.network.load_state_dict(saved["network"])
            training.optimizer.load_state_dict(saved["optimizer"])
            again.load_state_dict(saved["sink"])
            torch.set_rng_state(saved["random"])
            assert (again(steps=length + 3).tolist(), again.steps, again.epoch) == expected, before


def test_states_that_are_none() -> None:
    with data_sink(abs, [torch.ones(1)]) as sink:
        with pytest.raises(StateError, match="cannot say where it stands"):
            sink.state_dict()
        for state in (None, {}, {"steps": 3}, {"steps": "x", "passes": 0, "taken": 0, "loader": {}}):
            with pytest.raises(StateError, match="state must be what Sink"):
                sink.load_state_dict(state)  # type: ignore[arg-type]
        assert (sink(), sink.steps) == (1, 1)


def test_a_sink_says_how_many_steps_a_pass_has() -> None:
    class Unsized:
        def __iter__(self) -> Iterator[torch.Tensor]:
            return iter([torch.ones(2)] * 3)

    for loader, steps in (([torch.ones(2)] * 3, 3), (Unsized(), None)):
        with hotset.data_sink(torch.sum, loader, sink_size=1, device="cpu") as sink:
            assert sink.batches == steps
