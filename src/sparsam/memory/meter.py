"""Counts what a training step keeps in memory, by kind: the meter of `Recompute`, `Offload` and sharding."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from sparsam.measure.figure import Figure, measured
from sparsam.measure.memory import buffer_bytes, peak_rss_bytes, resident_bytes, tensor_bytes, training_bytes
from sparsam.memory.storages import kept, own_storages, storage_of, unchanged
from sparsam.session import Part, Session

__all__ = ["MemoryMeter"]

_KINDS = ("parameters", "buffers", "gradients", "optimizer", "residuals", "activations", "peak", "fragmentation")


class MemoryMeter(Part):
    """Bytes of one rank: parameters, gradients, optimiser, residuals, activations, and the peak of all of it.

    Counted from the tensors themselves, storages once. Activations are what autograd holds when the forward pass ends,
    weights and buffers left out; what a recomputation makes for a while afterwards shows in the peak alone. The peak
    of a CPU model is the most that the process held resident, without what it held before the model was there (Python,
    torch and libraries); on CUDA it is that of torch's allocator. Fragmentation, (reserved - allocated) / reserved and
    the bytes of inactive splits, is known on CUDA alone: the CPU's allocator has no such figure.

    Give it after `Offload`, so that what is moved away is not counted; before it, so that it is.

    Args:
        every: looks at the first step and then at every so many; in between numbers stay.
        own_bytes: resident bytes of the process before the model was built (`resident_bytes()`). None takes what is
            resident when attached, less parameters, gradients, optimiser and buffers that are there by then.
    Source: torch.cuda.memory_stats for the terms.
    """

    def __init__(self, every: int = 100, own_bytes: int | None = None) -> None:
        if every < 1:
            raise ValueError(f"every: expected a number of steps of at least 1, got {every}.")
        self.every = every
        self.own_bytes = own_bytes
        self._given = own_bytes
        self._bytes: dict[str, int] = {}
        self._own: set[tuple[str, int] | None] = set()
        self._saved: dict[tuple[str, int], int] = {}
        self._activations = 0  # the most of a window's micro-batches

    def attach(self, session: Session) -> None:
        self.session = session
        self._device = next(session.model.parameters()).device
        if self._given is None:
            gc.collect()
            there = training_bytes(session.model.parameters(), session.optimizer)
            grads = tensor_bytes(one.grad for one in session.model.parameters() if one.grad is not None)
            held = there["parameters"] + there["optimizer"] + grads + buffer_bytes(session.model)
            self.own_bytes = max(0, resident_bytes() - (held if self._device.type == "cpu" else 0))

    @contextlib.contextmanager
    def forward(self) -> Iterator[None]:
        if not (torch.is_grad_enabled() and self._looks):
            yield
            return
        self._own, self._saved = own_storages(self.session.model), {}
        with saved_tensors_hooks(self._pack, _unpack):
            yield
        self._activations = max(self._activations, sum(self._saved.values()))
        self._saved = {}

    def after_step(self, applied: bool) -> None:
        # gradients are still there; the step that was looked at has been counted if it was applied
        if (self.session.applied_steps - int(applied)) % self.every:
            return
        self._bytes |= training_bytes(self.session.model.parameters(), self.session.optimizer)
        self._bytes["buffers"] = buffer_bytes(self.session.model)
        self._bytes["activations"], self._activations = self._activations, 0
        residuals = [getattr(part, "residuals", None) for part in self.session.parts]
        self._bytes["residuals"] = sum(one.nbytes for one in residuals if one is not None)

    def figures(self) -> dict[str, Figure]:
        """What was measured, by name; what this device does not have is left out. The peak is that of now."""
        if self._bytes:
            self._read_peak()
        figures = {name: measured(float(self._bytes[name]), "B") for name in _KINDS if name in self._bytes}
        if self._device.type == "cpu" and "peak" in self._bytes:
            figures["peak_with_interpreter"] = measured(float(self._bytes["peak"] + (self.own_bytes or 0)), "B")
        if self._device.type == "cuda" and figures:
            figures |= _fragmentation(self._device)
        return figures

    def metrics(self) -> dict[str, float]:
        return {f"memory.{name}": figure.value for name, figure in self.figures().items()}

    def __str__(self) -> str:
        """One line for each kind, n/a where this device has no such figure."""
        figures = self.figures()
        return "\n".join(f"{name:14} {figures[name].text if name in figures else 'n/a'}" for name in _KINDS)

    def detach(self) -> None:
        self._bytes, self._saved, self._own, self._activations = {}, {}, set(), 0
        self.own_bytes = self._given

    @property
    def _looks(self) -> bool:
        return self.session.applied_steps % self.every == 0

    def _read_peak(self) -> None:
        if self._device.type == "cuda":
            self._bytes["peak"] = torch.cuda.max_memory_allocated(self._device)
        else:
            self._bytes["peak"] = max(0, peak_rss_bytes() - (self.own_bytes or 0))

    def _pack(self, tensor: Tensor) -> tuple[Tensor, int]:
        where = storage_of(tensor)
        if where is not None and where not in self._own:
            self._saved[where] = tensor.untyped_storage().nbytes()
        return kept(tensor)


def _unpack(packed: tuple[Tensor, int]) -> Tensor:
    return unchanged(packed, "MemoryMeter")


def _fragmentation(device: torch.device) -> dict[str, Figure]:
    stats: dict[str, Any] = torch.cuda.memory_stats(device)
    reserved, allocated = stats["reserved_bytes.all.current"], stats["allocated_bytes.all.current"]
    return {
        "fragmentation": measured((reserved - allocated) / max(1, reserved), "share"),
        "inactive_splits": measured(float(stats["inactive_split_bytes.all.current"]), "B"),
    }
