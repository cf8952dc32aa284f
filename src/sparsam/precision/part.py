"""The part that chooses number formats. One format for all matrix products, through torch's autocast."""

from __future__ import annotations

import contextlib
from typing import Literal

import torch

from sparsam.session import Part, Session

__all__ = ["Precision"]


class Precision(Part):
    """Runs the forward pass in a number format; weights, moments and the loss stay float32.

    Args:
        format: "fp32" or "bf16".

    Raises:
        ValueError: another format.
    """

    def __init__(self, format: Literal["fp32", "bf16"] = "bf16") -> None:
        if format not in ("fp32", "bf16"):
            raise ValueError(f"precision: expected fp32 or bf16, got {format!r}. bf16 is the one that CPUs run fast.")
        self.format = format

    def attach(self, session: Session) -> None:
        self.device = next(session.model.parameters()).device.type

    def forward(self) -> contextlib.AbstractContextManager[object]:
        if self.format == "fp32":
            return contextlib.nullcontext()
        return torch.autocast(self.device, torch.bfloat16)
