"""The split of a chain: verdicts in order of evidence, trials that only demote and leave no trace."""

from __future__ import annotations

import random
import secrets
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import hotset
from hotset.determinism import trial
from hotset.determinism.split import Split, split
from hotset.determinism.trial import attempt
from hotset.errors import ArgumentError

SAMPLES = [torch.arange(12.0).view(3, 4) + k for k in range(3)]


def names(steps: tuple[Any, ...]) -> list[str]:
    return [getattr(step, "__name__", type(step).__name__) for step in steps]


def evidence(found: Split, number: int) -> str:
    return found.verdicts[number].evidence


# ---- transforms ------------------------------------------------------------------------------------------


def double(x: Any) -> Any:
    return x * 2


def in_place(x: Any) -> Any:
    x += 1
    return x


def by_random(x: Any) -> Any:
    return x + random.random()


def by_numpy(x: Any) -> Any:
    return x + float(np.random.rand())


def by_torch(x: Any) -> Any:
    return x + torch.rand(())


def by_secrets(x: Any) -> Any:
    return x + secrets.randbits(20)


def draws_and_does_not_use(x: Any) -> Any:
    random.random()
    return x


class Own:
    """Draws from a generator of its own."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(0)

    def __call__(self, x: Any) -> Any:
        return x + self.rng.random()


class OfTheClass:
    rng = random.Random(0)

    def __call__(self, x: Any) -> Any:
        return x + self.rng.random()


class Counts:
    """Returns the same each time, but changes its state with each call."""

    def __init__(self) -> None:
        self.calls = 0
        self.seen: list[int] = []

    def __call__(self, x: Any) -> Any:
        self.calls += 1
        self.seen.append(self.calls)
        return x


class Lazy:
    """Builds its table with the first call, and does not change afterwards."""

    table: Any = None

    def __call__(self, x: Any) -> Any:
        if self.table is None:
            self.table = torch.ones(4)
        return x * self.table


class EverySecond:
    calls = 0

    def __call__(self, x: Any) -> Any:
        self.calls += 1
        return x if self.calls % 2 else -x


RANDOM: list[Callable[[], Any]] = [
    lambda: by_random,
    lambda: by_numpy,
    lambda: by_torch,
    lambda: by_secrets,
    lambda: draws_and_does_not_use,
    Own,
    OfTheClass,
    Counts,
    EverySecond,
]


# ---- where it is cut -------------------------------------------------------------------------------------


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("make", RANDOM)
def test_a_transform_that_draws_or_changes_itself_is_never_in_the_prefix(
    make: Callable[[], Any], strict: bool
) -> None:
    found = split([double, make(), double], SAMPLES, strict)
    assert found.count == (0 if strict else 1)
    assert len(found.suffix) == 3 - found.count
    if not strict:
        assert found.verdicts[1].kind == "random"


def test_of_a_transform_that_draws_what_it_does_not_use_its_outputs_are_said_to_be_alike() -> None:
    def one_size(value: int) -> int:
        return value * random.choice([2])

    def some_size(value: int) -> int:
        return value * random.choice(range(2, 99))

    said = [split([step], [3, 4]).verdicts[0] for step in (one_size, some_size)]
    assert [verdict.kind for verdict in said] == ["random", "random"]
    assert said[0].evidence == "random's global state moved; its outputs were alike"
    assert "alike" not in said[1].evidence


def test_unknown_and_well_behaved_is_accepted_as_probed_and_strict_leaves_it_live() -> None:
    found = split([double, in_place], SAMPLES)
    assert names(found.prefix) == ["double", "in_place"]
    assert [verdict.kind for verdict in found.verdicts] == ["unknown", "unknown"]
    assert all("probed" in verdict.evidence for verdict in found.verdicts)
    assert split([double, in_place], SAMPLES, strict=True).count == 0


@pytest.mark.parametrize("kind", [int, np.int64, np.float32], ids=lambda kind: kind.__name__)
def test_a_counter_counts_as_a_change_before_an_output_shows_it(kind: Any) -> None:
    class EveryHundredth:
        calls = kind(0)

        def __call__(self, x: Any) -> Any:
            self.calls = kind(self.calls + 1)
            return x if self.calls % 100 else x + 1

    found = split([EveryHundredth()], SAMPLES)
    assert found.count == 0
    assert "changes itself" in evidence(found, 0)


def test_state_that_the_first_call_builds_does_not_count_as_a_change() -> None:
    lazy = Lazy()
    assert split([lazy], SAMPLES).count == 1
    assert lazy.table is None


def test_a_declaration_wins_both_ways() -> None:
    sure = hotset.deterministic(Own())
    never = hotset.nondeterministic(lambda x: x)
    found = split([sure, double, never, double], SAMPLES)
    assert found.count == 2
    assert "declared" in evidence(found, 0)
    assert "moved" in evidence(found, 0)
    assert found.verdicts[2].kind == "random"
    assert split([hotset.deterministic(lambda x: x), double], SAMPLES, strict=True).count == 1


def test_structure_is_believed_and_a_trial_demotes_it() -> None:
    assert split(torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Dropout()), SAMPLES).count == 1

    class Noisy(torch.nn.ReLU):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return input + torch.rand(())

    hooked = torch.nn.ReLU()
    hooked.register_forward_hook(lambda module, args, output: output + torch.rand(()))
    for step in (Noisy(), hooked):
        found = split([step], SAMPLES)
        assert found.count == 0
        assert "moved" in evidence(found, 0)


def test_a_container_is_cut_in_its_middle_and_the_halves_make_the_whole() -> None:
    chain = torch.nn.Sequential(
        torch.nn.ReLU(), torch.nn.Sequential(torch.nn.Tanh(), torch.nn.Dropout(0.5)), torch.nn.Sigmoid()
    )
    found = split(chain, SAMPLES)
    assert found.count == 2
    torch.manual_seed(7)
    whole = chain(SAMPLES[0])
    torch.manual_seed(7)
    value = SAMPLES[0]
    for step in (*found.prefix, *found.suffix):
        value = step(value)
    assert torch.equal(value, whole)


@settings(deadline=None, max_examples=30)
@given(st.lists(st.sampled_from(["d", "r", "u"]), max_size=7))
def test_the_prefix_ends_before_the_first_random_one(kinds: list[str]) -> None:
    made = {"d": torch.nn.ReLU(), "r": by_torch, "u": double}
    found = split([made[kind] for kind in kinds], SAMPLES[:1])
    assert found.count == (kinds.index("r") if "r" in kinds else len(kinds))
    assert len(found.verdicts) == len(kinds)
    assert len(found.outputs) == len(found.seconds) == found.count


def test_the_outputs_are_those_of_each_transform_in_turn() -> None:
    found = split([double, in_place, by_torch], SAMPLES)
    for sample, once, twice in zip(SAMPLES, *found.outputs, strict=True):
        assert torch.equal(once, sample * 2)
        assert torch.equal(twice, sample * 2 + 1)


def test_printed_it_says_where_it_is_cut() -> None:
    lines = str(split([double, by_torch], SAMPLES)).splitlines()
    assert lines[0].startswith("double")
    assert "cut" in lines[1]
    assert lines[2].startswith("by_torch")


# ---- nothing is left behind ------------------------------------------------------------------------------


@pytest.mark.parametrize("make", RANDOM)
def test_splitting_changes_no_generator_sample_or_transform(make: Callable[[], Any]) -> None:
    step = make()
    held = getattr(step, "rng", None)
    numpy_state = held.bit_generator.state if isinstance(held, np.random.Generator) else None
    before = dict(vars(step)) if hasattr(step, "__dict__") else {}
    kept = [sample.clone() for sample in SAMPLES]
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()  # type: ignore[index]
    split([in_place, step], SAMPLES)
    assert random.getstate() == states[0]
    assert np.random.get_state()[1].tolist() == states[1]  # type: ignore[index]
    assert torch.equal(torch.get_rng_state(), states[2])
    assert all(torch.equal(a, b) for a, b in zip(SAMPLES, kept, strict=True))
    if hasattr(step, "__dict__") and not callable(getattr(step, "__code__", None)):
        assert dict(vars(step)) == before
    if numpy_state is not None:
        assert held.bit_generator.state == numpy_state  # type: ignore[union-attr]


def test_lists_and_arrays_of_a_transform_get_their_contents_back() -> None:
    class Keeps:
        def __init__(self) -> None:
            self.list = [1]
            self.table = {"a": 1}
            self.array = np.zeros(2)
            self.tensor = torch.zeros(2)

        def __call__(self, x: Any) -> Any:
            self.list.append(2)
            self.table["b"] = len(self.list)
            self.array += 1
            self.tensor += 1
            self.new = 3
            return x

    step = Keeps()
    found = split([step], SAMPLES)
    assert found.count == 0
    assert "changes itself" in evidence(found, 0)
    assert (step.list, step.table, step.array.tolist(), step.tensor.tolist()) == (
        [1],
        {"a": 1},
        [0, 0],
        [0, 0],
    )
    assert not hasattr(step, "new")


@pytest.mark.parametrize("repeats", range(4, 10))
def test_a_transform_that_only_remembers_its_last_input_raises_no_doubt(
    repeats: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Remembers:
        last = -1.0

        def __call__(self, x: Any) -> Any:
            self.last = float(x.sum())
            return x

    monkeypatch.setattr(trial, "_REPEATS", repeats)
    assert attempt(Remembers(), SAMPLES, seconds=1e6).doubts == ()


def test_the_state_is_put_back_when_the_transform_raises() -> None:
    class Raises(Counts):
        def __call__(self, x: Any) -> Any:
            super().__call__(x)
            raise KeyError("the user's own")

    step = Raises()
    random.seed(1)
    state = random.getstate()
    with pytest.raises(KeyError, match="the user's own"):
        split([step], SAMPLES)
    assert (step.calls, step.seen) == (0, [])
    assert random.getstate() == state


# ---- wrong use -------------------------------------------------------------------------------------------


def test_missing_samples_and_a_step_that_cannot_be_called_are_refused() -> None:
    with pytest.raises(ArgumentError, match="samples must not be empty"):
        split([double], [])
    with pytest.raises(ArgumentError, match="got 3 in it"):
        split([double, 3], SAMPLES)


def test_an_empty_chain_has_nothing_to_cut() -> None:
    found = split([], SAMPLES)
    assert (found.prefix, found.suffix, found.verdicts, found.count) == ((), (), (), 0)


def test_an_input_that_cannot_be_copied_is_passed_as_it_is() -> None:
    class Open:
        def __deepcopy__(self, memo: Any) -> Any:
            raise TypeError("cannot pickle this")

        value = 3

    tried = attempt(lambda file: file.value, [Open()], seconds=0.0)
    assert tried.outputs == [3]
    assert tried.doubts == ()
