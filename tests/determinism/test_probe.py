"""The probe sees every generator that moves and every sample that differs, and leaves no trace itself."""

from __future__ import annotations

import functools
import logging
import random
import sys
import types
from collections import OrderedDict
from collections.abc import Callable
from typing import Any
from unittest.mock import ANY

import numpy as np
import pytest
import sources
import torch
from helpers import rng_states
from samples import image_and_label

from hotset.determinism.draws.probe import Probe, probe
from hotset.determinism.draws.rng import Generators

augment: Any = None  # a module of the user's, in a test below
jitter_of_the_user: Any = None
SHARED = np.random.default_rng(3)
SHARED_BY_DEFAULT = random.Random(9)
POOL = {"flips": [random.Random(5)]}


def watch(dataset: Any, indices: tuple[int, ...] = (0, 3, 5), repeats: int = 2) -> Probe:
    return probe(dataset.__getitem__, indices, [dataset], repeats)


@pytest.mark.parametrize(
    ("kind", "moved", "differs"),
    [
        (sources.DrawsRandom, "random's global state moved", True),
        (sources.DrawsNumpy, "numpy.random's global state moved", True),
        (sources.DrawsTorch, "torch's global state moved", True),
        (sources.DrawsButDiscards, "torch's global state moved", False),
        (sources.HoldsRandom, "HoldsRandom.held (a random.Random) moved", False),
        (sources.HoldsNumpy, "HoldsNumpy.held['augmenters'][0].rng (a numpy.Generator) moved", False),
        (sources.HoldsTorchOnItsClass, "HoldsTorchOnItsClass.generator (a torch.Generator) moved", False),
        (sources.CountsItsCalls, None, True),
        (sources.ReadsUrandom, None, True),
        (sources.SeedsItself, None, False),
        (sources.Samples, None, False),
    ],
)
def test_each_kind_of_randomness_is_named(kind: Any, moved: str | None, differs: bool) -> None:
    seen = watch(kind(image_and_label))
    assert seen.moved == (() if moved is None else (moved,))
    assert bool(seen.differs) == differs


def test_a_draw_whose_state_is_put_back_shows() -> None:
    def forked(index: int) -> float:
        with torch.random.fork_rng(devices=[]):
            return index + float(torch.rand(()))

    def forked_on_cpu(index: int) -> float:
        with torch.random.fork_rng(devices=[]):
            return index + float(torch.rand((), device="cpu"))

    def saved(index: int) -> float:
        state, value = random.getstate(), random.random()
        random.setstate(state)
        return index + value

    def seeded(index: int) -> float:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(index)
            return float(torch.rand(()))

    before = rng_states()
    assert set(probe(forked, (0, 3)).differing) == {0, 3}
    assert set(probe(saved, (0, 3)).differing) == {0, 3}
    assert probe(seeded, (0, 3)).differs == ()
    with torch.device("meta"):  # the default device has a generator of its own, which is left alone
        assert set(probe(forked_on_cpu, (0, 3)).differing) == {0, 3}
    assert rng_states() == before


@pytest.mark.parametrize("seed", range(4))
def test_a_sample_that_seeds_a_generator_as_it_is_seeded_already_draws_as_the_others(seed: int) -> None:
    random.seed(seed)
    assert probe(random.seed, range(4)).drawing == (0, 1, 2, 3)
    assert random.getstate() == random.Random(seed).getstate()


def test_the_samples_are_the_first_readings() -> None:
    seen = watch(sources.CountsItsCalls(image_and_label), (4, 2), repeats=3)
    assert [counted for _, counted in seen.samples] == [1, 2]
    assert [label for (_, label), _ in seen.samples] == [4, 2]
    assert seen.seconds > 0


def test_the_place_of_a_difference_is_told() -> None:
    counter = iter(range(100))
    seen = probe(lambda i: {"image": [torch.tensor([0, next(counter)])], "label": i}, [3])
    assert seen.differs == ("sample 3, at ['image'][0]: values (1 of 2, first at [1])",)


@pytest.mark.parametrize(("period", "samples"), [(2, 2), (2, 8), (3, 8), (7, 7), (7, 8)])
def test_a_counter_of_any_period_shows(period: int, samples: int) -> None:
    state = {"calls": 0}

    def read(index: int) -> int:
        state["calls"] += 1
        return state["calls"] // period % 2

    assert probe(read, range(samples)).differs


def test_a_sample_that_depends_on_earlier_reads_shows() -> None:
    seen: set[int] = set()

    def read(index: int) -> tuple[int, int]:
        seen.add(index)
        return index, len(seen)

    assert probe(read, [0, 1, 2]).differs == (
        "sample 1, at [1]: 2 and 3",
        "sample 0, at [1]: 1 and 3",
    )


def test_a_sample_that_depends_on_its_neighbour_shows() -> None:
    last = [0]

    def mixed_with_the_last(index: int) -> int:
        last.append(index)
        return index + last[-2]

    assert probe(mixed_with_the_last, [0, 1, 2]).differs


def test_with_little_time_two_samples_are_read_and_the_first_and_last_again() -> None:
    asked: list[int] = []

    def read(index: int) -> int:
        asked.append(index)
        return index

    assert probe(read, range(5), seconds=0.0).samples == [0, 1]
    assert asked == [0, 1, 1, 0]
    asked.clear()
    assert probe(read, range(5)).samples == [0, 1, 2, 3, 4]
    assert asked == [0, 1, 2, 3, 4, 4, 4, 3, 2, 1, 0]


def test_a_sample_that_raises_a_forgiven_error_is_left_out() -> None:
    def read(index: int) -> int:
        if index % 2:
            raise ValueError(index)
        return index

    assert probe(read, [1, 2, 3, 4], forgive=(ValueError,)).samples == [2, 4]
    with pytest.raises(ValueError, match="1"):
        probe(read, [1, 3], forgive=(ValueError,))
    with pytest.raises(ValueError, match="3"):
        probe(read, [2, 3], forgive=(KeyError,))
    assert probe(read, [1, 2, 3, 4], repeats=1, seconds=0.0, forgive=(ValueError,)).samples == [2, 4]


def test_a_second_reading_that_raises_a_forgiven_error_is_skipped() -> None:
    asked: list[int] = []

    def read(index: int) -> int:
        asked.append(index)
        if asked.count(index) == 2:
            raise ConnectionError(index)
        return index

    assert probe(read, [1, 2], forgive=(OSError,)) == Probe([1, 2], ANY, (), ())


def test_a_source_that_works_in_place_on_what_it_holds_shows() -> None:
    held = torch.ones(4, 3)

    def read(index: int) -> torch.Tensor:
        return held[index].div_(2)

    assert probe(read, [1]).differs[0] == "sample 1: changed in place as it was read again"


def test_a_source_that_fills_one_buffer_anew_for_each_sample_is_accepted() -> None:
    buffer = np.zeros(3)

    def read(index: int) -> Any:
        buffer[:] = index
        return buffer

    assert probe(read, [1, 2, 3], repeats=3).differs == ()


class Augmented:
    """A class whose instances hold anything."""

    def __init__(self, **things: Any) -> None:
        self.__dict__.update(things)


class Slotted:
    __slots__ = ("rng",)

    def __init__(self, rng: Any) -> None:
        self.rng = rng


class Bunch(OrderedDict[str, Any]):
    pass


class WithDefault:
    def draw(self, rng: Any = SHARED_BY_DEFAULT) -> float:
        return float(rng.random())


class LooksIntoItsModule:
    def __getitem__(self, index: int) -> int:
        return index + (SHARED.random() < 1e-12)


class LooksIntoItsModulesPool:
    def __getitem__(self, index: int) -> int:
        return index + sum(rng.random() < 1e-12 for flips in POOL.values() for rng in flips)


def closure(rng: Any) -> Callable[[], float]:
    return lambda: float(rng.random())


def keyword(rng: Any) -> Callable[[], float]:
    def draw(*, source: Any = rng) -> float:
        return float(source.random())

    return draw


class Property:
    _rng = np.random.RandomState(1)
    rng = property(functools.partial(getattr, _rng))


HELD: list[tuple[Callable[[Any], Any], str]] = [
    (lambda rng: Augmented(rng=rng), "Augmented.rng"),
    (lambda rng: Augmented(inner=Slotted(rng)), "Augmented.inner.rng"),
    (lambda rng: Augmented(all=[1, (rng,)]), "Augmented.all[1][0]"),
    (lambda rng: Augmented(all={"a": {"b": rng}}), "Augmented.all['a']['b']"),
    (lambda rng: Augmented(all=Bunch(a=rng)), "Augmented.all['a']"),
    (lambda rng: Augmented(f=closure(rng)), "Augmented.f.rng"),
    (lambda rng: Augmented(f=keyword(rng)), "Augmented.f(source=)"),
    (lambda rng: Augmented(f=functools.partial(min, 1, key=rng)), "Augmented.f.keywords['key']"),
    (lambda rng: Augmented(f=rng.__repr__), "Augmented.f.__self__"),
    (lambda rng: _with_attribute(rng), "_with_attribute.<locals>.f.rng"),
    (lambda rng: torch.nn.Sequential(_module(rng)), "Sequential._modules['0'].rng"),
    (lambda rng: _cycle(rng), "Augmented.itself.rng"),
]


def _with_attribute(rng: Any) -> Any:
    def f() -> None: ...

    f.rng = rng  # type: ignore[attr-defined]
    return f


def _module(rng: Any) -> Any:
    module = torch.nn.ReLU()
    module.rng = rng
    return module


def _cycle(rng: Any) -> Any:
    one, other = Augmented(), Augmented(rng=rng)
    one.itself, other.itself = other, one  # type: ignore[attr-defined]
    return one


@pytest.mark.parametrize(
    ("make", "kind", "draw"),
    [
        (lambda: random.Random(1), "random.Random", lambda rng: rng.random()),
        (lambda: np.random.default_rng(1), "numpy.Generator", lambda rng: rng.random()),
        (lambda: np.random.RandomState(1), "numpy.RandomState", lambda rng: rng.rand()),
        (lambda: np.random.Philox(1), "numpy.Philox", lambda rng: rng.random_raw()),
        (
            lambda: torch.Generator().manual_seed(1),
            "torch.Generator",
            lambda rng: torch.rand((), generator=rng),
        ),
    ],
    ids=["random", "generator", "randomstate", "bits", "torch"],
)
def test_a_generator_is_found_wherever_it_is_held_and_put_back(make: Any, kind: str, draw: Any) -> None:
    for holder, path in HELD:
        rng, twin = make(), make()
        seen = probe(lambda index, rng=rng: draw(rng) is None, [0, 1], [holder(rng)])  # type: ignore[misc]
        assert seen.moved == (f"{path} (a {kind}) moved",)
        assert float(draw(rng)) == float(draw(twin)), f"{path}: its state was not put back"


@pytest.mark.parametrize(
    ("holder", "rng", "path"),
    [
        (LooksIntoItsModule(), SHARED, "LooksIntoItsModule.__getitem__ -> SHARED"),
        (
            LooksIntoItsModulesPool(),
            POOL["flips"][0],
            "LooksIntoItsModulesPool.__getitem__ -> POOL['flips'][0]",
        ),
        (WithDefault(), SHARED_BY_DEFAULT, "WithDefault.draw(rng=)"),
        (Property(), Property._rng, "Property._rng"),
    ],
)
def test_generators_on_classes_and_in_modules_are_found(holder: Any, rng: Any, path: str) -> None:
    seen = probe(lambda index: rng.random() is None, [0], [holder])
    assert len(seen.moved) == 1
    assert seen.moved[0].startswith(path)


def test_generators_of_the_users_other_modules_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("augment_of_the_user")
    exec("import random\nrng = random.Random(2)\ndef jitter():\n    return rng.random()\n", vars(module))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    jitter = module.jitter

    def through_the_module(index: int) -> bool:
        return bool(augment.jitter() is None)

    def through_the_function(index: int) -> bool:
        return bool(jitter_of_the_user() is None)

    def imported_inside(index: int) -> bool:
        from augment_of_the_user import jitter  # type: ignore[import-not-found]

        return bool(jitter() is None)

    monkeypatch.setitem(globals(), "augment", module)
    monkeypatch.setitem(globals(), "jitter_of_the_user", jitter)
    for read in (through_the_module, through_the_function, imported_inside):
        (moved,) = probe(read, [0], [read]).moved
        assert moved.endswith(" -> rng (a random.Random) moved"), moved


def test_a_generator_of_a_function_put_into_a_librarys_class_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rng = random.Random(1)

    def shaken(self: Any, value: Any) -> Any:
        rng.random()
        return value

    monkeypatch.setattr(torch.nn.Identity, "forward", shaken)
    step = torch.nn.Identity()
    assert probe(step, [0], [step]).moved == ("Identity.forward.rng (a random.Random) moved",)


def test_a_generator_made_at_the_first_read_is_watched_from_then_on() -> None:
    class Lazy:
        rng: Any = None

        def __getitem__(self, index: int) -> int:
            if self.rng is None:
                self.rng = random.Random(1)
            return index + int(self.rng.random() < 1e-12)

    assert watch(Lazy()).moved[0].endswith("Lazy.rng (a random.Random) moved")


def test_a_generator_in_a_chain_of_transforms_is_named_after_its_transform() -> None:
    rng = random.Random(1)
    seen = probe(lambda index: rng.random() < 0, [0], [Augmented(), (Slotted(None), Slotted(rng))])
    assert seen.moved == ("Slotted.rng (a random.Random) moved",)


def test_a_generator_of_the_systems_entropy_is_ignored() -> None:
    system = random.SystemRandom()
    assert probe(lambda index: system.random() < 0, [0], [Augmented(rng=system)]) == Probe(
        [False], ANY, (), ()
    )


def test_the_global_generator_held_as_an_attribute_is_named_once() -> None:
    holder: Any = Augmented(draw=random.random, numpy=np.random.rand, torch=torch.default_generator)
    assert probe(lambda index: holder.draw() is None, [0], [holder]).moved == ("random's global state moved",)


def draws_everything(index: int) -> int:
    random.gauss(0, 1)
    np.random.randn()
    torch.randn(())
    return index


def test_a_generator_of_another_logger_is_not_the_holders() -> None:
    other = logging.NullHandler()
    other.sample = random.Random(3)  # type: ignore[attr-defined]
    logging.getLogger("hotset_test.other").addHandler(other)
    try:
        holder = types.SimpleNamespace(log=logging.getLogger("hotset_test.mine"))
        assert [*Generators([holder]).states()] == [*Generators([]).states()]
    finally:
        logging.getLogger("hotset_test.other").removeHandler(other)


def test_global_states_are_put_back() -> None:
    before = rng_states()
    assert len(probe(draws_everything, [0, 1]).moved) == 3
    assert rng_states() == before


def test_the_users_exception_comes_through_and_the_states_are_put_back() -> None:
    rng = random.Random(4)
    error = sources.TwoArgumentError("my", "own")

    def read(index: int) -> int:
        draws_everything(index)
        rng.random()
        if index == 2:
            raise error
        return index

    before, held = rng_states(), rng.getstate()
    with pytest.raises(sources.TwoArgumentError) as caught:
        probe(read, [0, 2])
    assert caught.value is error
    assert rng_states() == before
    assert rng.getstate() == held


def test_an_interrupt_puts_the_states_back_too() -> None:
    def read(index: int) -> int:
        draws_everything(index)
        raise KeyboardInterrupt

    before = rng_states()
    with pytest.raises(KeyboardInterrupt):
        probe(read, [0])
    assert rng_states() == before


def test_nothing_to_read_is_an_empty_report() -> None:
    assert probe(draws_everything, []) == Probe([], 0.0, (), ())


def test_looking_for_generators_runs_no_code_of_the_object() -> None:
    class Booby:
        def __getattr__(self, name: str) -> Any:
            raise AssertionError(f"asked for {name}")

        def __iter__(self) -> Any:
            raise AssertionError("iterated")

        def __eq__(self, other: object) -> bool:
            raise AssertionError("compared")

        def __hash__(self) -> int:
            raise AssertionError("hashed")

        @property
        def trap(self) -> Any:
            raise AssertionError("property read")

        @property  # type: ignore[misc]
        def __class__(self) -> Any:
            raise AssertionError("class asked")

    class Listed(list[Any]):
        def __iter__(self) -> Any:
            raise AssertionError("iterated")

    rng = random.Random(1)
    watched = Generators([Booby(), Listed([rng]), types.MappingProxyType({1: rng})])
    rng.random()
    assert len(watched.moved()) == 1


def test_a_large_holder_is_searched_quickly_and_its_own_generator_found() -> None:
    rng = random.Random(1)
    samples = [(f"/data/{i}.jpg", i) for i in range(300_000)]
    nodes: Any = None
    for _ in range(100_000):
        nodes = Augmented(next=nodes, other=[nodes])
    watched = Generators([Augmented(samples=samples, nodes=nodes, rng=rng)])
    rng.random()
    assert watched.moved() == ("Augmented.rng (a random.Random) moved",)
