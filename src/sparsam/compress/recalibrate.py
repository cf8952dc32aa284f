"""Batch-norm statistics estimated again: those of a pruned model are not those that it was trained with."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from sparsam.compress.gradients import checked_batches, evaluating

__all__ = ["recalibrate_norms"]


def recalibrate_norms(
    model: nn.Module, data: Iterable[Any], forward: Callable[[nn.Module, Any], object] | None = None
) -> int:
    """Sets running mean and variance of every batch norm to their average over calibration batches, in one pass.

    Each layer's statistics are those under the batch's own statistics in the layers before it, as in training. All
    batches count the same, so give them one size. Nothing else changes: weights bit for bit, modes, gradients, and the
    random numbers that come next (dropout is off).

    Args:
        model: with batch norms that track statistics.
        data: batches; on several ranks the same ones, or rank 0's statistics broadcast afterwards.
        forward: (model, batch) -> anything; model(batch) without it.

    Returns:
        How many batch norms were recalibrated.

    Raises:
        ValueError: there is no batch norm, no batch, a batch norm was not reached, or statistics are not finite. The
            statistics are then the old ones.

    Source: of a cumulative average in place of a running one, Wu and Johnson 2021, arXiv:2105.07576 (PreciseBN).
    """
    norms = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, _BatchNorm) and module.running_mean is not None
    }
    if not norms:
        raise ValueError("recalibrate_norms: expected a model with batch norms that keep statistics, got none.")
    batches = checked_batches(data)
    momenta = {name: norm.momentum for name, norm in norms.items()}
    before = {name: [buffer.clone() for buffer in norm.buffers(recurse=False)] for name, norm in norms.items()}
    done = False
    try:
        with evaluating(model), torch.no_grad():
            for norm in norms.values():
                norm.reset_running_stats()
                norm.momentum = None  # torch's name for a cumulative average
                norm.training = True
            for batch in batches:
                model(batch) if forward is None else forward(model, batch)
        for name, norm in norms.items():
            _check(name, norm)
        done = True
    finally:
        for name, norm in norms.items():
            norm.momentum = momenta[name]
            if not done:
                for buffer, old in zip(norm.buffers(recurse=False), before[name], strict=True):
                    buffer.copy_(old)
    return len(norms)


def _check(name: str, norm: _BatchNorm) -> None:
    mean, variance, count = norm.running_mean, norm.running_var, norm.num_batches_tracked
    assert mean is not None
    assert variance is not None
    if not int(count or 0):
        raise ValueError(f"{name}: expected every batch norm to be called, got none. Give batches that reach it.")
    if not bool((mean.isfinite() & variance.isfinite()).all()):
        raise ValueError(f"{name}: expected finite statistics, got inf or NaN. Look at the batches and the weights.")
