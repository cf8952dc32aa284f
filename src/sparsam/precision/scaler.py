"""Loss scaling: gradients of fp16 products stay out of the underflow range, and no step is taken that is not finite."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from sparsam.precision.agreement import on_all_ranks
from sparsam.precision.gradients import gradient_norm, gradient_values
from sparsam.session import Part, Session
from sparsam.shards import own

__all__ = ["LossScaler"]

_HALVES = (torch.float16, torch.bfloat16)
_HIGHEST = 2.0**24


class LossScaler(Part):
    """Multiplies the loss by a scale that grows while gradients are finite and falls when they are not.

    A step whose gradients are not finite on any rank is skipped on all of them, and no schedule counts it. The scale of
    torch's GradScaler may fall to 0; this one has a floor, and a run of skipped steps ends with the name of the first
    tensor that is not finite. For loops of one's own: a framework's loop has its own scaler.

    Args:
        initial: scale at the start, > 0.
        growth: factor after `interval` finite steps in a row, > 1.
        backoff: factor after a step that is not finite, in (0, 1).
        interval: finite steps in a row before the scale grows.
        floor: the scale never falls below, > 0.
        stop_after: skipped steps in a row that end the training.

    Attributes:
        scale: the current one.
        skipped: steps skipped so far.

    Source: Micikevicius et al. 2018, arXiv:1710.03740. Differs: the floor and the stop.
    """

    def __init__(
        self,
        initial: float = 2.0**16,
        growth: float = 2.0,
        backoff: float = 0.5,
        interval: int = 2000,
        floor: float = 1.0,
        stop_after: int = 20,
    ) -> None:
        if not 0 < floor <= initial <= _HIGHEST:
            raise ValueError(
                f"LossScaler: expected 0 < floor <= initial <= 2^24, got floor {floor:g} and initial {initial:g}."
            )
        if not growth > 1:
            raise ValueError(f"growth: expected a factor > 1, got {growth}.")
        if not 0 < backoff < 1:
            raise ValueError(f"backoff: expected a factor in (0, 1), got {backoff}.")
        for what, count in (("interval", interval), ("stop_after", stop_after)):
            if count < 1:
                raise ValueError(f"{what}: expected at least 1 step, got {count}.")
        self.scale, self.floor = initial, floor
        self.growth, self.backoff, self.interval, self.stop_after = growth, backoff, interval, stop_after
        self.skipped = 0
        self._finite = self._skipped_in_a_row = 0
        self._refused = False

    def attach(self, session: Session) -> None:
        self.session = session
        for name, parameter in session.model.named_parameters():
            if parameter.requires_grad and parameter.dtype in _HALVES:
                raise ValueError(
                    f"{name}: expected float32 weights with a loss scaler, got {parameter.dtype}: small updates would "
                    "be lost in it. Keep the model float32 and let Precision choose the format of its products."
                )

    def loss_scale(self) -> float:
        return self.scale

    def accepts_step(self) -> bool:
        finite = math.isfinite(gradient_norm((parameter for _, parameter in self._trained()), math.inf))
        if not self.session.apart:  # ranks that train apart skip steps of their own
            finite = on_all_ranks(finite, next(self.session.model.parameters()).device)
        self._refused = not finite
        return finite

    def after_step(self, applied: bool) -> None:
        if self._refused:
            self._refused = False
            self.skipped += 1
            self._skipped_in_a_row += 1
            self._finite = 0
            self.scale = max(self.floor, self.scale * self.backoff)
            if self._skipped_in_a_row >= self.stop_after:
                raise RuntimeError(
                    f"LossScaler: expected finite gradients, got {self._first_bad()} in {self._skipped_in_a_row} steps "
                    f"in a row, down to a scale of {self.scale:g}. Lower the learning rate or use bf16; no such step "
                    "was applied."
                )
        elif applied:
            self._skipped_in_a_row = 0
            self._finite += 1
            if self._finite == self.interval:
                self._finite = 0
                self.scale = min(_HIGHEST, self.scale * self.growth)

    def metrics(self) -> dict[str, float]:
        return {"loss_scale": self.scale, "skipped_steps": float(self.skipped)}

    def state_dict(self) -> dict[str, Any]:
        return {
            "scale": self.scale,
            "skipped": self.skipped,
            "finite": self._finite,
            "skipped_in_a_row": self._skipped_in_a_row,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.scale, self.skipped = float(state["scale"]), int(state["skipped"])
        self._finite, self._skipped_in_a_row = int(state["finite"]), int(state["skipped_in_a_row"])

    def _trained(self) -> list[tuple[str, torch.nn.Parameter]]:
        held = {id(parameter) for group in self.session.optimizer.param_groups for parameter in group["params"]}
        return [(name, one) for name, one in self.session.model.named_parameters() if id(one) in held]

    def _first_bad(self) -> str:
        for name, parameter in self._trained():
            if parameter.grad is not None and not bool(own(gradient_values(parameter.grad)).isfinite().all()):
                return f"some that are not in {name}"
        return "some that are not on another rank"
