"""Residual addition and LayerNorm as one torch operator each way where the CPU has AVX-512, plain PyTorch elsewhere."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from sparsam.kernels import cpu
from sparsam.kernels.checks import refuse_second_order

__all__ = ["add_layer_norm"]


def add_layer_norm(
    x: torch.Tensor,
    branch: torch.Tensor | None,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The step of a pre-LayerNorm residual stream: adds a branch, and normalises the sum for the next one.

    A float32 stream on a CPU with AVX-512 runs one fused kernel each way; everything else plain PyTorch. Gradients add
    up over rows in an order that depends on the shape alone, whatever the number of threads.

    Args:
        x: (..., D), the stream. Keep it float32: under autocast too, only the normalised output is narrow.
        branch: (..., D) of any floating type, or None: then the sum is x itself.
        weight, bias: (D), or None for ones and zeros.
        eps: added to the variance.

    Returns:
        (sum, normalised): x + branch in the wider type of the two, and its LayerNorm over the last dimension, computed
        in float32 or wider, in the type of autocast if that is on and of the sum otherwise.

    Raises:
        ValueError: branch is not shaped like x, weight or bias is not (D), or one of them is on another device; or the
            backward of the fused kernel is asked for with create_graph=True.

    Source: Ba et al. 2016, arXiv:1607.06450.
    """
    _check(x, branch, weight, bias)
    total = x.dtype if branch is None else torch.promote_types(x.dtype, branch.dtype)
    dtype = _out_dtype(x.device.type, total)
    if not _fused(x, branch, weight, bias, dtype):
        return _plain(x, branch, weight, bias, eps, dtype)
    if branch is None:
        return x, torch.ops.sparsam.layer_norm(x, weight, bias, eps, dtype)[0]
    added, normalised, _, _ = torch.ops.sparsam.add_layer_norm(x, branch, weight, bias, eps, dtype)
    return added, normalised


def _check(
    x: torch.Tensor, branch: torch.Tensor | None, weight: torch.Tensor | None, bias: torch.Tensor | None
) -> None:
    if x.dim() == 0:
        raise ValueError("add_layer_norm: expected x of at least one dimension, got a single number.")
    # the kernel takes every size from x: anything else would read foreign memory
    row = x.shape[-1:]
    for name, given, shape in (("branch", branch, x.shape), ("weight", weight, row), ("bias", bias, row)):
        if given is not None and (given.shape != shape or given.device != x.device):
            raise ValueError(
                f"add_layer_norm: expected {name} of shape {tuple(shape)} on {x.device} to go with x, "
                f"got {tuple(given.shape)} on {given.device}."
            )


def _out_dtype(device: str, total: torch.dtype) -> torch.dtype:
    if device == "meta" or total == torch.float64 or not torch.is_autocast_enabled(device):  # meta has no autocast
        return total
    return torch.get_autocast_dtype(device)


def _fused(
    x: torch.Tensor,
    branch: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
) -> bool:
    narrow = (torch.float32, torch.bfloat16)
    return (
        x.device.type == "cpu"
        and x.dtype == torch.float32
        and x.shape[-1] > 0
        and dtype in narrow
        and (branch is None or branch.dtype in narrow)
        and all(given is None or given.dtype == torch.float32 for given in (weight, bias))
        and _has_avx512()
    )


@torch.compiler.assume_constant_result
def _has_avx512() -> bool:
    return cpu.current_isa() in cpu.ISAS[cpu.ISAS.index("avx512") :]


def _plain(
    x: torch.Tensor,
    branch: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    added = x if branch is None else x + branch
    wide = torch.promote_types(added.dtype, torch.float32)
    weight, bias = (given if given is None else given.to(wide) for given in (weight, bias))
    return added, F.layer_norm(added.to(wide), x.shape[-1:], weight, bias, eps).to(dtype)


def _native() -> cpu.Library:
    native = cpu.library()
    assert native is not None, "the fused operator is called only where the library is"
    return native


def _expect(done: bool) -> None:
    """The kernel does all that _fused admits; a compiled graph may outlive the choice it made."""
    if not done:
        raise ValueError(
            "add_layer_norm: expected an instruction set from avx512 on, which this graph was made for, "
            f"got {cpu.current_isa()}. Choose it before the forward and before torch.compile."
        )


def _contiguous(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return tensor if tensor is None else tensor.contiguous()


def _empty(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)


def _row_numbers(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.shape[:-1], dtype=torch.float32)


_Affine = torch.Tensor | None
_INSTEAD = "Use torch.nn.functional.layer_norm, or SPARSAM_CPU_ISA=reference."


def _forward(
    x: torch.Tensor, branch: torch.Tensor, weight: _Affine, bias: _Affine, eps: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    results = _forward_fake(x, branch, weight, bias, eps, dtype)
    x, branch, weight, bias = x.contiguous(), branch.contiguous(), _contiguous(weight), _contiguous(bias)
    _expect(_native().norm_forward(x, branch, weight, bias, eps, *results))
    return results


def _forward_fake(
    x: torch.Tensor, branch: torch.Tensor, weight: _Affine, bias: _Affine, eps: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    return _empty(x, torch.float32), _empty(x, dtype), _row_numbers(x), _row_numbers(x)


def _first_forward(
    x: torch.Tensor, weight: _Affine, bias: _Affine, eps: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    results = _first_forward_fake(x, weight, bias, eps, dtype)
    x, weight, bias = x.contiguous(), _contiguous(weight), _contiguous(bias)
    _expect(_native().norm_forward(x, None, weight, bias, eps, None, *results))
    return results


def _first_forward_fake(
    x: torch.Tensor, weight: _Affine, bias: _Affine, eps: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return _empty(x, dtype), _row_numbers(x), _row_numbers(x)


def _backward(
    dout: torch.Tensor,
    dadded: torch.Tensor | None,
    added: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    weight: _Affine,
    narrow: bool,
    affine: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    results = _backward_fake(dout, dadded, added, mean, rstd, weight, narrow, affine)
    dx, *others = results
    given = (dout.contiguous(), _contiguous(dadded), added.contiguous(), mean, rstd, _contiguous(weight))
    wanted = (narrow, affine, affine)
    targets = (to if wants else None for to, wants in zip(others, wanted, strict=True))
    _expect(_native().norm_backward(*given, dx, *targets))
    return results


def _backward_fake(
    dout: torch.Tensor,
    dadded: torch.Tensor | None,
    added: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    weight: _Affine,
    narrow: bool,
    affine: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    width = added.shape[-1] if affine else 0
    rounded = _empty(added, torch.bfloat16) if narrow else added.new_empty(0, dtype=torch.bfloat16)
    return _empty(added, torch.float32), rounded, added.new_empty(width), added.new_empty(width)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    _, branch, weight, _, _, _ = inputs
    added, _, mean, rstd = output
    ctx.save_for_backward(added, mean, rstd, weight)
    ctx.mark_non_differentiable(mean, rstd)
    ctx.set_materialize_grads(False)
    ctx.narrow = branch.dtype == torch.bfloat16


def _save_first(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    x, weight, _, _, _ = inputs
    _, mean, rstd = output
    ctx.save_for_backward(x, mean, rstd, weight)
    ctx.mark_non_differentiable(mean, rstd)
    ctx.set_materialize_grads(False)


def _gradients(
    ctx: Any, dadded: torch.Tensor | None, dout: torch.Tensor | None, *_: Any
) -> tuple[torch.Tensor | None, ...]:
    need_dx, need_dbranch, need_dweight, need_dbias, *_rest = ctx.needs_input_grad
    if dout is None:  # only the sum went on
        if dadded is None:
            return (None,) * 6
        dbranch = dadded.to(torch.bfloat16) if ctx.narrow else dadded
        return dadded if need_dx else None, dbranch if need_dbranch else None, None, None, None, None
    refuse_second_order("add_layer_norm", _INSTEAD)
    dx, rounded, dweight, dbias = torch.ops.sparsam.add_layer_norm_backward(
        dout, dadded, *ctx.saved_tensors, ctx.narrow and need_dbranch, need_dweight or need_dbias
    )
    dbranch = rounded if ctx.narrow else dx
    return (
        dx if need_dx else None,
        dbranch if need_dbranch else None,
        dweight if need_dweight else None,
        dbias if need_dbias else None,
        None,
        None,
    )


def _first_gradients(ctx: Any, dout: torch.Tensor | None, *_: Any) -> tuple[torch.Tensor | None, ...]:
    if dout is None:
        return (None,) * 5
    need_dx, need_dweight, need_dbias, *_rest = ctx.needs_input_grad
    refuse_second_order("add_layer_norm", _INSTEAD)
    dx, _, dweight, dbias = torch.ops.sparsam.add_layer_norm_backward(
        dout, None, *ctx.saved_tensors, False, need_dweight or need_dbias
    )
    return dx if need_dx else None, dweight if need_dweight else None, dbias if need_dbias else None, None, None


_lib = torch.library.Library("sparsam", "FRAGMENT")
_REST = "Tensor? weight, Tensor? bias, float eps, ScalarType dtype"
_FOUR = "(Tensor, Tensor, Tensor, Tensor)"
for _name, _schema, _cpu, _fake in (
    ("add_layer_norm", f"(Tensor x, Tensor branch, {_REST}) -> {_FOUR}", _forward, _forward_fake),
    ("layer_norm", f"(Tensor x, {_REST}) -> (Tensor, Tensor, Tensor)", _first_forward, _first_forward_fake),
    (
        "add_layer_norm_backward",
        "(Tensor dout, Tensor? dadded, Tensor added, Tensor mean, Tensor rstd, Tensor? weight, bool narrow, "
        f"bool affine) -> {_FOUR}",
        _backward,
        _backward_fake,
    ),
):
    _lib.define(_name + _schema, tags=(torch.Tag.pt2_compliant_tag,))
    _lib.impl(_name, _cpu, "CPU")
    torch.library.register_fake(f"sparsam::{_name}", _fake, lib=_lib)
torch.library.register_autograd("sparsam::add_layer_norm", _gradients, setup_context=_save, lib=_lib)
torch.library.register_autograd("sparsam::layer_norm", _first_gradients, setup_context=_save_first, lib=_lib)
