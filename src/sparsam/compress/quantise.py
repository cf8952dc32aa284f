"""One verb on a trained model: its linear layers get integer weights, in place, for inference.

Zeros of sparse weights are exactly zero afterwards, and scales are never zero. `calibrate` gives scales of inputs;
`QuantisationAware` trains for it. Own code, not torchao's, for what docs/precision.md says.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from torch import nn

from sparsam.compress.layers import GroupQuantisedLinear, QuantisedLinear, QuantisedSparseLinear
from sparsam.formats import non_finite
from sparsam.select import nearest, select
from sparsam.shards import refuse_sharded
from sparsam.sparse.candidates import places, read_by_attention
from sparsam.sparse.layers import ActivatedLinear, SparseLinear
from sparsam.sparse.masked import masked_weights
from sparsam.sparse.patterns import Block

__all__ = ["linear_layers", "quantise", "reason_to_stay"]


def quantise(
    model: nn.Module,
    weights: Literal["int8", "int4"] = "int8",
    *,
    group: int = 32,
    input_scales: Mapping[str, float] | None = None,
    include: Sequence[str] = ("*",),
    exclude: Sequence[str] = (),
) -> dict[str, str]:
    """Replaces linear layers by quantised ones, in place: their weights are rounded, not trained.

    int8: symmetric, a scale for each output row, in blocks too; masked blocks become blocks. Inputs become int8 at each
    call, each row by its own scale, or by that of calibration. int4: symmetric, a scale in bfloat16 for each group of
    weights along the input; groups of block-sparse layers lie inside their blocks; inputs stay as they are.

    Layers that other code reads without calling them (tied ones, those of nn.MultiheadAttention) and subclasses of
    nn.Linear stay as they are.

    Args:
        model: trained, not wrapped or compiled, with its session detached.
        weights: the format.
        group: weights that share a scale, for int4. Must divide the input features, or the columns of a block.
        input_scales: layer -> scale of its int8 input, from `calibrate` or `QuantisationAware.input_scales`. All other
            layers take a scale for each row; scales of layers that stay are not used.
        include: globs over the names of linear layers.
        exclude: globs that leave layers out again.

    Returns:
        Linear layer -> what it has become ("int8", "int8 blocks", "int4", "int4 blocks"), or why it stays.

    Raises:
        ValueError: an unknown format, a scale of no linear layer or that is not above zero, a weight that
            is not finite, a group that does not fit, or nothing to quantise.
    """
    if weights not in ("int8", "int4"):
        raise ValueError(f"quantise: expected weights of 'int8' or 'int4', got {weights!r}. Name one of the two.")
    if input_scales and weights == "int4":
        raise ValueError("quantise: expected no input_scales for int4, whose inputs stay as they are. Leave them out.")
    refuse_sharded(model, "quantise", "Load its state into a plain model and quantise that.")
    layers, scales = linear_layers(model), dict(input_scales or {})
    if any(isinstance(one, SparseLinear) and one.attached for one in layers.values()):
        raise ValueError("quantise: expected a model that no session trains, got one. Call session.detach() first.")
    if odd := [name for name in scales if name not in layers]:
        raise ValueError(
            f"input_scales: expected those of linear layers, got {odd[0]!r}. {nearest(odd[0], list(layers))}"
        )
    chosen = set(select(layers, include, exclude))
    done: dict[str, str] = {}
    made: list[tuple[nn.Module, nn.Module]] = []
    for name, module in layers.items():
        reason = "left out" if name not in chosen else reason_to_stay(model, module)
        if reason:
            done[name] = reason
            continue
        new, done[name] = _quantised(name, module, weights, group, scales.get(name))
        made.append((module, new))
    if not made:
        reasons = "; ".join(f"{name}: {why}" for name, why in list(done.items())[:4])
        raise ValueError(f"quantise: no linear layer to quantise ({reasons or 'the model has none'}).")
    for old, new in made:  # only once nothing can fail any more
        for parent, attribute in places(model, old):
            setattr(parent, attribute, new)
    return done


def linear_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Dense and block-sparse linear layers by name, each once; one that is the model itself is refused.

    Raises:
        ValueError: the model is a single layer, which cannot be replaced in place.
    """
    found: dict[str, nn.Module] = {
        name: one for name, one in model.named_modules() if isinstance(one, nn.Linear | SparseLinear)
    }
    if "" in found:
        raise ValueError(
            f"expected a model that contains its layers, got a {type(model).__name__} itself. "
            "Put it into nn.Sequential."
        )
    return found


def reason_to_stay(model: nn.Module, module: nn.Module) -> str:
    """Why a linear layer cannot be replaced by a quantised one, or nothing."""
    if isinstance(module, SparseLinear):
        return ""
    if type(module) not in (nn.Linear, ActivatedLinear):
        return f"a subclass of nn.Linear ({type(module).__name__})"
    if read_by_attention(model, module):
        return "read by attention without being called"
    weight = module._parameters.get("weight")
    if weight is None:
        return "its weight is computed by other code"
    owners = sum(one is weight for other in model.modules() for one in other._parameters.values())
    return "tied with another layer" if owners > 1 else ""


def _quantised(
    name: str, module: nn.Module, weights: str, group: int, input_scale: float | None
) -> tuple[nn.Module, str]:
    layer = _in_blocks(module)
    if bad := non_finite(layer.values if isinstance(layer, SparseLinear) else layer.weight):
        raise ValueError(f"{name}: expected finite weights, got {bad} that are not. Load an earlier checkpoint.")
    if input_scale is not None and not 0 < input_scale < float("inf"):
        raise ValueError(f"{name}: expected an input scale above zero, got {input_scale}. calibrate gives no others.")
    suffix = " blocks" if isinstance(layer, SparseLinear) else ""
    if weights == "int4":
        try:
            return GroupQuantisedLinear.from_layer(layer, group), f"int4{suffix}"
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
    if isinstance(layer, SparseLinear):
        return QuantisedSparseLinear.from_sparse(layer, input_scale), "int8 blocks"
    return QuantisedLinear.from_linear(layer, input_scale), "int8"


def _in_blocks(module: nn.Module) -> nn.Linear | SparseLinear:
    """A layer as it is, or the blocks of one whose blocks are masked."""
    assert isinstance(module, nn.Linear | SparseLinear)
    for buffer in masked_weights(module):
        buffer.apply(buffer.parameter)  # a load may have written where there is no unit
        if isinstance(module, nn.Linear) and isinstance(buffer.pattern, Block):
            return SparseLinear.from_dense(module, buffer.topology, buffer.pattern)
    return module
