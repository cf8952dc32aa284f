"""Quantisation-aware training as a part: layers multiply as they will once quantised, gradients go straight through.

session = Session(model, optimizer, [SparseTraining(rigl()), QuantisationAware()])
...
session.detach()
quantise(model, input_scales=...)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from sparsam import formats
from sparsam.compress.calibration import Observer
from sparsam.compress.quantise import linear_layers, reason_to_stay
from sparsam.kernels.formats import FP32, ProductFormat, Products
from sparsam.precision.layers import format_layers, plain, restore_layers
from sparsam.select import select
from sparsam.session import Part, Session

__all__ = ["QuantisationAware", "fake_quantise"]

# sums of blocks are kept in float32, as those of int8 kernels are exact: so the gradients' format is a wide one
_BY_ROW = ProductFormat("int8", formats.INT8_ROWS, formats.FP32)
_CALIBRATED = ProductFormat("int8", formats.FP32, formats.FP32, weight=formats.INT8_ROWS)


class QuantisationAware(Part):
    """Linear layers, dense and sparse, compute with int8 weights and inputs; trained are the weights behind them.

    The forward product is that of `quantise`, rounding included. Gradients are those of the unrounded weight and input
    (straight through), in float32; where a calibrated input saturates, its gradient is zero. Topologies are left to who
    moves them: a weight of zero is a code of zero, and nothing is written to weights here. Layers that `quantise`
    leaves alone are left alone.

    Args:
        static_inputs: False: each row of an input has its own scale, and there is nothing to calibrate. True: each
            layer's input has one, which covers what was seen in training mode so far.
        percentile: of magnitudes that a static scale covers, in (0, 100].
        freeze_after: applied steps after which static scales move no more; None: `freeze` is called by hand.
        include: globs over the names of linear layers.
        exclude: globs that leave layers out again.

    Source: Jacob et al. 2018, arXiv:1712.05877; Bengio et al. 2013, arXiv:1308.3432 (straight-through gradients).
        Differs: symmetric, a scale for each output row and each token, observers of all that was seen and no moving
        average.
    """

    def __init__(
        self,
        *,
        static_inputs: bool = False,
        percentile: float = 100.0,
        freeze_after: int | None = None,
        include: Sequence[str] = ("*",),
        exclude: Sequence[str] = (),
    ) -> None:
        if freeze_after is not None and freeze_after < 1:
            raise ValueError(f"freeze_after: expected at least 1 step or None, got {freeze_after}.")
        if not static_inputs and (percentile != 100.0 or freeze_after is not None):
            raise ValueError(
                "QuantisationAware: expected percentile and freeze_after with static_inputs=True only: scales of rows "
                "are not calibrated. Leave them out, or set static_inputs=True."
            )
        Observer(percentile)  # refuses a wrong one here
        self.static_inputs, self.percentile, self.freeze_after = static_inputs, percentile, freeze_after
        self.include, self.exclude = include, exclude
        self._layers: dict[str, nn.Module] = {}
        self._observers: dict[str, Observer] = {}
        self._all: list[nn.Module] = []
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        self._products = Products(_CALIBRATED if static_inputs else _BY_ROW, FP32, FP32)

    def attach(self, session: Session) -> None:
        self.session = session
        model = plain(session.model)
        found = linear_layers(model)
        for name, layer in found.items():
            if getattr(layer, "formats", None) is not None:
                raise ValueError(
                    f"QuantisationAware: {name}: expected a layer without formats, got one whose formats another part "
                    "sets. Leave out the precision policy; Precision('bf16') is fine."
                )
        chosen = [name for name in select(found, self.include, self.exclude) if not reason_to_stay(model, found[name])]
        formatted = format_layers(model)
        self._all = list(formatted.values())
        self._layers = {name: formatted[name] for name in chosen if name in formatted}
        if not self._layers:
            restore_layers(self._all)
            raise ValueError("QuantisationAware: expected a model with linear layers to quantise, got none.")
        for name, layer in self._layers.items():
            layer.formats = self._products  # type: ignore[assignment]
            if self.static_inputs:
                observer = Observer(self.percentile, next(layer.parameters()).device)
                self._observers[name] = observer
                self._handles.append(layer.register_forward_pre_hook(_quantises_input(observer)))

    def after_loss(self, loss: Tensor) -> None:
        for name, layer in self._layers.items():
            if getattr(layer, "formats", None) is not self._products:
                raise ValueError(
                    f"QuantisationAware: {name}: expected its int8 formats, got others, which another part has set. "
                    "Leave out the precision policy; Precision('bf16') is fine."
                )

    def after_step(self, applied: bool) -> None:
        if self.freeze_after is not None and self.session.applied_steps >= self.freeze_after:
            self.freeze()

    def freeze(self) -> None:
        """Static scales move no more; on several ranks all call it, and have the same from here on."""
        for observer in self._observers.values():
            observer.freeze(self.session.group)

    def input_scales(self) -> dict[str, float]:
        """Layer -> static scale, for `quantise(input_scales=)`. Freezes first. Empty without static inputs."""
        self.freeze()
        return {name: float(observer.scale) for name, observer in self._observers.items()}

    def state_dict(self) -> dict[str, Any]:
        return {"observers": {name: observer.state_dict() for name, observer in self._observers.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if odd := sorted(state["observers"].keys() ^ self._observers.keys()):
            raise ValueError(
                f"QuantisationAware: expected the state of the same layers, got one that differs in {odd[0]}. "
                "Resume with the model and the options that were saved."
            )
        for name, observer in self._observers.items():
            observer.load_state_dict(state["observers"][name])

    def detach(self) -> None:
        """Layers compute as before; scales can still be read."""
        for handle in self._handles:
            handle.remove()
        restore_layers(self._all)
        self._layers, self._all, self._handles = {}, [], []


def fake_quantise(x: Tensor, scale: Tensor) -> Tensor:
    """Numbers that int8 codes of this scale can be, of x's type; the gradient passes where nothing saturates."""
    inside = x.float().clamp(-127 * scale, 127 * scale)
    rounded = (inside.detach() / scale).round() * scale
    return (inside + (rounded - inside.detach())).to(x.dtype)


def _quantises_input(observer: Observer) -> Callable[[nn.Module, tuple[Any, ...]], tuple[Any, ...]]:
    def hook(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        if module.training:
            observer.observe(args[0])
        return fake_quantise(args[0], observer.scale), *args[1:]

    return hook
