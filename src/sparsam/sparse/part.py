"""The part that trains a sparse model: it asks a method for topologies and applies them."""

from __future__ import annotations

import contextlib
import hashlib
import math
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn

from sparsam.session import Part, Rewire, Session
from sparsam.sparse.methods import Method, check_method
from sparsam.sparse.moments import RetainedMoments, check_optimizer, moments, reset_moments
from sparsam.sparse.scores import Accumulator
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
        keep_moments: what the optimiser knew of a unit that goes is put aside and given back when it returns. Masked
            storage only; as many bytes again as the optimiser's moments. One published comparison saw no gain from it
            (the sparse_learning repository, 1.0).

    Layers whose weights are frozen keep them and their topology. In a loop that never enters `session.forward()`,
    "auto" is "dense", because nobody says how many backwards there will be.
    """

    def __init__(
        self,
        method: Method,
        growth: Literal["auto", "dense", "sum_of_norms"] = "auto",
        keep_moments: bool = False,
    ) -> None:
        if growth not in ("auto", "dense", "sum_of_norms"):
            raise ValueError(f"growth: expected auto, dense or sum_of_norms, got {growth!r}.")
        check_method(method)
        self.method, self.growth = method, growth
        self.updates = 0
        self.moved_share = 0.0
        self._weights: dict[str, SparseWeight] = {}
        self._held: dict[str, nn.Parameter] = {}
        self._foreign_loop = True
        self._growth: dict[str, torch.Tensor | None] = {}
        self._ever_active: dict[str, torch.Tensor] = {}
        self._gathers: dict[str, Accumulator] = {}
        self._accumulators: dict[str, dict[str, torch.Tensor]] = {}
        self._hidden: dict[str, torch.Tensor] = {}
        self._uncovered = False
        self._retained = RetainedMoments() if keep_moments else None

    def attach(self, session: Session) -> None:
        self.session = session
        parts = sum(isinstance(part, SparseTraining) for part in session.parts)
        if parts > 1:
            raise ValueError(
                f"SparseTraining: expected one SparseTraining in a session, got {parts}. "
                "Join their methods: SparseTraining(Then(first, second))."
            )
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
        self._refuse_compact(weights)
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
        self._ever_active = {name: weight.topology.clone() for name, weight in weights.items()}
        # two scores may gather the same
        self._gathers = {accumulator.name: accumulator for accumulator in self.method.accumulators}
        self._keep_for_trained()
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
        self._keep_for_trained()
        # before the zeros are put back: the gradient of inactive units is what growth is about
        if self._collects:
            for weight in self._trained():
                self._growth[weight.name] = _growth_scores(weight, weight.close_probe(), self.session.divisor)
        self._gather()
        for weight in self._weights.values():
            if weight.name in self._hidden:
                self._uncover(weight)
            else:
                weight.keep_gradient_zeros()
        self._uncovered = bool(self._hidden)

    @torch.no_grad()
    def after_step(self, applied: bool) -> None:
        if applied and self._hidden and not self._uncovered:
            raise ValueError(
                "SparseTraining: expected before_step() before the optimiser's step: this method's weights behind "
                "zeros have had none. Call session.before_step() when the gradients are there."
            )
        for name, weight in self._weights.items():
            if name in self._hidden and self._uncovered:
                self._hidden[name].copy_(weight.parameter)
            weight.keep_zeros()
        self._uncovered = False
        if applied and self.session.applied_steps == 1:
            self._drop_what_the_optimizer_keeps()
        if applied and self.method.due(self.session.applied_steps):
            self._update(self.session.applied_steps)
        self._growth.clear()
        if self._foreign_loop:
            self._open_ahead()

    def after_rewire(self, event: Rewire) -> None:
        if event.layer not in self._weights or event.layer in self._hidden:
            return  # weights behind zeros go on where they are, and so do their moments
        weight, optimizer = self._weights[event.layer], self.session.optimizer
        if self._retained is not None:
            self._retained.put_aside(event.layer, moments(optimizer, event.parameter), _entries(weight, event.dropped))
        reset_moments(optimizer, event.parameter, event.new_entries, weight.active)
        if self._retained is not None:
            self._retained.give_back(event.layer, moments(optimizer, event.parameter), _entries(weight, event.grown))
        for total in self._accumulators.get(event.layer, {}).values():
            total.masked_fill_(event.new_entries.expand_as(total), 0.0)

    def metrics(self) -> dict[str, float]:
        return {
            "sparsity": 1 - self._share({name: weight.topology for name, weight in self._weights.items()}),
            "topology_updates": float(self.updates),
            "moved_share": self.moved_share,
            "ever_active": self._share(self._ever_active),
        }

    def state_dict(self) -> dict[str, Any]:
        if self._uncovered:
            raise ValueError(
                "SparseTraining: weights behind zeros are the optimiser's between before_step and after_step. "
                "Save the model and the session after after_step()."
            )
        # topologies are buffers of the model, random numbers are stateless: what was gathered is left
        return {
            "updates": self.updates,
            "moved_share": self.moved_share,
            "topology": topology_hash(self._weights),
            "ever_active": {name: ever.clone() for name, ever in self._ever_active.items()},
            "accumulators": {
                layer: {name: total.clone() for name, total in kept.items()}
                for layer, kept in self._accumulators.items()
            },
            "hidden": {name: hidden.clone() for name, hidden in self._hidden.items()},
            "retained": {} if self._retained is None else self._retained.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        found = topology_hash(self._weights)
        if state["topology"] != found:
            raise ValueError(
                f"SparseTraining: expected a model with topology {state['topology']}, got {found}. "
                "Load the model's state before the session's."
            )
        keeps = {name for kept in state.get("accumulators", {}).values() for name in kept} - set(self._gathers)
        if state.get("hidden") and self.method.hidden_decay is None:
            keeps.add("weights behind zeros")
        if keeps:
            raise ValueError(
                "SparseTraining: expected a state of this session's method, got one of a method that keeps "
                f"{', '.join(sorted(keeps))}. Attach that method, or go on without the session's state."
            )
        self.updates, self.moved_share = int(state["updates"]), float(state["moved_share"])
        # states of 0.1 have counters only
        for name, ever in state.get("ever_active", {}).items():
            self._ever_active[name] = ever.clone().to(self._ever_active[name].device)
        for layer, kept in state.get("accumulators", {}).items():
            device = self._weights[layer].parameter.device
            self._accumulators[layer] = {name: total.clone().to(device) for name, total in kept.items()}
        for name, hidden in state.get("hidden", {}).items():
            self._hidden[name].copy_(hidden)
        if self._retained is not None:
            self._retained.load_state_dict(state.get("retained", {}))
        self._open_ahead()

    def detach(self) -> None:
        for weight in self._weights.values():
            weight.close_probe()
            if self._uncovered:  # a step that was broken off
                weight.keep_zeros()
            weight.hold(False)
        self._weights, self._held = {}, {}
        for kept in (self._growth, self._ever_active, self._accumulators, self._hidden):
            kept.clear()
        # where it is attached next, nothing of this model is known
        self.updates, self.moved_share, self._foreign_loop, self._uncovered = 0, 0.0, True, False
        if self._retained is not None:
            self._retained = RetainedMoments()

    def _share(self, units: Mapping[str, torch.Tensor]) -> float:
        """Share of all units that are True, each counted with its weights."""
        sizes = {name: math.prod(weight.shape) for name, weight in self._weights.items()}
        share = {name: int(one.sum()) / one.numel() for name, one in units.items()}
        return sum(share[name] * size for name, size in sizes.items()) / sum(sizes.values())

    def _trained(self) -> list[SparseWeight]:
        return [weight for weight in self._weights.values() if weight.parameter.requires_grad]

    def _keep_for_trained(self) -> None:
        """Begins what the method keeps per weight of each trained layer, of one that was frozen until now too."""
        if not self._gathers and self.method.hidden_decay is None:
            return
        for weight in self._trained():
            if weight.name in self._accumulators or weight.name in self._hidden:
                continue
            self._refuse_compact({weight.name: weight})
            if self._gathers:
                self._accumulators[weight.name] = {
                    name: torch.zeros_like(weight.parameter, dtype=torch.float32) for name in self._gathers
                }
            if self.method.hidden_decay is not None:
                self._hidden[weight.name] = weight.parameter.detach().clone()

    def _refuse_compact(self, weights: Mapping[str, SparseWeight]) -> None:
        reason = self.method.masked_only
        if not reason and self._retained is not None:
            reason = "a slot that was given to another unit has no moments of the one before"
        for weight in weights.values():
            if reason and weight.parameter.requires_grad and not weight.all_weights:
                raise ValueError(
                    f"{weight.name}: expected masked storage, got compact: {reason}. "
                    "Use sparsify(..., storage='masked')."
                )

    def _gather(self) -> None:
        """Adds this step's gradients to what the scores gather."""
        for layer, kept in self._accumulators.items():
            parameter = self._weights[layer].parameter
            if not kept or parameter.grad is None:
                continue
            gradient = parameter.grad.float()
            # of a gradient that is not finite nothing can be learnt, and its step will be skipped
            if bool(gradient.isfinite().all()):
                for name, total in kept.items():
                    self._gathers[name].update(total, parameter.detach(), gradient)

    def _drop_what_the_optimizer_keeps(self) -> None:
        """Gathers no longer what turned out to be among the optimiser's moments."""
        for layer, kept in self._accumulators.items():
            known = moments(self.session.optimizer, self._weights[layer].parameter)
            for name, accumulator in self._gathers.items():
                if accumulator.instead_of in known:
                    kept.pop(name, None)

    @torch.no_grad()
    def _uncover(self, weight: SparseWeight) -> None:
        """Lets the optimiser see the weights behind the zeros, with their pull to zero."""
        parameter, hidden, behind = weight.parameter, self._hidden[weight.name], ~weight.active
        parameter.copy_(torch.where(behind, hidden, parameter))
        if parameter.grad is not None:
            parameter.grad.add_(hidden * behind, alpha=self.method.hidden_decay or 0.0)

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
        decided = self._decided(views, step) if views else {}
        moved = active = 0
        for name, topology in decided.items():
            weight = self._weights[name]
            event = weight.apply(topology)
            active += int(topology.sum())
            self._ever_active[name] |= topology
            if event is not None:
                if name in self._hidden:
                    weight.parameter.copy_(self._hidden[name])
                    weight.keep_zeros()
                moved += int(event.grown.sum())
                self.session.rewired(event)
        self.updates += 1
        self.moved_share = moved / max(active, 1)
        if _ranks() > 1:
            _compare_ranks(self._weights, step)

    def _decided(self, views: Mapping[str, LayerView], step: int) -> Mapping[str, torch.Tensor]:
        """What the method wants, checked: it may be somebody's own."""
        decided = self.method.update(views, step)
        if not isinstance(decided, Mapping):
            raise ValueError(f"expected topologies by layer from the method, got {type(decided).__name__}.")
        if others := decided.keys() - views.keys():
            raise ValueError(
                f"expected topologies of {', '.join(views)} from the method, got {', '.join(sorted(others))}. "
                "It may change the layers that it is shown; frozen ones keep theirs."
            )
        return decided

    def _view(self, weight: SparseWeight, step: int) -> LayerView:
        gradient = weight.parameter.grad
        return LayerView(
            name=weight.name,
            shape=weight.shape,
            pattern=weight.pattern,
            topology=weight.topology.clone(),
            weight=self._hidden.get(weight.name, weight.parameter.detach()),
            gradient=None if gradient is None else gradient.detach(),
            moments=moments(self.session.optimizer, weight.parameter),
            reduce=weight.reduce,
            seed=self.session.seed,
            step=step,
            growth=self._growth.get(weight.name),
            accumulators=self._accumulators.get(weight.name, {}),
        )


def _entries(weight: SparseWeight, units: torch.Tensor) -> torch.Tensor:
    """bool of the parameter's shape, True = entry of one of these units; masked storage only."""
    return weight.pattern.expand(units, weight.dense_shape).reshape(weight.shape)


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
