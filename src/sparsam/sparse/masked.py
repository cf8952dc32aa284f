"""Masked storage: the weight stays a dense tensor, and its zeros stay zero. Fewer FLOPs on paper, same time."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from sparsam.sparse.patterns import Block, Pattern, Unstructured

__all__ = ["MASKABLE", "TopologyBuffer", "add_topology", "masked_weights", "remove_topology"]

# The weights that masked storage accepts, by module type: everything else is listed with the reason.
MASKABLE: dict[type[nn.Module], tuple[str, ...]] = {
    nn.Linear: ("weight",),
    nn.Embedding: ("weight",),
}
_SUFFIX = "_topology"


@dataclass(frozen=True)
class TopologyBuffer:
    """Where a masked weight and its topology live. The topology is a persistent bool buffer of the same module.

    Attributes:
        module: the owner of the weight.
        weight_name: the weight's name in the module.
        pattern: the pattern of its units.
    """

    module: nn.Module
    weight_name: str
    pattern: Pattern

    @property
    def parameter(self) -> nn.Parameter:
        if self.weight_name not in self.module._parameters:
            raise ValueError(
                f"{type(self.module).__name__}: expected the masked {self.weight_name} to be a parameter, but it was "
                "reparametrised (weight_norm or spectral_norm) after sparsify. Remove that, or densify first."
            )
        return self.module.get_parameter(self.weight_name)

    @property
    def topology_name(self) -> str:
        return self.weight_name + _SUFFIX

    @property
    def topology(self) -> torch.Tensor:
        return self.module.get_buffer(self.topology_name)

    @property
    def active(self) -> torch.Tensor:
        """bool of the weight's shape, True = entry of an active unit."""
        shape = self.parameter.shape
        return self.pattern.expand(self.topology, (shape[0], shape[1:].numel())).view(shape)

    @torch.no_grad()
    def apply(self, entries: torch.Tensor | None) -> None:
        """Sets a tensor of the weight's shape to zero outside the topology; also where it holds NaN."""
        if entries is not None:
            entries.masked_fill_(~self.active, 0.0)


def add_topology(module: nn.Module, weight_name: str, topology: torch.Tensor, pattern: Pattern) -> TopologyBuffer:
    """Registers a weight's topology beside it and sets the inactive weights to zero."""
    module.register_buffer(weight_name + _SUFFIX, topology.to(module.get_parameter(weight_name).device))
    # read back by masked_weights: a copied or unpickled module must know its own pattern
    module.__dict__.setdefault("_sparsam_patterns", {})[weight_name] = pattern
    buffer = TopologyBuffer(module, weight_name, pattern)
    buffer.apply(buffer.parameter)
    return buffer


def remove_topology(module: nn.Module, weight_name: str) -> None:
    """Takes the topology away; the zeros stay until training fills them."""
    delattr(module, weight_name + _SUFFIX)
    patterns = module.__dict__["_sparsam_patterns"]
    del patterns[weight_name]
    if not patterns:
        del module.__dict__["_sparsam_patterns"]


def masked_weights(module: nn.Module) -> list[TopologyBuffer]:
    """The masked weights that a module owns itself."""
    patterns: dict[str, Block | Unstructured] = module.__dict__.get("_sparsam_patterns", {})
    return [TopologyBuffer(module, name, pattern) for name, pattern in patterns.items()]
