"""The part that trains a sparse model: it asks a method for topologies and applies them."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn

from sparsam.session import Part, Rewire, Session
from sparsam.sparse.methods import Method
from sparsam.sparse.moments import check_optimizer, moments, reset_moments
from sparsam.sparse.views import LayerView
from sparsam.sparse.weights import SparseWeight, sparse_weights

__all__ = ["SparseTraining", "topology_hash"]


class SparseTraining(Part):
    """Keeps zeros zero, and rewires the layers as a method decides.

    Args:
        method: what decides topologies.
        growth: how gradients of units that do not exist are gathered on update steps.
            "auto": the exact one of the two below that costs least.
            "dense": one dense gradient per layer, summed over the window and averaged over ranks with its sign.
            "sum_of_norms": mean |gradient| of each backward, added up. Needs no dense memory; with several
            micro-batches or ranks it is another score than RigL's, under this name.
            A layer that one forward pass calls several times needs "dense" too; "auto" knows those with several names.

    Layers whose weights are frozen keep them and their topology. In a loop that never enters `session.forward()`,
    "auto" is "dense", because nobody says how many backwards there will be.
    """

    def __init__(self, method: Method, growth: Literal["auto", "dense", "sum_of_norms"] = "auto") -> None:
        if growth not in ("auto", "dense", "sum_of_norms"):
            raise ValueError(f"growth: expected auto, dense or sum_of_norms, got {growth!r}.")
        self.method, self.growth = method, growth
        self.updates = 0
        self.moved_share = 0.0
        self._weights: dict[str, SparseWeight] = {}
        self._held: dict[str, nn.Parameter] = {}
        self._foreign_loop = True
        self._growth: dict[str, torch.Tensor | None] = {}

    def attach(self, session: Session) -> None:
        self.session = session
        weights = sparse_weights(session.model)
        if not weights:
            raise ValueError(
                "SparseTraining: expected a model with sparse layers, got none. Call sparsify(model, ...) first."
            )
        check_optimizer(session.optimizer)
        held = [parameter for group in session.optimizer.param_groups for parameter in group["params"]]
        for weight in weights.values():
            times = sum(parameter is weight.parameter for parameter in held)
            if weight.parameter.requires_grad and times != 1:
                raise ValueError(
                    f"{weight.name}: expected its {weight.parameter_name} in the optimiser once, found {times} times. "
                    "Build the optimiser after sparsify, or give sparsify the optimiser."
                )
        self._weights = weights
        self._held = {name: weight.parameter for name, weight in weights.items()}
        for weight in weights.values():
            if _ranks() > 1:
                # weights came from rank 0 when the model was wrapped, and so must their addresses
                for buffer in weight.buffers:
                    _broadcast(buffer)
                weight.buffers_changed()
            weight.hold(True)
            weight.keep_zeros()
        self._open_ahead()

    @contextlib.contextmanager
    def forward(self) -> Iterator[None]:
        self._foreign_loop = False
        if self._collects:
            several = _ranks() > 1 or self.session.accumulate > 1
            for weight in self._trained():
                exact = several or weight.shared
                weight.open_probe(dense=self.growth == "dense" or (self.growth == "auto" and exact))
        yield

    def before_step(self) -> None:
        for name, weight in self._weights.items():
            if not weight.holds(self._held[name]):
                raise ValueError(
                    f"{name}: its parameter or topology was replaced while a session trains it. "
                    "Call session.detach() before changing the model, and build a new session after."
                )
        if self._collects:
            for weight in self._trained():
                # before the zeros are put back: the gradient of inactive units is what growth is about
                self._growth[weight.name] = _growth_scores(weight, weight.close_probe(), self.session.divisor)
        for weight in self._weights.values():
            weight.keep_gradient_zeros()

    @torch.no_grad()
    def after_step(self, applied: bool) -> None:
        for weight in self._weights.values():
            weight.keep_zeros()
        if applied and self.method.due(self.session.applied_steps):
            self._update(self.session.applied_steps)
        self._growth.clear()
        if self._foreign_loop:
            self._open_ahead()

    def after_rewire(self, event: Rewire) -> None:
        if event.layer in self._weights:
            active = self._weights[event.layer].active
            reset_moments(self.session.optimizer, event.parameter, event.new_entries, active)

    def metrics(self) -> dict[str, float]:
        units = {name: weight.topology for name, weight in self._weights.items()}
        active = sum(int(topology.sum()) for topology in units.values())
        total = sum(topology.numel() for topology in units.values())
        return {
            "sparsity": 1 - active / total,
            "topology_updates": float(self.updates),
            "moved_share": self.moved_share,
        }

    def state_dict(self) -> dict[str, Any]:
        # topologies are buffers of the model, random numbers are stateless: only counters are left
        return {"updates": self.updates, "moved_share": self.moved_share, "topology": topology_hash(self._weights)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        found = topology_hash(self._weights)
        if state["topology"] != found:
            raise ValueError(
                f"SparseTraining: expected a model with topology {state['topology']}, got {found}. "
                "Load the model's state before the session's."
            )
        self.updates, self.moved_share = int(state["updates"]), float(state["moved_share"])
        self._open_ahead()

    def detach(self) -> None:
        for weight in self._weights.values():
            weight.close_probe()
            weight.hold(False)
        self._weights, self._held = {}, {}
        self._growth.clear()

    def _trained(self) -> list[SparseWeight]:
        return [weight for weight in self._weights.values() if weight.parameter.requires_grad]

    def _open_ahead(self) -> None:
        """For a loop that never enters `forward`: probes for an update step that comes next."""
        if self._collects:
            for weight in self._trained():
                weight.open_probe(dense=self.growth != "sum_of_norms")

    @property
    def _collects(self) -> bool:
        return self.method.needs_gradient and self.method.due(self.session.applied_steps + 1)

    def _update(self, step: int) -> None:
        views = {weight.name: self._view(weight, step) for weight in self._trained()}
        moved = active = 0
        for name, topology in self.method.update(views, step).items():
            event = self._weights[name].apply(topology)
            active += int(topology.sum())
            if event is not None:
                moved += int(event.grown.sum())
                self.session.rewired(event)
        self.updates += 1
        self.moved_share = moved / max(active, 1)
        if _ranks() > 1:
            _compare_ranks(self._weights, step)

    def _view(self, weight: SparseWeight, step: int) -> LayerView:
        gradient = weight.parameter.grad
        return LayerView(
            name=weight.name,
            pattern=weight.pattern,
            topology=weight.topology.clone(),
            weight=weight.parameter.detach(),
            gradient=None if gradient is None else gradient.detach(),
            moments=moments(self.session.optimizer, weight.parameter),
            reduce=weight.reduce,
            seed=self.session.seed,
            step=step,
            growth=self._growth.get(weight.name),
        )


def _growth_scores(weight: SparseWeight, collected: torch.Tensor | None, divisor: float) -> torch.Tensor | None:
    """float32 grid of mean |dense gradient| from what a probe collected over a window."""
    if collected is None:
        return None
    if weight.probe_is_local:
        if _ranks() > 1:
            # signed first, absolute after
            dist.all_reduce(collected)
        collected = collected / (divisor * _ranks())
    if tuple(collected.shape) != weight.dense_shape:
        return collected
    return weight.pattern.reduce(collected.abs())


def topology_hash(weights: Mapping[str, SparseWeight]) -> str:
    """Short hash over the names and topologies of all layers."""
    digest = hashlib.sha256()
    for name, weight in weights.items():
        digest.update(name.encode() + b"\0" + weight.topology.cpu().numpy().tobytes())
    return digest.hexdigest()[:15]


def _ranks() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def _broadcast(buffer: torch.Tensor) -> None:
    """Overwrites a topology with rank 0's."""
    sent = buffer.to(torch.int32) if buffer.dtype == torch.bool else buffer.clone()
    dist.broadcast(sent, src=0)
    buffer.copy_(sent)


def _compare_ranks(weights: Mapping[str, SparseWeight], step: int) -> None:
    """Stops all ranks when any layer's topology differs between them, naming the layer and the ranks."""
    own = [int(topology_hash({name: weight}), 16) for name, weight in weights.items()]
    device = next(iter(weights.values())).parameter.device
    hashes = torch.tensor(own, dtype=torch.int64, device=device)
    gathered = [torch.empty_like(hashes) for _ in range(_ranks())]
    dist.all_gather(gathered, hashes)
    for position, name in enumerate(weights):
        column = [int(one[position]) for one in gathered]
        differing = [rank for rank, value in enumerate(column) if value != column[0]]
        if differing:
            raise RuntimeError(
                f"{name}: expected the same topology on every rank after step {step}, but ranks {differing} differ "
                "from rank 0. Give all ranks the same seed, weights and optimiser state, then resume from a checkpoint."
            )
