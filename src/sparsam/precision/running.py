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
        self._kept = [buffer.clone() for buffer in self._buffers]

    @torch.no_grad()
    def keep(self) -> None:
        """Takes the copy of now."""
        for kept, buffer in zip(self._kept, self._buffers, strict=True):
            kept.copy_(buffer)

    @torch.no_grad()
    def put_back(self) -> None:
        """Brings back what was kept last."""
        for kept, buffer in zip(self._kept, self._buffers, strict=True):
            buffer.copy_(kept)
