"""Few tests reach into privates: such a test is a wall around today's design."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
MOST = 0.10


def is_private(name: str) -> bool:
    return name.startswith("_") and not (name.startswith("__") and name.endswith("__"))


def _patched(text: object) -> bool:
    """Whether a string names a private of the library, as the first argument of ``monkeypatch.setattr``."""
    return isinstance(text, str) and text.startswith("hotset.") and any(map(is_private, text.split(".")))


def _is_own(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")


def imported_privates(tree: ast.Module) -> set[str]:
    """The names under which a file's imports bind privates of the library."""
    return {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "hotset"
        for alias in node.names
        if is_private(alias.name) or any(map(is_private, (node.module or "").split(".")))
    }


def reached(function: ast.AST, imported: set[str]) -> Iterator[str]:
    """The privates that a function reaches: another object's, imported ones, those it replaces by name."""
    for node in ast.walk(function):
        if isinstance(node, ast.Attribute) and is_private(node.attr) and not _is_own(node):
            yield node.attr
        elif isinstance(node, ast.Name) and node.id in imported:
            yield node.id
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "hotset":
            yield from (alias.name for alias in node.names if is_private(alias.name))
        elif isinstance(node, ast.Constant) and _patched(node.value):
            yield str(node.value)
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "setattr" and node.args[1:]:
            name = getattr(node.args[1], "value", "")
            if isinstance(name, str) and is_private(name):
                yield name


def functions_of(path: Path) -> Iterator[tuple[str, list[str]]]:
    """The tests of a file, each with the privates that it reaches itself."""
    tree = ast.parse(path.read_text())
    imported = imported_privates(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            yield node.name, list(reached(node, imported))


def test_at_most_a_tenth_of_the_tests_reach_into_privates() -> None:
    everything = {
        path.relative_to(TESTS): dict(functions_of(path)) for path in sorted(TESTS.glob("*/test_*.py"))
    }
    total = sum(map(len, everything.values()))
    reaching = {
        path: {name: names for name, names in tests.items() if names} for path, tests in everything.items()
    }
    count = sum(map(len, reaching.values()))
    print(f"{count} of {total} tests, {count / total:.1%}, reach into privates")
    for path in sorted(reaching, key=lambda path: -len(reaching[path]))[:20]:
        print(f"{len(reaching[path]):4d} of {len(everything[path])} in {path}")
    assert total > 2000
    assert count <= MOST * total


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import hotset\ndef test_a(cached): cached._store", ["_store"]),
        ("def test_a(monkeypatch): monkeypatch.setattr('hotset.store.fill._X', 1)", ["hotset.store.fill._X"]),
        ("def test_a(monkeypatch, fill): monkeypatch.setattr(fill, '_X', 1)", ["_X"]),
        ("from hotset.store.fill import _X\ndef test_a(): assert _X", ["_X"]),
        ("from helpers import _own\ndef test_a(self): assert self._x.__class__ is _own", []),
    ],
)
def test_what_counts_as_a_private(source: str, found: list[str], tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(source)
    assert list(functions_of(tmp_path / "test_it.py")) == [("test_a", found)]
