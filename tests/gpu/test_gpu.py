"""All checks on the machine's GPU, and the table of figures; one line that says so where there is none."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("no GPU here: sinking on one is not tested", allow_module_level=True)

from .checks import CHECKS
from .figures import measure, table


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_on_the_gpu(check: Callable[[str], None]) -> None:
    check("cuda")


@pytest.mark.timeout(1200)
def test_figures_can_be_measured(capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing is asserted of them: they are the machine's. The table is printed."""
    report = measure("cuda", tiny=False)
    with capsys.disabled():
        print("\n" + table(report))
    assert {figure["name"] for figure in report["figures"]}
