"""docs/compatibility.md has a row for each program of tests/compatibility, and none for another."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MODULES = sorted((ROOT / "tests" / "compatibility").glob("test_*.py"))


def programs(module: Path) -> dict[str, str]:
    """What a module's programs need, by name; read from its text, as its library may be missing."""
    calls = [node for node in ast.walk(ast.parse(module.read_text())) if isinstance(node, ast.Call)]
    found = {}
    for call in calls:
        if isinstance(call.func, ast.Name) and call.func.id == "Program":
            named = {keyword.arg: keyword.value for keyword in call.keywords}
            found[ast.literal_eval(call.args[0])] = ast.literal_eval(named.get("needs", ast.Constant("")))
    return found


def rows() -> dict[str, str]:
    page = (ROOT / "docs" / "compatibility.md").read_text()
    table = page.split("<!-- rows -->")[1].split("<!-- end of the rows -->")[0]
    cells = [re.split(r" ?\| ?", line) for line in table.strip().splitlines()[2:]]
    return {program: verdict for _, program, verdict, *_ in cells}


def test_each_program_has_its_row_and_verdict() -> None:
    expected = {name: needs for module in MODULES for name, needs in programs(module).items()}
    assert rows() == {
        name: f"needs {needs}" if needs else "works as it is" for name, needs in expected.items()
    }


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.stem)
def test_each_module_has_programs(module: Path) -> None:
    assert programs(module)
