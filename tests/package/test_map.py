"""tests/README.md maps promises to tests: everything it names exists, and it misses no test file."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import hotset

TESTS = Path(__file__).parents[1]
PAGE = (TESTS / "README.md").read_text()
NAMED = set(re.findall(r"`([\w/]+(?:\.py|/))`", PAGE))


def test_every_file_and_folder_that_is_named_exists() -> None:
    assert {
        name for name in NAMED if not (TESTS / name).exists() and not (TESTS.parent / name).exists()
    } == set()


def test_every_test_file_or_its_folder_is_named() -> None:
    files = {path.relative_to(TESTS) for path in TESTS.rglob("test_*.py")}
    assert {
        str(file) for file in files if str(file) not in NAMED and f"{file.parts[0]}/" not in NAMED
    } == set()


def test_every_public_name_is_in_the_table() -> None:
    table = PAGE.split("## Public names")[1].split("\n## ")[0]
    first_cells = re.findall(r"^\| (`.*?) \|", table, re.MULTILINE)
    assert sorted(re.findall(r"`(\w+)`", " ".join(first_cells))) == sorted(hotset.__all__)


LARGE = {"torchvision", "monai", "kornia", "albumentations", "timm", "lightning", "accelerate", "datasets"}


IMPORTS_LARGE = re.compile(rf"^(?:import|from) .*\b(?:{'|'.join(sorted(LARGE))})\b", re.MULTILINE)


def test_no_large_library_is_imported_as_tests_are_collected() -> None:
    """A process with torchvision takes twice as long to fork, one with MONAI three times."""
    apart = {TESTS / folder for folder in ("integrations", "compatibility", "chaos", "gpu")}
    for path in TESTS.rglob("*.py"):
        if not apart & {*path.parents}:
            text = path.read_text()
            for node in ast.parse(text).body if IMPORTS_LARGE.search(text) else ():
                modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
                modules += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
                large = LARGE & {name.partition(".")[0] for name in modules}
                assert not large, f"{path.relative_to(TESTS)}: import {large} in the tests that need it"
