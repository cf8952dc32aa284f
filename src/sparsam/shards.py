"""Tensors of which every rank holds a part (FSDP2's DTensors), read and written like those that every rank has whole.

    entries = whole(moment)          # gathered; every rank takes part
    entries[changed] = 0
    write(moment, entries)           # each rank keeps its own part

A tensor that is not sharded comes and goes as it is, without a copy.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor, nn

if dist.is_available():  # some builds of torch come without: then nothing is sharded
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor, distribute_tensor

__all__ = ["is_part", "is_sharded", "is_unit", "own", "own_part", "refuse_sharded", "total_norm", "whole", "write"]


def is_part(tensor: Tensor) -> TypeGuard[DTensor]:
    """Whether this rank holds a part of the tensor."""
    return dist.is_available() and isinstance(tensor, DTensor)


def is_unit(module: nn.Module) -> TypeGuard[FSDPModule]:
    """Whether `fully_shard` was called on this very module."""
    return dist.is_available() and isinstance(module, FSDPModule)


def is_sharded(model: nn.Module) -> bool:
    """Whether any of a model is under `fully_shard`."""
    return any(is_unit(module) for module in model.modules())


def refuse_sharded(model: nn.Module, what: str, advice: str) -> None:
    """For whoever needs weights that are whole.

    Raises:
        ValueError: the model is under `fully_shard`.
    """
    if is_sharded(model):
        raise ValueError(f"{what}: expected a model that is whole on every rank, got one under fully_shard. {advice}")


@torch.no_grad()
def whole(tensor: Tensor) -> Tensor:
    """All of a tensor, on every rank. Of one that is sharded a copy, and all ranks must come here."""
    return tensor.full_tensor() if is_part(tensor) else tensor


@torch.no_grad()
def own(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor, in the same memory."""
    return tensor.to_local() if is_part(tensor) else tensor


def own_part(entries: Tensor, like: Tensor) -> Tensor:
    """Of what every rank has whole, the part that this rank holds of another tensor of as many rows."""
    if not is_part(like):
        return entries
    # source None: no rank sends anything
    return own(distribute_tensor(entries, like.device_mesh, like.placements, src_data_rank=None))


@torch.no_grad()
def write(tensor: Tensor, entries: Tensor) -> None:
    """tensor = entries, which every rank has whole."""
    if entries is not tensor:
        own(tensor).copy_(own_part(entries, tensor))


def total_norm(tensors: Iterable[Tensor], order: float = 2.0) -> Tensor:
    """The norm of all tensors together, the same on every rank that holds a part of them; NaN where a value is.

    float32 scalar; 0 of nothing.
    """
    tensors = list(tensors)
    # torch has no largest value of none, and a part may be empty
    parts = [part for part in map(own, tensors) if part.numel()]
    mesh = next((tensor.device_mesh for tensor in tensors if is_part(tensor)), None)
    device = tensors[0].device if tensors else None
    norm = torch.nn.utils.get_total_norm(parts, order) if parts else torch.zeros((), device=device)
    if mesh is None:
        return norm
    group = mesh.get_group(mesh.ndim - 1)  # of several meshes the last one shards, the others hold copies
    # gathered and not reduced: the largest of two numbers may forget that one was NaN
    norms = [torch.empty((), device=device) for _ in range(dist.get_world_size(group))]
    dist.all_gather(norms, norm.float(), group=group)
    stacked = torch.stack(norms)
    return stacked.max() if math.isinf(order) else torch.linalg.vector_norm(stacked, order)
