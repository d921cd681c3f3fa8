"""``make matrix`` tests what pyproject.toml promises: the oldest environment is its lower bounds."""

from __future__ import annotations

import re
from pathlib import Path

from matrix import ENVIRONMENTS

ROOT = Path(__file__).parents[2]


def test_the_oldest_environment_has_the_lower_bound_of_each_dependency() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    needed = re.search(r"^dependencies = \[(.*?)^\]", text, re.M | re.S)
    assert needed is not None
    extras = re.findall(r"^(?:monai|ray) = \[(.*)\]", text, re.M)
    bounds = dict(re.findall(r'"([\w-]+)>=([\d.]+)"', needed[1] + "".join(extras)))
    pins = dict(
        re.findall(r"^([\w-]+)==([\d.]+)$", (ROOT / ENVIRONMENTS["oldest"].constraints).read_text(), re.M)
    )
    assert {"torch", "numpy", "typer", "ray"} <= set(bounds)
    for name, bound in bounds.items():
        assert f"{pins[name]}.".startswith(f"{bound}."), name


def test_the_oldest_environment_has_the_oldest_python() -> None:
    said = re.search(r'^requires-python = ">=(\d+)\.(\d+)"$', (ROOT / "pyproject.toml").read_text(), re.M)
    assert said is not None
    assert ENVIRONMENTS["oldest"].python == (int(said[1]), int(said[2]))


def test_each_file_of_constraints_exists() -> None:
    for name, environment in ENVIRONMENTS.items():
        assert (ROOT / environment.constraints).is_file(), name
