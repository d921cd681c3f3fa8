"""Iterable datasets: recorded in the first pass, with a length and an index from then on."""

from __future__ import annotations

import contextlib
import copy
import itertools
import operator
import os
import pickle
import random
import secrets
import shutil
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import (
    equal_batches,
    failure,
    interrupted_everywhere,
    is_a_sentence,
    often,
    rarely,
    recorded,
    rng_states,
    seed_everything,
)
from kills import child, ended
from resuming import DrawsFromAll
from stores import attached, ids, opened, store_of
from streams import Numbers, Shuffled, share, values
from torch.utils.data import (
    BatchSampler,
    ChainDataset,
    DataLoader,
    IterableDataset,
    SequentialSampler,
    TensorDataset,
    get_worker_info,
)

import hotset
from hotset.dataset.streams.probe import probe_stream
from hotset.store.claims import Claims
from hotset.store.store import Store
from hotset.store.stream_parts import NO_ROOM, StreamPart, StreamParts

N = 60


def once(stream: Any, workers: int = 0, size: int = 8, **arguments: Any) -> tuple[list[Any], Any]:
    """The batches of torch's own loader over a stream, and the random states after it."""
    seed_everything()
    batches = list(DataLoader(stream, batch_size=size, num_workers=workers, **arguments))
    return batches, rng_states()


def quiet(loader: Any) -> list[Any]:
    """The batches of a pass that may say that the first one is not shuffled."""
    with recorded():
        return list(loader)


class Jitter(Numbers):
    """Draws a number for each sample."""

    def __init__(self, every: int = 1, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.every = every

    def __iter__(self) -> Iterator[Any]:
        for number in share(self.count):
            noise = torch.rand(4) if number % self.every == self.every - 1 else torch.zeros(4)
            yield torch.full(self.shape, float(number)) + noise, number


class Own(Numbers):
    """Draws from a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = np.random.default_rng(0)

    def __iter__(self) -> Iterator[Any]:
        for number in share(self.count):
            yield torch.full((4,), self.generator.random()), number


class Rarely(Numbers):
    """Draws for one sample in 400, from a generator that lives as long as a run, or a draw."""

    def __init__(self, kind: str) -> None:
        super().__init__(count=800)
        self.kind = kind

    def __iter__(self) -> Iterator[Any]:
        draw = self.drawer()
        for number in share(self.count):
            noise = float(draw()) if number % 400 == 399 else 0.0
            yield torch.full(self.shape, number + noise), number

    def drawer(self) -> Callable[[], float]:
        kinds: dict[str, Callable[[], Callable[[], float]]] = {
            "numpy": lambda: np.random.default_rng().random,
            "random": lambda: random.Random().random,
            "torch": lambda: self.torchs(torch.Generator()),
            "seeded": lambda: np.random.default_rng(3).random,
            "secrets": lambda: lambda: secrets.randbelow(1000) / 1000,
            "made anew": lambda: lambda: np.random.default_rng().random(),
        }
        return kinds[self.kind]()

    @staticmethod
    def torchs(generator: torch.Generator) -> Callable[[], float]:
        generator.seed()
        return lambda: float(torch.rand((), generator=generator))


class Seeded(Numbers):
    """Draws for each sample from a generator that it seeds anew in each run; each run is slower."""

    pause = 0.0

    def __iter__(self) -> Iterator[Any]:
        Seeded.pause *= 2
        generator = np.random.default_rng(3)
        for number in share(self.count):
            time.sleep(Seeded.pause)
            yield torch.full(self.shape, generator.random()), number


class OfFile(IterableDataset[Any]):
    """Each run gives the lines of a file, by the file itself, which the stream holds open."""

    def __init__(self, path: Path) -> None:
        self.file = path.open()

    def __iter__(self) -> Iterator[str]:
        self.file.seek(0)
        return iter(self.file)


class Slower(Numbers):
    """Each run takes longer than the one before."""

    pause = 0.0

    def __iter__(self) -> Iterator[Any]:
        Slower.pause += 0.02
        for sample in super().__iter__():
            time.sleep(Slower.pause)
            yield sample


class ReadOnce(IterableDataset[Any]):
    """A stream over a generator: it cannot be copied, nor run twice."""

    def __init__(self) -> None:
        self.numbers = (torch.tensor([number]) for number in range(50))

    def __iter__(self) -> Iterator[Any]:
        return self.numbers


class Emptied(IterableDataset[Any]):
    """Each sample is the same list, which is empty again when the next one is asked for."""

    def __iter__(self) -> Iterator[Any]:
        sample: list[Any] = []
        for number in range(N):
            sample[:] = torch.full((4,), float(number)), number
            yield sample
            sample.clear()


class Halves(Numbers):
    """Each worker gives numbers that follow on each other."""

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info is not None else (0, 1)
        for number in range(self.count * worker // workers, self.count * (worker + 1) // workers):
            yield torch.full(self.shape, float(number)), number


class OfText(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        for number in share(20):
            yield {"text": "word " * number, "label": number}


class Batches(IterableDataset[Any]):
    batch_size = 16

    def __iter__(self) -> Iterator[Any]:
        for start in range(0, 64, 16):
            yield torch.arange(start, start + 16).view(16, 1).float(), torch.arange(start, start + 16)


class Nothing(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(())


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        yield from map(torch.tensor, itertools.count())


class Undivided(Numbers):
    def __iter__(self) -> Iterator[Any]:
        for number in range(self.count):
            yield torch.full(self.shape, float(number)), number


def plus_one(sample: Any) -> Any:
    picture, number = sample
    return picture + 1, number


def in_place(sample: Any) -> Any:
    picture, number = sample
    picture.mul_(2)
    return picture, number


@hotset.nondeterministic
def noisy(sample: Any) -> Any:
    picture, number = sample
    return picture + torch.rand(4), number


def jitter(sample: Any) -> Any:
    picture, number = sample
    return picture + torch.rand(()), number


def as_they_are(samples: list[Any]) -> list[Any]:
    return samples


def quiet_values(loader: Any) -> list[int]:
    """The numbers in batches of any form: collated, lists of samples, or single samples."""
    batches = quiet(loader)
    if loader.collate_fn is as_they_are:
        return [number for batch in batches for _, number in batch]
    return [number for _, numbers in batches for number in np.atleast_1d(numbers).tolist()]


class TestFirstPass:
    @pytest.mark.parametrize("workers", [0, 1, 2])
    def test_it_is_torchs_own_and_leaves_an_index(self, workers: int) -> None:
        expected, states = once(Numbers(N), workers)
        with hotset.cache(Numbers(N), memory="10MiB") as stream:
            assert not stream.recorded
            got, states_here = [], None
            loader = hotset.DataLoader(stream, batch_size=8, num_workers=workers)
            seed_everything()
            got = list(loader)
            states_here = rng_states()
            equal_batches(got, expected)
            assert states_here == states
            assert stream.recorded
            assert len(stream) == N
            assert sorted(number for _, number in stream) == list(range(N))
            assert stream.check() == []
            assert stream.stats().cached == N

    def test_closed_it_comes_as_it_is_and_counts_no_samples(self) -> None:
        stream = hotset.cache(Numbers(N), memory="10MiB")
        stream.fill()
        stream.close()
        assert [number for _, number in stream] == list(range(N))
        assert (stream.stats().cached, stream.stats().uncached) == (0, 0)

    @pytest.mark.parametrize("size", [None, 7])
    def test_with_any_batch_size(self, size: int | None) -> None:
        expected = list(DataLoader(Numbers(N), batch_size=size))
        with hotset.cache(Numbers(N), memory="10MiB") as stream:
            equal_batches(list(hotset.DataLoader(stream, batch_size=size)), expected)
            assert len(stream) == N

    def test_live_transforms_run_for_each_use_and_draw_as_without_a_cache(self) -> None:
        seed_everything()
        plain = [(picture + 1 + torch.rand(4), number) for picture, number in Numbers(N)]
        with hotset.cache(Numbers(N), transform=[plus_one, noisy], memory="10MiB") as stream:
            seed_everything()
            first = list(stream)
            equal_batches(first, plain)
            again = list(hotset.DataLoader(stream, batch_size=None))
            assert all(not torch.equal(a[0], b[0]) for a, b in zip(first, again, strict=True))
            assert stream.plan.cached[1:] == ("plus_one",)
            assert stream.plan.live == ("noisy",)

    def test_a_loaders_generator_seeds_the_workers_as_torchs_does(self) -> None:
        """What workers draw follows from the base seed, which torch draws from the loader's generator."""

        def run(kind: Any, dataset: Any) -> list[Any]:
            seed_everything()
            generator = torch.Generator().manual_seed(3)
            return [*kind(dataset, batch_size=4, num_workers=2, generator=generator), generator.get_state()]

        expected = run(DataLoader, Jitter())
        with hotset.cache(Numbers(N), transform=[noisy], memory="10MiB") as stream:
            equal_batches(run(hotset.DataLoader, stream), expected)

    def test_a_transform_that_works_in_place_changes_nothing_of_the_users(self) -> None:
        kept = [(torch.ones(4), number) for number in range(8)]

        class Held(IterableDataset[Any]):
            def __iter__(self) -> Iterator[Any]:
                return iter(kept)

        with hotset.cache(Held(), transform=in_place, memory="1MiB") as stream:
            first, second = quiet(hotset.DataLoader(stream)), quiet(hotset.DataLoader(stream))
            equal_batches(first, second)
            assert all(torch.equal(picture, torch.ones(4)) for picture, _ in kept)
            assert torch.equal(first[0][0], torch.full((1, 4), 2.0))

    def test_samples_of_any_kind(self) -> None:
        with hotset.cache(OfText(), memory="1MiB") as stream:
            first = list(stream)
            assert first == list(OfText())
            assert [stream[index] for index in range(20)] == first

    def test_a_pass_that_is_broken_off_is_gone_on_with(self) -> None:
        with hotset.cache(Numbers(N), memory="10MiB") as stream:
            loader = hotset.DataLoader(stream, batch_size=4)
            for _ in zip(range(3), loader, strict=False):
                pass
            assert not stream.recorded
            some = stream.stats().cached
            assert 12 <= some < N
            assert values(loader) == list(range(N))
            assert len(stream) == N
            assert stream.stats().misses == N  # each was recorded once

    def test_an_exception_comes_as_from_torch_and_what_came_before_is_kept(self) -> None:
        stream = Numbers(N)
        stream.fails_at = 30
        expected = failure(lambda: list(DataLoader(stream, batch_size=4)))
        with hotset.cache(stream, memory="10MiB", key="numbers") as cached:
            loader = hotset.DataLoader(cached, batch_size=4)
            assert failure(lambda: list(loader)).text == expected.text
            assert not cached.recorded
            assert cached.stats().cached >= 28
            stream.fails_at = -1
            assert values(loader) == list(range(N))
            assert len(cached) == N

    def test_a_file_that_a_run_gives_its_samples_by_stays_open(self, tmp_path: Path) -> None:
        (tmp_path / "lines").write_text("".join(f"line {number}\n" for number in range(N)))
        lines = OfFile(tmp_path / "lines")
        with hotset.cache(lines, memory="1MiB", key="lines") as stream, lines.file:
            for _ in range(2):
                assert list(hotset.DataLoader(stream, batch_size=None)) == list(lines)

    @pytest.mark.parametrize("workers", [0, 2])
    def test_two_loaders_over_one_stream_at_once(self, workers: int) -> None:
        with hotset.cache(Numbers(N), memory="10MiB") as stream:
            one, other = (hotset.DataLoader(stream, batch_size=4, num_workers=workers) for _ in range(2))
            pairs = list(zip(one, other, strict=True))
            equal_batches([a for a, _ in pairs], [b for _, b in pairs])
            assert values(a for a, _ in pairs) == values(
                DataLoader(Numbers(N), batch_size=4, num_workers=workers)
            )
            assert sorted(values(hotset.DataLoader(stream, batch_size=4))) == list(range(N))
            assert stream.check() == []

    @pytest.mark.parametrize("workers", [(0, 2), (2, 1)])
    @pytest.mark.filterwarnings("ignore:.*recorded anew")
    def test_two_loaders_with_other_workers_over_one_stream_at_once(self, workers: tuple[int, int]) -> None:
        """The later one divides the stream anew, so what the earlier one goes on reading is not recorded."""
        for _ in range(often(4, 40)):  # which one's workers are faster is another each time
            with hotset.cache(Numbers(N), memory="10MiB") as stream:
                one, other = (hotset.DataLoader(stream, batch_size=4, num_workers=count) for count in workers)
                batches = [batch for pair in itertools.zip_longest(one, other) for batch in pair]
                assert sorted(values(filter(None, batches))) == sorted([*range(N)] * 2)
                assert sorted(values(hotset.DataLoader(stream, batch_size=4))) == list(range(N))
                assert stream.check() == []

    @pytest.mark.parametrize(
        ("step", "size"),
        rarely(
            itertools.product(["own", "insert", "note", "end"], [4, 40]),
            *(("own", 40), ("insert", 4), ("note", 40), ("end", 4)),
        ),
    )
    @pytest.mark.filterwarnings("ignore:.*recorded anew")
    def test_a_pass_that_is_overtaken_changes_nothing_of_the_one_that_divides_the_stream_anew(
        self, monkeypatch: pytest.MonkeyPatch, step: str, size: int
    ) -> None:
        """The later one begins, and records some samples, just before the earlier one takes this step."""
        kind = Store if step == "insert" else StreamPart
        with hotset.cache(Numbers(N), memory="10MiB") as stream:
            before, later = getattr(kind, step), hotset.DataLoader(stream, batch_size=4, num_workers=2)
            rest: list[Iterator[Any]] = []
            got: list[Any] = []

            def overtaken(*arguments: Any) -> Any:
                monkeypatch.setattr(kind, step, before)
                rest.append(iter(later))
                got.append(next(rest[0]))
                return before(*arguments)

            monkeypatch.setattr(kind, step, overtaken)
            assert values(hotset.DataLoader(stream, batch_size=size)) == list(range(N))
            assert sorted(values([*got, *rest[0]])) == list(range(N))
            assert len(stream) == N
            assert sorted(number for _, number in stream) == list(range(N))

    @pytest.mark.filterwarnings("ignore:.*recorded anew")
    def test_a_pass_that_is_overtaken_keeps_no_sample_of_the_later_one_claimed(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with hotset.cache(Numbers(N), memory="10MiB") as stream:
            before, later = Claims.take, hotset.DataLoader(stream, batch_size=4, num_workers=2)
            got: list[int] = []

            def overtaken(*arguments: Any, **named: Any) -> Any:
                monkeypatch.setattr(Claims, "take", before)
                batches = iter(later)
                got.extend(values([next(batches)]))
                taken = before(*arguments, **named)
                got.extend(values(batches))
                return taken

            monkeypatch.setattr(Claims, "take", overtaken)
            assert values(hotset.DataLoader(stream, batch_size=40)) == list(range(N))
            assert sorted(got) == list(range(N))
            assert sorted(number for _, number in stream) == list(range(N))

    @pytest.mark.filterwarnings("ignore:.*recorded anew", "ignore:.*was begun three times")
    def test_a_pass_that_is_overtaken_compares_nothing_with_what_the_later_one_records(self) -> None:
        with hotset.cache(Halves(N), memory="10MiB") as stream:
            later = hotset.DataLoader(stream, batch_size=4, num_workers=2)
            with pytest.MonkeyPatch.context() as patch:
                before, positions = Store.read, itertools.count()

                def overtaken(*arguments: Any) -> Any:
                    if next(positions) == 1:
                        patch.undo()
                        assert sorted(values(later)) == list(range(N))
                    return before(*arguments)

                next(iter(hotset.DataLoader(stream, batch_size=40)))  # and the next pass compares these
                patch.setattr(Store, "read", overtaken)
                assert values(hotset.DataLoader(stream, batch_size=40)) == list(range(N))
            assert len(stream) == N
            assert sorted(number for _, number in stream) == list(range(N))

    @pytest.mark.filterwarnings("ignore:.*recorded anew")
    def test_a_rank_that_divides_a_stream_anew_removes_nothing_of_one_that_was_quicker(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with (
            hotset.cache(Numbers(N), memory="10MiB") as stream,
            pickle.loads(pickle.dumps(stream)) as other,
        ):
            next(iter(hotset.DataLoader(stream, batch_size=4)))
            before, clear = stream.stats().misses, Store.clear
            ranks = [hotset.DataLoader(each, batch_size=4, num_workers=2) for each in (other, stream)]

            def overtaken(*arguments: Any, **named: Any) -> bool:
                monkeypatch.setattr(Store, "clear", clear)
                assert sorted(values(ranks[0])) == list(range(N))
                return clear(*arguments, **named)

            monkeypatch.setattr(Store, "clear", overtaken)
            assert sorted(values(ranks[1])) == list(range(N))
            assert stream.stats().misses == before + N
            assert sorted(number for _, number in stream) == list(range(N))

    @pytest.mark.parametrize("how", ["it was killed", "it gives them back"])
    def test_what_an_earlier_pass_began_to_store_and_did_not_is_stored(
        self, monkeypatch: pytest.MonkeyPatch, how: str
    ) -> None:
        with hotset.cache(Numbers(N), memory="10MiB") as stream:
            insert = Store.insert

            def claimed(store: Store, samples: dict[int, Any], *arguments: Any) -> bool:
                monkeypatch.setattr(Store, "insert", insert)
                with attached(store) as earlier:
                    claims = earlier.filler.claims
                    assert len(claims.take(ids(samples), len(samples))) == len(samples)
                    is_held = insert(store, samples, *arguments)
                    assert not store.present(ids(samples)).any()
                    if how == "it gives them back":
                        claims.release(ids(samples))
                return is_held

            monkeypatch.setattr(Store, "insert", claimed)
            assert values(hotset.DataLoader(stream, batch_size=4)) == list(range(N))
            assert stream.recorded
            assert stream.stats().cached == N

    @pytest.mark.parametrize("kind", ["a pair", "a dict", "text"])
    def test_the_first_pass_counts_its_samples(self, kind: str) -> None:
        """Each worker's last batch is a short one."""

        class Kind(Numbers):
            def __iter__(self) -> Iterator[Any]:
                for value, number in super().__iter__():
                    yield {
                        "a pair": (value, number),
                        "a dict": {"inner": [{"value": value}]},
                        "text": str(number),
                    }[kind]

        with hotset.cache(Kind(N), memory="10MiB") as stream:
            loader = hotset.DataLoader(stream, batch_size=8, num_workers=2)
            list(loader)
            assert loader.last_epoch is not None
            assert loader.last_epoch.samples == N

    def test_persistent_workers_end_when_all_is_recorded(self) -> None:
        with hotset.cache(Numbers(N), memory="10MiB") as stream:
            loader = hotset.DataLoader(stream, batch_size=8, num_workers=2, persistent_workers=True)
            for _ in range(3):
                assert sorted(values(loader)) == list(range(N))
            assert stream.recorded

    def test_the_users_worker_init_finds_the_stream(self) -> None:
        def divide(worker: int) -> None:
            info = get_worker_info()
            assert info is not None
            info.dataset.count = 10 * (worker + 1)  # type: ignore[attr-defined]

        expected = values(DataLoader(Numbers(N), batch_size=4, num_workers=2, worker_init_fn=divide))
        with hotset.cache(Numbers(N), memory="10MiB") as stream:
            assert (
                values(hotset.DataLoader(stream, batch_size=4, num_workers=2, worker_init_fn=divide))
                == expected
            )
            assert sorted(number for _, number in stream) == sorted(expected)


def test_the_plan_says_who_has_cut_and_nothing_of_the_kept_samples() -> None:
    with hotset.cache(Numbers(N), transform=[plus_one, plus_one], memory="10MiB", cut=1) as stream:
        text = str(stream.plan)
    assert "as cut=1 says" in text
    assert "began with the same" in text
    assert "read twice" not in text, "it holds its first samples, so that tells nothing"


class TestRecorded:
    @pytest.mark.parametrize("workers", [0, 2])
    def test_it_is_a_dataset_with_an_index(self, workers: int) -> None:
        with hotset.cache(Numbers(N), memory="10MiB") as stream:
            stream.fill()
            plain = TensorDataset(torch.stack([p for p, _ in stream]), torch.tensor([n for _, n in stream]))
            loader = hotset.DataLoader(stream, batch_size=8, shuffle=True, num_workers=workers)
            seed_everything()
            got, states = list(loader), rng_states()
            expected, theirs = once(plain, workers, shuffle=True)
            assert values(got) == values(expected)
            assert states == theirs
            assert len(loader) == 8
            assert loader.last_epoch is not None
            assert loader.last_epoch.hit_rate == 1.0
            assert values(DataLoader(stream, batch_size=8, num_workers=workers)) == list(range(N))
            half = torch.utils.data.Subset(stream, range(0, N, 2))
            assert values(hotset.DataLoader(half, batch_size=8)) == list(range(0, N, 2))
            batches = torch.utils.data.BatchSampler(range(10), 5, False)
            assert values(hotset.DataLoader(stream, batch_sampler=batches)) == list(range(10))

    def test_index_and_batch_index(self) -> None:
        with hotset.cache(Numbers(N), memory="10MiB") as stream:
            stream.fill(num_workers=2)
            assert stream[-1][1] == stream[N - 1][1]
            assert [number for _, number in stream.__getitems__([3, 1])] == [stream[3][1], stream[1][1]]
            with pytest.raises(IndexError):
                stream[N]

    @pytest.mark.parametrize("workers", [0, 2])
    @pytest.mark.parametrize("resumed_with", [0, 2])
    def test_a_state_resumes_with_any_number_of_workers(self, workers: int, resumed_with: int) -> None:
        with hotset.cache(Numbers(N), memory="10MiB") as stream:
            stream.fill()
            loader = hotset.DataLoader(stream, batch_size=4, shuffle=True, num_workers=workers)
            batches = iter(loader)
            for _ in range(9):
                next(batches)
            state = loader.state_dict()
            rest = values(batches)
            other = hotset.DataLoader(stream, batch_size=4, shuffle=True, num_workers=resumed_with)
            other.load_state_dict(state)
            assert values(other) == rest

    @pytest.mark.parametrize("is_same", [False, True], ids=["another loader", "the same loader"])
    @pytest.mark.parametrize("passes", [0, 1])
    @pytest.mark.parametrize("consumed", [0, 3, 15])
    def test_a_state_holds_the_generators_of_live_transforms(
        self, consumed: int, passes: int, is_same: bool
    ) -> None:
        def make() -> Any:
            stream = hotset.cache(Numbers(N), transform=[DrawsFromAll()], memory="10MiB")
            return hotset.DataLoader(stream, batch_size=4)

        loader = make()
        for _ in range(passes):
            assert loader.state_dict()
            list(loader)
        batches = iter(loader)
        for _ in range(consumed):
            next(batches)
        state = loader.state_dict()
        expected = list(batches), list(loader)
        other = loader if is_same else make()
        if passes and not is_same:
            other.dataset.fill()
        other.load_state_dict(state)
        equal_batches((list(other), list(other)), expected)
        for each in (loader, other):
            each.dataset.close()

    @pytest.mark.parametrize("is_recorded", [False, True])
    def test_a_state_of_the_first_pass_goes_on_in_the_streams_order(self, is_recorded: bool) -> None:
        with hotset.cache(Numbers(N), memory="10MiB") as stream:
            loader = hotset.DataLoader(stream, batch_size=4, num_workers=2)
            batches = iter(loader)
            for _ in range(5):
                next(batches)
            state = loader.state_dict()
            rest = values(batches)
            if not is_recorded:
                stream.clear()
            other = hotset.DataLoader(stream, batch_size=4, num_workers=2)
            other.load_state_dict(state)
            assert values(other) == rest
            assert sorted(values(other)) == list(range(N))

    @pytest.mark.parametrize("drawn_by", ["the global generator", "entropy", "the clock"])
    def test_a_first_pass_that_no_run_repeats_is_warned_of_as_it_goes_on(self, drawn_by: str) -> None:
        class Drawn(Numbers):
            def __iter__(self) -> Iterator[Any]:
                seed = time.time_ns() if drawn_by == "the clock" else None
                own = random if drawn_by == "the global generator" else random.Random(seed)
                numbers = list(range(self.count))
                own.shuffle(numbers)
                yield from ((torch.tensor(float(number)), number) for number in numbers)

        with recorded() as told, hotset.cache(Drawn(N), memory="10MiB") as stream:
            loader, other = (hotset.DataLoader(stream, batch_size=4) for _ in range(2))
            batches = iter(loader)
            consumed = [*values([next(batches)]), *values([next(batches)])]
            other.load_state_dict(loader.state_dict())
            rest = values(other)
        said = [str(one.message) for one in told if "samples twice" in str(one.message)]
        if drawn_by == "the global generator":
            assert sorted(consumed + rest) == list(range(N))
        assert len(said) == (drawn_by != "the global generator")
        assert all(map(is_a_sentence, said))

    def test_a_state_is_of_the_order_in_which_workers_recorded_it(self) -> None:
        class Halves(Numbers):
            def __iter__(self) -> Iterator[Any]:
                info = get_worker_info()
                worker, workers = (info.id, info.num_workers) if info is not None else (0, 1)
                for number in range(worker * N // workers, (worker + 1) * N // workers):
                    yield torch.tensor(float(number)), number

        def make(workers: int) -> Any:
            stream = hotset.cache(Halves(N), memory="10MiB")
            stream.fill(num_workers=workers)
            return hotset.DataLoader(stream, batch_size=4)

        loader, same, other = make(2), make(2), make(0)
        batches = iter(loader)
        for _ in range(3):
            next(batches)
        state = loader.state_dict()
        same.load_state_dict(state)
        assert values(same) == values(batches)
        said = failure(lambda: other.load_state_dict(state))
        assert said is not None
        assert said.kind is hotset.StateError
        assert "fill(num_workers=2)" in said.text
        assert is_a_sentence(said.text)
        other.load_state_dict(loader.state_dict())  # between two passes
        for each in (loader, same, other):
            each.dataset.close()

    @pytest.mark.parametrize("persistent", [False, True])
    def test_the_pass_after_a_resumed_first_one_is_recorded(self, persistent: bool) -> None:
        def make() -> Any:
            stream = hotset.cache(Numbers(N), memory="10MiB")
            return hotset.DataLoader(stream, batch_size=4, num_workers=2, persistent_workers=persistent)

        loader = make()
        next(iter(loader))
        again = make()
        again.load_state_dict(loader.state_dict())
        assert len(values(again)) == N - 4
        assert not again.dataset.recorded
        for _ in range(2):
            assert sorted(values(again)) == list(range(N))
            assert again.dataset.recorded
        for each in (loader, again):
            each.dataset.close()

    def test_a_state_of_a_recorded_stream_needs_a_recorded_stream(self) -> None:
        with hotset.cache(Numbers(N), memory="10MiB") as stream:
            stream.fill()
            loader = hotset.DataLoader(stream, batch_size=4, shuffle=True)
            next(iter(loader))
            state = loader.state_dict()
            stream.clear()
            with pytest.raises(hotset.StateError, match=r"call fill\(\)"):
                hotset.DataLoader(stream, batch_size=4, shuffle=True).load_state_dict(state)

    @pytest.mark.parametrize("end", ["clear", "close"])
    def test_a_pass_of_torchs_loader_goes_on_when_it_is_cleared_or_closed(self, end: str) -> None:
        stream = hotset.cache(Numbers(N), memory="10MiB")
        stream.fill()
        batches = iter(DataLoader(stream, batch_size=4))
        first = next(batches)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", hotset.HotsetWarning)  # that the stream is run again
            getattr(stream, end)()
            assert values([first, *batches]) == list(range(N))
        with pytest.raises(TypeError, match="no index"):
            stream[3]
        stream.close()

    def test_it_pickles(self) -> None:
        with hotset.cache(Numbers(N), memory="10MiB") as stream:
            copy = pickle.loads(pickle.dumps(stream))
            stream.fill()
            assert copy.recorded
            assert copy[5][1] == stream[5][1]
            copy.close()

    @pytest.mark.chaos  # a copy by pickle and forked workers are in the tests around this one
    def test_spawned_workers(self) -> None:
        with hotset.cache(Numbers(N), memory="10MiB") as stream:
            loader = hotset.DataLoader(stream, batch_size=8, num_workers=1, multiprocessing_context="spawn")
            assert values(loader) == list(range(N))
            assert sorted(values(loader)) == list(range(N))
            assert stream.recorded

    def test_clear_and_an_attribute_set_record_anew(self) -> None:
        stream = hotset.cache(Numbers(N), memory="10MiB")
        stream.fill()
        stream.clear()
        assert not stream.recorded
        assert values(hotset.DataLoader(stream, batch_size=8)) == list(range(N))
        assert stream.recorded
        stream.count = 10
        assert stream.dataset.count == 10
        assert not stream.recorded
        assert values(hotset.DataLoader(stream, batch_size=8)) == list(range(10))
        assert len(stream) == 10
        stream.close()

    def test_cached_once_more_with_a_transform(self) -> None:
        with hotset.cache(Numbers(N), memory="10MiB") as stream:
            stream.fill()
            with hotset.cache(stream, transform=plus_one, memory="10MiB") as cached:
                assert torch.equal(cached[3][0], stream[3][0] + 1)


class Told(Numbers):
    """A stream that states its length."""

    def __len__(self) -> int:
        return self.count


def test_a_loaders_length_is_the_streams_before_the_first_pass_if_it_states_one() -> None:
    with hotset.cache(Told(N), memory="10MiB") as stream:
        loader = hotset.DataLoader(stream, batch_size=8)
        assert len(loader) == len(DataLoader(Told(N), batch_size=8)) == 8
        quiet(loader)
        assert len(loader) == 8
    with hotset.cache(Numbers(N), memory="10MiB") as stream:
        assert failure(lambda: len(hotset.DataLoader(stream, batch_size=8))).kind is TypeError


class Counted(Numbers):
    """A stream that says how long it is, as WebDataset's do by ``with_length``."""

    def __len__(self) -> int:
        return self.count


class Begun(IterableDataset[Any]):
    """Is its own iterator, in another order from one epoch to the next, and begins anew by a ``reset``."""

    def __init__(self) -> None:
        self.epoch, self.left = 0, []

    def __iter__(self) -> Iterator[Any]:
        self.epoch += 1
        self.left = list(share(60))
        random.Random(self.epoch).shuffle(self.left)
        return self

    def __next__(self) -> Any:
        if not self.left:
            raise StopIteration
        number = self.left.pop()
        return torch.full((4,), float(number)), number

    def reset(self) -> None:
        self.epoch = 0


@pytest.mark.parametrize("workers", [0, 2])
def test_every_worker_reads_a_stream_that_is_its_own_iterator(workers: int) -> None:
    """As litdata's StreamingDataset is, and a node of torchdata, which is no dataset."""
    stream = Begun()
    expected = values(DataLoader(Begun(), batch_size=5, num_workers=workers))
    train = hotset.cache(stream, memory="16MiB")
    loader = hotset.DataLoader(train, batch_size=5, num_workers=workers)
    with pytest.warns(hotset.HotsetWarning, match="may give its samples in another order in each epoch"):
        epochs = [values(loader) for _ in range(3)]
    assert epochs[0] == expected
    assert [sorted(epoch) for epoch in epochs] == [list(range(60))] * 3


def test_a_stream_that_says_its_length_has_it_from_the_beginning() -> None:
    with hotset.cache(Counted(N), memory="10MiB") as stream:
        loader = hotset.DataLoader(stream, batch_size=8)
        assert (len(stream), len(loader)) == (N, -(-N // 8))
        assert len(list(loader)) == len(loader) == -(-N // 8)
        assert len(stream) == N


def test_a_chain_of_streams_without_lengths_has_none_until_it_was_read() -> None:
    def chain() -> Any:
        return ChainDataset([Numbers(N), Numbers(N)])

    with hotset.cache(chain(), memory="10MiB") as stream:
        told = failure(lambda: list(DataLoader(stream, batch_size=8)))
        assert told.kind is TypeError
        assert "read it to its end with hotset.DataLoader" in told.text
        stream.fill()
        equal_batches(list(DataLoader(stream, batch_size=8)), list(DataLoader(chain(), batch_size=8)))


class Noting(Numbers):
    """Notes which numbers it has given."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self.given: list[int] = []

    def __iter__(self) -> Iterator[Any]:
        for picture, number in super().__iter__():
            self.given.append(number)
            yield picture, number


class Reseeded(Numbers):
    """Another order in each epoch that is announced."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        numbers = list(share(self.count))
        random.Random(self.epoch).shuffle(numbers)
        yield from ((torch.full(self.shape, float(number)), number) for number in numbers)


@pytest.mark.parametrize("kind", [Shuffled, Reseeded, Numbers])
def test_a_shuffle_of_the_stream_that_recording_ends_is_said_once(kind: type[Numbers]) -> None:
    for shuffle in (None, True):
        with recorded(), hotset.cache(kind(N), memory="10MiB") as stream:
            loader = hotset.DataLoader(stream, batch_size=8, shuffle=shuffle)
            with recorded():
                list(loader)
            with recorded() as told:
                epochs = []
                for epoch in (1, 2):
                    stream.set_epoch(epoch)
                    epochs.append(values(loader))
        one_order = kind is not Numbers and not shuffle
        assert ["shuffle=True" in str(each.message) for each in told] == [True] * one_order
        assert (epochs[0] == epochs[1]) is not bool(shuffle)


class Parts(Numbers):
    """Another part of the numbers in each epoch."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        for number in share(self.count):
            yield torch.full(self.shape, float(number)), 100 * self.epoch + number


@pytest.mark.parametrize("workers", [0, 2])
def test_an_epoch_of_other_samples_is_followed(workers: int) -> None:
    with recorded() as told, hotset.cache(Parts(N), memory="10MiB") as stream:
        assert stream.dataset.epoch == 0, "the probe changed it"
        loader = hotset.DataLoader(stream, batch_size=8, num_workers=workers)
        for epoch in (0, 1, 1, 2):
            stream.set_epoch(epoch)
            assert sorted(values(loader)) == [100 * epoch + number for number in range(N)]
    said = [str(each.message) for each in told if "recorded anew" in str(each.message)]
    assert len(said) == 2
    assert all("Parts.epoch has changed" in each and is_a_sentence(each) for each in said)


def test_an_epoch_of_a_stream_that_is_declared_is_its_order() -> None:
    with recorded(), hotset.cache(hotset.deterministic(Parts(N)), memory="10MiB") as stream:
        loader = hotset.DataLoader(stream, batch_size=8)
        first = values(loader)
        stream.set_epoch(1)
        assert values(loader) == first


class Marked(Numbers):
    """Its samples hold what is set on it."""

    mark = 0

    def __iter__(self) -> Iterator[Any]:
        yield from ((each[0], self.mark + number) for number, each in enumerate(super().__iter__()))


def test_a_stream_is_recorded_anew_after_what_it_holds_was_set_on_the_stream_itself() -> None:
    stream = Marked(N)
    with hotset.cache(stream, memory="10MiB") as cached:
        loader = hotset.DataLoader(cached, batch_size=8)
        for mark in (0, 0, 1000, 2000, 2000):
            told = pytest.warns(hotset.HotsetWarning, match=r"recorded anew: Marked\.mark has changed")
            with told if mark != stream.mark else contextlib.nullcontext():
                stream.mark = mark
                assert values(loader) == [mark + number for number in range(N)]
        assert cached.recorded


class Settable(Marked):
    """Has a method that sets what its samples hold, a transform, and epochs on which its order may depend."""

    def __init__(self) -> None:
        super().__init__(N)
        self.transform: Callable[[int], int] = abs

    def set_mark(self, mark: int) -> None:
        self.mark = mark

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        yield from ((picture, self.transform(number)) for picture, number in super().__iter__())


def test_what_a_method_sets_and_another_transform_count_on_a_stream_with_a_key() -> None:
    with hotset.cache(Settable(), memory="10MiB", key="numbers") as cached:
        loader = hotset.DataLoader(cached, batch_size=8)
        assert values(loader) == list(range(N))
        cached.set_mark(1000)
        assert values(loader) == [1000 + number for number in range(N)]
        cached.dataset.transform = operator.neg
        assert values(loader) == [-1000 - number for number in range(N)]
        assert cached.recorded


def test_what_was_set_before_an_epoch_is_announced_is_noticed() -> None:
    with recorded(), hotset.cache(Settable(), memory="10MiB") as cached:
        loader = hotset.DataLoader(cached, batch_size=8)
        assert values(loader) == list(range(N))
        cached.dataset.mark = 1000
        cached.set_epoch(1)
        assert values(loader) == [1000 + number for number in range(N)]


class Large(Marked):
    """Large samples, of which it counts those that it gives."""

    given = 0

    def __iter__(self) -> Iterator[Any]:
        for number, each in enumerate(share(self.count)):
            self.given += 1
            yield torch.full((4096,), float(number)), self.mark + each


@pytest.mark.parametrize("workers", [0, 2])
def test_what_is_set_on_a_stream_that_was_recorded_in_part_is_noticed(workers: int) -> None:
    stream = Large(N)
    with recorded(), hotset.cache(stream, memory="400KiB") as cached:
        loader = hotset.DataLoader(cached, batch_size=4, num_workers=workers)
        for mark, hits in ((0, False), (0, True), (1000, False), (1000, True), (1000, True)):
            stream.mark = mark
            assert sorted(values(loader)) == [mark + number for number in range(N)]
            assert bool(loader.last_epoch.hit_rate) is hits  # its own counter is no change
        assert not cached.recorded


@pytest.mark.parametrize("ends", [False, True])
def test_what_is_set_while_workers_record_a_stream_is_noticed(ends: bool) -> None:
    stream = Marked(N)
    with recorded(), hotset.cache(stream, memory="10MiB") as cached:
        loader = hotset.DataLoader(cached, batch_size=8, num_workers=1)
        batches = iter(loader)
        next(batches)
        stream.mark = 1000
        if ends:
            assert len(list(batches)) == len(range(8, N, 8))
        del batches
        for _ in range(2):
            assert values(loader) == [1000 + number for number in range(N)]
        assert loader.last_epoch.hit_rate == 1


def test_a_pass_over_recorded_samples_ends_with_an_error_once_an_attribute_was_set() -> None:
    with hotset.cache(Marked(N), memory="10MiB") as cached:
        loader = hotset.DataLoader(cached, batch_size=8)
        assert values(loader) == list(range(N))
        batches = iter(loader)
        next(batches)
        cached.mark = 1000
        assert "Marked was given another" in failure(lambda: list(batches)).text
        assert values(loader) == [1000 + number for number in range(N)]


@pytest.mark.parametrize("was_read", [False, True])
def test_persistent_workers_are_started_anew_once_an_attribute_was_set(was_read: bool) -> None:
    with hotset.cache(Marked(N), memory="10MiB") as cached:
        loader = hotset.DataLoader(cached, batch_size=8, num_workers=1, persistent_workers=True)
        loader.collate_fn = list  # also recorded samples are read by workers
        for _ in range(2 if was_read else 0):
            assert [number for batch in loader for _, number in batch] == list(range(N))
        next(iter(loader))
        cached.mark = 1000
        for _ in range(3):
            assert [number - 1000 for batch in loader for _, number in batch] == list(range(N))
        assert cached.recorded


def test_a_stream_is_not_recorded_anew_after_what_no_sample_depends_on_was_set() -> None:
    class Logged(Marked):
        """It counts its samples, and notes what nothing reads."""

        count_of_samples = 0

        def __iter__(self) -> Iterator[Any]:
            for each in super().__iter__():
                self.count_of_samples += 1
                yield each

    streams = [Logged(N), hotset.deterministic(Marked(N)), Marked(N)]
    for stream, key in zip(streams, (None, None, "numbers"), strict=True):
        with hotset.cache(stream, memory="10MiB", key=key) as cached:
            loader = hotset.DataLoader(cached, batch_size=8)
            for epoch in range(3):
                assert values(loader) == list(range(N))
                stream.note = epoch
                if not isinstance(stream, Logged):
                    stream.mark = epoch
            assert loader.last_epoch.hit_rate == 1


class Signed(Numbers):
    """Its two lists belong together."""

    def __init__(self) -> None:
        super().__init__(N)
        self.numbers, self.signs = list(range(N)), [1] * N
        self.transform: Any = None

    def __iter__(self) -> Iterator[Any]:
        for place, number in enumerate(self.numbers):
            value = torch.tensor(number * self.signs[place])
            yield value if self.transform is None else self.transform(value)


def test_attributes_of_a_stream_that_belong_together_may_be_set_one_after_the_other() -> None:
    def change(stream: Any) -> Iterator[None]:
        stream.signs = []
        stream.numbers = [3, 1, 2]
        stream.signs = [1, -1, 1]
        yield
        stream.transform = Draws()
        yield
        del stream.transform
        stream.transform = torch.neg
        yield

    plain = Signed()
    with recorded() as told, hotset.cache(Signed(), memory="1MiB") as cached:
        loaders = [hotset.DataLoader(stream, batch_size=2) for stream in (plain, cached)]
        for _ in zip(change(plain), change(cached), strict=True):
            for _ in range(2):
                seed_everything()
                expected = list(loaders[0])
                seed_everything()
                equal_batches(list(loaders[1]), expected)
        assert cached.recorded
    words = [str(each.message) for each in told if "samples come from the stream" in str(each.message)]
    assert [word.partition(" was set")[0] for word in words] == [
        *("Signed.signs", "Signed.transform", "Signed.transform"),
    ]


class Draws:
    def __call__(self, value: torch.Tensor) -> torch.Tensor:
        return value + torch.rand(())


def test_what_is_set_on_a_copy_of_a_stream_is_not_set_on_the_original() -> None:
    own = Marked(N)
    with recorded(), hotset.cache(own, memory="10MiB") as cached:
        other = copy.copy(cached)
        other.mark = 1000
        for stream, mark in ((cached, 0), (other, 1000)):
            assert values(hotset.DataLoader(stream, batch_size=8)) == [mark + number for number in range(N)]
        assert own.mark == 0
        other.close()


def test_cached_streams_are_chained_before_they_are_cached() -> None:
    cached: Any = hotset.cache(Numbers(N), memory="10MiB")
    with pytest.raises(TypeError, match=r"hotset\.cache\(first \+ second\)"):
        cached + Numbers(N)


def test_a_closed_stream_comes_as_it_is() -> None:
    stream = hotset.cache(Numbers(N), memory="10MiB")
    stream.fill()
    stream.close()
    loader = hotset.DataLoader(stream, batch_size=8, num_workers=2)
    for _ in range(2):
        assert sorted(values(loader)) == list(range(N))


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
class TestTooLittleRoom:
    @pytest.mark.parametrize("kind", [Shuffled, Reseeded])
    @pytest.mark.parametrize("workers", [0, 2])
    def test_all_samples_come_from_a_stream_whose_order_may_be_another(
        self, kind: type[Numbers], workers: int
    ) -> None:
        plain = DataLoader(kind(N, shape=(4096,)), batch_size=4, num_workers=workers)
        with recorded() as told, hotset.cache(kind(N, shape=(4096,)), memory="400KiB") as stream:
            loader = hotset.DataLoader(stream, batch_size=4, num_workers=workers)
            found = []
            for used, dataset in ((loader, stream), (plain, plain.dataset)):
                seed_everything()
                epochs = []
                for epoch in range(4):
                    if isinstance(plain.dataset, Reseeded):
                        dataset.set_epoch(epoch)  # type: ignore[attr-defined]
                    epochs.append((values(used), rng_states()))
                found.append(epochs)
            assert found[0] == found[1]
            assert sorted(found[0][3][0]) == list(range(N))
            for what in (lambda: len(stream), lambda: stream[0]):
                with pytest.raises(TypeError, match="more memory= or a spill="):
                    what()
            stream.fill()  # at once
        said = [str(one.message) for one in told if "recorded" in str(one.message)]
        assert len(said) == 1, said
        assert "all samples come from the stream" in said[0]
        assert is_a_sentence(said[0])

    @pytest.mark.parametrize("own", [False, True])
    def test_persistent_workers_draw_other_numbers_in_each_pass(self, own: bool) -> None:
        rng = np.random.default_rng(3)

        def draw(sample: Any) -> Any:
            return (*sample, rng.random() if own else float(torch.rand(())))

        with recorded(), hotset.cache(Numbers(N, shape=(4096,)), transform=draw, memory="400KiB") as stream:
            stream.fill(num_workers=2)
            loader = hotset.DataLoader(stream, batch_size=4, num_workers=2, persistent_workers=True)
            drawn: dict[int, list[float]] = {}
            for _ in range(3):
                for _, numbers, draws in loader:
                    for number, each in zip(numbers.tolist(), draws.tolist(), strict=True):
                        drawn.setdefault(number, []).append(each)
            assert not stream.recorded
        assert [len(set(each)) for each in drawn.values()] == [3] * N

    def test_recorded_samples_come_first_and_the_stream_gives_the_rest(self) -> None:
        stream = hotset.cache(Numbers(N, shape=(4096,)), memory="400KiB")
        loader = hotset.DataLoader(stream, batch_size=4, shuffle=True, num_workers=2)
        with recorded() as told:
            assert sorted(values(loader)) == list(range(N))
            epochs = [values(loader) for _ in range(2)]
        assert all(sorted(epoch) == list(range(N)) for epoch in epochs)
        assert epochs[0] != epochs[1]
        assert len(loader) == sum(1 for _ in loader)
        (said,) = [str(one.message) for one in told if "are recorded" in str(one.message)]
        assert "of 60 samples of Numbers are recorded" in said
        assert "memory=" in said
        assert not stream.recorded
        some = stream.stats().cached
        assert 0 < some < N
        with pytest.raises(TypeError, match="more memory= or a spill="):
            len(stream)
        stream.close()

    @pytest.mark.parametrize(("workers", "own"), [(0, False), (2, True)])
    def test_random_states_are_those_of_torchs_loader(self, workers: int, own: bool) -> None:
        with recorded():
            stream = hotset.cache(Numbers(N, shape=(4096,)), memory="400KiB")
        after = []
        for kind, dataset in ((DataLoader, Numbers(N)), (hotset.DataLoader, stream)):
            generator = torch.Generator().manual_seed(1) if own else None
            loader = kind(dataset, batch_size=4, num_workers=workers, generator=generator)
            seed_everything()
            states = []
            for _ in range(3):
                quiet(loader)
                states.append((rng_states(), generator and generator.get_state().tolist()))
            after.append(states)
        assert 0 < stream.stats().cached < N
        assert after[0] == after[1]
        stream.close()

    @pytest.mark.parametrize(
        ("recorded_by", "read_by"),
        rarely([(0, 2), (2, 0), (2, 3), (3, 2), (0, 1), (2, 2)], (3, 2), (0, 1), (2, 2)),
    )
    def test_the_rest_is_divided_as_it_was_when_the_others_were_recorded(
        self, recorded_by: int, read_by: int
    ) -> None:
        stream = hotset.cache(Numbers(N, shape=(4096,)), memory="400KiB")
        quiet(hotset.DataLoader(stream, batch_size=4, num_workers=recorded_by))
        loader = hotset.DataLoader(stream, batch_size=4, shuffle=True, num_workers=read_by)
        with recorded() as told:
            for _ in range(2):
                assert sorted(values(loader)) == list(range(N))
                assert loader.last_epoch is not None
                assert loader.last_epoch.samples == N
                assert loader.last_epoch.hit_rate == pytest.approx(stream.stats().cached / N)
            assert len(loader) == sum(1 for _ in loader)
        said = [str(one.message) for one in told if "as many read the rest" in str(one.message)]
        assert len(said) == (1 if max(recorded_by, read_by) > 1 and recorded_by != read_by else 0)
        stream.close()

    @pytest.mark.parametrize(
        ("way", "workers"),
        rarely(
            itertools.product(
                [{"transform": [jitter]}, {"collate_fn": as_they_are}, {"batch_size": None}], [0, 2]
            ),
            ({"collate_fn": as_they_are}, 2),
            ({"batch_size": None}, 2),
        ),
    )
    def test_batches_that_are_not_gathered_have_all_samples(self, way: dict[str, Any], workers: int) -> None:
        transform = way.get("transform", [])
        stream = hotset.cache(Numbers(N, shape=(4096,)), transform=transform, memory="400KiB")
        arguments = {"batch_size": 4, **way}
        arguments.pop("transform", None)
        loader = hotset.DataLoader(stream, num_workers=workers, **arguments)
        for _ in range(3):
            assert sorted(quiet_values(loader)) == list(range(N))
        assert 0 < stream.stats().cached < N
        stream.close()

    def test_spill_takes_what_memory_has_no_room_for(self, tmp_path: Path) -> None:
        stream = hotset.cache(Numbers(N, shape=(4096,)), memory="400KiB", spill=tmp_path / "spill")
        loader = hotset.DataLoader(stream, batch_size=4, shuffle=True, num_workers=2)
        quiet(loader)
        assert stream.recorded
        assert stream.stats().spilled > 0
        assert sorted(values(loader)) == list(range(N))
        assert stream.check() == []
        stream.close()

    @pytest.mark.parametrize("consumed", [2, 13])
    def test_a_state_resumes_in_either_part(self, consumed: int) -> None:
        stream = hotset.cache(Numbers(N, shape=(4096,)), memory="400KiB")
        loader = hotset.DataLoader(stream, batch_size=4, shuffle=True)
        quiet(loader)
        with recorded():
            batches = iter(loader)
            before = [number for _ in range(consumed) for number in next(batches)[1].tolist()]
            state = loader.state_dict()
            rest = values(batches)
            other = hotset.DataLoader(stream, batch_size=4, shuffle=True)
            other.load_state_dict(state)
            assert values(other) == rest
        assert sorted(before + rest) == list(range(N))
        stream.close()

    @pytest.mark.parametrize(("first", "consumed", "then"), [(2, 8, 16), (4, 5, 6), (16, 1, 4), (4, 3, 2)])
    def test_a_state_resumes_with_another_batch_size(self, first: int, consumed: int, then: int) -> None:
        stream = hotset.cache(Numbers(N, shape=(4096,)), memory="400KiB")
        loader = hotset.DataLoader(stream, batch_size=first)
        quiet(loader)
        with recorded():
            batches = iter(loader)
            before = [number for _ in range(consumed) for number in next(batches)[1].tolist()]
            other = hotset.DataLoader(stream, batch_size=then)
            other.load_state_dict(loader.state_dict())
            rest = iter(other)
            before += next(rest)[1].tolist()
            again = hotset.DataLoader(stream, batch_size=then)
            again.load_state_dict(other.state_dict())
            assert before + values(again) == before + values(rest) == list(range(N))
        stream.close()

    def test_a_rest_that_cannot_be_begun_at_once_is_not_lost(self, monkeypatch: pytest.MonkeyPatch) -> None:
        stream = hotset.cache(Numbers(N, shape=(4096,)), memory="400KiB")
        loader = hotset.DataLoader(stream, batch_size=4, num_workers=2, collate_fn=as_they_are)
        quiet(loader)
        fork, refused = os.fork, []

        def fails_once() -> int:
            if not refused:
                refused.append(True)
                raise BlockingIOError("no more processes")
            return fork()

        with recorded():
            batches = iter(loader)
            found, failed = [], 0
            monkeypatch.setattr(os, "fork", fails_once)
            while True:
                try:
                    found += [number for _, number in next(batches)]
                except BlockingIOError:
                    failed += 1
                except StopIteration:
                    break
        assert failed == 1
        assert sorted(found) == list(range(N))
        stream.close()

    def test_the_end_of_a_pass_resumes_with_its_batch_size_only(self) -> None:
        stream = hotset.cache(Numbers(N, shape=(4096,)), memory="400KiB")
        loader = hotset.DataLoader(stream, batch_size=4)
        quiet(loader)
        with recorded():
            batches = iter(loader)
            for _ in range(13):
                next(batches)
            state = loader.state_dict()
            said = failure(lambda: hotset.DataLoader(stream, batch_size=8).load_state_dict(state))
        assert said is not None
        assert said.kind is hotset.StateError
        assert "batch_size must be 4" in said.text
        assert is_a_sentence(said.text)
        stream.close()


class TestOtherSamples:
    def test_another_number_of_workers_records_anew(self) -> None:
        with hotset.cache(Numbers(N), memory="10MiB") as stream:
            for _ in zip(range(3), hotset.DataLoader(stream, batch_size=4, num_workers=2), strict=False):
                pass
            with pytest.warns(hotset.HotsetWarning, match="2 workers divided it before, and now"):
                assert values(hotset.DataLoader(stream, batch_size=4)) == list(range(N))
            assert len(stream) == N
            assert sorted(number for _, number in stream) == list(range(N))

    def test_a_stream_that_is_shuffled_anew_is_found_out(self) -> None:
        with recorded() as told:
            stream = hotset.cache(Shuffled(N), memory="10MiB")
            loader = hotset.DataLoader(stream, batch_size=4)
            for _ in zip(range(5), loader, strict=False):
                pass
            assert sorted(values(loader)) == list(range(N))
        assert stream.recorded, "it began anew at once"
        assert sorted(number for _, number in stream) == list(range(N))
        (said,) = [str(one.message) for one in told if "recorded anew" in str(one.message)]
        assert "the pass before was broken off, and it is shuffled anew in each" in said
        assert is_a_sentence(said)
        stream.close()

    def test_a_pass_with_other_samples_than_were_recorded_is_found_out(self) -> None:
        """Two runs of it are alike, as long as the epoch is; one that was broken off is gone on with."""
        with hotset.cache(Reseeded(N), memory="10MiB") as stream:
            loader = hotset.DataLoader(stream, batch_size=4)
            for _ in zip(range(5), loader, strict=False):
                pass
            stream.set_epoch(1)
            with recorded() as told:
                epochs = [values(loader) for _ in range(3)]
            assert [sorted(epoch) for epoch in epochs] == [list(range(N))] * 3
            assert epochs[0] == [number for _, number in stream.dataset]
            (said,) = [str(one.message) for one in told if "recorded anew" in str(one.message)]
            assert "it gave other samples than in the pass before" in said
            assert is_a_sentence(said)
            assert stream.recorded

    @pytest.mark.parametrize("place", [2, 128])
    def test_a_sample_that_is_another_than_was_recorded_is_found_out(
        self, place: int, tmp_path: Path
    ) -> None:
        class OneOfAFile(Numbers):
            def __iter__(self) -> Iterator[Any]:
                other = (tmp_path / "other").exists()
                for number in share(self.count):
                    yield torch.zeros(4), number + 1000 * (other and number == place)

        with recorded() as told, hotset.cache(OneOfAFile(200), memory="10MiB") as stream:
            loader = hotset.DataLoader(stream, batch_size=4)
            for _ in zip(range(40), loader, strict=False):
                pass
            (tmp_path / "other").touch()
            epochs = [values(loader) for _ in range(3)]
            assert all(epoch[place] == 1000 + place for epoch in epochs)
            assert ["it gave other samples" in str(one.message) for one in told] == [True]

    def test_random_content_is_refused(self) -> None:
        for stream in (Jitter(), Own(), Jitter(every=2)):
            with pytest.raises(
                hotset.NotCacheable, match=r"move random transforms out of the stream|Move random"
            ):
                hotset.cache(stream, memory="1MiB")

    def test_random_content_under_the_same_names_is_refused_in_any_order(self) -> None:
        class Named(Shuffled):
            runs = 0

            def __iter__(self) -> Iterator[Any]:
                self.runs += 1
                for _, number in super().__iter__():
                    yield {"key": f"picture {number}", "picture": number if number % 2 else self.runs * N}

        with pytest.raises(hotset.NotCacheable, match="samples with the same key differed"):
            hotset.cache(Named(), memory="1MiB")

    def test_what_is_declared_nondeterministic_is_refused(self) -> None:
        with pytest.raises(hotset.NotCacheable, match="is declared @hotset"):
            hotset.cache(hotset.nondeterministic(Numbers()), memory="1MiB")

    @pytest.mark.parametrize("kind", [int, np.int64, np.float32, np.datetime64])
    def test_random_content_is_refused_whatever_the_samples_are(self, kind: Any) -> None:
        class Timed(Numbers):
            count = itertools.count()

            def __iter__(self) -> Iterator[Any]:
                for _ in range(20):
                    number = next(Timed.count)
                    yield kind(number, "D") if kind is np.datetime64 else kind(number)

        with pytest.raises(hotset.NotCacheable, match="none occurred in a second run"):
            hotset.cache(Timed(), memory="1MiB")

    def test_a_refused_stream_is_read_no_further_than_one_comparison_takes(self) -> None:
        runs: list[int] = []

        class Counted(Jitter):
            def __iter__(self) -> Iterator[Any]:
                runs.append(0)
                yield from super().__iter__()

        with pytest.raises(hotset.NotCacheable):
            hotset.cache(Counted(), memory="1MiB")
        assert len(runs) == 2

    def test_random_content_that_is_declared_harmless_is_taken(self) -> None:
        stream = hotset.cache(hotset.deterministic(Jitter()), memory="1MiB")
        first = quiet(hotset.DataLoader(stream, batch_size=4))
        assert len(stream) == N
        equal_batches(quiet(hotset.DataLoader(stream, batch_size=4)), first)
        stream.close()

    @pytest.mark.parametrize(("count", "pause"), [(N, 0.0), (300, 0.0), (150, 0.005)])
    def test_what_a_run_draws_from_a_seed_is_recorded(
        self, count: int, pause: float, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Whether the look at it ends with the stream, after its most samples, or after its time."""
        monkeypatch.setattr(Seeded, "pause", pause)
        with hotset.cache(Seeded(count), memory="10MiB") as stream:
            monkeypatch.setattr(Seeded, "pause", 0.0)
            stream.fill()
            assert stream.recorded

    @pytest.mark.parametrize("size", [8, 7], ids=["last of its batch", "first of its batch"])
    def test_rare_draws_are_not_frozen(self, size: int) -> None:
        stream = hotset.cache(Jitter(every=400, count=800), memory="10MiB")
        loader = hotset.DataLoader(stream, batch_size=size)
        with recorded() as told:
            epochs = [quiet(loader) for _ in range(3)]
        assert all(sorted(values(epoch)) == list(range(800)) for epoch in epochs)
        drawn = [
            dict(zip(values(epoch), [p for ps, _ in epoch for p in ps], strict=True))[399] for epoch in epochs
        ]
        assert not torch.equal(drawn[0], drawn[1])
        assert not torch.equal(drawn[1], drawn[2])
        assert any("drew random numbers" in str(one.message) for one in told) or not stream.recorded
        stream.close()

    @pytest.mark.parametrize("workers", rarely([0, 2], 2))
    @pytest.mark.parametrize("kind", ["numpy", "random", "torch", "secrets", "made anew"])
    def test_rare_draws_of_a_runs_own_are_not_frozen(self, kind: str, workers: int) -> None:
        stream = hotset.cache(Rarely(kind), memory="10MiB")
        loader = hotset.DataLoader(stream, batch_size=8, num_workers=workers)
        with recorded() as told:
            epochs = [list(loader) for _ in range(3)]
        drawn = [
            dict(zip(values(epoch), [float(p[0]) for ps, _ in epoch for p in ps], strict=True))
            for epoch in epochs
        ]
        assert all(sorted(epoch) == list(range(800)) for epoch in drawn)
        assert len({epoch[399] for epoch in drawn}) == 3
        assert any("drew random numbers" in str(one.message) for one in told)
        stream.close()

    def test_a_runs_own_generator_with_a_seed_keeps_nothing_out(self) -> None:
        with hotset.cache(Rarely("seeded"), memory="10MiB") as stream:
            first = list(hotset.DataLoader(stream, batch_size=8))
            assert stream.recorded
            equal_batches(list(hotset.DataLoader(stream, batch_size=8)), first)

    def test_samples_that_change_once_the_next_is_asked_for_are_stored_as_they_were(self) -> None:
        expected = [[picture.tolist(), number] for picture, number in Emptied()]
        with hotset.cache(Emptied(), memory="1MiB") as stream:
            loader = hotset.DataLoader(stream, batch_size=None)
            epochs = [[[picture.tolist(), number] for picture, number in loader] for _ in range(2)]
            assert epochs == [expected] * 2
            assert stream.stats().bytes == N * stream.plan.sample_bytes, "the plan saw them as they were"

    def test_a_second_run_that_is_slower_is_no_other_order(self) -> None:
        with recorded() as told, hotset.cache(Slower(N), memory="10MiB") as stream:
            assert "began with the same" in str(stream.plan)
        assert not told

    def test_what_can_be_read_only_once_is_refused_and_said_to_be(self) -> None:
        with pytest.raises(hotset.NotCacheable, match="can be read only once") as raised:
            hotset.cache(ReadOnce(), memory="1MiB")
        assert is_a_sentence(str(raised.value))
        assert not getattr(raised.value, "__notes__", [])  # nothing about indices, which a stream has not

    @pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning")
    def test_torchs_data_pipes_are_refused(self) -> None:
        from torch.utils.data.datapipes.iter import IterableWrapper

        with pytest.raises(hotset.NotCacheable, match="data pipe") as raised:
            hotset.cache(IterableWrapper(range(20)), memory="1MiB")
        assert is_a_sentence(str(raised.value))

    def test_a_shuffle_of_more_than_can_be_compared_is_warned_of(self) -> None:
        with pytest.warns(
            hotset.HotsetWarning, match="in another order in each run, so hotset cannot tell"
        ) as told:
            stream = hotset.cache(Shuffled(5000), memory="10MiB")
        assert is_a_sentence(str(told[0].message))
        stream.close()

    def test_a_stream_is_as_it_was_once_it_was_looked_at(self) -> None:
        stream = Noting(N)
        with hotset.cache(stream, memory="10MiB"):
            assert stream.given == []

    def test_a_shuffled_stream_is_taken_with_its_first_order(self) -> None:
        with hotset.cache(Shuffled(N), memory="10MiB") as stream:
            first = values(hotset.DataLoader(stream, batch_size=4))
            assert sorted(first) == list(range(N))
            assert first != sorted(first)
            with pytest.warns(hotset.HotsetWarning, match="shuffle=True"):
                assert values(hotset.DataLoader(stream, batch_size=4)) == first
            assert "another order" in str(stream.plan)


class TestWrongInput:
    @pytest.mark.parametrize("kind", [DataLoader, hotset.DataLoader])
    def test_a_loader_is_not_taken_for_a_dataset(self, kind: type[DataLoader[Any]]) -> None:
        for loader in (kind(range(8), batch_size=2), kind(Numbers(N), batch_size=2)):  # type: ignore[arg-type]
            said = failure(lambda loader=loader: hotset.cache(loader))
            assert said.kind is hotset.ArgumentError
            assert "got a DataLoader; cache its dataset" in said.text

    @pytest.mark.parametrize("one", [Numbers(3), [1, 2, 3]])
    def test_several_datasets_by_name(self, one: Any) -> None:
        with pytest.raises(
            hotset.ArgumentError, match=r"one dataset, got dict with 'train', 'test'; .*\['train'\]"
        ):
            hotset.cache({"train": one, "test": one}, memory="1MiB")

    def test_nothing(self) -> None:
        with pytest.raises(hotset.ArgumentError, match="must give at least one sample, got none"):
            hotset.cache(Nothing(), memory="1MiB")

    def test_an_iterator_that_ends_for_good(self) -> None:
        with pytest.raises(
            hotset.ArgumentError, match="must be an iterable that can be run again, got generator"
        ):
            hotset.cache((number for number in range(3)), memory="1MiB")

    @pytest.mark.parametrize(
        "arguments",
        [{"window": hotset.Window(resident=8)}, {"concurrency": 4}, {"transform": hotset.batched(abs)}],
    )
    def test_what_does_not_go_with_a_stream(self, arguments: dict[str, Any]) -> None:
        said = failure(lambda: hotset.cache(Numbers(N), memory="1MiB", **arguments))
        assert said.kind is hotset.ArgumentError
        assert "call fill()" in said.text or "cached.fill()" in said.text

    def test_an_endless_stream_is_said_to_be_one(self) -> None:
        with hotset.cache(Endless(), memory="1MiB") as stream:
            loader = hotset.DataLoader(stream, batch_size=4)
            with recorded() as told:
                for _ in range(4):
                    assert [batch.tolist() for batch in itertools.islice(loader, 2)] == [
                        [0, 1, 2, 3],
                        [4, 5, 6, 7],
                    ]
            (said,) = [str(one.message) for one in told]
            assert "if the stream is endless, bound it" in said

    def test_batches_in_place_of_samples(self) -> None:
        with hotset.cache(Batches(), memory="1MiB") as stream:
            loader = hotset.DataLoader(stream, batch_size=None)
            expected = list(DataLoader(Batches(), batch_size=None))
            equal_batches(list(loader), expected)
            equal_batches(list(loader), expected)
            with pytest.warns(hotset.HotsetWarning, match="batch_size=None"):
                list(hotset.DataLoader(stream, batch_size=2))

    @pytest.mark.parametrize("shape", [(4,), (4, 3)], ids=["tokens", "trajectories"])
    def test_sequences_of_one_length_are_no_batches(self, shape: tuple[int, ...]) -> None:
        class Windows(IterableDataset[Any]):
            def __iter__(self) -> Iterator[Any]:
                for first in range(8):
                    yield torch.full(shape, float(first)), torch.arange(first, first + 4)

        with hotset.cache(Windows(), memory="1MiB") as stream, recorded() as told:
            assert len(list(hotset.DataLoader(stream, batch_size=2))) == 4
        assert not told

    def test_workers_that_all_read_the_same(self) -> None:
        with hotset.cache(Undivided(12), memory="1MiB") as stream:
            loader = hotset.DataLoader(stream, batch_size=4, num_workers=2)
            with pytest.warns(hotset.HotsetWarning, match="gives the same samples to 2 workers"):
                assert sorted(values(loader)) == sorted([*range(12), *range(12)])

    def test_length_and_index_before_the_first_pass(self) -> None:
        with hotset.cache(Numbers(N), memory="1MiB") as stream:
            order = hotset.DataLoader(
                stream, shuffle=True
            ).sampler  # as libraries that rebuild loaders pass it on
            for ask in (
                lambda: len(stream),
                lambda: stream[0],
                lambda: list(DataLoader(stream)),
                lambda: list(DataLoader(stream, sampler=order)),
            ):
                said = failure(ask)
                assert said.kind is TypeError
                assert "call fill()" in said.text

    def test_shuffle_says_once_that_the_first_pass_has_the_streams_order(self) -> None:
        with hotset.cache(Numbers(N), memory="1MiB") as stream:
            loader = hotset.DataLoader(stream, batch_size=8, shuffle=True)
            with recorded() as told:
                assert values(loader) == list(range(N))
                assert values(loader) != list(range(N))
            (said,) = [str(one.message) for one in told]
            assert "shuffle=True holds from the second on" in said

    def test_a_sampler_holds_from_the_second_pass_on_and_a_batch_sampler_needs_an_index(self) -> None:
        with hotset.cache(Numbers(N), memory="10MiB") as stream:
            batches = BatchSampler(SequentialSampler(range(10)), 5, drop_last=False)
            with pytest.raises(hotset.ArgumentError, match="batch_sampler= must be left out for the first"):
                list(hotset.DataLoader(stream, batch_sampler=batches))
            loader = hotset.DataLoader(stream, batch_size=4, sampler=SequentialSampler(range(10)))
            with pytest.warns(hotset.HotsetWarning, match="sampler= holds from the second on"):
                assert values(loader) == list(range(N))
            assert values(loader) == list(range(10))
            assert values(hotset.DataLoader(stream, batch_sampler=batches)) == list(range(10))

    def test_a_stream_is_true_and_takes_no_slices(self) -> None:
        with hotset.cache(Numbers(N), memory="10MiB") as stream:
            assert stream
            stream.fill()
            with pytest.raises(TypeError, match="slice"):
                stream[1:3]

    def test_a_fill_counts_what_it_reads(self, capsys: pytest.CaptureFixture[str]) -> None:
        with hotset.cache(Numbers(N), memory="10MiB") as stream:
            stream.fill(progress=True)
        assert f"{N}/?" in capsys.readouterr().err

    def test_no_number_of_workers(self) -> None:
        with hotset.cache(Numbers(N), memory="1MiB") as stream, pytest.raises(hotset.ArgumentError):
            stream.fill(num_workers=-1)


class TestKills:
    @pytest.mark.parametrize("workers", [0, 2])
    @pytest.mark.parametrize("phase", ["first", "later"])
    def test_a_killed_reader_leaves_a_stream_that_is_read_on(self, workers: int, phase: str) -> None:
        with hotset.cache(Numbers(N), memory="10MiB") as stream:
            if phase == "later":
                stream.fill(num_workers=workers)

            def die() -> None:
                loader = hotset.DataLoader(stream, batch_size=4, num_workers=workers)
                for number, _ in enumerate(loader):
                    if number == 4:
                        os.kill(os.getpid(), signal.SIGKILL)

            assert ended(child(die)) == -signal.SIGKILL
            assert stream.check() == []
            loader = hotset.DataLoader(stream, batch_size=4, num_workers=workers)
            assert sorted(values(loader)) == list(range(N))
            assert sorted(values(loader)) == list(range(N))
            assert stream.recorded

    def test_the_pass_after_one_whose_worker_was_killed_goes_on(self) -> None:
        class Suicide(Numbers):
            armed = True

            def __iter__(self) -> Iterator[Any]:
                for number, sample in enumerate(super().__iter__()):
                    info = get_worker_info()
                    if number == 10 and self.armed and info is not None and info.id == 0:
                        os.kill(os.getpid(), signal.SIGKILL)
                    yield sample

        stream = Suicide(N)
        with hotset.cache(stream, memory="10MiB", key="suicide") as cached:

            def fail() -> None:
                code = 7
                try:
                    list(hotset.DataLoader(cached, batch_size=4, num_workers=2))
                    code = 0
                finally:  # torch raises whenever a child ends, while it raises as well: not beyond this line
                    os._exit(code)

            assert ended(child(fail)) == 7
            stream.armed = False
            assert cached.stats().cached > 0
            assert sorted(values(hotset.DataLoader(cached, batch_size=4, num_workers=2))) == list(range(N))
            assert len(cached) == N

    def test_a_pass_whose_workers_linger_gives_way_to_the_next(self) -> None:
        """As where a traceback refers to a loader's iterator, in a notebook."""
        with hotset.cache(Numbers(N), memory="10MiB") as stream:
            loader = hotset.DataLoader(stream, batch_size=4, num_workers=2)
            broken_off = iter(loader)
            next(broken_off)
            assert sorted(values(loader)) == list(range(N))
            assert stream.recorded
            del broken_off


@pytest.mark.parametrize("step", ["own", "note", "stop", "use", "end"])
def test_an_interrupt_leaves_no_lock_taken(step: str) -> None:
    with opened(float, N) as store, attached(store) as other:
        parts = StreamParts(store)
        assert parts.divide(1, 1)
        number, generation = parts.new_pass(), store.clear_generation()
        assert generation is not None
        part = StreamPart(store, 0, number)
        assert part.own(generation)
        counts = itertools.count()
        steps: dict[str, Callable[[], object]] = {
            "own": lambda: part.own(generation),
            "note": lambda: part.note(3),
            "stop": lambda: part.stop(NO_ROOM),
            "use": lambda: parts.use(next(counts)),
            "end": lambda: part.end(3),
        }
        for _ in interrupted_everywhere(steps[step]):
            with other.participant.short_lock() as held:
                assert held


@pytest.mark.parametrize(("before", "now"), [(0, 0), (2, 0), (0, 2), (2, 2)])
@pytest.mark.filterwarnings("ignore:.*(are recorded|divided Numbers)")
def test_a_pass_over_a_stream_recorded_in_part_leaves_the_random_states_of_torchs_loader(
    before: int, now: int
) -> None:
    with hotset.cache(Numbers(N, shape=(4096,)), memory="400KiB") as stream:
        values(hotset.DataLoader(stream, batch_size=5, num_workers=before))
        _, expected = once(Numbers(N), now, 5)
        seed_everything()
        assert sorted(values(hotset.DataLoader(stream, batch_size=5, num_workers=now))) == list(range(N))
        assert rng_states() == expected


def test_draws_of_the_program_stay_as_they_are() -> None:
    """Caching a stream, and its first pass, draw nothing from the program's generators."""
    seed_everything()
    before = rng_states(), random.getstate()
    with hotset.cache(Numbers(N), memory="1MiB") as stream:
        stream.fill(num_workers=2)
        assert (rng_states(), random.getstate()) == before


@pytest.mark.parametrize(
    ("after", "workers", "end"),
    rarely(itertools.product([0, 4], [0, 2], ["clear", "close"]), (0, 2, "close"), (4, 2, "clear")),
)
def test_no_sample_comes_twice_if_a_part_of_a_stream_is_dropped_in_mid_pass(
    workers: int, end: str, after: int
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what did not fit, and then was lost
        cached = hotset.cache(Numbers(60, shape=(4096,)), memory="400KiB")
        loader = hotset.DataLoader(cached, batch_size=5, num_workers=workers)
        first = values(loader)
        assert 20 < cached.stats().cached < 60
        found: list[int] = []
        for number, batch in enumerate(loader):
            if number == after:
                getattr(cached, end)()
            found += values([batch])
        assert sorted(found) == list(range(60))
        assert values(loader) == first
        cached.close()


def test_a_pass_is_not_recorded_while_another_process_records_with_other_workers() -> None:
    begun, over = os.pipe(), os.pipe()
    with hotset.cache(Numbers(N), memory="1MiB") as stream:

        def record() -> None:
            batches = iter(hotset.DataLoader(stream, batch_size=5))
            next(batches)
            os.write(begun[1], b"x")
            os.read(over[0], 1)
            list(batches)

        other = child(record)
        assert os.read(begun[0], 1)
        loader = hotset.DataLoader(stream, batch_size=5, num_workers=2)
        with pytest.warns(hotset.HotsetWarning, match="Numbers is being recorded by other processes"):
            assert sorted(values(loader)) == list(range(N))
        assert not stream.recorded
        os.write(over[1], b"x")
        assert ended(other) == 0
        assert stream.recorded
        assert [number for _, number in stream] == list(range(N))


class Shrinks(Numbers):
    """Gives fewer numbers once it is told to, although they are recorded."""

    most = 60

    def __iter__(self) -> Iterator[Any]:
        return itertools.islice(super().__iter__(), type(self).most)


def test_a_lost_sample_that_its_stream_does_not_give_again_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stream = hotset.cache(Shrinks(N), memory="1MiB")
    stream.fill()
    batches = iter(hotset.DataLoader(stream, batch_size=2))
    assert values([next(batches)]) == [0, 1]
    stream.close()
    monkeypatch.setattr(Shrinks, "most", 5)
    with pytest.warns(hotset.HotsetWarning, match="a recorded sample of Shrinks is no longer in the cache"):
        assert values([next(batches)]) == [2, 3]
    with pytest.raises(hotset.NotCacheable, match="Shrinks ended before its sample number 5"):
        next(batches)


class AtOnce(Numbers):
    """Divides its samples as a run is begun, and not as the first sample is asked for."""

    def __iter__(self) -> Iterator[Any]:
        return iter([(torch.full(self.shape, float(number)), number) for number in share(self.count)])


@pytest.mark.parametrize("kind", [Numbers, AtOnce])
@pytest.mark.parametrize(("recorders", "readers"), [(2, 0), (0, 2), (2, 1)])
def test_a_lost_sample_is_that_of_the_worker_that_recorded_it(
    kind: type[Numbers], recorders: int, readers: int
) -> None:
    with hotset.cache(kind(N), memory="1MiB") as stream:
        stream.fill(num_workers=recorders)
        (wanted, _), loader = once(stream), hotset.DataLoader(stream, batch_size=8, num_workers=readers)
        store_of(stream).segment.index[5:9] = 0
        with recorded():  # it says that the stream is run up to them
            assert values(loader) == values(wanted)


@pytest.mark.parametrize("end", ["clear", "close", "set"])
def test_a_pass_over_a_recorded_stream_goes_on_when_the_cache_goes(end: str) -> None:
    with hotset.cache(Numbers(N), memory="1MiB") as stream:
        stream.fill()
        samples = iter(stream)
        found = [next(samples)[1] for _ in range(5)]
        if end == "set":
            stream.shape = (2,)
        else:
            getattr(stream, end)()
        with pytest.warns(
            hotset.HotsetWarning, match="a recorded sample of Numbers is no longer in the cache"
        ):
            found += [number for _, number in samples]
        assert found == list(range(N))


class OfOneFile(IterableDataset[Any]):
    """Its first worker gives all samples, as of a stream of a single shard."""

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        numbers = range(0 if info is not None and info.id else 4500)
        return ((torch.full((1250,), float(number)), number) for number in numbers)


def test_one_worker_of_several_may_give_all_samples_that_fit() -> None:
    with hotset.cache(OfOneFile(), memory="24MiB") as stream, recorded() as told:
        stream.fill(num_workers=4)
        assert stream.recorded, told
        assert len(stream) == 4500


def test_a_disk_whose_index_memory_has_no_room_for_is_used_as_far_as_it_has(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    disk = shutil.disk_usage(tmp_path)._replace(free=100 << 40)
    monkeypatch.setattr("hotset.dataset.planning.stream_plan.shutil.disk_usage", lambda path: disk)
    with hotset.cache(Numbers(2000, shape=(250,)), memory="1MiB", spill=tmp_path) as stream:
        stream.fill()
        assert stream.recorded
        assert stream.stats().spilled > 0


class Around(IterableDataset[Any]):
    """Gives what another stream gives."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def __iter__(self) -> Iterator[Any]:
        yield from self.stream


@pytest.mark.parametrize("is_recorded", [False, True])
def test_a_dataset_over_a_cached_stream_gives_each_worker_what_it_would_give_without_a_cache(
    is_recorded: bool,
) -> None:
    wanted = values(once(Numbers(), 2)[0])
    with hotset.cache(Numbers(), memory="1MiB") as cached:
        if is_recorded:
            cached.fill()
        why = failure(lambda: list(DataLoader(Around(cached), num_workers=2)))
        assert why.kind is hotset.HotsetWarning
        assert "is run by another dataset in the workers" in why.text
        with recorded():
            for _ in range(2):
                assert values(once(Around(cached), 2)[0]) == wanted
        assert cached.recorded == is_recorded
        assert sorted(values(hotset.DataLoader(cached, batch_size=8, num_workers=2))) == list(range(N))
        assert cached.check() == []


def test_a_dataset_over_a_cached_stream_in_one_worker_records_it() -> None:
    with hotset.cache(Numbers(), memory="1MiB") as cached:
        for _ in range(2):
            assert values(once(Around(cached), 1)[0]) == list(range(N))
            assert cached.recorded


class Each(IterableDataset[Any]):
    """Gives what a function makes of each of 20 numbers."""

    def __init__(self, make: Callable[[int], Any]) -> None:
        self.make = make

    def __iter__(self) -> Iterator[Any]:
        return map(self.make, range(20))


def test_a_stream_of_what_cannot_be_copied_deeply_is_recorded_as_far_as_that_goes() -> None:
    weight = torch.ones(2, requires_grad=True)
    for make in (lambda number: weight * number, lambda number: (number, threading.Lock())):
        with recorded():
            stream = hotset.cache(Each(make), memory="1MiB")
            assert len(list(stream)) == 20


def test_planning_a_stream_copies_of_a_view_its_own_elements() -> None:
    table = torch.zeros(1000, 2)
    samples = probe_stream(Each(table.__getitem__), "Each", "deterministic").samples
    assert [sample.untyped_storage().nbytes() for sample in samples] == [8] * len(samples)


def test_a_stream_of_read_only_arrays_takes_the_room_of_arrays() -> None:
    stream = hotset.cache(Each(lambda number: np.frombuffer(bytes([number] * 8), np.uint8)), memory="1MiB")
    for _ in range(2):
        assert not any(sample.flags.writeable for sample in stream)
    assert stream.stats().bytes < 20 * 64
