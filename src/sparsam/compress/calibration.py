"""Scales of int8 inputs, one for each layer, from data: the largest magnitude that was seen, or a percentile of it."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from sparsam.compress.quantise import linear_layers, reason_to_stay
from sparsam.formats import INT8_TENSOR
from sparsam.select import select

__all__ = ["Observer", "calibrate"]

# a histogram of magnitudes in steps of 1.1 %, from 2^-32 to 2^32: it adds up over batches and ranks in any order
_PER_OCTAVE, _LOWEST, _BINS = 64, -32, 64 * 64


class Observer:
    """What magnitudes a tensor had, until it is frozen.

    Args:
        percentile: of magnitudes that a scale covers, in (0, 100]; what lies above saturates. 100 is the largest.
        device: of what is observed.

    Attributes:
        frozen: whether it has stopped looking.
        amax: float32 (), the largest finite magnitude.
        counts: int64 (bins), of a histogram of log2 magnitudes; stays zero at percentile 100.
    """

    def __init__(self, percentile: float = 100.0, device: torch.device | None = None) -> None:
        if not 0 < percentile <= 100:
            raise ValueError(f"percentile: expected a number in (0, 100], got {percentile}. Write 99.9 for 99.9 %.")
        self.percentile, self.frozen = percentile, False
        self.amax = torch.zeros((), device=device)
        self.counts = torch.zeros(_BINS, dtype=torch.int64, device=device)

    @torch.no_grad()
    def observe(self, x: Tensor) -> None:
        """Looks at a tensor of any shape; a frozen observer does not. Values that are not finite are left out."""
        if self.frozen or not x.numel():
            return
        magnitudes = x.detach().float().abs().flatten()
        magnitudes = magnitudes.where(magnitudes.isfinite(), 0.0)
        self.amax = torch.maximum(self.amax, magnitudes.amax())
        if self.percentile < 100:
            bins = ((magnitudes.log2() - _LOWEST) * _PER_OCTAVE).floor().clamp(0, _BINS - 1).long()
            self.counts += torch.bincount(bins, minlength=_BINS)

    def freeze(self, group: dist.ProcessGroup | None = None) -> None:
        """Looks no more. All ranks call it, and have the same scale from here on."""
        if not self.frozen and dist.is_available() and dist.is_initialized():
            dist.all_reduce(self.amax, dist.ReduceOp.MAX, group)
            dist.all_reduce(self.counts, dist.ReduceOp.SUM, group)
        self.frozen = True

    @property
    def scale(self) -> Tensor:
        """float32 (), of int8 codes: never zero, 1 where nothing but zeros was seen."""
        amax = self.amax
        if self.percentile < 100 and bool(self.counts.any()):
            below = self.counts.cumsum(0)
            first = int((below < math.ceil(self.percentile / 100 * int(below[-1]))).sum())
            amax = amax.clamp(max=2.0 ** ((first + 1) / _PER_OCTAVE + _LOWEST))
        scale = INT8_TENSOR.scale_of(amax)
        assert scale is not None
        return scale

    def state_dict(self) -> dict[str, Any]:
        return {"frozen": self.frozen, "amax": self.amax, "counts": self.counts}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.frozen = bool(state["frozen"])
        self.amax, self.counts = (state[name].clone().to(self.amax.device) for name in ("amax", "counts"))


def calibrate(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    percentile: float = 100.0,
    forward: Callable[[Any], object] | None = None,
    include: Sequence[str] = ("*",),
    exclude: Sequence[str] = (),
) -> dict[str, float]:
    """Runs a model on data and returns the scales of its linear layers' inputs, for `quantise(input_scales=)`.

    The model is in eval mode meanwhile, without gradients, and comes back as it was. On several ranks all call it, each
    with its own data, and get the same scales.

    Args:
        model: trained, not quantised.
        batches: some hundred samples are enough.
        percentile: of magnitudes that a scale covers, in (0, 100]; 100 covers the largest that was seen.
        forward: how a batch goes through the model; None: `model(batch)`.
        include: globs over the names of linear layers.
        exclude: globs that leave layers out again.

    Returns:
        Layer -> scale. Layers that `quantise` leaves alone, and those that no batch went through, are not in it.

    Raises:
        ValueError: no batch came, or no linear layer was called.
    """
    layers = linear_layers(model)
    chosen = [name for name in select(layers, include, exclude) if not reason_to_stay(model, layers[name])]
    observers = {name: Observer(percentile, next(layers[name].parameters()).device) for name in chosen}
    training = {module: module.training for module in model.modules()}
    called: set[str] = set()
    count = 0
    with contextlib.ExitStack() as stack:
        for name, observer in observers.items():
            stack.callback(layers[name].register_forward_pre_hook(_looks(name, observer, called)).remove)
        try:
            model.eval()
            with torch.no_grad():
                for batch in batches:
                    (forward or model)(batch)
                    count += 1
        finally:
            for module, mode in training.items():
                module.training = mode
    for observer in observers.values():
        observer.freeze()
    scales = {name: float(one.scale) for name, one in observers.items() if name in called}
    if not scales:
        raise ValueError(
            f"calibrate: expected batches that go through linear layers, got {count} that went through none. "
            "Give a list of batches, and forward= where a batch is not the model's only argument."
        )
    return scales


def _looks(name: str, observer: Observer, called: set[str]) -> Callable[[nn.Module, tuple[Any, ...]], None]:
    def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
        called.add(name)
        observer.observe(args[0])

    return hook
