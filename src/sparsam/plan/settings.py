"""What a plan compares: dense and sparse, each plain and compressed; and on which links two promises would hold.

Nobody has measured 256 or 1024 workers here: all of it is modelled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import gcd
from typing import Literal

from sparsam.comm.codecs import BF16, Codec, Identity, Int8Rows, TopK
from sparsam.plan.network import Link, Network
from sparsam.plan.predict import Setting, predict
from sparsam.plan.times import CodecCost, Compute
from sparsam.plan.workload import Workload

__all__ = ["DENSITIES", "PROMISES", "RATES", "Case", "Promise", "compared", "plain_and_compressed", "scan"]

# bit/s between nodes, and densities, over which promises are looked at
RATES = (0.1e9, 1e9, 10e9, 100e9, 400e9)
DENSITIES = (0.2, 0.1, 0.05)
# dense gradients: 40 % of them in blocks that all ranks agree on; sparse ones are few already
_DENSE_CODEC = TopK(0.4, block=128, values=Int8Rows(), agreed=True)
_SPARSE_CODEC = Int8Rows()


@dataclass(frozen=True)
class Promise:
    """What a setting is to reach against dense bf16 DDP on as many workers.

    Attributes:
        workers: ranks.
        saved: share of the bytes that are sent, or that leave a node.
        where: which of the two.
        reach: the speed-up over dense bf16 DDP, or the parallel efficiency.
        what: which of the two.
    """

    workers: int
    saved: float
    where: Literal["sent", "between nodes"]
    reach: float
    what: Literal["speed-up", "efficiency"]

    @property
    def text(self) -> str:
        reach = f"{self.reach:.2f}x the speed" if self.what == "speed-up" else f"{100 * self.reach:.0f} % efficiency"
        return f"{self.workers} workers: {100 * self.saved:.0f} % fewer bytes {self.where}, {reach}"


PROMISES = (
    Promise(256, 0.62, "sent", 1.83, "speed-up"),
    Promise(1024, 0.78, "between nodes", 0.92, "efficiency"),
)


@dataclass(frozen=True)
class Case:
    """One setting on one link under one promise; modelled.

    Attributes:
        setting: its name.
        density: share of parameters that is stored.
        bits_per_second: between nodes.
        two_level: float32 inside nodes, the codec between them.
        saved, speedup, efficiency: what it reaches.
        holds: whether that is what was promised.
    """

    promise: Promise
    setting: str
    density: float
    bits_per_second: float
    two_level: bool
    saved: float
    speedup: float
    efficiency: float
    holds: bool


def plain_and_compressed(
    name: str,
    workload: Workload,
    compute: Compute,
    codec_cost: Callable[[Codec], CodecCost],
    *,
    sharding: Literal["none", "fsdp"] = "none",
    recompute_every: int | None = None,
    rewire_every: float | None = None,
) -> list[Setting]:
    """A model with bf16 gradients, and with what compresses them best without loss of quality.

    Args:
        name: "dense" or "sparse".
        workload, compute: its own.
        codec_cost: what a codec costs on the device.
        sharding, recompute_every, rewire_every: see `Setting`. In shards gradients are float32 or bf16.
    """
    plain: Codec = Identity() if sharding == "fsdp" else BF16()
    compressed: Codec = BF16() if sharding == "fsdp" else (_SPARSE_CODEC if workload.compact else _DENSE_CODEC)
    return [
        Setting(
            label,
            workload,
            replace(compute, codec=codec_cost(codec)),
            codec,
            two_level and sharding == "none",
            recompute_every,
            sharding,
            rewire_every,
        )
        for label, codec, two_level in ((name, plain, False), (f"{name}, compressed", compressed, True))
    ]


def compared(setting: Setting, baseline: Setting, network: Network, slowest: float, jitter: float) -> tuple[float, ...]:
    """Share of bytes saved, share of bytes between nodes saved, speed-up, and parallel efficiency."""
    one, other = (predict(each, network, slowest, jitter) for each in (setting, baseline))
    alone = predict(setting, network.resized(1))
    return (
        1 - one.sent / other.sent if other.sent else 0.0,
        1 - one.between / other.between if other.between else 0.0,
        other.step / one.step,
        alone.step / one.step,
    )


def scan(
    settings: Sequence[Setting],
    baseline: Setting,
    network: Network,
    *,
    rates: Sequence[float] = RATES,
    slowest: float = 1.0,
    jitter: float = 0.0,
) -> list[Case]:
    """Each promise for each setting on each link.

    Args:
        settings: of all densities.
        baseline: dense, bf16.
        network: gives the ranks of a node, their links, and the latency between nodes.
        rates: bit/s between nodes.
        slowest, jitter: see `straggler`.
    """
    cases = []
    for promise in PROMISES:
        inner = gcd(network.ranks_per_node, promise.workers)
        for setting in settings:
            for rate in rates:
                wide = replace(
                    network,
                    nodes=promise.workers // inner,
                    ranks_per_node=inner,
                    between=Link.of(network.between.alpha, rate),
                )
                cases.append(_case(promise, setting, baseline, wide, rate, slowest, jitter))
    return cases


def _case(
    promise: Promise, setting: Setting, baseline: Setting, network: Network, rate: float, slowest: float, jitter: float
) -> Case:
    """On one level or two, whichever keeps the promise or comes nearer."""

    def tried(two_level: bool) -> Case:
        one = replace(setting, two_level=two_level)
        sent, outside, speedup, efficiency = compared(one, baseline, network, slowest, jitter)
        saved = sent if promise.where == "sent" else outside
        reached = speedup if promise.what == "speed-up" else efficiency
        holds = saved >= promise.saved and reached >= promise.reach
        return Case(promise, setting.name, setting.workload.density, rate, two_level, saved, speedup, efficiency, holds)

    levels = (False, True) if setting.two_level else (False,)
    reach = "speedup" if promise.what == "speed-up" else "efficiency"
    return max((tried(level) for level in levels), key=lambda case: (case.holds, getattr(case, reach)))
