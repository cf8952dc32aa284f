"""The part that trains a sparse model: it asks a method for topologies and applies them."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn

from sparsam.session import Part, Rewire, Session
from sparsam.shards import is_sharded
from sparsam.sparse.agreement import (
    broadcast_topology,
    check_apart,
    compare_ranks,
    mean_of_ranks,
    ranks,
    topology_hash,
)
from sparsam.sparse.gathering import Gathering
from sparsam.sparse.hidden import HiddenWeights
from sparsam.sparse.methods import Method, check_method
from sparsam.sparse.moments import RetainedMoments, check_optimizer, moments, reset_moments
from sparsam.sparse.views import LayerView
from sparsam.sparse.weights import SparseWeight, sparse_weights

__all__ = ["SparseTraining"]


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

    Under FSDP2 (`fully_shard`) every rank decides alike from gathered scores, one layer at a time, and writes its own
    part; methods that keep something per weight are refused there.

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
        self._gathering = Gathering(method.accumulators)
        self._hidden = HiddenWeights(method.hidden_decay)
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
        stage = session.group is not None and not session.apart  # of a pipeline: it may have none of the sparse layers
        if stage and not self.method.per_layer:
            raise ValueError(
                "SparseTraining: expected a method that decides for each layer by itself, as the layers of a pipeline "
                "are on several ranks; this one needs all of them. Use static(), set_() or rigl()."
            )
        if not weights and not stage:
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
        if session.apart:
            check_apart(self.method, session.apart)
        sharded = is_sharded(session.model)
        if sharded:
            self._refuse_sharded()
            # each rank keeps a part of the model that it built: parts of other topologies would not fit together
            compare_ranks(weights, session.applied_steps, session.group)
        self._weights = weights
        self._held = {name: weight.parameter for name, weight in weights.items()}
        for weight in weights.values():
            if ranks(session.group) > 1 and not sharded:
                broadcast_topology(weight, session.group)
            weight.hold(True)
            weight.keep_zeros()
        self._ever_active = {name: weight.topology.clone() for name, weight in weights.items()}
        self._keep_for_trained()
        self._open_ahead()

    @contextlib.contextmanager
    def forward(self) -> Iterator[None]:
        self._foreign_loop = False
        if self._collects:
            several = ranks(self.session.group) > 1 or self.session.accumulate > 1
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
                self._growth[weight.name] = _growth_scores(weight, weight.close_probe(), self.session)
        for name, weight in self._weights.items():
            self._gathering.add(weight)
            if name in self._hidden.weights:
                self._hidden.uncover(weight)
            else:
                weight.keep_gradient_zeros()

    @torch.no_grad()
    def after_step(self, applied: bool) -> None:
        if applied and self._hidden.weights and not self._hidden.uncovered:
            raise ValueError(
                "SparseTraining: expected before_step() before the optimiser's step: this method's weights behind "
                "zeros have had none. Call session.before_step() when the gradients are there."
            )
        for weight in self._weights.values():
            self._hidden.take_back(weight)
            weight.keep_zeros()
        self._hidden.uncovered = False
        if applied and self.session.applied_steps == 1:
            self._gathering.leave_to(self.session.optimizer, self._weights)
        if applied and self.method.due(self.session.applied_steps):
            self._update(self.session.applied_steps)
        self._growth.clear()
        if self._foreign_loop:
            self._open_ahead()

    def after_rewire(self, event: Rewire) -> None:
        if event.layer not in self._weights or event.layer in self._hidden.weights:
            return  # weights behind zeros go on where they are, and so do their moments
        weight, optimizer = self._weights[event.layer], self.session.optimizer
        if self._retained is not None:
            self._retained.put_aside(event.layer, moments(optimizer, event.parameter), _entries(weight, event.dropped))
        reset_moments(optimizer, event.parameter, event.new_entries, weight.active)
        if self._retained is not None:
            self._retained.give_back(event.layer, moments(optimizer, event.parameter), _entries(weight, event.grown))
        self._gathering.forget(event.layer, event.new_entries)

    def metrics(self) -> dict[str, float]:
        return {
            "sparsity": 1 - self._share({name: weight.topology for name, weight in self._weights.items()}),
            "topology_updates": float(self.updates),
            "moved_share": self.moved_share,
            "ever_active": self._share(self._ever_active),
        }

    def state_dict(self) -> dict[str, Any]:
        if self._hidden.uncovered:
            raise ValueError(
                "SparseTraining: weights behind zeros are the optimiser's between before_step and after_step. "
                "Save the model and the session after after_step()."
            )
        # topologies are buffers of the model, random numbers are stateless: what was gathered is left
        return {
            "updates": self.updates,
            "moved_share": self.moved_share,
            "topology": self._hashes(),
            "ever_active": {name: ever.clone() for name, ever in self._ever_active.items()},
            "accumulators": self._gathering.state_dict(),
            "hidden": self._hidden.state_dict(),
            "retained": {} if self._retained is None else self._retained.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        saved, found = state["topology"], self._hashes()
        if isinstance(saved, str):  # states of 0.1 have one hash over all layers
            saved, found = {"": saved}, {"": topology_hash(self._weights)}
        for layer in saved.keys() | found.keys():
            if saved.get(layer) != found.get(layer):
                raise ValueError(
                    f"{layer}: expected a model with topology {saved.get(layer)}, got {found.get(layer)}. "
                    "Load the model's state before the session's."
                )
        keeps = {name for kept in state.get("accumulators", {}).values() for name in kept}
        keeps -= set(self._gathering.accumulators)
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
        self._gathering.load_state_dict(state.get("accumulators", {}), self._weights)
        self._hidden.load_state_dict(state.get("hidden", {}))
        if self._retained is not None:
            self._retained.load_state_dict(state.get("retained", {}))
        self._open_ahead()

    def detach(self) -> None:
        for weight in self._weights.values():
            weight.close_probe()
            if self._hidden.uncovered:  # a step that was broken off
                weight.keep_zeros()
            weight.hold(False)
        # where it is attached next, nothing of this model is known
        self._weights, self._held, self._growth, self._ever_active = {}, {}, {}, {}
        self.updates, self.moved_share, self._foreign_loop = 0, 0.0, True
        self._gathering = Gathering(self.method.accumulators)
        self._hidden = HiddenWeights(self.method.hidden_decay)
        if self._retained is not None:
            self._retained = RetainedMoments()

    def _share(self, units: Mapping[str, torch.Tensor]) -> float:
        """Share of all units that are True, each counted with its weights."""
        sizes = {name: math.prod(weight.shape) for name, weight in self._weights.items()}
        share = {name: int(one.sum()) / one.numel() for name, one in units.items()}
        return sum(share[name] * size for name, size in sizes.items()) / max(1, sum(sizes.values()))

    def _hashes(self) -> dict[str, str]:
        return {name: topology_hash({name: weight}) for name, weight in self._weights.items()}

    def _trained(self) -> list[SparseWeight]:
        return [weight for weight in self._weights.values() if weight.parameter.requires_grad]

    def _keep_for_trained(self) -> None:
        """Begins what the method keeps per weight of each trained layer, of one that was frozen until now too."""
        for weight in self._trained():
            self._refuse_compact({weight.name: weight})
            self._gathering.begin(weight)
            self._hidden.begin(weight)

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

    def _refuse_sharded(self) -> None:
        kept = {
            "weights behind zeros": self._hidden.decay is not None,
            "keep_moments": self._retained is not None,
            f"gathered {', '.join(self._gathering.accumulators)}": bool(self._gathering.accumulators),
        }
        for what, used in kept.items():
            if used:
                raise ValueError(
                    f"SparseTraining: expected a method that keeps nothing per weight under fully_shard, got {what}. "
                    "Use DistributedDataParallel for it, or a method such as rigl, set_, gmp or granet."
                )

    def _open_ahead(self) -> None:
        """For a loop that never enters `forward`: probes for an update step that comes next."""
        if self._collects:
            for weight in self._trained():
                weight.open_probe(dense=self.growth != "sum_of_norms")

    @property
    def _collects(self) -> bool:
        return self.method.needs_gradient and self.method.due(self.session.applied_steps + 1)

    def _update(self, step: int) -> None:
        if self.session.apart:
            check_apart(self.method, self.session.apart, range(step, step + 1))
            # only now have all ranks taken this step
            for weight in self._trained():
                if (own := self._growth.get(weight.name)) is not None:
                    self._growth[weight.name] = _grid(weight, mean_of_ranks(own, self.session.group))
        views = {weight.name: self._view(weight, step) for weight in self._trained()}
        decided = self._decided(views, step) if views else {}
        moved = active = 0
        for name, topology in decided.items():
            weight = self._weights[name]
            event = weight.apply(topology)
            active += int(topology.sum())
            self._ever_active[name] |= topology
            if event is not None:
                if name in self._hidden.weights:
                    self._hidden.show_active(weight)
                moved += int(event.grown.sum())
                self.session.rewired(event)
        self.updates += 1
        self.moved_share = moved / max(active, 1)
        if ranks(self.session.group) > 1:
            compare_ranks(self._weights, step, self.session.group)

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
        gradient, found = weight.parameter.grad, moments(self.session.optimizer, weight.parameter)
        if self.session.apart:  # of gradients the mean; moments are each rank's own, and no method may read them
            gradient = torch.zeros_like(weight.parameter) if gradient is None else gradient
            gradient, found = mean_of_ranks(gradient, self.session.group), {}
        return LayerView(
            name=weight.name,
            shape=weight.shape,
            pattern=weight.pattern,
            topology=weight.topology.clone(),
            weight=self._hidden.weights.get(weight.name, weight.parameter.detach()),
            gradient=None if gradient is None else gradient.detach(),
            moments=found,
            reduce=weight.reduce,
            seed=self.session.seed,
            step=step,
            growth=self._growth.get(weight.name),
            accumulators=self._gathering.totals.get(weight.name, {}),
        )


def _entries(weight: SparseWeight, units: torch.Tensor) -> torch.Tensor:
    """bool of the parameter's shape, True = entry of one of these units; masked storage only."""
    return weight.pattern.expand(units, weight.dense_shape).reshape(weight.shape)


def _growth_scores(weight: SparseWeight, collected: torch.Tensor | None, session: Session) -> torch.Tensor | None:
    """float32 grid of mean |dense gradient| from what a probe collected over a window."""
    if collected is None:
        return None
    if session.apart:  # ranks meet when all have taken this step; a copy, as zeros are put back and clipping comes
        return collected / session.divisor if weight.probe_is_local else collected.clone()
    if weight.probe_is_local:
        several = ranks(session.group)
        if several > 1:
            # signed first, absolute after
            dist.all_reduce(collected, group=session.group)
        collected = collected / (session.divisor * several)
    return _grid(weight, collected)


def _grid(weight: SparseWeight, collected: torch.Tensor) -> torch.Tensor:
    if tuple(collected.shape) != weight.dense_shape:
        return collected
    return weight.pattern.reduce(collected.abs())
