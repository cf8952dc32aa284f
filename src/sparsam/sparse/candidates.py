"""Which weights of a model become sparse, how they are stored, and why the others stay dense. Changes nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter

from sparsam.select import select
from sparsam.sparse.allocation import Allocation, check_density, share_out
from sparsam.sparse.layers import ActivatedLinear, SparseLinear
from sparsam.sparse.masked import maskable, masked_weights, reparametrised
from sparsam.sparse.patterns import Block, Pattern, Unstructured
from sparsam.sparse.scores import Score, check_functions, scored
from sparsam.sparse.table import LayerRow, SparsityTable
from sparsam.sparse.views import LayerView, stateless_uniform

__all__ = ["Candidate", "LinearProfile", "Options", "decide", "places", "read_by_attention", "table_of"]

# Last names of modules that turn features into answers: sparse ones cost quality and save little.
_HEADS = ("head", "lm_head", "classifier", "score", "output", "fc_out")
_EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


class LinearTiming(Protocol):
    """Forward and backward of one linear layer, measured."""

    compact_ms: float
    dense_ms: float


class LinearProfile(Protocol):
    """What `sparsify` asks of a measured device profile."""

    def linear(
        self, tokens: int, in_features: int, out_features: int, rows: int, cols: int, density: float, format: str
    ) -> LinearTiming: ...


@dataclass(frozen=True)
class Options:
    """The choices of one `sparsify`; what each means is said there."""

    include: Sequence[str]
    exclude: Sequence[str]
    heads: bool
    embeddings: bool
    allocation: Allocation
    storage: str
    profile: LinearProfile | None
    tokens: int | None
    format: str
    if_slow: str
    seed: int
    score: Score

    def check(self, pattern: Pattern, density: float) -> None:
        if not isinstance(pattern, Pattern):
            raise ValueError(f"pattern: expected a pattern such as Block(32, 32) or Unstructured(), got {pattern!r}.")
        for what, value, allowed in (
            ("storage", self.storage, ("auto", "compact", "masked")),
            ("if_slow", self.if_slow, ("dense", "scatter", "compact")),
            ("format", self.format, ("bf16", "fp32")),
        ):
            if value not in allowed:
                raise ValueError(f"{what}: expected {', '.join(allowed)}, got {value!r}.")
        if self.storage == "compact" and not isinstance(pattern, Block):
            raise ValueError(
                f"storage: expected a Block pattern for compact storage, got {pattern}. Use storage='masked'."
            )
        if self.profile is not None and self.tokens is None:
            raise ValueError(
                "tokens: a profile was given without the number of rows it should time. Pass tokens=batch * length."
            )
        check_functions(score=self.score)
        check_density(density)


@dataclass
class Candidate:
    """One weight matrix of the model, whatever the number of names that it is known by.

    Attributes:
        name: of its layer, the first in the model's order.
        module: the layer.
        weight_name: the weight's name in the layer.
        owners: every (layer, name of the weight in it) that holds this tensor; more than one when weights are tied.
        aliases: further names of the layer itself (one module used in several places).
        tied: names of the other layers that hold this tensor.
        paths: full parameter names of all holders.
    """

    name: str
    module: nn.Module
    weight_name: str
    owners: list[tuple[nn.Module, str]]
    paths: list[str]
    aliases: list[str] = field(default_factory=list)
    tied: list[str] = field(default_factory=list)
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

    @property
    def names(self) -> list[str]:
        """All that a glob may call it."""
        return [self.name, *self.aliases, *self.tied]

    def row(self) -> LayerRow:
        storage, topology, shape = self.storage, self.topology, tuple(self.weight.shape)
        if isinstance(self.module, SparseLinear):
            storage, topology = "compact", self.module.topology
            shape = (self.module.out_features, self.module.in_features)
        elif topology is None:
            masked = (buffer for buffer in masked_weights(self.module) if buffer.weight_name == self.weight_name)
            for buffer in masked:
                storage, topology = "masked", buffer.topology
        units = 0 if topology is None else topology.numel()
        active = 0 if topology is None else int(topology.sum())
        return LayerRow(
            self.name,
            type(self.module).__name__,
            shape,
            storage,
            active / units if units else 1.0,
            active,
            units,
            self.reason,
            self.compact_ms,
            self.dense_ms,
        )


def decide(model: nn.Module, pattern: Pattern, density: float, options: Options) -> list[Candidate]:
    """Every weight matrix of a model, with its storage, its first topology and the reason."""
    options.check(pattern, density)
    candidates = _candidates(model)
    names = [name for candidate in candidates for name in candidate.names]
    included = set(select(names, options.include))
    excluded = set(names) - set(select(names, exclude=options.exclude))
    wanted = []
    for candidate in candidates:
        if excluded.intersection(candidate.names):
            candidate.reason = "excluded"
        elif not included.intersection(candidate.names):
            candidate.reason = "not included"
        else:
            is_read = read_by_attention(model, candidate.module)
            candidate.reason = _obstacle(candidate, pattern, options, candidate.module is model, is_read)
        if not candidate.reason:
            wanted.append(candidate)
    if not wanted:
        return candidates
    views = {candidate.name: _view(candidate, pattern, options.seed) for candidate in wanted}
    densities = share_out(options.allocation, views, density)
    for candidate in wanted:
        candidate.density = densities[candidate.name]
        blocks = isinstance(pattern, Block) and len(candidate.owners) == 1
        is_compact = options.storage == "compact" or (options.storage == "auto" and blocks)
        candidate.storage = "compact" if is_compact else "masked"
        if len(candidate.owners) > 1:
            candidate.reason = f"tied with {', '.join(candidate.tied)}: stored dense, counted once"
        elif is_compact or options.storage == "masked":
            candidate.reason = "asked for"
        else:
            candidate.reason = f"{pattern} is stored dense: no time saved"
        if is_compact and candidate.density == 1.0 and density < 1.0:
            candidate.storage, candidate.reason = "dense", "density 1: nothing to leave out"
        elif options.profile is not None and is_compact and isinstance(pattern, Block):
            _time(candidate, pattern, options.profile, options.tokens or 0, options.format, options.if_slow)
        if candidate.storage != "dense":
            candidate.topology = _first_topology(candidate, pattern, options)
    return candidates


def table_of(model: nn.Module, candidates: Sequence[Candidate]) -> SparsityTable:
    """The table of these weights; everything else the model has is counted as dense."""
    matrices = {id(candidate.weight) for candidate in candidates}
    others = sum(parameter.numel() for parameter in model.parameters() if id(parameter) not in matrices)
    return SparsityTable(tuple(candidate.row() for candidate in candidates), others)


def places(model: nn.Module, module: nn.Module) -> list[tuple[nn.Module, str]]:
    """Every (parent, attribute) at which a module hangs."""
    return [
        (parent, attribute)
        for parent in model.modules()
        for attribute, child in parent._modules.items()
        if child is module
    ]


def _candidates(model: nn.Module) -> list[Candidate]:
    """Every weight matrix once, in the model's order, with all the names it has."""
    by_weight: dict[int, Candidate] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        for weight_name, parameter in module.named_parameters(recurse=False):
            path = f"{name}.{weight_name}".lstrip(".")
            if isinstance(parameter, UninitializedParameter):
                raise ValueError(f"{path}: expected a weight with a shape, got a lazy one. Run the model once before.")
            if parameter.dim() < 2:
                continue
            label = name if weight_name == "weight" or isinstance(module, SparseLinear) else path
            known = by_weight.get(id(parameter))
            if known is None:
                by_weight[id(parameter)] = Candidate(label, module, weight_name, [(module, weight_name)], [path])
                continue
            known.paths.append(path)
            if any(module is owner and weight_name == owned for owner, owned in known.owners):
                known.aliases.append(label)
            else:
                known.owners.append((module, weight_name))
                known.tied.append(label)
    return list(by_weight.values())


def _obstacle(candidate: Candidate, pattern: Pattern, options: Options, is_model: bool, is_read: bool) -> str:
    """Why a weight stays dense, or nothing."""
    kinds = ", ".join(dict.fromkeys(type(module).__name__ for module, _ in candidate.owners))
    modules = [module for module, _ in candidate.owners]
    for module, weight_name in candidate.owners:
        if obstacle := _no_storage(module, weight_name, pattern):
            return obstacle
    if any(isinstance(module, _EMBEDDINGS) for module in modules):
        if not options.embeddings:
            return "embedding"
    elif not options.heads and any(name.rsplit(".", 1)[-1] in _HEADS for name in candidate.names):
        return "output head"
    if isinstance(pattern, Block) and options.storage != "masked":
        if not all(isinstance(module, (nn.Linear, *_EMBEDDINGS)) for module in modules):
            return f"{kinds} has no compact storage: masked storage only, which saves no time"
        if is_model:
            return "the model is this layer itself: put it into nn.Sequential, or use storage='masked'"
        if options.storage == "compact" and len(candidate.owners) > 1:
            return f"tied with {', '.join(candidate.tied)}: masked storage only"
        if len(candidate.owners) == 1 and type(candidate.module) not in (nn.Linear, ActivatedLinear):
            return f"{kinds} has a forward of its own: masked storage only"
        if is_read:
            return "MultiheadAttention reads its weight and never calls it: masked storage only"
        if _hooks(candidate.module):
            return "has hooks, which a layer in its place would lose: remove them, or use storage='masked'"
    down, across = pattern.grid(candidate.shape)
    if down * across < 4:
        return f"fewer than 4 units of {pattern}"
    return ""


def _no_storage(module: nn.Module, weight_name: str, pattern: Pattern) -> str:
    """Why no storage takes a weight, or nothing."""
    if who := reparametrised(module, weight_name):
        return f"reparametrised by {who}: remove that first"
    sparse = (buffer.weight_name for buffer in masked_weights(module))
    if isinstance(module, SparseLinear) or weight_name in sparse:
        return "sparse already"
    if not maskable(module, weight_name):
        return f"{weight_name} of {type(module).__name__} stays dense"
    weight = module.get_parameter(weight_name)
    if not weight.is_floating_point():
        return f"weight of {weight.dtype}: expected floating point"
    if isinstance(module, _EMBEDDINGS) and module.sparse:
        return "embedding with sparse gradients: build it with sparse=False"
    if isinstance(module, _TRANSPOSED) and not isinstance(pattern, Unstructured):
        return f"{type(module).__name__} keeps (in, out) channels, where {pattern} expects (out, in): Unstructured only"
    return ""


def read_by_attention(model: nn.Module, module: nn.Module) -> bool:
    """Whether an attention module reads this layer's weight without calling it: a compact layer would not train."""
    return any(isinstance(parent, nn.MultiheadAttention) for parent, _ in places(model, module))


def _hooks(module: nn.Module) -> bool:
    return any(
        getattr(module, kind)
        for kind in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    )


def _time(candidate: Candidate, pattern: Block, profile: LinearProfile, tokens: int, format: str, if_slow: str) -> None:
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


def _first_topology(candidate: Candidate, pattern: Pattern, options: Options) -> torch.Tensor:
    view, seed = _view(candidate, pattern, options.seed), options.seed
    scores = scored(options.score, view)
    count = pattern.count(view.units, candidate.density)
    ties = stateless_uniform(tuple(scores.shape), seed, 0, candidate.name, scores.device)
    return pattern.choose(scores, count, ties)


def _view(candidate: Candidate, pattern: Pattern, seed: int) -> LayerView:
    """The weight as scores see it before it is sparse: all units active, and a gradient when there is one."""
    weight = candidate.weight.detach()
    if weight.is_meta:
        weight = torch.zeros(weight.shape)
    topology = torch.ones(pattern.grid(candidate.shape), dtype=torch.bool, device=weight.device)
    return LayerView(
        name=candidate.name,
        shape=tuple(weight.shape),
        pattern=pattern,
        topology=topology,
        weight=weight,
        gradient=candidate.weight.grad,
        moments={},
        reduce=lambda entries: pattern.reduce(entries.reshape(candidate.shape)),
        seed=seed,
        step=0,
        growth=None,
    )
