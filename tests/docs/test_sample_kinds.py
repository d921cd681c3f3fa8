"""docs/compatibility.md says what samples may consist of, and what to return instead: each row is true."""

from __future__ import annotations

import ast
import builtins
import contextlib
import importlib
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import Dataset

import hotset
from hotset.determinism.equality import differs

PAGE = (Path(__file__).parents[2] / "docs" / "compatibility.md").read_text()
CACHED, OTHERS = re.findall(
    r"\|---\|---\|\n(.*?)\n\n", PAGE.partition("<!-- cached -->")[2].replace("<!-- end", "\n<!-- end"), re.S
)
N = 4


def codes(table: str, columns: int) -> list[tuple[str, ...]]:
    """The first piece of code in each of the last cells of each row."""
    rows = [row.strip("| ").split(" | ")[-columns:] for row in table.splitlines()]
    return [tuple(re.findall(r"`([^`]+)`", cell)[0] for cell in row) for row in rows]


def names_in(code: str) -> dict[str, Any]:
    """The modules that a piece of code names; the test is skipped where one is not installed."""
    tree = list(ast.walk(ast.parse(code)))
    bound = {node.id for node in tree if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    used = {node.id for node in tree if isinstance(node, ast.Name)} - bound - {"i", "x"}
    found = {name: pytest.importorskip(name) for name in sorted(used - set(vars(builtins)))}
    for node in tree:
        if isinstance(node, ast.Attribute):
            dotted = ast.unparse(node)
            if dotted.partition(".")[0] in found:
                with contextlib.suppress(ImportError):
                    importlib.import_module(dotted)
    return found


class Samples(Dataset[Any]):
    """Makes samples by the code of a row, and of these what the code in its next cell makes."""

    def __init__(self, code: str, instead: str = "x") -> None:
        self.code, self.instead = code, instead

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> Any:
        made = eval(self.code, {**NAMES, "i": index + 1})
        return eval(self.instead, {**NAMES, "x": made})


NAMES: dict[str, Any] = {}


def number_cached(dataset: Samples) -> tuple[int, bool]:
    """How many samples are cached, and whether a warning says that they cannot be; two epochs are equal."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with hotset.cache(dataset, memory="8MiB", key=f"{dataset.code} {dataset.instead}") as cached:
            for _ in range(2):
                assert [how for i in range(N) if (how := differs(cached[i], dataset[i]))] == []
            count = cached.stats().cached
    return count, any("can be cached" in str(each.message) for each in told)


@pytest.mark.parametrize("code", [code for (code,) in codes(CACHED, 1)])
def test_samples_that_the_page_says_are_cached(code: str) -> None:
    NAMES.update(names_in(code))
    assert number_cached(Samples(code)) == (N, False)


@pytest.mark.parametrize(("code", "instead"), codes(OTHERS, 2))
def test_samples_that_the_page_says_are_not_cached_and_what_it_gives_in_their_place(
    code: str, instead: str
) -> None:
    NAMES.update(names_in(code) | names_in(instead))
    assert number_cached(Samples(code)) == (0, True)
    assert number_cached(Samples(code, instead)) == (N, False)
