"""Which weights live and die together. A pattern lays a grid of units over a weight seen as (rows, cols)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
import torch.nn.functional as F

__all__ = ["NM", "Block", "Neuron", "Pattern", "Unstructured", "top_k"]


class Pattern(ABC):
    """A grid of units over a weight of shape (N, K); weights of more dimensions are seen as (N, the rest)."""

    @abstractmethod
    def grid(self, shape: tuple[int, int]) -> tuple[int, int]:
        """How many units there are, down and across."""

    @abstractmethod
    def reduce(self, entries: torch.Tensor) -> torch.Tensor:
        """Mean of the entries (N, K) of each unit, float32 over the grid; padding is not averaged over."""

    @abstractmethod
    def expand(self, units: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
        """Repeats each unit's value over its entries: (N, K) of units' dtype."""

    def choose(self, scores: torch.Tensor, count: int, ties: torch.Tensor) -> torch.Tensor:
        """Topology of exactly `count` units with the highest scores that the pattern allows together; equal scores are
        ordered by `ties`. Units of score +inf are always among them."""
        return top_k(scores, count, ties)

    def most(self, grid: tuple[int, int]) -> int:
        """How many units of a grid may be active together, all of them aside."""
        return grid[0] * grid[1]

    def count(self, units: int, density: float) -> int:
        """How many of so many units are active at a density: the nearest number, but never none."""
        return max(1, round(density * units))


@dataclass(frozen=True)
class Block(Pattern):
    """Blocks of rows x cols weights. Shapes that do not divide are padded at the edge.

    Args:
        rows: output features in one block, >= 1.
        cols: input features in one block, >= 1.
    """

    rows: int
    cols: int

    def __post_init__(self) -> None:
        if self.rows < 1 or self.cols < 1:
            raise ValueError(f"Block: expected rows and cols >= 1, got Block({self.rows}, {self.cols}).")

    def grid(self, shape: tuple[int, int]) -> tuple[int, int]:
        return -(-shape[0] // self.rows), -(-shape[1] // self.cols)

    def reduce(self, entries: torch.Tensor) -> torch.Tensor:
        entries = entries.float()
        sums = self._blocks(entries).sum((1, 3))
        down, across = (
            self._inside(size, unit, entries.device)
            for size, unit in zip(entries.shape, (self.rows, self.cols), strict=True)
        )
        return sums / (down[:, None] * across)

    def expand(self, units: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
        if self.rows == self.cols == 1:
            return units
        # masked storage asks at every step, and whole rows are repeated eight times faster than entries
        whole = units.repeat_interleave(self.cols, 1).repeat_interleave(self.rows, 0)
        return whole[: shape[0], : shape[1]]

    def _blocks(self, entries: torch.Tensor) -> torch.Tensor:
        """(N, K) -> (RB, R, CB, C), padded with zeros."""
        down, across = self.grid((entries.shape[0], entries.shape[1]))
        padding = (0, across * self.cols - entries.shape[1], 0, down * self.rows - entries.shape[0])
        return F.pad(entries, padding).view(down, self.rows, across, self.cols)

    @staticmethod
    def _inside(size: int, unit: int, device: torch.device) -> torch.Tensor:
        """Entries of each unit along one side that are not padding."""
        starts = torch.arange(0, size, unit, device=device)
        return (size - starts).clamp(max=unit).float()


@dataclass(frozen=True)
class Unstructured(Pattern):
    """Every weight is a unit of its own."""

    def grid(self, shape: tuple[int, int]) -> tuple[int, int]:
        return shape

    def reduce(self, entries: torch.Tensor) -> torch.Tensor:
        return entries.float()

    def expand(self, units: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
        return units


@dataclass(frozen=True)
class NM(Pattern):
    """At most n active weights in every group of m neighbours along the input, n:m for short.

    At density n / m every group holds exactly n. A last group that is shorter than m holds at most n too. At density 1
    nothing is left out: where methods that alternate with dense phases begin.

    Args:
        n: active weights in a group, 1 <= n <= m.
        m: size of a group.

    Source: Zhou et al. 2021, arXiv:2102.04010.
    """

    n: int
    m: int

    def __post_init__(self) -> None:
        if not 1 <= self.n <= self.m:
            raise ValueError(f"NM: expected 1 <= n <= m, got NM({self.n}, {self.m}).")

    def grid(self, shape: tuple[int, int]) -> tuple[int, int]:
        return shape

    def reduce(self, entries: torch.Tensor) -> torch.Tensor:
        return entries.float()

    def expand(self, units: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
        return units

    def most(self, grid: tuple[int, int]) -> int:
        groups, rest = divmod(grid[1], self.m)
        return grid[0] * (groups * self.n + min(self.n, rest))

    def choose(self, scores: torch.Tensor, count: int, ties: torch.Tensor) -> torch.Tensor:
        if count == scores.numel():
            return torch.ones_like(scores, dtype=torch.bool)
        rows, size = scores.shape
        most = self.most((rows, size))
        if count > most:
            raise ValueError(
                f"{self}: expected at most {most} active units of {scores.numel()} (density {self.n / self.m:g}) or "
                f"all of them, got {count}. Lower the density to {self.n / self.m:g}."
            )
        allowed = self._best_of_groups(scores, ties)
        return top_k(scores.masked_fill(~allowed, -torch.inf), count, ties + allowed)

    def _best_of_groups(self, scores: torch.Tensor, ties: torch.Tensor) -> torch.Tensor:
        """True at the n best units of every group."""
        rows, size = scores.shape
        padding = -size % self.m
        flat = torch.nan_to_num(scores, nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
        flat = F.pad(flat, (0, padding), value=-torch.inf).view(-1, self.m)
        # what pads a group comes after everything that is in it
        by_tie = (
            F.pad(ties, (0, padding), value=-torch.inf).view(-1, self.m).argsort(dim=-1, descending=True, stable=True)
        )
        order = by_tie.gather(-1, flat.gather(-1, by_tie).argsort(dim=-1, descending=True, stable=True))
        best = torch.zeros_like(flat, dtype=torch.bool).scatter_(-1, order[:, : self.n], True)
        return best.view(rows, -1)[:, :size]


@dataclass(frozen=True)
class Neuron(Pattern):
    """Whole outputs: a row of a linear weight, an output channel of a convolution. Biases stay."""

    def grid(self, shape: tuple[int, int]) -> tuple[int, int]:
        return shape[0], 1

    def reduce(self, entries: torch.Tensor) -> torch.Tensor:
        return entries.float().mean(1, keepdim=True)

    def expand(self, units: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
        return units.expand(shape)


def top_k(scores: torch.Tensor, count: int, ties: torch.Tensor) -> torch.Tensor:
    """True at exactly `count` places: the highest scores, equal ones ordered by the higher `ties`.

    Args:
        scores: float32, any shape. -inf never wins before a finite one; NaN counts as -inf.
        count: how many, 0 .. scores.numel().
        ties: float32 of the same shape.

    Raises:
        ValueError: there are fewer places than `count`.
    """
    if not 0 <= count <= scores.numel():
        raise ValueError(f"top_k: expected a count from 0 to {scores.numel()}, got {count}.")
    flat = torch.nan_to_num(scores.flatten(), nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    chosen = torch.zeros(flat.shape, dtype=torch.bool, device=scores.device)
    if count:
        # selection, then ties of the last level only: the places that two stable sorts give, in a tenth of the time
        least = flat.kthvalue(flat.numel() - count + 1).values
        chosen = flat > least
        level = (flat == least).nonzero().flatten()
        missing = count - int(chosen.sum())
        if missing < len(level):
            level = level[ties.flatten()[level].argsort(descending=True, stable=True)[:missing]]
        chosen[level] = True
    return chosen.view(scores.shape)
