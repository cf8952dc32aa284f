"""Tensors as the block-sparse kernels take them: which types, which layout, and who may skip torch's dispatcher."""

from __future__ import annotations

import torch

__all__ = ["NATIVE_DTYPES", "as_autocast", "as_bias", "as_rows", "is_plain"]

NATIVE_DTYPES = (torch.float32, torch.bfloat16)
_PLAIN = (torch.Tensor, torch.nn.Parameter)


def as_rows(x: torch.Tensor) -> torch.Tensor:
    """x as (T, features) with unit stride in the last dimension, without a copy where that is possible."""
    if x.dim() == 2 and x.is_contiguous():
        return x  # five of a training step come this way
    flat = x.reshape(-1, x.shape[-1]) if x.shape[-1] else x.new_empty(x.shape[:-1].numel(), 0)
    return flat if flat.stride(1) == 1 and flat.stride(0) >= flat.shape[1] else flat.contiguous()


def as_bias(bias: torch.Tensor | None, x: torch.Tensor) -> torch.Tensor | None:
    """The bias in a type that kernels read, contiguous."""
    if bias is None:
        return None
    return (bias if bias.dtype in NATIVE_DTYPES else bias.to(x.dtype)).contiguous()


def as_autocast(x: torch.Tensor) -> torch.Tensor:
    """x in the type of autocast where that is on; as in torch's own layers double is left alone, and meta has none."""
    device = "cpu" if x.is_cpu else x.device.type  # the second takes 0.4 us
    if x.dtype != torch.float64 and device != "meta" and torch.is_autocast_enabled(device):
        return x.to(torch.get_autocast_dtype(device))
    return x


def is_plain(*tensors: torch.Tensor) -> bool:
    """True when nothing traces, transforms or wraps these tensors: their memory is what an operator would see."""
    if (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._len_torch_function_stack()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch._C._get_tracing_state() is not None
    ):
        return False
    for tensor in tensors:
        if type(tensor) not in _PLAIN or not tensor.is_cpu or tensor.layout is not torch.strided or tensor.is_neg():
            return False
    return True
