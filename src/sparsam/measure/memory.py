"""Counts bytes: the peak of this process, and what training keeps per weight (parameters, gradients, optimiser).

Not for activations tensor by tensor; their total shows in the peak.
"""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["buffer_bytes", "peak_rss_bytes", "reset_peak_rss", "resident_bytes", "tensor_bytes", "training_bytes"]

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")


def peak_rss_bytes() -> int:
    """Most memory that this process ever held resident, since its start or since `reset_peak_rss` succeeded.

    Returns:
        bytes; on Linux the kernel's VmHWM, elsewhere ``ru_maxrss`` (which cannot be reset).
    """
    return _from_status("VmHWM:") or _ru_maxrss()


def resident_bytes() -> int:
    """Memory that this process holds resident now.

    Returns:
        bytes; on Linux the kernel's VmRSS, elsewhere the peak so far, which is no less.
    """
    return _from_status("VmRSS:") or _ru_maxrss()


def _from_status(key: str) -> int:
    try:
        for line in _STATUS.read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith(key):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 0


def _ru_maxrss() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def reset_peak_rss() -> bool:
    """Starts the peak anew from what is resident now.

    Returns:
        False where the kernel does not allow it: the peak then still counts from the start of the process, and a
        figure of it has to say so.
    """
    try:
        _CLEAR.write_text("5", encoding="ascii")
    except OSError:
        return False
    return True


def tensor_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the storages behind some tensors on this rank, each once, however many views or ties point at it."""
    seen: dict[tuple[str, int], int] = {}
    for tensor in tensors:
        if tensor.is_sparse:
            parts = [tensor._indices(), tensor._values()]
        else:
            parts = [tensor]
        for part in parts:
            part = getattr(part, "_local_tensor", part)  # of a DTensor, what this rank holds
            if part.device.type == "meta":
                seen[("meta", id(part))] = part.numel() * part.element_size()
            else:
                storage = part.untyped_storage()
                if storage.nbytes():
                    seen[(str(part.device), storage.data_ptr())] = storage.nbytes()
    return sum(seen.values())


def training_bytes(parameters: Iterable[Tensor], optimizer: torch.optim.Optimizer | None = None) -> dict[str, int]:
    """Bytes that training keeps for some parameters, counted from the tensors themselves.

    A parameter that is trained but holds no gradient at this moment (they are usually freed between steps) counts with
    its own size, because that is what the next backward allocates. Frozen parameters have no gradient.

    Args:
        parameters: parameters, ties and repeats are counted once.
        optimizer: its state for these parameters is counted, step counters included; None counts 0.

    Returns:
        ``{"parameters": bytes, "gradients": bytes, "optimizer": bytes}``
    """
    unique: dict[int, Tensor] = {id(p): p for p in parameters}
    # A tie through views (two Parameters over one storage) keeps one weight but two gradients.
    gradients = [p.grad for p in unique.values() if p.grad is not None]
    missing = sum(p.numel() * p.element_size() for p in unique.values() if p.grad is None and p.requires_grad)
    state: list[Tensor] = []
    if optimizer is not None:
        for parameter, entry in optimizer.state.items():
            if id(parameter) in unique:
                state += _tensors(entry)
    return {
        "parameters": tensor_bytes(unique.values()),
        "gradients": tensor_bytes(gradients) + missing,
        "optimizer": tensor_bytes(state),
    }


def buffer_bytes(model: nn.Module) -> int:
    """Bytes of a model's buffers: topologies and derived indices live there, so the price of sparsity shows here."""
    return tensor_bytes(model.buffers())


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        return [tensor for item in value.values() for tensor in _tensors(item)]
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in _tensors(item)]
    return []
