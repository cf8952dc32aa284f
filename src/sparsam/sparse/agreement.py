"""One topology on every rank: taken from rank 0 at the start, compared after every rewire."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, Mapping

import torch
import torch.distributed as dist

from sparsam.sparse.methods import Method
from sparsam.sparse.weights import SparseWeight

__all__ = [
    "TopologyError",
    "broadcast_topology",
    "check_apart",
    "compare_ranks",
    "mean_of_ranks",
    "ranks",
    "topology_hash",
]

_LOOKED_AHEAD = 10_000


class TopologyError(RuntimeError):
    """Ranks have come to different topologies; the message is one line for a person."""


def ranks(group: dist.ProcessGroup | None = None) -> int:
    """How many processes train the same weights; without a group, all of them."""
    return dist.get_world_size(group) if dist.is_available() and dist.is_initialized() else 1


def mean_of_ranks(x: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """float32, of what each rank has; a copy."""
    mean = x.detach().float() / ranks(group)
    if ranks(group) > 1:
        with _reaching_all():
            dist.all_reduce(mean, group=group)
    return mean


def check_apart(method: Method, every: int, steps: range | None = None) -> None:
    """Refuses what ranks that train apart cannot agree on: they have the same weights at multiples of `every` alone.

    Args:
        method: the one that decides topologies.
        every: applied steps between synchronisations.
        steps: at which it may be due; those of the first 10,000 when it is not given.

    Raises:
        ValueError: it is due between two synchronisations, or keeps something that differs between ranks.
    """
    kept = ", ".join(one.name for one in method.accumulators) or "weights behind zeros" * (
        method.hidden_decay is not None
    )
    if kept:
        raise ValueError(
            f"SparseTraining: expected a method that keeps nothing on each worker under LocalSteps, got one that keeps "
            f"{kept}. Use static, set_, rigl, gmp or granet."
        )
    for step in steps or range(1, _LOOKED_AHEAD + 1):
        if step % every and method.due(step):
            raise ValueError(
                f"SparseTraining: expected updates at multiples of {every}, where LocalSteps(every={every}) makes "
                f"weights equal, got one at step {step}. Give both such every=, begin= and until= that they meet."
            )


def topology_hash(weights: Mapping[str, SparseWeight]) -> str:
    """Short hash over the names and topologies of all layers."""
    digest = hashlib.sha256()
    for name, weight in weights.items():
        digest.update(name.encode() + b"\0" + weight.topology.cpu().numpy().tobytes())
    return digest.hexdigest()[:15]


def broadcast_topology(weight: SparseWeight, group: dist.ProcessGroup | None = None) -> None:
    """Overwrites a topology with rank 0's, where the weights come from too when a model is wrapped."""
    for buffer in weight.buffers:
        sent = buffer.to(torch.int32) if buffer.dtype == torch.bool else buffer.clone()
        dist.broadcast(sent, group=group, group_src=0)
        buffer.copy_(sent)
    weight.buffers_changed()


def compare_ranks(weights: Mapping[str, SparseWeight], step: int, group: dist.ProcessGroup | None = None) -> None:
    """Stops all ranks when any layer's topology differs between them.

    Raises:
        TopologyError: names the layer and the ranks.
    """
    if not weights:  # on no rank of the group: they train the same model
        return
    own = [int(topology_hash({name: weight}), 16) for name, weight in weights.items()]
    device = next(iter(weights.values())).parameter.device
    hashes = torch.tensor(own, dtype=torch.int64, device=device)
    gathered = [torch.empty_like(hashes) for _ in range(ranks(group))]
    with _reaching_all():
        dist.all_gather(gathered, hashes, group)
    for position, name in enumerate(weights):
        column = [int(one[position]) for one in gathered]
        differing = [rank for rank, value in enumerate(column) if value != column[0]]
        if differing:
            raise TopologyError(
                f"{name}: expected the same topology on every rank after step {step}, but ranks {differing} differ "
                "from rank 0. Give all ranks the same seed, weights and optimiser state, then resume from a checkpoint."
            )


@contextlib.contextmanager
def _reaching_all() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise RuntimeError(
            "SparseTraining: expected all ranks at a rewire, but not all can be reached "
            f"({str(error).splitlines()[0]}). "
            "Under LocalSteps make a group of those that are left and call join(); else resume from a checkpoint."
        ) from error
