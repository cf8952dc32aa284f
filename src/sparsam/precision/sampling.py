"""Looks at the operands of every product of a step, now and then, and at what formats would make of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from sparsam.kernels.formats import PRODUCTS, ProductFormat
from sparsam.precision.stats import ProductSample, sample_product

__all__ = ["Sampler"]


class Sampler:
    """Samples the products of linear layers in one step: each once, in the first micro-batch that reaches it.

    The gradient that is looked at is that of a layer's output, behind its activation where that is fused. A layer
    without one, for everything before it is frozen too, has a forward product only.

    Args:
        layers: name -> layer with a `weight` (N, K).
        wanted: unit -> formats to look at.

    Attributes:
        samples: unit -> format name -> sample, of the step that is watched.
        tokens: layer -> rows of its input in that step.
    """

    def __init__(self, layers: Mapping[str, nn.Module], wanted: Callable[[str], Sequence[ProductFormat]]) -> None:
        self._layers, self._wanted = layers, wanted
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self.samples: dict[str, dict[str, ProductSample]] = {}
        self.tokens: dict[str, int] = {}

    def watch(self) -> None:
        """From here on, until `take`: a checkpoint with reentrant backward runs its forward again in the backward, and
        only then with a graph."""
        if not self._hooks:
            self._hooks = [
                layer.register_forward_hook(partial(self._after_forward, name), with_kwargs=True)
                for name, layer in self._layers.items()
            ]

    def take(self) -> dict[str, dict[str, ProductSample]]:
        """What was sampled. Watches no longer."""
        for hook in self._hooks:
            hook.remove()
        samples, self.samples, self._hooks = self.samples, {}, []
        return samples

    def _after_forward(
        self, name: str, layer: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Tensor
    ) -> None:
        if not torch.is_grad_enabled() or f"{name}/{PRODUCTS[0]}" in self.samples:
            return
        given = (*args, *kwargs.values())[0].detach()
        x = given.reshape(-1, given.shape[-1])
        self.tokens[name] = len(x)
        if output.requires_grad:
            output.register_hook(partial(self._after_backward, name, layer, x))
        else:
            self._sample(f"{name}/{PRODUCTS[0]}", x, layer.weight.detach())  # type: ignore[operator]

    @torch.no_grad()
    def _after_backward(self, name: str, layer: nn.Module, x: Tensor, gradient: Tensor) -> None:
        dy = gradient.detach().reshape(-1, gradient.shape[-1])
        weight: Tensor = layer.weight.detach()  # type: ignore[operator]
        operands = ((x, weight), (dy, weight.t()), (dy.t(), x.t()))
        for product, (left, right) in zip(PRODUCTS, operands, strict=True):
            self._sample(f"{name}/{product}", left, right)

    def _sample(self, unit: str, left: Tensor, right: Tensor) -> None:
        gradient = not unit.endswith(f"/{PRODUCTS[0]}")
        self.samples[unit] = {
            one.name: sample_product(left, right, one, left_is_gradient=gradient) for one in self._wanted(unit)
        }
