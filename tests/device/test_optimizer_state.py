"""What a capture may have changed on the host: found, and put back to the very objects and bits."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from helpers import rng_states
from torch import nn
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    LinearLR,
    LRScheduler,
    OneCycleLR,
    SequentialLR,
    StepLR,
)
from torch.utils.data import TensorDataset

from hotset.device.optimizer_state import Gradients, HostState, Rehearsal

NETWORK = nn.Linear(2, 1)


def stepping(optimizer: Any, *reached: Any) -> Callable[[], None]:
    """A step within whose reach the optimizer is, and these."""

    def step() -> None:
        assert reached is not None
        optimizer.zero_grad()
        NETWORK(torch.ones(3, 2)).sum().backward()
        optimizer.step()

    return step


def sgd(**more: Any) -> torch.optim.SGD:
    return torch.optim.SGD(NETWORK.parameters(), **{"lr": 0.1, "momentum": 0.9, **more})


class Held:
    """A trainer as frameworks have them."""

    def __init__(self, optimizer: Any) -> None:
        self.parts = {"optimizers": [optimizer]}

    def step(self) -> None: ...


def test_optimizers_are_found_wherever_they_hang() -> None:
    optimizer = sgd()
    for fn in (stepping(optimizer), Held(optimizer).step, lambda a=optimizer: a):
        assert HostState(fn).optimizers == [optimizer]
    assert HostState(lambda: None).optimizers == []


def test_a_scaler_counts_if_it_is_on() -> None:
    on, off = (torch.amp.GradScaler("cpu", enabled=enabled) for enabled in (True, False))
    assert HostState(stepping(sgd(), on)).scales
    assert not HostState(stepping(sgd(), off)).scales
    assert not HostState(stepping(sgd())).scales


def test_nothing_changes_where_nothing_is_done() -> None:
    saved = HostState(stepping(sgd())).save()
    assert saved.changes() is None


SCHEDULERS: dict[str, Callable[[Any], LRScheduler]] = {
    "step": lambda optimizer: StepLR(optimizer, 1, 0.5),
    "cosine": lambda optimizer: CosineAnnealingLR(optimizer, 7),
    "onecycle": lambda optimizer: OneCycleLR(optimizer, 1.0, total_steps=50),
    "sequential": lambda optimizer: SequentialLR(
        optimizer, [LinearLR(optimizer), StepLR(optimizer, 1, 0.5)], milestones=[2]
    ),
}


@pytest.mark.parametrize("tensor", [False, True], ids=["number", "tensor"])
@pytest.mark.parametrize("kind", SCHEDULERS)
@pytest.mark.filterwarnings("ignore:The epoch parameter in:UserWarning")
def test_a_scheduler_goes_on_as_if_nothing_had_happened(kind: str, tensor: bool) -> None:
    def rates(tried: bool) -> list[float]:
        optimizer = sgd(lr=torch.tensor(0.1) if tensor else 0.1)
        scheduler = SCHEDULERS[kind](optimizer)
        step = stepping(optimizer, scheduler)
        step()
        rate = optimizer.param_groups[0]["lr"]
        if tried:
            saved = HostState(step).save()
            step()
            scheduler.step()
            assert saved.changes() is not None
            saved.put_back()
            assert saved.changes() is None
            assert not tensor or optimizer.param_groups[0]["lr"] is rate
        found = []
        for _ in range(6):
            optimizer.step()
            scheduler.step()
            found.append(float(optimizer.param_groups[0]["lr"]))
        return found

    assert rates(tried=True) == rates(tried=False)


@pytest.mark.parametrize("name", ["Adam", "AdamW", "RMSprop", "NAdam"])
def test_counts_are_put_back_and_what_was_not_there_is_gone(name: str) -> None:
    optimizer = getattr(torch.optim, name)(NETWORK.parameters(), lr=0.1)
    step = stepping(optimizer)
    fresh = HostState(step).save()
    step()
    assert fresh.changes() is not None
    fresh.put_back()
    assert len(optimizer.state) == 0
    step()
    before = {id(state): dict(state) for state in optimizer.state.values()}
    numbers = [value.clone() for state in optimizer.state.values() for value in state.values()]
    saved = HostState(step).save()
    step()
    assert saved.changes() is not None
    saved.put_back()
    after = {id(state): dict(state) for state in optimizer.state.values()}
    assert [list(map(id, one.values())) for one in after.values()] == [
        list(map(id, one.values())) for one in before.values()
    ]
    found = [value for state in optimizer.state.values() for value in state.values()]
    assert all(torch.equal(a, b) for a, b in zip(found, numbers, strict=True))


def test_gradients_are_put_back_when_asked_for() -> None:
    optimizer = sgd()
    step = stepping(optimizer)
    optimizer.zero_grad()
    saved = HostState(step).save()
    step()
    saved.put_back()
    assert NETWORK.weight.grad is not None
    saved.put_back_gradients()
    assert NETWORK.weight.grad is None


DRAWS: dict[str, Callable[[], object]] = {
    "random": random.random,
    "numpy.random": np.random.random,
    "torch": lambda: torch.rand(1),
}


@pytest.mark.parametrize("kind", DRAWS)
def test_draws_on_the_host_are_seen_and_taken_back(kind: str) -> None:
    before = rng_states()
    saved = HostState(stepping(sgd())).save()
    DRAWS[kind]()
    assert (saved.changes() or "").startswith(f"{kind}'s global state moved, and a graph would repeat")
    saved.put_back()
    assert rng_states() == before


def test_settings_tell_every_change_that_a_graph_would_not_see() -> None:
    optimizer = sgd(lr=torch.tensor(0.1))
    group = optimizer.param_groups[0]
    host = HostState(stepping(optimizer))
    stepping(optimizer)()

    def thawed() -> None:
        NETWORK.bias.requires_grad_(not NETWORK.bias.requires_grad)

    changes: list[Callable[[], object]] = [
        lambda: group["lr"].mul_(0.5),
        lambda: group.update(lr=0.2),
        lambda: group.update(weight_decay=0.1),
        lambda: optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict())),
        lambda: setattr(NETWORK.weight, "data", NETWORK.weight.data.clone()),
        thawed,
        thawed,
    ]
    for change in changes:
        before = host.settings()
        assert host.settings() == before
        kept = optimizer.state[NETWORK.weight].get("momentum_buffer"), NETWORK.weight.data
        change()
        assert host.settings() != before
        del kept  # until here: freed memory may be given out again, at the same address


def test_capturable_is_set_once_and_counts_move_to_the_device() -> None:
    weight = nn.Parameter(torch.ones(2, device="meta"))
    optimizer = torch.optim.Adam([weight])
    optimizer.state[weight]["step"] = torch.tensor(3.0)
    host = HostState(lambda: optimizer)
    host.make_capturable()
    assert optimizer.param_groups[0]["capturable"] is True
    count = optimizer.state[weight]["step"]
    assert count.device.type == "meta"
    host.make_capturable()
    assert optimizer.state[weight]["step"] is count
    counts_nothing = sgd()
    HostState(stepping(counts_nothing)).make_capturable()
    assert "capturable" not in counts_nothing.param_groups[0]


# The rehearsal


def rehearsed(step: Callable[[], object]) -> Gradients | str:
    host = HostState(step)
    with Rehearsal(host, {torch.device("cpu")}) as watched:
        step()
    return watched.found()


def test_a_gradient_is_again_the_one_to_which_the_graph_writes() -> None:
    """After an eager step, of a shorter batch, say, it is that step's."""
    step = stepping(sgd())
    step()
    found = rehearsed(step)
    assert isinstance(found, Gradients)
    assert found.ready
    found.hold()
    held = NETWORK.weight.grad
    step()
    assert NETWORK.weight.grad is not held
    assert found.rebind()
    assert NETWORK.weight.grad is held


def test_a_gradient_that_is_kept_and_then_replaced_is_told() -> None:
    optimizer = sgd()

    def step() -> None:
        optimizer.zero_grad(set_to_none=False)
        NETWORK(torch.ones(3, 2)).sum().backward()
        optimizer.step()

    optimizer.zero_grad()
    first = rehearsed(step)
    assert isinstance(first, Gradients)
    assert not first.ready, "whether it adds to gradients cannot be seen where there are none"
    found = rehearsed(step)
    assert isinstance(found, Gradients)
    found.hold()
    assert found.rebind()
    optimizer.zero_grad()
    assert not found.ready
    assert not found.rebind()


def test_gradients_of_others_are_none_of_its_business() -> None:
    """Two networks, as a GAN has them: the step that reaches both touches one."""
    other, own = nn.Linear(2, 1), nn.Linear(2, 1)
    optimizer = torch.optim.SGD(own.parameters(), lr=0.1)

    def step() -> None:
        optimizer.zero_grad()
        own(other(torch.ones(3, 2)).detach().expand(3, 2)).sum().backward()
        optimizer.step()

    other(torch.ones(1, 2)).sum().backward()
    step()
    found = rehearsed(step)
    assert isinstance(found, Gradients)
    found.hold()
    other.zero_grad()
    assert found.rebind()
    assert other.weight.grad is None


class Averaged:
    """A step that keeps tensors in attributes, lists and dicts."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.loss = torch.zeros(())
        self.kept = [torch.zeros(())]
        self.losses: list[torch.Tensor] = []
        self.nested = {"a": {"b": torch.zeros(())}}
        self.data = TensorDataset(torch.zeros(2))

    def step(self) -> None:
        loss = NETWORK(torch.ones(3, 2)).sum().detach()
        self.losses.append(loss)
        self.loss.copy_(loss)
        if self.name == "loss":
            self.loss = loss
        elif self.name == "kept":
            self.kept[0] = loss
        elif self.name == "nested":
            self.nested["a"]["b"] = loss
        elif self.name == "data":
            self.data.tensors = (loss,)


@pytest.mark.parametrize(
    ("name", "path"), [("loss", ".loss"), ("kept", ".kept[0]"), ("nested", ".nested['a']['b']")]
)
def test_names_that_a_step_binds_anew_are_found(name: str, path: str) -> None:
    found = rehearsed(Averaged(name).step)
    assert str(found).startswith(f"it binds Averaged{path} to a new tensor, and a graph would")


@pytest.mark.parametrize("name", ["none", "data"])
def test_what_a_step_writes_into_appends_to_and_reads_its_data_from_is_not(name: str) -> None:
    assert isinstance(rehearsed(Averaged(name).step), Gradients)


def test_the_rehearsal_ends_with_its_hooks() -> None:
    optimizer = sgd()
    with pytest.raises(KeyError), Rehearsal(HostState(lambda: optimizer), set()):
        raise KeyError("no such class")
    assert len(optimizer._optimizer_step_pre_hooks) == 0
