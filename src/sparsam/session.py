"""One training loop: the parts attached to it, the order they act in, and their state. It knows no part by name."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from sparsam.shards import total_norm
from sparsam.window import averages, check_shards, exchange, exchanging, group_of

__all__ = ["Part", "Rewire", "Session"]


@dataclass(frozen=True)
class Rewire:
    """A new topology was applied to one layer; for whoever keeps state per weight.

    Attributes:
        layer: name of the layer.
        module: the module that owns the weight.
        parameter: the tensor that holds the weight.
        topology: bool grid after the rewire, True = active unit.
        dropped: bool grid, units that were active and no longer are.
        grown: bool grid, units that are active and were not.
        new_entries: bool, broadcastable to the parameter: entries whose state begins anew. In compact storage these
            are the slots that moved, in masked storage the grown and the dropped entries.
    """

    layer: str
    module: nn.Module
    parameter: nn.Parameter
    topology: torch.Tensor
    dropped: torch.Tensor
    grown: torch.Tensor
    new_entries: torch.Tensor


class Part:
    """One thing attached to a training loop. Every seam does nothing until a part fills it in."""

    def attach(self, session: Session) -> None:
        """Called once, when the session is built; refuses what it cannot work with."""

    def forward(self) -> contextlib.AbstractContextManager[object]:
        """Surrounds the forward pass."""
        return contextlib.nullcontext()

    def loss_scale(self) -> float:
        """What losses are multiplied by, the same for a whole window; gradients are divided by it before `before_step`.
        At most one part has another one than 1."""
        return 1.0

    def after_loss(self, loss: torch.Tensor) -> None:
        """The loss of a micro-batch, detached and unscaled; its backward comes next."""

    def before_step(self) -> None:
        """Gradients of the whole window are there, unscaled and unclipped. Comes once a step."""

    def accepts_step(self) -> bool:
        """Whether these gradients are fit for a step, asked after `before_step`. False skips it."""
        return True

    def after_step(self, applied: bool) -> None:
        """The optimiser has stepped, or (applied False) the step was skipped."""

    def after_rewire(self, event: Rewire) -> None:
        """Another part moved units of a layer."""

    def metrics(self) -> dict[str, float]:
        """Numbers for the log, by name."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Tensors and plain values (numbers, strings, lists, dicts of them) that a resumed run needs."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes back what `state_dict` gave."""

    def detach(self) -> None:
        """Leaves the model and the optimiser as a loop without this part would have them."""


class Session:
    """The ordered parts of one training loop. Use:

        with session.forward():
            loss = loss_of(model, batch)
        session.backward(loss)
        applied = session.step()

    Args:
        model: what is trained.
        optimizer: the user's own; the session calls its `step` and `zero_grad`.
        parts: in the order in which they act.
        accumulate: backwards in one window. `step` does nothing until the window is full.
        clip: largest global L2 norm of the gradients, or None.
        seed: of every random choice that parts make; with several ranks, that of the first of them counts.
        group: the ranks that train the same weights, where others train other layers (a pipeline); None: all ranks.

    Attributes:
        applied_steps: optimiser steps taken so far; what every schedule counts.
        apart: steps after which ranks that train apart have equal weights again; 0: they take every step together.
        divisor: what the gradients of the window were divided by before `before_step`, the loss scale included; a part
            that gathers gradients of its own divides by it too. In a backward: what they are to be divided by if it is
            the window's last, from this rank's samples alone.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        parts: Sequence[Part] = (),
        *,
        accumulate: int = 1,
        clip: float | None = None,
        seed: int = 0,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        if accumulate < 1:
            raise ValueError(f"accumulate: expected at least 1 backward in a window, got {accumulate}.")
        if clip is not None and not clip > 0:
            raise ValueError(f"clip: expected a norm > 0 or None, got {clip}.")
        if not hasattr(optimizer, "param_groups"):
            raise ValueError(f"optimizer: expected a torch.optim.Optimizer, got {_kind(optimizer)}.")
        if not isinstance(parts, Sequence):
            raise ValueError(f"parts: expected a list of parts, got {_kind(parts)}. Write [...] around it.")
        for part in parts:
            if not isinstance(part, Part):
                raise ValueError(
                    f"parts: expected parts such as SparseTraining(rigl()), got {_kind(part)}. "
                    "A method goes into SparseTraining(...), a schedule of the learning rate into LearningRate(...)."
                )
        check_shards(model, (one for group in optimizer.param_groups for one in group["params"]))
        self.model = model
        self.optimizer = optimizer
        self.parts = list(parts)
        self.accumulate = accumulate
        self.clip = clip
        self.seed = _from_first_rank(seed, group or group_of(model))
        self.group = group
        self.applied_steps = 0
        self.apart = 0
        self.divisor = 1.0
        self._backwards = 0
        self._samples = 0.0
        self._weighed = False
        self._loss_scale = 1.0
        self._gradient_norm = math.nan
        self._prepared = False
        for position, part in enumerate(self.parts):
            try:
                part.attach(self)
            except BaseException:
                # a session that could not be built holds nothing
                for attached in reversed(self.parts[:position]):
                    attached.detach()
                raise

    @contextlib.contextmanager
    def forward(self) -> Iterator[None]:
        """Surrounds one forward pass and its loss."""
        with contextlib.ExitStack() as stack:
            for part in self.parts:
                stack.enter_context(part.forward())
            # the last backward of a window is the one that talks to other ranks
            stack.enter_context(exchanging(self.model, last=self._backwards + 1 >= self.accumulate))
            yield

    def backward(self, loss: torch.Tensor, samples: float | None = None) -> None:
        """Adds this loss's gradients to the window.

        Args:
            loss: scalar, the mean over its micro-batch.
            samples: how many samples (or tokens) that mean is over, so that the window's gradient is the mean over all
                of them; without it every micro-batch of the window weighs the same. Give it always or never.
        """
        if self._backwards >= self.accumulate:
            raise ValueError(f"backward: the window of {self.accumulate} is full. Call step() first.")
        if samples is not None and not samples > 0:
            raise ValueError(f"samples: expected how many samples the loss is the mean of, > 0, got {samples}.")
        weighed = samples is not None
        if self._backwards and weighed != self._weighed:
            raise ValueError("samples: expected for every backward of a window or for none, got a mixture.")
        self._weighed = weighed
        weight = 1.0 if samples is None else float(samples)
        single = self.accumulate == 1
        if self._backwards == 0:
            self._loss_scale = self._scale_of_parts()
        # scaled here and divided once in step(): a window cut short is then still an exact mean
        factor = self._loss_scale * (1.0 if single else weight)
        self.divisor = self._loss_scale * self._samples + factor
        for part in self.parts:
            part.after_loss(loss.detach())
        if loss.requires_grad:
            (loss if factor == 1.0 else loss * factor).backward()
        elif any(parameter.requires_grad for parameter in self._parameters()):
            raise ValueError(
                "backward: expected a loss that depends on trained weights, got one without a graph. "
                "Compute it inside session.forward(), without torch.no_grad() or detach()."
            )  # and where everything is frozen there is nothing to do
        self._backwards += 1
        self._samples += 1.0 if single else weight

    def step(self, last: bool = False) -> bool:
        """Takes the optimiser step when the window is full.

        Args:
            last: take it with the micro-batches there are (the end of an epoch). Ranks that average gradients each need
                at least one: the others would wait for one that has none.

        Returns:
            True when weights were updated.
        """
        if self._backwards == 0 or (self._backwards < self.accumulate and not last):
            return False
        if self._backwards < self.accumulate:
            exchange(self.model, self._parameters())
        self.divisor = self._samples
        if self._weighed and self.accumulate > 1 and averages(self.model):
            self.divisor = self._mean_over_ranks(self._samples)
        self.divisor *= self._loss_scale
        if self.divisor != 1.0:
            for parameter in self._parameters():
                if parameter.grad is not None:
                    parameter.grad.div_(self.divisor)
        self.before_step()
        answers = [part.accepts_step() for part in self.parts]  # of all of them: an answer may need other ranks
        applied = all(answers) and self._clip()
        if applied:
            self.optimizer.step()
        try:
            self.after_step(applied)
        finally:  # what fails there (another rank that is gone) must not come again with the next window
            self.optimizer.zero_grad(set_to_none=True)
            self._backwards, self._samples = 0, 0.0
        return applied

    def before_step(self) -> None:
        """For a loop that owns backward and clipping: call when a window's gradients are there. Idempotent per step."""
        if not self._prepared:
            for part in self.parts:
                part.before_step()
            self._prepared = True

    def after_step(self, applied: bool = True) -> None:
        """For a loop that owns the optimiser step: call after it. Schedules move only when it was applied."""
        self._prepared = False
        if applied:
            self.applied_steps += 1
        for part in self.parts:
            part.after_step(applied)

    def rewired(self, event: Rewire) -> None:
        """Tells every part that units of a layer have moved."""
        for part in self.parts:
            part.after_rewire(event)

    def metrics(self) -> dict[str, float]:
        """The numbers of all parts, and the gradient norm of the last step when it is clipped."""
        own = {} if math.isnan(self._gradient_norm) else {"gradient_norm": self._gradient_norm}
        return own | {name: value for part in self.parts for name, value in part.metrics().items()}

    def state_dict(self) -> dict[str, Any]:
        """State of the session and its parts. Taken between steps; a half-filled window has no place in it."""
        if self._backwards:
            raise ValueError(
                f"state_dict: {self._backwards} of {self.accumulate} backwards of a window are done. "
                "Save after step(), or take step(last=True) first."
            )
        parts = [part.state_dict() for part in self.parts]
        return {"version": 1, "applied_steps": self.applied_steps, "seed": self.seed, "parts": parts}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes back what `state_dict` gave to a session with the same parts."""
        if state["version"] != 1:
            raise ValueError(
                f"session state: expected version 1, got {state['version']}. Use the sparsam that wrote it."
            )
        if len(state["parts"]) != len(self.parts):
            raise ValueError(
                f"session state: expected {len(self.parts)} parts, got {len(state['parts'])}. Attach the same parts."
            )
        self.applied_steps = int(state["applied_steps"])
        self.seed = int(state["seed"])  # the choices to come are those of the run that is resumed
        for part, part_state in zip(self.parts, state["parts"], strict=True):
            part.load_state_dict(part_state)

    def detach(self) -> None:
        """Detaches every part, last one first. The model and optimiser go on without the session."""
        while self.parts:
            self.parts.pop().detach()
        exchanging(self.model, last=True)

    def _scale_of_parts(self) -> float:
        scales = [scale for part in self.parts if (scale := part.loss_scale()) != 1.0]
        if len(scales) > 1:
            raise ValueError(
                f"loss scale: expected at most one part that scales the loss, got {len(scales)}. Keep one."
            )
        return scales[0] if scales else 1.0

    def _parameters(self) -> Iterator[nn.Parameter]:
        for group in self.optimizer.param_groups:
            yield from group["params"]

    def _mean_over_ranks(self, value: float) -> float:
        """Ranks with other numbers of samples must still divide by the same one."""
        device = next(self.model.parameters()).device
        total = torch.tensor(value, dtype=torch.float64, device=device)
        dist.all_reduce(total, group=group_of(self.model))
        return float(total) / dist.get_world_size(group_of(self.model))

    def _clip(self) -> bool:
        """Clips to the global norm; False when that norm is not finite, so that the step is skipped."""
        if self.clip is None:
            return True
        parameters = list(self._parameters())
        norm = total_norm(parameter.grad for parameter in parameters if parameter.grad is not None)
        nn.utils.clip_grads_with_norm_(parameters, self.clip, norm)
        self._gradient_norm = float(norm)
        return math.isfinite(self._gradient_norm)


def _kind(given: object) -> str:
    return f"the class {given.__name__} itself" if isinstance(given, type) else f"a {type(given).__name__}"


def _from_first_rank(seed: int, group: dist.ProcessGroup | None) -> int:
    """Ranks that were given other seeds must still make the same random choices."""
    if not (dist.is_available() and dist.is_initialized()):
        return seed
    shared = [seed]
    dist.broadcast_object_list(shared, group=group, group_src=0)
    return shared[0]
