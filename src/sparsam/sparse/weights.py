"""Every sparse weight of a model behind one interface, whichever way it is stored: what parts and methods work on."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from sparsam.session import Rewire
from sparsam.shards import whole
from sparsam.sparse.layers import SparseLinear
from sparsam.sparse.masked import TopologyBuffer, masked_weights, plain_parameter
from sparsam.sparse.patterns import Pattern

__all__ = ["CompactWeight", "MaskedWeight", "SparseWeight", "plain_modules", "sparse_weights"]

# what torch.compile, activation checkpointing and FSDP put between a module and its name
_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")


class SparseWeight(ABC):
    """One weight with a topology. "Entries" are tensors of the stored parameter's shape, under FSDP2 sharded as it is;
    topologies, grids and what a rewire returns are whole on every rank."""

    name: str
    module: nn.Module
    # whether what a probe collects is this rank's sum over the window; a masked weight's gradient is averaged already
    probe_is_local: bool
    # whether the parameter has entries for inactive units too
    all_weights: bool
    # whether one forward pass may use the weight several times, so that only dense gradients add up with their signs
    shared: bool = False

    @property
    @abstractmethod
    def parameter_name(self) -> str:
        """Name of the parameter inside the module."""

    @property
    @abstractmethod
    def pattern(self) -> Pattern: ...

    @property
    @abstractmethod
    def topology(self) -> torch.Tensor:
        """bool grid, True = active unit."""

    @property
    @abstractmethod
    def dense_shape(self) -> tuple[int, int]:
        """(N, K) of the weight that the grid lies over."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the dense weight, kernel sizes of a convolution included."""
        return self.dense_shape

    @property
    @abstractmethod
    def active(self) -> torch.Tensor:
        """bool, broadcastable to the parameter: entries of active units."""

    @property
    @abstractmethod
    def buffers(self) -> tuple[torch.Tensor, ...]:
        """The tensors that hold the topology."""

    @abstractmethod
    def reduce(self, entries: torch.Tensor) -> torch.Tensor:
        """Entries -> float32 grid, the mean over each unit."""

    @abstractmethod
    def rewire(self, topology: torch.Tensor) -> torch.Tensor:
        """Applies a topology; returns which entries begin anew (bool, broadcastable to the parameter)."""

    @abstractmethod
    def open_probe(self, dense: bool) -> None:
        """From here on, backwards also collect the gradient of units that do not exist.

        Args:
            dense: collect the whole dense gradient (exact over several micro-batches and ranks) instead of the mean
                |gradient| per unit of each backward.
        """

    @abstractmethod
    def close_probe(self) -> torch.Tensor | None:
        """What was collected: the dense gradient (N, K) or the float32 grid, zero when no backward came through here;
        None when no probe was open."""

    def buffers_changed(self) -> None:  # noqa: B027 (a seam)
        """Says that what `buffers` hold was written to."""

    def holds(self, parameter: nn.Parameter) -> bool:
        """Whether this parameter is still the weight, and sparse."""
        return self.module._parameters.get(self.parameter_name) is parameter

    def hold(self, held: bool) -> None:  # noqa: B027 (a seam)
        """Tells the module whether a training loop holds its parameter."""

    def keep_zeros(self) -> None:  # noqa: B027 (a seam)
        """Sets what the optimiser, weight decay or a load may have written outside the topology to zero."""

    def keep_gradient_zeros(self) -> None:  # noqa: B027 (a seam)
        """Sets gradients outside the topology to zero."""

    @property
    def parameter(self) -> nn.Parameter:
        return plain_parameter(self.module, self.parameter_name)

    def apply(self, topology: torch.Tensor) -> Rewire | None:
        """Rewires when the topology is a new one and says what changed."""
        before = self.topology.clone()
        if topology.shape != before.shape or topology.dtype != torch.bool:
            raise ValueError(
                f"{self.name}: expected a bool topology of {tuple(before.shape)} from the method, "
                f"got {topology.dtype} of {tuple(topology.shape)}."
            )
        if torch.equal(before, topology):
            return None
        new_entries = self.rewire(topology)
        return Rewire(
            self.name, self.module, self.parameter, topology, before & ~topology, topology & ~before, new_entries
        )


class CompactWeight(SparseWeight):
    """The blocks of a SparseLinear."""

    probe_is_local = True
    all_weights = False

    def __init__(self, name: str, module: SparseLinear, shared: bool = False) -> None:
        self.name, self.module, self.shared = name, module, shared
        self.layer = module

    @property
    def parameter_name(self) -> str:
        return "values"

    @property
    def pattern(self) -> Pattern:
        return self.layer.pattern

    @property
    def topology(self) -> torch.Tensor:
        return self.layer.topology

    @property
    def dense_shape(self) -> tuple[int, int]:
        return self.layer.out_features, self.layer.in_features

    @property
    def active(self) -> torch.Tensor:
        # dead slots and padding are no weights
        layer = self.layer
        height = (layer.out_features - layer.block_row * layer.pattern.rows) * (layer.block_row >= 0)
        width = layer.in_features - layer.block_col * layer.pattern.cols
        down, across = (torch.arange(size, device=height.device) for size in (layer.pattern.rows, layer.pattern.cols))
        return (down < height[:, None])[:, :, None] & (across < width[:, None])[:, None, :]

    @property
    def buffers(self) -> tuple[torch.Tensor, ...]:
        return self.layer.block_row, self.layer.block_col

    def buffers_changed(self) -> None:
        self.layer.rebuild_index()

    def reduce(self, entries: torch.Tensor) -> torch.Tensor:
        # padding holds zeros: the sum is right as it is, the mean counts what lies inside
        entries = entries.float()
        layer = self.layer
        live = layer.block_row >= 0
        row, col = layer.block_row[live].long(), layer.block_col[live].long()
        rows, cols = layer.pattern.rows, layer.pattern.cols
        height = (layer.out_features - row * rows).clamp(max=rows)
        width = (layer.in_features - col * cols).clamp(max=cols)
        # under FSDP2 one number a slot is gathered, not its weights
        sums = whole(entries.sum((1, 2)))
        grid = sums.new_zeros(layer.grid)
        grid[row, col] = sums[live] / (height * width)
        return grid

    def rewire(self, topology: torch.Tensor) -> torch.Tensor:
        return self.layer.rewire(topology)[:, None, None]

    def open_probe(self, dense: bool) -> None:
        shape = self.dense_shape if dense or self.layer.product == "dense" else self.layer.grid
        probe = self.layer.probe
        if probe is not None and (probe.shape == shape or probe.grad is not None):
            return
        # one stored zero seen as a matrix: the gradient is what takes memory, and only on this step
        probe = torch.zeros((), dtype=torch.float32, device=self.parameter.device).expand(shape)
        self.layer.probe = probe.requires_grad_()

    def close_probe(self) -> torch.Tensor | None:
        probe, self.layer.probe = self.layer.probe, None
        if probe is None or probe.grad is not None:
            return None if probe is None else probe.grad
        return torch.zeros_like(probe, memory_format=torch.contiguous_format, requires_grad=False)

    def hold(self, held: bool) -> None:
        self.layer.attached = held


class MaskedWeight(SparseWeight):
    """A dense weight with a topology beside it."""

    probe_is_local = False
    all_weights = True

    def __init__(self, name: str, buffer: TopologyBuffer) -> None:
        self.name, self.module = name, buffer.module
        self.buffer = buffer

    @property
    def parameter_name(self) -> str:
        return self.buffer.weight_name

    @property
    def parameter(self) -> nn.Parameter:
        return self.buffer.parameter

    @property
    def pattern(self) -> Pattern:
        return self.buffer.pattern

    @property
    def topology(self) -> torch.Tensor:
        return self.buffer.topology

    @property
    def dense_shape(self) -> tuple[int, int]:
        shape = self.parameter.shape
        return shape[0], math.prod(shape[1:])

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.parameter.shape)

    @property
    def active(self) -> torch.Tensor:
        return self.buffer.active

    @property
    def buffers(self) -> tuple[torch.Tensor, ...]:
        return (self.topology,)

    def holds(self, parameter: nn.Parameter) -> bool:
        return super().holds(parameter) and self.buffer.topology_name in self.module._buffers

    def reduce(self, entries: torch.Tensor) -> torch.Tensor:
        return self.pattern.reduce(whole(entries).reshape(self.dense_shape))

    @torch.no_grad()
    def rewire(self, topology: torch.Tensor) -> torch.Tensor:
        before = self.buffer.active.clone()
        self.topology.copy_(topology)
        self.buffer.apply(self.parameter)
        return before != self.buffer.active

    def open_probe(self, dense: bool) -> None:
        """Nothing to do: the weight is dense, and so is its gradient."""

    def close_probe(self) -> torch.Tensor | None:
        parameter = self.parameter
        if parameter.grad is None:
            return torch.zeros(self.dense_shape, dtype=parameter.dtype, device=parameter.device)
        return whole(parameter.grad).reshape(self.dense_shape)

    def keep_zeros(self) -> None:
        self.buffer.apply(self.parameter)

    def keep_gradient_zeros(self) -> None:
        self.buffer.apply(self.parameter.grad)


def plain_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """All modules, each once, by the names that they have in the plain model, whatever it is wrapped in."""
    while isinstance(model, DistributedDataParallel) or hasattr(model, "_orig_mod"):
        model = model.module if isinstance(model, DistributedDataParallel) else model.get_submodule("_orig_mod")
    for path, module in model.named_modules():
        yield ".".join(part for part in path.split(".") if part not in _WRAPPERS), module


def sparse_weights(model: nn.Module) -> dict[str, SparseWeight]:
    """All sparse weights of a model by layer name, each once, in the model's order.

    Names are those of the plain model, whatever it is wrapped in: random numbers depend on them.
    """
    uses = Counter(id(module) for _, module in model.named_modules(remove_duplicate=False))
    found: dict[str, SparseWeight] = {}
    for name, module in plain_modules(model):
        if isinstance(module, SparseLinear):
            found[name] = CompactWeight(name, module, shared=uses[id(module)] > 1)
        for buffer in masked_weights(module):
            key = name if buffer.weight_name == "weight" else f"{name}.{buffer.weight_name}".lstrip(".")
            found[key] = MaskedWeight(key, buffer)
    return found
