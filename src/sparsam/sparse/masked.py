"""Masked storage: the weight stays a dense tensor, and its zeros stay zero. Fewer FLOPs on paper, same time.

A weight of any shape is seen as a matrix (first axis, everything else), and that is where a pattern lays its units:

| layer | rows | columns |
|---|---|---|
| Linear and its subclasses, RNN cells | out_features; for gates, each gate's rows one after the other | in_features |
| Conv1d, Conv2d, Conv3d | out_channels | in_channels / groups * kernel size, the taps of one channel side by side |
| ConvTranspose1d, 2d, 3d | in_channels | out_channels / groups * kernel size |
| MultiheadAttention | the rows of q, k and v one after the other | what each attends over |
| RNN, GRU, LSTM | each gate's rows one after the other | inputs, or hidden states |
| Embedding, EmbeddingBag | one row for each token | features |

So for a convolution the columns of a block, or the m neighbours of n:m, run through the taps of one input channel
before they come to the next channel; formats of GPUs that want n:m along channels are another order. What is masked is
the tensor alone: it stays the parameter that it was, and code that reads it without calling the layer (the fast path of
attention, a recurrent kernel with flattened weights) reads its zeros.
"""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import nn
from torch.nn.utils import parametrize

from sparsam.shards import own, own_part
from sparsam.sparse.patterns import Pattern

__all__ = [
    "MASKABLE",
    "TopologyBuffer",
    "add_topology",
    "maskable",
    "masked_weights",
    "plain_parameter",
    "remove_topology",
    "reparametrised",
]

# The weights that masked storage accepts, as globs by module type: everything else is listed with the reason.
MASKABLE: dict[type[nn.Module], tuple[str, ...]] = {
    nn.Linear: ("weight",),
    nn.Embedding: ("weight",),
    nn.EmbeddingBag: ("weight",),
    nn.Conv1d: ("weight",),
    nn.Conv2d: ("weight",),
    nn.Conv3d: ("weight",),
    nn.ConvTranspose1d: ("weight",),
    nn.ConvTranspose2d: ("weight",),
    nn.ConvTranspose3d: ("weight",),
    nn.MultiheadAttention: ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight"),
    nn.RNNBase: ("weight_ih_l*", "weight_hh_l*", "weight_hr_l*"),
    nn.RNNCellBase: ("weight_ih", "weight_hh"),
}
_SUFFIX = "_topology"
_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # the integers of the same size, by bytes
# What the hooks of torch.nn.utils leave beside a weight that they took away, and who they are.
_HOOKED = (
    (("_v", "_g"), "torch.nn.utils.weight_norm"),
    (("_orig", "_u"), "torch.nn.utils.spectral_norm"),
    (("_orig", "_mask"), "torch.nn.utils.prune"),
)


@dataclass(frozen=True)
class TopologyBuffer:
    """Where a masked weight and its topology live. The topology is a persistent bool buffer of the same module.

    Attributes:
        module: the owner of the weight.
        weight_name: the weight's name in the module.
        pattern: the pattern of its units.
    """

    module: nn.Module
    weight_name: str
    pattern: Pattern

    @property
    def parameter(self) -> nn.Parameter:
        return plain_parameter(self.module, self.weight_name)

    @property
    def topology_name(self) -> str:
        return self.weight_name + _SUFFIX

    @property
    def topology(self) -> torch.Tensor:
        return self.module.get_buffer(self.topology_name)

    @property
    def active(self) -> torch.Tensor:
        """bool of the weight's shape, True = entry of an active unit."""
        shape = self.parameter.shape
        return self.pattern.expand(self.topology, (shape[0], shape[1:].numel())).view(shape)

    @torch.no_grad()
    def apply(self, entries: torch.Tensor | None) -> None:
        """Sets a tensor of the weight's shape to zero outside the topology; also where it holds NaN."""
        if entries is not None:
            # times 0 or 1 as integers: NaN becomes 0 too, without the branch per entry that masked_fill_ takes
            own(entries).view(_BITS[entries.element_size()]).mul_(own_part(self.active, entries))


def add_topology(module: nn.Module, weight_name: str, topology: torch.Tensor, pattern: Pattern) -> TopologyBuffer:
    """Registers a weight's topology beside it and sets the inactive weights to zero."""
    module.register_buffer(weight_name + _SUFFIX, topology.to(module.get_parameter(weight_name).device))
    # read back by masked_weights: a copied or unpickled module must know its own pattern
    module.__dict__.setdefault("_sparsam_patterns", {})[weight_name] = pattern
    buffer = TopologyBuffer(module, weight_name, pattern)
    buffer.apply(buffer.parameter)
    return buffer


def remove_topology(module: nn.Module, weight_name: str) -> None:
    """Takes the topology away; the zeros stay until training fills them."""
    delattr(module, weight_name + _SUFFIX)
    patterns = module.__dict__["_sparsam_patterns"]
    del patterns[weight_name]
    if not patterns:
        del module.__dict__["_sparsam_patterns"]


def masked_weights(module: nn.Module) -> list[TopologyBuffer]:
    """The masked weights that a module owns itself."""
    patterns: dict[str, Pattern] = module.__dict__.get("_sparsam_patterns", {})
    return [TopologyBuffer(module, name, pattern) for name, pattern in patterns.items()]


def maskable(module: nn.Module, weight_name: str) -> bool:
    """Whether masked storage accepts this weight of this module."""
    return any(
        isinstance(module, kind) and fnmatchcase(weight_name, name)
        for kind, names in MASKABLE.items()
        for name in names
    )


def reparametrised(module: nn.Module, weight_name: str) -> str:
    """Who computes a weight anew at every forward, so that zeros in its parts are not zeros in it; or nothing.

    Args:
        module: the layer, or the list of its parametrizations.
        weight_name: the weight, or a part of it such as weight_v or weight_orig.
    """
    if isinstance(module, parametrize.ParametrizationList):
        return ", ".join(type(one).__name__.lstrip("_") for one in module)
    if parametrize.is_parametrized(module, weight_name):
        return reparametrised(module.get_submodule(f"parametrizations.{weight_name}"), "")
    for ends, who in _HOOKED:
        stems = {weight_name, *(weight_name.removesuffix(end) for end in ends)}
        if any(all(hasattr(module, stem + end) for end in ends) for stem in stems):
            return who
    return ""


def plain_parameter(module: nn.Module, name: str) -> nn.Parameter:
    """A parameter that the module holds itself.

    Raises:
        ValueError: it is computed from others by now, or gone.
    """
    parameter = module._parameters.get(name)
    if parameter is None:
        who = reparametrised(module, name) or "other code"
        raise ValueError(
            f"{type(module).__name__}: expected the sparse {name} to be a parameter, but {who} replaced it after "
            "sparsify. Undo that, or densify the model."
        )
    return parameter
