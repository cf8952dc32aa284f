"""The forward of a frozen layer: weights laid out once, and a call that costs little beside the kernel.

One row keeps the kernel of a small layer busy for 5 us, and the way through torch's dispatcher and all checks takes
30 us. So what does not change between calls is made ready with the pack, and a plain eager call goes straight to it.
"""

from __future__ import annotations

from typing import Any

import torch

from sparsam.kernels import cpu
from sparsam.kernels.checks import check_linear
from sparsam.kernels.index import BlockIndex
from sparsam.kernels.operands import NATIVE_DTYPES, as_bias, as_rows, is_plain

__all__ = ["PackedWeights", "pack", "packed_block_linear"]

_ALONE = 2**18  # products that one thread has done before others have woken up
_ACTIVATIONS = {name: code for code, name in enumerate(cpu.ACTIVATIONS)}


class PackedWeights:
    """Weights in the layout of one number format and instruction set; stale when the weights change. From `pack`.

    Nothing in it changes, so several Python threads may call one at the same time.

    Attributes:
        weights: uint8, what the kernel wrote.
        values, index: what it was made of, kept alive: the kernel holds their addresses.
        in_features, out_features: K and N.
        dtype: the type of x.
    """

    def __init__(
        self, native: cpu.Library, weights: torch.Tensor, values: torch.Tensor, index: BlockIndex, in_features: int,
        out_features: int, dtype: torch.dtype,
    ) -> None:  # fmt: skip
        self.weights, self.dtype = weights, dtype
        self.in_features, self.out_features = in_features, out_features
        # detached: whoever swaps the memory of a parameter (p.data = ...) does not free this one
        self.values, self.index = values.detach(), BlockIndex(*(tensor.detach() for tensor in index))
        self._per_row = values.numel()
        self._forward = native.ready_forward(self.values, self.index, in_features, out_features, dtype)
        self._address = weights.data_ptr()

    def try_forward(self, x: torch.Tensor, bias: torch.Tensor | None, activation: str) -> torch.Tensor | None:
        """act(x W^T + bias) of plain tensors (see `is_plain`); None where a call is not as simple as that."""
        shape, code = x.shape, _ACTIVATIONS.get(activation)
        if x.dtype is not self.dtype or code is None or not x.is_contiguous():
            return None
        if not shape or shape[-1] != self.in_features:
            return None
        at, kind = None, 0
        if bias is not None:
            if bias.dtype not in cpu.DTYPES or bias.shape != (self.out_features,) or not bias.is_contiguous():
                return None
            at, kind = bias.data_ptr(), cpu.DTYPES[bias.dtype]
        y = x.new_empty(*shape[:-1], self.out_features)
        rows = x.numel() // self.in_features
        threads = 1 if rows * self._per_row < _ALONE else cpu.threads()
        status = self._forward(
            rows, x.data_ptr(), self.in_features, at, kind, code, y.data_ptr(), None, self._address, threads
        )
        return None if status else y  # the operator says what is wrong


@torch.compiler.disable
def pack(
    values: torch.Tensor, index: BlockIndex, in_features: int, out_features: int, dtype: torch.dtype
) -> PackedWeights | None:
    """Weights laid out for the current instruction set, for `packed_block_linear`; None where no layout helps.

    The result goes stale when values or index change, so it belongs to an explicitly frozen model only.

    Raises:
        ValueError: values and index do not fit each other or the layer.
    """
    native = cpu.library() if values.device.type == "cpu" and dtype in NATIVE_DTYPES else None
    if native is None or values.dtype not in NATIVE_DTYPES:
        return None
    check_linear(values.new_empty(0, in_features), values, index, out_features, None, "none", name="pack")
    values = values.detach().contiguous()
    weights = native.pack(values, index, in_features, out_features, dtype)
    return None if weights is None else PackedWeights(native, weights, values, index, in_features, out_features, dtype)


def packed_block_linear(
    x: torch.Tensor, packed: PackedWeights, bias: torch.Tensor | None = None, activation: str = "none"
) -> torch.Tensor:
    """`block_linear` without gradients, with weights that `pack` laid out for x's type.

    Args:
        x: (..., K) of the type that was packed for.
        packed: from `pack`, under the instruction set that is in use now.
        bias, activation: as in `block_linear`.

    Returns:
        (..., N) of x's type.

    Raises:
        ValueError: a shape, dtype or device does not fit, or the pack is of another layer, type or instruction set.
    """
    plain = is_plain(x) if bias is None else is_plain(x, bias)
    if plain and not torch.autograd._profiler_enabled():  # type: ignore[attr-defined]
        # autograd has its own word on tensors that ask for a gradient
        wants = torch.is_grad_enabled() and (x.requires_grad or (bias is not None and bias.requires_grad))
        y = None if wants else packed.try_forward(x, bias, activation)
        if y is not None:
            return y
    check_linear(x, packed.values, packed.index, packed.out_features, bias, activation, name="packed_block_linear")
    if x.dtype not in NATIVE_DTYPES:
        raise ValueError(
            f"packed_block_linear: expected x of float32 or bfloat16 on a CPU, got {x.dtype} on {x.device}. "
            "Use block_linear."
        )
    return torch.ops.sparsam.packed_block_linear(  # type: ignore[no-any-return]
        x, packed.weights, packed.values, bias, *packed.index, packed.out_features, activation
    )


_INDEX = "Tensor block_row, Tensor block_col, Tensor row_start, Tensor row_slots, Tensor col_start, Tensor col_slots"
_lib = torch.library.Library("sparsam", "FRAGMENT")
_lib.define(
    f"packed_block_linear(Tensor x, Tensor packed, Tensor values, Tensor? bias, {_INDEX}, int out_features, "
    "str activation) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def _cpu(
    x: torch.Tensor, packed: torch.Tensor, values: torch.Tensor, bias: torch.Tensor | None, *rest: Any
) -> torch.Tensor:
    *index, out_features, activation = rest
    native = cpu.library()
    if native is None:
        raise ValueError("packed_block_linear: expected the compiled library, got none. Use block_linear.")
    y = x.new_empty(*x.shape[:-1], out_features)
    flat = y.view(-1, out_features)
    bias = as_bias(bias, x)
    native.forward(as_rows(x), values.contiguous(), BlockIndex(*index), bias, activation, flat, None, packed)
    return y


def _fake(
    x: torch.Tensor, packed: torch.Tensor, values: torch.Tensor, bias: torch.Tensor | None, *rest: Any
) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], rest[-2])


_lib.impl("packed_block_linear", _cpu, "CPU")
torch.library.register_fake("sparsam::packed_block_linear", _fake, lib=_lib)
