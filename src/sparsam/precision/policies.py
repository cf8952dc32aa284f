"""What every policy is: formats of products as a pure function of what was measured. Nothing is kept here."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from sparsam.kernels.formats import ProductFormat, product_format
from sparsam.precision.stats import ProductSample

__all__ = ["Evidence", "Policy", "UnitState"]


@dataclass(frozen=True)
class UnitState:
    """What a policy knows of one unit, a layer's product: "blocks.0.up/forward", "blocks.0.up/input_gradient", ...

    Attributes:
        format: name of the format it runs in.
        clean: samples in a row that allow the next lower format.
        wait: applied step before which it is not lowered again.
        cool_down: steps that the next wait takes.
        backoffs: how often it was raised.
        pinned: it is not lowered any more.
        saturated: samples in a row that were cut.
        rejected: formats tried and not taken, name -> why, with the timing or the loss gap.
        lowered_at: applied step of the last lowering; None after a raise, which answers for it.
    """

    format: str
    clean: int = 0
    wait: int = 0
    cool_down: int = 0
    backoffs: int = 0
    pinned: bool = False
    saturated: int = 0
    rejected: Mapping[str, str] = field(default_factory=dict)
    lowered_at: int | None = None


@dataclass(frozen=True)
class Evidence:
    """What was measured since the last decision.

    Attributes:
        samples: unit -> format name -> what its operands and product look like in that format. Empty between samples.
        finite: whether loss and gradients of the last step were.
        loss_score: how far the last loss lies above its running mean, in standard deviations; 0 when not known.
        gain: (unit, format) -> time of its product now over its time in that format on this device, casts included.
        probe: unit -> format to be tried -> upper 95 % bound of the relative gap in loss on the same batches; None
            when the loop gave no way to compute a loss.
    """

    samples: Mapping[str, Mapping[str, ProductSample]] = field(default_factory=dict)
    finite: bool = True
    loss_score: float = 0.0
    gain: Callable[[str, ProductFormat], float] = lambda unit, format: math.nan
    probe: Callable[[Mapping[str, ProductFormat]], float] | None = None


class Policy(ABC):
    """Decides in which format each product runs. Stores nothing: state goes in and comes out, so it can be tested on
    tables and resumed.

    Attributes:
        sample_every: applied steps between samples; 0 when it needs none.
        candidates: formats whose effect on a unit's operands is sampled.
        trial_steps: how long after a lowering a leap of the loss is put down to it; 0 when nothing is on trial.
        spike: standard deviations above the running mean of the loss that are a leap.
        lowest: the formats it may come to, the lowest first, for the check of what the device can do.
    """

    sample_every: int = 0
    candidates: tuple[ProductFormat, ...] = ()
    trial_steps: int = 0
    spike: float = math.inf

    @property
    @abstractmethod
    def lowest(self) -> tuple[ProductFormat, ...]: ...

    @abstractmethod
    def start(self, units: tuple[str, ...]) -> Mapping[str, UnitState]:
        """The state of every unit before the first step.

        Raises:
            ValueError: a rule matches no unit.
        """

    def reach(self, one: UnitState) -> tuple[ProductFormat, ...]:
        """The formats that a unit will have, from this state on, whatever is measured."""
        return (product_format(one.format),)

    def decide(self, state: Mapping[str, UnitState], evidence: Evidence, step: int) -> Mapping[str, UnitState]:
        """The state after `step` applied steps. Asked after every step; the one here leaves everything as it is."""
        return state
