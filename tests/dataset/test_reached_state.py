"""What a transform reaches is as it was once planning is over, however the transform reaches it.

Each transform is live, as it is random. So the samples of the cache must be those of the transform alone,
made anew, from its first call on.
"""

from __future__ import annotations

import functools
import random
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from helpers import rarely
from library_tables import need

import hotset

Sample = dict[str, Any]
Step = Callable[[Sample], Sample]

REACHED: Any = None  # by transforms, as a global
HOLDER = types.SimpleNamespace(inner=None)
SAMPLES = [{"image": np.full((4, 4, 3), 20 * number, np.uint8), "number": number} for number in range(8)]


class Read(torch.utils.data.Dataset[Sample]):
    """The samples, or what a transform makes of them."""

    def __init__(self, step: Step | None = None) -> None:
        self._step = step

    def __len__(self) -> int:
        return len(SAMPLES)

    def __getitem__(self, index: int) -> Sample:
        sample = {**SAMPLES[index]}
        return sample if self._step is None else self._step(sample)


class Adds:
    """Adds what a function draws from what this object holds."""

    def __init__(self, held: Any, draw: Callable[[Any], float]) -> None:
        self.held, self.draw = held, draw

    def __call__(self, sample: Sample) -> Sample:
        return {**sample, "number": sample["number"] + self.draw(self.held)}


class Counts:
    calls = 0

    def __call__(self, sample: Sample) -> Sample:
        self.calls += 1
        return {**sample, "number": sample["number"] + self.calls}


class CountsTogether:
    calls = 0

    def __init__(self) -> None:
        CountsTogether.calls = 0

    def __call__(self, sample: Sample) -> Sample:
        CountsTogether.calls += 1
        return {**sample, "number": sample["number"] + CountsTogether.calls}


class Reseeds:
    def __init__(self) -> None:
        self.rng = np.random.default_rng(5)

    def __call__(self, sample: Sample) -> Sample:
        self.rng = np.random.default_rng(int(self.rng.integers(1 << 30)))
        return {**sample, "number": sample["number"] + self.rng.random()}


def _first_of(seeds: Any) -> float:
    return float(np.random.default_rng(seeds).random())


def _lazily(holder: Any) -> float:
    if not hasattr(holder, "rng"):
        holder.rng = random.Random(5)
    return float(holder.rng.random())


def _albumentations() -> Any:
    A = need("albumentations")
    chain = A.Compose([A.HorizontalFlip(p=1), A.RandomBrightnessContrast(p=1)], seed=137)
    return functools.partial(_by_keywords, chain)


def _by_keywords(chain: Any, sample: Sample) -> Sample:
    return {**sample, **chain(image=sample["image"])}


GENERATORS: dict[str, Callable[[], Any]] = {
    "random": lambda: Adds(random.Random(5), lambda rng: rng.random()),
    "numpy": lambda: Adds(np.random.default_rng(5), lambda rng: rng.random()),
    "legacy numpy": lambda: Adds(np.random.RandomState(5), lambda rng: rng.rand()),
    "torch": lambda: Adds(torch.Generator().manual_seed(5), lambda rng: float(torch.rand((), generator=rng))),
    "seeds": lambda: Adds(np.random.SeedSequence(5), lambda seeds: _first_of(seeds.spawn(1)[0])),
    "spawned": lambda: Adds(np.random.default_rng(5), lambda rng: float(rng.spawn(1)[0].random())),
    "of a library's object": lambda: Adds(
        types.SimpleNamespace(rng=random.Random(5)), lambda held: held.rng.random()
    ),
    "albumentations": _albumentations,
}
KINDS: dict[str, Callable[[], Any]] = {
    **GENERATORS,
    "made at the first call": lambda: Adds(types.SimpleNamespace(), _lazily),
    "replaced": lambda: Reseeds(),
    "a counter": lambda: Counts(),
    "a counter of its class": lambda: CountsTogether(),
    "a list": lambda: Adds([], lambda calls: calls.append(0) or float(len(calls))),
}


def _through_a_global(step: Any) -> Step:
    globals()["REACHED"] = step
    return lambda sample: REACHED(sample)


def _through_an_attribute(step: Any) -> Step:
    HOLDER.inner = step
    return lambda sample: HOLDER.inner(sample)


def _through_nested_functions(step: Any) -> Step:
    globals()["REACHED"] = step
    return lambda sample: (lambda inner: REACHED(inner))(sample)


def _through_a_closure(step: Any) -> Step:
    return lambda sample: step(sample)


def _through_a_default(step: Any) -> Step:
    return lambda sample, step=step: step(sample)  # type: ignore[misc]


WAYS: dict[str, Callable[[Any], Step]] = {
    "global": _through_a_global,
    "attribute": _through_an_attribute,
    "nested": _through_nested_functions,
    "closure": _through_a_closure,
    "default": _through_a_default,
    "partial": lambda step: functools.partial(step),
    "method": lambda step: step.__call__,
}


def batches(loader: Any) -> list[Any]:
    """Two epochs, as text."""
    return [(batch["image"].tolist(), batch["number"].tolist()) for _ in range(2) for batch in loader]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
def test_samples_are_those_without_a_cache(kind: str, way: str) -> None:
    expected = batches(torch.utils.data.DataLoader(Read(WAYS[way](KINDS[kind]())), batch_size=4))
    with hotset.cache(Read(), memory="4MiB", transform=[WAYS[way](KINDS[kind]())]) as cached:
        assert batches(hotset.DataLoader(cached, batch_size=4)) == expected


@pytest.mark.parametrize("workers", [0, 2])
def test_a_librarys_transform_that_is_called_by_name(workers: int) -> None:
    A = need("albumentations")

    def fresh() -> Step:
        globals()["REACHED"] = A.Compose([A.RandomBrightnessContrast(p=1)], seed=137)
        return lambda sample: {**sample, **REACHED(image=sample["image"])}

    expected = batches(torch.utils.data.DataLoader(Read(fresh()), batch_size=4, num_workers=workers))
    with hotset.cache(Read(), memory="4MiB", transform=[fresh()]) as cached:
        assert batches(hotset.DataLoader(cached, batch_size=4, num_workers=workers)) == expected


def test_a_librarys_object_that_has_a_name() -> None:
    def fresh() -> Step:
        globals()["REACHED"] = types.SimpleNamespace(rng=random.Random(5))
        return lambda sample: {**sample, "number": REACHED.rng.random()}

    expected = batches(torch.utils.data.DataLoader(Read(fresh()), batch_size=4))
    with hotset.cache(Read(), memory="4MiB", transform=[fresh()]) as cached:
        assert batches(hotset.DataLoader(cached, batch_size=4)) == expected


def test_names_that_a_function_binds_are_put_back() -> None:
    def fresh() -> Step:
        calls = 0

        def step(sample: Sample) -> Sample:
            nonlocal calls
            global REACHED
            calls += 1
            REACHED += 1
            return {**sample, "number": calls + 100 * REACHED}

        globals()["REACHED"] = 0
        return step

    expected = batches(torch.utils.data.DataLoader(Read(fresh()), batch_size=4))
    with hotset.cache(Read(), memory="4MiB", transform=[fresh()]) as cached:
        assert batches(hotset.DataLoader(cached, batch_size=4)) == expected


# A worker draws by a state, makes or replaces one, or counts in a class: one of each.
IN_WORKERS = (
    "torch",
    "made at the first call",
    "a counter of its class",
)


@pytest.mark.parametrize("kind", rarely(KINDS, *(kind for kind in KINDS if kind not in IN_WORKERS)))
def test_so_they_are_in_workers(kind: str) -> None:
    torch.manual_seed(1)
    plain = torch.utils.data.DataLoader(
        Read(_through_a_global(KINDS[kind]())), batch_size=4, shuffle=True, num_workers=2
    )
    expected = batches(plain)
    with hotset.cache(Read(), memory="4MiB", transform=[_through_a_global(KINDS[kind]())]) as cached:
        torch.manual_seed(1)
        assert batches(hotset.DataLoader(cached, batch_size=4, shuffle=True, num_workers=2)) == expected


@pytest.mark.parametrize("kind", GENERATORS)
def test_a_dataset_reaches_it_too(kind: str) -> None:
    """Nothing can be cached then: planning says so, and leaves all as it was."""
    step = GENERATORS[kind]()
    expected = [step({**sample})["number"] for sample in SAMPLES]
    dataset = Read(_through_a_global(step := GENERATORS[kind]()))
    with pytest.raises(hotset.NotCacheable):
        hotset.cache(dataset, memory="4MiB")
    assert [step({**sample})["number"] for sample in SAMPLES] == expected
