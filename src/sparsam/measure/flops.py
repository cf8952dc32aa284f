"""Counts the floating-point operations of one training step from shapes: figures of kind `modelled`.

Products only (linear, attention, batched products, convolution); element-wise work is not counted, nor is time: a count
that falls says nothing about time until a clock agrees.
Shape letters: T rows (tokens), K in, N out, B batch, H heads, D head size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["StepFlops", "attention", "linear", "training_step"]

# forward, gradient of the input, gradient of the weights
_PASSES = 3


@dataclass(frozen=True)
class StepFlops:
    """Operations of one training step: forward plus twice as many for the backward.

    Attributes:
        dense: all layers as if they were dense: what the dense twin does.
        computed: what is really multiplied. Masked layers count in full, because their zeros are multiplied too.
        on_paper: what would be multiplied if every zero were skipped.
        layers: module name -> (dense, computed, on_paper) of that module alone.
    """

    dense: float
    computed: float
    on_paper: float
    layers: dict[str, tuple[float, float, float]] = field(default_factory=dict)

    def times(self, count: int) -> StepFlops:
        """Of so many micro-batches."""
        layers = {name: (count * d, count * c, count * p) for name, (d, c, p) in self.layers.items()}
        return StepFlops(count * self.dense, count * self.computed, count * self.on_paper, layers)


def linear(tokens: int, in_features: int, out_features: int, density: float = 1.0) -> float:
    """Operations of one product ``x W^T``: 2 T K N times the share of weights that exist."""
    return 2.0 * tokens * in_features * out_features * density


def attention(
    batch: int, heads: int, queries: int, keys: int, head_size: int, causal: bool, value_size: int | None = None
) -> float:
    """Operations of the two products of softmax attention, forward.

    Args:
        batch, heads, queries, keys, head_size: B, H, T of the queries, T of the keys, D.
        causal: only the pairs of a query and a key not later than it are counted.
        value_size: D of the values when it differs.
    """
    pairs = float(queries * keys)
    if causal:
        pairs = queries * (queries + 1) / 2 if queries == keys else pairs / 2
    return 2.0 * batch * heads * pairs * (head_size + (value_size or head_size))


def training_step(model: nn.Module, *inputs: Any, **keywords: Any) -> StepFlops:
    """Counts one training step by running one forward and reading the shapes of its products.

    The forward runs without gradients and in evaluation mode, on random numbers of its own: the model, its statistics
    and the global random state are left as they were.

    Args:
        model: not compiled (pass the module that was given to ``torch.compile``).
        inputs, keywords: one batch as the training step passes it.

    Returns:
        `StepFlops` for this batch; the backward is counted as twice the forward.
    """
    modes = [(module, module.training) for module in model.modules()]
    counter = _Counter()
    try:
        model.eval()
        with torch.no_grad(), torch.random.fork_rng(devices=[]), _hooks(model, counter), counter:
            model(*inputs, **keywords)
    finally:
        for module, training in modes:
            module.training = training
    layers = {name: (_PASSES * d, _PASSES * c, _PASSES * p) for name, (d, c, p) in counter.layers.items()}
    dense, computed, on_paper = (sum(row[i] for row in layers.values()) for i in range(3))
    return StepFlops(dense, computed, on_paper, layers)


class _Counter(TorchDispatchMode):
    """Adds up what products it sees; linear layers are added by their hooks and are silent in here."""

    def __init__(self) -> None:
        super().__init__()
        self.layers: dict[str, tuple[float, float, float]] = {}
        self.path: list[str] = []
        self.inside_linear = 0

    def add(self, name: str, dense: float, computed: float, on_paper: float) -> None:
        before = self.layers.get(name, (0.0, 0.0, 0.0))
        self.layers[name] = (before[0] + dense, before[1] + computed, before[2] + on_paper)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not self.inside_linear:
            rule = _RULES.get(func._schema.name) or (_sdpa if "scaled_dot_product" in func._schema.name else None)
            if rule is not None:
                flops = rule(_named(func, args, kwargs or {}), out)
                self.add(self.path[-1] if self.path else "", flops, flops, flops)
        return out


@contextmanager
def _hooks(model: nn.Module, counter: _Counter) -> Iterator[None]:
    handles = []

    def enter(name: str, is_linear: bool) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any) -> None:
            counter.path.append(name)
            counter.inside_linear += is_linear

        return hook

    def leave(is_linear: bool) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            name = counter.path.pop()
            if is_linear:
                counter.inside_linear -= 1
                # A parent that is itself linear-like (a wrapper) counts for its children.
                if counter.inside_linear == 0 and isinstance(output, Tensor):
                    counter.add(name, *_linear_module(module, output.numel() // max(1, output.shape[-1])))

        return hook

    try:
        for name, module in model.named_modules():
            is_linear = _is_linear(module)
            handles.append(module.register_forward_pre_hook(enter(name, is_linear)))
            handles.append(module.register_forward_hook(leave(is_linear)))
        yield
    finally:
        for handle in handles:
            handle.remove()


def _is_linear(module: nn.Module) -> bool:
    # By shape, not by class: the compact layer lives in a layer of the house above this one.
    return all(isinstance(getattr(module, name, None), int) for name in ("in_features", "out_features"))


def _linear_module(module: Any, tokens: int) -> tuple[float, float, float]:
    dense = linear(tokens, module.in_features, module.out_features)
    if isinstance(getattr(module, "values", None), Tensor):
        live = int((module.block_row >= 0).sum())
        _, rows, cols = module.values.shape
        sparse = 2.0 * tokens * live * rows * cols
        return dense, dense if getattr(module, "product", "kernel") == "dense" else sparse, sparse
    topology = getattr(module, "weight_topology", None)  # masked storage
    if isinstance(topology, Tensor) and topology.dtype == torch.bool and topology.numel():
        return dense, dense, dense * float(topology.float().mean())
    return dense, dense, dense


def _named(func: Any, args: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    names = [argument.name for argument in func._schema.arguments]
    return {**dict(zip(names, args, strict=False)), **kwargs}


def _product(left: Tensor, right: Tensor) -> float:
    return 2.0 * left.numel() * right.shape[-1]


def _sdpa(given: dict[str, Any], out: Any) -> float:
    query, key, value = given["query"], given["key"], given["value"]
    batch, heads, queries, size = query.shape
    return attention(
        batch, heads, queries, key.shape[-2], size, bool(given.get("is_causal", False)), value_size=value.shape[-1]
    )


def _own_attention(given: dict[str, Any], out: Any) -> float:
    batch, heads, queries, size = given["q"].shape
    return attention(batch, heads, queries, given["k"].shape[-2], size, bool(given["causal"]))


def _own_self_attention(given: dict[str, Any], out: Any) -> float:
    batch, tokens, _, heads, size = given["qkv"].shape
    return attention(batch, heads, tokens, tokens, size, bool(given["causal"]))


def _convolution(given: dict[str, Any], out: Tensor) -> float:
    weight: Tensor = given["weight"]
    if given.get("transposed"):
        return 2.0 * float(given["input"].numel()) * float(math.prod(weight.shape[1:]))
    return 2.0 * out.numel() * float(math.prod(weight.shape[1:]))


_RULES: dict[str, Callable[[dict[str, Any], Any], float]] = {
    "aten::mm": lambda given, out: _product(given["self"], given["mat2"]),
    "aten::bmm": lambda given, out: _product(given["self"], given["mat2"]),
    "aten::addmm": lambda given, out: _product(given["mat1"], given["mat2"]),
    "aten::baddbmm": lambda given, out: _product(given["batch1"], given["batch2"]),
    "aten::convolution": _convolution,
    "sparsam::attention": _own_attention,
    "sparsam::self_attention": _own_self_attention,
}
