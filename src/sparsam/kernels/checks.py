"""What the torch operators refuse before a kernel reads memory. It looks at shapes, types and devices alone."""

from __future__ import annotations

import torch

from sparsam.kernels import cpu
from sparsam.kernels.index import BlockIndex

__all__ = ["check_linear", "refuse_second_order"]


def check_linear(
    x: torch.Tensor,
    values: torch.Tensor,
    index: BlockIndex,
    out_features: int,
    bias: torch.Tensor | None,
    activation: str,
    probe: torch.Tensor | None = None,
    *,
    name: str = "block_linear",
) -> None:
    """Refuses whatever would let a kernel read or write outside a tensor.

    Args:
        x, values, index, out_features, bias, activation, probe: as `block_linear` takes them.
        name: the function that the messages speak of.

    Raises:
        ValueError: a shape, dtype or device does not fit.
    """
    device = x.device
    for field, tensor in zip(BlockIndex._fields, index, strict=True):
        if tensor.dtype != torch.int32 or tensor.dim() != 1 or not tensor.is_contiguous():
            raise ValueError(
                f"{name}: expected {field} as one contiguous row of int32, got {tensor.dtype} of "
                f"{tuple(tensor.shape)} with strides {tensor.stride()}. build_index makes them so."
            )
        if tensor.device != device:
            raise _elsewhere(name, field, tensor, device)
    if values.dim() != 3 or 0 in values.shape[1:]:
        raise ValueError(f"{name}: expected values of (slots, rows, cols), got {tuple(values.shape)}. Reshape them.")
    if x.dim() == 0:
        raise ValueError(f"{name}: expected x of (..., K), got one number. Give it a dimension of K = in_features.")
    slots, rows, cols = values.shape
    grid = index.row_start.shape[0] - 1, index.col_start.shape[0] - 1
    if any(tensor.shape[0] != slots for tensor in (index.block_row, index.block_col, index.row_slots, index.col_slots)):
        raise ValueError(f"{name}: expected an index of {slots} slots, got one of {_lengths(index)}. See build_index.")
    # -(-a // b) rounds up: edge blocks reach past the layer
    if -(-out_features // rows) != grid[0] or -(-x.shape[-1] // cols) != grid[1]:
        raise ValueError(
            f"{name}: expected x with K and out_features that make {grid[0]} x {grid[1]} blocks of "
            f"{rows} x {cols}, got K = {x.shape[-1]} and out_features = {out_features}. Build the index for this layer."
        )
    if values.device != device:
        raise _elsewhere(name, "values", values, device)
    if activation not in cpu.ACTIVATIONS:
        raise ValueError(
            f"{name}: expected an activation of {', '.join(cpu.ACTIVATIONS)}, got {activation!r}. "
            "Apply any other one after the layer."
        )
    if bias is not None:
        if bias.shape != (out_features,):
            raise ValueError(
                f"{name}: expected a bias of ({out_features},), got {tuple(bias.shape)}. Give one number per output."
            )
        if bias.device != device:
            raise _elsewhere(name, "bias", bias, device)
    if probe is not None:
        if probe.shape not in (grid, (out_features, x.shape[-1])):
            raise ValueError(
                f"{name}: expected a probe of {grid} or ({out_features}, {x.shape[-1]}), got {tuple(probe.shape)}. "
                "Make it of one of the two shapes."
            )
        if probe.device != device:
            raise _elsewhere(name, "probe", probe, device)


def _elsewhere(name: str, what: str, tensor: torch.Tensor, device: torch.device) -> ValueError:
    return ValueError(f"{name}: expected {what} on {device} like x, got {tensor.device}. Move it there.")


def _lengths(index: BlockIndex) -> str:
    return ", ".join(f"{tensor.shape[0]} ({field})" for field, tensor in zip(BlockIndex._fields, index, strict=True))


def refuse_second_order(name: str, instead: str) -> None:
    """For a backward formula whose operators have none of their own: gradients of gradients would be zero in silence.

    Raises:
        ValueError: the backward is itself recorded.
    """
    if torch.is_grad_enabled():
        raise ValueError(f"{name}: expected a first-order backward, got create_graph=True. {instead}")
