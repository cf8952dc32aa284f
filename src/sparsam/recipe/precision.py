"""The section `precision` of a recipe: one format for all, or the policy that decides for each product."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

import torch
from pydantic import BeforeValidator, Discriminator, Field, Tag, model_validator

from sparsam.kernels.formats import ProductFormat, product_format
from sparsam.precision.adaptive import Adaptive
from sparsam.precision.policies import Policy
from sparsam.precision.progressive import Progressive
from sparsam.precision.resolve import resolve
from sparsam.precision.rules import Rules
from sparsam.precision.scaler import LossScaler
from sparsam.recipe.methods import step_of
from sparsam.recipe.section import Typed
from sparsam.session import Part

__all__ = ["AnyPrecision", "PolicySection"]


class PolicySection(Typed):
    """What policies have in common. Formats of which this device has no product need `simulate`."""

    type: str
    simulate: bool = False
    grad_scaling: Literal["none", "adaptive"] = "none"

    @property
    def switches(self) -> bool:
        """Whether formats change while it trains."""
        return True

    def policy(self, steps: int, warm_up: float) -> Policy:
        """The policy of a training of so many steps, of which a share warms the learning rate up."""
        raise NotImplementedError

    def scaler(self) -> list[Part]:
        """What scales the loss, where it is scaled."""
        return [LossScaler()] if self.grad_scaling == "adaptive" else []

    def _check(self, *formats: ProductFormat) -> None:
        for one in formats:
            resolve(one, torch.device("cpu"), self.simulate)


class RulesSection(PolicySection):
    """Formats by glob over names of products, `blocks.0.up/forward`, or of layers; later ones win."""

    type: Literal["rules"] = "rules"
    rules: dict[str, str] = Field({})
    low: str = "bf16"
    head: str = "fp32"

    @property
    def switches(self) -> bool:
        return False

    @model_validator(mode="after")
    def _exist(self) -> Self:
        self._check(*(product_format(name) for name in (self.low, self.head, *self.rules.values())))
        return self

    def policy(self, steps: int, warm_up: float) -> Policy:
        return Rules(self.rules, low=self.low, head=self.head)


class ProgressiveSection(PolicySection):
    """From one format to a lower one, product by product, once the learning rate has warmed up."""

    type: Literal["progressive"] = "progressive"
    initial: str = "bf16"
    final: str = "fp8"
    transition_steps: int = Field(1000, ge=1)
    cooldown: float | None = Field(None, gt=0, le=1)  # share of the steps after which forwards are in 16 bits again

    @model_validator(mode="after")
    def _exist(self) -> Self:
        self._check(product_format(self.final), product_format(self.initial))
        return self

    def policy(self, steps: int, warm_up: float) -> Policy:
        return Progressive(
            self.initial,
            self.final,
            self.transition_steps,
            begin=int(warm_up * steps),
            cooldown_at=None if self.cooldown is None else step_of(self.cooldown, steps),
        )


class AdaptiveSection(PolicySection):
    """Lowers what measures faster and does no harm, and raises at once what does."""

    type: Literal["adaptive"] = "adaptive"
    initial: str = "fp32"
    candidates: list[str] = Field(["bf16", "int8"], min_length=1)
    sample_every: int = Field(32, ge=1)
    cooldown: float | None = Field(None, gt=0, le=1)

    @model_validator(mode="after")
    def _exist(self) -> Self:
        self._check(*(product_format(name) for name in (self.initial, *self.candidates)))
        return self

    def policy(self, steps: int, warm_up: float) -> Policy:
        return Adaptive(
            product_format(self.initial),
            tuple(product_format(name) for name in self.candidates),
            sample_every=self.sample_every,
            cooldown_at=None if self.cooldown is None else step_of(self.cooldown, steps),
        )


def _usable(given: Any) -> Any:
    """Refuses, before anything is read, a bare format that this machine does not train in."""
    if given in ("fp16", "fp8", "int8", "tf32"):
        raise ValueError(
            f"CPUs have no fast {given} to train in; the usable precisions are bf16 and fp32, "
            "or a policy such as {type: adaptive}"
        )
    return given


def _kind(given: Any) -> str:
    if isinstance(given, dict):
        kind = given.get("type", "progressive")
        return kind.lower() if isinstance(kind, str) else str(kind)
    return given.type if isinstance(given, PolicySection) else "format"


AnyPrecision = Annotated[
    Annotated[Literal["bf16", "fp32"], Tag("format")]
    | Annotated[RulesSection, Tag("rules")]
    | Annotated[ProgressiveSection, Tag("progressive")]
    | Annotated[AdaptiveSection, Tag("adaptive")],
    Discriminator(_kind),
    BeforeValidator(_usable),
]
