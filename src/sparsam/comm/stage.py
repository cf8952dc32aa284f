"""What one rank of a pipeline trains: some layers of a chain, their optimiser and their session. It talks to nobody."""

from __future__ import annotations

import contextlib
import math
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from sparsam.comm.layer_state import common, merged, of_layer, tensors
from sparsam.session import Session

__all__ = ["Stage", "StageState", "Trail"]

_PART = "part {}"  # the key of a part's state: no layer is called so
Trail = list[tuple[str, Tensor, Tensor]]  # layer, its input, its output: what one micro-batch leaves for its backward


@dataclass
class StageState:
    """All that a stage is, taken apart.

    Attributes:
        layers: by name, what moves with a layer: "model", "optimizer" and "session".
        rest: of the session, what belongs to no layer.
        groups: options of the optimiser's groups, learning rates among them.
    """

    layers: dict[str, dict[str, Any]]
    rest: dict[str, Any] = field(default_factory=dict)
    groups: list[dict[str, Any]] = field(default_factory=list)


class Stage:
    """A contiguous piece of a chain.

    Args:
        model: the layers, under the names that they have in the whole model.
        optimizer: of their parameters.
        session: over both.
        first: whether the chain begins here, so that nobody needs the gradient of the input.

    Attributes:
        spent: CPU seconds of each layer in each step since `forget_times`; those of the optimiser and of the session
            are shared out by the layers' sizes.
    """

    def __init__(self, model: nn.Sequential, optimizer: torch.optim.Optimizer, session: Session, first: bool) -> None:
        self.model, self.optimizer, self.session, self.first = model, optimizer, session, first
        self.layers = dict(model.named_children())
        self.spent: dict[str, list[float]] = {name: [] for name in self.layers}
        self._seconds = dict.fromkeys(self.layers, 0.0)

    def forward(self, x: Tensor, draw: str) -> tuple[Tensor, Trail]:
        """One micro-batch through all layers.

        Args:
            x: input of the first one.
            draw: with the layer's name, what its random numbers depend on.
        """
        trail: Trail = []
        with self.session.forward():
            for name, layer in self.layers.items():
                x = x.detach().requires_grad_(x.is_floating_point() and not (self.first and not trail))
                with self._timed(name):
                    _draw_anew(f"{draw}/{name}")
                    y = layer(x)
                if not isinstance(y, Tensor) or not y.is_floating_point():
                    came = y.dtype if isinstance(y, Tensor) else f"a {type(y).__name__}"
                    raise ValueError(f"{name}: expected one floating tensor from a layer, got {came}.")
                trail.append((name, x, y))
                x = y
        return x, trail

    def lose(
        self, loss: Callable[[Tensor, Tensor], Tensor], trail: Trail, target: Tensor, share: float, draw: str
    ) -> float:
        """The loss of one micro-batch times its share of the batch, put at the end of its trail."""
        name, _, y = trail[-1]
        y = y.detach().requires_grad_()
        with self.session.forward(), self._timed(name):
            _draw_anew(f"{draw}/loss")
            value = loss(y, target)
            if value.dim():
                raise ValueError(f"loss: expected a scalar, got a tensor of {tuple(value.shape)}. Take its mean.")
            value = value * share
        trail.append((name, y, value))
        return float(value.detach())

    def backward(self, trail: Trail, gradient: Tensor | None) -> Tensor:
        """The gradient of one micro-batch through all layers.

        Args:
            trail: of its forward.
            gradient: of the last output; None where that is the loss.

        Returns:
            The gradient of the input.
        """
        for name, x, y in reversed(trail):
            with self._timed(name):
                if y.requires_grad:
                    y.backward(gradient)
            gradient = torch.zeros_like(x) if x.grad is None else x.grad
        assert gradient is not None, "a stage has a layer"
        return gradient.contiguous()

    def squares(self, name: str) -> float:
        """Sum of squares of a layer's gradients."""
        gradients = [parameter.grad for parameter in self.layers[name].parameters() if parameter.grad is not None]
        return sum(float(torch.linalg.vector_norm(gradient).double().square()) for gradient in gradients)

    def update(self, norm: Callable[[], float] | None, clip: float | None) -> None:
        """Takes the step with the gradients that are there.

        Args:
            norm: of the whole model's gradients, asked when parts are done with them.
            clip: to which norm they are clipped; a norm that is not finite skips the step.
        """
        with self._timed(None):
            self.session.before_step()
        applied = True
        if norm is not None and clip is not None:
            found = norm()
            applied = math.isfinite(found)
            if found > clip:
                for parameter in self.model.parameters():
                    if parameter.grad is not None:
                        parameter.grad.mul_(clip / found)
        with self._timed(None):
            if applied:
                self.optimizer.step()
            self.session.after_step(applied)
            self.optimizer.zero_grad(set_to_none=True)
        for name, seconds in self._seconds.items():
            self.spent[name].append(seconds)
            self._seconds[name] = 0.0

    def forget_times(self) -> None:
        """Begins to measure anew."""
        for seconds in self.spent.values():
            seconds.clear()

    def nbytes(self, name: str) -> int:
        """Of what moves with a layer: weights, buffers, state of the optimiser."""
        moments = [
            value
            for parameter in self.layers[name].parameters()
            for value in self.optimizer.state.get(parameter, {}).values()
            if isinstance(value, Tensor)
        ]
        return sum(tensor.nbytes for tensor in [*tensors(self.layers[name]).values(), *moments])

    def state(self) -> StageState:
        """All of it; tensors of the model and of the optimiser are theirs, not copies."""
        session = self.session.state_dict()
        session["parts"] = {_PART.format(position): part for position, part in enumerate(session["parts"])}
        groups = [
            {key: value for key, value in group.items() if key != "params"} for group in self.optimizer.param_groups
        ]
        layers = {}
        for name, layer in self.layers.items():
            moments = {
                inner: dict(self.optimizer.state[parameter])
                for inner, parameter in layer.named_parameters()
                if parameter in self.optimizer.state
            }
            layers[name] = {"model": _data(layer), "optimizer": moments, "session": of_layer(session, name)}
        return StageState(layers, common(session, list(self.layers)), groups)

    def taken_apart(self) -> StageState:
        """Ends the stage: its parts are detached, and weights are what a loop without them would have."""
        state = self.state()
        self.session.detach()
        for name, layer in self.layers.items():
            state.layers[name]["model"] = _data(layer)
        return state

    def load(self, state: StageState) -> None:
        """Goes on where these layers were, on whatever ranks; their weights are in the model already."""
        if len(state.groups) != len(self.optimizer.param_groups):
            raise ValueError(
                f"optimizer: expected {len(state.groups)} parameter groups on every stage, got "
                f"{len(self.optimizer.param_groups)}. Make empty ones too."
            )
        for group, options in zip(self.optimizer.param_groups, state.groups, strict=True):
            group.update(options)
        session: Mapping[str, Any] = state.rest
        for name, layer in self.layers.items():
            for inner, parameter in layer.named_parameters():
                if inner in state.layers[name]["optimizer"]:
                    self.optimizer.state[parameter] = state.layers[name]["optimizer"][inner]
            session = merged(session, state.layers[name]["session"])
        parts: Sequence[Any] = [session["parts"][_PART.format(position)] for position in range(len(session["parts"]))]
        self.session.load_state_dict({**session, "parts": parts})

    @contextlib.contextmanager
    def _timed(self, name: str | None) -> Iterator[None]:
        """Adds CPU seconds to a layer's, or to those of all by their sizes."""
        begin = time.process_time()
        yield
        seconds = time.process_time() - begin
        if name is not None:
            self._seconds[name] += seconds
            return
        sizes = {name: 1 + sum(one.numel() for one in layer.parameters()) for name, layer in self.layers.items()}
        for name, size in sizes.items():
            self._seconds[name] += seconds * size / sum(sizes.values())


def _data(layer: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.data for name, tensor in tensors(layer).items()}


def _draw_anew(key: str) -> None:
    """Random numbers from here on depend on this key alone, not on what was drawn before or on which rank."""
    torch.default_generator.manual_seed(zlib.crc32(key.encode()))
