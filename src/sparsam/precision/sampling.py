"""Looks at the operands of every product of a step, now and then, and at what formats would make of them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from sparsam.kernels.formats import PRODUCTS, ProductFormat
from sparsam.precision.stats import ProductSample, sample_product

__all__ = ["Sampler"]


class Sampler:
    """Samples the products of linear layers while one forward and its backward run.

    The gradient that is looked at is that of a layer's output, behind its activation where that is fused.

    Args:
        layers: name -> layer with a `weight` (N, K).
        wanted: unit -> formats to look at.

    Attributes:
        samples: unit -> format name -> sample, of the last step that was watched.
        tokens: layer -> rows of its input in that step.
    """

    def __init__(self, layers: Mapping[str, nn.Module], wanted: Callable[[str], Sequence[ProductFormat]]) -> None:
        self._layers, self._wanted = layers, wanted
        self.samples: dict[str, dict[str, ProductSample]] = {}
        self.tokens: dict[str, int] = {}

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Surrounds the forward pass whose products are sampled; their backwards are seen when they come."""
        self.samples = {}
        hooks = [
            layer.register_forward_hook(partial(self._after_forward, name)) for name, layer in self._layers.items()
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _after_forward(self, name: str, layer: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> None:
        x = inputs[0].detach().reshape(-1, inputs[0].shape[-1])
        self.tokens[name] = len(x)
        if output.requires_grad:
            output.register_hook(partial(self._after_backward, name, layer, x))

    @torch.no_grad()
    def _after_backward(self, name: str, layer: nn.Module, x: Tensor, gradient: Tensor) -> None:
        dy = gradient.detach().reshape(-1, gradient.shape[-1])
        weight: Tensor = layer.weight.detach()  # type: ignore[operator]
        operands = ((x, weight), (dy, weight.t()), (dy.t(), x.t()))
        for product, (left, right) in zip(PRODUCTS, operands, strict=True):
            unit = f"{name}/{product}"
            self.samples[unit] = {
                one.name: sample_product(left, right, one, left_is_gradient=product != PRODUCTS[0])
                for one in self._wanted(unit)
            }
