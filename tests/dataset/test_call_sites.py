"""A dataset that rarely calls its chain again, or goes on when it raises, does so with the cache, too.

Its chain is refused or cached whole, though nothing of that happens while a few samples are read. Datasets
that call their chains in other loops and blocks are cut, and give what they give without a cache.
"""

from __future__ import annotations

import contextlib
import functools
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from helpers import equal_batches, failure, is_a_sentence, rng_states, seed_everything
from torch.utils.data import Dataset, Subset

import hotset

N = 12


def brighten(picture: torch.Tensor) -> torch.Tensor:
    return picture + 1000


def shift(picture: torch.Tensor) -> torch.Tensor:
    return picture + random.randrange(1, 100)


def is_empty(picture: torch.Tensor) -> bool:
    """Of no picture here."""
    return bool(picture[0] < 0)


class Own(Dataset[Any]):
    """Its chain is one callable."""

    def __init__(self, chain: Any = None) -> None:
        self.transform = shift if chain is None else chain
        self.two = False

    def __len__(self) -> int:
        return N

    def picture(self, index: int) -> torch.Tensor:
        return torch.full((2,), range(N)[index])

    def crop(self, index: int) -> Any:
        return self.transform(self.picture(index))


# ---- what is not cut -------------------------------------------------------------------------------------


class CropsUntilThereIsSome(Own):
    def __getitem__(self, index: int) -> Any:
        crop = self.transform(self.picture(index))
        while is_empty(crop):
            crop = self.transform(self.picture(index))
        return crop


class CropsForEver(Own):
    def __getitem__(self, index: int) -> Any:
        while True:
            crop = self.transform(self.picture(index))
            if not is_empty(crop):
                return crop


class CropsAFewTimes(Own):
    def __getitem__(self, index: int) -> Any:
        for _ in range(10):
            crop = self.transform(self.picture(index))
            if not is_empty(crop):
                break
        return crop


class CropsByAMethod(Own):
    def __getitem__(self, index: int) -> Any:
        crop = self.crop(index)
        while is_empty(crop):
            crop = self.crop(index)
        return crop


class CropsTwice(Own):
    def until_there_is_some(self, index: int) -> Any:
        while is_empty(crop := self.crop(index)):
            pass
        return crop

    def __getitem__(self, index: int) -> Any:
        return [self.until_there_is_some(index) for _ in range(2)]


class CropsOnceMore(Own):
    def __getitem__(self, index: int) -> Any:
        crop = self.transform(self.picture(index))
        if is_empty(crop):
            crop = self.transform(self.picture(index))
        return crop


class CropsOnceMoreByAMethod(Own):
    def __getitem__(self, index: int) -> Any:
        if self.two or not is_empty(crop := self.crop(index)):
            return crop
        return self.crop(index + 1)


class CropsOnceMoreIntoItself(Own):
    def __getitem__(self, index: int) -> Any:
        self.last = self.transform(self.picture(index))
        return self.transform(self.picture(index)) if is_empty(self.last) else self.last


class TakesAnother(Own):
    def __getitem__(self, index: int) -> Any:
        crop = self.transform(self.picture(index))
        if is_empty(crop):
            other = random.randrange(len(self))
            return self[other]
        return crop


class CropsOrCropsAgain(Own):
    def __getitem__(self, index: int) -> Any:
        return sorted([self.transform(self.picture(index))]) or sorted([self.transform(self.picture(index))])


class TakesTheNext(Own):
    def __getitem__(self, index: int) -> Any:
        crop = self.transform(self.picture(index))
        return self.__getitem__(index + 1) if is_empty(crop) else crop


class TriesAgain(Own):
    def __getitem__(self, index: int) -> Any:
        for _ in range(10):
            try:
                return self.transform(self.picture(index))
            except ValueError:
                continue
        raise RuntimeError("no crop")


class TakesAnotherIfItRaises(Own):
    def __getitem__(self, index: int) -> Any:
        try:
            with torch.no_grad():
                crop = self.crop(index)
        except ValueError as error:
            print(error)
            return self[0]
        return crop


class TriesAgainAroundAll(Own):
    def __getitem__(self, index: int) -> Any:
        try:
            try:
                return self.transform(self.picture(index))
            except ValueError as error:
                raise RuntimeError("no crop") from error
        except RuntimeError:
            return self.picture(index)


class GoesOnQuietly(Own):
    def __getitem__(self, index: int) -> Any:
        crop = self.picture(index)
        with contextlib.suppress(ValueError):
            crop = self.crop(index)
        return crop


def retried(read: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(read)
    def until_it_works(*arguments: Any) -> Any:
        while True:
            with contextlib.suppress(ValueError):
                found = read(*arguments)
                if found is not None:
                    return found

    return until_it_works


class IsDecorated(Own):
    @retried
    def __getitem__(self, index: int) -> Any:
        return self.transform(self.picture(index))


AGAIN = [CropsUntilThereIsSome, CropsForEver, CropsAFewTimes, CropsByAMethod, CropsTwice, TakesAnother]
AGAIN += [CropsOnceMore, CropsOnceMoreByAMethod, CropsOnceMoreIntoItself, TakesTheNext, CropsOrCropsAgain]
ON = [TriesAgain, TakesAnotherIfItRaises, TriesAgainAroundAll, GoesOnQuietly, IsDecorated]


@pytest.mark.parametrize("kind", [*AGAIN, *ON])
def test_a_chain_whose_result_may_rarely_change_what_the_dataset_does_is_not_cut(kind: type[Own]) -> None:
    dataset = kind()
    held, states = dict(vars(dataset)), rng_states()
    found = failure(lambda: hotset.cache(dataset, memory="1MiB"))
    assert found.kind is hotset.NotCacheable
    does = "goes on if its transform raises" if kind in ON else "may call its transform again after a look at"
    assert f"{kind.__name__} {does}" in found.text
    assert ", line " in found.text
    assert is_a_sentence(found.text)
    assert vars(dataset) == held
    assert rng_states() == states


@pytest.mark.parametrize("kind", [CropsUntilThereIsSome, TriesAgain, TakesAnother])
def test_it_is_cached_whole_if_it_is_deterministic_or_declared(kind: type[Own]) -> None:
    whole = kind(brighten)
    for dataset in (whole, Subset(whole, range(N)), hotset.deterministic(kind())):
        with hotset.cache(dataset, memory="1MiB") as cached:
            assert all(row.cached for row in cached.plan.rows)
            assert len([cached[index] for index in range(N)]) == N
            assert cached.stats().cached == N


def test_a_cut_inside_it_is_refused() -> None:
    dataset = TriesAgain(brighten)
    with pytest.raises(hotset.ArgumentError, match="cut=0 is not possible"):
        hotset.cache(dataset, memory="1MiB", cut=0)


def test_the_loop_is_kept_where_it_is_given_with_the_chain() -> None:
    def shifted(picture: torch.Tensor) -> torch.Tensor:
        while is_empty(found := shift(picture)):
            pass
        return found

    equal_to_uncached(Pictures(), [brighten, shifted])


class Pictures(Own):
    def __init__(self) -> None:
        super().__init__()
        del self.transform

    def __getitem__(self, index: int) -> Any:
        return self.picture(index)


# ---- what is cut -----------------------------------------------------------------------------------------


class Once(Own):
    def __getitem__(self, index: int) -> Any:
        crop = self.transform(self.picture(index))
        if self.two:
            return crop, self.picture(0)
        return crop


class TwoViews(Own):
    def __getitem__(self, index: int) -> Any:
        picture = self.picture(index)
        crop = self.transform(picture)
        assert crop.ndim == 1
        if self.two and picture is not None:
            return crop, self.transform(self.picture(index))
        return crop


class MasksToo(Own):
    def __getitem__(self, index: int) -> Any:
        mask = self.picture(0) if self.two else None
        crop = self.transform(self.picture(index))
        if mask is not None:
            mask = self.transform(mask)
        return crop, index


class ReadsQuietly(Own):
    def __getitem__(self, index: int) -> Any:
        with contextlib.suppress(OSError):
            picture = self.picture(index)
        return self.transform(picture)


class ForEach(Own):
    views = 2

    def __getitem__(self, index: int) -> Any:
        crops = []
        for _ in range(self.views):
            crops.append(self.crop(index))
        return crops


class ForOne(ForEach):
    views = 1


class Comprehends(Own):
    def __getitem__(self, index: int) -> Any:
        return {str(n): self.transform(self.picture(index) + n) for n in range(3) if n != 1}


class Generates(Own):
    def crops(self, index: int) -> Iterator[Any]:
        for _ in range(2):
            with contextlib.nullcontext():
                yield self.crop(index)

    def __getitem__(self, index: int) -> Any:
        return list(self.crops(index))


class Maps(Own):
    def __getitem__(self, index: int) -> Any:
        return list(map(self.transform, [self.picture(index), self.picture(0)]))


class ReadsUntilItCan(Own):
    def __getitem__(self, index: int) -> Any:
        for other in (index, 0):
            try:
                picture = self.picture(other)
                break
            except OSError:
                continue
        return self.transform(picture)


class ReadsAnother(Own):
    def __getitem__(self, index: int) -> Any:
        try:
            picture = self.picture(index)
        except OSError:
            return self[0]
        return self.transform(picture)


class Ends(Own):
    def __getitem__(self, index: int) -> Any:
        try:
            return self.crop(index)
        finally:
            self.picture(index)


class SaysMore(Own):
    def __getitem__(self, index: int) -> Any:
        try:
            crop = self.crop(index)
        except ValueError as error:
            if self.two:
                raise
            raise RuntimeError(f"sample {index} is bad") from error
        return crop


class Locks(Own):
    def __getitem__(self, index: int) -> Any:
        with torch.autograd.profiler.record_function("crop"), contextlib.ExitStack():
            return self.crop(index)


class IsAList(Own):
    def __init__(self) -> None:
        super().__init__([brighten, shift])

    def __getitem__(self, index: int) -> Any:
        picture = self.picture(index)
        for step in self.transform:
            picture = step(picture)
        return picture


class FindsIt(Own):
    def __getitem__(self, index: int) -> Any:
        for other in range(N):
            if other == index:
                return self.transform(self.picture(other))
        raise IndexError(index)


CUT = [Once, ForEach, ForOne, Comprehends, Generates, Maps, ReadsUntilItCan, ReadsAnother, Ends, SaysMore]
CUT += [Locks, IsAList, FindsIt, TwoViews, MasksToo, ReadsQuietly]


@pytest.mark.parametrize("kind", CUT)
def test_other_loops_and_blocks_leave_a_chain_cut(kind: type[Own]) -> None:
    equal_to_uncached(kind())


def test_code_without_its_source_is_read_as_well() -> None:
    names: dict[str, Any] = {"Own": Own, "is_empty": is_empty}
    exec(
        "class Made(Own):\n"
        "    def __getitem__(self, index):\n"
        "        while is_empty(crop := self.crop(index)): pass\n"
        "        return crop\n",
        names,
    )
    with pytest.raises(
        hotset.NotCacheable, match=r"Made may call its transform again .*\(__getitem__, line 3\)"
    ):
        hotset.cache(names["Made"](), memory="1MiB")


def equal_to_uncached(dataset: Any, transform: Any = None) -> None:
    def epochs(source: Any, *steps: Callable[[Any], Any]) -> list[Any]:
        def one(index: int) -> Any:
            return functools.reduce(lambda value, step: step(value), steps, source[index])

        seed_everything(5)
        return [([one(index) for index in range(N)], rng_states()) for _ in range(2)]

    expected = epochs(dataset, *(transform or ()))
    with hotset.cache(dataset, transform=transform, memory="1MiB") as cached:
        assert [row.cached for row in cached.plan.rows][-2:] == [True, False]
        equal_batches(epochs(cached), expected)
        assert cached.stats().hits == N
