"""A dense linear layer in given formats, in the place of one that was there: same parameters, names and hooks."""

from __future__ import annotations

import torch
from torch import nn

from sparsam.kernels.format_linear import format_linear
from sparsam.kernels.formats import Products

__all__ = ["FormatLinear"]


class FormatLinear(nn.Linear):
    """Stands for an nn.Linear whose three products shall have formats of their own.

    The two share all that a module holds: its tables of parameters, buffers and hooks, so a parameter, a topology or a
    hook given to one of them is the other's too. Parameters are listed once, and a state dict has the names it had.

    Args:
        layer: an nn.Linear, or a subclass that keeps its forward and its weight.
        formats: of the three products; None computes as the layer does.

    Attributes:
        formats: may be changed between steps.

    Raises:
        ValueError: the layer computes in another way.
    """

    formats: Products | None

    def __init__(self, layer: nn.Linear, formats: Products | None = None) -> None:
        if type(layer).forward is not nn.Linear.forward or {"forward", "_compiled_call_impl"} & vars(layer).keys():
            raise ValueError(
                "FormatLinear: expected a layer with the forward of nn.Linear, not replaced or compiled, got "
                f"{type(layer).__name__}. Leave the layer."
            )
        if layer._parameters.get("weight") is None:
            raise ValueError(
                "FormatLinear: expected a weight that is a parameter, got one computed by other code. Leave the layer."
            )
        # instead of super().__init__(), which would make tables and parameters of its own
        vars(self).update(vars(layer))
        vars(self)["_original"] = layer  # set through nn.Module it would be a submodule, its parameters listed twice
        self.formats = formats

    @property
    def original(self) -> nn.Linear:
        """The layer it stands for, in the mode and with all that this one has by now."""
        layer: nn.Linear = vars(self)["_original"]
        now = {name: value for name, value in vars(self).items() if name not in ("_original", "formats")}
        vars(layer).clear()
        vars(layer).update(now)
        return layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) if self.formats is None else format_linear(x, self.weight, self.bias, self.formats)
