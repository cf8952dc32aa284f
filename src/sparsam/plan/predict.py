"""The step of a setting on a cluster: time, exposed traffic, bytes, memory, efficiency, cost. All of it modelled.

T = max over ranks (forward + recompute + backward + optimiser + compression) + exposed traffic + amortised rewires
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Literal

from sparsam.comm.codecs import Codec, Identity
from sparsam.measure.figure import Figure, modelled
from sparsam.plan.cluster import Cluster
from sparsam.plan.memory import FLOAT32, Memory, memory_of, units_of
from sparsam.plan.network import Moved, Network, collective, gather_shards, ring, scatter_shards
from sparsam.plan.times import Compute, exposed, exposed_sharded, straggler
from sparsam.plan.workload import Gradient, Workload, buckets_of

__all__ = ["Prediction", "Setting", "efficiency", "figures_of", "predict"]


@dataclass(frozen=True)
class Setting:
    """One way to train.

    Attributes:
        name: what people call it.
        workload: of one rank.
        compute: of one rank.
        codec: of gradients; in shards only an additive one.
        two_level: float32 inside a node, the codec between nodes.
        recompute_every: blocks whose activations are computed again together; None: all are kept.
        sharding: "none" is DDP, "fsdp" shards parameters, gradients and optimiser.
        rewire_every: steps between changes of the topology; None: it stays.

    Raises:
        ValueError: a codec that cannot be sharded, or fewer than one block or step.
    """

    name: str
    workload: Workload
    compute: Compute
    codec: Codec
    two_level: bool = False
    recompute_every: int | None = None
    sharding: Literal["none", "fsdp"] = "none"
    rewire_every: float | None = None

    def __post_init__(self) -> None:
        if self.sharding == "fsdp" and not self.codec.additive:
            raise ValueError(
                f"{self.name}: expected a codec whose payloads add up (none or bf16) under fsdp, got "
                f"{type(self.codec).__name__}. Its residuals cannot be sharded."
            )
        if self.recompute_every is not None and self.recompute_every < 1:
            raise ValueError(f"recompute: expected at least 1 block, got {self.recompute_every}.")


@dataclass(frozen=True)
class Prediction:
    """One step on so many ranks; seconds and bytes of one rank, modelled.

    Attributes:
        computing: forward, recomputing, backward, optimiser and compression, of the last rank.
        compression: the part of it that codecs (and sending, on CPUs) take.
        exposed: traffic that nothing hides.
        rewiring: a rewire's share of a step.
        sent: bytes of a rank, rewires included.
        between: bytes that leave a node, rewires included.
        memory: of a rank.
    """

    ranks: int
    computing: float
    compression: float
    exposed: float
    rewiring: float
    sent: float
    between: float
    memory: Memory

    @property
    def step(self) -> float:
        return self.computing + self.exposed + self.rewiring


def predict(setting: Setting, network: Network, slowest: float = 1.0, jitter: float = 0.0) -> Prediction:
    """The step of one setting on one network.

    Args:
        setting: what is done.
        network: by how many, over which links.
        slowest, jitter: see `straggler`.
    """
    compute = setting.compute.scaled(straggler(network.ranks, slowest, jitter))
    recompute = 0.0 if setting.recompute_every is None else compute.forward
    if setting.sharding == "fsdp" and network.ranks > 1:
        hidden, moved, compression = _sharded(setting, compute, recompute, network)
    else:
        hidden, moved, compression = _in_buckets(setting, compute, compute.backward + recompute, network)
    computing = compute.forward + recompute + compute.backward + compute.optimizer + compression
    rewire = _rewire(setting, compute, network)
    return Prediction(
        network.ranks,
        computing,
        compression,
        hidden,
        rewire.seconds,
        moved.nbytes + rewire.nbytes,
        moved.between + rewire.between,
        memory_of(setting.workload, network.ranks, setting.codec, setting.sharding, setting.recompute_every),
    )


def efficiency(setting: Setting, network: Network, slowest: float = 1.0, jitter: float = 0.0) -> float:
    """Samples a second of all ranks, as a share of what as many ranks that need not wait for each other would do."""
    return predict(setting, network.resized(1)).step / predict(setting, network, slowest, jitter).step


def figures_of(setting: Setting, cluster: Cluster, steps: int | None = None) -> dict[str, Figure]:
    """What people are shown, by name; prices only where the cluster has any, of a run where its steps are known."""
    network = cluster.network
    one = predict(setting, network, cluster.slowest, cluster.jitter)
    figures = {
        "step_ms": modelled(1e3 * one.step, "ms"),
        "compute_ms": modelled(1e3 * one.computing, "ms"),
        "compression_ms": modelled(1e3 * one.compression, "ms"),
        "exposed_ms": modelled(1e3 * one.exposed, "ms"),
        "rewire_ms": modelled(1e3 * one.rewiring, "ms"),
        "sent_bytes": modelled(one.sent, "B"),
        "between_bytes": modelled(one.between, "B"),
        "memory_bytes": modelled(one.memory.total, "B"),
        "tokens_per_second": modelled(one.ranks * setting.workload.tokens / one.step, "tokens/s"),
        "efficiency": modelled(efficiency(setting, network, cluster.slowest, cluster.jitter), "share"),
    }
    price = cluster.price_per_rank_second
    if price is not None:
        figures["cost_1000_steps"] = modelled(1000 * price * one.ranks * one.step, "")
        if steps is not None:
            figures["cost_run"] = modelled(steps * price * one.ranks * one.step, "")
    return figures


def _in_buckets(setting: Setting, compute: Compute, backward: float, network: Network) -> tuple[float, Moved, float]:
    """Exposed seconds, what moves, and seconds of compression, where buckets go out during the backward pass."""
    if network.ranks == 1:
        return 0.0, Moved(), 0.0
    at = dict(zip((gradient.name for gradient in setting.workload.gradients), compute.ready, strict=True))
    ready, moves, spent = [], [], []
    for bucket in buckets_of(setting.workload.gradients):
        move = _exchanged(setting, bucket, network)
        moves.append(move)
        spent.append(_compression(setting, compute, bucket, network) + compute.seconds_per_byte * move.nbytes)
        ready.append(backward * max(at[gradient.name] for gradient in bucket))
    # codecs run beside the backward pass, on the same processor: what they take moves all that follows
    delays = list(accumulate(spent))
    complete = [time + delay for time, delay in zip(ready, delays, strict=True)]
    wire = [move.seconds + compute.codec.wait for move in moves]
    hidden = exposed(complete, wire, backward + delays[-1])
    return hidden, sum(moves, Moved()), delays[-1]


def _exchanged(setting: Setting, bucket: Sequence[Gradient], network: Network) -> Moved:
    """One bucket: matrices by the codec, vectors in float32 in a message of their own."""
    if setting.codec.lossless:
        return collective(setting.codec, sum(g.values for g in bucket), network, setting.two_level)
    matrices, vectors = (sum(g.values for g in bucket if g.vector is kind) for kind in (False, True))
    coded = collective(setting.codec, matrices, network, setting.two_level)
    return coded + collective(Identity(), vectors, network, setting.two_level)


def _compression(setting: Setting, compute: Compute, bucket: Sequence[Gradient], network: Network) -> float:
    n, ranks = sum(gradient.values for gradient in bucket if not gradient.vector), network.ranks
    if setting.two_level and network.nodes > 1:
        n, ranks = -(-n // network.ranks_per_node), network.nodes
    return compute.codec.seconds(setting.codec, n, ranks)


def _sharded(setting: Setting, compute: Compute, recompute: float, network: Network) -> tuple[float, Moved, float]:
    """The same for units whose weights are gathered before they compute, in both passes."""
    units = units_of(setting.workload.gradients)
    sizes = [sum(gradient.values for gradient in unit) for unit in units]
    at = dict(zip((gradient.name for gradient in setting.workload.gradients), compute.ready, strict=True))
    shares = [b - a for a, b in pairwise([0.0, *(max(at[g.name] for g in unit) for unit in units)])]
    gathers = [gather_shards(FLOAT32 * n, network) for n in sizes]
    scatters = [scatter_shards(setting.codec, n, network) for n in sizes]
    moved = sum(gathers, Moved()) * 2 + sum(scatters, Moved())
    waits = [one.seconds for one in gathers]
    forward = exposed_sharded(waits[::-1], [s * compute.forward for s in shares[::-1]], [0.0] * len(units))
    backward = exposed_sharded(
        waits, [s * (compute.backward + recompute) for s in shares], [one.seconds for one in scatters]
    )
    compression = sum(compute.codec.seconds(setting.codec, n, network.ranks) for n in sizes)
    return forward + backward, moved, compression + compute.seconds_per_byte * moved.nbytes


def _rewire(setting: Setting, compute: Compute, network: Network) -> Moved:
    """A step's share of the dense gradients that ranks average, a layer at a time, when the topology changes."""
    if setting.rewire_every is None:
        return Moved()
    moved = sum((ring(FLOAT32 * n, network) for n in setting.workload.rewired_values), Moved())
    extra = Moved(compute.rewire + compute.seconds_per_byte * moved.nbytes)
    return (moved + extra) * (1 / setting.rewire_every)
