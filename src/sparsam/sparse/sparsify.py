"""One verb on a model: make it sparse, look at what would be made sparse, make it dense again."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import nn

from sparsam.select import select
from sparsam.shards import refuse_sharded
from sparsam.sparse.allocation import Allocation, uniform
from sparsam.sparse.candidates import Candidate, LinearProfile, Options, decide, places, read_by_attention, table_of
from sparsam.sparse.layers import ActivatedLinear, Freezable, SparseLinear
from sparsam.sparse.masked import TopologyBuffer, add_topology, masked_weights, plain_parameter, remove_topology
from sparsam.sparse.moments import check_optimizer, reset_moments, swap_parameter
from sparsam.sparse.patterns import Block, Pattern
from sparsam.sparse.scores import Score, magnitude
from sparsam.sparse.table import SparsityTable

__all__ = ["LinearProfile", "compact", "densify", "freeze", "inspect", "sparsify", "unfreeze"]

# what DistributedDataParallel reads when it wraps a model
_IGNORED = "_ddp_params_and_buffers_to_ignore"
_WRAPPERS = ("DistributedDataParallel", "FullyShardedDataParallel", "OptimizedModule")


def sparsify(
    model: nn.Module,
    pattern: Pattern,
    density: float,
    *,
    include: Sequence[str] = ("*",),
    exclude: Sequence[str] = (),
    heads: bool = False,
    embeddings: bool = False,
    allocation: Allocation = uniform,
    storage: Literal["auto", "compact", "masked"] = "auto",
    sparse_fan_in: bool = False,
    headroom: float = 0.0,
    profile: LinearProfile | None = None,
    tokens: int | None = None,
    format: str = "bf16",
    if_slow: Literal["dense", "scatter", "compact"] = "dense",
    optimizer: torch.optim.Optimizer | None = None,
    seed: int = 0,
    score: Score = magnitude,
) -> SparsityTable:
    """Makes a model's eligible layers sparse, in place. The first topology keeps the units of the highest scores.

    Args:
        model: changed in place, before it is wrapped (DDP, FSDP) or compiled.
        pattern: `Block(rows, cols)` or `Unstructured()`.
        density: active share of the units of all sparse layers together, in (0, 1].
        include: globs over layer names.
        exclude: globs over layer names; one that matches nothing is an error.
        heads: make output heads sparse too (modules called head, lm_head, classifier, ...).
        embeddings: mask embeddings too, and what is tied to them.
        allocation: how density is shared out between layers.
        storage: "compact" keeps active blocks only, "masked" keeps the dense tensor and its zeros, "auto" is compact
            for blocks and masked for other patterns. Blocks of what has no compact storage (convolutions, attention,
            recurrent layers, subclasses of nn.Linear) stay dense under "auto": masked ones would save no time.
        sparse_fan_in: for untrained weights: those that stay are scaled to the norm that all of them had, which keeps
            the outputs' variance. For random ones that is density^-0.5; the largest of single weights need less.
        headroom: share of further slots in compact storage, for methods that move density between layers.
        profile: a measured device profile; needs `tokens`.
        tokens: rows of a layer's input in one forward pass.
        format: "bf16" or "fp32": the number format in which the profile is asked.
        if_slow: what to do where the profile says that compact is not faster: leave the layer "dense", or store it
            compact and "scatter" it for a dense product, or use the "compact" product all the same.
        optimizer: one that exists already; its state is carried over to the new parameters.
        seed: orders equal scores.
        score: of units. One that reads gradients finds those of the last backward; `prune` brings it more.

    Returns:
        The table of every weight matrix: what was done, and why. `print` it.

    Raises:
        ValueError: the model is wrapped, no layer is eligible, or an argument does not fit.
    """
    _refuse_wrapped(model, "sparsify")
    if not headroom >= 0:
        raise ValueError(f"headroom: expected a share of further slots >= 0, got {headroom}.")
    if optimizer is not None:
        check_optimizer(optimizer)
    options = Options(
        include, exclude, heads, embeddings, allocation, storage, profile, tokens, format, if_slow, seed, score
    )
    candidates = decide(model, pattern, density, options)
    if not any(candidate.topology is not None for candidate in candidates):
        reasons = "; ".join(f"{candidate.name or 'the model'}: {candidate.reason}" for candidate in candidates[:4])
        raise ValueError(f"sparsify: no layer was made sparse ({reasons or 'the model has no weight matrix'}).")
    table = table_of(model, candidates)
    for candidate in candidates:
        if candidate.topology is not None:
            _apply(model, candidate, pattern, sparse_fan_in, headroom, optimizer)
    _keep_ties(model, [candidate.paths for candidate in candidates if len(candidate.owners) > 1])
    _keep_from_ddp(model)
    return table


def inspect(model: nn.Module, pattern: Pattern, density: float, **options: Any) -> SparsityTable:
    """The table that `sparsify` with the same arguments would return; the model stays as it is.

    Args:
        model: any, not wrapped. Layers that are sparse already are shown as they are.
        pattern: as in `sparsify`.
        density: as in `sparsify`.
        options: as in `sparsify`; those that change no decision (sparse_fan_in, headroom, optimizer) are accepted too.
    """
    defaults: dict[str, Any] = {
        "include": ("*",),
        "exclude": (),
        "heads": False,
        "embeddings": False,
        "allocation": uniform,
        "storage": "auto",
        "profile": None,
        "tokens": None,
        "format": "bf16",
        "if_slow": "dense",
        "seed": 0,
        "score": magnitude,
    }
    for undecisive in ("sparse_fan_in", "headroom", "optimizer"):
        options.pop(undecisive, None)
    unknown = set(options) - set(defaults)
    if unknown:
        raise ValueError(f"inspect: expected options of {', '.join(defaults)}, got {', '.join(sorted(unknown))}.")
    _refuse_wrapped(model, "inspect")
    return table_of(model, decide(model, pattern, density, Options(**(defaults | options))))


def densify(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
    """Turns every sparse layer back into the ordinary one, in place: same names, same order, same weights.

    Args:
        model: a sparse model, not wrapped, and with its session detached.
        optimizer: its state is carried over; weights where there was no unit begin anew, as after a rewire.
    """
    _refuse_wrapped(model, "densify")
    _refuse_held(model, "densify")
    if optimizer is not None:
        _refuse_reparametrised(model)
    for module in list(model.modules()):
        if isinstance(module, SparseLinear):
            dense = module.to_dense()
            weight = dense.get_parameter("weight")
            absent = module.scatter(torch.ones_like(module.values)) == 0
            _replace(model, module, dense)
            _swap(optimizer, module.values, weight, module.scatter)
            if module.bias is not None:
                _swap(optimizer, module.bias, dense.get_parameter("bias"), torch.clone)
            if optimizer is not None:
                reset_moments(optimizer, weight, absent)
        for buffer in masked_weights(module):
            if optimizer is not None:
                reset_moments(optimizer, buffer.parameter, ~buffer.active)
            remove_topology(module, buffer.weight_name)
    model._load_state_dict_post_hooks = type(model._load_state_dict_post_hooks)(
        (key, hook)
        for key, hook in model._load_state_dict_post_hooks.items()
        if not (isinstance(hook, functools.partial) and hook.func is _retie)
    )
    _keep_from_ddp(model)


def compact(
    model: nn.Module, optimizer: torch.optim.Optimizer | None = None, *, include: Sequence[str] = ("*",)
) -> None:
    """Masked block layers become compact, compact ones lose their dead slots; the optimiser's state moves along.

    Args:
        model: changed in place.
        optimizer: one that holds the model's parameters.
        include: globs over the names of sparse layers.

    This makes new Parameters, so it belongs outside DDP, FSDP and torch.compile, and a session is detached before.
    Tied weights stay masked: compact storage would part them. So do layers that are not plain nn.Linear, and one that
    attention reads without calling it.
    """
    _refuse_wrapped(model, "compact")
    _refuse_held(model, "compact")
    _refuse_reparametrised(model)
    sparse = {name: module for name, module in model.named_modules() if _is_sparse(module)}
    for module in [sparse[name] for name in select(sparse, include)]:
        if isinstance(module, SparseLinear) and bool((module.block_row < 0).any()):
            smaller = SparseLinear.from_dense(
                module.to_dense(), module.topology, module.pattern, product=module.product
            )
            old: nn.Parameter = module.values
            convert = _through_dense(module.scatter, smaller.gather)
        elif type(module) in (nn.Linear, ActivatedLinear) and (buffer := _only_block(module)) is not None:
            old = buffer.parameter
            ties = sum(any(held is old for held in other._parameters.values()) for other in model.modules())
            if ties > 1 or read_by_attention(model, module):
                continue
            assert isinstance(buffer.pattern, Block)
            smaller = SparseLinear.from_dense(module, buffer.topology, buffer.pattern)
            convert = smaller.gather
        else:
            continue
        _replace(model, module, smaller)
        _swap(optimizer, old, smaller.values, convert)
        if smaller.bias is not None:
            _swap(optimizer, module.get_parameter("bias"), smaller.bias, torch.clone)
    _keep_from_ddp(model)


def freeze(model: nn.Module) -> None:
    """Puts a model in its frozen inference state: eval mode, and weights of blocks packed once."""
    refuse_sharded(model, "freeze", "Packs are of whole weights: load its state into a plain model and freeze that.")
    model.eval()
    for module in model.modules():
        if isinstance(module, Freezable):
            module.freeze()


def unfreeze(model: nn.Module) -> None:
    """Leaves the frozen inference state; the mode stays eval until `model.train()`."""
    for module in model.modules():
        if isinstance(module, Freezable):
            module.unfreeze()


def _apply(
    model: nn.Module,
    candidate: Candidate,
    pattern: Pattern,
    sparse_fan_in: bool,
    headroom: float,
    optimizer: torch.optim.Optimizer | None,
) -> None:
    assert candidate.topology is not None
    module, old = candidate.module, candidate.weight
    norm = torch.linalg.vector_norm(old.detach().float())  # before zeros are put into it
    if candidate.storage == "masked":
        add_topology(module, candidate.weight_name, candidate.topology, pattern)
        stored: nn.Parameter = old
    else:
        assert isinstance(module, nn.Linear)
        assert isinstance(pattern, Block)
        units, active = candidate.topology.numel(), int(candidate.topology.sum())
        slots = min(units, active + round(active * headroom))
        sparse = SparseLinear.from_dense(module, candidate.topology, pattern, slots=slots, product=candidate.product)
        _replace(model, module, sparse)
        _swap(optimizer, old, sparse.values, sparse.gather)
        if sparse.bias is not None:
            _swap(optimizer, module.bias, sparse.bias, torch.clone)
        stored = sparse.values
    if sparse_fan_in:
        with torch.no_grad():
            left = torch.linalg.vector_norm(stored.float())
            stored.mul_(torch.where(left > 0, norm / left, 1.0))


def _replace(model: nn.Module, old: nn.Module, new: nn.Module) -> None:
    """Puts a module in another's place, everywhere."""
    found = places(model, old)
    if not found:
        raise ValueError(
            f"expected a model that contains its layers, got a {type(old).__name__} itself. Put it into nn.Sequential."
        )
    for parent, attribute in found:
        setattr(parent, attribute, new)


def _is_sparse(module: nn.Module) -> bool:
    return isinstance(module, SparseLinear) or bool(masked_weights(module))


def _only_block(module: nn.Module) -> TopologyBuffer | None:
    """The masked weight of a module when its units are blocks."""
    return next((buffer for buffer in masked_weights(module) if isinstance(buffer.pattern, Block)), None)


def _swap(
    optimizer: torch.optim.Optimizer | None,
    old: nn.Parameter,
    new: nn.Parameter,
    convert: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    if old.grad is not None:
        new.grad = convert(old.grad).contiguous()
    if optimizer is not None:
        swap_parameter(optimizer, old, new, convert)


def _through_dense(
    scatter: Callable[[torch.Tensor], torch.Tensor], gather: Callable[[torch.Tensor], torch.Tensor]
) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda entries: gather(scatter(entries))


def _keep_ties(model: nn.Module, groups: list[list[str]]) -> None:
    """Parameters that are one tensor stay one through load_state_dict(assign=True), which would part them."""
    if groups:
        model.register_load_state_dict_post_hook(functools.partial(_retie, groups))


def _retie(groups: list[list[str]], model: nn.Module, _: object) -> None:
    for first, *others in groups:
        parameter = model.get_parameter(first)
        for other in others:
            owner, _dot, name = other.rpartition(".")
            setattr(model.get_submodule(owner), name, parameter)


def _keep_from_ddp(model: nn.Module) -> None:
    """DDP copies rank 0's buffers before every forward, which would hide that topologies differ: not these."""
    ours = {
        f"{name}.{buffer}".lstrip(".")
        for name, module in model.named_modules()
        for buffer, _ in module.named_buffers(recurse=False)
        if isinstance(module, SparseLinear) or buffer in {masked.topology_name for masked in masked_weights(module)}
    }
    others = set(model.__dict__.pop(_IGNORED, ())) - set(model.__dict__.pop("_sparsam_topologies", ()))
    if ours | others:
        model.__dict__[_IGNORED] = sorted(ours | others)
    if ours:
        model.__dict__["_sparsam_topologies"] = sorted(ours)


def _refuse_held(model: nn.Module, verb: str) -> None:
    for name, module in model.named_modules():
        if isinstance(module, SparseLinear) and module.attached:
            raise ValueError(
                f"{verb}: {name} is trained by a session. Call session.detach() first, and build a new session after."
            )


def _refuse_reparametrised(model: nn.Module) -> None:
    """Before anything is changed: a masked weight that other code computes by now has no state to carry over."""
    for module in model.modules():
        for buffer in masked_weights(module):
            plain_parameter(module, buffer.weight_name)


def _refuse_wrapped(model: nn.Module, verb: str) -> None:
    # inside too: what was compiled goes on with the layers that it has seen
    for name, module in model.named_modules():
        kind = type(module).__name__
        if kind in _WRAPPERS or kind.startswith("FSDP"):
            raise ValueError(
                f"{verb}: expected the plain model, got {name or 'it'} wrapped in {kind}. "
                f"Call {verb} first, then build the optimiser, then wrap or compile."
            )
