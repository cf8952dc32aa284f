"""An exponential moving average of a sparse model's weights that knows where they went."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch

from sparsam.session import Part, Rewire, Session
from sparsam.shards import refuse_sharded
from sparsam.sparse.layers import SparseLinear
from sparsam.sparse.masked import masked_weights

__all__ = ["MovingAverage"]


class MovingAverage(Part):
    """Keeps a copy of the model whose weights follow the trained ones: average becomes
    decay * average + (1 - decay) * weight.

    A copy that only averages tensors (torch's AveragedModel) goes wrong in both storages: a compact slot holds another
    block after a rewire, and a masked weight that was dropped fades instead of being zero. Here a rewire moves the
    average's topology too, dropped units are exactly zero at once, and grown ones begin at the model's value.

    Args:
        decay: share of the average that a step keeps, in [0, 1).

    Attributes:
        model: the average, in eval mode and without gradients; evaluate it, or densify a copy of it.
    """

    def __init__(self, decay: float = 0.999) -> None:
        if not 0.0 <= decay < 1.0:
            raise ValueError(f"MovingAverage: expected a decay in [0, 1), got {decay}.")
        self.decay = decay

    def attach(self, session: Session) -> None:
        refuse_sharded(session.model, "MovingAverage", "It copies the model: use DistributedDataParallel for it.")
        self.session = session
        self.model = copy.deepcopy(session.model).eval().requires_grad_(False)
        self._widen({})

    @torch.no_grad()
    def after_step(self, applied: bool) -> None:
        if not applied:
            return
        trained = dict(self.session.model.named_parameters())
        for name, average in self.model.named_parameters():
            wide = self._wide[name]
            average.copy_(wide.lerp_(trained[name].to(wide.dtype), 1 - self.decay))
        self._copy_buffers()
        # a part that acts later may still have weights to set to zero
        for module in self.model.modules():
            for masked in masked_weights(module):
                masked.apply(masked.parameter)

    @torch.no_grad()
    def after_rewire(self, event: Rewire) -> None:
        names = [name for name, parameter in self.session.model.named_parameters() if parameter is event.parameter]
        for name in names:
            wide = self._wide[name]
            wide.copy_(torch.where(event.new_entries, event.parameter, wide))
            self.model.get_parameter(name).copy_(wide)
        self._copy_buffers()

    def state_dict(self) -> dict[str, Any]:
        narrow = {name for name, average in self.model.named_parameters() if average.dtype != self._wide[name].dtype}
        wide = {name: self._wide[name].clone() for name in narrow}
        return {"decay": self.decay, "model": copy.deepcopy(self.model.state_dict()), "wide": wide}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.decay = float(state["decay"])
        self.model.load_state_dict(state["model"])
        self._widen(state.get("wide", {}))

    def _widen(self, known: Mapping[str, torch.Tensor]) -> None:
        """Half precision would round small steps away: its average is kept wide beside it, 4 more bytes a weight."""
        self._wide = {}
        for name, average in self.model.named_parameters():
            # to() gives what is wide enough back as it is
            self._wide[name] = average.to(torch.promote_types(average.dtype, torch.float32))
            if name in known:
                self._wide[name].copy_(known[name])

    def _copy_buffers(self) -> None:
        """Topologies, addresses and running statistics are the model's own."""
        current = dict(self.session.model.named_buffers())
        for name, buffer in self.model.named_buffers():
            buffer.copy_(current[name])
        for module in self.model.modules():
            if isinstance(module, SparseLinear):
                module.unfreeze()
