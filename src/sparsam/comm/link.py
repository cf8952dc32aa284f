"""Whether compression pays on this link: times of both ways at a few sizes, and what follows for a model's buckets.

Traffic alone is compared. Part of it hides behind the backward, so where the backward is long either choice may cost
nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from sparsam.comm.allreduce import mean_over_ranks
from sparsam.comm.codecs import Codec, Identity
from sparsam.comm.groups import Nodes
from sparsam.comm.residual import Residuals
from sparsam.measure.clock import least_seconds

__all__ = ["Cost", "Decision", "bucket_sizes", "compared", "decide", "measured"]

_SIZES = (1 << 10, 1 << 14, 1 << 17, 1 << 19)


@dataclass(frozen=True)
class Cost:
    """Seconds for a reduction of n values: alpha + beta * n."""

    alpha: float
    beta: float

    @classmethod
    def fitted(cls, sizes: Sequence[int], seconds: Sequence[float]) -> Cost:
        """Least squares of relative errors, so that small sizes count as much as large ones; neither is negative."""
        n, t = torch.tensor(sizes, dtype=torch.float64), torch.tensor(seconds, dtype=torch.float64)
        design = torch.stack([1 / t, n / t], 1)
        alpha, beta = torch.linalg.lstsq(design, torch.ones(len(sizes), 1, dtype=torch.float64)).solution[:, 0].tolist()
        return cls(max(alpha, 0.0), max(beta, 0.0))

    def of(self, sizes: Sequence[int]) -> float:
        """Seconds for reductions of these sizes, one after the other."""
        return sum(self.alpha + self.beta * n for n in sizes)


@dataclass(frozen=True)
class Decision:
    """Whether to compress, and the line that says why."""

    on: bool
    text: str


def decide(plain: Cost, coded: Cost, buckets: Sequence[int]) -> Decision:
    """Compresses where that makes the exchange of all buckets shorter."""
    before, after = plain.of(buckets), coded.of(buckets)
    on = after < before
    return Decision(
        on,
        f"compression is {'on' if on else 'off'}: {len(buckets)} buckets of {sum(buckets)} gradients take "
        f"{1e3 * after:.3g} ms with it and {1e3 * before:.3g} ms without (modelled from measured reductions).",
    )


def measured(codec: Codec, buckets: Sequence[int], group: dist.ProcessGroup, nodes: Nodes | None = None) -> Decision:
    """Measures on all ranks at once; rank 0's times count for all.

    Args:
        codec: in question.
        buckets: values in each.
        group: what goes without the codec, and what is agreed on.
        nodes: where the codec goes, if not through the group.
    """

    def plain(n: int) -> Callable[[], object]:
        x = torch.linspace(-1.0, 1.0, n)
        return lambda: mean_over_ranks(x, Identity(), group)

    def coded(n: int) -> Callable[[], object]:
        x, residuals = torch.linspace(-1.0, 1.0, n), Residuals()

        def once() -> None:
            wanted = x.clone()
            residuals.add("", wanted)
            residuals.keep("", wanted, mean_over_ranks(wanted, codec, nodes or group, weights=x).sent)
            residuals.settle(True)

        return once

    return compared(plain, coded, buckets, group)


def compared(
    plain: Callable[[int], Callable[[], object]],
    coded: Callable[[int], Callable[[], object]],
    buckets: Sequence[int],
    group: dist.ProcessGroup,
) -> Decision:
    """Measures two exchanges of n values, given n, on all ranks of a group at once; rank 0's times count for all."""
    times = torch.tensor([[least_seconds(way(n)) for n in _SIZES] for way in (plain, coded)], dtype=torch.float64)
    dist.broadcast(times, group=group, group_src=0)
    before, after = times.tolist()
    return decide(Cost.fitted(_SIZES, before), Cost.fitted(_SIZES, after), buckets)


def bucket_sizes(gradients: int, values_in_a_bucket: int) -> list[int]:
    """About the buckets that DDP will make."""
    full, rest = divmod(gradients, values_in_a_bucket)
    return [values_in_a_bucket] * full + [rest] * (rest > 0)
