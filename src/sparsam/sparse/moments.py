"""Carries an optimiser's state per weight through a rewire or a change of storage. It knows no optimiser's maths."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import nn

from sparsam.shards import whole, write

__all__ = ["RetainedMoments", "check_optimizer", "moments", "reset_moments", "swap_parameter"]

# Their update of one weight reads its neighbours in the matrix, which compact storage and zeros both break.
_NOT_ELEMENTWISE = ("adafactor", "came", "galore", "lbfgs", "muon", "soap", "shampoo", "8bit", "4bit")
# What sets the length of a step. Zero would make the first steps after a rewire several times too long (Adam, RMSprop,
# Adagrad, Adamax) or next to nothing (Adadelta, Rprop).
_SIZES = ("exp_avg_sq", "max_exp_avg_sq", "square_avg", "acc_delta", "sum", "exp_inf", "step_size")


def check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Refuses optimisers that do not update every weight by itself.

    Raises:
        ValueError: names the optimiser.
    """
    name = type(optimizer).__name__
    if any(part in name.lower() for part in _NOT_ELEMENTWISE):
        raise ValueError(
            f"{name}: expected an element-wise optimiser (SGD, the Adam family, Lion, RMSprop, Adagrad), got one whose "
            "update reads the shape of the matrix. Use AdamW, or train dense."
        )


def moments(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> dict[str, torch.Tensor]:
    """What the optimiser keeps per weight of a parameter, by name: tensors of the parameter's shape.

    Raises:
        ValueError: it keeps a tensor of another shape, whose meaning per weight is unknown.
    """
    found = {}
    for key, value in optimizer.state.get(parameter, {}).items():
        if not isinstance(value, torch.Tensor) or value.dim() == 0:
            continue
        if value.shape != parameter.shape:
            raise ValueError(
                f"{type(optimizer).__name__}: expected state {key!r} of shape {tuple(parameter.shape)}, got "
                f"{tuple(value.shape)}. Sparse layers need an element-wise optimiser such as AdamW or SGD."
            )
        found[key] = value
    return found


def reset_moments(
    optimizer: torch.optim.Optimizer, parameter: nn.Parameter, new: torch.Tensor, active: torch.Tensor | None = None
) -> None:
    """Begins the state of some entries anew: zero, or for second moments the mean over the layer's other entries.

    With zero moments and a large step count, Adam's first step would be about 3 lr at beta2 = 0.999.

    Args:
        optimizer: any element-wise one.
        parameter: the stored weights.
        new: bool, broadcastable to the parameter, True = begin anew.
        active: bool, broadcastable to the parameter, True = entry of an active unit; None = all of them.
    """
    new = new.expand(parameter.shape)
    active = torch.ones_like(new) if active is None else active.expand(parameter.shape)
    for key, kept in moments(optimizer, parameter).items():
        value = whole(kept)  # under FSDP2 one moment of one layer at a time
        value.masked_fill_(new, 0.0)
        if key in _SIZES:
            # entries that never had a gradient are zero and say nothing about its size; what inactive ones had fades
            old = value[active & (value > 0)]
            value.masked_fill_(new & active, float(old.mean()) if old.numel() else 0.0)
        write(kept, value)


def swap_parameter(
    optimizer: torch.optim.Optimizer,
    old: nn.Parameter,
    new: nn.Parameter,
    convert: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    """Puts a parameter in another's place: same group, state converted entry by entry.

    Args:
        optimizer: one that holds `old`.
        old: the parameter that goes.
        new: the parameter that comes.
        convert: a tensor of old's shape -> one of new's shape.
    """
    for group in optimizer.param_groups:
        group["params"] = [new if parameter is old else parameter for parameter in group["params"]]
    if old in optimizer.state:
        state = optimizer.state.pop(old)
        per_weight = {
            key for key, value in state.items() if isinstance(value, torch.Tensor) and value.shape == old.shape
        }
        optimizer.state[new] = {
            key: convert(value).contiguous() if key in per_weight else value for key, value in state.items()
        }


class RetainedMoments:
    """What an optimiser knew of units that went, by layer and moment, to be given back when they return.

    Kept in tensors of the parameter's shape: as many bytes as the moments themselves.
    """

    def __init__(self) -> None:
        self._kept: dict[str, dict[str, torch.Tensor]] = {}

    def put_aside(self, layer: str, moments: Mapping[str, torch.Tensor], dropped: torch.Tensor) -> None:
        """Keeps the moments of dropped entries (bool of their shape)."""
        kept = self._kept.setdefault(layer, {})
        for key, value in moments.items():
            # NaN: this entry was never dropped
            known = kept[key].to(value.device) if key in kept else torch.full_like(value, torch.nan)
            kept[key] = torch.where(dropped, value, known)

    def give_back(self, layer: str, moments: Mapping[str, torch.Tensor], grown: torch.Tensor) -> None:
        """Writes what was kept of grown entries (bool of their shape) into the moments."""
        for key, value in moments.items():
            kept = self._kept.get(layer, {}).get(key)
            if kept is not None:
                kept = kept.to(value.device)  # what was loaded lies on the CPU
                value.copy_(torch.where(grown & ~kept.isnan(), kept, value))

    def state_dict(self) -> dict[str, dict[str, torch.Tensor]]:
        return {layer: {key: value.clone() for key, value in kept.items()} for layer, kept in self._kept.items()}

    def load_state_dict(self, state: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        self._kept = {layer: {key: value.clone() for key, value in kept.items()} for layer, kept in state.items()}
