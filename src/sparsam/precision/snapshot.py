"""A copy of weights and optimiser state in memory, to go back to when a lower format turns out to have been too low."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from sparsam.precision.layers import plain
from sparsam.session import Session

__all__ = ["Snapshot"]


@dataclass(frozen=True)
class Snapshot:
    """Weights, buffers and optimiser state after a step.

    Attributes:
        step: applied steps then.
        model, optimizer: their `state_dict`s, copied.
    """

    step: int
    model: Mapping[str, Any]
    optimizer: Mapping[str, Any]

    @classmethod
    def take(cls, session: Session) -> Snapshot:
        """Copies the state of now; costs as many bytes as the model and the optimiser have."""
        return cls(
            session.applied_steps,
            copy.deepcopy(dict(plain(session.model).state_dict())),
            copy.deepcopy(session.optimizer.state_dict()),
        )

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors."""
        moments = [value for state in self.optimizer["state"].values() for value in state.values()]
        return sum(one.nbytes for one in [*self.model.values(), *moments] if isinstance(one, torch.Tensor))

    def restore(self, session: Session) -> None:
        """Puts weights, buffers and moments back. Counted steps stay counted; learning rates and all other settings of
        the optimiser's groups are those of now."""
        plain(session.model).load_state_dict(self.model)
        moments = copy.deepcopy(self.optimizer["state"])
        session.optimizer.load_state_dict({**session.optimizer.state_dict(), "state": moments})

    def state_dict(self) -> dict[str, Any]:
        """Tensors and plain values, as checkpoints take them."""
        return {"step": self.step, "model": dict(self.model), "optimizer": dict(self.optimizer)}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Snapshot:
        """What `state_dict` gave."""
        return cls(int(state["step"]), state["model"], state["optimizer"])
