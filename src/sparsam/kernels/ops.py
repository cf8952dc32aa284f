"""Block-sparse linear as torch operators: autograd, autocast, fake tensors, torch.compile.

On a CPU they run the compiled library; on any other device, and without it, the plain-PyTorch reference.
Shape letters: T tokens (rows of x, any leading dimensions), K in, N out, S slots of (R, C) blocks, RB x CB the grid.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch

from sparsam.kernels import cpu, csr, reference
from sparsam.kernels.checks import check_linear, refuse_second_order
from sparsam.kernels.index import BlockIndex
from sparsam.kernels.operands import NATIVE_DTYPES, as_autocast, as_bias, as_rows, is_plain

__all__ = ["backend", "block_linear"]

_INDEX = "Tensor block_row, Tensor block_col, Tensor row_start, Tensor row_slots, Tensor col_start, Tensor col_slots"


def backend() -> str:
    """The instruction set that CPU products run on ("amx", "avx512", ...), or "reference" without the library."""
    return cpu.current_isa()


def block_linear(
    x: torch.Tensor,
    values: torch.Tensor,
    index: BlockIndex,
    out_features: int,
    bias: torch.Tensor | None = None,
    activation: str = "none",
    probe: torch.Tensor | None = None,
) -> torch.Tensor:
    """act(x W^T + bias) with a weight of which only some blocks exist.

    Args:
        x: float32 or bfloat16 (..., K). Under autocast it is cast to the autocast type first.
        values: float32 or bfloat16 (S, R, C). Rounded to x's type inside the kernel; its gradient has its own type.
        index: addresses of the slots and their orders, see `build_index`.
        out_features: N.
        bias: (N) or None.
        activation: none, relu, relu2, gelu, gelu_tanh or silu, applied inside the kernel.
        probe: None, or a float32 leaf that requires a gradient and otherwise plays no part. After the backward its
            `.grad` holds, summed over backwards: (RB, CB) the mean |dense gradient| of each block; (N, K) the dense
            gradient itself.

    Returns:
        (..., N) of x's type.

    Raises:
        ValueError: a shape, dtype or device does not fit; or the backward is asked for with create_graph=True.
    """
    if not x.dtype.is_floating_point:
        raise ValueError(f"block_linear: expected a floating-point x, got {x.dtype}. Cast it first.")
    x = as_autocast(x)
    check_linear(x, values, index, out_features, bias, activation, probe)
    keep_pre = activation != "none" and torch.is_grad_enabled()
    call = _Eager.apply if torch.is_grad_enabled() and is_plain(x, values) else torch.ops.sparsam.block_linear
    y, _ = call(x, values, bias, probe, *index, out_features, activation, keep_pre)
    return y  # type: ignore[no-any-return]


_lib = torch.library.Library("sparsam", "DEF")
_TAGS = (torch.Tag.pt2_compliant_tag,)


def _native(x: torch.Tensor, values: torch.Tensor) -> cpu.Library | None:
    native = cpu.library()
    if native is not None and not (x.dtype in NATIVE_DTYPES and values.dtype in NATIVE_DTYPES):
        warnings.warn(
            f"block_linear: {x.dtype} with values of {values.dtype} has no kernel and runs as a dense product. "
            "Use float32 or bfloat16.",
            stacklevel=2,
        )
        return None
    return native


_lib.define(
    f"block_linear(Tensor x, Tensor values, Tensor? bias, Tensor? probe, {_INDEX}, int out_features, str activation, "
    "bool keep_pre) -> (Tensor, Tensor)",
    tags=_TAGS,
)


def _forward_cpu(
    x: torch.Tensor,
    values: torch.Tensor,
    bias: torch.Tensor | None,
    probe: torch.Tensor | None,
    *rest: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    native = _native(x, values)
    if native is None:
        return _forward_reference(x, values, bias, probe, *rest)
    if csr.fits(x, values):
        return _forward_reference(x, values, bias, probe, *rest, forward=csr.forward)
    *index, out_features, activation, keep_pre = rest
    y = x.new_empty(*x.shape[:-1], out_features)
    pre = torch.empty_like(y) if keep_pre else x.new_empty(0)
    native.forward(
        as_rows(x),
        values.contiguous(),
        BlockIndex(*index),
        as_bias(bias, x),
        activation,
        y.view(-1, out_features),
        pre.view(-1, out_features) if keep_pre else None,
    )
    return y, pre


def _forward_reference(
    x: torch.Tensor,
    values: torch.Tensor,
    bias: torch.Tensor | None,
    probe: torch.Tensor | None,
    *rest: Any,
    forward: Callable[..., Any] = reference.forward,
) -> tuple[torch.Tensor, torch.Tensor]:
    *index, out_features, activation, keep_pre = rest
    y, pre = forward(as_rows(x), values, BlockIndex(*index), out_features, bias, activation)
    shape = (*x.shape[:-1], out_features)
    # an operator may not return one tensor twice
    return y.reshape(shape), pre.reshape(shape) if keep_pre else x.new_empty(0)


def _forward_fake(
    x: torch.Tensor, values: torch.Tensor, bias: torch.Tensor | None, probe: torch.Tensor | None, *rest: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    *_, out_features, _, keep_pre = rest
    y = x.new_empty(*x.shape[:-1], out_features)
    return y, torch.empty_like(y) if keep_pre else x.new_empty(0)


_lib.define(
    f"block_linear_backward(Tensor grad, Tensor x, Tensor values, Tensor pre, {_INDEX}, str activation, "
    "bool dx, bool dvalues, bool dbias) -> (Tensor, Tensor, Tensor)",
    tags=_TAGS,
)


def _backward_cpu(
    grad: torch.Tensor, x: torch.Tensor, values: torch.Tensor, pre: torch.Tensor, *rest: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    native = _native(x, values)
    if native is None:
        return _backward_reference(grad, x, values, pre, *rest)
    if csr.fits(x, values):
        return _backward_reference(grad, x, values, pre, *rest, backward=csr.backward)
    *index, activation, need_dx, need_dvalues, need_dbias = rest
    dx = torch.empty_like(x, memory_format=torch.contiguous_format) if need_dx else x.new_empty(0)
    dvalues = torch.empty_like(values, memory_format=torch.contiguous_format) if need_dvalues else x.new_empty(0)
    dbias = torch.empty(grad.shape[-1] if need_dbias else 0, dtype=torch.float32)
    native.backward(
        as_rows(grad),
        as_rows(x),
        values.contiguous(),
        BlockIndex(*index),
        None if activation == "none" else as_rows(pre),
        activation,
        dx.view(-1, x.shape[-1]) if need_dx else None,
        dvalues if need_dvalues else None,
        dbias if need_dbias else None,
    )
    return dx, dvalues, dbias


def _backward_reference(
    grad: torch.Tensor,
    x: torch.Tensor,
    values: torch.Tensor,
    pre: torch.Tensor,
    *rest: Any,
    backward: Callable[..., Any] = reference.backward,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    *index, activation, need_dx, need_dvalues, need_dbias = rest
    saved = None if activation == "none" else as_rows(pre)
    dx, dvalues, dbias = backward(as_rows(grad), as_rows(x), values, BlockIndex(*index), saved, activation)
    none = x.new_empty(0)
    return (
        dx.reshape(x.shape) if need_dx else none,
        dvalues if need_dvalues else none.clone(),
        (dbias if need_dbias else none.clone()).to(_bias_dtype(grad)),
    )


def _backward_fake(
    grad: torch.Tensor, x: torch.Tensor, values: torch.Tensor, pre: torch.Tensor, *rest: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    *_, need_dx, need_dvalues, need_dbias = rest
    return (
        torch.empty_like(x, memory_format=torch.contiguous_format) if need_dx else x.new_empty(0),
        torch.empty_like(values, memory_format=torch.contiguous_format) if need_dvalues else x.new_empty(0),
        grad.new_empty(grad.shape[-1] if need_dbias else 0, dtype=_bias_dtype(grad)),
    )


def _bias_dtype(grad: torch.Tensor) -> torch.dtype:
    """A sum over all tokens is kept no narrower than float32."""
    return torch.promote_types(grad.dtype, torch.float32)


_lib.define(
    f"block_scores(Tensor grad, Tensor x, Tensor values, Tensor pre, {_INDEX}, str activation) -> Tensor", tags=_TAGS
)


def _scores_cpu(
    grad: torch.Tensor, x: torch.Tensor, values: torch.Tensor, pre: torch.Tensor, *rest: Any
) -> torch.Tensor:
    native = _native(x, values)
    if native is None:
        return _scores_reference(grad, x, values, pre, *rest)
    *index, activation = rest
    scores = _scores_fake(grad, x, values, pre, *rest)
    saved = None if activation == "none" else as_rows(pre)
    native.scores(as_rows(grad), as_rows(x), values.contiguous(), BlockIndex(*index), saved, activation, scores)
    return scores


def _scores_reference(
    grad: torch.Tensor, x: torch.Tensor, values: torch.Tensor, pre: torch.Tensor, *rest: Any
) -> torch.Tensor:
    _, rows, cols = values.shape
    activation = rest[-1]
    saved = None if activation == "none" else as_rows(pre)
    return reference.scores(as_rows(grad), as_rows(x), rows, cols, saved, activation)


def _scores_fake(
    grad: torch.Tensor, x: torch.Tensor, values: torch.Tensor, pre: torch.Tensor, *rest: Any
) -> torch.Tensor:
    _, rows, cols = values.shape
    shape = (-(-grad.shape[-1] // rows), -(-x.shape[-1] // cols))
    return grad.new_empty(shape, dtype=torch.float32)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    x, values, _, probe, *index, _, activation, keep_pre = inputs
    ctx.save_for_backward(x, values, output[1], *index)
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    ctx.activation = activation
    ctx.bias_dtype = None if inputs[2] is None else inputs[2].dtype
    ctx.probe_shape = None if probe is None else probe.shape
    assert keep_pre or activation == "none", "the value before the activation is needed by the backward"


def _gradients(
    ctx: Any, grad: torch.Tensor | None, _: Any, *, call: Callable[..., Any] | None = None
) -> tuple[torch.Tensor | None, ...]:
    if grad is None:
        return (None,) * 13
    refuse_second_order("block_linear", 'Use the dense layer (SparseLinear with product="dense", or to_dense()).')
    x, values, pre, *index = ctx.saved_tensors
    need_dx, need_dvalues, need_dbias, need_probe, *_rest = ctx.needs_input_grad
    dx = dvalues = dbias = dprobe = None
    if need_dx or need_dvalues or need_dbias:
        dx, dvalues, dbias = (call or torch.ops.sparsam.block_linear_backward)(
            grad, x, values, pre, *index, ctx.activation, need_dx, need_dvalues, need_dbias
        )
    if need_probe:
        if tuple(ctx.probe_shape) == (grad.shape[-1], x.shape[-1]):
            # the whole dense gradient: one layer at a time, on update steps only
            flat = grad.reshape(-1, grad.shape[-1])
            flat = reference.activation_gradient(flat, pre.reshape_as(flat) if pre.numel() else None, ctx.activation)
            dprobe = reference.dense_gradient(flat, x.reshape(-1, x.shape[-1])).float()
        else:
            dprobe = torch.ops.sparsam.block_scores(grad, x, values, pre, *index, ctx.activation)
    return (
        dx if need_dx else None,
        dvalues if need_dvalues else None,
        dbias.to(ctx.bias_dtype) if need_dbias and dbias is not None else None,
        dprobe,
        *(None,) * 9,
    )


class _Eager(torch.autograd.Function):
    """The same operator and gradients for plain eager tensors: `register_autograd` alone takes 0.2 ms a step."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Any:
        if torch.autograd._profiler_enabled():  # type: ignore[attr-defined]
            with torch._C._AutoDispatchBelowAutograd():
                output = torch.ops.sparsam.block_linear(*inputs)
        else:  # the kernel leaves the caches cold, where the way through the dispatcher takes another 0.2 ms
            output = _forward_cpu(*inputs)
        _save(ctx, inputs, output)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        profiled = torch.autograd._profiler_enabled()  # type: ignore[attr-defined]
        direct = not profiled and grads[0] is not None and is_plain(grads[0])
        return _gradients(ctx, *grads, call=_backward_cpu if direct else torch.ops.sparsam.block_linear_backward)


for _name, _cpu, _reference, _fake in (
    ("block_linear", _forward_cpu, _forward_reference, _forward_fake),
    ("block_linear_backward", _backward_cpu, _backward_reference, _backward_fake),
    ("block_scores", _scores_cpu, _scores_reference, _scores_fake),
):
    _lib.impl(_name, _cpu, "CPU")
    _lib.impl(_name, _reference, "CompositeExplicitAutograd")
    torch.library.register_fake(f"sparsam::{_name}", _fake, lib=_lib)
torch.library.register_autograd("sparsam::block_linear", _gradients, setup_context=_save, lib=_lib)
