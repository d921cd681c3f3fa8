"""The search for a sink size: it ends, within bounds, at a size that costs next to nothing."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from hotset.policy.sink_size import SizeSearch

MOST = 1 << 12


def searched(search: SizeSearch, rate: Callable[[int], float]) -> tuple[int, dict[int, float]]:
    """The calls that a search took, and the best rate of each size that it tried."""
    calls, best = 0, dict[int, float]()
    while not search.done:
        size = search.size
        found = rate(size)
        best[size] = max(best.get(size, 0.0), found)
        search.record(size, found)
        calls += 1
        assert calls <= 3 * 16, "it does not end"
    return calls, best


@given(st.data())
def test_it_ends_within_bounds_near_the_best_whatever_the_rates(data: st.DataObject) -> None:
    search = SizeSearch()
    _, best = searched(search, lambda size: data.draw(st.floats(1e-3, 1e9), label=f"rate of {size}"))
    assert 1 <= search.size <= MOST
    assert best[search.size] * 1.05 >= max(best.values())
    # And no smaller one would do.
    assert all(rate * 1.05 < max(best.values()) for size, rate in best.items() if size < search.size)


@given(st.floats(1e-6, 1.0), st.floats(0, 10.0))
def test_it_comes_within_a_few_percent_of_what_sinking_can_give(step: float, overhead: float) -> None:
    """A step takes its time, and each call an overhead: sunk without end, that is the time alone."""
    search = SizeSearch()
    searched(search, lambda size: size / (size * step + overhead))
    reached = search.size / (search.size * step + overhead)
    # 5 % of the best that was tried, which is four times its size, or the most: the rest is little.
    assert reached * 1.07 >= MOST / (MOST * step + overhead)


@given(st.lists(st.floats(0.01, 1.0), min_size=3, max_size=3), st.integers(0, 12))
def test_slow_calls_among_fast_ones_do_not_mislead(slowed: list[float], knee: int) -> None:
    """What disturbs a measurement makes it slower: one undisturbed call of each size is enough."""
    slowed[1] = 1.0
    number = iter(range(1000))
    search = SizeSearch()
    searched(search, lambda size: min(size, 1 << knee) * 1000.0 * slowed[next(number) % 3])
    assert search.size == 1 << knee


def test_calls_of_other_sizes_do_not_count() -> None:
    search = SizeSearch()
    for _ in range(10):
        search.record(7, 1e9)
    assert (search.size, search.done) == (1, False)


def test_one_poor_size_does_not_end_it() -> None:
    rates = {1: 1.0, 2: 2.0, 4: 1.9, 8: 8.0, 16: 8.0, 32: 8.0}
    search = SizeSearch()
    calls, best = searched(search, rates.__getitem__)
    assert (search.size, calls, len(best)) == (8, 18, 6)


def test_it_ends_at_the_most() -> None:
    search = SizeSearch()
    _, best = searched(search, float)
    assert list(best) == [1 << power for power in range(13)]
    assert search.size == MOST
    search.record(MOST, 1.0)  # afterwards nothing changes
    assert search.size == MOST
