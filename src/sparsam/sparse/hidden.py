"""Weights that go on training behind the zeros of a masked weight (SR-STE): only the optimiser ever sees them."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from sparsam.sparse.weights import SparseWeight

__all__ = ["HiddenWeights"]


class HiddenWeights:
    """Dense weights beside masked ones: uncovered for the optimiser's step, covered by zeros everywhere else.

    Args:
        decay: share of itself that is added to an inactive weight's gradient, a pull to zero; None: nothing is hidden.

    Attributes:
        weights: by layer, tensors of the parameter's shape; at active units they are the parameter's own.
        uncovered: whether the parameters hold them now, between `uncover` and `cover`.
    """

    def __init__(self, decay: float | None) -> None:
        self.decay = decay
        self.weights: dict[str, torch.Tensor] = {}
        self.uncovered = False

    def begin(self, weight: SparseWeight) -> None:
        """Starts a layer with what it holds, unless it was started."""
        if self.decay is not None and weight.name not in self.weights:
            self.weights[weight.name] = weight.parameter.detach().clone()

    @torch.no_grad()
    def uncover(self, weight: SparseWeight) -> None:
        """Puts a layer's hidden weights and their pull to zero in place for the optimiser."""
        parameter, hidden, behind = weight.parameter, self.weights[weight.name], ~weight.active
        parameter.copy_(torch.where(behind, hidden, parameter))
        if parameter.grad is not None:
            parameter.grad.add_(hidden * behind, alpha=self.decay or 0.0)
        self.uncovered = True

    @torch.no_grad()
    def take_back(self, weight: SparseWeight) -> None:
        """Keeps what the optimiser made of them; the zeros are put back by the caller."""
        if self.uncovered and weight.name in self.weights:
            self.weights[weight.name].copy_(weight.parameter)

    @torch.no_grad()
    def show_active(self, weight: SparseWeight) -> None:
        """After a rewire: units that became active show the weights that they had behind their zeros."""
        weight.parameter.copy_(self.weights[weight.name])
        weight.keep_zeros()

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {name: hidden.clone() for name, hidden in self.weights.items()}

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        for name, hidden in state.items():
            self.weights[name].copy_(hidden)
