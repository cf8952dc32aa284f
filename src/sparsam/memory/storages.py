"""Which saved tensors are a model's own: weights and buffers, and views of them, that are there anyway."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain

import torch
from torch import Tensor, nn

__all__ = ["own_storages", "storage_of"]


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
