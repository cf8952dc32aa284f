"""What a requested format becomes on a device: itself, another one, a simulation where that is allowed, or an error."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch

from sparsam.kernels.formats import BF16, FP8, FP8_ROWS, FP16, FP32, INT8, MX_FP8, TF32, ProductFormat

__all__ = ["Resolved", "requested", "resolve"]

# First compute capability of an NVIDIA GPU with such a product.
_CAPABILITIES = {TF32: (8, 0), INT8: (8, 0), FP8: (8, 9), FP8_ROWS: (9, 0), MX_FP8: (10, 0)}
# What a format is replaced by, in silence but for the table, where there is no fast product of it: as good or better.
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


def resolve(format: ProductFormat, device: torch.device, simulate: bool = False) -> Resolved:
    """What a format becomes on a device.

    fp16 becomes bf16 on a CPU, tf32 becomes fp32 where there is none. Whether int8 is faster than bf16 is not asked
    here: it exists.

    Args:
        format: what a policy asks for.
        device: where the products run.
        simulate: whether to simulate what the device lacks.

    Raises:
        ValueError: the device has no fast product of this format, and none was to be simulated.
    """
    if _has(format, device):
        return Resolved(format, format)
    where = "this CPU" if device.type == "cpu" else f"this device ({device.type})"
    if format in _REPLACEMENTS:
        instead = _REPLACEMENTS[format]
        return Resolved(format, instead, reason=f"{instead} for {format}: {where} has no fast {format} product")
    if not simulate:
        raise ValueError(
            f"{format}: {where} has no fast {format} product. "
            "Use bf16, or say simulate: true for its numbers at no gain in speed."
        )
    return Resolved(format, format, "simulated", f"{where} has no fast {format} product")


def requested(formats: Iterable[ProductFormat], device: torch.device, simulate: bool = False) -> tuple[Resolved, ...]:
    """What each of the formats becomes, each once, in their order.

    Raises:
        ValueError: as `resolve`, for the first that the device lacks.
    """
    return tuple(resolve(format, device, simulate) for format in dict.fromkeys(formats))


def _has(format: ProductFormat, device: torch.device) -> bool:
    """Whether the device has a product of this format that is worth its name."""
    if format in (FP32, BF16):
        return True
    if device.type == "cpu":
        return format == INT8
    if device.type != "cuda" or format not in _CAPABILITIES:
        return format == FP16
    # other makers' GPUs number themselves differently and have other 8-bit floats
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= _CAPABILITIES[format]
