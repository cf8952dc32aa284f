"""A small model, data and loop that every method and every optimiser is put through."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import sparsam as sp
from sparsam.sparse.weights import sparse_weights

# odd sides: the blocks at the edges are padded
SIDES = (13, 22, 9)
STORAGES = {
    "compact": (sp.Block(4, 4), "compact"),
    "masked blocks": (sp.Block(4, 4), "masked"),
    "masked weights": (sp.Unstructured(), "masked"),
    "n:m": (sp.NM(2, 4), "masked"),
    "neurons": (sp.Neuron(), "masked"),
}


class Job:
    """Model, optimiser and session over a stream of batches that depends on the step alone."""

    def __init__(
        self,
        method,
        storage,
        *,
        optimizer=None,
        density=0.3,
        accumulate=1,
        parts=(),
        weights_seed=3,
        wrap=None,
        **options,
    ):
        torch.manual_seed(weights_seed)
        self.model = nn.Sequential(nn.Linear(*SIDES[:2]), nn.Tanh(), nn.Linear(*SIDES[1:]))
        pattern, kind = STORAGES[storage]
        self.table = sp.sparsify(self.model, pattern, density, storage=kind)
        make = optimizer or (lambda parameters: torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1))
        self.optimizer = make(self.model.parameters())
        self.called = self.model if wrap is None else wrap(self.model)
        self.session = sp.Session(
            self.called, self.optimizer, [sp.SparseTraining(method), *parts], accumulate=accumulate, **options
        )
        self.batches = 0

    def run(self, steps):
        for _ in range(steps):
            for _ in range(self.session.accumulate):
                generator = torch.Generator().manual_seed(self.batches)
                self.batches += 1
                x = torch.randn(12, SIDES[0], generator=generator)
                y = torch.randn(12, SIDES[2], generator=generator)
                with self.session.forward():
                    loss = (self.called(x) - y).square().mean()
                self.session.backward(loss)
            assert self.session.step()
        return self

    @property
    def weights(self):
        return sparse_weights(self.model)

    def topologies(self):
        return {name: weight.topology.clone() for name, weight in self.weights.items()}

    def dense(self):
        """All weights as the ordinary model would have them."""
        return {name: module.weight.detach().clone() for name, module in self.model.named_children() if name != "1"}

    def state(self):
        return {
            "model": {name: tensor.clone() for name, tensor in self.model.state_dict().items()},
            "optimizer": self.optimizer.state_dict(),
            "session": self.session.state_dict(),
            "batches": self.batches,
        }

    def load(self, state):
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.session.load_state_dict(state["session"])
        self.batches = state["batches"]
        return self

    def density(self):
        """Active share of all units, each counted with its weights."""
        sizes = [math.prod(weight.shape) for weight in self.weights.values()]
        shares = [weight.topology.float().mean().item() for weight in self.weights.values()]
        return sum(size * share for size, share in zip(sizes, shares, strict=True)) / sum(sizes)

    def check_pattern(self, counts=True):
        """Not one weight outside the active units; of these exactly as many as `sparsify` made, unless `counts` says
        that the method changes their number."""
        rows = {row.name: row for row in self.table.rows}
        for name, weight in self.weights.items():
            assert not counts or int(weight.topology.sum()) == rows[name].active_units
            if isinstance(weight.pattern, sp.NM) and not weight.topology.all():
                groups = torch.nn.functional.pad(weight.topology, (0, -weight.topology.shape[1] % 4)).view(-1, 4)
                assert groups.sum(1).max() <= 2
            active = weight.pattern.expand(weight.topology, weight.dense_shape)
            dense = weight.module.weight.detach()
            assert dense.shape == weight.dense_shape
            assert not dense[~active].any()
            assert torch.isfinite(dense).all()


@pytest.fixture
def job():
    return Job
