"""What batch norms know of past batches, kept so that a batch whose step is refused leaves no trace in it."""

from __future__ import annotations

import torch
from torch import nn

__all__ = ["RunningStatistics"]

_NAMES = ("running_mean", "running_var", "num_batches_tracked")


class RunningStatistics:
    """Running means and variances, and a copy of them: one batch that is not finite would spoil them for good."""

    def __init__(self, model: nn.Module) -> None:
        self._buffers = [
            buffer
            for module in model.modules()
            for name, buffer in module.named_buffers(recurse=False)
            if name in _NAMES
        ]
        self._kept: list[torch.Tensor] = []

    def keep(self) -> None:
        """Takes a copy of now, unless one is kept."""
        if not self._kept:
            self._kept = [buffer.clone() for buffer in self._buffers]

    @torch.no_grad()
    def put_back(self) -> None:
        """Brings back what was kept, if anything was, and forgets it."""
        for kept, buffer in zip(self._kept, self._buffers, strict=False):
            buffer.copy_(kept)
        self._kept = []

    def forget(self) -> None:
        """What was kept is not needed."""
        self._kept = []
