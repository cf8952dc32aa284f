"""Error feedback: what compression left out of a gradient is kept here and added to the next one.

    residuals.add(name, gradient)                       # compensate
    sent = codec.decode(codec.encode(gradient), n)      # compress
    residuals.keep(name, gradient, sent)                # residual = gradient - sent
    residuals.settle(applied)                           # after the step; skipped: as if nothing had been sent

Keyed by the names of parameters, not by buckets: DDP rebuilds its buckets after the first step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from sparsam.session import Rewire

__all__ = ["Residuals", "old_ranks"]


class Residuals:
    """The residuals of one worker.

    Over any number of steps, what was sent and the residual add up to all gradients: nothing is lost, only late.
    Gradients are averaged over P workers, so what counts is the sum over workers of residual / P. An error made once
    for all workers (when the owner of a shard writes the mean anew) is in the same units when P times the error is
    added to the owner's residual.

    Source: Karimireddy et al. 2019, arXiv:1901.09847 (error feedback); Stich et al. 2018, arXiv:1809.07599 (the same as
        memory); Tang et al. 2019, arXiv:1905.05957 (two-step reduction, errors of workers and of servers). Differs:
        there the residual is one of steps, here one of gradients, before the learning rate; with moments in between
        only this leaves the optimiser alone.
    """

    def __init__(self) -> None:
        self._kept: dict[str, Tensor] = {}
        self._before: dict[str, Tensor | None] = {}  # what `keep` replaced since the last `settle`

    def add(self, name: str, gradient: Tensor) -> None:
        """gradient += residual, in place; nothing where there is none.

        Args:
            name: of the parameter.
            gradient: of the parameter's shape. In less than float32 the sum is rounded, and that is lost.

        Raises:
            ValueError: the residual has another shape.
        """
        kept = self._kept.get(name)
        if kept is None:
            return
        if kept.shape != gradient.shape:
            raise ValueError(
                f"{name}: expected a gradient of {tuple(kept.shape)} as its residual has, got {tuple(gradient.shape)}. "
                "Give gradients the shape of their parameter, and start new residuals when that changes."
            )
        kept = self._kept[name] = kept.to(gradient.device)
        gradient.add_(kept)

    def keep(self, name: str, wanted: Tensor, sent: Tensor) -> None:
        """residual = wanted - sent, in float32. Where that is not finite the residual stays what it was.

        That another rank's value was not finite is not seen here: `settle(False)` then takes everything back.

        Args:
            name: of the parameter.
            wanted: gradient with the old residual, of the parameter's shape.
            sent: what the others were told of it, of the same shape.
        """
        assert wanted.shape == sent.shape, (name, wanted.shape, sent.shape)
        left = wanted.detach().float() - sent.detach().float()
        # one pass: where one value is not finite, an extreme is not; isfinite of all takes five
        if not left.numel() or bool(torch.stack(left.aminmax()).isfinite().all()):
            self._before.setdefault(name, self._kept.get(name))
            self._kept[name] = left

    def settle(self, applied: bool) -> None:
        """Ends a step. Until it is called the residuals of before are held too, as many bytes again.

        Args:
            applied: False takes back every `keep` since the last call: the step was skipped on all ranks, with an inf
                on one of them, and so nothing of it was received.
        """
        if not applied:
            for name, old in self._before.items():
                if old is None:
                    del self._kept[name]
                else:
                    self._kept[name] = old
        self._before.clear()

    def rewired(self, event: Rewire, name: str | None = None) -> None:
        """Forgets what was left out at units that went, and at units that came: these start at zero.

        Args:
            event: of the session.
            name: of the parameter, where it is not the one that a plain model gives it (tied or wrapped weights).
        """
        self.clear(name or _parameter_name(event), event.new_entries)

    def clear(self, name: str, entries: Tensor) -> None:
        """Sets a residual to zero at `entries`: bool, broadcastable to the parameter."""
        for kept in (self._kept.get(name), self._before.get(name)):
            if kept is not None:
                kept.masked_fill_(entries.to(kept.device), 0.0)

    def scale(self, factor: float) -> None:
        """Multiplies all residuals: by P now / P before, where a worker goes on among another number of workers."""
        for kept in self._kept.values():
            kept.mul_(factor)

    @property
    def nbytes(self) -> int:
        return sum(kept.nbytes for kept in self._kept.values())

    def norm(self) -> float:
        """L2 norm of all residuals together."""
        return math.hypot(*(float(torch.linalg.vector_norm(kept)) for kept in self._kept.values()))

    def state_dict(self) -> dict[str, Any]:
        """This rank's residuals. Every rank's own belong into a checkpoint."""
        return {"version": 1, "residuals": {name: kept.clone() for name, kept in self._kept.items()}}

    def load_state_dict(
        self, state: Mapping[str, Any] | Sequence[Mapping[str, Any]], ranks_then: int = 1, ranks_now: int = 1
    ) -> None:
        """Takes back what `state_dict` gave, on as many ranks as then or on another number.

        What is conserved is the sum over ranks of residual / P. So each rank takes the states of the old ranks that
        fall to it (`old_ranks`), adds them up and multiplies by ranks_now / ranks_then. Each old state is read once;
        of as many ranks as then each takes its own, unchanged; of more ranks the last ones start without residuals.

        Args:
            state: of this rank, or those of the old ranks `old_ranks(rank, ranks_then, ranks_now)`.
            ranks_then: size of the process group that saved.
            ranks_now: size of the process group that loads.

        Raises:
            ValueError: another version; or too many or too few states for these numbers of ranks.
        """
        states = [state] if isinstance(state, Mapping) else list(state)
        for one in states:
            if one["version"] != 1:
                raise ValueError(
                    f"residuals: expected version 1, got {one['version']}. Use the sparsam that wrote them."
                )
        fewest, most = ranks_then // ranks_now, -(-ranks_then // ranks_now)
        if not fewest <= len(states) <= most:
            few = f"{fewest}" if fewest == most else f"{fewest} or {most}"
            raise ValueError(
                f"residuals: expected {few} of the states of {ranks_then} ranks for each of {ranks_now}, "
                f"got {len(states)}. Give those that old_ranks lists."
            )
        self._before.clear()
        self._kept = {}
        for one in states:
            for name, residual in one["residuals"].items():
                share = residual.float() * (ranks_now / ranks_then)
                self._kept[name] = self._kept[name] + share if name in self._kept else share


def old_ranks(rank: int, ranks_then: int, ranks_now: int) -> range:
    """Ranks of an earlier process group whose residuals fall to this rank: one or more, or none."""
    return range(rank, ranks_then, ranks_now)


def _parameter_name(event: Rewire) -> str:
    """Name in the plain model. A layer is called after its module, and where that has several sparse weights (of a
    recurrent layer, of attention) after the parameter."""
    for inner, parameter in event.module.named_parameters(recurse=False):
        if parameter is event.parameter:
            return f"{event.layer}.{inner}".lstrip(".") if inner in ("weight", "values") else event.layer
    raise ValueError(
        f"{event.layer}: expected the rewired parameter in its module, found another. Give rewired its name too."
    )
