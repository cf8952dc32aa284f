"""Softmax attention as torch operators: one fused kernel each way where the CPU has AMX, plain PyTorch elsewhere."""

from __future__ import annotations

from typing import Any

import torch

from sparsam.kernels import cpu, reference
from sparsam.kernels.checks import refuse_second_order

__all__ = ["attention", "self_attention"]


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool = True) -> torch.Tensor:
    """Softmax attention over (B, H, T, D) with scale D^-0.5, the result laid out so that (B, T, H * D) is a view.

    bfloat16 on a CPU with AMX and D of 32, 64, 96 or 128 runs one fused kernel each way; everything else plain PyTorch.

    Raises:
        ValueError: q, k and v differ in shape, dtype (after autocast) or device; or the backward of the fused kernel is
            asked for with create_graph=True.

    Source: Dao 2023, arXiv:2307.08691 (recomputation from the log-sum-exp in the backward).
    """
    q, k, v = _autocast(q, k, v)
    # the kernel takes every size and stride from q: anything else would read foreign memory
    if q.dim() != 4 or any((x.shape, x.dtype, x.device) != (q.shape, q.dtype, q.device) for x in (k, v)):
        found = ", ".join(f"{tuple(x.shape)} {x.dtype} {x.device}" for x in (q, k, v))
        raise ValueError(f"attention: expected q, k, v of one (B, H, T, D) shape, dtype and device, got {found}.")
    if not _fused_attention(q):
        return reference.attention(q, k, v, causal)
    out, _ = torch.ops.sparsam.attention(q, k, v, causal)
    return out  # type: ignore[no-any-return]


def self_attention(qkv: torch.Tensor, causal: bool = True) -> torch.Tensor:
    """`attention` for one (B, T, 3, H, D) tensor: (B, T, H, D). Its gradient is written in one piece."""
    if qkv.dim() != 5 or qkv.shape[2] != 3:
        raise ValueError(f"self_attention: expected q, k and v as one (B, T, 3, H, D), got {tuple(qkv.shape)}.")
    (qkv,) = _autocast(qkv)
    if not _fused_attention(qkv):
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        return reference.attention(q, k, v, causal).transpose(1, 2)
    out, _ = torch.ops.sparsam.self_attention(qkv, causal)
    return out  # type: ignore[no-any-return]


def _autocast(*tensors: torch.Tensor) -> list[torch.Tensor]:
    device = tensors[0].device.type
    if device == "meta" or not torch.is_autocast_enabled(device):  # meta has no autocast
        return list(tensors)
    narrow = torch.get_autocast_dtype(device)
    return [x.to(narrow) if x.is_floating_point() and x.dtype != torch.float64 else x for x in tensors]


def _fused_attention(x: torch.Tensor) -> bool:
    """Whether x, cast already, is one that the fused kernel does."""
    if x.device.type != "cpu" or x.shape[-1] % 32 or not 32 <= x.shape[-1] <= 128 or x.numel() == 0:
        return False
    return x.dtype == torch.bfloat16 and _has_amx()


@torch.compiler.assume_constant_result
def _has_amx() -> bool:
    return cpu.current_isa() == "amx"


_lib = torch.library.Library("sparsam", "FRAGMENT")
_TAGS = (torch.Tag.pt2_compliant_tag,)
_INSTEAD = "Use the reference: float32, or SPARSAM_CPU_ISA=reference."


def _native() -> cpu.Library:
    native = cpu.library()
    assert native is not None, "the fused operator is called only where the library is"
    return native


def _views(qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k, v as (B, H, T, D) views of one (B, T, 3, H, D) tensor."""
    q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
    return q, k, v


def _forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> tuple[torch.Tensor, torch.Tensor]:
    q, k, v = (tensor if tensor.stride(-1) == 1 else tensor.contiguous() for tensor in (q, k, v))
    out, lse = _forward_fake(q, k, v, causal)
    _expect(_native().attention_forward(q, k, v, out, lse, q.shape[-1] ** -0.5, causal))
    return out, lse


def _forward_fake(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> tuple[torch.Tensor, torch.Tensor]:
    batch, heads, tokens, size = q.shape
    out = q.new_empty(batch, tokens, heads, size).transpose(1, 2)
    return out, q.new_empty(batch, heads, tokens, dtype=torch.float32)


def _backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    causal: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    gradients = tuple(torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in (q, k, v))
    _run_backward([q, k, v, out, dout, *gradients], lse, causal)
    return gradients[0], gradients[1], gradients[2]


def _run_backward(tensors: list[torch.Tensor], lse: torch.Tensor, causal: bool) -> None:
    inputs = [tensor if tensor.stride(-1) == 1 else tensor.contiguous() for tensor in tensors[:5]]
    _expect(_native().attention_backward([*inputs, *tensors[5:]], lse, tensors[0].shape[-1] ** -0.5, causal))


def _expect(done: bool) -> None:
    """The kernel does every shape that _fused_attention admits; a compiled graph may outlive the choice it made."""
    if not done:
        raise ValueError(
            f"attention: expected the instruction set amx, which this graph was made for, got {cpu.current_isa()}. "
            "Choose it before the forward and before torch.compile."
        )


def _backward_fake(
    dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return tuple(  # type: ignore[return-value]
        torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in (q, k, v)
    )


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    *tensors, ctx.causal = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.mark_non_differentiable(output[1])


def _gradients(ctx: Any, dout: torch.Tensor, _: Any) -> tuple[torch.Tensor | None, ...]:
    refuse_second_order("attention", _INSTEAD)
    return (*torch.ops.sparsam.attention_backward(dout, *ctx.saved_tensors, ctx.causal), None)


def _self_forward(qkv: torch.Tensor, causal: bool) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse = _forward(*_views(qkv), causal)
    return out.transpose(1, 2), lse


def _self_forward_fake(qkv: torch.Tensor, causal: bool) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse = _forward_fake(*_views(qkv), causal)
    return out.transpose(1, 2), lse


def _self_backward(
    dout: torch.Tensor, qkv: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, causal: bool
) -> torch.Tensor:
    dqkv = torch.empty_like(qkv, memory_format=torch.contiguous_format)
    _run_backward([*_views(qkv), out.transpose(1, 2), dout.transpose(1, 2), *_views(dqkv)], lse, causal)
    return dqkv


def _self_backward_fake(dout: torch.Tensor, qkv: torch.Tensor, *rest: Any) -> torch.Tensor:
    return torch.empty_like(qkv, memory_format=torch.contiguous_format)


def _self_gradients(ctx: Any, dout: torch.Tensor, _: Any) -> tuple[torch.Tensor | None, ...]:
    refuse_second_order("self_attention", _INSTEAD)
    return torch.ops.sparsam.self_attention_backward(dout, *ctx.saved_tensors, ctx.causal), None


_SAVED = "Tensor out, Tensor lse, bool causal"
for _name, _schema, _cpu, _fake in (
    ("attention", "(Tensor q, Tensor k, Tensor v, bool causal) -> (Tensor, Tensor)", _forward, _forward_fake),
    (
        "attention_backward",
        f"(Tensor dout, Tensor q, Tensor k, Tensor v, {_SAVED}) -> (Tensor, Tensor, Tensor)",
        _backward,
        _backward_fake,
    ),
    ("self_attention", "(Tensor qkv, bool causal) -> (Tensor, Tensor)", _self_forward, _self_forward_fake),
    ("self_attention_backward", f"(Tensor dout, Tensor qkv, {_SAVED}) -> Tensor", _self_backward, _self_backward_fake),
):
    _lib.define(_name + _schema, tags=_TAGS)
    _lib.impl(_name, _cpu, "CPU")
    torch.library.register_fake(f"sparsam::{_name}", _fake, lib=_lib)
torch.library.register_autograd("sparsam::attention", _gradients, setup_context=_save, lib=_lib)
torch.library.register_autograd("sparsam::self_attention", _self_gradients, setup_context=_save, lib=_lib)
