"""Low-rank adapters (LoRA) on a sparse base: merged into the units that exist, without filling the others."""

from __future__ import annotations

import torch
from torch import nn

from sparsam.sparse.layers import ActivatedLinear, SparseLinear
from sparsam.sparse.masked import masked_weights
from sparsam.sparse.weights import CompactWeight, MaskedWeight, SparseWeight, sparse_weights

__all__ = ["apply_topology", "merge_adapter"]


@torch.no_grad()
def merge_adapter(layer: nn.Module, down: torch.Tensor, up: torch.Tensor, scale: float = 1.0) -> float:
    """Adds scale * up @ down to a sparse layer's active units and sets `up` to zero.

    What is computed afterwards is the layer alone, whether or not the adapter is still called beside it, and a second
    merge changes nothing. The part of the update that falls on inactive units is lost: the return value says how much.

    Args:
        layer: a SparseLinear, or an nn.Linear whose weight is masked.
        down: (r, K), the adapter's first matrix (lora_A); only read.
        up: (N, r), its second one (lora_B); zero afterwards.
        scale: what the adapter multiplies its output by (lora_alpha / r).

    Returns:
        The share of the update's squared norm that fell on inactive units, in [0, 1]; 0 for an update of zero.

    Raises:
        ValueError: the layer is not sparse or applies an activation, the shapes do not fit, or what comes out is not
            finite. Nothing is changed then.

    Source: Hu et al. 2021, arXiv:2106.09685, section 4.1. Differs: the merged update is masked.
    """
    weight = _sparse_weight(layer)
    shape = weight.dense_shape
    if down.dim() != 2 or up.dim() != 2 or (len(up), down.shape[1]) != shape or len(down) != up.shape[1]:
        raise ValueError(
            f"merge_adapter: expected down (r, {shape[1]}) and up ({shape[0]}, r), "
            f"got {tuple(down.shape)} and {tuple(up.shape)}."
        )
    parameter = weight.parameter
    # multiplied and added wide, rounded once: a small update would vanish in a product of half precision
    wide = torch.promote_types(parameter.dtype, torch.float32)
    update = scale * (up.to(parameter.device, wide) @ down.to(parameter.device, wide))
    entries = layer.gather(update) if isinstance(layer, SparseLinear) else torch.where(weight.active, update, 0.0)
    merged = (parameter + entries).to(parameter.dtype)
    if not (update.isfinite().all() and merged.isfinite().all()):
        raise ValueError("merge_adapter: expected finite weights, got inf or NaN. Look at the adapter's training.")
    parameter.copy_(merged)
    weight.buffers_changed()  # a frozen layer packs its new values
    up.zero_()
    whole, kept = (float(part.square().sum(dtype=torch.float64)) for part in (update, entries))
    return max(0.0, 1.0 - kept / whole) if whole else 0.0


@torch.no_grad()
def apply_topology(model: nn.Module) -> int:
    """Sets every weight outside the topologies to zero again, after other code wrote into them (PEFT's merge, say).

    Args:
        model: one with sparse layers, wrapped or not.

    Returns:
        How many entries were not zero.

    Raises:
        ValueError: the model has no sparse layer.
    """
    weights = sparse_weights(model)
    if not weights:
        raise ValueError(
            "apply_topology: expected a model with sparse layers, got none. Call sparsify(model, ...) first."
        )
    changed = 0
    for weight in weights.values():
        outside = ~weight.active.expand_as(weight.parameter)
        changed += int(weight.parameter[outside].count_nonzero())
        weight.parameter.masked_fill_(outside, 0.0)
        weight.buffers_changed()  # a frozen layer packs its new values
    return changed


def _sparse_weight(layer: nn.Module) -> SparseWeight:
    if isinstance(layer, SparseLinear | ActivatedLinear) and layer.activation != "none":
        raise ValueError(
            f"merge_adapter: expected a layer without an activation, got one with {layer.activation}: what an adapter "
            "beside it adds comes after that. Put adapters on layers without one."
        )
    if isinstance(layer, SparseLinear):
        return CompactWeight("", layer)
    for buffer in masked_weights(layer):
        if isinstance(layer, nn.Linear) and buffer.weight_name == "weight":
            return MaskedWeight("", buffer)
    raise ValueError(
        f"merge_adapter: expected a SparseLinear or an nn.Linear with a masked weight, got {type(layer).__name__}. "
        "To a dense layer's weight add scale * up @ down."
    )
