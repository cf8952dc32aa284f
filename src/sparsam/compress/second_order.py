"""The second-order score of units and the update of the weights that stay (optimal brain surgeon, in Fisher blocks).

With L'' approximated by the damped empirical Fisher matrix F = lambda I + 1/m sum_i g_i g_i^T of a group of weights w,

    removing a unit Q costs           1/2 w_Q^T ([F^-1]_QQ)^-1 w_Q,
    and where all of Q went, K gains  F_KK^-1 F_KQ w_Q   (the minimum over K of the same quadratic form).

F has rank m but for its damping, so that no matrix of its size is ever made: by Woodbury everything is in m x m ones.
Shape letters: m gradients, (N, K) a weight, f Fisher blocks, u units in each, q weights in a unit, n = u q.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from sparsam.sparse.patterns import Pattern
from sparsam.sparse.views import LayerView

__all__ = ["SecondOrder", "compensated", "removal_costs"]

_CHUNK = 2**22  # float64 numbers that one step of the computation may hold in its largest operand


@dataclass(frozen=True)
class SecondOrder:
    """A score for `prune`: what removing a unit costs, with an update of the weights that stay beside it.

    Memory while pruning: 4 bytes * batches * weights of the layers that are pruned, all held at once, and 8 bytes *
    batches^2 for each unit of a chunk. Time: about batches^2 operations a weight, and the square of a unit's
    size where that is smaller than the number of batches.

    Args:
        size: weights of a Fisher block: as many whole units side by side in a row of the grid as fit, at least one.
            Units of one block are seen together; only they take over what a removed one did.
        damping: lambda, as a share of the layer's mean squared gradient.
        update: whether the weights that stay are moved to make up for those that go. Without, a unit's cost is what its
            removal costs when nothing does, w_Q^T F_QQ w_Q / 2, and `size` has no say.
        memory_bytes: what gradients may take; more is refused.

    Each calibration batch gives one gradient, so small batches (1 to 16 samples) tell more than large ones.

    Source: Kurtic et al. 2022, arXiv:2203.07259 (oBERT); Singh and Alistarh 2020, arXiv:2004.14340 (WoodFisher).
    Differs: damping is relative to the gradients; all units that go from a Fisher block are made up for together,
    where the papers add up the updates of each alone; blocks of any size, as F is never formed.
    """

    size: int = 1024
    damping: float = 0.01
    update: bool = True
    memory_bytes: int = 4 * 2**30

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"size: expected at least 1 weight in a Fisher block, got {self.size}.")
        if not (self.damping > 0 and math.isfinite(self.damping)):
            raise ValueError(f"damping: expected a share of the mean squared gradient > 0, got {self.damping}.")

    def __call__(self, view: LayerView) -> torch.Tensor:
        """Mean over each unit of what its removal costs, as `prune` has measured it.

        Raises:
            ValueError: nobody has.
        """
        costs = view.accumulators.get("removal_cost")
        if costs is None:
            raise ValueError(
                f"{view.name}: expected costs of removal, got none: the second-order score reads calibration batches "
                "one by one. Use it as the score of prune(..., data=, loss=)."
            )
        return view.reduce(costs)

    def check_memory(self, batches: int, weights: int) -> None:
        """Refuses before gradients are gathered what would not fit.

        Raises:
            ValueError: says how many batches would.
        """
        needed = 4 * batches * weights
        if needed > self.memory_bytes:
            raise ValueError(
                f"SecondOrder: expected gradients of at most {self.memory_bytes / 2**30:.3g} GiB, got {batches} "
                f"batches of {weights} weights, {needed / 2**30:.3g} GiB. Give {self.memory_bytes // (4 * weights)} "
                "batches, prune some layers at a time with include, or raise memory_bytes."
            )


@torch.no_grad()
def removal_costs(
    weight: torch.Tensor, gradients: torch.Tensor, pattern: Pattern, size: int = 1024, damping: float = 0.01
) -> torch.Tensor:
    """What the removal of each unit alone costs, over its number of weights, when its Fisher block makes up for it.

    Args:
        weight: (N, K).
        gradients: (m, N, K), one per calibration batch.
        pattern: of the units.
        size: weights of a Fisher block.
        damping: as a share of the mean squared gradient.

    Returns:
        float32 over the pattern's grid, in units of the loss.
    """
    index = _layout(pattern, (weight.shape[0], weight.shape[1]), size)
    m, lam = len(gradients), _lambda(gradients, damping)
    costs = []
    for places, w, g in _chunks(index, weight, gradients):
        f, u, q = places.shape
        eye = torch.eye(m, dtype=g.dtype, device=g.device)
        if q > m:  # the Schur complement of the rest: lambda I + 1/m G_Q^T (I + G_R G_R^T / (m lambda))^-1 G_Q
            own = g @ g.mT  # (f, u, m, m)
            rest = own.sum(1, keepdim=True) - own
            moved = g @ w[..., None]  # (f, u, m, 1)
            solved = torch.linalg.solve(eye + rest / (m * lam), moved)
            cost = (lam * w.square().sum(-1) + (moved * solved).sum((-2, -1)) / m) / 2
        else:  # [F^-1]_QQ itself, which is the smaller matrix here
            flat = g.transpose(1, 2).reshape(f, m, u * q)
            solved = torch.linalg.solve(eye + flat @ flat.mT / (m * lam), flat).view(f, m, u, q).transpose(1, 2)
            inverse = (torch.eye(q, dtype=g.dtype, device=g.device) - g.mT @ solved / (m * lam)) / lam
            cost = (w * torch.linalg.solve(inverse, w)).sum(-1) / 2
        costs.append(cost / (places < weight.numel()).sum(-1).clamp(min=1))
    down, across = pattern.grid((weight.shape[0], weight.shape[1]))
    return torch.cat(costs).view(down, -1)[:, :across].clamp(min=0).float()


@torch.no_grad()
def compensated(
    weight: torch.Tensor,
    gradients: torch.Tensor,
    topology: torch.Tensor,
    pattern: Pattern,
    size: int = 1024,
    damping: float = 0.01,
) -> torch.Tensor:
    """The weight without its inactive units, with what is left moved to where the quadratic form is least.

    Args:
        weight: (N, K), before anything was removed.
        gradients: (m, N, K), taken at that weight.
        topology: bool over the pattern's grid, True = stays.
        pattern: of the units.
        size: weights of a Fisher block.
        damping: as a share of the mean squared gradient.

    Returns:
        (N, K), zero outside the topology.
    """
    shape = (weight.shape[0], weight.shape[1])
    index = _layout(pattern, shape, size)
    stays = torch.cat([pattern.expand(topology, shape).reshape(-1), topology.new_zeros(1)])
    m, lam = len(gradients), _lambda(gradients, damping)
    moved = torch.zeros(weight.numel() + 1, dtype=torch.float64, device=weight.device)
    for places, w, g in _chunks(index, weight, gradients):
        f = len(places)
        kept = stays[places].view(f, 1, -1)
        flat, w = g.transpose(1, 2).reshape(f, m, -1), w.view(f, 1, -1)
        gone = ((flat * w) * ~kept).sum(-1, keepdim=True)  # G_Q w_Q, (f, m, 1)
        flat = flat * kept
        eye = torch.eye(m, dtype=g.dtype, device=g.device)
        update = flat.mT @ torch.linalg.solve(m * lam * eye + flat @ flat.mT, gone)
        moved[places.view(f, -1)] = update.squeeze(-1)
    new = (weight.double().reshape(-1) + moved[:-1]) * stays[:-1]
    return new.view(shape).to(weight.dtype)


def _lambda(gradients: torch.Tensor, damping: float) -> float:
    # a layer that no batch reaches has no curvature: all its costs are next to nothing, by magnitude
    return max(damping * float(gradients.double().square().mean()), 1e-30)


def _layout(pattern: Pattern, shape: tuple[int, int], size: int) -> torch.Tensor:
    """int64 (f, u, q): where the weights of each Fisher block's units are in the flat weight; N * K is padding."""
    down, across = pattern.grid(shape)
    weights = shape[0] * shape[1]
    unit = pattern.expand(torch.arange(down * across).view(down, across), shape).reshape(-1)
    order = unit.argsort(stable=True)
    counts = unit.bincount(minlength=down * across)
    starts = counts.cumsum(0) - counts
    q = int(counts.max())
    index = torch.full((down * across, q), weights)
    index[unit[order], torch.arange(weights) - starts[unit[order]]] = order
    together = min(max(1, size // q), across)
    padded = F.pad(index.view(down, across, q), (0, 0, 0, -across % together), value=weights)
    return padded.view(-1, together, q)


def _chunks(
    index: torch.Tensor, weight: torch.Tensor, gradients: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Some Fisher blocks at a time: places (f, u, q), float64 weights (f, u, q) and gradients (f, u, m, q)."""
    m = len(gradients)
    _, u, q = index.shape
    largest = max(u * q * m, u * min(m, q) * max(m, q), m * m)
    flat, samples = F.pad(weight.reshape(-1), (0, 1)), gradients.reshape(m, -1)
    for places in index.to(weight.device).split(max(1, _CHUNK // largest)):
        inside = places < weight.numel()
        g = samples[:, places.clamp(max=weight.numel() - 1).view(-1)].view(m, *places.shape)
        yield places, flat[places].double(), (g.double() * inside).permute(1, 2, 0, 3)
