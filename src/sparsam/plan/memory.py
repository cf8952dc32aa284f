"""What one rank keeps in memory in a step, by formula: float32 weights and AdamW, under DDP or in shards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from sparsam.comm.codecs import Codec
from sparsam.plan.workload import Gradient, Workload, buckets_of

__all__ = ["FLOAT32", "Memory", "memory_of", "units_of"]

FLOAT32 = 4
# copies of a bucket while a codec has it: what is wanted, its shards, what was sent, the mean, and codes
_COPIES = 5


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank, without the interpreter, libraries, the data and what the allocator holds back.

    Attributes:
        parameters, gradients: float32.
        optimizer: two moments.
        exchange: DDP's buckets beside the gradients and a codec's copies of one; in shards, units that are gathered.
        residuals: what codecs left out.
        activations: at their peak.
    """

    parameters: int
    gradients: int
    optimizer: int
    exchange: int
    residuals: int
    activations: int

    @property
    def total(self) -> int:
        """The peak. Gradients come as activations go, and residuals are held twice until the step is taken."""
        lasting = self.parameters + self.optimizer + self.exchange + self.residuals
        return lasting + max(self.activations, self.gradients + self.residuals)


def memory_of(
    workload: Workload,
    ranks: int,
    codec: Codec,
    sharding: Literal["none", "fsdp"] = "none",
    recompute_every: int | None = None,
) -> Memory:
    """What a rank of so many keeps; see `Setting` for the arguments."""
    n = FLOAT32 * workload.values
    activations = workload.activations.kept(recompute_every)
    if ranks == 1:
        return Memory(n, n, 2 * n, 0, 0, activations)
    if sharding == "fsdp":
        shard = -(-n // ranks)
        # the unit that computes and the one that comes next, and the gradients of the first
        gathered = 3 * max(map(_bytes, units_of(workload.gradients)))
        return Memory(shard, shard, 2 * shard, gathered, 0, activations)
    if codec.lossless:
        return Memory(n, n, 2 * n, n, 0, activations)
    copies = _COPIES * max(map(_bytes, buckets_of(workload.gradients)))
    residuals = _bytes([gradient for gradient in workload.gradients if not gradient.vector])
    return Memory(n, n, 2 * n, n + copies, residuals, activations)


def units_of(gradients: Sequence[Gradient]) -> list[list[Gradient]]:
    """What is gathered together: each repeated block, and in the order of the backward pass what lies between them."""
    units: list[list[Gradient]] = []
    last: str | None = None
    for gradient in gradients:
        parts = gradient.name.split(".")
        number = next((place for place, part in enumerate(parts) if part.isdigit()), None)
        unit = "" if number is None else ".".join(parts[: number + 1])
        if unit != last:
            units.append([])
        units[-1].append(gradient)
        last = unit
    return units


def _bytes(gradients: Sequence[Gradient]) -> int:
    return FLOAT32 * sum(gradient.values for gradient in gradients)
