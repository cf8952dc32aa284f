"""How large the gradients of a step are, and so whether they are fit for one."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from sparsam.shards import total_norm

__all__ = ["gradient_norm", "gradient_values"]


def gradient_norm(parameters: Iterable[nn.Parameter], order: float = 2.0) -> float:
    """The norm of all gradients together, NaN or infinite where a value is; 0 where there is none."""
    gradients = [gradient_values(parameter.grad) for parameter in parameters if parameter.grad is not None]
    return float(total_norm(gradients, order))


def gradient_values(gradient: torch.Tensor) -> torch.Tensor:
    """The numbers of a gradient; those of a sparse one added up where they meet, for only the sum may overflow."""
    return gradient.coalesce().values() if gradient.is_sparse else gradient
