"""Which saved tensors are a model's own: weights and buffers, and views of them, that are there anyway. And a check
for those that stay where they are: autograd looks no longer whether they were written into where there are hooks."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain

import torch
from torch import Tensor, nn

__all__ = ["kept", "own_storages", "storage_of", "unchanged"]


def storage_of(tensor: Tensor) -> tuple[str, int] | None:
    """Where a tensor's memory lies, the same for all views of it; None where it has none of its own."""
    local = getattr(tensor, "_local_tensor", tensor)  # the shard of a DTensor
    if local.layout is not torch.strided or local.device.type == "meta":
        return None
    return str(local.device), local.untyped_storage().data_ptr()


def own_storages(model: nn.Module) -> set[tuple[str, int] | None]:
    """Those of a model's parameters and buffers."""
    tensors: Iterable[Tensor] = chain(model.parameters(), model.buffers())
    return {storage_of(tensor) for tensor in tensors} - {None}


def kept(tensor: Tensor) -> tuple[Tensor, int]:
    """A saved tensor and its version; detached, for an operator's own result would hold on to the operator."""
    return tensor.detach(), tensor._version


def unchanged(packed: tuple[Tensor, int], part: str) -> Tensor:
    """What `kept` kept, for `part`.

    Raises:
        RuntimeError: it was written into since.
    """
    tensor, version = packed
    if tensor._version != version:
        raise RuntimeError(
            f"{part}: expected a {tuple(tensor.shape)} tensor as the forward saved it for the backward, got one "
            "that was written into since. Compute out of place."
        )
    return tensor
