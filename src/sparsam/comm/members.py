"""What workers that train apart tell each other before they exchange anything larger: some hundred bytes each."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = [
    "Report",
    "check_alike",
    "digest",
    "largest_counters",
    "most_advanced",
    "reports_of_all",
    "share_of",
    "workers_in",
]


@dataclass(frozen=True)
class Report:
    """One worker, as the others see it.

    Attributes:
        worker: a name of its own, for as long as it lives and in its checkpoints.
        settings: what must be the same on all workers, to be read by people.
        layout: of the trained tensors' names and shapes.
        rounds: synchronisations so far.
        applied: optimiser steps so far.
        weight: what its deltas count for.
        square: sum of its squared deltas; not finite when one of them is not.
        waiting: L2 norm of its residuals.
        leaving: whether this synchronisation is its last.
        counters: values of the model's integer buffers of one number.
        state: of the weights that it shares with others, where they are compared.
    """

    worker: str
    settings: str
    layout: str
    rounds: int
    applied: int
    weight: float
    square: float
    waiting: float
    leaving: bool
    counters: tuple[int, ...]
    state: str = ""


def workers_in(group: dist.ProcessGroup | None) -> int:
    """Size of a group, None for all processes; 1 before there are groups."""
    return dist.get_world_size(group) if dist.is_available() and dist.is_initialized() else 1


def reports_of_all(own: Report, group: dist.ProcessGroup | None) -> list[Report]:
    """By rank in the group. Every worker waits here for the slowest."""
    if workers_in(group) == 1:
        return [own]
    reports: list[Report] = [own] * workers_in(group)
    dist.all_gather_object(reports, own, group=group)
    return reports


def check_alike(reports: Sequence[Report]) -> None:
    """Refuses workers that cannot train together, on all of them alike.

    Raises:
        ValueError: says in what they differ.
    """
    for rank, report in enumerate(reports):
        if report.settings != reports[0].settings:
            raise ValueError(
                f"LocalSteps: expected the settings of rank 0 on every worker ({reports[0].settings}), got "
                f"{report.settings} on rank {rank}. Give all workers the same; a slow one takes smaller batches."
            )
        if report.layout != reports[0].layout:
            raise ValueError(
                f"LocalSteps: expected the trained weights of rank 0 on every worker, got other names or shapes on "
                f"rank {rank}. Build, sparsify and freeze the same model on all."
            )


def most_advanced(reports: Sequence[Report]) -> int:
    """The rank with the most synchronisations, then the most applied steps, then the lowest rank."""
    return max(range(len(reports)), key=lambda rank: (reports[rank].rounds, reports[rank].applied, -rank))


def share_of(one: Report, reports: Sequence[Report]) -> float:
    """What a worker's deltas are multiplied by before a mean over workers: 1 when all count alike, 0 when they are not
    finite."""
    total = sum(report.weight for report in reports if math.isfinite(report.square))
    return len(reports) * one.weight / total if math.isfinite(one.square) else 0.0


def largest_counters(reports: Sequence[Report]) -> list[int]:
    """Of each counter the largest of all workers."""
    return [max(values) for values in zip(*(report.counters for report in reports), strict=True)]


def digest(tensors: Iterable[tuple[str, Tensor]], values: bool = True) -> str:
    """Short hash over names and shapes, and over what the tensors hold."""
    found = hashlib.sha256()
    for name, tensor in tensors:
        found.update(f"{name}{tuple(tensor.shape)}\0".encode())
        if values:
            found.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]
