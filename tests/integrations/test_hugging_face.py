"""Datasets of Hugging Face: rows, formats, what selects rows, and transforms that run on batches."""

from __future__ import annotations

import io
import itertools
import pickle
import random
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import rarely
from kills import in_child
from observed import compare, record
from PIL import Image

import hotset
from hotset.determinism.fingerprint.fingerprint import fingerprint
from hotset.session import sessions

datasets = pytest.importorskip("datasets")
try:
    datasets.Dataset.from_dict({"x": [0]})
except pickle.PicklingError:
    pytest.skip("dill pickles packages that lie outside of site-packages by value", allow_module_level=True)
datasets.disable_progress_bars()
# Its bars would start a thread that stays.
pytest.importorskip("tqdm").tqdm.monitor_interval = 0

# Its classes cannot be named in annotations where it may be missing.
HF = Any

N = 22
BATCHES = {"batch_size": 4, "shuffle": True}


def rows(seed: int = 0, count: int = N) -> HF:
    drawn = np.random.default_rng(seed)
    return datasets.Dataset.from_dict(
        {
            "ids": drawn.integers(0, 1000, (count, 5)).tolist(),
            "weight": drawn.random(count).tolist(),
            "label": list(range(count)),
        }
    )


def with_text() -> HF:
    return rows().add_column("text", [f"row {i}" * (i % 3) for i in range(N)])


def nested() -> HF:
    return datasets.Dataset.from_dict({"answers": [{"start": [i, i + 1], "text": str(i)} for i in range(N)]})


def on_disk(folder: Path, made: HF) -> HF:
    made.save_to_disk(str(folder))
    return datasets.load_from_disk(str(folder))


def scaled(batch: dict[str, list[Any]], by: float) -> dict[str, Any]:
    return {"ids": [torch.tensor(ids) * by for ids in batch["ids"]], "label": batch["label"]}


KINDS: dict[str, Callable[[], HF]] = {
    "rows": rows,
    "text": with_text,
    "nested": nested,
    "torch": lambda: rows().with_format("torch"),
    "numpy": lambda: rows().with_format("numpy"),
    "torch, some columns": lambda: rows().with_format("torch", columns=["ids"]),
    "torch, others as well": lambda: rows().with_format("torch", columns=["ids"], output_all_columns=True),
    "select": lambda: rows().select([5, 3, 3, 11, 0, 20]),
    "a range": lambda: rows().select(range(3, 17)),
    "shuffle": lambda: rows().shuffle(seed=3).with_format("torch"),
    "concatenated": lambda: datasets.concatenate_datasets([rows(), rows(1).shuffle(seed=0)]),
    "mapped": lambda: rows().map(lambda row: {"double": row["label"] * 2}),
}


def check_equal(make: Callable[[], HF], workers: int, **options: Any) -> None:
    """Epochs of a cached dataset equal torch's over the same dataset, draws included."""
    options = {**BATCHES, "num_workers": workers, **options}
    expected = record(lambda: torch.utils.data.DataLoader(make(), **options))
    with hotset.cache(make(), memory="64MiB") as cached:
        compare(record(lambda: hotset.DataLoader(cached, **options)), expected)
        assert cached.stats().cached > 0


@pytest.mark.parametrize(
    ("kind", "workers"),
    rarely([*((kind, 0) for kind in KINDS), ("rows", 2), ("torch", 2), ("numpy", 2)], ("numpy", 2)),
)
def test_rows_are_those_that_torch_gives(kind: str, workers: int) -> None:
    collate = list if kind in ("nested", "text", "rows") else torch.utils.data.default_collate
    check_equal(KINDS[kind], workers, collate_fn=collate)


@pytest.mark.parametrize("audited", [False, True])
@pytest.mark.parametrize("wrap", [lambda made: made, lambda made: torch.utils.data.Subset(made, range(N))])
def test_a_row_that_is_read_alone_is_as_in_a_batch(
    wrap: Any, audited: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In numpy's format its floats are others."""
    if audited:
        monkeypatch.setattr("hotset.dataset.audit._SHARE", 1e9)
        monkeypatch.setattr("hotset.dataset.audit_budget._KEPT_SECONDS", 1e9)
    made = wrap(datasets.Dataset.from_dict({"x": [number / 3 for number in range(N)]}).with_format("numpy"))
    assert made[0]["x"].dtype == np.float64
    with warnings.catch_warnings(record=True) as told, hotset.cache(made, memory=400) as cached:
        warnings.simplefilter("always")
        for _ in range(3):
            for kind in (hotset.DataLoader, torch.utils.data.DataLoader):
                found = [batch["x"] for batch in kind(cached, batch_size=3)]
                assert {each.dtype for each in found} == {torch.float32}
        assert {cached[index]["x"].dtype for index in range(N)} == {np.dtype(np.float32)}
        assert 0 < cached.stats().cached < N
        assert bool(cached.stats().audited) is audited
        assert cached.stats().bytes / cached.stats().cached < 100, "they have the planned form"
    assert not [each for each in told if "differs from what was cached" in str(each.message)]


def test_programs_do_not_take_its_table_past_the_cache() -> None:
    """As transformers' Trainer drops columns of what it finds to be one."""
    with hotset.cache(datasets.Dataset.from_dict({"x": [0, 1]}), memory="1MiB") as cached:
        assert not isinstance(cached, datasets.Dataset)


@pytest.mark.parametrize("workers", [0, 2])
def test_rows_from_a_disk_are_those_that_torch_gives(workers: int, tmp_path: Path) -> None:
    made = on_disk(tmp_path / "rows", rows())
    check_equal(lambda: made.with_format("torch"), workers)


@pytest.mark.chaos
def test_rows_in_spawned_workers() -> None:
    check_equal(rows, 1, multiprocessing_context="spawn", persistent_workers=True)


# Identity


def digest(dataset: HF) -> str:
    found = fingerprint(dataset)
    assert not found.unknowns
    return found.digest


def test_whatever_changes_samples_changes_the_fingerprint() -> None:
    made = rows()
    others = [
        rows(1),
        rows(count=N - 1),
        *(make() for kind, make in KINDS.items() if kind != "rows"),
        made.select([5, 3, 3, 11, 0, 21]),
        made.select(range(3, 16)),
        made.select(range(4, 18)),
        made.shuffle(seed=4),
        made.rename_column("ids", "input_ids"),
        made.cast_column("label", datasets.Value("int32")),
        made.with_format("numpy", dtype=np.float32),
        made.with_transform(partial(scaled, by=2.0)),
        made.with_transform(partial(scaled, by=3.0)),
    ]
    assert len({digest(each) for each in (made, *others)}) == len(others) + 1


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_rows_have_one_fingerprint_before_and_after_they_were_read(kind: str) -> None:
    made = KINDS[kind]()
    before = digest(made)
    for index in range(len(made)):
        made[index]
    made[: len(made)]
    made._data.column(0).null_count  # noqa: B018
    assert digest(made) == digest(KINDS[kind]()) == before


def test_a_random_fingerprint_of_datasets_does_not_count() -> None:
    one, other = rows(), rows()
    one._fingerprint = datasets.fingerprint.generate_random_fingerprint()
    assert digest(one) == digest(other)


def test_large_files_count_by_path_and_date(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hotset.determinism.fingerprint.arrow_tables.READ_WHOLE", 0)
    made = on_disk(tmp_path / "a", rows())
    again = datasets.load_from_disk(str(tmp_path / "a"))
    assert digest(made) == digest(again) != digest(on_disk(tmp_path / "b", rows()))
    parts = [made, made.select(range(2, 9)), made.select(range(3, 10)), made.select(range(2, 10))]
    assert len(set(map(digest, parts))) == len(parts)
    digest(made.with_format("torch"))
    (file,) = (tmp_path / "a").glob("*.arrow")
    before = digest(made)
    file.touch()
    assert digest(datasets.load_from_disk(str(tmp_path / "a"))) != before


def test_tables_and_columns_of_arrow_count_by_their_rows() -> None:
    arrow = pytest.importorskip("pyarrow")
    table = arrow.table({"x": [1, 2, None, 4], "y": [["a"], [], None, ["b", "c"]]})
    parts = [
        table,
        table.slice(1, 2),
        table.slice(0, 2),
        table["x"],
        table["y"],
        table["x"].chunk(0),
        table["x"].chunk(0).slice(1),
        table.to_batches()[0],
        table.replace_schema_metadata({"k": "v"}),
    ]
    assert len({digest(part) for part in parts}) == len(parts)
    assert digest(arrow.table({"x": [1, 2, None, 4], "y": [["a"], [], None, ["b", "c"]]})) == digest(table)


@pytest.mark.usefixtures("runtime")
def test_a_second_job_of_a_session_finds_the_rows() -> None:
    sessions.create("shared", memory=1 << 24)

    def job(fresh: bool) -> None:
        with hotset.cache(rows().with_format("torch"), session="shared") as cached:
            assert cached.stats().cached == (0 if fresh else N)
            for row in hotset.DataLoader(cached, batch_size=4):
                assert set(row) == {"ids", "weight", "label"}
            assert cached.stats().cached == N

    in_child(partial(job, True))
    in_child(partial(job, False))


# Transforms of batches


def jittered(batch: dict[str, list[Any]]) -> dict[str, Any]:
    """Draws once for the batch, and for each row from all three generators."""
    shift = random.random()
    ids = [torch.tensor(ids) * torch.rand(()) + shift for ids in batch["ids"]]
    return {
        "ids": ids,
        "noise": np.random.rand(len(ids)),
        "label": batch["label"],
        "n": [len(ids)] * len(ids),
    }


def in_place(batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
    batch["ids"] = [torch.tensor(ids)[torch.randperm(len(ids))] for ids in batch["ids"]]
    batch["label"].reverse()
    del batch["weight"]
    return batch


def stacked(batch: dict[str, list[Any]]) -> dict[str, torch.Tensor]:
    return {name: torch.tensor(column) for name, column in batch.items()} | {
        "u": torch.rand(len(batch["ids"]))
    }


def padded(batch: dict[str, list[Any]]) -> dict[str, Any]:
    """Pads to the longest row of the batch, as tokenizers do."""
    length = max(label for label in batch["label"]) + 1
    return {"ids": torch.zeros(len(batch["label"]), length), "label": batch["label"]}


LIVE: dict[str, Callable[[], HF]] = {
    "jittered": lambda: rows().with_transform(jittered),
    "in place": lambda: rows().with_transform(in_place),
    "stacked": lambda: rows().with_transform(stacked),
    "padded": lambda: rows().with_transform(padded),
    "some columns": lambda: rows().with_transform(jittered, columns=["label", "ids"]),
    "others as well": lambda: rows().with_transform(
        jittered, columns=["ids", "label"], output_all_columns=True
    ),
    "selected": lambda: rows().with_transform(jittered).shuffle(seed=1).select(range(19)),
    "subset": lambda: torch.utils.data.Subset(rows().with_transform(jittered), [3, 1, 4, 15, 9, 2, 6]),
    "concatenated": lambda: torch.utils.data.ConcatDataset(
        [rows().with_transform(jittered), rows(1).with_transform(jittered)]
    ),
}


@pytest.mark.parametrize(
    ("kind", "workers"),
    rarely(
        itertools.product(LIVE, [0, 2]),
        *[(kind, 2) for kind in LIVE if kind not in ("jittered", "in place", "some columns")],
    ),
)
def test_a_transform_of_batches_is_run_as_datasets_runs_it(kind: str, workers: int) -> None:
    check_equal(LIVE[kind], workers)


def test_a_transform_of_batches_runs_on_single_rows_without_batches() -> None:
    check_equal(LIVE["jittered"], 0, batch_size=None)
    check_equal(LIVE["others as well"], 0, batch_size=None)


@pytest.mark.parametrize("kind", LIVE)
def test_rows_below_a_live_transform_are_cached_and_read_by_torchs_loader_as_well(kind: str) -> None:
    expected = record(lambda: torch.utils.data.DataLoader(LIVE[kind](), **BATCHES))
    with hotset.cache(LIVE[kind](), memory="64MiB") as cached:
        compare(record(lambda: torch.utils.data.DataLoader(cached, **BATCHES)), expected)
        assert len(cached.plan.live) == 1
        assert cached.stats().cached == len(cached)


@pytest.mark.chaos
def test_a_transform_of_batches_in_spawned_workers() -> None:
    check_equal(LIVE["jittered"], 1, multiprocessing_context="spawn", persistent_workers=True)


@pytest.mark.usefixtures("runtime")
def test_a_second_job_of_a_session_finds_the_rows_below_a_transform() -> None:
    sessions.create("shared", memory=1 << 24)

    def job(make: Callable[[], HF], there: int) -> None:
        with hotset.cache(make(), session="shared") as cached:
            assert cached.stats().cached == there
            list(hotset.DataLoader(cached, batch_size=4))
            assert cached.stats().cached == N

    in_child(partial(job, LIVE["jittered"], 0))
    in_child(partial(job, LIVE["jittered"], N))
    doubled, tripled = (partial(rows().with_transform, partial(scaled, by=by)) for by in (2.0, 3.0))
    in_child(partial(job, doubled, 0))
    in_child(partial(job, doubled, N))
    in_child(partial(job, tripled, 0))


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("outer", [False, True])
def test_cached_datasets_may_be_wrapped(parts: int, outer: bool) -> None:
    def wrapped(sources: list[Any]) -> Any:
        whole = torch.utils.data.ConcatDataset(sources)
        return torch.utils.data.Subset(whole, range(3, 17)) if outer else whole

    sources = [rows(seed).with_transform(jittered) for seed in range(parts)]
    expected = record(lambda: torch.utils.data.DataLoader(wrapped(sources), **BATCHES))
    cached = [hotset.cache(source, memory="64MiB") for source in sources]
    compare(record(lambda: hotset.DataLoader(wrapped(cached), **BATCHES)), expected)
    inside = torch.utils.data.Subset(sources[0], range(3, 17))
    expected = record(lambda: torch.utils.data.DataLoader(inside, **BATCHES))
    inside = torch.utils.data.Subset(cached[0], range(3, 17))
    compare(record(lambda: hotset.DataLoader(inside, **BATCHES)), expected)
    for each in cached:
        each.close()


def test_a_transform_of_batches_without_a_cache_is_still_run_on_batches() -> None:
    """With ``key=`` a transform that is set later ends caching."""
    expected = record(lambda: torch.utils.data.DataLoader(LIVE["jittered"](), **BATCHES))
    source = rows()
    with hotset.cache(source, memory="64MiB", key="rows") as cached:
        source.set_transform(jittered)
        with pytest.warns(hotset.HotsetWarning, match="key"):
            assert len(cached) == N
        compare(record(lambda: hotset.DataLoader(cached, **BATCHES)), expected)


def test_a_deterministic_transform_is_cached_whole() -> None:
    calls = []

    def doubled(batch: dict[str, list[Any]]) -> dict[str, Any]:
        calls.append(len(batch["ids"]))
        return {"ids": [torch.tensor(ids) * 2 for ids in batch["ids"]]}

    expected = record(lambda: torch.utils.data.DataLoader(rows().with_transform(doubled), **BATCHES))
    with hotset.cache(rows().with_transform(doubled), memory="64MiB") as cached:
        assert cached.plan.cached[-1] == "doubled"
        assert not cached.plan.live
        compare(record(lambda: hotset.DataLoader(cached, **BATCHES)), expected)
        before = len(calls)  # not cleared: a closure's variable that the program changes has samples compared
        list(hotset.DataLoader(cached, **BATCHES))
        assert len(calls) == before


def test_a_transform_that_pads_to_its_batch_stays_live_and_the_plan_says_why() -> None:
    with hotset.cache(LIVE["padded"](), memory="64MiB") as cached:
        assert "the other rows of the batch" in str(cached.plan)


def test_a_declaration_of_a_transform_of_batches_is_believed() -> None:
    drawn = hotset.deterministic(lambda batch: {"ids": [torch.rand(3) for _ in batch["ids"]]})
    with hotset.cache(rows().with_transform(drawn), memory="64MiB") as cached:
        assert not cached.plan.live
        assert torch.equal(cached[3]["ids"], cached[3]["ids"])
    fixed = hotset.nondeterministic(partial(scaled, by=2.0))
    with hotset.cache(rows().with_transform(fixed), memory="64MiB") as cached:
        assert cached.plan.live


def test_further_transforms_follow_the_datasets_own() -> None:
    with hotset.cache(LIVE["jittered"](), transform=[lambda row: row["label"]], memory="64MiB") as cached:
        assert [int(label) for batch in hotset.DataLoader(cached, batch_size=4) for label in batch] == list(
            range(N)
        )


@pytest.mark.parametrize("on", ["cached", "dataset"])
def test_a_transform_that_is_set_later_is_used(on: str) -> None:
    source = rows()
    with hotset.cache(source, memory="64MiB") as cached:
        assert "ids" in cached[0]
        for by in (2.0, 3.0):
            (cached if on == "cached" else source).set_transform(partial(scaled, by=by))
            for batch in hotset.DataLoader(cached, batch_size=4):
                assert torch.equal(batch["ids"], torch.tensor(rows()[:N]["ids"])[batch["label"]] * by)
        (cached if on == "cached" else source).set_format("torch", columns=["label"])
        assert set(cached[0]) == {"label"}
        source.reset_format()
        assert cached[0] == rows()[0]


def test_what_a_transform_raises_is_raised() -> None:
    def failing(batch: dict[str, list[Any]]) -> dict[str, Any]:
        if 7 in batch["label"]:
            raise ValueError("seven")
        return jittered(batch)

    with hotset.cache(rows().with_transform(failing), memory="64MiB") as cached:
        loader = hotset.DataLoader(cached, batch_size=4)
        iterator = iter(loader)
        next(iterator)
        with pytest.raises(ValueError, match="seven"):
            next(iterator)
        with pytest.raises(ValueError, match="seven"):
            cached[7]
    for wrong in (lambda batch: 3, lambda batch: {"x": 3}):
        with hotset.cache(rows().with_transform(hotset.nondeterministic(wrong)), memory="64MiB") as cached:
            with pytest.raises(TypeError, match="dict of sequences"):
                cached[0]
            with pytest.raises(Exception):  # noqa: B017, PT011  what `datasets` raises of itself
                cached.__getitems__([0, 1])


# Images


def images(count: int = N) -> HF:
    drawn = np.random.default_rng(0)
    files = []
    for number in range(count):
        file = io.BytesIO()
        pixels = drawn.integers(0, 255, (30 + number % 3, 40, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(file, "JPEG" if number % 4 else "PNG")
        files.append({"bytes": file.getvalue(), "path": None})
    made = datasets.Dataset.from_dict({"image": files, "label": list(range(count))})
    return made.cast_column("image", datasets.Image())


def augmented(batch: dict[str, list[Any]]) -> dict[str, Any]:
    pictures = []
    for picture in batch["image"]:
        left = int(torch.randint(0, 8, ()))
        cropped = picture.convert("RGB").crop((left, 0, left + 24, 24))
        pictures.append(torch.from_numpy(np.array(cropped)))
    return {"pixels": pictures, "label": batch["label"], "format": [p.format for p in batch["image"]]}


@pytest.mark.parametrize("workers", [0, 2])
def test_images_are_cached_decoded_and_augmented_live(workers: int) -> None:
    check_equal(lambda: images().with_transform(augmented), workers)


def test_images_as_they_are_loaded() -> None:
    check_equal(images, 0, collate_fn=list)


# What is missing, and what cannot be read


def with_gaps() -> HF:
    made = images().to_dict()
    made["image"] = [None if number in (0, 7, N - 1) else image for number, image in enumerate(made["image"])]
    made["empty"] = [[] for _ in range(N)]
    made["nothing"] = [None] * N
    made["some"] = [None if number % 5 else [number] * (number % 4) for number in range(N)]
    return datasets.Dataset.from_dict(made).cast_column("image", datasets.Image())


def counted(batch: dict[str, list[Any]]) -> dict[str, Any]:
    sizes = [0 if image is None else image.width for image in batch["image"]]
    return {
        "size": sizes,
        "drawn": torch.rand(len(sizes)),
        "some": [len(each or ()) for each in batch["some"]],
    }


@pytest.mark.parametrize(
    ("transformed", "workers"), rarely(itertools.product([False, True], [0, 2]), (False, 2))
)
def test_rows_without_an_image_and_empty_columns(transformed: bool, workers: int) -> None:
    if transformed:
        check_equal(lambda: with_gaps().with_transform(counted), workers)
    else:
        check_equal(with_gaps, workers, collate_fn=list)


def test_a_dataset_without_rows_is_refused_with_a_sentence() -> None:
    with pytest.raises(hotset.ArgumentError, match="empty"):
        hotset.cache(rows().select([]))


@pytest.mark.parametrize("transform", [None, counted])
def test_an_image_that_cannot_be_decoded_raises_at_its_batch_only(transform: Any) -> None:
    def made() -> HF:
        files = with_gaps().cast_column("image", datasets.Image(decode=False)).to_dict()
        files["image"][9] = {"bytes": b"no image", "path": None}
        found = datasets.Dataset.from_dict(files).cast_column("image", datasets.Image())
        return found if transform is None else found.with_transform(transform)

    class Once(torch.utils.data.Sampler[int]):
        def __init__(self, order: list[int]) -> None:
            self.order = order

        def __iter__(self) -> Any:
            return iter(self.order)

        def __len__(self) -> int:
            return len(self.order)

    good = Once([number for number in range(N) if number != 9])
    options: dict[str, Any] = {"batch_size": 4, "sampler": good, "collate_fn": list}
    expected = record(lambda: torch.utils.data.DataLoader(made(), **options))
    with hotset.cache(made(), memory="64MiB") as cached:
        compare(record(lambda: hotset.DataLoader(cached, **options)), expected)
        iterator = iter(hotset.DataLoader(cached, batch_size=4, collate_fn=list))
        for _ in range(2):
            next(iterator)
        with pytest.raises(Exception, match="identify image"):
            next(iterator)
        with pytest.raises(Exception, match="identify image"):
            cached[9]
        assert cached.stats().cached == N - 1


@pytest.mark.parametrize("column", ["whole", "truth", "lists"])
def test_columns_that_are_floats_in_some_batches_only_are_refused_with_what_to_do(column: str) -> None:
    columns = {
        "whole": [None, *range(1, N)],
        "truth": [None, *[True] * (N - 1)],
        "lists": [[None], *[[1]] * (N - 1)],
    }
    rows = datasets.Dataset.from_dict(columns).with_format("torch", columns=[column])
    with pytest.raises(hotset.NotCacheable, match=f"column '{column}' of Dataset has .* None"):
        hotset.cache(rows, memory="1MiB")
    with hotset.cache(rows.with_format(None), memory="1MiB") as cached:
        list(hotset.DataLoader(cached, 4, collate_fn=list))
        assert cached.stats().cached == N


@pytest.mark.parametrize("way", ["cast", "left out", "selected"])
def test_what_the_refusal_advises_is_cached(way: str) -> None:
    rows = datasets.Dataset.from_dict({"whole": [None, *range(1, N)], "other": list(range(N))})
    if way == "cast":
        rows = rows.cast_column("whole", datasets.Value("float32"))
    chosen = range(1, N) if way == "selected" else range(N)
    rows = rows.select(chosen).with_format("torch", columns=["other"] if way == "left out" else None)
    plain = [list(batch.items()) for batch in torch.utils.data.DataLoader(rows, 4)]
    with hotset.cache(rows, memory="1MiB") as cached:
        for _ in range(2):
            batches = [list(batch.items()) for batch in hotset.DataLoader(cached, 4, num_workers=2)]
            assert str(batches) == str(plain)
