"""What a training notes of itself while it goes: the time of its phases, its topologies, its operations."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from torch import nn

from sparsam.measure.flops import StepFlops
from sparsam.precision.part import Precision
from sparsam.session import Part, Rewire, Session
from sparsam.sparse.weights import CompactWeight, sparse_weights

__all__ = ["Clock", "Operations", "Progress", "TopologyLog", "format_records", "step_record"]


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
