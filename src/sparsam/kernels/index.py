"""Where the blocks of a compact layer are: their addresses, and the two orders in which kernels walk them."""

from __future__ import annotations

from typing import NamedTuple

import torch

__all__ = ["BlockIndex", "blocks_from_dense", "build_index", "dense_from_blocks"]


class BlockIndex(NamedTuple):
    """Addresses of the slots and both sorted orders, all int32. S slots, RB block rows, CB block columns.

    Attributes:
        block_row: (S) block row of each slot; -1 = dead slot.
        block_col: (S) block column of each slot; -1 = dead slot.
        row_start: (RB + 1) block row r owns row_slots[row_start[r] : row_start[r + 1]].
        row_slots: (S) live slots sorted by (block row, block column), then the dead ones.
        col_start: (CB + 1) the same by block column.
        col_slots: (S) live slots sorted by (block column, block row), then the dead ones.
    """

    block_row: torch.Tensor
    block_col: torch.Tensor
    row_start: torch.Tensor
    row_slots: torch.Tensor
    col_start: torch.Tensor
    col_slots: torch.Tensor


def build_index(block_row: torch.Tensor, block_col: torch.Tensor, block_rows: int, block_cols: int) -> BlockIndex:
    """Sorts the slots both ways. Shapes depend on S, RB and CB only, so a rewire changes no shape.

    Args:
        block_row: integers (S), -1 = dead. Those that are not contiguous int32 are copied.
        block_col: the same.
        block_rows: RB.
        block_cols: CB.
    """
    # as the kernels read them; tensors that fit are kept, so whoever holds them sees what is written to them
    block_row, block_col = block_row.int().contiguous(), block_col.int().contiguous()
    if block_row.is_meta:
        sizes = (block_rows + 1, len(block_row), block_cols + 1, len(block_row))
        return BlockIndex(block_row, block_col, *(block_row.new_empty(size) for size in sizes))
    row, col = block_row.long(), block_col.long()
    dead = row < 0
    last = block_rows * block_cols
    row_slots = torch.argsort((row * block_cols + col).masked_fill(dead, last), stable=True)
    col_slots = torch.argsort((col * block_rows + row).masked_fill(dead, last), stable=True)
    return BlockIndex(
        block_row,
        block_col,
        _starts(row, block_rows),
        row_slots.int(),
        _starts(col, block_cols),
        col_slots.int(),
    )


def dense_from_blocks(
    values: torch.Tensor, block_row: torch.Tensor, block_col: torch.Tensor, out_features: int, in_features: int
) -> torch.Tensor:
    """The dense (N, K) weight of values (S, R, C); differentiable in values."""
    _, rows, cols = values.shape
    block_rows, block_cols = -(-out_features // rows), -(-in_features // cols)
    # one block more than the grid takes what dead slots hold
    grid = values.new_zeros(block_rows * block_cols + 1, rows, cols)
    grid = grid.index_put((_position(block_row, block_col, block_rows, block_cols),), values)
    grid = grid[:-1].view(block_rows, block_cols, rows, cols)
    dense = grid.permute(0, 2, 1, 3).reshape(block_rows * rows, block_cols * cols)
    return dense[:out_features, :in_features]


def blocks_from_dense(
    dense: torch.Tensor, block_row: torch.Tensor, block_col: torch.Tensor, rows: int, cols: int
) -> torch.Tensor:
    """The blocks (S, R, C) of a dense (N, K) matrix at the given addresses; dead slots and padding are zero."""
    out_features, in_features = dense.shape
    block_rows, block_cols = -(-out_features // rows), -(-in_features // cols)
    padding = (0, block_cols * cols - in_features, 0, block_rows * rows - out_features)
    padded = torch.nn.functional.pad(dense, padding)
    grid = padded.view(block_rows, rows, block_cols, cols).permute(0, 2, 1, 3).flatten(0, 1)
    grid = torch.cat([grid, grid.new_zeros(1, rows, cols)])
    return grid[_position(block_row, block_col, block_rows, block_cols)]


def _position(block_row: torch.Tensor, block_col: torch.Tensor, block_rows: int, block_cols: int) -> torch.Tensor:
    position = block_row.long() * block_cols + block_col.long()
    return torch.where(block_row < 0, block_rows * block_cols, position)


def _starts(position: torch.Tensor, count: int) -> torch.Tensor:
    """Running count of live slots before each block row or column: int32 (count + 1)."""
    counts = torch.bincount(position.clamp(min=-1) + 1, minlength=count + 1)[1:]
    return torch.cat([counts.new_zeros(1), counts.cumsum(0)]).int()
