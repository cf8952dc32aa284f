"""One verb on a model: make it sparse, look at what would be made sparse, make it dense again."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import nn
from torch.nn.utils import parametrize

from sparsam.select import select
from sparsam.sparse.allocation import Allocation, uniform
from sparsam.sparse.layers import ActivatedLinear, SparseLinear
from sparsam.sparse.masked import MASKABLE, add_topology, masked_weights, remove_topology
from sparsam.sparse.moments import check_optimizer, swap_parameter
from sparsam.sparse.patterns import Block, Pattern, top_k
from sparsam.sparse.table import LayerRow, SparsityTable
from sparsam.sparse.views import stateless_uniform

__all__ = ["LinearProfile", "compact", "densify", "freeze", "inspect", "sparsify", "unfreeze"]

# Last names of modules that turn features into answers: sparse ones cost quality and save little.
_HEADS = ("head", "lm_head", "classifier", "score", "output", "fc_out")


class LinearTiming(Protocol):
    """Forward and backward of one linear layer, measured."""

    compact_ms: float
    dense_ms: float


class LinearProfile(Protocol):
    """What `sparsify` asks of a measured device profile."""

    def linear(
        self, tokens: int, in_features: int, out_features: int, rows: int, cols: int, density: float, format: str
    ) -> LinearTiming: ...


@dataclass
class _Candidate:
    """One weight matrix of the model and every place that it is seen at."""

    name: str
    module: nn.Module
    weight_name: str
    places: list[tuple[nn.Module, str]]
    tied: list[str]
    storage: str = "dense"
    density: float = 1.0
    reason: str = ""
    compact_ms: float | None = None
    dense_ms: float | None = None
    product: Literal["kernel", "dense"] = "kernel"
    topology: torch.Tensor | None = None

    @property
    def weight(self) -> nn.Parameter:
        return self.module.get_parameter(self.weight_name)

    @property
    def shape(self) -> tuple[int, int]:
        return self.weight.shape[0], self.weight.shape[1:].numel()

    def row(self, pattern: Pattern) -> LayerRow:
        units = 0 if self.topology is None else self.topology.numel()
        active = 0 if self.topology is None else int(self.topology.sum())
        return LayerRow(
            self.name,
            type(self.module).__name__,
            tuple(self.weight.shape),
            self.storage,
            active / units if units else 1.0,
            active,
            units,
            self.reason,
            self.compact_ms,
            self.dense_ms,
        )


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
) -> SparsityTable:
    """Makes a model's eligible layers sparse, in place. The first topology keeps the largest magnitudes.

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
            for blocks and masked for everything else.
        sparse_fan_in: for untrained weights: multiply by density^-0.5, which keeps the outputs' variance.
        headroom: share of further slots in compact storage, for methods that move density between layers.
        profile: a measured device profile; needs `tokens`.
        tokens: rows of a layer's input in one forward pass.
        format: "bf16" or "fp32": the number format in which the profile is asked.
        if_slow: what to do where the profile says that compact is not faster: leave the layer "dense", or store it
            compact and "scatter" it for a dense product, or use the "compact" product all the same.
        optimizer: one that exists already; its state is carried over to the new parameters.
        seed: orders equal magnitudes.

    Returns:
        The table of every weight matrix: what was done, and why. `print` it.

    Raises:
        ValueError: the model is wrapped, no layer is eligible, or an argument does not fit.
    """
    candidates = _decide(
        model,
        pattern,
        density,
        include,
        exclude,
        heads,
        embeddings,
        allocation,
        storage,
        profile,
        tokens,
        format,
        if_slow,
        seed,
    )
    if not any(candidate.topology is not None for candidate in candidates):
        reasons = "; ".join(f"{candidate.name}: {candidate.reason}" for candidate in candidates[:4])
        raise ValueError(f"sparsify: no layer was made sparse ({reasons or 'the model has no weight matrix'}).")
    if optimizer is not None:
        check_optimizer(optimizer)
    table = _table(model, candidates, pattern)
    for candidate in candidates:
        if candidate.topology is not None:
            _apply(candidate, pattern, sparse_fan_in, headroom, optimizer)
    _keep_ties(model, [candidate for candidate in candidates if candidate.tied and candidate.storage == "masked"])
    return table


def inspect(model: nn.Module, pattern: Pattern, density: float, **options: Any) -> SparsityTable:
    """The table that `sparsify` with the same arguments would return; the model stays as it is."""
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
    }
    unknown = set(options) - set(defaults)
    if unknown:
        raise ValueError(f"inspect: expected options of {', '.join(defaults)}, got {', '.join(sorted(unknown))}.")
    return _table(model, _decide(model, pattern, density, **(defaults | options)), pattern)


def densify(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
    """Turns every sparse layer back into the ordinary one, in place: same names, same order, same weights.

    Args:
        model: a sparse model, not wrapped.
        optimizer: its state is carried over, zero where there was no unit.
    """
    _refuse_wrapped(model, "densify")
    for name, module in list(model.named_modules()):
        if isinstance(module, SparseLinear):
            dense = module.to_dense()
            for parent, attribute in _places(model, module):
                setattr(parent, attribute, dense)
            _swap(optimizer, module.values, dense.weight, module.scatter)
            if module.bias is not None:
                _swap(optimizer, module.bias, dense.bias, torch.clone)
        for buffer in masked_weights(module):
            remove_topology(module, buffer.weight_name)
    model._load_state_dict_post_hooks = type(model._load_state_dict_post_hooks)(
        (key, hook)
        for key, hook in model._load_state_dict_post_hooks.items()
        if not (isinstance(hook, functools.partial) and hook.func is _retie)
    )


def compact(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
    """Masked block layers become compact, compact ones lose their dead slots; the optimiser's state moves along.

    This makes new Parameters, so it belongs outside DDP, FSDP and torch.compile.
    """
    _refuse_wrapped(model, "compact")
    for module in list(model.modules()):
        buffers = masked_weights(module)
        if isinstance(module, SparseLinear) and bool((module.block_row < 0).any()):
            smaller = SparseLinear.from_dense(
                module.to_dense(), module.topology, module.pattern, product=module.product
            )
            old: nn.Parameter = module.values
            convert = _through_dense(module.scatter, smaller.gather)
        elif type(module) in (nn.Linear, ActivatedLinear) and buffers and isinstance(buffers[0].pattern, Block):
            topology, pattern = buffers[0].topology, buffers[0].pattern
            smaller = SparseLinear.from_dense(module, topology, pattern)  # type: ignore[arg-type]
            old, convert = buffers[0].parameter, smaller.gather
        else:
            continue
        _swap(optimizer, old, smaller.values, convert)
        if smaller.bias is not None:
            _swap(optimizer, module.bias, smaller.bias, torch.clone)  # type: ignore[arg-type]
        for parent, attribute in _places(model, module):
            setattr(parent, attribute, smaller)


def freeze(model: nn.Module) -> None:
    """Puts a model in its frozen inference state: eval mode, and weights packed once at the first forward."""
    model.eval()
    for module in model.modules():
        if isinstance(module, SparseLinear):
            module.freeze()


def unfreeze(model: nn.Module) -> None:
    """Leaves the frozen inference state; the mode stays eval until `model.train()`."""
    for module in model.modules():
        if isinstance(module, SparseLinear):
            module.unfreeze()


def _decide(
    model: nn.Module,
    pattern: Pattern,
    density: float,
    include: Sequence[str],
    exclude: Sequence[str],
    heads: bool,
    embeddings: bool,
    allocation: Allocation,
    storage: str,
    profile: LinearProfile | None,
    tokens: int | None,
    format: str,
    if_slow: str,
    seed: int,
) -> list[_Candidate]:
    _refuse_wrapped(model, "sparsify")
    for what, value, allowed in (
        ("storage", storage, ("auto", "compact", "masked")),
        ("if_slow", if_slow, ("dense", "scatter", "compact")),
    ):
        if value not in allowed:
            raise ValueError(f"{what}: expected {', '.join(allowed)}, got {value!r}.")
    if storage == "compact" and not isinstance(pattern, Block):
        raise ValueError(f"storage: expected a Block pattern for compact storage, got {pattern}. Use storage='masked'.")
    if profile is not None and tokens is None:
        raise ValueError(
            "tokens: a profile was given without the number of rows it should time. Pass tokens=batch * length."
        )
    if not 0.0 < density <= 1.0:
        raise ValueError(
            f"density: expected a share of active units in (0, 1], got {density}. Sparsity is 1 - density."
        )
    candidates = list(_candidates(model))
    chosen = set(select([candidate.name for candidate in candidates], include, exclude))
    wanted = []
    for candidate in candidates:
        candidate.reason = _obstacle(candidate, chosen, exclude, pattern, storage, heads, embeddings)
        if not candidate.reason:
            wanted.append(candidate)
    if not wanted:
        return candidates
    densities = allocation({candidate.name: tuple(candidate.weight.shape) for candidate in wanted}, density)
    for candidate in wanted:
        candidate.density = densities[candidate.name]
        is_compact = storage == "compact" or (storage == "auto" and isinstance(pattern, Block) and not candidate.tied)
        candidate.storage = "compact" if is_compact else "masked"
        candidate.reason = (
            "asked for" if is_compact or storage == "masked" else f"{pattern} is stored dense: no time saved"
        )
        if candidate.tied:
            candidate.reason = f"tied with {', '.join(candidate.tied)}: stored dense, counted once"
        if profile is not None and is_compact and isinstance(pattern, Block):
            _time(candidate, pattern, profile, tokens or 0, format, if_slow)
        if candidate.storage != "dense":
            candidate.topology = _first_topology(candidate, pattern, seed)
    return candidates


def _obstacle(
    candidate: _Candidate,
    chosen: set[str],
    exclude: Sequence[str],
    pattern: Pattern,
    storage: str,
    heads: bool,
    embeddings: bool,
) -> str:
    """Why a weight stays dense, or nothing."""
    module = candidate.module
    kind = type(module).__name__
    if candidate.name not in chosen:
        return "excluded" if exclude else "not included"
    if masked_weights(module) or isinstance(module, SparseLinear):
        return "sparse already"
    if parametrize.is_parametrized(module, candidate.weight_name) or hasattr(module, candidate.weight_name + "_g"):
        return "reparametrised (weight_norm or spectral_norm): remove that first"
    maskable = next((names for type_, names in MASKABLE.items() if isinstance(module, type_)), ())
    if candidate.weight_name not in maskable:
        return f"{kind} stays dense"
    if isinstance(module, nn.Embedding):
        return "" if embeddings else "embedding"
    if not heads and candidate.name.rsplit(".", 1)[-1] in _HEADS:
        return "output head"
    if type(module) not in (nn.Linear, ActivatedLinear) and isinstance(pattern, Block) and storage != "masked":
        return f"{kind} has a forward of its own: masked storage only"
    down, across = pattern.grid(candidate.shape)
    if down * across < 4:
        return f"fewer than 4 units of {pattern}"
    return ""


def _time(
    candidate: _Candidate, pattern: Block, profile: LinearProfile, tokens: int, format: str, if_slow: str
) -> None:
    """Lets measurement decide between compact and dense."""
    out_features, in_features = candidate.shape
    timing = profile.linear(tokens, in_features, out_features, pattern.rows, pattern.cols, candidate.density, format)
    candidate.compact_ms, candidate.dense_ms = timing.compact_ms, timing.dense_ms
    if timing.compact_ms < timing.dense_ms:
        candidate.reason = f"{timing.dense_ms / timing.compact_ms:.1f}x faster than dense"
    elif if_slow == "dense":
        candidate.storage, candidate.density = "dense", 1.0
        candidate.reason = "compact measured slower: left dense"
    elif if_slow == "scatter":
        candidate.product = "dense"
        candidate.reason = "compact measured slower: scattered for a dense product"
    else:
        candidate.reason = "compact measured slower: used as asked"


def _first_topology(candidate: _Candidate, pattern: Pattern, seed: int) -> torch.Tensor:
    weight = candidate.weight.detach().reshape(candidate.shape)
    if weight.is_meta:
        weight = torch.zeros(candidate.shape)
    scores = pattern.reduce(weight.float().abs())
    count = max(1, round(candidate.density * scores.numel()))
    ties = stateless_uniform(tuple(scores.shape), seed, 0, candidate.name, scores.device)
    return pattern.choose(scores, count, ties)


def _apply(
    candidate: _Candidate,
    pattern: Pattern,
    sparse_fan_in: bool,
    headroom: float,
    optimizer: torch.optim.Optimizer | None,
) -> None:
    assert candidate.topology is not None
    module, old = candidate.module, candidate.weight
    if candidate.storage == "masked":
        add_topology(module, candidate.weight_name, candidate.topology, pattern)
        stored: nn.Parameter = old
    else:
        assert isinstance(module, nn.Linear) and isinstance(pattern, Block)
        units, active = candidate.topology.numel(), int(candidate.topology.sum())
        slots = min(units, active + round(active * headroom))
        sparse = SparseLinear.from_dense(module, candidate.topology, pattern, slots=slots, product=candidate.product)
        for parent, attribute in candidate.places:
            setattr(parent, attribute, sparse)
        _swap(optimizer, old, sparse.values, sparse.gather)
        if sparse.bias is not None:
            _swap(optimizer, module.bias, sparse.bias, torch.clone)
        stored = sparse.values
    if sparse_fan_in:
        with torch.no_grad():
            stored.mul_(candidate.density**-0.5)


def _candidates(model: nn.Module) -> Iterator[_Candidate]:
    """Every weight matrix once, in the model's order, with all the places and names it has."""
    seen: dict[int, _Candidate] = {}
    for name, module in model.named_modules():
        for weight_name, parameter in module.named_parameters(recurse=False):
            if parameter.dim() < 2:
                continue
            label = name if weight_name == "weight" else f"{name}.{weight_name}".lstrip(".")
            if id(parameter) in seen:
                seen[id(parameter)].tied.append(label)
            else:
                seen[id(parameter)] = _Candidate(label, module, weight_name, _places(model, module), [])
    # a linear tied to an embedding is one tensor: whichever of the two can be masked stands for both
    yield from seen.values()


def _places(model: nn.Module, module: nn.Module) -> list[tuple[nn.Module, str]]:
    return [
        (parent, attribute)
        for parent in model.modules()
        for attribute, child in parent._modules.items()
        if child is module
    ]


def _table(model: nn.Module, candidates: Sequence[_Candidate], pattern: Pattern) -> SparsityTable:
    matrices = {id(candidate.weight) for candidate in candidates}
    others = sum(parameter.numel() for parameter in model.parameters() if id(parameter) not in matrices)
    return SparsityTable(tuple(candidate.row(pattern) for candidate in candidates), others)


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


def _keep_ties(model: nn.Module, tied: Sequence[_Candidate]) -> None:
    """Parameters that are one tensor stay one through load_state_dict(assign=True), which would part them."""
    groups = [[_parameter_path(candidate.name, candidate), *candidate.tied] for candidate in tied]
    if groups:
        model.register_load_state_dict_post_hook(functools.partial(_retie, groups))


def _parameter_path(name: str, candidate: _Candidate) -> str:
    return name if name.endswith(candidate.weight_name) else f"{name}.{candidate.weight_name}".lstrip(".")


def _retie(groups: list[list[str]], model: nn.Module, _: object) -> None:
    for first, *others in groups:
        parameter = model.get_parameter(first)
        for other in others:
            path = other if other in dict(model.named_parameters(remove_duplicate=False)) else f"{other}.weight"
            owner, _dot, name = path.rpartition(".")
            setattr(model.get_submodule(owner), name, parameter)


def _refuse_wrapped(model: nn.Module, verb: str) -> None:
    kind = type(model).__name__
    if kind in ("DistributedDataParallel", "FullyShardedDataParallel", "OptimizedModule") or kind.startswith("FSDP"):
        raise ValueError(
            f"{verb}: expected the plain model, got it wrapped in {kind}. "
            f"Call {verb} first, then build the optimiser, then wrap or compile."
        )
