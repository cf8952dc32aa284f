"""Which modules of a student and a teacher are compared, and what they give: hidden states, projections, attention."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from sparsam.select import select

__all__ = ["attended", "expect_graph", "matched", "refuse_compiled", "state_of", "watching"]


def matched(what: str, globs: Mapping[str, str], student: nn.Module, teacher: nn.Module) -> list[tuple[str, str, str]]:
    """(glob, module of the student, module of the teacher) of each pair."""
    pairs = []
    for glob, other in globs.items():
        own, theirs = (
            select([name for name, _ in model.named_modules() if name], [one])
            for model, one in ((student, glob), (teacher, other))
        )
        if len(own) != len(theirs):
            raise ValueError(
                f"{what}: expected globs that match as many modules of the student as of the teacher, got {len(own)} "
                f"for {glob!r} and {len(theirs)} for {other!r}. Name them one by one."
            )
        pairs += [(glob, one, two) for one, two in zip(own, theirs, strict=True)]
    return pairs


def refuse_compiled(whose: str, model: nn.Module) -> None:
    for name, module in model.named_modules():
        if "_orig_mod" in module._modules or getattr(module, "_compiled_call_impl", None) is not None:
            raise ValueError(
                f"Distillation: expected a {whose} that is not compiled, got {name or 'one that is'}: what is inside "
                "it cannot be seen. Compare logits alone, or leave out torch.compile."
            )


@contextlib.contextmanager
def watching(model: nn.Module, names: list[str], keep: Callable[[str, Any], None]) -> Iterator[None]:
    """Has `keep` told the output of each of these modules."""

    def hook(name: str) -> Callable[..., None]:
        return lambda module, inputs, output: keep(name, output)

    handles = [model.get_submodule(name).register_forward_hook(hook(name)) for name in names]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def state_of(name: str, output: Any) -> Tensor:
    """The first tensor that a module gives, features last."""
    state = output[0] if isinstance(output, tuple | list) and output else output
    if not isinstance(state, Tensor) or not state.is_floating_point() or state.dim() < 2:
        raise ValueError(f"{name}: expected a module that gives a state (..., features), got {_kind(state)}.")
    return state.movedim(1, -1) if state.dim() == 4 else state


def attended(name: str, output: Any) -> Tensor:
    """A projection (B, T, features), or an attention map (B, H, T, T)."""
    if isinstance(output, tuple | list):
        found = output[1] if len(output) > 1 else None
        if isinstance(found, Tensor) and found.dim() in (3, 4) and found.shape[-1] == found.shape[-2]:
            return found if found.dim() == 4 else found[:, None]
        raise ValueError(
            f"{name}: expected its attention map beside its output, got {_kind(found)}. Load a Hugging Face model with "
            "attn_implementation='eager', or name projections of queries, keys or values."
        )
    if not isinstance(output, Tensor) or output.dim() != 3:
        raise ValueError(f"{name}: expected a projection that gives (B, T, features), got {_kind(output)}.")
    return output


def expect_graph(name: str, state: Tensor) -> None:
    if torch.is_grad_enabled() and not state.requires_grad:
        raise ValueError(
            f"{name}: expected a state with a gradient, got one without: nothing before it is trained, or it is under "
            "a reentrant checkpoint. Name another, or set use_reentrant=False."
        )


def _kind(value: Any) -> str:
    return f"{value.dtype} of {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
