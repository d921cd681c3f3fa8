"""Steps as graphs, with a fake that stands for CUDA's: see ``sinking.FakeGraphs``.

What is held: every step is a step of the training, whichever way it is run; a graph sees nothing that has
changed since it was captured; and what cannot be one is run eagerly, as if nobody had tried.
"""

from __future__ import annotations

import copy
import importlib
import random
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any, cast

import numpy as np
import pytest
import torch
from helpers import rng_states, seed_everything
from samples import image_and_label
from sinking import BATCH, PASS, FakeGraphs, N, Training, loader_of, momentum, plain
from sources import Samples
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR, StepLR
from torch.utils.data import TensorDataset
from training import one_thread

import hotset
from hotset.device.cuda_graph import CudaGraphs, Step, graphs_on
from hotset.device.gpu_cache import GpuCache
from hotset.device.sink import Sink, data_sink
from hotset.errors import ArgumentError, HotsetWarning

WARM_UP = 3
EAGER = r"steps are run one kernel at a time, as the step cannot be one graph: "


__all__ = ["one_thread"]  # a fixture of each test here


@pytest.fixture(autouse=True)
def _counting_on_the_device_is_done_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("adam", "adamw"):  # AdamW has a step of its own in torch 2.6
        module = importlib.import_module(f"torch.optim.{name}")
        supported = "_get_capturable_supported_devices"
        monkeypatch.setattr(module, supported, lambda *_, **__: ["cpu"], raising=False)


Make = Callable[..., Sink]


@pytest.fixture
def sink_on(monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Makes sinks whose steps are captured by the fake graphs that they are given."""
    made: list[Sink] = []

    def make(graphs: FakeGraphs, fn: Any, loader: Any, size: Any = 1, **more: Any) -> Sink:
        monkeypatch.setattr("hotset.device.sink.graphs_on", lambda device: graphs)
        made.append(data_sink(fn, loader, size, **more))
        return made[-1]

    yield make
    for one in made:
        one.close()


def batches(*sizes: int) -> list[Any]:
    """Batches of these sizes, all of them different."""
    made = torch.Generator().manual_seed(1)
    return [
        (torch.randint(0, 256, (size, 90), generator=made).byte(), torch.arange(size) + number)
        for number, size in enumerate(sizes)
    ]


ALIKE = batches(*[BATCH] * 5)
COUNTED = {"sgd": momentum, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}


def sunk_alike(sink_on: Make, data: Any, steps: int) -> tuple[Sink, FakeGraphs]:
    """Run so many steps plainly, and sunk in one call: alike."""
    reference, training = Training(), Training()
    seed_everything(5)
    expected = plain(reference, data, steps)
    graphs = FakeGraphs(training)
    sink = sink_on(graphs, training.step, data, steps, outputs="all")
    seed_everything(5)
    assert sink().tolist() == expected
    assert training.gradients() == reference.gradients()
    assert training.weights() == reference.weights()
    return sink, graphs


def trained_alike(
    sink_on: Make,
    train: Callable[[Training, Callable[[], list[float]]], list[float]],
    make: Callable[[Training], Any] = lambda training: training.step,
) -> tuple[Sink, FakeGraphs]:
    """Train by fives of steps plainly, and sunk: alike; ``train`` gets what runs five and returns losses."""
    reference, training = Training(), Training()
    step = make(reference)
    seed_everything(5)
    expected = train(reference, lambda: [step(*batch).item() for batch in ALIKE])
    graphs = FakeGraphs(training)
    sink = sink_on(graphs, make(training), ALIKE, 5, outputs="all")
    seed_everything(5)
    assert train(training, lambda: sink().tolist()) == expected
    assert training.weights() == reference.weights()
    return sink, graphs


# Steps


@pytest.mark.parametrize("size", [1, 7, 30])
@pytest.mark.parametrize("kind", COUNTED)
def test_every_step_is_a_step_whichever_way_it_is_run(sink_on: Make, kind: str, size: int) -> None:
    data = batches(BATCH, BATCH, BATCH, BATCH, 2)
    reference = Training(COUNTED[kind])
    for group in reference.optimizer.param_groups:
        group["capturable"] = kind != "sgd"  # its arithmetic is another
    expected = plain(reference, data, 30)
    training = Training(COUNTED[kind])
    graphs = FakeGraphs(training)
    sink = sink_on(graphs, training.step, data, size, outputs="all")
    losses: list[float] = []
    while sink.steps < 30:
        losses += sink(steps=min(size, 30 - sink.steps)).tolist()
    assert losses == expected
    assert (training.weights(), sink.steps) == (reference.weights(), 30)
    # 24 batches of the usual shape and six shorter ones: of each the first three eager, one capture, and all
    # others replays. Both graphs are in one pool, as one runs at a time.
    assert (graphs.sides, graphs.captures, graphs.replays) == (2 * WARM_UP, 2, 30 - 2 * WARM_UP)
    assert graphs.pools == 1
    assert (sink.captured, sink.why, graphs.votes) == (True, None, [])


def test_results_of_replays_are_not_overwritten(sink_on: Make) -> None:
    training = Training()
    sink = sink_on(FakeGraphs(training), training.step, ALIKE)
    results = [sink() for _ in range(10)]
    assert len({one.item() for one in results}) == 10
    assert not any(one.requires_grad for one in results)
    reference = Training()
    assert [one.item() for one in results] == plain(reference, ALIKE, 10)


def test_dropout_draws_on_as_in_a_plain_loop(sink_on: Make) -> None:
    """The capture draws nothing, or the random state would be another than the plain loop's."""
    training, reference = Training(), Training()
    seed_everything(5)
    plain(reference, ALIKE, 12)
    draws = rng_states()
    seed_everything(5)
    sink_on(FakeGraphs(training), training.step, ALIKE, 12)()
    assert rng_states() == draws


def test_without_a_gpu_or_if_told_so_nothing_is_captured(sink_on: Make) -> None:
    assert graphs_on(torch.device("cpu")) is None
    training = Training()
    graphs = FakeGraphs(training)
    sink = sink_on(graphs, training.step, ALIKE, 10, graph=False)
    sink()
    assert (graphs.sides, graphs.captures, sink.why) == (0, 0, "graph=False")
    assert training.optimizer.param_groups[0].get("capturable", False) is False


# What changes between calls


def test_a_changed_learning_rate_is_captured_anew(sink_on: Make) -> None:
    def train(training: Training, five_steps: Callable[[], list[float]]) -> list[float]:
        schedule = StepLR(training.optimizer, 1, gamma=0.3)
        losses = []
        for epoch in range(4):
            losses += five_steps()
            if epoch != 1:  # the third epoch goes on with the second one's
                schedule.step()
        return losses

    _, graphs = trained_alike(sink_on, train)
    assert (graphs.captures, graphs.replays) == (3, 20 - WARM_UP - 2)  # one eager step after each change


def test_a_learning_rate_that_changes_before_each_step_costs_no_captures(sink_on: Make) -> None:
    training = Training()
    graphs = FakeGraphs(training)
    sink = sink_on(graphs, training.step, ALIKE)
    for _ in range(20):
        sink()
        training.optimizer.param_groups[0]["lr"] *= 0.9
    assert graphs.captures <= 1


def test_loaded_optimizer_state_is_not_written_to_the_old_place(sink_on: Make) -> None:
    """``load_state_dict`` puts new tensors in the place of momentum, and forgets ``capturable``."""
    reference = Training(torch.optim.Adam)
    reference.optimizer.param_groups[0]["capturable"] = True
    plain(reference, ALIKE, 5)
    saved, weights = copy.deepcopy((reference.optimizer.state_dict(), reference.network.state_dict()))
    seed_everything(5)
    expected = plain(reference, ALIKE, 5)
    training = Training(torch.optim.Adam)
    graphs = FakeGraphs(training)
    sink = sink_on(graphs, training.step, ALIKE, 5, outputs="all")
    sink()
    for group in saved["param_groups"]:
        group["capturable"] = False  # as an eager run would have saved it
    training.optimizer.load_state_dict(saved)
    training.network.load_state_dict(weights)
    seed_everything(5)
    assert sink().tolist() == expected
    assert (graphs.captures, sink.captured) == (2, True)
    assert training.optimizer.param_groups[0]["capturable"] is True


def test_unfrozen_parameters_are_captured_anew(sink_on: Make) -> None:
    def train(training: Training, five_steps: Callable[[], list[float]]) -> list[float]:
        losses = []
        for learning in (False, True):
            training.network[0].requires_grad_(learning)
            losses += five_steps()
        return losses

    _, graphs = trained_alike(sink_on, train)
    assert graphs.captures == 2


def test_an_optimizer_that_is_made_after_the_sink_is_found(sink_on: Make) -> None:
    training = Training()

    class Trainer:
        def step(self, x: Any, y: Any) -> Any:
            return self.training.step(x, y)

    trainer: Any = Trainer()
    graphs = FakeGraphs(training)
    sink = sink_on(graphs, trainer.step, ALIKE, 5)
    trainer.training = training
    for _ in range(2):
        sink()
        training.optimizer.param_groups[0]["lr"] *= 0.5
    sink()
    assert graphs.captures == 3


def test_adam_counts_its_steps_right(sink_on: Make) -> None:
    training = Training(torch.optim.Adam)
    graphs = FakeGraphs(training)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sink_on(graphs, training.step, ALIKE, 10)()
    assert training.optimizer.param_groups[0]["capturable"] is True
    assert {float(state["step"]) for state in training.optimizer.state.values()} == {10.0}
    assert graphs.captures == 1


# What cannot be captured


def fallen_back(
    sink_on: Make, make: Callable[[Training], Any], sentence: str, steps: int = 10, **fake: Any
) -> FakeGraphs:
    """Run some steps plainly, and sunk in twos: alike, though a capture is tried and fails; said once."""
    reference, training = Training(), Training()
    step = make(reference)
    seed_everything(5)
    expected = [step(*ALIKE[number % 5]).item() for number in range(steps)]
    draws = rng_states()
    graphs = FakeGraphs(training, **fake)
    sink = sink_on(graphs, make(training), ALIKE, 2, outputs="all")
    seed_everything(5)
    with pytest.warns(HotsetWarning, match=EAGER + sentence) as said:
        losses = [loss for _ in range(steps // 2) for loss in sink().tolist()]
    assert len(said) == 1
    assert losses == expected
    assert training.weights() == reference.weights()
    assert rng_states() == draws
    assert (sink.steps, sink.captured, graphs.replays) == (steps, False, 0)
    assert sink.why is not None
    return graphs


def test_a_scheduler_inside_the_step(sink_on: Make) -> None:
    schedules = []

    def make(training: Training) -> Any:
        schedules.append(LambdaLR(training.optimizer, lambda epoch: 1 / (1 + epoch)))
        scheduler = schedules[-1]

        def step(x: Any, y: Any) -> Any:
            loss = training.step(x, y)
            scheduler.step()
            return loss

        return step

    graphs = fallen_back(sink_on, make, "it changes what its optimizer or scheduler keeps on the host")
    assert graphs.captures == 1
    assert [one.last_epoch for one in schedules] == [10, 10]
    assert schedules[0].get_last_lr() == schedules[1].get_last_lr()


def test_a_learning_rate_that_the_step_writes_into_a_tensor(sink_on: Make) -> None:
    rates = []

    def make(training: Training) -> Any:
        rates.append(torch.tensor(0.05))
        rate = training.optimizer.param_groups[0]["lr"] = rates[-1]

        def step(x: Any, y: Any) -> Any:
            loss = training.step(x, y)
            rate.mul_(0.9)
            return loss

        return step

    fallen_back(sink_on, make, "it changes what its optimizer or scheduler keeps on the host")
    assert rates[0] == rates[1]


@pytest.mark.parametrize(
    ("draw", "whose"),
    [
        (lambda: random.random(), "random's global state"),
        (lambda: np.random.beta(1.0, 1.0), "numpy.random's global state"),
    ],
)
def test_a_step_that_draws_on_the_host_as_mixup_does(
    sink_on: Make, draw: Callable[[], float], whose: str
) -> None:
    def make(training: Training) -> Any:
        return lambda x, y: training.step((x * draw()).byte(), y)

    fallen_back(sink_on, make, f"{whose} moved, and a graph would repeat what was drawn for ever")


def test_a_step_that_holds_a_generator(sink_on: Make) -> None:
    def make(training: Training) -> Any:
        drawn = np.random.default_rng(4)

        def step(x: Any, y: Any) -> Any:
            return training.step((x * drawn.random()).byte(), y)

        return step

    fallen_back(sink_on, make, r".*step\.drawn \(a numpy\.Generator\) moved")


@pytest.mark.parametrize("error", [RuntimeError, TypeError, ValueError, AssertionError])
def test_an_error_in_the_capture(sink_on: Make, error: type[Exception]) -> None:
    """Halfway: gradients are there that no kernel has computed, and the step adds to what it finds."""

    def make(training: Training) -> Any:
        def step(x: Any, y: Any) -> Any:
            loss = torch.nn.functional.cross_entropy(training.network(x.float() / 255), y % 5)
            loss.backward()
            if training.capturing:
                raise error("operation not permitted when stream is capturing\n in some file")
            training.optimizer.step()
            training.optimizer.zero_grad()
            return loss

        return step

    graphs = fallen_back(sink_on, make, r"operation not permitted when stream is capturing\.$")
    assert graphs.captures == 1


def test_what_is_wrong_with_the_step_itself_is_the_users_own_error(sink_on: Make) -> None:
    training = Training()

    def step(x: Any, y: Any) -> Any:
        if len(training.seen) == WARM_UP:
            raise KeyError("no such class")
        return training.step(x, y)

    sink = sink_on(FakeGraphs(training), step, ALIKE, 10)
    with pytest.raises(KeyError, match="no such class"):
        sink()
    assert sink.steps == WARM_UP


def test_a_gradient_scaler(sink_on: Make) -> None:
    def make(training: Training) -> Any:
        scaler = torch.amp.GradScaler("cpu")

        def step(x: Any, y: Any) -> Any:
            training.optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(training.network(x.float() / 255), y % 5)
            scaler.scale(loss).backward()
            scaler.step(training.optimizer)
            scaler.update()
            return loss

        return step

    graphs = fallen_back(
        sink_on, make, "its GradScaler reads from the device after each step; train in bfloat16"
    )
    assert graphs.captures == 0


def test_a_gradient_scaler_that_is_off(sink_on: Make) -> None:
    training, scaler = Training(), torch.amp.GradScaler("cpu", enabled=False)

    def step(x: Any, y: Any) -> Any:
        return scaler.scale(training.step(x, y))

    graphs = FakeGraphs(training)
    sink_on(graphs, step, ALIKE, 5)()
    assert graphs.replays == 2


def test_strings_in_the_batch(sink_on: Make) -> None:
    training = Training()
    graphs = FakeGraphs(training)
    data = [{"x": x, "y": y, "names": ["a"] * 4} for x, y in ALIKE]
    sink = sink_on(graphs, lambda batch: training.step(batch["x"], batch["y"]), data, 10)
    with pytest.warns(HotsetWarning, match=EAGER + r"its batches hold a str at \['names'\]\[0\]"):
        sink()
    assert (graphs.captures, sink.steps) == (0, 10)
    assert len(training.seen) == 10


def test_a_name_that_the_step_binds_anew(sink_on: Make) -> None:
    """A graph would read the average of the capture for ever."""

    class Averaged:
        def __init__(self, training: Training) -> None:
            self.training = training
            self.average = torch.zeros(())

        def step(self, x: Any, y: Any) -> Any:
            loss = self.training.step(x, y)
            self.average = 0.9 * self.average + loss.detach()
            return self.average

    graphs = fallen_back(
        sink_on, lambda training: Averaged(training).step, r"it binds .*Averaged\.average to a new tensor"
    )
    assert graphs.captures == 0


def test_a_tensor_that_the_step_writes_into(sink_on: Make) -> None:
    def averaged(training: Training) -> Any:
        average = torch.zeros(())

        def step(x: Any, y: Any) -> Any:
            return average.mul_(0.9).add_(training.step(x, y).detach()).clone()

        return step

    reference, training = Training(), Training()
    step = averaged(reference)
    seed_everything(5)
    expected = [step(*ALIKE[number % 5]).item() for number in range(WARM_UP)]
    graphs = FakeGraphs(training)
    sink = sink_on(graphs, averaged(training), ALIKE, WARM_UP, outputs="all")
    seed_everything(5)
    assert sink().tolist() == expected
    sink(steps=2)
    assert (graphs.captures, sink.why) == (1, None)


def test_a_step_that_waits_for_the_device(sink_on: Make) -> None:
    graphs = fallen_back(
        sink_on,
        lambda training: training.step,
        r"it waits for the device at train\.py:3 and 1 more\.$",
        waits=["train.py:3", "train.py:9"],
    )
    assert graphs.captures == 0


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")  # of what torch.compile imports
def test_a_step_that_was_compiled_into_graphs_of_its_own(sink_on: Make) -> None:
    def make(training: Training) -> Any:
        compiled = torch.compile(training.step, mode="reduce-overhead")

        def step(x: Any, y: Any) -> Any:
            assert compiled is not None  # to run it would take a compiler
            return training.step(x, y)

        return step

    assert fallen_back(sink_on, make, "something in it was compiled into graphs of its own").captures == 0


def test_casts_of_an_outer_autocast_are_not_captured(sink_on: Make) -> None:
    """They are of the weights as an earlier step had them; those of the capture no kernel has computed."""
    training = Training()
    kept: list[bool] = []

    def step(x: Any, y: Any) -> Any:
        kept.append(torch.is_autocast_cache_enabled())
        return training.step(x, y)

    with torch.autocast("cpu", torch.bfloat16):
        sink_on(FakeGraphs(training), step, ALIKE, WARM_UP + 2)()
        assert torch.is_autocast_cache_enabled()
    assert kept == [True] * WARM_UP + [False] + [True] * 2  # the replays of the fake run Python
    assert len(training.seen) == len(kept)


def test_an_outer_autocast_without_a_cache_stays_without(sink_on: Make) -> None:
    training = Training()
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        graphs = FakeGraphs(training)
        sink_on(graphs, training.step, ALIKE, WARM_UP + 2)()
        assert graphs.captures == 1
        assert not torch.is_autocast_cache_enabled()


# Gradients


def added_to(training: Training) -> Any:
    """A step that keeps its gradients where they are."""

    def step(x: Any, y: Any) -> Any:
        training.optimizer.zero_grad(set_to_none=False)
        loss = torch.nn.functional.cross_entropy(training.network(x.float() / 255), y % 5)
        loss.backward()
        training.optimizer.step()
        return loss

    return step


def accumulating(training: Training) -> Any:
    """A step that adds to the gradients; its caller steps."""

    def step(x: Any, y: Any) -> Any:
        loss = torch.nn.functional.cross_entropy(training.network(x.float() / 255), y % 5)
        loss.backward()
        return loss

    return step


@pytest.mark.parametrize("make", [added_to, accumulating])
@pytest.mark.parametrize("to_none", [False, True])
def test_gradients_that_are_kept_and_those_that_the_caller_clears(
    sink_on: Make, make: Callable[[Training], Any], to_none: bool
) -> None:
    """A graph adds to the gradients that it was captured with: freed, their memory is somebody else's."""

    def train(training: Training, five_steps: Callable[[], list[float]]) -> list[float]:
        losses = []
        for _ in range(4):
            losses += five_steps()
            if make is accumulating:
                training.optimizer.step()
            training.optimizer.zero_grad(set_to_none=to_none)
        return losses

    sink, graphs = trained_alike(sink_on, train, make)
    # The caller's first step makes momentum, which is elsewhere in each capture.
    assert (sink.why, graphs.captures) == (None, 4 if to_none else 1 + (make is accumulating))


def test_gradients_of_the_step_before(sink_on: Make) -> None:
    def make(training: Training) -> Any:
        def step(x: Any, y: Any) -> Any:
            training.optimizer.step()
            training.optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(training.network(x.float() / 255), y % 5)
            loss.backward()
            return loss

        return step

    graphs = fallen_back(sink_on, make, "its optimizer steps with the gradients of the step before")
    assert graphs.captures == 0


def test_gradients_that_are_cleared_before_each_step(sink_on: Make) -> None:
    """Whether the step would add to those that it finds, nobody can see."""
    training, reference = Training(), Training()
    step = accumulating(reference)
    seed_everything(5)
    expected = [step(*ALIKE[number % 5]).item() for number in range(12)]
    graphs = FakeGraphs(training)
    sink = sink_on(graphs, accumulating(training), ALIKE)
    seed_everything(5)

    def train() -> list[float]:
        losses = []
        for _ in range(12):
            losses.append(sink().item())
            training.optimizer.zero_grad()
        return losses

    with pytest.warns(HotsetWarning, match="its gradients are cleared between calls"):
        assert train() == expected
    assert graphs.captures == 0


def test_nothing_of_a_step_is_kept_for_autograd() -> None:
    """A node that adds to a gradient belongs to the stream of the step that made it."""
    weight = torch.ones(2, requires_grad=True)
    step = Step(lambda batch: {"loss": (weight * batch).sum()}, abs, None)
    step.begin()
    assert step(torch.ones(2))["loss"].requires_grad is False


# Ranks


@pytest.fixture
def parallel() -> Iterator[Callable[[Training], Training]]:
    """Has a training's gradients averaged over the ranks of a job, which is one."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)

    def make(training: Training) -> Training:
        training.network = DistributedDataParallel(training.network)  # type: ignore[assignment]
        return training

    try:
        yield make
    finally:
        torch.distributed.destroy_process_group()


Parallel = Callable[[Training], Training]


def test_ranks_that_do_not_train_together_do_not_wait_for_each_other(
    sink_on: Make, parallel: Parallel
) -> None:
    """A sink on some ranks would hang if it asked all of them."""
    training = Training()
    graphs = FakeGraphs(training)
    sink_on(graphs, training.step, ALIKE, 14)()
    assert (graphs.votes, graphs.captures, graphs.replays) == ([], 1, 14 - WARM_UP)


def test_ranks_warm_up_longer_and_vote(sink_on: Make, parallel: Parallel) -> None:
    training = parallel(Training())
    graphs = FakeGraphs(training)
    sink_on(graphs, training.step, ALIKE, 14)()
    assert (graphs.sides, graphs.captures, graphs.replays) == (11, 1, 3)
    assert graphs.votes == [2, 2]  # ready; captured


def test_ranks_wait_for_one_that_is_not_ready(sink_on: Make, parallel: Parallel) -> None:
    """Each step past the warm-up is a vote, of whatever shape its batch is."""
    training = parallel(Training())
    graphs = FakeGraphs(training, others=[2, 1])
    sink_on(graphs, training.step, batches(*[BATCH] * 11, 2), 15)()
    assert graphs.votes == [1, 2, 2, 2]  # a shorter batch; another rank's; then both
    assert (graphs.captures, graphs.replays) == (1, 2)


def test_ranks_capture_no_shorter_batches(sink_on: Make, parallel: Parallel) -> None:
    """The others, who would replay the usual shape, would not vote any more."""
    training = parallel(Training())
    graphs = FakeGraphs(training)
    sink_on(graphs, training.step, batches(*[BATCH] * 9, *[2] * 6), 15)()
    assert graphs.votes == [1] * 4
    assert graphs.captures == 0


def test_another_rank_that_cannot_capture(sink_on: Make, parallel: Parallel) -> None:
    def make(training: Training) -> Any:
        return parallel(training).step

    graphs = fallen_back(sink_on, make, "another rank could not", steps=30, others=[2, 0])
    assert (graphs.captures, graphs.votes) == (1, [2, 2])


def test_a_rank_that_cannot_capture_votes_so(sink_on: Make, parallel: Parallel) -> None:
    def make(training: Training) -> Any:
        return parallel(training).step

    why = r"broken \(what autograd keeps .*make DistributedDataParallel under torch\.cuda\.stream"
    graphs = fallen_back(sink_on, make, why, steps=30, error=RuntimeError("broken"))
    assert (graphs.captures, graphs.votes) == (1, [2, 0])


def test_the_lowest_vote_is_taken_over_the_ranks_of_the_group(parallel: Parallel) -> None:
    group = parallel(Training()).network.process_group
    assert [CudaGraphs.lowest(cast(Any, None), vote, [group, group]) for vote in (0, 1, 2)] == [0, 1, 2]


# Memory


def test_a_closed_sink_keeps_no_graph(sink_on: Make) -> None:
    training, reference = Training(), Training()
    seed_everything(5)
    expected = plain(reference, ALIKE, 20)
    graphs = FakeGraphs(training)
    sink = sink_on(graphs, training.step, ALIKE, 5, outputs="all")
    seed_everything(5)
    losses = sink().tolist()
    assert (graphs.alive, sink.captured) == (1, True)
    gradients = [weakref.ref(one.grad) for one in training.network.parameters() if one.grad is not None]
    sink.close()
    assert (graphs.alive, sink.captured) == (0, False)
    training.optimizer.zero_grad()
    assert gradients
    assert not any(one() is not None for one in gradients)
    for _ in range(3):
        losses += sink().tolist()
    assert losses == expected
    assert (graphs.alive, graphs.captures) == (1, 2)


def test_a_step_that_is_captured_again_has_one_graph(sink_on: Make) -> None:
    training = Training()
    graphs = FakeGraphs(training)
    sink = sink_on(graphs, training.step, ALIKE, 5)
    for number in range(4):
        training.optimizer.param_groups[0]["lr"] = 0.1 / (1 + number)
        sink()
        assert (graphs.alive, graphs.pools) == (1, 1)
    assert graphs.captures == 4
    sink.close()
    assert graphs.alive == 0


def test_settings_that_change_before_each_step_leave_no_graph(sink_on: Make) -> None:
    training = Training()
    graphs = FakeGraphs(training)
    sink = sink_on(graphs, training.step, ALIKE)
    sink(steps=5)
    assert graphs.alive == 1
    for _ in range(2):
        training.optimizer.param_groups[0]["lr"] *= 0.9
        sink()
    assert (graphs.captures, graphs.alive) == (1, 0)


def test_graph_true_raises_at_every_call_and_counts_true(sink_on: Make) -> None:
    training = Training()
    graphs = FakeGraphs(training, error=RuntimeError("no graph"))
    sink = sink_on(graphs, training.step, ALIKE, 10, graph=True)
    for steps in (WARM_UP + 1, WARM_UP + 2):
        with pytest.raises(ArgumentError, match="graph=True, and the step cannot be one graph: no graph"):
            sink()
        assert sink.steps == steps
    assert len(training.seen) == WARM_UP + 2 + graphs.captures


# Shapes


def test_a_batch_of_another_shape_is_eager_and_said_once(sink_on: Make) -> None:
    data = batches(BATCH, BATCH, BATCH, BATCH, 6, BATCH, 7, 3)
    with pytest.warns(HotsetWarning, match=r"a batch differs from the first \(at \[0\].*pad them") as said:
        sink, graphs = sunk_alike(sink_on, data, 16)
    assert len(said) == 1
    assert (graphs.captures, graphs.replays, sink.captured) == (1, 10 - WARM_UP, True)


def test_gradients_are_those_of_the_last_step_also_after_an_eager_one(sink_on: Make) -> None:
    """An eager step makes gradients anew, and a graph writes to those that it was captured with."""
    with pytest.warns(HotsetWarning, match="a batch differs from the first"):
        _, graphs = sunk_alike(sink_on, batches(*[BATCH] * 5, 6, BATCH), 7)
    assert (graphs.captures, graphs.replays) == (1, 6 - WARM_UP)


def test_a_shorter_batch_that_comes_first_does_not_set_the_shape(sink_on: Make) -> None:
    """A sink that goes on at the end of a pass meets the last batch first."""
    _, graphs = sunk_alike(sink_on, batches(2, *[BATCH] * 9), 20)
    assert (graphs.captures, graphs.replays) == (1, 18 - WARM_UP)


def test_once_captured_larger_batches_do_not_set_the_shape(sink_on: Make) -> None:
    training = Training()
    graphs = FakeGraphs(training)
    sink = sink_on(graphs, training.step, batches(*[BATCH] * 5, 9), 12)
    with pytest.warns(HotsetWarning, match="a batch differs from the first"):
        sink()
    assert graphs.captures == 1


def test_shorter_batches_of_few_shapes_are_captured(sink_on: Make) -> None:
    sizes = [BATCH, 3, 2, 1] * 5
    wide = torch.randint(0, 256, (100, 90), generator=torch.Generator().manual_seed(1)).byte()
    data = [(wide[:size] + number, torch.arange(size)) for number, size in enumerate(sizes)]
    more = [(wide[: 2 * BATCH - 1], torch.arange(2 * BATCH - 1))] * 3

    def make(training: Training) -> Any:
        training.network.eval()  # no batch norm over one sample
        return training.step

    reference, training = Training(), Training()
    expected = [make(reference)(*batch).item() for batch in [*data, *more]]
    graphs = FakeGraphs(training)
    sink = sink_on(graphs, make(training), [*data, *more], 20, outputs="all")
    losses = sink().tolist()
    assert (graphs.captures, graphs.alive, graphs.pools) == (4, 4, 1)
    assert graphs.replays == 20 - 4 * WARM_UP
    with pytest.warns(HotsetWarning, match="a batch differs from the first"):
        losses += sink(steps=3).tolist()
    assert losses == expected
    assert graphs.captures == 4


def test_no_more_than_a_few_shapes_are_captured(sink_on: Make) -> None:
    data = batches(*[size for size in (9, 8, 7, 6, 5, 4, 3, 2) for _ in range(WARM_UP + 1)])
    _, graphs = sunk_alike(sink_on, data, len(data))
    assert (graphs.captures, graphs.alive) == (4, 4)


def test_a_shorter_batch_that_cannot_be_captured_is_eager_and_others_are_replayed(sink_on: Make) -> None:
    """And a later capture is not in the same memory: torch takes none there after one that has failed."""

    class Full(FakeGraphs):
        failed: Any = None

        def capture(self, fn: Callable[[], Any], pool: Any) -> tuple[Callable[[], None], Any]:
            if pool is self.failed:
                raise RuntimeError("beginAllocateToPool: already recording to mempool_id")
            self._error = torch.OutOfMemoryError("the card is full") if self.captures == 1 else None
            self.failed = pool if self._error is not None else self.failed
            return super().capture(fn, pool)

    data = batches(*[BATCH] * 4, 2)
    reference, training = Training(), Training()
    seed_everything(5)
    expected = plain(reference, data, 40)
    graphs = Full(training)
    sink = sink_on(graphs, training.step, data, 40, outputs="all")
    seed_everything(5)
    assert sink().tolist() == expected
    assert (graphs.captures, graphs.alive, graphs.replays, sink.why) == (2, 1, 32 - WARM_UP, None)
    for one in (reference, training):
        one.optimizer.param_groups[0]["lr"] = 0.01
    seed_everything(6)
    expected = plain(reference, data, 40)
    seed_everything(6)
    assert sink().tolist() == expected
    assert (graphs.captures, graphs.alive, graphs.pools, sink.why) == (3, 1, 2, None)


# Resident samples


def test_resident_samples_are_one_upload_a_call_and_the_same_losses(
    sink_on: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    uploads: list[int] = []
    upload = GpuCache.upload
    monkeypatch.setattr(
        GpuCache, "upload", lambda self, rows: (uploads.append(len(rows)), upload(self, rows))[1]
    )
    with hotset.cache(Samples(image_and_label, N), memory="4MiB") as cached:
        for _ in hotset.DataLoader(cached, batch_size=BATCH):
            pass
        reference, training = Training(), Training()
        expected = plain(reference, loader_of(cached), 5 * PASS)
        graphs = FakeGraphs(training)
        loader = loader_of(cached)
        sink = sink_on(graphs, training.step, loader, PASS // 2, outputs="all")
        sink.queue._gpu_cache = GpuCache(1 << 20, torch.device("cpu"))
        losses = [loss for _ in range(10) for loss in sink().tolist()]
        assert losses == expected
        assert training.weights() == reference.weights()
        # Six batches of four in the first half of a pass, and five of them and two samples in the second.
        assert uploads == [24, 22] * 5
        assert (graphs.captures, graphs.replays) == (2, 5 * PASS - 2 * WARM_UP)
        assert sink.queue.stats().batches == 5 * PASS
        signature = (
            torch.empty(BATCH - 1, 3, 6, 5, dtype=torch.uint8),
            torch.empty(BATCH, dtype=torch.int64),
        )
        sink.close()
        strict = sink_on(graphs, training.step, loader, 3, input_signature=signature)
        strict.queue._gpu_cache = GpuCache(1 << 20, torch.device("cpu"))
        with pytest.raises(ArgumentError, match=r"input_signature: at \[0\].*\(4, 3, 6, 5\)"):
            strict()


def test_a_state_in_the_midst_of_uploaded_rows_is_that_of_the_next_step(sink_on: Make) -> None:
    with hotset.cache(TensorDataset(torch.arange(20.0)), memory="1MiB") as cached:
        for _ in hotset.DataLoader(cached, batch_size=2):
            pass
        seen: list[float] = []

        def step(x: torch.Tensor) -> torch.Tensor:
            seen.append(x[0].item())
            if len(seen) == 4:
                raise ValueError("diverged")
            return x.sum()

        sinks = []
        for _ in range(2):
            sinks.append(data_sink(step, hotset.DataLoader(cached, batch_size=2), 8))
            sinks[-1].queue._gpu_cache = GpuCache(1 << 20, torch.device("cpu"))
        first, second = sinks
        with first, second:
            with pytest.raises(ValueError, match="diverged"):
                first()
            assert (first.steps, seen) == (3, [0.0, 2.0, 4.0, 6.0])
            second.load_state_dict(first.state_dict())
            second(steps=2)
            assert (second.steps, seen[4:]) == (5, [8.0, 10.0])
            first(steps=2)
            assert (first.steps, seen[6:]) == (5, [8.0, 10.0])


def test_what_is_resident_is_captured_with_todays_settings_and_again_after_a_break(sink_on: Make) -> None:
    """The step on batches that came by the queue was captured before the learning rate changed."""
    training, reference = Training(), Training()
    with hotset.cache(Samples(image_and_label, N), memory="4MiB") as cached:
        graphs = FakeGraphs(training)
        sink = sink_on(graphs, training.step, loader_of(cached), PASS, outputs="all")
        plainly = loader_of(cached)
        # The first pass fills the cache, the second one finds the samples resident, the third one does not.
        losses, expected = [], []
        for number in range(3):
            rate = 0.05 / (number + 1)
            for one in (training, reference):
                one.optimizer.param_groups[0]["lr"] = rate
            sink.queue._gpu_cache = GpuCache(1 << 20, torch.device("cpu")) if number == 1 else None
            seed_everything(number)
            losses += sink().tolist()
            seed_everything(number)
            expected += plain(reference, plainly, PASS)
        assert losses == expected
        assert graphs.captures == 3


def test_samples_that_were_let_go_of_take_no_memory_on_the_device(sink_on: Make) -> None:
    with hotset.cache(Samples(image_and_label, N), memory="4MiB") as cached:
        for _ in hotset.DataLoader(cached, batch_size=BATCH):
            pass
        training = Training()
        sink = sink_on(FakeGraphs(training), training.step, loader_of(cached), 6)
        residents = sink.queue._gpu_cache = GpuCache(1 << 20, torch.device("cpu"))
        sink()
        held = weakref.ref(residents.columns[0])
        residents.clear()
        assert held() is None


# The step alone


def test_a_step_without_graphs_is_the_function() -> None:
    step = Step(lambda batch: batch + 1, abs, None)
    step.begin()
    assert (step(torch.ones(1)), step.captured, step.why) == (2, False, None)
