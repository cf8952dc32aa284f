"""Pruning of a trained model, at once or in rounds, by any score: calibration batches bring what a score reads.

Gradual pruning while training goes on is a method of `sparse` (`gmp`, `taylor_pruning`, `Resize`), not here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from sparsam.compress.gradients import Loss, batch_gradients, checked_batches
from sparsam.compress.second_order import SecondOrder, compensated, removal_costs
from sparsam.select import select
from sparsam.shards import refuse_sharded
from sparsam.sparse.allocation import Allocation, check_density, share_out, uniform
from sparsam.sparse.layers import SparseLinear
from sparsam.sparse.methods import resize
from sparsam.sparse.moments import check_optimizer, moments, reset_moments
from sparsam.sparse.patterns import Pattern
from sparsam.sparse.scores import Accumulator, Score, accumulators_of, check_functions, magnitude, random
from sparsam.sparse.sparsify import compact, inspect, sparsify
from sparsam.sparse.table import SparsityTable
from sparsam.sparse.views import LayerView
from sparsam.sparse.weights import CompactWeight, SparseWeight, sparse_weights

__all__ = ["Evidence", "prune", "prune_in_rounds"]


def prune(
    model: nn.Module,
    pattern: Pattern,
    density: float,
    *,
    score: Score = magnitude,
    data: Iterable[Any] = (),
    loss: Loss | None = None,
    allocation: Allocation = uniform,
    optimizer: torch.optim.Optimizer | None = None,
    include: Sequence[str] = ("*",),
    exclude: Sequence[str] = (),
    seed: int = 0,
    **options: Any,
) -> SparsityTable:
    """Prunes a trained model in place, once: the units of the lowest scores go.

    A dense model goes through `sparsify`. Where layers that `include` and `exclude` leave are sparse already, those are
    pruned further, in the storage that they have, and dense ones are left alone.

    Args:
        model: changed in place, before it is wrapped or compiled, and with its session detached.
        pattern: of the units; that of the layers where they are sparse already.
        density: active share of the units of all pruned layers together afterwards, in (0, 1].
        score: of units: a function, or `SecondOrder(...)`, which also moves the weights that stay.
        data: calibration batches, whatever `loss` takes; kept as a list. With them a score reads the gradient that is
            the mean over batches, and what it gathers over steps is gathered over them. Without, it reads the last
            backward's gradient, and moments of the optimiser.
        loss: (model, batch) -> a scalar; called in eval mode.
        allocation: how density is shared out between layers; its score sees the same evidence.
        optimizer: one that exists already; its state is carried along.
        include: globs over layer names.
        exclude: globs over layer names.
        seed: orders equal scores.
        options: of `sparsify` for dense layers: storage, heads, embeddings, headroom, profile, ...

    Returns:
        The table of every weight matrix.

    Raises:
        ValueError: as `sparsify`; a score lacks data; or the density is above that of the layers.
    """
    check_functions(score=score, allocation=allocation)
    check_density(density)
    refuse_sharded(model, "prune", "Prune the plain model before fully_shard.")
    if options.get("sparse_fan_in"):
        raise ValueError("prune: expected a trained model, whose weights sparse_fan_in would scale. Leave it out.")
    evidence = Evidence(model, score, allocation, data, loss, optimizer)
    held = _chosen(model, include, exclude)
    if held:
        for name in options:
            raise ValueError(
                f"prune: expected no {name} for layers that are sparse already ({next(iter(held))}), got one. They "
                "keep their storage; leave it out."
            )
        table = _prune_further(model, held, pattern, density, evidence, optimizer, seed)
    else:
        table = sparsify(
            model,
            pattern,
            density,
            score=evidence.score,
            allocation=evidence.allocation,
            optimizer=optimizer,
            include=include,
            exclude=exclude,
            seed=seed,
            **options,
        )
    evidence.compensate()
    return table


def prune_in_rounds(
    model: nn.Module,
    pattern: Pattern,
    density: float,
    rounds: int,
    fine_tune: Callable[[int], object],
    **options: Any,
) -> list[SparsityTable]:
    """Iterative pruning: prune, fine-tune, prune. Each round leaves the same share of what the one before left.

    Args:
        model: a dense one, changed in place.
        pattern: of the units.
        density: after the last round, in (0, 1].
        rounds: how many.
        fine_tune: called with 1, 2, ... after each round, the last one too. It trains the model and detaches its
            session; parameters are new ones after a round in compact storage, for which `optimizer` is an option.
        options: of `prune`. Those of `sparsify` matter in the first round, which also says which layers take part: one
            that an allocation leaves whole there stays dense.

    Returns:
        The table of each round.

    Source: Han et al. 2015, arXiv:1506.02626; of equal shares, Frankle and Carbin 2019, arXiv:1803.03635.
    """
    check_density(density)
    if rounds < 1:
        raise ValueError(f"rounds: expected at least 1, got {rounds}.")
    check_functions(fine_tune=fine_tune)
    if "data" in options:
        options["data"] = list(options["data"])  # an iterator would be empty in the second round
    lasting = {"score", "data", "loss", "allocation", "optimizer", "include", "exclude", "seed"}
    tables = []
    for turn in range(1, rounds + 1):
        tables.append(prune(model, pattern, density ** (turn / rounds), **options))
        options = {name: value for name, value in options.items() if name in lasting}
        fine_tune(turn)
    return tables


class Evidence:
    """What calibration batches say of each layer, put into the views that a score and an allocation read.

    An allocation is asked once and before any score, with all layers that take part: that is when it is gathered.
    """

    def __init__(
        self,
        model: nn.Module,
        score: Score,
        allocation: Allocation,
        data: Iterable[Any],
        loss: Loss | None,
        optimizer: torch.optim.Optimizer | None,
    ) -> None:
        self.model, self.optimizer, self.loss = model, optimizer, loss
        self._score, self._allocation = score, allocation
        self.batches = checked_batches(data) if loss is not None else list(data)
        if self.batches and loss is None:
            raise ValueError("loss: expected a function of (model, batch) beside data, got none.")
        self.accumulators: dict[str, Accumulator] = {
            one.name: one for one in (*accumulators_of(score), *accumulators_of(allocation))
        }
        self.second_order = score if isinstance(score, SecondOrder) else None
        if self.second_order is not None and not self.batches:
            raise ValueError("SecondOrder: expected calibration batches, got none. Pass data=batches and loss=fn.")
        self._seen: dict[str, dict[str, Any]] = {}
        self._samples: dict[str, tuple[Pattern, torch.Tensor, torch.Tensor]] = {}

    def allocation(self, views: Mapping[str, LayerView], density: float) -> dict[str, float]:
        self._seen = (
            self._gathered(views) if self.batches else {name: self._known(view) for name, view in views.items()}
        )
        return share_out(self._allocation, {name: self._with(view) for name, view in views.items()}, density)

    def score(self, view: LayerView) -> torch.Tensor:
        return self._score(self._with(view))

    @torch.no_grad()
    def compensate(self) -> None:
        """Moves the weights that stayed, where the score says how."""
        if self.second_order is None or not self.second_order.update:
            return
        size, damping = self.second_order.size, self.second_order.damping
        for name, weight in sparse_weights(self.model).items():
            if name in self._samples:
                pattern, before, samples = self._samples.pop(name)
                dense = compensated(before, samples, weight.topology, pattern, size, damping)
                weight.parameter.copy_(_entries(weight, dense))
                weight.buffers_changed()  # a frozen layer packs its new values

    def _with(self, view: LayerView) -> LayerView:
        return dataclasses.replace(view, **self._seen[view.name])

    def _known(self, view: LayerView) -> dict[str, Any]:
        """Without data: the gradient of the last backward, and what the optimiser keeps."""
        parameter = _parameter(self.model, view.name)
        found = {} if self.optimizer is None else moments(self.optimizer, parameter)
        for accumulator in self.accumulators.values():
            if accumulator.instead_of not in found:
                raise ValueError(
                    f"{view.name}: expected calibration batches for the score, which gathers {accumulator.name}, got "
                    "none. Pass data=batches and loss=fn."
                )
        growth = None if view.gradient is None else view.reduce(view.gradient.float().abs())
        return {"moments": found, "growth": growth}

    def _gathered(self, views: Mapping[str, LayerView]) -> dict[str, dict[str, Any]]:
        assert self.loss is not None
        parameters = {name: _parameter(self.model, name) for name in views}
        if self.second_order is not None:
            weights = sum(parameter.numel() for parameter in parameters.values())
            self.second_order.check_memory(len(self.batches), weights)
        means = {name: torch.zeros_like(one, dtype=torch.float32) for name, one in parameters.items()}
        totals = {name: {kind: torch.zeros_like(mean) for kind in self.accumulators} for name, mean in means.items()}
        samples: dict[str, list[torch.Tensor]] = {name: [] for name in views}
        for gradients in batch_gradients(self.model, list(parameters.values()), self.batches, self.loss):
            for (name, parameter), gradient in zip(parameters.items(), gradients, strict=True):
                gradient = gradient.float()
                means[name].add_(gradient, alpha=1 / len(self.batches))
                for kind, total in totals[name].items():
                    self.accumulators[kind].update(total, parameter.detach(), gradient)
                if self.second_order is not None:
                    samples[name].append(gradient)
        if self.second_order is not None:
            sparse = sparse_weights(self.model)
            for name, view in views.items():
                totals[name]["removal_cost"] = self._costs(view, sparse.get(name), samples.pop(name))
        return {
            name: {
                "gradient": means[name],
                "growth": view.reduce(means[name].abs()),
                "moments": {},
                "accumulators": totals[name],
            }
            for name, view in views.items()
        }

    def _costs(self, view: LayerView, sparse: SparseWeight | None, samples: list[torch.Tensor]) -> torch.Tensor:
        """What removing each unit costs, at its entries."""
        assert self.second_order is not None
        shape = (view.shape[0], view.weights // view.shape[0])
        weight, stacked = (
            _dense(sparse, view.weight).reshape(shape).clone(),
            torch.stack([_dense(sparse, samples.pop(0)).reshape(shape) for _ in range(len(samples))]),
        )
        # what nothing makes up for costs w_Q^T F_QQ w_Q / 2: a unit with a Fisher block of its own
        size = self.second_order.size if self.second_order.update else 1
        damping = self.second_order.damping
        costs = view.pattern.expand(removal_costs(weight, stacked, view.pattern, size, damping), shape)
        if self.second_order.update:
            self._samples[view.name] = (view.pattern, weight, stacked)
        return _entries(sparse, costs) if sparse is not None else costs.reshape(view.weight.shape)


def _chosen(model: nn.Module, include: Sequence[str], exclude: Sequence[str]) -> dict[str, SparseWeight]:
    """The layers that are sparse already, of those that are meant."""
    sparse = sparse_weights(model)
    for name, weight in sparse.items():
        if isinstance(weight.module, SparseLinear) and weight.module.attached:
            raise ValueError(
                f"prune: {name} is trained by a session. Call session.detach() first, and build a new session after."
            )
    if not sparse:
        return {}  # what globs match is for sparsify to say
    names = [*sparse, *(name for name, _ in model.named_modules() if name not in sparse)]
    return {name: sparse[name] for name in select(names, include, exclude) if name in sparse}


def _prune_further(
    model: nn.Module,
    weights: Mapping[str, SparseWeight],
    pattern: Pattern,
    density: float,
    evidence: Evidence,
    optimizer: torch.optim.Optimizer | None,
    seed: int,
) -> SparsityTable:
    if optimizer is not None:
        check_optimizer(optimizer)
    for name, weight in weights.items():
        if weight.pattern != pattern:
            raise ValueError(f"prune: {name} is sparse in {weight.pattern} already, got {pattern}. Give the same.")
    views = {name: _view(weight, seed) for name, weight in weights.items()}
    total = sum(view.weights for view in views.values())
    now = sum(view.density * view.weights for view in views.values()) / total
    # the nearest number of whole units may leave a model a little below what it was asked for
    rounding = sum(view.weights / view.units for view in views.values()) / 2 / total
    if density > now + rounding:
        raise ValueError(
            f"prune: expected a density of at most {now:.4g}, which the sparse layers have, got {density:g}. "
            "To grow a model back, use recovery or Resize."
        )
    shares = share_out(evidence.allocation, views, density)
    for name, weight in weights.items():
        view = views[name]
        count = min(view.active_units, pattern.count(view.units, shares[name]))
        event = weight.apply(resize(view, count, evidence.score, random))
        if event is not None and optimizer is not None:
            reset_moments(optimizer, event.parameter, event.new_entries, weight.active)
    stored_compact = [name for name, weight in weights.items() if isinstance(weight, CompactWeight)]
    if stored_compact:
        compact(model, optimizer, include=stored_compact)  # the slots of what went
    return inspect(model, pattern, 1.0, include=list(weights))


def _view(weight: SparseWeight, seed: int) -> LayerView:
    return LayerView(
        name=weight.name,
        shape=weight.shape,
        pattern=weight.pattern,
        topology=weight.topology.clone(),
        weight=weight.parameter.detach(),
        gradient=weight.parameter.grad,
        moments={},
        reduce=weight.reduce,
        seed=seed,
        step=0,
        growth=None,
    )


def _parameter(model: nn.Module, layer: str) -> nn.Parameter:
    """A layer's weight by the name that `sparsify` and sessions give it."""
    sparse = sparse_weights(model).get(layer)
    if sparse is not None:
        return sparse.parameter
    parameters = dict(model.named_parameters(remove_duplicate=False))
    path = f"{layer}.weight".lstrip(".")
    return parameters[path if path in parameters else layer]


def _dense(sparse: SparseWeight | None, entries: torch.Tensor) -> torch.Tensor:
    if isinstance(sparse, CompactWeight):
        return sparse.layer.scatter(entries)
    return entries


def _entries(weight: SparseWeight, dense: torch.Tensor) -> torch.Tensor:
    """Of a dense (N, K), what is stored."""
    if isinstance(weight, CompactWeight):
        return weight.layer.gather(dense)
    return dense.reshape(weight.shape)
