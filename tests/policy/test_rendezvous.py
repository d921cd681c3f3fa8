"""Who owns a sample: the same everywhere, by capacity, and no more moves than must."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import io
import math
import os
import random
import subprocess
import sys
from decimal import Decimal, localcontext
from typing import Any

import numpy as np
import pytest
from helpers import is_a_sentence
from hypothesis import given, settings
from hypothesis import strategies as st

from hotset.errors import ArgumentError
from hotset.policy import rendezvous as placement
from hotset.policy.rendezvous import Placement

# No deadline: a machine that is busy with other work is no fault.
fuzz = settings(max_examples=40, deadline=None, database=None)

IDS = np.arange(500)
SEEDS = st.integers(-(2**63), 2**64 - 1)
CAPACITIES = st.one_of(st.integers(1, 5), st.integers(1, 2**48))

_64 = 2**64 - 1


@st.composite
def clusters(draw: st.DrawFn, least: int = 1) -> tuple[list[str], list[int], int]:
    """Names, capacities, and a seed."""
    names = draw(st.lists(st.text(max_size=8), min_size=least, max_size=12, unique=True))
    return names, [draw(CAPACITIES) for _ in names], draw(SEEDS)


def owner_names(names: list[str], capacities: list[int], seed: int, ids: Any = IDS) -> list[str]:
    return [names[number] for number in Placement(names, capacities, seed).owners(ids)]


# The same everywhere


def _splitmix(word: int) -> int:
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _64
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _64
    return word ^ (word >> 31)


def by_definition(names: list[str], capacities: list[int], seed: int, sample: int) -> int:
    """The owner, in Python's integers and decimals."""
    word = 0
    for part in (seed, sample):
        word = _splitmix(((word ^ (part & _64)) + 0x9E3779B97F4A7C15) & _64)
    times = []
    for number, (name, capacity) in enumerate(zip(names, capacities, strict=True)):
        digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
        product = (word * (int.from_bytes(digest, "little") | 1)) & _64
        u = (Decimal(product >> 12) + Decimal("0.5")) / 2**52
        if capacity:
            times.append((-u.ln() / capacity, number))
    return min(times)[1]


@fuzz
@given(clusters(), st.lists(st.integers(-(2**63), 2**63 - 1), max_size=10))
def test_the_owner_is_first_in_a_race_whose_rates_are_the_capacities(
    cluster: tuple[list[str], list[int], int], ids: list[int]
) -> None:
    expected = [by_definition(*cluster, sample) for sample in ids]
    assert Placement(*cluster).owners(np.array(ids, np.int64)).tolist() == expected


FIXED = [50, 33, 82, 4, 2, 3, 31, 8, 11, 52, 20, 40, 53, 58, 31, 6, 53, 93, 62, 75, 39, 98, 58, 67]


def test_these_owners_hold_for_every_machine_and_version() -> None:
    """Data that is cached under one version must be found by the next."""
    hundred = Placement([f"node-{i}" for i in range(100)], [1 + i % 3 for i in range(100)], seed=11)
    assert hundred.owners(np.arange(24)).tolist() == FIXED
    five = Placement([f"node-{i}" for i in range(5)], [3, 1, 0, 2**40, 5 * 2**38], seed=-3)
    assert five.owners(np.array([0, 1, 2, 3, 10**9, 2**62, -1])).tolist() == [3, 4, 4, 3, 4, 4, 4]


TIMES = """
import hashlib, numpy as np
from hotset.policy.rendezvous import _minus_log
hashes = np.arange(1, 100_000, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
print(hashlib.sha256(_minus_log(hashes).astype("<f8").tobytes()).hexdigest())
"""


def test_times_are_the_same_to_the_last_bit_whatever_the_processor_can_do() -> None:
    """numpy's own logarithm has other last bits where there is AVX-512 than where there is not."""
    umath = importlib.import_module("numpy._core._multiarray_umath")
    able = [name for name in umath.__cpu_dispatch__ if umath.__cpu_features__[name]]
    environment = {**os.environ, "NPY_DISABLE_CPU_FEATURES": " ".join(able)}
    command = [sys.executable, "-c", TIMES]
    plain = subprocess.run(command, capture_output=True, text=True, timeout=200, env=environment)
    here = io.StringIO()
    with contextlib.redirect_stdout(here):
        exec(TIMES, {})
    assert (
        plain.stdout
        == here.getvalue()
        == "0ce1a1b1c49e577a3150f0a414747b72d37612d2f80e3c35b93ea1b997ccd308\n"
    ), plain.stderr


def test_the_logarithm_is_that_of_the_hash_and_neither_end_is_infinite() -> None:
    drawn = random.Random(1)
    hashes = [0, _64, 2**63, 2**63 - 1, *(_64 - (1 << bit) for bit in range(64))]
    hashes += [drawn.getrandbits(64) for _ in range(300)]
    times = placement._minus_log(np.array(hashes, np.uint64))
    with localcontext() as context:
        context.prec = 40
        exact = [-((Decimal(h >> 12) + Decimal("0.5")) / 2**52).ln() for h in hashes]
    for time, expected in zip(times.tolist(), exact, strict=True):
        assert 0 < time < math.inf
        assert abs(Decimal(time) - expected) < expected * Decimal(2) ** -50
    ordered = np.sort(np.array(hashes, np.uint64))
    assert (np.diff(placement._minus_log(ordered)) <= 0).all()


# What saves work changes nothing


@pytest.mark.parametrize("members", [1, 3, 40])
def test_who_is_first_does_not_depend_on_when_the_filter_looks(
    members: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    names, capacities = [f"m{i}" for i in range(members)], [1 + i * i for i in range(members)]
    ids = np.arange(10_000)
    found = []
    # None is home for most, for some, for 3 samples of 10,000; and everyone is, for all.
    for horizon in (1e-9, 0.5, 8.0, 1e9):
        monkeypatch.setattr(placement, "_HORIZON", horizon)
        found.append(Placement(names, capacities).owners(ids))
    for owners in found[1:]:
        np.testing.assert_array_equal(owners, found[0])


def test_a_filter_that_rounds_differently_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is within the margin of the horizon is not relied on: a wide margin here, and a wide error."""
    names, ids = [f"m{i}" for i in range(20)], np.arange(20_000)
    expected = Placement(names, [3] * 20).owners(ids)
    drawn, exact = random.Random(1), placement._least
    monkeypatch.setattr(placement, "_HORIZON", 2.0)
    monkeypatch.setattr(placement, "_MARGIN", 0.5)
    monkeypatch.setattr(placement, "_least", lambda time: exact(time * drawn.uniform(0.5, 1)))
    np.testing.assert_array_equal(Placement(names, [3] * 20).owners(ids), expected)


@pytest.mark.parametrize("pairs", [1, 8, 50, 10**6])
def test_owners_do_not_depend_on_how_many_are_asked_for_at_once(
    pairs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    placed = Placement(list("abcdefg"), [1, 2, 3, 4, 5, 6, 7])
    expected = [int(placed.owners(IDS[i : i + 1])[0]) for i in IDS]
    monkeypatch.setattr(placement, "_PAIRS", pairs)
    assert placed.owners(IDS).tolist() == expected


@fuzz
@given(clusters(), st.integers(1, 4))
def test_who_comes_next_is_who_would_own_it_without_those_before(
    cluster: tuple[list[str], list[int], int], count: int
) -> None:
    names, capacities, seed = cluster
    order = Placement(names, capacities, seed).order(IDS[:50], count)
    assert order.shape == (50, min(count, len(names)))
    assert np.array_equal(order[:, 0], Placement(names, capacities, seed).owners(IDS[:50]))
    for sample, places in enumerate(order.tolist()):
        left = list(range(len(names)))
        for place in places:
            first = owner_names([names[n] for n in left], [capacities[n] for n in left], seed, IDS[[sample]])
            assert first == [names[place]]
            left.remove(place)


def test_no_samples_have_no_owners() -> None:
    owners = Placement(["a", "b"], [1, 1]).owners(np.array([], np.int64))
    assert owners.dtype == np.int64
    assert owners.shape == (0,)


# Members


@fuzz
@given(clusters(), st.randoms(use_true_random=False))
def test_the_order_of_the_members_does_not_matter(
    cluster: tuple[list[str], list[int], int], shuffler: random.Random
) -> None:
    names, capacities, seed = cluster
    members = list(zip(names, capacities, strict=True))
    shuffler.shuffle(members)
    shuffled = owner_names([name for name, _ in members], [capacity for _, capacity in members], seed)
    assert shuffled == owner_names(names, capacities, seed)


@pytest.mark.parametrize("names", [["a", "b", "c"], ["c", "b", "a"], ["b", "c", "a"]])
def test_equal_times_go_to_the_name_that_sorts_first(
    names: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placement, "_minus_log", lambda hashes: np.ones(len(hashes)))
    monkeypatch.setattr(placement, "_HORIZON", 1e-9)  # or the filter would take part
    assert set(owner_names(names, [5, 5, 5], 0)) == {"a"}


@fuzz
@given(clusters(least=2))
def test_who_leaves_gives_up_its_samples_and_no_other_moves(
    cluster: tuple[list[str], list[int], int],
) -> None:
    """And who joins takes samples only for itself, which is the same read backwards."""
    names, capacities, seed = cluster
    before = owner_names(names, capacities, seed)
    after = owner_names(names[1:], capacities[1:], seed)
    assert names[0] not in after
    assert all(new == old for new, old in zip(after, before, strict=True) if old != names[0])


@fuzz
@given(clusters(least=2), st.integers(1, 2**40))
def test_who_grows_only_gains(cluster: tuple[list[str], list[int], int], more: int) -> None:
    names, capacities, seed = cluster
    before = owner_names(names, capacities, seed)
    after = owner_names(names, [capacities[0] + more, *capacities[1:]], seed)
    assert all(new in (old, names[0]) for new, old in zip(after, before, strict=True))


@fuzz
@given(clusters(), st.integers(0, 12))
def test_no_capacity_is_no_member(cluster: tuple[list[str], list[int], int], place: int) -> None:
    names, capacities, seed = cluster
    newcomer = "empty" + "".join(names)
    with_it = names[:place] + [newcomer] + names[place:]
    sizes = capacities[:place] + [0] + capacities[place:]
    assert owner_names(with_it, sizes, seed) == owner_names(names, capacities, seed)


@fuzz
@given(clusters(), st.integers(0, 30))
def test_the_unit_of_capacities_does_not_matter(
    cluster: tuple[list[str], list[int], int], shift: int
) -> None:
    names, capacities, seed = cluster
    finer = [capacity << shift for capacity in capacities]
    assert owner_names(names, finer, seed) == owner_names(names, capacities, seed)


def test_capacities_may_be_numpys_numbers_and_as_large_as_they_like() -> None:
    large = np.full(4, 2**62)  # their sum would not fit in 64 bits
    assert owner_names(list("abcd"), list(large), 1) == owner_names(list("abcd"), [1, 1, 1, 1], 1)


def test_a_capacity_may_be_nothing_beside_another() -> None:
    assert set(owner_names(["small", "large"], [1, 2**62], 0)) == {"large"}


def test_another_seed_is_another_placement() -> None:
    placements = {tuple(owner_names(list("abcd"), [1, 1, 1, 1], seed)) for seed in range(20)}
    assert len(placements) == 20


# How even


def _chi_squared(owned: Any, expected: Any) -> float:
    """Per degree of freedom."""
    return float(((owned - expected) ** 2 / expected).sum() / (len(owned) - 1))


@pytest.mark.parametrize(
    "capacities", [[1] * 4, [1] * 64, [1, 2, 3, 4, 100], [2**40, 2**41, 2**30], [7] * 20 + [70] * 5]
)
def test_shares_are_those_of_the_capacities(capacities: list[int]) -> None:
    """Chance alone gives a chi squared per degree of freedom of 1, and 3 less than once in 10 times."""
    names = [f"10.0.0.{i}:7077" for i in range(len(capacities))]
    samples = 200_000
    owned = np.bincount(Placement(names, capacities).owners(np.arange(samples)), minlength=len(names))
    expected = np.array(capacities) / sum(capacities) * samples
    assert _chi_squared(owned, expected) < 3


def test_what_one_leaves_goes_evenly_to_all_others() -> None:
    names = [f"node-{i}" for i in range(32)]
    ids = np.arange(200_000)
    before = Placement(names, [1] * 32).owners(ids)
    after = Placement(names[:-1], [1] * 31).owners(ids)
    moved = before != after
    assert moved.mean() == pytest.approx(1 / 32, rel=0.05)
    gained = np.bincount(after[moved], minlength=31)
    assert _chi_squared(gained, np.full(31, moved.sum() / 31)) < 2


def test_samples_that_follow_one_another_are_not_placed_alike() -> None:
    """Nor are those a power of two apart: a sampler that strides would ask one machine for everything."""
    owners = Placement(["a", "b", "c", "d"], [1, 1, 1, 1]).owners(np.arange(100_000))
    for stride in (1, 2, 64, 4096):
        same = (owners[stride:] == owners[:-stride]).mean()
        assert same == pytest.approx(1 / 4, abs=0.01)


# What cannot be placed


@pytest.mark.parametrize(
    ("names", "capacities", "says"),
    [
        ([], [], "above 0, got none"),
        (["a", "b"], [0, 0], "above 0, got none"),
        (["a", "b"], [1], "got 1 for 2 names"),
        (["a", "b", "a"], [1, 1, 1], "names must differ, got 'a' twice"),
        (["a", "b"], [1, -2], "got -2"),
    ],
)
def test_what_cannot_be_placed_is_said_in_a_sentence(
    names: list[str], capacities: list[int], says: str
) -> None:
    with pytest.raises(ArgumentError, match=says) as error:
        Placement(names, capacities)
    assert is_a_sentence(str(error.value))


def test_a_capacity_is_a_whole_number() -> None:
    with pytest.raises(TypeError):
        Placement(["a"], [1.5])  # type: ignore[list-item]
