"""What scores gather over steps, kept for them: one float32 a stored weight and accumulator."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from sparsam.sparse.moments import moments
from sparsam.sparse.scores import Accumulator
from sparsam.sparse.weights import SparseWeight

__all__ = ["Gathering"]


class Gathering:
    """The accumulators of a method's scores.

    Args:
        accumulators: what is gathered; two scores may share one by its name.

    Attributes:
        totals: by layer and accumulator, tensors of the parameter's shape.
    """

    def __init__(self, accumulators: Iterable[Accumulator]) -> None:
        self.accumulators = {accumulator.name: accumulator for accumulator in accumulators}
        self.totals: dict[str, dict[str, torch.Tensor]] = {}

    def begin(self, weight: SparseWeight) -> None:
        """Starts a layer at zero, unless it was started."""
        if self.accumulators and weight.name not in self.totals:
            zeros = torch.zeros_like(weight.parameter, dtype=torch.float32)
            self.totals[weight.name] = {name: zeros.clone() for name in self.accumulators}

    def add(self, weight: SparseWeight) -> None:
        """Adds this step's gradient of a layer."""
        parameter, totals = weight.parameter, self.totals.get(weight.name)
        if not totals or parameter.grad is None:
            return
        gradient = parameter.grad.float()
        # of a gradient that is not finite nothing can be learnt, and its step will be skipped
        if bool(gradient.isfinite().all()):
            for name, total in totals.items():
                self.accumulators[name].update(total, parameter.detach(), gradient)

    def forget(self, layer: str, new_entries: torch.Tensor) -> None:
        """Sets entries that begin anew to zero."""
        for total in self.totals.get(layer, {}).values():
            total.masked_fill_(new_entries.expand_as(total), 0.0)

    def leave_to(self, optimizer: torch.optim.Optimizer, weights: Mapping[str, SparseWeight]) -> None:
        """Gathers no longer what turned out to be among the optimiser's moments."""
        for layer, totals in self.totals.items():
            known = moments(optimizer, weights[layer].parameter)
            for name, accumulator in self.accumulators.items():
                if accumulator.instead_of in known:
                    totals.pop(name, None)

    def state_dict(self) -> dict[str, dict[str, torch.Tensor]]:
        return {layer: {name: total.clone() for name, total in kept.items()} for layer, kept in self.totals.items()}

    def load_state_dict(
        self, state: Mapping[str, Mapping[str, torch.Tensor]], weights: Mapping[str, SparseWeight]
    ) -> None:
        for layer, kept in state.items():
            device = weights[layer].parameter.device
            self.totals[layer] = {name: total.clone().to(device) for name, total in kept.items()}
