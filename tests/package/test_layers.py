"""The layers: imports only point down, never in a circle; what must start at once does not import torch.

::

    cli  run  server  train  integrations  demo   faces
    loader, collate  |  memoize
    dataset  |  device                            neither imports the other
    determinism
    cluster
    session
    store
    policy
    errors  units  _warnings  _interrupts  _progress  _fork_server

Nor do they go in a circle, within a layer either. Every import counts: at the top of a module, inside a
function, and for type checking alone.
"""

from __future__ import annotations

import ast
import functools
import graphlib
import inspect
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from programs import Programs

import hotset

PACKAGE = Path(hotset.__file__).parent
MODULES = {
    ".".join(("hotset", *path.relative_to(PACKAGE).with_suffix("").parts)): path
    for path in sorted(PACKAGE.rglob("*.py"))
}

LAYERS = [
    {"errors", "units", "_warnings", "_interrupts", "_progress", "_fork_server"},
    {"policy"},
    {"store"},
    {"session"},
    {"cluster"},
    {"determinism"},
    {"dataset", "device"},
    {"loader", "collate", "memoize"},
    {"cli", "run", "server", "train", "integrations", "demo", "__main__"},
]
ONE_PART = {
    "collate": "loader",
    "units": "errors",
    "_warnings": "errors",
    "_interrupts": "errors",
    "_progress": "errors",
    "_fork_server": "errors",
    "__main__": "cli",
}
# The command line is what starts the others.
MAY_START = {"cli": {"demo", "run", "server"}}

WITHOUT_TORCH = [
    "policy",
    "session",
    "cli",
    "errors",
    "units",
    "_warnings",
    "_interrupts",
    "_progress",
    "_fork_server",
]
WITHOUT_TORCH += ["memoize.memo_store"]  # `hotset run` holds it, beside the program's first seconds
WITHOUT_TORCH += [
    f"store.{name}" for name in ("format", "segment", "locks", "memory_limits", "fsck", "claims", "allocator")
]


def part(module: str) -> str:
    """The part of the package that a module belongs to: ``hotset.store.allocator`` to ``store``."""
    return module.split(".")[1]


def layer(name: str) -> int:
    found = [number for number, names in enumerate(LAYERS) if name in names]
    assert found, f"hotset.{name} has no place in the layers"
    return found[0]


@functools.cache
def imports(module: str) -> list[tuple[int, str]]:
    """Every module that this one imports, with its line."""
    return list(_imports(module))


def _imports(module: str) -> Iterator[tuple[int, str]]:
    tree = ast.parse(MODULES[module].read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}:{node.lineno} imports relatively"
            assert node.module is not None
            yield node.lineno, node.module
            # ``from hotset.store import locks`` names a module too.
            below = (f"{node.module}.{alias.name}" for alias in node.names)
            yield from (
                (node.lineno, name) for name in below if name in MODULES or f"{name}.__init__" in MODULES
            )


def test_imports_point_down() -> None:
    upward = []
    for module in MODULES:
        if module == "hotset.__init__":
            continue
        mine = part(module)
        for line, name in imports(module):
            if not name.startswith("hotset."):
                assert name != "hotset" or layer(mine) == len(LAYERS) - 1, f"{module}:{line} imports hotset"
                continue
            its = part(name)
            same = ONE_PART.get(mine, mine) == ONE_PART.get(its, its)
            if not (same or layer(its) < layer(mine) or its in MAY_START.get(mine, ())):
                upward.append(f"{module}:{line} imports {name}")
    assert upward == []


def test_no_imports_go_in_a_circle() -> None:
    graph = {
        module: {name for _, name in imports(module) if name in MODULES and name != module}
        for module in MODULES
    }
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        pytest.fail(" is imported by ".join(error.args[1]))


def test_no_folders_side_by_side_import_each_other() -> None:
    """Not a folder and the one that it lies in: that one may begin what is below, and hold what it needs."""
    graph: dict[str, set[str]] = {}
    for module in MODULES:
        folder, around = module.rpartition(".")[0], module.rpartition(".")[0].rpartition(".")[0]
        its = (name.rpartition(".")[0] for _, name in imports(module) if name in MODULES)
        graph.setdefault(folder, set()).update(
            name for name in its if name != folder and name.rpartition(".")[0] == around != "hotset"
        )
    graphlib.TopologicalSorter(graph).prepare()


def test_the_reading_of_imports_sees_those_inside_functions() -> None:
    """Otherwise the test above would test nothing."""
    found = {name for _, name in imports("hotset.store.leaves.pictures")}
    assert {"ast", "hotset.store.leaves.leaf", "PIL"} <= found


def test_modules_that_must_start_at_once_do_not_name_torch() -> None:
    named = []
    for module in MODULES:
        if any(module.startswith(f"hotset.{name}.") or module == f"hotset.{name}" for name in WITHOUT_TORCH):
            named += [f"{module}:{line}" for line, name in imports(module) if name.split(".")[0] == "torch"]
    assert named == []


def _run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_modules_that_must_start_at_once_do_not_import_torch_indirectly() -> None:
    quick = [
        module.removesuffix(".__init__")
        for module in ["hotset.__init__", *MODULES]
        if module == "hotset.__init__"
        or any(f"{module}.".startswith(f"hotset.{name}.") for name in WITHOUT_TORCH)
    ]
    assert {"hotset", "hotset.store.allocator", "hotset.memoize.memo_store", "hotset.units"} <= set(quick)
    # All in one process, as a start of Python costs more than any of them: the first culprit is named.
    code = (
        "import importlib, sys\n"
        f"for name in {quick!r}:\n"
        "    importlib.import_module(name)\n"
        "    if 'torch' in sys.modules: print(name); break\n"
    )
    assert _run(code) == ""


def test_the_package_alone_loads_none_of_its_parts() -> None:
    loaded = _run(
        "import sys, hotset; print(*(n for n in sys.modules if n.startswith(('hotset.', 'numpy'))))"
    )
    assert loaded == ""


# The public names


def test_dir_shows_the_public_api(programs: Programs, tmp_path: Path) -> None:
    code = "print(*(name for name in dir(hotset) if not name.startswith('_')))\n"
    program = tmp_path / "program.py"
    used = "hotset.cache, hotset.DataLoader, hotset.collate, hotset.SegmentError\n"
    program.write_text(f"import hotset\n{code}{used}{code}")
    done = programs.run([str(program)], tmp_path)
    assert [line.split() for line in done.stdout.splitlines()] == [sorted(hotset.__all__)] * 2, done.stderr


def test_every_public_name_resolves_and_no_other_does() -> None:
    for name in hotset.__all__:
        assert getattr(hotset, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        hotset.nonsense  # noqa: B018
    assert sorted(set(hotset.__all__)) == sorted(hotset.__all__)


def _needs_an_example(value: Any) -> bool:
    return inspect.isroutine(value) or (
        isinstance(value, type) and not issubclass(value, BaseException | Warning)
    )


@pytest.mark.parametrize("name", hotset.__all__)
def test_every_public_name_is_documented(name: str) -> None:
    value = getattr(hotset, name)
    text = inspect.getdoc(value)
    assert text, f"hotset.{name} has no docstring"
    if _needs_an_example(value):
        assert "Example:" in text, f"hotset.{name} has no example"


def test_every_module_says_what_it_is_and_what_it_exports() -> None:
    for module, path in MODULES.items():
        tree = ast.parse(path.read_text())
        assert ast.get_docstring(tree), f"{module} has no docstring"
        exported = [
            target.id
            for node in tree.body
            if isinstance(node, ast.Assign)
            for target in node.targets
            if isinstance(target, ast.Name)
        ]
        assert "__all__" in exported or path.name in ("__init__.py", "__main__.py"), (
            f"{module} has no __all__"
        )
