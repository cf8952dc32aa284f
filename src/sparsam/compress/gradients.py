"""Gradients of calibration batches, with the model left as it was: what scores of a trained model read."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

__all__ = ["Loss", "batch_gradients", "checked_batches", "evaluating"]

Loss = Callable[[nn.Module, Any], torch.Tensor]


def batch_gradients(
    model: nn.Module, parameters: Sequence[nn.Parameter], batches: Iterable[Any], loss: Loss
) -> Iterator[list[torch.Tensor]]:
    """One gradient per batch of each parameter, zero where a batch does not reach it.

    The model is in eval mode: no dropout, and running statistics stay. Gradients that parameters hold are untouched,
    and frozen parameters are frozen again afterwards.

    Args:
        model: a trained one.
        parameters: of the model.
        batches: what `loss` takes.
        loss: (model, batch) -> a scalar.

    Raises:
        ValueError: the loss is no finite scalar, or a gradient is not finite.
    """
    frozen = [parameter for parameter in parameters if not parameter.requires_grad]
    with evaluating(model):
        try:
            for parameter in frozen:
                parameter.requires_grad_(True)
            for number, batch in enumerate(batches):
                with torch.enable_grad():
                    value = loss(model, batch)
                if not (isinstance(value, torch.Tensor) and value.numel() == 1 and value.isfinite().all()):
                    raise ValueError(
                        f"loss: expected a finite scalar tensor for calibration batch {number}, got {_kind(value)}. "
                        "Write loss=lambda model, batch: ..., reduced to one number."
                    )
                found = torch.autograd.grad(value.sum(), parameters, allow_unused=True, materialize_grads=True)
                if not all(bool(one.isfinite().all()) for one in found):
                    raise ValueError(
                        f"data: expected finite gradients, got inf or NaN in batch {number}. Leave it out."
                    )
                yield list(found)
        finally:
            for parameter in frozen:
                parameter.requires_grad_(False)


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Eval mode inside, and every module's own mode again afterwards."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            # not module.train(mode), which would set its children too
            module.training = mode


def checked_batches(data: Iterable[Any]) -> list[Any]:
    """The batches as a list, which several passes see alike.

    Raises:
        ValueError: it is one tensor, or empty.
    """
    if isinstance(data, torch.Tensor):
        raise ValueError(
            f"data: expected a list of batches, got one tensor of {tuple(data.shape)}. Write data=[batch]."
        )
    batches = list(data)
    if not batches:
        raise ValueError("data: expected at least one calibration batch, got none.")
    return batches


def _kind(value: object) -> str:
    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    return str(float(value.detach())) if value.numel() == 1 else str(tuple(value.shape))
