"""Which layers have formats of their own: those that have a place for them, and every plain nn.Linear."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from sparsam.kernels.format_linear import format_linear
from sparsam.kernels.formats import Products

__all__ = ["FormatLinear", "compiled_around", "format_layers", "multiplies_blocks", "plain", "restore_layers"]


class FormatLinear(nn.Linear):
    """What an nn.Linear becomes while a policy decides in which formats it multiplies.

    The module stays the object that it was, with its parameters, buffers, hooks and names, and so for whoever holds on
    to it; only its class changes, as with torch.nn.utils.parametrize.

    Attributes:
        formats: of the three products, may be changed between steps; None computes as nn.Linear.
    """

    formats: Products | None = None

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # named as nn.Linear's, some call it by name
        if self.formats is None:
            return super().forward(input)
        return format_linear(input, self.weight, self.bias, self.formats)


def format_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Makes every plain nn.Linear a `FormatLinear`; those and other layers with `formats`, by name.

    A layer that computes in a way of its own (a subclass, a replaced or compiled forward, a reparametrised weight) is
    left alone. Names are those of the model inside DistributedDataParallel.
    """
    found = {}
    for name, module in plain(model).named_modules():
        if type(module) is nn.Linear and not {"forward", "_compiled_call_impl"} & vars(module).keys():
            module.__class__ = FormatLinear
        if hasattr(type(module), "formats"):
            found[name] = module
    return found


def compiled_around(model: nn.Module, layers: Iterable[str]) -> str | None:
    """The name of a compiled module that one of these layers is, or is part of; None if there is none."""
    compiled = [
        f"{name}." if name else ""
        for name, module in plain(model).named_modules()
        if "_orig_mod" in module._modules or getattr(module, "_compiled_call_impl", None) is not None
    ]
    return next((name for layer in layers for name in compiled if f"{layer}.".startswith(name)), None)


def plain(model: nn.Module) -> nn.Module:
    """The model inside DistributedDataParallel, or itself: a state must not depend on the number of ranks."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def restore_layers(layers: Iterable[nn.Module]) -> None:
    """Undoes `format_layers`."""
    for layer in layers:
        vars(layer).pop("formats", None)
        if type(layer) is FormatLinear:
            layer.__class__ = nn.Linear  # type: ignore[assignment]


def multiplies_blocks(layer: nn.Module) -> bool:
    """Whether a layer multiplies the blocks of a sparse weight, for which other kernels stand."""
    return getattr(layer, "product", "dense") == "kernel"
