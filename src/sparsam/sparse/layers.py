"""Linear layers that keep active blocks only (compact storage), and the dense layer they come from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import nn

from sparsam.kernels.format_linear import format_block_linear, format_linear
from sparsam.kernels.formats import Products
from sparsam.kernels.index import BlockIndex, blocks_from_dense, build_index, dense_from_blocks
from sparsam.kernels.operands import as_autocast
from sparsam.kernels.ops import backend, block_linear
from sparsam.kernels.packed import PackedWeights, pack, packed_block_linear
from sparsam.kernels.reference import activate
from sparsam.shards import own, own_part
from sparsam.sparse.patterns import Block

__all__ = ["ActivatedLinear", "Freezable", "SparseLinear"]


class ActivatedLinear(nn.Linear):
    """nn.Linear and an activation in one module, so that the kernel of a sparse one can apply both.

    Args:
        in_features: K.
        out_features: N.
        bias: whether there is one.
        activation: none, relu, relu2 (the square of relu), gelu, gelu_tanh or silu.

    Attributes:
        formats: of its three products; None leaves them to autocast.
    """

    formats: Products | None = None

    def __init__(self, in_features: int, out_features: int, bias: bool = True, activation: str = "gelu") -> None:
        super().__init__(in_features, out_features, bias)
        activate(torch.zeros(1), activation)  # refuses an unknown name here, not in the first step
        self.activation = activation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.formats is not None:
            return format_linear(x, self.weight, self.bias, self.formats, self.activation)
        return activate(super().forward(x), self.activation)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, activation={self.activation}"


class Freezable(nn.Module):
    """A layer with a frozen inference state, in which its weights are laid out once for the machine."""

    def freeze(self) -> None:
        """Into that state; changed weights are not seen."""
        raise NotImplementedError

    def unfreeze(self) -> None:
        """Out of it."""
        raise NotImplementedError


class SparseLinear(Freezable):
    """act(x W^T + bias) where only some blocks of W exist, are stored, trained and computed.

    The parameter `values` (S, R, C) holds the blocks; `block_row` and `block_col` (int32, S) say where each slot's
    block is. A slot never moves and their number never changes: a rewire gives a slot a new address. Built directly,
    values and bias start at zero; `from_dense` brings those of a dense layer.

    Args:
        in_features: K.
        out_features: N.
        topology: bool (RB, CB), the active blocks; True = active.
        pattern: the block size.
        bias: whether there is one.
        activation: fused into the product, see `ActivatedLinear`.
        slots: S, at least the number of active blocks (the default); more leaves headroom for methods that move
            density between layers.
        product: "kernel" multiplies blocks; "dense" scatters them and multiplies the dense matrix, for shapes where
            that measures faster.

    Attributes:
        formats: of its three products; None leaves them to autocast. A frozen layer ignores them.

    Shape:
        x (..., K) -> (..., N).
    """

    formats: Products | None = None
    values: nn.Parameter
    block_row: torch.Tensor
    block_col: torch.Tensor
    row_start: torch.Tensor
    row_slots: torch.Tensor
    col_start: torch.Tensor
    col_slots: torch.Tensor

    def __init__(
        self,
        in_features: int,
        out_features: int,
        topology: torch.Tensor,
        pattern: Block,
        *,
        bias: bool = True,
        activation: str = "none",
        slots: int | None = None,
        product: Literal["kernel", "dense"] = "kernel",
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.pattern, self.activation, self.product = pattern, activation, product
        self.grid = pattern.grid((out_features, in_features))
        if tuple(topology.shape) != self.grid:
            raise ValueError(
                f"SparseLinear: expected a topology of {self.grid} for {out_features} x {in_features} in {pattern}, "
                f"got {tuple(topology.shape)}."
            )
        row, col = topology.nonzero(as_tuple=True)
        slots = len(row) if slots is None else slots
        if slots < len(row):
            raise ValueError(f"SparseLinear: expected at least {len(row)} slots for the active blocks, got {slots}.")
        dead = row.new_full((slots - len(row),), -1)
        self.values = nn.Parameter(torch.zeros(slots, pattern.rows, pattern.cols, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.zeros(out_features, device=device, dtype=dtype)) if bias else None
        self.register_buffer("block_row", torch.cat([row, dead]).int().to(device))
        self.register_buffer("block_col", torch.cat([col, dead]).int().to(device))
        self._packed: dict[tuple[torch.dtype, str], PackedWeights | None] | None = None
        for name in ("row_start", "row_slots", "col_start", "col_slots"):
            self.register_buffer(name, torch.empty(0, dtype=torch.int32), persistent=False)
        self.rebuild_index()
        self.probe: torch.Tensor | None = None
        self.attached = False

    @classmethod
    def from_dense(
        cls,
        linear: nn.Linear,
        topology: torch.Tensor,
        pattern: Block,
        *,
        slots: int | None = None,
        product: Literal["kernel", "dense"] = "kernel",
    ) -> SparseLinear:
        """The active blocks of a dense layer, on its device and of its type."""
        sparse = cls(
            linear.in_features,
            linear.out_features,
            topology,
            pattern,
            bias=linear.bias is not None,
            activation=linear.activation if isinstance(linear, ActivatedLinear) else "none",
            slots=slots,
            product=product,
            device=linear.weight.device,
            dtype=linear.weight.dtype,
        )
        with torch.no_grad():
            sparse.values.copy_(sparse.gather(linear.weight))
            if sparse.bias is not None:
                sparse.bias.copy_(linear.bias)
        sparse.values.requires_grad_(linear.weight.requires_grad)
        if sparse.bias is not None:
            sparse.bias.requires_grad_(linear.bias.requires_grad)
        return sparse.train(linear.training)

    def to_dense(self) -> nn.Linear:
        """The ordinary layer with the same weights, exactly; zeros where there is no block."""
        with torch.device(self.values.device):
            if self.activation == "none":
                dense = nn.Linear(self.in_features, self.out_features, self.bias is not None)
            else:
                dense = ActivatedLinear(self.in_features, self.out_features, self.bias is not None, self.activation)
        dense.weight = nn.Parameter(self.weight.clone(), requires_grad=self.values.requires_grad)
        if self.bias is not None:
            dense.bias = nn.Parameter(self.bias.detach().clone(), requires_grad=self.bias.requires_grad)
        return dense.train(self.training)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[-1] != self.in_features:
            raise ValueError(f"SparseLinear: expected x of (..., {self.in_features}), got {tuple(x.shape)}.")
        formats = None if self._packed is not None else self.formats
        if self.product == "dense":
            weight = dense_from_blocks(self.values, self.block_row, self.block_col, self.out_features, self.in_features)
            if self.probe is not None:
                weight = weight + self.probe.to(weight.dtype)
            if formats is not None:
                return format_linear(x, weight, self.bias, formats, self.activation)
            return activate(F.linear(x, weight, self.bias), self.activation)
        if self._packed is not None:
            return self._frozen_forward(x, self._packed)
        operands = x, self.values, self.index, self.out_features, self.bias, self.activation
        if formats is not None:
            return format_block_linear(*operands, formats, self.probe)
        return block_linear(*operands, self.probe)

    @property
    def index(self) -> BlockIndex:
        """Addresses and orders of the slots, as the kernels take them."""
        return BlockIndex(
            self.block_row, self.block_col, self.row_start, self.row_slots, self.col_start, self.col_slots
        )

    @property
    def topology(self) -> torch.Tensor:
        """bool (RB, CB), True = active block."""
        live = self.block_row >= 0
        topology = torch.zeros(self.grid, dtype=torch.bool, device=self.block_row.device)
        if not live.is_meta:
            topology[self.block_row[live].long(), self.block_col[live].long()] = True
        return topology

    @property
    def density(self) -> float:
        """Active share of the blocks."""
        return int((self.block_row >= 0).sum()) / (self.grid[0] * self.grid[1])

    @property
    def weight(self) -> torch.Tensor:
        """The dense (N, K) weight, a read-only copy: what is written to it is lost."""
        return self.scatter(self.values.detach())

    def scatter(self, entries: torch.Tensor) -> torch.Tensor:
        """Entries (S, R, C) at their places in a dense (N, K)."""
        return dense_from_blocks(entries, self.block_row, self.block_col, self.out_features, self.in_features)

    def gather(self, dense: torch.Tensor) -> torch.Tensor:
        """Entries (S, R, C) of a dense (N, K); zero in dead slots and padding."""
        return blocks_from_dense(dense, self.block_row, self.block_col, self.pattern.rows, self.pattern.cols)

    @torch.no_grad()
    def rewire(self, topology: torch.Tensor) -> torch.Tensor:
        """Gives the slots of dropped blocks to grown ones, with values of zero; kept blocks stay where they are.

        Args:
            topology: bool (RB, CB) with no more active blocks than there are slots.

        Returns:
            bool (S), the slots whose contents begin anew (or died).
        """
        before = self.topology
        grown_row, grown_col = (topology & ~before).nonzero(as_tuple=True)
        live = self.block_row >= 0
        stays = torch.zeros_like(live)
        stays[live] = topology[self.block_row[live].long(), self.block_col[live].long()]
        free = (~stays).nonzero().flatten()
        if len(free) < len(grown_row):
            raise ValueError(
                f"rewire: expected at most {len(live)} active blocks (the slots of this layer), got "
                f"{int(topology.sum())}. Give the layer headroom: sparsify(..., headroom=)."
            )
        taken = free[: len(grown_row)]
        for address, grown in ((self.block_row, grown_row), (self.block_col, grown_col)):
            address[free] = -1
            address[taken] = grown.int()
        changed = ~stays
        changed[free[len(grown_row) :]] &= live[free[len(grown_row) :]]
        own(self.values)[own_part(changed, self.values)] = 0
        self.rebuild_index()
        return changed

    def empty(self, slots: int) -> None:
        """Begins anew with so many slots, all of them dead, for whoever loads weights and addresses next."""
        self.values = nn.Parameter(self.values.new_zeros(slots, *self.values.shape[1:]), self.values.requires_grad)
        self.block_row, self.block_col = (old.new_full((slots,), -1) for old in (self.block_row, self.block_col))

    def freeze(self) -> None:
        """Packs the weights for inference. The layer refuses training until `unfreeze`; changed values are not seen."""
        self._packed = {}

    def unfreeze(self) -> None:
        """Drops the packs."""
        self._packed = None

    def train(self, mode: bool = True) -> SparseLinear:
        if mode:
            self.unfreeze()
        return super().train(mode)

    def _frozen_forward(
        self, x: torch.Tensor, packs: dict[tuple[torch.dtype, str], PackedWeights | None]
    ) -> torch.Tensor:
        if torch.is_grad_enabled() and (x.requires_grad or self.values.requires_grad):
            raise ValueError("SparseLinear: frozen for inference. Call it under torch.no_grad(), or unfreeze() first.")
        x = as_autocast(x)  # as block_linear does: the pack is of the type that the product runs in
        kind = x.dtype, _instruction_set()
        if kind not in packs:
            packs[kind] = pack(self.values, self.index, self.in_features, self.out_features, x.dtype)
        packed = packs[kind]
        if packed is None:
            return block_linear(x, self.values, self.index, self.out_features, self.bias, self.activation)
        return packed_block_linear(x, packed, self.bias, self.activation)

    def rebuild_index(self) -> None:
        """Sorts the slots again, for whoever has written to `block_row` and `block_col`."""
        self._drop_packs()
        rebuilt = build_index(self.block_row, self.block_col, *self.grid)
        for name in ("row_start", "row_slots", "col_start", "col_slots"):
            old, new = getattr(self, name), getattr(rebuilt, name)
            # written in place where it fits: a compiled graph keeps its inputs, and nothing is guarded anew
            if old.shape == new.shape and old.device == new.device:
                old.copy_(new)
            else:
                setattr(self, name, new)

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *args: Any) -> None:
        name = prefix[:-1] or "SparseLinear"
        values = state_dict.get(prefix + "values")
        fits = values is not None and values.shape[1:] == self.values.shape[1:]
        if values is not None and fits and len(values) != len(self.values):
            if self.values.grad is not None or self.attached or own(self.values) is not self.values:
                raise ValueError(
                    f"{name}: expected {len(self.values)} slots, got {len(values)}. "
                    "Load another density before the optimiser exists, and before fully_shard."
                )
            self.empty(len(values))
        row, col = state_dict.get(prefix + "block_row"), state_dict.get(prefix + "block_col")
        if fits and row is not None and col is not None and not self._has_places(row, col):
            # a kernel would read and write outside its tensors
            errors: list[str] = args[-1]
            errors.append(
                f"{name}: expected block addresses in {self.grid[0]} x {self.grid[1]}, each once, got others. "
                "Load the state of a layer of the same shape and pattern."
            )
            return
        super()._load_from_state_dict(state_dict, prefix, *args)
        # load_state_dict(assign=True) takes any integer type as it comes
        self.block_row, self.block_col = self.block_row.int().contiguous(), self.block_col.int().contiguous()
        self.rebuild_index()

    def _has_places(self, row: torch.Tensor, col: torch.Tensor) -> bool:
        """Whether addresses lie in the grid, no two on the same block; dead slots are -1 in both."""
        if row.is_meta or row.shape != col.shape:
            return row.is_meta
        live = row >= 0
        inside = live & (row < self.grid[0]) & (col >= 0) & (col < self.grid[1])
        position = row[live].long() * self.grid[1] + col[live].long()
        return bool((inside | (row == -1) & (col == -1)).all()) and len(position.unique()) == len(position)

    def _apply(self, *args: Any, **kwargs: Any) -> SparseLinear:
        self._drop_packs()
        super()._apply(*args, **kwargs)
        return self

    def _drop_packs(self) -> None:
        """What was packed is of other weights now; a frozen layer packs again at its next forward."""
        if self._packed is not None:
            self._packed = {}

    def __getstate__(self) -> dict[str, Any]:
        # a probe belongs to one backward and a pack to one machine
        return {**self.__dict__, "probe": None, "_packed": None, "attached": False}

    def extra_repr(self) -> str:
        extra = "" if self.activation == "none" else f", activation={self.activation}"
        extra += "" if self.product == "kernel" else ", product=dense"
        sparsity = "?" if self.block_row.is_meta else f"{1 - self.density:.3f}"
        return f"{self.in_features}, {self.out_features}, {self.pattern}, sparsity={sparsity}{extra}"


@torch.compiler.assume_constant_result
def _instruction_set() -> str:
    return backend()
