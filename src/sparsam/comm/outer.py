"""The weights that workers share while they train apart, and the outer optimiser that moves them. No process group.

outer = Outer(model, lr=0.7, momentum=0.9)
deltas = outer.deltas()      # after some steps: what this worker would change, as gradients are, downhill positive
outer.move(mean)             # the mean of all workers' deltas: shared weights take a step
outer.write(counters)        # the model begins anew from them
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from sparsam.comm.members import digest
from sparsam.session import Rewire

__all__ = ["Outer"]

_AT_MOST_32_BITS = (torch.float32, torch.bfloat16, torch.float16)


class Outer:
    """SGD with Nesterov momentum on shared weights in float32; buffers take the mean and no more.

    Args:
        model: of this worker; its weights are the first shared ones.
        lr: of the outer optimiser.
        momentum: of the outer optimiser; 0 keeps none.

    Attributes:
        names: of the trained parameters.
        shared: float32 by name, of trained parameters and floating-point buffers: what all workers began with.

    Raises:
        ValueError: a trained parameter is of more than 32 bits, not on the CPU, or not whole.

    Source: Douillard et al. 2023, arXiv:2311.08105 (DiLoCo), Alg. 1.
    """

    def __init__(self, model: nn.Module, lr: float, momentum: float) -> None:
        for name, parameter in model.named_parameters():
            whole = type(parameter.data) is Tensor and parameter.device.type == "cpu"
            if parameter.requires_grad and not (whole and parameter.dtype in _AT_MOST_32_BITS):
                raise ValueError(
                    f"{name}: expected float32, bfloat16 or float16 on the CPU, whole on every worker, under "
                    f"LocalSteps, got a {type(parameter.data).__name__} of {parameter.dtype} on {parameter.device}."
                )
        self.model, self.lr, self.momentum = model, lr, momentum
        self.names = {name: None for name, one in model.named_parameters() if one.requires_grad}.keys()
        self.shared = {name: one.detach().float().clone() for name, one in self.tensors().items()}
        self._velocity = {name: torch.zeros_like(self.shared[name]) for name in self.names if momentum}

    def tensors(self) -> dict[str, Tensor]:
        """What is exchanged: trained parameters, then the floating-point buffers that are in checkpoints.

        Raises:
            ValueError: weights were frozen, released or replaced by others.
        """
        trained = {name: one for name, one in self.model.named_parameters() if one.requires_grad}
        if trained.keys() != self.names:
            raise ValueError(
                f"{', '.join(sorted(trained.keys() ^ self.names))}: expected the trained weights that were there when "
                "LocalSteps was attached. Call session.detach() before freezing or changing layers, and build a new "
                "session after."
            )
        saved = self.model.state_dict().keys()
        buffers = {n: one for n, one in self.model.named_buffers() if n in saved and one.is_floating_point()}
        return trained | buffers

    def counters(self) -> list[Tensor]:
        """Integer buffers of one number, such as batches that a batch norm has seen."""
        buffers = self.model.named_buffers()
        return [one for _, one in buffers if one.dim() == 0 and one.dtype in (torch.int64, torch.int32)]

    def deltas(self) -> dict[str, Tensor]:
        """float32 by name: what all began with, in the type of the weights, minus what this worker has."""
        tensors = self.tensors().items()
        return {name: self.shared[name].to(one.dtype).float() - one.detach().float() for name, one in tensors}

    def square(self, deltas: Mapping[str, Tensor]) -> float:
        """Sum of squares over all parameters; infinite where anything is not finite, buffers included."""
        if not all(bool(one.isfinite().all()) for one in deltas.values()):
            return math.inf
        return sum(float(one.double().square().sum()) for name, one in deltas.items() if name in self.names)

    @torch.no_grad()
    def move(self, mean: Mapping[str, Tensor]) -> None:
        """One outer step. The same input gives the same weights on every worker, bit for bit."""
        for name, step in mean.items():
            if name not in self.names:
                self.shared[name].sub_(step)
                continue
            if name in self._velocity:
                velocity = self._velocity[name].mul_(self.momentum).add_(step)
                step = step.add(velocity, alpha=self.momentum)
            self.shared[name].sub_(step, alpha=self.lr)

    @torch.no_grad()
    def write(self, counters: list[int]) -> None:
        """The model becomes what is shared."""
        for name, one in self.tensors().items():
            one.copy_(self.shared[name])
        for one, value in zip(self.counters(), counters, strict=True):
            one.fill_(value)

    @torch.no_grad()
    def rewired(self, event: Rewire) -> tuple[str, Tensor]:
        """Takes over a parameter that a rewire changed when it was what is shared; its momentum there begins anew.

        Returns:
            Its name, and where it changed: bool, broadcastable to it. Of frozen weights no name.
        """
        parameter = event.parameter.detach()
        name = next((n for n, one in self.model.named_parameters() if one is event.parameter), "")
        if name not in self.names:
            return "", event.new_entries
        shared = self.shared[name]
        # slots that died are no new entries, but must not move either
        changed = event.new_entries | (parameter != shared.to(parameter.dtype))
        shared.copy_(torch.where(changed, parameter.float(), shared))
        if name in self._velocity:
            self._velocity[name].masked_fill_(changed, 0.0)
        return name, changed

    def layout(self) -> str:
        """Hash of names and shapes."""
        return digest(self.tensors().items(), values=False)

    def digest(self) -> str:
        """Hash of all that workers share, topologies and frozen weights included; not of counters."""
        state = self.model.state_dict().items()
        held = [(name, self.shared.get(name, one)) for name, one in state if isinstance(one, Tensor) and one.dim()]
        return digest([*held, *self._velocity.items()])

    def state_dict(self) -> dict[str, Any]:
        return {
            "shared": {name: one.clone() for name, one in self.shared.items()},
            "momentum": {name: one.clone() for name, one in self._velocity.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes back what `state_dict` gave.

        Raises:
            ValueError: it is of other weights, or with momentum where this has none.
        """
        if state["shared"].keys() != self.shared.keys() or state["momentum"].keys() != self._velocity.keys():
            raise ValueError(
                "LocalSteps: expected a state of the weights and outer momentum that are trained here, got another. "
                "Build the model and LocalSteps as they were."
            )
        for own, saved in ((self.shared, state["shared"]), (self._velocity, state["momentum"])):
            for name, one in saved.items():
                own[name].copy_(one)
