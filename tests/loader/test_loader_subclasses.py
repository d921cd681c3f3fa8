"""Samples of torchvision's and MONAI's tensor classes; apart, as a process with them takes long to fork."""

from __future__ import annotations

from functools import partial

import pytest
from sources import Samples
from test_loader_equals_torch import SAMPLERS, check_equal


@pytest.mark.parametrize("workers", [0, 2])
def test_equal_for_tensor_subclasses(workers: int) -> None:
    from subclasses import boxes_and_masks, meta_tensors

    for make in (boxes_and_masks, meta_tensors):
        make(0)  # libraries draw as they are imported
        check_equal(partial(Samples, make, 9), list, SAMPLERS["shuffle"], num_workers=workers)
