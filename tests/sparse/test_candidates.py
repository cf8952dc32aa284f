"""Which layers are left dense, and the reason that the table gives."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import nn

import sparsam as sp


def test_a_layer_that_the_allocation_makes_dense_is_stored_dense() -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 64))

    def allocation(shapes: Mapping[str, tuple[int, ...]], density: float) -> dict[str, float]:
        return {"0": 1.0, "1": 0.25}

    table = sp.sparsify(model, sp.Block(8, 8), 0.5, allocation=allocation)
    assert [(row.storage, row.reason) for row in table.rows] == [
        ("dense", "density 1: nothing to leave out"),
        ("compact", "asked for"),
    ]
    assert type(model[0]) is nn.Linear


def test_a_layer_with_hooks_keeps_them() -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 64))
    calls = []
    model[0].register_forward_hook(lambda *_: calls.append(1))
    table = sp.sparsify(model, sp.Block(8, 8), 0.5)
    model(torch.zeros(1, 32))
    assert table.rows[0].storage == "dense"
    assert table.rows[0].reason.startswith("has hooks")
    assert calls == [1]


def test_an_unknown_format_is_refused_without_a_profile_too() -> None:
    with pytest.raises(ValueError, match=r"format: expected bf16, fp32, got 'fp8'\."):
        sp.sparsify(nn.Sequential(nn.Linear(32, 32)), sp.Block(8, 8), 0.5, format="fp8")


def test_inspect_takes_what_sparsify_takes() -> None:
    model = nn.Sequential(nn.Linear(32, 32))
    options = {"sparse_fan_in": True, "headroom": 0.5, "optimizer": None}
    assert str(sp.inspect(model, sp.Block(8, 8), 0.5, **options)) == str(
        sp.sparsify(model, sp.Block(8, 8), 0.5, **options)
    )


def test_a_masked_layer_that_is_reparametrised_later_is_named() -> None:
    model = nn.Sequential(nn.Linear(32, 32))
    sp.sparsify(model, sp.Unstructured(), 0.5)
    nn.utils.parametrizations.weight_norm(model[0])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(
        ValueError,
        match=r"expected the sparse weight to be a parameter, but WeightNorm replaced it after sparsify\. Undo",
    ):
        sp.Session(model, optimizer, [sp.SparseTraining(sp.static())])


@pytest.mark.parametrize("name", ["PagedAdamW8bit", "Lion8bit", "CAME", "GaLoreAdamW", "Muon", "Adafactor"])
def test_optimisers_that_read_shapes_are_refused_by_name(name: str) -> None:
    model = nn.Sequential(nn.Linear(32, 32))
    sp.sparsify(model, sp.Block(8, 8), 0.5)
    optimizer = type(name, (torch.optim.SGD,), {})(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=f"{name}: expected an element-wise optimiser"):
        sp.Session(model, optimizer, [sp.SparseTraining(sp.static())])
