"""Whole neurons and channels taken out of a model, which becomes a smaller dense one. Only where one chain of layers
shows what hangs on them: a layer, what acts on each of its outputs alone, and the one layer that reads them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.nn.modules.batchnorm import _BatchNorm

from sparsam.compress.gradients import Loss
from sparsam.compress.prune import Evidence
from sparsam.compress.second_order import SecondOrder
from sparsam.select import select
from sparsam.shards import refuse_sharded
from sparsam.sparse.allocation import Allocation, check_density, share_out, uniform
from sparsam.sparse.layers import ActivatedLinear
from sparsam.sparse.masked import masked_weights, reparametrised
from sparsam.sparse.moments import check_optimizer, swap_parameter
from sparsam.sparse.patterns import Neuron
from sparsam.sparse.scores import Score, check_functions, magnitude, scored
from sparsam.sparse.views import LayerView

__all__ = ["NeuronRow", "remove_neurons"]

_LINEAR = (nn.Linear, ActivatedLinear)
_CONV = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
# what treats every neuron by itself
_ALONE: tuple[type[nn.Module], ...] = (
    nn.ReLU,
    nn.ReLU6,
    nn.GELU,
    nn.SiLU,
    nn.Mish,
    nn.Tanh,
    nn.Sigmoid,
    nn.LeakyReLU,
    nn.ELU,
    nn.Hardswish,
)
_ALONE += (nn.Hardsigmoid, nn.Softplus, nn.Identity, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
_POOLS = (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d)
_FUNCTIONS = (F.relu, F.gelu, F.silu, F.tanh, F.sigmoid, F.dropout, torch.relu, torch.tanh, torch.sigmoid)


@dataclass(frozen=True)
class NeuronRow:
    """One layer whose outputs are neurons or channels.

    Attributes:
        name: of the layer.
        before: its outputs before.
        after: its outputs now.
        reader: the layer that reads them; empty where nothing was removed for `reason`.
        reason: why its outputs stay.
    """

    name: str
    before: int
    after: int
    reader: str = ""
    reason: str = ""


@dataclass(frozen=True)
class _Chain:
    first: str
    norms: tuple[str, ...]
    last: str


def remove_neurons(
    model: nn.Module,
    density: float,
    *,
    score: Score = magnitude,
    data: Iterable[Any] = (),
    loss: Loss | None = None,
    allocation: Allocation = uniform,
    optimizer: torch.optim.Optimizer | None = None,
    include: Sequence[str] = ("*",),
    exclude: Sequence[str] = (),
    pairs: Mapping[str, str] | None = None,
    seed: int = 0,
) -> list[NeuronRow]:
    """Takes the neurons of linear layers and channels of convolutions that score lowest out of a model, in place.

    Layers shrink, with the batch norms between them, and stay ordinary dense ones, for any runtime. The graph is
    found by `torch.fx`: linear -> activation -> linear and convolution -> batch norm -> activation -> convolution,
    where each has one reader. Outputs that are added, flattened, normalised across neurons or read twice stay.

    Args:
        model: a dense one, changed in place, before it is wrapped or compiled.
        density: share of the neurons of all these layers together that stays, in (0, 1].
        score: of neurons, over the weights that make them; any, and `SecondOrder(update=False)`.
        data: calibration batches, as in `prune`.
        loss: (model, batch) -> a scalar.
        allocation: how density is shared out between layers.
        optimizer: one that exists already; what it keeps of the weights that stay is carried along.
        include: globs over the layers that make the neurons. Naming one whose outputs cannot go is an error.
        exclude: globs over them.
        pairs: for models that cannot be traced: {layer: the one layer that reads its outputs}, with nothing between
            them but what acts on each alone, which is yours to know: {"blocks.0.up": "blocks.0.down"} of a transformer.
        seed: orders equal scores.

    Returns:
        A row for each linear layer and convolution: what went, or why nothing did.

    Raises:
        ValueError: the model cannot be traced, no layer has neurons that can go, or an argument does not fit. Nothing
            is changed then.

    Source: of the idea, Li et al. 2017, arXiv:1608.08710 (channels); Fang et al. 2023, arXiv:2301.12900 (the graph).
    """
    check_functions(score=score, allocation=allocation)
    check_density(density)
    refuse_sharded(model, "remove_neurons", "Shrink the plain model before fully_shard.")
    if isinstance(score, SecondOrder) and score.update:
        raise ValueError("remove_neurons: expected a score that moves no weights. Write SecondOrder(update=False).")
    if optimizer is not None:
        check_optimizer(optimizer)
    layers = {name: module for name, module in model.named_modules() if isinstance(module, (*_LINEAR, *_CONV))}
    reasons = {name: _own_obstacle(model, module) for name, module in layers.items()}
    found = _given(layers, reasons, pairs) if pairs is not None else _traced(model, layers, reasons)
    chosen = select(layers, include, exclude)
    named = select(layers, [glob for glob in include if glob != "*"], exclude) if layers else []
    for name in named:
        if name not in found:
            raise ValueError(f"{name}: expected a layer whose neurons can go, but it {reasons[name]}. Exclude it.")
    chains = [found[name] for name in chosen if name in found]
    if not chains:
        why = "; ".join(f"{name} {reason}" for name, reason in list(reasons.items())[:4] if reason)
        raise ValueError(f"remove_neurons: no layer has neurons that can go ({why or 'none is included'}).")
    evidence = Evidence(model, score, allocation, data, loss, optimizer)
    views = {chain.first: _view(chain.first, layers[chain.first], seed) for chain in chains}
    shares = share_out(evidence.allocation, views, density)
    keeps = {}
    for name, view in views.items():
        count = view.pattern.count(view.units, shares[name])
        scores = scored(evidence.score, view)
        keeps[name] = view.pattern.choose(scores, count, view.random("keep")).flatten().nonzero().flatten()
    rows = []
    links = {chain.first: chain for chain in chains}
    for name, module in layers.items():
        before = len(module.weight)
        if name not in links:
            rows.append(NeuronRow(name, before, before, reason=reasons[name] or "is not included"))
            continue
        _shrink(model, links[name], keeps[name], optimizer)
        rows.append(NeuronRow(name, before, len(keeps[name]), links[name].last))
    return rows


def _own_obstacle(model: nn.Module, module: nn.Module) -> str:
    """Why a layer's outputs cannot go, whatever reads them; or nothing."""
    if type(module) not in (*_LINEAR, *_CONV):
        return f"is a {type(module).__name__} with a forward of its own"
    if masked_weights(module):
        return "is sparse already"
    if who := reparametrised(module, "weight"):
        return f"is reparametrised by {who}"
    if isinstance(module, _CONV) and module.groups != 1:
        return "is a convolution in groups"
    if sum(any(held is module.weight for held in other._parameters.values()) for other in model.modules()) > 1:
        return "is tied to another layer"
    return ""


def _given(layers: Mapping[str, nn.Module], reasons: dict[str, str], pairs: Mapping[str, str]) -> dict[str, _Chain]:
    for first, last in pairs.items():
        for name in (first, last):
            if name not in layers:
                raise ValueError(f"pairs: expected names of linear layers or convolutions, got {name!r}.")
            if reasons[name]:
                raise ValueError(f"pairs: {name} {reasons[name]}. Leave it out.")
        made, read = len(layers[first].get_parameter("weight")), layers[last].get_parameter("weight").shape[1]
        if made != read or isinstance(layers[first], _LINEAR) != isinstance(layers[last], _LINEAR):
            raise ValueError(f"pairs: expected a {last} that reads {first}'s {made} outputs, got one of {read} inputs.")
    if len(set(pairs.values())) < len(pairs):
        raise ValueError("pairs: expected every reader once, got one that reads two layers. Leave it out.")
    reasons.update({name: reason or "is not in pairs" for name, reason in reasons.items() if name not in pairs})
    return {first: _Chain(first, (), last) for first, last in pairs.items()}


def _traced(model: nn.Module, layers: Mapping[str, nn.Module], reasons: dict[str, str]) -> dict[str, _Chain]:
    try:
        graph = fx.Tracer().trace(model)
    except Exception as error:  # tracing runs other people's code, which may raise anything
        raise ValueError(
            f"remove_neurons: expected a model that torch.fx can trace, got {type(error).__name__}: "
            f"{str(error).splitlines()[0] if str(error) else 'no reason'}. Give pairs={{layer: its reader}}."
        ) from error
    calls: dict[str, list[fx.Node]] = {}
    for node in graph.nodes:
        if node.op == "call_module":
            calls.setdefault(str(node.target), []).append(node)
    read = {str(node.target).rpartition(".")[0] for node in graph.nodes if node.op == "get_attr"}
    modules = dict(model.named_modules())
    for name in layers:
        if not reasons[name] and (len(calls.get(name, ())) != 1 or name in read):
            reasons[name] = "is not called exactly once"
    obstacles, found = dict(reasons), {}
    for name in layers:
        if reasons[name]:
            continue
        norms, last, reasons[name] = _follow(calls[name][0], layers[name], modules, calls, obstacles)
        if not reasons[name]:
            found[name] = _Chain(name, tuple(norms), last)
    return found


def _follow(
    node: fx.Node,
    first: nn.Module,
    modules: Mapping[str, nn.Module],
    calls: Mapping[str, list[fx.Node]],
    obstacles: Mapping[str, str],
) -> tuple[list[str], str, str]:
    """Batch norms on the way, the reader, and why there is none."""
    norms: list[str] = []
    same = _LINEAR if isinstance(first, _LINEAR) else _CONV
    passing = _ALONE if same is _LINEAR else (*_ALONE, *_POOLS)
    while True:
        if len(node.users) != 1:
            return norms, "", f"has outputs that are read {len(node.users)} times"
        node = next(iter(node.users))
        name = str(node.target)
        if node.op == "call_function" and node.target in _FUNCTIONS:
            continue
        if node.op != "call_module":
            what = "are the model's" if node.op == "output" else f"go into {getattr(node.target, '__name__', name)}"
            return norms, "", f"has outputs that {what}"
        module = modules[name]
        if type(module) in passing:
            continue
        if len(calls[name]) != 1:
            return norms, "", f"has outputs that go into {name}, which is called several times"
        if isinstance(module, _BatchNorm) and module.num_features == len(first.get_parameter("weight")):
            norms.append(name)
            continue
        if isinstance(module, same):
            why = obstacles[name]
            return norms, name, f"is read by {name}, which {why}" if why else ""
        return norms, "", f"has outputs that go into {name}, a {type(module).__name__}"


def _view(name: str, module: nn.Module, seed: int) -> LayerView:
    weight, pattern = module.get_parameter("weight"), Neuron()
    return LayerView(
        name=name,
        shape=tuple(weight.shape),
        pattern=pattern,
        topology=torch.ones(pattern.grid((len(weight), weight[0].numel())), dtype=torch.bool, device=weight.device),
        weight=weight.detach(),
        gradient=weight.grad,
        moments={},
        reduce=lambda entries: pattern.reduce(entries.flatten(1)),
        seed=seed,
        step=0,
        growth=None,
    )


def _shrink(model: nn.Module, chain: _Chain, keep: torch.Tensor, optimizer: torch.optim.Optimizer | None) -> None:
    first, last = model.get_submodule(chain.first), model.get_submodule(chain.last)
    for name in ("weight", "bias"):
        _slice(first, name, 0, keep, optimizer)
    _slice(last, "weight", 1, keep, optimizer)
    sizes = ("out_features", "in_features") if isinstance(first, _LINEAR) else ("out_channels", "in_channels")
    setattr(first, sizes[0], len(keep))
    setattr(last, sizes[1], len(keep))
    for path in chain.norms:
        norm = model.get_submodule(path)
        for name in ("weight", "bias"):
            _slice(norm, name, 0, keep, optimizer)
        for name in ("running_mean", "running_var"):
            if getattr(norm, name) is not None:
                setattr(norm, name, norm.get_buffer(name).index_select(0, keep))
        norm.num_features = len(keep)  # type: ignore[assignment]


def _slice(module: nn.Module, name: str, dim: int, keep: torch.Tensor, optimizer: torch.optim.Optimizer | None) -> None:
    old = module._parameters.get(name)
    if old is None:
        return
    new = nn.Parameter(old.detach().index_select(dim, keep), old.requires_grad)
    if old.grad is not None:
        new.grad = old.grad.index_select(dim, keep)
    module._parameters[name] = new
    if optimizer is not None:
        swap_parameter(optimizer, old, new, lambda entries: entries.index_select(dim, keep))
