"""How blocks of a gradual method become compact once it has ended, where that is faster; and the table that says so."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

import torch
from torch import nn

from sparsam.measure.device_profile import DeviceProfile
from sparsam.sparse.layers import SparseLinear
from sparsam.sparse.patterns import Block
from sparsam.sparse.sparsify import compact
from sparsam.sparse.table import LayerRow, SparsityTable
from sparsam.sparse.weights import SparseWeight, sparse_weights

if TYPE_CHECKING:
    from sparsam.recipe.sections import Recipe

__all__ = ["Products", "current", "make_compact", "restored", "settled"]

# layer -> how its blocks are multiplied once they are compact
Products = Mapping[str, Literal["kernel", "dense"]]


def current(table: SparsityTable, model: nn.Module) -> SparsityTable:
    """The table with the densities that the layers have now."""
    weights = sparse_weights(model)
    return _with_rows(table, [_counted(row, weights.get(row.name)) for row in table.rows])


def settled(
    table: SparsityTable, model: nn.Module, profile: DeviceProfile, recipe: Recipe
) -> tuple[SparsityTable, Products]:
    """What becomes of each layer after the last change of its topology: the table, and the layers that are compact.

    Each masked layer is timed at its own density. Where compact is not faster, `sparsity.if_slow` decides: "dense"
    leaves it masked.
    """
    rows, products = [], {}
    weights = sparse_weights(model)
    for row in current(table, model).rows:
        weight = weights.get(row.name)
        if weight is not None and row.storage == "compact":
            products[row.name] = _product_of(weight)
        elif weight is not None and _can_be_compact(row, weight):
            row, product = _decided(row, weight, profile, recipe)
            if product is not None:
                products[row.name] = product
        rows.append(row)
    return _with_rows(table, rows), products


def restored(
    table: SparsityTable | None,
    model: nn.Module,
    products: Products | None,
    weights: Mapping[str, torch.Tensor],
    profile: DeviceProfile,
    recipe: Recipe,
) -> SparsityTable | None:
    """Brings a model, as `Sparsity.apply` has left it, to where a checkpoint was taken; before there is an optimiser.

    Args:
        table: what `apply` returned; None for a dense recipe.
        model: changed in place.
        products: the layers that had become compact, or None.
        weights: state of the model.
        profile: the timings of that training.
        recipe: of that training.

    Returns:
        The table of then.
    """
    if products is not None:
        make_compact(model, products)
    model.load_state_dict(weights)
    if table is None or products is None:
        return table
    return settled(table, model, profile, recipe)[0]


def make_compact(model: nn.Module, products: Products, optimizer: torch.optim.Optimizer | None = None) -> None:
    """Stores these layers compact, without dead slots; the optimiser's state moves along."""
    if not products:
        return
    compact(model, optimizer, include=list(products))
    for name, product in products.items():
        layer = model.get_submodule(name)
        assert isinstance(layer, SparseLinear), f"{name} did not become compact"
        layer.product = product


def _decided(
    row: LayerRow, weight: SparseWeight, profile: DeviceProfile, recipe: Recipe
) -> tuple[LayerRow, Literal["kernel", "dense"] | None]:
    assert recipe.sparsity is not None
    assert isinstance(weight.pattern, Block)
    tokens = recipe.training.batch * recipe.training.context
    out_features, in_features = weight.dense_shape
    rows, cols = weight.pattern.rows, weight.pattern.cols
    timing = profile.linear(tokens, in_features, out_features, rows, cols, row.density, recipe.format)
    storage, product = "compact", "kernel"
    if timing.compact_ms < timing.dense_ms:
        reason = f"masked at first, then compact: {timing.dense_ms / timing.compact_ms:.1f}x faster than dense"
    elif recipe.sparsity.if_slow == "dense":
        storage, reason = "masked", "compact measured slower: stays masked"
    elif recipe.sparsity.if_slow == "scatter":
        product, reason = "dense", "masked at first; compact measured slower: scattered for a dense product"
    else:
        reason = "masked at first; compact measured slower: used as asked"
    row = dataclasses.replace(
        row, storage=storage, reason=reason, compact_ms=timing.compact_ms, dense_ms=timing.dense_ms
    )
    return row, (product if storage == "compact" else None)  # type: ignore[return-value]


def _can_be_compact(row: LayerRow, weight: SparseWeight) -> bool:
    plain = row.kind in ("Linear", "ActivatedLinear") and not row.reason.startswith("tied with")
    return plain and isinstance(weight.pattern, Block)


def _product_of(weight: SparseWeight) -> Literal["kernel", "dense"]:
    return weight.module.product if isinstance(weight.module, SparseLinear) else "kernel"


def _counted(row: LayerRow, weight: SparseWeight | None) -> LayerRow:
    if weight is None:
        return row
    active = int(weight.topology.sum())
    return dataclasses.replace(row, density=active / weight.topology.numel(), active_units=active)


def _with_rows(table: SparsityTable, rows: list[LayerRow]) -> SparsityTable:
    return dataclasses.replace(table, rows=tuple(rows))
