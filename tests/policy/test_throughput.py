"""How fast a training is, from what a sample costs: bounds that hold, and figures worked out by hand."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotset.policy.throughput import Fetch, Loader, Step, best_workers, loader_with, mixed, training_rate

seconds = st.floats(1e-6, 1.0)
fetches = st.builds(Fetch, cpu=seconds, blocked=st.floats(0.0, 1.0), send=seconds, receive=seconds)
steps = st.builds(Step, seconds=seconds, cpu=seconds)


@given(fetches, steps, st.integers(0, 64), st.integers(1, 128))
def test_no_bound_is_passed(fetch: Fetch, step: Step, workers: int, cores: int) -> None:
    rate = training_rate(loader_with(workers, fetch, cores), step, cores)
    assert 0.0 < rate <= 1.0001 / step.seconds
    if workers:
        assert rate <= 1.0001 * workers / (fetch.cpu + fetch.blocked)
        assert rate <= 1.0001 * cores / (fetch.cpu + step.cpu)
    else:
        assert rate == pytest.approx(1.0 / (fetch.cpu + fetch.blocked + step.seconds))


@given(fetches, steps, st.integers(1, 32))
def test_more_workers_than_one_never_make_it_slower(fetch: Fetch, step: Step, cores: int) -> None:
    rates = [training_rate(loader_with(count, fetch, cores), step, cores) for count in range(1, 40)]
    assert all(more >= 0.9999 * fewer for fewer, more in itertools.pairwise(rates))


@given(fetches, steps, st.integers(1, 16))
def test_the_best_number_is_nearly_as_fast_as_any_and_no_smaller_one_is(
    fetch: Fetch, step: Step, cores: int
) -> None:
    best, rate = best_workers(fetch, step, cores)
    waiting = 1 + fetch.blocked / (fetch.cpu + fetch.send)  # workers for each that is busy
    most = max(1, round(cores * min(waiting, 16)))
    rates = [training_rate(loader_with(count, fetch, cores), step, cores) for count in range(most + 1)]
    assert rate == rates[best] >= 0.98 * max(rates)
    assert all(fewer < 0.98 * max(rates) for fewer in rates[:best])


def test_a_source_that_waits_wants_as_many_workers_as_the_step_takes() -> None:
    # 20 ms of waiting a sample beside steps of 2 ms: ten samples must be under way.
    best, rate = best_workers(Fetch(cpu=0.0, blocked=20e-3), Step(2e-3, 0.0), cores=4)
    assert 10 <= best <= 14
    assert rate == pytest.approx(500, rel=0.05)


def test_workers_that_never_wait_are_no_more_than_cores() -> None:
    assert best_workers(Fetch(cpu=4e-3, blocked=1e-5, send=1e-5), Step(4e-3, 0.0), cores=2)[0] == 2


def test_ranks_share_the_cores() -> None:
    alone, _ = best_workers(Fetch(cpu=10e-3), Step(1e-3, 0.0), cores=8)
    shared, _ = best_workers(Fetch(cpu=10e-3), Step(1e-3, 0.0), cores=8 / 4)
    assert shared < alone


@given(st.floats(0.0, 1.0))
def test_a_mixture_lies_between_hits_and_misses(share: float) -> None:
    hits, misses = Loader(9000.0, 1e-5, 1e-4, True), Loader(100.0, 2e-5, 1e-2, True)
    found = mixed(hits, misses, share)
    assert 99.9 <= found.alone <= 9000.1
    assert 1.0 / found.alone == pytest.approx(share / 9000 + (1 - share) / 100)


def test_without_workers_nothing_overlaps_and_a_gather_ahead_does() -> None:
    serial, ahead = Loader(1000.0, 0.0, 1e-3, False), Loader(1000.0, 0.0, 1e-3, True)
    assert training_rate(serial, Step(1e-3, 1e-3), 8) == pytest.approx(500)
    assert training_rate(ahead, Step(1e-3, 1e-3), 8) == pytest.approx(917, rel=0.01)


def test_what_is_received_is_received_between_steps() -> None:
    assert training_rate(Loader(1e6, 1e-3, 0.0, True), Step(1e-3, 0.0), 64) == pytest.approx(500, rel=0.01)


def test_a_training_whose_costs_were_too_small_to_measure_needs_no_worker() -> None:
    for start in (0.0, 1e-3):
        assert best_workers(Fetch(cpu=0.0), Step(0.0, 0.0), cores=2, start=start)[0] == 0
