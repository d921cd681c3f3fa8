"""All checks on the machine's GPU; one line that says so where there is none."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("no GPU here: sinking on one is not tested", allow_module_level=True)

from .checks import CHECKS, LAST


@pytest.mark.parametrize("check", CHECKS + LAST, ids=lambda check: check.__name__)
def test_on_the_gpu(check: Callable[[str], None]) -> None:
    check("cuda")
