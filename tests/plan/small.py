"""A workload of two layers whose times can be added up by hand."""

from __future__ import annotations

from sparsam.comm.codecs import Identity
from sparsam.plan.network import Link, Network
from sparsam.plan.predict import Setting
from sparsam.plan.times import Compute
from sparsam.plan.workload import Activations, Gradient, Workload

__all__ = ["COMPUTE", "WORKLOAD", "four_ranks", "setting"]

# 1,000,000 values are 4 MB, more than DDP's first bucket, and the last gradient makes a second one
WORKLOAD = Workload(
    gradients=(Gradient("b.weight", 10**6, 10**6, False), Gradient("a.weight", 10**6, 10**6, False)),
    flops={"a": 3e9, "b": 3e9},
    compact=frozenset(),
    dense_flops=6e9,
    activations=Activations(blocks=4, inside=4000, outside=100, boundary=200),
    tokens=10,
)
# the second layer's gradient comes after half of the backward pass
COMPUTE = Compute(forward=1.0, backward=2.0, optimizer=0.5, ready=(0.5, 1.0))


def setting(**changes) -> Setting:
    return Setting(**({"name": "s", "workload": WORKLOAD, "compute": COMPUTE, "codec": Identity()} | changes))


def four_ranks(seconds: float) -> Network:
    """Four ranks for whom a ring all-reduce of 4 MB takes this long."""
    link = Link(0.0, seconds / 6e6)
    return Network(4, 1, link, link)
