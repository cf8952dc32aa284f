"""What a method and a score may see of one layer: read-only, the same in compact and masked storage."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from sparsam.sparse.patterns import Pattern

__all__ = ["LayerView", "stateless_uniform"]


@dataclass(frozen=True)
class LayerView:
    """One sparse layer at one step. "Entries" are the weights as they are stored: (S, R, C) in compact storage, the
    weight's own shape in masked storage; `reduce` brings any tensor of that shape to the grid of units. Under FSDP2
    they are DTensors, of which each rank computes its own part, and what `reduce` returns is whole on every rank.

    Attributes:
        name: the layer's name in the model.
        shape: of the dense weight, kernel sizes of a convolution included.
        pattern: the pattern of its units.
        topology: bool grid, True = active unit.
        weight: entries, detached.
        gradient: entries, the gradient of the stored weights, or None before a backward.
        moments: entries by name, what the optimiser keeps per weight.
        reduce: entries -> float32 grid, the mean over each unit; 0 where compact storage has no entries.
        seed: of the session.
        step: the applied step that this update belongs to.
        growth: float32 grid, mean |dense gradient| of every unit, active or not; None but on update steps.
        accumulators: float32 entries by name, what the scores of this method gather over steps.
    """

    name: str
    shape: tuple[int, ...]
    pattern: Pattern
    topology: torch.Tensor
    weight: torch.Tensor
    gradient: torch.Tensor | None
    moments: Mapping[str, torch.Tensor]
    reduce: Callable[[torch.Tensor], torch.Tensor] = field(repr=False)
    seed: int
    step: int
    growth: torch.Tensor | None
    accumulators: Mapping[str, torch.Tensor] = field(default_factory=dict)

    @property
    def units(self) -> int:
        return self.topology.numel()

    @property
    def active_units(self) -> int:
        return int(self.topology.sum())

    @property
    def density(self) -> float:
        """Active share of the units."""
        return self.active_units / self.units

    @property
    def weights(self) -> int:
        """Entries of the dense weight."""
        return math.prod(self.shape)

    def random(self, salt: str = "") -> torch.Tensor:
        """Uniform [0, 1) over the grid, the same on every rank and after every resume."""
        shape = tuple(self.topology.shape)
        return stateless_uniform(shape, self.seed, self.step, self.name + salt, self.topology.device)


def stateless_uniform(
    shape: tuple[int, ...], seed: int, step: int, name: str, device: torch.device | str = "cpu"
) -> torch.Tensor:
    """float32 uniform [0, 1) that depends on nothing but (seed, step, name): no generator state to keep or to lose."""
    key = zlib.crc32(f"{seed}/{step}/{name}".encode())
    # drawn on the CPU whatever the device, so that ranks of different kinds agree
    return torch.rand(shape, generator=torch.Generator().manual_seed(key)).to(device)
