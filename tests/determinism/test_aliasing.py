"""The user's data does not change: the source keeps every byte, whatever changes samples in place.

Each program has transforms that change their input. Without a cache the first epoch is right, and changes the
source. With a cache both epochs equal that first epoch, and the source does not change.
"""

from __future__ import annotations

import copy
import warnings
import weakref
from collections import UserDict
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from helpers import all_pairs, recorded
from PIL import Image
from torch.utils.data import Dataset

import hotset
from hotset.dataset import audit
from hotset.determinism.aliasing import copied
from hotset.determinism.equality import differs

N = 12
# Without room is one of the cases.
pytestmark = pytest.mark.filterwarnings("ignore:.*memory limit is reached:hotset.HotsetWarning")


def halve(sample: Any) -> Any:
    sample["x"] /= 2
    return sample


def ignored(sample: Any) -> None:
    halve(sample)


def forget_path(sample: Any) -> Any:
    sample.pop("path")
    return sample


def shift(sample: Any) -> Any:
    sample["x"] += 1
    return sample


class Noise:
    """A random, and so live, transform that works in place."""

    def __call__(self, sample: Any) -> Any:
        sample["x"] += torch.rand(()).item()
        return sample


def rows(make: Callable[[int], Any]) -> Any:
    return [{"x": make(i), "path": f"file-{i}", "label": i} for i in range(N)]


MAKES: dict[str, Callable[[int], Any]] = {
    "tensors": lambda i: torch.arange(4, dtype=torch.float32) + 10 * i,
    "arrays": lambda i: np.arange(4, dtype=np.float64) + 10 * i,
    "numbers": lambda i: 10.0 * i,
}


class OwnChain(Dataset[Any]):
    def __init__(self, items: Any, transform: Any) -> None:
        self.items = items
        self.transform = transform

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Any:
        return self.transform(self.items[index])


class Rows(Dataset[Any]):
    """Views of one tensor or array."""

    def __init__(self, data: Any) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        return self.data[index]


def first_epoch(dataset: Any, chain: Any = (), workers: int = 0) -> list[Any]:
    """The first epoch of torch's loader, over a copy of the dataset."""
    torch.manual_seed(7)
    dataset = copy.deepcopy(dataset)
    samples = []
    for index in range(len(dataset)):
        sample = dataset[index]
        for step in chain:
            sample = step(sample)
        samples.append(copy.deepcopy(sample))
    return samples


def epochs(cached: Any, workers: int) -> list[list[Any]]:
    loader = hotset.DataLoader(cached, batch_size=5, num_workers=workers, collate_fn=list)
    return [[sample for batch in loader for sample in batch] for _ in range(2)]


def assert_all_same(found: list[Any], expected: list[Any]) -> None:
    assert len(found) >= N - 2  # a window's residents
    for one, other in zip(found, expected, strict=False):
        assert differs(one, other) is None, differs(one, other)


ROOM: dict[str, dict[str, Any]] = {
    "room": {"memory": "1MiB"},
    "no-room": {"memory": 0},
    "window": {"memory": "1MiB", "window": hotset.Window(resident=N - 2, replace=0, shuffle=False)},
}


@pytest.mark.parametrize(("kind", "workers", "room"), all_pairs(MAKES, [0, 2], ROOM))
def test_in_place_transforms_do_not_change_a_list_of_dicts(kind: str, workers: int, room: str) -> None:
    items = rows(MAKES[kind])
    before = copy.deepcopy(items)
    chain = [halve, forget_path, shift]
    expected = first_epoch(items, chain)
    with hotset.cache(items, transform=chain, **ROOM[room]) as cached:
        for samples in epochs(cached, workers):
            assert_all_same(samples, expected)
    assert_all_same(items, before)


@pytest.mark.parametrize("room", ROOM)
@pytest.mark.parametrize("workers", [0, 2])
def test_a_datasets_own_in_place_transform_does_not_change_it(workers: int, room: str) -> None:
    items = rows(MAKES["tensors"])
    before = copy.deepcopy(items)
    dataset = OwnChain(items, lambda sample: shift(forget_path(halve(sample))))
    expected = first_epoch(dataset)
    with hotset.cache(dataset, **ROOM[room]) as cached:
        for samples in epochs(cached, workers):
            assert_all_same(samples, expected)
    assert_all_same(items, before)


@pytest.mark.parametrize("room", ["room", "no-room"])
@pytest.mark.parametrize("own", [False, True])
def test_in_place_live_transforms_do_not_change_the_source(own: bool, room: str) -> None:
    items = rows(MAKES["tensors"])
    before = copy.deepcopy(items)
    chain: list[Callable[[Any], Any]] = [halve, Noise()]
    dataset: Any = OwnList(items, chain) if own else items
    with hotset.cache(dataset, transform=None if own else chain, **ROOM[room]) as cached:
        assert "Noise" in cached.plan.live
        for _ in range(2):
            for index, sample in enumerate(cached[i] for i in range(N)):
                drawn = sample["x"] - before[index]["x"] / 2
                assert 0 <= float(drawn.min()) <= float(drawn.max()) <= 1
    assert_all_same(items, before)


class OwnList(OwnChain):
    def __getitem__(self, index: int) -> Any:
        sample = self.items[index]
        for step in self.transform:
            sample = step(sample)
        return sample


@pytest.mark.parametrize(
    ("kind", "workers", "room"), all_pairs(["tensor", "array", "memmap", "from numpy"], [0, 2], ROOM)
)
def test_views_of_the_users_memory_are_copied_before_a_transform(
    kind: str, workers: int, room: str, tmp_path: Path
) -> None:
    data: Any = torch.arange(N * 3, dtype=torch.float32).view(N, 3)
    if kind == "array":
        data = data.numpy()
    if kind == "memmap":
        np.save(tmp_path / "rows.npy", data.numpy())
        data = np.asarray(np.load(tmp_path / "rows.npy", mmap_mode="r+"))
    if kind == "from numpy":
        data = torch.from_numpy(data.numpy().copy())
    before = copy.deepcopy(np.asarray(data))

    def normalise(row: Any) -> Any:
        row -= 1
        row *= 2
        return row

    expected = [normalise(copy.deepcopy(row)) for row in data]
    with hotset.cache(Rows(data), transform=normalise, **ROOM[room]) as cached:
        for samples in epochs(cached, workers):
            for found, wanted in zip(samples, expected, strict=False):
                assert np.array_equal(np.asarray(found), np.asarray(wanted))
    assert np.array_equal(np.asarray(data), before)
    if kind == "memmap":
        assert np.array_equal(np.load(tmp_path / "rows.npy"), before)


def test_a_tensor_over_a_storage_that_the_dataset_holds_is_copied_before_a_transform() -> None:
    class OfStorages(Dataset[Any]):
        def __init__(self) -> None:
            self.storages = [torch.full((3,), float(index)).untyped_storage() for index in range(N)]

        def __len__(self) -> int:
            return N

        def __getitem__(self, index: int) -> Any:
            return torch.empty(0).set_(self.storages[index])  # type: ignore[call-overload]

    dataset = OfStorages()
    with hotset.cache(dataset, transform=lambda row: row.add_(1), memory="1MiB") as cached:
        for _ in range(2):
            assert [row.tolist() for row in cached] == [[index + 1.0] * 3 for index in range(N)]
    assert [dataset[index].tolist() for index in range(N)] == [[float(index)] * 3 for index in range(N)]


def test_pictures_that_the_dataset_holds_are_copied_before_a_transform() -> None:
    pictures: Any = [Image.new("L", (4, 4), i) for i in range(N)]
    before = [picture.tobytes() for picture in pictures]

    def paint(picture: Any) -> Any:
        picture.paste(255, (0, 0, 2, 2))
        picture.putpixel((3, 3), picture.getpixel((3, 3)) + 1)
        return picture

    expected = [paint(picture.copy()).tobytes() for picture in pictures]
    for dataset, chain in ((pictures, paint), (OwnChain(pictures, paint), None)):
        with hotset.cache(dataset, transform=chain, memory="1MiB") as cached:
            for _ in range(2):
                assert [cached[i].tobytes() for i in range(N)] == expected
        assert [picture.tobytes() for picture in pictures] == before


@pytest.mark.parametrize("mode", ["P", "PA"])
@pytest.mark.parametrize("colours", ["RGB", "RGBA", None])
def test_pictures_that_the_dataset_holds_keep_their_colours(mode: str, colours: str | None) -> None:
    """Pillow's own deep copy has a palette of RGB, so that what was transparent became opaque."""
    pictures = [Image.new(mode, (2, 2), i) for i in range(N)]
    for picture in pictures:
        if colours is not None:
            picture.putpalette(bytes(range(12 * len(colours))), colours)

    def opacities(picture: Any) -> Any:
        return np.asarray(picture.convert("RGBA"))

    with hotset.cache(pictures, transform=opacities, memory="1MiB") as cached:
        for _ in range(2):
            for i in range(N):
                assert differs(cached[i], opacities(pictures[i])) is None
    held = SimpleNamespace(picture=pictures[3])
    for made in (copied(pictures[3]), copied(held).picture):
        assert made is not pictures[3]
        assert (made.palette.mode, made.getpalette()) == (held.picture.palette.mode, pictures[3].getpalette())


class OneBuffer(Dataset[Any]):
    """Reads each picture into the memory of the last one, which Pillow's picture shares."""

    def __init__(self) -> None:
        self.buffer = np.zeros((4, 4), np.uint8)

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> Any:
        self.buffer[:] = index
        return Image.fromarray(self.buffer)


def test_pictures_that_share_the_memory_of_an_array_are_copied() -> None:
    with hotset.cache(OneBuffer(), memory="1MiB") as cached:
        batch = next(iter(hotset.DataLoader(cached, batch_size=N, collate_fn=list)))
        assert [picture.getpixel((0, 0)) for picture in batch] == list(range(N))


class Signal(np.ndarray[Any, Any]):
    """An array to which a program gives attributes, without ``__array_finalize__``."""

    rate: int
    channels: list[str]


class _Signals(Dataset[Any]):
    def __init__(self) -> None:
        self.table = np.zeros((4, 3))

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        signal = self.table[index].view(Signal)
        signal.rate, signal.channels = index, ["left"]
        return {"nested": [signal]}


@hotset.nondeterministic
def _as_it_is(sample: Any) -> Any:
    return sample


@pytest.mark.parametrize("workers", [0, 2])
def test_the_copy_of_an_array_has_what_a_program_has_set_on_it(workers: int) -> None:
    signals = _Signals()
    with recorded(), hotset.cache(signals, transform=_as_it_is, memory="1MiB") as cached:
        loader = hotset.DataLoader(cached, batch_size=2, num_workers=workers, collate_fn=_first_signals)
        for _ in range(2):
            assert list(loader) == [[(0, ["left"]), (1, ["left"])], [(2, ["left"]), (3, ["left"])]]
        cached[0]["nested"][0][:] = 1
    assert not signals.table.any()


def _first_signals(samples: list[Any]) -> list[Any]:
    return [(sample["nested"][0].rate, sample["nested"][0].channels) for sample in samples]


def test_changing_a_returned_sample_does_not_change_the_source() -> None:
    items = rows(MAKES["arrays"])
    before = copy.deepcopy(items)
    for memory in ("1MiB", 0):
        with hotset.cache(items, memory=memory) as cached:
            for _ in range(2):
                for i in range(N):
                    halve(cached[i])
    assert_all_same(items, before)


def test_an_element_of_a_transforms_own_table_is_copied() -> None:
    table = {i: torch.full((3,), float(i)) for i in range(N)}
    numbers: Any = range(N)

    def look_up(index: int) -> torch.Tensor:
        return table[index]

    def double(row: torch.Tensor) -> torch.Tensor:
        return row.mul_(2)

    for memory in ("1MiB", 0):
        with hotset.cache(numbers, transform=[look_up, double], memory=memory) as cached:
            for _ in range(2):
                assert [float(cached[i][0]) for i in range(N)] == [2.0 * i for i in range(N)]
    assert [float(row[0]) for row in table.values()] == list(range(N))


def test_a_dataset_that_keeps_only_some_of_its_samples_has_those_copied() -> None:
    class Keeps(Dataset[Any]):
        """Keeps samples of odd index once they were read."""

        def __init__(self) -> None:
            self.kept: dict[int, Any] = {}

        def __len__(self) -> int:
            return 40

        def __getitem__(self, index: int) -> Any:
            if index in self.kept:
                return self.kept[index]
            sample = torch.full((3,), float(index))
            if index % 2:
                self.kept[index] = sample
            return sample

    dataset = Keeps()
    with hotset.cache(dataset, transform=lambda x: x.mul_(2), memory=0) as cached:
        for _ in range(3):
            assert [float(cached[i][0]) for i in range(40)] == [2.0 * i for i in range(40)]
    assert all(float(sample[0]) == index for index, sample in dataset.kept.items())


class WorksOn(Dataset[Any]):
    """Works in place on the output of its transform."""

    def __init__(self, data: torch.Tensor, transform: Any) -> None:
        self.data = data
        self.transform = transform

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        row = self.transform(self.data[index])
        row /= 10
        return row


def test_a_dataset_that_works_in_place_on_its_transforms_output_is_not_changed() -> None:
    data = torch.arange(N * 3, dtype=torch.float32).view(N, 3)
    before = data.clone()
    with hotset.cache(WorksOn(data, torch.nn.ReLU()), memory="1MiB") as cached:
        for _ in range(2):
            assert all(torch.equal(cached[i], before[i] / 10) for i in range(N))
    assert torch.equal(data, before)


def test_an_in_place_chain_over_new_samples_gives_right_samples() -> None:
    class Ignores(Dataset[Any]):
        """Makes each sample anew, and ignores what its transform returns."""

        def __init__(self) -> None:
            self.transform = ignored

        def __len__(self) -> int:
            return N

        def __getitem__(self, index: int) -> Any:
            sample = {"x": torch.full((3,), float(index))}
            self.transform(sample)
            return sample

    with hotset.cache(Ignores(), memory="1MiB") as cached:
        for _ in range(2):
            assert [float(cached[i]["x"][0]) for i in range(N)] == [i / 2 for i in range(N)]


def test_an_in_place_chain_whose_result_is_ignored_is_refused_before_it_changes_the_data() -> None:
    class Ignores(OwnChain):
        def __getitem__(self, index: int) -> Any:
            sample = self.items[index]
            self.transform(sample)
            return sample

    items = rows(MAKES["tensors"])
    before = copy.deepcopy(items)
    with pytest.raises(hotset.NotCacheable, match="changes in place what the dataset holds"):
        hotset.cache(Ignores(items, halve), memory="1MiB")
    assert_all_same(items, before)


class HalvesByName(Dataset[Any]):
    """Calls a chain that works in place with a keyword, on tensors over numpy's memory."""

    def __init__(self, keep: str) -> None:
        self.transform = lambda x: x.div_(2)
        self.items = [np.full(3, float(index), "f4") for index in range(N)]
        self.kept: dict[int, Any] = {}
        self.keep = keep

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> Any:
        array = self.items[index] if self.keep == "all" else self.items[index].copy()
        if self.keep == "read":
            array = self.kept.setdefault(index, array)
        return self.transform(x=torch.from_numpy(array))


def test_an_in_place_chain_over_new_arrays_that_is_called_with_keywords_is_cached() -> None:
    dataset = HalvesByName(keep="")
    with hotset.cache(dataset, memory="1MiB") as cached:
        for _ in range(2):
            assert [float(cached[i][0]) for i in range(N)] == [i / 2 for i in range(N)]
    assert [float(item[0]) for item in dataset.items] == list(range(N))


@pytest.mark.parametrize("keep", ["all", "read"])
def test_an_in_place_chain_over_arrays_that_the_dataset_keeps_is_refused(keep: str) -> None:
    dataset = HalvesByName(keep)
    with pytest.raises(hotset.NotCacheable, match="changes in place what the dataset holds"):
        hotset.cache(dataset, memory="1MiB")
    assert [float(item[0]) for item in dataset.items] == list(range(N))
    assert not dataset.kept


def test_an_in_place_chain_over_a_file_that_is_mapped_at_each_reading_is_refused(tmp_path: Path) -> None:
    class Mapped(HalvesByName):
        def __getitem__(self, index: int) -> Any:
            rows = np.memmap(tmp_path / "rows", "f4", "r+", shape=(N, 3))
            return self.transform(x=torch.from_numpy(rows[index]))

    dataset = Mapped(keep="")
    np.stack(dataset.items).tofile(tmp_path / "rows")
    before = (tmp_path / "rows").read_bytes()
    with pytest.raises(hotset.NotCacheable, match="changes in place what the dataset holds"):
        hotset.cache(dataset, memory="1MiB")
    assert (tmp_path / "rows").read_bytes() == before


def test_a_value_that_cannot_be_copied_gives_a_warning(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_text("text")

    def without_file(sample: Any) -> Any:
        sample["x"] *= 2
        return {"x": sample["x"], "name": sample["file"].name}

    with path.open("rb") as file:
        items: Any = [{"x": torch.full((2,), float(i)), "file": file} for i in range(N)]
        with pytest.warns(hotset.HotsetWarning, match="hold a BufferedReader, which cannot be copied"):
            cached = hotset.cache(items, transform=without_file, memory="1MiB")
        with cached:
            assert [float(cached[i]["x"][0]) for i in range(N)] == [2.0 * i for i in range(N)]
        assert [float(item["x"][0]) for item in items] == list(range(N))


class Clips(Dataset[Any]):
    """Its transform changes what it stores only once: the first reading of a sample is unlike all others."""

    def __init__(self) -> None:
        self.items = [torch.full((3,), index - 5.0) for index in range(40)]
        self.transform = lambda item: item.clamp_(0.0, 1.0)

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Any:
        before = self.items[index].clone()
        return self.transform(self.items[index]) + 1, before


def test_a_chain_that_changes_what_the_dataset_stores_to_what_it_stays_is_refused() -> None:
    dataset = Clips()
    with pytest.raises(hotset.NotCacheable, match="changes in place what the dataset holds"):
        hotset.cache(dataset, memory="1MiB")
    assert [int(item[0]) for item in dataset.items] == list(range(-5, 35))


class HalvesItsOwn(Dataset[Any]):
    """Works in place on what it stores, each time that it reads one of ``which``."""

    def __init__(self, make: Callable[[int], Any], which: set[int]) -> None:
        self.items = [{"x": make(index)} for index in range(40)]
        self.which = which

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Any:
        if index in self.which:
            self.items[index]["x"] /= 2
        return self.items[index]


HALVED: dict[str, Callable[[int], Any]] = {
    "array": lambda i: np.full(3, i + 1.0),
    "tensor": lambda i: torch.full((3,), i + 1.0),
    "number": lambda i: i + 1.0,
}


@pytest.mark.parametrize("kind", HALVED)
@pytest.mark.parametrize("which", [set(range(40)), {0}], ids=["all", "one"])
def test_a_dataset_that_works_in_place_on_what_it_stores_is_refused_with_the_reason(
    kind: str, which: set[int]
) -> None:
    with pytest.raises(hotset.NotCacheable, match="__getitem__ changes in place what the dataset holds"):
        hotset.cache(HalvesItsOwn(HALVED[kind], which), memory="1MiB")


def test_a_dataset_that_works_in_place_is_refused_though_nothing_of_it_can_be_stored() -> None:
    dataset = HalvesItsOwn(HALVED["tensor"], set(range(40)))
    for item in dataset.items:
        item["other"] = object
    with pytest.raises(hotset.NotCacheable, match="__getitem__ changes in place what the dataset holds"):
        hotset.cache(dataset, memory="1MiB")


@pytest.mark.parametrize("kind", HALVED)
def test_where_few_samples_are_changed_in_place_all_epochs_equal_the_first_until_the_audit_says_so(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = HalvesItsOwn(HALVED[kind], {18, 19})
    first = [copy.deepcopy(expected[index]) for index in range(40)]
    with hotset.cache(HalvesItsOwn(HALVED[kind], {18, 19}), memory="1MiB") as cached:
        for _ in range(2):
            assert_all_same([cached[index] for index in range(40)], first)
    monkeypatch.setattr(audit, "_SHARE", 1e9)  # each hit
    monkeypatch.setattr("hotset.dataset.audit_budget._KEPT_SECONDS", 1e9)
    with hotset.cache(HalvesItsOwn(HALVED[kind], {18, 19}), memory="1MiB") as cached, recorded() as told:
        assert_all_same([cached[index] for index in range(40)], first)
        assert differs(cached[18], first[18]) is not None  # from the dataset, which has changed it
    [sentence] = [str(one.message) for one in told]
    assert "sample 18 differs from what was cached" in sentence


def test_a_dataset_that_returns_one_buffer_with_other_content_is_not_said_to_work_in_place() -> None:
    class Random(Dataset[Any]):
        buffer = np.zeros(3)

        def __len__(self) -> int:
            return 40

        def __getitem__(self, index: int) -> Any:
            self.buffer[:] = np.random.rand(3)
            return self.buffer

    with pytest.raises(hotset.NotCacheable, match="returns another sample each time"):
        hotset.cache(Random(), memory="1MiB")


class Tagged(torch.Tensor):
    """A tensor of a user's class, of which torch's own deep copy raises."""


def test_tensors_of_a_users_class_are_copied_before_a_transform() -> None:
    held = [torch.full((2,), float(index)).as_subclass(Tagged) for index in range(4)]
    with warnings.catch_warnings():
        warnings.simplefilter("error", hotset.HotsetWarning)
        with hotset.cache(held, memory="1MiB", transform=[lambda value: value.add_(1)]) as cached:
            found = [cached[index] for _ in range(2) for index in range(4)]
    assert [type(value) for value in found] == [Tagged] * 8
    assert [value.tolist() for value in found] == [[index + 1.0] * 2 for index in range(4)] * 2
    assert [value.tolist() for value in held] == [[float(index)] * 2 for index in range(4)]


class Member:
    """It can be in a set, and change."""

    def __init__(self, values: list[int]) -> None:
        self.values = values


class _Around(Dataset[Any]):
    """Makes a new object for each sample, which refers to what the dataset holds."""

    def __init__(self, make: Callable[[Member], Any]) -> None:
        self.make = make
        self.held = [Member([index]) for index in range(4)]

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        return self.make(self.held[index])


def _with_values(value: Any, member: Member) -> Any:
    value.values = member.values
    return value


AROUND: dict[str, Callable[[Member], Any]] = {
    "tensor": lambda member: _with_values(torch.zeros(2), member),
    "picture": lambda member: _with_values(Image.new("L", (2, 2)), member),
    "set": lambda member: {member},
    "frozenset": lambda member: frozenset({member}),
}


def _appended(sample: Any) -> list[int]:
    (one,) = sample if isinstance(sample, (set, frozenset)) else (sample,)
    one.values.append(7)
    return list(one.values)


@pytest.mark.parametrize("around", AROUND)
def test_what_a_new_sample_refers_to_is_copied_before_a_transform(around: str) -> None:
    dataset = _Around(AROUND[around])
    with hotset.cache(dataset, memory="1MiB", transform=[_appended], key=around) as cached:
        for _ in range(2):
            assert [cached[index] for index in range(4)] == [[index, 7] for index in range(4)]
    assert [member.values for member in dataset.held] == [[index] for index in range(4)]


class Encoding(UserDict[str, Any]):
    """As transformers' BatchEncoding, which leaves a part of itself out of what pickle keeps."""

    def __init__(self, data: dict[str, Any], sequences: list[int]) -> None:
        super().__init__(data)
        self.sequences = sequences
        self.first = weakref.ref(self)

    def __getstate__(self) -> dict[str, Any]:
        return {"data": self.data}


def _says_its_sequences(encoding: Encoding) -> list[int]:
    encoding.sequences.append(encoding["ids"][0])
    return encoding.sequences


def test_the_copy_of_an_object_has_what_its_class_leaves_out_of_a_pickle() -> None:
    held = [Encoding({"ids": [index]}, [7]) for index in range(4)]
    with hotset.cache(held, memory="1MiB", transform=[_says_its_sequences]) as cached:
        assert [cached[index] for _ in range(2) for index in range(4)] == [[7, 0], [7, 1], [7, 2], [7, 3]] * 2
    assert [each.sequences for each in held] == [[7]] * 4
    assert not hasattr(copied(held[0]), "first")
