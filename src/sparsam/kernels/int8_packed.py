"""The int8 layer of a frozen model in one pass: rows quantised, products of blocks summed exactly, scaled, activated.

Weights are laid out once, when a model is loaded, for the instruction set in use; what is stored on disk is the layer.
Every path gives the bits of `int8.int8_block_linear`, which also stands in where there is no compiled library.
Shape letters: T tokens (rows of x, any leading dimensions), K in, N out, S slots of (R, C) blocks.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparsam.kernels import cpu, reference
from sparsam.kernels.formats import INT32_TERMS
from sparsam.kernels.index import build_index
from sparsam.kernels.int8 import int8_block_linear, quantise_rows, quantise_tensor
from sparsam.kernels.operands import NATIVE_DTYPES, as_rows, is_plain

__all__ = ["Int8Pack", "int8_backend", "pack_int8", "packed_int8_linear"]

_PATHS = ("portable", "avx2", "vnni", "amx")
_DTYPES = {**cpu.DTYPES, torch.int8: 2}
_ALONE = 2**19  # products that one thread has done before others have woken up
_int32, _int64, _pointer = ctypes.c_int32, ctypes.c_int64, ctypes.c_void_p
_ARGUMENTS: dict[str, Any] = {"p": _pointer, "i": _int32, "l": _int64}


class Int8Pack(NamedTuple):
    """A frozen int8 layer, from `pack_int8`; stale when the layer changes. Nothing in it changes: threads may share it.

    Attributes:
        weights: uint8, what the kernels read; it may be copied. Empty where there are none.
        values, scale, block_row, block_col: the layer itself, for the reference.
        in_features, out_features: K and N.
    """

    weights: Tensor
    values: Tensor
    scale: Tensor
    block_row: Tensor
    block_col: Tensor
    in_features: int
    out_features: int


class _Layer(ctypes.Structure):
    """Mirror of `sparsam_int8_layer` in csrc/sparsam.h."""

    _fields_ = [
        ("in_features", _int64),
        ("out_features", _int64),
        ("rows", _int32),
        ("cols", _int32),
        ("slots", _int64),
        *((name, _pointer) for name in ("values", "scale", "block_row", "block_col", "row_start", "row_slots")),
    ]


def int8_backend(rows: int = 32, cols: int = 32) -> str:
    """What int8 blocks of this size run on now: amx, vnni, avx2 or portable, or "reference" without the library."""
    c = _functions()
    return "reference" if c is None else _PATHS[c.sparsam_int8_path(_int32(rows), _int32(cols))]


@torch.compiler.disable
def pack_int8(
    values: Tensor, scale: Tensor, block_row: Tensor, block_col: Tensor, in_features: int, out_features: int
) -> Int8Pack:
    """Lays a layer out for the instruction set in use, for `packed_int8_linear`.

    Args:
        values: int8 (S, R, C), codes from -127 to 127, as `SparseLinear.values`; blocks of any size.
        scale: float32 (N), of each output row.
        block_row, block_col: int32 (S), where each block is; -1 = dead slot.
        in_features, out_features: K and N.

    Raises:
        ValueError: a shape, type or address does not fit the layer, or K is so large that an int32 may overflow.
    """
    if values.dim() != 3 or values.dtype != torch.int8 or 0 in values.shape[1:]:
        raise ValueError(
            f"pack_int8: expected int8 values of (S, R, C), got {values.dtype} of {tuple(values.shape)}. "
            "Quantise the layer with sparsam.quantise."
        )
    slots, rows, cols = values.shape
    if scale.shape != (out_features,) or scale.dtype != torch.float32:
        raise ValueError(
            f"pack_int8: expected a float32 scale of ({out_features},), got {scale.dtype} of {tuple(scale.shape)}. "
            "Give one number per output."
        )
    if not 1 <= in_features <= INT32_TERMS:
        raise ValueError(
            f"pack_int8: expected 1 to {INT32_TERMS} input features, got {in_features}: an int32 may overflow. "
            "Leave the layer in floating point."
        )
    grid = -(-out_features // rows), -(-in_features // cols)
    for name, place, count in (("block_row", block_row, grid[0]), ("block_col", block_col, grid[1])):
        if place.shape != (slots,) or place.dtype != torch.int32:
            raise ValueError(
                f"pack_int8: expected {name} as int32 of ({slots},), got {place.dtype} of {tuple(place.shape)}. "
                "Give one address per block."
            )
        if slots and not place.is_meta and int(place.max()) >= count:
            raise ValueError(
                f"pack_int8: expected {name} below {count} for {out_features} x {in_features} in blocks of "
                f"{rows} x {cols}, got {int(place.max())}. Give the addresses of this layer."
            )
    values, scale = values.detach().contiguous(), scale.detach().contiguous()
    weights = values.new_empty(0, dtype=torch.uint8)
    c = _functions() if values.device.type == "cpu" else None
    if c is not None:
        index = build_index(block_row, block_col, *grid)
        tensors = (values, scale, index.block_row, index.block_col, index.row_start, index.row_slots)
        layer = _Layer(in_features, out_features, rows, cols, slots, *(tensor.data_ptr() for tensor in tensors))
        weights = torch.empty(c.sparsam_int8_pack_bytes(ctypes.byref(layer)), dtype=torch.uint8)
        cpu._check(c.sparsam_int8_pack(ctypes.byref(layer), _pointer(weights.data_ptr())), "pack_int8")
    return Int8Pack(weights, values, scale, block_row.detach(), block_col.detach(), in_features, out_features)


def packed_int8_linear(
    pack: Int8Pack,
    x: Tensor,
    bias: Tensor | None = None,
    activation: str = "none",
    *,
    x_scale: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """act(x W^T + bias) without gradients; x is quantised on the way in, as `quantise_rows` or `quantise_tensor` do it.

    Args:
        pack: from `pack_int8`, under the instruction set that is in use now.
        x: float32 or bfloat16 (..., K), or int8 codes that are quantised already.
        bias: floating point (N) or None; added in float32.
        activation: none, relu, relu2, gelu, gelu_tanh or silu.
        x_scale: float32 above zero, one number or one for each row, that codes of x have or are to have; None = that
            of `quantise_rows`.
        dtype: float32 or bfloat16, of the result; None = that of x, float32 for codes.

    Returns:
        (..., N). A row of x that holds NaN or infinity comes out as NaN.

    Raises:
        ValueError: a shape, dtype or device does not fit, or the pack is of another instruction set.
    """
    codes = x.dtype == torch.int8
    if x.dtype not in _DTYPES or (codes and x_scale is None):
        raise ValueError(
            f"packed_int8_linear: expected x of float32 or bfloat16, or int8 with x_scale, got {x.dtype}. "
            "Cast x, or quantise it with quantise_rows."
        )
    if x.dim() == 0 or x.shape[-1] != pack.in_features:
        raise ValueError(
            f"packed_int8_linear: expected x of (..., {pack.in_features}), got {tuple(x.shape)}. "
            "Its last dimension is in_features."
        )
    dtype = dtype or (torch.float32 if codes else x.dtype)
    if dtype not in NATIVE_DTYPES:
        raise ValueError(f"packed_int8_linear: expected a result of float32 or bfloat16, got {dtype}. Cast it after.")
    if activation not in cpu.ACTIVATIONS:
        raise ValueError(
            f"packed_int8_linear: expected an activation of {', '.join(cpu.ACTIVATIONS)}, got {activation!r}. "
            "Apply any other one after the layer."
        )
    if bias is not None and bias.shape != (pack.out_features,):
        raise ValueError(
            f"packed_int8_linear: expected a bias of ({pack.out_features},), got {tuple(bias.shape)}. "
            "Give one number per output."
        )
    if x_scale is not None and x_scale.numel() not in (1, x[..., 0].numel()):
        raise ValueError(
            f"packed_int8_linear: expected x_scale of one number or one for each row of {tuple(x.shape)}, got "
            f"{tuple(x_scale.shape)}. quantise_rows and quantise_tensor make them so."
        )
    for name, tensor in (("the pack", pack.values), ("bias", bias), ("x_scale", x_scale)):
        if tensor is not None and tensor.device != x.device:
            raise ValueError(f"packed_int8_linear: expected {name} on {x.device} like x, got {tensor.device}. Move it.")
    tensors = [tensor for tensor in (x, x_scale, bias) if tensor is not None]
    plain = is_plain(*tensors) and not torch.autograd._profiler_enabled()  # type: ignore[attr-defined]
    wants = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    # the way through torch's dispatcher takes longer than one row of a small layer
    call = _cpu if plain and not wants else torch.ops.sparsam.packed_int8_linear
    return call(x, x_scale, *pack[:5], bias, pack.out_features, activation, dtype)


_lib = torch.library.Library("sparsam", "FRAGMENT")
_lib.define(
    "packed_int8_linear(Tensor x, Tensor? x_scale, Tensor packed, Tensor values, Tensor scale, Tensor block_row, "
    "Tensor block_col, Tensor? bias, int out_features, str activation, ScalarType dtype) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def _cpu(x: Tensor, x_scale: Tensor | None, packed: Tensor, values: Tensor, *rest: Any) -> Tensor:
    c = _functions()
    if c is None or not packed.numel():
        return _reference(x, x_scale, packed, values, *rest)
    *_, bias, out_features, activation, dtype = rest
    flat, y = as_rows(x), x.new_empty(*x.shape[:-1], out_features, dtype=dtype)
    packed = packed.contiguous()
    rows, features = flat.shape
    if x_scale is not None:
        x_scale = x_scale.float().reshape(-1).expand(rows).contiguous()
    if bias is not None:
        bias = bias.float().contiguous()
    status = c.sparsam_int8_forward(
        packed.data_ptr(), packed.numel(), features, out_features, rows, _DTYPES[x.dtype], flat.data_ptr(),
        flat.stride(0), cpu._address(x_scale), cpu._address(bias), cpu.ACTIVATIONS.index(activation), _DTYPES[dtype],
        y.data_ptr(), 1 if rows * values.numel() < _ALONE else cpu.threads(),
    )  # fmt: skip
    if status == 1:
        raise ValueError(
            f"packed_int8_linear: expected a pack of this layer made on {cpu.current_isa()}, got another. Pack again."
        )
    cpu._check(status, "packed_int8_linear")
    return y


def _reference(
    x: Tensor, x_scale: Tensor | None, packed: Tensor, values: Tensor, scale: Tensor, block_row: Tensor,
    block_col: Tensor, bias: Tensor | None, out_features: int, activation: str, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    flat = as_rows(x)
    if x_scale is None:
        codes, row_scale = quantise_rows(flat)
    else:
        row_scale = x_scale.float().reshape(-1, 1)
        codes, row_scale = (flat, row_scale) if x.dtype == torch.int8 else quantise_tensor(flat, row_scale)
    y = int8_block_linear(codes, row_scale, values, scale, block_row, block_col, bias, out_features)
    return reference.activate(y, activation).to(dtype).reshape(*x.shape[:-1], out_features)


def _fake(x: Tensor, x_scale: Tensor | None, *rest: Any) -> Tensor:
    *_, out_features, _, dtype = rest
    return x.new_empty(*x.shape[:-1], out_features, dtype=dtype)


_lib.impl("packed_int8_linear", _cpu, "CPU")
_lib.impl("packed_int8_linear", _reference, "CompositeExplicitAutograd")
torch.library.register_fake("sparsam::packed_int8_linear", _fake, lib=_lib)


def _functions() -> ctypes.CDLL | None:
    """The C functions, or None without a library."""
    native = cpu.library()
    return None if native is None else _declared(native)


@functools.cache
def _declared(native: cpu.Library) -> ctypes.CDLL | None:
    if not hasattr(native.c, "sparsam_int8_forward"):
        return None  # built before there was int8
    native.c.sparsam_int8_pack_bytes.restype = _int64
    native.c.sparsam_int8_forward.argtypes = [_ARGUMENTS[letter] for letter in "plllliplppiipi"]
    return native.c
