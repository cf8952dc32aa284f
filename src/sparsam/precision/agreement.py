"""What ranks must agree on to decide alike; alone, everything is as given."""

from __future__ import annotations

from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["mean_over_ranks", "of_rank_zero", "on_all_ranks"]

T = TypeVar("T")


def on_all_ranks(flag: bool, device: torch.device) -> bool:
    """Whether it is so on every rank."""
    if _ranks() == 1:
        return flag
    agreed = torch.tensor(float(flag), device=device)
    dist.all_reduce(agreed, dist.ReduceOp.MIN)
    return bool(agreed)


def mean_over_ranks(value: Tensor) -> float:
    """The mean of what ranks measured on their own batches."""
    if _ranks() == 1:
        return float(value)
    total = value.clone()
    dist.all_reduce(total)
    return float(total) / _ranks()


def of_rank_zero(value: T) -> T:
    """What rank 0 has."""
    if _ranks() == 1:
        return value
    shared = [value]
    dist.broadcast_object_list(shared)
    return shared[0]


def _ranks() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
