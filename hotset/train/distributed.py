"""What training needs to know of the other ranks of its job: which one this is, and sums over all of them."""

from __future__ import annotations

import torch
import torch.distributed as dist

__all__ = ["rank_of_job", "sum_over_ranks"]


def rank_of_job() -> tuple[int, int]:
    """This process's rank and the number of ranks: ``(0, 1)`` where ``torch.distributed`` is not in use.

    Example:
        >>> rank_of_job()
        (0, 1)
    """
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def sum_over_ranks(values: torch.Tensor) -> torch.Tensor:
    """The sum of this tensor over all ranks; each must ask."""
    if rank_of_job()[1] == 1:
        return values
    total = values.clone()
    dist.all_reduce(total)
    return total
