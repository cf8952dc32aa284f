"""What a requested format becomes on a device: itself, another one, a simulation where that is allowed, or an error."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch

from sparsam.kernels.formats import BF16, FP16, FP32, TF32, ProductFormat, arithmetic

__all__ = ["Resolved", "requested", "resolve"]

# What a format is replaced by, in silence but for the table, where there is no real product of it: as wide or wider.
_REPLACEMENTS = {FP16: BF16, TF32: FP32}


@dataclass(frozen=True)
class Resolved:
    """What was asked for and what it became.

    Attributes:
        asked: the format that was asked for.
        format: the format that products run in.
        arithmetic: "real", or "simulated": operands are rounded as in the format and multiplied in another.
        reason: why it is not what was asked for, or why it is simulated; "" otherwise.
    """

    asked: ProductFormat
    format: ProductFormat
    arithmetic: Literal["real", "simulated"] = "real"
    reason: str = ""


def resolve(format: ProductFormat, device: torch.device, simulate: bool = False, blocks: bool = False) -> Resolved:
    """What a format becomes on a device.

    Where `arithmetic` says that it would be simulated, fp16 becomes bf16 and tf32 fp32. Whether a real product is
    faster than one of bf16 is not asked here.

    Args:
        format: what a policy asks for.
        device: where the products run.
        simulate: whether to simulate what is lacking.
        blocks: ask about block-sparse weights.

    Raises:
        ValueError: there is no real product of this format, and none was to be simulated.
    """
    if arithmetic(format, device, blocks) == "real":
        return Resolved(format, format)
    if blocks:
        lacking = f"there is no fast {format} product of block-sparse weights"
    elif device.type == "cpu":
        lacking = f"this CPU has no fast {format} product"
    else:
        lacking = f"there is no fast {format} product for {device.type} here"
    if format in _REPLACEMENTS:
        instead = _REPLACEMENTS[format]
        return Resolved(format, instead, reason=f"{instead} for {format}: {lacking}")
    if not simulate:
        raise ValueError(f"{format}: {lacking}. Use bf16, or say simulate: true for its numbers at no gain in speed.")
    return Resolved(format, format, "simulated", lacking)


def requested(formats: Iterable[ProductFormat], device: torch.device, simulate: bool = False) -> tuple[Resolved, ...]:
    """What each of the formats becomes, each once, in their order.

    Raises:
        ValueError: as `resolve`, for the first that is lacking.
    """
    return tuple(resolve(format, device, simulate) for format in dict.fromkeys(formats))
