"""Linear layers whose weights are integers, for inference: int8 codes for rows and blocks, int4 codes in groups.

They hold no parameters, so no optimiser sees them. `quantise` makes them; on disk they are what `deploy/storage.py`
says. Shape letters: T tokens, K in, N out, S blocks of (R, C), G group size.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparsam import formats
from sparsam.kernels.index import blocks_from_dense, dense_from_blocks
from sparsam.kernels.int8 import int8_block_linear, int8_linear, quantise_rows, quantise_tensor
from sparsam.kernels.int8_packed import Int8Pack, pack_int8, packed_int8_linear
from sparsam.kernels.operands import NATIVE_DTYPES
from sparsam.kernels.reference import activate
from sparsam.sparse.layers import ActivatedLinear, Freezable, SparseLinear
from sparsam.sparse.patterns import Block

__all__ = ["GroupQuantisedLinear", "QuantisedLinear", "QuantisedSparseLinear", "pack_int4", "unpack_int4"]


class _Quantised(nn.Module):
    """What the three have in common: shapes, the bias in float32, the activation, the scale of the input."""

    bias: Tensor | None
    input_scale: Tensor | None

    def __init__(
        self, in_features: int, out_features: int, bias: bool, activation: str, input_scale: float | None = None
    ) -> None:
        super().__init__()
        self.in_features, self.out_features, self.activation = in_features, out_features, activation
        self.register_buffer("bias", torch.zeros(out_features) if bias else None)
        self.register_buffer("input_scale", None if input_scale is None else torch.tensor(float(input_scale)))

    @property
    def weight(self) -> Tensor:
        """The dense float32 (N, K) weight that the codes stand for, a read-only copy."""
        raise NotImplementedError

    def _product(self, rows: Tensor) -> Tensor:
        """float32 (T, N) of rows (T, K), bias included."""
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[-1] != self.in_features:
            raise ValueError(f"{type(self).__name__}: expected x of (..., {self.in_features}), got {tuple(x.shape)}.")
        y = activate(self._product(x.reshape(-1, self.in_features)), self.activation)
        return y.to(x.dtype).view(*x.shape[:-1], self.out_features)

    def _input(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Codes of the input and their scale, (T, 1): that of calibration, or each row's own."""
        return quantise_rows(rows) if self.input_scale is None else quantise_tensor(rows, self.input_scale)

    def _apply(self, fn: Any, recurse: bool = True) -> _Quantised:
        """To another device, but never to another type: scales in 16 bits would be others."""
        kept = {name: one.dtype for name, one in self._buffers.items() if one is not None}
        before = dict(self._buffers)
        super()._apply(fn, recurse)
        for name, dtype in kept.items():
            if (now := self._buffers[name]) is not None and now.dtype != dtype and (old := before[name]) is not None:
                self._buffers[name] = old.to(now.device)
        return self

    def extra_repr(self) -> str:
        extra = "" if self.activation == "none" else f", activation={self.activation}"
        extra += "" if self.input_scale is None else f", input_scale={float(self.input_scale):.3g}"
        return f"{self.in_features}, {self.out_features}{extra}"


class QuantisedLinear(_Quantised):
    """act(x W^T + bias) of int8 weights with a scale for each output row, and int8 inputs; sums in int32, exactly.

    Inputs have a scale for each row (a row's output does not depend on the batch that it comes in), or the one that
    calibration found. The output is of x's type.

    Attributes:
        values: int8 (N, K).
        scale: float32 (N), never 0.
        bias: float32 (N) or None.
        input_scale: float32 () of calibration, or None.
    """

    values: Tensor
    scale: Tensor

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        activation: str = "none",
        input_scale: float | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, activation, input_scale)
        self.register_buffer("values", torch.zeros(out_features, in_features, dtype=torch.int8))
        self.register_buffer("scale", torch.ones(out_features))

    @classmethod
    def from_linear(cls, linear: nn.Linear, input_scale: float | None = None) -> QuantisedLinear:
        """The codes of a dense layer, on its device; zeros of its weight are zeros."""
        activation = linear.activation if isinstance(linear, ActivatedLinear) else "none"
        layer = cls(linear.in_features, linear.out_features, linear.bias is not None, activation, input_scale)
        layer.to(linear.weight.device)
        layer.values, layer.scale = _rows_of(linear.weight)
        _copy_bias(layer, linear.bias)
        return layer.train(linear.training)

    @property
    def weight(self) -> Tensor:
        return self.values.float() * self.scale[:, None]

    def _product(self, rows: Tensor) -> Tensor:
        return int8_linear(*self._input(rows), self.values, self.scale, self.bias)


class QuantisedSparseLinear(_Quantised, Freezable):
    """`QuantisedLinear` with a weight of which only some blocks exist; the scale of a row is shared by its blocks.

    Frozen (`sparsam.freeze`) it runs on the int8 kernels, with the same sums, where x is float32 or bfloat16; until
    then on plain PyTorch, which takes longer.

    Attributes:
        values: int8 (S, R, C), zero outside the weight.
        scale: float32 (N), never 0.
        block_row, block_col: int32 (S), in row-major order.
        bias, input_scale: as there.
        pattern: the block size.
    """

    values: Tensor
    scale: Tensor
    block_row: Tensor
    block_col: Tensor

    def __init__(
        self,
        in_features: int,
        out_features: int,
        topology: Tensor,
        pattern: Block,
        *,
        bias: bool = True,
        activation: str = "none",
        input_scale: float | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, activation, input_scale)
        self.pattern = pattern
        row, col = topology.nonzero(as_tuple=True)
        values = torch.zeros(len(row), pattern.rows, pattern.cols, dtype=torch.int8, device=topology.device)
        self.register_buffer("values", values)
        self.register_buffer("scale", torch.ones(out_features))
        self.register_buffer("block_row", row.int())
        self.register_buffer("block_col", col.int())
        self._pack: Int8Pack | None = None

    @classmethod
    def from_sparse(cls, sparse: SparseLinear, input_scale: float | None = None) -> QuantisedSparseLinear:
        """The codes of a block-sparse layer, on its device, without dead slots."""
        layer = cls(
            sparse.in_features,
            sparse.out_features,
            sparse.topology,
            sparse.pattern,
            bias=sparse.bias is not None,
            activation=sparse.activation,
            input_scale=input_scale,
        )
        codes, layer.scale = _rows_of(sparse.weight)
        layer.values = _blocks(codes, layer)
        _copy_bias(layer, sparse.bias)
        return layer.train(sparse.training)

    @property
    def weight(self) -> Tensor:
        codes = dense_from_blocks(self.values, self.block_row, self.block_col, self.out_features, self.in_features)
        return codes.float() * self.scale[:, None]

    @property
    def topology(self) -> Tensor:
        """bool (RB, CB), True = active block."""
        grid = self.pattern.grid((self.out_features, self.in_features))
        topology = torch.zeros(grid, dtype=torch.bool, device=self.values.device)
        topology[self.block_row.long(), self.block_col.long()] = True
        return topology

    def freeze(self) -> None:
        """Lays the codes out for the instruction set in use. Codes that change later are not seen, but for those that
        `load_state_dict` brings."""
        places = self.block_row, self.block_col
        self._pack = pack_int8(self.values, self.scale, *places, self.in_features, self.out_features)

    def unfreeze(self) -> None:
        """Drops that layout."""
        self._pack = None

    def train(self, mode: bool = True) -> QuantisedSparseLinear:
        if mode:
            self.unfreeze()
        return super().train(mode)

    def forward(self, x: Tensor) -> Tensor:
        if self._pack is None or x.dtype not in NATIVE_DTYPES:
            return super().forward(x)
        return packed_int8_linear(self._pack, x, self.bias, self.activation, x_scale=self.input_scale)

    def _apply(self, fn: Any, recurse: bool = True) -> QuantisedSparseLinear:
        super()._apply(fn, recurse)
        self._freeze_again()
        return self

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self._freeze_again()

    def _freeze_again(self) -> None:
        if self._pack is not None:
            self.freeze()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_pack": None}  # it belongs to one machine

    def _product(self, rows: Tensor) -> Tensor:
        addresses = self.block_row, self.block_col
        return int8_block_linear(*self._input(rows), self.values, self.scale, *addresses, self.bias, self.out_features)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, {self.pattern}, blocks={len(self.values)}"


class GroupQuantisedLinear(_Quantised):
    """act(x W^T + bias) of int4 weights, two in a byte, with a scale for each group along the input; x as it is.

    For memory: the weight is dequantised at each forward. A dense layer is one block; groups of block-sparse layers
    lie inside their blocks. The input is not quantised.

    Attributes:
        packed: uint8 (S, R, C / 2), see `pack_int4`.
        scale: bfloat16 (S, R, C / G), never 0.
        block_row, block_col: int32 (S).
        bias: as in `QuantisedLinear`.
        pattern: the block size; a dense layer's is its own shape.
        group: G.
    """

    packed: Tensor
    scale: Tensor
    block_row: Tensor
    block_col: Tensor

    def __init__(
        self,
        in_features: int,
        out_features: int,
        topology: Tensor,
        pattern: Block,
        group: int,
        *,
        bias: bool = True,
        activation: str = "none",
    ) -> None:
        super().__init__(in_features, out_features, bias, activation)
        if group < 2 or group % 2 or pattern.cols % group:
            raise ValueError(
                f"int4: expected an even group size that divides {pattern.cols} (the block's columns, or the layer's "
                f"input features), got {group}. Set group={_largest_group(pattern.cols, group)} or exclude the layer."
            )
        self.pattern, self.group = pattern, group
        row, col = topology.nonzero(as_tuple=True)
        shape, device = (len(row), pattern.rows), topology.device
        self.register_buffer("packed", torch.full((*shape, pattern.cols // 2), 0x88, dtype=torch.uint8, device=device))
        scale = torch.ones(*shape, pattern.cols // group, dtype=torch.bfloat16, device=device)
        self.register_buffer("scale", scale)
        self.register_buffer("block_row", row.int())
        self.register_buffer("block_col", col.int())

    @classmethod
    def from_layer(cls, layer: nn.Linear | SparseLinear, group: int) -> GroupQuantisedLinear:
        """The codes of a dense or block-sparse layer, on its device."""
        if isinstance(layer, SparseLinear):
            topology, pattern = layer.topology, layer.pattern
        else:
            topology = torch.ones(1, 1, dtype=torch.bool, device=layer.weight.device)
            pattern = Block(layer.out_features, layer.in_features)
        activation = "none" if type(layer) is nn.Linear else str(layer.activation)
        made = cls(
            layer.in_features,
            layer.out_features,
            topology,
            pattern,
            group,
            bias=layer.bias is not None,
            activation=activation,
        )
        groups = _blocks(layer.weight.detach().float(), made).unflatten(-1, (-1, group))
        amax = groups.abs().amax(-1, keepdim=True)
        # rounded before the codes are made, which then belong to the scale that is stored
        scale = torch.where(amax > 0, amax.clamp(min=formats.SMALLEST_AMAX) / 7, 1.0).to(torch.bfloat16)
        codes = (groups / scale.float()).round().clamp(-7, 7).to(torch.int8)
        made.packed, made.scale = pack_int4(codes.flatten(-2)), scale.squeeze(-1)
        _copy_bias(made, layer.bias)
        return made.train(layer.training)

    @property
    def weight(self) -> Tensor:
        groups = unpack_int4(self.packed).float().unflatten(-1, (-1, self.group)) * self.scale.float()[..., None]
        return dense_from_blocks(
            groups.flatten(-2), self.block_row, self.block_col, self.out_features, self.in_features
        )

    def _product(self, rows: Tensor) -> Tensor:
        return F.linear(rows, self.weight.to(rows.dtype), None if self.bias is None else self.bias.to(rows.dtype))

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, int4, group={self.group}, {self.pattern}"


def pack_int4(codes: Tensor) -> Tensor:
    """int8 (..., 2 n) from -8 to 7 -> uint8 (..., n): code + 8, the even neighbour in the low half of a byte."""
    halves: Tensor = (codes + 8).to(torch.uint8).unflatten(-1, (-1, 2))
    return halves[..., 0] | (halves[..., 1] << 4)


def unpack_int4(packed: Tensor) -> Tensor:
    """What `pack_int4` was given."""
    return torch.stack([packed & 15, packed >> 4], -1).flatten(-2).to(torch.int8) - 8


def _rows_of(weight: Tensor) -> tuple[Tensor, Tensor]:
    """int8 (N, K) and float32 (N). A row of zeros has scale 1; scales are float32, whatever the weight's type."""
    quantised = formats.INT8_ROWS.quantise(weight)
    assert quantised.scale is not None
    return quantised.codes, quantised.scale.squeeze(-1).clone()


def _blocks(dense: Tensor, layer: QuantisedSparseLinear | GroupQuantisedLinear) -> Tensor:
    """The blocks (S, R, C) of a dense (N, K) in the layer's order."""
    return blocks_from_dense(dense, layer.block_row, layer.block_col, layer.pattern.rows, layer.pattern.cols)


def _copy_bias(layer: _Quantised, bias: Tensor | None) -> None:
    if bias is not None:
        layer.bias = bias.detach().float().clone()


def _largest_group(cols: int, group: int) -> int:
    return next((one for one in range(min(cols, max(group, 2)), 1, -1) if one % 2 == 0 and cols % one == 0), 2)
