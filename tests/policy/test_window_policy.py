"""The window's arithmetic: its sizes, the order in which samples enter, and what it promises of both."""

from __future__ import annotations

import math
from collections import Counter
from fractions import Fraction
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from helpers import all_pairs, is_a_sentence
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hotset.errors import ArgumentError, QuantityError
from hotset.policy.window import (
    RunningWindow,
    ahead_count,
    epoch_order,
    epochs_until_all_seen,
    replaced_count,
    resident_count,
)

# No deadline: a machine that is busy with other work is no fault.
fuzz = settings(max_examples=100, deadline=None, database=None)

Indices = npt.NDArray[np.int64]
SEEDS = st.integers(-(2**63), 2**64 - 1)


@st.composite
def windows(draw: st.DrawFn, largest: int = 200) -> RunningWindow:
    samples = draw(st.integers(1, largest))
    resident = draw(st.integers(1, samples))
    ahead = draw(st.integers(0, min(resident, samples - resident)))
    return RunningWindow(samples, resident, ahead, draw(SEEDS), draw(st.booleans()))


def residents_of(window: RunningWindow, cursor: int) -> Indices:
    """The residents at this cursor, the longest-resident first."""
    return window.entries(cursor, window.resident)


def incoming_of(window: RunningWindow, cursor: int, count: int | None = None) -> Indices:
    """The samples to prepare at this cursor, the next first."""
    return window.entries(cursor + window.resident, window.ahead if count is None else count)


# How large


@pytest.mark.parametrize(
    ("resident", "expected"), [(1, 1), (50, 50), (100, 100), (101, 100), (0.5, 50), (1.0, 100), (1e-9, 1)]
)
def test_residents_by_count_and_fraction(resident: float, expected: int) -> None:
    assert resident_count(resident, 0.1, samples=100) == expected


def test_residents_may_be_numpys_numbers() -> None:
    count, half, tenth = np.array([7]), np.array([0.5], np.float32), np.array([0.1])
    assert resident_count(count[0], half[0], samples=100) == 7
    assert resident_count(half[0], tenth[0], samples=100) == 50


@fuzz
@given(st.integers(1, 10**4), st.integers(1, 1000), st.integers(1, 1000))
@example(100, 29, 100)  # int(100 * 0.29) is 28
def test_a_fraction_of_the_samples_is_that_of_the_number_as_written(
    samples: int, top: int, below: int
) -> None:
    top = min(top, below)
    assert resident_count(top / below, 0, samples) == max(1, samples * top // below)


@fuzz
@given(st.integers(1, 10**5), st.integers(0, 1000), st.integers(1, 1000))
@example(100, 7, 100)  # ceil(100 * 0.07) is 8
@example(6, 5, 6)
def test_replaced_is_the_ceiling_of_the_number_as_written(resident: int, top: int, below: int) -> None:
    top = min(top, below)
    assert replaced_count(resident, top / below, 10**6) == math.ceil(Fraction(resident * top, below))


@fuzz
@given(st.integers(1, 1000), st.data(), st.floats(0, 1))
@example(10, None, 5e-324)
def test_replaced_is_never_more_than_are_left_and_zero_only_if_asked(
    samples: int, data: Any, rate: float
) -> None:
    resident = data.draw(st.integers(1, samples)) if data else 5
    replaced = replaced_count(resident, rate, samples)
    assert replaced <= samples - resident
    assert (replaced == 0) == (rate == 0 or resident == samples)
    ahead = ahead_count(resident, rate, samples)
    assert replaced <= ahead <= 2 * replaced
    RunningWindow(samples, resident, ahead)  # these are sizes that a window has


@fuzz
@given(st.integers(1, 10**4), st.integers(1, 10**6), st.integers(0, 1000), st.integers(0, 10**10))
def test_an_amount_of_memory_holds_as_many_as_fit_with_their_replacements(
    samples: int, sample_bytes: int, thousandths: int, memory: int
) -> None:
    rate = thousandths / 1000

    def need(resident: int) -> int:
        return (resident + ahead_count(resident, rate, samples)) * sample_bytes

    if need(1) > memory:
        with pytest.raises(ArgumentError, match=f"at least {need(1)} bytes") as caught:
            resident_count(str(memory), rate, samples, sample_bytes=sample_bytes)
        assert is_a_sentence(str(caught.value))
        return
    resident = resident_count(str(memory), rate, samples, sample_bytes=sample_bytes)
    assert need(resident) <= memory
    assert resident == samples or need(resident + 1) > memory


def test_memory_by_hand() -> None:
    sizes = [resident_count("110KB", r, samples=1000, sample_bytes=1000) for r in (0, 0.1, 1)]
    assert sizes == [110, 90, 55]
    assert resident_count("110KB", "auto", samples=1000, sample_bytes=1000) == 73
    assert resident_count("110KB", 0.1, samples=110, sample_bytes=1000) == 110
    assert resident_count("110KB", 0.1, samples=1000, sample_bytes=1000.5) == 90


@pytest.mark.parametrize("resident", [0, -1, 0.0, -0.5, 1.5, 50.0, math.nan, math.inf, True, None, [1]])
def test_bad_residents(resident: Any) -> None:
    with pytest.raises(ArgumentError, match="resident=") as caught:
        resident_count(resident, 0.1, samples=100)
    assert is_a_sentence(str(caught.value))


@pytest.mark.parametrize("replace", [-0.1, 1.01, 2, math.nan, "often", True, None])
def test_bad_replace_rates(replace: Any) -> None:
    for call in (resident_count, replaced_count):
        with pytest.raises(ArgumentError, match="replace=") as caught:
            call(5, replace, 100)
        assert is_a_sentence(str(caught.value))


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: resident_count(5, 0.1, samples=0), "samples=0"),
        (lambda: resident_count("1GiB", 0.1, samples=9), "sample_bytes=0"),
        (lambda: resident_count("1GiB", 0.1, samples=9, sample_bytes=math.inf), "sample_bytes=inf"),
        (lambda: replaced_count(5, 0.1, samples=0), "samples=0"),
        (lambda: replaced_count(0, 0.1, samples=9), "resident=0"),
        (lambda: replaced_count(10, 0.1, samples=9), "samples, 9"),
        (lambda: epochs_until_all_seen(10, 7, 4), "from 0 to 3"),
        (lambda: epochs_until_all_seen(10, 4, -1), "from 0 to 4"),
        (lambda: RunningWindow(0, 1, 0), "samples=0"),
        (lambda: RunningWindow(10, 0, 0), "resident=0"),
        (lambda: RunningWindow(10, 11, 0), "samples, 10"),
        (lambda: RunningWindow(10, 4, 5), "from 0 to 4"),
        (lambda: RunningWindow(10, 4, 2).entries(-1, 4), "start=-1"),
        (lambda: epoch_order(0, 0, 0, 0), "resident=0"),
    ],
)
def test_bad_values_are_refused_with_a_sentence(call: Any, says: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        call()
    assert says in str(caught.value)
    assert is_a_sentence(str(caught.value))


def test_a_string_that_is_no_amount_of_memory() -> None:
    with pytest.raises(QuantityError, match=r"resident must .* '12 parsecs'"):
        resident_count("12 parsecs", 0.1, samples=9, sample_bytes=1)


# How fast


# The order: what distinguishes a permutation


def places(seed: int, epoch: int, count: int) -> list[int]:
    return list(map(int, epoch_order(seed, epoch, 0, count)))


def test_every_size_up_to_some_hundreds_is_permuted() -> None:
    for count in range(1, 400):
        assert sorted(places(count, 1, count)) == list(range(count))


@settings(fuzz, max_examples=20)
@given(SEEDS, st.integers(1, 200_000))
def test_large_sizes_are_permuted(seed: int, count: int) -> None:
    assert np.array_equal(np.sort(epoch_order(seed, 3, 5, count)), np.arange(count))


def cycles(count: int, number: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """That many cycles, each a permutation of all: shape ``[number, count]``."""
    return RunningWindow(count, 1, 0, seed=11).entries(0, number * count).reshape(number, count)


def test_all_permutations_of_a_few_samples_come_equally_often() -> None:
    """Chi-squared against its mean and standard deviation; odd permutations as well as even ones."""
    for count, number in ((2, 5000), (3, 30_000), (4, 100_000), (5, 20_000)):
        drawn = cycles(count, number)
        _, seen = np.unique(drawn @ count ** np.arange(count), return_counts=True)
        kinds = math.factorial(count)
        assert len(seen) == kinds
        chi = float(((seen - number / kinds) ** 2).sum() / (number / kinds))
        assert chi < kinds - 1 + 4 * math.sqrt(2 * (kinds - 1)), count


@pytest.mark.parametrize("count", [7, 9, 16, 17, 30])
def test_each_sample_is_as_likely_at_each_place(count: int) -> None:
    number = 20_000
    drawn = cycles(count, number)
    table = np.array([np.bincount(column, minlength=count) for column in drawn.T])
    chi = float(((table - number / count) ** 2).sum() / (number / count))
    freedom = (count - 1) ** 2
    assert abs(chi - freedom) < 5 * math.sqrt(2 * freedom)
    # Pairs: the sample after this one is any other, as often.
    steps = np.bincount(((drawn[:, 1:] - drawn[:, :-1]) % count).ravel(), minlength=count)[1:]
    mean = steps.sum() / (count - 1)
    assert float(((steps - mean) ** 2).sum() / mean) < count - 2 + 5 * math.sqrt(2 * (count - 2))


@pytest.mark.parametrize("count", [10_000, 65_536, 99_991])
def test_a_large_permutation_is_well_mixed(count: int) -> None:
    order = epoch_order(1, 0, 0, count)
    line = np.arange(count)
    error = 1 / math.sqrt(count)
    for lag in (1, 2, math.isqrt(count), math.isqrt(count) + 1):  # about the rectangle's columns too
        assert abs(np.corrcoef(order[lag:], order[:-lag])[0, 1]) < 4 * error
    assert abs(np.corrcoef(line, order)[0, 1]) < 4 * error
    assert (order == line).sum() < 8  # Poisson, of mean 1
    # Ten stretches of the line hold ten ranges of samples in equal parts.
    table = np.histogram2d(line, order, bins=10)[0]
    assert abs(table - count / 100).max() < 5 * math.sqrt(count / 100)


@pytest.mark.parametrize("other", [(1, 2, 3), (0, 3, 3), (0, 2, 4), (2**63, 2, 3), (-1, 2, 3), (2, 0, 3)])
def test_another_seed_epoch_or_cursor_is_another_order(other: tuple[int, int, int]) -> None:
    one, two = epoch_order(0, 2, 3, 5000), epoch_order(*other, 5000)
    assert (one == two).sum() < 10
    assert abs(np.corrcoef(one, two)[0, 1]) < 4 / math.sqrt(5000)


# The order: the same on every machine. A second implementation, in Python's own integers.


def mix(word: int) -> int:
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        word = (word ^ word >> shift) * factor % 2**64
    return word ^ word >> 31


def splitmix(seed: int, number: int) -> int:
    return mix((seed + (number + 1) * 0x9E3779B97F4A7C15) % 2**64)


def key_of(*words: int) -> int:
    key = 0
    for word in words:
        key = mix(((key ^ word % 2**64) + 0x9E3779B97F4A7C15) % 2**64)
    return key


def permuted(number: int, size: int, key: int) -> int:
    columns = math.isqrt(size - 1) + 1
    columns += columns % 2
    rows = -(-size // columns)
    while True:
        row, column = divmod(number, columns)
        for turn in range(8):
            column += (splitmix(key, (2 * turn << 32) + row) >> 32) * columns >> 32
            column %= columns
            row += (splitmix(key, (2 * turn + 1 << 32) + column) >> 32) * rows >> 32
            row %= rows
        number = row * columns + column
        if number < size:
            return number


def entry_of(window: RunningWindow, number: int) -> int:
    cycle, place = divmod(number, window.samples)
    free = window.samples - window.resident - window.ahead
    segments = math.ceil(Fraction(window.samples, free + 1))
    shorter, longer_ones = divmod(window.samples, segments)
    sizes = [shorter + 1] * longer_ones + [shorter] * (segments - longer_ones)
    segment = first = 0
    while place >= first + sizes[segment]:
        first += sizes[segment]
        segment += 1
    place = first + permuted(place - first, sizes[segment], key_of(window.seed, 1, cycle, segment))
    return permuted(place, window.samples, key_of(window.seed, 0))


def test_splitmix_is_the_published_generator() -> None:
    """The first outputs for seed 1234567, as in the Rosetta Code task "Pseudo-random numbers/Splitmix64"."""
    assert [splitmix(1234567, number) for number in range(3)] == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
    ]


@fuzz
@given(windows(), st.integers(0, 2**40))
@example(RunningWindow(2**50, 2**49, 2**20, seed=3), 2**55 - 2)
@example(RunningWindow(10**9 + 7, 10**8, 10**8, seed=-1), 10**15)
def test_entries_are_those_of_the_second_implementation(window: RunningWindow, start: int) -> None:
    expected = [
        entry_of(window, number) if window.shuffle else number % window.samples
        for number in range(start, start + 5)
    ]
    assert window.entries(start, 5).tolist() == expected


@settings(fuzz, max_examples=50)
@given(SEEDS, st.integers(0, 2**40), st.integers(0, 2**40), st.integers(1, 30))
def test_epoch_orders_are_those_of_the_second_implementation(
    seed: int, epoch: int, cursor: int, count: int
) -> None:
    key = key_of(seed, 2, epoch, cursor)
    assert epoch_order(seed, epoch, cursor, count).tolist() == [permuted(i, count, key) for i in range(count)]


def test_the_sequence_never_changes() -> None:
    """A saved cursor means the same samples in every later version."""
    assert RunningWindow(10, 4, 2).entries(0, 30).tolist() == [
        2,
        0,
        3,
        4,
        1,
        5,
        6,
        9,
        7,
        8,
        1,
        3,
        2,
        4,
        0,
        5,
        6,
        9,
        8,
        7,
        0,
        3,
        4,
        1,
        2,
        6,
        9,
        8,
        5,
        7,
    ]
    assert places(0, 1, 10) == [4, 0, 8, 3, 2, 1, 5, 7, 9, 6]


def test_an_entry_of_a_huge_data_set_is_found_without_drawing_its_cycle() -> None:
    window = RunningWindow(samples=2**50, resident=2000, ahead=500, seed=3)
    cursor = 7 * 2**50 - 1200  # some of a cycle's end and of the next one's beginning
    drawn = np.concatenate([residents_of(window, cursor), incoming_of(window, cursor)])
    assert len(set(drawn.tolist())) == 2500
    assert 0 <= drawn.min() < 2**50 // 100
    assert 2**50 * 0.99 < drawn.max() < 2**50


# The order: what the window needs of it


@fuzz
@given(windows())
def test_every_cycle_has_every_sample_once(window: RunningWindow) -> None:
    for cycle in range(3):
        entered = window.entries(cycle * window.samples, window.samples)
        assert np.array_equal(np.sort(entered), np.arange(window.samples))


def gaps(window: RunningWindow, cycles: int) -> set[int]:
    """How many entries lie from one of a sample to its next, over all samples."""
    entered = window.entries(0, cycles * window.samples)
    numbers = np.argsort(entered, kind="stable").reshape(window.samples, cycles)
    return set(np.diff(numbers, axis=1).ravel().tolist())


@fuzz
@given(windows())
def test_a_sample_is_never_resident_twice_nor_resident_and_incoming(window: RunningWindow) -> None:
    """At any cursor, as each sample's entries are N+R apart, and none is away for more than D+S."""
    free = window.samples - window.resident - window.ahead
    found = gaps(window, 4)
    assert min(found) >= window.samples - free
    assert max(found) <= window.samples + free


@fuzz
@given(windows(), st.integers(0, 10**12))
def test_members_and_incoming_are_all_different(window: RunningWindow, cursor: int) -> None:
    members, incoming = residents_of(window, cursor), incoming_of(window, cursor)
    assert members.shape == (window.resident,)
    assert incoming.shape == (window.ahead,)
    assert members.dtype == incoming.dtype == np.int64
    both = np.concatenate([members, incoming])
    assert len(np.unique(both)) == window.resident + window.ahead
    assert 0 <= both.min() <= both.max() < window.samples


@fuzz
@given(windows(), st.integers(0, 10**6), st.data())
def test_what_enters_was_incoming_and_what_leaves_was_there_longest(
    window: RunningWindow, cursor: int, data: Any
) -> None:
    ready = data.draw(st.integers(0, window.ahead))
    before, after = residents_of(window, cursor), residents_of(window, cursor + ready)
    entered = incoming_of(window, cursor, ready)
    assert entered.tolist() == incoming_of(window, cursor)[:ready].tolist()
    assert after.tolist() == [*before, *entered][ready:]


def test_the_order_is_mixed_as_far_as_it_may_be() -> None:
    """Both bounds are met: no segment is shorter than what is free allows."""
    assert gaps(RunningWindow(40, 15, 6), 400) == set(range(21, 60))
    assert gaps(RunningWindow(40, 1, 0), 400) == set(range(1, 80))
    assert gaps(RunningWindow(40, 30, 10), 10) == {40}  # no freedom


def test_segments_are_of_nearly_equal_length() -> None:
    window = RunningWindow(100, 50, 5, seed=9)
    assert window.segments == 3
    # A segment's samples are together in each cycle; another cut of the line would part them.
    for first, last in pairwise((0, 34, 67, 100)):
        cycles = {tuple(sorted(window.entries(c * 100 + first, last - first).tolist())) for c in range(20)}
        orders = {tuple(window.entries(c * 100 + first, last - first).tolist()) for c in range(20)}
        assert len(cycles) == 1
        assert len(orders) == 20


def test_cycles_and_their_segments_are_drawn_independently() -> None:
    window = RunningWindow(4000, 1500, 501, seed=4)
    assert window.segments == 2
    # Where each sample of a segment is in it, in two cycles; and in one cycle, where each place of two
    # segments leads to.
    draws = [np.argsort(window.entries(start, 2000)).argsort() for start in (0, 2000, 4000, 6000)]
    for one, two in ((0, 2), (1, 3), (0, 1), (2, 3)):
        assert abs(np.corrcoef(draws[one], draws[two])[0, 1]) < 4 / math.sqrt(2000)
        assert (draws[one] == draws[two]).sum() < 8


def test_without_shuffle_samples_enter_in_the_data_sets_order() -> None:
    window = RunningWindow(7, 3, 2, shuffle=False)
    assert window.entries(5, 9).tolist() == [5, 6, 0, 1, 2, 3, 4, 5, 6]
    assert RunningWindow(7, 3, 2).entries(0, 7).tolist() != list(range(7))


def test_all_resident_is_a_window_that_stands_still() -> None:
    window = RunningWindow(20, 20, 0)
    assert sorted(residents_of(window, 0)) == list(range(20))
    assert incoming_of(window, 0).tolist() == []
    assert epochs_until_all_seen(20, 20, 0) == 1


# The promises


def test_the_references_example() -> None:
    """100 items, 50 in the cache, replace rate 0.1: 5 are replaced after each epoch."""
    resident = resident_count(50, 0.1, samples=100)
    replaced = replaced_count(resident, 0.1, samples=100)
    assert (resident, replaced) == (50, 5)
    assert epochs_until_all_seen(100, 50, 5) == 11

    window = RunningWindow(100, resident, replaced, shuffle=False)
    assert residents_of(window, 0).tolist() == list(range(50))
    assert incoming_of(window, 0).tolist() == [50, 51, 52, 53, 54]
    assert residents_of(window, 5).tolist() == list(range(5, 55))
    assert residents_of(window, 50).tolist() == list(range(50, 100))
    assert incoming_of(window, 50).tolist() == [0, 1, 2, 3, 4]
    assert residents_of(window, 100).tolist() == list(range(50))
    # Twenty epochs are one cycle: each of the 100 is used in ten of them.
    uses = Counter(i for epoch in range(20) for i in residents_of(window, 5 * epoch).tolist())
    assert uses == dict.fromkeys(range(100), 10)


@fuzz
@given(windows())
def test_all_are_seen_in_the_promised_epochs_and_not_before(window: RunningWindow) -> None:
    samples, resident, replaced = window.samples, window.resident, window.ahead
    epochs = epochs_until_all_seen(samples, resident, replaced)
    if replaced == 0:
        assert epochs == (1 if resident == samples else None)
        return
    assert epochs == math.ceil(Fraction(samples - resident, replaced)) + 1
    seen: set[int] = set()
    for epoch in range(epochs):
        assert len(seen) < samples
        seen |= set(residents_of(window, epoch * replaced).tolist())
    assert len(seen) == samples


@pytest.mark.parametrize(
    ("size", "rate", "shuffle"),
    all_pairs([(100, 0.5), (97, 0.31), (60, 0.9), (80, 0.05)], [0.05, 0.1, 0.3, 1.0], [True, False]),
)
def test_in_every_cycle_each_sample_is_used_equally_often(
    size: tuple[int, float], rate: float, shuffle: bool
) -> None:
    """N/R epochs for each entry, rounded down or up; of the first cycle some were there from the start."""
    samples, share = size
    resident = resident_count(share, rate, samples)
    replaced = replaced_count(resident, rate, samples)
    window = RunningWindow(samples, resident, replaced, seed=2, shuffle=shuffle)
    uses = np.zeros((5, samples), int)
    for cursor in range(0, 4 * samples, replaced):
        cycle = np.arange(cursor, cursor + resident) // samples
        np.add.at(uses, (cycle, residents_of(window, cursor)), 1)
    full = uses[1:4]
    assert {full.min(), full.max()} == {resident // replaced, -(-resident // replaced)}


@settings(fuzz, max_examples=50)
@given(windows(60), st.data())
def test_late_fillers_change_when_samples_enter_and_not_how_often(window: RunningWindow, data: Any) -> None:
    """Any number may be ready at a boundary: the sequence goes on where it was."""
    moves = data.draw(st.lists(st.integers(0, window.ahead), max_size=40))
    cursor = 0
    resident = residents_of(window, 0).tolist()
    entered = Counter(resident)
    for ready in moves:
        came = incoming_of(window, cursor, ready).tolist()
        resident = resident[ready:] + came
        entered.update(came)
        cursor += ready
        assert resident == residents_of(window, cursor).tolist()
        assert len(set(resident)) == window.resident
    times = [entered[i] for i in range(window.samples)]
    assert max(times) - min(times) <= 1


@settings(fuzz, max_examples=50)
@given(windows(), st.integers(0, 10**6), st.integers(1, 8))
def test_ranks_part_an_epoch_without_talking(window: RunningWindow, epoch: int, ranks: int) -> None:
    used = residents_of(window, epoch)[epoch_order(window.seed, epoch, epoch, window.resident)]
    parts = [i for rank in range(ranks) for i in used[rank::ranks].tolist()]
    assert sorted(parts) == sorted(residents_of(window, epoch).tolist())


def test_a_share_in_numpys_floats_is_the_one_that_was_written() -> None:
    for kind in (float, np.float16, np.float32, np.float64):
        assert resident_count(kind(0.29), 0.1, samples=100) == 29
        assert replaced_count(100, kind(0.07), samples=1000) == 7
