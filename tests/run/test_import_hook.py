"""Hooks run after the import of their module, and neither the module nor its import shows a trace of it."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import traceback
import venv
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from hotset.run import environment
from hotset.run.import_hook import AfterImport


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of modules named ``hooked_...``, and a ``sys.meta_path`` that is put back."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    yield tmp_path
    for name in [name for name in sys.modules if name.startswith("hooked_")]:
        del sys.modules[name]


def hook(name: str) -> list[ModuleType]:
    seen: list[ModuleType] = []
    AfterImport({name: seen.append}).install()
    return seen


def test_a_hook_runs_when_its_module_has_been_imported(place: Path) -> None:
    (place / "hooked_a.py").write_text("value = 1\n")
    seen = hook("hooked_a")
    assert seen == []
    module = importlib.import_module("hooked_a")
    assert seen == [module]
    importlib.import_module("hooked_a")
    assert len(seen) == 1
    importlib.reload(module)  # replaces what was wrapped
    assert len(seen) == 2


def test_a_module_that_is_there_already_is_hooked_at_once(place: Path) -> None:
    (place / "hooked_b.py").write_text("")
    module = importlib.import_module("hooked_b")
    assert hook("hooked_b") == [module]


def test_the_module_looks_as_without_the_hook(place: Path) -> None:
    (place / "hooked_c").mkdir()
    (place / "hooked_c" / "__init__.py").write_text("from hooked_c import part\n")
    (place / "hooked_c" / "part.py").write_text("")

    def looks(module: ModuleType) -> object:
        names = sorted(vars(module))
        return names, type(module.__loader__), vars(module.__loader__), module.__file__

    plain = [looks(importlib.import_module(name)) for name in ("hooked_c", "hooked_c.part")]
    for name in ("hooked_c", "hooked_c.part"):
        del sys.modules[name]
    seen = [hook("hooked_c"), hook("hooked_c.part")]
    assert [looks(importlib.import_module(name)) for name in ("hooked_c", "hooked_c.part")] == plain
    assert [len(one) for one in seen] == [1, 1]


def test_an_import_that_fails_fails_as_without_the_hook(place: Path) -> None:
    (place / "hooked_d.py").write_text("1 / 0\n")
    seen = hook("hooked_d")
    with pytest.raises(ZeroDivisionError) as caught:
        importlib.import_module("hooked_d")
    ours = [frame for frame in traceback.extract_tb(caught.tb) if "hotset" in frame.filename]
    assert len([frame for frame in ours if frame.name == "exec_module"]) <= 1
    assert (seen, "hooked_d" in sys.modules) == ([], False)
    hook("hooked_e")
    with pytest.raises(ModuleNotFoundError, match="No module named 'hooked_e'"):
        importlib.import_module("hooked_e")


def test_a_module_that_imports_its_own_name_anew_is_hooked(place: Path) -> None:
    """As cv2 does: a package that puts an extension module of its own name beside itself."""
    (place / "hooked_f").mkdir()
    (place / "native").mkdir()
    (place / "native" / "hooked_f.py").write_text("def read(): return 'plain'\n")
    (place / "hooked_f" / "__init__.py").write_text(
        "import importlib, sys\n"
        f"sys.path.insert(0, {str(place / 'native')!r})\n"
        "mine = sys.modules.pop('hooked_f')\n"
        "native = importlib.import_module('hooked_f')\n"
        "sys.modules['hooked_f'] = mine\n"
        "del sys.path[0]\n"
        "read = native.read\n"
    )
    seen = hook("hooked_f")
    module = importlib.import_module("hooked_f")
    assert seen[-1] is module
    assert module.read() == "plain"


# sitecustomize


def run_python(
    code: str, *flags: str, program: str = sys.executable, **variables: str | None
) -> subprocess.CompletedProcess[str]:
    own = environment.environment_for(environment.Options(), "job", "/nowhere", os.environ)
    own = {name: value for name, value in {**own, **variables}.items() if value is not None}
    return subprocess.run([program, *flags, "-c", code], env=own, capture_output=True, text=True, timeout=100)


SHOW = (
    "import json, sys; print(json.dumps([sys.path, 'sitecustomize' in sys.modules, "
    "any(type(finder).__name__ == 'AfterImport' for finder in sys.meta_path), "
    "[name for name in ('torch', 'numpy') if name in sys.modules]]))"
)


def test_the_program_starts_with_hooks_and_without_a_trace_of_our_folder() -> None:
    plain = subprocess.run([sys.executable, "-c", SHOW], capture_output=True, text=True)
    path, has_sitecustomize, _, heavy = json.loads(plain.stdout)
    done = run_python(SHOW)
    assert done.stderr == ""
    assert json.loads(done.stdout) == [path, has_sitecustomize, True, heavy] != []
    assert heavy == []


def test_a_child_of_the_program_is_reached_too() -> None:
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {SHOW!r}])"
    assert json.loads(run_python(code).stdout)[2] is True


def test_the_users_own_sitecustomize_runs(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.mine = __file__\n")
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    own = environment.environment_for(
        environment.Options(), "job", "/nowhere", {**os.environ, "PYTHONPATH": path}
    )
    done = run_python(
        "import sys; print(sys.mine, sys.modules['sitecustomize'].__file__)", PYTHONPATH=own["PYTHONPATH"]
    )
    assert done.stderr == ""
    assert done.stdout.split() == [str(tmp_path / "sitecustomize.py")] * 2


def test_a_mistake_in_the_users_sitecustomize_is_told_as_without_us(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("1 / 0\n")
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    plain = subprocess.run(
        [sys.executable, "-c", ""],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    own = environment.environment_for(
        environment.Options(), "job", "/nowhere", {**os.environ, "PYTHONPATH": path}
    )
    assert run_python("", PYTHONPATH=own["PYTHONPATH"]).stderr == plain.stderr != ""


@pytest.mark.parametrize("flags", [["-I"], ["-E"], ["-S"]])
def test_a_python_that_reads_no_environment_runs_as_it_is(flags: list[str]) -> None:
    done = run_python("print('ran')", *flags)
    assert (done.returncode, done.stdout, done.stderr) == (0, "ran\n", "")


def test_a_python_without_hotset_runs_as_it_is_and_is_told_of(tmp_path: Path) -> None:
    venv.create(tmp_path / "venv", with_pip=False)
    other = str(tmp_path / "venv" / "bin" / "python")
    inject = environment.environment_for(environment.Options(), "job", "", {})["PYTHONPATH"]
    done = run_python("print('ran')", program=other, PYTHONPATH=inject, HOTSET_LEDGER=str(tmp_path))
    assert (done.returncode, done.stdout, done.stderr) == (0, "ran\n", "")
    assert (tmp_path / "unreached").read_text().split() == [other]
