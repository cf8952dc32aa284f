"""What a training notes of itself while it goes: the time of its phases, its topologies, its operations."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from sparsam import measure
from sparsam.kernels.ops import backend
from sparsam.measure.flops import StepFlops
from sparsam.precision.part import Precision
from sparsam.ranks import Ranks
from sparsam.session import Part, Rewire, Session
from sparsam.sparse.weights import CompactWeight, sparse_weights

__all__ = [
    "Clock",
    "Operations",
    "Peak",
    "Progress",
    "TopologyLog",
    "changed_bits",
    "decides_bits",
    "format_records",
    "step_record",
]

_WHOLE_PEAK = "the peak of memory counts from the start of the process, this system cannot reset it"


@dataclass(frozen=True)
class Progress:
    """What one step looked like, for whoever shows it."""

    step: int
    loss: float
    tokens_per_second: float
    step_seconds: float


class TopologyLog(Part):
    """Knows how many units of each layer are active, and counts what rewires move."""

    def __init__(self) -> None:
        self.active: dict[str, int] = {}
        self._units: dict[str, int] = {}
        self._weights: dict[str, int] = {}
        self._grown: dict[str, int] = {}

    def attach(self, session: Session) -> None:
        for name, weight in sparse_weights(session.model).items():
            self.active[name] = int(weight.topology.sum())
            self._units[name] = weight.topology.numel()
            self._weights[name] = weight.dense_shape[0] * weight.dense_shape[1]

    def after_rewire(self, event: Rewire) -> None:
        self.active[event.layer] = int(event.topology.sum())
        self._grown[event.layer] = int(event.grown.sum())

    @property
    def density(self) -> float:
        """Active share of the weights of all sparse layers; 1 when there is none."""
        total = sum(self._weights.values())
        kept = sum(size * self.active[name] / self._units[name] for name, size in self._weights.items())
        return kept / total if total else 1.0

    def take(self) -> dict[str, int] | None:
        """What the rewires since it was last asked moved: layers, units that grew, active units of these layers."""
        grown, self._grown = self._grown, {}
        if not grown:
            return None
        active = sum(self.active[name] for name in grown)
        return {"layers": len(grown), "grown": sum(grown.values()), "active": active}


class Operations:
    """Adds up the operations of a training, each micro-batch at the density that the layers have then.

    Args:
        counted: of one micro-batch, at the topologies of now.
        model: the model that was counted.
        topologies: follows its topologies from now on.
    """

    def __init__(self, counted: StepFlops, model: nn.Module, topologies: TopologyLog) -> None:
        self.computed, self.on_paper = 0.0, 0.0
        self.recount(counted, model, topologies)

    def recount(self, counted: StepFlops, model: nn.Module, topologies: TopologyLog) -> None:
        """Goes on with another count: the model is stored in another way."""
        self._counted, self._topologies = counted, topologies
        # a share of all: what leaves with its units from the products on paper, and from those that are computed
        self._shares: dict[str, tuple[int, float, float]] = {}
        for name, weight in sparse_weights(model).items():
            if name in counted.layers:
                _, computed, on_paper = counted.layers[name]
                multiplied = isinstance(weight, CompactWeight) and weight.layer.product == "kernel"
                active = topologies.active[name]
                self._shares[name] = active, computed if multiplied else 0.0, on_paper

    def add(self, micro_batches: int) -> None:
        """Counts micro-batches at the topologies of now."""
        computed, on_paper = self._counted.computed, self._counted.on_paper
        for name, (active, per_computed, per_paper) in self._shares.items():
            change = self._topologies.active[name] / active - 1
            computed += change * per_computed
            on_paper += change * per_paper
        self.computed += micro_batches * computed
        self.on_paper += micro_batches * on_paper

    def state_dict(self) -> dict[str, float]:
        """The sums so far."""
        return {"computed": self.computed, "on_paper": self.on_paper}

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Goes on from the sums of another; None: nobody counted until now, so that no sum is known."""
        known = {"computed": math.nan, "on_paper": math.nan} if state is None else state
        self.computed, self.on_paper = float(known["computed"]), float(known["on_paper"])


class Peak:
    """The peak of memory of a training, over all times that it was taken up."""

    def __init__(self) -> None:
        self._earlier_bytes, self._is_whole = 0, False

    def begin(self) -> None:
        """Counts from here on, where the kernel allows."""
        self._is_whole |= not measure.reset_peak_rss()

    def nbytes(self, ranks: Ranks) -> int:
        """Of the process that held most."""
        return ranks.largest(max(self._earlier_bytes, measure.peak_rss_bytes()))

    @property
    def notes(self) -> list[str]:
        """What a reader must know of it."""
        return [_WHOLE_PEAK] if self._is_whole else []

    def state_dict(self, ranks: Ranks) -> dict[str, Any]:
        """For the next process."""
        return {"peak_rss_bytes": self.nbytes(ranks), "peak_is_whole": self._is_whole}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes back what `state_dict` gave."""
        self._earlier_bytes, self._is_whole = state["peak_rss_bytes"], state["peak_is_whole"]


def step_record(progress: Progress, seconds: float, density: float, session: Session) -> dict[str, Any]:
    """The line that a step leaves in the metrics.

    Args:
        progress: the step.
        seconds: of training so far.
        density: of the sparse layers, 1 when there is none.
        session: whose parts have numbers of their own: sparsity, learning rate, gradient norm.
    """
    return {
        "step": progress.step,
        "kind": "train",
        "loss": progress.loss,
        "step_ms": progress.step_seconds * 1e3,
        "tokens_per_second": progress.tokens_per_second,
        "seconds": seconds,
        "density": density,
        **session.metrics(),
    }


def format_records(precision: Precision) -> list[dict[str, Any]]:
    """The lines for products whose format has changed since it was last asked."""
    return [{"kind": "format"} | asdict(one) for one in precision.take()]


class Clock:
    """Appends the milliseconds spent inside to a list."""

    def __init__(self, times: list[float]) -> None:
        self.times = times

    def __enter__(self) -> None:
        self.began = time.perf_counter()

    def __exit__(self, *error: object) -> None:
        self.times.append((time.perf_counter() - self.began) * 1e3)


def decides_bits(threads: int, ranks: int) -> dict[str, Any]:
    """What must be the same for a resumed run to be the uninterrupted one bit for bit."""
    subnormals = "flushed" if measure.are_flushed() else "kept"
    return {
        "threads": threads,
        "kernels": backend(),
        "torch": torch.__version__,
        "subnormals": subnormals,
        "ranks": ranks,
    }


def changed_bits(then: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """What of `decides_bits` has changed; nothing when all is the same."""
    then = {"subnormals": "kept", "ranks": 1, **then}  # as it was before it was noted
    return ", ".join(f"{name} {then[name]} then, {now[name]} now" for name in now if then[name] != now[name])
