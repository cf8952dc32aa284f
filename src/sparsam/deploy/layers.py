"""How each kind of sparse or quantised layer becomes ordinary tensors and a row of the layer table, and back.

What the tensors and rows mean to another program: docs/format.md.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from sparsam.compress.layers import GroupQuantisedLinear, QuantisedLinear, QuantisedSparseLinear
from sparsam.sparse.candidates import places
from sparsam.sparse.layers import SparseLinear
from sparsam.sparse.masked import TopologyBuffer, add_topology, masked_weights, remove_topology
from sparsam.sparse.patterns import NM, Block, Neuron, Pattern, Unstructured

__all__ = ["Row", "restore_layer", "store_layers"]

Row = dict[str, Any]

_FORMATS = {torch.float64: "fp64", torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
_PATTERNS = (Block, Unstructured, NM, Neuron)
_WIDEST = 2**16  # block rows or columns that 16 bits can count
_WORTH = 7 / 8  # of weights that are not zero: above, a bit for each costs more than the zeros do


def store_layers(model: nn.Module) -> tuple[dict[str, Row], dict[str, Tensor], set[str]]:
    """What a model's layers are on disk.

    Returns:
        The layer table, the tensors that stand for these layers, and the names in the model's state that they replace.

    Raises:
        ValueError: the model is a single sparse layer, or has a pattern that the form does not know.
    """
    rows: dict[str, Row] = {}
    tensors: dict[str, Tensor] = {}
    replaced: set[str] = set()
    for name, module in model.named_modules():
        if isinstance(module, SparseLinear | QuantisedLinear | QuantisedSparseLinear | GroupQuantisedLinear):
            if not name:
                raise ValueError(
                    f"save: expected a model that contains its layers, got a {type(module).__name__} itself. "
                    "Put it into nn.Sequential."
                )
            rows[name], own = _linear(module)
            tensors |= {f"{name}.{key}": tensor for key, tensor in own.items()}
            replaced |= {f"{name}.{key}" for key in module.state_dict()}
        for buffer in masked_weights(module):
            key = f"{name}.{buffer.weight_name}".lstrip(".")
            rows[key], own = _masked(buffer)
            tensors |= {f"{key}.{part}": tensor for part, tensor in own.items()}
            replaced |= {key, f"{name}.{buffer.topology_name}".lstrip(".")}
    return rows, tensors, replaced


def restore_layer(model: nn.Module, name: str, row: Row, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Puts a stored layer in the place of what a model has there, or a topology on its weight.

    Args:
        model: changed in place; its layer is dense, or already of the kind that is stored.
        name: of the layer, or of a masked weight.
        row: of the layer table.
        tensors: of the whole file; those of this layer are taken out.

    Returns:
        Tensors for the model's `load_state_dict`, by their names there.

    Raises:
        ValueError: the model has no such layer, or one of another shape; or the tensors contradict the table.
    """
    if row["storage"] == "masked" and row["format"] != "int8":
        return _restore_masked(model, name, row, tensors)
    old = _submodule(model, name)
    out_features, in_features = row["shape"]
    found = getattr(old, "out_features", None), getattr(old, "in_features", None)
    if found != (out_features, in_features):
        raise ValueError(
            f"{name}: expected a linear layer of {out_features} x {in_features}, the model has "
            f"{type(old).__name__} {found[0]} x {found[1]}. Build the model that was saved."
        )
    own = {key: tensors.pop(f"{name}.{key}") for key in row["tensors"]}
    new = _restored_linear(row, own).train(old.training).to(_device_of(old))
    for parent, attribute in places(model, old):
        setattr(parent, attribute, new)
    return {f"{name}.{key}": tensor for key, tensor in own.items()}


def _linear(
    module: SparseLinear | QuantisedLinear | QuantisedSparseLinear | GroupQuantisedLinear,
) -> tuple[Row, dict[str, Tensor]]:
    row: Row = {"storage": "dense", "format": "int8", "shape": [module.out_features, module.in_features]}
    tensors = {key: tensor.detach() for key, tensor in module.state_dict().items()}
    if isinstance(module, QuantisedLinear):
        nonzero = tensors["values"] != 0
        if float(nonzero.float().mean()) < _WORTH:
            row |= {"storage": "masked", "pattern": _pattern_row(Unstructured())}
            tensors |= {"topology": _bits(nonzero), "values": tensors["values"][nonzero]}
    else:
        row |= {"storage": "blocks", "pattern": _pattern_row(module.pattern)}
        tensors |= _addresses(module.block_row, module.block_col)
    if isinstance(module, SparseLinear):
        live = module.row_slots[: int(module.row_start[-1])].long()  # in row-major order, without dead slots
        tensors |= {"values": module.values.detach()[live]}
        tensors |= _addresses(module.block_row[live], module.block_col[live])
        row |= {"format": _FORMATS[module.values.dtype], "product": module.product}
    elif isinstance(module, GroupQuantisedLinear):
        row |= {"format": "int4", "group": module.group}
    row |= {"activation": module.activation, "tensors": sorted(tensors)}
    return row, tensors


def _restored_linear(row: Row, own: dict[str, Tensor]) -> nn.Module:
    """An empty layer of the stored kind; `own` becomes its state."""
    out_features, in_features = row["shape"]
    bias, activation = "bias" in own, row["activation"]
    static = 1.0 if "input_scale" in own else None
    if row["storage"] in ("dense", "masked") and row["format"] == "int8":
        if row["storage"] == "masked":
            topology = _unpacked(own.pop("topology"), (out_features, in_features))
            own["values"] = torch.zeros(topology.shape, dtype=torch.int8).masked_scatter(topology, own["values"])
        return QuantisedLinear(in_features, out_features, bias, activation, static)
    pattern = _pattern(row["pattern"])
    assert isinstance(pattern, Block)
    topology = torch.zeros(pattern.grid((out_features, in_features)), dtype=torch.bool)
    for key in ("block_row", "block_col"):
        own[key] = own[key].to(torch.int32)
    topology[own["block_row"].long(), own["block_col"].long()] = True
    row_found, col_found = topology.nonzero(as_tuple=True)
    if not (torch.equal(row_found.int(), own["block_row"]) and torch.equal(col_found.int(), own["block_col"])):
        raise ValueError("block addresses are not in row-major order, each once")
    if row["format"] == "int8":
        return QuantisedSparseLinear(
            in_features, out_features, topology, pattern, bias=bias, activation=activation, input_scale=static
        )
    if row["format"] == "int4":
        return GroupQuantisedLinear(
            in_features, out_features, topology, pattern, row["group"], bias=bias, activation=activation
        )
    return SparseLinear(
        in_features, out_features, topology, pattern, bias=bias, activation=activation, product=row["product"],
        dtype=own["values"].dtype,
    )  # fmt: skip


def _masked(buffer: TopologyBuffer) -> tuple[Row, dict[str, Tensor]]:
    weight = buffer.parameter.detach()
    row = {
        "storage": "masked",
        "format": _FORMATS[weight.dtype],
        "shape": list(weight.shape),
        "pattern": _pattern_row(buffer.pattern),
        "tensors": ["topology", "values"],
    }
    return row, {"topology": _bits(buffer.topology), "values": weight[buffer.active]}


def _restore_masked(model: nn.Module, name: str, row: Row, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    owner, _, weight_name = name.rpartition(".")
    module = _submodule(model, owner)
    old = module._parameters.get(weight_name)
    if old is None or list(old.shape) != row["shape"]:
        found = "none" if old is None else f"one of {list(old.shape)}"
        raise ValueError(f"{name}: expected a weight of {row['shape']}, got {found}. Build the model that was saved.")
    pattern = _pattern(row["pattern"])
    matrix = old.shape[0], math.prod(old.shape[1:])
    topology = _unpacked(tensors.pop(f"{name}.topology"), pattern.grid(matrix))
    active, values = pattern.expand(topology, matrix).view(old.shape), tensors.pop(f"{name}.values")
    if int(active.sum()) != len(values):
        raise ValueError(f"{name}: {len(values)} values for {int(active.sum())} active weights")
    if any(buffer.weight_name == weight_name for buffer in masked_weights(module)):
        remove_topology(module, weight_name)
    buffer = add_topology(module, weight_name, topology, pattern)
    weight = torch.zeros(old.shape, dtype=values.dtype).masked_scatter(active, values)
    return {name: weight, f"{owner}.{buffer.topology_name}".lstrip("."): topology}


def _addresses(block_row: Tensor, block_col: Tensor) -> dict[str, Tensor]:
    """In 16 bits, unless there are more block rows or columns than they can count."""
    largest = max((int(one.max()) for one in (block_row, block_col) if len(one)), default=0)
    dtype = torch.uint16 if largest < _WIDEST else torch.int32
    return {"block_row": block_row.to(dtype), "block_col": block_col.to(dtype)}


def _bits(topology: Tensor) -> Tensor:
    """A bool grid as uint8, eight units in a byte, row-major, the first in the highest bit."""
    return torch.from_numpy(numpy.packbits(topology.cpu().numpy().reshape(-1)))


def _unpacked(bits: Tensor, shape: tuple[int, ...]) -> Tensor:
    count = math.prod(shape)
    return torch.from_numpy(numpy.unpackbits(bits.numpy(), count=count).astype(bool)).view(shape)


def _pattern_row(pattern: Pattern) -> Mapping[str, Any]:
    if type(pattern) not in _PATTERNS:
        names = ", ".join(one.__name__ for one in _PATTERNS)
        raise ValueError(
            f"save: expected a pattern of {names}, got {type(pattern).__name__}. Densify that layer before."
        )
    return {"kind": type(pattern).__name__, **dataclasses.asdict(pattern)}  # type: ignore[call-overload]


def _pattern(row: Mapping[str, Any]) -> Pattern:
    kind = next(one for one in _PATTERNS if one.__name__ == row["kind"])
    found: Pattern = kind(**{key: value for key, value in row.items() if key != "kind"})
    return found


def _submodule(model: nn.Module, name: str) -> nn.Module:
    try:
        return model.get_submodule(name)
    except AttributeError:
        raise ValueError(f"{name}: the model has no layer of this name. Build the model that was saved.") from None


def _device_of(module: nn.Module) -> torch.device:
    return next((one.device for one in (*module.parameters(), *module.buffers())), torch.device("cpu"))
