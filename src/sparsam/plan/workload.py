"""What one rank computes and keeps in one step, read off a model and a batch; and its gradients, in DDP's buckets.

Only shapes are looked at: operations and activations come from one forward pass on tensors without content.
Shape letters: B sequences, T tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from sparsam.measure.flops import training_step
from sparsam.sparse.table import SparsityTable

__all__ = ["Activations", "Gradient", "Workload", "buckets_of", "read_workload"]

MIB = 1 << 20


@dataclass(frozen=True)
class Gradient:
    """One parameter, as the exchange and the optimiser see it.

    Attributes:
        name: of the parameter.
        values: entries that are stored, sent and updated.
        dense_values: entries that the dense layer has.
        vector: one dimension; codecs leave it in float32.
        compact: only active blocks are stored.
    """

    name: str
    values: int
    dense_values: int
    vector: bool
    compact: bool = False


@dataclass(frozen=True)
class Activations:
    """Bytes that the forward pass keeps for the backward pass.

    Attributes:
        blocks: number of repeated blocks, one after the other; 0 where the model has none.
        inside: kept inside them, all together.
        outside: kept elsewhere.
        boundary: what one block hands to the next.
    """

    blocks: int
    inside: int
    outside: int
    boundary: int

    def kept(self, every: int | None) -> int:
        """Most bytes at one time, when only the input of each `every` blocks is kept and the rest is computed again."""
        if every is None or self.blocks == 0:
            return self.inside + self.outside
        every = min(every, self.blocks)
        segments = -(-self.blocks // every)
        recomputed = self.inside * every // self.blocks
        return min(segments * self.boundary + recomputed, self.inside) + self.outside


@dataclass(frozen=True)
class Workload:
    """One rank's step.

    Attributes:
        gradients: in the order in which a backward pass makes them.
        flops: forward and backward, by the module that owns the parameters; what has no parameters under "".
        compact: modules whose operations block-sparse kernels do.
        dense_flops: of the same model without sparsity.
        activations: of one micro-batch.
        tokens: B T, of one step.
    """

    gradients: tuple[Gradient, ...]
    flops: Mapping[str, float]
    compact: frozenset[str]
    dense_flops: float
    activations: Activations
    tokens: int

    @property
    def values(self) -> int:
        return sum(gradient.values for gradient in self.gradients)

    @property
    def dense_values(self) -> int:
        return sum(gradient.dense_values for gradient in self.gradients)

    @property
    def rewired_values(self) -> list[int]:
        """Sizes of the dense gradients that ranks average when a topology changes, a layer at a time."""
        return [gradient.dense_values for gradient in self.gradients if gradient.compact]

    @property
    def density(self) -> float:
        """Share of all parameters that is stored."""
        return self.values / self.dense_values

    def sparse(self, table: SparsityTable, kept_bytes_per_weight: int = 2) -> Workload:
        """The same with layers made sparse as a table says. Masked layers save neither time nor bytes.

        Args:
            table: what `sparsify` did or `inspect` would do with the model that this was read off.
            kept_bytes_per_weight: what a forward pass keeps of each weight for the backward pass (a cast to 16 bits).
        """
        density = {row.name: row.density for row in table.rows if row.storage == "compact"}
        gradients = tuple(
            replace(one, values=round(one.dense_values * density[owner]), compact=True)
            if (owner := _owner(one.name)) in density and not one.vector
            else one
            for one in self.gradients
        )
        flops = {name: count * density.get(name, 1.0) for name, count in self.flops.items()}
        saved = kept_bytes_per_weight * (self.values - sum(one.values for one in gradients))
        return replace(
            self,
            gradients=gradients,
            flops=flops,
            compact=frozenset(density),
            activations=replace(self.activations, inside=max(0, self.activations.inside - saved)),
        )


def read_workload(
    build: Callable[[], nn.Module], batch: int, context: int, format: str = "bf16", fake: bool = True
) -> Workload:
    """Reads a language model's step off its shapes.

    Args:
        build: makes the dense model; it takes int64 (B, T) and gives logits.
        batch, context: B and T.
        format: "bf16" counts activations as autocast keeps them, "fp32" without.
        fake: builds the model without memory for its weights; False for models that are read from files.
    """
    # the weights of a model read from files are there; nothing is computed with them
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode if fake else nullcontext():
        model = build().train()
    with mode:
        tokens = torch.zeros(batch, context, dtype=torch.int64)
        flops = training_step(model, tokens)
        activations = _activations(model, tokens, format)
    seen: set[int] = set()
    gradients = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and id(parameter) not in seen:
            seen.add(id(parameter))
            gradients.append(Gradient(name, parameter.numel(), parameter.numel(), parameter.dim() < 2))
    counted = {name: dense for name, (dense, _, _) in flops.layers.items()}
    return Workload(tuple(reversed(gradients)), counted, frozenset(), flops.dense, activations, batch * context)


def buckets_of(
    gradients: Iterable[Gradient], first_bytes: int = MIB, bytes_cap: int = 25 * MIB, bytes_per_value: int = 4
) -> list[list[Gradient]]:
    """Buckets as DDP makes them after its first step: in the order of the backward pass, each closed by the gradient
    that reaches the limit; the first is small, so that the exchange can begin early."""
    buckets: list[list[Gradient]] = [[]]
    size, limit = 0, first_bytes
    for gradient in gradients:
        buckets[-1].append(gradient)
        size += bytes_per_value * gradient.values
        if size >= limit:
            buckets.append([])
            size, limit = 0, bytes_cap
    return [bucket for bucket in buckets if bucket]


def _owner(parameter: str) -> str:
    return parameter.rpartition(".")[0]


def _activations(model: nn.Module, tokens: Tensor, format: str) -> Activations:
    """Runs a forward pass and counts each storage once that autograd keeps, weights left out."""
    blocks = _repeated(model)
    own = {parameter.untyped_storage()._cdata for parameter in (*model.parameters(), *model.buffers())}
    kept: dict[int, tuple[Tensor, bool]] = {}
    boundary = 0
    depth = 0

    def keep(tensor: Tensor) -> Tensor:
        key = tensor.untyped_storage()._cdata
        if key not in own:
            kept.setdefault(key, (tensor, depth > 0))
        return tensor

    def enter(*_: Any) -> None:
        nonlocal depth
        depth += 1

    def leave(_module: nn.Module, _inputs: Any, output: Any) -> None:
        nonlocal depth, boundary
        depth -= 1
        boundary = max(boundary, sum(tensor.nbytes for tensor in _tensors(output)))

    handles = [handle for block in blocks for handle in _hooked(block, enter, leave)]
    try:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), _autocast(format):
            loss = nn.functional.cross_entropy(model(tokens).float().flatten(0, 1), tokens.flatten())
    finally:
        for handle in handles:
            handle.remove()
    sizes = [(tensor.untyped_storage().nbytes(), inside) for tensor, inside in kept.values()]
    del loss
    inside, outside = (sum(size for size, within in sizes if within is where) for where in (True, False))
    return Activations(len(blocks), inside, outside, boundary)


def _repeated(model: nn.Module) -> list[nn.Module]:
    """The longest list of blocks of one kind."""
    lists = [list(module) for module in model.modules() if isinstance(module, nn.ModuleList)]
    alike = [blocks for blocks in lists if len({type(block) for block in blocks}) == 1]
    return max(alike, key=lambda blocks: sum(p.numel() for block in blocks for p in block.parameters()), default=[])


def _hooked(module: nn.Module, enter: Any, leave: Any) -> Iterator[Any]:
    yield module.register_forward_pre_hook(enter)
    yield module.register_forward_hook(leave)


def _tensors(output: Any) -> Iterator[Tensor]:
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, tuple | list):
        for one in output:
            yield from _tensors(one)


@contextmanager
def _autocast(format: str) -> Iterator[None]:
    with torch.autocast("cpu", torch.bfloat16, enabled=format == "bf16"):
        yield
