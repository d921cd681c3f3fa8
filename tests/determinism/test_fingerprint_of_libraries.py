"""What datasets hold of pandas, polars and pydantic has one fingerprint in each process, also after use."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from hotset.determinism.fingerprint.fingerprint import fingerprint


def of(source: object) -> str:
    found = fingerprint(source)
    assert not found.unknowns
    return found.digest


def table(**other: Any) -> Any:
    pandas = pytest.importorskip("pandas")
    columns = {
        "x": [0.5, 1.5, 2.5],
        "n": [1, 2, 3],
        "m": [4, 5, 6],
        "text": ["a", None, "b"],
        "kind": pandas.Categorical(["u", "v", "u"]),
        "day": pandas.date_range("2020-01-01", periods=3, tz="UTC"),
        "maybe": pandas.array([1, None, 3], dtype="Int64"),
        "list": [[1], [], [2, 3]],
    }
    return pandas.DataFrame(columns | other)


TABLES: dict[str, Any] = {
    "table": table,
    "index of texts": lambda: table().set_index("text"),
    "index of levels": lambda: table().set_index(["kind", "n"]),
    "column": lambda: table()["text"],
    "names of columns": lambda: table().columns,
    "groups": lambda: table().groupby("kind", observed=True),
    "parts": lambda: dict(list(table().groupby("n"))),
    "times": lambda: [table()["day"][0], table()["day"].dt.tz_localize(None).dt.to_period("M")],
}


def digests() -> dict[str, str]:
    return {name: of(make()) for name, make in TABLES.items()}


def elsewhere(code: str) -> str:
    """What the code prints in another process."""
    path = os.pathsep.join(map(str, (Path(__file__).parent, *sys.path)))
    environment = {**os.environ, "PYTHONHASHSEED": "7", "PYTHONPATH": path}
    command = [sys.executable, "-c", textwrap.dedent(code)]
    return subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True, text=True).stdout


def test_tables_of_pandas_are_the_same_in_every_process() -> None:
    pytest.importorskip("pandas")
    here = digests()
    assert len(set(here.values())) == len(here)
    assert elsewhere("import test_fingerprint_of_libraries as t; print(t.digests())").strip() == str(here)


@pytest.mark.parametrize(
    "use",
    [
        lambda table: table.loc[1],
        lambda table: table.iloc[1].to_dict(),
        lambda table: table.index.get_loc(2),
        lambda table: table.columns.get_loc("n"),
        lambda table: table["text"].value_counts(),
        lambda table: table.groupby("n").size(),
        lambda table: table.to_numpy(),
        lambda table: table["text"].str.upper(),
    ],
)
def test_reading_a_table_of_pandas_leaves_no_trace(use: Any) -> None:
    one = table()
    one["later"] = one["n"] + 1  # in a block of memory of its own
    before = of(one)
    use(one)
    assert of(one) == before == of(one.copy())


@pytest.mark.parametrize(
    "change",
    [
        lambda table: table.assign(x=[0.5, 1.5, 2.0]),
        lambda table: table.assign(text=["a", None, "c"]),
        lambda table: table.assign(text=["a", "", "b"]),
        lambda table: table.assign(kind=table["kind"].cat.add_categories("w")),
        lambda table: table.assign(maybe=[1, 2, 3]),
        lambda table: table.astype({"n": "int32"}),
        lambda table: table.rename(columns={"n": "k"}),
        lambda table: table[["n", "x", "m", "text", "kind", "day", "maybe", "list"]],
        lambda table: table.set_axis([0, 1, 3]),
        lambda table: table.iloc[::-1],
    ],
)
def test_another_table_of_pandas_has_another_fingerprint(change: Any) -> None:
    assert of(change(table())) != of(table())


@pytest.mark.parametrize("kind", ["object", "string", None])
def test_a_file_that_a_table_of_pandas_names_counts(kind: str | None, tmp_path: Path) -> None:
    (tmp_path / "a").write_text("a")
    paths = table(path=[str(tmp_path / "a")] * 3)
    paths = paths if kind is None else paths.astype({"path": kind})
    before = of(paths)
    (tmp_path / "a").write_text("another")
    assert of(paths) != before


@pytest.mark.parametrize("column", ["texts", "chunks", "images"])
def test_a_file_that_a_table_of_arrow_names_counts(column: str, tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    file = tmp_path / "a.txt"
    file.write_text("a")
    images = arrow.array([{"bytes": None, "path": str(file)}, {"bytes": b"b", "path": None}])
    texts = arrow.array([None, str(file)])
    table = arrow.table(
        {"texts": texts, "chunks": arrow.chunked_array([texts[:1], texts[1:]]), "images": images}
    )
    before = fingerprint(table.select([column])).digest
    assert fingerprint(table.select([column])).digest == before
    file.write_text("other")
    assert fingerprint(table.select([column])).digest != before


def test_tables_of_polars_are_described(tmp_path: Path) -> None:
    polars = pytest.importorskip("polars")

    def rows(number: float) -> Any:
        return polars.DataFrame({"x": [number, 1.5], "t": [str(tmp_path / "a"), None], "l": [[1], []]})

    (tmp_path / "a").write_text("a")
    before = of(rows(0.5))
    assert before == of(rows(0.5)) != of(rows(0.25))
    (tmp_path / "a").write_text("another")
    assert of(rows(0.5)) != before


CONFIG = """
    import pydantic
    from hotset.determinism.fingerprint.fingerprint import fingerprint

    class Size(pydantic.BaseModel):
        width: int = 3

    class Config(pydantic.BaseModel):
        name: str
        size: Size = Size()
        levels: list[float] = [MOST]

        @pydantic.field_validator("levels")
        @classmethod
        def limited(cls, levels):
            return [min(level, MOST) for level in levels]

    config = Config(name="a")
    before = fingerprint(config).digest
    config.name = "b"
    config.name = "a"
    assert fingerprint(config).digest == before, "setting an attribute leaves a trace"
    print(before)
"""


def test_a_model_of_pydantic_is_the_same_in_every_process() -> None:
    """Its class holds its own address, as a text."""
    pytest.importorskip("pydantic")
    with contextlib.redirect_stdout(io.StringIO()) as here:
        exec(textwrap.dedent(CONFIG), {"MOST": 1})
    code = "import test_fingerprint_of_libraries as t\n"
    code += "for most in (1, 2): exec(t.textwrap.dedent(t.CONFIG), {'MOST': most})"
    again, other = elsewhere(code).split()
    assert here.getvalue().strip() == again != other
