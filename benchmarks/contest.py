"""What the accuracy benchmarks share: a sparse training that starts, becomes compact and is resumed; finished rows."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

import sparsam as sp
from sparsam import checkpoint
from sparsam.sparse.allocation import Allocation
from sparsam.sparse.weights import sparse_weights

__all__ = ["Loop", "Rows", "density_of", "sparse_start"]

Storage = Literal["compact", "masked"]
Init = Literal["fan_in", "kaiming", "own"]


def sparse_start(
    model: nn.Module,
    block: int,
    density: float,
    storage: Storage,
    *,
    init: Init,
    allocation: Allocation = sp.uniform,
    exclude: Sequence[str] = (),
    seed: int = 0,
) -> None:
    """Makes an untrained model sparse: a random topology, and weights drawn anew for it.

    The first topology keeps the largest magnitudes. Of weights that were drawn at random these are at random places,
    but larger than a draw: single ones at 99 % by a factor of 2.9 for normal draws and 1.7 for uniform ones, which
    scaling by density alone would leave in.

    Args:
        model: changed in place.
        block: side of a block; 1 is single weights.
        density: active share of the sparse layers' weights.
        storage: "compact", or "masked" for methods that start dense.
        init: the variance of the weights, which are normal. "fan_in": 2 / active inputs. "kaiming": 2 / inputs, as if
            the layer were dense. "own": what the model had / density, and at density 1 its very weights.
        allocation: how density is shared out between layers.
        exclude: names of layers that stay dense, beside the head.
        seed: draws topology and weights.
    """
    variances = {
        name: float(parameter.detach().var()) for name, parameter in model.named_parameters() if parameter.dim() > 1
    }
    sp.sparsify(
        model, sp.Block(block, block), density, storage=storage, allocation=allocation, exclude=exclude, seed=seed
    )
    if init == "own" and density == 1:
        return
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in sparse_weights(model).items():
            active = weight.active.expand_as(weight.parameter)
            share = float(active.sum()) / math.prod(weight.dense_shape)
            inputs = weight.dense_shape[1]
            variance = {
                "fan_in": 2 / (inputs * share),
                "kaiming": 2 / inputs,
                "own": variances[f"{name}.weight"] / share,
            }
            weight.parameter.normal_(0, math.sqrt(variance[init]), generator=generator).mul_(active)


def density_of(model: nn.Module) -> float:
    """Active share of the weights of all sparse layers; 1 when there are none."""
    weights = list(sparse_weights(model).values())
    active = sum(float(weight.active.expand_as(weight.parameter).sum()) for weight in weights)
    return active / sum(math.prod(weight.dense_shape) for weight in weights) if weights else 1.0


class Loop:
    """A model, its optimiser and its session, which is built anew when the weights move to compact storage.

    Args:
        model: dense or sparse.
        optimizer_of: builds the optimiser of a model.
        parts: builds the parts of a session; called again for a new one, which takes over the state of the old.
        loss_of: (model, batch) -> scalar.
        seed: of all random choices.
        clip: norm of gradients, or None.
        state: what `state_dict` gave, to go on from there; the model then has the same storage, at any density.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer_of: Callable[[nn.Module], torch.optim.Optimizer],
        parts: Callable[[], list[sp.Part]],
        loss_of: Callable[[nn.Module, Any], torch.Tensor],
        seed: int = 0,
        clip: float | None = None,
        state: dict[str, Any] | None = None,
    ) -> None:
        self.model, self.parts, self.loss_of = model, parts, loss_of
        self.seed, self.clip = seed, clip
        if state is not None:
            model.load_state_dict(state["model"])  # may change the number of slots, so before there is an optimiser
        self.optimizer = optimizer_of(model)
        if state is not None:
            checkpoint.load_optimizer(model, self.optimizer, state["optimizer"])
        self.session = self._session()
        if state is not None:
            self.session.load_state_dict(state["session"])

    @property
    def steps(self) -> int:
        """Applied steps so far."""
        return self.session.applied_steps

    @property
    def storage(self) -> Literal["dense", "masked", "compact"]:
        kinds = {isinstance(weight.module, sp.SparseLinear) for weight in sparse_weights(self.model).values()}
        return "compact" if True in kinds else "masked" if kinds else "dense"

    def step(self, batch: Any) -> torch.Tensor:
        """One training step; returns its loss, detached."""
        with self.session.forward():
            loss = self.loss_of(self.model, batch)
        self.session.backward(loss)
        self.session.step()
        return loss.detach()

    def tighten(self, below: float) -> bool:
        """Moves masked blocks to compact storage once the density is at most `below`; drops slots that have died.

        What scores gather over steps begins anew.

        Returns:
            True when something moved.
        """
        layers = [weight.module for weight in sparse_weights(self.model).values()]
        compact = [layer for layer in layers if isinstance(layer, sp.SparseLinear)]
        if compact:
            due = any(bool((layer.block_row < 0).any()) for layer in compact)
        else:
            due = bool(layers) and density_of(self.model) <= below
        if due:
            state = self.session.state_dict()
            for part in state["parts"]:
                part.pop("accumulators", None)  # one number for each weight as it was stored
            self.session.detach()
            sp.compact(self.model, self.optimizer)
            self.session = self._session()
            self.session.load_state_dict(state)
        return due

    def state_dict(self) -> dict[str, Any]:
        """Everything that a resumed training needs beside what it is built from."""
        return {
            "storage": self.storage,
            "model": dict(self.model.state_dict()),
            "optimizer": checkpoint.optimizer_state(self.model, self.optimizer),
            "session": self.session.state_dict(),
        }

    def _session(self) -> sp.Session:
        return sp.Session(self.model, self.optimizer, self.parts(), clip=self.clip, seed=self.seed)


class Rows:
    """Finished runs by key, one JSON object a line in a file when there is one."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.done: dict[str, dict[str, Any]] = {}
        if path is not None and path.exists():
            whole, newline, cut = path.read_text(encoding="utf-8").rpartition("\n")
            if cut:  # the process was stopped in the middle of a line
                path.write_text(whole + newline, encoding="utf-8")
            for line in whole.splitlines():
                row = json.loads(line)
                self.done[row["key"]] = row

    def add(self, row: dict[str, Any]) -> None:
        """Keeps a finished run; row["key"] says which."""
        self.done[row["key"]] = row
        if self.path is not None:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
