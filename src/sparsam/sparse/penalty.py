"""L1, group lasso and L2 as parts: what pulls weights, or whole units, to zero before they are pruned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from sparsam.schedules import Schedule, constant
from sparsam.select import select
from sparsam.session import Part, Session
from sparsam.shards import own, own_part, whole
from sparsam.sparse.patterns import Pattern
from sparsam.sparse.weights import CompactWeight, SparseWeight, plain_modules, sparse_weights

__all__ = ["L1", "L2"]


class L1(Part):
    """Adds the gradient of a penalty to the gradients of weights before each step, ahead of clipping.

    L1: strength * sign(w). Group lasso: strength * w / ||unit||_2, which takes whole units to zero together. A weight
    of zero, or a unit of zeros, is not moved. An optimiser that divides by the size of gradients (Adam) divides this
    one too, so that the strength that fits depends on it.

    Args:
        strength: of the penalty, a number or a schedule of the applied step; one that falls to 0 ends it.
        groups: False: L1. True: group lasso over the units of each sparse weight's own pattern. A pattern: the same,
            and dense matrices by its units.
        dense: globs over the names of layers whose dense weight matrix gets the penalty too; sparse ones always do.

    Source: Yuan and Lin 2006, Journal of the Royal Statistical Society B 68 (group lasso); Wen et al. 2016,
    arXiv:1608.03665 (structured sparsity learning).
    """

    def __init__(
        self, strength: float | Schedule, *, groups: bool | Pattern = False, dense: Sequence[str] = ()
    ) -> None:
        if not callable(strength) and not strength >= 0:
            raise ValueError(f"strength: expected a number >= 0 or a schedule, got {strength}.")
        self.strength = strength if callable(strength) else constant(float(strength))
        self.groups, self.dense = groups, dense
        self._penalised: list[_Sparse | _Dense] = []

    def attach(self, session: Session) -> None:
        self.session = session
        weights = sparse_weights(session.model)
        held = {id(weight.parameter) for weight in weights.values()}
        matrices = {}
        for name, module in plain_modules(session.model):
            weight = module._parameters.get("weight")
            if weight is not None and weight.dim() >= 2 and id(weight) not in held:
                held.add(id(weight))  # tied weights are one
                matrices[name] = module
        chosen = select(matrices, self.dense) if self.dense else []
        if chosen and self.groups is True:
            raise ValueError(
                f"{type(self).__name__}: expected a pattern for the groups of {chosen[0]}, which is dense and has none "
                "of its own. Give groups=Block(32, 32) or another pattern."
            )
        if not weights and not chosen:
            raise ValueError(
                f"{type(self).__name__}: expected a model with sparse layers or dense=[...] that names some, got "
                "neither. Call sparsify first, with density 1 for a dense start."
            )
        pattern = self.groups if isinstance(self.groups, Pattern) else None
        self._penalised = [_Sparse(weight) for weight in weights.values()]
        self._penalised += [_Dense(matrices[name], pattern) for name in chosen]

    @torch.no_grad()
    def before_step(self) -> None:
        strength = self.strength(self.session.applied_steps)
        if not strength:
            return
        for weight in self._penalised:
            parameter = weight.parameter
            if parameter.grad is not None:
                own(parameter.grad).add_(self._pull(weight), alpha=strength)

    def metrics(self) -> dict[str, float]:
        name = f"{type(self).__name__.lower()}_strength"
        return {name: float(self.strength(max(0, self.session.applied_steps - 1)))}

    def detach(self) -> None:
        self._penalised = []

    def _pull(self, weight: _Sparse | _Dense) -> torch.Tensor:
        return weight.directions() if self.groups else own(weight.parameter).sign()


class L2(L1):
    """Adds strength * w to the gradients of weights before each step: weight decay whose strength may be scheduled.

    With SGD the same as its `weight_decay`; Adam divides it as any gradient, where AdamW's own decay is apart.

    Args:
        strength: of the penalty, a number or a schedule of the applied step; one that falls to 0 ends it.
        dense: globs over the names of layers whose dense weight matrix gets the penalty too; sparse ones always do.
    """

    def __init__(self, strength: float | Schedule, *, dense: Sequence[str] = ()) -> None:
        super().__init__(strength, dense=dense)

    def _pull(self, weight: _Sparse | _Dense) -> torch.Tensor:
        return own(weight.parameter)


@dataclass(frozen=True)
class _Sparse:
    """A weight with a topology, in either storage."""

    weight: SparseWeight

    @property
    def parameter(self) -> nn.Parameter:
        return self.weight.parameter

    def directions(self) -> torch.Tensor:
        """Each weight over the norm of its unit; of this rank's own."""
        parameter = self.parameter
        if isinstance(self.weight, CompactWeight):
            entries = own(parameter)
            return _over(entries, entries.float().square().sum((1, 2), keepdim=True).sqrt())
        return _by_pattern(parameter, self.weight.pattern)


@dataclass(frozen=True)
class _Dense:
    """The weight matrix of a layer that is not sparse."""

    module: nn.Module
    pattern: Pattern | None

    @property
    def parameter(self) -> nn.Parameter:
        return self.module.get_parameter("weight")

    def directions(self) -> torch.Tensor:
        assert self.pattern is not None
        return _by_pattern(self.parameter, self.pattern)


def _by_pattern(parameter: torch.Tensor, pattern: Pattern) -> torch.Tensor:
    shape = (parameter.shape[0], parameter.shape[1:].numel())
    grid = pattern.grid(shape)
    if grid == shape:
        return own(parameter).sign()
    entries = whole(parameter).reshape(shape)
    # where each entry's unit is: sums over units of any pattern, without what pads the units at the edge
    unit = pattern.expand(torch.arange(grid[0] * grid[1], device=parameter.device).view(grid), shape)
    sums = torch.zeros(grid[0] * grid[1], dtype=torch.float32, device=parameter.device)
    sums.index_add_(0, unit.reshape(-1), entries.float().square().reshape(-1))
    return own_part(_over(entries, sums.sqrt()[unit]).reshape(parameter.shape), parameter)


def _over(entries: torch.Tensor, norms: torch.Tensor) -> torch.Tensor:
    """Zero where the norm is: there the penalty has no direction."""
    return torch.where(norms > 0, entries / norms, 0.0).to(entries.dtype)
