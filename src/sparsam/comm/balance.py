"""Which rank computes which layers: the best split of a chain by measured load, and whether a move to it pays.

Numbers in, a decision out: nothing is measured or moved here (`pipeline.py` does that), so that ranks which were given
the same numbers decide alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

__all__ = ["Balance", "Decision", "Load", "batch_shares", "owners", "partition", "stage_seconds"]


@dataclass(frozen=True)
class Load:
    """What has been measured on all ranks.

    A layer's work is the same wherever it is computed, and a rank's speed is what it reaches when it is never idle.
    Seconds of a layer on its present rank say neither: a rank that waits for others looks faster than it is.

    Attributes:
        work: by layer, of one step, in any unit.
        speeds: by rank, units of work a second.
        nbytes: by layer, what moves with it: weights, buffers and state of the optimiser.
        bandwidth: bytes a second of a move, from one rank to another.
    """

    work: tuple[float, ...]
    speeds: tuple[float, ...]
    nbytes: tuple[int, ...]
    bandwidth: float


@dataclass(frozen=True)
class Decision:
    """The split from here on, and the line that says why. Rank r has layers bounds[r] to bounds[r + 1]."""

    bounds: tuple[int, ...]
    text: str


class Balance:
    """Moves layers of a pipeline between its ranks when that makes the slowest of them faster.

    Args:
        every: steps between decisions.
        hysteresis: smallest share of the slowest stage's time that a move must save.

    Raises:
        ValueError: every below 1, or hysteresis outside [0, 1).
    """

    def __init__(self, every: int = 50, hysteresis: float = 0.05) -> None:
        if every < 1:
            raise ValueError(f"every: expected at least 1 step between decisions, got {every}.")
        if not 0.0 <= hysteresis < 1.0:
            raise ValueError(f"hysteresis: expected a share in [0, 1), got {hysteresis}.")
        self.every, self.hysteresis = every, hysteresis

    def decide(self, bounds: Sequence[int], load: Load) -> Decision:
        """The best split, if it saves enough of a step, and in `every` steps more than the move takes; else this one.

        Args:
            bounds: the present split.
            load: the same on all ranks.
        """
        best = partition(load.work, load.speeds)
        now, then = (max(stage_seconds(load.work, load.speeds, split)) for split in (bounds, best))
        saved = now - then
        moved_bytes = sum(
            nbytes for nbytes, old, new in zip(load.nbytes, owners(bounds), owners(best), strict=True) if old != new
        )
        move_s = moved_bytes / load.bandwidth
        found = (
            f"the slowest stage takes {1e3 * now:.3g} ms of a step and {1e3 * then:.3g} ms in the best split; the move "
            f"takes {1e3 * move_s:.3g} ms for {moved_bytes} bytes (predicted from measured work and speeds)."
        )
        if saved <= self.hysteresis * now:
            return Decision(tuple(bounds), f"layers stay, too little to gain: {found}")
        if saved * self.every <= move_s:
            return Decision(tuple(bounds), f"layers stay, {self.every} steps do not pay for a move: {found}")
        return Decision(best, f"layers move: {found}")


def partition(work: Sequence[float], speeds: Sequence[float]) -> tuple[int, ...]:
    """The contiguous split of a chain whose slowest stage is as fast as can be: exact, by dynamic programming.

    Args:
        work: by layer, of at least one layer a rank.
        speeds: by rank, in the order of the chain; each > 0.

    Returns:
        Bounds: rank r has layers bounds[r] to bounds[r + 1], at least one. Of equal splits always the same one.

    Raises:
        ValueError: fewer layers than ranks, no rank, or a speed that is not above zero.
    """
    ranks, layers = len(speeds), len(work)
    if not 1 <= ranks <= layers:
        raise ValueError(f"partition: expected at least one layer a rank, got {layers} layers for {ranks} ranks.")
    if not min(speeds) > 0:
        raise ValueError(f"speeds: expected each above zero, got {min(speeds)}.")
    before = [0.0, *accumulate(work)]
    # slowest[end]: of the first `end` layers on the ranks so far; starts[rank][end]: where the last of these begins
    slowest = [0.0] + [float("inf")] * layers
    starts: list[list[int]] = []
    for rank, speed in enumerate(speeds):
        reached, begun = [float("inf")] * (layers + 1), [0] * (layers + 1)
        for end in range(rank + 1, layers - (ranks - rank - 1) + 1):
            for start in range(rank, end):
                seconds = max(slowest[start], (before[end] - before[start]) / speed)
                if seconds < reached[end]:
                    reached[end], begun[end] = seconds, start
        slowest = reached
        starts.append(begun)
    bounds = [layers]
    for begun in reversed(starts):
        bounds.append(begun[bounds[-1]])
    return tuple(reversed(bounds))


def stage_seconds(work: Sequence[float], speeds: Sequence[float], bounds: Sequence[int]) -> list[float]:
    """Seconds that each rank computes in one step."""
    return [sum(work[a:b]) / speed for (a, b), speed in zip(pairwise(bounds), speeds, strict=True)]


def batch_shares(speeds: Sequence[float], batch: int) -> tuple[int, ...]:
    """How many samples of a batch each data-parallel rank should take, so that the slowest is done as early as can be.

    DDP averages over ranks as if each had as many: multiply the loss by share * ranks / batch.

    Args:
        speeds: samples a second, by rank; each > 0.
        batch: samples in all, at least one a rank.

    Raises:
        ValueError: fewer samples than ranks, no rank, or a speed that is not above zero.
    """
    if not 1 <= len(speeds) <= batch:
        raise ValueError(f"batch: expected at least one sample a rank, got {batch} for {len(speeds)} ranks.")
    if not min(speeds) > 0:
        raise ValueError(f"speeds: expected each above zero, got {min(speeds)}.")
    shares = [1] * len(speeds)
    for _ in range(batch - len(speeds)):
        # to whom one more costs least; each choice stays right when more follow
        shares[min(range(len(speeds)), key=lambda rank: (shares[rank] + 1) / speeds[rank])] += 1
    return tuple(shares)


def owners(bounds: Sequence[int]) -> list[int]:
    """The rank of each layer."""
    return [rank for rank, (start, end) in enumerate(pairwise(bounds)) for _ in range(start, end)]
