"""Datasets of Hugging Face: rows, formats, what selects rows, and transforms that run on batches."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kills import in_child
from observed import compare, record

import hotset
from hotset.determinism.fingerprint import fingerprint
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
    "numpy": lambda: rows().remove_columns("weight").with_format("numpy"),
    "torch, some columns": lambda: rows().with_format("torch", columns=["ids"]),
    "torch, others as well": lambda: rows().with_format("torch", columns=["ids"], output_all_columns=True),
    "select": lambda: rows().select([5, 3, 3, 11, 0, 20]),
    "a range": lambda: rows().select(range(3, 17)),
    "shuffle": lambda: rows().shuffle(seed=3).with_format("torch"),
    "concatenated": lambda: datasets.concatenate_datasets([rows(), rows(1).shuffle(seed=0)]),
    "mapped": lambda: rows().map(lambda row: {"double": row["label"] * 2}),
}


def check_equal(make: Callable[[], HF], workers: int, **options: Any) -> None:
    """Three epochs of a cached dataset equal torch's over the same dataset, draws included."""
    options = {**BATCHES, "num_workers": workers, **options}
    expected = record(lambda: torch.utils.data.DataLoader(make(), **options))
    with hotset.cache(make(), memory="64MiB") as cached:
        compare(record(lambda: hotset.DataLoader(cached, **options)), expected)
        assert cached.stats().cached > 0


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_those_that_torch_gives(kind: str, workers: int) -> None:
    collate = list if kind in ("nested", "text", "rows") else torch.utils.data.default_collate
    check_equal(KINDS[kind], workers, collate_fn=collate)


@pytest.mark.parametrize("workers", [0, 2])
def test_rows_from_a_disk_are_those_that_torch_gives(workers: int, tmp_path: Path) -> None:
    made = on_disk(tmp_path / "rows", rows())
    check_equal(lambda: made.with_format("torch"), workers)


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
    monkeypatch.setattr("hotset.determinism.arrow_tables.READ_WHOLE", 0)
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
