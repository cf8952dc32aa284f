"""How long one rank computes, from a short run on this machine or from stated throughputs; and what of an exchange
shows in a step, by replaying buckets over the backward pass."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from statistics import NormalDist

import torch
from torch import Tensor, nn

from sparsam.comm.codecs import Codec, TopK
from sparsam.comm.link import Cost
from sparsam.measure.clock import least_seconds
from sparsam.plan.cluster import Device
from sparsam.plan.workload import Workload
from sparsam.session import Session

__all__ = [
    "CodecCost",
    "Compute",
    "exposed",
    "exposed_sharded",
    "measured_codec",
    "measured_compute",
    "stated_codec",
    "stated_compute",
    "straggler",
]

_SIZES = (1 << 12, 1 << 15, 1 << 18, 1 << 20)
# reads parameter, gradient and two moments, writes all but the gradient, in float32
_OPTIMIZER_BYTES = 28
# a pass that reads float32 and writes it back or something smaller; an encode looks for the largest first
_ENCODE_BYTES, _DECODE_BYTES = 12, 8


@dataclass(frozen=True)
class CodecCost:
    """Seconds of one codec on one rank, by the number of values.

    Attributes:
        encode, decode: of the processor.
        wait: for which each bucket keeps the wire waiting whatever its size: steps that follow each other.
    """

    encode: Cost
    decode: Cost
    wait: float = 0.0

    def seconds(self, codec: Codec, n: int, ranks: int) -> float:
        """What a rank computes to average n values, its own copy of what it sent included; see `comm.allreduce`."""
        if ranks == 1 or n == 0 or codec.lossless:
            return 0.0
        if codec.additive:
            return self.encode.of([n]) + self.decode.of([n, n])
        if (isinstance(codec, TopK) or codec.reads_weights) and not getattr(codec, "agreed", False):
            return self.encode.of([n]) + self.decode.of([n] * (ranks + 1))
        return self.encode.of([n, -(-n // ranks)]) + self.decode.of([n, n, n])


_FREE = CodecCost(Cost(0.0, 0.0), Cost(0.0, 0.0))


@dataclass(frozen=True)
class Compute:
    """One rank's own work in a step.

    Attributes:
        forward, backward, optimizer: seconds.
        ready: for each gradient of the workload, after which share of the backward pass it is there.
        rewire: seconds more in a step that changes the topology.
        codec: what compression costs.
        seconds_per_byte: of the processor, for each byte that is sent: on CPUs the network is work too.
    """

    forward: float
    backward: float
    optimizer: float
    ready: tuple[float, ...]
    rewire: float = 0.0
    codec: CodecCost = _FREE
    seconds_per_byte: float = 0.0

    def scaled(self, factor: float) -> Compute:
        """On a processor that takes `factor` times as long; codecs and sending, too; what waits does not."""
        encode, decode = (Cost(factor * c.alpha, factor * c.beta) for c in (self.codec.encode, self.codec.decode))
        return replace(
            self,
            forward=factor * self.forward,
            backward=factor * self.backward,
            optimizer=factor * self.optimizer,
            rewire=factor * self.rewire,
            codec=replace(self.codec, encode=encode, decode=decode),
            seconds_per_byte=factor * self.seconds_per_byte,
        )


def stated_compute(workload: Workload, device: Device) -> Compute:
    """From throughputs: products by their operations, the optimiser by its bytes."""
    sparse_rate = device.sparse_flops_per_second or device.flops_per_second
    seconds = {
        name: count / (sparse_rate if name in workload.compact else device.flops_per_second)
        for name, count in workload.flops.items()
    }
    total = sum(seconds.values())
    return Compute(
        forward=total / 3,
        backward=2 * total / 3,
        optimizer=_OPTIMIZER_BYTES * workload.values / device.memory_bytes_per_second,
        ready=ready_shares(workload, seconds),
        # the gradient of the dense weight: 2 T K N
        rewire=2 * workload.tokens * sum(workload.rewired_values) / device.flops_per_second,
    )


def stated_codec(device: Device) -> CodecCost:
    """From the memory's throughput, for codecs that pass over their values once."""
    rate = device.memory_bytes_per_second
    return CodecCost(Cost(0.0, _ENCODE_BYTES / rate), Cost(0.0, _DECODE_BYTES / rate))


def measured_compute(
    session: Session, loss_of: Callable[[], Tensor], workload: Workload, steps: int = 3, warmup: int = 1
) -> Compute:
    """Takes a few real training steps on this machine, alone, and looks when each gradient is there.

    Args:
        session: of the model that the workload was read off; it is trained a little.
        loss_of: one forward pass and its loss.
        workload: says whose gradients.
        steps: whose medians count.
        warmup: taken before.
    """
    model: nn.Module = session.model
    arrivals: dict[str, float] = {}
    names = {gradient.name for gradient in workload.gradients}

    def note(name: str) -> Callable[[Tensor], None]:
        return lambda _: arrivals.__setitem__(name, time.perf_counter())

    # the blocks of a layer are its weight's
    handles = [
        parameter.register_post_accumulate_grad_hook(note(name if name in names else f"{_owner(name)}.weight"))
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    ]
    rows: list[tuple[float, float, float]] = []
    ready: list[list[float]] = []
    try:
        for step in range(warmup + steps):
            arrivals.clear()
            begin = time.perf_counter()
            with session.forward():
                loss = loss_of()
            middle = time.perf_counter()
            session.backward(loss)
            end = time.perf_counter()
            session.step()
            if step >= warmup:
                rows.append((middle - begin, end - middle, time.perf_counter() - end))
                ready.append([(arrivals.get(one.name, end) - middle) / (end - middle) for one in workload.gradients])
    finally:
        for handle in handles:
            handle.remove()
    forward, backward, optimizer = (statistics.median(column) for column in zip(*rows, strict=True))
    return Compute(forward, backward, optimizer, tuple(statistics.median(c) for c in zip(*ready, strict=True)))


def measured_codec(codec: Codec, repeats: int = 3) -> CodecCost:
    """Times encode and decode at four sizes on this machine."""
    if codec.lossless:
        return _FREE
    encode, decode = [], []
    for n in _SIZES:
        x = torch.linspace(-1.0, 1.0, n)
        payload = codec.encode(x, weights=x)
        encode.append(least_seconds(lambda x=x: codec.encode(x, weights=x), repeats))  # type: ignore[misc]
        decode.append(least_seconds(lambda p=payload, n=n: codec.decode(p, n).clone(), repeats))  # type: ignore[misc]
    return CodecCost(Cost.fitted(_SIZES, encode), Cost.fitted(_SIZES, decode))


def exposed(ready: Sequence[float], seconds: Sequence[float], end: float) -> float:
    """Seconds for which the exchange goes on after the backward pass.

    Args:
        ready: when each bucket is complete, in the order in which they are sent.
        seconds: what each takes; one after the other.
        end: of the backward pass.
    """
    free = 0.0
    for complete, taken in zip(ready, seconds, strict=True):
        free = max(free, complete) + taken
    return max(0.0, free - end)


def exposed_sharded(gathers: Sequence[float], computes: Sequence[float], scatters: Sequence[float]) -> float:
    """Seconds that computing waits for weights, and the end for gradients, where each unit of a model is gathered
    while the one before it computes (FSDP).

    Args:
        gathers, computes: of each unit, in the order of this pass.
        scatters: of each unit's gradients after it; zeros in a forward pass.
    """
    if not computes:
        return 0.0
    wire = arrived = gathers[0]
    clock = 0.0
    for place, (taken, scatter) in enumerate(zip(computes, scatters, strict=True)):
        begin = max(clock, arrived)
        clock = begin + taken
        if place + 1 < len(gathers):
            wire = arrived = max(wire, begin) + gathers[place + 1]
        wire = max(wire, clock) + scatter if scatter else wire
    return max(clock, wire) - sum(computes)


def straggler(ranks: int, slowest: float = 1.0, jitter: float = 0.0) -> float:
    """How many times longer than a usual rank the last of them computes, in the mean over steps.

    Args:
        ranks: that wait for each other.
        slowest: of one that is always slower.
        jitter: standard deviation of a rank's time, as a share of it; normally distributed, one rank as another.

    Source: Blom 1958, the expected largest of P normal values.
    """
    if ranks == 1:
        return 1.0
    return slowest + jitter * NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25))


def ready_shares(workload: Workload, seconds: Mapping[str, float]) -> tuple[float, ...]:
    """When each gradient is there, as a share of the backward pass, from the time of each module.

    What a module does that owns no parameters itself (attention in a block) is spread over those below it.
    """
    owners = [_owner(gradient.name) for gradient in workload.gradients]
    spent = [0.0] * len(owners)
    for module, taken in seconds.items():
        own = [i for i, owner in enumerate(owners) if owner == module][:1]
        below = [i for i, owner in enumerate(owners) if owner.startswith(f"{module}.")]
        places = own or below or list(range(len(owners)))
        for i in places:
            spent[i] += taken / len(places)
    total = sum(spent) or 1.0
    return tuple(one / total for one in accumulate(spent))


def _owner(parameter: str) -> str:
    return parameter.rpartition(".")[0]
